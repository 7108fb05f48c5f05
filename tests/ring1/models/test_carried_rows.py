"""Online writes that go from a table to one of another format: values, deletions, and the order of changes."""

from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

from hps.ground.progress import NoProgress
from hps.ground.rows import decode, encode
from hps.models.loading.carried_rows import CarriedTable
from hps.stores.base import LoadRecord, LogPosition, Partition, RowChanges
from hps.stores.rocks_db.database import RocksDatabase
from hps.types import TableSpec

DIM = 5
KEYS = np.arange(100)
OLD = TableSpec("shop", "item", DIM, 0.0, 100)
HERE = Partition("topic", 0)


def vectors_of(seed, n=KEYS.size):
    return np.random.default_rng(seed).standard_normal((n, DIM)).astype(np.float32)


def load(database, table, vectors, fingerprint="files"):
    rows = encode("loading", vectors, table.row_dtype)
    database.open_table(table.tag, table.width)
    database.load_chunk(table.tag, KEYS, rows, LoadRecord(fingerprint, KEYS.size, KEYS.size))
    database.finish_load(table.tag)


def vectors_in(database, table, keys):
    rows, found = np.zeros((keys.size, table.width), np.float32), np.zeros(keys.size, np.bool_)
    database.fetch(table.tag, keys, rows, found)
    return decode(rows, table.dim, table.row_dtype), found


def stored(vectors, table):
    return decode(encode("x", vectors, table.row_dtype), table.dim, table.row_dtype)


def change(database, table, keys, vectors, sequences, deleted=False):
    gone = np.full(keys.size, deleted)
    rows = encode("x", vectors, table.row_dtype)
    return database.apply(table.tag, RowChanges(keys, rows, np.array(sequences), gone), {HERE: LogPosition("7", 700)}).tolist()


@pytest.fixture
def database(tmp_path):
    with closing(RocksDatabase(tmp_path)) as database:
        yield database


@pytest.mark.parametrize("formats", [("float32", "int8"), ("int8", "float16")])
def test_a_table_is_carried_to_another_format_with_the_order_of_its_changes(database, formats, tmp_path):
    """Rows 0..9 from the log, 10..19 deleted by it, 20..29 written by hand before, 30..39 after, 40..49 deleted by hand."""
    old, new = replace(OLD, row_dtype=formats[0]), replace(OLD, row_dtype=formats[1])
    files, written, gone = vectors_of(1), vectors_of(2), np.r_[10:20, 40:50]
    load(database, old, files)
    database.insert(old.tag, KEYS[20:30], encode("x", written[20:30], old.row_dtype))
    database.follow_log(old.tag)
    assert all(change(database, old, KEYS[:10], written[:10], np.arange(500, 510)))
    assert all(change(database, old, KEYS[10:20], written[10:20], np.arange(510, 520), deleted=True))
    database.insert(old.tag, KEYS[30:40], encode("x", written[30:40], old.row_dtype))
    database.delete(old.tag, KEYS[40:50])
    carried = CarriedTable(database, old, new)
    database.open_table(new.tag, new.width)
    _, rows = carried.rows_of(KEYS, files, encode("loading", files, new.row_dtype))
    database.load_chunk(new.tag, KEYS, rows, carried.begun(LoadRecord("files", KEYS.size, KEYS.size)))
    database.finish_load(new.tag)
    carried.copy(database, 7, NoProgress())
    assert database.follow_log(new.tag) == {HERE: LogPosition("7", 700)}  # from where the old table stood

    def check():
        got, found = vectors_in(database, new, KEYS)
        np.testing.assert_array_equal(np.flatnonzero(~found), gone)
        for rows in (np.r_[0:10], np.r_[20:40]):
            np.testing.assert_array_equal(got[rows], stored(stored(written[rows], old), new))
        np.testing.assert_array_equal(got[50:], stored(files[50:], new))

    check()
    for keys in (KEYS[:10], KEYS[10:20], KEYS[30:40], KEYS[40:50]):  # what the log sends again, also before a deletion
        assert not any(change(database, new, keys, files[keys], [499] * 10))
    check()
    assert database.load_record(new.tag).fingerprint == "carrying files"
    carried.take_over(database)  # only this makes it whole
    record = database.load_record(new.tag)
    assert (record.fingerprint, record.complete, record.modified) == ("files", True, True)
    assert not database.load_record(old.tag).complete
    database.close()
    with closing(RocksDatabase(tmp_path)) as again:
        again.open_table(new.tag, new.width)
        assert again.follow_log(new.tag) == {HERE: LogPosition("7", 700)}
        assert not any(change(again, new, KEYS[:10], vectors_of(9, 10), [499] * 10))
        for keys in (KEYS[:10], KEYS[10:20], KEYS[30:40], KEYS[40:50], KEYS[60:70]):  # later changes are made
            assert all(change(again, new, keys, files[keys] + 1, [521] * 10))
            np.testing.assert_array_equal(vectors_in(again, new, keys)[0], stored(files[keys] + 1, new))
        assert all(change(again, new, KEYS[20:30], files[20:30] + 1, [1] * 10)), "rows by hand before the log are older"


class Written:
    """A deployed table that writes down what it is told."""

    def __init__(self):
        self.calls = []

    def insert(self, index, keys, vectors):
        self.calls.append(("insert", index, keys.tolist(), vectors.tolist()))

    def delete(self, index, keys):
        self.calls.append(("delete", index, keys.tolist()))

    def apply(self, index, changes, positions):
        self.calls.append(("apply", index, changes.keys.tolist(), changes.sequences.tolist(), changes.deleted.tolist()))
        return changes.keys.size


def test_noted_keys_are_carried_over_once_with_what_they_have_now(database):
    load(database, OLD, vectors_of(1))
    carried, written = CarriedTable(database, OLD, replace(OLD, row_dtype="float16")), Written()
    carried.note(KEYS[3:5])
    carried.note(KEYS[4:6])
    database.insert(OLD.tag, KEYS[3:4], np.ones((1, DIM), np.float32))
    database.delete(OLD.tag, KEYS[5:6])
    assert carried.noted == 4
    carried.catch_up(written, 2)
    assert written.calls == [("insert", 2, [3, 4], [[1.0] * DIM, *vectors_of(1)[4:5].tolist()]), ("delete", 2, [5])]
    carried.catch_up(written, 2)
    assert len(written.calls) == 2
    database.follow_log(OLD.tag)
    change(database, OLD, KEYS[7:9], np.ones((2, DIM), np.float32), [10, 11])
    database.delete(OLD.tag, KEYS[8:9])
    carried.note(KEYS[7:9])
    carried.catch_up(written, 0)
    assert written.calls[2:] == [("apply", 0, [7, 8], [10, 12], [False, True])]


def test_notes_take_no_more_memory_than_twice_the_distinct_keys(database, monkeypatch):
    monkeypatch.setattr("hps.models.loading.carried_rows._MOST_NOTED", 50)
    carried = CarriedTable(database, OLD, replace(OLD, row_dtype="int8"))
    for _ in range(1000):
        carried.note(KEYS[:20])
        assert carried.noted <= 70
