"""Decides which tables of earlier versions to keep, and allocates slots for those of a new one."""

from collections.abc import Collection, Sequence
from contextlib import suppress

from hps.configuration.load import ModelConfig
from hps.configuration.models import FIRST_VERSION
from hps.databases.base import Database
from hps.errors import DatabaseError
from hps.lookup.chain import DatabaseChain
from hps.types import TableSpec, split_tag
from hps.versions.deployment import Deployment


def surplus(kept: Sequence[Deployment], keep_versions: int) -> Sequence[Deployment]:
    """Return the kept versions to drop before another one is replaced: all but the last `keep_versions` - 1."""
    return kept[: max(0, len(kept) - max(0, keep_versions - 1))]


def free_slot(config: ModelConfig, fingerprint: str, used: Collection[str], chain: DatabaseChain) -> str:
    """Return a slot for the tables of a version that no other version of the model uses.

    A version reloaded from other files gets tables beside the serving ones. After a restart, existing tables of exactly these
    files are preferred, since they contain online writes.

    Args:
        config: configuration of the version.
        fingerprint: fingerprint of its files.
        used: slots of the versions in service or kept.
    """
    others = [f"{config.version}.{fingerprint[i : i + 8]}" for i in (0, 8, 16)]
    databases = [database for database in chain.databases if database.persistent]
    held = {slot for database in databases for _, slot, _ in _tables_of(config.model, database)}
    written = [slot for slot in others if slot in held]
    return next(slot for slot in [*written, config.tables[0].slot, *others] if slot not in used)


def leftovers(config: ModelConfig, live: Sequence[TableSpec], held_versions: int, chain: DatabaseChain) -> list[str]:
    """Return the tags of tables that an earlier process left and that can be dropped.

    Of the versions below the serving one, the last `keep_versions`, less those that this process keeps, stay complete for a
    fast roll-back after a restart.

    Args:
        config: configuration of the serving version.
        live: tables in use by versions of the model.
        held_versions: number of replaced versions that this process keeps.
    """
    stored: list[tuple[str, str, str]] = []
    for database in chain.databases:
        if database.persistent and not database.read_only:
            with suppress(DatabaseError):
                stored += _tables_of(config.model, database)
    used = {table.tag for table in live}
    # Names without a slot are HugeCTR's and may belong to another program, except those of this model's tables.
    own = {table.table_name for table in config.tables} if all(table.slot for table in live) else set()
    slots = {tag: slot or FIRST_VERSION for tag, slot, table in stored if tag not in used and (slot or table in own)}
    below = sorted({int(slot) for slot in slots.values() if slot.isdecimal() and int(slot) < int(config.version)})
    count = config.keep_versions - held_versions
    stay = set(map(str, below[-count:])) if count > 0 else set()
    return [tag for tag, slot in slots.items() if slot not in stay]


def _tables_of(model: str, database: Database) -> list[tuple[str, str, str]]:
    """Return the tag, slot and name of each table of a model."""
    found = ((tag, split_tag(tag)) for tag in database.tags())
    return [(tag, names[1], names[2]) for tag, names in found if names and names[0] == model]
