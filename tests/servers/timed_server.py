"""An HTTP server whose answers, and how long it takes over each, are the test's."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Answer:
    """An answer to one lookup. `status` 0 closes the connection without one."""

    status: int = 200
    body: bytes = b"{}" + bytes(16)
    service_s: float = 0.0


class TimedServer(ThreadingHTTPServer):
    """Works on one lookup at a time, in the order in which it gets to them; `answer` says by its number what it does.

    It has the metadata of a model `m` with a table `item`, as Triton would describe it.
    """

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, answer: Callable[[int], Answer], dim: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answer, self.dim = answer, dim
        self.lookups: list[int] = []  # the bytes of each body
        self.busy = threading.Lock()

    @property
    def address(self) -> tuple[str, int]:
        return "127.0.0.1", self.server_address[1]

    @property
    def url(self) -> str:
        return "http://{}:{}".format(*self.address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of clients that go away."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1
    server: TimedServer

    def do_GET(self) -> None:
        tables = [{"name": "item", "dim": self.server.dim, "max_keys": 1 << 30}]
        known = {"/v2": {"models": ["m"]}, "/v2/models/m": {"name": "m", "tables": tables}}
        found = known.get(self.path)
        self._send(Answer(200 if found else 404, json.dumps(found or {"error": "not here"}).encode()))

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        with self.server.busy:
            answer = self.server.answer(len(self.server.lookups))
            self.server.lookups.append(len(body))
            time.sleep(answer.service_s)
        self._send(answer)

    def _send(self, answer: Answer) -> None:
        if not answer.status:
            self.close_connection = True
            return
        self.send_response(answer.status)
        self.send_header("Inference-Header-Content-Length", "2")
        self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        self.wfile.write(answer.body)

    def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002 - the name of the base
        """Keep quiet."""


@contextmanager
def timed_server(answer: Callable[[int], Answer] = lambda number: Answer(), dim: int = 4) -> Iterator[TimedServer]:
    """Serve until the end of the block."""
    with TimedServer(answer, dim) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            with suppress(OSError):
                server.shutdown()
            thread.join(10)
