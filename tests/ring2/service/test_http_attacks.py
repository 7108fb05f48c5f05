"""Clients that try to make a server process hold more memory than its budget, or to keep it from answering others."""

import gc
import gzip
import json
import re
import socket
import sys
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from http.client import HTTPConnection
from pathlib import Path

import httpx
import numpy as np
import pytest

import hps
from hps.testing.waiting import PATIENCE_S, wait_until
from tests.servers.child_processes import ChildProcesses
from tests.servers.running_service import document_of, model_of, running_service

MB = 1 << 20
BUDGET = 64 * MB
BODY = 16 * MB
GROWTH = 2 * BUDGET  # beyond the budget: what is not counted, and what the allocator keeps
KEYS, DIM = 100_000, 32
PATH = "/v1/models/m/lookup"
TOKEN = "Authorization: Bearer secret"
ADMIN = {"Authorization": "Bearer of-changes"}
CONTAINERS = (list, dict, tuple, set, str, bytes, bytearray, memoryview)
FEW_FILES = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (300, 300)); from hps.cli.app import main; main()"
LIMITS = {
    "port": 0,
    "bearer_token": "secret",
    "admin_token": "of-changes",
    "max_body_bytes": BODY,
    "max_keys_per_request": KEYS,
    "max_held_bytes": BUDGET,
    "max_connections": 100,
    "answer_timeout_s": 2,
    "request_timeout_s": 20,
}


class Server:
    """A server process, whose resident memory is compared with that of its first moment, whatever attacks came before."""

    def __init__(self, process, log):
        self._process = process
        self._log = log
        wait_until(lambda: "ready; try" in self.log, "the server is ready")
        self.port = int(self.log.partition("listening on http://127.0.0.1:")[2].partition(";")[0])
        self.before = self.rss

    @property
    def log(self):
        return self._log.read_text()

    @property
    def rss(self):
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        shares = [Path(f"/proc/{one}/smaps_rollup").read_text() for one in (self._process.pid, *children)]
        return sum(int(share.partition("\nPss:")[2].split()[0]) for share in shares) * 1024


class Victim:
    """A server, and a client of it that asks all the time whether it is live."""

    def __init__(self, server):
        self.server = server
        self.port = server.port
        self._stop = threading.Event()
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=PATIENCE_S)
        self.most = self.probes = 0
        self.failures = []
        self._prober = threading.Thread(target=self._probe)
        self._prober.start()

    def _probe(self):
        while not self._stop.wait(0.02):
            self.most = max(self.most, self.server.rss)
            try:
                status = self.client.get("/v2/health/live").status_code
            except httpx.HTTPError as error:
                status = repr(error)
            if status != 200:
                self.failures.append(status)
            self.probes += 1

    def connect(self, timeout=PATIENCE_S):
        return socket.create_connection(("127.0.0.1", self.port), timeout=timeout)

    def look_up(self):
        answer = self.client.post(PATH, content=b'{"tables": {"item": [7]}}', headers=dict([TOKEN.split(": ")]))
        assert answer.json() == {"tables": {"item": [[7] * DIM]}}

    def check(self):
        """It held little, and answers as before."""
        probes = self.probes
        wait_until(lambda: self.probes > probes + 1, "it was seen to live, and measured, after the attack")
        self.stop()
        assert not self.failures
        grown = self.most - self.server.before
        assert grown < BUDGET + GROWTH, f"grew by {grown / MB:.0f} MB"
        wait_until(lambda: self.held < 10_000, "nothing is held but by the one who asks")
        self.look_up()

    @property
    def held(self):
        text = self.client.get("/metrics", headers=dict([TOKEN.split(": ")])).text
        return sum(map(float, re.findall(r"^hps_http_held_bytes\{.*\} (\S+)$", text, re.MULTILINE)))

    def stop(self):
        """End the probes."""
        self._stop.set()
        self._prober.join()


def document_in(directory, *, service, max_batch_size=KEYS):
    keys = np.arange(1000)
    hps.write_sparse_model(directory / "item.model", (keys, np.repeat(keys.astype(np.float32)[:, None], DIM, axis=1)))
    more = {"max_batch_size": max_batch_size, "gpucacheper": 1.0, "init_ec": False}
    return document_of(model_of("m", [directory / "item.model"], {"item": DIM}, **more), service=service)


@contextmanager
def serving(directory, *interpreter, **limits):
    (directory / "ps.json").write_text(json.dumps(document_in(directory, service=LIMITS | limits)))
    log, children = directory / "log", ChildProcesses()
    with log.open("w") as stderr:
        command = (sys.executable, *(interpreter or ("-m", "hps")), "serve", directory / "ps.json")
        process = children.start(*command, stdout=stderr, stderr=stderr)
    try:
        yield Server(process, log)
    finally:
        children.end()


@contextmanager
def attacked(server):
    victim = Victim(server)
    try:
        victim.look_up()
        yield victim
    finally:
        victim.stop()
        victim.client.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("attacked")) as server:
        yield server


@pytest.fixture
def victim(server):
    with attacked(server) as victim:
        yield victim


@pytest.fixture
def fresh_victim(tmp_path):
    """A server of its own, for attacks after which the allocator keeps much."""
    with serving(tmp_path) as server, attacked(server) as victim:
        yield victim


def head(*headers, path=PATH):
    return "\r\n".join([f"POST {path} HTTP/1.1", "Host: x", *headers, "", ""]).encode()


def drop_errors(call):
    """What a client makes of it that the server closes its connection."""
    with suppress(OSError):
        call()


def flood(connection, piece, size):
    """Send a piece again and again, until all is sent, nothing is taken for a second, or the server closes."""
    connection.settimeout(1)

    def send():
        for _ in range(size // len(piece)):
            connection.sendall(piece)

    drop_errors(send)


def bombs():
    size = BODY - 100
    return {
        "lists": (PATH, b'{"tables": {"item": [' + b"[]," * (size // 3) + b"1]}}"),
        "objects": (PATH, b'{"tables": {"item": [' + b'{"":0},' * (size // 7) + b"1]}}"),
        "keys": (PATH, b'{"tables": {"item": [' + b"1234567," * (size // 8) + b"1]}}"),
        "strings": (PATH, b'{"tables": {"item": ["' + b"a" * (size - 40) + "€".encode() + b'"]}}'),
        "tables": (PATH, b'{"tables": {%s"item": [1]}}' % b"".join(b'"%07d":[],' % number for number in range(size // 13))),
        "data": (
            "/v2/models/m/infer",
            b'{"inputs": [{"name": "item", "datatype": "INT64", "shape": [1], "data": [' + b"[]," * (size // 3) + b"1]}]}",
        ),
    }


def hostile(most, keys=KEYS, body_bytes=BODY):
    """Requests that end in errors, each at another place: method, path, body, and what the body's Content-Encoding says.

    Args:
        most: number of values in a body; three times the keys of a request, so that they are still parsed.
        keys, body_bytes: how much a request may have.
    """
    infer, rows, deploy = "/v2/models/m/infer", "/v1/models/m/tables/item/rows", "/v1/models/m/deploy"
    ones, floats = b"1," * most + b"1", b"1.5," * most + b"1"
    data = b'{"inputs": [{"name": "item", "datatype": "INT64", "shape": [1], "data": [%s]}]}'
    parsed = {
        "floats": (PATH, b'{"tables": {"item": [%s]}}' % floats),
        "strings": (PATH, b'{"tables": {"item": [%s1]}}' % (b'"1",' * most)),
        "objects": (PATH, b'{"tables": {"item": [%s1]}}' % (b'{"":0},' * (most // 3))),
        "too large a key": (PATH, b'{"tables": {"item": [%s, 18446744073709551615]}}' % ones),
        "too many keys": (PATH, b'{"tables": {"item": [%s1]}}' % (b"1," * keys)),
        "unknown table": (PATH, b'{"tables": {"none": [%s]}}' % ones),
        "unknown member": (PATH, b'{"keys": [%s]}' % ones),
        "unknown model": ("/v1/models/none/lookup", b'{"tables": {"item": [%s]}}' % ones),
        "unknown device": (PATH, b'{"device": 7, "tables": {"item": [%s1]}}' % (b"1," * (most // 3 - 1))),
        "given twice": (PATH, b'{"tables": {"item": [%s], "item": [1]}}' % ones),
        "cut short": (PATH, b'{"tables": {"item": [%s' % ones),
        "deep": (PATH, b"[" * most),
        "no text": (PATH, b'{"tables": {"item": ["%s"]}}' % b"\xff" * (5 * most)),
        "bags": (PATH, b'{"bags": {"item": [%s1]}}' % (b"[1.5]," * (most // 2))),
        "weights": (PATH, b'{"bags": {"item": [[1]]}, "weights": {"item": [[%s]]}}' % ones),
        "data of floats": (infer, data % floats),
        "data of another shape": (infer, data % ones),
        "inputs": (infer, b'{"inputs": [%s1]}' % (b"{}," * (most // 2))),
        "rows of floats": (rows, b'{"keys": [%s], "vectors": []}' % floats),
        "rows without a vector": (rows, b'{"keys": [1], "vectors": [[%s]]}' % floats),
        "a deployment": (deploy, b'{"version": [%s1]}' % (b"1.5," * (most // 2))),
        "nowhere": ("/nowhere", b"1" * most),
    }
    requests = {kind: ("POST", path, gzip.compress(body, 1), "gzip") for kind, (path, body) in parsed.items()}
    return requests | {
        "deleted floats": ("DELETE", rows, gzip.compress(b'{"keys": [%s]}' % floats, 1), "gzip"),
        "too large": ("POST", PATH, gzip.compress(bytes(body_bytes + 1)), "gzip"),
        "a large deployment": ("POST", deploy, b" " * (2 << 20), "identity"),
        "gzip cut short": ("POST", PATH, gzip.compress(bytes(5 * most))[:-1], "gzip"),
        "no gzip": ("POST", PATH, b"x" * (5 * most), "gzip"),
        "another encoding": ("POST", PATH, b"x" * (5 * most), "br"),
        "binary data": ("POST", infer, b"x" * (5 * most), "identity"),
    }


def test_no_error_leaves_its_request_to_the_collector_of_garbage(tmp_path):
    """What was read and refused is freed at once: nothing as large is left in a cycle. (httpx makes cycles of its own.)"""
    most, keys, body_bytes = 3000, 1000, 200_000
    limits = {"admin_token": "of-changes", "max_body_bytes": body_bytes, "max_keys_per_request": keys}
    with running_service(document_in(tmp_path, service=limits, max_batch_size=keys)) as service:
        for kind, (method, path, body, encoding) in hostile(most, keys, body_bytes).items():
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


def test_small_bodies_that_become_large_are_refused(fresh_victim):
    """Bodies of every kind, one server: what one leaves behind must not add up."""
    headers = {"Content-Encoding": "gzip", "Authorization": "Bearer secret"}
    with ThreadPoolExecutor(3) as clients:
        for path, text in bombs().values():
            body = gzip.compress(text, 1)
            answers = clients.map(
                lambda _, path=path, body=body: fresh_victim.client.post(path, content=body, headers=headers).status_code,
                range(3),
            )
            assert set(answers) <= {400, 413, 503}
    fresh_victim.check()


def test_a_body_that_is_decompressed_has_its_share_of_the_budget_first(fresh_victim):
    body = gzip.compress(b" " * BODY, 9)
    headers = {"Content-Encoding": "gzip", "Authorization": "Bearer secret"}
    with ThreadPoolExecutor(16) as clients:
        answers = clients.map(
            lambda _: (
                httpx.post(
                    f"http://127.0.0.1:{fresh_victim.port}{PATH}", content=body, headers=headers, timeout=PATIENCE_S
                ).status_code
            ),
            range(32),
        )
        assert set(answers) <= {400, 413, 503}
    fresh_victim.check()


@pytest.mark.parametrize(
    ("start", "piece"),
    [
        (head("Transfer-Encoding: chunked") + b"1\r\nx\r\n0\r\n", b"X: " + b"y" * 1000 + b"\r\n"),
        (head("Transfer-Encoding: chunked") + b"1\r\nx\r\n0\r\n", b"a:\r\n" * 1000),
        (head("Transfer-Encoding: chunked") + b"1\r\nx\r\n0\r\nX: ", b"y" * 1000),
        (head()[:-2], b"X: " + b"y" * 1000 + b"\r\n"),
        (head()[:-2], b"a:\r\n" * 1000),
        (b"GET /", b"y" * 1000),
    ],
    ids=["trailers", "short trailers", "a long trailer", "headers", "short headers", "a long path"],
)
def test_headers_and_trailers_without_end(victim, start, piece):
    with ThreadPoolExecutor(4) as clients, ExitStack() as stack:
        connections = [stack.enter_context(victim.connect()) for _ in range(4)]
        for connection in connections:
            connection.sendall(start)
        list(clients.map(lambda connection: flood(connection, piece, 40 * MB), connections))
        victim.check()


@pytest.mark.parametrize("more", [b""])
def test_requests_that_are_sent_without_reading_an_answer(victim, more):
    piece = b"GET /v2/health/live HTTP/1.1\r\n" + more + b"\r\n"
    with ThreadPoolExecutor(8) as clients, ExitStack() as stack:
        connections = [stack.enter_context(victim.connect()) for _ in range(8)]
        list(clients.map(lambda connection: flood(connection, piece * 100, 40 * MB), connections))
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
                late.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n")
                assert late.recv(100).startswith(b"HTTP/1.1 200")
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

    before = lines()
    for start in (
        b"\x16\x03\x01\r\n\r\n",
        head()[:-2] + b"a:\r\n" * 200,
        b"CONNECT / HTTP/1.1\r\n\r\n",
        head("Content-Length: x"),
    ):
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
    with serving(tmp_path, "-c", FEW_FILES, max_connections=4096) as server, attacked(server) as victim, ExitStack() as stack:
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
