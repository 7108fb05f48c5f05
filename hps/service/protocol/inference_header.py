"""The JSON part of an inference request: checked by itself, before the tensors that may follow it are looked at.

It says nothing but names, datatypes, shapes and wishes where the tensors are binary, and so clients that send batches of the
same sizes repeat it: heads are kept, and most requests parse no JSON.
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from math import prod
from typing import Any, TypeAlias

import numpy as np

from hps.errors import InvalidDtypeError, InvalidInputError
from hps.service.protocol.json_values import int64_array, kind_of, parse_object
from hps.types import KeyArray

MAX_RANK = 8
_KEPT_HEADS = 256
_KEPT_BYTES = 2048  # of JSON; a longer one is not kept
_IntegerDtype: TypeAlias = "np.dtype[np.signedinteger[Any]]"
_DTYPES: dict[str, _IntegerDtype] = {"INT64": np.dtype("<i8"), "INT32": np.dtype("<i4")}


@dataclass(frozen=True, slots=True)
class Input:
    """An integer input as the head describes it. Immutable.

    Attributes:
        name, dtype, shape: as the request says.
        count: what the shape multiplies to.
        start: where its bytes start in the binary part; -1 where `data` has its values.
        data: its values, a flat list, still to be checked.
    """

    name: str
    dtype: _IntegerDtype
    shape: list[int]
    count: int
    start: int
    data: Any

    def values(self, body: bytes, binary_start: int) -> KeyArray:
        """Its values, (count,) int64, aligned and the caller's own.

        Args:
            body: of the request, which is long enough: see `Head.check_size`.
            binary_start: where its binary part starts.

        Raises:
            InvalidDtypeError, InvalidInputError: `data` are not integers of the datatype, or not as many as the shape says.
        """
        if self.start >= 0:
            if not self.count:
                return np.empty(0, np.int64)
            # A copy: the JSON part has any length, so the bytes need not be aligned.
            return np.frombuffer(body, self.dtype, self.count, binary_start + self.start).astype(np.int64)
        values = int64_array(self.data, _input(self.name))
        if values.size != self.count:
            raise InvalidInputError(
                f"{_input(self.name)}: got {values.size} values, wanted {self.count} for shape {self.shape}"
            )
        if self.dtype.itemsize == 4 and values.size and not -(2**31) <= values.min() <= values.max() < 2**31:
            raise InvalidDtypeError(f"{_input(self.name)}: a value does not fit INT32; send INT64")
        return values


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """A JSON part that is right by itself. Immutable, and shared by requests; equal to itself alone.

    Attributes:
        request_id: echoed when given.
        inputs: by name, in the order of the request.
        binary_size: bytes of binary data that they have together; None when all of them are in JSON.
        wanted: by output name, whether it is to be binary; None where the request names no outputs.
        found: whether found-masks are wanted that `wanted` does not name.
        binary: whether outputs that `wanted` does not name are to be binary.
        numkeys: the place of NUMKEYS among the inputs, where KEYS is there, too; else None.
        kept: whether the same text will give this very object again.
    """

    request_id: str | None
    inputs: dict[str, Input]
    binary_size: int | None
    wanted: dict[str, bool] | None
    found: bool
    binary: bool
    numkeys: int | None
    kept: bool

    def vectors(self, name: str) -> bool | None:
        """Whether this output is to be binary; None when it is not wanted."""
        return self.binary if self.wanted is None else self.wanted.get(name)

    def mask(self, name: str) -> bool | None:
        """Whether this output is to be binary; None when it is not wanted."""
        if self.wanted is not None and name in self.wanted:
            return self.wanted[name]
        return self.binary if self.found else None

    def check_size(self, size: int | None) -> None:
        """Check that the binary part has what the inputs say.

        Args:
            size: of the binary part; None when the request has none.

        Raises:
            InvalidInputError: it is shorter or longer.
        """
        if size is None and self.binary_size is not None:
            raise InvalidInputError(
                "reading the request: an input has binary_data_size, but the request has no binary part; send the length of "
                "its JSON part in the header Inference-Header-Content-Length"
            )
        wanted = self.binary_size or 0
        if size is not None and size != wanted:
            hint = "the body is cut short" if size < wanted else "something follows the last binary input"
            raise InvalidInputError(f"reading the request: got {size} bytes of binary data, wanted {wanted}; {hint}")


def read_head(text: bytes) -> Head:
    """Read the JSON part of an inference request.

    Raises:
        InvalidInputError, InvalidDtypeError: it is none; the message says where and what is wanted.
    """
    return _kept_head(text) if len(text) <= _KEPT_BYTES else _read_head(text)


def _read_head(text: bytes) -> Head:
    request = parse_object(text)
    request_id = request.get("id")
    if request_id is not None and type(request_id) is not str:
        raise InvalidInputError(f"reading the request: 'id' is {kind_of(request_id)}, wanted a string")
    parameters = _object(request, "reading the request")
    binary = _flag(parameters, "binary_data_output", "reading 'parameters'", default=False)
    found = _flag(parameters, "found", "reading 'parameters'", default=False)
    inputs, binary_size = _read_inputs(request.get("inputs"))
    numkeys = list(inputs).index("NUMKEYS") if "NUMKEYS" in inputs and "KEYS" in inputs else None
    wanted = _read_outputs(request.get("outputs"), binary)
    return Head(request_id, inputs, binary_size, wanted, found, binary, numkeys, len(text) <= _KEPT_BYTES)


_kept_head = lru_cache(_KEPT_HEADS)(_read_head)


def _read_inputs(given: Any) -> tuple[dict[str, Input], int | None]:
    if type(given) is not list or not given:
        raise InvalidInputError("reading the request: 'inputs' is missing or empty, wanted a list of tensors")
    inputs: dict[str, Input] = {}
    total = None
    for one in given:
        name = one.get("name") if type(one) is dict else None
        if type(name) is not str:
            raise InvalidInputError(f"reading inputs[{len(inputs)}]: wanted an object with a name, which is a string")
        if name in inputs:
            raise InvalidInputError(f"{_input(name)}: it is given twice; name each once")
        dtype, shape = _dtype(name, one.get("datatype")), _shape(name, one.get("shape"))
        count = prod(shape)
        size = _binary_size(name, one)
        if size is None:
            inputs[name] = Input(name, dtype, shape, count, -1, _flat(name, one.get("data"), shape))
            continue
        if size != count * dtype.itemsize:
            raise InvalidInputError(
                f"{_input(name)}: got binary_data_size {size}, wanted {count * dtype.itemsize} for shape {shape} of {dtype}"
            )
        total = total or 0
        inputs[name] = Input(name, dtype, shape, count, total, None)
        total += size
    return inputs, total


def _dtype(name: str, datatype: Any) -> _IntegerDtype:
    if type(datatype) is not str or datatype not in _DTYPES:
        got = repr(datatype[:40]) if isinstance(datatype, str) else kind_of(datatype)
        raise InvalidDtypeError(f"{_input(name)}: got datatype {got}, wanted INT64 (or INT32)")
    return _DTYPES[datatype]


def _shape(name: str, shape: Any) -> list[int]:
    if type(shape) is not list or not 0 < len(shape) <= MAX_RANK:
        got = f"{len(shape)} dimensions" if type(shape) is list else kind_of(shape)
        raise InvalidInputError(f"{_input(name)}: got shape {got}, wanted a list of 1 to {MAX_RANK} integers")
    for width in shape:
        if type(width) is not int or width < 0:
            raise InvalidInputError(f"{_input(name)}: shape has {kind_of(width)}, wanted integers of at least 0")
    return shape


def _binary_size(name: str, given: dict[str, Any]) -> int | None:
    parameters = _object(given, _input(name))
    if "shared_memory_region" in parameters:
        raise InvalidInputError(f"{_input(name)}: shared memory is not supported; send the values as data or as binary data")
    size = parameters.get("binary_data_size")
    if size is None:
        return None
    if type(size) is not int or size < 0:
        raise InvalidInputError(f"{_input(name)}: 'binary_data_size' is {kind_of(size)}, wanted an integer of at least 0")
    if "data" in given:
        raise InvalidInputError(f"{_input(name)}: it has both 'data' and 'binary_data_size', wanted one of them")
    return size


def _flat(name: str, data: Any, shape: list[int]) -> Any:
    """Flatten lists that are nested as the shape says; leave a flat list as it is."""
    if data is None:
        raise InvalidInputError(f"{_input(name)}: it has neither 'data' nor 'binary_data_size'")
    for width in shape[1:]:
        if type(data) is not list or not data or type(data[0]) is not list:
            break
        if not {list}.issuperset(map(type, data)) or not {width}.issuperset(map(len, data)):
            raise InvalidInputError(
                f"{_input(name)}: 'data' is not nested as shape {shape} says; send it flat, in row-major order"
            )
        data = list(chain.from_iterable(data))
    return data


def _read_outputs(outputs: Any, binary: bool) -> dict[str, bool] | None:
    if outputs is None:
        return None
    if type(outputs) is not list or not outputs:
        raise InvalidInputError("reading the request: 'outputs' is empty or no list; leave it out to get all vectors")
    named: dict[str, bool] = {}
    for output in outputs:
        what = f"reading outputs[{len(named)}]"
        name = output.get("name") if type(output) is dict else None
        if type(name) is not str:
            raise InvalidInputError(f"{what}: wanted an object with a 'name'")
        if name in named:
            raise InvalidInputError(f"{what}: {name[:120]!r} is named twice; name each once")
        parameters = _object(output, what)
        if unsupported := {"classification", "shared_memory_region"} & parameters.keys():
            raise InvalidInputError(f"{what}: the parameter {min(unsupported)!r} is not supported")
        named[name] = _flag(parameters, "binary_data", what, default=binary)
    return named


def _object(given: dict[str, Any], what: str) -> dict[str, Any]:
    parameters = given.get("parameters")
    if parameters is None:
        return {}
    if type(parameters) is not dict:
        raise InvalidInputError(f"{what}: 'parameters' is {kind_of(parameters)}, wanted an object")
    return parameters


def _flag(parameters: dict[str, Any], name: str, what: str, *, default: bool) -> bool:
    value = parameters.get(name, default)
    if type(value) is not bool:
        raise InvalidInputError(f"{what}: {name!r} is {kind_of(value)}, wanted true or false")
    return value


def _input(name: str) -> str:
    return f"reading input {name[:120]!r}"
