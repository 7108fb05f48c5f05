"""Gives the resident keys of an embedding cache the vectors that the databases have now."""

import time
from dataclasses import dataclass

import numpy as np

from hps.cache.base import EmbeddingCache
from hps.lookup.chain import DatabaseChain
from hps.types import FloatArray, KeyArray, TableSpec

_ATTEMPTS = 5  # to refresh a chunk of a table that is being modified
_CHUNK_BYTES = 16 * 1024 * 1024  # keys and vectors fetched at once
_MIN_STEP_ROWS = 64  # the smallest step; HugeCTR's is one of its sets


@dataclass(frozen=True, slots=True)
class RefreshReport:
    """How many resident keys got their current vector, and how many were erased because no database has them."""

    updated: int
    erased: int


def refresh(
    cache: EmbeddingCache, table_index: int, table: TableSpec, chain: DatabaseChain, fraction_per_iteration: float
) -> RefreshReport:
    """Give every resident key of one table the vector that the databases have now; erase keys that no database has.

    Nothing becomes resident and no recency changes. A vector that is modified meanwhile is never overwritten by an older one:
    a chunk that was fetched before a modification is fetched again, and erased if that keeps happening.

    Args:
        cache: the cache of one device.
        table_index: the table's place in `cache.tables`.
        table: the same table.
        chain: the databases.
        fraction_per_iteration: the share of the capacity to fetch at once (`cache_refresh_percentage_per_iteration`), at most
            one chunk of memory; 0 means one chunk.

    Raises:
        DatabaseError: the databases failed; keys not yet reached keep their vectors. A failure never erases.
    """
    keys = cache.dump(table_index)
    step = max(1, _CHUNK_BYTES // (8 + 4 * table.dim))
    if fraction_per_iteration > 0:
        step = min(step, max(_MIN_STEP_ROWS, int(cache.stats(table_index).capacity_rows * min(fraction_per_iteration, 1.0))))
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
    for attempt in range(_ATTEMPTS):
        time.sleep(0.01 * attempt)  # gives the modification that was in the way time to end
        token = fence.token()
        found = np.zeros(keys.size, np.bool_)
        chain.fetch(table, keys, out, found)
        with fence.filling(token) as allowed:
            if allowed:
                cache.update(table_index, keys[found], out[found])
                cache.erase(table_index, keys[~found])
                return int(np.count_nonzero(found))
    cache.erase(table_index, keys)  # always right: a key is fetched again when it is asked for
    return 0
