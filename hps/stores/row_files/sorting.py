"""Sorts gathered rows by the hash of their keys: finds their order, and copies whole records in it.

Hashes are spread over parts by their upper bits, and each part is sorted in a processor's cache, all by several threads. Rows
stay where they arrived; a record is copied once, to its place in the file.
"""

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from numba import int64, types, uint32, uint64

from hps.ground.hashing import scale, share_hash
from hps.ground.kernels.numba_atomics import address_of, prefetch
from hps.ground.kernels.numba_kernels import kernel, read_only
from hps.ground.threads.thread_pool import POOL
from hps.types import BoolArray, IndexArray

Hashes = npt.NDArray[np.uint64]

_ROWS_A_PART: Final = 8192
_ROWS_A_PIECE: Final = 262_144
_LOW: Final = np.uint64(0xFFFFFFFF)
_AHEAD_ROWS: Final = 4  # records that are awaited together; more gain nothing
_AHEAD_BYTES: Final = np.uint64(1024)
_LINE: Final = np.uint64(64)

_void: Any = types.void
_HASHES = read_only(uint64[::1])


@kernel(_void, read_only(int64[::1]), read_only(uint32[:, ::1]), int64, int64, int64, uint32[:, ::1], uint64[::1])
def append_rows(keys, rows, start, stop, at, records, hashes):  # type: ignore[no-untyped-def]
    """Write keys and rows [start, stop) to the records from `at + start` on, and the hashes of the keys."""
    for i in range(start, stop):
        word = np.uint64(keys[i])
        records[at + i, 0] = np.uint32(word & _LOW)
        records[at + i, 1] = np.uint32(word >> np.uint64(32))
        for w in range(rows.shape[1]):
            records[at + i, 2 + w] = rows[i, w]
        hashes[at + i] = share_hash(keys[i])


@kernel(_void, _HASHES, int64, int64, int64, int64[::1])
def count_parts(hashes, start, stop, parts, counts):  # type: ignore[no-untyped-def]
    """Count the hashes [start, stop) of each part."""
    for i in range(start, stop):
        counts[scale(hashes[i], parts)] += 1


@kernel(_void, _HASHES, int64, int64, int64, int64[::1], uint64[::1], int64[::1])
def fill_parts(hashes, start, stop, parts, places, spread, numbers):  # type: ignore[no-untyped-def]
    """Write the hashes [start, stop) and their positions to the next place of their part."""
    for i in range(start, stop):
        part = scale(hashes[i], parts)
        spread[places[part]] = hashes[i]
        numbers[places[part]] = i
        places[part] += 1


@kernel(_void, read_only(uint32[:, ::1]), read_only(int64[::1]), read_only(int64[::1]), int64, uint32[:, ::1])
def gather_records(records, numbers, places, shift, out):  # type: ignore[no-untyped-def]
    """Copy record `numbers[i]` to `out[shift + places[i]]`."""
    record_bytes = np.uint64(4 * records.shape[1])
    at = np.uint64(address_of(records))
    for i in range(numbers.size):
        if i + _AHEAD_ROWS < numbers.size:
            first = at + np.uint64(numbers[i + _AHEAD_ROWS]) * record_bytes
            ahead = np.uint64(0)
            while ahead < record_bytes and ahead < _AHEAD_BYTES:
                prefetch(first + ahead)  # type: ignore[arg-type]
                ahead += _LINE
        for word in range(out.shape[1]):
            out[shift + places[i], word] = records[numbers[i], word]


def sort_kernels() -> tuple[Callable[..., Any], ...]:
    """Return the kernels of this module."""
    return append_rows, count_parts, fill_parts, gather_records


def sorted_order(hashes: Hashes) -> tuple[IndexArray, Hashes]:
    """Find the order of rows by hash, (n,) uint64; of equal hashes only the last row stays.

    Returns:
        The rows' numbers in that order, (m,), and their hashes, ascending.
    """
    count = hashes.size
    parts = max(1, count // _ROWS_A_PART)
    pieces = max(1, count // _ROWS_A_PIECE)
    ends = np.linspace(0, count, pieces + 1).astype(np.int64)
    counts = np.zeros((pieces, parts), np.int64)

    def count_pieces(first: int, last: int) -> None:
        for piece in range(first, last):
            count_parts(hashes, ends[piece], ends[piece + 1], parts, counts[piece])

    POOL.run(pieces, 1, count_pieces)
    bounds = np.concatenate(([0], np.cumsum(counts.sum(0))))
    places = bounds[:-1] + np.cumsum(counts, 0) - counts  # (pieces, parts): equal hashes stay in the order of arrival
    spread, numbers = np.empty(count, np.uint64), np.empty(count, np.int64)

    def fill_pieces(first: int, last: int) -> None:
        for piece in range(first, last):
            fill_parts(hashes, ends[piece], ends[piece + 1], parts, places[piece], spread, numbers)

    POOL.run(pieces, 1, fill_pieces)
    sizes = np.empty(parts, np.int64)

    def sort_parts(first: int, last: int) -> None:
        for part in range(first, last):
            here = slice(bounds[part], bounds[part + 1])
            order = np.argsort(spread[here])  # several times faster than a stable sort, which only repeated keys need
            ranked = spread[here][order]
            if (kept := _last_of_each(ranked)) is not None:
                order = np.argsort(spread[here], kind="stable")[kept]
                ranked = spread[here][order]
            sizes[part] = order.size
            filled = slice(bounds[part], bounds[part] + order.size)
            spread[filled], numbers[filled] = ranked, numbers[here][order]

    POOL.run(parts, 1, sort_parts)
    if sizes.sum() == count:
        return numbers, spread
    kept = np.concatenate([np.arange(first, first + size) for first, size in zip(bounds[:-1], sizes, strict=True)])
    return numbers[kept], spread[kept]


def _last_of_each(ranked: Hashes) -> BoolArray | None:
    """Return which of ascending hashes are the last of their value; None if no value is repeated."""
    repeats = ranked[1:] == ranked[:-1]
    return np.append(~repeats, True) if repeats.any() else None
