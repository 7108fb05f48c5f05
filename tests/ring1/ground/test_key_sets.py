"""Sets of keys, against NumPy's."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hps.ground.kernels.numba_kernels import compile_kernels
from hps.ground.key_sets import PIECE_KEYS, SHARED_KEYS, DistinctKeys, KeyPlaces, KeySet, last_of_each

LEAST, MOST = np.iinfo(np.int64).min, np.iinfo(np.int64).max
SIZES = [0, 1, 2, 3, 1023, 1024, 1025, SHARED_KEYS - 1, SHARED_KEYS, 2 * SHARED_KEYS + PIECE_KEYS // 2]

compile_kernels()
few = st.lists(st.sampled_from([0, -1, 1, LEAST, MOST, LEAST + 1, 1 << 32, 7]) | st.integers(LEAST, MOST), max_size=40)


def drawn(size: int, distinct: int) -> np.ndarray:
    return np.random.default_rng(size).choice(np.r_[LEAST, MOST, -1, 0, np.arange(3, distinct) << 20], size)


many = [pytest.param(drawn(size, distinct), id=f"{size} of {distinct}") for size in SIZES for distinct in (5, 50_000)]


def check_places(keys: np.ndarray) -> None:
    unique, first = np.unique(keys, return_index=True)
    last = keys.size - 1 - np.unique(keys[::-1], return_index=True)[1]
    assert np.array_equal(np.flatnonzero(last_of_each(keys)), np.sort(last))

    own = unique[::2].copy()
    there, here = KeyPlaces(own).match(keys)
    assert np.array_equal(there, np.flatnonzero(np.isin(keys, own)))
    assert np.array_equal(own[here], keys[there])

    finder = DistinctKeys()
    for places in (np.arange(keys.size), np.arange(keys.size)[::3].copy(), first):  # the scratch serves again
        if places.size:
            inverse = np.full(places.size + 3, -9)
            distinct = finder.find(keys, places, inverse)
            assert np.array_equal(np.sort(distinct), np.unique(keys[places]))
            assert np.array_equal(distinct[inverse[: places.size]], keys[places])
            assert (inverse[places.size :] == -9).all()


def check_set(batches: list[np.ndarray], most: int) -> None:
    keys, together = KeySet(most), np.concatenate([np.empty(0, np.int64), *batches])
    new = np.concatenate([np.empty(0, np.bool_), *(keys.add(batch) for batch in batches)])
    assert np.array_equal(np.flatnonzero(new), np.sort(np.unique(together, return_index=True)[1]))
    asked = np.concatenate([together, together + 1, [0, -1, LEAST, MOST]])
    assert np.array_equal(keys.contains(asked), np.isin(asked, together))


@given(few)
def test_places_of_few_keys_are_those_that_numpy_finds(keys):
    check_places(np.array(keys, np.int64))


@pytest.mark.parametrize("keys", many)
def test_places_of_many_keys_are_those_that_numpy_finds(keys):
    check_places(keys)


@given(st.lists(few, max_size=6), st.booleans())
def test_a_set_has_what_was_added(batches, known):
    check_set([np.array(batch, np.int64) for batch in batches], sum(map(len, batches)) if known else 0)


@pytest.mark.parametrize("keys", many)
def test_a_set_grows(keys):
    check_set([keys[: keys.size // 2], keys, keys[::2].copy()], 0)


def test_the_key_whose_hash_is_nothing_is_a_key():
    key = np.zeros(1, np.int64)  # `mix` leaves 0 as it is
    keys = KeySet()
    assert not keys.contains(key).any()
    assert keys.add(key).all()
    assert keys.add(np.arange(1, 5000)).all()
    assert keys.contains(key).all()
    assert not keys.add(key).any()
