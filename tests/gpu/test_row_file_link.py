"""A CUDA cache that is attached to tables of row files: its lookups go on into the file and the changes by themselves."""

import threading
from typing import Any

import numpy as np
import pytest

from hps.errors import DeviceError, NotReadyError
from hps.tensors.bags import Combiner, Pooling
from hps.tensors.batch import Batch
from hps.testing.caches import AWKWARD_KEYS, DEFAULT, distinct_keys, small_vectors_of
from hps.types import FloatArray, KeyArray
from tests.gpu.cupy_if_installed import cupy
from tests.gpu.linked_tables import LinkedFiles, hashes_of, rows_of
from tests.gpu.test_link import LARGE, SMALL, check, mixed
from tests.gpu.test_link_stress import Population, link_lookups, say, stress, vectors_of

if cupy:
    from hps.cache.cuda.links import CudaPinner

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("n", [1, 33, SMALL, LARGE])
@pytest.mark.parametrize("dim", [1, 2, 3, 4, 5, 16, 32, 100, 128, 300])
def test_lookups_answer_what_a_file_and_its_changes_hold(dim, n):
    known = np.union1d(distinct_keys(30_000), AWKWARD_KEYS)
    with LinkedFiles([dim], 100_000, attached=[]) as tables:
        tables.load(known, rows_of(known, dim))
        tables.attach()
        keys = mixed(known, n) if n > 1 else known[:1]
        there = np.isin(keys, known)
        for asked_again in (False, True):
            out, found, lookup = tables.ask(keys)
            check(keys, out, known)
            assert np.array_equal(found, there)
            assert sum(lookup.absent) == (~there).sum()
            if not asked_again:
                assert list(lookup.linked) == [there.sum()]
        new = np.setdiff1d(keys, known)
        for sealed in (False, True):
            changed = known[sealed::3].copy()
            tables.insert(changed, 1 + sealed)
            tables.insert(new, 1 + sealed)
            gone = known[1 + sealed :: 7].copy()
            tables.delete(gone)
            version = np.zeros(keys.size, np.int64)
            if sealed:
                version[np.isin(keys, known[::3])] = 1
            version[np.isin(keys, np.union1d(changed, new))] = 1 + sealed
            removed = np.isin(keys, gone) | (np.isin(keys, known[1::7]) & ~np.isin(keys, changed) if sealed else False)
            for _before_and_after_the_seal in range(2):
                out, found, _ = tables.ask(keys)
                assert np.array_equal(found, ~removed)
                expected = np.stack([rows_of(keys, dim, v) for v in range(3)])[version, np.arange(keys.size)]
                expected[removed] = DEFAULT
                assert np.array_equal(out, expected)
                tables.seal()
                tables.cache.erase(0, keys)


@pytest.mark.parametrize("row_dtype", ["float16", "bfloat16", "int8"])
@pytest.mark.parametrize("dim", [1, 3, 8, 32, 100, 127, 128, 300, 1001])
def test_rows_of_every_format_are_read(dim, row_dtype):
    known = np.union1d(distinct_keys(8000), AWKWARD_KEYS)
    with LinkedFiles([dim], 1000, attached=[], row_dtypes=[row_dtype]) as tables:

        def vectors(keys: KeyArray, version: int) -> FloatArray:
            return tables.stored(small_vectors_of(keys + 1000 * version, dim))

        tables.load(known, small_vectors_of(known, dim))
        tables.attach()
        tables.write(known[::3].copy(), small_vectors_of(known[::3] + 1000, dim))
        for n in (SMALL, LARGE):
            keys = mixed(known, n)
            out, found, _ = tables.ask(keys)
            assert np.array_equal(found, np.isin(keys, known))
            expected = np.where(np.isin(keys, known[::3])[:, None], vectors(keys, 1), vectors(keys, 0))
            expected[~found] = DEFAULT
            assert np.array_equal(out, expected)


def test_keys_of_equal_fingerprints_are_told_apart():
    """All records of the table match the byte of every key, so that the keys decide."""
    candidates = distinct_keys(400_000, seed=9)
    same = candidates[hashes_of(candidates) & np.uint64(255) == 77]
    known, absent = same[: same.size // 2], same[same.size // 2 :]
    with LinkedFiles([32], 0, attached=[]) as tables:
        tables.load(known, rows_of(known, 32))
        tables.attach()
        for size in (SMALL // 2, same.size):
            keys = np.random.default_rng(1).permutation(same)[:size]
            out, found, _ = tables.ask(keys)
            check(keys, out, known)
            assert np.array_equal(found, ~np.isin(keys, absent))


def test_a_table_without_a_file_has_changes_alone():
    known = distinct_keys(5000)
    with LinkedFiles([32, 8], 0) as tables:
        assert not tables.ask(known)[1].any()
        tables.insert(known)
        check(known, tables.ask(known)[0], known)
        tables.seal()
        check(known, tables.ask(known)[0], known)
        tables.delete(known)
        assert not tables.ask(known)[1].any()
        tables.seal()
        assert not tables.ask(known)[1].any()


def test_bags_of_several_tables_are_pooled():
    known, rng = distinct_keys(4000), np.random.default_rng(2)
    with LinkedFiles([4, 128], 500, attached=[]) as tables:
        for table, dim in enumerate((4, 128)):
            tables.load(known, small_vectors_of(known, dim), table)
            tables.attach(table)
            tables.write(known[::5].copy(), small_vectors_of(known[::5] + 1, dim), table)
        keys = [cupy.asarray(rng.choice(known, 3000)) for _ in range(2)]
        offsets = cupy.arange(0, 3001, 3)
        for enqueued in (False, True):
            outs = [cupy.full((1000, dim), cupy.nan, cupy.float32) for dim in (4, 128)]
            bags = Pooling(1000, offsets, 0, None, Combiner.SUM, 0.0, None)
            batch = Batch((0, 1), (3000, 3000), keys, outs, (), (bags, bags))
            lookup = tables.cache.create_lookup()
            if enqueued:
                lookup.enqueue(batch)
                cupy.cuda.get_current_stream().synchronize()
            else:
                assert lookup.query(batch) == 0
                lookup.finish()
            for one, out, dim in zip(keys, outs, (4, 128), strict=True):
                asked = cupy.asnumpy(one)
                vectors = small_vectors_of(asked + np.isin(asked, known[::5]), dim)
                assert np.array_equal(cupy.asnumpy(out), vectors.reshape(1000, 3, dim).sum(1))


@pytest.mark.parametrize("n", [SMALL, LARGE])
def test_captured_lookups_see_changes_and_new_files(n):
    known = distinct_keys(30_000)
    with LinkedFiles([32], 1000, attached=[]) as tables:
        tables.load(known, rows_of(known, 32))
        tables.attach()
        keys = mixed(known, n)
        batch = tables.batch(keys)
        lookup, captured = tables.cache.create_lookup(), iter((False, True))
        graph = tables.cache.record(batch, lambda seen: lookup.enqueue(seen, next(captured)))
        for version in range(1, 5):
            tables.insert(known, version)
            if version % 2 == 0:
                tables.seal()
            graph.launch()
            cupy.cuda.get_current_stream().synchronize()
            cupy.cuda.Device().synchronize()
            check(keys, cupy.asnumpy(batch.outs[0]), known, version)


@pytest.mark.parametrize("n", [SMALL, LARGE])
def test_a_dropped_table_is_left_to_the_host(n):
    known = distinct_keys(n)
    with LinkedFiles([32], 28, attached=[]) as tables:
        tables.load(known, rows_of(known, 32))
        tables.attach()
        check(known, tables.ask(known)[0], known)
        tables.database.drop_table(tables.specs[0].tag)
        tables.cache.erase(0, known)
        assert tables.left(known) == n
        with pytest.raises(NotReadyError):
            tables.cache.create_lookup().enqueue(tables.batch(known))


def test_a_file_that_is_not_registered_is_copied_to_memory(monkeypatch):
    known, pin = distinct_keys(100_000), CudaPinner.pin

    def refused(self: Any, address: int, size_bytes: int, *, read_only: bool = False) -> None:
        if read_only:
            raise DeviceError("a driver that does not register mappings of files")
        pin(self, address, size_bytes)

    monkeypatch.setattr(CudaPinner, "pin", refused)
    with LinkedFiles([32], 28, attached=[]) as tables:
        tables.load(known, rows_of(known, 32))
        tables.attach()
        check(known, tables.ask(known)[0], known)
        tables.insert(known[::2].copy(), 1)
        tables.seal()
        check(known[::2], tables.ask(known[::2])[0], known, 1)


def test_memory_of_replaced_files_is_given_back():
    known = distinct_keys(20_000)
    with LinkedFiles([32], 28, attached=[]) as tables:
        tables.load(known, rows_of(known, 32))
        tables.attach()
        host = tables.database.host_table(tables.specs[0].tag)
        for version in range(1, 6):
            tables.insert(known[::9].copy(), version)
            check(known[::9], tables.ask(known[::9])[0], known, version)
            tables.seal()
            check(known[::9], tables.ask(known[::9])[0], known, version)
            assert host.pinned_bytes < 2 * 20_000 * 140


@pytest.mark.parametrize(("dim", "capacity"), [(3, 0), (32, 3000), (128, 5000), (300, 500)])
def test_no_vector_is_wrong_beside_writers_and_seals(dim, capacity, capsys):
    population = Population(distinct_keys(30_000))
    seals = 0
    with LinkedFiles([dim], capacity, attached=[]) as tables:
        others = np.setdiff1d(distinct_keys(40_000, seed=50), np.concatenate([population.keys, population.never]))
        tables.load(others, vectors_of(others, dim, 1))
        tables.attach()

        def seal(done: threading.Event) -> None:
            nonlocal seals
            while not done.wait(0.05):
                tables.seal()
                seals += 1

        said = stress(population, dim, link_lookups(tables), tables.write, tables.delete, also=seal)
        assert tables.database.host_table(tables.specs[0].tag).layout() is not None
    say(capsys, f"dim {dim}, {capacity} rows cached, {seals} seals: {said}")
