"""The C library's heap: what is freed goes back to the system, rather than waiting in a process that serves for months.

By default glibc takes the largest block that was ever freed, up to 32 MB, as the size from which blocks are mapped on their
own. Smaller ones lie in heaps, up to eight for each processor, that shrink at their ends alone: one small object behind many
large ones keeps their memory.
Source: mallopt(3) and malloc_trim(3).
"""

import ctypes
from typing import Final

_TRIM_THRESHOLD: Final = -1
_MMAP_THRESHOLD: Final = -3
_ARENA_MAX: Final = -8
_MAPPED_BYTES: Final = 1 << 15  # a block that is used once costs microseconds more by its faults
_KEPT_BYTES: Final = 1 << 22
_library: Final = ctypes.CDLL(None)


def bound_heap(heaps: int) -> None:
    """Map blocks of 32 KB or more on their own, so that they end when they are freed, and have only so many heaps.

    Call this once, in a process that is the product's own, before it starts threads.
    """
    for name, value in ((_MMAP_THRESHOLD, _MAPPED_BYTES), (_TRIM_THRESHOLD, _KEPT_BYTES), (_ARENA_MAX, heaps)):
        _library.mallopt(name, value)


def trim_heap() -> None:
    """Give free pages of all heaps back to the system. Takes milliseconds, in which other threads may wait for memory."""
    _library.malloc_trim(0)
