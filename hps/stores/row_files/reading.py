"""The kernels of a lookup in a row file: finding and copying rows, and the pages that this reads.

`fetch_records` does a whole lookup in one pass. It stops when it has waited for the disk, and the caller continues with the
three steps of `presence.py`, whose pages the other kernels name.
"""

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numba import boolean, int64, njit, types, uint8, uint32, uint64

from hps.ground.hashing import mix, scale, share_hash
from hps.ground.kernels.numba_atomics import address_of, call_4, load_acquire, prefetch
from hps.ground.kernels.numba_kernels import kernel, read_only
from hps.ground.key_sets import slot_of_hash
from hps.stores.row_files.changed_rows import is_marked
from hps.stores.row_files.layout import PAGE_BYTES, fingerprint_of, first_record, holds_key, sum_of

_BLOCK: Final = 32  # keys whose starts, fingerprints and records are awaited together, so that their cache misses overlap
_AHEAD_BYTES: Final = np.uint64(256)
_LINE: Final = np.uint64(64)
_CHECKED_KEYS: Final = 256  # keys between two counts of faults, which take 0.4 us; the first comes after one block
_FEW: Final = 64  # one of so many keys may wait for the disk

_PLACES, _FIRST, _LAST, _CANDIDATE, _USAGE = 0, 32, 64, 96, 128
DONE, COPIED, DAMAGED, STOPPED, LEFT = 146, 147, 148, 149, 150
"""Places of the results of `fetch_records` in its scratch memory."""
SCRATCH: Final = 151
_MAJOR_FAULTS: Final = 9  # place in `struct rusage`, in words of 8 bytes
_THREAD: Final = 1  # RUSAGE_THREAD

_void: Any = types.void
_KEYS: Any = read_only(int64[::1])
_RECORDS, _STARTS, _FINGERPRINTS = read_only(uint32[:, ::1]), read_only(uint32[::1]), read_only(uint8[::1])
_WORDS = read_only(uint64[::1])


@njit(inline="always")
def _faults(getrusage, scratch):  # type: ignore[no-untyped-def]
    """Return the number of pages that this thread has waited for so far."""
    if getrusage != 0:
        call_4(getrusage, np.int64(_THREAD), address_of(scratch) + 8 * _USAGE, np.int64(0), np.int64(0))  # type: ignore[arg-type]
    return scratch[_USAGE + _MAJOR_FAULTS]


@njit(inline="always")
def _damaged(words, sums, start, stop):  # type: ignore[no-untyped-def]
    """Return the first damaged page under bytes [start, stop) of the pages, or -1."""
    for page in range(start // PAGE_BYTES, (stop - 1) // PAGE_BYTES + 1):
        if sum_of(words, 512 * page, 512 * page + 512) != sums[page]:
            return page
    return -1


@kernel(
    _void,
    _KEYS,
    _RECORDS,
    _STARTS,
    _FINGERPRINTS,
    uint64,
    uint64,
    uint32[:, ::1],
    boolean[::1],
    _WORDS,
    _WORDS,
    _WORDS,
    _WORDS,
    _KEYS,
    read_only(uint32[:, ::1]),
    boolean[::1],
    int64[::1],
    int64,
)
def fetch_records(  # type: ignore[no-untyped-def]
    keys,
    records,
    starts,
    fingerprints,
    lowest,
    highest,
    out,
    found,
    words,
    sums,
    marks,
    slots,
    places,
    rows_of,
    left,
    scratch,
    getrusage,
):
    """Copy the row of each key that is not yet `found`, and mark it, until too many pages were missing.

    Args:
        lowest, highest: hashes of keys that the file may have; others are absent.
        out: (n, width) uint32; of no column: only mark which keys are there.
        marks, slots, places, rows_of: a `ChangesView`, or `marks` of no element.
        left: (n,) bool, marked for changed keys whose rows are in RocksDB; `LEFT` in `scratch` is their number.
        words: the pages, to compare each that is read with its checksum in `sums`; of no element: do not.
        scratch: (SCRATCH,) int64. Receives at `DONE` how many leading keys were looked up, at `COPIED` how many rows were
            copied, at `DAMAGED` the first damaged page, or -1, and at `STOPPED` 1 if too many pages were missing.
        getrusage: address of the function that counts missing pages; 0 to never stop.
    """
    rows, buckets, width = records.shape[0], starts.size - 1, out.shape[1]
    record_bytes = np.uint64(4 * records.shape[1])
    at_records, at_starts, at_prints = (
        np.uint64(address_of(records)),
        np.uint64(address_of(starts)),
        np.uint64(address_of(fingerprints)),
    )
    positions, first, last, candidate = scratch[:32], scratch[32:64], scratch[64:96], scratch[96:128]
    scratch[DONE], scratch[COPIED], scratch[DAMAGED], scratch[STOPPED], scratch[LEFT] = 0, 0, -1, 0, 0
    at_places = address_of(places)
    starts_at, prints_at = np.int64(at_starts) - address_of(words), np.int64(at_prints) - address_of(words)
    before = _faults(getrusage, scratch)
    at, copied, next_check = 0, 0, _BLOCK
    while at < keys.size:
        count = 0
        while at < keys.size and count < _BLOCK:
            if not found[at]:
                if marks.size:
                    mixed = mix(keys[at])
                    slot = slot_of_hash(mixed, slots) if is_marked(marks, mixed) else -1
                    if slot >= 0 and slots[slot] != np.uint64(0):
                        place = load_acquire(at_places + 8 * slot)
                        if place < 0:
                            left[at] = True
                            scratch[LEFT] += 1
                        else:
                            for word in range(width):
                                out[at, word] = rows_of[place, word]
                            found[at] = True
                            copied += 1
                        at += 1
                        continue
                hashed = share_hash(keys[at])
                if lowest <= hashed <= highest:
                    positions[count] = at
                    bucket = scale(hashed, buckets)
                    first[count] = bucket
                    prefetch(at_starts + np.uint64(4) * np.uint64(bucket))  # type: ignore[arg-type]
                    count += 1
            at += 1
        for i in range(count):
            bucket = first[i]
            if words.size and scratch[DAMAGED] < 0:
                scratch[DAMAGED] = _damaged(words, sums, starts_at + 4 * bucket, starts_at + 4 * bucket + 8)
            first[i] = first_record(starts, bucket, rows)
            last[i] = first_record(starts, bucket + 1, rows)
            prefetch(at_prints + np.uint64(first[i]))  # type: ignore[arg-type]
        for i in range(count):
            print_ = fingerprint_of(keys[positions[i]])
            row = first[i]
            if words.size and scratch[DAMAGED] < 0 and row < last[i]:
                scratch[DAMAGED] = _damaged(words, sums, prints_at + row, prints_at + last[i])
            while row < last[i] and fingerprints[row] != print_:
                row += 1
            candidate[i] = row
            if row < last[i]:
                record = at_records + np.uint64(row) * record_bytes
                ahead = np.uint64(0)
                while ahead < record_bytes and ahead < _AHEAD_BYTES:
                    prefetch(record + ahead)  # type: ignore[arg-type]
                    ahead += _LINE
        for i in range(count):
            key, position = keys[positions[i]], positions[i]
            print_ = fingerprint_of(key)
            row = candidate[i]
            while row < last[i] and not (fingerprints[row] == print_ and holds_key(records, row, key)):
                row += 1
            if row < last[i]:
                if words.size and scratch[DAMAGED] < 0:
                    start = row * np.int64(record_bytes)
                    scratch[DAMAGED] = _damaged(words, sums, start, start + np.int64(record_bytes))
                if scratch[DAMAGED] >= 0:
                    return
                for word in range(width):
                    out[position, word] = records[row, 2 + word]
                found[position] = True
                copied += 1
        if scratch[DAMAGED] >= 0:
            return
        scratch[DONE], scratch[COPIED] = at, copied
        if at >= next_check:
            next_check = at + _CHECKED_KEYS
            if _faults(getrusage, scratch) - before > 1 + at // _FEW:
                scratch[STOPPED] = 1
                return
    scratch[DONE], scratch[COPIED] = at, copied


# -- the pages of a lookup ---------------------------------------------------------------------------------------------


@kernel(int64, _KEYS, read_only(boolean[::1]), uint64, uint64, int64, int64, int64[::1])
def start_pages(keys, found, lowest, highest, buckets, at, pages):  # type: ignore[no-untyped-def]
    """Write the pages of the starts of keys that are not `found` to `pages`, (2 n,); return how many. `at`: of the part."""
    count = 0
    for i in range(keys.size):
        hashed = share_hash(keys[i])
        if not found[i] and lowest <= hashed <= highest:
            word = at + 4 * scale(hashed, buckets)
            pages[count] = word // PAGE_BYTES
            pages[count + 1] = (word + 7) // PAGE_BYTES
            count += 2
    return count


@kernel(int64, _KEYS, read_only(boolean[::1]), uint64, uint64, int64, _STARTS, int64[:, ::1])
def record_ranges(keys, found, lowest, highest, rows, starts, ranges):  # type: ignore[no-untyped-def]
    """Write the range of records of the bucket of each key, empty if `found`, to `ranges`, (n, 2); return how many records."""
    total = 0
    for i in range(keys.size):
        ranges[i, 0] = ranges[i, 1] = 0
        hashed = share_hash(keys[i])
        if not found[i] and lowest <= hashed <= highest:
            bucket = scale(hashed, starts.size - 1)
            ranges[i, 0] = first_record(starts, bucket, rows)
            ranges[i, 1] = max(first_record(starts, bucket + 1, rows), ranges[i, 0])
            total += ranges[i, 1] - ranges[i, 0]
    return total


@kernel(int64, _KEYS, read_only(int64[:, ::1]), _FINGERPRINTS, int64[:, ::1])
def candidate_ranges(keys, ranges, fingerprints, candidates):  # type: ignore[no-untyped-def]
    """Write each record of the ranges with a key's fingerprint, as a range, to `candidates`, (m, 2); return how many."""
    count = 0
    for i in range(keys.size):
        print_ = fingerprint_of(keys[i])
        for row in range(ranges[i, 0], ranges[i, 1]):
            if fingerprints[row] == print_:
                candidates[count, 0], candidates[count, 1] = row, row + 1
                count += 1
    return count


@kernel(int64, read_only(int64[:, ::1]), int64, int64, int64[::1])
def range_pages(ranges, at, item_bytes, pages):  # type: ignore[no-untyped-def]
    """Write the pages of ranges of items, the first at byte `at`; return how many, even if `pages` is too short."""
    count = 0
    for i in range(ranges.shape[0]):
        if ranges[i, 0] < ranges[i, 1]:
            for page in range(
                (at + ranges[i, 0] * item_bytes) // PAGE_BYTES, (at + ranges[i, 1] * item_bytes - 1) // PAGE_BYTES + 1
            ):
                if count < pages.size:
                    pages[count] = page
                count += 1
    return count


def reading_kernels() -> tuple[Callable[..., Any], ...]:
    """Return the kernels of a lookup."""
    return fetch_records, start_pages, record_ranges, candidate_ranges, range_pages
