"""Bags of keys: the vectors of a bag's keys are combined into one vector.

With v_i the vectors of a bag's keys, clipped to `max_norm`, and w_i their weights or 1:

    sum      sum of w_i v_i                               torch.nn.functional.embedding_bag(mode="sum")
    mean     sum of w_i v_i / sum of w_i                  mode="mean"; with weights as TensorFlow's embedding_lookup_sparse
    sqrtn    sum of w_i v_i / sqrt(sum of w_i w_i)        embedding_lookup_sparse(combiner="sqrtn")
    max      largest v_i, element by element              mode="max"; no weights

A vector is clipped as torch does: if its L2 norm is above `max_norm`, it is multiplied by max_norm / (norm + 1e-7). Keys equal
to the padding key are skipped and not looked up. A bag that is empty or has divisor 0 yields zeros. Keys that no tier has
contribute the table's default vector, as in a lookup of rows.

As in torch, an element of a maximum is NaN if that of the bag's first vector is; NaN in later vectors is ignored.
"""

import math
import operator
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from enum import IntEnum
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from hps.errors import InvalidDtypeError, InvalidInputError
from hps.tensors.array_checks import adopt_keys, as_host_array, as_host_keys, size_on_device
from hps.tensors.dlpack import CAPSULE, adopt
from hps.types import DeviceArray

_EXPECTED = {"offsets": "int64 or int32", "weights": "float32"}


class Combiner(IntEnum):
    """Combines the vectors of a bag; `cuda/pool.cu` uses the same numbers."""

    SUM = 0
    MEAN = 1
    SQRTN = 2
    MAX = 3


class Arithmetic(IntEnum):
    """What a CUDA kernel has to be compiled for to pool bags; each covers the ones before it."""

    SUMS = 0
    WEIGHTED_SUMS = 1  # weights, or a max_norm
    MAXIMA = 2


COMBINERS: Final = {combiner.name.lower(): combiner for combiner in Combiner}


@dataclass(slots=True, eq=False, repr=False)
class Bags:
    """Keys of one table in bags, as `HPS.lookup_pooled` takes them. *Immutable*; the tensors stay the caller's.

    Each tensor may be in host memory or on the GPU that answers: a NumPy array, or an object with `__dlpack__`.

    Args:
        keys: int64 (int32 is widened), C-contiguous. With offsets (n,); without them (B, hotness): every bag has `hotness`
            keys.
        offsets: (B + 1,) int64 or int32, C-contiguous: bag b has keys [offsets[b], offsets[b + 1]); they start at 0, never
            decrease, and end with n.
        weights: float32, C-contiguous, one per key; None: every weight is 1. Not with `max`.
        combiner: see the module's docstring.
        max_norm: above 0; None: vectors are not clipped.
        padding_key: key to skip; None: no key is skipped.
        include_last_offset: False: offsets are (B,), without the final n, the default of torch's `EmbeddingBag`.
    """

    keys: Any
    offsets: Any = None
    weights: Any = None
    _: KW_ONLY
    combiner: Literal["sum", "mean", "sqrtn", "max"] = "sum"
    max_norm: float | None = None
    padding_key: int | None = None
    include_last_offset: bool = True


@dataclass(slots=True, eq=False)
class Pooling:
    """The bags of a table's keys in a batch. *Immutable.*

    Attributes:
        count: number of bags (B).
        offsets: (B,) or (B + 1,) int64 or int32, in host memory (checked) or on the device (not checked); None: every bag has
            `hotness` keys. Keys after the last given offset belong to the last bag.
        hotness: n / B, used without offsets.
        weights: (n,) float32, in host memory or on the device; None: every weight is 1.
        max_norm: 0.0: vectors are not clipped.
        padding_key: None: no key is skipped.
    """

    count: int
    offsets: DeviceArray | None
    hotness: int
    weights: DeviceArray | None
    combiner: Combiner
    max_norm: float
    padding_key: int | None

    @property
    def arithmetic(self) -> Arithmetic:
        if self.combiner is Combiner.MAX:
            return Arithmetic.MAXIMA
        return Arithmetic.SUMS if self.weights is None and not self.max_norm else Arithmetic.WEIGHTED_SUMS


def input_arrays(name: str, given: Any, dtype: npt.DTypeLike | None = None) -> dict[str, npt.NDArray[Any]]:
    """Make the arrays of an input of a network from what a caller gives for it.

    Args:
        given: an array or nested sequences in host memory; or `Bags`, whose offsets and weights become `<name>.offsets` and
            `<name>.weights`. Their combiner is that of the network's configuration.
        dtype: of Python's numbers. Default: int64, float32 or bool.

    Raises:
        InvalidInputError: it cannot be read as an array in host memory.
    """
    if not isinstance(given, Bags):
        return {name: _input_array(name, given, dtype)}
    keys = _input_array(name, given.keys, np.int64)
    arrays = {name: keys}
    if given.offsets is not None:
        offsets = _input_array(name, given.offsets, np.int64)
        arrays[f"{name}.offsets"] = offsets if given.include_last_offset else np.append(offsets, keys.size)
    if given.weights is not None:
        arrays[f"{name}.weights"] = _input_array(name, given.weights, np.float32).reshape(-1)
    return arrays


def _input_array(name: str, values: Any, dtype: npt.DTypeLike | None) -> npt.NDArray[Any]:
    array = as_host_array(values, f"input {name!r}", "an array in host memory")
    if not hasattr(values, "dtype"):  # Python's numbers
        if dtype is None:
            array = array.astype(np.float32) if array.dtype.kind == "f" else array
        elif array.dtype.kind in "iub" or (array.dtype.kind == "f" and np.dtype(dtype).kind == "f"):
            _refuse_range(name, array, np.dtype(dtype))
            array = array.astype(dtype)
    if array.dtype == np.int32 and dtype is not None and np.dtype(dtype) == np.int64:
        array = array.astype(np.int64)
    return np.ascontiguousarray(array)


def _refuse_range(name: str, array: npt.NDArray[Any], dtype: "np.dtype[Any]") -> None:
    """Check that Python's numbers fit an integer dtype; the conversion would silently take their lowest bits."""
    if dtype.kind in "iu" and array.size and array.dtype.kind in "iu":
        least, most = int(array.min()), int(array.max())
        if not np.iinfo(dtype).min <= least <= most <= np.iinfo(dtype).max:
            got = least if least < np.iinfo(dtype).min else most
            raise InvalidInputError(f"reading input {name!r}: got {got}, which does not fit {dtype}")


def keys_of_bags(keys: Any, on_cuda: bool) -> tuple[Any, int, Sequence[int]]:
    """Adopt keys as `HPS.lookup_tables` does, and return them with their number and shape."""
    if isinstance(keys, np.ndarray) or not (type(keys) is CAPSULE or hasattr(keys, "__dlpack__")):
        array = as_host_array(keys, "keys", "integers, or as many of them for every bag")
        flat = np.require(as_host_keys(array.reshape(-1)), requirements=["ALIGNED"])
        return flat, flat.size, array.shape
    shape = getattr(keys, "shape", None)
    return *adopt_keys(keys, on_cuda), adopt(keys, label="keys").shape if shape is None else shape


def pooling_of(name: Any, bags: Bags, n: int, shape: Sequence[int], on_cuda: bool) -> Pooling:
    """Check the bags of n keys of a table, whose tensor has `shape`, and adopt their offsets and weights.

    Raises:
        InvalidDtypeError, InvalidInputError: they are not as `Bags` requires.
    """
    doing = f"looking up bags of table {name!r}"
    combiner = COMBINERS.get(bags.combiner) if isinstance(bags.combiner, str) else None
    if combiner is None:
        raise InvalidInputError(f"{doing}: got combiner {bags.combiner!r}, expected one of {list(COMBINERS)}")
    if combiner is Combiner.MAX and bags.weights is not None:
        raise InvalidInputError(f"{doing}: got weights with combiner 'max', expected none; leave them out, or use 'sum'")
    max_norm, padding_key = _checked(doing, bags)
    weights, size = _adopted(doing, bags.weights, on_cuda, "weights", (np.float32,))
    if weights is not None and size != n:
        raise InvalidInputError(f"{doing}: got {size} weights for {n} keys, expected as many")
    if bags.offsets is None:
        if len(shape) != 2:
            raise InvalidInputError(f"{doing}: got keys of shape {tuple(shape)} without offsets, expected (bags, hotness)")
        return Pooling(int(shape[0]), None, int(shape[1]), weights, combiner, max_norm, padding_key)
    offsets, size = _adopted(doing, bags.offsets, on_cuda, "offsets", (np.int64, np.int32))
    count = size - bool(bags.include_last_offset)
    if count < 0 or (count == 0 and n):
        raise InvalidInputError(f"{doing}: got {size} offsets for {n} keys, expected one for each bag, and n at the end")
    if isinstance(offsets, np.ndarray):
        _check_offsets(doing, offsets, n, bags.include_last_offset)
    return Pooling(count, offsets, 0, weights, combiner, max_norm, padding_key)


def _checked(doing: str, bags: Bags) -> tuple[float, int | None]:
    """Check max_norm (0.0: none) and the padding key of bags, and return both."""
    try:
        max_norm = 0.0 if bags.max_norm is None else float(bags.max_norm)
    except (TypeError, ValueError):
        max_norm = math.nan
    if bags.max_norm is not None and not max_norm > 0.0:
        raise InvalidInputError(f"{doing}: got max_norm {bags.max_norm!r}, expected a number above 0, or None")
    if bags.padding_key is None:
        return max_norm, None
    try:
        return max_norm, int(np.int64(operator.index(bags.padding_key)))
    except (OverflowError, TypeError):
        raise InvalidInputError(f"{doing}: got padding_key {bags.padding_key!r}, expected an int64, or None") from None


def _check_offsets(doing: str, offsets: np.ndarray, n: int, include_last: bool) -> None:
    last = int(offsets[-1]) if offsets.size else 0
    if offsets.size and (offsets[0] != 0 or np.any(offsets[1:] < offsets[:-1]) or (last != n if include_last else last > n)):
        given = offsets.tolist() if offsets.size <= 8 else f"{offsets[:4].tolist()}...{offsets[-2:].tolist()}"
        raise InvalidInputError(
            f"{doing}: got offsets {given} for {n} keys, expected them to begin with 0, never to fall, and to end with "
            f"{n if include_last else f'at most {n}'}"
        )


def _adopted(doing: str, tensor: Any, on_cuda: bool, label: str, dtypes: tuple[type, ...]) -> tuple[Any, int]:
    """Adopt offsets or weights as a contiguous host array, or as the tensor that a CUDA cache reads; also return the size."""
    if tensor is None:
        return None, 0
    if on_cuda and (size := size_on_device(tensor)) >= 0:
        return tensor, size
    expected = _EXPECTED[label]
    if isinstance(tensor, np.ndarray) or not (type(tensor) is CAPSULE or hasattr(tensor, "__dlpack__")):
        array = as_host_array(tensor, label, expected)
        if not isinstance(tensor, np.ndarray) and (not array.size or array.dtype.kind in ("iuf" if label == "weights" else "")):
            array = array.astype(dtypes[0])  # Python's numbers
    else:
        view = adopt(tensor, label=label)
        if not view.on_host:
            if on_cuda:
                return view, view.size
            raise InvalidInputError(f"{doing}: got {label} on {view.device_name}, expected host memory; copy them to the CPU")
        if not view.contiguous:
            raise InvalidInputError(f"{doing}: got {label} with strides {view.strides}, expected them C-contiguous")
        if view.dtype_name not in expected.split(" or "):
            raise InvalidDtypeError(f"{doing}: got {label} of dtype {view.dtype_name}, expected {expected}")
        array = view.host_array((view.size,))
    if array.dtype not in dtypes:
        raise InvalidDtypeError(f"{doing}: got {label} of dtype {array.dtype}, expected {expected}")
    array = np.require(array.reshape(-1), requirements=["C_CONTIGUOUS", "ALIGNED"])
    return array, array.size
