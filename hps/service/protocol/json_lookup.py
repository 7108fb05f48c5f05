"""The lookup for people with curl: `{"tables": {"item": [1, 2]}}`, answered by `{"tables": {"item": [[...], [...]]}}`."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from hps.errors import InvalidInputError
from hps.service.protocol.json_size import JSON_MASK_SHARE, JSON_VECTOR_SHARE, write_json
from hps.service.protocol.request_checks import ModelTables, check_counts, int64_array, kind_of, parse_object, read_device
from hps.tensors.segments import Segment

_EXAMPLE = '{"tables": {"<table>": [1, 2, 3]}}'


class JSONLookup:
    """A request that was understood, with room for its vectors.

    Args:
        segments: what to look up.
        names: of their tables.
        device_id: the device that the request names.

    Attributes:
        segments, device_id: as given.
        held_bytes: the most that vectors, masks and the text of the answer take.
        binary_answer: none; an inference may have one.
    """

    binary_answer = None

    def __init__(self, segments: list[Segment], names: list[str], device_id: int | None) -> None:
        self.segments = segments
        self.device_id = device_id
        self._names = names
        self.held_bytes = 0
        for segment in segments:
            self.held_bytes += JSON_VECTOR_SHARE * segment.out.nbytes
            if segment.found is not None:
                self.held_bytes += JSON_MASK_SHARE * segment.found.nbytes

    def encode(self) -> tuple[Iterable[bytes], Sequence[memoryview]]:
        """Write the vectors and, where requested, the found-masks, in pieces; the second part of the answer is empty.

        A value that JSON cannot express (NaN, infinities) is null.
        """
        names, segments = self._names, self.segments
        answer: dict[str, Any] = {"tables": {name: one.out for name, one in zip(names, segments, strict=True)}}
        if segments[0].found is not None:
            answer["found"] = {name: one.found for name, one in zip(names, segments, strict=True)}
        return write_json(answer, self.held_bytes), ()


def decode_lookup(body: bytes | bytearray, model: ModelTables, max_keys: int) -> JSONLookup:
    """Turn the body into a lookup with room for its answer.

    Args:
        body: JSON: `tables` maps table names to lists of keys; `found` (optional) asks for the found-masks,
            `device` (optional) names the device that is to answer.
        model: the model that the request names.
        max_keys: of all tables together.

    Raises:
        InvalidInputError, InvalidDtypeError: the body is no such request; the message says where, and what was expected.
        UnknownTableError: the model has no such table.
        TooManyKeysError: more keys than `max_keys` or than a table's `max_keys`.
    """
    request = parse_object(body)
    if unknown := request.keys() - {"tables", "found", "device"}:
        got = f"got the member {min(unknown)[:120]!r}"
        raise InvalidInputError(f"reading the request: {got}, expected {_EXAMPLE} and, optionally, 'found' and 'device'")
    tables, with_found = request.get("tables"), request.get("found", False)
    if type(with_found) is not bool:
        raise InvalidInputError(f"reading the request: 'found' is {kind_of(with_found)}, expected true or false")
    device_id = read_device(request.get("device"), "reading the request: 'device'")
    if type(tables) is not dict or not tables:
        got = "an object without tables" if tables == {} else kind_of(tables)
        raise InvalidInputError(f"reading the request: 'tables' is {got}, expected {_EXAMPLE}")
    named = []
    for name, values in tables.items():
        index = model.table_index(name, "reading 'tables'")
        keys = int64_array(values, f"reading the keys of table {name!r}")
        named.append((index, keys))
    check_counts([(model.tables[index], keys.size) for index, keys in named], max_keys)
    segments = [
        Segment(
            index,
            keys,
            np.empty((keys.size, model.tables[index].dim), np.float32),
            np.empty(keys.size, np.bool_) if with_found else None,
        )
        for index, keys in named
    ]
    return JSONLookup(segments, list(tables), device_id)
