"""What one server keeps in `tests/ring1/stores/redis`, against a cluster, and against a server that notes uses."""

from contextlib import closing

import pytest

from hps.stores.redis.database import RedisDatabase
from tests.ring1.stores.redis import test_redis_database as one_server
from tests.ring1.stores.redis.test_redis_users import (  # noqa: F401 - collected here, too
    shared,
    test_a_full_redis_renews_and_drops,
    test_a_table_that_this_process_never_opened_can_be_discarded,
    test_nobody_loses_a_table_between_opening_and_discarding_it,
    test_rows_that_may_be_hugectrs_are_left_alone,
    test_the_last_user_drops_a_table_and_nothing_of_it_is_left,
)

pytestmark = pytest.mark.redis


@pytest.fixture
def servers(cluster):
    """Of the users of a table."""
    return cluster.address, cluster.servers


class TestRedisServerThatNotesUses(one_server.TestRedisServer):
    @pytest.fixture
    def database(self, opened, client):
        self.clients = [client]
        return opened(overflow_policy="evict_least_used")


class TestRedisCluster(one_server.TestRedisServer):
    @pytest.fixture
    def database(self, cluster):
        self.clients = [server.client() for server in cluster.servers]
        for client in self.clients:
            client.flushall()
        with closing(RedisDatabase(cluster.address, num_partitions=one_server.PARTITIONS)) as database:
            yield database
        for client in self.clients:
            client.close()

    def test_it_is_found_to_be_a_server(self, database):
        assert database.clustered
