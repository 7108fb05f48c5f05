"""Plans of answers, and encoded answers, as frontends send them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from hps.serve.protocol.open_inference import AnswerLayout

HEAD_BYTES: Final = 768
"""Bytes before the JSON part of an answer for its HTTP head."""
SCRATCH_BYTES: Final = 2048
"""Bytes of the scratch in which the engine writes errors."""


class EncodedAnswer(NamedTuple):
    """An encoded answer.

    Attributes:
        text: pieces of its JSON part; none if the first piece of `binary` contains it.
        binary: views of the memory that follows.
        text_bytes: length of the JSON part of a binary answer; None if all of it is JSON.
    """

    text: Sequence[bytes]
    binary: Sequence[memoryview]
    text_bytes: int | None


@dataclass(frozen=True, eq=False, slots=True)
class Plan:
    """Layout of a slot for all binary requests with the same JSON part. *Immutable.* Offsets are relative to the slot.

    Attributes:
        descriptor: header and segments, without the deployment's id.
        keys_at, keys_bytes: place of the request's binary part.
        text: JSON part of the answer.
        vectors_at, end: place of the vectors, or scores, that follow it.
        size: bytes of the slot.
        device: the requested device.
        answer: head of the answer over HTTP, up to the request's id.
        keys: number of keys.
        layout: layout of an answer with 16-bit outputs, which the frontend converts; else None.
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
