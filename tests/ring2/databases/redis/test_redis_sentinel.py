"""Redis behind sentinels, on a unix socket, and with a password that changes."""

import time
from contextlib import closing

import numpy as np
import pytest
import redis

from hps.databases.redis.database import RedisDatabase
from hps.errors import DatabaseError
from tests.servers.redis_server import RedisServer, free_ports

pytestmark = pytest.mark.redis

TAG, DIM, WAIT_S = "hps_et.m.item", 4, 30.0
KEYS = np.arange(100)


def vectors_of(version):
    return np.repeat(KEYS[:, None] + 1000.0 * version, DIM, 1).astype(np.float32)


def fetched(database):
    out, found = np.zeros((KEYS.size, DIM), np.float32), np.zeros(KEYS.size, np.bool_)
    database.fetch(TAG, KEYS, out, found)
    return out, found


def until(condition):
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def trying(action):
    """Repeat what a failover refuses, until it succeeds."""
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            return action()
        except DatabaseError:
            assert time.monotonic() < deadline
            time.sleep(0.05)


class Watched:
    """Two servers, one of which copies the other, and three sentinels, which replace a primary after half a second."""

    def __init__(self, directory):
        self.servers = [RedisServer(directory / f"server-{nth}").start() for nth in range(2)]
        first, second = self.servers
        second.client().replicaof("127.0.0.1", first.port)
        until(lambda: second.client().info("replication")["master_link_status"] == "up")
        self.sentinels = []
        for nth, port in enumerate(free_ports(3)):
            lines = (
                f"sentinel monitor shop 127.0.0.1 {first.port} 2",
                "sentinel down-after-milliseconds shop 500",
                "sentinel failover-timeout shop 2000",
            )
            self.sentinels.append(RedisServer(directory / f"sentinel-{nth}", port=port, sentinel=lines).start())
        for one in self.sentinels:
            until(lambda one=one: one.client().sentinel_master("shop")["num-other-sentinels"] == 2)
            until(lambda one=one: one.client().sentinel_master("shop")["num-slaves"] == 1)

    @property
    def address(self):
        return ",".join(one.address for one in self.sentinels)

    def close(self):
        for one in (*self.sentinels, *self.servers):
            one.kill()

    def returns(self, place):
        """Start a server that was the primary, as a copy of the one that is."""
        back, primary = self.servers[place].start(), self.servers[1 - place]

        def copies():
            facts = back.client().info("replication")
            if facts["role"] == "master":  # a sentinel may take it for the primary once more
                back.client().replicaof("127.0.0.1", primary.port)
            return facts.get("master_link_status") == "up"

        until(copies)
        for one in self.sentinels:
            until(lambda one=one: [copy["is_sdown"] for copy in one.client().sentinel_slaves("shop")] == [False])

    def named(self):
        """The ports that the sentinels name."""
        return {one.client().sentinel_get_master_addr_by_name("shop")[1] for one in self.sentinels if one.process}


@pytest.fixture
def watched(tmp_path):
    with closing(Watched(tmp_path)) as one:
        yield one


@pytest.mark.slow
def test_the_primary_is_followed_through_two_failovers(watched):
    with closing(RedisDatabase(watched.address, sentinel_service="shop", num_partitions=2)) as database:
        database.open_table(TAG, DIM)
        database.insert(TAG, KEYS, vectors_of(1))
        assert watched.servers[0].client().dbsize()
        assert fetched(database)[1].all()

        for old, new in ((0, 1), (1, 0)):
            watched.servers[old].kill()
            until(lambda new=new: watched.named() == {watched.servers[new].port})
            trying(lambda new=new: database.insert(TAG, KEYS, vectors_of(new + 2)))
            out, found = trying(lambda: fetched(database))
            assert found.all()
            np.testing.assert_array_equal(out, vectors_of(new + 2))
            watched.returns(old)
        watched.sentinels[0].kill()  # whichever of them answers
        time.sleep(1.2)
        np.testing.assert_array_equal(fetched(database)[0], vectors_of(2))


def test_a_primary_that_was_cut_off_is_left_although_it_answers(watched):
    settings = {"sentinel_service": "shop", "num_partitions": 2}
    with (
        closing(RedisDatabase(watched.address, **settings)) as idle,
        closing(RedisDatabase(watched.address, **settings)) as busy,
    ):
        for one in (idle, busy):
            one.open_table(TAG, DIM)
        idle.insert(TAG, KEYS, vectors_of(1))
        np.testing.assert_array_equal(fetched(busy)[0], vectors_of(1))
        old, new = watched.servers
        old.pause()
        until(lambda: watched.named() == {new.port})
        trying(lambda: busy.insert(TAG, KEYS, vectors_of(2)))
        old.resume()  # it has the older rows and open connections, and takes itself for the primary for some seconds
        assert old.client().info("replication")["role"] == "master"
        end = time.monotonic() + 3
        while time.monotonic() < end:
            for one in (idle, busy):
                np.testing.assert_array_equal(trying(lambda one=one: fetched(one))[0], vectors_of(2))


@pytest.mark.parametrize(
    ("service", "problem"), [("other", "knows no primary named 'other'"), ("shop", "none of 1 sentinels led to a primary")]
)
def test_what_is_no_sentinel_of_the_primary_is_said(tmp_path, service, problem):
    server = RedisServer(tmp_path / "redis").start()
    sentinel = RedisServer(tmp_path / "sentinel", sentinel=(f"sentinel monitor shop {server.address.replace(':', ' ')} 1",))
    sentinel.start()
    try:
        with pytest.raises(DatabaseError, match=problem):
            RedisDatabase(sentinel.address if service == "other" else server.address, sentinel_service=service)
    finally:
        sentinel.kill()
        server.kill()


def test_a_unix_socket_serves_as_an_address(tmp_path):
    path = tmp_path / "redis.sock"
    server = RedisServer(tmp_path / "redis", "--unixsocket", str(path)).start()
    try:
        for _ in range(2):  # a client, and another one after it
            with closing(RedisDatabase(f"unix://{path}", num_partitions=2)) as database:
                database.open_table(TAG, DIM)
                database.insert(TAG, KEYS, vectors_of(1))
                np.testing.assert_array_equal(fetched(database)[0], vectors_of(1))
                server.kill()
                with pytest.raises(DatabaseError, match=r"redis\.sock"):
                    fetched(database)
                server.start()
                until(path.exists)
    finally:
        server.kill()


def test_a_password_that_changes_is_read_by_new_connections(tmp_path):
    path = tmp_path / "password"
    path.write_text("first\n")
    server = RedisServer(tmp_path / "redis", "--requirepass", "first").start()
    try:
        with closing(RedisDatabase(server.address, password_path=str(path), num_partitions=2)) as database:
            database.open_table(TAG, DIM)
            database.insert(TAG, KEYS, vectors_of(1))
            for number in range(2):
                before, after = ("first", "second") if number == 0 else ("second", "third")
                with closing(server.client(password=before)) as admin:
                    admin.config_set("requirepass", after)
                    np.testing.assert_array_equal(fetched(database)[0], vectors_of(1))  # open connections stay
                    admin.client_kill_filter(_type="normal")
                path.write_text(after)
                out, found = trying(lambda: fetched(database))
                assert found.all()
                np.testing.assert_array_equal(out, vectors_of(1))
            path.unlink()
            with closing(redis.Redis("127.0.0.1", server.port, password="third")) as admin:
                admin.client_kill_filter(_type="normal")
            with pytest.raises(DatabaseError, match="password_path"):
                fetched(database)
    finally:
        server.kill()
