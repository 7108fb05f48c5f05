"""Simulates the misses of a table of the NumPy cache: its rules of recency and admission, on sets without vectors.

The sets, scores and evictions are those of `sets.py`. A *miniature* has fewer sets and gets the same share of the keys, in
epochs as long in lookups as those of the full table (Waldspurger et al., "Cache Modeling and Optimization using Miniature
Simulations", USENIX ATC 2017).
"""

from collections.abc import Sequence

import numpy as np
from numba import boolean, float64, int64

from hps.cache.base import ALONE, CachePlan, DeviceSharing
from hps.cache.cpu.cache import NumpyCache, aligned_lines
from hps.cache.cpu.sets import EPOCHS_A_CALL, WAYS, epoch_at, find, is_idle, line_of, probation_at, touch, victim
from hps.ground.kernels.numba_atomics import address_of, store_relaxed, store_relaxed_u8
from hps.ground.kernels.numba_kernels import kernel, read_only
from hps.ground.memory.capacity import Need
from hps.types import BoolArray, IndexArray, KeyArray, TableSpec

_SMOOTHING = 0.02  # of the expected hit rate of lookups: about fifty lookups count


@kernel(
    boolean[::1], int64[:, ::1], int64, read_only(int64[::1]), read_only(int64[::1]), read_only(int64[::1]), float64, float64
)
def _simulate(
    lines: IndexArray,  # (sets, 16) int64
    whole_sets: int,
    keys: KeyArray,  # (n,) int64
    starts: IndexArray,  # (lookups + 1,) int64
    clocks: IndexArray,  # (lookups + 1,) int64
    share: float,
    threshold: float,
) -> BoolArray:
    """Replay lookups; return which keys missed."""
    sets = lines.shape[0]
    base = address_of(lines)
    lookups = starts.size - 1
    missed = np.zeros(keys.size, np.bool_)
    missing = np.empty(max(keys.size, 1), np.int64)
    miss_rate, clock = 1.0, 0
    np.random.seed(1)  # noqa: NPY002 - what numba knows, and its own state
    for lookup in range(lookups):
        queried = max(clocks[lookup + 1] - clocks[lookup], 1)
        epoch = epoch_at(clock, whole_sets)
        count = distinct = 0
        seen = set(keys[:0])
        for i in range(starts[lookup], starts[lookup + 1]):
            line = line_of(keys[i], base, sets)
            slot = find(line, keys[i])
            if slot >= 0:
                touch(line, slot, epoch)
                continue
            count += 1
            missed[i] = True
            if keys[i] not in seen:
                seen.add(keys[i])
                missing[distinct] = keys[i]
                distinct += 1
        # A lookup of the full table is deferred if enough of its own keys hit; the miniature saw few of those.
        miss_rate += _SMOOTHING * (min(count / (share * queried), 1.0) - miss_rate)
        spread = np.sqrt(miss_rate * (1.0 - miss_rate) / queried)
        deferred = 1.0 - miss_rate + spread * np.random.normal() >= threshold  # noqa: NPY002
        clock += min(queried, EPOCHS_A_CALL * WAYS * whole_sets)
        epoch = epoch_at(clock, whole_sets)
        for i in range(distinct):
            line = line_of(missing[i], base, sets)
            slot = victim(line, epoch)
            if deferred or is_idle(line, slot, epoch):  # in the background, every fetched key is inserted
                store_relaxed(line + 16 + 8 * slot, missing[i])
                store_relaxed_u8(line + 2 + slot, probation_at(epoch))
    return missed


class NumpyPlan(CachePlan):
    """Memory needs and simulated misses of NumPy caches. *Immutable.*"""

    @classmethod
    def room_for(
        cls,
        tables: Sequence[TableSpec],
        capacity_rows: Sequence[int],
        static: bool = False,
        sharing: DeviceSharing = ALONE,
    ) -> list[Need]:
        """Return the memory of the tables; see `CachePlan.room_for`."""
        return NumpyCache.room_for(tables, capacity_rows, static)

    @classmethod
    def miniature_sets(cls, capacity_rows: int, rate: float) -> tuple[int, int]:
        """Return the number of sets of a miniature of at most this share of a table, at least one, and of the table."""
        total = -(-capacity_rows // WAYS)
        return max(int(total * rate + 1e-9), 1), total

    @classmethod
    def misses(
        cls,
        keys: KeyArray,  # (n,) int64
        starts: IndexArray,  # (lookups + 1,) int64
        clocks: IndexArray,  # (lookups + 1,) int64
        sets: tuple[int, int],
        threshold: float,
    ) -> BoolArray:
        """Replay lookups on an initially empty miniature of a table.

        Args:
            keys: keys of all lookups: the same share of the distinct keys as the miniature is of the table.
            starts: start of the keys of each lookup, and the end.
            clocks: keys queried of the full table before each lookup, and in total.
            sets: of the miniature, and of the full table.
            threshold: the `hit_rate_threshold`.

        Returns:
            (n,) bool: whether each key missed; every use of a missing key in one lookup does.
        """
        few, total = sets
        missed: BoolArray = _simulate(aligned_lines(few), total, keys, starts, clocks, few / total, threshold)
        return missed
