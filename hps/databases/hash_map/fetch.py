"""The hash map's hot path: many keys, beside a writer, without a lock.

`hash_map_layout.py` says why what it reads is whole. numba's cache does not notice a change of the modules that this one
imports: after one, remove `__pycache__`.
"""

import numpy as np
from numba import njit

from hps.databases.hash_map.atomics import REGISTER_LINES, copy_if_unchanged, fence_acquire, load_relaxed, prefetch
from hps.databases.hash_map.layout import (
    ABSENT,
    BUSY,
    DONE,
    KEEP,
    U0,
    U64,
    VECTOR_BYTES,
    copy,
    home_of,
    locate,
    segment_of,
    stamp_of,
    touch,
    vector_of,
)
from hps.databases.hash_map.signatures import FLAGS, INTEGER, KEYS, LAYOUT, OUT_VECTOR, OUT_VECTORS, TRIPLE, kernel
from hps.hashing import mix

_BLOCK = 32
"""Keys that are hashed, then probed, then copied together, so that their cache misses overlap; 16 to 128 are alike."""
_TRIES = 100
_REGISTER_BYTES = np.uint64(64 * REGISTER_LINES)


@njit(cache=True)
def _fetch_slowly(layout, key, target, spare, access, now):  # type: ignore[no-untyped-def]
    """Fetch one key that a writer is at: DONE, ABSENT, MOVED or BUSY; `spare` is the address of room for a vector."""
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


@kernel(TRIPLE, LAYOUT, KEYS, OUT_VECTORS, FLAGS, OUT_VECTOR, INTEGER, INTEGER, INTEGER)
def fetch(layout, keys, out, found, spare_vector, start, access, now):  # type: ignore[no-untyped-def]
    """Fill the rows of `out` from `start` on that are not found and whose key is there, beside a writer.

    Nothing is written to a row of `out` but a whole vector. One that does not fit registers waits in `spare_vector`, (dim,),
    until it is known to be whole. That memory is the caller's: an array that is made here is freed after the last use of
    its name, which is the taking of its address.

    Returns:
        (rows filled, position, state): all keys before `position` are answered; state is DONE, MOVED, or BUSY after many
        tries, for the caller to let the writer run.
    """
    stamp_now = np.uint64(now)
    vector_bytes = layout[VECTOR_BYTES]
    in_registers = vector_bytes % U64 == U0 and vector_bytes <= _REGISTER_BYTES
    lines = vector_bytes // U64
    segments, states = np.empty(_BLOCK, np.uint64), np.empty(_BLOCK, np.int64)
    work = np.empty((3, _BLOCK), np.uint64)  # bucket, header, row
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
            whole = False
            if state == DONE:
                vector = vector_of(layout, work[2, i])
                if in_registers:
                    whole = copy_if_unchanged(target, vector, lines, work[0, i], work[1, i])
                else:
                    copy(spare, vector, vector_bytes)
                    fence_acquire()
                    whole = load_relaxed(work[0, i]) == work[1, i]
                    if whole:
                        copy(target, spare, vector_bytes)
                if whole and access != KEEP:
                    touch(stamp_of(layout, work[2, i]), access, stamp_now)
            if not whole:
                state = _fetch_slowly(layout, keys[start + i], target, spare, access, stamp_now)
                if state == ABSENT:
                    continue
                if state != DONE:
                    return filled, start + i, state
            found[start + i] = True
            filled += 1
        start += count
    return filled, start, DONE
