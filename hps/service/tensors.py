"""JSON and integers out of requests: strict about what is an integer, and never allocating what the body does not hold."""

from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import Any, TypeAlias

import numpy as np
import orjson

from hps.errors import InvalidDtypeError, InvalidInputError
from hps.types import KeyArray

MAX_RANK = 8
_IntegerDtype: TypeAlias = "np.dtype[np.signedinteger[Any]]"
_DTYPES: dict[str, _IntegerDtype] = {"INT64": np.dtype("<i8"), "INT32": np.dtype("<i4")}
_JSON_KINDS = {bool: "a boolean", float: "a float", str: "a string", list: "a list", dict: "an object", type(None): "null"}


@dataclass(slots=True)
class InputTensor:
    """An integer input of an inference request.

    Attributes:
        name, shape: as the request says; the shape fits the values.
        values: (prod(shape),) int64, C-contiguous, aligned, owned by the request.
    """

    name: str
    shape: list[int]
    values: KeyArray


def parse_object(text: bytes | memoryview) -> dict[str, Any]:
    """Parse JSON whose value must be an object.

    Raises:
        InvalidInputError: it is not.
    """
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise InvalidInputError(f"reading the request: it is not JSON: {error}") from None
    if type(value) is not dict:
        raise InvalidInputError(f"reading the request: got {kind_of(value)}, wanted a JSON object")
    return value


def int64_array(values: Any, what: str) -> KeyArray:
    """Turn a JSON list into int64. Nothing is rounded, truncated or parsed: a float, bool or string is an error.

    Args:
        values: a list, as the JSON parser made it.
        what: names it in errors.

    Raises:
        InvalidDtypeError: it is not a list, or an element is not an integer of 64 bits.
    """
    if type(values) is not list:
        raise InvalidDtypeError(f"{what}: got {kind_of(values)}, wanted a list of integers")
    # numpy would take true, 1.5 and "1" for an integer
    if not {int}.issuperset(map(type, values)):
        place, value = next((i, value) for i, value in enumerate(values) if type(value) is not int)
        raise InvalidDtypeError(f"{what}: got {kind_of(value)} at position {place}, wanted integers of 64 bits")
    try:
        return np.array(values, dtype=np.int64)
    except OverflowError:
        place, value = next((i, value) for i, value in enumerate(values) if not -(2**63) <= value < 2**63)
        raise InvalidDtypeError(f"{what}: got {value} at position {place}, wanted signed integers of 64 bits") from None


def kind_of(value: Any) -> str:
    """What an error calls a JSON value: its kind, with the value where that is short."""
    kind = _JSON_KINDS.get(type(value), "an integer")
    return f"{kind} ({value!r})" if isinstance(value, int | float) and not isinstance(value, bool) else kind


def decode_inputs(inputs: Any, body: bytes, start: int | None) -> dict[str, InputTensor]:
    """Read the `inputs` of an inference request.

    Args:
        inputs: as the JSON parser made it.
        body: of the request.
        start: where the binary part of the body starts; None when it has none.

    Returns:
        The tensors by name, in the order of the request.

    Raises:
        InvalidInputError: an input is not of the protocol, or its data do not fit its shape.
        InvalidDtypeError: its values are not integers.
    """
    if type(inputs) is not list or not inputs:
        raise InvalidInputError("reading the request: 'inputs' is missing or empty, wanted a list of tensors")
    tensors: dict[str, InputTensor] = {}
    for given in inputs:
        if type(given) is not dict or type(name := given.get("name")) is not str:
            raise InvalidInputError(f"reading inputs[{len(tensors)}]: wanted an object with a name, which is a string")
        if name in tensors:
            raise InvalidInputError(f"{_input(name)}: it is given twice; name each once")
        datatype, shape = given.get("datatype"), given.get("shape")
        if type(datatype) is not str or (dtype := _DTYPES.get(datatype)) is None:
            got = repr(datatype[:40]) if isinstance(datatype, str) else kind_of(datatype)
            raise InvalidDtypeError(f"{_input(name)}: got datatype {got}, wanted INT64 (or INT32)")
        if type(shape) is not list or not 0 < len(shape) <= MAX_RANK:
            got = f"{len(shape)} dimensions" if type(shape) is list else kind_of(shape)
            raise InvalidInputError(f"{_input(name)}: got shape {got}, wanted a list of 1 to {MAX_RANK} integers")
        for width in shape:
            if type(width) is not int or width < 0:
                raise InvalidInputError(f"{_input(name)}: shape has {kind_of(width)}, wanted integers of at least 0")
        parameters = given.get("parameters")
        size = None if parameters is None else _binary_size(name, parameters)
        if size is None:
            values = _from_json(name, given.get("data"), shape, dtype)
        elif start is None:
            raise InvalidInputError(
                f"{_input(name)}: it has binary_data_size, but the request has no binary part; send the length of its JSON "
                "part in the header Inference-Header-Content-Length"
            )
        elif "data" in given:
            raise InvalidInputError(f"{_input(name)}: it has both 'data' and 'binary_data_size', wanted one of them")
        else:
            values = _from_binary(name, body, start, size, shape, dtype)
            start += size
        tensors[name] = InputTensor(name, shape, values)
    if start is not None and start != len(body):
        raise InvalidInputError(f"reading the request: {len(body) - start} bytes follow the last binary input, wanted none")
    return tensors


def _input(name: str) -> str:
    return f"reading input {name[:120]!r}"


def _binary_size(name: str, parameters: Any) -> int | None:
    if type(parameters) is not dict:
        raise InvalidInputError(f"{_input(name)}: 'parameters' is {kind_of(parameters)}, wanted an object")
    if "shared_memory_region" in parameters:
        raise InvalidInputError(f"{_input(name)}: shared memory is not supported; send the values as data or as binary data")
    size = parameters.get("binary_data_size")
    if size is not None and (type(size) is not int or size < 0):
        raise InvalidInputError(f"{_input(name)}: 'binary_data_size' is {kind_of(size)}, wanted an integer of at least 0")
    return size


def _from_binary(name: str, body: bytes, start: int, size: int, shape: list[int], dtype: _IntegerDtype) -> KeyArray:
    count = prod(shape)
    if size != count * dtype.itemsize:
        raise InvalidInputError(
            f"{_input(name)}: got binary_data_size {size}, wanted {count * dtype.itemsize} for shape {shape} of {dtype}"
        )
    if start + size > len(body):
        raise InvalidInputError(
            f"{_input(name)}: got {len(body) - start} bytes of binary data, wanted {size}; the body is cut short"
        )
    # A copy: the JSON part before it has any length, so the bytes need not be aligned.
    return np.frombuffer(body, dtype, count, start).astype(np.int64) if count else np.empty(0, np.int64)


def _from_json(name: str, data: Any, shape: list[int], dtype: _IntegerDtype) -> KeyArray:
    if data is None:
        raise InvalidInputError(f"{_input(name)}: it has neither 'data' nor 'binary_data_size'")
    values = int64_array(_flat(name, data, shape), _input(name))
    if values.size != prod(shape):
        raise InvalidInputError(f"{_input(name)}: got {values.size} values, wanted {prod(shape)} for shape {shape}")
    if dtype.itemsize == 4 and values.size and not -(2**31) <= values.min() <= values.max() < 2**31:
        raise InvalidDtypeError(f"{_input(name)}: a value does not fit INT32; send INT64")
    return values


def _flat(name: str, data: Any, shape: list[int]) -> Any:
    """Flatten lists that are nested as the shape says; leave a flat list as it is."""
    for width in shape[1:]:
        if type(data) is not list or not data or type(data[0]) is not list:
            break
        if not {list}.issuperset(map(type, data)) or not {width}.issuperset(map(len, data)):
            raise InvalidInputError(
                f"{_input(name)}: 'data' is not nested as shape {shape} says; send it flat, in row-major order"
            )
        data = list(chain.from_iterable(data))
    return data
