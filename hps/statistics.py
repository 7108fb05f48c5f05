"""What a parameter server holds and has done, for people and programs that want numbers without Prometheus."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Latency:
    """Times of something that was done `count` times since the start. *Immutable.*

    Attributes:
        count, total_s: how often, and how long in all.
        buckets: how many took at most so many seconds, ascending and cumulative; those above the last are in `count` alone.
    """

    count: int
    total_s: float
    buckets: tuple[tuple[float, int], ...]


@dataclass(frozen=True, slots=True)
class TierStatistics:
    """One table in one tier. *Immutable.*

    Attributes:
        tier: as in `metrics.TIERS`.
        kind: `cuda` or `cpu`, or the configured type of the database.
        device: of an embedding cache: `cpu` or its number; empty of a database.
        rows, capacity_rows: that it holds, and may hold; None where that is unbounded or not known.
        vector_bytes, overhead_bytes: memory or disk that vectors take, and what it takes beside them; None where not known.
        hits, misses: keys that it was asked for since the start; of all devices, in the entry of the first.
        inserts, evictions: rows that came and were pushed out since the start; None where nobody counts.
        available: whether it is read now; False after failures.
        age_s: how old rows and bytes are: what needs I/O is asked at most every 15 s, in the background.
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


@dataclass(frozen=True, slots=True)
class TableStatistics:
    """One table of the version that serves. *Immutable.*

    Attributes:
        name, dim, rows: its name, width, and rows in the model files.
        keys, defaults, deferred, linked: since the start; see `metrics.TableCounters`.
        miss_path: `link`, `copy`, or empty without a cache.
        tiers: in the order in which they are asked; of several devices, one embedding cache each.
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


@dataclass(frozen=True, slots=True)
class ModelStatistics:
    """One model. *Immutable.*

    Attributes:
        name, version: the version that serves.
        versions: all that are in service, kept or retiring, with their state: `(version, state)`.
        since: when the version was put into service, in seconds since the epoch.
        lookups: the times of whole lookups.
        stages: those of their stages, by name (`tracing.STAGES`).
        workspaces, busy_workspaces: of all devices.
        tables: in the order of their ids.
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


@dataclass(frozen=True, slots=True)
class DeviceStatistics:
    """One device with embedding caches. *Immutable.*

    Attributes:
        device: `cpu`, or its number.
        name: what the driver calls it.
        memory_bytes, free_bytes: of the device, by the driver; of the CPU, what this process may use.
        cache_bytes: what embedding caches take there.
        workspace_bytes: what lookups take beside them; None where nobody counts.
        pinned_bytes: host memory that is pinned for it.
    """

    device: str
    name: str
    memory_bytes: int
    free_bytes: int
    cache_bytes: int
    workspace_bytes: int | None
    pinned_bytes: int


@dataclass(frozen=True, slots=True)
class ServerStatistics:
    """All of a parameter server: what `HPS.stats()` returns. *Immutable*; `dataclasses.asdict` makes it a dict for JSON.

    Attributes:
        version: of hps.
        started: when the server was made, in seconds since the epoch.
        memory_bytes: resident memory of this process.
        models: those in service.
        devices: those in use.
        queues: batches that wait for background work, by what is done with them.
        updates: rows that followed tables are behind, by `model.table`: `lag_s`; None where nothing is known.
    """

    version: str
    started: float
    memory_bytes: int
    models: tuple[ModelStatistics, ...]
    devices: tuple[DeviceStatistics, ...]
    queues: dict[str, int]
    updates: dict[str, float | None]


def quantile(buckets: Iterable[tuple[float, float]], place: float) -> float:
    """The time at a place of a histogram: linear within a bucket, as Prometheus' `histogram_quantile`.

    Args:
        buckets: as in `Latency`; one without a bound has infinity.
        place: above 0, among all that were counted; above the last bound there is, the answer is that bound.
    """
    low = below = 0.0
    for bound, count in buckets:
        if bound == float("inf"):
            break
        if count >= place:
            return low + (bound - low) * (place - below) / (count - below)
        low, below = bound, count
    return low
