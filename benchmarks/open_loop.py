"""Requests at a fixed rate, whatever the answers take: the time of each counts from the moment that it is due."""

import selectors
import socket
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Self


class _Connection:
    """One connection with at most one request under way."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), 10)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = memoryview(bytearray(1 << 20))

    def send(self, number: int, due: float, request: bytes) -> None:
        self.number, self.due = number, due
        self._have, self._start, self._expected = 0, 0, 0
        self.socket.sendall(request)

    def receive(self) -> memoryview | None:
        """Read what is there; the body of the answer when it is complete."""
        count = self.socket.recv_into(self._buffer[self._have :])
        if not count:
            raise ConnectionError("the server closed a connection")
        self._have += count
        if not self._expected:
            head, separator, _ = bytes(self._buffer[: min(self._have, 4096)]).partition(b"\r\n\r\n")
            if not separator:
                return None
            if not head.startswith(b"HTTP/1.1 200"):
                raise RuntimeError(bytes(self._buffer[: self._have]).decode())
            length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
            self._start = len(head) + 4
            self._expected = self._start + int(length.partition(b":")[2])
        return self._buffer[self._start : self._expected] if self._have >= self._expected else None


class OpenLoop:
    """Sends requests at a fixed rate over a few connections. *One thread.* A context manager.

    Args:
        port: of the server, on loopback.
        connections: beyond as many requests, one that is due waits; its time counts from then on.
        rate: requests a second.
        request: makes the request of a number, counted from 0, at the moment that it is sent.
        check: gets the number and the body of each answer.
    """

    def __init__(
        self,
        port: int,
        connections: int,
        rate: float,
        request: Callable[[int], bytes],
        check: Callable[[int, memoryview], None],
    ) -> None:
        self._rate = rate
        self._request = request
        self._check = check
        self._number = 0
        self._selector = selectors.DefaultSelector()
        self._connections = [_Connection(port) for _ in range(connections)]
        for connection in self._connections:
            self._selector.register(connection.socket, selectors.EVENT_READ, connection)

    def run(self, seconds: float) -> list[float]:
        """Go on for a while. Returns the time of each request in seconds; all have ended."""
        times: list[float] = []
        free = deque(self._connections)
        due = time.perf_counter()
        end = due + seconds
        while due < end or len(free) < len(self._connections):
            now = time.perf_counter()
            while free and due <= now and due < end:
                free[0].send(self._number, due, self._request(self._number))
                free.popleft()
                self._number += 1
                due += 1 / self._rate
            wait = max(0.0, due - time.perf_counter()) if free and due < end else 1.0
            for key, _ in self._selector.select(wait):
                connection = key.data
                if (answer := connection.receive()) is not None:
                    times.append(time.perf_counter() - connection.due)
                    self._check(connection.number, answer)
                    free.append(connection)
        return times

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for connection in self._connections:
            connection.socket.close()
        self._selector.close()
