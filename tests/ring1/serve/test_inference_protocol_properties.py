"""Whatever the bytes, a codec makes of them a request that fits them or a typed error, and allocates no more than they hold."""

import tracemalloc

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hps.errors import HPSError
from hps.serve.protocol.json_lookup import decode_lookup
from hps.serve.protocol.request_checks import ModelTables
from hps.types import TableSpec
from tests.fakes.inferences import decode_request, read_answer
from tests.servers.binary_tensors import with_tensors
from tests.tables.batches import by_table

MAX_KEYS = 64
MODEL = ModelTables("m", (TableSpec("m", "user", 2, 0.0, 40), TableSpec("m", "item", 5, 0.5, 40)))

integers = st.one_of(st.integers(-(2**63), 2**64 - 1), st.sampled_from([0, 1, 2, 8, 2**60, 2**63, 2**64 - 1]))
scalars = st.one_of(st.none(), st.booleans(), integers, st.floats(allow_nan=False, allow_infinity=False), st.text(max_size=5))
anything = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4), max_leaves=12
)


def places(node, place=()):
    """Where the parts of a document are."""
    yield place
    for key, value in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        yield from places(value, (*place, key))


def spoilt(draw, document):
    """The document with up to three of its parts replaced by anything."""
    for _ in range(draw(st.integers(0, 3))):
        *outer, last = ("document", *draw(st.sampled_from([*places(document)])))
        whole = node = {"document": document}
        for key in outer:
            node = node[key]
        node[last] = draw(anything)
        document = whole["document"]
    return document


INT64 = st.integers(-(2**63), 2**63 - 1)


def decode(body, length):
    try:
        return decode_request(body, length, MODEL, MAX_KEYS)
    except HPSError:
        return None


def check(inference):
    """Write an answer and read it back: every output has the bytes that its shape says."""
    assert sum(segment.keys.size for segment in by_table(inference.batch)) <= MAX_KEYS
    for segment in by_table(inference.batch):
        assert segment.keys.dtype == np.int64
        rows = segment.keys.size if segment.pooling is None else segment.pooling.count
        assert segment.out.shape == (rows, MODEL.tables[segment.table].dim)
        segment.out[...] = 1.5
        if segment.found is not None:
            segment.found[...] = True
    response, rest = read_answer(inference)
    for output in response["outputs"]:
        elements = int(np.prod(output["shape"], dtype=object))
        one, dtype = (1.5, np.float32) if output["datatype"] == "FP32" else (True, np.bool_)
        if "data" in output:
            assert output["data"] == [one] * elements
        else:
            size = output["parameters"]["binary_data_size"]
            assert np.frombuffer(rest[:size], dtype).tolist() == [one] * elements
            rest = rest[size:]
    assert rest == b""


@given(st.binary(max_size=200), st.one_of(st.none(), st.integers(0, 200)))
def test_random_bytes_are_a_typed_error(body, length):
    assert decode(body, None if length is None else min(length, len(body))) is None


OPTIONS = {
    "combiner": st.sampled_from(["sum", "mean", "sqrtn", "max"]),
    "user.max_norm": st.floats(0, 2),
    "DeviceID": st.integers(0, 3),
}
OUTPUTS = st.lists(st.sampled_from(["user", "item", "OUTPUT0", "FOUND0", "user.found", "item.found"]), max_size=3)


@settings(max_examples=150)
@given(st.deferred(lambda: valid_requests()), st.fixed_dictionaries({}, optional=OPTIONS), st.none() | OUTPUTS, st.data())
def test_requests_that_are_nearly_right_are_answered_or_a_typed_error(request, options, names, data):
    body, length, _, _ = request
    document = orjson.loads(body[:length])
    document["parameters"] |= options
    if names is not None:
        document["outputs"] = [{"name": name, "parameters": {"binary_data": True}} for name in names]
    text = orjson.dumps(spoilt(data.draw, document))
    binary = b"" if length is None else body[length:]
    inference = decode(text + binary, len(text) if binary else None)
    if inference is not None:
        check(inference)


@pytest.mark.parametrize("shape", [[2**63, 0], [0, 2**63], [2**60, 2**60, 0]])
def test_an_empty_shape_of_any_size_is_answered(shape):
    tensor = {"name": "user", "datatype": "INT64", "shape": shape, "data": []}
    check(decode(orjson.dumps({"inputs": [tensor]}), None))


@st.composite
def valid_requests(draw):
    keys = np.array(draw(st.lists(INT64, max_size=30)), np.int64)
    first = draw(st.integers(0, keys.size))
    by_table, as_binary = draw(st.booleans()), draw(st.booleans())
    offsets = draw(st.none() | st.lists(st.integers(0, 4), max_size=4))  # bags of at most so many keys, and the rest
    given_ = {"user": keys[:first], "item": keys[first:]} if by_table else {"KEYS": keys}
    if offsets is not None:
        ends = [np.minimum(np.cumsum([0, *offsets, 99]), size) for size in (first, keys.size - first)]
        given_ |= {"user.offsets": ends[0], "item.offsets": ends[1]} if by_table else {"OFFSETS": np.concatenate(ends)}
    elif not by_table:
        given_["NUMKEYS"] = np.array([first, keys.size - first], np.int32)
    parameters = {"found": draw(st.booleans()) and offsets is None, "binary_data_output": draw(st.booleans())}
    more = {"parameters": parameters, "id": draw(st.text("ab", max_size=9))}
    return *with_tensors(given_, binary=as_binary, **more), keys[:first], keys[first:]


@given(valid_requests())
def test_valid_requests_name_their_keys_exactly(request):
    body, length, user, item = request
    inference = decode(body, length)
    assert [segment.keys.tolist() for segment in by_table(inference.batch)] == [user.tolist(), item.tolist()]
    check(inference)


@given(valid_requests(), st.data())
def test_mutated_requests_are_answered_or_a_typed_error(request, data):
    body, length, _, _ = request
    mutated = bytearray(body)
    for _ in range(data.draw(st.integers(1, 4))):
        kind = data.draw(st.sampled_from(["flip", "cut", "repeat"]))
        place = data.draw(st.integers(0, max(len(mutated) - 1, 0)))
        if kind == "flip" and mutated:
            mutated[place] = data.draw(st.integers(0, 255))
        elif kind == "cut":
            del mutated[place:]
        else:
            mutated[place:place] = mutated[place : place + 20]
    inference = decode(bytes(mutated), None if length is None else min(length, len(mutated)))
    if inference is not None:
        check(inference)


@given(st.lists(st.sampled_from([0, 1, 7, 2**31, 2**60, 2**63, 2**64 - 1]), min_size=1, max_size=8), st.booleans(), integers)
def test_memory_follows_the_body_never_the_numbers_in_it(shape, as_binary, size):
    tensor = {"name": "user", "datatype": "INT64", "shape": shape}
    tensor |= {"parameters": {"binary_data_size": size}} if as_binary else {"data": [1]}
    text = orjson.dumps({"inputs": [tensor]})
    tracemalloc.start()
    try:
        decode(text + b"\0" * 8, len(text))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


key_lists = st.dictionaries(st.sampled_from(["user", "item", "users"]), st.lists(INT64, max_size=50), max_size=3)


@given(key_lists, st.none() | st.booleans(), st.none() | st.binary(max_size=60), st.floats(width=32), st.data())
def test_curl_lookups_are_answered_or_a_typed_error(tables, found, noise, value, data):
    """An answer has every finite float32 bit for bit."""
    document = {"tables": tables} | ({} if found is None else {"found": found})
    body = orjson.dumps(spoilt(data.draw, document)) if noise is None else noise
    try:
        lookup = decode_lookup(body, MODEL, MAX_KEYS)
    except HPSError:
        return
    for segment in by_table(lookup.batch):
        segment.out[...] = value
        if segment.found is not None:
            segment.found[...] = False
    answer, _ = read_answer(lookup)
    for name, keys in orjson.loads(body)["tables"].items():
        vectors = np.full((len(keys), MODEL.tables[MODEL.table_index(name, "")].dim), value, np.float32)
        if np.isfinite(value):
            assert np.array(answer["tables"][name], np.float32).tobytes() == vectors.tobytes()
        else:
            assert answer["tables"][name] == [[None] * vectors.shape[1]] * len(keys)
