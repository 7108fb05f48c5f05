"""Row files over their life: loads that are not durable yet, seals beside writers, readers of other processes, damage."""

import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hps.errors import (
    CapacityError,
    DatabaseCorruptError,
    DatabaseError,
    DatabaseLockedError,
    DatabaseTimeoutError,
    NotReadyError,
    ReadOnlyError,
    UnknownTableError,
)
from hps.models.loading.table_load import LoadTargets, TableLoad
from hps.models.writer import write_sparse_model
from hps.stores.base import LoadRecord, LogPosition, Partition, RowChanges
from hps.stores.row_files import database as database_module
from hps.stores.row_files import residency
from hps.stores.row_files import table as table_module
from hps.stores.row_files import writer as writer_module
from hps.stores.row_files.database import RowFilesDatabase
from hps.stores.row_files.writer import sorted_run, write_row_file
from hps.testing.databases import DIM, TAG, fetched, vectors_of
from hps.types import TableSpec
from tests.fakes.memory_database import MemoryDatabase

KEYS = np.arange(300, dtype=np.int64) * 11 - 40
NEW = np.arange(5000, 5040, dtype=np.int64)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rows"


@pytest.fixture
def database(path: Path) -> Iterator[RowFilesDatabase]:
    with closing(RowFilesDatabase(path, seal_share=0.1, least_sealed_rows=40)) as database:
        database._sealer.stop.set()  # the tests say when
        database.open_table(TAG, DIM)
        load(database)
        yield database


def load(database: RowFilesDatabase) -> None:
    database.load_chunk(TAG, KEYS, vectors_of(KEYS, DIM), LoadRecord("files", KEYS.size, KEYS.size))
    database.finish_load(TAG)


def answers(database: RowFilesDatabase, keys: np.ndarray, version: int, *, present: bool = True) -> bool:
    rows, found = fetched(database, TAG, keys, DIM)
    return bool(found.all() and (rows == vectors_of(keys, DIM, version)).all()) if present else not found.any()


def sealing(database: RowFilesDatabase) -> Any:
    return database.stats(TAG).sealing


@pytest.fixture
def unsettled(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], object]]:
    """Threads that would make loads durable, not started."""
    waiting: list[Callable[[], object]] = []

    def keep(name: str, run: Callable[[], object], *, lasting: bool = True) -> Any:
        return SimpleNamespace(start=lambda: waiting.append(run))

    monkeypatch.setattr(table_module, "new_thread", keep)
    return waiting


def test_a_loaded_table_serves_before_it_is_durable(path: Path, unsettled: list) -> None:
    with closing(RowFilesDatabase(path)) as database:
        database.open_table(TAG, DIM)
        load(database)
        assert answers(database, KEYS, 0)
        assert database.load_record(TAG).complete
        assert not (path / "tables" / f"{TAG}.rows").exists()
        unsettled.pop()()
        assert database._tables[TAG].file.path == path / "tables" / f"{TAG}.rows"
        assert database._tables[TAG].file.path.exists()
        database.insert(TAG, NEW, vectors_of(NEW, DIM))
    with closing(RowFilesDatabase(path)) as database:
        database.open_table(TAG, DIM)
        assert database.load_record(TAG).complete
        assert answers(database, np.concatenate([KEYS, NEW]), 0)


def test_nobody_is_told_that_a_load_is_durable_before_its_record_is(
    path: Path, unsettled: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, written = table_module.TableRecord.write, []

    def checked(record: table_module.TableRecord, place: Path) -> None:
        with pytest.raises(DatabaseTimeoutError, match="were not durable"):
            database.wait_until_durable(TAG)
        write(record, place)
        written.append(record.load)

    with closing(RowFilesDatabase(path)) as database:
        database.open_table(TAG, DIM)
        load(database)
        monkeypatch.setattr(database._tables[TAG], "_write_timeout_s", 0.0)
        monkeypatch.setattr(table_module, "_SLOWEST_DISK", 1 << 60)
        monkeypatch.setattr(table_module.TableRecord, "write", checked)
        unsettled.pop()()
        assert written == [database.load_record(TAG)]
        assert written[0].complete
        database.wait_until_durable(TAG)


def test_the_same_files_are_loaded_again_below_what_was_written_since(path: Path, tmp_path: Path, unsettled: list) -> None:
    spec = TableSpec("shop", "item", DIM, 0.0, 1000)
    files = tmp_path / "files"
    write_sparse_model(files, iter([(KEYS, vectors_of(KEYS, DIM))]))
    with closing(RowFilesDatabase(path)) as database:
        TableLoad(spec, str(files), LoadTargets((database,))).run()
        database.insert(spec.tag, KEYS[:30], vectors_of(KEYS[:30], DIM, 1))
        database.delete(spec.tag, KEYS[30:40])
        shutil.copytree(path, tmp_path / "crashed")
        unsettled.pop()()
    with closing(RowFilesDatabase(tmp_path / "crashed")) as database:
        volatile = MemoryDatabase()
        report = TableLoad(spec, str(files), LoadTargets((database, volatile))).run()
        unsettled.pop()()
        assert report.differs
        assert database.load_record(spec.tag).complete
        assert database.load_record(spec.tag).modified
        for holder in (database, volatile):
            rows, found = fetched(holder, spec.tag, KEYS, DIM)
            assert not found[30:40].any()
            assert found[:30].all()
            assert found[40:].all()
            np.testing.assert_array_equal(rows[:30], vectors_of(KEYS[:30], DIM, 1))
            np.testing.assert_array_equal(rows[40:], vectors_of(KEYS[40:], DIM))


def test_a_write_while_the_same_files_are_loaded_again_does_not_complete_a_load_that_is_not_durable(
    path: Path, tmp_path: Path, unsettled: list
) -> None:
    with closing(RowFilesDatabase(path)) as database:
        database.open_table(TAG, DIM)
        load(database)
        database.load_chunk(TAG, KEYS, vectors_of(KEYS, DIM), LoadRecord("files", KEYS.size, KEYS.size))
        database.insert(TAG, KEYS[:5], vectors_of(KEYS[:5], DIM, 1))
        shutil.copytree(path, tmp_path / "crashed")
        unsettled.pop()()
    with closing(RowFilesDatabase(tmp_path / "crashed")) as database:
        database.open_table(TAG, DIM)
        assert not database.load_record(TAG).complete
        load(database)
        unsettled.pop()()
        assert answers(database, KEYS[:5], 1)
        assert answers(database, KEYS[5:], 0)


def test_nothing_is_sealed_before_files_are_loaded_again_below_it(path: Path, tmp_path: Path, unsettled: list) -> None:
    with closing(RowFilesDatabase(path)) as database:
        database.open_table(TAG, DIM)
        load(database)
        database.insert(TAG, KEYS[:5], vectors_of(KEYS[:5], DIM, 1))
        shutil.copytree(path, tmp_path / "crashed")
        unsettled.pop()()
    with closing(RowFilesDatabase(tmp_path / "crashed")) as database:
        database.open_table(TAG, DIM)
        table = database._tables[TAG]
        database.insert(TAG, KEYS[5:10], vectors_of(KEYS[5:10], DIM, 1))
        assert not table.is_due(0.0, 1, 0)
        assert database.seal(TAG) == 0
        load(database)
        unsettled.pop()()
        assert table.is_due(0.0, 1, 0)
        for _before_and_after_the_seal in range(2):
            assert answers(database, KEYS[:10], 1)
            assert answers(database, KEYS[10:], 0)
            database.seal(TAG)


def test_a_load_whose_older_writes_cannot_be_forgotten_is_sealed_with_none_of_them(
    database: RowFilesDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    database.insert(TAG, KEYS[:5], vectors_of(KEYS[:5], DIM, 1))
    record = LoadRecord("others", KEYS.size, KEYS.size)
    database.load_chunk(TAG, KEYS, vectors_of(KEYS, DIM, 2), record)

    def refused(*_: object) -> None:
        raise DatabaseError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(database._changes, "forget", refused)
        with pytest.raises(DatabaseError, match="disk is full"):
            database.finish_load(TAG)
    database.insert(TAG, KEYS[9:10], vectors_of(KEYS[9:10], DIM, 3))
    assert database.seal(TAG) == 0
    assert not database.load_record(TAG).complete
    database.load_chunk(TAG, KEYS, vectors_of(KEYS, DIM, 2), record)
    database.finish_load(TAG)
    assert answers(database, KEYS, 2)
    database.wait_until_durable(TAG)
    database.seal(TAG)
    assert answers(database, KEYS, 2)


def test_a_load_that_the_disk_refuses_late_stays_incomplete_and_is_loaded_again(
    path: Path, unsettled: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: Path) -> None:
        raise OSError(5, "Input/output error")

    with closing(RowFilesDatabase(path)) as database:
        database.open_table(TAG, DIM)
        load(database)
        with monkeypatch.context() as patch:
            patch.setattr(table_module, "sync_file", broken)
            unsettled.pop()()
        assert answers(database, KEYS, 0)
        assert not database.load_record(TAG).complete
        assert sealing(database).seal_failures == 1
        with damaged(database._tables[TAG].file.path), pytest.raises(DatabaseCorruptError):
            answers(database, KEYS, 0)
        database.insert(TAG, NEW, vectors_of(NEW, DIM))
        database.insert(TAG, KEYS[:5], vectors_of(KEYS[:5], DIM, 1))
        assert database.seal(TAG) == 0, "else the next start would load the files over what was sealed"
        load(database)
        unsettled.pop()()
        assert database.load_record(TAG).complete
        assert answers(database, KEYS[:5], 1)
        assert answers(database, np.concatenate([KEYS[5:], NEW]), 0)
        changed = vectors_of(KEYS, DIM, 2)
        database.load_chunk(TAG, KEYS, changed, LoadRecord("other files", KEYS.size, KEYS.size))
        database.finish_load(TAG)
        unsettled.pop()()
        assert answers(database, KEYS, 2), "rows of other files are later"
        assert len(list((path / "tables").iterdir())) == 2


@contextmanager
def damaged(file: Path) -> Iterator[None]:
    """A bit of its rows is another one."""
    file.chmod(0o644)
    for end in (False, True):
        with open(file, "r+b") as opened:
            opened.seek(4096 + 1000)
            byte = opened.read(1)[0]
            opened.seek(4096 + 1000)
            opened.write(bytes([byte ^ 4]))
        if not end:
            yield


def test_a_write_during_a_load_makes_the_table_differ_from_its_files(database: RowFilesDatabase) -> None:
    database.open_table("other", DIM)
    database.load_chunk("other", KEYS, vectors_of(KEYS, DIM), LoadRecord("files", KEYS.size, KEYS.size))
    database.insert("other", NEW, vectors_of(NEW, DIM))
    database.finish_load("other")
    assert database.load_record("other").modified
    assert not database.load_record(TAG).modified


def test_a_delta_is_merged_only_with_the_rows_of_its_base_in_a_table_without_any(database: RowFilesDatabase) -> None:
    def merged(tag: str, dim: int = DIM) -> bool:
        changes = [(KEYS[:5], vectors_of(KEYS[:5], dim, 1)), (KEYS[5:8], None)]
        return database.load_merged(tag, TAG, changes, 8, LoadRecord("delta", KEYS.size, KEYS.size))

    for tag, dim in (("merged", DIM), ("wider", DIM + 1), ("later", DIM)):
        database.open_table(tag, dim)
    assert not merged("wider", DIM + 1)
    assert merged("merged")
    for _ in range(2):
        rows, found = fetched(database, "merged", KEYS, DIM)
        assert np.array_equal(found, ~np.isin(KEYS, KEYS[5:8]))
        assert np.array_equal(rows[:5], vectors_of(KEYS[:5], DIM, 1))
        assert np.array_equal(rows[8:], vectors_of(KEYS[8:], DIM))
        assert not merged("merged")
    database.insert(TAG, NEW, vectors_of(NEW, DIM))
    assert not merged("later")


def test_rows_of_other_files_are_older_than_any_change_of_a_log(database: RowFilesDatabase) -> None:
    position = {Partition("updates", 0): LogPosition("17", 40)}
    database.follow_log(TAG)
    database.apply(TAG, RowChanges(KEYS[:5].copy(), vectors_of(KEYS[:5], DIM, 1), np.full(5, 5)), position)
    assert database.follow_log(TAG) == position
    database.load_chunk(TAG, KEYS, vectors_of(KEYS, DIM, 2), LoadRecord("other files", KEYS.size, KEYS.size))
    database.finish_load(TAG)
    assert database.follow_log(TAG) == {}
    assert database.apply(TAG, RowChanges(KEYS[:5].copy(), vectors_of(KEYS[:5], DIM, 3), np.full(5, 1)), {}).all()
    assert answers(database, KEYS[:5], 3)
    assert answers(database, KEYS[5:], 2)


def test_a_load_of_other_files_has_nothing_of_one_that_did_not_end(database: RowFilesDatabase) -> None:
    database.load_chunk(TAG, KEYS[:50], vectors_of(KEYS[:50], DIM, 1), LoadRecord("second files", 50, 60))
    database.load_chunk(TAG, NEW, vectors_of(NEW, DIM, 2), LoadRecord("third files", NEW.size, NEW.size))
    database.finish_load(TAG)
    assert answers(database, KEYS, 0)
    assert answers(database, NEW, 2)


@pytest.mark.parametrize(
    ("changed", "share", "least_rows", "most_bytes", "due"),
    [
        *[(30, 0.1, 30, 1 << 30, False), (31, 0.1, 30, 1 << 30, True)],  # of 300
        *[(31, 0.1, 31, 1 << 30, True), (31, 0.1, 32, 1 << 30, False)],
        *[(30, 0.1, 1, 30 * (4 * DIM + 64), False), (30, 0.1, 1, 30 * (4 * DIM + 64) - 1, True)],
    ],
)
def test_a_seal_is_due(
    database: RowFilesDatabase, changed: int, share: float, least_rows: int, most_bytes: int, due: bool
) -> None:
    database.insert(TAG, NEW[:changed], vectors_of(NEW[:changed], DIM))
    table = database._tables[TAG]
    assert table.is_due(share, least_rows, most_bytes) is due
    database.load_chunk(TAG, KEYS[:5], vectors_of(KEYS[:5], DIM), LoadRecord("other files", 5, 300))
    assert not table.is_due(share, least_rows, most_bytes), "while it is loaded"


def test_a_table_is_sealed_once_a_share_of_its_rows_has_changed(database: RowFilesDatabase) -> None:
    database.insert(TAG, NEW[:30], vectors_of(NEW[:30], DIM))
    database.seal_due()
    assert sealing(database).seals == 0, "fewer than least_sealed_rows"
    database.insert(TAG, NEW, vectors_of(NEW, DIM))
    assert sealing(database).changed_rows == 40
    database._sealer = None  # so that it is not being closed
    database.seal_due()
    assert (sealing(database).seals, sealing(database).sealed_rows, sealing(database).changed_rows) == (1, 40, 0)
    assert answers(database, np.concatenate([KEYS, NEW]), 0)
    assert database.size(TAG) == 340
    assert database.seal(TAG) == 0


def test_what_is_written_and_deleted_during_a_seal_stays(database: RowFilesDatabase) -> None:
    table = database._tables[TAG]
    database.insert(TAG, NEW, vectors_of(NEW, DIM))
    calls = []

    def write(rows: int) -> None:
        calls.append(rows)
        if len(calls) == 1:
            database.insert(TAG, NEW[:10], vectors_of(NEW[:10], DIM, 1))
            database.delete(TAG, NEW[10:20])
            database.delete(TAG, KEYS[:5])

    assert 40 <= table.seal(write) <= 65, "it may see later changes"
    assert sealing(database).changed_rows == 25
    for _ in range(2):
        assert answers(database, NEW[:10], 1)
        assert answers(database, np.concatenate([NEW[10:20], KEYS[:5]]), 0, present=False)
        assert answers(database, np.concatenate([NEW[20:], KEYS[5:]]), 0)
        assert database.size(TAG) == 300 - 5 + 30
        database.seal(TAG)
    assert sealing(database).changed_rows == 0


def test_a_lookup_during_which_a_seal_ends_has_the_changed_rows(
    database: RowFilesDatabase, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database.insert(TAG, NEW, vectors_of(NEW, DIM, 1))
    database.close()
    with closing(RowFilesDatabase(path, seal_share=0)) as reopened:  # whose changes are in RocksDB alone
        reopened.open_table(TAG, DIM)
        fetch = reopened._changes.fetch

        def seal_first(*given: Any) -> int:
            monkeypatch.setattr(reopened._changes, "fetch", fetch)
            assert reopened.seal(TAG) == NEW.size
            return fetch(*given)

        monkeypatch.setattr(reopened._changes, "fetch", seal_first)
        assert answers(reopened, NEW, 1)


def test_a_file_that_is_missing_or_another_tables_is_not_opened(database: RowFilesDatabase, path: Path) -> None:
    database.close()
    file = path / "tables" / f"{TAG}.rows"
    file.unlink()
    for problem in ("is missing, and 300 rows were loaded", "of table other, expected"):
        with closing(RowFilesDatabase(path)) as reopened, pytest.raises(DatabaseCorruptError, match=problem):
            reopened.open_table(TAG, DIM)
        write_row_file(file, "other", DIM, [sorted_run(KEYS, vectors_of(KEYS, DIM))])


def test_a_write_that_fails_halfway_is_answered_as_after_a_restart(
    database: RowFilesDatabase, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    insert = database._changes.insert

    def fail(tag: str, keys: np.ndarray, vectors: np.ndarray) -> None:
        insert(tag, keys[:5], vectors[:5])
        raise DatabaseError("the disk is full")

    monkeypatch.setattr(database._changes, "insert", fail)
    with pytest.raises(DatabaseError, match="full"):
        database.insert(TAG, KEYS[:10].copy(), vectors_of(KEYS[:10], DIM, 1))
    for _ in range(2):
        assert answers(database, KEYS[:5], 1)
        assert answers(database, KEYS[5:], 0)
        database.seal(TAG)


@pytest.mark.parametrize("verb", ["insert", "delete", "apply"])
def test_a_table_is_known_to_differ_from_its_files_before_it_does(
    database: RowFilesDatabase, path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    database.wait_until_durable(TAG)
    database.follow_log(TAG)
    write, known = getattr(database._changes, verb), list[bool]()

    def note(*given: Any) -> Any:
        record = table_module.TableRecord.read(path / "tables" / f"{TAG}.json")
        known.append(record is not None and record.load is not None and record.load.modified)
        return write(*given)

    monkeypatch.setattr(database._changes, verb, note)
    rows = vectors_of(KEYS[:5], DIM, 1)
    changes = RowChanges(KEYS[:5].copy(), rows, np.arange(1, 6))
    {
        "insert": lambda: database.insert(TAG, KEYS[:5].copy(), rows),
        "delete": lambda: database.delete(TAG, KEYS[:5].copy()),
        "apply": lambda: database.apply(TAG, changes, {}),
    }[verb]()
    assert known == [True]


def test_deletions_of_a_log_are_made_beside_changes_that_come_too_late(database: RowFilesDatabase) -> None:
    database.follow_log(TAG)
    database.apply(TAG, RowChanges(KEYS[:10], vectors_of(KEYS[:10], DIM, 1), np.full(10, 5)), {})
    keys, deleted = KEYS[5:15].copy(), np.arange(10) % 2 == 0
    changes = RowChanges(keys, vectors_of(keys, DIM, 2), np.repeat([4, 6], 5), deleted)
    assert np.array_equal(database.apply(TAG, changes, {}), np.arange(10) >= 5)
    assert answers(database, KEYS[:10], 1)
    assert answers(database, keys[5::2].copy(), 2)
    assert answers(database, keys[6::2].copy(), 0, present=False)


def test_a_write_that_waited_for_a_drop_is_refused(database: RowFilesDatabase) -> None:
    table = database._tables[TAG]
    database.drop_table(TAG)
    database.open_table(TAG, DIM)
    with pytest.raises(UnknownTableError, match="dropped meanwhile"):
        table.insert(NEW, vectors_of(NEW, DIM))
    assert answers(database, NEW, 0, present=False)


def test_a_table_that_is_dropped_before_it_is_durable_leaves_nothing(
    path: Path, unsettled: list, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(RowFilesDatabase(path)) as database:
        database.open_table(TAG, DIM)
        load(database)
        database.drop_table(TAG)
        assert not list((path / "tables").iterdir())
        unsettled.pop()()
        assert not list((path / "tables").iterdir())
    assert "could not be made durable" not in caplog.text


def test_rows_are_as_old_as_their_load_or_their_last_write(database: RowFilesDatabase) -> None:
    loaded = database.load_record(TAG).loaded_at_us
    database.insert(TAG, KEYS[:1].copy(), vectors_of(KEYS[:1], DIM, 1))
    written, unchanged, absent = database.written_at(TAG, np.array([KEYS[0], KEYS[1], NEW[0]])).tolist()
    assert written > loaded == unchanged > absent == 0


def test_a_scan_that_begins_while_a_seal_ends_has_the_changed_rows(
    database: RowFilesDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    database.insert(TAG, KEYS[:30], vectors_of(KEYS[:30], DIM, 1))
    database.delete(TAG, KEYS[30:40])
    changed_keys = database._changes.changed_keys

    def seal_first(tag: str) -> Iterator[np.ndarray]:
        monkeypatch.setattr(database._changes, "changed_keys", changed_keys)
        assert database.seal(tag) == 40
        return changed_keys(tag)

    monkeypatch.setattr(database._changes, "changed_keys", seal_first)
    rows = {
        int(key): row.tobytes() for keys, vectors in database.scan(TAG, 100) for key, row in zip(keys, vectors, strict=True)
    }
    expected = np.concatenate([vectors_of(KEYS[:30], DIM, 1), vectors_of(KEYS[40:], DIM)])
    keys = np.concatenate([KEYS[:30], KEYS[40:]]).tolist()
    assert rows == {key: row.tobytes() for key, row in zip(keys, expected, strict=True)}


def test_a_seal_ends_when_the_database_closes_and_a_failure_is_tried_again_later(
    database: RowFilesDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    database.insert(TAG, NEW, vectors_of(NEW, DIM))
    database.seal_due()  # its stop is set, as by `close`
    assert sealing(database).seals == 0
    database._sealer = None

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(writer_module.os, "pwrite", full)
        with pytest.raises(DatabaseError, match="No space left"):
            database.seal_due()
    assert database._tables[TAG]._recent is None, "keys are gathered no more"
    database.seal_due()
    assert sealing(database).seals == 0, "not before a while"
    database._retry_at.clear()
    database.seal_due()
    assert sealing(database).seals == 1
    assert answers(database, np.concatenate([KEYS, NEW]), 0)


def test_a_table_that_cannot_be_sealed_stops_no_other_one_and_is_forgotten_with_its_failure(
    database: RowFilesDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(tag: str) -> None:
        database.open_table(tag, DIM)
        database.insert(tag, NEW, vectors_of(NEW, DIM))

    def refuse(progress: Callable[[int], None]) -> int:
        raise DatabaseError("refused")

    database._sealer = None
    fill(TAG)
    fill("other")
    monkeypatch.setattr(database._tables[TAG], "seal", refuse)
    with pytest.raises(DatabaseError, match="refused"):
        database.seal_due()
    assert database.stats("other").sealing.seals == 1
    database.drop_table(TAG)
    fill(TAG)
    database.seal_due()
    assert sealing(database).seals == 1


def test_a_seal_that_ends_while_it_forgets_reads_what_is_left_from_a_file(
    database: RowFilesDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RocksDB sorts the memtable of the changes for each key that is read from it, so 200,000 keys took a minute."""
    table, forgotten = database._tables[TAG], []
    engine, calls = database._changes._engine, []
    before = table.file
    database.insert(TAG, NEW, vectors_of(NEW, DIM))
    monkeypatch.setattr(table_module, "_FORGET_ROWS", 10)
    for name in ("flush", "get"):
        real = getattr(engine, name)
        monkeypatch.setattr(engine, name, lambda *given, name=name, real=real: (calls.append(name), real(*given))[1])

    def close(rows: int) -> None:
        if table.file is not before:
            forgotten.append(rows)
            if len(forgotten) == 2:
                calls.clear()
                raise NotReadyError("the database is being closed")

    with pytest.raises(NotReadyError):
        table.seal(close)
    assert calls == ["flush", "get"]
    assert sealing(database).changed_rows == 20
    assert answers(database, np.concatenate([KEYS, NEW]), 0)
    assert database.size(TAG) == 340
    assert database.seal(TAG) == 20
    assert sealing(database).changed_rows == 0
    assert answers(database, np.concatenate([KEYS, NEW]), 0)


def test_a_load_replaces_earlier_writes_once_it_is_finished_and_keeps_later_ones(
    database: RowFilesDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, again, gone = KEYS[:40], KEYS[40:60], KEYS[60:70]
    for keys in (written, again):
        database.insert(TAG, keys.copy(), vectors_of(keys, DIM, 1))
    database.delete(TAG, gone.copy())
    record = LoadRecord("others", KEYS.size, KEYS.size)
    database.load_chunk(TAG, KEYS[:150], vectors_of(KEYS[:150], DIM, 2), record)
    database.insert(TAG, again.copy(), vectors_of(again, DIM, 3))  # which is later than the load
    database.insert(TAG, NEW, vectors_of(NEW, DIM, 3))

    def check_before() -> None:
        assert answers(database, written, 1)
        assert answers(database, gone, 0, present=False)

    check_before()
    database.load_chunk(TAG, KEYS[150:], vectors_of(KEYS[150:], DIM, 2), record)
    check_before()
    forget, looks = database._changes.forget, []

    def looked_at(tag: str, keys: np.ndarray) -> None:
        for step in (lambda: None, lambda: forget(tag, keys)):
            step()
            looks.append(keys.size)
            assert answers(database, np.concatenate([written, gone]), 2), "neither the write nor the load"

    monkeypatch.setattr(database._changes, "forget", looked_at)
    database.finish_load(TAG)
    assert looks == [50, 50]
    for _before_and_after_the_next_seal in range(2):
        assert answers(database, np.concatenate([written, gone, KEYS[70:]]), 2)
        assert answers(database, np.concatenate([again, NEW]), 3)
        assert database.size(TAG) == 340
        monkeypatch.undo()
        database.seal(TAG)


def test_a_load_that_fails_or_is_given_up_leaves_writes(database: RowFilesDatabase, monkeypatch: pytest.MonkeyPatch) -> None:
    database.insert(TAG, KEYS[:40].copy(), vectors_of(KEYS[:40], DIM, 1))
    database.load_chunk(TAG, KEYS, vectors_of(KEYS, DIM, 2), LoadRecord("given up", KEYS.size, KEYS.size))
    database.load_chunk(TAG, KEYS[10:], vectors_of(KEYS[10:], DIM, 3), LoadRecord("others", KEYS.size, KEYS.size))

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(writer_module.os, "pwrite", full)
        with pytest.raises(DatabaseError, match="No space left"):
            database.finish_load(TAG)
    assert answers(database, KEYS[:40], 1)
    assert answers(database, KEYS[40:], 0)


def test_two_seals_of_a_table_exclude_each_other(database: RowFilesDatabase) -> None:
    table = database._tables[TAG]
    database.insert(TAG, NEW, vectors_of(NEW, DIM))
    counts: list[int] = []
    second = threading.Thread(target=lambda: counts.append(table.seal()))

    def start(_: int) -> None:
        if not second.is_alive() and not counts:
            second.start()

    counts_first = table.seal(start)
    second.join(30)
    assert (counts_first, counts) == (40, [0])
    assert answers(database, NEW, 0)


def test_a_resident_table_holds_its_present_file_alone(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = SimpleNamespace(mlock=lambda *_: 0, munlock=lambda *_: 0, madvise=lambda *_: 0)
    monkeypatch.setattr(residency, "_library", library)
    monkeypatch.setattr(residency, "lockable_bytes", lambda: 1 << 40)
    with closing(RowFilesDatabase(path, seal_share=0, resident=["item$"])) as database:
        database.open_table(TAG, DIM)
        load(database)
        files = [database._tables[TAG].file]
        database.insert(TAG, NEW, vectors_of(NEW, DIM))
        database.seal(TAG)
        files.append(database._tables[TAG].file)
        assert [file.held_bytes for file in files] == [0, files[1].head.size_bytes]
        database.drop_table(TAG)
        assert files[1].held_bytes == 0


def test_other_processes_read_what_is_complete_and_only_one_writes(database: RowFilesDatabase, path: Path) -> None:
    database.wait_until_durable(TAG)
    with pytest.raises(DatabaseLockedError):
        RowFilesDatabase(path)
    with closing(RowFilesDatabase(path, read_only=True, load_timeout_s=0)) as reader:
        reader.open_table(TAG, DIM)
        database.insert(TAG, KEYS[:5], vectors_of(KEYS[:5], DIM, 1))
        database.seal(TAG)
        assert answers(reader, KEYS, 0), "a reader has the rows of its opening"
        with pytest.raises((ReadOnlyError, DatabaseTimeoutError), match="never"):
            reader.open_table("never", DIM)
        database.open_table("loading", DIM)
        database.load_chunk("loading", KEYS, vectors_of(KEYS, DIM), LoadRecord("files", KEYS.size, KEYS.size))
        with pytest.raises(DatabaseError, match="interrupted"):  # not by another process
            reader.open_table("loading", DIM)
    with closing(RowFilesDatabase(path, read_only=True)) as reader:
        reader.open_table(TAG, DIM)
        assert answers(reader, KEYS[:5], 1)
        assert answers(reader, KEYS[5:], 0)


def test_rows_without_room_are_refused_and_the_refusal_names_other_places(database: RowFilesDatabase, path: Path) -> None:
    with pytest.raises(CapacityError, match=rf"{path}.*persistent_db.path; for a repository --state of `hps serve`"):
        database.check_room([("large", DIM, 10**12)])


def test_an_inspection_counts_each_row_once(database: RowFilesDatabase, path: Path) -> None:
    repeated = np.repeat(KEYS[:5], 2)
    database.insert(TAG, repeated, vectors_of(repeated, DIM, 1))
    absent = KEYS.max() + 1 + np.arange(3)
    database.insert(TAG, absent, vectors_of(absent, DIM, 1))
    database.delete(TAG, np.concatenate([KEYS[4:7], absent[:1]]))
    rows = database.size(TAG)
    database.close()
    [table] = RowFilesDatabase.inspect(path).tables
    assert table.rows == rows == KEYS.size - 3 + 2


def test_an_inspection_finds_damaged_and_missing_files(database: RowFilesDatabase, path: Path) -> None:
    database.close()
    assert not RowFilesDatabase.inspect(path).damages
    file = path / "tables" / f"{TAG}.rows"
    file.chmod(0o644)
    content = bytearray(file.read_bytes())
    content[4096 + 1000] ^= 4
    file.write_bytes(content)
    report = RowFilesDatabase.inspect(path)
    assert len(report.damages) == len(report.cures) == 1
    assert "damaged" in report.tables[0].damage
    file.unlink()
    assert "missing" in RowFilesDatabase.inspect(path).damages[0]
    with pytest.raises(DatabaseError):
        RowFilesDatabase.inspect(path.parent)


def test_a_record_that_cannot_be_read_is_dropped_by_force_alone(database: RowFilesDatabase, path: Path) -> None:
    database.close()
    (path / "tables" / f"{TAG}.json").write_text("{")
    with closing(RowFilesDatabase(path)) as reopened:
        with pytest.raises(DatabaseCorruptError, match="record of a table"):
            reopened.open_table(TAG, DIM)
        assert not reopened.must_drop(TAG, DIM)
        assert reopened.must_drop(TAG, DIM, force=True)
        reopened.drop_table(TAG)
        reopened.open_table(TAG, DIM)
        assert answers(reopened, KEYS, 0, present=False)


def test_room_is_needed_for_further_rows_and_memory_for_resident_tables(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=100_000, total=200_000))
    monkeypatch.setattr(database_module, "available_memory", lambda: (100_000, "in this test"))
    with closing(RowFilesDatabase(path, resident=["held$"])) as database:
        database.open_table(TAG, DIM)
        load(database)
        database.check_room([(TAG, DIM, KEYS.size), ("more", DIM, 1700)])
        database.check_room([("held", DIM, 1000)])
        with pytest.raises(CapacityError, match="on its file system"):
            database.check_room([(TAG, DIM, KEYS.size + 1), ("more", DIM, 1700)])
        monkeypatch.setattr(database_module, "available_memory", lambda: (1000, "in this test"))
        database.check_room([("more", DIM, 1000)])
        with pytest.raises(CapacityError, match="1,000 resident rows of table held"):
            database.check_room([("held", DIM, 1000), ("more", DIM, 10)])


def test_a_probe_says_what_a_start_would_find(database: RowFilesDatabase, path: Path, tmp_path: Path) -> None:
    config = SimpleNamespace(path=str(path), read_only=False, initialize_after_startup=True)
    spec = TableSpec("shop", "item", DIM, 0.0, 10)
    (result,) = RowFilesDatabase.probe(config, {spec: 1000})
    assert result.level == "good" or "has it open" in result.text
    database.close()
    (result,) = RowFilesDatabase.probe(config, {spec: 1000})
    assert "holds 1 of 1 tables" in result.text
    (result,) = RowFilesDatabase.probe(SimpleNamespace(**{**vars(config), "path": str(tmp_path / "new")}), {spec: 1000})
    assert "would be created" in result.text
    (result,) = RowFilesDatabase.probe(SimpleNamespace(**{**vars(config), "path": str(path / "tables")}), {spec: 1000})
    assert "other files" in result.text
    wider = TableSpec("shop", "item", DIM + 1, 0.0, 10)
    (result,) = RowFilesDatabase.probe(config, {wider: 1000})
    assert result.level == "good", "the load replaces it"
    (result,) = RowFilesDatabase.probe(config, {wider: 1 << 60})
    assert result.level == "wrong", "which needs room"
    table_module.TableRecord(DIM + 2).write(path / "tables" / f"{TAG}.json")
    (result,) = RowFilesDatabase.probe(config, {wider: 1000})
    assert result.level == "wrong", "its rows were all written online"
    load_record = LoadRecord("files", KEYS.size, KEYS.size)
    table_module.TableRecord(DIM, load_record).write(path / "tables" / f"{TAG}.json")
    config.initialize_after_startup = False
    (result,) = RowFilesDatabase.probe(config, {wider: 1000})
    assert result.level == "wrong"
    assert f"holds rows of {DIM} words, expected {DIM + 1}" in result.text


def test_a_database_that_closes_ends_its_seal_and_seals_nothing_more(database: RowFilesDatabase) -> None:
    stop, told = threading.Event(), list[bool]()
    database._sealer = SimpleNamespace(stop=stop, join=lambda timeout_s: told.append(stop.is_set()))
    database.close()
    assert told == [True]
    with pytest.raises(NotReadyError):
        database.seal(TAG)
