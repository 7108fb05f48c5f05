"""A link to a real server that can be made bad: what the server sends is cut, changed, delayed or swallowed."""

import contextlib
import socket
import threading
from collections.abc import Callable

Fault = Callable[[bytes], bytes | None]


class Proxy:
    """Listens on a port and passes bytes on, in both directions, to `port` of this machine.

    Attributes:
        fault: called with every piece that the server sends; returns what is passed on instead, None to close the connection.
        connections: how many were accepted.
    """

    def __init__(self, port: int) -> None:
        self.fault: Fault | None = None
        self.connections = 0
        self._target = port
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._start(self._accept)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> "Proxy":
        return self

    def __exit__(self, *_: object) -> None:
        for one in [self._listener, *self._sockets]:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        for thread in self._threads:
            thread.join(10)

    def _start(self, target: Callable[..., None], *arguments: object) -> None:
        self._threads.append(threading.Thread(target=target, args=arguments, daemon=True))
        self._threads[-1].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target), 10)
                server.settimeout(None)
                self._sockets += [client, server]
                self.connections += 1
                self._start(self._pump, client, server, False)
                self._start(self._pump, server, client, True)

    def _pump(self, source: socket.socket, target: socket.socket, replies: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                passed: bytes | None = data
                if replies and self.fault:
                    passed = self.fault(data)
                if passed is None:
                    break
                target.sendall(passed)
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
