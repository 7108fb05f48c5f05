"""Redis streams behind the contract of a log of updates, against real servers."""

import threading
import time

import pytest

from hps.errors import ConfigError
from hps.updates.base import Partition
from hps.updates.redis_streams import RedisStreamLog, RedisStreamWriter
from tests.contracts.update_log_contract import UpdateLogContract, eventually, polled, values, written
from tests.servers.redis_server import RedisClusterServers, RedisServer

pytestmark = pytest.mark.redis


def key_of(partition):
    return f"{{{partition.topic}}}/{partition.number}"


class Server(RedisServer):
    def stop(self):
        self.kill()


class RedisStreams(UpdateLogContract):
    log_class = RedisStreamLog
    writer_class = RedisStreamWriter

    def settings(self, server):
        return {"type": "redis_stream", "address": server.address}

    def add_partitions(self, server, topic, count):
        server.client().set(topic, count)

    def committed(self, server, group, partition):
        for found in server.client().xinfo_groups(key_of(partition)):
            if found["name"] == group.encode():
                return found["last-delivered-id"].decode()
        return None

    def remove_until(self, server, partition, position):
        ms, number = position.split("-")
        server.client().xtrim(key_of(partition), minid=f"{ms}-{int(number) + 1}", approximate=False)


class TestServer(RedisStreams):
    @pytest.fixture
    def server(self, tmp_path):
        with Server(tmp_path, "--appendonly", "yes", "--appendfsync", "always") as server:
            yield server
