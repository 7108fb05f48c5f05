"""From the dtypes of other formats to int64 keys and float32 vectors."""

import sys

import numpy as np

from hps.errors import InvalidDtypeError, ModelFileError
from hps.formats.base import BFLOAT16, AnyArray, ArrayInfo
from hps.types import FloatArray, KeyArray

VECTOR_DTYPES = {"float32": 4, "float16": 2, BFLOAT16: 2, "float64": 8}
"""The dtypes that become float32, and the bytes of an element."""

_INT64_MAX = np.iinfo(np.int64).max


def vector_dtype(path: str, vectors: ArrayInfo, claimed: str | None) -> str:
    """The dtype of the vectors: what the file says, or what the caller claims where the file has only bits.

    Raises:
        InvalidDtypeError: it is no float that can become float32.
    """
    known = ", ".join(VECTOR_DTYPES)
    if claimed is not None and claimed not in VECTOR_DTYPES:
        raise InvalidDtypeError(f"importing {path}: got dtype {claimed!r}, expected one of: {known}")
    if claimed is not None and claimed != vectors.dtype:
        bits = 8 * VECTOR_DTYPES[claimed]
        if vectors.dtype not in (f"void{bits}", f"uint{bits}"):
            raise InvalidDtypeError(
                f"importing {path}: got vectors {vectors} and dtype {claimed!r}, which can only name what void{bits} or "
                f"uint{bits} elements really are; omit it"
            )
        return claimed
    if vectors.dtype not in VECTOR_DTYPES:
        bits16 = vectors.dtype in ("void16", "uint16")
        hint = "; if its elements are bfloat16 bits, say so with dtype bfloat16" if bits16 else ""
        raise InvalidDtypeError(f"importing {path}: got vectors {vectors}, expected one of: {known}; convert them first{hint}")
    return vectors.dtype


def to_keys(path: str, name: str, block: AnyArray, row: int) -> KeyArray:
    """A block of keys as (n,) int64.

    Args:
        path: for messages, as is `name`.
        block: (n,) or (n, 1) integers of any size and byte order.
        row: of the block's first key in the source.

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


def to_vectors(path: str, name: str, dtype: str, block: AnyArray, row: int) -> FloatArray:
    """A block of vectors as (n, dim) float32. float32 and float16 keep their values; NaN and infinite values stay.

    Args:
        path: for messages, as is `name`.
        dtype: what `vector_dtype` returned.
        block: (n, dim) of it, or of as many bits.
        row: of the block's first vector in the source.

    Raises:
        ModelFileError: a finite float64 is infinite as float32.
    """
    if dtype == BFLOAT16:
        return np.left_shift(_bits(block, np.dtype(np.uint16)), 16, dtype=np.uint32).view(np.float32)
    if block.dtype.kind != "f":
        block = _bits(block, np.dtype(f"f{VECTOR_DTYPES[dtype]}"))
    with np.errstate(over="ignore", invalid="ignore"):  # a signalling NaN becomes a quiet one
        vectors = np.ascontiguousarray(block, np.float32)
    if dtype != "float64":
        return vectors
    infinite = np.isinf(vectors)
    if infinite.any() and (lost := infinite & np.isfinite(block)).any():
        at, element = np.unravel_index(int(np.argmax(lost)), lost.shape)
        raise ModelFileError(
            f"importing {path}: row {row + int(at)} of {name!r} has {block[at, element]} as element {element}, which is "
            "infinite as float32, expected magnitudes below 3.4028236e38"
        )
    return vectors


def _bits(block: AnyArray, dtype: "np.dtype[np.generic]") -> AnyArray:
    """The same bytes as elements of another type; little-endian unless the file says otherwise."""
    contiguous = np.ascontiguousarray(block)
    if contiguous.dtype.kind == "u":  # the file says their byte order
        return contiguous.astype(contiguous.dtype.newbyteorder("="), copy=False).view(dtype.newbyteorder("="))
    little = contiguous.view(dtype.newbyteorder("<"))
    return little if sys.byteorder == "little" else little.astype(dtype.newbyteorder("="))
