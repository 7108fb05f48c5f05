"""The hot path: the lookups of one model on one device."""

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from time import perf_counter_ns
from typing import Protocol

import numpy as np
from prometheus_client import Counter

from hps.background import BackgroundQueue
from hps.cache.base import CacheLookup, EmbeddingCache, LookupGraph, MissedKeys
from hps.errors import InvalidInputError, NotReadyError, TooManyKeysError, WorkspaceTimeoutError
from hps.lookup.chain import DatabaseChain
from hps.lookup.coalescing import FetchCoalescer
from hps.lookup.unwaited import UnwaitedLookups
from hps.metrics import LookupTimes, Metrics
from hps.numba_kernels import compile_kernels
from hps.open_calls import OpenCalls
from hps.tensors.bags import Pooling
from hps.tensors.pooling import bag_arrays, counted_positions, pool_rows
from hps.tensors.segments import Segment
from hps.tracing import LookupTrace, Span, current, ended
from hps.types import BoolArray, FloatArray, IndexArray, KeyArray, TableSpec

_PREFETCH_ROWS = 65_536  # vectors fetched at once, so that their memory is bounded
_POOLED_BYTES = 8 << 20  # likewise of vectors that are fetched to be pooled
_AS_THEY_COME: IndexArray = np.empty(0, np.int64)


class Session(Protocol):
    """What answers the lookups of one model on one device. *Thread-safe.*"""

    @property
    def tables(self) -> tuple[TableSpec, ...]:
        """The model's tables, in the order of their ids."""

    @property
    def cache(self) -> EmbeddingCache | None:
        """The embedding cache of the device; None where lookups go to the databases directly."""

    @property
    def on_cuda(self) -> bool:
        """Whether keys and outputs may be in CUDA memory."""

    @property
    def busy(self) -> int:
        """Keys of the lookups that run or wait for a workspace; 0 where the model has no other session to choose."""

    @property
    def workspaces(self) -> tuple[int, int]:
        """How many lookups may run at once, and how many do; (0, 0) where that is not bounded."""

    @property
    def miss_paths(self) -> Sequence[str]:
        """By table, what answers a miss of the cache that host memory has: `link` or `copy`; empty without a cache."""

    def lookup(self, segments: Sequence[Segment], began_ns: int = 0) -> None:
        """Write the vector of every key to its row of `out`, and `found` where it is given.

        Args:
            segments: at most one for each table, made by `hps.tensors.segments`.
            began_ns: when the caller began to make them, by `time.perf_counter_ns`; 0: now.

        Raises:
            TooManyKeysError: a segment has more keys than the table's `max_keys`.
            WorkspaceTimeoutError: as many lookups as there are workspaces were running, until the timeout.
            NotReadyError: the session is closed.
            DatabaseError: keys are missing and the authoritative database did not answer; `out` is then unspecified.
        """

    def enqueue(self, segments: Sequence[Segment]) -> None:
        """Leave a lookup on the stream of its tensors, which may be captured in a CUDA graph, and wait for nothing.

        Raises:
            InvalidInputError: a table of the lookup is not read by the device in place as the authority, or a tensor is not on
                the device; nothing was launched. Or nothing stands by for a capture: see `UnwaitedLookups`.
            DatabaseError: keys of an earlier such lookup could not be read; nothing was launched.
            TooManyKeysError, WorkspaceTimeoutError, NotReadyError: as `lookup`.
        """

    def record(self, segments: Sequence[Segment]) -> "RecordedLookup":
        """Capture such a lookup of fixed tensors; it runs once meanwhile. Raises as `enqueue` does."""

    def prefetch(self, table: int, keys: KeyArray) -> int:
        """Make keys resident, without an answer. Where there is no cache, they are promoted.

        Args:
            keys: (n,) int64, distinct.

        Returns:
            How many of them some tier has.

        Raises:
            DatabaseError: as `lookup`; some keys may have become resident.
        """

    def resident(self, table: int, key: KeyArray, out: FloatArray) -> bool:
        """Whether a key, (1,) int64, is in the embedding cache; its vector then goes to `out`. Nothing is fetched or counted.

        Raises:
            WorkspaceTimeoutError, NotReadyError: as `lookup`.
        """

    def drain(self, timeout_s: float) -> bool:
        """Wait for queued insertions; False when the timeout comes first."""

    def close(self, timeout_s: float = 10.0) -> bool:
        """Refuse new lookups, let running ones and queued insertions end, and free the cache.

        Returns:
            False when lookups still run after `timeout_s`: they keep the cache, and `close` may be called again.
        """


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """How a session behaves; from the model's configuration. Immutable.

    Attributes:
        hit_rate_threshold: a table whose hit rate in a lookup is at or above it is answered at once, with defaults for
            its missing keys, which are fetched in the background. Above 1, every lookup is complete.
        workspaces: how many lookups may run at once.
        workspace_timeout_s: how long a lookup waits for one of them to end.
        insert_queue_length: batches of missing keys that may wait for background insertion.
        one_of_several: the model has sessions on other devices, too, among which a lookup may choose.
        unwaitable: by table, why a lookup cannot be left to the device alone; empty where every table can.
        miss_paths: by table, see `Session.miss_paths`.
    """

    hit_rate_threshold: float = 0.9
    workspaces: int = 1
    workspace_timeout_s: float = 1.0
    insert_queue_length: int = 64
    one_of_several: bool = False
    unwaitable: Mapping[int, str] = field(default_factory=dict)
    miss_paths: Sequence[str] = ()


class RecordedLookup:
    """A lookup of fixed tensors as a CUDA graph, which counts itself. *One per thread.*"""

    def __init__(self, graph: LookupGraph, segments: Sequence[Segment], unwaited: UnwaitedLookups) -> None:
        self._graph = graph
        self._segments = segments
        self._unwaited = unwaited

    def launch(self) -> None:
        """Launch it on the stream that the keys' framework works on now.

        Raises:
            DatabaseError: keys of an earlier launch could not be read.
        """
        self._unwaited.check(self._segments)
        self._graph.launch()
        self._unwaited.count(self._segments)

    def close(self) -> None:
        """Free the graph. Closing twice changes nothing."""
        self._graph.close()


class CachedSession:
    """Answers lookups from the embedding cache, then the databases, then the default vector. *Thread-safe.*

    Args:
        tables: the model's tables, in the order of their ids.
        cache: of this model and device.
        chain: the host tiers.
        coalescer: shared by all sessions of the chain.
    """

    def __init__(
        self,
        tables: Sequence[TableSpec],
        cache: EmbeddingCache,
        chain: DatabaseChain,
        coalescer: FetchCoalescer,
        settings: SessionSettings,
        metrics: Metrics,
    ) -> None:
        self.tables = tuple(tables)
        self.cache = cache
        self.on_cuda = cache.device == "cuda"
        self._chain = chain
        self._coalescer = coalescer
        self._threshold = settings.hit_rate_threshold
        self.miss_paths = settings.miss_paths
        self._metrics = metrics
        self._max_keys = [table.max_keys for table in self.tables]
        model = self.tables[0].model_name
        self._counters = [metrics.table(table.model_name, table.table_name) for table in self.tables]
        self._device = metrics.device(model, cache.device_id if self.on_cuda else None)
        self._under_way: dict[int, int] | None = {} if settings.one_of_several else None  # keys of each thread's lookup
        self._times = metrics.lookup_times(model)
        self._recent = self._times.recent
        self._lookups = _LookupPool(
            cache.create_lookup,
            settings.workspaces,
            settings.workspace_timeout_s,
            f"model {model!r} on device {cache.device_id}",
            metrics.workspace_timeouts.labels(model),
        )
        self._inserts = BackgroundQueue("insertion", settings.insert_queue_length, 1, metrics)
        self._inserts.end_with(self)
        self._unwaited = UnwaitedLookups(self.tables, cache, settings.unwaitable, metrics)
        self._pending_lock = threading.Lock()
        self._pending = [np.empty(0, np.int64) for _ in self.tables]  # ascending: queued or being inserted

    @property
    def busy(self) -> int:
        """Keys of the lookups that run or wait. See `Session.busy`."""
        return sum(self._under_way.values()) if self._under_way else 0

    @property
    def workspaces(self) -> tuple[int, int]:
        """How many lookups may run at once, and how many do."""
        return self._lookups.size, self._lookups.busy

    def lookup(self, segments: Sequence[Segment], began_ns: int = 0) -> None:
        """Write the vector of every key to its row of `out`. See `Session.lookup`."""
        start = perf_counter_ns()
        _refuse_too_many_keys(self.tables, self._max_keys, segments)
        under_way = self._under_way
        if under_way is not None:  # single operations of a dict are atomic: this needs no lock, and drifts never
            under_way[threading.get_ident()] = sum([segment.n for segment in segments])
        stages: dict[str, int] | None = None
        try:
            lookup = self._lookups.take()
            try:
                taken = perf_counter_ns()
                missing = lookup.query(segments)
                queried = answered = perf_counter_ns()
                counts = lookup.counts if missing else None
                linked, absent, padding = lookup.linked, lookup.absent, lookup.padding
                if counts:
                    current.stages = stages = {}
                    self._answer_misses(lookup, segments, counts)
                    answered = perf_counter_ns()
                lookup.finish()
            finally:
                if stages is not None:
                    current.stages = None
                self._lookups.give_back(lookup)
        finally:
            if under_way is not None:
                del under_way[threading.get_ident()]
        end = perf_counter_ns()
        began = began_ns or start
        times = (end - began, start - began, taken - start, queried - taken, end - answered)
        self._count(segments, counts, padding, times, stages)
        if linked or absent:
            self._count_linked(segments, linked, absent)
        if (trace := current.trace) is not None:
            n = sum([segment.n for segment in segments])
            spans = (("adopt", began, start), ("wait", start, taken), ("query", taken, queried), ("finish", answered, end))
            trace.spans += [Span(stage, "", first, last, n) for stage, first, last in spans]
            if counts:
                trace.spans.sort(key=attrgetter("ended_ns"))
            self._trace(trace, segments, counts, linked, absent, padding)

    def enqueue(self, segments: Sequence[Segment]) -> None:
        """Leave a lookup on the stream of its tensors. See `Session.enqueue`."""
        _refuse_too_many_keys(self.tables, self._max_keys, segments)
        self._unwaited.check(segments)
        began = perf_counter_ns()
        self._enqueue(segments)
        if (trace := current.trace) is not None:  # the device has yet to do it: what answered is not known here
            trace.spans.append(Span("query", "", began, perf_counter_ns(), sum([segment.n for segment in segments])))
            for segment in segments:
                trace.of(self.tables[segment.table].table_name).keys += segment.n

    def _enqueue(self, segments: Sequence[Segment]) -> None:
        self._unwaited.enqueue(segments, self._lookups.take, self._lookups.give_back)

    def record(self, segments: Sequence[Segment]) -> RecordedLookup:
        """Capture a lookup of fixed tensors. See `Session.record`."""
        _refuse_too_many_keys(self.tables, self._max_keys, segments)
        self._unwaited.check(segments)
        return RecordedLookup(self.cache.record(segments, self._enqueue), segments, self._unwaited)

    def prefetch(self, table: int, keys: KeyArray) -> int:
        """Make keys resident. See `Session.prefetch`."""
        starts = range(0, keys.size, _PREFETCH_ROWS)
        return sum(int(np.count_nonzero(self._fill(table, keys[start : start + _PREFETCH_ROWS]))) for start in starts)

    def resident(self, table: int, key: KeyArray, out: FloatArray) -> bool:
        """Whether a key is in the embedding cache. See `Session.resident`."""
        found = np.zeros(1, np.bool_)
        lookup = self._lookups.take()
        try:
            lookup.query([Segment(table, key, out, found)])
            elsewhere = any(lookup.linked)  # it was not resident until now
            lookup.finish()
        finally:
            self._lookups.give_back(lookup)
        return bool(found[0]) and not elsewhere

    def drain(self, timeout_s: float) -> bool:
        """Wait for queued insertions; False when the timeout comes first."""
        return self._inserts.drain(timeout_s)

    def close(self, timeout_s: float = 10.0) -> bool:
        """Refuse new lookups, let running ones and queued insertions end, and free the cache. See `Session.close`."""
        if not (self._lookups.close(timeout_s) and self._unwaited.close()):
            return False
        self._inserts.close()
        self.cache.close()
        return True

    def _answer_misses(self, lookup: CacheLookup, segments: Sequence[Segment], counts: Sequence[int]) -> None:
        padding = lookup.padding or [0] * len(segments)
        deferred = {
            segment.table
            for segment, missing, left_out in zip(segments, counts, padding, strict=True)
            if missing and 1.0 - missing / (segment.n - left_out) >= self._threshold
        }
        began = perf_counter_ns()
        every = lookup.unique()
        ended("unique", "", began, sum(counts))
        by_table = {segment.table: missing for segment, missing in zip(segments, counts, strict=True)}
        for missed in every:
            if missed.segment.table in deferred:
                began = perf_counter_ns()
                missed.scatter(np.zeros(missed.keys.size, np.bool_))
                ended("scatter", self.tables[missed.segment.table].table_name, began, missed.keys.size)
                self._insert_later(missed.segment.table, missed.keys, by_table[missed.segment.table])
            else:
                self._fetch_now(missed)
        if deferred:
            with self._metrics.lock:
                for segment, missing in zip(segments, counts, strict=True):
                    if segment.table in deferred:
                        self._counters[segment.table].deferred += missing
            if (trace := current.trace) is not None:
                for segment, missing in zip(segments, counts, strict=True):
                    if segment.table in deferred:
                        trace.of(self.tables[segment.table].table_name).deferred += missing

    def _fetch_now(self, missed: MissedKeys) -> None:
        table, keys = self.tables[missed.segment.table], missed.keys
        fence = self._chain.fence(table)
        token = fence.token()
        buffer = missed.buffer()
        found = np.zeros(keys.size, np.bool_)
        self._coalescer.fetch(table, fence, keys, buffer, found, missed.stage)
        began = perf_counter_ns()
        absent = 0 if found.all() else missed.absent(found)
        missed.scatter(found)
        began = ended("scatter", table.table_name, began, keys.size)
        with fence.filling(token) as allowed:
            if allowed:
                missed.insert(found)
        ended("insert", table.table_name, began, keys.size)
        if absent:
            self._count_defaults(missed.segment.table, absent)
            if (trace := current.trace) is not None:
                trace.of(table.table_name).defaults += absent

    def _insert_later(self, table_index: int, keys: KeyArray, positions: int) -> None:
        """Queue the insertion of keys, which were missing at so many positions, that no queued insertion has already."""
        with self._pending_lock:
            fresh = np.sort(keys[~_contained(self._pending[table_index], keys)])
            if not fresh.size:
                return
            self._pending[table_index] = np.union1d(self._pending[table_index], fresh)
        occurrences = positions / keys.size
        if not self._inserts.submit(lambda: self._insert(table_index, fresh, occurrences)):
            self._done(table_index, fresh)

    def _insert(self, table_index: int, keys: KeyArray, occurrences: float) -> None:
        try:
            found = self._fill(table_index, keys)
            if not found.all():  # the lookup is over: each counts as often as the keys of its table did on average
                self._count_defaults(table_index, round(occurrences * (found.size - np.count_nonzero(found))))
        finally:
            self._done(table_index, keys)

    def _fill(self, table_index: int, keys: KeyArray) -> BoolArray:
        """Fetch distinct keys and make resident what some tier has: returns which those are."""
        table = self.tables[table_index]
        fence = self._chain.fence(table)
        token = fence.token()
        vectors = np.empty((keys.size, table.dim), np.float32)
        found = np.zeros(keys.size, np.bool_)
        self._coalescer.fetch(table, fence, keys, vectors, found)
        with fence.filling(token) as allowed:
            if allowed:
                self.cache.insert(table_index, keys[found], vectors[found])
        return found

    def _done(self, table_index: int, keys: KeyArray) -> None:
        with self._pending_lock:
            pending = self._pending[table_index]
            self._pending[table_index] = pending[~_contained(keys, pending)]

    def _count(
        self,
        segments: Sequence[Segment],
        missing_counts: Sequence[int] | None,
        padding: Sequence[int],
        times: tuple[int, ...],
        stages: Mapping[str, int] | None,
    ) -> None:
        """Count the keys of a lookup. `missing_counts` is None where no key was missing: that is quicker for many tables.

        Args:
            times: nanoseconds, as `LookupTimes.recent` has them.
            stages: of what follows the query, where keys were missing.
        """
        every = self._counters
        with self._metrics.lock:
            self._recent.extend(times)
            if len(self._recent) >= LookupTimes.MOST_RECENT:
                self._times.fold()
            if stages is not None:
                for stage, ns in stages.items():
                    self._times.stages[stage].add(ns)
            self._device.lookups += 1
            for segment in segments:
                counters, n = every[segment.table], segment.n
                counters.keys += n
                counters.hits[0] += n
            if missing_counts is not None:
                for segment, missing in zip(segments, missing_counts, strict=True):
                    counters = every[segment.table]
                    counters.hits[0] -= missing
                    counters.misses[0] += missing
            for segment, left_out in zip(segments, padding, strict=False):
                counters = every[segment.table]
                counters.keys -= left_out
                counters.hits[0] -= left_out

    def _count_linked(self, segments: Sequence[Segment], linked: Sequence[int], absent: Sequence[int]) -> None:
        none = [0] * len(segments)
        with self._metrics.lock:
            for segment, found, lacking in zip(segments, linked or none, absent or none, strict=True):
                counters = self._counters[segment.table]
                counters.hits[0] -= found + lacking
                counters.misses[0] += found + lacking
                counters.count_linked(found, lacking)

    def _count_defaults(self, table_index: int, absent: int) -> None:
        with self._metrics.lock:
            self._counters[table_index].defaults += absent

    def _trace(
        self,
        trace: LookupTrace,
        segments: Sequence[Segment],
        counts: Sequence[int] | None,
        linked: Sequence[int],
        absent: Sequence[int],
        padding: Sequence[int],
    ) -> None:
        """Note what the embedding cache and the device answered; the tiers below have noted theirs."""
        for i, segment in enumerate(segments):
            answers = trace.of(self.tables[segment.table].table_name)
            n = segment.n - (padding[i] if padding else 0)
            by_device, by_default = linked[i] if linked else 0, absent[i] if absent else 0
            answers.keys += n
            answers.embedding_cache += n - (counts[i] if counts else 0) - by_device - by_default
            answers.linked += by_device
            answers.volatile_db += by_device
            answers.defaults += by_default


class DirectSession:
    """Answers lookups from the databases, then the default vector. *Thread-safe.* Keys and outputs are in host memory.

    For models without embedding cache. The databases answer duplicate keys and write the vectors straight to the output, so
    keys are not made unique first.

    Args:
        tables: the model's tables, in the order of their ids.
        chain: the host tiers.
    """

    def __init__(self, tables: Sequence[TableSpec], chain: DatabaseChain, metrics: Metrics) -> None:
        compile_kernels()
        self.tables = tuple(tables)
        self.cache: EmbeddingCache | None = None
        self.on_cuda = False
        self.busy = 0
        self.workspaces = (0, 0)
        self.miss_paths: Sequence[str] = ()
        self._chain = chain
        self._metrics = metrics
        self._max_keys = [table.max_keys for table in self.tables]
        self._counters = [metrics.table(table.model_name, table.table_name) for table in self.tables]
        self._times = metrics.lookup_times(self.tables[0].model_name)
        self._calls = OpenCalls(f"the deployment of model {self.tables[0].model_name!r}")

    def lookup(self, segments: Sequence[Segment], began_ns: int = 0) -> None:
        """Write the vector of every key to its row of `out`. See `Session.lookup`."""
        start = perf_counter_ns()
        _refuse_too_many_keys(self.tables, self._max_keys, segments)
        stages: dict[str, int] = {"adopt": start - (began_ns or start)}
        counts = []
        current.stages = stages
        try:
            with self._calls:
                for segment in segments:
                    table = self.tables[segment.table]
                    if segment.pooling is not None:
                        counts.append(self._pool(table, segment, segment.pooling))
                        continue
                    found = segment.found
                    if found is None:
                        found = np.zeros(segment.n, np.bool_)
                    else:
                        found[...] = False
                    absent = found.size - self._chain.fetch(table, segment.keys, segment.out, found)
                    if absent:
                        began = perf_counter_ns()
                        segment.out[~found] = table.default_value
                        ended("scatter", table.table_name, began, absent)
                    counts.append((found.size, absent))
        finally:
            current.stages = None
        end = perf_counter_ns()
        with self._metrics.lock:
            for segment, (keys, absent) in zip(segments, counts, strict=True):
                counters = self._counters[segment.table]
                counters.keys += keys
                counters.defaults += absent
            self._times.whole.add(end - (began_ns or start))
            for stage, ns in stages.items():
                self._times.stages[stage].add(ns)
        if (trace := current.trace) is not None:
            trace.spans.append(Span("adopt", "", began_ns or start, start, sum([keys for keys, _ in counts])))
            trace.spans.sort(key=attrgetter("ended_ns"))
            for segment, (keys, absent) in zip(segments, counts, strict=True):
                answers = trace.of(self.tables[segment.table].table_name)
                answers.keys += keys
                answers.defaults += absent

    def _pool(self, table: TableSpec, segment: Segment, pooling: Pooling) -> tuple[int, int]:
        """Write the combined vector of each bag, of vectors that are fetched some at a time.

        Returns:
            How many keys there were, and how many of them no tier has.
        """
        keys, out = segment.keys, segment.out
        bags = bag_arrays(pooling)
        out[...] = 0.0
        positions = np.arange(keys.size)
        counted = keys
        if pooling.padding_key is not None:
            positions = positions[: counted_positions(keys, pooling.padding_key, positions)]
            counted = keys[positions]
        absent = 0
        at_once = min(max(1, _POOLED_BYTES // (4 * table.dim)), positions.size)
        rows, total = np.empty((at_once, table.dim), np.float32), np.empty(table.dim, np.float32)
        for start in range(0, positions.size, at_once or 1):
            stop = min(start + at_once, positions.size)
            found = np.zeros(stop - start, np.bool_)
            if missing := found.size - self._chain.fetch(table, counted[start:stop], rows[: found.size], found):
                absent += missing
                rows[: found.size][~found] = table.default_value
            began = perf_counter_ns()
            pool_rows(rows, _AS_THEY_COME, positions, start, stop, keys, *bags, total, out)
            ended("scatter", table.table_name, began, found.size)
        return positions.size, absent

    def enqueue(self, segments: Sequence[Segment]) -> None:
        """Refuse: there is no device."""
        raise self._without_device()

    def record(self, segments: Sequence[Segment]) -> RecordedLookup:
        """Refuse: there is no device."""
        raise self._without_device()

    def prefetch(self, table: int, keys: KeyArray) -> int:
        """Promote keys. See `Session.prefetch`."""
        spec, have = self.tables[table], 0
        with self._calls:
            for start in range(0, keys.size, _PREFETCH_ROWS):
                part = keys[start : start + _PREFETCH_ROWS]
                have += self._chain.fetch(
                    spec, part, np.empty((part.size, spec.dim), np.float32), np.zeros(part.size, np.bool_)
                )
        return have

    def resident(self, table: int, key: KeyArray, out: FloatArray) -> bool:
        """Return False: there is no cache."""
        return False

    def _without_device(self) -> InvalidInputError:
        return InvalidInputError(
            f"looking up model {self.tables[0].model_name!r} without waiting: it has no embedding cache on a device that "
            "reads host memory in place; use wait=True"
        )

    def drain(self, timeout_s: float) -> bool:
        """Return True: nothing runs in the background."""
        return True

    def close(self, timeout_s: float = 10.0) -> bool:
        """Refuse new lookups and let running ones end. See `Session.close`."""
        return self._calls.close(timeout_s)


class _LookupPool:
    """Bounds how many lookups run at once. *Thread-safe.* A lookup that waits for its turn ends with an error, never in a spin.

    Attributes:
        size: how many may run at once.

    Args:
        create: allocates a lookup; called `size` times now, so that no call has to.
        size: how many may run at once.
        timeout_s: how long a call waits for one.
        owner: what the error message calls this pool.
        timeouts: counts the calls that waited in vain.
    """

    def __init__(self, create: Callable[[], CacheLookup], size: int, timeout_s: float, owner: str, timeouts: Counter) -> None:
        self.size = size
        self._timeout_s = timeout_s
        self._owner = owner
        self._timeouts = timeouts
        self._closed = False
        self._free: queue.SimpleQueue[CacheLookup | None] = queue.SimpleQueue()  # None: it is closed
        for _ in range(size):
            self._free.put(create())

    @property
    def busy(self) -> int:
        """How many lookups run, roughly."""
        return 0 if self._closed else max(0, self.size - self._free.qsize())

    def take(self) -> CacheLookup:
        """Take a lookup, which the caller must give back.

        Raises:
            WorkspaceTimeoutError: all of them stayed busy for `timeout_s`.
            NotReadyError: the pool was closed.
        """
        try:
            if not self._closed:  # else it would take what `close` waits for
                if (lookup := self._free.get(timeout=self._timeout_s)) is not None:
                    return lookup
                self._free.put(None)  # for the next one that waits
            raise NotReadyError(f"{self._owner}: was undeployed")
        except queue.Empty:
            if self._closed:  # another version may serve by now
                raise NotReadyError(f"{self._owner}: was undeployed") from None
            self._timeouts.inc()
            raise WorkspaceTimeoutError(
                f"{self._owner}: all {self.size} lookup workspaces stayed busy for {self._timeout_s:g} s; "
                "raise num_of_worker_buffer_in_pool or send fewer lookups at once"
            ) from None

    def give_back(self, lookup: CacheLookup) -> None:
        """Let the next caller have a lookup."""
        self._free.put(lookup)

    def close(self, timeout_s: float = 10.0) -> bool:
        """Take all lookups away for good; False when some were still running after `timeout_s`, and may be asked again."""
        self._closed = True
        deadline = time.monotonic() + timeout_s
        while self.size:
            try:
                self._free.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                return False
            self.size -= 1
        self._free.put(None)
        return True


def _refuse_too_many_keys(tables: Sequence[TableSpec], max_keys: Sequence[int], segments: Sequence[Segment]) -> None:
    for segment in segments:
        if segment.n > max_keys[segment.table]:
            table = tables[segment.table]
            raise TooManyKeysError(
                f"looking up table {table.table_name!r} of model {table.model_name!r}: got {segment.n} keys, "
                f"expected at most {table.max_keys} (max_batch_size x maxnum_catfeature_query_per_table_per_sample); "
                "send fewer or raise them"
            )


def _contained(ascending: KeyArray, keys: KeyArray) -> BoolArray:
    """Which of `keys` are in `ascending`."""
    if not ascending.size:
        return np.zeros(keys.size, np.bool_)
    place = np.minimum(np.searchsorted(ascending, keys), ascending.size - 1)
    return np.equal(ascending[place], keys)
