"""Opens RocksDB databases for tests."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hps.databases.rocks_db.database import RocksDatabase
from hps.testing.databases import DIM, TAG


@contextmanager
def opened(path: str | Path, dim: int = DIM, **settings: Any) -> Iterator[RocksDatabase]:
    """A database with the table TAG open, closed at the end."""
    database = RocksDatabase(path, **settings)
    try:
        database.open_table(TAG, dim)
        yield database
    finally:
        database.close()
