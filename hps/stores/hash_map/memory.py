"""The memory of a hash map table: pages that never move, slabs of vectors, and bucket arrays that grow."""

import mmap
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil, sqrt
from typing import Final

import numpy as np
import numpy.typing as npt

from hps.errors import DatabaseError
from hps.stores.hash_map.kernels import count_by_hash, mark_keys, rehash, retire
from hps.stores.hash_map.layout import (
    BUCKET_BYTES,
    CHANGES_LIMIT,
    EXTENT_ROW,
    FRESH_ROWS,
    LIST_BITS,
    LISTS,
    LOAD_ROWS,
    RESERVED_ROWS,
    STRIPES,
    VERSION_BYTES,
)
from hps.types import KeyArray

PAGE_BYTES: Final = mmap.PAGESIZE
HUGE_PAGE_BYTES: Final = 2 << 20
MAX_ROWS: Final = 2**32 - 2**16
"""Maximum rows of a table: row numbers are uint32, one of them is a mark, and slabs are whole."""
STAMP_BYTES: Final = 4

# Rows from which extents use huge pages: 10 to 15 % more keys/s at 8 M rows, at most 2 bytes per row unused.
_HUGE_PAGES_FROM_ROWS = 1 << 20
# The same for reserved rows, which are soon used.
_HUGE_PAGES_FROM_BYTES = 64 << 20
_SLAB_BYTES = 1 << 20
_LEAST_SLAB_ROWS = 1 << 10
_MOST_SLAB_ROWS = 1 << 16
# Minimum size of a stripe, so that partly used pages and the rows at its ends are few.
_STRIPE_BYTES = 1 << 20
_MOST_STRIPES = 1 << 10
# Reserved rows per extra row: of 2^24 rows, 0.4 % are then outside their stripe, instead of 14 %.
_SPARE_SHARE = 256
# Maximum number of keys that a table may lack below its highest one to be dense: each costs devices up to a stripe.
_MOST_HOLES = 64
# Rows of a dense table per row whose key is elsewhere.
_OUTSIDE_SHARE = 16
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)

SEGMENTED_FROM: Final = 4096
"""Buckets from which a table has segments, each of several pages, so that rounding up to pages costs little."""
_SEGMENT_BITS: Final = 4
_GROW_GENTLY_FROM: Final = 512
_HUGE_FROM_BYTES: Final = 8 * HUGE_PAGE_BYTES
_IN_PAGE: Final = PAGE_BYTES // BUCKET_BYTES


class Pages:
    """Zeroed private memory, page aligned, committed page by page at first touch. Freed with the last reference."""

    __slots__ = ("_array", "_mapped", "address", "size_bytes")

    def __init__(self, size_bytes: int, purpose: str, huge: bool = False) -> None:
        """Map `size_bytes`; `purpose` is for messages, and `huge` requests huge pages.

        Raises:
            DatabaseError: the system refuses the memory.
        """
        alignment = HUGE_PAGE_BYTES if huge else PAGE_BYTES
        try:
            mapped = mmap.mmap(
                -1,
                size_bytes + alignment - PAGE_BYTES,
                flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE,
            )
        except (OSError, OverflowError, MemoryError) as error:
            raise DatabaseError(
                f"hash map: {purpose}: the system refused {size_bytes} bytes of memory ({error}); existing rows are "
                "unharmed. Give the process more memory, or bound the tables with overflow_margin"
            ) from error
        self._mapped = mapped
        self._array: npt.NDArray[np.uint8] = np.frombuffer(mapped, np.uint8)
        start = self._array.ctypes.data
        self.address: int = -(-start // alignment) * alignment
        self.size_bytes = size_bytes
        huge_bytes = size_bytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES  # the rest would take a huge page of its own
        if huge and huge_bytes and hasattr(mmap, "MADV_HUGEPAGE"):
            try:
                mapped.madvise(mmap.MADV_HUGEPAGE, self.address - start, huge_bytes)
            except OSError:  # the system was built without them; small pages work, more slowly
                return

    @property
    def page_bytes(self) -> int:
        return _to_pages(self.size_bytes)

    def exclude_from_forks(self) -> None:
        """Exclude the memory from later forks."""
        # After a fork a write of the parent may go to a copy of the page while a device still reads the original. Systems that
        # recognise pinned pages avoid that by copying all of them in the fork.
        if hasattr(mmap, "MADV_DONTFORK"):
            self._mapped.madvise(mmap.MADV_DONTFORK)

    def words(self) -> npt.NDArray[np.uint64]:
        """Return the memory as (size_bytes // 8,) uint64; the array keeps it mapped."""
        start = self.address - self._array.ctypes.data
        return self._array[start : start + self.size_bytes].view(np.uint64)


@dataclass(frozen=True, slots=True)
class Extent:
    """Slabs that were mapped together; their rows are divided evenly into 2^`stripe_bits` stripes. *Immutable.*"""

    pages: Pages
    first_row: int
    stripe_bits: int
    stripe_rows: int
    commit_bytes: int  # a page, or a huge page


class Slabs:
    """The vectors of a table by row number, and their stamps if the policy needs them. *One writer at a time.*

    A slab holds `rows_per_slab` rows, a power of two: first their vectors, densely, then their stamps. `pages` holds the
    addresses of all slabs: row r is at `addresses[r >> shift] + (r & (rows_per_slab - 1)) * vector_bytes`. The array of
    addresses has room for all possible slabs, so that it never moves.

    Slabs are mapped in extents: all that `reserve` asks for, or one slab, then as many as there are already, but at most
    `allocation_rate` bytes at once. The rows of a stripe are used from its start, so a table commits the pages of its rows and
    part of a page per stripe, which has 1 MB or more. With huge pages, soon after the first row all of an extent is committed.
    That suits reserved rows, which a load then uses; other such extents have only one stripe per 2^20 rows of the table, for 2
    bytes a row. Pinning commits whole extents, so a pinned table grows by a sixty-fourth.

    Attributes:
        capacity_rows: rows that have memory so far.
        counters: see `layout.py`; replaced with each new extent.
        dense_rows: number of the first extent's rows that belong to the keys of their numbers.
        holes: see `layout.py`; None if the table is not dense.
        unfilled: other extents with fresh rows, and the used rows of each of their stripes.
        pinned: whether extents are pinned, and so committed as a whole.
        stamp_offset: bytes from the start of a slab to its stamps; 0 without stamps.
    """

    def __init__(self, tag: str, vector_bytes: int, stamped: bool, allocation_rate: int) -> None:
        rows = _SLAB_BYTES // vector_bytes
        self.rows_per_slab = 1 << (min(max(rows, _LEAST_SLAB_ROWS), _MOST_SLAB_ROWS).bit_length() - 1)
        self.shift = self.rows_per_slab.bit_length() - 1
        self.vector_bytes = vector_bytes
        self.stamp_offset = self.rows_per_slab * vector_bytes if stamped else 0
        self.slab_bytes = self.rows_per_slab * (vector_bytes + STAMP_BYTES * stamped)
        self.capacity_rows = 0
        self.pinned = False
        self.extents: list[Extent] = []
        self.counters: npt.NDArray[np.int64] = np.array([0] * LISTS + [-1, 0], np.int64)
        self.versions: Pages | None = None
        self.changes: Pages | None = None
        self.dense_rows = 0
        self.holes: Pages | None = None
        self._tag = tag
        self._slabs_at_once = max(allocation_rate // self.slab_bytes, 1)
        self._slabs_at_most = MAX_ROWS // self.rows_per_slab
        self.pages = Pages(self._slabs_at_most * 8, f"table {tag!r}: the addresses of its slabs")
        self._addresses = self.pages.words()
        self.unfilled: list[tuple[Extent, npt.NDArray[np.int64]]] = []

    @property
    def count(self) -> int:
        return self.capacity_rows >> self.shift

    def addresses_so_far(self) -> npt.NDArray[np.uint64]:
        return self._addresses[: self.count].copy()

    def share(self) -> None:
        self.versions = self.versions or Pages(STRIPES * VERSION_BYTES, f"table {self._tag!r}: the versions of its stripes")

    def log_changes(self) -> None:
        """Create the log of changed buckets that mirrors need, if missing."""
        self.changes = self.changes or Pages(8 + 8 * CHANGES_LIMIT, f"table {self._tag!r}: the log of changed buckets")

    def extend(self) -> None:
        """Provide fresh rows from an earlier or a new extent, once the current one has none."""
        if self.unfilled:
            self._use(*self.unfilled.pop())
        else:
            self._map(self._usual())

    def reserve(self, rows: int) -> None:
        """Map memory for `rows` in total in one extent, with spare rows, since stripes fill unevenly."""
        missing = min(rows + rows // _SPARE_SHARE, MAX_ROWS) - self.capacity_rows
        if missing > 0 and rows - self.dense_rows > rows // _OUTSIDE_SHARE:  # else nearly all keys are dense
            self._map(max(-(-missing // self.rows_per_slab), self._usual()), reserved=True)

    def reserve_dense(self, rows: int) -> None:
        """Map memory for keys 0 to `rows` - 1, each at the row of its number, before there is any other."""
        holes = Pages(STRIPES * 4, f"table {self._tag!r}: the holes of its stripes")
        self._map(-(-rows // self.rows_per_slab), reserved=True, dense_rows=rows)
        self.dense_rows, self.holes = rows, holes

    def committed_bytes(self) -> int:
        """Upper bound of the committed bytes."""
        mapped = sum(extent.pages.size_bytes for extent in self.extents) + _to_pages((self.count + 1) * 8)
        mapped += sum(pages.size_bytes for pages in (self.versions, self.holes) if pages)
        if self.pinned or not self.extents:
            return mapped
        return mapped - sum(self._untouched_bytes(*unfilled) for unfilled in [*self.unfilled, self.current()])

    def further_bytes(self, rows: int) -> int:
        """Estimate how many more bytes a total of `rows` would commit."""
        present, free, _ = self.counters[: FRESH_ROWS + 1].tolist()
        usable = self.capacity_rows if self.pinned else present + free
        size_bytes = max(rows - usable, 0) * (self.slab_bytes >> self.shift)
        # All of reserved huge pages is soon committed.
        return size_bytes + (size_bytes // _SPARE_SHARE if size_bytes >= _HUGE_PAGES_FROM_BYTES else 0)

    def _usual(self) -> int:
        return min(max(self.count // (64 if self.pinned else 1), 1), self._slabs_at_once)

    def _map(self, slabs: int, *, reserved: bool = False, dense_rows: int = 0) -> None:
        """Map slabs as the extent that provides fresh rows; with `dense_rows`, for that many dense keys alone."""
        before = self.count
        slabs = min(slabs, self._slabs_at_most - before)
        if slabs == 0:
            raise DatabaseError(f"hash map: table {self._tag!r} is full: it holds {MAX_ROWS} rows, the most that it can")
        rows, size_bytes = slabs * self.rows_per_slab, slabs * self.slab_bytes
        huge = self.capacity_rows >= _HUGE_PAGES_FROM_ROWS or (reserved and size_bytes >= _HUGE_PAGES_FROM_BYTES)
        pages = Pages(size_bytes, f"table {self._tag!r}: {rows} more rows", huge)
        stripes = min(max(size_bytes // _STRIPE_BYTES, 1), _MOST_STRIPES)
        if huge and not (reserved or self.pinned):
            stripes = min(stripes, self.capacity_rows // _HUGE_PAGES_FROM_ROWS)
        bits = 0 if dense_rows else stripes.bit_length() - 1
        stripe_rows = dense_rows or rows >> bits
        extent = Extent(pages, self.capacity_rows, bits, stripe_rows, HUGE_PAGE_BYTES if huge else PAGE_BYTES)
        if self.counters[FRESH_ROWS]:
            self.unfilled.append(self.current())
        self.extents.append(extent)
        self._addresses[before : before + slabs] = pages.address + np.arange(slabs, dtype=np.uint64) * np.uint64(
            self.slab_bytes
        )
        self.capacity_rows += rows
        self._use(extent, np.full(1 << bits, dense_rows))

    def current(self) -> tuple[Extent, npt.NDArray[np.int64]]:
        """Return the extent that provides fresh rows, and the used rows of each of its stripes."""
        counters = self.counters
        extent = next(extent for extent in reversed(self.extents) if extent.first_row == counters[EXTENT_ROW])
        start = LISTS + (1 << int(counters[LIST_BITS]))
        return extent, counters[start : start + (1 << extent.stripe_bits)].copy()

    def _use(
        self,
        extent: Extent,
        used: npt.NDArray[np.int64],  # (stripes,)
    ) -> None:
        old = self.counters
        lists = 1 << int(old[LIST_BITS])
        bits = max(int(old[LIST_BITS]), extent.stripe_bits)
        new = np.full(LISTS + (2 << bits), -1, np.int64)
        new[:LISTS] = old[:LISTS]
        fresh = (extent.stripe_rows << extent.stripe_bits) - used.sum()
        new[FRESH_ROWS : LIST_BITS + 1] = fresh, extent.first_row, extent.stripe_rows, extent.stripe_bits, bits
        new[LISTS : LISTS + (1 << bits) : (1 << bits) // lists] = old[LISTS : LISTS + lists]
        new[LISTS + (1 << bits) :][: used.size] = used
        self.counters = new

    def _untouched_bytes(
        self,
        extent: Extent,
        used: npt.NDArray[np.int64],  # (stripes,)
    ) -> int:
        """Lower bound of the untouched bytes."""
        row_bytes, page = self.slab_bytes >> self.shift, extent.commit_bytes
        starts = np.arange(used.size) * (extent.stripe_rows * row_bytes)
        ends = -(-(starts + used * row_bytes) // page) + (1 if self.stamp_offset else 0)
        ends = np.maximum.accumulate(np.where(used, ends, 0))
        firsts = np.maximum(starts // page, np.concatenate([[0], ends[:-1]]))
        touched = int(np.maximum(ends - firsts, 0).sum()) * page
        return max(extent.pages.size_bytes - touched, 0)


class Buckets:
    """The segments of a table between two growths. `layout` is *immutable*; the writer changes the memory and the counts.

    Attributes:
        layout: (SEGMENTS + 2 * segments,) uint64, see `layout.py`; valid while this object is held.
        segment_rows: (segments,) int64, rows per segment; for the writer alone.
    """

    __slots__ = ("_slabs", "_tag", "layout", "pages", "segment_rows")

    def __init__(self, tag: str, slabs: Slabs, pages: Sequence[Pages]) -> None:
        """Describe segments; the caller adds their rows."""
        self._tag = tag
        self._slabs = slabs
        self.pages = tuple(pages)
        bits = len(pages).bit_length() - 1
        versions = slabs.versions.address if slabs.versions else 0
        changes = slabs.changes.address if slabs.changes else 0
        dense = [slabs.dense_rows, slabs.holes.address if slabs.holes else 0]
        head = [slabs.pages.address, slabs.shift, slabs.vector_bytes, slabs.stamp_offset, bits, versions, *dense, changes]
        segments = [word for page in pages for word in (page.address, page.size_bytes // BUCKET_BYTES)]
        self.layout: npt.NDArray[np.uint64] = np.array(head + segments, np.uint64)
        self.segment_rows: npt.NDArray[np.int64] = np.zeros(len(pages), np.int64)

    def with_current_slabs(self) -> "Buckets":
        same = Buckets(self._tag, self._slabs, self.pages)
        same.segment_rows = self.segment_rows
        return same

    @classmethod
    def empty(cls, tag: str, slabs: Slabs, count: int) -> "Buckets":
        return cls(tag, slabs, [_bucket_pages(tag, part) for part in _segment_sizes(count)])

    @property
    def size_bytes(self) -> int:
        return sum(pages.page_bytes for pages in self.pages)

    def grown(self, number: int) -> "Buckets":
        """Return the same rows with segment `number` enlarged: by a quarter unless it is small, which leaves 0.72 in use."""
        counts = self._counts()
        if len(counts) == 1:
            count = counts[0] * 2 if counts[0] < _GROW_GENTLY_FROM else counts[0] * 5 // 4
            return self._resized(_segment_sizes(count))
        counts[number] = max(counts[number] * 5 // 4 // _IN_PAGE * _IN_PAGE, counts[number] + _IN_PAGE)
        return self._resized(counts)

    def with_room_for(self, rows: int) -> "Buckets":
        """Return buckets with room for `rows` in total, some of it spare, since segments fill unevenly; larger if necessary."""
        sizes = self._sizes_for(rows)
        return self if sizes == self._counts() else self._resized(sizes)

    def bytes_with_room_for(self, rows: int) -> int:
        return sum(_to_pages(size * BUCKET_BYTES) for size in self._sizes_for(rows))

    def retire_segments_outside(self, successor: "Buckets") -> None:
        """Redirect readers of segments that `successor` does not share, before the writer changes anything in it."""
        for number, pages in enumerate(self.pages):
            if pages not in successor.pages:
                retire(self.layout, number)

    def _sizes_for(self, rows: int) -> list[int]:
        counts, sizes = self._counts(), _sizes_for(rows)
        if len(sizes) == len(counts):
            return [max(pair) for pair in zip(sizes, counts, strict=True)]
        return counts if len(sizes) < len(counts) else sizes

    def _counts(self) -> list[int]:
        return [pages.size_bytes // BUCKET_BYTES for pages in self.pages]

    def _resized(self, counts: list[int]) -> "Buckets":
        """Return the same rows in segments of other sizes; segments whose size stays are shared."""
        old = self._counts()
        segmented = len(counts) != len(old)
        if segmented:  # crafted keys can all belong to one segment
            rows = np.zeros(len(counts), np.int64)
            for number in range(len(old)):
                count_by_hash(self.layout, number, rows)
            counts = [
                max(count, _in_pages(present // LOAD_ROWS + 1)) for count, present in zip(counts, rows.tolist(), strict=True)
            ]
        shared = [not segmented and count == old[number] for number, count in enumerate(counts)]
        pages = [self.pages[i] if shared[i] else _bucket_pages(self._tag, count) for i, count in enumerate(counts)]
        larger = Buckets(self._tag, self._slabs, pages)
        for number in range(len(old)):
            if shared[number]:
                larger.segment_rows[number] = self.segment_rows[number]
            else:
                rehash(self.layout, number, larger.layout, larger.segment_rows)
        return larger


def size_of_buckets(rows: int) -> int:
    """Return the bytes of the buckets of a table that is reserved for a number of rows."""
    return sum(_sizes_for(rows)) * BUCKET_BYTES


def _sizes_for(rows: int) -> list[int]:
    """Return the number of buckets of each segment for `rows` in total, some of them spare, since segments fill unevenly."""
    sizes = _segment_sizes(ceil(rows / RESERVED_ROWS))
    if len(sizes) > 1:
        share = rows / len(sizes)
        sizes = [_in_pages(ceil((share + 5 * sqrt(share)) / RESERVED_ROWS))] * len(sizes)
    return sizes


def dense_rows(
    rows: int,
    keys: Iterable[KeyArray],  # (n,) each
) -> int:
    """Return n if the keys of a table are nearly all of 0 to n - 1 and few others, else 0. Takes a bit per row."""
    bits: npt.NDArray[np.uint64] = np.zeros((rows + _MOST_HOLES) // 64 + 1, np.uint64)
    outside = 0
    for part in keys:
        outside += mark_keys(part, bits)
        if outside > rows // _OUTSIDE_SHARE:
            return 0
    if not bits.any():
        return 0
    last = bits.size - 1 - int(np.argmax(bits[::-1] != 0))
    highest = 64 * last + int(bits[last]).bit_length() - 1
    missing = highest + 1 - int(np.bitwise_count(bits).sum())
    return highest + 1 if missing <= min(_MOST_HOLES, rows // _OUTSIDE_SHARE) and highest < MAX_ROWS else 0


def _bucket_pages(tag: str, count: int) -> Pages:
    size_bytes = count * BUCKET_BYTES
    return Pages(size_bytes, f"table {tag!r}: {count} buckets", huge=size_bytes >= _HUGE_FROM_BYTES)


def _segment_sizes(count: int) -> list[int]:
    """Return the sizes of the segments for at least `count` buckets."""
    if count < SEGMENTED_FROM:
        return [count]
    segments = 1 << _SEGMENT_BITS
    return [_in_pages(-(-count // segments))] * segments


def _in_pages(count: int) -> int:
    return -(-count // _IN_PAGE) * _IN_PAGE


def _to_pages(size_bytes: int) -> int:
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES
