"""Applies the log of online updates to the tables of one deployment, in order, while it is in service.

One thread reads, decodes and applies. It decodes nothing while it applies a batch, so memory is bounded by the log's
read-ahead and one batch. A table whose database fails keeps its batch and pauses its partitions; other tables continue. After
a crash each table is read again from the position that its database stored; applying a change again has no effect.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, Protocol, TypeAlias

import numpy as np

from hps.configuration.tiers import UpdateSourceConfig
from hps.errors import HPSError, InvalidInputError, NotReadyError, UpdateFormatError
from hps.ground.log_limits import LineLimit
from hps.ground.progress import TableProgress
from hps.ground.rows import encode
from hps.ground.threads.pacing import paced
from hps.ground.threads.workers import Worker
from hps.statistics.metrics import Metrics
from hps.statistics.snapshot import UpdateStatus
from hps.stores.base import LogPosition, Partition, RowChanges
from hps.types import IndexArray
from hps.updates.base import Message, UpdateLog
from hps.updates.dead_letters import DeadLetters
from hps.updates.framing import HIGHEST_SEQUENCE, Changes, decode, sequence_of

_log = logging.getLogger(__name__)

_REPLACEMENT_WAIT_S: Final = 30.0  # how long a feed waits for another target
_PACED_ROWS = 8192  # rows of a batch; a feed that falls behind gets larger batches
_LONGEST_POLL_S = 0.5  # bounds how long a stop takes
_LONGEST_BACKOFF_S = 5.0
_LATE_S = 60.0  # lag from which tables are logged as late
_UNREAD_TRIES, _HANDED_OVER_S = 5, 0.002  # while messages move from the log to the feed, and the pause between tries
_Unread: TypeAlias = tuple[Mapping[Partition, int | None], Mapping[Partition, float | None]]
_LATE_LOG_INTERVAL_S = 60.0
_REPORT_INTERVAL_S = 1.0
_FUTURE_US = 1_000_000  # how far ahead a claimed time may be
_LOST_SHOWN_S = 3600.0  # how long a status mentions lost messages


@dataclass(frozen=True, slots=True)
class TableTopic:
    """A table that follows a topic. *Immutable.*

    Attributes:
        key_bytes: 8, or 4 for HugeCTR messages with such keys.
        start: positions up to which the model files contain the log, from their manifest.
        row_dtype: how its vectors are stored.
    """

    index: int
    name: str
    topic: str
    dim: int
    key_bytes: int
    start: Mapping[Partition, LogPosition]
    row_dtype: str = "float32"


class UpdateTarget(Protocol):
    """The tables of a deployment, by index in the order of their ids. *Thread-safe.*"""

    def follow_log(self, index: int) -> dict[Partition, LogPosition]:
        """As `OrderedWrites.follow_log`; raises NotReadyError once the version is out of service."""

    def apply(self, index: int, changes: RowChanges, positions: Mapping[Partition, LogPosition]) -> int:
        """Apply changes to every tier, as `OrderedWrites.apply`. Lookups that start after it returns see them.

        Returns:
            Number of changes that were not older than the stored rows.

        Raises:
            DatabaseError: the database failed; call again with the same changes.
            NotReadyError: the version is no longer in service.
        """


class UpdateFeed:
    """Follows the log for all tables of one deployment. *Thread-safe.*

    A table starts at the position that its database stored, else at that of its model files, else at `update_source.begin`.

    Args:
        tables: each follows its own topic.
        log: not yet followed; the feed closes it.
        dead_letters: takes messages that cannot be applied; the caller closes it after the feed.
    """

    def __init__(
        self,
        model: str,
        version: str,
        tables: Sequence[TableTopic],
        target: UpdateTarget,
        log: UpdateLog,
        dead_letters: DeadLetters,
        settings: UpdateSourceConfig,
        metrics: Metrics,
    ) -> None:
        self._model = model
        self._version = version
        self._target = target
        self._log = log
        self._dead_letters = dead_letters
        self._settings = settings
        self._metrics = metrics
        self._tables = {table.topic: _Table(table, TableProgress(HIGHEST_SEQUENCE, 0, _clock)) for table in tables}
        widest = max(8 + 4 * table.dim for table in tables)
        self._most_bytes = min(settings.max_batch_size * widest, settings.read_ahead_bytes)  # per poll
        self._uncommitted = 0  # messages since the last commit
        self._orphaned_at: float | None = None  # when the target went out of service
        self._gave_up = False  # waiting for another target
        self._replacing = threading.Lock()
        self._problem = ""  # a problem of the feed, not of one table
        self._report_at = 0.0  # next report of tables that are late or cut off
        self._late_lines = LineLimit(1, _LATE_LOG_INTERVAL_S, _clock)
        self._received = 0  # messages that the log has delivered
        self._last_unread: _Unread = {}, {}
        self._worker = Worker(f"updates-{model}", self._run)

    def start(self) -> None:
        self._worker.start()
        self._metrics.feeds.add(self._running_status)

    def stop(self, timeout_s: float = 10.0) -> bool:
        """End after the current batch; return whether it ended in time. May be called twice."""
        self._worker.stop.set()
        return self._worker.join(timeout_s)

    @property
    def alive(self) -> bool:
        """Whether the thread runs; False once stopped, or after waiting too long for another target."""
        return self._worker.alive

    def replace_target(self, target: UpdateTarget) -> bool:
        """Switch to another deployment of the same tables, including for changes that the last one refused.

        Returns:
            False if the feed has given up waiting for one.
        """
        with self._replacing:
            self._target, self._orphaned_at = target, None
            return not self._gave_up

    def status(self) -> list[UpdateStatus]:
        behind, unread_since = self._unread()
        return [self._status(table, behind, unread_since) for table in self._tables.values()]

    def wait_for_lag(self, lag_s: float, timeout_s: float, give_up: Callable[[Sequence[UpdateStatus], float], bool]) -> bool:
        """Wait until no table lags by more than this; False on timeout, on `give_up`, or when the feed ends.

        A table whose topic does not exist is not waited for.

        Args:
            give_up: called repeatedly with the tables that lag, and the seconds left.
        """
        deadline = _clock() + timeout_s
        while late := [status for status in self.status() if _is_late(status, lag_s) and not self._log.lacks(status.topic)]:
            left_s = deadline - _clock()
            if give_up(late, max(0.0, left_s)) or not self.alive or left_s <= 0 or self._worker.stop.wait(0.05):
                return False
        return True

    def _run(self) -> None:
        try:
            if self._start_following():
                while not self._worker.stop.is_set():
                    self._run_once()
                self._finish()
        except _Orphaned:
            self._problem = "its deployment is out of service, and no other has taken over; updates have stopped"
            _log.warning("updates of model %r, version %s: %s", self._model, self._version, self._problem)
        finally:
            self._log.close()

    def _start_following(self) -> bool:
        """Read the stored positions and follow the log from there; return False if the feed was stopped before.

        The log is followed once for all tables, so a failing table delays the others here.
        """
        for table in self._tables.values():
            while not self._follow(table):
                if self._worker.stop.wait(self._pause_s([table])):
                    return False
        self._log.follow(list(self._tables), self._positions(), self._settings.begin)
        return True

    def _follow(self, table: "_Table") -> bool:
        target = self._target
        try:
            stored = target.follow_log(table.followed.index)
        except Exception as error:  # noqa: BLE001 - tried again
            self._fail(table, target, error)
            return False
        # Positions of another topic date from before the model was renamed.
        table.stored, start = (
            {Partition(name): at for name, at in known.items() if Partition(name).topic == table.followed.topic}
            for known in (stored, table.followed.start)
        )
        table.applied = start | table.stored
        self._succeed(table)
        return True

    def _run_once(self) -> None:
        failing = [table for table in self._tables.values() if table.refused_by]
        messages = self._poll(min(self._settings.poll_timeout_ms / 1000, _LONGEST_POLL_S, self._pause_s(failing)))
        for partition, loss in self._log.lost().items():
            table = self._tables[partition.topic]
            _log.error("updates of model %r, %s: %s", self._model, partition, loss)
            self._metrics.update_gaps.labels(self._model, table.followed.name).inc()
            table.lost, table.lost_at = f"{partition}: {loss}", _clock()
        for partition, position in self._log.begun().items():
            table = self._tables[partition.topic]
            table.applied = {partition: LogPosition(position)} | table.applied
        self._accept(messages)
        for table in failing:
            if table.messages:  # messages of a partition that was unknown
                self._pause(table)
        for table in self._tables.values():
            if not messages or table.unstored >= self._settings.max_commit_interval:
                self._store(table)
            self._apply_all(table)
        if _clock() >= self._report_at:
            self._report_at = _clock() + _REPORT_INTERVAL_S
            self._log_cut_off()
            self._log_late()
        if self._uncommitted >= (self._settings.max_commit_interval if messages else 1):
            self._commit()

    def _poll(self, timeout_s: float) -> list[Message]:
        try:
            messages = self._log.poll(timeout_s, self._most_bytes)
        except Exception as error:  # noqa: BLE001 - a bug in the log
            if not self._problem:
                _log.exception("updates of model %r: polling the log failed; retrying", self._model)
            self._problem = f"polling the log failed: {error!r}"
            self._worker.stop.wait(_LONGEST_POLL_S)
            return []
        self._problem = ""
        return messages

    def _unread(self) -> _Unread:
        # Between `poll` and `_accept` a message counts neither as unread nor as held by a table, and the lag would drop for a
        # moment. So the figures count only if no message was on its way when they were read.
        for _ in range(_UNREAD_TRIES):
            unread = self._log.behind(), self._log.unread_since()
            if self._log.delivered == self._received:
                self._last_unread = unread
                break
            time.sleep(_HANDED_OVER_S)
        return self._last_unread

    def _accept(self, messages: Sequence[Message]) -> None:
        arrived: dict[Partition, float] = {}
        for message in messages:
            self._tables[message.partition.topic].messages.append(message)
            at = np.inf if message.arrived is None else message.arrived
            arrived[message.partition] = min(at, arrived.get(message.partition, np.inf))
        for partition, at in arrived.items():
            table = self._tables[partition.topic]
            table.appended_since = table.appended_since | {partition: at}
        self._received += len(messages)

    def _apply_all(self, table: "_Table") -> None:
        while (table.batch or table.messages) and not self._worker.stop.is_set():
            if table.refused_by is self._target and _clock() < table.retry_at:
                return
            target = self._target
            try:
                table.batch = table.batch or self._gather(table)
                self._apply(table, table.batch, target)
            except Exception as error:  # noqa: BLE001 - tried again
                self._fail(table, target, error)
                return

    def _gather(self, table: "_Table") -> "_Batch":
        followed, applied = table.followed, dict(table.applied)
        parts: list[Changes] = []
        sequences: list[int] = []
        times: list[int] = []
        rows = taken = size_bytes = last = 0
        current, position = None, ""
        for message in table.messages:
            if rows >= self._settings.max_batch_size:
                break
            if message.partition is not current:  # rare: messages are grouped by partition
                if current is not None:
                    applied[current] = LogPosition(position, last)
                current = message.partition
                last = applied[current].sequence if current in applied else 0
            taken += 1
            changes, sequence = self._decode(table, message, last)
            if changes is not None:
                size_bytes += len(message.value)
                parts.append(changes)
                sequences.append(sequence)
                times.append(changes.time_us or min(message.time_us, HIGHEST_SEQUENCE))
                rows += changes.keys.size + changes.deleted_keys.size
            position, last = message.position, max(last, sequence)
        if current is not None:
            applied[current] = LogPosition(position, last)
        pieces = _pieces(_resolve(parts, sequences, followed.dim), self._settings.max_batch_size) if rows else []
        deletes = sum(part.deleted_keys.size for part in parts)
        counts = np.array([part.keys.size + part.deleted_keys.size for part in parts], np.int64)
        batch = _Batch(pieces, applied, taken, size_bytes, rows - deletes, deletes, np.array(times, np.int64), counts)
        del table.messages[:taken]  # last: a failure before leaves them for the next try
        return batch

    def _decode(self, table: "_Table", message: Message, last: int) -> tuple[Changes | None, int]:
        """Decode a message; return its changes, None for a beacon or a dead letter, and its sequence.

        Args:
            last: the highest sequence in its partition so far.
        """
        followed, most_bytes = table.followed, self._settings.max_message_bytes
        try:
            changes = decode(
                message.value, followed.dim, followed.key_bytes, key=message.key, table=followed.name, most_bytes=most_bytes
            )
            if changes is not None:
                _check_rows(changes, followed)
        except Exception as error:  # noqa: BLE001 - a bug must not end the stream
            reason = error.reason if isinstance(error, UpdateFormatError) else "internal"
            if reason == "internal" and reason not in table.dead_letters:
                _log.exception("updates of model %r: decoding %s at %s", self._model, message.partition, message.position)
            sequence = sequence_of(message.value) or last + 1  # keeps its place for a replay after a repair
            self._dead_letters.add(message, reason, str(error), sequence)
            self._metrics.update_dead_letters.labels(self._model, followed.name, reason).inc()
            table.dead_letters = table.dead_letters | {reason: table.dead_letters.get(reason, 0) + 1}
            return None, sequence
        if changes is None:
            return None, 0
        return changes, changes.sequence or max(min(message.time_us, HIGHEST_SEQUENCE), last + 1)

    def _apply(self, table: "_Table", batch: "_Batch", target: UpdateTarget) -> None:
        # Each piece stores the positions from before its batch: a position must never count messages whose rows are not
        # everywhere. After a crash in the middle, the whole batch is read again, and changes that are stored have no effect.
        while batch.pieces:
            started = _clock()
            piece = batch.pieces[-1]
            with paced() if piece.keys.size <= _PACED_ROWS else nullcontext():
                batch.stale += piece.keys.size - target.apply(table.followed.index, piece, table.applied)
            batch.pieces.pop()
            table.stored, table.unstored = table.applied, 0
            self._succeed(table)
            # Lookups use the same processors and devices: they get the rest of the time, `1 - device_share`.
            self._worker.stop.wait((_clock() - started) * (1 / self._settings.device_share - 1))
        table.applied, table.batch = table.applied | batch.applied, None
        if not table.messages:
            table.appended_since = {}
        table.unstored += batch.messages
        self._uncommitted += batch.messages
        self._count(table, batch)

    def _count(self, table: "_Table", batch: "_Batch") -> None:
        where, metrics = (self._model, table.followed.name), self._metrics
        metrics.update_bytes.labels(*where).inc(batch.size_bytes)
        if not batch.rows.size:
            return
        for change, count in (("upsert", batch.upserts), ("delete", batch.deletes)):
            metrics.update_rows.labels(*where, change).inc(count)
        metrics.update_stale_rows.labels(*where).inc(batch.stale)
        table.progress.advance(batch.upserts + batch.deletes)
        table.stale_rows += batch.stale
        known, ages_us = batch.times_us > 0, _now_us() - batch.times_us
        metrics.observe_visible(*where, ages_us[known] / 1e6, batch.rows[known])
        if future := int((ages_us < -_FUTURE_US).sum()):
            metrics.update_future_times.labels(*where).inc(future)
            table.future_times += future

    def _fail(self, table: "_Table", target: UpdateTarget, error: Exception) -> None:
        """Let a table back off; end the feed if its target has been out of service for too long."""
        now = _clock()
        # A target that is out of service is normal for a moment, while a new version takes over. The feed waits for the new
        # target instead of ending, so that no position is lost between the two.
        with self._replacing:
            if not isinstance(error, NotReadyError):
                self._orphaned_at = None
            elif self._orphaned_at is None:
                self._orphaned_at = now
            elif now - self._orphaned_at >= _REPLACEMENT_WAIT_S:
                self._gave_up = True
                raise _Orphaned
        where = f"updates of model {self._model!r}, table {table.followed.name!r}"
        if not table.problem:
            known = isinstance(error, HPSError)
            _log.warning("%s: %s; retrying until they are applied", where, error, exc_info=None if known else error)
        table.problem = str(error) or repr(error)
        self._metrics.update_failures.labels(self._model, table.followed.name).inc()
        shortest_s = max(self._settings.failure_backoff_ms, 1) / 1000
        table.backoff_s = min(max(2 * table.backoff_s, shortest_s), max(_LONGEST_BACKOFF_S, shortest_s))
        table.retry_at, table.refused_by = now + table.backoff_s, target
        self._pause(table)

    def _succeed(self, table: "_Table") -> None:
        if table.problem:
            _log.info("updates of model %r, table %r: applied again", self._model, table.followed.name)
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
        """Return the seconds until the first of these tables is tried again."""
        due = [0.0 if table.refused_by is not self._target else table.retry_at - _clock() for table in failing]
        return max(0.0, min(due, default=_LONGEST_POLL_S))

    def _store(self, table: "_Table") -> None:
        if table.batch is None and table.applied != table.stored:
            empty = np.empty(0, np.int64)
            changes = RowChanges(empty, np.empty((0, table.followed.dim), np.float32), empty)
            table.batch = _Batch([changes], table.applied, 0, 0, 0, 0, empty, empty)

    def _finish(self) -> None:
        """Store and commit the positions; after a failure, changes are applied again at the next start."""
        target = self._target
        for table in self._tables.values():
            self._store(table)
            if table.batch and not table.batch.messages and not table.problem:
                with suppress(Exception):
                    self._apply(table, table.batch, target)
        self._commit()

    def _commit(self) -> None:
        self._uncommitted = 0
        try:
            self._log.commit(self._positions())
        except Exception:  # noqa: BLE001 - a bug in the log; commits are only informative
            _log.exception("updates of model %r: committing positions failed", self._model)

    def _positions(self) -> dict[Partition, str]:
        return {
            partition: at.position for table in self._tables.values() for partition, at in table.applied.items() if at.position
        }

    def _log_cut_off(self) -> None:
        """Log the tables that the log can no longer read, or can read again; one line for each cause."""
        news: dict[str, list[str]] = {}
        for table in self._tables.values():
            problem = self._log.problem_of(table.followed.topic)
            if bool(problem) != table.cut_off:
                table.cut_off = bool(problem)
                news.setdefault(problem, []).append(table.followed.name)
        for problem, names in news.items():
            where, text = f"updates of model {self._model!r}, {', '.join(names)}", problem or "they can be read again"
            _log.log(logging.WARNING if problem else logging.INFO, "%s: %s", where, text)

    def _log_late(self) -> None:
        """Log which tables are late, at most once a minute."""
        late = [status for status in self.status() if (status.lag_s or 0.0) > _LATE_S]
        for status in late if late and self._late_lines.take() else ():
            behind = "" if status.behind is None else f", {status.behind} messages behind"
            text = "updates of model %r, table %r are late: lag %.0f s%s; %.0f rows are applied a second%s"
            _log.warning(
                text,
                status.model,
                status.table,
                status.lag_s,
                behind,
                status.rows_per_s,
                status.problem and f"; {status.problem}",
            )

    def _behind(self, table: "_Table", behind: Mapping[Partition, int | None]) -> int | None:
        counts = [count for partition, count in behind.items() if partition.topic == table.followed.topic]
        known = [count for count in counts if count is not None]
        if not counts or len(known) < len(counts):
            return None
        batch = table.batch
        return sum(known) + len(table.messages) + (batch.messages if batch else 0)

    def _lag_s(
        self, table: "_Table", behind: Mapping[Partition, int | None], unread_since: Mapping[Partition, float | None]
    ) -> float | None:
        now, appended = _clock(), table.appended_since
        partitions = [partition for partition in behind if partition.topic == table.followed.topic]
        late = [partition for partition in partitions if partition in appended or behind[partition] != 0]
        since = [appended[partition] if partition in appended else unread_since.get(partition) for partition in late]
        known = [at for at in since if at is not None and at < np.inf]
        if not partitions or len(known) < len(late):
            return None
        return max(0.0, now - min(known, default=now))

    def _status(
        self, table: "_Table", behind: Mapping[Partition, int | None], unread_since: Mapping[Partition, float | None]
    ) -> UpdateStatus:
        problem = self._problem or self._log.problem_of(table.followed.topic)
        lost = table.lost if table.lost and _clock() - table.lost_at < _LOST_SHOWN_S else ""
        return UpdateStatus(
            model=self._model,
            version=self._version,
            table=table.followed.name,
            topic=table.followed.topic,
            positions={str(partition): at.position for partition, at in table.applied.items() if at.position},
            behind=self._behind(table, behind),
            lag_s=self._lag_s(table, behind, unread_since),
            rows_per_s=table.progress.rows_per_s,
            rows=table.progress.rows_done,
            stale_rows=table.stale_rows,
            future_times=table.future_times,
            dead_letters=table.dead_letters,
            problem="; ".join(filter(None, (table.problem, problem, lost))),
            connected=not problem,
        )

    def _running_status(self) -> list[UpdateStatus]:
        return [] if self._worker.stop.is_set() else self.status()


def _clock() -> float:
    return time.monotonic()


def _is_late(status: UpdateStatus, lag_s: float) -> bool:
    return status.lag_s is None or status.lag_s > lag_s


def _now_us() -> int:
    return time.time_ns() // 1000


class _Orphaned(Exception):
    """The target has been out of service for too long."""


@dataclass(slots=True)
class _Batch:
    """Messages that are applied together.

    `pieces` remain to be applied and have distinct keys; `applied` are the positions once they are. `times_us` and `rows`, (n,)
    int64, hold the time (0 if unknown) and the number of rows of each message with changes.
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
    """State of a table. Other threads may read it; dicts are replaced, never changed.

    Every tier has the changes up to `applied`; the database has stored the positions `stored`, `unstored` messages ago.
    `messages` are polled but not decoded. `appended_since` is when the oldest polled and unapplied message of a partition was
    appended, infinite if unknown. `refused_by` is the target that failed last, None after a success.
    """

    followed: TableTopic
    progress: TableProgress
    applied: dict[Partition, LogPosition] = field(default_factory=dict)
    stored: dict[Partition, LogPosition] = field(default_factory=dict)
    unstored: int = 0
    messages: list[Message] = field(default_factory=list)
    appended_since: dict[Partition, float] = field(default_factory=dict)
    batch: _Batch | None = None
    refused_by: UpdateTarget | None = None
    retry_at: float = 0.0
    backoff_s: float = 0.0
    paused: list[Partition] = field(default_factory=list)
    problem: str = ""
    cut_off: bool = False
    lost: str = ""
    lost_at: float = 0.0
    stale_rows: int = 0
    dead_letters: dict[str, int] = field(default_factory=dict)
    future_times: int = 0


def _check_rows(changes: Changes, followed: TableTopic) -> None:
    """Refuse vectors that the table's format cannot represent."""
    try:
        encode(f"updating table {followed.name!r}", changes.vectors, followed.row_dtype, changes.keys)
    except InvalidInputError as error:
        raise UpdateFormatError("row_dtype", str(error)) from error


def _resolve(parts: Sequence[Changes], sequences: Sequence[int], dim: int) -> RowChanges:
    """Keep the latest change of each key: the highest sequence, and among equal ones the last to arrive."""
    counts = [part.keys.size + part.deleted_keys.size for part in parts]
    keys = np.concatenate([array for part in parts for array in (part.keys, part.deleted_keys)])
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
    if not (ordered[1:] == ordered[:-1]).any():  # almost always
        return changes
    order = np.lexsort((of_rows, keys))  # stable: among equal sequences the last to arrive stays last
    latest = order[np.append(keys[order][1:] != keys[order][:-1], True)]
    return changes.at(latest)


def _pieces(changes: RowChanges, most_rows: int) -> list[RowChanges]:
    count = -(-changes.keys.size // most_rows)
    edges = [changes.keys.size * i // count for i in range(count + 1)]
    return [changes.at(slice(low, high)) for low, high in pairwise(edges)]
