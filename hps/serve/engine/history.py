"""The past of a service in a few hundred points, for the charts of its page."""

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
    """Counts since the start, over all models in service. *Immutable.*

    Attributes:
        at_s: time of the point, by the clock of `GET /v1/stats`.
        keys: requested keys.
        hits, misses: keys that embedding caches had, and had not.
        latency: times of lookups.
    """

    at_s: float
    keys: int
    hits: int
    misses: int
    latency: Latency


class History:
    """Keeps counts at regular times since the start. When there are too many, every second one goes. *Thread-safe.*

    Args:
        metrics: returns the counters; None while the databases are being opened.
    """

    def __init__(self, metrics: Callable[[], Metrics | None], clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics = metrics
        self._clock = clock
        self._lock = threading.Lock()
        self._points: list[Point] = []
        self._every = 1  # calls of `note` from one point to the next
        self._calls = 0
        self._task: PeriodicTask | None = None

    def start(self) -> None:
        """Take the first point, and one every five seconds."""
        self.note()
        self._task = PeriodicTask("history", self.note, _EVERY_S)

    def close(self) -> None:
        if self._task is not None:
            self._task.abandon()

    def note(self) -> None:
        """Take a point, if it is due."""
        with self._lock:
            due = not self._calls % self._every
            self._calls += 1
        if not due:
            return
        point = self._now()
        with self._lock:
            self._points.append(point)
            if len(self._points) > MOST_POINTS:
                self._points = self._points[::2]
                self._every *= 2

    def points(self) -> list[Point]:
        """Return the points in the order of time, the first from the start, and one of now."""
        with self._lock:
            points = list(self._points)
        return [*points, self._now()]

    def _now(self) -> Point:
        metrics = self._metrics()
        return Point(self._clock(), *(metrics.sums() if metrics is not None else (0, 0, 0, Latency())))
