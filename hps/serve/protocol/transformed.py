"""Requests to a model with a transform: some of their inputs become others (`models[].transform`), and the rest stays.

An input of the transform may be BYTES: as JSON a list of strings, as binary data each text after its length (uint32, little
endian). What comes out is again a request of the Open Inference Protocol, decoded as if a client had sent it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import orjson

from hps.configuration.transforms import BYTES
from hps.errors import InvalidDtypeError, InvalidInputError
from hps.serve.protocol.open_inference_header import InputTensor, read_inputs, reading_input
from hps.serve.protocol.request_checks import check_total, parse_object
from hps.serve.protocol.score_requests import DATATYPES, DescribedTensor, json_values
from hps.tensors.strings import Strings
from hps.tensors.transforms import Transform

TEXTS: Final = "BYTES"
_DATATYPES: Final[dict[str, "np.dtype[Any]"]] = {**DATATYPES, TEXTS: np.dtype(object)}
_NAMES: Final[dict[str, Any]] = {dtype.name: name for name, dtype in DATATYPES.items()} | {BYTES: TEXTS}


@dataclass(frozen=True, eq=False, slots=True)
class RawRequest:
    """A request with inputs of a transform. *Immutable.*

    Attributes:
        document: its JSON part.
        inputs: all inputs, by name.
        binary: its binary part.
        given: the values of the transform's inputs.
    """

    document: dict[str, Any]
    inputs: Mapping[str, InputTensor]
    binary: memoryview
    given: Mapping[str, Strings | npt.NDArray[Any]]


def read_raw(body: bytes | bytearray, header_length: int | None, transform: Transform, max_keys: int) -> RawRequest | None:
    """Read a request; None if it has no input of the transform, but keys.

    Raises:
        InvalidInputError, InvalidDtypeError: it is invalid, or has some inputs of the transform only.
        TooManyKeysError: an input has more than `max_keys` values.
    """
    view = memoryview(body)
    size = len(view) if header_length is None else header_length
    document = parse_object(bytes(view[:size]))
    tensors = document.get("inputs")
    names = [tensor.get("name") for tensor in tensors if type(tensor) is dict] if type(tensors) is list else []
    if not transform.applies(dict.fromkeys(name for name in names if type(name) is str)):
        return None
    inputs, binary_size = read_inputs(tensors, datatypes=_DATATYPES)
    binary = view[size:]
    if len(binary) != binary_size:
        raise InvalidInputError(f"reading the request: got {len(binary)} bytes of binary data, expected {binary_size}")
    given = {}
    for name, dtype in transform.config.inputs.items():
        tensor, what = inputs[name], reading_input(name)
        check_total(tensor.count, max_keys, f"values of input {name[:120]!r}")
        wanted = _DATATYPES[_NAMES[dtype]]
        if tensor.dtype != wanted:
            got = next(known for known, kind in _DATATYPES.items() if kind == tensor.dtype)
            raise InvalidDtypeError(f"{what}: got datatype {got!r}, expected {_NAMES[dtype]}, which the transform reads")
        given[name] = _values(tensor, binary, what)
    return RawRequest(document, inputs, binary, given)


def _values(tensor: InputTensor, binary: memoryview, what: str) -> Strings | npt.NDArray[Any]:
    part = binary[tensor.start : tensor.start + tensor.size]
    if tensor.dtype.kind != "O":
        if tensor.start < 0:
            return json_values(tensor.data, tensor.dtype, what, tensor.count).reshape(tensor.shape)
        # A copy: the JSON part has any length, so the bytes need not be aligned.
        return np.frombuffer(bytes(part), tensor.dtype).reshape(tensor.shape)
    if tensor.start >= 0:
        return Strings.of_tensor(part, tensor.shape, what)
    if type(tensor.data) is not list or not {str}.issuperset(map(type, tensor.data)):
        raise InvalidDtypeError(f"{what}: expected a list of strings")
    if len(tensor.data) != tensor.count:
        raise InvalidInputError(f"{what}: got {len(tensor.data)} values, expected {tensor.count} for shape {tensor.shape}")
    return Strings.of(tensor.data, what, tensor.shape)


def transformed(request: RawRequest, transform: Transform) -> tuple[bytes, int]:
    """Call the transform: the body with its outputs, and the length of its JSON part.

    Raises:
        InvalidInputError, TransformError: as of `Transform`.
    """
    made = transform(request.given)
    tensors: list[dict[str, Any]] = []
    pieces: list[bytes | memoryview] = []
    others = {tensor["name"]: tensor for tensor in request.document["inputs"] if tensor["name"] not in transform.config.inputs}
    for name, value in transform.merged(others, made).items():
        if name in others:
            tensors.append(value)
            read = request.inputs[name]
            pieces.append(request.binary[read.start : read.start + read.size] if read.start >= 0 else b"")
            continue
        pieces.append(value.data.cast("B") if value.size else b"")
        tensors.append(
            {
                "name": name,
                "datatype": _NAMES[value.dtype.name],
                "shape": list(value.shape),
                "parameters": {"binary_data_size": value.nbytes},
            }
        )
    text = orjson.dumps({**request.document, "inputs": tensors})
    return b"".join((text, *pieces)), len(text)


def described_with(transform: Transform | None, inputs: list[DescribedTensor]) -> list[DescribedTensor]:
    """Describe the inputs of a model's requests: those of its transform in place of what it makes."""
    if transform is None:
        return inputs
    config = transform.config
    given = [DescribedTensor(name, _NAMES[dtype], (-1,)) for name, dtype in config.inputs.items()]
    return given + [tensor for tensor in inputs if tensor.name.partition(".")[0] not in config.outputs]
