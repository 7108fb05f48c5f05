"""Makes the pages of a row file readable before a lookup reads them.

A page of a mapped file that is not in memory is read from the disk when it is touched, one after another: 1,000 rows that are
not there take 60 to 80 ms on a disk which reads 80,000 pages a second. So a lookup first asks for all pages that it will read,
in three steps (starts, fingerprints, records; see `layout.py`), and reads them then.

Asking costs 1 to 3 us a page, as much as ten rows of a file that is in memory. So nothing is asked while a file is not in
doubt, and the lookup counts the *major faults* of its thread instead, which are the pages that it waited for
(`reading.fetch_records`): a few, and the file is in doubt.
"""

import ctypes
import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from numba import int64, types, uint8

from hps.ground.kernels.numba_atomics import address_of, call_4
from hps.ground.kernels.numba_kernels import kernel, read_only
from hps.stores.row_files.layout import PAGE_BYTES
from hps.types import IndexArray

MOST_PAGES: Final = 4096
"""Maximum number of pages of one `require`."""
_SAMPLE: Final = 64  # pages of a `require` whose residency is queried
_SHARE_SAMPLE: Final = 1024  # pages of a file
_QUIET: Final = 16  # as many calls in a row that find nearly all pages there end the doubt
_FEW: Final = 64  # one page of so many may be away without doubt
_WILL_NEED: Final = 3  # MADV_WILLNEED
_RANDOM: Final = 1  # MADV_RANDOM

_library: Final = ctypes.CDLL(None)
_void: Any = types.void


def function_address(name: str) -> int:
    """Return the address of a C function for kernels; 0 if the system lacks it."""
    function = getattr(_library, name, None)
    return int(ctypes.cast(function, ctypes.c_void_p).value or 0) if function else 0


class Presence(ABC):
    """Makes parts of one file readable in place. *Thread-safe.*

    Attributes:
        doubtful: whether pages may be missing. While it is False, a lookup reads without `require`.
    """

    doubtful: bool

    @abstractmethod
    def require(self, pages: IndexArray) -> int:
        """Make pages readable, or have them read, so that the caller waits at most for the disk.

        Args:
            pages: (m,) int64, ascending, distinct, at most `MOST_PAGES`: numbers of pages of `PAGE_BYTES` of the file.

        Returns:
            How many of them were missing; may be an estimate.

        Raises:
            DatabaseError: they did not arrive in time.
        """

    def resident_share(self, runs: Sequence[tuple[int, int]]) -> float | None:
        """Estimate the share of the pages in ranges of the file's bytes that are in memory; None if unknown."""
        return None

    @abstractmethod
    def doubt(self) -> None:
        """Have pages required from now on: a lookup had to wait for some."""


class PageCache(Presence):
    """A complete local file, whose pages may not be in the page cache.

    In doubt, the residency of a sample of the pages decides: if one is missing, the kernel is told to read all of them, which
    it does at the queue depth of the disk, without threads.

    Args:
        mapped: (size,) uint8, the mapped file, from its start.
        owned: whether this process owns the file or may write to it. The kernel hides the residency of others' files.
    """

    def __init__(self, mapped: npt.NDArray[np.uint8], *, owned: bool) -> None:
        self.doubtful = False
        self._mapped = mapped
        self._base = mapped.ctypes.data
        self._owned = owned
        self._madvise, self._mincore = function_address("madvise"), function_address("mincore")
        self._quiet = 0  # calls in a row without need; a lost update does no harm

    def doubt(self) -> None:
        self.doubtful, self._quiet = bool(self._madvise), 0

    def resident_share(self, runs: Sequence[tuple[int, int]]) -> float | None:
        """As of `Presence`, in 1 to 3 ms; None if the system hides it."""
        firsts = np.array([start for start, _ in runs], np.int64) // PAGE_BYTES
        ends = np.cumsum([(stop - start) // PAGE_BYTES for start, stop in runs])
        if not (self._owned and self._mincore and len(runs)):
            return None
        drawn = np.random.default_rng().integers(0, ends[-1], _SHARE_SAMPLE)
        of = np.searchsorted(ends, drawn, "right")
        pages = drawn - np.append(0, ends)[of] + firsts[of]
        residency = np.empty(PAGE_BYTES, np.uint8)
        missing: int = _count_missing(self._mincore, self._base, mmap.PAGESIZE, pages, residency)
        return float(1 - missing / pages.size)

    def require(self, pages: IndexArray) -> int:
        sample = np.ascontiguousarray(pages[:: max(1, -(-pages.size // _SAMPLE))])
        missing = sample.size
        if self._owned and self._mincore:
            residency = np.empty(PAGE_BYTES, np.uint8)
            missing = _count_missing(self._mincore, self._base, mmap.PAGESIZE, sample, residency)
        if missing * _FEW > sample.size and self._owned:
            self._quiet = 0
        else:
            self._quiet += 1
            if self._quiet >= _QUIET:  # if residency is hidden, the next lookup finds out again
                self.doubtful = False
        if not missing:
            return 0
        _ask_for(self._madvise, self._base, mmap.PAGESIZE, pages)
        return -(-missing * pages.size // sample.size)


@kernel(int64, int64, int64, int64, read_only(int64[::1]), uint8[::1])
def _count_missing(mincore, base, page_bytes, pages, residency):  # type: ignore[no-untyped-def]
    """Count the pages that are not in memory. `residency` is scratch memory."""
    missing = 0
    for i in range(pages.size):
        at = base + pages[i] * PAGE_BYTES // page_bytes * page_bytes
        residency[0] = np.uint8(1)
        call_4(mincore, at, page_bytes, address_of(residency), np.int64(0))  # type: ignore[arg-type]
        missing += 1 - (residency[0] & np.uint8(1))
    return missing


@kernel(_void, int64, int64, int64, read_only(int64[::1]))
def _ask_for(madvise, base, page_bytes, pages):  # type: ignore[no-untyped-def]
    """Tell the kernel to read pages, adjacent ones at once. A failure is left to the read that follows."""
    first = 0
    while first < pages.size:
        last = first
        while last + 1 < pages.size and pages[last + 1] == pages[last] + 1:
            last += 1
        start = base + pages[first] * PAGE_BYTES // page_bytes * page_bytes
        call_4(madvise, start, base + (pages[last] + 1) * PAGE_BYTES - start, np.int64(_WILL_NEED), np.int64(0))  # type: ignore[arg-type]
        first = last + 1


def advise_random(mapped: npt.NDArray[np.uint8]) -> None:
    """Have a fault read its page alone, instead of megabytes around it."""
    _library.madvise(ctypes.c_void_p(mapped.ctypes.data), ctypes.c_size_t(mapped.size), _RANDOM)


def advise_needed(mapped: npt.NDArray[np.uint8]) -> None:
    """Have the kernel read a part, whose start is a multiple of the page size."""
    _library.madvise(ctypes.c_void_p(mapped.ctypes.data), ctypes.c_size_t(mapped.size), _WILL_NEED)


def may_see_residency(file: int) -> bool:
    """Return True if the kernel tells this process which pages of an open file are in memory."""
    return os.fstat(file).st_uid == os.geteuid() or os.geteuid() == 0 or os.access(f"/proc/self/fd/{file}", os.W_OK)


def presence_kernels() -> tuple[Callable[..., Any], ...]:
    """Return the kernels of `PageCache`."""
    return _count_missing, _ask_for
