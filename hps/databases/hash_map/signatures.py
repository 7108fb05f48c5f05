"""Types of the hash map's kernels, and how they are compiled: when imported, for these types alone, without the GIL."""

from collections.abc import Callable
from typing import Any

from numba import boolean, float32, int64, uint32, uint64
from numba import njit as _typed_njit
from numba import types as _untyped_types

_types: Any = _untyped_types
njit: Any = _typed_njit

LAYOUT: Any = _types.Array(uint64, 1, "C")
COUNTERS: Any = _types.Array(int64, 1, "C")
KEYS: Any = _types.Array(int64, 1, "C", readonly=True)
VECTORS: Any = _types.Array(float32, 2, "C", readonly=True)
OUT_KEYS: Any = _types.Array(int64, 1, "C")
OUT_VECTORS: Any = _types.Array(float32, 2, "C")
OUT_VECTOR: Any = _types.Array(float32, 1, "C")
FLAGS: Any = _types.Array(boolean, 1, "C")
BITS: Any = _types.Array(uint64, 1, "C")
SCORES: Any = _types.Array(uint32, 1, "C")
INTEGER: Any = int64
PAIR: Any = _types.UniTuple(int64, 2)
TRIPLE: Any = _types.UniTuple(int64, 3)
NOTHING: Any = _types.void


def kernel(returns: Any, *arguments: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Compile a function for one signature; arrays that it only reads may be read-only."""
    compiler: Any = njit([returns(*arguments)], nogil=True, cache=True, error_model="numpy")

    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        made: Callable[..., Any] = compiler(function)
        return made

    return compiled
