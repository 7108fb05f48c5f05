"""Runs lookups on a CUDA device: their scratch memory, stream and kernel launches."""

from collections.abc import Sequence
from functools import reduce
from operator import or_
from typing import NamedTuple

import cupy
import numpy as np
from cupy_backends.cuda.api import runtime

from hps.cache.base import MissedKeys, StreamOrderedLookup
from hps.cache.cuda import kernels, structs
from hps.cache.cuda.device import (
    CUDA_ERRORS,
    Arguments,
    DependentLaunch,
    DeviceBuffer,
    PinnedBuffer,
    TableMemory,
    copy_to_device,
    copy_to_host,
    device_call,
    driver_function,
    launch,
    stream_of,
)
from hps.cache.cuda.geometry import LEAST_KEYS, count_bytes, list_bytes
from hps.cache.cuda.kernels import Shape
from hps.cache.cuda.links import AttachedTable, DeviceLayout
from hps.cache.cuda.modifications import Modifications
from hps.cache.cuda.pooling import BagPooling
from hps.cache.cuda.queries import LookupKernels, Queries
from hps.cache.cuda.repeats import (
    DRIVER_FUNCTIONS,
    LEFT,
    UNANSWERED,
    Repeat,
    RepeatedAnswer,
    driver_words,
    launch_and_wait,
)
from hps.cache.cuda.tensors import NOTHING, UNKNOWN_STREAM, Placement, TensorReader
from hps.errors import InvalidInputError, NotReadyError
from hps.tensors.batch import Batch
from hps.types import BoolArray, IndexArray, KeyArray, RowArray

# Of streams; a device with fewer levels takes its highest. Changes to the tables run at the lowest, 0, so that lookups continue
# during a warm-up and a refresh.
_HIGHEST_PRIORITY = -5
_MAPPED_BYTES = 1 << 18  # up to this size, fetched vectors are read from pinned host memory: a separate copy costs more
_FEW_MISSES = 1 << 12  # up to this number, misses are read as they came: finding an order that is read faster takes 10 us
_LEAST_SHARE = 1 / 4096  # of missing keys; a smaller expected share counts as none
_STAGED_BYTES = 1 << 27  # of rows of one segment that are copied for admission: from host memory, or after the answer
_ALIGNMENT = 256
_COPY_BYTES = 8 << 20  # of rows that are admitted when their lookup has its answers already
_PATIENCE = 64  # attempts to read a row that the host is writing, before it is left to the host
_STREAM_ORDERED_PATIENCE = 1 << 14  # without the host as a fallback: at least 30 ms
_ADMITTING_BLOCKS = 4  # of an SM, where many misses are admitted in a launch of its own
_LINK_BYTES = 33  # of the lists, per key
_NO_BATCH = Batch((), (), (), ())


class _PackedAnswer(NamedTuple):
    """A launch of `answer`."""

    handle: int
    threads: int
    kind: tuple[tuple[int, ...], int, bool]  # tables, code of the outputs, whether they are row files: of its kernel


def _answer_arguments(segments: int) -> Arguments:
    count = 1 if segments == 1 else kernels.SEGMENTS_AT_ONCE
    return Arguments(count * structs.ANSWER_SEGMENT.size + structs.ANSWER_TAIL.size)


class CupyLookup(StreamOrderedLookup):
    """Looks up rows or bags in the CuPy cache. *One per thread.* Its memory grows to the largest lookup that it served.

    It runs on the caller's stream if all its CUDA tensors name the same one, else on its own stream, which waits for theirs.

    Attributes:
        memory: the tables.
        kernels: the kernels that it launches.
        changes: orders changes to the tables.
        stream: stream of the current lookup.
        missing_positions, rows, distinct: addresses of the lists on the device; see `cuda/unique.cu`. The first lists what the
            host must answer.
        host: mapped memory for keys, outputs, masks and fetched vectors.
        scatter_arguments, insert_arguments: argument structs of those kernels.
    """

    def __init__(
        self,
        memory: TableMemory,
        compiled: LookupKernels,
        changes: Modifications,
        links: Sequence[AttachedTable | None],
    ) -> None:
        super().__init__()
        self.memory = memory
        self.kernels = compiled
        self.changes = changes
        self._change_order = changes.order
        self._attached = links  # by table; the cache attaches and detaches them
        self._links: list[AttachedTable | None] = []  # by table; a snapshot for the current lookup
        self._layouts: list[DeviceLayout | None] = []  # of each segment, while the device reads them
        self._dims = [spec.dim for spec in memory.specs]
        self._plain_rows = all(spec.row_dtype == "float32" for spec in memory.specs)
        self._doing = [f"querying the cached table {spec.tag}" for spec in memory.specs]  # in error messages
        self.reader = TensorReader(memory.device_id)
        self._private = cupy.cuda.Stream(non_blocking=True, priority=_HIGHEST_PRIORITY)
        self._private_stream = int(self._private.ptr)
        self._waits_for: list[int] = []  # caller's streams that the end of the lookup is ordered before
        self._streams: set[int] = set()
        self._host_waits = False  # for a consumer whose stream is unknown
        self._done = cupy.cuda.Event(disable_timing=True)
        self._order = cupy.cuda.Event(disable_timing=True)
        self._missing_share = 0.0  # share of recent lookups' keys: not resident, but in attached tables
        self._unfinished = False  # launched work uses host memory, and the host has not waited for it
        self._busy = 0  # the stream, plus 1, of launched work that uses only device memory; 0 for none
        self._answered = cupy.cuda.Event(disable_timing=True)
        self.stream = self._private_stream
        self._running = False  # a query was launched, and its end not awaited
        self._unread_flags = False  # an enqueued lookup may still set the flags
        self._repeatable = False  # the last lookup left no key for the host, and nothing to be awaited or delivered
        self._batch = _NO_BATCH
        self.placed: Placement = NOTHING  # of a batch of rows; of bags, the rows of their misses
        self._total = self._table_count = 0  # keys, and tables
        self._bags = BagPooling(memory.specs, compiled)
        self._pooled = False  # whether the current lookup has bags

        head = structs.UNIQUE_HEAD.size
        self._queries = Queries(self._dims, compiled)
        defaults = [int(np.float32(spec.default_value).view(np.uint32)) for spec in memory.specs]
        self._settling, self._settling_alone = (Queries(self._dims, compiled, defaults) for _ in range(2))
        self._answer_arguments = {segments: _answer_arguments(segments) for segments in (1, kernels.SEGMENTS_AT_ONCE)}
        self._answer_tails: dict[tuple[int, int, int, bool, bool, bool, bool, int], bytes] = {}  # packed; of the same lists
        self._dependent = DependentLaunch(memory.device_id)
        self._copies = DeviceBuffer()  # _COPY_BYTES
        self._blocks: int = cupy.cuda.Device(memory.device_id).attributes["MultiProcessorCount"]
        self._unique_arguments = Arguments(head + kernels.SEGMENTS_AT_ONCE * structs.UNIQUE_SEGMENT.size)
        self._rank_arguments = Arguments(structs.RANK_SORTED.size)
        self.scatter_arguments = Arguments(structs.SCATTER.size)
        self.insert_arguments = Arguments(structs.TABLE.size + structs.INSERT_TAIL.size)

        tables = len(memory.specs)
        self._fixed = PinnedBuffer()
        self.flags_at, flags = self._fixed.take(16)
        self.flags: np.ndarray = flags.view(np.uint32)  # whether any key: missed, is left; any offset is wrong
        context = int(cupy.cuda.driver.ctxGetCurrent())
        ended_at, ended = self._fixed.take(8)
        ended[:] = 0
        self._ended_at = ended_at
        self._driver = driver_words([driver_function(*names) for names in DRIVER_FUNCTIONS], context, self.flags_at, ended_at)
        self._totals_at, totals = self._fixed.take(8 * tables)
        self._totals: np.ndarray = totals.view(np.uint32).reshape(tables, 2)  # misses and distinct keys of each segment
        self._tallies_at, tallies = self._fixed.take(8 * tables)
        self._tallies: np.ndarray = tallies.view(np.uint32).reshape(tables, 2)  # linked and absent keys of each segment
        self._counts = DeviceBuffer()  # by segment: tallies (2), missing, left, leaders; then the progress of `answer`
        self._device_tallies = self._counts.reserve(count_bytes(tables))
        self.missing_counts, self._left_counts, self._leader_counts, self._progress = (
            self._device_tallies + 4 * tables * nth for nth in (2, 3, 4, 5)
        )

        self._capacity = 0  # keys that fit in the lists
        self._lists = DeviceBuffer()
        self.missing_keys = self.listed_positions = self.rows = self.distinct = 0
        self._listed_keys = self.missing_positions = self._listed_counts = 0  # keys that the host must answer
        self._link_lists = DeviceBuffer()
        self._link_capacity = self._clean_bytes = 0
        self._left_keys = self._leaders = self._ranks = self._in_order = self._left_positions = 0
        self._bins = self._slots = self._states = self._versions = self._epochs = 0
        self._distinct_memory = PinnedBuffer()
        self._distinct_on_host_at = 0
        self._distinct_on_host: np.ndarray = np.empty(0, np.int64)
        self.host = PinnedBuffer()
        self._fetched: list[DeviceBuffer] = []  # for vectors too many to be read from the host
        self._fetched_used = 0  # bytes of the last buffer that were handed out
        self._reserve(LEAST_KEYS)
        self.clear()

    def query(self, batch: Batch) -> int:
        """Copy resident vectors to their rows of `outs`; list the rest. See `CacheLookup.query`."""
        alike = batch.kept or len(batch.sizes) == 1 or batch.kind is self.reader.adopts
        if alike and self._repeatable and not self._change_order.pending:
            queries = self._settling if self.memory.complete else self._queries
            if (flags := self._repeat(batch, queries)) == 0:
                return 0
            answered = flags >= LEFT and queries is self._queries
            return self._query(batch, queries if flags > 0 else None, answered=answered)
        return self._query(batch)

    def _repeat(self, batch: Batch, queries: Queries) -> int:
        """Launch a query that is like an earlier one, and wait for it; where misses are expected, with their answer.

        Returns:
            0: the lookup is complete. Above: the flags that the kernels set. Below: no query is like it, or an error that
            `_query` will meet, too.
        """
        tables = self.memory.tables()
        if batch.kept:
            placed = batch.placement
            repeat = queries.repeat_of(placed)
            stream = UNKNOWN_STREAM if repeat is None else self.reader.stream_of(placed)
        elif len(batch.sizes) == 1:
            table = batch.tables[0]
            repeat = queries.repeat_of_one(table, batch.sizes[0])
            stream = self.reader.repeat_one(repeat, batch, self._dims[table])
        else:
            repeat = queries.repeat_of_tables(batch.tables, batch.sizes, joined=batch.joined)
            stream = UNKNOWN_STREAM if repeat is None else self.reader.repeat_tables(repeat, batch)
        if repeat is None or stream < 0 or (self._busy and self._busy != stream + 1):
            return -1
        answer = UNANSWERED
        if self._missing_share > 0.0 and queries is self._queries:
            found = self._answer_of(repeat, batch)
            if found is None:
                return -1
            answer = found
        if stream != self.stream:
            self.stream, self._streams = stream, {stream}
        self._repeatable, self._running = False, True
        flags: int = launch_and_wait(self._driver, repeat.words, answer, stream)
        del tables  # held until here: `close` may run in another thread
        if flags < 0 or flags >= (1 if answer is UNANSWERED else LEFT):
            return flags  # `_query` goes on, or the next lookup clears what an interruption left
        self.linked = self.absent = ()
        self._busy = 0
        if answer is not UNANSWERED:
            self._layouts, self._busy = [], stream + 1
            if flags:
                self._read_tallies(batch.sizes)
            self._note_share(sum(batch.sizes))
        self._running, self._repeatable = False, True
        return 0

    def _answer_of(self, repeat: Repeat, batch: Batch) -> IndexArray | None:
        """Return the launch that answers the misses of a repeat, whose links and layouts are kept until the next lookup.

        Returns:
            Words of a `RepeatedAnswer`; UNANSWERED if no table is attached; None if more than the outputs would differ.
        """
        links = self._links = list(self._attached)
        self._layouts, of = [], []
        for table in batch.tables:
            link = links[table]
            layout = None if link is None else link.present
            self._layouts.append(layout)
            if link is not None and layout is not None:
                of.append((table, link.where, link.authoritative, link.has_files, layout.where, layout.bins_per_row))
        if not of:
            return UNANSWERED
        # Rows for outputs on the host are delivered from memory that is the current lookup's alone.
        if self._missing_share * sum(batch.sizes) > _FEW_MISSES or (batch.kept and batch.placement.on_host):
            return None
        answer = repeat.answer
        if answer is None or answer.of != of:
            copies = not self._plain_rows or (batch.kept and batch.placement.out_format)  # rows, whose format differs
            if copies or any(link is not None and link.has_files for link in links) or self._link_capacity < self._capacity:
                return None
            answer = repeat.answer = self._pack_repeated(batch, of)
        return answer.words

    @device_call("querying")
    def _pack_repeated(self, batch: Batch, of: object) -> RepeatedAnswer:
        count = len(batch.sizes)
        sizes = batch.sizes if count > 1 else (_FEW_MISSES,)  # of one table, a repeat is for any number of keys
        placed = batch.placement if batch.kept else Placement(batch.tables, sizes, (0,) * count, (0,) * count)
        placed = placed.by_table(self._dims)
        group = [place for place, n in enumerate(placed.sizes) if n]
        arguments, early = _answer_arguments(len(group)), DependentLaunch(self.memory.device_id)
        copies = self._copies.reserve(_COPY_BYTES)
        packed = self._pack_answer(arguments, placed, group, copies=copies, done=self._ended_at)
        early.configure(self._blocks, packed.threads)
        return RepeatedAnswer(packed.handle, arguments, early, 0 if batch.kept else count, self._done.ptr, of)

    @device_call("querying")
    def _query(self, batch: Batch, queried: Queries | None = None, *, answered: bool = False) -> int:
        """Do what `query` does, for any batch.

        Args:
            queried: has run a query of the batch, which set flags.
            answered: the kernel that answers misses has run, too, and left some.
        """
        # One kernel and one wait if all keys are resident. Misses in attached tables take a second kernel, and a second wait if
        # the last lookup had none; keys that are then left take a third of each.
        tables = self.memory.tables()
        self._repeatable = False
        self._links = list(self._attached)
        self.start(batch, queried=queried is not None)
        if self._change_order.pending:
            self._change_order.wait_for_returned(self.stream)
        if self._unread_flags:
            runtime.eventSynchronize(self._done.ptr)
            self.flags[:] = 0
            self._unread_flags = False
        self.linked = self.absent = ()
        self._running = True
        try:
            self.counts = self._answer_bags() if self._pooled else self._answer(queried, answered=answered)
        except CUDA_ERRORS:
            self.clear()
            raise
        self._running = False
        del tables  # held until here: `close` may run in another thread, and frees memory with its last reference
        self._layouts = []
        left = sum(self.counts)
        if not left and (self._pooled or self._unfinished or self.placed.on_host):
            self._deliver()
        on_host = self.host.used or self.placed.on_host
        self._repeatable = not (
            left or self._pooled or on_host or self._unfinished or self._busy or self._waits_for or self._host_waits
        )
        if self._repeatable:  # repeats keep no tensors, so these would stay until another lookup came
            self._batch = _NO_BATCH
            self.reader.start()
        return left

    @device_call("looking up without waiting")
    def enqueue(self, batch: Batch, captured: bool = False) -> None:
        """Launch a complete lookup without waiting. See `StreamOrderedLookup.enqueue`."""
        self.memory.tables()
        self._repeatable = False
        self._links = list(self._attached)
        links = [self._links[table] for table in batch.tables]
        if not all(link is not None and link.authoritative for link in links):
            raise InvalidInputError(
                "looking up without waiting: got a table whose misses the host answers, expected tables that lie in the "
                "in-process hash map alone and that the device reads in place"
            )
        self.start(batch, captured=captured)
        self._refuse_host_tensors("looking up without waiting")
        if not captured:
            if self._change_order.pending:
                self._change_order.wait_for_returned(self.stream)
            for link in links:
                link.keep_layouts()  # type: ignore[union-attr]
                if link.present is None:  # type: ignore[union-attr]
                    raise NotReadyError(
                        "looking up without waiting: a table was dropped, is still being downloaded, or can no longer be read"
                    )
        try:
            if self._pooled:
                self._launch_bags()
            else:
                self._launch_rows()
            if not captured:
                runtime.eventRecord(self._done.ptr, self.stream)
                self._busy = self.stream + 1
                self._unread_flags = True
        except CUDA_ERRORS:
            if not captured:
                self.clear()
            raise

    def _refuse_host_tensors(self, doing: str) -> None:
        if self.host.used or len(self._streams) > 1 or self._host_waits:
            raise InvalidInputError(
                f"{doing}: got keys, outputs or masks in host memory or on several streams, expected all on the device and on "
                "one stream"
            )

    def _launch_rows(self) -> None:
        """Launch a lookup of rows ordered only by the stream; see `enqueue`."""
        if self.memory.complete:
            if self._link_capacity < self._capacity:  # a capture that finds the cache incomplete must not allocate
                self._reserve_link_lists()
            self._settling_alone.launch(self.placed, self.stream)
            return
        self._queries.launch(self.placed, self.stream)
        self.launch_answer(settles=True)

    def _launch_bags(self) -> None:
        """Launch a lookup of bags ordered only by the stream; see `enqueue`."""
        self.launch_pool("pool", settles=True)
        self.placed = self._bags.place_misses([place.n for place in self._bags.placed])
        self._launch_number()
        self.launch_answer(settles=True)
        self.launch_pool("pool_rest", settles=True)

    @device_call("looking up in a graph")
    def enqueue_part(self, batch: Batch, absent_at: int) -> bool:
        """Launch a batch of a `GraphPart`, which this lookup then serves alone.

        Args:
            absent_at: address in mapped memory for the absent keys of each segment, uint32, if the cache is complete.

        Returns:
            Whether `flags[0]` is no failure: a missed key was answered unless `flags[1]` says otherwise.
        """
        self.memory.tables()
        self._links = list(self._attached)
        self.start(batch, captured=True)
        self._refuse_host_tensors("looking up in a graph")
        # Each batch lists its misses from the start, so that the lists have room for all batches of a graph and its replays.
        runtime.memsetAsync(self.missing_counts, 0, 4 * self._table_count, self.stream)
        if self.memory.complete and not self._pooled:
            self._settling.launch(self.placed, self.stream)
            size = 4 * self._table_count
            runtime.memcpyAsync(absent_at, self.missing_counts, size, runtime.memcpyDeviceToHost, self.stream)
            return True
        links = [self._links[table] for table in batch.tables]
        linked = all(link is not None and link.present is not None for link in links)
        for link in links if linked else ():
            link.keep_layouts()  # type: ignore[union-attr]
        if not self._pooled:
            self._queries.launch(self.placed, self.stream)
        else:
            self.launch_pool("pool")
        if not linked:
            return False
        if self._pooled:
            self.placed = self._bags.place_misses([place.n for place in self._bags.placed])
            self._launch_number()
        self.launch_answer(settles=True)
        if self._pooled:
            self.launch_pool("pool_rest")
        return True

    @property
    def has_same_links(self) -> bool:
        """Whether the tables that the last lookup read are still attached."""
        return all(now is then for now, then in zip(self._attached, self._links, strict=True))

    @device_call("ordering a graph after modifications")
    def order(self, stream: int) -> None:
        """Order later work on a stream after the modifications whose calls have returned."""
        self.memory.tables()
        if self._change_order.pending:
            self._change_order.wait_for_returned(stream)

    @device_call("preparing the capture of a lookup")
    def prepare(self, batch: Batch) -> None:
        """Allocate what a captured lookup of this batch needs. See `StreamOrderedLookup.prepare`."""
        self.enqueue(batch)
        runtime.streamSynchronize(self.stream)

    @device_call("finding the distinct missing keys")
    def unique(self) -> Sequence["CupyMissedKeys"]:
        return [
            CupyMissedKeys(self, place, self._distinct_keys(place, count), count)
            for place, count in enumerate(self.counts)
            if count
        ]

    @device_call("delivering outputs")
    def finish(self) -> None:
        """Add missing vectors to their bags, copy outputs to host memory, and order the others before their consumers."""
        self._deliver()

    def _deliver(self) -> None:
        if self._pooled and self._bags.unfinished:
            self._bags.unfinished = False
            self.launch_pool("pool_rest")
            self.record_work()
        batch, on_host = self._batch, self._bags.on_host if self._pooled else self.placed.on_host
        if self._unfinished:
            if on_host or self._host_waits:
                self.synchronise()
            for stream in self._waits_for:
                runtime.eventRecord(self._order.ptr, self.stream)
                runtime.streamWaitEvent(stream, self._order.ptr)
        for place, parts in on_host.items():
            if parts.out is not None and parts.out is not batch.outs[place]:
                np.copyto(batch.outs[place], parts.out)
            if parts.found is not None:
                np.copyto(batch.founds[place], parts.found)  # type: ignore[arg-type]

    def start(self, batch: Batch, *, captured: bool = False, queried: bool = False) -> None:
        """Find the tensors of all segments, and order the lookup after their producers and after the previous lookup.

        Args:
            queried: what runs is the query of this lookup.
        """
        if self._running and not queried:  # an exception interrupted the last one: its kernels may still list misses
            self.clear()
        if self._unfinished:  # running work of the last lookup still uses the memory
            runtime.eventSynchronize(self._done.ptr)
            self._unfinished = False
        if self.host.used:
            self.host.reset()
        self._fetched_used = 0
        self.reader.start()
        self.padding = ()
        self._batch, self._table_count, self._pooled = batch, len(batch.tables), bool(batch.poolings)
        if self._pooled:
            self._total, self.placed = self._bags.place(batch, self.reader, self.host), NOTHING
        else:
            self.placed = self.reader.place(batch, self._dims, self._doing, self.host)
            self._total = sum(batch.sizes)
        streams = self.reader.streams
        if self._host_waits or self._waits_for or streams != self._streams:
            self._choose_stream(streams)
        # The previous lookup may still use the scratch memory on another stream. Nothing is awaited within a capture: the
        # workspace belongs to the graph alone.
        if self._busy and self._busy != self.stream + 1 and not captured:
            runtime.streamWaitEvent(self.stream, self._done.ptr)
            runtime.eventRecord(self._done.ptr, self.stream)
            self._busy = self.stream + 1
        if self._total > self._capacity:
            self._reserve(self._total)
        if self._pooled:
            self._bags.reserve_lists()

    def _answer(self, queried: Queries | None, *, answered: bool) -> list[int]:
        """Answer keys from the cache and attached tables; return the number of keys left in each segment.

        Args:
            queried, answered: see `_query`.
        """
        # If recent lookups missed keys that attached tables had, both kernels are launched at once, which saves a round trip.
        # Otherwise the kernel for misses follows only after a miss, so that lookups of resident keys cost the same with and
        # without attached tables.
        if queried is self._settling or (queried is None and self.memory.complete):
            if self._settle(settled=queried is not None):
                return [0] * self._table_count
            queried = None
        if queried is None:
            self._queries.launch(self.placed, self.stream)
        attached = launched = answered or (self._missing_share > 0.0 and self._find_layouts(self._batch))
        defers = launched and not answered and self._missing_share * self._total > _FEW_MISSES
        if launched and not answered:
            self.launch_answer(defers=defers)
        if defers:
            runtime.eventSynchronize(self._answered.ptr)  # the admission after it goes on while the host delivers
        else:
            runtime.streamSynchronize(self.stream)  # not through `synchronise`, likewise
            self._unfinished, self._busy = False, 0
        counts = [0] * self._table_count
        if self.flags[0]:
            attached = attached or self._find_layouts(self._batch)
            counts = self._answer_misses(attached=attached, answered=launched)
            self.flags[:2] = 0
        if attached:
            self._note_share(self._total)
        return counts

    def _note_share(self, total: int) -> None:
        """Note how many of a lookup's keys were missing, but in attached tables."""
        # The share falls by 8 a lookup, so one lookup without misses does not end the launch of both kernels.
        share, before = (sum(self.linked) + sum(self.absent)) / max(total, 1), self._missing_share / 8
        self._missing_share = max(share, before if before > _LEAST_SHARE else 0.0)

    def _read_tallies(self, sizes: Sequence[int]) -> None:
        """Read what the kernel that answers misses has counted. It reports nothing of segments without keys."""
        tallies = [tally if n else (0, 0) for tally, n in zip(self._tallies[: len(sizes)].tolist(), sizes, strict=True)]
        self.linked, self.absent = [linked for linked, _ in tallies], [absent for _, absent in tallies]

    def _settle(self, *, settled: bool) -> bool:
        """Answer all keys by one kernel, since every row is resident; return False if one could not be read.

        Args:
            settled: the kernel has run.
        """
        if not settled:
            self._settling.launch(self.placed, self.stream)
            runtime.streamSynchronize(self.stream)
            self._unfinished, self._busy = False, 0
        if not (self.flags[0] or self.flags[1]):
            return True
        unread = bool(self.flags[1])
        if not unread:
            self.absent = self._counts_at(self.missing_counts)
        runtime.memsetAsync(self.missing_counts, 0, 4 * self._table_count, self.stream)
        runtime.streamSynchronize(self.stream)
        self.flags[:2] = 0
        return not unread

    def _answer_bags(self) -> list[int]:
        """Add up resident vectors, and find those of the rest; return the number of keys left in each segment."""
        bags = self._bags
        self.flags[2] = 0
        if bags.padded:
            runtime.memsetAsync(bags.paddings_at, 0, 4 * len(bags.placed), self.stream)
        self.launch_pool("pool")
        self.synchronise()
        if bags.padded:
            self.padding = self._counts_at(bags.paddings_at)
        missed, _left, wrong, _ = self.flags.tolist()
        if wrong:
            self.clear()
            raise InvalidInputError(
                "looking up bags: got offsets on the device that do not begin with 0, fall, or do not end with the number of "
                "keys; the outputs are unspecified"
            )
        if not missed:
            return [0] * self._table_count
        self.placed = bags.place_misses(self._counts_at(self.missing_counts))
        self._launch_number()
        counts = self._answer_misses(attached=self._find_layouts(self._batch), answered=False)
        self.flags[:2] = 0
        return counts

    def _counts_at(self, address: int) -> list[int]:
        counts = np.empty(self._table_count, np.uint32)
        copy_to_host(counts, address, self.stream)
        found: list[int] = counts.tolist()
        return found

    def _launch_number(self) -> None:
        self._bags.clear_entries(self.stream)
        self.launch_pool("number")

    def launch_pool(self, name: str, settles: bool = False) -> None:
        """Launch one of the kernels of `cuda/pool.cu` for all bags.

        Args:
            settles: the host does not wait: count wrong offsets in the links.
        """
        misses = (self.missing_keys, self.listed_positions, self.missing_counts)
        unread = [self._unread_of(place.table) if settles else 0 for place in self._bags.placed]
        self._bags.launch(name, self.stream, misses, self.flags_at, unread)

    def _answer_misses(self, *, attached: bool, answered: bool) -> list[int]:
        """Answer misses from attached tables; return the number of keys left in each segment.

        Args:
            attached: a segment has an attached table.
            answered: the kernel that answers misses ran with the query.
        """
        if attached:
            if not answered:
                self.launch_answer()
                self.synchronise()
            self._read_tallies(self.placed.sizes)
            if not self.flags[1]:
                return [0] * self._table_count
            self._listed_keys, self.missing_positions = self._left_keys, self._left_positions
            self._listed_counts = self._left_counts
        else:
            self._listed_keys, self.missing_positions = self.missing_keys, self.listed_positions
            self._listed_counts = self.missing_counts
        self._launch_unique()
        self.synchronise()
        counts: list[int] = self._totals[: self._table_count, 0].tolist()
        return counts

    def _find_layouts(self, batch: Batch) -> bool:
        """Keep the layouts of the segments' attached tables alive; return whether there are any."""
        if not any(self._links):
            return False
        links = [self._links[table] for table in batch.tables]
        self._layouts = [None if link is None else link.present for link in links]
        return any(self._layouts)

    def _unread_of(self, table: int) -> int:
        link = self._links[table]
        return 0 if link is None else link.unread_at

    def launch_query(self) -> None:
        """Launch the query of rows: of a complete cache the one that answers misses, too."""
        queries = self._settling_alone if self.memory.complete else self._queries
        queries.launch(self.placed, self.stream)

    def launch_answer(self, *, settles: bool = False, defers: bool = False) -> None:
        """Launch the kernel that answers misses from attached tables: one for every SEGMENTS_AT_ONCE segments.

        Args:
            settles: the host does not wait: give keys that no table has the default vector.
            defers: admit many misses in a kernel of its own, after the event `_answered`, from a copy of their vectors.
        """
        if self._link_capacity < self._capacity:
            self._reserve_link_lists()
        self.placed = placed = self.placed.by_table(self._dims)
        nonempty = [place for place, n in enumerate(placed.sizes) if n]
        for start in range(0, len(nonempty), kernels.SEGMENTS_AT_ONCE):
            self._launch_answer_of(nonempty[start : start + kernels.SEGMENTS_AT_ONCE], settles=settles, defers=defers)
        if defers:
            runtime.eventRecord(self._done.ptr, self.stream)
            self._busy = self.stream + 1

    def _launch_answer_of(self, group: Sequence[int], *, settles: bool, defers: bool) -> None:
        arguments = self._answer_arguments[1 if len(group) == 1 else kernels.SEGMENTS_AT_ONCE]
        packed = self._pack_answer(arguments, self.placed, group, settles=settles, defers=defers)
        self._dependent.launch(packed.handle, self._blocks, packed.threads, arguments, self.stream)
        if defers:
            runtime.eventRecord(self._answered.ptr, self.stream)
            handle, *_ = self.kernels.answer_of("admit_answers", *packed.kind)
            launch(handle, _ADMITTING_BLOCKS * self._blocks, packed.threads, arguments, self.stream)

    def _pack_answer(
        self,
        arguments: Arguments,
        placed: Placement,
        group: Sequence[int],
        *,
        settles: bool = False,
        defers: bool = False,
        copies: int = 0,
        done: int = 0,
    ) -> _PackedAnswer:
        """Pack the kernel that answers misses of up to SEGMENTS_AT_ONCE segments from the tables of `_links`.

        Args:
            copies: address of _COPY_BYTES for rows to be admitted from; 0 for none.
            done: where the kernel writes its number once all is answered; 0 for nowhere.
        """
        specs, packed_tables = self.memory.specs, self.kernels.structs
        tables = tuple([placed.tables[place] for place in group])
        outputs = kernels.outputs_code(reduce(or_, [placed.outs[place] for place in group]), placed.out_format)
        files = any(link is not None and link.has_files for link in self._links)
        handle, shape, threads = self.kernels.answer_of("answer", tables, outputs, files)
        by_parts = kernels.by_parts(shape)
        buffer, pack, offset, used, dense = arguments.bytes, structs.ANSWER_SEGMENT.pack_into, 0, 0, True
        for index, table in zip(group, tables, strict=True):
            n, out, missing = placed.sizes[index], placed.outs[index], placed.starts[index]
            found = placed.founds[index] if placed.founds else 0
            link, rows, spec = self._links[table], self.kernels.rows[table], specs[table]
            where = link_at = authoritative = staged = staged_rows = 0
            bins_per_row = 0.0
            if link is not None:
                layout = link.present if settles else self._layouts[index]
                where = link.where if settles else layout.where if layout is not None else 0
                bins_per_row = layout.bins_per_row if layout is not None else 0.0
                if where:
                    dense = dense and bins_per_row > 0
                    link_at, authoritative = link.where, link.authoritative
                    if by_parts or defers or (index in placed.on_host and placed.on_host[index].out is not None):
                        row_bytes = 4 * kernels.staged_words(shape, rows)
                        staged_rows = min(n, _STAGED_BYTES // row_bytes)
                        staged = self.device_space(row_bytes * staged_rows)
                    elif copies:
                        staged, staged_rows = copies + used, min(n, (_COPY_BYTES - used) // (4 * spec.dim))
                        used += -(-4 * spec.dim * staged_rows // _ALIGNMENT) * _ALIGNMENT
            answer = (where, link_at, out, found, staged, missing, index, shape.units(rows), staged_rows, spec.default_value)
            pack(buffer, offset, *packed_tables[table], *answer, authoritative, bins_per_row)
            offset += structs.ANSWER_SEGMENT.size
        kind_of_tail = (len(group), shape.most_words, threads, settles, defers, files, dense, done)
        tail = self._answer_tails.get(kind_of_tail)
        if tail is None:
            warps = kernels.fetch_warps(shape.most_words, self._blocks, threads, dense=dense)
            tail = self._answer_tails[kind_of_tail] = structs.ANSWER_TAIL.named(
                missing_keys=self.missing_keys,
                missing_positions=self.listed_positions,
                missing_counts=self.missing_counts,
                leaders=self._leaders,
                ranks=self._ranks,
                order=self._in_order,
                states=self._states,
                left_keys=self._left_keys,
                left_positions=self._left_positions,
                left_counts=self._left_counts,
                slots=self._slots,
                bins=self._bins,
                leader_counts=self._leader_counts,
                tallies=self._device_tallies,
                progress=self._progress,
                epochs=self._epochs,
                versions=self._versions,
                versions_after=self._versions + 8 * kernels.STRIPES * kernels.SEGMENTS_AT_ONCE,
                any_left=self.flags_at + 4,
                reports=self._tallies_at,
                done=done,
                number=0,
                bin_bits=kernels.bin_bits(len(group)),
                segment_count=len(group),
                patience=_STREAM_ORDERED_PATIENCE if settles else _PATIENCE,
                few=_FEW_MISSES,
                fetch_warps=warps | (kernels.many_fetch_warps(warps, threads) << 16 if files else 0),
                settles=settles,
                defers=defers,
                slot_bits=self._link_capacity.bit_length(),
            )
        buffer[-len(tail) :] = tail
        return _PackedAnswer(handle, threads, (tables, outputs, files))

    def record_work(self) -> None:
        """Record that work was launched without a wait."""
        runtime.eventRecord(self._done.ptr, self.stream)
        self._unfinished = True

    def device_space(self, size_bytes: int) -> int:
        """Hand out device memory until the next query."""
        start = -(-self._fetched_used // 256) * 256
        if not self._fetched or start + size_bytes > self._fetched[-1].size_bytes:
            if start == 0:
                self._fetched.clear()  # nothing was handed out
            self._fetched.append(DeviceBuffer())
            self._fetched[-1].reserve(size_bytes)
            start = 0
        self._fetched_used = start + size_bytes
        return self._fetched[-1].pointer + start

    def _launch_unique(self) -> None:
        """Launch the kernel that makes the misses of all segments distinct and counts them."""
        self.placed, arguments = self.placed.by_table(self._dims), self._unique_arguments
        starts = self.placed.starts
        arguments.pack(
            structs.UNIQUE_HEAD,
            0,
            self._listed_keys,
            self._listed_counts,
            self.rows,
            self.distinct,
            self._distinct_on_host_at,
            self._totals_at,
        )
        for start in range(0, len(starts), kernels.SEGMENTS_AT_ONCE):
            group = starts[start : start + kernels.SEGMENTS_AT_ONCE]
            for nth, missing in enumerate(group):
                offset = structs.UNIQUE_HEAD.size + nth * structs.UNIQUE_SEGMENT.size
                arguments.pack(structs.UNIQUE_SEGMENT, offset, missing, start + nth)
            launch(self.kernels.handle(kernels.UNIQUE), len(group), kernels.UNIQUE_THREADS, arguments, self.stream)

    def _distinct_keys(self, place: int, misses: int) -> KeyArray:
        """Return the distinct missing keys of one table, as the kernel `unique` found them."""
        count, start = int(self._totals[place, 1]), self.placed.starts[place]
        if count == kernels.TOO_MANY:
            count = self._sort(place, start, misses)
        keys: KeyArray = self._distinct_on_host[start : start + count].copy()
        return keys

    def _sort(self, place: int, start: int, misses: int) -> int:
        """Sort many misses, as the unique kernel does for few."""
        with stream_of(self.stream):
            at, memory = self._listed_keys + 8 * start, cupy.cuda.UnownedMemory
            keys = cupy.cuda.MemoryPointer(memory(at, 8 * misses, self), 0)
            order = cupy.argsort(cupy.ndarray((misses,), np.int64, keys)).astype(np.int64, copy=False)
        blocks = kernels.sorted_blocks(misses)
        heads = self.device_space(4 * blocks)
        self._rank_arguments.pack(
            structs.RANK_SORTED,
            0,
            at,
            int(order.data.ptr),
            heads,
            self.rows + 4 * start,
            self.distinct + 8 * start,
            self._totals_at + 8 * place + 4,
            misses,
        )
        for kernel in (kernels.MARK_HEADS, kernels.RANK_SORTED_KERNEL):
            launch(self.kernels.handle(kernel), blocks, kernels.UNIQUE_THREADS, self._rank_arguments, self.stream)
        self.synchronise()
        count = int(self._totals[place, 1])
        copy_to_host(self._distinct_on_host[start : start + count], self.distinct + 8 * start, self.stream)
        return count

    def synchronise(self) -> None:
        runtime.streamSynchronize(self.stream)
        self._unfinished, self._busy = False, 0

    def clear(self) -> None:
        """Reset the miss counts after a query that ended early, whose kernels may still be queued."""
        runtime.streamSynchronize(self.stream)
        runtime.memset(self._device_tallies, 0, count_bytes(len(self.memory.specs)))
        if self._link_capacity:
            runtime.memset(self._bins, 0, self._clean_bytes)
        runtime.streamSynchronize(0)  # no other stream waits for it
        self.flags[:] = 0
        self._running = False

    def _choose_stream(self, streams: set[int]) -> None:
        self._streams = streams
        self._host_waits = UNKNOWN_STREAM in streams
        if len(streams) == 1 and not self._host_waits:
            (self.stream,) = streams
            self._waits_for = []
            return
        self.stream = self._private_stream
        self._waits_for = [stream for stream in streams if stream != UNKNOWN_STREAM]
        # Producers of an unknown stream were ordered before the legacy default stream by DLPack (`adopt` passes that one).
        for stream in streams:
            runtime.eventRecord(self._order.ptr, 0 if stream == UNKNOWN_STREAM else stream)
            runtime.streamWaitEvent(self.stream, self._order.ptr)

    def _reserve(self, keys: int) -> None:
        """Allocate lists for that many misses. Their content is lost."""
        keys = 1 << (keys - 1).bit_length()
        self._capacity = 0  # if the allocation fails, the memory freed below is not used again
        start = self._lists.reserve(list_bytes(keys))
        self.missing_keys, self.distinct = start, start + 8 * keys
        self.listed_positions, self.rows = start + 16 * keys, start + 20 * keys
        self._distinct_memory = PinnedBuffer()
        self._distinct_on_host_at, distinct = self._distinct_memory.take(8 * keys)
        self._distinct_on_host = distinct.view(np.int64)
        self._queries.use(self.missing_keys, self.listed_positions, self.missing_counts, self.flags_at, capacity=keys)
        self._settling.use(0, 0, self.missing_counts, self.flags_at, capacity=keys)
        self._settling_alone.use(0, 0, 0, 0, capacity=keys)
        self._answer_tails.clear()
        self._capacity = keys

    def _reserve_link_lists(self) -> None:
        """Allocate the lists of `cuda/answer.cu`, for as many keys as the other lists."""
        keys, self._link_capacity = self._capacity, 0
        versions = 2 * 8 * kernels.STRIPES * kernels.SEGMENTS_AT_ONCE
        start = self._link_lists.reserve(_LINK_BYTES * keys + 4 * kernels.MOST_BINS + versions + 8 * kernels.SEGMENTS_AT_ONCE)
        self._versions, self._epochs = start, start + versions
        start += versions + 8 * kernels.SEGMENTS_AT_ONCE
        self._left_keys = start
        start += 8 * keys
        self._leaders, self._ranks, self._in_order, self._left_positions = (start + 4 * keys * nth for nth in range(4))
        start += 16 * keys
        self._bins, self._slots = start, start + 4 * kernels.MOST_BINS
        self._clean_bytes = 4 * kernels.MOST_BINS + 8 * keys  # `answer` leaves them 0
        self._states = start + self._clean_bytes
        self._answer_tails.clear()
        runtime.memsetAsync(self._bins, 0, self._clean_bytes, self.stream)
        self._link_capacity = keys


class CupyMissedKeys(MissedKeys):
    __slots__ = ("_found", "_lookup", "_misses", "_place", "_staged", "_start", "_vectors", "memory")

    def __init__(self, lookup: CupyLookup, place: int, keys: KeyArray, misses: int) -> None:
        self.table = lookup.placed.tables[place]
        self.keys = keys
        self.memory = lookup.memory
        self._lookup = lookup
        self._place = place  # of the table in the batch
        self._start = lookup.placed.starts[place]  # of its misses in the lists
        self._misses = misses  # with duplicates
        self._vectors = 0  # address of the fetched vectors, on the device or in mapped memory
        self._staged = 0  # source of the copy; 0 if they are read in place
        self._found = 0  # address of the mask of fetched vectors; 0 until it is known, and if nothing was fetched

    @device_call("allocating a fetch buffer")
    def buffer(self) -> RowArray:
        """Return pinned memory for the rows of `keys`: (u, width); content unspecified."""
        lookup, width = self._lookup, self.memory.specs[self.table].width
        size = 4 * self.keys.size * width
        pointer, pinned = lookup.host.take(size)
        self._vectors, self._staged = pointer, 0
        if size > _MAPPED_BYTES:
            self._vectors, self._staged = lookup.device_space(size), pointer
        buffer: RowArray = pinned.view(np.float32).reshape(-1, width)
        return buffer

    @device_call("copying fetched vectors")
    def stage(self, start: int, stop: int) -> None:
        """Start to copy rows [start, stop) of the buffer to the device if they are too many to be read in place."""
        if self._staged and stop > start:
            row = 4 * self.memory.specs[self.table].width
            size, stream = (stop - start) * row, self._lookup.stream
            copy_to_device(self._vectors + start * row, self._staged + start * row, size, stream)
            self._lookup.record_work()

    @device_call("scattering fetched vectors")
    def scatter(self, found: BoolArray) -> None:
        self._place_mask(found)
        lookup, placed, table = self._lookup, self._lookup.placed, self.memory.specs[self.table]
        rows, out = lookup.kernels.rows[self.table], placed.outs[self._place]
        shape = Shape.of([rows], kernels.outputs_code(out, placed.out_format))
        lookup.scatter_arguments.pack(
            structs.SCATTER,
            0,
            lookup.missing_positions + 4 * self._start,
            lookup.rows + 4 * self._start,
            self._found,
            self._vectors,
            out,
            placed.founds[self._place] if placed.founds else 0,
            self._misses,
            shape.units(rows),
            table.default_value,
        )
        blocks = kernels.tile_blocks(self._misses)
        launch(lookup.kernels.scatter(shape), blocks, kernels.THREADS, lookup.scatter_arguments, lookup.stream)
        lookup.record_work()

    @device_call("counting absent keys")
    def absent(self, found: BoolArray) -> int:
        """Return the number of missing positions whose key is not `found`. See `MissedKeys.absent`."""
        # The host knows it if each key occurs once, or none is found; else it reads the key of each position from the device.
        distinct = found.size - int(np.count_nonzero(found))
        if distinct in (0, found.size) or found.size == self._misses:
            return self._misses if distinct == found.size else distinct
        keys_at = np.empty(self._misses, np.uint32)
        copy_to_host(keys_at, self._lookup.rows + 4 * self._start, self._lookup.stream)
        return self._misses - int(np.count_nonzero(found[keys_at]))

    @device_call("inserting fetched vectors")
    def insert(self, found: BoolArray) -> None:
        lookup, table = self._lookup, self.memory.tables()[self.table]
        self._place_mask(found)
        if not self._found or not table.pairs or self.memory.static:
            return
        keys = lookup.distinct + 8 * self._start
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
        lookup.record_work()

    def _place_mask(self, found: BoolArray) -> None:
        if self._vectors and not self._found and found.any():
            self._found, pinned = self._lookup.host.take(found.size)
            np.copyto(pinned.view(np.bool_), found)
