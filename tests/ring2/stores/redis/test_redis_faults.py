"""Redis dies, stalls, fills up or moves: lookups go on from the database below, no vector is wrong, and it heals by itself."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import numpy as np
import pytest

from hps.engine.chain import DatabaseChain
from hps.engine.circuit_breaker import CircuitBreaker
from hps.errors import DatabaseError, DatabaseTimeoutError
from hps.statistics.metrics import Metrics
from hps.stores.base import RowChanges
from hps.stores.redis.database import RedisDatabase
from hps.stores.redis.layout import KeyPartition
from hps.stores.rocks_db.database import RocksDatabase
from hps.testing.databases import distinct_keys, fetched, vectors_of
from hps.testing.waiting import wait_until
from hps.types import KeyArray, TableSpec
from tests.servers.redis_server import NODE_TIMEOUT_MS, RedisClusterServers, RedisServer, server_program, valkey_program

pytestmark = pytest.mark.redis
TABLE = TableSpec("shop", "item", 16, 0.0, 1000)
TAG, DIM, PARTITIONS = TABLE.tag, TABLE.dim, 8
ANOTHER = "hps_et.shop.another"
KEYS = distinct_keys(1000)
VECTORS = vectors_of(KEYS, DIM)
PRESENT = 800  # the others are in no database


def redis_database(address: str, **settings) -> RedisDatabase:
    return RedisDatabase(address, num_partitions=PARTITIONS, num_node_connections=4, **settings)


def hasty_database(address: str) -> RedisDatabase:
    """For tests in which a server is silent. On a busy machine one that answers may be late for it, too."""
    return redis_database(address, timeout_s=1.0, read_timeout_s=0.5, connect_timeout_s=0.5)


def in_time(call: Callable[..., object], *arguments: object) -> bool:
    """Call what a hasty database may be too late for; return whether it was in time."""
    try:
        call(*arguments)
    except DatabaseTimeoutError:
        return False
    return True


class Tiers:
    """A chain over Redis and, where a directory is given, RocksDB; both hold the rows that are PRESENT."""

    def __init__(self, address: str, directory: Path | None, database=redis_database, promote: bool = False) -> None:
        below = RocksDatabase(directory / "rocks") if directory else None
        self.redis, self.metrics = database(address), Metrics()
        breaker = lambda: CircuitBreaker(failures=3, open_s=0.2)  # noqa: E731
        self.chain = DatabaseChain(self.redis, below, metrics=self.metrics, promote=promote, breaker=breaker)
        wait_until(lambda: in_time(self.chain.open_table, TABLE), "the table is open")
        with closing(redis_database(address)) as filling:
            filling.open_table(TAG, DIM)
            filling.insert(TAG, KEYS[:PRESENT], VECTORS[:PRESENT])
        if below:
            below.insert(TAG, KEYS[:PRESENT], VECTORS[:PRESENT])

    def close(self) -> None:
        self.chain.close()

    def look_up(self, random: np.random.Generator | None = None) -> bool:
        """Look some keys up, and judge the answer; return whether Redis had some of them."""
        random, before = random or np.random.default_rng(), self.redis_hits()
        picks = random.integers(0, KEYS.size, 200)
        out, found = np.full((200, DIM), np.nan, np.float32), np.zeros(200, np.bool_)
        try:
            self.chain.fetch(TABLE, KEYS[picks], out, found)
        finally:
            assert (out[found] == VECTORS[picks][found]).all(), "a wrong vector"
        assert (found == (picks < PRESENT)).all(), "a key that is there was absent, or the reverse"
        return self.redis_hits() > before

    def redis_hits(self) -> int:
        """Keys that Redis answered so far."""
        return self.metrics.table("shop", "item").hits[1]

    def redis_errors(self) -> int:
        """Calls of Redis that failed so far."""
        errors = self.metrics.tier_errors
        return sum(errors.labels("shop", "volatile_db", operation).value for operation in ("read", "write"))

    def refuses(self, pattern: str, call: Callable[[], object] | None = None) -> None:
        with pytest.raises(DatabaseError, match=pattern):
            (call or (lambda: self.redis.size(TAG)))()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path / "redis") as server:
        yield server


# -- what befalls one server: begins before the yield, ends after it ---------------------------------------------------


def killed(server: RedisServer, tiers: Tiers) -> Iterator[None]:
    server.kill()
    tiers.refuses("redis")
    yield
    server.start()  # empty; it is promoted to from below


def restarted_for_an_instant(server: RedisServer, tiers: Tiers) -> Iterator[None]:
    server.kill()
    server.start()
    yield


def paused(server: RedisServer, tiers: Tiers) -> Iterator[None]:
    server.pause()
    yield
    server.resume()


def full(server: RedisServer, tiers: Tiers) -> Iterator[None]:
    with server.client() as client:
        client.config_set("maxmemory", "1mb")
        wait_until(tiers.look_up, "reading goes on")
        client.delete(KeyPartition(TAG, 0).values, KeyPartition(TAG, 0).mark)
        tiers.refuses(r"OOM.*maxmemory", lambda: tiers.redis.insert(TAG, KEYS[:10], VECTORS[:10]))
        yield
        client.config_set("maxmemory", "0")


def read_only(server: RedisServer, tiers: Tiers) -> Iterator[None]:
    with RedisServer(server.directory / "primary") as primary, server.client() as client:
        client.config_set("replica-serve-stale-data", "yes")
        client.replicaof("127.0.0.1", primary.port)
        tiers.refuses(r"READONLY.*replica", lambda: tiers.redis.insert(TAG, KEYS[:10], VECTORS[:10]))
        yield  # and the replica takes over the primary's emptiness
        client.replicaof("no", "one")


def a_replica_without_primary(server: RedisServer, tiers: Tiers) -> Iterator[None]:
    with server.client() as client:
        client.config_set("replica-serve-stale-data", "no")
        client.replicaof("127.0.0.1", 1)
        tiers.refuses("MASTERDOWN")
        yield
        client.replicaof("no", "one")


def password_changed(server: RedisServer, tiers: Tiers) -> Iterator[None]:
    with server.client() as client:
        client.config_set("requirepass", "secret")
        client.client_kill_filter(_type="normal", skipme=True)
        tiers.refuses(r"NOAUTH.*password")
        yield
        client.config_set("requirepass", "")


FAULTS = [killed, restarted_for_an_instant, paused, full, read_only, a_replica_without_primary, password_changed]


@pytest.mark.parametrize("fault", FAULTS)
def test_lookups_go_on_from_below_and_redis_is_used_again(server: RedisServer, tmp_path: Path, fault):
    database = hasty_database if fault is paused else redis_database
    with closing(Tiers(server.address, tmp_path, database, promote=True)) as tiers:
        for _ in range(2):
            wait_until(tiers.look_up, "Redis answers")
            with contextmanager(fault)(server, tiers):
                for _ in range(5):
                    tiers.look_up()
        wait_until(tiers.look_up, "Redis answers again")


def test_a_server_that_reads_its_data_says_so_until_it_has_it_again(tmp_path: Path):
    # A key takes 50 ms to load. Redis looks at its clients every 1,024 bytes: fillers of 4 KB see to it that it often does.
    slow = ("--key-load-delay", "50000", "--loading-process-events-interval-bytes", "1024")
    with RedisServer(tmp_path / "redis", "--save", "3600 1") as server, closing(Tiers(server.address, tmp_path)) as tiers:
        with server.client() as client:
            client.mset({f"filler{i}": bytes(range(256)) * 16 for i in range(1000)})
            client.save()
        server.kill()
        server.arguments = (*server.arguments, *slow)
        server.start()
        with server.client() as client:
            assert client.info("persistence")["loading"]
            tiers.refuses(r"LOADING.*reading its data")
            tiers.look_up()
            client.config_set("key-load-delay", 0)
        wait_until(tiers.look_up, "Redis answers with what it has read")


@pytest.fixture(scope="module")
def whole_cluster(tmp_path_factory):
    durable = "--appendonly", "yes", "--appendfsync", "always"
    with RedisClusterServers(tmp_path_factory.mktemp("cluster"), 3, *durable) as cluster:
        yield cluster


@pytest.fixture
def cluster(whole_cluster):
    for server in whole_cluster.servers:
        with server.client() as client:
            client.flushall()
    yield whole_cluster
    whole_cluster.fail_silent_nodes(after_ms=NODE_TIMEOUT_MS)
    whole_cluster.wait_whole()


def test_one_shard_is_paused_and_another_killed(cluster, tmp_path: Path):
    with closing(Tiers(cluster.address, tmp_path, hasty_database)) as tiers:
        cluster.masters[2].pause()
        for _ in range(5):
            tiers.look_up()
        cluster.masters[2].resume()
        wait_until(tiers.look_up, "Redis answers again")
        cluster.masters[1].kill()
        tiers.look_up()
        cluster.fail_silent_nodes(after_ms=1000)
        wait_until(lambda: tiers.look_up() is not None and not cluster.is_whole(), "the cluster has noticed")
        cluster.masters[1].start()
        wait_until(tiers.look_up, "Redis answers again")


def test_two_shards_are_paused_at_once(cluster):
    """What the third answers counts, although the others are waited for first."""
    with closing(hasty_database(cluster.address)) as database, closing(redis_database(cluster.address)) as filling:
        filling.open_table(TAG, DIM)
        filling.insert(TAG, KEYS, VECTORS)
        wait_until(lambda: in_time(database.open_table, TAG, DIM), "the table is open")
        out, found = np.zeros((KEYS.size, DIM), np.float32), np.zeros(KEYS.size, np.bool_)

        def some_are_found() -> bool:  # the third may be late, too
            with pytest.raises(DatabaseTimeoutError, match="silent"):
                database.fetch(TAG, KEYS, out, found)
            return bool(found.any())

        with ExitStack() as resumed:
            for server in cluster.masters[:2]:
                server.pause()
                resumed.callback(server.resume)
            wait_until(some_are_found, "the third has answered")
        np.testing.assert_array_equal(out[found], VECTORS[found])


def test_slots_move_between_lookups(cluster):
    with closing(Tiers(cluster.address, None)) as tiers:
        for index in (0, 1, 0, 0):  # the first one comes back to where it was
            cluster.move_slot(KeyPartition(TAG, index).slot, tiers.look_up)
            assert tiers.look_up()
        assert tiers.redis_errors() == 0
        assert tiers.redis.size(TAG) == PRESENT


@pytest.mark.parametrize("follow", [False, True])
def test_slots_move_beside_writers(cluster, follow: bool):
    done, halves = threading.Event(), [KEYS[seed::2].copy() for seed in range(2)]

    def write(keys: KeyArray) -> int:
        version = 0
        while not done.is_set():
            version += 1
            vectors = vectors_of(keys, DIM, version)
            if follow:
                assert database.apply(TAG, RowChanges(keys, vectors, np.full(keys.size, version)), {}).all()
            else:
                database.insert(TAG, keys, vectors)
        return version

    settings = {"overflow_policy": "evict_least_used"}
    with closing(redis_database(cluster.address, **settings)) as database, ThreadPoolExecutor(2) as pool:
        database.open_table(TAG, DIM)
        if follow:
            database.follow_log(TAG)
        writers = [pool.submit(write, keys) for keys in halves]
        try:
            for index in range(3):
                cluster.move_slot(KeyPartition(TAG, index).slot)
        finally:
            done.set()
        for keys, writer in zip(halves, writers, strict=True):
            version = writer.result()
            np.testing.assert_array_equal(fetched(database, TAG, keys, DIM)[0], vectors_of(keys, DIM, version))


def test_replicas_take_over_when_asked_and_the_first_masters_again(tmp_path: Path):
    with (
        RedisClusterServers(tmp_path / "cluster", 3, replicas=True, program=server_program()) as cluster,
        closing(Tiers(cluster.address, None)) as tiers,
    ):
        first, second = cluster.masters[0], cluster.servers[3]
        tiers.redis.open_table(ANOTHER, DIM)
        for version, (old, new) in enumerate([(first, second), (second, first)], start=1):
            cluster.promote(new)
            assert tiers.look_up()
            tiers.redis.insert(ANOTHER, KEYS, vectors_of(KEYS, DIM, version))
            np.testing.assert_array_equal(fetched(tiers.redis, ANOTHER, KEYS, DIM)[0], vectors_of(KEYS, DIM, version))
            cluster.wait_for_replica(old, of=new)
        assert tiers.redis.size(TAG) == PRESENT


@pytest.mark.valkey
def test_slots_move_in_one_step_there_and_around(tmp_path: Path):
    with (
        RedisClusterServers(tmp_path / "cluster", 3, program=valkey_program()) as cluster,
        closing(Tiers(cluster.address, None)) as tiers,
    ):
        before = cluster.owner(KeyPartition(TAG, 0).slot)
        for _ in cluster.masters:
            for index in range(2):
                cluster.move_slot_atomically(KeyPartition(TAG, index).slot)
                assert tiers.look_up()
        assert cluster.owner(KeyPartition(TAG, 0).slot) is before
        assert tiers.redis.size(TAG) == PRESENT
