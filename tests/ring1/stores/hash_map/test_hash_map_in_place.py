"""The hash map as devices read it in place: what is pinned, shown and copied, and how long it stays.

What they read is compared with a dict in `tests/ring1/stores/hash_map/test_hash_map_properties.py`.
"""

import ctypes
import gc
import logging
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from hps.errors import DeviceError, InvalidInputError, NotReadyError
from hps.stores.hash_map import in_place
from hps.stores.hash_map import memory as hash_map_memory
from hps.stores.hash_map.database import HashMapDatabase
from hps.stores.hash_map.layout import SEGMENT_BITS, VERSIONS
from hps.stores.hash_map.memory import PAGE_BYTES
from hps.testing.databases import DIM, TAG, distinct_keys, vectors_of
from tests.fakes.populating_pinner import PopulatingPinner, named_by
from tests.tables.hash_map_inspection import inspect, keys_with_hash, mixed
from tests.tables.host_layout_reader import MirroredTable, read_in_place


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
    layout, second = table.layout(), PopulatingPinner()
    table.pin(second)  # of a further device
    assert (second.calls, table.layout() is layout) == (0, True)


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
        assert table.layout().slabs.size == database._tables[TAG].memory[1].count
    assert len(seen) > 10
    assert all(seen)
    assert_readable(table.layout(), pinner, keys)
    end()
    shown = len(seen)
    fill(database, distinct_keys(50_000, seed=3))
    assert len(seen) == shown


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


@pytest.mark.parametrize("meanwhile", ["grows", "dropped"])
def test_what_becomes_of_a_table_while_it_is_pinned_counts(database, pinner, meanwhile):
    keys = distinct_keys(3000)
    fill(database, keys[:100])
    table, todo = database.host_table(TAG), [lambda: fill(database, keys[100:])]
    if meanwhile == "grows":
        table.pin(pinner, lambda done, total: todo and todo.pop()())
        assert_readable(table.layout(), pinner, keys)
    else:
        with pytest.raises(InvalidInputError, match="dropped meanwhile"):
            table.pin(pinner, lambda done, total: database.drop_table(TAG))
        assert pinner.pinned == {}


def test_a_forked_child_unpins_nothing_and_a_policy_that_goes_by_accesses_pins_nothing(pinner):
    for policy in ("evict_oldest", "evict_least_used"):
        database = opened(overflow_margin=100, overflow_policy=policy)
        with pytest.raises(InvalidInputError, match="does not record; expected evict_random"):
            database.host_table(TAG).pin(pinner)
        assert pinner.calls == 0
    database = opened()
    database.host_table(TAG).pin(pinner)
    count, tables = len(pinner.pinned), database._tables
    database.disown()  # what it does there; the pages are the parent's
    with pytest.raises(NotReadyError):
        database.host_table(TAG)
    assert len(pinner.pinned) == count
    del tables


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


# -- copies of the buckets ---------------------------------------------------------------------------------------------


def mirror_of(database, pinner):
    table = database.host_table(TAG)
    table.pin(pinner)
    return MirroredTable(table)


def assert_mirrors(mirror, keys, absent, version=0):
    out, answered, copied = mirror.read(keys)
    assert answered.all()
    assert copied.all()
    np.testing.assert_array_equal(out, vectors_of(keys, DIM, version))
    _, answered, copied = mirror.read(absent)
    assert copied.all()
    assert not answered.any()


def test_only_what_changed_is_copied_and_any_bucket_where_too_much_did(database, pinner, monkeypatch):
    mirror, keys = mirror_of(database, pinner), distinct_keys(2000)
    fill(database, keys)
    assert mirror.updates[0].buckets is None
    del mirror.updates[:]
    fill(database, keys[:3], 1)  # replaces vectors, in place
    (replaced,) = mirror.updates
    assert replaced.buckets.size == 0
    database.delete(TAG, keys[:1])
    assert 1 <= mirror.updates[-1].buckets.size <= 20
    before = len(mirror.updates)
    list(database.scan(TAG, 100))
    database.delete(TAG, keys[:1])  # which is gone
    assert len(mirror.updates) == before
    monkeypatch.setattr(in_place, "CHANGES_LIMIT", 50)
    for start, stop, noted in ((1, 3, True), (3, 60, False), (60, 63, True)):
        database.delete(TAG, keys[start:stop])
        assert (mirror.updates[-1].buckets is not None) is noted
        assert_mirrors(mirror, keys[63:], keys[:stop])


def test_keys_that_pass_full_buckets_are_found_in_the_copy_and_no_longer_when_they_are_gone(database, pinner):
    mirror, crowd = (
        mirror_of(database, pinner),
        keys_with_hash(np.full(25, 5 << 40, np.uint64) + np.arange(25, dtype=np.uint64)),
    )
    fill(database, distinct_keys(400))
    for i in range(25):  # each write changes another bucket, and counts in those that it passes
        fill(database, crowd[i : i + 1])
        assert_mirrors(mirror, crowd[: i + 1], crowd[i + 1 :])
    for i in range(12):
        database.delete(TAG, crowd[i : i + 1])
        assert_mirrors(mirror, crowd[i + 1 :], crowd[: i + 1])


def test_a_second_mirror_begins_with_all_and_the_first_goes_on(database, pinner):
    mirror, keys = mirror_of(database, pinner), distinct_keys(500)
    fill(database, keys)
    second = MirroredTable(database.host_table(TAG))
    assert second.updates[0].buckets is None
    fill(database, keys[:50], 0)
    for one in (mirror, second):
        assert_mirrors(one, keys, ~keys)
    second.close()
    told = len(second.updates)
    database.delete(TAG, keys[:10])
    assert len(second.updates) == told
    assert_mirrors(mirror, keys[10:], keys[:10])


def test_a_table_without_pins_or_dropped_has_no_mirror(database, pinner):
    mirror_of(database, pinner)
    table = database.host_table(TAG)
    database.open_table("another", DIM)
    database.drop_table(TAG)
    for one in (database.host_table("another"), table):
        with pytest.raises(InvalidInputError, match="not pinned, or was dropped"):
            one.mirror(print)
