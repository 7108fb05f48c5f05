"""The numba kernels of the NumPy embedding cache: `scatter`, and queries and modifications of the sets of `sets.py`.

`lines` and `vectors` are the sets of a table, and `state` are its counters. Rows are of the format `dtype` (`ground/rows.py`).
"""

import numpy as np
from numba import boolean, float32, float64, int64, njit, void

from hps.cache.cpu.sets import (
    CLOCK,
    EPOCHS_A_CALL,
    EVICTIONS,
    INSERTS,
    LINE_BYTES,
    RESIDENT,
    STATE_WORDS,
    UNPLACED,
    WAYS,
    WRAPS,
    acquire,
    empty_slot,
    epoch_at,
    find,
    is_idle,
    line_of,
    make_room_for,
    place_of,
    probation_at,
    read,
    read_static,
    release_changed,
    rows_of,
    strays_at,
    touch,
    try_acquire,
    unchanged,
    victim,
)
from hps.ground.kernels.numba_atomics import (
    address_of,
    copy_bytes,
    fetch_add,
    load_acquire,
    load_acquire_u16,
    load_relaxed,
    load_relaxed_u8,
    prefetch,
    store_relaxed,
    store_relaxed_u8,
    store_release_u16,
    yield_processor,
)
from hps.ground.kernels.numba_kernels import kernel, read_only
from hps.ground.rows import FLOAT32, decode_row
from hps.types import BoolArray, FloatArray, IndexArray, KeyArray, RowArray

_BLOCK = 32
_CACHE_LINE = 64
_PREFETCHED_BYTES = 512
_REPLACED, _ADMITTED, _UNPLACED = 0, 1, 2

_LINES, _ROWS, _WORDS, _KEYS, _FLAGS = int64[:, ::1], float32[:, ::1], int64[::1], read_only(int64[::1]), boolean[::1]


@njit(inline="always")
def query_keys(
    lines: IndexArray,
    vectors: FloatArray,
    state: IndexArray,
    keys: KeyArray,
    out: FloatArray,
    found: BoolArray,
    missing: IndexArray,
    dim: int,
    dtype: int,
) -> int:
    """As `query`, for other kernels."""
    n, sets = keys.size, lines.shape[0]
    if out.shape[0] != n or out.shape[1] != dim or missing.size < n or (found.size != 0 and found.size != n):
        return -1
    if address_of(keys) % 8 != 0 or address_of(out) % 4 != 0:
        return -1
    if sets == 0:
        for i in range(n):
            missing[i] = i
        for i in range(found.size):
            found[i] = False
        return n
    epoch = epoch_at(fetch_add(address_of(state) + 8 * CLOCK, min(n, EPOCHS_A_CALL * WAYS * sets)), sets)
    base, vectors_at, out_at, wraps_at = address_of(lines), address_of(vectors), address_of(out), address_of(state) + 8 * WRAPS
    row_bytes, state_at, static = 4 * vectors.shape[1], address_of(state), state.size > STATE_WORDS
    ahead = min(row_bytes, _PREFETCHED_BYTES)
    spare_rows = (row_bytes + 8 * _BLOCK - 1) // (8 * _BLOCK) if dtype != FLOAT32 else 0
    block = np.empty((4 + spare_rows, _BLOCK), np.int64)
    block_lines, block_versions, block_slots, block_rows = block[0], block[1], block[2], block[3]
    spare_at = address_of(block) + 4 * 8 * _BLOCK  # a row before it is decoded
    misses = 0
    for start in range(0, n, _BLOCK):
        count = min(_BLOCK, n - start)
        for i in range(count):
            line = line_of(keys[start + i], base, sets)
            prefetch(line)
            prefetch(line + _CACHE_LINE)
            block_lines[i] = line
        wraps = load_acquire(wraps_at)
        for i in range(count):
            line = block_lines[i]
            block_versions[i] = load_acquire_u16(line)
            slot = find(line, keys[start + i])
            block_slots[i] = slot
            if slot >= 0:
                row = rows_of(line, base, vectors_at, row_bytes) + slot * row_bytes
                block_rows[i] = row
                for byte in range(0, ahead, _CACHE_LINE):
                    prefetch(row + byte)
        for i in range(count):
            line, slot = block_lines[i], block_slots[i]
            target = out_at + (start + i) * 4 * dim if dtype == FLOAT32 else spare_at
            if slot >= 0:
                copy_bytes(target, block_rows[i], row_bytes)
            if not unchanged(line, block_versions[i], wraps_at, wraps):
                rows = rows_of(line, base, vectors_at, row_bytes)
                slot = read(line, keys[start + i], rows, row_bytes, wraps_at, target)
            if slot == -1 and static:
                line, slot = read_static(line, keys[start + i], base, sets, state_at, vectors_at, row_bytes, target)
            if slot >= 0:
                touch(line, slot, epoch)
                if dtype != FLOAT32:
                    decode_row(target, out_at + (start + i) * 4 * dim, dim, dtype)
            else:
                missing[misses] = start + i
                misses += 1
            if found.size != 0:
                found[start + i] = slot >= 0
    return misses


@kernel(int64, _LINES, _ROWS, _WORDS, _KEYS, _ROWS, _FLAGS, _WORDS, int64, int64)
def query(
    lines: IndexArray,  # (sets, 16) int64
    vectors: RowArray,  # (rows, width)
    state: IndexArray,  # (STATE_WORDS,) int64
    keys: KeyArray,  # (n,) int64
    out: FloatArray,  # (n, dim) float32
    found: BoolArray,  # (n,) bool, or empty
    missing: IndexArray,  # (at least n,) int64
    dim: int,
    dtype: int,
) -> int:
    """Copy hits, decoded, to `out` and write the positions of misses to `missing`; return their number, or -1 for wrong shapes.

    Processes blocks of keys in three passes (sets, slots, vectors), each of which prefetches for the next.
    """
    if dtype == FLOAT32:
        return query_keys(lines, vectors, state, keys, out, found, missing, dim, FLOAT32)
    return query_keys(lines, vectors, state, keys, out, found, missing, dim, dtype)


@njit()
def _write_static(
    home: int,
    key: int,
    source: int,
    base: int,
    sets: int,
    vectors_at: int,
    row_bytes: int,
    state_at: int,
    age: int,
    admit: bool,
) -> int:
    """Write a vector of a key of a static table, resident or, with `admit`, not; return what became of it."""
    wraps_at = state_at + 8 * WRAPS
    while True:
        version = acquire(home)
        line, there = place_of(home, key, admit, base, sets, state_at)
        slot_version = version
        if there >= 0 and line != home:
            slot_version = try_acquire(line)
        owned = there >= 0 and slot_version >= 0
        slot = -1
        if owned:
            slot = find(line, key) if there == 1 else empty_slot(line)
        if slot >= 0:
            if there == 0:
                store_relaxed(line + 16 + 8 * slot, key)
                store_relaxed_u8(line + 2 + slot, age)
                if line != home:
                    fetch_add(strays_at(home, base, state_at), 1)
            copy_bytes(rows_of(line, base, vectors_at, row_bytes) + slot * row_bytes, source, row_bytes)
            release_changed(line, slot_version, wraps_at)
        elif owned and line != home:
            store_release_u16(line, slot_version)
        if slot < 0 or line != home:
            store_release_u16(home, version)
        if slot >= 0:
            return _REPLACED if there == 1 else _ADMITTED
        if there == -1:
            return _REPLACED
        if owned and not make_room_for(home, key, base, sets, state_at, vectors_at, row_bytes):
            return _UNPLACED
        yield_processor()


@njit()
def _prefetch_rows(
    keys: KeyArray, start: int, stop: int, base: int, sets: int, vectors_at: int, row_bytes: int, epoch: int
) -> None:
    """Prefetch the rows that `write` will touch: owning a set waits for earlier stores, which are faster in cache."""
    for i in range(start, stop):
        line = line_of(keys[i], base, sets)
        prefetch(line)
        prefetch(line + _CACHE_LINE)
    for i in range(start, stop):
        line = line_of(keys[i], base, sets)
        slot = find(line, keys[i])
        if slot < 0:
            slot = victim(line, epoch)
        row = rows_of(line, base, vectors_at, row_bytes) + slot * row_bytes
        for byte in range(0, min(row_bytes, _PREFETCHED_BYTES), _CACHE_LINE):
            prefetch(row + byte)


@kernel(void, _LINES, _ROWS, _WORDS, _KEYS, read_only(_ROWS), read_only(_FLAGS), boolean, boolean)
def write(
    lines: IndexArray,  # (sets, 16) int64
    vectors: RowArray,  # (rows, width)
    state: IndexArray,  # (STATE_WORDS,) int64
    keys: KeyArray,  # (n,) int64
    values: RowArray,  # (n, width)
    chosen: BoolArray,  # (n,) bool, or empty for all
    replace: bool,
    admit: bool,
) -> None:
    """Write rows of the chosen keys: `replace` those of resident keys, `admit` keys that are not resident.

    A static table evicts nothing; it counts keys that find no place.

    Unless both are set, keys to leave alone are found without owning their set. With `admit` alone, a key evicts only an idle
    one, and is refused otherwise.
    """
    n, row_bytes, sets = keys.size, 4 * vectors.shape[1], lines.shape[0]
    if sets == 0:
        return
    base, vectors_at, values_at, wraps_at = (
        address_of(lines),
        address_of(vectors),
        address_of(values),
        address_of(state) + 8 * WRAPS,
    )
    epoch = epoch_at(load_relaxed(address_of(state) + 8 * CLOCK), sets)
    probation = probation_at(epoch)
    admitted, evicted, unplaced = 0, 0, 0
    for i in range(n):
        if i % _BLOCK == 0:
            _prefetch_rows(keys, i, min(i + _BLOCK, n), base, sets, vectors_at, row_bytes, epoch)
        if chosen.size != 0 and not chosen[i]:
            continue
        key = keys[i]
        line = line_of(key, base, sets)
        if state.size > STATE_WORDS:
            outcome = _write_static(
                line, key, values_at + i * row_bytes, base, sets, vectors_at, row_bytes, address_of(state), probation, admit
            )
            admitted += outcome == _ADMITTED
            unplaced += outcome == _UNPLACED
            continue
        rows = rows_of(line, base, vectors_at, row_bytes)
        if not (replace and admit):
            slot = read(line, key, rows, row_bytes, wraps_at, 0)
            if (slot >= 0 and not replace) or (slot == -1 and not admit):
                continue
        version = acquire(line)
        slot = find(line, key)
        if (slot >= 0 and not replace) or (slot < 0 and not admit):
            store_release_u16(line, version)
            continue
        if slot < 0:
            slot = victim(line, epoch)
            if not replace and not is_idle(line, slot, epoch):
                store_release_u16(line, version)
                continue
            evicted += load_relaxed_u8(line + 2 + slot) != 0
            admitted += 1
            store_relaxed(line + 16 + 8 * slot, key)
            store_relaxed_u8(line + 2 + slot, probation)
        copy_bytes(rows + slot * row_bytes, values_at + i * row_bytes, row_bytes)
        release_changed(line, version, wraps_at)
    fetch_add(address_of(state) + 8 * INSERTS, admitted)
    fetch_add(address_of(state) + 8 * EVICTIONS, evicted)
    fetch_add(address_of(state) + 8 * RESIDENT, admitted - evicted)
    fetch_add(address_of(state) + 8 * UNPLACED, unplaced)


@njit()
def _erase_static(home: int, key: int, base: int, sets: int, state_at: int) -> bool:
    """Empty the slot of a key of a static table; return whether it was resident."""
    wraps_at = state_at + 8 * WRAPS
    while True:
        version = acquire(home)
        line, there = place_of(home, key, False, base, sets, state_at)
        slot_version = version
        if there == 1 and line != home:
            slot_version = try_acquire(line)
        erases = there == 1 and slot_version >= 0
        if erases:
            store_relaxed_u8(line + 2 + find(line, key), 0)
            if line != home:
                fetch_add(strays_at(home, base, state_at), -1)
            release_changed(line, slot_version, wraps_at)
        if not erases or line != home:
            store_release_u16(home, version)
        if erases or there == -1:
            return erases
        yield_processor()


@kernel(void, _LINES, _WORDS, _KEYS)
def erase(
    lines: IndexArray,  # (sets, 16) int64
    state: IndexArray,  # (STATE_WORDS,) int64
    keys: KeyArray,  # (n,) int64
) -> None:
    """Empty the slots of resident keys."""
    sets = lines.shape[0]
    if sets == 0:
        return
    base, wraps_at = address_of(lines), address_of(state) + 8 * WRAPS
    erased = 0
    for i in range(keys.size):
        line = line_of(keys[i], base, sets)
        if state.size > STATE_WORDS:
            erased += _erase_static(line, keys[i], base, sets, address_of(state))
            continue
        if read(line, keys[i], 0, 0, wraps_at, 0) == -1:
            continue
        version = acquire(line)
        slot = find(line, keys[i])
        if slot < 0:
            store_release_u16(line, version)
            continue
        store_relaxed_u8(line + 2 + slot, 0)
        release_changed(line, version, wraps_at)
        erased += 1
    fetch_add(address_of(state) + 8 * RESIDENT, -erased)


@kernel(int64, _LINES, _ROWS, _WORDS, _KEYS, _WORDS, int64, float64, _ROWS, _FLAGS, int64)
def settle(
    lines: IndexArray,  # (sets, 16) int64
    vectors: RowArray,  # (rows, width)
    state: IndexArray,  # (STATE_WORDS + sets,) int64
    keys: KeyArray,  # (n,) int64
    missing: IndexArray,  # (at least count,) int64
    count: int,
    default: float,
    out: FloatArray,  # (n, dim) float32
    found: BoolArray,  # (n,) bool, or empty
    dtype: int,
) -> int:
    """Answer keys that missed in a complete table: those that a writer kept then, and absent ones.

    Returns:
        The number of absent keys, plus 2^32 times that of keys that are left because a writer keeps them, which come first in
        `missing`.
    """
    sets, row_bytes, left, absent = lines.shape[0], 4 * vectors.shape[1], 0, 0
    base, vectors_at, state_at, dim = address_of(lines), address_of(vectors), address_of(state), out.shape[1]
    spare = np.empty(vectors.shape[1] if dtype != FLOAT32 else 0, np.float32)
    for i in range(count):
        position = missing[i]
        row_at = address_of(out) + position * 4 * dim
        target = row_at if dtype == FLOAT32 else address_of(spare)
        line = line_of(keys[position], base, sets)
        line, slot = read_static(line, keys[position], base, sets, state_at, vectors_at, row_bytes, target)
        if slot >= 0 and dtype != FLOAT32:
            decode_row(target, row_at, dim, dtype)
        if slot == -1:
            out[position, :] = default
            absent += 1
        elif slot == -2:
            missing[i], missing[left] = missing[left], position
            left += 1
        elif found.size != 0:
            found[position] = True
    return left << 32 | absent


@kernel(int64, _LINES, _WORDS)
def dump(
    lines: IndexArray,  # (sets, 16) int64
    out: KeyArray,  # (14 * sets,) int64
) -> int:
    """Write the resident keys to `out`; return their number. Each set is a consistent snapshot."""
    base = address_of(lines)
    count = 0
    for index in range(lines.shape[0]):
        line = base + index * LINE_BYTES
        version = acquire(line)
        for slot in range(WAYS):
            if load_relaxed_u8(line + 2 + slot) != 0:
                out[count] = load_relaxed(line + 16 + 8 * slot)
                count += 1
        store_release_u16(line, version)
    return count


@kernel(void, _WORDS, _WORDS, int64, _ROWS, read_only(_FLAGS), float64, _ROWS, _FLAGS, int64)
def scatter(
    missing: IndexArray,  # (at least count,) int64
    inverse: IndexArray,  # (at least count,) int64
    count: int,
    fetched: RowArray,  # (u, width)
    answered: BoolArray,  # (u,) bool
    default: float,
    out: FloatArray,  # (n, dim) float32
    found: BoolArray,  # (n,) bool, or empty
    dtype: int,
) -> None:
    """Write the fetched vector, or else the default, to every missing position."""
    dim, row_bytes = out.shape[1], 4 * fetched.shape[1]
    source, target = np.int64(fetched.ctypes.data), np.int64(out.ctypes.data)
    for i in range(count):
        position, row = missing[i], inverse[i]
        if answered[row]:
            if dtype == FLOAT32:
                copy_bytes(target + position * 4 * dim, source + row * row_bytes, row_bytes)
            else:
                decode_row(source + row * row_bytes, target + position * 4 * dim, dim, dtype)
            if found.size != 0:
                found[position] = True
        else:
            out[position, :] = default
