"""Requests for scores as JSON rows: what they mean, nested names, bags, and what is refused of them."""

import json
import re
from typing import Any

import numpy as np
import orjson
import pytest

import hps
from hps.configuration.load import load_dense
from hps.scoring.signature import signature_of
from hps.serve.protocol.request_checks import PublishedNetwork
from hps.serve.protocol.score_requests import ScoreBody, text_of
from hps.serve.protocol.score_rows import decode_rows, example_of, rows_text
from tests.fakes.region_front import tables_of
from tests.ring1.serve.test_score_requests import ARRAYS, CUT_INPUTS, CUT_NETWORK, INPUTS, MOST_KEYS, NETWORK, cut

ITEM = {"pair": [1, 2], "item": 5, "age": 0.5, "half": 1, "grid": [[1, 2], [3, 4]], "flag": True}
USER = {"user": 7, "history": [1, 2, 3]}


def rows(most: int = MOST_KEYS, **request: Any) -> ScoreBody:
    return decode_rows(json.dumps(request).encode(), NETWORK, most)


def test_rows_become_arrays() -> None:
    found = rows(user=USER, items=[ITEM, {**ITEM, "item": 6, "half": [2]}], timeout_us=7, device=1)
    assert (found.rows, found.header.samples, found.header.keys) == (True, 2, 10)
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
    items = [{**ITEM, "user": 1, "history": []}, {**ITEM, "user": 2, "history": [4, 5]}]
    inputs = {name: one for name, one in INPUTS.items() if name != "at"}  # with which each must be given once
    signature = signature_of(
        load_dense({"format": "onnx", "file": "f", "inputs": inputs, "outputs": ["score"]}), tables_of(4, 2)
    )
    found = decode_rows(json.dumps({"items": items}).encode(), PublishedNetwork("m", signature, (), 4), 30)
    assert (found.arrays["user"].tolist(), found.arrays["history.offsets"].tolist()) == ([1, 2], [0, 0, 2])


def test_no_items_are_no_samples() -> None:
    for request in ({"user": USER, "items": []}, {"items": []}):
        found = rows(**request)
        assert (found.header.samples, found.arrays["grid"].shape) == (0, (0, 2, 2))
    assert rows(items=[]).arrays["history.offsets"].tolist() == [0]


EXPECTED = 'expected {"user": {"<input>": 1}, "items": [{"<input>": 7}, {"<input>": 9}]}'


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({}, f"got something else, {EXPECTED}"),
        ({"user": [], "items": [ITEM]}, f"got something else, {EXPECTED}"),
        ({"items": None}, f"got something else, {EXPECTED}"),
        ({"items": [ITEM, 5]}, f"got something else, {EXPECTED}"),
        ({"rows": []}, f"got the member 'rows', {EXPECTED}"),
        ({"items": [ITEM] * 5}, "got 5 items, expected at most 4 (max_batch_size)"),
        ({"items": [ITEM], "timeout_us": -1}, "'timeout_us' is an integer (-1), expected an integer, at most an hour"),
        ({"items": [ITEM], "timeout_us": 3_600_000_001}, "'timeout_us' is an integer (3600000001)"),
        ({"items": [ITEM], "device": "x"}, "reading the request: 'device'"),
        (
            {"user": {"itme": 1}, "items": [ITEM]},
            "reading 'user': got 'itme', expected some of age, flag, grid, half, history, item, pair, user; did you mean "
            "'item'?",
        ),
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


def test_the_number_of_keys_is_bounded() -> None:
    assert rows(10, user=USER, items=[ITEM, ITEM]).header.keys == 10
    with pytest.raises(hps.TooManyKeysError, match="got 10 keys, expected at most 9"):
        rows(9, user=USER, items=[ITEM, ITEM])


def test_answers_have_the_outputs_by_name() -> None:
    values = {"score": np.array([0.5, np.inf], np.float32), "pairs": np.ones((2, 2))}
    outputs = {"score": [0.5, None], "pairs": [[1, 1], [1, 1]]}
    assert orjson.loads(text_of(rows_text("m", "3", values))) == {"model": "m", "version": "3", "outputs": outputs}
    halves = {"score": np.array([0.5], np.float16), "flags": np.array([True, False])}
    assert orjson.loads(text_of(rows_text("m", "3", halves)))["outputs"] == {"score": [0.5], "flags": [True, False]}


# -- networks that were cut: free sizes, bags whose offsets are inputs, nested names ----------------------------------

CUT_USER: dict[str, Any] = {"user": {"x": 5}, "pair": [1, 2, 3, 4]}
CUT_ITEM: dict[str, Any] = {
    "hist": [1, 2],
    "mask": [[True, False], [False, False]],
    "batch": {"age": 0.1},
    "lS_i": [255, [-3, 4]],
}
FIRST = {**CUT_ITEM, "tags": [7, 8, 9], "weights": [0.5, 1, 2]}
SECOND = {**CUT_ITEM, "tags": [6], "weights": [3]}


def cut_rows(user: dict[str, Any], *items: dict[str, Any], network: PublishedNetwork = CUT_NETWORK) -> ScoreBody:
    return decode_rows(json.dumps({"user": user, "items": items}).encode(), network, 100)


def test_inputs_of_free_sizes_and_bags_become_arrays() -> None:
    found = cut_rows(CUT_USER, FIRST, SECOND)
    assert (found.header.samples, found.header.keys) == (2, 4 + 4)
    expected: dict[str, np.ndarray] = {
        "hist": np.array([[1, 2]] * 2),
        "mask": np.array([CUT_ITEM["mask"]] * 2),
        "batch.age": np.array([0.1, 0.1]),
        "lS_i.0": np.array([255, 255], np.uint8),
        "lS_i.1": np.array([[-3, 4]] * 2, np.int16),
        "user.x": np.array([5], np.int8),
        "tags": np.array([7, 8, 9, 6]),
        "weights": np.array([0.5, 1, 2, 3], np.float32),
        "ends": np.array([0, 3, 4]),
        "starts": np.array([0, 3], np.int32),
        "pair": np.array([1, 2, 3, 4], np.int32),
    }
    assert found.arrays.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found.arrays[name], array, name, strict=True)


def test_no_items_have_no_sizes_that_a_network_could_refuse() -> None:
    for user in (CUT_USER, {**CUT_USER, "pair": []}, {**CUT_USER, "hist": [1, 2, 3]}):
        found = cut_rows(user)
        assert (found.header.samples, found.arrays["tags"].size, found.arrays["ends"].tolist()) == (0, 0, [0])


def test_nested_and_flat_names_are_the_same() -> None:
    nested = {name: one for name, one in FIRST.items() if name not in ("batch", "lS_i")}
    flat = {**nested, "batch.age": 0.1, "lS_i.0": 255, "lS_i.1": [-3, 4]}
    halves = {**nested, "batch.age": 0.1, "lS_i": {"0": 255, "1": [-3, 4]}}
    expected = cut_rows(CUT_USER, FIRST, FIRST).arrays
    for user in (CUT_USER, {"user.x": 5, "pair": [1, 2, 3, 4]}):
        for item in (flat, halves):
            got = cut_rows(user, item, FIRST).arrays
            assert {name: one.tolist() for name, one in got.items()} == {name: one.tolist() for name, one in expected.items()}


def test_bags_of_the_user_count_for_all_samples_and_whole_ones_have_their_offsets() -> None:
    shared = {**CUT_USER, "tags": [7, 8], "weights": [1, 2]}
    found = cut_rows(shared, CUT_ITEM, CUT_ITEM).arrays
    assert (found["tags"].tolist(), found["ends"].tolist(), found["starts"].tolist()) == ([7, 8, 7, 8], [0, 2, 4], [0, 2])
    whole = {**CUT_USER, "tags": [7, 8, 9], "weights": [1, 2, 3], "ends": [0, 1, 3], "starts": [0, 1]}
    found = cut_rows(whole, CUT_ITEM, CUT_ITEM).arrays
    assert {name: found[name].tolist() for name in ("tags", "weights", "ends", "starts")} == {
        name: whole[name] for name in ("tags", "weights", "ends", "starts")
    }
    empty = {**CUT_ITEM, "tags": [], "weights": []}
    found = cut_rows(CUT_USER, empty, empty).arrays
    assert (found["tags"].shape, found["tags"].dtype, found["ends"].tolist()) == ((0,), np.int64, [0, 0, 0])


def test_a_cut_request_is_refused_by_its_place() -> None:
    long = {**CUT_ITEM, "tags": [1] * 5, "weights": [1] * 5}
    wrong: list[tuple[dict[str, Any], list[dict[str, Any]], str]] = [
        (CUT_USER, [FIRST, {**SECOND, "hist": [1, 2, 3]}], "reading 'hist': got lists of 2 and 3 values, expected lists"),
        (CUT_USER, [FIRST, {**SECOND, "hist": 1}], "reading 'hist': expected lists of shape [n] for each sample"),
        (CUT_USER, [FIRST, {**SECOND, "mask": [[True], [True]]}], "reading 'mask': expected lists of shape [n, 2]"),
        (CUT_USER, [{**FIRST, "mask": [[True, False]]}], "got input 'mask' of shape [1, 1, 2], expected [samples, n, 2]"),
        (CUT_USER, [FIRST, {**SECOND, "weights": [1, 2]}], "reading 'weights': got lists of other lengths than those of"),
        (CUT_USER, [FIRST, {**SECOND, "starts": 0}], "reading items: got 'starts'; expected none: its bags are lists"),
        ({**CUT_USER, "starts": [0, 1]}, [FIRST, SECOND], "reading items: got 'tags'; expected all of it in 'user'"),
        ({**CUT_USER, "tags": [1], "starts": [0, 1]}, [CUT_ITEM] * 2, "reading 'user': 'ends' is missing"),
        ({**CUT_USER, "pair": 5}, [FIRST, SECOND], "reading 'pair': got an integer (5), expected a list"),
        ({"user": {"x": 5}}, [{**FIRST, "pair": [1, 2]}], "reading items: got 'pair'; expected all of it in 'user'"),
        ({**CUT_USER, "pair": [1]}, [FIRST, SECOND], "got input 'pair' of shape [1], expected [2*samples] with 2*samples = 4"),
        (CUT_USER, [{**FIRST, "batch": {"age": 1, "old": 2}}], "reading items[0]: got 'batch.old', expected some of batch.age"),
        (CUT_USER, [FIRST, {**SECOND, "lS_i": [1, [2, 3], 4]}], "reading items[1]: got 'lS_i.2', expected some of"),
        (CUT_USER, [{**FIRST, "batch.age": 1}], "reading items[0]: 'batch.age' is given twice, expected it once"),
        (CUT_USER, [{**FIRST, "lS_i": 5}], "reading items[0]: got 'lS_i', expected some of"),
        (CUT_USER, [{**FIRST, "lS_i": [256, [1, 2]]}], "reading 'lS_i.0': a value does not fit UINT8"),
        (CUT_USER, [{**FIRST, "lS_i": [0, [1, -32769]]}], "reading 'lS_i.1': a value does not fit INT16"),
        ({**CUT_USER, "user": {"x": -129}}, [FIRST], "reading 'user.x': a value does not fit INT8"),
        (CUT_USER, [{**FIRST, "hist": [1], "mask": [[True] * 2]}, {**SECOND, "hist": [1], "mask": [[True] * 2]}],
         "input 'hist' of shape [2, 1]: the network needs n >= 2, got 1"),
        ({**CUT_USER, "pair": [1] * 6}, [FIRST] * 3, "3 samples: the network needs samples != 3, got 3"),
        (CUT_USER, [long] * 2, "input 'tags' of shape [10]: the network needs m <= 9, got 10"),
    ]  # fmt: skip
    for user, items, message in wrong:
        with pytest.raises(hps.InvalidInputError, match=re.escape(message)):
            cut_rows(user, *items)


def test_the_example_of_a_network_is_answered() -> None:
    for network in (
        CUT_NETWORK,
        NETWORK,
        cut(guards=["samples >= 2", "m % 4 == 0"]),
        cut(inputs={**CUT_INPUTS, "ends": {"dtype": "int64", "shape": ["2*samples + 1"], "offsets_of": "tags"}}),
    ):
        found = decode_rows(example_of(network.signature).encode(), network, 100)
        assert found.header.samples == network.signature.trial_samples()[0]
    assert '"user":{"user":0' in example_of(NETWORK.signature)
    wide = {f"input{number}": {} for number in range(300)}
    assert example_of(cut(inputs={**CUT_INPUTS, **wide}).signature) == ""
    assert example_of(cut(guards=["samples < 0"]).signature) == ""
