"""Redis behind sentinels, on a unix socket, and with a password that changes."""

from contextlib import closing

import numpy as np
import pytest
import redis

from hps.errors import DatabaseError
from hps.stores.redis.database import RedisDatabase
from hps.testing.waiting import wait_until
from tests.servers.redis_server import RedisServer, free_ports

pytestmark = pytest.mark.redis

TAG, DIM = "hps_et.m.item", 4
KEYS = np.arange(100)


def vectors_of(version):
    return np.repeat(KEYS[:, None] + 1000.0 * version, DIM, 1).astype(np.float32)


def fetched(database):
    out, found = np.zeros((KEYS.size, DIM), np.float32), np.zeros(KEYS.size, np.bool_)
    database.fetch(TAG, KEYS, out, found)
    return out, found


def trying(action):
    """Repeat what a failover refuses, until it succeeds; return what it returns."""
    made = []

    def succeeds():
        try:
            made.append(action())
        except DatabaseError:
            return False
        return True

    wait_until(succeeds, "the failover is done")
    return made[0]


LIMITS = ("sentinel down-after-milliseconds shop 500", "sentinel failover-timeout shop 2000")


class Watched:
    """Two servers, one of which copies the other, and three sentinels, which replace a primary after half a second."""

    def __init__(self, directory):
        self.servers = [RedisServer(directory / f"server-{nth}").start() for nth in range(2)]
        first, second = self.servers
        second.client().replicaof("127.0.0.1", first.port)
        wait_until(lambda: second.client().info("replication")["master_link_status"] == "up")
        self.sentinels = []
        for nth, port in enumerate(free_ports(3)):
            lines = (f"sentinel monitor shop 127.0.0.1 {first.port} 2", *LIMITS)
            self.sentinels.append(RedisServer(directory / f"sentinel-{nth}", port=port, sentinel=lines).start())
        for sentinel in self.sentinels:
            wait_until(lambda one=sentinel: one.client().sentinel_master("shop")["num-other-sentinels"] == 2)
            wait_until(lambda one=sentinel: one.client().sentinel_master("shop")["num-slaves"] == 1)

    @property
    def address(self):
        return ",".join(sentinel.address for sentinel in self.sentinels)

    def close(self):
        for sentinel in (*self.sentinels, *self.servers):
            sentinel.kill()

    def returns(self, place):
        """Wait until a server that was the primary copies the one that is; start it where it was killed."""
        back, primary = self.servers[place], self.servers[1 - place]
        if back.process is None:
            back.start()

        def copies():
            facts = back.client().info("replication")
            if facts["role"] == "master":  # a sentinel may take it for the primary once more
                back.client().replicaof("127.0.0.1", primary.port)
            return facts.get("master_link_status") == "up"

        wait_until(copies)
        for sentinel in self.sentinels:
            wait_until(lambda one=sentinel: [copy["is_sdown"] for copy in one.client().sentinel_slaves("shop")] == [False])

    def fail_over(self):
        """Have a sentinel do as if the primary were gone; it refuses what comes too soon after the last time."""
        try:
            self.sentinels[0].client().sentinel_failover("shop")
        except redis.ResponseError as error:
            raise DatabaseError(str(error)) from error

    def named(self):
        """The ports that the sentinels name."""
        return {
            sentinel.client().sentinel_get_master_addr_by_name("shop")[1] for sentinel in self.sentinels if sentinel.process
        }


@pytest.fixture
def watched(tmp_path):
    with closing(Watched(tmp_path)) as one:
        yield one


def test_the_primary_is_followed_there_and_back(watched):
    with closing(RedisDatabase(watched.address, sentinel_service="shop", num_partitions=2)) as database:
        database.open_table(TAG, DIM)
        database.insert(TAG, KEYS, vectors_of(1))
        assert watched.servers[0].client().dbsize()
        for new in (1, 0):
            trying(lambda: watched.fail_over())
            wait_until(lambda new=new: watched.named() == {watched.servers[new].port}, "the sentinels name the other")
            trying(lambda new=new: database.insert(TAG, KEYS, vectors_of(new + 2)))
            np.testing.assert_array_equal(trying(lambda: fetched(database))[0], vectors_of(new + 2))
            watched.returns(1 - new)
        watched.sentinels[0].kill()  # whichever of them answers
        np.testing.assert_array_equal(fetched(database)[0], vectors_of(2))


@pytest.fixture
def server(tmp_path):
    with RedisServer(tmp_path / "redis", "--unixsocket", str(tmp_path / "redis.sock"), "--requirepass", "first") as server:
        yield server


@pytest.mark.parametrize(
    ("service", "problem"), [("other", "knows no primary named 'other'"), ("shop", "none of 1 sentinels led to a primary")]
)
def test_what_is_no_sentinel_of_the_primary_is_said(tmp_path, server, service, problem):
    lines = (f"sentinel monitor shop {server.address.replace(':', ' ')} 1",)
    with RedisServer(tmp_path / "sentinel", sentinel=lines) as sentinel, pytest.raises(DatabaseError, match=problem):
        RedisDatabase(sentinel.address if service == "other" else server.address, sentinel_service=service)


def test_a_unix_socket_serves_as_an_address(tmp_path, server):
    path = tmp_path / "redis.sock"
    for _ in range(2):  # a client, and another one after it
        with closing(RedisDatabase(f"unix://{path}", password="first", num_partitions=2)) as database:
            database.open_table(TAG, DIM)
            database.insert(TAG, KEYS, vectors_of(1))
            np.testing.assert_array_equal(fetched(database)[0], vectors_of(1))
            server.kill()
            with pytest.raises(DatabaseError, match=r"redis\.sock"):
                fetched(database)
            server.start()
            wait_until(path.exists)


def test_a_password_that_changes_is_read_by_new_connections(tmp_path, server):
    path = tmp_path / "password"
    path.write_text("first\n")
    with closing(RedisDatabase(server.address, password_path=str(path), num_partitions=2)) as database:
        database.open_table(TAG, DIM)
        database.insert(TAG, KEYS, vectors_of(1))
        for before, after in (("first", "second"), ("second", "third")):
            with closing(server.client(password=before)) as admin:
                admin.config_set("requirepass", after)
                np.testing.assert_array_equal(fetched(database)[0], vectors_of(1))  # open connections stay
                admin.client_kill_filter(_type="normal")
            path.write_text(after)
            np.testing.assert_array_equal(trying(lambda: fetched(database))[0], vectors_of(1))
        path.unlink()
        with closing(server.client(password="third")) as admin:
            admin.client_kill_filter(_type="normal", skipme=True)
        with pytest.raises(DatabaseError, match="password_path"):
            fetched(database)
