"""Margins, policies and targets, against a real server."""

import struct
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from hps.errors import DatabaseError
from hps.testing.databases import distinct_keys, fetched, vectors_of
from hps.testing.waiting import PATIENCE_S
from tests.tables.hash_map_inspection import mixed

pytestmark = pytest.mark.redis
TAG, DIM, PARTITIONS, MARGIN = "hps_et.shop.item", 4, 4, 100
POLICIES = ("evict_random", "evict_least_used", "evict_oldest")


@pytest.fixture
def opened(opened):
    """Open databases of few rows a partition, and their table."""

    def open_database(policy, **settings):
        database = opened(**{"overflow_policy": policy, "overflow_margin": MARGIN, **settings})
        database.open_table(TAG, DIM)
        return database

    return open_database


def lengths(client, kind="v"):
    return [client.hlen(f"hps_et{{{TAG}/p{i}}}{kind}") for i in range(PARTITIONS)]


def put(database, keys, version=0):
    database.insert(TAG, keys, vectors_of(keys, DIM, version))


def keys_of_partition(index, count, seed=1):
    keys = distinct_keys(count * PARTITIONS * 2, seed)
    return keys[mixed(keys) % np.uint64(PARTITIONS) == index][:count]


def age(client, partition, keys, seconds):
    for key in keys:
        client.hset(f"hps_et{{{TAG}/p{partition}}}t", key.tobytes(), struct.pack("<q", seconds))


@pytest.mark.parametrize(("policy", "batch"), [*zip(POLICIES, [50, 1000, 65_536], strict=True)])
def test_no_partition_is_over_its_margin_when_an_insertion_returns(opened, client, policy, batch):
    database = opened(policy, max_batch_size=batch)
    keys = distinct_keys(3000)
    for start in range(0, 3000, 500):
        put(database, keys[start : start + 500])
        assert max(lengths(client)) <= MARGIN
    assert min(lengths(client)) >= round(0.8 * MARGIN)
    out, found = fetched(database, TAG, keys, DIM)
    assert found.sum() == sum(lengths(client))
    np.testing.assert_array_equal(out[found], vectors_of(keys, DIM)[found])
    stats = database.stats(TAG)
    assert (stats.capacity_rows, stats.evictions) == (MARGIN * PARTITIONS, keys.size - found.sum())


@pytest.mark.parametrize(
    ("policy", "target", "left"),
    [*zip(POLICIES, (1.0, 0.8, 0.5), (100, 80, 50), strict=True), *zip(POLICIES, (0.0, 0.0, 0.0), (0, 0, 0), strict=True)],
)
def test_exactly_the_surplus_goes(opened, client, policy, target, left):
    database = opened(policy, overflow_resolution_target=target)
    keys = keys_of_partition(2, MARGIN + 30)
    put(database, keys[:MARGIN])
    assert lengths(client) == [0, 0, MARGIN, 0]
    put(database, keys[MARGIN:])
    assert lengths(client) == [0, 0, left, 0]


def test_who_evicts_beside_another_removes_no_more_than_is_left_of_the_surplus(opened, client):
    """As if another process had evicted since this one chose its keys."""
    database = opened("evict_least_used")
    keys = keys_of_partition(0, MARGIN)
    put(database, keys)
    assert database._overflow._trim(database._tables[TAG].layout.partitions[0], keys[:60]) == 20
    assert lengths(client)[0] == 80


def test_an_eviction_that_failed_does_not_bar_the_next(opened, client):
    database = opened("evict_random")
    partition = database._tables[TAG].layout.partitions[0]
    client.set(partition.values, "no hash")
    with pytest.raises(DatabaseError, match="WRONGTYPE"):
        database._overflow.resolve(partition, MARGIN + 1)
    client.delete(partition.values)
    put(database, keys_of_partition(0, 2 * MARGIN))
    assert lengths(client)[0] <= MARGIN


def test_evict_random_keeps_nothing_beside_the_vectors_and_any_row_may_go(opened, client):
    database = opened("evict_random")
    keys = keys_of_partition(1, 400)
    gone = set()
    for _ in range(4):
        put(database, keys[: 2 * MARGIN])
        gone |= set(keys[: 2 * MARGIN][~fetched(database, TAG, keys[: 2 * MARGIN], DIM)[1]].tolist())
        assert len(gone) >= MARGIN
    assert len(gone) > 1.3 * MARGIN  # not the same ones each time
    assert lengths(client, "t") == [0] * PARTITIONS


def test_the_oldest_go_and_a_fetch_makes_a_row_young(opened, client):
    database = opened("evict_oldest")
    keys = keys_of_partition(0, MARGIN + 1)
    put(database, keys[:MARGIN])
    age(client, 0, keys[:MARGIN], 1000)
    age(client, 0, keys[:30], 2000)
    fetched(database, TAG, keys[40:70], DIM)
    assert database.drain(PATIENCE_S)
    put(database, keys[MARGIN:])
    found = fetched(database, TAG, keys, DIM)[1]
    assert found[:30].all()
    assert found[40:70].all()
    assert found[MARGIN]
    assert found.sum() == 80
    assert database.drain(PATIENCE_S)
    assert lengths(client, "t") == lengths(client)


def test_the_least_used_go_and_counts_age(opened, client):
    database = opened("evict_least_used")
    keys = keys_of_partition(3, MARGIN + 1)
    put(database, keys[:MARGIN])
    for _ in range(5):
        fetched(database, TAG, keys[:60], DIM)
    fetched(database, TAG, keys[60:70], DIM)
    assert database.drain(PATIENCE_S)
    put(database, keys[MARGIN:])
    found = fetched(database, TAG, keys, DIM)[1]
    assert found[:70].all()
    assert found.sum() == 80
    assert database.drain(PATIENCE_S)
    counts = {key: int(count) for key, count in client.hgetall(f"hps_et{{{TAG}/p3}}t").items()}
    assert counts[keys[:1].tobytes()] == 6 // 2 + 1
    assert counts[keys[60:61].tobytes()] == 2 // 2 + 1


def test_notes_without_rows_and_rows_without_notes_do_not_stop_eviction(opened, client):
    database = opened("evict_oldest")
    keys = keys_of_partition(1, MARGIN + 1)
    put(database, keys[:MARGIN])
    age(client, 1, keys_of_partition(1, 500, seed=9), 10)  # older than any row
    for key in keys_of_partition(2, 300):
        client.hset(f"hps_et{{{TAG}/p2}}v", key.tobytes(), bytes(4 * DIM))
    for partition, more in ((1, keys[MARGIN:]), (2, keys_of_partition(2, 1, seed=5))):
        put(database, more)
        assert round(0.8 * MARGIN) <= lengths(client)[partition] <= MARGIN


@pytest.mark.parametrize("policy", ["evict_random", "evict_oldest"])
def test_margins_hold_beside_other_writers(opened, client, policy):
    databases = [opened(policy), opened(policy)]
    keys = distinct_keys(8000)

    def write(i):
        part = keys[i * 1000 : (i + 1) * 1000]
        for start in range(0, 1000, 100):
            put(databases[i % 2], part[start : start + 100].copy())

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(8)))
    assert max(lengths(client)) <= MARGIN
    assert min(lengths(client)) >= round(0.8 * MARGIN)
    out, found = fetched(databases[0], TAG, keys, DIM)
    np.testing.assert_array_equal(out[found], vectors_of(keys, DIM)[found])
