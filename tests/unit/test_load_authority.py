"""The persistent database is the authority: what starts after an online update serves the update, not the files."""

from dataclasses import replace

import numpy as np
import pytest

from hps.databases.base import LoadRecord, PersistentDatabase
from hps.models.files import open_sparse_model
from hps.models.writer import write_sparse_model
from hps.types import TableSpec
from tests.memory_database import MemoryDatabase
from tests.table_loads import load_table

TABLE = TableSpec("shop", "item", 2, 0.0, 1000)
KEYS = np.arange(10, dtype=np.int64)
VECTORS = np.repeat(KEYS[:, None], 2, 1).astype(np.float32)


class Recording(MemoryDatabase, PersistentDatabase):
    """A memory database that remembers its loads and whether it was modified since."""

    def __init__(self):
        super().__init__()
        self.record = None

    def load_record(self, tag):
        return self.record

    def load_chunk(self, tag, keys, vectors, record):
        super().insert(tag, keys, vectors)
        self.record = record

    def modify(self, keys, vectors):
        super().insert(TABLE.tag, keys, vectors)
        if self.record:
            self.record = replace(self.record, modified=True)


@pytest.fixture
def files(tmp_path):
    write_sparse_model(tmp_path / "item.model", (KEYS, VECTORS))
    return str(tmp_path / "item.model")


def rows(database):
    out = np.full((12, 2), -1, np.float32)
    database.fetch(TABLE.tag, np.arange(12), out, np.zeros(12, np.bool_))
    return out[:, 0].tolist()


def test_unmodified_table_is_loaded_from_the_files(files):
    persistent, volatile = Recording(), MemoryDatabase()
    load_table(TABLE, files, [persistent])
    report = load_table(TABLE, files, [volatile, persistent])
    assert not report.differs
    assert rows(volatile) == [*range(10), -1, -1]


def test_volatile_database_gets_what_was_updated_online(files):
    persistent, volatile = Recording(), MemoryDatabase()
    load_table(TABLE, files, [persistent])
    persistent.modify(np.array([3, 11]), np.full((2, 2), 77, np.float32))
    persistent.delete(TABLE.tag, np.array([4]))
    report = load_table(TABLE, files, [volatile, persistent])
    assert report.differs
    assert rows(volatile) == rows(persistent) == [0, 1, 2, 77, -1, 5, 6, 7, 8, 9, -1, 77]


def test_database_that_is_kept_is_the_authority_whatever_the_files_say(files):
    kept, volatile = Recording(), MemoryDatabase()
    kept.open_table(TABLE.tag, 2)
    kept.modify(np.array([1]), np.full((1, 2), 5, np.float32))
    report = load_table(TABLE, files, [volatile], keep=[kept])
    assert report.differs
    assert rows(volatile) == [-1, 5, *[-1] * 10]


def test_kept_database_that_holds_these_very_files_lets_them_be_loaded(files):
    kept, volatile = Recording(), MemoryDatabase()
    load_table(TABLE, files, [kept])
    assert not load_table(TABLE, files, [volatile], keep=[kept]).differs
    assert rows(volatile) == [*range(10), -1, -1]


def test_new_version_of_the_files_replaces_online_updates(files):
    persistent, volatile = Recording(), MemoryDatabase()
    load_table(TABLE, files, [persistent])
    persistent.modify(np.array([3]), np.full((1, 2), 77, np.float32))
    write_sparse_model(files, (KEYS, VECTORS + 100), overwrite=True)
    report = load_table(TABLE, files, [volatile, persistent])
    assert not report.differs
    assert rows(volatile) == rows(persistent) == [*range(100, 110), -1, -1]


def test_only_the_share_that_is_wanted_is_copied(files):
    persistent, volatile = Recording(), MemoryDatabase()
    load_table(TABLE, files, [persistent])
    persistent.modify(np.array([3]), np.full((1, 2), 77, np.float32))
    load_table(TABLE, files, [volatile, persistent], initial_cache_rate=0.5)
    assert volatile.size(TABLE.tag) == 5


def test_record_of_another_version_does_not_count_as_these_files(files):
    kept = Recording()
    kept.open_table(TABLE.tag, 2)
    rows_total = open_sparse_model(files, 2).rows
    kept.record = LoadRecord("another", rows_total, rows_total)
    assert load_table(TABLE, files, [], keep=[kept]).differs
