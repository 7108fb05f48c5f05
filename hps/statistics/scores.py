"""Counters of scores: requests, batches, and where their time went."""

import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from hps.statistics.prometheus import Family, family, histogram
from hps.statistics.times import Times


@dataclass(slots=True)
class ScoreCounters:
    """Counters of one model's scores since the start. *Thread-safe.*

    Attributes:
        requests, samples, batches: of batches that the network answered.
        failures: requests that the network failed, by reason: `network` (an error), `nan`.
        late: requests whose timeout expired before a batch could include them.
        refused: requests refused because the network hangs.
        lookup_times, network_times: of batches.
    """

    requests: int = 0
    samples: int = 0
    batches: int = 0
    failures: dict[str, int] = field(default_factory=lambda: {"network": 0, "nan": 0})
    late: int = 0
    refused: int = 0
    lookup_times: Times = field(default_factory=Times)
    network_times: Times = field(default_factory=Times)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, requests: int, samples: int, lookup_ns: int, network_ns: int) -> None:
        with self.lock:
            self.batches += 1
            self.requests += requests
            self.samples += samples
            self.lookup_times.add(lookup_ns)
            self.network_times.add(network_ns)

    def count_failure(self, reason: str) -> None:
        with self.lock:
            self.failures[reason] += 1

    def count_late(self) -> None:
        """Count a request that was too late for any batch."""
        with self.lock:
            self.late += 1

    def count_refused(self) -> None:
        """Count a request that was refused because a call of the network hangs."""
        with self.lock:
            self.refused += 1


def score_families(counted: Iterable[tuple[str, ScoreCounters]]) -> Iterator[Family]:
    """Return the metric families of scores, by the labels and counters of each model."""
    figures: list[tuple[str, tuple[int, ...]]] = []
    failures: list[tuple[str, float]] = []
    lookups, networks = [], []
    for labels, scores in counted:
        with scores.lock:
            figures.append((labels, (scores.requests, scores.samples, scores.batches, scores.late, scores.refused)))
            failures += [(f'{labels},reason="{reason}"', count) for reason, count in scores.failures.items()]
            lookups.append((labels, scores.lookup_times.latency()))
            networks.append((labels, scores.network_times.latency()))
    for place, (name, text) in enumerate(
        (
            ("hps_score_requests", "Requests for scores that the network answered."),
            ("hps_score_samples", "Samples of these requests."),
            ("hps_score_batches", "Calls of the network for them."),
            ("hps_score_late_requests", "Requests for scores whose timeout expired before a batch could include them."),
            ("hps_score_refused_requests", "Requests for scores refused because a call of the network hangs."),
        )
    ):
        yield family("counter", name, text, [(labels, counts[place]) for labels, counts in figures])
    yield family("counter", "hps_score_failed_requests", "Requests that the network failed, by error or NaN.", failures)
    yield histogram("hps_score_lookup_seconds", "Duration of the lookups of a batch of scores.", lookups)
    yield histogram("hps_score_network_seconds", "Duration of the network for a batch of scores.", networks)
