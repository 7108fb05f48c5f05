"""Reconnects a shared volatile database that was unreachable, and refills tables that lost their loaded rows."""

import logging
import threading
from collections.abc import Callable, Generator
from contextlib import closing, nullcontext, suppress

from hps.engine.chain import DatabaseChain
from hps.engine.refresh import Pace
from hps.errors import ConflictError, DatabaseError, HPSError, NotReadyError
from hps.ground.threads.pacing import paced
from hps.ground.threads.workers import PeriodicTask, Stop
from hps.models.loading.table_load import LoadTargets, TableLoad
from hps.models.loading.warm_up import DatabaseRows
from hps.stores.base import CopyOutcome, Database, PersistentDatabase, SharedDatabase
from hps.stores.unavailable import UnavailableDatabase
from hps.types import KeyArray, RowArray, TableSpec
from hps.versions.catalog import ModelCatalog
from hps.versions.deployment import Deployment
from hps.versions.live_models import LiveModels

_log = logging.getLogger(__name__)

POLL_S = 2.0
"""Seconds between two polls of the volatile database."""

# Rows copied at once: they take Redis up to 50 ms, for which a modification of the table waits. Smaller pieces cost Redis more
# time a row.
_PIECE_ROWS = 16_384
_PIECE_BYTES = 4 << 20  # upper bound on the same
_TABLES_A_POLL = 64  # each takes two round trips
_CLOSE_CHECK_S = 1.0  # between two checks for `close`
_SHARE = 0.5  # of the time, for a refill during lookups; all of it without lookups


class VolatileTier:
    """Repairs the volatile database that this process shares with others. *Thread-safe.*

    Every two seconds it tries to open an unreachable database, and searches tables of versions in service, or kept for a
    roll-back, that lack rows: Redis was emptied, restarted without its data, or replaced. One process of the fleet refills such
    a table, under a lease, from its persistent database, the authority, in small pieces with pauses between them. Meanwhile all
    processes skip the table in lookups. With nothing below, the model files are reloaded, and lookups fail until that is done.

    Args:
        targets: returns the databases that are loaded from model files.
        reload_table: loads the files of a table, by the index in its deployment, into a volatile database with nothing below.
    """

    def __init__(
        self,
        chain: DatabaseChain,
        live: LiveModels,
        targets: Callable[[], LoadTargets],
        open_database: Callable[[], Database],
        reload_table: Callable[[Deployment, int], object],
    ) -> None:
        self._chain = chain
        self._live = live
        self._targets = targets
        self._open_database = open_database
        self._reload_table = reload_table
        self._working = threading.Lock()
        self._failure = ""  # error of the last poll
        self._incomplete: dict[str, str] = {}  # by tag: progress of its repair
        self._urgent = 0  # running calls of `fill`
        self._next_start = 0  # of the next poll
        self._stop = Stop()
        self._task: PeriodicTask | None = None

    def start(self) -> None:
        """Start polling."""
        task = "repairing the volatile database"
        self._task = PeriodicTask("volatile-tier", self.poll, POLL_S, what=task, stop=self._stop)

    def close(self) -> None:
        """Stop polling, and end a running copy."""
        self._stop.set()
        if self._task is not None:
            self._task.abandon()

    @property
    def degraded(self) -> list[str]:
        """Missing parts of the volatile database, and the progress of their repair; empty if none."""
        volatile = self._chain.volatile
        if volatile is not None and (self._chain.away or self._failure):
            state = f"is away: {self._chain.away}" if self._chain.away else f"fails: {self._failure}"
            return [f"{volatile.kind} {state}; it is tried again every {POLL_S:g} s"]
        found = dict.fromkeys(self._chain.left_out, "it is about to be taken in") | self._incomplete
        return [f"table {tag} in the volatile database: {text}" for tag, text in sorted(found.items())]

    def poll(self) -> None:
        """Check the tables once, and refill those that lack rows.

        Raises:
            DatabaseError: the volatile database does not answer.
            NotReadyError: this was closed.
        """
        with self._working:
            self._poll_tables(self._next())

    def fill(self, deployment: Deployment) -> None:
        """Refill the tables of a deployment without pauses; also a copy that runs. Returns if the database does not answer.

        Raises:
            NotReadyError: this was closed.
        """
        self._urgent += 1
        try:
            while not self._working.acquire(timeout=_CLOSE_CHECK_S):
                if self._stop.is_set():
                    raise NotReadyError("filling the volatile database: the parameter server is being closed")
            try:
                with suppress(DatabaseError):  # `degraded` reports it
                    self._poll_tables(_tables_of([deployment] if deployment.chain is self._chain else []))
            finally:
                self._working.release()
        finally:
            self._urgent -= 1

    def _next(self) -> list[tuple[Deployment, int]]:
        """Return the tables to check: all while any lacks rows, else a bounded number at a time, in turn."""
        tables = _tables_of(self._deployments())
        if len(tables) <= _TABLES_A_POLL or self.degraded:
            return tables
        start, self._next_start = self._next_start % len(tables), self._next_start + _TABLES_A_POLL
        return (tables + tables)[start : start + _TABLES_A_POLL]

    def _keys_looked_up(self) -> int:
        tables = (table for deployment in self._live.all() for table in deployment.tables)
        return sum(self._chain.metrics.table(table.model_name, table.table_name).keys for table in tables)

    def _deployments(self) -> list[Deployment]:
        names = {deployment.config.model: deployment for deployment in self._live.all()}
        found = self._live.all() + [kept for name in names for kept in self._live.kept(name)]
        return [deployment for deployment in found if deployment.chain is self._chain]

    def _poll_tables(self, tables: list[tuple[Deployment, int]]) -> None:
        try:
            if self._chain.away:
                self._reconnect()
            for deployment, index in tables:
                tag = deployment.tables[index].tag
                try:
                    self._check_table(deployment, index)
                except (DatabaseError, NotReadyError):
                    raise
                except HPSError as error:  # concerns this table alone
                    self._incomplete[tag] = f"it lost its rows, and filling it failed: {error}"
        except DatabaseError as error:
            if self._chain.away:
                self._chain.away = str(error)
            else:
                self._failure = str(error)
            raise
        known = {table.tag for deployment in self._deployments() for table in deployment.tables}
        self._incomplete = {tag: text for tag, text in self._incomplete.items() if tag in known}
        self._failure = ""

    def _reconnect(self) -> None:
        if isinstance(self._chain.volatile, UnavailableDatabase):
            self._chain.take_in(self._open_database())
        else:  # it was put away when a deployment failed, and is still open
            for deployment in self._deployments():
                for table in deployment.tables:
                    self._chain.admit(table)
            self._chain.take_in()
        _log.info("the volatile database is connected again")

    def _check_table(self, deployment: Deployment, index: int) -> None:
        table, database, targets = deployment.tables[index], self._chain.volatile, self._targets()
        below = next((database for database in self._chain.databases if isinstance(database, PersistentDatabase)), None)
        if not isinstance(database, SharedDatabase) or (below is not None and not self._chain.admit(table)):
            return
        stored = database.stored(table)
        if database not in targets.load or not database.lacks_rows(stored.tag):
            self._mark_complete(table)
        elif below is None:
            self._reload(deployment, index, database)
        else:
            self._chain.leave_out(table)
            database.open_table(stored.tag, stored.width)  # empties a lost table for all processes in the same way
            rows = targets.initial_cache_rate * min(deployment.rows[index], database.stats(stored.tag).capacity_rows)
            if not database.claim_copy(stored.tag, deployment.fingerprints[index], round(rows)):
                self._incomplete[table.tag] = "it lost its rows, and another process refills it"
                return
            self._fill(table, below, database, deployment.rows[index], round(rows))
            self._mark_complete(table)

    def _mark_complete(self, table: TableSpec) -> None:
        self._chain.read_again(table)
        self._incomplete.pop(table.tag, None)

    def _reload(self, deployment: Deployment, index: int, database: SharedDatabase) -> None:
        table = deployment.tables[index]
        lost = "it lost its rows, and lookups of them fail"
        if deployment.log_starts and deployment.log_starts[index] is not None:
            self._incomplete[table.tag] = f"{lost}: deploy the model with force, which reads the log of updates again"
            return
        self._incomplete[table.tag] = f"{lost} until its files are loaded again, now"
        _log.warning("%s: %s lost its rows; reloading its files", table.tag, database.kind)
        self._reload_table(deployment, index)
        if deployment.aging is not None:
            deployment.aging.expire_files_again(index)
        self._mark_complete(table)

    def _fill(self, table: TableSpec, below: Database, database: SharedDatabase, total: int, rows: int) -> None:
        """Copy the first `rows` rows of a table, in the order of the database below, under a claim."""
        _log.warning("%s: %s lost its rows; refilling it from %s", table.tag, database.kind, below.kind)
        tag, done = database.stored(table).tag, 0
        outcome: CopyOutcome = "interrupted"
        try:
            with closing(self._pieces(table, below, database)) as pieces:
                for keys, vectors in pieces:
                    count = keys.size if rows >= total else min(keys.size, rows - done)
                    if not database.copy_rows(tag, keys[:count], vectors[:count]):
                        outcome = "refused"
                        return
                    done += count
                    percent = min(99, 100 * done // max(rows, 1))
                    self._incomplete[table.tag] = f"it lost its rows and is filled again, {percent} %"
                    if count < keys.size:
                        break
            outcome = "complete"
        finally:
            database.end_copy(tag, outcome)
            refused = "; others have modified the table, and their rows stay" if outcome == "refused" else ""
            _log.info("%s: refill of %s: %s after %d rows%s", table.tag, database.kind, outcome, done, refused)

    def _pieces(
        self, table: TableSpec, below: Database, database: Database
    ) -> Generator[tuple[KeyArray, RowArray], None, None]:
        """Yield current rows of the database below; modifications wait until the next piece is requested."""
        source, row_dtype = DatabaseRows(below, table), database.stored(table).row_dtype
        fence = self._chain.fence(table)
        started = fence.token()
        chunks = source.chunks(max(1, min(_PIECE_ROWS, _PIECE_BYTES // (8 + 4 * table.width))), row_dtype)
        pace, lookups = Pace(_SHARE, self._stop.wait), self._keys_looked_up()
        while True:
            before, lookups = lookups, self._keys_looked_up()
            yields = lookups > before and not self._urgent
            pace.share = _SHARE if yields else 1.0
            pace.rest()
            with self._chain.filling(table):
                with paced() if yields else nullcontext():
                    piece = next(chunks, None)
                if piece is None:
                    return
                # The scan is of the rows at its start. After a modification since then, the keys are read again, so that the
                # copy never overwrites a new row with an old one.
                yield piece if fence.is_current(started) else source.read(piece[0], row_dtype)


def _tables_of(deployments: list[Deployment]) -> list[tuple[Deployment, int]]:
    return [(deployment, index) for deployment in deployments for index in range(len(deployment.tables))]


def reload_table(catalog: ModelCatalog, targets: Callable[[], LoadTargets], deployment: Deployment, index: int) -> None:
    """Reload the files of a table in service into a volatile database with nothing below.

    Raises:
        ModelFileError: they cannot be read.
        ConflictError: they were replaced, or the remaining rows have online writes.
    """
    table = deployment.tables[index]
    doing = f"reloading table {table.tag}"
    version = catalog.version(deployment.config.model, deployment.version, lambda version: [])
    if catalog.fingerprints(version)[index] != deployment.fingerprints[index]:
        raise ConflictError(f"{doing}: its files are not those that were loaded; deploy the model")
    databases = [database for database in targets().load if isinstance(database, SharedDatabase)]
    if any(database.holds_writes(database.stored(table).tag) for database in databases):
        raise ConflictError(
            f"{doing}: only a part of it was lost, and the rest has online writes, which the files would replace; deploy the "
            "model with force, which gives them up"
        )
    TableLoad(table, version.sources[index], targets(), in_service=True).run()
