"""`ModelInfer`: messages of gRPC to and from an inference request in JSON with binary tensors.

A request takes the same path as over HTTP (`open_inference`). No loop runs over keys.
"""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import orjson

from hps.errors import InvalidInputError
from hps.serve.protocol.grpc_messages import message
from hps.tensors.strings import Strings

_Request: Final = message("inference.ModelInferRequest")
_Response: Final = message("inference.ModelInferResponse")
_StreamResponse: Final = message("inference.ModelStreamInferResponse")
_RAW_OUTPUT: Final = bytes([6 << 3 | 2])  # tag of `raw_output_contents`
_STREAMED: Final = bytes([2 << 3 | 2])  # tag of `infer_response`
_CONTENTS: Final = {  # FP16 has none
    "INT64": ("int64_contents", "<i8"),
    "INT32": ("int_contents", "<i4"),
    "INT16": ("int_contents", "<i2"),
    "INT8": ("int_contents", "i1"),
    "UINT8": ("uint_contents", "u1"),
    "BOOL": ("bool_contents", "?"),
    "FP32": ("fp32_contents", "<f4"),
    "FP64": ("fp64_contents", "<f8"),
    "BYTES": ("bytes_contents", ""),
}


class InferRequest(NamedTuple):
    """A `ModelInferRequest` in the form of HTTP."""

    model_name: str
    version: str  # empty: the serving version
    text: bytes  # JSON part
    binary: Sequence[bytes]  # binary part, a piece for each input


def read_infer_request(data: bytes) -> InferRequest:
    """Read a `ModelInferRequest`.

    Raises:
        InvalidInputError: it is not one, or has neither raw nor typed contents for an input.
    """
    try:
        request = _Request.FromString(data)
    except Exception as error:  # of a class that differs between protobuf's implementations
        raise InvalidInputError("reading the request: it is not an inference.ModelInferRequest") from error
    binary = [*request.raw_input_contents]
    if not binary:
        binary = [_contents(tensor) for tensor in request.inputs]
    elif any(tensor.HasField("contents") for tensor in request.inputs):
        raise InvalidInputError("reading 'inputs': got 'contents' beside 'raw_input_contents', expected one of them")
    if len(binary) != len(request.inputs):
        raise InvalidInputError(
            f"reading 'raw_input_contents': got {len(binary)}, expected {len(request.inputs)}, one for each of 'inputs'"
        )
    inputs = [
        {
            "name": tensor.name,
            "datatype": tensor.datatype,
            "shape": [*tensor.shape],
            "parameters": {**_parameters(tensor.parameters), "binary_data_size": len(piece)},
        }
        for tensor, piece in zip(request.inputs, binary, strict=True)
    ]
    document: dict[str, Any] = {
        **({"id": request.id} if request.id else {}),
        "parameters": {**_parameters(request.parameters), "binary_data_output": True},
        "inputs": inputs,
    }
    if request.outputs:
        document["outputs"] = [
            {"name": output.name, "parameters": {**_parameters(output.parameters), "binary_data": True}}
            for output in request.outputs
        ]
    return InferRequest(request.model_name, request.model_version, orjson.dumps(document), binary)


def _contents(tensor: Any) -> bytes:
    """Return the typed contents of an input as raw ones."""
    name, dtype = _CONTENTS.get(tensor.datatype, ("", ""))
    given = [field.name for field, _ in tensor.contents.ListFields()]
    if name and given not in ([name], []):
        raise InvalidInputError(
            f"reading input {tensor.name[:120]!r}: got {given[0]!r}, expected {name!r} for datatype {tensor.datatype}"
        )
    if tensor.datatype == "BYTES":
        return Strings.of([*tensor.contents.bytes_contents]).to_tensor()
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
    """A `ModelInferResponse` without its tensors."""

    heads: Sequence[bytes]  # the bytes before each tensor
    sizes: Sequence[int]  # of the tensors

    def joined(self, tensors: memoryview) -> bytes:
        """Return the message, given the bytes of all tensors. This is the only copy: protobuf would make three."""
        pieces: list[bytes | memoryview] = []
        start = 0
        for head, size in zip(self.heads, self.sizes, strict=True):
            pieces += (head, tensors[start : start + size])
            start += size
        return b"".join(pieces)


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
    return InferAnswer(heads, sizes)


def streamed(answer: bytes) -> bytes:
    """Return the `ModelStreamInferResponse` with this `ModelInferResponse`."""
    return _STREAMED + _varint(len(answer)) + answer


def stream_error(message: str) -> bytes:
    """Return the `ModelStreamInferResponse` of a request that failed."""
    found: bytes = _StreamResponse(error_message=message).SerializeToString()
    return found


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    found.append(value)
    return bytes(found)
