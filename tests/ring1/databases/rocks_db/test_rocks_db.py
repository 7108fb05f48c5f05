"""The persistent database: the contract, HugeCTR's layout, loading, read-only serving, and closing."""

import os
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import rocksdict

from hps.databases.base import Database, LoadRecord
from hps.databases.rocks_db import engine
from hps.databases.rocks_db.database import RocksDatabase
from hps.databases.rocks_db.engine import Engine
from hps.databases.rocks_db.load_records import LoadRecords
from hps.errors import (
    CapacityError,
    DatabaseCorruptError,
    DatabaseError,
    DatabaseTimeoutError,
    InvalidInputError,
    NotReadyError,
    ReadOnlyError,
    TableWidthError,
)
from hps.registry import implementation
from hps.testing.databases import DIM, OTHER, TAG, DatabaseContract, bits, distinct_keys, fetched, vectors_of
from hps.testing.waiting import wait_until
from tests.fakes.clock import Clock
from tests.tables.rocks_database import opened


def raw(path: Path, tags: list[str], read_only: bool = False) -> rocksdict.Rdict:
    """The directory as anybody else opens it, with RocksDB's own settings."""
    options = rocksdict.Options(raw_mode=True)
    access = rocksdict.AccessType.read_only(False) if read_only else rocksdict.AccessType.read_write()
    return rocksdict.Rdict(str(path), options, dict.fromkeys(["default", *tags], options), access)


def raw_items(path: Path, tag: str) -> dict[bytes, bytes]:
    """All rows of a table, read beside the database under test."""
    other = raw(path, rocksdict.Rdict.list_cf(str(path))[1:], read_only=True)
    rows = dict(other.get_column_family(tag).items())
    other.close()
    return rows


def as_hugectr_writes(path: Path, tag: str, rows: dict[bytes, bytes]) -> None:
    """A database without anything of ours: no record, no seal, and not even the settings file of the binding."""
    other = raw(path, [])
    family = other.create_column_family(tag, rocksdict.Options(raw_mode=True))
    for key, value in rows.items():
        family[key] = value
    family.close()
    other.close()
    (path / "rocksdict-config.json").unlink()


def contents(path: Path) -> dict[str, tuple[int, bytes]]:
    return {entry.name: (entry.stat().st_mtime_ns, entry.read_bytes()) for entry in path.iterdir() if entry.is_file()}


def disk_bytes(path: Path) -> int:
    return sum(file.stat().st_blocks * 512 for file in path.rglob("*") if file.suffix == ".sst")


@pytest.fixture
def database(path: Path) -> Iterator[RocksDatabase]:
    database = RocksDatabase(path)
    yield database
    database.close()


@pytest.fixture
def table(database: RocksDatabase) -> RocksDatabase:
    """A database with the table TAG open."""
    database.open_table(TAG, DIM)
    return database


class TestRocksDatabase(DatabaseContract):
    def raw_rows(self, database: Database, tag: str) -> dict[int, bytes]:
        assert isinstance(database, RocksDatabase)
        rows = raw_items(database.path, tag)
        return {int.from_bytes(key, "little", signed=True): value for key, value in rows.items()}


# -- layout ------------------------------------------------------------------------------------------------------------

KEYS = np.array([1, -2, 0x0102030405060708], np.int64)
VECTORS = np.array([[1.0, -2.0], [0.5, 3.0], [-0.0, np.inf]], np.float32)
HUGECTR_ROWS = {
    bytes.fromhex("0100000000000000"): bytes.fromhex("0000803f000000c0"),
    bytes.fromhex("feffffffffffffff"): bytes.fromhex("0000003f00004040"),
    bytes.fromhex("0807060504030201"): bytes.fromhex("000000800000807f"),
}


@pytest.mark.parametrize("bulk", [False, True])
def test_rows_are_laid_out_as_hugectr_lays_them_out_and_loads_remembered_elsewhere(database: RocksDatabase, bulk: bool):
    database.open_table(TAG, 2)
    if bulk:
        database.load_chunk(TAG, KEYS, VECTORS, LoadRecord("x", 3, 3))
        assert list((database.path / "hps-ingest").iterdir()) == []  # no staged file is left
        database.finish_load(TAG)
    else:
        database.insert(TAG, KEYS, VECTORS)
    prefixes = [b"hps-server/load/", b"hps-server/loaded-at/"] if bulk else [b"hps-server/writer/"]
    assert list(raw_items(database.path, "default")) == [prefix + TAG.encode() for prefix in prefixes]
    database.close()
    other = raw(database.path, [TAG] if bulk else [TAG, f"hps-written/{TAG}"])  # fails where there are other column families
    assert dict(other.get_column_family(TAG).items()) == HUGECTR_ROWS


def test_a_table_that_hugectr_wrote_is_read_and_changed_and_can_be_read_by_it_again(path: Path):
    as_hugectr_writes(path, TAG, HUGECTR_ROWS)
    with opened(path, 2) as database:
        assert database.tags() == [TAG]
        out, found = fetched(database, TAG, KEYS, 2)
        assert found.all()
        np.testing.assert_array_equal(bits(out), bits(VECTORS))
        assert database.load_record(TAG) is None
        database.insert(TAG, KEYS[:1], VECTORS[2:])
        database.delete(TAG, KEYS[1:2])
    first, _, last = HUGECTR_ROWS
    assert raw_items(path, TAG) == {first: HUGECTR_ROWS[last], last: HUGECTR_ROWS[last]}


def test_tables_with_32_bit_keys_are_refused_by_name(path: Path):
    as_hugectr_writes(path, TAG, {b"\1\0\0\0": bytes(8)})
    with pytest.raises(DatabaseCorruptError, match=rf"(?s){TAG}.*key of 4 bytes.*32-bit"), opened(path, 2):
        pass


# -- widths ------------------------------------------------------------------------------------------------------------


def test_a_stored_table_is_opened_with_another_width_only_while_it_has_no_rows(path: Path):
    for dim in (3, 2):
        with opened(path, dim) as empty:
            assert empty.size(TAG) == 0
    with opened(path, 2) as database:
        database.insert(TAG, KEYS, VECTORS)
    with pytest.raises(TableWidthError, match=rf"(?s)(?=.*{TAG})(?=.*\b2\b)(?=.*\b3\b)"), opened(path, 3):
        pass
    with opened(path, 2) as database:
        assert database.size(TAG) == 3


@pytest.mark.parametrize("value", [b"", b"\0" * 7, b"\0" * 12])
def test_a_value_of_another_size_is_corrupt_and_its_key_and_table_are_named(path: Path, value: bytes):
    rows = {key.to_bytes(8, "little", signed=True): bytes(8) for key in range(100)}
    as_hugectr_writes(path, TAG, {**rows, (77).to_bytes(8, "little"): value})
    with opened(path, 2) as database:
        keys = np.concatenate([np.arange(100), [999]])
        found = np.zeros(101, np.bool_)
        with pytest.raises(
            DatabaseCorruptError, match=rf"(?s){TAG}.*key 77 has a vector of {len(value)} bytes, expected .* 8 bytes"
        ):
            database.fetch(TAG, keys, np.empty((101, 2), np.float32), found)
        with pytest.raises(DatabaseCorruptError, match=rf"{TAG}.*key 77 "):
            list(database.scan(TAG, 100))
        _, found = fetched(database, TAG, keys[keys != 77], 2)
        assert found.sum() == 99
        database.insert(TAG, np.array([77]), np.ones((1, 2), np.float32))  # the cure that the message names
        assert fetched(database, TAG, keys, 2)[0][77].tolist() == [1, 1]


def test_short_and_long_values_that_make_up_for_each_other_are_seen(path: Path):
    rows = {key.to_bytes(8, "little"): bytes(8) for key in range(10)}
    as_hugectr_writes(path, TAG, {**rows, (5).to_bytes(8, "little"): bytes(4), (6).to_bytes(8, "little"): bytes(12)})
    with opened(path, 2) as database, pytest.raises(DatabaseCorruptError, match="key 5 "):
        fetched(database, TAG, np.arange(10), 2)


def test_the_name_of_the_engines_own_family_is_no_tag(database: RocksDatabase):
    with pytest.raises(InvalidInputError, match="default"):
        database.open_table("default", 2)
    database.drop_table("default")
    database.open_table(TAG, 2)


# -- reading -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_batch_size", [1, 30])
def test_batches_do_not_show(path: Path, max_batch_size: int):
    with opened(path, max_batch_size=max_batch_size) as database:
        keys = distinct_keys(61)
        half = keys.size // 2
        database.insert(TAG, keys[:half], vectors_of(keys[:half], DIM))
        out, found = fetched(database, TAG, keys, DIM)
        np.testing.assert_array_equal(found, np.arange(keys.size) < half)
        np.testing.assert_array_equal(out[:half], vectors_of(keys[:half], DIM))
        assert database.delete(TAG, keys) == half


@pytest.mark.usefixtures("four_threads")
def test_threads_that_share_a_fetch_do_not_show(path: Path):
    keys = np.arange(0, 10_000, 2)
    asked = np.random.default_rng(1).integers(-100, 10_100, 9000)
    there = (asked >= 0) & (asked < 10_000) & (asked % 2 == 0)
    out, found = np.full((asked.size, 3), -1, np.float32), asked % 3 == 0
    with closing(RocksDatabase(path)) as database:
        database.open_table("t", 3)
        database.insert("t", keys, np.repeat(keys[:, None], 3, 1).astype(np.float32))
        assert database.fetch("t", asked, out, found) == np.count_nonzero(there & (asked % 3 != 0))
    np.testing.assert_array_equal(found, there | (asked % 3 == 0))
    answered = there & (asked % 3 != 0)
    np.testing.assert_array_equal(out[answered], np.repeat(asked[answered][:, None], 3, 1))
    assert (out[~answered] == -1).all()


def test_a_block_cache_can_be_had(path: Path):
    with opened(path, block_cache_bytes=1 << 20) as database:
        keys = distinct_keys(30_000)
        database.load_chunk(TAG, keys, vectors_of(keys, DIM), LoadRecord("x", keys.size, keys.size))
        for _ in range(2):
            np.testing.assert_array_equal(fetched(database, TAG, keys, DIM)[0], vectors_of(keys, DIM))


def test_large_tables_are_estimated_and_small_ones_counted(database: RocksDatabase):
    database.open_table(TAG, 1)
    keys = np.arange(150_000)
    for _ in range(2):  # rows that were replaced count twice until the files are merged
        database.load_chunk(TAG, keys, np.ones((keys.size, 1), np.float32), LoadRecord("x", 1, 1))
    assert database.size(TAG) >= 150_000
    database.finish_load(TAG)
    assert database.size(TAG) == 150_000
    database.delete(TAG, keys[1000:])
    assert database.size(TAG) == 1000


def test_a_scan_of_many_engine_pieces_is_whole(database: RocksDatabase):
    database.open_table(TAG, 4)
    keys = distinct_keys(30_000)
    database.load_chunk(TAG, keys[:20_000], vectors_of(keys[:20_000], 4), LoadRecord("x", 1, 1))
    database.insert(TAG, keys[20_000:], vectors_of(keys[20_000:], 4))
    for chunk_rows in (9_999, 100_000):
        chunks = list(database.scan(TAG, chunk_rows))
        scanned = np.concatenate([chunk[0] for chunk in chunks])
        assert [chunk[0].size for chunk in chunks] == [min(chunk_rows, left) for left in range(30_000, 0, -chunk_rows)]
        np.testing.assert_array_equal(np.sort(scanned), np.sort(keys))
        np.testing.assert_array_equal(np.concatenate([chunk[1] for chunk in chunks]), vectors_of(scanned, 4))
        assert all(array.flags.c_contiguous and array.flags.owndata for chunk in chunks for array in chunk)


# -- loading -----------------------------------------------------------------------------------------------------------


def test_a_long_load_merges_before_it_runs_out_of_open_files_and_in_the_end(
    table: RocksDatabase, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("hps.databases.rocks_db.engine._LOAD_FILES", 3)
    keys = distinct_keys(2000)
    family = table._engine.family(TAG)
    most = 0
    for part in range(10):
        rows = slice(100 * part, 2000 - 100 * part)
        table.load_chunk(TAG, keys[rows], vectors_of(keys[rows], DIM, part), LoadRecord("x", part, 10))
        most = max(most, table._engine.figure(family, "num-files-at-level0"))
    assert most == 3
    wanted = np.stack([vectors_of(keys, DIM, part) for part in range(10)])
    places = np.arange(2000)
    newest = np.minimum(np.minimum(places, 1999 - places) // 100, 9)
    np.testing.assert_array_equal(fetched(table, TAG, keys, DIM)[0], wanted[newest, places])
    assert table._engine.figure(family, "num-files-at-level0") > 0
    table.finish_load(TAG)
    assert table._engine.figure(family, "num-files-at-level0") == 0


def test_a_small_table_is_merged_into_files_for_several_threads(table: RocksDatabase, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("hps.databases.rocks_db.engine._FILE_BYTES", (16 << 10, 256 << 20))
    keys = distinct_keys(40_000)
    for part in np.array_split(keys, 4):
        table.load_chunk(TAG, part, vectors_of(part, DIM), LoadRecord("x", 1, 1))
    table.finish_load(TAG)
    assert 4 <= len(list(table.path.glob("*.sst"))) <= 64
    np.testing.assert_array_equal(fetched(table, TAG, keys, DIM)[0], vectors_of(keys, DIM))


def test_files_are_not_merged_where_the_disk_has_no_room_for_it(
    table: RocksDatabase, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=10))
    keys = distinct_keys(1000)
    for version in range(3):
        table.load_chunk(TAG, keys, vectors_of(keys, DIM, version), LoadRecord("x", 1, 1))
    table.finish_load(TAG)
    assert "10 bytes free" in caplog.text
    np.testing.assert_array_equal(fetched(table, TAG, keys, DIM)[0], vectors_of(keys, DIM, 2))


def test_a_damaged_record_is_corrupt_and_dropping_the_table_cures_it(path: Path):
    as_hugectr_writes(path, TAG, HUGECTR_ROWS)
    other = raw(path, [TAG])
    other[b"hps-server/load/" + TAG.encode()] = b'{"fingerprint": "x"}'
    other.close()
    with opened(path, 2) as database:
        with pytest.raises(DatabaseCorruptError, match=rf"(?s)record of table {TAG}.*drop the table"):
            database.load_record(TAG)
        database.drop_table(TAG)
        database.open_table(TAG, 2)
        assert database.load_record(TAG) is None


@pytest.mark.parametrize("change", ["insert", "delete"])
def test_a_change_marks_the_record_for_good_and_the_rest_of_the_load_keeps_the_mark(path: Path, change: str):
    keys = distinct_keys(300)
    with opened(path) as database:
        database.insert(TAG, keys, vectors_of(keys, DIM))  # before any load there is nothing to mark
        assert database.load_record(TAG) is None
        database.load_chunk(TAG, keys[:100], vectors_of(keys[:100], DIM), LoadRecord("x", 100, 300))
        assert database.load_record(TAG) == LoadRecord("x", 100, 300)
        if change == "insert":
            database.insert(TAG, keys[:1], vectors_of(keys[:1], DIM, 1))
        else:
            database.delete(TAG, keys[:1])
        assert database.load_record(TAG) == LoadRecord("x", 100, 300, modified=True)
        database.load_chunk(TAG, keys[100:], vectors_of(keys[100:], DIM), LoadRecord("x", 300, 300))
        assert database.load_record(TAG) == LoadRecord("x", 300, 300, modified=True)
        database.load_chunk(TAG, keys, vectors_of(keys, DIM), LoadRecord("y", 300, 300))
        assert database.load_record(TAG) == LoadRecord("y", 300, 300)
    with opened(path) as again:
        again.insert(TAG, keys[:1], vectors_of(keys[:1], DIM, 1))
        assert again.load_record(TAG) == LoadRecord("y", 300, 300, modified=True)


class Killed(BaseException):
    """Stands for the end of the process."""


def killed(*_: object) -> None:
    raise Killed


def test_rows_that_were_killed_before_their_record_are_no_whole_table(path: Path, monkeypatch: pytest.MonkeyPatch):
    keys = distinct_keys(100)
    advance = LoadRecords.advance

    def kill_before_the_rows_count(self: LoadRecords, tag: str, record: LoadRecord) -> LoadRecord:
        return killed() if record.rows_done else advance(self, tag, record)

    monkeypatch.setattr(LoadRecords, "advance", kill_before_the_rows_count)
    with opened(path) as database, pytest.raises(Killed):
        database.load_chunk(TAG, keys, vectors_of(keys, DIM), LoadRecord("x", 100, 100, checksum="12345678"))
    with opened(path) as database:
        assert fetched(database, TAG, keys, DIM)[1].all()
        assert database.load_record(TAG) == LoadRecord("x", 0, 100)


@pytest.mark.parametrize("when", ["drop", "remove"])
@pytest.mark.parametrize("loaded", [True, False])
def test_a_drop_that_was_killed_is_completed_at_the_next_opening(
    path: Path, monkeypatch: pytest.MonkeyPatch, when: str, loaded: bool
):
    database = RocksDatabase(path)
    keys = distinct_keys(100)
    for tag in (TAG, "other"):
        database.open_table(tag, DIM)
        if loaded:
            database.load_chunk(tag, keys, vectors_of(keys, DIM), LoadRecord("x", 100, 100))
        else:
            database.insert(tag, keys, vectors_of(keys, DIM))
    with monkeypatch.context() as patch:
        patch.setattr(Engine if when == "drop" else LoadRecords, when, killed)
        with pytest.raises(Killed):
            database.drop_table(TAG)
    database.close()
    if when == "drop":
        reader = RocksDatabase(path, read_only=True)  # cannot complete it, and must not take it for whole
        reader.open_table(TAG, DIM)
        record = reader.load_record(TAG)
        assert record is not None
        assert not record.complete
        reader.close()
    database = RocksDatabase(path)
    assert database.tags() == ["other"]
    database.open_table(TAG, DIM + 1)
    database.open_table("other", DIM)
    assert database.load_record(TAG) is None
    assert database.load_record("other") == (LoadRecord("x", 100, 100) if loaded else None)
    assert fetched(database, "other", keys, DIM)[1].all()
    database.close()


def test_files_of_a_killed_load_are_removed_at_the_next_opening(path: Path):
    RocksDatabase(path).close()
    (path / "hps-ingest" / "3.sst").write_bytes(b"half a file")
    (path / "hps-ingest" / "sub").mkdir()
    RocksDatabase(path).close()
    assert list((path / "hps-ingest").iterdir()) == []


def test_the_manifest_is_on_disk_before_a_seal_promises_it(path: Path, monkeypatch: pytest.MonkeyPatch):
    steps: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def note_fsync(file: int) -> None:
        steps.append(Path(os.readlink(f"/proc/self/fd/{file}")).name)
        fsync(file)

    def note_replace(file: Path, target: Path) -> Path:
        steps.append(target.name)
        return replace(file, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(Path, "replace", note_replace)
    with opened(path) as database:
        for tag in ("first", "second"):
            steps.clear()
            database.open_table(tag, DIM)
            sealed = [step for step in steps if step.startswith(("MANIFEST-", "hps-manifest"))]
            assert sealed == [(path / "CURRENT").read_text().strip(), "hps-manifest.json"]


# -- read only ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def filled(path: Path) -> Path:
    with opened(path) as database:
        keys = distinct_keys(3000)
        database.load_chunk(TAG, keys[:2000], vectors_of(keys[:2000], DIM), LoadRecord("x", 2000, 2000))
        database.finish_load(TAG)
        database.insert(TAG, keys[2000:], vectors_of(keys[2000:], DIM))  # in the write-ahead log alone
    return path


def test_read_only_serves_beside_a_writer(filled: Path):
    keys = distinct_keys(3000)
    with opened(filled) as writer, opened(filled, read_only=True) as reader:
        writer.insert(TAG, keys, vectors_of(keys, DIM, 1))
        writer.load_chunk(TAG, keys, vectors_of(keys, DIM, 2), LoadRecord("y", 3000, 3000))
        writer.finish_load(TAG)  # removes the files that the reader reads
        np.testing.assert_array_equal(fetched(reader, TAG, keys, DIM)[0], vectors_of(keys, DIM))
        with opened(filled, read_only=True) as later:
            np.testing.assert_array_equal(fetched(later, TAG, keys, DIM)[0], vectors_of(keys, DIM, 2))


def test_read_only_serves_and_writes_nothing(filled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    views = tmp_path / "views"
    views.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(views))
    before = contents(filled)
    with opened(filled, read_only=True) as database:
        assert list(views.iterdir()) != []
        keys, vectors = distinct_keys(3000), vectors_of(distinct_keys(3000), DIM)
        np.testing.assert_array_equal(fetched(database, TAG, keys, DIM)[0], vectors)
        assert database.size(TAG) == 3000
        assert sum(chunk.size for chunk, _ in database.scan(TAG, 700)) == 3000
        assert database.load_record(TAG) == LoadRecord("x", 2000, 2000, modified=True)
        calls = [
            lambda: database.insert(TAG, keys, vectors),
            lambda: database.delete(TAG, keys),
            lambda: database.load_chunk(TAG, keys, vectors, LoadRecord("y", 1, 1)),
            lambda: database.finish_load(TAG),
            lambda: database.drop_table(TAG),
        ]
        for call in calls:
            with pytest.raises(ReadOnlyError, match=rf"{TAG}.*{filled}.*read_only"):
                call()
        with pytest.raises(ReadOnlyError, match=rf"{OTHER}.*read_only.*there are: {TAG}"):
            database.open_table(OTHER, DIM)
        assert fetched(database, TAG, keys, DIM)[1].all()
    assert contents(filled) == before
    assert list(views.iterdir()) == []


def test_read_only_of_no_database_is_refused_and_makes_none(path: Path):
    with pytest.raises(DatabaseError, match=rf"{path}.*read_only.*no database"):
        RocksDatabase(path, read_only=True)
    assert not path.exists()


# -- opening and closing -----------------------------------------------------------------------------------------------


def test_the_registry_opens_what_the_configuration_says(path: Path):
    config = SimpleNamespace(path=str(path), num_threads=2, read_only=False, max_batch_size=10)
    database = implementation("database", "rocks_db").from_config(config)
    assert isinstance(database, RocksDatabase)
    assert (database.path, database.kind) == (path, "rocks_db")
    database.close()
    config.read_only = True
    read_only = RocksDatabase.from_config(config)
    assert read_only.read_only
    read_only.close()


def test_a_closed_database_can_be_opened_again_in_the_same_process(path: Path):
    keys = distinct_keys(100)
    for version in range(3):
        database = RocksDatabase(path)
        database.open_table(TAG, DIM)
        if version:
            np.testing.assert_array_equal(fetched(database, TAG, keys, DIM)[0], vectors_of(keys, DIM, version - 1))
        database.insert(TAG, keys, vectors_of(keys, DIM, version))
        half_way = database.scan(TAG, 10)
        next(half_way)  # must not keep the directory locked
        database.close()
        with pytest.raises(NotReadyError):
            next(half_way)
        with pytest.raises(NotReadyError, match=str(path)):
            database.load_record(TAG)


def test_closing_while_others_read_and_write_ends_them_with_an_error(path: Path):
    database = RocksDatabase(path)
    database.open_table(TAG, DIM)
    keys = distinct_keys(3000)
    vectors = vectors_of(keys, DIM)
    database.insert(TAG, keys, vectors)
    calls = [0] * 3

    def use(nth: int, work) -> None:
        while True:
            try:
                work()
            except NotReadyError:
                return
            calls[nth] += 1

    def fetch() -> None:
        np.testing.assert_array_equal(fetched(database, TAG, keys, DIM)[0], vectors)

    def scan() -> None:
        assert sum(chunk.size for chunk, _ in database.scan(TAG, 1000)) == keys.size

    with ThreadPoolExecutor(3) as pool:
        works = (fetch, scan, lambda: database.insert(TAG, keys, vectors))
        users = [pool.submit(use, nth, work) for nth, work in enumerate(works)]
        wait_until(lambda: min(calls), "each has had an answer")
        database.close()
        for user in users:
            user.result()
    with opened(path) as again:
        assert again.size(TAG) == keys.size


def test_closing_waits_for_calls_under_way_but_not_for_ever(path: Path):
    with opened(path, close_timeout_s=0.01) as database, database._calls:
        with pytest.raises(DatabaseTimeoutError, match=r"calls still running after 0\.01 s: 1;"):
            database.close()
        with pytest.raises(NotReadyError):
            database.size(TAG)


def test_writes_that_rocksdb_holds_back_end_in_a_timeout_and_then_go_on(path: Path, monkeypatch: pytest.MonkeyPatch):
    clock, looks = Clock(), []

    def look_again_later(seconds: float) -> None:
        clock.now += seconds
        looks.append(clock.now)
        if released := looks[3:]:
            assert len(released) == 1
            family.set_options({"level0_slowdown_writes_trigger": "1000", "level0_stop_writes_trigger": "1000"})

    monkeypatch.setattr(engine, "time", SimpleNamespace(monotonic=clock, sleep=look_again_later))
    monkeypatch.setattr(engine, "_STALL_POLL_S", 10.0)
    with opened(path) as database:  # which waits for 30 s
        family = database._engine.family(TAG)
        family.set_options({"disable_auto_compactions": "false", "level0_file_num_compaction_trigger": "1000"})
        family.set_options({"level0_slowdown_writes_trigger": "1", "level0_stop_writes_trigger": "2"})
        keys = distinct_keys(100)
        for _ in range(2):
            database.insert(TAG, keys, vectors_of(keys, DIM))
            family.flush()
            if database._engine.figure(family, "is-write-stopped"):
                break
        with pytest.raises(DatabaseTimeoutError, match=rf"{TAG}.*Write stall"):
            database.insert(TAG, keys, vectors_of(keys, DIM, 1))
        assert looks == [10.0, 20.0, 30.0]
        np.testing.assert_array_equal(fetched(database, TAG, keys, DIM)[0], vectors_of(keys, DIM))
        database.insert(TAG, keys, vectors_of(keys, DIM, 2))
        np.testing.assert_array_equal(fetched(database, TAG, keys, DIM)[0], vectors_of(keys, DIM, 2))


def test_only_one_table_is_made_of_many_threads_opening_it(database: RocksDatabase):
    with ThreadPoolExecutor(8) as pool:
        for opened in [pool.submit(database.open_table, f"hps_et.m.{i % 3}", DIM) for i in range(24)]:
            opened.result()
    assert database.tags() == ["hps_et.m.0", "hps_et.m.1", "hps_et.m.2"]


def test_a_relative_path_stays_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with opened("here/rocksdb") as database:
        os.chdir("/")
        keys = distinct_keys(10)
        database.load_chunk(TAG, keys, vectors_of(keys, DIM), LoadRecord("x", 10, 10))
    assert len(raw_items(tmp_path / "here" / "rocksdb", TAG)) == 10


def test_the_token_of_a_modified_table_is_kept_and_goes_with_the_table(tmp_path):
    with closing(RocksDatabase(tmp_path)) as database:
        database.open_table(TAG, 2)
        database.load_chunk(TAG, KEYS, VECTORS, LoadRecord("x", 3, 3))
        assert database.writer_token(TAG) is None
        assert database.renew_writer_token(TAG) is None  # nothing was modified
        database.delete(TAG, KEYS[:1])
        token = database.writer_token(TAG)
        database.insert(TAG, KEYS[:1], VECTORS[:1])
        assert database.writer_token(TAG) == token is not None
    with closing(RocksDatabase(tmp_path)) as database:
        database.open_table(TAG, 2)
        assert database.writer_token(TAG) == token
        renewed = database.renew_writer_token(TAG)
        assert renewed == database.writer_token(TAG) != token
        database.drop_table(TAG)
        database.open_table(TAG, 2)
        assert database.writer_token(TAG) is None


def test_room_is_asked_for_rows_that_are_not_there_and_for_the_merge(filled: Path):
    free = shutil.disk_usage(filled).free
    sizes = [need.size_bytes for need in RocksDatabase.room_for(SimpleNamespace(read_only=False), [(OTHER, DIM, 1_000_000)])]
    rows = 1_000_000 * free // sizes[0]
    with opened(filled) as holder:
        held = holder.size(TAG)
        holder.check_room([(TAG, DIM, held), (OTHER, DIM, int(0.45 * rows))])
        with pytest.raises(CapacityError, match=rf"{filled}.*merged.*on its file system"):
            holder.check_room([(OTHER, DIM, int(0.55 * rows))])  # it fits once, but not twice
        with pytest.raises(CapacityError, match=f"for {2 * rows - held:,} rows of table {TAG}"):
            holder.check_room([(TAG, DIM, 2 * rows)])
    with opened(filled, read_only=True) as reader:
        reader.check_room([(TAG, DIM, 2 * rows)])


def test_a_dropped_table_gives_its_disk_back_once_its_last_reader_is_done(path: Path):
    keys = np.arange(5000)
    with opened(path, 128) as database:
        database.open_table(OTHER, 2)
        before = disk_bytes(path)
        database.load_chunk(TAG, keys, np.ones((keys.size, 128), np.float32), LoadRecord("x", keys.size, keys.size))
        database.finish_load(TAG)
        assert disk_bytes(path) - before > 4 * 128 * keys.size
        scan = database.scan(TAG, 1000)
        next(scan)
        database.drop_table(TAG)
        assert next(scan)[1].all()
        del scan
        wait_until(lambda: disk_bytes(path) == before, "RocksDB has removed the files")


def test_a_table_is_counted_again_only_after_it_was_written_to(path: Path, monkeypatch: pytest.MonkeyPatch):
    counted: list[str] = []
    read_keys = Engine.read_keys

    def read(engine: Engine, *arguments: Any) -> list[bytes]:
        counted.append(arguments[-1])
        return read_keys(engine, *arguments)

    monkeypatch.setattr(Engine, "read_keys", read)
    keys = distinct_keys(5000)
    with opened(path) as database:
        for write, rows in (
            (lambda: None, 0),
            (lambda: database.insert(TAG, keys, vectors_of(keys, DIM)), 5000),
            (lambda: database.delete(TAG, keys[:1000]), 4000),
            (lambda: database.load_chunk(TAG, keys, vectors_of(keys, DIM), LoadRecord("y", 5000, 5000)), 5000),
        ):
            write()
            counted.clear()
            assert database.stats(TAG).rows == rows
            assert counted
            counted.clear()
            assert database.stats(TAG).rows == database.size(TAG) == rows
            assert not counted


def now_us() -> int:
    return time.time_ns() // 1000


def test_when_rows_were_written_online_is_as_durable_as_they_are(path: Path):
    keys = distinct_keys(3000)
    first, second, absent = keys[:1000], keys[900:1900], keys[2500:]
    times = [now_us()]
    with opened(path) as database:
        for part in (first, second):
            database.insert(TAG, part, vectors_of(part, DIM))
            times.append(now_us())
        database.delete(TAG, keys[:10])
    for read_only in (False, True):
        with opened(path, read_only=read_only) as database:
            written = database.written_at(TAG, keys)
            assert (written[10:900] >= times[0]).all()
            assert (written[10:900] <= times[1]).all()
            assert (written[900:1900] >= times[1]).all()
            assert (written[900:1900] <= times[2]).all()
            assert not written[:10].any()
            assert not database.written_at(TAG, absent).any()
            assert database.written_at(TAG, keys[1899:1900].repeat(2)).tolist() == written[1899:1900].repeat(2).tolist()
            assert database.tags() == [TAG]
            assert sum(chunk.size for chunk, _ in database.scan(TAG, 700)) == database.size(TAG) == 1890
    assert [table.tag for table in RocksDatabase.inspect(path).tables] == [TAG]


def test_rows_of_a_load_were_written_by_it_unless_they_were_changed_since(path: Path):
    keys = distinct_keys(1000)
    with opened(path) as database:
        database.insert(TAG, keys[:100], vectors_of(keys[:100], DIM))
        before = now_us()
        database.load_chunk(TAG, keys, vectors_of(keys, DIM), LoadRecord("x", 1000, 1000))
        after = now_us()
        database.finish_load(TAG)
        loaded = database.load_record(TAG)
        assert before <= loaded.loaded_at_us <= after
        assert set(database.written_at(TAG, keys).tolist()) == {loaded.loaded_at_us}
        database.load_chunk(TAG, keys[:0], vectors_of(keys[:0], DIM), loaded)  # as where its files were moved
        database.insert(TAG, keys[:10], vectors_of(keys[:10], DIM, 1))
        written = database.written_at(TAG, keys)
        assert (written[:10] >= after).all()
        assert set(written[10:].tolist()) == {loaded.loaded_at_us}
        assert not database.written_at(TAG, distinct_keys(3, seed=9)).any()


def test_a_new_table_knows_nothing_of_the_times_of_an_older_one(path: Path):
    keys = distinct_keys(10)
    with opened(path) as database:
        for _ in range(2):
            database.insert(TAG, keys, vectors_of(keys, DIM))
            database.drop_table(TAG)
            database.open_table(TAG, DIM)
            assert not database.written_at(TAG, keys).any()
        database.insert(TAG, keys, vectors_of(keys, DIM))
    other = raw(path, rocksdict.Rdict.list_cf(str(path))[1:])
    other.drop_column_family(TAG)  # by a release that knows of no times
    other.close()
    with opened(path) as database:
        database.load_chunk(TAG, keys, vectors_of(keys, DIM), LoadRecord("y", 10, 10))
        assert set(database.written_at(TAG, keys).tolist()) == {database.load_record(TAG).loaded_at_us}


def test_later_releases_may_add_to_the_time_of_a_row(path: Path):
    keys = distinct_keys(2)
    with opened(path) as database:
        database.insert(TAG, keys, vectors_of(keys, DIM))
        value = (1234567).to_bytes(8, "little") + b"and a sequence number"
        database._engine.write({f"hps-written/{TAG}": ([keys[:1].tobytes()], [value])}, {}, "adding")
        assert database.written_at(TAG, keys[:1]).tolist() == [1234567]


def test_the_space_of_a_dropped_table_is_freed_without_the_interpreter_lock(filled: Path, monkeypatch: pytest.MonkeyPatch):
    links: list[tuple[bool, int]] = []
    rmtree = shutil.rmtree

    def remove(directory: Path, **options: bool) -> None:
        """As rmtree, which deletes outside the interpreter lock; RocksDB, which holds it, must have deleted its own links."""
        links.extend(((filled / file.name).exists(), file.stat().st_nlink) for file in directory.iterdir())
        rmtree(directory, **options)

    keys = distinct_keys(1000)
    with opened(filled) as database:
        database.open_table(OTHER, DIM)
        database.load_chunk(OTHER, keys, vectors_of(keys, DIM), LoadRecord("x", 1000, 1000))
        database.finish_load(OTHER)
        monkeypatch.setattr(shutil, "rmtree", remove)
        database.drop_table(TAG)
        assert sorted(set(links)) == [(False, 1), (True, 2)]
        assert list((filled / "hps-ingest").iterdir()) == []
        np.testing.assert_array_equal(fetched(database, OTHER, keys, DIM)[0], vectors_of(keys, DIM))
