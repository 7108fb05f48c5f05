"""The hash map's batch kernels, for any number of readers (`fetch`) and one writer (all others).

`layout.py` describes `layout` and `counters`, and explains why readers see complete rows.
"""

from typing import Any, Final

import numpy as np
from numba import boolean, float32, int64, njit, types, uint64, void

from hps.ground.hashing import mix
from hps.ground.kernels.numba_atomics import (
    REGISTER_LINES,
    copy_if_unchanged,
    fence_acquire,
    fence_release,
    load_relaxed,
    load_relaxed_u32,
    lowest_bit,
    prefetch,
    store_relaxed,
    store_relaxed_u32,
)
from hps.ground.kernels.numba_kernels import kernel, read_only
from hps.stores.hash_map.layout import (
    ABSENT,
    BUSY,
    CHANGES,
    COUNTERS,
    DENSE_ROWS,
    DONE,
    FREE_ROWS,
    FRESH_ROWS,
    HOLES,
    KEEP,
    KEYS,
    LAYOUT,
    LISTS,
    LOAD_ROWS,
    SEGMENT_BITS,
    SEGMENTS,
    STAMP,
    STRIPE_SHIFT,
    STRIPES,
    U0,
    U1,
    U4,
    U6,
    U32,
    U63,
    U64,
    VECTOR_BYTES,
    after,
    allocate_row,
    bucket_at,
    buckets_in,
    copy,
    end_change,
    end_stripe,
    enter,
    home_of,
    is_dense,
    key_of,
    link,
    list_of,
    locate,
    mask_of,
    number_of,
    overflow_of,
    place_of,
    retire_bucket,
    row_of,
    search,
    segment_of,
    show_holes,
    stamp_of,
    start_change,
    start_stripe,
    touch,
    unlink,
    vector_of,
)

NO_BUCKETS: Final = 4
"""Result of an insertion: a segment is full."""
NO_ROWS: Final = 5
"""Result of an insertion: no row number is free."""
# Keys hashed, then probed, then copied together, so that their cache misses overlap; 16 to 128 perform alike.
_BLOCK = 32
# Maximum bytes of a freed row to prefetch before reuse.
_AHEAD_BYTES = np.uint64(256)
_TRIES = 100
_REGISTER_BYTES = np.uint64(64 * REGISTER_LINES)
_VECTORS: Any = float32[:, ::1]
_FLAGS: Any = boolean[::1]
_tuple: Any = types.UniTuple
_PAIR, _TRIPLE = _tuple(int64, 2), _tuple(int64, 3)


@njit()
def _fetch_slowly(layout, key, target, spare, access, now):  # type: ignore[no-untyped-def]
    """Fetch one key from a changing bucket; return DONE, ABSENT, MOVED or BUSY. `spare` is the address of a scratch vector."""
    hashed = mix(key)
    segment = segment_of(layout, hashed)
    for _ in range(_TRIES):
        state, bucket, header, row = locate(layout, segment, home_of(layout, segment, hashed), key)
        if state == BUSY:
            continue
        if state == DONE:
            copy(spare, vector_of(layout, row), layout[VECTOR_BYTES])
            fence_acquire()
            if load_relaxed(bucket) != header:
                continue
            copy(target, spare, layout[VECTOR_BYTES])
            if access != KEEP:
                touch(stamp_of(layout, row), access, now)
        return state
    return BUSY


@kernel(_TRIPLE, LAYOUT, KEYS, _VECTORS, _FLAGS, float32[::1], int64, int64, int64)
def fetch(layout, keys, out, found, spare_vector, start, access, now):  # type: ignore[no-untyped-def]
    """Fill the rows of `out`, from `start` on, that are not yet found and whose key is present, concurrently with a writer.

    Only complete vectors are written to `out`. A vector too large for registers is staged in `spare_vector`, (dim,), until it
    is validated.

    Returns:
        (rows filled, position, state): all keys before `position` are answered. The state is DONE, MOVED or, after many
        tries, BUSY: the caller should then let the writer run.
    """
    stamp_now = np.uint64(now)
    vector_bytes = layout[VECTOR_BYTES]
    in_registers = vector_bytes % U64 == U0 and vector_bytes <= _REGISTER_BYTES
    lines = vector_bytes // U64
    segments, states = np.empty(_BLOCK, np.uint64), np.empty(_BLOCK, np.int64)
    work = np.empty((3, _BLOCK), np.uint64)  # bucket, header, row
    # The caller owns this memory: numba would free a local array after the last use of its name, where its address is taken.
    spare = np.uint64(spare_vector.ctypes.data)
    targets = np.uint64(out.ctypes.data)
    filled = 0
    while start < keys.size:
        count = min(_BLOCK, keys.size - start)
        for i in range(count):
            hashed = mix(keys[start + i])
            segments[i] = segment_of(layout, hashed)
            bucket = home_of(layout, segments[i], hashed)
            work[0, i] = bucket
            prefetch(bucket)
            prefetch(bucket + U64)
        for i in range(count):
            if found[start + i]:
                states[i] = ABSENT
                continue
            states[i], work[0, i], work[1, i], work[2, i] = locate(layout, segments[i], work[0, i], keys[start + i])
            if states[i] == DONE:
                vector = vector_of(layout, work[2, i])
                ahead = U0
                while ahead < vector_bytes:
                    prefetch(vector + ahead)
                    ahead += U64
                if access != KEEP:
                    prefetch(stamp_of(layout, work[2, i]))
        for i in range(count):
            state = states[i]
            if state == ABSENT:
                continue
            target = targets + np.uint64(start + i) * vector_bytes
            complete = False
            if state == DONE:
                vector = vector_of(layout, work[2, i])
                if in_registers:
                    complete = copy_if_unchanged(target, vector, lines, work[0, i], work[1, i])
                else:
                    # As a seqlock: the fence keeps the loads of the vector before the second load of the header.
                    copy(spare, vector, vector_bytes)
                    fence_acquire()
                    complete = load_relaxed(work[0, i]) == work[1, i]
                    if complete:
                        copy(target, spare, vector_bytes)
                if complete and access != KEEP:
                    touch(stamp_of(layout, work[2, i]), access, stamp_now)
            if not complete:
                state = _fetch_slowly(layout, keys[start + i], target, spare, access, stamp_now)
                if state == ABSENT:
                    continue
                if state != DONE:
                    return filled, start + i, state
            found[start + i] = True
            filled += 1
        start += count
    return filled, start, DONE


@kernel(_TRIPLE, LAYOUT, COUNTERS, COUNTERS, COUNTERS, KEYS, read_only(_VECTORS), _FLAGS, _PAIR, _PAIR)
def insert(  # type: ignore[no-untyped-def]
    layout, counters, segment_rows, partition_rows, keys, vectors, chosen, span, use
):
    """Add or replace keys, in order.

    Args:
        partition_rows: (partitions,) int64, rows per partition, updated in place; (0,) to skip counting.
        chosen: (n,) bool, False for keys to skip; (0,) to insert all.
        span: first position, and the one after the last.
        use: KEEP, STAMP or COUNT, and the current stamp.

    Returns:
        (position, state, segment): keys before `position` are in the table; the state is DONE, NO_BUCKETS or NO_ROWS; with
        NO_BUCKETS, the index of the full segment.
    """
    start, stop = span
    access, now = use[0], np.uint64(use[1])
    vector_bytes = layout[VECTOR_BYTES]
    ahead_bytes = min(vector_bytes, _AHEAD_BYTES)
    sources = np.uint64(vectors.ctypes.data)
    reusing = False  # the last block had new keys and freed rows exist: likely true for this one too
    while start < stop:
        count = min(_BLOCK, stop - start)
        for i in range(count):
            hashed = mix(keys[start + i])
            bucket = home_of(layout, segment_of(layout, hashed), hashed)
            prefetch(bucket)
            prefetch(bucket + U64)
            if reusing:
                free = counters[np.uint64(LISTS) + list_of(counters, hashed)]
                if free >= 0:
                    vector = vector_of(layout, np.uint64(free))
                    ahead = U0
                    while ahead < ahead_bytes:
                        prefetch(vector + ahead)
                        ahead += U64
        reusing = False
        for position in range(start, start + count):
            if chosen.size > 0 and not chosen[position]:
                continue
            key = keys[position]
            source = sources + np.uint64(position) * vector_bytes
            hashed = mix(key)
            bucket, entry = search(layout, hashed, key)
            if bucket:
                row = row_of(bucket, entry)
                start_stripe(layout, hashed)
                header = start_change(bucket)
                copy(vector_of(layout, row), source, vector_bytes)
                end_change(bucket, header)
                end_stripe(layout, hashed)
                if access != KEEP:
                    touch(stamp_of(layout, row), access, now)
                continue
            segment = segment_of(layout, hashed)
            if segment_rows[number_of(segment)] >= LOAD_ROWS * np.int64(buckets_in(layout, segment)):
                return position, NO_BUCKETS, number_of(segment)
            if counters[FREE_ROWS] + counters[FRESH_ROWS] == 0 and not is_dense(layout, key):
                return position, NO_ROWS, 0
            reusing = counters[FREE_ROWS] > 0
            row = allocate_row(layout, counters, hashed, key)
            copy(vector_of(layout, row), source, vector_bytes)
            if access != KEEP:
                store_relaxed_u32(stamp_of(layout, row), now if access == STAMP else U1)
            link(layout, segment_rows, hashed, key, row)
            if partition_rows.size > 0:
                partition_rows[hashed % np.uint64(partition_rows.size)] += 1
        start += count
    return start, DONE, 0


@kernel(int64, LAYOUT, COUNTERS, COUNTERS, COUNTERS, KEYS)
def delete(layout, counters, segment_rows, partition_rows, keys):  # type: ignore[no-untyped-def]
    """Remove keys; return the number that were present. `partition_rows` is as for `insert`."""
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


@kernel(int64, LAYOUT, KEYS)
def count_present(layout, keys):  # type: ignore[no-untyped-def]
    present = 0
    for i in range(keys.size):
        if search(layout, mix(keys[i]), keys[i])[0]:
            present += 1
    return present


@kernel(int64, KEYS, uint64[::1])
def mark_keys(keys, bits):  # type: ignore[no-untyped-def]
    """Set the bits of keys, (most // 64,), and return how many keys have none."""
    outside = 0
    for i in range(keys.size):
        word = np.uint64(keys[i]) >> U6
        if word < np.uint64(bits.size):
            bits[word] |= U1 << (np.uint64(keys[i]) & U63)
        else:
            outside += 1
    return outside


@kernel(void, LAYOUT)
def count_holes(layout):  # type: ignore[no-untyped-def]
    """Count the dense keys of each stripe of an empty table: all are holes."""
    for key in range(np.int64(layout[DENSE_ROWS])):
        at = layout[HOLES] + (mix(np.int64(key)) >> STRIPE_SHIFT) * U4
        store_relaxed_u32(at, load_relaxed_u32(at) + U1)


@kernel(void, LAYOUT)
def show_all_holes(layout):  # type: ignore[no-untyped-def]
    """Show devices which stripes have holes, before any has the layout."""
    if layout[DENSE_ROWS]:
        for stripe in range(STRIPES):
            show_holes(layout, np.uint64(stripe))


@kernel(void, LAYOUT, int64, LAYOUT, COUNTERS)
def rehash(old, number, new, segment_rows):  # type: ignore[no-untyped-def]
    """Insert all keys of one segment into a new layout that has no readers yet.

    Homes keep their order, so both bucket arrays are traversed sequentially. Nothing is recorded for mirrors, which copy a new
    segment completely.
    """
    segment = SEGMENTS + 2 * number
    recorded = load_relaxed(new[CHANGES]) if new[CHANGES] else U0
    for position in range(np.int64(old[segment + 1])):
        bucket = bucket_at(old, segment, position)
        mask = mask_of(load_relaxed(bucket))
        while mask:
            entry = lowest_bit(mask)
            mask &= mask - U1
            key = key_of(bucket, entry)
            enter(new, segment_rows, mix(key), key, row_of(bucket, entry))
    if new[CHANGES]:
        store_relaxed(new[CHANGES], recorded)


@kernel(void, LAYOUT, int64, COUNTERS)
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


@kernel(void, LAYOUT, int64)
def retire(old, number):  # type: ignore[no-untyped-def]
    """Redirect the readers of a replaced segment to the current layout, before any row or vector changes."""
    segment = SEGMENTS + 2 * number
    for position in range(np.int64(old[segment + 1])):
        retire_bucket(bucket_at(old, segment, position))
    fence_release()


@kernel(_PAIR, LAYOUT, LAYOUT, int64[::1], _VECTORS)
def scan(layout, cursor, keys, out):  # type: ignore[no-untyped-def]
    """Copy rows with hashes from `cursor[0]` on, by ascending home, while they fit, and advance the cursor.

    Returns:
        (rows copied, state): the state is DONE after the last row, otherwise NO_ROWS; 0 rows if those of one home do not fit.
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
                        # The smallest hash with its home here: the segment's bits, then those that `scale` maps to this place.
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
