"""Pools vectors that are in host memory: numba kernels, and the parts of kernels that a cache pools with.

The arithmetic is defined in `bags.py`. Products and sums are float32, with or without fma; norms and sums of weights are
float64, and rounded once.
"""

import math
from typing import TypeAlias

import numpy as np
from numba import boolean, float32, float64, int64, njit, void

from hps.numba_kernels import kernel, read_only
from hps.tensors.bags import Pooling
from hps.types import FloatArray, IndexArray, KeyArray

SUM, MEAN, SQRTN = 0, 1, 2  # of `Combiner`
KEYS, OFFSETS, WEIGHTS, OUT = (
    read_only(int64[::1]),
    read_only(int64[::1]),
    read_only(float32[::1]),
    float32[:, :],  # rows of any stride
)
_NO_OFFSETS: IndexArray = np.empty(0, np.int64)
_NO_WEIGHTS: FloatArray = np.empty(0, np.float32)
BagArrays: TypeAlias = tuple[IndexArray, int, FloatArray, int, float, bool, int]
"""Of a `Pooling`, as kernels take it: offsets, hotness, weights, combiner, max_norm, padded, padding_key."""


def bag_arrays(pooling: Pooling) -> BagArrays:
    """The bags of a segment in host memory, as kernels take them."""
    offsets = _NO_OFFSETS if pooling.offsets is None else pooling.offsets.astype(np.int64, copy=False)
    weights = _NO_WEIGHTS if pooling.weights is None else pooling.weights
    padding_key = pooling.padding_key
    padded = padding_key is not None
    return offsets, pooling.hotness, weights, int(pooling.combiner), pooling.max_norm, padded, padding_key or 0


@njit(inline="always")
def bound(offsets: IndexArray, hotness: int, bag: int, n: int) -> int:
    """The first key of a bag, as the caller says; of the bag after the last one, how many keys there are."""
    if offsets.size == 0:
        return bag * hotness
    return int(offsets[bag]) if bag < offsets.size else n


def first_key(bags: BagArrays, bag: int, n: int) -> int:
    """As the part of kernels `bound`."""
    return int(bound.py_func(bags[0], bags[1], bag, n))


@njit(fastmath={"reassoc", "contract"})
def add_vector(total: FloatArray, row: FloatArray, weight: float, max_norm: float) -> None:
    """Add a vector to the total of its bag: clipped, unless `max_norm` is 0, and weighted."""
    factor = float64(weight)
    if max_norm > 0.0:
        squares = 0.0
        for j in range(row.size):
            squares += float64(row[j]) * float64(row[j])
        norm = math.sqrt(squares)
        if norm > max_norm:
            factor *= max_norm / (norm + 1e-7)
    rounded = float32(factor)
    for j in range(total.size):
        total[j] += rounded * row[j]


@njit()
def divide(
    total: FloatArray,
    keys: KeyArray,
    begin: int,
    end: int,
    weights: FloatArray,
    combiner: int,
    padded: bool,
    padding_key: int,
) -> None:
    """Divide the total of a bag, which has keys [begin, end), as its combiner says."""
    if combiner == SUM:
        return
    divisor = 0.0
    if weights.size == 0 and not padded:
        divisor = float64(end - begin)
    else:
        for i in range(begin, end):
            if not (padded and keys[i] == padding_key):
                weight = float64(weights[i]) if weights.size else 1.0
                divisor += weight if combiner == MEAN or weights.size == 0 else weight * weight
    if combiner == SQRTN:
        divisor = math.sqrt(divisor)
    rounded = float32(divisor)
    for j in range(total.size):
        total[j] = total[j] / rounded if rounded != 0.0 else float32(0.0)


@kernel(int64, KEYS, int64, int64[::1])
def counted_positions(
    keys: KeyArray,  # (n,) int64
    padding_key: int,
    positions: IndexArray,  # (n,) int64
) -> int:
    """Write the positions of the keys that are not padding; returns their number."""
    count = 0
    for i in range(keys.size):
        if keys[i] != padding_key:
            positions[count] = i
            count += 1
    return count


@kernel(
    void,
    read_only(float32[:, ::1]),
    read_only(int64[::1]),
    read_only(int64[::1]),
    int64,
    int64,
    KEYS,
    OFFSETS,
    int64,
    WEIGHTS,
    int64,
    float64,
    boolean,
    int64,
    float32[::1],
    OUT,
)
def add_rows(
    rows: FloatArray,  # (u, dim) float32
    places: IndexArray,  # (at least stop,) int64, or empty
    positions: IndexArray,  # (p,) int64, ascending
    start: int,
    stop: int,
    keys: KeyArray,  # (n,) int64
    offsets: IndexArray,
    hotness: int,
    weights: FloatArray,
    combiner: int,
    max_norm: float,
    padded: bool,
    padding_key: int,
    total: FloatArray,  # (dim,) float32, scratch
    out: FloatArray,  # (B, dim) float32
) -> None:
    """Add the vectors of the keys at `positions[start:stop]` to the totals of their bags, which are in `out`.

    The i-th position has row `places[i]`, or i - start. A bag that has no position after `stop` is divided, too.
    """
    n, count = keys.size, out.shape[0]
    if start >= stop:
        return
    bag, after = 0, count  # the bag of the first position, by bisection: the last one that begins at or before it
    while after - bag > 1:
        middle = (bag + after) // 2
        if bound(offsets, hotness, middle, n) <= positions[start]:
            bag = middle
        else:
            after = middle
    i = start
    while i < stop:
        while bag + 1 < count and bound(offsets, hotness, bag + 1, n) <= positions[i]:
            bag += 1
        end = min(bound(offsets, hotness, bag + 1, n), n)
        total[:] = out[bag, :]
        while i < stop and (positions[i] < end or bag + 1 == count):
            position = positions[i]
            row = rows[places[i] if places.size else i - start]
            add_vector(total, row, weights[position] if weights.size else 1.0, max_norm)
            i += 1
        if i == positions.size or positions[i] >= end:
            divide(total, keys, max(0, bound(offsets, hotness, bag, n)), end, weights, combiner, padded, padding_key)
        out[bag, :] = total
