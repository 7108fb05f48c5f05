from hps.lookup.circuit_breaker import CircuitBreaker


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def opened(clock: Clock) -> CircuitBreaker:
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


def test_failures_in_a_row_open_it_for_the_configured_time():
    clock = Clock()
    breaker = opened(clock)
    assert breaker.is_open
    assert not breaker.allow()
    clock.now = 4.9
    assert not breaker.allow()


def test_one_probe_passes_after_the_time_and_the_next_waits_again():
    clock = Clock()
    breaker = opened(clock)
    clock.now = 5
    assert breaker.allow()
    assert not breaker.allow()
    clock.now = 10
    assert breaker.allow()


def test_successful_probe_closes_it():
    clock = Clock()
    breaker = opened(clock)
    clock.now = 5
    assert breaker.allow()
    breaker.succeeded()
    assert breaker.allow()
    assert breaker.allow()


def test_failed_probe_keeps_it_open():
    clock = Clock()
    breaker = opened(clock)
    clock.now = 5
    assert breaker.allow()
    breaker.failed()
    assert not breaker.allow()
