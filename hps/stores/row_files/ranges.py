"""Which part of a row file a share of its table reads.

The order of a file is that of the shares' hash, so the records of a share are a range, and a lookup of its keys reads the
buckets of that range alone. A local file may have nothing but these pages, and holes elsewhere: its head then names the share.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from hps.ground.shares import TableShare
from hps.stores.row_files import layout
from hps.stores.row_files.layout import PAGE_BYTES, FileHead, lowest_hash

Read = Callable[[int, int], npt.NDArray[np.uint8]]
"""Returns so many bytes of a file from one on."""

_AT_ONCE: Final = 64  # records of a bucket that are read together; keys may be chosen so that a bucket has any number
_ALL: Final = 1 << 64  # hashes


class RecordRange(NamedTuple):
    """The records of a file whose hashes lie in a range."""

    first: int
    last: int
    lowest: int  # hash of a key that may be in it
    highest: int  # below `lowest` if there is none
    buckets: tuple[int, int]  # that have these hashes
    around: tuple[int, int]  # the records of these buckets, with those of other shares

    @property
    def rows(self) -> int:
        return self.last - self.first

    def index_runs(self, head: FileHead) -> list[tuple[int, int]]:
        """Return the bytes of starts and fingerprints that a lookup may read, whole pages, as ranges that ascend."""
        if self.highest < self.lowest:
            return []
        starts = head.starts_at + 4 * self.buckets[0], head.starts_at + 4 * (self.buckets[1] + 1)
        prints = head.fingerprints_at + self.around[0], head.fingerprints_at + self.around[1]
        return [_pages(*run) for run in (starts, prints) if run[0] < run[1]]

    def runs(self, head: FileHead) -> list[tuple[int, int]]:
        """Return the bytes of all parts that a lookup or a walk may read, whole pages, as ranges that ascend."""
        first, last = (head.records_at + row * head.record_bytes for row in self.around)
        return [*([_pages(first, last)] if first < last else []), *self.index_runs(head)]


def _pages(start: int, stop: int) -> tuple[int, int]:
    return start // PAGE_BYTES * PAGE_BYTES, -(-stop // PAGE_BYTES) * PAGE_BYTES


def hash_bounds(*shares: TableShare | None) -> tuple[int, int]:
    """Return the range of hashes that all of these shares have, [lowest, end)."""
    bounds = [(lowest_hash(share.index, share.of), lowest_hash(share.index + 1, share.of)) for share in shares if share]
    return max((low for low, _ in bounds), default=0), min((end for _, end in bounds), default=_ALL)


def find_range(head: FileHead, bounds: tuple[int, int], read: Read) -> RecordRange:
    """Find the records with hashes of a range. Reads a few pages, those of both ends."""
    lowest, end = bounds
    if lowest >= end:
        return RecordRange(0, 0, 1, 0, (0, 0), (0, 0))
    if (lowest, end) == (0, _ALL):
        return RecordRange(0, head.rows, 0, _ALL - 1, (0, head.buckets), (0, head.rows))

    def below(start: int, stop: int, bound: int) -> int:
        """Count the records [start, stop) whose hash is below the bound."""
        size = head.record_bytes
        found = read(head.records_at + start * size, (stop - start) * size).view(np.uint32).reshape(-1, 2 + head.width)
        return int(layout.rank_of(found, np.uint64(bound)))

    def end_at(bucket: int, bound: int) -> tuple[int, int, int]:
        """Return the first record of a bucket, of the next one, and the first whose hash is not below the bound."""
        start, stop = (min(int(at), head.rows) for at in read(head.starts_at + 4 * bucket, 8).view(np.uint32))
        low, high = start, max(start, stop)
        if bound in (0, _ALL):  # no other share begins or ends here
            return start, high, high if bound else start
        while high - low > _AT_ONCE:
            middle = (low + high) // 2
            if below(middle, middle + 1, bound):
                low = middle + 1
            else:
                high = middle
        return start, max(start, stop), low + below(low, high, bound)

    buckets = [(bound >> 32) * head.buckets >> 32 for bound in (lowest, end - 1)]
    with ThreadPoolExecutor(2, thread_name_prefix="hps-row-file-range") as pool:  # each end takes some round trips elsewhere
        (start, _, first), (_, stop, last) = pool.map(end_at, buckets, (lowest, end))
    return RecordRange(first, max(first, last), lowest, end - 1, (buckets[0], buckets[1] + 1), (start, stop))


def compared(head: FileHead, read: Callable[[int, memoryview], None]) -> Read:
    """Read a part of a file by whole pages, each compared with its checksum.

    Args:
        read: fills a buffer from a byte on.

    Raises:
        ValueError: by the result: a page is damaged.
    """

    def of_pages(at: int, size: int) -> npt.NDArray[np.uint8]:
        start, stop = _pages(at, at + size)
        words, sums = np.empty((stop - start) // 8, np.uint64), np.empty((stop - start) // PAGE_BYTES, np.uint64)
        if not sums.size:
            return words.view(np.uint8)
        read(start, words.data.cast("B"))
        read(head.sums_at + 8 * ((start - head.records_at) // PAGE_BYTES), sums.data.cast("B"))
        if (page := layout.damaged_page(words, sums, 0, sums.size)) >= 0:
            raise ValueError(f"the page at byte {start + page * PAGE_BYTES:,} is damaged: it contradicts its checksum")
        return words.view(np.uint8)[at - start : at - start + size].copy()

    return of_pages
