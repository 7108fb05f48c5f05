"""Finds out what a parameter server holds, for `HPS.stats`: what is in this process at once, what needs I/O later."""

import logging
import os
import platform
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar
from weakref import WeakKeyDictionary

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

import hps
from hps.cache.base import CacheStats, DeviceMemory, EmbeddingCache
from hps.databases.base import UNBOUNDED_ROWS, Database, InProcessDatabase, TableStats
from hps.deployment import Deployment
from hps.errors import HPSError
from hps.live_models import LiveModels
from hps.lookup.session import Session
from hps.metrics import TIERS, Metrics, TableCounters
from hps.statistics import DeviceStatistics, ModelStatistics, ServerStatistics, TableStatistics, TierStatistics
from hps.updates.metrics import TableStatus

_log = logging.getLogger(__name__)
_MEASURED_EVERY_S = 15.0
_CLOSE_WAIT_S = 10.0
_Known = TypeVar("_Known")


@dataclass(frozen=True, slots=True)
class _Measured:
    """What a database or a device has said, and when by `time.monotonic`."""

    value: TableStats | CacheStats | DeviceMemory
    at: float


class Survey:
    """Says what a parameter server holds. *Thread-safe.*

    What needs a database or a device is asked by one thread that lives as long as one round takes. A round begins when somebody
    asks and the last one is 15 s old: nobody waits for it, and what cannot be had keeps its last value.

    Args:
        live: the models in service.
        metrics: their counters.
        updates: how far tables have followed the log of their updates.
        clock: seconds from any start.
    """

    def __init__(
        self,
        live: LiveModels,
        metrics: Metrics,
        updates: Callable[[], Sequence[TableStatus]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._live = live
        self._metrics = metrics
        self._updates = updates
        self._clock = clock
        self._started = time.time()
        self._lock = threading.Lock()
        self._round: threading.Thread | None = None
        self._round_at: float | None = None
        self._closed = False
        metrics.show(self.collect)
        self._known: WeakKeyDictionary[Database | EmbeddingCache, dict[str | int, _Measured]] = WeakKeyDictionary()

    def statistics(self) -> ServerStatistics:
        """What is known now. Waits for no database and no device."""
        self._measure_soon()
        deployments = self._live.all()
        serving = dict(self._live.serving)
        lags: dict[str, float | None] = {}
        for status in self._updates():
            where = f"{status.model}.{status.table}"
            lag = status.lag_s
            before = lags.get(where, 0.0)
            lags[where] = None if lag is None or before is None else max(lag, before)
        return ServerStatistics(
            version=hps.__version__,
            started=self._started,
            memory_bytes=resident_bytes(),
            models=tuple(self._model(name, one) for name, one in serving.items()),
            devices=tuple(self._devices(deployments)),
            queues=self._metrics.queues(),
            updates=lags,
        )

    def collect(self) -> Iterator[Metric]:
        """Yield sizes in Prometheus' form, as `statistics` knows them."""
        build = GaugeMetricFamily("hps_build_info", "1, with what runs in its labels.", labels=["version", "python"])
        build.add_metric([hps.__version__, platform.python_version()], 1)
        stats = self.statistics()
        yield build
        yield from _sizes(stats)
        yield from _models(stats)
        available = GaugeMetricFamily(
            "hps_tier_available",
            "1 while the database of a tier is read or written, 0 while that is not tried after failures.",
            labels=["model", "tier", "operation"],
        )
        for name, deployment in dict(self._live.serving).items():
            for tier in deployment.chain.tiers():
                available.add_metric([name, tier.name, "read"], tier.read)
                available.add_metric([name, tier.name, "write"], tier.written)
        yield available

    def measure(self) -> None:
        """Ask all databases and devices now; returns when they have answered, or failed."""
        deployments = self._live.all()
        tags = {table.tag for deployment in deployments for table in deployment.tables}
        with self._lock:  # tags come and go with the versions of models
            for whom, known in self._known.items():
                for gone in known.keys() - tags if isinstance(whom, Database) else ():
                    del known[gone]
        for deployment in deployments:
            for index, table in enumerate(deployment.tables):
                for database in deployment.chain.databases:
                    if not isinstance(database, InProcessDatabase):
                        self._ask(database, table.tag, partial(database.stats, table.tag))
                for cache in deployment.caches:
                    if cache.device != "cpu":
                        self._ask(cache, index, partial(cache.stats, index))
            for cache in deployment.caches:
                self._ask(cache, "device", cache.device_memory)

    def close(self) -> None:
        """Ask nobody any more, and wait for the round that is under way."""
        with self._lock:
            self._closed, running = True, self._round
        if running is not None:
            running.join(_CLOSE_WAIT_S)

    def _measure_soon(self) -> None:
        with self._lock:
            now = self._clock()
            if self._closed or self._round is not None:
                return
            if self._round_at is not None and now - self._round_at < _MEASURED_EVERY_S:
                return
            self._round_at, thread = now, threading.Thread(target=self._run, name="hps-survey", daemon=True)
            with suppress(RuntimeError):  # no thread is to be had: what was known stays
                thread.start()
                self._round = thread

    def _run(self) -> None:
        try:
            self.measure()
        except Exception:  # noqa: BLE001 - logged with its traceback; it is asked again
            _log.exception("asking databases and devices for their sizes")
        finally:
            with self._lock:
                self._round = None

    def _ask(self, whom: Database | EmbeddingCache, what: str | int, ask: Callable[[], object]) -> None:
        if self._closed:
            return
        with suppress(HPSError):  # it is down, or its model is going; what was known stays, and gets older
            value = ask()
            with self._lock:
                self._known.setdefault(whom, {})[what] = _Measured(value, self._clock())  # type: ignore[arg-type]

    def _last(self, whom: Database | EmbeddingCache, what: str | int, kind: type[_Known]) -> tuple[_Known | None, float]:
        """What was measured last, and its age."""
        with self._lock:
            measured = self._known.get(whom, {}).get(what)
        if measured is None or not isinstance(measured.value, kind):
            return None, 0.0
        return measured.value, max(0.0, self._clock() - measured.at)

    def _model(self, name: str, deployment: Deployment) -> ModelStatistics:
        counters = [self._metrics.table(table.model_name, table.table_name) for table in deployment.tables]
        times = self._metrics.lookup_times(name)
        with self._metrics.lock:
            counted = [replace(one, hits=[*one.hits], misses=[*one.misses]) for one in counters]
            times.fold()
            lookups = times.whole.latency()
            stages = {stage: one.latency() for stage, one in times.stages.items() if any(one.buckets)}
        workspaces = [session.workspaces for session in dict.fromkeys(deployment.sessions.values())]
        return ModelStatistics(
            name=name,
            version=deployment.version,
            versions=tuple((one.version, state) for one, state in self._live.versions(name)),
            since=deployment.since,
            lookups=lookups,
            stages=stages,
            workspaces=sum(size for size, _ in workspaces),
            busy_workspaces=sum(busy for _, busy in workspaces),
            tables=tuple(self._table(deployment, index, one) for index, one in enumerate(counted)),
        )

    def _table(self, deployment: Deployment, index: int, counters: TableCounters) -> TableStatistics:
        table = deployment.tables[index]
        paths = [session.miss_paths[index] for session in deployment.sessions.values() if session.miss_paths]
        return TableStatistics(
            name=table.table_name,
            dim=table.dim,
            rows=deployment.rows[index] if deployment.rows else 0,
            keys=counters.keys,
            defaults=counters.defaults,
            deferred=counters.deferred,
            linked=counters.linked,
            miss_path=paths[0] if paths else "",
            tiers=(*self._caches(deployment, index, counters), *self._databases(deployment, index, counters)),
        )

    def _caches(self, deployment: Deployment, index: int, counters: TableCounters) -> Iterator[TierStatistics]:
        dim = deployment.tables[index].dim
        for place, session in enumerate(_cached(deployment)):
            cache = session.cache
            if cache is None:
                continue
            stats, age = self._cache_stats(cache, index)
            vector_bytes = None if stats is None else min(stats.size_bytes, 4 * dim * stats.capacity_rows)
            yield TierStatistics(
                tier=TIERS[0],
                kind=cache.device,
                device=_device(cache),
                rows=None if stats is None else stats.resident_rows,
                capacity_rows=None if stats is None else stats.capacity_rows,
                vector_bytes=vector_bytes,
                overhead_bytes=None if stats is None or vector_bytes is None else stats.size_bytes - vector_bytes,
                hits=0 if place else counters.hits[0],
                misses=0 if place else counters.misses[0],
                inserts=None if stats is None else stats.inserts,
                evictions=None if stats is None else stats.evictions,
                available=True,
                age_s=age,
            )

    def _databases(self, deployment: Deployment, index: int, counters: TableCounters) -> Iterator[TierStatistics]:
        table = deployment.tables[index]
        for state in deployment.chain.tiers(table):
            name, database = state.name, state.database
            stats: TableStats | None = None
            age = 0.0
            if isinstance(database, InProcessDatabase):
                with suppress(HPSError):  # it was dropped meanwhile
                    stats = database.stats(table.tag)
            else:
                stats, age = self._last(database, table.tag, TableStats)
            place = TIERS.index(name)
            yield TierStatistics(
                tier=name,
                kind=database.kind,
                device="",
                rows=None if stats is None else stats.rows,
                capacity_rows=None if stats is None or stats.capacity_rows >= UNBOUNDED_ROWS else stats.capacity_rows,
                vector_bytes=None if stats is None else stats.vector_bytes,
                overhead_bytes=None if stats is None or stats.overhead_bytes < 0 else stats.overhead_bytes,
                hits=counters.hits[place],
                misses=counters.misses[place],
                inserts=None,
                evictions=None if stats is None else stats.evictions,
                available=state.read,
                age_s=age,
            )

    def _cache_stats(self, cache: EmbeddingCache, index: int) -> tuple[CacheStats | None, float]:
        if cache.device != "cpu":
            return self._last(cache, index, CacheStats)
        with suppress(HPSError):  # its model is going
            return cache.stats(index), 0.0
        return None, 0.0

    def _devices(self, deployments: Sequence[Deployment]) -> Iterator[DeviceStatistics]:
        by_device: dict[str, list[EmbeddingCache]] = {}
        pinned: dict[str, int] = {}
        for deployment in deployments:
            for session in _cached(deployment):
                if session.cache is not None:
                    device = _device(session.cache)
                    by_device.setdefault(device, []).append(session.cache)
                    pinned[device] = pinned.get(device, 0) + _pinned_bytes(deployment, session)
        for device, caches in by_device.items():
            memory = next((found for one in caches if (found := self._last(one, "device", DeviceMemory)[0])), None)
            stats = [self._cache_stats(cache, index)[0] for cache in caches for index in range(len(cache.tables))]
            yield DeviceStatistics(
                device=device,
                name=memory.name if memory else "",
                memory_bytes=memory.total_bytes if memory else 0,
                free_bytes=memory.free_bytes if memory else 0,
                cache_bytes=sum(one.size_bytes for one in stats if one is not None),
                workspace_bytes=None,
                pinned_bytes=pinned[device],
            )


def _sizes(stats: ServerStatistics) -> Iterator[Metric]:
    """What tiers and devices hold."""
    labels = ["model", "table", "tier", "device"]
    families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {
        "rows": GaugeMetricFamily("hps_tier_rows", "Rows of a table in a tier.", labels=labels),
        "capacity_rows": GaugeMetricFamily("hps_tier_capacity_rows", "Rows that it may hold, if bounded.", labels=labels),
        "vector_bytes": GaugeMetricFamily("hps_tier_vector_bytes", "Memory or disk that its vectors take.", labels=labels),
        "overhead_bytes": GaugeMetricFamily("hps_tier_overhead_bytes", "What it takes beside them.", labels=labels),
        "inserts": CounterMetricFamily("hps_tier_inserts", "Rows that came into a tier.", labels=labels),
        "evictions": CounterMetricFamily("hps_tier_evictions", "Rows that others pushed out of a tier.", labels=labels),
        "age_s": GaugeMetricFamily("hps_tier_age_seconds", "How old rows and bytes of a tier are.", labels=labels),
    }
    for model in stats.models:
        for table in model.tables:
            for tier in table.tiers:
                for name, family in families.items():
                    if (value := getattr(tier, name)) is not None:
                        family.add_metric([model.name, table.name, tier.tier, tier.device], value)
    yield from families.values()
    devices = {
        "memory_bytes": GaugeMetricFamily("hps_device_memory_bytes", "Memory of a device.", labels=["device"]),
        "free_bytes": GaugeMetricFamily("hps_device_free_bytes", "Of that, free for any process.", labels=["device"]),
        "cache_bytes": GaugeMetricFamily("hps_device_cache_bytes", "Of that, in embedding caches.", labels=["device"]),
        "pinned_bytes": GaugeMetricFamily(
            "hps_device_pinned_bytes", "Memory of the host that is pinned for a device to read tables.", labels=["device"]
        ),
    }
    for device in stats.devices:
        for name, family in devices.items():
            if device.memory_bytes or name not in ("memory_bytes", "free_bytes"):  # else it has not been asked yet
                family.add_metric([device.device], getattr(device, name))
    yield from devices.values()


def _models(stats: ServerStatistics) -> Iterator[Metric]:
    """Versions and workspaces."""
    versions = GaugeMetricFamily("hps_model_version", "1 for each version there is.", labels=["model", "version", "state"])
    workspaces = GaugeMetricFamily("hps_workspaces", "Lookups that may run at once.", labels=["model"])
    busy = GaugeMetricFamily("hps_busy_workspaces", "Lookups that run.", labels=["model"])
    for model in stats.models:
        for version, state in model.versions:
            versions.add_metric([model.name, version, state], 1)
        workspaces.add_metric([model.name], model.workspaces)
        busy.add_metric([model.name], model.busy_workspaces)
    yield from (versions, workspaces, busy)


def resident_bytes() -> int:
    """Memory of this process that is resident; 0 where the system does not say."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _cached(deployment: Deployment) -> list[Session]:
    """The sessions with a cache, each once."""
    return [one for one in dict.fromkeys(deployment.sessions.values()) if one.cache is not None]


def _pinned_bytes(deployment: Deployment, session: Session) -> int:
    """Host memory that is pinned for the tables that a device reads there."""
    total = 0
    for table, path in zip(deployment.tables, session.miss_paths, strict=False):
        with suppress(HPSError):  # it was dropped meanwhile
            if path == "link" and (host := deployment.chain.host_table(table)):
                total += host.pinned_bytes
    return total


def _device(cache: EmbeddingCache) -> str:
    return "cpu" if cache.device == "cpu" else str(cache.device_id)
