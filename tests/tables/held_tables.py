"""The tables that a database has, also of kinds that do not list them because none outlives its process."""

from typing import Any

from hps.stores.base import LastingDatabase


def held_tags(database: Any) -> list[str]:
    """Return the tags of the tables of a database; of a hash map from its own dictionary."""
    return database.tags() if isinstance(database, LastingDatabase) else sorted(database._tables)
