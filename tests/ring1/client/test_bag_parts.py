"""Bags whose keys are split over servers: the parts combine to what one server answers."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import hps
from hps.client.bag_parts import BagParts
from hps.client.requests import bag_request
from hps.ground.shares import share_indices

VECTORS = np.random.default_rng(5).standard_normal((40, 3)).astype(np.float32)
VECTORS[7, 1] = VECTORS[9, 0] = np.nan
VECTORS[11, 2], VECTORS[12, 2] = np.inf, -np.inf


def pooled(bags, max_norm, combiner, dim=3):
    """Pool by `hps/tensors/bags.py`, bag by bag, in float64; `bags`: keys and weights."""
    answers = np.zeros((len(bags), dim))
    for answer, (keys, weights) in zip(answers, bags, strict=True):
        vectors = VECTORS[keys].astype(np.float64)
        norms = np.linalg.norm(vectors, axis=1, keepdims=True)
        if max_norm:
            vectors = np.where(norms > max_norm, vectors * (max_norm / (norms + 1e-7)), vectors)
        if combiner == "max":
            if len(keys):
                answer[:] = np.where(np.isnan(vectors[0]), np.nan, np.fmax.reduce(vectors, 0))
            continue
        divisor = {"sum": 1.0, "mean": weights.sum(), "sqrtn": np.sqrt((weights * weights).sum())}[combiner]
        answer[:] = (weights[:, None] * vectors).sum(0) / divisor if divisor else 0.0
    return answers


def answer_of(parts, rows):
    """Answer the request of a part as a server does."""
    inputs, count, parameters = parts.request(rows)
    arrays = {one.name: one.array for one in inputs}
    keys = arrays["t"].reshape(-1)
    offsets = arrays.get("t.offsets", np.arange(keys.size + 1))
    weights = arrays.get("t.weights", np.ones(keys.size, np.float32)).astype(np.float64)
    bags = [(keys[a:b], weights[a:b]) for a, b in pairwise(offsets)]
    assert (len(bags), offsets[-1], set(map(len, bags)) <= {0}) == (count, keys.size, not keys.size)
    with np.errstate(invalid="ignore"):
        return pooled(bags, parameters.get("t.max_norm"), parameters["t.combiner"]).astype(np.float32)


@given(
    data=st.data(),
    lengths=st.lists(st.integers(0, 5), max_size=8),
    combiner=st.sampled_from(["sum", "mean", "sqrtn", "max"]),
    max_norm=st.sampled_from([None, 1.0]),
    padding=st.sampled_from([None, 3]),
    shares=st.integers(1, 3),
    weighted=st.booleans(),
    last=st.booleans(),
)
def test_parts_combine_to_the_answer_of_one_server(data, lengths, combiner, max_norm, padding, shares, weighted, last):
    n = sum(lengths)
    keys = np.array(data.draw(st.lists(st.integers(0, 12), min_size=n, max_size=n)), np.int64)
    weights = None
    if weighted and combiner != "max":
        weights = np.array(data.draw(st.lists(st.sampled_from([-1.0, 0.0, 0.5, 2.0]), min_size=n, max_size=n)), np.float32)
    ends = np.cumsum([0, *lengths])
    given_offsets = ends if last or not lengths else ends[:-1]
    bags = hps.Bags(keys, given_offsets, weights, combiner=combiner, max_norm=max_norm, padding_key=padding)
    bags.include_last_offset = len(given_offsets) == len(ends)
    parts = BagParts(bag_request("t", bags))
    servers = share_indices(parts.keys, shares)
    rows = [np.flatnonzero(servers == share) for share in range(shares)]
    with np.errstate(invalid="ignore"):
        combined = parts.combine([(of_part, answer_of(parts, of_part)) for of_part in rows], 3)
        factors = np.ones(n) if weights is None else weights.astype(np.float64)
        kept = [np.flatnonzero(keys[a:b] != padding) + a for a, b in pairwise(ends)]
        expected = pooled([(keys[of_bag], factors[of_bag]) for of_bag in kept], max_norm, combiner)
    np.testing.assert_allclose(combined, expected, rtol=1e-5, atol=1e-5)


def test_bags_of_one_length_are_rows_of_a_matrix():
    parts = BagParts(bag_request("t", hps.Bags([[1, 2], [3, 3], [-1, 4]], padding_key=-1)))
    assert parts.keys.tolist() == [1, 2, 3, 3, 4]
    inputs, count, parameters = parts.request(np.array([1, 2, 4]))
    assert (count, parameters) == (3, {"t.combiner": "sum"})
    assert [one.array.tolist() for one in inputs] == [[2, 3, 4], [0, 1, 2, 3]]


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn", "max"])
def test_bags_without_any_key_are_zeros(combiner):
    parts = BagParts(bag_request("t", hps.Bags([], [0, 0, 0], combiner=combiner)))
    np.testing.assert_array_equal(parts.combine([(np.empty(0, np.intp), np.empty((0, 3), np.float32))], 3), np.zeros((2, 3)))
