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
from hps.versions.deployment import Deployment

_BUCKETS = (1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
DISCONNECTED = 499
"""Status counted when a client disconnects before its request is complete; no answer is sent."""


class HTTPMetrics:
    """Counts requests. *One per event loop*: only the loop counts, other threads may read.

    The counts are plain integers: a counter and a histogram of prometheus-client take locks, 1.5 us a request together.

    Args:
        refusals: exposed with the requests.
        ready: returns whether lookups of every model that can be loaded are answered.
        device_failed: returns whether a device is lost.
        degraded: returns whether lookups do without a device or a volatile database.

    Attributes:
        fronts: returns the figures of all fronts, which are added.
        loops: returns the counts of the loops that answer fronts.
    """

    def __init__(
        self,
        refusals: Refusals,
        ready: Callable[[], float] = lambda: False,
        device_failed: Callable[[], float] = lambda: False,
        degraded: Callable[[], float] = lambda: False,
    ) -> None:
        self.fronts: Callable[[], Sequence[Mapping[str, Any]]] = lambda: ()
        self.loops: Callable[[], Mapping[str, int]] = dict
        self._counts: dict[tuple[str, int], int] = {}
        self._routes: dict[str, Times] = {}
        self._who: dict[tuple[str, int], int] = {}
        self._ready, self._device_failed, self._degraded = ready, device_failed, degraded
        self._refusals = refusals
        self._process = ProcessCollector(registry=None)

    def count(self, route: str, status: int, seconds: float, who: str = "") -> None:
        """Count one request.

        Args:
            route: a template, not the path, to keep the number of labels small.
            who: name of its token, if tokens are asked for.
        """
        times = self._routes.get(route)  # before its count: readers find the times of each count
        if times is None:
            times = self._routes[route] = Times(_BUCKETS)
        # As `Times.add`, without its call: this is on the path of every request.
        ns = round(1e9 * seconds)
        times.buckets[bisect_left(times.bounds_ns, ns)] += 1
        times.total_ns += ns
        key = (route, status)
        self._counts[key] = self._counts.get(key, 0) + 1
        if who:
            self._who[who, status] = self._who.get((who, status), 0) + 1

    def figures(self) -> dict[str, Any]:
        """Return all counts as JSON can hold them, for `add`."""
        return {
            "counts": {f"{status} {route}": count for (route, status), count in self._counts.items()},
            "who": {f"{status} {who}": count for (who, status), count in self._who.items()},
            "times": {route: [times.total_ns, *times.buckets] for route, times in self._routes.items()},
            "refused": dict(self._refusals.refused),
            "aborted": dict(self._refusals.aborted),
        }

    def add(self, figures: Mapping[str, Any]) -> None:
        """Add the counts that another one returned as `figures`."""
        for counts, more in ((self._counts, figures["counts"]), (self._who, figures["who"])):
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
        total = self._with(self.fronts())
        found: dict[str, dict[str, Any]] = {
            route: {"route": route, "statuses": {}, "latency": times.latency()} for route, times in total._routes.items()
        }
        for (route, status), count in total._counts.items():
            found[route]["statuses"][str(status)] = count
        return list(found.values())

    def held(self) -> dict[str, int]:
        """Return the number of fronts, and the sums of their gauges."""
        fronts = self.fronts()
        return {"fronts": len(fronts), **{name: sum(front[name] for front in fronts) for _, _, name in _OF_FRONTS}}

    def _with(self, fronts: Sequence[Mapping[str, Any]]) -> "HTTPMetrics":
        """Return the sum of these counts and those of fronts."""
        total = HTTPMetrics(Refusals())
        for figures in (self.figures(), *(front["http"] for front in fronts)):
            total.add(figures)
        return total

    def families(self) -> Iterator[Family]:
        fronts = self.fronts()
        total = self._with(fronts)
        requests = [(label_text(("route", "status"), (where, str(status))), n) for (where, status), n in total._counts.items()]
        yield family("counter", "hps_http_requests", "Requests by route and status.", requests)
        named = [(label_text(("who", "status"), (who, str(status))), n) for (who, status), n in total._who.items()]
        yield family("counter", "hps_http_token_requests", "Requests by name of their token and status.", named)
        times = [(label_text(["route"], [route]), one.latency()) for route, one in total._routes.items()]
        yield histogram("hps_http_request_seconds", "Time from the headers of a request to the end of its answer.", times)
        for name, text, figure in _OF_FRONTS:
            values = [(label_text(["front"], [str(nth)]), one[figure]) for nth, one in enumerate(fronts)]
            yield family("gauge", name, text, values)
        times_used = [(label_text(["front"], [str(nth)]), one["cpu_ns"] / 1e9) for nth, one in enumerate(fronts)]
        yield family("counter", "hps_front_cpu_seconds", "Processor time of each front.", times_used)
        loops = self.loops()
        for name, text in _OF_LOOPS.items():
            yield family("counter", name, text, [("", loops.get(name.removeprefix("hps_owner_"), 0))])
        yield family("gauge", "hps_ready", _READY, [("", self._ready())])
        yield family("gauge", "hps_device_failed", _DEVICE_FAILED, [("", self._device_failed())])
        yield family("gauge", "hps_degraded", _DEGRADED, [("", self._degraded())])
        yield from total._refusals.families()
        for one in self._process.collect():
            yield family(one.type, one.name, one.documentation, [("", sample.value) for sample in one.samples])


_OF_FRONTS: Final = (
    ("hps_http_connections", "Open connections.", "connections"),
    ("hps_http_lookups_pending", "Lookups that were posted and not answered.", "pending"),
    ("hps_http_held_bytes", "Memory held for clients.", "held_bytes"),
    ("hps_http_cached_bytes", "Memory of what is remembered of requests.", "cached_bytes"),
)
_OF_LOOPS: Final = {
    "hps_owner_batches": "Batches that the engine's loop answered.",
    "hps_owner_handed_over": "Lookups that the loop left to service.lookup_threads.",
    "hps_owner_malformed": "Lookups of fronts that were refused because their descriptor was malformed.",
    "hps_owner_wakes": "How often the loop woke from sleep.",
}
_READY: Final = "1 while lookups are answered, ignoring models that cannot be loaded."
_DEVICE_FAILED: Final = "1 while a device of a model in service is lost, until a restart."
_DEGRADED: Final = "1 while lookups do without a lost device or a volatile database; /v2/health/ready says which."


def are_figures(found: Mapping[str, Any]) -> bool:
    """Return whether these are figures of a front, which may write anything once it was broken into."""
    try:
        HTTPMetrics(Refusals()).add(found["http"])
        for one in found["inference"].values():
            InferenceCounts().plus(InferenceCounts(*one))
        return all(isinstance(found[name], int) for name in ("cpu_ns", *(name for _, _, name in _OF_FRONTS)))
    except (KeyError, TypeError, ValueError, AttributeError):
        return False


def counted_as(model: str, version: str, deployment_ids: Mapping[int, int]) -> str:
    """Return the name of a deployment's counts: a version that is deployed again begins anew."""
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
        """Return the sum of both."""
        mine, its = astuple(self), astuple(other)
        sums = [a + b for a, b in zip(mine, its, strict=True)]
        sums[-1] = max(mine[-1], its[-1])  # a time
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
    """The counts of every version in service, which its fronts keep. *Thread-safe.*

    Attributes:
        fronts: returns the figures of all fronts.
        deployment_ids: returns by device how fronts name a deployment.
    """

    def __init__(self) -> None:
        self.fronts: Callable[[], Sequence[Mapping[str, Any]]] = lambda: ()
        self.deployment_ids: Callable[[Deployment], Mapping[int, int]] = lambda deployment: {}

    def of(self, deployment: Deployment) -> InferenceCounts:
        """Return the counts of a version."""
        name = counted_as(deployment.config.model, deployment.version, self.deployment_ids(deployment))
        counted = [InferenceCounts(*front["inference"][name]) for front in self.fronts() if name in front["inference"]]
        return reduce(InferenceCounts.plus, counted, InferenceCounts())

    def families(self) -> Iterator[Family]:
        """Return the counts under Triton's names, which lack the `_total` of Prometheus counters."""
        versions: dict[str, InferenceCounts] = {}
        for front in self.fronts():
            for name, counts in front["inference"].items():
                where = label_text(("model", "version"), name.split("\0")[:2])
                versions[where] = versions.get(where, InferenceCounts()).plus(InferenceCounts(*counts))
        for name, text, value in _TRITON:
            yield family("untyped", f"nv_inference_{name}", text, [(where, value(one)) for where, one in versions.items()])


_TRITON: tuple[tuple[str, str, Callable[[InferenceCounts], int]], ...] = (
    ("request_success", "Answered requests.", lambda one: one.successes),
    ("request_failure", "Failed requests.", lambda one: one.failures),
    ("count", "Answered requests; a lookup is one inference.", lambda one: one.successes),
    ("exec_count", "Lookups.", lambda one: one.successes),
    (
        "request_duration_us",
        "Duration of answered requests.",
        lambda one: (one.input_ns + one.queue_ns + one.infer_ns + one.output_ns) // 1000,
    ),
    ("queue_duration_us", "Time waiting for a thread and for the event loop.", lambda one: one.queue_ns // 1000),
    ("compute_input_duration_us", "Time reading requests.", lambda one: one.input_ns // 1000),
    ("compute_infer_duration_us", "Duration of lookups.", lambda one: one.infer_ns // 1000),
    ("compute_output_duration_us", "Time writing answers.", lambda one: one.output_ns // 1000),
)
"""Names after `nv_inference_` in Triton's docs/user_guide/metrics.md. Answers are not cached, so there is no `nv_cache_*`."""
