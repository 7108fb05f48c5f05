"""The embedding cache in the memory of a CUDA device, by the kernels of `cuda/`."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Concatenate, NoReturn, ParamSpec, Self, TypeVar, cast

import cupy
import numpy as np
import numpy.typing as npt
from cupy_backends.cuda.api import runtime

from hps.cache.base import CacheStats, EmbeddingCache, Misses, Segment, TableMisses, Workspace
from hps.cache.cuda import kernels
from hps.cache.cuda.device import CUDA_ERRORS, compile_all, copy_to_device, on_device
from hps.cache.cuda.lookup import LookupKernels, Missed
from hps.cache.cuda.modifications import Modifications
from hps.cache.cuda.tables import Table, allocate
from hps.cache.cuda.tensors import TensorReader
from hps.cache.cuda.workspace import CupyWorkspace
from hps.errors import DeviceError, DeviceMemoryError, InvalidDtypeError, InvalidInputError, NotReadyError
from hps.types import BoolArray, FloatArray, KeyArray, TableSpec

_MAPPED_BYTES = 1 << 18  # up to here, fetched vectors are read from pinned host memory: a copy of its own costs more
_OUT_OF_MEMORY = "cudaErrorMemoryAllocation"
P = ParamSpec("P")
R = TypeVar("R")


def _device_call(doing: str) -> Callable[[Callable[Concatenate["CupyCache", P], R]], Callable[Concatenate["CupyCache", P], R]]:
    """Run a method with the cache's device current, and turn CUDA's errors into ours."""

    def decorate(method: Callable[Concatenate["CupyCache", P], R]) -> Callable[Concatenate["CupyCache", P], R]:
        def call(self: "CupyCache", /, *args: P.args, **kwargs: P.kwargs) -> R:
            device, previous = self.device_id, runtime.getDevice()
            try:
                runtime.setDevice(device)  # also where it is current: a thread's first call binds the context
                return method(self, *args, **kwargs)
            except (*CUDA_ERRORS, cupy.cuda.memory.OutOfMemoryError) as error:
                self._fail(doing, error)
            finally:
                if previous != device:
                    runtime.setDevice(previous)

        functools.update_wrapper(call, method)
        return call

    return decorate


class CupyCache(EmbeddingCache):
    """The vectors of one model's tables that are resident in the memory of a CUDA device. *Thread-safe*, given a workspace a
    caller.

    A table is made of pairs of buckets of 7 keys; `cuda/embedding_cache.cuh` says how. A set, in the words of the contract,
    is a bucket: its capacity is a multiple of 14 rows, at least 28, since a bucket that is full uses what its neighbour has
    empty. A table that is filled to its capacity keeps about 0.9 of its keys resident.

    **Recency.** A score of a key goes to 15 when the key is asked for, and is written only when it changes. A key becomes
    resident with score 1. An insert into a full bucket evicts the smallest score, the first of equals, and lowers the others
    there by it; so time passes for a bucket as keys are admitted to it, not as others are asked for. (At alpha 1.05 and a
    capacity of 0.1 of 2^24 rows this reaches 0.98 of the hit rate of perfect frequency knowledge, plain LRU 0.957.)

    Keys, outputs and masks may be in host memory (NumPy) or on the device: CuPy's and torch's tensors, `TensorView`s of
    DLPack and whatever else speaks it, each independently. Small outputs in host memory are written by the device itself.

    A CUDA error that is not a lack of memory leaves a device in no state to go on: later calls raise it again, and
    `healthy` is False.
    """

    device: ClassVar[str] = "cuda"

    def __init__(self, tables: Sequence[TableSpec], capacity_rows: Sequence[int], device_id: int) -> None:
        self.tables = tuple(tables)
        self.device_id = device_id
        self._dims = tuple(table.dim for table in tables)
        self._error: str | None = None
        self._open: tuple[Table, ...] | None = None
        self._allocate(capacity_rows)

    @classmethod
    def unavailable_reason(cls) -> str | None:
        """Why this machine cannot run this cache; None where it can."""
        try:
            count = runtime.getDeviceCount()
        except runtime.CUDARuntimeError as error:
            return f"CuPy finds no CUDA device: {error}"
        return None if count else "CuPy finds no CUDA device"

    @classmethod
    def create(cls, tables: Sequence[TableSpec], capacity_rows: Sequence[int], device_id: int) -> Self:
        """Allocate a cache for all tables of a model, and compile its kernels. See `EmbeddingCache.create`."""
        reason = cls.unavailable_reason()
        if reason is None and not 0 <= device_id < runtime.getDeviceCount():
            reason = f"got CUDA device {device_id}, wanted one of 0 to {runtime.getDeviceCount() - 1}"
        if reason is not None:
            raise DeviceError(f"creating the embedding cache of model {tables[0].model_name!r}: {reason}")
        return cls(tables, capacity_rows, device_id)

    @property
    def healthy(self) -> bool:
        """Whether no CUDA call has failed in a way that the device does not recover from."""
        return self._error is None

    @_device_call("creating a workspace")
    def create_workspace(self) -> CupyWorkspace:
        """Allocate the scratch of one lookup at a time; it grows with the lookups that it serves."""
        self._tables()
        return CupyWorkspace(self.device_id, self._dims)

    @_device_call("adopting tensors")
    def adopt(self, workspace: Workspace, segments: Sequence[Segment]) -> Sequence[Segment]:
        """Find keys and outputs on the device, or in memory that it can read; see `EmbeddingCache.adopt`."""
        self._tables()
        cast(CupyWorkspace, workspace).begin(segments)
        return segments

    @_device_call("querying")
    def query(self, workspace: Workspace, segments: Sequence[Segment]) -> Misses:
        """Copy resident vectors to their rows of `out`; list the rest. See `EmbeddingCache.query`.

        One kernel and one wait for it if all keys are resident; else a second of each, for the distinct missing keys.
        """
        self._tables()
        own = cast(CupyWorkspace, workspace)
        placed = own.find(segments)
        self._modifications.show(own.stream)
        own.any_missing[0] = 0
        try:
            self._kernels.query(own, placed)
            own.synchronise()
            if not own.any_missing[0]:
                return Misses([0] * len(placed), own)
            self._kernels.unique(own, placed)
            own.synchronise()
        except CUDA_ERRORS:
            own.clear()
            raise
        return Misses(own.counts[: len(placed), 0].tolist(), own)

    @_device_call("finding the distinct missing keys")
    def unique(self, workspace: Workspace, misses: Misses) -> list[TableMisses]:
        """Bring the misses to the host, each key of a table once. See `EmbeddingCache.unique`."""
        own = cast(CupyWorkspace, workspace)
        return [
            TableMisses(place.segment, self._kernels.distinct(own, index, place, count), Missed(place, count))
            for index, (place, count) in enumerate(zip(own.placed, misses.counts, strict=True))
            if count
        ]

    @_device_call("allocating a fetch buffer")
    def fetch_buffer(self, workspace: Workspace, missed: TableMisses) -> FloatArray:
        """Pinned memory for the vectors of `missed.keys`: (u, dim) float32; content unspecified."""
        own, state = cast(CupyWorkspace, workspace), cast(Missed, missed.state)
        dim = self._dims[missed.segment.table]
        size = 4 * missed.keys.size * dim
        pointer, pinned = own.host.take(size)
        state.vectors, state.staged = pointer, 0
        if size > _MAPPED_BYTES:
            state.vectors, state.staged = own.device_space(size), pointer
        buffer: FloatArray = pinned.view(np.float32).reshape(-1, dim)
        return buffer

    @_device_call("copying fetched vectors")
    def stage(self, workspace: Workspace, missed: TableMisses, start: int, stop: int) -> None:
        """Begin to copy rows [start, stop) of the fetch buffer to the device, where they are too many to be read in place."""
        own, state = cast(CupyWorkspace, workspace), cast(Missed, missed.state)
        if state.staged and stop > start:
            row = 4 * self._dims[missed.segment.table]
            copy_to_device(state.vectors + start * row, state.staged + start * row, (stop - start) * row, own.stream)
            own.launched()

    @_device_call("scattering fetched vectors")
    def scatter(self, workspace: Workspace, missed: TableMisses, found: BoolArray) -> None:
        """Write the fetched or the default vector to every missing position. See `EmbeddingCache.scatter`."""
        own, state = cast(CupyWorkspace, workspace), cast(Missed, missed.state)
        self._place_mask(own, state, found)
        self._kernels.scatter(own, state)

    @_device_call("inserting fetched vectors")
    def insert_fetched(self, workspace: Workspace, missed: TableMisses, found: BoolArray) -> None:
        """Insert the fetched vectors whose `found` is True; keys that have become resident meanwhile are left alone."""
        own, state = cast(CupyWorkspace, workspace), cast(Missed, missed.state)
        table = self._tables()[missed.segment.table]
        self._place_mask(own, state, found)
        if not state.found or not table.pairs:
            return
        keys = own.distinct + 8 * state.place.missing
        n, arguments = missed.keys.size, own.insert_arguments
        self._modifications.launch_insert(table, keys, state.vectors, state.found, n, kernels.ADMIT, arguments, own.stream)
        own.launched()

    @_device_call("writing default vectors")
    def fill_default(self, workspace: Workspace, misses: Misses) -> None:
        """Write the default vector to every missing position of every segment."""
        own = cast(CupyWorkspace, workspace)
        for place, count in zip(own.placed, misses.counts, strict=True):
            if count:
                self._kernels.scatter(own, Missed(place, count))

    @_device_call("delivering outputs")
    def finish(self, workspace: Workspace, segments: Sequence[Segment]) -> None:
        """Bring the outputs to the caller's host memory, or order them before what its streams do next."""
        cast(CupyWorkspace, workspace).deliver()

    def host_buffer(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> np.ndarray:
        """Pinned host memory. See `EmbeddingCache.host_buffer`."""
        count = math.prod(shape)
        memory = cupy.cuda.alloc_pinned_memory(max(1, count) * np.dtype(dtype).itemsize)
        return np.frombuffer(memory, dtype, count).reshape(shape)

    @_device_call("inserting")
    def insert(
        self,
        table: int,
        keys: KeyArray,  # (n,)
        vectors: FloatArray,  # (n, dim)
    ) -> None:
        """Make vectors resident, replacing those of resident keys. See `EmbeddingCache.insert`."""
        self._write(table, keys, vectors, kernels.REPLACE | kernels.ADMIT, "inserting into")

    @_device_call("updating")
    def update(self, table: int, keys: KeyArray, vectors: FloatArray) -> None:
        """Replace the vectors of those keys that are resident. See `EmbeddingCache.update`."""
        self._write(table, keys, vectors, kernels.REPLACE, "updating")

    @_device_call("erasing")
    def erase(self, table: int, keys: KeyArray) -> None:
        """Make keys non-resident."""
        own = self._tables()[table]
        _check(own.spec, keys, None, "erasing from")
        if own.pairs and keys.size:
            self._modifications.erase(own, keys)

    @_device_call("dumping keys")
    def dump(self, table: int) -> KeyArray:
        """The resident keys of a table, in unspecified order, in a host array that the caller owns."""
        return self._modifications.dump(self._tables()[table])

    @_device_call("reading counters")
    def stats(self, table: int) -> CacheStats:
        """Counters of a table. `inserts` counts keys that became resident."""
        own = self._tables()[table]
        admitted, evicted, erased = self._modifications.counters(own) if own.pairs else (0, 0, 0)
        return CacheStats(own.capacity_rows, admitted - evicted - erased, admitted, evicted, own.size_bytes)

    def close(self) -> None:
        """Let the memory go once the calls that are running have returned. Closing twice changes nothing."""
        if self._open is None:
            return
        self._open = None
        with on_device(self.device_id):
            try:
                self._modifications.close()
            except CUDA_ERRORS as error:
                self._error = self._error or str(error)

    @_device_call("creating an embedding cache")
    def _allocate(self, capacity_rows: Sequence[int]) -> None:
        self._modifications = Modifications(self.device_id)
        self._open = allocate(self.tables, capacity_rows, self.device_id)
        self._kernels = LookupKernels(self.device_id, self._open)
        compile_all(self.device_id, [*self._kernels.needed(), *self._modifications.needed(self._dims)])

    def _tables(self) -> tuple[Table, ...]:
        if self._error is not None:
            raise DeviceError(f"using the embedding cache of CUDA device {self.device_id}: it failed before ({self._error})")
        tables = self._open
        if tables is None:
            raise NotReadyError("using an embedding cache that is closed")
        return tables

    def _fail(self, doing: str, error: Exception) -> NoReturn:
        where = f"{doing} (embedding cache of CUDA device {self.device_id})"
        if isinstance(error, cupy.cuda.memory.OutOfMemoryError) or _OUT_OF_MEMORY in str(error):
            raise DeviceMemoryError(
                f"{where}: the device has no memory left ({error}); lower gpucacheper, max_batch_size or "
                "num_of_worker_buffer_in_pool"
            ) from error
        try:
            runtime.memGetInfo()  # a context that is lost refuses every call
        except CUDA_ERRORS:
            self._error = str(error)
            raise DeviceError(f"{where}: {error}; the process has to be restarted") from error
        raise DeviceError(f"{where}: {error}") from error

    def _place_mask(self, own: CupyWorkspace, state: Missed, found: BoolArray) -> None:
        if state.vectors and not state.found and found.any():
            state.found, pinned = own.host.take(found.size)
            np.copyto(pinned.view(np.bool_), found)

    def _write(self, index: int, keys: Any, vectors: Any, mode: int, doing: str) -> None:
        table = self._tables()[index]
        if isinstance(keys, np.ndarray) and isinstance(vectors, np.ndarray):
            _check(table.spec, keys, vectors, doing)
            if table.pairs and keys.size:
                self._modifications.insert(table, keys, vectors, mode)
            return
        reader = TensorReader(self.device_id)
        reader.start()
        keys_at, n = reader.keys(keys)
        vectors_at = reader.output(vectors, n * table.spec.dim)
        if table.pairs and n:
            self._modifications.insert_on_device(table, keys_at, vectors_at, n, mode, reader.streams)


def _check(spec: TableSpec, keys: np.ndarray, vectors: np.ndarray | None, doing: str) -> None:
    """Refuse host arrays that the kernels would misread."""
    what = f"{doing} the cached table {spec.tag}"
    for name, array, dtype in (("keys", keys, np.int64), ("vectors", vectors, np.float32)):
        if array is None:
            continue
        if array.dtype != dtype:
            raise InvalidDtypeError(f"{what}: {name}: got dtype {array.dtype}, wanted {np.dtype(dtype)}")
        if not array.flags.c_contiguous:
            raise InvalidInputError(f"{what}: {name}: got an array that is not C-contiguous; copy it first")
    if keys.ndim != 1 or (vectors is not None and vectors.shape != (keys.size, spec.dim)):
        got = f"keys {keys.shape}" + ("" if vectors is None else f", vectors {vectors.shape}")
        raise InvalidInputError(f"{what}: got {got}, wanted keys (n,), vectors (n, {spec.dim})")
