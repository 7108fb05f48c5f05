"""How the scores of two versions for the same requests are compared."""

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from hps.configuration.checks import ChecksConfig
from hps.engine.refresh import Pace
from hps.errors import InvalidInputError, NetworkError
from hps.versions.checks.report import CheckOutcome
from hps.versions.checks.scores import CheckRequests, compare_scores
from hps.versions.deployment import Deployment
from tests.fakes.clock import Clock

ANSWERS = np.random.default_rng(1).random((20, 10))
Network = Callable[[np.ndarray], Mapping[str, np.ndarray]]


def deployed(network: Network) -> Deployment:
    """A version whose network scores the number of a request."""
    scores = SimpleNamespace(
        read=lambda arrays: arrays, score=lambda request, device, counted: network(ANSWERS[int(request["number"])])
    )
    return cast(Deployment, SimpleNamespace(scores=scores, config=SimpleNamespace(model="m"), device=lambda wanted: 0))


def compared(
    new: Network,
    old: Network | None = lambda x: {"score": x},
    *,
    count: int = 20,
    made_up: bool = False,
    random_features: bool = False,
    unknown: str = "",
    **bounds: Any,
) -> CheckOutcome:
    arrays = [{"number": np.array(number)} for number in range(count)]
    requests = CheckRequests(arrays, made_up, random_features, unknown)
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
        (lambda x: {"score": x, "other": x}, "failed", "outputs {'score': (), 'other': ()}, expected {'score': ()}"),
        (lambda x: {"other": x}, "failed", "outputs {'other': ()}, expected {'score': ()}"),
        (raising, "failed", "it failed"),
    ],
)
def test_scores_of_recorded_requests(new: Network, outcome: str, text: str) -> None:
    found = compared(new)
    assert (found.outcome, text in found.text) == (outcome, True), found.text


def test_the_worst_of_several_outputs_counts() -> None:
    def old(x: np.ndarray) -> Mapping[str, np.ndarray]:
        return {"click": x, "buy": x**2}

    for sign, outcome in ((1.0, "passed"), (-1.0, "failed")):
        assert compared(lambda x, sign=sign: {"click": x, "buy": sign * x**2}, old).outcome == outcome
        found = compared(lambda x, sign=sign: {"click": sign * x, "buy": x**2}, old, least_correlation=-1.0, least_overlap=0.5)
        assert found.outcome == outcome


def test_half_the_bound_counts_for_made_up_requests() -> None:
    assert compared(noisy(0.6), made_up=False, least_correlation=0.8).outcome == "failed"
    assert compared(noisy(0.6), made_up=True, least_correlation=0.8).outcome == "passed"


def nan(x: np.ndarray) -> Mapping[str, np.ndarray]:
    return {"score": np.full_like(x, np.nan)}


def partly_infinite(x: np.ndarray) -> Mapping[str, np.ndarray]:
    return {"score": np.where(x < 0.5, np.inf, x)}


def refusing(x: np.ndarray) -> Mapping[str, np.ndarray]:
    raise InvalidInputError("what is this?")


@pytest.mark.parametrize("old", [raising, refusing, nan, lambda x: {"score": np.ones_like(x)}])
@pytest.mark.parametrize(("new", "outcome"), [(lambda x: {"score": -x}, "skipped"), (partly_infinite, "failed")])
def test_a_serving_version_that_says_nothing_holds_none_that_is_finite(old: Network, new: Network, outcome: str) -> None:
    if old is nan:
        outcome = "skipped"
    assert compared(new, old).outcome == outcome


@pytest.mark.parametrize(("new", "outcome"), [(raising, "failed"), (refusing, "skipped")])
def test_a_version_that_fails_is_told_from_requests_that_fit_neither(new: Network, outcome: str) -> None:
    found = compared(new, refusing)
    assert (found.outcome, found.text) == (
        outcome,
        "it failed" if new is raising else "the serving version refuses the requests: what is this?",
    )


def test_scores_that_are_infinite_in_both_versions_are_no_fault_of_the_new_one() -> None:
    found = compared(partly_infinite, partly_infinite)
    assert (found.outcome, found.figures["finite"], found.figures["correlation"]) == ("passed", 1.0, 1.0)
    assert compared(lambda x: {"score": np.where(x < 0.6, np.inf, x)}, partly_infinite).text.startswith("finite 0.81")


def test_few_scores_are_not_judged() -> None:
    assert compared(lambda x: {"score": -x}, count=3).outcome == "skipped"
    assert compared(partly_infinite, count=3).outcome == "failed"
    assert compared(lambda x: {"score": x}, None, count=0).text == "there are no requests"


def test_requests_of_keys_that_the_serving_version_lacks_are_not_compared() -> None:
    found = compared(lambda x: {"score": -x}, unknown="no key in common", made_up=True)
    assert (found.outcome, found.text) == ("skipped", "no key in common")
    assert compared(nan, unknown="no key in common", made_up=True).outcome == "failed"


def test_a_replay_is_cut_short_once_a_hundred_requests_are_answered() -> None:
    requests = CheckRequests([{"number": np.array(number % 20)} for number in range(1000)])
    version = deployed(lambda x: {"score": x})
    found = compare_scores(version, version, requests, ChecksConfig(), "hold", Pace(1.0, lambda seconds: False), until=0.0)
    assert (found.outcome, found.figures["scores"]) == ("passed", 100 * ANSWERS.shape[1])


@pytest.mark.parametrize(("made_up", "outcome"), [(True, "skipped"), (False, "failed")])
def test_without_a_serving_version_recorded_requests_must_be_answered(made_up: bool, outcome: str) -> None:
    assert compared(raising, None, made_up=made_up).outcome == outcome
    assert compared(lambda x: {"score": x}, None, made_up=made_up).outcome == "passed"
    assert compared(partly_infinite, None, made_up=made_up).outcome == "failed"


@pytest.mark.parametrize(("new", "outcome"), [(nan, "failed"), (partly_infinite, "skipped")])
def test_random_features_may_have_no_score_but_not_all_of_them(new: Network, outcome: str) -> None:
    found = compared(new, None, made_up=True, random_features=True)
    assert (found.outcome, found.text.startswith("finite 0")) == (outcome, True)


@pytest.mark.parametrize(("count", "outcome"), [(99, "passed"), (100, "failed")])
def test_the_p99_is_judged_of_a_hundred_requests(monkeypatch: pytest.MonkeyPatch, count: int, outcome: str) -> None:
    clock = Clock()
    monkeypatch.setattr("hps.versions.checks.scores.time", SimpleNamespace(perf_counter=clock))

    def taking(seconds: float) -> Network:
        def network(x: np.ndarray) -> Mapping[str, np.ndarray]:
            clock.now += seconds
            return {"score": x}

        return network

    requests = CheckRequests([{"number": np.array(number % 20)} for number in range(count)])
    config, pace = ChecksConfig(scores={"most_p99_factor": 2.0}), Pace(1.0, lambda seconds: False)
    found = compare_scores(deployed(taking(0.75)), deployed(taking(0.25)), requests, config, "hold", pace)
    assert (found.outcome, found.figures["p99_factor"], found.figures["p99_ms"]) == (outcome, 3.0, 750.0)


def test_the_overlap_is_of_the_highest_tenth() -> None:
    found = compared(lambda x: {"score": np.where(x > 0.9, 0.0, x)}, least_correlation=-1.0, least_overlap=0.5)
    assert found.text.startswith("overlap 0, expected at least 0.5") or found.figures["overlap"] < 0.5
    assert found.outcome == "failed"
