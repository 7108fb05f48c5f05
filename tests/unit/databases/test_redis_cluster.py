"""The contract of a database, against a real server and a real cluster."""

import pytest

from hps.databases.redis.database import RedisDatabase
from tests.contracts.database_contract import DatabaseContract
from tests.servers.redis_server import RedisClusterServers, RedisServer, rows_of

pytestmark = pytest.mark.redis
PARTITIONS = 4


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with RedisClusterServers(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


class TestRedisServer(DatabaseContract):
    @pytest.fixture
    def clients(self, server):
        client = server.client()
        client.flushall()
        yield [client]
        client.close()

    @pytest.fixture
    def database(self, server, clients):
        database = RedisDatabase(server.address, num_partitions=PARTITIONS, timeout_s=20, read_timeout_s=20)
        self.clients = clients
        yield database
        database.close()

    def raw_rows(self, database, tag):
        return rows_of(self.clients, tag, PARTITIONS)

    def test_it_is_found_to_be_a_server(self, database):
        assert not database.clustered


class TestRedisServerThatNotesUses(TestRedisServer):
    @pytest.fixture(params=["evict_least_used", "evict_oldest"])
    def database(self, server, clients, request):
        database = RedisDatabase(
            server.address, num_partitions=PARTITIONS, overflow_policy=request.param, timeout_s=20, read_timeout_s=20
        )
        self.clients = clients
        yield database
        database.close()


class TestRedisCluster(TestRedisServer):
    @pytest.fixture
    def clients(self, cluster):
        clients = [server.client() for server in cluster.servers]
        for client in clients:
            client.flushall()
        yield clients
        for client in clients:
            client.close()

    @pytest.fixture
    def database(self, cluster, clients):
        database = RedisDatabase(cluster.address, num_partitions=PARTITIONS, timeout_s=20, read_timeout_s=20)
        self.clients = clients
        yield database
        database.close()

    def test_it_is_found_to_be_a_server(self, database):
        assert database.clustered
