"""Requests that are answered in one call of a network get what they get alone."""

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

import hps
from hps.configuration.load import load_dense
from hps.scoring.features import ScoreInputs, read_request
from hps.scoring.network_calls import NetworkCalls
from hps.scoring.scorer import Scorer
from hps.scoring.signature import Output, signature_of
from hps.testing.pooling_oracle import pooled
from tests.fakes.networks import ArrayNetwork, Arrays, FakeTables
from tests.ring1.scoring.test_packing import everything

INPUTS: dict[str, Any] = {
    "user": {"table": "t0", "per_request": True},
    "history": {"table": "t1", "pooling": "mean", "per_request": True},
    "last": {"table": "t1", "hotness": 2},
    "item": {"table": "t0"},
    "tags": {"table": "t1", "pooling": "sum", "padding_key": 3},
    "age": {"per_request": True},
    "grid": {"dtype": "int64", "shape": [-1, 2, 2]},
}


def scorer_of(
    function: Callable[[Arrays], Mapping[str, np.ndarray]] = everything, inputs: Any = None, **more: Any
) -> tuple[Scorer, FakeTables, ArrayNetwork]:
    tables, network = FakeTables(4, 2), ArrayNetwork(function)
    dense = load_dense({"format": "onnx", "file": "f", "inputs": inputs or INPUTS, "outputs": ["all"]})
    scorer = Scorer("m", tables.specs, signature_of(dense, tables.specs), NetworkCalls(network), tables.look_up, **more)
    return scorer, tables, network


def arrays_of_request(rng: np.random.Generator, samples: int, *, once: bool, ragged: bool) -> dict[str, np.ndarray]:
    rows = 1 if once else samples
    counts = rng.integers(0, 5, rows) if ragged else np.full(rows, 2)
    found = {
        "user": rng.integers(0, 50, rows),
        "history": rng.integers(0, 50, counts.sum()) if ragged else rng.integers(0, 50, (rows, 2)),
        "last": rng.integers(0, 50, (samples, 2)),
        "item": rng.integers(0, 50, samples),
        "tags": rng.integers(0, 6, (samples, 3)),
        "age": rng.random(rows, np.float32),
        "grid": rng.integers(0, 9, (samples, 2, 2)),
    }
    if ragged:
        found["history.offsets"] = np.concatenate([[0], np.cumsum(counts)])
        found["history.weights"] = rng.random(counts.sum(), np.float32)
    return found


def expected(tables: FakeTables, given: Arrays, samples: int) -> np.ndarray:
    """What `everything` makes of a request, said once more in the plainest way."""

    def rows(name: str, table: int) -> np.ndarray:
        return tables.vectors(table, given[name].reshape(-1))

    def bags(name: str, combiner: str, padding_key: int | None = None) -> np.ndarray:
        keys = given[name]
        bounds = given.get(f"{name}.offsets", np.arange(len(keys) + 1) * (keys.shape[1] if keys.ndim == 2 else 1))
        weights = given.get(f"{name}.weights")
        return pooled(rows(name, 1), keys.reshape(-1), bounds, weights, combiner, None, padding_key).vectors

    columns = [
        *(rows("user", 0), bags("history", "mean"), rows("last", 1).reshape(samples, -1), rows("item", 0)),
        *(bags("tags", "sum", 3), given["age"][:, None], given["grid"].reshape(samples, -1)),
    ]
    return np.concatenate([np.broadcast_to(column, (samples, column.shape[1])) for column in columns], 1)


def request_of(scorer: Scorer, given: Arrays) -> ScoreInputs:
    return read_request(scorer.signature, given, 100, "m")


def scores_of(scorer: Scorer, *given: Arrays) -> list[Any]:
    return scorer.score([request_of(scorer, one) for one in given])[0]


def test_any_mixture_of_requests_is_scored_in_one_call() -> None:
    scorer, tables, network = scorer_of()
    rng = np.random.default_rng(1)
    forms = list(itertools.product((1, 2, 7), (True, False), (True, False)))
    every = [(samples, arrays_of_request(rng, samples, once=once, ragged=ragged)) for samples, once, ragged in forms]
    alone = [scores_of(scorer, given)[0]["all"] for _, given in every]
    for (samples, given), answer in zip(every, alone, strict=True):
        np.testing.assert_allclose(answer, expected(tables, given, samples), rtol=1e-5, atol=1e-5)
    network.calls.clear()
    for first, second in itertools.product(range(len(every)), repeat=2):
        both = scores_of(scorer, every[first][1], every[second][1])
        np.testing.assert_allclose(both[0]["all"], alone[first], rtol=1e-6)
        np.testing.assert_allclose(both[1]["all"], alone[second], rtol=1e-6)
    together = scores_of(scorer, *[given for _, given in every])
    for one, answer in zip(together, alone, strict=True):
        np.testing.assert_allclose(one["all"], answer, rtol=1e-6)
    assert len(network.calls) == len(every) ** 2 + 1


def test_lookups_of_one_table_ask_it_one_after_the_other() -> None:
    scorer, tables, _ = scorer_of()
    scores_of(scorer, arrays_of_request(np.random.default_rng(0), 3, once=True, ragged=True))
    assert sorted(tables.lookups) == [[0], [0, 1], [1], [1]]  # rows of user and last, of item; bags of history, of tags


def test_a_bag_of_one_key_is_a_vector() -> None:
    """The pool is of one vector, whatever the combiner, and costs a plain lookup."""
    inputs = {"item": {"table": "t0", "pooling": "sqrtn", "hotness": 1}}
    scorer, tables, _ = scorer_of(inputs=inputs)
    for keys in (np.arange(3), np.arange(3)[:, None]):
        [answer] = scores_of(scorer, {"item": keys})
        np.testing.assert_array_equal(answer["all"], tables.vectors(0, np.arange(3)))


@pytest.mark.parametrize("width", [0, 1, 2])
def test_square_bags_of_any_width(width: int) -> None:
    scorer, tables, _ = scorer_of(inputs={"item": {"table": "t0", "pooling": "sum", "max_norm": 2.0}})
    keys = np.arange(3 * width).reshape(3, width)
    [answer] = scores_of(scorer, {"item": keys})
    wanted = pooled(tables.vectors(0, keys.reshape(-1)), keys.reshape(-1), np.arange(4) * width, None, "sum", 2.0)
    np.testing.assert_allclose(answer["all"], wanted.vectors, rtol=1e-5)


def test_a_network_that_gets_the_request_index_expands_by_itself() -> None:
    def expand(given: Arrays) -> Mapping[str, np.ndarray]:
        assert len(given["user"]) == len(given["age"]) == given["at"].max() + 1
        return everything({**given, "user": given["user"][given["at"]], "age": given["age"][given["at"]]})

    inputs = {"user": INPUTS["user"], "item": {"table": "t1"}, "age": INPUTS["age"], "at": {"request_index": True}}
    scorer, tables, network = scorer_of(expand, inputs)
    every = [
        {"user": np.array([at]), "item": np.arange(n), "age": np.full(1, at, np.float32)} for at, n in enumerate((3, 1, 5))
    ]
    for at, (answer, given) in enumerate(zip(scores_of(scorer, *every), every, strict=True)):
        items = tables.vectors(1, given["item"])
        users = np.repeat(tables.vectors(0, np.array([at])), len(items), 0)
        np.testing.assert_array_equal(answer["all"], np.column_stack([users, items, np.full((len(items), 2), at)]))
    assert network.calls == [3]  # three rows of users


def score_of(item: Arrays) -> Mapping[str, np.ndarray]:
    return {"all": item["item"][:, 0]}


ITEMS: dict[str, Any] = {"item": {"table": "t0"}}


def test_only_the_request_that_is_not_a_number_fails() -> None:
    def undefined(given: Arrays) -> Mapping[str, np.ndarray]:
        first = given["item"][:, 0]
        return {"all": np.where(first == 5, np.nan, first), "whole": np.arange(len(first))}

    scorer, _, _ = scorer_of(undefined, ITEMS)
    answers = scores_of(scorer, {"item": np.array([1, 2])}, {"item": np.array([3, 4, 5])}, {"item": np.array([6])})
    assert isinstance(answers[1], hps.NetworkError)
    assert str(answers[1]) == ("running the network of model 'm': output 'all' of sample 2 is not a number (dense.refuse_nan)")
    assert [answers[0]["all"].tolist(), answers[2]["all"].tolist()] == [[1, 2], [6]]
    allowed, _, _ = scorer_of(undefined, ITEMS, refuse_nan=False)
    assert np.isnan(scores_of(allowed, {"item": np.array([5])})[0]["all"]).all()


@pytest.mark.parametrize(
    ("cut", "shape"),
    [(np.s_[1:], r"\[2, 4\] for 3 samples, expected them as its first"), (np.s_[:0], r"\[0, 4\]"), (np.s_[0, 0], r"\[\]")],
)
def test_another_number_of_samples_is_refused(cut: Any, shape: str) -> None:
    scorer, _, _ = scorer_of(lambda given: {"all": given["item"][cut]}, ITEMS)
    with pytest.raises(hps.NetworkError, match=f"got output 'all' of shape {shape}"):
        scores_of(scorer, {"item": np.arange(3)})


@pytest.mark.parametrize(("error", "said"), [(ValueError("bad\nworse"), "ValueError: bad"), (RuntimeError(), "RuntimeError: ")])
def test_a_network_that_raises_is_a_failed_network(error: Exception, said: str) -> None:
    def fail(given: Arrays) -> Mapping[str, np.ndarray]:
        raise error

    scorer, _, _ = scorer_of(fail, ITEMS)
    with pytest.raises(hps.NetworkError) as caught:
        scores_of(scorer, {"item": np.arange(3)})
    assert str(caught.value) == f"running the network of model 'm': {said}"
    assert caught.value.__cause__ is error


@pytest.mark.parametrize("error", [hps.DatabaseError("away"), hps.DeviceError("broken")])
def test_errors_of_tiers_and_devices_stay_what_they_are(error: hps.HPSError) -> None:
    def fail(given: Arrays) -> Mapping[str, np.ndarray]:
        raise error

    scorer, tables, _ = scorer_of(fail if isinstance(error, hps.DeviceError) else score_of, ITEMS)
    tables.fails = error if isinstance(error, hps.DatabaseError) else None
    with pytest.raises(type(error)) as caught:
        scores_of(scorer, {"item": np.arange(3)})
    assert caught.value is error


def test_the_trial_finds_the_outputs_without_lookups() -> None:
    scorer, tables, network = scorer_of()
    assert scorer.try_out() == (Output("all", "float32", (4 + 2 + 4 + 4 + 2 + 1 + 4,)),)
    assert (tables.lookups, network.calls) == ([], [1, 3])


def test_the_trial_refuses_outputs_that_depend_on_the_number_of_samples() -> None:
    scorer, _, _ = scorer_of(lambda given: {"all": np.zeros((len(given["item"]), len(given["item"])), np.float32)}, ITEMS)
    with pytest.raises(hps.NetworkError, match=r"its outputs are .* for one sample, .* for three"):
        scorer.try_out()


def test_outputs_may_be_of_these_dtypes() -> None:
    for dtype in ("float32", "float16", "float64", "int64", "int32", "bool"):
        scorer, _, _ = scorer_of(lambda given, dtype=dtype: {"all": np.zeros(len(given["item"]), dtype)}, ITEMS)  # type: ignore[misc]
        assert scorer.try_out() == (Output("all", dtype, ()),)


@pytest.mark.parametrize("dtype", ["uint8", "int16", "complex64", "U3"])
def test_the_trial_refuses_outputs_that_answers_cannot_have(dtype: str) -> None:
    scorer, _, _ = scorer_of(lambda given: {"all": np.zeros(len(given["item"]), dtype)}, ITEMS)
    with pytest.raises(
        hps.NetworkError, match=rf"output 'all' is of {np.dtype(dtype).name}, expected float32, float16, .*float64"
    ):
        scorer.try_out()
