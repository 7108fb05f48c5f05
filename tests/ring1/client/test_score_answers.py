"""Answers with scores: outputs of any names and dtypes, in whatever pieces they arrive, or an error."""

from typing import Any

import numpy as np
import orjson
import pytest

import hps
from hps.client.answers import Answer, Expected

SCORES = {
    "known": np.array([True, False, True]),
    "half": np.array([[0.5], [1.5], [2.5]], np.float16),  # begins at an odd byte, as do the others
    "score": np.array([1.0, np.nan, -3.0], np.float32),
    "wide": np.arange(6, dtype=np.float64).reshape(3, 1, 2),
    "ids": np.array([2**62, -1, 0]),
    "small": np.arange(3, dtype=np.int32),
    "none": np.empty((3, 0), np.float32),
}
NAMES = {"bool": "BOOL", "float16": "FP16", "float32": "FP32", "float64": "FP64", "int64": "INT64", "int32": "INT32"}


def described(scores: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "datatype": NAMES[one.dtype.name],
            "shape": list(one.shape),
            "parameters": {"binary_data_size": one.nbytes},
        }
        for name, one in scores.items()
    ]


def answer_of(outputs: list[dict[str, Any]], body: bytes, version: str = "4") -> bytes:
    text = orjson.dumps({"model_name": "m", "model_version": version, "outputs": outputs})
    head = f"HTTP/1.1 200 OK\r\ninference-header-content-length: {len(text)}\r\ncontent-length: {len(text) + len(body)}\r\n\r\n"
    return head.encode() + text + body


def read(data: bytes, piece: int, expected: Expected) -> Answer:
    answer, complete = Answer(expected), False
    while data:
        assert not complete
        buffer = answer.buffer()
        count = min(piece, len(buffer), len(data))
        buffer[:count] = data[:count]
        data = data[count:]
        complete = answer.received(count)
    assert complete
    return answer


@pytest.mark.parametrize("piece", [1, 2, 7, 64, 1 << 20])
@pytest.mark.parametrize("names", [list(SCORES), ["score"], ["wide", "score", "known"], ["known", "none"]])
def test_outputs_of_all_dtypes_are_read_in_any_pieces(piece: int, names: list[str]) -> None:
    scores = {name: SCORES[name] for name in names}
    expected = Expected({}, {}, None, samples=3)
    for _ in range(3):  # the second is read by what is remembered of the first
        answer = read(answer_of(described(scores), b"".join(one.tobytes() for one in scores.values())), piece, expected)
        assert answer.error() is None
        assert list(answer.outputs) == names
        for name, one in scores.items():
            got = answer.outputs[name]
            assert (got.dtype, got.shape, got.tobytes()) == (one.dtype, one.shape, one.tobytes())
            assert got.flags.aligned
            assert got.flags.writeable


def with_member(name: str, value: Any) -> list[dict[str, Any]]:
    return [described({"score": SCORES["score"]})[0] | {name: value}]


@pytest.mark.parametrize(
    "outputs",
    [
        [],
        described({"score": SCORES["score"][:2]}),
        with_member("shape", []),
        with_member("shape", [3, -1]),
        with_member("shape", [3, 2]),
        with_member("datatype", "FP16"),
        with_member("datatype", "UINT8"),
        with_member("name", 7),
        with_member("parameters", {"binary_data_size": 11}),
        with_member("parameters", {}),
        described({"score": SCORES["score"]}) * 2,
    ],
)
def test_an_answer_that_does_not_fit_the_request_is_an_error(outputs: list[dict[str, Any]]) -> None:
    body = SCORES["score"].tobytes() * max(1, len(outputs))
    expected = Expected({}, {}, None, samples=3)
    for _ in range(2):
        with pytest.raises(hps.RemoteError):
            read(answer_of(outputs, body), 1 << 20, expected)
    assert read(answer_of(described({"score": SCORES["score"]}), SCORES["score"].tobytes()), 50, expected).outputs


def test_an_answer_of_another_version_or_length_is_an_error() -> None:
    data = described({"score": SCORES["score"]}), SCORES["score"].tobytes()
    assert read(answer_of(*data), 9, Expected({}, {}, "4", samples=3)).outputs
    with pytest.raises(hps.RemoteError, match="got version '4', expected '5'"):
        read(answer_of(*data), 9, Expected({}, {}, "5", samples=3))
    with pytest.raises(hps.RemoteError, match="got 13 bytes of tensors, expected 12"):
        read(answer_of(data[0], data[1] + b"\0"), 1 << 20, Expected({}, {}, None, samples=3))
