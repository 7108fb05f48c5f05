"""A table that changes from version to version: what each holds, its files, and where a load finds its base."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from hps.ground.progress import Progress
from hps.models.deltas import ResidentTable, TableSource
from hps.models.loading.table_load import LoadReport, LoadTargets, TableLoad
from hps.models.repository import VersionFiles, table_sources, version_files
from hps.models.sources import ModelSources
from hps.models.writer import write_version
from hps.stores.base import Database
from hps.types import FloatArray, KeyArray, TableSpec
from tests.tables.table_loads import TABLE, content

Rows = tuple[KeyArray, FloatArray]
Held = Callable[[str], Sequence[ResidentTable]]


def nowhere(version: str) -> Sequence[ResidentTable]:
    """No version is in any database."""
    return ()


@dataclass(frozen=True)
class Change:
    """What a version changes: rows, and keys that are no more."""

    rows: Rows
    deleted: KeyArray


def applied(table: dict[int, bytes], change: Change) -> dict[int, bytes]:
    """The table after a change."""
    gone = set(change.deleted.tolist())
    return {key: row for key, row in table.items() if key not in gone} | content(*change.rows)


class Versions:
    """The versions of a model with one table, `item`, below a directory or URI: the first is whole, the others are deltas."""

    def __init__(self, place: str | Path, base: Rows, *, sources: ModelSources | None = None) -> None:
        self.place, self.sources = str(place), sources or ModelSources()
        write_version(f"{self.place}/1", {"item": base}, sources=self.sources)
        self.contents = [content(*base)]

    def add(self, change: Change) -> str:
        """Write the next version; returns its number."""
        before = len(self.contents)
        write_version(
            f"{self.place}/{before + 1}",
            {"item": change.rows},
            delta_of=str(before),
            deleted={"item": change.deleted},
            sources=self.sources,
        )
        self.contents.append(applied(self.contents[-1], change))
        return str(before + 1)

    def expected(self, version: str) -> dict[int, bytes]:
        return self.contents[int(version) - 1]

    def source(self, version: str, held: Held = nowhere, *, root: str = "", **changes: Any) -> TableSource:
        """Where a version is; `root` comes before the place, as a scheme does."""
        return replace(source_of(f"{root}{self.place}", version, held, self.sources), **changes)

    def load(self, version: str, databases: Sequence[Database], *, root: str = "", **settings: Any) -> LoadReport:
        """Load a version into the databases; by default what they hold of others is offered as its base."""
        return load_version(f"{root}{self.place}", version, databases, sources=self.sources, **settings)


def source_of(place: str, version: str, held: Held, sources: ModelSources) -> TableSource:
    """Where a version of the model in a directory is."""

    def find(number: str) -> VersionFiles | None:
        return version_files(number, f"{place}/{number}", ["item"], sources)

    (source,) = table_sources(version, find, held)
    return source


def in_the_database(version: str) -> Sequence[ResidentTable]:
    """Where the table of a version is in a persistent database that has it."""
    return [ResidentTable(spec(version))]


def load_version(
    place: str,
    version: str,
    databases: Sequence[Database],
    *,
    held: Held = in_the_database,
    sources: ModelSources | None = None,
    keep: Sequence[Database] = (),
    progress: Progress | None = None,
    **settings: Any,
) -> LoadReport:
    """Load a version of the model in a directory, with any other settings of `LoadTargets`."""
    sources = sources or ModelSources()
    targets = LoadTargets(tuple(databases), tuple(keep), sources=sources, **settings)
    return TableLoad(spec(version), source_of(place, version, held, sources), targets, progress).run()


def spec(version: str) -> TableSpec:
    """The table of a version."""
    return replace(TABLE, slot="" if version == "1" else version)


def held_of(database: Database, version: str) -> dict[int, bytes]:
    """What a database holds of a version."""
    database.open_table(spec(version).tag, TABLE.dim)
    chunks = database.scan(spec(version).tag, 100)
    return {int(key): row.tobytes() for keys, rows in chunks for key, row in zip(keys, rows, strict=True)}


NO_KEYS = np.empty(0, np.int64)
