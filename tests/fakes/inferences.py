"""Inference requests as a front decodes them, with memory of their own for the answer."""

from typing import Any

import numpy as np
import orjson

from hps.serve.protocol.json_lookup import JSONLookup
from hps.serve.protocol.open_inference import Inference, decode_inference
from hps.serve.protocol.request_checks import ModelTables


def decode_request(body: bytes | bytearray, header_length: int | None, model: ModelTables, max_keys: int) -> Inference:
    inference = decode_inference(body, header_length, model, max_keys)
    inference.place(np.empty(inference.layout.size, np.uint8))
    return inference


def body_of(request: Inference | JSONLookup) -> tuple[bytes, int | None]:
    """The body of an answer, once the vectors are written, and the length of its JSON part where binary data follow."""
    if isinstance(request, Inference):
        request.convert()
        if (whole := request.binary_answer) is not None:
            return bytes(whole[0]), whole[1]
    pieces, binary = request.encode()
    text = b"".join(pieces)
    return text + b"".join(map(bytes, binary)), len(text) if binary else None


def read_answer(request: Inference | JSONLookup) -> tuple[Any, bytes]:
    """The parsed JSON part of an answer, and its binary part."""
    body, length = body_of(request)
    return orjson.loads(body[:length]), b"" if length is None else body[length:]
