"""Answers as fronts send them."""

from collections.abc import Sequence
from typing import Final, NamedTuple

HEAD_ROOM: Final = 768
"""Bytes before the JSON part of an answer, for its HTTP head."""


class EncodedAnswer(NamedTuple):
    """An answer as it is sent.

    Attributes:
        text: its JSON part, in pieces; none if `binary` is one piece that has it, too.
        binary: views of the memory that follows it.
        text_bytes: length of the JSON part of a binary answer; None if all of it is JSON.
    """

    text: Sequence[bytes]
    binary: Sequence[memoryview]
    text_bytes: int | None
