"""Keys and outputs as callers pass them, brought to a form that an embedding cache adopts."""

from typing import Any

import numpy as np

from hps.cache.base import EmbeddingCache
from hps.cache.dlpack import adopt, as_keys, as_output, check_keys, check_output
from hps.host_keys import as_host_keys


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


def any_keys_of(keys: Any, cache: EmbeddingCache | None) -> tuple[Any, int]:
    """Adopt keys that are a tensor, or a sequence or array of any integer type."""
    if cache is not None and cache.device == "cuda" and getattr(keys, "is_cuda", False):
        return keys, keys.numel()  # the hot path of many tables a call
    if isinstance(keys, np.ndarray) or not hasattr(keys, "__dlpack__"):
        flat = as_host_keys(keys)
        return flat, flat.size
    return keys_of(keys, cache)
