"""One table of the hash map: its memory, its one writer at a time, its growth."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import numpy as np
import numpy.typing as npt

from hps.databases.base import TableStats
from hps.databases.hash_map_eviction import ACCESS, OverflowRule
from hps.databases.hash_map_fetch import fetch
from hps.databases.hash_map_kernels import NO_BUCKETS, count_present, delete, insert, rehash, retire, scan
from hps.databases.hash_map_layout import BUCKET_BYTES, BUSY, DONE, ENTRIES, KEEP, ROWS, STAMP
from hps.databases.hash_map_memory import HUGE_PAGE_BYTES, MAX_ROWS, Pages, Slabs
from hps.errors import DatabaseError, DatabaseTimeoutError
from hps.types import BoolArray, FloatArray, KeyArray

_LOAD_ROWS: Final = ENTRIES * 9 // 10
"""Rows a bucket, on average, at which the bucket array is full: nine of its ten entries."""
_GROW_GENTLY_FROM: Final = 512
"""Buckets from which the array grows by a quarter, and not by as much as it has."""
_HUGE_FROM_BYTES: Final = 8 * HUGE_PAGE_BYTES
SLICE_ROWS: Final = 16_384
"""Rows that one insertion or deletion writes before it lets another writer in."""
_SCAN_ROWS: Final = 4096
_BACKOFF_S: Final = 50e-6
_STAMPS_A_SECOND: Final = 16
_STAMP_LIMIT: Final = 2**32 - 1
_EVERYTHING: Final = np.empty(0, np.bool_)


class _BucketArray:
    """The buckets of a table between two growths, and the layout that readers of them go by. *Immutable* but for its memory."""

    __slots__ = ("_pages", "count", "layout")

    def __init__(self, tag: str, count: int, slabs: Slabs) -> None:
        size_bytes = count * BUCKET_BYTES
        self._pages = Pages(size_bytes, f"table {tag!r}: {count} buckets", huge=size_bytes >= _HUGE_FROM_BYTES)
        self.count = count
        self.layout = np.array(
            [self._pages.address, count, slabs.addresses, slabs.shift, slabs.vector_bytes, slabs.stamp_offset], np.uint64
        )

    @property
    def most_rows(self) -> int:
        return self.count * _LOAD_ROWS

    @property
    def size_bytes(self) -> int:
        return self._pages.size_bytes


class Table:
    """Vectors of one width by key. *Thread-safe.*

    Readers take no lock: they wait only for the bucket that a writer is at, for as long as that takes. Writers wait for one
    another, and a long one lets others in between its slices.

    A reader holds the bucket array that it reads; one that the table has outgrown is unmapped when its last reader has
    gone. Slabs live as long as the table, which its readers hold too, so that a table can be dropped under them.
    """

    def __init__(
        self,
        tag: str,
        dim: int,
        *,
        allocation_rate: int,
        initial_buckets: int,
        batch_rows: int,
        overflow: OverflowRule | None,
        timeout_s: float,
        clock: Callable[[], float],
    ) -> None:
        self.dim = dim
        self._tag = tag
        self._timeout_s = timeout_s
        self._clock = clock
        self._opened_at = clock()
        self._overflow = overflow
        self._batch_rows = batch_rows
        self._access = ACCESS[overflow.policy] if overflow else KEEP
        self._slabs = Slabs(tag, dim * 4, self._access != KEEP, allocation_rate)
        self._buckets = _BucketArray(tag, initial_buckets, self._slabs)
        self._counters: npt.NDArray[np.int64] = np.array([0, 0, -1], np.int64)
        self._partition_rows: npt.NDArray[np.int64] = np.zeros(overflow.partitions if overflow else 0, np.int64)
        self._random: npt.NDArray[np.uint64] = np.zeros(2, np.uint64)
        self._writer = threading.Lock()
        self._outgrown: _BucketArray | None = None

    def fetch(
        self,
        keys: KeyArray,  # (n,)
        out: FloatArray,  # (n, dim)
        found: BoolArray,  # (n,)
    ) -> int:
        """Do what `Database.fetch` says."""
        filled = position = 0
        now = self._now()
        deadline = None
        while True:
            buckets = self._buckets  # held here while the kernel reads its memory
            more, position, state = fetch(buckets.layout, keys, out, found, position, self._access, now)
            filled += more
            if state == DONE:
                return int(filled)
            if state == BUSY:
                # The writer lost the processor in the middle of a bucket: it needs ours to finish.
                deadline = deadline or time.monotonic() + self._timeout_s
                if time.monotonic() > deadline:
                    raise DatabaseTimeoutError(
                        f"hash map: fetching {keys.size} keys of table {self._tag!r}: a bucket stayed half-written for "
                        f"{self._timeout_s} s; the machine is overloaded, or the writing thread was stopped by a debugger"
                    )
                time.sleep(_BACKOFF_S)

    def insert(
        self,
        keys: KeyArray,  # (n,)
        vectors: FloatArray,  # (n, dim)
    ) -> None:
        """Do what `Database.insert` says, in batches; the overflow rule holds for each."""
        for start in range(0, keys.size, self._batch_rows):
            batch = slice(start, start + self._batch_rows)
            with self._writing(f"inserting {keys.size} keys"):
                if start == 0:
                    self._check_row_numbers(keys)
                self._enter(keys[batch], vectors[batch])

    def delete(self, keys: KeyArray) -> int:
        """Do what `Database.delete` says."""
        deleted = 0
        for start in range(0, keys.size, SLICE_ROWS):
            with self._writing(f"deleting {keys.size} keys"):
                layout = self._buckets.layout
                deleted += delete(layout, self._counters, self._partition_rows, keys[start : start + SLICE_ROWS])
        return deleted

    def scan(self, chunk_rows: int) -> Iterator[tuple[KeyArray, FloatArray]]:
        """Do what `Database.scan` says. Between two steps of the scan, writers write."""
        cursor, end = 0, 1 << 32
        room = max(min(chunk_rows, self.rows), _SCAN_ROWS)
        while cursor < end:
            keys, vectors = np.empty(room, np.int64), np.empty((room, self.dim), np.float32)
            with self._writing("scanning"):
                rows, cursor = scan(self._buckets.layout, cursor, keys, vectors)
            if rows == 0:
                room *= 2
            for start in range(0, rows, chunk_rows):
                stop = min(start + chunk_rows, rows)
                yield keys[start:stop], vectors[start:stop]

    def reserve(self, rows: int) -> None:
        """Make the bucket array large enough for `rows` at once; growing step by step would move them several times."""
        with self._writing(f"reserving {rows} rows"):
            if rows > MAX_ROWS:
                raise self._too_many(f"reserving {rows} rows")
            if self._overflow:
                rows = min(rows, self.capacity_rows)
            if rows > self._buckets.most_rows:
                self._grow(-(-rows // _LOAD_ROWS))

    @property
    def rows(self) -> int:
        """Rows that the table holds."""
        return int(self._counters[ROWS])

    @property
    def capacity_rows(self) -> int:
        """Rows at which it evicts; 2^64 - 1 where it never does."""
        return self._overflow.partitions * self._overflow.margin if self._overflow else 2**64 - 1

    def stats(self) -> TableStats:
        """Rows and bytes; the overhead is everything committed beside the vectors: buckets, stamps, rows that are free."""
        rows, used, _ = self._counters.tolist()
        vector_bytes = rows * self._slabs.vector_bytes
        held = self._buckets.size_bytes + self._slabs.committed_bytes(max(used, rows)) + self._partition_rows.nbytes
        return TableStats(rows, vector_bytes, held - vector_bytes, self.capacity_rows)

    def _now(self) -> int:
        if self._access != STAMP:
            return 0
        return min(int((self._clock() - self._opened_at) * _STAMPS_A_SECOND), _STAMP_LIMIT)

    @contextmanager
    def _writing(self, doing: str) -> Iterator[None]:
        """Be the one writer of the table."""
        if not self._writer.acquire(timeout=self._timeout_s):
            raise DatabaseTimeoutError(
                f"hash map: {doing} of table {self._tag!r}: other threads wrote to it for all of {self._timeout_s} s; "
                "write less at once, or from fewer threads"
            )
        try:
            self._retire_outgrown()
            yield
        finally:
            self._writer.release()

    def _check_row_numbers(self, keys: KeyArray) -> None:
        if self.rows + keys.size > MAX_ROWS:
            distinct = np.unique(keys)
            if self.rows + distinct.size - count_present(self._buckets.layout, distinct) > MAX_ROWS:
                raise self._too_many(f"inserting {keys.size} keys")

    def _too_many(self, doing: str) -> DatabaseError:
        return DatabaseError(
            f"hash map: {doing} of table {self._tag!r}, which holds {self.rows}: it would hold more than {MAX_ROWS} rows, the "
            "most there can be; nothing was changed. Bound it with overflow_margin, or use a persistent database alone"
        )

    def _enter(self, keys: KeyArray, vectors: FloatArray) -> None:
        """Add or replace a batch, as the writer."""
        kept = _EVERYTHING
        if self._overflow:
            layout = self._buckets.layout
            kept = self._overflow.make_room(layout, self._counters, self._partition_rows, self._random, keys)
        position = 0
        while True:
            position, state = insert(
                self._buckets.layout,
                self._counters,
                self._partition_rows,
                keys,
                vectors,
                kept,
                (position, keys.size),
                (self._buckets.most_rows, self._slabs.capacity_rows),
                (self._access, self._now()),
            )
            if state == DONE:
                return
            if state == NO_BUCKETS:
                self._grow(_larger(self._buckets.count))
            else:
                self._slabs.extend()

    def _grow(self, count: int) -> None:
        """Replace the bucket array by one of `count` buckets, as the writer; readers go on meanwhile."""
        larger = _BucketArray(self._tag, count, self._slabs)
        rehash(self._buckets.layout, larger.layout)
        self._outgrown = self._buckets  # should an interrupt end this here, the next writer sends its readers away
        self._buckets = larger
        self._retire_outgrown()

    def _retire_outgrown(self) -> None:
        if self._outgrown is not None and self._outgrown is not self._buckets:
            retire(self._outgrown.layout)
        self._outgrown = None


def _larger(count: int) -> int:
    """How many buckets to have after `count`: by a quarter more, so that at least 0.72 of the entries stay in use."""
    if count < _GROW_GENTLY_FROM:
        return 2 * count
    larger = count * 5 // 4
    in_huge_page = HUGE_PAGE_BYTES // BUCKET_BYTES
    return larger - larger % in_huge_page if larger * BUCKET_BYTES >= _HUGE_FROM_BYTES else larger
