"""Memory for large answers that is used again: the system zeroes fresh memory page by page, for as long as a copy takes."""

import sys
import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

LARGE_BYTES = 1 << 20
"""From here on an answer gets memory that is used again; the allocator does that by itself for less."""

_KEPT_SHARE = 4  # of the memory for clients, a fourth: what large requests may not take


class AnswerMemory:
    """Blocks of memory, each of which is lent anew once nobody refers to it any more. *Thread-safe.*

    Nobody gives a block back. It would be freed when its last array, view or buffer is gone, those of a lookup that timed out
    and of a client that reads slowly included; at that very moment it can be lent again.

    Args:
        limit_bytes: for clients; a fourth of them are kept.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._most_bytes = limit_bytes // _KEPT_SHARE
        self._blocks: list[Bytes] = []
        self._lock = threading.Lock()

    def take(self, size: int) -> Bytes:
        """Memory of this size, (size,) uint8; content unspecified. A block that is kept is at most twice as large."""
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


_IDLE = _references([np.empty(0, np.uint8)])[0]  # of a block that the list alone refers to
