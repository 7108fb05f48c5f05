"""A row file that is served while it is copied from elsewhere: holes, faults, restarts, and what ends a download."""

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hps.errors import DatabaseCorruptError, DatabaseError, ModelFileChangedError, ModelSourceError
from hps.ground.memory.host_tables import BucketChanges, HostLayout
from hps.ground.shares import TableShare, with_share
from hps.statistics.snapshot import FileStatistics
from hps.stores.base import FilePeers, LoadRecord, LogPosition, Partition, PeerRead, RowChanges, RowFileSource
from hps.stores.row_files import download
from hps.stores.row_files.database import RowFilesDatabase
from hps.stores.row_files.layout import PAGE_BYTES, FileHead
from hps.stores.row_files.table import TableRecord
from hps.stores.row_files.writer import sorted_run, write_row_file
from hps.testing.waiting import wait_until
from tests.fakes.populating_pinner import PopulatingPinner
from tests.tables.host_layout_reader import read_pair

DIM, ROWS, TAG = 16, 20_000, "hps_et.m.t"
KEYS = np.random.default_rng(1).permutation(np.arange(ROWS, dtype=np.int64)) * 7 - 3
VECTORS = np.repeat(KEYS.astype(np.float32)[:, None], DIM, axis=1)
RECORD = LoadRecord("print", ROWS, ROWS)


class Elsewhere:
    """A file that is read by ranges, which may fail, wait or be damaged. *Thread-safe.*"""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.ranges: list[tuple[int, int]] = []
        self.looked_up: list[int] = []  # sizes of the ranges that the background did not read
        self.gate = threading.Event()  # ranges of the background wait for it
        self.gate.set()
        self.before: Callable[[int, int], None] = lambda offset, size: None
        self.flipped: set[int] = set()

    def read(self, offset: int, buffer: memoryview) -> None:
        in_background = "download" in threading.current_thread().name
        self.ranges.append((offset, len(buffer)))
        if not in_background:
            self.looked_up.append(len(buffer))
        self.before(offset, len(buffer))
        if in_background and not self.gate.wait(20):
            raise ModelSourceError("the gate stayed closed")
        part = bytearray(self.content[offset : offset + len(buffer)])
        for at in self.flipped:
            if offset <= at < offset + len(buffer):
                part[at - offset] ^= 4
        buffer[:] = part

    def source(self, size: int | None = None) -> RowFileSource:
        size = len(self.content) if size is None else size
        return RowFileSource("s3://b/rows", "1", size, None, self.read, parallel_reads=2, part_bytes=256 << 10)


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("file") / "rows"
    write_row_file(path, "", DIM, [sorted_run(KEYS, VECTORS)])
    return path.read_bytes()


@pytest.fixture
def elsewhere(content: bytes) -> Elsewhere:
    return Elsewhere(content)


@pytest.fixture
def database(tmp_path: Path) -> Iterator[RowFilesDatabase]:
    database = opened(tmp_path)
    yield database
    database.close()


def opened(directory: Path, **settings: bool) -> RowFilesDatabase:
    database = RowFilesDatabase(directory / "database", **settings)
    database.open_table(TAG, DIM)
    return database


def fetched(database: RowFilesDatabase, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    out, found = np.zeros((keys.size, DIM), np.float32), np.zeros(keys.size, np.bool_)
    database.fetch(TAG, keys, out, found)
    return out, found


def assert_right(database: RowFilesDatabase, seed: int = 2, count: int = 200) -> None:
    """Some keys, half of them absent, have the right answer."""
    keys = np.random.default_rng(seed).integers(-3, 14 * ROWS, count)
    out, found = fetched(database, keys)
    there = ((keys + 3) % 7 == 0) & (keys < 7 * ROWS - 3)
    assert (found == there).all()
    assert (out[there] == keys[there, None]).all()


def await_complete(database: RowFilesDatabase) -> None:
    wait_until(lambda: not database.downloads())
    record = database.load_record(TAG)
    assert record is not None
    assert record.complete


def files(database: RowFilesDatabase) -> list[str]:
    return sorted(path.name.removeprefix(TAG) for path in (database.path / "tables").iterdir())


def head_of(elsewhere: Elsewhere) -> FileHead:
    return FileHead.unpacked(elsewhere.content[:4096])


def test_lookups_are_right_before_the_file_is_there_and_after(database: RowFilesDatabase, elsewhere: Elsewhere) -> None:
    elsewhere.gate.clear()
    assert database.adopt(TAG, elsewhere.source(), RECORD) == "downloading"
    assert_right(database)
    [(there, size)] = database.downloads().values()
    assert 0 < there < size == len(elsewhere.content)
    record = database.load_record(TAG)
    assert record is not None
    assert not record.complete
    elsewhere.gate.set()
    await_complete(database)
    assert files(database) == [".json", ".rows"]
    assert (database.path / "tables" / f"{TAG}.rows").read_bytes() == elsewhere.content
    before = len(elsewhere.ranges)
    assert_right(database, 3)
    assert len(elsewhere.ranges) == before


def test_a_download_that_has_ended_leaves_its_file_alone(database: RowFilesDatabase, elsewhere: Elsewhere) -> None:
    """Devices are told by the thread that downloads, when the table has no download any more."""
    elsewhere.gate.clear()
    database.adopt(TAG, elsewhere.source(), RECORD)
    left = list[tuple[bool, list[str]]]()

    def look(layout: HostLayout | None) -> None:
        if layout is not None:
            left.append((not database.downloads(), files(database)))

    host = database.host_table(TAG)
    host.watch(look)
    host.pin(PopulatingPinner())
    elsewhere.gate.set()
    wait_until(lambda: left, "devices were told")
    assert left == [(True, [".json", ".rows"])]


def test_missing_parts_are_read_together_and_once(database: RowFilesDatabase, elsewhere: Elsewhere) -> None:
    elsewhere.gate.clear()
    database.adopt(TAG, elsewhere.source(), RECORD)
    elsewhere.looked_up.clear()
    assert_right(database)
    assert max(elsewhere.looked_up) > download.BLOCK_BYTES
    before = len(elsewhere.looked_up)
    assert_right(database)
    assert len(elsewhere.looked_up) == before
    elsewhere.gate.set()


def test_several_threads_get_right_answers_while_it_downloads(database: RowFilesDatabase, elsewhere: Elsewhere) -> None:
    database.adopt(TAG, elsewhere.source(), RECORD)
    errors: list[BaseException] = []

    def look_up(seed: int) -> None:
        try:
            for i in range(10):
                assert_right(database, 100 * seed + i, 50)
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=look_up, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    await_complete(database)


def test_a_failed_range_is_an_error_and_never_an_absent_key(database: RowFilesDatabase, elsewhere: Elsewhere) -> None:
    elsewhere.gate.clear()
    database.adopt(TAG, elsewhere.source(), RECORD)

    def fail(offset: int, size: int) -> None:
        raise ModelSourceError("no answer")

    elsewhere.before = fail
    with pytest.raises(DatabaseError, match="no answer"):
        assert_right(database)
    elsewhere.before = lambda offset, size: None
    assert_right(database)
    elsewhere.gate.set()


def test_the_background_tries_again(database: RowFilesDatabase, elsewhere: Elsewhere, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "_PAUSE_S", 0.001)
    failures = iter(range(3))

    def fail(offset: int, size: int) -> None:
        if "download" in threading.current_thread().name and next(failures, None) is not None:
            raise ModelSourceError("no answer")

    elsewhere.before = fail
    database.adopt(TAG, elsewhere.source(), RECORD)
    await_complete(database)
    assert_right(database)


def test_a_flipped_bit_is_never_answered(database: RowFilesDatabase, elsewhere: Elsewhere) -> None:
    elsewhere.flipped = {head_of(elsewhere).records_at + 8 + at for at in range(0, ROWS * 72, 4096)}
    database.adopt(TAG, elsewhere.source(), RECORD)
    with pytest.raises(DatabaseCorruptError, match="contradicts its checksum"):
        fetched(database, KEYS[:100])
    assert "rows" not in "".join(files(database))


def test_damaged_checksums_and_other_sizes_are_refused(database: RowFilesDatabase, elsewhere: Elsewhere) -> None:
    elsewhere.flipped = {head_of(elsewhere).sums_at + 9}
    with pytest.raises(DatabaseCorruptError, match="contradict its head"):
        database.adopt(TAG, elsewhere.source(), RECORD)
    elsewhere.flipped = set()
    with pytest.raises(Exception, match="bytes, expected"):
        database.adopt(TAG, elsewhere.source(len(elsewhere.content) - 4096), RECORD)
    assert database.downloads() == {}


@pytest.mark.parametrize("refused", [False, True])
def test_devices_wait_for_the_file_and_then_read_it(
    database: RowFilesDatabase, elsewhere: Elsewhere, caplog: pytest.LogCaptureFixture, refused: bool
) -> None:
    elsewhere.gate.clear()
    database.adopt(TAG, elsewhere.source(), RECORD)
    host, pinner = database.host_table(TAG), PopulatingPinner(refuse_at=1 if refused else None)
    shown: list[bool] = []
    mirrored: list[BucketChanges] = []
    host.watch(lambda layout: shown.append(layout is not None))
    host.pin(pinner)
    host.mirror(mirrored.append)
    database.insert(TAG, KEYS[:10].copy(), -VECTORS[:10])
    database.delete(TAG, KEYS[10:20].copy())
    assert (host.layout(), shown, mirrored) == (None, [], [])
    elsewhere.gate.set()
    wait_until(lambda: shown and (refused or mirrored), "devices were told")
    if refused:
        assert not shown[-1]
        assert "could not be pinned" in caplog.text
        assert not pinner.pinned
        return
    layout = host.layout()
    assert layout is not None
    rows, found = read_pair(layout, KEYS, DIM)
    assert (found == ~np.isin(KEYS, KEYS[10:20])).all()
    assert (rows[:10] == -VECTORS[:10]).all()
    assert (rows[20:] == VECTORS[20:]).all()


def test_devices_read_a_table_no_more_once_it_has_a_file_that_is_not_here(
    database: RowFilesDatabase, elsewhere: Elsewhere
) -> None:
    host = database.host_table(TAG)
    host.pin(PopulatingPinner())
    assert host.layout() is not None
    elsewhere.gate.clear()
    assert database.adopt(TAG, elsewhere.source(), RECORD) == "downloading"
    assert host.layout() is None
    elsewhere.gate.set()


def test_a_table_with_rows_of_its_own_is_not_downloaded_into(database: RowFilesDatabase, elsewhere: Elsewhere) -> None:
    database.insert(TAG, np.array([10**9]), np.full((1, DIM), 5, np.float32))
    assert database.adopt(TAG, elsewhere.source(), RECORD) == "refused"
    assert files(database) == [".json"]
    assert fetched(database, np.array([10**9]))[1].all()


def test_rows_that_are_downloaded_are_older_than_any_change_of_a_log(database: RowFilesDatabase, elsewhere: Elsewhere) -> None:
    none = RowChanges(np.empty(0, np.int64), np.empty((0, DIM), np.float32), np.empty(0, np.int64))
    database.follow_log(TAG)
    database.apply(TAG, none, {Partition("updates", 0): LogPosition("17", 40)})
    assert database.follow_log(TAG)
    database.adopt(TAG, elsewhere.source(), RECORD)
    assert database.follow_log(TAG) == {}


def test_a_download_ends_where_it_cannot_be_recorded(
    database: RowFilesDatabase, elsewhere: Elsewhere, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise DatabaseError("no space left")

    begun, begin = list[download.Download](), download.Download.__init__

    def note(self: download.Download, *given: Any, **named: Any) -> None:
        begun.append(self)
        begin(self, *given, **named)

    monkeypatch.setattr(download.Download, "__init__", note)
    monkeypatch.setattr(TableRecord, "write", full)
    with pytest.raises(DatabaseError, match="no space left"):
        database.adopt(TAG, elsewhere.source(), RECORD)
    assert [one._stopped for one in begun] == [True]
    assert database.downloads() == {}


def test_an_object_that_changes_ends_the_download(database: RowFilesDatabase, elsewhere: Elsewhere) -> None:
    elsewhere.gate.clear()
    database.adopt(TAG, elsewhere.source(), RECORD)

    def change(offset: int, size: int) -> None:
        raise ModelFileChangedError("it changed")

    elsewhere.before = change
    elsewhere.gate.set()
    with pytest.raises(DatabaseError, match="it changed"):
        assert_right(database)
    table = database._tables[TAG]
    wait_until(lambda: table._download is not None and table._download._failed)
    assert "hps_et.m.t.rows" not in os.listdir(database.path / "tables")


def test_a_full_disk_is_an_error_until_there_is_room(
    database: RowFilesDatabase, elsewhere: Elsewhere, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere.gate.clear()
    database.adopt(TAG, elsewhere.source(), RECORD)
    real = os.pwrite

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(download.os, "pwrite", full)
    with pytest.raises(DatabaseError, match="No space left"):
        assert_right(database)
    monkeypatch.setattr(download.os, "pwrite", real)
    assert_right(database)
    elsewhere.gate.set()
    await_complete(database)


def test_a_download_goes_on_after_a_restart(tmp_path: Path, elsewhere: Elsewhere) -> None:
    database = opened(tmp_path)
    elsewhere.gate.clear()
    database.adopt(TAG, elsewhere.source(), RECORD)
    assert_right(database)
    database.insert(TAG, np.array([10**9]), np.full((1, DIM), 5, np.float32))
    running = database._tables[TAG]._download
    stopping = threading.Thread(target=database.close)
    stopping.start()
    wait_until(lambda: running._stopped, "it is told to stop")
    elsewhere.gate.set()
    stopping.join()
    assert files_of(tmp_path) == [".extents", ".json", ".partial"]
    elsewhere.ranges.clear()
    elsewhere.gate.clear()
    database = opened(tmp_path)
    record = database.load_record(TAG)
    assert record is not None
    assert not record.complete
    assert record.modified
    assert database.adopt(TAG, elsewhere.source(), RECORD) == "downloading"
    assert_right(database)
    table = database._tables[TAG]
    assert table._download is not None
    assert table._download.resumed_bytes > 0
    elsewhere.gate.set()
    await_complete(database)
    assert fetched(database, np.array([10**9]))[1].all()
    record = database.load_record(TAG)
    assert record is not None
    assert record.modified
    database.close()


def files_of(directory: Path) -> list[str]:
    return sorted(path.name.removeprefix(TAG) for path in (directory / "database" / "tables").iterdir())


def test_a_file_with_holes_is_never_opened_without_its_download(tmp_path: Path, elsewhere: Elsewhere) -> None:
    database = opened(tmp_path)
    elsewhere.gate.clear()
    database.adopt(TAG, elsewhere.source(), RECORD)
    elsewhere.gate.set()
    database.close()
    database = opened(tmp_path)
    assert database._tables[TAG]._state.file is None or (database.load_record(TAG) or RECORD).complete
    database.close()


def test_a_download_that_was_killed_after_the_file_had_its_name_is_complete(tmp_path: Path, elsewhere: Elsewhere) -> None:
    database = opened(tmp_path)
    database.adopt(TAG, elsewhere.source(), RECORD)
    await_complete(database)
    database.close()
    for suffix in (".partial", ".extents"):  # the process ended after the file had its name
        (database.path / "tables" / f"{TAG}{suffix}").touch()
    path = database.path / "tables" / f"{TAG}.json"
    record = TableRecord.read(path)
    assert record is not None
    replace(record, load=replace(RECORD, rows_done=0)).write(path)
    elsewhere.ranges.clear()
    database = opened(tmp_path)
    assert files(database) == [".json", ".rows"]
    for _ in range(2):
        assert database.adopt(TAG, elsewhere.source(), RECORD) == "copied"
        assert database.downloads() == {}
        await_complete(database)
    assert elsewhere.ranges == [(0, PAGE_BYTES)] * 2, "its head"
    assert_right(database)
    database.close()


def test_a_dropped_table_leaves_nothing(database: RowFilesDatabase, elsewhere: Elsewhere) -> None:
    elsewhere.gate.clear()
    database.adopt(TAG, elsewhere.source(), RECORD)
    assert_right(database)
    elsewhere.gate.set()
    database.drop_table(TAG)
    assert files(database) == []
    database.open_table(TAG, DIM)
    assert not fetched(database, KEYS[:10])[1].any()


def test_online_changes_are_answered_while_it_downloads(database: RowFilesDatabase, elsewhere: Elsewhere) -> None:
    elsewhere.gate.clear()
    database.adopt(TAG, elsewhere.source(), RECORD)
    database.insert(TAG, KEYS[:1], np.full((1, DIM), 5, np.float32))
    database.delete(TAG, KEYS[1:2])
    assert database.seal(TAG) == 0
    for gate in (False, True):
        if gate:
            elsewhere.gate.set()
            await_complete(database)
        out, found = fetched(database, KEYS[:3])
        assert found.tolist() == [True, False, True]
        assert out[0, 0] == 5
        assert out[2, 0] == KEYS[2]
    assert database.size(TAG) == ROWS - 1


def test_a_database_may_wait_for_the_whole_file(tmp_path: Path, elsewhere: Elsewhere) -> None:
    database = opened(tmp_path, wait_for_download=True)
    database.adopt(TAG, elsewhere.source(), RECORD)
    assert database.downloads() == {}
    assert_right(database)
    database.close()


class Replicas(FilePeers):
    """Replicas with the file, of which the ranges from `first` on are wrong. *Thread-safe.*"""

    def __init__(self, content: bytes, wrong_from: int = 1 << 60) -> None:
        self.content, self.wrong_from = content, wrong_from
        self.gone = threading.Event()
        self.damaged: list[str] = []

    def read(self, content: str, size_bytes: int, offset: int, buffer: memoryview) -> PeerRead:
        assert (content, size_bytes) == (FileHead.unpacked(self.content[:4096]).content, len(self.content))
        if self.gone.is_set() or self.damaged:
            return PeerRead("", 1)
        buffer[:] = self.content[offset : offset + len(buffer)]
        if offset + len(buffer) > self.wrong_from:
            buffer[-1000] ^= 1
        return PeerRead("http://replica", 0)

    def report_damage(self, peer: str, content: str) -> None:
        self.damaged.append(peer)


def statistics(database: RowFilesDatabase) -> FileStatistics:
    found = database.stats(TAG).file
    assert found is not None
    return found


def test_a_file_comes_from_replicas_and_not_from_its_source(database: RowFilesDatabase, elsewhere: Elsewhere) -> None:
    peers = Replicas(elsewhere.content)
    assert database.adopt(TAG, replace(elsewhere.source(), peers=peers), RECORD) == "downloading"
    assert_right(database)
    await_complete(database)
    assert [size for _, size in elsewhere.ranges] == [4096]  # the head says what is right, so it is the source's
    found = statistics(database)
    assert (found.from_source, found.peer_failures) == (0, 0)
    assert found.from_peers >= len(elsewhere.content) - 4096 - 65536
    assert not peers.damaged


@pytest.mark.parametrize("part", ["records", "index", "sums"])
def test_wrong_bytes_of_a_replica_are_read_again_from_the_source(
    database: RowFilesDatabase, elsewhere: Elsewhere, part: str
) -> None:
    head = head_of(elsewhere)
    peers = Replicas(elsewhere.content, {"records": 5000, "index": head.starts_at, "sums": head.sums_at}[part])
    database.adopt(TAG, replace(elsewhere.source(), peers=peers), RECORD)
    assert_right(database)
    await_complete(database)
    assert_right(database, 3)
    assert (database.path / "tables" / f"{TAG}.rows").read_bytes() == elsewhere.content
    assert peers.damaged
    assert statistics(database).peer_failures >= 1


def test_replicas_may_go_away_in_the_middle(database: RowFilesDatabase, elsewhere: Elsewhere) -> None:
    peers = Replicas(elsewhere.content)
    database.adopt(TAG, replace(elsewhere.source(), peers=peers), RECORD)
    assert_right(database)
    peers.gone.set()
    assert_right(database, 4)
    await_complete(database)
    assert_right(database, 5)


def test_a_replica_reads_what_is_here_and_no_hole(database: RowFilesDatabase, elsewhere: Elsewhere) -> None:
    elsewhere.gate.clear()
    head = head_of(elsewhere)
    assert database.shared_file(head.content) is None
    database.adopt(TAG, elsewhere.source(), RECORD)
    assert_right(database)
    shared = database.shared_file(head.content)
    assert shared is not None
    assert shared.size_bytes == len(elsewhere.content)
    steps = range(0, len(elsewhere.content), 65536)
    there = [start for start in steps if shared.has(start, min(start + 65536, shared.size_bytes))]
    assert 0 < len(there) < len(steps)
    for start in there:
        stop = min(start + 65536, shared.size_bytes)
        assert shared.read(start, stop) == elsewhere.content[start:stop]
    assert shared.has(0, 4096)
    assert not shared.has(0, shared.size_bytes)
    assert shared.read(head.sums_at, shared.size_bytes) == elsewhere.content[head.sums_at :]  # checked before all others
    elsewhere.gate.set()
    await_complete(database)
    assert shared.has(0, shared.size_bytes)
    assert database.shared_file(head.content) is not None
    assert database.shared_file("") is None
    database.drop_table(TAG)
    assert database.shared_file(head.content) is None
    assert shared.read(0, shared.size_bytes) == elsewhere.content  # a reader keeps what it has


def test_a_replica_with_a_share_has_no_holes_to_send(database: RowFilesDatabase, elsewhere: Elsewhere) -> None:
    size = len(elsewhere.content)
    share = TableShare(1, 4)
    database.adopt(TAG, elsewhere.source(), replace(RECORD, fingerprint=with_share("print", share)))
    await_complete(database)
    shared = database.shared_file(head_of(elsewhere).content)
    assert shared is not None
    there = [start for start in range(4096, size, 4096) if shared.has(start, min(start + 4096, size))]
    assert 0.2 < len(there) / (size // 4096) < 0.4
    for start in there:
        assert shared.read(start, min(start + 4096, size)) == elsewhere.content[start : start + 4096]
    assert not shared.has(4096, size)
