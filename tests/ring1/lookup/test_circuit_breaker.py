"""When a breaker lets calls through, by what was reported before."""

import pytest

from hps.lookup.circuit_breaker import CircuitBreaker
from tests.fakes.clock import Clock

FAILED, SUCCEEDED, ALLOWED, REFUSED = "failed", "succeeded", True, False


@pytest.mark.parametrize(
    ("failures", "events", "is_open"),
    [
        *[(1, [ALLOWED, FAILED, REFUSED], True), (3, [FAILED, FAILED, ALLOWED, ALLOWED], False)],
        *[(3, [FAILED, FAILED, FAILED, REFUSED, REFUSED], True), (3, [FAILED, FAILED, FAILED, FAILED, REFUSED], True)],
        (2, [FAILED, SUCCEEDED, FAILED, SUCCEEDED, FAILED, ALLOWED], False),  # never two in a row
        (2, [FAILED, FAILED, 4.999, REFUSED], True),
        (2, [FAILED, FAILED, 5, ALLOWED, REFUSED, 9.999, REFUSED, 10, ALLOWED, REFUSED], True),  # a probe in five seconds
        (2, [FAILED, 3, FAILED, 7.999, REFUSED, 8, ALLOWED], True),  # five seconds from the second failure
        (2, [FAILED, FAILED, 5, ALLOWED, 6, FAILED, 10.999, REFUSED, 11, ALLOWED], True),  # the probe failed
        (2, [FAILED, FAILED, 5, ALLOWED, SUCCEEDED, ALLOWED, ALLOWED], False),
        (2, [FAILED, FAILED, 5, SUCCEEDED, FAILED, ALLOWED, FAILED, REFUSED, 10, ALLOWED], True),  # the second round
    ],
)
def test_calls_are_let_through_or_refused(failures: int, events: list[str | bool | float], is_open: bool) -> None:
    clock = Clock()
    breaker = CircuitBreaker(failures=failures, open_s=5, clock=clock)
    for nth, event in enumerate(events):
        if isinstance(event, bool):
            assert breaker.allow() is event, f"event {nth}"
        elif isinstance(event, str):
            getattr(breaker, event)()
        else:
            clock.now = event
    assert breaker.is_open is is_open
