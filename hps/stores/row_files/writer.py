"""Writes row files: sorts rows into runs, and merges runs and older files in one walk."""

import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from hps.errors import DatabaseError
from hps.ground.shares import TableShare
from hps.ground.threads.thread_pool import POOL, available_threads
from hps.stores.row_files import layout
from hps.stores.row_files.layout import (
    MOST_ROWS,
    PAGE_BYTES,
    FileHead,
    RowFacts,
    buckets_for,
    content_fingerprint,
    lowest_hash,
)
from hps.stores.row_files.ranges import hash_bounds
from hps.stores.row_files.row_file import Records
from hps.stores.row_files.sorting import Hashes, append_rows, gather_records, sort_kernels, sorted_order
from hps.types import BoolArray, FloatArray, IndexArray, KeyArray, row_dtype_of

TEMPORARY: Final = ".building"
"""Suffix of files that are not complete; a start removes them."""

_SLICE_BYTES: Final = 4 << 20
"""Records of a slice: what one thread merges at a time."""
_SLICES_A_THREAD: Final = 2
_APPENDED_ROWS: Final = 2048
_SUMMED_PAGES: Final = 1024
_WRITE_TIMEOUT_S: Final = 600.0  # for some hundred megabytes, far beyond a disk's own timeouts


class Run(NamedTuple):
    """Rows in the order of their keys' hash, each key once."""

    records: Records
    deleted: BoolArray | None = None  # of each record: whether the row is to be absent from the merged file
    order: IndexArray | None = None  # (n,) int64: numbers of the records by hash; None if they lie in that order
    hashes: Hashes | None = None  # (n,) uint64, ascending, if there is an order

    @property
    def rows(self) -> int:
        return self.records.shape[0] if self.order is None else self.order.size


def ordered_run(records: Records, hashes: Hashes, deleted: BoolArray | None = None) -> Run:
    """Make a run of records in the order of their arrival, where they lie. Of a repeated key the last one counts."""
    order, ranked = sorted_order(hashes)
    return Run(records, deleted, order, ranked)


def sorted_run(
    keys: KeyArray,  # (n,)
    rows: FloatArray,  # (n, width)
    deleted: BoolArray | None = None,  # (n,)
) -> Run:
    """Copy rows into a run. Of a repeated key the last row counts."""
    records, hashes = np.empty((keys.size, 2 + rows.shape[1]), np.uint32), np.empty(keys.size, np.uint64)
    append(keys, rows, 0, records, hashes)
    return ordered_run(records, hashes, deleted)


def append(keys: KeyArray, rows: FloatArray, at: int, records: Records, hashes: Hashes) -> None:
    """Copy rows to the records from `at` on, and write the hashes of their keys."""
    words = rows.view(np.uint32)
    POOL.run(keys.size, _APPENDED_ROWS, lambda first, last: append_rows(keys, words, first, last, at, records, hashes))


class _Slice(NamedTuple):
    """The merged records of a range of buckets."""

    bucket: int  # the first one
    stop: int
    hashes: Hashes  # (m,) ascending
    parts: list[tuple[int, IndexArray, IndexArray]]  # of each run: its number, its records, and their places in the slice


class _Merge:
    """Merges runs, of which the first has the latest row of a key. *Thread-safe.*"""

    def __init__(self, runs: Sequence[Run], buckets: int) -> None:
        self._runs = runs
        self._buckets = buckets

    def slice(self, bucket: int, stop: int) -> _Slice:
        """Find the records of buckets [bucket, stop)."""
        parts = []
        for number, run in enumerate(self._runs):
            first, last = self._bounds(run, bucket, stop)
            if last > first:
                parts.append((number, run, first, last))
        if len(parts) == 1 and parts[0][1].deleted is None:
            number, run, first, last = parts[0]
            hashes = self._hashes(run, first, last)
            return _Slice(bucket, stop, hashes, [(number, _numbers(run, first, last), np.arange(last - first))])
        return self._merged(bucket, stop, parts)

    def _merged(self, bucket: int, stop: int, parts: list[tuple[int, Run, int, int]]) -> _Slice:
        hashes = np.concatenate([np.empty(0, np.uint64), *(self._hashes(run, *bounds) for _, run, *bounds in parts)])
        numbers = np.concatenate([np.empty(0, np.int64), *(_numbers(run, *bounds) for _, run, *bounds in parts)])
        origins = np.repeat([number for number, *_ in parts], [last - first for *_, first, last in parts])
        kept = np.argsort(hashes, kind="stable")  # of equal hashes the first stays, which is of the latest run
        ranked = hashes[kept]
        kept = kept[np.append(True, ranked[1:] != ranked[:-1])[: kept.size]]
        for number, run, *_ in parts:
            if run.deleted is not None:
                ours = np.flatnonzero(origins[kept] == number)
                kept = np.delete(kept, ours[run.deleted[numbers[kept[ours]]]])
        hashes, numbers, origins = hashes[kept], numbers[kept], origins[kept]
        found = []
        for number, *_ in parts:
            places = np.flatnonzero(origins == number)
            found.append((number, numbers[places], places))
        return _Slice(bucket, stop, hashes, found)

    def _bounds(self, run: Run, bucket: int, stop: int) -> tuple[int, int]:
        first = self._rank(run, bucket) if bucket else 0
        return first, self._rank(run, stop) if stop < self._buckets else run.rows

    def _rank(self, run: Run, bucket: int) -> int:
        lowest = np.uint64(lowest_hash(bucket, self._buckets))
        if run.hashes is not None:
            return int(np.searchsorted(run.hashes, lowest))
        return int(layout.rank_of(run.records, lowest))

    def _hashes(self, run: Run, first: int, last: int) -> Hashes:
        if run.hashes is not None:
            return run.hashes[first:last]
        hashes = np.empty(last - first, np.uint64)
        layout.hash_records(run.records, first, last, hashes, 0)
        return hashes

    def copy(self, piece: _Slice, shift: int, out: Records) -> None:
        """Copy the records of a slice to `out` from record `shift` on."""
        for run_number, numbers, places in piece.parts:
            gather_records(self._runs[run_number].records, numbers, places, shift, out)


def _numbers(run: Run, first: int, last: int) -> IndexArray:
    return np.arange(first, last) if run.order is None else run.order[first:last]


def write_row_file(
    path: Path,
    tag: str,
    width: int,
    runs: Sequence[Run],
    *,
    source: str = "",
    facts: RowFacts | None = None,
    share: TableShare | None = None,
    progress: Callable[[int], None] | None = None,
) -> FileHead:
    """Merge runs into a row file, which replaces one of this name. It is complete and durable, or not there.

    Memory beside the runs: two bytes a row, and some 16 MB for each thread.

    Args:
        runs: the latest first; records may be those of mapped files.
        source: identifies what the rows came from.
        facts: what is known of the rows; by default their format, by the tag.
        share: of the table, which has all rows.
        progress: called after each step with the number of records written.

    Raises:
        DatabaseError: the file cannot be written; what was written is removed.
    """
    fresh, head = build_row_file(path, tag, width, runs, source=source, facts=facts, share=share, progress=progress)
    publish_row_file(fresh, path)
    return head


def build_row_file(
    path: Path,
    tag: str,
    width: int,
    runs: Sequence[Run],
    *,
    source: str = "",
    facts: RowFacts | None = None,
    share: TableShare | None = None,
    progress: Callable[[int], None] | None = None,
) -> tuple[Path, FileHead]:
    """Write a row file under a temporary name beside `path`, for `publish_row_file`. It can be read, but is not durable.

    Raises:
        DatabaseError: the file cannot be written; what was written is removed.
    """
    fresh = path.with_name(f"{path.name}.{secrets.token_hex(4)}{TEMPORARY}")
    with _or_removed(fresh, f"writing the row file {path}"):
        file = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o444)
        try:
            return fresh, _write(file, tag, width, runs, source, facts or RowFacts(row_dtype_of(tag)), share, progress)
        finally:
            os.close(file)


def publish_row_file(fresh: Path, path: Path) -> None:
    """Make a file of `build_row_file` durable, then give it its name.

    Raises:
        DatabaseError: the disk failed; the file is removed, and one that had the name is still there.
    """
    with _or_removed(fresh, f"writing the row file {path}"):
        sync_file(fresh)
        fresh.replace(path)
        sync_directory(path.parent)


@contextmanager
def _or_removed(fresh: Path, doing: str) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        with suppress(OSError):
            fresh.unlink()
        if isinstance(error, OSError):
            raise DatabaseError(f"{doing}: {error}") from error
        raise


def _write(
    file: int,
    tag: str,
    width: int,
    runs: Sequence[Run],
    source: str,
    facts: RowFacts,
    share: TableShare | None,
    progress: Callable[[int], None] | None,
) -> FileHead:
    most = sum(run.rows for run in runs)
    if most > MOST_ROWS:
        raise DatabaseError(
            f"writing a row file{tag and f' of table {tag}'}: got {most:,} rows, expected at most {MOST_ROWS:,}"
        )
    buckets = buckets_for(most, share.of if share else 1)
    lowest, end = hash_bounds(share)
    first_bucket, stop_bucket = (lowest >> 32) * buckets >> 32, ((end - 1 >> 32) * buckets >> 32) + 1
    starts, fingerprints = np.zeros(buckets + 1, np.uint32), np.empty(most, np.uint8)
    merge = _Merge(runs, buckets)
    words, rows = 2 + width, 0
    buckets_a_slice = max(1, _SLICE_BYTES * (stop_bucket - first_bucket) // max(1, 4 * words * most))
    window = buckets_a_slice * _SLICES_A_THREAD * available_threads()
    with _PageWriter(file) as pages:
        for begin in range(first_bucket, stop_bucket, window):
            bounds = [*range(begin, min(begin + window, stop_bucket), buckets_a_slice), min(begin + window, stop_bucket)]
            slices: list[Any] = [None] * (len(bounds) - 1)

            def find(first: int, last: int, slices: list[Any] = slices, bounds: list[int] = bounds) -> None:
                for i in range(first, last):
                    slices[i] = merge.slice(bounds[i], bounds[i + 1])

            POOL.run(len(slices), 1, find)
            shifts = np.concatenate(([0], np.cumsum([piece.hashes.size for piece in slices])))
            records = pages.room(int(shifts[-1]) * 4 * words).view(np.uint32).reshape(-1, words)

            def copy(
                first: int,
                last: int,
                slices: list[Any] = slices,
                shifts: Any = shifts,
                records: Any = records,
                rows: int = rows,
            ) -> None:
                for i in range(first, last):
                    piece = slices[i]
                    merge.copy(piece, int(shifts[i]), records)
                    layout.index_records(
                        piece.hashes, rows + int(shifts[i]), piece.bucket, piece.stop, buckets, starts, fingerprints
                    )

            POOL.run(len(slices), 1, copy)
            rows += int(shifts[-1])
            pages.write()
            if progress:
                progress(int(shifts[-1]))
        starts[stop_bucket:] = rows
        pages.pad()
        for part in (starts.view(np.uint8), fingerprints[:rows]):
            pages.room(part.size)[:] = part
            pages.write()
            pages.pad()
        total = pages.end()
    _write_all(file, total.view(np.uint8), pages.at)
    head = FileHead(tag, width, rows, buckets, source, layout.checksum(total.view(np.uint8)), **facts._asdict())
    head = replace(head, content=content_fingerprint(head, total))
    _write_all(file, np.frombuffer(head.packed(), np.uint8), 0)
    return head


class _PageWriter:
    """Writes pages and computes their checksums, while the caller fills the next ones. *One per thread.*

    Attributes:
        at: offset of the next page.
    """

    # File systems let one thread at a time write to a file, so one does, and the others work on.

    def __init__(self, file: int) -> None:
        self._file = file
        self.at = PAGE_BYTES
        self._sums: list[Hashes] = []
        self._memory = [np.empty(0, np.uint8), np.empty(0, np.uint8)]  # one is filled while the other is written
        self._rest = self._used = 0  # bytes of an incomplete page, and all bytes, in the first memory
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hps-row-file-writer")
        self._writing: Future[None] | None = None

    def __enter__(self) -> "_PageWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown()

    def room(self, size: int) -> npt.NDArray[np.uint8]:
        """Return memory for the next bytes, (size,) uint8, to be filled before `write`."""
        self._used = self._rest + size
        if self._memory[0].size < self._used:
            larger = np.empty(self._used + self._used // 8 + PAGE_BYTES, np.uint8)
            larger[: self._rest] = self._memory[0][: self._rest]
            self._memory[0] = larger
        return self._memory[0][self._rest : self._used]

    def write(self) -> None:
        """Write the complete pages, in the background."""
        full = self._memory[0]
        whole = self._used // PAGE_BYTES * PAGE_BYTES
        rest = self._used - whole
        count, words = whole // PAGE_BYTES, full[:whole].view(np.uint64)
        sums = np.empty(count, np.uint64)
        POOL.run(
            count,
            _SUMMED_PAGES,
            lambda first, last: layout.sum_pages(words[512 * first : 512 * last], sums[first:last]),
        )
        self._wait()
        self._sums.append(sums)
        self._memory.reverse()
        if self._memory[0].size < rest:
            self._memory[0] = np.empty(PAGE_BYTES, np.uint8)
        self._memory[0][:rest] = full[whole : self._used]
        self._writing = self._thread.submit(_write_all, self._file, full[:whole], self.at)
        self.at, self._rest, self._used = self.at + whole, rest, rest

    def pad(self) -> None:
        """Complete the last page with zeros."""
        if self._rest:
            self.room(PAGE_BYTES - self._rest)[:] = 0
            self.write()

    def end(self) -> Hashes:
        """Wait until all is written; return the checksums."""
        self._wait()
        return np.concatenate(self._sums)

    def _wait(self) -> None:
        if self._writing:
            self._writing.result(_WRITE_TIMEOUT_S)
            self._writing = None


def write_records(file: int, run: Run) -> None:
    """Write the records of one run in its order from the start of a file."""
    records_a_piece = max(1, 2 * _SLICE_BYTES // (4 * run.records.shape[1]))
    with _PageWriter(file) as pages:
        pages.at = 0
        for start in range(0, run.rows, records_a_piece):
            numbers = _numbers(run, start, min(start + records_a_piece, run.rows))
            out = pages.room(numbers.size * 4 * run.records.shape[1]).view(np.uint32).reshape(numbers.size, -1)
            places = np.arange(numbers.size)

            def copy(first: int, last: int, numbers: Any = numbers, places: Any = places, out: Any = out) -> None:
                gather_records(run.records, numbers[first:last], places[first:last], 0, out)

            POOL.run(numbers.size, _APPENDED_ROWS, copy)
            pages.write()
        pages.pad()
        pages.end()


def _write_all(file: int, content: npt.NDArray[np.uint8], at: int) -> None:
    view = content.data
    while view:
        written = os.pwrite(file, view, at)
        view, at = view[written:], at + written


def sync_file(path: Path) -> None:
    """Make the content of a file durable."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def sync_directory(directory: Path) -> None:
    """Make the names in a directory durable."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_kernels() -> tuple[Callable[..., Any], ...]:
    """Return the kernels of a load."""
    return layout.rank_of, layout.hash_records, layout.index_records, layout.sum_pages, *sort_kernels()
