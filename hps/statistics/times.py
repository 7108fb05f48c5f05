"""Histograms of durations."""

from bisect import bisect_left
from collections.abc import Iterable
from itertools import accumulate
from typing import Final

from hps.statistics.snapshot import Latency

_STAGE_BUCKETS = (1e-6, 2.5e-6, 5e-6, 1e-5)
LOOKUP_BUCKETS: Final = (2.5e-5, 5e-5, 1e-4, 2e-4, 3e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2.5e-2, 0.1, 0.5, 1.0, 5.0)
"""Bounds of complete calls in seconds."""
_BOUNDS = (*_STAGE_BUCKETS, *LOOKUP_BUCKETS)
LOOKUP_BOUNDS_NS: Final = tuple(round(1e9 * bound) for bound in _BOUNDS)
"""Bounds of the buckets of `LookupTimes`."""


class Times:
    """A histogram of durations. Change it only while holding the lock of its owner.

    Args:
        bounds_s: bucket bounds, ascending.

    Attributes:
        bounds_ns: bucket bounds in nanoseconds.
        buckets: counts per bucket, not cumulative; the last bucket is unbounded.
        total_ns: sum of the durations.
    """

    # prometheus-client's histogram takes a lock and scans its buckets: 1.2 us per duration. This one takes 0.4 us.
    __slots__ = ("_bounds_s", "bounds_ns", "buckets", "total_ns")

    def __init__(self, bounds_s: tuple[float, ...] = _BOUNDS) -> None:
        self._bounds_s = bounds_s
        self.bounds_ns = [round(bound * 1e9) for bound in bounds_s]
        self.buckets = [0] * (len(bounds_s) + 1)
        self.total_ns = 0

    def add(self, ns: int) -> None:
        self.buckets[bisect_left(self.bounds_ns, ns)] += 1
        self.total_ns += ns

    def add_buckets(self, buckets: Iterable[int], total_ns: int) -> None:
        self.buckets = [have + more for have, more in zip(self.buckets, buckets, strict=True)]
        self.total_ns += total_ns

    def latency(self) -> Latency:
        """Return the histogram for `HPS.stats`."""
        below = list(accumulate(self.buckets))
        return Latency(below[-1], self.total_ns / 1e9, tuple(zip(self._bounds_s, below, strict=False)))
