"""Keys as a person writes them: sequences and arrays of integers, brought to one form."""

from typing import Any

import numpy as np

from hps.errors import InvalidDtypeError, InvalidInputError
from hps.types import KeyArray


def as_host_keys(keys: Any) -> KeyArray:
    """Bring a sequence or array of integers to (n,) int64, C-contiguous, in host memory; a copy only where needed.

    uint64 is taken bit for bit, as HugeCTR's `lookup` does.

    Raises:
        InvalidDtypeError: they are not integers.
        InvalidInputError: they are not one-dimensional, or not within 64 bits.
    """
    try:
        array = np.asarray(keys)
    except (ValueError, TypeError, OverflowError) as error:
        raise InvalidInputError(f"reading keys: got {type(keys).__name__} ({error}), wanted a sequence of integers") from error
    if array.ndim != 1:
        raise InvalidInputError(f"reading keys: got shape {array.shape}, wanted one dimension; flatten them")
    if array.size == 0 and array.dtype == np.float64:  # numpy's dtype of []
        return np.empty(0, np.int64)
    if array.dtype.kind not in "iu":
        raise InvalidDtypeError(f"reading keys: got dtype {array.dtype}, wanted int64 (or another integer type)")
    if array.dtype == np.uint64:
        return np.ascontiguousarray(array).view(np.int64)
    return np.ascontiguousarray(array, np.int64)
