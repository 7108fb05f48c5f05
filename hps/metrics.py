"""Prometheus metrics of lookups and tiers, counted per batch, never per key."""

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from weakref import WeakMethod

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, Metric

from hps.errors import HPSError

_LOOKUP_BUCKETS = (2.5e-5, 5e-5, 1e-4, 2e-4, 3e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2.5e-2, 0.1, 0.5, 1.0, 5.0)
TIERS = ("embedding_cache", "volatile_db", "persistent_db")


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
        defaults: distinct keys that got the default vector because no tier has them.
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
        self._settling: list[WeakMethod[Callable[[], None]]] = []
        self.registry.register(self)
        registry = self.registry
        self.lookup_seconds = Histogram(
            "hps_lookup_seconds", "Time of a whole lookup.", ["model"], buckets=_LOOKUP_BUCKETS, registry=registry
        )
        self.fetch_seconds = Histogram(
            "hps_fetch_seconds", "Time of one fetch from a database.", ["tier"], buckets=_LOOKUP_BUCKETS, registry=registry
        )
        self.apply_seconds = Histogram(
            "hps_update_apply_seconds",
            "Time to apply one batch of online updates, by tier.",
            ["tier"],
            buckets=_LOOKUP_BUCKETS,
            registry=registry,
        )
        self.tier_errors = Counter(
            "hps_tier_errors", "Failed reads and writes of a database.", ["tier", "operation"], registry=registry
        )
        self.tier_available = Gauge(
            "hps_tier_available",
            "1 while a database is read or written, 0 while that is not tried after failures.",
            ["tier", "operation"],
            registry=registry,
        )
        self.table_quarantined = Gauge(
            "hps_table_quarantined",
            "1 while the volatile database is skipped because it may hold outdated vectors.",
            ["tag"],
            registry=registry,
        )
        self.promoted = Counter(
            "hps_promoted_keys", "Vectors copied from the persistent into the volatile database.", registry=registry
        )
        self.background_batches = Gauge(
            "hps_background_batches", "Batches that wait for background work.", ["work"], registry=registry
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
            "hps_coalesced_keys", "Missing keys that shared the fetch of another lookup.", registry=registry
        )
        self.miss_path = Gauge(
            "hps_miss_path",
            "1 for what answers a key that the embedding cache misses and host memory has: link, the device reads it there; "
            "copy, the host fetches it.",
            ["model", "table", "path"],
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

    def settle_by(self, settle: Callable[[], None]) -> None:
        """Call a method, as long as its object lives, before counters are read: it adds what devices have counted."""
        with self.lock:
            self._settling = [one for one in self._settling if one()] + [WeakMethod(settle)]

    def _settle(self) -> None:
        for one in self._settling:
            if settle := one():
                with suppress(HPSError):  # a device failed
                    settle()

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
        defaults = CounterMetricFamily(
            "hps_default_keys", "Keys that no tier has; a lookup counts each once, or as often as it was sent.", labels=labels
        )
        deferred = CounterMetricFamily("hps_deferred_keys", "Keys that got the default and are fetched later.", labels=labels)
        linked = CounterMetricFamily("hps_linked_keys", "Keys that a device read in host memory by itself.", labels=labels)
        hits = CounterMetricFamily("hps_hits", "Keys that a tier answered.", labels=[*labels, "tier"])
        misses = CounterMetricFamily("hps_misses", "Keys that a tier did not have.", labels=[*labels, "tier"])
        lookups = CounterMetricFamily(
            "hps_device_lookups", "Lookups that the embedding cache of a device was asked.", labels=["model", "device"]
        )
        self._settle()
        with self.lock:
            for device in self._devices.values():
                lookups.add_metric([device.model, device.device], device.lookups)
            for counters in self._tables.values():
                where = [counters.model, counters.table]
                keys.add_metric(where, counters.keys)
                defaults.add_metric(where, counters.defaults)
                deferred.add_metric(where, counters.deferred)
                linked.add_metric(where, counters.linked)
                for tier, hit, miss in zip(TIERS, counters.hits, counters.misses, strict=True):
                    hits.add_metric([*where, tier], hit)
                    misses.add_metric([*where, tier], miss)
        yield from (keys, hits, misses, defaults, deferred, linked, lookups)
