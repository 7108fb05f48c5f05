"""The contract of a database, and what else of Redis it rests on, against a real Valkey."""

import numpy as np
import pytest

from hps.configuration.tiers import VolatileDbConfig
from hps.databases.redis.database import RedisDatabase
from hps.testing.databases import TAG, distinct_keys, vectors_of
from hps.types import TableSpec
from tests.ring2.databases.redis import test_redis_cluster as redis_tests
from tests.servers.redis_server import RedisClusterServers, RedisServer, rows_of, server_program, valkey_program

pytestmark = [
    pytest.mark.valkey,
    pytest.mark.skipif(server_program() == valkey_program(), reason="no other Redis is here: all tests run against it"),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with RedisServer(tmp_path_factory.mktemp("valkey"), program=valkey_program()) as server:
        yield server


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with RedisClusterServers(tmp_path_factory.mktemp("cluster"), program=valkey_program()) as cluster:
        yield cluster


class TestValkeyCluster(redis_tests.TestRedisCluster):
    pass


@pytest.mark.parametrize("policy", ["evict_random", "evict_least_used", "evict_oldest"])
def test_partitions_stay_within_their_margin(opened, client, policy):
    database = opened(overflow_margin=100, overflow_policy=policy)
    keys = distinct_keys(2000)
    database.open_table(TAG, 4)
    for part in np.split(keys, 4):
        database.insert(TAG, part, vectors_of(part, 4))
        assert database.size(TAG) <= 400
    left = rows_of([client], TAG, 4)
    assert len(left) >= 320
    assert all(left[int(key)] == vectors_of(keys[i : i + 1], 4).tobytes() for i, key in enumerate(keys) if int(key) in left)


def test_a_check_names_it(server, client):
    client.acl_setuser("hps", enabled=True, passwords=["+secret"], keys=["hps_et{*"], commands=["+@all", "-hscan"])
    given = {"type": "redis_cluster", "address": server.address, "password": "secret"}
    tables = {TableSpec("m", "t", 4, 0.0, 10): 1}
    named, rights = RedisDatabase.probe(VolatileDbConfig(**given, user_name="hps"), tables)
    assert named.text.startswith("Valkey "), named
    assert "may not HSCAN" in rights.text
    client.acl_deluser("hps")
