"""Shares of a table: the NumPy hash is that of the kernels and independent of their places, and every key has one share."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numba import njit

from hps.client.routing import server_indices
from hps.ground.hashing import mix, scale, share_hash
from hps.ground.shares import MOST_SHARES, TableShare, rows_of_share, share_indices, share_text, with_share

EXTREMES = np.array([0, 1, -1, 2**63 - 1, -(2**63), 2**32, -(2**32), 2**31 - 1], np.int64)


@njit
def in_shares(keys, of, indices):  # pragma: no cover - compiled
    for i in range(keys.size):
        indices[i] = scale(share_hash(keys[i]), of)


@njit
def in_sets(keys, sets, indices):  # pragma: no cover - compiled
    for i in range(keys.size):
        indices[i] = scale(mix(keys[i]), sets)


@njit
def on_devices(keys, devices, indices):  # pragma: no cover - compiled
    for i in range(keys.size):
        indices[i] = scale(mix(np.int64(mix(keys[i]))), devices)


@pytest.fixture(scope="module")
def keys() -> np.ndarray:
    rng = np.random.default_rng(7)
    return np.concatenate([EXTREMES, np.arange(-500, 500), rng.integers(-(2**63), 2**63 - 1, 70_000)])


@pytest.mark.parametrize("of", [1, 2, 3, 7, 4096, MOST_SHARES])
def test_shares_are_those_of_the_kernels_hash(keys, of):
    expected = np.empty(keys.size, np.int64)
    in_shares(keys, of, expected)
    np.testing.assert_array_equal(share_indices(keys, of), expected)


def test_shares_are_of_one_size(keys):
    counts = np.bincount(share_indices(keys, 4))
    assert counts == pytest.approx(keys.size / 4, rel=0.02)
    assert all(TableShare(index, 4).most_rows(keys.size) >= count for index, count in enumerate(counts))


@given(st.integers(-(2**63), 2**63 - 1), st.integers(1, 12), st.integers(1, 12))
def test_a_share_of_more_lies_in_the_shares_that_cover_it(key, few, factor):
    index, of = share_indices(np.array([key]), few * factor)[0], few * factor
    assert share_indices(np.array([key]), few)[0] == index // factor
    assert [TableShare(other, of).owns(np.array([key]))[0] for other in range(of)].count(True) == 1


@pytest.mark.parametrize("of", [2, 3, 8])
def test_the_keys_of_a_share_use_all_of_a_cache_and_all_devices(keys, of):
    """By the same hash they would use one part of the sets."""
    own = keys[TableShare(of - 1, of).owns(keys)]
    for place in (in_sets, on_devices):
        places = np.empty(own.size, np.int64)
        place(own, 16, places)
        assert np.bincount(places, minlength=16) == pytest.approx(own.size / 16, rel=0.2)
    assert np.bincount(server_indices(own, list("abcd"))) == pytest.approx(own.size / 4, rel=0.1)


@pytest.mark.parametrize("text", ["", "1", "1/", "/2", "2/2", "-1/2", "0/0", "0/65537", "1/2/3", "a/2", "0x1/2", "²/3"])
def test_other_texts_are_no_share(text):
    with pytest.raises(ValueError, match=r"^" + text.replace("/", "/")):
        TableShare.parse(text)


def test_a_share_is_part_of_a_fingerprint():
    share = TableShare.parse("3/4")
    assert share == TableShare(3, 4)
    assert share_text(with_share("abc", share)) == str(share) == "3/4"
    assert share_text(with_share("abc", None)) == ""
    assert (rows_of_share(None, 10), rows_of_share(TableShare(0, 2), 10)) == (10, 10)


def test_a_client_routes_by_shares_without_numba():
    code = "import sys, hps; hps.connect(['http://a', 'http://b'], route='keys'); print('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
