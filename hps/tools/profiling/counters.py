"""A server's counters between two moments: times of stages, and keys by the tier that answered them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hps.statistics.snapshot import Latency

HTTP = "http"
LOOKUP = "lookup"
_INFER = ("/v2/models/{model}/infer", "/v2/models/{model}/versions/{version}/infer")


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Times of one stage. *Immutable.*"""

    count: int  # timed lookups that had this stage
    share: float  # share of the time of complete lookups, or of HTTP requests if these are counted
    mean_us: float  # of the lookups that had this stage
    p50_us: float  # likewise
    p99_us: float  # likewise


@dataclass(frozen=True, slots=True)
class TierKeys:
    """Lookups of keys in one tier. *Immutable.*"""

    hit_rate: float  # share of the requested keys that it had
    asked: int  # requested keys; the databases count a key once per lookup, the embedding cache as often as it was sent


class Counters:
    """The counters of one model and some of its tables at one moment. *Immutable.*

    Args:
        stats: an answer of `GET /v1/stats`; empty if the server has none.
    """

    def __init__(self, stats: Mapping[str, Any], model: str, tables: Sequence[str]) -> None:
        models = stats["server"]["models"] if stats.get("server") else []
        routes = stats["service"]["requests"] if "service" in stats else []
        self._times = {HTTP: Latency()}
        for route in routes:
            if route["route"] in _INFER:
                self._times[HTTP] = self._times[HTTP].plus(Latency(**route["latency"]))
        self._hits, self._asked, self._defaults = Counter[str](), Counter[str](), 0
        for model_entry in (entry for entry in models if entry["name"] == model):
            latencies = {LOOKUP: model_entry["lookups"], **model_entry["stages"]}
            self._times |= {stage: Latency(**latency) for stage, latency in latencies.items()}
            for table in (entry for entry in model_entry["tables"] if entry["name"] in tables):
                self._defaults += table["defaults"]
                for tier in table["tiers"]:
                    self._hits[tier["tier"]] += tier["hits"]
                    self._asked[tier["tier"]] += tier["hits"] + tier["misses"]

    def tiers_since(self, before: "Counters") -> dict[str, TierKeys]:
        """Return the keys asked of each tier since then, without tiers that were not asked."""
        asked, hits = self._asked - before._asked, self._hits - before._hits
        return {tier: TierKeys(hits[tier] / count, count) for tier, count in asked.items()}

    def defaults_since(self, before: "Counters") -> int:
        """Return the number of keys that no tier had since then."""
        return self._defaults - before._defaults

    def stages_since(self, before: "Counters") -> dict[str, StageTimes]:
        """Return the times of requests, lookups and their stages since then, over all clients.

        Quantiles are interpolated within the histograms' buckets.
        """
        since = {stage: times.since(before._times.get(stage, Latency())) for stage, times in self._times.items()}
        total_s = since[HTTP].total_s or since.get(LOOKUP, Latency()).total_s
        return {
            stage: StageTimes(
                times.count,
                times.total_s / total_s if total_s else 0.0,
                1e6 * times.total_s / times.count,
                1e6 * times.quantile_s(0.5),
                1e6 * times.quantile_s(0.99),
            )
            for stage, times in since.items()
            if times.count
        }
