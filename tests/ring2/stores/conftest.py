"""The Redis server and the place of ring 1, and a cluster."""

import pytest

from tests.ring1.stores.conftest import client as client
from tests.ring1.stores.conftest import opened as opened
from tests.ring1.stores.conftest import path as path
from tests.ring1.stores.conftest import server as server
from tests.servers.redis_server import RedisClusterServers


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with RedisClusterServers(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster
