"""Writes row files: sorts rows into runs, and merges runs and older files in one walk."""

import os
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from hps.errors import DatabaseError
from hps.ground.threads.thread_pool import POOL, available_threads
from hps.stores.row_files import layout
from hps.stores.row_files.layout import PAGE_BYTES, Head, RowFacts, buckets_for, content_fingerprint, lowest_hash
from hps.stores.row_files.row_file import Records
from hps.types import BoolArray, FloatArray, IndexArray, KeyArray, row_dtype_of

TEMPORARY: Final = ".building"
"""Suffix of files that are not complete; a start removes them."""

_SLICE_BYTES: Final = 4 << 20
"""Records of a slice: what one thread merges at a time, in the second-level cache but for the rows."""
_SLICES_A_THREAD: Final = 2
_JOINED_ROWS: Final = 8192
_SUMMED_PAGES: Final = 1024


class Run(NamedTuple):
    """Rows in the order of their keys' hash, each key once."""

    records: Records
    deleted: BoolArray | None = None  # (n,) bool: rows that are to be absent from the merged file


def sorted_run(
    keys: KeyArray,  # (n,)
    rows: FloatArray,  # (n, width)
    deleted: BoolArray | None = None,  # (n,)
) -> Run:
    """Copy rows into a run. Of a repeated key the last row counts."""
    hashes = np.empty(keys.size, np.uint64)
    layout.hash_keys(keys, hashes)
    order = np.argsort(hashes)  # several times faster than a stable sort, which only repeated keys need
    ranked = hashes[order]
    repeats = ranked[1:] == ranked[:-1]
    if repeats.any():
        order = np.argsort(hashes, kind="stable")[np.append(~repeats, True)]
    records = np.empty((order.size, 2 + rows.shape[1]), np.uint32)
    words = rows.view(np.uint32)
    POOL.run(order.size, _JOINED_ROWS, lambda first, last: layout.join_records(keys, words, order, first, last, records))
    return Run(records, None if deleted is None else deleted[order])


class _Slice(NamedTuple):
    """The merged records of a range of buckets."""

    bucket: int  # the first one
    stop: int
    hashes: npt.NDArray[np.uint64]  # (m,) ascending
    parts: list[tuple[int, IndexArray, IndexArray]]  # of each run: its number, its records, and their places in the slice


class _Merge:
    """Merges runs, of which the first has the latest row of a key. *One per thread.*"""

    def __init__(self, runs: Sequence[Run], buckets: int) -> None:
        self._runs = runs
        self._buckets = buckets

    def slice(self, bucket: int, stop: int) -> _Slice:
        """Find the records of buckets [bucket, stop)."""
        bounds = [self._bounds(run, bucket, stop) for run in self._runs]
        counts = [last - first for first, last in bounds]
        hashes = np.empty(sum(counts), np.uint64)
        origins = np.repeat(np.arange(len(counts)), counts)
        numbers = np.empty(hashes.size, np.int64)
        gone: BoolArray | None = np.zeros(hashes.size, np.bool_) if any(run.deleted is not None for run in self._runs) else None
        at = 0
        for run, (first, last) in zip(self._runs, bounds, strict=True):
            layout.hash_records(run.records, first, last, hashes, at)
            numbers[at : at + last - first] = np.arange(first, last)
            if gone is not None and run.deleted is not None:
                gone[at : at + last - first] = run.deleted[first:last]
            at += last - first
        if sum(count > 0 for count in counts) > 1:  # of equal hashes the first stays, which is of the latest run
            order = np.argsort(hashes, kind="stable")
            hashes = hashes[order]
            latest = np.append(True, hashes[1:] != hashes[:-1])
            order, hashes = order[latest], hashes[latest]
            origins, numbers = origins[order], numbers[order]
            gone = None if gone is None else gone[order]
        if gone is not None and gone.any():
            hashes, origins, numbers = hashes[~gone], origins[~gone], numbers[~gone]
        parts = []
        for run_number, count in enumerate(counts):
            if count:
                places = np.flatnonzero(origins == run_number)
                parts.append((run_number, numbers[places], places))
        return _Slice(bucket, stop, hashes, parts)

    def _bounds(self, run: Run, bucket: int, stop: int) -> tuple[int, int]:
        last = run.records.shape[0]
        if stop < self._buckets:
            last = layout.rank_of(run.records, np.uint64(lowest_hash(stop, self._buckets)))
        return layout.rank_of(run.records, np.uint64(lowest_hash(bucket, self._buckets))) if bucket else 0, last

    def copy(self, piece: _Slice, shift: int, out: Records) -> None:
        """Copy the records of a slice to `out` from record `shift` on."""
        for run_number, numbers, places in piece.parts:
            layout.pick_records(self._runs[run_number].records, numbers, places, shift, out)


def write_row_file(
    path: Path,
    tag: str,
    width: int,
    runs: Sequence[Run],
    *,
    source: str = "",
    facts: RowFacts | None = None,
    progress: Callable[[int], None] | None = None,
) -> Head:
    """Merge runs into a row file, which replaces one of this name. It is complete and durable, or not there.

    Memory beside the runs: two bytes a row, and some 8 MB for each thread.

    Args:
        runs: the latest first; records may be those of mapped files.
        source: identifies what the rows came from.
        facts: what is known of the rows; by default their format, by the tag.
        progress: called after each step with the number of records written.

    Raises:
        DatabaseError: the file cannot be written; what was written is removed.
    """
    fresh = path.with_name(f"{path.name}.{secrets.token_hex(4)}{TEMPORARY}")
    try:
        file = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o444)
        try:
            head = _write(file, tag, width, runs, source, facts or RowFacts(row_dtype_of(tag)), progress)
            os.fsync(file)
        finally:
            os.close(file)
        fresh.replace(path)
        sync_directory(path.parent)
    except OSError as error:
        raise DatabaseError(f"writing the row file {path}: {error}") from error
    finally:
        with suppress(OSError):
            fresh.unlink()
    return head


def _write(
    file: int,
    tag: str,
    width: int,
    runs: Sequence[Run],
    source: str,
    facts: RowFacts,
    progress: Callable[[int], None] | None,
) -> Head:
    most = sum(run.records.shape[0] for run in runs)
    buckets = buckets_for(most)
    starts, fingerprints = np.zeros(buckets + 1, np.uint32), np.empty(most, np.uint8)
    sums: list[npt.NDArray[np.uint64]] = []
    merge = _Merge(runs, buckets)
    words = 2 + width
    buckets_a_slice = max(1, _SLICE_BYTES * buckets // max(1, 4 * words * most))
    window = buckets_a_slice * _SLICES_A_THREAD * available_threads()
    at, rest, rows = PAGE_BYTES, np.empty(0, np.uint8), 0
    for begin in range(0, buckets, window):
        bounds = [*range(begin, min(begin + window, buckets), buckets_a_slice), min(begin + window, buckets)]
        slices: list[Any] = [None] * (len(bounds) - 1)

        def find(first: int, last: int, slices: list[Any] = slices, bounds: list[int] = bounds) -> None:
            for i in range(first, last):
                slices[i] = merge.slice(bounds[i], bounds[i + 1])

        POOL.run(len(slices), 1, find)
        shifts = np.concatenate(([0], np.cumsum([piece.hashes.size for piece in slices])))
        memory = np.empty(rest.size + int(shifts[-1]) * 4 * words, np.uint8)
        memory[: rest.size] = rest
        records = memory[rest.size :].view(np.uint32).reshape(-1, words)

        def copy(
            first: int, last: int, slices: list[Any] = slices, shifts: Any = shifts, records: Any = records, rows: int = rows
        ) -> None:
            for i in range(first, last):
                piece = slices[i]
                merge.copy(piece, int(shifts[i]), records)
                layout.index_records(
                    piece.hashes, rows + int(shifts[i]), piece.bucket, piece.stop, buckets, starts, fingerprints
                )

        POOL.run(len(slices), 1, copy)
        rows += int(shifts[-1])
        whole = memory.size // PAGE_BYTES * PAGE_BYTES
        sums.append(_write_pages(file, memory[:whole], at))
        at, rest = at + whole, memory[whole:].copy()
        if progress:
            progress(int(shifts[-1]))
    starts[buckets] = np.uint32(rows & 0xFFFFFFFF)
    for part in (rest, starts.view(np.uint8), fingerprints[:rows]):
        padded = np.zeros(-(-part.size // PAGE_BYTES) * PAGE_BYTES, np.uint8)
        padded[: part.size] = part
        sums.append(_write_pages(file, padded, at))
        at += padded.size
    total = np.concatenate(sums)
    _write_all(file, total.view(np.uint8), at)
    head = Head(tag, width, rows, buckets, source, layout.checksum(total.view(np.uint8)), **facts._asdict())
    head = replace(head, content=content_fingerprint(head, total))
    _write_all(file, np.frombuffer(head.packed(), np.uint8), 0)
    return head


def _write_pages(file: int, pages: npt.NDArray[np.uint8], at: int) -> npt.NDArray[np.uint64]:
    """Write whole pages; return their checksums."""
    count = pages.size // PAGE_BYTES
    sums, words = np.empty(count, np.uint64), pages.view(np.uint64)

    def part(first: int, last: int) -> None:
        layout.sum_pages(words[512 * first : 512 * last], sums[first:last])
        _write_all(file, pages[PAGE_BYTES * first : PAGE_BYTES * last], at + PAGE_BYTES * first)

    POOL.run(count, _SUMMED_PAGES, part)
    return sums


def _write_all(file: int, content: npt.NDArray[np.uint8], at: int) -> None:
    view = content.data
    while view:
        written = os.pwrite(file, view, at)
        view, at = view[written:], at + written


def sync_directory(directory: Path) -> None:
    """Make the names in a directory durable."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_kernels() -> tuple[Callable[..., Any], ...]:
    """Return the kernels of a load."""
    return (
        layout.hash_keys,
        layout.join_records,
        layout.rank_of,
        layout.hash_records,
        layout.pick_records,
        layout.index_records,
        layout.sum_pages,
    )
