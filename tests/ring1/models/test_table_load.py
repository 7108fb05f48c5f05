"""Model files into databases: what is read, skipped, continued, replaced or copied, and what a failure leaves behind."""

import json
import logging
import mmap
import os
import re
import shutil
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import hps
from hps.errors import (
    DatabaseCorruptError,
    DatabaseError,
    ModelFileChangedError,
    ModelFileError,
    ModelFileNotFoundError,
    TableWidthError,
)
from hps.models.files import HEAD_BYTES, extend_checksum, open_sparse_model
from hps.models.loading.table_load import DatabaseLoad, LoadFeed
from hps.models.writer import write_sparse_model
from hps.stores.base import LOAD_ADVICE, Database, LoadRecord, TableStats
from hps.stores.hash_map.database import HashMapDatabase
from hps.stores.hash_map.layout import DENSE_ROWS
from hps.stores.rocks_db.database import RocksDatabase
from hps.stores.rocks_db.load_records import LoadRecords
from hps.testing.waiting import wait_until
from hps.tools.cli.app import app
from hps.types import FloatArray, KeyArray
from tests.fakes.gated_file_system import gates
from tests.fakes.memory_database import MemoryDatabase as Memory
from tests.fakes.memory_database import PersistentMemoryDatabase as Persistent
from tests.servers.running_service import document_of, model_of
from tests.tables.hash_map_inspection import inspect
from tests.tables.sparse_models import chunks_of
from tests.tables.table_loads import CHUNK_ROWS, DIM, FILES, KEYS, NEW_KEY, ROW_BYTES, ROWS, TABLE, TAG, VECTORS, Events

# isort: split
from tests.tables.table_loads import content, failing_at, held, load_table, nothing_to_do, readers, record_of, rows_of, touch

# isort: split
from tests.tables.table_loads import update

pytestmark = pytest.mark.usefixtures("small_chunks")


class BoundedMemory(Memory):
    """A volatile database that says where it evicts, and does not."""

    kind = "bounded_memory"

    def __init__(self, capacity_rows: int) -> None:
        super().__init__()
        self.capacity_rows = capacity_rows

    def stats(self, tag: str) -> TableStats:
        rows = self.size(tag)
        return TableStats(rows, rows * DIM * 4, -1, self.capacity_rows)


@pytest.fixture
def volatile() -> Memory:
    return Memory()


@pytest.fixture
def persistent() -> Persistent:
    return Persistent()


@pytest.fixture
def rocks(tmp_path: Path) -> Iterator[RocksDatabase]:
    with closing(RocksDatabase(tmp_path / "rocksdb", num_threads=2)) as database:
        yield database


@pytest.fixture
def hash_map() -> Iterator[HashMapDatabase]:
    with closing(HashMapDatabase()) as database:
        yield database


def record_in(source: str, rows_done: int, rows_total: int = ROWS, modified: bool = False) -> LoadRecord:
    """A record of a load of these files."""
    return LoadRecord(open_sparse_model(source, DIM).fingerprint, rows_done, rows_total, modified)


def test_every_database_gets_every_row_bit_for_bit_in_one_pass_over_the_files(
    source: str, volatile: Memory, persistent: Persistent
) -> None:
    progress, place = Events(), f"gate://counted{source}"
    with gates("counted") as (gate,):
        report = load_table(TABLE, place, [volatile, persistent], progress=progress)
    assert gate.bytes_read == {"key": 8 * ROWS + HEAD_BYTES, "emb_vector": 4 * DIM * ROWS}
    assert held(volatile) == held(persistent) == FILES
    assert report.loads == (DatabaseLoad("memory", 0, ROWS), DatabaseLoad("persistent_memory", 0, ROWS))
    assert (report.tag, report.model.rows, nothing_to_do(report)) == (TAG, ROWS, False)
    record = record_of(persistent)
    assert (record.fingerprint, record.rows_done, record.complete) == (report.model.fingerprint, ROWS, True)
    assert (record.source, record.size_bytes, record.checksum) == (place, ROWS * ROW_BYTES, extend_checksum("", KEYS, VECTORS))
    assert (progress.told[0], progress.told[-1]) == (("start", TAG, ROWS, ROWS * ROW_BYTES), ("finish", TAG))
    assert progress.advanced == ROWS
    chunks = [("load_chunk", CHUNK_ROWS)] * (ROWS // CHUNK_ROWS) + [("load_chunk", ROWS % CHUNK_ROWS)]
    assert persistent.told == [("load_chunk", 0), *chunks, ("finish_load", ROWS)]  # the record alone, before the first row


def test_a_table_is_known_to_be_incomplete_before_its_first_row(source: str, persistent: Persistent) -> None:
    """Killed there, after the old version was dropped, it would else be taken for a whole table of no rows."""
    persistent.open_table(TAG, DIM)
    persistent.records[TAG] = LoadRecord("another version", ROWS, ROWS)
    seen = []
    persistent.before_chunk = lambda row: seen.append((row, persistent.size(TAG), persistent.load_record(TAG)))
    load_table(TABLE, source, [persistent])
    (_, _, before), (row, rows, record) = seen[:2]
    assert (before, row, rows) == (None, 0, 0)
    assert record is not None
    assert (record.rows_done, record.complete, record.source) == (0, False, source)


def test_memory_is_bounded_whatever_the_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """16 chunks of 1 MB pass through; three buffers and little else may be held."""
    monkeypatch.setattr("hps.models.files.CHUNK_BYTES", 1 << 20)
    rows = 16 * (1 << 20) // (8 + 4 * DIM)
    (tmp_path / "key").write_bytes(b"\0" * 8 * rows)
    (tmp_path / "emb_vector").write_bytes(b"\0" * 4 * DIM * rows)

    class Sink(Persistent):
        def load_chunk(self, tag: str, keys: KeyArray, vectors: FloatArray, record: LoadRecord) -> None: ...

    tracemalloc.start()
    try:
        load_table(TABLE, str(tmp_path), [Sink()])
        assert (2 << 20) < tracemalloc.get_traced_memory()[1] < (4 << 20)
    finally:
        tracemalloc.stop()


def test_a_whole_table_is_skipped_while_a_volatile_one_is_fed(source: str, volatile: Memory, persistent: Persistent) -> None:
    load_table(TABLE, source, [persistent])
    persistent.told.clear()
    progress = Events()
    report = load_table(TABLE, source, [persistent], progress=progress)
    assert nothing_to_do(report)
    assert report.loads == (DatabaseLoad("persistent_memory", ROWS, ROWS),)
    assert persistent.told == progress.told == []
    assert not nothing_to_do(load_table(TABLE, source, [volatile, persistent], progress=progress))
    assert held(volatile) == FILES
    assert (persistent.told, progress.advanced) == ([], ROWS)


@pytest.mark.parametrize("beside", [False, True])
def test_an_interrupted_load_continues_where_it_ended(
    source: str, volatile: Memory, persistent: Persistent, beside: bool
) -> None:
    """Only what is missing is read and reported, unless another database needs the rows before it."""
    persistent.open_table(TAG, DIM)
    persistent.load_chunk(TAG, KEYS[:300], VECTORS[:300], record_in(source, 300))
    persistent.told.clear()
    progress = Events()
    report = load_table(TABLE, source, [persistent, volatile][: 1 + beside], progress=progress)
    assert held(persistent) == FILES
    assert held(volatile) == (FILES if beside else {})
    assert report.loads[0] == DatabaseLoad("persistent_memory", 300, ROWS)
    assert sum(persistent.chunks) == ROWS - 300
    rows = ROWS if beside else ROWS - 300
    assert (progress.told[0], progress.advanced) == (("start", TAG, rows, rows * ROW_BYTES), rows)


@pytest.mark.parametrize(
    ("rows_done", "rows_total", "modified"),
    [(-1, ROWS, False), (ROWS + 1, ROWS, False), (10**12, 10**12, False), (300, ROWS, True)],
)
def test_a_record_that_cannot_be_is_not_believed(
    source: str, volatile: Memory, persistent: Persistent, rows_done: int, rows_total: int, modified: bool
) -> None:
    persistent.open_table(TAG, DIM)
    persistent.insert(TAG, KEYS[:100], np.zeros((100, DIM), np.float32))
    persistent.records[TAG] = record_in(source, rows_done, rows_total, modified)
    load_table(TABLE, source, [volatile, persistent])
    assert held(volatile) == held(persistent) == FILES


def test_rows_that_hugectr_wrote_stay_and_are_overwritten_by_key(source: str, persistent: Persistent) -> None:
    persistent.open_table(TAG, DIM)
    persistent.insert(TAG, np.append(NEW_KEY, KEYS[5:6]), np.ones((2, DIM), np.float32))
    load_table(TABLE, source, [persistent])
    assert held(persistent) == FILES | content(NEW_KEY, np.ones((1, DIM), np.float32))
    assert ("drop_table", 0) not in persistent.told


def test_files_that_were_only_touched_or_copied_are_compared_once_and_not_loaded_again(
    source: str, rocks: RocksDatabase, hash_map: HashMapDatabase, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "hps.models.loading.table_load")
    load_table(TABLE, source, [rocks])
    before = record_of(rocks)
    touch(source)
    report = load_table(TABLE, source, [rocks])
    assert (nothing_to_do(report), report.differs) == (True, False)
    assert before != record_of(rocks) == replace(before, fingerprint=open_sparse_model(source, DIM).fingerprint)
    assert nothing_to_do(load_table(TABLE, source, [rocks]))
    assert caplog.text.count("comparing them") == 1
    shutil.copytree(source, tmp_path / "copy")
    assert nothing_to_do(load_table(TABLE, str(tmp_path / "copy"), [rocks]))
    assert record_of(rocks).source == str(tmp_path / "copy")
    assert held(rocks) == FILES
    updated = update(rocks)
    touch(source)
    report = load_table(TABLE, source, [hash_map, rocks])
    assert (report.differs, report.loads[1].rows, record_of(rocks).modified) == (True, 0, True)
    assert held(rocks) == held(hash_map) == updated


def flip_a_bit(source: str, name: str, place: int) -> None:
    with open(f"{source}/{name}", "r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize(
    "change",
    [
        lambda source: flip_a_bit(source, "key", 8 * 500),
        lambda source: flip_a_bit(source, "emb_vector", 0),
        lambda source: flip_a_bit(source, "emb_vector", 4 * DIM * ROWS - 1),
        lambda source: write_sparse_model(source, (KEYS, VECTORS[::-1].copy()), overwrite=True),
        lambda source: write_sparse_model(source, rows_of(ROWS // 2, seed=2), overwrite=True),
    ],
    ids=["a bit of a key", "the first bit", "the last bit", "vectors that changed places", "fewer rows"],
)
def test_the_least_change_is_another_version_which_replaces_all_rows_and_updates(
    source: str, rocks: RocksDatabase, volatile: Memory, caplog: pytest.LogCaptureFixture, change: Callable[[str], object]
) -> None:
    load_table(TABLE, source, [rocks])
    update(rocks)
    change(source)
    assert not load_table(TABLE, source, [volatile, rocks]).differs
    assert [record.levelname for record in caplog.records if "that were written online" in record.getMessage()] == ["WARNING"]
    assert held(rocks) == held(volatile) == content(*next(chunks_of(open_sparse_model(source, DIM), ROWS)))
    assert not record_of(rocks).modified


@pytest.mark.parametrize("unknown", [{"checksum": ""}, {"size_bytes": 0}])
def test_a_record_of_an_older_hps_is_not_compared(source: str, rocks: RocksDatabase, unknown: dict[str, Any]) -> None:
    load_table(TABLE, source, [rocks])
    rocks.load_chunk(TAG, KEYS[:0], VECTORS[:0], replace(record_of(rocks), **unknown))
    assert nothing_to_do(load_table(TABLE, source, [rocks]))  # its fingerprint still counts
    touch(source)
    assert load_table(TABLE, source, [rocks]).loads[0].rows == ROWS
    assert len(record_of(rocks).checksum) == 16
    assert held(rocks) == FILES


def test_files_of_another_machine_are_loaded_rather_than_compared(
    source: str, rocks: RocksDatabase, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "hps.models.loading.table_load")
    with gates("elsewhere"):
        load_table(TABLE, f"gate://elsewhere{source}", [rocks])
        touch(source)
        assert load_table(TABLE, f"gate://elsewhere{source}", [rocks]).loads[0].rows == ROWS
    assert "comparing" not in caplog.text


def test_a_half_loaded_table_is_never_taken_for_the_same_files(source: str, persistent: Persistent) -> None:
    load_table(TABLE, source, [persistent])
    whole = record_of(persistent)
    persistent.drop_table(TAG)
    persistent.open_table(TAG, DIM)
    persistent.load_chunk(TAG, KEYS[:300], VECTORS[:300], replace(whole, rows_done=300))
    touch(source)
    assert load_table(TABLE, source, [persistent]).loads[0].rows == ROWS
    assert held(persistent) == FILES


@pytest.mark.parametrize("batch_rows", [0, 65, 200, 999, 1000])
def test_a_database_gets_batches_of_the_size_it_wants(source: str, batch_rows: int) -> None:
    database = Persistent(batch_rows * ROW_BYTES)
    load_table(TABLE, source, [database])
    first, *batches = database.chunks
    assert (first, sum(batches)) == (0, ROWS)
    size = ROWS if batch_rows >= ROWS else max(1, batch_rows // CHUNK_ROWS) * CHUNK_ROWS
    assert set(batches[:-1]) <= {size}
    assert batches[0] == size
    assert record_of(database).checksum == extend_checksum("", KEYS, VECTORS)
    assert held(database) == FILES


@pytest.mark.parametrize(
    ("first", "last", "batch_rows"), [(0, 1000, 100), (0, 130, 0), (100, 130, 5000), (999, 1000, 100), (300, 1000, 0)]
)
def test_a_feed_takes_the_rows_that_are_wanted_and_counts_no_others(first: int, last: int, batch_rows: int) -> None:
    database = Persistent(batch_rows * ROW_BYTES)
    database.open_table(TAG, DIM)
    feed = LoadFeed(database, TABLE, LoadRecord("f", first, ROWS), last)
    for start in range(0, ROWS, CHUNK_ROWS):
        keys, vectors = KEYS[start : start + CHUNK_ROWS].copy(), VECTORS[start : start + CHUNK_ROWS].copy()
        feed.add(start, keys, vectors, vectors)
        keys[:], vectors[:] = 0, 0  # the arrays are lent
    feed.end()
    assert held(database) == content(KEYS[first:last], VECTORS[first:last])
    assert (record_of(database).rows_done, record_of(database).rows_total) == (last, ROWS)


@pytest.mark.parametrize(
    ("capacity", "rate", "expected"),
    [
        *((2**64 - 1, 0.5, ROWS // 2), (2**64 - 1, 0.0, 0), (ROWS, 1.0, ROWS), (ROWS - 1, 1.0, ROWS - 1)),
        *((200, 0.25, 50), (0, 1.0, 0)),
    ],
)
def test_a_volatile_database_gets_its_share_and_the_persistent_one_all(
    source: str, persistent: Persistent, capacity: int, rate: float, expected: int
) -> None:
    volatile, progress = BoundedMemory(capacity), Events()
    report = load_table(TABLE, source, [volatile, persistent], initial_cache_rate=rate)
    assert held(volatile) == content(KEYS[:expected], VECTORS[:expected])
    assert held(persistent) == FILES
    assert report.loads[0] == DatabaseLoad("bounded_memory", 0, expected)
    load_table(TABLE, source, [BoundedMemory(capacity)], initial_cache_rate=rate, progress=progress)
    assert progress.advanced == expected  # no more is read than it gets


def dense_rows_of(database: HashMapDatabase) -> int:
    inspect(database, TAG)  # which checks where the rows of dense keys are
    return int(database._tables[TAG]._buckets.layout[DENSE_ROWS])


@pytest.fixture
def dense(tmp_path: Path) -> str:
    write_sparse_model(tmp_path / "dense", (np.arange(ROWS), VECTORS))
    return str(tmp_path / "dense")


@pytest.mark.parametrize(
    ("keys", "rate", "rows"),
    [
        *((np.arange(ROWS), 1.0, ROWS), (np.arange(ROWS), 0.5, ROWS // 2), (np.arange(1, ROWS + 1), 1.0, ROWS + 1)),
        (np.random.default_rng(1).permutation(ROWS), 1.0, ROWS),
        (np.random.default_rng(1).permutation(ROWS), 0.5, 0),  # half of them are no dense ones
        (np.concatenate([np.arange(ROWS - 100), np.arange(100)]), 1.0, ROWS - 100),
        (np.append(np.arange(ROWS - 2), [-1, 10**15]), 1.0, ROWS - 2),
        (KEYS, 1.0, 0),
    ],
)
def test_a_hash_map_is_dense_if_the_keys_of_the_files_are(
    hash_map: HashMapDatabase, keys: KeyArray, rate: float, rows: int, tmp_path: Path
) -> None:
    write_sparse_model(tmp_path / "m", (keys, VECTORS))
    databases = [hash_map, *([Persistent()] if rate == 1 else [])]
    with gates("counted") as (gate,):
        load_table(TABLE, f"gate://counted{tmp_path}/m", databases, initial_cache_rate=rate)
    assert held(hash_map) == content(keys[: round(ROWS * rate)], VECTORS[: round(ROWS * rate)])
    assert dense_rows_of(hash_map) == rows
    if keys is KEYS:
        assert gate.bytes_read["key"] == 8 * ROWS + CHUNK_ROWS * ROW_BYTES + HEAD_BYTES  # a chunk tells


def test_a_dense_hash_map_gets_what_was_updated_online(dense: str, hash_map: HashMapDatabase, persistent: Persistent) -> None:
    load_table(TABLE, dense, [persistent])
    persistent.insert(TAG, NEW_KEY, VECTORS[:1])
    persistent.delete(TAG, np.array([3, 5]))
    assert load_table(TABLE, dense, [hash_map, persistent]).differs
    assert held(hash_map) == held(persistent)
    assert dense_rows_of(hash_map) == ROWS


def test_a_load_of_a_dense_hash_map_that_is_stopped_is_completed_by_the_next(
    dense: str, hash_map: HashMapDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hash_map, "load_bytes", 100 * ROW_BYTES)
    load_chunk = hash_map.load_chunk

    def stopped(tag: str, keys: KeyArray, vectors: FloatArray, record: LoadRecord) -> None:
        if keys[0] > ROWS // 2:
            raise KeyboardInterrupt
        load_chunk(tag, keys, vectors, record)

    for _ in range(2):
        with monkeypatch.context() as patched:
            patched.setattr(hash_map, "load_chunk", stopped)
            with pytest.raises(KeyboardInterrupt):
                load_table(TABLE, dense, [hash_map])
        assert 0 < hash_map.size(TAG) < ROWS
        assert dense_rows_of(hash_map) == ROWS
    hash_map.delete(TAG, np.arange(0, ROWS, 3))
    load_table(TABLE, dense, [hash_map])
    assert held(hash_map) == content(np.arange(ROWS), VECTORS)
    assert dense_rows_of(hash_map) == ROWS


def test_a_volatile_database_gets_the_files_or_what_was_updated_online(
    source: str, volatile: Memory, persistent: Persistent
) -> None:
    share = Memory()
    assert held(share) == {}
    load_table(TABLE, source, [persistent], keep=[share])  # opened, and not loaded
    assert held(share) == {}
    for databases, keep in (([volatile, persistent], []), ([volatile], [persistent])):
        assert not load_table(TABLE, source, databases, keep=keep).differs
        assert held(volatile) == FILES
    updated, volatile = update(persistent), Memory()
    assert load_table(TABLE, source, [volatile, persistent]).differs
    assert held(volatile) == held(persistent) == updated
    load_table(TABLE, source, [share, persistent], initial_cache_rate=0.5)
    assert share.size(TAG) == ROWS // 2
    assert held(share).items() <= updated.items()


def test_a_database_that_is_kept_is_the_authority_whatever_the_files_say(
    source: str, volatile: Memory, persistent: Persistent
) -> None:
    persistent.open_table(TAG, DIM)
    persistent.insert(TAG, KEYS[:1], VECTORS[5:6])
    for force in (False, True):
        assert load_table(TABLE, source, [volatile], keep=[persistent], force=force).differs
        assert held(volatile) == held(persistent) == content(KEYS[:1], VECTORS[5:6])
    persistent.records[TAG] = LoadRecord("another version", ROWS, ROWS)
    assert load_table(TABLE, source, [], keep=[persistent]).differs
    persistent.records[TAG] = LoadRecord("of an earlier load", 300, ROWS)
    with pytest.raises(DatabaseError, match=rf"(?s){TAG} in persistent_memory .*holds 300 of {ROWS} rows.*`hps load`"):
        load_table(TABLE, source, [Memory()], keep=[persistent])


def test_online_updates_stay_without_force_and_go_with_it(source: str, rocks: RocksDatabase, hash_map: HashMapDatabase) -> None:
    rocks.open_table(TAG, DIM)
    rocks.insert(TAG, NEW_KEY, np.ones((1, DIM), np.float32))  # of unknown origin
    load_table(TABLE, source, [rocks], force=True)
    assert held(rocks) == FILES
    load_table(TABLE, source, [hash_map, rocks])
    updated = update(rocks)
    update(hash_map)
    assert nothing_to_do(load_table(TABLE, source, [rocks]))
    assert held(rocks) == updated
    report = load_table(TABLE, source, [hash_map, rocks], force=True)
    assert ([load.rows for load in report.loads], report.differs) == ([ROWS, ROWS], False)
    assert held(rocks) == held(hash_map) == FILES
    assert not record_of(rocks).modified
    assert nothing_to_do(load_table(TABLE, source, [rocks]))


def test_a_forced_load_that_is_interrupted_goes_on_and_keeps_no_update(source: str, persistent: Persistent) -> None:
    load_table(TABLE, source, [persistent])
    update(persistent)
    persistent.before_chunk = failing_at(256, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        load_table(TABLE, source, [persistent], force=True)
    persistent.before_chunk = lambda row: None
    assert load_table(TABLE, source, [persistent]).loads[0].first_row == 256
    assert held(persistent) == FILES


def test_a_load_that_is_stopped_anywhere_is_completed_by_the_next(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in chunks of another size, with the checksum of an uninterrupted load."""
    for stop, batch_rows in ((0, 0), (CHUNK_ROWS, 0), (7 * CHUNK_ROWS, 0), (ROWS // CHUNK_ROWS * CHUNK_ROWS, 0), (512, 300)):
        error: BaseException = KeyboardInterrupt() if stop > CHUNK_ROWS else DatabaseError("disk full")
        volatile, persistent = Memory(), Persistent(batch_rows * ROW_BYTES)
        persistent.before_chunk = failing_at(stop, error)
        with pytest.raises(type(error)):
            load_table(TABLE, source, [volatile, persistent])
        assert readers() == []
        if stop:  # what was gathered and not loaded is not counted
            assert (record_of(persistent).rows_done, record_of(persistent).complete) == (stop, False)
            assert held(persistent) == content(KEYS[:stop], VECTORS[:stop])
        persistent.before_chunk = lambda row: None
        persistent.told.clear()
        with monkeypatch.context() as patched:
            patched.setattr("hps.models.files.CHUNK_BYTES", 37 * ROW_BYTES)
            load_table(TABLE, source, [volatile, persistent])
        assert held(volatile) == held(persistent) == FILES
        assert sum(persistent.chunks) == ROWS - stop
        assert record_of(persistent).checksum == extend_checksum("", KEYS, VECTORS)
        assert nothing_to_do(load_table(TABLE, source, [persistent]))


def test_a_model_replaced_while_loading_is_never_taken_for_whole(source: str, persistent: Persistent) -> None:
    def replace_at(row: int) -> None:
        if row == 5 * CHUNK_ROWS:
            write_sparse_model(source, rows_of(ROWS, seed=2), overwrite=True)

    persistent.before_chunk = replace_at
    with pytest.raises(ModelFileError, match=r"changed while it was being read"):
        load_table(TABLE, source, [persistent])
    assert not record_of(persistent).complete
    persistent.before_chunk = lambda row: None
    load_table(TABLE, source, [persistent])
    assert held(persistent) == content(*rows_of(ROWS, seed=2))


class Writing(Events):
    """Changes the vectors of the first and the last row in the middle of a load."""

    def __init__(self, source: str, how: str) -> None:
        super().__init__()
        self.path = Path(source) / "emb_vector"
        written_ns = self.path.stat().st_ctime_ns  # a write within one tick of the clock has no time of its own
        wait_until(lambda: time.time_ns() > written_ns + 20_000_000, "the clock of the file system has gone on")
        self.file = self.path.open("r+b")
        self.map = mmap.mmap(self.file.fileno(), 0) if how == "mapped" else None
        for place in (0, -1) if self.map else ():
            self.map[place] = self.map[place]  # later stores to these pages do not change the file's times
        if not self.map:
            self.file.close()

    def advance(self, tag: str, rows: int) -> None:
        super().advance(tag, rows)
        if self.advanced != CHUNK_ROWS * 5:
            return
        if self.map:
            self.map[0] ^= 1
            self.map[-1] ^= 1
            return
        status = self.path.stat()
        with self.path.open("r+b") as file:
            for place in (0, status.st_size - 1):
                file.seek(place)
                file.write(b"\x55")
        os.utime(self.path, ns=(status.st_atime_ns, status.st_mtime_ns))

    def close(self) -> None:
        if self.map:
            self.map.close()
        self.file.close()


@pytest.mark.parametrize(("how", "make"), [("mapped", Persistent), ("mapped", HashMapDatabase), ("time put back", Memory)])
def test_files_that_are_written_in_place_during_a_load_are_never_mixed(source: str, how: str, make: type[Database]) -> None:
    database = make()
    with closing(Writing(source, how)) as writing, pytest.raises(ModelFileChangedError):
        load_table(TABLE, source, [database], progress=writing)
    if how == "mapped":
        assert held(database) == {}
    if isinstance(database, Persistent):
        record = database.load_record(TAG)
        assert record is None or not record.complete
    load_table(TABLE, source, [database])
    assert held(database) == content(KEYS, np.fromfile(Path(source) / "emb_vector", np.float32).reshape(-1, DIM))


def test_files_that_somebody_has_mapped_and_leaves_alone_are_loaded(
    source: str, volatile: Memory, persistent: Persistent
) -> None:
    with closing(Writing(source, "mapped")) as writing:
        load_table(TABLE, source, [volatile, persistent])
        assert held(volatile) == held(persistent) == FILES
        writing.map[0] ^= 1  # type: ignore[index]
        fresh = Memory()
        assert load_table(TABLE, source, [fresh, persistent]).differs  # what is in the files now is not what was loaded
        assert held(fresh) == FILES


@pytest.mark.parametrize("force", [False, True])
def test_files_that_do_not_fit_leave_the_databases_alone(source: str, persistent: Persistent, force: bool) -> None:
    load_table(TABLE, source, [persistent])
    updated = update(persistent)
    with open(Path(source) / "emb_vector", "ab") as file:
        file.write(b"x")
    with pytest.raises(ModelFileError, match="emb_vector"):
        load_table(TABLE, source, [persistent], force=force)
    (Path(source) / "emb_vector").unlink()
    with pytest.raises(ModelFileNotFoundError, match="emb_vector"):
        load_table(TABLE, source, [persistent], force=force)
    assert held(persistent) == updated


def test_keys_beyond_32_bits_are_found_before_the_old_version_is_dropped(dense: str, persistent: Persistent) -> None:
    load_table(TABLE, dense, [persistent], int32_keys=True)
    before = held(persistent)
    # one row more: the files are not compared with what is there
    write_sparse_model(dense, (np.append(np.arange(ROWS), 2**32), rows_of(ROWS + 1)[1]), overwrite=True)
    with pytest.raises(ModelFileError, match=f"row {ROWS} has key {2**32}"):
        load_table(TABLE, dense, [persistent], int32_keys=True)
    assert held(persistent) == before


def test_a_read_that_never_ends_is_given_up(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hps.models.loading.read_ahead._READ_TIMEOUT_S", 0.05)
    with gates("stuck") as (gate,):
        gate.hold_from = 0
        with pytest.raises(ModelFileError, match=r"rows from 0 on did not arrive within"):
            load_table(TABLE, f"gate://stuck{source}", [Memory()])
    for thread in threading.enumerate():
        if thread.name.startswith("hps-model-reader"):
            thread.join(30)


def test_hugectrs_log_lines_are_kept(source: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    load_table(TABLE, source, [BoundedMemory(4000), Memory(), Persistent()])
    assert [record.getMessage() for record in caplog.records] == [
        f"Table: {TAG}; cached 1000 / 1000 embeddings in volatile database (bounded_memory); load: 1000 / 4000 (25.00%).",
        f"Table: {TAG}; cached 1000 / 1000 embeddings in volatile database (memory); load: 1000, unbounded.",
        f"Table: {TAG}; cached 1000 embeddings in persistent database (persistent_memory); complete.",
    ]


@pytest.fixture
def configuration(source: str, tmp_path: Path) -> dict[str, Any]:
    limits = {"maxnum_catfeature_query_per_table_per_sample": [10], "gpucacheper": 0.5, "hit_rate_threshold": 1.1}
    model = model_of("shop", [source], {"item": DIM}, default_value_for_each_table=[0.5], **limits)
    return document_of(model, persistent=tmp_path / "served")


def served(server: hps.HPS) -> dict[int, bytes]:
    """What it answers for the keys of the files and a new one."""
    asked = np.append(KEYS, NEW_KEY)
    vectors, found = server.lookup(asked, "shop", "item", return_found=True)
    return content(asked[found], vectors[found])


def test_a_server_serves_its_updates_again_until_it_is_forced(configuration: dict[str, Any]) -> None:
    with hps.HPS(configuration) as server:
        assert served(server) == FILES
        updated = update(server.model("shop").chain.databases[1])
    for force, expected in ((False, updated), (True, FILES), (False, FILES)):
        with hps.HPS(configuration, force=force) as server:
            assert served(server) == expected


def test_the_command_line_loads_again_when_forced(configuration: dict[str, Any], tmp_path: Path) -> None:
    (path := tmp_path / "ps.json").write_text(json.dumps(configuration))
    updated: dict[int, bytes] = {}
    for arguments, said in (([], "loaded 1,000 rows"), ([], "nothing to do"), (["--force"], "loaded 1,000 rows")):
        result = CliRunner().invoke(app, ["load", str(path), *arguments])
        assert result.exit_code == 0, result.output
        assert said in result.stdout.replace("\n", " ")
        with closing(RocksDatabase(configuration["persistent_db"]["path"])) as database:
            assert held(database) == (FILES if said != "nothing to do" else updated)
            updated = update(database)


# -- tables that cannot be opened --------------------------------------------------------------------------------------


def wider_model(place: Path, dim: int = DIM + 3) -> FloatArray:
    """Write files of the same keys with other vectors, and return these."""
    vectors = np.arange(ROWS * dim, dtype=np.float32).reshape(ROWS, dim)
    write_sparse_model(place, [(KEYS, vectors)])
    return vectors


def vectors_in(database: RocksDatabase, dim: int) -> FloatArray:
    out, found = np.zeros((ROWS, dim), np.float32), np.zeros(ROWS, np.bool_)
    assert database.fetch(TAG, KEYS, out, found) == ROWS
    return out


@pytest.mark.parametrize("round_trips", [1, 2])
def test_another_width_replaces_the_table(source: str, tmp_path: Path, round_trips: int) -> None:
    path = tmp_path / "rocksdb"
    vectors = wider_model(tmp_path / "wider")
    wider = replace(TABLE, dim=DIM + 3)
    for _ in range(round_trips):
        for table, place, expected in ((TABLE, source, None), (wider, str(tmp_path / "wider"), vectors)):
            with closing(RocksDatabase(path, num_threads=2)) as database:
                load_table(table, place, [database])
                held_vectors = vectors_in(database, table.dim)
                if expected is not None:
                    np.testing.assert_array_equal(held_vectors, expected)


def test_another_width_replaces_nothing_unless_the_files_have_it(source: str, rocks: RocksDatabase, tmp_path: Path) -> None:
    load_table(TABLE, source, [rocks])
    before = vectors_in(rocks, DIM)
    rocks.close()
    with closing(RocksDatabase(rocks.path, num_threads=2)) as database:
        with pytest.raises(ModelFileError):
            load_table(replace(TABLE, dim=DIM + 3), source, [database])
        database.open_table(TAG, DIM)
        np.testing.assert_array_equal(vectors_in(database, DIM), before)


@pytest.mark.parametrize("killed", ["mark_dropped", "remove", "advance"])
def test_a_table_that_was_making_way_is_whole_after_a_kill(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed: str
) -> None:
    class Killed(BaseException): ...

    def kill(*_: Any) -> None:
        raise Killed

    path, wider = tmp_path / "rocksdb", replace(TABLE, dim=DIM + 3)
    vectors = wider_model(tmp_path / "wider")
    with closing(RocksDatabase(path, num_threads=2)) as database:
        load_table(TABLE, source, [database])
    with closing(RocksDatabase(path, num_threads=2)) as database, monkeypatch.context() as patch:
        patch.setattr(LoadRecords, killed, kill)
        with pytest.raises(Killed):
            load_table(wider, str(tmp_path / "wider"), [database])
    with closing(RocksDatabase(path, num_threads=2)) as database:
        load_table(wider, str(tmp_path / "wider"), [database])
        np.testing.assert_array_equal(vectors_in(database, wider.dim), vectors)


def test_rows_of_unknown_origin_and_another_width_are_replaced_by_force_alone(
    source: str, rocks: RocksDatabase, tmp_path: Path
) -> None:
    """They may be HugeCTR's, which the files do not have."""
    rocks.open_table(TAG, DIM)
    rocks.insert(TAG, KEYS, VECTORS)
    rocks.close()
    vectors, place = wider_model(tmp_path / "wider"), str(tmp_path / "wider")
    with closing(RocksDatabase(rocks.path, num_threads=2)) as database:
        with pytest.raises(TableWidthError, match=r"hps load CONFIG --force"):
            load_table(replace(TABLE, dim=DIM + 3), place, [database])
        load_table(replace(TABLE, dim=DIM + 3), place, [database], force=True)
        np.testing.assert_array_equal(vectors_in(database, DIM + 3), vectors)


def test_a_table_without_the_rows_of_its_record_is_loaded_again(source: str, rocks: RocksDatabase) -> None:
    load_table(TABLE, source, [rocks])
    record = rocks.load_record(TAG)
    assert record is not None
    rocks.drop_table(TAG)
    rocks.open_table(TAG, DIM)
    rocks.load_chunk(TAG, np.empty(0, np.int64), np.empty((0, DIM), np.float32), record)
    rocks.close()
    refused = pytest.raises(DatabaseCorruptError, match=r"and it has none.*hps load CONFIG --force")
    with closing(RocksDatabase(rocks.path, num_threads=2)) as database, refused:
        database.open_table(TAG, DIM)
    with closing(RocksDatabase(rocks.path, num_threads=2)) as database:
        load_table(TABLE, source, [database], force=True)
        np.testing.assert_array_equal(vectors_in(database, DIM), VECTORS)


@pytest.mark.parametrize("what", [b"hps-server/load/", b"hps-server/positions/"])
def test_damaged_records_are_replaced_by_force(source: str, rocks: RocksDatabase, what: bytes) -> None:
    load_table(TABLE, source, [rocks])
    rocks._engine.write({"default": ([what + TAG.encode()], [b"?"])}, {}, "damaging")
    rocks.close()
    refused = pytest.raises(DatabaseCorruptError, match=r"hps load CONFIG --force")
    with closing(RocksDatabase(rocks.path, num_threads=2)) as database, refused:
        load_table(TABLE, source, [database])
    with closing(RocksDatabase(rocks.path, num_threads=2)) as database:
        load_table(TABLE, source, [database], force=True)
        np.testing.assert_array_equal(vectors_in(database, DIM), VECTORS)


# -- rows that are not finite ------------------------------------------------------------------------------------------


def model_with(place: Path, *wrong: tuple[int, float]) -> str:
    """Write the files with these values as the last elements of rows."""
    vectors = VECTORS.copy()
    for row, value in wrong:
        vectors[row, -1] = value
    write_sparse_model(place, [(KEYS, vectors)], overwrite=True)
    return str(place)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_more_rows_that_are_not_finite_than_allowed_are_refused_and_no_row_stays(
    tmp_path: Path, volatile: Memory, persistent: Persistent, value: float
) -> None:
    source = model_with(tmp_path / "wrong", (0, value), (ROWS - 1, value))
    for allowed in (0, 1):
        refused = rf"loading table {TAG} from {source}: 2 of {ROWS} rows .* that of key {KEYS[0]}; expected at most {allowed}"
        with pytest.raises(ModelFileError, match=refused):
            load_table(TABLE, source, [volatile, persistent], max_nonfinite_rows=allowed)
        assert (held(volatile), held(persistent), persistent.load_record(TAG)) == ({}, {}, None)
    report = load_table(TABLE, source, [volatile, persistent], max_nonfinite_rows=2)
    assert (report.nonfinite_rows, len(held(persistent))) == (2, ROWS)


def test_the_largest_finite_rows_are_finite(tmp_path: Path, persistent: Persistent) -> None:
    largest = float(np.finfo(np.float32).max)
    source = model_with(tmp_path / "large", *((row, largest) for row in range(ROWS)))
    assert load_table(TABLE, source, [persistent]).nonfinite_rows == 0


def test_the_rows_that_an_interrupted_load_left_are_counted(tmp_path: Path, persistent: Persistent) -> None:
    source = model_with(tmp_path / "wrong", (0, np.nan))
    persistent.before_chunk = failing_at(2 * CHUNK_ROWS, DatabaseError("the disk failed"))
    with pytest.raises(DatabaseError):
        load_table(TABLE, source, [persistent])
    persistent.before_chunk = lambda row: None
    assert record_of(persistent).rows_done > 0
    with pytest.raises(ModelFileError, match=rf"1 of {ROWS} rows have an infinity or NaN, the first that of key {KEYS[0]};"):
        load_table(TABLE, source, [persistent])


def test_rows_that_caches_alone_hold_are_counted(tmp_path: Path) -> None:
    source = model_with(tmp_path / "wrong", (ROWS - 1, np.nan))
    with pytest.raises(ModelFileError, match=rf"1 of {ROWS} rows have an infinity or NaN"):
        load_table(TABLE, source, [])
    assert load_table(TABLE, source, [], max_nonfinite_rows=1).nonfinite_rows == 1


@pytest.mark.parametrize("what", ["width", "record", "rows"])
def test_what_errors_say_loads_a_table_again(configuration: dict[str, Any], tmp_path: Path, what: str) -> None:
    """A table of HugeCTR's with another width, a damaged record, and a table that lost its rows."""
    (path := tmp_path / "ps.json").write_text(json.dumps(configuration))
    with closing(RocksDatabase(configuration["persistent_db"]["path"])) as database:
        if what == "width":
            database.open_table(TAG, DIM + 1)
            database.insert(TAG, KEYS, np.ones((ROWS, DIM + 1), np.float32))
        else:
            database.open_table(TAG, DIM)
            record = LoadRecord("x", ROWS, ROWS)
            database.load_chunk(TAG, np.empty(0, np.int64), np.empty((0, DIM), np.float32), record)
            if what == "record":
                database._engine.write({"default": ([b"hps-server/load/" + TAG.encode()], [b"?"])}, {}, "damaging")
    with pytest.raises(DatabaseError, match=f"{re.escape(LOAD_ADVICE)}"):
        hps.HPS(configuration)
    arguments = re.findall("`hps (.*)`", LOAD_ADVICE)[0].replace("CONFIG", str(path)).split()
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    with hps.HPS(configuration) as server:
        assert served(server) == FILES


def test_keys_of_4_bytes_are_refused_before_a_database_loses_what_it_has(
    source: str, tmp_path: Path, persistent: Persistent
) -> None:
    """Their files fit half the rows of twice the width."""
    load_table(TABLE, source, [persistent])
    (narrow := tmp_path / "narrow").mkdir()
    (narrow / "key").write_bytes(np.arange(ROWS, dtype=np.int32).tobytes())
    (narrow / "emb_vector").write_bytes(np.ones((ROWS, DIM // 2), np.float32).tobytes())
    for databases in ([persistent], []):
        with pytest.raises(ModelFileError, match=r"keys that are int32.*--format int32_keys"):
            load_table(TABLE, str(narrow), databases)
    assert held(persistent) == FILES
