"""Addresses, passwords and rights, against real servers."""

import socket
import threading
from contextlib import closing

import numpy as np
import pytest

from hps.configuration.tiers import VolatileDbConfig
from hps.errors import DatabaseError
from hps.ground.registry import implementation
from hps.statistics.metrics import Metrics
from hps.stores.base import LoadRecord, LogPosition, RowChanges
from hps.stores.redis.database import RedisDatabase
from hps.stores.redis.nodes import parse_addresses
from hps.testing.databases import distinct_keys, fetched, vectors_of
from hps.testing.waiting import PATIENCE_S
from tests import ROOT
from tests.servers.redis_server import RedisServer, free_ports

TAG = "hps_et.shop.item"
KEYS = distinct_keys(1000)


def works(database):
    try:
        database.open_table(TAG, 4)
        database.insert(TAG, KEYS, vectors_of(KEYS, 4))
        out, found = fetched(database, TAG, KEYS, 4)
        assert found.all()
        np.testing.assert_array_equal(out, vectors_of(KEYS, 4))
    finally:
        database.close()
    return True


@pytest.mark.parametrize(
    ("address", "nodes"),
    [
        ("127.0.0.1:7000", [("127.0.0.1", 7000)]),
        ("redis", [("redis", 6379)]),
        ("a:1, b:2;c ; a:1", [("a", 1), ("b", 2), ("c", 6379)]),
        ("[::1]:7001,[fe80::1]", [("::1", 7001), ("fe80::1", 6379)]),
    ],
)
def test_addresses_are_read(address, nodes):
    assert parse_addresses(address) == nodes


@pytest.mark.parametrize("address", ["", "a:b", "a:1,,b:2", "::1:7000"])
def test_what_is_no_address_is_refused(address):
    with pytest.raises(DatabaseError, match="expected host"):
        parse_addresses(address)


def test_nobody_there_and_a_name_that_does_not_exist():
    port = free_ports(1)[0]
    for address, reason in (
        (f"127.0.0.1:{port}", rf"127.0.0.1:{port}.*refused.*enable_tls"),
        ("no-such-host.invalid:7", "no-such"),
    ):
        with pytest.raises(DatabaseError, match=reason):
            RedisDatabase(address)


def test_a_name_server_that_is_silent(monkeypatch):
    looked_up = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: looked_up.wait(PATIENCE_S) and [])
    with pytest.raises(DatabaseError, match=r"redis slow:7000: connecting took longer than 0\.2 s"):
        RedisDatabase("slow:7000", connect_timeout_s=0.2)
    looked_up.set()


@pytest.mark.redis
class TestServer:
    def test_a_name_is_looked_up(self, server):
        assert works(RedisDatabase(f"localhost:{server.port}"))

    def test_the_first_seed_that_answers_is_taken(self, server):
        dead = free_ports(1)[0]
        assert works(RedisDatabase(f"127.0.0.1:{dead};{server.address}"))

    def test_a_primary_is_preferred_to_a_replica(self, server, tmp_path):
        with RedisServer(tmp_path, "--replicaof", "127.0.0.1", str(server.port)) as replica:
            assert works(RedisDatabase(f"{replica.address},{server.address}"))

    def test_the_configuration_is_followed(self, server):
        sizes = {"num_partitions": 3, "num_node_connections": 2, "max_batch_size": 100}
        bounds = {"overflow_margin": 200, "overflow_policy": "evict_oldest", "overflow_resolution_target": 0.5}
        config = VolatileDbConfig(type="redis_cluster", address=server.address, **sizes, **bounds)
        with closing(implementation("database", config.type).from_config(config)) as database, server.client() as client:
            database.open_table("hps_et.a.b", 4)
            database.insert("hps_et.a.b", KEYS, vectors_of(KEYS, 4))
            stats = database.stats("hps_et.a.b")
            assert 300 <= stats.rows <= 600 == stats.capacity_rows
            assert client.hlen("hps_et{hps_et.a.b/p2}t") == client.hlen("hps_et{hps_et.a.b/p2}v") > 0
            assert not client.exists("hps_et{hps_et.a.b/p3}v")


@pytest.mark.redis
class TestPassword:
    @pytest.fixture(scope="class")
    @classmethod
    def server(cls, tmp_path_factory):
        users = "--user hps on >pass ~hps_et{* +@all --user idle on >pass ~x +get"
        arguments = ("--requirepass", "s3cret", *users.split())
        with RedisServer(tmp_path_factory.mktemp("redis"), *arguments) as server:
            yield server

    def test_who_gives_it_is_let_in(self, server):
        for user, password in (("default", "s3cret"), ("", "s3cret"), ("hps", "pass")):
            assert works(RedisDatabase(server.address, user_name=user, password=password))

    @pytest.mark.parametrize(
        ("user", "password", "error"),
        [
            ("default", "", "NOAUTH.*HPS_REDIS_PASSWORD"),
            ("default", "wr0ng", "WRONGPASS.*user_name or password"),
            ("nobody", "s3cret", "WRONGPASS"),
            ("idle", "pass", "NOPERM.*grant"),
        ],
    )
    def test_others_are_refused_with_the_reason(self, server, user, password, error):
        with pytest.raises(DatabaseError, match=error) as caught:
            RedisDatabase(server.address, user_name=user, password=password)
        assert not password or password not in str(caught.value)

    def test_the_documented_rights_are_enough(self, tmp_path):
        documented = ROOT.joinpath("docs/redis.md").read_text()
        rights = documented[documented.index("user hps on >password") :].split("\n\n")[0].removesuffix("```").split()
        with RedisServer(tmp_path, "--user", *rights[1:]) as server:
            for policy in ("evict_least_used", "evict_oldest", "evict_random"):
                database = RedisDatabase(
                    server.address, user_name="hps", password="password", overflow_policy=policy, overflow_margin=50
                )
                database.open_table(TAG, 4)
                assert database.claim_load(TAG, "v1", KEYS.size) == 0
                database.load_chunk(TAG, KEYS, vectors_of(KEYS, 4), LoadRecord("v1", KEYS.size, KEYS.size))
                database.finish_load(TAG)
                assert fetched(database, TAG, KEYS, 4)[1].sum() == database.size(TAG) > 0
                assert database.drain(PATIENCE_S)
                assert database.stats(TAG).overhead_bytes > 0
                assert sum(keys.size for keys, _ in database.scan(TAG, 100)) == database.size(TAG)
                database.follow_log(TAG)
                for sequence in (2, 1):
                    sequences, deleted = np.full(KEYS.size, sequence), KEYS % 2 == 0
                    database.apply(TAG, RowChanges(KEYS, vectors_of(KEYS, 4), sequences, deleted), {"p": LogPosition("1")})
                assert database.delete(TAG, KEYS) > 0
                assert database.tags() == [TAG]
                database.check_room([(TAG, 4, KEYS.size)])
                database.drop_table(TAG)
                database.open_table(f"{TAG}@2", 4)
                assert database.discard_table(f"{TAG}@2")
                database.close()

    def test_uses_that_cannot_be_noted_are_not_tried_one_by_one(self, tmp_path):
        reader = "reader on >pass ~hps_et{* +@all -hset"
        with RedisServer(tmp_path, "--user", *reader.split()) as server:
            admin = RedisDatabase(server.address)
            admin.open_table(TAG, 4)
            admin.insert(TAG, KEYS, vectors_of(KEYS, 4))
            admin.close()
            metrics = Metrics()
            database = RedisDatabase(
                server.address, user_name="reader", password="pass", overflow_policy="evict_oldest", metrics=metrics
            )
            database.open_table(TAG, 4)
            for _ in range(30):
                assert fetched(database, TAG, KEYS[:10], 4)[1].all()
            assert database.drain(PATIENCE_S)
            failed = metrics.registry.get_sample_value("hps_background_failed_batches_total", {"work": "redis_uses"})
            assert 1 <= failed < 15
            database.close()

    def test_a_password_that_the_server_does_not_expect_is_an_error(self, tmp_path):
        with RedisServer(tmp_path) as server, pytest.raises(DatabaseError, match="leave password empty"):
            RedisDatabase(server.address, password="s3cret")
