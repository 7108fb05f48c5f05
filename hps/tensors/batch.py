"""The record of a lookup, `Batch`, and how it is built from callers' tensors.

Every tensor is adopted once. A tensor in host memory becomes a NumPy array over the same memory. A tensor in CUDA memory is
passed on unchanged to a CUDA cache, which inspects and checks it itself: for torch's and CuPy's tensors ten times as fast as
DLPack.
"""

import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hps.errors import InvalidInputError
from hps.tensors.array_checks import adopt_keys, adopt_output, as_host_keys, as_output, check_array, cupy_array, size_on_device
from hps.tensors.bags import Bags, Pooling, keys_of_bags, pooling_of
from hps.tensors.dlpack import CAPSULE, TensorView
from hps.types import BoolArray, DeviceArray, FloatArray, TableSpec

_INT64, _FLOAT32 = np.dtype(np.int64), np.dtype(np.float32)
_MOST_INDICES = 1 << 12  # kept in a dict
_IS_CUDA = operator.attrgetter("is_cuda")


@dataclass(slots=True, eq=False)
class Part:
    """A part of a tensor in CUDA memory that several tables of a batch share; a cache inspects the tensor once for all.

    Attributes:
        tensor: keys or outputs of several tables.
        start: position of the first element.
        total: expected size of the tensor: the exact number of keys, the minimum number of elements of an output.
        width: elements from one row of an output to the next, if the tensor has columns of several tables; else 0.
    """

    tensor: DeviceArray
    start: int
    total: int
    width: int = 0


@dataclass(eq=False)
class Batch:
    """One lookup: the keys of some tables of a model, and where their vectors go. *One lookup at a time if `kept`.*

    All columns are in the order of `tables`. Calls in process, prepared and captured lookups, layers, scores and the service
    make batches; the engine runs them.

    Attributes:
        tables: indexes of the tables within the model, each at most once.
        sizes: number of keys of each; may be 0.
        keys: (n,) int64 each, C-contiguous; read only. In CUDA memory a tensor of any shape, or a `Part`.
        outs: (n, dim) float32 each, C-contiguous; every row has been written when the lookup returns. With B bags (B, dim), in
            host memory with rows of any stride.
        founds: (n,) bool each, or None for tables without: True for keys that a tier answered, False for those that got the
            default. Empty if no table has a mask; without bags only.
        poolings: the bags of each table's keys; empty: every key gets a row.
        kind: type of all tensors in `keys` and `outs`, where it is torch's or CuPy's and they are in CUDA memory; else None. A
            cache then inspects them column by column, which takes less than half the time. Of a `joined` batch any type.
        joined: `keys` and `outs` are each one tensor in CUDA memory that has those of all tables of the model, in their order.
        narrow: outputs of 16 bits in host memory (float16, or uint16 for bfloat16), each after the float32 array in `outs` that
            the engine rounds to it.
        kept: the tensors are those of many lookups, so what is checked of them, and where they lie, is found once.
        checked: the session that has checked the sizes of a kept batch.
        placement: where a cache on a CUDA device has found the tensors of a kept batch.
    """

    tables: Sequence[int]
    sizes: Sequence[int]
    keys: Sequence[DeviceArray]
    outs: Sequence[DeviceArray]
    founds: Sequence[DeviceArray | None] = ()
    poolings: Sequence[Pooling] = ()
    # Few batches have these. As attributes of the class they cost nothing to construct; six more arguments and slots would take
    # a third of the time of the constructor, which a lookup of few keys pays for.
    kind: Any = field(default=None, init=False)
    joined: bool = field(default=False, init=False)
    kept: bool = field(default=False, init=False)
    narrow: Sequence[tuple[FloatArray, np.ndarray]] = field(default=(), init=False)
    checked: object = field(default=None, init=False)
    placement: Any = field(default=None, init=False)

    @classmethod
    def of(
        cls,
        table: int,
        keys: DeviceArray,  # (n,)
        out: DeviceArray,  # (n, dim)
        found: DeviceArray | None = None,  # (n,)
        n: int = -1,
        pooling: Pooling | None = None,
    ) -> "Batch":
        """Make a batch of one table; n is given if `keys` is a tensor of any shape in CUDA memory."""
        founds, poolings = () if found is None else (found,), () if pooling is None else (pooling,)
        return cls((table,), (len(keys) if n < 0 else n,), (keys,), (out,), founds, poolings)

    @classmethod
    def merged(cls, batches: "Sequence[Batch]") -> "Batch":
        """Make one batch of batches of one table each, all with bags or none.

        Raises:
            InvalidInputError: some have bags, and some have none.
        """
        tables, sizes = [batch.tables[0] for batch in batches], [batch.sizes[0] for batch in batches]
        keys, outs = [batch.keys[0] for batch in batches], [batch.outs[0] for batch in batches]
        poolings = [pooling for batch in batches for pooling in batch.poolings]
        if poolings and len(poolings) != len(batches):
            raise InvalidInputError("looking up bags: got a table without bags and others with bags, expected bags of all")
        masked = any(batch.founds for batch in batches)
        founds = [batch.founds[0] if batch.founds else None for batch in batches] if masked else ()
        return cls(tables, sizes, keys, outs, founds, poolings)


def table_batch(table: int, dim: int, keys: Any, out: Any, *, on_cuda: bool, with_found: bool) -> Batch:
    """Make the batch of one table from tensors for keys and output.

    Args:
        on_cuda: the lookup runs on a CUDA cache; otherwise both tensors must be in host memory.
        with_found: add a found-mask in host memory.

    Raises:
        InvalidDtypeError, InvalidInputError: the tensors cannot be keys or an output of `dim` elements per key.
    """
    if on_cuda and getattr(keys, "is_cuda", False) and getattr(out, "is_cuda", False):  # as the functions below, but faster
        flat, n, place = keys, keys.numel(), out
    elif on_cuda and type(keys) is type(out) is cupy_array():
        flat, n, place = keys, keys.size, out
    else:
        flat, n = adopt_keys(keys, on_cuda=on_cuda)
        place = adopt_output(out, n, dim, on_cuda=on_cuda, narrow=True)
    batch = Batch((table,), (n,), (flat,), (place,), (np.empty(n, np.bool_),) if with_found else ())
    if type(place) is np.ndarray and place.dtype != _FLOAT32:
        _widen(batch)
    return batch


def named_batch(
    tables: Mapping[Any, Any],
    out: Mapping[Any, Any] | None,
    table_index: Callable[[Any], int],
    indices: dict[Any, Any],
    specs: Sequence[TableSpec],
    *,
    on_cuda: bool,
    with_found: bool,
) -> Batch:
    """Make a batch of the tables named by the caller.

    Keys are tensors or sequences; outputs are tensors or new host arrays.

    Args:
        table_index: finds a table that `indices` lacks, or raises.
        indices: table indices by name and by id; those of tuples of names are kept in it.

    Raises:
        UnknownTableError: raised by `table_index`.
        InvalidDtypeError, InvalidInputError: as for `table_batch`; also if `out` lacks a table, or a table is named twice.
    """
    if (
        on_cuda
        and out is not None
        and not with_found
        and (batch_of_one_kind := _alike_batch(tables, out, table_index, indices, specs))
    ):
        return batch_of_one_kind
    found, sizes, flats, places = [], [], [], []
    for name, keys in tables.items():
        index = indices.get(name) if type(name) is str else None
        if index is None:
            index = table_index(name)
        speaks_dlpack = (hasattr(keys, "__dlpack__") and not isinstance(keys, np.ndarray)) or type(keys) is CAPSULE
        if speaks_dlpack or (on_cuda and size_on_device(keys) >= 0):
            keys, n = adopt_keys(keys, on_cuda=on_cuda)
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
        found.append(index)
        sizes.append(n)
        flats.append(keys)
        places.append(place)
    refuse_repeated_tables(found, specs)
    batch = Batch(found, sizes, flats, places, [np.empty(n, np.bool_) for n in sizes] if with_found else ())
    if out is not None:
        _widen(batch)
    return batch


def _alike_batch(
    tables: Mapping[Any, Any],
    out: Mapping[Any, Any],
    table_index: Callable[[Any], int],
    indices: dict[Any, Any],
    specs: Sequence[TableSpec],
) -> Batch | None:
    """Make the batch of tensors in CUDA memory that are all torch's or all CuPy's, the fastest way; None for others."""
    keys, outs = list(tables.values()), list(map(out.get, tables))
    kinds = {*map(type, keys), *map(type, outs)}
    if len(kinds) != 1:
        return None
    [kind] = kinds
    of_torch = kind is getattr(sys.modules.get("torch"), "Tensor", None)
    if not (all(map(_IS_CUDA, keys)) and all(map(_IS_CUDA, outs)) if of_torch else kind is cupy_array()):
        return None
    names = tuple(tables)
    found: tuple[int, ...] | None = indices.get(names)
    if found is None:
        found = tuple(map(table_index, names))
        refuse_repeated_tables(found, specs)
        if {*map(type, names)} == {str} and len(indices) < _MOST_INDICES:
            indices[names] = found
    sizes = list(map(kind.numel, keys)) if of_torch else [key.size for key in keys]  # type: ignore[attr-defined]
    batch = Batch(found, sizes, keys, outs)
    batch.kind = kind
    return batch


def kept_batch(
    tables: Mapping[Any, Any],
    out: Mapping[Any, Any],
    founds: Mapping[Any, Any],
    table_index: Callable[[Any], int],
    specs: Sequence[TableSpec],
    *,
    on_cuda: bool,
) -> Batch:
    """Make a batch of tensors that are reused by many lookups.

    Args:
        founds: masks by table, of the caller's own; or empty.

    Raises:
        UnknownTableError: raised by `table_index`.
        InvalidDtypeError, InvalidInputError: as for `named_batch`; also for keys that would have to be copied, and for tensors
            on a device whose framework does not report its current stream.
    """
    found, sizes, flats, places = [], [], [], []
    for name, given in tables.items():
        index = table_index(name)
        keys, n = adopt_keys(given, on_cuda=on_cuda)
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
        found.append(index)
        sizes.append(n)
        flats.append(keys)
        places.append(place)
    refuse_repeated_tables(found, specs)
    batch = Batch(found, sizes, flats, places, [founds.get(name) for name in tables] if founds else ())
    batch.kept = True
    return batch


def pooled_batch(
    tables: Mapping[Any, Bags],
    out: Any,
    table_index: Callable[[Any], int],
    specs: Sequence[TableSpec],
    *,
    on_cuda: bool,
) -> Batch:
    """Make a batch of the bags of the tables that a caller names.

    Args:
        out: by table, (B, dim) float32 each; or one tensor (B, sum of dims), with the columns of the tables in their order;
            None: new host arrays.
        table_index: finds a table, or raises.

    Raises:
        UnknownTableError: raised by `table_index`.
        InvalidDtypeError, InvalidInputError: a tensor has a wrong dtype or shape; a table is named twice; tables that share one
            output have different numbers of bags.
    """
    found = [(name, table_index(name), bags) for name, bags in tables.items()]
    width = sum([specs[index].dim for _name, index, _bags in found])
    shared = None
    column = 0
    poolings, sizes, flats, places = [], [], [], []
    for name, index, bags in found:
        dim = specs[index].dim
        if not isinstance(bags, Bags):
            raise InvalidInputError(f"looking up bags of table {name!r}: got {type(bags).__name__}, expected hps.Bags")
        keys, n, shape = keys_of_bags(bags.keys, on_cuda)
        pooling = pooling_of(name, bags, n, shape, on_cuda)
        if out is None:
            place: Any = np.empty((pooling.count, dim), np.float32)
        elif isinstance(out, Mapping):
            if name not in out:
                raise InvalidInputError(f"looking up bags: out has no entry for {name!r}; name an output for every table")
            place = adopt_output(out[name], pooling.count, dim, on_cuda=on_cuda)
        else:
            if shared is None:
                rows = pooling.count
                shared = adopt_output(out, rows, width, on_cuda=on_cuda)
            if pooling.count != rows:
                raise InvalidInputError(
                    f"looking up bags: got {pooling.count} bags of table {name!r} and {rows} of {found[0][0]!r}, expected as "
                    "many of each table, since one tensor takes the vectors of all; or name an output for every table"
                )
            on_host = isinstance(shared, np.ndarray)
            place = shared[:, column : column + dim] if on_host else Part(shared, column, rows * width, width)
            column += dim
        poolings.append(pooling)
        sizes.append(n)
        flats.append(keys)
        places.append(place)
    indexes = [index for _name, index, _bags in found]
    refuse_repeated_tables(indexes, specs)
    return Batch(indexes, sizes, flats, places, (), poolings)


def concatenated_batch(
    keys: Any,
    counts: Sequence[int],
    out: Any,
    dims: Sequence[int],
    *,
    on_cuda: bool,
    with_found: bool,
) -> tuple[Batch, BoolArray | None]:
    """Make a batch of all tables from tensors that concatenate their keys and outputs; also return the masks.

    Args:
        counts, dims: number of keys and dimension, by table.

    Raises:
        InvalidDtypeError, InvalidInputError: as for `table_batch`; also without exactly one count for each table, or if the
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
    flat, n = adopt_keys(keys, on_cuda=on_cuda)
    total, size = sum(counts), sum(map(operator.mul, counts, dims))
    if n != total:
        raise InvalidInputError(f"looking up concatenated tables: got {n} keys, expected {total}, the sum of the counts")
    place = adopt_output(out, size, 1, on_cuda=on_cuda, narrow=True)
    tables, keys_on_host, out_on_host = range(len(dims)), isinstance(flat, np.ndarray), isinstance(place, np.ndarray)
    if not (with_found or keys_on_host or out_on_host):
        batch = Batch(tables, counts, (flat,), (place,))
        batch.joined, batch.kind = True, type(flat) if type(flat) is type(place) else None
        return batch, None
    found = np.empty(total, np.bool_) if with_found else None
    row = element = 0
    flats, places, masks = [], [], []
    for count, dim in zip(counts, dims, strict=True):
        stop, end = row + count, element + count * dim
        flats.append(flat[row:stop] if keys_on_host else Part(flat, row, total))
        places.append(place[element:end].reshape(count, dim) if out_on_host else Part(place, element, size))
        if found is not None:
            masks.append(found[row:stop])
        row, element = stop, end
    batch = Batch(tables, counts, flats, places, masks)
    if out_on_host and place.dtype != _FLOAT32:
        _widen(batch)
    return batch, found


def _widen(batch: Batch) -> None:
    """Replace outputs of 16 bits in host memory by float32 arrays, which `fill_narrow` rounds after the lookup."""
    narrow = {place: out for place, out in enumerate(batch.outs) if type(out) is np.ndarray and out.dtype != _FLOAT32}
    if narrow:
        batch.outs = [np.empty(out.shape, np.float32) if place in narrow else out for place, out in enumerate(batch.outs)]
        batch.narrow = [(batch.outs[place], out) for place, out in narrow.items()]


def fill_narrow(batch: Batch) -> None:
    """Write the outputs of 16 bits in host memory, after a lookup."""
    from hps.ground.rows import to_16_bits  # not at the top: clients import this module, and run without numba

    for wide, out in batch.narrow:
        to_16_bits(wide, out)


def refuse_repeated_tables(tables: Sequence[int], specs: Sequence[TableSpec]) -> None:
    """Refuse two entries of one table with `InvalidInputError`."""
    if len(set(tables)) != len(tables):
        raise InvalidInputError(f"looking up model {specs[0].model_name!r}: a table is named twice; name each once")


def check_host_arrays(doing: str, batch: Batch, place: int, n: int, dim: int) -> None:
    """Check those arrays of a table of n keys that are in host memory; a query accepts unaligned keys."""
    keys, out, found = batch.keys[place], batch.outs[place], batch.founds[place] if batch.founds else None
    if isinstance(keys, np.ndarray):
        check_array(doing, "keys", keys, np.int64, (n,))
    if isinstance(out, np.ndarray):
        shape = (batch.poolings[place].count if batch.poolings else n, dim)
        check_array(doing, "out", out, np.float32, shape, writable=True, aligned=True, rows_apart=bool(batch.poolings))
    if isinstance(found, np.ndarray):
        check_array(doing, "found", found, np.bool_, (n,), writable=True, aligned=True)
