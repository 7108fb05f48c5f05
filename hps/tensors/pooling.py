"""Pools vectors in host memory with numba kernels, and provides the kernel parts that a cache pools with.

The arithmetic is defined in `bags.py`. Products and sums are float32, with or without fma; norms and sums of weights are
float64, rounded once. The total of a maximum starts at -inf; `complete` writes zeros where a bag has no vector.
"""

import math
from typing import Any, TypeAlias

import numpy as np
from llvmlite import ir
from numba import boolean, float32, float64, int64, njit, types, void

from hps.ground.kernels.numba_atomics import address_of, cgutils, intrinsic
from hps.ground.kernels.numba_kernels import kernel, read_only
from hps.tensors.bags import Pooling
from hps.types import FloatArray, IndexArray, KeyArray

_F32, _I32, _I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
SUM, MEAN, SQRTN, MAX = 0, 1, 2, 3  # of `Combiner`
KEYS, OFFSETS, WEIGHTS, OUT = (
    read_only(int64[::1]),
    read_only(int64[::1]),
    read_only(float32[::1]),
    float32[:, :],  # rows of any stride
)
_NO_OFFSETS: IndexArray = np.empty(0, np.int64)
_NO_WEIGHTS: FloatArray = np.empty(0, np.float32)
BagArrays: TypeAlias = tuple[IndexArray, int, FloatArray, int, float, bool, int]
"""Kernel arguments of a `Pooling`: offsets, hotness, weights, combiner, max_norm, padded, padding_key."""


def bag_arrays(pooling: Pooling) -> BagArrays:
    """Convert the bags of a segment in host memory to kernel arguments."""
    offsets = _NO_OFFSETS if pooling.offsets is None else pooling.offsets.astype(np.int64, copy=False)
    weights = _NO_WEIGHTS if pooling.weights is None else pooling.weights
    padding_key = pooling.padding_key
    padded = padding_key is not None
    return offsets, pooling.hotness, weights, int(pooling.combiner), pooling.max_norm, padded, padding_key or 0


@njit(inline="always")
def bound(offsets: IndexArray, hotness: int, bag: int, n: int) -> int:
    """Return the given position of a bag's first key; for the bag after the last one, the number of keys."""
    if offsets.size == 0:
        return bag * hotness
    return int(offsets[bag]) if bag < offsets.size else n


def first_key(bags: BagArrays, bag: int, n: int) -> int:
    """Call `bound` from Python."""
    return int(bound.py_func(bags[0], bags[1], bag, n))


@njit(fastmath={"reassoc", "contract"})
def _clipped(row: FloatArray, weight: float, max_norm: float) -> float:
    """Return the weight of a vector, reduced if the vector must be clipped."""
    squares = 0.0
    for j in range(row.size):
        squares += float64(row[j]) * float64(row[j])
    norm = math.sqrt(squares)
    return weight * (max_norm / (norm + 1e-7)) if norm > max_norm else weight


@intrinsic
def _add_floats(typing_context: Any, target: Any, source: Any, factor: Any, count: Any) -> Any:
    """Add `count` floats, each times `factor`; both addresses are 4-byte aligned.

    LLVM's own loop would do 64 at a time, and up to 63 one by one.
    """

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        to, origin, factor, count = arguments
        done = _I64(0)
        for width in (16, 4, 1):
            kind = ir.VectorType(_F32, width) if width > 1 else _F32
            factors = factor
            if width > 1:
                first = builder.insert_element(ir.Constant(kind, ir.Undefined), factor, _I32(0))
                everywhere = ir.Constant(ir.VectorType(_I32, width), [0] * width)
                factors = builder.shuffle_vector(first, ir.Constant(kind, ir.Undefined), everywhere)
            stop = builder.sub(count, builder.urem(count, _I64(width)))
            with cgutils.for_range_slice(builder, done, stop, _I64(width), _I64) as (index, _):
                offset = builder.mul(index, _I64(4))
                places = [builder.inttoptr(builder.add(at, offset), kind.as_pointer()) for at in (to, origin)]
                total, term = [builder.load(place, align=4) for place in places]
                product = builder.fmul(factors, term, flags=("contract",))
                builder.store(builder.fadd(product, total, flags=("contract",)), places[0], align=4)
            done = stop
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32, types.int64), emit


@njit(inline="always")
def add_vector(total_at: int, row_at: int, row: FloatArray, weight: float, max_norm: float) -> None:
    """Add a vector to the total of its bag, weighted, and clipped unless `max_norm` is 0. Both are given by address."""
    factor = float32(_clipped(row, float64(weight), max_norm) if max_norm > 0.0 else weight)
    _add_floats(total_at, row_at, factor, row.size)


@njit()
def raise_to(total: FloatArray, row: FloatArray, max_norm: float, is_first: bool) -> None:
    """Raise the total of a bag to a vector where that is larger, or NaN and the bag's first; clipped unless `max_norm` is 0."""
    factor = float32(_clipped(row, 1.0, max_norm) if max_norm > 0.0 else 1.0)
    for j in range(total.size):
        value = factor * row[j]
        total[j] = value if value > total[j] else total[j]
    if is_first:
        for j in range(total.size):
            if math.isnan(row[j]):
                total[j] = row[j]


@njit()
def complete(
    total: FloatArray,
    keys: KeyArray,
    begin: int,
    end: int,
    weights: FloatArray,
    combiner: int,
    padded: bool,
    padding_key: int,
) -> None:
    """Turn the total of a bag with keys [begin, end) into its vector as its combiner requires; not for sums."""
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
    rounded = float32(1.0 if combiner == MAX and divisor > 0.0 else divisor)
    for j in range(total.size):
        total[j] = total[j] / rounded if rounded != 0.0 else float32(0.0)


@kernel(int64, KEYS, int64, int64[::1])
def counted_positions(
    keys: KeyArray,  # (n,) int64
    padding_key: int,
    positions: IndexArray,  # (n,) int64
) -> int:
    """Write the positions of the keys that are not padding; return their number."""
    count = 0
    for i in range(keys.size):
        if keys[i] != padding_key:
            positions[count] = i
            count += 1
    return count


def start_totals(
    bags: BagArrays,
    positions: IndexArray,  # (p,) int64, ascending
    n: int,
    out: FloatArray,  # (B, dim) float32
) -> None:
    """Write what the totals of bags start from: zeros, but -inf for a maximum of any of the keys at `positions`."""
    offsets, hotness, _weights, combiner = bags[:4]
    out[...] = 0.0
    if combiner == MAX:
        starts = offsets[: out.shape[0]] if offsets.size else np.arange(out.shape[0]) * hotness
        out[np.diff(np.searchsorted(positions, np.append(starts, n))) > 0] = -np.inf


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
def pool_rows(
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
    """Add the vectors of the keys at `positions[start:stop]` to the totals of their bags in `out`.

    The i-th position has row `places[i]`, or i - start. Also completes each bag that has no position after `stop`.
    """
    n, count = keys.size, out.shape[0]
    total_at, rows_at, row_bytes = address_of(total), address_of(rows), 4 * rows.shape[1]
    if start >= stop:
        return
    bag, after = 0, count  # find the bag of the first position by bisection: the last one that starts at or before it
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
        for j in range(total.size):  # to assign a slice compiles the text of its error message: 1.3 s
            total[j] = out[bag, j]
        first = max(0, bound(offsets, hotness, bag, n))
        if combiner == MAX and padded:
            while keys[first] == padding_key:  # a counted key follows
                first += 1
        while i < stop and (positions[i] < end or bag + 1 == count):
            position = positions[i]
            place = places[i] if places.size else i - start
            if combiner == MAX:
                raise_to(total, rows[place], max_norm, position == first)
            else:
                weight = weights[position] if weights.size else 1.0
                add_vector(total_at, rows_at + place * row_bytes, rows[place], weight, max_norm)
            i += 1
        if combiner != SUM and (i == positions.size or positions[i] >= end):
            complete(total, keys, max(0, bound(offsets, hotness, bag, n)), end, weights, combiner, padded, padding_key)
        for j in range(total.size):
            out[bag, j] = total[j]
