"""Redis streams of a cluster behind the contract of a log of updates."""

import pytest
from redis import RedisCluster

from tests.ring2.updates.test_redis_streams import RedisStreams
from tests.servers.redis_server import RedisClusterServers

pytestmark = pytest.mark.redis


class Cluster(RedisClusterServers):
    def stop(self):
        self.__exit__()

    def start(self):
        for server in self.servers:
            server.start()
        self.wait_whole()

    def client(self):
        return RedisCluster("127.0.0.1", self.servers[0].port, protocol=2)


class TestCluster(RedisStreams):
    @pytest.fixture(scope="class")
    @classmethod
    def cluster(cls, tmp_path_factory):
        with Cluster(tmp_path_factory.mktemp("cluster"), 3, "--appendonly", "yes", "--appendfsync", "always") as cluster:
            yield cluster

    @pytest.fixture
    def server(self, cluster):
        if cluster.servers[0].process is None:  # the last test stopped it
            cluster.start()
        return cluster
