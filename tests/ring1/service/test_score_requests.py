"""Requests for scores as clients write them, and what is refused of them."""

import json
import re
from typing import Any

import numpy as np
import orjson
import pytest

import hps
from hps.configuration.load import load_dense
from hps.scoring.features import Output, features_of
from hps.service.protocol.request_checks import PublishedNetwork
from hps.service.protocol.score_requests import (
    ScoreBody,
    answer_text,
    decode_rows,
    decode_scores,
    described,
    rows_text,
    text_of,
)
from tests.fakes.region_front import tables_of

INPUTS: dict[str, Any] = {
    "user": {"table": "t0", "per_request": True},
    "history": {"table": "t1", "pooling": "mean", "per_request": True},
    "pair": {"table": "t1", "hotness": 2},
    "item": {"table": "t0"},
    "age": {},
    "half": {"dtype": "float16", "shape": [-1, 1]},
    "grid": {"dtype": "int32", "shape": [-1, 2, 2]},
    "flag": {"dtype": "bool"},
    "at": {"request_index": True},
}
MOST_KEYS, MOST_SAMPLES = 30, 4


def network(inputs: Any = None) -> PublishedNetwork:
    dense = load_dense({"format": "onnx", "file": "f", "inputs": inputs or INPUTS, "outputs": ["score", "pair"]})
    outputs = Output("score", "float32", ()), Output("pairs", "float64", (2,))
    return PublishedNetwork(features_of(dense, tables_of(4, 2)), outputs, MOST_SAMPLES)


NETWORK = network()
ARRAYS: dict[str, np.ndarray] = {
    "user": np.array([7]),
    "history": np.array([1, 2, 3]),
    "history.offsets": np.array([0, 3]),
    "history.weights": np.array([1, 0.5, 2], np.float32),
    "pair": np.array([[1, 2], [3, 4]]),
    "item": np.array([5, 6]),
    "age": np.array([0.5, 1.5], np.float32),
    "half": np.array([[1], [2]], np.float16),
    "grid": np.arange(8, dtype=np.int32).reshape(2, 2, 2),
    "flag": np.array([True, False]),
}
NAMES = {"int64": "INT64", "float32": "FP32", "float16": "FP16", "int32": "INT32", "bool": "BOOL", "float64": "FP64"}


def body_of(arrays: dict[str, np.ndarray], *, binary: bool, **more: Any) -> tuple[bytes, int | None]:
    inputs, data = [], b""
    for name, array in arrays.items():
        tensor = {"name": name, "datatype": NAMES[array.dtype.name], "shape": list(array.shape)}
        if binary:
            tensor["parameters"] = {"binary_data_size": array.nbytes}
            data += array.tobytes()
        else:
            tensor["data"] = array.reshape(-1).tolist()
        inputs.append(tensor)
    text = json.dumps({"inputs": inputs, **more}).encode()
    return text + data, len(text) if binary else None


def decode(arrays: dict[str, np.ndarray], *, binary: bool = True, most: int = MOST_KEYS, **more: Any) -> ScoreBody:
    found = decode_scores(*body_of(arrays, binary=binary, **more), NETWORK, most)
    assert found is not None
    return found


# -- the Open Inference Protocol --------------------------------------------------------------------------------------


@pytest.mark.parametrize("binary", [True, False])
def test_inputs_become_arrays_by_name(binary: bool) -> None:
    found = decode(ARRAYS, binary=binary)
    assert (found.header.samples, found.keys) == (2, 1 + 3 + 4 + 2)
    assert found.arrays.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert found.arrays[name].dtype == array.dtype
        np.testing.assert_array_equal(found.arrays[name], array)


@pytest.mark.parametrize("binary", [True, False])
def test_keys_and_offsets_may_be_narrow(binary: bool) -> None:
    narrow = {name: array.astype(np.int32) for name, array in ARRAYS.items() if array.dtype == np.int64}
    found = decode({**ARRAYS, **narrow}, binary=binary)
    assert {found.arrays[name].dtype for name in narrow} == {np.dtype(np.int64)}
    assert found.arrays["grid"].dtype == np.int32


def test_a_request_of_other_names_or_for_vectors_is_a_lookup() -> None:
    for arrays, more in (
        ({"t0": np.array([1])}, {}),
        ({**ARRAYS, "other": np.array([1])}, {}),
        ({"at": np.array([1])}, {}),
        ({"item": np.array([1])}, {"parameters": {"vectors": True}}),
    ):
        assert decode_scores(*body_of(arrays, binary=True, **more), NETWORK, MOST_KEYS) is None


def test_outputs_are_chosen_by_name() -> None:
    def outputs(**more: Any) -> list[tuple[str, bool]]:
        return [(one.name, binary) for one, binary in decode(ARRAYS, **more).header.outputs]

    assert outputs() == [("score", False), ("pairs", False)]
    assert outputs(parameters={"binary_data_output": True}) == [("score", True), ("pairs", True)]
    chosen = [{"name": "pairs", "parameters": {"binary_data": True}}]
    assert outputs(outputs=chosen) == [("pairs", True)]
    both = [{"name": "pairs"}, {"name": "score", "parameters": {"binary_data": False}}]
    assert outputs(outputs=both, parameters={"binary_data_output": True}) == [("score", False), ("pairs", True)]


def test_parameters_are_read() -> None:
    header = decode(ARRAYS, id="a", parameters={"timeout": 5000, "DeviceID": "1"}).header
    assert (header.request_id, header.timeout_us, header.device_id) == ("a", 5000, 1)
    assert decode(ARRAYS, parameters={"timeout": 3_600_000_000}).header.timeout_us == 3_600_000_000


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"outputs": [{"name": "vectors"}]}, "reading 'outputs': got 'vectors', expected some of score, pairs"),
        ({"id": 5}, "'id' is an integer (5), expected a string"),
        ({"parameters": {"timeout": -1}}, "'timeout' is an integer (-1), expected microseconds, at most an hour"),
        ({"parameters": {"timeout": 3_600_000_001}}, "'timeout' is an integer (3600000001), expected microseconds"),
        ({"parameters": {"timeout": 1.5}}, "'timeout' is a float (1.5), expected microseconds"),
        ({"parameters": {"timeout": True}}, "'timeout' is a boolean, expected microseconds"),
        ({"parameters": {"DeviceID": "gpu"}}, "reading 'parameters': 'DeviceID'"),
        ({"parameters": {"datatype": "FP16"}}, "got the parameter 'datatype', expected none: scores have those of the network"),
        ({"outputs": [{"name": "pairs", "parameters": {"datatype": "FP16"}}]}, "got the parameter 'datatype', expected none"),
    ],
)
def test_a_header_is_refused(more: dict[str, Any], message: str) -> None:
    with pytest.raises(hps.InvalidInputError, match=re.escape(message)):
        decode(ARRAYS, **more)


@pytest.mark.parametrize("change", [-1, 1])
def test_another_amount_of_binary_data_is_refused(change: int) -> None:
    body, length = body_of(ARRAYS, binary=True)
    wrong = body[:change] if change < 0 else body + b"x"
    size = sum(one.nbytes for one in ARRAYS.values())
    with pytest.raises(hps.InvalidInputError, match=f"got {size + change} bytes of binary data, expected {size}"):
        decode_scores(wrong, length, NETWORK, MOST_KEYS)


@pytest.mark.parametrize("samples", [0, MOST_SAMPLES, MOST_SAMPLES + 1])
def test_the_number_of_samples_is_bounded(samples: int) -> None:
    inputs = {"item": np.arange(samples)}
    if 0 < samples <= MOST_SAMPLES:
        assert decode(inputs).header.samples == samples
        return
    with pytest.raises(hps.TooManyKeysError, match=re.escape(f"got {samples} samples, expected 1 to 4 (max_batch_size)")):
        decode(inputs)


def test_samples_are_those_of_what_is_given_with_each() -> None:
    offsets = {"history": np.arange(5), "history.offsets": np.array([0, 2, 4, 5])}
    assert decode({"user": np.array([1]), **offsets}).header.samples == 3
    assert decode({"user": np.arange(4), **offsets}).header.samples == 4
    assert decode({"item": np.array([1, 2]), **offsets}).header.samples == 2


def test_the_number_of_keys_is_bounded() -> None:
    assert decode(ARRAYS, most=10).keys == 10
    with pytest.raises(hps.TooManyKeysError, match=re.escape("got 10 keys, expected at most 9 (service.max_keys_per_request)")):
        decode(ARRAYS, most=9)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("age", {"datatype": "FP64", "shape": [1], "data": [1.0]}, "reading input 'age'"),
        ("age", {"datatype": "BYTES", "shape": [1], "data": ["a"]}, "reading input 'age'"),
        ("age", {"datatype": "FP32", "shape": [2], "data": [1.0]}, "reading input 'age': got 1 values, expected 2"),
        ("age", {"datatype": "FP32", "shape": [1], "data": [1e39]}, "does not fit float32"),
        ("age", {"datatype": "FP32", "shape": [1], "data": ["1"]}, "got a string at position 0, expected numbers"),
        ("half", {"datatype": "FP16", "shape": [1, 1], "data": [65520]}, "reading input 'half': a value does not fit FP16"),
        ("grid", {"datatype": "INT32", "shape": [1], "data": [2**31]}, "reading input 'grid': a value does not fit INT32"),
        ("grid", {"datatype": "INT32", "shape": [1], "data": [-(2**31) - 1]}, "a value does not fit INT32"),
        ("item", {"datatype": "INT64", "shape": [1], "data": [2**63]}, "expected signed 64-bit integers"),
        ("item", {"datatype": "INT64", "shape": [1], "data": [1.0]}, "got a float (1.0) at position 0"),
        ("flag", {"datatype": "BOOL", "shape": [1], "data": [1]}, "expected a list of true and false"),
        ("flag", {"datatype": "BOOL", "shape": [1], "data": True}, "expected a list of true and false"),
        ("item", {"datatype": "INT64", "shape": [], "data": []}, "reading input 'item'"),
        ("item", {"datatype": "INT64", "shape": [-1], "data": []}, "reading input 'item'"),
    ],
)
def test_a_tensor_is_refused_and_named(name: str, tensor: dict[str, Any], message: str) -> None:
    with pytest.raises(hps.InvalidInputError, match=re.escape(message)):
        decode_scores(json.dumps({"inputs": [{"name": name, **tensor}]}).encode(), None, NETWORK, MOST_KEYS)


def test_the_greatest_values_fit() -> None:
    inputs = [
        {"name": "half", "datatype": "FP16", "shape": [1, 1], "data": [65504]},
        {"name": "grid", "datatype": "INT32", "shape": [1, 2], "data": [2**31 - 1, -(2**31)]},
        {"name": "item", "datatype": "INT64", "shape": [1], "data": [-(2**63)]},
    ]
    found = decode_scores(json.dumps({"inputs": inputs}).encode(), None, NETWORK, MOST_KEYS)
    assert found is not None
    assert {name: one.reshape(-1).tolist() for name, one in found.arrays.items()} == {
        "half": [65504],
        "grid": [2**31 - 1, -(2**31)],
        "item": [-(2**63)],
    }


# -- rows of JSON -----------------------------------------------------------------------------------------------------

ITEM = {"pair": [1, 2], "item": 5, "age": 0.5, "half": 1, "grid": [[1, 2], [3, 4]], "flag": True}
USER = {"user": 7, "history": [1, 2, 3]}


def rows(most: int = MOST_KEYS, of: PublishedNetwork = NETWORK, **request: Any) -> ScoreBody:
    return decode_rows(json.dumps(request).encode(), of, most)


def test_rows_become_arrays() -> None:
    found = rows(user=USER, items=[ITEM, {**ITEM, "item": 6, "half": [2]}])
    assert (found.rows, found.header.samples, found.keys) == (True, 2, 10)
    assert {name: one.tolist() for name, one in found.arrays.items()} == {
        "user": [7],
        "history": [1, 2, 3],
        "history.offsets": [0, 3],
        "pair": [[1, 2], [1, 2]],
        "item": [5, 6],
        "age": [0.5, 0.5],
        "half": [[1], [2]],
        "grid": [[[1, 2], [3, 4]]] * 2,
        "flag": [True, True],
    }
    assert {name: one.dtype for name, one in found.arrays.items() if name in ARRAYS} == {
        name: one.dtype for name, one in ARRAYS.items() if name != "history.weights"
    }


def test_the_user_may_have_everything_and_a_single_key_is_a_bag() -> None:
    found = rows(user={**USER, **ITEM, "history": 9})
    assert found.header.samples == 1
    assert found.arrays["history.offsets"].tolist() == [0, 1]
    assert rows(user={**USER, **ITEM}, items=[{}, {}, {}]).arrays["item"].tolist() == [5, 5, 5]


def test_each_item_may_have_what_could_be_given_once() -> None:
    found = rows(items=[{**ITEM, "user": 1, "history": []}, {**ITEM, "user": 2, "history": [4, 5]}])
    assert found.arrays["user"].tolist() == [1, 2]
    assert found.arrays["history.offsets"].tolist() == [0, 0, 2]


def test_settings_of_a_request_of_rows() -> None:
    header = rows(user=USER, items=[ITEM], timeout_us=7, device=1).header
    assert (header.timeout_us, header.device_id) == (7, 1)


EXPECTED = 'expected {"user": {"<input>": 1}, "items": [{"<input>": 7}, {"<input>": 9}]}'


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({}, f"got something else, {EXPECTED}"),
        ({"user": [], "items": [ITEM]}, f"got something else, {EXPECTED}"),
        ({"items": []}, f"got something else, {EXPECTED}"),
        ({"items": {}}, f"got something else, {EXPECTED}"),
        ({"items": [ITEM, 5]}, f"got something else, {EXPECTED}"),
        ({"rows": []}, f"got the member 'rows', {EXPECTED}"),
        ({"items": [ITEM] * 5}, "got 5 items, expected at most 4 (max_batch_size)"),
        ({"items": [ITEM], "timeout_us": -1}, "'timeout_us' is an integer (-1), expected an integer, at most an hour"),
        ({"items": [ITEM], "timeout_us": 3_600_000_001}, "'timeout_us' is an integer (3600000001)"),
        ({"items": [ITEM], "device": "x"}, "reading the request: 'device'"),
        ({"user": {"itme": 1}, "items": [ITEM]}, "reading 'user': got 'itme', expected some of age, flag, grid, half, history"),
        ({"user": {"at": 1}, "items": [ITEM]}, "reading 'user': got 'at'"),
        ({"user": USER, "items": [ITEM, {**ITEM, "itme": 1}]}, "reading items[1]: got 'itme'"),
        ({"user": {**USER, "age": 1}, "items": [ITEM]}, "reading items: got 'age', which 'user' has, too; expected it once"),
        ({"user": USER, "items": [ITEM, {}]}, "reading items[1]: 'pair' is missing, and 'user' has none"),
        ({"items": [ITEM]}, "reading items[0]: 'user' is missing, and 'user' has none"),
        ({"user": {**USER, "user": [7]}, "items": [ITEM]}, "reading 'user': got a list at position 0"),
        ({"user": {**USER, "history": ["a"]}, "items": [ITEM]}, "reading 'history': got a string at position 0"),
        ({"user": USER, "items": [{**ITEM, "pair": [1]}]}, "reading 'pair': expected lists of shape [2] for each sample"),
        ({"user": USER, "items": [{**ITEM, "pair": 1}]}, "reading 'pair': expected lists of shape [2] for each sample"),
        ({"user": USER, "items": [{**ITEM, "grid": [[1, 2], [3]]}]}, "reading 'grid': expected lists of shape [2, 2]"),
        ({"user": USER, "items": [{**ITEM, "age": True}]}, "reading 'age': got a boolean at position 0, expected numbers"),
        ({"user": USER, "items": [{**ITEM, "age": None}]}, "reading 'age': got null at position 0, expected numbers"),
        ({"user": USER, "items": [{**ITEM, "half": 1e5}]}, "reading 'half': a value does not fit FP16"),
        ({"user": USER, "items": [{**ITEM, "flag": 1}]}, "reading 'flag': expected a list of true and false"),
        ({"user": USER, "items": [{**ITEM, "item": 1.5}]}, "reading 'item': got a float (1.5) at position 0"),
    ],
)
def test_rows_are_refused_by_their_place(request_: dict[str, Any], message: str) -> None:
    with pytest.raises(hps.InvalidInputError, match=re.escape(message)):
        rows(**request_)


@pytest.mark.parametrize("text", [b"", b"[]", b"{", b'{"items": [], "items": []}', b"\xff"])
def test_what_is_no_object_is_refused(text: bytes) -> None:
    with pytest.raises(hps.InvalidInputError, match="reading the request"):
        decode_rows(text, NETWORK, MOST_KEYS)


def test_the_number_of_keys_of_rows_is_bounded() -> None:
    assert rows(10, user=USER, items=[ITEM, ITEM]).keys == 10
    with pytest.raises(hps.TooManyKeysError, match="got 10 keys, expected at most 9"):
        rows(9, user=USER, items=[ITEM, ITEM])


# -- answers and descriptions -----------------------------------------------------------------------------------------


def test_answers_have_the_outputs_of_the_header() -> None:
    values = {"score": np.array([0.5, np.inf], np.float32), "pairs": np.ones((2, 2))}
    header = decode(ARRAYS, id="a", outputs=[{"name": "pairs", "parameters": {"binary_data": True}}, {"name": "score"}]).header
    assert orjson.loads(text_of(answer_text(header, "m", "3", values))) == {
        "model_name": "m",
        "model_version": "3",
        "id": "a",
        "outputs": [
            {"name": "score", "datatype": "FP32", "shape": [2], "data": [0.5, None]},
            {"name": "pairs", "datatype": "FP64", "shape": [2, 2], "parameters": {"binary_data_size": 32}},
        ],
    }
    assert orjson.loads(text_of(rows_text("m", "3", values))) == {
        "model": "m",
        "version": "3",
        "outputs": {"score": [0.5, None], "pairs": [[1, 1], [1, 1]]},
    }
    halves = {"score": np.array([0.5], np.float16), "flags": np.array([True, False])}
    assert orjson.loads(text_of(rows_text("m", "3", halves)))["outputs"] == {"score": [0.5], "flags": [True, False]}


def test_networks_are_described_to_clients() -> None:
    inputs, outputs = described(NETWORK.features, NETWORK.outputs)
    assert [(*one,) for one in inputs] == [
        ("user", "INT64", (1,), False),
        ("history", "INT64", (-1,), False),
        ("history.offsets", "INT64", (1,), True),
        ("history.weights", "FP32", (-1,), True),
        ("pair", "INT64", (2,), False),
        ("item", "INT64", (1,), False),
        ("age", "FP32", (1,), False),
        ("half", "FP16", (1,), False),
        ("grid", "INT32", (2, 2), False),
        ("flag", "BOOL", (1,), False),
    ]
    assert [(*one,) for one in outputs] == [("score", "FP32", (1,), False), ("pairs", "FP64", (2,), False)]
