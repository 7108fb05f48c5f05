import json
import sys
from collections.abc import Iterator

import numpy as np
import orjson
import pytest

from hps.errors import InvalidDtypeError, InvalidInputError, TooManyKeysError, UnknownTableError
from hps.serve.protocol.json_lookup import decode_lookup
from hps.serve.protocol.json_size import json_pieces, parsed_bytes
from hps.serve.protocol.open_inference import parse_header_length
from hps.serve.protocol.request_checks import ModelTables
from hps.types import TableSpec
from tests.fakes.inferences import decode_request, read_answer
from tests.tables.batches import by_table

MODEL = ModelTables("ranker", (TableSpec("ranker", "user", 2, 0.0, 100), TableSpec("ranker", "item", 3, 0.5, 50)))
EXTREMES = [-(2**63), -1, 0, 2**63 - 1]


def encode(request, tensors=()):
    """The body of a request, and the length of its JSON part where binary tensors follow."""
    text = orjson.dumps(request)
    binary = b"".join(np.ascontiguousarray(tensor).tobytes() for tensor in tensors)
    return (text + binary, len(text)) if tensors else (text, None)


def decode(request, tensors=(), model=MODEL, max_keys=1000):
    return decode_request(*encode(request, tensors), model, max_keys)


def json_input(name, values, datatype="INT64", shape=None):
    return {"name": name, "datatype": datatype, "shape": shape or [len(values)], "data": values}


def binary_input(name, array, shape=None):
    datatype = {8: "INT64", 4: "INT32"}[array.dtype.itemsize]
    size = {"binary_data_size": array.nbytes}
    return {"name": name, "datatype": datatype, "shape": shape or list(array.shape), "parameters": size}


def named(*inputs, **more):
    return {"inputs": list(inputs), **more}


def user(**changes):
    """A request for a key of the table `user`, with changes to its input."""
    return named({**json_input("user", [1]), **changes})


def triton(keys, counts, **more):
    return named(json_input("KEYS", keys, shape=[1, len(keys)]), json_input("NUMKEYS", counts, "INT32"), **more)


def answer(inference):
    """What a lookup would write, 1000 times the table plus the key, then the parsed answer: JSON part and binary part."""
    for segment in by_table(inference.batch):
        segment.out[...] = (1000 * segment.table + segment.keys)[:, None]
        if segment.found is not None:
            segment.found[...] = segment.keys % 2 == 0
    return read_answer(inference)


def test_keys_and_numkeys_name_the_tables_in_order():
    inference = decode(triton([5, 6, 7], [1, 2], id="b1"))
    assert [(segment.table, segment.keys.tolist()) for segment in by_table(inference.batch)] == [(0, [5]), (1, [6, 7])]
    output = {"name": "OUTPUT0", "datatype": "FP32", "shape": [8], "data": [5, 5, *[1006] * 3, *[1007] * 3]}
    parameters = {"NumSample": 3, "DeviceID": 0}
    names = {"model_name": "ranker", "model_version": "1", "id": "b1"}
    assert answer(inference)[0] == {**names, "parameters": parameters, "outputs": [output]}
    keys = np.array([5, 6, 7])  # JSON and binary inputs may be mixed
    inference = decode(named(json_input("NUMKEYS", [2, 1], "INT32"), binary_input("KEYS", keys)), [keys])
    assert [segment.keys.tolist() for segment in by_table(inference.batch)] == [[5, 6], [7]]


def test_a_table_as_input_is_answered_with_its_shape_and_width():
    response, _ = answer(decode(named(json_input("item", [1, 2, 3, 4], shape=[2, 2]), json_input("user", [9]))))
    item = [1001] * 3 + [1002] * 3 + [1003] * 3 + [1004] * 3
    found = [(output["name"], output["shape"], output["data"]) for output in response["outputs"]]
    assert found == [("item", [2, 2, 3], item), ("user", [1, 2], [9, 9])]
    assert "parameters" not in response


def test_any_int64_is_a_key_in_json_and_in_binary():
    for keys, kind in ((EXTREMES, np.int64), ([], np.int64), ([-(2**31), 7], np.int32)):
        array = np.array(keys, kind)
        datatype = {np.int64: "INT64", np.int32: "INT32"}[kind]
        for one in (decode(named(json_input("user", keys, datatype))), decode(named(binary_input("user", array)), [array])):
            (segment,) = by_table(one.batch)
            assert (segment.keys.dtype, segment.keys.tolist(), segment.out.shape) == (np.int64, keys, (len(keys), 2))


@pytest.mark.parametrize("padding", range(9))
def test_binary_keys_are_aligned_writable_and_their_own_whatever_precedes_them(padding):
    keys, counts = np.array([EXTREMES]), np.array([[4, 0]], np.int32)
    request = {"id": "x" * padding, "inputs": [binary_input("KEYS", keys), binary_input("NUMKEYS", counts)]}
    found = by_table(decode(request, [keys, counts]).batch)[0].keys
    assert (found.flags.aligned, found.flags.c_contiguous, found.tolist()) == (True, True, EXTREMES)
    assert found.flags.owndata or found.base.flags.owndata


def test_binary_outputs_are_sent_from_the_memory_that_the_lookup_wrote():
    inference = decode(triton([5, 6], [1, 1], parameters={"binary_data_output": True, "found": True}))
    body, length = inference.binary_answer
    written = np.frombuffer(body, np.uint8)
    for segment in by_table(inference.batch):
        assert np.shares_memory(written, segment.out)
        assert np.shares_memory(written, segment.found)
    assert length % 16 == by_table(inference.batch)[0].out.ctypes.data % 16 == 0
    response, binary = answer(inference)
    assert [output["parameters"]["binary_data_size"] for output in response["outputs"]] == [20, 2]
    assert np.frombuffer(binary[:20], np.float32).tolist() == [5, 5, 1006, 1006, 1006]
    assert binary[20:] == b"\x00\x01"


def test_found_masks_are_answered_where_asked_after_the_vectors():
    response, _ = answer(decode(triton([2, 3, 5], [2, 1], parameters={"found": True})))
    assert response["outputs"][1] == {"name": "FOUND0", "datatype": "BOOL", "shape": [3], "data": [True, False, False]}
    response, _ = answer(decode(named(json_input("user", [1]), json_input("item", [4, 5]), parameters={"found": True})))
    assert [output["name"] for output in response["outputs"]] == ["user", "item", "user.found", "item.found"]
    assert [output["data"] for output in response["outputs"][2:]] == [[False], [True, False]]


def test_only_the_outputs_that_are_named_are_answered_each_as_it_says():
    outputs = [{"name": "item.found", "parameters": {"binary_data": True}}, {"name": "user"}]
    inputs = [json_input("user", [1]), json_input("item", [4, 5])]
    inference = decode(named(*inputs, outputs=outputs))
    assert [segment.found is None for segment in by_table(inference.batch)] == [True, False]
    response, binary = answer(inference)
    assert response["outputs"] == [
        {"name": "user", "datatype": "FP32", "shape": [1, 2], "data": [1, 1]},
        {"name": "item.found", "datatype": "BOOL", "shape": [2], "parameters": {"binary_data_size": 2}},
    ]
    assert binary == b"\x01\x00"
    outputs = [{"name": "user", "parameters": {"binary_data": False}}, {"name": "item"}]
    response, binary = answer(decode(named(*inputs, outputs=outputs, parameters={"binary_data_output": True})))
    assert response["outputs"][0]["data"] == [1, 1]
    assert np.frombuffer(binary, np.float32).tolist() == [1004] * 3 + [1005] * 3


def test_no_outputs_that_are_named_are_all_of_them():
    for outputs in ([], None):
        inference = decode(named(json_input("user", [1]), json_input("item", [2]), outputs=outputs))
        assert [one["name"] for one in answer(inference)[0]["outputs"]] == ["user", "item"]


def test_data_that_are_null_are_none():
    keys = np.array([7, 8])
    header = binary_input("user", keys)
    assert by_table(decode(named({**header, "data": None}), [keys]).batch)[0].keys.tolist() == [7, 8]
    with pytest.raises(InvalidInputError, match="both 'data' and 'binary_data_size'"):
        decode(named({**header, "data": []}), [keys])


def test_nan_and_infinity_are_null_in_json_and_whole_in_binary():
    strange = np.array([np.nan, np.inf], np.float32)
    for binary in (False, True):
        inference = decode(named(json_input("user", [1]), parameters={"binary_data_output": binary}))
        by_table(inference.batch)[0].out[...] = strange
        response, data = read_answer(inference)
        assert response["outputs"][0].get("data") == (None if binary else [None, None])
        assert data == (strange.tobytes() if binary else b"")


@pytest.mark.parametrize(
    ("request_", "error", "says"),
    [
        ([1], InvalidInputError, "got a list, expected a JSON object"),
        ({}, InvalidInputError, "'inputs' is missing or empty"),
        (named(3), InvalidInputError, r"inputs\[0\]"),
        (named({"name": 5}), InvalidInputError, r"inputs\[0\].*name"),
        (user(datatype="FP32"), InvalidDtypeError, "got datatype 'FP32', expected INT64"),
        (user(datatype=None), InvalidDtypeError, "got datatype null"),
        (user(shape=None), InvalidInputError, "got shape null"),
        (user(shape=[]), InvalidInputError, "got shape 0 dimensions"),
        (user(shape=[True]), InvalidInputError, "shape has a boolean"),
        (user(shape=[-1]), InvalidInputError, r"an integer \(-1\), expected .* at least 0"),
        (user(shape=[2]), InvalidInputError, r"got 1 values, expected 2 for shape \[2\]"),
        (user(data=None), InvalidInputError, "neither 'data' nor"),
        (user(data=[1.0]), InvalidDtypeError, r"got a float \(1.0\) at position 0, expected 64-bit integers"),
        (user(data=[1, True]), InvalidDtypeError, "got a boolean at position 1"),
        (user(data=[2**63]), InvalidDtypeError, f"got {2**63} at position 0"),
        (user(data=[2**31], datatype="INT32"), InvalidDtypeError, "does not fit INT32"),
        (user(data={"a": 1}), InvalidDtypeError, "got an object, expected a list"),
        (user(data=[[1], [2, 3]], shape=[2, 2]), InvalidInputError, "not nested as shape"),
        (named(json_input("user", [1]), json_input("user", [2])), InvalidInputError, "given twice"),
        (user(name="nope"), UnknownTableError, "got table 'nope', expected a table of .*: user, item"),
        (user(name="KEYS"), InvalidInputError, "got KEYS without NUMKEYS"),
        (user(name="NUMKEYS", datatype="INT32"), InvalidInputError, "got NUMKEYS without KEYS"),
        (named(*triton([1], [1, 0])["inputs"], json_input("user", [1])), InvalidInputError, "'user' beside KEYS"),
        (user(parameters=3), InvalidInputError, "'parameters' is an integer"),
        (user(parameters={"binary_data_size": 8}), InvalidInputError, "both 'data' and 'binary_data_size'"),
        (user(parameters={"shared_memory_region": "r"}), InvalidInputError, "shared memory is not supported"),
        (named(binary_input("user", np.array([1]))), InvalidInputError, "Inference-Header-Content-Length"),
        (triton([1], [1]), InvalidInputError, "got 1 numbers, expected 2, one for each table of model 'ranker': user, item"),
        (triton([1], [1, 1]), InvalidInputError, "its sum is 2, expected 1, the number of KEYS"),
        (triton([1], [2, -1]), InvalidInputError, "got -1, expected numbers of at least 0"),
        (triton([1] * 51, [0, 51]), TooManyKeysError, "'item' of model 'ranker': got 51 keys, expected at most 50"),
        (named(json_input("user", [1] * 101)), TooManyKeysError, "got 101 keys, expected at most 100"),
        (triton([1], [1, 0], id=5), InvalidInputError, r"'id' is an integer \(5\), expected a string"),
        (triton([1], [1, 0], parameters=[]), InvalidInputError, "'parameters' is a list"),
        (triton([1], [1, 0], parameters={"found": 1}), InvalidInputError, "'found' is an integer"),
        (triton([1], [1, 0], outputs={}), InvalidInputError, "'outputs' is not a list"),
        (triton([1], [1, 0], outputs=[{}]), InvalidInputError, r"outputs\[0\]: expected an object whose 'name'"),
        (triton([1], [1, 0], outputs=[{"name": "user"}]), InvalidInputError, "'user', which no input of this request answers"),
        (triton([1], [1, 0], outputs=[{"name": "OUTPUT0"}] * 2), InvalidInputError, "named twice"),
        (triton([1], [1, 0], outputs=[{"name": "a", "parameters": 1}]), InvalidInputError, "'parameters' is an integer"),
        (triton([1], [1, 0], outputs=[{"name": "a", "parameters": {"classification": 2}}]), InvalidInputError, "not supported"),
    ],
)
def test_a_wrong_request_is_an_error_that_says_where_and_what_is_expected(request_, error, says):
    with pytest.raises(error, match=says):
        decode(request_)


def test_binary_data_that_do_not_fit_are_an_error():
    for size, shape, data, says in (
        (8, [2], b"\0" * 8, "got binary_data_size 8, expected 16"),
        (16, [2], b"\0" * 8, "got 8 bytes of binary data, expected 16; the body is cut short"),
        (8, [1], b"\0" * 9, "got 9 bytes of binary data, expected 8; something follows"),
        (-8, [1], b"\0" * 8, "expected an integer of at least 0"),
        (True, [1], b"\0" * 8, "'binary_data_size' is a boolean"),
    ):
        tensor = {"name": "user", "datatype": "INT64", "shape": shape, "parameters": {"binary_data_size": size}}
        text = orjson.dumps(named(tensor))
        with pytest.raises(InvalidInputError, match=says):
            decode_request(text + data, len(text), MODEL, 1000)


def bfloat16_of(values):
    """The bits of the nearest bfloat16, ties to even, by exact arithmetic; any NaN for NaN."""
    bits = values.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def narrow_request(*datatypes, **parameters):
    """A request for `user` and `item`, two keys of each."""
    keys, names = [np.arange(2)] * 2, ("user", "item")
    outputs = [
        {"name": name, "parameters": {"binary_data": True} | ({"datatype": one} if one else {})}
        for name, one in zip(names, datatypes, strict=True)
    ]
    return decode(named(*map(binary_input, names, keys), outputs=outputs, parameters=parameters), keys)


@pytest.mark.parametrize("datatypes", [("FP16", "FP32"), ("FP32", "BF16"), ("BF16", "FP16"), ("FP16", None)])
def test_outputs_differ_in_datatype(datatypes):
    """Each has its own, or that of the request."""
    vectors = np.float32([[1, 1.1], [3e38, np.inf]]), np.float32([[5, -0.0, 7], [8, -1e-40, 65519]])
    with np.errstate(over="ignore"):
        forms = {"FP16": lambda one: one.astype(np.float16), "BF16": bfloat16_of, "FP32": lambda one: one}
        expected = [forms[datatype or "BF16"](one).tobytes() for datatype, one in zip(datatypes, vectors, strict=True)]
    inference = narrow_request(*datatypes, datatype="BF16")
    for segment, one in zip(by_table(inference.batch), vectors, strict=True):
        segment.out[...] = one
    text, data = read_answer(inference)
    found = [(output["datatype"], output["parameters"]["binary_data_size"]) for output in text["outputs"]]
    assert found == [(datatype or "BF16", len(one)) for datatype, one in zip(datatypes, expected, strict=True)]
    assert data == b"".join(expected)


def test_a_wrong_datatype_of_an_output_is_an_error():
    for output, wanted, says in (
        ("user", "INT8", r"outputs\[0\]: got datatype 'INT8', expected FP32, FP16, BF16"),
        ("user", 16, r"outputs\[0\]: got datatype an integer"),
        (None, "fp16", "'parameters': got datatype 'fp16', expected FP32, FP16, BF16"),
        (None, ["FP16"], "'parameters': got datatype a list"),
        (None, "BF16", "got datatype 'BF16' for 'user' as JSON, expected binary data, or FP16 or FP32"),
        ("user", "BF16", "'BF16' for 'user' as JSON"),
        ("user.found", "FP16", "found-mask 'user.found', expected none: it is BOOL"),
    ):
        more = {"parameters": {"datatype": wanted}}
        with pytest.raises(InvalidDtypeError, match=says):
            decode(named(json_input("user", [1]), **({"outputs": [{"name": output, **more}]} if output else more)))


def test_a_head_that_was_seen_before_is_answered_for_its_own_keys_and_model():
    other = ModelTables("other", (TableSpec("other", "item", 1, 0.0, 100), TableSpec("other", "user", 5, 0.0, 100)))
    for keys in (np.array([1, 2]), np.array([-7, 9])):
        for model, table in ((MODEL, 0), (other, 1)):
            inference = decode(named(binary_input("user", keys)), [keys], model)
            assert [(one.keys.tolist(), one.table) for one in by_table(inference.batch)] == [(keys.tolist(), table)]
            assert answer(inference)[0]["model_name"] == model.name


LARGEST_ID = 2**31 - 1


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("request_id", [None, 'x","DeviceID":2147483647,"', "0123456789"])
def test_the_answer_to_keys_and_numkeys_says_how_many_samples_and_which_device(binary, request_id):
    keys, counts = np.array([[1, 2, 3, 4, 5, 6, 7]]), np.array([[3, 4]], np.int32)
    model = ModelTables("ranker", MODEL.tables, "12", keys_per_sample=3)
    request = named(binary_input("KEYS", keys), binary_input("NUMKEYS", counts), parameters={"binary_data_output": binary})
    request |= {} if request_id is None else {"id": request_id}
    lengths = set()
    for device in (0, 7, LARGEST_ID, 0):  # of one layout, which is cached
        inference = decode(request, [keys, counts], model)
        assert (inference.device_id, by_table(inference.batch)[0].out.ctypes.data % 4) == (None, 0)
        inference.device_id = device
        response, data = answer(inference)
        said = [response.get(name) for name in ("id", "model_name", "model_version", "parameters")]
        assert said == [request_id, "ranker", "12", {"NumSample": 2, "DeviceID": device}]  # 7 keys, 3 a sample
        if binary:
            np.testing.assert_array_equal(np.frombuffer(data, np.float32)[6:], np.repeat(1000.0 + keys[0, 3:], 3))
            lengths.add(inference.binary_answer[1])
    assert len(lengths) == binary


def test_a_request_may_name_its_device():
    numbers = {"3": 3, "03": 3} | {one: one for one in (0, 3, LARGEST_ID, None, -1, 2**63)}
    for value, device in numbers.items():
        assert decode(user() | {"parameters": {"DeviceID": value}}).device_id == device
        assert decode_lookup(orjson.dumps({"tables": {"user": [2]}, "device": value}), MODEL, 1000).device_id == device


def test_a_device_is_an_integer_or_decimal_digits():
    for value in (True, 1.0, "", "-1", "1.0", " 1", "²", "1" * 11, [], {}):
        with pytest.raises(InvalidInputError, match=r"reading 'parameters': 'DeviceID' is .*, expected the id of a device"):
            decode(user() | {"parameters": {"DeviceID": value}})
        with pytest.raises(InvalidInputError, match=r"reading the request: 'device' is .*, expected the id of a device"):
            decode_lookup(orjson.dumps({"tables": {"user": [2]}, "device": value}), MODEL, 1000)


def test_keys_of_all_tables_together_are_limited():
    with pytest.raises(TooManyKeysError, match=r"got 7 keys, expected at most 6 \(service.max_keys_per_request\)"):
        decode(triton([1] * 7, [3, 4]), max_keys=6)
    assert len(by_table(decode(triton([1] * 6, [3, 3]), max_keys=6).batch)) == 2


def test_what_is_not_json_is_an_error():
    for text in (b"", b"{", b"\xff\xfe", b"[" * 2000, b'{"inputs": NaN}'):
        with pytest.raises(InvalidInputError, match="not JSON"):
            decode_request(text, None, MODEL, 1000)


def test_a_header_length_is_missing_or_a_number_within_the_body():
    for value in (b"", b"-1", b"+1", b"1_0", b" 1", b"x", b"11", b"9" * 30, "²".encode()):
        with pytest.raises(InvalidInputError, match="Inference-Header-Content-Length"):
            parse_header_length(value, 10)
    assert (parse_header_length(b"10", 10), parse_header_length(None, 10)) == (10, None)


def test_curl_lookup_answers_vectors_by_table_and_masks_where_asked():
    lookup = decode_lookup(b'{"tables": {"item": [2, 3], "user": []}, "found": true}', MODEL, 1000)
    for segment in by_table(lookup.batch):
        segment.out[...] = segment.keys[:, None]
        segment.found[...] = segment.keys == 2
    assert json.loads(b"".join(lookup.encode()[0])) == {
        "tables": {"item": [[2, 2, 2], [3, 3, 3]], "user": []},
        "found": {"item": [True, False], "user": []},
    }
    lookup = decode_lookup(b'{"tables": {"user": [2]}}', MODEL, 1000)
    by_table(lookup.batch)[0].out[...] = [[np.nan, 0.1]]
    assert list(lookup.encode()[0]) == [b'{"tables":{"user":[[null,0.1]]}}']


def test_json_in_pieces_is_the_json_of_the_whole():
    for shape in ((70_000,), (20_000, 3), (1, 100_000), (3, 0), (0, 3)):
        array = np.random.default_rng(1).random(shape, np.float32)
        tables = {"tables": {"a:b": array, 'c"': array > 0.5}}
        document = {**tables, "outputs": [{"data": array}, {"data": []}], "none": {}, "id": "x"}
        assert b"".join(json_pieces(document)) == orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)
        assert all(len(piece) < 2_000_000 for piece in json_pieces(document))


def test_the_size_of_parsed_json_is_bounded_by_its_marks():
    assert parsed_bytes(b'{"a": [1, 2, {}]}', 1) == 64 * (1 + 1 + 3 + 2) + 6 * 17
    keys = b"[%s1]" % (b"1," * 300_000)
    assert parsed_bytes(keys, 100_000) > 64 * 300_000
    with pytest.raises(TooManyKeysError, match=r"got JSON with 300002 commas, .* expected at most 295534 for 76666 keys"):
        parsed_bytes(keys, 76_666)


@pytest.fixture
def recursion_limit() -> Iterator[None]:
    """That of an interpreter which has just begun: torch's compilers raise it for the whole process."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)
    yield
    sys.setrecursionlimit(limit)


@pytest.mark.usefixtures("recursion_limit")
@pytest.mark.parametrize(
    ("body", "error", "says"),
    [
        (b"", InvalidInputError, "not JSON"),
        (b"[]", InvalidInputError, "got a list, expected a JSON object"),
        (b"{}", InvalidInputError, r"'tables' is null, expected \{\"tables\""),
        (b'{"tables": {}}', InvalidInputError, "an object without tables"),
        (b'{"table": {"item": [1]}}', InvalidInputError, "got the member 'table'"),
        (b'{"tables": {"item": [1]}, "found": 1}', InvalidInputError, "'found' is an integer"),
        (b'{"tables": {"items": [1]}}', UnknownTableError, "got table 'items', expected a table of .*: user, item"),
        (b'{"tables": {"item": 1}}', InvalidDtypeError, "table 'item': got an integer .1., expected a list"),
        (b'{"tables": {"item": [1.5]}}', InvalidDtypeError, "got a float .1.5. at position 0"),
        (b'{"tables": {"item": [1, 18446744073709551616]}}', InvalidDtypeError, "got a float .* at position 1"),
        (b'{"tables": {"item": [9223372036854775808]}}', InvalidDtypeError, "got 9223372036854775808 at position 0"),
        (b'{"tables": {"item": [1], "item": [2]}}', InvalidInputError, "'item' is given twice"),
        (b'{"tables": {"item": [1]}, "tables": {"item": [2]}}', InvalidInputError, "'tables' is given twice"),
        (b'{"tables": {"item": [1], "\\u0069tem": [2]}}', InvalidInputError, "'item' is given twice"),
        (b'{"tables": {"a:b": [1]}}', UnknownTableError, "got table 'a:b'"),
        (b'{"tables": {"item": %s":", 1%s}}' % (b"[" * 1000, b"]" * 1000), InvalidInputError, "nested too deeply"),
        (b'{"tables": {"item": [%s1]}}' % (b"1," * 50), TooManyKeysError, "got 51 keys, expected at most 50"),
        (
            b'{"tables": {"item": [%s], "user": [%s]}}' % ((b"1" + 40 * b",1",) * 2),
            TooManyKeysError,
            "got 82 keys, .* most 81",
        ),
    ],
)
def test_a_wrong_curl_lookup_is_an_error_that_says_what_is_expected(body, error, says):
    with pytest.raises(error, match=says):
        decode_lookup(body, MODEL, 81)
