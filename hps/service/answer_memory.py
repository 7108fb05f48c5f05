"""Reused memory for large answers: the kernel zeroes fresh pages, which takes as long as a copy."""

import sys
import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

LARGE_BYTES = 1 << 20
"""Minimum size of reused memory; below it the allocator reuses memory itself."""

_KEPT_SHARE = 4  # a fourth of the memory for clients, the part that large requests may not take


class AnswerMemory:
    """Blocks of memory that are reused once they are no longer referenced. *Thread-safe.*

    Blocks are not given back explicitly: a lookup that timed out or a slow client may hold the last array, view or buffer. The
    reference count tells when a block is free.

    Args:
        limit_bytes: limit of the memory for clients; blocks of up to a fourth of it are kept.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._most_bytes = limit_bytes // _KEPT_SHARE
        self._blocks: list[Bytes] = []
        self._lock = threading.Lock()

    def take(self, size: int) -> Bytes:
        """Return memory of this size, (size,) uint8; content unspecified. A reused block is at most twice as large."""
        if size < LARGE_BYTES:
            return np.empty(size, np.uint8)
        with self._lock:
            blocks = self._blocks
            idle = [place for place, count in enumerate(_references(blocks)) if count == _IDLE]
            for place in idle:
                if size <= blocks[place].size <= 2 * size:
                    return blocks[place][:size]
            room = self._most_bytes - sum([block.size for block in blocks])
            while idle and room < size <= self._most_bytes:
                room += blocks.pop(idle.pop()).size
            block: Bytes = np.empty(size, np.uint8)
            if room >= size:
                blocks.append(block)
            return block[:]


def _references(blocks: Sequence[Bytes]) -> list[int]:
    return [sys.getrefcount(block) for block in blocks]


_IDLE = _references([np.empty(0, np.uint8)])[0]  # references to a block that only the list refers to
