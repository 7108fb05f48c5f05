"""The JSON part of an inference request, checked before tensors are read.

With binary tensors it has only names, datatypes, shapes and options. Clients with constant batch sizes repeat it, so a frontend
caches what follows from it. It is on the path of every other request: hence few calls.
"""

from collections.abc import Container, Mapping
from dataclasses import dataclass
from itertools import chain
from math import prod
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from hps.errors import InvalidDtypeError, InvalidInputError
from hps.serve.protocol.request_checks import (
    BAG_OPTIONS,
    check_bag_option,
    kind_of,
    parse_object,
    read_device,
    read_flag,
    read_id,
)

MAX_RANK = 8
CACHED_BYTES = 8192
"""Maximum length of a cached JSON part."""

_Dtype: TypeAlias = "np.dtype[np.signedinteger[Any] | np.floating[Any]]"
_INTEGERS: dict[str, _Dtype] = {"INT64": np.dtype("<i8"), "INT32": np.dtype("<i4")}
FP32: _Dtype = np.dtype("<f4")
_FLOATS = {"FP32": FP32}
_ANY = _INTEGERS | _FLOATS
_VECTORS: Final = ("FP32", "FP16", "BF16")


class RequestedOutput(NamedTuple):
    """How an output is sent."""

    binary: bool
    datatype: str | None  # of vectors; None: that of the request


@dataclass(frozen=True, slots=True)
class InputTensor:
    """An input as described by the header. *Immutable.*

    Attributes:
        count: product of the shape.
        start: start of its bytes in the binary part; -1 if `data` has its values.
        data: its values as a flat list, not yet checked.
        size: its bytes in the binary part.
    """

    name: str
    dtype: _Dtype
    shape: list[int]
    count: int
    start: int
    data: Any
    size: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class InferenceHeader:
    """A consistent JSON part. *Immutable*, and shared by requests; equal only to itself.

    Attributes:
        inputs: by name, in the order of the request.
        binary_size: total bytes of the inputs' binary data.
        requested: outputs by name; None if the request names no outputs.
        report: whether the answer includes a report.
        found: whether found-masks that `requested` does not name are requested, too.
        binary: whether outputs that `requested` does not name are sent as binary data.
        datatype: of vectors for which `requested` has none.
        numkeys: position of NUMKEYS among the inputs if KEYS is among them, too; else None.
        device_id: the requested device; None for any.
        bag_options: parameters of bags: `combiner` and the like, or `<table>.combiner`.
        bags: whether keys are in bags, unless tables have the names of offsets or weights.
    """

    request_id: str | None
    inputs: dict[str, InputTensor]
    binary_size: int
    requested: dict[str, RequestedOutput] | None
    report: bool
    found: bool
    binary: bool
    datatype: str
    numkeys: int | None
    device_id: int | None
    bag_options: dict[str, Any]
    bags: bool

    def vectors(self, name: str) -> tuple[bool, str] | None:
        """Return whether a vector output is sent as binary data, and its datatype; None if it is not requested.

        Raises:
            InvalidDtypeError: it is BF16, and not binary.
        """
        output = RequestedOutput(self.binary, None) if self.requested is None else self.requested.get(name)
        if output is None:
            return None
        datatype = output.datatype or self.datatype
        if datatype == "BF16" and not output.binary:
            expected = "expected binary data, or FP16 or FP32, which JSON can have"
            raise InvalidDtypeError(f"reading 'outputs': got datatype 'BF16' for {name[:120]!r} as JSON, {expected}")
        return output.binary, datatype

    def mask(self, name: str) -> bool | None:
        """Return whether a found-mask is sent as binary data; None if it is not requested.

        Raises:
            InvalidDtypeError: the request has a datatype of vectors for it.
        """
        output = None if self.requested is None else self.requested.get(name)
        if output is None:
            return self.binary if self.found else None
        if output.datatype is not None:
            got = f"got datatype {output.datatype!r} for the found-mask {name[:120]!r}"
            raise InvalidDtypeError(f"reading 'outputs': {got}, expected none: it is BOOL")
        return output.binary


def read_header(text: bytes) -> InferenceHeader:
    """Read the JSON part of an inference request.

    Raises:
        InvalidInputError, InvalidDtypeError: it is invalid; the message says where, and what was expected.
    """
    request = parse_object(text)
    request_id = read_id(request)
    parameters = read_parameters(request, "reading the request")
    binary = "binary_data_output" in parameters and read_flag(parameters, "binary_data_output", "reading 'parameters'")
    found = "found" in parameters and read_flag(parameters, "found", "reading 'parameters'")
    report = "report" in parameters and read_flag(parameters, "report", "reading 'parameters'")
    inputs, binary_size = read_inputs(request.get("inputs"))
    numkeys = list(inputs).index("NUMKEYS") if "NUMKEYS" in inputs and "KEYS" in inputs else None
    requested = read_outputs(outputs, binary) if (outputs := request.get("outputs")) is not None else None
    datatype = ("datatype" in parameters and _datatype(parameters, "reading 'parameters'")) or "FP32"
    device_id = read_device(parameters["DeviceID"], "reading 'parameters': 'DeviceID'") if "DeviceID" in parameters else None
    options = _bag_options(parameters)
    bags = bool(options)
    for name in inputs:
        bags = bags or name in ("OFFSETS", "WEIGHTS") or name.endswith((".offsets", ".weights"))
    return InferenceHeader(
        request_id, inputs, binary_size, requested, report, found, binary, datatype, numkeys, device_id, options, bags
    )


def remembered_bytes(text: bytes, parts: int, inputs: Mapping[str, InputTensor] = MappingProxyType({})) -> int:
    """Return an upper bound on the bytes of a JSON part and what was read of it.

    Args:
        parts: number of inputs, outputs and parameters.
        inputs: perhaps with values: an empty object has three characters and takes 72 bytes.
    """
    each = 6
    for tensor in inputs.values():
        each = max(each, 42 if tensor.start < 0 else 6)
    return 2000 + each * len(text) + 600 * parts


def reading_input(name: str) -> str:
    return f"reading input {name[:120]!r}"


def read_inputs(
    given: Any, floats: Container[str] = (), datatypes: Mapping[str, Any] | None = None
) -> tuple[dict[str, InputTensor], int]:
    """Read the inputs of a request: by name, in order; and the total bytes of their binary data.

    Args:
        given: `inputs` of the JSON part.
        floats: names of FP32 inputs. Weights may be FP32, and a table may have their name; the others are integers.
        datatypes: dtypes that any input may have, by their names; default: as `floats` says.

    Raises:
        InvalidInputError, InvalidDtypeError: the inputs are invalid.
    """
    if type(given) is not list or not given:
        raise InvalidInputError("reading the request: 'inputs' is missing or empty, expected a list of tensors")
    inputs: dict[str, InputTensor] = {}
    binary_size = 0
    for tensor in given:
        name = tensor.get("name") if type(tensor) is dict else None
        if type(name) is not str:
            raise InvalidInputError(f"reading inputs[{len(inputs)}]: expected an object whose 'name' is a string")
        if name in inputs:
            raise InvalidInputError(f"{reading_input(name)}: it is given twice; name each input once")
        weights = name == "WEIGHTS" or name.endswith(".weights")
        expected = datatypes if datatypes is not None else _FLOATS if name in floats else _ANY if weights else _INTEGERS
        dtype, shape = _dtype(name, tensor.get("datatype"), expected), _shape(name, tensor.get("shape"))
        count = prod(shape)
        size = _binary_size(name, tensor)
        if size is None:
            inputs[name] = InputTensor(name, dtype, shape, count, -1, _flat(name, tensor.get("data"), shape))
            continue
        if size != count * dtype.itemsize and dtype.kind != "O":  # of texts, their lengths say it
            raise InvalidInputError(
                f"{reading_input(name)}: got binary_data_size {size}, expected {count * dtype.itemsize} for shape {shape} "
                f"of {dtype}"
            )
        inputs[name] = InputTensor(name, dtype, shape, count, binary_size, None, size)
        binary_size += size
    return inputs, binary_size


def _dtype(name: str, datatype: Any, expected: Mapping[str, _Dtype]) -> _Dtype:
    if type(datatype) is not str or datatype not in expected:
        names = "INT64 (or INT32)" if expected is _INTEGERS else "FP32" if expected in (_FLOATS, _ANY) else ", ".join(expected)
        raise InvalidDtypeError(f"{reading_input(name)}: got datatype {_shown(datatype)}, expected {names}")
    return expected[datatype]


def _datatype(parameters: dict[str, Any], what: str) -> str | None:
    """Read the parameter `datatype`, of vectors; None if there is none."""
    datatype = parameters.get("datatype")
    if datatype is None:
        return None
    if type(datatype) is not str or datatype not in _VECTORS:
        raise InvalidDtypeError(f"{what}: got datatype {_shown(datatype)}, expected {', '.join(_VECTORS)}")
    return datatype


def _shown(datatype: Any) -> str:
    return repr(datatype[:40]) if isinstance(datatype, str) else kind_of(datatype)


def _shape(name: str, shape: Any) -> list[int]:
    if type(shape) is not list or not 0 < len(shape) <= MAX_RANK:
        got = f"{len(shape)} dimensions" if type(shape) is list else kind_of(shape)
        raise InvalidInputError(f"{reading_input(name)}: got shape {got}, expected a list of 1 to {MAX_RANK} integers")
    for width in shape:
        if type(width) is not int or width < 0:
            raise InvalidInputError(f"{reading_input(name)}: shape has {kind_of(width)}, expected integers of at least 0")
    return shape


def _binary_size(name: str, given: dict[str, Any]) -> int | None:
    parameters = given.get("parameters")
    if type(parameters) is not dict:
        parameters = read_parameters(given, reading_input(name))
    if "shared_memory_region" in parameters:
        raise InvalidInputError(
            f"{reading_input(name)}: shared memory is not supported; send the values as 'data' or as binary data"
        )
    size = parameters.get("binary_data_size")
    if size is None:
        return None
    if type(size) is not int or size < 0:
        raise InvalidInputError(
            f"{reading_input(name)}: 'binary_data_size' is {kind_of(size)}, expected an integer of at least 0"
        )
    if given.get("data") is not None:
        raise InvalidInputError(f"{reading_input(name)}: it has both 'data' and 'binary_data_size', expected one of them")
    return size


def _flat(name: str, data: Any, shape: list[int]) -> Any:
    """Flatten lists nested as in the shape; returns a flat list unchanged."""
    if data is None:
        raise InvalidInputError(f"{reading_input(name)}: it has neither 'data' nor 'binary_data_size'")
    for width in shape[1:]:
        if type(data) is not list or not data or type(data[0]) is not list:
            break
        if not {list}.issuperset(map(type, data)) or not {width}.issuperset(map(len, data)):
            raise InvalidInputError(
                f"{reading_input(name)}: 'data' is not nested as shape {shape} says; send it flat, in row-major order"
            )
        data = list(chain.from_iterable(data))
    return data


def _bag_options(parameters: dict[str, Any]) -> dict[str, Any]:
    options = {}
    for name, value in parameters.items():
        if (option := name.rpartition(".")[2]) in BAG_OPTIONS:
            check_bag_option(option, value, f"reading 'parameters': {name[:120]!r}")
            options[name] = value
    return options


def read_outputs(outputs: Any, binary: bool) -> dict[str, RequestedOutput] | None:
    """Read the outputs that a request names; None if it names none and so gets all.

    Raises:
        InvalidInputError, InvalidDtypeError: they are invalid.
    """
    if outputs is None:
        return None
    if type(outputs) is not list:
        raise InvalidInputError("reading the request: 'outputs' is not a list; leave it out to get all outputs")
    if not outputs:
        return None
    requested: dict[str, RequestedOutput] = {}
    for output in outputs:
        what = f"reading outputs[{len(requested)}]"
        name = output.get("name") if type(output) is dict else None
        if type(name) is not str:
            raise InvalidInputError(f"{what}: expected an object whose 'name' is a string")
        if name in requested:
            raise InvalidInputError(f"{what}: {name[:120]!r} is named twice; name each output once")
        parameters = read_parameters(output, what)
        if unsupported := {"classification", "shared_memory_region"} & parameters.keys():
            raise InvalidInputError(f"{what}: the parameter {min(unsupported)!r} is not supported")
        requested[name] = RequestedOutput(
            read_flag(parameters, "binary_data", what, default=binary), _datatype(parameters, what)
        )
    return requested


def read_parameters(given: dict[str, Any], what: str) -> dict[str, Any]:
    """Read the parameters of a request or tensor.

    Raises:
        InvalidInputError: they are not an object.
    """
    parameters = given.get("parameters")
    if parameters is None:
        return {}
    if type(parameters) is not dict:
        raise InvalidInputError(f"{what}: 'parameters' is {kind_of(parameters)}, expected an object")
    return parameters
