"""Predicts hit rates and rates of lookups of several GPUs by how they share the rows of a table.

Each of N GPUs has room for the same number of rows, and serves 1/N of the lookups:

*   `replicate`: each device caches by itself what its own lookups ask for.
*   `partition`: the devices form one cache, N times as large, but at most of all rows. A row lies on one of them, by the hash
    of its key, so 1/N of the hits are local. The others are read from a neighbour.
*   `hot`: `NEAR_SHARE` of a device's rows is a private cache, filled from hits on neighbours; the rest is partitioned.

Rows and memory are those that a deployment asks for. A static cache holds every row, so nothing is read in host memory.

Every cache is replayed on a miniature (`hit_rates.py`). A private cache is replayed behind the partitioned one: it gets those
keys of its device's lookups that another device owns and holds. A hit in a private cache thus counts as a use of the owner's
row, too. That hardly matters, since the owner's own lookups use the same popular rows: in a simulation of LRU caches with and
without such uses, no share differed by more than 0.003.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numba import int64

from hps.cache.base import MOST_SHARED_ROWS, MOST_SHARERS
from hps.ground.hashing import mix, scale
from hps.ground.kernels.numba_kernels import kernel, read_only
from hps.statistics.key_traces import KeyTrace
from hps.tools.planning.forecast import Forecast
from hps.tools.planning.hit_rates import Replay, hit_rate_of, replay
from hps.tools.planning.memory import ServedVersion, cache_plan, cached_rows
from hps.tools.planning.read_rates import Reads, seconds_per_key
from hps.types import BoolArray, IndexArray, KeyArray
from hps.versions.cache_sizes import is_static

SHARINGS: Final = ("replicate", "partition", "hot")
ALL_TABLES: Final = "all tables"  # no name of a table has a space


@dataclass(frozen=True, slots=True)
class SharingForecast:
    """Predicted hit rate and rate of lookups of one table with one sharing. *Immutable.*"""

    model: str
    version: str
    table: str  # name, or `ALL_TABLES`: all tables of the version, weighted by their rates of keys
    devices: int
    sharing: str  # one of `SHARINGS`
    capacity_rows: int  # rows of the common cache; for `replicate`, of each device's cache
    size_bytes: int  # memory of the caches on each device
    hit_rate: float  # share of the keys that are in some cache
    local: float  # share of the keys whose rows are read in own memory
    neighbour: float  # in the memory of another device
    host: float  # in host memory
    keys_per_s: float  # estimated keys per second of each device, when all are under load
    certain: bool  # whether enough recorded keys fit the smallest cache


def predict_reads(
    sharing: str,
    trace: KeyTrace,
    capacity_rows: int,
    devices: int,
    private_rows: int = 0,
    threshold: float = 1.1,
    drawn: bool = False,
) -> Reads:
    """Predict where devices find the rows of the second half of a trace, on average.

    Args:
        trace: keys of the lookups of all devices.
        capacity_rows: rows of the cache that all devices form; of `replicate`, of each device's own.
        private_rows: rows of each device's private cache.
        threshold: the model's `hit_rate_threshold`.
        drawn: whether keys were drawn from a distribution. Those of each device then have the same, and are not divided.
    """
    if not trace.keys.size or not capacity_rows:
        return Reads(0.0, 0.0, 1.0)
    if sharing == "replicate":
        return _replicated_reads(trace, capacity_rows, devices, threshold, drawn)
    common = replay(trace, capacity_rows, threshold)
    neighbour = common.hit_rate - common.hit_rate / devices
    if private_rows:
        neighbour = min(_private_misses(common, private_rows, devices, drawn), neighbour)  # a sample may say more
    return Reads(common.hit_rate - neighbour, neighbour, 1.0 - common.hit_rate)


def forecast_sharings(forecasts: Sequence[Forecast], devices: int) -> list[SharingForecast]:
    """Predict every possible sharing for each table, and for all tables of a version with several.

    Args:
        devices: number of GPUs, each with room for the configured share of the rows.
    """
    sharings = []
    for forecast in forecasts:
        reasons = reasons_against(forecast.version, devices)
        by_sharing = [_forecast_version(forecast, sharing, devices) for sharing in SHARINGS if sharing not in reasons]
        sharings += [same_table for same in zip(*by_sharing, strict=True) for same_table in same]
        if len(forecast.tables) > 1:
            sharings += [_all_tables(tables, forecast.weights()) for tables in by_sharing]
    return sharings


def reasons_against(version: ServedVersion, devices: int) -> dict[str, str]:
    """Return why GPUs cannot share the rows of a version, by those of `SHARINGS` with which they cannot."""
    reasons = {}
    if is_static(version.config):
        reasons["hot"] = "embedding_cache_type is static, whose cache holds every row"
    for sharing in ("partition", "hot"):
        _, capacities = cached_rows(_shared(version, sharing, devices), on_cuda=True)
        if devices > MOST_SHARERS:
            reasons[sharing] = f"at most {MOST_SHARERS} devices share rows"
        elif max(capacities) > MOST_SHARED_ROWS:
            reasons[sharing] = f"a cache would have {max(capacities):,} rows, expected at most {MOST_SHARED_ROWS:,}"
    return reasons


def _shared(version: ServedVersion, sharing: str, devices: int) -> ServedVersion:
    changes = {"device_sharing": sharing, "deployed_device_list": tuple(range(devices))}
    return replace(version, config=version.config.model_copy(update=changes))


def _forecast_version(forecast: Forecast, sharing: str, devices: int) -> list[SharingForecast]:
    version = _shared(forecast.version, sharing, devices)
    config, (shared, capacities) = version.config, cached_rows(version, on_cuda=True)
    needs = cache_plan(on_cuda=True).room_for(config.tables, capacities, is_static(config), shared)
    private_rows = shared.near_rows or (0,) * len(capacities)
    forecasts = []
    for table in forecast.tables:
        nth = config.embedding_table_names.index(table.table)
        trace, drawn = forecast.keys_of(table.table)
        if is_static(config):
            local = 1.0 if sharing == "replicate" else 1.0 / devices
            reads = Reads(local, 1.0 - local, 0.0)
        else:
            reads = predict_reads(sharing, trace, capacities[nth], devices, private_rows[nth], config.hit_rate_threshold, drawn)
        forecasts.append(
            SharingForecast(
                table.model,
                table.version,
                table.table,
                devices,
                sharing,
                min(capacities[nth], table.rows),  # a static cache has room for more
                needs[nth].size_bytes,
                reads.hit_rate,
                reads.local,
                reads.neighbour,
                reads.host,
                1 / seconds_per_key(reads, 4 * config.tables[nth].width),
                is_static(config) or (private_rows[nth] or capacities[nth]) >= table.certain_from,
            )
        )
    return forecasts


def _all_tables(tables: Sequence[SharingForecast], weights: Mapping[str, float]) -> SharingForecast:
    """Sum up tables with the same sharing."""
    total = sum(weights.values()) or 1.0

    def mean(value: Callable[[SharingForecast], float]) -> float:
        return sum(weights[table.table] * value(table) for table in tables) / total

    return replace(
        tables[0],
        table=ALL_TABLES,
        capacity_rows=sum(table.capacity_rows for table in tables),
        size_bytes=sum(table.size_bytes for table in tables),
        hit_rate=mean(lambda table: table.hit_rate),
        local=mean(lambda table: table.local),
        neighbour=mean(lambda table: table.neighbour),
        host=mean(lambda table: table.host),
        keys_per_s=1 / mean(lambda table: 1 / table.keys_per_s),
        certain=all(table.certain for table in tables),
    )


def _replicated_reads(trace: KeyTrace, capacity_rows: int, devices: int, threshold: float, drawn: bool) -> Reads:
    selections = _keys_by_device(trace, devices, drawn)
    parts = [_part(trace, selected, trace.asked // len(selections)) for selected in selections]
    misses = sum(replay(part, capacity_rows, threshold).misses for part in parts)
    hit_rate = hit_rate_of(misses, sum(part.asked for part in parts))
    return Reads(hit_rate, 0.0, 1.0 - hit_rate)


def _private_misses(common: Replay, capacity_rows: int, devices: int, drawn: bool) -> float:
    """Return the share of the keys that devices find in the common cache, at a neighbour, and not in their private ones."""
    trace = common.trace
    owners, selections = _owners(trace.keys, devices), _keys_by_device(trace, devices, drawn)
    asked = trace.asked // len(selections)
    misses = 0.0
    for device, selected in enumerate(selections):
        remote = _part(trace, selected & (owners != device) & ~common.missed, asked)
        misses += replay(remote, capacity_rows, span=common.span).misses
    return 1.0 - hit_rate_of(misses, len(selections) * asked)


def _keys_by_device(trace: KeyTrace, devices: int, drawn: bool) -> list[BoolArray]:
    """Return which keys each device is asked for: lookups go to the devices in turn. Of drawn keys, one device gets all."""
    if drawn:
        return [np.ones(trace.keys.size, np.bool_)]
    _, numbers = np.unique(trace.lookups, return_inverse=True)
    return [numbers % devices == device for device in range(devices)]


def _part(trace: KeyTrace, selected: BoolArray, asked: int) -> KeyTrace:
    return replace(trace, keys=trace.keys[selected], lookups=trace.lookups[selected], asked=asked)


@kernel(int64[::1], read_only(int64[::1]), int64)
def _owners(keys: KeyArray, devices: int) -> IndexArray:
    """Return the device that owns each key. The second mixing makes it independent of the set within a cache."""
    found = np.empty(keys.size, np.int64)
    for i in range(keys.size):
        found[i] = scale(mix(np.int64(mix(keys[i]))), np.int64(devices))
    return found
