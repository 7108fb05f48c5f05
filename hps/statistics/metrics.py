"""Prometheus metrics of lookups and tiers, counted per batch, never per key."""

import threading
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import reduce
from time import perf_counter_ns
from typing import Any, Final, Generic, TypeAlias, TypeVar
from weakref import WeakMethod

import numpy as np
import numpy.typing as npt
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from hps.errors import HPSError, UnknownModelError
from hps.ground.kernels.compilations import COMPILATIONS
from hps.ground.threads.pacing import in_turns
from hps.ground.threads.workers import THREADS
from hps.statistics.prometheus import Family, Values, expose, family, histogram, label_text, update_families
from hps.statistics.scores import ScoreCounters, score_families
from hps.statistics.series import Models, Series
from hps.statistics.snapshot import Latency, UpdateStatus
from hps.statistics.times import LOOKUP_BUCKETS, Times
from hps.statistics.tracing import STAGES
from hps.types import IndexArray

_VISIBLE_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 300, 3600)
TIERS = ("embedding_cache", "volatile_db", "persistent_db")
_TABLE = ("model", "table")
_READ = 16  # counters read between two pauses
_Method = TypeVar("_Method", bound=Callable[..., Any])
_C = TypeVar("_C")
_R = TypeVar("_R")


@dataclass(slots=True)
class TableCounters:
    """Counters of one table since the start. Change them only while holding `Metrics.lock`.

    Plain integers, with one lock for a batch: a labelled counter of prometheus-client costs 0.65 us, which a lookup of 26
    tables would pay 52 times.

    Attributes:
        keys: requested keys, including duplicates.
        hits: keys answered by each tier, in the order of `TIERS`. The embedding cache counts duplicates, and so does a device
            that reads the volatile database; otherwise the databases count distinct keys.
        misses: keys absent from each tier that was queried.
        defaults: requested keys, including duplicates, that got the default vector because no tier has them. For deferred keys
            this is known later; each then counts as many times as its table's missing keys did on average in that lookup.
        deferred: keys that got the default vector and are fetched in the background (hit rate threshold).
        linked: keys that a device read directly from host memory; also counted as hits of `linked_tier`.
        inserts: rows promoted or written online to each database; the caches count their own.
        linked_tier: the place in `TIERS` of the database that devices read.
    """

    keys: int = 0
    hits: list[int] = field(default_factory=lambda: [0] * len(TIERS))
    misses: list[int] = field(default_factory=lambda: [0] * len(TIERS))
    defaults: int = 0
    deferred: int = 0
    linked: int = 0
    inserts: list[int] = field(default_factory=lambda: [0] * len(TIERS))
    linked_tier: int = TIERS.index("volatile_db")

    def copy(self) -> "TableCounters":
        return TableCounters(
            self.keys,
            [*self.hits],
            [*self.misses],
            self.defaults,
            self.deferred,
            self.linked,
            [*self.inserts],
            self.linked_tier,
        )

    def count_linked(self, linked: int, absent: int) -> None:
        """Count keys, including duplicates, for which a device read a database directly.

        Args:
            linked: number of keys found.
            absent: number of keys that no tier has.
        """
        self.linked += linked
        self.hits[self.linked_tier] += linked
        self.misses[self.linked_tier] += absent
        self.defaults += absent


@dataclass(slots=True)
class DeviceCounters:
    """Counters of one model's embedding cache on one device since the start. Change them only while holding `Metrics.lock`."""

    lookups: int = 0


class LiveMethods(Generic[_Method]):
    """Methods of objects, for as long as the objects live. *Thread-safe.*"""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._methods: list[WeakMethod[_Method]] = []

    def add(self, method: _Method) -> None:
        with self._lock:
            # Weak references: threads with a reference to the metrics must not keep the objects alive.
            self._methods = [method for method in self._methods if method()] + [WeakMethod(method)]

    def __iter__(self) -> Iterator[_Method]:
        return (method for reference in self._methods if (method := reference()))


LookupNs: TypeAlias = tuple[int, int, int, int, int]
"""Nanoseconds of one lookup: in total; then its stages `adopt`, `wait`, `query` and `finish`."""


class LookupTimes:
    """Times of one model's lookups since the start. Change and read them only while holding `Metrics.lock`.

    Attributes:
        total: total durations.
        stages: one duration per lookup that had the stage, over all its tables.
        recent: buffered `LookupNs` for `fold`.
    """

    OF_EVERY_LOOKUP: Final = ("adopt", "wait", "query", "finish")
    MOST_RECENT: Final = 256 * (1 + len(OF_EVERY_LOOKUP))

    __slots__ = ("_of_every_lookup", "recent", "stages", "total")

    def __init__(self) -> None:
        self.total = Times()
        self.stages = {stage: Times() for stage in STAGES}
        self._of_every_lookup = [self.total, *(self.stages[stage] for stage in self.OF_EVERY_LOOKUP)]
        # The times that every lookup has are buffered, and sorted into buckets a few hundred at once: adding five times to
        # their buckets takes 2 us, buffering them 0.1 us.
        self.recent = array("q")

    def fold(self) -> None:
        """Add the buffered times; called before the others are read, and at `MOST_RECENT`."""
        kinds = len(self._of_every_lookup)
        times = np.array(self.recent, np.int64).reshape(-1, kinds)
        del self.recent[:]
        size = len(self.total.bounds_ns) + 1
        places = np.searchsorted(self.total.bounds_ns, times) + size * np.arange(kinds)
        counts = np.bincount(places.ravel(), minlength=kinds * size).reshape(kinds, size)
        for series, new, total_ns in zip(self._of_every_lookup, counts.tolist(), times.sum(axis=0).tolist(), strict=True):
            series.add_buckets(new, total_ns)

    def latencies(self) -> tuple[Latency, dict[str, Latency]]:
        """Return the total times, and those of the stages that any lookup had."""
        self.fold()
        return self.total.latency(), {stage: times.latency() for stage, times in self.stages.items() if any(times.buckets)}


class Metrics(Collector):
    """All counters of one parameter server, for Prometheus, `HPS.stats` and the service. *Thread-safe.*

    Attributes:
        models: the models that have series.
        registry: exposes them to prometheus-client.
        lock: guards every `TableCounters`, `DeviceCounters` and `Times`.
        feeds: methods that return how far tables have followed the log of their updates.
        settling: methods that add the counts of devices, called before counters are read.
        others: methods that return further families.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.lock = threading.Lock()
        self.models = Models()
        self._tables = Series(self.models, _TABLE, lambda labels: TableCounters())
        self._devices = Series(self.models, ("model", "device"), lambda labels: DeviceCounters())
        self._lookups = Series(self.models, ("model",), lambda labels: LookupTimes())
        self._scores = Series(self.models, ("model",), lambda labels: ScoreCounters())
        self._fetches = Series(self.models, ("model", "tier"), lambda labels: Times())
        self._applied = Series(self.models, ("tier",), lambda labels: Times(LOOKUP_BUCKETS))
        self._visible = Series(self.models, _TABLE, lambda labels: Times(_VISIBLE_BUCKETS))
        self._values: list[Values] = []
        self.feeds = LiveMethods[Callable[[], Sequence[UpdateStatus]]]()
        self.settling = LiveMethods[Callable[[], None]]()
        self.others = LiveMethods[Callable[[], Iterator[Family]]]()
        self._queues = defaultdict[str, LiveMethods[Callable[[], int]]](LiveMethods)  # by type of work
        self.tier_errors = self._counter(
            "hps_tier_errors", "Failed reads and writes of a database.", "model", "tier", "operation"
        )
        self.table_quarantined = self._gauge(
            "hps_table_quarantined", "1 while the volatile database is skipped because it may hold outdated vectors.", "tag"
        )
        self.promoted = self._counter("hps_promoted_keys", "Rows copied from the persistent to the volatile database.", *_TABLE)
        self.background_dropped = self._counter(
            "hps_background_dropped_batches", "Background batches dropped because their queue was full.", "work"
        )
        self.background_errors = self._counter("hps_background_failed_batches", "Background batches that failed.", "work")
        self.workspace_timeouts = self._counter(
            "hps_workspace_timeouts", "Lookups refused because every workspace stayed busy.", "model"
        )
        self.coalesced_keys = self._counter(
            "hps_coalesced_keys", "Missing keys fetched by another lookup at the same time.", *_TABLE
        )
        self.miss_path = self._gauge(
            "hps_miss_path",
            "1 for the path of keys that the embedding cache misses and host memory has: link (the device reads them there) or "
            "copy (the host fetches them).",
            *_TABLE,
            "path",
        )
        self.model_shard = self._gauge("hps_model_shard", "The share of its tables that a model serves, from 0.", "model")
        self.model_shards = self._gauge(
            "hps_model_shards", "Number of shares of a model's tables; 1 if they are not split.", "model"
        )
        self.model_changes = self._counter("hps_model_changes", "Changes of a model, by outcome.", "model", "change", "outcome")
        self.model_changes.labels("", "deploy", "failed")  # exposed while it is 0, too
        self.version_checks = self._counter(
            "hps_version_checks", "Checks of versions before their takeover, by outcome.", "model", "check", "outcome"
        )
        self.rollout_ends = self._counter(
            "hps_rollout_ends", "Canaries and shadows of a model that have ended, by outcome.", "model", "outcome"
        )
        self.trace_keys = self._counter(
            "hps_trace_keys",
            "Keys of a recording: recorded, dropped (its thread was too slow), unread (on a device) or lost (write failed).",
            "outcome",
        )
        self.refreshes = self._counter("hps_refreshes", "Complete refreshes of a model's caches.", "model")
        self.refresh_failures = self._counter("hps_failed_refreshes", "Failed refreshes of a model's caches.", "model")
        self.refreshed_rows = self._counter(
            "hps_refreshed_rows", "Resident rows updated or erased by refreshes.", "model", "outcome"
        )
        self.refresh_seconds = self._gauge("hps_refresh_seconds", "Duration of the last complete refresh.", "model")
        self.refresh_succeeded_at = self._gauge(
            "hps_refresh_succeeded_timestamp_seconds", "End of the last complete refresh, in seconds since 1970.", "model"
        )
        self.update_rows = self._counter(
            "hps_update_rows", "Rows of the update log that were applied to every tier.", *_TABLE, "change"
        )
        self.update_stale_rows = self._counter(
            "hps_update_stale_rows", "Applied rows that were older than the stored ones, and had no effect.", *_TABLE
        )
        self.update_skipped_rows = self._counter(
            "hps_update_skipped_rows", "Rows of the update log that belong to other shares of the table.", *_TABLE
        )
        self.expired_rows = self._counter(
            "hps_expired_rows", "Rows removed, or not stored on arrival, since they were not written for row_ttl_s.", *_TABLE
        )
        self.future_rows = self._counter(
            "hps_future_rows",
            "Rows of an aging table whose time was more than a second ahead: they count as written on arrival.",
            *_TABLE,
        )
        self.update_future_times = self._counter(
            "hps_update_future_times", "Messages that claimed a time more than a second ahead of this machine's clock.", *_TABLE
        )
        self.update_bytes = self._counter("hps_update_bytes", "Bytes of applied messages.", *_TABLE)
        self.update_dead_letters = self._counter(
            "hps_update_dead_letters", "Messages that could not be applied, by reason.", *_TABLE, "reason"
        )
        self.update_failures = self._counter(
            "hps_update_failures", "Update batches that failed on a database or a device; each is retried.", *_TABLE
        )
        self.update_gaps = self._counter(
            "hps_update_gaps", "Gaps in a partition of the log: messages deleted before they were read.", *_TABLE
        )
        self.registry.register(self)

    def _counter(self, name: str, text: str, *labels: str) -> Values:
        return self._new("counter", name, text, labels)

    def _gauge(self, name: str, text: str, *labels: str) -> Values:
        return self._new("gauge", name, text, labels)

    def _new(self, kind: str, name: str, text: str, labels: tuple[str, ...]) -> Values:
        self._values.append(Values(self.models, kind, name, text, labels))
        return self._values[-1]

    def table(self, model: str, table: str) -> TableCounters:
        return self._tables.of(model, table)

    def device(self, model: str, device_id: int | None) -> DeviceCounters:
        return self._devices.of(model, "cpu" if device_id is None else str(device_id))

    def lookup_times(self, model: str) -> LookupTimes:
        return self._lookups.of(model)

    def scores(self, model: str) -> ScoreCounters:
        return self._scores.of(model)

    def fetch_times(self, model: str, tier: str) -> Times:
        return self._fetches.of(model, tier)

    @contextmanager
    def applying(self, tier: str) -> Iterator[None]:
        """Time the application of a batch of online updates to a tier."""
        started = perf_counter_ns()
        try:
            yield
        finally:
            with self.lock:
                self._applied.of(tier).add(perf_counter_ns() - started)

    def observe_visible(self, model: str, table: str, ages_s: npt.NDArray[np.float64], rows: IndexArray) -> None:
        """Count updated rows by their delay from creation until lookups see them.

        Args:
            ages_s: (n,) float64, delay per message; a negative delay, from a differing clock, counts as 0.
            rows: (n,) int64, rows per message.
        """
        ages_s = np.maximum(ages_s, 0.0)
        counts = np.bincount(np.searchsorted(_VISIBLE_BUCKETS, ages_s), rows, len(_VISIBLE_BUCKETS) + 1).astype(np.int64)
        with self.lock:
            self._visible.of(model, table).add_buckets(counts.tolist(), round(1e9 * float(ages_s @ rows)))

    def updates(self) -> list[UpdateStatus]:
        return [status for feed in self.feeds for status in feed()]

    def show_queue(self, work: str, waiting: Callable[[], int]) -> None:
        """Show the number of waiting background batches that a method returns, while its object lives."""
        with self.lock:
            self._queues[work].add(waiting)

    def count_dropped(self, work: str) -> None:
        self.background_dropped.labels(work).inc()

    def count_failed(self, work: str) -> None:
        self.background_errors.labels(work).inc()

    def queues(self) -> dict[str, int]:
        """Return the number of waiting batches in all queues, by type of work."""
        with self.lock:
            queues = list(self._queues.items())
        waiting = {work: [length() for length in lengths] for work, lengths in queues}
        return {work: sum(lengths) for work, lengths in waiting.items() if lengths}

    def _settle(self) -> None:
        for settle in self.settling:
            with suppress(HPSError):  # a device failed
                settle()

    @contextmanager
    def changing(
        self, change: str, *, done: str, failed: str, outcome: Callable[[Exception], str] = lambda error: "failed"
    ) -> Iterator[None]:
        """Count a change of a model by its outcome, unless the model or version is unknown.

        Args:
            done, failed: model under which each outcome is counted; the empty name if the model then has no series.
            outcome: names the outcome of a change that raised an error, which may be no failure.
        """
        try:
            yield
        except UnknownModelError:
            raise
        except Exception as error:
            self.model_changes.labels(failed, change, outcome(error)).inc()
            raise
        self.model_changes.labels(done, change, "failed").inc(0)  # makes the first failure visible as an increase
        self.model_changes.labels(done, change, "done").inc()

    def hit_rates(self, model: str) -> dict[str, float]:
        """Return each tier's hit rate over all tables of a model; without tiers that were not queried."""
        self._settle()
        with self.lock:
            tables = [counters for (name, _), counters in self._tables.items() if name == model]
            hits = [sum(table.hits[place] for table in tables) for place in range(len(TIERS))]
            misses = [sum(table.misses[place] for table in tables) for place in range(len(TIERS))]
        return {tier: hit / (hit + miss) for tier, hit, miss in zip(TIERS, hits, misses, strict=True) if hit + miss}

    def sums(self) -> tuple[int, int, int, Latency]:
        """Return requested keys, hits and misses of embedding caches, and times of lookups, over all models."""
        tables = self._read(self._tables, _TABLE, lambda table: (table.keys, table.hits[0], table.misses[0]))
        keys, hits, misses = (sum(counts[place] for _, counts in tables) for place in range(3))
        lookups = self._read(self._lookups, ("model",), lambda times: times.latencies()[0])
        return keys, hits, misses, reduce(Latency.plus, (latency for _, latency in lookups), Latency())

    def counted(self, model: str, tables: Sequence[str]) -> tuple[list[TableCounters], Latency, dict[str, Latency]]:
        """Return a consistent copy of table counters, lookup times and stage times."""
        counters, times = [self.table(model, table) for table in tables], self.lookup_times(model)
        with self.lock:
            return [counter.copy() for counter in counters], *times.latencies()

    def _read(self, series: Series[_C], names: Sequence[str], read: Callable[[_C], _R]) -> list[tuple[str, _R]]:
        """Read counters one by one, since lookups wait for the lock; return them by their labels."""
        found = []
        for labels, counter in in_turns(series.items(), _READ):
            with self.lock:
                value = read(counter)
            found.append((label_text(names, labels), value))
        return found

    def families(self) -> Iterator[Family]:
        self._settle()
        tables = self._read(self._tables, _TABLE, TableCounters.copy)
        devices = self._read(self._devices, ("model", "device"), lambda device: device.lookups)
        lookups = self._read(self._lookups, ("model",), LookupTimes.latencies)
        fetches = self._read(self._fetches, ("model", "tier"), Times.latency)
        visible = self._read(self._visible, _TABLE, Times.latency)
        applied = self._read(self._applied, ("tier",), Times.latency)
        totals = [(labels, total) for labels, (total, _) in lookups]
        stages = [
            (f'{labels},stage="{stage}"', times) for labels, (_, by_stage) in lookups for stage, times in by_stage.items()
        ]
        keys = [(labels, table.keys) for labels, table in tables]
        yield family("counter", "hps_lookup_keys", "Requested keys with duplicates.", keys)
        for name, text, counts in (
            ("hps_hits", "Keys found in a tier.", [(labels, table.hits) for labels, table in tables]),
            ("hps_misses", "Keys not found in a tier.", [(labels, table.misses) for labels, table in tables]),
        ):
            by_tier = [
                (f'{labels},tier="{tier}"', n) for labels, numbers in counts for tier, n in zip(TIERS, numbers, strict=True)
            ]
            yield family("counter", name, text, by_tier)
        for name, text, attribute in (
            ("hps_default_keys", "Requested keys that no tier has.", "defaults"),
            ("hps_deferred_keys", "Keys answered with the default vector and fetched in the background.", "deferred"),
            ("hps_linked_keys", "Keys that a device read directly from host memory.", "linked"),
        ):
            yield family("counter", name, text, [(labels, getattr(table, attribute)) for labels, table in tables])
        yield family("counter", "hps_device_lookups", "Lookups by device.", devices)
        yield histogram("hps_lookup_seconds", "Duration of a lookup.", totals)
        yield histogram("hps_lookup_stage_seconds", "Duration of a stage of a lookup, over all its tables.", stages)
        yield from score_families([(label_text(["model"], labels), scores) for labels, scores in self._scores.items()])
        yield histogram("hps_fetch_seconds", "Duration of one fetch from a database.", fetches)
        yield histogram("hps_update_apply_seconds", "Duration of applying one batch of online updates, by tier.", applied)
        yield histogram(
            "hps_update_visible_seconds", "Delay from the creation of an updated row until every lookup sees it.", visible
        )
        yield from update_families(self.updates())
        queues = [(label_text(["work"], [work]), waiting) for work, waiting in self.queues().items()]
        yield family("gauge", "hps_background_batches", "Waiting background batches.", queues)
        compiled = [(label_text(["compiler"], [compiler]), done) for compiler, done in COMPILATIONS.all().items()]
        yield family("counter", "hps_compiled_kernels", "Compiled kernels.", [(labels, n) for labels, (n, _) in compiled])
        yield family(
            "counter", "hps_compile_seconds", "Time spent compiling kernels.", [(labels, s) for labels, (_, s) in compiled]
        )
        ended = [(label_text(["thread"], [name]), count) for name, count in THREADS.ended().items()]
        yield family("counter", "hps_threads_ended", "Threads that an error has ended.", ended)
        yield from (value.family() for value in self._values)
        for families in self.others:
            yield from families()

    def collect(self) -> Iterator[Metric]:
        """Return all metrics as prometheus-client's objects."""
        yield from text_string_to_metric_families(expose(self.families()).decode())
