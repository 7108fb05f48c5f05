"""What Dragonfly says otherwise in INFO and in errors, as its source of 1.40 reads, and a script that it refuses half way."""

import re
from contextlib import closing
from functools import partial

import numpy as np
import pytest

from hps.configuration.tiers import VolatileDbConfig
from hps.errors import DatabaseError, UnknownTableError
from hps.stores.redis.catalog import Catalog
from hps.stores.redis.database import RedisDatabase
from hps.stores.redis.layout import KeyPartition
from hps.stores.redis.marks import Mark
from hps.stores.redis.nodes import evicts_any_key, is_replica, program_of
from hps.testing.databases import TAG, distinct_keys, vectors_of
from hps.types import TableSpec
from tests.servers.redis_proxy import Proxy

KEYS = distinct_keys(100)


def test_programs_tell_themselves_apart():
    redis, valkey, dragonfly = {"redis_version": "7.4.0"}, {"valkey_version": "8.1"}, {"dragonfly_version": "df-v1.40.0"}
    named = [program_of(facts) for facts in (redis, redis | valkey, redis | dragonfly, {})]
    assert named == ["Redis 7.4.0", "Valkey 8.1", "Dragonfly df-v1.40.0", "Redis ?"]
    assert [is_replica({"role": role}) for role in ("slave", "replica", "master")] == [True, True, False]
    policies = ("allkeys-random", "eviction", "noeviction", "volatile-lru")
    assert [evicts_any_key({"maxmemory_policy": policy}) for policy in policies] == [True, True, False, False]


@pytest.mark.redis
def test_a_replica_is_refused_by_a_check_and_eviction_warned_of(server, client, monkeypatch, caplog, request):
    for name, value, usual in (("maxmemory", "100mb", "0"), ("maxmemory-policy", "allkeys-lru", "noeviction")):
        client.config_set(name, value)
        request.addfinalizer(partial(client.config_set, name, usual))
    with closing(RedisDatabase(server.address, num_partitions=4)) as database:
        database.open_table(TAG, 8)
    assert "maxmemory-policy is allkeys-lru" in caplog.text
    config, tables = VolatileDbConfig(type="redis_cluster", address=server.address), {TableSpec("m", "t", 4, 0.0, 10): 1}
    assert {one.level for one in RedisDatabase.probe(config, tables)} == {"good"}
    monkeypatch.setattr("hps.stores.redis.server_check.is_replica", lambda facts: True)
    found = RedisDatabase.probe(config, tables)
    assert found[0].level == "wrong"
    assert "is a replica; give the address of the primary" in found[0].text


@pytest.mark.redis
def test_a_script_that_is_refused_half_way_leaves_no_mark_where_rows_are_missing(opened, client):
    """A full Dragonfly refuses SET in a script; so does a server to a user without that right."""
    database = opened()
    database.open_table(TAG, 8)
    database.insert(TAG, KEYS, vectors_of(KEYS, 8))
    client.acl_setuser("hps", enabled=True, passwords=["+secret"], keys=["*"], commands=["+@all", "-set"])
    nodes = opened(user_name="hps", password="secret")._nodes
    partition = KeyPartition(TAG, 0)
    with pytest.raises(DatabaseError, match=r"may not do this|ACL failure"):  # as Redis says it, and as Valkey does
        Catalog(nodes, 4).change([(partition, client.get(partition.mark), Mark("new", "new"))], empty=[True])
    client.acl_deluser("hps")
    assert not client.exists(partition.values)
    with pytest.raises(UnknownTableError, match="was lost after it was opened"):
        database.fetch(TAG, KEYS, np.empty((100, 8), np.float32), np.zeros(100, np.bool_))


@pytest.mark.redis
def test_its_error_when_it_is_full_says_what_to_do(server, client):
    with Proxy(server.port) as link, closing(RedisDatabase(link.address, num_partitions=4)) as database:
        link.fault = lambda reply: re.sub(b"-OOM [^\r]*", b"-ERR Out of memory", reply)
        database.open_table(TAG, 8)
        client.config_set("maxmemory", "1mb")
        try:
            with pytest.raises(DatabaseError, match=r"Out of memory; it is full: give it more maxmemory"):
                database.insert(TAG, KEYS, vectors_of(KEYS, 8))
        finally:
            client.config_set("maxmemory", "0")
