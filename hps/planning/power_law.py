"""Power laws: the exponent of recorded keys, and the keys that one would have recorded."""

import numpy as np

from hps.key_traces import KeyTrace
from hps.types import TableSpec

_SAMPLED_ROWS = 1 << 16
_ROUNDS = 20  # lookups of the whole stream ask for so many times as many keys as the table has rows
_CAP = 8.0  # uses of a key, within an epoch of a cache of 1 % of the rows, beyond which more change nothing
_SEED = 31337
_HEAD = 64
_LEAST_USES = 6


def fitted_alpha(trace: KeyTrace) -> float:
    """The exponent by which popularity falls with its rank, by maximum likelihood on the sampled ranks.

    The rank of the i-th of the sampled keys is about i / rate, and a power law looks the same at every scale.
    """
    _, counts = np.unique(trace.keys, return_counts=True)
    counts = np.sort(counts)[::-1]
    last = int(np.searchsorted(-counts, -_LEAST_USES, side="right"))  # rarer keys are not in the order of their popularity
    first = _HEAD if trace.rate < 1 and last > 4 * _HEAD else 0  # of the first, chance decided which ranks they have
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
    """The keys that would have been recorded of a power law of so many rows, as `hps.workloads` has it.

    Args:
        rows: of the table.
        lookup_keys: of the table in a lookup.
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
    return KeyTrace(table.model_name, table.table_name, keys, lookups, ranks.size / rows, 0.0, True, asked)


def _below(ranks: np.ndarray, rows: int, alpha: float) -> np.ndarray:
    """The share of all uses of the first so many ranks, by the generator of `hps.workloads`."""
    x = np.maximum(ranks, 0) + 1.0
    if alpha == 0:
        return np.asarray(ranks / rows)
    if alpha == 1:
        return np.asarray(np.log(x) / np.log(rows + 1.0))
    g = 1.0 - alpha
    return np.asarray((x**g - 1.0) / ((rows + 1.0) ** g - 1.0))
