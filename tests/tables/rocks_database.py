"""Opens, fills and reads RocksDB databases for tests."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from hps.stores.base import LoadRecord
from hps.stores.rocks_db.database import RocksDatabase
from hps.testing.databases import DIM, TAG, fetched, vectors_of
from hps.types import KeyArray


@contextmanager
def opened(path: str | Path, dim: int = DIM, **settings: Any) -> Iterator[RocksDatabase]:
    """A database with the table TAG open, closed at the end."""
    database = RocksDatabase(path, **settings)
    try:
        database.open_table(TAG, dim)
        yield database
    finally:
        database.close()


def insert(database: RocksDatabase, keys: KeyArray, version: int = 0, tag: str = TAG) -> None:
    database.insert(tag, keys, vectors_of(keys, DIM, version))


def load(
    database: RocksDatabase, keys: KeyArray, version: int = 0, record: LoadRecord | None = None, tag: str = TAG
) -> LoadRecord:
    """Load a chunk, by default the whole of files `x`."""
    record = record or LoadRecord("x", keys.size, keys.size)
    database.load_chunk(tag, keys, vectors_of(keys, DIM, version), record)
    return record


def assert_holds(database: RocksDatabase, keys: KeyArray, version: int = 0, tag: str = TAG) -> None:
    out, found = fetched(database, tag, keys, DIM)
    assert found.all()
    np.testing.assert_array_equal(out, vectors_of(keys, DIM, version))
