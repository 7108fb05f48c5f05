"""A table that changes from version to version: what each holds, its files, and where a load finds its base."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from hps.databases.base import Database
from hps.models.deltas import HeldTable, TableSource
from hps.models.repository import VersionFiles, table_sources, version_files
from hps.models.sources import ModelSources
from hps.models.table_load import LoadReport, LoadTargets, TableLoad
from hps.models.writer import write_version
from hps.progress import Progress
from hps.types import FloatArray, KeyArray, TableSpec
from tests.tables.table_loads import TABLE, content

Rows = tuple[KeyArray, FloatArray]


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

    def source(
        self, version: str, held: Callable[[str], Sequence[HeldTable]] = lambda version: (), *, root: str = "", **changes: Any
    ) -> TableSource:
        """Where a version is, by default with nothing in any database; `root` comes before the place, as a scheme does."""

        def find(number: str) -> VersionFiles | None:
            if not 0 < int(number) <= len(self.contents):
                return None
            return version_files(number, f"{root}{self.place}/{number}", ["item"], self.sources)

        (source,) = table_sources(version, find, held)
        return replace(source, **changes)

    def load(
        self,
        version: str,
        databases: Sequence[Database],
        *,
        held: Callable[[str], Sequence[HeldTable]] | None = None,
        keep: Sequence[Database] = (),
        progress: Progress | None = None,
        root: str = "",
        **settings: Any,
    ) -> LoadReport:
        """Load a version into the databases; what they hold of others is offered as its base."""
        targets = LoadTargets(tuple(databases), tuple(keep), sources=self.sources, **settings)
        source = self.source(version, held or (lambda number: [HeldTable(spec(number).tag)]), root=root)
        return TableLoad(spec(version), source, targets, progress).run()


def spec(version: str) -> TableSpec:
    """The table of a version."""
    return replace(TABLE, slot="" if version == "1" else version)


def held_of(database: Database, version: str) -> dict[int, bytes]:
    """What a database holds of a version."""
    database.open_table(spec(version).tag, TABLE.dim)
    chunks = database.scan(spec(version).tag, 100)
    return {int(key): row.tobytes() for keys, rows in chunks for key, row in zip(keys, rows, strict=True)}


NO_KEYS = np.empty(0, np.int64)
