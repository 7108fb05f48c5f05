"""Requests with keys in bags: what of them is looked up, where its vectors go, and what is refused."""

import itertools
import json

import numpy as np
import orjson
import pytest

from hps.errors import InvalidDtypeError, InvalidInputError, TooManyKeysError, UnknownTableError
from hps.serve.protocol.json_lookup import decode_lookup
from hps.serve.protocol.request_checks import ModelTables
from hps.tensors.bags import Combiner
from hps.types import TableSpec
from tests.fakes.inferences import decode_request, read_answer
from tests.servers.binary_tensors import with_tensors
from tests.tables.batches import by_table

MODEL = ModelTables("ranker", (TableSpec("ranker", "user", 2, 0.0, 100), TableSpec("ranker", "item", 3, 0.5, 50)))
ONE = ModelTables("one", (TableSpec("one", "item", 3, 0.5, 50),))
FP32 = np.float32


def decode(tensors, model=MODEL, max_keys=1000, shapes=None, as_json=False, **parameters):
    """Tensors by name, as binary data or as JSON."""
    arrays = {name: np.asarray(values) for name, values in tensors.items()}
    more = {"binary_data_output": not as_json, **parameters}
    return decode_request(*with_tensors(arrays, binary=not as_json, shapes=shapes, parameters=more), model, max_keys)


def bags_of(segment):
    """Bags as lists of keys, and of weights."""
    pooling = segment.pooling
    assert segment.out.shape[0] == pooling.count
    offsets = pooling.hotness * np.arange(pooling.count + 1) if pooling.offsets is None else pooling.offsets
    pieces = [slice(*pair) for pair in itertools.pairwise(offsets[: pooling.count + 1])]
    weights = None if pooling.weights is None else [pooling.weights[piece].tolist() for piece in pieces]
    return [segment.keys[piece].tolist() for piece in pieces], weights


def answered(inference):
    """What comes out when bag b of table t is answered with 1000 t + b and the column after the point."""
    for segment in by_table(inference.batch):
        count, dim = segment.out.shape
        segment.out[...] = 1000 * segment.table + np.arange(count)[:, None] + np.arange(dim) / 8
    answer, data = read_answer(inference)
    arrays = []
    for one in answer["outputs"]:
        size = one.get("parameters", {}).get("binary_data_size", 0)
        arrays.append(np.reshape(one["data"] if "data" in one else np.frombuffer(data[:size], FP32), one["shape"]))
        data = data[size:]
    assert data == b""
    return answer, arrays


CONCATENATED = {"KEYS": [1, 2, 3, 4, 5], "OFFSETS": [[0, 2, 2, 3], [0, 0, 0, 2]]}
NUMKEYS = {"NUMKEYS": np.array([3, 2], np.int32)}


@pytest.mark.parametrize(
    ("as_json", "numkeys", "shape", "kind"),
    [
        (True, {}, [8], np.int64),
        (False, NUMKEYS, [1, 8], np.int64),
        (False, {}, [2, 4], np.int32),
        (True, NUMKEYS, [2, 4], "i4"),
    ],
)
def test_offsets_beside_keys_are_those_of_each_table_in_turn(as_json, numkeys, shape, kind):
    weights = np.array([0.5, 1, 2, -1, 0], FP32)
    tensors = {**numkeys, "KEYS": CONCATENATED["KEYS"], "OFFSETS": np.array(CONCATENATED["OFFSETS"], kind), "WEIGHTS": weights}
    inference = decode(tensors, shapes={"OFFSETS": shape}, as_json=as_json)
    assert [segment.table for segment in by_table(inference.batch)] == [0, 1]
    assert bags_of(by_table(inference.batch)[0]) == ([[1, 2], [], [3]], [[0.5, 1], [], [2]])
    assert bags_of(by_table(inference.batch)[1]) == ([[], [], [4, 5]], [[], [], [-1, 0]])
    answer, (vectors,) = answered(inference)
    assert answer["parameters"] == {"NumSample": 3, "DeviceID": 0}
    assert answer["outputs"][0]["name"] == "OUTPUT0"
    bags = np.arange(3.0)[:, None]
    np.testing.assert_array_equal(vectors, np.hstack([bags + np.arange(2) / 8, 1000 + bags + np.arange(3) / 8]))


@pytest.mark.parametrize("as_json", [True, False])
def test_a_table_has_offsets_and_weights_of_its_own_and_its_own_number_of_bags(as_json):
    item = {"item": [4, 5, 6], "item.offsets": np.array([0, 1, 3], np.int32), "item.weights": np.array([1, 2, 3], FP32)}
    inference = decode({"user.offsets": [0, 1], **item, "user": [9]}, as_json=as_json)
    found = {segment.table: bags_of(segment) for segment in by_table(inference.batch)}
    assert found == {0: ([[9]], None), 1: ([[4], [5, 6]], [[1], [2, 3]])}
    answer, arrays = answered(inference)
    assert [(one["name"], one["shape"]) for one in answer["outputs"]] == [("item", [2, 3]), ("user", [1, 2])]
    np.testing.assert_array_equal(arrays[0], [[1000, 1000.125, 1000.25], [1001, 1001.125, 1001.25]])
    assert "parameters" not in answer


@pytest.mark.parametrize(
    ("tensors", "model", "bags"),
    [
        ({"item": [[1, 2], [3, 4], [5, 6]]}, MODEL, {1: [[1, 2], [3, 4], [5, 6]]}),
        ({"KEYS": [[1, 2], [3, 4]]}, ONE, {0: [[1, 2], [3, 4]]}),
        ({"KEYS": [[1, 2]], "NUMKEYS": np.array([[2]], np.int32)}, ONE, {0: [[1, 2]]}),
        ({"KEYS": [[[1, 2], [3, 4]], [[5, 6], [7, 8]]]}, MODEL, {0: [[1, 2], [3, 4]], 1: [[5, 6], [7, 8]]}),
        ({"item": np.empty((3, 0), np.int64)}, MODEL, {1: [[], [], []]}),
        ({"item": np.empty((0, 3), np.int64)}, MODEL, {1: []}),
    ],
)
def test_a_combiner_makes_bags_of_rows_of_keys(tensors, model, bags):
    inference = decode(tensors, model, combiner="mean")
    assert {segment.table: bags_of(segment)[0] for segment in by_table(inference.batch)} == bags
    assert {segment.pooling.combiner for segment in by_table(inference.batch)} == {Combiner.MEAN}
    _, arrays = answered(inference)
    assert arrays[0].shape == (len(bags[min(bags)]), sum(model.tables[table].dim for table in bags))


def test_parameters_are_for_all_tables_or_for_one():
    parameters = {"combiner": "sqrtn", "item.combiner": "sum", "item.max_norm": 1, "padding_key": -1, "user.padding_key": None}
    user, item = by_table(decode({"user": [[1]], "item": [[1]]}, **parameters).batch)
    assert (user.pooling.combiner, user.pooling.max_norm, user.pooling.padding_key) == (Combiner.SQRTN, 0.0, None)
    assert (item.pooling.combiner, item.pooling.max_norm, item.pooling.padding_key) == (Combiner.SUM, 1.0, -1)
    assert by_table(decode(CONCATENATED).batch)[0].pooling.combiner == Combiner.SUM


@pytest.mark.parametrize("keys", ["item", "KEYS"])
def test_a_table_may_be_called_as_offsets_or_weights_are(keys):
    for name in ("item.offsets", "item.weights", "OFFSETS", "WEIGHTS"):
        model = ModelTables("m", (TableSpec("m", keys, 2, 0.0, 100), TableSpec("m", name, 2, 0.0, 100)))
        segments = by_table(decode({keys: [1, 2], name: [3]}, model).batch)
        assert [(segment.keys.tolist(), segment.pooling) for segment in segments] == [([1, 2], None), ([3], None)]
        with pytest.raises(InvalidDtypeError, match="expected INT64"):
            decode({keys: [1, 2], name: np.array([3], FP32)}, model)


def test_what_a_lookup_of_bags_takes_is_counted():
    curl = decode_lookup(b'{"bags": {"item": [[1, 2], [3, 4]]}}', MODEL, 1000)
    assert curl.held_bytes == 5 * 2 * 3 * 4 + 4 * 3 * 4
    (plain,) = by_table(decode({"item": [[1, 2], [3, 4]]}).batch)
    assert (plain.pooling, plain.out.shape) == (None, (4, 3)), "without a combiner rows of keys get a vector each"


def test_a_head_that_was_seen_before_is_answered_for_its_own_bags():
    for offsets in ([0, 1, 4], [0, 4, 4]):
        (segment,) = by_table(decode({"KEYS": [1, 2, 3, 4], "OFFSETS": offsets}, ONE).batch)
        assert segment.pooling.offsets.tolist() == offsets


KEYS, PAIRS = {"KEYS": [1, 2]}, {"KEYS": [1, 2], "OFFSETS": [0, 1, 0, 1]}
NUM = lambda *counts: {"NUMKEYS": np.array(counts, np.int32)}  # noqa: E731
OF_ITEM = {"item": [1, 2], "item.offsets": [0, 2]}
FLOATS = np.array([1, 2], FP32)


@pytest.mark.parametrize(
    ("tensors", "parameters", "error", "says"),
    [
        ({**KEYS, "OFFSETS": [0, 1, 2]}, {}, InvalidInputError, r"'OFFSETS': got shape \[3\], expected \[2 x \(B \+ 1\)\]"),
        ({**KEYS, "OFFSETS": np.zeros(0, np.int64)}, {}, InvalidInputError, r"'OFFSETS': got shape \[0\]"),
        ({**KEYS, "OFFSETS": [0, 1, 0, 2]}, {}, InvalidInputError, "the sum of the last one of each table is 3, expected 2"),
        ({**KEYS, "OFFSETS": [0, -1, 0, 3]}, {}, InvalidInputError, "'OFFSETS': got -1"),
        ({**KEYS, "OFFSETS": [1, 1, 0, 1]}, {}, InvalidInputError, "table 'user': got offsets .* begin with 0"),
        ({**KEYS, "OFFSETS": [0, 2, 1, 0, 1, 1]}, {}, InvalidInputError, "table 'user': got offsets .* never to fall"),
        ({**KEYS, "OFFSETS": [0, 2**62, 0, 2**62]}, {}, InvalidInputError, "expected 2, the number of KEYS"),
        ({**PAIRS, **NUM(0, 2)}, {}, InvalidInputError, "table 'user': got offsets .* for 0 keys"),
        ({**KEYS, "OFFSETS": np.zeros(4, FP32)}, {}, InvalidDtypeError, "'OFFSETS': got datatype 'FP32', expected INT64"),
        ({"KEYS": [[1], [2]], "OFFSETS": [0, 1, 0, 1]}, {}, InvalidInputError, r"'KEYS': got shape \[2, 1\] with offsets"),
        ({**PAIRS, "user": [1]}, {}, InvalidInputError, "got 'user' beside KEYS"),
        ({**PAIRS, "WEIGHTS": FLOATS[:1]}, {}, InvalidInputError, "got 1 weights, expected 2"),
        ({**PAIRS, "WEIGHTS": [1, 2]}, {}, InvalidDtypeError, "'WEIGHTS': got integers"),
        ({**KEYS, "WEIGHTS": FLOATS}, {}, InvalidInputError, "'KEYS': got neither 'OFFSETS' nor a combiner"),
        ({"OFFSETS": [0, 1, 0, 1]}, {}, InvalidInputError, "got 'OFFSETS' without 'KEYS'"),
        (PAIRS, {"found": True}, InvalidInputError, "got 'found' for keys in bags"),
        (KEYS, {"combiner": "sum"}, InvalidInputError, r"'KEYS': got shape \[2\] without offsets, expected \[2, B, hotness\]"),
        (
            {"KEYS": [[[1]], [[2]]], **NUM(2, 0)},
            {"combiner": "sum"},
            InvalidInputError,
            r"got \[2, 0\], expected 1 of each",
        ),
        ({**OF_ITEM, "item.offsets": [0, 3]}, {}, InvalidInputError, "table 'item': got offsets .* to end with 2"),
        ({**OF_ITEM, "item.offsets": np.zeros(0, np.int64)}, {}, InvalidInputError, "'item.offsets': got no offsets"),
        ({**OF_ITEM, "item.offsets": [[0], [2]]}, {}, InvalidInputError, r"'item.offsets': got shape \[2, 1\]"),
        ({**OF_ITEM, "item": [[1], [2]]}, {}, InvalidInputError, r"'item': got shape \[2, 1\] with offsets"),
        ({**OF_ITEM, "user": [[1]]}, {}, InvalidInputError, "'user': got neither 'user.offsets' nor a combiner"),
        ({**OF_ITEM, "user.offsets": [0]}, {}, InvalidInputError, "got 'user.offsets' without 'user'"),
        ({**OF_ITEM, "nope.offsets": [0]}, {}, UnknownTableError, "got table 'nope.offsets'"),
        ({**OF_ITEM, "item.weights": np.ones(3, FP32)}, {}, InvalidInputError, "'item.weights': got 3 weights, expected 2"),
        ({**OF_ITEM, "item.weights": [1, 2]}, {}, InvalidDtypeError, "'item.weights': got integers, expected datatype FP32"),
        ({"item": [1, 2]}, {"combiner": "sum"}, InvalidInputError, r"'item': got shape \[2\] without offsets, expected \[B"),
        ({"item": [[1, 2]]}, {"max_norm": 1.0}, InvalidInputError, "'item': got neither 'item.offsets' nor a combiner"),
        (OF_ITEM, {"combiner": "min"}, InvalidInputError, "table 'item': got combiner 'min', expected one of"),
        (OF_ITEM, {"combiner": 1}, InvalidInputError, r"'combiner' is an integer \(1\), expected a string"),
        (OF_ITEM, {"item.max_norm": True}, InvalidInputError, "'item.max_norm' is a boolean, expected a number"),
        (OF_ITEM, {"max_norm": 0}, InvalidInputError, "got max_norm 0, expected a number above 0"),
        (OF_ITEM, {"padding_key": 2**63}, InvalidInputError, "expected a 64-bit integer"),
        (OF_ITEM, {"itme.combiner": "sum"}, UnknownTableError, "reading 'parameters': got table 'itme'"),
        ({"item": [0] * 51, "item.offsets": [0, 51]}, {}, TooManyKeysError, "got 51 keys, expected at most 50"),
        ({"item": [], "item.offsets": [0] * 52}, {}, TooManyKeysError, "got 51 bags, expected at most 50"),
        ({"KEYS": [], "OFFSETS": np.zeros((2, 1002), np.int64)}, {}, TooManyKeysError, "got 1001 bags, expected at most 100"),
    ],
)
def test_wrong_bags_are_an_error_that_says_where_and_what_is_expected(tensors, parameters, error, says):
    tensors = {name: np.array(one, np.int64) if type(one) is list else one for name, one in tensors.items()}
    for as_json in (True, False):
        with pytest.raises(error, match=says):
            decode(tensors, as_json=as_json, **parameters)


def test_bags_are_limited_without_keys_and_in_all_tables_together():
    for shape, says in (([2**63, 0], f"got {2**63} bags"), ([51, 0], "got 51 bags, expected at most 50")):
        with pytest.raises(TooManyKeysError, match=says):
            decode({"item": np.empty(0, np.int64)}, shapes={"item": shape}, combiner="sum")
        assert by_table(decode({"item": np.empty(0, np.int64)}, shapes={"item": shape[::-1]}, combiner="sum").batch)[0].n == 0
    with pytest.raises(TooManyKeysError, match=r"got 8 bags, expected at most 7 \(service.max_keys_per_request\)"):
        decode({"KEYS": [1, 2], "OFFSETS": [[0, 0, 0, 0, 1]] * 2}, max_keys=7)


def test_json_weights_are_numbers_that_fit():
    for values in (["1"], [None], [True], [1e39], 5):
        inputs = [{"name": "KEYS", "datatype": "INT64", "shape": [1, 1], "data": [1]}]
        inputs.append({"name": "WEIGHTS", "datatype": "FP32", "shape": [1], "data": values})
        with pytest.raises((InvalidDtypeError, InvalidInputError), match=r"'WEIGHTS': got .* (expected .*numbers|not fit)"):
            decode_request(orjson.dumps({"inputs": inputs, "parameters": {"combiner": "sum"}}), None, ONE, 100)


def curl(value, max_keys=81):
    return decode_lookup(orjson.dumps(value), MODEL, max_keys)


def test_curl_sends_lists_of_keys_and_gets_a_vector_for_each():
    weights = {"item": [[0.5, 2], [], [1]]}
    lookup = curl({"bags": {"item": [[1, 2], [], [3]], "user": []}, "weights": weights, "combiner": {"item": "mean"}})
    item, user = by_table(lookup.batch)
    assert bags_of(item) == ([[1, 2], [], [3]], weights["item"])
    assert bags_of(user) == ([], None)
    assert (item.pooling.combiner, user.pooling.combiner) == (Combiner.MEAN, Combiner.SUM)
    item.out[...] = [[1, 2, 3], [0, 0, 0], [4, 5, 6]]
    assert json.loads(b"".join(lookup.encode()[0])) == {"tables": {"item": item.out.tolist(), "user": []}}


@pytest.mark.parametrize(
    ("request_", "error", "says"),
    [
        ({"bags": {}}, InvalidInputError, "'bags' is an object without bags, expected"),
        ({"bags": [[1]]}, InvalidInputError, "'bags' is a list"),
        ({"bags": {"item": [1, 2]}}, InvalidDtypeError, "table 'item': got a list of other things, expected a list of lists"),
        ({"bags": {"item": [[1.5]]}}, InvalidDtypeError, "got a float .1.5. at position 0"),
        ({"bags": {"item": [[1]]}, "tables": {"user": [1]}}, InvalidInputError, "got the member 'tables' beside 'bags'"),
        ({"bags": {"item": [[1]]}, "found": True}, InvalidInputError, "got the member 'found' beside 'bags'"),
        ({"tables": {"item": [1]}, "combiner": "sum"}, InvalidInputError, "got the member 'combiner'"),
        ({"bags": {"nope": [[1]]}}, UnknownTableError, "got table 'nope'"),
        ({"bags": {"item": [[1]]}, "combiner": "min"}, InvalidInputError, "got combiner 'min'"),
        ({"bags": {"item": [[1]]}, "combiner": {"user": "sum"}}, InvalidInputError, "'combiner': got table 'user'"),
        ({"bags": {"item": [[1]]}, "max_norm": {"item": "1"}}, InvalidInputError, "'max_norm' is a string"),
        ({"bags": {"item": [[1]]}, "padding_key": [1]}, InvalidInputError, "'padding_key' is a list"),
        ({"bags": {"item": [[1]]}, "weights": []}, InvalidInputError, "'weights' is a list"),
        ({"bags": {"item": [[1]]}, "weights": {"user": [[1]]}}, InvalidInputError, "'weights': got table 'user'"),
        ({"bags": {"item": [[1]]}, "weights": {"item": [1]}}, InvalidDtypeError, "weights of table 'item': got a list of o"),
        ({"bags": {"item": [[1]]}, "weights": {"item": [["1"]]}}, InvalidDtypeError, "got a string at position 0"),
        ({"bags": {"item": [[1], []]}, "weights": {"item": [[], [1]]}}, InvalidInputError, "got other lists than the bags"),
        ({"bags": {"item": [[1] * 51]}}, TooManyKeysError, "got 51 keys, expected at most 50"),
        ({"bags": {"item": [[]] * 51}}, TooManyKeysError, "got 51 bags, expected at most 50"),
        ({"bags": {"item": [[]] * 50, "user": [[]] * 50}}, TooManyKeysError, "got 100 bags, expected at most 81"),
    ],
)
def test_wrong_bags_by_curl_are_an_error_that_says_what_is_expected(request_, error, says):
    with pytest.raises(error, match=says):
        curl(request_)
