"""Device memory: who may share it, when it is freed, what lookups do with it, on a stand-in (`tests/fakes/host_cuda.py`)."""

import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hps.cache.base import ALONE, DeviceSharing
from hps.cache.cuda import kernels, structs
from hps.errors import CapacityError, ConfigError, DeviceError, DeviceMemoryError, InvalidInputError
from hps.stores.hash_map.database import HashMapDatabase
from hps.tensors.bags import Combiner, Pooling
from hps.tensors.batch import Batch
from hps.testing.caches import spec
from tests.fakes import host_cuda
from tests.fakes.populating_pinner import PopulatingPinner

MIB = 1 << 20
SHARED = DeviceSharing((0, 1))


@pytest.fixture(scope="module")
def modules() -> Iterator[SimpleNamespace]:
    with host_cuda.installed():
        from cupy_backends.cuda.api import runtime

        from hps.cache.cuda import batches, device, links, pooling, spread_memory, tensors
        from hps.cache.cuda.cache import CupyCache

        ours = {"device": device, "pooling": pooling, "spread_memory": spread_memory, "tensors": tensors, "cache": CupyCache}
        yield SimpleNamespace(runtime=runtime, batches=batches, links=links, **ours)


@pytest.fixture
def cuda(modules: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The stand-in, whose devices are linked unless `link` says otherwise; what a test `sets` is undone after it."""

    def link(value: int = 1) -> None:
        def attribute(to: Any, what: int, _device: int, _other: int) -> int:
            assert what == 3
            to._obj.value = value
            return 0

        monkeypatch.setattr(modules.spread_memory, "_driver", lambda: SimpleNamespace(cuDeviceGetP2PAttribute=attribute))

    link()
    return SimpleNamespace(
        **vars(modules), link=link, sets=lambda name, value: monkeypatch.setattr(modules.runtime, name, value)
    )


@pytest.mark.parametrize(
    ("change", "devices", "reason"),
    [
        (None, (0, 1), "CUDA device 0 has no native atomics in the memory of device 1 (no NVLink)"),
        (("deviceCanAccessPeer", lambda _a, _b: 0), (0, 1), "CUDA device 0 cannot access the memory of device 1"),
        (("deviceGetAttribute", lambda _a, _b: 0), (0, 1), "CUDA device 0 does not map memory of other devices"),
        ((), tuple(range(16)), "got 16 devices, expected at most 15"),
        ((), (0, 2), "there is no CUDA device 2"),
        ((), (0, 1, 0), "got a device twice"),
        (("getDeviceCount", lambda: 0), (0, 1), "CuPy finds no CUDA device"),
    ],
)
def test_devices_that_cannot_share_memory_say_why(
    cuda: SimpleNamespace, change: Any, devices: tuple[int, ...], reason: str
) -> None:
    cuda.cache.create([spec(4)], [1000], 0, False, SHARED).close()
    if change is None:
        cuda.link(0)
        with pytest.raises(DeviceError, match="native atomics"):
            cuda.cache.create([spec(4)], [1000], 0, False, SHARED)
    elif change:
        cuda.sets(*change)
    assert reason in cuda.cache.reason_against_sharing(devices)


class Driver:
    """CUDA's driver: it notes what it is asked, and answers codes of failures where a test has some in store."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []
        self.codes: dict[str, list[int]] = {}
        """What calls of a function return in turn."""

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            if name == "cuMemGetAllocationGranularity":
                arguments[0]._obj.value = 2 * MIB
            elif name == "cuMemAddressReserve":
                arguments[0]._obj.value = 1 << 30
            elif name == "cuMemCreate":
                arguments[0]._obj.value = 7 + len(self.calls)
            self.calls.append((name, arguments))
            return self.codes[name].pop(0) if self.codes.get(name) else 0

        return call

    def names(self) -> list[Any]:
        return [name for name, _ in self.calls]

    def arguments(self, called: str) -> list[tuple[Any, ...]]:
        return [arguments for name, arguments in self.calls if name == called]


@pytest.fixture
def driver(cuda: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    monkeypatch.setattr(cuda.spread_memory, "_driver", lambda: driver)
    cuda.sets("deviceSynchronize", lambda: driver.calls.append((("wait", cuda.runtime.getDevice()), ())))
    return driver


@pytest.mark.parametrize("codes", [[], [700, 700]], ids=["healthy", "lost"])
def test_memory_is_unmapped_when_no_device_uses_it_any_more(cuda: SimpleNamespace, driver: Driver, codes: list[int]) -> None:
    memory = cuda.spread_memory.SpreadMemory([(0, 2 * MIB), (1, 2 * MIB)], (0, 1))
    driver.calls.clear()
    driver.codes["cuMemUnmap"] = codes
    del memory
    assert driver.names()[:2] == [("wait", 0), ("wait", 1)]
    assert driver.names()[2:] == 2 * ["cuMemUnmap", "cuMemRelease"] + ["cuMemAddressFree"]
    memory = cuda.spread_memory.SpreadMemory([(0, 2 * MIB)], (0, 1))
    assert not memory._free.atexit


def test_each_part_is_mapped_where_it_lies_for_all_devices(cuda: SimpleNamespace, driver: Driver) -> None:
    memory = cuda.spread_memory.SpreadMemory([(1, 2 * MIB), (0, 6 * MIB), (1, 0), (0, 2 * MIB)], (1, 0))
    [reserved] = driver.arguments("cuMemAddressReserve")
    assert reserved[1].value == 10 * MIB
    made = [(argument[2]._obj.device, argument[1].value) for argument in driver.arguments("cuMemCreate")]
    assert made == [(1, 2 * MIB), (0, 6 * MIB), (0, 2 * MIB)]
    places = [(place.value - memory.address, size.value) for place, size, *_ in driver.arguments("cuMemMap")]
    assert places == [(0, 2 * MIB), (2 * MIB, 6 * MIB), (8 * MIB, 2 * MIB)]
    [access] = driver.arguments("cuMemSetAccess")
    assert (access[0].value, access[1].value, access[3].value) == (memory.address, 10 * MIB, 2)
    assert [(one.device, one.flags) for one in access[2]] == [(1, 3), (0, 3)]


@pytest.mark.parametrize(
    ("function", "code", "kind", "counts"),
    [
        *[("cuMemCreate", 2, DeviceMemoryError, [2, 1, 1]), ("cuMemCreate", 1, DeviceError, [2, 1, 1])],
        ("cuMemMap", 2, DeviceMemoryError, [2, 2, 1]),
    ],
)
def test_what_was_allocated_is_freed_when_a_part_fails(
    cuda: SimpleNamespace, driver: Driver, function: str, code: int, kind: type, counts: list[int]
) -> None:
    driver.codes[function] = [0, code]
    with pytest.raises(DeviceError) as failed:
        cuda.spread_memory.SpreadMemory([(0, 2 * MIB), (1, 2 * MIB)], (0, 1))
    assert failed.type is kind
    del failed  # its frames hold what was allocated
    assert [driver.names().count(name) for name in ("cuMemCreate", "cuMemRelease", "cuMemAddressFree")] == counts


@pytest.mark.parametrize(
    ("rows", "sharing", "error", "message"),
    [
        (1 << 31, SHARED, ConfigError, "expected at most 2,147,483,647, or device_sharing replicate"),
        (1 << 31, ALONE, CapacityError, "for 2,147,483,660 rows of table 'item'.* at most"),
        (1 << 32, ALONE, ConfigError, "at most"),
        (1000, ALONE, DeviceError, "the process has to be restarted"),
    ],
)
def test_what_cannot_be_allocated_is_refused_before_it_is_loaded(
    cuda: SimpleNamespace, rows: int, sharing: DeviceSharing, error: type[Exception], message: str
) -> None:
    def lost() -> None:
        raise cuda.runtime.CUDARuntimeError(700)

    cuda.cache.check_room([spec(4)], [1000], 0, sharing=sharing)
    if error is DeviceError:
        cuda.sets("memGetInfo", lost)
    with pytest.raises(error, match=message) as refused:
        cuda.cache.check_room([spec(4)], [rows], 0, sharing=sharing)
    assert refused.type is error


def test_pinned_memory_that_was_outgrown_is_freed_with_its_pieces(modules: SimpleNamespace) -> None:
    buffer = modules.device.PinnedBuffer()
    buffer.take(8)
    outgrown = weakref.ref(buffer._memory._memory)
    buffer.take(1 << 17)
    assert outgrown() is not None
    buffer.reset()
    assert outgrown() is None


@pytest.mark.parametrize("place", [np.asarray, host_cuda.Array], ids=["host", "device"])
def test_a_query_refuses_host_arrays_that_do_not_fit_its_keys(modules: SimpleNamespace, place: Any) -> None:
    lookup, keys = modules.cache.create([spec(4)], [1000], 0).create_lookup(), place(np.arange(10))
    for rows, mask in ((9, 10), (10, 9)):
        with pytest.raises(InvalidInputError, match=r"got shape \(9"):
            lookup.query(Batch.of(0, keys, np.zeros((rows, 4), np.float32), np.zeros(mask, np.bool_)))


def test_misses_that_attached_tables_answered_are_not_left_to_the_host(
    modules: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    lookup = modules.cache.create([spec(4)], [1000], 0).create_lookup()

    def answer(**_: bool) -> None:
        lookup._tallies[0] = 7, 3

    monkeypatch.setattr(lookup, "_find_layouts", lambda _batch: True)
    monkeypatch.setattr(lookup, "launch_answer", answer)
    assert lookup.query(Batch.of(0, np.arange(10), np.zeros((10, 4), np.float32))) == 0
    assert (lookup.linked, lookup.absent) == ([7], [3])


def test_lists_of_bags_have_room_for_every_key_and_begin_without_misses(modules: SimpleNamespace) -> None:
    counts = [8000, 192]  # with the divisors of their bags just more than a buffer's least size
    bags = [Pooling(1, None, n, None, Combiner.SUM, 0.0, None) for n in counts]
    arrays = [(np.zeros(n, np.int64), np.zeros((1, 4), np.float32)) for n in counts]
    batch = Batch.merged([Batch.of(nth, *arrays[nth], pooling=one) for nth, one in enumerate(bags)])
    pooling = modules.pooling.BagPooling([spec(4), spec(4)], None)
    pooling.place(batch, modules.tensors.TensorReader(0), modules.device.PinnedBuffer())
    pooling.reserve_lists()
    assert pooling._divisors + 4 * len(bags) <= pooling._lists.pointer + pooling._lists.size_bytes
    pooling.clear_entries(0)
    places, entries, divisors = np.split(host_cuda.at(pooling._places, 2 * 8192 + 2, np.uint32), [8192, 2 * 8192])
    assert (entries == 0xFFFFFFFF).all()
    assert not places.any()
    assert not divisors.any()


def test_a_kernel_that_begins_early_has_the_grid_stream_and_arguments_of_another(
    modules: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[tuple[int, ...]] = []
    monkeypatch.setattr(host_cuda, "_launch", lambda *words: launched.append(words))
    arguments = modules.device.Arguments(8)
    modules.device.DependentLaunch(0).launch(3, 5, 64, arguments, 9)
    assert launched == [(3, 5, 1, 1, 64, 1, 1, 0, 9, arguments.address, 0)]


def test_a_table_shows_an_attached_cache_the_layout_that_it_has_already(modules: SimpleNamespace) -> None:
    database = HashMapDatabase()
    database.open_table("t", 3)
    database.insert("t", np.arange(10), np.zeros((10, 3), np.float32))
    table = database.host_table("t")
    table.pin(PopulatingPinner())
    attached = modules.links.AttachedTable(0, table, authoritative=True)
    assert attached.present.host is table.layout()
    assert host_cuda.at(attached.where, 1, np.uint64)[0] == attached.present.where
    attached.close()
    database.close()


def test_lists_of_a_batch_have_room_for_every_key(modules: SimpleNamespace) -> None:
    from hps.cache.cuda import batch_loop

    lane, most, bins = modules.batches._StreamLane(0, 0), batch_loop.MOST_KEYS, 4 * kernels.MOST_BINS
    missing, places, _counts, *lists = structs.ANSWER_TAIL.unpack_from(lane._answer.tobytes(), batch_loop.ANSWER_TAIL_AT)
    leaders, ranks, order, states, left, left_places, _, slots, first_bin = lists[:9]
    epochs, versions, versions_after = lists[12:15]
    stripes, end = 8 * kernels.STRIPES * batch_loop.AT_ONCE, lane._lists.pointer + lane._lists.size_bytes
    of_keys = [(at, 8 * most) for at in (missing, left, slots)] + [(states, most)]
    of_keys += [(at, 4 * most) for at in (places, leaders, ranks, order, left_places)]
    others = [(first_bin, bins), (epochs, 8 * batch_loop.AT_ONCE), (versions, stripes), (versions_after, stripes)]
    starts = sorted(of_keys + others)
    assert all(at + size <= after for (at, size), (after, _) in zip(starts, [*starts[1:], (end, 0)], strict=True))


def test_rows_that_are_too_many_to_be_read_in_place_are_copied_where_they_belong(modules: SimpleNamespace) -> None:
    count, width = 2000, 64
    lookup = modules.cache.create([spec(width)], [1000], 0).create_lookup()
    out = np.zeros((count, width), np.float32)
    assert lookup.query(Batch.of(0, np.arange(count), out)) == count
    [missed] = lookup.unique()
    missed.buffer()[:] = rows = np.arange(count * width, dtype=np.float32).reshape(count, width)
    assert missed._staged
    for start in (0, 1000):
        missed.stage(start, start + 1000)
    assert (host_cuda.at(missed._vectors, rows.size, np.float32) == rows.ravel()).all()


def test_tensors_of_all_tables_are_placed_by_table_where_the_sizes_say(modules: SimpleNamespace) -> None:
    joined = modules.tensors.Placement((0, 1, 2), [2, 0, 3], (80,), (1000,), joined=True)
    placed = joined.by_table([4, 8, 1])
    assert (placed.keys, placed.outs, placed.starts) == ([80, 96, 96], [1000, 1032, 1032], [0, 2, 2])
    narrow = modules.tensors.Placement((0, 1), [2, 3], (80,), (1000,), out_format=1, joined=True)
    assert narrow.by_table([4, 8]).outs == [1000, 1016]
    assert placed.by_table([4, 8, 1]) is placed


def test_keys_that_are_not_aligned_are_refused_wherever_they_lie(modules: SimpleNamespace) -> None:
    memory, out = np.zeros(100, np.int32), host_cuda.Array(np.zeros((1, 4), np.float32))
    first = memory.ctypes.data % 8 // 4 ^ 1
    for place in range(first, first + 36, 2):
        keys = host_cuda.Array(memory[place : place + 2].view(np.int64))
        with pytest.raises(InvalidInputError, match="not aligned to int64"):
            modules.tensors.TensorReader(0).place(Batch.of(0, keys, out), [4], [""], modules.device.PinnedBuffer())


@pytest.mark.parametrize("dtype", ["int64", "int32"])
def test_separate_tensors_of_torch_are_found_if_all_are_as_kernels_read_them(modules: SimpleNamespace, dtype: str) -> None:
    import torch

    keys, outs = [torch.zeros(n, dtype=getattr(torch, dtype)) for n in (3, 2)], [torch.zeros(n, 4) for n in (3, 2)]
    reader = modules.tensors.TensorReader(keys[0].get_device())
    reader.start()
    reader._torch_stream = lambda: 7
    batch = Batch([1, 0], [3, 2], keys, outs)
    batch.kind = torch.Tensor
    placed = reader._place_alike(batch, [4, 4])
    if dtype == "int32":
        assert placed is None
    else:
        assert (placed.keys, placed.outs) == ([key.data_ptr() for key in keys], [out.data_ptr() for out in outs])
        assert reader.streams == {7}
