"""A row file, mapped into memory and read in place."""

import mmap
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hps.errors import DatabaseCorruptError, DatabaseError
from hps.ground.shares import TableShare
from hps.ground.threads.thread_pool import POOL
from hps.stores.base import LOAD_ADVICE
from hps.stores.row_files import layout, reading
from hps.stores.row_files.changed_rows import ChangesView, changes_kernels
from hps.stores.row_files.cold_reads import ColdReads
from hps.stores.row_files.layout import PAGE_BYTES, FileHead
from hps.stores.row_files.presence import (
    MOST_PAGES,
    PageCache,
    Presence,
    advise_needed,
    advise_random,
    function_address,
    may_see_residency,
    presence_kernels,
)
from hps.stores.row_files.ranges import RecordRange, compared, find_range, hash_bounds
from hps.stores.row_files.residency import LockedFile, try_locking
from hps.types import BoolArray, FloatArray, IndexArray, KeyArray

_ROWS_WORTH_A_THREAD: Final = 512
_PAGES_A_PIECE: Final = 4096
_ASKED_KEYS: Final = 1024  # keys whose pages are asked for together
_NO_PARTS: Final = np.empty(0, np.int64)
_GETRUSAGE: Final = function_address("getrusage")

Records = npt.NDArray[np.uint32]
"""(n, 2 + width) uint32, in the order of the keys' hash: a key in two words, then its row."""


class RowFile:
    """A sealed file of the rows of one table. *Thread-safe*: nothing of it ever changes.

    The file may be replaced or removed by name while it is open: the mapping keeps what it had. Only cutting it short would end
    the process, so a file that others may write to is refused.

    Args:
        presence: makes pages readable before they are read; by default the whole file is there.
        cold_reads: counts the reads of the table.
        share: of the table, whose rows alone the file then has; by default, all that are here.

    Attributes:
        head: what the file says of itself.
        share: of the table; None for all rows.
        has_share: all pages of the share are here, or will be. Else it has the rows of another one as well.
        range: the records of the share.
        is_complete: all that the share reads is here.
        is_whole: it has no row of other shares, so that devices may read it.
        records: (rows, 2 + width) uint32, those of the range, mapped, read only, for walks in order: a fault reads ahead.
        starts, fingerprints: the other parts that a lookup reads, mapped, read only; see `layout.py`.
        mapped: the whole file, mapped as `records`, (size,) uint8.
        content: all of these in one piece of whole pages, (n,) uint8, mapped as `records`.

    Raises:
        DatabaseCorruptError: it is no row file, of another version of the format, cut short, or its head is damaged.
        DatabaseError: it cannot be read, or others may write to it.
    """

    def __init__(
        self,
        path: Path,
        presence: Presence | None = None,
        cold_reads: ColdReads | None = None,
        *,
        share: TableShare | None = None,
    ) -> None:
        self.path = path
        self._cold_reads = cold_reads or ColdReads()
        self._lock: LockedFile | None = None
        try:
            with open(path, "rb", buffering=0) as file:
                there = os.fstat(file.fileno())
                if there.st_mode & 0o022:
                    raise DatabaseError(
                        f"opening the row file {path}: others than its owner may write to it (mode {there.st_mode & 0o777:o}), "
                        "and cutting it short would end this process; expected mode 444: `chmod go-w` it"
                    )
                self.head = FileHead.unpacked(file.read(PAGE_BYTES))
                if there.st_size != self.head.size_bytes:
                    raise ValueError(f"it has {there.st_size:,} bytes, expected {self.head.size_bytes:,}")
                # Lookups have a mapping of their own, where a fault reads one page.
                walked, looked_up = (mmap.mmap(file.fileno(), there.st_size, access=mmap.ACCESS_READ) for _ in range(2))
                owned = may_see_residency(file.fileno())
        except OSError as error:
            raise DatabaseError(f"opening the row file {path}: {error}") from error
        except (ValueError, TypeError) as error:
            raise DatabaseCorruptError(f"opening the row file {path}: {error}. {LOAD_ADVICE}") from error
        head = self.head
        self._mapped = np.frombuffer(looked_up, np.uint8)
        self.presence = presence or PageCache(self._mapped, owned=owned)
        here = TableShare.parse(head.share) if head.share else None
        self.share = share or here
        self.has_share = here is None or share is None or here.covers(share)
        try:
            self.range: RecordRange = find_range(head, hash_bounds(here, share), compared(head, self._read))
        except ValueError as error:
            raise DatabaseCorruptError(f"opening the row file {path}: {error}. {LOAD_ADVICE}") from error
        advise_random(self._mapped[: head.starts_at])
        for start, stop in self.range.index_runs(head):
            advise_needed(self._mapped[start:stop])  # two bytes a row, which every lookup reads
        self.is_complete = presence is None
        self.is_whole = not here and self.range.rows == head.rows
        self.records: Records = self._records_in(walked)[self.range.first : self.range.last]
        self._records = self._records_in(looked_up)
        self.mapped: npt.NDArray[np.uint8] = np.frombuffer(walked, np.uint8)
        self.content: npt.NDArray[np.uint8] = self.mapped[head.records_at : head.sums_at]
        self.starts = self._part(np.uint32, head.starts_at, head.buckets + 1)
        self.fingerprints = self._part(np.uint8, head.fingerprints_at, head.rows)
        self._sums = self._part(np.uint64, head.sums_at, head.pages)
        self._words = self._part(np.uint64, head.records_at, head.pages * PAGE_BYTES // 8)
        self._file_parts = reading.file_parts(self._mapped, head, self.range.lowest, self.range.highest)

    def _records_in(self, memory: Any) -> Records:
        start, head = self.head.records_at, self.head
        content = np.frombuffer(memory, np.uint8)[start : start + head.rows * head.record_bytes]
        return content.view(np.uint32).reshape(head.rows, 2 + head.width)

    def _part(self, dtype: Any, start: int, count: int) -> Any:
        return self._mapped[start : start + count * np.dtype(dtype).itemsize].view(dtype)

    @property
    def rows(self) -> int:
        """Number of rows, those of the share."""
        return self.range.rows

    @property
    def size_bytes(self) -> int:
        """Size of the parts that the share reads."""
        return self.head.size_bytes if self.is_whole else sum(part.size for part in self._parts())

    def _parts(self) -> list[npt.NDArray[np.uint8]]:
        """Return what the share reads."""
        if self.is_whole:
            return [self._mapped]
        return [self._mapped[start:stop] for start, stop in self.range.runs(self.head)]

    def has_bytes(self, start: int, stop: int) -> bool:
        """Return whether bytes [start, stop) of a complete file are here, of a file of a share beside holes.

        Head and checksums always are.
        """
        start, stop = max(start, self.head.records_at), min(stop, self.head.sums_at)
        return (
            not self.head.share
            or start >= stop
            or any(low <= start and stop <= high for low, high in self.range.runs(self.head))
        )

    def _read(self, at: int, buffer: memoryview) -> None:
        self._require_bytes(at, at + len(buffer))
        buffer[:] = self._mapped[at : at + len(buffer)].data

    def copy_to(self, at: int, buffer: memoryview) -> bool:
        """Fill a buffer with bytes from one on; return False if they are not all here. They may be damaged."""
        stop = at + len(buffer)
        if not self.is_complete or not self.has_bytes(at, stop):
            return False
        buffer[:] = self._mapped[at:stop].data
        return True

    def contains(self, keys: KeyArray) -> BoolArray:
        """Return which keys have a row, (n,) bool."""
        found: BoolArray = np.zeros(keys.size, np.bool_)
        self.fetch(keys, np.empty((keys.size, 0), np.float32), found)
        return found

    def fetch(
        self,
        keys: KeyArray,  # (n,)
        out: FloatArray,  # (n, width)
        found: BoolArray,  # (n,)
        *,
        verify: bool = False,
        changes: ChangesView | None = None,
        left: BoolArray | None = None,  # (n,)
    ) -> int:
        """Fill the rows of `out` that are not yet `found`, and mark them; return how many. Arguments as of `Database.fetch`.

        Args:
            verify: compare each page with its checksum before a row is answered.
            changes: of keys in it, the rows there are the answer.
            left: marked for keys whose place there is `ELSEWHERE`; needed with `changes`.

        Raises:
            DatabaseCorruptError: a page is damaged.
            DatabaseError: pages that are still to arrive did not.
        """
        words, size = out.view(np.uint32), keys.size
        parts = _NO_PARTS if changes is None else changes.parts
        left = found if left is None else left
        copies: list[int] = []

        def part(first: int, last: int) -> None:
            scratch = np.empty(reading.SCRATCH, np.int64)
            at = first
            while at < last:
                missing, began, stop, getrusage = 0, 0, last, _GETRUSAGE
                if self.presence.doubtful:
                    stop, began, getrusage = min(at + _ASKED_KEYS, last), time.perf_counter_ns(), 0
                    missing = self._require(keys[at:stop], found[at:stop], verify=verify)
                some = (keys, words, found, left)
                if stop - at < size:  # a slice takes as long as ten absent keys
                    some = (keys[at:stop], words[at:stop], found[at:stop], left[at:stop])
                reading.fetch_records(*some, self._file_parts, parts, scratch, verify, getrusage)
                done, copied, damaged, stopped = scratch[reading.DONE :].tolist()
                if damaged >= 0:
                    self._check(damaged)
                if missing:
                    self._cold_reads.add(missing, time.perf_counter_ns() - began)
                if stopped:
                    self.presence.doubt()
                at += done
                copies.append(copied)

        POOL.run(size, _ROWS_WORTH_A_THREAD, part)
        return sum(copies)

    def _require(self, keys: KeyArray, found: BoolArray, *, verify: bool) -> int:
        """Have all pages present that a lookup of these keys reads; return how many were missing."""
        head, hashes = self.head, (np.uint64(self.range.lowest), np.uint64(self.range.highest))
        pages: IndexArray = np.empty(2 * keys.size, np.int64)
        count = reading.start_pages(keys, found, *hashes, head.buckets, head.starts_at, pages)
        missing = self._require_pages(pages[:count], verify)
        ranges = np.empty((keys.size, 2), np.int64)
        most = reading.record_ranges(keys, found, *hashes, head.rows, self.starts, ranges)
        missing += self._require_ranges(ranges, head.fingerprints_at, 1, verify)
        candidates = np.empty((most, 2), np.int64)
        count = reading.candidate_ranges(keys, ranges, self.fingerprints, candidates)
        return missing + self._require_ranges(candidates[:count], head.records_at, head.record_bytes, verify)

    def _require_ranges(self, ranges: npt.NDArray[np.int64], at: int, item_bytes: int, verify: bool) -> int:
        pages: IndexArray = np.empty(2 * len(ranges), np.int64)
        if (count := reading.range_pages(ranges, at, item_bytes, pages)) > pages.size:
            pages = np.empty(count, np.int64)
            reading.range_pages(ranges, at, item_bytes, pages)
        return self._require_pages(pages[:count], verify)

    def _require_pages(self, pages: IndexArray, verify: bool) -> int:
        missing, pages = 0, np.unique(pages)
        if verify:
            first = self.head.records_at // PAGE_BYTES
            pages = np.unique(np.append(pages, (self.head.sums_at + 8 * (pages - first)) // PAGE_BYTES))
        for start in range(0, pages.size, MOST_PAGES):
            missing += self.presence.require(pages[start : start + MOST_PAGES])
        return missing

    def hold(self, *, required: bool, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Read all that the share reads and lock it in memory, until `release`.

        Args:
            required: raise if that is not possible; else it is logged.

        Raises:
            CapacityError, DatabaseError: see `LockedFile`.
        """
        if self._lock is None:
            parts = self._parts()
            self._lock = LockedFile(self.path, parts, progress) if required else try_locking(self.path, parts)

    def release(self) -> None:
        """Unlock it. Idempotent."""
        lock, self._lock = self._lock, None
        if lock:
            lock.close()

    @property
    def held_bytes(self) -> int:
        """Bytes that are locked in memory."""
        return self._lock.size_bytes if self._lock else 0

    def resident_share(self) -> float | None:
        """Estimate the share of its pages that are in memory; None if unknown."""
        return self.presence.resident_share(self.range.runs(self.head))

    def _require_bytes(self, start: int, stop: int) -> None:
        for page in range(start // PAGE_BYTES, -(-stop // PAGE_BYTES), MOST_PAGES):
            if self.presence.doubtful:
                self.presence.require(np.arange(page, min(page + MOST_PAGES, -(-stop // PAGE_BYTES))))

    def chunks(self, rows: int) -> Iterator[tuple[KeyArray, FloatArray]]:
        """Yield all keys and rows in the file's order, `rows` at a time, in arrays that the caller owns."""
        for start in range(0, self.rows, rows):
            count = min(rows, self.rows - start)
            at, size = self.head.records_at, self.head.record_bytes
            self._require_bytes(at + (self.range.first + start) * size, at + (self.range.first + start + count) * size)
            keys, vectors = np.empty(count, np.int64), np.empty((count, self.head.width), np.float32)
            layout.split_records(self.records, start, start + count, 0, keys, vectors.view(np.uint32))
            yield keys, vectors

    def verify(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Compare every page that the share reads with its checksum.

        Raises:
            DatabaseCorruptError: one differs.
        """
        self._require_bytes(self.head.sums_at, self.head.size_bytes)
        if layout.checksum(self._sums.view(np.uint8)) != self.head.sums:
            raise DatabaseCorruptError(f"checking the row file {self.path}: its checksums are damaged. {LOAD_ADVICE}")
        runs, done = self.range.runs(self.head), 0
        total = sum(stop - start for start, stop in runs) // PAGE_BYTES
        before = self.head.records_at // PAGE_BYTES
        for first, last in runs:
            for at in range(first // PAGE_BYTES, last // PAGE_BYTES, _PAGES_A_PIECE):
                stop = min(at + _PAGES_A_PIECE, last // PAGE_BYTES)
                self._require_bytes(at * PAGE_BYTES, stop * PAGE_BYTES)
                self._check(layout.damaged_page(self._words, self._sums, at - before, stop - before))
                done += stop - at
                if progress:
                    progress(done, total)

    def _check(self, page: int) -> None:
        if page >= 0:
            at = self.head.records_at + page * PAGE_BYTES
            raise DatabaseCorruptError(
                f"reading the row file {self.path}: the page at byte {at:,} is damaged: it contradicts its checksum. "
                f"{LOAD_ADVICE}"
            )


def read_kernels() -> tuple[Callable[..., Any], ...]:
    """Return the kernels of a fetch."""
    return (
        layout.sum_pages,
        layout.damaged_page,
        layout.rank_of,
        *reading.reading_kernels(),
        *presence_kernels(),
        *changes_kernels(),
    )
