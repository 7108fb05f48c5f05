"""Redis dies, stalls, fills up or moves while lookups go on: no wrong vector, no call beyond its timeout, healed by itself."""

import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager

import numpy as np
import pytest

from hps.databases.base import RowChanges
from hps.databases.redis.database import RedisDatabase
from hps.databases.redis.layout import KeyPartition
from hps.databases.rocks_db.database import RocksDatabase
from hps.errors import DatabaseError, DatabaseTimeoutError
from hps.lookup.chain import DatabaseChain
from hps.lookup.circuit_breaker import CircuitBreaker
from hps.statistics.metrics import Metrics
from hps.testing.databases import distinct_keys, vectors_of
from hps.types import TableSpec
from tests.servers.redis_server import NODE_TIMEOUT_MS, RedisClusterServers, RedisServer, server_program, valkey_program

pytestmark = pytest.mark.redis
TABLE = TableSpec("shop", "item", 16, 0.0, 1000)
TAG, DIM, PARTITIONS = TABLE.tag, TABLE.dim, 8
ANOTHER = "hps_et.shop.another"
KEYS = distinct_keys(5000)
VECTORS = vectors_of(KEYS, DIM)
PRESENT = 4000  # the others are in no database
SLACK_S = 60.0  # of a busy machine; a call that hangs hangs for ever
HEALED_S = 180.0


def redis_database(address, **settings):
    return RedisDatabase(address, num_partitions=PARTITIONS, num_node_connections=4, **settings)


def hasty_database(address):
    """For tests in which a server is silent. On a busy machine one that answers may be late for it, too."""
    return redis_database(address, timeout_s=1.0, read_timeout_s=0.5, connect_timeout_s=0.5)


def fill(address, keys):
    with closing(redis_database(address)) as database:
        database.open_table(TAG, DIM)
        database.insert(TAG, keys, VECTORS[: keys.size])


def open_table(database, *table):
    """Open it, however often a server is late."""
    deadline = time.monotonic() + HEALED_S
    while True:
        try:
            return database.open_table(*table)
        except DatabaseTimeoutError:
            assert time.monotonic() < deadline


class Traffic:
    """Four threads that look keys up and judge every answer.

    Attributes:
        lookups: how many were answered.
        failures: errors that lookups raised.
        wrong: answers that were not right.
        slowest_s: the longest call, failed ones included.
    """

    def __init__(self, chain):
        self.chain = chain
        self.lookups = 0
        self.failures = []
        self.wrong = []
        self.slowest_s = 0.0
        self._lock = threading.Lock()
        self._done = threading.Event()

    @contextmanager
    def running(self):
        with ThreadPoolExecutor(4) as pool:
            threads = [pool.submit(self._run, seed) for seed in range(4)]
            try:
                self.wait_for(20)
                yield self
            finally:
                self._done.set()
            for thread in threads:
                thread.result(30)
        assert self.wrong == []
        assert self.slowest_s < SLACK_S

    def wait_for(self, lookups, timeout_s=HEALED_S):
        """Let that many more lookups be answered."""
        self.wait_until(lambda wanted=self.lookups + lookups: self.lookups >= wanted, timeout_s)

    def wait_until(self, condition, timeout_s=HEALED_S):
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, self.failures[-3:]
            time.sleep(0.01)

    def redis_hits(self):
        """Keys that Redis answered so far."""
        return self.chain.metrics.table("shop", "item").hits[1]

    def redis_errors(self):
        """Calls of Redis that failed so far."""
        errors = self.chain.metrics.tier_errors
        return sum(errors.labels("shop", "volatile_db", operation).value for operation in ("read", "write"))

    def wait_for_redis(self):
        """Wait until Redis answers, and not only the database below."""
        for _ in range(3):
            before = self.redis_hits()
            self.wait_until(lambda: self.redis_hits() > before + 500)  # noqa: B023

    def _run(self, seed):
        rng = np.random.default_rng(seed)
        while not self._done.is_set():
            picks = rng.integers(0, KEYS.size, 200)
            out, found = np.full((200, DIM), np.nan, np.float32), np.zeros(200, np.bool_)
            start, failure, problem = time.monotonic(), None, None
            try:
                self.chain.fetch(TABLE, KEYS[picks], out, found)
            except DatabaseError as error:
                failure = error
            seconds = time.monotonic() - start
            if failure is None and (found != (picks < PRESENT)).any():
                problem = "a key that is there was absent, or the reverse"
            if (out[found] != VECTORS[picks][found]).any():
                problem = "a wrong vector"
            with self._lock:
                self.slowest_s = max(self.slowest_s, seconds)
                self.lookups += failure is None
                if failure:
                    self.failures.append(failure)
                if problem:
                    self.wrong.append(problem)
            time.sleep(0.02 if failure else 0.002)


@contextmanager
def tiers(servers, directory, database=redis_database, promote=False):
    """A chain over Redis and, where a directory is given, RocksDB."""
    below = RocksDatabase(directory / "rocks") if directory else None
    metrics = Metrics()
    chain = DatabaseChain(
        database(servers.address),
        below,
        metrics=metrics,
        promote=promote,
        breaker=lambda: CircuitBreaker(failures=3, open_s=0.2),
    )
    chain.metrics = metrics
    try:
        open_table(chain, TABLE)
        fill(servers.address, KEYS[:PRESENT])
        if below:
            below.insert(TAG, KEYS[:PRESENT], VECTORS[:PRESENT])
        yield chain
    finally:
        chain.close()


def refused(chain, pattern):
    """Whether a call of Redis is refused in these words; one that is late is neither that nor an answer."""
    try:
        chain.databases[0].size(TAG)
    except DatabaseTimeoutError:
        return False
    except DatabaseError as error:
        return re.search(pattern, str(error)) is not None
    return False


@pytest.fixture
def server(tmp_path):
    with RedisServer(tmp_path / "redis") as server:
        yield server


@pytest.fixture
def database():
    """Makes the chain's database."""
    return redis_database


when_silent = pytest.mark.parametrize("database", [hasty_database], ids=[""])


@pytest.fixture
def traffic(server, tmp_path, database):
    """Lookups over one server and RocksDB; none may fail."""
    with tiers(server, tmp_path, database, promote=True) as chain:
        with Traffic(chain).running() as traffic:
            yield traffic
        assert traffic.failures == []


@pytest.fixture
def traffic_alone(server, database):
    """Lookups over one server with nothing below: they fail while it does."""
    with tiers(server, None, database) as chain, Traffic(chain).running() as traffic:
        yield traffic


class TestOneServer:
    def test_killed_and_started_empty(self, traffic, server):
        server.kill()
        traffic.wait_for(100)
        server.start()
        traffic.wait_for_redis()  # promoted again from below

    def test_killed_and_started_with_its_data(self, tmp_path):
        with (
            RedisServer(tmp_path / "redis", "--appendonly", "yes", "--appendfsync", "always") as server,
            tiers(server, tmp_path) as chain,
        ):
            with Traffic(chain).running() as traffic:
                for _ in range(3):
                    server.kill()
                    traffic.wait_for(20)
                    server.start()
                    traffic.wait_for_redis()
            assert traffic.failures == []

    @when_silent
    def test_paused(self, traffic, server):
        for _ in range(2):
            server.pause()
            traffic.wait_for(50)
            server.resume()
            traffic.wait_for_redis()

    def test_updated_while_it_is_paused(self, server, tmp_path):
        """Whoever looks a key up after its update returned gets the new vector, although Redis has the old one."""
        with tiers(server, tmp_path, hasty_database) as chain:
            server.pause()
            fresh = vectors_of(KEYS[:100], DIM, version=1)
            updated = []
            chain.insert(TABLE, KEYS[:100], fresh, updated.append)
            assert updated == [True]
            assert chain.quarantined == [TAG]
            deadline = time.monotonic() + HEALED_S
            lookups = 0
            while lookups < 40 or chain.quarantined:  # until what was old has been dropped
                assert time.monotonic() < deadline
                if lookups == 20:
                    server.resume()
                out, found = np.empty((200, DIM), np.float32), np.zeros(200, np.bool_)
                chain.fetch(TABLE, KEYS[:200], out, found)
                assert found.all()
                np.testing.assert_array_equal(out[:100], fresh)
                np.testing.assert_array_equal(out[100:], VECTORS[100:200])
                lookups += 1
                time.sleep(0.02)

    def test_restarted_for_an_instant(self, traffic, server):
        for _ in range(3):
            server.kill()
            server.start()
            traffic.wait_for_redis()

    def test_full(self, traffic, server):
        with server.client() as client:
            client.config_set("maxmemory", "1mb")
            traffic.wait_for_redis()  # reading goes on
            client.delete(KeyPartition(TAG, 0).values, KeyPartition(TAG, 0).mark)
            with pytest.raises(DatabaseError, match=r"OOM.*maxmemory"):
                traffic.chain.databases[0].insert(TAG, KEYS[:10], VECTORS[:10])
            traffic.wait_for(50)
            client.config_set("maxmemory", "0")
        traffic.wait_for_redis()

    def test_loading(self, tmp_path):
        # A key takes 50 ms to load. Redis looks at its clients every 1,024 bytes: fillers of 4 KB see to it that it often does.
        slow = ("--key-load-delay", "50000", "--loading-process-events-interval-bytes", "1024")
        with (
            RedisServer(tmp_path / "redis", "--save", "3600 1") as server,
            tiers(server, tmp_path) as chain,
        ):
            with Traffic(chain).running() as traffic:
                with server.client() as client:
                    client.mset({f"filler{i}": bytes(range(256)) * 16 for i in range(1000)})
                    client.save()
                server.kill()
                quick, server.arguments = server.arguments, (*server.arguments, *slow)
                server.start()
                with server.client() as client:
                    assert client.info("persistence")["loading"]
                    traffic.wait_until(lambda: refused(chain, r"LOADING.*reading its data"))
                    traffic.wait_for(50)
                    client.config_set("key-load-delay", 0)
                traffic.wait_for_redis()
                server.arguments = quick
            assert traffic.failures == []

    def test_read_only(self, traffic, server, tmp_path):
        with RedisServer(tmp_path / "primary") as primary, server.client() as client:
            client.config_set("replica-serve-stale-data", "yes")
            client.replicaof("127.0.0.1", primary.port)
            with pytest.raises(DatabaseError, match=r"READONLY.*replica"):
                traffic.chain.databases[0].insert(TAG, KEYS[:10], VECTORS[:10])
            traffic.wait_for(50)  # and the replica takes over the primary's emptiness
            client.replicaof("no", "one")
            traffic.wait_for_redis()

    def test_a_replica_without_primary(self, traffic, server):
        with server.client() as client:
            client.config_set("replica-serve-stale-data", "no")
            client.replicaof("127.0.0.1", 1)
            with pytest.raises(DatabaseError, match="MASTERDOWN"):
                traffic.chain.databases[0].size(TAG)
            traffic.wait_for(50)
            client.replicaof("no", "one")
        traffic.wait_for_redis()

    def test_password_changed(self, traffic, server):
        with server.client() as client:
            client.config_set("requirepass", "secret")
            client.client_kill_filter(_type="normal", skipme=True)
            with pytest.raises(DatabaseError, match=r"NOAUTH.*password"):
                traffic.chain.databases[0].size(TAG)
            traffic.wait_for(50)
            client.config_set("requirepass", "")
        traffic.wait_for_redis()

    def test_emptied(self, traffic, server):
        with server.client() as client:
            for _ in range(3):
                client.flushall()
                traffic.wait_for(50)
        traffic.wait_for_redis()

    def test_connections_are_killed(self, traffic, server):
        with server.client() as client:
            for _ in range(10):
                client.client_kill_filter(_type="normal", skipme=True)
                traffic.wait_for(10)
        traffic.wait_for_redis()
        assert traffic.chain.databases[0].open_connections <= 4


class TestOneServerAndNothingBelow:
    def test_killed(self, traffic_alone, server):
        server.kill()
        traffic_alone.wait_until(lambda: len(traffic_alone.failures) > 5)
        server.start()
        # It has lost everything: that is an error and not 4000 absent keys, until it is loaded again.
        before = len(traffic_alone.failures)
        traffic_alone.wait_until(lambda: len(traffic_alone.failures) > before + 5)
        database = traffic_alone.chain.databases[0]
        database.open_table("hps_et.another.one", 1)
        another = redis_database(server.address)
        try:
            another.open_table(TAG, DIM)
            before = len(traffic_alone.failures)
            traffic_alone.wait_until(lambda: len(traffic_alone.failures) > before + 5)  # also before its load is claimed
            assert another.claim_load(TAG, "v1", PRESENT) == 0
            another.insert(TAG, KEYS[:PRESENT], VECTORS[:PRESENT])
            another.finish_load(TAG)
        finally:
            another.close()
        traffic_alone.wait_for(50)

    @when_silent
    def test_paused(self, traffic_alone, server):
        server.pause()
        traffic_alone.wait_until(lambda: len(traffic_alone.failures) > 5)
        server.resume()
        traffic_alone.wait_for(50)
        assert isinstance(traffic_alone.failures[0], DatabaseTimeoutError)


@pytest.fixture(scope="module")
def whole_cluster(tmp_path_factory):
    directory = tmp_path_factory.mktemp("cluster")
    durable = "--appendonly", "yes", "--appendfsync", "always"
    with RedisClusterServers(directory, 3, *durable) as cluster:
        yield cluster


class TestCluster:
    @pytest.fixture
    def cluster(self, whole_cluster):
        for server in whole_cluster.servers:
            with server.client() as client:
                client.flushall()
        yield whole_cluster
        whole_cluster.fail_silent_nodes(after_ms=NODE_TIMEOUT_MS)
        whole_cluster.wait_whole()

    @pytest.fixture
    def traffic(self, cluster, tmp_path, database):
        with tiers(cluster, tmp_path, database) as chain:
            with Traffic(chain).running() as traffic:
                yield traffic
            assert traffic.failures == []

    def test_one_shard_is_killed(self, traffic, cluster):
        cluster.masters[1].kill()
        traffic.wait_for(100)
        cluster.fail_silent_nodes(after_ms=1000)
        traffic.wait_until(lambda: not cluster.is_whole())
        traffic.wait_for(50)
        cluster.masters[1].start()
        traffic.wait_for_redis()

    @when_silent
    def test_one_shard_is_paused(self, traffic, cluster):
        cluster.masters[2].pause()
        traffic.wait_for(50)
        cluster.masters[2].resume()
        traffic.wait_for_redis()

    def test_two_shards_are_paused_at_once(self, cluster):
        """What the third answers counts, although the others are waited for first."""
        fill(cluster.address, KEYS)
        database = hasty_database(cluster.address)
        try:
            open_table(database, TAG, DIM)
            for server in cluster.masters[:2]:
                server.pause()
            out, found = np.zeros((KEYS.size, DIM), np.float32), np.zeros(KEYS.size, np.bool_)
            deadline = time.monotonic() + SLACK_S
            while not found.any():  # the third may be late, too
                assert time.monotonic() < deadline
                with pytest.raises(DatabaseTimeoutError, match="silent"):
                    database.fetch(TAG, KEYS, out, found)
            np.testing.assert_array_equal(out[found], VECTORS[found])
        finally:
            for server in cluster.masters[:2]:
                server.resume()
            database.close()

    def test_a_shard_that_hangs_is_not_asked_who_serves_what(self, cluster, caplog):
        database = redis_database(cluster.address, timeout_s=4, read_timeout_s=2, connect_timeout_s=2)
        try:
            open_table(database, TAG, DIM)
            cluster.fail_silent_nodes(after_ms=1000)
            cluster.masters[2].pause()
            with pytest.raises(DatabaseError):
                database.size(TAG)
            partitions = [KeyPartition(TAG, index) for index in range(PARTITIONS)]
            healthy = next(one for one in partitions if cluster.owner(one.slot) is not cluster.masters[2])
            refused = 0
            deadline = time.monotonic() + HEALED_S
            while refused < 15:  # a refresh each, which began with the shard that hangs one time in three
                assert time.monotonic() < deadline
                try:
                    database._nodes.ask(healthy.slot, "GET", healthy.mark)
                except DatabaseError as error:
                    refused += "CLUSTERDOWN" in str(error)  # after a second
                time.sleep(0.11)
        finally:
            cluster.masters[2].resume()
            database.close()
        assert "are asked" not in caplog.text

    def test_the_shard_of_the_first_seed_is_killed_at_the_start(self, cluster, tmp_path):
        cluster.masters[0].kill()
        database = redis_database(cluster.address)
        try:
            with pytest.raises(DatabaseError):
                database.open_table(TAG, DIM)  # three of its eight partitions are there
            cluster.masters[0].start()
            cluster.wait_whole()
            database.open_table(TAG, DIM)
            database.insert(TAG, KEYS, VECTORS)
        finally:
            database.close()

    def test_slots_move(self, cluster, tmp_path):
        with tiers(cluster, tmp_path) as chain, Traffic(chain).running() as traffic:
            before = traffic.redis_hits()
            for index in (*range(PARTITIONS), 0, 0):  # the first one comes back to where it was
                cluster.move_slot(KeyPartition(TAG, index).slot, lambda: traffic.wait_for(5))
                traffic.wait_for(10)
            assert traffic.redis_hits() > before
            assert traffic.failures == []
            assert traffic.redis_errors() == 0  # no lookup needed the database below
            assert chain.databases[0].size(TAG) == PRESENT

    @pytest.mark.parametrize("follow", [False, True])
    def test_slots_move_beside_writers(self, cluster, follow):
        with closing(redis_database(cluster.address, overflow_policy="evict_least_used")) as database:
            self.move_slots_beside_writers(cluster, database, follow)

    def move_slots_beside_writers(self, cluster, database, follow):
        database.open_table(TAG, DIM)
        if follow:
            database.follow_log(TAG)
        done = threading.Event()

        def write(seed):
            versions = 0
            while not done.is_set():
                versions += 1
                keys = KEYS[seed::2].copy()
                vectors = vectors_of(keys, DIM, versions)
                if follow:
                    assert database.apply(TAG, RowChanges(keys, vectors, np.full(keys.size, versions)), {}).all()
                else:
                    database.insert(TAG, keys, vectors)
            return versions

        with ThreadPoolExecutor(2) as pool:
            writers = [pool.submit(write, seed) for seed in range(2)]
            try:
                for index in range(PARTITIONS):
                    cluster.move_slot(KeyPartition(TAG, index).slot)
            finally:
                done.set()
            versions = [writer.result(SLACK_S) for writer in writers]
        out, found = np.empty((KEYS.size, DIM), np.float32), np.zeros(KEYS.size, np.bool_)
        assert database.fetch(TAG, KEYS, out, found) == KEYS.size
        for seed in range(2):
            np.testing.assert_array_equal(out[seed::2], vectors_of(KEYS[seed::2].copy(), DIM, versions[seed]))


@pytest.fixture(params=["redis", pytest.param("valkey", marks=pytest.mark.valkey)])
def program(request):
    return valkey_program() if request.param == "valkey" else server_program()


class TestClusterOfSix:
    """Three masters, each with a replica."""

    @pytest.fixture
    def cluster(self, tmp_path, program):
        with RedisClusterServers(tmp_path / "cluster", 3, replicas=True, program=program) as cluster:
            yield cluster

    def test_replicas_take_over_when_asked_and_the_first_masters_again(self, cluster):
        first, second = cluster.masters[0], cluster.servers[3]
        with tiers(cluster, None) as chain, Traffic(chain).running() as traffic:
            database = chain.databases[0]
            database.open_table(ANOTHER, DIM)
            for version, (old, new) in enumerate([(first, second), (second, first)], start=1):
                cluster.promote(new)
                traffic.wait_for(50)
                written = vectors_of(KEYS, DIM, version)
                database.insert(ANOTHER, KEYS, written)
                out, found = np.empty((KEYS.size, DIM), np.float32), np.zeros(KEYS.size, np.bool_)
                assert database.fetch(ANOTHER, KEYS, out, found) == KEYS.size
                np.testing.assert_array_equal(out, written)
                cluster.wait_for_replica(old, of=new)
            assert traffic.failures == []
            assert database.size(TAG) == PRESENT

    @pytest.mark.slow
    @pytest.mark.parametrize("below", [True, False])
    def test_a_replica_takes_over_and_the_first_master_again_once_it_is_back(self, cluster, tmp_path, below):
        first, second = cluster.masters[0], cluster.servers[3]
        with tiers(cluster, tmp_path if below else None) as chain:
            with Traffic(chain).running() as traffic:
                for old, new in ((first, second), (second, first)):
                    cluster.wait_for_replica(new, of=old)
                    old.kill()
                    cluster.fail_silent_nodes(after_ms=1000)
                    traffic.wait_until(lambda new=new: cluster.is_master(new))
                    cluster.fail_silent_nodes(after_ms=NODE_TIMEOUT_MS)
                    cluster.wait_whole()
                    traffic.wait_for_redis()
                    assert chain.databases[0].size(TAG) == PRESENT
                    fresh = len(traffic.failures)
                    traffic.wait_for(50)
                    assert len(traffic.failures) == fresh  # it is healed for good
                    old.start()
                    cluster.wait_for_replica(old, of=new)
                    cluster.wait_whole()
            assert all(isinstance(failure, DatabaseError) for failure in traffic.failures)
            assert bool(traffic.failures) != below

    @pytest.mark.valkey
    def test_slots_move_in_one_step_there_and_around(self, tmp_path):
        with (
            RedisClusterServers(tmp_path / "cluster", 3, program=valkey_program()) as cluster,
            tiers(cluster, None) as chain,
            Traffic(chain).running() as traffic,
        ):
            before = cluster.owner(KeyPartition(TAG, 0).slot)
            for _ in cluster.masters:
                for index in range(2):
                    cluster.move_slot_atomically(KeyPartition(TAG, index).slot)
                    traffic.wait_for(10)
            assert cluster.owner(KeyPartition(TAG, 0).slot) is before
            assert traffic.failures == []
            assert chain.databases[0].size(TAG) == PRESENT
