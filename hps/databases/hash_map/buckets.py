"""The bucket arrays of a hash map table, and how they grow."""

from collections.abc import Sequence
from math import ceil, sqrt
from typing import Final

import numpy as np
import numpy.typing as npt

from hps.databases.hash_map.kernels import count_by_hash, rehash, retire
from hps.databases.hash_map.layout import BUCKET_BYTES, LOAD_ROWS
from hps.databases.hash_map.memory import HUGE_PAGE_BYTES, PAGE_BYTES, Pages, Slabs

SEGMENTED_FROM: Final = 4096
"""Buckets from which a table has segments: by then they are of several pages each, so that rounding to those is little."""
_SEGMENT_BITS: Final = 4
_GROW_GENTLY_FROM: Final = 512
_HUGE_FROM_BYTES: Final = 8 * HUGE_PAGE_BYTES
_IN_PAGE: Final = PAGE_BYTES // BUCKET_BYTES


class Buckets:
    """The segments of a table between two growths. What readers go by is *immutable*; the writer changes memory and counts.

    Attributes:
        layout: what kernels want to know, see `hash_map_layout.py`; valid while this object is held.
        segment_rows: (segments,) int64, rows of each; the writer's.
    """

    __slots__ = ("_pages", "_slabs", "_tag", "layout", "segment_rows")

    def __init__(self, tag: str, slabs: Slabs, pages: Sequence[Pages]) -> None:
        """Lay out segments; their rows are still to be counted."""
        self._tag = tag
        self._slabs = slabs
        self._pages = tuple(pages)
        bits = len(pages).bit_length() - 1
        head = [slabs.addresses, slabs.shift, slabs.vector_bytes, slabs.stamp_offset, bits]
        segments = [word for page in pages for word in (page.address, page.size_bytes // BUCKET_BYTES)]
        self.layout: npt.NDArray[np.uint64] = np.array(head + segments, np.uint64)
        self.segment_rows: npt.NDArray[np.int64] = np.zeros(len(pages), np.int64)

    @classmethod
    def empty(cls, tag: str, slabs: Slabs, count: int) -> "Buckets":
        """Make `count` buckets, or some more, without rows."""
        return cls(tag, slabs, [_allocated(tag, part) for part in _parted(count)])

    @property
    def size_bytes(self) -> int:
        """Bytes of the pages of all buckets."""
        return sum(-(-pages.size_bytes // PAGE_BYTES) * PAGE_BYTES for pages in self._pages)

    def grown(self, number: int) -> "Buckets":
        """These with segment `number` larger, by a quarter if it is not small: 0.72 of its entries stay in use.

        Raises:
            DatabaseError: no memory; these are unharmed.
        """
        counts = self._counts()
        if len(counts) == 1:
            count = counts[0] * 2 if counts[0] < _GROW_GENTLY_FROM else counts[0] * 5 // 4
            return self._resized(_parted(count))
        counts[number] = max(counts[number] * 5 // 4 // _IN_PAGE * _IN_PAGE, counts[number] + _IN_PAGE)
        return self._resized(counts)

    def with_room_for(self, rows: int) -> "Buckets":
        """These, or larger ones that hold `rows` in all; segments get a little more, for chance gives some more rows."""
        counts = self._counts()
        wanted = _parted(ceil(rows / LOAD_ROWS))
        if len(wanted) > 1:
            share = rows / len(wanted)
            wanted = [_in_pages(ceil((share + 5 * sqrt(share)) / LOAD_ROWS))] * len(wanted)
        if len(wanted) == len(counts):
            wanted = [max(pair) for pair in zip(wanted, counts, strict=True)]
        elif len(wanted) < len(counts):
            return self
        return self if wanted == counts else self._resized(wanted)

    def retire_what_is_not_in(self, successor: "Buckets") -> None:
        """Send the readers of these to their successor, before the writer changes anything in it."""
        for number, pages in enumerate(self._pages):
            if pages not in successor._pages:
                retire(self.layout, number)

    def _counts(self) -> list[int]:
        return [pages.size_bytes // BUCKET_BYTES for pages in self._pages]

    def _resized(self, counts: list[int]) -> "Buckets":
        """These with segments of other sizes; those of the same size are shared."""
        old = self._counts()
        parted = len(counts) != len(old)
        if parted:  # crafted keys may all fall into one segment
            rows = np.zeros(len(counts), np.int64)
            for number in range(len(old)):
                count_by_hash(self.layout, number, rows)
            counts = [max(count, _in_pages(own // LOAD_ROWS + 1)) for count, own in zip(counts, rows.tolist(), strict=True)]
        shared = [not parted and count == old[number] for number, count in enumerate(counts)]
        pages = [self._pages[i] if shared[i] else _allocated(self._tag, count) for i, count in enumerate(counts)]
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
    """The sizes of the segments of `count` buckets or a little more."""
    if count < SEGMENTED_FROM:
        return [count]
    segments = 1 << _SEGMENT_BITS
    return [_in_pages(-(-count // segments))] * segments


def _in_pages(count: int) -> int:
    """As many buckets, or as many more as their last page has room for."""
    return -(-count // _IN_PAGE) * _IN_PAGE
