"""The persistent database: the contract, HugeCTR's layout, loading, read-only serving, and closing."""

import os
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import rocksdict

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
from hps.ground.registry import implementation
from hps.stores.base import Database, LoadRecord
from hps.stores.rocks_db import directory, engine
from hps.stores.rocks_db.database import RocksDatabase
from hps.stores.rocks_db.engine import Engine
from hps.stores.rocks_db.load_records import LoadRecords
from hps.stores.rocks_db.write_ahead_log import CheckedLogs, check_logs
from hps.testing.databases import (
    DIM,
    OTHER,
    TAG,
    AgingRowsContract,
    DatabaseContract,
    LastingContract,
    OrderedWritesContract,
    PersistentContract,
    bits,
    distinct_keys,
    fetched,
    vectors_of,
)
from hps.testing.waiting import wait_until
from hps.types import TableSpec
from tests.fakes.clock import Clock
from tests.tables.rocks_database import assert_holds, insert, load, opened


def raw(path: Path, tags: list[str], read_only: bool = False) -> rocksdict.Rdict:
    """The directory as anybody else opens it, with RocksDB's own settings."""
    options = rocksdict.Options(raw_mode=True)
    access = rocksdict.AccessType.read_only(False) if read_only else rocksdict.AccessType.read_write()
    return rocksdict.Rdict(str(path), options, dict.fromkeys(["default", *tags], options), access)


def raw_items(path: Path, tag: str) -> dict[bytes, bytes]:
    """All rows of a table, read beside the database under test, whose compactions may remove a file while this opens."""

    def read() -> dict[bytes, bytes]:
        try:
            other = raw(path, rocksdict.Rdict.list_cf(str(path))[1:], read_only=True)
        except Exception as error:  # what the binding raises
            raise DatabaseError(str(error)) from error
        rows = dict(other.get_column_family(tag).items())
        other.close()
        return rows

    return directory.settled(path, read)


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


class TestRocksDatabase(DatabaseContract, LastingContract, PersistentContract, OrderedWritesContract, AgingRowsContract):
    def raw_rows(self, database: Database, tag: str) -> dict[int, bytes]:
        assert isinstance(database, RocksDatabase)
        rows = raw_items(database.path, tag)
        return {int.from_bytes(key, "little", signed=True): value for key, value in rows.items()}


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
    with (
        pytest.raises(DatabaseCorruptError, match=rf"(?s){TAG}.*key of 4 bytes.*32 bits.*hps load CONFIG --force"),
        opened(path, 2),
    ):
        pass


# -- widths and sizes --------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("sizes", [[0], [7], [12], [4, 12]], ids=str)  # the last two make up for each other
def test_a_value_of_another_size_is_corrupt_and_its_key_and_table_are_named(path: Path, sizes: list[int]):
    rows = {key.to_bytes(8, "little"): bytes(8) for key in range(100)}
    as_hugectr_writes(path, TAG, rows | {(77 + i).to_bytes(8, "little"): bytes(size) for i, size in enumerate(sizes)})
    with opened(path, 2) as database:
        keys = np.append(np.arange(100), 999)
        for read, message in (
            (
                lambda: fetched(database, TAG, keys, 2),
                rf"(?s){TAG}.*key 77 .* of {sizes[0]} bytes, expected .* 8 bytes",
            ),
            (lambda: list(database.scan(TAG, 100)), rf"{TAG}.*key 77 "),
        ):
            with pytest.raises(DatabaseCorruptError, match=message):
                read()
        assert fetched(database, TAG, keys[(keys < 77) | (keys > 78)], 2)[1].sum() == 98
        database.insert(TAG, np.array([77, 78]), np.ones((2, 2), np.float32))  # the cure that the message names
        assert fetched(database, TAG, keys, 2)[0][77].tolist() == [1, 1]


def test_the_name_of_the_engines_own_family_is_no_tag(database: RocksDatabase):
    with pytest.raises(InvalidInputError, match="default"):
        database.open_table("default", 2)
    database.drop_table("default")
    database.open_table(TAG, 2)


# -- reading -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"max_batch_size": 1}, {"max_batch_size": 30}, {"block_cache_bytes": 1 << 20}], ids=str)
def test_batches_and_a_block_cache_do_not_show(path: Path, options: dict[str, int]):
    with opened(path, **options) as database:
        keys = distinct_keys(61)
        load(database, keys[:10])
        insert(database, keys[10:30])
        for _ in range(2):
            out, found = fetched(database, TAG, keys, DIM)
            np.testing.assert_array_equal(found, np.arange(keys.size) < 30)
            np.testing.assert_array_equal(out[:30], vectors_of(keys[:30], DIM))
        assert database.delete(TAG, keys) == 30


@pytest.mark.usefixtures("four_threads")
def test_threads_that_share_a_fetch_do_not_show(table: RocksDatabase):
    keys, asked = np.arange(0, 10_000, 2), np.random.default_rng(1).integers(-100, 10_100, 9000)
    before = asked % 3 == 0
    answered = np.isin(asked, keys) & ~before
    out, found = np.full((asked.size, DIM), -1, np.float32), before.copy()
    insert(table, keys)
    assert table.fetch(TAG, asked, out, found) == np.count_nonzero(answered)
    np.testing.assert_array_equal(found, answered | before)
    np.testing.assert_array_equal(out[answered], vectors_of(asked[answered], DIM))
    assert (out[~answered] == -1).all()


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


def test_a_scan_of_many_engine_pieces_is_whole(table: RocksDatabase):
    keys = distinct_keys(30_000)
    load(table, keys[:20_000])
    insert(table, keys[20_000:])
    for chunk_rows in (9_999, 100_000):
        chunks = list(table.scan(TAG, chunk_rows))
        scanned = np.concatenate([chunk[0] for chunk in chunks])
        assert [chunk[0].size for chunk in chunks] == [min(chunk_rows, left) for left in range(30_000, 0, -chunk_rows)]
        np.testing.assert_array_equal(np.sort(scanned), np.sort(keys))
        np.testing.assert_array_equal(np.concatenate([chunk[1] for chunk in chunks]), vectors_of(scanned, DIM))
        assert all(array.flags.c_contiguous and array.flags.owndata for chunk in chunks for array in chunk)


# -- loading -----------------------------------------------------------------------------------------------------------


def test_a_long_load_merges_before_it_runs_out_of_open_files_and_in_the_end(
    table: RocksDatabase, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("hps.stores.rocks_db.engine._LOAD_FILES", 3)
    keys, family, most = distinct_keys(2000), table._engine.family(TAG), 0
    for part in range(10):
        load(table, keys[100 * part : 2000 - 100 * part], part, LoadRecord("x", part, 10))
        most = max(most, table._engine.figure(family, "num-files-at-level0"))
    assert most == 3
    for part in range(10):
        for rows in (slice(100 * part, 100 * part + 100), slice(1900 - 100 * part, 2000 - 100 * part)):
            assert_holds(table, keys[rows], part)
    assert table._engine.figure(family, "num-files-at-level0") > 0
    table.finish_load(TAG)
    assert table._engine.figure(family, "num-files-at-level0") == 0


def test_files_are_not_merged_where_the_disk_has_no_room_for_it(
    table: RocksDatabase, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=10))
    for version in range(3):
        load(table, distinct_keys(1000), version)
    table.finish_load(TAG)
    assert "10 bytes free" in caplog.text
    assert_holds(table, distinct_keys(1000), 2)


def test_a_damaged_record_is_corrupt_and_dropping_the_table_cures_it(path: Path):
    as_hugectr_writes(path, TAG, HUGECTR_ROWS)
    other = raw(path, [TAG])
    other[b"hps-server/load/" + TAG.encode()] = b'{"fingerprint": "x"}'
    other.close()
    with opened(path, 2) as database:
        with pytest.raises(DatabaseCorruptError, match=rf"(?s)record of table {TAG}.*hps load CONFIG --force"):
            database.load_record(TAG)
        database.drop_table(TAG)
        database.open_table(TAG, 2)
        assert database.load_record(TAG) is None


@pytest.mark.parametrize("change", [insert, lambda database, keys: database.delete(TAG, keys)], ids=["insert", "delete"])
def test_a_change_marks_the_record_for_good_and_the_rest_of_the_load_keeps_the_mark(path: Path, change: Callable[..., object]):
    keys = distinct_keys(300)
    with opened(path) as database:
        insert(database, keys)  # before any load there is nothing to mark
        assert database.load_record(TAG) is None
        assert load(database, keys[:100], 0, LoadRecord("x", 100, 300)) == database.load_record(TAG)
        change(database, keys[:1])
        assert database.load_record(TAG) == LoadRecord("x", 100, 300, modified=True)
        load(database, keys[100:], 0, LoadRecord("x", 300, 300))
        assert database.load_record(TAG) == LoadRecord("x", 300, 300, modified=True)
        assert load(database, keys, 0, LoadRecord("y", 300, 300)) == database.load_record(TAG)
    with opened(path) as again:
        change(again, keys[:1])
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


@pytest.mark.parametrize("killed_in", [Engine, LoadRecords])
@pytest.mark.parametrize("fill", [load, insert])
def test_a_drop_that_was_killed_is_completed_at_the_next_opening(
    path: Path, monkeypatch: pytest.MonkeyPatch, killed_in: type, fill: Callable[..., LoadRecord | None]
):
    keys = distinct_keys(100)
    with opened(path) as database:
        database.open_table("other", DIM)
        records = [fill(database, keys, tag=tag) for tag in (TAG, "other")]
        with monkeypatch.context() as patch:
            patch.setattr(killed_in, "drop" if killed_in is Engine else "remove", killed)
            with pytest.raises(Killed):
                database.drop_table(TAG)
    if killed_in is Engine:
        with opened(path, read_only=True) as reader:  # cannot complete it, and must not take it for whole
            record = reader.load_record(TAG)
            assert record is not None
            assert not record.complete
    with closing(RocksDatabase(path)) as database:
        assert database.tags() == ["other"]
        database.open_table(TAG, DIM + 1)
        database.open_table("other", DIM)
        assert [database.load_record(tag) for tag in (TAG, "other")] == [None, records[1]]
        assert_holds(database, keys, tag="other")


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

ROWS = distinct_keys(3000)


@pytest.fixture
def filled(path: Path) -> Path:
    with opened(path) as database:
        load(database, ROWS[:2000])
        database.finish_load(TAG)
        insert(database, ROWS[2000:])  # in the write-ahead log alone
    return path


def test_read_only_serves_beside_a_writer(filled: Path):
    with opened(filled) as writer, opened(filled, read_only=True) as reader:
        insert(writer, ROWS, 1)
        load(writer, ROWS, 2, LoadRecord("y", 3000, 3000))
        writer.finish_load(TAG)  # removes the files that the reader reads
        assert_holds(reader, ROWS)
        with opened(filled, read_only=True) as later:
            assert_holds(later, ROWS, 2)


def test_read_only_serves_and_writes_nothing(filled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    views = tmp_path / "views"
    views.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(views))
    before = contents(filled)
    with opened(filled, read_only=True) as database:
        assert list(views.iterdir()) != []
        assert_holds(database, ROWS)
        assert database.size(TAG) == sum(chunk.size for chunk, _ in database.scan(TAG, 700)) == 3000
        assert database.load_record(TAG) == LoadRecord("x", 2000, 2000, modified=True)
        for call in (
            lambda: insert(database, ROWS),
            lambda: database.delete(TAG, ROWS),
            lambda: load(database, ROWS),
            lambda: database.finish_load(TAG),
            lambda: database.drop_table(TAG),
        ):
            with pytest.raises(ReadOnlyError, match=rf"{TAG}.*{filled}.*read_only"):
                call()
        with pytest.raises(ReadOnlyError, match=rf"{OTHER}.*read_only.*existing tables: {TAG}"):
            database.open_table(OTHER, DIM)
        assert_holds(database, ROWS)
    assert contents(filled) == before
    assert list(views.iterdir()) == []


def replaced(writer: RocksDatabase, version: int, rows: int = 2000) -> None:
    """Replace the table by another one, as a load does."""
    writer.drop_table(TAG)
    writer.open_table(TAG, DIM)
    load(writer, ROWS[:rows], version, LoadRecord(f"v{version}", rows, 2000))


def test_a_view_is_of_one_moment_whatever_is_written_meanwhile(filled: Path):
    def content(view: Path) -> dict[str, bytes]:
        return {file.name: file.read_bytes() for file in (*view.glob("CURRENT"), *view.glob("MANIFEST-*"), *view.glob("*.log"))}

    with opened(filled) as writer:
        load(writer, ROWS[:2000])

        def open_at(view: Path) -> None:
            before = content(view)
            replaced(writer, 1)
            insert(writer, ROWS)
            assert content(view) == before

        directory.opened_in_view(filled, open_at).cleanup()


@pytest.mark.parametrize("look", range(1, 6))
def test_a_table_that_is_replaced_while_a_view_is_made_is_whole(filled: Path, monkeypatch: pytest.MonkeyPatch, look: int):
    looks, files_of = count(1), directory.files_of
    with opened(filled) as writer:

        def replacing(path: Path) -> directory.Files:
            files = files_of(path)
            if next(looks) == look:
                replaced(writer, 1)
            return files

        monkeypatch.setattr(directory, "files_of", replacing)
        with opened(filled, read_only=True) as reader:
            whole = next(looks) > look
            assert_holds(reader, ROWS[:2000], 1 if whole else 0)


def test_a_log_that_is_deleted_while_a_view_is_made_is_not_missed(filled: Path, monkeypatch: pytest.MonkeyPatch):
    """RocksDB deletes logs later than it changes its list of files."""
    (filled / "000001.log").write_bytes(b"")

    def deleting(path: Path, oldest_needed: Callable[[], int]) -> CheckedLogs:
        if (filled / "000001.log").exists():
            (filled / "000001.log").unlink()
            raise DatabaseError("000001.log: no such file")
        return check_logs(path, oldest_needed)

    monkeypatch.setattr("hps.stores.rocks_db.database.check_logs", deleting)
    with opened(filled, read_only=True) as reader:
        assert_holds(reader, ROWS)


def test_read_only_waits_for_a_load_that_is_running(filled: Path, monkeypatch: pytest.MonkeyPatch):
    with opened(filled) as writer:
        for version in (1, 2):
            replaced(writer, version, 500)
            with monkeypatch.context() as patch:
                rest = LoadRecord(f"v{version}", 2000, 2000)
                patch.setattr("time.sleep", lambda _, version=version, rest=rest: load(writer, ROWS[:2000], version, rest))
                with opened(filled, read_only=True) as reader:
                    assert_holds(reader, ROWS[:2000], version)


def test_read_only_says_that_a_load_is_running_which_does_not_end(filled: Path):
    with opened(filled) as writer:
        replaced(writer, 1, 500)
        refused = pytest.raises(DatabaseTimeoutError, match=rf"{TAG}.*500 of 2000 rows of a load, and process \d+.*running")
        with refused, opened(filled, read_only=True, load_timeout_s=0):
            pass
        writer.drop_table(TAG)
        for there in ("it does not exist", "it has no rows, and no load"):
            with pytest.raises(DatabaseTimeoutError, match=there), opened(filled, read_only=True, load_timeout_s=0):
                pass
            writer.open_table(TAG, DIM)


def test_read_only_refuses_a_table_without_the_rows_of_its_record(filled: Path):
    with opened(filled) as writer:
        record = LoadRecord("z", 2000, 2000)
        replaced(writer, 1, 0)
        load(writer, ROWS[:0], record=record)
    with pytest.raises(DatabaseError, match=rf"{TAG}.*counts 2000 rows, and it has none.*hps load"):
        RocksDatabase(filled, read_only=True).open_table(TAG, DIM)


def test_a_table_that_waits_for_another_state_does_not_change_those_in_use(path: Path):
    with closing(RocksDatabase(path)) as writer:
        for tag in (TAG, OTHER):
            writer.open_table(tag, DIM)
            load(writer, ROWS, tag=tag)
        with closing(RocksDatabase(path, read_only=True)) as reader:
            reader.open_table(TAG, DIM)
            chunks = reader.scan(TAG, 1000)
            read = next(chunks)[0].size
            writer.drop_table(OTHER)
            for tag in (OTHER, "third"):
                writer.open_table(tag, DIM)
                load(writer, ROWS, 1, LoadRecord("y", 3000, 3000), tag)
            for tag in (OTHER, "third"):  # the second is not in the first view
                reader.open_table(tag, DIM)
                assert_holds(reader, ROWS, 0 if tag == OTHER else 1, tag)
                if tag == OTHER:
                    reader.release_table(OTHER)
            assert read + sum(keys.size for keys, _ in chunks) == ROWS.size
            replaced(writer, 2)
            writer.open_table("fourth", DIM)
            load(writer, ROWS, tag="fourth")
            with pytest.raises(DatabaseError, match=f"fourth.*of table {TAG}, which is in use here.*again"):
                reader.open_table("fourth", DIM)
            assert_holds(reader, ROWS)
            reader.release_table(TAG)
            reader.release_table("third")
            reader.open_table("fourth", DIM)
            reader.open_table(TAG, DIM)
            assert_holds(reader, ROWS[:2000], 2)


@pytest.mark.parametrize(("loads", "level"), [(True, "good"), (False, "wrong")])
def test_a_probe_takes_another_width_for_good_where_a_load_replaces_it(filled: Path, loads: bool, level: str):
    config = SimpleNamespace(path=str(filled), read_only=False, initialize_after_startup=loads)
    [result] = RocksDatabase.probe(config, {TableSpec("shop", "item", DIM + 1, 0.0, 1): 0})
    assert (result.level, f"holds vectors of {DIM} floats" in result.text) == (level, not loads)
    assert ("a start drops 1 of another width" in result.text) == loads


def test_a_probe_takes_a_table_that_is_still_to_be_loaded_for_good(filled: Path):
    with opened(filled) as writer:
        writer.open_table(OTHER, DIM)
    model, table = OTHER.split(".")[1:]
    tables = {TableSpec(model, table, DIM, 0.0, 1): 0}
    assert [one.tag for one in tables] == [OTHER]
    for read_only, level in ((False, "good"), (True, "wrong")):
        config = SimpleNamespace(path=str(filled), read_only=read_only, initialize_after_startup=not read_only)
        [result] = RocksDatabase.probe(config, tables)
        assert result.level == level, result.text


def test_a_probe_does_not_wait_for_a_load_that_is_running(filled: Path):
    config = SimpleNamespace(path=str(filled), read_only=True, initialize_after_startup=False)
    with opened(filled) as writer:
        replaced(writer, 1, 500)
        [result] = RocksDatabase.probe(config, {TableSpec("shop", "item", DIM, 0.0, 1): 0})
    assert result.level == "unreachable"
    assert "500 of 2000 rows" in result.text
    assert "is running" in result.text


def test_read_only_of_no_database_is_refused_and_makes_none(path: Path):
    with pytest.raises(DatabaseError, match=rf"{path}.*read_only.*no database"):
        RocksDatabase(path, read_only=True)
    assert not path.exists()


# -- opening and closing -----------------------------------------------------------------------------------------------


def test_the_registry_opens_what_the_configuration_says(path: Path):
    for read_only in (False, True):
        config = SimpleNamespace(path=str(path), num_threads=2, read_only=read_only, max_batch_size=10)
        with closing(implementation("database", "rocks_db").from_config(config)) as database:
            assert isinstance(database, RocksDatabase)
            assert (database.path, database.kind, database.read_only) == (path, "rocks_db", read_only)


def test_a_closed_database_can_be_opened_again_in_the_same_process(path: Path):
    keys = distinct_keys(100)
    for version in range(3):
        with opened(path) as database:
            if version:
                assert_holds(database, keys, version - 1)
            insert(database, keys, version)
            half_way = database.scan(TAG, 10)
            next(half_way)  # must not keep the directory locked
        with pytest.raises(NotReadyError):
            next(half_way)
        with pytest.raises(NotReadyError, match=str(path)):
            database.load_record(TAG)


def test_closing_while_others_read_and_write_ends_them_with_an_error(path: Path):
    calls = [0] * 3

    def use(nth: int, work: Callable[[], object]) -> None:
        with suppress(NotReadyError):
            while True:
                work()
                calls[nth] += 1

    def scan() -> None:
        assert sum(chunk.size for chunk, _ in database.scan(TAG, 1000)) == ROWS.size

    with opened(path) as database, ThreadPoolExecutor(3) as pool:
        insert(database, ROWS)
        works = (lambda: assert_holds(database, ROWS), scan, lambda: insert(database, ROWS))
        users = [pool.submit(use, nth, work) for nth, work in enumerate(works)]
        wait_until(lambda: min(calls), "each has had an answer")
        database.close()
        for user in users:
            user.result()
    with opened(path) as again:
        assert again.size(TAG) == ROWS.size


def test_closing_waits_for_calls_under_way_but_not_for_ever(path: Path):
    with opened(path, close_timeout_s=0.01) as database, database._calls:
        with pytest.raises(DatabaseTimeoutError, match=r"calls still running after 0\.01 s: 1;"):
            database.close()
        with pytest.raises(NotReadyError):
            database.size(TAG)


def test_writes_that_rocksdb_holds_back_end_in_a_timeout_and_then_go_on(table: RocksDatabase, monkeypatch: pytest.MonkeyPatch):
    clock, looks, family, keys = Clock(), [], table._engine.family(TAG), distinct_keys(100)

    def look_again_later(seconds: float) -> None:
        clock.now += seconds
        looks.append(clock.now)
        if len(looks) == 4:
            family.set_options({"level0_slowdown_writes_trigger": "1000", "level0_stop_writes_trigger": "1000"})

    monkeypatch.setattr(engine, "time", SimpleNamespace(monotonic=clock, sleep=look_again_later))
    monkeypatch.setattr(engine, "_STALL_POLL_S", 10.0)  # of 30 s
    family.set_options({"disable_auto_compactions": "false", "level0_file_num_compaction_trigger": "1000"})
    family.set_options({"level0_slowdown_writes_trigger": "1", "level0_stop_writes_trigger": "2"})
    while not table._engine.figure(family, "is-write-stopped"):
        insert(table, keys)
        family.flush()
    with pytest.raises(DatabaseTimeoutError, match=rf"{TAG}.*Write stall"):
        insert(table, keys, 1)
    assert looks == [10.0, 20.0, 30.0]
    assert_holds(table, keys)
    insert(table, keys, 2)
    assert len(looks) == 4
    assert_holds(table, keys, 2)


def test_only_one_table_is_made_of_many_threads_opening_it(database: RocksDatabase):
    with ThreadPoolExecutor(8) as pool:
        for made in [pool.submit(database.open_table, f"hps_et.m.{i % 3}", DIM) for i in range(24)]:
            made.result()
    assert database.tags() == ["hps_et.m.0", "hps_et.m.1", "hps_et.m.2"]


def test_a_relative_path_stays_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with opened("here/rocksdb") as database:
        os.chdir("/")
        load(database, distinct_keys(10))
    assert len(raw_items(tmp_path / "here" / "rocksdb", TAG)) == 10


def test_the_token_of_a_modified_table_is_kept_and_goes_with_the_table(path: Path):
    with opened(path) as database:
        load(database, ROWS)
        assert database.writer_token(TAG) is None
        assert database.renew_writer_token(TAG) is None  # nothing was modified
        database.delete(TAG, ROWS[:1])
        token = database.writer_token(TAG)
        insert(database, ROWS[:1])
        assert database.writer_token(TAG) == token is not None
    with opened(path) as database:
        assert database.writer_token(TAG) == token
        renewed = database.renew_writer_token(TAG)
        assert renewed == database.writer_token(TAG) != token
        database.drop_table(TAG)
        database.open_table(TAG, DIM)
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


# -- times -------------------------------------------------------------------------------------------------------------


def now_us() -> int:
    return time.time_ns() // 1000


def test_when_rows_were_written_online_is_as_durable_as_they_are(path: Path):
    times = [now_us()]
    with opened(path) as database:
        for rows in (slice(0, 1000), slice(900, 1900)):
            insert(database, ROWS[rows])
            times.append(now_us())
        database.delete(TAG, ROWS[:10])
    for read_only in (False, True):
        with opened(path, read_only=read_only) as database:
            written = database.written_at(TAG, ROWS)
            assert ((written[10:900] >= times[0]) & (written[10:900] <= times[1])).all()
            assert ((written[900:1900] >= times[1]) & (written[900:1900] <= times[2])).all()
            assert not written[:10].any()
            assert not written[1900:].any()
            assert database.written_at(TAG, ROWS[1899:1900].repeat(2)).tolist() == written[1899:1900].repeat(2).tolist()
            assert database.tags() == [TAG]
            assert sum(chunk.size for chunk, _ in database.scan(TAG, 700)) == database.size(TAG) == 1890
    assert [table.tag for table in RocksDatabase.inspect(path).tables] == [TAG]


def test_rows_of_a_load_were_written_by_it_unless_they_were_changed_since(table: RocksDatabase):
    keys = distinct_keys(1000)
    insert(table, keys[:100])
    before = now_us()
    load(table, keys)
    after = now_us()
    loaded = table.load_record(TAG)
    assert before <= loaded.loaded_at_us <= after
    assert set(table.written_at(TAG, keys).tolist()) == {loaded.loaded_at_us}
    load(table, keys[:0], 0, loaded)  # as where its files were moved
    insert(table, keys[:10], 1)
    written = table.written_at(TAG, keys)
    assert (written[:10] >= after).all()
    assert set(written[10:].tolist()) == {loaded.loaded_at_us}
    assert not table.written_at(TAG, ~keys).any()


def test_a_new_table_knows_nothing_of_the_times_of_an_older_one(path: Path):
    keys = distinct_keys(10)
    with opened(path) as database:
        for _ in range(2):
            insert(database, keys)
            database.drop_table(TAG)
            database.open_table(TAG, DIM)
            assert not database.written_at(TAG, keys).any()
        insert(database, keys)
    other = raw(path, rocksdict.Rdict.list_cf(str(path))[1:])
    other.drop_column_family(TAG)  # by a release that knows of no times
    other.close()
    with opened(path) as database:
        load(database, keys)
        assert set(database.written_at(TAG, keys).tolist()) == {database.load_record(TAG).loaded_at_us}


def test_later_releases_may_add_to_the_time_of_a_row(table: RocksDatabase):
    insert(table, ROWS[:1])
    value = (1234567).to_bytes(8, "little") + b"and a sequence number"
    table._engine.write({f"hps-written/{TAG}": ([ROWS[:1].tobytes()], [value])}, {}, "adding")
    assert table.written_at(TAG, ROWS[:1]).tolist() == [1234567]
