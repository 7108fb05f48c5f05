"""Batches in small pieces, between which others have their turn.

RocksDB's binding holds the interpreter lock while it writes: two milliseconds for a thousand rows, in which no lookup begins or
ends. Whoever writes beside lookups says so, for its thread; then the same work is done in pieces of a tenth of a millisecond,
with a short sleep after each. It takes about twice as long, and lookups hardly notice it.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_PIECE_ROWS = 64
_PAUSE_S = 2e-5  # the kernel makes it some 80 us: enough for the lock to change hands


class _Here(threading.local):
    considerate = False


_here = _Here()


@contextmanager
def considerate() -> Iterator[None]:
    """Let this thread work in small pieces until the block ends."""
    _here.considerate = True
    try:
        yield
    finally:
        _here.considerate = False


def pieces(count: int, rows: int) -> Iterator[slice]:
    """Cut a batch into pieces of so many rows; in a considerate thread into small ones, with a pause between them."""
    if not _here.considerate:
        yield from (slice(start, start + rows) for start in range(0, count, rows))
        return
    rows = min(rows, _PIECE_ROWS)
    for start in range(0, count, rows):
        if start:
            time.sleep(_PAUSE_S)
        yield slice(start, start + rows)
