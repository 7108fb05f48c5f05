"""Takes in a shared volatile database that was away, and fills it again where it lost the rows that were loaded."""

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

EVERY_S = 2.0
"""Seconds between two looks at the volatile database."""

_PIECE_ROWS = 16_384  # copied at once: up to 50 ms of Redis' time, for which a modification waits; fewer cost Redis more each
_PIECE_BYTES = 4 << 20  # upper bound on the same
_MOST_LOOKED = 64  # tables at once, each two round trips
_LOOK_S = 1.0  # between two looks whether this was closed
_SHARE = 0.5  # of the time, for filling beside lookups; all of it without


class VolatileTier:
    """Looks after the volatile database that this process shares with others. *Thread-safe.*

    Every two seconds it tries to open a database that is away, and looks for tables of versions in service, or kept for a
    roll-back, that lack rows: Redis was emptied, restarted without its data, or replaced. One process of the fleet fills such a
    table, under a lease: from its persistent database, whose rows count, in small pieces with pauses between them. All
    processes leave the table out of lookups meanwhile, so that these cost what they cost without it. With nothing below, the
    model files are loaded again, and lookups fail until that is done.

    Args:
        open_database: opens the volatile database.
        targets: returns the databases that are loaded from model files.
        load_again: loads the files of a table, by the index in its deployment, into a volatile database with nothing below.
    """

    def __init__(
        self,
        chain: DatabaseChain,
        live: LiveModels,
        targets: Callable[[], LoadTargets],
        open_database: Callable[[], Database],
        load_again: Callable[[Deployment, int], object],
    ) -> None:
        self._chain = chain
        self._live = live
        self._targets = targets
        self._open_database = open_database
        self._load_again = load_again
        self._working = threading.Lock()
        self._silent = ""  # why the last look failed
        self._lacking: dict[str, str] = {}  # by tag: what is done about its rows
        self._urgent = 0  # calls of `fill`
        self._looked = 0  # tables
        self._stop = Stop()
        self._task: PeriodicTask | None = None

    def start(self) -> None:
        """Look every two seconds from now on."""
        what = "looking after the volatile database"
        self._task = PeriodicTask("volatile-tier", self.tend, EVERY_S, what=what, stop=self._stop)

    def close(self) -> None:
        """End a running copy, and look no more."""
        self._stop.set()
        if self._task is not None:
            self._task.abandon()

    @property
    def degraded(self) -> list[str]:
        """What lookups do without, and what is done about it; empty if nothing."""
        volatile = self._chain.volatile
        if volatile is not None and (self._chain.away or self._silent):
            what = f"is away: {self._chain.away}" if self._chain.away else f"fails: {self._silent}"
            return [f"{volatile.kind} {what}; it is tried again every {EVERY_S:g} s"]
        found = dict.fromkeys(self._chain.left_out, "it is about to be taken in") | self._lacking
        return [f"table {tag} in the volatile database: {text}" for tag, text in sorted(found.items())]

    def tend(self) -> None:
        """Look once, and fill what lacks rows.

        Raises:
            DatabaseError: the volatile database does not answer.
            NotReadyError: this was closed.
        """
        with self._working:
            self._look(self._next())

    def fill(self, deployment: Deployment) -> None:
        """Fill the tables of a deployment that lack rows, without pauses; return when done, or the database does not answer.

        A copy that runs goes on without pauses.

        Raises:
            NotReadyError: this was closed.
        """
        self._urgent += 1
        try:
            while not self._working.acquire(timeout=_LOOK_S):
                if self._stop.is_set():
                    raise NotReadyError("filling the volatile database: the parameter server is being closed")
            try:
                with suppress(DatabaseError):  # `degraded` tells it
                    self._look(_tables_of([deployment] if deployment.chain is self._chain else []))
            finally:
                self._working.release()
        finally:
            self._urgent -= 1

    def _next(self) -> list[tuple[Deployment, int]]:
        """Return the tables to look at: all while some lack rows, else a bounded number at a time, in turn."""
        tables = _tables_of(self._deployments())
        if len(tables) <= _MOST_LOOKED or self.degraded:
            return tables
        start, self._looked = self._looked % len(tables), self._looked + _MOST_LOOKED
        return (tables + tables)[start : start + _MOST_LOOKED]

    def _keys_looked_up(self) -> int:
        tables = (table for one in self._live.all() for table in one.tables)
        return sum(self._chain.metrics.table(table.model_name, table.table_name).keys for table in tables)

    def _deployments(self) -> list[Deployment]:
        names = {one.config.model: one for one in self._live.all()}
        found = self._live.all() + [kept for name in names for kept in self._live.kept(name)]
        return [one for one in found if one.chain is self._chain]

    def _look(self, tables: list[tuple[Deployment, int]]) -> None:
        try:
            if self._chain.away:
                self._take_in()
            for deployment, index in tables:
                tag = deployment.tables[index].tag
                try:
                    self._look_at(deployment, index)
                except (DatabaseError, NotReadyError):
                    raise
                except HPSError as error:  # of this table alone
                    self._lacking[tag] = f"it lost its rows, and filling it failed: {error}"
        except DatabaseError as error:
            if self._chain.away:
                self._chain.away = str(error)
            else:
                self._silent = str(error)
            raise
        known = {table.tag for deployment in self._deployments() for table in deployment.tables}
        self._lacking = {tag: text for tag, text in self._lacking.items() if tag in known}
        self._silent = ""

    def _take_in(self) -> None:
        if isinstance(self._chain.volatile, UnavailableDatabase):
            self._chain.take_in(self._open_database())
        else:  # it failed a deployment, and is still open
            for deployment in self._deployments():
                for table in deployment.tables:
                    self._chain.admit(table)
            self._chain.take_in()
        _log.info("the volatile database is taken in again")

    def _look_at(self, deployment: Deployment, index: int) -> None:
        table, database, targets = deployment.tables[index], self._chain.volatile, self._targets()
        below = next((database for database in self._chain.databases if isinstance(database, PersistentDatabase)), None)
        if not isinstance(database, SharedDatabase) or (below is not None and not self._chain.admit(table)):
            return
        stored = database.stored(table)
        if database not in targets.load or not database.lacks_rows(stored.tag):
            self._whole(table)
        elif below is None:
            self._load(deployment, index, database)
        else:
            self._chain.leave_out(table)
            database.open_table(stored.tag, stored.width)  # which empties it, if it is gone, for all processes in the same way
            rows = targets.initial_cache_rate * min(deployment.rows[index], database.stats(stored.tag).capacity_rows)
            if not database.claim_copy(stored.tag, deployment.fingerprints[index], round(rows)):
                self._lacking[table.tag] = "it lost its rows, and another process fills it again"
                return
            self._fill(table, below, database, deployment.rows[index], round(rows))
            self._whole(table)

    def _whole(self, table: TableSpec) -> None:
        self._chain.read_again(table)
        self._lacking.pop(table.tag, None)

    def _load(self, deployment: Deployment, index: int, database: SharedDatabase) -> None:
        table = deployment.tables[index]
        lost = "it lost its rows, and lookups of them fail"
        if deployment.log_starts and deployment.log_starts[index] is not None:
            self._lacking[table.tag] = f"{lost}: deploy the model with force, which reads the log of updates again"
            return
        self._lacking[table.tag] = f"{lost} until its files are loaded again, now"
        _log.warning("%s: %s lost its rows; loading its files again", table.tag, database.kind)
        self._load_again(deployment, index)
        self._whole(table)

    def _fill(self, table: TableSpec, below: Database, database: SharedDatabase, total: int, rows: int) -> None:
        """Copy the rows of a table, or the first ones in the order of the database below, under a claim."""
        _log.warning("%s: %s lost its rows; filling it again from %s", table.tag, database.kind, below.kind)
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
                    self._lacking[table.tag] = f"it lost its rows and is filled again, {percent} %"
                    if count < keys.size:
                        break
            outcome = "complete"
        finally:
            database.end_copy(tag, outcome)
            refused = "; others have modified the table, and their rows stay" if outcome == "refused" else ""
            _log.info("%s: filling %s again: %s after %d rows%s", table.tag, database.kind, outcome, done, refused)

    def _pieces(
        self, table: TableSpec, below: Database, database: Database
    ) -> Generator[tuple[KeyArray, RowArray], None, None]:
        """Yield current rows of the database below; modifications wait until the next piece is asked for."""
        source, row_dtype = DatabaseRows(below, table), database.stored(table).row_dtype
        fence = self._chain.fence(table)
        began = fence.token()
        chunks = source.chunks(max(1, min(_PIECE_ROWS, _PIECE_BYTES // (8 + 4 * table.width))), row_dtype)
        pace, lookups = Pace(_SHARE, self._stop.wait), self._keys_looked_up()
        while True:
            before, lookups = lookups, self._keys_looked_up()
            beside = lookups > before and not self._urgent
            pace.share = _SHARE if beside else 1.0
            pace.rest()
            with self._chain.filling(table):
                with paced() if beside else nullcontext():
                    piece = next(chunks, None)
                if piece is None:
                    return
                # The scan may have begun before a modification, and not see it.
                yield piece if fence.is_current(began) else source.read(piece[0], row_dtype)


def _tables_of(deployments: list[Deployment]) -> list[tuple[Deployment, int]]:
    return [(deployment, index) for deployment in deployments for index in range(len(deployment.tables))]


def load_again(catalog: ModelCatalog, targets: Callable[[], LoadTargets], deployment: Deployment, index: int) -> None:
    """Load the files of a table in service again into a volatile database with nothing below.

    Raises:
        ModelFileError: they cannot be read.
        ConflictError: they are others by now, or online writes are among the rows that were not lost.
    """
    table = deployment.tables[index]
    doing = f"loading table {table.tag} again"
    version = catalog.version(deployment.config.model, deployment.version, lambda version: [])
    if catalog.fingerprints(version)[index] != deployment.fingerprints[index]:
        raise ConflictError(f"{doing}: its files are others than those that were loaded; deploy the model")
    databases = [one for one in targets().load if isinstance(one, SharedDatabase)]
    if any(database.holds_writes(database.stored(table).tag) for database in databases):
        raise ConflictError(
            f"{doing}: only a part of it was lost, and the rest has online writes, which the files would replace; deploy the "
            "model with force, which gives them up"
        )
    TableLoad(table, version.sources[index], targets(), in_service=True).run()
