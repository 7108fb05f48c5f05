"""What the hash map's one writer does with many keys at once.

`layout` and `counters` are described in `hash_map_layout.py`, which also says how readers are kept from what changes.
numba's cache does not notice a change of the modules that this one imports: after one, remove `__pycache__`.
"""

from typing import Final

import numpy as np

from hps.databases.hash_map.atomics import fence_release, load_relaxed, lowest_bit, prefetch, store_relaxed_u32
from hps.databases.hash_map.layout import (
    DONE,
    FREE_ROW,
    KEEP,
    LOAD_ROWS,
    SEGMENT_BITS,
    SEGMENTS,
    STAMP,
    U0,
    U1,
    U32,
    U64,
    USED_ROWS,
    VECTOR_BYTES,
    after,
    begin_change,
    bucket_at,
    buckets_in,
    copy,
    end_change,
    home_of,
    key_of,
    link,
    mask_of,
    number_of,
    overflow_of,
    place_of,
    retire_bucket,
    row_of,
    search,
    segment_of,
    stamp_of,
    take_row,
    touch,
    unlink,
    vector_of,
)
from hps.databases.hash_map.signatures import (
    COUNTERS,
    FLAGS,
    INTEGER,
    KEYS,
    LAYOUT,
    NOTHING,
    OUT_KEYS,
    OUT_VECTORS,
    PAIR,
    TRIPLE,
    VECTORS,
    kernel,
)
from hps.hashing import mix

NO_BUCKETS: Final = 4
"""How an insertion ended: a segment is as full as it may get."""
NO_ROWS: Final = 5
"""How an insertion ended: no row number is free."""
_BLOCK = 32


@kernel(TRIPLE, LAYOUT, COUNTERS, COUNTERS, COUNTERS, KEYS, VECTORS, FLAGS, PAIR, INTEGER, PAIR)
def insert(  # type: ignore[no-untyped-def]
    layout, counters, segment_rows, partition_rows, keys, vectors, kept, span, capacity_rows, use
):
    """Add or replace keys, in order.

    Args:
        partition_rows: (partitions,) int64, rows of each partition, kept up to date; (0,) where nobody wants to know.
        kept: (n,) bool, False for keys to leave out; (0,) for none.
        span: first position and the one after the last.
        capacity_rows: rows that have memory.
        use: KEEP, STAMP or COUNT, and the stamp of now.

    Returns:
        (position, state, segment): keys before `position` are in the table; state is DONE, NO_BUCKETS or NO_ROWS; the number
        of the segment that is full, counted from 0.
    """
    start, stop = span
    access, now = use[0], np.uint64(use[1])
    vector_bytes = layout[VECTOR_BYTES]
    sources = np.uint64(vectors.ctypes.data)
    while start < stop:
        count = min(_BLOCK, stop - start)
        for i in range(count):
            hashed = mix(keys[start + i])
            bucket = home_of(layout, segment_of(layout, hashed), hashed)
            prefetch(bucket)
            prefetch(bucket + U64)
        for position in range(start, start + count):
            if kept.size > 0 and not kept[position]:
                continue
            key = keys[position]
            source = sources + np.uint64(position) * vector_bytes
            hashed = mix(key)
            bucket, entry = search(layout, hashed, key)
            if bucket:
                row = row_of(bucket, entry)
                header = begin_change(bucket)
                copy(vector_of(layout, row), source, vector_bytes)
                end_change(bucket, header)
                if access != KEEP:
                    touch(stamp_of(layout, row), access, now)
                continue
            segment = segment_of(layout, hashed)
            if segment_rows[number_of(segment)] >= LOAD_ROWS * np.int64(buckets_in(layout, segment)):
                return position, NO_BUCKETS, number_of(segment)
            if counters[FREE_ROW] < 0 and counters[USED_ROWS] >= capacity_rows:
                return position, NO_ROWS, 0
            row = take_row(layout, counters)
            copy(vector_of(layout, row), source, vector_bytes)
            if access != KEEP:
                store_relaxed_u32(stamp_of(layout, row), now if access == STAMP else U1)
            link(layout, segment_rows, hashed, key, row)
            if partition_rows.size > 0:
                partition_rows[hashed % np.uint64(partition_rows.size)] += 1
        start += count
    return start, DONE, 0


@kernel(INTEGER, LAYOUT, COUNTERS, COUNTERS, COUNTERS, KEYS)
def delete(layout, counters, segment_rows, partition_rows, keys):  # type: ignore[no-untyped-def]
    """Remove keys; returns how many were there. `partition_rows` as for `insert`."""
    deleted = 0
    for i in range(keys.size):
        key = keys[i]
        hashed = mix(key)
        bucket, entry = search(layout, hashed, key)
        if bucket:
            unlink(layout, counters, segment_rows, hashed, bucket, entry)
            deleted += 1
            if partition_rows.size > 0:
                partition_rows[hashed % np.uint64(partition_rows.size)] -= 1
    return deleted


@kernel(INTEGER, LAYOUT, KEYS)
def count_present(layout, keys):  # type: ignore[no-untyped-def]
    """How many of the keys are in the table."""
    present = 0
    for i in range(keys.size):
        if search(layout, mix(keys[i]), keys[i])[0]:
            present += 1
    return present


@kernel(NOTHING, LAYOUT, INTEGER, LAYOUT, COUNTERS)
def rehash(old, number, new, segment_rows):  # type: ignore[no-untyped-def]
    """Enter all keys of one segment into a layout in which nobody reads its keys yet.

    Homes keep their order, so old and new buckets are walked from end to end.
    """
    segment = SEGMENTS + 2 * number
    for position in range(np.int64(old[segment + 1])):
        bucket = bucket_at(old, segment, position)
        mask = mask_of(load_relaxed(bucket))
        while mask:
            entry = lowest_bit(mask)
            mask &= mask - U1
            key = key_of(bucket, entry)
            link(new, segment_rows, mix(key), key, row_of(bucket, entry))


@kernel(NOTHING, LAYOUT, INTEGER, COUNTERS)
def count_by_hash(layout, number, counts):  # type: ignore[no-untyped-def]
    """Add the rows of one segment to `counts`, (2^bits,), by the upper bits of their hash."""
    segment = SEGMENTS + 2 * number
    for position in range(np.int64(buckets_in(layout, segment))):
        bucket = bucket_at(layout, segment, position)
        mask = mask_of(load_relaxed(bucket))
        while mask:
            entry = lowest_bit(mask)
            mask &= mask - U1
            counts[np.int64(((mix(key_of(bucket, entry)) >> U32) * np.uint64(counts.size)) >> U32)] += 1


@kernel(NOTHING, LAYOUT, INTEGER)
def retire(old, number):  # type: ignore[no-untyped-def]
    """Send the readers of a segment that has been replaced away, before any row or vector changes."""
    segment = SEGMENTS + 2 * number
    for position in range(np.int64(old[segment + 1])):
        retire_bucket(bucket_at(old, segment, position))
    fence_release()


@kernel(PAIR, LAYOUT, LAYOUT, OUT_KEYS, OUT_VECTORS)
def scan(layout, cursor, keys, out):  # type: ignore[no-untyped-def]
    """Copy rows whose hash is at least `cursor[0]`, by ascending home, while they fit, and move the cursor after them.

    Returns:
        (rows copied, state): DONE after the last row; else NO_ROWS, and no rows where those of one home do not fit.
    """
    bits = layout[SEGMENT_BITS]
    targets = np.uint64(out.ctypes.data)
    segment = np.int64(segment_of(layout, cursor[0]))
    place = place_of(layout, segment, cursor[0])
    copied = 0
    while segment < layout.size:
        buckets = buckets_in(layout, segment)
        while place < np.int64(buckets):
            first = bucket_at(layout, segment, place)
            bucket = first
            before = copied
            while True:
                header = load_relaxed(bucket)
                mask = mask_of(header)
                while mask:
                    entry = lowest_bit(mask)
                    mask &= mask - U1
                    key = key_of(bucket, entry)
                    hashed = mix(key)
                    if place_of(layout, segment, hashed) != place or hashed < cursor[0]:
                        continue
                    if copied == keys.size:
                        # The least hash at home here: bits of the segment, then those that `scale` takes to this place.
                        lower = ((np.uint64(place) << U32) + buckets - U1) // buckets
                        upper = np.uint64(number_of(segment)) << U32
                        cursor[0] = max(cursor[0], (upper + lower) << (U32 - bits))
                        return before, NO_ROWS
                    keys[copied] = key
                    vector = vector_of(layout, row_of(bucket, entry))
                    copy(targets + np.uint64(copied) * layout[VECTOR_BYTES], vector, layout[VECTOR_BYTES])
                    copied += 1
                bucket = after(layout, segment, bucket)
                if overflow_of(header) == U0 or bucket == first:
                    break
            place += 1
        segment += 2
        place = 0
    return copied, DONE
