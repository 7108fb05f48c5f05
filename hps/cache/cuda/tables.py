"""Allocates the device memory of cached tables, and reports what does not fit."""

from collections.abc import Sequence

import cupy
import numpy as np
from cupy_backends.cuda.api import runtime

from hps.cache.base import ALONE, MOST_SHARED_ROWS, DeviceSharing
from hps.cache.cuda import geometry, kernels, structs
from hps.cache.cuda.device import CUDA_ERRORS, DeviceTable, on_device
from hps.cache.cuda.spread_memory import SpreadMemory
from hps.errors import CapacityError, ConfigError, DeviceMemoryError
from hps.types import TableSpec, rows_text

_MOST_ROWS = (1 << 32) - 1  # kernels use row numbers of 32 bits


def allocate(
    specs: Sequence[TableSpec],
    capacity_rows: Sequence[int],
    device_ids: Sequence[int],
    static: bool,
    near_rows: Sequence[int] = (),
    stretch: int = 1,
) -> tuple[DeviceTable, ...]:
    """Allocate all tables, empty.

    Args:
        device_ids: the devices that share them; the first is current.
        near_rows: by table, the rows of the near tables that others will allocate; they count as needed.
        stretch: of near tables, see `kernels.home_of`.

    Raises:
        DeviceMemoryError: the tables do not fit the device; the message lists the need of each table and a size that would fit.
        ConfigError: a table has more rows than the kernels can number.
    """
    pairs, sizes = _pairs_and_sizes(specs, capacity_rows, static, len(device_ids), near_rows)
    free = []
    for device_id in device_ids:
        with on_device(device_id):
            free.append((runtime.memGetInfo()[0], device_id))
    free_bytes, fullest = min(free)
    if sum(sizes) + geometry.RESERVE_BYTES > free_bytes:
        raise DeviceMemoryError(_does_not_fit("allocating", specs, pairs, sizes, fullest, free_bytes))
    try:
        tables = tuple(_allocate(spec, count, device_ids, stretch) for spec, count in zip(specs, pairs, strict=True))
        runtime.streamSynchronize(0)  # which filled them
        return tables
    except (*CUDA_ERRORS, cupy.cuda.memory.OutOfMemoryError, DeviceMemoryError) as error:
        if "emory" not in str(error):
            raise
        raise DeviceMemoryError(_does_not_fit("allocating", specs, pairs, sizes, fullest, free_bytes)) from error


def check_room(
    specs: Sequence[TableSpec],
    capacity_rows: Sequence[int],
    device_id: int,
    static: bool,
    index_bytes: Sequence[int] = (),
    sharing: DeviceSharing = ALONE,
) -> None:
    """Reject tables that `allocate` could not allocate now together with their indexes.

    Raises:
        CapacityError: they do not fit the current device; the message is that of `allocate`.
        ConfigError: see `allocate`.
    """
    pairs, sizes = _pairs_and_sizes(specs, capacity_rows, static, max(1, len(sharing.device_ids)), sharing.near_rows)
    free_bytes = runtime.memGetInfo()[0] - sum(index_bytes)
    if sum(sizes) + geometry.RESERVE_BYTES > free_bytes:
        raise CapacityError(_does_not_fit("making room for", specs, pairs, sizes, device_id, free_bytes, sum(index_bytes)))


def _pairs_and_sizes(
    specs: Sequence[TableSpec], capacity_rows: Sequence[int], static: bool, devices: int, near_rows: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Return the pairs and bytes of each table on a device; reject tables with more rows than kernels can number."""
    pairs = [kernels.pairs_for(rows, static) for rows in capacity_rows]
    most = _MOST_ROWS if devices == 1 else MOST_SHARED_ROWS
    for spec, count in zip(specs, pairs, strict=True):
        if 2 * kernels.SLOTS * count > most:
            problem = f"got {2 * kernels.SLOTS * count:,} rows for table {spec.table_name!r}, expected at most {most:,}"
            if devices > 1:
                problem += ", or device_sharing replicate"
            raise ConfigError(f"embedding cache of model {spec.model_name!r}", [problem])
    near = [kernels.pairs_for(rows) for rows in near_rows] or [0] * len(specs)
    sizes = [
        geometry.bytes_on_device(count, spec.width, devices, near_count)
        for count, spec, near_count in zip(pairs, specs, near, strict=True)
    ]
    return pairs, sizes


def _allocate(spec: TableSpec, pairs: int, device_ids: Sequence[int], stretch: int) -> DeviceTable:
    if pairs == 0:
        return DeviceTable(spec, 0, 0, 0, 0, structs.TABLE.pack(0, 0, 0, 0, 0, 0, spec.width, kernels.sharing_word()), None)
    if len(device_ids) > 1:
        return _allocate_shared(spec, pairs, device_ids)
    memory = cupy.cuda.Memory(geometry.size_bytes(pairs, spec.width))
    buckets = int(memory.ptr)
    rows = buckets + geometry.bucket_bytes(pairs)
    counters = rows + geometry.row_bytes(pairs, spec.width)
    _empty(buckets, pairs, stretch)
    runtime.memset(counters, 0, 8 * geometry.COUNTERS)
    packed = _packed(spec, pairs, (buckets, rows, counters), kernels.sharing_word(stretch), stretch)
    return DeviceTable(spec, pairs, buckets, rows, counters, packed, memory)


def _allocate_shared(spec: TableSpec, pairs: int, device_ids: Sequence[int]) -> DeviceTable:
    """Allocate a table as `cuda/sharing.cuh` describes it."""
    copy, parts = geometry.copy_bytes(pairs), geometry.part_bytes(pairs, spec.width, len(device_ids))
    places = [*((device, copy) for device in device_ids), *zip(device_ids, parts, strict=True)]
    memory = SpreadMemory(places, device_ids)
    copies = {device: memory.address + nth * copy + kernels.SHARING_BYTES for nth, device in enumerate(device_ids)}
    rows = memory.address + len(device_ids) * copy
    counters = rows + geometry.row_bytes(pairs, spec.width)
    for nth, (device, buckets) in enumerate(copies.items()):
        with on_device(device):
            runtime.memset(buckets - kernels.SHARING_BYTES, 0, kernels.SHARING_BYTES)
            _empty(buckets, pairs)
            write_sharing(buckets, (0, 0, 0, 0, 0, 0, *geometry.owned_pairs(pairs, spec.width, len(device_ids), nth), 0))
            if nth == len(device_ids) - 1:
                runtime.memset(counters, 0, 8 * geometry.COUNTERS)
            runtime.streamSynchronize(0)
    first = copies[device_ids[0]]
    word = kernels.sharing_word(1, len(device_ids), geometry.granules(copy))
    return DeviceTable(spec, pairs, first, rows, counters, _packed(spec, pairs, (first, rows, counters), word), memory, copies)


def write_sharing(buckets: int, values: Sequence[int]) -> None:
    """Write the `Sharing` of a copy of buckets, on its current device; `values` as `structs.SHARING` has them.

    Queries that are launched after the call see it.
    """
    packed = np.frombuffer(structs.SHARING.pack(*values), np.uint8)
    runtime.memcpy(buckets - kernels.SHARING_BYTES, packed.ctypes.data, packed.nbytes, runtime.memcpyHostToDevice)
    runtime.streamSynchronize(0)  # a small copy from host memory may return before it has ended


def _empty(buckets: int, pairs: int, stretch: int = 1) -> None:
    runtime.memset(buckets, 0, geometry.bucket_bytes(pairs))
    bucket = np.array([0] + [kernels.zero_filler(pairs, stretch)] * kernels.SLOTS, np.int64)
    pair, at = np.concatenate([bucket, bucket]), buckets + kernels.PAIR_BYTES * kernels.zero_pair(pairs)
    runtime.memcpy(at, pair.ctypes.data, pair.nbytes, runtime.memcpyHostToDevice)


def _packed(spec: TableSpec, pairs: int, places: tuple[int, int, int], sharing: int, stretch: int = 1) -> bytes:
    filler, zero_pair = kernels.zero_filler(pairs, stretch), kernels.zero_pair(pairs)
    return structs.TABLE.pack(*places, filler, zero_pair, pairs, spec.width, sharing)


def _does_not_fit(
    doing: str,
    specs: Sequence[TableSpec],
    pairs: Sequence[int],
    sizes: Sequence[int],
    device_id: int,
    free_bytes: int,
    index_bytes: int = 0,
) -> str:
    needs = ", ".join(
        f"{size:,} for {2 * kernels.SLOTS * count:,} rows of table {spec.table_name!r} ({rows_text(spec)})"
        for spec, count, size in zip(specs, pairs, sizes, strict=True)
    )
    usable = max(0, free_bytes - geometry.RESERVE_BYTES)
    share = usable / sum(sizes)
    index_text = f" beside {index_bytes:,} for indexes of tables in host memory" if index_bytes else ""
    return (
        f"{doing} the embedding cache of model {specs[0].model_name!r} on CUDA device {device_id}: got {sum(sizes):,} bytes "
        f"to allocate ({needs}), expected at most the {usable:,} that are free{index_text}; a gpucacheper of at most "
        f"{share:.2g} of the present one would fit"
    )
