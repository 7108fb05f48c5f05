"""Tables in host memory that lookups on a device read in place: pinning, and their state on the device."""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import cupy
import numpy as np
import numpy.typing as npt
from cupy_backends.cuda.api import runtime

from hps.cache.base import StreamOrderedCounts
from hps.cache.cuda import kernels, structs
from hps.cache.cuda.device import (
    CUDA_ERRORS,
    Arguments,
    PinnedBuffer,
    copy_to_device,
    copy_to_host,
    kernels_of,
    launch,
    on_device,
)
from hps.errors import DeviceError
from hps.ground.memory.host_tables import (
    BUCKET_BYTES,
    DENSE_ROWS_AT,
    SEGMENTS_AT,
    BucketChanges,
    FileLayout,
    HostLayout,
    HostTable,
)

_log = logging.getLogger(__name__)

_SLABS_AT = 512  # bytes from the start of a layout's device memory to its slab addresses
_READ_ONLY = 8  # cudaHostRegisterReadOnly
_EPOCH_AT, _COUNTERS_AT, _READERS_AT = (structs.LINK.offsets[name] for name in ("epoch", "counters", "readers"))


class CudaPinner:
    """Registers memory with CUDA, for all devices. *Thread-safe.* See `hps.ground.memory.host_tables.Pinner`."""

    def __init__(self, device_id: int) -> None:
        self._device_id = device_id

    def pin(self, address: int, size_bytes: int, *, read_only: bool = False) -> None:
        """Pin and map memory at its own address."""
        flags = runtime.hostAllocPortable | runtime.hostAllocMapped | (_READ_ONLY if read_only else 0)
        try:
            with on_device(self._device_id):
                runtime.hostRegister(address, size_bytes, flags)
        except CUDA_ERRORS as error:
            raise DeviceError(
                f"pinning {size_bytes:,} bytes of host memory: {error}; raise the limit on locked memory (ulimit -l, or "
                "--ulimit memlock=-1 for a container) if it is that"
            ) from error

    def unpin(self, address: int) -> None:
        try:
            with on_device(self._device_id):
                runtime.hostUnregister(address)
        except CUDA_ERRORS:
            return  # the context is gone, and its registrations with it


class Mirror:
    """A copy of the buckets of one layout in device memory, with the versions of the stripes that it was copied at.

    *One thread at a time*: the one that writes to the table. After an update that failed, the next one copies all.

    Attributes:
        where: device address of the versions.
        segments: device addresses of the copies.
    """

    __slots__ = ("_complete", "_copies", "_memory", "_segments", "_starts", "_stops", "segments", "where")

    def __init__(self, host: HostLayout, before: "Mirror | None", stream: Any) -> None:
        """Allocate memory for segments that `before` lacks. No version is valid until `update`."""
        starts: npt.NDArray[np.uint64]
        starts, sizes = host.words[SEGMENTS_AT::2], BUCKET_BYTES * host.words[SEGMENTS_AT + 1 :: 2]
        kept: dict[int, Any] = {} if before is None else dict(zip(before._starts.tolist(), before._copies, strict=True))
        self._copies: list[Any] = [
            kept.get(at) or cupy.cuda.Memory(size) for at, size in zip(starts.tolist(), sizes.tolist(), strict=True)
        ]
        self._starts: npt.NDArray[np.uint64] = starts
        self._stops: npt.NDArray[np.uint64] = starts + sizes
        self.segments = [int(copy.ptr) for copy in self._copies]
        self._segments = np.array(self.segments, np.uint64)
        self._memory = cupy.cuda.Memory(8 * kernels.STRIPES)
        self.where = int(self._memory.ptr)
        self._complete = False  # after an error the next update copies all buckets
        runtime.memsetAsync(self.where, 0xFF, 8 * kernels.STRIPES, stream.ptr)  # odd, so of no stripe

    def update(self, changes: BucketChanges, pinned: PinnedBuffer, device_id: int, stream: Any) -> None:
        """Copy changed buckets, then their versions, and wait for the end."""
        # Buckets before versions: a kernel takes a copied bucket only if its stripe's copied version is the current one. A new
        # version over an old bucket would make an old row valid.
        pairs = self._pairs(changes) if self._complete else None
        self._complete = False
        self._launch(pairs, changes.versions, pinned, device_id, int(stream.ptr))
        stream.synchronize()
        self._complete = True

    def _launch(
        self,
        pairs: npt.NDArray[np.uint64] | None,  # (n, 2)
        versions: npt.NDArray[np.uint64],  # (stripes,)
        pinned: PinnedBuffer,
        device_id: int,
        stream: int,
    ) -> None:
        if pairs is None:
            for source, stop, copy in zip(self._starts.tolist(), self._stops.tolist(), self.segments, strict=True):
                copy_to_device(copy, source, stop - source, stream)
        elif pairs.size:
            at, piece = pinned.take(pairs.nbytes)
            np.copyto(piece.view(np.uint64), pairs.reshape(-1))
            arguments = Arguments(structs.MIRROR.size)
            arguments.pack(structs.MIRROR, 0, at, len(pairs))
            handle = kernels_of(device_id).handle(kernels.MIRROR_KERNEL)
            launch(handle, kernels.tile_blocks(len(pairs)), kernels.THREADS, arguments, stream)
        at, piece = pinned.take(versions.nbytes)
        np.copyto(piece.view(np.uint64), versions)
        copy_to_device(self.where, at, piece.nbytes, stream)

    def _pairs(self, changes: BucketChanges) -> npt.NDArray[np.uint64] | None:
        """Return (n, 2) uint64: each changed bucket and its copy; None to copy all."""
        if changes.buckets is None:
            return None
        buckets, order = np.unique(changes.buckets), np.argsort(self._starts)
        place = order[np.searchsorted(self._starts[order], buckets, side="right") - 1]
        if np.any(buckets < self._starts[place]) or np.any(buckets >= self._stops[place]):
            return None  # of segments that this layout does not have
        return np.stack([buckets, self._segments[place] + (buckets - self._starts[place])], axis=1)


class FileIndex:
    """Starts and fingerprints of a row file in device memory; where that has no room, in host memory. *Immutable.*

    Attributes:
        where: addresses of both.
    """

    __slots__ = ("_file", "_memory", "where")

    def __init__(self, file: FileLayout, stream: Any) -> None:
        self._file = file
        self._memory: Any = None
        self.where = file.starts, file.fingerprints
        start_bytes, print_bytes = 4 * (file.buckets + 1), -(-file.rows // 4) * 4  # which kernels read by 4
        prints_at = -(-start_bytes // 256) * 256
        try:
            self._memory = cupy.cuda.Memory(prints_at + print_bytes)
        except (*CUDA_ERRORS, cupy.cuda.memory.OutOfMemoryError) as error:
            _log.warning("the device has no room for the index of a row file: %s; misses take longer", error)
            return
        at = int(self._memory.ptr)
        copy_to_device(at, file.starts, start_bytes, stream.ptr)
        copy_to_device(at + prints_at, file.fingerprints, print_bytes, stream.ptr)
        stream.synchronize()
        self.where = at, at + prints_at

    def is_of(self, file: FileLayout) -> bool:
        return self._file is file


class DeviceLayout:
    """A layout in device memory. *Immutable* but for its mirror. Keeps the memory that it references in place.

    Attributes:
        where: address of its first word, which holds its own address.
        bins_per_row: how the misses of a lookup are ordered; see `kernels.bins_per_row`.
        mirror: copy of its buckets; None without one.
        index: that of its row file; None without one.
    """

    __slots__ = ("_memory", "bins_per_row", "host", "index", "mirror", "where")

    def __init__(self, host: HostLayout, mirror: Mirror | None, before: "DeviceLayout | None", stream: Any) -> None:
        self.host = host
        self.mirror = mirror
        self.index: FileIndex | None = None
        if (file := host.file) is not None:
            kept = None if before is None else before.index
            self.index = kept if kept is not None and kept.is_of(file) else FileIndex(file, stream)
        slabs = np.ascontiguousarray(host.slabs)
        known = np.ones(kernels.STRIPES, np.uint64)  # odd, so of no stripe
        self._memory = cupy.cuda.Memory(_SLABS_AT + slabs.nbytes + known.nbytes)
        self.where = int(self._memory.ptr)
        self.bins_per_row = kernels.bins_per_row(host.words.tolist())
        head = kernels.host_layout(
            host.words.tolist(),
            self.where,
            self.where + _SLABS_AT,
            slabs.size,
            self.where + _SLABS_AT + slabs.nbytes,
            mirrored=0 if mirror is None else mirror.where,
            mirrors=() if mirror is None else mirror.segments,
            file=host.file,
            index=self.index.where if self.index else (0, 0),
            number=host.number,
        )
        packed = np.frombuffer(head.ljust(_SLABS_AT, b"\0") + slabs.tobytes() + known.tobytes(), np.uint8)
        copy_to_device(self.where, packed.ctypes.data, packed.nbytes, stream.ptr)
        stream.synchronize()


class LayoutReaders:
    """Finds when no kernel reads a layout any more that was replaced: `Readers` in `cuda/host_table.cuh`. *Thread-safe.*

    Attributes:
        where: its address, that all links of a cache share.
    """

    def __init__(self) -> None:
        self._memory = cupy.cuda.Memory(structs.READERS.size)
        self.where = int(self._memory.ptr)
        self._lock = threading.Lock()
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self._phase: np.ndarray = np.zeros(1, np.uint64)
        self._seen = np.zeros(2, np.uint64)  # for each count, how often it was found 0
        runtime.memsetAsync(self.where, 0, structs.READERS.size, self._stream.ptr)
        self._stream.synchronize()

    def poll(self) -> tuple[int, int]:
        """Return how often each count was found 0 so far: a layout that was replaced is free once both have risen."""
        values = np.zeros(3, np.uint64)
        with self._lock:
            copy_to_host(values, self.where, int(self._stream.ptr))
            self._seen += values[1:] == 0
            # Blocks that begin now use the other count, so that this one comes to 0 also under load.
            self._phase[0] += 1
            copy_to_device(self.where, self._phase.ctypes.data, 8, int(self._stream.ptr))
            self._stream.synchronize()
            even, odd = self._seen.tolist()
            return even, odd


class _Replaced(NamedTuple):
    """A layout that kernels may still read, and how often each count of readers had been 0 when it was replaced."""

    layout: DeviceLayout
    seen: tuple[int, int]


_NEVER = (1 << 62, 1 << 62)


class AttachedTable:
    """A table in host memory that lookups of one cache read in place. *Thread-safe.*

    Attributes:
        authoritative: keys that it lacks are absent.
        present: current layout of the table; a lookup keeps a reference while its kernels read. None while it cannot be read.
        has_files: see `HostTable`.
        where: address of the state that all its lookups share on the device: `Link` in `cuda/host_table.cuh`.
        unread_at: address of its counter of keys that could not be read.
    """

    def __init__(
        self, device_id: int, host: HostTable, *, authoritative: bool, index: bool = False, readers: LayoutReaders | None = None
    ) -> None:
        """Watch a table that is pinned.

        Args:
            index: keep a copy of its buckets in device memory.
            readers: those of all tables of the cache; row files need them.
        """
        self._readers = readers
        self._replaced: list[_Replaced] = []
        self.authoritative = authoritative
        self.has_files = host.has_files
        self._index = index = index or host.has_files  # changed rows are few, and so are their buckets
        self._device_id = device_id
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self._memory = cupy.cuda.Memory(structs.LINK.size)
        self.where = int(self._memory.ptr)
        self.unread_at = self.where + _COUNTERS_AT + 24
        self._words = PinnedBuffer()
        self._word_at, word = self._words.take(8)
        self._word: np.ndarray = word.view(np.uint64)
        self._lock = threading.Lock()  # guards the fields below
        self.present: DeviceLayout | None = None
        self._epoch = self._changes = 0
        self._layouts: list[DeviceLayout | None] | None = None
        self._changed = PinnedBuffer()
        self._end_mirror: Callable[[], None] = lambda: None
        with self._lock:
            for offset in range(0, structs.LINK.size, 8):
                self._write(offset, 0)
            self._write(_READERS_AT, readers.where if readers else 0)
        self._end_watch = host.watch(self._publish)
        shown: HostLayout | None = None
        while (now := host.layout()) is not shown:  # the table may grow meanwhile
            self._publish(now)
            shown = now
        if index:
            self._end_mirror = host.mirror(self._copy_changes)

    def keep_layouts(self) -> None:
        """Keep every layout, for graphs that may be replayed at any time; those of row files until no kernel reads them."""
        if self._layouts is not None and not self._replaced:
            return
        with self._lock, on_device(self._device_id):
            if self._layouts is None:
                self._layouts = [] if self.has_files else [self.present]
            self._free_replaced()

    def _free_replaced(self) -> None:
        """Drop layouts of row files that no kernel reads any more: their files would else stay in memory."""
        if self._replaced and self._readers is not None:
            even, odd = self._readers.poll()
            self._replaced = [one for one in self._replaced if even <= one.seen[0] or odd <= one.seen[1]]

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Refuse admissions of rows read from the table before the end of the block; see `HostTableReads.changing`."""
        # An odd epoch marks a running change. A kernel that admits a row compares the epoch from before it read the row with
        # the present one, so a row from before the end of a change is refused (`cuda/answer.cu`). Changes may overlap: the
        # epoch becomes even only after the last of them.
        with self._lock, on_device(self._device_id):
            self._epoch += 2 if self._epoch & 1 else 1
            try:
                self._write(_EPOCH_AT, self._epoch)
            except CUDA_ERRORS as error:
                raise DeviceError(f"announcing a modification to CUDA device {self._device_id}: {error}") from error
            self._changes += 1
        try:
            yield
        finally:
            with self._lock, on_device(self._device_id), suppress(*CUDA_ERRORS):  # an odd epoch refuses all admissions
                self._changes -= 1
                self._epoch += 2 if self._changes else 1
                self._write(_EPOCH_AT, self._epoch)

    def stream_ordered_counts(self) -> StreamOrderedCounts:
        values = np.zeros(4, np.uint64)
        with self._lock, on_device(self._device_id):
            copy_to_host(values, self.where + _COUNTERS_AT, int(self._stream.ptr))
        return StreamOrderedCounts(*values.tolist())

    def close(self) -> None:
        """Stop watching the table, and refuse rows read from it: later modifications are not reported."""
        self._end_watch()
        self._end_mirror()
        with suppress(*CUDA_ERRORS), self._lock, on_device(self._device_id):
            self._changes += 1
            self._epoch += 2 if self._epoch & 1 else 1
            self._write(_EPOCH_AT, self._epoch)

    def _publish(self, host: HostLayout | None) -> None:
        """Publish a layout, or None, to later lookups and to enqueued ones."""
        # Lookups use the old layout until the new one is complete: it is true until the writer goes on.
        with self._lock, on_device(self._device_id):
            before = self.present
            try:
                present = None if host is None else DeviceLayout(host, self._mirror_of(host, before), before, self._stream)
                self._write(0, 0 if present is None else present.where)
                self.present = present
                if self._layouts is None:
                    return
                if not self.has_files:
                    self._layouts.append(present)
                elif before is not None and self._readers is not None:
                    self._replaced.append(_Replaced(before, self._readers.poll()))
                    self._free_replaced()
            except (*CUDA_ERRORS, cupy.cuda.memory.OutOfMemoryError) as error:
                _log.warning("the device cannot read a table in host memory any more: %s", error)
                self._replaced += [] if before is None else [_Replaced(before, _NEVER)]  # kernels may still read it
                self.present = None
                with suppress(*CUDA_ERRORS):
                    self._write(0, 0)  # nor may enqueued lookups, which would miss what is written from now on

    def _mirror_of(self, host: HostLayout, before: DeviceLayout | None) -> Mirror | None:
        """Allocate the copy of a layout's buckets if it is wanted and fits. Dense tables need none."""
        if not self._index or host.words[DENSE_ROWS_AT] or host.words.size == SEGMENTS_AT:
            return None
        try:
            return Mirror(host, None if before is None else before.mirror, self._stream)
        except (*CUDA_ERRORS, cupy.cuda.memory.OutOfMemoryError) as error:
            _log.warning("the device has no room for the index of a table in host memory: %s; misses take longer", error)
            return None

    def _copy_changes(self, changes: BucketChanges) -> None:
        """Update the mirror, and wait for the end. Called at the end of each write."""
        with self._lock, on_device(self._device_id):
            mirror = None if self.present is None else self.present.mirror
            if mirror is None:
                return
            try:
                mirror.update(changes, self._changed, self._device_id, self._stream)
            except (*CUDA_ERRORS, cupy.cuda.memory.OutOfMemoryError) as error:  # stripes that changed are read in host memory
                _log.warning("the index of a table in host memory is not up to date on the device: %s", error)
            with suppress(*CUDA_ERRORS):
                self._free_replaced()
                self._stream.synchronize()  # also after an error, before the pinned memory is used again
                self._changed.reset()

    def _write(self, offset: int, value: int) -> None:
        """Store a word of the link, and wait until kernels see it."""
        self._word[0] = value
        copy_to_device(self.where + offset, self._word_at, 8, int(self._stream.ptr))
        self._stream.synchronize()
