"""Good clients of the soak, and the probes of its health.

python -m tests.nightly.soak.clients good DIRECTORY ACTOR PORT PORT COUNT    clients, each a thread, that judge every answer
python -m tests.nightly.soak.clients probe DIRECTORY ACTOR LIMIT_S PORT...   asks servers every 100 ms if they live, scrapes
python -m tests.nightly.soak.clients echo PORT                               answers such probes, with nothing behind it
"""

import http.client
import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from hps.types import BoolArray, FloatArray
from tests.nightly.soak.ledger import ENGINELESS, PROCESSES, STOPPED, TABLES, Bounds, Ledger, Opened, draw
from tests.servers.binary_tensors import request_of, tensors_of

LIVE = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
PROBES = (*PROCESSES[:2], "echo")  # what is probed; the last shows what the machine alone takes
STARTING = "starting or ending"  # servers whose probes are not judged
METRICS = b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
SCRAPED = "metrics of {}"
_SCRAPE_S = 1.0
_PROBE_S, _PROBE_TIMEOUT_S = 0.1, 5.0
_TIMEOUT_S, _THINK_S = 30.0, 0.4
_Answer = list[tuple[FloatArray, BoolArray]]


class GoodClient:
    """Asks one of the servers for a few keys of both tables of a model, thinks, and goes on. *One per thread.*"""

    def __init__(self, ledger: Ledger, ports: list[int], seed: int) -> None:
        self._ledger, self._ports = ledger, ports
        self._rng = np.random.default_rng(seed)
        self._connections: dict[int, tuple[http.client.HTTPConnection, Opened]] = {}

    def run(self) -> None:
        while not self._ledger.stopped:
            process = int(self._rng.integers(len(self._ports)))
            generation = int(self._ledger.generation[process])
            if generation % 2:
                self._ask(process, generation)
            time.sleep(self._rng.random() * 2 * _THINK_S)

    def _ask(self, process: int, generation: int) -> None:
        first = int(self._rng.integers(2)) * 2
        tables = [first, first + 1][: int(self._rng.integers(1, 3))]
        keys = [draw(self._rng, int(self._rng.integers(1, 64))) for _ in tables]
        bounds = [self._ledger.bounds(process, table, some) for table, some in zip(tables, keys, strict=True)]
        how, encode, decode = (("binary", _infer, _vectors), ("json", _lookup, _rows))[self._rng.integers(2)]
        model = TABLES[first].model
        connection, opened = self._connection(process, generation)
        try:
            if connection.sock is None:
                connection.connect()
                opened.to(connection.sock)
            connection.request("POST", *encode(model, bounds))
            answer = connection.getresponse()
            status, headers, body = answer.status, answer.headers, answer.read()
        except (OSError, http.client.HTTPException) as error:
            self._connections.pop(process)[0].close()
            if int(self._ledger.generation[process]) != generation:
                return
            if self._ledger.is_lost(process, opened) and not isinstance(error, TimeoutError):
                self._ledger.count(lost_with_front=1)
            else:
                self._ledger.violation("dropped", process=PROCESSES[process], error=repr(error)[:200])
            return
        if status == 200:
            for one, (vectors, found) in zip(bounds, decode(headers, body, bounds), strict=True):
                self._ledger.check(process, how, one, vectors, found)
        elif status == 504 or (status == 503 and "Retry-After" in headers):
            self._ledger.count(refused=1)
        elif status == 404 and model == "reloaded":
            self._ledger.count(refused_reloading=1)
        else:
            self._ledger.violation(
                "status", process=PROCESSES[process], status=status, body=body[:300].decode(errors="replace")
            )

    def _connection(self, process: int, generation: int) -> tuple[http.client.HTTPConnection, Opened]:
        """Return the connection to a process, or another one if that was closed by an answer, or is of a former generation."""
        connection, opened = self._connections.get(process, (None, Opened(0)))
        if connection is None or connection.sock is None or opened.generation != generation:
            if connection is not None:
                connection.close()
            connection, opened = (
                http.client.HTTPConnection("127.0.0.1", self._ports[process], timeout=_TIMEOUT_S),
                Opened(generation),
            )
            self._connections[process] = connection, opened
        return connection, opened


def _lookup(model: str, bounds: list[Bounds]) -> tuple[str, bytes, dict[str, str]]:
    tables = {TABLES[bound.table].name: bound.keys.tolist() for bound in bounds}
    return f"/v1/models/{model}/lookup", orjson.dumps({"tables": tables, "found": True}), {}


def _rows(_: Any, body: bytes, bounds: list[Bounds]) -> _Answer:
    answer = orjson.loads(body)
    names = [TABLES[bound.table].name for bound in bounds]
    return [(np.array(answer["tables"][name], np.float32), np.array(answer["found"][name], np.bool_)) for name in names]


def _infer(model: str, bounds: list[Bounds]) -> tuple[str, bytes, dict[str, str]]:
    keys = {TABLES[bound.table].name: bound.keys for bound in bounds}
    headers, body = request_of(keys, parameters={"found": True, "binary_data_output": True})
    return f"/v2/models/{model}/infer", body, headers


def _vectors(headers: Any, body: bytes, bounds: list[Bounds]) -> _Answer:
    parts = tensors_of(headers, body)
    return [(parts[name], parts[f"{name}.found"]) for name in (TABLES[bound.table].name for bound in bounds)]


def good(directory: Path, actor: int, ports: list[int], count: int) -> None:
    """Run good clients until the soak ends."""
    os.nice(10)
    ledger = Ledger(directory, actor, f"good clients {actor}")
    run_all([GoodClient(ledger, ports, 1000 * actor + i).run for i in range(count)])


def run_all(loops: Iterable[Callable[[], None]]) -> None:
    """Run loops, each on a thread, until all have ended."""
    threads = [threading.Thread(target=loop) for loop in loops]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def probe(directory: Path, actor: int, limit_s: float, ports: list[int]) -> None:
    """Ask every 100 ms, on a new connection each time, as orchestrators do, and scrape the metrics every second; note how long
    each answer took.

    Args:
        limit_s: a server that takes longer is not healthy.
        ports: of what `PROBES` names.
    """
    ledger = Ledger(directory, actor, "probe")
    servers = PROBES[:-1]
    taken: dict[str, list[float]] = {name: [] for name in (*PROBES, STARTING, *map(SCRAPED.format, servers))}

    def ask(place: int) -> None:
        due = time.monotonic()
        while not ledger.stopped:
            due = max(due + _PROBE_S, time.monotonic())
            time.sleep(max(0.0, due - time.monotonic()))
            generation = int(ledger.generation[place]) if place < len(servers) else 1
            opened = Opened(generation)
            try:
                right = _get(ports[place], LIVE, opened).startswith(b"HTTP/1.1 200")
            except OSError:
                right = False
            ended_ns = time.monotonic_ns()
            start_ns = opened.began_ns
            if start_ns < (resumed_ns := ledger.ended(place, STOPPED, start_ns)) <= ended_ns:
                start_ns = resumed_ns  # its front stood still
            seconds = (ended_ns - start_ns) / 1e9
            if not generation % 2:
                if right:
                    taken[STARTING].append(seconds)
            elif not right and ledger.is_lost(place, opened):
                ledger.count(lost_with_front=1)
            elif place >= len(servers) or int(ledger.generation[place]) == generation:
                taken[PROBES[place]].append(seconds)
                ledger.count(probes=1)
                if place < len(servers) and seconds > limit_s:
                    ledger.violation("health", process=PROBES[place], seconds=round(seconds, 3))
                if not right:
                    ledger.violation("not alive", process=PROBES[place], seconds=round(seconds, 3))

    def scrape(place: int) -> None:
        while not ledger.stopped:
            time.sleep(_SCRAPE_S)
            opened = Opened(int(ledger.generation[place]))
            try:
                text = _get(ports[place], METRICS, opened)
            except OSError as error:
                text = repr(error).encode()
            if not opened.generation % 2 or int(ledger.generation[place]) != opened.generation:
                continue
            right = text.startswith(b"HTTP/1.1 200")
            if not right and ledger.is_lost(place, opened):
                ledger.count(lost_with_front=1)
            elif not ledger.ended(place, ENGINELESS, opened.began_ns):
                taken[SCRAPED.format(servers[place])].append((time.monotonic_ns() - opened.began_ns) / 1e9)
                ledger.count(scrapes=1)
                if not right:
                    ledger.violation("metrics", process=servers[place], answer=text[:200].decode(errors="replace"))
                for line in re.findall(rb"^hps_threads_ended_total.* (?!0)[0-9.]+$", text, re.MULTILINE):
                    ledger.violation("thread", process=servers[place], metric=line.decode())

    run_all([partial(ask, place) for place in range(len(ports))] + [partial(scrape, place) for place in range(len(servers))])
    (directory / "probes.json").write_text(json.dumps(taken))


def _get(port: int, request: bytes, opened: Opened) -> bytes:
    with socket.create_connection(("127.0.0.1", port), _PROBE_TIMEOUT_S) as connection:
        opened.to(connection)
        connection.sendall(request)
        received = b""
        while chunk := connection.recv(65536):
            received += chunk
    return received


def echo(port: int) -> None:
    """Answer every connection with 200 and nothing else."""
    with socket.create_server(("127.0.0.1", port)) as listener:
        print("listening", flush=True)
        while True:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")


if __name__ == "__main__":
    kind, *rest = sys.argv[1:]
    if kind == "echo":
        echo(int(rest[0]))
    elif kind == "probe":
        probe(Path(rest[0]), int(rest[1]), float(rest[2]), [int(port) for port in rest[3:]])
    else:
        good(Path(rest[0]), int(rest[1]), [int(rest[2]), int(rest[3])], int(rest[4]))
