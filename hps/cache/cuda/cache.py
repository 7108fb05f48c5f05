"""The embedding cache in the memory of a CUDA device, by the kernels of `cuda/`."""

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache, partial
from typing import Any, ClassVar, Self

import cupy
import numpy as np
import numpy.typing as npt
from cupy_backends.cuda.api import runtime

from hps.cache.base import (
    ALONE,
    BatchAnswers,
    BatchDriver,
    CacheStats,
    DeviceMemory,
    DeviceMemoryTables,
    DeviceSharing,
    GraphParts,
    HostTableReads,
    KeptKernels,
    KernelNeed,
    SharedRows,
    StaticTables,
    StreamOrdered,
    StreamOrderedCounts,
)
from hps.cache.cuda import geometry, kernels
from hps.cache.cuda.compiler import compile_ahead, count_kept
from hps.cache.cuda.device import CUDA_ERRORS, DeviceTable, TableMemory, compile_all, copy_to_host, device_call, on_device
from hps.cache.cuda.graphs import CupyCapture, CupyGraph, CupyGraphPart, capture_of, record
from hps.cache.cuda.integrity import check_buckets
from hps.cache.cuda.kernels import Kernel, Kind
from hps.cache.cuda.links import AttachedTable, CudaPinner, LayoutReaders
from hps.cache.cuda.lookup import CupyLookup
from hps.cache.cuda.modifications import LaunchOrder, Modifications
from hps.cache.cuda.near_tables import NearTables
from hps.cache.cuda.queries import LookupKernels
from hps.cache.cuda.repeats import adopt, adopt_joined, adopt_tables, launch_and_wait, work_stream
from hps.cache.cuda.spread_memory import reason_against
from hps.cache.cuda.tables import allocate, check_room
from hps.cache.cuda.tensors import TensorReader
from hps.errors import DatabaseError, DeviceError, InvalidInputError
from hps.ground.memory.host_tables import HostTable
from hps.ground.threads.workers import PeriodicTask
from hps.regions.loop_state import LoopState
from hps.tensors.array_checks import check_keys, check_rows
from hps.tensors.batch import Batch
from hps.types import ROW_DTYPES, DeviceArray, KeyArray, RowArray, TableSpec

_READS_HOST_POINTERS = 91  # cudaDevAttrCanUseHostPointerForRegisteredMem
_COPY_INTERVAL_S = 0.01  # between two searches for rows of other devices that are used often


class CupyCache(StaticTables, SharedRows, StreamOrdered, GraphParts, HostTableReads, BatchAnswers, DeviceMemoryTables):
    """The vectors of one model's tables that are resident in the memory of a CUDA device. *Thread-safe*; its lookups are not.

    A table consists of pairs of buckets of 7 keys; `cuda/embedding_cache.cuh` describes them. A bucket is a set in the terms of
    the contract. The capacity is a multiple of 14 rows and at least 28: a full bucket uses empty slots of its neighbour. A
    table filled to capacity keeps about 0.9 of its keys resident.

    **Recency.** The score of a key is 0, 1 or 4 when it becomes resident, at least 8 after a use, and 15 after a second one. An
    insert into a full bucket evicts the smallest score, the first of equals, and lowers the others there by it. A missed key
    evicts only a score of 0, unless it is the key last refused there; refusing any other key lowers the scores by 1. So time
    passes for a bucket with its own misses, not with lookups of other keys. (At alpha 1.05 and a capacity of 0.1 of 2^24 rows
    this reaches 0.985 of the hit rate of perfect frequency knowledge, admitting every miss 0.979, plain LRU 0.957, by a
    simulation: `benchmarks/results/admission.json`.)

    Keys, outputs and masks may each be in host memory (NumPy) or on the device: tensors of torch and CuPy, `TensorView`s, and
    other DLPack tensors. Outputs in host memory pass through pinned memory, which the device writes.

    After an unrecoverable CUDA error, every call raises it.
    """

    device: ClassVar[str] = "cuda"

    def __init__(self, tables: Sequence[TableSpec], device_id: int, kind: Kind, opened: tuple[DeviceTable, ...]) -> None:
        """Make the cache of one device, for `create`, over tables that are allocated."""
        self.tables = tuple(tables)
        self.device_id = device_id
        self.static = kind.static
        self.memory = TableMemory(tables, device_id, kind.static)
        self.memory.open = opened
        self._kind = kind
        self._links: list[AttachedTable | None] = [None] * len(tables)
        self._link_readers: LayoutReaders | None = None
        self._readers = threading.local()
        self._all: Sequence[CupyCache] = ()  # the caches of all devices that share the tables, the leader first; () if alone
        self._near: NearTables | None = None
        self._copying = threading.Lock()  # of the leader: held while rows change that may have copies, or copies are made
        self._copies_due = False
        self._copies: PeriodicTask | None = None

    @classmethod
    def kernels(cls) -> Sequence[Callable[..., Any]]:
        return adopt, adopt_tables, adopt_joined, work_stream, launch_and_wait

    @classmethod
    def batches(cls, loop: LoopState) -> BatchDriver:
        from hps.cache.cuda.batches import CupyBatches  # which imports this module

        return CupyBatches(loop)

    @classmethod
    def batch_kernels(cls) -> Sequence[Callable[..., Any]]:
        from hps.cache.cuda.batch_loop import run

        return (run,)

    @property
    def failure(self) -> str | None:
        return self.memory.error

    @property
    def lookup_kernels(self) -> LookupKernels:
        return self._kernels

    def links(self) -> list[AttachedTable | None]:
        return list(self._links)

    @classmethod
    def unavailable_reason(cls) -> str | None:
        try:
            count = runtime.getDeviceCount()
        except runtime.CUDARuntimeError as error:
            return f"CuPy finds no CUDA device: {error}"
        return None if count else "CuPy finds no CUDA device"

    @classmethod
    def compile_ahead(cls, models: Sequence[KernelNeed], architecture: str) -> tuple[int, int]:
        return compile_ahead(cls._needed_by(models), architecture)

    @classmethod
    def kept_kernels(cls, models: Sequence[KernelNeed], device_id: int) -> KeptKernels:
        try:
            name, architecture = _device_name(device_id), str(cupy.cuda.Device(device_id).compute_capability)
        except CUDA_ERRORS as error:
            raise DeviceError(f"asking CUDA device {device_id} for its architecture: {error}") from error
        return KeptKernels(name, architecture, *count_kept(cls._needed_by(models), architecture))

    @staticmethod
    def _needed_by(models: Sequence[KernelNeed]) -> list[Kernel]:
        needed = [kernels.MIRROR_KERNEL]
        for tables, *kind_of in models:
            rows, kind = [kernels.Rows(dim, ROW_DTYPES.index(row_dtype)) for dim, row_dtype in tables], Kind(*kind_of)
            needed += kernels.lookup_kernels(rows, kind) + kernels.modification_kernels(rows, kind)
            needed += kernels.link_kernels(rows, kind) + kernels.link_kernels(rows, kind, files=True)
            if kind.shared:
                needed += kernels.near_kernels(rows)
        return needed

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
        sharing: DeviceSharing = ALONE,
    ) -> None:
        cls._check_device(tables, device_id)
        with on_device(device_id), _reported(tables, device_id, static):
            check_room(tables, capacity_rows, device_id, static, index_bytes, sharing)

    @classmethod
    def reason_against_sharing(cls, device_ids: Sequence[int]) -> str | None:
        return cls.unavailable_reason() or reason_against(device_ids)

    @classmethod
    def create(
        cls,
        tables: Sequence[TableSpec],
        capacity_rows: Sequence[int],
        device_id: int,
        static: bool = False,
        sharing: DeviceSharing = ALONE,
    ) -> Self:
        """Allocate a cache for all tables of a model, and compile its kernels. See `EmbeddingCache.create`."""
        devices = sharing.device_ids or (device_id,)
        for device in devices:
            cls._check_device(tables, device)
        if len(devices) > 1 and (reason := cls.reason_against_sharing(devices)):
            raise DeviceError(f"creating the embedding cache of model {tables[0].model_name!r}: {reason}")
        kind = Kind(static, len(devices) > 1)
        with on_device(devices[0]), _reported(tables, devices[0], static):
            opened = allocate(tables, capacity_rows, devices, static, sharing.near_rows)
        order, caches = LaunchOrder(), [cls(tables, device, kind, opened) for device in devices]
        try:
            for sharer in caches:
                sharer._prepare(caches if kind.shared else (), order, sharing.near_rows)
            if kind.shared and sharing.near_rows:
                caches[0]._copies = PeriodicTask(
                    "copies", caches[0]._make_copies, _COPY_INTERVAL_S, what="copying the most used rows of other devices"
                )
        except BaseException:
            for sharer in caches:  # they refer to each other, so only a garbage collection would end them
                sharer.memory.open = sharer._near = None
            raise
        return next(found for found in caches if found.device_id == device_id)

    def on(self, device_id: int) -> "CupyCache":
        return next(sharer for sharer in self._sharers if sharer.device_id == device_id)

    @property
    def leader(self) -> "CupyCache":
        return self._sharers[0]

    @property
    def _sharers(self) -> "Sequence[CupyCache]":
        return self._all or (self,)

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
        progress: Callable[[int, int], None] | None = None,
        *,
        authoritative: bool,
        index: bool = False,
    ) -> str | None:
        try:
            with on_device(self.device_id):
                if not runtime.deviceGetAttribute(_READS_HOST_POINTERS, self.device_id):
                    return f"CUDA device {self.device_id} does not read registered host memory by the host's addresses"
                host.pin(CudaPinner(self.device_id), progress)
                compile_all(
                    self.device_id,
                    [*self._kernels.for_links(host.has_files), *([kernels.MIRROR_KERNEL] if index or host.has_files else [])],
                )
                self.detach(table)
                self._links[table] = AttachedTable(
                    self.device_id, host, readers=self._layout_readers(), authoritative=authoritative, index=index
                )
        except (DatabaseError, DeviceError, InvalidInputError, *CUDA_ERRORS) as error:
            return str(error)
        return None

    def _layout_readers(self) -> LayoutReaders:
        if self._link_readers is None:
            self._link_readers = LayoutReaders()
        return self._link_readers

    def detach(self, table: int) -> None:
        link, self._links[table] = self._links[table], None
        if link is not None:
            link.close()

    @contextmanager
    def changing(self, table: int) -> Iterator[None]:
        with ExitStack() as stack:
            for sharer in self._sharers:
                if (link := sharer._links[table]) is not None and sharer.memory.error is None:
                    try:
                        stack.enter_context(link.changing())
                    except DeviceError as error:
                        if not sharer.memory.lost(error):  # of a lost device, nothing is admitted any more
                            raise
            yield

    @device_call("reading counters")
    def stream_ordered_counts(self, table: int) -> StreamOrderedCounts:
        link = self._links[table]
        counts = StreamOrderedCounts(0, 0, 0, 0) if link is None else link.stream_ordered_counts()
        if not self.static:
            return counts
        values = np.zeros(geometry.COUNTERS, np.uint64)
        with self._counting:
            copy_to_host(values, self.memory.tables()[table].counters, int(self._counts_stream.ptr))
        absent, unread = values[geometry.LOOKUP_COUNTERS].tolist()  # on all devices: counted once, and reported on each
        settled, missed = (absent, absent + unread) if self is self.leader else (0, 0)
        return StreamOrderedCounts(counts.misses + missed, counts.linked, counts.absent, counts.unread + unread, settled)

    @device_call("capturing a lookup")
    def capture_of(self, batch: Batch) -> CupyCapture | None:
        return capture_of(self._reader(), batch)

    @device_call("capturing a lookup")
    def record(self, batch: Batch, enqueue: Callable[[Batch], None]) -> CupyGraph:
        return record(self._reader(), self.memory, batch, enqueue)

    @device_call("making a part of a graph")
    def graph_part(self) -> CupyGraphPart:
        return CupyGraphPart(self.create_lookup())

    def host_buffer(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> np.ndarray:
        """Return pinned host memory. See `EmbeddingCache.host_buffer`."""
        count = math.prod(shape)
        memory = cupy.cuda.alloc_pinned_memory(max(1, count) * np.dtype(dtype).itemsize)
        return np.frombuffer(memory, dtype, count).reshape(shape)

    @device_call("allocating an array")
    def new_array(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> DeviceArray:
        """Return a new CuPy array. See `EmbeddingCache.new_array`."""
        array = cupy.zeros(shape, dtype)
        cupy.cuda.get_current_stream().synchronize()  # it may be filled on another stream
        return array

    def insert(
        self,
        table: int,
        keys: KeyArray,  # (n,)
        rows: RowArray,  # (n, width)
    ) -> None:
        self.memory.tables()
        self.leader._write(table, keys, rows, kernels.REPLACE | kernels.ADMIT, "inserting into")

    def mark_complete(self, complete: bool) -> None:
        """Set `complete`, on the device too: a captured lookup sees it. See `StaticTables.mark_complete`."""
        self.leader._mark_complete(complete)

    def update(self, table: int, keys: KeyArray, rows: RowArray) -> None:
        self.memory.tables()
        self.leader._write(table, keys, rows, kernels.REPLACE, "updating")

    def erase(self, table: int, keys: KeyArray) -> None:
        self.memory.tables()
        self.leader._erase(table, keys)

    @device_call("dumping keys")
    def dump(self, table: int) -> KeyArray:
        """Return the resident keys of a table, and those of which only copies are left. See `EmbeddingCache.dump`."""
        parts = [self._changes.dump(self.memory.tables()[table])]
        with self.leader._copying:
            self.leader._apply_to_near(lambda near: parts.append(near.dump(table)))
        return np.unique(np.concatenate(parts)) if len(parts) > 1 else parts[0]

    @device_call("reading counters")
    def stats(self, table: int) -> CacheStats:
        """Return the counters of a table: of all devices, but for memory and copies. `inserts` counts keys made resident."""
        opened = self.memory.tables()[table]
        admitted, evicted, erased, unplaced, *_ = self._changes.counters(opened) if opened.pairs else [0] * geometry.COUNTERS
        resident, size_bytes, near = admitted - evicted - erased, opened.bytes_on(self.device_id), self._near
        copied = 0 if near is None else near.resident(table)
        return CacheStats(opened.capacity_rows, resident, admitted, evicted, size_bytes, unplaced, copied)

    @device_call("checking the tables")
    def check_integrity(self) -> list[str]:
        findings = []
        for table in self.memory.tables():
            if table.pairs:
                buckets, (admitted, evicted, erased, *_) = self._changes.buckets(table), self._changes.counters(table)
                counted = admitted - evicted - erased
                findings += check_buckets(table.spec.tag, buckets, table.packed, static=self.static, counted_rows=counted)
        return findings

    @device_call("asking for the memory")
    def device_memory(self) -> DeviceMemory:
        """Return the memory of the device, for all processes, as its driver reports it."""
        free_bytes, total_bytes = runtime.memGetInfo()
        return DeviceMemory(_device_name(self.device_id), total_bytes, free_bytes)

    def close(self) -> None:
        """Release the memory once the running calls have returned. Idempotent."""
        leader = self.leader
        if leader._copies is not None:
            leader._copies.abandon()
        with leader._copying:
            opened, self.memory.open = self.memory.open, None  # held until what was launched has ended
            near, self._near = self._near, None
        if opened is None:
            return
        for table in range(len(self.tables)):
            self.detach(table)
        with on_device(self.device_id):
            try:
                self._changes.close()
                if near is not None:
                    near.close()
            except CUDA_ERRORS as error:
                self.memory.lost(error)

    @device_call("creating an embedding cache")
    def _prepare(self, sharers: "Sequence[CupyCache]", order: LaunchOrder, near_rows: Sequence[int]) -> None:
        """Create streams, kernels and near tables of this device."""
        self._all, self.memory.sharers = sharers, [sharer.memory for sharer in sharers]
        self._changes = Modifications(self.device_id, self._kind, order)
        self._counting, self._counts_stream = threading.Lock(), cupy.cuda.Stream(non_blocking=True)
        opened = self.memory.tables()
        self._kernels = LookupKernels(self.device_id, opened, self._kind)
        needed = [*self._kernels.needed(), *self._changes.needed(self._kernels.rows)]
        if sharers and near_rows:
            self._near = NearTables(self.device_id, [sharer.device_id for sharer in sharers], opened, near_rows)
            self.memory.open = self._near.with_near_tables(opened)
            needed += self._near.needed()
        compile_all(self.device_id, needed)

    def _make_copies(self) -> None:
        """Admit the sampled rows to the near tables of all devices; if rows are changing, after their change."""
        # It does not wait for the lock: between changes in close succession it might never get it.
        self._copies_due = True
        if self._copying.acquire(blocking=False):
            try:
                self._make_due_copies()
            finally:
                self._copying.release()

    def _make_due_copies(self) -> None:
        """Make copies if the periodic task has asked for them. The caller holds `_copying`."""
        if self._copies_due:
            self._copies_due = False
            self._apply_to_near(NearTables.promote)

    @contextmanager
    def _changing_copies(self, index: int, keys: Callable[[], KeyArray]) -> Iterator[None]:
        """Change resident rows inside the block, and drop the copies of those of `keys` at its end, also after an error."""
        if self._copies is None:
            yield
            return
        with self._copying:
            self._apply_to_near(NearTables.settle)
            try:
                yield
            finally:
                changed = keys()  # only now: their producer's stream, which the change waited for, may have written them late
                self._apply_to_near(lambda near: near.erase(index, changed))
            with suppress(DeviceError):  # the rows have changed, and a lost device refuses the next call
                self._make_due_copies()

    def _apply_to_near(self, change: Callable[[NearTables], object]) -> None:
        """Call a function with the near tables of all open devices. The caller holds `_copying`."""
        for sharer in self._sharers:
            if sharer._near is not None and sharer.memory.error is None:
                sharer._on_near(change)

    @device_call("changing copies of rows")
    def _on_near(self, change: Callable[[NearTables], object]) -> None:
        change(self._near)  # type: ignore[arg-type]

    def _reader(self) -> TensorReader:
        try:
            reader: TensorReader = self._readers.reader
        except AttributeError:
            reader = self._readers.reader = TensorReader(self.device_id)
        return reader

    @device_call("changing rows")
    def _write(self, index: int, keys: Any, rows: Any, mode: int, doing: str) -> None:
        table = self.memory.tables()[index]
        on_host = isinstance(keys, np.ndarray) and isinstance(rows, np.ndarray)
        if on_host:
            check_rows(f"{doing} the cached table {table.spec.tag}", keys, rows, table.spec.width, aligned=True)
            if table.pairs and keys.size:
                with self._changing_copies(index, lambda: keys):
                    self._changes.insert(table, keys, rows, mode)
            return
        reader = TensorReader(self.device_id)
        reader.start()
        keys_at, n = reader.keys(keys)
        rows_at = reader.rows(rows, n, table.spec.width)
        if not table.pairs or not n:
            return
        with self._changing_copies(index, partial(_keys_on_host, keys_at, n)):
            self._changes.insert_on_device(table, keys_at, rows_at, n, mode, reader.streams)

    @device_call("erasing")
    def _erase(self, table: int, keys: KeyArray) -> None:
        opened = self.memory.tables()[table]
        check_keys(f"erasing from the cached table {opened.spec.tag}", keys, aligned=True)
        if opened.pairs and keys.size:
            with self._changing_copies(table, lambda: keys):
                self._changes.erase(opened, keys)

    @device_call("marking the cache as complete")
    def _mark_complete(self, complete: bool) -> None:
        tables = self.memory.tables()
        for sharer in self._sharers:
            sharer.complete = sharer.memory.complete = False
        for table in tables if self.static else ():
            self._changes.mark_complete(table, complete)
        for sharer in self._sharers:
            sharer.complete = sharer.memory.complete = complete and self.static


def _keys_on_host(keys_at: int, n: int) -> KeyArray:
    """Copy keys of the current device to the host."""
    keys = np.empty(n, np.int64)
    runtime.memcpy(keys.ctypes.data, keys_at, keys.nbytes, runtime.memcpyDeviceToHost)
    return keys


@contextmanager
def _reported(tables: Sequence[TableSpec], device_id: int, static: bool) -> Iterator[None]:
    try:
        yield
    except (*CUDA_ERRORS, cupy.cuda.memory.OutOfMemoryError) as error:
        TableMemory(tables, device_id, static).fail("creating an embedding cache", error)


@cache
def _device_name(device_id: int) -> str:
    return str(runtime.getDeviceProperties(device_id)["name"].decode())
