"""Collects statistics of a parameter server; figures that need I/O are gathered in the background."""

import logging
import math
import os
import platform
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from hps.cache.base import CacheStats, DeviceMemory, EmbeddingCache, leader_of
from hps.engine.session import Session
from hps.errors import HPSError
from hps.ground.threads.pacing import in_turns
from hps.ground.threads.workers import call_in_thread
from hps.ground.version import __version__
from hps.statistics.metrics import TIERS, Metrics, TableCounters
from hps.statistics.prometheus import Family, family, label_text, server_families
from hps.statistics.snapshot import (
    DeviceStatistics,
    FailedCheck,
    ModelStatistics,
    ServerStatistics,
    TableStatistics,
    TierStatistics,
    VersionChecks,
)
from hps.stores.base import UNBOUNDED_ROWS, Database, DiskSpace, TableStats
from hps.versions.checks.report import CheckReport
from hps.versions.deployment import Deployment
from hps.versions.fleet import FleetStatus
from hps.versions.live_models import LiveModels, shown_state

_log = logging.getLogger(__name__)
_MEASURED_EVERY_S = 15.0
_TABLES = 2  # read between two pauses
_CLOSE_WAIT_S = 10.0
_DEVICE, _DISK = "", "/"  # no tag of a table
_Known = TypeVar("_Known")


@dataclass(frozen=True, slots=True)
class _Answer:
    """Figures of a database or a device, and when they were read."""

    value: TableStats | CacheStats | DeviceMemory | DiskSpace | None
    at: float


class StatisticsCollector:
    """Collects the statistics of a parameter server. *Thread-safe.*

    A background thread queries the databases and devices that need I/O, once. A request for statistics starts such a round if
    the last one started at least 15 s ago, and does not wait for it. A source that fails keeps its last figures.

    Args:
        chosen_by: describes the pin or document that chose the serving version of a model.
        fleet: returns whether a model follows its serving document.
        rollout: describes the canary or shadow of a model.
    """

    def __init__(
        self,
        live: LiveModels,
        metrics: Metrics,
        chosen_by: Callable[[str, str], str] = lambda name, serving: "",
        fleet: Callable[[str], FleetStatus | None] = lambda name: None,
        rollout: Callable[[str], dict[str, Any] | None] = lambda name: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._live = live
        self._chosen_by = chosen_by
        self._fleet = fleet
        self._rollout = rollout
        self._metrics = metrics
        self._clock = clock
        self._started = time.time()
        self._lock = threading.Lock()
        self._round: Future[None] | None = None
        self._round_at = -math.inf
        self._closed = False
        metrics.others.add(self.families)
        # Answers of each database and cache by table tag, those of a cache about its device by _DEVICE, and those of a database
        # about its file system by _DISK.
        self._known: WeakKeyDictionary[Database | EmbeddingCache, dict[str, _Answer]] = WeakKeyDictionary()

    def statistics(self) -> ServerStatistics:
        """Return the current statistics without waiting for databases or devices."""
        deployments = self._live.all()
        serving = dict(self._live.serving)
        lags: dict[str, float | None] = {}
        for status in self._metrics.updates():
            where = f"{status.model}.{status.table}"
            lag = status.lag_s
            before = lags.get(where, 0.0)
            lags[where] = None if lag is None or before is None else max(lag, before)
        return ServerStatistics(
            version=__version__,
            started=self._started,
            memory_bytes=resident_bytes(),
            models=tuple(self.model(deployment) for deployment in serving.values()),
            devices=tuple(self._devices(deployments)),
            queues=self._metrics.queues(),
            updates=lags,
        )

    def families(self) -> Iterator[Family]:
        """Return the statistics as Prometheus metric families."""
        build = label_text(("version", "python"), (__version__, platform.python_version()))
        yield family("gauge", "hps_build_info", "1; the labels are the versions of hps and Python.", [(build, 1)])
        yield from server_families(self.statistics())
        available = [
            (label_text(("model", "tier", "operation"), (name, tier.name, operation)), value)
            for name, deployment in dict(self._live.serving).items()
            for tier in deployment.chain.tiers()
            for operation, value in (("read", tier.read), ("write", tier.written))
        ]
        yield family(
            "gauge",
            "hps_tier_available",
            "1 while the database of a tier is used, 0 while it is skipped after failures.",
            available,
        )
        tiers = {tier.name: tier.database for deployment in self._live.all() for tier in deployment.chain.tiers()}
        disks = [
            (label_text(["tier"], [name]), space)
            for name, database in tiers.items()
            if (space := self._last(database, _DISK, DiskSpace)[0]) is not None
        ]
        free = [(where, space.free_bytes) for where, space in disks]
        yield family("gauge", "hps_disk_free_bytes", "Free space of the file system of a tier's database.", free)
        sizes = [(where, space.total_bytes) for where, space in disks]
        yield family("gauge", "hps_disk_bytes", "Size of the file system of a tier's database.", sizes)
        followed = [
            (label_text(["model"], [life.name]), status)
            for life in self._live.models()
            if (status := self._fleet(life.name)) is not None
        ]
        yield family(
            "gauge",
            "hps_fleet_version_followed",
            "1 while a model serves what its serving.json says, 0 if not, or if it cannot be read.",
            [(where, int(status.follows)) for where, status in followed],
        )
        yield family(
            "gauge",
            "hps_fleet_read_age_seconds",
            "Time since the serving.json of a model was last read.",
            [(where, status.age_s) for where, status in followed if status.age_s is not None],
        )

    def measure(self) -> None:
        """Query all databases and devices; return when each has answered or failed."""
        deployments = self._live.all()
        tags = {table.tag for deployment in deployments for table in deployment.tables}
        with self._lock:  # forget the tags of versions that are gone
            for known in self._known.values():
                for tag in known.keys() - tags - {_DEVICE, _DISK}:
                    del known[tag]
        for database in {database for deployment in deployments for database in deployment.chain.databases}:
            self._query(database, _DISK, database.disk_space)
        for deployment in deployments:
            for index, table in enumerate(deployment.tables):
                for database in deployment.chain.databases:
                    if not database.in_process:
                        self._query(database, table.tag, partial(database.stats, database.stored(table).tag))
                for cache in deployment.device_caches:
                    if cache.device != "cpu":
                        self._query(cache, table.tag, partial(cache.stats, index))
            for cache in deployment.device_caches:
                self._query(cache, _DEVICE, cache.device_memory)

    def close(self) -> None:
        """Start no more rounds, and wait for the current one."""
        with self._lock:
            self._closed, current = True, self._round
        if current is not None:
            wait([current], _CLOSE_WAIT_S)

    def _measure_soon(self) -> None:
        with self._lock:
            now = self._clock()
            if self._closed or not (self._round is None or self._round.done()) or now - self._round_at < _MEASURED_EVERY_S:
                return
            self._round_at = now
            with suppress(RuntimeError):  # no thread can be started: the last figures stay
                self._round = call_in_thread("statistics", self._measure)

    def _measure(self) -> None:
        try:
            self.measure()
        except Exception:  # noqa: BLE001 - logged with its traceback; the next round may do better
            _log.exception("querying databases and devices for their sizes")

    def _query(self, source: Database | EmbeddingCache, what: str, read: Callable[[], object]) -> None:
        if self._closed:
            return
        with suppress(HPSError, OSError):  # the source is down or closing: the last figures stay
            value = read()
            with self._lock:
                self._known.setdefault(source, {})[what] = _Answer(value, self._clock())  # type: ignore[arg-type]

    def _last(self, source: Database | EmbeddingCache, what: str, kind: type[_Known]) -> tuple[_Known | None, float]:
        """Return the last answer and its age in seconds."""
        with self._lock:
            measured = self._known.get(source, {}).get(what)
        if measured is None or not isinstance(measured.value, kind):
            return None, 0.0
        return measured.value, max(0.0, self._clock() - measured.at)

    def model(self, deployment: Deployment) -> ModelStatistics:
        """Return the current statistics of a version in service."""
        self._measure_soon()
        name = deployment.config.model
        counted, lookups, stages = self._metrics.counted(name, [table.table_name for table in deployment.tables])
        workspaces = [session.workspaces for session in dict.fromkeys(deployment.sessions.values())]
        versions = self._live.versions(name)
        return ModelStatistics(
            name=name,
            version=deployment.version,
            versions=tuple((deployed.version, shown_state(deployed, state)) for deployed, state in versions),
            since=deployment.since,
            lookups=lookups,
            stages=stages,
            workspaces=sum(size for size, _ in workspaces),
            busy_workspaces=sum(busy for _, busy in workspaces),
            tables=tuple(self._table(deployment, index, table) for index, table in enumerate(in_turns(counted, _TABLES))),
            pinned=self._chosen_by(name, deployment.version),
            shard=str(deployment.config.share or ""),
            rollout=self._rollout(name),
            checks=tuple(_checks(deployed.checks) for deployed, _ in versions if deployed.checks is not None),
            fleet=self._fleet(name) is not None,
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
            row_dtype=table.row_dtype,
        )

    def _caches(self, deployment: Deployment, index: int, counters: TableCounters) -> Iterator[TierStatistics]:
        row_bytes = 4 * deployment.tables[index].width
        for place, cache in enumerate(deployment.caches):
            stats, age = self._cache_stats(cache, index)
            of_devices = (self._cache_stats(part, index)[0] for part in deployment.device_caches if leader_of(part) is cache)
            size_bytes = sum(device.size_bytes for device in of_devices if device is not None)
            vector_bytes = None if stats is None else min(size_bytes, row_bytes * stats.capacity_rows)
            yield TierStatistics(
                tier=TIERS[0],
                kind=cache.device,
                device=cache.device_name,
                rows=None if stats is None else stats.resident_rows,
                capacity_rows=None if stats is None else stats.capacity_rows,
                vector_bytes=vector_bytes,
                overhead_bytes=None if vector_bytes is None else size_bytes - vector_bytes,
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
            if database.in_process:
                with suppress(HPSError):  # dropped in the meantime
                    stats = database.stats(database.stored(table).tag)
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
                inserts=counters.inserts[place],
                evictions=None if stats is None else stats.evictions,
                available=state.read,
                age_s=age,
                file=None if stats is None else stats.file,
                **({} if stats is None or stats.sealing is None else asdict(stats.sealing)),
            )

    def _cache_stats(self, cache: EmbeddingCache, index: int) -> tuple[CacheStats | None, float]:
        if cache.device != "cpu":
            return self._last(cache, cache.tables[index].tag, CacheStats)
        with suppress(HPSError):  # the model is closing
            return cache.stats(index), 0.0
        return None, 0.0

    def _devices(self, deployments: Sequence[Deployment]) -> Iterator[DeviceStatistics]:
        by_device: dict[str, list[EmbeddingCache]] = {}
        pinned: dict[str, int] = {}
        for deployment in deployments:
            for session in dict.fromkeys(deployment.sessions.values()):
                if session.cache is not None:
                    device = session.cache.device_name
                    by_device.setdefault(device, []).append(session.cache)
                    pinned[device] = pinned.get(device, 0) + _pinned_bytes(deployment, session)
        for device, caches in by_device.items():
            memory = next((found for cache in caches if (found := self._last(cache, _DEVICE, DeviceMemory)[0])), None)
            stats = [self._cache_stats(cache, index)[0] for cache in caches for index in range(len(cache.tables))]
            yield DeviceStatistics(
                device=device,
                name=memory.name if memory else "",
                memory_bytes=memory.total_bytes if memory else 0,
                free_bytes=memory.free_bytes if memory else 0,
                cache_bytes=sum(stat.size_bytes for stat in stats if stat is not None),
                pinned_bytes=pinned[device],
            )


def resident_bytes() -> int:
    """Return the resident memory of this process; 0 if the system does not report it."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _pinned_bytes(deployment: Deployment, session: Session) -> int:
    """Return the bytes of host memory pinned for a device's reads."""
    total = 0
    for table, path in zip(deployment.tables, session.miss_paths, strict=False):
        with suppress(HPSError):  # dropped in the meantime
            if path == "link" and (host := deployment.chain.host_table(table)):
                total += host.pinned_bytes
    return total


def _checks(report: CheckReport) -> VersionChecks:
    outcomes = [found.outcome for found in report.checks]
    return VersionChecks(
        version=report.version,
        verdict=report.verdict,
        against=report.against,
        at=report.at,
        seconds=report.seconds,
        passed=outcomes.count("passed"),
        skipped=outcomes.count("skipped"),
        failed=tuple(FailedCheck(found.check, found.table, found.policy, found.text) for found in report.failed),
    )
