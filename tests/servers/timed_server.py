"""An HTTP server whose answers, and how long it takes over each, are the test's."""

import json
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from tests.servers.quiet_http import QuietHandler, QuietServer, running


@dataclass(frozen=True)
class Answer:
    """An answer to one lookup. `status` 0 closes the connection without one."""

    status: int = 200
    body: bytes = b"{}" + bytes(16)
    service_s: float = 0.0


class TimedServer(QuietServer):
    """Works on one lookup at a time, in the order in which it gets to them; `answer` says by its number what it does.

    It has the metadata of a model `m` with a table `item`, as Triton would describe it.
    """

    def __init__(self, answer: Callable[[int], Answer], dim: int) -> None:
        super().__init__(_Handler)
        self.answer, self.dim = answer, dim
        self.lookups: list[int] = []  # the bytes of each body
        self.busy = threading.Lock()


class _Handler(QuietHandler):
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


def timed_server(
    answer: Callable[[int], Answer] = lambda number: Answer(), dim: int = 4
) -> AbstractContextManager[TimedServer]:
    """Serve until the end of the block."""
    return running(TimedServer(answer, dim))
