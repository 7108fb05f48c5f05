"""Applies a log of online updates to the tables of one deployment, in order, for as long as it is in service.

One thread reads, decodes and applies; so nothing is decoded while a batch is applied, and memory is bounded by what the log
reads ahead and one batch. A table whose database fails keeps what it was about to apply, its partitions are paused, and the
others go on. After a crash each table is read again from what its database says; what is then applied again changes nothing.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

import numpy as np

from hps.configuration.tiers import UpdateSourceConfig
from hps.considerate import considerate
from hps.databases.base import LogPosition, RowChanges
from hps.errors import HPSError, NotReadyError, UpdateFormatError
from hps.lifetimes import close_at_exit, disown_in_children
from hps.progress import TableProgress
from hps.types import IndexArray
from hps.updates.base import Message, Partition, UpdateLog
from hps.updates.dead_letters import DeadLetters
from hps.updates.framing import HIGHEST_SEQUENCE, Changes, decode, sequence_of
from hps.updates.metrics import TableStatus, UpdateMetrics
from hps.updates.target import UpdateTarget

_log = logging.getLogger(__name__)

REPLACEMENT_WAIT_S: Final = 30.0
"""For how long a feed whose target is out of service waits for another one before it ends."""

_CONSIDERATE_ROWS = 8192  # of a batch; a feed that cannot keep up in small pieces gets larger ones, and then hurries
_LONGEST_POLL_S = 0.5  # a feed ends as soon as that
_LONGEST_BACKOFF_S = 5.0
_LATE_S = 60.0  # which the log mentions
_LATE_SAID_AGAIN_S = 60.0
_LOST_SHOWN_S = 3600.0  # for so long a status speaks of messages that are gone


@dataclass(frozen=True, slots=True)
class FollowedTable:
    """A table that follows a topic. *Immutable.*

    Attributes:
        index: of the table in its deployment.
        name: of the table.
        topic: where its updates come from.
        dim: elements of a vector.
        key_bytes: 8, or 4 where HugeCTR's messages have such keys.
        start: the position of the last message that its model files contain, by `str(Partition)`; from their manifest.
    """

    index: int
    name: str
    topic: str
    dim: int
    key_bytes: int
    start: Mapping[str, str]


class UpdateFeed:
    """Follows the log of all tables of one deployment. *Thread-safe.*

    A table begins where its database says that it has been, else behind what its model files contain, else at
    `update_source.begin`.

    Args:
        model, version: which deployment this is.
        tables: those of its tables that follow a topic, each of its own.
        target: applies changes.
        log: not yet followed; the feed closes it.
        dead_letters: gets messages that cannot be applied; whoever made it closes it, after the feed.
        settings: `update_source`.
        metrics: where rows are counted.
        replacement_wait_s: see `REPLACEMENT_WAIT_S`.
        clock: tells seconds, from any start.
        now_us: tells microseconds since 1970.
    """

    def __init__(
        self,
        model: str,
        version: str,
        tables: Sequence[FollowedTable],
        target: UpdateTarget,
        log: UpdateLog,
        dead_letters: DeadLetters,
        settings: UpdateSourceConfig,
        metrics: UpdateMetrics,
        *,
        replacement_wait_s: float = REPLACEMENT_WAIT_S,
        clock: Callable[[], float] = time.monotonic,
        now_us: Callable[[], int] = lambda: time.time_ns() // 1000,
    ) -> None:
        self._model = model
        self._version = version
        self._target = target
        self._log = log
        self._dead_letters = dead_letters
        self._settings = settings
        self._metrics = metrics
        self._replacement_wait_s = replacement_wait_s
        self._clock = clock
        self._now_us = now_us
        self._tables = {table.topic: _Table(table, TableProgress(HIGHEST_SEQUENCE, 0, clock)) for table in tables}
        widest = max(8 + 4 * table.dim for table in tables)
        self._most_bytes = min(settings.max_batch_size * widest, settings.read_ahead_bytes)  # that are polled at once
        self._uncommitted = 0  # messages
        self._orphaned_at: float | None = None  # since when the target has been out of service
        self._problem = ""  # of the whole feed
        self._look_at = 0.0  # when to look for tables that are late
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to follow, in a thread. Called once."""
        self._thread = threading.Thread(target=self._run, name=f"hps-updates-{self._model}", daemon=True)
        self._thread.start()
        self._metrics.show(self._shown)
        close_at_exit(self, UpdateFeed.stop)
        disown_in_children(self)

    def stop(self, timeout_s: float = 10.0) -> bool:
        """End after the batch that is being applied; returns whether it has ended in time. Stopping twice changes nothing."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(timeout_s)
            return not self._thread.is_alive()
        return True

    def disown(self) -> None:
        """In a forked child, where the thread is not: be stopped."""
        self._thread = None
        self._stopping = threading.Event()
        self._stopping.set()

    @property
    def alive(self) -> bool:
        """Whether it follows; False once it has been stopped, or has waited in vain for another target."""
        return self._thread is not None and self._thread.is_alive()

    def replace_target(self, target: UpdateTarget) -> None:
        """Apply to another deployment of the same tables from now on, also what the last one refused."""
        self._target = target

    def status(self) -> list[TableStatus]:
        """How far each table is."""
        behind, problem = self._log.behind(), self._problem or self._log.problem
        return [self._status(table, behind, not problem, problem) for table in self._tables.values()]

    def wait_for_lag(self, lag_s: float, timeout_s: float, give_up: Callable[[], bool]) -> bool:
        """Wait until every table is at most so far behind; False when the time is over, on `give_up`, or when the feed ends."""
        deadline = self._clock() + timeout_s
        while any(one.lag_s is None or one.lag_s > lag_s for one in self.status()):
            if give_up() or not self.alive or self._clock() >= deadline or self._stopping.wait(0.05):
                return False
        return True

    def _run(self) -> None:
        try:
            if self._begin():
                while not self._stopping.is_set():
                    self._round()
                self._finish()
        except _Orphaned:
            self._problem = "its deployment is out of service, and no other has taken over; nothing is followed any more"
            _log.warning("updates of model %r, version %s: %s", self._model, self._version, self._problem)
        finally:
            self._log.close()

    def _begin(self) -> bool:
        """Ask the databases how far each table is, and follow the log from there; False if the feed was stopped before.

        A log is followed once, for all tables, so here a table that fails holds up the others.
        """
        for table in self._tables.values():
            while not self._follow(table):
                if self._stopping.wait(self._pause_s([table])):
                    return False
        after = {one: at.position for table in self._tables.values() for one, at in table.applied.items() if at.position}
        self._log.follow(list(self._tables), after, self._settings.begin)
        return True

    def _follow(self, table: "_Table") -> bool:
        target = self._target
        try:
            stored = target.follow_log(table.followed.index)
        except Exception as error:  # noqa: BLE001 - tried again
            self._fail(table, target, error)
            return False
        starts = {name: LogPosition(position) for name, position in table.followed.start.items()}
        table.stored = _of_topic(table.followed.topic, stored)
        table.applied = _of_topic(table.followed.topic, starts) | table.stored
        self._succeed(table)
        return True

    def _round(self) -> None:
        """Take what has come, and apply it; where nothing has, store how far everything is applied."""
        failing = [table for table in self._tables.values() if table.refused_by]
        messages = self._poll(min(self._settings.poll_timeout_ms / 1000, _LONGEST_POLL_S, self._pause_s(failing)))
        for partition, what in self._log.lost().items():
            table = self._tables[partition.topic]
            _log.error("updates of model %r, %s: %s", self._model, partition, what)
            self._metrics.gaps.labels(self._model, table.followed.name).inc()
            table.lost, table.lost_at = f"{partition}: {what}", self._clock()
        for partition, position in self._log.begun().items():
            table = self._tables[partition.topic]
            table.applied = {partition: LogPosition(position)} | table.applied
        for message in messages:
            self._tables[message.partition.topic].messages.append(message)
        for table in failing:
            if table.messages:  # of a partition that was not known
                self._pause(table)
        for table in self._tables.values():
            if not messages or table.unstored >= self._settings.max_commit_interval:
                self._store(table)
            self._work(table)
        if not messages:
            self._note_quiet()
        if self._clock() >= self._look_at:
            self._say_late()
        if self._uncommitted >= (self._settings.max_commit_interval if messages else 1):
            self._commit()

    def _poll(self, timeout_s: float) -> list[Message]:
        try:
            messages = self._log.poll(timeout_s, self._most_bytes)
        except Exception as error:  # noqa: BLE001 - a bug: it raises nothing
            if not self._problem:
                _log.exception("updates of model %r: polling the log failed; it is tried again", self._model)
            self._problem = f"polling the log failed: {error!r}"
            self._stopping.wait(_LONGEST_POLL_S)
            return []
        self._problem = ""
        return messages

    def _work(self, table: "_Table") -> None:
        """Apply what a table has, batch after batch, until nothing is left or it fails."""
        while (table.batch or table.messages) and not self._stopping.is_set():
            if table.refused_by is self._target and self._clock() < table.retry_at:
                return
            target = self._target
            try:
                table.batch = table.batch or self._gather(table)
                self._apply(table, table.batch, target)
            except Exception as error:  # noqa: BLE001 - tried again
                self._fail(table, target, error)
                return

    def _gather(self, table: "_Table") -> "_Batch":
        """Decode messages until they have the rows of a batch, or all that are there."""
        followed, applied = table.followed, dict(table.applied)
        parts: list[Changes] = []
        sequences: list[int] = []
        times: list[int] = []
        rows = taken = size_bytes = last = 0
        here, position = None, ""
        for message in table.messages:
            if rows >= self._settings.max_batch_size:
                break
            if message.partition is not here:  # seldom: a log hands out what it has of one, then of the next
                if here is not None:
                    applied[here] = LogPosition(position, last)
                here = message.partition
                last = applied[here].sequence if here in applied else 0
            taken += 1
            changes, sequence = self._decode(table, message, last)
            if changes is not None:
                size_bytes += len(message.value)
                parts.append(changes)
                sequences.append(sequence)
                times.append(changes.time_us or min(message.time_us, HIGHEST_SEQUENCE))
                rows += changes.keys.size + changes.deleted_keys.size
            position, last = message.position, max(last, sequence)
        if here is not None:
            applied[here] = LogPosition(position, last)
        pieces = _pieces(_resolve(parts, sequences, followed.dim), self._settings.max_batch_size) if rows else []
        deletes = sum(part.deleted_keys.size for part in parts)
        counts = np.array([part.keys.size + part.deleted_keys.size for part in parts], np.int64)
        batch = _Batch(pieces, applied, taken, size_bytes, rows - deletes, deletes, np.array(times, np.int64), counts)
        del table.messages[:taken]  # at last: had anything failed, they would still be there
        return batch

    def _decode(self, table: "_Table", message: Message, last: int) -> tuple[Changes | None, int]:
        """What a message says, and its place in the order; no changes if it says nothing, or is a dead letter.

        Args:
            last: the highest sequence in its partition before it.
        """
        followed, most_bytes = table.followed, self._settings.max_message_bytes
        try:
            changes = decode(
                message.value, followed.dim, followed.key_bytes, key=message.key, table=followed.name, most_bytes=most_bytes
            )
        except Exception as error:  # noqa: BLE001 - a bug there must not end the stream either
            reason = error.reason if isinstance(error, UpdateFormatError) else "internal"
            if reason == "internal" and reason not in table.dead_letters:
                _log.exception("updates of model %r: decoding %s at %s", self._model, message.partition, message.position)
            sequence = sequence_of(message.value) or last + 1  # it has its place, too: it may be repaired and replayed
            self._dead_letters.add(message, reason, str(error), sequence)
            self._metrics.dead_letters.labels(self._model, followed.name, reason).inc()
            table.dead_letters = table.dead_letters | {reason: table.dead_letters.get(reason, 0) + 1}
            return None, sequence
        if changes is None:
            return None, 0
        return changes, changes.sequence or max(min(message.time_us, HIGHEST_SEQUENCE), last + 1)

    def _apply(self, table: "_Table", batch: "_Batch", target: UpdateTarget) -> None:
        positions = {str(partition): at for partition, at in table.applied.items()}
        while batch.pieces:
            began = self._clock()
            piece = batch.pieces[-1]
            with considerate() if piece.keys.size <= _CONSIDERATE_ROWS else nullcontext():
                batch.stale += piece.keys.size - target.apply(table.followed.index, piece, positions)
            batch.pieces.pop()
            table.stored, table.unstored = table.applied, 0
            self._succeed(table)
            self._stopping.wait((self._clock() - began) * (1 / self._settings.device_share - 1))
        table.applied, table.batch = table.applied | batch.applied, None
        table.unstored += batch.messages
        self._uncommitted += batch.messages
        self._count(table, batch)

    def _count(self, table: "_Table", batch: "_Batch") -> None:
        where, metrics = (self._model, table.followed.name), self._metrics
        metrics.bytes.labels(*where).inc(batch.size_bytes)
        if not batch.rows.size:
            return
        for change, count in (("upsert", batch.upserts), ("delete", batch.deletes)):
            metrics.rows.labels(*where, change).inc(count)
        metrics.stale_rows.labels(*where).inc(batch.stale)
        table.progress.advance(batch.upserts + batch.deletes)
        table.stale_rows += batch.stale
        known = batch.times_us > 0
        metrics.observe_visible(*where, (self._now_us() - batch.times_us[known]) / 1e6, batch.rows[known])
        table.newest_us = max(table.newest_us, int(batch.times_us.max()))

    def _fail(self, table: "_Table", target: UpdateTarget, error: Exception) -> None:
        """Let a table wait, and end the feed if its target has been out of service for too long."""
        now = self._clock()
        if not isinstance(error, NotReadyError) or target is not self._target:
            self._orphaned_at = None
        elif self._orphaned_at is None:
            self._orphaned_at = now
        elif now - self._orphaned_at >= self._replacement_wait_s:
            raise _Orphaned
        where = f"updates of model {self._model!r}, table {table.followed.name!r}"
        if not table.problem:
            known = isinstance(error, HPSError)
            _log.warning("%s: %s; they are tried again until it succeeds", where, error, exc_info=None if known else error)
        table.problem = str(error) or repr(error)
        self._metrics.failures.labels(self._model, table.followed.name).inc()
        shortest_s = max(self._settings.failure_backoff_ms, 1) / 1000
        table.backoff_s = min(max(2 * table.backoff_s, shortest_s), max(_LONGEST_BACKOFF_S, shortest_s))
        table.retry_at, table.refused_by = now + table.backoff_s, target
        self._pause(table)

    def _succeed(self, table: "_Table") -> None:
        if table.problem:
            _log.info("updates of model %r, table %r: they are applied again", self._model, table.followed.name)
        self._orphaned_at = None
        table.problem, table.backoff_s, table.refused_by = "", 0.0, None
        if table.paused:
            self._log.resume(table.paused)
            table.paused = []

    def _pause(self, table: "_Table") -> None:
        table.paused = [partition for partition in self._log.behind() if partition.topic == table.followed.topic]
        if table.paused:  # else the log is not followed yet
            self._log.pause(table.paused)

    def _pause_s(self, failing: Sequence["_Table"]) -> float:
        """How long until one of these tables is to be tried again."""
        due = [0.0 if table.refused_by is not self._target else table.retry_at - self._clock() for table in failing]
        return max(0.0, min(due, default=_LONGEST_POLL_S))

    def _store(self, table: "_Table") -> None:
        """Let the database know how far everything is applied, where it does not."""
        if table.batch is None and table.applied != table.stored:
            nothing = np.empty(0, np.int64)
            changes = RowChanges(nothing, np.empty((0, table.followed.dim), np.float32), nothing)
            table.batch = _Batch([changes], table.applied, 0, 0, 0, 0, nothing, nothing)

    def _finish(self) -> None:
        """Store and commit how far everything is applied; what fails is applied again at the next start."""
        target = self._target
        for table in self._tables.values():
            self._store(table)
            if table.batch and not table.batch.messages and not table.problem:
                with suppress(Exception):
                    self._apply(table, table.batch, target)
        self._commit()

    def _commit(self) -> None:
        self._uncommitted = 0
        positions = {one: at.position for table in self._tables.values() for one, at in table.applied.items() if at.position}
        try:
            self._log.commit(positions)
        except Exception:  # noqa: BLE001 - a bug: it raises nothing; and only people read what is committed
            _log.exception("updates of model %r: committing positions failed", self._model)

    def _note_quiet(self) -> None:
        behind, now = self._log.behind(), self._clock()
        for table in self._tables.values():
            if self._behind(table, behind) == 0:
                table.quiet_at = now

    def _say_late(self) -> None:
        """Log which tables are late; the next time in a minute."""
        late = [one for one in self.status() if (one.lag_s or 0.0) > _LATE_S]
        self._look_at = self._clock() + (_LATE_SAID_AGAIN_S if late else 1.0)
        for one in late:
            behind = "" if one.behind is None else f", {one.behind} messages behind"
            text = "updates of model %r, table %r are late: lag %.0f s%s; %.0f rows are applied a second%s"
            _log.warning(text, one.model, one.table, one.lag_s, behind, one.rows_per_s, one.problem and f"; {one.problem}")

    def _behind(self, table: "_Table", behind: Mapping[Partition, int | None]) -> int | None:
        counts = [count for partition, count in behind.items() if partition.topic == table.followed.topic]
        known = [count for count in counts if count is not None]
        if not counts or len(known) < len(counts):
            return None
        batch = table.batch
        return sum(known) + len(table.messages) + (batch.messages if batch else 0)

    def _status(self, table: "_Table", behind: Mapping[Partition, int | None], connected: bool, problem: str) -> TableStatus:
        count, now = self._behind(table, behind), self._clock()
        lags_s = [0.0] if count == 0 else []
        if table.newest_us:
            lags_s.append(max(0.0, (self._now_us() - table.newest_us) / 1e6))
        if table.quiet_at is not None:
            lags_s.append(now - table.quiet_at)
        lost = table.lost if table.lost and now - table.lost_at < _LOST_SHOWN_S else ""
        return TableStatus(
            model=self._model,
            version=self._version,
            table=table.followed.name,
            topic=table.followed.topic,
            positions={str(partition): at.position for partition, at in table.applied.items() if at.position},
            behind=count,
            lag_s=min(lags_s, default=None),
            rows_per_s=table.progress.rows_per_s,
            rows=table.progress.rows_done,
            stale_rows=table.stale_rows,
            dead_letters=table.dead_letters,
            problem="; ".join(filter(None, (table.problem, problem, lost))),
            connected=connected,
        )

    def _shown(self) -> list[TableStatus]:
        return [] if self._stopping.is_set() else self.status()


class _Orphaned(Exception):
    """The target has been out of service for too long."""


@dataclass(slots=True)
class _Batch:
    """Messages that are applied together.

    Attributes:
        pieces: what is still to be applied: distinct keys.
        applied: how far the table is when all of it is applied.
        messages, size_bytes, upserts, deletes: what it came from.
        times_us, rows: of each message that changes something, (n,) int64: when it was made, 0 if unknown, and its rows.
        stale: rows that were older than what was there.
    """

    pieces: list[RowChanges]
    applied: dict[Partition, LogPosition]
    messages: int
    size_bytes: int
    upserts: int
    deletes: int
    times_us: IndexArray
    rows: IndexArray
    stale: int = 0


@dataclass(slots=True)
class _Table:
    """Where a table is. Others than the thread may read; dicts are replaced, never changed.

    Attributes:
        applied: how far everything is applied to every tier.
        stored: how far its database says that it is.
        unstored: messages since.
        messages: that were polled and are not decoded.
        batch: what is being applied, or is tried again.
        refused_by: the target that failed last; None while none does.
        newest_us: when the newest change that is applied was made.
        quiet_at: when nothing was behind last.
    """

    followed: FollowedTable
    progress: TableProgress
    applied: dict[Partition, LogPosition] = field(default_factory=dict)
    stored: dict[Partition, LogPosition] = field(default_factory=dict)
    unstored: int = 0
    messages: list[Message] = field(default_factory=list)
    batch: _Batch | None = None
    refused_by: UpdateTarget | None = None
    retry_at: float = 0.0
    backoff_s: float = 0.0
    paused: list[Partition] = field(default_factory=list)
    problem: str = ""
    lost: str = ""
    lost_at: float = 0.0
    stale_rows: int = 0
    dead_letters: dict[str, int] = field(default_factory=dict)
    newest_us: int = 0
    quiet_at: float | None = None


def _of_topic(topic: str, positions: Mapping[str, LogPosition]) -> dict[Partition, LogPosition]:
    """Those of a topic; those of another are from when the model had another name."""
    named = ((name.rpartition("/"), at) for name, at in positions.items())
    return {Partition(topic, int(number)): at for (its, _, number), at in named if its == topic}


def _resolve(parts: Sequence[Changes], sequences: Sequence[int], dim: int) -> RowChanges:
    """The latest change of each key: by sequence, and of those with the same, the one that came last."""
    counts = [part.keys.size + part.deleted_keys.size for part in parts]
    keys = np.concatenate([some for part in parts for some in (part.keys, part.deleted_keys)])
    of_rows = np.repeat(np.array(sequences, np.int64), counts)
    if keys.size == sum(part.keys.size for part in parts):
        deleted = None
        vectors = np.concatenate([part.vectors for part in parts])
    else:
        deleted, vectors = np.ones(keys.size, np.bool_), np.zeros((keys.size, dim), np.float32)
        start = 0
        for part, count in zip(parts, counts, strict=True):
            deleted[start : start + part.keys.size] = False
            vectors[start : start + part.keys.size] = part.vectors
            start += count
    changes = RowChanges(keys, vectors, of_rows, deleted)
    ordered = np.sort(keys)
    if not (ordered[1:] == ordered[:-1]).any():  # nearly always
        return changes
    order = np.lexsort((of_rows, keys))  # stable: of equal ones the last that came stays the last
    latest = order[np.append(keys[order][1:] != keys[order][:-1], True)]
    return RowChanges(keys[latest], vectors[latest], of_rows[latest], None if deleted is None else deleted[latest])


def _pieces(changes: RowChanges, most_rows: int) -> list[RowChanges]:
    """Cut changes into pieces of about the same size."""
    count = -(-changes.keys.size // most_rows)
    edges = [changes.keys.size * i // count for i in range(count + 1)]
    cuts = [slice(low, high) for low, high in pairwise(edges)]
    deleted = changes.deleted
    return [
        RowChanges(changes.keys[cut], changes.vectors[cut], changes.sequences[cut], None if deleted is None else deleted[cut])
        for cut in cuts
    ]
