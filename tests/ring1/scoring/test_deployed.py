"""Concurrent calls for scores: on a device they are batches, on the CPU each runs by itself."""

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hps.configuration.checks import ChecksConfig
from hps.configuration.load import load_dense
from hps.errors import ConfigError, NetworkError, NotReadyError
from hps.scoring import deployed as deployed_module
from hps.scoring import scorer as scorer_module
from hps.scoring.deployed import DeploymentScores, OpenedNetwork
from hps.scoring.network_calls import NetworkCalls
from hps.scoring.signature import signature_of
from hps.statistics.scores import ScoreCounters
from hps.testing.waiting import PATIENCE_S, wait_until
from tests.fakes.networks import ArrayNetwork, Arrays, DeviceNetwork, FakeTables

MOST_SAMPLES = 8


class Deployed:
    """Scores of a fake network, whose first call waits for `release`. The score of key 99 is no number."""

    def __init__(self, *, on_device: bool) -> None:
        self.tables, self.counters = FakeTables(4), ScoreCounters()
        self.network = (DeviceNetwork if on_device else ArrayNetwork)(self._run)
        said = {"format": "onnx", "file": "f", "inputs": {"item": {"table": "t0"}}, "outputs": ["score"]}
        dense = load_dense(said)
        opened: Any = SimpleNamespace(
            signature=signature_of(dense, self.tables.specs),
            networks={0 if on_device else None: NetworkCalls(self.network)},
            outputs=(),
            on_device=on_device,
        )
        config: Any = SimpleNamespace(model="m", version="1", max_batch_size=MOST_SAMPLES, checks=ChecksConfig())
        session: Any = SimpleNamespace(run=self.tables.look_up, graph_lookups=lambda: None)
        self.scores = DeploymentScores(opened, config, dense, self.tables.specs, {0: session}, self.counters)
        self.network.calls.clear()
        self.entered, self.may_run = threading.Event(), threading.Event()
        self.waits = True
        self.answers: dict[int, Any] = {}
        self._threads: list[threading.Thread] = []

    def _run(self, given: Arrays) -> Arrays:
        if getattr(self, "waits", False):
            self.waits = False
            self.entered.set()
            assert self.may_run.wait(PATIENCE_S)
        keys = given["item"][:, 0]
        return {"score": np.where(keys == 99, np.nan, keys)}

    def ask(self, key: int, samples: int = 1) -> None:
        def call() -> None:
            request = self.scores.read({"item": np.full(samples, key)})
            try:
                self.answers[key] = self.scores.score(request, 0)["score"].tolist()
            except Exception as error:  # noqa: BLE001 - compared by the test
                self.answers[key] = error

        thread = threading.Thread(target=call)
        self._threads.append(thread)
        thread.start()

    def end(self) -> None:
        self.may_run.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)
        assert self.scores.close(PATIENCE_S)


@pytest.fixture
def deployed() -> Iterator[Deployed]:
    made = Deployed(on_device=True)
    yield made
    made.end()


def test_calls_that_come_while_a_device_is_in_use_are_one_batch(deployed: Deployed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scorer_module, "_MOST_WAIT_S", PATIENCE_S)
    [batcher] = deployed.scores._batchers.values()
    deployed.ask(1)
    assert deployed.entered.wait(PATIENCE_S)
    deployed.ask(2)
    wait_until(lambda: batcher.is_busy and not batcher.waiting, "a batch waits for the device")
    for key in (3, 4):
        deployed.ask(key, samples=2)
    wait_until(lambda: batcher.waiting == 2, "two requests wait for the next batch")
    deployed.end()
    assert deployed.answers == {1: [1.0], 2: [2.0], 3: [3.0] * 2, 4: [4.0] * 2}
    assert (deployed.counters.requests, deployed.counters.batches) == (4, 3)


def test_of_one_batch_the_request_that_fails_alone_raises(deployed: Deployed) -> None:
    deployed.ask(1)
    assert deployed.entered.wait(PATIENCE_S)
    for key in (2, 99, 3):
        deployed.ask(key)
    deployed.end()
    assert isinstance(deployed.answers.pop(99), NetworkError)
    assert deployed.answers == {1: [1.0], 2: [2.0], 3: [3.0]}


def test_a_call_that_finds_the_batcher_closed_runs_by_itself(deployed: Deployed, monkeypatch: pytest.MonkeyPatch) -> None:
    [batcher] = deployed.scores._batchers.values()
    assert batcher.close(PATIENCE_S)
    with pytest.raises(NotReadyError):
        batcher.score(deployed.scores.read({"item": np.full(1, 2)}))
    deployed.may_run.set()
    monkeypatch.setattr(batcher, "_idle", False)
    deployed.ask(2)
    deployed.end()
    assert deployed.answers == {2: [2.0]}


def test_on_the_cpu_calls_do_not_wait_for_each_other() -> None:
    deployed = Deployed(on_device=False)
    deployed.ask(1)
    assert deployed.entered.wait(PATIENCE_S)
    deployed.ask(2)
    wait_until(lambda: 2 in deployed.answers, "the second call is answered")
    assert 1 not in deployed.answers
    deployed.end()


def test_instances_on_a_device_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deployed_module, "implementation", lambda kind, name: DeviceNetwork)
    tables = FakeTables(4)
    dense = load_dense(
        {"format": "onnx", "file": "f", "inputs": {"item": {"table": "t0"}}, "outputs": ["score"], "instances": 2}
    )
    config: Any = SimpleNamespace(model="m", tables=tables.specs)
    with pytest.raises(ConfigError, match=r"dense\.instances: got 2, expected 1"):
        OpenedNetwork(config, dense, {}, "", [0])
