"""The segments of a lookup: keys and outputs of one table each, built from callers' tensors.

Every tensor is adopted once. A tensor in host memory becomes a NumPy array over the same memory. A tensor in CUDA memory is
passed on unchanged to a CUDA cache, which inspects and checks it itself: for torch's and CuPy's tensors ten times as fast as
DLPack.
"""

import operator
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hps.errors import InvalidDtypeError, InvalidInputError
from hps.tensors.array_checks import as_keys, as_output, check_array, view_as_keys, view_as_output
from hps.tensors.dlpack import CAPSULE, TensorView, adopt
from hps.types import BoolArray, DeviceArray, FloatArray, KeyArray, TableSpec

if TYPE_CHECKING:
    from hps.tensors.bags import Pooling

_INT64, _FLOAT32 = np.dtype(np.int64), np.dtype(np.float32)
_MOST_INDICES = 1 << 12  # kept in a dict


@dataclass(slots=True, eq=False)
class Stretch:
    """Consecutive elements of a tensor that several segments share; a CUDA cache inspects the tensor once for all of them.

    Attributes:
        tensor: keys or output of all tables of a lookup, in CUDA memory.
        start, size: position and length, in elements.
        total: expected size of the tensor: the exact number of keys, the minimum number of elements of an output.
    """

    tensor: DeviceArray
    start: int
    size: int
    total: int


class Segment:
    """The keys of one table within a lookup, and the output for their vectors.

    Attributes:
        table: index of the table within the model. A lookup has at most one segment per table.
        keys: (n,) int64, C-contiguous; read only. n may be 0.
        out: (n, dim) float32, C-contiguous; every row has been written when the lookup returns.
        found: (n,) bool or None; set to True for keys that a tier answered, False for those that got the default.
        n: number of keys; given if `keys` is a tensor of any shape in CUDA memory.
        narrow: an output of 16 bits in host memory, that of `out` (float16, or uint16 for bfloat16); else None.
        pooling: bags of the keys; None: every key gets a row. Either all segments of a lookup have bags or none has. With B
            bags `out` is (B, dim), in host memory with rows of any stride, and there is no `found`.
    """

    __slots__ = ("found", "keys", "n", "narrow", "out", "pooling", "table")

    narrow: np.ndarray | None

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
        self.narrow = None


class ConcatenatedSegments(Sequence[Segment]):
    """The segments of all tables, with keys and outputs each in one tensor in CUDA memory. *Immutable.*

    A CUDA cache needs no segment of them; they are made for who asks.

    Attributes:
        keys, out: tensors of all tables, in their order.
        counts, dims: of keys and floats per key, by table.
        floats: total of the outputs.
    """

    __slots__ = ("_made", "counts", "dims", "floats", "keys", "out")

    def __init__(self, keys: DeviceArray, out: DeviceArray, counts: Sequence[int], dims: Sequence[int], floats: int) -> None:
        self.keys = keys
        self.out = out
        self.counts = counts
        self.dims = dims
        self.floats = floats
        self._made: list[Segment] | None = None

    def __len__(self) -> int:
        return len(self.counts)

    def __getitem__(self, place: Any) -> Any:
        if self._made is None:
            self._made = _parts(self.keys, self.out, self.counts, self.dims, None)
        return self._made[place]

    def __iter__(self) -> Iterator[Segment]:
        return iter(self[:])


class SeparateSegments(Sequence[Segment]):
    """The segments of tables whose keys and outputs are tensors of torch, or of CuPy. *Immutable.*

    A CUDA cache needs no segment of those in its memory; they are made for who asks.

    Attributes:
        tables, sizes: index of the table and number of keys, by segment.
        keys, outs: tensors, by segment.
        of_torch: whether they are torch's.
    """

    __slots__ = ("_made", "_specs", "keys", "of_torch", "outs", "sizes", "tables")

    def __init__(
        self,
        tables: Sequence[int],
        sizes: Sequence[int],
        keys: Sequence[DeviceArray],
        outs: Sequence[DeviceArray],
        specs: Sequence[TableSpec],
        of_torch: bool,
    ) -> None:
        self._specs = specs
        self.tables = tables
        self.sizes = sizes
        self.keys = keys
        self.outs = outs
        self.of_torch = of_torch
        self._made: list[Segment] | None = None

    def __len__(self) -> int:
        return len(self.tables)

    def __getitem__(self, place: Any) -> Any:
        if self._made is None:
            self._made = [
                tensor_segment(table, self._specs[table].dim, keys, out, on_cuda=True, with_found=False)
                for table, keys, out in zip(self.tables, self.keys, self.outs, strict=True)
            ]
        return self._made[place]

    def __iter__(self) -> Iterator[Segment]:
        return iter(self[:])


MADE_LATE = (ConcatenatedSegments, SeparateSegments)
"""Kinds of segments of rows that are made only if asked for."""


class NarrowSegments(list[Segment]):
    """Segments of which some have an output of 16 bits in host memory; `narrow` fills those after the lookup."""


class FixedSegments(list[Segment]):
    """The segments of lookups that repeat the same tensors on one session. *One lookup at a time.*

    Attributes:
        asked: index of the table and number of keys of each, checked.
        placed: where a CUDA cache found the tensors, which it keeps here.
    """

    __slots__ = ("asked", "placed")

    def __init__(self, segments: Sequence[Segment], asked: Sequence[tuple[int, int]]) -> None:
        super().__init__(segments)
        self.asked = asked
        self.placed: Any = None


def as_host_keys(keys: Any) -> KeyArray:
    """Convert a sequence or array of integers to (n,) int64, C-contiguous, in host memory; copy only if necessary.

    uint64 is taken bit for bit, as HugeCTR's `lookup` does.

    Raises:
        InvalidDtypeError: they are not integers.
        InvalidInputError: they are not one-dimensional, or do not fit 64 bits.
    """
    if type(keys) is np.ndarray and keys.dtype == _INT64 and keys.ndim == 1 and keys.flags.c_contiguous:
        return keys
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
    """Convert an array or nested sequences of numbers to float32, C-contiguous, in host memory; copy only if necessary.

    Raises:
        InvalidDtypeError: they are not real numbers.
        InvalidInputError: they are ragged, or cannot be read as an array in host memory (bfloat16, tensors with gradients).
    """
    array = as_host_array(vectors, "vectors", "an (n, dim) array of float32 in host memory")
    if array.dtype.kind not in "fiu":
        raise InvalidDtypeError(f"reading vectors: got dtype {array.dtype}, expected float32 (or other real numbers)")
    return np.ascontiguousarray(array, np.float32)


def as_host_array(values: Any, what: str, expected: str) -> npt.NDArray[Any]:
    """Read an array or nested sequences as an array in host memory.

    Raises:
        InvalidInputError: they are ragged, or not in host memory.
    """
    try:
        return np.asarray(values)
    except (ValueError, TypeError, OverflowError, RuntimeError) as error:
        raise InvalidInputError(f"reading {what}: got {type(values).__name__} ({error}), expected {expected}") from error


def tensor_segment(table: int, dim: int, keys: Any, out: Any, *, on_cuda: bool, with_found: bool) -> Segment:
    """Build the segment of one table from tensors for keys and output.

    Args:
        on_cuda: the lookup runs on a CUDA cache; otherwise both tensors must be in host memory.
        with_found: add a found-mask in host memory.

    Raises:
        InvalidDtypeError, InvalidInputError: the tensors cannot be keys or an output of `dim` elements per key.
    """
    if on_cuda and getattr(keys, "is_cuda", False) and getattr(out, "is_cuda", False):  # what the functions below would find
        flat, n, place = keys, keys.numel(), out
    elif on_cuda and type(keys) is type(out) is getattr(sys.modules.get("cupy"), "ndarray", None):
        flat, n, place = keys, keys.size, out
    else:
        flat, n = adopt_keys(keys, on_cuda)
        place = adopt_output(out, n, dim, on_cuda=on_cuda, narrow=True)
        if type(place) is np.ndarray and place.dtype != _FLOAT32:
            return _narrowed(Segment(table, flat, place, np.empty(n, np.bool_) if with_found else None, n))
    return Segment(table, flat, place, np.empty(n, np.bool_) if with_found else None, n)


def named_segments(
    tables: Mapping[Any, Any],
    out: Mapping[Any, Any] | None,
    table_index: Callable[[Any], int],
    indices: dict[Any, Any],
    specs: Sequence[TableSpec],
    *,
    on_cuda: bool,
    with_found: bool,
) -> Sequence[Segment]:
    """Build one segment for each table named by the caller.

    Keys are tensors or sequences; outputs are tensors or new host arrays.

    Args:
        table_index: finds a table that `indices` lacks, or raises.
        indices: table indices by name and by id; those of tuples of names are kept in it.

    Raises:
        UnknownTableError: raised by `table_index`.
        InvalidDtypeError, InvalidInputError: as for `tensor_segment`; also if `out` lacks a table, or a table is named twice.
    """
    if on_cuda and out is not None and not with_found:
        separate = _separate_segments(tables, out, table_index, indices, specs)
        if separate is not None:
            return separate
    segments, narrows = [], False
    for name, keys in tables.items():
        index = indices.get(name) if type(name) is str else None
        if index is None:
            index = table_index(name)
        speaks_dlpack = (hasattr(keys, "__dlpack__") and not isinstance(keys, np.ndarray)) or type(keys) is CAPSULE
        if speaks_dlpack or (on_cuda and size_on_device(keys) >= 0):
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
            dim = specs[index].dim
            if type(place) is np.ndarray:
                place = as_output(place, n, dim, narrow=True)
            else:
                place = adopt_output(place, n, dim, on_cuda=on_cuda, narrow=True)
        segment = Segment(index, keys, place, np.empty(n, np.bool_) if with_found else None, n)
        if type(place) is np.ndarray and place.dtype != _FLOAT32:
            segment, narrows = _narrowed(segment), True
        segments.append(segment)
    refuse_repeated_tables([segment.table for segment in segments], specs)
    return NarrowSegments(segments) if narrows else segments


def _separate_segments(
    tables: Mapping[Any, Any],
    out: Mapping[Any, Any],
    table_index: Callable[[Any], int],
    indices: dict[Any, Any],
    specs: Sequence[TableSpec],
) -> SeparateSegments | None:
    """Return the segments of tensors that are all torch's or all CuPy's, the fastest way; None for others."""
    keys, outs = list(tables.values()), list(map(out.get, tables))
    kinds = {*map(type, keys), *map(type, outs)}
    if len(kinds) != 1:
        return None
    [kind] = kinds
    of_torch = kind is getattr(sys.modules.get("torch"), "Tensor", None)
    if not of_torch and kind is not _cupy_array():
        return None
    names = tuple(tables)
    found: tuple[int, ...] | None = indices.get(names)
    if found is None:
        found = tuple(map(table_index, names))
        refuse_repeated_tables(found, specs)
        if {*map(type, names)} == {str} and len(indices) < _MOST_INDICES:
            indices[names] = found
    sizes = list(map(kind.numel, keys)) if of_torch else [one.size for one in keys]  # type: ignore[attr-defined]
    return SeparateSegments(found, sizes, keys, outs, specs, of_torch)


def fixed_segments(
    tables: Mapping[Any, Any],
    out: Mapping[Any, Any],
    found: Mapping[Any, Any],
    table_index: Callable[[Any], int],
    specs: Sequence[TableSpec],
    *,
    on_cuda: bool,
) -> list[Segment]:
    """Build one segment for each table from tensors that lookups read and write again and again.

    Args:
        found: masks by table, of the caller's own; or empty.

    Raises:
        UnknownTableError: raised by `table_index`.
        InvalidDtypeError, InvalidInputError: as for `named_segments`; also for keys that would have to be copied, and for
            tensors on a device whose framework does not tell its current stream.
    """
    segments = []
    for name, given in tables.items():
        index = table_index(name)
        keys, n = adopt_keys(given, on_cuda)
        if name not in out:
            raise InvalidInputError(f"preparing a lookup: out has no entry for {name!r}; name an output for every table")
        place = adopt_output(out[name], n, specs[index].dim, on_cuda=on_cuda)
        if type(keys) is np.ndarray and keys is not given and keys.flags.owndata:
            raise InvalidInputError(
                f"preparing a lookup of table {name!r}: got keys that are not int64 or not aligned, expected aligned int64: a "
                "copy would not have the keys of later runs"
            )
        if isinstance(keys, TensorView) or isinstance(place, TensorView):
            raise InvalidInputError(
                f"preparing a lookup of table {name!r}: got a tensor on the GPU that is neither torch's nor CuPy's; pass "
                "cupy.from_dlpack of it"
            )
        segments.append(Segment(index, keys, place, found.get(name), n))
    refuse_repeated_tables([segment.table for segment in segments], specs)
    return segments


def concatenated_segments(
    keys: Any,
    counts: Sequence[int],
    out: Any,
    dims: Sequence[int],
    *,
    on_cuda: bool,
    with_found: bool,
) -> tuple[Sequence[Segment], BoolArray | None]:
    """Build one segment for each table from tensors that concatenate the keys and outputs; also return the masks.

    Args:
        counts, dims: number of keys and dimension, by table.

    Raises:
        InvalidDtypeError, InvalidInputError: as for `tensor_segment`; also without exactly one count for each table, or if the
            counts do not add up to the keys.
    """
    try:
        counts = list(map(operator.index, counts))  # sums of Python's integers cannot overflow
    except TypeError as error:
        raise InvalidInputError(
            f"looking up concatenated tables: got counts {counts!r}, expected integers ({error})"
        ) from error
    if len(counts) != len(dims) or min(counts, default=0) < 0:
        raise InvalidInputError(
            f"looking up concatenated tables: got counts {list(counts)[:8]}, expected {len(dims)} of them, one per table, "
            "none negative"
        )
    flat, n = adopt_keys(keys, on_cuda)
    total, size = sum(counts), sum(map(operator.mul, counts, dims))
    if n != total:
        raise InvalidInputError(f"looking up concatenated tables: got {n} keys, expected {total}, the sum of the counts")
    found = np.empty(total, np.bool_) if with_found else None
    place = adopt_output(out, size, 1, on_cuda=on_cuda, narrow=True)
    if found is None and not isinstance(flat, np.ndarray) and not isinstance(place, np.ndarray):
        return ConcatenatedSegments(flat, place, counts, dims, size), None
    parts = _parts(flat, place, counts, dims, found)
    if isinstance(place, np.ndarray) and place.dtype != _FLOAT32:
        return NarrowSegments(map(_narrowed, parts)), found
    return parts, found


def _parts(keys: Any, out: Any, counts: Sequence[int], dims: Sequence[int], found: BoolArray | None) -> list[Segment]:
    """Build the segments of tables whose keys and outputs are each in one array, or in one tensor on the device."""
    total, size = sum(counts), sum(map(operator.mul, counts, dims))
    keys_on_host, out_on_host = isinstance(keys, np.ndarray), isinstance(out, np.ndarray)
    row = element = 0
    segments = []
    for index, (count, dim) in enumerate(zip(counts, dims, strict=True)):
        length = count * dim
        segments.append(
            Segment(
                index,
                keys[row : row + count] if keys_on_host else Stretch(keys, row, count, total),
                out[element : element + length].reshape(count, dim) if out_on_host else Stretch(out, element, length, size),
                None if found is None else found[row : row + count],
                count,
            )
        )
        row += count
        element += length
    return segments


def _narrowed(segment: Segment) -> Segment:
    """Let a lookup write float32 for an output of 16 bits in host memory, which `narrow` fills afterwards."""
    segment.narrow, segment.out = segment.out, np.empty(segment.out.shape, np.float32)
    return segment


def narrow(segments: Sequence[Segment]) -> None:
    """Write the outputs of 16 bits in host memory, after a lookup."""
    from hps.ground.rows import to_16_bits  # not above: clients, which import this module, do without numba

    for segment in segments:
        if segment.narrow is not None:
            to_16_bits(segment.out, segment.narrow)


def refuse_repeated_tables(tables: Sequence[int], specs: Sequence[TableSpec]) -> None:
    """Refuse two segments of one table with `InvalidInputError`."""
    if len(set(tables)) != len(tables):
        raise InvalidInputError(f"looking up model {specs[0].model_name!r}: a table is named twice; name each once")


def check_segment(doing: str, segment: Segment, n: int, dim: int) -> None:
    """Check those arrays of a segment of n keys that are in host memory; a query accepts unaligned keys."""
    keys, out, found, pooling = segment.keys, segment.out, segment.found, segment.pooling
    if isinstance(keys, np.ndarray):
        check_array(doing, "keys", keys, np.int64, (n,))
    if isinstance(out, np.ndarray):
        shape = (n if pooling is None else pooling.count, dim)
        check_array(doing, "out", out, np.float32, shape, writable=True, aligned=True, rows_apart=pooling is not None)
    if isinstance(found, np.ndarray):
        check_array(doing, "found", found, np.bool_, (n,), writable=True, aligned=True)


def size_on_device(tensor: Any) -> int:
    """Return the size of a tensor in CUDA memory that a CUDA cache reads itself; -1 for any other."""
    if type(tensor) is _cupy_array():
        return int(tensor.size)
    return int(tensor.numel()) if getattr(tensor, "is_cuda", False) else -1


def _cupy_array() -> Any:
    """Return the type of CuPy's arrays, which are always in CUDA memory; None until CuPy is imported."""
    return getattr(sys.modules.get("cupy"), "ndarray", None)


def adopt_keys(keys: Any, on_cuda: bool) -> tuple[Any, int]:
    """Adopt keys: (n,) int64 in host memory, or the tensor that a CUDA cache reads itself. Also return n."""
    if on_cuda and type(keys) is not np.ndarray:
        if (size := size_on_device(keys)) >= 0:
            return keys, size
        view = adopt(keys, what="keys")
        if not view.on_host:
            return view, view.size
        flat = view_as_keys(view)
    else:
        flat = as_keys(keys)
    return flat, flat.size


def adopt_output(out: Any, rows: int, dim: int, *, on_cuda: bool, narrow: bool = False) -> Any:
    """Adopt an output: (rows, dim) in host memory, see `as_output`, or the tensor that a CUDA cache writes itself."""
    if on_cuda and type(out) is not np.ndarray:
        if size_on_device(out) >= 0:
            return out
        view = adopt(out, what="output")
        return view_as_output(view, rows, dim, narrow=narrow) if view.on_host else view
    return as_output(out, rows, dim, narrow=narrow)
