"""An open-loop load on a server whose model is swapped: requests are due at random moments, whether or not earlier ones were
answered, and each answer is compared with those of all contents that the model ever has. Imports nothing heavy but numpy."""

import selectors
import socket
import time
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import Connection as Pipe
from multiprocessing.synchronize import Event
from typing import Any, NamedTuple

import numpy as np

WRONG, FAILED = -1, -2


class Load(NamedTuple):
    """What one process of clients does.

    Attributes:
        requests: whole requests, which are sent in turn.
        answers: for each of them, the vectors that each content of the model has for it.
        connections: that are kept open.
        rate: requests a second.
    """

    port: int
    requests: Sequence[bytes]
    answers: Sequence[Sequence[bytes]]
    connections: int
    rate: float
    seed: int


class _Connection:
    def __init__(self, load: Load, selector: selectors.BaseSelector) -> None:
        self._load, self._selector = load, selector
        self.buffer = memoryview(bytearray(max(len(answer) for one in load.answers for answer in one) + (64 << 10)))
        self.open()

    def open(self) -> None:
        self.socket = socket.create_connection(("127.0.0.1", self._load.port), 30)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._selector.register(self.socket, selectors.EVENT_READ, self)

    def send(self, number: int, due: float) -> None:
        self.number, self.due, self.sent = number, due, time.perf_counter()
        self._have, self._expected = 0, 0
        self.socket.sendall(self._load.requests[number])

    def receive(self) -> int | None:
        """Read what is there; the content that answered once the answer is complete."""
        count = self.socket.recv_into(self.buffer[self._have :])
        if not count:
            raise ConnectionError("the server closed a connection")
        self._have += count
        if not self._expected:
            self._head, separator, _ = bytes(self.buffer[: min(self._have, 4096)]).partition(b"\r\n\r\n")
            if not separator:
                return None
            self._expected = len(self._head) + 4 + self._header(b"content-length")
        if self._have < self._expected:
            return None
        if not self._head.startswith(b"HTTP/1.1 200"):
            raise ConnectionError(bytes(self.buffer[: min(self._have, 600)]).decode(errors="replace"))
        start = len(self._head) + 4 + self._header(b"inference-header-content-length")
        vectors = self.buffer[start : self._have]
        return next((content for content, one in enumerate(self._load.answers[self.number]) if one == vectors), WRONG)

    def _header(self, name: bytes) -> int:
        line = next(line for line in self._head.lower().split(b"\r\n") if line.startswith(name + b":"))
        return int(line.partition(b":")[2])


def paced_load(load: Load, stop: Event, result: Pipe) -> None:
    """Send requests until `stop`, then send the outcome to `result`: an array and the texts of the first errors.

    The array, (n, 4) float64, has a row a request: when it was due, when it was sent, when its answer was complete (all in
    seconds of `time.perf_counter`), and the number of the content that answered, or `WRONG` or `FAILED`.
    """
    rng = np.random.default_rng(load.seed)
    rows: list[tuple[float, float, float, float]] = []
    errors: list[str] = []
    with selectors.DefaultSelector() as selector:
        idle = deque(_Connection(load, selector) for _ in range(load.connections))
        waiting: deque[tuple[int, float]] = deque()
        due, sent, answered = time.perf_counter(), 0, 0
        while not stop.is_set() or answered < sent:
            now = time.perf_counter()
            while due <= now and not stop.is_set():
                waiting.append((sent % len(load.requests), due))
                due += rng.exponential(1 / load.rate)
                sent += 1
            while waiting and idle:
                idle.popleft().send(*waiting.popleft())
            for key, _ in selector.select(min(max(due - now, 0.0), 0.1)):
                connection: Any = key.data
                try:
                    content = connection.receive()
                    if content is None:
                        continue
                except OSError as error:
                    content = FAILED
                    errors.append(str(error))
                    selector.unregister(connection.socket)
                    connection.socket.close()
                    connection.open()
                rows.append((connection.due, connection.sent, time.perf_counter(), content))
                answered += 1
                idle.append(connection)
        for key in list(selector.get_map().values()):
            key.data.socket.close()
    result.send((np.array(rows), errors[:5]))
    result.close()
