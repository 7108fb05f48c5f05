"""Decides which tables of earlier versions to keep, and which slot and row format the tables of a new one may have.

Rows of another format are another table. Loading it from the files is right as long as nothing was written online: those writes
would be in the other table alone, and neither served nor kept.
"""

import hashlib
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count

from hps.configuration.load import ModelConfig
from hps.configuration.models import FIRST_VERSION
from hps.engine.chain import DatabaseChain
from hps.errors import ConflictError, DatabaseCorruptError, DatabaseError, TableWidthError
from hps.models.files import joint_fingerprint
from hps.stores.base import Database, LastingDatabase, LoadRecord, PersistentDatabase, SharedDatabase
from hps.types import ROW_DTYPES, TableSpec, all_formats, row_dtype_of, split_tag
from hps.versions.deployment import Deployment

_log = logging.getLogger(__name__)


def surplus(kept: Sequence[Deployment], keep_versions: int) -> Sequence[Deployment]:
    """Return the kept versions to drop before another one is replaced: all but the last `keep_versions` - 1."""
    return kept[: max(0, len(kept) - max(0, keep_versions - 1))]


def free_slot(
    config: ModelConfig,
    fingerprints: Sequence[str],
    used: Collection[str],
    chain: DatabaseChain,
    *,
    force: bool = False,
    keep: Collection[Database] = (),
) -> str:
    """Return a slot for the tables of a version that no other version of the model uses.

    A version reloaded from other files gets new tables. After a restart, existing tables of exactly these files are reused,
    since they contain online writes; of several, the complete ones that were loaded last. Tables of a shared database that
    other processes use with other rows are left to them.

    Args:
        used: slots of the versions in service or kept.
        force: reload the files in any case. Tables of the slot are then removed from shared databases.
        keep: databases that keep their rows and load none.

    Raises:
        ConflictError: the last database keeps its rows, and has no unused rows of this version.
    """
    free = (slot for slot in _slots(config, joint_fingerprint(fingerprints)) if slot not in used)
    authority = chain.databases[-1] if chain.databases else None
    keeps = authority in keep
    if authority is not None and keeps and not used:
        _refuse_other_formats(config, authority)
    if force:
        if authority is not None and keeps:
            raise _keep_conflict(config, authority, "loads no files")
        shared = [database for database in chain.databases if isinstance(database, SharedDatabase)]
        return next(slot for slot in free if all(db.discard_table(tag) for db in shared for tag in _tags(config, slot, db)))
    stored: dict[str, str] = {}
    if isinstance(authority, LastingDatabase):
        stored = {tag: slot for tag, slot, _ in _tables_of(config.model, authority)}
        slots_of_version = {slot for slot in stored.values() if _is_slot_of(slot, config)}
        stored_slots = [
            slot for slot in slots_of_version if slot not in used and stored.keys() >= set(_tags(config, slot, authority))
        ]
        loads = {slot: loaded for slot in stored_slots if (loaded := _loaded(config, slot, fingerprints, authority))}
        if loads:
            return max(loads, key=lambda slot: loads[slot])
    if authority is not None and keeps:
        slot = config.tables[0].slot
        if slot in used or (used and not stored.keys() >= set(_tags(config, slot, authority))):
            raise _keep_conflict(config, authority, "has no rows of these files that no other version uses")
        return slot
    if not isinstance(authority, SharedDatabase):
        return next(free)

    def clear(slot: str) -> bool:
        return all(map(authority.clear_table, _tags(config, slot, authority), fingerprints))

    return next(filter(clear, free))


def _refuse_other_formats(config: ModelConfig, database: Database) -> None:
    """Refuse to serve an empty table if a database that loads none has its rows in another format."""
    tags = database.tags() if isinstance(database, LastingDatabase) else []
    for table in map(database.stored, config.tables):
        others = [other for other in stored_as(config, table, tags) if other.slot == table.slot]
        if others and table.tag not in tags:
            raise _keep_conflict(
                config, database, f"has table {table.table_name!r} as {others[0].row_dtype}, not {table.row_dtype}"
            )


def _keep_conflict(config: ModelConfig, authority: Database, why: str) -> ConflictError:
    return ConflictError(
        f"deploying model {config.model!r}, version {config.version}: {authority.kind} keeps its rows "
        f"(initialize_after_startup false), and {why}; run `hps load` and restart, or set initialize_after_startup to true"
    )


def _slots(config: ModelConfig, fingerprint: str) -> Iterator[str]:
    """Yield the slot of a version, then further ones for the same version and files."""
    yield config.tables[0].slot
    yield from (f"{config.version}.{fingerprint[i : i + 8]}" for i in (0, 8, 16))
    for number in count(3):
        yield f"{config.version}.{hashlib.blake2b(f'{fingerprint} {number}'.encode(), digest_size=4).hexdigest()}"


def _tags(config: ModelConfig, slot: str, database: Database) -> list[str]:
    return [database.stored(replace(table, slot=slot)).tag for table in config.tables]


def _loaded(config: ModelConfig, slot: str, fingerprints: Sequence[str], database: LastingDatabase) -> tuple[bool, int] | None:
    """Return whether the tables of a slot have all rows of these files, and when they were loaded; None for other files."""
    records: list[LoadRecord] = []
    for table in config.tables:
        stored = database.stored(replace(table, slot=slot))
        if record := _load_record(stored, database):
            records.append(record)
    if [record.fingerprint for record in records] != list(fingerprints):
        return None
    return all(record.complete for record in records), max(record.loaded_at_us for record in records)


def _load_record(table: TableSpec, database: LastingDatabase) -> LoadRecord | None:
    """Return the load record of a stored table; None without one, or if the table is damaged or has another width."""
    with suppress(TableWidthError, DatabaseCorruptError):
        if database.persistent:
            database.open_table(table.tag, table.width)
        return database.load_record(table.tag)
    return None


def stored_as(config: ModelConfig, table: TableSpec, tags: Sequence[str]) -> list[TableSpec]:
    """List the other tables of a database with the rows of a table of this version: of another format, or of another slot.

    Args:
        tags: all tags of the database. Redis searches its keys for them: request them once for several tables.
    """
    return [
        replace(table, slot=slot, row_dtype=row_dtype_of(tag))
        for tag, slot, name in _tables_among(tags, config.model)
        if name == table.table_name and tag != table.tag and _is_slot_of(slot, config) and row_dtype_of(tag) in ROW_DTYPES
    ]


def _is_slot_of(slot: str, config: ModelConfig) -> bool:
    """Return True if a slot is of this version."""
    return slot == config.tables[0].slot or slot.startswith(f"{config.version}.")


def leftovers(
    config: ModelConfig, live: Sequence[TableSpec], kept_versions: int, chain: DatabaseChain, needed: Collection[str] = ()
) -> list[Mapping[Database, Sequence[str]]]:
    """Return the tags in each database of tables that an earlier process left and that can be dropped.

    Of the versions below the serving one, the last `keep_versions`, less those that this process keeps, stay for a fast
    roll-back after a restart. Tables of the serving version in other row formats are dropped, also from shared databases: they
    have no online writes, or these were given up by force. A table without a load record stays: another program may own it.

    Args:
        live: tables in use by versions of the model.
        kept_versions: number of replaced versions that this process keeps.
        needed: versions whose tables stay, since they are about to be loaded.
    """
    stored: list[tuple[str, str, str]] = []
    used = {database: {database.stored(table).tag for table in live} for database in chain.databases}
    others: list[Mapping[Database, Sequence[str]]] = []
    for database in chain.databases:
        with suppress(DatabaseError):
            if isinstance(database, PersistentDatabase) and not database.read_only:
                stored += [table for table in _tables_of(config.model, database) if table[0] not in used[database]]
            if isinstance(database, LastingDatabase) and not database.read_only:
                tags = database.tags()
                found = (tag for table in live for tag in _other_formats(config, database.stored(table), database, tags))
                others.append({database: [tag for tag in found if tag not in used[database]]})
    # Names without a slot are HugeCTR's and may belong to another program, except those of this model's tables.
    own_tables = {table.table_name for table in config.tables} if all(table.slot for table in live) else set()
    slots = {tag: slot or FIRST_VERSION for tag, slot, table in stored if slot or table in own_tables}
    below = sorted({int(slot) for slot in slots.values() if slot.isdecimal() and int(slot) < int(config.version)})
    count = config.keep_versions - kept_versions
    retained = set(map(str, below[-count:])) if count > 0 else set()
    unneeded = [tag for tag, slot in slots.items() if slot not in retained and slot.partition(".")[0] not in needed]
    return [_unused_tags(tag, used) for tag in unneeded] + others


def _unused_tags(tag: str, used: Mapping[Database, Collection[str]]) -> Mapping[Database, Sequence[str]]:
    """Return the unused tags of the same table in each database; where one has a format of its own, in every format."""
    tags = all_formats(tag) if any(database.row_dtype for database in used) else [tag]
    return {database: [tag for tag in tags if tag not in used_tags] for database, used_tags in used.items()}


def _other_formats(config: ModelConfig, table: TableSpec, database: LastingDatabase, tags: Sequence[str]) -> Iterator[str]:
    """Yield the tags of tables with the rows of a live table, as stored, in another format that have a load record of ours."""
    for other in stored_as(config, table, tags) if _is_slot_of(table.slot, config) else ():
        if other.row_dtype != table.row_dtype:
            if database.persistent:
                database.open_table(other.tag, other.width)
            if database.load_record(other.tag) is not None:
                yield other.tag


def _tables_of(model: str, database: LastingDatabase) -> list[tuple[str, str, str]]:
    """Return the tag, slot and name of each table of a model."""
    return _tables_among(database.tags(), model)


def _tables_among(tags: Sequence[str], model: str) -> list[tuple[str, str, str]]:
    found = ((tag, split_tag(tag)) for tag in tags)
    return [(tag, names[1], names[2]) for tag, names in found if names and names[0] == model]


def refuse_format_in_service(current: ModelConfig, config: ModelConfig) -> None:
    """Refuse to change the row format of a version in service.

    Raises:
        ConflictError: the formats of a table differ.
    """
    for name, old, new in zip(config.embedding_table_names, current.row_dtype, config.row_dtype, strict=True):
        if old != new:
            raise _format_conflict(config, name, new, f"version {config.version} serves it as {old}")


def refuse_format_change(
    config: ModelConfig, tables: Sequence[TableSpec], fingerprints: Sequence[str], databases: Sequence[Database]
) -> None:
    """Refuse to load tables of which a database that outlives the process has online writes in another format.

    Args:
        tables: tables to load.
        databases: databases to load them into, the authoritative one last.

    Raises:
        ConflictError: such writes exist, or other processes use such a table of a shared database with nothing below.
    """
    for database in databases[:-1]:
        if isinstance(database, SharedDatabase):
            _warn_of_other_formats(config, tables, database)
    authority = databases[-1] if databases else None
    if not isinstance(authority, LastingDatabase):
        return
    tags = authority.tags()
    for table, fingerprint in zip(tables, fingerprints, strict=True):
        stored = authority.stored(table)
        record = _load_record(stored, authority) if stored.tag in tags else None
        if authority.persistent and record is not None and record.complete and record.fingerprint == fingerprint:
            continue  # loaded by force, or served last by this version
        for other in stored_as(config, stored, tags):
            where = f"{authority.kind}, table {other.tag}"
            if isinstance(authority, SharedDatabase):
                if other.row_dtype == stored.row_dtype:
                    continue
                if authority.used_by_others(other.tag):
                    reason = f"another replica serves it as {other.row_dtype} ({where})"
                    raise _format_conflict(config, table.table_name, stored.row_dtype, reason)
            record = _load_record(other, authority)
            if record is not None and record.modified and record.fingerprint == fingerprint:
                reason = f"its online writes are stored as {other.row_dtype} ({where})"
                raise _format_conflict(config, table.table_name, stored.row_dtype, reason)


def _format_conflict(config: ModelConfig, table: str, row_dtype: str, reason: str) -> ConflictError:
    return ConflictError(
        f"deploying model {config.model!r}, version {config.version}, with table {table!r} as {row_dtype}: {reason}. Go back "
        "to that format, give up the online writes with force, or give the files a new version"
    )


def _warn_of_other_formats(config: ModelConfig, tables: Sequence[TableSpec], database: SharedDatabase) -> None:
    """Log that other replicas use other formats of tables: each takes memory, and has only the writes of its replicas."""
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
