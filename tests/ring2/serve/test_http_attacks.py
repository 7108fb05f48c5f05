"""Clients that try to make a server process hold more memory than its budget, or to keep it from answering others."""

import gc
import gzip
import socket
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from http.client import HTTPConnection

import httpx
import pytest

from hps.testing.waiting import PATIENCE_S, wait_until
from tests.servers import attacked_server
from tests.servers.attacked_server import ADMIN, BODY, MB, PATH, TOKEN, attacked, drop_errors, head, serving
from tests.servers.running_service import running_service

CONTAINERS = (list, dict, tuple, set, str, bytes, bytearray, memoryview)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("attacked")) as server:
        yield server


@pytest.fixture
def victim(server):
    with attacked(server) as victim:
        yield victim


def test_no_error_leaves_its_request_to_the_collector_of_garbage(tmp_path):
    """What was read and refused is freed at once: nothing as large is left in a cycle. (httpx makes cycles of its own.)"""
    most, keys, body_bytes = 3000, 1000, 200_000
    limits = {"admin_token": "of-changes", "max_body_bytes": body_bytes, "max_keys_per_request": keys}
    with running_service(attacked_server.document_in(tmp_path, service=limits, max_batch_size=keys)) as service:
        for kind, (method, path, body, encoding) in attacked_server.hostile(most, keys, body_bytes).items():
            gc.collect()
            gc.disable()
            gc.set_debug(gc.DEBUG_SAVEALL)  # what only the collector frees is kept in gc.garbage
            try:
                with closing(HTTPConnection("127.0.0.1", int(service.url.rpartition(":")[2]), timeout=PATIENCE_S)) as client:
                    client.request(method, path, body, ADMIN | {"Content-Encoding": encoding})
                    answer = client.getresponse()
                    assert 400 <= answer.status < 500, (kind, answer.read())
                wait_until(lambda: service.held == 0, "nothing is held any more")
                gc.collect()
                found = [*gc.garbage, *gc.get_referents(*gc.garbage)]
                large = [one for one in found if one is not body and isinstance(one, CONTAINERS) and len(one) > keys]
                assert not large, (kind, [type(one) for one in large])
            finally:
                gc.set_debug(0)
                gc.garbage.clear()
                gc.enable()


def test_small_bodies_that_become_large_are_refused_within_the_budget(tmp_path):
    """Bodies of every kind, one server of its own: what one leaves behind, also in the allocator, must not add up."""
    headers = {"Content-Encoding": "gzip", "Authorization": "Bearer secret"}
    bodies = [(path, text, 3) for path, text in attacked_server.bombs().values()] + [(PATH, b" " * BODY, 32)]
    with serving(tmp_path) as server, attacked(server) as victim, ThreadPoolExecutor(16) as clients:

        def post(path, body):
            address = f"http://127.0.0.1:{victim.port}{path}"
            return httpx.post(address, content=body, headers=headers, timeout=PATIENCE_S).status_code

        for path, text, times in bodies:
            body = gzip.compress(text, 1)
            assert set(clients.map(post, [path] * times, [body] * times)) <= {400, 413, 503}
        victim.check()


CHUNKED = head("Transfer-Encoding: chunked") + b"1\r\nx\r\n0\r\n"
HEADER = b"X: " + b"y" * 1000 + b"\r\n"


@pytest.mark.parametrize(
    ("start", "piece"),
    [
        (CHUNKED, HEADER),
        (CHUNKED, b"a:\r\n" * 1000),
        (CHUNKED + b"X: ", b"y" * 1000),
        (head()[:-2], HEADER),
        (b"GET /", b"y" * 1000),
        (b"", b"GET /v2/health/live HTTP/1.1\r\n\r\n" * 100),
    ],
    ids=["trailers", "short trailers", "a long trailer", "headers", "a long path", "requests whose answers are not read"],
)
def test_what_has_no_end(victim, start, piece):
    with ThreadPoolExecutor(8) as clients, ExitStack() as stack:
        connections = [stack.enter_context(victim.connect()) for _ in range(8)]
        for connection in connections:
            connection.sendall(start)
        list(clients.map(lambda connection: attacked_server.flood(connection, piece, 40 * MB), connections))
        victim.check()


def test_answers_that_are_not_read(victim):
    keys = gzip.compress(b'{"tables": {"item": [' + b"1," * 60_000 + b"1]}}")
    request = head(TOKEN, "Content-Encoding: gzip", f"Content-Length: {len(keys)}") + keys
    with ExitStack() as stack:
        connections = [stack.enter_context(victim.connect()) for _ in range(40)]
        for connection in connections:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.sendall(request)
        for connection in connections:
            drop_errors(lambda connection=connection: connection.recv(1, socket.MSG_PEEK))
        wait_until(lambda: victim.held < 10_000, "those that do not read are gone")
        victim.check()


def test_the_longest_idle_connections_make_room_for_new_ones(victim):
    with ExitStack() as stack:
        silent = [stack.enter_context(victim.connect()) for _ in range(300)]
        for _ in range(20):
            with victim.connect() as late:
                assert lives(late)
        assert sum(closed(connection) for connection in silent) >= 200
        victim.failures.clear()  # its connection may have been one of them
        victim.check()
    assert victim.server.log.count("there are 100 connections") == 1


def closed(connection):
    connection.settimeout(0.01)
    try:
        return connection.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


def test_bad_requests_do_not_fill_the_log(victim):
    def lines():  # the rate of access lines has a bound of its own
        return sum(" hps.access: " not in line for line in victim.server.log.splitlines())

    before, headers = lines(), head()[:-2] + b"a:\r\n" * 200
    for start in (b"\x16\x03\x01\r\n\r\n", headers, b"CONNECT / HTTP/1.1\r\n\r\n", head("Content-Length: x")):
        for _ in range(50):
            with victim.connect() as connection:
                connection.sendall(start)
                drop_errors(lambda connection=connection: connection.recv(1000))
    victim.check()
    assert lines() - before <= 5


def lives(connection):
    """Whether the server answers on a connection."""
    answer = b""
    with suppress(OSError):
        connection.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n")
        while not answer.endswith(b'{"live":true}') and (more := connection.recv(1000)):
            answer += more
    return answer.startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(("half", "count"), [(head()[:-2], 600)], ids=["half a head"])
def test_half_sent_requests_take_neither_all_descriptors_nor_the_connections_of_others(tmp_path, half, count):
    with (
        serving(tmp_path, "-c", attacked_server.FEW_FILES, max_connections=4096) as server,
        attacked(server) as victim,
        ExitStack() as stack,
    ):
        healthy = [stack.enter_context(victim.connect()) for _ in range(20)]
        half_sent = deque()
        for number in range(count):
            if number % 50 == 0:
                assert all(lives(connection) for connection in healthy), number
            half_sent.append(stack.enter_context(victim.connect()))
            drop_errors(lambda: half_sent[-1].sendall(half))
            if len(half_sent) > 300:
                half_sent.popleft().close()

        def answered():
            with victim.connect() as late:
                return lives(late)

        wait_until(answered, "a new client is answered, too")
        victim.check()
