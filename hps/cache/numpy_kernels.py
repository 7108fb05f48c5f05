"""The numba kernels of the NumPy embedding cache: the layout of a set, its version protocol, and the verbs on it.

A **set** is 128 bytes, one row of `lines`, aligned to 128, and 14 rows of `vectors`:

    bytes 0..1      version, uint16: odd while a writer owns the set, two more after each change
    bytes 2..15     14 ages, uint8: 0 marks an empty slot, 1..255 the epoch of the last use (see below)
    bytes 16..127   14 keys, int64; that of an empty slot means nothing

A key belongs to set `scale(mix(key), sets)`. `state` is one row of int64 counters a table (the indices below).

**Why no query returns a torn vector.** A writer takes a set by compare-and-swap of its version from even to odd
(acquire), issues a release fence, writes, and stores the next even version (release). A reader loads the version
(acquire), reads, issues an acquire fence, and loads the version again; unless both are the same even number it throws
away what it read. Had it read any byte of a writer's, then its second load could not be older than that writer's odd
version: the two fences order the version before the bytes on one side and the bytes before the version on the other
(H.-J. Boehm, "Can seqlocks get along with programming language memory models?", MSPC 2012). This needs nothing of the
processor but the fences, so it holds on arm64 as it does on x86-64. To the compiler, what a plain load reads while it is
written is any value: the keys and ages of a set are loaded as one frozen snapshot (`match_line`), whose worst is a wrong
slot of the same set, and vectors are copied by memcpy; neither is looked at again once the version has moved. A version
has 16 bits, so 32,768 changes of one set during one read would look like none: a writer whose version wraps first adds to
`WRAPS`, which a reader loads before its first and after its second (acquire) load of the version.

**Waiting.** A reader that finds a set owned by a writer for `PATIENCE` attempts (the writer's thread lost its processor)
reports a miss, which is always a right answer. A writer waits for a writer of the same set, yielding the processor; a
set is owned for one vector's copy, never across a return to Python.

**Recency.** The score of a slot is its age, in epochs: a hit raises it to the current epoch by compare-and-swap from the
age that was read, only if it differs, so a slot that was emptied or refilled since is left alone. An insert into a full
set evicts the smallest score. A new key starts `PROBATION` epochs in the past, so keys that were hit since outrank it.
Ages count modulo 255; one that is up to `_AHEAD` epochs in the future was written by a thread that saw a newer epoch.
"""

from typing import Any

import numpy as np
from numba import njit

from hps.cache.atomics import (
    compare_and_swap_u8,
    compare_and_swap_u16,
    copy_bytes,
    fence_acquire,
    fence_release,
    fetch_add,
    load_i64,
    load_i64_acquire,
    load_u8,
    load_u16,
    load_u16_acquire,
    match_line,
    prefetch,
    store_i64,
    store_u8,
    store_u16_release,
    trailing_zeros,
    yield_processor,
)
from hps.hashing import mix, scale
from hps.types import BoolArray, FloatArray, IndexArray, KeyArray

WAYS = 14
LINE_WORDS = 16
PROBATION = 15
PATIENCE = 4096

CLOCK, WRAPS, RESIDENT, INSERTS, EVICTIONS = 0, 8, 16, 17, 18
STATE_WORDS = 24
"""Words of `state`: keys asked so far; wraps of set versions; counters. Three cache lines, by who writes how often."""

_LINE_BYTES = 8 * LINE_WORDS
_EPOCHS = 255
_AHEAD = 31
_EPOCHS_A_CALL = 5
_BLOCK = 32
_CACHE_LINE = 64
_PREFETCHED_BYTES = 512


@njit(inline="always", cache=True)
def _address(array: Any) -> int:
    return int(np.int64(array.ctypes.data))


@njit(inline="always", cache=True)
def _line_of(key: int, lines: int, sets: int) -> int:
    return lines + int(scale(mix(np.int64(key)), np.int64(sets))) * _LINE_BYTES


@njit(inline="always", cache=True)
def _find(line: int, key: int) -> int:
    """The slot of a resident key, or -1; believed only once the set's version is checked or owned."""
    matches = match_line(line, key)
    return trailing_zeros(matches) if matches != 0 else -1


@njit(inline="always", cache=True)
def _unchanged(line: int, version: int, wraps_at: int, wraps: int) -> bool:
    fence_acquire()
    return (version & 1) == 0 and load_u16_acquire(line) == version and load_i64(wraps_at) == wraps


@njit(cache=True)
def _read(line: int, key: int, rows: int, row_bytes: int, wraps_at: int, target: int) -> int:
    """Copy the vector of a key to `target` unless that is 0; returns its slot, -1 for none, -2 when out of patience."""
    for _ in range(PATIENCE):
        wraps = load_i64_acquire(wraps_at)
        version = load_u16_acquire(line)
        if version & 1:
            continue
        slot = _find(line, key)
        if slot >= 0 and target != 0:
            copy_bytes(target, rows + slot * row_bytes, row_bytes)
        if _unchanged(line, version, wraps_at, wraps):
            return slot
    return -2


@njit(inline="always", cache=True)
def _touch(line: int, slot: int, epoch: int) -> None:
    age = load_u8(line + 2 + slot)
    if age != epoch and age != 0:
        compare_and_swap_u8(line + 2 + slot, age, epoch)


@njit(nogil=True, cache=True)
def query(
    lines: IndexArray,  # (sets, 16) int64
    vectors: FloatArray,  # (rows, dim) float32
    state: IndexArray,  # (STATE_WORDS,) int64
    keys: KeyArray,  # (n,) int64
    out: FloatArray,  # (n, dim) float32
    found: BoolArray,  # (n,) bool, or empty
    missing: IndexArray,  # (at least n,) int64
) -> int:
    """Copy hits to `out`, write the positions of the others to `missing`; returns their number, or -1 for wrong shapes.

    Works on blocks of keys in three passes (sets, then slots, then vectors), each of which prefetches for the next.
    """
    n, dim, sets = keys.size, vectors.shape[1], lines.shape[0]
    if out.shape[0] != n or out.shape[1] != dim or missing.size < n or (found.size != 0 and found.size != n):
        return -1
    if _address(keys) % 8 != 0 or _address(out) % 4 != 0:
        return -1
    if sets == 0:
        for i in range(n):
            missing[i] = i
        for i in range(found.size):
            found[i] = False
        return n
    epoch = _epoch(fetch_add(_address(state) + 8 * CLOCK, min(n, _EPOCHS_A_CALL * WAYS * sets)), sets)
    base, vectors_at, out_at, wraps_at = _address(lines), _address(vectors), _address(out), _address(state) + 8 * WRAPS
    row_bytes = 4 * dim
    ahead = min(row_bytes, _PREFETCHED_BYTES)
    block_lines, block_slots, block_versions = np.empty((3, _BLOCK), np.int64)
    misses = 0
    for start in range(0, n, _BLOCK):
        count = min(_BLOCK, n - start)
        for i in range(count):
            line = _line_of(keys[start + i], base, sets)
            prefetch(line)
            prefetch(line + _CACHE_LINE)
            block_lines[i] = line
        wraps = load_i64_acquire(wraps_at)
        for i in range(count):
            line = block_lines[i]
            block_versions[i] = load_u16_acquire(line)
            slot = _find(line, keys[start + i])
            block_slots[i] = slot
            if slot >= 0:
                row = vectors_at + (((line - base) >> 7) * WAYS + slot) * row_bytes
                for byte in range(0, ahead, _CACHE_LINE):
                    prefetch(row + byte)
        for i in range(count):
            line, slot = block_lines[i], block_slots[i]
            rows = vectors_at + ((line - base) >> 7) * WAYS * row_bytes
            target = out_at + (start + i) * row_bytes
            if slot >= 0:
                copy_bytes(target, rows + slot * row_bytes, row_bytes)
            if not _unchanged(line, block_versions[i], wraps_at, wraps):
                slot = _read(line, keys[start + i], rows, row_bytes, wraps_at, target)
            if slot >= 0:
                _touch(line, slot, epoch)
            else:
                missing[misses] = start + i
                misses += 1
            if found.size != 0:
                found[start + i] = slot >= 0
    return misses


@njit(inline="always", cache=True)
def _epoch(clock: int, sets: int) -> int:
    """The epoch as an age, 1..255: one epoch is as many queried keys as the table has slots."""
    return (clock // (WAYS * sets)) % _EPOCHS + 1


@njit(cache=True)
def _take(line: int) -> int:
    """Own a set; returns the even version that it had."""
    attempts = 0
    while True:
        version = load_u16(line)
        if (version & 1) == 0 and compare_and_swap_u16(line, version, version + 1):
            fence_release()
            return version
        attempts += 1
        if attempts % 64 == 0:
            yield_processor()


@njit(inline="always", cache=True)
def _give_back_changed(line: int, version: int, wraps_at: int) -> None:
    following = (version + 2) & 0xFFFF
    if following == 0:
        fetch_add(wraps_at, 1)
    store_u16_release(line, following)


@njit(cache=True)
def _victim(line: int, epoch: int) -> int:
    """An empty slot, else the first of the smallest score."""
    oldest, victim = -1, 0
    for slot in range(WAYS):
        age = load_u8(line + 2 + slot)
        if age == 0:
            return slot
        behind = epoch - age if epoch >= age else epoch - age + _EPOCHS
        if behind >= _EPOCHS - _AHEAD:
            behind = 0
        if behind > oldest:
            oldest, victim = behind, slot
    return victim


@njit(nogil=True, cache=True)
def write(
    lines: IndexArray,  # (sets, 16) int64
    vectors: FloatArray,  # (rows, dim) float32
    state: IndexArray,  # (STATE_WORDS,) int64
    keys: KeyArray,  # (n,) int64
    values: FloatArray,  # (n, dim) float32
    chosen: BoolArray,  # (n,) bool, or empty for all
    replace: bool,
    admit: bool,
) -> None:
    """Write vectors of the chosen keys: `replace` those of resident keys, `admit` keys that are not resident.

    Keys that this leaves alone are first looked for without owning their set.
    """
    n, row_bytes, sets = keys.size, 4 * vectors.shape[1], lines.shape[0]
    if sets == 0:
        return
    base, vectors_at, values_at, wraps_at = _address(lines), _address(vectors), _address(values), _address(state) + 8 * WRAPS
    epoch = _epoch(load_i64(_address(state) + 8 * CLOCK), sets)
    probation = (epoch - 1 - PROBATION + _EPOCHS) % _EPOCHS + 1
    admitted, evicted = 0, 0
    for i in range(n):
        if i + _BLOCK // 2 < n:
            prefetch(_line_of(keys[i + _BLOCK // 2], base, sets))
            prefetch(_line_of(keys[i + _BLOCK // 2], base, sets) + _CACHE_LINE)
        if chosen.size != 0 and not chosen[i]:
            continue
        key = keys[i]
        line = _line_of(key, base, sets)
        rows = vectors_at + ((line - base) >> 7) * WAYS * row_bytes
        if not (replace and admit):
            slot = _read(line, key, rows, row_bytes, wraps_at, 0)
            if (slot >= 0 and not replace) or (slot == -1 and not admit):
                continue
        version = _take(line)
        slot = _find(line, key)
        if (slot >= 0 and not replace) or (slot < 0 and not admit):
            store_u16_release(line, version)
            continue
        if slot < 0:
            slot = _victim(line, epoch)
            evicted += load_u8(line + 2 + slot) != 0
            admitted += 1
            store_i64(line + 16 + 8 * slot, key)
            store_u8(line + 2 + slot, probation)
        copy_bytes(rows + slot * row_bytes, values_at + i * row_bytes, row_bytes)
        _give_back_changed(line, version, wraps_at)
    fetch_add(_address(state) + 8 * INSERTS, admitted)
    fetch_add(_address(state) + 8 * EVICTIONS, evicted)
    fetch_add(_address(state) + 8 * RESIDENT, admitted - evicted)


@njit(nogil=True, cache=True)
def erase(
    lines: IndexArray,  # (sets, 16) int64
    state: IndexArray,  # (STATE_WORDS,) int64
    keys: KeyArray,  # (n,) int64
) -> None:
    """Empty the slots of resident keys."""
    sets = lines.shape[0]
    if sets == 0:
        return
    base, wraps_at = _address(lines), _address(state) + 8 * WRAPS
    erased = 0
    for i in range(keys.size):
        line = _line_of(keys[i], base, sets)
        if _read(line, keys[i], 0, 0, wraps_at, 0) == -1:
            continue
        version = _take(line)
        slot = _find(line, keys[i])
        if slot < 0:
            store_u16_release(line, version)
            continue
        store_u8(line + 2 + slot, 0)
        _give_back_changed(line, version, wraps_at)
        erased += 1
    fetch_add(_address(state) + 8 * RESIDENT, -erased)


@njit(nogil=True, cache=True)
def dump(
    lines: IndexArray,  # (sets, 16) int64
    out: KeyArray,  # (14 * sets,) int64
) -> int:
    """Write the resident keys to `out`; returns their number. Each set is as it was at one moment."""
    base = _address(lines)
    count = 0
    for index in range(lines.shape[0]):
        line = base + index * _LINE_BYTES
        version = _take(line)
        for slot in range(WAYS):
            if load_u8(line + 2 + slot) != 0:
                out[count] = load_i64(line + 16 + 8 * slot)
                count += 1
        store_u16_release(line, version)
    return count
