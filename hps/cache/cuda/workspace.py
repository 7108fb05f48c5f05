"""The scratch memory and stream of one lookup on a CUDA device, and how it adopts keys and outputs."""

from collections.abc import Sequence
from typing import Any

import cupy
import numpy as np
from cupy_backends.cuda.api import runtime

from hps.cache.base import Segment, Workspace
from hps.cache.cuda import kernels
from hps.cache.cuda.device import Arguments, DeviceBuffer, PinnedBuffer, stream_of
from hps.cache.cuda.tensors import BOOL, FLOAT32, INT64, UNKNOWN_STREAM, TensorReader
from hps.errors import InvalidDtypeError, InvalidInputError

_LEAST_KEYS = 1 << 14  # that the lists of a workspace have room for


class Placed:
    """Where the device finds a segment. Belongs to its workspace until the next lookup.

    Attributes:
        segment: as it was given.
        table: its table.
        n: how many keys it has.
        keys, out, found: addresses on the device, or in mapped host memory; `found` is 0 where no mask is wanted.
        missing: place of its first miss in the workspace's lists.
        host_out, host_found: mapped memory that is to be copied to the caller's host memory at the end.
    """

    __slots__ = ("found", "host_found", "host_out", "keys", "missing", "n", "out", "segment", "table")

    def __init__(self, segment: Segment, missing: int) -> None:
        self.segment = segment
        self.table = segment.table
        self.missing = missing
        self.found = 0
        self.host_out: np.ndarray | None = None
        self.host_found: np.ndarray | None = None
        self.n: int
        self.keys: int
        self.out: int


class CupyWorkspace(Workspace):
    """Scratch memory of one lookup at a time, and its stream. *One per thread.* Grows to the largest lookup that it served.

    A lookup runs on the caller's stream where its CUDA tensors name one and the same, else on the workspace's own, which
    then waits for theirs.

    Attributes:
        stream: that of the current lookup.
        placed: its segments.
        counts: (T, 2) uint32 in mapped memory: misses and distinct keys of each segment, as `unique` left them.
        any_missing: (1,) uint32 in mapped memory.
        missing_keys, missing_positions, rows, distinct: addresses of the lists on the device; see `cuda/unique.cu`.
        host: mapped memory for keys, outputs, masks and fetched vectors.
        fetched: device memory for vectors that are too many to be read from the host, `fetched_used` bytes of it given out.
    """

    def __init__(self, device_id: int, dims: Sequence[int]) -> None:
        self._dims = tuple(dims)
        self._reader = TensorReader(device_id)
        self._own = cupy.cuda.Stream(non_blocking=True)
        self._own_stream = int(self._own.ptr)
        self._waits_for: list[int] = []  # streams of the caller's that the end of the lookup is ordered before
        self._host_waits = False  # for a consumer whose stream nobody knows
        self._done = cupy.cuda.Event(disable_timing=True)
        self._order = cupy.cuda.Event(disable_timing=True)
        self._unfinished = False  # work was launched that the host has not waited for
        self.stream = self._own_stream
        self.placed: list[Placed] = []
        self._adopted: Sequence[Segment] | None = None  # those of `placed`

        head = kernels.UNIQUE_HEAD.size
        self.query_arguments = {
            segments: Arguments(segments * kernels.SEGMENT.size + kernels.QUERY_TAIL.size)
            for segments in (1, kernels.SEGMENTS_AT_ONCE)
        }
        self.unique_arguments = Arguments(head + kernels.SEGMENTS_AT_ONCE * kernels.UNIQUE_SEGMENT.size)
        self.rank_arguments = Arguments(kernels.RANK_SORTED.size)
        self.scatter_arguments = Arguments(kernels.SCATTER.size)
        self.insert_arguments = Arguments(kernels.TABLE.size + kernels.INSERT_TAIL.size)

        tables = len(self._dims)
        self._fixed = PinnedBuffer()
        self.any_missing_at, any_missing = self._fixed.take(4)
        self.any_missing: np.ndarray = any_missing.view(np.uint32)
        self.counts_at, counts = self._fixed.take(8 * tables)
        self.counts: np.ndarray = counts.view(np.uint32).reshape(tables, 2)
        self._missing_counts = DeviceBuffer()
        self.missing_counts = self._missing_counts.reserve(4 * tables)
        self.clear()

        self._capacity = 0  # keys that the lists have room for
        self._lists = DeviceBuffer()
        self.missing_keys = self.missing_positions = self.rows = self.distinct = 0
        self._distinct_memory = PinnedBuffer()
        self.distinct_on_host_at = 0
        self.distinct_on_host: np.ndarray = np.empty(0, np.int64)
        self.host = PinnedBuffer()
        self.fetched: list[DeviceBuffer] = []
        self.fetched_used = 0
        self._reserve(_LEAST_KEYS)

    def clear(self) -> None:
        """Count misses from 0 again: a query may have ended without that."""
        runtime.memset(self.missing_counts, 0, 4 * len(self._dims))
        runtime.streamSynchronize(0)  # which no other stream waits for

    def begin(self, segments: Sequence[Segment]) -> None:
        """Find keys and outputs of all segments, and order the lookup after those who made them."""
        self.wait()
        self.host.reset()
        self.fetched_used = 0
        reader, dims = self._reader, self._dims
        reader.start()
        placed, missing = [], 0
        for segment in segments:
            place = Placed(segment, missing)
            keys, out = segment.keys, segment.out
            if segment.found is None and type(keys) is not np.ndarray and type(out) is not np.ndarray:
                place.keys, place.n = reader.keys(keys)
                place.out = reader.output(out, place.n * dims[place.table])
            else:
                self._place(place, dims[place.table])
            missing += place.n
            placed.append(place)
        self.placed, self._adopted = placed, segments
        self._choose_stream(self._reader.streams)
        if missing > self._capacity:
            self._reserve(missing)

    def find(self, segments: Sequence[Segment]) -> list[Placed]:
        """The places of segments; they are adopted now where that was not done."""
        if segments is self._adopted:
            return self.placed
        placed = self.placed
        if len(placed) != len(segments) or any(place.segment is not segments[i] for i, place in enumerate(placed)):
            self.begin(segments)
        return self.placed

    def launched(self) -> None:
        """Note that work was launched that nobody has waited for yet."""
        runtime.eventRecord(self._done.ptr, self.stream)
        self._unfinished = True

    def synchronise(self) -> None:
        """Wait for all that was launched."""
        runtime.streamSynchronize(self.stream)
        self._unfinished = False

    def wait(self) -> None:
        """Wait for what the last lookup left running, so that its memory can be used again."""
        if self._unfinished:
            runtime.eventSynchronize(self._done.ptr)
            self._unfinished = False

    def deliver(self) -> None:
        """Bring outputs to host memory where they are wanted there, and order the others before their consumers."""
        on_host = [place for place in self.placed if place.host_out is not None or place.host_found is not None]
        if self._unfinished:
            if on_host or self._host_waits:
                self.synchronise()
            for stream in self._waits_for:
                runtime.eventRecord(self._order.ptr, self.stream)
                runtime.streamWaitEvent(stream, self._order.ptr)
        for place in on_host:
            if place.host_out is not None:
                np.copyto(place.segment.out, place.host_out)
            if place.host_found is not None:
                np.copyto(place.segment.found, place.host_found)  # type: ignore[arg-type]

    def _place(self, place: Placed, dim: int) -> None:
        segment = place.segment
        keys, out, found = segment.keys, segment.out, segment.found
        if isinstance(keys, np.ndarray):
            _check_host(keys, INT64, (keys.size,), "keys")
            place.keys, pinned = self.host.take(keys.nbytes)
            np.copyto(pinned.view(np.int64), keys)
            n = place.n = keys.size
        else:
            place.keys, n = self._reader.keys(keys)
            place.n = n
        if isinstance(out, np.ndarray):
            _check_host(out, FLOAT32, (n, dim), "out")
            place.out, pinned = self.host.take(4 * n * dim)
            place.host_out = pinned.view(np.float32).reshape(n, dim)
        else:
            place.out = self._reader.output(out, n * dim)
        if isinstance(found, np.ndarray):
            _check_host(found, BOOL, (n,), "found")
            place.found, pinned = self.host.take(n)
            place.host_found = pinned.view(np.bool_)
        elif found is not None:
            place.found = self._reader.mask(found, n)

    def _choose_stream(self, streams: set[int]) -> None:
        self._host_waits = UNKNOWN_STREAM in streams
        if len(streams) == 1 and not self._host_waits:
            (self.stream,) = streams
            self._waits_for = []
            return
        self.stream = self._own_stream
        self._waits_for = [stream for stream in streams if stream != UNKNOWN_STREAM]
        for stream in streams:
            runtime.eventRecord(self._order.ptr, 0 if stream == UNKNOWN_STREAM else stream)
            runtime.streamWaitEvent(self.stream, self._order.ptr)

    def _reserve(self, keys: int) -> None:
        """Make room for that many misses; the lists hold nothing."""
        self._capacity = keys = 1 << (keys - 1).bit_length()
        start = self._lists.reserve(24 * keys)
        self.missing_keys, self.distinct = start, start + 8 * keys
        self.missing_positions, self.rows = start + 16 * keys, start + 20 * keys
        self._distinct_memory = PinnedBuffer()
        self.distinct_on_host_at, distinct = self._distinct_memory.take(8 * keys)
        self.distinct_on_host = distinct.view(np.int64)

    def device_space(self, size_bytes: int) -> int:
        """A piece of device memory, until the next lookup."""
        start = -(-self.fetched_used // 256) * 256
        if not self.fetched or start + size_bytes > self.fetched[-1].size_bytes:
            if start == 0:
                self.fetched.clear()  # nothing was given out
            self.fetched.append(DeviceBuffer())
            self.fetched[-1].reserve(size_bytes)
            start = 0
        self.fetched_used = start + size_bytes
        return self.fetched[-1].pointer + start

    def sort(self, place: Placed, misses: int) -> Any:
        """The permutation that sorts a segment's misses: (misses,) int64 on the device, made on the lookup's stream."""
        with stream_of(self.stream):
            return cupy.argsort(self._lists.array(8 * place.missing, misses, np.int64)).astype(np.int64, copy=False)


def _check_host(array: np.ndarray, dtype: np.dtype, shape: tuple[int, ...], what: str) -> None:
    if array.dtype != dtype:
        raise InvalidDtypeError(f"querying an embedding cache: got {what} of dtype {array.dtype}, wanted {dtype}")
    flags = array.flags
    if array.shape != shape or not flags.c_contiguous or not (flags.writeable or what == "keys"):
        state = "" if flags.writeable else ", read-only"
        raise InvalidInputError(
            f"querying an embedding cache: got {what} of shape {array.shape}, strides {array.strides}{state}; wanted shape "
            f"{shape}, C-contiguous{'' if what == 'keys' else ', writable'}"
        )
