"""The numba kernels of the NumPy embedding cache that handle the misses of a query."""

import numpy as np
from numba import boolean, float32, float64, int64, void

from hps.hashing import mix
from hps.numba_atomics import copy_bytes
from hps.numba_kernels import kernel, read_only
from hps.types import BoolArray, FloatArray, IndexArray, KeyArray

PARTS = 256
"""Into which many missing keys are cut, so that threads share them, and what is known of a part stays in their caches."""
_PART_SHIFT = np.uint64(56)  # 64 bits less those of a part

_WORDS, _ROWS, _FLAGS = int64[::1], float32[:, ::1], boolean[::1]
_KEYS = read_only(_WORDS)


@kernel(int64, _KEYS, _WORDS, int64, _WORDS, _WORDS, _WORDS)
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


@kernel(void, _KEYS, _WORDS, _WORDS)
def count_parts(
    keys: KeyArray,  # (n,) int64
    missing: IndexArray,  # (m,) int64
    counts: IndexArray,  # (PARTS,) int64
) -> None:
    """Add to `counts` how many of the keys at the missing positions fall into each part: the upper bits of their hash."""
    for i in range(missing.size):
        counts[np.int64(mix(keys[missing[i]]) >> _PART_SHIFT)] += 1


@kernel(void, _KEYS, _WORDS, int64, _WORDS, _WORDS, _WORDS)
def place_parts(
    keys: KeyArray,  # (n,) int64
    missing: IndexArray,  # (m,) int64
    first: int,
    places: IndexArray,  # (PARTS,) int64
    parted: KeyArray,  # (count,) int64
    origins: IndexArray,  # (count,) int64
) -> None:
    """Write the keys at the missing positions to `parted`, those of a part from its place on, and `first` + i to `origins`."""
    for i in range(missing.size):
        key = keys[missing[i]]
        part = np.int64(mix(key) >> _PART_SHIFT)
        parted[places[part]] = key
        origins[places[part]] = first + i
        places[part] += 1


@kernel(void, _WORDS, _WORDS, _WORDS, int64, int64, _WORDS, _WORDS, _WORDS)
def distinct_parts(
    parted: KeyArray,  # (count,) int64
    origins: IndexArray,  # (count,) int64
    bounds: IndexArray,  # (PARTS + 1,) int64
    start: int,
    stop: int,
    members: KeyArray,  # (count,) int64
    inverse: IndexArray,  # (at least count,) int64
    sizes: IndexArray,  # (PARTS,) int64
) -> None:
    """Do for parts [start, stop) what `distinct` does for all. Members of a part begin at its bound; `sizes` says how many."""
    most = 0
    for part in range(start, stop):
        most = max(most, bounds[part + 1] - bounds[part])
    room = 2
    while room < 2 * most:
        room *= 2
    table = np.empty(room, np.int64)
    for part in range(start, stop):
        first, last = bounds[part], bounds[part + 1]
        room = 2
        while room < 2 * (last - first):
            room *= 2
        table[:room] = -1
        size = first
        for i in range(first, last):
            key = parted[i]
            slot = np.int64(mix(key)) & (room - 1)
            while table[slot] >= 0 and members[table[slot]] != key:
                slot = (slot + 1) & (room - 1)
            if table[slot] < 0:
                table[slot] = size
                members[size] = key
                size += 1
            inverse[origins[i]] = table[slot]
        sizes[part] = size - first


@kernel(void, _WORDS, _WORDS, _WORDS, int64, int64, _WORDS, _WORDS, _WORDS)
def close_ranks(
    origins: IndexArray,  # (count,) int64
    bounds: IndexArray,  # (PARTS + 1,) int64
    firsts: IndexArray,  # (PARTS + 1,) int64
    start: int,
    stop: int,
    members: KeyArray,  # (count,) int64
    inverse: IndexArray,  # (at least count,) int64
    together: KeyArray,  # (u,) int64
) -> None:
    """Move the members of parts [start, stop) from their bounds to `firsts`, where no gap is between parts."""
    for part in range(start, stop):
        moved = bounds[part] - firsts[part]
        for i in range(firsts[part], firsts[part + 1]):
            together[i] = members[i + moved]
        if moved != 0:
            for i in range(bounds[part], bounds[part + 1]):
                inverse[origins[i]] -= moved


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
