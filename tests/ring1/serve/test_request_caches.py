"""What is remembered of requests: whatever they say, it takes no more memory than is counted."""

import json
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import pytest

from hps.errors import HPSError
from hps.ground.memory import bounded_cache
from hps.ground.memory.bounded_cache import cached_bytes, clear_caches, size_of
from hps.serve.frontend.grpc_calls import _cached_answer
from hps.serve.frontend.lookups import read_cached, read_lookup
from hps.serve.frontend.shared_memory import _cached_moves, translate
from hps.serve.protocol import row_writes
from hps.serve.protocol.open_inference import decode_inference
from hps.serve.protocol.open_inference_header import CACHED_BYTES
from hps.serve.protocol.request_checks import ModelTables
from hps.types import TableSpec
from tests.ring1.serve.test_score_requests import ARRAYS, BINARY_OUTPUT, MOST_KEYS, NETWORK
from tests.servers.binary_tensors import with_tensors

TABLES = [TableSpec("m", f"t{number}", 4, 0.0, 1 << 20) for number in range(60)]
MODEL = ModelTables("m", tuple(TABLES))
SCORED = ModelTables("m", (TableSpec("m", "t0", 4, 0.0, 100), TableSpec("m", "t1", 2, 0.0, 100)), network=NETWORK)
KEYS = {f"t{number}": np.zeros(1, np.int64) for number in range(60)}
CLOSE = CACHED_BYTES - 200
WIDE = "\U0001f600"  # four bytes a character, for each character of its string


def text_of(values: str, **more: object) -> bytes:
    """A JSON part that is as long as one that is remembered, full of these values."""
    data = values * ((CLOSE - 200) // len(values)) + values.rstrip(",")
    asked = {"inputs": [{"name": "t0", "datatype": "INT64", "shape": [1], "data": "DATA"}], **more}
    return json.dumps(asked).replace('"DATA"', f"[{data}]").encode()


def lay_out(text: bytes) -> Callable[[], object]:
    return lambda: decode_inference(text, len(text), MODEL, 1000, read_lookup)


def look_up(arrays: dict[str, np.ndarray], **more: object) -> Callable[[], object]:
    body, length = with_tensors(arrays, binary=True, **more)

    def call() -> None:
        read_cached(body[:length], None, MODEL, 1000)
        decode_inference(body, length, MODEL, 1000, read_lookup)

    return call


def score(text: bytes) -> Callable[[], object]:
    return lambda: read_cached(text, None, SCORED, 1000)


def score_all() -> None:
    body, length = with_tensors(ARRAYS, binary=True, parameters=BINARY_OUTPUT)
    read_cached(body[:length], None, SCORED, MOST_KEYS)


def share() -> None:
    place = {"shared_memory_region": WIDE, "shared_memory_byte_size": 8}
    inputs = [{"name": f"t{number}", "datatype": "INT64", "shape": [1], "parameters": place} for number in range(40)]
    outputs = [{"name": f"t{number}", "parameters": place} for number in range(40)]
    found = translate(json.dumps({"inputs": inputs, "outputs": outputs}).encode()[:CACHED_BYTES])
    answers = [{"name": f"t{number}", "parameters": {"binary_data_size": 16}} for number in range(100)]
    _cached_moves(found, json.dumps({"outputs": answers}).encode())


def write_rows() -> None:
    tensors = {"KEYS": np.zeros(1, np.int64), "VECTORS": np.zeros((1, 4), np.float32)}
    body, length = with_tensors(tensors, binary=True, id="x" * CLOSE)
    row_writes.decode_rows(body, length, TABLES[0], 10)


def answer_all() -> None:
    outputs = [
        {"name": f"{number}", "datatype": "FP32", "shape": [1], "parameters": {"binary_data_size": 4}} for number in range(60)
    ]
    _cached_answer(json.dumps({"model_name": "m", "model_version": "1", "id": "x" * CLOSE, "outputs": outputs}).encode())


HOSTILE = {
    "lists": score(text_of("[],", id="x")),
    "objects": score(text_of("{},")),
    "objects with members": score(text_of('{"":{}},')),
    "nested objects": score(text_of('{"a":{"a":{"a":[[]]}}},')),
    "floats": lay_out(text_of("1.5,")),
    "keys": lay_out(text_of("1234567,")),
    "an id of wide characters": look_up({"t0": KEYS["t0"]}, id=WIDE + "x" * (CLOSE - 100)),
    "all tables": look_up(KEYS),
    "all tables, binary": look_up(KEYS, parameters=BINARY_OUTPUT),
    "all tables with masks": look_up(KEYS, parameters={**BINARY_OUTPUT, "found": True}),
    "all tables in 16 bits": look_up(KEYS, parameters={**BINARY_OUTPUT, "datatype": "FP16"}),
    "many dimensions": look_up({name: array.reshape([1] * 8) for name, array in list(KEYS.items())[:50]}),
    "bags with options": look_up({"t0": np.zeros((1, 1), np.int64)}, parameters={"combiner": "sum", "max_norm": 1.5}),
    "options of no tables": lay_out(
        json.dumps({"parameters": {f"{number}.combiner": "sum" for number in range(300)}, "inputs": []}).encode()
    ),
    "numbers of keys": look_up({"KEYS": np.zeros(60, np.int64), "NUMKEYS": np.ones(60, np.int32)}),
    "scores": score_all,
    "an answer of gRPC": answer_all,
    "shared memory": share,
    "rows": write_rows,
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_memory_of_a_request_is_counted_in_full(kind: str) -> None:
    clear_caches()
    with suppress(HPSError):  # what was parsed before it was refused may be remembered
        HOSTILE[kind]()
    models = [MODEL, SCORED, NETWORK]
    entries = [list(cache._entries.items()) for cache in bounded_cache._caches]
    taken = size_of([entries, models]) - size_of(models)
    counted = cached_bytes()
    clear_caches()
    assert taken <= counted + 4000 < 1_000_000  # and the lists of entries
