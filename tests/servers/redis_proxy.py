"""A link to a real server that can be made bad: what the server sends is cut, changed, delayed or swallowed."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable

Fault = Callable[[bytes], bytes | None]


class Proxy:
    """Listens on a port and passes bytes on, in both directions, to `port` of this machine.

    Attributes:
        fault: called with every piece that the server sends; returns what is passed on instead, None to close the connection.
        connections: how many were accepted.
        held: where it is set, what clients send is kept until the event is, also after they have gone.
        hold_if: a condition and such an event: keeps only connections that send what fulfils the condition, from then on.
        delivered: how many connections were kept, and have delivered all that was kept.
    """

    def __init__(self, port: int) -> None:
        self.fault: Fault | None = None
        self.connections = 0
        self.held: threading.Event | None = None
        self.hold_if: tuple[Callable[[bytes], bool], threading.Event] | None = None
        self.delivered = 0
        self._ended: dict[socket.socket, threading.Event] = {}
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

    def wait_delivered(self, before: int) -> None:
        """Wait until one more connection has delivered what was kept; raises `TimeoutError` where none does."""
        deadline = time.monotonic() + 60
        while self.delivered == before:
            if time.monotonic() > deadline:
                raise TimeoutError("nothing that was kept was delivered")
            time.sleep(0.01)

    def _pump(self, source: socket.socket, target: socket.socket, replies: bool) -> None:
        kept: threading.Event | None = None
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if not replies and kept is None:
                    kept = self.held or (self.hold_if[1] if self.hold_if and self.hold_if[0](data) else None)
                if kept:
                    kept.wait(60)
                passed: bytes | None = data
                if replies and self.fault:
                    passed = self.fault(data)
                if passed is None:
                    break
                target.sendall(passed)
        if kept:
            # The server answers in order: when it has ended the connection it has done what came before.
            with contextlib.suppress(OSError):
                target.shutdown(socket.SHUT_WR)
            self._ended.setdefault(target, threading.Event()).wait(60)
            self.delivered += 1
        elif replies:
            self._ended.setdefault(source, threading.Event()).set()
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
