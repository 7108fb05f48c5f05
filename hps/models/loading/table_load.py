"""Loads the model files of a table, read once, into every database that lacks them."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from hps.errors import DatabaseError, ModelFileChangedError, ModelFileError, NonfiniteRowsError, UnknownTableError
from hps.filesystems.base import changed
from hps.ground.progress import NoProgress, Progress
from hps.ground.rows import decode, encode
from hps.ground.shares import owned_rows, rows_of_share, share_text
from hps.ground.threads.thread_pool import POOL
from hps.models.deltas import BaseRows, DeltaModel, Merge, TableSource, first_rows, open_table_files
from hps.models.files import SparseModel, extend_checksum, join_checksums
from hps.models.loading.read_ahead import chunk_ranges, read_chunks
from hps.models.loading.repeats import find_repeats
from hps.models.loading.warm_up import DatabaseRows, WarmUpSource
from hps.models.sealed import SealedModel
from hps.models.sources import ModelSources
from hps.stores.base import (
    UNBOUNDED_ROWS,
    AdoptsRowFiles,
    CopyOutcome,
    Database,
    InProcessDatabase,
    LastingDatabase,
    LoadRecord,
    MergesRows,
    PersistentDatabase,
    SharedDatabase,
)
from hps.types import FloatArray, KeyArray, RowArray, TableSpec

_log = logging.getLogger(__name__)

_LONG_MERGE_S = 5.0  # a merge that takes longer is logged
_CLAIM_WAIT_S = 1.0  # between two reports of progress while another process loads
_SQUARED_ELEMENTS = 1 << 18  # of a piece that is worth a thread
_MOST_BATCH_ROWS = 1 << 20  # sorting them takes 25 bytes a row


@dataclass(frozen=True, slots=True)
class LoadTargets:
    """The databases to load from model files. *Immutable.*

    Attributes:
        keep: databases that keep their rows (`initialize_after_startup: false`, `read_only`).
        initial_cache_rate: share of a volatile database's capacity, or of the rows if fewer, to load.
        int32_keys: refuse keys outside [0, 2^32) (`supportlonglong: false`).
        force: empty the databases before loading, except shared ones, whose rows others may use.
        max_nonfinite_rows: refuse a table with more rows that have an infinity or NaN.
    """

    load: tuple[Database, ...] = ()
    keep: tuple[Database, ...] = ()
    initial_cache_rate: float = 1.0
    int32_keys: bool = False
    sources: ModelSources = field(default_factory=ModelSources)
    force: bool = False
    max_nonfinite_rows: int = 0


@dataclass(frozen=True, slots=True)
class DatabaseLoad:
    """The rows [first_row, last_row) of the files loaded into one database; none if it had them all. *Immutable.*"""

    kind: str
    first_row: int
    last_row: int
    elsewhere: bool = False  # while another process loads them

    @property
    def rows(self) -> int:
        return self.last_row - self.first_row


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The result of a `TableLoad`. *Immutable.*

    Attributes:
        model: the loaded files, or for a delta a database with its rows, to warm caches from.
        loads: one entry for each loaded database, in order.
        differs: the authority may have other vectors than the files (it was updated online, kept, or writable by others), or
            than their first rows (a later row of the same key counts). A cache that is warmed from the files must then be
            refreshed before it serves.
        complete: a database has every row and evicts none.
        nonfinite_rows: read rows with an infinity or NaN.
    """

    tag: str
    model: WarmUpSource
    fingerprint: str
    seconds: float
    loads: tuple[DatabaseLoad, ...]
    differs: bool = False
    complete: bool = False
    nonfinite_rows: int = 0


class NonfiniteRows:
    """Counts rows with an infinity or NaN. *One thread.*

    Attributes:
        rows: how many were read.
        first_key: of the first one.
    """

    def __init__(self) -> None:
        self.rows = 0
        self.first_key: int | None = None

    def add(
        self,
        keys: KeyArray,  # (n,)
        vectors: FloatArray,  # (n, dim)
    ) -> None:
        squares = []

        def part(first: int, last: int) -> None:
            elements = vectors[first:last].reshape(-1)
            with np.errstate(over="ignore", invalid="ignore"):
                squares.append(np.dot(elements, elements))  # reads as fast as memory allows; a sum takes three times as long

        POOL.run(keys.size, max(1, _SQUARED_ELEMENTS // vectors.shape[1]), part)
        if np.isfinite(squares).all():
            return
        nonfinite = ~np.isfinite(vectors).all(axis=1)
        if self.first_key is None and nonfinite.any():
            self.first_key = int(keys[np.argmax(nonfinite)])
        self.rows += int(np.count_nonzero(nonfinite))


class TableLoad:
    """Streams the files of a table, once, into every database that lacks them. *One thread, one use.*

    A persistent database is skipped if it has exactly these files, continues an interrupted load of them, and is emptied
    first if it has another version; rows of unknown origin (HugeCTR's) stay and are overwritten by key. Volatile databases
    get all rows, up to `initial_cache_rate` of their capacity. A load takes the memory of a few chunks for any model.

    The persistent database is the authority: if it was modified after its load, or is kept, the volatile databases are filled
    from it instead of the files, whose vectors may be old. The same holds if they get only the first rows and keys of these
    are repeated in later rows, since the last row of a key counts on every tier.

    A delta is loaded from its unmodified base in a database of this process, or else from the base's files. It
    fills only the persistent database, which then fills the volatile ones. An interrupted load of a delta starts over.

    The table is opened in each database, also in those to keep.

    Args:
        source: directory or URI of its sparse model files, or a `TableSource`.
        progress: receives the progress if there is anything to load.
        in_service: lookups use the table in a shared database, which lost its rows. It is opened only once claimed, since
            missing keys of an open table would count as absent.

    Raises:
        ModelFileError: the files are missing or do not fit.
    """

    def __init__(
        self,
        table: TableSpec,
        source: str | TableSource,
        targets: LoadTargets,
        progress: Progress | None = None,
        *,
        in_service: bool = False,
    ) -> None:
        self._table = table
        self._in_service = in_service
        self._tag = table.tag
        self._targets = targets
        self._progress = progress or NoProgress()
        self._nonfinite = NonfiniteRows()
        self._adopted = False  # by the database with every row
        self._open_for_writing = False  # so the files may change without another version
        self._authority = next(
            (database for database in (*targets.load, *targets.keep) if isinstance(database, PersistentDatabase)), None
        )
        self._model = open_table_files(
            source, table.dim, int32_keys=targets.int32_keys, sources=targets.sources, share=table.share
        )

    @property
    def rows(self) -> int:
        """Rows to load: those of the files, or of the table's share; an upper bound for a delta and for a share."""
        return self._model.own_rows

    def drop_conflicting_tables(self) -> None:
        """Drop tables of another width, and with `force` all tables, also damaged ones, so that these files can be loaded.

        Rows of another width and of unknown origin (HugeCTR's) stay unless forced.

        Raises:
            ModelFileError: the files are not those that were opened: nothing is dropped.
        """
        for database in self._targets.load:
            stored = database.stored(self._table)
            if isinstance(database, PersistentDatabase) and database.must_drop(
                stored.tag, stored.width, force=self._targets.force
            ):
                self._verify()  # before a database loses its rows
                _log.warning(
                    "Table: %s; %s drops its rows, of another width or by force, and loads them anew.",
                    self._tag,
                    database.kind,
                )
                database.drop_table(stored.tag)

    def _verify(self) -> None:
        self._model.verify()
        if not isinstance(self._model, DeltaModel):
            self._model.check_format()

    def run(self) -> LoadReport:
        """Load the databases.

        Raises:
            ModelFileError: the files changed meanwhile, cannot be read, or have too many rows that are not finite. A database
                never counts a part as complete, and keeps no row of a refused table.
            DatabaseError: a database failed, or one to keep holds only a part of a model.
        """
        started = time.monotonic()
        databases = self._targets.load
        self.drop_conflicting_tables()
        for database in self._targets.keep:
            self._check_kept(database)
        for database in databases:
            self._open(database)
        # The files are verified before a database is emptied for them. If the authority has, or may have, newer vectors than
        # the files, the volatile databases are filled from it instead.
        records = [self._record(database) for database in databases]
        authority = self._authority
        differs = authority is not None and self._differs(authority)
        if not all(self._is_complete(record) for record in records):
            self._verify()  # before a database loses its rows
        self._open_for_writing = self._model.is_open_for_writing()
        complete_before = authority is not None and self._is_complete(authority.load_record(self._tag_in(authority)))
        if self._open_for_writing and complete_before and not self._targets.force:
            differs = True  # the files may have changed since the authority loaded them
        differs = differs or self._has_repeats(authority)
        if authority and complete_before:
            self._place_above(authority)  # rows that others loaded from copies of the files need not be loaded again
        copied = authority is not None and (differs or isinstance(self._model, DeltaModel))
        loads = [self._plan(database, record, copied) for database, record in zip(databases, records, strict=True)]
        if authority is None and not differs:  # rows that a shared database had before may have been updated since
            had = {id(target): load.first_row > 0 or load.elsewhere for target, load in zip(databases, loads, strict=True)}
            shared = (database for database in (*databases, *self._targets.keep) if database.shared)
            differs = any(had.get(id(database), True) for database in shared)
        self._read_into(
            [
                (database, load)
                for database, load, record in zip(databases, loads, records, strict=True)
                # A share may have no row, which is to be recorded.
                if not load.elsewhere and (load.rows or (database.persistent and not self._is_complete(record)))
            ]
        )
        for i, database in enumerate(databases):
            if loads[i].elsewhere and isinstance(database, SharedDatabase):
                loads[i] = self._wait_for_load(database, loads[i].last_row)
        if authority:
            self._place_above(authority)
        for i, database in enumerate(databases):
            if authority and copied and not database.persistent:
                loads[i] = self._copy_from(authority, database, differs)
            self._log_loaded(database, loads[i])
        if not (databases or self._targets.keep):
            self._check_for_caches()
        complete = authority or self._complete(loads)
        source: WarmUpSource = self._model
        if complete and (isinstance(self._model, DeltaModel) or self._adopted):
            source = DatabaseRows(complete, self._table)
        seconds = time.monotonic() - started
        return LoadReport(
            self._tag,
            source,
            self._model.fingerprint,
            seconds,
            tuple(loads),
            differs,
            complete is not None,
            self._nonfinite.rows,
        )

    def _check_for_caches(self) -> None:
        """Check all rows of a table without databases, so that caches serve no row of refused files."""
        if isinstance(self._model, DeltaModel):
            for keys, vectors in Merge(self._model).chunks():
                self._nonfinite.add(keys, vectors)
        else:
            self._model.check_format()
            checksum = self._checksum(self._model, 0, self._model.rows, count=True)
            if self._model.has_checksum:
                self._model.check_content(checksum)
        self._check_finite()

    def _complete(self, loads: Sequence[DatabaseLoad]) -> Database | None:
        """Return a volatile database with every row that evicts none, if any."""
        loaded = [target for target, load in zip(self._targets.load, loads, strict=True) if load.last_row == self._model.rows]
        kept = [database for database in self._targets.keep if database.shared]  # the others start empty
        unbounded = (
            database for database in (*loaded, *kept) if database.stats(self._tag_in(database)).capacity_rows >= UNBOUNDED_ROWS
        )
        return next(unbounded, None)

    def _place_above(self, authority: PersistentDatabase) -> None:
        for database in (*self._targets.load, *self._targets.keep):
            if isinstance(database, SharedDatabase):
                database.stand_above(self._tag_in(database), authority, self._tag_in(authority))

    def _tag_in(self, database: Database) -> str:
        return database.stored(self._table).tag

    def _open(self, database: Database) -> None:
        if self._in_service and database.shared:
            return
        stored = database.stored(self._table)
        database.open_table(stored.tag, stored.width)

    # -- state of the databases ---------------------------------------------------------------------------------------

    def _check_kept(self, database: Database) -> None:
        self._open(database)
        record = database.load_record(self._tag_in(database)) if isinstance(database, PersistentDatabase) else None
        if record is not None and not record.complete:
            raise DatabaseError(
                f"keeping table {self._tag_in(database)} in {database.kind} as it is (initialize_after_startup false): it "
                f"holds {record.rows_done} of {record.rows_total} rows of a load that was interrupted; "
                "complete it with `hps load`, or set initialize_after_startup to true"
            )
        kept, share = share_text(record.fingerprint) if record is not None else "", self._table.share
        if kept and kept != str(share):
            raise DatabaseError(
                f"keeping table {self._tag_in(database)} in {database.kind} as it is (initialize_after_startup false): it "
                f"holds share {kept}, expected {share or 'all rows'}; load it with `hps load`, or set initialize_after_startup "
                "to true"
            )

    def _record(self, database: Database) -> LoadRecord | None:
        """Read the load record of a database, unless it is forced. Recognise local files that were only copied or touched.

        Processes that load a shared database agree by their claims.
        """
        if self._targets.force or not isinstance(database, PersistentDatabase):
            return None
        record, model = database.load_record(self._tag_in(database)), self._model
        if record is None or not record.complete or not record.checksum or record.fingerprint == model.fingerprint:
            return record
        if (
            not isinstance(model, SparseModel)
            or not model.is_local
            or share_text(record.fingerprint) != share_text(model.fingerprint)
            or (record.rows_total, record.size_bytes) != (model.rows, model.size_bytes)
        ):
            return record
        _log.info("Table: %s; the files have another place or time than those in %s; comparing them.", self._tag, database.kind)
        model.verify()
        if self._checksum(model, 0, model.rows) != record.checksum:
            return record
        record = replace(record, fingerprint=model.fingerprint, source=model.place)
        self._write_record(database, record)
        return record

    def _is_complete(self, record: LoadRecord | None) -> bool:
        return record is not None and record.complete and record.fingerprint == self._model.fingerprint

    def _differs(self, authority: PersistentDatabase) -> bool:
        """Return True if the persistent database, once loaded or kept, has other vectors than the files."""
        record, kept = authority.load_record(self._tag_in(authority)), authority in self._targets.keep
        later = record is not None and record.modified and record.fingerprint == self._model.fingerprint
        if later and (
            self._adopter(authority) or (authority.keeps_changes(self._tag_in(authority)) and not self._targets.force)
        ):
            return True  # also before its file is complete
        if record is None or not self._is_complete(record):
            return kept
        return record.modified and (kept or not self._targets.force)

    def _has_repeats(self, authority: Database | None) -> bool:
        """Return True if a volatile database would get first rows whose keys are repeated in later rows."""
        model = self._model
        for database in self._targets.load:
            if database.persistent:
                continue
            rows = self._share(database, model.rows)
            repeats = find_repeats(model, rows) if isinstance(model, SparseModel) else None
            if repeats and authority is None:
                raise repeats.refusal(f"loading {self._tag} from {model.place}", database.kind, rows)
            if repeats:
                self._empty(database)  # an older load may have left the earlier rows there
                return True
        return False

    # -- plan ---------------------------------------------------------------------------------------------------------

    def _plan(self, database: Database, record: LoadRecord | None, copied: bool) -> DatabaseLoad:
        """Decide which rows of the files a database still needs; empty it if it holds other files."""
        if database.persistent:
            return DatabaseLoad(database.kind, self._first_row(database, record), self._model.rows)
        if copied:  # it gets its rows from the persistent database
            return DatabaseLoad(database.kind, 0, 0)
        if self._targets.force and not database.shared:
            self._empty(database)
        rows = self._share(database, self._model.rows)
        first: int | None = 0
        if isinstance(database, SharedDatabase):
            tag, replaces = self._tag_in(database), self._authority is not None
            first = database.claim_load(tag, self._model.fingerprint, rows, replaces=replaces)
        self._open(database)
        return DatabaseLoad(database.kind, first or 0, rows, elsewhere=first is None)

    def _first_row(self, database: Database, record: LoadRecord | None) -> int:
        if record is None:
            if self._targets.force or isinstance(self._model, DeltaModel):
                self._empty(database)
            return 0
        model = self._model
        same = record.fingerprint == model.fingerprint and 0 <= record.rows_done <= record.rows_total == model.rows
        if same and record.complete:
            return model.rows
        if same and isinstance(database, PersistentDatabase) and database.keeps_changes(self._tag_in(database)):
            return 0
        # Not if it was updated online: it is neither a state of these files nor complete, unless a database keeps its changes
        # beside the file that it takes. A delta has no order to continue in.
        kept = not record.modified or self._adopter(database) is not None
        if same and kept and not isinstance(model, DeltaModel):
            _log.info(
                "Table: %s; continuing an interrupted load of %s at row %d of %d.",
                self._tag,
                database.kind,
                record.rows_done,
                model.rows,
            )
            return record.rows_done
        level, lost = (logging.WARNING, ", with rows that were written online") if record.modified else (logging.INFO, "")
        _log.log(level, "Table: %s; %s has another state of the model%s, which is replaced.", self._tag, database.kind, lost)
        self._empty(database)
        return 0

    def _empty(self, database: Database) -> None:
        database.drop_table(self._tag_in(database))
        self._open(database)

    def _share(self, database: Database, rows: int, *, of_files: bool = True) -> int:
        """Compute how many of these rows a volatile database gets. Of files, it gets those of the table's share."""
        capacity, share = database.stats(self._tag_in(database)).capacity_rows, self._model.share
        if share is not None and of_files:
            capacity *= share.of
        return round(self._targets.initial_cache_rate * min(rows, capacity))

    # -- loading ------------------------------------------------------------------------------------------------------

    def _read_into(self, targets: Sequence[tuple[Database, DatabaseLoad]]) -> None:
        """Read the files once, from the first to the last row that any database needs."""
        if isinstance(self._model, DeltaModel):
            for database, load in targets:
                self._merge_into(self._model, database, load)
            return
        targets = [(database, load) for database, load in targets if not self._adopted_by(database)]
        if targets:
            self._stream_into(self._model, targets)

    def adopted_without_copy(self, database: Database) -> bool:
        """Return whether a database can take the files as they are, without room for a copy."""
        adopter, model = self._adopter(database), self._model
        return adopter is not None and isinstance(model, SealedModel) and not adopter.copies(model.source)

    def _adopter(self, database: Database) -> AdoptsRowFiles | None:
        """Return a database that can take the row file as it is; None if it must load the rows."""
        model = self._model
        if not isinstance(database, AdoptsRowFiles) or not isinstance(model, SealedModel) or self._open_for_writing:
            return None
        counted = 0 <= model.head.nonfinite_rows <= self._targets.max_nonfinite_rows  # else reading them finds the first
        return database if counted and database.stored(self._table).row_dtype == model.head.row_dtype else None

    def _adopted_by(self, database: Database) -> bool:
        """Let a database take the row file as it is; return False if it must load the rows."""
        model = self._model
        if not isinstance(model, SealedModel) or (adopter := self._adopter(database)) is None:
            return False
        record = LoadRecord(
            model.fingerprint,
            model.rows,
            model.rows,
            source=model.place,
            size_bytes=model.size_bytes,
            checksum=model.head.content[:16],
        )
        self._nonfinite = NonfiniteRows()
        self._nonfinite.rows = model.head.nonfinite_rows
        self._progress.start(self._tag, model.rows, model.size_bytes)
        how = adopter.adopt(self._tag_in(database), model.source, record, partial(self._progress.advance, self._tag))
        self._progress.finish(self._tag)
        _log.info("Table: %s; its row file %s: %s.", self._tag, model.file.path, how)
        self._adopted = how != "refused"
        return self._adopted

    def _stream_into(self, model: SparseModel | SealedModel, targets: Sequence[tuple[Database, DatabaseLoad]]) -> None:
        first, last = min(load.first_row for _, load in targets), max(load.last_row for _, load in targets)
        self._progress.start(self._tag, last - first, (last - first) * model.row_bytes)
        feeds = [self._feed(database, load) for database, load in targets]
        self._nonfinite = NonfiniteRows()
        self._checksum(model, 0, first, count=True)  # the rows of an interrupted load
        with closing(read_chunks(model, chunk_ranges(model, first, last), sums=any(feed.sums for feed in feeds))) as chunks:
            for start, keys, vectors, checksum in chunks:
                self._nonfinite.add(keys, vectors)
                rows = self._encoded(keys, vectors)
                for feed in feeds:
                    feed.add(start, keys, vectors, vectors if feed.is_exact else rows, checksum)
                self._progress.advance(self._tag, keys.size)
        self._check_unchanged(model, targets, feeds)
        self._check_finite([database for database, _ in targets])
        for (database, _), feed in zip(targets, feeds, strict=True):
            feed.end()
            self._finish(database)
        self._progress.finish(self._tag)

    def _finish(self, database: Database) -> None:
        started = time.monotonic()
        if isinstance(database, LastingDatabase):
            database.finish_load(self._tag_in(database))
        if (seconds := time.monotonic() - started) > _LONG_MERGE_S:
            _log.info("Table: %s; %s merged its rows in %.1f s.", self._tag, database.kind, seconds)

    def _merge_into(self, model: DeltaModel, database: Database, load: DatabaseLoad) -> None:
        """Fill a database with the rows of a delta from its base here, or else from files; write its load record last."""
        self._check_at_rest(model)
        for base in (self._base_rows(model, database), None):
            if base:
                _log.info("Table: %s; %s has the rows that it does not change.", self._tag, database.kind)
            self._progress.start(self._tag, load.last_row, load.last_row * model.row_bytes)
            feed, merge = self._feed(database, replace(load, first_row=0), base), Merge(model, base)
            self._nonfinite = NonfiniteRows()
            if base and isinstance(database, MergesRows) and self._merged_within(database, merge, base, feed.record):
                if base.is_current():
                    break
                self._empty(database)
                continue
            chunks = merge.chunks() if load.last_row == model.rows else first_rows(merge.chunks(), load.last_row)
            with closing(chunks):
                for keys, vectors in chunks:
                    self._nonfinite.add(keys, vectors)
                    rows = self._encoded(keys, vectors)
                    feed.add(0, keys, vectors, vectors if feed.is_exact else rows)
                    self._progress.advance(self._tag, keys.size)
            if base is None or base.is_current():
                break
            _log.info("Table: %s; its base was modified while it was copied; reading the base's files.", self._tag)
            self._empty(database)
        self._check_at_rest(model)
        self._check_finite([database])
        feed.end()
        self._finish(database)
        if database.persistent:
            self._write_record(database, replace(feed.record, rows_done=model.rows, checksum=merge.checksum))
        self._progress.finish(self._tag)

    def _merged_within(self, database: MergesRows, merge: Merge, base: BaseRows, record: LoadRecord) -> bool:
        """Let the database merge the changes with the table that has the base's rows; return whether it did."""

        def rows() -> Iterator[tuple[KeyArray, RowArray | None]]:
            for keys, vectors in merge.changes():
                if vectors is not None:
                    self._nonfinite.add(keys, vectors)
                self._progress.advance(self._tag, keys.size)
                yield keys, None if vectors is None else self._encoded(keys, vectors)

        changes = merge.rows_changed
        return bool(base.tag) and database.load_merged(self._table.tag, base.tag, rows(), changes, record)

    def _check_at_rest(self, model: DeltaModel) -> None:
        if model.is_open_for_writing():
            raise ModelFileChangedError(
                f"reading {model.place}: its files, or those of a version that it changes, are open for writing; load it when "
                "the writer is done"
            )

    def _base_rows(self, model: DeltaModel, database: Database) -> BaseRows | None:
        """Return the rows of the latest base that this process holds unmodified; None if there is none."""
        for level in reversed(range(len(model.deltas))):
            resident, fingerprint = model.resident[level], model.fingerprints[level]
            if resident is None:
                continue
            if isinstance(database, PersistentDatabase):
                base = database.stored(resident.table)
                if base.row_dtype != database.stored(self._table).row_dtype:
                    continue
                if (record := self._unmodified_record(database, base)) and record.fingerprint == fingerprint:
                    chunks = partial(self._vectors_in, database, base, model.chunk_rows)
                    is_current = partial(self._is_unmodified, database, base.tag, record)
                    return BaseRows(level, chunks, record.checksum, is_current, base.tag)
            elif resident.database is not None and resident.fingerprint == fingerprint:
                base = resident.database.stored(resident.table)
                if base.row_dtype != database.stored(self._table).row_dtype or not _is_open(resident.database, base.tag):
                    continue
                chunks = partial(self._vectors_in, resident.database, base, model.chunk_rows)
                if resident.unmodified():
                    return BaseRows(level, chunks, "", resident.unmodified)
        return None

    def _encoded(self, keys: KeyArray, vectors: FloatArray) -> RowArray:
        return encode(f"loading table {self._tag}", vectors, self._table.row_dtype, keys)

    def _vectors_in(self, database: Database, stored: TableSpec, chunk_rows: int) -> Iterator[tuple[KeyArray, FloatArray]]:
        """Read the vectors of a table of the same row format: encoded again, they are the same rows."""
        for keys, rows in database.scan(stored.tag, chunk_rows):
            yield keys, decode(rows, stored.dim, stored.row_dtype)

    def _unmodified_record(self, database: PersistentDatabase, stored: TableSpec) -> LoadRecord | None:
        """Return the load record of another table if it is complete and unmodified."""
        if stored.tag not in database.tags():
            return None
        database.open_table(stored.tag, stored.width)
        record = database.load_record(stored.tag)
        return record if record is not None and record.complete and not record.modified else None

    def _is_unmodified(self, database: PersistentDatabase, tag: str, record: LoadRecord) -> bool:
        """Return True if a table still has its record; a modification changes the record before a row."""
        return tag in database.tags() and database.load_record(tag) == record

    def _check_unchanged(
        self, model: SparseModel | SealedModel, targets: Sequence[tuple[Database, DatabaseLoad]], feeds: "Sequence[LoadFeed]"
    ) -> None:
        """Check that the loaded rows are of one state of the files, and of the state in `version.json`."""
        # Each write gives a local file another version, which every read checks, unless a process has the file open and mapped.
        # Such files are read again, and the databases are emptied if the content differs.
        try:
            if model.is_open_for_writing() or self._open_for_writing:
                for (_, load), feed in zip(targets, feeds, strict=True):
                    if (
                        not self._open_for_writing
                        or self._checksum(model, feed.first_summed_row, load.last_row) != feed.record.checksum
                    ):
                        raise changed(model.place, "at the opening")
            if model.has_checksum:
                complete = (feed for (_, load), feed in zip(targets, feeds, strict=True) if load.last_row == model.rows)
                sums = next((feed.record.checksum for feed in complete if not feed.first_summed_row), "")
                model.check_content(sums or self._checksum(model, 0, model.rows))
        except ModelFileError:
            for database, _ in targets:
                self._empty(database)
            raise

    def _check_finite(self, databases: Sequence[Database] = ()) -> None:
        """Refuse a table with too many rows that are not finite, and drop it."""
        found, allowed = self._nonfinite, self._targets.max_nonfinite_rows
        if not found.rows:
            return
        finding = f"{found.rows} of {self._model.rows} rows have an infinity or NaN, the first that of key {found.first_key}"
        if found.rows <= allowed:
            _log.warning("Table: %s; %s; max_nonfinite_rows or checks.finite allow them.", self._tag, finding)
            return
        for database in databases:
            database.drop_table(self._tag_in(database))
        raise NonfiniteRowsError(
            f"loading table {self._tag} from {self._model.place}: {finding}; expected at most {allowed}: it is not served. "
            "Write the version again with finite vectors, or allow such rows with `max_nonfinite_rows` of the model"
        )

    def _checksum(self, model: SparseModel | SealedModel, first: int, last: int, *, count: bool = False) -> str:
        """Compute the checksum of rows [first, last); with `count`, also count those that are not finite."""
        checksum = ""
        with closing(read_chunks(model, chunk_ranges(model, first, last), sums=True)) as chunks:
            for _, keys, vectors, next_rows in chunks:
                if count:
                    self._nonfinite.add(keys, vectors)
                checksum = join_checksums(checksum, next_rows, keys, vectors)
        return checksum

    def _feed(self, database: Database, load: DatabaseLoad, base: BaseRows | None = None) -> "LoadFeed":
        model = self._model
        record = LoadRecord(model.fingerprint, load.first_row, model.rows, source=model.place, size_bytes=model.size_bytes)
        stored = database.stored(self._table)
        if isinstance(database, InProcessDatabase):
            own = isinstance(model, DeltaModel)  # sealed rows are of the share, and those of later versions are not
            rows = min(model.own_rows, load.last_row) if own else rows_of_share(model.share, load.last_row)
            database.reserve(stored.tag, rows, self._keys(load.last_row, base))
        if isinstance(database, PersistentDatabase):
            before = database.load_record(stored.tag) if load.first_row else None
            if before is not None:  # the checksum of the interrupted load
                record = replace(record, checksum=before.checksum)
            else:
                self._write_record(database, record)  # so that a start that keeps the rows refuses a partial load
        if isinstance(model, DeltaModel):
            return LoadFeed(database, self._table, record, model.rows, counts=False)
        sums = self._open_for_writing or model.has_checksum
        return LoadFeed(database, self._table, record, load.last_row, sums=sums)

    def _keys(self, rows: int, base: BaseRows | None) -> Iterator[KeyArray]:
        """Yield the keys of the first rows, so that a hash map can place the rows; the next chunk overwrites them.

        Args:
            base: base of a delta that is not read from files.
        """
        model, level = self._model, base.level if base else 0
        parts: list[SparseModel | SealedModel]
        parts = [delta.changed for delta in model.deltas[level:]] if isinstance(model, DeltaModel) else [model]
        if base:
            yield from (keys for keys, _vectors in base.chunks())
        elif isinstance(model, DeltaModel):
            parts.insert(0, model.base)
        for part in parts:
            for _, keys in part.keys.key_chunks(0, min(rows, part.rows)):
                yield keys if part.share is None else keys[part.share.owns(keys)]

    def _write_record(self, database: Database, record: LoadRecord) -> None:
        stored = database.stored(self._table)
        database.load_chunk(stored.tag, np.empty(0, np.int64), np.empty((0, stored.width), np.float32), record)

    def _wait_for_load(self, database: SharedDatabase, rows: int) -> DatabaseLoad:
        """Wait until another process has loaded a shared database; load the rest if its claim runs out."""
        load = DatabaseLoad(database.kind, self._claim_when_free(database, rows), rows)
        if load.rows:
            self._read_into([(database, load)])
        return load

    def _claim_when_free(self, database: SharedDatabase, rows: int) -> int:
        """Wait until no other process loads a shared database; return the first row that it still needs."""
        _log.info("Table: %s; another process is loading %s; waiting for it.", self._tag, database.kind)
        self._progress.start(self._tag, rows, rows * self._model.row_bytes)
        tag, fingerprint, replaces = self._tag_in(database), self._model.fingerprint, self._authority is not None
        while (first := database.claim_load(tag, fingerprint, rows, wait_s=_CLAIM_WAIT_S, replaces=replaces)) is None:
            self._progress.advance(self._tag, 0)  # its rows are unknown here; a progress that raises ends the wait
        self._progress.advance(self._tag, first)
        self._progress.finish(self._tag)
        return first

    def _copy_from(self, authority: Database, database: Database, differs: bool) -> DatabaseLoad:
        """Fill a volatile database from the persistent one, up to its share of rows."""
        if isinstance(database, SharedDatabase):
            if not differs:  # the rows are exactly those of the files, on which other processes may rely
                return self._copy_as_files(authority, database)
            return self._copy_under_claim(authority, database)
        size, tag = authority.size(self._tag_in(authority)), self._tag_in(database)
        limit = self._share(database, size, of_files=False)
        reads = limit == size and not isinstance(self._model, DeltaModel)  # of a delta, the files of its base may be far away
        if isinstance(database, InProcessDatabase):
            database.reserve(tag, limit, self._keys(self._model.rows, None) if reads else ())
        return DatabaseLoad(database.kind, 0, self._copy(authority, database, limit, partial(database.promote, tag)))

    def _copy_as_files(self, authority: Database, database: SharedDatabase) -> DatabaseLoad:
        """Fill a shared database from the persistent one, under the fingerprint of the files."""
        rows, fingerprint = self._share(database, self._model.rows), self._model.fingerprint
        first = database.claim_load(tag := self._tag_in(database), fingerprint, rows)
        self._open(database)
        if first is None:
            first = self._claim_when_free(database, rows)
        if first == rows:
            return DatabaseLoad(database.kind, rows, rows)
        record = LoadRecord(fingerprint, 0, rows)  # an interrupted load of another process may have had another order
        self._copy(authority, database, rows, lambda keys, part: database.load_chunk(tag, keys, part, record))
        database.finish_load(tag)
        return DatabaseLoad(database.kind, 0, rows)

    def _copy_under_claim(self, authority: Database, database: SharedDatabase) -> DatabaseLoad:
        """Fill a shared database from the persistent one, unless it lacks no rows or another process fills it."""
        rows, tag = self._share(database, authority.size(self._tag_in(authority)), of_files=False), self._tag_in(database)
        if not database.claim_copy(tag, self._model.fingerprint, rows):
            return DatabaseLoad(database.kind, rows, rows)
        outcome: CopyOutcome = "interrupted"
        try:
            accepted: list[bool] = []
            done = self._copy(
                authority, database, rows, lambda keys, part: accepted.append(database.copy_rows(tag, keys, part))
            )
            outcome = "complete" if all(accepted) else "refused"
        finally:
            database.end_copy(tag, outcome)
        return DatabaseLoad(database.kind, 0, done)

    def _copy(self, authority: Database, database: Database, limit: int, write: Callable[[KeyArray, RowArray], object]) -> int:
        """Copy rows of the persistent database up to a limit; return how many."""
        _log.info("Table: %s; filling %s from %s.", self._tag, database.kind, authority.kind)
        done = 0
        self._progress.start(self._tag, limit, limit * self._model.row_bytes)
        row_dtype = database.stored(self._table).row_dtype
        for keys, rows in DatabaseRows(authority, self._table).chunks(self._model.chunk_rows, row_dtype):
            count = min(keys.size, limit - done)
            if count <= 0:
                break
            write(keys[:count], rows[:count])
            done += count
            self._progress.advance(self._tag, count)
        self._progress.finish(self._tag)
        return done

    def _log_loaded(self, database: Database, load: DatabaseLoad) -> None:
        """Log the lines that HugeCTR's users search for."""
        rows = self._model.rows
        if database.persistent:
            how = "complete" if load.rows else "all were there"
            _log.info("Table: %s; cached %d embeddings in persistent database (%s); %s.", self._tag, rows, database.kind, how)
            return
        stats = database.stats(self._tag_in(database))
        size = f"{stats.rows}, unbounded"
        if stats.capacity_rows < UNBOUNDED_ROWS:
            size = f"{stats.rows} / {stats.capacity_rows} ({100 * stats.rows / max(stats.capacity_rows, 1):.2f}%)"
        _log.info(
            "Table: %s; cached %d / %d embeddings in volatile database (%s); load: %s.",
            self._tag,
            load.last_row,
            rows,
            database.kind,
            size,
        )


def _is_open(database: Database, tag: str) -> bool:
    with suppress(UnknownTableError):
        database.stats(tag)
        return True
    return False


class LoadFeed:
    """Gathers chunks into batches of the database's preferred size, and counts them in its load record. *One thread.*

    Of the rows of files, those of the table's share are loaded; the record counts all of them.

    Attributes:
        is_exact: the database stores float32 rows of a table with fewer bits.
        sums: the record has the checksum of the rows.

    Args:
        record: `rows_done` is the first row to load, `checksum` is of the rows before it.
        last_row: end of the rows to load, exclusive.
        sums: compute the checksum also for a database that stores none.
        counts: rows come in the order of the files, so that the record can count them; otherwise all are of the share.
    """

    def __init__(
        self,
        database: Database,
        table: TableSpec,
        record: LoadRecord,
        last_row: int,
        *,
        sums: bool = False,
        counts: bool = True,
    ) -> None:
        stored = database.stored(table)
        self._database, self._tag, width = database, stored.tag, stored.width
        self.is_exact = stored is not table
        self.record, self._last_row = record, last_row
        self._stored = record
        self._counts = counts
        self._share = table.share if counts else None
        self.sums = sums or database.persistent  # others are never compared with files
        self.first_summed_row = 0 if record.checksum else record.rows_done
        rows = min(database.load_bytes // (8 + 4 * width), _MOST_BATCH_ROWS, last_row - record.rows_done)
        self._keys, self._rows = np.empty(rows, np.int64), np.empty((rows, width), np.float32)
        self._gathered = 0

    def add(
        self,
        start: int,
        keys: KeyArray,  # (n,)
        vectors: FloatArray,  # (n, dim)
        rows: RowArray,  # (n, width)
        checksum: str = "",
    ) -> None:
        """Load the missing rows of a chunk. They are certain to be in the database only after `end`.

        Args:
            start: first row of the chunk; chunks come in order, without gaps.
            keys, vectors: as read, C-contiguous; the checksum is theirs. May be reused afterwards.
            rows: the vectors as the table stores them; may be reused afterwards.
            checksum: checksum of the chunk alone, if known.
        """
        missing = slice(max(self.record.rows_done - start, 0), max(self._last_row - start, 0))
        complete = missing.start == 0 and missing.stop >= keys.size
        keys, vectors, rows = keys[missing], vectors[missing], rows[missing]
        if not keys.size:
            return
        if self._gathered + keys.size > self._keys.size:
            self._flush()
        if self._counts:
            before, done = self.record.checksum, ""
            if self.sums and checksum and complete:
                done = join_checksums(before, checksum, keys, vectors)
            elif self.sums:
                done = extend_checksum(before, keys, vectors)
            self.record = replace(self.record, rows_done=start + missing.start + keys.size, checksum=done)
        if self._share is not None:
            keys, rows = owned_rows(self._share, keys, rows)
        if keys.size > self._keys.size:
            self._load(keys, rows)
            return
        place = slice(self._gathered, self._gathered + keys.size)
        self._keys[place], self._rows[place] = keys, rows
        self._gathered = place.stop

    def end(self) -> None:
        """Load the gathered rows, and free their memory."""
        self._flush()
        self._keys, self._rows = self._keys[:0].copy(), self._rows[:0].copy()
        if self._share is not None and self.record is not self._stored:  # the last rows were of other shares
            self._load(self._keys, self._rows)

    def _flush(self) -> None:
        if self._gathered:
            self._load(self._keys[: self._gathered], self._rows[: self._gathered])
            self._gathered = 0

    def _load(self, keys: KeyArray, rows: RowArray) -> None:
        self._database.load_chunk(self._tag, keys, rows, self.record)
        self._stored = self.record
