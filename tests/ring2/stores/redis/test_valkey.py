"""The contract of a database, and what else of Redis it rests on, against a real Valkey."""

import pytest

from hps.configuration.tiers import VolatileDbConfig
from hps.stores.redis.database import RedisDatabase
from hps.types import TableSpec
from tests.ring2.stores.redis import test_redis_cluster as redis_tests
from tests.servers.redis_server import RedisClusterServers, RedisServer, server_program, valkey_program

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


def test_a_check_names_it(server, client):
    client.acl_setuser("hps", enabled=True, passwords=["+secret"], keys=["hps_et{*"], commands=["+@all", "-hscan"])
    given = {"type": "redis_cluster", "address": server.address, "password": "secret"}
    tables = {TableSpec("m", "t", 4, 0.0, 10): 1}
    named, rights = RedisDatabase.probe(VolatileDbConfig(**given, user_name="hps"), tables)
    assert named.text.startswith("Valkey "), named
    assert "may not HSCAN" in rights.text
    client.acl_deluser("hps")
