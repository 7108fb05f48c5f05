"""Statistics of a parameter server as plain data, for use without Prometheus."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Latency:
    """A histogram of durations since the start. *Immutable.*

    Attributes:
        count, total_s: number of durations, and their sum.
        buckets: (bound in seconds, cumulative count), ascending; durations above the last bound are in `count` only.
    """

    count: int = 0
    total_s: float = 0.0
    buckets: tuple[tuple[float, int], ...] = ()

    def plus(self, other: "Latency", sign: int = 1) -> "Latency":
        """Add the durations of a histogram with the same bounds, or of an empty one."""
        have, more = dict(self.buckets), dict(other.buckets)
        buckets = tuple((bound, have.get(bound, 0) + sign * more.get(bound, 0)) for bound in have | more)
        return Latency(self.count + sign * other.count, self.total_s + sign * other.total_s, buckets)

    def since(self, before: "Latency") -> "Latency":
        """Return the durations counted after an earlier state of this histogram."""
        return self.plus(before, -1)

    def quantile_s(self, share: float) -> float:
        """Estimate a quantile with linear interpolation within a bucket, as Prometheus' `histogram_quantile`.

        Beyond the last bound, the result is that bound.
        """
        place, low, below = share * self.count, 0.0, 0
        for bound, count in self.buckets:
            if count >= place:
                return low + (bound - low) * (place - below) / (count - below)
            low, below = bound, count
        return low


@dataclass(frozen=True, slots=True)
class FileStatistics:
    """The row file of one table, and what lookups read of it from the disk since the table was opened. *Immutable.*

    Attributes:
        resident_share: share of its pages in memory, of a sample; None if the system hides it.
        held_bytes: bytes that are locked in memory.
        cold_pages: pages that were missing when a lookup needed them; partly estimated.
        depth: how many missing pages were asked for together; `total_s` is their sum.
        seconds: times from asking to the last row.
        missing_bytes: bytes that are still to be downloaded.
        from_peers, from_source: bytes that were downloaded, from other replicas and from the model source.
        peer_failures: failed attempts to read from other replicas.
    """

    resident_share: float | None
    held_bytes: int
    cold_pages: int
    depth: Latency
    seconds: Latency
    missing_bytes: int = 0
    from_peers: int = 0
    from_source: int = 0
    peer_failures: int = 0


@dataclass(frozen=True, slots=True)
class TierStatistics:
    """One table in one tier. *Immutable.*

    Attributes:
        tier: as in `metrics.TIERS`.
        kind: `cuda` or `cpu`, or the configured type of the database.
        device: `cpu` or the number of an embedding cache's device; empty for a database.
        rows, capacity_rows: current and maximum rows; None if unbounded or unknown.
        vector_bytes, overhead_bytes: memory or disk for vectors, and for everything else; None if unknown.
        hits, misses: requested keys since the start; totals over all devices, in the first device's entry.
        inserts, evictions: rows added and evicted since the start, None if unknown. A cache adds rows by admission, a database
            by promotion or online writes; loading does not count.
        available: whether the tier is in use now; False after failures.
        age_s: age of rows and bytes: figures that need I/O are read in the background, at most every 15 s.
        changed_rows, seals, sealed_rows, seal_seconds, seal_failures: of a table with a sealed file; see `SealStats`.
        file: of a database of row files.
    """

    tier: str
    kind: str
    device: str
    rows: int | None
    capacity_rows: int | None
    vector_bytes: int | None
    overhead_bytes: int | None
    hits: int
    misses: int
    inserts: int | None
    evictions: int | None
    available: bool
    age_s: float
    changed_rows: int | None = None
    seals: int | None = None
    sealed_rows: int | None = None
    seal_seconds: float | None = None
    seal_failures: int | None = None
    file: FileStatistics | None = None


@dataclass(frozen=True, slots=True)
class TableStatistics:
    """One table of the serving version. *Immutable.*

    Attributes:
        rows: rows in the model files.
        keys, defaults, deferred, linked: since the start; see `metrics.TableCounters`.
        miss_path: `link`, `copy`, or empty without a cache.
        tiers: in lookup order; with several devices, one embedding cache each.
        row_dtype: how the tiers store its rows.
    """

    name: str
    dim: int
    rows: int
    keys: int
    defaults: int
    deferred: int
    linked: int
    miss_path: str
    tiers: tuple[TierStatistics, ...]
    row_dtype: str = "float32"


@dataclass(frozen=True, slots=True)
class FailedCheck:
    """A failed check of one table of a version, or of its network: then `table` is empty. *Immutable.*"""

    check: str
    table: str
    policy: str
    text: str

    def __str__(self) -> str:
        return f"{self.check}{f' of {self.table}' if self.table else ''}: {self.text}"


@dataclass(frozen=True, slots=True)
class VersionChecks:
    """The results of the checks of one version. *Immutable.*

    Attributes:
        verdict: `passed`, `held`, `refused` or `accepted`.
        against: the version that it was compared with; empty if none served.
        at: start, in seconds since the epoch.
        passed, skipped: number of checks.
    """

    version: str
    verdict: str
    against: str
    at: float
    seconds: float
    passed: int
    skipped: int
    failed: tuple[FailedCheck, ...]


@dataclass(frozen=True, slots=True)
class ModelStatistics:
    """One model. *Immutable.*

    Attributes:
        version: serving version.
        versions: all versions that are in service, retained or retiring: `(version, state)`.
        since: time the version was put into service, in seconds since the epoch.
        lookups: total times of lookups.
        stages: times of their stages, by name (`tracing.STAGES`).
        workspaces, busy_workspaces: over all devices.
        tables: in the order of their ids.
        pinned: description of what the fleet serves, or else of the pin of the model to a version; empty if there is none.
        shard: the share of every table that this server holds, `index/of`; empty for all rows.
        rollout: the canary or shadow that is under way, or the last one, as `/v1/models` has it; None if there was none.
        checks: results of the checks of its versions that were checked.
        fleet: whether this server follows the model's `serving.json`.
    """

    name: str
    version: str
    versions: tuple[tuple[str, str], ...]
    since: float
    lookups: Latency
    stages: dict[str, Latency]
    workspaces: int
    busy_workspaces: int
    tables: tuple[TableStatistics, ...]
    pinned: str = ""
    shard: str = ""
    rollout: dict[str, Any] | None = None
    checks: tuple[VersionChecks, ...] = ()
    fleet: bool = False


@dataclass(frozen=True, slots=True)
class DeviceStatistics:
    """One device with embedding caches. *Immutable.*

    Attributes:
        device: `cpu`, or its number.
        name: the driver's name for it.
        memory_bytes, free_bytes: device memory as the driver reports it; on the CPU, the memory available to this process.
        cache_bytes: bytes of its embedding caches.
        pinned_bytes: host memory pinned for it.
    """

    device: str
    name: str
    memory_bytes: int
    free_bytes: int
    cache_bytes: int
    pinned_bytes: int


@dataclass(frozen=True, slots=True)
class UpdateStatus:
    """How far one table of one version of a model has followed the log of its updates. *Immutable.*

    Attributes:
        topic: topic of the log.
        positions: last message applied to every tier, by partition; empty before the first.
        behind: unapplied messages in the log; None if unknown.
        lag_s: age of the oldest unapplied message, by the log, not by producers; 0 if there is none. While the log cannot be
            reached, the time since all messages were known to be applied. None if unknown.
        rows_per_s: rows applied per second, over the last ten seconds.
        rows: rows applied since the start, including repeated ones.
        stale_rows: rows among them that were older than the stored ones, and so had no effect.
        future_times: messages that claimed a time more than a second ahead of this machine's clock.
        dead_letters: messages that could not be applied, by reason.
        problem: why updates are not applied, or which were lost; empty if there is no problem.
        connected: whether the table's messages can be read from the log.
    """

    model: str
    version: str
    table: str
    topic: str
    positions: dict[str, str]
    behind: int | None
    lag_s: float | None
    rows_per_s: float = 0.0
    rows: int = 0
    stale_rows: int = 0
    future_times: int = 0
    dead_letters: dict[str, int] = field(default_factory=dict)
    problem: str = ""
    connected: bool = False


@dataclass(frozen=True, slots=True)
class ServerStatistics:
    """Statistics of a parameter server, returned by `HPS.stats`. *Immutable*; `dataclasses.asdict` makes it a dict for JSON.

    Attributes:
        version: version of hps.
        started: creation of the server, in seconds since the epoch.
        memory_bytes: resident memory of this process.
        models: models in service.
        devices: devices in use.
        queues: waiting background batches, by type of work.
        updates: seconds that followed tables are behind (`lag_s`), by `model.table`; None if unknown.
    """

    version: str
    started: float
    memory_bytes: int
    models: tuple[ModelStatistics, ...]
    devices: tuple[DeviceStatistics, ...]
    queues: dict[str, int]
    updates: dict[str, float | None]
