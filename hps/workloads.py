"""Keys as synthetic clients ask for them."""

import numpy as np

from hps.types import IndexArray, KeyArray

_PERMUTATION_SEED = 31337


def power_law_ranks(rng: np.random.Generator, n: int, rows: int, alpha: float) -> IndexArray:
    """Draw ranks, (n,) int64 in [0, rows), whose popularity falls as (rank + 1)^-alpha; alpha 0 is uniform.

    u uniform in [0, 1); rank = floor((u (N^g - 1) + 1)^(1/g)) with g = 1 - alpha, on [1, N): the generator of the benchmarks of
    NVIDIA's NVE and HugeCTR.
    """
    if alpha == 0:
        return rng.integers(0, rows, n, dtype=np.int64)
    if alpha == 1:
        ranks = np.exp(rng.random(n) * np.log(float(rows)))
    else:
        g = 1.0 - alpha
        ranks = (rng.random(n) * (float(rows) ** g - 1.0) + 1.0) ** (1.0 / g)
    found: IndexArray = np.minimum(ranks.astype(np.int64), rows) - 1
    return found


def hot_ranks(rng: np.random.Generator, n: int, rows: int, share: float, coverage: float) -> IndexArray:
    """Draw ranks, (n,) int64 in [0, rows): a share of them gets so much of the requests, each as often as the others.

    Args:
        share: of the ranks that are hot, those from 0 on; at least one is, and where there are others they get the rest.
        coverage: of the requests that ask for hot ones.
    """
    hot = min(max(1, round(rows * share)), rows)
    if hot == rows:
        return rng.integers(0, rows, n, dtype=np.int64)
    return np.where(rng.random(n) < coverage, rng.integers(0, hot, n), rng.integers(hot, rows, n))


def ids_of_ranks(ranks: IndexArray, rows: int) -> KeyArray:
    """The ids, (n,) int64 in [0, rows), of ranks: those of a fixed permutation."""
    permutation = np.random.default_rng(_PERMUTATION_SEED).permutation(rows).astype(np.int64, copy=False)
    return permutation[ranks]


def power_law_keys(rng: np.random.Generator, n: int, rows: int, alpha: float) -> KeyArray:
    """Draw ids, (n,) int64 in [0, rows), of `power_law_ranks`."""
    return ids_of_ranks(power_law_ranks(rng, n, rows, alpha), rows)
