"""The database of row files: the contract, its file format, seals, and crashes."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
import rocksdict

from hps.stores.base import Database
from hps.stores.row_files.database import RowFilesDatabase
from hps.testing.databases import (
    DIM,
    TAG,
    AgingRowsContract,
    DatabaseContract,
    LastingContract,
    OrderedWritesContract,
    PersistentContract,
)
from tests.ring1.stores.rocks_db.test_rocks_db import raw_items


def items(path: Path, family: str) -> dict[int, bytes]:
    """The rows of a column family, none if it does not exist."""
    if family not in rocksdict.Rdict.list_cf(str(path)):
        return {}
    return {int.from_bytes(key, "little", signed=True): value for key, value in raw_items(path, family).items()}


def file_rows(path: Path) -> dict[int, bytes]:
    """The rows of a row file, read by the format's description alone."""
    content = path.read_bytes()
    length = struct.unpack_from("<8sII", content)[2]
    head = json.loads(content[16 : 16 + length])
    size = 8 + 4 * head["width"]
    records = [content[4096 + i * size : 4096 + (i + 1) * size] for i in range(head["rows"])]
    return {int.from_bytes(record[:8], "little", signed=True): record[8:] for record in records}


@pytest.fixture
def database(path: Path) -> Iterator[RowFilesDatabase]:
    database = RowFilesDatabase(path)
    yield database
    database.close()


@pytest.fixture
def table(database: RowFilesDatabase) -> RowFilesDatabase:
    database.open_table(TAG, DIM)
    return database


class TestRowFilesDatabase(DatabaseContract, LastingContract, PersistentContract, OrderedWritesContract, AgingRowsContract):
    def raw_rows(self, database: Database, tag: str) -> dict[int, bytes]:
        assert isinstance(database, RowFilesDatabase)
        database.wait_until_durable(tag)
        changes = database.path / "changes"
        times, rows = items(changes, f"hps-written/{tag}"), items(changes, tag)
        file = database.path / "tables" / f"{tag}.rows"
        sealed = file_rows(file) if file.exists() else {}
        return {key: row for key, row in sealed.items() if key not in times} | rows


class SealsEachWrite(RowFilesDatabase):
    """Seals after each write, so that every answer is a file's."""

    def insert(self, tag, keys, vectors):
        super().insert(tag, keys, vectors)
        self.seal(tag)

    def delete(self, tag, keys):
        count = super().delete(tag, keys)
        self.seal(tag)
        return count

    def apply(self, tag, changes, positions):
        applied = super().apply(tag, changes, positions)
        self.seal(tag)
        return applied


class TestSealedRowFiles(TestRowFilesDatabase):
    @pytest.fixture
    def database(self, path: Path) -> Iterator[RowFilesDatabase]:
        database = SealsEachWrite(path)
        yield database
        database.close()
