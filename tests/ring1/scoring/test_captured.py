"""Batches that are one CUDA graph, on a network with the rules of a device: they get what new memory gives them."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from hps.engine.session import GraphKeys, GraphLookups
from hps.scoring import captured as captured_module
from hps.scoring.captured import CapturedBatches
from hps.scoring.scorer import Scorer
from tests.fakes.networks import Arrays, DeviceNetwork, FakeGraphPart, FakeTables
from tests.ring1.scoring.test_kept_memory import compare, read, scorer_of
from tests.ring1.scoring.test_packing import MOST, Region, everything

INPUTS: dict[str, Any] = {
    "user": {"table": "t0", "per_request": True},
    "history": {"table": "t1", "pooling": "mean", "per_request": True},
    "item": {"table": "t0"},
    "age": {"per_request": True},
    "grid": {"dtype": "int64", "shape": [-1, 2]},
}
ONCE = ("user", "history", "age")
MOST_KEYS = 20  # of a bag: the table's 1000 for 50 samples
BUCKETS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 50)


@pytest.fixture
def in_graphs(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """Of each batch, the number of its samples if one graph answered it, or None."""
    calls: list[int | None] = []
    score = CapturedBatches.score

    def counting(self: CapturedBatches, kept: Any, requests: Any, counts: Any, *more: Any) -> Any:
        found = score(self, kept, requests, counts, *more)
        calls.append(None if found is None else int(counts.sum()))
        return found

    monkeypatch.setattr(CapturedBatches, "score", counting)
    return calls


class CountingNetwork(DeviceNetwork):
    """Counts writes to its memory, and the rows of the runs that are not captured."""

    def __init__(self, function: Callable[[Arrays], Mapping[str, np.ndarray]] = everything) -> None:
        super().__init__(function)
        self.written: list[int] = []
        self.put_arrays = 0

    def put(self, array: np.ndarray) -> np.ndarray:
        self.put_arrays += 1
        return super().put(array)

    def write(self, tensor: np.ndarray, source: np.ndarray) -> None:
        self.written.append(tensor.nbytes)
        super().write(tensor, source)


def warm(tables: FakeTables | None = None, network: Any = None, inputs: Mapping[str, Any] = INPUTS) -> Scorer:
    scorer = scorer_of(True, inputs, tables or FakeTables(4, 2), network or CountingNetwork())
    scorer.warm()
    return scorer


def arrays(rng: np.random.Generator, samples: int, keys: int = MOST_KEYS, *, once: bool = True) -> Arrays:
    rows = 1 if once else samples
    return {
        "user": rng.integers(0, 50, rows),
        "history": rng.integers(0, 50, (rows, keys)),
        "item": rng.integers(0, 50, samples),
        "age": rng.random(rows, np.float32),
        "grid": rng.integers(0, 9, (samples, 2)),
    }


@pytest.mark.parametrize("once", [True, False], ids=["given once", "given each"])
@pytest.mark.parametrize("bucket", BUCKETS)
def test_batches_below_at_and_above_each_number_of_rows(bucket: int, once: bool, in_graphs: list[int | None]) -> None:
    ours, other, rng = warm(), scorer_of(True, INPUTS, FakeTables(4, 2)), np.random.default_rng(bucket)
    sizes = [n for n in (bucket + 1, bucket, bucket - 1) if 0 < n <= MOST]
    for samples in sizes:
        compare(ours, other, arrays(rng, samples, once=once))
    assert in_graphs == sizes


def test_batches_of_several_users_in_turn_with_smaller_ones(
    in_graphs: list[int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(captured_module, "_MOST_USERS", 16)
    ours, other, rng = warm(), scorer_of(True, INPUTS, FakeTables(4, 2)), np.random.default_rng(2)
    batches = [(9, 9, 9), (5,), (1, 20), (2,) * 16, (3,), (2, 1, 1, 1, 1), (40, 10), (1,), (1, 1)]
    for sizes in batches:
        compare(ours, other, *[arrays(rng, samples) for samples in sizes])
    assert in_graphs == [sum(sizes) for sizes in batches]


def test_a_batch_is_one_copy_and_no_other_input_is_put_on_the_device(in_graphs: list[int | None]) -> None:
    network = CountingNetwork()
    ours, rng = warm(network=network), np.random.default_rng(2)
    region, given = Region(ours.signature), arrays(rng, 20)
    network.written.clear()
    network.put_arrays = 0
    ours.score([region.pack(given, 20)])
    scores, inputs = network.written.pop(), len(network.written)
    assert (inputs, network.put_arrays) == (1, 0)
    assert scores == 24 * 4 * (4 + 2 + 4 + 1 + 2)  # rows of the graph, not of all memory
    sent = sum(values.nbytes for values in given.values())
    assert network.written[0] < 2 * sent + 8 * 24 + 64 * 7  # with the request of each sample, and alignment
    assert in_graphs == [20]


def test_bags_of_several_sizes_are_one_copy_besides_the_request_of_each_sample() -> None:
    network = CountingNetwork()
    ours, other, rng = warm(network=network), scorer_of(False, INPUTS, FakeTables(4, 2)), np.random.default_rng(2)
    given = arrays(rng, 9, keys=3), arrays(rng, 4, keys=8)
    network.written.clear()
    network.put_arrays = 0
    compare(ours, other, *given)
    assert len(network.written) == 1
    assert network.put_arrays == 1


def test_two_forms_in_turn_and_answers_that_are_kept(in_graphs: list[int | None]) -> None:
    ours, other, rng = warm(), scorer_of(True, INPUTS, FakeTables(4, 2)), np.random.default_rng(2)
    found = []
    for turn in range(6):
        requests = read(ours, arrays(rng, 5 + turn, once=turn % 2 == 0))
        with other._in_use:
            wanted = other.score(requests)[0][0]
        found.append((ours.score(requests)[0][0], wanted))
    for answer, wanted in found:
        assert isinstance(answer, dict)
        assert isinstance(wanted, dict)
        np.testing.assert_array_equal(answer["all"], wanted["all"])
    assert in_graphs == [5, 6, 7, 8, 9, 10]


def test_a_key_that_is_not_resident_is_looked_up_as_any_other(in_graphs: list[int | None]) -> None:
    tables = FakeTables(4, 2)
    ours, other, rng = warm(tables), scorer_of(True, INPUTS, FakeTables(4, 2)), np.random.default_rng(2)
    tables.elsewhere = {49}
    given = arrays(rng, 20)
    given["item"][7] = 49
    compare(ours, other, given)
    tables.elsewhere = set()
    for _ in range(3):  # one batch after a miss does not try the graph
        compare(ours, other, arrays(rng, 20))
    assert in_graphs == [None, None, 20, 20]


def test_batches_whose_keys_are_never_resident_seldom_try_the_graph(in_graphs: list[int | None]) -> None:
    tables = FakeTables(4, 2)
    ours, rng = warm(tables), np.random.default_rng(2)
    tables.elsewhere = {*range(50)}
    before = len(tables.lookups)
    for _ in range(200):
        ours.score(read(ours, arrays(rng, 3)))
    assert in_graphs == [None] * 200
    tried = (len(tables.lookups) - before) / 3 - 200  # each is three lookups
    assert tried <= 10


def test_keys_that_fill_a_batch_up_do_not_count(in_graphs: list[int | None]) -> None:
    tables = FakeTables(4, 2)
    ours, rng = warm(tables), np.random.default_rng(2)
    tables.counted.clear()
    ours.score(read(ours, arrays(rng, 17), arrays(rng, 2), arrays(rng, 1)))
    assert tables.counted == {0: 20 + 3, 1: 3 * MOST_KEYS}
    assert in_graphs == [20]


def test_other_numbers_of_keys_get_a_graph_when_they_come_again(in_graphs: list[int | None]) -> None:
    ours, other, rng = warm(), scorer_of(True, INPUTS, FakeTables(4, 2)), np.random.default_rng(2)
    for _ in range(5):
        compare(ours, other, arrays(rng, 20, keys=7))
    assert in_graphs == [None, None, None, 20, 20]


def test_graphs_are_bounded_and_kept_while_they_are_used(monkeypatch: pytest.MonkeyPatch, in_graphs: list[int | None]) -> None:
    monkeypatch.setattr(captured_module, "_MOST_CAPTURED", 3)
    monkeypatch.setattr(captured_module, "_MOST_ASKED", 5)
    monkeypatch.setattr(captured_module, "_UNUSED", 20)
    network = CountingNetwork()
    ours, other, rng = warm(network=network), scorer_of(True, INPUTS, FakeTables(4, 2)), np.random.default_rng(2)
    for _ in range(30):  # batches of one user use graphs of before, all others of users with other numbers of keys
        compare(ours, other, arrays(rng, 2))
        compare(ours, other, arrays(rng, 2, int(rng.integers(1, 4))))
        assert all(len(memory.captured) <= 3 and len(memory.asked) <= 5 for memory in ours._kept.memories)
    assert in_graphs[::2] == [2] * 30
    captured = network.captured
    for _ in range(30):
        compare(ours, other, arrays(rng, 9, 7))
    assert network.captured == captured + 1


def test_what_cannot_be_captured_is_not_tried_with_each_batch(caplog: pytest.LogCaptureFixture) -> None:
    class Uncapturable(CountingNetwork):
        tried = 0

        def fixed(self, run: Callable[[], Arrays], *, owner: object = None) -> Callable[[], Arrays]:
            self.tried += owner is not None
            if owner and self.tried > 1:
                raise RuntimeError("CUDA error: out of memory")
            return super().fixed(run, owner=owner)

    caplog.set_level("INFO")
    network = Uncapturable()
    ours, other, rng = warm(network=network), scorer_of(True, INPUTS, FakeTables(4, 2)), np.random.default_rng(2)
    before = network.tried
    for _ in range(20):
        compare(ours, other, arrays(rng, 20, 7))
    assert network.tried == before + 1
    assert caplog.messages[-1] == "model 'm': batches of 24 samples have no CUDA graph: CUDA error: out of memory"


def test_a_graph_that_fails_leaves_the_batch_to_a_lookup(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(CountingNetwork):
        fails = False

        def fixed(self, run: Callable[[], Arrays], *, owner: object = None) -> Callable[[], Arrays]:
            replay = super().fixed(run, owner=owner)

            def checked() -> Arrays:
                if owner and self.fails:
                    raise RuntimeError("CUDA error: unspecified launch failure")
                return replay()

            return checked

    network = Failing()
    ours, other, rng = warm(network=network), scorer_of(True, INPUTS, FakeTables(4, 2)), np.random.default_rng(2)
    network.fails = True
    for _ in range(2):
        compare(ours, other, arrays(rng, 20))
    [record] = caplog.records
    assert "scoring without a CUDA graph: running the network of model 'm': RuntimeError: CUDA error" in record.getMessage()


def test_samples_that_may_depend_on_each_other_are_not_filled_up() -> None:
    """Without `dynamic_batching` a network may compare the candidates of a request with each other."""

    def ranks(given: Arrays) -> dict[str, np.ndarray]:
        return {"all": given["item"].sum(1) - given["item"].sum()}

    ours = scorer_of(True, {"item": {"table": "t0"}}, FakeTables(4), DeviceNetwork(ranks), dynamic_batching=False)
    ours.warm()
    item = np.arange(5)
    (answer,), _ = ours.score(read(ours, {"item": item}))
    rows = FakeTables(4).vectors(0, item).sum(1)
    assert isinstance(answer, dict)
    np.testing.assert_allclose(answer["all"], rows - rows.sum())


def test_released_memory_is_not_kept_again() -> None:
    ours, rng = warm(), np.random.default_rng(2)
    assert ours._kept.memories
    ours.release()
    ours.score(read(ours, arrays(rng, 3)))
    assert not ours._kept.memories


def test_graphs_of_tables_that_were_replaced_are_captured_again(in_graphs: list[int | None]) -> None:
    tables, network = FakeTables(4, 2), CountingNetwork()
    ours, other, rng = warm(tables, network), scorer_of(True, INPUTS, FakeTables(4, 2)), np.random.default_rng(2)
    for part in tables.parts:
        part.is_valid = False
    before = network.captured
    for _ in range(6):
        compare(ours, other, arrays(rng, 20))
    assert in_graphs == [None] * 4 + [20, 20]
    assert network.captured == before + 1


def test_another_graph_is_captured_without_those_of_replaced_tables() -> None:
    tables, rng = FakeTables(4, 2), np.random.default_rng(2)
    ours, other = warm(tables), scorer_of(True, INPUTS, FakeTables(4, 2))
    for round_ in range(4):
        if round_ == 3:  # the fourth batch of bags of this size is captured
            for part in tables.parts:
                part.is_valid = False
        compare(ours, other, arrays(rng, 20, keys=7))
    [kept] = [kept for kept in ours._kept.memories if kept.captured and kept.asked]
    assert len(kept.captured) == 1
    assert kept.lookups is not None
    assert kept.lookups.order()


def test_absent_keys_count_without_those_that_fill_a_batch_up() -> None:
    class Lacking(FakeGraphPart):
        def absent(self) -> Mapping[int, int] | None:
            return {0: 6, 1: 0}

    counted: list[GraphKeys] = []
    lookups = GraphLookups(Lacking(FakeTables(4, 2)), lambda batch: None, counted.append, lambda: None, lambda: False)
    assert lookups.succeeded({0: 20, 1: 5}, {0: 24, 1: 8})
    assert counted == [GraphKeys({0: 20, 1: 5}, {0: 5}, False)]
