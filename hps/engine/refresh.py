"""Refreshes the resident keys of an embedding cache with current vectors from the databases."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hps.cache.base import EmbeddingCache
from hps.engine.chain import DatabaseChain
from hps.errors import NotReadyError
from hps.types import FloatArray, KeyArray, TableSpec

_ATTEMPTS = 5  # attempts to refresh a chunk of a table that is being modified
_CHUNK_BYTES = 16 * 1024 * 1024  # keys and vectors fetched at once
_PACED_ROWS = 4096  # rows fetched at once while lookups run: half a millisecond's work; 512 rows disturbed lookups more
_PACED_BYTES = 1 << 20  # limit for wide rows
_MIN_STEP_ROWS = 64  # the smallest step; HugeCTR's is one of its sets


@dataclass(frozen=True, slots=True)
class RefreshReport:
    """Counts of the resident keys that a refresh updated, and erased because no database has them. *Immutable.*"""

    updated: int
    erased: int


class Pace:
    """Limits a refresh to a share of the time, and ends it on request. *One per thread.*

    The share bounds the duration of the refresh's own steps: fetching a chunk from the databases and writing it to the device.
    Device time is part of that, so the refresh takes less than its share of the device.

    Args:
        share: share of the time, above 0, at most 1; may change.
        wait: sleeps for a number of seconds; returns True to end the refresh.
        clock: current time in seconds.
    """

    def __init__(self, share: float, wait: Callable[[float], bool], clock: Callable[[], float] = time.perf_counter) -> None:
        self.share = share
        self._wait = wait
        self._clock = clock
        self._resumed = clock()

    def rest(self) -> None:
        """Pause in proportion to the work since the last pause.

        Raises:
            NotReadyError: the refresh must end.
        """
        if self._wait((self._clock() - self._resumed) * (1 / self.share - 1)):
            raise NotReadyError(
                "refreshing an embedding cache: its model is being taken out of service; the other rows are unchanged"
            )
        self._resumed = self._clock()


def refresh(
    cache: EmbeddingCache,
    table_index: int,
    table: TableSpec,
    chain: DatabaseChain,
    fraction_per_iteration: float,
    pace: Pace | None = None,
) -> RefreshReport:
    """Fetch the current vector of every resident key of one table; erase keys that no database has.

    No key becomes resident, and recency does not change. A refresh never overwrites a newer vector: it fetches a chunk again if
    the table was modified meanwhile, and erases the chunk if that keeps happening.

    Args:
        fraction_per_iteration: share of the capacity to fetch at once (`cache_refresh_percentage_per_iteration`), at most one
            chunk of memory; 0 means one chunk.
        pace: pauses before each chunk and makes chunks small enough not to disturb lookups; None runs at full speed, for a
            cache that serves no lookups yet.

    Raises:
        DatabaseError: the databases failed; remaining keys keep their vectors. A failure never erases.
        NotReadyError: `pace` ended the refresh; remaining keys keep their vectors.
    """
    keys = cache.dump(table_index)
    row_bytes = 8 + 4 * table.width
    step = min(_PACED_ROWS, max(1, _PACED_BYTES // row_bytes)) if pace else max(1, _CHUNK_BYTES // row_bytes)
    if fraction_per_iteration > 0:
        step = min(step, max(_MIN_STEP_ROWS, int(cache.stats(table_index).capacity_rows * min(fraction_per_iteration, 1.0))))
    out = np.empty((min(step, keys.size), table.width), np.float32)
    updated = 0
    for start in range(0, keys.size, step):
        if pace:
            pace.rest()
        chunk = keys[start : start + step]
        updated += _refresh_chunk(cache, table_index, table, chain, chunk, out[: chunk.size])
    return RefreshReport(updated, keys.size - updated)


def _refresh_chunk(
    cache: EmbeddingCache, table_index: int, table: TableSpec, chain: DatabaseChain, keys: KeyArray, out: FloatArray
) -> int:
    fence = chain.fence(table)
    for attempt in range(_ATTEMPTS):
        if attempt:
            time.sleep(0.01 * attempt)  # lets the conflicting modification end
        token = fence.token()
        found = np.zeros(keys.size, np.bool_)
        chain.fetch(table, keys, out, found)
        with fence.filling(token) as allowed:
            if allowed:
                if found.all():  # nearly always: no copy
                    cache.update(table_index, keys, out)
                    return keys.size
                cache.update(table_index, keys[found], out[found])
                cache.erase(table_index, keys[~found])
                return int(np.count_nonzero(found))
    cache.drop(table_index, keys)  # always safe: the next lookup fetches the key again
    return 0
