"""Keys in bags, as inputs of an inference request: each bag is answered with one vector (`hps.Bags`).

- Beside `KEYS`, `OFFSETS` [T x (B + 1)] holds for each table in turn where its B bags begin among its keys, and where the last
  one ends. `WEIGHTS` FP32 has one number per key. `NUMKEYS` may be left out. Without `OFFSETS`, all bags have the same number
  of keys: `KEYS` is [T, B, hotness], or [B, hotness] for a model with one table. The answer is `OUTPUT0` [B, sum of dim[t]].
- Beside `<table>`, `<table>.offsets` [B + 1] and `<table>.weights` do the same for one table; without offsets, `<table>` is
  [B, hotness]. The answer is `<table>` [B, dim].

The request parameters `combiner`, `max_norm` and `padding_key` apply to all tables; `<table>.combiner` and the like to one.
Without offsets only a combiner makes bags: otherwise each key is answered with a vector, whatever the shape.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from hps.errors import InvalidDtypeError, InvalidInputError
from hps.serve.protocol.open_inference_header import FP32, InferenceHeader, InputTensor, reading_input
from hps.serve.protocol.request_checks import BAG_OPTIONS, ModelTables, check_counts, check_numkeys
from hps.tensors.bags import Bags, Pooling, pooling_of


@dataclass(frozen=True, slots=True)
class KeyRange:
    """The keys of one table in a request, and the layout of their vectors in the answer. *Immutable.*

    Attributes:
        table: index of the table.
        source: position of the input with the keys.
        start, stop: range within that input and within the weights.
        rows: number of vectors: one for each key or bag.
        masked: whether their found-mask is requested.
        step: bytes from the first vector to the first of the next table.
        strides: of the vectors, in bytes; None if they are contiguous.
        options: `combiner`, `max_norm` and `padding_key` of bags; None: every key gets a vector.
        offsets: position of the input with the offsets of bags; None: all bags have the same number of keys.
        first: start of the offsets within that input.
        weights: position of the input with the weights; None without weights.
    """

    table: int
    dim: int
    source: int
    start: int
    stop: int
    rows: int
    masked: bool = False
    step: int = 0
    strides: tuple[int, int] | None = None
    options: Mapping[str, Any] | None = None
    offsets: int | None = None
    first: int = 0
    weights: int | None = None

    def pooling(self, name: str, inputs: Sequence[np.ndarray]) -> Pooling:
        """Make the `Pooling` of keys in bags from the values of the request's inputs, checked.

        Raises:
            InvalidInputError: offsets, combiner or max_norm do not conform to `hps.Bags`.
        """
        keys, n = inputs[self.source][self.start : self.stop], self.stop - self.start
        weights = None if self.weights is None else inputs[self.weights][self.start : self.stop]
        offsets = None if self.offsets is None else inputs[self.offsets][self.first : self.first + self.rows + 1]
        shape = (n,) if self.offsets is not None else (self.rows, n // max(self.rows, 1))
        return pooling_of(name, Bags(keys, offsets, weights, **(self.options or {})), n, shape, on_cuda=False)


def states_ends(header: InferenceHeader, model: ModelTables) -> bool:
    """Return True if `OFFSETS` states each table's number of keys; False if a table is named `KEYS`."""
    return "KEYS" in header.inputs and "OFFSETS" in header.inputs and "KEYS" not in model.indices


def ends_of_bags(header: InferenceHeader, inputs: Sequence[np.ndarray], model: ModelTables) -> tuple[int, ...]:
    """Count each table's keys from `OFFSETS`."""
    bags = _bags_of_each(header.inputs["OFFSETS"], model)
    ends = inputs[list(header.inputs).index("OFFSETS")][bags :: bags + 1]
    return tuple(ends.tolist())


def read_bags(
    header: InferenceHeader, counts: Sequence[int] | None, model: ModelTables, max_keys: int
) -> tuple[bool, Sequence[KeyRange]] | None:
    """Find the bags of a request.

    Args:
        counts: number of keys per table, if they are concatenated and an input states it.
        max_keys: limit on the keys of all tables together, and on the bags.

    Returns:
        Whether the keys of all tables are concatenated, and the bags of each table; None if the inputs named like offsets or
        weights are tables.

    Raises:
        InvalidInputError, InvalidDtypeError: the inputs do not match; the message says which, and what was expected.
        UnknownTableError: an input names no table of the model.
        TooManyKeysError: more keys or bags than `max_keys`, or than a table's `max_keys`.
    """
    if not header.bag_options and model.indices.keys() >= header.inputs.keys():
        for tensor in header.inputs.values():
            _check_integers(tensor)
        return None
    for name in header.bag_options:
        if table := name.rpartition(".")[0]:
            model.table_index(table, "reading 'parameters'")
    if header.found:
        raise InvalidInputError("reading 'parameters': got 'found' for keys in bags, expected it for single keys alone")
    concatenated = "KEYS" in header.inputs and (counts is not None or "KEYS" not in model.indices)
    tables = _concatenated(header, counts, model) if concatenated else _by_table(header, model)
    check_counts([(model.tables[keys.table], keys.stop - keys.start) for keys in tables], max_keys)
    check_counts([(model.tables[keys.table], keys.rows) for keys in tables], max_keys, "bags")
    return concatenated, tables


def _concatenated(header: InferenceHeader, counts: Sequence[int] | None, model: ModelTables) -> Sequence[KeyRange]:
    inputs, places = header.inputs, {name: place for place, name in enumerate(header.inputs)}
    if extra := inputs.keys() - {"KEYS", "NUMKEYS", "OFFSETS", "WEIGHTS"}:
        raise InvalidInputError(f"reading 'inputs': got {min(extra)[:120]!r} beside KEYS, expected OFFSETS, WEIGHTS or NUMKEYS")
    keys, offsets, weights = inputs["KEYS"], inputs.get("OFFSETS"), inputs.get("WEIGHTS")
    if offsets is not None:
        _check_flat(keys)
        bags = _bags_of_each(offsets, model)
    else:
        _check_combiner(header, "KEYS", all("combiner" in _options(header, table.table_name) for table in model.tables))
        bags, counts = _fixed_bags(keys, counts, len(model.tables))
    counts = counts or ()
    source = ("NUMKEYS", "its sum") if "NUMKEYS" in inputs else ("OFFSETS", "the sum of the last one of each table")
    check_numkeys(counts, keys.count, model, *source)
    _check_weights(weights, keys)
    tables, start = [], 0
    for index, (table, count) in enumerate(zip(model.tables, counts, strict=True)):
        tables.append(
            KeyRange(
                index,
                table.dim,
                places["KEYS"],
                start,
                start + count,
                bags,
                options=_options(header, table.table_name),
                offsets=None if offsets is None else places["OFFSETS"],
                first=index * (bags + 1),
                weights=None if weights is None else places["WEIGHTS"],
            )
        )
        start += count
    return tables


def _by_table(header: InferenceHeader, model: ModelTables) -> Sequence[KeyRange]:
    inputs, places = header.inputs, {name: place for place, name in enumerate(header.inputs)}
    tables = []
    for source, (name, keys) in enumerate(inputs.items()):
        if name not in model.indices:
            table, _, kind = name.rpartition(".")
            if kind not in ("offsets", "weights") or table not in inputs:
                if name in ("KEYS", "NUMKEYS", "OFFSETS", "WEIGHTS") or table in model.indices:
                    raise InvalidInputError(f"reading 'inputs': got {name[:120]!r} without {table or 'KEYS'!r}, expected both")
                model.table_index(name, "reading 'inputs'")
            continue
        _check_integers(keys)
        of_bags = {kind: f"{name}.{kind}" for kind in ("offsets", "weights")}
        offsets, weights = (inputs.get(bag) if bag not in model.indices else None for bag in of_bags.values())
        options = _options(header, name)
        if offsets is not None:
            _check_flat(keys)
            _check_flat(offsets)
            bags = offsets.count - 1
            if bags < 0:
                raise InvalidInputError(f"{reading_input(offsets.name)}: got no offsets, expected one a bag, and the end")
        else:
            _check_combiner(header, name, "combiner" in options)
            bags = _fixed_bags(keys, None, 1)[0]
        _check_weights(weights, keys)
        index = model.indices[name]
        tables.append(
            KeyRange(
                index,
                model.tables[index].dim,
                source,
                0,
                keys.count,
                bags,
                options=options,
                offsets=None if offsets is None else places[offsets.name],
                weights=None if weights is None else places[weights.name],
            )
        )
    return tables


def _options(header: InferenceHeader, table: str) -> dict[str, Any]:
    given = header.bag_options
    found = {option: given.get(f"{table}.{option}", given.get(option)) for option in BAG_OPTIONS}
    return {option: value for option, value in found.items() if value is not None}


def _bags_of_each(offsets: InputTensor, model: ModelTables) -> int:
    """Count each table's bags from concatenated offsets."""
    tables, shape = len(model.tables), offsets.shape
    if len(shape) > 2 or (len(shape) == 2 and shape[0] not in (1, tables)) or not offsets.count or offsets.count % tables:
        raise InvalidInputError(
            f"{reading_input('OFFSETS')}: got shape {shape}, expected [{tables} x (B + 1)] or [{tables}, B + 1]: for each "
            f"table of model {model.name!r} in turn, where its B bags begin, and where the last one ends"
        )
    return offsets.count // tables - 1


def _fixed_bags(keys: InputTensor, counts: Sequence[int] | None, tables: int) -> tuple[int, Sequence[int]]:
    """Count each table's bags and keys if all bags have the same number of keys."""
    shape = keys.shape
    if len(shape) < 2 or prod(shape[:-2]) != tables:
        expected = "[B, hotness]" if tables == 1 else f"[{tables}, B, hotness]"
        raise InvalidInputError(f"{reading_input(keys.name)}: got shape {shape} without offsets, expected {expected}")
    expected_counts = [shape[-2] * shape[-1]] * tables
    if counts is not None and list(counts) != expected_counts:
        got = str(list(counts))[:80]
        raise InvalidInputError(f"{reading_input('NUMKEYS')}: got {got}, expected {expected_counts[0]} of each table: {shape}")
    return shape[-2], expected_counts


def _check_combiner(header: InferenceHeader, name: str, given: bool) -> None:
    if not given:
        offsets = "OFFSETS" if name == "KEYS" else f"{name}.offsets"
        got = ", ".join([*header.inputs, *header.bag_options])
        raise InvalidInputError(
            f"{reading_input(name)}: got neither {offsets!r} nor a combiner (but {got[:200]}), expected one of them to make "
            "bags of the keys; a request has bags of all its tables, or of none"
        )


def _check_flat(tensor: InputTensor) -> None:
    _check_integers(tensor)
    if len(tensor.shape) > 2 or (len(tensor.shape) == 2 and tensor.shape[0] != 1):
        raise InvalidInputError(f"{reading_input(tensor.name)}: got shape {tensor.shape} with offsets, expected [N] or [1, N]")


def _check_integers(tensor: InputTensor) -> None:
    if tensor.dtype is FP32:
        raise InvalidDtypeError(f"{reading_input(tensor.name)}: got datatype FP32, expected INT64 (or INT32)")


def _check_weights(weights: InputTensor | None, keys: InputTensor) -> None:
    if weights is None:
        return
    if weights.dtype is not FP32:
        raise InvalidDtypeError(f"{reading_input(weights.name)}: got integers, expected datatype FP32")
    if weights.count != keys.count:
        raise InvalidInputError(
            f"{reading_input(weights.name)}: got {weights.count} weights, expected {keys.count}, one for each of {keys.name!r}"
        )
