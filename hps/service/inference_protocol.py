"""The Open Inference Protocol v2 with binary tensors: requests to lookups, and their answers.

A request names its keys in one of two ways:

- as Triton's HPS backend has it: `KEYS` INT64 [N] or [1, N], the keys of table 0, then of table 1, ..., and `NUMKEYS`
  INT32 [T] or [1, T], how many belong to each; answered by one flat `OUTPUT0` FP32 [sum of NUMKEYS[t] x dim[t]] and, where
  asked, `FOUND0` BOOL [N];
- one input a table, by the table's name, INT64 of any shape s; answered by an FP32 output of the same name and shape
  s + [dim], and, where asked, `<table>.found` BOOL of shape s.

The found-mask is asked for by the request parameter `"found": true`, or by naming it in `outputs`.
Source: https://github.com/kserve/open-inference-protocol (inference_rest.md) and Triton's extension_binary_data.md.
"""

from dataclasses import dataclass
from typing import Any, TypeAlias

from hps.errors import InvalidInputError
from hps.service.inference import Inference, Output
from hps.service.served_model import ServedModel, check_counts
from hps.service.tensors import InputTensor, decode_inputs, kind_of, parse_object
from hps.types import KeyArray

_MAX_LENGTH_DIGITS = 12


@dataclass(slots=True)
class _Wanted:
    """Which outputs a request wants, and how. `named` is None when it names none and so wants all vectors."""

    named: dict[str, bool] | None
    found: bool
    binary: bool

    def vectors(self, name: str) -> bool | None:
        """Whether this output is to be binary; None when it is not wanted."""
        return self.binary if self.named is None else self.named.get(name)

    def mask(self, name: str) -> bool | None:
        """Whether this output is to be binary; None when it is not wanted."""
        if self.named is not None and name in self.named:
            return self.named[name]
        return self.binary if self.found else None


def parse_header_length(value: bytes | None, body_size: int) -> int | None:
    """Read `Inference-Header-Content-Length`.

    Raises:
        InvalidInputError: it is not a number within the body.
    """
    if value is None:
        return None
    if not value.isdigit() or len(value) > _MAX_LENGTH_DIGITS or int(value) > body_size:
        raise InvalidInputError(
            f"reading the request: got Inference-Header-Content-Length {value[:40].decode('latin-1')!r}, wanted a number "
            f"of bytes within the body of {body_size}"
        )
    return int(value)


def decode_request(body: bytes, header_length: int | None, model: ServedModel, max_keys: int) -> Inference:
    """Turn the body of an inference request into a lookup with room for its answer.

    Args:
        body: the JSON part, and after it the binary part.
        header_length: bytes of the JSON part, within the body; None when all of it is JSON.
        model: that the request is for.
        max_keys: of all tables together.

    Raises:
        InvalidInputError, InvalidDtypeError: the body is no such request; the message says where and what is wanted.
        UnknownTableError: an input names no table of the model.
        TooManyKeysError: more keys than `max_keys` or than a table's `max_keys`.
    """
    request = parse_object(body if header_length is None else memoryview(body)[:header_length])
    inputs = decode_inputs(request.get("inputs"), body, header_length)
    wanted = _wanted(request)
    request_id = request.get("id")
    if request_id is not None and type(request_id) is not str:
        raise InvalidInputError(f"reading the request: 'id' is {kind_of(request_id)}, wanted a string")
    read = _by_numkeys if "NUMKEYS" in inputs and "KEYS" in inputs else _by_table
    parts, masked, outputs = read(inputs, model, wanted, max_keys)
    if wanted.named is not None:
        answered = {output.name for output in outputs}
        if unknown := [name for name in wanted.named if name not in answered]:
            raise InvalidInputError(f"reading 'outputs': got {unknown[0][:120]!r}, which no input of this request answers")
    return Inference(model, request_id, parts, masked, outputs)


def _wanted(request: dict[str, Any]) -> _Wanted:
    parameters = request.get("parameters")
    if parameters is None:
        parameters = {}
    elif type(parameters) is not dict:
        raise InvalidInputError(f"reading the request: 'parameters' is {kind_of(parameters)}, wanted an object")
    binary = _flag(parameters, "binary_data_output", "reading 'parameters'", default=False)
    found = _flag(parameters, "found", "reading 'parameters'", default=False)
    outputs = request.get("outputs")
    if outputs is None:
        return _Wanted(None, found, binary)
    if type(outputs) is not list or not outputs:
        raise InvalidInputError("reading the request: 'outputs' is empty or no list; leave it out to get all vectors")
    named: dict[str, bool] = {}
    for place, output in enumerate(outputs):
        name = output.get("name") if type(output) is dict else None
        if type(name) is not str:
            raise InvalidInputError(f"reading outputs[{place}]: wanted an object with a 'name'")
        if name in named:
            raise InvalidInputError(f"reading outputs[{place}]: {name[:120]!r} is named twice; name each once")
        options = output.get("parameters")
        if options is not None and type(options) is not dict:
            raise InvalidInputError(f"reading outputs[{place}]: 'parameters' is {kind_of(options)}, wanted an object")
        options = options or {}
        if unsupported := {"classification", "shared_memory_region"} & options.keys():
            raise InvalidInputError(f"reading outputs[{place}]: the parameter {min(unsupported)!r} is not supported")
        named[name] = _flag(options, "binary_data", f"reading outputs[{place}]", default=binary)
    return _Wanted(named, found, binary)


def _flag(parameters: dict[str, Any], name: str, what: str, *, default: bool) -> bool:
    value = parameters.get(name, default)
    if type(value) is not bool:
        raise InvalidInputError(f"{what}: {name!r} is {kind_of(value)}, wanted true or false")
    return value


_Read: TypeAlias = tuple[list[tuple[int, KeyArray]], list[bool], list[Output]]
"""What a request asks for: tables and their keys, whose found-masks are wanted, and the outputs, vectors before masks."""


def _by_numkeys(inputs: dict[str, InputTensor], model: ServedModel, wanted: _Wanted, max_keys: int) -> _Read:
    """KEYS and NUMKEYS, as Triton's HPS backend takes them; which checks none of what is checked here."""
    if len(inputs) != 2:
        extra = next(name for name in inputs if name not in ("KEYS", "NUMKEYS"))
        raise InvalidInputError(f"reading 'inputs': got {extra[:120]!r} beside KEYS and NUMKEYS, wanted these two alone")
    for tensor in inputs.values():
        if len(tensor.shape) > 2 or (len(tensor.shape) == 2 and tensor.shape[0] != 1):
            raise InvalidInputError(f"reading input {tensor.name!r}: got shape {tensor.shape}, wanted [N] or [1, N]")
    keys, counts = inputs["KEYS"].values, inputs["NUMKEYS"].values.tolist()
    if len(counts) != len(model.tables):
        known = ", ".join(table.table_name for table in model.tables)
        raise InvalidInputError(
            f"reading input 'NUMKEYS': got {len(counts)} numbers, wanted {len(model.tables)}, one a table of model "
            f"{model.name!r}: {known}"
        )
    if min(counts) < 0:
        raise InvalidInputError(f"reading input 'NUMKEYS': got {min(counts)}, wanted numbers of at least 0")
    if sum(counts) != keys.size:
        raise InvalidInputError(f"reading input 'NUMKEYS': its sum is {sum(counts)}, wanted {keys.size}, the number of KEYS")
    floats = check_counts(zip(model.tables, counts, strict=True), max_keys)
    as_vectors, as_mask = wanted.vectors("OUTPUT0"), wanted.mask("FOUND0")
    parts, start = [], 0
    for index, count in enumerate(counts):
        parts.append((index, keys[start : start + count]))
        start += count
    outputs = []
    if as_vectors is not None:
        outputs.append(Output("OUTPUT0", "FP32", [floats], 0, floats, as_vectors))
    if as_mask is not None:
        outputs.append(Output("FOUND0", "BOOL", [keys.size], 0, keys.size, as_mask))
    return parts, [as_mask is not None] * len(parts), outputs


def _by_table(inputs: dict[str, InputTensor], model: ServedModel, wanted: _Wanted, max_keys: int) -> _Read:
    """One input a table."""
    for alone, missing in (("KEYS", "NUMKEYS"), ("NUMKEYS", "KEYS")):
        if alone in inputs and not model.has_table(alone):
            raise InvalidInputError(f"reading 'inputs': got {alone} without {missing}, wanted both, or one input a table")
    parts = [(model.table_index(name, "reading 'inputs'"), tensor.values) for name, tensor in inputs.items()]
    check_counts([(model.tables[index], keys.size) for index, keys in parts], max_keys)
    masked, vectors, masks = [], [], []
    row = key = 0
    for (name, tensor), (index, keys) in zip(inputs.items(), parts, strict=True):
        dim = model.tables[index].dim
        as_vectors, as_mask = wanted.vectors(name), wanted.mask(f"{name}.found")
        if as_vectors is not None:
            vectors.append(Output(name, "FP32", [*tensor.shape, dim], row, keys.size * dim, as_vectors))
        row += keys.size * dim
        masked.append(as_mask is not None)
        if as_mask is not None:
            masks.append(Output(f"{name}.found", "BOOL", tensor.shape, key, keys.size, as_mask))
            key += keys.size
    return parts, masked, vectors + masks
