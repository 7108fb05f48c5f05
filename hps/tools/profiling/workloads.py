"""Keys of synthetic clients."""

import numpy as np

from hps.types import IndexArray, KeyArray

_PERMUTATION_SEED = 31337


def power_law_ranks(rng: np.random.Generator, n: int, rows: int, alpha: float) -> IndexArray:
    """Draw ranks, (n,) int64 in [0, rows), whose popularity falls as (rank + 1)^-alpha; alpha 0 is uniform.

    With u uniform in [0, 1): rank = floor((u (N^g - 1) + 1)^(1/g)) with g = 1 - alpha, on [1, N): the generator of the
    benchmarks of NVIDIA's NVE and HugeCTR.
    """
    if alpha == 0:
        return rng.integers(0, rows, n, dtype=np.int64)
    if alpha == 1:
        ranks = np.exp(rng.random(n) * np.log(float(rows)))
    else:
        g = 1.0 - alpha
        ranks = (rng.random(n) * (float(rows) ** g - 1.0) + 1.0) ** (1.0 / g)
    clipped: IndexArray = np.minimum(ranks.astype(np.int64), rows) - 1
    return clipped


def hot_ranks(rng: np.random.Generator, n: int, rows: int, share: float, coverage: float) -> IndexArray:
    """Draw ranks, (n,) int64 in [0, rows), of a hot and a cold set, each uniform.

    Args:
        share: share of the ranks that are hot, from 0 on; at least one.
        coverage: share of the requests for hot ranks.
    """
    hot = min(max(1, round(rows * share)), rows)
    if hot == rows:
        return rng.integers(0, rows, n, dtype=np.int64)
    return np.where(rng.random(n) < coverage, rng.integers(0, hot, n), rng.integers(hot, rows, n))


def ids_of_ranks(ranks: IndexArray, rows: int) -> KeyArray:
    """Map ranks to ids, (n,) int64 in [0, rows), by a fixed permutation."""
    permutation = np.random.default_rng(_PERMUTATION_SEED).permutation(rows).astype(np.int64, copy=False)
    return permutation[ranks]


def power_law_keys(rng: np.random.Generator, n: int, rows: int, alpha: float) -> KeyArray:
    """Draw ids, (n,) int64 in [0, rows), with the popularity of `power_law_ranks`."""
    return ids_of_ranks(power_law_ranks(rng, n, rows, alpha), rows)
