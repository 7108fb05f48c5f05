"""The hot path: the lookups of one model on one device."""

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from time import perf_counter_ns
from typing import NamedTuple, Protocol

import numpy as np

from hps.cache.base import CacheLookup, EmbeddingCache, GraphPart, GraphParts, LookupGraph, MissedKeys
from hps.engine.aging import RowAging
from hps.engine.chain import DatabaseChain
from hps.engine.coalescing import FetchCoalescer
from hps.engine.misplaced import refuse_misplaced
from hps.engine.stream_ordered import StreamOrderedLookups
from hps.errors import DeviceError, InvalidInputError, NotReadyError, TooManyKeysError, WorkspaceTimeoutError
from hps.ground.rows import decode
from hps.ground.threads.open_calls import OpenCalls
from hps.ground.threads.workers import WorkQueue
from hps.statistics.metrics import TIERS, LookupNs, LookupTimes, Metrics
from hps.statistics.prometheus import Value
from hps.statistics.tracing import LookupTrace, Span, current, ended
from hps.tensors.bags import Pooling
from hps.tensors.batch import Batch, fill_narrow
from hps.tensors.pooling import bag_arrays, counted_positions, pool_rows, start_totals
from hps.types import BoolArray, FloatArray, IndexArray, KeyArray, TableSpec

_log = logging.getLogger(__name__)
# Rows fetched at once, to bound their memory: to be made resident, pooled and decoded.
_PREFETCH_ROWS = 65_536
_POOLED_BYTES = 8 << 20
_DECODED_BYTES = 1 << 20
_IN_ORDER: IndexArray = np.empty(0, np.int64)


class Session(Protocol):
    """Answers the lookups of one model on one device. *Thread-safe.*"""

    lost: bool
    """True once a lookup found its device lost."""

    aging: RowAging | None
    """Removes expired rows from the tiers; None if no table ages."""

    @property
    def refuses(self) -> str:
        """Why every lookup fails: its device is lost, and no database holds every row; empty if it answers."""

    @property
    def tables(self) -> tuple[TableSpec, ...]:
        """The model's tables, in the order of their ids."""

    @property
    def cache(self) -> EmbeddingCache | None:
        """The embedding cache of the device; None if lookups go directly to the databases."""

    @property
    def on_cuda(self) -> bool:
        """Whether keys and outputs may be in CUDA memory."""

    @property
    def busy(self) -> int:
        """Keys of lookups that run or wait for a workspace; 0 if the model has no other session to choose."""

    @property
    def workspaces(self) -> tuple[int, int]:
        """Maximum and current number of running lookups; (0, 0) if unbounded."""

    @property
    def miss_paths(self) -> Sequence[str]:
        """By table, the path of cache misses that host memory has: `link` or `copy`; empty without a cache."""

    def run(self, batch: Batch, began_ns: int = 0, *, wait: bool = True) -> None:
        """Write the vector of every key to its row of `outs`, and `founds` if given.

        Args:
            began_ns: `time.perf_counter_ns` when the caller began to build the batch; 0: now.
            wait: if False, enqueue the lookup on the stream of its tensors, which may be capturing a CUDA graph, and return.

        Raises:
            TooManyKeysError: a table has more keys than its `max_keys`.
            WorkspaceTimeoutError: no workspace became free in time.
            NotReadyError: the session is closed.
            MisplacedKeysError: keys belong to another share of a table than this server's; outputs are then unspecified.
            DatabaseError: keys are missing and the authoritative database did not answer; outputs are then unspecified. Without
                waiting: keys of an earlier such lookup could not be read; nothing was launched.
            InvalidInputError: without waiting: the device does not read a table in place as the authority, a tensor is not on
                the device, or no standby workspace fits the capture (see `StreamOrderedLookups`); nothing was launched.
        """

    def check(self, batch: Batch) -> None:
        """Check the numbers of keys; of a kept batch, for all its runs on this session. Raises TooManyKeysError."""

    def record(self, batch: Batch) -> "RecordedLookup":
        """Capture a lookup without waiting in a CUDA graph, which also runs it once. Raises as `run` does."""

    def graph_lookups(self) -> "GraphLookups | None":
        """Return lookups for a CUDA graph of the caller; None if the cache has none."""

    def prefetch(self, table: int, keys: KeyArray) -> int:
        """Make keys resident; without a cache, promote them.

        Args:
            keys: (n,) int64, distinct.

        Returns:
            Number of keys that exist in a tier.

        Raises:
            DatabaseError: as for `lookup`; part of the keys may have become resident.
        """

    def resident(self, table: int, keys: KeyArray, out: FloatArray) -> BoolArray:
        """Return which keys, (n,) int64, are cached, and write their vectors to `out`. Fetches and counts nothing.

        Of several keys, none counts as cached if a table in host memory answers one of them.

        Raises:
            WorkspaceTimeoutError, NotReadyError: as for `lookup`.
        """

    def drain(self, timeout_s: float) -> bool:
        """Wait for queued insertions; return False on timeout."""

    def close(self, timeout_s: float = 10.0) -> bool:
        """Refuse new lookups, wait for running ones and queued insertions, and free the cache.

        Returns:
            False if lookups still run after `timeout_s`: the cache is not freed, and `close` may be retried.
        """


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """Settings of a session, from the model's configuration. *Immutable.*

    Attributes:
        hit_rate_threshold: a lookup whose hit rate of a table reaches it is answered at once, with defaults for the missing
            keys, which are fetched in the background. Above 1, every lookup is complete.
        workspaces: maximum number of concurrent lookups.
        workspace_timeout_s: time limit of a lookup for one of them to become free.
        insert_queue_length: maximum number of batches of missing keys queued for insertion.
        one_of_several: the model has sessions on other devices, too.
        databases_complete: the databases have every row, so that they may answer without the device.
        stream_order_refusals: by table, why the device cannot answer a lookup alone; empty if it can for every table.
        miss_paths: by table, see `Session.miss_paths`.
    """

    hit_rate_threshold: float = 1.1
    workspaces: int = 1
    workspace_timeout_s: float = 1.0
    insert_queue_length: int = 64
    one_of_several: bool = False
    databases_complete: bool = False
    stream_order_refusals: Mapping[int, str] = field(default_factory=dict)
    miss_paths: Sequence[str] = ()


class RecordedLookup:
    """A lookup of fixed tensors captured in a CUDA graph; each launch is counted. *One per thread.*"""

    def __init__(
        self, graph: LookupGraph, batch: Batch, stream_ordered: StreamOrderedLookups, sweep_if_late: Callable[[], None]
    ) -> None:
        self._sweep_if_late = sweep_if_late
        self._graph = graph
        self._batch = batch
        self._stream_ordered = stream_ordered

    def launch(self) -> None:
        """Launch the graph on the current stream of the keys' framework.

        Raises:
            DatabaseError: keys of an earlier launch could not be read, or expired rows not be removed.
        """
        self._sweep_if_late()
        self._stream_ordered.check(self._batch)
        self._graph.launch()
        self._stream_ordered.count(self._batch)

    def close(self) -> None:
        """Free the graph. Idempotent."""
        self._graph.close()


class GraphKeys(NamedTuple):
    """Keys of a graph that has ended.

    Attributes:
        keys, absent: by table.
        misses_follow: the device counts its misses, which are taken from there.
    """

    keys: Mapping[int, int]
    absent: Mapping[int, int]
    misses_follow: bool


class GraphLookups:
    """Lookups within a CUDA graph of their caller. *One per thread.*

    Attributes:
        order: see `GraphPart`.
    """

    def __init__(
        self,
        part: GraphPart,
        check: Callable[[Batch], None],
        count: Callable[[GraphKeys], None],
        forget_misses: Callable[[], None],
        is_late: Callable[[], bool],
    ) -> None:
        self.order = part.order
        self._part = part
        self._check = check
        self._count = count
        self._forget_misses = forget_misses
        self._is_late = is_late

    def prepare(self, batch: Batch) -> None:
        """See `GraphPart.prepare`. Raises TooManyKeysError, too: a table has more keys than its `max_keys`."""
        self._check(batch)
        self._part.prepare(batch)

    def enqueue(self, batch: Batch) -> None:
        """See `GraphPart.enqueue`. Raises TooManyKeysError, too, as `prepare` does."""
        self._check(batch)
        self._part.enqueue(batch)

    def forget(self) -> None:
        """Forget all launches so far, which have ended: they were none of a request."""
        self._part.absent()
        if self._part.counts:
            self._forget_misses()

    def succeeded(self, keys: Mapping[int, int], launched: Mapping[int, int]) -> bool:
        """Return whether the vectors of the launch that has ended are right. Its keys count only then.

        Args:
            keys: by table, keys that count.
            launched: by table, keys that were looked up: also those that fill a batch up.
        """
        if (absent := self._part.absent()) is None or self._is_late():
            return False
        found = {table: n * keys[table] // launched[table] for table, n in absent.items() if n}
        self._count(GraphKeys(keys, found, self._part.counts))
        return True


class _TableLimits:
    """Tables of a session with their limits on keys and the age of their rows."""

    def __init__(self, tables: Sequence[TableSpec]) -> None:
        self.tables = tuple(tables)
        self.aging: RowAging | None = None
        self._max_keys = [table.max_keys for table in self.tables]

    def check(self, batch: Batch) -> None:
        max_keys, sizes = self._max_keys, batch.sizes
        for place, index in enumerate(batch.tables):
            if (n := sizes[place]) > max_keys[index]:
                table = self.tables[index]
                raise TooManyKeysError(
                    f"looking up table {table.table_name!r} of model {table.model_name!r}: got {n} keys, "
                    f"expected at most {table.max_keys} (max_batch_size x maxnum_catfeature_query_per_table_per_sample); "
                    "send fewer or raise them"
                )
        if batch.kept:
            batch.checked = self

    def is_late(self) -> bool:
        """Return whether the removal of expired rows is overdue, so that tiers must not answer."""
        return self.aging is not None and time.time_ns() > self.aging.valid_until_ns

    def sweep_if_late(self) -> None:
        """Remove expired rows if that is overdue. Raises DatabaseError: as `RowAging.catch_up`."""
        if self.is_late() and self.aging is not None:
            self.aging.catch_up()


class CachedSession(_TableLimits):
    """Answers lookups from the embedding cache, then the databases, then the default vector. *Thread-safe.*

    Args:
        coalescer: shared by all sessions of the chain.

    Attributes:
        before_close: called with a timeout by `close`, to end other readers of the cache; False if one still reads.
        on_loss: called once when the device is lost, by the lookup that finds it so.
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
        super().__init__(tables)
        self.cache = cache
        self.on_cuda = cache.device == "cuda"
        self._chain = chain
        self._coalescer = coalescer
        self._threshold = settings.hit_rate_threshold
        self.miss_paths = settings.miss_paths
        self._metrics = metrics
        model = self.tables[0].model_name
        self._counters = [metrics.table(table.model_name, table.table_name) for table in self.tables]
        for counters in self._counters:
            counters.linked_tier = chain.linked_tier
        self._device = metrics.device(model, cache.device_id if self.on_cuda else None)
        self._under_way: dict[int, int] | None = (
            {} if settings.one_of_several else None
        )  # keys of the running lookup, by thread
        self._times = metrics.lookup_times(model)
        self._recent = self._times.recent
        self._lookups = _LookupPool(
            cache.create_lookup,
            settings.workspaces,
            settings.workspace_timeout_s,
            f"model {model!r} on device {cache.device_id}",
            metrics.workspace_timeouts.labels(model),
        )
        self._inserts = WorkQueue("insertion", settings.insert_queue_length, 1, metrics)
        self._inserts.stop_with(self)
        self._stream_ordered = StreamOrderedLookups(self.tables, cache, settings.stream_order_refusals, metrics)
        self.before_close: list[Callable[[float], bool]] = []
        self.on_loss: list[Callable[[], object]] = []
        self._without_device = DirectSession(tables, chain, metrics)
        self._databases_complete = settings.databases_complete
        self.lost = False
        self._pending_lock = threading.Lock()
        self._pending = [np.empty(0, np.int64) for _ in self.tables]  # ascending: queued or being inserted

    @property
    def refuses(self) -> str:
        if self._databases_complete or (failure := self.cache.failure) is None:
            return ""
        return f"device {self.cache.device_name} is lost ({failure}), and no database holds every row; restart the service"

    @property
    def busy(self) -> int:
        return sum(self._under_way.values()) if self._under_way else 0

    @property
    def workspaces(self) -> tuple[int, int]:
        return self._lookups.size, self._lookups.busy

    def run(self, batch: Batch, began_ns: int = 0, *, wait: bool = True) -> None:
        start = perf_counter_ns()
        if self.aging is not None:
            self.sweep_if_late()
        if batch.checked is not self:
            self.check(batch)
        if not wait:
            self._run_stream_ordered(batch, start)
            return
        under_way = self._under_way
        # Single operations of a dict are atomic, and each thread has an entry of its own: the sum needs no lock, and unlike a
        # counter it cannot drift by a lost update.
        if under_way is not None:
            under_way[threading.get_ident()] = sum(batch.sizes)
        stages: dict[str, int] | None = None
        try:
            lookup = self._lookups.take()
            try:
                taken = perf_counter_ns()
                missing = lookup.query(batch)
                queried = answered = end = perf_counter_ns()
                linked, absent, padding = lookup.linked, lookup.absent, lookup.padding
                counts = None
                if missing:
                    counts = lookup.counts
                    current.stages = stages = {}
                    self._answer_misses(lookup, batch, counts)
                    answered = perf_counter_ns()
                    lookup.finish()
                    end = perf_counter_ns()
            finally:
                if stages is not None:
                    current.stages = None
                self._lookups.give_back(lookup)
        except DeviceError as error:
            self._continue_without_device(error, batch)
            self._without_device.run(batch, began_ns)
            return
        finally:
            if under_way is not None:
                del under_way[threading.get_ident()]
        began = began_ns or start
        times: LookupNs = (end - began, start - began, taken - start, queried - taken, end - answered)
        recent, every, sizes = self._recent, self._counters, batch.sizes
        # A lookup takes one lock once. Its times are only appended: `fold` sorts them into buckets when there are many, or when
        # they are read. All keys count as hits first; `_correct_counts` corrects that under the same lock, before a reader.
        with self._metrics.lock:
            recent.extend(times)
            if len(recent) >= LookupTimes.MOST_RECENT:
                self._times.fold()
            self._device.lookups += 1
            for place, table in enumerate(batch.tables):  # of few tables, a `zip` takes 0.1 us more
                counters, n = every[table], sizes[place]
                counters.keys += n
                counters.hits[0] += n
            if counts or padding or linked or absent:
                self._correct_counts(batch, counts, padding, stages, linked, absent)
        if batch.narrow:
            fill_narrow(batch)
        if (trace := current.trace) is not None:
            n = sum(batch.sizes)
            spans = (("adopt", began, start), ("wait", start, taken), ("query", taken, queried), ("finish", answered, end))
            trace.spans += [Span(stage, "", first, last, n) for stage, first, last in spans]
            if counts:
                trace.spans.sort(key=attrgetter("ended_ns"))
            self._trace(trace, batch, counts, linked, absent, padding)

    def count_answered(self, tables: Sequence[Sequence[int]], times: Sequence[int], ns: int) -> None:
        """Count lookups that a batch loop has answered from the cache.

        Args:
            tables: by table: keys, and of these resident, linked and absent ones.
            times: number of lookups, by the buckets of `LookupTimes`.
            ns: total duration.
        """
        with self._metrics.lock:
            for histogram in (self._times.total, self._times.stages["query"]):
                histogram.add_buckets(times, ns)
            self._device.lookups += sum(times)
            for counters, (keys, hits, linked, absent) in zip(self._counters, tables, strict=True):
                counters.keys += keys
                counters.hits[0] += hits
                counters.misses[0] += keys - hits
                if linked or absent:
                    counters.count_linked(linked, absent)

    def _run_stream_ordered(self, batch: Batch, start: int) -> None:
        if any(found is not None for found in batch.founds):
            raise InvalidInputError("looking up without waiting: got return_found, whose mask is in host memory; expected none")
        self._stream_ordered.check(batch)
        self._enqueue(batch)
        if (trace := current.trace) is not None:  # the device has not run it yet: the tiers are unknown
            trace.spans.append(Span("query", "", start, perf_counter_ns(), sum(batch.sizes)))
            for table, n in zip(batch.tables, batch.sizes, strict=True):
                trace.of(self.tables[table].table_name).keys += n

    def _enqueue(self, batch: Batch) -> None:
        self._stream_ordered.enqueue(batch, self._lookups.take, self._lookups.give_back)

    def record(self, batch: Batch) -> RecordedLookup:
        self.check(batch)
        self._stream_ordered.check(batch)
        return RecordedLookup(
            self._stream_ordered.record(batch, self._enqueue), batch, self._stream_ordered, self.sweep_if_late
        )

    def graph_lookups(self) -> GraphLookups | None:
        if not isinstance(self.cache, GraphParts):
            return None
        return GraphLookups(self.cache.graph_part(), self.check, self._count_graph, self._stream_ordered.forget, self.is_late)

    def _count_graph(self, counted: GraphKeys) -> None:
        keys, absent = counted.keys, counted.absent
        with self._metrics.lock:
            self._device.lookups += 1
        if counted.misses_follow:
            self._stream_ordered.count(Batch(list(keys), list(keys.values()), (), ()))
        else:
            with self._metrics.lock:
                for table, n in keys.items():
                    counters, lacking = self._counters[table], absent.get(table, 0)
                    counters.keys += n
                    counters.hits[0] += n - lacking
                    counters.misses[0] += lacking
                    counters.defaults += lacking
        if (trace := current.trace) is not None:  # of linked keys, only the device knows how many there are
            for table, n in keys.items():
                answers = trace.of(self.tables[table].table_name)
                answers.keys += n
                answers.embedding_cache += n - absent.get(table, 0)
                answers.defaults += absent.get(table, 0)

    def prefetch(self, table: int, keys: KeyArray) -> int:
        starts = range(0, keys.size, _PREFETCH_ROWS)
        return sum(int(np.count_nonzero(self._fill(table, keys[start : start + _PREFETCH_ROWS]))) for start in starts)

    def resident(self, table: int, keys: KeyArray, out: FloatArray) -> BoolArray:
        self.sweep_if_late()
        found = np.zeros(keys.size, np.bool_)
        lookup = self._lookups.take()
        try:
            lookup.query(Batch.of(table, keys, out, found))
            linked = any(lookup.linked)  # read from host memory: not all were resident
            lookup.finish()
        except DeviceError as error:
            self._continue_without_device(error)
            linked = True
        finally:
            self._lookups.give_back(lookup)
        return np.zeros_like(found) if linked else found

    def drain(self, timeout_s: float) -> bool:
        return self._inserts.drain(timeout_s)

    def close(self, timeout_s: float = 10.0) -> bool:
        if not all(end(timeout_s) for end in self.before_close):
            return False
        if not (self._lookups.close(timeout_s) and self._without_device.close(timeout_s) and self._stream_ordered.close()):
            return False
        self._inserts.close()
        self.cache.close()
        return True

    def _continue_without_device(self, error: DeviceError, batch: Batch | None = None) -> None:
        """Return if the device is lost and the databases can answer the lookup; otherwise raise the error."""
        failure = self.cache.failure
        if failure is None:
            raise error
        with self._metrics.lock:
            reported, self.lost = self.lost, True
        if not reported:
            _log.error(
                "model %r: device %d is lost (%s); until the process is restarted, %s",
                self.tables[0].model_name,
                self.cache.device_id,
                failure,
                "lookups of host arrays are answered from the databases, which is slower"
                if self._databases_complete
                else "lookups fail, since no database holds every row",
            )
            for notify in self.on_loss:
                notify()
        if not (self._databases_complete and (batch is None or _on_host(batch))):
            raise error

    def _answer_misses(self, lookup: CacheLookup, batch: Batch, counts: Sequence[int]) -> None:
        padding = lookup.padding or [0] * len(counts)
        by_table = dict(zip(batch.tables, counts, strict=True))
        deferred = {
            table: missing
            for table, n, missing, padded in zip(batch.tables, batch.sizes, counts, padding, strict=True)
            if missing and 1.0 - missing / (n - padded) >= self._threshold
        }
        began = perf_counter_ns()
        missed_keys = lookup.unique()
        ended("unique", "", began, sum(counts))
        for missed in missed_keys:
            if missed.table in deferred:
                spec = self.tables[missed.table]
                refuse_misplaced(f"looking up table {spec.tag}", spec, missed.keys)
                began = perf_counter_ns()
                missed.scatter(np.zeros(missed.keys.size, np.bool_))
                ended("scatter", self.tables[missed.table].table_name, began, missed.keys.size)
                self._queue_insertion(missed.table, missed.keys, by_table[missed.table])
            else:
                self._fetch_now(missed)
        if deferred:
            current.deferred += sum(deferred.values())
            with self._metrics.lock:
                for table, missing in deferred.items():
                    self._counters[table].deferred += missing
            if (trace := current.trace) is not None:
                for table, missing in deferred.items():
                    trace.of(self.tables[table].table_name).deferred += missing

    def _fetch_now(self, missed: MissedKeys) -> None:
        table, keys = self.tables[missed.table], missed.keys
        # The token is taken before the databases are read: otherwise the insertion below could undo an update made between the
        # read and itself. `filling` allows the insertion only if the table was not modified since.
        fence = self._chain.fence(table)
        token = fence.token()
        buffer = missed.buffer()
        found = np.zeros(keys.size, np.bool_)
        tiers = self._coalescer.fetch(table, fence, keys, buffer, found, missed.stage)
        if (trace := current.trace) is not None:
            for place, tier in enumerate(TIERS[1:], 1):
                trace.of(table.table_name).add(tier, missed.absent(tiers != place))
        began = perf_counter_ns()
        absent = 0 if found.all() else missed.absent(found)
        missed.scatter(found)
        began = ended("scatter", table.table_name, began, keys.size)
        with fence.filling(token) as allowed:
            if allowed:
                missed.insert(found)
        ended("insert", table.table_name, began, keys.size)
        if absent:
            self._count_defaults(missed.table, absent)
            if trace is not None:
                trace.of(table.table_name).defaults += absent

    def _queue_insertion(self, table_index: int, keys: KeyArray, positions: int) -> None:
        """Queue the insertion of missed keys that are not queued yet. positions: number of missed positions in the lookup."""
        with self._pending_lock:
            fresh = np.sort(keys[~_contained(self._pending[table_index], keys)])
            if not fresh.size:
                return
            self._pending[table_index] = np.union1d(self._pending[table_index], fresh)
        occurrences = positions / keys.size
        if not self._inserts.submit(lambda: self._insert(table_index, fresh, occurrences)):
            self._unqueue(table_index, fresh)

    def _insert(self, table_index: int, keys: KeyArray, occurrences: float) -> None:
        try:
            found = self._fill(table_index, keys)
            if not found.all():  # the lookup has ended: count each with the average occurrence of a key
                self._count_defaults(table_index, round(occurrences * (found.size - np.count_nonzero(found))))
        finally:
            self._unqueue(table_index, keys)

    def _fill(self, table_index: int, keys: KeyArray) -> BoolArray:
        """Fetch distinct keys, and make those that exist resident. Return which exist."""
        table = self.tables[table_index]
        fence = self._chain.fence(table)
        token = fence.token()
        rows = np.empty((keys.size, table.width), np.float32)
        found = np.zeros(keys.size, np.bool_)
        self._coalescer.fetch(table, fence, keys, rows, found)
        with fence.filling(token) as allowed:
            if allowed:
                with self.cache.unless_lost():
                    self.cache.insert(table_index, keys[found], rows[found])
        return found

    def _unqueue(self, table_index: int, keys: KeyArray) -> None:
        with self._pending_lock:
            pending = self._pending[table_index]
            self._pending[table_index] = pending[~_contained(keys, pending)]

    def _correct_counts(
        self,
        batch: Batch,
        missing_counts: Sequence[int] | None,
        padding: Sequence[int],
        stages: Mapping[str, int] | None,
        linked: Sequence[int],
        absent: Sequence[int],
    ) -> None:
        """Correct counts that took all keys for resident. The caller holds the lock.

        Args:
            stages: nanoseconds of the steps after the query, if keys were missing.
        """
        counters = [self._counters[table] for table in batch.tables]
        for stage, ns in (stages or {}).items():
            self._times.stages[stage].add(ns)
        for table, missing in zip(counters, missing_counts or (), strict=False):
            table.hits[0] -= missing
            table.misses[0] += missing
        for table, padded in zip(counters, padding, strict=False):
            table.keys -= padded
            table.hits[0] -= padded
        none = [0] * len(counters)
        for table, found, lacking in zip(counters, linked or none, absent or none, strict=True):
            table.hits[0] -= found + lacking
            table.misses[0] += found + lacking
            if linked:
                table.count_linked(found, lacking)
            else:  # the cache is complete: no tier was queried
                table.defaults += lacking

    def _count_defaults(self, table_index: int, absent: int) -> None:
        with self._metrics.lock:
            self._counters[table_index].defaults += absent

    def _trace(
        self,
        trace: LookupTrace,
        batch: Batch,
        counts: Sequence[int] | None,
        linked: Sequence[int],
        absent: Sequence[int],
        padding: Sequence[int],
    ) -> None:
        """Trace the hits of the embedding cache and the device; the tiers below trace their own."""
        for i, (table, n) in enumerate(zip(batch.tables, batch.sizes, strict=True)):
            answers = trace.of(self.tables[table].table_name)
            n -= padding[i] if padding else 0
            by_device, by_default = linked[i] if linked else 0, absent[i] if absent else 0
            answers.keys += n
            answers.embedding_cache += n - (counts[i] if counts else 0) - by_device - by_default
            answers.linked += by_device
            answers.volatile_db += by_device
            answers.defaults += by_default


class DirectSession(_TableLimits):
    """Answers lookups from the databases, then the default vector. *Thread-safe.* Keys and outputs are in host memory.

    For models without an embedding cache. Keys are not deduplicated: the databases write vectors straight to the output.
    """

    def __init__(self, tables: Sequence[TableSpec], chain: DatabaseChain, metrics: Metrics) -> None:
        super().__init__(tables)
        self.cache: EmbeddingCache | None = None
        self.on_cuda = self.lost = False
        self.refuses = ""
        self.busy = 0
        self.workspaces = (0, 0)
        self.miss_paths: Sequence[str] = ()
        self._chain = chain
        self._metrics = metrics
        self._counters = [metrics.table(table.model_name, table.table_name) for table in self.tables]
        self._times = metrics.lookup_times(self.tables[0].model_name)
        self._calls = OpenCalls(f"the deployment of model {self.tables[0].model_name!r}")

    def run(self, batch: Batch, began_ns: int = 0, *, wait: bool = True) -> None:
        start = perf_counter_ns()
        if self.aging is not None:
            self.sweep_if_late()
        if not wait:
            raise self._refusal()
        if batch.checked is not self:
            self.check(batch)
        stages: dict[str, int] = {"adopt": start - (began_ns or start)}
        counts = []
        current.stages = stages
        try:
            with self._calls:
                for place, index in enumerate(batch.tables):
                    table, keys, out = self.tables[index], batch.keys[place], batch.outs[place]
                    if batch.poolings:
                        counts.append(self._pool(table, keys, batch.poolings[place], out))
                        continue
                    found = batch.founds[place] if batch.founds else None
                    if found is None:
                        found = np.zeros(keys.size, np.bool_)
                    else:
                        found[...] = False
                    absent = found.size - self._fetch(table, keys, out, found)
                    if absent:
                        began = perf_counter_ns()
                        out[~found] = table.default_value
                        ended("scatter", table.table_name, began, absent)
                    counts.append((found.size, absent))
        finally:
            current.stages = None
        end = perf_counter_ns()
        if batch.narrow:
            fill_narrow(batch)
        with self._metrics.lock:
            for index, (n, absent) in zip(batch.tables, counts, strict=True):
                counters = self._counters[index]
                counters.keys += n
                counters.defaults += absent
            self._times.total.add(end - (began_ns or start))
            for stage, ns in stages.items():
                self._times.stages[stage].add(ns)
        if (trace := current.trace) is not None:
            trace.spans.append(Span("adopt", "", began_ns or start, start, sum([n for n, _ in counts])))
            trace.spans.sort(key=attrgetter("ended_ns"))
            for index, (n, absent) in zip(batch.tables, counts, strict=True):
                answers = trace.of(self.tables[index].table_name)
                answers.keys += n
                answers.defaults += absent

    def _fetch(self, table: TableSpec, keys: KeyArray, out: FloatArray, found: BoolArray) -> int:
        """Fetch vectors, as `Database.fetch`; rows of `out` that are not found are unspecified."""
        if table.row_dtype == "float32":
            return self._chain.fetch(table, keys, out, found)
        fetched = 0
        for start in range(0, keys.size, step := max(1, _DECODED_BYTES // (4 * table.width))):
            part = slice(start, min(start + step, keys.size))
            rows = np.zeros((part.stop - start, table.width), np.float32)
            fetched += self._chain.fetch(table, keys[part], rows, found[part])
            decode(rows, table.dim, table.row_dtype, out[part])
        return fetched

    def _pool(self, table: TableSpec, keys: KeyArray, pooling: Pooling, out: FloatArray) -> tuple[int, int]:
        """Write the combined vector of each bag, fetching vectors in bounded pieces.

        Returns:
            Number of keys, and of absent keys.
        """
        bags = bag_arrays(pooling)
        positions = np.arange(keys.size)
        counted = keys
        if pooling.padding_key is not None:
            positions = positions[: counted_positions(keys, pooling.padding_key, positions)]
            counted = keys[positions]
        start_totals(bags, positions, keys.size, out)
        absent = 0
        step = min(max(1, _POOLED_BYTES // (4 * table.dim)), positions.size)
        rows, total = np.empty((step, table.dim), np.float32), np.empty(table.dim, np.float32)
        for start in range(0, positions.size, step or 1):
            stop = min(start + step, positions.size)
            found = np.zeros(stop - start, np.bool_)
            if missing := found.size - self._fetch(table, counted[start:stop], rows[: found.size], found):
                absent += missing
                rows[: found.size][~found] = table.default_value
            began = perf_counter_ns()
            pool_rows(rows, _IN_ORDER, positions, start, stop, keys, *bags, total, out)
            ended("scatter", table.table_name, began, found.size)
        return positions.size, absent

    def record(self, batch: Batch) -> RecordedLookup:
        raise self._refusal()

    def graph_lookups(self) -> GraphLookups | None:
        return None

    def prefetch(self, table: int, keys: KeyArray) -> int:
        spec, fetched = self.tables[table], 0
        with self._calls:
            for start in range(0, keys.size, _PREFETCH_ROWS):
                part = keys[start : start + _PREFETCH_ROWS]
                fetched += self._chain.fetch(
                    spec, part, np.empty((part.size, spec.width), np.float32), np.zeros(part.size, np.bool_)
                )
        return fetched

    def resident(self, table: int, keys: KeyArray, out: FloatArray) -> BoolArray:
        self.sweep_if_late()  # callers read the databases next
        return np.zeros(keys.size, np.bool_)

    def _refusal(self) -> InvalidInputError:
        return InvalidInputError(
            f"looking up model {self.tables[0].model_name!r} without waiting: it has no embedding cache on a device that "
            "reads host memory in place; use wait=True"
        )

    def drain(self, timeout_s: float) -> bool:
        return True

    def close(self, timeout_s: float = 10.0) -> bool:
        return self._calls.close(timeout_s)


def _on_host(batch: Batch) -> bool:
    """Return whether a lookup without a device can answer a batch."""
    bags = [array for pooling in batch.poolings for array in (pooling.offsets, pooling.weights)]
    arrays = [array for array in (*batch.keys, *batch.outs, *batch.founds, *bags) if array is not None]
    return all(isinstance(array, np.ndarray) for array in arrays) and all(out.dtype == np.float32 for out in batch.outs)


class _LookupPool:
    """A fixed number of lookup workspaces, allocated together. *Thread-safe.*"""

    def __init__(self, create: Callable[[], CacheLookup], size: int, timeout_s: float, name: str, timeouts: Value) -> None:
        self.size = size
        self._timeout_s = timeout_s
        self._name = name
        self._timeouts = timeouts
        self._closed = False
        self._free: queue.SimpleQueue[CacheLookup | None] = queue.SimpleQueue()  # None: closed
        self.give_back: Callable[[CacheLookup], None] = self._free.put
        for _ in range(size):
            self._free.put(create())

    @property
    def busy(self) -> int:
        """Approximate number of running lookups."""
        return 0 if self._closed else max(0, self.size - self._free.qsize())

    def take(self) -> CacheLookup:
        """Take a workspace, which the caller must give back.

        Raises:
            WorkspaceTimeoutError: all of them stayed busy for `timeout_s`.
            NotReadyError: the pool is closed.
        """
        try:
            if not self._closed:  # otherwise it would take a workspace that `close` waits for
                if (lookup := self._free.get(timeout=self._timeout_s)) is not None:
                    return lookup
                self._free.put(None)  # for the next waiting call
            raise NotReadyError(f"{self._name}: was undeployed")
        except queue.Empty:
            if self._closed:  # another version may serve by now
                raise NotReadyError(f"{self._name}: was undeployed") from None
            self._timeouts.inc()
            raise WorkspaceTimeoutError(
                f"{self._name}: all {self.size} lookup workspaces stayed busy for {self._timeout_s:g} s; "
                "raise num_of_worker_buffer_in_pool or send fewer lookups at once"
            ) from None

    def close(self, timeout_s: float) -> bool:
        """Take all workspaces for good. Return False if lookups still ran after `timeout_s`; may be retried."""
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


def _contained(ascending: KeyArray, keys: KeyArray) -> BoolArray:
    if not ascending.size:
        return np.zeros(keys.size, np.bool_)
    place = np.minimum(np.searchsorted(ascending, keys), ascending.size - 1)
    return np.equal(ascending[place], keys)
