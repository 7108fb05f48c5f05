"""The Open Inference Protocol v2 with binary tensors: decodes requests into lookups, and encodes answers.

A request names its keys in one of two ways:

- as in Triton's HPS backend: `KEYS` INT64 [N] or [1, N] holds the keys of table 0, then of table 1, ..., and `NUMKEYS`
  INT32 [T] or [1, T] their numbers. The answer is one flat `OUTPUT0` FP32 [sum of NUMKEYS[t] x dim[t]] and, if requested,
  `FOUND0` BOOL [N]. Its parameters are `NumSample` and `DeviceID`, integers as in that backend;
- one input per table, named like the table, INT64 of any shape s. The answer is an FP32 output of the same name and of shape
  s + [dim] and, if requested, `<table>.found` BOOL of shape s.

Keys may be in bags, which are answered with one vector each: see `bag_inputs`. The parameter `datatype` of an output, or of the
request for all vectors, asks for FP16 or BF16 in place of FP32.

The request parameter `"report": true` adds a report to the answer's parameters. `"found": true` requests the found-masks, as
does naming them in `outputs`. `DeviceID` selects the device.
Source: https://github.com/kserve/open-inference-protocol (inference_rest.md) and Triton's extension_binary_data.md.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import orjson

from hps.errors import InvalidDtypeError, InvalidInputError
from hps.ground.rows import to_16_bits
from hps.serve.logs.lookup_report import LookupBreakdown, Number
from hps.serve.protocol.bag_inputs import KeyRange, ends_of_bags, read_bags, states_ends
from hps.serve.protocol.json_size import JSON_MASK_SHARE, JSON_VECTOR_SHARE, write_json
from hps.serve.protocol.open_inference_header import (
    FP32,
    InferenceHeader,
    InputTensor,
    read_header,
    reading_input,
)
from hps.serve.protocol.request_checks import ModelTables, check_counts, check_numkeys, float32_array, int64_array
from hps.tensors.bags import Pooling
from hps.tensors.batch import Batch
from hps.types import BoolArray, FloatArray

_MAX_LENGTH_DIGITS = 12
_ALIGNMENT = 16  # of vectors in an answer, in bytes
_DTYPES = {name: np.dtype(dtype) for name, dtype in (("FP32", "<f4"), ("FP16", "<f2"), ("BF16", "<u2"), ("BOOL", "?"))}
_NARROW = ("FP16", "BF16")
_DEVICE = b'"DeviceID":'  # its quotes would be escaped within a JSON string
_LONGEST_ID = 2**31 - 1
_ID_DIGITS = len(str(_LONGEST_ID))


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """One output: elements [start, start + size) of all vectors or, if BOOL, of all masks. *Immutable.*

    `size` is the product of `shape`.
    """

    name: str
    shape: list[int]
    start: int
    size: int
    binary: bool
    datatype: str

    @property
    def size_bytes(self) -> int:
        return _DTYPES[self.datatype].itemsize * self.size

    @property
    def is_narrow(self) -> bool:
        return self.datatype in _NARROW


class AnswerLayout:
    """Memory layout of an answer: its JSON part, the vectors of all key ranges, then the requested masks. *Immutable.*

    It follows from the JSON part of a request and its keys per table, so that frontends cache it.

    Args:
        members: members of the JSON part, beside parameters and outputs.
        ranges: keys to look up, in the order of vectors and masks.
        outputs: vectors before masks.
        samples: the parameter `NumSample`; None for an answer without parameters.
        wants_report: whether the answer includes a report.

    Attributes:
        text: the JSON part, with device 0; empty if it is not written in advance.
        device_place: position in it for further digits of the device; 0 without a device.
        converts: whether an output has 16 bits.
        vectors_size, answer_size, size: bytes of the vectors in the answer, of the answer, and of the memory.
        lookup_at: where the lookup writes the vectors.
        held_bytes: upper bound on vectors, masks and text of the answer.
        scratch_bytes: bytes of the vectors of all keys in bags.
    """

    def __init__(
        self,
        members: dict[str, Any],
        ranges: Sequence[KeyRange],
        outputs: Sequence[OutputTensor],
        samples: int | None = None,
        *,
        wants_report: bool = False,
    ) -> None:
        self.ranges = tuple(ranges)
        self.outputs = tuple(outputs)
        self.wants_report = wants_report
        self._members = members
        self._samples = samples
        # If every output is binary, the JSON part lies before the vectors, padded with spaces to align them: the answer is sent
        # with one write and without a copy. Otherwise it is written once the vectors are known. If an output has 16 bits, the
        # lookup writes float32 behind the answer, and `convert` writes the vectors of the answer.
        looked_up = masks_size = self.scratch_bytes = 0
        for keys in ranges:
            looked_up += 4 * keys.dim * keys.rows
            masks_size += keys.stop - keys.start if keys.masked else 0
            self.scratch_bytes += 4 * keys.dim * (keys.stop - keys.start) if keys.options is not None else 0
        sent = vectors_sent = 0
        self.converts, is_binary = False, not wants_report
        for output in outputs:
            size = _DTYPES[output.datatype].itemsize * output.size
            sent += size
            vectors_sent += size if output.datatype != "BOOL" else 0
            self.converts |= output.datatype in _NARROW
            is_binary &= output.binary
        self.vectors_size = vectors_sent if self.converts else looked_up
        self.text = b""
        self.device_place = 0
        if is_binary and sent == self.vectors_size + masks_size:
            text = orjson.dumps(self.describe([None] * len(self.outputs), _LONGEST_ID))
            if samples is not None:
                self.device_place = text.index(_DEVICE) + len(_DEVICE)
                text = text.replace(_DEVICE + b"%d" % _LONGEST_ID, _DEVICE + _digits(0))
            self.text = text + b" " * (-len(text) % _ALIGNMENT)
        self.answer_size = self.size = len(self.text) + self.vectors_size + masks_size
        self.lookup_at = len(self.text)
        if self.converts:
            self.lookup_at = self.answer_size + -self.answer_size % _ALIGNMENT
            self.size = self.lookup_at + looked_up
        self.held_bytes = self.size if self.text else JSON_VECTOR_SHARE * looked_up + JSON_MASK_SHARE * masks_size

    def arrays(self, memory: np.ndarray) -> list[np.ndarray]:
        """Return the elements of each output, (size,), in the memory of an answer; BF16 as uint16."""
        arrays, end = [], len(self.text)
        for output in self.outputs:
            if output.datatype == "BOOL":
                place = len(self.text) + self.vectors_size + output.start
            else:
                place = end if self.converts else self.lookup_at + 4 * output.start
                end += output.size_bytes
            arrays.append(np.ndarray((output.size,), _DTYPES[output.datatype], memory, place))
        return arrays

    def convert(self, memory: np.ndarray) -> None:
        """Write the vectors of an answer with outputs of 16 bits, once the lookup has written its own.

        Args:
            memory: of the answer, (size,) uint8.
        """
        if not self.converts:
            return
        vectors = memory[self.lookup_at :].view(np.float32)
        for output, target in zip(self.outputs, self.arrays(memory), strict=True):
            values = vectors[output.start : output.start + output.size]
            if output.is_narrow:
                to_16_bits(values, target)
            elif output.datatype == "FP32":
                target.view(np.uint8)[:] = values.view(np.uint8)  # may be unaligned

    def describe(
        self, values: Sequence[FloatArray | BoolArray | None], device: int, report: Mapping[str, Number] = MappingProxyType({})
    ) -> dict[str, Any]:
        """Make the JSON part.

        Args:
            values: elements of each output, for those that are not binary.
            device: the device that answered.
            report: further parameters.
        """
        outputs: list[dict[str, Any]] = []
        for output, data in zip(self.outputs, values, strict=True):
            tensor: dict[str, Any] = {"name": output.name, "datatype": output.datatype, "shape": output.shape}
            if output.binary:
                tensor["parameters"] = {"binary_data_size": output.size_bytes}
            else:
                tensor["data"] = data
            outputs.append(tensor)
        of_triton = {} if self._samples is None else {"NumSample": self._samples, "DeviceID": device}
        parameters = {"parameters": {**report, **of_triton}} if of_triton or report else {}
        return {**self._members, **parameters, "outputs": outputs}


class Inference:
    """A decoded request. *One request.*

    Args:
        layout: layout of its answer.
        inputs: arrays that the layout's key ranges refer to.
        device_id: the requested device.

    Attributes:
        device_id: the requested device; after the lookup, the device that answered.
        batch: keys to look up; without outputs before `place`.
        text_bytes, memory_bytes: size of the JSON part in the memory of the answer, and of the rest.
        held_bytes: upper bound on what the answer takes beside that memory.
    """

    def __init__(
        self, layout: AnswerLayout, inputs: Sequence[np.ndarray], device_id: int | None, poolings: Sequence[Pooling]
    ) -> None:
        self.layout = layout
        self.device_id = device_id
        self.wants_report = layout.wants_report
        self.text_bytes = len(layout.text)
        self.memory_bytes = layout.size - self.text_bytes
        self.held_bytes = layout.scratch_bytes + (0 if layout.text else layout.held_bytes)
        keys = [inputs[key_range.source][key_range.start : key_range.stop] for key_range in layout.ranges]
        self.batch = Batch([key_range.table for key_range in layout.ranges], [array.size for array in keys], keys, ())
        self.batch.poolings = poolings

    def place(self, memory: np.ndarray) -> None:
        """Give the answer its memory, (layout.size,) uint8."""
        self._memory = memory
        layout = self.layout
        memory.data[: self.text_bytes] = layout.text
        outs, founds = [], []
        at, mask_at = layout.lookup_at, self.text_bytes + layout.vectors_size
        for keys in layout.ranges:
            outs.append(np.ndarray((keys.rows, keys.dim), np.float32, memory, at, keys.strides))
            at += keys.step
            founds.append(np.ndarray((keys.rows,), np.bool_, memory, mask_at) if keys.masked else None)
            mask_at += keys.rows * keys.masked
        self.batch.outs, self.batch.founds = outs, founds if any(keys.masked for keys in layout.ranges) else ()

    def convert(self) -> None:
        """Write outputs of 16 bits, after the lookup."""
        self.layout.convert(self._memory)

    @property
    def binary_answer(self) -> tuple[memoryview, int] | None:
        """Body of an answer whose outputs are all binary, written by the lookup; and the length of its JSON part."""
        layout = self.layout
        if not layout.text:
            return None
        body = self._memory.data[: layout.answer_size]
        if self.device_id and (place := layout.device_place):
            body[place : place + _ID_DIGITS] = _digits(self.device_id)
        return body, len(layout.text)

    def encode(self, report: LookupBreakdown | None = None) -> tuple[Iterable[bytes], Sequence[memoryview]]:
        """Encode an answer whose outputs are not all binary, after the lookup has written vectors and masks.

        Values that JSON cannot express (NaN, infinities) become null; binary outputs keep them.

        Args:
            report: summary of the lookup, if requested.

        Returns:
            The JSON part in pieces, and the binary outputs as views of the lookup's memory.
        """
        layout = self.layout
        values = [np.require(array, requirements="A") for array in layout.arrays(self._memory)]  # orjson needs aligned arrays
        binary = [data.view(np.uint8).data for data, output in zip(values, layout.outputs, strict=True) if output.binary]
        numbers = {} if report is None else report.flat()
        return write_json(layout.describe(values, self.device_id or 0, numbers), layout.held_bytes), binary


def _digits(device: int) -> bytes:
    return b"%-*d" % (_ID_DIGITS, device)


def parse_header_length(value: bytes | None, body_size: int) -> int | None:
    """Parse `Inference-Header-Content-Length`.

    Raises:
        InvalidInputError: it is not a number within the body.
    """
    if value is None:
        return None
    if not value.isdigit() or len(value) > _MAX_LENGTH_DIGITS or int(value) > body_size:
        raise InvalidInputError(
            f"reading the request: got Inference-Header-Content-Length {value[:40].decode('latin-1')!r}, expected a number "
            f"of bytes within the body of {body_size}"
        )
    return int(value)


class ReadRequest(NamedTuple):
    """A JSON part, and the layout of its answer; None: it depends on values of an input."""

    header: InferenceHeader
    layout: AnswerLayout | None


Reader: TypeAlias = Callable[[bytes, tuple[int, ...] | None, ModelTables, int], ReadRequest]
"""Reads a JSON part: `read_request`, or a cache of it."""


def read_request(text: bytes, counts: tuple[int, ...] | None, model: ModelTables, max_keys: int) -> ReadRequest:
    """Read the JSON part of an inference request, and lay out its answer.

    Args:
        counts: keys per table, if an input states them and was read.

    Raises:
        HPSError: as `decode_inference`.
    """
    header = read_header(text)
    known = counts is not None or not (header.numkeys is not None or (header.bags and states_ends(header, model)))
    return ReadRequest(header, lay_out(header, counts, model, max_keys) if known else None)


def decode_inference(
    body: bytes | bytearray, header_length: int | None, model: ModelTables, max_keys: int, read: Reader = read_request
) -> Inference:
    """Decode the body of an inference request, and lay out its answer.

    Args:
        body: the JSON part, then the binary part.
        header_length: bytes of the JSON part; None if the body is only JSON.
        max_keys: limit on the keys of all tables together.

    Raises:
        InvalidInputError, InvalidDtypeError: the body is invalid; the message says where, and what was expected.
        UnknownTableError: an input names no table of the model.
        TooManyKeysError: more keys than `max_keys`, or than a table's `max_keys`.
    """
    text = bytes(body if header_length is None else body[:header_length])  # no copy of bytes
    header, layout = read(text, None, model, max_keys)
    if len(body) - len(text) != header.binary_size:
        raise _size_error(header.binary_size, None if header_length is None else len(body) - len(text))
    inputs = [_values(tensor, body, len(text)) for tensor in header.inputs.values()]
    if layout is None:
        ends = tuple(inputs[header.numkeys].tolist()) if header.numkeys is not None else ends_of_bags(header, inputs, model)
        layout = read(text, ends, model, max_keys).layout
    if layout is None:
        raise RuntimeError("the layout of an answer depends on more than the keys per table")
    poolings: list[Pooling] = []
    if header.bags:
        tables = model.tables
        poolings = [keys.pooling(tables[keys.table].table_name, inputs) for keys in layout.ranges if keys.options is not None]
    return Inference(layout, inputs, header.device_id, poolings)


def _size_error(expected: int, got: int | None) -> InvalidInputError:
    if got is None:
        return InvalidInputError(
            "reading the request: an input has binary_data_size, but the request has no binary part; send the length of "
            "its JSON part in the header Inference-Header-Content-Length"
        )
    hint = "the body is cut short" if got < expected else "something follows the last binary input"
    return InvalidInputError(f"reading the request: got {got} bytes of binary data, expected {expected}; {hint}")


def _values(tensor: InputTensor, body: bytes | bytearray, binary_start: int) -> np.ndarray:
    """Copy the values of an input, aligned: (count,) int64, or float32 for FP32. The body is long enough."""
    kind = np.float32 if tensor.dtype is FP32 else np.int64
    if tensor.start >= 0:
        if not tensor.count:
            return np.empty(0, kind)
        # A copy: the JSON part has any length, so the bytes need not be aligned.
        return np.frombuffer(body, tensor.dtype, tensor.count, binary_start + tensor.start).astype(kind)
    what = reading_input(tensor.name)
    values = (float32_array if tensor.dtype is FP32 else int64_array)(tensor.data, what)
    if values.size != tensor.count:
        raise InvalidInputError(f"{what}: got {values.size} values, expected {tensor.count} for shape {tensor.shape}")
    if tensor.dtype.itemsize == 4 and kind is np.int64 and values.size and not -(2**31) <= values.min() <= values.max() < 2**31:
        raise InvalidDtypeError(f"{what}: a value does not fit INT32; send INT64")
    return values


def lay_out(header: InferenceHeader, counts: tuple[int, ...] | None, model: ModelTables, max_keys: int) -> AnswerLayout:
    """Find the tables of a request, and lay out its answer. counts: keys per table, if an input states them."""
    bags = read_bags(header, counts, model, max_keys) if header.bags else None
    if bags is not None:
        ranges, outputs = _by_bags(header, *bags, model)
    elif counts is None:
        ranges, outputs = _by_table(header, model, max_keys)
    else:
        ranges, outputs = _by_numkeys(header, counts, model, max_keys)
    if header.requested is not None:
        answered = {output.name for output in outputs}
        if unknown := [name for name in header.requested if name not in answered]:
            raise InvalidInputError(f"reading 'outputs': got {unknown[0][:120]!r}, which no input of this request answers")
    members: dict[str, Any] = {"model_name": model.name, "model_version": model.version}
    if header.request_id is not None:
        members["id"] = header.request_id
    samples = None if counts is None else sum(counts) // model.keys_per_sample
    if bags is not None:
        samples = bags[1][0].rows if bags[0] else None
    return AnswerLayout(members, ranges, outputs, samples, wants_report=header.report)


def _by_numkeys(
    header: InferenceHeader, counts: Sequence[int], model: ModelTables, max_keys: int
) -> tuple[Sequence[KeyRange], Sequence[OutputTensor]]:
    """Read KEYS and NUMKEYS as Triton's HPS backend, which checks none of this."""
    if len(header.inputs) != 2:
        extra = next(name for name in header.inputs if name not in ("KEYS", "NUMKEYS"))
        raise InvalidInputError(f"reading 'inputs': got {extra[:120]!r} beside KEYS and NUMKEYS, expected these two alone")
    for tensor in header.inputs.values():
        if len(tensor.shape) > 2 or (len(tensor.shape) == 2 and tensor.shape[0] != 1):
            raise InvalidInputError(f"{reading_input(tensor.name)}: got shape {tensor.shape}, expected [N] or [1, N]")
    keys = header.inputs["KEYS"].count
    check_numkeys(counts, keys, model)
    floats = check_counts(zip(model.tables, counts, strict=True), max_keys)
    wanted, mask_binary = header.vectors("OUTPUT0"), header.mask("FOUND0")
    source = list(header.inputs).index("KEYS")
    ranges, start = [], 0
    for index, (table, count) in enumerate(zip(model.tables, counts, strict=True)):
        step = 4 * count * table.dim
        ranges.append(KeyRange(index, table.dim, source, start, start + count, count, mask_binary is not None, step))
        start += count
    outputs = []
    if wanted is not None:
        outputs.append(OutputTensor("OUTPUT0", [floats], 0, floats, *wanted))
    if mask_binary is not None:
        outputs.append(OutputTensor("FOUND0", [keys], 0, keys, mask_binary, "BOOL"))
    return ranges, outputs


def _by_table(header: InferenceHeader, model: ModelTables, max_keys: int) -> tuple[Sequence[KeyRange], Sequence[OutputTensor]]:
    for alone, missing in (("KEYS", "NUMKEYS"), ("NUMKEYS", "KEYS")):
        if alone in header.inputs and alone not in model.indices:
            raise InvalidInputError(f"reading 'inputs': got {alone} without {missing}, expected both, or one input a table")
    counted = []
    for name, tensor in header.inputs.items():
        counted.append((model.tables[model.table_index(name, "reading 'inputs'")], tensor.count))
    check_counts(counted, max_keys)
    ranges, vectors, masks = [], [], []
    floats = keys = 0
    for source, (table, count) in enumerate(counted):
        name, dim = table.table_name, table.dim
        wanted, mask_binary = header.vectors(name), header.mask(f"{name}.found")
        ranges.append(KeyRange(model.indices[name], dim, source, 0, count, count, mask_binary is not None, 4 * count * dim))
        if wanted is not None:
            vectors.append(OutputTensor(name, [*header.inputs[name].shape, dim], floats, count * dim, *wanted))
        floats += count * dim
        if mask_binary is not None:
            masks.append(OutputTensor(f"{name}.found", header.inputs[name].shape, keys, count, mask_binary, "BOOL"))
            keys += count
    return ranges, vectors + masks


def _by_bags(
    header: InferenceHeader, concatenated: bool, tables: Sequence[KeyRange], model: ModelTables
) -> tuple[Sequence[KeyRange], Sequence[OutputTensor]]:
    """Lay out a vector per bag: rows of one output with the tables' columns side by side, or one output per table."""
    width, place = sum([keys.dim for keys in tables]), 0
    ranges, outputs = [], []
    for keys in tables:
        name, dim, count = model.tables[keys.table].table_name, keys.dim, keys.rows
        step, strides = (4 * dim, (4 * width, 4)) if concatenated and count else (4 * dim * count, None)
        ranges.append(replace(keys, step=step, strides=strides))
        if not concatenated and (wanted := header.vectors(name)) is not None:
            outputs.append(OutputTensor(name, [count, dim], place, count * dim, *wanted))
        place += count * dim
    if concatenated and (wanted := header.vectors("OUTPUT0")) is not None:
        outputs.append(OutputTensor("OUTPUT0", [tables[0].rows, width], 0, place, *wanted))
    return ranges, outputs
