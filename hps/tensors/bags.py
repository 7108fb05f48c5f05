"""Bags of keys: each bag is answered with one vector, which is combined from those of its keys.

With v_i the vectors of a bag's keys, clipped to `max_norm` first, and w_i their weights, or 1:

    sum      sum of w_i v_i                               torch.nn.functional.embedding_bag(mode="sum")
    mean     sum of w_i v_i / sum of w_i                  mode="mean"; with weights as TensorFlow's embedding_lookup_sparse
    sqrtn    sum of w_i v_i / sqrt(sum of w_i w_i)        embedding_lookup_sparse(combiner="sqrtn")

A vector is clipped as torch does: where its L2 norm is above `max_norm`, it is multiplied by max_norm / (norm + 1e-7). Keys
that equal the padding key are left out, and are not looked up. A bag without keys, or whose divisor is 0, is zeros. Keys that
no tier has count with the table's default vector, as in a lookup of rows.
"""

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import Any, Literal

import numpy as np

from hps.errors import InvalidDtypeError, InvalidInputError
from hps.tensors.dlpack import CAPSULE, adopt
from hps.tensors.segments import (
    CUDA_ARRAYS,
    Segment,
    adopt_keys,
    adopt_output,
    as_host_array,
    as_host_keys,
    refuse_repeated_tables,
)
from hps.types import DeviceArray, TableSpec

_EXPECTED = {"offsets": "int64 or int32", "weights": "float32"}


class Combiner(IntEnum):
    """How the vectors of a bag become one; `cuda/pool.cu` knows these numbers."""

    SUM = 0
    MEAN = 1
    SQRTN = 2


_COMBINERS = {combiner.name.lower(): combiner for combiner in Combiner}


class Bags:
    """Keys of one table in bags, as `HPS.lookup_pooled` takes them. *Immutable*; the tensors stay the caller's.

    Any tensor may be in host memory or on the GPU that answers: an array of NumPy's, or an object with `__dlpack__`.

    Args:
        keys: int64 (int32 is widened), C-contiguous. With offsets (n,); without them (B, hotness): as many keys in every bag.
        offsets: (B + 1,) int64 or int32, C-contiguous: bag b has keys [offsets[b], offsets[b + 1]); they begin with 0, never
            fall, and end with n.
        weights: float32, C-contiguous, as many as keys; None: every key counts 1.
        combiner: see this module's docstring.
        max_norm: above 0; None: vectors are not clipped.
        padding_key: is left out wherever it stands; None: no key is.
        include_last_offset: False: offsets are (B,), without the n at their end, as torch's `EmbeddingBag` has them by default.
    """

    __slots__ = ("combiner", "include_last_offset", "keys", "max_norm", "offsets", "padding_key", "weights")

    def __init__(
        self,
        keys: Any,
        offsets: Any = None,
        weights: Any = None,
        *,
        combiner: Literal["sum", "mean", "sqrtn"] = "sum",
        max_norm: float | None = None,
        padding_key: int | None = None,
        include_last_offset: bool = True,
    ) -> None:
        self.keys = keys
        self.offsets = offsets
        self.weights = weights
        self.combiner = combiner
        self.max_norm = max_norm
        self.padding_key = padding_key
        self.include_last_offset = include_last_offset


class Pooling:
    """The bags of a segment. *Immutable.*

    Attributes:
        count: how many bags (B).
        offsets: (B,) or (B + 1,) int64 or int32, in host memory (then checked) or on the device (then not); None: every bag has
            `hotness` keys. What follows the last given offset belongs to the last bag.
        hotness: n / B where there are no offsets.
        weights: (n,) float32, in host memory or on the device; None: every key counts 1.
        combiner: how the vectors of a bag become one.
        max_norm: 0.0: vectors are not clipped.
        padding_key: None: no key is left out.
    """

    __slots__ = ("combiner", "count", "hotness", "max_norm", "offsets", "padding_key", "weights")

    def __init__(
        self,
        count: int,
        offsets: DeviceArray | None,
        hotness: int,
        weights: DeviceArray | None,
        combiner: Combiner,
        max_norm: float,
        padding_key: int | None,
    ) -> None:
        self.count = count
        self.offsets = offsets
        self.hotness = hotness
        self.weights = weights
        self.combiner = combiner
        self.max_norm = max_norm
        self.padding_key = padding_key


class Columns:
    """Consecutive columns of a (rows, width) float32 tensor that several segments share, in CUDA memory.

    Attributes:
        tensor: C-contiguous; a CUDA cache reads it once for all of them.
        start: the first column.
        rows, width: what the tensor must have, at least rows x width elements.
    """

    __slots__ = ("rows", "start", "tensor", "width")

    def __init__(self, tensor: DeviceArray, start: int, rows: int, width: int) -> None:
        self.tensor = tensor
        self.start = start
        self.rows = rows
        self.width = width


def pooled_segments(
    tables: Mapping[Any, Bags],
    out: Any,
    table_index: Callable[[Any], int],
    specs: Sequence[TableSpec],
    *,
    on_cuda: bool,
) -> list[Segment]:
    """One segment with `pooling` for each table that a caller names.

    Args:
        out: by table, (B, dim) float32 each; or one tensor (B, sum of dims), whose columns are those of the tables in their
            order; None: new host arrays.
        table_index: finds or refuses a table.

    Raises:
        UnknownTableError: as `table_index` does.
        InvalidDtypeError, InvalidInputError: the tensors cannot be what they should; a table is named twice; with one output
            for all, tables have different numbers of bags.
    """
    found = [(name, table_index(name), bags) for name, bags in tables.items()]
    width = sum([specs[index].dim for _name, index, _bags in found])
    shared = None
    column = 0
    segments = []
    for name, index, bags in found:
        dim = specs[index].dim
        if not isinstance(bags, Bags):
            raise InvalidInputError(f"looking up bags of table {name!r}: got {type(bags).__name__}, expected hps.Bags")
        keys, n, shape = _keys_of(bags.keys, on_cuda)
        pooling = pooling_of(name, bags, n, shape, on_cuda)
        if out is None:
            place: Any = np.empty((pooling.count, dim), np.float32)
        elif isinstance(out, Mapping):
            if name not in out:
                raise InvalidInputError(f"looking up bags: out has no entry for {name!r}; name an output for every table")
            place = adopt_output(out[name], pooling.count, dim, on_cuda)
        else:
            if shared is None:
                rows = pooling.count
                shared = adopt_output(out, rows, width, on_cuda)
            if pooling.count != rows:
                raise InvalidInputError(
                    f"looking up bags: got {pooling.count} bags of table {name!r} and {rows} of {found[0][0]!r}, expected as "
                    "many of each table, since one tensor takes the vectors of all; or name an output for every table"
                )
            on_host = isinstance(shared, np.ndarray)
            place = shared[:, column : column + dim] if on_host else Columns(shared, column, rows, width)
            column += dim
        segments.append(Segment(index, keys, place, None, n, pooling))
    refuse_repeated_tables(segments, specs)
    return segments


def _keys_of(keys: Any, on_cuda: bool) -> tuple[Any, int, Sequence[int]]:
    """Adopt keys as `HPS.lookup_tables` does: tensors, sequences, arrays of any integers; and their number and shape."""
    if isinstance(keys, np.ndarray) or not (type(keys) is CAPSULE or hasattr(keys, "__dlpack__")):
        array = as_host_array(keys, "keys", "integers, or as many of them for every bag")
        flat = np.require(as_host_keys(array.reshape(-1)), requirements=["ALIGNED"])
        return flat, flat.size, array.shape
    shape = getattr(keys, "shape", None)
    return *adopt_keys(keys, on_cuda), adopt(keys, what="keys").shape if shape is None else shape


def pooling_of(name: Any, bags: Bags, n: int, shape: Sequence[int], on_cuda: bool) -> Pooling:
    """Check the bags of n keys of a table, which have a shape, and adopt their offsets and weights.

    Raises:
        InvalidDtypeError, InvalidInputError: they are not as `Bags` says.
    """
    doing = f"looking up bags of table {name!r}"
    combiner = _COMBINERS.get(bags.combiner) if isinstance(bags.combiner, str) else None
    if combiner is None:
        raise InvalidInputError(f"{doing}: got combiner {bags.combiner!r}, expected 'sum', 'mean' or 'sqrtn'")
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
    """max_norm, 0.0 for none, and the padding key of bags."""
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


def _adopted(doing: str, tensor: Any, on_cuda: bool, what: str, dtypes: tuple[type, ...]) -> tuple[Any, int]:
    """Adopt offsets or weights: a contiguous host array, or the tensor that a CUDA cache reads itself; and its size."""
    if tensor is None:
        return None, 0
    if on_cuda and type(tensor) in CUDA_ARRAYS:
        return tensor, tensor.size
    if on_cuda and getattr(tensor, "is_cuda", False):
        return tensor, tensor.numel()
    expected = _EXPECTED[what]
    if isinstance(tensor, np.ndarray) or not (type(tensor) is CAPSULE or hasattr(tensor, "__dlpack__")):
        array = as_host_array(tensor, what, expected)
        if not isinstance(tensor, np.ndarray) and (not array.size or array.dtype.kind in ("iuf" if what == "weights" else "")):
            array = array.astype(dtypes[0])  # numbers of Python's
    else:
        view = adopt(tensor, what=what)
        if not view.on_host:
            if on_cuda:
                return view, view.size
            raise InvalidInputError(f"{doing}: got {what} on {view.device_name}, expected host memory; copy them to the CPU")
        if not view.contiguous:
            raise InvalidInputError(f"{doing}: got {what} with strides {view.strides}, expected them C-contiguous")
        if view.dtype_name not in expected.split(" or "):
            raise InvalidDtypeError(f"{doing}: got {what} of dtype {view.dtype_name}, expected {expected}")
        array = view.host_array((view.size,))
    if array.dtype not in dtypes:
        raise InvalidDtypeError(f"{doing}: got {what} of dtype {array.dtype}, expected {expected}")
    array = np.require(array.reshape(-1), requirements=["C_CONTIGUOUS", "ALIGNED"])
    return array, array.size
