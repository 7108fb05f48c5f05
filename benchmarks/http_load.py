"""A load generator: closed loops on keep-alive connections, in one thread. Imports nothing heavy but numpy."""

import selectors
import socket
import time

import numpy as np


class _Connection:
    """One connection with one request under way."""

    def __init__(self, port: int, requests: list[bytes], place: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), 10)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._requests = requests
        self._place = place
        self._buffer = memoryview(bytearray(1 << 20))
        self.send()

    def send(self) -> None:
        self._place = (self._place + 1) % len(self._requests)
        self.started = time.perf_counter()
        self._have, self._expected = 0, None
        self.socket.sendall(self._requests[self._place])

    def receive(self) -> bool:
        """Read what is there; True when the answer is complete."""
        count = self.socket.recv_into(self._buffer[self._have :])
        if not count:
            raise ConnectionError("the server closed a connection")
        self._have += count
        if self._expected is None:
            head, separator, _ = bytes(self._buffer[: min(self._have, 4096)]).partition(b"\r\n\r\n")
            if not separator:
                return False
            if not head.startswith(b"HTTP/1.1 200"):
                raise RuntimeError(head.decode())
            length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
            self._expected = len(head) + 4 + int(length.partition(b":")[2])
            if self._expected > len(self._buffer):
                self._buffer = memoryview(bytearray(self._buffer[: self._have]) + bytearray(self._expected - self._have))
        return self._have >= self._expected


def load(
    port: int, path: str, headers: dict[str, str], bodies: list[bytes], connections: int, seconds: float
) -> dict[str, float]:
    """Load a server for some seconds, rotating the bodies.

    Returns:
        Requests that were answered, in all and per second, and the quantiles of their times.
    """
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    start_line = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n{lines}"
    requests = [f"{start_line}Content-Length: {len(body)}\r\n\r\n".encode() + body for body in bodies]
    times = []
    with selectors.DefaultSelector() as selector:
        open_connections = [_Connection(port, requests, place) for place in range(connections)]
        for connection in open_connections:
            selector.register(connection.socket, selectors.EVENT_READ, connection)
        now = start = time.perf_counter()
        while now - start < seconds:
            for key, _ in selector.select(1.0):
                connection = key.data
                if connection.receive():
                    times.append(time.perf_counter() - connection.started)
                    connection.send()
            now = time.perf_counter()
        for connection in open_connections:
            connection.socket.close()
    return {
        "requests": len(times),
        "requests_per_s": len(times) / (now - start),
        "p50_s": float(np.quantile(times, 0.5)),
        "p99_s": float(np.quantile(times, 0.99)),
    }
