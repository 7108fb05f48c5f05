"""`hps serve` with front processes, whose pids and connections a test can tell apart."""

import http.client
import json
import os
import re
import signal
import socket
import threading
from pathlib import Path

import httpx
import numpy as np
from prometheus_client.parser import text_string_to_metric_families

import hps
from hps.testing.waiting import wait_until
from tests.servers.binary_tensors import request_of, tensors_of
from tests.servers.child_processes import ChildProcesses
from tests.servers.running_service import document_of, model_of
from tests.servers.service_processes import region_of, service_processes, socket_inodes, tcp_sockets

ROWS, DIM = 1000, 8
LOOKUP, INFER = "/v1/models/m/lookup", "/v2/models/m/infer"


def vectors_of(keys):
    """The vectors of keys: each names its key and column; keys that do not exist have zeros."""
    keys = np.asarray(keys)
    vectors = keys[:, None] + np.arange(DIM) / 16
    return np.where((keys < ROWS)[:, None], vectors, 0).astype(np.float32)


def binary_request(keys):
    """Headers and body of a request with binary tensors."""
    return request_of({"item": np.asarray(keys, np.int64)}, parameters={"binary_data_output": True})


def binary_vectors(headers, body):
    """The vectors of a binary answer."""
    return tensors_of(headers, body)["item"]


class Connection(http.client.HTTPConnection):
    """A connection that is never opened again by itself."""

    auto_open = 0

    def __init__(self, host, port):
        super().__init__(host, port, timeout=30)
        self.connect()

    def send_lookup(self, keys, *, binary=True):
        if binary:
            headers, body = binary_request(keys)
            self.request("POST", INFER, body, headers)
        else:
            self.request("POST", LOOKUP, json.dumps({"tables": {"item": np.asarray(keys).tolist()}}))

    def take_answer(self):
        """Return the status, headers and body of the next answer."""
        response = self.getresponse()
        return response.status, response.headers, response.read()

    def look_up(self, keys, *, binary=True):
        """Look keys up, check their vectors, and return the status: 200, or 503 with Retry-After."""
        self.send_lookup(keys, binary=binary)
        return self.checked(keys, binary=binary)

    def checked(self, keys, *, binary=True):
        status, headers, body = self.take_answer()
        if status != 200:
            assert status == 503, (status, body)
            assert headers["retry-after"], headers
            return status
        got = binary_vectors(headers, body) if binary else np.array(json.loads(body)["tables"]["item"], np.float32)
        got = got.reshape(-1, DIM)
        assert np.array_equal(got, vectors_of(keys)), (keys, got)
        return status


class FrontService:
    """A service of a model `m` with one table `item` on the CPU; half of its rows fit the embedding cache.

    Attributes:
        process: the parent.
        port: where the fronts listen.
    """

    def __init__(self, directory: Path, children: ChildProcesses, *, fronts=2, host="127.0.0.1", **settings):
        keys = np.arange(ROWS)
        hps.write_sparse_model(directory / "item.model", (keys, vectors_of(keys)))
        self._model = model_of("m", [directory / "item.model"], {"item": DIM}, gpucacheper=0.5, hit_rate_threshold=1.1)
        self._configuration = directory / "ps.json"
        self.configure(**settings)
        self.host, self.fronts, self._log = host, fronts, directory / "log"
        command = ("serve", self._configuration, "--host", host, "--port", 0, "--fronts", fronts)
        with self._log.open("w") as log:
            self.process = children.hps(*command, stderr=log, stdout=log)
        wait_until(lambda: self._alive() and "listening on" in self.log, "the service listens")
        url = re.search(r"listening on (http://\S+?);", self.log)[1]
        self.port = int(url.rpartition(":")[2])
        self.client = httpx.Client(base_url=url, timeout=30, headers={"connection": "close"})
        self._opened = []

    def close(self):
        self.close_connections()
        self.client.close()

    def configure(self, **settings):
        """Write the configuration."""
        self._configuration.write_text(json.dumps(document_of(self._model, service={"drain_s": 0.2, **settings})))

    def _alive(self):
        assert self.process.poll() is None, self.log[-4000:]
        return True

    @property
    def log(self):
        return self._log.read_text()

    def wait_ready(self):
        wait_until(lambda: self._alive() and self._ready(), "the service is ready")
        return self

    def _ready(self):
        try:
            return self.client.get("/v2/health/ready").status_code == 200
        except httpx.TransportError:
            return False

    # -- processes

    def processes(self):
        """Pids of the fronts by number, and of the engine (-1), as far as they have begun."""
        return service_processes(self.process.pid, self.fronts, self.port)

    def all_processes(self):
        """The same, once all are there."""
        wait_until(lambda: len(self.processes()) == self.fronts + 1, "all processes run")
        return self.processes()

    def kill(self, number, signal_number=signal.SIGKILL):
        """Kill a front, or the engine (-1); return its pid, which another process replaces."""
        pid = self.all_processes()[number]
        os.kill(pid, signal_number)
        return pid

    def wait_replaced(self, number, pid):
        wait_until(lambda: self._alive() and self.processes().get(number, pid) != pid, f"process {number} is replaced")

    def region(self, number):
        """Map the region of a front, as only a process that broke into it can."""
        return region_of(self.all_processes()[number], number)

    # -- clients

    def connect(self):
        self._opened.append(Connection(self.host, self.port))
        return self._opened[-1]

    def close_connections(self):
        """Close what a test has opened."""
        while self._opened:
            self._opened.pop().close()

    def connections(self, each):
        """So many connections to each front, by its number."""
        found = {number: [] for number in range(self.fronts)}
        pids = {pid: number for number, pid in self.all_processes().items()}
        while min(map(len, found.values())) < each:
            connection = self.connect()
            connection.request("GET", "/v2/health/live")  # now it is accepted
            assert connection.take_answer()[0] == 200
            (pid,) = [pid for pid in pids if _inode_of(connection.sock) in socket_inodes(pid)]
            if len(found[pids[pid]]) < each:
                found[pids[pid]].append(connection)
            else:
                connection.close()
        return found

    def samples(self):
        """Every sample of /metrics, by its name and the values of its labels."""
        answer = self.client.get("/metrics")
        assert answer.status_code == 200, answer.text
        families = text_string_to_metric_families(answer.text)
        return {(sample.name, *sample.labels.values()): sample.value for family in families for sample in family.samples}

    def answered(self):
        """How many lookups were answered, by the metrics."""
        return sum(value for key, value in self.samples().items() if key[0] == "hps_http_requests_total" and "200" in key)


class Load(threading.Thread):
    """Looks up random keys on one connection, and checks every answer.

    Attributes:
        statuses: how many answers had each status.
        lost: connections that ended; the next request opens another.
        error: the first wrong answer.
    """

    def __init__(self, service, seed):
        super().__init__(daemon=True)
        self._service, self._random = service, np.random.default_rng(seed)
        self._ended = threading.Event()
        self.statuses, self.lost, self.error = {200: 0, 503: 0}, 0, None

    def run(self):
        connection = None
        while not self._ended.wait(0.001):
            keys = self._random.integers(0, ROWS + 5, self._random.integers(1, 60))
            try:
                if connection is None:
                    connection = self._service.connect()
                self.statuses[connection.look_up(keys, binary=bool(self._random.integers(2)))] += 1
            except (OSError, http.client.HTTPException):
                self.lost += 1
                if connection is not None:
                    connection.close()
                connection = None
            except BaseException as error:  # noqa: BLE001 - asserted by the test
                self.error = error
                break
        if connection is not None:
            connection.close()

    def answers_again(self):
        """Wait until it has some more answers."""
        before = self.statuses[200]
        wait_until(lambda: self.error or self.statuses[200] > before + 5, "requests are answered")

    def end(self):
        self._ended.set()
        self.join(40)
        assert not self.is_alive()
        if self.error is not None:
            raise self.error


def _inode_of(client):
    """The inode of the server's end of a connection."""
    port, mine = client.getpeername()[1], client.getsockname()[1]
    return next(one.inode for one in tcp_sockets() if (one.port, one.remote_port) == (port, mine))


def has_ipv6():
    """Whether this machine can listen on ::1."""
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True
