"""Predicted hit rates of a large table, from samples, against the caches themselves."""

import math

import pytest

from hps.models.sample import sample_chunks
from hps.models.writer import write_sparse_model
from hps.planning.hit_rates import predict
from tests.ring1.planning.test_hit_rates import SHARES, asked_keys, measured_hit_rate, sampled

ROWS, KEYS = 200_000, 1_500_000


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model") / "t"
    write_sparse_model(directory, sample_chunks(ROWS, 4, 0))
    return directory


@pytest.mark.parametrize(("name", "threshold"), [("0.99", 1.1), ("1.2", 0.9), ("shifting", 1.1), ("shifting", 0.7)])
def test_hit_rates_predicted_from_a_tenth_of_the_keys_are_measured(model, name, threshold):
    keys = asked_keys(name, KEYS, ROWS)
    capacities = [math.ceil(share * ROWS) for share in SHARES]
    for share, one in zip(SHARES, predict(sampled(keys, 0.1), capacities, threshold), strict=True):
        assert one.hit_rate == pytest.approx(measured_hit_rate(model, keys, share, threshold), abs=0.02), share
