"""The device memory of cached tables: its size, the error when it does not fit, and calls that work on it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import update_wrapper
from typing import Concatenate, NoReturn, ParamSpec, Protocol, TypeVar

import cupy
import numpy as np
from cupy_backends.cuda.api import runtime

from hps.cache.cuda import geometry, kernels
from hps.cache.cuda.device import CUDA_ERRORS
from hps.errors import CapacityError, ConfigError, DeviceError, DeviceMemoryError
from hps.lifetimes import disown_in_children, refusal
from hps.types import TableSpec

P = ParamSpec("P")
R = TypeVar("R")

_OUT_OF_MEMORY = "cudaErrorMemoryAllocation"
_MOST_ROWS = 1 << 32  # the kernels number them with 32 bits


@dataclass(frozen=True, slots=True, eq=False)
class DeviceTable:
    """The memory of one table; `cuda/embedding_cache.cuh` describes its layout. Freed with its last user.

    Attributes:
        pairs: of buckets; 0 where nothing is cached.
        buckets, rows, counters: addresses on the device.
        packed: the struct that the kernels take.
    """

    spec: TableSpec
    pairs: int
    buckets: int
    rows: int
    counters: int
    packed: bytes
    memory: cupy.cuda.Memory | None

    @property
    def capacity_rows(self) -> int:
        return 2 * kernels.SLOTS * self.pairs

    @property
    def size_bytes(self) -> int:
        return geometry.size_bytes(self.pairs, self.spec.dim)


class TableMemory:
    """The tables of one model on one device, until they are closed or CUDA fails. *Thread-safe.*

    Attributes:
        specs: the tables, in the order of their ids.
        open: their memory; None once it is closed.
        error: the CUDA error that left the device in no state to go on; None while there was none.
    """

    __slots__ = ("__weakref__", "_disowned", "device_id", "error", "open", "specs")

    def __init__(self, specs: Sequence[TableSpec], device_id: int) -> None:
        self.specs = tuple(specs)
        self.device_id = device_id
        self.open: tuple[DeviceTable, ...] | None = None
        self.error: str | None = None
        self._disowned: object = None
        disown_in_children(self)

    def disown(self) -> None:
        """In a forked child, which must not call CUDA: refuse every call, and keep the memory from being freed here."""
        self._disowned, self.open = self.open, None

    def tables(self) -> tuple[DeviceTable, ...]:
        """The tables, which a caller keeps for as long as it works on them.

        Raises:
            DeviceError: CUDA failed before.
            NotReadyError: the cache is closed.
        """
        if self.error is not None:
            raise DeviceError(f"using the embedding cache of CUDA device {self.device_id}: it failed before ({self.error})")
        tables = self.open
        if tables is None:
            raise refusal(self, "an embedding cache")
        return tables

    def fail(self, doing: str, error: Exception) -> NoReturn:
        """Raise our error for one of CUDA's, and remember one that the device does not recover from."""
        where = f"{doing} (embedding cache of CUDA device {self.device_id})"
        if isinstance(error, cupy.cuda.memory.OutOfMemoryError) or _OUT_OF_MEMORY in str(error):
            raise DeviceMemoryError(
                f"{where}: the device has no memory left ({error}); lower gpucacheper, max_batch_size or "
                "num_of_worker_buffer_in_pool"
            ) from error
        try:
            runtime.memGetInfo()  # a context that is lost refuses every call
        except CUDA_ERRORS:
            self.error = str(error)
            raise DeviceError(f"{where}: {error}; the process has to be restarted") from error
        raise DeviceError(f"{where}: {error}") from error


class HasMemory(Protocol):
    """What has methods that `device_call` decorates."""

    @property
    def memory(self) -> TableMemory:
        """The tables that the methods work on."""


M = TypeVar("M", bound=HasMemory)


def device_call(doing: str) -> Callable[[Callable[Concatenate[M, P], R]], Callable[Concatenate[M, P], R]]:
    """Run a method with its device current, and turn CUDA's errors into ours; `doing` begins their messages."""

    def decorate(method: Callable[Concatenate[M, P], R]) -> Callable[Concatenate[M, P], R]:
        def call(self: M, /, *args: P.args, **kwargs: P.kwargs) -> R:
            device, previous = self.memory.device_id, runtime.getDevice()
            try:
                runtime.setDevice(device)  # even where it is current: a thread's first call binds the context
                return method(self, *args, **kwargs)
            except (*CUDA_ERRORS, cupy.cuda.memory.OutOfMemoryError) as error:
                self.memory.fail(doing, error)
            finally:
                if previous != device:
                    runtime.setDevice(previous)

        update_wrapper(call, method)
        return call

    return decorate


def allocate(specs: Sequence[TableSpec], capacity_rows: Sequence[int], device_id: int) -> tuple[DeviceTable, ...]:
    """Allocate all tables, empty.

    Raises:
        DeviceMemoryError: they do not fit the device; the message says how much each table needs and what would fit.
        ConfigError: a table has more rows than the kernels can number.
    """
    pairs = [kernels.pairs_for(rows) for rows in capacity_rows]
    for spec, count in zip(specs, pairs, strict=True):
        if 2 * kernels.SLOTS * count >= _MOST_ROWS:
            problem = f"got {2 * kernels.SLOTS * count:,} rows for table {spec.table_name!r}, expected less than {_MOST_ROWS:,}"
            raise ConfigError(f"embedding cache of model {spec.model_name!r}", [problem])
    sizes = [geometry.size_bytes(count, spec.dim) for count, spec in zip(pairs, specs, strict=True)]
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


def check_room(specs: Sequence[TableSpec], capacity_rows: Sequence[int], device_id: int) -> None:
    """Refuse tables that `allocate` could not allocate now.

    Raises:
        CapacityError: they do not fit the current device; the message is that of `allocate`.
    """
    pairs = [kernels.pairs_for(rows) for rows in capacity_rows]
    sizes = [geometry.size_bytes(count, spec.dim) for count, spec in zip(pairs, specs, strict=True)]
    free_bytes, _total = runtime.memGetInfo()
    if sum(sizes) + geometry.RESERVE_BYTES > free_bytes:
        raise CapacityError(_does_not_fit("making room for", specs, pairs, sizes, device_id, free_bytes))


def _allocate(spec: TableSpec, pairs: int) -> DeviceTable:
    if pairs == 0:
        return DeviceTable(spec, 0, 0, 0, 0, kernels.TABLE.pack(0, 0, 0, 0, 0, 0, spec.dim), None)
    memory = cupy.cuda.Memory(geometry.size_bytes(pairs, spec.dim))
    buckets = int(memory.ptr)
    rows = buckets + geometry.bucket_bytes(pairs)
    counters = rows + geometry.row_bytes(pairs, spec.dim)
    zero_pair, filler = kernels.zero_pair(pairs), kernels.zero_filler(pairs)
    runtime.memset(buckets, 0, geometry.bucket_bytes(pairs))
    runtime.memset(counters, 0, 8 * geometry.COUNTERS)
    bucket = np.array([0] + [filler] * kernels.SLOTS, np.int64)
    pair = np.concatenate([bucket, bucket])
    runtime.memcpy(buckets + kernels.PAIR_BYTES * zero_pair, pair.ctypes.data, pair.nbytes, runtime.memcpyHostToDevice)
    packed = kernels.TABLE.pack(buckets, rows, counters, filler, zero_pair, pairs, spec.dim)
    return DeviceTable(spec, pairs, buckets, rows, counters, packed, memory)


def _does_not_fit(
    doing: str, specs: Sequence[TableSpec], pairs: Sequence[int], sizes: Sequence[int], device_id: int, free_bytes: int
) -> str:
    asked = ", ".join(
        f"{size:,} for {2 * kernels.SLOTS * count:,} rows of table {spec.table_name!r} (dim {spec.dim})"
        for spec, count, size in zip(specs, pairs, sizes, strict=True)
    )
    usable = max(0, free_bytes - geometry.RESERVE_BYTES)
    share = usable / sum(sizes)
    return (
        f"{doing} the embedding cache of model {specs[0].model_name!r} on CUDA device {device_id}: got {sum(sizes):,} bytes "
        f"to allocate ({asked}), expected at most the {usable:,} that are free; a gpucacheper of at most {share:.2g} of the "
        "present one would fit"
    )
