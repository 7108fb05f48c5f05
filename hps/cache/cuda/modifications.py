"""Changes to the tables of a device cache: their order, and the transfer of host arrays to the device."""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager

import cupy
import numpy as np
from cupy_backends.cuda.api import runtime

from hps.cache.cuda import geometry, kernels, structs
from hps.cache.cuda.device import (
    Arguments,
    DeviceBuffer,
    DeviceTable,
    PinnedBuffer,
    copy_to_device,
    copy_to_host,
    kernels_of,
    launch,
)
from hps.cache.cuda.kernels import Kernel, Kind, Rows
from hps.types import IndexArray, KeyArray

_MAPPED_BYTES = 1 << 18  # up to this size, kernels read host arrays from pinned memory: a separate copy costs more
_STAGED_BYTES = 1 << 24
_COPIED_AT_ONCE = 1 << 22  # bytes that one thread copies into pinned memory
_COPY_THREADS = 4  # 17 GB/s each; the link takes 55
_DUMPED_PAIRS = 1 << 16  # per step: 7 MB of keys, a fraction of a millisecond of the link


class _Stage:
    """One of two buffers for the transfer of host arrays to the device."""

    def __init__(self) -> None:
        self.host = PinnedBuffer()
        self.device = DeviceBuffer()
        self.done = cupy.cuda.Event(disable_timing=True)


class LaunchOrder:
    """Orders the changes to the tables of one cache, on all devices that share them. *Thread-safe.*

    Changes run in launch order, whatever their devices and streams: each waits for the last one.

    Attributes:
        pending: a change whose call has returned may still be running.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Two events. Changes wait for the last change (`_last`). Lookups need only see changes whose calls have returned
        # (`_returned`): beside a refresh they would else wait for the copy and the kernel of a chunk that its caller awaits.
        self._last = self._returned = 0
        self.pending = False

    @contextmanager
    def ordered(self, stream: int, events: tuple[int, int], waits: bool) -> Iterator[None]:
        """Run work launched on `stream` inside the block after all earlier changes, and before all later ones.

        Args:
            events: two events of the stream's device, the same ones for all its changes.
            waits: the call waits for the change.
        """
        with self._lock:
            if self._last:
                runtime.streamWaitEvent(stream, self._last)
            yield
            self._last, returned = events
            runtime.eventRecord(self._last, stream)
            if not waits:
                self._returned = returned
                runtime.eventRecord(returned, stream)
                self.pending = True

    def wait_for_returned(self, stream: int) -> None:
        """Order later work on `stream` after all changes whose calls returned, if any are `pending`."""
        with self._lock:
            if runtime.eventQuery(self._returned) == 0:
                self.pending = False
            else:
                runtime.streamWaitEvent(stream, self._returned)


class Modifications:
    """Runs inserts, updates, erases and dumps of one cache, on one of its devices. *Thread-safe.*

    Changes to a table run on the device in launch order, on any stream. A query sees every change whose call returned before it
    started. It does not wait for a change whose call still runs, so lookups continue during a warm-up and a refresh.
    Admissions of rows read from attached tables are not ordered here: the kernel refuses late ones (`AttachedTable.changing`).

    Attributes:
        order: orders its changes with those of other devices that share the tables.
    """

    def __init__(self, device_id: int, kind: Kind = kernels.DYNAMIC, order: LaunchOrder | None = None) -> None:
        self._kernels = kernels_of(device_id)
        self._kind = kind
        self.order = order or LaunchOrder()
        self._events = tuple(cupy.cuda.Event(disable_timing=True) for _ in range(2))
        self._inserts: dict[tuple[int, int], int] = {}  # handles, by piece and width
        self._staging = threading.Lock()  # guards the stream and the memory below
        self._private = cupy.cuda.Stream(non_blocking=True)
        self._stream = int(self._private.ptr)
        self._stages = (_Stage(), _Stage())
        self._insert = Arguments(structs.TABLE.size + structs.INSERT_TAIL.size)
        self._erase = Arguments(structs.TABLE.size + structs.ERASE_TAIL.size)
        self._dump = Arguments(structs.TABLE.size + structs.DUMP_TAIL.size)
        self._dumped = DeviceBuffer()
        self._copiers: ThreadPoolExecutor | None = None

    def ordered(self, stream: int) -> AbstractContextManager[None]:
        """Run work launched on `stream` inside the block after all earlier changes, and before all later ones."""
        last, returned = self._events
        return self.order.ordered(stream, (last.ptr, returned.ptr), stream == self._stream)

    def launch_insert(
        self,
        table: DeviceTable,
        keys: int,
        rows: int,
        chosen: int,
        n: int,
        mode: int,
        arguments: Arguments,
        stream: int,
    ) -> None:
        """Launch an insertion of n rows at addresses that the device can read; `arguments` belong to the caller."""
        width = table.spec.width
        piece = kernels.unit_of(width, rows & 15)
        handle = self._inserts.get((piece, width))
        if handle is None:
            handle = self._inserts[piece, width] = self._kernels.handle(kernels.insert_kernel(piece, width, self._kind))
        arguments.bytes[: structs.TABLE.size] = table.packed
        arguments.pack(structs.INSERT_TAIL, structs.TABLE.size, keys, rows, chosen, n, mode)
        with self.ordered(stream):
            launch(handle, kernels.tile_blocks(n), kernels.THREADS, arguments, stream)

    def insert(self, table: DeviceTable, keys: np.ndarray, vectors: np.ndarray, mode: int) -> None:
        """Insert host arrays in chunks whose copies overlap; wait for the end."""
        row_bytes = 4 * table.spec.width
        step = max(1, _STAGED_BYTES // (8 + row_bytes))
        with self._staging:
            for nth, start in enumerate(range(0, keys.size, step)):
                stage = self._stages[nth % 2]
                part, rows = keys[start : start + step], vectors[start : start + step]
                if nth >= 2:
                    runtime.eventSynchronize(stage.done.ptr)
                keys_at, vectors_at = self._stage(stage, part, rows)
                self.launch_insert(table, keys_at, vectors_at, 0, part.size, mode, self._insert, self._stream)
                runtime.eventRecord(stage.done.ptr, self._stream)
            runtime.streamSynchronize(self._stream)

    def insert_on_device(self, table: DeviceTable, keys: int, vectors: int, n: int, mode: int, streams: set[int]) -> None:
        """Insert device arrays after the work of their producers' streams; wait for the end."""
        with self._staging:
            self._follow(streams)
            self.launch_insert(table, keys, vectors, 0, n, mode, self._insert, self._stream)
            runtime.streamSynchronize(self._stream)

    def erase(self, table: DeviceTable, keys: np.ndarray) -> None:
        """Erase keys of a host array; wait for the end."""
        step = _STAGED_BYTES // 8
        with self._staging:
            for start in range(0, keys.size, step):
                part = keys[start : start + step]
                keys_at, _none = self._stage(self._stages[0], part, None)
                self._erase.bytes[: structs.TABLE.size] = table.packed
                self._erase.pack(structs.ERASE_TAIL, structs.TABLE.size, keys_at, part.size)
                with self.ordered(self._stream):
                    handle = self._kernels.handle(kernels.erase_kernel(self._kind))
                    launch(handle, kernels.tile_blocks(part.size), kernels.THREADS, self._erase, self._stream)
                runtime.streamSynchronize(self._stream)

    def dump(self, table: DeviceTable) -> KeyArray:
        """Return the resident keys of a table."""
        parts = []
        count = np.zeros(1, np.uint64)
        with self._staging:
            for first in range(0, table.pairs, _DUMPED_PAIRS):
                pairs = min(_DUMPED_PAIRS, table.pairs - first)
                count_at = self._dumped.reserve(256 + 8 * 2 * kernels.SLOTS * pairs)
                if self.order.pending:
                    self.order.wait_for_returned(self._stream)
                runtime.memsetAsync(count_at, 0, 8, self._stream)
                self._dump.bytes[: structs.TABLE.size] = table.packed
                self._dump.pack(structs.DUMP_TAIL, structs.TABLE.size, count_at + 256, count_at, first, pairs)
                handle = self._kernels.handle(kernels.dump_kernel(self._kind))
                launch(handle, kernels.tile_blocks(pairs), kernels.THREADS, self._dump, self._stream)
                copy_to_host(count, count_at, self._stream)
                part = np.empty(int(count[0]), np.int64)
                if part.size:
                    copy_to_host(part, count_at + 256, self._stream)
                parts.append(part)
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def buckets(self, table: DeviceTable) -> IndexArray:
        """Return a copy of the buckets of a table, (2 pairs, 8) int64, after the changes before it."""
        copied: IndexArray = np.empty((2 * table.pairs, kernels.PAIR_BYTES // 16), np.int64)
        with self._staging:
            if self.order.pending:
                self.order.wait_for_returned(self._stream)
            copy_to_host(copied, table.buckets, self._stream)
        return copied

    def counters(self, table: DeviceTable) -> list[int]:
        """Return a table's counters: keys admitted, evicted, erased since construction; then those of `static_tables.cuh`."""
        values = np.zeros(geometry.COUNTERS, np.uint64)
        with self._staging:
            if self.order.pending:
                self.order.wait_for_returned(self._stream)
            copy_to_host(values, table.counters, self._stream)
        found: list[int] = values.tolist()
        return found

    def mark_complete(self, table: DeviceTable, complete: bool) -> None:
        """Set on the device whether a static table is complete; later changes come after that."""
        word = np.array([complete], np.uint64)
        with self._staging:
            copy_to_device(table.counters + geometry.COMPLETE_AT, word.ctypes.data, 8, self._stream)
            runtime.streamSynchronize(self._stream)

    def close(self) -> None:
        with self._staging:
            runtime.streamSynchronize(self._stream)
            if self._copiers is not None:
                self._copiers.shutdown()
            self._stages, self._dumped = (_Stage(), _Stage()), DeviceBuffer()

    def needed(self, tables: Sequence[Rows]) -> list[Kernel]:
        return kernels.modification_kernels(tables, self._kind)

    def _follow(self, streams: set[int]) -> None:
        for stream in streams:
            runtime.eventRecord(self._stages[0].done.ptr, max(stream, 0))
            runtime.streamWaitEvent(self._stream, self._stages[0].done.ptr)

    def _stage(self, stage: _Stage, keys: np.ndarray, vectors: np.ndarray | None) -> tuple[int, int]:
        """Return the device addresses of copies of host arrays."""
        stage.host.reset()
        arrays = [keys] if vectors is None else [keys, vectors]
        pointers = []
        for array in arrays:
            # A large pinned array is copied from where it is; a small one is read by the kernel through mapped memory.
            if array.nbytes > _MAPPED_BYTES and _is_pinned(array):
                pointers.append(array.ctypes.data)
                continue
            pointer, pinned = stage.host.take(array.nbytes)
            self._copy(pinned, array)
            pointers.append(pointer)
        if sum(array.nbytes for array in arrays) > _MAPPED_BYTES:
            offset = 0
            device = stage.device.reserve(sum(array.nbytes for array in arrays) + 512)
            for nth, array in enumerate(arrays):
                copy_to_device(device + offset, pointers[nth], array.nbytes, self._stream)
                pointers[nth] = device + offset
                offset += -(-array.nbytes // 256) * 256
        return pointers[0], pointers[-1]

    def _copy(self, pinned: np.ndarray, array: np.ndarray) -> None:
        source = array.reshape(-1).view(np.uint8)
        if source.size < 2 * _COPIED_AT_ONCE:
            np.copyto(pinned, source)
            return
        if self._copiers is None:
            self._copiers = ThreadPoolExecutor(_COPY_THREADS, "hps-copy")
        starts = range(0, source.size, _COPIED_AT_ONCE)

        def copy(start: int) -> None:
            np.copyto(pinned[start : start + _COPIED_AT_ONCE], source[start : start + _COPIED_AT_ONCE])

        for done in self._copiers.map(copy, starts):
            del done


def _is_pinned(array: np.ndarray) -> bool:
    return bool(runtime.pointerGetAttributes(array.ctypes.data).type == runtime.memoryTypeHost)
