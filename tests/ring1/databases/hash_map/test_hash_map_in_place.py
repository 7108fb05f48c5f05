"""The hash map as devices read it in place: what is pinned, what is shown, and how long it stays."""

import ctypes
import gc
import logging
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from hps.databases.hash_map import in_place
from hps.databases.hash_map import memory as hash_map_memory
from hps.databases.hash_map.database import HashMapDatabase
from hps.databases.hash_map.layout import DENSE_ROWS, SEGMENT_BITS, VERSIONS
from hps.databases.hash_map.memory import PAGE_BYTES
from hps.errors import DeviceError, InvalidInputError, NotReadyError, UnknownTableError
from hps.testing.databases import DIM, TAG, distinct_keys, vectors_of
from tests.fakes.populating_pinner import PopulatingPinner, named_by
from tests.tables.hash_map_inspection import inspect, keys_with_hash, mixed
from tests.tables.host_layout_reader import read_in_place, without_buckets


@pytest.fixture
def pinner():
    """It has to have seen no breach of its rules, and nothing pinned in the end."""
    pinner = PopulatingPinner()
    yield pinner
    gc.collect()
    assert pinner.faults == []
    assert pinner.pinned == {}


@pytest.fixture(params=["one array", "segments"])
def database(request, monkeypatch, pinner):
    if request.param == "segments":
        monkeypatch.setattr(hash_map_memory, "SEGMENTED_FROM", 2)
    database = opened(initial_buckets=1)
    yield database
    database.close()


def opened(dim=DIM, **options):
    database = HashMapDatabase(**options)
    database.open_table(TAG, dim)
    return database


def fill(database, keys, version=0, dim=DIM):
    database.insert(TAG, keys, vectors_of(keys, dim, version))


def assert_readable(layout, pinner, keys, version=0):
    for address, size_bytes in named_by(layout.words, layout.slabs):
        assert pinner.holds(address, size_bytes)
    assert_read(layout, keys, version)


def assert_read(layout, keys, version=0):
    out, answered = read_in_place(layout, keys)
    assert answered.all()
    np.testing.assert_array_equal(out, vectors_of(keys, out.shape[1], version))


def test_a_pinned_table_is_read_by_its_layout_alone(database, pinner, monkeypatch):
    monkeypatch.setattr(in_place, "PIECE_BYTES", 8 * PAGE_BYTES)
    keys = distinct_keys(20_000)
    fill(database, keys)
    table = database.host_table(TAG)
    assert table.layout() is None
    steps = []
    table.pin(pinner, lambda done, total: steps.append((done, total)))
    assert_readable(table.layout(), pinner, keys)
    assert not read_in_place(table.layout(), distinct_keys(100, seed=5))[1].any()
    assert max(pinner.pinned.values()) == 8 * PAGE_BYTES
    assert [done for done, _ in steps] == np.cumsum([*pinner.pinned.values()]).tolist()
    assert {total for _, total in steps} == {steps[-1][0]}
    assert table.layout() is table.layout()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/smaps")
def test_pinned_memory_is_not_passed_on_to_forked_processes(database, pinner):
    fill(database, distinct_keys(100))
    database.host_table(TAG).pin(pinner)
    kept = {}
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if mapped := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            start, stop = (int(address, 16) for address in mapped.groups())
        elif line.startswith("VmFlags:"):
            kept |= {address: "dc" in line.split() for address in pinner.pinned if start <= address < stop}
    assert set(kept) == set(pinner.pinned)
    assert all(kept.values())


def test_further_devices_pin_nothing_twice(database, pinner):
    fill(database, distinct_keys(100))
    table, second = database.host_table(TAG), PopulatingPinner()
    table.pin(pinner)
    layout = table.layout()
    table.pin(second)
    assert second.calls == 0
    assert table.layout() is layout


def test_growth_is_pinned_and_shown_before_rows_are_linked_and_before_old_readers_are_sent_on(database, pinner):
    keys = distinct_keys(20_000)
    fill(database, keys[:10])
    table = database.host_table(TAG)
    table.pin(pinner)
    held, seen = [table.layout()], []

    def watcher(layout):
        assert table.layout() is layout
        rows = database.size(TAG)
        assert_readable(held[-1], pinner, keys[:rows])  # nothing of the old one is retired or unpinned
        assert_readable(layout, pinner, keys[:rows])  # a row that was linked before this would have no slab
        grown = named_by(layout.words, layout.slabs)
        seen.append(grown != named_by(held[-1].words, held[-1].slabs))
        held[:] = [layout]

    end = table.watch(watcher)
    for start in range(10, keys.size, 10):
        fill(database, keys[start : start + 10])
    assert len(seen) > 10
    assert all(seen)
    assert_readable(table.layout(), pinner, keys)
    end()
    shown = len(seen)
    fill(database, distinct_keys(50_000, seed=3))
    assert len(seen) == shown


def test_what_a_layout_names_stays_pinned_while_it_is_held(database, pinner):
    fill(database, distinct_keys(9))
    table = database.host_table(TAG)
    table.pin(pinner)
    old = table.layout()
    fill(database, distinct_keys(500, seed=5))
    _, answered = read_in_place(old, distinct_keys(9))
    assert not answered.any()
    assert all(pinner.holds(*place) for place in named_by(old.words, old.slabs))
    count = len(pinner.pinned)
    del old
    assert len(pinner.pinned) < count


@pytest.mark.parametrize("end", ["drop", "close", "close the table"])
def test_a_table_that_ends_is_not_read_any_more_and_stays_for_those_who_read_it(database, pinner, end):
    keys = distinct_keys(1000)
    fill(database, keys)
    table, told = database.host_table(TAG), []
    table.pin(pinner)
    table.watch(told.append)
    layout = table.layout()
    {"drop": lambda: database.drop_table(TAG), "close": database.close, "close the table": table.close}[end]()
    assert table.layout() is None
    assert told == [None]
    assert_readable(layout, pinner, keys)
    del layout
    assert pinner.pinned == {}
    table.close()
    assert told == [None]
    with pytest.raises(InvalidInputError, match="cannot be read by devices in place: it was dropped"):
        table.pin(pinner)


@pytest.mark.parametrize("refuse_at", [1, 2, 3])
def test_pinning_that_fails_leaves_nothing_pinned_and_may_be_tried_again(database, refuse_at, monkeypatch):
    monkeypatch.setattr(in_place, "PIECE_BYTES", 64 * PAGE_BYTES)
    keys = distinct_keys(20_000)
    fill(database, keys)
    table, pinner = database.host_table(TAG), PopulatingPinner(refuse_at)
    with pytest.raises(DeviceError, match="locked memory") as caught:
        table.pin(pinner)
    assert pinner.pinned == {}
    del caught
    assert table.layout() is None
    fill(database, keys, version=1)
    pinner.refuse_at = None
    table.pin(pinner)
    assert_readable(table.layout(), pinner, keys, version=1)
    assert pinner.faults == []


def test_new_slabs_are_shown_also_while_the_buckets_have_room(pinner):
    database, keys = opened(256), distinct_keys(5000)
    table, (_, slabs) = database.host_table(TAG), database._tables[TAG].memory
    table.pin(pinner)
    for start in range(0, keys.size, 20):
        fill(database, keys[start : start + 20], dim=256)
        assert table.layout().slabs.size == slabs.count
    assert slabs.count > 3
    database.close()


def test_growth_that_cannot_be_pinned_ends_reading_in_place_and_nothing_else(database, pinner, caplog):
    keys = distinct_keys(20_000)
    fill(database, keys[:100])
    table, told = database.host_table(TAG), []
    table.pin(pinner)
    table.watch(told.append)
    pinner.refuse_at = pinner.calls + 1
    with caplog.at_level(logging.WARNING):
        for start in range(0, keys.size, 100):
            fill(database, keys[start : start + 100])
    assert told == [None]
    assert table.layout() is None
    assert [record.getMessage().count("through the CPU, which is slower") for record in caplog.records] == [1]
    assert pinner.pinned == {}
    assert set(inspect(database, TAG).vectors) == set(keys.tolist())


def test_a_table_whose_policy_goes_by_accesses_is_not_pinned():
    for policy in ("evict_oldest", "evict_least_used"):
        database, pinner = opened(overflow_margin=100, overflow_policy=policy), PopulatingPinner()
        with pytest.raises(InvalidInputError, match="does not note; expected evict_random"):
            database.host_table(TAG).pin(pinner)
        assert pinner.calls == 0


def test_a_table_that_is_dropped_while_it_is_pinned_leaves_nothing_pinned(database, pinner):
    fill(database, distinct_keys(1000))
    table = database.host_table(TAG)
    with pytest.raises(InvalidInputError, match="dropped meanwhile"):
        table.pin(pinner, lambda done, total: database.drop_table(TAG))
    assert pinner.pinned == {}


def test_what_a_table_grows_by_while_it_is_pinned_is_pinned_too(database, pinner):
    keys = distinct_keys(3000)
    fill(database, keys[:100])
    grown = []

    def progress(done, total):
        if not grown:
            fill(database, keys[100:])
            grown.append(True)

    table = database.host_table(TAG)
    table.pin(pinner, progress)
    assert_readable(table.layout(), pinner, keys)


def test_growth_that_was_interrupted_is_shown_by_the_next_writer(database, pinner, monkeypatch):
    keys = distinct_keys(9)
    fill(database, keys)
    table = database.host_table(TAG)
    table.pin(pinner)
    old = table.layout()

    def interrupted(pages, pinner, pinned):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(in_place, "PinnedPages", interrupted)
        with pytest.raises(KeyboardInterrupt):
            fill(database, distinct_keys(10, seed=5))
    database.delete(TAG, keys[:1])
    assert table.layout() is not old
    assert_readable(table.layout(), pinner, keys[1:])
    assert not read_in_place(old, keys)[1].any()


def test_a_forked_child_unpins_nothing(database, pinner):
    """What `disown` does there; the pages are the parent's."""
    fill(database, distinct_keys(9))
    database.host_table(TAG).pin(pinner)
    count = len(pinner.pinned)
    tables = database._tables
    database.disown()
    with pytest.raises(NotReadyError):
        database.host_table(TAG)
    assert len(pinner.pinned) == count
    database._tables = tables


def test_a_pinned_table_counts_what_pinning_commits(pinner):
    database = opened(64)
    fill(database, distinct_keys(5000), dim=64)
    before = database.stats(TAG)
    database.host_table(TAG).pin(pinner)
    after = database.stats(TAG)
    held = after.vector_bytes + after.overhead_bytes
    assert held > before.vector_bytes + before.overhead_bytes
    assert 0 <= held - sum(pinner.pinned.values()) <= 2 * PAGE_BYTES
    database.close()


def with_holes(layout):
    """Which stripes have some, as a device hears it."""
    versions = np.frombuffer((ctypes.c_char * (1024 * 64)).from_address(int(layout.words[VERSIONS])), np.uint64)[::8]
    assert not (versions & np.uint64(1)).any()
    return versions >> np.uint64(63) == 1


def stripes_of(keys):
    return (mixed(keys) >> np.uint64(54)).astype(np.int64)


@pytest.mark.parametrize("pinned", ["first", "loaded first"])
def test_a_dense_table_is_read_without_its_buckets(database, pinner, pinned):
    keys, table = np.random.default_rng(1).permutation(20_000), database.host_table(TAG)
    if pinned == "first":
        table.pin(pinner)
    database.reserve(TAG, keys.size, [keys])
    fill(database, keys[:-1])
    if pinned == "loaded first":
        table.pin(pinner)
    (hole,) = np.flatnonzero(with_holes(table.layout()))
    assert hole == stripes_of(keys[-1:])[0]
    there = read_in_place(without_buckets(table.layout()), keys)[1]
    np.testing.assert_array_equal(there, stripes_of(keys) != hole)
    assert_readable(table.layout(), pinner, keys[:-1])
    assert not read_in_place(table.layout(), keys[-1:])[1].any()
    fill(database, keys[-1:])
    assert_read(without_buckets(table.layout()), keys)
    outside = np.array([-1, keys.size, 1 << 32, 2**63 - 1, -(2**63)])
    assert not read_in_place(table.layout(), outside)[1].any()
    fill(database, outside)
    assert_readable(table.layout(), pinner, np.concatenate([keys, outside]))
    assert not read_in_place(without_buckets(table.layout()), outside)[1].any()


def test_holes_come_and_go_and_what_is_gone_is_read_by_no_layout(database, pinner):
    """Twice: a layout that a device got before the first hole says the same."""
    keys, table = np.arange(5000), database.host_table(TAG)
    database.reserve(TAG, keys.size, [keys])
    fill(database, keys)
    table.pin(pinner)
    old = table.layout()
    for version in (1, 2):
        gone = keys[version::700].copy()
        assert_read(without_buckets(old), keys, version=version - 1)
        database.delete(TAG, gone[:-1].copy())
        database.delete(TAG, gone)
        left = np.setdiff1d(keys, gone)
        assert set(np.flatnonzero(with_holes(old))) == set(stripes_of(gone))
        fill(database, -gone - 1)  # they do not get the rows
        assert not read_in_place(old, gone)[1].any()
        assert not read_in_place(table.layout(), gone)[1].any()
        assert_readable(table.layout(), pinner, left, version=version - 1)
        assert_read(without_buckets(old), left[~np.isin(stripes_of(left), stripes_of(gone))], version=version - 1)
        fill(database, gone[1:].copy(), version)
        assert not read_in_place(old, gone[:1])[1].any()
        assert set(np.flatnonzero(with_holes(old))) == set(stripes_of(gone[:1]))
        fill(database, keys, version)
        assert not with_holes(old).any()
    assert_read(without_buckets(old), keys, version=2)
    inspect(database, TAG)


def test_a_dense_table_that_grows_is_still_read_without_its_buckets(database, pinner):
    """Devices that have an outgrown layout need no other one for dense keys."""
    keys, table = np.arange(300), database.host_table(TAG)
    database.reserve(TAG, keys.size, [keys])
    fill(database, keys)
    table.pin(pinner)
    old, others = table.layout(), distinct_keys(20_000)
    fill(database, others)
    assert table.layout().slabs.size > old.slabs.size
    for layout in (old, table.layout()):
        assert_read(without_buckets(layout), keys)
    assert_readable(table.layout(), pinner, others)
    assert not read_in_place(old, others)[1].any()


def test_a_dense_table_that_is_made_anew_is_another(database, pinner):
    for version in range(3):
        keys = np.arange(2000 - version)
        database.reserve(TAG, keys.size, [keys])
        table = database.host_table(TAG)
        table.pin(pinner)
        assert table.layout().words[DENSE_ROWS] == keys.size
        assert with_holes(table.layout()).sum() == np.unique(stripes_of(keys)).size
        assert not read_in_place(table.layout(), keys)[1].any()
        fill(database, keys, version)
        assert_read(without_buckets(table.layout()), keys, version)
        assert not read_in_place(table.layout(), np.arange(keys.size, 2100))[1].any()
        database.drop_table(TAG)
        assert table.layout() is None
        database.open_table(TAG, DIM)


def test_an_unknown_table_is_refused():
    with pytest.raises(UnknownTableError, match="there is no table"):
        opened().host_table("hps_et.m.other")


def test_a_device_that_looks_for_key_0_hears_of_every_entry_that_may_look_like_it(database, pinner):
    """Free entries hold key 0. One that is taken and freed again while a device reads its bucket shows nothing else."""
    fill(database, distinct_keys(200))
    database.host_table(TAG).pin(pinner)
    words = database.host_table(TAG).layout().words
    segments = 1 << int(words[SEGMENT_BITS])
    versions = np.frombuffer((ctypes.c_char * (1024 * 64)).from_address(int(words[VERSIONS])), np.uint64)[::8]
    assert mixed(np.zeros(1, np.int64))[0] == 0
    first, last = keys_with_hash(np.array([(1 << 60) // segments, 2**64 - 1], np.uint64))
    for key, steps in ((first, 2), (last, 2 if segments == 1 else 0)):
        for change in (database.insert, lambda tag, keys, _: database.delete(tag, keys)):
            before = int(versions[0])
            change(TAG, np.array([key]), np.zeros((1, DIM), np.float32))
            assert int(versions[0]) == before + steps
            assert not (versions & np.uint64(1)).any()
