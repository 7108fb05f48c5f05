"""Static tables on a GPU: every row is resident, a lookup is one kernel, and lookups beside writes show no wrong vector."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from hps.cache.integrity import hashes_of
from hps.tensors.batch import Batch
from hps.testing.caches import DEFAULT, distinct_keys, spec
from tests.gpu.cupy_if_installed import CupyCache, cupy
from tests.gpu.linked_tables import LinkedTables, rows_of

if cupy:
    from hps.cache.cuda import device, lookup, pooling, queries

pytestmark = pytest.mark.gpu


def device_rows(keys: Any, dim: int) -> Any:
    """Vectors that encode key and position, computed on the device."""
    words = keys.view(cupy.uint64)[:, None] * cupy.uint64(0x9E3779B97F4A7C15) + cupy.arange(dim, dtype=cupy.uint64)[None, :]
    return (((words * cupy.uint64(0x2545F4914F6CDD1D)) >> cupy.uint64(40)).astype(cupy.float32)).copy()


@contextmanager
def counted_launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Handles of all kernels that this package launches inside the block."""
    handles: list[int] = []
    plain, dependent, repeat = device.launch, device.DependentLaunch.launch, lookup.launch_and_wait

    def launch(handle: int, *arguments: Any) -> None:
        handles.append(handle)
        plain(handle, *arguments)

    def launch_dependent(self: Any, handle: int, *arguments: Any) -> None:
        handles.append(handle)
        dependent(self, handle, *arguments)

    def launch_repeat(driver: Any, words: Any, *rest: Any) -> int:
        handles.append(int(words[0]))
        return repeat(driver, words, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(lookup, "launch_and_wait", launch_repeat)
        for module in (lookup, queries, pooling):
            patch.setattr(module, "launch", launch)
        patch.setattr(device.DependentLaunch, "launch", launch_dependent)
        yield handles


@pytest.mark.parametrize(("tables", "rows", "dim"), [(26, 200_000, 16), (1, 6_000_000, 8)])
def test_no_key_of_a_full_scan_misses(tables: int, rows: int, dim: int, monkeypatch: pytest.MonkeyPatch):
    specs = [spec(dim, f"t{index}", 1 << 23) for index in range(tables)]
    cache: Any = CupyCache.create(specs, [rows] * tables, 0, static=True)
    try:
        keys = [cupy.arange(rows, dtype=cupy.int64) * 7 + index for index in range(tables)]
        step = 1 << 18
        for index in range(tables):
            for start in range(0, rows, step):
                part = keys[index][start : start + step]
                cache.insert(index, part, device_rows(part, dim))
            stats = cache.stats(index)
            assert (stats.resident_rows, stats.unplaced, stats.evictions) == (rows, 0, 0)
            assert stats.capacity_rows <= 1.19 * rows
        cache.mark_complete(complete=True)
        ask = cache.create_lookup()
        for start in range(0, rows, step):
            parts = [each[start : start + step] for each in keys]
            outs = [cupy.empty((part.size, dim), cupy.float32) for part in parts]
            batches = [Batch.of(index, parts[index], outs[index]) for index in range(tables)]
            with counted_launches(monkeypatch) as launched:
                assert ask.query(Batch.merged(batches)) == 0
            assert len(launched) == 1
            assert sum(ask.absent) == 0
            for part, out in zip(parts, outs, strict=True):
                assert bool((out == device_rows(part, dim)).all())
        absent = cupy.arange(1000, dtype=cupy.int64) - 5000
        out, found = cupy.empty((1000, dim), cupy.float32), cupy.ones(1000, cupy.bool_)
        with counted_launches(monkeypatch) as launched:
            assert ask.query(Batch.of(0, absent, out, found)) == 0
        assert len(launched) == 1
        assert list(ask.absent) == [1000]
        assert bool((out == np.float32(DEFAULT)).all())
        assert not bool(found.any())
    finally:
        cupy.cuda.Device().synchronize()
        cache.close()


@contextmanager
def static_tables(dims: Sequence[int], rows: int) -> Iterator[tuple[LinkedTables, list[np.ndarray]]]:
    """Complete static tables above a hash map with the same rows."""
    with LinkedTables(dims, 28) as tables:
        tables.cache.close()
        tables.cache = CupyCache.create(tables.specs, [rows] * len(dims), 0, static=True)
        keys = [distinct_keys(rows, seed) for seed in range(1, len(dims) + 1)]
        for table, dim in enumerate(dims):
            tables.attach(table)
            vectors = rows_of(keys[table], dim)
            tables.database.insert(tables.specs[table].tag, keys[table], vectors)
            tables.cache.insert(table, keys[table], vectors)
        tables.cache.mark_complete(complete=True)
        yield tables, keys


class TestLookups:
    def test_a_lookup_that_nobody_waits_for_is_one_kernel_and_counts_absent_keys(self, monkeypatch: pytest.MonkeyPatch):
        with static_tables([32, 128, 7], 5000) as (tables, keys):
            ask = tables.cache.create_lookup()
            asked = [np.concatenate([each[:700], np.arange(9) + table]) for table, each in enumerate(keys)]
            batches = [tables.batch(each, table) for table, each in enumerate(asked)]
            ask.prepare(Batch.merged(batches))
            for batch in batches:
                batch.outs[0][:] = cupy.nan
            cupy.cuda.Device().synchronize()
            before = [tables.cache.stream_ordered_counts(table) for table in range(3)]
            stream = cupy.cuda.Stream(non_blocking=True)
            with stream, counted_launches(monkeypatch) as launched:
                ask.enqueue(Batch.merged(batches))
            assert len(launched) == 1
            cupy.cuda.Device().synchronize()
            for table, each in enumerate(asked):
                out, found = cupy.asnumpy(batches[table].outs[0]), cupy.asnumpy(batches[table].founds[0])
                np.testing.assert_array_equal(found, np.arange(709) < 700)
                np.testing.assert_array_equal(out[:700], rows_of(each[:700], tables.specs[table].dim))
                assert (out[700:] == np.float32(DEFAULT)).all()
                now = tables.cache.stream_ordered_counts(table)
                assert (now.misses - before[table].misses, now.settled - before[table].settled) == (9, 9)
                assert (now.linked, now.absent, now.unread) == (0, 0, 0)

    def test_a_captured_lookup_is_one_kernel_and_sees_writes(self, monkeypatch: pytest.MonkeyPatch):
        with static_tables([32], 5000) as (tables, [keys]):
            ask = tables.cache.create_lookup()
            batch = tables.batch(keys[:1000])
            ask.prepare(batch)
            with counted_launches(monkeypatch) as launched:
                graph = tables.cache.record(batch, lambda seen: ask.enqueue(seen, captured=True))
            assert len(launched) == 2  # it runs once, and is captured once
            tables.cache.insert(0, keys[:500], rows_of(keys[:500], 32, 1))
            tables.cache.erase(0, keys[990:1000])
            batch.outs[0][:] = cupy.nan
            graph.launch()
            cupy.cuda.Device().synchronize()
            out = cupy.asnumpy(batch.outs[0])
            np.testing.assert_array_equal(out[:500], rows_of(keys[:500], 32, 1))
            np.testing.assert_array_equal(out[500:990], rows_of(keys[500:990], 32))
            assert (out[990:] == np.float32(DEFAULT)).all()
            assert tables.cache.stream_ordered_counts(0).settled == 10
            tables.cache.drop(0, keys[:10])  # rows that exist below are no longer resident: the graph must not call them absent
            graph.launch()
            cupy.cuda.Device().synchronize()
            assert tables.cache.stream_ordered_counts(0).unread == 20
            graph.close()

    def test_a_writer_that_keeps_a_bucket_makes_no_key_absent(self):
        """An odd version stands for a writer: the key is read from the host in the end."""
        with static_tables([32], 5000) as (tables, [keys]):
            memory = tables.cache.memory.open[0]
            raw = cupy.ndarray(
                (2 * memory.pairs, 32),
                cupy.uint16,
                cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(memory.buckets, 128 * memory.pairs, memory), 0),
            )
            raw[:, 0] |= 1
            cupy.cuda.Device().synchronize()
            out, found, ask = tables.ask(keys[:64])
            np.testing.assert_array_equal(out, rows_of(keys[:64], 32))
            assert found.all()
            assert list(ask.linked) == [64]
            raw[:, 0] &= 0xFFFE
            cupy.cuda.Device().synchronize()


def test_more_keys_of_one_home_than_its_header_counts_stand_elsewhere():
    """A header counts up to 254 keys that are not at home; from 255 on any number."""
    cache: Any = CupyCache.create([spec(4)], [3000], 0, static=True)
    candidates, buckets = np.arange(1 << 18), np.uint64(2 * cache.memory.open[0].pairs)
    keys = candidates[((hashes_of(candidates) >> np.uint64(32)) * buckets >> np.uint64(32)) == 5][:300]
    assert keys.size == 300
    for _ in range(2):
        cache.insert(0, keys, rows_of(keys, 4))
        assert cache.check_integrity() == []
        out, found = cupy.empty((300, 4), cupy.float32), cupy.zeros(300, cupy.bool_)
        ask = cache.create_lookup()
        assert ask.query(Batch.of(0, cupy.asarray(keys), out, found)) == 0
        ask.finish()
        np.testing.assert_array_equal(cupy.asnumpy(out), rows_of(keys, 4))
        cache.erase(0, keys[::-1].copy())
        assert cache.stats(0).resident_rows == 0
    cache.close()


def test_insertions_into_full_tables_end():
    """Tables of five pairs and more keys than slots: their warps need each other's pairs, and some keys have no place."""
    tables, rng = 26, np.random.default_rng(3)
    cache: Any = CupyCache.create([spec(4, f"t{index}", 1 << 20) for index in range(tables)], [1] * tables, 0, static=True)
    slots = cache.stats(0).capacity_rows
    for count in [slots - 4, slots, slots + 10] * 12:
        for table in range(tables):
            keys = rng.integers(-(2**62), 2**62, count)
            before = cache.stats(table).unplaced
            cache.insert(table, keys, rows_of(keys, 4))
            stats = cache.stats(table)
            resident = cache.dump(table)
            assert stats.resident_rows + stats.unplaced - before == count
            sides = (hashes_of(keys) >> np.uint64(32)) * np.uint64(slots // 7) >> np.uint64(32) & np.uint64(1)
            have_room = np.minimum(np.bincount(sides.astype(int), minlength=2), slots // 2).sum()  # a key stays on its side
            assert stats.resident_rows >= 0.85 * have_room
            assert np.isin(resident, keys).all()
            assert table or cache.check_integrity() == []
            cache.erase(table, keys)
            assert cache.stats(table).resident_rows == 0
    cache.close()


@pytest.mark.parametrize("settles", [True, False])
def test_queries_beside_inserts_and_erases_show_whole_vectors_of_their_keys(settles: bool):
    """Half of the keys stay, the other half come and go in a table that is nearly full, so that keys move.

    Either way 25 M vectors are checked.
    """
    dim = 32
    cache: Any = CupyCache.create([spec(dim)], [36_000], 0, static=True)
    rows = int(0.95 * cache.stats(0).capacity_rows)
    keys = distinct_keys(rows)
    stay, move = keys[: rows // 2], keys[rows // 2 :]
    cache.insert(0, keys, rows_of(keys, dim))
    cache.mark_complete(settles)
    problems: list[str] = []
    end, checked = threading.Event(), [0] * 3

    def read(reader: int) -> None:
        ask = cache.create_lookup()
        fixed, moving = cupy.asarray(stay), cupy.asarray(move)
        want, want_moving = cupy.asarray(rows_of(stay, dim)), cupy.asarray(rows_of(move, dim))
        out, found = cupy.empty((rows, dim), cupy.float32), cupy.empty(rows, cupy.bool_)
        both, wanted = cupy.concatenate([fixed, moving]), cupy.concatenate([want, want_moving])
        while not end.is_set():
            out[:] = cupy.nan
            cupy.cuda.get_current_stream().synchronize()
            ask.query(Batch.of(0, both, out, found))
            ask.finish()
            cupy.cuda.Device().synchronize()
            if not bool(found[: rows // 2].all()):
                problems.append("a key that stays was missing")
            right = (out == wanted).all(axis=1)
            if settles:
                right |= ~found & (out == np.float32(DEFAULT)).all(axis=1)
            else:
                right |= ~found
            if not bool(right.all()):
                problems.append("a vector was wrong")
            checked[reader] += rows

    readers = [threading.Thread(target=read, args=(reader,)) for reader in range(3)]
    for reader in readers:
        reader.start()
    rng = np.random.default_rng(5)
    rounds = 0
    while (rounds < 150 or sum(checked) < 25_000_000) and not problems and all(reader.is_alive() for reader in readers):
        rounds += 1
        some = rng.permutation(move)[: move.size // 3]
        cache.erase(0, some)
        cache.insert(0, np.concatenate([some, some[:100]]), rows_of(np.concatenate([some, some[:100]]), dim))
    end.set()
    for reader in readers:
        reader.join(60)
    stats = cache.stats(0)
    resident = np.sort(cache.dump(0))
    cache.close()
    assert problems == []
    assert sum(checked) >= 25_000_000
    assert (stats.resident_rows, stats.unplaced) == (rows, 0)
    np.testing.assert_array_equal(resident, np.sort(keys))
