"""Allocates the device memory of cached tables, and reports what does not fit."""

from collections.abc import Sequence

import cupy
import numpy as np
from cupy_backends.cuda.api import runtime

from hps.cache.cuda import geometry, kernels
from hps.cache.cuda.device import CUDA_ERRORS, DeviceTable
from hps.errors import CapacityError, ConfigError, DeviceMemoryError
from hps.types import TableSpec, rows_text

_MOST_ROWS = 1 << 32  # the kernels use 32-bit row numbers


def allocate(specs: Sequence[TableSpec], capacity_rows: Sequence[int], device_id: int, static: bool) -> tuple[DeviceTable, ...]:
    """Allocate all tables, empty.

    Raises:
        DeviceMemoryError: the tables do not fit the device; the message lists the need of each table and a size that would fit.
        ConfigError: a table has more rows than the kernels can number.
    """
    pairs = [kernels.pairs_for(rows, static) for rows in capacity_rows]
    for spec, count in zip(specs, pairs, strict=True):
        if 2 * kernels.SLOTS * count >= _MOST_ROWS:
            problem = f"got {2 * kernels.SLOTS * count:,} rows for table {spec.table_name!r}, expected less than {_MOST_ROWS:,}"
            raise ConfigError(f"embedding cache of model {spec.model_name!r}", [problem])
    sizes = [geometry.size_bytes(count, spec.width) for count, spec in zip(pairs, specs, strict=True)]
    free_bytes, _total = runtime.memGetInfo()
    if sum(sizes) + geometry.RESERVE_BYTES > free_bytes:
        raise DeviceMemoryError(_does_not_fit("allocating", specs, pairs, sizes, device_id, free_bytes))
    try:
        tables = tuple(_allocate(spec, count) for spec, count in zip(specs, pairs, strict=True))
        runtime.streamSynchronize(0)  # which filled them
        return tables
    except (*CUDA_ERRORS, cupy.cuda.memory.OutOfMemoryError) as error:
        if "emory" not in str(error):
            raise
        raise DeviceMemoryError(_does_not_fit("allocating", specs, pairs, sizes, device_id, free_bytes)) from error


def check_room(
    specs: Sequence[TableSpec], capacity_rows: Sequence[int], device_id: int, static: bool, index_bytes: Sequence[int] = ()
) -> None:
    """Reject tables that `allocate` could not allocate now beside their indexes.

    Raises:
        CapacityError: they do not fit the current device; the message is that of `allocate`.
    """
    pairs = [kernels.pairs_for(rows, static) for rows in capacity_rows]
    sizes = [geometry.size_bytes(count, spec.width) for count, spec in zip(pairs, specs, strict=True)]
    free_bytes = runtime.memGetInfo()[0] - sum(index_bytes)
    if sum(sizes) + geometry.RESERVE_BYTES > free_bytes:
        raise CapacityError(_does_not_fit("making room for", specs, pairs, sizes, device_id, free_bytes, sum(index_bytes)))


def _allocate(spec: TableSpec, pairs: int) -> DeviceTable:
    if pairs == 0:
        return DeviceTable(spec, 0, 0, 0, 0, kernels.TABLE.pack(0, 0, 0, 0, 0, 0, spec.width), None)
    memory = cupy.cuda.Memory(geometry.size_bytes(pairs, spec.width))
    buckets = int(memory.ptr)
    rows = buckets + geometry.bucket_bytes(pairs)
    counters = rows + geometry.row_bytes(pairs, spec.width)
    zero_pair, filler = kernels.zero_pair(pairs), kernels.zero_filler(pairs)
    runtime.memset(buckets, 0, geometry.bucket_bytes(pairs))
    runtime.memset(counters, 0, 8 * geometry.COUNTERS)
    bucket = np.array([0] + [filler] * kernels.SLOTS, np.int64)
    pair = np.concatenate([bucket, bucket])
    runtime.memcpy(buckets + kernels.PAIR_BYTES * zero_pair, pair.ctypes.data, pair.nbytes, runtime.memcpyHostToDevice)
    packed = kernels.TABLE.pack(buckets, rows, counters, filler, zero_pair, pairs, spec.width)
    return DeviceTable(spec, pairs, buckets, rows, counters, packed, memory)


def _does_not_fit(
    doing: str,
    specs: Sequence[TableSpec],
    pairs: Sequence[int],
    sizes: Sequence[int],
    device_id: int,
    free_bytes: int,
    index_bytes: int = 0,
) -> str:
    asked = ", ".join(
        f"{size:,} for {2 * kernels.SLOTS * count:,} rows of table {spec.table_name!r} ({rows_text(spec)})"
        for spec, count, size in zip(specs, pairs, sizes, strict=True)
    )
    usable = max(0, free_bytes - geometry.RESERVE_BYTES)
    share = usable / sum(sizes)
    beside = f" beside {index_bytes:,} for index_on_device" if index_bytes else ""
    return (
        f"{doing} the embedding cache of model {specs[0].model_name!r} on CUDA device {device_id}: got {sum(sizes):,} bytes "
        f"to allocate ({asked}), expected at most the {usable:,} that are free{beside}; a gpucacheper of at most {share:.2g} "
        "of the present one would fit"
    )
