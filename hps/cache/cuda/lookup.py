"""A lookup on a CUDA device: its scratch memory, its stream, and the kernels that it launches."""

from collections.abc import Sequence

import cupy
import numpy as np
from cupy_backends.cuda.api import runtime

from hps.cache.base import CacheLookup, MissedKeys
from hps.cache.cuda import kernels
from hps.cache.cuda.device import (
    CUDA_ERRORS,
    Arguments,
    DeviceBuffer,
    PinnedBuffer,
    copy_to_device,
    copy_to_host,
    kernels_of,
    launch,
    stream_of,
)
from hps.cache.cuda.kernels import Kernel
from hps.cache.cuda.modifications import Modifications
from hps.cache.cuda.tables import DeviceTable, TableMemory, device_call
from hps.cache.cuda.tensors import UNKNOWN_STREAM, PlacedSegment, TensorReader
from hps.tensors.segments import Segment
from hps.types import BoolArray, FloatArray, KeyArray

_LEAST_KEYS = 1 << 14  # that the lists of a lookup have room for
_HIGHEST_PRIORITY = -5  # of streams; a device that has fewer takes its highest. Changes to the tables run at the lowest, 0
_MAPPED_BYTES = 1 << 18  # up to here, fetched vectors are read from pinned host memory: a copy of its own costs more


class LookupKernels:
    """The compiled kernels of a cache's lookups, and what they need to know of its tables. *Thread-safe.*

    Attributes:
        geometry: of each table: dim, addresses of buckets and rows, pairs.
    """

    def __init__(self, device_id: int, tables: Sequence[DeviceTable]) -> None:
        self._compiled = kernels_of(device_id)
        self._dims = [table.spec.dim for table in tables]
        self.geometry = [(table.spec.dim, table.buckets, table.rows, table.pairs) for table in tables]
        self._queries: dict[tuple[int, int, int], int] = {}  # handles, by unit, widest row and segments
        self._scatters: dict[int, int] = {}  # handles, by unit

    def needed(self) -> list[Kernel]:
        """What lookups of aligned outputs will launch; others are compiled when they are first needed."""
        dims = set(self._dims)
        found = [kernels.UNIQUE]
        for dim in dims:
            unit = kernels.unit_of(dim, 16)
            found += [kernels.query_kernel(unit, dim, 1), kernels.scatter_kernel(unit)]
        if len(self._dims) > 1:
            unit = min(kernels.unit_of(dim, 16) for dim in dims)
            found.append(kernels.query_kernel(unit, max(dims), kernels.SEGMENTS_AT_ONCE))
        return found

    def query(self, unit: int, widest: int, segments: int) -> int:
        """The handle of the query kernel for rows of at most `widest` floats."""
        handle = self._queries.get((unit, widest, segments))
        if handle is None:
            handle = self._compiled.handle(kernels.query_kernel(unit, widest, segments))
            self._queries[unit, widest, segments] = handle
        return handle

    def scatter(self, unit: int) -> int:
        """The handle of the scatter kernel."""
        handle = self._scatters.get(unit)
        if handle is None:
            handle = self._scatters[unit] = self._compiled.handle(kernels.scatter_kernel(unit))
        return handle

    def handle(self, kernel: Kernel) -> int:
        """The handle of a kernel that is not specialised."""
        return self._compiled.handle(kernel)


class CupyLookup(CacheLookup):
    """A lookup on the CuPy cache. *One per thread.* Its memory grows to the largest lookup that it served.

    It runs on the caller's stream where all its CUDA tensors name one and the same, else on a stream of its own, which waits
    for theirs.

    Attributes:
        memory: the tables.
        kernels: what it launches.
        changes: the order of what changes the tables.
        stream: that of the current lookup.
        placed: its segments.
        missing_keys, missing_positions, rows, distinct: addresses of the lists on the device; see `cuda/unique.cu`.
        host: mapped memory for keys, outputs, masks and fetched vectors.
        scatter_arguments, insert_arguments: the structs that those kernels take.
    """

    def __init__(self, memory: TableMemory, compiled: LookupKernels, changes: Modifications) -> None:
        super().__init__()
        self.memory = memory
        self.kernels = compiled
        self.changes = changes
        self._dims = [spec.dim for spec in memory.specs]
        self._reader = TensorReader(memory.device_id)
        self._own = cupy.cuda.Stream(non_blocking=True, priority=_HIGHEST_PRIORITY)
        self._own_stream = int(self._own.ptr)
        self._waits_for: list[int] = []  # streams of the caller's that the end of the lookup is ordered before
        self._host_waits = False  # for a consumer whose stream nobody knows
        self._done = cupy.cuda.Event(disable_timing=True)
        self._order = cupy.cuda.Event(disable_timing=True)
        self._unfinished = False  # work was launched that the host has not waited for
        self.stream = self._own_stream
        self.placed: list[PlacedSegment] = []

        head = kernels.UNIQUE_HEAD.size
        self._query_arguments = {
            segments: Arguments(segments * kernels.SEGMENT.size + kernels.QUERY_TAIL.size)
            for segments in (1, kernels.SEGMENTS_AT_ONCE)
        }
        self._unique_arguments = Arguments(head + kernels.SEGMENTS_AT_ONCE * kernels.UNIQUE_SEGMENT.size)
        self._rank_arguments = Arguments(kernels.RANK_SORTED.size)
        self.scatter_arguments = Arguments(kernels.SCATTER.size)
        self.insert_arguments = Arguments(kernels.TABLE.size + kernels.INSERT_TAIL.size)

        tables = len(memory.specs)
        self._fixed = PinnedBuffer()
        self._any_missing_at, any_missing = self._fixed.take(4)
        self._any_missing: np.ndarray = any_missing.view(np.uint32)
        self._totals_at, totals = self._fixed.take(8 * tables)
        self._totals: np.ndarray = totals.view(np.uint32).reshape(tables, 2)  # misses and distinct keys of each segment
        self._missing_counts = DeviceBuffer()
        self._missing_counts.reserve(4 * tables)
        self._clear()

        self._capacity = 0  # keys that the lists have room for
        self._lists = DeviceBuffer()
        self.missing_keys = self.missing_positions = self.rows = self.distinct = 0
        self._distinct_memory = PinnedBuffer()
        self._distinct_on_host_at = 0
        self._distinct_on_host: np.ndarray = np.empty(0, np.int64)
        self.host = PinnedBuffer()
        self._fetched: list[DeviceBuffer] = []  # for vectors that are too many to be read from the host
        self._fetched_used = 0  # bytes of the last of them that were given out
        self._reserve(_LEAST_KEYS)

    @device_call("querying")
    def query(self, segments: Sequence[Segment]) -> int:
        """Copy resident vectors to their rows of `out`; list the rest. See `CacheLookup.query`.

        One kernel and one wait for it if all keys are resident; else a second of each, for the distinct missing keys.
        """
        tables = self.memory.tables()
        self.begin(segments)
        if self.changes.pending:
            self.changes.show(self.stream)
        self._any_missing[0] = 0
        try:
            self.launch_query()
            self._synchronise()
            if not self._any_missing[0]:
                self.counts = [0] * len(self.placed)
                return 0
            self._launch_unique()
            self._synchronise()
        except CUDA_ERRORS:
            self._clear()
            raise
        del tables  # closing the cache leaves their memory alone until here
        self.counts = self._totals[: len(self.placed), 0].tolist()
        return sum(self.counts)

    @device_call("finding the distinct missing keys")
    def unique(self) -> Sequence["CupyMissedKeys"]:
        """Bring the misses to the host, each key of a table once. See `CacheLookup.unique`."""
        return [
            CupyMissedKeys(self, place, self._distinct_keys(index, place, count), count)
            for index, (place, count) in enumerate(zip(self.placed, self.counts, strict=True))
            if count
        ]

    @device_call("delivering outputs")
    def finish(self) -> None:
        """Bring outputs to host memory where they are expected there, and order the others before their consumers."""
        on_host = [place for place in self.placed if place.host_out is not None or place.host_found is not None]
        if self._unfinished:
            if on_host or self._host_waits:
                self._synchronise()
            for stream in self._waits_for:
                runtime.eventRecord(self._order.ptr, self.stream)
                runtime.streamWaitEvent(stream, self._order.ptr)
        for place in on_host:
            if place.host_out is not None:
                np.copyto(place.segment.out, place.host_out)
            if place.host_found is not None:
                np.copyto(place.segment.found, place.host_found)  # type: ignore[arg-type]

    def begin(self, segments: Sequence[Segment]) -> None:
        """Find keys and outputs of all segments, and order the lookup after their producers."""
        if self._unfinished:  # what the last lookup left running still uses the memory
            runtime.eventSynchronize(self._done.ptr)
            self._unfinished = False
        self.host.reset()
        self._fetched_used = 0
        reader, dims = self._reader, self._dims
        reader.start()
        placed, missing = [], 0
        for segment in segments:
            place = PlacedSegment(segment, missing)
            keys, out = segment.keys, segment.out
            if segment.found is None and type(keys) is not np.ndarray and type(out) is not np.ndarray:
                place.keys, n = reader.keys(keys)
                place.out = reader.output(out, n, dims[segment.table])
                place.n = n
            else:
                reader.place(place, self.memory.specs[segment.table], self.host)
                n = place.n
            missing += n
            placed.append(place)
        self.placed = placed
        self._choose_stream(reader.streams)
        if missing > self._capacity:
            self._reserve(missing)

    def launch_query(self) -> None:
        """Launch the queries of all segments: one kernel for every SEGMENTS_AT_ONCE of them."""
        placed, geometry, pack = self.placed, self.kernels.geometry, kernels.SEGMENT.pack_into
        total = sum([place.n for place in placed])
        asked = [(index, place) for index, place in enumerate(placed) if place.n]
        for start in range(0, len(asked), kernels.SEGMENTS_AT_ONCE):
            group = asked[start : start + kernels.SEGMENTS_AT_ONCE]
            alignment = widths = widest = 0
            for _index, place in group:
                dim = geometry[place.table][0]
                alignment |= place.out
                widths |= dim
                if dim > widest:
                    widest = dim
            segments = 1 if len(group) == 1 else kernels.SEGMENTS_AT_ONCE
            unit = kernels.unit_of(widths, alignment)
            per_warp = kernels.query_keys_per_warp(total, widest)
            per_block = kernels.query_keys_per_block(per_warp)
            arguments = self._query_arguments[segments]
            buffer = arguments.bytes
            offset = blocks = 0
            for index, place in group:
                dim, buckets, rows, pairs = geometry[place.table]
                n, units = place.n, dim // unit
                keys, out, found, missing = place.keys, place.out, place.found, place.missing
                pack(buffer, offset, keys, out, found, buckets, rows, n, pairs, units, blocks, missing, index)
                offset += kernels.SEGMENT.size
                blocks += -(-n // per_block)
            arguments.pack(
                kernels.QUERY_TAIL,
                segments * kernels.SEGMENT.size,
                self.missing_keys,
                self.missing_positions,
                self._missing_counts.pointer,
                self._any_missing_at,
                len(group),
                per_warp,
                0,
            )
            launch(self.kernels.query(unit, widest, segments), blocks, kernels.QUERY_THREADS, arguments, self.stream)

    def launched(self) -> None:
        """Note that work was launched that nobody has waited for yet."""
        runtime.eventRecord(self._done.ptr, self.stream)
        self._unfinished = True

    def device_space(self, size_bytes: int) -> int:
        """A piece of device memory, until the next query."""
        start = -(-self._fetched_used // 256) * 256
        if not self._fetched or start + size_bytes > self._fetched[-1].size_bytes:
            if start == 0:
                self._fetched.clear()  # nothing was given out
            self._fetched.append(DeviceBuffer())
            self._fetched[-1].reserve(size_bytes)
            start = 0
        self._fetched_used = start + size_bytes
        return self._fetched[-1].pointer + start

    def _launch_unique(self) -> None:
        """Launch what makes the misses of all segments distinct and counts them."""
        placed, arguments = self.placed, self._unique_arguments
        arguments.pack(
            kernels.UNIQUE_HEAD,
            0,
            self.missing_keys,
            self._missing_counts.pointer,
            self.rows,
            self.distinct,
            self._distinct_on_host_at,
            self._totals_at,
        )
        for start in range(0, len(placed), kernels.SEGMENTS_AT_ONCE):
            group = placed[start : start + kernels.SEGMENTS_AT_ONCE]
            for nth, place in enumerate(group):
                offset = kernels.UNIQUE_HEAD.size + nth * kernels.UNIQUE_SEGMENT.size
                arguments.pack(kernels.UNIQUE_SEGMENT, offset, place.missing, start + nth)
            launch(self.kernels.handle(kernels.UNIQUE), len(group), kernels.UNIQUE_THREADS, arguments, self.stream)

    def _distinct_keys(self, index: int, place: PlacedSegment, misses: int) -> KeyArray:
        """The distinct missing keys of one segment, as the unique kernel left them."""
        count = int(self._totals[index, 1])
        if count == kernels.TOO_MANY:
            count = self._sort(index, place, misses)
        keys: KeyArray = self._distinct_on_host[place.missing : place.missing + count].copy()
        return keys

    def _sort(self, index: int, place: PlacedSegment, misses: int) -> int:
        """Do for many misses what the unique kernel does for a few."""
        with stream_of(self.stream):
            order = cupy.argsort(self._lists.array(8 * place.missing, misses, np.int64)).astype(np.int64, copy=False)
        blocks = kernels.sorted_blocks(misses)
        heads = self.device_space(4 * blocks)
        self._rank_arguments.pack(
            kernels.RANK_SORTED,
            0,
            self.missing_keys + 8 * place.missing,
            int(order.data.ptr),
            heads,
            self.rows + 4 * place.missing,
            self.distinct + 8 * place.missing,
            self._totals_at + 8 * index + 4,
            misses,
        )
        for kernel in (kernels.MARK_HEADS, kernels.RANK_SORTED_KERNEL):
            launch(self.kernels.handle(kernel), blocks, kernels.UNIQUE_THREADS, self._rank_arguments, self.stream)
        self._synchronise()
        count = int(self._totals[index, 1])
        copy_to_host(
            self._distinct_on_host[place.missing : place.missing + count], self.distinct + 8 * place.missing, self.stream
        )
        return count

    def _synchronise(self) -> None:
        """Wait for all that was launched."""
        runtime.streamSynchronize(self.stream)
        self._unfinished = False

    def _clear(self) -> None:
        """Count misses from 0 again: a query may have ended without that."""
        runtime.memset(self._missing_counts.pointer, 0, 4 * len(self.memory.specs))
        runtime.streamSynchronize(0)  # which no other stream waits for

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
        self._distinct_on_host_at, distinct = self._distinct_memory.take(8 * keys)
        self._distinct_on_host = distinct.view(np.int64)


class CupyMissedKeys(MissedKeys):
    """The distinct missing keys of one segment of a `CupyLookup`."""

    __slots__ = ("_found", "_lookup", "_misses", "_place", "_staged", "_vectors", "memory")

    def __init__(self, lookup: CupyLookup, place: PlacedSegment, keys: KeyArray, misses: int) -> None:
        self.segment = place.segment
        self.keys = keys
        self.memory = lookup.memory
        self._lookup = lookup
        self._place = place
        self._misses = misses  # with duplicates
        self._vectors = 0  # address of the fetched vectors, on the device or in mapped memory
        self._staged = 0  # where they are copied from; 0 where they are read in place
        self._found = 0  # address of the mask of what was fetched; 0 until it is known, and where nothing was

    @device_call("allocating a fetch buffer")
    def buffer(self) -> FloatArray:
        """Pinned memory for the vectors of `keys`: (u, dim) float32; content unspecified."""
        lookup, dim = self._lookup, self.memory.specs[self._place.table].dim
        size = 4 * self.keys.size * dim
        pointer, pinned = lookup.host.take(size)
        self._vectors, self._staged = pointer, 0
        if size > _MAPPED_BYTES:
            self._vectors, self._staged = lookup.device_space(size), pointer
        buffer: FloatArray = pinned.view(np.float32).reshape(-1, dim)
        return buffer

    @device_call("copying fetched vectors")
    def stage(self, start: int, stop: int) -> None:
        """Begin to copy rows [start, stop) of the buffer to the device, where they are too many to be read in place."""
        if self._staged and stop > start:
            row = 4 * self.memory.specs[self._place.table].dim
            size, stream = (stop - start) * row, self._lookup.stream
            copy_to_device(self._vectors + start * row, self._staged + start * row, size, stream)
            self._lookup.launched()

    @device_call("scattering fetched vectors")
    def scatter(self, found: BoolArray) -> None:
        """Write the fetched or the default vector to every missing position. See `MissedKeys.scatter`."""
        self._place_mask(found)
        lookup, place = self._lookup, self._place
        table = self.memory.specs[place.table]
        unit = kernels.unit_of(table.dim, place.out)
        lookup.scatter_arguments.pack(
            kernels.SCATTER,
            0,
            lookup.missing_positions + 4 * place.missing,
            lookup.rows + 4 * place.missing,
            self._found,
            self._vectors,
            place.out,
            place.found,
            self._misses,
            table.dim // unit,
            table.default_value,
        )
        blocks = kernels.tile_blocks(self._misses)
        launch(lookup.kernels.scatter(unit), blocks, kernels.THREADS, lookup.scatter_arguments, lookup.stream)
        lookup.launched()

    @device_call("inserting fetched vectors")
    def insert(self, found: BoolArray) -> None:
        """Insert the fetched vectors whose `found` is True. See `MissedKeys.insert`."""
        lookup, table = self._lookup, self.memory.tables()[self._place.table]
        self._place_mask(found)
        if not self._found or not table.pairs:
            return
        keys = lookup.distinct + 8 * self._place.missing
        lookup.changes.launch_insert(
            table,
            keys,
            self._vectors,
            self._found,
            self.keys.size,
            kernels.ADMIT,
            lookup.insert_arguments,
            lookup.stream,
        )
        lookup.launched()

    def _place_mask(self, found: BoolArray) -> None:
        if self._vectors and not self._found and found.any():
            self._found, pinned = self._lookup.host.take(found.size)
            np.copyto(pinned.view(np.bool_), found)
