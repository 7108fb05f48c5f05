"""Fits power laws to recorded keys, and generates the keys that a power law would have recorded."""

import numpy as np

from hps.statistics.key_traces import KeyTrace
from hps.types import TableSpec

_SAMPLED_ROWS = 1 << 16
_ROUNDS = 20  # keys of the whole stream, as a multiple of the table's rows
_CAP = 8.0  # more uses of a key within an epoch of a cache of 1 % of the rows change nothing
_SEED = 31337
_HEAD = 64
_LEAST_USES = 6


def fitted_alpha(trace: KeyTrace) -> float:
    """Fit the exponent of popularity by rank, by maximum likelihood on the sampled ranks.

    The rank of the i-th sampled key is about i / rate, and a power law is scale-free.
    """
    _, counts = np.unique(trace.keys, return_counts=True)
    counts = np.sort(counts)[::-1]
    last = int(np.searchsorted(-counts, -_LEAST_USES, side="right"))  # the order of rarer keys is noise
    first = _HEAD if trace.rate < 1 and last > 4 * _HEAD else 0  # the first ranks depend on chance
    counts = counts[first:last] if last > first + 1 else counts
    logs = np.log(np.arange(first, first + counts.size) + 0.5 + trace.rate)
    weight, total = float(counts @ logs), float(counts.sum())
    low, high = 0.0, 4.0
    while high - low > 1e-4:  # the slope of the likelihood falls
        alpha = (low + high) / 2
        powers = np.exp(-alpha * logs)
        if total * float(powers @ logs) / float(powers.sum()) > weight:
            low = alpha
        else:
            high = alpha
    return (low + high) / 2


def power_law_trace(table: TableSpec, rows: int, alpha: float, lookup_keys: int) -> KeyTrace:
    """Generate the keys that a recording of `hps.tools.profiling.workloads`' power law would contain.

    Args:
        rows: rows of the table.
        lookup_keys: keys of the table per lookup.
    """
    rng = np.random.default_rng(_SEED)
    sampled = min(rows, _SAMPLED_ROWS)
    ranks = np.sort(rng.choice(rows, sampled, replace=False)) if rows < 1 << 24 else np.unique(rng.integers(0, rows, sampled))
    chances = _below(ranks + 1, rows, alpha) - _below(ranks, rows, alpha)
    chances = np.minimum(chances, _CAP / (0.01 * rows))
    asked = _ROUNDS * rows
    uses = rng.poisson(asked * chances)
    keys = np.repeat(rng.integers(-(1 << 62), 1 << 62, ranks.size), uses)
    lookups = np.sort(rng.integers(0, max(asked // lookup_keys, 1), keys.size))
    rng.shuffle(keys)
    return KeyTrace(table.model_name, table.table_name, keys, lookups, ranks.size / rows, 0.0, hashed=True, asked=asked)


def _below(ranks: np.ndarray, rows: int, alpha: float) -> np.ndarray:
    """Compute the cumulative share of uses of the first ranks, for the generator of `hps.tools.profiling.workloads`."""
    x = np.maximum(ranks, 0) + 1.0
    if alpha == 0:
        return np.asarray(ranks / rows)
    if alpha == 1:
        return np.asarray(np.log(x) / np.log(rows + 1.0))
    g = 1.0 - alpha
    return np.asarray((x**g - 1.0) / ((rows + 1.0) ** g - 1.0))
