"""The segments of a lookup: the keys of one table and where their vectors go, made from tensors as callers pass them.

Every tensor is adopted once. What is in host memory becomes a NumPy array over the same memory. What is in CUDA memory stays
as it is, where the lookup runs on a CUDA cache: that cache finds and checks it itself, ten times as fast for torch's and CuPy's
tensors as DLPack would.
"""

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hps.errors import InvalidDtypeError, InvalidInputError
from hps.tensors.dlpack import adopt, as_keys, as_output, view_as_keys, view_as_output
from hps.types import BoolArray, DeviceArray, FloatArray, KeyArray, TableSpec

if TYPE_CHECKING:
    from hps.tensors.bags import Pooling

CUDA_ARRAYS: set[type] = set()
"""Types of arrays that are in CUDA memory, always, and have a `size`. The CUDA cache, which reads them itself, adds CuPy's."""


class Stretch:
    """Consecutive elements of a tensor that several segments share; a CUDA cache reads the tensor once for all of them.

    Attributes:
        tensor: keys or output of a whole lookup, in CUDA memory.
        start, size: the stretch, in elements.
        total: elements that the tensor must have: exactly so many keys, at least so many of an output.
    """

    __slots__ = ("size", "start", "tensor", "total")

    def __init__(self, tensor: DeviceArray, start: int, size: int, total: int) -> None:
        self.tensor = tensor
        self.start = start
        self.size = size
        self.total = total


class Segment:
    """The keys of one table within a lookup, and where their vectors go.

    Attributes:
        table: index of the table within the model. A lookup has at most one segment per table.
        keys: (n,) int64, C-contiguous; read only. n may be 0.
        out: (n, dim) float32, C-contiguous; every row has been written when the lookup returns.
        found: (n,) bool or None; set to True for keys that a tier answered, False for those that got the default.
        n: number of keys; given where `keys` is a tensor of any shape in CUDA memory.
        pooling: the bags that the keys are pooled in; None: every key gets a row. Of the segments of a lookup, all have bags or
            none has. With B bags `out` is (B, dim), in host memory with rows of any stride, and there is no `found`.
    """

    __slots__ = ("found", "keys", "n", "out", "pooling", "table")

    def __init__(
        self,
        table: int,
        keys: DeviceArray,  # (n,)
        out: DeviceArray,  # (n, dim)
        found: DeviceArray | None = None,  # (n,)
        n: int = -1,
        pooling: "Pooling | None" = None,
    ) -> None:
        self.table = table
        self.keys = keys
        self.out = out
        self.found = found
        self.n = len(keys) if n < 0 else n
        self.pooling = pooling


def as_host_keys(keys: Any) -> KeyArray:
    """Bring a sequence or array of integers to (n,) int64, C-contiguous, in host memory; copies only where necessary.

    uint64 is taken bit for bit, as HugeCTR's `lookup` does.

    Raises:
        InvalidDtypeError: they are not integers.
        InvalidInputError: they are not one-dimensional, or do not fit 64 bits.
    """
    array = as_host_array(keys, "keys", "a sequence of integers")
    if array.ndim != 1:
        raise InvalidInputError(f"reading keys: got shape {array.shape}, expected one dimension; flatten them")
    if array.size == 0 and array.dtype == np.float64:  # numpy's dtype of []
        return np.empty(0, np.int64)
    if array.dtype.kind not in "iu":
        raise InvalidDtypeError(f"reading keys: got dtype {array.dtype}, expected int64 (or another integer type)")
    if array.dtype == np.uint64:
        return np.ascontiguousarray(array).view(np.int64)
    return np.ascontiguousarray(array, np.int64)


def as_host_vectors(vectors: Any) -> FloatArray:
    """Bring an array, or nested sequences, of numbers to float32, C-contiguous, in host memory; copies only where necessary.

    Raises:
        InvalidDtypeError: they are not real numbers.
        InvalidInputError: they are ragged, or cannot be read as an array in host memory (bfloat16, tensors with gradients).
    """
    array = as_host_array(vectors, "vectors", "an (n, dim) array of float32 in host memory")
    if array.dtype.kind not in "fiu":
        raise InvalidDtypeError(f"reading vectors: got dtype {array.dtype}, expected float32 (or other real numbers)")
    return np.ascontiguousarray(array, np.float32)


def as_host_array(values: Any, what: str, expected: str) -> npt.NDArray[Any]:
    """Read a sequence, or nested ones, or an array.

    Raises:
        InvalidInputError: they are ragged, or no array in host memory.
    """
    try:
        return np.asarray(values)
    except (ValueError, TypeError, OverflowError, RuntimeError) as error:
        raise InvalidInputError(f"reading {what}: got {type(values).__name__} ({error}), expected {expected}") from error


def _as_counts(counts: Iterable[Any]) -> list[int]:
    """Bring the counts of concatenated tables to Python's integers, whose sums cannot wrap.

    Raises:
        InvalidInputError: they are not integers.
    """
    try:
        return [operator.index(count) for count in counts]
    except TypeError as error:
        raise InvalidInputError(
            f"looking up concatenated tables: got counts {counts!r}, expected integers ({error})"
        ) from error


def tensor_segment(table: int, dim: int, keys: Any, out: Any, *, on_cuda: bool, with_found: bool) -> Segment:
    """The segment of one table whose keys and output are tensors.

    Args:
        on_cuda: the lookup runs on a CUDA cache; without it, both tensors must be in host memory.
        with_found: give the segment a found-mask, in host memory.

    Raises:
        InvalidDtypeError, InvalidInputError: the tensors cannot be keys or an output of `dim` elements per key.
    """
    flat, n = adopt_keys(keys, on_cuda)
    return Segment(table, flat, adopt_output(out, n, dim, on_cuda), np.empty(n, np.bool_) if with_found else None, n)


def named_segments(
    tables: Mapping[Any, Any],
    out: Mapping[Any, Any] | None,
    table_index: Callable[[Any], int],
    indices: Mapping[Any, int],
    specs: Sequence[TableSpec],
    *,
    on_cuda: bool,
    with_found: bool,
) -> list[Segment]:
    """One segment for each table that a caller names: keys as tensors or sequences, outputs as tensors or new host arrays.

    Args:
        table_index: finds or refuses what `indices` does not hold.
        indices: of the tables, by name and by id.

    Raises:
        UnknownTableError: as `table_index` does.
        InvalidDtypeError, InvalidInputError: as `tensor_segment`; also when `out` lacks a table, or a table is named twice.
    """
    segments = []
    by_id = False
    for name, keys in tables.items():
        index = indices.get(name) if type(name) is str else None
        if index is None:
            index, by_id = table_index(name), True
        if on_cuda and type(keys) in CUDA_ARRAYS:  # here and below without a call: this runs once per table
            n = keys.size
        elif on_cuda and getattr(keys, "is_cuda", False):
            n = keys.numel()
        elif hasattr(keys, "__dlpack__") and not isinstance(keys, np.ndarray):
            keys, n = adopt_keys(keys, on_cuda)
        else:
            keys = as_host_keys(keys)
            n = keys.size
        if out is None:
            place = np.empty((n, specs[index].dim), np.float32)
        elif name not in out:
            raise InvalidInputError(f"looking up tables: out has no entry for {name!r}; name an output for every table")
        else:
            place = out[name]
            if not on_cuda or not (type(place) in CUDA_ARRAYS or getattr(place, "is_cuda", False)):
                place = adopt_output(place, n, specs[index].dim, on_cuda)
        segments.append(Segment(index, keys, place, np.empty(n, np.bool_) if with_found else None, n))
    if by_id:
        refuse_repeated_tables(segments, specs)
    return segments


def concatenated_segments(
    keys: Any,
    counts: Sequence[int],
    out: Any,
    specs: Sequence[TableSpec],
    *,
    on_cuda: bool,
    with_found: bool,
) -> tuple[list[Segment], BoolArray | None]:
    """One segment for each table of a model whose keys, outputs and masks follow each other in one tensor each; and the masks.

    Raises:
        InvalidDtypeError, InvalidInputError: as `tensor_segment`; also when there is not one count for each table, or the
            counts do not add up to the keys.
    """
    counts = _as_counts(counts)
    if len(counts) != len(specs) or min(counts, default=0) < 0:
        raise InvalidInputError(
            f"looking up concatenated tables: got counts {list(counts)[:8]}, expected {len(specs)} of them, one per table, "
            "none negative"
        )
    flat, n = adopt_keys(keys, on_cuda)
    total, size = sum(counts), sum([count * spec.dim for count, spec in zip(counts, specs, strict=True)])
    if n != total:
        raise InvalidInputError(f"looking up concatenated tables: got {n} keys, expected {total}, the sum of the counts")
    found = np.empty(total, np.bool_) if with_found else None
    place = adopt_output(out, size, 1, on_cuda)
    keys_on_host, out_on_host = isinstance(flat, np.ndarray), isinstance(place, np.ndarray)
    row = element = 0
    segments = []
    for index, count in enumerate(counts):
        length = count * specs[index].dim
        segments.append(
            Segment(
                index,
                flat[row : row + count] if keys_on_host else Stretch(flat, row, count, total),
                place[element : element + length].reshape(count, specs[index].dim)
                if out_on_host
                else Stretch(place, element, length, size),
                None if found is None else found[row : row + count],
                count,
            )
        )
        row += count
        element += length
    return segments, found


def refuse_repeated_tables(segments: Sequence[Segment], specs: Sequence[TableSpec]) -> None:
    """Check that no table has two segments.

    Raises:
        InvalidInputError: one has.
    """
    if len({segment.table for segment in segments}) != len(segments):
        raise InvalidInputError(f"looking up model {specs[0].model_name!r}: a table is named twice; name each once")


def check_segment(table: TableSpec, segment: Segment, n: int) -> None:
    """Check those arrays of a segment of n keys that are in host memory; a query takes keys that are not aligned.

    Raises:
        InvalidDtypeError, InvalidInputError: a kernel would misread one of them.
    """
    keys, out, found = segment.keys, segment.out, segment.found
    if isinstance(keys, np.ndarray):
        _check_array("querying", table, "keys", keys, np.int64, (n,), aligned=False)
    if isinstance(out, np.ndarray):
        rows, of_rows = (n, out) if segment.pooling is None else (segment.pooling.count, out[:1])  # which may be columns
        _check_array("querying", table, "out", out, np.float32, (rows, table.dim), writable=True, laid_out=of_rows)
    if isinstance(found, np.ndarray):
        _check_array("querying", table, "found", found, np.bool_, (n,), writable=True)


def check_rows(table: TableSpec, keys: np.ndarray, vectors: np.ndarray | None, doing: str) -> None:
    """Check the host arrays of a modification: keys (n,) int64 and, unless they are to be erased, vectors (n, dim) float32.

    Raises:
        InvalidDtypeError, InvalidInputError: a kernel would misread one of them.
    """
    _check_array(doing, table, "keys", keys, np.int64, (keys.size,))
    if vectors is not None:
        _check_array(doing, table, "vectors", vectors, np.float32, (keys.size, table.dim))


def _check_array(
    doing: str,
    table: TableSpec,
    name: str,
    array: np.ndarray,
    dtype: npt.DTypeLike,
    shape: tuple[int, ...],
    *,
    aligned: bool = True,
    writable: bool = False,
    laid_out: np.ndarray | None = None,
) -> None:
    flags = array.flags
    contiguous = (array if laid_out is None else laid_out).flags.c_contiguous
    if array.dtype != dtype:
        raise InvalidDtypeError(
            f"{doing} the cached table {table.tag}: {name}: got dtype {array.dtype}, expected {np.dtype(dtype)}"
        )
    if array.shape != shape or not contiguous or (aligned and not flags.aligned) or (writable and not flags.writeable):
        state = ("" if flags.aligned else ", not aligned") + ("" if flags.writeable else ", read-only")
        raise InvalidInputError(
            f"{doing} the cached table {table.tag}: {name}: got shape {array.shape}, strides {array.strides}{state}; expected "
            f"shape {shape}, C-contiguous{', aligned' if aligned else ''}{', writable' if writable else ''}; pass a copy"
        )


def adopt_keys(keys: Any, on_cuda: bool) -> tuple[Any, int]:
    """Adopt keys: (n,) int64 in host memory, or the tensor that a CUDA cache reads itself; and n."""
    if on_cuda and type(keys) is not np.ndarray:
        if type(keys) in CUDA_ARRAYS:
            return keys, keys.size
        if getattr(keys, "is_cuda", False):
            return keys, keys.numel()
        view = adopt(keys, what="keys")
        if not view.on_host:
            return view, view.size
        flat = view_as_keys(view)
    else:
        flat = as_keys(keys)
    return flat, flat.size


def adopt_output(out: Any, rows: int, dim: int, on_cuda: bool) -> Any:
    """Adopt an output: (rows, dim) float32 in host memory, or the tensor that a CUDA cache writes itself."""
    if on_cuda and type(out) is not np.ndarray:
        if type(out) in CUDA_ARRAYS or getattr(out, "is_cuda", False):
            return out
        view = adopt(out, what="output")
        return view_as_output(view, rows, dim) if view.on_host else view
    return as_output(out, rows, dim)
