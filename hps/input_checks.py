"""Checks of the host arrays that callers pass in, once a call: an engine would read or write beyond the end of a wrong one.

Every check raises `InvalidDtypeError` for another dtype, or for what is no NumPy array, and `InvalidInputError` for another
shape, for an array that is not C-contiguous, and for one to be written that is read-only. Arrays come back as plain `ndarray`s,
so that a memory-mapped file may be passed where a kernel takes only those; nothing is copied.
"""

from typing import Any

import numpy as np

from hps.errors import InvalidDtypeError, InvalidInputError
from hps.types import BoolArray, FloatArray, KeyArray

_KEYS = np.dtype(np.int64)
_VECTORS = np.dtype(np.float32)
_FOUND = np.dtype(np.bool_)


def check_fetch(
    doing: str,
    keys: KeyArray,  # (n,)
    out: FloatArray,  # (n, dim)
    found: BoolArray,  # (n,)
    dim: int,
) -> tuple[KeyArray, FloatArray, BoolArray]:
    """Check the arrays of a fetch; `doing`, such as `fetching from table t`, begins the message."""
    keys = check_keys(doing, keys)
    out = _check(doing, "out", out, _VECTORS, (keys.size, dim), writable=True)
    return keys, out, _check(doing, "found", found, _FOUND, (keys.size,), writable=True)


def check_rows(
    doing: str,
    keys: KeyArray,  # (n,)
    vectors: FloatArray,  # (n, dim)
    dim: int,
) -> tuple[KeyArray, FloatArray]:
    """Check keys and their vectors."""
    keys = check_keys(doing, keys)
    return keys, _check(doing, "vectors", vectors, _VECTORS, (keys.size, dim))


def check_keys(doing: str, keys: KeyArray) -> KeyArray:
    """Check keys: one dimension of int64."""
    checked: KeyArray = _check(doing, "keys", keys, _KEYS, None)
    return checked


def check_positive(doing: str, name: str, value: int) -> None:
    """Refuse a number below 1.

    Raises:
        InvalidInputError: the number is below 1.
    """
    if value < 1:
        raise InvalidInputError(f"{doing}: got {name} {value}, expected at least 1")


def _check(
    doing: str, name: str, array: Any, dtype: np.dtype[Any], shape: tuple[int, ...] | None, *, writable: bool = False
) -> Any:
    """Return the array as a plain ndarray; a shape of None is one dimension of any length."""
    if not isinstance(array, np.ndarray) or array.dtype != dtype:
        got = f"dtype {array.dtype}" if isinstance(array, np.ndarray) else type(array).__name__
        raise InvalidDtypeError(f"{doing}: {name}: got {got}, expected a NumPy array of {dtype}")
    if array.ndim != 1 if shape is None else array.shape != shape:
        raise InvalidInputError(f"{doing}: {name}: got shape {array.shape}, expected {shape or '(n,)'}")
    flags = array.flags
    if not flags.c_contiguous:
        raise InvalidInputError(f"{doing}: {name}: got a strided array, expected a C-contiguous one; use np.ascontiguousarray")
    if writable and not flags.writeable:
        raise InvalidInputError(f"{doing}: {name}: got a read-only array, expected one to write to")
    return array if type(array) is np.ndarray else np.asarray(array)
