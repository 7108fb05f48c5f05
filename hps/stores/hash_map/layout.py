"""The memory layout of the hash map, and how its readers and its writer use it.

A bucket is 128 bytes, aligned to 128: an 8-byte header (from its low bits: version 32, occupancy mask 16, overflow count
16), ten int64 keys, ten uint32 row numbers. Entry e exists if bit e of the mask is set, so any int64 is a legal key. The
home of a key is the bucket that `scale` gives for its mixed bits. A key lies in its home or, if that is full, in a later
bucket, around the end. Each bucket that it passed counts it in its overflow count, so a search ends at the first bucket
whose count is 0, and a deletion leaves no tombstone. A count that reaches 65,535 stays there; only crafted keys get so far.

A table has one array of buckets or, from 4,096 buckets on, sixteen *segments* by the upper bits of the hash, each in an array
of its own, so that growing one takes a sixteenth of the memory and time. Homes ascend with the hash for any number of
buckets. So growth is two sequential walks, and a hash is a scan's cursor that stays valid across growth.

Vectors lie roughly in the order of their buckets: reading many keys by ascending hash then walks through memory, which is up
to seven times faster for a device than any other order. Rows are mapped in *extents*. Each is divided evenly into at most
1,024 *stripes* by the upper bits of the hash. A new row comes from the stripe of its key: first from the list of rows freed
there, then from its unused rows, then from the next stripe, around the end. A table whose rows were reserved before loading
has one extent, with few rows outside their stripe. Otherwise each further extent repeats the order.

A table that is loaded with nearly all keys from 0 to some number is *dense*. Each of these *dense keys* has the row of its own
number, which no other key ever gets, also while the key is absent. So its vector is found without its bucket, if the key is
known to be present. Each stripe counts its *holes*, the dense keys that are absent. A table that evicts is never dense.

RACES. There is one writer at a time and any number of readers, who take no lock. The writer makes the version odd before it
changes keys, row numbers or a linked vector, and afterwards even, two more than before. A change of the overflow count alone
is one store. A reader uses what it read between two loads of an equal, even header, and otherwise retries. So it saw the key's
row as of that header, then the vector, then the same header: the whole vector that was current at that moment. The vector of
an unlinked row is written freely, since a reader of it loaded its header before the entry was removed. A segment replaced by a
larger one is *retired* before anything else changes: each of its headers becomes all ones, and a reader that meets one gets
the current layout from the table. The memory stays mapped while a reader uses the old layout.

DEVICES read pinned memory (see `in_place.py`) with fewer loads, since each takes a microsecond. While a table is pinned, the
writer makes the version of a key's stripe odd before it links, unlinks or replaces the key, and afterwards even, two more than
before. A device loads the version with an acquire load of system scope, then the buckets, then the vector, from
`HostLayout.slabs`, and after a fence the version again. If it is even and unchanged, nothing of the stripe changed meanwhile.
The version also shows whether the stripe has holes. If it has none, a dense key is present, and its vector is read without its
bucket. A row number beyond the slabs of a layout belongs to a later layout, and is not followed. Stores of CPU writers become
visible to devices in the order of their release stores and fences.

MIRRORS. A device may keep a copy of the buckets, with the version of each stripe as of that copy. It reads the copy for a key
whose stripe still has that version, and the buckets above otherwise; then it loads the version again, as always. So an outdated
copy is never used. At the end of a write, before another can start, the writer notifies mirrors of the changed buckets: while
there are mirrors, it records the addresses in a log.
"""

from typing import Any, Final

import numpy as np
from numba import int64, njit, uint64

from hps.ground.hashing import scale
from hps.ground.kernels.numba_atomics import (
    copy_4_bytes,
    copy_16_bytes,
    copy_64_bytes,
    equal_words_4,
    equal_words_8,
    fence_acquire,
    fence_release,
    load_acquire,
    load_relaxed,
    load_relaxed_u32,
    lowest_bit,
    store_relaxed,
    store_relaxed_u32,
    store_release,
)
from hps.ground.kernels.numba_kernels import read_only

# numba types of kernel arguments.
LAYOUT: Final[Any] = uint64[::1]
COUNTERS: Final[Any] = int64[::1]
KEYS: Final[Any] = read_only(int64[::1])

BUCKET_BYTES: Final = 128
ENTRIES: Final = 10

STRIPES: Final = 1024
VERSION_BYTES: Final = 64
"""One cache line each: a device's reads of the same line over its link wait for each other."""

LOAD_ROWS: Final = 9
"""Average rows per bucket at which a segment is full: one entry in ten stays free."""
RESERVED_ROWS: Final = 8
"""Average rows per bucket of a reserved table: one search in a hundred then passes two buckets or more, instead of seven."""

CHANGES_LIMIT: Final = 1 << 18
"""Maximum addresses in the log of changed buckets; more mean that any may have changed."""

# Positions in `layout`, uint64, immutable: what readers need.
SLABS: Final = 0
"""Address of the array of slab addresses."""
SLAB_SHIFT: Final = 1
VECTOR_BYTES: Final = 2
STAMP_OFFSET: Final = 3
"""Bytes from the start of a slab to its stamps; 0 where there are none."""
SEGMENT_BITS: Final = 4
"""Upper bits of a hash that choose the segment: 2^bits segments."""
VERSIONS: Final = 5
"""Address of the versions of the stripes, each `VERSION_BYTES` after the last; 0 while no device reads the table."""
DENSE_ROWS: Final = 6
"""Keys from 0 to this number, exclusive, have the row of their own number; 0 if the table is not dense."""
HOLES: Final = 7
"""Address of the numbers of holes of the stripes, uint32; 0 if the table is not dense."""
CHANGES: Final = 8
"""Address of the log of changed buckets: a count, then as many addresses, up to `CHANGES_LIMIT`; 0 before there is a mirror."""
SEGMENTS: Final = 9
"""From here on, for each segment, its address and its number of buckets. Kernels identify a segment by this position."""

# Positions in `counters`, (LISTS + 2 * lists,) int64, which the writer changes. `segment_rows` counts the rows of each segment.
ROWS: Final = 0
FREE_ROWS: Final = 1
"""Number of rows on the lists of freed rows."""
FRESH_ROWS: Final = 2
"""Number of unused rows in the current extent, which provides fresh rows."""
EXTENT_ROW: Final = 3
"""First row of the current extent."""
STRIPE_ROWS: Final = 4
"""Rows per stripe of it."""
STRIPE_BITS: Final = 5
"""It has 2^bits stripes, at most as many as there are lists."""
LIST_BITS: Final = 6
"""There are 2^bits lists of freed rows, one per stripe of the extent with the most stripes."""
LISTS: Final = 7
"""From here on, the first row of each list, or -1; the first 4 bytes of a freed vector hold the next one. Then, per stripe of
the current extent, the number of used rows."""

# Results of a search.
DONE: Final = 0
ABSENT: Final = 1
MOVED: Final = 2
"""The segment was replaced: continue with the current layout."""
BUSY: Final = 3
"""A writer is changing this bucket."""

# Effects of an access on the stamp of a row.
KEEP: Final = 0
STAMP: Final = 1
COUNT: Final = 2

U0, U1, U2, U4, U6, U7, U8, U16, U32, U48, U63, U64 = (
    np.uint64(number) for number in (0, 1, 2, 4, 6, 7, 8, 16, 32, 48, 63, 64)
)
_VERSION_BYTES, STRIPE_SHIFT = np.uint64(VERSION_BYTES), np.uint64(64 - 10)
_BUCKET, _KEYS, _ROW_NUMBERS = (np.uint64(value) for value in (BUCKET_BYTES, 8, 88))
_VERSION = np.uint64(0xFFFFFFFF)
_HAS_HOLES = np.uint64(1 << 63)  # in the version of a stripe
_FULL = np.uint64((1 << ENTRIES) - 1)
_OVERFLOW_LIMIT = np.uint64(0xFFFF)
_RETIRED = np.uint64(0xFFFFFFFFFFFFFFFF)
_STAMP_LIMIT = np.uint64(0xFFFFFFFF)
_NO_ROW = np.uint64(0xFFFFFFFF)
_CHANGES_LIMIT = np.uint64(CHANGES_LIMIT)


@njit(inline="always")
def segment_of(layout, hashed):  # type: ignore[no-untyped-def]
    """Return the segment of a hash, unsigned: numba indexes by that without a test for negative numbers."""
    return np.uint64(SEGMENTS) + (((hashed >> U32) >> (U32 - layout[SEGMENT_BITS])) << U1)


@njit(inline="always")
def number_of(segment):  # type: ignore[no-untyped-def]
    return np.int64((np.uint64(segment) - np.uint64(SEGMENTS)) >> U1)


@njit(inline="always")
def buckets_in(layout, segment):  # type: ignore[no-untyped-def]
    return layout[np.uint64(segment) + U1]


@njit(inline="always")
def bucket_at(layout, segment, position):  # type: ignore[no-untyped-def]
    return layout[segment] + np.uint64(position) * _BUCKET


@njit(inline="always")
def place_of(layout, segment, hashed):  # type: ignore[no-untyped-def]
    return scale(hashed << layout[SEGMENT_BITS], np.int64(buckets_in(layout, segment)))


@njit(inline="always")
def home_of(layout, segment, hashed):  # type: ignore[no-untyped-def]
    """Return the address of the bucket where a search begins."""
    return bucket_at(layout, segment, place_of(layout, segment, hashed))


@njit(inline="always")
def after(layout, segment, bucket):  # type: ignore[no-untyped-def]
    bucket += _BUCKET
    return layout[segment] if bucket == bucket_at(layout, segment, buckets_in(layout, segment)) else bucket


@njit(inline="always")
def mask_of(header):  # type: ignore[no-untyped-def]
    return (header >> U32) & _FULL


@njit(inline="always")
def overflow_of(header):  # type: ignore[no-untyped-def]
    return header >> U48


@njit(inline="always")
def key_of(bucket, entry):  # type: ignore[no-untyped-def]
    return np.int64(load_relaxed(bucket + _KEYS + entry * U8))


@njit(inline="always")
def match_keys(bucket, key):  # type: ignore[no-untyped-def]
    """Compare the ten keys of a bucket with `key`; return a mask of equal entries, which may include unoccupied ones."""
    # Word 0 is the header, and words 11 and on are row numbers; their bits are dropped.
    return (equal_words_8(bucket, key) >> U1) | ((equal_words_4(bucket + U64, key) & U7) << U7)


@njit(inline="always")
def row_of(bucket, entry):  # type: ignore[no-untyped-def]
    return load_relaxed_u32(bucket + _ROW_NUMBERS + entry * U4)


@njit(inline="always")
def _slab_of(layout, row):  # type: ignore[no-untyped-def]
    return load_relaxed(layout[SLABS] + (row >> layout[SLAB_SHIFT]) * U8)


@njit(inline="always")
def _place_in_slab(layout, row):  # type: ignore[no-untyped-def]
    return row & ((U1 << layout[SLAB_SHIFT]) - U1)


@njit(inline="always")
def vector_of(layout, row):  # type: ignore[no-untyped-def]
    return _slab_of(layout, row) + _place_in_slab(layout, row) * layout[VECTOR_BYTES]


@njit(inline="always")
def stamp_of(layout, row):  # type: ignore[no-untyped-def]
    return _slab_of(layout, row) + layout[STAMP_OFFSET] + _place_in_slab(layout, row) * U4


@njit(inline="always")
def copy(target, source, size_bytes):  # type: ignore[no-untyped-def]
    """Copy a vector, both addresses 4-byte aligned. The source may change meanwhile; the caller validates the copy."""
    done = U0
    while done + U64 <= size_bytes:
        copy_64_bytes(target + done, source + done)
        done += U64
    while done + U16 <= size_bytes:
        copy_16_bytes(target + done, source + done)
        done += U16
    while done < size_bytes:
        copy_4_bytes(target + done, source + done)
        done += U4


@njit(inline="always")
def touch(stamp, access, now):  # type: ignore[no-untyped-def]
    # Two readers may touch a stamp at the same time; a lost count does no harm.
    if access == STAMP:
        if load_relaxed_u32(stamp) != now:
            store_relaxed_u32(stamp, now)
    elif access == COUNT:
        count = load_relaxed_u32(stamp)
        if count != _STAMP_LIMIT:
            store_relaxed_u32(stamp, count + U1)


@njit()
def locate(layout, segment, bucket, key):  # type: ignore[no-untyped-def]
    """Search from a key's home, concurrently with a writer.

    Returns:
        (DONE, the key's bucket, its header, the key's row); or ABSENT, MOVED or BUSY, with three meaningless values. An ABSENT
        key was absent at some moment of this call. Retry a BUSY bucket at once.
    """
    home = bucket
    while True:
        header = load_acquire(bucket)
        if header & U1:
            return (MOVED if header == _RETIRED else BUSY), bucket, header, U0
        hit = match_keys(bucket, key) & mask_of(header)
        row = row_of(bucket, lowest_bit(hit)) if hit else U0
        fence_acquire()
        if load_relaxed(bucket) != header:
            return BUSY, bucket, header, U0
        if hit:
            return DONE, bucket, header, row
        if overflow_of(header) == U0:
            return ABSENT, bucket, header, U0
        bucket = after(layout, segment, bucket)
        if bucket == home:
            return ABSENT, bucket, header, U0


@njit()
def search(layout, hashed, key):  # type: ignore[no-untyped-def]
    """Search as the writer; return (the key's bucket, its entry), or (0, 0) if the key is absent."""
    segment = segment_of(layout, hashed)
    home = home_of(layout, segment, hashed)
    bucket = home
    while True:
        header = load_relaxed(bucket)
        hit = match_keys(bucket, key) & mask_of(header)
        if hit:
            return bucket, lowest_bit(hit)
        bucket = after(layout, segment, bucket)
        if overflow_of(header) == U0 or bucket == home:
            return U0, U0


@njit(inline="always")
def start_change(bucket):  # type: ignore[no-untyped-def]
    """Make the version odd; return the previous header."""
    # The store may stay relaxed because only this thread writes headers. The release fence keeps the writer's later stores
    # behind it: otherwise a reader could see a new key or float under the old, even version and take it for consistent.
    header = load_relaxed(bucket)
    store_relaxed(bucket, header | U1)
    fence_release()
    return header


@njit(inline="always")
def end_change(bucket, header):  # type: ignore[no-untyped-def]
    """Store the mask and the overflow count of `header`, with the next even version."""
    # The release store makes all stores since `start_change` visible first, so that an even version implies complete contents.
    store_release(bucket, (header & ~_VERSION) | ((header + U2) & _VERSION))


@njit(inline="always")
def record_change(layout, bucket):  # type: ignore[no-untyped-def]
    """Record for mirrors that a bucket has changed."""
    log = layout[CHANGES]
    if log:
        count = load_relaxed(log)
        store_relaxed(log, count + U1)
        if count < _CHANGES_LIMIT:
            store_relaxed(log + U8 + count * U8, bucket)


@njit(inline="always")
def start_stripe(layout, hashed):  # type: ignore[no-untyped-def]
    """Mark the stripe of a key as changing, for devices."""
    if layout[VERSIONS]:
        version = layout[VERSIONS] + (hashed >> STRIPE_SHIFT) * _VERSION_BYTES
        store_relaxed(version, load_relaxed(version) + U1)
        fence_release()


@njit(inline="always")
def end_stripe(layout, hashed):  # type: ignore[no-untyped-def]
    if layout[VERSIONS]:
        version = layout[VERSIONS] + (hashed >> STRIPE_SHIFT) * _VERSION_BYTES
        store_release(version, load_relaxed(version) + U1)


@njit(inline="always")
def _concerns_zero(layout, hashed):  # type: ignore[no-untyped-def]
    """Return whether linking or unlinking this entry must also change the version of stripe 0."""
    # A device may read the parts of a bucket at different moments. So an entry that is being linked may show its occupancy bit
    # beside its former key field, which is 0 since `unlink` clears it: the device then finds key 0, although it is absent. Key
    # 0 belongs to the first segment and stripe, so changes of that segment invalidate what devices read of stripe 0.
    return layout[VERSIONS] != U0 and hashed >> STRIPE_SHIFT != U0 and segment_of(layout, hashed) == np.uint64(SEGMENTS)


@njit(inline="always")
def start_entry(layout, hashed):  # type: ignore[no-untyped-def]
    """Start linking or unlinking a key, for devices."""
    start_stripe(layout, hashed)
    if _concerns_zero(layout, hashed):
        start_stripe(layout, U0)


@njit(inline="always")
def end_entry(layout, hashed):  # type: ignore[no-untyped-def]
    end_stripe(layout, hashed)
    if _concerns_zero(layout, hashed):
        end_stripe(layout, U0)


@njit(inline="always")
def is_dense(layout, key):  # type: ignore[no-untyped-def]
    return np.uint64(key) < layout[DENSE_ROWS]


@njit(inline="always")
def _count_holes(layout, hashed, key, change):  # type: ignore[no-untyped-def]
    """Count that a key was unlinked (U1) or linked (-1), between `start_entry` and `end_entry`."""
    if is_dense(layout, key):
        stripe = hashed >> STRIPE_SHIFT
        holes = load_relaxed_u32(layout[HOLES] + stripe * U4) + np.uint64(change)
        store_relaxed_u32(layout[HOLES] + stripe * U4, holes)
        show_holes(layout, stripe)


@njit(inline="always")
def show_holes(layout, stripe):  # type: ignore[no-untyped-def]
    if layout[VERSIONS]:
        at = layout[VERSIONS] + stripe * _VERSION_BYTES
        with_holes = _HAS_HOLES if load_relaxed_u32(layout[HOLES] + stripe * U4) else U0
        store_relaxed(at, (load_relaxed(at) & ~_HAS_HOLES) | with_holes)


@njit(inline="always")
def link(layout, segment_rows, hashed, key, row):  # type: ignore[no-untyped-def]
    """Add an absent key, as the writer. The caller ensures that an entry of the segment is free."""
    start_entry(layout, hashed)
    enter(layout, segment_rows, hashed, key, row)
    _count_holes(layout, hashed, key, -1)
    end_entry(layout, hashed)


@njit()
def enter(layout, segment_rows, hashed, key, row):  # type: ignore[no-untyped-def]
    """Add an absent key while no device reads; see `link`."""
    segment = segment_of(layout, hashed)
    bucket = home_of(layout, segment, hashed)
    header = load_relaxed(bucket)
    while mask_of(header) == _FULL:
        if overflow_of(header) != _OVERFLOW_LIMIT:
            end_change(bucket, header + (U1 << U48))
            record_change(layout, bucket)
        bucket = after(layout, segment, bucket)
        header = load_relaxed(bucket)
    entry = lowest_bit(~mask_of(header))
    header = start_change(bucket)
    store_relaxed(bucket + _KEYS + entry * U8, np.uint64(key))
    store_relaxed_u32(bucket + _ROW_NUMBERS + entry * U4, row)
    end_change(bucket, header | (U1 << (U32 + entry)))
    record_change(layout, bucket)
    segment_rows[number_of(segment)] += 1


@njit(inline="always")
def list_of(counters, hashed):  # type: ignore[no-untyped-def]
    """Return the number of the list of freed rows for a key's stripe, unsigned."""
    return (hashed >> U32) >> (U32 - np.uint64(counters[LIST_BITS]))


@njit()
def unlink(layout, counters, segment_rows, hashed, bucket, entry):  # type: ignore[no-untyped-def]
    """Remove an entry, as the writer, and put its row on the list of its key's stripe, unless the key is dense."""
    segment = segment_of(layout, hashed)
    key = key_of(bucket, entry)
    row = row_of(bucket, entry)
    start_entry(layout, hashed)
    header = start_change(bucket)
    store_relaxed(bucket + _KEYS + entry * U8, U0)
    end_change(bucket, header & ~(U1 << (U32 + entry)))
    record_change(layout, bucket)
    passed = home_of(layout, segment, hashed)
    while passed != bucket:
        header = load_relaxed(passed)
        if overflow_of(header) != _OVERFLOW_LIMIT:
            end_change(passed, header - (U1 << U48))
            record_change(layout, passed)
        passed = after(layout, segment, passed)
    _count_holes(layout, hashed, key, 1)
    end_entry(layout, hashed)
    counters[ROWS] -= 1
    segment_rows[number_of(segment)] -= 1
    if is_dense(layout, key):
        return
    head = np.uint64(LISTS) + list_of(counters, hashed)
    next_free = counters[head]
    store_relaxed_u32(vector_of(layout, row), _NO_ROW if next_free < 0 else np.uint64(next_free))
    counters[head] = np.int64(row)
    counters[FREE_ROWS] += 1


@njit()
def allocate_row(layout, counters, hashed, key):  # type: ignore[no-untyped-def]
    """Allocate a row for an absent key, as the writer. The caller ensures that a row is free, or the key is dense."""
    counters[ROWS] += 1
    if is_dense(layout, key):
        return np.uint64(key)
    list_bits, stripe_bits = np.uint64(counters[LIST_BITS]), np.uint64(counters[STRIPE_BITS])
    number = list_of(counters, hashed)
    while True:
        head = np.uint64(LISTS) + number
        free = counters[head]
        if free >= 0:
            next_free = load_relaxed_u32(vector_of(layout, np.uint64(free)))
            counters[head] = -1 if next_free == _NO_ROW else np.int64(next_free)
            counters[FREE_ROWS] -= 1
            return np.uint64(free)
        stripe = number >> (list_bits - stripe_bits)
        use = np.uint64(LISTS) + (U1 << list_bits) + stripe
        used = counters[use]
        if used < counters[STRIPE_ROWS]:
            counters[use] = used + 1
            counters[FRESH_ROWS] -= 1
            return np.uint64(counters[EXTENT_ROW] + np.int64(stripe) * counters[STRIPE_ROWS] + used)
        number = (number + U1) & ((U1 << list_bits) - U1)


@njit()
def retire_bucket(bucket):  # type: ignore[no-untyped-def]
    store_relaxed(bucket, _RETIRED)
