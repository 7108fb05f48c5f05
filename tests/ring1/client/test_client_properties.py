"""What the client encodes is what the server decodes, and an answer is the same in whatever pieces it arrives."""

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hps.client.addresses import read_addresses
from hps.client.answers import Answer
from hps.client.calls import Calls
from hps.client.requests import RemoteCall
from hps.ground.http1 import Head
from hps.serve.protocol.open_inference import Inference, parse_header_length
from hps.serve.protocol.request_checks import ModelTables
from hps.types import TableSpec
from tests.fakes.inferences import body_of, decode_request
from tests.tables.batches import by_table

DIMS = {"item": 4, "user": 1, "geo-1": 7}
MODEL = ModelTables("m", tuple(TableSpec("m", name, dim, 0.0, 1000) for name, dim in DIMS.items()))
ADDRESS = read_addresses("http://127.0.0.1:8000", None, None)[0]
KEYS = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=20)


class Recorded(Calls):
    """Keeps the call instead of making it."""

    def _request(self, call: RemoteCall, timeout_s: float | None) -> RemoteCall:
        return call


CLIENT = Recorded([ADDRESS], "", 1.0, 1)


def split(call: RemoteCall) -> tuple[Any, bytes, int | None]:
    data = b"".join(map(bytes, CLIENT._encoder.parts(call, ADDRESS)))
    end = data.index(b"\r\n\r\n") + 4
    head, body = Head(data[:end]), data[end:]
    assert head.length == len(body)
    return head, body, parse_header_length(head.headers.get(b"inference-header-content-length"), len(body))


def laid_out(body: bytes, length: int | None) -> Inference:
    return decode_request(body, length, MODEL, 10_000)


def vectors_of(name: str, keys: np.ndarray) -> np.ndarray:
    return (keys[:, None] % 1000 + len(name) + np.arange(DIMS[name]) / 8).astype(np.float32)


@given(
    st.dictionaries(st.sampled_from(list(DIMS)), KEYS, min_size=1),
    st.booleans(),
    st.booleans(),
    st.lists(st.integers(1, 60), min_size=1, max_size=20),
)
def test_an_answer_to_what_was_sent_is_read_in_any_pieces(
    tables: dict[str, list[int]], found: bool, given_out: bool, pieces: list[int]
) -> None:
    out = {name: np.full((len(keys) + 1, DIMS[name]), -1, np.float32) for name, keys in tables.items()} if given_out else None
    call = CLIENT.lookup_tables(tables, "m", return_found=found, out=out)
    for _ in range(2):  # the form is remembered
        head, body, length = split(call)
        assert head.path == "/v2/models/m/infer"
        inference = laid_out(body, length)
        assert [MODEL.tables[one.table].table_name for one in by_table(inference.batch)] == list(tables)
        for segment, keys in zip(by_table(inference.batch), tables.values(), strict=True):
            assert segment.keys.tolist() == keys
            segment.out[:] = vectors_of(MODEL.tables[segment.table].table_name, segment.keys)
            if segment.found is not None:
                segment.found[:] = segment.keys % 2 == 0
        content, text_bytes = body_of(inference)
        lengths = f"Inference-Header-Content-Length: {text_bytes}\r\ncontent-length: {len(content)}"
        answer = read_in_pieces(call.answer(), f"HTTP/1.1 200 OK\r\n{lengths}\r\n\r\n".encode() + content, pieces)
        vectors = call.result(answer)
        if found:
            vectors, masks = vectors
            wanted = [[key % 2 == 0 for key in keys] for keys in tables.values()]
            assert [masks[name].tolist() for name in tables] == wanted
        for name, keys in tables.items():
            expected = vectors_of(name, np.array(keys, np.int64))
            assert (vectors[name][: len(keys)] == expected).all()
            assert vectors[name].shape == (len(keys) + given_out, DIMS[name])
            assert (vectors[name][len(keys) :] == -1).all()


def read_in_pieces(answer: Answer, sent: bytes, pieces: list[int]) -> Answer:
    at = nth = 0
    while True:
        buffer = answer.buffer()
        assert len(buffer) > 0
        count = min(pieces[nth % len(pieces)], len(buffer), len(sent) - at)
        assert count, "the answer wants more than was sent"
        buffer[:count] = sent[at : at + count]
        at, nth = at + count, nth + 1
        if answer.received(count):
            assert at == len(sent)
            return answer
