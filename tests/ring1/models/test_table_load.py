"""Model files into databases: what is read, skipped, continued, replaced or copied, and what a failure leaves behind."""

import logging
import mmap
import os
import threading
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from hps.databases.base import Database, LoadRecord, TableStats
from hps.databases.hash_map.database import HashMapDatabase
from hps.databases.hash_map.layout import DENSE_ROWS
from hps.databases.rocks_db.database import RocksDatabase
from hps.errors import DatabaseError, ModelFileChangedError, ModelFileError, ModelFileNotFoundError, TableWidthError
from hps.models.files import open_sparse_model
from hps.models.sample import sample_vectors
from hps.models.table_load import DatabaseLoad
from hps.models.writer import write_sparse_model
from hps.testing.waiting import wait_until
from hps.types import FloatArray, KeyArray
from tests.fakes.gated_file_system import gates
from tests.fakes.memory_database import MemoryDatabase, PersistentMemoryDatabase
from tests.tables.hash_map_inspection import inspect
from tests.tables.table_loads import (
    CHUNK_ROWS,
    DIM,
    FILES,
    KEYS,
    NEW_KEY,
    ROW_BYTES,
    ROWS,
    TABLE,
    TAG,
    VECTORS,
    Events,
    content,
    failing_at,
    held,
    load_table,
    nothing_to_do,
    readers,
    record_of,
    rows_of,
    update,
)

pytestmark = pytest.mark.usefixtures("small_chunks")


class BoundedMemory(MemoryDatabase):
    """A volatile database that says where it evicts, and does not."""

    kind = "bounded_memory"

    def __init__(self, capacity_rows: int) -> None:
        super().__init__()
        self.capacity_rows = capacity_rows

    def stats(self, tag: str) -> TableStats:
        rows = self.size(tag)
        return TableStats(rows, rows * DIM * 4, -1, self.capacity_rows)


def test_every_database_gets_every_row_bit_for_bit_in_one_pass_over_the_files(source: str) -> None:
    volatile, persistent, progress = MemoryDatabase(), PersistentMemoryDatabase(), Events()
    with gates("counted") as (gate,):
        report = load_table(TABLE, f"gate://counted{source}", [volatile, persistent], progress=progress)
    assert gate.bytes_read == {"key": 8 * ROWS, "emb_vector": 4 * DIM * ROWS}
    assert held(volatile) == held(persistent) == FILES
    assert report.loads == (DatabaseLoad("memory", 0, ROWS), DatabaseLoad("persistent_memory", 0, ROWS))
    assert (report.tag, report.model.rows, nothing_to_do(report)) == (TAG, ROWS, False)
    record = record_of(persistent)
    assert (record.fingerprint, record.rows_done, record.complete) == (report.model.fingerprint, ROWS, True)
    assert (record.source, record.size_bytes, len(record.checksum)) == (f"gate://counted{source}", ROWS * ROW_BYTES, 16)
    assert progress.told[0] == ("start", TAG, ROWS, ROWS * ROW_BYTES)
    assert progress.told[-1] == ("finish", TAG)
    assert progress.advanced == ROWS


def test_chunks_come_in_order_and_the_end_is_announced_once(source: str) -> None:
    persistent = PersistentMemoryDatabase()
    load_table(TABLE, source, [persistent])
    chunks = [("load_chunk", CHUNK_ROWS)] * (ROWS // CHUNK_ROWS) + [("load_chunk", ROWS % CHUNK_ROWS)]
    assert persistent.told == [("load_chunk", 0), *chunks, ("finish_load", ROWS)]


def test_a_table_is_known_to_be_incomplete_before_its_first_row(source: str) -> None:
    """Killed there, after the old version was dropped, it would else be taken for a whole table of no rows."""
    persistent = PersistentMemoryDatabase()
    persistent.open_table(TAG, DIM)
    persistent.records[TAG] = LoadRecord("another version", ROWS, ROWS)
    seen = []
    persistent.before_chunk = lambda row: seen.append((row, persistent.size(TAG), persistent.load_record(TAG)))
    load_table(TABLE, source, [persistent])
    (_, _, before), (row, rows, record) = seen[:2]
    assert before is None
    assert (row, rows) == (0, 0)
    assert record is not None
    assert (record.rows_done, record.complete, record.source) == (0, False, source)


def test_the_last_of_a_key_that_stands_twice_is_kept(tmp_path: Path) -> None:
    keys, vectors = rows_of(ROWS)
    keys[700:] = keys[:300]
    write_sparse_model(tmp_path / "m", (keys, vectors))
    volatile, persistent = MemoryDatabase(), PersistentMemoryDatabase()
    load_table(TABLE, str(tmp_path / "m"), [volatile, persistent])
    assert held(volatile) == held(persistent) == content(keys, vectors)


def test_memory_is_bounded_whatever_the_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """16 chunks of 1 MB pass through; three buffers and little else may be held."""
    monkeypatch.setattr("hps.models.files.CHUNK_BYTES", 1 << 20)
    rows = 16 * (1 << 20) // (8 + 4 * DIM)
    (tmp_path / "key").write_bytes(b"\0" * 8 * rows)
    (tmp_path / "emb_vector").write_bytes(b"\0" * 4 * DIM * rows)

    class Sink(PersistentMemoryDatabase):
        def load_chunk(self, tag: str, keys: KeyArray, vectors: FloatArray, record: LoadRecord) -> None: ...

    tracemalloc.start()
    try:
        load_table(TABLE, str(tmp_path), [Sink()])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (2 << 20) < peak < (4 << 20)


def test_a_whole_table_is_skipped(source: str) -> None:
    persistent = PersistentMemoryDatabase()
    load_table(TABLE, source, [persistent])
    persistent.told.clear()
    progress = Events()
    report = load_table(TABLE, source, [persistent], progress=progress)
    assert nothing_to_do(report)
    assert report.loads == (DatabaseLoad("persistent_memory", ROWS, ROWS),)
    assert persistent.told == []
    assert progress.told == []


def test_only_the_volatile_database_is_fed_when_the_persistent_one_is_whole(source: str) -> None:
    persistent = PersistentMemoryDatabase()
    load_table(TABLE, source, [persistent])
    persistent.told.clear()
    volatile, progress = MemoryDatabase(), Events()
    report = load_table(TABLE, source, [volatile, persistent], progress=progress)
    assert not nothing_to_do(report)
    assert held(volatile) == FILES
    assert persistent.told == []
    assert progress.advanced == ROWS


@pytest.mark.parametrize("beside", [False, True])
def test_an_interrupted_load_continues_where_it_ended(source: str, beside: bool) -> None:
    """Only what is missing is read and reported, unless another database needs the rows before it."""
    persistent, volatile, progress = PersistentMemoryDatabase(), MemoryDatabase(), Events()
    persistent.open_table(TAG, DIM)
    record = LoadRecord(open_sparse_model(source, DIM).fingerprint, 300, ROWS)
    persistent.load_chunk(TAG, KEYS[:300], VECTORS[:300], record)
    persistent.told.clear()
    report = load_table(TABLE, source, [persistent, volatile][: 1 + beside], progress=progress)
    assert held(persistent) == FILES
    assert held(volatile) == (FILES if beside else {})
    assert report.loads[0] == DatabaseLoad("persistent_memory", 300, ROWS)
    assert sum(persistent.chunks) == ROWS - 300
    rows = ROWS if beside else ROWS - 300
    assert progress.told[0] == ("start", TAG, rows, rows * ROW_BYTES)
    assert progress.advanced == rows


def test_another_version_of_the_model_replaces_all_rows(source: str) -> None:
    persistent = PersistentMemoryDatabase()
    load_table(TABLE, source, [persistent])
    write_sparse_model(source, rows_of(ROWS // 2, seed=2), overwrite=True)
    load_table(TABLE, source, [persistent])
    assert held(persistent) == content(*rows_of(ROWS // 2, seed=2))
    assert persistent.told.count(("drop_table", 0)) == 1


@pytest.mark.parametrize(
    ("rows_done", "rows_total", "modified"),
    [(-1, ROWS, False), (ROWS + 1, ROWS, False), (10**12, 10**12, False), (300, ROWS, True)],
)
def test_a_record_that_cannot_be_is_not_believed(source: str, rows_done: int, rows_total: int, modified: bool) -> None:
    persistent, volatile = PersistentMemoryDatabase(), MemoryDatabase()
    persistent.open_table(TAG, DIM)
    persistent.insert(TAG, rows_of(ROWS)[0][:100], np.zeros((100, DIM), np.float32))
    persistent.records[TAG] = LoadRecord(open_sparse_model(source, DIM).fingerprint, rows_done, rows_total, modified)
    load_table(TABLE, source, [volatile, persistent])
    assert held(volatile) == held(persistent) == FILES


def test_rows_that_hugectr_wrote_stay_and_are_overwritten_by_key(source: str) -> None:
    keys, vectors = rows_of(ROWS)
    foreign = np.array([10**15, int(keys[5])], np.int64)
    persistent = PersistentMemoryDatabase()
    persistent.open_table(TAG, DIM)
    persistent.insert(TAG, foreign, sample_vectors(foreign, DIM, 99))
    load_table(TABLE, source, [persistent])
    assert held(persistent) == content(foreign[:1], sample_vectors(foreign[:1], DIM, 99)) | content(keys, vectors)
    assert ("drop_table", 0) not in persistent.told


def test_a_table_of_another_width_is_an_error_and_stays(source: str) -> None:
    persistent = PersistentMemoryDatabase()
    persistent.open_table(TAG, DIM + 1)
    persistent.insert(TAG, np.arange(5), np.ones((5, DIM + 1), np.float32))
    with pytest.raises(TableWidthError):
        load_table(TABLE, source, [persistent])
    assert persistent.size(TAG) == 5


def test_a_database_to_keep_is_opened_and_not_loaded(source: str) -> None:
    volatile, persistent = MemoryDatabase(), PersistentMemoryDatabase()
    report = load_table(TABLE, source, [persistent], keep=[volatile])
    assert held(volatile) == {}
    assert report.loads == (DatabaseLoad("persistent_memory", 0, ROWS),)
    write_sparse_model(source, rows_of(ROWS // 2, seed=2), overwrite=True)
    load_table(TABLE, source, [MemoryDatabase()], keep=[persistent])
    assert held(persistent) == FILES  # of another version


def test_a_half_loaded_table_is_not_kept_for_whole(source: str) -> None:
    persistent, volatile = PersistentMemoryDatabase(), MemoryDatabase()
    persistent.open_table(TAG, DIM)
    persistent.records[TAG] = LoadRecord("of an earlier load", 300, ROWS)
    with pytest.raises(DatabaseError, match=rf"(?s){TAG} in persistent_memory .*holds 300 of {ROWS} rows.*`hps load`"):
        load_table(TABLE, source, [volatile], keep=[persistent])
    assert volatile.tags() == []


@pytest.mark.parametrize(
    ("capacity", "rate", "expected"),
    [
        *((2**64 - 1, 0.5, ROWS // 2), (2**64 - 1, 0.0, 0), (ROWS, 1.0, ROWS), (ROWS - 1, 1.0, ROWS - 1)),
        *((200, 0.25, 50), (0, 1.0, 0)),
    ],
)
def test_a_volatile_database_gets_its_share_and_the_persistent_one_all(
    source: str, capacity: int, rate: float, expected: int
) -> None:
    volatile, persistent, progress = BoundedMemory(capacity), PersistentMemoryDatabase(), Events()
    report = load_table(TABLE, source, [volatile, persistent], initial_cache_rate=rate)
    assert held(volatile) == content(KEYS[:expected], VECTORS[:expected])
    assert held(persistent) == FILES
    assert report.loads[0] == DatabaseLoad("bounded_memory", 0, expected)
    load_table(TABLE, source, [BoundedMemory(capacity)], initial_cache_rate=rate, progress=progress)
    assert progress.advanced == expected  # no more is read than it gets


def test_a_hash_map_with_a_margin_and_rocksdb_get_theirs(source: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    volatile = HashMapDatabase(num_partitions=4, overflow_margin=100)
    persistent = RocksDatabase(tmp_path / "rocksdb")
    try:
        report = load_table(TABLE, source, [volatile, persistent], initial_cache_rate=0.5)
        assert report.loads == (DatabaseLoad("hash_map", 0, 200), DatabaseLoad("rocks_db", 0, ROWS))
        assert held(volatile) == content(KEYS[:200], VECTORS[:200])
        assert held(persistent) == FILES
        assert nothing_to_do(load_table(TABLE, source, [persistent]))
    finally:
        volatile.close()
        persistent.close()
    assert "cached 200 / 1000 embeddings in volatile database (hash_map); load: 200 / 400 (50.00%)." in caplog.text


def dense_rows_of(database: HashMapDatabase, tag: str = TAG) -> int:
    inspect(database, tag)  # which checks where the rows of dense keys are
    return int(database._tables[tag]._buckets.layout[DENSE_ROWS])


@pytest.mark.parametrize(
    ("keys", "rate", "rows"),
    [
        (np.arange(ROWS), 1.0, ROWS),
        (np.random.default_rng(1).permutation(ROWS), 1.0, ROWS),
        (np.random.default_rng(1).permutation(ROWS), 0.5, 0),  # half of them are no dense ones
        (np.arange(ROWS), 0.5, ROWS // 2),
        (np.arange(1, ROWS + 1), 1.0, ROWS + 1),
        (np.concatenate([np.arange(ROWS - 100), np.arange(100)]), 1.0, ROWS - 100),
        (np.append(np.arange(ROWS - 2), [-1, 10**15]), 1.0, ROWS - 2),
        (KEYS, 1.0, 0),
    ],
)
def test_a_hash_map_is_dense_if_the_keys_of_the_files_are(keys: KeyArray, rate: float, rows: int, tmp_path: Path) -> None:
    write_sparse_model(tmp_path / "m", (keys, VECTORS))
    database, persistent = HashMapDatabase(), PersistentMemoryDatabase()
    with gates("counted") as (gate,):
        load_table(
            TABLE, f"gate://counted{tmp_path}/m", [database, *([persistent] if rate == 1 else [])], initial_cache_rate=rate
        )
    loaded = round(ROWS * rate)
    assert held(database) == content(keys[:loaded], VECTORS[:loaded])
    assert dense_rows_of(database) == rows
    if keys is KEYS:
        assert gate.bytes_read["key"] == 8 * ROWS + CHUNK_ROWS * ROW_BYTES  # a chunk tells
    database.close()


def test_a_dense_hash_map_gets_what_was_updated_online(tmp_path: Path) -> None:
    write_sparse_model(tmp_path / "m", (np.arange(ROWS), VECTORS))
    persistent, database = PersistentMemoryDatabase(), HashMapDatabase()
    load_table(TABLE, str(tmp_path / "m"), [persistent])
    persistent.insert(TAG, NEW_KEY, VECTORS[:1])
    persistent.delete(TAG, np.array([3, 5]))
    assert load_table(TABLE, str(tmp_path / "m"), [database, persistent]).differs
    assert held(database) == held(persistent)
    assert dense_rows_of(database) == ROWS
    database.close()


def test_a_load_of_a_dense_hash_map_that_is_stopped_is_completed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_sparse_model(tmp_path / "m", (np.arange(ROWS), VECTORS))
    database = HashMapDatabase()
    monkeypatch.setattr(database, "load_bytes", 100 * ROW_BYTES)
    load_chunk = database.load_chunk

    def stopped(tag: str, keys: KeyArray, vectors: FloatArray, record: LoadRecord) -> None:
        if keys[0] > ROWS // 2:
            raise KeyboardInterrupt
        load_chunk(tag, keys, vectors, record)

    for _ in range(2):
        with monkeypatch.context() as patched:
            patched.setattr(database, "load_chunk", stopped)
            with pytest.raises(KeyboardInterrupt):
                load_table(TABLE, str(tmp_path / "m"), [database])
        assert 0 < database.size(TAG) < ROWS
        assert dense_rows_of(database) == ROWS
    database.delete(TAG, np.arange(0, ROWS, 3))
    load_table(TABLE, str(tmp_path / "m"), [database])
    assert held(database) == content(np.arange(ROWS), VECTORS)
    assert dense_rows_of(database) == ROWS
    database.close()


def test_a_volatile_database_gets_the_files_or_what_was_updated_online(source: str) -> None:
    persistent, volatile, share = PersistentMemoryDatabase(), MemoryDatabase(), MemoryDatabase()
    load_table(TABLE, source, [persistent])
    for databases, keep in (([volatile, persistent], []), ([volatile], [persistent])):
        assert not load_table(TABLE, source, databases, keep=keep).differs
        assert held(volatile) == FILES
    updated, volatile = update(persistent), MemoryDatabase()
    assert load_table(TABLE, source, [volatile, persistent]).differs
    assert held(volatile) == held(persistent) == updated
    load_table(TABLE, source, [share, persistent], initial_cache_rate=0.5)
    assert share.size(TAG) == ROWS // 2
    assert held(share).items() <= updated.items()


def test_a_database_that_is_kept_is_the_authority_whatever_the_files_say(source: str) -> None:
    kept, volatile = PersistentMemoryDatabase(), MemoryDatabase()
    kept.open_table(TAG, DIM)
    kept.insert(TAG, KEYS[:1], VECTORS[5:6])
    assert load_table(TABLE, source, [volatile], keep=[kept]).differs
    assert held(volatile) == content(KEYS[:1], VECTORS[5:6])
    kept.records[TAG] = LoadRecord("another version", ROWS, ROWS)
    assert load_table(TABLE, source, [], keep=[kept]).differs


def test_a_new_version_of_the_files_replaces_online_updates(source: str) -> None:
    persistent, volatile = PersistentMemoryDatabase(), MemoryDatabase()
    load_table(TABLE, source, [persistent])
    update(persistent)
    write_sparse_model(source, (KEYS, -VECTORS), overwrite=True)
    assert not load_table(TABLE, source, [volatile, persistent]).differs
    assert held(volatile) == held(persistent) == content(KEYS, -VECTORS)


def test_a_load_that_is_stopped_anywhere_is_completed_by_the_next(source: str) -> None:
    for stop in (0, CHUNK_ROWS, 7 * CHUNK_ROWS, ROWS // CHUNK_ROWS * CHUNK_ROWS):
        error: BaseException = KeyboardInterrupt() if stop > CHUNK_ROWS else DatabaseError("disk full")
        volatile, persistent = MemoryDatabase(), PersistentMemoryDatabase()
        persistent.before_chunk = failing_at(stop, error)
        with pytest.raises(type(error)):
            load_table(TABLE, source, [volatile, persistent])
        assert readers() == []
        if stop:
            assert (record_of(persistent).rows_done, record_of(persistent).complete) == (stop, False)
        persistent.before_chunk = lambda row: None
        persistent.told.clear()
        load_table(TABLE, source, [volatile, persistent])
        assert held(volatile) == held(persistent) == FILES
        assert sum(persistent.chunks) == ROWS - stop
        assert nothing_to_do(load_table(TABLE, source, [persistent]))


def test_a_model_replaced_while_loading_is_never_taken_for_whole(source: str) -> None:
    persistent = PersistentMemoryDatabase()

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
        self.path, self.how = Path(source) / "emb_vector", how
        written_ns = self.path.stat().st_ctime_ns  # a write within one tick of the clock has no time of its own
        wait_until(lambda: time.time_ns() > written_ns + 20_000_000, "the clock of the file system has gone on")
        self.file = self.path.open("r+b") if how == "mapped" else None
        self.map = mmap.mmap(self.file.fileno(), 0) if self.file else None
        if self.map:
            for place in (0, -1):
                self.map[place] = self.map[place]  # later stores to these pages do not change the file's times

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
        for one in (self.map, self.file):
            if one:
                one.close()


@pytest.mark.parametrize(
    ("how", "make"), [("mapped", PersistentMemoryDatabase), ("mapped", HashMapDatabase), ("time put back", MemoryDatabase)]
)
def test_files_that_are_written_in_place_during_a_load_are_never_mixed(source: str, how: str, make: type[Database]) -> None:
    database, writing = make(), Writing(source, how)
    try:
        with pytest.raises(ModelFileChangedError):
            load_table(TABLE, source, [database], progress=writing)
    finally:
        writing.close()
    if how == "mapped":
        assert held(database) == {}
    if isinstance(database, PersistentMemoryDatabase):
        record = database.load_record(TAG)
        assert record is None or not record.complete
    load_table(TABLE, source, [database])
    changed = np.fromfile(Path(source) / "emb_vector", np.float32).reshape(-1, DIM)
    assert held(database) == content(KEYS, changed)


def test_files_that_somebody_has_mapped_and_leaves_alone_are_loaded(source: str) -> None:
    writing = Writing(source, "mapped")
    try:
        volatile, persistent = MemoryDatabase(), PersistentMemoryDatabase()
        load_table(TABLE, source, [volatile, persistent])
        assert held(volatile) == held(persistent) == FILES
        writing.map[0] ^= 1  # type: ignore[index]
        fresh = MemoryDatabase()
        assert load_table(TABLE, source, [fresh, persistent]).differs  # what is in the files now is not what was loaded
        assert held(fresh) == FILES
    finally:
        writing.close()


def test_files_that_do_not_fit_leave_the_databases_alone(source: str) -> None:
    persistent = PersistentMemoryDatabase()
    load_table(TABLE, source, [persistent])
    with open(Path(source) / "emb_vector", "ab") as file:
        file.write(b"x")
    with pytest.raises(ModelFileError, match="emb_vector"):
        load_table(TABLE, source, [persistent])
    (Path(source) / "emb_vector").unlink()
    with pytest.raises(ModelFileNotFoundError, match="emb_vector"):
        load_table(TABLE, source, [persistent])
    assert held(persistent) == FILES


def test_keys_beyond_32_bits_are_found_before_the_old_version_is_dropped(source: str, tmp_path: Path) -> None:
    keys = np.arange(ROWS, dtype=np.int64)
    persistent = PersistentMemoryDatabase()
    write_sparse_model(tmp_path / "m", (keys, rows_of(ROWS)[1]))
    load_table(TABLE, str(tmp_path / "m"), [persistent], int32_keys=True)
    before = held(persistent)
    keys = np.append(keys, 2**32)  # one row more: the files are not compared with what is there
    write_sparse_model(tmp_path / "m", (keys, rows_of(ROWS + 1)[1]), overwrite=True)
    with pytest.raises(ModelFileError, match=f"row {ROWS} has key {2**32}"):
        load_table(TABLE, str(tmp_path / "m"), [persistent], int32_keys=True)
    assert held(persistent) == before


def test_a_read_that_never_ends_is_given_up(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hps.models.read_ahead._READ_TIMEOUT_S", 0.05)
    with gates("stuck") as (gate,):
        gate.hold_from = 0
        with pytest.raises(ModelFileError, match=r"rows from 0 on did not arrive within"):
            load_table(TABLE, f"gate://stuck{source}", [MemoryDatabase()])
    for thread in threading.enumerate():
        if thread.name.startswith("hps-model-reader"):
            thread.join(30)


def test_hugectrs_log_lines_are_kept(source: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    load_table(TABLE, source, [BoundedMemory(4000), MemoryDatabase(), PersistentMemoryDatabase()])
    assert [record.getMessage() for record in caplog.records] == [
        f"Table: {TAG}; cached 1000 / 1000 embeddings in volatile database (bounded_memory); load: 1000 / 4000 (25.00%).",
        f"Table: {TAG}; cached 1000 / 1000 embeddings in volatile database (memory); load: 1000, unbounded.",
        f"Table: {TAG}; cached 1000 embeddings in persistent database (persistent_memory); complete.",
    ]
