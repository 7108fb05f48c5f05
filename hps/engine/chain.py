"""The chain of host tiers: the volatile database, then the persistent one for the keys that are missing."""

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from time import perf_counter_ns
from typing import NamedTuple, TypeAlias

import numpy as np

from hps.engine.circuit_breaker import CircuitBreaker
from hps.engine.fences import TableFence
from hps.engine.misplaced import refuse_misplaced
from hps.errors import DatabaseError, InvalidInputError, NotReadyError, ReadOnlyError, UnknownTableError
from hps.ground.memory.host_tables import HostTable
from hps.ground.rows import decode, encode
from hps.ground.threads.thread_pool import POOL
from hps.ground.threads.workers import WorkQueue
from hps.statistics.metrics import TIERS, Metrics
from hps.statistics.tracing import current, ended
from hps.stores.base import (
    AgingRows,
    Database,
    DeviceReadable,
    ExpiredRows,
    LogPosition,
    OrderedWrites,
    Partition,
    PersistentDatabase,
    RowChanges,
    SharedDatabase,
)
from hps.types import BoolArray, FloatArray, IndexArray, KeyArray, RowArray, TableSpec

_log = logging.getLogger(__name__)
_PROMOTION_QUEUE_LENGTH = 64
Landed: TypeAlias = Callable[[int, int], object]
"""Called in order, with ranges [start, stop) of final rows."""


class _Access:
    """Reads or writes of one database, with their metrics and a circuit breaker shared by all models. *Thread-safe.*"""

    def __init__(self, what: str, tier: str, operation: str, metrics: Metrics, breaker: CircuitBreaker) -> None:
        self._what = what
        self._where = (tier, operation)
        self._breaker = breaker
        self._errors = metrics.tier_errors

    @property
    def available(self) -> bool:
        """Whether calls are made; False while only probes are."""
        return not self._breaker.is_open

    def export_zero(self, model: str) -> None:
        """Export the error counter of a model at 0, so that its first error is an increase."""
        self._errors.labels(model, *self._where)

    def attempt(self, call: Callable[[], object], model: str) -> DatabaseError | None:
        """Make a call unless the breaker is open, and record its outcome. Return the error."""
        if not self._breaker.allow():
            return DatabaseError(f"{self._what} are suspended briefly after repeated failures")
        try:
            call()
        except UnknownTableError as error:  # dropped meanwhile, by healing or by another process
            return self._record_failure(DatabaseError(str(error)), model)
        except DatabaseError as error:
            return self._record_failure(error, model)
        if self._breaker.is_open:
            _log.info("%s succeed again", self._what)
        self._breaker.succeeded()
        return None

    def _record_failure(self, error: DatabaseError, model: str) -> DatabaseError:
        self._breaker.failed()
        self._errors.labels(model, *self._where).inc()
        _log.warning("%s: %s", self._what, error)
        return error


class _Tier:
    """One database of the chain and its place in the metrics. *Thread-safe.*

    Reads and writes fail independently: on a full disk every write fails while reads work.
    """

    def __init__(self, database: Database, name: str, metrics: Metrics, breaker: Callable[[], CircuitBreaker]) -> None:
        self.database = database
        self.name = name
        self.index = TIERS.index(name)
        self.reads = _Access(f"reads of {name} ({database.kind})", name, "read", metrics, breaker())
        self.writes = _Access(f"writes to {name} ({database.kind})", name, "write", metrics, breaker())

    def tag(self, table: TableSpec) -> str:
        """Return the tag of a table here."""
        return self.database.stored(table).tag

    def is_exact(self, table: TableSpec) -> bool:
        """Return True if rows are float32 here but have fewer bits in the caches."""
        return self.database.stored(table) is not table

    def fetch(
        self,
        table: TableSpec,
        keys: KeyArray,
        out: RowArray,
        found: BoolArray,
        *,
        missing: int,
        open_lost: bool,
        fetched: Landed | None = None,
        exact: FloatArray | None = None,
    ) -> DatabaseError | None:
        """Fetch the missing rows. An error is counted, reported to the breaker of reads and returned.

        Several threads share a large fetch, which the metrics count once.

        Args:
            open_lost: reopen a missing table, empty: another process emptied the shared database or dropped the table, and a
                lower tier has its rows.
            fetched: called with ranges of rows that were fetched.
            exact: (n, dim) float32, if rows here are float32 and those of `out` have fewer bits: receives the vectors.
        """
        worth, stored = self.database.rows_worth_a_thread, self.database.stored(table)
        target = out if exact is None else exact

        def call() -> None:
            try:
                if worth and missing >= 2 * worth:
                    self._share(stored.tag, keys, target, found, worth * keys.size // missing, fetched)
                else:
                    self.database.fetch(stored.tag, keys, target, found)
            except UnknownTableError as error:
                if not open_lost:
                    raise
                _log.warning("%s (%s): %s", self.name, self.database.kind, error)
                self.database.open_table(stored.tag, stored.width)
                self.database.fetch(stored.tag, keys, target, found)

        if exact is None:
            return self.reads.attempt(call, table.model_name)
        known = found.copy()
        error = self.reads.attempt(call, table.model_name)
        fresh = np.flatnonzero(found & ~known)
        try:
            out[fresh] = encode(f"reading table {stored.tag}", exact[fresh], table.row_dtype, keys[fresh])
        except InvalidInputError as unfit:  # written by another program or an older load: the database did not fail
            found[fresh] = False
            return DatabaseError(str(unfit))
        else:
            return error
        finally:
            del error  # as in `DatabaseChain.fetch`

    def _share(
        self, tag: str, keys: KeyArray, out: RowArray, found: BoolArray, least_rows: int, fetched: Landed | None
    ) -> None:
        fetch = self.database.fetch

        def part(start: int, stop: int) -> None:
            fetch(tag, keys[start:stop], out[start:stop], found[start:stop])

        POOL.run(keys.size, least_rows, part, fetched)

    def attempt(self, table: TableSpec, write: Callable[[], object]) -> DatabaseError | None:
        """Write to a table unless the breaker is open. An error is counted and returned."""
        return self.writes.attempt(write, table.model_name)


@dataclass(frozen=True, slots=True)
class TierState:
    """State of a tier for a table. *Immutable.*"""

    name: str
    database: Database
    read: bool  # False while reads are skipped after failures of any table
    written: bool


class _FinalRows:
    """Reports the final rows of a fetch in order. *One per thread.*

    Rows are final once found. Rows of the last tier are final even if absent: `absent_is_final`.
    """

    def __init__(self, found: BoolArray, landed: Landed) -> None:
        self.absent_is_final = False
        self._found = found
        self._landed = landed
        self._rows = 0

    def fetched(self, start: int, stop: int) -> None:
        """Report rows [start, stop) of a tier's fetch if they are final."""
        if start <= self._rows < stop and (self.absent_is_final or self._found[self._rows : stop].all()):
            first, self._rows = self._rows, stop
            self._landed(first, stop)

    def end(self) -> None:
        if self._rows < self._found.size:
            self._landed(self._rows, self._found.size)


class _HiddenRows(NamedTuple):
    """Rows that are about to be removed, but for those with a later change."""

    keys: KeyArray | None  # ascending; None for all of the table
    sequence: int


class DatabaseChain:
    """Fetches from the volatile, then from the persistent database. *Thread-safe.*

    The last database is *authoritative*: a key that it lacks is absent. A failing volatile database is skipped as long as a
    persistent one can answer. When the authoritative database fails while keys are missing, `fetch` raises: a failure is never
    reported as an absent key.

    When a write fails in the volatile database, the table is *quarantined*: its volatile rows are neither read nor written
    until they were dropped (`_heal`).

    The volatile database may be *away*: it could not be opened, or a deployment could not use it, and a lower tier has every
    row. New tables are then not opened in it, and `databases` lacks it. A table may also be *left out*: its volatile rows were
    lost or are being filled, so none are read or promoted; modifications still go there.

    Attributes:
        failed_above: a write to the volatile database has failed since construction: it may lack rows.
        away: why the volatile database is away; empty if it is not.

    Args:
        away: the initial value of the attribute.
        promote: copy persistent hits into the volatile database (`cache_missed_embeddings`).
        breaker: makes the two circuit breakers of a tier, for its reads and its writes.
        modification_timeout_s: time limit for earlier work on the table to end before an insert or delete.
    """

    def __init__(
        self,
        volatile: Database | None,
        persistent: PersistentDatabase | None,
        *,
        metrics: Metrics,
        promote: bool = False,
        breaker: Callable[[], CircuitBreaker] = CircuitBreaker,
        modification_timeout_s: float = 10.0,
        away: str = "",
    ) -> None:
        self.away = away
        self._tables: dict[str, TableSpec] = {}  # open tables
        self._left_out: set[str] = set()  # tags
        self._unopened: set[str] = set()  # tags of tables not open in the volatile database; also in `_left_out`
        self._volatile = _Tier(volatile, "volatile_db", metrics, breaker) if volatile else None
        self._persistent = _Tier(persistent, "persistent_db", metrics, breaker) if persistent else None
        self._tiers = [tier for tier in (self._volatile, self._persistent) if tier]
        # `take_in` changes neither: no device reads a database in place that can be away, nor one below another, which other
        # processes may have written to.
        authority = persistent or volatile
        self._in_place = next((tier for tier in self._tiers[:1] if isinstance(tier.database, DeviceReadable)), None)
        self._order: OrderedWrites | None = authority if isinstance(authority, OrderedWrites) else None
        self._authority = persistent
        self.metrics = metrics
        self._fences: dict[str, TableFence] = {}
        self._quarantined: set[str] = set()  # tags
        self.failed_above = False
        self._hidden: dict[str, dict[object, _HiddenRows]] = {}  # by tag and by who hides them; replaced, never changed
        self._hiding = threading.Lock()
        self._recorded: set[str] = set()  # tags whose quarantine the persistent database has on record
        self._healing = threading.Lock()
        self._promotions = (
            WorkQueue("promotion", _PROMOTION_QUEUE_LENGTH, 1, metrics) if promote and volatile and persistent else None
        )
        if self._promotions:
            self._promotions.stop_with(self)
        self._modification_timeout_s = modification_timeout_s

    @property
    def databases(self) -> list[Database]:
        """The databases in the order of `fetch`, without one that is away."""
        return [tier.database for tier in self._tiers[bool(self.away) :]]

    def tiers(self, table: TableSpec | None = None) -> list[TierState]:
        """Return the state of each tier for a table, or for all tables, in the order of `fetch`."""
        away = bool(self.away)
        hidden = away or (table is not None and table.tag in self._quarantined | self._left_out)
        return [
            TierState(
                tier.name,
                tier.database,
                tier.reads.available and not (hidden and tier is self._volatile),
                tier.writes.available and not (away and tier is self._volatile),
            )
            for tier in self._tiers
        ]

    @property
    def volatile(self) -> Database | None:
        """The volatile database, also one that is away."""
        return self._volatile.database if self._volatile else None

    def put_away(self, reason: str) -> bool:
        """Exclude the volatile database from deployments until `take_in`. Return True if that is possible.

        It must be a shared database above a persistent one. Open tables use it while it answers.
        """
        if self.away or self._persistent is None or self._volatile is None or not self._volatile.database.shared:
            return False
        self.away = reason
        return True

    def take_in(self, database: Database | None = None) -> None:
        """Use the volatile database again.

        Args:
            database: replaces one that could not be opened. No table is open in it before `admit`.
        """
        if database is not None and self._volatile is not None:
            self._unopened.update(self._tables)
            self._volatile.database = database
        self.away = ""

    @property
    def left_out(self) -> list[str]:
        """Tags of the tables whose volatile rows are not read."""
        return sorted(self._left_out)

    def leave_out(self, table: TableSpec) -> None:
        """Neither read nor promote volatile rows of a table until `read_again`. There must be a persistent database."""
        if table.tag in self._tables:
            self._left_out.add(table.tag)

    def read_again(self, table: TableSpec) -> None:
        """Read the volatile rows of a table that was left out."""
        if table.tag not in self._unopened:
            self._left_out.discard(table.tag)

    def admit(self, table: TableSpec) -> bool:
        """Open a table in a volatile database that was away, above the persistent one; drop rows that missed a modification.

        Returns:
            False if the rows could not be dropped: try again.

        Raises:
            DatabaseError: the volatile database failed, or modifications left no time.
        """
        volatile, persistent = self._volatile, self._persistent
        if volatile is not None and persistent is not None and table.tag in self._unopened:
            with self.filling(table):
                stored = volatile.database.stored(table)
                volatile.database.open_table(stored.tag, stored.width)
                if isinstance(volatile.database, SharedDatabase) and self._authority is not None:
                    volatile.database.stand_above(stored.tag, self._authority, persistent.tag(table))
                self._unopened.discard(table.tag)
        return self._heal(table)

    def filling(self, table: TableSpec) -> AbstractContextManager[None]:
        """Wait for a running modification of a table, and delay others until the block ends; see `TableFence.filling_next`."""
        return self.fence(table).filling_next(self._modification_timeout_s)

    @property
    def quarantined(self) -> list[str]:
        """Tags of the quarantined tables."""
        return sorted(self._quarantined)

    def open_table(self, table: TableSpec, *, volatile: bool = True) -> None:
        """Open a table, in the volatile database only if wanted and not away."""
        self._fences.setdefault(table.tag, TableFence())
        excludes_volatile = self._volatile is not None and (bool(self.away) or not volatile)
        if excludes_volatile:
            self._left_out.add(table.tag)
            self._unopened.add(table.tag)
        self._tables[table.tag] = table
        for tier in self._tiers[excludes_volatile:]:
            stored = tier.database.stored(table)
            tier.database.open_table(stored.tag, stored.width)
        for tier in self._tiers:
            tier.reads.export_zero(table.model_name)
            tier.writes.export_zero(table.model_name)
        for counter in (self.metrics.promoted, self.metrics.coalesced_keys):
            counter.labels(table.model_name, table.table_name)  # exported at 0

    def release_table(self, table: TableSpec, *, everywhere: bool = False) -> None:
        """Drop a table that no deployed model uses, and its queued promotions.

        Args:
            everywhere: `discard` it from every database rather than only from the memory of this process.

        Raises:
            DatabaseTimeoutError: earlier work on the table did not end in time.
        """
        if table.tag not in self._fences:
            return
        with self._fences[table.tag].modifying(self._modification_timeout_s):
            for tier in self._tiers:
                tier.database.release_table(tier.tag(table))
            if everywhere:
                self._fences.pop(table.tag, None)
                self.discard({database: [database.stored(table).tag] for database in self.databases})
            self._tables.pop(table.tag, None)
            self._left_out.discard(table.tag)
            self._unopened.discard(table.tag)
            self._quarantined.discard(table.tag)
            self._recorded.discard(table.tag)
            self._hidden.pop(table.tag, None)
            with suppress(KeyError):
                self.metrics.table_quarantined.remove(table.tag)

    def discard(self, tags: Mapping[Database, Iterable[str]]) -> None:
        """Drop an unused table from writable databases, the upper one first.

        A failure is logged and leaves the databases below unchanged, so that a later discard finds the table.

        Args:
            tags: its tags in each database.
        """
        for database in self.databases:
            for tag in tags.get(database, ()):
                try:
                    database.discard_table(tag)
                except (DatabaseError, NotReadyError) as error:
                    _log.warning("dropping table %s from %s, which keeps it for now: %s", tag, database.kind, error)
                    return

    def host_table(self, table: TableSpec) -> HostTable | None:
        """Return a table that devices can read in place, of the first database; None if it does not support that."""
        tier = self._in_place
        if tier is None or not isinstance(tier.database, DeviceReadable) or tier.is_exact(table):
            return None
        return tier.database.host_table(table.tag)

    @property
    def linked_tier(self) -> int:
        """The place in `TIERS` of the database of `host_table`."""
        return self._in_place.index if self._in_place else TIERS.index("volatile_db")

    @property
    def in_place(self) -> Database | None:
        """The database of `host_table`."""
        return self._in_place.database if self._in_place else None

    def settle(self, table: TableSpec) -> None:
        """Wait for a running modification of the table to end.

        Raises:
            DatabaseTimeoutError: it did not end in time.
        """
        with self.settled([table]):
            pass

    @contextmanager
    def settled(self, tables: Iterable[TableSpec]) -> Iterator[None]:
        """Wait for running modifications of tables to end, and keep others out until the block ends.

        Raises:
            DatabaseTimeoutError: one did not end in time.
        """
        with ExitStack() as stack:
            for table in tables:
                stack.enter_context(self._fences[table.tag].modifying(self._modification_timeout_s))
            yield

    def fence(self, table: TableSpec) -> TableFence:
        """Return the fence that guards copies of this table's vectors to an upper tier.

        Raises:
            UnknownTableError: the table was dropped.
        """
        try:
            return self._fences[table.tag]
        except KeyError:
            raise UnknownTableError(f"copying rows of table {table.tag}: it was dropped meanwhile") from None

    def fetch(
        self,
        table: TableSpec,
        keys: KeyArray,  # (n,)
        out: RowArray,  # (n, width)
        found: BoolArray,  # (n,)
        landed: Landed | None = None,
    ) -> int:
        """Fill the rows of `out` that are not yet `found`, as `Database.fetch` does. Keys of the remaining rows are absent.

        Args:
            landed: called in this thread, in order, with ranges of final rows; each row once, all of them by the end.

        Raises:
            DatabaseError: keys are still missing and the authoritative database did not answer.
            MisplacedKeysError: keys that are still missing belong to another share of the table.
        """
        fence = self._fences[table.tag]
        token = fence.token()
        missing = before = keys.size - int(np.count_nonzero(found))
        final = _FinalRows(found, landed) if landed else None
        for tier in self._tiers:
            if not before:
                break
            last = tier is self._tiers[-1]
            if tier is self._volatile and not last and self._is_hidden(table):
                continue
            known = found.copy() if tier is self._persistent and self._promotions else None
            if final:
                final.absent_is_final = last
            exact: FloatArray | None = np.empty((keys.size, table.dim), np.float32) if tier.is_exact(table) else None
            hidden = self._hidden.get(table.tag)
            read = found.copy() if hidden else found
            began = perf_counter_ns()
            fetched = final.fetched if final and exact is None and hidden is None else None
            error = tier.fetch(table, keys, out, found, missing=before, open_lost=not last, fetched=fetched, exact=exact)
            for rows in hidden.values() if hidden else ():
                self._leave_out_hidden(table, rows, keys, found, ~read)
            spent = ended(tier.name, table.table_name, began, before) - began
            after = keys.size - int(np.count_nonzero(found))
            self._count(table, tier, before - after, 0 if error else after, spent)
            if (tiers := current.tiers) is not None and after < before:
                tiers[found & (tiers == 0) if before - after < keys.size else slice(None)] = tier.index
            if error and last and after:
                try:
                    raise error
                finally:
                    del error  # its traceback refers to this frame, and so to the caller's arrays
            if known is not None and after < before:
                self._promote(table, fence, token, keys, out, exact, found & ~known)
            before = after
        if table.share is not None and before:
            refuse_misplaced(f"looking up table {table.tag}", table, keys[~found])
        if final:
            final.end()
        return missing - before

    def locate(self, table: TableSpec, key: KeyArray, out: RowArray) -> str | None:
        """Write the row of a key, (1,), to `out`, (1, width), without promoting or counting it.

        Returns:
            Name of the first tier that has it; None if the key is absent.

        Raises:
            DatabaseError: the authoritative database did not answer.
        """
        found = np.zeros(1, np.bool_)
        for tier in self._tiers:
            if tier is self._volatile and self._persistent and table.tag in self._quarantined | self._left_out:
                continue
            exact: FloatArray | None = np.empty((1, table.dim), np.float32) if tier.is_exact(table) else None
            error = tier.fetch(table, key, out, found, missing=1, open_lost=False, exact=exact)
            for rows in self._hidden.get(table.tag, {}).values() if found[0] else ():
                self._leave_out_hidden(table, rows, key, found, found.copy())
            if found[0]:
                return tier.name
            if error and tier is self._tiers[-1]:
                try:
                    raise error
                finally:
                    del error  # as in `fetch`
        refuse_misplaced(f"reading a row of table {table.tag}", table, key)
        return None

    def written_at(self, table: TableSpec, key: KeyArray) -> int:
        """Return when the authoritative database stored the row of a key, (1,): microseconds since 1970; 0 if unknown."""
        if self._authority is not None:
            with suppress(DatabaseError):
                return int(self._authority.written_at(self._authority.stored(table).tag, key)[0])
        return 0

    def insert(
        self,
        table: TableSpec,
        keys: KeyArray,  # (n,)
        rows: RowArray,  # (n, width)
        then: Callable[[bool], None],
        changing: AbstractContextManager[object] | None = None,
        exact: FloatArray | None = None,  # (n, dim)
    ) -> None:
        """Add or replace rows in every database, the authoritative one first.

        Args:
            exact: what rows in fewer bits were encoded from.
            then: called last, before fills of an upper tier continue. True updates the embedding caches; False, after a
                failure, erases the keys from them.
            changing: entered before the first write, left after `then` has returned.

        Raises:
            DatabaseError: the authoritative database failed; each key has its old or its new vector.
        """

        def write(tier: _Tier) -> None:
            tier.database.insert(tier.tag(table), keys, exact if exact is not None and tier.is_exact(table) else rows)
            self._count_inserts(table, tier, keys.size)

        self._modify(table, keys, write, then, changing)

    def delete(
        self,
        table: TableSpec,
        keys: KeyArray,
        then: Callable[[bool], None],
        changing: AbstractContextManager[object] | None = None,
    ) -> None:
        """Remove keys from every database, the authoritative one first; `then` and `changing` as for `insert`.

        Raises:
            DatabaseError: the authoritative database failed; each key may or may not remain.
        """
        self._modify(table, keys, lambda tier: tier.database.delete(tier.tag(table), keys), then, changing)

    def follow_log(self, table: TableSpec) -> dict[Partition, LogPosition]:
        """Follow the log of the authoritative database; see `OrderedWrites.follow_log`.

        Raises:
            DatabaseError: there is no such database, or it cannot keep the order of changes.
        """
        return self._ordered(table).follow_log(self._tiers[-1].tag(table))

    def _ordered(self, table: TableSpec) -> OrderedWrites:
        if self._order is None:
            kind = self._tiers[-1].database.kind if self._tiers else ""
            why = f"databases of type {kind} cannot keep its order" if kind else "no database is configured to store them"
            raise DatabaseError(f"following a log of updates for table {table.tag}: {why}")
        return self._order

    def apply(
        self,
        table: TableSpec,
        changes: RowChanges,
        positions: Mapping[Partition, LogPosition],
        then: Callable[[BoolArray | None], None],
        changing: AbstractContextManager[object] | None = None,
    ) -> BoolArray:
        """Apply changes of a log to every database; the authoritative one goes first and decides which are the latest.

        Args:
            changes, positions: as for `OrderedWrites.apply`.
            then: as for `insert`; called with the result of `OrderedWrites.apply`, or with None after a failure.
            changing: as for `insert`.

        Returns:
            The result of `OrderedWrites.apply`.

        Raises:
            DatabaseError: the authoritative database failed; each row has its old or its new state.
        """
        order, latest = self._ordered(table), list[BoolArray]()

        def write(tier: _Tier) -> None:
            exact = changes.exact if tier.is_exact(table) else None
            stored = changes if exact is None else replace(changes, vectors=exact)
            with self.metrics.applying(tier.name):
                if tier is self._tiers[-1]:
                    latest.append(order.apply(tier.tag(table), stored, positions))
                else:
                    tier.database.copy_changes(tier.tag(table), stored.at(latest[0]))
            inserted = latest[0] if changes.deleted is None else latest[0] & ~changes.deleted
            self._count_inserts(table, tier, int(np.count_nonzero(inserted)))

        def finish(written: bool) -> None:
            with self.metrics.applying(TIERS[0]):
                then(latest[0] if written else None)

        self._modify(table, changes.keys, write, finish, changing)
        return latest[0]

    def order_by_time(self, table: TableSpec) -> None:
        """Let the authoritative database keep the times of a table's changes; see `AgingRows.order_by_time`.

        Raises:
            DatabaseError: there is no such database, or it cannot, or is read-only.
        """
        self._aging(table).order_by_time(self._tiers[-1].tag(table))

    def changed_rows(self, table: TableSpec) -> Iterator[tuple[KeyArray, IndexArray]]:
        """Read all changes of a table that the authoritative database remembers; see `AgingRows.changed_rows_of`."""
        return self._aging(table).changed_rows_of(self._tiers[-1].tag(table))

    def expire(
        self,
        table: TableSpec,
        keys: KeyArray,
        sequence: int,
        then: Callable[[KeyArray, bool], None],
        changing: AbstractContextManager[object] | None = None,
        *,
        loaded: bool = False,
    ) -> ExpiredRows:
        """Remove rows from every database whose last change has at most this sequence; the authoritative one decides.

        Args:
            loaded: as for `AgingRows.expire`.
            then: called last, before fills of an upper tier continue, with the keys to erase from the embedding caches, and
                whether these are known to be removed: after a failure they may remain.
            changing: as for `insert`.

        Raises:
            DatabaseError: the authoritative database failed; each row remains or is removed.
        """
        aging, expired = self._aging(table), list[ExpiredRows]()

        def write(tier: _Tier) -> None:
            if tier is self._tiers[-1]:
                expired.append(aging.expire(tier.tag(table), keys, sequence, loaded=loaded))
            elif (gone := keys[~expired[0].kept]).size:
                tier.database.delete(tier.tag(table), gone)

        def finish(written: bool) -> None:
            then(keys[~expired[0].kept] if written else keys, written)

        self._modify(table, keys, write, finish, changing)
        return expired[0]

    def hide(
        self,
        table: TableSpec,
        owner: object,
        keys: KeyArray | None,
        fresh: KeyArray,
        sequence: int,
        then: Callable[[], None],
        changing: AbstractContextManager[object] | None = None,
    ) -> bool:
        """Answer rows as absent whose last change has at most this sequence, until they are removed or `show` is called.

        Args:
            owner: who hides them, for `show`.
            keys: all keys to hide, ascending; replaces those of this owner before. None: all rows of the table, which may be
                those that only a load wrote.
            fresh: those of them that were not hidden before.
            then: drops the fresh ones from the embedding caches.
            changing: as for `insert`.

        Returns:
            False if a device may read them in place.

        Raises:
            DatabaseError: earlier work on the table did not end in time.
        """
        if changing is not None and self._in_place is not None and (keys is None or self._in_place is self._tiers[-1]):
            return False
        with self._fences[table.tag].modifying(self._modification_timeout_s), changing or nullcontext():
            with self._hiding:
                self._hidden[table.tag] = self._hidden.get(table.tag, {}) | {owner: _HiddenRows(keys, sequence)}
            upper = self._volatile if self._persistent and table.tag not in self._quarantined | self._unopened else None
            if upper and fresh.size and upper.attempt(table, lambda: upper.database.delete(upper.tag(table), fresh)):
                self._quarantine(table)
            then()
        return True

    def show(self, table: TableSpec, owner: object) -> None:
        """Hide no rows of a table for this owner: all were removed, or nobody looks them up."""
        with self._hiding:
            hidden = {other: rows for other, rows in self._hidden.get(table.tag, {}).items() if other is not owner}
            if hidden:
                self._hidden[table.tag] = hidden
            else:
                self._hidden.pop(table.tag, None)

    def last_changes(self, table: TableSpec, keys: KeyArray) -> IndexArray:
        """Read the sequences of the last changes of keys from the authoritative database; see `AgingRows.last_changes`."""
        return self._aging(table).last_changes(self._tiers[-1].tag(table), keys)

    def stored_keys(self, table: TableSpec, chunk_rows: int) -> Iterator[KeyArray]:
        """Read the keys of all rows in the authoritative database, in chunks, in any order; see `Database.scan`."""
        for keys, _ in self._tiers[-1].database.scan(self._tiers[-1].tag(table), chunk_rows):
            yield keys

    def _leave_out_hidden(
        self, table: TableSpec, hidden: _HiddenRows, keys: KeyArray, found: BoolArray, among: BoolArray
    ) -> None:
        """Unmark found rows that are hidden.

        Args:
            among: (n,), rows to consider.

        Raises:
            DatabaseError: the authoritative database failed.
        """
        doubtful = np.flatnonzero(found & among)
        if hidden.keys is not None:
            place = np.minimum(np.searchsorted(hidden.keys, keys[doubtful]), hidden.keys.size - 1)
            doubtful = doubtful[hidden.keys[place] == keys[doubtful]]
        if doubtful.size:
            distinct, back = np.unique(keys[doubtful], return_inverse=True)
            last = self.last_changes(table, distinct)
            found[doubtful[last[back] <= hidden.sequence]] = False

    def _aging(self, table: TableSpec) -> AgingRows:
        if not self._tiers or not isinstance(authority := self._tiers[-1].database, AgingRows):
            kind = self._tiers[-1].database.kind if self._tiers else "none"
            raise DatabaseError(
                f"removing old rows of table {table.tag}: databases of type {kind} do not keep the times of rows"
            )
        if authority.read_only:
            raise ReadOnlyError(f"removing old rows of table {table.tag}: the database is read-only (persistent_db.read_only)")
        return authority

    def drain(self, timeout_s: float) -> bool:
        """Wait for queued promotions; return False on timeout."""
        return self._promotions is None or self._promotions.drain(timeout_s)

    def close(self) -> None:
        """Stop promoting and close the databases."""
        if self._promotions:
            self._promotions.close()
        for tier in self._tiers:
            tier.database.close()

    def _modify(
        self,
        table: TableSpec,
        keys: KeyArray,
        write: Callable[[_Tier], object],
        then: Callable[[bool], None],
        changing: AbstractContextManager[object] | None,
    ) -> None:
        # Caches may read a table of the volatile database in place and make its rows resident. `changing` spans all writes and
        # the update of the caches, also if they fail: rows read before its end are not admitted, so that no older row stays.
        with self._fences[table.tag].modifying(self._modification_timeout_s), changing or nullcontext():
            failure: DatabaseError | None = None
            if self._tiers:
                authoritative = self._tiers[-1]
                failure = authoritative.attempt(table, lambda: write(authoritative))
            # The authority goes first. If it fails, its rows are unknown, and the tiers above drop theirs. If the tier above
            # fails, its rows are unknown: the write may still take effect there. The table is then quarantined, and the
            # authority records that before this modification returns, also for the next start.
            if self._volatile and self._persistent:
                upper = self._volatile
                if table.tag not in self._quarantined and (
                    table.tag in self._unopened
                    or self._volatile.attempt(
                        table, lambda: upper.database.delete(upper.tag(table), keys) if failure else write(upper)
                    )
                ):
                    self._quarantine(table)
                if table.tag in self._quarantined:
                    failure = failure or self._record_quarantine(table)
            then(failure is None)
            if failure:
                try:
                    raise failure
                finally:
                    del failure  # as in `fetch`

    def _quarantine(self, table: TableSpec) -> None:
        # Caches that read the table in place leave its misses to `fetch` once it is closed; `fetch` then skips it. A healed
        # table is another one to them: they do not attach to it again.
        with suppress(UnknownTableError):
            if self._in_place is self._volatile and (host := self.host_table(table)):
                host.close()  # before a reader relies on the quarantine
        self._quarantined.add(table.tag)
        self.failed_above = True
        self.metrics.table_quarantined.labels(table.tag).set(1)
        _log.warning("%s: a write failed; its vectors in the volatile database are not read until dropped", table.tag)

    def _record_quarantine(self, table: TableSpec) -> DatabaseError | None:
        """Record once in the persistent database that the volatile one lacks a modification."""
        if self._persistent and self._authority is not None and table.tag not in self._recorded:
            tag, database = self._persistent.tag(table), self._authority
            if error := self._persistent.attempt(table, lambda: database.renew_writer_token(tag)):
                return error
            self._recorded.add(table.tag)
        return None

    def _is_hidden(self, table: TableSpec) -> bool:
        """Return True if the volatile rows of a table must not be read now."""
        if self._left_out and table.tag in self._left_out:
            return True
        return bool(self._quarantined) and not self._heal(table)

    def _heal(self, table: TableSpec) -> bool:
        """Drop the volatile rows of a quarantined table. Return True if the volatile database may be read."""
        if table.tag not in self._quarantined or self._volatile is None:
            return True
        database, stored = self._volatile.database, self._volatile.database.stored(table)

        def empty() -> None:
            database.drop_table(stored.tag)
            database.open_table(stored.tag, stored.width)

        if not self._healing.acquire(blocking=False):
            return False
        try:
            fence = self._fences[table.tag]
            with fence.filling(fence.token()) as allowed:  # a concurrent modification waits for this block
                if not allowed or self._volatile.attempt(table, empty):
                    return False
                # No promotion failed meanwhile: promotions skip a quarantined table.
                self._recorded.discard(table.tag)
                self.metrics.table_quarantined.labels(table.tag).set(0)
                self._quarantined.discard(table.tag)
        finally:
            self._healing.release()
        _log.info("%s: its vectors in the volatile database were dropped; it is read again", table.tag)
        return True

    def _promote(
        self,
        table: TableSpec,
        fence: TableFence,
        token: int,
        keys: KeyArray,
        out: RowArray,
        exact: FloatArray | None,
        fresh: BoolArray,
    ) -> None:
        if self._promotions is None or self._volatile is None or table.tag in self._left_out:
            return
        # Only rows of the persistent database are promoted, through the fence of the table: no modification runs meanwhile, so
        # that both tiers and the caches have the same vector, also of a row that the promotion evicts.
        volatile, promoted = self._volatile, keys[fresh]
        if not volatile.is_exact(table):
            vectors = out[fresh]
        else:
            vectors = decode(out[fresh], table.dim, table.row_dtype) if exact is None else exact[fresh]
        counts: list[int] = []

        def promote() -> None:
            counts.append(-1)  # started: a promotion that fails may still take effect
            counts.append(volatile.database.promote(volatile.tag(table), promoted, vectors))

        def job() -> None:
            with fence.filling(token) as allowed:  # the fence of the fetched table: another table may have its tag now
                if not allowed or table.tag in self._quarantined:
                    return
                if volatile.attempt(table, promote) is None:
                    self.metrics.promoted.labels(table.model_name, table.table_name).inc(counts[-1])
                    self._count_inserts(table, volatile, counts[-1])
                elif counts:
                    self._quarantine(table)

        self._promotions.submit(job)

    def _count_inserts(self, table: TableSpec, tier: _Tier, rows: int) -> None:
        counters = self.metrics.table(table.model_name, table.table_name)
        with self.metrics.lock:
            counters.inserts[tier.index] += rows

    def _count(self, table: TableSpec, tier: _Tier, hits: int, misses: int, spent_ns: int) -> None:
        counters = self.metrics.table(table.model_name, table.table_name)
        times = self.metrics.fetch_times(table.model_name, tier.name)
        with self.metrics.lock:
            times.add(spent_ns)
            counters.hits[tier.index] += hits
            counters.misses[tier.index] += misses
        if current.stages is not None and current.tiers is None and (trace := current.trace) is not None:
            trace.of(table.table_name).add(tier.name, hits)
