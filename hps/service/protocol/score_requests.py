"""Requests for scores: the Open Inference Protocol with the network's inputs by name, and JSON rows for curl.

Over `/v2/models/{model}/infer`, of a model that has a network, an input is named like the network's and has its samples first:
INT64 (or INT32) keys of a lookup, FP32, FP16, INT64, INT32 or BOOL of a feature. Keys in bags of any size are flat, and have
`<input>.offsets` INT64 [samples + 1] and perhaps `<input>.weights` FP32 beside them. The request parameter `timeout`, in
microseconds, is how long the scores are of use. With the parameter `vectors: true` a request is a lookup (`open_inference.py`),
as it is if one of its inputs is none of the network's.

Over `/v1/models/{model}/score`, one object has what all samples share, and a list what each has of its own:

    {"user": {"history": [1, 2, 3], "age": 31}, "items": [{"id": 7}, {"id": 9}]}
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import orjson

from hps.errors import HPSError, InvalidDtypeError, InvalidInputError, TooManyKeysError
from hps.scoring.features import OFFSETS, WEIGHTS, Feature, Output
from hps.service.protocol.open_inference_header import InputTensor, read_inputs, read_outputs, read_parameters, reading_input
from hps.service.protocol.request_checks import (
    PublishedNetwork,
    flattened,
    float32_array,
    int64_array,
    kind_of,
    parse_object,
    read_device,
)

DATATYPES: Final[dict[str, "np.dtype[Any]"]] = {
    "FP32": np.dtype("<f4"),
    "FP16": np.dtype("<f2"),
    "INT64": np.dtype("<i8"),
    "INT32": np.dtype("<i4"),
    "BOOL": np.dtype("?"),
    "FP64": np.dtype("<f8"),
}
_NAMES = {dtype.name: name for name, dtype in DATATYPES.items()}
_TAKEN = {name: dtype for name, dtype in DATATYPES.items() if name != "FP64"}
_EXAMPLE = '{"user": {"<input>": 1}, "items": [{"<input>": 7}, {"<input>": 9}]}'
_MOST_TIMEOUT_US = 3_600_000_000
_CACHED = 1024
_BEYOND_FP16 = 65520.0  # and beyond, rounds to infinity


@dataclass(frozen=True, slots=True, eq=False)
class ScoreHeader:
    """The JSON part of a request for scores. *Immutable*, and shared by requests.

    Attributes:
        samples: number of samples.
        outputs: those that the answer has, and whether they are binary.
        timeout_us: 0: none.
    """

    request_id: str | None
    inputs: Mapping[str, InputTensor]
    binary_size: int
    samples: int
    outputs: tuple[tuple[Output, bool], ...]
    timeout_us: int
    device_id: int | None


@lru_cache(_CACHED)
def score_header(text: bytes, network: PublishedNetwork) -> ScoreHeader | None:
    """Read the JSON part of a request; None if it is a lookup.

    Raises:
        InvalidInputError, InvalidDtypeError: it is invalid.
        TooManyKeysError: more samples than the model allows.
    """
    request = parse_object(text)
    parameters = read_parameters(request, "reading the request")
    names = {one.get("name") for one in given if type(one) is dict} if type(given := request.get("inputs")) is list else {None}
    known = {name for one in network.features if not one.index for name in (one.name, one.name + OFFSETS, one.name + WEIGHTS)}
    if parameters.get("vectors") is True or not names <= known:
        return None
    request_id = request.get("id")
    if request_id is not None and type(request_id) is not str:
        raise InvalidInputError(f"reading the request: 'id' is {kind_of(request_id)}, expected a string")
    inputs, binary_size = read_inputs(request.get("inputs"), datatypes=_TAKEN)
    binary = parameters.get("binary_data_output") is True
    requested = read_outputs(request.get("outputs"), binary)
    outputs = {one.name: one for one in network.outputs}
    if requested is not None and (unknown := [name for name in requested if name not in outputs]):
        raise InvalidInputError(f"reading 'outputs': got {unknown[0][:120]!r}, expected some of {', '.join(outputs)}")
    chosen = tuple(
        (one, binary if requested is None else requested[one.name].binary)
        for one in network.outputs
        if requested is None or one.name in requested
    )
    if "datatype" in parameters or any(one.datatype for one in (requested or {}).values()):
        expected = 'expected none: scores have those of the network; vectors are asked with "vectors": true'
        raise InvalidInputError(f"reading the request: got the parameter 'datatype', {expected}")
    timeout = parameters.get("timeout", 0)
    if type(timeout) is not int or not 0 <= timeout <= _MOST_TIMEOUT_US:
        raise InvalidInputError(
            f"reading 'parameters': 'timeout' is {kind_of(timeout)}, expected microseconds, at most an hour"
        )
    device = read_device(parameters.get("DeviceID"), "reading 'parameters': 'DeviceID'")
    samples = _samples({name: one.shape for name, one in inputs.items()}, network)
    return ScoreHeader(request_id, inputs, binary_size, samples, chosen, timeout, device)


def _samples(shapes: Mapping[str, Sequence[int]], network: PublishedNetwork) -> int:
    """Return the number of samples that an input has, which the owner compares with the others."""
    rows = []
    for one in network.features:
        if one.name not in shapes:
            continue
        count = shapes[one.name + OFFSETS][0] - 1 if one.name + OFFSETS in shapes else shapes[one.name][0]
        if not one.per_request:
            rows = [count]
            break
        rows.append(count)
    samples = max(rows, default=0)
    if not 0 < samples <= network.max_samples:
        raise TooManyKeysError(
            f"reading the request: got {samples} samples, expected 1 to {network.max_samples} (max_batch_size)"
        )
    return samples


@dataclass(slots=True, eq=False)
class ScoreBody:
    """A decoded request for scores.

    Attributes:
        arrays: by name of the input, as the network takes them.
        rows: whether it came as JSON rows.
    """

    header: ScoreHeader
    arrays: dict[str, npt.NDArray[Any]]
    rows: bool = False

    @property
    def keys(self) -> int:
        return sum(one.size for name, one in self.arrays.items() if one.dtype == np.int64 and not name.endswith(OFFSETS))


def decode_scores(
    body: bytes | bytearray, header_length: int | None, network: PublishedNetwork, max_keys: int
) -> ScoreBody | None:
    """Decode the body of an inference request; None if it is a lookup.

    Raises:
        InvalidInputError, InvalidDtypeError: it is invalid.
        TooManyKeysError: it has more keys than `max_keys`, or too many samples.
    """
    text = bytes(body if header_length is None else body[:header_length])
    header = score_header(text, network)
    if header is None:
        return None
    if len(body) - len(text) != header.binary_size:
        raise InvalidInputError(
            f"reading the request: got {len(body) - len(text)} bytes of binary data, expected {header.binary_size}"
        )
    features = {one.name: one for one in network.features}
    arrays = {}
    for name, tensor in header.inputs.items():
        values = _values(tensor, body, len(text))
        feature = features.get(name)
        if values.dtype == np.int32 and (name.endswith(OFFSETS) or (feature is not None and feature.is_lookup)):
            values = values.astype(np.int64)
        arrays[name] = values.reshape(tensor.shape)
    found = ScoreBody(header, arrays)
    check_keys(found.keys, max_keys)
    return found


def keys_of_header(header: ScoreHeader, network: PublishedNetwork) -> int | None:
    """Return the number of keys of a request whose values the network takes as they are sent; None if it does not."""
    keys = 0
    features = {one.name: one for one in network.features}
    for name, one in header.inputs.items():
        feature = features.get(name)
        if feature is None or (feature.is_lookup and one.dtype != DATATYPES["INT64"]):
            return None  # offsets, weights, or narrow keys
        keys += one.count if feature.is_lookup else 0
    return keys


def check_keys(keys: int, max_keys: int) -> None:
    """Check the limit on the keys of a request.

    Raises:
        TooManyKeysError: there are more.
    """
    if keys > max_keys:
        expected = f"expected at most {max_keys} (service.max_keys_per_request); send fewer at once"
        raise TooManyKeysError(f"reading the request: got {keys} keys, {expected}")


def _values(tensor: InputTensor, body: bytes | bytearray, start: int) -> npt.NDArray[Any]:
    if tensor.start >= 0:
        if not tensor.count:
            return np.empty(0, tensor.dtype)
        return np.frombuffer(body, tensor.dtype, tensor.count, start + tensor.start)
    return _json_values(tensor.data, tensor.dtype, reading_input(tensor.name), tensor.count)


def _json_values(data: Any, dtype: "np.dtype[Any]", what: str, count: int = -1) -> npt.NDArray[Any]:
    if dtype.kind == "b":
        if type(data) is not list or not {bool}.issuperset(map(type, data)):
            raise InvalidDtypeError(f"{what}: expected a list of true and false")
        values: npt.NDArray[Any] = np.array(data, np.bool_)
    else:
        values = float32_array(data, what) if dtype.kind == "f" else int64_array(data, what)
        if dtype.itemsize == 4 and dtype.kind == "i" and values.size and not -(2**31) <= values.min() <= values.max() < 2**31:
            raise InvalidDtypeError(f"{what}: a value does not fit INT32")
        if dtype == np.float16 and values.size and max(values.max(), -values.min()) >= _BEYOND_FP16:
            raise InvalidInputError(f"{what}: a value does not fit FP16")
        values = values.astype(dtype)
    if count >= 0 and values.size != count:
        raise InvalidInputError(f"{what}: got {values.size} values, expected {count}")
    return values


def decode_rows(body: bytes | bytearray, network: PublishedNetwork, max_keys: int) -> ScoreBody:
    """Decode JSON rows.

    Raises:
        InvalidInputError, InvalidDtypeError: they are invalid; the message says where, and what was expected.
        TooManyKeysError: there are too many samples or keys.
    """
    request = parse_object(body)
    if unknown := request.keys() - {"user", "items", "timeout_us", "device"}:
        got = f"got the member {min(unknown)[:120]!r}"
        raise InvalidInputError(f"reading the request: {got}, expected {_EXAMPLE} and, optionally, timeout_us, device")
    user, items = request.get("user", {}), request.get("items", [{}] if "user" in request else None)
    if type(user) is not dict or type(items) is not list or not items or not {dict}.issuperset(map(type, items)):
        raise InvalidInputError(f"reading the request: got something else, expected {_EXAMPLE}")
    if len(items) > network.max_samples:
        raise TooManyKeysError(
            f"reading the request: got {len(items)} items, expected at most {network.max_samples} (max_batch_size)"
        )
    timeout: Any = request.get("timeout_us", 0)
    if type(timeout) is not int or not 0 <= timeout <= _MOST_TIMEOUT_US:
        raise InvalidInputError(
            f"reading the request: 'timeout_us' is {kind_of(timeout)}, expected an integer, at most an hour"
        )
    device = read_device(request.get("device"), "reading the request: 'device'")
    names = {one.name for one in network.features if not one.index}
    for given, where in ((user, "'user'"), *((one, f"items[{place}]") for place, one in enumerate(items))):
        if not names.issuperset(given):
            extra = min(given.keys() - names)
            raise InvalidInputError(f"reading {where}: got {extra[:120]!r}, expected some of {', '.join(sorted(names))}")
    arrays: dict[str, npt.NDArray[Any]] = {}
    for one in network.features:
        if one.index:
            continue
        if one.name in user:
            values = [user[one.name]] * (1 if one.per_request else len(items))
            if any(one.name in item for item in items):
                raise InvalidInputError(f"reading items: got {one.name!r}, which 'user' has, too; expected it once")
        else:
            values = [item[one.name] for item in items if one.name in item]
            if len(values) != len(items):
                first = next(place for place, item in enumerate(items) if one.name not in item)
                raise InvalidInputError(f"reading items[{first}]: {one.name!r} is missing, and 'user' has none")
        _add_rows(arrays, one, values)
    outputs = tuple((one, False) for one in network.outputs)
    header = ScoreHeader(None, {}, 0, len(items), outputs, timeout, device)
    found = ScoreBody(header, arrays, rows=True)
    check_keys(found.keys, max_keys)
    return found


def _add_rows(arrays: dict[str, npt.NDArray[Any]], one: Feature, values: list[Any]) -> None:
    what = f"reading {one.name!r}"
    if one.bags:
        lists = [value if type(value) is list else [value] for value in values]
        flat, offsets = flattened(lists, what, "a list of keys for each sample")
        arrays[one.name], arrays[one.name + OFFSETS] = int64_array(flat, what), offsets
        return
    if one.is_lookup:
        shape: tuple[int, ...] = () if one.hotness is None else (one.hotness,)
        dtype = np.dtype(np.int64)
    else:
        shape, dtype = (one.tensor().shape or ())[1:], np.dtype(one.dtype)
    if shape == (1,):
        values = [value if type(value) is list else [value] for value in values]
    for width in shape:
        if not {list}.issuperset(map(type, values)) or not {width}.issuperset(map(len, values)):
            raise InvalidInputError(f"{what}: expected lists of shape {list(shape)} for each sample")
        values = [inner for value in values for inner in value]
    flat_values = _json_values(values, dtype, what)
    arrays[one.name] = flat_values.reshape(-1, *shape)


class DescribedTensor(NamedTuple):
    """A tensor of a request or an answer, as clients are told of it. `shape` is that of a sample."""

    name: str
    datatype: Any
    shape: tuple[int, ...]
    optional: bool = False


def described(features: Sequence[Feature], outputs: Sequence[Output]) -> tuple[list[DescribedTensor], list[DescribedTensor]]:
    """Describe the inputs and outputs of a network."""
    inputs = []
    for one in features:
        if one.index:
            continue
        if not one.is_lookup:
            inputs.append(DescribedTensor(one.name, _NAMES[one.dtype], (one.tensor().shape or ())[1:] or (1,)))
            continue
        inputs.append(DescribedTensor(one.name, "INT64", (-1 if one.bags else one.hotness or 1,)))
        if one.bags:
            inputs.append(DescribedTensor(one.name + OFFSETS, "INT64", (1,), optional=True))
            inputs.append(DescribedTensor(one.name + WEIGHTS, "FP32", (-1,), optional=True))
    return inputs, [DescribedTensor(one.name, _NAMES[one.dtype], one.shape or (1,)) for one in outputs]


def answer_text(header: ScoreHeader, model: str, version: str, data: Mapping[str, Any]) -> dict[str, Any]:
    """Make the JSON part of an answer.

    Args:
        data: values of the outputs that are not binary.
    """
    members: dict[str, Any] = {"model_name": model, "model_version": version}
    if header.request_id is not None:
        members["id"] = header.request_id
    outputs = []
    for one, binary in header.outputs:
        shape = [header.samples, *one.shape]
        tensor: dict[str, Any] = {"name": one.name, "datatype": _NAMES[one.dtype], "shape": shape}
        if binary:
            tensor["parameters"] = {"binary_data_size": prod(shape) * np.dtype(one.dtype).itemsize}
        else:
            tensor["data"] = data[one.name].reshape(-1)
        outputs.append(tensor)
    return {**members, "outputs": outputs}


def rows_text(model: str, version: str, data: Mapping[str, Any]) -> dict[str, Any]:
    """Make the answer to JSON rows."""
    return {"model": model, "version": version, "outputs": dict(data)}


def text_of(content: Mapping[str, Any]) -> bytes:
    """Write an answer. Values that JSON cannot express become null."""
    return orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY, default=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):  # a dtype that orjson does not know, or memory that is not contiguous
        return np.ascontiguousarray(value, np.float64 if value.dtype.kind == "f" else value.dtype)
    raise HPSError(f"writing an answer: got {type(value).__name__}")
