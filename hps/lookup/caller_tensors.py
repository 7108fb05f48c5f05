"""Keys and outputs as callers pass them, brought to a form that an embedding cache adopts."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from hps.cache.base import EmbeddingCache, Segment, Stretch
from hps.errors import InvalidInputError
from hps.tensors.dlpack import adopt, as_keys, as_output, check_keys, check_output
from hps.tensors.host_keys import as_host_keys
from hps.types import BoolArray, TableSpec


def keys_of(keys: Any, cache: EmbeddingCache | None) -> tuple[Any, int]:
    """Adopt keys: a tensor in host memory, or in CUDA memory where the cache is there, too.

    Returns:
        (n,) int64 in host memory, or the tensor where a CUDA cache reads it itself; and n.

    Raises:
        InvalidDtypeError, InvalidInputError: they are no keys, or where the cache cannot read them.
    """
    if cache is None or cache.device == "cpu" or isinstance(keys, np.ndarray):
        flat = as_keys(keys)
        return flat, flat.size
    if getattr(keys, "is_cuda", False):  # torch: the CUDA cache asks it directly, ten times as fast as through DLPack
        return keys, keys.numel()
    view = adopt(keys, what="keys")
    if view.on_host:
        flat = as_keys(keys)
        return flat, flat.size
    check_keys(view)
    return view, view.size


def output_of(out: Any, rows: int, dim: int, cache: EmbeddingCache | None) -> Any:
    """Adopt an output, as `keys_of` does keys.

    Returns:
        (rows, dim) float32 in host memory, or the tensor where a CUDA cache writes it itself.

    Raises:
        InvalidDtypeError, InvalidInputError: it cannot take rows x dim float32 elements.
    """
    on_cpu = cache is None or cache.device == "cpu"
    if not on_cpu and getattr(out, "is_cuda", False):
        return out
    if on_cpu or isinstance(out, np.ndarray):
        return as_output(out, rows, dim)
    view = adopt(out, what="output")
    if view.on_host:
        return as_output(out, rows, dim)
    check_output(view, rows, dim)
    return view


def segments_of(
    tables: Mapping[Any, Any],
    out: Mapping[Any, Any] | None,
    table_index: Callable[[Any], int],
    specs: Sequence[TableSpec],
    cache: EmbeddingCache | None,
    *,
    with_found: bool,
) -> list[Segment]:
    """One segment for each table that a caller names: keys as tensors or sequences, outputs as tensors or new host arrays.

    Raises:
        UnknownTableError: as `table_index` does.
        InvalidDtypeError, InvalidInputError: as `keys_of` and `output_of`; also when `out` lacks a table.
    """
    segments = []
    for name, given in tables.items():
        index = table_index(name)
        keys, n = _any_keys_of(given, cache)
        if out is None:
            place = np.empty((n, specs[index].dim), np.float32)
        elif name in out:
            place = output_of(out[name], n, specs[index].dim, cache)
        else:
            raise InvalidInputError(f"looking up tables: out has no entry for {name!r}; name an output for every table")
        segments.append(Segment(index, keys, place, np.empty(n, np.bool_) if with_found else None, n))
    return segments


def cuda_segments(
    tables: Mapping[Any, Any], out: Mapping[Any, Any], indices: Mapping[Any, int], cache: EmbeddingCache | None
) -> list[Segment] | None:
    """The segments of torch's CUDA tensors for tables that are given by name, with the fewest steps a table.

    Returns:
        One segment a table, each of another table; None where there is anything else among them.
    """
    if cache is None or cache.device != "cuda":
        return None
    segments = []
    for name, keys in tables.items():
        place = out.get(name)
        if type(name) is not str or name not in indices or not getattr(keys, "is_cuda", False):
            return None
        if not getattr(place, "is_cuda", False):
            return None
        segments.append(Segment(indices[name], keys, place, None, keys.numel()))
    return segments


def concatenated_segments(
    keys: Any,
    counts: Sequence[int],
    out: Any,
    specs: Sequence[TableSpec],
    cache: EmbeddingCache | None,
    found: BoolArray | None,
) -> list[Segment]:
    """One segment for each table of a model whose keys, outputs and masks follow each other in one tensor each.

    Raises:
        InvalidDtypeError, InvalidInputError: as `keys_of` and `output_of`; also when there is not one count a table, or they
            do not add up to the keys.
    """
    if len(counts) != len(specs) or min(counts, default=0) < 0:
        raise InvalidInputError(
            f"looking up concatenated tables: got counts {list(counts)[:8]}, wanted {len(specs)} of them, one a table, none "
            "negative"
        )
    flat, n = keys_of(keys, cache)
    total, size = sum(counts), sum([count * spec.dim for count, spec in zip(counts, specs, strict=True)])
    if n != total:
        raise InvalidInputError(f"looking up concatenated tables: got {n} keys, wanted the {total} that the counts add up to")
    place = output_of(out, size, 1, cache)
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
    return segments


def _any_keys_of(keys: Any, cache: EmbeddingCache | None) -> tuple[Any, int]:
    """Adopt keys that are a tensor, or a sequence or array of any integer type."""
    if isinstance(keys, np.ndarray) or not hasattr(keys, "__dlpack__"):
        flat = as_host_keys(keys)
        return flat, flat.size
    return keys_of(keys, cache)
