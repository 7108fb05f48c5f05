"""Predicts the hit rate of an embedding cache of each size from recorded keys.

Two predictors use keys that a recording sampled by hash:

*   `cache_hit_rate` replays them on a miniature of the NumPy cache, with its rules and a number of sets scaled by the sampling
    rate (Waldspurger et al., USENIX ATC 2017). Plans use it.
*   `ideal_hit_rates` computes scaled reuse distances (SHARDS, Waldspurger et al., FAST 2015): the hit rate of a fully
    associative LRU cache. One pass gives all sizes.

Both count misses and take all other keys as hits: sampling one of the few most popular keys or not changes the number of
recorded keys a lot, but hardly the misses (`SHARDS-adj` of the same paper).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numba import int64

from hps.ground.kernels.numba_kernels import kernel, read_only
from hps.ground.registry import implementation
from hps.statistics.key_traces import KeyTrace, distinct_share
from hps.types import BoolArray, IndexArray

MOST_KEYS = 1 << 18
"""Maximum distinct keys of a trace to use; with so many, the sampling error is below 0.005."""
_WARM_UP = 0.5  # share of the lookups before misses are counted


@dataclass(frozen=True, slots=True)
class TablePrediction:
    """Predicted hit rate of one table for one cache size. *Immutable.*"""

    capacity_rows: int
    hit_rate: float  # in steady state, duplicates counted
    ideal: float  # hit rate of a fully associative LRU cache of as many rows


@dataclass(frozen=True, slots=True)
class Replay:
    """A trace, replayed on a miniature of one cache. *Immutable.*"""

    trace: KeyTrace  # the keys of the lookups
    missed: BoolArray  # (n,) bool: which of them missed
    span: tuple[int, int]  # first number and count of the lookups

    @property
    def misses(self) -> float:
        """Estimated misses of the table in the second half of the lookups."""
        first, total = self.span
        late = self.trace.lookups - first >= _WARM_UP * total
        return int(self.missed[late].sum()) / self.trace.rate

    @property
    def hit_rate(self) -> float:
        """Hit rate in the second half of the lookups; 0 of an empty trace."""
        return hit_rate_of(self.misses, self.trace.asked) if self.trace.keys.size else 0.0


def predict(trace: KeyTrace, capacities: Sequence[int], threshold: float = 1.1) -> list[TablePrediction]:
    """Predict hit rates for these cache sizes on the second half of the recorded keys.

    Args:
        capacities: rows of each cache.
        threshold: the model's `hit_rate_threshold`.
    """
    small = trace.thinned(distinct_share(trace, MOST_KEYS))
    ideal = ideal_hit_rates(small, capacities)
    return [
        TablePrediction(rows, cache_hit_rate(small, rows, threshold), ideal_rate)
        for rows, ideal_rate in zip(capacities, ideal, strict=True)
    ]


def cache_hit_rate(trace: KeyTrace, capacity_rows: int, threshold: float = 1.1) -> float:
    """Predict the hit rate of the NumPy cache on the second half of a trace; see `predict`."""
    return replay(trace, capacity_rows, threshold).hit_rate if capacity_rows else 0.0


def replay(trace: KeyTrace, capacity_rows: int, threshold: float = 1.1, span: tuple[int, int] | None = None) -> Replay:
    """Replay a trace on a miniature of the NumPy cache; see `predict`.

    Args:
        capacity_rows: at least 1.
        span: first number and count of the lookups that the trace is part of; by default those of its keys.
    """
    plan = implementation("cache_plan", "cpu")
    sets, whole = plan.miniature_sets(capacity_rows, trace.rate)
    trace = trace.thinned(sets / whole)  # a whole number of sets of the same share
    numbers, starts = np.unique(trace.lookups, return_index=True)
    if span is None:
        span = (int(numbers[0]), int(numbers[-1]) - int(numbers[0]) + 1) if numbers.size else (0, 1)
    first, total = span
    clocks = (np.append(numbers - first, total) * (trace.asked / total)).astype(np.int64)
    missed = plan.misses(trace.keys, np.append(starts, trace.keys.size), clocks, (sets, whole), threshold)
    return Replay(trace, missed, span)


def ideal_hit_rates(trace: KeyTrace, capacities: Sequence[int]) -> list[float]:
    """Compute the hit rates of fully associative LRU caches on the second half of a trace; see `predict`."""
    if not trace.keys.size:
        return [0.0] * len(capacities)
    _, numbered = np.unique(trace.keys, return_inverse=True)
    distances = _distances(np.ascontiguousarray(numbered, np.int64))
    late = trace.lookups >= trace.lookups[0] + _WARM_UP * (trace.lookups[-1] - trace.lookups[0] + 1)
    far = np.sort(distances[late])
    counts = far.size - np.searchsorted(far, [rows * trace.rate for rows in capacities])
    return [hit_rate_of(int(misses) / trace.rate, trace.asked) for misses in counts]


def hit_rate_of(misses: float, asked: int) -> float:
    """Compute a hit rate from the misses in the second half of a trace with so many keys."""
    return min(max(1.0 - misses / (asked * (1 - _WARM_UP)), 0.0), 1.0) if asked else 0.0


@kernel(int64[::1], read_only(int64[::1]))
def _distances(numbered: IndexArray) -> IndexArray:
    """Count, for each key, the distinct keys since its last use; the largest int64 for its first use."""
    n = numbered.size
    tree = np.zeros(n + 1, np.int64)  # a Fenwick tree of the last uses
    last = np.full(n, -1, np.int64)
    found = np.empty(n, np.int64)
    for i in range(n):
        key = numbered[i]
        before = last[key]
        if before < 0:
            found[i] = np.iinfo(np.int64).max
        else:
            between = 0
            at = i
            while at > 0:
                between += tree[at]
                at -= at & -at
            at = before + 1
            while at > 0:
                between -= tree[at]
                at -= at & -at
            found[i] = between
            at = before + 1
            while at <= n:
                tree[at] -= 1
                at += at & -at
        last[key] = i
        at = i + 1
        while at <= n:
            tree[at] += 1
            at += at & -at
    return found
