"""Which rows the hash map evicts; how many stay is held by `tests/ring1/stores/hash_map/test_hash_map_properties.py`."""

import numpy as np
import pytest

from hps.stores.hash_map.database import HashMapDatabase
from hps.stores.hash_map.eviction import HashMapOverflow
from hps.testing.databases import TAG, distinct_keys, fetched, vectors_of
from tests.fakes.clock import Clock
from tests.tables.hash_map_inspection import inspect, mixed

DIM = 2
POLICIES = ["evict_random", "evict_least_used", "evict_oldest"]


@pytest.fixture
def clock():
    return Clock(1000)


def bounded(policy, margin, target=0.8, clock=None, **options):
    options = {"num_partitions": 1, "initial_buckets": 1, **options, **({"clock": clock} if clock else {})}
    database = HashMapDatabase(overflow_margin=margin, overflow_policy=policy, overflow_resolution_target=target, **options)
    database.open_table(TAG, DIM)
    return database


def insert(database, keys, version=0):
    database.insert(TAG, keys, vectors_of(keys, DIM, version))


def held(database):
    """The keys of the table, once its memory was found sound and no partition beyond its margin."""
    return set(inspect(database, TAG).vectors)


def fetch(database, keys):
    return fetched(database, TAG, keys, DIM)[1]


@pytest.mark.parametrize("policy", POLICIES)
def test_an_insertion_beyond_max_batch_size_is_as_many_one_by_one(policy, clock):
    keys = np.random.default_rng(3).choice(distinct_keys(300), 1000)
    whole, parts = (bounded(policy, 40, num_partitions=3, max_batch_size=70, clock=clock) for _ in range(2))
    insert(whole, keys)
    for start in range(0, 1000, 70):
        insert(parts, keys[start : start + 70])
    assert held(whole) == held(parts)


def test_a_dropped_table_starts_from_nothing():
    database = bounded("evict_oldest", 100)
    insert(database, distinct_keys(100))
    database.drop_table(TAG)
    database.open_table(TAG, DIM)
    insert(database, distinct_keys(100, seed=5))
    assert database.size(TAG) == 100


def test_evict_oldest_goes_by_the_last_fetch_or_insertion(clock):
    database = bounded("evict_oldest", 100, 0.5, clock=clock)
    keys = distinct_keys(101)
    for key in np.split(keys[:100], 100):
        clock.now += 1
        insert(database, key)
    clock.now += 1
    fetch(database, np.repeat(keys[:20], 2))
    clock.now += 1
    insert(database, keys[20:30], version=1)
    clock.now += 1
    insert(database, keys[100:])
    assert held(database) == {*keys[:30].tolist(), *keys[81:].tolist()}
    assert database.stats(TAG).evictions == 51


def test_evict_least_used_goes_by_the_number_of_accesses():
    database = bounded("evict_least_used", 100, 0.5)
    keys = distinct_keys(101)
    insert(database, keys[:100])
    fetch(database, np.repeat(keys[:100], np.arange(100)))
    for _ in range(200):
        insert(database, keys[:1])
    insert(database, keys[100:])
    assert held(database) == {int(keys[0]), *keys[52:].tolist()}


def test_eviction_halves_the_counts_of_the_rows_that_stay():
    database = bounded("evict_least_used", 10, 0.5)
    keys = distinct_keys(11)
    insert(database, keys[:10])
    fetch(database, np.repeat(keys[:4], 20))
    assert inspect(database, TAG).stamps == {int(key): 21 if i < 4 else 1 for i, key in enumerate(keys[:10])}
    insert(database, keys[10:])
    assert inspect(database, TAG).stamps == {**{int(key): 10 for key in keys[:4]}, int(keys[10]): 1}


@pytest.mark.parametrize("policy", POLICIES)
def test_rows_that_are_alike_go_at_random(policy, clock):
    database = bounded(policy, 2000, 0.5, clock=clock)
    keys = distinct_keys(2001)
    insert(database, keys[:2000])
    insert(database, keys[2000:])
    left = np.isin(keys[:2000], np.array(sorted(held(database))))
    assert left.sum() == 999  # and the key that came
    by_hash = left[np.argsort(mixed(keys[:2000]))]
    for order in (left, by_hash):
        quarters = order.reshape(4, 500).sum(axis=1)
        assert (quarters > 200).all()
        assert (quarters < 300).all()


def test_only_rows_that_a_fetch_fills_count_as_used():
    database = bounded("evict_least_used", 100)
    keys = distinct_keys(3)
    insert(database, keys[:2])
    found = np.array([True, False, False])
    database.fetch(TAG, keys, np.zeros((3, DIM), np.float32), found)
    assert inspect(database, TAG).stamps == {int(keys[0]): 1, int(keys[1]): 2}


def test_rows_that_are_fetched_while_they_are_chosen_make_no_difference_to_how_many_go(monkeypatch):
    database = bounded("evict_least_used", 100, 0.5)
    keys = distinct_keys(101)
    insert(database, keys[:100])
    choose = HashMapOverflow._limits

    def choose_and_fetch(*arguments):
        chosen = choose(*arguments)
        fetch(database, np.repeat(keys[:90], 5))
        return chosen

    monkeypatch.setattr(HashMapOverflow, "_limits", choose_and_fetch)
    insert(database, keys[100:])
    assert database.size(TAG) == 50
    assert int(keys[100]) in held(database)


def test_a_clock_beyond_every_stamp_is_no_error(clock):
    database = bounded("evict_oldest", 10, clock=clock)
    clock.now = 1e15
    insert(database, distinct_keys(11))
    assert set(inspect(database, TAG).stamps.values()) == {2**32 - 1}
