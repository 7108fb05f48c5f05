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

from hps.cache.base import BatchDriver, CacheStats, DeviceMemory, EmbeddingCache, StreamOrderedCounts
from hps.cache.cuda import geometry, kernels
from hps.cache.cuda.compiler import compile_ahead
from hps.cache.cuda.device import CUDA_ERRORS, TableMemory, compile_all, copy_to_host, device_call, on_device
from hps.cache.cuda.graphs import CupyCapture, CupyGraph, capture_of, record
from hps.cache.cuda.links import AttachedTable, CudaPinner
from hps.cache.cuda.lookup import CupyLookup, LookupKernels
from hps.cache.cuda.modifications import Modifications
from hps.cache.cuda.tables import allocate, check_room
from hps.cache.cuda.tensors import TensorReader
from hps.errors import DatabaseError, DeviceError, InvalidInputError
from hps.ground.host_tables import HostTable
from hps.regions.board import Board
from hps.tensors.array_checks import check_keys, check_rows
from hps.tensors.segments import Segment
from hps.types import ROW_DTYPES, DeviceArray, KeyArray, RowArray, TableSpec

_READS_HOST_POINTERS = 91  # cudaDevAttrCanUseHostPointerForRegisteredMem


class CupyCache(EmbeddingCache):
    """The vectors of one model's tables that are resident in the memory of a CUDA device. *Thread-safe*; its lookups are not.

    A table consists of pairs of buckets of 7 keys; `cuda/embedding_cache.cuh` describes them. A bucket is a set in the terms of
    the contract. The capacity is a multiple of 14 rows and at least 28: a full bucket uses empty slots of its neighbour. A
    table filled to capacity keeps about 0.9 of its keys resident.

    **Recency.** The score of a key is 0, 1 or 4 when it becomes resident, at least 8 after a use, and 15 after a second one. An
    insert into a full bucket evicts the smallest score, the first of equals, and lowers the others there by it. A missed key
    evicts only a score of 0, unless it is the key last refused there; refusing any other key lowers the scores by 1. So time
    passes for a bucket with its own misses, not with lookups of other keys. (At alpha 1.05 and a capacity of 0.1 of 2^24 rows
    this reaches 0.985 of the hit rate of perfect frequency knowledge, admitting every miss 0.979, plain LRU 0.957; `python -m
    benchmarks admission` simulates it.)

    Keys, outputs and masks may each be in host memory (NumPy) or on the device: tensors of torch and CuPy, `TensorView`s, and
    other DLPack tensors. Outputs in host memory pass through pinned memory, which the device writes.

    After an unrecoverable CUDA error, every call raises it again.
    """

    device: ClassVar[str] = "cuda"

    def __init__(self, tables: Sequence[TableSpec], capacity_rows: Sequence[int], device_id: int, static: bool = False) -> None:
        self.tables = tuple(tables)
        self.device_id = device_id
        self.static = static
        self.memory = TableMemory(tables, device_id, static)
        self._links: list[AttachedTable | None] = [None] * len(tables)
        self._readers = threading.local()
        self._allocate(capacity_rows)

    @classmethod
    def batches(cls, board: Board) -> BatchDriver:
        from hps.cache.cuda.batches import CupyBatches  # it reads our tables

        return CupyBatches(board)

    @property
    def lookup_kernels(self) -> LookupKernels:
        return self._kernels

    def links(self) -> list[AttachedTable | None]:
        """Return the attached tables, by table."""
        return list(self._links)

    @classmethod
    def unavailable_reason(cls) -> str | None:
        try:
            count = runtime.getDeviceCount()
        except runtime.CUDARuntimeError as error:
            return f"CuPy finds no CUDA device: {error}"
        return None if count else "CuPy finds no CUDA device"

    @classmethod
    def compile_ahead(cls, models: Sequence[tuple[Sequence[tuple[int, str]], bool]], architecture: str) -> tuple[int, int]:
        needed = [kernels.MIRROR_KERNEL]
        for tables, static in models:
            rows = [kernels.Rows(dim, ROW_DTYPES.index(row_dtype)) for dim, row_dtype in tables]
            needed += kernels.lookup_kernels(rows, static) + kernels.modification_kernels(rows, static)
            needed += kernels.link_kernels(rows)
        return compile_ahead(needed, architecture)

    @classmethod
    def free_bytes(cls, device_id: int) -> int:
        """Return the free memory of a device, less the driver's reserve."""
        with on_device(device_id):
            return int(runtime.memGetInfo()[0]) - geometry.RESERVE_BYTES

    @classmethod
    def check_room(
        cls,
        tables: Sequence[TableSpec],
        capacity_rows: Sequence[int],
        device_id: int,
        static: bool = False,
        index_bytes: Sequence[int] = (),
    ) -> None:
        cls._check_device(tables, device_id)
        with on_device(device_id):
            check_room(tables, capacity_rows, device_id, static, index_bytes)

    @classmethod
    def create(cls, tables: Sequence[TableSpec], capacity_rows: Sequence[int], device_id: int, static: bool = False) -> Self:
        """Allocate a cache for all tables of a model, and compile its kernels. See `EmbeddingCache.create`."""
        cls._check_device(tables, device_id)
        return cls(tables, capacity_rows, device_id, static)

    @classmethod
    def _check_device(cls, tables: Sequence[TableSpec], device_id: int) -> None:
        reason = cls.unavailable_reason()
        if reason is None and not 0 <= device_id < runtime.getDeviceCount():
            reason = f"got CUDA device {device_id}, expected one of 0 to {runtime.getDeviceCount() - 1}"
        if reason is not None:
            raise DeviceError(f"creating the embedding cache of model {tables[0].model_name!r}: {reason}")

    @device_call("creating a lookup")
    def create_lookup(self) -> CupyLookup:
        self.memory.tables()
        return CupyLookup(self.memory, self._kernels, self._changes, self._links)

    def attach(
        self,
        table: int,
        host: HostTable,
        authoritative: bool,
        progress: Callable[[int, int], None] | None = None,
        index: bool = False,
    ) -> str | None:
        try:
            with on_device(self.device_id):
                if not runtime.deviceGetAttribute(_READS_HOST_POINTERS, self.device_id):
                    return f"CUDA device {self.device_id} does not read registered host memory by the host's addresses"
                host.pin(CudaPinner(self.device_id), progress)
                compile_all(self.device_id, [*self._kernels.for_links(), *([kernels.MIRROR_KERNEL] if index else [])])
                self.detach(table)
                self._links[table] = AttachedTable(self.device_id, host, authoritative, index)
        except (DatabaseError, DeviceError, InvalidInputError, *CUDA_ERRORS) as error:
            return str(error)
        return None

    def detach(self, table: int) -> None:
        link, self._links[table] = self._links[table], None
        if link is not None:
            link.close()

    def changing(self, table: int) -> AbstractContextManager[None]:
        link = self._links[table]
        return nullcontext() if link is None or self.memory.open is None else link.changing()

    @device_call("reading counters")
    def stream_ordered_counts(self, table: int) -> StreamOrderedCounts:
        link = self._links[table]
        counts = StreamOrderedCounts(0, 0, 0, 0) if link is None else link.stream_ordered_counts()
        if not self.static:
            return counts
        values = np.zeros(geometry.COUNTERS, np.uint64)
        with self._counting:
            copy_to_host(values, self.memory.tables()[table].counters, int(self._counts_stream.ptr))
        absent, unread = values[geometry.LOOKUP_COUNTERS].tolist()
        return StreamOrderedCounts(
            counts.misses + absent + unread, counts.linked, counts.absent, counts.unread + unread, absent
        )

    @device_call("capturing a lookup")
    def capture_of(self, segments: Sequence[Segment]) -> CupyCapture | None:
        return capture_of(self._reader(), segments)

    @device_call("capturing a lookup")
    def record(self, segments: Sequence[Segment], enqueue: Callable[[Sequence[Segment]], None]) -> CupyGraph:
        return record(self._reader(), self.memory, segments, enqueue)

    def host_buffer(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> np.ndarray:
        """Return pinned host memory. See `EmbeddingCache.host_buffer`."""
        count = math.prod(shape)
        memory = cupy.cuda.alloc_pinned_memory(max(1, count) * np.dtype(dtype).itemsize)
        return np.frombuffer(memory, dtype, count).reshape(shape)

    @device_call("allocating an array")
    def new_array(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> DeviceArray:
        """Return a new CuPy array. See `EmbeddingCache.new_array`."""
        array = cupy.zeros(shape, dtype)
        cupy.cuda.get_current_stream().synchronize()  # whoever fills it may use another stream
        return array

    @device_call("inserting")
    def insert(
        self,
        table: int,
        keys: KeyArray,  # (n,)
        rows: RowArray,  # (n, width)
    ) -> None:
        self._write(table, keys, rows, kernels.REPLACE | kernels.ADMIT, "inserting into")

    @device_call("telling whether the cache is complete")
    def tell_complete(self, complete: bool) -> None:
        """Set `complete`, on the device too: a captured lookup sees it. See `EmbeddingCache.tell_complete`."""
        tables = self.memory.tables()
        self.complete = self.memory.complete = False
        for table in tables if self.static else ():
            self._changes.tell_complete(table, complete)
        self.complete = self.memory.complete = complete and self.static

    @device_call("updating")
    def update(self, table: int, keys: KeyArray, rows: RowArray) -> None:
        self._write(table, keys, rows, kernels.REPLACE, "updating")

    @device_call("erasing")
    def erase(self, table: int, keys: KeyArray) -> None:
        own = self.memory.tables()[table]
        check_keys(f"erasing from the cached table {own.spec.tag}", keys, aligned=True)
        if own.pairs and keys.size:
            self._changes.erase(own, keys)

    @device_call("dumping keys")
    def dump(self, table: int) -> KeyArray:
        return self._changes.dump(self.memory.tables()[table])

    @device_call("reading counters")
    def stats(self, table: int) -> CacheStats:
        """Return the counters of a table. `inserts` counts keys that became resident."""
        own = self.memory.tables()[table]
        admitted, evicted, erased, unplaced, *_ = self._changes.counters(own) if own.pairs else [0] * geometry.COUNTERS
        return CacheStats(own.capacity_rows, admitted - evicted - erased, admitted, evicted, own.size_bytes, unplaced)

    @device_call("asking for the memory")
    def device_memory(self) -> DeviceMemory:
        """Return the memory of the device, for all processes, as its driver reports it."""
        free_bytes, total_bytes = runtime.memGetInfo()
        return DeviceMemory(_device_name(self.device_id), total_bytes, free_bytes)

    def close(self) -> None:
        """Release the memory once the running calls have returned. Idempotent."""
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
        self._changes = Modifications(self.device_id, self.static)
        self._counting, self._counts_stream = threading.Lock(), cupy.cuda.Stream(non_blocking=True)
        self.memory.open = tables = allocate(self.tables, capacity_rows, self.device_id, self.static)
        self._kernels = LookupKernels(self.device_id, tables, self.static)
        compile_all(self.device_id, [*self._kernels.needed(), *self._changes.needed(self._kernels.rows)])

    def _reader(self) -> TensorReader:
        """Return the calling thread's reader."""
        try:
            reader: TensorReader = self._readers.reader
        except AttributeError:
            reader = self._readers.reader = TensorReader(self.device_id)
        return reader

    def _write(self, index: int, keys: Any, vectors: Any, mode: int, doing: str) -> None:
        table = self.memory.tables()[index]
        if isinstance(keys, np.ndarray) and isinstance(vectors, np.ndarray):
            check_rows(f"{doing} the cached table {table.spec.tag}", keys, vectors, table.spec.width, aligned=True)
            if table.pairs and keys.size:
                self._changes.insert(table, keys, vectors, mode)
            return
        reader = TensorReader(self.device_id)
        reader.start()
        keys_at, n = reader.keys(keys)
        vectors_at = reader.rows(vectors, n, table.spec.width)
        if table.pairs and n:
            self._changes.insert_on_device(table, keys_at, vectors_at, n, mode, reader.streams)


@cache
def _device_name(device_id: int) -> str:
    return str(runtime.getDeviceProperties(device_id)["name"].decode())
