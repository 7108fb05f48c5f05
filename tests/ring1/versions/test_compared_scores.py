"""How the scores of two versions for the same requests are compared."""

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from hps.configuration.checks import ChecksConfig
from hps.engine.refresh import Pace
from hps.errors import NetworkError
from hps.versions.checks.report import CheckOutcome
from hps.versions.checks.scores import CheckRequests, compare_scores
from hps.versions.deployment import Deployment

ANSWERS = np.random.default_rng(1).random((20, 10))
Network = Callable[[np.ndarray], Mapping[str, np.ndarray]]


def deployed(network: Network) -> Deployment:
    """A version whose network scores the number of a request."""
    scores = SimpleNamespace(
        read=lambda arrays: arrays, score=lambda request, device, counted: network(ANSWERS[int(request["number"])])
    )
    return cast(Deployment, SimpleNamespace(scores=scores, config=SimpleNamespace(model="m"), device=lambda wanted: 0))


def compared(
    new: Network, old: Network | None = lambda x: {"score": x}, *, made_up: bool = False, count: int = 20, **bounds: Any
) -> CheckOutcome:
    requests = CheckRequests([{"number": np.array(number)} for number in range(count)], made_up)
    config = ChecksConfig(scores=bounds)
    before = None if old is None else deployed(old)
    return compare_scores(deployed(new), before, requests, config, "hold", Pace(1.0, lambda seconds: False))


def raising(x: np.ndarray) -> Mapping[str, np.ndarray]:
    raise NetworkError("it failed")


def noisy(share: float) -> Network:
    random = np.random.default_rng(2)
    return lambda x: {"score": (1 - share) * x + share * random.random(x.shape)}


@pytest.mark.parametrize(
    ("new", "outcome", "text"),
    [
        (lambda x: {"score": x}, "passed", ""),
        (lambda x: {"score": 3 * x + 1}, "passed", ""),
        (noisy(0.4), "passed", ""),
        (noisy(0.9), "failed", "correlation"),
        (lambda x: {"score": -x}, "failed", "correlation -1, expected at least 0.5"),
        (lambda x: {"score": np.zeros_like(x)}, "failed", "correlation 0, expected at least 0.5"),
        (lambda x: {"score": np.where(x < 0.5, np.inf, x)}, "failed", "finite 0."),
        (lambda x: {"score": x[:, None]}, "failed", "outputs {'score': (1,)}, expected {'score': ()}"),
        (lambda x: {"other": x}, "failed", "outputs {'other': ()}, expected {'score': ()}"),
        (raising, "failed", "it failed"),
    ],
)
def test_scores_of_recorded_requests(new: Network, outcome: str, text: str) -> None:
    found = compared(new)
    assert (found.outcome, text in found.text) == (outcome, True), found.text


def test_half_the_bound_counts_for_made_up_requests() -> None:
    assert compared(noisy(0.6), made_up=False, least_correlation=0.8).outcome == "failed"
    assert compared(noisy(0.6), made_up=True, least_correlation=0.8).outcome == "passed"


@pytest.mark.parametrize("old", [raising, lambda x: {"score": np.ones_like(x)}])
def test_a_serving_version_that_says_nothing_holds_none(old: Network) -> None:
    assert compared(lambda x: {"score": -x}, old).outcome == "skipped"


def test_few_scores_are_not_judged() -> None:
    assert compared(lambda x: {"score": -x}, count=3).outcome == "skipped"


@pytest.mark.parametrize(("made_up", "outcome"), [(True, "skipped"), (False, "failed")])
def test_without_a_serving_version_recorded_requests_must_be_answered(made_up: bool, outcome: str) -> None:
    assert compared(raising, None, made_up=made_up).outcome == outcome
    assert compared(lambda x: {"score": x}, None, made_up=made_up).outcome == "passed"


def test_the_overlap_is_of_the_highest_tenth() -> None:
    found = compared(lambda x: {"score": np.where(x > 0.9, 0.0, x)}, least_correlation=-1.0, least_overlap=0.5)
    assert found.text.startswith("overlap 0, expected at least 0.5") or found.figures["overlap"] < 0.5
    assert found.outcome == "failed"
