"""Settings of the C library's heap, so that a process that runs for months returns freed memory to the system.

Source: mallopt(3) and malloc_trim(3).
"""

import ctypes
from typing import Final

_TRIM_THRESHOLD: Final = -1
_MMAP_THRESHOLD: Final = -3
_ARENA_MAX: Final = -8
_MAPPED_BYTES: Final = 1 << 15  # page faults make a mapped block some microseconds slower at its first use
_KEPT_BYTES: Final = 1 << 22
_library: Final = ctypes.CDLL(None)


def bound_heap(heaps: int) -> None:
    """Map blocks of 32 KB or more separately, and limit the number of heaps.

    Call this once, before threads start, in a process that belongs to the service.
    """
    # By default glibc raises the size from which blocks are mapped separately to that of the largest freed block, up to 32 MB.
    # Smaller blocks lie in heaps, up to eight per processor, that shrink only at their ends: one small object behind many
    # large ones keeps their memory.
    for name, value in ((_MMAP_THRESHOLD, _MAPPED_BYTES), (_TRIM_THRESHOLD, _KEPT_BYTES), (_ARENA_MAX, heaps)):
        _library.mallopt(name, value)


def trim_heap() -> None:
    """Return free pages of all heaps to the system. Takes milliseconds, while other threads may wait for memory."""
    _library.malloc_trim(0)
