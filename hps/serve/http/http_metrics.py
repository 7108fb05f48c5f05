"""Counts HTTP requests: Prometheus metrics by route, and Triton's statistics by version."""

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import reduce
from typing import Any, Final

from prometheus_client import ProcessCollector

from hps.serve.http.refusals import Refusals
from hps.statistics.prometheus import Family, family, histogram, label_text
from hps.statistics.times import Times
from hps.versions.canary.counts import RolloutCounts
from hps.versions.deployment import Deployment

_BUCKETS = (1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
DISCONNECTED = 499
"""Status counted when a client disconnects before its request is complete; no answer is sent."""


class HTTPMetrics:
    """Counts requests. *One per event loop*: only the loop counts, other threads may read.

    Args:
        refusals: exposed with the requests.
        ready: returns whether lookups of every loadable model are answered.
        device_failed: returns whether a device is lost.
        degraded: returns whether lookups do without a device or a volatile database.

    Attributes:
        frontends: returns the figures of all frontends, which are added.
        loops: returns the counts of the engine's batch loops.
    """

    # The counts are plain integers: a counter and a histogram of prometheus-client take locks, 1.5 us for each request.

    def __init__(
        self,
        refusals: Refusals,
        ready: Callable[[], float] = lambda: False,
        device_failed: Callable[[], float] = lambda: False,
        degraded: Callable[[], float] = lambda: False,
    ) -> None:
        self.frontends: Callable[[], Sequence[Mapping[str, Any]]] = lambda: ()
        self.loops: Callable[[], Mapping[str, int]] = dict
        self._counts: dict[tuple[str, int], int] = {}
        self._routes: dict[str, Times] = {}
        self._tokens: dict[tuple[str, int], int] = {}
        self._ready, self._device_failed, self._degraded = ready, device_failed, degraded
        self._refusals = refusals
        self._process = ProcessCollector(registry=None)

    def count(self, route: str, status: int, seconds: float, token: str = "") -> None:
        """Count one request.

        Args:
            route: a template, not the path, to keep the number of labels small.
            token: name of its token, if tokens are required.
        """
        times = self._routes.get(route)  # added before its count, so that readers find the times of each count
        if times is None:
            times = self._routes[route] = Times(_BUCKETS)
        # Inlined `Times.add`, since this is on the path of every request.
        ns = round(1e9 * seconds)
        times.buckets[bisect_left(times.bounds_ns, ns)] += 1
        times.total_ns += ns
        key = (route, status)
        self._counts[key] = self._counts.get(key, 0) + 1
        if token:
            self._tokens[token, status] = self._tokens.get((token, status), 0) + 1

    def figures(self) -> dict[str, Any]:
        """Return all counts as JSON values, for `add`."""
        return {
            "counts": {f"{status} {route}": count for (route, status), count in self._counts.items()},
            "who": {f"{status} {token}": count for (token, status), count in self._tokens.items()},
            "times": {route: [times.total_ns, *times.buckets] for route, times in self._routes.items()},
            "refused": dict(self._refusals.refused),
            "aborted": dict(self._refusals.aborted),
        }

    def add(self, figures: Mapping[str, Any]) -> None:
        """Add the `figures` of another process."""
        for counts, more in ((self._counts, figures["counts"]), (self._tokens, figures["who"])):
            for text, count in more.items():
                status, _, name = text.partition(" ")
                counts[name, int(status)] = counts.get((name, int(status)), 0) + count
        for route, (total_ns, *buckets) in figures["times"].items():
            self._routes.setdefault(route, Times(_BUCKETS)).add_buckets(buckets, total_ns)
        for have, more in ((self._refusals.refused, figures["refused"]), (self._refusals.aborted, figures["aborted"])):
            for reason, count in more.items():
                have[reason] += count

    def requests(self) -> list[dict[str, Any]]:
        """Return the number of requests by status and their times (`snapshot.Latency`), by route."""
        total = self._plus(self.frontends())
        found: dict[str, dict[str, Any]] = {
            route: {"route": route, "statuses": {}, "latency": times.latency()} for route, times in total._routes.items()
        }
        for (route, status), count in total._counts.items():
            found[route]["statuses"][str(status)] = count
        return list(found.values())

    def gauges(self) -> dict[str, int]:
        """Return the number of frontends, and the sums of their gauges."""
        frontends = self.frontends()
        return {"fronts": len(frontends), **{name: sum(figures[name] for figures in frontends) for _, _, name in _GAUGES}}

    def _plus(self, frontends: Sequence[Mapping[str, Any]]) -> "HTTPMetrics":
        total = HTTPMetrics(Refusals())
        for figures in (self.figures(), *(figures["http"] for figures in frontends)):
            total.add(figures)
        return total

    def families(self) -> Iterator[Family]:
        frontends = self.frontends()
        total = self._plus(frontends)
        requests = [(label_text(("route", "status"), (route, str(status))), n) for (route, status), n in total._counts.items()]
        yield family("counter", "hps_http_requests", "Requests by route and status.", requests)
        named = [(label_text(("who", "status"), (name, str(status))), n) for (name, status), n in total._tokens.items()]
        yield family("counter", "hps_http_token_requests", "Requests by name of their token and status.", named)
        times = [(label_text(["route"], [route]), counted.latency()) for route, counted in total._routes.items()]
        yield histogram("hps_http_request_seconds", "Time from the headers of a request to the end of its answer.", times)
        for name, text, figure in _GAUGES:
            values = [(label_text(["front"], [str(nth)]), figures[figure]) for nth, figures in enumerate(frontends)]
            yield family("gauge", name, text, values)
        times_used = [(label_text(["front"], [str(nth)]), figures["cpu_ns"] / 1e9) for nth, figures in enumerate(frontends)]
        yield family("counter", "hps_front_cpu_seconds", "Processor time of each frontend.", times_used)
        ends = [(label_text(["front"], [str(nth)]), figures["certificate_ends_s"]) for nth, figures in enumerate(frontends)]
        yield family("gauge", "hps_certificate_expires_timestamp_seconds", _CERTIFICATE, [one for one in ends if one[1]])
        loops = self.loops()
        for name, text in _LOOP_COUNTS.items():
            yield family("counter", name, text, [("", loops.get(name.removeprefix("hps_owner_"), 0))])
        yield family("gauge", "hps_ready", _READY, [("", self._ready())])
        yield family("gauge", "hps_device_failed", _DEVICE_FAILED, [("", self._device_failed())])
        yield family("gauge", "hps_degraded", _DEGRADED, [("", self._degraded())])
        yield from total._refusals.families()
        for metric in self._process.collect():
            yield family(metric.type, metric.name, metric.documentation, [("", sample.value) for sample in metric.samples])


_GAUGES: Final = (
    ("hps_http_connections", "Open connections.", "connections"),
    ("hps_http_lookups_pending", "Lookups posted to the engine and not answered yet.", "pending"),
    ("hps_http_held_bytes", "Memory of requests and answers.", "held_bytes"),
    ("hps_http_cached_bytes", "Memory of cached requests.", "cached_bytes"),
)
_LOOP_COUNTS: Final = {
    "hps_owner_batches": "Batches answered by the engine's loops.",
    "hps_owner_handed_over": "Lookups that the loops handed to service.lookup_threads.",
    "hps_owner_malformed": "Lookups refused because of a malformed descriptor.",
    "hps_owner_wakes": "Wakes of the loops from sleep.",
}
_CERTIFICATE: Final = "End of the server certificate of new connections, in seconds since 1970."
_READY: Final = "1 while lookups are answered, ignoring models that cannot be loaded."
_DEVICE_FAILED: Final = "1 while a device of a model in service is lost, until a restart."
_DEGRADED: Final = "1 while lookups do without a lost device or a volatile database; /v2/health/ready says which."


def are_figures(found: Mapping[str, Any]) -> bool:
    """Return True if these are figures of a frontend: a compromised one may write anything."""
    try:
        HTTPMetrics(Refusals()).add(found["http"])
        for counts in found["inference"].values():
            InferenceCounts().plus(InferenceCounts(*counts))
        for values in found["rollouts"].values():
            RolloutCounts().add(values)
        return all(isinstance(found[name], int) for name in ("cpu_ns", "certificate_ends_s", *(name for _, _, name in _GAUGES)))
    except (KeyError, TypeError, ValueError, AttributeError):
        return False


def counted_as(model: str, version: str, deployment_ids: Mapping[int, int]) -> str:
    """Return the name of a deployment's counts: those of a version that is deployed again start at 0."""
    return f"{model}\0{version}\0{next(iter(deployment_ids.values()), 0)}"


@dataclass(slots=True, eq=False)
class InferenceCounts:
    """Answered and failed requests of one version. *One per event loop*; only the loop changes it.

    Times are nanoseconds of `time.perf_counter_ns`. For answered requests they add up to the time from the complete body to the
    body of the answer.

    Attributes:
        input_ns: reading the request.
        queue_ns: waiting for a thread, then for the event loop.
        infer_ns: the lookup.
        output_ns: writing the answer; 0 if the lookup wrote it.
        failure_ns: failed requests.
        last_ns: end of the last request; 0 before the first.
    """

    successes: int = 0
    failures: int = 0
    input_ns: int = 0
    queue_ns: int = 0
    infer_ns: int = 0
    output_ns: int = 0
    failure_ns: int = 0
    last_ns: int = 0

    def plus(self, other: "InferenceCounts") -> "InferenceCounts":
        sums = [a + b for a, b in zip(astuple(self), astuple(other), strict=True)]
        sums[-1] = max(self.last_ns, other.last_ns)
        return InferenceCounts(*sums)

    def succeeded(self, started: int, submitted: int, began: int, ended: int, resumed: int) -> None:
        """Count an answered request, before its answer is written."""
        self.successes += 1
        self.input_ns += submitted - started
        self.queue_ns += began - submitted + resumed - ended
        self.infer_ns += ended - began
        self.last_ns = resumed

    def failed(self, started: int) -> None:
        """Count a request that fails now."""
        self.failures += 1
        self.last_ns = time.perf_counter_ns()
        self.failure_ns += self.last_ns - started


class InferenceStatistics:
    """The counts of every serving version, added over the frontends. *Thread-safe.*"""

    def __init__(self) -> None:
        self.frontends: Callable[[], Sequence[Mapping[str, Any]]] = lambda: ()
        self.deployment_ids: Callable[[Deployment], Mapping[int, int]] = lambda deployment: {}

    def of(self, deployment: Deployment) -> InferenceCounts:
        name = counted_as(deployment.config.model, deployment.version, self.deployment_ids(deployment))
        found = [figures["inference"] for figures in self.frontends()]
        counted = [InferenceCounts(*counts[name]) for counts in found if name in counts]
        return reduce(InferenceCounts.plus, counted, InferenceCounts())

    def families(self) -> Iterator[Family]:
        """Return the counts under Triton's names, which lack the `_total` of Prometheus counters."""
        versions: dict[str, InferenceCounts] = {}
        for figures in self.frontends():
            for name, counts in figures["inference"].items():
                labels = label_text(("model", "version"), name.split("\0")[:2])
                versions[labels] = versions.get(labels, InferenceCounts()).plus(InferenceCounts(*counts))
        for name, text, value in _TRITON:
            yield family(
                "untyped", f"nv_inference_{name}", text, [(labels, value(counts)) for labels, counts in versions.items()]
            )


_TRITON: tuple[tuple[str, str, Callable[[InferenceCounts], int]], ...] = (
    ("request_success", "Answered requests.", lambda counts: counts.successes),
    ("request_failure", "Failed requests.", lambda counts: counts.failures),
    ("count", "Answered requests; a lookup is one inference.", lambda counts: counts.successes),
    ("exec_count", "Lookups.", lambda counts: counts.successes),
    (
        "request_duration_us",
        "Duration of answered requests.",
        lambda counts: (counts.input_ns + counts.queue_ns + counts.infer_ns + counts.output_ns) // 1000,
    ),
    ("queue_duration_us", "Time waiting for a thread and for the event loop.", lambda counts: counts.queue_ns // 1000),
    ("compute_input_duration_us", "Time reading requests.", lambda counts: counts.input_ns // 1000),
    ("compute_infer_duration_us", "Duration of lookups.", lambda counts: counts.infer_ns // 1000),
    ("compute_output_duration_us", "Time writing answers.", lambda counts: counts.output_ns // 1000),
)
"""Names after `nv_inference_` in Triton's docs/user_guide/metrics.md. Answers are not cached, so there is no `nv_cache_*`."""
