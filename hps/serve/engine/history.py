"""Counts over the lifetime of a service in a few hundred points, for the charts of its page."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from hps.ground.threads.workers import PeriodicTask
from hps.statistics.metrics import Metrics
from hps.statistics.snapshot import Latency

_EVERY_S: Final = 5.0
MOST_POINTS: Final = 240


@dataclass(frozen=True, slots=True)
class Point:
    """Counts since the start, over all models in service. *Immutable.*"""

    at_s: float  # by the clock of `GET /v1/stats`
    keys: int
    hits: int  # of embedding caches
    misses: int
    latency: Latency  # of lookups


class History:
    """Records counts at regular intervals. *Thread-safe.*

    Args:
        metrics: returns the counters; None while the databases are being opened.
    """

    def __init__(self, metrics: Callable[[], Metrics | None], clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics = metrics
        self._clock = clock
        self._lock = threading.Lock()
        self._points: list[Point] = []
        self._every = 1  # calls of `record` from one point to the next
        self._calls = 0
        self._task: PeriodicTask | None = None

    def start(self) -> None:
        """Record the first point, and one every five seconds."""
        self.record()
        self._task = PeriodicTask("history", self.record, _EVERY_S)

    def close(self) -> None:
        if self._task is not None:
            self._task.abandon()

    def record(self) -> None:
        """Record a point if it is due."""
        with self._lock:
            due = not self._calls % self._every
            self._calls += 1
        if not due:
            return
        point = self._now()
        with self._lock:
            self._points.append(point)
            # The number of points is bounded: when there are too many, every second one is dropped, and the interval doubles.
            if len(self._points) > MOST_POINTS:
                self._points = self._points[::2]
                self._every *= 2

    def points(self) -> list[Point]:
        """Return the points in the order of time, and the current one."""
        with self._lock:
            points = list(self._points)
        return [*points, self._now()]

    def _now(self) -> Point:
        metrics = self._metrics()
        return Point(self._clock(), *(metrics.sums() if metrics is not None else (0, 0, 0, Latency())))
