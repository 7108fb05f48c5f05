"""Answers with scores: outputs of any names and dtypes, in whatever pieces they arrive, or an error."""

from typing import Any

import numpy as np
import orjson
import pytest

import hps
from hps.client.answers import Answer, ExpectedAnswer

SCORES = {
    "known": np.array([True, False, True]),
    "half": np.array([[0.5], [1.5], [2.5]], np.float16),  # begins at an odd byte, as do the others
    "score": np.array([1.0, np.nan, -3.0], np.float32),
    "wide": np.arange(6, dtype=np.float64).reshape(3, 1, 2),
    "ids": np.array([2**62, -1, 0]),
    "small": np.arange(3, dtype=np.int32),
    "none": np.empty((3, 0), np.float32),
    "codes": np.array([[-(2**15), 1]] * 3, np.int16),
    "signs": np.array([-128, 0, 127], np.int8),
    "bytes": np.array([255, 0, 7], np.uint8),
}
NAMES = {"int16": "INT16", "int8": "INT8", "uint8": "UINT8"}
NAMES |= {"bool": "BOOL", "float16": "FP16", "float32": "FP32", "float64": "FP64", "int64": "INT64", "int32": "INT32"}


def described(scores: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"name": name, "datatype": NAMES[one.dtype.name], "shape": list(one.shape)}
        | {"parameters": {"binary_data_size": one.nbytes}}
        for name, one in scores.items()
    ]


def answer_of(outputs: list[dict[str, Any]], body: bytes, version: str = "4") -> bytes:
    text = orjson.dumps({"model_name": "m", "model_version": version, "outputs": outputs})
    head = f"HTTP/1.1 200 OK\r\ninference-header-content-length: {len(text)}\r\ncontent-length: {len(text) + len(body)}\r\n\r\n"
    return head.encode() + text + body


def read(data: bytes, piece: int, expected: ExpectedAnswer) -> Answer:
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


@pytest.mark.parametrize("piece", [1, 7, 64, 1 << 20])
def test_interim_answers_are_skipped(piece: int) -> None:
    interim = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n"
    score = SCORES["score"]
    answer = read(
        interim + answer_of(described({"score": score}), score.tobytes()), piece, ExpectedAnswer({}, {}, "4", scores=True)
    )
    assert answer.status == 200
    np.testing.assert_array_equal(answer.outputs["score"], score)


@pytest.mark.parametrize("piece", [1, 7, 64, 1 << 20])
@pytest.mark.parametrize("names", [list(SCORES), ["score"], ["wide", "score", "known"], ["known", "none"]])
def test_outputs_of_all_dtypes_are_read_in_any_pieces(piece: int, names: list[str]) -> None:
    scores = {name: SCORES[name] for name in names}
    expected = ExpectedAnswer({}, {}, None, scores=True)
    for _ in range(3):  # the second is read by what is remembered of the first
        answer = read(answer_of(described(scores), b"".join(score.tobytes() for score in scores.values())), piece, expected)
        assert answer.error() is None
        assert list(answer.outputs) == names
        for name, one in scores.items():
            got = answer.outputs[name]
            assert (got.dtype, got.shape, got.tobytes()) == (one.dtype, one.shape, one.tobytes())
            assert (got.flags.aligned, got.flags.writeable) == (True, True)


WRONG = {
    "shape": [[], [3, -1], [3, 2], [1.5], ["3"]],
    "datatype": ["FP16", "UINT8", "UINT16"],
    "name": [7],
    "parameters": [{"binary_data_size": 11}, {}],
}
SCORE = described({"score": SCORES["score"]})
DESCRIPTIONS = [[SCORE[0] | {name: value}] for name, values in WRONG.items() for value in values]


OTHER = SCORE + described({"known": SCORES["known"][:2]})  # has not as many samples


@pytest.mark.parametrize("outputs", [[], described({"score": SCORES["score"][:2]}), SCORE * 2, OTHER, *DESCRIPTIONS])
def test_an_answer_that_does_not_fit_the_request_is_an_error(outputs: list[dict[str, Any]]) -> None:
    body = SCORES["score"].tobytes() * max(1, len(outputs))
    expected = ExpectedAnswer({}, {}, None, scores=True)
    for _ in range(2):
        with pytest.raises(hps.RemoteError):
            read(answer_of(outputs, body), 1 << 20, expected)
    assert read(answer_of(SCORE, SCORES["score"].tobytes()), 50, expected).outputs


def test_an_answer_of_another_version_or_length_is_an_error() -> None:
    body = SCORES["score"].tobytes()
    assert read(answer_of(SCORE, body), 9, ExpectedAnswer({}, {}, "4", scores=True)).outputs
    with pytest.raises(hps.RemoteError, match="got version '4', expected '5'"):
        read(answer_of(SCORE, body), 9, ExpectedAnswer({}, {}, "5", scores=True))
    with pytest.raises(hps.RemoteError, match="got 13 bytes of tensors, expected 12"):
        read(answer_of(SCORE, body + b"\0"), 1 << 20, ExpectedAnswer({}, {}, None, scores=True))
