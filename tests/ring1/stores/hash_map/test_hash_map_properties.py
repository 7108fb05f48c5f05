"""The hash map against a dict, under random operations on keys that collide; tests/nightly/stores searches longer."""

from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from hps.errors import UnknownTableError
from hps.stores.hash_map import memory as hash_map_memory
from hps.stores.hash_map.database import HashMapDatabase
from hps.stores.hash_map.layout import DENSE_ROWS
from hps.testing.databases import AWKWARD_KEYS, TAG, distinct_keys, fetched, vectors_of
from tests.fakes.populating_pinner import PopulatingPinner
from tests.tables.hash_map_inspection import colliding_keys, inspect, mixed
from tests.tables.host_layout_reader import MirroredTable, read_in_place, without_buckets

POOL = np.concatenate(
    [AWKWARD_KEYS, np.arange(90), colliding_keys(60), colliding_keys(40, upper=0), distinct_keys(60), np.arange(-30, 30) << 32]
).astype(np.int64)
POOL = np.unique(POOL)
DIM = 3
VERSIONS = np.stack([vectors_of(POOL, DIM, version) for version in range(200)])

positions = st.lists(st.integers(0, POOL.size - 1), max_size=80)
runs = st.tuples(st.integers(0, POOL.size - 1), st.integers(0, POOL.size)).map(
    lambda run: [position % POOL.size for position in range(run[0], run[0] + run[1])]
)
batches = st.one_of(positions, runs).map(lambda picks: POOL[np.array(picks, np.int64)])


class HashMapMachine(RuleBasedStateMachine):
    """Two tables of one database, each beside a dict from key to version; versions tell old vectors from new."""

    tables = Bundle("tables")

    @initialize(
        buckets=st.integers(1, 4),
        segmented_from=st.sampled_from([1, 5, 4096]),
        stripe_bytes=st.sampled_from([64, 1 << 12, 1 << 20]),
        target=tables,
    )
    def open(self, buckets, segmented_from, stripe_bytes):
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(hash_map_memory, "_STRIPE_BYTES", stripe_bytes)
        self.patch.setattr(hash_map_memory, "SEGMENTED_FROM", segmented_from)
        self.database, self.pinner = HashMapDatabase(initial_buckets=buckets, allocation_rate=1), PopulatingPinner()
        self.model: dict[str, dict[int, int]] = {}
        self.oldest, self.mirrors = {}, {}
        self.version = 0
        return multiple(self._opened("hps_et.m.a"), self._opened("hps_et.m.dense"))

    def _opened(self, tag):
        self.database.open_table(tag, DIM)
        if tag == "hps_et.m.dense":
            self.database.reserve(tag, 80, [np.arange(80)])
            self.pin(tag)
        self.model[tag] = {}
        return tag

    @rule(tag=tables, keys=batches)
    def insert(self, tag, keys):
        self.version = (self.version + 1) % 200
        self.database.insert(tag, keys, vectors_of(keys, DIM, self.version))
        self.model[tag].update(dict.fromkeys(keys.tolist(), self.version))

    @rule(tag=tables, keys=batches)
    def insert_with_another_vector_for_each_repetition(self, tag, keys):
        self.version = (self.version + 1) % 200
        vectors = np.concatenate([vectors_of(keys, DIM, self.version + 1), vectors_of(keys, DIM, self.version)])
        self.database.insert(tag, np.concatenate([keys, keys]), vectors)
        self.model[tag].update(dict.fromkeys(keys.tolist(), self.version))

    @rule(tag=tables, keys=batches)
    def delete(self, tag, keys):
        there = set(keys.tolist()) & set(self.model[tag])
        assert self.database.delete(tag, keys) == len(there)
        for key in there:
            del self.model[tag][key]

    @rule(tag=tables, keys=batches, seed=st.integers(0, 2**32 - 1))
    def fetch_what_is_not_found_yet(self, tag, keys, seed):
        before = np.random.default_rng(seed).random(keys.size) < 0.3
        found = before.copy()
        out = np.full((keys.size, DIM), -1.0, np.float32)
        there = np.array([int(key) in self.model[tag] for key in keys], np.bool_)
        assert self.database.fetch(tag, keys, out, found) == np.count_nonzero(there & ~before)
        np.testing.assert_array_equal(found, before | there)
        for i in range(keys.size):
            filled = there[i] and not before[i]
            wanted = vectors_of(keys[i : i + 1], DIM, self.model[tag][int(keys[i])])[0] if filled else np.float32(-1)
            assert (out[i] == wanted).all()

    @rule(tag=tables, chunk_rows=st.integers(1, 300))
    def scan(self, tag, chunk_rows):
        scanned = {}
        for keys, vectors in self.database.scan(tag, chunk_rows):
            assert 0 < keys.size <= chunk_rows
            assert not scanned.keys() & set(keys.tolist())
            scanned.update(zip(keys.tolist(), vectors, strict=True))
        assert scanned.keys() == self.model[tag].keys()
        for key, vector in scanned.items():
            assert (vector == vectors_of(np.array([key]), DIM, self.model[tag][key])[0]).all()

    @rule(tag=tables, rows=st.one_of(st.integers(0, 500), st.sampled_from([5000, 100_000, 200_000])))
    def reserve(self, tag, rows):
        self.database.reserve(tag, rows)

    @rule(tag=tables, rows=st.integers(1, 100), missing=st.integers(0, 6))
    def reserve_for_dense_keys(self, tag, rows, missing):
        self.database.reserve(tag, rows, [np.arange(rows)[::-1].copy(), np.arange(rows - missing)])

    @rule(tag=tables)
    def pin(self, tag):
        table = self.database.host_table(tag)
        table.pin(self.pinner)
        self.oldest.setdefault(tag, table.layout())
        self.mirrors.setdefault(tag, MirroredTable(table))

    @rule(tag=tables, late=st.booleans())
    def take_notice(self, tag, late):
        if mirror := self.mirrors.get(tag):
            mirror.late = late

    @rule(tag=consumes(tables), target=tables)
    def drop(self, tag):
        self.database.drop_table(tag)
        self.oldest.pop(tag, None)
        self.mirrors.pop(tag, None)
        with pytest.raises(UnknownTableError):
            self.database.stats(tag)
        return self._opened(tag)

    def teardown(self):
        if hasattr(self, "patch"):
            self.patch.undo()

    @invariant()
    def memory_is_sound_and_holds_what_the_dict_holds(self):
        for tag, model in getattr(self, "model", {}).items():
            held = inspect(self.database, tag).vectors
            assert held.keys() == model.keys()
            assert self.database.size(tag) == self.database.stats(tag).rows == len(model)

    @invariant()
    def devices_read_what_the_dict_holds(self):
        for tag, model in getattr(self, "model", {}).items():
            if layout := self.database.host_table(tag).layout():
                assert not self.pinner.faults
                there = np.isin(POOL, list(model))
                dense = np.arange(int(layout.words[DENSE_ROWS]))
                holes = stripes_of(np.setdiff1d(dense, list(model)))
                whole = np.isin(POOL, dense[~np.isin(stripes_of(dense), holes)])
                versions = np.array([model.get(key, 0) for key in POOL.tolist()])
                for (vectors, answered, *_), expected in (
                    (read_in_place(layout, POOL), there),
                    (self.mirrors[tag].read(POOL), there),
                    (read_in_place(without_buckets(layout), POOL), whole),
                    (read_in_place(self.oldest[tag], POOL), None),
                ):
                    np.testing.assert_array_equal(answered, answered & there if expected is None else expected)
                    np.testing.assert_array_equal(vectors[answered], VERSIONS[versions[answered], answered.nonzero()[0]])


def stripes_of(keys):
    return mixed(keys) >> np.uint64(54)


HashMapMachine.TestCase.settings = settings(max_examples=4, stateful_step_count=20, deadline=None, derandomize=True)
TestHashMapMachine = HashMapMachine.TestCase

HISTORIES = {
    "steps": st.lists(st.tuples(st.sampled_from(["insert", "insert", "fetch", "delete"]), batches), min_size=1, max_size=12),
    "policy": st.sampled_from(["evict_random", "evict_least_used", "evict_oldest"]),
    "partitions": st.integers(1, 4),
    "margin": st.integers(1, 60),
    "target": st.floats(0, 1),
}


@settings(max_examples=40, deadline=None, derandomize=True)
@given(**HISTORIES)
def test_partitions_hold_exactly_as_many_rows_as_margin_target_and_batch_say(steps, policy, partitions, margin, target):
    bounds = {"overflow_margin": margin, "overflow_policy": policy, "overflow_resolution_target": target}
    database = HashMapDatabase(num_partitions=partitions, max_batch_size=POOL.size, initial_buckets=1, **bounds)
    database.open_table(TAG, DIM)
    mirror = None
    if policy == "evict_random":
        database.host_table(TAG).pin(PopulatingPinner())
        mirror = MirroredTable(database.host_table(TAG))
    held: set[int] = set()
    versions: dict[int, int] = {}
    for version, (step, keys) in enumerate(steps):
        if step == "fetch":
            out, found = fetched(database, TAG, keys, DIM)
            np.testing.assert_array_equal(found, np.isin(keys, list(held)))
            for key, vector in zip(keys[found].tolist(), out[found], strict=True):
                assert (vector == vectors_of(np.array([key]), DIM, versions[key])[0]).all()
            continue
        if step == "delete":
            assert database.delete(TAG, keys) == len(held & set(keys.tolist()))
            held -= set(keys.tolist())
            continue
        database.insert(TAG, keys, vectors_of(keys, DIM, version))
        versions.update(dict.fromkeys(keys.tolist(), version))
        rows = inspect(database, TAG).vectors
        assert rows == {key: vectors_of(np.array([key]), DIM, versions[key]).tobytes() for key in rows}
        now = set(rows)
        by_last_occurrence = list(dict.fromkeys(reversed(keys.tolist())))
        for partition in range(partitions):
            entered = set(_of_partition(by_last_occurrence, partition, partitions)[:margin])
            full = entered | set(_of_partition(held, partition, partitions))
            here = set(_of_partition(now, partition, partitions))
            assert entered <= here <= full
            assert len(here) == (max(round(margin * target), len(entered)) if len(full) > margin else len(full))
        held = now
        if mirror:
            _, answered, copied = mirror.read(POOL)
            assert set(POOL[answered].tolist()) == held
            assert copied.all() or not keys.size


def _of_partition(keys: Iterable[int], partition: int, partitions: int) -> list[int]:
    return [key for key in keys if int(mixed(np.array([key]))[0]) % partitions == partition]
