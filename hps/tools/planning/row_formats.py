"""Memory and hit rates of the tables of a configuration in each row format."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hps.configuration.load import Configuration
from hps.tools.planning.forecast import Forecast
from hps.tools.planning.memory import ServedVersion, cache_plan, cached_rows, planned_needs
from hps.types import ROW_DTYPES
from hps.versions.cache_sizes import is_static

_TIERS = ("embedding_cache", "volatile_db", "persistent_db")


@dataclass(frozen=True, slots=True)
class FormatNeed:
    """Memory of one table on one tier, by row format. *Immutable.*"""

    model: str
    version: str
    table: str
    tier: str
    row_dtype: str  # the configured format
    size_bytes: dict[str, int]  # by format; of an embedding cache, on each device
    # By format, of an embedding cache with the memory that it takes in the configured format; empty if unknown.
    hit_rates: dict[str, float]


def needs_by_format(
    configuration: Configuration, versions: Sequence[ServedVersion], on_cuda: bool, forecasts: Sequence[Forecast]
) -> list[FormatNeed]:
    """Compute the memory of each table on each tier in each row format, all else being equal.

    Args:
        on_cuda: whether embedding caches are on GPUs.
        forecasts: of versions with known keys, for the hit rates.
    """
    devices = {(version.config.model, version.config.version): version.config.deployed_device_list[0] for version in versions}
    sizes: dict[tuple[str, str, str, str], dict[str, int]] = {}
    for row_dtype in ROW_DTYPES:
        for planned in planned_needs(configuration, [_stored_as(version, row_dtype) for version in versions], on_cuda):
            if planned.tier not in _TIERS or not planned.need.table or planned.need.temporary:
                continue
            if planned.device in (None, devices[planned.model, planned.version]):
                key = planned.model, planned.version, planned.need.table, planned.tier
                by_format = sizes.setdefault(key, dict.fromkeys(ROW_DTYPES, 0))
                by_format[row_dtype] += planned.need.size_bytes
    tables = {
        (version.config.model, version.config.version, table.table_name): (version, index)
        for version in versions
        for index, table in enumerate(version.config.tables)
    }
    forecast_by_version = {(forecast.version.config.model, forecast.version.config.version): forecast for forecast in forecasts}
    needs = []
    for (model, number, name, tier), by_format in sizes.items():
        version, index = tables[model, number, name]
        forecast = forecast_by_version.get((model, number)) if tier == "embedding_cache" else None
        rates = {} if forecast is None else _hit_rates(version, index, forecast, on_cuda)
        needs.append(FormatNeed(model, number, name, tier, version.config.row_dtype[index], by_format, rates))
    return needs


def _hit_rates(version: ServedVersion, index: int, forecast: Forecast, on_cuda: bool) -> dict[str, float]:
    """Predict the hit rate of a table's cache in each format, with the memory of the configured one; none of a static cache."""
    table, rows = version.config.tables[index], version.rows[index]
    if is_static(version.config) or not forecast.knows(table.table_name):
        return {}
    sharing, capacities = cached_rows(version, on_cuda)
    plan, sharing = cache_plan(on_cuda), replace(sharing, near_rows=sharing.near_rows[index : index + 1])

    def needed(row_dtype: str, capacity: int) -> int:
        needs = plan.room_for([replace(table, row_dtype=row_dtype)], [capacity], sharing=sharing)
        return sum(need.size_bytes for need in needs)

    budget = needed(table.row_dtype, capacities[index])
    rates = {}
    for row_dtype in ROW_DTYPES:
        low, high = 0, rows  # the most rows that fit
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if needed(row_dtype, middle) <= budget else (low, middle - 1)
        rates[row_dtype] = forecast.hit_rate_at(table.table_name, low)
    return rates


def _stored_as(version: ServedVersion, row_dtype: str) -> ServedVersion:
    formats = (row_dtype,) * len(version.config.row_dtype)
    return replace(version, config=version.config.model_copy(update={"row_dtype": formats}))
