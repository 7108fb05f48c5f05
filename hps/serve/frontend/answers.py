"""Plans of answers, and encoded answers, as frontends send them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from hps.regions.layout import Memory
from hps.serve.protocol.open_inference import AnswerLayout

HEAD_BYTES: Final = 768
"""Bytes before the JSON part of an answer for its HTTP head."""
SCRATCH_BYTES: Final = 2048
"""Bytes of the scratch in which the engine writes errors."""


class EncodedAnswer(NamedTuple):
    """An encoded answer."""

    text: Sequence[bytes]  # pieces of the JSON part; none if the first piece of `binary` contains it
    binary: Sequence[memoryview]  # views of the memory that follows
    text_bytes: int | None  # of the JSON part of a binary answer; None if all of it is JSON


@dataclass(frozen=True, eq=False, slots=True)
class Plan:
    """Layout of a slot for all binary requests with the same JSON part. *Immutable.* Offsets are relative to the slot."""

    descriptor: bytes  # header and segments, without the deployment's id
    keys_at: int
    keys_bytes: int  # of the request's binary part
    text: bytes  # JSON part of the answer
    vectors_at: int  # start of the vectors, or scores, that follow
    end: int  # end of the answer
    size: int  # bytes of the slot
    device: int | None  # the requested one
    answer: bytes  # head of the answer over HTTP, up to the request's id
    keys: int  # number of keys
    layout: AnswerLayout | None = None  # of an answer with 16-bit outputs, which the frontend converts
    numbers: tuple[tuple[str, int, int], ...] = ()  # vectors or scores as the engine writes them: dtype, offset, size

    def arrays(self, memory: Memory, slot: int) -> list[npt.NDArray[Any]]:
        """Return the vectors or scores in a slot, flat; views of its memory."""
        return [np.frombuffer(memory.view, dtype, size, slot + at) for dtype, at, size in self.numbers]
