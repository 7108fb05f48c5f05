"""The kernels of a lookup in a row file: finding and copying rows, and the pages that this reads.

`fetch_records` does a whole lookup in one pass. It stops when it has waited for the disk, and the caller continues with the
three steps of `presence.py`, whose pages the other kernels name.
"""

from collections.abc import Callable
from typing import Any, Final, cast

import numba
import numpy as np
import numpy.typing as npt
from numba import boolean, int64, njit, types, uint8, uint32, uint64

from hps.ground.hashing import mix, scale, share_hash
from hps.ground.kernels.numba_atomics import (
    address_of,
    call_4,
    copy_bytes,
    load_acquire,
    load_unaligned,
    lowest_bit,
    pointer_to,
    prefetch,
)
from hps.ground.kernels.numba_kernels import kernel, read_only
from hps.ground.key_sets import slot_of_hash
from hps.stores.row_files.changed_rows import is_marked, mark_of
from hps.stores.row_files.layout import PAGE_BYTES, FileHead, fingerprint_of, first_record, holds_key, sum_of

_BLOCK: Final = 64  # keys whose starts, fingerprints and records are awaited together, so that their cache misses overlap
_AT_ONCE: Final = 8  # fingerprints that are compared at once: those of 98 of 100 buckets
_EACH_BYTE: Final = np.uint64(0x0101010101010101)
_LOWER_BITS: Final = np.uint64(0x7F7F7F7F7F7F7F7F)
_AHEAD_BYTES: Final = np.uint64(256)
_LINE: Final = np.uint64(64)
_KEY_BYTES: Final = np.uint64(8)
_CHECKED_KEYS: Final = 256  # keys between two counts of faults, which take 0.4 us; the first comes after one block
_FEW: Final = 64  # one of so many keys may wait for the disk

_USAGE: Final = 5 * _BLOCK  # place of a `struct rusage` in the scratch memory of `fetch_records`
DONE, COPIED, DAMAGED, STOPPED = range(_USAGE + 18, _USAGE + 22)
"""Places of its results there."""
SCRATCH: Final = _USAGE + 22
_MAJOR_FAULTS: Final = 9  # place in `struct rusage`, in words of 8 bytes
_THREAD: Final = 1  # RUSAGE_THREAD

_void: Any = types.void
_KEYS: Any = read_only(int64[::1])
_RECORDS, _STARTS, _FINGERPRINTS = read_only(uint32[:, ::1]), read_only(uint32[::1]), read_only(uint8[::1])
_carray: Any = cast(Any, numba).carray  # its types want pointers of ctypes


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


@njit(inline="always")
def _matches(fingerprints_at, first, last, hashed):  # type: ignore[no-untyped-def]
    """Return the upper bit of each of the first `_AT_ONCE` bytes, records of a bucket, that equals a hash's fingerprint.

    It reads up to `_AT_ONCE` bytes beyond the fingerprints, where the file has its sums.
    """
    word = load_unaligned(fingerprints_at + np.uint64(first)) ^ (_EACH_BYTE * (hashed & np.uint64(255)))
    equal = ~(((word & _LOWER_BITS) + _LOWER_BITS) | word | _LOWER_BITS)
    if last - first < _AT_ONCE:
        equal &= (np.uint64(1) << np.uint64(8 * (last - first))) - np.uint64(1)
    return equal


@njit(inline="always")
def _row_of(key, matches, first, last, at_records, record_bytes, records, fingerprints):  # type: ignore[no-untyped-def]
    """Return the number of the record of a key among [first, last); `last` or more if it is absent."""
    while matches != np.uint64(0):
        row = first + np.int64(lowest_bit(matches) >> np.uint64(3))
        if np.int64(load_unaligned(at_records + np.uint64(row) * record_bytes)) == key:
            return row
        matches &= matches - np.uint64(1)
    row = first + _AT_ONCE
    while row < last and not (fingerprints[row] == fingerprint_of(key) and holds_key(records, row, key)):
        row += 1
    return row


@kernel(_void, _KEYS, uint32[:, ::1], boolean[::1], boolean[::1], _KEYS, _KEYS, int64[::1], boolean, int64)
def fetch_records(keys, out, found, left, parts, changes, scratch, verify, getrusage):  # type: ignore[no-untyped-def]
    """Copy the row of each key that is not yet `found`, and mark it, until too many pages were missing.

    Parts come by their addresses, since numba makes an object of each array, which takes 0.3 us.

    Args:
        out: (n, width) uint32; of no column: only mark which keys are there.
        left: (n,) bool, marked for changed keys, not yet `found`, whose rows are in RocksDB.
        parts: (10,) int64, the file: see `file_parts`.
        changes: `ChangesView.parts`, or no element.
        scratch: (SCRATCH,) int64. Receives at `DONE` how many leading keys were looked up, at `COPIED` how many rows were
            copied, at `DAMAGED` the first damaged page, or -1, and at `STOPPED` 1 if too many pages were missing.
        verify: compare each page that is read with its checksum.
        getrusage: address of the function that counts missing pages; 0 to never stop.
    """
    rows, buckets, width, pages = parts[1], parts[4], out.shape[1], parts[7]
    record_bytes, row_bytes, at_out = np.uint64(4 * parts[2]), np.uint64(4 * width), np.uint64(address_of(out))
    records = _carray(pointer_to(parts[0]), (rows, parts[2]), uint32)
    starts, fingerprints = _carray(pointer_to(parts[3]), (buckets + 1,), uint32), _carray(pointer_to(parts[5]), (rows,), uint8)
    words, sums = _carray(pointer_to(parts[0]), (512 * pages,), uint64), _carray(pointer_to(parts[6]), (pages,), uint64)
    at_records, at_starts, at_prints = np.uint64(parts[0]), np.uint64(parts[3]), np.uint64(parts[5])
    starts_at, prints_at = parts[3] - parts[0], parts[5] - parts[0]
    lowest, highest = np.uint64(parts[8]), np.uint64(parts[9])
    is_changed = changes.size > 0
    # Without changes, some array: it is not read.
    marks = _carray(pointer_to(changes[0] if is_changed else parts[0]), (changes[1] if is_changed else 0,), uint64)
    slots = _carray(pointer_to(changes[2] if is_changed else parts[0]), (changes[3] if is_changed else 0,), uint64)
    at_marks = np.uint64(address_of(marks))
    at_places, at_rows = changes[4] if is_changed else 0, changes[5] if is_changed else 0
    positions, first, last = scratch[:_BLOCK], scratch[_BLOCK : 2 * _BLOCK], scratch[2 * _BLOCK : 3 * _BLOCK]
    hashes, matching = scratch[3 * _BLOCK : 4 * _BLOCK].view(np.uint64), scratch[4 * _BLOCK : 5 * _BLOCK].view(np.uint64)
    scratch[DONE], scratch[COPIED], scratch[DAMAGED], scratch[STOPPED] = 0, 0, -1, 0
    before = _faults(getrusage, scratch)
    at, copied, next_check = 0, 0, _BLOCK
    while at < keys.size:
        if is_changed:
            for i in range(at, min(at + _BLOCK, keys.size)):
                prefetch(at_marks + np.uint64(8) * mark_of(marks, mix(keys[i])))
        count = np.uint64(0)  # unsigned, so that numba does not check for negative ones
        while at < keys.size and count < np.uint64(_BLOCK):
            if not found[at]:
                if is_changed:
                    mixed = mix(keys[at])
                    slot = slot_of_hash(mixed, slots) if is_marked(marks, mixed) else -1
                    if slot >= 0 and slots[slot] != np.uint64(0):
                        place = load_acquire(at_places + 8 * slot)
                        if place < 0:
                            left[at] = True
                        else:
                            row_of = _carray(pointer_to(at_rows + 4 * width * place), (width,), uint32)
                            for word in range(width):
                                out[at, word] = row_of[word]
                            found[at] = True
                            copied += 1
                        at += 1
                        continue
                hashed = share_hash(keys[at])
                if lowest <= hashed <= highest:
                    positions[count], hashes[count] = at, hashed
                    first[count] = scale(hashed, buckets)
                    start = at_starts + np.uint64(4) * np.uint64(first[count])
                    prefetch(start)  # type: ignore[arg-type]
                    prefetch(start + np.uint64(7))  # type: ignore[arg-type]
                    count += np.uint64(1)
            at += 1
        for i in range(count):
            bucket = first[i]
            if verify and scratch[DAMAGED] < 0:
                scratch[DAMAGED] = _damaged(words, sums, starts_at + 4 * bucket, starts_at + 4 * bucket + 8)
            first[i] = first_record(starts, bucket, rows)
            last[i] = max(first_record(starts, bucket + 1, rows), first[i])
            # One in nine buckets continues on the next line. To wait there for it takes a fifth of the time of absent keys.
            prefetch(at_prints + np.uint64(first[i]))  # type: ignore[arg-type]
            prefetch(at_prints + np.uint64(first[i] + _AT_ONCE - 1))  # type: ignore[arg-type]
        candidates = np.uint64(0)
        for i in range(count):
            row, end = first[i], last[i]
            if verify and scratch[DAMAGED] < 0 and row < end:
                scratch[DAMAGED] = _damaged(words, sums, prints_at + row, prints_at + end)
            equal = _matches(at_prints, row, end, hashes[i])
            if equal != np.uint64(0) or end - row > _AT_ONCE:
                positions[candidates], matching[candidates] = positions[i], equal
                first[candidates], last[candidates] = row, end
                candidates += np.uint64(1)
                if equal != np.uint64(0):
                    record = at_records + (np.uint64(row) + (lowest_bit(equal) >> np.uint64(3))) * record_bytes
                    ahead = np.uint64(0)
                    while ahead < record_bytes and ahead < _AHEAD_BYTES:
                        prefetch(record + ahead)  # type: ignore[arg-type]
                        ahead += _LINE
        for i in range(candidates):
            position = positions[i]
            row = _row_of(keys[position], matching[i], first[i], last[i], at_records, record_bytes, records, fingerprints)
            if row < last[i]:
                if verify and scratch[DAMAGED] < 0:
                    start_byte = row * np.int64(record_bytes)
                    scratch[DAMAGED] = _damaged(words, sums, start_byte, start_byte + np.int64(record_bytes))
                if scratch[DAMAGED] >= 0:
                    return
                record = at_records + np.uint64(row) * record_bytes + _KEY_BYTES
                copy_bytes(at_out + np.uint64(position) * row_bytes, record, row_bytes)  # type: ignore[arg-type]
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


def file_parts(mapped: npt.NDArray[np.uint8], head: FileHead, lowest: int, highest: int) -> npt.NDArray[np.int64]:
    """Return what `fetch_records` reads of a mapped file, (10,) int64: addresses and sizes.

    Args:
        lowest, highest: hashes of keys that the file may have; others are absent.
    """
    base = mapped.ctypes.data
    return np.array(
        [
            base + head.records_at,
            head.rows,
            2 + head.width,
            base + head.starts_at,
            head.buckets,
            base + head.fingerprints_at,
            base + head.sums_at,
            head.pages,
            lowest,
            highest,
        ],
        np.uint64,
    ).view(np.int64)


def reading_kernels() -> tuple[Callable[..., Any], ...]:
    """Return the kernels of a lookup."""
    return fetch_records, start_pages, record_ranges, candidate_ranges, range_pages
