"""Counts of a rollout: requests of both versions, and answers of both to the same requests.

A frontend counts, and publishes its counts as a list of numbers; the engine adds those of all frontends.
"""

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Final

import numpy as np
import numpy.typing as npt

from hps.statistics.snapshot import Latency
from hps.statistics.times import Times

BOUNDS: Final = tuple(2.0 ** (power / 2) for power in range(-32, 9))
"""Bounds of the buckets in seconds, from 15 us to 16 s: fine enough to tell two versions' 99th percentiles apart."""
_BUCKETS: Final = len(BOUNDS) + 1
_LARGEST: Final = 1e60  # of a number: the products of their sums stay finite, which JSON needs
_MOST_NUMBERS: Final = 1024  # compared of one array: more would keep the event loop of a frontend from its clients


class VersionCounts:
    """Requests that one version answered. *One thread counts.*

    Attributes:
        answered, errors: numbers of requests.
        times: from the hand-over to the engine to the answer.
        work: of that, in the engine, without waiting for a thread.
    """

    SIZE: Final = 4 + 2 * _BUCKETS
    __slots__ = ("answered", "errors", "times", "work")

    def __init__(self) -> None:
        self.answered = self.errors = 0
        self.times, self.work = Times(BOUNDS), Times(BOUNDS)

    def succeeded(self, ns: int, work_ns: int) -> None:
        self.answered += 1
        self.times.add(ns)
        self.work.add(work_ns)

    @property
    def requests(self) -> int:
        return self.answered + self.errors

    @property
    def error_rate(self) -> float:
        return self.errors / self.requests if self.requests else 0.0

    def quantile_s(self, share: float) -> float | None:
        """Return a quantile of the times in seconds; None before the first answer."""
        return self.times.latency().quantile_s(share) if self.answered else None

    def values(self) -> list[float]:
        """Return all counts as (SIZE,) numbers."""
        return [
            self.answered, self.errors, self.times.total_ns, self.work.total_ns, *self.times.buckets, *self.work.buckets
        ]  # fmt: skip

    def add(self, values: Sequence[float]) -> None:
        """Add the `values` of another one."""
        answered, errors, total_ns, work_ns, *buckets = (int(value) for value in values)
        self.answered += answered
        self.errors += errors
        self.times.add_buckets(buckets[:_BUCKETS], total_ns)
        self.work.add_buckets(buckets[_BUCKETS:], work_ns)

    def latency(self) -> Latency:
        return self.times.latency()


class Comparison:
    """Answers of both versions to the same requests. *One thread counts.*

    Attributes:
        identical, different: numbers of requests that both answered.
        failed: requests that the other version did not answer, or with other shapes.
        dropped: requests that were not compared, since the queue was full.
        nonfinite: of the different ones, those where the new version has an infinity or NaN and the old one a number.
        largest: largest difference of two numbers.
    """

    SIZE: Final = 14
    __slots__ = (
        "_differences", "_magnitude", "_new", "_new_squares", "_numbers", "_old", "_old_squares", "_products", "different",
        "dropped", "failed", "identical", "largest", "nonfinite",
    )  # fmt: skip

    def __init__(self) -> None:
        self.identical = self.different = self.failed = self.dropped = self.nonfinite = 0
        self.largest = 0.0
        self._numbers = 0
        self._magnitude = self._differences = 0.0
        self._old = self._new = self._old_squares = self._new_squares = self._products = 0.0

    @property
    def requests(self) -> int:
        return self.identical + self.different

    @property
    def difference(self) -> float | None:
        """Mean of |new - old| over the mean of |old|, over all numbers; None before the first."""
        if not self._numbers:
            return None
        if not self._differences:
            return 0.0
        return self._differences / self._magnitude if self._magnitude else math.inf

    @property
    def correlation(self) -> float | None:
        """Pearson's correlation of all numbers; None if it is undefined."""
        n = self._numbers
        spread = (n * self._old_squares - self._old**2) * (n * self._new_squares - self._new**2)
        if n < 2 or spread <= 0.0:
            return None
        return max(-1.0, min(1.0, (n * self._products - self._old * self._new) / math.sqrt(spread)))

    def compare(self, old: Sequence[npt.NDArray[np.generic]], new: Sequence[npt.NDArray[np.generic]]) -> None:
        """Compare the answers of both versions to one request: the same number of arrays of any shape."""
        if [array.shape for array in old] != [array.shape for array in new]:
            self.failed += 1
            return
        equal, broken = True, False
        for left, right in zip(old, new, strict=True):
            before, after = _sample(left), _sample(right)
            equal = equal and bool((before == after).all()) and np.array_equal(left, right)
            if not (np.isfinite(before).all() and np.isfinite(after).all()):
                finite = np.isfinite(before) & np.isfinite(after)
                broken |= bool((np.isfinite(before) & ~finite).any())
                before, after = before[finite], after[finite]
            self._add(before, after)
        self.identical += equal
        self.different += not equal
        self.nonfinite += broken

    def _add(self, old: npt.NDArray[np.float64], new: npt.NDArray[np.float64]) -> None:
        if not old.size:
            return
        old, new = np.clip(old, -_LARGEST, _LARGEST), np.clip(new, -_LARGEST, _LARGEST)
        apart = np.abs(new - old)
        self._numbers += old.size
        self._magnitude += float(np.abs(old).sum())
        self._differences += float(apart.sum())
        self.largest = max(self.largest, float(apart.max()))
        self._old += float(old.sum())
        self._new += float(new.sum())
        self._old_squares += float(old @ old)
        self._new_squares += float(new @ new)
        self._products += float(old @ new)

    def values(self) -> list[float]:
        """Return all counts as (SIZE,) numbers; the last is `largest`."""
        return [
            self.identical, self.different, self.failed, self.dropped, self.nonfinite, self._numbers, self._magnitude,
            self._differences, self._old, self._new, self._old_squares, self._new_squares, self._products, self.largest,
        ]  # fmt: skip

    def add(self, values: Sequence[float]) -> None:
        """Add the `values` of another one."""
        identical, different, failed, dropped, nonfinite, numbers, *sums, largest = values
        self.identical += int(identical)
        self.different += int(different)
        self.failed += int(failed)
        self.dropped += int(dropped)
        self.nonfinite += int(nonfinite)
        self._numbers += int(numbers)
        self._magnitude += sums[0]
        self._differences += sums[1]
        self._old += sums[2]
        self._new += sums[3]
        self._old_squares += sums[4]
        self._new_squares += sums[5]
        self._products += sums[6]
        self.largest = max(self.largest, largest)


def _sample(array: npt.NDArray[np.generic]) -> npt.NDArray[np.float64]:
    """Return evenly spread numbers of an array, at most `_MOST_NUMBERS`."""
    flat = array.reshape(-1)
    return flat[:: max(1, -(-flat.size // _MOST_NUMBERS))].astype(np.float64)


class RolloutCounts:
    """All counts of one rollout. *One thread counts.*

    Attributes:
        old, new: of the serving and of the new version.
        compared: answers of both.
    """

    SIZE: Final = 2 * VersionCounts.SIZE + Comparison.SIZE
    __slots__ = ("compared", "new", "old")

    def __init__(self) -> None:
        self.old, self.new, self.compared = VersionCounts(), VersionCounts(), Comparison()

    def values(self) -> list[float]:
        """Return all counts as (SIZE,) numbers."""
        return [*self.old.values(), *self.new.values(), *self.compared.values()]

    def add(self, values: Sequence[float]) -> None:
        """Add the `values` of another one.

        Raises:
            ValueError, TypeError: they are not such counts.
        """
        if len(values) != self.SIZE or not all(math.isfinite(value) and value >= -1e300 for value in values):
            raise ValueError(f"counts of a rollout: got {len(values)} numbers, expected {self.SIZE} finite ones")
        end = VersionCounts.SIZE
        self.old.add(values[:end])
        self.new.add(values[end : 2 * end])
        self.compared.add(values[2 * end :])

    @classmethod
    def since(cls, values: Sequence[float], before: Sequence[float]) -> "RolloutCounts":
        """Return the counts of the time between two states. `largest` is that of the later state."""
        counts = cls()
        grown = [now - then for now, then in zip(values, before, strict=True)]
        counts.add([*grown[:-1], values[-1]])
        return counts

    @classmethod
    def total(cls, parts: Iterable[Sequence[float]]) -> "RolloutCounts":
        counts = cls()
        for values in parts:
            counts.add(values)
        return counts


def slower_than(counts: VersionCounts, limit_s: float, *, work: bool) -> int:
    """Return how many requests took longer than `limit_s` for certain: those in buckets that start at or above it."""
    buckets = (counts.work if work else counts.times).buckets
    below = list(accumulate(buckets))
    place = next((place for place, bound in enumerate(BOUNDS) if bound >= limit_s), len(BOUNDS))
    return below[-1] - below[place] if place < len(BOUNDS) else 0
