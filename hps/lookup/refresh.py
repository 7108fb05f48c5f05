"""Gives the resident keys of an embedding cache the vectors that the databases have now."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hps.cache.base import EmbeddingCache
from hps.errors import NotReadyError
from hps.lookup.chain import DatabaseChain
from hps.types import FloatArray, KeyArray, TableSpec

_ATTEMPTS = 5  # to refresh a chunk of a table that is being modified
_CHUNK_BYTES = 16 * 1024 * 1024  # keys and vectors fetched at once
_PACED_ROWS = 4096  # the same beside lookups, in rows: half a millisecond's work; 512 at a time disturb them more
_PACED_BYTES = 1 << 20  # and at most so many
_MIN_STEP_ROWS = 64  # the smallest step; HugeCTR's is one of its sets


@dataclass(frozen=True, slots=True)
class RefreshReport:
    """How many resident keys got their current vector, and how many were erased because no database has them. *Immutable.*"""

    updated: int
    erased: int


class Pace:
    """Lets a refresh work for a share of the time, and ends it when told. *One per thread.*

    What the share bounds is the time of the refresh's own steps: fetching a chunk from the databases and writing it to the
    device. The device's time is a part of that, so it takes less than the share.

    Args:
        share: of the time, above 0, at most 1.
        wait: waits so many seconds; True says that the refresh is to end.
        clock: tells seconds.
    """

    def __init__(self, share: float, wait: Callable[[float], bool], clock: Callable[[], float] = time.perf_counter) -> None:
        self._rest_of_work = 1 / share - 1
        self._wait = wait
        self._clock = clock
        self._resumed = clock()

    def rest(self) -> None:
        """Pause for as long as the work since the last pause asks for.

        Raises:
            NotReadyError: the refresh is to end.
        """
        if self._wait((self._clock() - self._resumed) * self._rest_of_work):
            raise NotReadyError(
                "refreshing an embedding cache: its model is being taken out of service; the rest is left as it is"
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
        pace: pauses before each chunk, which is then small enough for lookups not to notice it; None is full speed, for a
            cache that nobody looks up yet.

    Raises:
        DatabaseError: the databases failed; keys not yet reached keep their vectors. A failure never erases.
        NotReadyError: `pace` ended it; keys not yet reached keep their vectors.
    """
    keys = cache.dump(table_index)
    row_bytes = 8 + 4 * table.dim
    step = min(_PACED_ROWS, max(1, _PACED_BYTES // row_bytes)) if pace else max(1, _CHUNK_BYTES // row_bytes)
    if fraction_per_iteration > 0:
        step = min(step, max(_MIN_STEP_ROWS, int(cache.stats(table_index).capacity_rows * min(fraction_per_iteration, 1.0))))
    out = np.empty((min(step, keys.size), table.dim), np.float32)
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
            time.sleep(0.01 * attempt)  # gives the modification that was in the way time to end
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
    cache.erase(table_index, keys)  # always right: a key is fetched again when it is asked for
    return 0
