"""The numba kernel of the NumPy embedding cache that queries keys and adds up their vectors, bag by bag."""

import numpy as np
from numba import boolean, float32, float64, int64

from hps.cache.cpu.sets import (
    CLOCK,
    EPOCHS_A_CALL,
    STATE_WORDS,
    WAYS,
    WRAPS,
    epoch_at,
    find,
    line_of,
    read,
    read_static,
    rows_of,
    touch,
    unchanged,
)
from hps.ground.kernels.numba_atomics import address_of, copy_bytes, fetch_add, load_acquire, load_acquire_u16, prefetch
from hps.ground.kernels.numba_kernels import kernel
from hps.ground.rows import FLOAT32, decode_row
from hps.tensors.pooling import KEYS, MAX, OFFSETS, OUT, SUM, WEIGHTS, add_vector, bound, complete, raise_to
from hps.types import FloatArray, IndexArray, KeyArray, RowArray

WRONG_OFFSETS = -2
_BLOCK = 32
_CACHE_LINE = 64
_PREFETCHED_BYTES = 512


@kernel(
    int64,
    int64[:, ::1],
    float32[:, ::1],
    int64[::1],
    KEYS,
    OFFSETS,
    int64,
    WEIGHTS,
    int64,
    float64,
    boolean,
    int64,
    int64,
    int64,
    float32[:, ::1],
    OUT,
    int64[::1],
    int64,
)
def pool(
    lines: IndexArray,  # (sets, 16) int64
    vectors: RowArray,  # (rows, width)
    state: IndexArray,  # (STATE_WORDS,) int64
    keys: KeyArray,  # (n,) int64
    offsets: IndexArray,
    hotness: int,
    weights: FloatArray,
    combiner: int,
    max_norm: float,
    padded: bool,
    padding_key: int,
    first: int,
    last: int,
    scratch: FloatArray,  # (3, dim or, if more, width) float32
    out: FloatArray,  # (B, dim) float32
    missing: IndexArray,  # (at least n,) int64
    dtype: int,
) -> int:
    """Combine the resident vectors of bags [first, last), and list the positions of missing keys, ascending.

    The list starts in `missing` at the first key of the bags. A bag without misses is complete; the row of another one holds
    the total of its resident vectors.

    Returns:
        Number of missing keys; -1 for wrong shapes or `WRONG_OFFSETS`, with nothing written.
    """
    n, dim, sets, count = keys.size, out.shape[1], lines.shape[0], out.shape[0]
    if (
        scratch.shape[1] < max(dim, vectors.shape[1])
        or (dtype == FLOAT32 and vectors.shape[1] != dim)
        or missing.size < n
        or (weights.size != 0 and weights.size != n)
    ):
        return -1
    if address_of(keys) % 8 != 0 or address_of(out) % 4 != 0 or (count != 0 and out.strides[1] != 4):
        return -1
    begin, stop = bound(offsets, hotness, first, n), bound(offsets, hotness, last, n)
    if (first == 0 and begin != 0) or (last == count and stop != n) or begin < 0 or stop > n:
        return WRONG_OFFSETS
    for bag in range(first, last):
        if bound(offsets, hotness, bag, n) > bound(offsets, hotness, bag + 1, n):
            return WRONG_OFFSETS
    epoch = 0
    if sets != 0:
        epoch = epoch_at(fetch_add(address_of(state) + 8 * CLOCK, min(stop - begin, EPOCHS_A_CALL * WAYS * sets)), sets)
    base, vectors_at, wraps_at = address_of(lines), address_of(vectors), address_of(state) + 8 * WRAPS
    row_bytes, vector_bytes, state_at, static = 4 * vectors.shape[1], 4 * dim, address_of(state), state.size > STATE_WORDS
    ahead = min(row_bytes, _PREFETCHED_BYTES)
    total, row = scratch[0, :dim], scratch[1, :dim]
    total_at, vector_at = address_of(scratch), address_of(scratch) + 4 * scratch.shape[1]
    row_at = vector_at if dtype == FLOAT32 else vector_at + 4 * scratch.shape[1]
    out_at, out_stride = address_of(out), out.strides[0]
    block_positions, block_lines, block_versions, block_slots, block_rows = np.empty((5, _BLOCK), np.int64)
    start = float32(-np.inf) if combiner == MAX else float32(0.0)
    misses, is_first = 0, True
    bag, bag_begin, bag_misses = first, begin, 0
    bag_end = bound(offsets, hotness, first + 1, n) if first < last else stop
    total[:] = start
    position = begin
    while position < stop:
        size = 0
        while size < _BLOCK and position < stop:
            key = keys[position]
            if not padded or key != padding_key:
                line = base
                if sets != 0:
                    line = line_of(key, base, sets)
                    prefetch(line)
                    prefetch(line + _CACHE_LINE)
                block_lines[size], block_positions[size] = line, position
                size += 1
            position += 1
        wraps = load_acquire(wraps_at)
        for i in range(size):
            slot = -1
            if sets != 0:
                line = block_lines[i]
                block_versions[i] = load_acquire_u16(line)
                slot = find(line, keys[block_positions[i]])
                if slot >= 0:
                    source = rows_of(line, base, vectors_at, row_bytes) + slot * row_bytes
                    block_rows[i] = source
                    for byte in range(0, ahead, _CACHE_LINE):
                        prefetch(source + byte)
            block_slots[i] = slot
        for i in range(size):
            line, slot, at = block_lines[i], block_slots[i], block_positions[i]
            while at >= bag_end and bag + 1 < last:
                if combiner != SUM and misses == bag_misses:
                    complete(total, keys, bag_begin, bag_end, weights, combiner, padded, padding_key)
                copy_bytes(out_at + bag * out_stride, total_at, vector_bytes)
                for j in range(dim):
                    total[j] = start
                is_first = True
                bag, bag_begin, bag_misses = bag + 1, bag_end, misses
                bag_end = min(bound(offsets, hotness, bag + 1, n), stop)
            if slot >= 0:
                copy_bytes(row_at, block_rows[i], row_bytes)
            if sets != 0 and not unchanged(line, block_versions[i], wraps_at, wraps):
                slot = read(line, keys[at], rows_of(line, base, vectors_at, row_bytes), row_bytes, wraps_at, row_at)
            if slot == -1 and static:
                line, slot = read_static(line, keys[at], base, sets, state_at, vectors_at, row_bytes, row_at)
            if slot >= 0:
                touch(line, slot, epoch)
                if dtype != FLOAT32:
                    decode_row(row_at, vector_at, dim, dtype)
                if combiner == MAX:
                    raise_to(total, row, max_norm, is_first)
                else:
                    add_vector(total_at, vector_at, row, weights[at] if weights.size else 1.0, max_norm)
            else:
                missing[begin + misses] = at
                misses += 1
            is_first = False
    while bag < last:
        if combiner != SUM and misses == bag_misses:
            complete(total, keys, bag_begin, bag_end, weights, combiner, padded, padding_key)
        copy_bytes(out_at + bag * out_stride, total_at, vector_bytes)
        for j in range(dim):
            total[j] = start
        bag, bag_begin, bag_misses = bag + 1, bag_end, misses
        if bag < last:
            bag_end = min(bound(offsets, hotness, bag + 1, n), stop)
    return misses
