"""Requests for scores by the Open Inference Protocol, with the network's inputs by name.

Over `/v2/models/{model}/infer`, of a model that has a network, an input is named like the network's: INT64 (or INT32) keys of
a lookup, or a feature of one of `DATATYPES`, in the shape that the network says. Keys of a lookup in bags of any size are flat,
and have `<input>.offsets` INT64 [samples + 1] and perhaps `<input>.weights` FP32 beside them. The request parameter `timeout`,
in microseconds, is how long the scores are of use. With the parameter `vectors: true` a request is a lookup
(`open_inference.py`), as it is if its inputs are named like those of a lookup, and not all like the network's.

If a network has free sizes or guards, shapes are checked with the JSON part as far as possible, so that invalid requests
reach no queue. The engine checks the shapes of other networks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import orjson

from hps.errors import HPSError, InvalidDtypeError, InvalidInputError, TooManyKeysError
from hps.scoring.features import OFFSETS, WEIGHTS, ScoreInputs, read_request, refuse_unknown
from hps.scoring.signature import Feature, Output
from hps.serve.protocol.open_inference_header import (
    InputTensor,
    read_inputs,
    read_outputs,
    read_parameters,
    reading_input,
)
from hps.serve.protocol.request_checks import (
    PublishedNetwork,
    check_total,
    float32_array,
    float64_array,
    int64_array,
    kind_of,
    parse_object,
    read_device,
    read_id,
)
from hps.serve.protocol.schemas import Datatype

DATATYPES: Final[dict[str, "np.dtype[Any]"]] = {
    "FP32": np.dtype("<f4"),
    "FP16": np.dtype("<f2"),
    "FP64": np.dtype("<f8"),
    "INT64": np.dtype("<i8"),
    "INT32": np.dtype("<i4"),
    "INT16": np.dtype("<i2"),
    "INT8": np.dtype("i1"),
    "UINT8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}
MOST_TIMEOUT_US: Final = 3_600_000_000
_NAMES: Final[dict[str, Any]] = {dtype.name: name for name, dtype in DATATYPES.items()}
_BLANK = bytes(8)  # every value of an array without strides


@dataclass(frozen=True, slots=True, eq=False)
class ScoreHeader:
    """The JSON part of a request for scores. *Immutable*, and shared by requests.

    Attributes:
        samples: number of samples.
        sizes: named sizes, which shapes of outputs may use.
        keys: number of keys of all lookups.
        outputs: outputs in the answer, and whether they are binary.
        timeout_us: 0: none.
    """

    request_id: str | None
    inputs: Mapping[str, InputTensor]
    binary_size: int
    samples: int
    sizes: Mapping[str, int]
    keys: int
    outputs: tuple[tuple[Output, bool], ...]
    timeout_us: int
    device_id: int | None

    def shape_of(self, output: Output) -> tuple[int, ...]:
        """Return the shape of an output in the answer."""
        return self.samples, *output.shape_with(self.sizes)


def score_header(text: bytes, network: PublishedNetwork) -> ScoreHeader | None:
    """Read the JSON part of a request; None if it is a lookup.

    Raises:
        InvalidInputError, InvalidDtypeError: it is invalid, or `read_request` refuses the shapes.
        TooManyKeysError: more samples or keys than the model allows.
    """
    request = parse_object(text)
    parameters = read_parameters(request, "reading the request")
    given = request.get("inputs")
    names: list[Any] = [tensor.get("name") for tensor in given if type(tensor) is dict] if type(given) is list else [None]
    if parameters.get("vectors") is True or not all(type(name) is str for name in names):
        return None
    known = {name for feature in network.features_by_name for name in (feature, feature + OFFSETS, feature + WEIGHTS)}
    if not known.issuperset(names):
        if network.lookup_inputs.issuperset(names):
            return None
        hint = '; vectors of tables are asked with the parameter "vectors": true'
        refuse_unknown(f"scoring with model {network.model!r}", names, network.signature.features, hint)
    request_id = read_id(request)
    inputs, binary_size = read_inputs(request.get("inputs"), datatypes=DATATYPES)
    binary = parameters.get("binary_data_output") is True
    requested = read_outputs(request.get("outputs"), binary)
    outputs = {output.name: output for output in network.outputs}
    if requested is not None and (unknown := [name for name in requested if name not in outputs]):
        raise InvalidInputError(f"reading 'outputs': got {unknown[0][:120]!r}, expected some of {', '.join(outputs)}")
    chosen = tuple(
        (output, binary if requested is None else requested[output.name].binary)
        for output in network.outputs
        if requested is None or output.name in requested
    )
    if "datatype" in parameters or any(output.datatype for output in (requested or {}).values()):
        expected = 'expected none: scores have those of the network; vectors are asked with "vectors": true'
        raise InvalidInputError(f"reading the request: got the parameter 'datatype', {expected}")
    timeout = parameters.get("timeout", 0)
    if type(timeout) is not int or not 0 <= timeout <= MOST_TIMEOUT_US:
        raise InvalidInputError(
            f"reading 'parameters': 'timeout' is {kind_of(timeout)}, expected microseconds, at most an hour"
        )
    device = read_device(parameters.get("DeviceID"), "reading 'parameters': 'DeviceID'")
    shapes = {name: tensor.shape for name, tensor in inputs.items()}
    keys = count_keys(shapes, network)
    sizes: Mapping[str, int] = {}
    if network.signature.is_sized:
        read = _read_shapes(inputs, network)
        samples, sizes = read.samples, read.sizes
    else:
        samples = _samples(shapes, network)
    return ScoreHeader(request_id, inputs, binary_size, samples, sizes, keys, chosen, timeout, device)


def _samples(shapes: Mapping[str, Sequence[int]], network: PublishedNetwork) -> int:
    """Return the number of samples of an input. The engine compares it with the others."""
    rows = []
    for name, feature in network.features_by_name.items():
        if name not in shapes or feature.first != -1:
            continue
        count = shapes[name + OFFSETS][0] - 1 if name + OFFSETS in shapes else shapes[name][0]
        if not feature.per_request:
            rows = [count]
            break
        rows.append(count)
    samples = max(rows, default=0)
    if samples > network.max_samples:
        raise TooManyKeysError(
            f"reading the request: got {samples} samples, expected at most {network.max_samples} (max_batch_size)"
        )
    return samples


def _read_shapes(inputs: Mapping[str, InputTensor], network: PublishedNetwork) -> ScoreInputs:
    """Check shapes without values."""
    blank = {}
    for name, tensor in inputs.items():
        dtype = np.dtype(np.int64) if _is_widened(tensor, network) else tensor.dtype
        try:
            blank[name] = np.ndarray(tensor.shape, dtype, _BLANK, 0, (0,) * len(tensor.shape))
        except (ValueError, OverflowError) as error:
            raise TooManyKeysError(f"{reading_input(name)}: got shape {tensor.shape}, which is too large") from error
    return read_request(network.signature, blank, network.max_samples, network.model, blank=True)


def count_keys(shapes: Mapping[str, Sequence[int]], network: PublishedNetwork) -> int:
    """Return the number of keys of all lookups with inputs of these shapes."""
    features, found = network.signature.features, 0
    for place, column in network.signature.counted:
        if (shape := shapes.get(features[place].name)) is not None:
            found += prod(shape) if column is None else shape[0]
    return found


def _is_widened(tensor: InputTensor, network: PublishedNetwork) -> bool:
    """Return True if an input of 32 bits is used as 64: keys, offsets of bags, or a feature."""
    if tensor.dtype != np.int32:
        return False
    feature = network.features_by_name.get(tensor.name)
    return tensor.name.endswith(OFFSETS) if feature is None else feature.is_lookup or feature.dtype == "int64"


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


def decode_scores(
    body: bytes | bytearray,
    header_length: int | None,
    network: PublishedNetwork,
    max_keys: int,
    header: ScoreHeader | None = None,
) -> ScoreBody | None:
    """Decode the body of an inference request; None if it is a lookup.

    Args:
        header: its JSON part, if it was read.

    Raises:
        InvalidInputError, InvalidDtypeError: it is invalid.
        TooManyKeysError: it has more keys than `max_keys`, or too many samples.
    """
    start = len(body) if header_length is None else header_length
    if header is None and (header := score_header(bytes(body[:start]), network)) is None:
        return None
    if len(body) - start != header.binary_size:
        raise InvalidInputError(
            f"reading the request: got {len(body) - start} bytes of binary data, expected {header.binary_size}"
        )
    check_total(header.keys, max_keys)
    arrays = {}
    for name, tensor in header.inputs.items():
        values = _values(tensor, body, start)
        arrays[name] = (values.astype(np.int64) if _is_widened(tensor, network) else values).reshape(tensor.shape)
    return ScoreBody(header, arrays)


def needs_no_conversion(header: ScoreHeader, network: PublishedNetwork) -> bool:
    """Return True if the network takes all values as they are sent."""
    features = network.features_by_name
    return not any(name not in features or _is_widened(tensor, network) for name, tensor in header.inputs.items())


def _values(tensor: InputTensor, body: bytes | bytearray, start: int) -> npt.NDArray[Any]:
    if tensor.start >= 0:
        if not tensor.count:
            return np.empty(0, tensor.dtype)
        return np.frombuffer(body, tensor.dtype, tensor.count, start + tensor.start)
    return json_values(tensor.data, tensor.dtype, reading_input(tensor.name), tensor.count)


def json_values(data: Any, dtype: "np.dtype[Any]", what: str, count: int = -1) -> npt.NDArray[Any]:
    """Convert a flat JSON list to an array.

    Args:
        count: expected number of values; -1: any.

    Raises:
        InvalidInputError, InvalidDtypeError: it is not a list of values of the dtype.
    """
    if dtype.kind == "b":
        if type(data) is not list or not {bool}.issuperset(map(type, data)):
            raise InvalidDtypeError(f"{what}: expected a list of true and false")
        values: npt.NDArray[Any] = np.array(data, np.bool_)
    elif dtype == np.float32:
        values = float32_array(data, what)
    elif dtype.kind == "f":
        with np.errstate(over="ignore"):
            values = float64_array(data, what).astype(dtype)
        if not np.isfinite(values).all():
            raise InvalidInputError(f"{what}: a value does not fit {_NAMES[dtype.name]}")
    else:
        values = int64_array(data, what)
        limits = np.iinfo(dtype)
        if dtype != np.int64 and values.size and not limits.min <= values.min() <= values.max() <= limits.max:
            raise InvalidDtypeError(f"{what}: a value does not fit {_NAMES[dtype.name]}")
        values = values.astype(dtype, copy=False)
    if count >= 0 and values.size != count:
        raise InvalidInputError(f"{what}: got {values.size} values, expected {count}")
    return values


class DescribedTensor(NamedTuple):
    """A tensor of a request or an answer as described to clients; -1 is a free size.

    Attributes:
        shape: of a sample; of a tensor that does not begin with the samples, its own.
        sampled: whether it begins with the samples.
    """

    name: str
    datatype: Datatype
    shape: tuple[int, ...]
    optional: bool = False
    sampled: bool = True

    @property
    def full_shape(self) -> list[int]:
        return [-1, *self.shape] if self.sampled else [*self.shape]


def described(features: Sequence[Feature], outputs: Sequence[Output]) -> tuple[list[DescribedTensor], list[DescribedTensor]]:
    """Describe the inputs and outputs of a network."""
    inputs = []
    for feature in features:
        if feature.index:
            continue
        if not feature.is_lookup:
            shape, sampled = feature.tensor().shape or (), feature.first == -1
            inputs.append(
                DescribedTensor(feature.name, _NAMES[feature.dtype], (shape[1:] or (1,)) if sampled else shape, sampled=sampled)
            )
            continue
        inputs.append(DescribedTensor(feature.name, "INT64", (-1 if feature.bags else feature.hotness or 1,)))
        if feature.bags:
            inputs.append(DescribedTensor(feature.name + OFFSETS, "INT64", (1,), optional=True))
            inputs.append(DescribedTensor(feature.name + WEIGHTS, "FP32", (-1,), optional=True))
    return inputs, [_described_output(output) for output in outputs]


def _described_output(output: Output) -> DescribedTensor:
    shape = tuple(-1 if isinstance(size, str) else size for size in output.shape)
    return DescribedTensor(output.name, _NAMES[output.dtype], shape or (1,))


def answer_text(header: ScoreHeader, model: str, version: str, data: Mapping[str, Any]) -> dict[str, Any]:
    """Make the JSON part of an answer.

    Args:
        data: values of the outputs that are not binary.
    """
    members: dict[str, Any] = {"model_name": model, "model_version": version}
    if header.request_id is not None:
        members["id"] = header.request_id
    outputs = []
    for output, binary in header.outputs:
        shape = header.shape_of(output)
        tensor: dict[str, Any] = {"name": output.name, "datatype": _NAMES[output.dtype], "shape": shape}
        if binary:
            tensor["parameters"] = {"binary_data_size": prod(shape) * np.dtype(output.dtype).itemsize}
        else:
            tensor["data"] = data[output.name].reshape(-1)
        outputs.append(tensor)
    return {**members, "outputs": outputs}


def text_of(content: Mapping[str, Any]) -> bytes:
    """Write an answer. Values that JSON cannot express become null."""
    return orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY, default=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):  # orjson knows no such dtype, or needs contiguous memory
        return np.ascontiguousarray(value, np.float64 if value.dtype.kind == "f" else value.dtype)
    raise HPSError(f"writing an answer: got {type(value).__name__}")
