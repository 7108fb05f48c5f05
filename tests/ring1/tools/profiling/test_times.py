"""TimeHistogram are counted within 1/2048 of their value, and quantiles are those of all of them."""

import math
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hps.tools.profiling.times import TimeHistogram


def times_of(values):
    times = TimeHistogram()
    for value in values:
        times.add(int(value))
    return times


@given(st.lists(st.integers(0, 1 << 40), min_size=1, max_size=300), st.floats(0.001, 1))
def test_quantiles_are_those_of_sorted_times(values, share):
    exact = sorted(values)[max(1, math.ceil(share * len(values))) - 1]
    got_ns = times_of(values).quantiles_s([share])[0] * 1e9
    assert exact - 0.01 <= got_ns <= exact * (1 + 1 / 2048) + 0.01
    assert times_of(values).largest_s * 1e9 == pytest.approx(max(values), rel=1e-12)


def test_more_times_than_wait_to_be_counted():
    rng = np.random.default_rng(1)
    values = (rng.pareto(1.5, 100_000) * 1e5).astype(np.int64)
    times = times_of(values)
    assert len(times) == values.size
    assert times.total_s == pytest.approx(values.sum() / 1e9)
    expected = np.quantile(values, [0.5, 0.99, 0.999], method="inverted_cdf") / 1e9
    assert times.quantiles_s([0.5, 0.99, 0.999]) == pytest.approx(expected, rel=1 / 2048)


def test_merged_times_are_those_of_all_even_from_another_process():
    a, b, c = times_of([1000, 2000]), times_of([5000]), times_of([1500])
    merged = a.merge([pickle.loads(pickle.dumps(one)) for one in (b, c)])
    assert (len(merged), merged.total_s, merged.largest_s) == (4, 9.5e-6, 5e-6)
    assert merged.quantiles_s([0.5, 1.0]) == pytest.approx([1.5e-6, 5e-6], rel=1e-3)
    assert TimeHistogram().quantiles_s([0.5]) == [0.0]
