"""Requests that wait at the same time are one batch, and none of them can harm another."""

import logging
import math
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import hps
from hps.configuration.load import load_dense
from hps.scoring import batching
from hps.scoring.batching import Batcher, ScoreCall
from hps.scoring.features import read_request
from hps.scoring.network_calls import NetworkCalls
from hps.scoring.scorer import Scorer
from hps.scoring.signature import signature_of
from hps.statistics.scores import ScoreCounters
from hps.testing.waiting import PATIENCE_S, wait_until
from tests.fakes.clock import Clock
from tests.fakes.networks import ArrayNetwork, Arrays, FakeTables

MOST_KEYS, MOST_SAMPLES = 20, 10
HOUR_US = 3_600_000_000
INPUTS = {"item": {"table": "t0"}, "tags": {"table": "t1", "pooling": "sum"}}


def first_keys(given: Arrays) -> Mapping[str, np.ndarray]:
    return {"score": given["item"][:, 0]}


class Bench:
    """A batcher over a fake network and fake tables; `told` has the answers by name of the request, in their order."""

    def __init__(self, function: Any = first_keys, max_delay_us: int = 0, *, alone: bool = False, instances: int = 1) -> None:
        self.tables, self.network, self.counters = FakeTables(4, 2, max_keys=MOST_KEYS), ArrayNetwork(function), ScoreCounters()
        dense = load_dense({"format": "onnx", "file": "f", "inputs": INPUTS, "outputs": ["score"]})
        signature = signature_of(dense, self.tables.specs)
        calls = NetworkCalls(self.network)
        scorers = [
            Scorer("m", self.tables.specs, signature, calls, self.tables.look_up, max_samples=MOST_SAMPLES)
            for _ in range(instances)
        ]
        self.batcher = Batcher("model 'm'", scorers, self.counters, MOST_SAMPLES, max_delay_us, alone=alone)
        self._signature = signature
        self.told: dict[str, Any] = {}
        self._changed = threading.Condition()

    def submit(
        self, name: str, keys: Sequence[int], tags: int = 1, due_ns: int = 0, fails: bool = False, most_s: float = math.inf
    ) -> None:
        counts = np.full(len(keys), tags)
        arrays = {
            "item": np.array(keys),
            "tags": np.zeros(counts.sum(), np.int64),
            "tags.offsets": np.concatenate([[0], np.cumsum(counts)]),
        }

        def done(answer: Any, times: Any) -> None:
            with self._changed:
                assert name not in self.told, "a request is told twice"
                self.told[name] = answer if isinstance(answer, Exception) else answer["score"].tolist()
                self._changed.notify_all()
            if fails:
                raise RuntimeError("cannot be told")

        self.batcher.submit(ScoreCall(self.request(arrays), done, due_ns), most_s)

    def request(self, arrays: Arrays) -> Any:
        return read_request(self._signature, arrays, MOST_SAMPLES, "m")

    def wait(self, *names: str) -> list[Any]:
        with self._changed:
            assert self._changed.wait_for(lambda: set(names) <= self.told.keys(), PATIENCE_S), (
                f"only {[*self.told]} are answered"
            )
            return [self.told[name] for name in names]

    def occupy(self, samples: int = 1) -> None:
        self.tables.may_answer.clear()
        before = len(self.network.calls)
        self.submit("first", [0] * samples)
        wait_until(lambda: not self.batcher.waiting, "the batcher is busy")
        assert len(self.network.calls) == before

    def release(self) -> None:
        self.tables.may_answer.set()

    def close(self) -> None:
        assert self.batcher.close(PATIENCE_S)
        assert self.batcher._samples == 0, "all samples that waited were taken"


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.release()
    made.close()


def test_what_waits_is_answered_in_one_call(bench: Bench) -> None:
    bench.occupy()
    for number in range(5):
        bench.submit(str(number), [number, number + 10])
    assert bench.batcher.waiting == 5
    bench.release()
    assert bench.wait(*"01234") == [[number, number + 10.0] for number in range(5)]
    assert bench.network.calls == [1, 10]
    counters = bench.counters
    assert (counters.requests, counters.samples, counters.batches, counters.late) == (6, 11, 2, 0)
    assert counters.lookup_times.latency().count == counters.network_times.latency().count == 2


def test_instances_run_batches_at_the_same_time_and_what_waits_goes_to_the_first_that_is_free() -> None:
    together, busy = threading.Barrier(2), threading.Event()

    def meet(given: Arrays) -> Mapping[str, np.ndarray]:
        if given["item"][0, 0] < 0:
            together.wait(PATIENCE_S)  # broken if one runs after the other
        if given["item"][0, 0] == 7:
            assert busy.wait(PATIENCE_S)
        return first_keys(given)

    bench = Bench(meet, instances=2, alone=True)
    for name in "ab":
        bench.submit(name, [-1])
    assert bench.wait(*"ab") == [[-1.0], [-1.0]]
    bench.submit("hangs", [7])
    wait_until(lambda: not bench.batcher.waiting, "one instance is in the network")
    for number in range(4):
        bench.submit(str(number), [number], most_s=0.0)
    assert bench.wait(*"0123") == [[0.0], [1.0], [2.0], [3.0]]
    assert "hangs" not in bench.told
    busy.set()
    bench.wait("hangs")
    bench.close()


def test_a_batch_has_at_most_so_many_samples_and_keeps_the_order(bench: Bench) -> None:
    bench.occupy()
    for name, samples in (("a", 6), ("b", 4), ("c", 1), ("d", 10), ("e", 1)):
        bench.submit(name, [7] * samples)
    bench.release()
    bench.wait(*"abcde")
    assert bench.network.calls == [1, 10, 1, 10, 1]  # what follows "d" overtakes it not
    assert list(bench.told) == ["first", *"abcde"]


def test_a_batch_has_at_most_so_many_keys_of_each_lookup(bench: Bench) -> None:
    bench.occupy()
    for name, tags in (("a", 12), ("b", 8), ("c", 1), ("d", MOST_KEYS)):
        bench.submit(name, [1], tags=tags)
    bench.release()
    bench.wait(*"abcd")
    assert bench.network.calls == [1, 2, 1, 1]


def test_a_delay_waits_for_more_until_the_batch_is_full() -> None:
    bench = Bench(max_delay_us=HOUR_US)
    for name in "abc":
        bench.submit(name, [1, 2, 3])
    bench.submit("d", [4])
    assert bench.wait("a", "d") == [[1, 2, 3], [4]]
    assert bench.network.calls == [10]
    bench.submit("e", [5])
    bench.close()  # answers what waits, before its delay is over
    assert bench.wait("e") == [[5]]


def test_a_delay_is_that_of_the_request_that_waits_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(batching, "time", SimpleNamespace(monotonic=clock, perf_counter_ns=time.perf_counter_ns))
    bench = Bench(max_delay_us=HOUR_US)
    for _ in range(2):
        bench.occupy(MOST_SAMPLES)
        bench.submit("a", [1])
        clock.now += 3600
        bench.submit("b", [2])
        bench.release()
        assert bench.wait("a", "b") == [[1], [2]]
        bench.told.clear()
    assert bench.network.calls == [MOST_SAMPLES, 2] * 2
    bench.close()


def test_what_was_answered_is_not_kept_while_the_next_request_is_waited_for(bench: Bench) -> None:
    class Answers(list[Any]):
        def __call__(self, answer: Any, times: Any) -> None:
            self.append(answer)
            answered.set()

    for _ in range(2):
        answered, done = threading.Event(), Answers()
        request = read_request(bench._signature, {"item": np.array([1]), "tags": np.array([[1]])}, MOST_SAMPLES, "m")
        bench.batcher.submit(ScoreCall(request, done))
        assert answered.wait(PATIENCE_S)
        gone = weakref.ref(done)
        del done
        wait_until(lambda: gone() is None, "the request is forgotten")  # noqa: B023


def test_each_request_may_be_a_batch_by_itself() -> None:
    bench = Bench(alone=True)
    bench.occupy()
    for name in "abc":
        bench.submit(name, [1, 2])
    bench.submit("late", [3], due_ns=1)
    bench.release()
    assert bench.wait("a", "b", "c") == [[1, 2]] * 3
    assert isinstance(bench.wait("late")[0], hps.DeadlineError)
    assert bench.network.calls == [1, 2, 2, 2]
    bench.close()


def test_a_request_whose_time_is_over_costs_no_work(bench: Bench) -> None:
    bench.occupy()
    now = time.perf_counter_ns()
    bench.submit("late", [1], due_ns=now)
    bench.submit("in time", [2], due_ns=now + 3600 * 10**9)
    bench.submit("too", [3], due_ns=1)
    bench.release()
    late, answer, too = bench.wait("late", "in time", "too")
    assert answer == [2]
    assert isinstance(late, hps.DeadlineError)
    assert isinstance(too, TimeoutError)
    assert str(late) == "scoring with model 'm': the request's timeout was over before a batch could take it"
    assert bench.network.calls == [1, 1]
    assert (bench.counters.late, bench.counters.requests) == (2, 2)


def test_if_all_are_late_nothing_is_looked_up(bench: Bench) -> None:
    bench.submit("late", [1], due_ns=1)
    bench.wait("late")
    assert (bench.network.calls, bench.tables.lookups) == ([], [])


def test_a_request_that_the_network_fails_fails_alone(bench: Bench) -> None:
    def picky(given: Arrays) -> Mapping[str, np.ndarray]:
        if (given["item"][:, 0] == 13).any():
            raise ValueError("thirteen")
        return first_keys(given)

    bench.network.function = picky
    bench.occupy()
    for name, key in (("a", 1), ("b", 13), ("c", 3)):
        bench.submit(name, [key])
    bench.release()
    a, b, c = bench.wait(*"abc")
    assert (a, c) == ([1], [3])
    assert isinstance(b, hps.NetworkError)
    assert bench.counters.failures == {"network": 1, "nan": 0}
    assert bench.counters.requests == 3


@pytest.mark.parametrize("error", [hps.DatabaseTimeoutError("away"), MemoryError("full"), IndexError("a bug")])
def test_an_error_of_a_tier_is_told_to_each_and_the_next_batch_is_answered(bench: Bench, error: Exception) -> None:
    bench.occupy()
    bench.submit("a", [1])
    bench.submit("b", [2])
    bench.tables.fails = error
    bench.release()
    assert bench.wait("first", "a", "b") == [error] * 3
    bench.tables.fails = None
    bench.submit("c", [3])
    assert bench.wait("c") == [[3]]


def test_one_that_cannot_be_told_harms_no_other(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.occupy()
    bench.submit("a", [1], fails=True)
    bench.submit("b", [2])
    bench.submit("late", [2], due_ns=1, fails=True)
    with caplog.at_level(logging.ERROR):
        bench.release()
        assert bench.wait("a", "b") == [[1], [2]]
        bench.submit("c", [3])
        assert bench.wait("c") == [[3]]
    assert caplog.text.count("delivering the scores of a request failed") == 2


def test_a_closed_batcher_answers_what_waits_and_takes_no_more(bench: Bench) -> None:
    bench.occupy()
    for number in range(3):
        bench.submit(str(number), [number] * 9)
    assert not bench.batcher.close(0.01)
    with pytest.raises(hps.NotReadyError, match="it was undeployed"):
        bench.submit("more", [1])
    bench.release()
    bench.close()
    assert bench.wait(*"012") == [[number] * 9 for number in range(3)]
    assert bench.batcher.close(0)


def test_the_queue_is_bounded(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "_MOST_WAITING", 2)
    bench.occupy()
    bench.submit("a", [1])
    bench.submit("b", [2])
    with pytest.raises(hps.NotReadyError, match="2 requests wait; send the request again later"):
        bench.submit("c", [3])
    bench.release()
    assert bench.wait("a", "b") == [[1], [2]]


def test_a_call_in_process_does_not_wait_for_a_network_that_hangs(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    may_end = threading.Event()

    def hang(given: Arrays) -> Mapping[str, np.ndarray]:
        assert may_end.wait(PATIENCE_S)
        return first_keys(given)

    bench.network.function = hang
    monkeypatch.setattr(batching, "_MOST_JOINED_S", 0.01)
    monkeypatch.setattr(batching, "_POLL_S", 0.001)
    with pytest.raises(hps.NetworkBusyError, match="under way for"):
        bench.batcher.score(
            bench.request({"item": np.array([1]), "tags": np.zeros(1, np.int64), "tags.offsets": np.array([0, 1])})
        )
    may_end.set()


def test_requests_are_not_queued_behind_a_network_that_hangs(bench: Bench) -> None:
    may_end = threading.Event()

    def hang(given: Arrays) -> Mapping[str, np.ndarray]:
        assert may_end.wait(PATIENCE_S)
        return first_keys(given)

    bench.network.function = hang
    for count in (1, 2):
        may_end.clear()
        bench.submit(f"hung {count}", [1])
        wait_until(lambda: bench.batcher._scorers[0].network_seconds(), "the network runs")
        bench.submit(f"queued {count}", [2], most_s=3600)
        wait_until(lambda: max(bench.batcher._scorers[0].network_seconds().values()) > 0.01, "time passes")
        for name in "abc":
            with pytest.raises(hps.NetworkBusyError, match=r"under way for \d+\.\d s, expected at most 0.01 s; requests are"):
                bench.submit(name, [3], most_s=0.01)
        assert bench.counters.refused == 3 * count
        may_end.set()
        assert bench.wait(f"hung {count}", f"queued {count}") == [[1], [2]]
        wait_until(lambda: not bench.batcher._scorers[0].network_seconds(), "the network has returned")
        bench.submit(f"after {count}", [4], most_s=1e-9)
        assert bench.wait(f"after {count}") == [[4]]
