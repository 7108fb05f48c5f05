"""Much JSON: a bound on what it takes once it is parsed, and answers that are written in pieces."""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import orjson

from hps.errors import TooManyKeysError

SMALL_JSON_BYTES = 65_536
"""JSON up to this length is parsed where it is read, in half a millisecond at most, and takes a few megabytes meanwhile."""

_SCANNED_BYTES = 1 << 18  # at once, so that it stays in the processor's cache
_VALUE_BYTES = 64  # a value as Python has it, and in the parser's own tree
_TEXT_BYTES = 6  # of memory for a byte of text: the parser's copy, and four for a character of a string
_MARKS_PER_KEY, _OTHER_MARKS = 3, 65_536  # a key in a list of its own, as a shape [n, 1] has it, takes two
_PIECE_ELEMENTS = 16_384  # a millisecond's work
_WHOLE_BYTES = 1 << 20  # of an answer, by the shares below, that is written at once

JSON_VECTOR_SHARE, JSON_MASK_SHARE = 5, 7
"""What an element takes in an answer, in sizes of itself: 4 bytes and up to 16 of text, or 1 and 6."""


def parsed_bytes(text: bytes | memoryview, max_keys: int) -> int:
    """A bound on the memory that it takes to parse JSON, from the number of its commas, colons and brackets.

    Args:
        text: the JSON; need not be valid.
        max_keys: that a request may have.

    Raises:
        TooManyKeysError: it has many more values than a request for that many keys.
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
    """Write JSON: all at once or in pieces, by the memory that it and its arrays take."""
    return json_pieces(value) if size > _WHOLE_BYTES else (orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY),)


def json_pieces(value: Any) -> Iterator[bytes]:
    """Write JSON in pieces, each of at most a millisecond's work: dicts, lists, and the rows of arrays."""
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
