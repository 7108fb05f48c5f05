"""The arrays that a database is given, checked once a call: a wrong one would be read or written beyond its end."""

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
) -> None:
    """Refuse arrays that `Database.fetch` cannot take.

    Raises:
        InvalidDtypeError: one has another dtype.
        InvalidInputError: one has another shape, is not C-contiguous, or cannot be written to.
    """
    check_keys(doing, keys)
    _check(doing, "out", out, _VECTORS, (keys.size, dim), writable=True)
    _check(doing, "found", found, _FOUND, (keys.size,), writable=True)


def check_rows(
    doing: str,
    keys: KeyArray,  # (n,)
    vectors: FloatArray,  # (n, dim)
    dim: int,
) -> None:
    """Refuse arrays that `Database.insert` cannot take; raises as `check_fetch` does."""
    check_keys(doing, keys)
    _check(doing, "vectors", vectors, _VECTORS, (keys.size, dim))


def check_keys(doing: str, keys: KeyArray) -> None:
    """Refuse anything but one dimension of int64; raises as `check_fetch` does."""
    _check(doing, "keys", keys, _KEYS, (keys.size,) if isinstance(keys, np.ndarray) else ())


def check_positive(doing: str, name: str, value: int) -> None:
    """Refuse a number below 1.

    Raises:
        InvalidInputError: it is.
    """
    if value < 1:
        raise InvalidInputError(f"{doing}: got {name} {value}, wanted at least 1")


def _check(doing: str, name: str, array: Any, dtype: np.dtype[Any], shape: tuple[int, ...], *, writable: bool = False) -> None:
    if not isinstance(array, np.ndarray) or array.dtype != dtype:
        got = f"dtype {array.dtype}" if isinstance(array, np.ndarray) else type(array).__name__
        raise InvalidDtypeError(f"{doing}: {name}: got {got}, wanted a NumPy array of {dtype}")
    if array.shape != shape:
        raise InvalidInputError(f"{doing}: {name}: got shape {array.shape}, wanted {shape}")
    if not array.flags.c_contiguous:
        raise InvalidInputError(f"{doing}: {name}: got a strided array, wanted a C-contiguous one; use np.ascontiguousarray")
    if writable and not array.flags.writeable:
        raise InvalidInputError(f"{doing}: {name}: got a read-only array, wanted one to write to")
