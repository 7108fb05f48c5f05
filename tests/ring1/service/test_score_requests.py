"""Requests for scores as clients write them, and what is refused of them."""

import json
import re
from typing import Any

import numpy as np
import orjson
import pytest

import hps
from hps.configuration.load import load_dense
from hps.scoring.features import Output
from hps.scoring.signature import signature_of
from hps.service.protocol import score_requests
from hps.service.protocol.request_checks import PublishedNetwork
from hps.service.protocol.score_requests import ScoreBody, answer_text, decode_rows, decode_scores, rows_text, text_of
from tests.fakes.region_front import tables_of
from tests.servers.binary_tensors import with_tensors

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


DENSE = load_dense({"format": "onnx", "file": "f", "inputs": INPUTS, "outputs": ["score", "pair"]})
OUTPUTS = Output("score", "float32", ()), Output("pairs", "float64", (2,))
NETWORK = PublishedNetwork(signature_of(DENSE, tables_of(4, 2)).features, OUTPUTS, MOST_SAMPLES)
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
BINARY, BINARY_OUTPUT = {"binary_data": True}, {"binary_data_output": True}


def decode(arrays: dict[str, np.ndarray], *, binary: bool = True, most: int = MOST_KEYS, **more: Any) -> ScoreBody:
    found = decode_scores(*with_tensors(arrays, binary=binary, **more), NETWORK, most)
    assert found is not None
    return found


@pytest.mark.parametrize("binary", [True, False])
def test_inputs_become_arrays_by_name(binary: bool) -> None:
    found = decode(ARRAYS, binary=binary)
    assert (found.header.samples, found.keys, found.arrays.keys()) == (2, 1 + 3 + 4 + 2, ARRAYS.keys())
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(found.arrays[name], array, strict=True)
    narrow = {name: array.astype(np.int32) for name, array in ARRAYS.items() if array.dtype == np.int64}
    arrays = decode({**ARRAYS, **narrow}, binary=binary).arrays
    assert {arrays[name].dtype for name in narrow} == {np.dtype(np.int64)}
    assert arrays["grid"].dtype == np.int32


def test_a_request_of_other_names_or_for_vectors_is_a_lookup() -> None:
    for arrays, more in (
        ({"t0": np.array([1])}, {}),
        ({**ARRAYS, "other": np.array([1])}, {}),
        ({"at": np.array([1])}, {}),
        ({"item": np.array([1])}, {"parameters": {"vectors": True}}),
    ):
        assert decode_scores(*with_tensors(arrays, binary=True, **more), NETWORK, MOST_KEYS) is None


def test_outputs_are_chosen_by_name() -> None:
    scores, pairs = {"name": "score", "parameters": {"binary_data": False}}, {"name": "pairs", "parameters": BINARY}
    for more, outputs in (
        ({}, [("score", False), ("pairs", False)]),
        ({"parameters": BINARY_OUTPUT}, [("score", True), ("pairs", True)]),
        ({"outputs": [pairs]}, [("pairs", True)]),
        ({"outputs": [{"name": "pairs"}, scores], "parameters": BINARY_OUTPUT}, [("score", False), ("pairs", True)]),
    ):
        assert [(one.name, binary) for one, binary in decode(ARRAYS, **more).header.outputs] == outputs


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
        ({"parameters": {"timeout": True}}, "'timeout' is a boolean, expected microseconds"),
        ({"parameters": {"DeviceID": "gpu"}}, "reading 'parameters': 'DeviceID'"),
        ({"parameters": {"datatype": "FP16"}}, "got the parameter 'datatype', expected none: scores have those of the network"),
        ({"outputs": [{"name": "pairs", "parameters": {"datatype": "FP16"}}]}, "got the parameter 'datatype', expected none"),
    ],
)
def test_a_header_is_refused(more: dict[str, Any], message: str) -> None:
    with pytest.raises(hps.InvalidInputError, match=re.escape(message)):
        decode(ARRAYS, **more)


def test_another_amount_of_binary_data_is_refused() -> None:
    body, length = with_tensors(ARRAYS, binary=True)
    size = sum(one.nbytes for one in ARRAYS.values())
    for wrong, got in ((body[:-1], size - 1), (body + b"x", size + 1)):
        with pytest.raises(hps.InvalidInputError, match=f"got {got} bytes of binary data, expected {size}"):
            decode_scores(wrong, length, NETWORK, MOST_KEYS)


def test_the_numbers_of_samples_and_of_keys_are_bounded() -> None:
    assert decode({"item": np.arange(MOST_SAMPLES)}).header.samples == MOST_SAMPLES
    for samples in (0, MOST_SAMPLES + 1):
        with pytest.raises(hps.TooManyKeysError, match=re.escape(f"got {samples} samples, expected 1 to 4 (max_batch_size)")):
            decode({"item": np.arange(samples)})
    assert decode(ARRAYS, most=10).keys == rows(10, user=USER, items=[ITEM, ITEM]).keys == 10
    says = re.escape("got 10 keys, expected at most 9 (service.max_keys_per_request)")
    with pytest.raises(hps.TooManyKeysError, match=says):
        decode(ARRAYS, most=9)
    with pytest.raises(hps.TooManyKeysError, match="got 10 keys, expected at most 9"):
        rows(9, user=USER, items=[ITEM, ITEM])


def test_samples_are_those_of_what_is_given_with_each() -> None:
    offsets = {"history": np.arange(5), "history.offsets": np.array([0, 2, 4, 5])}
    given = (({"user": np.array([1])}, 3), ({"user": np.arange(4)}, 4), ({"item": np.array([1, 2])}, 2))
    assert [decode({**one, **offsets}).header.samples for one, _ in given] == [samples for _, samples in given]


def test_a_tensor_is_refused_and_named() -> None:
    for name, datatype, shape, data, message in (
        ("age", "FP64", [1], [1.0], "reading input 'age'"),
        ("age", "FP32", [2], [1.0], "reading input 'age': got 1 values, expected 2"),
        ("age", "FP32", [1], [1e39], "does not fit float32"),
        ("age", "FP32", [1], ["1"], "got a string at position 0, expected numbers"),
        ("half", "FP16", [1, 1], [65520], "reading input 'half': a value does not fit FP16"),
        ("grid", "INT32", [1], [2**31], "reading input 'grid': a value does not fit INT32"),
        ("item", "INT64", [1], [2**63], "expected signed 64-bit integers"),
        ("item", "INT64", [1], [1.0], "got a float (1.0) at position 0"),
        ("flag", "BOOL", [1], [1], "expected a list of true and false"),
        ("item", "INT64", [], [], "reading input 'item'"),
        ("item", "INT64", [-1], [], "reading input 'item'"),
    ):
        tensor = {"name": name, "datatype": datatype, "shape": shape, "data": data}
        with pytest.raises(hps.InvalidInputError, match=re.escape(message)):
            decode_scores(json.dumps({"inputs": [tensor]}).encode(), None, NETWORK, MOST_KEYS)


def test_the_greatest_values_fit() -> None:
    greatest = {"half": np.array([[65504]], np.float16), "grid": np.array([[[2**31 - 1, -(2**31)]] * 2], np.int32)}
    greatest |= {"item": np.array([-(2**63)])}
    found = decode(greatest).arrays
    for name, array in greatest.items():
        np.testing.assert_array_equal(found[name], array, strict=True)


ITEM = {"pair": [1, 2], "item": 5, "age": 0.5, "half": 1, "grid": [[1, 2], [3, 4]], "flag": True}
USER = {"user": 7, "history": [1, 2, 3]}


def rows(most: int = MOST_KEYS, **request: Any) -> ScoreBody:
    return decode_rows(json.dumps(request).encode(), NETWORK, most)


def test_rows_become_arrays() -> None:
    found = rows(user=USER, items=[ITEM, {**ITEM, "item": 6, "half": [2]}], timeout_us=7, device=1)
    assert (found.rows, found.header.samples, found.keys) == (True, 2, 10)
    assert (found.header.timeout_us, found.header.device_id) == (7, 1)
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
    assert {one.dtype == ARRAYS[name].dtype for name, one in found.arrays.items()} == {True}


def test_inputs_may_be_of_the_user_or_of_each_item_and_a_single_key_is_a_bag() -> None:
    found = rows(user={**USER, **ITEM, "history": 9})
    assert (found.header.samples, found.arrays["history.offsets"].tolist()) == (1, [0, 1])
    assert rows(user={**USER, **ITEM}, items=[{}, {}, {}]).arrays["item"].tolist() == [5, 5, 5]
    found = rows(items=[{**ITEM, "user": 1, "history": []}, {**ITEM, "user": 2, "history": [4, 5]}])
    assert (found.arrays["user"].tolist(), found.arrays["history.offsets"].tolist()) == ([1, 2], [0, 0, 2])


EXPECTED = 'expected {"user": {"<input>": 1}, "items": [{"<input>": 7}, {"<input>": 9}]}'


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({}, f"got something else, {EXPECTED}"),
        ({"user": [], "items": [ITEM]}, f"got something else, {EXPECTED}"),
        ({"items": []}, f"got something else, {EXPECTED}"),
        ({"items": [ITEM, 5]}, f"got something else, {EXPECTED}"),
        ({"rows": []}, f"got the member 'rows', {EXPECTED}"),
        ({"items": [ITEM] * 5}, "got 5 items, expected at most 4 (max_batch_size)"),
        ({"items": [ITEM], "timeout_us": -1}, "'timeout_us' is an integer (-1), expected an integer, at most an hour"),
        ({"items": [ITEM], "timeout_us": 3_600_000_001}, "'timeout_us' is an integer (3600000001)"),
        ({"items": [ITEM], "device": "x"}, "reading the request: 'device'"),
        ({"user": {"itme": 1}, "items": [ITEM]}, "reading 'user': got 'itme', expected some of age, flag, grid, half, history"),
        ({"user": USER, "items": [ITEM, {**ITEM, "itme": 1}]}, "reading items[1]: got 'itme'"),
        ({"user": {**USER, "age": 1}, "items": [ITEM]}, "reading items: got 'age', which 'user' has, too; expected it once"),
        ({"user": USER, "items": [ITEM, {}]}, "reading items[1]: 'pair' is missing, and 'user' has none"),
        ({"items": [ITEM]}, "reading items[0]: 'user' is missing, and 'user' has none"),
        ({"user": {**USER, "user": [7]}, "items": [ITEM]}, "reading 'user': got a list at position 0"),
        ({"user": {**USER, "history": ["a"]}, "items": [ITEM]}, "reading 'history': got a string at position 0"),
        ({"user": USER, "items": [{**ITEM, "pair": [1]}]}, "reading 'pair': expected lists of shape [2] for each sample"),
        ({"user": USER, "items": [{**ITEM, "grid": [[1, 2], [3]]}]}, "reading 'grid': expected lists of shape [2, 2]"),
        ({"user": USER, "items": [{**ITEM, "age": True}]}, "reading 'age': got a boolean at position 0, expected numbers"),
        ({"user": USER, "items": [{**ITEM, "half": 1e5}]}, "reading 'half': a value does not fit FP16"),
        ({"user": USER, "items": [{**ITEM, "flag": 1}]}, "reading 'flag': expected a list of true and false"),
        ({"user": USER, "items": [{**ITEM, "item": 1.5}]}, "reading 'item': got a float (1.5) at position 0"),
    ],
)
def test_rows_are_refused_by_their_place(request_: dict[str, Any], message: str) -> None:
    with pytest.raises(hps.InvalidInputError, match=re.escape(message)):
        rows(**request_)


def test_what_is_no_object_is_refused() -> None:
    for text in (b"", b"[]", b"{", b'{"items": [], "items": []}', b"\xff"):
        with pytest.raises(hps.InvalidInputError, match="reading the request"):
            decode_rows(text, NETWORK, MOST_KEYS)


def test_answers_have_the_outputs_of_the_header() -> None:
    values = {"score": np.array([0.5, np.inf], np.float32), "pairs": np.ones((2, 2))}
    header = decode(ARRAYS, id="a", outputs=[{"name": "pairs", "parameters": BINARY}, {"name": "score"}]).header
    score = {"name": "score", "datatype": "FP32", "shape": [2], "data": [0.5, None]}
    pairs = {"name": "pairs", "datatype": "FP64", "shape": [2, 2], "parameters": {"binary_data_size": 32}}
    answer = {"model_name": "m", "model_version": "3", "id": "a", "outputs": [score, pairs]}
    assert orjson.loads(text_of(answer_text(header, "m", "3", values))) == answer
    outputs = {"score": [0.5, None], "pairs": [[1, 1], [1, 1]]}
    assert orjson.loads(text_of(rows_text("m", "3", values))) == {"model": "m", "version": "3", "outputs": outputs}
    halves = {"score": np.array([0.5], np.float16), "flags": np.array([True, False])}
    assert orjson.loads(text_of(rows_text("m", "3", halves)))["outputs"] == {"score": [0.5], "flags": [True, False]}


def test_networks_are_described_to_clients() -> None:
    inputs, outputs = score_requests.described(NETWORK.features, NETWORK.outputs)
    keys = {"user": (1,), "history": (-1,), "history.offsets": (1,), "history.weights": (-1,), "pair": (2,), "item": (1,)}
    others = {"age": ("FP32", (1,)), "half": ("FP16", (1,)), "grid": ("INT32", (2, 2)), "flag": ("BOOL", (1,))}
    kinds = {name: ("FP32" if name == "history.weights" else "INT64", shape) for name, shape in keys.items()} | others
    optional = ("history.offsets", "history.weights")
    assert [(*one,) for one in inputs] == [(name, *kind, name in optional) for name, kind in kinds.items()]
    assert [(*one,) for one in outputs] == [("score", "FP32", (1,), False), ("pairs", "FP64", (2,), False)]
