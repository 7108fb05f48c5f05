"""Lookups as JSON, for curl: `{"tables": {"item": [1, 2]}}`, answered by `{"tables": {"item": [[...], [...]]}}`.

Keys in bags: `{"bags": {"item": [[1, 2], []]}, "combiner": "mean"}`, answered in the same way, one vector per bag.
"""

from collections.abc import Iterable, Sequence
from operator import mul
from typing import Any

import numpy as np

from hps.errors import InvalidInputError
from hps.serve.logs.lookup_report import LookupBreakdown
from hps.serve.protocol.json_size import JSON_MASK_SHARE, JSON_VECTOR_SHARE, write_json
from hps.serve.protocol.request_checks import (
    BAG_OPTIONS,
    ModelTables,
    check_bag_option,
    check_counts,
    flattened,
    float32_array,
    int64_array,
    kind_of,
    parse_object,
    read_device,
    read_flag,
)
from hps.tensors.bags import Bags, pooling_of
from hps.tensors.batch import Batch
from hps.types import BoolArray

_ROWS_ALIGNED = 16
_EXAMPLE = '{"tables": {"<table>": [1, 2, 3]}}'
_BAGS_EXAMPLE = '{"bags": {"<table>": [[1, 2], [3]]}}'
_WEIGHTS_EXAMPLE = '{"weights": {"<table>": [[0.5, 2], [1]]}}'


class JSONLookup:
    """A decoded request, with room for its vectors.

    Args:
        batch: arrays of outputs and masks only have their sizes until `place`.
        names: names of the tables.

    Attributes:
        held_bytes: upper bound on vectors, masks and text of the answer, and on additional memory of a lookup of bags.
    """

    text_bytes = 0

    def __init__(self, batch: Batch, names: list[str], device_id: int | None, *, wants_report: bool) -> None:
        self.batch = batch
        self.device_id = device_id
        self.wants_report = wants_report
        self._names = names
        self._masks: list[BoolArray] = [found for found in batch.founds if found is not None]
        dims = [out.shape[1] for out in batch.outs]
        self.held_bytes = 4 * sum(map(mul, dims, batch.sizes)) if batch.poolings else 0
        self.held_bytes += JSON_VECTOR_SHARE * sum([out.nbytes for out in batch.outs])
        self.held_bytes += JSON_MASK_SHARE * sum([found.nbytes for found in self._masks])

    @property
    def memory_bytes(self) -> int:
        """Bytes of vectors and found-masks, for `place`."""
        vectors: int = sum([_ROWS_ALIGNED + out.nbytes for out in self.batch.outs])
        return vectors + sum(map(len, self._masks))

    def place(self, memory: np.ndarray) -> None:
        """Put vectors and masks into this memory, (memory_bytes,) uint8, aligned to 16 bytes."""
        at, outs, founds = 0, [], []
        for out in self.batch.outs:
            outs.append(np.ndarray(out.shape, np.float32, memory, at))
            at += -(-out.nbytes // _ROWS_ALIGNED) * _ROWS_ALIGNED
        for found in self._masks:
            founds.append(np.ndarray(found.shape, np.bool_, memory, at))
            at += found.size
        self.batch.outs, self.batch.founds = outs, founds

    def encode(self, report: LookupBreakdown | None = None) -> tuple[Iterable[bytes], Sequence[memoryview]]:
        """Write the vectors and, if requested, found-masks and report, in pieces; the second part is empty.

        Values that JSON cannot express (NaN, infinities) become null.
        """
        answer: dict[str, Any] = {"tables": dict(zip(self._names, self.batch.outs, strict=True))}
        if self.batch.founds:
            answer["found"] = dict(zip(self._names, self.batch.founds, strict=True))
        if report is not None:
            answer["report"] = report.nested()
        return write_json(answer, self.held_bytes), ()


def decode_lookup(body: bytes | bytearray, model: ModelTables, max_keys: int) -> JSONLookup:
    """Decode the body of a lookup and allocate its answer.

    Args:
        body: JSON: `tables` maps table names to lists of keys; optional are `found` (return the found-masks), `device` (the
            device to answer) and `report` (return a report). Or `bags` maps table names to lists of lists of keys, and
            optionally `weights` to numbers in the same lists; `combiner`, `max_norm` and `padding_key` apply to all tables, or
            are objects by table.
        max_keys: limit on the keys of all tables together.

    Raises:
        InvalidInputError, InvalidDtypeError: the body is invalid; the message says where, and what was expected.
        UnknownTableError: the model has no such table.
        TooManyKeysError: more keys or bags than `max_keys`, or than a table's `max_keys`.
    """
    request = parse_object(body)
    if "bags" in request:
        return _decode_bags(request, model, max_keys)
    if unknown := request.keys() - {"tables", "found", "device", "report"}:
        got = f"got the member {min(unknown)[:120]!r}"
        raise InvalidInputError(f"reading the request: {got}, expected {_EXAMPLE} and, optionally, found, device, report")
    with_found = read_flag(request, "found", "reading the request")
    device_id = read_device(request.get("device"), "reading the request: 'device'")
    tables = _by_table(request.get("tables"), "tables", _EXAMPLE)
    named = []
    for name, values in tables.items():
        index = model.table_index(name, "reading 'tables'")
        keys = int64_array(values, f"reading the keys of table {name!r}")
        named.append((index, keys))
    check_counts([(model.tables[index], keys.size) for index, keys in named], max_keys)
    indexes, flats = [index for index, _ in named], [keys for _, keys in named]
    sizes = [keys.size for keys in flats]
    outs = [np.empty((keys.size, model.tables[index].dim), np.float32) for index, keys in named]
    batch = Batch(indexes, sizes, flats, outs, [np.empty(n, np.bool_) for n in sizes] if with_found else ())
    return JSONLookup(batch, list(tables), device_id, wants_report=read_flag(request, "report", "reading the request"))


def _by_table(value: Any, member: str, example: str) -> dict[str, Any]:
    if type(value) is not dict or not value:
        got = f"an object without {member}" if value == {} else kind_of(value)
        raise InvalidInputError(f"reading the request: {member!r} is {got}, expected {example}")
    return value


def _decode_bags(request: dict[str, Any], model: ModelTables, max_keys: int) -> JSONLookup:
    if unknown := request.keys() - {"bags", "weights", "device", "report", *BAG_OPTIONS}:
        got, others = f"got the member {min(unknown)[:120]!r} beside 'bags'", ", ".join(BAG_OPTIONS)
        raise InvalidInputError(
            f"reading the request: {got}, expected {_BAGS_EXAMPLE} and, optionally, weights, {others}, device, report"
        )
    device_id = read_device(request.get("device"), "reading the request: 'device'")
    tables = _by_table(request["bags"], "bags", _BAGS_EXAMPLE)
    weights = _by_table(request["weights"], "weights", _WEIGHTS_EXAMPLE) if "weights" in request else {}
    for member in ("weights", *BAG_OPTIONS):
        if type(request.get(member)) is dict and (unknown := request[member].keys() - tables.keys()):
            raise InvalidInputError(f"reading {member!r}: got table {min(unknown)[:120]!r}, which 'bags' does not have")
    read = []
    for name, lists in tables.items():
        index, what = model.table_index(name, "reading 'bags'"), f"reading the bags of table {name!r}"
        flat, offsets = flattened(lists, what, "one for each bag")
        read.append((index, int64_array(flat, what), offsets))
    check_counts([(model.tables[index], keys.size) for index, keys, _ in read], max_keys)
    check_counts([(model.tables[index], offsets.size - 1) for index, _, offsets in read], max_keys, "bags")
    poolings, outs = [], []
    for name, (index, keys, offsets) in zip(tables, read, strict=True):
        numbers = None
        if name in weights:
            what = f"reading the weights of table {name!r}"
            flat, ends = flattened(weights[name], what, "one for each bag")
            numbers = float32_array(flat, what)
            if not np.array_equal(offsets, ends):
                raise InvalidInputError(f"{what}: got other lists than the bags have, expected a number for each key")
        options: dict[str, Any] = {option: _option(request, option, name) for option in BAG_OPTIONS}
        options = {option: value for option, value in options.items() if value is not None}
        poolings.append(pooling_of(name, Bags(keys, offsets, numbers, **options), keys.size, keys.shape, on_cuda=False))
        outs.append(np.empty((poolings[-1].count, model.tables[index].dim), np.float32))
    flats = [keys for _, keys, _ in read]
    batch = Batch([index for index, *_ in read], [keys.size for keys in flats], flats, outs, (), poolings)
    return JSONLookup(batch, list(tables), device_id, wants_report=read_flag(request, "report", "reading the request"))


def _option(request: dict[str, Any], option: str, table: str) -> Any:
    value = request.get(option)
    value = value.get(table) if type(value) is dict else value
    check_bag_option(option, value, f"reading the request: {option!r}")
    return value
