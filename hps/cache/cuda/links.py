"""Tables in host memory that lookups on a device read in place: pinning, and their state on the device."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import cupy
import numpy as np
from cupy_backends.cuda.api import runtime

from hps.cache.base import StreamOrderedCounts
from hps.cache.cuda import kernels
from hps.cache.cuda.device import CUDA_ERRORS, PinnedBuffer, copy_to_device, copy_to_host, on_device
from hps.errors import DeviceError
from hps.ground.host_tables import HostLayout, HostTable

_log = logging.getLogger(__name__)

_SLABS_AT = 512  # bytes from the start of a layout's device memory to its slab addresses
_EPOCH_AT, _COUNTERS_AT = 8, 16  # bytes from the start of a link


class CudaPinner:
    """Registers memory with CUDA, for all devices. *Thread-safe.* See `hps.ground.host_tables.Pinner`."""

    def __init__(self, device_id: int) -> None:
        self._device_id = device_id

    def pin(self, address: int, size_bytes: int) -> None:
        """Pin and map memory at its own address."""
        try:
            with on_device(self._device_id):
                runtime.hostRegister(address, size_bytes, runtime.hostAllocPortable | runtime.hostAllocMapped)
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


class DeviceLayout:
    """A layout in device memory. *Immutable.* The memory that it references stays in place while it is held.

    Attributes:
        where: address of its first word, which holds its own address.
        bins_per_row: how the misses of a lookup are ordered; see `kernels.bins_per_row`.
    """

    __slots__ = ("_memory", "bins_per_row", "host", "where")

    def __init__(self, host: HostLayout, stream: Any) -> None:
        self.host = host
        slabs = np.ascontiguousarray(host.slabs)
        self._memory = cupy.cuda.Memory(_SLABS_AT + max(slabs.nbytes, 8))
        self.where = int(self._memory.ptr)
        self.bins_per_row = kernels.bins_per_row(host.words.tolist())
        head = kernels.host_layout(host.words.tolist(), self.where, self.where + _SLABS_AT, slabs.size)
        packed = np.frombuffer(head.ljust(_SLABS_AT, b"\0") + slabs.tobytes(), np.uint8)
        copy_to_device(self.where, packed.ctypes.data, packed.nbytes, stream.ptr)
        stream.synchronize()


class AttachedTable:
    """A table in host memory that lookups of one cache read in place. *Thread-safe.*

    Attributes:
        authoritative: keys that it lacks are absent.
        present: current layout of the table, to be held while a kernel reads by it; None while it cannot be read.
        where: address of the state that all its lookups share on the device: `Link` in `cuda/host_table.cuh`.
        unread_at: address of its counter of keys that could not be read.
    """

    def __init__(self, device_id: int, host: HostTable, authoritative: bool) -> None:
        self.authoritative = authoritative
        self._device_id = device_id
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self._memory = cupy.cuda.Memory(kernels.LINK.size)
        self.where = int(self._memory.ptr)
        self.unread_at = self.where + _COUNTERS_AT + 24
        self._words = PinnedBuffer()
        self._word_at, word = self._words.take(8)
        self._word: np.ndarray = word.view(np.uint64)
        self._lock = threading.Lock()  # guards the fields below
        self.present: DeviceLayout | None = None
        self._epoch = self._changes = 0
        self._kept: list[DeviceLayout | None] | None = None
        with self._lock:
            for offset in range(0, kernels.LINK.size, 8):
                self._write(offset, 0)
        self._end_watch = host.watch(self._show)
        shown: HostLayout | None = None
        while (now := host.layout()) is not shown:  # it may grow meanwhile
            self._show(now)
            shown = now

    def follow(self) -> None:
        """Keep every layout from now on: graphs that may be replayed at any time may be reading it."""
        with self._lock:
            if self._kept is None:
                self._kept = [self.present]

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Refuse admissions of rows read from the table before the end of the block; see `EmbeddingCache.changing`."""
        with self._lock, on_device(self._device_id):
            self._epoch += 2 if self._epoch & 1 else 1
            try:
                self._write(_EPOCH_AT, self._epoch)
            except CUDA_ERRORS as error:
                raise DeviceError(f"telling CUDA device {self._device_id} of a modification: {error}") from error
            self._changes += 1
        try:
            yield
        finally:
            with self._lock, on_device(self._device_id), suppress(*CUDA_ERRORS):  # an odd epoch refuses all admissions
                self._changes -= 1
                self._epoch += 2 if self._changes else 1
                self._write(_EPOCH_AT, self._epoch)

    def stream_ordered_counts(self) -> StreamOrderedCounts:
        """Return the counters of enqueued lookups."""
        values = np.zeros(4, np.uint64)
        with self._lock, on_device(self._device_id):
            copy_to_host(values, self.where + _COUNTERS_AT, int(self._stream.ptr))
        return StreamOrderedCounts(*values.tolist())

    def close(self) -> None:
        """Stop watching the table, and refuse rows read from it: later modifications are not reported."""
        self._end_watch()
        with suppress(*CUDA_ERRORS), self._lock, on_device(self._device_id):
            self._changes += 1
            self._epoch += 2 if self._epoch & 1 else 1
            self._write(_EPOCH_AT, self._epoch)

    def _show(self, host: HostLayout | None) -> None:
        """Publish another layout, or none, to lookups that begin from now on, and to enqueued ones."""
        with self._lock, on_device(self._device_id):
            self.present = None
            try:
                if host is not None:
                    self.present = DeviceLayout(host, self._stream)
                    if self._kept is not None:
                        self._kept.append(self.present)
                self._write(0, 0 if self.present is None else self.present.where)
            except (*CUDA_ERRORS, cupy.cuda.memory.OutOfMemoryError) as error:
                _log.warning("the device cannot read a table in host memory any more: %s", error)
                self.present = None

    def _write(self, offset: int, value: int) -> None:
        """Store a word of the link, and wait until kernels see it."""
        self._word[0] = value
        copy_to_device(self.where + offset, self._word_at, 8, int(self._stream.ptr))
        self._stream.synchronize()
