"""Finds the differences between two sets of files of a table, so that only these need to be published.

Vectors are compared by 64-bit digests, so that files can be read sequentially, whatever the order of their rows. Vectors that
differ in one element never have the same digest; others do with a probability of 2^-64, since each run draws its own digests.
"""

import secrets
from collections.abc import Generator, Iterator
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import types, uint32, uint64

from hps.ground.hashing import mix
from hps.ground.kernels.numba_kernels import kernel, read_only
from hps.models.deltas import DeltaModel, Merge
from hps.models.files import CHUNK_BYTES, SparseModel
from hps.models.loading.read_ahead import read_rows
from hps.models.sealed import SealedModel
from hps.types import BoolArray, FloatArray, KeyArray

_void: Any = types.void
_NO_KEYS: Final = np.empty(0, np.int64)


class Difference(NamedTuple):
    """A chunk of differences.

    Attributes:
        keys, vectors: (n,) int64, (n, dim) float32: rows that are new or differ in any bit; each key once.
        deleted: (m,) int64: keys that are absent from the newer files.
        rows: number of compared rows of the newer files.
    """

    keys: KeyArray
    vectors: FloatArray
    deleted: KeyArray
    rows: int


def rows_of(model: SparseModel | SealedModel | DeltaModel) -> Iterator[tuple[KeyArray, FloatArray]]:
    """Yield all rows, the later of equal keys last. The next chunk overwrites the arrays.

    Raises:
        ModelFileError: the files changed, cannot be read, or are not those that were written.
    """
    model.verify()
    yield from Merge(model).chunks() if isinstance(model, DeltaModel) else read_rows(model)


def differences(
    old: SparseModel | SealedModel | DeltaModel, new: SparseModel | SealedModel | DeltaModel
) -> Generator[Difference, None, None]:
    """Yield the changes that turn the rows of `old` into those of `new`.

    Takes 16 bytes per key of `old` and 17 per key of `new`, twice that while sorting, and some chunks.

    Raises:
        ModelFileError: as of `rows_of`.
    """
    seed = np.uint64(secrets.randbits(64))
    old_keys, digests = _digests_by_key(old, seed)
    counts = _last_of_each_key(new)
    absent, row = np.ones(old_keys.size, np.bool_), 0
    for keys, vectors in rows_of(new):
        order = np.argsort(keys)  # so that consecutive searches touch neighbouring memory
        places = np.empty(keys.size, np.int64)
        places[order] = np.searchsorted(old_keys, keys[order])
        np.minimum(places, max(old_keys.size - 1, 0), out=places)
        known = old_keys[places] == keys
        absent[places[known]] = False
        same = known & (digests[places] == _digests(vectors, seed))
        changed = counts[row : row + keys.size] & ~same
        row += keys.size
        yield Difference(keys[changed], vectors[changed], _NO_KEYS, keys.size)
    deleted = old_keys[absent]
    for low in range(0, deleted.size, CHUNK_BYTES // 8):
        part = deleted[low : low + CHUNK_BYTES // 8]
        yield Difference(_NO_KEYS, np.empty((0, new.dim), np.float32), part, 0)


def _digests_by_key(model: SparseModel | SealedModel | DeltaModel, seed: np.uint64) -> tuple[KeyArray, npt.NDArray[np.uint64]]:
    """Return the distinct keys, ascending, and the digest of each key's last row."""
    keys, digests, row = np.empty(model.rows, np.int64), np.empty(model.rows, np.uint64), 0
    for chunk, vectors in rows_of(model):
        keys[row : row + chunk.size], digests[row : row + chunk.size] = chunk, _digests(vectors, seed)
        row += chunk.size
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    last = _ends_of_runs(keys)
    return keys[last], digests[order[last]]


def _last_of_each_key(model: SparseModel | SealedModel | DeltaModel) -> BoolArray:
    """Mark the last row of each key, in the order of `rows_of`."""
    keys, rows = np.empty(model.rows, np.int64), 0
    if isinstance(model, DeltaModel):
        chunks = (chunk for chunk, _ in rows_of(model))
    else:
        chunks = (chunk for _, chunk in model.keys.key_chunks())
    for chunk in chunks:
        keys[rows : rows + chunk.size] = chunk
        rows += chunk.size
    order = np.argsort(keys[:rows], kind="stable")
    last = np.zeros(rows, np.bool_)
    last[order[_ends_of_runs(keys[order])]] = True
    return last


def _ends_of_runs(ascending: KeyArray) -> BoolArray:
    ends = np.ones(ascending.size, np.bool_)
    ends[:-1] = ascending[1:] != ascending[:-1]
    return ends


def _digests(vectors: FloatArray, seed: np.uint64) -> npt.NDArray[np.uint64]:
    digests = np.empty(len(vectors), np.uint64)
    _digest_rows(np.ascontiguousarray(vectors).view(np.uint32), seed, digests)
    return digests


@kernel(_void, read_only(uint32[:, ::1]), uint64, uint64[::1])
def _digest_rows(words: npt.NDArray[np.uint32], seed: np.uint64, digests: npt.NDArray[np.uint64]) -> None:
    dim = words.shape[1]
    for i in range(words.shape[0]):
        digest = seed
        for j in range(0, dim, 2):
            pair = np.uint64(words[i, j])
            if j + 1 < dim:
                pair |= np.uint64(words[i, j + 1]) << np.uint64(32)
            digest = mix(np.int64(digest ^ pair))
        digests[i] = digest
