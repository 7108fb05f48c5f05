"""Crashes and full disks at every durable step of a load, a seal, a merge and a drop of row files.

Each step (a write to a file or to RocksDB, an fsync, a rename, a removal) is counted. For a crash the directory is copied
there, which is what a killed process leaves, and each copy is opened and judged. For a full disk the step fails instead.
"""

import errno
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hps.errors import DatabaseError
from hps.stores.base import LoadRecord, LogPosition, Partition, RowChanges, RowFileSource
from hps.stores.rocks_db.engine import Engine
from hps.stores.row_files import table as table_module
from hps.stores.row_files.database import RowFilesDatabase
from hps.testing.databases import DIM, vectors_of

TAG, BASE = "hps_et.shop.users", "hps_et.shop.users@1"
ROWS = 400
LOADED = np.arange(ROWS, dtype=np.int64) * 7 - 900
WRITTEN, DELETED = LOADED[:50].copy(), LOADED[50:70].copy()

Rows = dict[int, bytes]


def rows_of(keys: np.ndarray, generation: int = 0) -> np.ndarray:
    return (vectors_of(keys, DIM) + np.float32(generation)).astype(np.float32)


def as_rows(keys: np.ndarray, generation: int = 0) -> Rows:
    return {int(key): row.tobytes() for key, row in zip(keys, rows_of(keys, generation), strict=True)}


def held(database: RowFilesDatabase, tag: str = TAG) -> Rows:
    """All rows, by a scan, which must agree with lookups."""
    rows: Rows = {}
    for keys, vectors in database.scan(tag, 100):
        rows |= {int(key): row.tobytes() for key, row in zip(keys, vectors, strict=True)}
    keys = np.unique(np.concatenate([LOADED, [-1]]))
    out, found = np.zeros((keys.size, DIM), np.float32), np.zeros(keys.size, np.bool_)
    database.fetch(tag, keys, out, found)
    looked_up = {int(key): row.tobytes() for key, row in zip(keys[found], out[found], strict=True)}
    assert looked_up == {key: row for key, row in rows.items() if key in set(keys.tolist())}
    return rows


class Disk:
    """Counts durable steps; copies the directory at each, or fails one. *Thread-safe.*"""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.images: list[tuple[Path, Any]] = []
        self.state: Any = None  # of the script, kept with each image
        self.fail_at: int | None = None
        self.steps = 0
        self.active = False
        self._lock = threading.Lock()

    def step(self) -> None:
        with self._lock:
            if not self.active:
                return
            self.steps += 1
            if self.fail_at is not None:
                if self.steps == self.fail_at:
                    raise OSError(errno.ENOSPC, "No space left on device")
                return
            self.active = False
            try:
                image = self.directory.with_name(f"image-{self.steps}")
                shutil.copytree(self.directory, image)
                self.images.append((image, self.state))
            finally:
                self.active = True


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    disk = Disk(tmp_path / "rows")

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            disk.step()
            return function(*arguments, **named)

        return call

    for name in ("pwrite", "fsync", "replace", "unlink"):
        monkeypatch.setattr(os, name, counted(getattr(os, name)))
    for name in ("write", "sync"):
        original = getattr(Engine, name)

        def engine_call(engine: Engine, *arguments: Any, original: Any = original, **named: Any) -> Any:
            if disk.fail_at is None:  # RocksDB's own failures are tested with it
                disk.step()
            return original(engine, *arguments, **named)

        monkeypatch.setattr(Engine, name, engine_call)
    return disk


class Settlers:
    """Runs the thread that makes a load durable when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.waiting: list[Callable[[], object]] = []
        monkeypatch.setattr(table_module, "new_thread", self._keep)

    def _keep(self, name: str, run: Callable[[], object], *, lasting: bool = True) -> Any:
        return threading.Thread(target=lambda: self.waiting.append(run))

    def run(self) -> None:
        while not self.waiting:
            threading.Event().wait(0.001)
        self.waiting.pop()()


@pytest.fixture
def settlers(monkeypatch: pytest.MonkeyPatch) -> Settlers:
    return Settlers(monkeypatch)


@contextmanager
def opened(path: Path) -> Iterator[RowFilesDatabase]:
    with closing(RowFilesDatabase(path, seal_share=0)) as database:
        database.open_table(TAG, DIM)
        yield database


def load(database: RowFilesDatabase, keys: np.ndarray = LOADED, generation: int = 0, fingerprint: str = "files") -> None:
    half = keys.size // 2
    for part, done in ((keys[:half], half), (keys[half:], keys.size)):
        record = LoadRecord(fingerprint, done, keys.size, checksum="0" * 16)
        database.load_chunk(TAG, part, rows_of(part, generation), record)
    database.finish_load(TAG)


def load_again(database: RowFilesDatabase, **files: Any) -> None:
    """What a start does with an incomplete load of the same files."""
    record = database.load_record(TAG)
    if record is not None and record.complete:
        return
    if record is not None and not database.keeps_changes(TAG) and record.modified:
        database.drop_table(TAG)
        database.open_table(TAG, DIM)
    load(database, **files)
    database.wait_until_durable(TAG)


def check_files(path: Path, tables: int = 1) -> None:
    """Nothing lies there but the tables' records and files."""
    names = sorted(file.name for file in (path / "tables").iterdir())
    assert len(names) <= 2 * tables
    assert all(name.endswith((".rows", ".json")) for name in names), names


def test_a_load_that_was_killed_anywhere_loses_no_later_write(disk: Disk, settlers: Settlers) -> None:
    after_load = as_rows(LOADED)
    with opened(disk.directory) as database:
        disk.active, disk.state = True, None
        load(database)
        disk.state = dict(after_load)
        expected = dict(after_load)
        for key in DELETED.tolist():
            del expected[key]
        disk.state = (dict(after_load), expected | as_rows(WRITTEN, 1))  # the writes may or may not be acknowledged
        database.insert(TAG, WRITTEN, rows_of(WRITTEN, 1))
        after_insert = after_load | as_rows(WRITTEN, 1)
        disk.state = (after_insert, expected | as_rows(WRITTEN, 1))
        database.delete(TAG, DELETED)
        expected |= as_rows(WRITTEN, 1)
        disk.state = (expected, expected)
        assert held(database) == expected
        settlers.run()
        record = database.load_record(TAG)
        assert record is not None
        assert (record.complete, record.modified) == (True, True)
        disk.active = False
    assert len(disk.images) > 10
    for image, state in disk.images:
        with opened(image) as database:
            check_files(image)
            threading_was, table_module.new_thread = table_module.new_thread, _at_once
            try:
                load_again(database)
            finally:
                table_module.new_thread = threading_was
            rows = held(database)
            if state is None or isinstance(state, dict):
                assert rows == after_load, image
            else:
                low, high = state
                for key in set(low) | set(high) | set(rows):
                    assert rows.get(key) in (low.get(key), high.get(key), as_rows(np.array([key]), 0)[key])
                    if low.get(key) == high.get(key):
                        assert rows.get(key) == low.get(key), (image, key)
        check_files(image)


def _at_once(name: str, run: Callable[[], object], *, lasting: bool = True) -> threading.Thread:
    return threading.Thread(target=run)


def test_a_seal_that_was_killed_anywhere_loses_nothing(disk: Disk) -> None:
    later = LOADED[60:90]
    with opened(disk.directory) as database:
        load(database)
        database.wait_until_durable(TAG)
        database.follow_log(TAG)
        position = {Partition("updates", 0): LogPosition("17", 40)}
        deleted = np.isin(LOADED[:70], DELETED)
        changes = RowChanges(LOADED[:70], rows_of(LOADED[:70], 1), np.arange(1, 71), deleted)
        assert database.apply(TAG, changes, position).all()
        expected = as_rows(LOADED) | as_rows(WRITTEN, 1)
        for key in DELETED.tolist():
            del expected[key]
        assert held(database) == expected
        disk.active, disk.state = True, expected
        assert database.seal(TAG) == 70
        assert held(database) == expected
        assert database.changed_rows(TAG) == 0
        assert database.seal(TAG) == 0
        disk.state = (expected, expected | as_rows(later, 2))
        database.insert(TAG, later, rows_of(later, 2))
        expected = expected | as_rows(later, 2)
        disk.state = expected
        assert database.seal(TAG) == later.size
        disk.active = False
        assert database.size(TAG) == len(expected) == len(held(database))
    assert len(disk.images) > 10
    for image, state in disk.images:
        with opened(image) as database:
            check_files(image)
            rows = held(database)
            low, high = state if isinstance(state, tuple) else (state, state)
            assert all(rows.get(key) in (low.get(key), high.get(key)) for key in set(low) | set(high) | set(rows)), image
            assert database.size(TAG) == len(rows)
            assert database.follow_log(TAG) == position
            stale = RowChanges(LOADED[:70], rows_of(LOADED[:70], 9), np.arange(1, 71) - 1)
            assert not database.apply(TAG, stale.at(np.arange(1, 70)), {}).any(), "older changes must not come back"
            database.seal(TAG)
            assert held(database) == rows
        with opened(image) as database:
            assert held(database) == rows
        check_files(image)


def test_a_dropped_table_that_was_killed_anywhere_is_there_or_gone(disk: Disk, settlers: Settlers) -> None:
    with opened(disk.directory) as database:
        load(database)
        settlers.run()
        database.insert(TAG, WRITTEN, rows_of(WRITTEN, 1))
        disk.active = True
        database.drop_table(TAG)
        disk.active = False
    for image, _ in disk.images:
        with closing(RowFilesDatabase(image, seal_share=0)) as database:
            gone = TAG not in database.tags()
            database.open_table(TAG, DIM)
            assert held(database) == ({} if gone else as_rows(LOADED) | as_rows(WRITTEN, 1))


def test_a_file_is_on_the_disk_before_its_name_and_the_name_before_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a loss of power would leave, which a copy of the directory does not show."""
    synced, unsynced = set[tuple[int, int]](), set[int]()  # files as they were when they were synced; directories
    fsync, rename = os.fsync, os.replace

    def state_of(file: int | str | Path) -> tuple[int, int]:
        status = os.stat(file)
        return status.st_ino, status.st_mtime_ns

    def noted_fsync(file: int) -> None:
        fsync(file)
        synced.add(state_of(file))
        unsynced.discard(os.stat(file).st_ino)

    def checked_rename(old: Path, new: Path) -> None:
        ours = Path(new).parent.name == "tables"
        assert state_of(old) in synced or not ours, old
        rename(old, new)
        if ours:
            unsynced.add(os.stat(Path(new).parent).st_ino)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "replace", checked_rename)
    with opened(tmp_path / "rows") as database:
        assert not unsynced
        load(database)
        database.wait_until_durable(TAG)
        assert not unsynced
        database.insert(TAG, WRITTEN, rows_of(WRITTEN, 1))
        assert database.seal(TAG) == WRITTEN.size
        assert not unsynced
    sealed = tmp_path / "rows" / "tables" / f"{TAG}.rows"
    for how, mode in (("linked", 0o444), ("copied", 0o666)):
        synced.clear()
        sealed.chmod(mode)
        source = RowFileSource(str(sealed), "1", sealed.stat().st_size, sealed, partial(read_part, sealed))
        with opened(tmp_path / how) as database:
            assert database.adopt(TAG, source, LoadRecord("files", ROWS, ROWS)) == how
            assert not unsynced
            assert held(database) == as_rows(LOADED) | as_rows(WRITTEN, 1)


def read_part(path: Path, offset: int, buffer: memoryview) -> None:
    with open(path, "rb") as file:
        file.seek(offset)
        file.readinto(buffer)


@pytest.mark.parametrize("verb", ["load", "seal"])
def test_a_disk_that_is_full_at_any_step_refuses_and_leaves_nothing_behind(tmp_path: Path, disk: Disk, verb: str) -> None:
    step = 0
    while True:
        step += 1
        disk.directory = tmp_path / f"{verb}-{step}"
        with opened(disk.directory) as database:
            expected = as_rows(LOADED)
            if verb == "seal":
                load(database)
                database.wait_until_durable(TAG)
                database.insert(TAG, WRITTEN, rows_of(WRITTEN, 1))
                expected |= as_rows(WRITTEN, 1)
            disk.steps, disk.fail_at, disk.active = 0, step, True
            failed = False
            try:
                load(database) if verb == "load" else database.seal(TAG)
                database.wait_until_durable(TAG)
            except DatabaseError:
                failed = True
            disk.active = False
            if not failed and disk.steps < step:
                break
            if verb == "seal":
                assert held(database) == expected
                database.seal(TAG)
            else:
                load_again(database)
            assert held(database) == expected
            check_files(disk.directory)
        with opened(disk.directory) as database:
            if verb == "load":
                load_again(database)
            assert held(database) == expected
            check_files(disk.directory)
    assert step > 4
