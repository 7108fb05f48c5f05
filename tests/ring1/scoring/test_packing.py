"""Requests in memory that others share: gathered as they are, and described by nobody who is believed."""

import json
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hps
from hps.configuration.load import load_dense
from hps.scoring.features import read_request
from hps.scoring.network_calls import NetworkCalls
from hps.scoring.packing import Description, PackedRequest, describe, read_description
from hps.scoring.scorer import Scorer
from hps.scoring.signature import Signature, signature_of
from tests.fakes.networks import ArrayNetwork, Arrays, FakeTables

SIZE, MOST = 1 << 16, 50
INPUTS: dict[str, Any] = {
    "user": {"table": "t0", "per_request": True},
    "last": {"table": "t1", "hotness": 2},
    "item": {"table": "t0"},
    "tags": {"table": "t1", "pooling": "sum"},
    "age": {"per_request": True},
    "flag": {"dtype": "bool", "shape": [-1, 3]},
}


def everything(given: Arrays) -> dict[str, np.ndarray]:
    samples = len(given["item"])
    return {"all": np.concatenate([one.reshape(samples, -1).astype(np.float32) for one in given.values()], 1)}


TABLES = FakeTables(4, 2)
SIGNATURE = signature_of(load_dense({"format": "onnx", "file": "f", "inputs": INPUTS, "outputs": ["all"]}), TABLES.specs)


class Region:
    """Memory with requests one behind the other, each at another distance from any boundary."""

    def __init__(self, signature: Signature = SIGNATURE) -> None:
        self._signature = signature
        self.memory = np.zeros(SIZE, np.uint8)
        self.at = 8
        self.described: dict[bytes, Description] = {}

    def pack(self, arrays: dict[str, np.ndarray], samples: int) -> PackedRequest:
        inputs: list[list[Any]] = []
        at = 64
        for name, array in arrays.items():
            self.memory[self.at + at : self.at + at + array.nbytes] = np.frombuffer(array.tobytes(), np.uint8)
            inputs.append([name, array.dtype.str, list(array.shape), at])
            at += array.nbytes + 5  # values need not be aligned
        text = describe(inputs, [["all", "<f4", [samples, 17], at]], 0)
        if text not in self.described:
            self.described[text] = read_description(text, self._signature, MOST, "m")
        packed = PackedRequest(self.described[text], self.memory.data, self.at, self.memory.ctypes.data + self.at)
        self.at += at + 3
        return packed


def request(rng: np.random.Generator, samples: int, form: str) -> dict[str, np.ndarray]:
    rows = samples if form == "each" else 1
    found = {
        "user": rng.integers(0, 50, (rows, 1) if form == "columns" else rows),
        "last": rng.integers(0, 50, (samples, 2)),
        "item": rng.integers(0, 50, (samples, 1) if form == "columns" else samples),
        "tags": rng.integers(0, 50, (samples, 4)),
        "age": rng.random((rows, 1) if form == "columns" else rows, np.float32),
        "flag": rng.random((samples, 3)) < 0.5,
    }
    if form == "ragged":
        found["tags"], found["tags.offsets"] = np.arange(2 * samples), 2 * np.arange(samples + 1)
    return found


def scorer(signature: Signature = SIGNATURE) -> Scorer:
    return Scorer("m", TABLES.specs, signature, NetworkCalls(ArrayNetwork(everything)), TABLES.look_up, max_samples=MOST)


@pytest.mark.parametrize(
    "forms", [("once",), ("each",), ("columns",), ("ragged",), ("once", "each"), ("each", "columns", "ragged")], ids=str
)
def test_requests_in_shared_memory_are_scored_like_any_others(forms: tuple[str, ...]) -> None:
    rng, region, ours = np.random.default_rng(3), Region(), scorer()
    for samples in ((1,), (3, 1, 2), (7, 7), (1,)):
        plain = [request(rng, n, forms[at % len(forms)]) for at, n in enumerate(samples)]
        packed = [region.pack(one, n) for one, n in zip(plain, samples, strict=True)]
        assert [one.samples == 0 for one in packed] == ["tags.offsets" in one for one in plain]
        wanted, _ = ours.score([read_request(SIGNATURE, one, MOST, "m") for one in plain])
        got, _ = ours.score([one if one.samples else one.unpacked(SIGNATURE, MOST, "m") for one in packed])
        for one, other in zip(got, wanted, strict=True):
            np.testing.assert_array_equal(one["all"], other["all"])


INPUT = ["item", "<i8", [2], 64]


def read(text: bytes) -> Description:
    return read_description(text, SIGNATURE, MOST, "m")


@pytest.mark.parametrize(
    "entry",
    [
        *(["item", "<i8", [2]], ["item", "<i8", [2], 64, 1], [7, "<i8", [2], 64], ["item", "|O", [2], 64]),
        *(["item", ["<i8"], [2], 64], ["item", "<i8", 2, 64], ["item", "<i8", [], 64], ["item", "<i8", [1] * 9, 64]),
        *(["item", "<i8", [-1], 64], ["item", "<i8", [2.0], 64], ["item", "<i8", [True], 64], ["item", "<i8", [2], -8]),
        *(["item", "<i8", [2], 8.0], ["item", "<i8", [2], True], ["item", "<i8", [2], 1 << 63], ["item", "<i8", [1 << 41], 64]),
        *(["item", "<i8", [1 << 40] * 8, 64], ["item", "<i8", [(1 << 37) - 7], 64], "item", None),
    ],
)
def test_a_tensor_that_cannot_be_is_refused(entry: Any) -> None:
    for place in ("inputs", "outputs"):
        text = json.dumps({"inputs": [], "outputs": [], "timeout_us": 0, place: [entry]}).encode()
        with pytest.raises(hps.InvalidInputError, match="its description is wrong"):
            read(text)


@pytest.mark.parametrize(
    "text",
    [
        *(b"", b"{", b"[]", b"null", b'"inputs"', b"\xff\x00", b'{"inputs": [], "outputs": []}'),
        *(b'{"inputs": [], "outputs": [], "timeout_us": "soon"}', b'{"inputs": [], "outputs": [], "timeout_us": Infinity}'),
        *(b'{"inputs": [], "outputs": [], "timeout_us": NaN}', b'{"inputs": 7, "outputs": [], "timeout_us": 0}'),
        *(b"[" * 100_000, b'{"inputs": [], "outputs": [], "timeout_us": ' + b"9" * 5000 + b"}"),
    ],
    ids=range(13),
)
def test_what_is_no_description_is_refused(text: bytes) -> None:
    with pytest.raises(hps.InvalidInputError, match="its description is wrong"):
        read(text)


def test_inputs_of_another_network_are_refused_by_their_values() -> None:
    region = Region()
    wrong = request(np.random.default_rng(0), 2, "once")
    wrong["other"] = wrong.pop("flag")
    packed = region.pack(wrong, 2)
    assert packed.samples == 0
    with pytest.raises(hps.InvalidInputError, match="got input 'other', which the network does not have"):
        packed.unpacked(SIGNATURE, MOST, "m")


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("item", np.arange(3), "got 2 samples of input 'flag', expected 3, as of 'last'"),
        ("last", np.zeros((2, 3), np.int64), "got 3 keys a sample for input 'last', expected 2"),
        ("age", np.ones(2), "got input 'age' of float64, expected float32"),
        ("flag", np.zeros((2, 4), np.bool_), "got input 'flag' of shape [2, 4], expected [samples, 3]"),
    ],
)
def test_shapes_are_refused_before_any_value_is_read(name: str, array: np.ndarray, message: str) -> None:
    wrong = request(np.random.default_rng(0), 2, "once")
    wrong[name] = array
    if name == "item":
        wrong["last"], wrong["tags"] = np.zeros((3, 2), np.int64), np.zeros((3, 2), np.int64)
    with pytest.raises(hps.InvalidInputError, match=re.escape(message)):
        Region().pack(wrong, 2)


NUMBERS = st.one_of(st.integers(-(2**70), 2**70), st.integers(-2, 9), st.floats(), st.booleans(), st.none())
TENSORS = st.one_of(
    st.lists(st.one_of(NUMBERS, st.text(max_size=3), st.lists(NUMBERS, max_size=9)), max_size=6),
    st.tuples(
        st.sampled_from([*INPUTS, "tags.offsets", "tags.weights", "all", ""]),
        st.sampled_from(["<i8", "<f4", "<i4", "|b1", "<f2", "<f8", "|V8", "<U1"]),
        st.lists(st.one_of(st.integers(0, 4), st.sampled_from([2**20, 2**40, 2**40 + 1])), max_size=4),
        st.integers(0, 2**12),
    ),
)


@settings(max_examples=200)
@given(st.lists(TENSORS, max_size=8), st.lists(TENSORS, max_size=3), st.one_of(NUMBERS, st.text(max_size=3)))
def test_a_description_is_refused_or_lies_within_its_end(inputs: Any, outputs: Any, timeout: Any) -> None:
    text = json.dumps({"inputs": inputs, "outputs": outputs, "timeout_us": timeout}).encode()
    try:
        found = read(text)
    except hps.InvalidInputError:
        return
    assert all(input_.at >= 0 and input_.at + input_.size <= found.end for input_ in (*found.inputs, *found.outputs))
    if found.samples and found.end <= SIZE:  # whatever the memory holds, it is scored or refused
        memory = np.full(SIZE, 1, np.uint8)
        packed = PackedRequest(found, memory.data, 0, memory.ctypes.data)
        ((answer,), _) = scorer().score([packed])
        assert len(answer["all"]) == found.samples
