"""Simulated misses are those of the cache itself, and a miniature has its share of the sets."""

import numpy as np
import pytest

from hps.cache.cpu.cache import NumpyCache
from hps.cache.cpu.miniature import NumpyPlan
from hps.cache.cpu.sets import WAYS
from hps.tensors.batch import Batch
from hps.testing.caches import spec


@pytest.mark.parametrize(
    ("rows", "rate", "sets"),
    [
        *[(0, 1.0, (1, 0)), (WAYS, 1.0, (1, 1)), (WAYS + 1, 1.0, (2, 2)), (10 * WAYS, 0.5, (5, 10))],
        *[(10 * WAYS, 0.3, (3, 10)), (10 * WAYS, 0.29, (2, 10))],  # 3.0000000000000004 or less
        *[(10 * WAYS, 0.01, (1, 10)), (1000 * WAYS, 0.001, (1, 1000))],
    ],
)
def test_a_miniature_has_its_share_of_the_sets_and_one_at_least(rows: int, rate: float, sets: tuple[int, int]) -> None:
    assert NumpyPlan.miniature_sets(rows, rate) == sets


@pytest.mark.parametrize(
    ("lookups", "threshold", "missed"),
    [
        ([[1, 2], [1, 3], [2, 3]], 1.1, [1, 1, 0, 1, 0, 0]),
        ([[1, 1, 2], [1, 1]], 1.1, [1, 1, 1, 0, 0]),  # every use in one lookup
        ([[], [5], [], [5]], 1.1, [1, 0]),
        ([[1], [1]], 0.0, [1, 0]),  # in the background, also
    ],
)
def test_keys_miss_once(lookups: list[list[int]], threshold: float, missed: list[int]) -> None:
    starts = np.cumsum([0, *map(len, lookups)])
    keys = np.concatenate([np.array(lookup, np.int64) for lookup in lookups])
    assert NumpyPlan.misses(keys, starts, starts, (1, 1), threshold).tolist() == [bool(one) for one in missed]


@pytest.mark.parametrize(("sets", "pool"), [(1, 10), (1, 40), (3, 100)])
def test_misses_of_a_whole_table_are_those_of_the_cache(sets: int, pool: int) -> None:
    rng = np.random.default_rng(sets + pool)
    lookups = [np.minimum(rng.zipf(1.3, 30) - 1, pool - 1).astype(np.int64) for _ in range(80)]
    starts = np.cumsum([0, *(lookup.size for lookup in lookups)])
    expected = NumpyPlan.misses(np.concatenate(lookups), starts, starts, (sets, sets), 1.1)
    cache = NumpyCache.create([spec(2)], [sets * WAYS], 0)
    lookup, missed = cache.create_lookup(), []
    for keys in lookups:
        found = np.zeros(keys.size, np.bool_)
        lookup.query(Batch.of(0, keys, np.empty((keys.size, 2), np.float32), found))
        missed.append(~found)
        for one in lookup.unique():
            one.buffer()[:] = 0
            one.stage(0, one.keys.size)
            one.insert(np.ones(one.keys.size, np.bool_))
        lookup.finish()
    np.testing.assert_array_equal(np.concatenate(missed), expected)
    assert expected.any()
    assert not expected.all()
    cache.close()
