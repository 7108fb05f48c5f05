"""A Redis server for the tests of this folder that need one, databases over it, and a place for a RocksDB."""

from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from hps.stores.redis.database import RedisDatabase
from tests.servers.redis_server import RedisServer


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def client(server):
    """redis-py on the server, which is empty."""
    with server.client() as client:
        client.flushall()
        yield client


@pytest.fixture
def opened(server, client):
    """Open databases over the server, each as another process would; they are closed after the test."""
    with ExitStack() as databases:

        def open_database(**settings):
            settings = {"num_partitions": 4, **settings}
            return databases.enter_context(closing(RedisDatabase(server.address, **settings)))

        yield open_database


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where a RocksDB may be made."""
    return tmp_path / "rocksdb"
