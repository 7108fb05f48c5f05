"""What tests of loading share: one small table, its files, ways to load it and to see what a database holds."""

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hps.ground.progress import Progress
from hps.models.loading.table_load import LoadReport, LoadTargets, TableLoad
from hps.models.writer import write_sparse_model
from hps.stores.base import Database, LoadRecord, PersistentDatabase
from hps.tools.cli.tables.sample import sample_vectors
from hps.types import FloatArray, KeyArray, TableSpec

DIM, ROWS, CHUNK_ROWS = 4, 1000, 64
ROW_BYTES = 8 + 4 * DIM
TABLE = TableSpec("shop", "item", DIM, 0.0, 10_000)
TAG = TABLE.tag


def rows_of(n: int, seed: int = 1) -> tuple[KeyArray, FloatArray]:
    """n rows whose vectors depend on the seed."""
    keys = np.random.default_rng(seed).permutation(np.arange(n, dtype=np.int64)) * 1_000_003 - 7
    return keys, sample_vectors(keys, DIM, seed)


def content(keys: KeyArray, vectors: FloatArray) -> dict[int, bytes]:
    """Rows as a dict; of equal keys the last counts."""
    return {int(key): row.tobytes() for key, row in zip(keys, vectors, strict=True)}


KEYS, VECTORS = rows_of(ROWS)
FILES = content(KEYS, VECTORS)
"""What a database holds once the files of `write_files` are loaded."""
NEW_KEY = np.array([10**12], np.int64)


def write_files(directory: Path) -> str:
    """Write the model of ROWS rows; returns its place."""
    write_sparse_model(directory / "item", (KEYS, VECTORS))
    return str(directory / "item")


def update(database: Database) -> dict[int, bytes]:
    """Change a row, add one and remove one; returns what the database holds now, if it held the files."""
    changed = np.append(KEYS[:1], NEW_KEY)
    vectors = np.full((2, DIM), 77, np.float32)
    database.insert(TAG, changed, vectors)
    database.delete(TAG, KEYS[1:2])
    return {key: row for key, row in FILES.items() if key != KEYS[1]} | content(changed, vectors)


def failing_at(row: int, error: BaseException) -> Callable[[int], None]:
    """What a database does that fails before it loads this row."""

    def before_chunk(first: int) -> None:
        if first >= row:
            raise error

    return before_chunk


def touch(source: str) -> None:
    """Give model files another time."""
    for name in ("key", "emb_vector"):
        os.utime(f"{source}/{name}", ns=(0, 1))


def cut_into_small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make loading, copying and refreshing go in many chunks of CHUNK_ROWS rows."""
    for name in ("models.files.CHUNK_BYTES", "engine.refresh._CHUNK_BYTES"):
        monkeypatch.setattr(f"hps.{name}", CHUNK_ROWS * ROW_BYTES)


def readers() -> list[str]:
    """Names of the threads that read ahead."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("hps-model-reader")]


def load_table(
    table: TableSpec,
    source: str,
    databases: Sequence[Database],
    *,
    keep: Sequence[Database] = (),
    progress: Progress | None = None,
    **settings: Any,
) -> LoadReport:
    """Load databases from model files, with any other settings of `LoadTargets`."""
    return TableLoad(table, source, LoadTargets(tuple(databases), tuple(keep), **settings), progress).run()


def nothing_to_do(report: LoadReport) -> bool:
    """Whether every database had all rows already."""
    return not any(load.rows for load in report.loads)


def held(database: Database) -> dict[int, bytes]:
    """What a database holds of the table, which is opened in it."""
    database.open_table(TAG, DIM)
    return {int(k): v.tobytes() for ks, vs in database.scan(TAG, 100) for k, v in zip(ks, vs, strict=True)}


def record_of(database: PersistentDatabase) -> LoadRecord:
    """The load record of the table, which has one."""
    record = database.load_record(TAG)
    assert record is not None
    return record


class Events:
    """A progress that remembers what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    def start(self, tag: str, rows: int, size_bytes: int) -> None:
        self.told.append(("start", tag, rows, size_bytes))

    def advance(self, tag: str, rows: int) -> None:
        self.told.append(("advance", tag, rows))

    def finish(self, tag: str) -> None:
        self.told.append(("finish", tag))

    @property
    def advanced(self) -> int:
        """Rows that were counted."""
        return sum(event[2] for event in self.told if event[0] == "advance")
