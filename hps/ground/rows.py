"""Formats of rows with fewer bits than float32: encodes vectors as rows, and decodes rows.

Vectors are *encoded* when they arrive from a caller or a file, and *decoded* for an answer. In between, tiers store and copy
rows as they are: a row is a multiple of 4 bytes, treated as an array of `width` float32 without meaning:

    float32    dim x float32
    float16    dim x IEEE 754 binary16, then zeros up to 4 bytes
    bfloat16   dim x the upper half of a float32, then zeros up to 4 bytes
    int8       dim x uint8, then zeros up to 4 bytes, then a float16 scale and a float16 offset: element = code * scale + offset

The layout of int8 is `QUint8RowwiseF16` of NVIDIA's NVE (`cpu_ops/cpu_pooling.h`) and that of TorchEasyRec's exports
(`tzrec/utils/quant_util.py`), where dim is a multiple of 4. A product of 8 and 11 bits is exact in float32, so an element is
rounded once, and no order of operations changes it.

**Encoding** rounds to the nearest, ties to even. For int8, the offset is the smallest element, the scale 1/255 of the distance
from the offset to the largest, both as float16, and a code is the nearest to (element - offset) / scale within 0..255. So an
element is off by half a scale, and by a quarter more at the ends. Encoding a decoded row gives the same row. Where float16 is
too coarse for that, since a row's elements are similar and far from 0, decoded codes are encoded until they no longer change; a
row for which they keep changing gets the value of its middle.

**Refused by `encode`** are, for int8, rows with an infinity or NaN, or with an offset or scale beyond float16's range (65,504),
and for 16 bits, finite elements that would become infinite. The 16-bit formats keep infinities, NaN and subnormals, and round
smaller values to 0, as IEEE 754 and all frameworks do. int8 has no such rule: a row whose range is so small that its scale is a
subnormal of float16, or 0, is refused if an element would be off by more than a 16th of the largest. With a normal scale none
is: half and a quarter of a scale are a 170th.
"""

from collections.abc import Callable, Iterable
from typing import Any, cast

import numba
import numpy as np
from numba import float32, int64, njit, uint8, uint16, uint32

from hps.errors import InvalidInputError
from hps.ground.kernels.numba_atomics import address_of, pointer_to
from hps.ground.kernels.numba_kernels import kernel, read_only
from hps.types import ROW_DTYPES, FloatArray, row_width

FLOAT32, FLOAT16, BFLOAT16, INT8 = range(len(ROW_DTYPES))
_TRIES = 8
_LARGEST_LOSS = 1 / 16  # of a row's largest element

_carray = cast(Any, numba).carray  # its types want pointers of ctypes
_VECTORS = read_only(float32[:, ::1])


@njit(inline="always")
def _bits_of(value: Any) -> Any:
    return np.float32(value).view(np.uint32)


@njit(inline="always")
def _float_of(bits: Any) -> Any:
    return np.uint32(bits).view(np.float32)


@njit(inline="always")
def half_to_float(half: Any) -> Any:
    """Convert the bits of a float16. Needs no subnormal float32, which a thread may flush to 0."""
    bits = (np.uint32(half) & np.uint32(0x7FFF)) << np.uint32(13)
    exponent = bits & np.uint32(0x0F800000)
    normal = bits + np.uint32(0x38000000)
    special = bits + np.uint32(0x70000000)
    small = _bits_of(_float_of(bits + np.uint32(0x38800000)) - _float_of(np.uint32(0x38800000)))
    magnitude = special if exponent == np.uint32(0x0F800000) else small if exponent == np.uint32(0) else normal
    return _float_of(magnitude | (np.uint32(half) & np.uint32(0x8000)) << np.uint32(16))


@njit(inline="always")
def half_of(value: Any) -> Any:
    """Return the bits of the nearest float16; the bits of infinity for finite values that are too large."""
    bits = _bits_of(value)
    magnitude = bits & np.uint32(0x7FFFFFFF)
    sign = bits >> np.uint32(16) & np.uint32(0x8000)
    odd = magnitude >> np.uint32(13) & np.uint32(1)
    normal = (magnitude - np.uint32(0x38000000) + np.uint32(0xFFF) + odd) >> np.uint32(13)
    small = _bits_of(_float_of(magnitude) + np.float32(0.5)) - np.uint32(0x3F000000)
    half = small if magnitude < np.uint32(0x38800000) else normal if magnitude < np.uint32(0x477FF000) else np.uint32(0x7C00)
    return np.uint32(0x7E00) if magnitude > np.uint32(0x7F800000) else half | sign  # one NaN, as on a GPU


@njit(inline="always")
def _bfloat_of(value: Any) -> Any:
    """Return the bits of the nearest bfloat16."""
    bits = _bits_of(value)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    return bits >> np.uint32(16) | np.uint32(0x40) if bits & np.uint32(0x7FFFFFFF) > np.uint32(0x7F800000) else rounded


@njit()
def decode_row(source: int, target: int, dim: int, dtype: int) -> None:
    """Write the vector of a row; both are given by address, aligned to 4 bytes."""
    vector = _carray(pointer_to(target), (dim,), float32)
    if dtype == INT8:
        codes = _carray(pointer_to(source), (dim,), uint8)
        word = _carray(pointer_to(source + (dim + 3) // 4 * 4), (1,), uint32)[0]
        scale, offset = half_to_float(word & np.uint32(0xFFFF)), half_to_float(word >> np.uint32(16))
        for j in range(dim):
            vector[j] = np.float32(codes[j]) * scale + offset
    elif dtype == FLOAT16:
        halves = _carray(pointer_to(source), (dim,), uint16)
        for j in range(dim):
            vector[j] = half_to_float(halves[j])
    else:
        halves = _carray(pointer_to(source), (dim,), uint16)
        for j in range(dim):
            vector[j] = _float_of(np.uint32(halves[j]) << np.uint32(16))


@kernel(numba.void, _VECTORS, float32[:, ::1], int64)
def decode_rows(rows: FloatArray, vectors: FloatArray, dtype: int) -> None:
    """Write the vectors, (n, dim) float32, of rows, (n, width) float32, of a format other than float32."""
    source, target, dim = address_of(rows), address_of(vectors), vectors.shape[1]
    for i in range(rows.shape[0]):
        decode_row(source + 4 * rows.shape[1] * i, target + 4 * dim * i, dim, dtype)


@njit(inline="always")
def _ordered(bits: Any) -> Any:
    """Map the bits of a float32 to an int32 of the same order, and back."""
    return bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF))


@njit()
def _write_codes(vector: Any, codes: Any) -> tuple[Any, Any, Any]:
    """Write the codes of a row; return the bits of scale and offset, and whether encoding them again surely keeps them."""
    bits = vector.view(np.int32)
    lowest, highest = np.int32(0x7FFFFFFF), np.int32(-0x80000000)
    for j in range(bits.size):
        ordered = _ordered(bits[j])
        lowest, highest = min(lowest, ordered), max(highest, ordered)
    low, high = _float_of(np.uint32(_ordered(lowest))), _float_of(np.uint32(_ordered(highest)))
    offset_bits = half_of(low)
    if offset_bits == np.uint32(0x8000):  # -0, which the sum with a product would lose
        offset_bits = np.uint32(0)
    offset = half_to_float(offset_bits)
    scale_bits = half_of((high - offset) / np.float32(255.0)) if high > offset else np.uint32(0)
    scale = half_to_float(scale_bits)
    if scale == np.float32(0.0):
        for j in range(codes.size):
            codes[j] = 0
        return scale_bits, offset_bits, True
    inverse = np.float32(1.0) / scale
    fewest, most = np.int32(255), np.int32(0)
    for j in range(codes.size):
        code = np.int32(min(max(np.rint((vector[j] - offset) * inverse), np.float32(0.0)), np.float32(255.0)))
        codes[j] = code
        fewest, most = min(fewest, code), max(most, code)
    top = scale * np.float32(255.0) + offset
    exact = max(abs(offset), abs(top)) * np.float32(2.0**-21) < scale
    stays = half_of((top - offset) / np.float32(255.0)) == scale_bits
    return scale_bits, offset_bits, fewest == 0 and most == 255 and exact and stays


@njit()
def _write_settled(vector: Any, codes: Any, again: Any, coded: Any) -> tuple[Any, Any]:
    """Write codes that stay the same when they are decoded and encoded; `again` and `coded` are scratch of as many elements."""
    scale, offset, settled = _write_codes(vector, codes)
    for _ in range(_TRIES):
        if settled:
            return scale, offset
        factor, shift = half_to_float(scale), half_to_float(offset)
        for j in range(codes.size):
            again[j] = np.float32(codes[j]) * factor + shift
        next_scale, next_offset, settled = _write_codes(again, coded)
        same = next_scale == scale and next_offset == offset
        for j in range(codes.size):
            same = same and coded[j] == codes[j]
            codes[j] = coded[j]
        settled = settled or same
        scale, offset = next_scale, next_offset
    if settled:
        return scale, offset
    low, high = again[0], again[0]
    for j in range(codes.size):
        low, high = min(low, again[j]), max(high, again[j])
        codes[j] = 0
    middle = half_of(low + (high - low) * np.float32(0.5))
    return np.uint32(0), np.uint32(0) if middle == np.uint32(0x8000) else middle


@njit()
def _is_flattened(vector: Any, row: int, again: Any) -> bool:
    """Return True if a row, given by address, decodes to a vector that is far off; `again` is scratch of as many elements."""
    decode_row(row, address_of(again), vector.size, INT8)
    largest = error = np.float64(0.0)  # a float32 of a 16th of a subnormal would be rounded
    for j in range(vector.size):
        largest = max(largest, abs(np.float64(vector[j])))
        error = max(error, abs(np.float64(again[j]) - np.float64(vector[j])))
    return bool(error > largest * _LARGEST_LOSS)


@kernel(int64, _VECTORS, float32[:, ::1], int64)
def encode_rows(vectors: FloatArray, rows: FloatArray, dtype: int) -> Any:
    """Write the rows, (n, width) float32, of vectors, (n, dim) float32, in a format other than float32.

    Returns:
        How many rows were written before one that the format cannot hold; n if all were.
    """
    n, dim = vectors.shape
    at, row_bytes = address_of(rows), 4 * rows.shape[1]
    again, coded = np.empty(dim, np.float32), np.empty(dim, np.uint8)
    for i in range(n):
        start = at + row_bytes * i
        words = _carray(pointer_to(start), (rows.shape[1],), uint32)
        vector = vectors[i]
        if dtype == INT8:
            if rows.shape[1] > 1:
                words[rows.shape[1] - 2] = 0
            codes = _carray(pointer_to(start), (dim,), uint8)
            scale, offset = _write_settled(vector, codes, again, coded)
            words[rows.shape[1] - 1] = scale | offset << np.uint32(16)
            largest = np.int32(0)
            bits = vector.view(np.int32)
            for j in range(dim):
                largest = max(largest, bits[j] & np.int32(0x7FFFFFFF))
            if largest >= np.int32(0x7F800000) or scale & np.uint32(0x7C00) == 0x7C00 or offset & np.uint32(0x7C00) == 0x7C00:
                return i
            if scale & np.uint32(0x7C00) == 0 and _is_flattened(vector, start, again):
                return i
            continue
        words[rows.shape[1] - 1] = 0
        halves = _carray(pointer_to(start), (dim,), uint16)
        bits = vector.view(np.int32)
        lost = False
        for j in range(dim):
            half = half_of(vector[j]) if dtype == FLOAT16 else _bfloat_of(vector[j])
            halves[j] = half
            infinite = half & np.uint32(0x7FFF) == (0x7C00 if dtype == FLOAT16 else 0x7F80)
            lost = lost or (infinite and bits[j] & np.int32(0x7FFFFFFF) != np.int32(0x7F800000))
        if lost:
            return i
    return n


@kernel(numba.void, read_only(float32[::1]), uint16[::1])
def to_bfloat16(values: FloatArray, out: Any) -> None:
    """Write the bits of the nearest bfloat16 of each value."""
    for i in range(values.size):
        out[i] = _bfloat_of(values[i])


@kernel(numba.void, read_only(float32[::1]), uint16[::1])
def to_float16(values: FloatArray, out: Any) -> None:
    """Write the bits of the nearest float16 of each value."""
    for i in range(values.size):
        out[i] = half_of(values[i])


def to_16_bits(values: FloatArray, out: Any) -> None:
    """Write the nearest values of 16 bits; finite ones that are too large become infinite, and NaN stays NaN.

    Args:
        out: as many elements as `values`, float16, or uint16 for the bits of bfloat16; both are C-contiguous.
    """
    convert = to_float16 if out.dtype == np.float16 else to_bfloat16
    convert(values.reshape(-1), out.reshape(-1).view(np.uint16))


def row_kernels(row_dtypes: Iterable[str]) -> tuple[Callable[..., Any], ...]:
    """Return the kernels of tables with these formats, to be compiled before the first lookup."""
    return () if all(dtype == "float32" for dtype in row_dtypes) else (encode_rows, decode_rows)


def encode(what: str, vectors: FloatArray, row_dtype: str, keys: Any = None) -> FloatArray:
    """Return the rows, (n, width) float32, of vectors, (n, dim) float32, C-contiguous; for float32, the vectors.

    Args:
        what: the action, for errors.
        keys: the vectors' keys, for errors.

    Raises:
        InvalidInputError: the format cannot represent a vector.
    """
    if row_dtype == "float32":
        return vectors
    rows: FloatArray = np.empty((len(vectors), row_width(vectors.shape[1], row_dtype)), np.float32)
    done = encode_rows(vectors, rows, ROW_DTYPES.index(row_dtype))
    if done < len(vectors):
        vector = vectors[done]
        finite = np.isfinite(vector)
        wrong = ~finite if row_dtype == "int8" and not finite.all() else np.abs(np.where(finite, vector, 0))
        place, where = int(np.argmax(wrong)), f"row {done}" if keys is None else f"key {int(keys[done])}"
        decoded = decode(rows[done : done + 1], vector.size, row_dtype)[0]
        if finite.all() and np.isfinite(decoded).all():
            worst = int(np.argmax(np.abs(decoded.astype(np.float64) - vector)))
            raise InvalidInputError(
                f"{what}: the elements of {where}, up to {abs(vector[place]):.3g}, are too small for row_dtype {row_dtype}: "
                f"element {worst}, {vector[worst]:.3g}, would be {decoded[worst]:.3g}. Store the table as bfloat16 or float32, "
                "or write such rows as 0"
            )
        raise InvalidInputError(
            f"{what}: got {vector[place]} as element {place} of {where}, which row_dtype {row_dtype} cannot hold; correct it, "
            f"or store the table as {'bfloat16 or float32' if finite.all() else 'float32'}"
        )
    return rows


def decode(rows: FloatArray, dim: int, row_dtype: str, out: FloatArray | None = None) -> FloatArray:
    """Return the vectors, (n, dim) float32, of rows, (n, width) float32, in `out` if given; for float32, the rows."""
    if row_dtype == "float32":
        if out is None:
            return rows
        out[...] = rows
        return out
    if out is None:
        out = np.empty((len(rows), dim), np.float32)
    decode_rows(rows, out, ROW_DTYPES.index(row_dtype))
    return out
