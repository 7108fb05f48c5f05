"""The contract of a database, against a real server."""

import pytest

from hps.errors import CapacityError
from hps.testing.databases import (
    OTHER,
    TAG,
    AgingRowsContract,
    DatabaseContract,
    LastingContract,
    OrderedWritesContract,
    distinct_keys,
    vectors_of,
)
from tests.servers.redis_server import rows_of

pytestmark = pytest.mark.redis
PARTITIONS = 4


class TestRedisServer(DatabaseContract, LastingContract, OrderedWritesContract, AgingRowsContract):
    @pytest.fixture
    def database(self, opened, client):
        self.clients = [client]
        return opened()

    def raw_rows(self, database, tag):
        return rows_of(self.clients, tag, PARTITIONS)

    def test_it_is_found_to_be_a_server(self, database):
        assert not database.clustered

    def test_room_is_what_maxmemory_leaves_on_each_node(self, database):
        keys = distinct_keys(2000)
        database.open_table(TAG, 8)
        database.insert(TAG, keys, vectors_of(keys, 8))
        try:
            for client in self.clients:
                client.config_set("maxmemory", client.info("memory")["used_memory"] + (1 << 20))
            database.check_room([(TAG, 8, 2000), (OTHER, 8, 1000)])
            refused = r"redis 127.0.0.1:\d+: .* bytes to hold \([\d,]+ for 40,000 rows of table .* free below its maxmemory; "
            for tables in ([(TAG, 8, 40_000)], [(TAG, 8, 2000), (OTHER, 8, 40_000)]):
                with pytest.raises(CapacityError, match=refused):
                    database.check_room(tables)
            for client in self.clients:
                client.config_set("maxmemory-policy", "allkeys-random")  # it makes room by itself, whatever we think of that
            database.check_room([(TAG, 8, 40_000)])
        finally:
            for client in self.clients:
                client.config_set("maxmemory", "0")
                client.config_set("maxmemory-policy", "noeviction")


def test_a_bounded_table_needs_no_more_room_than_its_capacity(opened):
    opened(overflow_margin=100).check_room([(TAG, 8, 1 << 50)])
