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

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from hps.errors import InvalidInputError
from hps.service.protocol.answer_layout import Inference, Layout, Output, Part
from hps.service.protocol.inference_header import Head, read_head
from hps.service.protocol.model_tables import ServedModel, check_counts

_MAX_LENGTH_DIGITS = 12
_KEPT_LAYOUTS = 256


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
    start = len(body) if header_length is None else header_length
    head = read_head(body[:start])
    head.check_size(None if header_length is None else len(body) - start)
    inputs = [tensor.values(body, start) for tensor in head.inputs.values()]
    counts = tuple(inputs[head.numkeys].tolist()) if head.numkeys is not None else None
    layout = (_kept_layout if head.kept else _lay_out)(head, counts, model, max_keys)
    return Inference(layout, inputs)


def _lay_out(head: Head, counts: tuple[int, ...] | None, model: ServedModel, max_keys: int) -> Layout:
    """Find the tables of a request, and lay out its answer. `counts` are the values of NUMKEYS, where it has them."""
    if counts is None:
        parts, outputs = _by_table(head, model, max_keys)
    else:
        parts, outputs = _by_numkeys(head, counts, model, max_keys)
    if head.wanted is not None:
        answered = {output.name for output in outputs}
        if unknown := [name for name in head.wanted if name not in answered]:
            raise InvalidInputError(f"reading 'outputs': got {unknown[0][:120]!r}, which no input of this request answers")
    answer: dict[str, Any] = {"model_name": model.name, "model_version": "1"}
    if head.request_id is not None:
        answer["id"] = head.request_id
    return Layout(answer, parts, outputs)


_kept_layout = lru_cache(_KEPT_LAYOUTS)(_lay_out)


def _by_numkeys(
    head: Head, counts: Sequence[int], model: ServedModel, max_keys: int
) -> tuple[Sequence[Part], Sequence[Output]]:
    """KEYS and NUMKEYS, as Triton's HPS backend takes them; which checks none of what is checked here."""
    if len(head.inputs) != 2:
        extra = next(name for name in head.inputs if name not in ("KEYS", "NUMKEYS"))
        raise InvalidInputError(f"reading 'inputs': got {extra[:120]!r} beside KEYS and NUMKEYS, wanted these two alone")
    for tensor in head.inputs.values():
        if len(tensor.shape) > 2 or (len(tensor.shape) == 2 and tensor.shape[0] != 1):
            raise InvalidInputError(f"reading input {tensor.name!r}: got shape {tensor.shape}, wanted [N] or [1, N]")
    if len(counts) != len(model.tables):
        known = ", ".join(table.table_name for table in model.tables)
        raise InvalidInputError(
            f"reading input 'NUMKEYS': got {len(counts)} numbers, wanted {len(model.tables)}, one a table of model "
            f"{model.name!r}: {known}"
        )
    if min(counts) < 0:
        raise InvalidInputError(f"reading input 'NUMKEYS': got {min(counts)}, wanted numbers of at least 0")
    keys = head.inputs["KEYS"].count
    if sum(counts) != keys:
        raise InvalidInputError(f"reading input 'NUMKEYS': its sum is {sum(counts)}, wanted {keys}, the number of KEYS")
    floats = check_counts(zip(model.tables, counts, strict=True), max_keys)
    as_vectors, as_mask = head.vectors("OUTPUT0"), head.mask("FOUND0")
    source = list(head.inputs).index("KEYS")
    parts, start = [], 0
    for index, (table, count) in enumerate(zip(model.tables, counts, strict=True)):
        parts.append(Part(index, table.dim, source, start, start + count, as_mask is not None))
        start += count
    outputs = []
    if as_vectors is not None:
        outputs.append(Output("OUTPUT0", "FP32", [floats], 0, floats, as_vectors))
    if as_mask is not None:
        outputs.append(Output("FOUND0", "BOOL", [keys], 0, keys, as_mask))
    return parts, outputs


def _by_table(head: Head, model: ServedModel, max_keys: int) -> tuple[Sequence[Part], Sequence[Output]]:
    """One input a table."""
    for alone, missing in (("KEYS", "NUMKEYS"), ("NUMKEYS", "KEYS")):
        if alone in head.inputs and not model.has_table(alone):
            raise InvalidInputError(f"reading 'inputs': got {alone} without {missing}, wanted both, or one input a table")
    indices = [model.table_index(name, "reading 'inputs'") for name in head.inputs]
    tensors = list(head.inputs.values())
    check_counts(((model.tables[index], tensor.count) for index, tensor in zip(indices, tensors, strict=True)), max_keys)
    parts, vectors, masks = [], [], []
    row = key = 0
    for source, (index, tensor) in enumerate(zip(indices, tensors, strict=True)):
        name, dim, count = tensor.name, model.tables[index].dim, tensor.count
        as_vectors, as_mask = head.vectors(name), head.mask(f"{name}.found")
        parts.append(Part(index, dim, source, 0, count, as_mask is not None))
        if as_vectors is not None:
            vectors.append(Output(name, "FP32", [*tensor.shape, dim], row, count * dim, as_vectors))
        row += count * dim
        if as_mask is not None:
            masks.append(Output(f"{name}.found", "BOOL", tensor.shape, key, count, as_mask))
            key += count
    return parts, vectors + masks
