"""What Python does for devices that share rows: changes reach all copies, whatever fails, and one device may go before another.

`tests/ring2/cache/test_host_cuda.py` runs it without a GPU.
"""

import gc
import itertools
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hps.cache.base import DeviceSharing, EmbeddingCache
from hps.cache.cuda import geometry, kernels, structs
from hps.cache.cuda.geometry import CudaPlan, copy_bytes, size_bytes
from hps.cache.cuda.kernels import pairs_for
from hps.errors import CapacityError, DeviceError, DeviceMemoryError, NotReadyError
from hps.tensors.batch import Batch
from hps.testing.caches import bits, distinct_keys, spec, vectors_of
from hps.testing.waiting import wait_until
from hps.types import TableSpec
from tests.gpu.cupy_if_installed import CupyCache, cupy
from tests.gpu.test_cupy_cache import copy_of, write_to
from tests.gpu.test_sharing import DEVICES, close, fill_copies, query
from tests.gpu.test_sharing import two_devices as two_devices  # a fixture
from tests.ring1.cache.test_kernels import OF_NO_TABLE

if CupyCache is not None:
    from hps.cache.cuda import cache as cache_module
    from hps.cache.cuda import device as device_module
    from hps.cache.cuda import modifications, near_tables, tables
    from hps.cache.cuda.device import TableMemory
    from hps.cache.cuda.modifications import LaunchOrder, Modifications
    from hps.cache.cuda.near_tables import NearTables

pytestmark = pytest.mark.gpu
KEYS, DIM = distinct_keys(600), 8
every_device = pytest.mark.parametrize("device", DEVICES)


@contextmanager
def shared(
    *specs: TableSpec, rows: int = 400_000, near: int = 0, static: bool = False, device: int = 0, devices: Any = DEVICES
) -> Iterator[EmbeddingCache]:
    """A cache of tables whose rows devices share; each has room for copies of `near` rows of a table."""
    specs = specs or (spec(DIM),)
    sharing = DeviceSharing(devices, (near,) * len(specs) if near else ())
    cache = CupyCache.create(list(specs), [rows] * len(specs), device, static, sharing)
    try:
        yield cache
    finally:
        close(cache)


@pytest.fixture
def hot() -> Iterator[EmbeddingCache]:
    """A cache whose devices have copies of each other's rows."""
    with shared(near=2000) as cache:
        cache.insert(0, KEYS, vectors_of(KEYS, DIM))
        fill_copies(cache, KEYS)
        yield cache


@pytest.fixture
def static() -> Iterator[EmbeddingCache]:
    with shared(rows=1000, static=True, device=1) as cache:
        cache.insert(0, KEYS, vectors_of(KEYS, DIM))
        yield cache


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[kernels.Kernel]:
    """The kernels that caches ask for from now on."""
    found, handle = [], kernels.KernelCache.handle
    monkeypatch.setattr(kernels.KernelCache, "handle", lambda self, kernel: (found.append(kernel), handle(self, kernel))[1])
    return found


def copied(cache: EmbeddingCache, device: int) -> np.ndarray:
    """The keys of which a device has copies."""
    with cupy.cuda.Device(device):
        return cache.on(device)._near.dump(0)


def check(cache: EmbeddingCache, version: int, devices: tuple[int, ...] = DEVICES, keys: np.ndarray = KEYS) -> None:
    """Each device answers all keys, in a version."""
    for device in devices:
        out, found = query(cache.on(device), keys)
        assert found.all()
        np.testing.assert_array_equal(bits(out), bits(vectors_of(keys, DIM, version)))


def lose(*_: Any) -> None:
    raise cupy.cuda.runtime.CUDARuntimeError(700)


@every_device
@pytest.mark.parametrize("verb", ["insert", "update"])
@pytest.mark.parametrize("place", ["host", "device"])
def test_rows_that_change_through_any_device_change_in_all_copies(
    hot: EmbeddingCache, device: int, verb: str, place: str
) -> None:
    keys, rows = KEYS, vectors_of(KEYS, DIM, 1)
    if place == "device":
        keys, rows = cupy.asarray(keys), cupy.asarray(rows)  # on the leader's device
    getattr(hot.on(device), verb)(0, keys, rows)
    check(hot, 1)


@every_device
def test_rows_that_are_erased_through_any_device_have_no_copy(hot: EmbeddingCache, device: int) -> None:
    hot.on(device).erase(0, KEYS[:400])
    for asked in DEVICES:
        np.testing.assert_array_equal(query(hot.on(asked), KEYS)[1], np.arange(KEYS.size) >= 400)
    check(hot, 0, keys=KEYS[400:])


def test_copies_are_up_to_date_after_an_error_within_a_change(hot: EmbeddingCache, monkeypatch: pytest.MonkeyPatch) -> None:
    insert = Modifications.insert

    def fail_after(self: Any, table: Any, *arguments: Any) -> None:
        insert(self, table, *arguments)
        if table.copies:
            raise DeviceError("the next chunk failed")

    with monkeypatch.context() as patched:
        patched.setattr(Modifications, "insert", fail_after)
        with pytest.raises(DeviceError, match="the next chunk failed"):
            hot.update(0, KEYS, vectors_of(KEYS, DIM, 1))
    check(hot, 1)
    hot.update(0, KEYS, vectors_of(KEYS, DIM, 2))  # nothing is left locked
    check(hot, 2)


def test_copies_of_keys_that_the_change_waits_for_are_dropped(hot: EmbeddingCache, monkeypatch: pytest.MonkeyPatch) -> None:
    keys, rows = cupy.asarray(np.zeros_like(KEYS)), cupy.asarray(vectors_of(KEYS, DIM, 1))
    insert = Modifications.insert_on_device
    # Keys are set by the stream of their producer, which the insertion follows.
    monkeypatch.setattr(Modifications, "insert_on_device", lambda *arguments: [keys.set(KEYS), insert(*arguments)])
    hot.update(0, keys, rows)
    check(hot, 1)


def test_no_copies_are_made_while_rows_change_but_at_the_end_of_the_change(
    hot: EmbeddingCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    insert, settle, erase, promote = Modifications.insert, NearTables.settle, NearTables.erase, NearTables.promote
    done: list[str] = []

    def change(self: Any, table: Any, *arguments: Any) -> None:
        insert(self, table, *arguments)
        done.append("shared")
        assert hot._copying.locked()
        hot._make_copies()  # as the periodic task does, which does not wait for the end of the change

    monkeypatch.setattr(Modifications, "insert", change)
    monkeypatch.setattr(NearTables, "settle", lambda self: [settle(self), done.append("settle")])
    monkeypatch.setattr(NearTables, "erase", lambda self, *keys: [erase(self, *keys), done.append("near")])
    monkeypatch.setattr(NearTables, "promote", lambda self: [promote(self), done.append("copies")])
    hot.on(1).update(0, KEYS, vectors_of(KEYS, DIM, 1))
    start = done.index("settle")
    assert done[start : start + 7] == ["settle", "settle", "shared", "near", "near", "copies", "copies"]
    check(hot, 1)


def test_rows_change_also_where_their_copies_cannot_be_made(hot: EmbeddingCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NearTables, "promote", lose)
    hot._copies_due = True
    hot.update(0, KEYS, vectors_of(KEYS, DIM, 1))
    assert not hot._copying.locked()
    check(hot, 1)


def test_settling_and_closing_wait_for_the_admissions_that_run(hot: EmbeddingCache, monkeypatch: pytest.MonkeyPatch) -> None:
    near, waited = hot._near, []
    monkeypatch.setattr(near, "_stream", SimpleNamespace(ptr=near._stream.ptr, synchronize=lambda: waited.append("settle")))
    near.settle()
    assert waited == ["settle"]
    hot.close()
    assert waited == ["settle"] * 2


def test_the_cache_of_a_device_is_closed_between_changes_of_its_copies(hot: EmbeddingCache) -> None:
    closing = threading.Thread(target=hot.on(1).close)
    with hot._copying:
        closing.start()
        closing.join(0.05)
        assert hot.on(1)._near is not None
        assert hot.on(1).memory.open is not None
    closing.join(60)
    assert not closing.is_alive()
    assert not hot._copies.alive  # nothing looks for rows to copy any more


@pytest.mark.parametrize("closed", DEVICES)
def test_one_device_answers_after_another_was_closed(hot: EmbeddingCache, closed: int) -> None:
    own, other, rows = hot.on(closed), hot.on(1 - closed), vectors_of(KEYS, DIM, 1)
    own.close()
    own.close()
    check(hot, 0, (1 - closed,))
    changes = lambda: own.update(0, KEYS, rows), lambda: own.insert(0, KEYS, rows), lambda: own.erase(0, KEYS)
    for call in (lambda: own.dump(0), own.create_lookup, *changes):
        with pytest.raises(NotReadyError):
            call()
    check(hot, 0, (1 - closed,))
    with pytest.raises(NotReadyError) if closed == 0 else nullcontext():  # nothing changes without the leader
        other.update(0, KEYS, rows)
        check(hot, 1, (0,))


@every_device
def test_devices_that_share_rows_are_lost_together(hot: EmbeddingCache, monkeypatch: pytest.MonkeyPatch, device: int) -> None:
    own, lookups = hot.on(device), [hot.on(one).create_lookup() for one in DEVICES]
    with monkeypatch.context() as patched:
        patched.setattr(NearTables, "settle", lambda self: lose() if self is own._near else None)
        patched.setattr(device_module.runtime, "memGetInfo", lose)
        with pytest.raises(DeviceError):
            hot.update(0, KEYS, vectors_of(KEYS, DIM, 1))
        first = hot.failure
        assert first
        assert own.memory.lost(DeviceError("an error that follows from it"))
    assert {hot.on(one).failure for one in DEVICES} == {first}
    for one, lookup in zip(DEVICES, lookups, strict=True):  # which would answer what did not change
        with pytest.raises(DeviceError, match="failed before"):
            query(hot.on(one), KEYS, lookup)


def test_a_cache_is_closed_after_its_device_was_lost(hot: EmbeddingCache, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(device_module.runtime, "memGetInfo", lose)
        patched.setattr(Modifications, "close", lose)
        close(hot)
    assert hot.failure
    assert hot.memory.open is None


@every_device
def test_a_device_is_asked_itself_whether_it_is_lost(hot: EmbeddingCache, monkeypatch: pytest.MonkeyPatch, device: int) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(device_module.runtime, "memGetInfo", lambda: lose() if cupy.cuda.runtime.getDevice() == 1 else None)
        with cupy.cuda.Device(1 - device):
            assert hot.on(device).memory.lost(DeviceError("a call failed")) == (device == 1)


@every_device
def test_a_near_table_that_cannot_be_changed_is_read_no_more(
    hot: EmbeddingCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, device: int
) -> None:
    full, erase = hot.on(device)._near, Modifications.erase

    def fail(self: Any, table: Any, keys: np.ndarray) -> None:
        if self is full._changes:
            raise cupy.cuda.memory.OutOfMemoryError(1 << 30, 1 << 31)
        erase(self, table, keys)

    with monkeypatch.context() as patched:
        patched.setattr(Modifications, "erase", fail)
        for version in (1, 2):
            hot.update(0, KEYS, vectors_of(KEYS, DIM, version))
            check(hot, version)
        assert f"CUDA device {device} copies no more rows of other devices" in caplog.text
    wait_until(lambda: check(hot, 2) or hot.on(1 - device).stats(0).copied_rows, "the other device has copies again")
    assert full.resident(0) == 0
    np.testing.assert_array_equal(np.sort(hot.dump(0)), np.sort(KEYS))


def test_queries_find_the_near_tables_of_their_device() -> None:
    dims = DIM, 4 * DIM
    with shared(*(spec(dim, f"of {dim}") for dim in dims), near=2000) as cache:
        for device in DEVICES:
            places = []
            for table, dim in zip(cache.on(device).memory.open, dims, strict=True):
                packed = copy_of(table.buckets_on(device) - kernels.SHARING_BYTES, structs.SHARING.size, np.uint8).tobytes()
                buckets, rows, samples, count, pairs, stretch, first, own, room = structs.SHARING.unpack(packed)
                assert (buckets, rows, pairs, stretch) == (table.near.buckets, table.near.rows, table.near.pairs, len(DEVICES))
                assert (first, own) == geometry.owned_pairs(table.pairs, dim, len(DEVICES), device)
                places += [(samples, samples + 8 * room), (count, count + 8)]
            assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(sorted(places)))


def test_all_samples_are_staged_and_copied_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, launch, sizes, blocks = cupy.cuda.Memory, near_tables.launch, {}, []

    def allocate(size: int) -> Any:
        made = memory(size)
        sizes[int(made.ptr)] = size
        return made

    monkeypatch.setattr(cupy.cuda, "Memory", allocate)
    monkeypatch.setattr(
        near_tables, "launch", lambda handle, count, *rest: [blocks.append(count), launch(handle, count, *rest)]
    )
    monkeypatch.setattr(cache_module, "_COPY_INTERVAL_S", 3600.0)  # copies are made below
    dims = 4 * DIM, DIM
    with shared(*(spec(dim, f"of {dim}") for dim in dims), near=2000) as cache:
        for device in DEVICES:
            near = cache.on(device)._near
            assert sizes[int(near._staged.ptr)] >= max(4 * room * dim for room, dim in zip(near._room, dims, strict=True))
        near = cache._near
        counts = np.array([100, near_tables.SAMPLES + 1], np.uint64)  # of which one found no room
        cupy.cuda.runtime.memset(int(near._samples.ptr), 0, 8 * near_tables.SAMPLES * 2)
        write_to(near._counts_at, counts)
        cache._make_copies()
        assert blocks == [kernels.tile_blocks(100), kernels.tile_blocks(near_tables.SAMPLES)]


@every_device
def test_whoever_reads_tables_sees_the_changes_whose_calls_returned(
    hot: EmbeddingCache, monkeypatch: pytest.MonkeyPatch, device: int
) -> None:
    shown, own, order = [], hot.on(device), hot._changes.order
    monkeypatch.setattr(order, "wait_for_returned", shown.append)
    lookup = own.create_lookup()
    order.pending = True  # and stays so: a change runs for long
    for read, stream in (
        (lambda: query(own, KEYS[:5], lookup), lambda: lookup.stream),
        (lambda: own.dump(0), lambda: own._changes._stream),
        (lambda: own.stats(0), lambda: own._changes._stream),
    ):
        shown.clear()
        read()
        assert set(shown) == {stream()}


@pytest.mark.parametrize("static", [False, True])
def test_every_kernel_of_a_shared_table_knows_that_it_is_shared(used: list[kernels.Kernel], static: bool) -> None:
    with shared(rows=1000, static=static) as cache:
        own = cache.on(1)
        own.insert(0, KEYS, vectors_of(KEYS, DIM))
        query(own, KEYS)
        own.erase(0, KEYS)
        own.dump(0)
        compiled, shape = own.lookup_kernels, kernels.Shape.of([kernels.Rows(DIM)], kernels.ALIGNED)
        compiled.batch_kernels(shape)
        compiled.answer_of("answer", (0,), kernels.ALIGNED)
        compiled.pool("pool", shape, True)
    of_tables = {"query", "answer", "pool", "insert", "erase", "dump"}
    assert {kernel.name for kernel in used} == of_tables | {*OF_NO_TABLE}
    for kernel in used:
        if kernel.name in of_tables:
            constants = tuple((name, value) for name, value in kernel.constants if name in ("STATIC", "SHARED"))
            assert kernels.Kind(static and kernel.name != "answer", True).constants == constants


@pytest.mark.parametrize(("static", "near"), [(False, 2000), (True, 0)])
def test_what_a_shared_cache_needs_is_compiled_ahead(
    used: list[kernels.Kernel], monkeypatch: pytest.MonkeyPatch, static: bool, near: int
) -> None:
    ahead: list[kernels.Kernel] = []
    monkeypatch.setattr(cache_module, "compile_ahead", lambda needed, _architecture: ahead.extend(needed))
    CupyCache.compile_ahead([([(DIM, "float32")], static, True)], "90")
    with shared(rows=1000, static=static, near=near):
        assert used
        assert set(used) <= set(ahead)


@pytest.mark.parametrize("rows", [28, 2000])
def test_tables_are_empty_whatever_their_memory_held(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    memory, spread, runtime = cupy.cuda.Memory, tables.SpreadMemory, cupy.cuda.runtime

    def used(size: int) -> Any:
        made = memory(size)
        runtime.memset(int(made.ptr), 0xAB, size)
        return made

    def used_spread(parts: Any, devices: Any) -> Any:
        made = spread(parts, devices)
        runtime.memset(made.address, 0xAB, sum(size for _, size in parts))
        return made

    monkeypatch.setattr(cupy.cuda, "Memory", used)
    monkeypatch.setattr(tables, "SpreadMemory", used_spread)
    with shared(rows=rows, near=rows) as cache:
        for device in DEVICES:
            table = cache.on(device).memory.open[0]
            for one, buckets, stretch in ((table, table.buckets_on(device), 1), (table.near, table.near.buckets, len(DEVICES))):
                words = copy_of(buckets, geometry.bucket_bytes(one.pairs) // 8, np.int64)
                filler = kernels.zero_filler(one.pairs, stretch)
                at = 2 * (kernels.SLOTS + 1) * kernels.zero_pair(one.pairs)
                assert words[at : at + 16].tolist() == ([0] + [filler] * kernels.SLOTS) * 2
                assert np.count_nonzero(words) == 2 * kernels.SLOTS
                assert structs.TABLE.unpack(one.packed)[3] == filler
            assert cache.on(device).stats(0).copied_rows == 0
        stats = cache.stats(0)
        assert (stats.resident_rows, stats.inserts, stats.evictions, stats.unplaced) == (0, 0, 0, 0)


def test_rows_and_copies_of_the_buckets_lie_where_the_kernels_look(monkeypatch: pytest.MonkeyPatch) -> None:
    spread, asked = tables.SpreadMemory, []
    monkeypatch.setattr(tables, "SpreadMemory", lambda *memory: (asked.append(memory), spread(*memory))[1])
    rows = 14 * ((geometry.GRANULE_BYTES - kernels.SHARING_BYTES) // kernels.PAIR_BYTES + 1)  # a second granule of buckets
    with shared(rows=rows, devices=(1, 0)) as cache:
        [table] = cache.memory.open
        copy, parts = copy_bytes(table.pairs), geometry.part_bytes(table.pairs, DIM, 2)
        assert asked == [([(1, copy), (0, copy), (1, parts[0]), (0, parts[1])], (1, 0))]
        assert table.copies[0] - table.copies[1] == copy == 2 * geometry.GRANULE_BYTES
        assert structs.TABLE.unpack(table.packed)[-1] == kernels.sharing_word(1, 2, 2)
        assert table.rows == table.copies[0] - kernels.SHARING_BYTES + copy


@pytest.fixture
def uncollected() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("uncollected")
def test_closing_the_cache_of_a_device_frees_its_memory(hot: EmbeddingCache) -> None:
    near, memory = [weakref.ref(hot.on(device)._near) for device in DEVICES], weakref.ref(hot.memory.open[0].memory)
    samples = hot.on(1)._near._samples
    many = distinct_keys(20_000)
    hot.insert(0, many, vectors_of(many, DIM))  # too much for mapped memory
    assert any(stage.device.size_bytes for stage in hot._changes._stages)
    held = hot.on(1).memory.tables()  # by a query
    close(hot)
    assert not any(stage.device.size_bytes for stage in hot._changes._stages)
    assert [one() for one in near] == [None, None]
    assert memory() is not None
    assert samples in held[0].near.memory
    del held
    assert memory() is None


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("near", [2000, 0])
def test_a_cache_that_cannot_be_made_frees_its_memory(monkeypatch: pytest.MonkeyPatch, near: int) -> None:
    made, allocated = [], cache_module.allocate

    def note(*arguments: Any, **options: Any) -> Any:
        tables = allocated(*arguments, **options)
        made.append(weakref.ref(tables[0].memory))
        return tables

    def fail(device_id: int, _kernels: Any) -> None:
        if device_id == DEVICES[-1]:
            raise DeviceError("a kernel does not compile")

    monkeypatch.setattr(cupy.cuda, "Memory", type("Memory", (cupy.cuda.Memory,), {}))  # CuPy's takes no weak reference
    monkeypatch.setattr(cache_module, "allocate", note)
    monkeypatch.setattr(near_tables, "allocate", note)
    monkeypatch.setattr(cache_module, "compile_all", fail)
    with pytest.raises(DeviceError, match="does not compile"), shared(rows=4000, near=near):
        pass
    assert [one() for one in made] == [None] * (1 + bool(near) * len(DEVICES))


def test_copies_that_are_left_alone_are_dumped_with_any_device_so_that_changes_reach_them(hot: EmbeddingCache) -> None:
    hot._changes.erase(hot.memory.open[0], KEYS)  # as evictions do, which leave copies
    copies = [copied(hot, device) for device in DEVICES]
    assert all(own.size for own in copies)
    left = np.union1d(*copies)
    for device, own in zip(DEVICES, copies, strict=True):
        np.testing.assert_array_equal(hot.on(device).dump(0), left)
        _, found = query(hot.on(device), KEYS)
        np.testing.assert_array_equal(np.sort(KEYS[found]), np.sort(own))
        assert structs.TABLE.unpack(hot.memory.open[0].near.packed)[-1] == kernels.sharing_word(len(DEVICES))
    hot.update(0, left[5:], vectors_of(left[5:], DIM, 3))  # copies of changed rows are dropped
    np.testing.assert_array_equal(hot.dump(0), left[:5])
    hot.erase(0, left[:5])
    assert not any(query(hot.on(device), KEYS)[1].any() for device in DEVICES)


def test_devices_are_known_by_their_ids_in_any_order() -> None:
    with shared(near=2000, devices=(1, 0)) as cache:
        assert [cache.device_id, cache.leader.device_id, *(cache.on(one).device_id for one in DEVICES)] == [0, 1, 0, 1]
        cache.insert(0, KEYS, vectors_of(KEYS, DIM))
        fill_copies(cache, KEYS)
        pairs = cache.memory.open[0].pairs
        for nth, device in enumerate((1, 0)):
            first, own = geometry.owned_pairs(pairs, DIM, 2, nth)
            copies = copied(cache, device)
            assert copies.size
            assert not [key for key in copies.tolist() if first <= kernels.home_of(key, pairs) // 2 < first + own]
        check(cache, 0)


def test_each_table_takes_new_samples_once_the_last_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(near_tables, "SAMPLES", 100)
    with shared(spec(DIM, "first"), spec(DIM, "second"), near=2000) as cache:
        cache.insert(1, KEYS, vectors_of(KEYS, DIM))
        near, lookup = cache._near, cache.create_lookup()
        for keys in (KEYS[:300], KEYS[300:]):
            out = cupy.empty((keys.size, DIM), cupy.float32)
            for _ in range(1000):
                lookup.query(Batch.of(1, cupy.asarray(keys), out))
                lookup.finish()
                cache._make_copies()
                if np.isin(keys, near.dump(1)).any():
                    break
            else:
                pytest.fail("no copies were made")


@pytest.mark.parametrize(("spare", "fits"), [(0, True), (-1, False)])
def test_room_is_checked_for_rows_and_copies(monkeypatch: pytest.MonkeyPatch, spare: int, fits: bool) -> None:
    sharing = DeviceSharing(DEVICES, (2000,))
    [need] = CudaPlan.room_for([spec(DIM)], [400_000], sharing=sharing)
    needed = need.size_bytes + geometry.RESERVE_BYTES
    monkeypatch.setattr(cupy.cuda.runtime, "memGetInfo", lambda: (needed + spare, 1 << 40))
    with nullcontext() if fits else pytest.raises(CapacityError, match="making room for the embedding cache"):
        CupyCache.check_room([spec(DIM)], [400_000], 0, sharing=sharing)
    with nullcontext() if fits else pytest.raises(DeviceMemoryError, match=f"got {need.size_bytes:,} bytes to allocate"):
        close(CupyCache.create([spec(DIM)], [400_000], 0, sharing=sharing))


@pytest.mark.parametrize("full", DEVICES)
@pytest.mark.parametrize("free", [1000, 1 << 32])  # the latter before another process takes it
def test_the_device_with_the_least_memory_is_named(monkeypatch: pytest.MonkeyPatch, full: int, free: int) -> None:
    def refuse(*_: Any) -> None:
        raise DeviceMemoryError("the device has no memory left")

    runtime, left = cupy.cuda.runtime, geometry.RESERVE_BYTES + free
    monkeypatch.setattr(runtime, "memGetInfo", lambda: (left if runtime.getDevice() == full else 1 << 36, 1 << 36))
    monkeypatch.setattr(tables, "SpreadMemory", refuse)
    with (
        pytest.raises(DeviceMemoryError, match=f"CUDA device {full}: .* at most the {free:,} that are free"),
        shared(rows=1000),
    ):
        pass


def test_one_cache_stands_for_all(hot: EmbeddingCache) -> None:
    first, second = (hot.on(device) for device in DEVICES)
    assert first is hot.leader is second.leader is second.on(0)
    assert (first.device_id, second.device_id) == DEVICES
    stats = [cache.stats(0) for cache in (first, second)]
    assert replace(stats[0], size_bytes=0, copied_rows=0) == replace(stats[1], size_bytes=0, copied_rows=0)
    assert stats[0].resident_rows == KEYS.size
    [need] = CudaPlan.room_for([spec(DIM)], [400_000], sharing=DeviceSharing(DEVICES, (2000,)))
    assert stats[0].size_bytes == need.size_bytes
    beside = copy_bytes(first.memory.open[0].pairs) + size_bytes(pairs_for(2000), DIM)
    parts = geometry.part_bytes(first.memory.open[0].pairs, DIM, 2)
    assert parts[0] != parts[1]
    assert [stat.size_bytes - beside for stat in stats] == parts
    for cache in (first, second):
        np.testing.assert_array_equal(np.sort(cache.dump(0)), np.sort(KEYS))


def test_the_cache_of_the_device_that_is_named_is_made(static: EmbeddingCache) -> None:
    assert (static.device_id, static.leader.device_id) == (1, 0)
    assert static.stats(0).resident_rows == KEYS.size
    check(static, 0)


def test_all_devices_are_told_of_every_table_whether_the_cache_is_complete() -> None:
    with shared(spec(DIM, "first"), spec(DIM, "second"), rows=1000, device=1, static=True) as cache:
        cache.insert(0, KEYS, vectors_of(KEYS, DIM))
        caches = [cache.on(device) for device in DEVICES]

        def complete() -> set[bool]:
            told = [copy_of(one.counters + geometry.COMPLETE_AT, 1, np.uint64)[0] == 1 for one in cache.memory.open]
            return {bool(flag) for cache in caches for flag in (cache.complete, cache.memory.complete)} | {*map(bool, told)}

        for teller in caches:
            for whole in (True, False):
                teller.mark_complete(whole)
                assert complete() == {whole}
        caches[1].mark_complete(complete=True)
        caches[1].drop(0, KEYS[:1])
        assert complete() == {False}


def test_keys_of_lookups_that_nobody_waits_for_count_once(static: EmbeddingCache) -> None:
    absent_and_unread = np.array([7, 2], np.uint64)
    write_to(static.memory.open[0].counters + 8 * 4, absent_and_unread)
    first, second = (static.on(device).stream_ordered_counts(0) for device in DEVICES)
    assert (first.misses, first.settled, first.unread) == (9, 7, 2)
    assert (second.misses, second.settled, second.unread) == (0, 0, 2)  # the error reaches the callers of both


class FakeLink:
    """An attached table that notes changes, or cannot tell its device of them."""

    def __init__(self) -> None:
        self.open = self.changes = 0
        self.closed = False
        self.error: DeviceError | None = None

    @contextmanager
    def changing(self) -> Iterator[None]:
        if self.error is not None:
            raise self.error
        self.open, self.changes = self.open + 1, self.changes + 1
        yield
        self.open -= 1

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def links(static: EmbeddingCache) -> list[FakeLink]:
    """Of each device."""
    made = [FakeLink(), FakeLink()]
    for device, link in zip(DEVICES, made, strict=True):
        static.on(device)._links[0] = link
    return made


@every_device
def test_a_change_below_is_told_to_the_links_of_all_devices_and_each_is_closed_with_its_own(
    static: EmbeddingCache, links: list[FakeLink], device: int
) -> None:
    with static.on(device).changing(0):
        assert [link.open for link in links] == [1, 1]
    assert [link.open for link in links] == [0, 0]
    static.on(1).memory.error = "lost"
    with static.on(device).changing(0):
        assert [link.open for link in links] == [1, 0]
    static.on(1).memory.error = None
    static.on(device).close()
    assert [link.closed for link in links] == [own == device for own in DEVICES]


@pytest.mark.parametrize("lost", [True, False])
def test_a_link_that_fails_stops_a_change_unless_its_device_is_lost(
    static: EmbeddingCache, links: list[FakeLink], monkeypatch: pytest.MonkeyPatch, lost: bool
) -> None:
    links[1].error = DeviceError("telling it failed")
    monkeypatch.setattr(TableMemory, "lost", lambda _memory, _error: lost)
    with nullcontext() if lost else pytest.raises(DeviceError, match="telling it failed"), static.changing(0):
        assert lost
        assert links[0].open == 1
    assert links[0].changes == 1


def test_changes_wait_for_the_last_one_of_any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, int, int]] = []
    ended = [1]
    fake = SimpleNamespace(
        eventRecord=lambda event, stream: calls.append(("record", event, stream)),
        streamWaitEvent=lambda stream, event: calls.append(("wait", event, stream)),
        eventQuery=lambda _event: ended[0],
    )
    monkeypatch.setattr(modifications, "runtime", fake)
    order = LaunchOrder()
    for stream, events, waits in ((5, (50, 51), False), (6, (60, 61), True), (5, (50, 51), True)):
        with order.ordered(stream, events, waits):
            calls.append(("change", 0, stream))
    first = [("change", 0, 5), ("record", 50, 5), ("record", 51, 5), ("wait", 50, 6), ("change", 0, 6)]
    assert calls == [*first, ("record", 60, 6), ("wait", 60, 5), ("change", 0, 5), ("record", 50, 5)]
    calls.clear()
    for stream in (7, 8):
        assert order.pending
        order.wait_for_returned(stream)
    assert calls == [("wait", 51, 7), ("wait", 51, 8)]  # for the change whose call did not wait
    ended[0] = 0
    order.wait_for_returned(7)
    assert not order.pending


def test_what_lookups_admit_on_one_device_is_ordered_with_the_changes_of_others(hot: EmbeddingCache) -> None:
    new, second = distinct_keys(100, seed=9), hot.on(1)
    assert hot._changes.order is second._changes.order
    with cupy.cuda.Device(1):
        lookup, out = second.create_lookup(), cupy.full((new.size, DIM), cupy.nan, cupy.float32)
        assert lookup.query(Batch.of(0, cupy.asarray(new), out)) == new.size
        [missed] = lookup.unique()
        missed.buffer()[:] = vectors_of(missed.keys, DIM)
        missed.stage(0, new.size)
        missed.scatter(np.ones(new.size, np.bool_))
        missed.insert(np.ones(new.size, np.bool_))
        assert hot._changes.order.pending
        hot.update(0, new, vectors_of(new, DIM, 1))
        lookup.finish()
    check(hot, 1, keys=new)


def test_devices_share_nothing_unless_each_is_there_and_reaches_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    assert CupyCache.reason_against_sharing(DEVICES) is None
    assert "no CUDA device 99" in CupyCache.reason_against_sharing((0, 99))
    for device, other in ((0, 1), (1, 0)):
        out_of_reach = (device, other)
        monkeypatch.setattr(cupy.cuda.runtime, "deviceCanAccessPeer", lambda *asked, no=out_of_reach: int(asked != no))
        assert f"CUDA device {device} cannot access the memory of device {other}" in CupyCache.reason_against_sharing(DEVICES)
