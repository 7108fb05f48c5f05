"""Answers as fronts send them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from hps.serve.protocol.open_inference import AnswerLayout

HEAD_ROOM: Final = 768
"""Bytes before the JSON part of an answer, for its HTTP head."""
SCRATCH_ROOM: Final = 2048
"""Bytes for what the engine writes to the scratch."""


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


@dataclass(frozen=True, eq=False, slots=True)
class Plan:
    """What all binary requests with the same JSON part have in common. *Immutable.*

    Attributes:
        descriptor: header and segments; the id of the deployment is missing.
        keys_at, keys_bytes: where the binary part of the request goes.
        text: JSON part of the answer.
        vectors_at: of the vectors, or scores, that follow it.
        end: of the answer.
        size: of the slot.
        device: the requested device.
        answer: head of the answer over HTTP, up to the request's id.
        keys: number of keys.
        layout: of an answer with outputs of 16 bits, which the front converts; else None.
    """

    descriptor: bytes
    keys_at: int
    keys_bytes: int
    text: bytes
    vectors_at: int
    end: int
    size: int
    device: int | None
    answer: bytes
    keys: int
    layout: AnswerLayout | None = None
