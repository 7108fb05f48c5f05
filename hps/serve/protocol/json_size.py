"""Large JSON: a bound on its parsed size, and answers written in pieces."""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import orjson

from hps.errors import TooManyKeysError

SMALL_JSON_BYTES = 65_536
"""Maximum length of JSON parsed on the event loop: half a millisecond, and a few megabytes."""

_SCANNED_BYTES = 1 << 18  # per step, to stay in the processor's cache
_VALUE_BYTES = 64  # a Python value, and its node in the parser's tree
_TEXT_BYTES = 6  # memory per byte of text: the parser's copy, and four per character of a string
_MARKS_PER_KEY, _OTHER_MARKS = 3, 65_536  # two per key in a list, as in a shape [n, 1]
_PIECE_ELEMENTS = 16_384  # a millisecond's work
_ONE_PIECE_BYTES = 1 << 20  # answers estimated up to this size are written in one piece

JSON_VECTOR_SHARE, JSON_MASK_SHARE = 5, 7
"""Bytes per byte of a vector or mask in an answer: 4 bytes plus up to 16 of text, or 1 plus 6."""


def parsed_bytes(text: bytes | memoryview, max_keys: int) -> int:
    """Bound the memory to parse JSON by the number of its commas, colons and brackets.

    Args:
        text: JSON, perhaps invalid.
        max_keys: limit on the keys of a request.

    Raises:
        TooManyKeysError: it has many more values than a request of that many keys.
    """
    marks = 1
    data = np.frombuffer(text, np.uint8)
    for start in range(0, data.size, _SCANNED_BYTES):
        piece = data[start : start + _SCANNED_BYTES]
        marks += sum(int(np.count_nonzero(found)) for found in (piece == 0x2C, piece == 0x3A, piece | 0x20 == 0x7B))  # , : [ {
    if marks > (most := _MARKS_PER_KEY * max_keys + _OTHER_MARKS):
        raise TooManyKeysError(
            f"reading the request: got JSON with {marks} commas, colons and brackets, expected at most {most} for {max_keys} "
            "keys (service.max_keys_per_request); send fewer at once"
        )
    return marks * _VALUE_BYTES + len(text) * _TEXT_BYTES


def write_json(value: Any, size: int) -> Iterable[bytes]:
    return json_pieces(value) if size > _ONE_PIECE_BYTES else (orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY),)


def json_pieces(value: Any) -> Iterator[bytes]:
    """Write JSON in pieces of at most a millisecond's work: dicts, lists, and rows of arrays."""
    if isinstance(value, dict):
        for place, (name, member) in enumerate(value.items()):
            yield (b"," if place else b"{") + orjson.dumps(name) + b":"
            yield from json_pieces(member)
        yield b"}" if value else b"{}"
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for place, member in enumerate(value):
            yield b"," if place else b"["
            yield from json_pieces(member)
        yield b"]"
    elif isinstance(value, np.ndarray) and value.size > _PIECE_ELEMENTS:
        rows = max(1, _PIECE_ELEMENTS * len(value) // value.size)
        for start in range(0, len(value), rows):
            text = orjson.dumps(value[start : start + rows], option=orjson.OPT_SERIALIZE_NUMPY)
            yield (b"," if start else b"[") + memoryview(text)[1:-1]
        yield b"]"
    else:
        yield orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
