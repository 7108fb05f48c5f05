"""A server's counters between two moments: times of stages, and keys by the tier that answered them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from prometheus_client import Metric

from hps.statistics.metrics import TIERS
from hps.statistics.snapshot import quantile
from hps.statistics.tracing import STAGES

HTTP = "http"
LOOKUP = "lookup"
_INFER = ("/v2/models/{model}/infer", "/v2/models/{model}/versions/{version}/infer")


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Times of one stage. *Immutable.*

    Attributes:
        count: timed lookups that had this stage.
        share: share of the time of complete lookups, or of HTTP requests if these are counted.
        mean_us, p50_us, p99_us: of the lookups that had this stage.
    """

    count: int
    share: float
    mean_us: float
    p50_us: float
    p99_us: float


@dataclass(frozen=True, slots=True)
class TierKeys:
    """Keys that one tier was asked for. *Immutable.*

    Attributes:
        hit_rate: share of the asked keys that it had.
        asked: keys asked for; the databases count a key once per lookup, the embedding cache as often as it was sent.
    """

    hit_rate: float
    asked: int


class Counters:
    """The counters of one model and some of its tables at one moment. *Immutable.*

    Args:
        families: metrics as exposed by `/metrics`.
    """

    def __init__(self, families: Iterable[Metric], model: str, tables: Iterable[str]) -> None:
        self._tables = list(tables)
        self._values: dict[tuple[str, ...], float] = {}
        for family in families:
            if not family.name.startswith(("hps_hits", "hps_misses", "hps_lookup", "hps_default", "hps_http_request_s")):
                continue
            for sample in family.samples:
                labels: Mapping[str, str] = sample.labels
                if labels.get("model", model) == model:
                    where = (labels.get(name, "") for name in ("table", "tier", "stage", "route", "le"))
                    self._values[sample.name, *where] = sample.value

    def tiers_since(self, before: "Counters") -> dict[str, TierKeys]:
        """Return the keys asked of each tier since then, without tiers that were not asked."""
        found = {}
        for tier in TIERS:
            hits, misses = (
                sum(self._since(before, name, table=table, tier=tier) for table in self._tables)
                for name in ("hps_hits_total", "hps_misses_total")
            )
            if hits + misses:
                found[tier] = TierKeys(hits / (hits + misses), int(hits + misses))
        return found

    def defaults_since(self, before: "Counters") -> int:
        """Return the number of keys that no tier had since then."""
        return int(sum(self._since(before, "hps_default_keys_total", table=table) for table in self._tables))

    def stages_since(self, before: "Counters") -> dict[str, StageTimes]:
        """Return the times of requests, lookups and their stages since then, over all clients.

        Quantiles are interpolated within the histograms' buckets.
        """
        whole = sum(self._since(before, "hps_http_request_seconds_sum", route=route) for route in _INFER)
        whole = whole or self._since(before, "hps_lookup_seconds_sum")
        found = {
            HTTP: self._times(before, "hps_http_request_seconds", whole, [{"route": route} for route in _INFER]),
            LOOKUP: self._times(before, "hps_lookup_seconds", whole, [{}]),
            **{stage: self._times(before, "hps_lookup_stage_seconds", whole, [{"stage": stage}]) for stage in STAGES},
        }
        return {stage: times for stage, times in found.items() if times.count}

    def _times(self, before: "Counters", name: str, whole_s: float, wheres: list[dict[str, str]]) -> StageTimes:
        count = int(sum(self._since(before, f"{name}_count", **where) for where in wheres))
        seconds = sum(self._since(before, f"{name}_sum", **where) for where in wheres)
        if not count:
            return StageTimes(0, 0.0, 0.0, 0.0, 0.0)
        bounds = sorted({key[5] for key in self._values if key[0] == f"{name}_bucket"}, key=float)
        below = [
            (float(bound), sum(self._since(before, f"{name}_bucket", le=bound, **where) for where in wheres))
            for bound in bounds
        ]
        p50, p99 = (quantile(below, share * count) for share in (0.5, 0.99))
        return StageTimes(count, seconds / whole_s if whole_s else 0.0, 1e6 * seconds / count, 1e6 * p50, 1e6 * p99)

    def _since(self, before: "Counters", name: str, **where: str) -> float:
        return self._get(name, **where) - before._get(name, **where)

    def _get(self, name: str, *, table: str = "", tier: str = "", stage: str = "", route: str = "", le: str = "") -> float:
        return self._values.get((name, table, tier, stage, route, le), 0.0)
