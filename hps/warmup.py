"""From model files into the embedding cache, and the refresh of what is resident."""

import logging
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from numba import njit

from hps.cache.base import EmbeddingCache
from hps.database_chain import DatabaseChain
from hps.hashing import mix
from hps.model_files import CHUNK_BYTES, SparseModel
from hps.read_ahead import read_ahead
from hps.types import FloatArray, KeyArray, TableSpec

_log = logging.getLogger(__name__)

_MIN_STEP_ROWS = 64  # HugeCTR's least step of a warm-up: one of its sets
_REFRESH_ATTEMPTS = 5  # at a chunk of a table that is being modified


def warm_up(
    cache: EmbeddingCache, table_index: int, table: TableSpec, sparse_model: SparseModel, fraction_per_iteration: float
) -> int:
    """Fill one table of an embedding cache with the first rows of its model files, reading ahead of the insertion.

    Args:
        cache: the cache of one device.
        table_index: the table's place in `cache.tables`.
        table: the same table.
        sparse_model: its files.
        fraction_per_iteration: `cache_refresh_percentage_per_iteration`: the share of the capacity that one step, with its
            log line, fills; 1.0 is everything in one step. It bounds no memory: a step is read in chunks. At 0 nothing is
            done.

    Returns:
        How many rows were inserted: those of the files, or the capacity if it is less.

    Raises:
        ModelFileError: the files cannot be read, or changed since they were opened.
    """
    capacity = cache.stats(table_index).capacity_rows
    rows = min(capacity, sparse_model.rows)
    if rows == 0 or fraction_per_iteration <= 0:
        return 0
    step = _step_rows(capacity, fraction_per_iteration)
    _log.info('EC initialization for model: "%s", num_tables: %d', table.model_name, len(cache.tables))
    _log.info("EC initialization on device: %d for %s", cache.device_id, table.tag)
    _log.info(  # word for word HugeCTR's
        "Initialize the embedding cache by by inserting the same size model file with embedding cache from beginning"
    )
    sparse_model.verify()
    with closing(read_ahead(sparse_model, _pieces(rows, step, sparse_model.chunk_rows), cache.host_buffer)) as chunks:
        for start, keys, vectors in chunks:
            if start % step == 0:
                count = min(step, rows - start)
                _log.info(
                    "Initialize the embedding table %d for iteration %d with number of %d keys.",
                    table_index,
                    start // step,
                    count,
                )
            cache.insert(table_index, *_last_of_each(keys, vectors))
    return rows


@dataclass(frozen=True, slots=True)
class RefreshReport:
    """Resident keys that got their database's current vector, and those erased because no database has them."""

    updated: int
    erased: int


def refresh(
    cache: EmbeddingCache, table_index: int, table: TableSpec, chain: DatabaseChain, fraction_per_iteration: float
) -> RefreshReport:
    """Give every resident key of one table the vector that the databases have now; erase keys that none has.

    Nothing becomes resident and no recency changes. A vector that is modified meanwhile is never overwritten by an older one:
    a chunk that was fetched before a modification is fetched again, and erased where that keeps happening.

    Args:
        cache: the cache of one device.
        table_index: the table's place in `cache.tables`.
        table: the same table.
        chain: the databases.
        fraction_per_iteration: `cache_refresh_percentage_per_iteration`: the share of the capacity to fetch at once, within
            the memory of a chunk; at 0 a chunk.

    Raises:
        DatabaseError: the databases failed; keys not yet reached keep their vectors. A failure never erases.
    """
    keys = cache.dump(table_index)
    step = max(1, CHUNK_BYTES // (8 + 4 * table.dim))
    if fraction_per_iteration > 0:
        step = min(step, _step_rows(cache.stats(table_index).capacity_rows, fraction_per_iteration))
    out = np.empty((min(step, keys.size), table.dim), np.float32)
    updated = 0
    for start in range(0, keys.size, step):
        chunk = keys[start : start + step]
        updated += _refresh_chunk(cache, table_index, table, chain, chunk, out[: chunk.size])
    return RefreshReport(updated, keys.size - updated)


def _refresh_chunk(
    cache: EmbeddingCache, table_index: int, table: TableSpec, chain: DatabaseChain, keys: KeyArray, out: FloatArray
) -> int:
    fence = chain.fence(table)
    for attempt in range(_REFRESH_ATTEMPTS):
        time.sleep(0.01 * attempt)  # the modification that was in the way takes a while
        token = fence.token()
        found = np.zeros(keys.size, np.bool_)
        chain.fetch(table, keys, out, found)
        with fence.filling(token) as allowed:
            if allowed:
                cache.update(table_index, keys[found], out[found])
                cache.erase(table_index, keys[~found])
                return int(np.count_nonzero(found))
    cache.erase(table_index, keys)  # always right: each is fetched again when it is asked for
    return 0


def _step_rows(capacity_rows: int, fraction: float) -> int:
    return max(_MIN_STEP_ROWS, int(capacity_rows * min(fraction, 1.0)))


def _pieces(rows: int, step: int, chunk_rows: int) -> Iterator[tuple[int, int]]:
    """Cut [0, rows) at every multiple of `step`, and between those so that no piece is longer than `chunk_rows`."""
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        for low in range(start, stop, chunk_rows):
            yield low, min(low + chunk_rows, stop)


def _last_of_each(keys: KeyArray, vectors: FloatArray) -> tuple[KeyArray, FloatArray]:
    """Drop all but the last row of each key: where a key stands twice, a cache may keep either, the databases keep the last."""
    if keys.size < 2 or np.all(keys[1:] > keys[:-1]):
        return keys, vectors
    if not _any_twice(keys, np.full(1 << (2 * keys.size).bit_length(), -1, np.int32)):
        return keys, vectors
    distinct, index = np.unique(keys[::-1], return_index=True)
    return distinct, vectors[keys.size - 1 - index]


@njit(nogil=True, cache=True)
def _any_twice(keys: KeyArray, table: npt.NDArray[np.int32]) -> bool:
    """Tell whether a key stands twice; a sort would take as long as the insertion. `table` is at most half full."""
    mask = np.uint64(table.size - 1)
    for i in range(keys.size):
        slot = mix(keys[i]) & mask
        while table[slot] >= 0:
            if keys[table[slot]] == keys[i]:
                return True
            slot = (slot + np.uint64(1)) & mask
        table[slot] = i
    return False
