"""The numba kernels of the NumPy embedding cache that handle the misses of a query."""

import numpy as np
from numba import boolean, float32, float64, int64, void

from hps.hashing import mix
from hps.numba_atomics import copy_bytes
from hps.numba_kernels import kernel, read_only
from hps.types import BoolArray, FloatArray, IndexArray, KeyArray

_WORDS, _ROWS, _FLAGS = int64[::1], float32[:, ::1], boolean[::1]


@kernel(int64, read_only(_WORDS), _WORDS, int64, _WORDS, _WORDS, _WORDS)
def distinct(
    keys: KeyArray,  # (n,) int64
    missing: IndexArray,  # (at least count,) int64
    count: int,
    table: IndexArray,  # (size,) int64; size a power of two, at least 2 * count
    members: KeyArray,  # (at least count,) int64
    inverse: IndexArray,  # (at least count,) int64
) -> int:
    """Write the distinct keys at the missing positions to `members`, in order of appearance; returns their number.

    `inverse` gets the index in `members` of the key at each missing position. `table` becomes a hash table of these
    indices, -1 where it is empty.
    """
    wrap = table.size - 1
    table[:] = -1
    size = 0
    for i in range(count):
        key = keys[missing[i]]
        slot = np.int64(mix(key)) & wrap
        while table[slot] >= 0 and members[table[slot]] != key:
            slot = (slot + 1) & wrap
        if table[slot] < 0:
            table[slot] = size
            members[size] = key
            size += 1
        inverse[i] = table[slot]
    return size


@kernel(void, _WORDS, _WORDS, _WORDS, _WORDS, int64, _WORDS)
def rank(
    ascending: KeyArray,  # (u,) int64: the members, sorted
    table: IndexArray,  # (size,) int64
    members: KeyArray,  # (at least u,) int64
    inverse: IndexArray,  # (at least count,) int64
    count: int,
    ranks: IndexArray,  # (at least u,) int64
) -> None:
    """Turn `inverse` from indices in `members` into indices in `ascending`."""
    wrap = table.size - 1
    for i in range(ascending.size):
        slot = np.int64(mix(ascending[i])) & wrap
        while members[table[slot]] != ascending[i]:
            slot = (slot + 1) & wrap
        ranks[table[slot]] = i
    for i in range(count):
        inverse[i] = ranks[inverse[i]]


@kernel(void, _WORDS, _WORDS, int64, _ROWS, read_only(_FLAGS), float64, _ROWS, _FLAGS)
def scatter(
    missing: IndexArray,  # (at least count,) int64
    inverse: IndexArray,  # (at least count,) int64
    count: int,
    fetched: FloatArray,  # (u, dim) float32
    answered: BoolArray,  # (u,) bool
    default: float,
    out: FloatArray,  # (n, dim) float32
    found: BoolArray,  # (n,) bool, or empty
) -> None:
    """Write the fetched vector, or the default where there is none, to every missing position."""
    dim = out.shape[1]
    source, target = np.int64(fetched.ctypes.data), np.int64(out.ctypes.data)
    for i in range(count):
        position, row = missing[i], inverse[i]
        if answered[row]:
            copy_bytes(target + position * 4 * dim, source + row * 4 * dim, 4 * dim)
            if found.size != 0:
                found[position] = True
        else:
            out[position, :] = default
