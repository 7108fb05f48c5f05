"""How the memory of a table is laid out on one device, and on several that share it."""

import pytest

from hps.cache.base import DeviceSharing
from hps.cache.cuda import geometry, kernels
from hps.cache.cuda.geometry import GRANULE_BYTES, CudaPlan
from hps.types import TableSpec

PAIR_ROWS = 2 * kernels.SLOTS
SHAPES = [(2, 1, 2), (2, 128, 15), (7, 33, 3), (7, 128, 2), (10_001, 1, 8), (10_001, 33, 15), (10_001, 128, 3)]
SHAPES += [(300_000, 1, 3), (300_000, 33, 2), (300_000, 128, 8), (300_000, 128, 15)]


def spec(name: str, dim: int) -> TableSpec:
    return TableSpec("m", name, dim, 0.0, 1000)


@pytest.mark.parametrize(("pairs", "width", "devices"), SHAPES)
def test_the_parts_of_a_table_hold_all_rows_and_the_counters_and_begin_with_rows(pairs: int, width: int, devices: int) -> None:
    parts, each, reached = geometry.part_bytes(pairs, width, devices), -(-pairs // devices), 0
    needed, pair_bytes = geometry.row_bytes(pairs, width) + 8 * geometry.COUNTERS, PAIR_ROWS * 4 * width
    assert len(parts) == devices
    assert all(part >= 0 and part % GRANULE_BYTES == 0 for part in parts)
    assert needed <= sum(parts) < needed + GRANULE_BYTES
    for nth in range(devices):  # a pair is of the device on which its rows begin
        begin, end = sum(parts[:nth]), sum(parts[: nth + 1])
        if nth:
            assert 0 <= begin - min(each * nth, pairs) * pair_bytes < GRANULE_BYTES + 4096  # counters and padding follow
        first, count = geometry.owned_pairs(pairs, width, devices, nth)
        assert (first == reached) or not count
        assert all(begin <= pair * pair_bytes < end for pair in {first, first + count - 1} if count)
        reached += count
    assert reached == pairs
    alone = geometry.bytes_on_device(pairs, width, devices, 0)  # also a copy of the buckets, and its near table
    assert alone == geometry.copy_bytes(pairs) + max(parts)
    assert geometry.bytes_on_device(pairs, width, devices, 50) == alone + geometry.size_bytes(50, width)


def test_tiny_tables_lie_on_the_first_device_and_uneven_pairs_leave_the_last_the_rest() -> None:
    for devices in (2, 3):
        assert geometry.part_bytes(2, 4, devices) == [GRANULE_BYTES] + [0] * (devices - 1)
    assert geometry.owned_pairs(0, 32, 3, 0) == (0, 0)
    assert geometry.bytes_on_device(0, 32, 3, 0) == 0
    pairs, width = 3 * 100_000 - 2, 32
    first, second, third = geometry.part_bytes(pairs, width, 3)
    whole = geometry.granules(geometry.row_bytes(pairs, width) + 8 * geometry.COUNTERS) * GRANULE_BYTES
    assert abs(first - 100_000 * PAIR_ROWS * 4 * width) < GRANULE_BYTES
    assert abs(first - second) <= GRANULE_BYTES
    assert third == whole - first - second


def test_a_copy_of_the_buckets_has_room_for_what_precedes_them() -> None:
    full = (GRANULE_BYTES - kernels.SHARING_BYTES) // kernels.PAIR_BYTES
    assert geometry.copy_bytes(2) == geometry.copy_bytes(full) == GRANULE_BYTES
    assert geometry.copy_bytes(full + 1) == 2 * GRANULE_BYTES
    assert [geometry.granules(needed) for needed in (0, 1, GRANULE_BYTES, GRANULE_BYTES + 1)] == [0, 1, 1, 2]


@pytest.mark.parametrize("devices", [2, 3])
def test_room_is_planned_for_the_parts_of_each_device(devices: int) -> None:
    tables, rows = [spec("large", 64), spec("none", 4)], [1_000_000, 0]
    sharing = DeviceSharing(tuple(range(devices)), (50_000, 0))
    large, none = CudaPlan.room_for(tables, rows, sharing=sharing)
    pairs = kernels.pairs_for(1_000_000)
    assert large.size_bytes == geometry.bytes_on_device(pairs, 64, devices, kernels.pairs_for(50_000))
    assert large.what.startswith(f"{PAIR_ROWS * (-(-pairs // devices) + kernels.pairs_for(50_000)):,} rows of table 'large'")
    assert none.size_bytes == 0
    [without, _] = CudaPlan.room_for(tables, rows, sharing=DeviceSharing(tuple(range(devices))))
    assert without.size_bytes == geometry.bytes_on_device(pairs, 64, devices, 0)
    [alone, _] = CudaPlan.room_for(tables, rows)
    assert alone.size_bytes == geometry.size_bytes(pairs, 64)


def test_buffers_grow_by_powers_of_two_and_then_by_steps() -> None:
    for size in (1 << 16, 1 << 17, 1 << 20, 1 << 28, 5 << 26, 6 << 26):  # from 1 << 28 on in steps
        assert geometry.grown(size - 1) == geometry.grown(size) == size
        assert geometry.grown(size + 1) == (2 * size if size < 1 << 28 else size + (1 << 26))
    assert geometry.grown(1) == 1 << 16


@pytest.mark.parametrize(("max_keys", "listed"), [([1000], 1 << 14), ([1 << 14], 1 << 14), ([1 << 13, (1 << 13) + 1], 1 << 15)])
def test_workspaces_are_planned_for_the_largest_lookup_of_all_tables(max_keys: list[int], listed: int) -> None:
    tables = [TableSpec("m", f"t{nth}", 4 * (nth + 1), 0.0, most) for nth, most in enumerate(max_keys)]
    keys, floats = sum(max_keys), sum(16 * (nth + 1) * most for nth, most in enumerate(max_keys))
    [device, pinned] = CudaPlan.workspaces_for(tables, 3)
    assert (device.place, pinned.place) == ("gpu", "pinned")
    assert device.size_bytes == 3 * (geometry.grown(24 * listed) + (1 << 16) + geometry.grown(floats))
    assert pinned.size_bytes == 3 * (geometry.grown(10 * keys + 2 * floats) + geometry.grown(8 * listed) + (1 << 16))
