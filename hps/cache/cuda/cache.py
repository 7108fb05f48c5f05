"""The embedding cache in the memory of a CUDA device, by the kernels of `cuda/`."""

import math
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, ClassVar, Self

import cupy
import numpy as np
import numpy.typing as npt
from cupy_backends.cuda.api import runtime

from hps.cache.base import CacheStats, DeviceMemory, EmbeddingCache, UnwaitedCounts
from hps.cache.cuda import geometry, kernels
from hps.cache.cuda.device import CUDA_ERRORS, compile_all, on_device
from hps.cache.cuda.graphs import CupyCapture, CupyGraph, capture_of, record
from hps.cache.cuda.links import AttachedTable, CudaPinner
from hps.cache.cuda.lookup import LookupKernels
from hps.cache.cuda.modifications import Modifications
from hps.cache.cuda.pooling import PoolingLookup
from hps.cache.cuda.tables import TableMemory, allocate, check_room, device_call
from hps.cache.cuda.tensors import TensorReader
from hps.errors import DeviceError, InvalidInputError
from hps.host_tables import HostTable
from hps.tensors.segments import Segment, check_rows
from hps.types import FloatArray, KeyArray, TableSpec

_READS_HOST_POINTERS = 91  # cudaDevAttrCanUseHostPointerForRegisteredMem


class CupyCache(EmbeddingCache):
    """The vectors of one model's tables that are resident in the memory of a CUDA device. *Thread-safe*; its lookups
    are not.

    A table consists of pairs of buckets of 7 keys; `cuda/embedding_cache.cuh` describes them. A bucket is what the contract
    calls a set. The capacity is a multiple of 14 rows and at least 28: a bucket that is full uses empty slots of its
    neighbour. A table that is filled to its capacity keeps about 0.9 of its keys resident.

    **Recency.** The score of a key is at least 8 when the key has been asked for, 15 when that happened again since, and 0, 1
    or 4 when it becomes resident. An insert into a full bucket evicts the smallest score, the first of equals, and lowers the
    others there by it. A missed key evicts only a score of 0, unless it is the key that was refused last there; every other
    key that is refused lowers the scores by 1. So time passes for a bucket as keys of it miss, not as others are asked for.
    (At alpha 1.05 and a capacity of 0.1 of 2^24 rows this reaches 0.985 of the hit rate of perfect frequency knowledge,
    admitting every miss 0.979, plain LRU 0.957; `python -m benchmarks admission` simulates it.)

    Keys, outputs and masks may each be in host memory (NumPy) or on the device: tensors of torch and CuPy, `TensorView`s, and
    whatever else speaks DLPack. Outputs in host memory pass through pinned memory, which the device writes.

    After a CUDA error from which the device does not recover, every call raises it again.
    """

    device: ClassVar[str] = "cuda"

    def __init__(self, tables: Sequence[TableSpec], capacity_rows: Sequence[int], device_id: int) -> None:
        self.tables = tuple(tables)
        self.device_id = device_id
        self.memory = TableMemory(tables, device_id)
        self._links: list[AttachedTable | None] = [None] * len(tables)
        self._readers = threading.local()
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
    def free_bytes(cls, device_id: int) -> int:
        """Free memory of a device, beside what is kept for the driver."""
        with on_device(device_id):
            return int(runtime.memGetInfo()[0]) - geometry.RESERVE_BYTES

    @classmethod
    def check_room(cls, tables: Sequence[TableSpec], capacity_rows: Sequence[int], device_id: int) -> None:
        """Refuse what does not fit the device; see `EmbeddingCache.check_room`."""
        cls._check_device(tables, device_id)
        with on_device(device_id):
            check_room(tables, capacity_rows, device_id)

    @classmethod
    def create(cls, tables: Sequence[TableSpec], capacity_rows: Sequence[int], device_id: int) -> Self:
        """Allocate a cache for all tables of a model, and compile its kernels. See `EmbeddingCache.create`."""
        cls._check_device(tables, device_id)
        return cls(tables, capacity_rows, device_id)

    @classmethod
    def _check_device(cls, tables: Sequence[TableSpec], device_id: int) -> None:
        reason = cls.unavailable_reason()
        if reason is None and not 0 <= device_id < runtime.getDeviceCount():
            reason = f"got CUDA device {device_id}, expected one of 0 to {runtime.getDeviceCount() - 1}"
        if reason is not None:
            raise DeviceError(f"creating the embedding cache of model {tables[0].model_name!r}: {reason}")

    @device_call("creating a lookup")
    def create_lookup(self) -> PoolingLookup:
        """Allocate what one lookup at a time needs; it grows with the lookups that it serves."""
        self.memory.tables()
        return PoolingLookup(self.memory, self._kernels, self._changes, self._links)

    def attach(
        self,
        table: int,
        host: HostTable,
        authoritative: bool,
        progress: Callable[[int, int], None] | None = None,
    ) -> str | None:
        """Let lookups read a table in host memory in place. See `EmbeddingCache.attach`."""
        try:
            with on_device(self.device_id):
                if not runtime.deviceGetAttribute(_READS_HOST_POINTERS, self.device_id):
                    return f"CUDA device {self.device_id} does not read registered host memory by the host's addresses"
                host.pin(CudaPinner(self.device_id), progress)
                compile_all(self.device_id, self._kernels.for_links())
                self.detach(table)
                self._links[table] = AttachedTable(self.device_id, host, authoritative)
        except (DeviceError, InvalidInputError, *CUDA_ERRORS) as error:
            return str(error)
        return None

    def detach(self, table: int) -> None:
        """Leave the misses of a table to the host from now on."""
        link, self._links[table] = self._links[table], None
        if link is not None:
            link.close()

    def changing(self, table: int) -> AbstractContextManager[None]:
        """To be held while rows of an attached table are modified. See `EmbeddingCache.changing`."""
        link = self._links[table]
        return nullcontext() if link is None or self.memory.open is None else link.changing()

    @device_call("reading counters")
    def unwaited(self, table: int) -> UnwaitedCounts:
        """Counters of a table's lookups that were only enqueued."""
        link = self._links[table]
        return UnwaitedCounts(0, 0, 0, 0) if link is None else link.unwaited()

    @device_call("capturing a lookup")
    def capture_of(self, segments: Sequence[Segment]) -> CupyCapture | None:
        """What captures the stream of a lookup's tensors. See `EmbeddingCache.capture_of`."""
        return capture_of(self._reader(), segments)

    @device_call("capturing a lookup")
    def record(self, segments: Sequence[Segment], enqueue: Callable[[Sequence[Segment]], None]) -> CupyGraph:
        """Make a graph of what `enqueue` launches. See `EmbeddingCache.record`."""
        return record(self._reader(), self.memory, segments, enqueue)

    def host_buffer(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> np.ndarray:
        """Pinned host memory. See `EmbeddingCache.host_buffer`."""
        count = math.prod(shape)
        memory = cupy.cuda.alloc_pinned_memory(max(1, count) * np.dtype(dtype).itemsize)
        return np.frombuffer(memory, dtype, count).reshape(shape)

    @device_call("inserting")
    def insert(
        self,
        table: int,
        keys: KeyArray,  # (n,)
        vectors: FloatArray,  # (n, dim)
    ) -> None:
        """Make vectors resident, replacing those of resident keys. See `EmbeddingCache.insert`."""
        self._write(table, keys, vectors, kernels.REPLACE | kernels.ADMIT, "inserting into")

    @device_call("updating")
    def update(self, table: int, keys: KeyArray, vectors: FloatArray) -> None:
        """Replace the vectors of those keys that are resident. See `EmbeddingCache.update`."""
        self._write(table, keys, vectors, kernels.REPLACE, "updating")

    @device_call("erasing")
    def erase(self, table: int, keys: KeyArray) -> None:
        """Make keys non-resident."""
        own = self.memory.tables()[table]
        check_rows(own.spec, keys, None, "erasing from")
        if own.pairs and keys.size:
            self._changes.erase(own, keys)

    @device_call("dumping keys")
    def dump(self, table: int) -> KeyArray:
        """The resident keys of a table, in unspecified order, in a host array that the caller owns."""
        return self._changes.dump(self.memory.tables()[table])

    @device_call("reading counters")
    def stats(self, table: int) -> CacheStats:
        """Counters of a table. `inserts` counts keys that became resident."""
        own = self.memory.tables()[table]
        admitted, evicted, erased = self._changes.counters(own) if own.pairs else (0, 0, 0)
        return CacheStats(own.capacity_rows, admitted - evicted - erased, admitted, evicted, own.size_bytes)

    @device_call("asking for the memory")
    def device_memory(self) -> DeviceMemory:
        """Memory of the device, by its driver: of all processes."""
        free_bytes, total_bytes = runtime.memGetInfo()
        return DeviceMemory(_device_name(self.device_id), total_bytes, free_bytes)

    def close(self) -> None:
        """Release the memory once the running calls have returned. Closing twice changes nothing."""
        if self.memory.open is None:
            return
        self.memory.open = None
        for table in range(len(self.tables)):
            self.detach(table)
        with on_device(self.device_id):
            try:
                self._changes.close()
            except CUDA_ERRORS as error:
                self.memory.error = self.memory.error or str(error)

    @device_call("creating an embedding cache")
    def _allocate(self, capacity_rows: Sequence[int]) -> None:
        self._changes = Modifications(self.device_id)
        self.memory.open = tables = allocate(self.tables, capacity_rows, self.device_id)
        self._kernels = LookupKernels(self.device_id, tables)
        compile_all(self.device_id, [*self._kernels.needed(), *self._changes.needed([table.dim for table in self.tables])])

    def _reader(self) -> TensorReader:
        """The thread's own."""
        try:
            reader: TensorReader = self._readers.reader
        except AttributeError:
            reader = self._readers.reader = TensorReader(self.device_id)
        return reader

    def _write(self, index: int, keys: Any, vectors: Any, mode: int, doing: str) -> None:
        table = self.memory.tables()[index]
        if isinstance(keys, np.ndarray) and isinstance(vectors, np.ndarray):
            check_rows(table.spec, keys, vectors, doing)
            if table.pairs and keys.size:
                self._changes.insert(table, keys, vectors, mode)
            return
        reader = TensorReader(self.device_id)
        reader.start()
        keys_at, n = reader.keys(keys)
        vectors_at = reader.output(vectors, n, table.spec.dim)
        if table.pairs and n:
            self._changes.insert_on_device(table, keys_at, vectors_at, n, mode, reader.streams)


@cache
def _device_name(device_id: int) -> str:
    return str(runtime.getDeviceProperties(device_id)["name"].decode())
