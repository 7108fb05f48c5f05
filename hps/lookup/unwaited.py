"""Lookups that wait for nothing: they are left on the caller's stream, or in a CUDA graph."""

import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hps.cache.base import CacheLookup, EmbeddingCache, StreamCapture, UnwaitedCounts
from hps.errors import DatabaseError, InvalidInputError, NotReadyError
from hps.metrics import Metrics
from hps.tensors.segments import Segment
from hps.types import TableSpec

_ASK_INTERVAL_S = 0.1  # between two calls that ask what became of earlier lookups: it takes 20 us a table


class _Need(NamedTuple):
    """What a lookup needs room for.

    Attributes:
        kind: its tables; and, of a pooled lookup, -1 without and -2 with weights or a max_norm.
        keys: of all tables.
        floats: of the vectors of all keys.
        bags: of all tables.
    """

    kind: tuple[int, ...]
    keys: int
    floats: int
    bags: int


class _Workspace:
    """A lookup, and what it was prepared for: by the kind of a lookup, the most that it has room for."""

    def __init__(self, lookup: CacheLookup) -> None:
        self.lookup = lookup
        self._room: dict[tuple[int, ...], _Need] = {}

    def has_room(self, need: _Need) -> bool:
        """Whether such a lookup can be captured."""
        most = self._room.get(need.kind)
        return most is not None and need.keys <= most.keys and need.floats <= most.floats and need.bags <= most.bags

    def prepare(self, segments: Sequence[Segment], need: _Need) -> None:
        """Look up, and make room for such lookups."""
        self.lookup.prepare(segments)
        most = self._room.get(need.kind, need)
        self._room[need.kind] = _Need(need.kind, *(max(pair) for pair in zip(most[1:], need[1:], strict=True)))


@dataclass(frozen=True, slots=True)
class _Captured:
    """A workspace that a graph uses whenever it is launched, until that is gone."""

    workspace: _Workspace
    gone: Callable[[], bool]


class UnwaitedLookups:
    """The lookups of one model on one device that wait for nothing. *Thread-safe.*

    They need every table attached as authoritative, and all tensors on the device. A key that could not be read, since a
    writer kept its bucket or the table was dropped, gets the default vector. What became of the keys is asked from time to
    time: so a call that comes a little later says so with an error.

    **Captures.** Nothing may be allocated while a stream is captured, and what a graph uses stays its own. So one workspace
    stands by that has served a lookup of the same tables and as many keys outside. A capture takes it, for all lookups that
    it captures one after the other, and gives it back when the graph is gone. Until then the cache is not freed.

    Args:
        tables: the model's tables, in the order of their ids.
        refusals: by table, why it is not attached as authoritative.
        metrics: where keys are counted.
    """

    def __init__(
        self, tables: Sequence[TableSpec], cache: EmbeddingCache, refusals: Mapping[int, str], metrics: Metrics
    ) -> None:
        self._tables = tables
        self._cache = cache
        self._refusals = refusals
        self._metrics = metrics
        self._dims = [table.dim for table in tables]
        self._counters = [metrics.table(table.model_name, table.table_name) for table in tables]
        self._lock = threading.Lock()  # of the workspaces
        self._counting = threading.Lock()  # of the counts
        self._standing_by: _Workspace | None = None
        self._captured: dict[Hashable, _Captured] = {}
        self._closed = False
        none = UnwaitedCounts(0, 0, 0, 0)
        self._counted = [none] * len(tables)
        self._hits = [0] * len(tables)  # keys less misses that are not in the metrics yet
        self._unread = [0] * len(tables)  # that a call has reported
        self._used = False
        self._ask_at = 0.0
        self._ended = False
        metrics.settle_by(self.settle)

    def check(self, segments: Sequence[Segment]) -> None:
        """Refuse what cannot be looked up without waiting, and report what earlier lookups could not read.

        Raises:
            InvalidInputError: a table is not attached as authoritative.
            DatabaseError: earlier lookups gave keys of these tables the default vector though nobody could read theirs.
        """
        if (now := time.monotonic()) >= self._ask_at and self._cache.capture_of(segments) is None:
            self._ask_at = now + _ASK_INTERVAL_S
            self.settle()
        for segment in segments:
            index = segment.table
            if index in self._refusals:
                raise InvalidInputError(
                    f"{self._doing(index)}: the device cannot answer all by itself: {self._refusals[index]}; use wait=True"
                )
            if (unread := self._counted[index].unread) != self._unread[index]:
                with self._counting:
                    new, self._unread[index] = unread - self._unread[index], unread
                if new:
                    raise DatabaseError(
                        f"{self._doing(index)}: earlier lookups could not read {new} keys in host memory, which got "
                        "the default vector: a writer kept their bucket, or the table was dropped; or offsets of bags did not "
                        "begin with 0, fell, or did not end with n. Look them up again; with wait=True the CPU answers them"
                    )

    def enqueue(
        self, segments: Sequence[Segment], take: Callable[[], CacheLookup], give_back: Callable[[CacheLookup], None]
    ) -> None:
        """Launch a lookup on the stream of its tensors, be it captured or not.

        Args:
            take, give_back: a workspace for a lookup that is not captured.

        Raises:
            InvalidInputError: a tensor is elsewhere, or nothing stands by for a capture.
            NotReadyError: they are closed.
        """
        self._used = True
        need = self._need_of(segments)
        if (capture := self._cache.capture_of(segments)) is not None:
            self._workspace_of(capture, need).lookup.enqueue(segments, captured=True)
            return
        workspace = self._standing_by
        if workspace is None or not workspace.has_room(need):
            self._stand_by(segments, need)
        else:
            lookup = take()
            try:
                lookup.enqueue(segments)
            finally:
                give_back(lookup)
        self.count(segments)

    def count(self, segments: Sequence[Segment]) -> None:
        """Count the keys of a lookup that was launched; what became of them is counted when it has ended."""
        with self._metrics.lock:
            for segment in segments:
                self._counters[segment.table].keys += segment.n
                self._hits[segment.table] += segment.n

    def settle(self) -> None:
        """Bring what became of the keys into the metrics. Of graphs that others launch, the misses are known, not the hits."""
        with self._counting:
            if self._ended or not self._used:  # the cache may be gone, or nothing was asked of it
                return
            for index, counters in enumerate(self._counters):
                now = self._cache.unwaited(index)
                before, self._counted[index] = self._counted[index], now
                misses = now.misses - before.misses
                with self._metrics.lock:
                    self._hits[index] -= misses
                    hits = max(0, self._hits[index])
                    self._hits[index] -= hits
                    counters.hits[0] += hits
                    counters.misses[0] += misses
                    counters.count_linked(now.linked - before.linked, now.absent - before.absent)

    def close(self) -> bool:
        """Take no more lookups; False while graphs are there that may still be launched."""
        with self._lock:
            self._closed = True
            self._reclaim()
            if self._captured:
                return False
        self.settle()
        with self._counting:
            self._ended = True
        return True

    def _workspace_of(self, capture: StreamCapture, need: _Need) -> _Workspace:
        with self._lock:
            self._refuse_if_closed()
            if (captured := self._captured.get(capture.key)) is not None:
                workspace = captured.workspace
            elif (standing_by := self._standing_by) is not None:
                workspace = standing_by
            else:
                workspace = None
            if workspace is None or not workspace.has_room(need):
                raise InvalidInputError(
                    f"capturing a lookup of model {self._tables[0].model_name!r}: got {need.keys} keys, expected no more "
                    "than in a lookup of the same tables with wait=False that ran before, since a capture cannot allocate "
                    "memory; run once, outside of the capture, what it is to capture, and capture it on one stream"
                )
            if captured is None:
                self._captured[capture.key] = _Captured(workspace, capture.watch())
                self._standing_by = None
            return workspace

    def _stand_by(self, segments: Sequence[Segment], need: _Need) -> None:
        """Answer a lookup that is larger than those before by the workspace that stands by. It may wait for that."""
        with self._lock:
            self._refuse_if_closed()
            self._reclaim()
            workspace = self._standing_by or _Workspace(self._cache.create_lookup())
            workspace.prepare(segments, need)
            self._standing_by = workspace

    def _reclaim(self) -> None:
        """Take back the workspaces of graphs that are gone."""
        for key in [key for key, captured in self._captured.items() if captured.gone()]:
            self._standing_by = self._captured.pop(key).workspace

    def _need_of(self, segments: Sequence[Segment]) -> _Need:
        kind = [segment.table for segment in segments]
        bags = 0
        poolings = [segment.pooling for segment in segments if segment.pooling is not None]
        if poolings:
            kind.append(-2 if any(one.weights is not None or one.max_norm for one in poolings) else -1)
            bags = sum([one.count for one in poolings])
        floats = sum([segment.n * self._dims[segment.table] for segment in segments])
        return _Need(tuple(kind), sum([segment.n for segment in segments]), floats, bags)

    def _doing(self, index: int) -> str:
        table = self._tables[index]
        return f"looking up table {table.table_name!r} of model {table.model_name!r} without waiting"

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise NotReadyError(f"model {self._tables[0].model_name!r}: was undeployed")
