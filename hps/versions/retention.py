"""Decides which tables of earlier versions to keep, and allocates slots for those of a new one."""

import hashlib
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

    A version reloaded from other files gets tables beside the serving ones. After a restart, existing tables of exactly these
    files are preferred, since they contain online writes; of several, the whole ones that were loaded last. Tables of a shared
    database that other processes use with other rows are left to them.

    Args:
        config: configuration of the version.
        fingerprints: fingerprint of each table's files.
        used: slots of the versions in service or kept.
        force: whether the files are loaded again in any case. Shared databases then hold no table of the slot.
        keep: databases that keep their rows and load none.

    Raises:
        ConflictError: the last database keeps its rows, and has none of this version that no other version uses.
    """
    free = (slot for slot in _slots(config, joint_fingerprint(fingerprints)) if slot not in used)
    authority = chain.databases[-1] if chain.databases else None
    keeps = authority in keep
    if authority is not None and keeps and not used:
        _refuse_other_formats(config, authority)
    if force:
        if authority is not None and keeps:
            raise _cannot_keep(config, authority, "loads no files")
        shared = [database for database in chain.databases if isinstance(database, SharedDatabase)]
        return next(slot for slot in free if all(one.discard_table(tag) for one in shared for tag in _tags(config, slot, one)))
    stored: dict[str, str] = {}
    if isinstance(authority, LastingDatabase):
        stored = {tag: slot for tag, slot, _ in _tables_of(config.model, authority)}
        own = {slot for slot in stored.values() if _is_own(slot, config)}
        held = [slot for slot in own if slot not in used and stored.keys() >= set(_tags(config, slot, authority))]
        loads = {slot: loaded for slot in held if (loaded := _loaded(config, slot, fingerprints, authority))}
        if loads:
            return max(loads, key=lambda slot: loads[slot])
    if authority is not None and keeps:
        slot = config.tables[0].slot
        if slot in used or (used and not stored.keys() >= set(_tags(config, slot, authority))):
            raise _cannot_keep(config, authority, "has no rows of these files that no other version uses")
        return slot
    if not isinstance(authority, SharedDatabase):
        return next(free)

    def clear(slot: str) -> bool:
        return all(map(authority.clear_table, _tags(config, slot, authority), fingerprints))

    return next(filter(clear, free))


def _refuse_other_formats(config: ModelConfig, database: Database) -> None:
    """Refuse to serve an empty table where a database that loads none has its rows in another format.

    Raises:
        ConflictError: it has.
    """
    tags = database.tags() if isinstance(database, LastingDatabase) else []
    for table in map(database.stored, config.tables):
        others = [one for one in stored_as(config, table, tags) if one.slot == table.slot]
        if others and table.tag not in tags:
            raise _cannot_keep(
                config, database, f"has table {table.table_name!r} as {others[0].row_dtype}, not {table.row_dtype}"
            )


def _cannot_keep(config: ModelConfig, authority: Database, why: str) -> ConflictError:
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
        with suppress(TableWidthError, DatabaseCorruptError):
            if database.persistent:
                database.open_table(stored.tag, stored.width)
            if record := database.load_record(stored.tag):
                records.append(record)
    if [record.fingerprint for record in records] != list(fingerprints):
        return None
    return all(record.complete for record in records), max(record.loaded_at_us for record in records)


def stored_as(config: ModelConfig, table: TableSpec, tags: Sequence[str]) -> list[TableSpec]:
    """List the other tables of a database with the rows of a table of this version: of another format, or of another slot.

    Args:
        tags: those of the database, for which Redis searches its keys: ask once for several tables.
    """
    return [
        replace(table, slot=slot, row_dtype=row_dtype_of(tag))
        for tag, slot, name in _tables_among(tags, config.model)
        if name == table.table_name and tag != table.tag and _is_own(slot, config) and row_dtype_of(tag) in ROW_DTYPES
    ]


def _is_own(slot: str, config: ModelConfig) -> bool:
    """Whether a slot is of this version."""
    return slot == config.tables[0].slot or slot.startswith(f"{config.version}.")


def leftovers(
    config: ModelConfig, live: Sequence[TableSpec], held_versions: int, chain: DatabaseChain
) -> list[Mapping[Database, Sequence[str]]]:
    """Return the tags in each database of tables that an earlier process left and that can be dropped.

    Of the versions below the serving one, the last `keep_versions`, less those that this process keeps, stay complete for a
    fast roll-back after a restart. Tables of the serving version in other row formats go, also from shared databases: their
    online writes were given up by force, or none. One without a load record stays, which another program may have written.

    Args:
        config: configuration of the serving version.
        live: tables in use by versions of the model.
        held_versions: number of replaced versions that this process keeps.
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
                found = (tag for table in live for tag in _recorded(config, database.stored(table), database, tags))
                others.append({database: [tag for tag in found if tag not in used[database]]})
    # Names without a slot are HugeCTR's and may belong to another program, except those of this model's tables.
    own = {table.table_name for table in config.tables} if all(table.slot for table in live) else set()
    slots = {tag: slot or FIRST_VERSION for tag, slot, table in stored if slot or table in own}
    below = sorted({int(slot) for slot in slots.values() if slot.isdecimal() and int(slot) < int(config.version)})
    count = config.keep_versions - held_versions
    stay = set(map(str, below[-count:])) if count > 0 else set()
    gone = [tag for tag, slot in slots.items() if slot not in stay]
    return [_everywhere(tag, used) for tag in gone] + others


def _everywhere(tag: str, used: Mapping[Database, Collection[str]]) -> Mapping[Database, Sequence[str]]:
    """Return the unused tags of the same table in each database; where one has a format of its own, in every format."""
    tags = all_formats(tag) if any(database.row_dtype for database in used) else [tag]
    return {database: [tag for tag in tags if tag not in own] for database, own in used.items()}


def _recorded(config: ModelConfig, table: TableSpec, database: LastingDatabase, tags: Sequence[str]) -> Iterator[str]:
    """Yield the tags of tables with the rows of a live table, as stored, in another format that have a load record of ours."""
    for other in stored_as(config, table, tags) if _is_own(table.slot, config) else ():
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
