"""Batches of requests that look alike, in memory that is kept: they get what new memory gives them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

import hps
from hps.configuration.load import load_dense
from hps.errors import TooManyKeysError
from hps.scoring import scorer as scorer_module
from hps.scoring.features import Feature, ScoreInputs, features_of, read_request
from hps.scoring.network_calls import NetworkCalls
from hps.scoring.scorer import Scorer
from hps.tensors.segments import Segment
from hps.testing.waiting import PATIENCE_S, wait_until
from tests.fakes.networks import ArrayNetwork, Arrays, DeviceNetwork, FakeTables
from tests.ring1.scoring.test_packing import MOST, TABLES, Region, everything, scorer

ALIKE: dict[str, Any] = {
    "item": {"table": "t0"},
    "pair": {"table": "t1", "hotness": 2},
    "age": {"per_request": True},
    "flag": {"dtype": "bool", "shape": [-1, 3]},
}
KEPT: tuple[Feature, ...] = features_of(
    load_dense({"format": "onnx", "file": "f", "inputs": ALIKE, "outputs": ["all"]}), TABLES.specs
)


def alike(rng: np.random.Generator, samples: int, *, columns: bool = False, once: bool = False) -> dict[str, np.ndarray]:
    return {
        "item": rng.integers(0, 50, (samples, 1) if columns else samples),
        "pair": rng.integers(0, 50, (samples, 2)),
        "age": rng.random(1 if once else samples, np.float32),
        "flag": rng.random((samples, 3)) < 0.5,
    }


def wanted_of(given: dict[str, np.ndarray]) -> np.ndarray:
    samples = len(given["item"])
    columns = [
        TABLES.vectors(0, given["item"].reshape(-1)),
        TABLES.vectors(1, given["pair"]).reshape(samples, -1),
        np.broadcast_to(given["age"], samples)[:, None],
        given["flag"],
    ]
    return np.concatenate(columns, 1).astype(np.float32)


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """Of each call, the number of its samples if it was answered in memory that is kept, or None."""
    calls: list[int | None] = []
    score = Scorer._score_kept

    def counting(self: Scorer, requests: Any, counts: Any) -> Any:
        found = score(self, requests, counts)
        calls.append(None if found[0] is None else int(counts.sum()))
        return found

    monkeypatch.setattr(Scorer, "_score_kept", counting)
    return calls


def test_batches_of_any_size_are_scored_in_memory_that_is_kept(kept: list[int | None]) -> None:
    rng, region, ours = np.random.default_rng(3), Region(KEPT), scorer(KEPT)
    batches: list[tuple[int, ...]] = [(1,), (16,), (1,), (17,), (3, 1, 2), (8, 8), (25, 25), (50,), (2,) * 25, (1,)]
    before: list[tuple[np.ndarray, np.ndarray]] = []
    for samples in batches:
        plain = [alike(rng, n) for n in samples]
        requests = [
            region.pack(one, n) if at % 2 == 0 else read_request(KEPT, one, MOST, "m")
            for at, (one, n) in enumerate(zip(plain, samples, strict=True))
        ]
        got, _ = ours.score(requests)
        for one, asked in zip(got, plain, strict=True):
            np.testing.assert_array_equal(one["all"], wanted_of(asked))
            before.append((one["all"], wanted_of(asked)))
    assert kept == [sum(samples) for samples in batches]
    for answer, wanted in before:  # an answer is not overwritten by the next one
        np.testing.assert_array_equal(answer, wanted)


@pytest.mark.parametrize("forms", [[{}, {"once": True}], [{}, {"columns": True}], [{"columns": True}, {}]], ids=str)
def test_requests_that_are_not_alike_take_the_general_way(kept: list[int | None], forms: list[dict[str, bool]]) -> None:
    rng, ours = np.random.default_rng(3), scorer(KEPT)
    for packs in (True, False):
        region = Region(KEPT)
        plain = [alike(rng, 3, **form) for form in forms]
        got, _ = ours.score([region.pack(one, 3) if packs else read_request(KEPT, one, MOST, "m") for one in plain])
        for one, asked in zip(got, plain, strict=True):
            np.testing.assert_array_equal(one["all"], wanted_of(asked))
    assert kept == [None, None]


def test_beside_a_call_that_uses_the_memory_another_takes_the_general_way(kept: list[int | None]) -> None:
    rng, region, ours = np.random.default_rng(3), Region(KEPT), scorer(KEPT)
    given = alike(rng, 2)
    packed = region.pack(given, 2)
    assert ours._own.acquire(timeout=PATIENCE_S)
    ((answer,), _) = ours.score([packed])
    ours._own.release()
    np.testing.assert_array_equal(answer["all"], wanted_of(given))
    assert kept == []
    ((answer,), _) = ours.score([packed])
    np.testing.assert_array_equal(answer["all"], wanted_of(given))
    assert kept == [2]


def test_after_a_failure_the_memory_is_used_again(kept: list[int | None]) -> None:
    rng, ours = np.random.default_rng(3), scorer(KEPT)
    given = alike(rng, 2)
    try:
        TABLES.fails = hps.DatabaseError("away")
        with pytest.raises(hps.DatabaseError):
            ours.score([read_request(KEPT, given, MOST, "m")])
    finally:
        TABLES.fails = None
    ((answer,), _) = ours.score([read_request(KEPT, given, MOST, "m")])
    np.testing.assert_array_equal(answer["all"], wanted_of(given))
    assert kept == [2]


def test_an_output_that_is_an_input_is_not_overwritten_by_the_next_request(kept: list[int | None]) -> None:
    network = NetworkCalls(ArrayNetwork(lambda given: {"all": given["age"]}))
    ours = Scorer("m", TABLES.specs, KEPT, network, TABLES.look_up, max_samples=MOST)
    rng, region = np.random.default_rng(3), Region(KEPT)
    every = [alike(rng, 2) for _ in range(3)]
    answers = [ours.score([region.pack(one, 2)])[0][0]["all"] for one in every]
    for answer, asked in zip(answers, every, strict=True):
        np.testing.assert_array_equal(answer, asked["age"])
    assert kept == [2, 2, 2]


# -- lookups of bags, what is given once, and tables that are asked several times ---------------------------------------

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


@pytest.fixture(params=["on the CPU", "on a device"])
def way(request: pytest.FixtureRequest) -> Way:
    """Makes a scorer whose network is on the CPU, or keeps the rules of a device."""

    def made(inputs: Mapping[str, Any] = FORMS, tables: FakeTables = TABLES, network: Any = None, **more: Any) -> Scorer:
        dense = load_dense({"format": "onnx", "file": "f", "inputs": inputs, "outputs": ["all"]})
        on_device = request.param == "on a device"
        network = network or (DeviceNetwork if on_device else ArrayNetwork)(everything)
        features = features_of(dense, tables.specs)
        return Scorer(
            "m", tables.specs, features, NetworkCalls(network), tables.look_up, on_device=on_device, max_samples=MOST, **more
        )

    return made


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
    return [read_request(ours.features, one, MOST, "m") for one in given]


def compare(ours: Scorer, other: Scorer, *given: Arrays) -> None:
    """Compare the answers with those of a scorer that takes the general way."""
    with other._own:
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
    assert kept == [None, 4, 4]


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
    ours._lookup = lambda segments: (asked.append([(one.table, one.n) for one in segments]), look_up(segments))[1]
    ours.score(read(ours, arrays(np.random.default_rng(0), 16)))
    assert asked == [[(0, 1), (1, 32)], [(1, 5)], [(1, 3)], [(0, 16)], [(1, 48)], [(0, 16)]]


def test_rows_that_fill_up_a_lookup_are_of_the_batch(kept: list[int | None]) -> None:
    """Keys of an earlier batch may be missing by now, and would be fetched by every other one."""
    tables, asked = FakeTables(4, 2), []
    dense = load_dense({"format": "onnx", "file": "f", "inputs": FORMS, "outputs": ["all"]})
    features = features_of(dense, tables.specs)
    network = NetworkCalls(DeviceNetwork(everything))
    ours = Scorer("m", tables.specs, features, network, tables.look_up, on_device=True, max_samples=MOST)
    look_up = tables.look_up
    ours._lookup = lambda segments: (asked.extend(np.array(one.keys) for one in segments), look_up(segments))[1]
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

    def bind(segments: Sequence[Segment]) -> Sequence[Segment]:
        if any(one.n > 33 for one in segments):
            raise TooManyKeysError("bound")
        return segments

    inputs = {"item": {"table": "t0"}, "age": {"per_request": True}}
    ours, other = way(inputs, tables, bind=bind), way(inputs, tables)
    for samples in (33, 32, 33):
        compare(ours, other, {"item": np.arange(samples), "age": np.ones(1, np.float32)})
    compare(ours, other, *[{"item": np.arange(20), "age": np.ones(1, np.float32)}] * 2)  # more than the table allows at once
    assert kept == [33, 32, 33, None]


def test_more_forms_than_are_kept_take_the_general_way_until_another_is_unused(
    way: Way, kept: list[int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scorer_module, "_MOST_KEPT", 2)
    monkeypatch.setattr(scorer_module, "_UNUSED", 4)
    rng, ours, other = np.random.default_rng(5), way(), way()
    for once in (ONCE, (), ("age",), ONCE, ("age",), ONCE, ("age",), ()):
        compare(ours, other, arrays(rng, 3, once))
        assert len(ours._kept) <= 2
    assert kept == [3, 3, None, 3, None, 3, 3, None]


def test_where_memory_cannot_be_kept_batches_take_the_general_way(
    kept: list[int | None], caplog: pytest.LogCaptureFixture
) -> None:
    class Full(DeviceNetwork):
        def staging(self, size: int) -> tuple[np.ndarray, Any]:
            if len(ours._kept) == 1:
                raise RuntimeError("CUDA out of memory")
            return super().staging(size)

    dense = load_dense({"format": "onnx", "file": "f", "inputs": FORMS, "outputs": ["all"]})
    features = features_of(dense, TABLES.specs)
    ours, other = (
        Scorer("m", TABLES.specs, features, NetworkCalls(made(everything)), TABLES.look_up, on_device=True, max_samples=MOST)
        for made in (Full, DeviceNetwork)
    )
    rng = np.random.default_rng(5)
    for once in (ONCE, (), ("age",), ONCE):
        compare(ours, other, arrays(rng, 3, once))
    assert kept == [3, None, None, 3]
    assert [one.getMessage() for one in caplog.records] == [
        "model 'm': no memory is kept for batches of 16 samples: CUDA out of memory"
    ]


def test_more_sizes_than_are_prepared_are_prepared_again(
    way: Way, kept: list[int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scorer_module, "_MOST_BOUND", 3)
    rng, ours, other = np.random.default_rng(5), way(), way()
    sizes = [1, 2, 3, 4, 1, 5, 4, 3, 2, 1] * 2
    for samples in sizes:
        compare(ours, other, arrays(rng, samples))
        assert all(len(one.bound) <= 3 for one in ours._kept.values())
    assert kept == sizes


def test_all_that_a_network_does_counts_as_time_in_it(way: Way) -> None:
    found: dict[str, set[bool]] = {"fixed": set(), "take": set(), "run": set()}

    def note(what: str) -> None:
        found[what].add(wait_until(lambda: min(ours.network_seconds().values()) > 0, "time in the network counts"))

    class Noting(DeviceNetwork):
        def fixed(self, run: Callable[[], Arrays]) -> Callable[[], Arrays]:
            note("fixed")
            return super().fixed(run)

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
    with ours._own:  # the general way
        ours.score(given)
    assert found == {"fixed": {True} if ours._on_device else set(), "take": {True}, "run": {True}}
    assert ours.network_seconds() == {}


def test_warming_up_keeps_what_the_first_requests_need(kept: list[int | None]) -> None:
    inputs = {"item": {"table": "t0"}, "recent": FORMS["recent"], "age": {"per_request": True}}
    features = features_of(load_dense({"format": "onnx", "file": "f", "inputs": inputs, "outputs": ["all"]}), TABLES.specs)
    network = DeviceNetwork(everything)
    ours = Scorer("m", TABLES.specs, features, NetworkCalls(network), TABLES.look_up, on_device=True, max_samples=MOST)
    ours.warm()
    assert network.captured == 4  # 16 and 50 samples, given each and once
    for samples in (1, 16, 17, 50):
        for rows in (1, samples):
            given = {"item": np.arange(samples), "recent": np.ones((rows, 3), np.int64), "age": np.ones(rows, np.float32)}
            ours.score(read(ours, given))
    assert network.captured == 4
    assert kept == [1, 1, 16, 16, 17, 17, 50, 50]
