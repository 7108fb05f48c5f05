"""Model files into databases and caches: what is read, skipped, continued, replaced, and what a failure leaves behind."""

import logging
import os
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hps.cache.cpu.cache import NumpyCache
from hps.databases.base import Database, LoadRecord, PersistentDatabase, TableStats
from hps.databases.hash_map.database import HashMapDatabase
from hps.databases.rocks_db.database import RocksDatabase
from hps.errors import DatabaseError, ModelFileError, ModelFileNotFoundError, TableWidthError
from hps.filesystems.base import FileStatus
from hps.filesystems.local import LocalFileSystem
from hps.lookup.chain import DatabaseChain
from hps.lookup.refresh import RefreshReport, refresh
from hps.metrics import Metrics
from hps.models.files import open_sparse_model
from hps.models.sample import sample_vectors
from hps.models.table_load import DatabaseLoad
from hps.models.warm_up import warm_up
from hps.models.writer import write_sparse_model
from hps.registry import IMPLEMENTATIONS
from hps.tensors.segments import Segment
from hps.types import FloatArray, KeyArray, TableSpec
from tests.faulty_database import FaultyDatabase
from tests.memory_database import MemoryDatabase
from tests.table_loads import load_table, nothing_to_do

DIM = 4
ROWS = 1000
CHUNK_ROWS = 64
TABLE = TableSpec("shop", "item", DIM, 0.0, 10_000)
TAG = TABLE.tag


class PersistentMemory(MemoryDatabase, PersistentDatabase):
    """A memory database that remembers its loads, as a persistent one does; and what it was told, in order."""

    kind = "persistent_memory"

    def __init__(self) -> None:
        super().__init__()
        self.records: dict[str, LoadRecord] = {}
        self.told: list[tuple[str, int]] = []
        self.before_chunk: Callable[[int], None] = lambda row: None

    def load_record(self, tag: str) -> LoadRecord | None:
        return self.records.get(tag)

    def load_chunk(self, tag: str, keys: KeyArray, vectors: FloatArray, record: LoadRecord) -> None:
        self.before_chunk(record.rows_done - keys.size)
        self.insert(tag, keys, vectors)
        self.told.append(("load_chunk", keys.size))
        self.records[tag] = record

    def finish_load(self, tag: str) -> None:
        self.told.append(("finish_load", self.size(tag)))

    def drop_table(self, tag: str) -> None:
        super().drop_table(tag)
        self.records.pop(tag, None)
        self.told.append(("drop_table", 0))


class BoundedMemory(MemoryDatabase):
    """A volatile database that says where it evicts, and does not."""

    kind = "bounded_memory"

    def __init__(self, capacity_rows: int) -> None:
        super().__init__()
        self.capacity_rows = capacity_rows

    def stats(self, tag: str) -> TableStats:
        rows = self.size(tag)
        return TableStats(rows, rows * DIM * 4, -1, self.capacity_rows)


class Events:
    """A progress that remembers what it is told."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []

    def start(self, tag: str, rows: int, size_bytes: int) -> None:
        self.events.append(("start", tag, rows, size_bytes))

    def advance(self, tag: str, rows: int) -> None:
        self.events.append(("advance", tag, rows))

    def finish(self, tag: str) -> None:
        self.events.append(("finish", tag))

    @property
    def advanced(self) -> int:
        return sum(event[2] for event in self.events if event[0] == "advance")


def rows_of(n: int, seed: int = 1) -> tuple[KeyArray, FloatArray]:
    keys = np.random.default_rng(seed).permutation(np.arange(n, dtype=np.int64)) * 1_000_003 - 7
    return keys, sample_vectors(keys, DIM, seed)


def held(database: Database) -> dict[int, bytes]:
    database.open_table(TAG, DIM)
    return {int(k): v.tobytes() for ks, vs in database.scan(TAG, 100) for k, v in zip(ks, vs, strict=True)}


def content(keys: KeyArray, vectors: FloatArray) -> dict[int, bytes]:
    return {int(key): row.tobytes() for key, row in zip(keys, vectors, strict=True)}


def readers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("hps-model-reader")]


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Many chunks of few rows; and no reader may be left when a test ends."""
    monkeypatch.setattr("hps.models.files.CHUNK_BYTES", CHUNK_ROWS * (8 + 4 * DIM))
    monkeypatch.setattr("hps.lookup.refresh._CHUNK_BYTES", CHUNK_ROWS * (8 + 4 * DIM))
    monkeypatch.setattr("hps.models.table_load.CHUNK_BYTES", CHUNK_ROWS * (8 + 4 * DIM))
    yield
    assert readers() == []


@pytest.fixture
def source(tmp_path: Path) -> str:
    """A model of ROWS rows."""
    write_sparse_model(tmp_path / "item", rows_of(ROWS))
    return str(tmp_path / "item")


# -- a whole load -----------------------------------------------------------------------------------------------------


def test_every_database_gets_every_row_bit_for_bit(source: str) -> None:
    volatile, persistent = MemoryDatabase(), PersistentMemory()
    report = load_table(TABLE, source, [volatile, persistent])
    assert held(volatile) == held(persistent) == content(*rows_of(ROWS))
    assert report.loads == (DatabaseLoad("memory", 0, ROWS), DatabaseLoad("persistent_memory", 0, ROWS))
    assert (report.tag, report.model.rows, nothing_to_do(report)) == (TAG, ROWS, False)
    record = persistent.load_record(TAG)
    assert record is not None
    assert (record.fingerprint, record.rows_done, record.complete) == (report.model.fingerprint, ROWS, True)
    assert (record.source, record.size_bytes, len(record.checksum)) == (source, ROWS * (8 + 4 * DIM), 16)


def test_chunks_come_in_order_and_the_end_is_announced_once(source: str) -> None:
    persistent = PersistentMemory()
    load_table(TABLE, source, [persistent])
    chunks = [("load_chunk", CHUNK_ROWS)] * (ROWS // CHUNK_ROWS) + [("load_chunk", ROWS % CHUNK_ROWS)]
    assert persistent.told == [("load_chunk", 0), *chunks, ("finish_load", ROWS)]


def test_a_table_is_known_to_be_incomplete_before_its_first_row(source: str) -> None:
    """Killed there, after the old version was dropped, it would else be taken for a whole table of no rows."""
    persistent = PersistentMemory()
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


def test_progress_counts_every_row_once(source: str) -> None:
    progress = Events()
    load_table(TABLE, source, [MemoryDatabase(), PersistentMemory()], progress=progress)
    assert progress.events[0] == ("start", TAG, ROWS, ROWS * (8 + 4 * DIM))
    assert progress.events[-1] == ("finish", TAG)
    assert progress.advanced == ROWS


class CountingFileSystem(LocalFileSystem):
    """Counts the bytes that are read; its scheme is `count:`."""

    read: dict[str, int] = {}  # noqa: RUF012 - one for all, since each opening makes a file system

    def _path(self, path: str) -> str:
        return path.removeprefix("count://")

    def read_into(self, path: str, offset: int, buffer: memoryview, version: str = "") -> None:
        name = os.path.basename(path)
        self.read[name] = self.read.get(name, 0) + len(buffer)
        super().read_into(self._path(path), offset, buffer, version)

    def status(self, path: str) -> FileStatus:
        return super().status(self._path(path))

    def exists(self, path: str) -> bool:
        return super().exists(self._path(path))


def test_two_databases_are_loaded_in_one_pass_over_the_files(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(IMPLEMENTATIONS["filesystem"], "count", (f"{__name__}:CountingFileSystem", ""))
    monkeypatch.setattr(CountingFileSystem, "read", {})
    volatile, persistent = MemoryDatabase(), PersistentMemory()
    load_table(TABLE, f"count://{source}", [volatile, persistent])
    assert CountingFileSystem.read == {"key": 8 * ROWS, "emb_vector": 4 * DIM * ROWS}
    assert held(volatile) == held(persistent) == content(*rows_of(ROWS))


def test_the_last_of_a_key_that_stands_twice_is_kept(tmp_path: Path) -> None:
    keys, vectors = rows_of(ROWS)
    keys[700:] = keys[:300]
    write_sparse_model(tmp_path / "m", (keys, vectors))
    volatile, persistent = MemoryDatabase(), PersistentMemory()
    load_table(TABLE, str(tmp_path / "m"), [volatile, persistent])
    assert held(volatile) == held(persistent) == content(keys, vectors)


def test_memory_is_bounded_whatever_the_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 chunks of 1 MB pass through; three buffers and little else may be held."""
    monkeypatch.setattr("hps.models.files.CHUNK_BYTES", 1 << 20)
    rows = 64 * (1 << 20) // (8 + 4 * DIM)
    (tmp_path / "key").write_bytes(b"\0" * 8 * rows)
    (tmp_path / "emb_vector").write_bytes(b"\0" * 4 * DIM * rows)

    class Sink(PersistentMemory):
        def insert(self, tag: str, keys: KeyArray, vectors: FloatArray) -> None: ...

    tracemalloc.start()
    try:
        load_table(TABLE, str(tmp_path), [Sink()])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (2 << 20) < peak < (4 << 20)


# -- what is already there --------------------------------------------------------------------------------------------


def test_a_whole_table_is_skipped(source: str) -> None:
    persistent = PersistentMemory()
    load_table(TABLE, source, [persistent])
    persistent.told.clear()
    progress = Events()
    report = load_table(TABLE, source, [persistent], progress=progress)
    assert nothing_to_do(report)
    assert report.loads == (DatabaseLoad("persistent_memory", ROWS, ROWS),)
    assert persistent.told == []
    assert progress.events == []


def test_only_the_volatile_database_is_fed_when_the_persistent_one_is_whole(source: str) -> None:
    persistent = PersistentMemory()
    load_table(TABLE, source, [persistent])
    persistent.told.clear()
    volatile, progress = MemoryDatabase(), Events()
    report = load_table(TABLE, source, [volatile, persistent], progress=progress)
    assert not nothing_to_do(report)
    assert held(volatile) == content(*rows_of(ROWS))
    assert persistent.told == []
    assert progress.advanced == ROWS


def test_an_interrupted_load_continues_where_it_ended(source: str) -> None:
    keys, vectors = rows_of(ROWS)
    persistent = PersistentMemory()
    persistent.open_table(TAG, DIM)
    record = LoadRecord(open_sparse_model(source, DIM).fingerprint, 300, ROWS)
    persistent.load_chunk(TAG, keys[:300], vectors[:300], record)
    persistent.told.clear()
    volatile, progress = MemoryDatabase(), Events()
    report = load_table(TABLE, source, [volatile, persistent], progress=progress)
    assert held(volatile) == held(persistent) == content(keys, vectors)
    assert report.loads == (DatabaseLoad("memory", 0, ROWS), DatabaseLoad("persistent_memory", 300, ROWS))
    assert sum(rows for told, rows in persistent.told if told == "load_chunk") == ROWS - 300
    assert progress.advanced == ROWS


def test_a_continued_load_reads_and_reports_only_what_is_missing(source: str) -> None:
    keys, vectors = rows_of(ROWS)
    persistent, progress = PersistentMemory(), Events()
    persistent.open_table(TAG, DIM)
    persistent.load_chunk(TAG, keys[:300], vectors[:300], LoadRecord(open_sparse_model(source, DIM).fingerprint, 300, ROWS))
    load_table(TABLE, source, [persistent], progress=progress)
    assert progress.events[0] == ("start", TAG, ROWS - 300, (ROWS - 300) * (8 + 4 * DIM))
    assert progress.advanced == ROWS - 300
    assert held(persistent) == content(keys, vectors)


def test_another_version_of_the_model_replaces_all_rows(source: str) -> None:
    persistent = PersistentMemory()
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
    persistent, volatile = PersistentMemory(), MemoryDatabase()
    persistent.open_table(TAG, DIM)
    persistent.insert(TAG, rows_of(ROWS)[0][:100], np.zeros((100, DIM), np.float32))
    persistent.records[TAG] = LoadRecord(open_sparse_model(source, DIM).fingerprint, rows_done, rows_total, modified)
    load_table(TABLE, source, [volatile, persistent])
    assert held(volatile) == held(persistent) == content(*rows_of(ROWS))


def test_rows_that_hugectr_wrote_stay_and_are_overwritten_by_key(source: str) -> None:
    keys, vectors = rows_of(ROWS)
    foreign = np.array([10**15, int(keys[5])], np.int64)
    persistent = PersistentMemory()
    persistent.open_table(TAG, DIM)
    persistent.insert(TAG, foreign, sample_vectors(foreign, DIM, 99))
    load_table(TABLE, source, [persistent])
    assert held(persistent) == content(foreign[:1], sample_vectors(foreign[:1], DIM, 99)) | content(keys, vectors)
    assert ("drop_table", 0) not in persistent.told


def test_a_table_of_another_width_is_an_error_and_stays(source: str) -> None:
    persistent = PersistentMemory()
    persistent.open_table(TAG, DIM + 1)
    persistent.insert(TAG, np.arange(5), np.ones((5, DIM + 1), np.float32))
    with pytest.raises(TableWidthError):
        load_table(TABLE, source, [persistent])
    assert persistent.size(TAG) == 5


# -- initialize_after_startup and initial_cache_rate --------------------------------------------------------------------


def test_a_database_to_keep_is_opened_and_not_loaded(source: str) -> None:
    volatile, persistent = MemoryDatabase(), PersistentMemory()
    report = load_table(TABLE, source, [persistent], keep=[volatile])
    assert held(volatile) == {}
    assert report.loads == (DatabaseLoad("persistent_memory", 0, ROWS),)


def test_a_whole_table_of_another_version_is_kept_when_asked_to(source: str) -> None:
    persistent = PersistentMemory()
    load_table(TABLE, source, [persistent])
    write_sparse_model(source, rows_of(ROWS // 2, seed=2), overwrite=True)
    load_table(TABLE, source, [MemoryDatabase()], keep=[persistent])
    assert held(persistent) == content(*rows_of(ROWS))


def test_a_half_loaded_table_is_not_kept_for_whole(source: str) -> None:
    persistent, volatile = PersistentMemory(), MemoryDatabase()
    persistent.open_table(TAG, DIM)
    persistent.records[TAG] = LoadRecord("of an earlier load", 300, ROWS)
    with pytest.raises(DatabaseError, match=rf"(?s){TAG} in persistent_memory .*holds 300 of {ROWS} rows.*`hps load`"):
        load_table(TABLE, source, [volatile], keep=[persistent])
    assert volatile.tags() == []


@pytest.mark.parametrize(
    ("capacity", "rate", "expected"),
    [
        (2**64 - 1, 1.0, ROWS),
        (2**64 - 1, 0.5, ROWS // 2),
        (2**64 - 1, 0.0, 0),
        (ROWS, 1.0, ROWS),
        (ROWS - 1, 1.0, ROWS - 1),
        (200, 1.0, 200),
        (200, 0.25, 50),
        (0, 1.0, 0),
    ],
)
def test_a_volatile_database_gets_its_share_and_the_persistent_one_all(
    source: str, capacity: int, rate: float, expected: int
) -> None:
    keys, vectors = rows_of(ROWS)
    volatile, persistent = BoundedMemory(capacity), PersistentMemory()
    report = load_table(TABLE, source, [volatile, persistent], initial_cache_rate=rate)
    assert held(volatile) == content(keys[:expected], vectors[:expected])
    assert held(persistent) == content(keys, vectors)
    assert report.loads[0] == DatabaseLoad("bounded_memory", 0, expected)


def test_no_more_is_read_than_a_bounded_database_gets(source: str) -> None:
    progress = Events()
    load_table(TABLE, source, [BoundedMemory(200)], progress=progress)
    assert progress.events[0] == ("start", TAG, 200, 200 * (8 + 4 * DIM))
    assert progress.advanced == 200


def test_a_hash_map_with_a_margin_and_rocksdb_get_theirs(source: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keys, vectors = rows_of(ROWS)
    caplog.set_level(logging.INFO)
    volatile = HashMapDatabase(num_partitions=4, overflow_margin=100)
    persistent = RocksDatabase(tmp_path / "rocksdb")
    try:
        report = load_table(TABLE, source, [volatile, persistent], initial_cache_rate=0.5)
        assert report.loads == (DatabaseLoad("hash_map", 0, 200), DatabaseLoad("rocks_db", 0, ROWS))
        assert held(volatile) == content(keys[:200], vectors[:200])
        assert held(persistent) == content(keys, vectors)
        assert nothing_to_do(load_table(TABLE, source, [persistent]))
    finally:
        volatile.close()
        persistent.close()
    assert "cached 200 / 1000 embeddings in volatile database (hash_map); load: 200 / 400 (50.00%)." in caplog.text


# -- failures ---------------------------------------------------------------------------------------------------------


def test_a_failing_database_ends_the_load_and_the_next_one_completes_it(source: str) -> None:
    volatile, persistent = MemoryDatabase(), PersistentMemory()

    def fail_at(row: int) -> None:
        if row >= 300:
            raise DatabaseError("disk full")

    persistent.before_chunk = fail_at
    with pytest.raises(DatabaseError, match="disk full"):
        load_table(TABLE, source, [volatile, persistent])
    assert readers() == []
    record = persistent.load_record(TAG)
    assert record is not None
    assert (record.rows_done, record.complete) == (5 * CHUNK_ROWS, False)
    persistent.before_chunk = lambda row: None
    persistent.told.clear()
    load_table(TABLE, source, [volatile, persistent])
    assert held(volatile) == held(persistent) == content(*rows_of(ROWS))
    assert sum(rows for told, rows in persistent.told if told == "load_chunk") == ROWS - 5 * CHUNK_ROWS


def test_a_load_that_is_stopped_anywhere_is_completed_by_the_next(source: str) -> None:
    for stop in range(0, ROWS + CHUNK_ROWS, CHUNK_ROWS):
        persistent = PersistentMemory()

        def interrupt(row: int, stop: int = stop) -> None:
            if row == stop:
                raise KeyboardInterrupt

        persistent.before_chunk = interrupt
        if stop < ROWS:
            with pytest.raises(KeyboardInterrupt):
                load_table(TABLE, source, [persistent])
            assert readers() == []
        persistent.before_chunk = lambda row: None
        load_table(TABLE, source, [persistent])
        assert held(persistent) == content(*rows_of(ROWS))
        assert nothing_to_do(load_table(TABLE, source, [persistent]))


def test_a_model_replaced_while_loading_is_never_taken_for_whole(source: str) -> None:
    persistent = PersistentMemory()

    def replace_at(row: int) -> None:
        if row == 5 * CHUNK_ROWS:
            write_sparse_model(source, rows_of(ROWS, seed=2), overwrite=True)

    persistent.before_chunk = replace_at
    with pytest.raises(ModelFileError, match=r"changed while it was being read"):
        load_table(TABLE, source, [persistent])
    record = persistent.load_record(TAG)
    assert record is not None
    assert not record.complete
    persistent.before_chunk = lambda row: None
    load_table(TABLE, source, [persistent])
    assert held(persistent) == content(*rows_of(ROWS, seed=2))


def test_files_that_do_not_fit_leave_the_databases_alone(source: str) -> None:
    persistent = PersistentMemory()
    load_table(TABLE, source, [persistent])
    with open(Path(source) / "emb_vector", "ab") as file:
        file.write(b"x")
    with pytest.raises(ModelFileError, match="emb_vector"):
        load_table(TABLE, source, [persistent])
    (Path(source) / "emb_vector").unlink()
    with pytest.raises(ModelFileNotFoundError, match="emb_vector"):
        load_table(TABLE, source, [persistent])
    assert held(persistent) == content(*rows_of(ROWS))


def test_keys_beyond_32_bits_are_found_before_the_old_version_is_dropped(source: str, tmp_path: Path) -> None:
    keys = np.arange(ROWS, dtype=np.int64)
    persistent = PersistentMemory()
    write_sparse_model(tmp_path / "m", (keys, rows_of(ROWS)[1]))
    load_table(TABLE, str(tmp_path / "m"), [persistent], int32_keys=True)
    before = held(persistent)
    keys[-1] = 2**32
    write_sparse_model(tmp_path / "m", (keys, rows_of(ROWS)[1]), overwrite=True)
    with pytest.raises(ModelFileError, match=f"row {ROWS - 1} has key {2**32}"):
        load_table(TABLE, str(tmp_path / "m"), [persistent], int32_keys=True)
    assert held(persistent) == before


def test_a_read_that_never_ends_is_given_up(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()

    class StuckFileSystem(LocalFileSystem):
        def read_into(self, path: str, offset: int, buffer: memoryview, version: str = "") -> None:
            gate.wait(20)
            super().read_into(path, offset, buffer, version)

    monkeypatch.setattr("hps.filesystems.local.LocalFileSystem", StuckFileSystem)
    monkeypatch.setattr("hps.models.read_ahead._READ_TIMEOUT_S", 0.05)
    try:
        with pytest.raises(ModelFileError, match=r"rows from 0 on did not arrive within"):
            load_table(TABLE, source, [MemoryDatabase()])
    finally:
        gate.set()
        for thread in threading.enumerate():
            if thread.name.startswith("hps-model-reader"):
                thread.join(10)


# -- log lines --------------------------------------------------------------------------------------------------------


def test_hugectrs_log_lines_are_kept(source: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    load_table(TABLE, source, [BoundedMemory(4000), MemoryDatabase(), PersistentMemory()])
    assert [record.getMessage() for record in caplog.records] == [
        f"Table: {TAG}; cached 1000 / 1000 embeddings in volatile database (bounded_memory); load: 1000 / 4000 (25.00%).",
        f"Table: {TAG}; cached 1000 / 1000 embeddings in volatile database (memory); load: 1000, unbounded.",
        f"Table: {TAG}; cached 1000 embeddings in persistent database (persistent_memory); complete.",
    ]


# -- warm-up ----------------------------------------------------------------------------------------------------------


def lookup(cache: NumpyCache, keys: KeyArray) -> tuple[FloatArray, np.ndarray]:
    out, found = np.empty((keys.size, DIM), np.float32), np.zeros(keys.size, np.bool_)
    cache.create_lookup().query([Segment(0, keys, out, found)])
    return out, found


class RecordingCache(NumpyCache):
    """Remembers the keys of every insertion."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.inserted: list[KeyArray] = []

    def insert(self, table: int, keys: KeyArray, vectors: FloatArray) -> None:
        self.inserted.append(keys.copy())
        super().insert(table, keys, vectors)


def assert_warm(cache: NumpyCache, keys: KeyArray, vectors: FloatArray, rows: int) -> None:
    out, found = lookup(cache, keys)
    np.testing.assert_array_equal(out[found], vectors[found])
    assert not found[rows:].any()
    assert found.sum() == cache.stats(0).resident_rows


@pytest.mark.parametrize("fraction", [0.01, 0.1, 0.2, 0.3, 0.5, 0.999, 1.0, 7.0])
@pytest.mark.parametrize("capacity", [14, 140, 700, 2000])
def test_the_whole_cache_is_filled_whatever_the_step(source: str, capacity: int, fraction: float) -> None:
    keys, vectors = rows_of(ROWS)
    cache = RecordingCache([TABLE], [capacity])
    rows = min(cache.stats(0).capacity_rows, ROWS)
    assert warm_up(cache, 0, TABLE, open_sparse_model(source, DIM), fraction) == rows
    np.testing.assert_array_equal(np.concatenate(cache.inserted), keys[:rows])
    assert max(inserted.size for inserted in cache.inserted) <= CHUNK_ROWS
    assert_warm(cache, keys, vectors, rows)


@pytest.mark.parametrize(("capacity", "fraction"), [(700, 0.0), (700, -1.0), (0, 0.5)])
def test_nothing_is_warmed_without_a_step_or_a_cache(source: str, capacity: int, fraction: float) -> None:
    cache = RecordingCache([TABLE], [capacity])
    assert warm_up(cache, 0, TABLE, open_sparse_model(source, DIM), fraction) == 0
    assert cache.inserted == []


def warm_up_lines(caplog: pytest.LogCaptureFixture, source: str, capacity: int, fraction: float) -> list[str]:
    caplog.set_level(logging.INFO)
    caplog.clear()
    warm_up(NumpyCache([TABLE], [capacity]), 0, TABLE, open_sparse_model(source, DIM), fraction)
    return [record.getMessage() for record in caplog.records]


def test_the_log_lines_of_hugectrs_warm_up_are_kept_the_last_step_included(
    source: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert warm_up_lines(caplog, source, 700, 0.3) == [
        'EC initialization for model: "shop", num_tables: 1',
        f"EC initialization on device: 0 for {TAG}",
        "Initialize the embedding cache by by inserting the same size model file with embedding cache from beginning",
        "Initialize the embedding table 0 for iteration 0 with number of 210 keys.",
        "Initialize the embedding table 0 for iteration 1 with number of 210 keys.",
        "Initialize the embedding table 0 for iteration 2 with number of 210 keys.",
        "Initialize the embedding table 0 for iteration 3 with number of 70 keys.",
    ]
    assert warm_up_lines(caplog, source, 700, 1.0)[3:] == [
        "Initialize the embedding table 0 for iteration 0 with number of 700 keys."
    ]
    assert warm_up_lines(caplog, source, 140, 1e-9)[3:] == [  # never a step of no rows
        "Initialize the embedding table 0 for iteration 0 with number of 64 keys.",
        "Initialize the embedding table 0 for iteration 1 with number of 64 keys.",
        "Initialize the embedding table 0 for iteration 2 with number of 12 keys.",
    ]


def test_a_warm_cache_agrees_with_the_databases_on_keys_that_stand_twice(tmp_path: Path) -> None:
    keys, vectors = rows_of(CHUNK_ROWS)
    keys[40:] = keys[:24]
    keys[10] = keys[11] = keys[12]
    write_sparse_model(tmp_path / "m", (keys, vectors))
    cache = NumpyCache([TABLE], [1400])
    warm_up(cache, 0, TABLE, open_sparse_model(tmp_path / "m", DIM), 1.0)
    distinct = np.unique(keys)
    out, found = lookup(cache, distinct)
    assert found.all()
    wanted = content(keys, vectors)
    assert content(distinct, out) == wanted


def test_a_warm_up_from_changed_files_fails(source: str) -> None:
    model = open_sparse_model(source, DIM)
    write_sparse_model(source, rows_of(ROWS, seed=2), overwrite=True)
    with pytest.raises(ModelFileError, match="changed"):
        warm_up(NumpyCache([TABLE], [700]), 0, TABLE, model, 0.5)


def test_a_cache_that_fails_ends_the_warm_up(source: str) -> None:
    class FailingCache(RecordingCache):
        def insert(self, table: int, keys: KeyArray, vectors: FloatArray) -> None:
            if len(self.inserted) == 3:
                raise RuntimeError("the device is gone")
            super().insert(table, keys, vectors)

    with pytest.raises(RuntimeError, match="the device is gone"):
        warm_up(FailingCache([TABLE], [700]), 0, TABLE, open_sparse_model(source, DIM), 0.5)
    assert readers() == []


# -- refresh ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def tiers() -> Iterator[tuple[NumpyCache, DatabaseChain, FaultyDatabase]]:
    """A cache of 500 of the rows, and a chain over a database that holds all of them."""
    keys, vectors = rows_of(ROWS)
    database = FaultyDatabase(MemoryDatabase())
    chain = DatabaseChain(None, database, metrics=Metrics())
    chain.open_table(TABLE)
    database.insert(TAG, keys, vectors)
    cache = NumpyCache([TABLE], [2000])
    cache.insert(0, keys[:500], vectors[:500])
    yield cache, chain, database
    chain.close()


@pytest.mark.parametrize("fraction", [0.0, 0.001, 0.1, 1.0])
def test_refresh_brings_new_vectors_and_erases_deleted_keys(
    tiers: tuple[NumpyCache, DatabaseChain, FaultyDatabase], fraction: float
) -> None:
    cache, chain, database = tiers
    keys, vectors = rows_of(ROWS)
    new = sample_vectors(keys, DIM, 9)
    database.insert(TAG, keys[:200], new[:200])
    database.delete(TAG, keys[450:])
    assert refresh(cache, 0, TABLE, chain, fraction) == RefreshReport(updated=450, erased=50)
    out, found = lookup(cache, keys)
    np.testing.assert_array_equal(found, np.arange(ROWS) < 450)
    np.testing.assert_array_equal(out[:200], new[:200])
    np.testing.assert_array_equal(out[200:450], vectors[200:450])
    assert max(fetched.size for fetched in database.fetched) <= CHUNK_ROWS


def test_refresh_of_an_empty_cache_asks_nothing(tiers: tuple[NumpyCache, DatabaseChain, FaultyDatabase]) -> None:
    _, chain, database = tiers
    assert refresh(NumpyCache([TABLE], [700]), 0, TABLE, chain, 0.5) == RefreshReport(0, 0)
    assert refresh(NumpyCache([TABLE], [0]), 0, TABLE, chain, 0.5) == RefreshReport(0, 0)
    assert database.fetched == []


def test_a_database_that_fails_erases_nothing(tiers: tuple[NumpyCache, DatabaseChain, FaultyDatabase]) -> None:
    cache, chain, database = tiers
    database.failing = {"fetch"}
    with pytest.raises(DatabaseError):
        refresh(cache, 0, TABLE, chain, 0.5)
    keys, vectors = rows_of(ROWS)
    out, found = lookup(cache, keys[:500])
    assert found.all()
    np.testing.assert_array_equal(out, vectors[:500])


def test_a_modification_during_a_refresh_is_not_undone(tiers: tuple[NumpyCache, DatabaseChain, FaultyDatabase]) -> None:
    """Between the fetch and the update of the cache, the vectors change in the database and in the cache."""
    cache, chain, database = tiers
    keys, _ = rows_of(ROWS)
    new = sample_vectors(keys, DIM, 9)
    database.gate_late = threading.Event()
    reports: list[RefreshReport] = []
    refreshing = threading.Thread(target=lambda: reports.append(refresh(cache, 0, TABLE, chain, 1.0)))
    refreshing.start()
    assert database.entered.acquire(timeout=10)  # the first chunk is fetched, not yet written
    try:
        chain.insert(TABLE, keys, new, lambda done: cache.update(0, keys[:500], new[:500]))
    finally:
        database.gate_late.set()
        refreshing.join(20)
    assert reports == [RefreshReport(updated=500, erased=0)]
    out, found = lookup(cache, keys[:500])
    assert found.all()
    np.testing.assert_array_equal(out, new[:500])


def test_a_table_that_never_rests_is_erased_rather_than_left_old(
    tiers: tuple[NumpyCache, DatabaseChain, FaultyDatabase], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, chain, _ = tiers
    keys, vectors = rows_of(ROWS)
    fetch = chain.fetch

    def modified_meanwhile(*args: Any) -> int:
        count = fetch(*args)
        chain.insert(TABLE, keys[:1], vectors[:1], lambda done: None)
        return count

    monkeypatch.setattr(chain, "fetch", modified_meanwhile)
    monkeypatch.setattr("hps.lookup.refresh.time.sleep", lambda seconds: None)
    assert refresh(cache, 0, TABLE, chain, 1.0) == RefreshReport(updated=0, erased=500)
    assert not lookup(cache, keys)[1].any()
