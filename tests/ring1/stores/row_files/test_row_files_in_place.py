"""Row files as devices read them: what a layout says, and that it is true while it is the present one."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hps.errors import DatabaseError, DeviceError, InvalidInputError
from hps.ground.memory.host_tables import VERSIONS_AT, HostLayout, HostTable
from hps.stores.base import LoadRecord, RowChanges
from hps.stores.hash_map.table import HashMapTable
from hps.stores.row_files.database import RowFilesDatabase
from hps.stores.row_files.in_place import PinnedFile
from hps.stores.row_files.row_file import RowFile
from hps.stores.row_files.writer import sorted_run, write_row_file
from hps.testing.caches import AWKWARD_KEYS, distinct_keys
from hps.testing.waiting import wait_until
from hps.types import FloatArray, KeyArray
from tests.fakes.populating_pinner import PopulatingPinner
from tests.tables.host_layout_reader import MirroredTable, array_at, read_pair

WIDTH = 5
KEYS = np.union1d(distinct_keys(2000), AWKWARD_KEYS)


def rows_of(keys: KeyArray, version: int = 0) -> FloatArray:
    return ((keys % 1000)[:, None] * 10 + np.arange(WIDTH) + 0.25 * version).astype(np.float32)


def check(layout: HostLayout | None, expected: dict[int, int]) -> None:
    """The layout has these versions of KEYS by key, and no other one."""
    assert layout is not None
    rows, found = read_pair(layout, KEYS, WIDTH)
    versions = np.array([expected.get(key, -1) for key in KEYS.tolist()])
    assert np.array_equal(found, versions >= 0)
    assert np.array_equal(rows[found], np.stack([rows_of(KEYS, v) for v in range(9)])[versions, np.arange(KEYS.size)][found])


@pytest.fixture
def pinner() -> Iterator[PopulatingPinner]:
    made = PopulatingPinner()
    yield made
    assert not made.faults


@pytest.fixture
def database(tmp_path: Path) -> Iterator[RowFilesDatabase]:
    made = RowFilesDatabase(tmp_path)
    made.open_table("t", WIDTH)
    load(made, KEYS)
    yield made
    made.close()


def load(database: RowFilesDatabase, keys: KeyArray, version: int = 0) -> None:
    database.load_chunk("t", keys, rows_of(keys, version), LoadRecord(f"files {version}", keys.size, keys.size))
    database.finish_load("t")


def pinned(database: RowFilesDatabase, pinner: PopulatingPinner) -> HostTable:
    host = database.host_table("t")
    host.pin(pinner)
    return host


def all_of(version: int) -> dict[int, int]:
    return dict.fromkeys(KEYS.tolist(), version)


def test_a_file_without_changes_is_read_alone(database, pinner):
    host = pinned(database, pinner)
    layout = host.layout()
    check(layout, all_of(0))
    assert not layout.words.any()
    assert layout.slabs.size == 0
    for address, size in ((layout.file.records, layout.file.rows * 28), (layout.file.starts, 4), (layout.file.fingerprints, 1)):
        assert pinner.holds(address, size)
    assert not read_pair(layout, np.setdiff1d(distinct_keys(500, seed=3), KEYS))[1].any()
    assert host.pinned_bytes >= layout.file.rows * 28


def test_a_change_is_shown_before_it_is_acknowledged(database, pinner):
    host, expected = pinned(database, pinner), all_of(0)
    for version, some in enumerate((KEYS[:10], KEYS[5:900], KEYS[:1]), 1):
        database.insert("t", some.copy(), rows_of(some, version))
        expected |= dict.fromkeys(some.tolist(), version)
        check(host.layout(), expected)
        gone = some[::3].copy()
        database.delete("t", gone)
        for key in gone.tolist():
            del expected[key]
        check(host.layout(), expected)
    new = np.setdiff1d(distinct_keys(50, seed=3), KEYS)
    database.insert(
        "t", np.repeat(new, 2), np.repeat(rows_of(new), 2, 0) + np.tile([[1], [0]], (new.size, 1)).astype(np.float32)
    )
    rows, found = read_pair(host.layout(), new)  # of equal keys, the last
    assert found.all()
    assert np.array_equal(rows, rows_of(new))


def test_many_changes_of_a_log_are_shown_as_they_are(database, pinner, monkeypatch):
    monkeypatch.setattr("hps.stores.row_files.in_place.SLICE_ROWS", 100)
    host, deleted = pinned(database, pinner), np.arange(KEYS.size) % 3 == 0
    database.follow_log("t")
    database.apply("t", RowChanges(KEYS, rows_of(KEYS, 1), np.arange(1, KEYS.size + 1), deleted), {})
    check(host.layout(), dict.fromkeys(KEYS[~deleted].tolist(), 1))


def test_changes_from_before_are_shown_too(database, pinner):
    database.insert("t", KEYS[:20].copy(), rows_of(KEYS[:20], 1))
    database.delete("t", KEYS[20:30].copy())
    expected = all_of(0) | dict.fromkeys(KEYS[:20].tolist(), 1)
    for key in KEYS[20:30].tolist():
        del expected[key]
    check(pinned(database, pinner).layout(), expected)


def test_a_new_file_replaces_the_map_at_once(database, pinner):
    host, shown = pinned(database, pinner), []
    numbers = {host.layout().number}
    host.watch(shown.append)
    for version in range(1, 4):
        some = KEYS[version :: version + 1].copy()
        database.insert("t", some, rows_of(some, version))
        database.delete("t", KEYS[:version].copy())
        before = read_pair(host.layout(), KEYS)
        shown.clear()
        assert database.seal("t")
        assert len(shown) == 1  # with nothing between the old pair and the new one
        after = read_pair(shown[0], KEYS)
        assert np.array_equal(before[1], after[1])
        assert np.array_equal(before[0][before[1]], after[0][after[1]])
        assert not shown[0].words[VERSIONS_AT]
        numbers.add(shown[0].number)
    assert len(numbers) == 4


def test_a_replaced_pair_is_changed_no_more(database, pinner):
    host = pinned(database, pinner)
    database.insert("t", KEYS[:50].copy(), rows_of(KEYS[:50], 1))
    old, expected = host.layout(), all_of(0) | dict.fromkeys(KEYS[:50].tolist(), 1)
    database.seal("t")
    database.insert("t", KEYS, rows_of(KEYS, 2))
    database.delete("t", KEYS[:7].copy())
    check(old, expected)
    assert all(pinner.holds(address, 1) for address in (old.file.records, int(old.words[VERSIONS_AT])))


def test_versions_of_two_pairs_are_never_equal(database, pinner):
    host, seen = pinned(database, pinner), set()
    for version in range(1, 4):
        database.insert("t", KEYS[:40].copy(), rows_of(KEYS[:40], version))
        versions = array_at(int(host.layout().words[VERSIONS_AT]), np.uint64, 1024 * 8)[::8]
        assert not versions.view(np.int64).min() < host.layout().number << 33
        assert seen.isdisjoint(versions.tolist())
        seen |= set(versions.tolist())
        database.seal("t")


def test_a_mirror_of_the_changes_is_current(database, pinner):
    host = pinned(database, pinner)
    ends: list[object] = []
    mirrored = None
    for version in range(1, 5):
        some = KEYS[:: 5 - version].copy()
        database.insert("t", some, rows_of(some, version))
        if mirrored is None:
            mirrored = MirroredTable(host)
            ends.append(mirrored.close)
        rows, there, copied = mirrored.read(some)
        assert there.all()
        assert copied.all()
        assert np.array_equal(rows[:, :-1], rows_of(some, version))
        if version == 2:
            database.seal("t")
    mirrored.close()


def test_each_mirror_has_each_change_once_until_it_ends(database, pinner):
    host, seen = pinned(database, pinner), ([], [])
    database.insert("t", KEYS[:1].copy(), rows_of(KEYS[:1], 1))
    ends = [host.mirror(calls.append) for calls in seen]
    counts = [len(calls) for calls in seen]
    for end in ends:
        database.insert("t", KEYS[:1].copy(), rows_of(KEYS[:1], 2))
        counts = [len(calls) - count for calls, count in zip(seen, counts, strict=True)]
        assert counts[1] > 0
        assert counts[0] == (counts[1] if end is ends[0] else 0)
        ends[0]()
        counts = [len(calls) for calls in seen]
    ends[1]()


def test_a_file_that_was_prepared_in_vain_is_neither_shown_nor_kept(database, pinner, tmp_path, monkeypatch):
    host = pinned(database, pinner)
    write_row_file(tmp_path / "other", "t", WIDTH, [sorted_run(KEYS[:10], rows_of(KEYS[:10], 1))])
    other = RowFile(tmp_path / "other")
    host.prepare(other)  # by a seal that failed after this
    assert pinner.holds(other.content.ctypes.data, 1)
    monkeypatch.setattr(host, "prepare", lambda file: None)
    load(database, KEYS, 1)
    check(host.layout(), all_of(1))
    assert not pinner.holds(other.content.ctypes.data, 1)


def test_a_load_over_changes_is_shown(database, pinner):
    host = pinned(database, pinner)
    database.insert("t", KEYS[:30].copy(), rows_of(KEYS[:30], 1))
    database.delete("t", KEYS[30:60].copy())
    expected = all_of(0) | dict.fromkeys(KEYS[:30].tolist(), 1)
    for key in KEYS[30:60].tolist():
        del expected[key]
    database.load_chunk("t", KEYS[:50], rows_of(KEYS[:50], 2), LoadRecord("files 2", 50, 50))
    check(host.layout(), expected)  # until the load is finished
    database.finish_load("t")
    check(host.layout(), expected | dict.fromkeys(KEYS[:50].tolist(), 2))


def test_a_table_without_a_file_has_a_map_alone(tmp_path, pinner):
    database = RowFilesDatabase(tmp_path)
    database.open_table("t", WIDTH)
    host = pinned(database, pinner)
    check(host.layout(), {})
    database.insert("t", KEYS, rows_of(KEYS, 1))
    check(host.layout(), all_of(1))
    assert host.layout().file is None
    database.delete("t", KEYS)
    check(host.layout(), {})
    database.seal("t")
    check(host.layout(), {})
    database.close()


def test_a_mapping_that_is_not_pinned_is_copied(database, pinner, monkeypatch):
    pin = pinner.pin

    def refused(address, size_bytes, *, read_only=False):
        if read_only:
            raise DeviceError("a driver that does not pin mappings of files")
        pin(address, size_bytes)

    monkeypatch.setattr(pinner, "pin", refused)
    host = pinned(database, pinner)
    check(host.layout(), all_of(0))
    assert pinner.holds(host.layout().file.records, host.layout().file.rows * 28)


@pytest.mark.parametrize("refuse_at", [1, 3])  # the file and its copy, or the map
def test_what_cannot_be_pinned_is_refused_and_left_unpinned(database, refuse_at):
    pinner = PopulatingPinner(refuse_at=refuse_at)
    host = database.host_table("t")
    with pytest.raises(DeviceError):
        host.pin(pinner)
    assert host.layout() is None
    assert host.pinned_bytes == 0
    assert not pinner.pinned
    check(pinned(database, PopulatingPinner()).layout(), all_of(0))


def test_a_file_that_memory_does_not_hold_is_refused(database, pinner, monkeypatch):
    monkeypatch.setattr("hps.stores.row_files.in_place.available_memory", lambda: (1000, "in a small machine"))
    with pytest.raises(DeviceError, match="in a small machine"):
        database.host_table("t").pin(pinner)
    assert not pinner.pinned


def test_a_file_is_copied_only_where_memory_holds_both(database, pinner, monkeypatch):
    free = iter([1 << 40, 1000])
    monkeypatch.setattr("hps.stores.row_files.in_place.available_memory", lambda: (next(free), "in a small machine"))
    monkeypatch.setattr(PinnedFile, "_copied", lambda self: pytest.fail("it was copied"))
    pinner.refuse_at = 1
    with pytest.raises(DeviceError, match="in a small machine"):
        database.host_table("t").pin(pinner)


def test_devices_read_no_more_where_a_change_cannot_be_shown(database, pinner, monkeypatch, caplog):
    host, shown = pinned(database, pinner), []
    host.watch(shown.append)

    def failed(*_arguments):
        raise DatabaseError("the system refused memory")

    monkeypatch.setattr(HashMapTable, "insert", failed)
    database.insert("t", KEYS[:3].copy(), rows_of(KEYS[:3], 1))
    assert shown == [None]
    assert host.layout() is None
    assert "refused memory" in caplog.text
    assert not pinner.pinned
    out, found = np.empty((3, WIDTH), np.float32), np.zeros(3, np.bool_)
    assert database.fetch("t", KEYS[:3].copy(), out, found) == 3
    with pytest.raises(InvalidInputError):
        host.pin(pinner)


@pytest.mark.parametrize("ends", ["drop", "close"])
def test_a_table_that_is_gone_is_unpinned(database, pinner, ends):
    host, shown = pinned(database, pinner), []
    database.insert("t", KEYS[:3].copy(), rows_of(KEYS[:3], 1))
    host.mirror(lambda changes: None)
    host.watch(lambda layout: shown.append(layout is None))
    if ends == "drop":
        database.drop_table("t")
    else:
        database.close()
    assert shown == [True]
    assert host.layout() is None
    assert host.pinned_bytes == 0
    assert not pinner.pinned


def test_a_replaced_file_is_unpinned_with_its_layout(database, pinner):
    host = pinned(database, pinner)
    database.insert("t", KEYS[:3].copy(), rows_of(KEYS[:3], 1))
    kept = host.layout()
    records, file = kept.file.records, kept.file
    database.seal("t")
    assert pinner.holds(records, 1)
    del kept
    assert not pinner.holds(records, 1)
    assert host.layout().file is not file
    check(host.layout(), all_of(0) | dict.fromkeys(KEYS[:3].tolist(), 1))


def test_a_large_file_is_unpinned_in_the_background(database, pinner, monkeypatch):
    monkeypatch.setattr("hps.stores.row_files.in_place._QUICK_BYTES", 0)
    host = pinned(database, pinner)
    records = host.layout().file.records
    database.insert("t", KEYS[:3].copy(), rows_of(KEYS[:3], 1))
    database.seal("t")
    wait_until(lambda: not pinner.holds(records, 1), "the replaced file is unpinned")
    check(host.layout(), all_of(0) | dict.fromkeys(KEYS[:3].tolist(), 1))


def test_a_new_map_is_shown_only_with_all_changes_although_it_grows(database, pinner, monkeypatch):
    monkeypatch.setattr("hps.stores.row_files.in_place.SLICE_ROWS", 100)
    host = pinned(database, pinner)
    database.insert("t", KEYS[:1].copy(), rows_of(KEYS[:1], 1))
    prepare, ends = host.prepare, []

    def prepare_beside_writes(file):
        database.insert("t", KEYS.copy(), rows_of(KEYS, 2))  # after the seal has read the changes
        prepare(file)
        ends.append(host.watch(lambda layout: check(layout, all_of(2))))

    monkeypatch.setattr(host, "prepare", prepare_beside_writes)
    database.seal("t")
    for end in ends:
        end()
    check(host.layout(), all_of(2))
