"""What requests give for the inputs of a network, and what is refused."""

import re
from typing import Any

import numpy as np
import pytest

import hps
from hps.configuration.load import load_dense
from hps.scoring.features import ScoreInputs, arrays_of, read_request
from hps.scoring.signature import Signature, signature_of
from tests.fakes.region_front import tables_of

INPUTS = {
    "user": {"table": "t0", "per_request": True},
    "history": {"table": "t1", "pooling": "mean", "per_request": True},
    "pair": {"table": "t1", "hotness": 2},
    "item": {"table": "t0"},
    "age": {"dtype": "float32"},
    "grid": {"dtype": "int32", "shape": [-1, 2, 3]},
}
MOST = 8


def signature(**inputs: Any) -> Signature:
    said = {"format": "onnx", "file": "f", "inputs": inputs or INPUTS, "outputs": ["s"]}
    return signature_of(load_dense(said), tables_of(4, 2, max_keys=20))


def arrays(samples: int = 3, **changes: Any) -> dict[str, np.ndarray]:
    found = {
        "user": np.array([7]),
        "history": np.arange(5),
        "history.offsets": np.array([0, 5]),
        "pair": np.arange(2 * samples).reshape(samples, 2),
        "item": np.arange(samples),
        "age": np.ones(samples, np.float32),
        "grid": np.zeros((samples, 2, 3), np.int32),
        **changes,
    }
    return {name: array for name, array in found.items() if array is not None}


def read(given: dict[str, np.ndarray], **inputs: Any) -> ScoreInputs:
    return read_request(signature(**inputs), given, MOST, "m")


def test_inputs_are_in_the_order_of_the_configuration() -> None:
    said = "float32 [-1, 4]; float32 [-1, 2]; float32 [-1, 2, 2]; float32 [-1, 4]; float32 [-1]; int32 [-1, 2, 3]"
    assert "; ".join(str(tensor) for tensor in signature().tensors()) == said
    request = read(arrays())
    assert (request.samples, request.keys) == (3, (1, 5, 6, 3))
    assert [one.rows for one in request.given] == [1, 1, 3, 3, 3, 3]


def test_what_a_request_may_give_once_may_also_be_given_with_each_sample() -> None:
    each = {"user": np.arange(3), "history": np.arange(4), "history.offsets": np.array([0, 1, 1, 4])}
    assert [one.rows for one in read(arrays(**each)).given] == [3] * 6


def test_the_fewest_and_the_most_samples() -> None:
    assert [read(arrays(samples)).samples for samples in (0, 1, MOST)] == [0, 1, MOST]
    with pytest.raises(hps.TooManyKeysError, match=rf"got {MOST + 1} samples, expected at most {MOST} \(max_batch_size\)"):
        read(arrays(MOST + 1))


def test_the_most_keys() -> None:
    most = arrays(history=np.arange(20), **{"history.offsets": np.array([0, 20])})
    assert read(most).keys == (1, 20, 6, 3)
    more = arrays(history=np.arange(21), **{"history.offsets": np.array([0, 21])})
    with pytest.raises(hps.TooManyKeysError, match="got 21 keys of input 'history', expected at most 20"):
        read(more)


def test_a_request_of_what_is_given_once_has_one_sample_or_as_many_as_the_most() -> None:
    once = {"user": INPUTS["user"], "age": {"per_request": True}}
    assert read({"user": np.array([1]), "age": np.ones(1, np.float32)}, **once).samples == 1
    assert read({"user": np.array([1]), "age": np.ones(4, np.float32)}, **once).samples == 4
    with pytest.raises(hps.InvalidInputError, match="got 3 samples of input 'user', expected 1 or 4, as of 'age'"):
        read({"user": np.array([1, 2, 3]), "age": np.ones(4, np.float32)}, **once)


REFUSED = {
    "missing": ({"age": None}, "input 'age' is missing; expected user, history, pair, item, age, grid"),
    "unknown": ({"other": np.ones(3)}, "got input 'other', which the network does not have"),
    "misspelled": ({"age": None, "aeg": np.ones(3)}, "got input 'aeg', which the network does not have; expected user, "),
    "nearly right": ({"itme": np.ones(3)}, "expected user, history, pair, item, age, grid; did you mean 'item'?"),
    "offsets of a feature": ({"age.offsets": np.array([0, 3])}, "got input 'age.offsets', which the network does not have"),
    "offsets of what is not pooled": (
        {"item.offsets": np.array([0, 3])},
        "got offsets or weights of input 'item', which has no",
    ),
    "weights of what is not pooled": ({"pair.weights": np.ones(6, np.float32)}, "got offsets or weights of input 'pair'"),
    "weights of another dtype": (
        {"history.weights": np.ones(5)},
        "got 5 weights of float64 for input 'history', expected 5 of float32",
    ),
    "weights of another size": ({"history.weights": np.ones(4, np.float32)}, "got 4 weights of float32 for input 'history'"),
    "keys in a square": ({"history": np.zeros((1, 5), np.int64)}, "got keys of shape [1, 5] and offsets [2] of int64"),
    "offsets in a square": ({"history.offsets": np.array([[0, 5]])}, "got keys of shape [5] and offsets [1, 2] of int64"),
    "no offsets": ({"history.offsets": np.empty(0, np.int64)}, "offsets [0] of int64 for input 'history', expected [n] and"),
    "offsets of another dtype": ({"history.offsets": np.array([0.0, 5.0])}, "offsets [2] of float64 for input 'history'"),
    "offsets begin late": ({"history.offsets": np.array([1, 5])}, "begin with 1 and end with 5, expected 0 to 5"),
    "offsets end early": ({"history.offsets": np.array([0, 4])}, "begin with 0 and end with 4, expected 0 to 5"),
    "offsets fall": ({"history.offsets": np.array([0, 4, 3, 5])}, "begin with 0 and end with 5, expected 0 to 5, the number"),
    "two keys of one": ({"item": np.zeros((3, 2), np.int64)}, "got 2 keys a sample for input 'item', expected 1"),
    "one key of two": ({"pair": np.zeros((3, 1), np.int64)}, "got 1 keys a sample for input 'pair', expected 2"),
    "a flat pair": ({"pair": np.zeros(6, np.int64)}, "got keys of shape [6] for input 'pair', expected [samples, 2]"),
    "a single key": ({"item": np.array(5)}, "got keys of shape [] for input 'item', expected [samples, keys]"),
    "a cube": ({"item": np.zeros((3, 1, 1), np.int64)}, "got keys of shape [3, 1, 1] for input 'item'"),
    "a wide feature": ({"age": np.ones((3, 2), np.float32)}, "got input 'age' of shape [3, 2], expected [samples]"),
    "a flat grid": ({"grid": np.zeros((3, 6), np.int32)}, "got input 'grid' of shape [3, 6], expected [samples, 2, 3]"),
    "a number": ({"age": np.float32(1)}, "got input 'age' of shape [], expected [samples]"),
    "fewer items": ({"item": np.arange(2)}, "got 2 samples of input 'item', expected 3, as of 'pair'"),
    "two users of three": ({"user": np.arange(2)}, "got 2 samples of input 'user', expected 1 or 3, as of 'pair'"),
    "no user": ({"user": np.arange(0)}, "got 0 samples of input 'user', expected 1 or 3, as of 'pair'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_input_is_refused_and_named(name: str) -> None:
    changes, message = REFUSED[name]
    with pytest.raises(hps.InvalidInputError, match=re.escape(message)) as caught:
        read(arrays(**changes))
    assert str(caught.value).startswith("scoring with model 'm': ")


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("item", np.arange(3, dtype=np.int32), "got keys of input 'item' of int32, expected int64"),
        ("item", np.ones(3), "got keys of input 'item' of float64, expected int64"),
        ("age", np.ones(3), "got input 'age' of float64, expected float32"),
        ("grid", np.zeros((3, 2, 3), np.int64), "got input 'grid' of int64, expected int32"),
    ],
)
def test_another_dtype_is_refused(name: str, array: np.ndarray, message: str) -> None:
    with pytest.raises(hps.InvalidDtypeError, match=re.escape(message)):
        read(arrays(**{name: array}))


def test_one_column_is_one_value_a_sample() -> None:
    column = {"age": np.ones((3, 1), np.float32), "item": np.zeros((3, 1), np.int64)}
    assert read(arrays(**column)).given[4].values.shape == (3,)


def test_with_a_request_index_what_is_given_once_is_given_once() -> None:
    inputs = {**INPUTS, "at": {"request_index": True}}
    nothing = {"user": np.arange(0), "history": np.arange(0), "history.offsets": np.zeros(1, np.int64)}
    assert read(arrays(0, **nothing), **inputs).samples == read(arrays(0), **inputs).samples == 0
    assert read(arrays(), **inputs).samples == 3
    with pytest.raises(hps.InvalidInputError, match="got 3 rows of input 'user', expected 1, since the network gets it once"):
        read(arrays(user=np.arange(3)), **inputs)
    with pytest.raises(hps.InvalidInputError, match="got input 'at', which the network does not have"):
        read(arrays(at=np.zeros(3, np.int64)), **inputs)


def test_lists_become_arrays_of_the_inputs_dtype() -> None:
    found = arrays_of(signature().features, {"item": [1, 2], "age": [1, 2.5], "grid": [[[1, 2, 3], [4, 5, 6]]], "other": [1]})
    assert {name: one.dtype.name for name, one in found.items()} == {
        "item": "int64",
        "age": "float32",
        "grid": "int32",
        "other": "int64",
    }
    assert arrays_of(signature().features, {"item": np.arange(3, dtype=np.int32)})["item"].dtype == np.int64


def test_lists_of_numbers_that_do_not_fit_are_refused() -> None:
    inputs = {"item": {"table": "t0"}, "hour": {"dtype": "uint8"}}
    given = signature(**inputs).features
    assert arrays_of(given, {"hour": [0, 255]})["hour"].dtype == np.uint8
    for hours, got in (([1, 256], 256), ([-1, 3], -1)):
        with pytest.raises(hps.InvalidInputError, match=f"reading input 'hour': got {got}, which does not fit uint8"):
            arrays_of(given, {"hour": hours})


def test_lists_of_fractions_are_no_keys() -> None:
    with pytest.raises(hps.InvalidDtypeError, match="got keys of input 'item' of float64"):
        read(arrays_of(signature().features, {**arrays(), "item": [1.5, 2, 3]}))


def test_bags_become_keys_offsets_and_weights() -> None:
    ends = hps.Bags(np.arange(5), np.array([0, 2, 5]), np.ones(5, np.float32))
    starts = hps.Bags(np.arange(5, dtype=np.int32), np.array([0, 2], np.int32), include_last_offset=False)
    for bags in (ends, starts):
        found = arrays_of(signature().features, {"history": bags})
        assert found["history.offsets"].tolist() == [0, 2, 5]
        assert found["history"].dtype == found["history.offsets"].dtype == np.int64
        assert ("history.weights" in found) is (bags is ends)
    square = arrays_of(signature().features, {"history": hps.Bags(np.zeros((2, 3), np.int64))})
    assert {name: one.shape for name, one in square.items()} == {"history": (2, 3)}


@pytest.mark.parametrize("values", ["text", [[1, 2], [3]], object()])
def test_what_is_no_array_is_refused(values: Any) -> None:
    with pytest.raises(hps.InvalidInputError, match="input 'item'"):
        read(arrays_of(signature().features, {**arrays(), "item": values}))


def test_a_maximum_takes_no_weights() -> None:
    given = {"tags": np.arange(4), "tags.offsets": np.array([0, 4])}
    tags = {"table": "t0", "pooling": "max"}
    assert read(given, tags=tags).samples == 1
    with pytest.raises(hps.InvalidInputError, match="got weights of input 'tags', whose pooling is max, expected none"):
        read({**given, "tags.weights": np.ones(4, np.float32)}, tags=tags)
