"""Changes of a version's row formats: finds the tables with its online writes, and lets the new tables take over from these."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress

from hps.configuration.load import ModelConfig
from hps.errors import ConflictError, DatabaseCorruptError, DatabaseError, TableWidthError
from hps.models.loading.carried_rows import CarriedTable
from hps.stores.base import Database, SharedDatabase
from hps.types import KeyArray, TableSpec
from hps.versions.deployment import Deployment
from hps.versions.retention import stored_as

_log = logging.getLogger(__name__)

_PASSES = 8  # at most, of catching up while writes go on
_FEW_KEYS = 4096  # that are caught up with while writes wait


class FormatChanges:
    """The tables of one deployment whose online writes are carried over from tables of other formats. *One thread.*

    Attributes:
        tables: per table of the deployment, what is carried over to it; None if nothing.

    Args:
        there: the deployment in service with the same files, which takes writes until the takeover; None if there is none.
    """

    def __init__(self, tables: Sequence[CarriedTable | None] = (), there: Deployment | None = None) -> None:
        self.tables = tables
        self._there = there

    @property
    def sources(self) -> list[TableSpec]:
        """The tables whose online writes are carried over."""
        return [table.old for table in self.tables if table]

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note what is written to the old tables until the block ends."""
        there = self._there
        if there is None:
            yield
            return

        def note(index: int, keys: KeyArray) -> None:
            if (table := self.tables[index]) is not None:
                table.note(keys)

        there.watchers.append(note)
        try:
            yield
        finally:
            there.watchers.remove(note)

    @contextmanager
    def taken_over(self, deployed: Deployment) -> Iterator[None]:
        """Bring the new tables up to date; in the block, no old table is written, and the new ones are those of a later start.

        Raises:
            InvalidInputError: the new format cannot hold a row that was written meanwhile.
            DatabaseError: a database failed, or a write did not end in time.
        """
        there = self._there
        for _ in range(_PASSES if there else 0):
            if sum(table.noted for table in self.tables if table) <= _FEW_KEYS:
                break
            self._catch_up(deployed)
        with nullcontext() if there is None else there.chain.settled(there.tables):
            self._catch_up(deployed)
            for table in filter(None, self.tables):
                table.take_over(deployed.chain.databases[-1])
            yield

    def _catch_up(self, deployed: Deployment) -> None:
        for index, table in enumerate(self.tables):
            if table is not None:
                table.catch_up(deployed, index)


def find_changes(
    config: ModelConfig,
    tables: Sequence[TableSpec],
    fingerprints: Sequence[str],
    there: Deployment | None,
    databases: Sequence[Database],
) -> FormatChanges:
    """Find what was written online to tables of the same files in other formats.

    Args:
        config: of the version.
        tables: those to be loaded.
        fingerprints: of each table's files.
        there: as for `FormatChanges`.
        databases: those that the tables are loaded into, the authoritative one last.

    Raises:
        ConflictError: it is in a shared database with nothing below, or other processes use such a table there.
    """
    authority = databases[-1] if databases else None
    for database in databases[:-1]:
        if isinstance(database, SharedDatabase):
            _warn_of_others(config, tables, database)
    if there is not None and there.chain.databases and not there.chain.databases[-1].shared:
        source = there.chain.databases[-1]
        pairs = zip(map(source.stored, there.tables), tables, strict=True)
        return FormatChanges([CarriedTable(source, *pair) for pair in pairs], there)
    if isinstance(authority, SharedDatabase):
        tags = authority.tags()
        for table, fingerprint in zip(tables, fingerprints, strict=True):
            _refuse_shared(config, table, fingerprint, authority, tags)
            if there is not None and authority.row_dtype is not None:
                _refuse_second_table(config, table, there, authority)
    if authority is None or not authority.persistent:
        return FormatChanges()
    found = (_modified(config, table, fingerprint, authority) for table, fingerprint in zip(tables, fingerprints, strict=True))
    return FormatChanges(
        [None if old is None else CarriedTable(authority, old, table) for old, table in zip(found, tables, strict=True)]
    )


def _modified(config: ModelConfig, table: TableSpec, fingerprint: str, database: Database) -> TableSpec | None:
    """Find the table with online writes that a start in another format left; None if this one is whole, or if there is none."""
    stored = database.stored(table)
    if _is_whole(stored, fingerprint, database):
        return None
    others = (one for one in stored_as(config, stored, database.tags()) if _is_whole(one, fingerprint, database))
    records = {one: database.load_record(one.tag) for one in others}
    modified = {one: record for one, record in records.items() if record is not None and record.modified}
    return max(modified, key=lambda one: modified[one].loaded_at_us, default=None)


def _is_whole(table: TableSpec, fingerprint: str, database: Database) -> bool:
    """Whether a persistent database has all rows of these files in a table."""
    if table.tag not in database.tags():
        return False
    with suppress(TableWidthError, DatabaseCorruptError):
        database.open_table(table.tag, table.width)
        record = database.load_record(table.tag)
        return record is not None and record.complete and record.fingerprint == fingerprint
    return False


def _warn_of_others(config: ModelConfig, tables: Sequence[TableSpec], database: SharedDatabase) -> None:
    """Log that other replicas use other formats of tables: each format takes memory, and has what its replicas wrote."""
    with suppress(DatabaseError):  # the load reports it
        tags = database.tags()
        for table in map(database.stored, tables):
            for other in stored_as(config, table, tags):
                if other.row_dtype != table.row_dtype and database.used_by_others(other.tag):
                    _log.warning(
                        "model %r: another replica serves table %r as %s (%s in %s), and this one as %s (%s): each takes "
                        "memory of its own; give all replicas the same row_dtype",
                        config.model,
                        table.table_name,
                        other.row_dtype,
                        other.tag,
                        database.kind,
                        table.row_dtype,
                        table.tag,
                    )


def _refuse_shared(
    config: ModelConfig, table: TableSpec, fingerprint: str, database: SharedDatabase, tags: Sequence[str]
) -> None:
    """Refuse a second format in a shared database with nothing below: neither's writes would reach the other's table."""
    stored = database.stored(table)
    for other in stored_as(config, stored, tags):
        if other.row_dtype == stored.row_dtype:
            continue
        doing = (
            f"deploying model {config.model!r}, version {config.version}, with table {table.table_name!r} as {table.row_dtype}"
        )
        if database.used_by_others(other.tag):
            raise ConflictError(
                f"{doing}: another replica serves it as {other.row_dtype} from the same {database.kind} (table {other.tag}), "
                "and no database is below that would have the online writes of both. Give all replicas the same row_dtype: "
                "stop the others first, or publish the files as a new version and deploy that one in the new format"
            )
        record = database.load_record(other.tag)
        if record is not None and record.modified and record.fingerprint == fingerprint:
            raise ConflictError(
                f"{doing}: {database.kind} has it as {other.row_dtype} with online writes (table {other.tag}), and no database "
                "is below that keeps them; publish the files as a new version and deploy that one in the new format, or deploy "
                "with force, which gives up these writes"
            )


def _refuse_second_table(config: ModelConfig, table: TableSpec, there: Deployment, database: SharedDatabase) -> None:
    """Refuse a table beside the one with online writes, which would not reach it; both have the format of the database."""
    old = next(one for one in there.tables if one.table_name == table.table_name)
    record = database.load_record(database.stored(old).tag)
    if record is not None and record.modified:
        raise ConflictError(
            f"deploying model {config.model!r}, version {config.version}, with table {table.table_name!r} as "
            f"{table.row_dtype}: {database.kind} alone has its online writes, in a table that serves as {old.row_dtype}; "
            "restart with the new configuration, which goes on with this table, or deploy with force, which gives them up"
        )
