"""The one signature of each kernel of the NumPy embedding cache."""

import threading
from typing import Any

from numba import boolean, float32, float64, int64, types, void

from hps.cache.cpu import kernels as numpy_kernels
from hps.cache.cpu import misses as numpy_misses


def _array(element: Any, dimensions: int, *, readonly: bool = False) -> Any:
    return types.Array(element, dimensions, "C", readonly=readonly)


_WORDS, _LINES, _ROWS, _MASK = _array(int64, 1), _array(int64, 2), _array(float32, 2), _array(boolean, 1)
_READ_WORDS, _READ_ROWS = _array(int64, 1, readonly=True), _array(float32, 2, readonly=True)
_READ_MASK = _array(boolean, 1, readonly=True)

_SIGNATURES = (
    (numpy_kernels.query, int64(_LINES, _ROWS, _WORDS, _READ_WORDS, _ROWS, _MASK, _WORDS)),
    (numpy_kernels.write, void(_LINES, _ROWS, _WORDS, _READ_WORDS, _READ_ROWS, _READ_MASK, boolean, boolean)),
    (numpy_kernels.erase, void(_LINES, _WORDS, _READ_WORDS)),
    (numpy_kernels.dump, int64(_LINES, _WORDS)),
    (numpy_misses.distinct, int64(_READ_WORDS, _WORDS, int64, _WORDS, _WORDS, _WORDS)),
    (numpy_misses.rank, void(_WORDS, _WORDS, _WORDS, _WORDS, int64, _WORDS)),
    (numpy_misses.scatter, void(_WORDS, _WORDS, int64, _ROWS, _READ_MASK, float64, _ROWS, _MASK)),
)
_compiling = threading.Lock()


def compile_kernels() -> None:
    """Compile the kernels, or load them from numba's cache on disk, and fix their signatures.

    No lookup waits for a compiler then. Arrays that are only read are declared read-only, which writable ones fit too, so
    that each kernel is compiled once; any other dtype or layout is a TypeError from then on.
    """
    with _compiling:
        for kernel, signature in _SIGNATURES:
            if not kernel.signatures:
                kernel.compile(signature)
                kernel.disable_compile()
