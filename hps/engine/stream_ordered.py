"""Lookups that do not block: they are enqueued on the caller's stream or captured in a CUDA graph."""

import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple, cast

from hps.cache.base import (
    CacheLookup,
    EmbeddingCache,
    LookupGraph,
    StreamCapture,
    StreamOrdered,
    StreamOrderedCounts,
    StreamOrderedLookup,
)
from hps.errors import DatabaseError, HPSError, InvalidInputError, NotReadyError
from hps.statistics.metrics import Metrics
from hps.tensors.batch import Batch
from hps.types import TableSpec

_POLL_INTERVAL_S = 0.1  # between two reads of the device's counts; a read takes 20 us a table


class _Need(NamedTuple):
    """Room that a lookup needs, over all its tables."""

    kind: tuple[int, ...]  # its tables; a pooled lookup adds -1 without and -2 with weights or a max_norm
    keys: int
    floats: int  # of the vectors of all keys
    bags: int


class _Workspace:
    """A lookup workspace, and the largest lookup of each kind that it has room for."""

    def __init__(self, lookup: StreamOrderedLookup) -> None:
        self.lookup = lookup
        self._room: dict[tuple[int, ...], _Need] = {}

    def has_room(self, need: _Need) -> bool:
        """Return whether the workspace can serve a captured lookup of this size."""
        most = self._room.get(need.kind)
        return most is not None and need.keys <= most.keys and need.floats <= most.floats and need.bags <= most.bags

    def prepare(self, batch: Batch, need: _Need) -> None:
        """Run a lookup, which makes room for others of its size."""
        self.lookup.prepare(batch)
        most = self._room.get(need.kind, need)
        self._room[need.kind] = _Need(need.kind, *(max(pair) for pair in zip(most[1:], need[1:], strict=True)))


@dataclass(frozen=True, slots=True)
class _Captured:
    """A workspace in use by a graph until the graph is freed."""

    workspace: _Workspace
    freed: Callable[[], bool]


class StreamOrderedLookups:
    """The non-blocking lookups of one model on one device. *Thread-safe.*

    Every table must be attached as authoritative, and all tensors must be on the device. A key that could not be read, because
    a writer held its bucket or the table was dropped, gets the default vector; a later call raises the error.

    **Captures.** A stream capture cannot allocate, and a graph keeps its memory. One standby workspace has therefore served a
    lookup of the same tables and at least as many keys. A capture takes it for the lookups that it captures in sequence, and
    gives it back when the graph is freed. The cache is not freed before that.

    Args:
        refusals: by table, why it is not attached as authoritative.
    """

    def __init__(
        self, tables: Sequence[TableSpec], cache: EmbeddingCache, refusals: Mapping[int, str], metrics: Metrics
    ) -> None:
        self._tables = tables
        self._cache = cache if isinstance(cache, StreamOrdered) else None
        self._refusals = refusals
        self._metrics = metrics
        self._dims = [table.dim for table in tables]
        self._counters = [metrics.table(table.model_name, table.table_name) for table in tables]
        self._lock = threading.Lock()  # of the workspaces
        self._counting = threading.Lock()  # of the counts
        self._standby: _Workspace | None = None
        self._captured: dict[Hashable, _Captured] = {}
        self._closed = False
        none = StreamOrderedCounts(0, 0, 0, 0)
        self._counted = [none] * len(tables)
        self._hits = [0] * len(tables)  # keys less misses, not yet added to the metrics
        self._unread = [0] * len(tables)  # already reported by a call
        self._used = False
        self._next_poll = 0.0
        self._ended = False
        metrics.settling.add(self.settle)

    def check(self, batch: Batch) -> None:
        """Reject tables that need the host, and report keys that earlier lookups could not read.

        Raises:
            InvalidInputError: a table is not attached as authoritative.
            DatabaseError: earlier lookups gave keys of these tables the default vector because they could not be read.
        """
        cache = self._cache
        if cache is not None and (now := time.monotonic()) >= self._next_poll and cache.capture_of(batch) is None:
            self._next_poll = now + _POLL_INTERVAL_S
            self.settle()
        for index in batch.tables:
            if index in self._refusals:
                raise InvalidInputError(
                    f"{self._doing(index)}: the device cannot answer all keys alone: {self._refusals[index]}; use wait=True"
                )
            if (unread := self._counted[index].unread) != self._unread[index]:
                with self._counting:
                    new, self._unread[index] = unread - self._unread[index], unread
                if new:
                    raise DatabaseError(
                        f"{self._doing(index)}: earlier lookups could not read {new} keys in host memory, which got "
                        "the default vector: a writer held their bucket, or the table was dropped; or a static cache lacks "
                        "rows by now, so deploy the model again; or offsets of bags did not begin with 0, decreased, or did "
                        "not end with n. Look them up again, or use wait=True"
                    )

    def enqueue(self, batch: Batch, take: Callable[[], CacheLookup], give_back: Callable[[CacheLookup], None]) -> None:
        """Launch a lookup on the stream of its tensors, captured or not.

        Args:
            take, give_back: borrow and return a workspace for a lookup that is not captured.

        Raises:
            InvalidInputError: the cache cannot, a tensor is elsewhere, or no standby workspace fits the capture.
            NotReadyError: the lookups are closed.
        """
        cache = self._cache or self._capable()
        self._used = True
        need = self._need_of(batch)
        if (capture := cache.capture_of(batch)) is not None:
            self._workspace_of(capture, need).lookup.enqueue(batch, captured=True)
            return
        workspace = self._standby
        if workspace is None or not workspace.has_room(need):
            self._grow_standby(batch, need)
        else:
            lookup = cast(StreamOrderedLookup, take())  # of the same cache
            try:
                lookup.enqueue(batch)
            finally:
                give_back(lookup)
        self.count(batch)

    def record(self, batch: Batch, enqueue: Callable[[Batch], None]) -> LookupGraph:
        """Make a graph of a lookup; see `StreamOrdered.record`."""
        return self._capable().record(batch, enqueue)

    def count(self, batch: Batch) -> None:
        """Count the keys of a launched lookup; `settle` counts its hits and misses when it has ended."""
        self._used = True
        with self._metrics.lock:
            for table, n in zip(batch.tables, batch.sizes, strict=True):
                self._counters[table].keys += n
                self._hits[table] += n

    def forget(self) -> None:
        """Leave out what the device has counted so far: a graph that is captured runs on keys of nobody.

        But what could not be read is still reported, since it may be another's.
        """
        with self._counting:
            if not self._ended:
                self._counted = [self._capable().stream_ordered_counts(index) for index in range(len(self._tables))]

    def settle(self) -> None:
        """Add hits and misses to the metrics. Of graphs that other code launches only the misses are known."""
        with self._counting:
            if self._ended or not self._used:  # the cache may be freed, or no lookup ran on it
                return
            for index, counters in enumerate(self._counters):
                now = self._capable().stream_ordered_counts(index)
                before, self._counted[index] = self._counted[index], now
                misses = now.misses - before.misses
                with self._metrics.lock:
                    self._hits[index] -= misses
                    hits = max(0, self._hits[index])
                    self._hits[index] -= hits
                    counters.hits[0] += hits
                    counters.misses[0] += misses
                    counters.count_linked(now.linked - before.linked, now.absent - before.absent)
                    counters.defaults += now.settled - before.settled

    def close(self) -> bool:
        """Refuse further lookups; return False while graphs remain that may still be launched."""
        with self._lock:
            self._closed = True
            self._reclaim()
            if self._captured:
                return False
        with suppress(HPSError):  # the device failed
            self.settle()
        with self._counting:
            self._ended = True
        return True

    def _capable(self) -> StreamOrdered:
        if self._cache is None:
            raise InvalidInputError("looking up without waiting: this cache does not read host memory in place; use wait=True")
        return self._cache

    def _workspace_of(self, capture: StreamCapture, need: _Need) -> _Workspace:
        with self._lock:
            self._refuse_if_closed()
            if (captured := self._captured.get(capture.key)) is not None:
                workspace = captured.workspace
            elif (standing_by := self._standby) is not None:
                workspace = standing_by
            else:
                workspace = None
            if workspace is None or not workspace.has_room(need):
                raise InvalidInputError(
                    f"capturing a lookup of model {self._tables[0].model_name!r}: got {need.keys} keys, expected no more "
                    "than in a lookup of the same tables with wait=False that ran before, since a capture cannot allocate "
                    "memory; run once, outside of the capture, the same lookups, and capture them on one stream"
                )
            if captured is None:
                self._captured[capture.key] = _Captured(workspace, capture.watch())
                self._standby = None
            return workspace

    def _grow_standby(self, batch: Batch, need: _Need) -> None:
        """Run a lookup that is larger than all before on the standby workspace, which grows it. May block."""
        with self._lock:
            self._refuse_if_closed()
            self._reclaim()
            workspace = self._standby or _Workspace(self._capable().create_lookup())
            workspace.prepare(batch, need)
            self._standby = workspace

    def _reclaim(self) -> None:
        """Take back the workspaces of graphs that were freed."""
        for key in [key for key, captured in self._captured.items() if captured.freed()]:
            self._standby = self._captured.pop(key).workspace

    def _need_of(self, batch: Batch) -> _Need:
        kind = tuple(batch.tables)
        if batch.poolings:
            kind = (*kind, -1 - max([pooling.arithmetic for pooling in batch.poolings]))
        bags = sum([pooling.count for pooling in batch.poolings])
        floats = sum([n * self._dims[table] for table, n in zip(batch.tables, batch.sizes, strict=True)])
        return _Need(kind, sum(batch.sizes), floats, bags)

    def _doing(self, index: int) -> str:
        table = self._tables[index]
        return f"looking up table {table.table_name!r} of model {table.model_name!r} without waiting"

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise NotReadyError(f"model {self._tables[0].model_name!r}: was undeployed")
