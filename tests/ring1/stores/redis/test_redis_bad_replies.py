"""Replies that are cut, changed, late or too many: no wrong vector, a typed error in time, and the next call works."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import numpy as np
import pytest

from hps.errors import DatabaseCorruptError, DatabaseError, DatabaseTimeoutError
from hps.stores.redis.database import RedisDatabase
from hps.stores.redis.nodes import RedisNodes
from hps.testing.databases import distinct_keys, fetched, vectors_of
from hps.testing.waiting import PATIENCE_S, wait_until
from tests.servers.redis_proxy import Proxy

pytestmark = pytest.mark.redis
TAG, DIM = "hps_et.shop.item", 8
KEYS = distinct_keys(2000)
VECTORS = vectors_of(KEYS, DIM)


@pytest.fixture
def link(server):
    with Proxy(server.port) as link:
        yield link


@pytest.fixture
def database(server, link):
    with server.client() as client:
        client.flushall()
    with closing(RedisDatabase(link.address, num_partitions=4, num_node_connections=2)) as database:
        database.open_table(TAG, DIM)
        database.insert(TAG, KEYS, VECTORS)
        yield database


def check(out, found):
    np.testing.assert_array_equal(out[found], VECTORS[found])


def fails(database, error=DatabaseError):
    """Fetch and expect an error; whatever was found before it is right."""
    out, found = np.empty((KEYS.size, DIM), np.float32), np.zeros(KEYS.size, np.bool_)
    with pytest.raises(error, match=r"redis 127\.0\.0\.1:\d+: .*fetching 2000 keys of table hps_et.shop.item"):
        database.fetch(TAG, KEYS, out, found)
    check(out, found)


def works(database):
    out, found = fetched(database, TAG, KEYS, DIM)
    assert found.all()
    check(out, found)


def once(change):
    """Change the first piece that comes, pass the others on."""
    left = [change]
    return lambda data: left.pop()(data) if left else data


@pytest.mark.parametrize("size", [0, 20_000])
def test_a_reply_that_is_cut_short(database, link, size):
    taken = [0]

    def cut(data):
        if taken[0] >= size:
            return None
        passed = data[: size - taken[0]]
        taken[0] += len(passed)
        return passed

    link.fault = cut
    fails(database)
    link.fault = None
    works(database)


@pytest.mark.parametrize("size", [0, 100])
def test_a_reply_that_does_not_come_or_stops(server, link, size):
    """The call ends by a timeout, and so do others that wait for the connection; the next one works."""
    with closing(RedisDatabase(link.address, num_partitions=4, num_node_connections=2, read_timeout_s=0.3)) as database:
        wait_until(lambda: filled(database), "the table is filled")
        left = [size]
        link.fault = lambda data: data[: left.pop()] if left else b""
        with ThreadPoolExecutor(4) as pool:
            for call in [pool.submit(fails, database, DatabaseTimeoutError) for _ in range(4)]:
                call.result()
        link.fault = None
        wait_until(lambda: filled(database), "it answers again")
        wait_until(lambda: not_late(works, database), "all is there")


def not_late(call, *arguments):
    """Call what a busy machine may be too late for; whether it was in time."""
    try:
        call(*arguments)
    except DatabaseTimeoutError:
        return False
    return True


def filled(database):
    return not_late(database.open_table, TAG, DIM) and not_late(database.insert, TAG, KEYS, VECTORS)


@pytest.mark.parametrize(
    "change", [lambda data: b"$5\r\n" + data, lambda data: data[1:], lambda data: b"HTTP/1.1 200 OK\r\n\r\n"]
)
def test_bytes_that_are_no_reply(database, link, change):
    link.fault = once(change)
    fails(database, DatabaseCorruptError)
    works(database)


def test_a_reply_that_nobody_asked_for(database, link):
    """Every later reply on this connection would be taken for another's."""
    link.fault = once(lambda data: data + b"+late\r\n")
    with pytest.raises(DatabaseError, match="it sent unrequested bytes"):
        fetched(database, TAG, KEYS[:1], DIM)
    assert database.open_connections == 0
    works(database)


def test_a_connection_that_was_ended_while_idle_is_opened_again(database, server):
    for _ in range(3):
        with server.client() as client:
            client.client_kill_filter(_type="normal", skipme=True)
        works(database)
    with server.client() as client:
        client.client_kill_filter(_type="normal", skipme=True)
    database.insert(TAG, KEYS, VECTORS)


def test_no_connection_is_leaked_by_failures(database, link, server):
    for i in range(6):
        link.fault = (lambda data: None) if i % 2 else (lambda data: b"?")
        with pytest.raises(DatabaseError):
            fetched(database, TAG, KEYS, DIM)
    link.fault = None
    works(database)
    assert database.open_connections <= 2
    with server.client() as client:
        wait_until(lambda: len(client.client_list()) <= database.open_connections + 1, "the server has seen the others end")


def test_more_callers_than_connections_all_get_their_vectors(database):
    with ThreadPoolExecutor(8) as pool:
        for _ in pool.map(lambda _: works(database), range(32)):
            pass
    assert database.open_connections <= 2


def test_closing_beside_calls_ends_them(database, link):
    started, goes_on = threading.Event(), threading.Event()

    def held(data):
        started.set()
        goes_on.wait(PATIENCE_S)
        return data

    link.fault = held
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(fetched, database, TAG, KEYS, DIM)
        assert started.wait(PATIENCE_S)
        database.close()
        goes_on.set()
        with pytest.raises(DatabaseError):
            call.result()
    assert database.open_connections == 0


def test_vectors_larger_than_every_buffer(opened):
    database, keys, dim = opened(), distinct_keys(12), 100_000
    vectors = np.random.default_rng(1).random((12, dim), np.float32)
    database.open_table(TAG, dim)
    database.insert(TAG, keys, vectors)
    out, found = fetched(database, TAG, np.concatenate([keys, ~keys]), dim)
    assert found.tolist() == [True] * 12 + [False] * 12
    np.testing.assert_array_equal(out[:12], vectors)


def test_unaligned_arrays(database):
    shifted = np.frombuffer(bytes(3) + KEYS.tobytes(), np.uint8)[3:].view(np.int64)
    out = np.zeros(VECTORS.nbytes + 3, np.uint8)[3:].view(np.float32).reshape(VECTORS.shape)
    assert database.fetch(TAG, shifted, out, np.zeros(KEYS.size, np.bool_)) == KEYS.size
    np.testing.assert_array_equal(out, VECTORS)
    database.insert(TAG, shifted, out)


@pytest.mark.parametrize(("count", "batches"), [(1, 1), (100, 1), (101, 2), (250, 3)])
def test_a_fetch_has_the_time_of_all_its_batches_also_of_one_in_part(opened, monkeypatch, count, batches):
    database, keys, left_s = opened(max_batch_size=100, timeout_s=1000), distinct_keys(count), []
    database.open_table(TAG, DIM)
    run = RedisNodes.run

    def run_and_note(nodes, requests, deadline=None):
        left_s.append(deadline - time.monotonic())
        run(nodes, requests, deadline)

    with monkeypatch.context() as patch:
        patch.setattr(RedisNodes, "run", run_and_note)
        fetched(database, TAG, keys, DIM)
    [left] = left_s
    assert 1000 * (batches - 1) < left <= 1000 * batches
