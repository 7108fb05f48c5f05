"""Requests for scores by the Open Inference Protocol, and what is refused of them."""

import json
import re
from typing import Any

import numpy as np
import orjson
import pytest

import hps
from hps.configuration.load import load_dense
from hps.scoring.signature import Output, signature_of
from hps.serve.protocol import score_requests
from hps.serve.protocol.request_checks import PublishedNetwork
from hps.serve.protocol.score_requests import ScoreBody, answer_text, decode_scores, text_of
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


OUTPUTS = Output("score", "float32", ()), Output("pairs", "float64", (2,))


def network_of(inputs: dict[str, Any], **more: Any) -> PublishedNetwork:
    dense = load_dense({"format": "onnx", "file": "f", "inputs": inputs, "outputs": ["score", "pairs"], **more})
    return PublishedNetwork("m", signature_of(dense, tables_of(4, 2)), OUTPUTS, MOST_SAMPLES, ("t0", "t1"))


NETWORK = network_of(INPUTS)
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
    assert (found.header.samples, found.header.keys, found.arrays.keys()) == (2, 1 + 3 + 4 + 2, ARRAYS.keys())
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(found.arrays[name], array, strict=True)
    narrow = {name: array.astype(np.int32) for name, array in ARRAYS.items() if array.dtype == np.int64}
    arrays = decode({**ARRAYS, **narrow}, binary=binary).arrays
    assert {arrays[name].dtype for name in narrow} == {np.dtype(np.int64)}
    assert arrays["grid"].dtype == np.int32


def test_a_request_of_other_names_or_for_vectors_is_a_lookup() -> None:
    for arrays, more in (
        ({"t0": np.array([1])}, {}),
        ({"t0": np.array([1]), "t1.offsets": np.array([0, 1])}, {}),
        ({"KEYS": np.array([1]), "NUMKEYS": np.array([1, 0])}, {}),
        ({"item": np.array([1])}, {"parameters": {"vectors": True}}),
    ):
        assert decode_scores(*with_tensors(arrays, binary=True, **more), NETWORK, MOST_KEYS) is None


UNKNOWN = {
    "one more": ({**ARRAYS, "other": np.array([1])}, "got input 'other', which the network does not have; expected user, "),
    "a misspelled one": (
        {"itme" if name == "item" else name: array for name, array in ARRAYS.items()},
        "got input 'itme', which the network does not have; expected user, history, pair, item, age, half, grid, flag; did you "
        """mean 'item'?; vectors of tables are asked with the parameter "vectors": true""",
    ),
    "that alone": ({"itme": np.array([1])}, "got input 'itme', which the network does not have"),
    "a table beside inputs": ({**ARRAYS, "t0": np.array([1])}, "got input 't0', which the network does not have"),
    "the request index": ({"at": np.array([1])}, "got input 'at', which the network does not have"),
}


@pytest.mark.parametrize("what", UNKNOWN)
def test_an_unknown_input_is_refused_and_named(what: str) -> None:
    arrays, says = UNKNOWN[what]
    with pytest.raises(hps.InvalidInputError, match=re.escape(f"scoring with model 'm': {says}")):
        decode_scores(*with_tensors(arrays, binary=True), NETWORK, MOST_KEYS)


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


def of_samples(samples: int, **changes: Any) -> dict[str, np.ndarray]:
    """Inputs of so many samples."""
    names = "pair", "item", "age", "half", "grid", "flag"
    return {**ARRAYS, **{name: np.resize(ARRAYS[name], (samples, *ARRAYS[name].shape[1:])) for name in names}, **changes}


def test_the_numbers_of_samples_and_of_keys_are_bounded() -> None:
    assert decode(of_samples(MOST_SAMPLES)).header.samples == MOST_SAMPLES
    assert decode(of_samples(0)).header.samples == 0
    with pytest.raises(hps.TooManyKeysError, match=re.escape("got 5 samples, expected at most 4 (max_batch_size)")):
        decode(of_samples(MOST_SAMPLES + 1))
    assert decode(ARRAYS, most=10).header.keys == 10
    says = re.escape("got 10 keys, expected at most 9 (service.max_keys_per_request)")
    with pytest.raises(hps.TooManyKeysError, match=says):
        decode(ARRAYS, most=9)


def test_samples_are_those_of_what_is_given_with_each() -> None:
    said = {name: {**one, "per_request": False} for name, one in INPUTS.items() if name != "at"}
    arrays = of_samples(3, user=np.arange(3), history=np.arange(5))
    arrays["history.offsets"] = np.array([0, 2, 4, 5])
    del arrays["history.weights"]
    found = decode_scores(*with_tensors(arrays, binary=True), network_of(said), MOST_KEYS)
    assert found is not None
    assert found.header.samples == 3


def test_a_tensor_is_refused_and_named() -> None:
    for name, datatype, shape, data, message in (
        ("age", "UINT16", [2], [1, 2], "reading input 'age': got datatype 'UINT16', expected FP32, FP16, FP64, INT64"),
        ("age", "FP32", [2], [1.0], "reading input 'age': got 1 values, expected 2"),
        ("age", "FP32", [2], [1e39, 0], "does not fit float32"),
        ("age", "FP32", [2], ["1", 0], "got a string at position 0, expected numbers"),
        ("half", "FP16", [2, 1], [65520, 0], "reading input 'half': a value does not fit FP16"),
        ("grid", "INT32", [2, 2, 2], [2**31] * 8, "reading input 'grid': a value does not fit INT32"),
        ("item", "INT64", [2], [2**63, 0], "expected signed 64-bit integers"),
        ("item", "INT64", [2], [1.0, 0], "got a float (1.0) at position 0"),
        ("flag", "BOOL", [2], [1, 0], "expected a list of true and false"),
        ("item", "INT64", [], [], "reading input 'item'"),
        ("item", "INT64", [-1], [], "reading input 'item'"),
    ):
        tensors = json.loads(with_tensors(ARRAYS, binary=False)[0])["inputs"]
        wrong = {"name": name, "datatype": datatype, "shape": shape, "data": data}
        inputs = [wrong if tensor["name"] == name else tensor for tensor in tensors]
        with pytest.raises(hps.InvalidInputError, match=re.escape(message)):
            decode_scores(json.dumps({"inputs": inputs}).encode(), None, NETWORK, MOST_KEYS)


def test_the_greatest_values_fit() -> None:
    greatest = {"half": np.array([[65504]] * 2, np.float16), "grid": np.array([[[2**31 - 1, -(2**31)]] * 2] * 2, np.int32)}
    greatest |= {"item": np.array([-(2**63), 2**63 - 1])}
    found = decode({**ARRAYS, **greatest}, binary=False).arrays
    for name, array in greatest.items():
        np.testing.assert_array_equal(found[name], array, strict=True)


def test_answers_have_the_outputs_of_the_header() -> None:
    values = {"score": np.array([0.5, np.inf], np.float32), "pairs": np.ones((2, 2))}
    header = decode(ARRAYS, id="a", outputs=[{"name": "pairs", "parameters": BINARY}, {"name": "score"}]).header
    score = {"name": "score", "datatype": "FP32", "shape": [2], "data": [0.5, None]}
    pairs = {"name": "pairs", "datatype": "FP64", "shape": [2, 2], "parameters": {"binary_data_size": 32}}
    answer = {"model_name": "m", "model_version": "3", "id": "a", "outputs": [score, pairs]}
    assert orjson.loads(text_of(answer_text(header, "m", "3", values))) == answer


def test_networks_are_described_to_clients() -> None:
    inputs, outputs = score_requests.described(NETWORK.signature.features, NETWORK.outputs)
    keys = {"user": (1,), "history": (-1,), "history.offsets": (1,), "history.weights": (-1,), "pair": (2,), "item": (1,)}
    others = {"age": ("FP32", (1,)), "half": ("FP16", (1,)), "grid": ("INT32", (2, 2)), "flag": ("BOOL", (1,))}
    kinds = {name: ("FP32" if name == "history.weights" else "INT64", shape) for name, shape in keys.items()} | others
    optional = ("history.offsets", "history.weights")
    assert [input_[:4] for input_ in inputs] == [(name, *kind, name in optional) for name, kind in kinds.items()]
    assert [output[:4] for output in outputs] == [("score", "FP32", (1,), False), ("pairs", "FP64", (2,), False)]
    assert all(input_.full_shape == [-1, *input_.shape] for input_ in (*inputs, *outputs))


# -- networks that were cut: free sizes, offsets, more dtypes ---------------------------------------------------------

CUT_INPUTS: dict[str, Any] = {
    "hist": {"dtype": "int64", "shape": [-1, "n"]},
    "mask": {"dtype": "bool", "shape": [-1, "n", 2]},
    "batch.age": {"dtype": "float64"},
    "lS_i.0": {"dtype": "uint8"},
    "lS_i.1": {"dtype": "int16", "shape": [-1, 2]},
    "user.x": {"dtype": "int8", "per_request": True},
    "tags": {"dtype": "int64", "shape": ["m"]},
    "ends": {"dtype": "int64", "shape": ["samples + 1"], "offsets_of": "tags"},
    "starts": {"dtype": "int32", "shape": [-1], "offsets_of": "tags"},
    "weights": {"dtype": "float32", "shape": ["m"]},
    "pair": {"dtype": "int32", "shape": ["2*samples"]},
}
CUT: dict[str, Any] = {
    "inputs": CUT_INPUTS,
    "sizes": {"n": 3, "m": 4},
    "guards": ["n >= 2", "samples != 3", "m <= 9"],
    "lookups": {
        "vectors": {"table": "t0", "keys": {"input": "hist"}},
        "bags": {"table": "t1", "pooling": "sum", "keys": {"input": "tags"}, "offsets": {"input": "starts"}},
    },
    "dynamic_batching": False,
}


def cut(**changes: Any) -> PublishedNetwork:
    return network_of(**{**CUT, **changes})


CUT_NETWORK = cut()
CUT_ARRAYS: dict[str, np.ndarray] = {
    "hist": np.array([[1, 2]] * 2),
    "mask": np.ones((2, 2, 2), np.bool_),
    "batch.age": np.array([0.1, 1e300]),
    "lS_i.0": np.array([255, 0], np.uint8),
    "lS_i.1": np.array([[-(2**15), 2**15 - 1]] * 2, np.int16),
    "user.x": np.array([-128], np.int8),
    "tags": np.array([7, 8, 9, 6]),
    "ends": np.array([0, 3, 4]),
    "starts": np.array([0, 3], np.int32),
    "weights": np.array([0.5, 1, 2, 3], np.float32),
    "pair": np.array([1, 2, 3, 4], np.int32),
}


def decode_cut(changes: dict[str, np.ndarray], binary: bool = True) -> ScoreBody:
    found = decode_scores(*with_tensors({**CUT_ARRAYS, **changes}, binary=binary), CUT_NETWORK, MOST_KEYS)
    assert found is not None
    return found


@pytest.mark.parametrize("binary", [True, False])
def test_inputs_of_a_cut_network_become_arrays_by_name(binary: bool) -> None:
    found = decode_cut({}, binary)
    assert (found.header.samples, found.header.keys) == (2, 4 + 4)
    for name, array in CUT_ARRAYS.items():
        np.testing.assert_array_equal(found.arrays[name], array, strict=True)
    assert score_requests.needs_no_conversion(found.header, CUT_NETWORK)
    narrow = decode_cut({name: CUT_ARRAYS[name].astype(np.int32) for name in ("hist", "tags", "ends")}, binary)
    assert {one.dtype for one in map(narrow.arrays.__getitem__, ("hist", "tags", "ends"))} == {np.dtype(np.int64)}
    assert narrow.arrays["starts"].dtype == np.int32
    assert not score_requests.needs_no_conversion(narrow.header, CUT_NETWORK)


CUT_REFUSED: list[tuple[dict[str, np.ndarray], str]] = [
    ({"hist": np.ones((2, 1), int), "mask": np.ones((2, 1, 2), bool)},
     "input 'hist' of shape [2, 1]: the network needs n >= 2, got 1"),
    ({"mask": np.ones((2, 3, 2), bool)}, "got input 'mask' of shape [2, 3, 2], expected [samples, n, 2] with n 2, as for"),
    ({"ends": np.array([0, 1, 3, 4])}, "got input 'ends' of shape [4], expected [samples + 1] with samples + 1 = 3"),
    ({"tags": np.ones(10, int), "weights": np.ones(10, np.float32)}, "input 'tags' of shape [10]: the network needs m <= 9"),
    ({"weights": np.ones(3, np.float32)}, "got input 'weights' of shape [3], expected [m] with m 4, as for another input"),
    ({"lS_i.0": np.array([1, 2], np.int8)}, "got input 'lS_i.0' of int8, expected uint8"),
    ({"lS_i.0": np.array([1, 2, 3], np.uint8)}, "got 3 samples of input 'lS_i.0', expected 2, as of 'hist'"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), CUT_REFUSED)
def test_sizes_are_refused_with_the_header(changes: dict[str, np.ndarray], message: str) -> None:
    for _ in range(2):
        body, length = with_tensors({**CUT_ARRAYS, **changes}, binary=True)
        with pytest.raises(hps.InvalidInputError, match=re.escape(f"scoring with model 'm': {message}")):
            score_requests.score_header(body[:length], CUT_NETWORK)
        assert decode_cut({}).header.samples == 2


def test_inputs_of_cut_networks_are_described_with_their_free_sizes() -> None:
    inputs, _ = score_requests.described(CUT_NETWORK.signature.features, ())
    assert [(input_.name, input_.datatype, input_.full_shape) for input_ in inputs] == [
        ("hist", "INT64", [-1, -1]),
        ("mask", "BOOL", [-1, -1, 2]),
        ("batch.age", "FP64", [-1, 1]),
        ("lS_i.0", "UINT8", [-1, 1]),
        ("lS_i.1", "INT16", [-1, 2]),
        ("user.x", "INT8", [-1, 1]),
        ("tags", "INT64", [-1]),
        ("ends", "INT64", [-1]),
        ("starts", "INT32", [-1, 1]),
        ("weights", "FP32", [-1]),
        ("pair", "INT32", [-1]),
    ]


def test_an_input_may_be_missing_or_too_large_to_be_thought_of() -> None:
    tensors = json.loads(with_tensors(CUT_ARRAYS, binary=False)[0])["inputs"]
    with pytest.raises(hps.InvalidInputError, match="scoring with model 'm': input 'pair' is missing"):
        score_requests.score_header(json.dumps({"inputs": tensors[:-1]}).encode(), CUT_NETWORK)
    for shape in ([1 << 40, 1 << 40, 1 << 40], [1 << 62], [0, 1 << 62]):
        large = {"name": "pair", "datatype": "INT32", "shape": shape, "data": []}
        with pytest.raises(hps.InvalidInputError, match=r"reading input 'pair': got shape|got input 'pair' of shape"):
            score_requests.score_header(json.dumps({"inputs": [*tensors[:-1], large]}).encode(), CUT_NETWORK)
