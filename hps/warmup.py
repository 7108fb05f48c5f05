"""From model files into the databases, from there into the embedding cache, and the refresh of what is resident."""

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy as np

from hps.cache.base import EmbeddingCache
from hps.database_chain import DatabaseChain
from hps.databases.base import Database, LoadRecord
from hps.errors import DatabaseError
from hps.model_files import CHUNK_BYTES, SparseModel, open_sparse_model
from hps.progress import LogProgress as LogProgress
from hps.progress import Progress as Progress
from hps.read_ahead import read_ahead
from hps.types import FloatArray, KeyArray, TableSpec

_log = logging.getLogger(__name__)

_MIN_STEP_ROWS = 64  # HugeCTR's least step of a warm-up: one of its sets
_REFRESH_ATTEMPTS = 5  # at a chunk of a table that is being modified


@dataclass(frozen=True, slots=True)
class DatabaseLoad:
    """What `load_table` gave one database: rows [first_row, last_row) of the files; both are equal when it had them all."""

    kind: str
    first_row: int
    last_row: int


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
        return all(load.first_row == load.last_row for load in self.loads)


def load_table(
    table: TableSpec,
    source: str,
    databases: Sequence[Database],
    *,
    progress: Progress | None = None,
    keep: Sequence[Database] = (),
    initial_cache_rate: float = 1.0,
    int32_keys: bool = False,
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

    Raises:
        ModelFileError: the files are missing, do not fit, or changed meanwhile. What was loaded is not taken for whole.
        DatabaseError: a database failed, or one to keep holds only a part of a model.
    """
    started = time.monotonic()
    for database in keep:
        _check_kept(table, database)
    model = open_sparse_model(source, table.dim, int32_keys=int32_keys)
    for database in databases:
        database.open_table(table.tag, table.dim)
    authority = next((database for database in (*databases, *keep) if database.persistent), None)
    differs = authority is not None and _differs(authority.load_record(table.tag), model, kept=authority in keep)
    records = [database.load_record(table.tag) for database in databases]
    if not all(_holds(record, model) for record in records):
        model.verify()  # before a database loses what it has
    loads = [
        DatabaseLoad(database.kind, 0, 0)
        if differs and not database.persistent
        else _prepare(table, database, record, model, initial_cache_rate)
        for database, record in zip(databases, records, strict=True)
    ]
    first = min((load.first_row for load in loads if load.first_row < load.last_row), default=0)
    last = max((load.last_row for load in loads if load.first_row < load.last_row), default=0)
    if first < last:
        if progress:
            progress.start(table.tag, last - first, (last - first) * model.row_bytes)
        _feed(table, model, list(zip(databases, loads, strict=True)), first, last, progress)
        if progress:
            progress.finish(table.tag)
    if authority is not None and differs:
        loads = [
            load if database.persistent else _copy(table, authority, database, initial_cache_rate, progress)
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


def _copy(
    table: TableSpec, authority: Database, database: Database, initial_cache_rate: float, progress: Progress | None
) -> DatabaseLoad:
    """Fill a volatile database with rows of the persistent one, up to its share of them."""
    rows = authority.size(table.tag)
    limit = round(initial_cache_rate * min(rows, database.stats(table.tag).capacity_rows))
    _log.info("Table: %s; filling %s from %s, which was updated online.", table.tag, database.kind, authority.kind)
    if progress:
        progress.start(table.tag, limit, limit * (8 + 4 * table.dim))
    done = 0
    for keys, vectors in authority.scan(table.tag, CHUNK_BYTES // (8 + 4 * table.dim) + 1):
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
    table: TableSpec, database: Database, record: LoadRecord | None, model: SparseModel, initial_cache_rate: float
) -> DatabaseLoad:
    """Decide which rows a database still needs; empty it when what it holds is of other files."""
    if record is None:
        rows = model.rows
        if not database.persistent:
            rows = round(initial_cache_rate * min(rows, database.stats(table.tag).capacity_rows))
        return DatabaseLoad(database.kind, 0, rows)
    if record.fingerprint == model.fingerprint and 0 <= record.rows_done <= record.rows_total == model.rows:
        if not record.complete:
            _log.info(
                "Table: %s; continuing an interrupted load of %s at row %d of %d.",
                table.tag,
                database.kind,
                record.rows_done,
                model.rows,
            )
        return DatabaseLoad(database.kind, record.rows_done, model.rows)
    _log.info("Table: %s; %s holds another version of the model, which is replaced.", table.tag, database.kind)
    database.drop_table(table.tag)
    database.open_table(table.tag, table.dim)
    return DatabaseLoad(database.kind, 0, model.rows)


def _feed(
    table: TableSpec,
    model: SparseModel,
    targets: Sequence[tuple[Database, DatabaseLoad]],
    first: int,
    last: int,
    progress: Progress | None,
) -> None:
    step = model.chunk_rows
    ranges = ((start, min(start + step, last)) for start in range(first, last, step))
    with closing(read_ahead(model, ranges)) as chunks:
        for start, keys, vectors in chunks:
            stop = start + keys.size
            record = LoadRecord(model.fingerprint, stop, model.rows)
            for database, load in targets:
                low, high = max(load.first_row, start) - start, min(load.last_row, stop) - start
                if low < high:
                    database.load_chunk(table.tag, keys[low:high], vectors[low:high], record)
            if progress:
                progress.advance(table.tag, keys.size)
    for database, load in targets:
        if load.first_row < load.last_row:
            database.finish_load(table.tag)


def _check_kept(table: TableSpec, database: Database) -> None:
    database.open_table(table.tag, table.dim)
    record = database.load_record(table.tag)
    if record is not None and not record.complete:
        raise DatabaseError(
            f"keeping table {table.tag} in {database.kind} as it is (initialize_after_startup false): it holds "
            f"{record.rows_done} of {record.rows_total} rows of a load that was interrupted; "
            "complete it with `hps load`, or set initialize_after_startup to true"
        )


def _log_loaded(table: TableSpec, database: Database, load: DatabaseLoad, model: SparseModel) -> None:
    """HugeCTR's lines, which its users look for. A volatile database's load record stays None."""
    if database.persistent or database.load_record(table.tag) is not None:
        how = "all were there" if load.first_row == load.last_row else "complete"
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


def warm_up(
    cache: EmbeddingCache, table_index: int, table: TableSpec, sparse_model: SparseModel, fraction_per_iteration: float
) -> int:
    """Fill one table of an embedding cache with the first rows of its model files, reading ahead of the insertion.

    Args:
        cache: the cache of one device.
        table_index: the table's place in `cache.tables`.
        table: the same table.
        sparse_model: its files.
        fraction_per_iteration: `cache_refresh_percentage_per_iteration`: the share of the capacity that one step, with its
            log line, fills; 1.0 is everything in one step. It bounds no memory: a step is read in chunks. At 0 nothing is
            done.

    Returns:
        How many rows were inserted: those of the files, or the capacity if it is less.

    Raises:
        ModelFileError: the files cannot be read, or changed since they were opened.
    """
    capacity = cache.stats(table_index).capacity_rows
    rows = min(capacity, sparse_model.rows)
    if rows == 0 or fraction_per_iteration <= 0:
        return 0
    step = _step_rows(capacity, fraction_per_iteration)
    _log.info('EC initialization for model: "%s", num_tables: %d', table.model_name, len(cache.tables))
    _log.info("EC initialization on device: %d for %s", cache.device_id, table.tag)
    _log.info(  # word for word HugeCTR's
        "Initialize the embedding cache by by inserting the same size model file with embedding cache from beginning"
    )
    sparse_model.verify()
    with closing(read_ahead(sparse_model, _pieces(rows, step, sparse_model.chunk_rows))) as chunks:
        for start, keys, vectors in chunks:
            if start % step == 0:
                count = min(step, rows - start)
                _log.info(
                    "Initialize the embedding table %d for iteration %d with number of %d keys.",
                    table_index,
                    start // step,
                    count,
                )
            cache.insert(table_index, *_last_of_each(keys, vectors))
    return rows


@dataclass(frozen=True, slots=True)
class RefreshReport:
    """Resident keys that got their database's current vector, and those erased because no database has them."""

    updated: int
    erased: int


def refresh(
    cache: EmbeddingCache, table_index: int, table: TableSpec, chain: DatabaseChain, fraction_per_iteration: float
) -> RefreshReport:
    """Give every resident key of one table the vector that the databases have now; erase keys that none has.

    Nothing becomes resident and no recency changes. A vector that is modified meanwhile is never overwritten by an older one:
    a chunk that was fetched before a modification is fetched again, and erased where that keeps happening.

    Args:
        cache: the cache of one device.
        table_index: the table's place in `cache.tables`.
        table: the same table.
        chain: the databases.
        fraction_per_iteration: `cache_refresh_percentage_per_iteration`: the share of the capacity to fetch at once, within
            the memory of a chunk; at 0 a chunk.

    Raises:
        DatabaseError: the databases failed; keys not yet reached keep their vectors. A failure never erases.
    """
    keys = cache.dump(table_index)
    step = max(1, CHUNK_BYTES // (8 + 4 * table.dim))
    if fraction_per_iteration > 0:
        step = min(step, _step_rows(cache.stats(table_index).capacity_rows, fraction_per_iteration))
    out = np.empty((min(step, keys.size), table.dim), np.float32)
    updated = 0
    for start in range(0, keys.size, step):
        chunk = keys[start : start + step]
        updated += _refresh_chunk(cache, table_index, table, chain, chunk, out[: chunk.size])
    return RefreshReport(updated, keys.size - updated)


def _refresh_chunk(
    cache: EmbeddingCache, table_index: int, table: TableSpec, chain: DatabaseChain, keys: KeyArray, out: FloatArray
) -> int:
    fence = chain.fence(table)
    for attempt in range(_REFRESH_ATTEMPTS):
        time.sleep(0.01 * attempt)  # the modification that was in the way takes a while
        token = fence.token()
        found = np.zeros(keys.size, np.bool_)
        chain.fetch(table, keys, out, found)
        with fence.filling(token) as allowed:
            if allowed:
                cache.update(table_index, keys[found], out[found])
                cache.erase(table_index, keys[~found])
                return int(np.count_nonzero(found))
    cache.erase(table_index, keys)  # always right: each is fetched again when it is asked for
    return 0


def _step_rows(capacity_rows: int, fraction: float) -> int:
    return max(_MIN_STEP_ROWS, int(capacity_rows * min(fraction, 1.0)))


def _pieces(rows: int, step: int, chunk_rows: int) -> Iterator[tuple[int, int]]:
    """Cut [0, rows) at every multiple of `step`, and between those so that no piece is longer than `chunk_rows`."""
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        for low in range(start, stop, chunk_rows):
            yield low, min(low + chunk_rows, stop)


def _last_of_each(keys: KeyArray, vectors: FloatArray) -> tuple[KeyArray, FloatArray]:
    """Drop all but the last row of each key: where a key stands twice, a cache may keep either, the databases keep the last."""
    if keys.size < 2 or np.all(keys[1:] > keys[:-1]):
        return keys, vectors
    distinct, index = np.unique(keys[::-1], return_index=True)
    if distinct.size == keys.size:
        return keys, vectors
    return distinct, vectors[keys.size - 1 - index]
