"""Histograms of durations: every one is counted, in bounded memory."""

import math
from array import array
from collections.abc import Sequence

import numpy as np

_BITS = 11
_LARGEST_NS = (1 << 43) - 1  # 2.4 hours
_BUCKETS = (43 - _BITS) << _BITS
_PENDING = 1 << 14


class TimeHistogram:
    """Counts durations in buckets at most 1/2048 of their value wide, like HdrHistogram. *One thread.*

    Below 4,096 ns a bucket is one nanosecond. Count, sum and maximum are exact. Takes at most 0.7 MB.
    """

    def __init__(self) -> None:
        self._counts = np.zeros(_BUCKETS, np.int64)
        self._pending = array("q")
        self._total_ns = 0
        self._largest_ns = 0

    def add(self, ns: int) -> None:
        self._pending.append(ns)
        if len(self._pending) >= _PENDING:
            self._settle()

    def merge(self, others: "Sequence[TimeHistogram]") -> "TimeHistogram":
        """Add the counts of other histograms. Returns itself."""
        for other in others:
            other._settle()
            self._counts += other._counts
            self._total_ns += other._total_ns
            self._largest_ns = max(self._largest_ns, other._largest_ns)
        return self

    def __len__(self) -> int:
        self._settle()
        return int(self._counts.sum())

    @property
    def total_s(self) -> float:
        self._settle()
        return self._total_ns / 1e9

    @property
    def largest_s(self) -> float:
        self._settle()
        return self._largest_ns / 1e9

    def quantiles_s(self, shares: Sequence[float]) -> list[float]:
        """Return the quantile of each share, rounded up to its bucket's end; 0 if empty."""
        self._settle()
        below = np.cumsum(self._counts)
        total = int(below[-1])
        if not total:
            return [0.0] * len(shares)
        buckets = np.searchsorted(below, [min(max(1, math.ceil(share * total)), total) for share in shares])
        return [min(_bucket_end(int(bucket)), self._largest_ns) / 1e9 for bucket in buckets]

    def _settle(self) -> None:
        if not self._pending:
            return
        pending, self._pending = np.array(self._pending, np.int64), array("q")
        self._total_ns += int(pending.sum())
        self._largest_ns = max(self._largest_ns, int(pending.max()))
        ns = np.clip(pending, 0, _LARGEST_NS)
        shift = np.maximum(np.frexp(ns.astype(np.float64))[1] - (_BITS + 1), 0).astype(np.int64)
        self._counts += np.bincount((shift << _BITS) + (ns >> shift), minlength=_BUCKETS)


def _bucket_end(bucket: int) -> int:
    """Return the longest duration of a bucket, in nanoseconds."""
    shift = max((bucket >> _BITS) - 1, 0)
    return ((bucket - (shift << _BITS) + 1) << shift) - 1
