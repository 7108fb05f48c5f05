"""Prometheus metrics of lookups and tiers, counted per batch, never per key."""

import threading
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final
from weakref import WeakMethod

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from hps.errors import HPSError, UnknownModelError
from hps.statistics import Latency
from hps.tracing import STAGES

_STAGE_BUCKETS = (1e-6, 2.5e-6, 5e-6, 1e-5)
_LOOKUP_BUCKETS = (2.5e-5, 5e-5, 1e-4, 2e-4, 3e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2.5e-2, 0.1, 0.5, 1.0, 5.0)
_BOUNDS = (*_STAGE_BUCKETS, *_LOOKUP_BUCKETS)
_BOUNDS_NS = tuple(round(bound * 1e9) for bound in _BOUNDS)
TIERS = ("embedding_cache", "volatile_db", "persistent_db")


class Compilations:
    """Kernels that were compiled by this process, by compiler. *Thread-safe.*"""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._done: dict[str, tuple[int, float]] = {}

    def add(self, compiler: str, kernels: int, seconds: float) -> None:
        """Count kernels."""
        with self._lock:
            count, total = self._done.get(compiler, (0, 0.0))
            self._done[compiler] = count + kernels, total + seconds

    def all(self) -> dict[str, tuple[int, float]]:
        """How many kernels, and their seconds, by compiler."""
        with self._lock:
            return dict(self._done)


COMPILATIONS: Final = Compilations()
"""Of this process: its servers share the kernels."""


@dataclass(slots=True)
class TableCounters:
    """Counts of one table since the start. Change them only while holding `Metrics.lock`.

    The counts are plain integers, and one lock guards those of a whole batch: one labelled counter of prometheus-client costs
    0.65 us, which a lookup of 26 tables would pay 52 times.

    Attributes:
        keys: requested keys, including duplicates.
        hits: keys that each tier answered, in the order of `TIERS`. The embedding cache counts duplicates, and so
            does a device that reads the volatile database; otherwise the databases count distinct keys.
        misses: keys that each tier was asked for and did not have.
        defaults: requested keys, including duplicates, that got the default vector because no tier has them. Of deferred keys
            that is known later; each then counts as often as the missing keys of its table did on average in that lookup.
        deferred: keys that got the default vector and are fetched in the background (hit rate threshold).
        linked: keys that a device answered from the host's memory by itself; they are hits of the volatile database, too.
    """

    model: str
    table: str
    keys: int
    hits: list[int]
    misses: list[int]
    defaults: int
    deferred: int
    linked: int = 0

    def count_linked(self, linked: int, absent: int) -> None:
        """Count keys, duplicates included, for which a device read the volatile database by itself.

        Args:
            linked: it found these.
            absent: it found that no tier has these.
        """
        volatile = TIERS.index("volatile_db")
        self.linked += linked
        self.hits[volatile] += linked
        self.misses[volatile] += absent
        self.defaults += absent


@dataclass(slots=True)
class DeviceCounters:
    """Counts of one model on one device since the start. Change them only while holding `Metrics.lock`.

    Attributes:
        lookups: those that its embedding cache was asked.
    """

    model: str
    device: str
    lookups: int = 0


@dataclass(slots=True)
class Times:
    """How often something took how long. Change it only while holding `Metrics.lock`.

    A histogram of prometheus-client takes a lock and walks through its buckets: 1.2 us for each time, this takes 0.4 us.

    Attributes:
        buckets: how many took at most each bound and more than the one before; the last: more than all bounds.
        total_ns: all of them.
    """

    buckets: list[int] = field(default_factory=lambda: [0] * (len(_BOUNDS) + 1))
    total_ns: int = 0

    def add(self, ns: int) -> None:
        """Count one."""
        self.buckets[bisect_left(_BOUNDS_NS, ns)] += 1
        self.total_ns += ns

    def latency(self) -> Latency:
        """All of it, as `HPS.stats` has it."""
        below = list(accumulate(self.buckets))
        return Latency(below[-1], self.total_ns / 1e9, tuple(zip(_BOUNDS, below, strict=False)))


class LookupTimes:
    """Times of one model's lookups since the start. Change and read them only while holding `Metrics.lock`.

    The times that every lookup has are kept as they come, and sorted into buckets a few hundred at once: to add five times to
    their buckets takes 2 us, to keep them 0.1 us.

    Attributes:
        whole: from the call to the answer.
        stages: one time for each lookup that had the stage: that of all tables together.
        recent: times that `fold` will add: nanoseconds of the whole, and of the stages `OF_EVERY_LOOKUP`, lookup by lookup.
    """

    OF_EVERY_LOOKUP: Final = ("adopt", "wait", "query", "finish")
    MOST_RECENT: Final = 256 * (1 + len(OF_EVERY_LOOKUP))

    __slots__ = ("_of_every_lookup", "recent", "stages", "whole")

    def __init__(self) -> None:
        self.whole = Times()
        self.stages = {stage: Times() for stage in STAGES}
        self._of_every_lookup = [self.whole, *(self.stages[stage] for stage in self.OF_EVERY_LOOKUP)]
        self.recent = array("q")

    def fold(self) -> None:
        """Add the recent times; to be called before the others are read, and when there are `MOST_RECENT`."""
        kinds = len(self._of_every_lookup)
        times = np.array(self.recent, np.int64).reshape(-1, kinds)
        del self.recent[:]
        size = len(_BOUNDS) + 1
        places = np.searchsorted(_BOUNDS_NS, times) + size * np.arange(kinds)
        counts = np.bincount(places.ravel(), minlength=kinds * size).reshape(kinds, size)
        for one, new, total_ns in zip(self._of_every_lookup, counts.tolist(), times.sum(axis=0).tolist(), strict=True):
            one.buckets = [have + more for have, more in zip(one.buckets, new, strict=True)]
            one.total_ns += total_ns


class Metrics:
    """The metrics of one parameter server, on a registry of its own. *Thread-safe.*

    Attributes:
        registry: what `/metrics` exposes; others may register their metrics on it.
        lock: guards every `TableCounters` and `DeviceCounters`.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.lock = threading.Lock()
        self._tables: dict[tuple[str, str], TableCounters] = {}
        self._devices: dict[tuple[str, str], DeviceCounters] = {}
        self._lookups: dict[str, LookupTimes] = {}  # by model
        self._fetches: dict[tuple[str, str], Times] = {}  # by model and tier
        self._queues: list[tuple[str, WeakMethod[Callable[[], int]]]] = []
        self._settling: list[WeakMethod[Callable[[], None]]] = []
        self._others: list[WeakMethod[Callable[[], Iterator[Metric]]]] = []
        self.registry.register(self)
        registry = self.registry
        self.apply_seconds = Histogram(
            "hps_update_apply_seconds",
            "Time to apply one batch of online updates, by tier.",
            ["tier"],
            buckets=_LOOKUP_BUCKETS,
            registry=registry,
        )
        self.tier_errors = Counter(
            "hps_tier_errors", "Failed reads and writes of a database.", ["model", "tier", "operation"], registry=registry
        )
        self.table_quarantined = Gauge(
            "hps_table_quarantined",
            "1 while the volatile database is skipped because it may hold outdated vectors.",
            ["tag"],
            registry=registry,
        )
        self.promoted = Counter(
            "hps_promoted_keys",
            "Vectors copied from the persistent into the volatile database.",
            ["model", "table"],
            registry=registry,
        )
        self.background_dropped = Counter(
            "hps_background_dropped_batches", "Batches dropped because the queue was full.", ["work"], registry=registry
        )
        self.background_errors = Counter(
            "hps_background_failed_batches", "Batches whose background work failed.", ["work"], registry=registry
        )
        self.workspace_timeouts = Counter(
            "hps_workspace_timeouts", "Lookups refused because every workspace stayed busy.", ["model"], registry=registry
        )
        self.coalesced_keys = Counter(
            "hps_coalesced_keys", "Missing keys that shared the fetch of another lookup.", ["model", "table"], registry=registry
        )
        self.miss_path = Gauge(
            "hps_miss_path",
            "1 for what answers a key that the embedding cache misses and host memory has: link, the device reads it there; "
            "copy, the host fetches it.",
            ["model", "table", "path"],
            registry=registry,
        )
        self.model_changes = Counter(
            "hps_model_changes", "Changes of a model, by how they ended.", ["model", "change", "outcome"], registry=registry
        )
        self.trace_keys = Counter(
            "hps_trace_keys",
            "Keys of a recording: recorded; or dropped, since its thread was too slow, unread on a device, lost with the file.",
            ["outcome"],
            registry=registry,
        )
        self.refreshes = Counter("hps_refreshes", "Whole refreshes of a model's caches.", ["model"], registry=registry)
        self.refresh_failures = Counter(
            "hps_failed_refreshes", "Refreshes that a database or a device ended.", ["model"], registry=registry
        )
        self.refreshed_rows = Counter(
            "hps_refreshed_rows", "Resident keys that a refresh updated or erased.", ["model", "outcome"], registry=registry
        )
        self.refresh_seconds = Gauge("hps_refresh_seconds", "Time of the last whole refresh.", ["model"], registry=registry)
        self.refresh_succeeded_at = Gauge(
            "hps_refresh_succeeded_timestamp_seconds", "When the last whole refresh ended.", ["model"], registry=registry
        )

    def table(self, model: str, table: str) -> TableCounters:
        """The counters of a table, created by the first call."""
        with self.lock:
            key = (model, table)
            if key not in self._tables:
                self._tables[key] = TableCounters(model, table, 0, [0, 0, 0], [0, 0, 0], 0, 0)
            return self._tables[key]

    def device(self, model: str, device_id: int | None) -> DeviceCounters:
        """The counters of a model on a device, created by the first call; None is the CPU."""
        with self.lock:
            key = (model, "cpu" if device_id is None else str(device_id))
            return self._devices.setdefault(key, DeviceCounters(*key))

    def lookup_times(self, model: str) -> LookupTimes:
        """The times of a model's lookups, created by the first call."""
        with self.lock:
            return self._lookups.setdefault(model, LookupTimes())

    def fetch_times(self, model: str, tier: str) -> Times:
        """The times of fetches from a database for a model, created by the first call."""
        with self.lock:
            return self._fetches.setdefault((model, tier), Times())

    def settle_by(self, settle: Callable[[], None]) -> None:
        """Call a method, as long as its object lives, before counters are read: it adds what devices have counted."""
        with self.lock:
            self._settling = [one for one in self._settling if one()] + [WeakMethod(settle)]

    def show(self, collect: Callable[[], Iterator[Metric]]) -> None:
        """Show the metrics of a method, too, as long as its object lives: threads hold these metrics, and must not hold it."""
        with self.lock:
            self._others = [one for one in self._others if one()] + [WeakMethod(collect)]

    def show_queue(self, work: str, waiting: Callable[[], int]) -> None:
        """Show how many batches wait for background work, by a method, as long as its object lives."""
        with self.lock:
            self._queues = [(name, one) for name, one in self._queues if one()] + [(work, WeakMethod(waiting))]

    def queues(self) -> dict[str, int]:
        """How many batches wait in all queues, by the work."""
        with self.lock:
            shown = list(self._queues)
        waiting: dict[str, int] = {}
        for work, one in shown:
            if length := one():
                waiting[work] = waiting.get(work, 0) + length()
        return waiting

    def _settle(self) -> None:
        for one in self._settling:
            if settle := one():
                with suppress(HPSError):  # a device failed
                    settle()

    @contextmanager
    def changing(self, model: str, change: str) -> Iterator[None]:
        """Count a change of a model by how it ends; of no model or version that nobody knows."""
        try:
            yield
        except UnknownModelError:
            raise
        except Exception:
            self.model_changes.labels(model, change, "failed").inc()
            raise
        self.model_changes.labels(model, change, "failed").inc(0)  # so that the first one shows as an increase
        self.model_changes.labels(model, change, "done").inc()

    def hit_rates(self, model: str) -> dict[str, float]:
        """By tier, the share of the keys that it was asked for and had, of all tables of a model; without tiers not asked."""
        self._settle()
        with self.lock:
            tables = [counters for counters in self._tables.values() if counters.model == model]
            hits = [sum(one.hits[place] for one in tables) for place in range(len(TIERS))]
            misses = [sum(one.misses[place] for one in tables) for place in range(len(TIERS))]
        asked = [hit + miss for hit, miss in zip(hits, misses, strict=True)]
        return {tier: hit / count for tier, hit, count in zip(TIERS, hits, asked, strict=True) if count}

    def collect(self) -> Iterator[Metric]:
        """Yield the counters of tables and devices in Prometheus' form."""
        labels = ["model", "table"]
        keys = CounterMetricFamily("hps_lookup_keys", "Requested keys.", labels=labels)
        defaults = CounterMetricFamily("hps_default_keys", "Requested keys that no tier has.", labels=labels)
        deferred = CounterMetricFamily("hps_deferred_keys", "Keys that got the default and are fetched later.", labels=labels)
        linked = CounterMetricFamily("hps_linked_keys", "Keys that a device read in host memory by itself.", labels=labels)
        hits = CounterMetricFamily("hps_hits", "Keys that a tier answered.", labels=[*labels, "tier"])
        misses = CounterMetricFamily("hps_misses", "Keys that a tier did not have.", labels=[*labels, "tier"])
        lookups = CounterMetricFamily(
            "hps_device_lookups", "Lookups that the embedding cache of a device was asked.", labels=["model", "device"]
        )
        whole = HistogramMetricFamily("hps_lookup_seconds", "Time of a whole lookup.", labels=["model"])
        stages = HistogramMetricFamily(
            "hps_lookup_stage_seconds", "Time of a stage of a lookup, of all its tables.", labels=["model", "stage"]
        )
        fetches = HistogramMetricFamily("hps_fetch_seconds", "Time of one fetch from a database.", labels=["model", "tier"])
        batches = GaugeMetricFamily("hps_background_batches", "Batches that wait for background work.", labels=["work"])
        for work, waiting in self.queues().items():
            batches.add_metric([work], waiting)
        self._settle()
        with self.lock:
            for model, times in self._lookups.items():
                times.fold()
                _add(whole, [model], times.whole)
                for stage, one in times.stages.items():
                    if any(one.buckets):
                        _add(stages, [model, stage], one)
            for where, one in self._fetches.items():
                _add(fetches, list(where), one)
            for device in self._devices.values():
                lookups.add_metric([device.model, device.device], device.lookups)
            for counters in self._tables.values():
                names = [counters.model, counters.table]
                keys.add_metric(names, counters.keys)
                defaults.add_metric(names, counters.defaults)
                deferred.add_metric(names, counters.deferred)
                linked.add_metric(names, counters.linked)
                for tier, hit, miss in zip(TIERS, counters.hits, counters.misses, strict=True):
                    hits.add_metric([*names, tier], hit)
                    misses.add_metric([*names, tier], miss)
        compiled = CounterMetricFamily("hps_compiled_kernels", "Kernels that were compiled.", labels=["compiler"])
        compiling = CounterMetricFamily("hps_compile_seconds", "Time of compiling kernels.", labels=["compiler"])
        for compiler, (count, seconds) in COMPILATIONS.all().items():
            compiled.add_metric([compiler], count)
            compiling.add_metric([compiler], seconds)
        yield from (compiled, compiling)
        yield from (keys, hits, misses, defaults, deferred, linked, lookups, whole, stages, fetches, batches)
        for other in self._others:
            if collect := other():
                yield from collect()


def _add(family: HistogramMetricFamily, labels: list[str], times: Times) -> None:
    below = [(str(bound), count) for bound, count in zip((*_BOUNDS, "+Inf"), accumulate(times.buckets), strict=True)]
    family.add_metric(labels, below, times.total_ns / 1e9)
