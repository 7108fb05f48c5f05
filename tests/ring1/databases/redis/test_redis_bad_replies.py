"""Replies that are cut, changed, late or too many: no wrong vector, a typed error in time, and the next call works."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from hps.databases.redis.database import RedisDatabase
from hps.databases.redis.nodes import RedisNodes
from hps.errors import DatabaseCorruptError, DatabaseError, DatabaseTimeoutError
from hps.testing.databases import distinct_keys, fetched, vectors_of
from tests.servers.redis_proxy import Proxy

pytestmark = pytest.mark.redis
TAG, DIM = "hps_et.shop.item", 8
KEYS = distinct_keys(2000)
VECTORS = vectors_of(KEYS, DIM)
TIMEOUT_S, READ_S = 2.0, 1.0
LONG_S = 60.0  # for a busy machine; no test waits so long unless it fails


@pytest.fixture
def link(server):
    with Proxy(server.port) as link:
        yield link


@pytest.fixture
def database(server, link):
    with server.client() as client:
        client.flushall()
    database = RedisDatabase(
        link.address,
        num_partitions=4,
        num_node_connections=2,
        timeout_s=TIMEOUT_S,
        read_timeout_s=READ_S,
        connect_timeout_s=READ_S,
    )
    database.open_table(TAG, DIM)
    database.insert(TAG, KEYS, VECTORS)
    yield database
    database.close()


def check(out, found):
    np.testing.assert_array_equal(out[found], VECTORS[found])


def fails_in_time(database, error=DatabaseError):
    """Fetch and expect an error; whatever was found before it is right."""
    out, found = np.empty((KEYS.size, DIM), np.float32), np.zeros(KEYS.size, np.bool_)
    start = time.monotonic()
    with pytest.raises(error, match=r"redis 127\.0\.0\.1:\d+: .*fetching 2000 keys of table hps_et.shop.item"):
        database.fetch(TAG, KEYS, out, found)
    assert time.monotonic() - start < LONG_S
    check(out, found)


def works(database):
    """Fetch everything; again where the machine is too busy for the timeouts."""
    deadline = time.monotonic() + LONG_S
    while True:
        try:
            out, found = fetched(database, TAG, KEYS, DIM)
            break
        except DatabaseTimeoutError:
            assert time.monotonic() < deadline
    assert found.all()
    check(out, found)


def once(change):
    """Change the first piece that comes, pass the others on."""
    left = [change]
    return lambda data: left.pop()(data) if left else data


@pytest.mark.parametrize("size", [0, 1, 3, 4, 7, 500, 20_000])
def test_a_reply_that_is_cut_short(database, link, size):
    taken = [0]

    def cut(data):
        if taken[0] >= size:
            return None
        passed = data[: size - taken[0]]
        taken[0] += len(passed)
        return passed

    link.fault = cut
    fails_in_time(database)
    link.fault = None
    works(database)


def test_a_reply_that_stops(database, link):
    link.fault = lambda data: data[:100]
    fails_in_time(database)
    link.fault = None
    works(database)


def test_no_reply_at_all(database, link):
    link.fault = lambda data: b""
    fails_in_time(database, DatabaseTimeoutError)
    link.fault = None
    works(database)


def test_a_reply_that_drips(database, link):
    def drip(data):
        time.sleep(0.05)  # never silent for long, never done
        return data[:1]

    link.fault = drip
    fails_in_time(database)
    link.fault = None
    works(database)


@pytest.mark.parametrize(
    "change", [lambda data: b"$5\r\n" + data, lambda data: data[1:], lambda data: b"HTTP/1.1 200 OK\r\n\r\n"]
)
def test_bytes_that_are_no_reply(database, link, change):
    link.fault = once(change)
    fails_in_time(database, DatabaseCorruptError)
    works(database)


def test_a_reply_that_nobody_asked_for(database, link):
    """Every later reply on this connection would be taken for another's."""
    link.fault = once(lambda data: data + b"+late\r\n")
    with pytest.raises(DatabaseError, match="nobody asked for"):
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
    for i in range(30):
        link.fault = (lambda data: None) if i % 2 else (lambda data: b"?")
        with pytest.raises(DatabaseError):
            fetched(database, TAG, KEYS, DIM)
    link.fault = None
    works(database)
    assert database.open_connections <= 2
    deadline = time.monotonic() + LONG_S
    with server.client() as client:
        while len(client.client_list()) > database.open_connections + 1:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_callers_wait_for_a_connection_no_longer_than_their_timeout(database, link):
    link.fault = lambda data: b""
    seconds = []

    def call(_):
        start = time.monotonic()
        with pytest.raises(DatabaseError):
            fetched(database, TAG, KEYS, DIM)
        seconds.append(time.monotonic() - start)

    with ThreadPoolExecutor(12) as pool:
        list(pool.map(call, range(12)))
    assert max(seconds) < LONG_S
    link.fault = None
    works(database)


def test_more_callers_than_connections_all_get_their_vectors(database):
    with ThreadPoolExecutor(8) as pool:
        for _ in pool.map(lambda _: works(database), range(64)):
            pass
    assert database.open_connections <= 2


def test_closing_beside_calls_ends_them(database, link):
    started = threading.Event()

    def slow(data):
        started.set()
        time.sleep(0.05)
        return data

    link.fault = slow
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(lambda: fetched(database, TAG, KEYS, DIM))
        assert started.wait(LONG_S)
        database.close()
        try:
            out, found = call.result(LONG_S)
            check(out, found)
        except DatabaseError:
            pass
    assert database.open_connections == 0


@pytest.mark.parametrize("dim", [1, 3, 40_000, 200_000])
def test_vectors_of_any_size(server, dim):
    """Of one number, and larger than every buffer."""
    database = RedisDatabase(server.address, num_partitions=2)
    keys = distinct_keys(12)
    vectors = np.random.default_rng(1).random((12, dim), np.float32)
    database.open_table("hps_et.shop.wide", dim)
    database.insert("hps_et.shop.wide", keys, vectors)
    out, found = fetched(database, "hps_et.shop.wide", np.concatenate([keys, ~keys]), dim)
    assert found.tolist() == [True] * 12 + [False] * 12
    np.testing.assert_array_equal(out[:12], vectors)
    (scanned,) = [np.sort(np.concatenate([k for k, _ in database.scan("hps_et.shop.wide", 5)]))]
    np.testing.assert_array_equal(scanned, np.sort(keys))
    database.drop_table("hps_et.shop.wide")
    database.close()


def test_arrays_in_files_and_unaligned_ones(database, tmp_path):
    keys = np.memmap(tmp_path / "keys", np.int64, "w+", shape=KEYS.shape)
    keys[:] = KEYS
    out = np.memmap(tmp_path / "out", np.float32, "w+", shape=VECTORS.shape)
    found = np.memmap(tmp_path / "found", np.bool_, "w+", shape=KEYS.shape)
    assert database.fetch(TAG, keys, out, found) == KEYS.size
    np.testing.assert_array_equal(np.asarray(out), VECTORS)
    database.insert(TAG, keys, out)
    database.delete(TAG, keys[:5])
    shifted = np.frombuffer(bytes(3) + KEYS.tobytes(), np.uint8)[3:].view(np.int64)
    assert not shifted.flags.aligned
    out_shifted = np.zeros(VECTORS.nbytes + 3, np.uint8)[3:].view(np.float32).reshape(VECTORS.shape)
    assert database.fetch(TAG, shifted, out_shifted, np.zeros(KEYS.size, np.bool_)) == KEYS.size - 5
    np.testing.assert_array_equal(out_shifted[5:], VECTORS[5:])
    database.insert(TAG, shifted, out_shifted)


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
