import pytest

from hps.lookup.circuit_breaker import CircuitBreaker
from tests.fakes.clock import Clock


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def opened(clock):
    """A breaker that is open for 5 s from 0 on."""
    breaker = CircuitBreaker(failures=2, open_s=5, clock=clock)
    breaker.failed()
    breaker.failed()
    return breaker


def test_single_failures_between_successes_never_open_it():
    breaker = CircuitBreaker(failures=2)
    for _ in range(5):
        breaker.failed()
        breaker.succeeded()
    assert breaker.allow()
    assert not breaker.is_open


def test_failures_in_a_row_open_it_for_the_configured_time(opened, clock):
    assert opened.is_open
    assert not opened.allow()
    clock.now = 4.9
    assert not opened.allow()


def test_one_probe_passes_after_the_time_and_the_next_waits_again(opened, clock):
    clock.now = 5
    assert opened.allow()
    assert not opened.allow()
    clock.now = 10
    assert opened.allow()


def test_a_successful_probe_closes_it_and_a_failed_one_keeps_it_open(opened, clock):
    clock.now = 5
    assert opened.allow()
    opened.failed()
    assert not opened.allow()
    clock.now = 10
    assert opened.allow()
    opened.succeeded()
    assert opened.allow()
    assert opened.allow()
