"""ONNX files, read as messages before ONNX Runtime opens them: their tensors have to be in the file.

A tensor of ONNX may name another file (`external_data`). ONNX Runtime opens it, relative to the working directory of the
process, so the author of a network could read files of the server through its scores. Field numbers are those of onnx.proto.
"""

from collections.abc import Iterator
from typing import Final

from hps.errors import ModelFileError

_NAME, _EXTERNAL, _LOCATION = 8, 13, 14  # of TensorProto
_INSIDE: Final[dict[str, dict[int, str]]] = {
    "model": {7: "graph", 20: "training", 25: "function"},
    "training": {1: "graph", 2: "graph"},
    "function": {7: "node", 11: "attribute"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
    "tensor": {},
}
"""By message, the fields that hold tensors, or messages with tensors."""


def refuse_external_data(name: str, content: bytes) -> None:
    """Check that a network has all its tensors in its file.

    Raises:
        ModelFileError: a tensor is in another file; or the file is no ONNX.
    """
    if content[4:8] == b"ORTM":
        raise ModelFileError(f"opening the network {name}: it cannot be read as ONNX: got ONNX Runtime's own format")
    stack = [("model", memoryview(content))]
    try:
        while stack:
            message, data = stack.pop()
            tensor, is_outside = "", False
            for number, value in _fields(data):
                if message == "tensor":
                    is_outside |= number == _EXTERNAL or (number == _LOCATION and value != 0)
                    tensor = bytes(value).decode(errors="replace") if number == _NAME and not isinstance(value, int) else tensor
                elif number in _INSIDE[message] and not isinstance(value, int):
                    stack.append((_INSIDE[message][number], value))
            if is_outside:
                raise ModelFileError(
                    f"opening the network {name}: got tensor {tensor[:100]!r} in another file (external_data), expected all "
                    "tensors in the file: save it without external data"
                )
    except (IndexError, ValueError) as error:
        if isinstance(error, ModelFileError):
            raise
        raise ModelFileError(f"opening the network {name}: it cannot be read as ONNX: its messages are truncated") from error


def _fields(data: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Yield the number and value of each field: a number, or the bytes of a text or message."""
    place = 0
    while place < len(data):
        tag, place = _number(data, place)
        if tag >> 32:  # protobuf drops the bits above, and finds another field
            raise ValueError(f"a field has number {tag >> 3}")
        kind = tag & 7
        if kind == 0:
            value, place = _number(data, place)
            yield tag >> 3, value
            continue
        size, place = _number(data, place) if kind == 2 else ({1: 8, 5: 4}.get(kind, -1), place)
        if size < 0 or place + size > len(data):  # groups are none of ONNX
            raise ValueError(f"a field of kind {kind} has {size} bytes")
        yield tag >> 3, data[place : place + size]
        place += size


def _number(data: memoryview, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[place]
        value |= (byte & 127) << shift
        place += 1
        if byte < 128:
            return value, place
        if shift > 63:
            raise ValueError("a number has more than 10 bytes")
        shift += 7
