"""The sample model of `hps create-model`, whose vectors can be computed from their keys."""

from collections.abc import Iterator

import numpy as np
from numba import float32, int64, void

from hps.ground.hashing import mix
from hps.ground.kernels.numba_kernels import compile_kernels, kernel, read_only
from hps.models.files import rows_of_a_chunk
from hps.types import FloatArray, KeyArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def sample_vectors(
    keys: KeyArray,  # (n,)
    dim: int,
    seed: int = 0,
) -> FloatArray:  # (n, dim)
    """Compute the sample vectors of keys, so that any answer can be checked.

    Element j of key k is a multiple of 2^-23 in [-1, 1): with `mix` of `hps.ground.hashing` and 64-bit wrap-around,
    `(mix(mix(k ^ mix(seed)) + j * 0x9E3779B97F4A7C15) >> 40) / 2^23 - 1`.
    """
    out = np.empty((keys.size, dim), np.float32)
    _fill_samples(np.ascontiguousarray(keys, np.int64), seed, out)
    return out


def sample_chunks(rows: int, dim: int, seed: int = 0) -> Iterator[tuple[KeyArray, FloatArray]]:
    """Yield the sample rows of keys 0 to rows - 1 in chunks for `write_sparse_model`."""
    compile_kernels(_fill_samples)  # before anything is written: the compiler may swallow an interrupt
    step = rows_of_a_chunk(dim)
    spans = (np.arange(start, min(start + step, rows), dtype=np.int64) for start in range(0, rows, step))
    return ((keys, sample_vectors(keys, dim, seed)) for keys in spans)


@kernel(void, read_only(int64[::1]), int64, float32[:, ::1])
def _fill_samples(keys: KeyArray, seed: int, out: FloatArray) -> None:
    start = mix(np.int64(seed))
    for i in range(keys.size):
        row = mix(np.int64(np.uint64(keys[i]) ^ start))
        for j in range(out.shape[1]):
            bits = mix(np.int64(row + np.uint64(j) * _GOLDEN)) >> np.uint64(40)
            out[i, j] = np.float32(np.int64(bits) - 8388608) * np.float32(1 / 8388608)
