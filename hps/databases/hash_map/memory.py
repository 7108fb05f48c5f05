"""The memory of a hash map table: pages that never move, slabs of vectors, and bucket arrays that grow."""

import mmap
import sys
from collections.abc import Sequence
from math import ceil, sqrt
from typing import Final

import numpy as np
import numpy.typing as npt

from hps.databases.hash_map.kernels import count_by_hash, rehash, retire
from hps.databases.hash_map.layout import BUCKET_BYTES, LOAD_ROWS, STRIPES, VERSION_BYTES
from hps.errors import DatabaseError

PAGE_BYTES: Final = mmap.PAGESIZE
HUGE_PAGE_BYTES: Final = 2 << 20
MAX_ROWS: Final = 2**32 - 2
"""Most rows of a table. Row numbers are uint32, and two values stay free for marks."""
STAMP_BYTES: Final = 4

_HUGE_PAGES_FROM_ROWS = 1 << 20
"""Rows from which extents use huge pages (10 to 15 % more keys/s at 8 M rows). The last page, filled in part, then costs at
most 2 bytes per row."""
_SLAB_BYTES = 1 << 20
_LEAST_SLAB_ROWS = 1 << 10
_MOST_SLAB_ROWS = 1 << 16
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)

SEGMENTED_FROM: Final = 4096
"""Buckets from which a table has segments. Each is several pages by then, so that rounding up to pages costs little."""
_SEGMENT_BITS: Final = 4
_GROW_GENTLY_FROM: Final = 512
_HUGE_FROM_BYTES: Final = 8 * HUGE_PAGE_BYTES
_IN_PAGE: Final = PAGE_BYTES // BUCKET_BYTES


class Pages:
    """Zeroed private memory that the system commits page by page as it is touched. Freed with the last reference.

    It is page aligned, so that a device can pin and map it.

    Attributes:
        address: of the first byte; a multiple of the page size, or of the huge page size if `huge`.
        size_bytes: bytes from there on.
    """

    __slots__ = ("_array", "address", "size_bytes")

    def __init__(self, size_bytes: int, purpose: str, huge: bool = False) -> None:
        """Map `size_bytes`.

        Args:
            purpose: what the memory is for; error messages say so.
            huge: ask for huge pages.

        Raises:
            DatabaseError: the system refuses that much memory.
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
                f"hash map: {purpose}: the system refused {size_bytes} bytes of memory ({error}); what the table holds is "
                "unharmed. Give the process more memory, or bound the tables with overflow_margin"
            ) from error
        self._array: npt.NDArray[np.uint8] = np.frombuffer(mapped, np.uint8)
        start = self._array.ctypes.data
        self.address: int = -(-start // alignment) * alignment
        self.size_bytes = size_bytes
        huge_bytes = size_bytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES  # the rest would take a whole huge page, too
        if huge and huge_bytes and hasattr(mmap, "MADV_HUGEPAGE"):
            try:
                mapped.madvise(mmap.MADV_HUGEPAGE, self.address - start, huge_bytes)
            except OSError:  # the system was built without them; small pages work, more slowly
                return

    @property
    def whole_bytes(self) -> int:
        """Bytes of its pages."""
        return _to_pages(self.size_bytes)

    def words(self) -> npt.NDArray[np.uint64]:
        """The memory itself as (size_bytes // 8,) uint64; the array keeps it mapped."""
        start = self.address - self._array.ctypes.data
        return self._array[start : start + self.size_bytes].view(np.uint64)


class Slabs:
    """The vectors of a table by row number, and their stamps where a policy keeps them. *One writer at a time.*

    A slab holds `rows_per_slab` rows, a power of two: first their vectors, densely, then their stamps. `addresses` points to
    the addresses of all slabs: row r is at `addresses[r >> shift] + (r & (rows_per_slab - 1)) * vector_bytes`. Slabs are
    mapped in extents: one slab, then as many as there are already, but at most `allocation_rate` bytes at once. Rows are
    handed out in order and pages are committed at first touch, so a table takes the memory of its rows, rounded up to a
    page. The array of addresses has room for every slab that there can ever be, and is committed likewise, so that it never
    moves either.

    Attributes:
        capacity_rows: rows that have memory so far.
        extents: the memory of all slabs, in the order of their mapping.
        stamp_offset: bytes from the start of a slab to its stamps, 0 where there are none.
    """

    def __init__(self, tag: str, vector_bytes: int, stamped: bool, allocation_rate: int) -> None:
        rows = _SLAB_BYTES // vector_bytes
        self.rows_per_slab = 1 << (min(max(rows, _LEAST_SLAB_ROWS), _MOST_SLAB_ROWS).bit_length() - 1)
        self.shift = self.rows_per_slab.bit_length() - 1
        self.vector_bytes = vector_bytes
        self.stamp_offset = self.rows_per_slab * vector_bytes if stamped else 0
        self.slab_bytes = self.rows_per_slab * (vector_bytes + STAMP_BYTES * stamped)
        self.capacity_rows = 0
        self.versions: Pages | None = None
        self._committed_rows = 0
        self._tag = tag
        self._slabs_at_once = max(allocation_rate // self.slab_bytes, 1)
        self._slabs_at_most = -(-MAX_ROWS // self.rows_per_slab)
        self._pages = Pages(self._slabs_at_most * 8, f"table {tag!r}: the addresses of its slabs")
        self._addresses = self._pages.words()
        self.extents: list[Pages] = []

    @property
    def addresses(self) -> int:
        """The address of the array of slab addresses, uint64."""
        return self._pages.address

    @property
    def count(self) -> int:
        """Slabs so far."""
        return self.capacity_rows >> self.shift

    def addresses_so_far(self) -> npt.NDArray[np.uint64]:
        """The addresses of the slabs so far, (count,) uint64, a copy."""
        return self._addresses[: self.count].copy()

    def share(self) -> None:
        """Make the versions that devices need, if they are not there."""
        self.versions = self.versions or Pages(STRIPES * VERSION_BYTES, f"table {self._tag!r}: the versions of its stripes")

    def extend(self) -> None:
        """Map one more extent.

        Raises:
            DatabaseError: no memory, or the table has as many rows as there are row numbers.
        """
        slabs = self.count
        more = min(max(slabs, 1), self._slabs_at_once, self._slabs_at_most - slabs)
        if more == 0:
            raise DatabaseError(f"hash map: table {self._tag!r} is full: it holds {MAX_ROWS} rows, the most that it can")
        huge = self.capacity_rows >= _HUGE_PAGES_FROM_ROWS
        extent = Pages(more * self.slab_bytes, f"table {self._tag!r}: {more * self.rows_per_slab} more rows", huge)
        self.extents.append(extent)
        self._addresses[slabs : slabs + more] = extent.address + np.arange(more, dtype=np.uint64) * np.uint64(self.slab_bytes)
        self.capacity_rows += more * self.rows_per_slab

    def commit(self) -> None:
        """Hear that all extents so far are committed, since they were pinned."""
        self._committed_rows = self.capacity_rows

    def committed_bytes(self, rows: int) -> int:
        """At most how many bytes of pages the first `rows` rows have touched, with their stamps and slab addresses."""
        rows = max(rows, self._committed_rows)
        whole, rest = divmod(rows, self.rows_per_slab)
        touched = whole * self.slab_bytes + _to_pages(rest * self.vector_bytes) + _to_pages((whole + 1) * 8)
        stamps = _to_pages(rest * STAMP_BYTES) if self.stamp_offset else 0
        return touched + stamps + (HUGE_PAGE_BYTES if rows > _HUGE_PAGES_FROM_ROWS else 0)


class Buckets:
    """The segments of a table between two growths. `layout` is *immutable*; the writer changes the memory and the counts.

    Attributes:
        layout: (6 + 2 * segments,) uint64, what kernels need to know, see `layout.py`; valid while this object is held.
        pages: the memory of each segment.
        segment_rows: (segments,) int64, the rows of each; for the writer alone.
    """

    __slots__ = ("_slabs", "_tag", "layout", "pages", "segment_rows")

    def __init__(self, tag: str, slabs: Slabs, pages: Sequence[Pages]) -> None:
        """Describe segments, whose rows the caller has yet to enter."""
        self._tag = tag
        self._slabs = slabs
        self.pages = tuple(pages)
        bits = len(pages).bit_length() - 1
        versions = slabs.versions.address if slabs.versions else 0
        head = [slabs.addresses, slabs.shift, slabs.vector_bytes, slabs.stamp_offset, bits, versions]
        segments = [word for page in pages for word in (page.address, page.size_bytes // BUCKET_BYTES)]
        self.layout: npt.NDArray[np.uint64] = np.array(head + segments, np.uint64)
        self.segment_rows: npt.NDArray[np.int64] = np.zeros(len(pages), np.int64)

    def described_again(self) -> "Buckets":
        """Return the same segments with what their slabs have now."""
        same = Buckets(self._tag, self._slabs, self.pages)
        same.segment_rows = self.segment_rows
        return same

    @classmethod
    def empty(cls, tag: str, slabs: Slabs, count: int) -> "Buckets":
        """Make `count` buckets, or some more, without rows."""
        return cls(tag, slabs, [_allocated(tag, part) for part in _parted(count)])

    @property
    def size_bytes(self) -> int:
        """Bytes of the pages of all buckets."""
        return sum(pages.whole_bytes for pages in self.pages)

    def grown(self, number: int) -> "Buckets":
        """Return the same rows with segment `number` enlarged: by a quarter unless it is small, so that 0.72 of it are in use.

        Raises:
            DatabaseError: no memory; this object is unharmed.
        """
        counts = self._counts()
        if len(counts) == 1:
            count = counts[0] * 2 if counts[0] < _GROW_GENTLY_FROM else counts[0] * 5 // 4
            return self._resized(_parted(count))
        counts[number] = max(counts[number] * 5 // 4 // _IN_PAGE * _IN_PAGE, counts[number] + _IN_PAGE)
        return self._resized(counts)

    def with_room_for(self, rows: int) -> "Buckets":
        """Return buckets that hold `rows` in all, if need be larger ones; segments get some more, as chance is uneven."""
        sizes = self._sizes_for(rows)
        return self if sizes == self._counts() else self._resized(sizes)

    def bytes_with_room_for(self, rows: int) -> int:
        """Bytes of the pages of `with_room_for(rows)`."""
        return sum(_to_pages(size * BUCKET_BYTES) for size in self._sizes_for(rows))

    def retire_what_is_not_in(self, successor: "Buckets") -> None:
        """Send the readers of replaced segments to the successor, before the writer changes anything in it."""
        for number, pages in enumerate(self.pages):
            if pages not in successor.pages:
                retire(self.layout, number)

    def _sizes_for(self, rows: int) -> list[int]:
        counts = self._counts()
        sizes = _parted(ceil(rows / LOAD_ROWS))
        if len(sizes) > 1:
            share = rows / len(sizes)
            sizes = [_in_pages(ceil((share + 5 * sqrt(share)) / LOAD_ROWS))] * len(sizes)
        if len(sizes) == len(counts):
            return [max(pair) for pair in zip(sizes, counts, strict=True)]
        return counts if len(sizes) < len(counts) else sizes

    def _counts(self) -> list[int]:
        return [pages.size_bytes // BUCKET_BYTES for pages in self.pages]

    def _resized(self, counts: list[int]) -> "Buckets":
        """Return the same rows in segments of other sizes; segments whose size stays are shared."""
        old = self._counts()
        parted = len(counts) != len(old)
        if parted:  # crafted keys can all belong to one segment
            rows = np.zeros(len(counts), np.int64)
            for number in range(len(old)):
                count_by_hash(self.layout, number, rows)
            counts = [max(count, _in_pages(own // LOAD_ROWS + 1)) for count, own in zip(counts, rows.tolist(), strict=True)]
        shared = [not parted and count == old[number] for number, count in enumerate(counts)]
        pages = [self.pages[i] if shared[i] else _allocated(self._tag, count) for i, count in enumerate(counts)]
        larger = Buckets(self._tag, self._slabs, pages)
        for number in range(len(old)):
            if shared[number]:
                larger.segment_rows[number] = self.segment_rows[number]
            else:
                rehash(self.layout, number, larger.layout, larger.segment_rows)
        return larger


def _allocated(tag: str, count: int) -> Pages:
    size_bytes = count * BUCKET_BYTES
    return Pages(size_bytes, f"table {tag!r}: {count} buckets", huge=size_bytes >= _HUGE_FROM_BYTES)


def _parted(count: int) -> list[int]:
    """The sizes of the segments into which `count` buckets, or a few more, are cut."""
    if count < SEGMENTED_FROM:
        return [count]
    segments = 1 << _SEGMENT_BITS
    return [_in_pages(-(-count // segments))] * segments


def _in_pages(count: int) -> int:
    """Round a number of buckets up to whole pages."""
    return -(-count // _IN_PAGE) * _IN_PAGE


def _to_pages(size_bytes: int) -> int:
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES
