"""Estimated rates of lookups: those that were measured, and lines between and beyond them."""

import pytest

from benchmarks.figures import figures
from hps.tools.planning.read_rates import Reads, seconds_per_key

LOCAL, NEIGHBOUR, HOST = Reads(1.0, 0.0, 0.0), Reads(0.0, 1.0, 0.0), Reads(0.0, 0.0, 1.0)


@pytest.mark.parametrize("dim", [32, 128])
def test_measured_rates_are_those_of_the_results(dim):
    hits = figures("gpu_cache", dim=dim, work="query", batch=1 << 18, alpha=0.0)["mkeys_per_s"]
    half_remote = figures("sharing", dim=dim, work="resident", batch=1 << 18, devices=2)["mkeys_per_s"]
    lookup = figures("misses", dim=dim, work="mixed", path="link", batches_before=600)
    misses = (1 - lookup["hit_rate"]) * (1 << 18) / lookup["link_us"]
    for reads, rate in ((LOCAL, hits), (NEIGHBOUR, half_remote / 2), (HOST, misses)):
        assert 1e-6 / seconds_per_key(reads, 4 * dim) == pytest.approx(rate, rel=0.002)


def test_a_rate_between_two_measured_ones_is_on_their_line():
    assert seconds_per_key(HOST, 320) == pytest.approx((1 / 52.6e6 + 1 / 34.6e6) / 2)


@pytest.mark.parametrize(("reads", "smallest"), [(LOCAL, 128), (NEIGHBOUR, 128), (HOST, 128)])
def test_time_grows_by_the_byte_from_the_smallest_measured_row_on(reads, smallest):
    assert seconds_per_key(reads, 4) == seconds_per_key(reads, smallest)
    step = seconds_per_key(reads, 512) - seconds_per_key(reads, smallest)
    assert seconds_per_key(reads, 512 + 2 * (512 - smallest)) == pytest.approx(seconds_per_key(reads, 512) + 2 * step)


def test_times_of_the_three_places_add_up():
    reads = Reads(0.5, 0.3, 0.2)
    assert seconds_per_key(reads, 512) == pytest.approx(0.5 / 3318e6 + 0.3 / 632e6 + 0.2 / 34.6e6)
    assert reads.hit_rate == 0.8
