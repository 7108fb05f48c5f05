"""Copies of the hash map's buckets: told of every change, never followed when they are old."""

import numpy as np
import pytest

from hps.databases.hash_map import in_place
from hps.databases.hash_map import memory as hash_map_memory
from hps.databases.hash_map.database import HashMapDatabase
from hps.errors import InvalidInputError
from hps.testing.databases import DIM, TAG, distinct_keys, vectors_of
from tests.fakes.populating_pinner import PopulatingPinner
from tests.tables.hash_map_inspection import keys_with_hash
from tests.tables.host_layout_reader import MirroredTable


class Mirrored:
    """A hash map, a mirror of its one table, and what both must hold."""

    def __init__(self, **options):
        self.database, self.pinner = HashMapDatabase(initial_buckets=1, **options), PopulatingPinner()
        self.database.open_table(TAG, DIM)
        self.table = self.database.host_table(TAG)
        self.table.pin(self.pinner)
        self.mirror = MirroredTable(self.table)
        self.versions = {}

    def insert(self, keys, version=0):
        self.database.insert(TAG, keys, vectors_of(keys, DIM, version))
        self.versions |= dict.fromkeys(keys.tolist(), version)

    def delete(self, keys):
        self.database.delete(TAG, keys)
        for key in keys.tolist():
            self.versions.pop(key, None)

    def check(self, absent, *, in_the_copy=True):
        keys = np.array(list(self.versions), np.int64)
        out, answered, copied = self.mirror.read(keys)
        assert answered.all()
        for version in set(self.versions.values()):
            here = np.array([self.versions[key] == version for key in keys.tolist()])
            np.testing.assert_array_equal(out[here], vectors_of(keys[here], DIM, version))
        _, answered, looked = self.mirror.read(absent)
        assert not answered.any()
        if in_the_copy:
            assert copied.all()
            assert looked.all()


@pytest.fixture(params=["one array", "segments"])
def mirrored(request, monkeypatch):
    if request.param == "segments":
        monkeypatch.setattr(hash_map_memory, "SEGMENTED_FROM", 2)
    mirrored = Mirrored()
    yield mirrored
    mirrored.database.close()
    assert mirrored.pinner.faults == []


def test_a_mirror_is_current_after_every_write(mirrored):
    random, keys = np.random.default_rng(3), distinct_keys(6000)
    never = distinct_keys(200, seed=8)
    mirrored.check(never)
    for turn in range(60):
        some = random.choice(keys, 1 + turn * 5, replace=False)
        if turn % 3 == 2:
            mirrored.delete(some)
        else:
            mirrored.insert(some, turn)
        mirrored.check(np.concatenate([never, np.setdiff1d(keys, list(mirrored.versions))]))
    assert any(one.buckets is None for one in mirrored.mirror.updates[1:])  # the table grew
    assert any(one.buckets is not None and one.buckets.size for one in mirrored.mirror.updates)


def test_only_what_changed_is_copied(mirrored):
    keys = distinct_keys(2000)
    mirrored.insert(keys)
    del mirrored.mirror.updates[:]
    mirrored.insert(keys[:3], 1)  # replaces vectors, in place
    (replaced,) = mirrored.mirror.updates
    assert replaced.buckets.size == 0
    mirrored.delete(keys[:1])
    assert 1 <= mirrored.mirror.updates[-1].buckets.size <= 20
    before = len(mirrored.mirror.updates)
    list(mirrored.database.scan(TAG, 100))
    mirrored.delete(keys[:1])  # which is gone
    assert len(mirrored.mirror.updates) == before
    mirrored.check(distinct_keys(10, seed=8))


def test_keys_that_pass_full_buckets_are_found_in_the_copy_and_no_longer_when_they_are_gone(mirrored):
    mirrored.insert(distinct_keys(400))
    crowd = keys_with_hash(np.full(25, 5 << 40, np.uint64) + np.arange(25, dtype=np.uint64))
    for key in crowd[:, None]:  # each write changes another bucket, and counts in those that it passes
        mirrored.insert(key, 1)
        mirrored.check(distinct_keys(10, seed=8))
    for key in crowd[:12, None]:
        mirrored.delete(key)
        mirrored.check(crowd[:1])
    mirrored.insert(crowd[:12], 2)
    mirrored.check(distinct_keys(10, seed=8))


def test_a_mirror_that_is_late_is_not_followed(mirrored):
    keys = distinct_keys(3000)
    mirrored.insert(keys[:1000])
    mirrored.mirror.late = True
    mirrored.delete(keys[:500])
    mirrored.insert(keys[1000:1400], 1)  # in rows of the deleted ones
    mirrored.check(keys[:500], in_the_copy=False)
    _, _, copied = mirrored.mirror.read(keys[:1400])
    assert not copied[:500].any()
    assert not copied[1000:].any()
    mirrored.mirror.late = False
    mirrored.insert(keys[1400:1401], 1)
    mirrored.check(keys[:500])


def test_more_changes_than_are_noted_mean_that_any_bucket_may_have_changed(mirrored, monkeypatch):
    monkeypatch.setattr(in_place, "CHANGES_LIMIT", 50)
    keys = distinct_keys(300)
    mirrored.insert(keys)
    mirrored.delete(keys[:51])
    assert mirrored.mirror.updates[-1].buckets is None
    mirrored.delete(keys[51:55])
    assert mirrored.mirror.updates[-1].buckets is not None  # the next write begins anew
    mirrored.check(keys[:55])


def test_a_second_mirror_begins_with_all_and_the_first_goes_on(mirrored):
    keys = distinct_keys(500)
    mirrored.insert(keys)
    second = MirroredTable(mirrored.table)
    assert second.updates[0].buckets is None
    mirrored.insert(distinct_keys(50, seed=2), 1)
    mirrored.check(distinct_keys(10, seed=8))
    assert second.read(keys)[2].all()
    second.close()
    told = len(second.updates)
    mirrored.delete(keys[:10])
    assert len(second.updates) == told
    mirrored.check(keys[:10])


def test_evicted_keys_leave_the_copy(monkeypatch):
    mirrored = Mirrored(overflow_margin=300, num_partitions=1, overflow_policy="evict_random")
    for turn in range(6):
        keys = distinct_keys(250, seed=turn)
        mirrored.database.insert(TAG, keys, vectors_of(keys, DIM, turn))
        out, answered, copied = mirrored.mirror.read(keys)
        assert copied.all()
        found = np.zeros(keys.size, np.bool_)
        mirrored.database.fetch(TAG, keys, np.empty((keys.size, DIM), np.float32), found)
        np.testing.assert_array_equal(answered, found)
        np.testing.assert_array_equal(out[answered], vectors_of(keys, DIM, turn)[answered])
    mirrored.database.close()


def test_a_table_without_pins_or_dropped_has_no_mirror(mirrored):
    mirrored.database.open_table("another", DIM)
    with pytest.raises(InvalidInputError, match="not pinned, or was dropped"):
        mirrored.database.host_table("another").mirror(print)
    mirrored.database.drop_table(TAG)
    told = len(mirrored.mirror.updates)
    with pytest.raises(InvalidInputError, match="not pinned, or was dropped"):
        mirrored.table.mirror(print)
    assert len(mirrored.mirror.updates) == told
