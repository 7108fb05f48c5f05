"""Prometheus metrics of online updates, counted per batch, never per row."""

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from weakref import WeakMethod

import numpy as np
import numpy.typing as npt
from prometheus_client import Counter
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily, Metric

from hps.metrics import Metrics
from hps.types import IndexArray

_BUCKETS = np.array([0.001, 0.002, 0.005, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 300, 3600])
_LABELS = ["model", "table"]


@dataclass(frozen=True, slots=True)
class TableStatus:
    """How far one table of one version of a model has followed the log of its updates. *Immutable.*

    Attributes:
        model, version, table: whose status this is.
        topic: where its updates come from.
        positions: of the last message that is applied to every tier, by `str(Partition)`; empty before the first.
        behind: messages that are in the log and not applied; None where that is not known.
        lag_s: for how long the table has not had what is in the log: 0 where nothing is behind, else the age of the newest
            message that is applied, or the time since nothing was behind if that is shorter. None where nothing is known yet.
        rows_per_s: rows of the log that were applied in a second, over the last ten.
        rows: of the log that were applied since the start; a row that comes twice counts twice.
        stale_rows: those among them that were older than what was there, and so changed nothing.
        dead_letters: messages that could not be applied, by reason.
        problem: what keeps updates from being applied, or what was lost, for people; empty if nothing.
        connected: whether the log can be reached.
    """

    model: str
    version: str
    table: str
    topic: str
    positions: dict[str, str]
    behind: int | None
    lag_s: float | None
    rows_per_s: float
    rows: int
    stale_rows: int
    dead_letters: dict[str, int]
    problem: str
    connected: bool


class UpdateMetrics:
    """The metrics of all feeds of one parameter server. *Thread-safe.*

    Versions of a model share their metrics: counts add up, and of the lags the largest is shown.

    Args:
        metrics: on whose registry they are.
    """

    def __init__(self, metrics: Metrics) -> None:
        registry = metrics.registry
        self._lock = threading.Lock()
        self._visible: dict[tuple[str, str], tuple[npt.NDArray[np.int64], list[float]]] = {}
        self._statuses: list[WeakMethod[Callable[[], Sequence[TableStatus]]]] = []
        self.rows = Counter(
            "hps_update_rows", "Rows of the log that were applied to every tier.", [*_LABELS, "change"], registry=registry
        )
        self.stale_rows = Counter(
            "hps_update_stale_rows", "Rows of the log that were older than what was there.", _LABELS, registry=registry
        )
        self.bytes = Counter("hps_update_bytes", "Bytes of messages that were applied.", _LABELS, registry=registry)
        self.dead_letters = Counter(
            "hps_update_dead_letters", "Messages that could not be applied.", [*_LABELS, "reason"], registry=registry
        )
        self.failures = Counter(
            "hps_update_failures",
            "Batches that a database or a device refused; each is tried again.",
            _LABELS,
            registry=registry,
        )
        self.gaps = Counter(
            "hps_update_gaps", "Times that wanted messages were gone from a partition of the log.", _LABELS, registry=registry
        )
        registry.register(self)

    def observe_visible(self, model: str, table: str, ages_s: npt.NDArray[np.float64], rows: IndexArray) -> None:
        """Count rows by how long after they were made lookups saw them.

        Args:
            ages_s: (n,) float64, of messages; one below 0, by a clock that differs, counts as 0.
            rows: (n,) int64, of these messages.
        """
        ages_s = np.maximum(ages_s, 0.0)
        counts = np.bincount(np.searchsorted(_BUCKETS, ages_s), rows, _BUCKETS.size + 1).astype(np.int64)
        with self._lock:
            held, total = self._visible.setdefault((model, table), (np.zeros_like(counts), [0.0]))
            held += counts
            total[0] += float(ages_s @ rows)

    def show(self, status: Callable[[], Sequence[TableStatus]]) -> None:
        """Show a feed's status, a method, for as long as its object lives."""
        with self._lock:
            self._statuses = [one for one in self._statuses if one()] + [WeakMethod(status)]

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics that are not counters in Prometheus' form."""
        visible = HistogramMetricFamily(
            "hps_update_visible_seconds", "From when a row was made to when every lookup sees it, by rows.", labels=_LABELS
        )
        lag = GaugeMetricFamily(
            "hps_update_lag_seconds", "For how long a table has not had what is in the log.", labels=_LABELS
        )
        behind = GaugeMetricFamily("hps_update_lag_messages", "Messages in the log that are not applied.", labels=_LABELS)
        connected = GaugeMetricFamily("hps_update_connected", "1 while the log can be reached.", labels=["model"])
        with self._lock:
            for where, (counts, total) in self._visible.items():
                edges = [*(f"{edge:g}" for edge in _BUCKETS), "+Inf"]
                sums = np.cumsum(counts)
                visible.add_metric(where, [(edge, int(count)) for edge, count in zip(edges, sums, strict=True)], total[0])
            feeds = [found for one in self._statuses if (found := one())]
        statuses = [status for feed in feeds for status in feed()]
        for family, values in ((lag, [one.lag_s for one in statuses]), (behind, [one.behind for one in statuses])):
            largest: dict[tuple[str, str], float] = {}
            for one, value in zip(statuses, values, strict=True):
                table = (one.model, one.table)
                largest[table] = max(largest.get(table, -math.inf), math.inf if value is None else value)
            for table, value in largest.items():
                family.add_metric(table, math.nan if value == math.inf else value)
        for model in dict.fromkeys(one.model for one in statuses):
            connected.add_metric([model], all(one.connected for one in statuses if one.model == model))
        yield from (visible, lag, behind, connected)
