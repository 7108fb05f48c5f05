"""Converts the dtypes of other formats to int64 keys and float32 vectors."""

import numpy as np

from hps.errors import InvalidDtypeError, ModelFileError
from hps.models.formats.base import BFLOAT16, AnyArray, ArrayInfo
from hps.models.formats.quantised_rows import CLAIMED_LAYOUTS, QUINT8
from hps.types import FloatArray, KeyArray

VECTOR_DTYPES = ("float32", "float16", BFLOAT16, "float64", QUINT8, "rowwise8")
"""Dtypes that are converted to float32; the last two where a format says so."""

_INT64_MAX = np.iinfo(np.int64).max


def vector_dtype(path: str, vectors: ArrayInfo, claimed: str | None) -> str:
    """Return the dtype of vectors: the file's, or the caller's: bfloat16 for 16-bit integers or raw bytes, a layout for uint8.

    Raises:
        InvalidDtypeError: it cannot be converted to float32.
    """
    if claimed == BFLOAT16 and vectors.dtype in ("void16", "uint16"):
        return BFLOAT16
    if claimed in CLAIMED_LAYOUTS and vectors.dtype == "uint8":
        return str(claimed)
    if vectors.dtype in VECTOR_DTYPES and claimed in (None, vectors.dtype):
        return vectors.dtype
    raise InvalidDtypeError(
        f"importing {path}: got vectors {vectors}{f' and dtype {claimed!r}' if claimed else ''}, expected one of: "
        f"{', '.join(VECTOR_DTYPES)}; convert them first, or say dtype bfloat16 if they are bfloat16 bits in void16 or uint16, "
        f"{' or '.join(CLAIMED_LAYOUTS)} if they are rows with scale and offset in uint8"
    )


def to_keys(path: str, name: str, block: AnyArray, row: int) -> KeyArray:
    """Convert a block of keys to (n,) int64.

    Args:
        block: (n,) or (n, 1) integers of any size and byte order.
        row: number of the block's first row in the source.

    Raises:
        ModelFileError: a key is 2^63 or more.
    """
    flat = block.reshape(-1)
    if flat.dtype.kind == "u" and flat.dtype.itemsize == 8 and (large := flat > _INT64_MAX).any():
        at = int(np.argmax(large))
        raise ModelFileError(
            f"importing {path}: row {row + at} of {name!r} has key {flat[at]}, expected keys below 2^63, which fit int64"
        )
    return np.ascontiguousarray(flat, np.int64)


def to_vectors(path: str, name: str, block: AnyArray, row: int) -> FloatArray:
    """Convert a block of vectors to (n, dim) float32. float32 and float16 keep their values; NaN and infinity stay.

    Args:
        block: (n, dim) floats, or the 16 bits of bfloat16 as any other type; little-endian unless they are integers.
        row: number of the block's first row in the source.

    Raises:
        ModelFileError: a finite float64 is infinite as float32.
    """
    if block.dtype.kind != "f":
        bits = block.astype(np.uint16) if block.dtype.kind == "u" else np.ascontiguousarray(block).view(np.uint16)
        return np.left_shift(bits, 16, dtype=np.uint32).view(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):  # a signalling NaN becomes a quiet one
        vectors = np.ascontiguousarray(block, np.float32)
    if block.dtype.itemsize <= 4:
        return vectors
    infinite = np.isinf(vectors)
    if infinite.any() and (lost := infinite & np.isfinite(block)).any():
        at, element = np.unravel_index(int(np.argmax(lost)), lost.shape)
        raise ModelFileError(
            f"importing {path}: row {row + int(at)} of {name!r} has {block[at, element]} as element {element}, which is "
            "infinite as float32, expected magnitudes below 3.4028236e38"
        )
    return vectors
