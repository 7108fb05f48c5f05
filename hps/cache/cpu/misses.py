"""The numba kernels of the NumPy embedding cache that answer what a query did not find."""

import numpy as np
from numba import njit

from hps.cache.cpu.atomics import copy_bytes
from hps.hashing import mix
from hps.types import BoolArray, FloatArray, IndexArray, KeyArray


@njit(nogil=True, cache=True)
def distinct(
    keys: KeyArray,  # (n,) int64
    missing: IndexArray,  # (at least count,) int64
    count: int,
    table: IndexArray,  # (size,) int64; size a power of two, at least 2 * count
    members: KeyArray,  # (at least count,) int64
    inverse: IndexArray,  # (at least count,) int64
) -> int:
    """Write the distinct keys at the missing positions to `members`, as they appear; returns their number.

    `inverse` gets the index in `members` of each missing position's key, and `table` a hash table of these indices, -1
    where it is empty.
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


@njit(nogil=True, cache=True)
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


@njit(nogil=True, cache=True)
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
