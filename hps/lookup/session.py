"""The hot path: the lookups of one model on one device."""

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hps.background import BackgroundQueue
from hps.cache.base import EmbeddingCache, Misses, Segment, TableMisses, Workspace
from hps.lookup.chain import DatabaseChain
from hps.lookup.coalescing import FetchCoalescer
from hps.lookup.key_limits import refuse_too_many_keys
from hps.lookup.workspaces import WorkspacePool
from hps.metrics import Metrics
from hps.types import BoolArray, KeyArray, TableSpec

_log = logging.getLogger(__name__)
_STAGE_ROWS = 16_384  # vectors fetched before their copy to the device begins; the next chunk is fetched meanwhile


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """How a session behaves; from the model's configuration. Immutable.

    Attributes:
        hit_rate_threshold: a table whose hit rate in a lookup is at or above it is answered at once, with defaults for
            its missing keys, which are fetched in the background. Above 1, every lookup is complete.
        workspaces: lookups that may run at once.
        workspace_timeout_s: how long a lookup waits for a workspace.
        insert_queue_length: batches of missing keys that may wait for background insertion.
    """

    hit_rate_threshold: float = 0.9
    workspaces: int = 1
    workspace_timeout_s: float = 1.0
    insert_queue_length: int = 64


class LookupSession:
    """Answers lookups from the embedding cache, then the databases, then the default vector. *Thread-safe.*

    Args:
        tables: the model's tables, in the order of their ids.
        cache: of this model and device.
        chain: the host tiers.
        coalescer: shared by all sessions of the chain.
    """

    def __init__(
        self,
        tables: Sequence[TableSpec],
        cache: EmbeddingCache,
        chain: DatabaseChain,
        coalescer: FetchCoalescer,
        settings: SessionSettings,
        metrics: Metrics,
    ) -> None:
        self.tables = tuple(tables)
        self.cache = cache
        self._chain = chain
        self._coalescer = coalescer
        self._threshold = settings.hit_rate_threshold
        self._metrics = metrics
        self._max_keys = [table.max_keys for table in self.tables]
        model = self.tables[0].model_name
        self._counters = [metrics.table(table.model_name, table.table_name) for table in self.tables]
        self._seconds = metrics.lookup_seconds.labels(model)
        owner = f"model {model!r} on device {cache.device_id}"
        self._workspaces = WorkspacePool(
            cache.create_workspace,
            settings.workspaces,
            settings.workspace_timeout_s,
            owner,
            metrics.workspace_timeouts.labels(model),
        )
        self._inserts = BackgroundQueue("insertion", settings.insert_queue_length, 1, metrics)
        self._pending_lock = threading.Lock()
        self._pending = [np.empty(0, np.int64) for _ in self.tables]  # ascending: queued or being inserted

    def lookup(self, segments: Sequence[Segment]) -> None:
        """Write the vector of every key to its row of `out`, and `found` where asked.

        Args:
            segments: at most one a table; checked and adopted by the caller (dtype, layout, place).

        Raises:
            TooManyKeysError: a segment has more keys than the table's `max_keys`.
            WorkspaceTimeoutError: all workspaces stayed busy.
            DatabaseError: keys are missing and the authoritative database did not answer; `out` is then unspecified.
        """
        start = time.perf_counter()
        refuse_too_many_keys(self.tables, self._max_keys, segments)
        with self._workspaces.take() as workspace:
            local = self.cache.adopt(workspace, segments)
            misses = self.cache.query(workspace, local)
            missing = misses.count
            if missing:
                self._answer_misses(workspace, local, misses)
            self.cache.finish(workspace, local)
        self._count(segments, misses.counts if missing else None)
        self._seconds.observe(time.perf_counter() - start)

    def drain(self, timeout_s: float) -> bool:
        """Wait for queued insertions; False when that takes longer."""
        return self._inserts.drain(timeout_s)

    def close(self, timeout_s: float = 10.0) -> None:
        """Refuse new lookups, let running ones and queued insertions end, and free the cache."""
        if not self._workspaces.close(timeout_s):
            model = self.tables[0].model_name
            _log.warning("model %r: lookups still run after %g s; its cache is left to them", model, timeout_s)
            return
        self._inserts.close()
        self.cache.close()

    def _answer_misses(self, workspace: Workspace, segments: Sequence[Segment], misses: Misses) -> None:
        deferred = {
            segment.table
            for segment, missing in zip(segments, misses.counts, strict=True)
            if missing and 1.0 - missing / segment.n >= self._threshold
        }
        for missed in self.cache.unique(workspace, misses):
            if missed.segment.table in deferred:
                self.cache.scatter(workspace, missed, np.zeros(missed.keys.size, np.bool_))
                self._insert_later(missed.segment.table, missed.keys)
            else:
                self._fetch_now(workspace, missed)
        if deferred:
            with self._metrics.lock:
                for segment, missing in zip(segments, misses.counts, strict=True):
                    if segment.table in deferred:
                        self._counters[segment.table].deferred += missing

    def _fetch_now(self, workspace: Workspace, missed: TableMisses) -> None:
        table = self.tables[missed.segment.table]
        fence = self._chain.fence(table)
        token = fence.token()
        buffer = self.cache.fetch_buffer(workspace, missed)
        found = np.zeros(missed.keys.size, np.bool_)
        for start in range(0, missed.keys.size, _STAGE_ROWS):
            rows = slice(start, min(start + _STAGE_ROWS, missed.keys.size))
            self._coalescer.fetch(table, fence, missed.keys[rows], buffer[rows], found[rows])
            self.cache.stage(workspace, missed, rows.start, rows.stop)
        self.cache.scatter(workspace, missed, found)
        with fence.filling(token) as allowed:
            if allowed:
                self.cache.insert_fetched(workspace, missed, found)
        self._count_defaults(missed.segment.table, found)

    def _insert_later(self, table_index: int, keys: KeyArray) -> None:
        """Queue the insertion of keys that no queued insertion has already."""
        with self._pending_lock:
            fresh = keys[~_contained(self._pending[table_index], keys)]
            if not fresh.size:
                return
            self._pending[table_index] = np.union1d(self._pending[table_index], fresh)
        if not self._inserts.submit(lambda: self._insert(table_index, fresh)):
            self._done(table_index, fresh)

    def _insert(self, table_index: int, keys: KeyArray) -> None:
        try:
            table = self.tables[table_index]
            fence = self._chain.fence(table)
            token = fence.token()
            vectors = np.empty((keys.size, table.dim), np.float32)
            found = np.zeros(keys.size, np.bool_)
            self._coalescer.fetch(table, fence, keys, vectors, found)
            with fence.filling(token) as allowed:
                if allowed:
                    self.cache.insert(table_index, keys[found], vectors[found])
            self._count_defaults(table_index, found)
        finally:
            self._done(table_index, keys)

    def _done(self, table_index: int, keys: KeyArray) -> None:
        with self._pending_lock:
            pending = self._pending[table_index]
            self._pending[table_index] = pending[~_contained(keys, pending)]

    def _count(self, segments: Sequence[Segment], missing_counts: Sequence[int] | None) -> None:
        """Count the keys of a lookup; None where none was missing, which is the quicker way for many tables."""
        every = self._counters
        with self._metrics.lock:
            for segment in segments:
                counters, n = every[segment.table], segment.n
                counters.keys += n
                counters.hits[0] += n
            if missing_counts is not None:
                for segment, missing in zip(segments, missing_counts, strict=True):
                    counters = every[segment.table]
                    counters.hits[0] -= missing
                    counters.misses[0] += missing

    def _count_defaults(self, table_index: int, found: BoolArray) -> None:
        absent = found.size - int(np.count_nonzero(found))
        if absent:
            with self._metrics.lock:
                self._counters[table_index].defaults += absent


def _contained(ascending: KeyArray, keys: KeyArray) -> BoolArray:
    """Which of `keys` stand in `ascending`."""
    if not ascending.size:
        return np.zeros(keys.size, np.bool_)
    place = np.minimum(np.searchsorted(ascending, keys), ascending.size - 1)
    return np.equal(ascending[place], keys)
