"""A server process under attack: its memory, a client that asks all the time whether it is live, and what attackers send."""

import gzip
import json
import re
import socket
import sys
import threading
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import numpy as np

import hps
from hps.testing.waiting import PATIENCE_S, wait_until
from tests.servers.child_processes import ChildProcesses
from tests.servers.running_service import document_of, model_of

MB = 1 << 20
BUDGET = 64 * MB
BODY = 16 * MB
GROWTH = 2 * BUDGET  # beyond the budget: what is not counted, and what the allocator keeps
KEYS, DIM = 100_000, 32
PATH = "/v1/models/m/lookup"
TOKEN = "Authorization: Bearer secret"
ADMIN = {"Authorization": "Bearer of-changes"}
FEW_FILES = (
    "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (300, 300)); from hps.tools.cli.app import main; main()"
)
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
        shares = [Path(f"/proc/{child}/smaps_rollup").read_text() for child in (self._process.pid, *children)]
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
