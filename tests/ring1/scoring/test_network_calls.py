"""A network that does not return is freed by whoever leaves it last, and nobody waits for it without a bound."""

import threading

import numpy as np
import pytest

import hps
from hps.scoring.network_calls import NetworkCalls, bounded
from hps.testing.waiting import PATIENCE_S, wait_until
from tests.fakes.networks import ArrayNetwork


def calls_of() -> tuple[NetworkCalls, ArrayNetwork]:
    network = ArrayNetwork(lambda given: {"score": np.zeros(1)})
    return NetworkCalls(network), network


def test_the_last_call_frees_a_network_that_was_closed_meanwhile() -> None:
    calls, network = calls_of()
    may_end = [threading.Event() for _ in range(3)]

    def use(may_end: threading.Event) -> None:
        with calls.of("mine"), calls.running("mine"):
            assert may_end.wait(PATIENCE_S)

    threads = [threading.Thread(target=use, args=(one,)) for one in may_end]
    for one in threads:
        one.start()
    wait_until(lambda: len(calls.seconds("mine")) == 3, "three calls run")
    calls.close()
    with pytest.raises(hps.NotReadyError, match="its version was undeployed"), calls.of("mine"):
        pass
    for event, thread in zip(may_end, threads, strict=True):
        assert not network.closed
        event.set()
        thread.join(PATIENCE_S)
    assert network.closed


def test_a_network_that_nobody_uses_is_freed_at_once_also_after_a_call_that_failed() -> None:
    calls, network = calls_of()
    with pytest.raises(ValueError, match="mine"), calls.of("mine"), calls.running("mine"):
        raise ValueError("mine")
    assert calls.seconds("mine") == {}
    calls.close()
    assert network.closed


def test_only_the_time_in_the_network_counts_and_only_that_of_the_caller() -> None:
    calls, _ = calls_of()
    with calls.of("mine"):
        assert list(calls.seconds("mine").values()) == [0.0]
        with calls.running("mine"):
            wait_until(lambda: min(calls.seconds("mine").values()) > 0.01, "time passes")
            assert calls.seconds("other") == {}
        assert list(calls.seconds("mine").values()) == [0.0]
    assert calls.seconds("mine") == {}


def test_a_call_that_does_not_end_is_given_up_and_its_place_is_free_when_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hps.scoring.network_calls._bounded", threading.Semaphore(1))
    may_end = threading.Event()
    began: list[int] = []

    def hang() -> bool:
        began.append(1)
        return may_end.wait(PATIENCE_S)

    try:
        for _ in range(3):
            with pytest.raises(
                hps.NetworkError, match=r"^warming it up: it has not ended within 0.05 s \(dense.open_timeout_s\)"
            ):
                bounded(0.05, "warming it up", hang)
        assert len(began) == 1
    finally:
        may_end.set()
    assert bounded(30, "warming it up", hang)
