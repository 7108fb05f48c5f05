"""Batches of requests that look alike, in memory that is kept: they get what new memory gives them."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

import hps
from hps.configuration.load import load_dense
from hps.errors import TooManyKeysError
from hps.scoring import kept as kept_module
from hps.scoring.features import ScoreInputs, read_request
from hps.scoring.kept import KeptBatches
from hps.scoring.network_calls import NetworkCalls
from hps.scoring.scorer import Scorer
from hps.scoring.signature import signature_of
from hps.tensors.batch import Batch
from hps.testing.waiting import wait_until
from tests.fakes.networks import ArrayNetwork, Arrays, DeviceNetwork, FakeTables
from tests.ring1.scoring.test_packing import MOST, TABLES, Region, everything


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """Of each call, the number of its samples if it was answered in memory that is kept, or None."""
    calls: list[int | None] = []
    score = KeptBatches.score

    def counting(self: KeptBatches, requests: Any, counts: Any) -> Any:
        found = score(self, requests, counts)
        calls.append(None if found[0] is None else int(counts.sum()))
        return found

    monkeypatch.setattr(KeptBatches, "score", counting)
    monkeypatch.setattr(kept_module, "_SMALL_BYTES", 0)  # the batches of these tests are small
    return calls


FORMS: dict[str, Any] = {
    "user": {"table": "t0", "per_request": True},
    "history": {"table": "t1", "pooling": "mean", "per_request": True},
    "recent": {"table": "t1", "pooling": "sqrtn", "hotness": 3, "per_request": True, "max_norm": 9.0},
    "last": {"table": "t1", "hotness": 2},
    "item": {"table": "t0"},
    "tags": {"table": "t1", "pooling": "sum", "hotness": 3, "padding_key": 3},
    "one": {"table": "t0", "pooling": "mean", "hotness": 1},
    "age": {"per_request": True},
    "grid": {"dtype": "int64", "shape": [-1, 2, 2]},
}
ONCE = ("user", "history", "recent", "age")
Way = Callable[..., Scorer]


def scorer_of(
    on_device: bool,
    inputs: Mapping[str, Any] = FORMS,
    tables: FakeTables = TABLES,
    network: Any = None,
    *,
    dynamic_batching: bool = True,
    **more: Any,
) -> Scorer:
    """A scorer whose network is on the CPU, or keeps the rules of a device."""
    said = {"format": "onnx", "file": "f", "inputs": inputs, "outputs": ["all"], "dynamic_batching": dynamic_batching}
    dense = load_dense(said)
    calls = NetworkCalls(network or (DeviceNetwork if on_device else ArrayNetwork)(everything))
    more |= {"on_device": on_device, "max_samples": MOST}
    return Scorer("m", tables.specs, signature_of(dense, tables.specs), calls, tables.look_up, tables.graph_lookups, **more)


@pytest.fixture(params=[False, True], ids=["on the CPU", "on a device"])
def way(request: pytest.FixtureRequest) -> Way:
    return functools.partial(scorer_of, request.param)


def arrays(rng: np.random.Generator, samples: int, once: Sequence[str] = ONCE, keys: int = 5, **more: Any) -> Arrays:
    rows = {name: 1 if name in once else samples for name in FORMS}
    return {
        "user": rng.integers(0, 50, rows["user"]),
        "history": rng.integers(0, 50, (rows["history"], keys)),
        "recent": rng.integers(0, 50, (rows["recent"], 3)),
        "last": rng.integers(0, 50, (samples, 2)),
        "item": rng.integers(0, 50, samples),
        "tags": rng.integers(0, 6, (samples, 3)),
        "one": rng.integers(0, 50, (samples, 1)),
        "age": rng.random(rows["age"], np.float32),
        "grid": rng.integers(0, 9, (samples, 2, 2)),
    } | more


def read(ours: Scorer, *given: Arrays) -> list[ScoreInputs]:
    return [read_request(ours.signature, one, MOST, "m") for one in given]


def compare(ours: Scorer, other: Scorer, *given: Arrays) -> None:
    """Compare the answers with those of a scorer that takes the general way."""
    with other._in_use:
        wanted, _ = other.score(read(other, *given))
    for one, expected in zip(ours.score(read(ours, *given))[0], wanted, strict=True):
        assert isinstance(expected, dict)
        assert isinstance(one, dict)
        np.testing.assert_array_equal(one["all"], expected["all"])


def test_batches_of_any_form_get_what_the_general_way_gives(way: Way, kept: list[int | None]) -> None:
    rng, ours, other = np.random.default_rng(5), way(), way()
    sizes: list[int | None] = []
    for _ in range(200):
        once = [name for name in ONCE if rng.random() < 0.7]
        keys = int(rng.choice([1, 2, 16, 17]))
        samples = rng.choice([1, 2, 3, 15, 16, 17, 33, 50], rng.integers(1, 5))
        samples = samples[np.cumsum(samples) <= MOST] if samples[0] < MOST else samples[:1]
        compare(ours, other, *[arrays(rng, int(n), once, keys) for n in samples])
        sizes.append(int(samples.sum()))
    assert [one for one in kept if one is not None] == [n for n, one in zip(sizes, kept, strict=True) if one is not None]
    assert kept.count(None) < 100  # of more forms than are kept


@pytest.mark.parametrize(
    "samples", [(1,), (15,), (16,), (17,), (50,), (1, 1, 1), (1, 3, 2), (16, 1), (17, 33), (2,) * 25], ids=str
)
def test_a_user_counts_for_all_samples_of_its_request(way: Way, kept: list[int | None], samples: tuple[int, ...]) -> None:
    rng, ours, other = np.random.default_rng(5), way(), way()
    for once in (ONCE, (), ONCE, ("user", "age")):
        compare(ours, other, *[arrays(rng, n, once) for n in samples])
    assert kept == [sum(samples)] * 4


def test_requests_that_give_once_what_others_repeat_take_the_general_way(way: Way, kept: list[int | None]) -> None:
    rng, ours, other = np.random.default_rng(5), way(), way()
    compare(ours, other, arrays(rng, 2), arrays(rng, 3, ()))
    compare(ours, other, arrays(rng, 1), arrays(rng, 3, ()))  # one row is one a sample
    compare(ours, other, arrays(rng, 1), arrays(rng, 3))
    compare(ours, other, arrays(rng, 3), arrays(rng, 3, item=rng.integers(0, 50, (3, 1))))
    assert kept == [None, 4, 4, None]


def test_answers_of_requests_in_shared_memory_and_others_are_not_overwritten(way: Way, kept: list[int | None]) -> None:
    rng, ours, other = np.random.default_rng(3), way(), way()
    region, before = Region(ours.signature), list[tuple[Any, Any]]()
    batches: list[tuple[int, ...]] = [(1,), (16,), (1,), (17,), (3, 1, 2), (25, 25), (2,) * 25, (1,)]
    for sizes in batches:
        plain = [arrays(rng, n) for n in sizes]
        with other._in_use:
            wanted, _ = other.score(read(other, *plain))
        requests = [region.pack(plain[at], n) if at % 2 == 0 else read(ours, plain[at])[0] for at, n in enumerate(sizes)]
        before += zip(ours.score(requests)[0], wanted, strict=True)
    for answer, expected in before:
        np.testing.assert_array_equal(answer["all"], expected["all"])
    assert kept == [sum(sizes) for sizes in batches]


def test_an_output_that_is_an_input_is_not_overwritten_by_the_next_request(kept: list[int | None]) -> None:
    ours = scorer_of(False, network=ArrayNetwork(lambda given: {"all": given["grid"]}))
    every = [arrays(np.random.default_rng(seed), 2) for seed in range(3)]
    for answer, asked in zip([ours.score(read(ours, one))[0][0] for one in every], every, strict=True):
        assert isinstance(answer, dict)
        np.testing.assert_array_equal(answer["all"], asked["grid"])
    assert kept == [2, 2, 2]


def test_beside_a_call_that_uses_the_memory_and_after_a_failure_it_is_used_again(way: Way, kept: list[int | None]) -> None:
    rng, tables = np.random.default_rng(3), FakeTables(4, 2)
    ours, other = way(tables=tables), way(tables=tables)
    with ours._in_use:
        compare(ours, other, arrays(rng, 2))
    assert kept == []
    tables.fails = hps.DatabaseError("away")
    with pytest.raises(hps.DatabaseError):
        ours.score(read(ours, arrays(rng, 2)))
    tables.fails = None
    compare(ours, other, arrays(rng, 2))
    assert kept == [2]


def test_bags_with_offsets_are_kept_where_all_are_of_one_size(way: Way, kept: list[int | None]) -> None:
    rng, ours, other = np.random.default_rng(5), way(), way()
    square = {"history": np.arange(8), "history.offsets": np.arange(3) * 4}
    compare(ours, other, arrays(rng, 2, (), **square), arrays(rng, 3, (), keys=4))
    compare(ours, other, arrays(rng, 2, (), **square, **{"history.weights": np.ones(8, np.float32)}))
    compare(ours, other, arrays(rng, 2, (), **square | {"history.offsets": np.array([0, 3, 8])}))
    compare(ours, other, arrays(rng, 2, keys=0))
    compare(ours, other, arrays(rng, 2, keys=4), arrays(rng, 2, keys=5))
    assert kept == [5, None, None, None, None]


def test_bags_for_which_there_is_no_room_take_the_general_way(way: Way, kept: list[int | None]) -> None:
    rng, ours, other = np.random.default_rng(5), way(), way()
    for keys in (320, 321, 20, 320):  # of one request; 16 of them have room, of 20 keys each: the table's 1000 for 50 samples
        compare(ours, other, arrays(rng, 2, keys=keys))
    compare(ours, other, *[arrays(rng, 1, keys=20)] * 16)
    compare(ours, other, *[arrays(rng, 1, keys=21)] * 16)
    assert kept == [2, None, 2, 2, 16, None]


def test_each_table_is_asked_once_in_a_lookup_and_what_is_given_once_once(way: Way) -> None:
    tables = FakeTables(4, 2)
    ours, asked = way(tables=tables), []
    look_up = tables.look_up
    ours._runner.lookup = lambda batch: (asked.append([*zip(batch.tables, batch.sizes, strict=True)]), look_up(batch))[1]
    ours.score(read(ours, arrays(np.random.default_rng(0), 16)))
    assert asked == [[(0, 1), (1, 32)], [(1, 5)], [(1, 3)], [(0, 16)], [(1, 48)], [(0, 16)]]


def test_rows_that_fill_up_a_lookup_are_of_the_batch(kept: list[int | None]) -> None:
    """Keys of an earlier batch may be missing by now, and would be fetched by every other one."""
    tables, asked = FakeTables(4, 2), []
    ours, look_up = scorer_of(True, tables=tables), tables.look_up
    ours._runner.lookup = lambda batch: (asked.extend(map(np.array, batch.keys)), look_up(batch))[1]
    for at, samples in enumerate((50, 33, 35, 49)):
        asked.clear()
        given = arrays(np.random.default_rng(1), samples)
        for name in ("user", "history", "recent", "last", "item", "tags", "one"):
            given = {**given, name: given[name] + 100 * at}
        ours.score(read(ours, given))
        assert all((one >= 100 * at).all() for one in asked)
        assert max(one.size for one in asked) == 3 * {50: 50, 33: 34, 35: 36, 49: 50}[samples]
    assert kept == [50, 33, 35, 49]


def test_rows_that_fill_up_a_lookup_are_no_more_than_it_may_have(way: Way, kept: list[int | None]) -> None:
    tables = FakeTables(4, 2, max_keys=33)

    def look_up(batch: Batch) -> None:
        if batch.kept and max(batch.sizes) > 33:
            raise TooManyKeysError("bound")
        tables.look_up(batch)

    inputs = {"item": {"table": "t0"}, "age": {"per_request": True}}
    ours, other = way(inputs, tables), way(inputs, tables)
    ours._runner.lookup = look_up
    for samples in (33, 32, 33):
        compare(ours, other, {"item": np.arange(samples), "age": np.ones(1, np.float32)})
    compare(ours, other, *[{"item": np.arange(20), "age": np.ones(1, np.float32)}] * 2)  # more than the table allows at once
    assert kept == [33, 32, 33, None]


def test_more_forms_than_are_kept_take_the_general_way_until_another_is_unused(
    way: Way, kept: list[int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_module, "_MOST_KEPT", 2)
    monkeypatch.setattr(kept_module, "_UNUSED", 4)
    rng, ours, other = np.random.default_rng(5), way(), way()
    for once in (ONCE, (), ("age",), ONCE, ("age",), ONCE, ("age",), ()):
        compare(ours, other, arrays(rng, 3, once))
        assert len(ours._kept.memories) <= 2
    assert kept == [3, 3, None, 3, None, 3, 3, None]


def test_where_memory_cannot_be_kept_batches_take_the_general_way(
    kept: list[int | None], caplog: pytest.LogCaptureFixture
) -> None:
    class Full(DeviceNetwork):
        def fixed(self, run: Callable[[], Arrays], *, owner: object = None) -> Callable[[], Arrays]:
            if len(ours._kept.memories) == 1:
                raise RuntimeError("CUDA out of memory")
            return super().fixed(run, owner=owner)

    rng, ours, other = np.random.default_rng(5), scorer_of(True, network=Full(everything)), scorer_of(True)
    for once in (ONCE, (), ("age",), ONCE):
        compare(ours, other, arrays(rng, 3, once))
    assert kept == [3, None, None, 3]
    assert [record.getMessage() for record in caplog.records] == [
        "model 'm': no memory is kept for batches of 16 samples: CUDA out of memory"
    ]


def test_more_sizes_than_are_prepared_are_prepared_again(
    way: Way, kept: list[int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_module, "_MOST_BOUND", 3)
    rng, ours, other = np.random.default_rng(5), way(), way()
    sizes = [1, 2, 3, 4, 1, 5, 4, 3, 2, 1] * 2
    for samples in sizes:
        compare(ours, other, arrays(rng, samples))
        assert all(len(memory.bound) <= 3 for memory in ours._kept.memories)
    assert kept == sizes


def test_all_that_a_network_does_counts_as_time_in_it(way: Way) -> None:
    found: dict[str, set[bool]] = {"fixed": set(), "take": set(), "run": set()}

    def note(what: str) -> None:
        found[what].add(wait_until(lambda: min(ours.network_seconds().values()) > 0, "time in the network counts"))

    class Noting(DeviceNetwork):
        def fixed(self, run: Callable[[], Arrays], *, owner: object = None) -> Callable[[], Arrays]:
            note("fixed")
            return super().fixed(run, owner=owner)

        def take(self, tensor: np.ndarray, index: np.ndarray) -> np.ndarray:
            note("take")
            return super().take(tensor, index)

        def run(self, inputs: Arrays) -> Mapping[str, np.ndarray]:
            note("run")
            return super().run(inputs)

    ours = way(network=Noting(everything))
    ours.warm()
    given = read(ours, arrays(np.random.default_rng(5), 3))
    ours.score(given)
    with ours._in_use:  # the general way
        ours.score(given)
    assert found == {"fixed": {True} if ours._runner.on_device else set(), "take": {True}, "run": {True}}
    assert ours.network_seconds() == {}


def test_warming_up_keeps_what_the_first_requests_need(kept: list[int | None]) -> None:
    inputs = {"item": {"table": "t0"}, "recent": FORMS["recent"], "age": {"per_request": True}}
    network = DeviceNetwork(everything)
    ours = scorer_of(True, inputs, network=network)
    ours.warm()
    assert len(ours._kept.memories) == 4  # 16 and 50 samples, given each and once
    before = network.captured
    for samples in (1, 16, 17, 50):
        for rows in (1, samples):
            given = {"item": np.arange(samples), "recent": np.ones((rows, 3), np.int64), "age": np.ones(rows, np.float32)}
            ours.score(read(ours, given))
    assert network.captured == before
    assert kept == [1, 1, 16, 16, 17, 17, 50, 50]
