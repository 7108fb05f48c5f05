"""No vector is torn or foreign while rows move from key to key for long, whichever way the hash map is read."""

import threading
from contextlib import closing

import numpy as np
import pytest

from hps.stores.hash_map import memory as hash_map_memory
from hps.stores.hash_map.database import HashMapDatabase
from hps.testing.databases import TAG, distinct_keys, vectors_of
from hps.testing.readers import reading
from tests.fakes.populating_pinner import PopulatingPinner
from tests.tables.hash_map_inspection import inspect
from tests.tables.host_layout_reader import MirroredTable, read_in_place


def rows_move(database, keys, versions):
    """Keys come, change, go and hand their rows on, in growing buckets."""
    rng = np.random.default_rng(99)
    for version in range(versions.shape[0]):
        order = rng.permutation(keys.size)
        database.insert(TAG, keys[order], versions[version][order])
        for part in np.array_split(order, 20):
            database.delete(TAG, keys[part])
            database.insert(TAG, keys[part[::2]], versions[version][part[::2]])


@pytest.mark.parametrize("dim", [1, 20, 32, 1000])
@pytest.mark.parametrize(
    ("policy", "in_place"),
    [
        *((policy, False) for policy in (None, "evict_least_used", "dense")),
        *((policy, True) for policy in (None, "evict_random", "dense")),
    ],
)
@pytest.mark.parametrize("segmented_from", [2, 4096])
def test_no_vector_is_torn_while_rows_move_from_key_to_key(dim, segmented_from, policy, in_place, monkeypatch):
    monkeypatch.setattr(hash_map_memory, "SEGMENTED_FROM", segmented_from)
    rows, rounds = (1500, 60) if dim < 1000 else (500, 20)
    keys = distinct_keys(rows)
    options = {"overflow_margin": 700, "num_partitions": 2, "overflow_policy": policy} if (policy or "dense") != "dense" else {}
    with closing(HashMapDatabase(initial_buckets=1, **options)) as database:
        database.open_table(TAG, dim)
        if policy == "dense":
            keys = np.concatenate([np.arange(rows - rows // 5), keys[: rows // 5]])
            database.reserve(TAG, rows - rows // 5, [keys[: rows - rows // 5]])
        versions = np.stack([vectors_of(keys, dim, version) for version in range(rounds)])
        marks = versions[:, :, 0]  # tells versions of a key apart
        table = database.host_table(TAG)
        if in_place:
            database.insert(TAG, keys[:5], versions[0][:5])
            table.pin(PopulatingPinner())

        def read(rng):
            picks = rng.integers(0, rows, 400)
            if in_place:
                out, new = read_in_place(table.layout(), keys[picks])
            else:
                out, found = np.full((400, dim), -7.0, np.float32), rng.random(400) < 0.1
                before = found.copy()
                assert database.fetch(TAG, keys[picks], out, found) == np.count_nonzero(found & ~before)
                assert (out[~found | before] == -7.0).all(), "a row that was not to be filled was written"
                new = found & ~before
            new = np.flatnonzero(new)
            same = marks[:, picks[new]] == out[new, 0]
            assert same.any(axis=0).all(), "a vector of another key"
            np.testing.assert_array_equal(out[new], versions[same.argmax(axis=0), picks[new]])
            return new.size

        with reading(read):
            rows_move(database, keys, versions)
        inspect(database, TAG)


@pytest.mark.parametrize("segmented_from", [2, 4096])
def test_no_vector_of_a_mirror_is_wrong_beside_a_writer(segmented_from, monkeypatch):
    monkeypatch.setattr(hash_map_memory, "SEGMENTED_FROM", segmented_from)
    keys, dim, stop, answers = distinct_keys(4000), 8, threading.Event(), 0
    versions = np.stack([vectors_of(keys, dim, version) for version in range(150)])
    with closing(HashMapDatabase(initial_buckets=1)) as database:
        database.open_table(TAG, dim)
        table = database.host_table(TAG)
        table.pin(PopulatingPinner())
        mirror = MirroredTable(table)
        database.insert(TAG, keys[:2000], versions[0][:2000])

        def write():
            random = np.random.default_rng(1)
            for version in range(1, 150):
                database.delete(TAG, random.choice(keys, 200, replace=False))
                again = random.choice(keys.size, 300, replace=False)
                database.insert(TAG, keys[again], versions[version][again])
            stop.set()

        writer = threading.Thread(target=write)
        writer.start()
        random = np.random.default_rng(2)
        while not (stop.is_set() and answers):
            asked = random.choice(keys.size, 100)
            out, answered, _ = mirror.read(keys[asked])
            assert (versions[:, asked[answered]] == out[answered]).all(axis=2).any(axis=0).all()
            answers += answered.sum()
        writer.join()
