"""Refuses to change the row format of a version whose online writes are in tables of another format.

Rows of another format are another table. Loading one from the files is right as long as nothing was written online: those
writes would be in the other table alone, and neither be served nor kept.
"""

import logging
from collections.abc import Sequence
from contextlib import suppress

from hps.configuration.load import ModelConfig
from hps.errors import ConflictError, DatabaseCorruptError, DatabaseError, TableWidthError
from hps.stores.base import Database, LastingDatabase, LoadRecord, SharedDatabase
from hps.types import TableSpec
from hps.versions.retention import stored_as

_log = logging.getLogger(__name__)


def refuse_format_in_service(there: ModelConfig, config: ModelConfig) -> None:
    """Refuse to change the row format of a version in service.

    Raises:
        ConflictError: the formats of a table differ.
    """
    for name, old, new in zip(config.embedding_table_names, there.row_dtype, config.row_dtype, strict=True):
        if old != new:
            raise _refusal(config, name, new, f"version {config.version} serves it as {old}")


def refuse_format_change(
    config: ModelConfig, tables: Sequence[TableSpec], fingerprints: Sequence[str], databases: Sequence[Database]
) -> None:
    """Refuse to load tables of which a database that outlives the process has online writes in another format.

    Args:
        config: of the version.
        tables: those to be loaded.
        fingerprints: of each table's files.
        databases: those that the tables are loaded into, the authoritative one last.

    Raises:
        ConflictError: it has, or other processes use such a table of a shared database with nothing below.
    """
    for database in databases[:-1]:
        if isinstance(database, SharedDatabase):
            _warn_of_others(config, tables, database)
    authority = databases[-1] if databases else None
    if not isinstance(authority, LastingDatabase):
        return
    tags = authority.tags()
    for table, fingerprint in zip(tables, fingerprints, strict=True):
        stored = authority.stored(table)
        record = _record(stored, authority) if stored.tag in tags else None
        if authority.persistent and record is not None and record.complete and record.fingerprint == fingerprint:
            continue  # it was loaded by force, or is what this version served last
        for other in stored_as(config, stored, tags):
            where = f"{authority.kind}, table {other.tag}"
            if isinstance(authority, SharedDatabase):
                if other.row_dtype == stored.row_dtype:
                    continue
                if authority.used_by_others(other.tag):
                    there = f"another replica serves it as {other.row_dtype} ({where})"
                    raise _refusal(config, table.table_name, stored.row_dtype, there)
            record = _record(other, authority)
            if record is not None and record.modified and record.fingerprint == fingerprint:
                there = f"its online writes are stored as {other.row_dtype} ({where})"
                raise _refusal(config, table.table_name, stored.row_dtype, there)


def _refusal(config: ModelConfig, table: str, row_dtype: str, there: str) -> ConflictError:
    return ConflictError(
        f"deploying model {config.model!r}, version {config.version}, with table {table!r} as {row_dtype}: {there}. Go back to "
        "that format, give up the online writes with force, or give the files a new version"
    )


def _record(table: TableSpec, database: LastingDatabase) -> LoadRecord | None:
    with suppress(TableWidthError, DatabaseCorruptError):
        if database.persistent:
            database.open_table(table.tag, table.width)
        return database.load_record(table.tag)
    return None


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
