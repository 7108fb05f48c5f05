"""Counts of HTTP requests: Prometheus metrics by route, and by version what Triton's statistics report."""

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any
from weakref import WeakKeyDictionary

from prometheus_client import ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from hps.deployment import Deployment
from hps.statistics import Latency

_BUCKETS = (1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
DISCONNECTED = 499
"""The status that is counted when a client goes away before its request is complete, and nothing is answered."""


@dataclass(slots=True)
class _RouteTimes:
    """Requests of a route: how many ended below each bound of `_BUCKETS` (the last: above), and the sum of their times."""

    buckets: list[int] = field(default_factory=lambda: [0] * (len(_BUCKETS) + 1))
    seconds: float = 0.0


class HTTPMetrics(Collector):
    """Counts requests, once each. *One per event loop*, which alone calls it.

    The counts are plain integers: a counter and a histogram of prometheus-client take locks that are not needed here, and
    together cost 1.5 us a request.

    Args:
        pending: returns how many lookups run or wait now.
        held_bytes: returns how many bytes of memory are held for clients now.
        ready: returns whether lookups of every model are answered now, except of those that cannot be loaded.
        device_failed: returns whether a device has failed.
        refusals: are shown, too.
    """

    def __init__(
        self,
        pending: Callable[[], float],
        held_bytes: Callable[[], float],
        ready: Callable[[], float],
        device_failed: Callable[[], float],
        refusals: Collector,
    ) -> None:
        self._counts: dict[tuple[str, int], int] = {}
        self._routes: dict[str, _RouteTimes] = {}
        self._gauges = (
            ("hps_http_lookups_pending", "Lookups that run or wait for a thread.", pending),
            ("hps_http_held_bytes", "Bytes of memory that are held for clients.", held_bytes),
            ("hps_ready", "1 while lookups are answered, ignoring models that cannot be loaded.", ready),
            ("hps_device_failed", "1 after a device has failed: no lookup is answered until a restart.", device_failed),
        )
        self._refusals = refusals
        self._process = ProcessCollector(registry=None)

    def count(self, route: str, status: int, seconds: float) -> None:
        """Count one request. `route` is a template, never the path of a request, so that its values are few."""
        key = (route, status)
        self._counts[key] = self._counts.get(key, 0) + 1
        times = self._routes.get(route)
        if times is None:
            times = self._routes[route] = _RouteTimes()
        times.buckets[bisect_left(_BUCKETS, seconds)] += 1
        times.seconds += seconds

    def requests(self) -> list[dict[str, Any]]:
        """By route: how many requests were answered with which status, and their times as `statistics.Latency` has them."""
        found: dict[str, dict[str, Any]] = {}
        for route, times in self._routes.items():
            below = list(accumulate(times.buckets))
            latency = Latency(below[-1], times.seconds, tuple(zip(_BUCKETS, below, strict=False)))
            found[route] = {"route": route, "statuses": {}, "latency": latency}
        for (route, status), count in self._counts.items():
            found[route]["statuses"][str(status)] = count
        return list(found.values())

    def collect(self) -> Iterable[Metric]:
        """Yield the counts in Prometheus' form."""
        requests = CounterMetricFamily("hps_http_requests", "Requests by route and status.", labels=["route", "status"])
        for (route, status), count in self._counts.items():
            requests.add_metric([route, str(status)], count)
        seconds = HistogramMetricFamily(
            "hps_http_request_seconds", "Time from the headers of a request to the end of its answer.", labels=["route"]
        )
        for route, times in self._routes.items():
            below = list(zip([*map(str, _BUCKETS), "+Inf"], accumulate(times.buckets), strict=True))
            seconds.add_metric([route], below, times.seconds)
        yield from (requests, seconds)
        yield from (GaugeMetricFamily(name, text, value()) for name, text, value in self._gauges)
        yield from self._refusals.collect()
        yield from self._process.collect()


@dataclass(slots=True, eq=False)
class InferenceCounts:
    """Requests of one version that were answered, and that failed. *One per event loop*, which alone changes it.

    All times are nanoseconds of `time.perf_counter_ns`. Together, those of requests that were answered are the time from the
    complete body to the body of the answer.

    Attributes:
        successes, failures: how many.
        input_ns: reading the request.
        queue_ns: waiting for a thread, and then for the event loop.
        infer_ns: the lookup.
        output_ns: writing the answer; none where the lookup wrote it.
        failure_ns: requests that failed.
        last_ns: when the last one ended; 0 if there was none.
    """

    successes: int = 0
    failures: int = 0
    input_ns: int = 0
    queue_ns: int = 0
    infer_ns: int = 0
    output_ns: int = 0
    failure_ns: int = 0
    last_ns: int = 0

    def succeeded(self, started: int, submitted: int, began: int, ended: int, resumed: int) -> None:
        """Count a request that is answered, but for the time to write the answer."""
        self.successes += 1
        self.input_ns += submitted - started
        self.queue_ns += began - submitted + resumed - ended
        self.infer_ns += ended - began
        self.last_ns = resumed

    def failed(self, started: int) -> None:
        """Count a request that failed now."""
        self.failures += 1
        self.last_ns = time.perf_counter_ns()
        self.failure_ns += self.last_ns - started


class InferenceStatistics(Collector):
    """The counts of every version in service. They go with it. *One per event loop.*"""

    def __init__(self) -> None:
        self._counts: WeakKeyDictionary[Deployment, InferenceCounts] = WeakKeyDictionary()

    def of(self, deployment: Deployment) -> InferenceCounts:
        """The counts of a version, which begin with its first request."""
        counts = self._counts.get(deployment)
        if counts is None:
            counts = self._counts[deployment] = InferenceCounts()
        return counts

    def collect(self) -> Iterable[Metric]:
        """Yield the counts under the names that Triton has for them, which do not end as counters of Prometheus do."""
        versions: dict[tuple[str, str], list[InferenceCounts]] = {}
        for deployment, counts in self._counts.items():
            versions.setdefault((deployment.config.model, deployment.version), []).append(counts)
        for name, text, value in _TRITON:
            family = Metric(f"nv_inference_{name}", text, "untyped")
            for (model, version), of_version in versions.items():
                labels = {"model": model, "version": version}
                family.add_sample(family.name, labels, sum(value(one) for one in of_version))
            yield family


_TRITON: tuple[tuple[str, str, Callable[[InferenceCounts], int]], ...] = (
    ("request_success", "Requests that were answered.", lambda one: one.successes),
    ("request_failure", "Requests that failed.", lambda one: one.failures),
    ("count", "Requests that were answered; a lookup is one inference.", lambda one: one.successes),
    ("exec_count", "Lookups.", lambda one: one.successes),
    (
        "request_duration_us",
        "Time of requests that were answered.",
        lambda one: (one.input_ns + one.queue_ns + one.infer_ns + one.output_ns) // 1000,
    ),
    ("queue_duration_us", "Time of waiting for a thread, and for the event loop.", lambda one: one.queue_ns // 1000),
    ("compute_input_duration_us", "Time of reading requests.", lambda one: one.input_ns // 1000),
    ("compute_infer_duration_us", "Time of lookups.", lambda one: one.infer_ns // 1000),
    ("compute_output_duration_us", "Time of writing answers.", lambda one: one.output_ns // 1000),
)
"""Names after `nv_inference_` of Triton's docs/user_guide/metrics.md. There is no cache of answers, so no `nv_cache_*`."""
