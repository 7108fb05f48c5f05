"""A server of raw sockets that answers each request as its script says, rightly or wrongly.

    with ScriptedServer([right, closed, sent(b"HTTP/1.1 200 OK")]) as server:
        ...  # talk to server.url

After the script every answer is right: vectors of width 4, each element the key. The question of a routed client for the
share of the server is no part of the script: it has all rows.
"""

import json
import socket
import ssl
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, Self

import numpy as np

DIM = 4

Step = Callable[[socket.socket, bytes], bool]
"""Answers a request; returns whether the connection stays open."""


def vectors_of(keys: Any) -> np.ndarray:
    return np.repeat(np.asarray(keys, np.float32)[:, None], DIM, axis=1)


def parts_of(request: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The JSON part and the keys of a lookup."""
    head, _, body = request.partition(b"\r\n\r\n")
    length = next(int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"inference-header"))
    text, at, keys = json.loads(body[:length]), length, {}
    for one in text["inputs"]:
        size = one["parameters"]["binary_data_size"]
        keys[one["name"]] = np.frombuffer(body[at : at + size], np.int64)
        at += size
    return text, keys


def answer_to(
    request: bytes, change: Callable[[dict[str, Any]], Any] = lambda text: None, cut: int = 0, more: bytes = b""
) -> bytes:
    """The right answer, with its JSON part changed, bytes missing at the end or too many."""
    _, keys = parts_of(request)
    outputs = [
        {"name": name, "datatype": "FP32", "shape": [some.size, DIM], "parameters": {"binary_data_size": 4 * DIM * some.size}}
        for name, some in keys.items()
    ]
    text = {"model_name": "m", "model_version": "1", "outputs": outputs}
    change(text)
    head = json.dumps(text).encode()
    body = head + b"".join(vectors_of(some).tobytes() for some in keys.values())
    body = body[: len(body) - cut] + more
    return (
        b"HTTP/1.1 200 OK\r\nContent-Type: application/octet-stream\r\nInference-Header-Content-Length: %d\r\n"
        b"Content-Length: %d\r\n\r\n%s" % (len(head), len(body), body)
    )


def right(connection: socket.socket, request: bytes) -> bool:
    connection.sendall(answer_to(request))
    return True


def last(connection: socket.socket, request: bytes) -> bool:
    """Answer, and close the connection without having said so."""
    connection.sendall(answer_to(request))
    return False


def closed(connection: socket.socket, request: bytes) -> bool:
    return False


def half(connection: socket.socket, request: bytes) -> bool:
    """Send half of the answer."""
    answer = answer_to(request)
    connection.sendall(answer[: len(answer) - 20])
    return False


def in_pieces(connection: socket.socket, request: bytes) -> bool:
    for byte in answer_to(request):
        connection.sendall(bytes([byte]))
    return True


def changed(change: Callable[[dict[str, Any]], Any] = lambda text: None, **how: Any) -> Step:
    """Send an answer that is wrong."""

    def step(connection: socket.socket, request: bytes) -> bool:
        connection.sendall(answer_to(request, change, **how))
        return True

    return step


def sent(answer: bytes) -> Step:
    def step(connection: socket.socket, request: bytes) -> bool:
        connection.sendall(answer)
        return True

    return step


def refused(status: int, message: str, *lines: str) -> Step:
    body = json.dumps({"error": message}).encode()
    head = [f"HTTP/1.1 {status} Any", *lines, f"Content-Length: {len(body)}", "", ""]
    return sent("\r\n".join(head).encode() + body)


def silent(connection: socket.socket, request: bytes) -> bool:
    """Answer nothing, until the client closes the connection."""
    with suppress(OSError):
        connection.recv(1)
    return False


class ScriptedServer:
    """Serves in threads, a connection in each.

    Args:
        script: a step for each request, whatever its connection.
        listener: by default on a free port of 127.0.0.1.

    Attributes:
        requests: all that arrived.
        connections: number of them.
    """

    def __init__(
        self, script: Iterable[Step] = (), listener: socket.socket | None = None, tls: ssl.SSLContext | None = None
    ) -> None:
        self._script = list(script)
        self._listener = listener or socket.create_server(("127.0.0.1", 0))
        self._tls = tls
        self._open: list[socket.socket] = []
        self._changing = threading.Lock()
        self.requests: list[bytes] = []
        self.connections = 0
        address = self._listener.getsockname()
        self.url = f"unix://{address}" if isinstance(address, str) else f"http://127.0.0.1:{address[1]}"
        self.port = 0 if isinstance(address, str) else address[1]

    def then(self, *steps: Step) -> None:
        self._script += steps

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.close_connections()

    def close_connections(self) -> None:
        with self._changing:
            for one in self._open:
                with suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with self._changing:
                self.connections += 1
                self._open.append(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with suppress(OSError):
            if self._tls is not None:
                connection = self._tls.wrap_socket(connection, server_side=True)
            with connection:
                while request := self._read(connection):
                    if request.startswith(b"GET /v2/models/"):
                        sent(b'HTTP/1.1 200 OK\r\nContent-Length: 13\r\n\r\n{"tables":[]}')(connection, request)
                        continue
                    with self._changing:
                        self.requests.append(request)
                        step = self._script.pop(0) if self._script else right
                    if not step(connection, request):
                        return

    @staticmethod
    def _read(connection: socket.socket) -> bytes:
        data = b""
        while b"\r\n\r\n" not in data:
            data += (some := connection.recv(65536))
            if not some:
                return b""
        head, _, body = data.partition(b"\r\n\r\n")
        length = next(int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length"))
        while len(body) < length:
            body += (some := connection.recv(65536))
            if not some:
                return b""
        return head + b"\r\n\r\n" + body
