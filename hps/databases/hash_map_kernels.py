"""What the hash map's one writer does with many keys at once.

`layout` and `counters` are described in `hash_map_layout.py`, which also says how readers are kept from what changes.
numba's cache does not notice a change of the modules that this one imports: after one, remove `__pycache__`.
"""

from typing import Final

import numpy as np

from hps.databases.hash_map_atomics import fence_release, load_relaxed, lowest_bit, prefetch, store_relaxed_u32
from hps.databases.hash_map_layout import (
    BUCKET_COUNT,
    DONE,
    FREE_ROW,
    KEEP,
    ROWS,
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
    copy,
    end_change,
    home_of,
    key_of,
    link,
    mask_of,
    overflow_of,
    retire_bucket,
    row_of,
    search,
    stamp_of,
    take_row,
    touch,
    unlink,
    vector_of,
)
from hps.databases.hash_map_signatures import (
    COUNTERS,
    FLAGS,
    INTEGER,
    KEYS,
    LAYOUT,
    NOTHING,
    OUT_KEYS,
    OUT_VECTORS,
    PAIR,
    VECTORS,
    kernel,
)
from hps.hashing import mix, scale

NO_BUCKETS: Final = 4
"""How an insertion ended: the bucket array is as full as it may get."""
NO_ROWS: Final = 5
"""How an insertion ended: no row number is free."""
_BLOCK = 32


@kernel(PAIR, LAYOUT, COUNTERS, COUNTERS, KEYS, VECTORS, FLAGS, PAIR, PAIR, PAIR)
def insert(  # type: ignore[no-untyped-def]
    layout, counters, partition_rows, keys, vectors, kept, span, limits, use
):
    """Add or replace keys, in order.

    Args:
        partition_rows: (partitions,) int64, rows of each partition, kept up to date; (0,) where nobody wants to know.
        kept: (n,) bool, False for keys to leave out; (0,) for none.
        span: first position and the one after the last.
        limits: rows at which the bucket array counts as full, and rows that have memory.
        use: KEEP, STAMP or COUNT, and the stamp of now.

    Returns:
        (position, state): keys before `position` are in the table; state is DONE, NO_BUCKETS or NO_ROWS.
    """
    start, stop = span
    access, now = use[0], np.uint64(use[1])
    vector_bytes = layout[VECTOR_BYTES]
    sources = np.uint64(vectors.ctypes.data)
    while start < stop:
        count = min(_BLOCK, stop - start)
        for i in range(count):
            bucket = home_of(layout, keys[start + i])
            prefetch(bucket)
            prefetch(bucket + U64)
        for position in range(start, start + count):
            if kept.size > 0 and not kept[position]:
                continue
            key = keys[position]
            source = sources + np.uint64(position) * vector_bytes
            bucket, entry = search(layout, key)
            if bucket:
                row = row_of(bucket, entry)
                header = begin_change(bucket)
                copy(vector_of(layout, row), source, vector_bytes)
                end_change(bucket, header)
                if access != KEEP:
                    touch(stamp_of(layout, row), access, now)
                continue
            if counters[ROWS] >= limits[0]:
                return position, NO_BUCKETS
            if counters[FREE_ROW] < 0 and counters[USED_ROWS] >= limits[1]:
                return position, NO_ROWS
            row = take_row(layout, counters)
            copy(vector_of(layout, row), source, vector_bytes)
            if access != KEEP:
                store_relaxed_u32(stamp_of(layout, row), now if access == STAMP else U1)
            link(layout, key, row)
            if partition_rows.size > 0:
                partition_rows[mix(key) % np.uint64(partition_rows.size)] += 1
        start += count
    return start, DONE


@kernel(INTEGER, LAYOUT, COUNTERS, COUNTERS, KEYS)
def delete(layout, counters, partition_rows, keys):  # type: ignore[no-untyped-def]
    """Remove keys; returns how many were there. `partition_rows` as for `insert`."""
    deleted = 0
    for i in range(keys.size):
        key = keys[i]
        bucket, entry = search(layout, key)
        if bucket:
            unlink(layout, counters, key, bucket, entry)
            deleted += 1
            if partition_rows.size > 0:
                partition_rows[mix(key) % np.uint64(partition_rows.size)] -= 1
    return deleted


@kernel(INTEGER, LAYOUT, KEYS)
def count_present(layout, keys):  # type: ignore[no-untyped-def]
    """How many of the keys are in the table."""
    present = 0
    for i in range(keys.size):
        if search(layout, keys[i])[0]:
            present += 1
    return present


@kernel(NOTHING, LAYOUT, LAYOUT)
def rehash(old, new):  # type: ignore[no-untyped-def]
    """Enter all keys of a bucket array into a larger, empty one that nobody reads yet.

    Homes keep their order, whatever the number of buckets, so both arrays are walked from end to end.
    """
    for position in range(np.int64(old[BUCKET_COUNT])):
        bucket = bucket_at(old, np.uint64(position))
        mask = mask_of(load_relaxed(bucket))
        while mask:
            entry = lowest_bit(mask)
            mask &= mask - U1
            link(new, key_of(bucket, entry), row_of(bucket, entry))


@kernel(NOTHING, LAYOUT)
def retire(old):  # type: ignore[no-untyped-def]
    """Send the readers of a bucket array that has been replaced away, before any row or vector changes."""
    for position in range(np.int64(old[BUCKET_COUNT])):
        retire_bucket(bucket_at(old, np.uint64(position)))
    fence_release()


@kernel(PAIR, LAYOUT, INTEGER, OUT_KEYS, OUT_VECTORS)
def scan(layout, cursor, keys, out):  # type: ignore[no-untyped-def]
    """Copy rows whose hash has upper 32 bits >= cursor, by ascending home, while they fit.

    The cursor is a place among the hashes, not among the buckets, so it outlives a change of the bucket array.

    Returns:
        (rows copied, next cursor): 2^32 after the last row; no rows where those of one home do not fit.
    """
    buckets = layout[BUCKET_COUNT]
    home = np.uint64(scale(np.uint64(cursor) << U32, np.int64(buckets)))
    targets = np.uint64(out.ctypes.data)
    copied = 0
    while home < buckets:
        first = bucket_at(layout, home)
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
                if np.uint64(scale(hashed, np.int64(buckets))) != home or np.int64(hashed >> U32) < cursor:
                    continue
                if copied == keys.size:
                    return before, max(cursor, np.int64(((home << U32) + buckets - U1) // buckets))
                keys[copied] = key
                vector = vector_of(layout, row_of(bucket, entry))
                copy(targets + np.uint64(copied) * layout[VECTOR_BYTES], vector, layout[VECTOR_BYTES])
                copied += 1
            bucket = after(layout, bucket)
            if overflow_of(header) == U0 or bucket == first:
                break
        home += U1
    return copied, np.int64(1) << 32
