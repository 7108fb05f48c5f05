"""A Redis that says in INFO and in errors what Dragonfly says, as its source of 1.40 reads: nothing else of it is imitated."""

import re
from contextlib import closing

import numpy as np
import pytest

from hps.configuration.tiers import VolatileDbConfig
from hps.databases.redis.catalog import Catalog
from hps.databases.redis.database import RedisDatabase
from hps.databases.redis.layout import KeyPartition
from hps.databases.redis.marks import Mark
from hps.errors import CapacityError, DatabaseError, UnknownTableError
from hps.testing.databases import TAG, distinct_keys, vectors_of
from hps.types import TableSpec
from tests.servers.redis_proxy import Proxy

pytestmark = pytest.mark.redis
TABLES = {TableSpec("m", "t", 4, 0.0, 10): 1}


class Dragonfly:
    """Changes replies; a reply to INFO that comes in pieces is put together first.

    Attributes:
        replaced: what of the text of INFO, by what.
    """

    def __init__(self) -> None:
        self.replaced = {rb"redis_version:.*": rb"redis_version:7.4.0\r\ndragonfly_version:df-v1.40.0"}
        self.replaced[rb"total_system_memory.*\r\n"] = b""
        self._kept = b""

    def __call__(self, reply: bytes) -> bytes:
        reply, self._kept = self._kept + reply, b""
        if not (head := re.match(rb"\$(\d+)\r\n# (Server|Memory)", reply)):
            return re.sub(rb"-OOM [^\r]*", b"-ERR Out of memory", reply)
        size, start = int(head[1]), reply.index(b"\n") + 1
        if len(reply) < start + size + 2:
            self._kept = reply
            return b""
        text = reply[start : start + size]
        for pattern, instead in self.replaced.items():
            text = re.sub(pattern, instead, text)
        return b"$%d\r\n%b%b" % (len(text), text, reply[start + size :])


@pytest.fixture
def dragonfly(server, client):
    with Proxy(server.port) as proxy:
        proxy.fault = Dragonfly()
        yield proxy
    client.config_set("maxmemory", "0")


def config_of(dragonfly):
    return VolatileDbConfig(type="redis_cluster", address=dragonfly.address)


def test_a_check_names_it(dragonfly):
    found = RedisDatabase.probe(config_of(dragonfly), TABLES)
    assert {one.level for one in found} == {"good"}
    assert found[0].text == f"Dragonfly df-v1.40.0 at {dragonfly.address}: a server"


@pytest.mark.parametrize("role", [b"slave", b"replica"])
def test_a_check_finds_that_it_is_a_replica(dragonfly, role):
    dragonfly.fault.replaced[rb"role:master"] = b"role:" + role
    found = RedisDatabase.probe(config_of(dragonfly), TABLES)
    assert found[0].level == "wrong"
    assert "is a replica; give the address of the primary" in found[0].text


def test_its_eviction_is_warned_of_and_makes_room(dragonfly, client, caplog):
    client.config_set("maxmemory", client.info("memory")["used_memory"] + (1 << 20))
    full = pytest.raises(CapacityError, match="below its maxmemory")
    with closing(RedisDatabase(dragonfly.address, num_partitions=4)) as database, full:
        database.check_room([(TAG, 8, 1_000_000)])
    assert not caplog.records
    dragonfly.fault.replaced[rb"maxmemory_policy.*"] = b"maxmemory_policy:eviction\r"
    with closing(RedisDatabase(dragonfly.address, num_partitions=4)) as database:
        database.check_room([(TAG, 8, 1_000_000)])
    assert "maxmemory-policy is eviction" in caplog.text


def test_a_script_that_is_refused_half_way_leaves_no_mark_where_rows_are_missing(opened, client):
    """A full Dragonfly refuses SET in a script; so does a server to a user without that right."""
    keys = distinct_keys(100)
    database = opened()
    database.open_table(TAG, 8)
    database.insert(TAG, keys, vectors_of(keys, 8))
    client.acl_setuser("hps", enabled=True, passwords=["+secret"], keys=["*"], commands=["+@all", "-set"])
    nodes = opened(user_name="hps", password="secret")._nodes
    partition = KeyPartition(TAG, 0)
    with pytest.raises(DatabaseError, match=r"may not do this|ACL failure"):  # as Redis says it, and as Valkey does
        Catalog(nodes, 4).change([(partition, client.get(partition.mark), Mark("new", "new"))], empty=[True])
    client.acl_deluser("hps")
    assert not client.exists(partition.values)
    with pytest.raises(UnknownTableError, match="is not what it was"):
        database.fetch(TAG, keys, np.empty((100, 8), np.float32), np.zeros(100, np.bool_))


def test_its_error_when_it_is_full_says_what_to_do(dragonfly, client):
    keys = distinct_keys(100)
    with closing(RedisDatabase(dragonfly.address, num_partitions=4)) as database:
        database.open_table(TAG, 8)
        client.config_set("maxmemory", "1mb")
        with pytest.raises(DatabaseError, match=r"Out of memory; it is full: give it more maxmemory"):
            database.insert(TAG, keys, vectors_of(keys, 8))
