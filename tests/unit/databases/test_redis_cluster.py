"""The contract of a database, against a real server and a real cluster."""

import pytest

from hps.databases.redis.database import RedisDatabase
from tests.contracts.database_contract import DatabaseContract
from tests.servers.redis_server import RedisClusterServers, rows_of

pytestmark = pytest.mark.redis
PARTITIONS = 4


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with RedisClusterServers(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


class TestRedisServer(DatabaseContract):
    @pytest.fixture
    def database(self, opened, client):
        self.clients = [client]
        return opened()

    def raw_rows(self, database, tag):
        return rows_of(self.clients, tag, PARTITIONS)

    def test_it_is_found_to_be_a_server(self, database):
        assert not database.clustered


class TestRedisServerThatNotesUses(TestRedisServer):
    @pytest.fixture(params=["evict_least_used", "evict_oldest"])
    def database(self, opened, client, request):
        self.clients = [client]
        return opened(overflow_policy=request.param)


class TestRedisCluster(TestRedisServer):
    @pytest.fixture
    def database(self, cluster):
        self.clients = [server.client() for server in cluster.servers]
        for client in self.clients:
            client.flushall()
        database = RedisDatabase(cluster.address, num_partitions=PARTITIONS, timeout_s=20, read_timeout_s=20)
        yield database
        database.close()
        for client in self.clients:
            client.close()

    def test_it_is_found_to_be_a_server(self, database):
        assert database.clustered
