"""Who uses a table of a shared Redis: the last process that gives it up drops it, and nobody loses one that is in use."""

import gc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress

import numpy as np
import pytest
from redis import ResponseError

from hps.errors import TableWidthError, UnknownTableError
from hps.stores.base import LoadRecord
from hps.stores.redis.database import RedisDatabase
from hps.stores.redis.layout import RedisLayout
from hps.testing.databases import distinct_keys, fetched, vectors_of
from hps.testing.waiting import PATIENCE_S
from tests.servers.redis_server import RedisServer

pytestmark = pytest.mark.redis
HUGECTRS = "hps_et.shop.item"
TAG = "hps_et.shop@2.item"
DIM, PARTITIONS = 8, 4
KEYS = distinct_keys(500)
VECTORS = vectors_of(KEYS, DIM)
LAYOUT = RedisLayout.of(TAG, DIM, PARTITIONS)


class SharedRedis:
    """A server or a cluster, and databases over it, each as another process would have it."""

    def __init__(self, address: str, servers: list[RedisServer], databases: ExitStack) -> None:
        self.address, self._databases = address, databases
        self.clients = [databases.enter_context(server.client()) for server in servers]

    def database(self, tag: str = TAG, **settings) -> RedisDatabase:
        database = RedisDatabase(self.address, **{"num_partitions": PARTITIONS, **settings})
        self._databases.enter_context(closing(database))
        if tag:
            database.open_table(tag, DIM)
        return database

    def all_keys(self) -> set[bytes]:
        return {key for client in self.clients for key in client.scan_iter("hps_et{*")}

    def own(self, command: str, *words: object) -> object:
        """Run a command on the node that has the table's own keys."""
        for client in self.clients:
            with suppress(ResponseError):  # MOVED
                return client.execute_command(command, *words)
        raise AssertionError(command)

    def users(self) -> dict[bytes, int]:
        """Until when each user counts."""
        return {user: int(until) for user, until in self.own("HGETALL", LAYOUT.users).items()}

    def fill(self, tag: str = TAG, load: bool = False) -> RedisDatabase:
        """All rows, of a load or of inserts."""
        database = self.database(tag)
        if load:
            database.claim_load(tag, "v1", KEYS.size)
            database.load_chunk(tag, KEYS, VECTORS, LoadRecord("v1", KEYS.size, KEYS.size))
            database.finish_load(tag)
        else:
            database.insert(tag, KEYS, VECTORS)
        return database


@pytest.fixture
def servers(server: RedisServer) -> tuple[str, list[RedisServer]]:
    """Their address and each of them; ring 2 has a cluster in its place."""
    return server.address, [server]


@pytest.fixture
def shared(servers: tuple[str, list[RedisServer]]) -> Iterator[SharedRedis]:
    with ExitStack() as databases:
        shared = SharedRedis(*servers, databases)
        for client in shared.clients:
            client.flushall()
        yield shared


def test_the_last_user_drops_a_table_and_nothing_of_it_is_left(shared: SharedRedis):
    first, second = shared.fill(), shared.database()
    assert first.claim_load(TAG, "v1", 500) == 0  # and does not end it
    for client in shared.clients:
        client.config_resetstat()
    assert not first.discard_table(TAG)
    with pytest.raises(UnknownTableError):
        fetched(first, TAG, KEYS, DIM)
    assert second.claim_load(TAG, "v1", 500) == 0
    second.finish_load(TAG)
    assert fetched(second, TAG, KEYS, DIM)[0].tolist() == VECTORS.tolist()
    assert second.discard_table(TAG)
    assert shared.all_keys() == set()
    for client in shared.clients:
        assert "cmdstat_del" not in client.info("commandstats")  # which frees what it removes before it answers others
    for database in (first, second):
        for owner in (database, database._users, database._leases):
            assert not [name for name, value in vars(owner).items() if isinstance(value, dict) and TAG in value]


def test_a_table_that_this_process_never_opened_can_be_discarded(shared: SharedRedis):
    other = shared.database()
    me = shared.database("")
    assert not me.discard_table(TAG)
    other.close()
    assert LAYOUT.about in shared.all_keys()
    assert me.discard_table(TAG)
    assert me.discard_table(TAG)  # there is nothing to drop
    assert shared.all_keys() == set()


def test_a_table_that_is_being_dropped_is_made_anew_once_it_is_gone(shared: SharedRedis):
    shared.fill().close()
    seconds, _ = shared.own("TIME")
    shared.own("HSET", LAYOUT.about, "dropping", (int(seconds) + 2) * 1000)  # its process dies before it has dropped a row
    me = shared.database("", use_lease_s=1.0)
    me.open_table(TAG, DIM)
    assert int(shared.own("TIME")[0]) >= int(seconds) + 2
    assert not fetched(me, TAG, KEYS, DIM)[1].any()
    assert len(shared.users()) == 1
    me.insert(TAG, KEYS, VECTORS)
    assert fetched(me, TAG, KEYS, DIM)[1].all()


def test_nobody_loses_a_table_between_opening_and_discarding_it(shared: SharedRedis):
    def use(number: int) -> int:
        keys, drops = KEYS[number::3].copy(), 0
        database = shared.database("")
        for _ in range(8):
            database.open_table(TAG, DIM)
            database.insert(TAG, keys, vectors_of(keys, DIM))
            out, found = fetched(database, TAG, keys, DIM)
            assert found.all()
            np.testing.assert_array_equal(out, vectors_of(keys, DIM))
            drops += database.discard_table(TAG)
        return drops

    with ThreadPoolExecutor(3) as processes:
        assert sum(processes.map(use, range(3))) > 0
    assert shared.all_keys() == set()


@pytest.mark.parametrize(
    ("tag", "loaded", "dropped"), [(HUGECTRS, False, False), (HUGECTRS, True, True), (TAG, False, True), (TAG, True, True)]
)
def test_rows_that_may_be_hugectrs_are_left_alone(shared: SharedRedis, tag: str, loaded: bool, dropped: bool):
    if loaded:
        shared.fill(tag, load=True).close()
    else:
        partition = RedisLayout.of(tag, DIM, PARTITIONS).partitions[0]
        shared.own("HSET", partition.values, KEYS[:1].tobytes(), VECTORS[:1].tobytes())
    me = shared.database(tag)
    assert me.discard_table(tag) is dropped
    assert (shared.all_keys() == set()) is dropped
    assert not shared.own("EXISTS", RedisLayout.of(tag, DIM, PARTITIONS).users)


def test_a_full_redis_renews_and_drops(shared: SharedRedis):
    database, other = shared.database(), shared.database()
    (entered, _) = shared.users().values()
    try:
        for client in shared.clients:
            client.config_set("maxmemory", "1")
        database._users.renew()
        assert max(shared.users().values()) > entered
        assert not database.discard_table(TAG)
        assert other.discard_table(TAG)
        assert shared.all_keys() == set()
    finally:
        for client in shared.clients:
            client.config_set("maxmemory", "0")


def test_a_database_that_nobody_holds_renews_nothing(server):
    database = RedisDatabase(server.address, num_partitions=PARTITIONS, use_lease_s=0.2)
    database.open_table(TAG, DIM)
    task = database._users._task
    del database
    gc.collect()
    assert task.join(PATIENCE_S)


def test_an_open_that_fails_makes_no_user(shared: SharedRedis):
    shared.database().close()
    with pytest.raises(TableWidthError):
        shared.database("").open_table(TAG, DIM + 1)
    assert shared.users() == {}
