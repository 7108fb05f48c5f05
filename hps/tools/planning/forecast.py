"""Forecasts the hit rates of a configuration's caches, and suggests a `gpucacheper` for a goal or a budget."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from hps.statistics.key_traces import KeyTrace, distinct_share
from hps.tools.planning.hit_rates import MOST_KEYS, TablePrediction, cache_hit_rate, predict
from hps.tools.planning.memory import ServedVersion, cached_rows
from hps.tools.planning.power_law import fitted_alpha, power_law_trace
from hps.versions.cache_sizes import is_static

SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Cache sizes to predict, as shares of a table's rows."""
CERTAIN_KEYS = 200
"""Sampled keys in a cache from which its predicted hit rate is within 0.02."""


@dataclass(frozen=True, slots=True)
class TableForecast:
    """Predicted hit rates of one table by cache size. *Immutable.*"""

    model: str
    version: str
    table: str
    rows: int
    alpha: float  # exponent of the power law fitted to its keys
    recorded: bool  # whether the keys were recorded
    keys_per_s: float | None  # recorded rate of keys; None without a recording
    certain_from: int  # capacity in rows from which predictions are within 0.02
    curve: tuple[TablePrediction, ...]  # one prediction for each of `SHARES`
    configured: TablePrediction  # for the configured size


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A suggested `gpucacheper` for a goal or a budget. *Immutable.*"""

    model: str
    version: str
    gpucacheper: float | None  # value for the model's entry; None if no cache reaches the goal
    hit_rate: float  # predicted for all tables, weighted by their rates of keys
    per_table: dict[str, float | None]  # share of rows with which each table alone reaches the goal; empty for a budget


class Forecast:
    """Predictions for one version of a model. *One thread.*

    Args:
        traces: recorded keys; the largest recording of a table is used.
        alpha: power law for tables without a recording, which are otherwise omitted.
        fit: use the power law fitted to the recorded keys instead of the keys, for short recordings.
        on_cuda: whether embedding caches are on GPUs, which may share rows.
    """

    def __init__(
        self,
        version: ServedVersion,
        traces: Sequence[KeyTrace],
        alpha: float | None = None,
        *,
        fit: bool = False,
        on_cuda: bool = False,
    ) -> None:
        config = version.config
        self.version = version
        self._threshold = config.hit_rate_threshold
        self._rows: dict[str, int] = {}
        self._traces: dict[str, KeyTrace] = {}
        self._drawn: set[str] = set()
        self.tables: list[TableForecast] = []
        _, capacities = cached_rows(version, on_cuda)
        for table, rows, capacity in zip(config.tables, version.rows, capacities, strict=True):
            names = table.model_name, table.table_name
            recordings = [recorded for recorded in traces if (recorded.model, recorded.table) == names and recorded.keys.size]
            trace = max(recordings, key=lambda recorded: recorded.keys.size, default=None)
            law = alpha if trace is None else fitted_alpha(trace)
            if law is None:
                continue
            if trace is None or fit:
                self._drawn.add(table.table_name)
                keys = power_law_trace(table, rows, law, table.max_keys)
            else:
                keys = trace
            keys = keys.thinned(distinct_share(keys, MOST_KEYS))
            self._rows[table.table_name], self._traces[table.table_name] = rows, keys
            *curve, configured = predict(keys, [*(math.ceil(share * rows) for share in SHARES), capacity], self._threshold)
            if is_static(config):  # it is filled before lookups
                configured = TablePrediction(rows, 1.0, 1.0)
            self.tables.append(
                TableForecast(
                    config.model,
                    config.version,
                    table.table_name,
                    rows,
                    round(law, 3),
                    trace is not None,
                    trace.asked / trace.seconds if trace is not None and trace.seconds else None,
                    math.ceil(CERTAIN_KEYS / keys.rate) if keys.rate < 1 else 0,
                    tuple(curve),
                    configured,
                )
            )

    def hit_rate(self, share: float) -> float:
        """Predict the hit rate of all tables for caches of a share of their rows, weighted by their rates of keys."""
        weights = self.weights()
        return sum(weights[name] * self._table_hit_rate(name, share) for name in weights) / (sum(weights.values()) or 1.0)

    def weights(self) -> dict[str, float]:
        """Weigh tables by their recorded rates of keys, or else by their keys per sample."""
        config = self.version.config
        per_sample = dict(zip(config.embedding_table_names, config.maxnum_catfeature_query_per_table_per_sample, strict=True))
        rates = {table.table: table.keys_per_s for table in self.tables}
        are_recorded = all(rate is not None for rate in rates.values())
        return {name: float((rates[name] or 0.0) if are_recorded else per_sample[name]) for name in self._traces}

    def knows(self, table: str) -> bool:
        return table in self._traces

    def keys_of(self, table: str) -> tuple[KeyTrace, bool]:
        """Return the keys that predictions of a table use, and whether they were drawn from a power law."""
        return self._traces[table], table in self._drawn

    def hit_rate_at(self, table: str, capacity_rows: int) -> float:
        """Predict the hit rate of a table with known keys for a cache of so many rows."""
        return cache_hit_rate(self._traces[table], capacity_rows, self._threshold)

    def for_goal(self, goal: float) -> Suggestion:
        """Find the smallest `gpucacheper` that reaches a hit rate."""
        share = _least(self.hit_rate, goal)
        per_table = {name: _least(partial(self._table_hit_rate, name), goal) for name in self._traces}
        return self._suggestion(share, self.hit_rate(1.0 if share is None else share), per_table)

    def at(self, share: float) -> Suggestion:
        """Predict the hit rate for caches of a share of the rows."""
        return self._suggestion(share, self.hit_rate(share), {})

    def _suggestion(self, share: float | None, hit_rate: float, per_table: dict[str, float | None]) -> Suggestion:
        return Suggestion(self.version.config.model, self.version.config.version, share, hit_rate, per_table)

    def _table_hit_rate(self, name: str, share: float) -> float:
        return self.hit_rate_at(name, math.ceil(share * self._rows[name]))


def _least(hit_rate: Callable[[float], float], goal: float) -> float | None:
    """Find the smallest share of the rows, to three digits, that reaches a hit rate; None if none does."""
    if hit_rate(1.0) < goal:
        return None
    low, high = 0.0, 1.0
    while high - low > max(1e-4, 0.01 * high):
        middle = (low + high) / 2
        low, high = (low, middle) if hit_rate(middle) >= goal else (middle, high)
    scale = 10.0 ** (2 - math.floor(math.log10(high)))
    return math.ceil(high * scale) / scale
