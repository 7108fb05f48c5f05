"""Rows that age: a row that was not written online for a table's time to live counts as absent.

**A row's time** is the sequence of its last change (`AgingRows`), which is the time of the write and not of its arrival. So all
replicas and every restart agree about it, and nothing else is stored. Rows that only a load wrote have no time, and stay; with
`row_ttl_files` theirs is that of the version, for all the same.

**Expired rows are removed**, by all tiers at once and as an online deletion would: under the table's fence, so that no fill of
an upper tier brings one back. The database compares the sequences: a row that was written again lives on. A calendar in memory
says which rows to ask it about.

If many rows expire at once, or a database cannot remove them, those that are left are *hidden*: erased from what is fast to
erase from, and compared with the authoritative database where a lookup finds one.

**Lookups trust the tiers until `valid_until_ns`**, which each round of the sweeper moves on. A lookup that comes later, since
the machine is busy or a database failed, sweeps first, or fails: an expired row is never answered later than `GRACE_US`.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

import numpy as np

from hps.engine.chain import DatabaseChain
from hps.engine.expiry_calendar import ExpiryCalendar
from hps.errors import DatabaseError, DatabaseTimeoutError, HPSError
from hps.ground.threads.workers import PeriodicTask, Stop
from hps.statistics.metrics import LiveMethods
from hps.stores.base import ExpiredRows, RowChanges
from hps.types import IndexArray, KeyArray, TableSpec

_log = logging.getLogger(__name__)

GRACE_US: Final = 1_000_000
"""How long after its expiry a row may be answered."""

FUTURE_US: Final = 1_000_000
"""How far ahead of this machine's clock the time of a write may be; later ones count as written on arrival."""

_EVERY_S: Final = 0.1  # between two rounds of the sweeper
_MARGIN_US: Final = 100_000  # of the grace
_HIDE_US: Final = 300_000  # behind, after which remaining rows are hidden
_BUSY_S: Final = 0.3  # of a round for removing, after which the rest is hidden
_LONG_S: Final = 0.3  # of a direct write, whose rows may be older by so much than its end
_MANY_ROWS: Final = 8192  # more are hidden before they are removed from a database outside this process's memory
_PIECES: Final = (1 << 9, 1 << 12)  # least and most rows to remove at once: writers of the table wait meanwhile
_FAST_S, _SLOW_S = 0.1, 0.3  # a piece that takes less, or more, is followed by a larger, or smaller, one
_MOST_CHANGES: Final = 1 << 22  # in a calendar; 64 MiB
_SHARE: Final = 8  # of a table's rows, one in so many may be in the calendar if that is more
_READINGS: Final = 3  # of a shared database in a time to live: a row that another process wrote is seen before it expires
_READING_S: Final = 0.05  # of a round for reading a database again
_READ_AHEAD_US: Final = 10_000_000  # before the calendar ends, or twice as long as the last reading took
_WAIT_S: Final = 10.0  # of a lookup for the sweeper
_LOOK_S: Final = 0.02  # between its looks


class AgingTiers(Protocol):
    """All tiers of a deployment, its caches included. *Thread-safe.*"""

    def expire(self, index: int, keys: KeyArray, sequence: int, *, loaded: bool = False) -> ExpiredRows:
        """Remove the rows of a table, by index, from every tier whose last change has at most this sequence."""

    def hide(self, index: int, owner: object, keys: KeyArray | None, fresh: KeyArray, sequence: int) -> bool:
        """Answer these rows as absent until they are removed; see `DatabaseChain.hide`."""


@dataclass(slots=True)
class _AgingTable:
    """The state of one table. `calendar`, `highest` and `swept` change under `adding`, the rest under `RowAging`'s lock."""

    index: int
    spec: TableSpec
    ttl_us: int
    calendar: ExpiryCalendar = field(default_factory=lambda: ExpiryCalendar(_MOST_CHANGES))
    adding: threading.Lock = field(default_factory=threading.Lock)
    highest: int = 0  # time of a change so far
    swept: int = 0  # no row with a change up to this time is left
    due: KeyArray = field(default_factory=lambda: np.empty(0, np.int64))  # taken from the calendar, perhaps expired; ascending
    until: int = 0  # rows of `due` with a change up to this time have expired, also by a clock that is set back
    hidden: bool = False
    fresh: KeyArray = field(default_factory=lambda: np.empty(0, np.int64))  # of `due`, taken since it was hidden last
    piece_rows: int = 1 << 12
    reading: Iterator[tuple[KeyArray, IndexArray]] | None = None  # of the database, for the calendar
    reading_began_us: int = 0
    reading_us: int = 0  # duration of the last reading
    changes_read: int = 0
    written_at: int = 0  # time of the rows that only a load wrote; 0: they stay, or were removed
    files: Iterator[KeyArray] | None = None  # of keys, while such rows are removed
    files_hidden: bool = False
    hides: object = field(default_factory=object)  # who hides rows of the calendar
    hides_files: object = field(default_factory=object)


class RowAging:
    """Removes the expired rows of one deployment's tables. *Thread-safe.*

    Args:
        ttls_s: time to live by table, in seconds; 0: rows do not age.
        written_at_us: time of the rows that only a load wrote, in microseconds since 1970; 0: they stay.

    Attributes:
        valid_until_ns: by `time.time_ns`: until then lookups may trust the tiers.
    """

    def __init__(
        self,
        tables: Sequence[TableSpec],
        ttls_s: Sequence[float],
        chain: DatabaseChain,
        tiers: AgingTiers,
        *,
        written_at_us: int = 0,
    ) -> None:
        self.valid_until_ns = 0
        self._watchers: LiveMethods[Callable[[int], None]] = LiveMethods()
        self._tables = {
            index: _AgingTable(index, spec, round(ttl_s * 1e6), written_at=written_at_us)
            for index, (spec, ttl_s) in enumerate(zip(tables, ttls_s, strict=True))
            if ttl_s
        }
        self._written_at_us = written_at_us
        self._model = tables[0].model_name
        self._chain = chain
        self._tiers = tiers
        self._sweeping = threading.Lock()
        self._moving = threading.Lock()
        self._first = 0  # whose turn is first
        self._stop = Stop()
        self._task: PeriodicTask | None = None

    def start(self) -> None:
        """Order the tables by time, remove what has expired meanwhile, and sweep from then on. Called before they serve.

        Raises:
            DatabaseError: the authoritative database failed, cannot keep the times of rows, or is read-only.
        """
        with self._sweeping:
            for table in self._tables.values():
                self._chain.order_by_time(table.spec)
                self._chain.metrics.expired_rows.labels(self._model, table.spec.table_name)
                while not self._stop.is_set():
                    self._read_again(table)
                    self._advance_reading(table, None)
                    ends = time.monotonic() + _WAIT_S
                    try:
                        self._expire_files(table, ends, hides=False)
                        self._sweep(table, ends)
                    except HPSError as error:
                        if not (table.hidden or table.files_hidden):
                            raise
                        _log.warning("removing expired rows of table %s: %s; they are hidden meanwhile", table.spec.tag, error)
                    if table.calendar.horizon > _now_us() - table.ttl_us:  # else more have expired than it holds
                        break
            self._move_on()
        self._task = PeriodicTask(
            f"aging-{self._model}",
            self._round,
            _EVERY_S,
            what=f"removing expired rows of model {self._model!r}",
            stop=self._stop,
        )

    def stop(self) -> None:
        """Stop sweeping. Lookups that still run may trust the tiers until `valid_until_ns`."""
        self._stop.set()

    def expire_files_again(self, index: int) -> None:
        """Remove rows that only a load wrote once more, since a database that lost them has loaded them again."""
        if self._written_at_us and (table := self._tables.get(index)) is not None:
            with self._sweeping, table.adding:
                table.written_at, table.files = self._written_at_us, None
                table.swept = min(table.swept, table.written_at - 1)
                self._move_on()

    def release(self) -> None:
        """Hide no rows: no lookup needs it any more."""
        for table in self._tables.values():
            for owner in (table.hides, table.hides_files):
                self._chain.show(table.spec, owner)

    def close(self, timeout_s: float = 10.0) -> None:
        self.stop()
        if self._task is not None:
            self._task.join(timeout_s)

    def watch(self, moved: Callable[[int], None]) -> None:
        """Call a method with `valid_until_ns` now and after each change, for as long as its object lives."""
        self._watchers.add(moved)
        moved(self.valid_until_ns)

    def admit(self, index: int, changes: RowChanges) -> RowChanges:
        """Prepare changes of a log: those that have expired already delete their row; count times ahead of the clock.

        Call `note` with the result once it is being written.
        """
        if (table := self._tables.get(index)) is None:
            return changes
        now, sequences = _now_us(), changes.sequences
        ahead = sequences > now + FUTURE_US
        if ahead.any():
            where = self._model, table.spec.table_name
            self._chain.metrics.future_rows.labels(*where).inc(int(np.count_nonzero(ahead)))
            sequences = np.where(ahead, now, sequences)
        late = sequences <= now - table.ttl_us
        deleted = changes.deleted
        if late.any():
            deleted = late if deleted is None else deleted | late
            self._count(table, int(np.count_nonzero(late)))
        return replace(changes, sequences=sequences, deleted=deleted)

    def note(self, index: int, changes: RowChanges) -> None:
        """Note changes of a log. Called while the table is being modified, before they are made: no round misses them."""
        if (table := self._tables.get(index)) is None or not changes.keys.size:
            return
        times = changes.sequences
        with table.adding:
            table.highest = max(table.highest, int(times.max()))
            if changes.deleted is not None:  # of expired changes; lookups need not wait until those are forgotten
                times = np.where(changes.deleted, np.maximum(times, _now_us() - table.ttl_us + 1), times)
            self._add(table, changes.keys, times)

    def note_written(self, index: int, keys: KeyArray, took_s: float) -> None:
        """Note rows of a direct write, (n,). Called while the table is being modified, once it has been made or has failed."""
        if (table := self._tables.get(index)) is None or not keys.size:
            return
        now, stored = _now_us(), np.zeros(keys.size, np.int64)
        if took_s > _LONG_S or table.highest - now > _LONG_S * 1e6:  # the clock was set back: the database may know less
            with suppress(DatabaseError):  # the later time then counts: by an earlier one it would be found alive
                stored = self._chain.last_changes(table.spec, keys)
        with table.adding:  # their sequence was the time of the write, or one more than the highest
            self._add(table, keys, np.where(stored > 0, stored, max(now, table.highest + 1)))

    def _add(self, table: _AgingTable, keys: KeyArray, times: IndexArray) -> None:
        table.calendar.add(keys, times)
        if (earliest := int(times.min())) <= table.swept:
            table.swept = earliest - 1
            self._move_on()

    def catch_up(self) -> None:
        """Remove expired rows now: a lookup found the sweeper late.

        Raises:
            DatabaseError: a database failed, or is too slow: expired rows could be answered.
        """
        deadline = time.monotonic() + _WAIT_S
        while time.time_ns() > self.valid_until_ns:
            if self._sweeping.acquire(timeout=_LOOK_S):
                try:
                    if time.time_ns() > self.valid_until_ns:
                        self._sweep_all()
                except HPSError:
                    if time.time_ns() > self.valid_until_ns:
                        raise
                finally:
                    self._sweeping.release()
            elif time.monotonic() > deadline:
                raise DatabaseTimeoutError(
                    f"looking up model {self._model!r}: removing expired rows has not ended for {_WAIT_S:g} s; retry"
                )

    def _round(self) -> None:
        with self._sweeping:
            self._sweep_all()

    def _sweep_all(self) -> None:
        error: HPSError | None = None
        ends = time.monotonic() + _BUSY_S
        for table in self._turns():
            try:
                self._sweep(table, ends)
                self._keep_calendar(table)
            except HPSError as failure:  # the others go on
                error = failure
        self._move_on()
        if error is not None:
            raise error

    def _turns(self) -> list[_AgingTable]:
        """Return all tables, another one first each time: that one has most of the round."""
        tables, first = list(self._tables.values()), self._first
        self._first = (first + 1) % len(tables)
        return tables[first:] + tables[:first]

    def _sweep(self, table: _AgingTable, ends: float) -> None:
        """Remove the expired rows of a table. From a time of the monotonic clock on, hide those that are left, if possible."""
        try:
            self._expire_files(table, ends)
            until = self._take_due(table)
            if table.due.size > _MANY_ROWS and not self._chain.databases[-1].in_process:
                until, _ = self._hide(table)
            while table.due.size:
                if (ended := time.monotonic() > ends) or _now_us() - table.ttl_us - until > _HIDE_US:
                    until, hidden = self._hide(table)
                    if ended and hidden:  # the other tables must not wait for the next round: lookups are of all
                        return
                began = time.monotonic()
                expired = self._tiers.expire(table.index, table.due[: table.piece_rows], until)
                self._count(table, expired.removed)
                table.due = table.due[table.piece_rows :]
                spent_s, (least, most) = time.monotonic() - began, _PIECES
                if spent_s > _SLOW_S:
                    table.piece_rows = max(least, table.piece_rows // 2)
                elif spent_s < _FAST_S:
                    table.piece_rows = min(most, table.piece_rows * 2)
        except HPSError:
            self._hide(table)
            raise
        table.fresh = table.due
        if table.hidden:
            table.hidden = False
            self._chain.show(table.spec, table.hides)
        self._swept(table, until)

    def _expire_files(self, table: _AgingTable, ends: float, *, hides: bool = True) -> None:
        """Remove rows that only a load wrote, once their time has come, up to a time of the monotonic clock.

        Args:
            hides: hide all of them first if that is possible, for which the embedding caches are emptied; else remove all.
        """
        if not table.written_at or table.written_at > _now_us() - table.ttl_us:
            return
        if hides and not table.files_hidden:
            nothing = np.empty(0, np.int64)
            table.files_hidden = self._tiers.hide(table.index, table.hides_files, None, nothing, table.written_at)
            ends = ends if table.files_hidden else math.inf
        if table.files is None:
            table.files = self._chain.stored_keys(table.spec, table.piece_rows)
        try:
            while time.monotonic() < ends:
                if (keys := next(table.files, None)) is None:
                    table.written_at, table.files, table.files_hidden = 0, None, False
                    self._chain.show(table.spec, table.hides_files)
                    return
                self._count(table, self._tiers.expire(table.index, keys, table.written_at, loaded=True).removed)
        except BaseException:
            table.files = None  # read again by the next round
            raise

    def _take_due(self, table: _AgingTable) -> int:
        """Take further keys from the calendar. Return up to which time all changes were taken."""
        with table.adding:
            until = min(_now_us() - table.ttl_us, table.calendar.horizon - 1)
            if table.written_at and not table.files_hidden:
                until = min(until, table.written_at - 1)
            new = table.calendar.take(until)
        table.until = until = max(until, table.until) if table.due.size else until
        if new.size:
            table.due = np.union1d(table.due, new) if table.due.size else new
            table.fresh = np.union1d(table.fresh, new) if table.fresh.size else new
        return until

    def _hide(self, table: _AgingTable) -> tuple[int, bool]:
        """Let lookups go on while many rows are removed, or cannot be: those that are left count as absent.

        Returns:
            Up to which time all changes were taken from the calendar, and whether lookups go on.
        """
        until = self._take_due(table)
        fresh = table.fresh if table.hidden else table.due
        if table.due.size > table.calendar.most_changes:
            return until, False
        if fresh.size and not self._tiers.hide(table.index, table.hides, table.due, fresh, until):
            return until, False
        table.hidden = table.hidden or bool(fresh.size)
        table.fresh = fresh[:0]
        self._swept(table, until)
        return until, True

    def _swept(self, table: _AgingTable, until: int) -> None:
        with table.adding:
            earliest = table.calendar.earliest_up_to(until)  # noted meanwhile
            table.swept = max(table.swept, until) if earliest is None else earliest - 1
            self._move_on()

    def _move_on(self) -> None:
        with self._moving:  # a table that is swept must not overtake another one's change that has expired already
            earliest = min(table.swept + table.ttl_us for table in self._tables.values())
            self.valid_until_ns = (earliest + GRACE_US - _MARGIN_US) * 1000
            for moved in self._watchers:
                moved(self.valid_until_ns)

    def _keep_calendar(self, table: _AgingTable) -> None:
        """Read the database again before the time has come to the calendar's horizon, and for writes of other processes."""
        if table.reading is None:
            now, ahead_us = _now_us(), max(_READ_AHEAD_US, 2 * table.reading_us)
            enough = table.calendar.complete or table.calendar.horizon - (now - table.ttl_us) > ahead_us
            others = self._chain.databases[-1].shared and abs(now - table.reading_began_us) > table.ttl_us // _READINGS
            if enough and not others:
                return
            self._read_again(table)
        self._advance_reading(table, _READING_S)

    def _read_again(self, table: _AgingTable) -> None:
        table.reading_began_us, table.changes_read = _now_us(), 0
        with table.adding:
            table.calendar.start_reading()
        table.reading = self._chain.changed_rows(table.spec)

    def _advance_reading(self, table: _AgingTable, for_s: float | None) -> None:
        ends = None if for_s is None else time.monotonic() + for_s
        while table.reading is not None and (ends is None or time.monotonic() < ends):
            try:
                chunk = next(table.reading, None)
            except BaseException:
                table.reading = None  # started again by the next round
                raise
            with table.adding:
                if chunk is None:
                    table.calendar.end_reading()
                    table.calendar.most_changes = max(_MOST_CHANGES, table.changes_read // _SHARE)
                    table.reading, table.reading_us = None, _now_us() - table.reading_began_us
                else:
                    later = chunk[1] > table.swept
                    table.calendar.add(chunk[0][later], chunk[1][later])
                    table.changes_read += chunk[0].size
                    table.highest = max(table.highest, int(chunk[1].max(initial=0)))

    def _count(self, table: _AgingTable, rows: int) -> None:
        if rows > 0:
            self._chain.metrics.expired_rows.labels(self._model, table.spec.table_name).inc(rows)


def _now_us() -> int:
    return time.time_ns() // 1000
