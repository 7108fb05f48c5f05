"""A load generator for machines without wrk: closed loops on keep-alive connections, in one thread.

Reads a JSON object from standard input (port, path, headers, bodies in hexadecimal, connections, seconds) and writes what it
measured to standard output.
"""

import json
import selectors
import socket
import sys
import time
from typing import Any

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
        self._have, self._wanted = 0, None
        self.socket.sendall(self._requests[self._place])

    def receive(self) -> bool:
        """Read what is there; True when the answer is complete."""
        count = self.socket.recv_into(self._buffer[self._have :])
        if not count:
            raise ConnectionError("the server closed a connection")
        self._have += count
        if self._wanted is None:
            head, separator, _ = bytes(self._buffer[: min(self._have, 4096)]).partition(b"\r\n\r\n")
            if not separator:
                return False
            if not head.startswith(b"HTTP/1.1 200"):
                raise RuntimeError(head.decode())
            length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
            self._wanted = len(head) + 4 + int(length.partition(b":")[2])
            if self._wanted > len(self._buffer):
                self._buffer = memoryview(bytearray(self._buffer[: self._have]) + bytearray(self._wanted - self._have))
        return self._have >= self._wanted


def load(given: dict[str, Any]) -> dict[str, float]:
    """Load a server for some seconds."""
    headers = "".join(f"{name}: {value}\r\n" for name, value in given["headers"].items())
    requests = []
    for body in map(bytes.fromhex, given["bodies"]):
        head = f"POST {given['path']} HTTP/1.1\r\nHost: 127.0.0.1\r\n{headers}Content-Length: {len(body)}\r\n\r\n"
        requests.append(head.encode() + body)
    selector = selectors.DefaultSelector()
    start = time.perf_counter()
    for place in range(given["connections"]):
        connection = _Connection(given["port"], requests, place)
        selector.register(connection.socket, selectors.EVENT_READ, connection)
    seconds = []
    while (now := time.perf_counter()) - start < given["seconds"]:
        for key, _ in selector.select(1.0):
            connection = key.data
            if connection.receive():
                now = time.perf_counter()
                seconds.append(now - connection.started)
                connection.send()
    return {
        "requests": len(seconds),
        "requests_per_s": len(seconds) / (now - start),
        "p50_s": float(np.quantile(seconds, 0.5)),
        "p99_s": float(np.quantile(seconds, 0.99)),
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(load(json.load(sys.stdin))))
