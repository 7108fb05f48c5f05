"""Prometheus metrics of HTTP requests."""

from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import accumulate

from prometheus_client import ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

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
    """

    def __init__(self, pending: Callable[[], float], held_bytes: Callable[[], float], ready: Callable[[], float]) -> None:
        self._counts: dict[tuple[str, int], int] = {}
        self._routes: dict[str, _RouteTimes] = {}
        self._gauges = (
            ("hps_http_lookups_pending", "Lookups that run or wait for a thread.", pending),
            ("hps_http_held_bytes", "Bytes of memory that are held for clients.", held_bytes),
            ("hps_ready", "1 while lookups are answered, ignoring models that cannot be loaded.", ready),
        )
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
        yield from self._process.collect()
