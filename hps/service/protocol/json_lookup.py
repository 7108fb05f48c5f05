"""The lookup for people with curl: `{"tables": {"item": [1, 2]}}`, answered by `{"tables": {"item": [[...], [...]]}}`."""

from typing import Any

import numpy as np
import orjson

from hps.errors import InvalidInputError
from hps.service.protocol.json_values import int64_array, kind_of, parse_object
from hps.service.protocol.model_tables import ServedModel, check_counts
from hps.tensors.segments import Segment

_EXAMPLE = '{"tables": {"<table>": [1, 2, 3]}}'


def decode_lookup(body: bytes, model: ServedModel, max_keys: int) -> list[Segment]:
    """Turn the body into a lookup with room for its answer.

    Args:
        body: JSON: `tables` maps table names to lists of keys; `found` (optional) asks for the found-masks.
        model: that the request is for.
        max_keys: of all tables together.

    Raises:
        InvalidInputError, InvalidDtypeError: the body is no such request; the message says where and what is wanted.
        UnknownTableError: the model has no such table.
        TooManyKeysError: more keys than `max_keys` or than a table's `max_keys`.
    """
    request = parse_object(body)
    if unknown := request.keys() - {"tables", "found"}:
        raise InvalidInputError(f"reading the request: got the member {min(unknown)[:120]!r}, wanted {_EXAMPLE} and 'found'")
    tables, found = request.get("tables"), request.get("found", False)
    if type(found) is not bool:
        raise InvalidInputError(f"reading the request: 'found' is {kind_of(found)}, wanted true or false")
    if type(tables) is not dict or not tables:
        got = "an object without tables" if tables == {} else kind_of(tables)
        raise InvalidInputError(f"reading the request: 'tables' is {got}, wanted {_EXAMPLE}")
    indices = [model.table_index(name, "reading 'tables'") for name in tables]
    keys = [int64_array(values, f"reading the keys of table {name!r}") for name, values in tables.items()]
    check_counts([(model.tables[index], part.size) for index, part in zip(indices, keys, strict=True)], max_keys)
    return [
        Segment(
            index,
            part,
            np.empty((part.size, model.tables[index].dim), np.float32),
            np.empty(part.size, np.bool_) if found else None,
        )
        for index, part in zip(indices, keys, strict=True)
    ]


def encode_lookup(segments: list[Segment], model: ServedModel) -> bytes:
    """Write the vectors, and the found-masks where asked. A value that JSON cannot write (NaN, infinities) is null."""
    names = [model.tables[segment.table].table_name for segment in segments]
    answer: dict[str, Any] = {"tables": {name: segment.out for name, segment in zip(names, segments, strict=True)}}
    if segments[0].found is not None:
        answer["found"] = {name: segment.found for name, segment in zip(names, segments, strict=True)}
    return orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY)
