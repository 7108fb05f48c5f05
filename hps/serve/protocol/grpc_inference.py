"""`ModelInfer`: the messages of gRPC to and from an inference request in JSON with binary tensors.

A request means what the same one means over HTTP (`open_inference`), and takes the same path. Most have a head, all but the raw
contents, that clients repeat: what follows from it is kept. No loop is over keys.
"""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import orjson

from hps.errors import InvalidInputError
from hps.ground.memory.bounded_cache import BoundedCache
from hps.serve.protocol.grpc_messages import message
from hps.serve.protocol.open_inference_header import CACHED_BYTES

_Request: Final = message("inference.ModelInferRequest")
_Response: Final = message("inference.ModelInferResponse")
_RAW_INPUT: Final = 7 << 3 | 2  # tag of `raw_input_contents`
_RAW_OUTPUT: Final = bytes([6 << 3 | 2])
_STREAMED: Final = bytes([2 << 3 | 2])
_CONTENTS: Final = {  # FP16 has none
    "INT64": ("int64_contents", "<i8"),
    "INT32": ("int_contents", "<i4"),
    "INT16": ("int_contents", "<i2"),
    "INT8": ("int_contents", "i1"),
    "UINT8": ("uint_contents", "u1"),
    "BOOL": ("bool_contents", "?"),
    "FP32": ("fp32_contents", "<f4"),
    "FP64": ("fp64_contents", "<f8"),
}


class InferRequest(NamedTuple):
    """A `ModelInferRequest` as HTTP has it.

    Attributes:
        version: empty for the serving one.
        text: JSON part.
        binary: the binary part, in pieces.
        size: of the binary part.
        prefix: bytes before the binary part, if it is of one piece and ends the message; else 0.
    """

    model_name: str
    version: str
    text: bytes
    binary: Sequence[bytes | memoryview]
    size: int
    prefix: int = 0


def read_infer_request(data: bytes | bytearray) -> InferRequest:
    """Read a `ModelInferRequest`.

    Raises:
        InvalidInputError: it is not one, or has neither raw nor typed contents for an input.
    """
    view, at, end = memoryview(data), 0, len(data)
    heads: list[memoryview] = []
    raw: list[memoryview] = []
    since = 0
    try:
        while at < end:
            tag, start = data[at], at
            if tag & 7 != 2 or tag > 127:  # not of ours: protobuf knows how long it is
                heads, raw, since, at = [], [], 0, end
                break
            size, shift = data[at + 1], 7
            at += 2
            if size > 127:
                size &= 127
                while shift < 35:
                    one = data[at]
                    at += 1
                    size |= (one & 127) << shift
                    shift += 7
                    if one < 128:
                        break
            if tag == _RAW_INPUT:
                heads.append(view[since:start])
                raw.append(view[at : at + size])
                since = at + size
            at += size
    except IndexError:
        raise _no_message() from None
    if at > end:
        raise _no_message()
    heads.append(view[since:])
    head = b"".join(heads)
    sizes = tuple(map(len, raw))
    read = _read_repeated_head if len(head) <= CACHED_BYTES else _read_head
    name, version, text, typed = read(head, sizes)
    if typed:
        return InferRequest(name, version, text, typed, sum(map(len, typed)))
    prefix = end - sizes[0] if len(raw) == 1 and since == end else 0
    return InferRequest(name, version, text, raw, sum(sizes), prefix)


def _no_message() -> InvalidInputError:
    return InvalidInputError("reading the request: it is not an inference.ModelInferRequest")


def _read_head(head: bytes, sizes: tuple[int, ...]) -> tuple[str, str, bytes, list[bytes]]:
    """Read all but the raw contents, of these sizes: model, version, JSON part, and the typed contents as raw ones."""
    try:
        request = _Request.FromString(head)
    except Exception as error:  # of a class that differs between protobuf's implementations
        raise _no_message() from error
    typed: list[bytes] = []
    if not sizes:
        typed = [*request.raw_input_contents] or [_contents(tensor) for tensor in request.inputs]
    elif any(tensor.HasField("contents") for tensor in request.inputs):
        raise InvalidInputError("reading 'inputs': got 'contents' beside 'raw_input_contents', expected one of them")
    given = sizes or tuple(map(len, typed))
    if len(given) != len(request.inputs):
        raise InvalidInputError(
            f"reading 'raw_input_contents': got {len(given)}, expected {len(request.inputs)}, one for each of 'inputs'"
        )
    inputs = [
        {
            "name": tensor.name,
            "datatype": tensor.datatype,
            "shape": [*tensor.shape],
            "parameters": {**_parameters(tensor.parameters), "binary_data_size": size},
        }
        for tensor, size in zip(request.inputs, given, strict=True)
    ]
    document: dict[str, Any] = {
        **({"id": request.id} if request.id else {}),
        "parameters": {**_parameters(request.parameters), "binary_data_output": True},
        "inputs": inputs,
    }
    if request.outputs:
        document["outputs"] = [
            {"name": one.name, "parameters": {**_parameters(one.parameters), "binary_data": True}} for one in request.outputs
        ]
    return request.model_name, request.model_version, orjson.dumps(document), typed


def _head_bytes(read: tuple[str, str, bytes, list[bytes]], head: bytes, sizes: tuple[int, ...]) -> int:
    name, version, text, typed = read
    return 1000 + len(head) + 4 * (len(name) + len(version)) + len(text) + sum(map(len, typed)) + 40 * (len(typed) + len(sizes))


_read_repeated_head = BoundedCache(_read_head, _head_bytes)


def _contents(tensor: Any) -> bytes:
    """Return the typed contents of an input as raw ones."""
    name, dtype = _CONTENTS.get(tensor.datatype, ("", ""))
    given = [field.name for field, _ in tensor.contents.ListFields()]
    if name and given not in ([name], []):
        raise InvalidInputError(
            f"reading input {tensor.name[:120]!r}: got {given[0]!r}, expected {name!r} for datatype {tensor.datatype}"
        )
    try:
        return np.array(getattr(tensor.contents, name), dtype).tobytes() if name else b""
    except OverflowError as error:
        raise InvalidInputError(f"reading input {tensor.name[:120]!r}: a value does not fit {tensor.datatype}") from error


def _parameters(given: Any) -> dict[str, Any]:
    found = {}
    for name, value in given.items():
        choice = value.WhichOneof("parameter_choice")
        found[name] = getattr(value, choice) if choice else None
    return found


class InferAnswer(NamedTuple):
    """What a `ModelInferResponse` has beside its tensors.

    Attributes:
        heads: bytes before each output's tensor.
        sizes: of the tensors.
        size: of the message.
    """

    heads: Sequence[bytes]
    sizes: Sequence[int]
    size: int


def write_infer_answer(text: bytes) -> InferAnswer:
    """Write a `ModelInferResponse` from the JSON part of an answer whose outputs are all binary."""
    answer = orjson.loads(text)
    response = _Response(model_name=answer["model_name"], model_version=answer["model_version"], id=answer.get("id", ""))
    for name, value in answer.get("parameters", {}).items():
        kind = "int64_param" if isinstance(value, int) else "double_param"
        setattr(response.parameters[name], kind, value)
    sizes = []
    for output in answer["outputs"]:
        response.outputs.add(name=output["name"], datatype=output["datatype"], shape=output["shape"])
        sizes.append(output["parameters"]["binary_data_size"])
    heads = [_RAW_OUTPUT + _varint(size) for size in sizes]
    heads[0] = response.SerializeToString() + heads[0]
    return InferAnswer(heads, sizes, sum(map(len, heads)) + sum(sizes))


def stream_head(size: int) -> bytes:
    """Return what a `ModelStreamInferResponse` has before a `ModelInferResponse` of this size."""
    return _STREAMED + _varint(size)


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    found.append(value)
    return bytes(found)
