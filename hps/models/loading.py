"""From model files into the databases: one pass, what is there skipped, what was interrupted continued."""

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

import numpy as np

from hps.databases.base import Database, InProcessDatabase, LoadRecord, PersistentDatabase, SharedDatabase
from hps.errors import DatabaseError
from hps.models.files import CHUNK_BYTES, SparseModel, open_sparse_model
from hps.models.load_feed import LoadFeed, extended
from hps.models.read_ahead import read_ahead
from hps.models.sources import ModelSources
from hps.progress import Progress
from hps.types import TableSpec

_log = logging.getLogger(__name__)

_LONG_S = 5.0  # what takes longer is told
_LOOK_S = 1.0  # between two looks at what another process loads


@dataclass(frozen=True, slots=True)
class DatabaseLoad:
    """What `load_table` gave one database: rows [first_row, last_row) of the files; none when it had them all."""

    kind: str
    first_row: int
    last_row: int
    elsewhere: bool = False  # while another process loads them

    @property
    def rows(self) -> int:
        return self.last_row - self.first_row


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What `load_table` did.

    Attributes:
        tag: of the table.
        model: the files, as they were loaded; `warm_up` from it fills a cache with the same version.
        seconds: it took.
        loads: one entry a database, in the order they were given.
        differs: the persistent database has other vectors than the files (online updates, or it was kept as it was): a
            cache that is warmed up from the files must be refreshed before it serves.
    """

    tag: str
    model: SparseModel
    seconds: float
    loads: tuple[DatabaseLoad, ...]
    differs: bool = False

    @property
    def nothing_to_do(self) -> bool:
        """Whether every database already had all rows."""
        return not any(load.rows for load in self.loads)


def load_table(
    table: TableSpec,
    source: str,
    databases: Sequence[Database],
    *,
    progress: Progress | None = None,
    keep: Sequence[Database] = (),
    initial_cache_rate: float = 1.0,
    int32_keys: bool = False,
    sources: ModelSources | None = None,
    force: bool = False,
) -> LoadReport:
    """Stream the files of a table, once, into every database that does not hold them yet.

    A database that remembers its loads (a persistent one) is skipped when it holds these very files, continues where an
    interrupted load of them ended, and is emptied first when it holds another version of them; rows of unknown origin
    (HugeCTR's) stay and are overwritten key by key. Other databases get all rows, up to `initial_cache_rate` of what they
    can hold. Memory beyond the databases' own is a few chunks, whatever the size of the model.

    The persistent database is the authority: where it has been modified since the files were loaded into it, or is kept as
    it is, the other databases are filled from it and not from the files, whose vectors may be old.

    Args:
        table: the table; it is opened in each database, also in those to keep.
        source: directory or URI of its sparse model files.
        databases: those to load.
        progress: told how far it is; nothing is told when nothing is to be loaded.
        keep: databases with `initialize_after_startup: false`, which use what they have.
        initial_cache_rate: the share of a volatile database's capacity, or of the rows if they are fewer, to load, from the
            first row on.
        int32_keys: refuse keys that 32-bit serving cannot have.
        sources: the file systems to use.
        force: empty the databases to be loaded first, whatever they hold.

    Raises:
        ModelFileError: the files are missing, do not fit, or changed meanwhile. What was loaded is not taken for whole.
        DatabaseError: a database failed, or one to keep holds only a part of a model.
    """
    started = time.monotonic()
    for database in keep:
        _check_kept(table, database)
    model = open_sparse_model(source, table.dim, int32_keys=int32_keys, sources=sources)
    for database in databases:
        database.open_table(table.tag, table.dim)
    records = [None if force else _record(table, database, model) for database in databases]
    authority = next((database for database in (*databases, *keep) if isinstance(database, PersistentDatabase)), None)
    kept = authority in keep
    differs = authority is not None and (kept or not force) and _differs(authority.load_record(table.tag), model, kept=kept)
    if not all(_holds(record, model) for record in records):
        model.verify()  # before a database loses what it has
    loads = [
        DatabaseLoad(database.kind, 0, 0)
        if differs and not isinstance(database, PersistentDatabase)
        else _prepare(table, database, record, model, initial_cache_rate, force=force)
        for database, record in zip(databases, records, strict=True)
    ]
    if targets := [
        (database, load) for database, load in zip(databases, loads, strict=True) if load.rows and not load.elsewhere
    ]:
        _feed(table, model, targets, progress)
    loads = [
        _await(table, database, load, model, progress) if isinstance(database, SharedDatabase) and load.elsewhere else load
        for database, load in zip(databases, loads, strict=True)
    ]
    if authority is not None and differs:
        loads = [
            load
            if isinstance(database, PersistentDatabase)
            else _copy(table, authority, database, initial_cache_rate, progress)
            for database, load in zip(databases, loads, strict=True)
        ]
    for database, load in zip(databases, loads, strict=True):
        _log_loaded(table, database, load, model)
    return LoadReport(table.tag, model, time.monotonic() - started, tuple(loads), differs)


def _differs(record: LoadRecord | None, model: SparseModel, *, kept: bool) -> bool:
    """Whether the persistent database will hold other vectors than the files once it has been loaded (or kept)."""
    if not _holds(record, model):
        return kept
    return record is not None and record.modified


def _record(table: TableSpec, database: Database, model: SparseModel) -> LoadRecord | None:
    """What a database holds; local files that only were copied or touched since it was loaded are found to be the same."""
    if not isinstance(database, PersistentDatabase):
        return None
    record = database.load_record(table.tag)
    if record is None or not record.complete or not record.checksum or record.fingerprint == model.fingerprint:
        return record
    if not model.is_local or (record.rows_total, record.size_bytes) != (model.rows, model.size_bytes):
        return record
    _log.info("Table: %s; the files have another place or time than those in %s; comparing them.", table.tag, database.kind)
    checksum = ""
    model.verify()
    with closing(read_ahead(model, _ranges(model, 0, model.rows))) as chunks:
        for _, keys, vectors in chunks:
            checksum = extended(checksum, keys, vectors)
    if checksum != record.checksum:
        return record
    record = replace(record, fingerprint=model.fingerprint, source=model.place)
    _remember(table, database, record)
    return record


def _ranges(model: SparseModel, first: int, last: int) -> Iterator[tuple[int, int]]:
    step = model.chunk_rows
    return ((start, min(start + step, last)) for start in range(first, last, step))


def _copy(
    table: TableSpec, authority: Database, database: Database, initial_cache_rate: float, progress: Progress | None
) -> DatabaseLoad:
    """Fill a volatile database with rows of the persistent one, up to its share of them."""
    rows = authority.size(table.tag)
    limit = round(initial_cache_rate * min(rows, database.stats(table.tag).capacity_rows))
    _log.info(
        "Table: %s; filling %s from %s, whose vectors are newer than the files or were to be kept.",
        table.tag,
        database.kind,
        authority.kind,
    )
    if progress:
        progress.start(table.tag, limit, limit * (8 + 4 * table.dim))
    done = 0
    for keys, vectors in authority.scan(table.tag, max(1, CHUNK_BYTES // (8 + 4 * table.dim))):
        count = min(keys.size, limit - done)
        if count <= 0:
            break
        database.insert(table.tag, keys[:count], vectors[:count])
        done += count
        if progress:
            progress.advance(table.tag, count)
    if progress:
        progress.finish(table.tag)
    return DatabaseLoad(database.kind, 0, done)


def _holds(record: LoadRecord | None, model: SparseModel) -> bool:
    return record is not None and record.complete and record.fingerprint == model.fingerprint


def _prepare(
    table: TableSpec,
    database: Database,
    record: LoadRecord | None,
    model: SparseModel,
    initial_cache_rate: float,
    *,
    force: bool,
) -> DatabaseLoad:
    """Decide which rows a database still needs; empty it when what it holds is of other files."""
    if record is None:
        if force and not isinstance(database, SharedDatabase):
            _empty(table, database)
        if isinstance(database, PersistentDatabase):
            return DatabaseLoad(database.kind, 0, model.rows)
        rows = round(initial_cache_rate * min(model.rows, database.stats(table.tag).capacity_rows))
        first: int | None = 0
        if isinstance(database, SharedDatabase):
            first = database.claim_load(table.tag, model.fingerprint, rows, afresh=force)
            database.open_table(table.tag, table.dim)
        return DatabaseLoad(database.kind, first or 0, rows, elsewhere=first is None)
    same = record.fingerprint == model.fingerprint and 0 <= record.rows_done <= record.rows_total == model.rows
    if same and (record.complete or not record.modified):  # what was updated half-way is neither these files nor whole
        if not record.complete:
            _log.info(
                "Table: %s; continuing an interrupted load of %s at row %d of %d.",
                table.tag,
                database.kind,
                record.rows_done,
                model.rows,
            )
        return DatabaseLoad(database.kind, record.rows_done, model.rows)
    _log.info("Table: %s; %s holds another state of the model, which is replaced.", table.tag, database.kind)
    _empty(table, database)
    return DatabaseLoad(database.kind, 0, model.rows)


def _empty(table: TableSpec, database: Database) -> None:
    database.drop_table(table.tag)
    database.open_table(table.tag, table.dim)


def _feed(
    table: TableSpec,
    model: SparseModel,
    targets: Sequence[tuple[Database, DatabaseLoad]],
    progress: Progress | None,
) -> None:
    first, last = min(load.first_row for _, load in targets), max(load.last_row for _, load in targets)
    if progress:
        progress.start(table.tag, last - first, (last - first) * model.row_bytes)
    for database, load in targets:
        if isinstance(database, InProcessDatabase):
            database.reserve(table.tag, load.last_row)
    feeds = [_begun(table, model, database, load) for database, load in targets]
    with closing(read_ahead(model, _ranges(model, first, last))) as chunks:
        for start, keys, vectors in chunks:
            for feed in feeds:
                feed.add(start, keys, vectors)
            if progress:
                progress.advance(table.tag, keys.size)
    for (database, _), feed in zip(targets, feeds, strict=True):
        feed.end()
        started = time.monotonic()
        database.finish_load(table.tag)
        if (seconds := time.monotonic() - started) > _LONG_S:
            _log.info("Table: %s; %s merged its rows in %.1f s.", table.tag, database.kind, seconds)
    if progress:
        progress.finish(table.tag)


def _begun(table: TableSpec, model: SparseModel, database: Database, load: DatabaseLoad) -> LoadFeed:
    persistent = isinstance(database, PersistentDatabase)
    before = database.load_record(table.tag) if isinstance(database, PersistentDatabase) and load.first_row else None
    checksum = before.checksum if before else ""  # of an interrupted load
    record = LoadRecord(
        model.fingerprint, load.first_row, model.rows, source=model.place, size_bytes=model.size_bytes, checksum=checksum
    )
    if persistent and not load.first_row:
        _remember(table, database, record)  # so that a start that keeps what is there refuses it until it is whole
    return LoadFeed(database, table.tag, table.dim, record, load.last_row)


def _remember(table: TableSpec, database: Database, record: LoadRecord) -> None:
    database.load_chunk(table.tag, np.empty(0, np.int64), np.empty((0, table.dim), np.float32), record)


def _await(
    table: TableSpec, database: SharedDatabase, load: DatabaseLoad, model: SparseModel, progress: Progress | None
) -> DatabaseLoad:
    """Wait until another process has loaded a shared database, or do what is left when it dies: its claim then runs out."""
    _log.info("Table: %s; another process is loading %s; waiting for it.", table.tag, database.kind)
    if progress:
        progress.start(table.tag, load.last_row, load.last_row * model.row_bytes)
    while (first := database.claim_load(table.tag, model.fingerprint, load.last_row, wait_s=_LOOK_S)) is None:
        if progress:
            progress.advance(table.tag, 0)  # how far the other is nobody knows; who is told may end the wait
    if progress:
        progress.advance(table.tag, first)
        progress.finish(table.tag)
    load = DatabaseLoad(database.kind, first, load.last_row)
    if load.rows:
        _feed(table, model, [(database, load)], progress)
    return load


def _check_kept(table: TableSpec, database: Database) -> None:
    database.open_table(table.tag, table.dim)
    record = database.load_record(table.tag) if isinstance(database, PersistentDatabase) else None
    if record is not None and not record.complete:
        raise DatabaseError(
            f"keeping table {table.tag} in {database.kind} as it is (initialize_after_startup false): it holds "
            f"{record.rows_done} of {record.rows_total} rows of a load that was interrupted; "
            "complete it with `hps load`, or set initialize_after_startup to true"
        )


def _log_loaded(table: TableSpec, database: Database, load: DatabaseLoad, model: SparseModel) -> None:
    """HugeCTR's lines, which its users look for. A volatile database's load record stays None."""
    if isinstance(database, PersistentDatabase):
        how = "complete" if load.rows else "all were there"
        _log.info("Table: %s; cached %d embeddings in persistent database (%s); %s.", table.tag, model.rows, database.kind, how)
        return
    stats = database.stats(table.tag)
    percent = 100 * stats.rows / stats.capacity_rows if stats.capacity_rows else 100.0
    _log.info(
        "Table: %s; cached %d / %d embeddings in volatile database (%s); load: %d / %d (%.2f%%).",
        table.tag,
        load.last_row,
        model.rows,
        database.kind,
        stats.rows,
        stats.capacity_rows,
        percent,
    )
