"""An HTTP server in front of a real one that passes requests on, and misbehaves as it is told for each of them.

with MisbehavingProxy(port) as proxy:
    proxy.rule = first(2, Answer(500), when=lambda request: request.method == "GET")
    ...  # talk to proxy.url

It is for object stores over plain HTTP: bodies with a length, read whole before they are passed on.
"""

import http.client
import itertools
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

from tests.servers.quiet_http import QuietHandler, QuietServer, running

_UPSTREAM_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Request:
    """What a client asked for. `headers` compares names without case."""

    method: str
    path: str
    headers: Any
    body: bytes


class Fault:
    """What to do to one request. The faults below say what the client sees; the plain one passes everything on."""

    def before(self, request: Request) -> None:
        """Runs before the request is passed on."""


@dataclass
class Answer(Fault):
    """Answer so, without asking the real server."""

    status: int
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


@dataclass
class Drop(Fault):
    """Close the connection without a word. With `after_asking`, the real server has done what it was asked for."""

    after_asking: bool = False


@dataclass
class _Cut(Fault):
    after_bytes: int = 0


class Reset(_Cut):
    """Send this much of the body, then reset the connection."""


class Truncate(_Cut):
    """Promise the whole body, send this much of it and close the connection."""


@dataclass
class Trickle(Fault):
    """Send the body a byte at a time, after this much of it."""

    pause_s: float = 0.05
    after_bytes: int = 0


class Silence(Fault):
    """Never answer."""


class SlowHead(Fault):
    """Send the status line, and then a header that never ends."""


@dataclass
class Before(Fault):
    """Do something first, e.g. replace the object, and then pass the request on."""

    action: Callable[[], object]

    def before(self, request: Request) -> None:
        self.action()


@dataclass
class Reheaded(Fault):
    """Change the head of the real answer: its status, and headers (None removes one)."""

    headers: dict[str, str | None]
    status: int | None = None


Rule = Callable[[Request], Fault | None]


def always(fault: Fault, when: Callable[[Request], bool] = lambda request: True) -> Rule:
    """Do this to every request that `when` takes."""
    return after(0, fault, when)


def first(count: int, fault: Fault, when: Callable[[Request], bool] = lambda request: True) -> Rule:
    """Do this to the first `count` requests that `when` takes."""
    seen = itertools.count()
    return lambda request: fault if when(request) and next(seen) < count else None


def after(count: int, fault: Fault, when: Callable[[Request], bool] = lambda request: True) -> Rule:
    """Let `count` requests that `when` takes pass, and do this to all later ones."""
    seen = itertools.count()
    return lambda request: fault if when(request) and next(seen) >= count else None


class MisbehavingProxy:
    """Passes requests on to `port` of this machine, as `rule` says: None passes a request on.

    Attributes:
        rule: asked by the thread of each connection.
        requests: all of them since the last reset, in the order in which they came.
        connections: how many were accepted.
    """

    def __init__(self, port: int) -> None:
        self.rule: Rule = lambda request: None
        self.requests: list[Request] = []
        self.connections = 0
        self.closing = threading.Event()
        self.target = port
        proxy = self

        class Handler(_Handler):
            owner = proxy

        self._stack = ExitStack()
        self.url = self._stack.enter_context(running(QuietServer(Handler))).url

    def reset(self) -> None:
        """Forget the requests, end what is under way and pass on what comes."""
        self.rule, self.requests = lambda request: None, []
        self.closing.set()
        self.closing = threading.Event()

    def __enter__(self) -> "MisbehavingProxy":
        return self

    def __exit__(self, *_: object) -> None:
        self.closing.set()
        self._stack.close()


class _Handler(QuietHandler):
    owner: MisbehavingProxy
    wbufsize = 0

    def setup(self) -> None:
        super().setup()
        self.owner.connections += 1

    def _handle(self) -> None:
        owner, self.closing = self.owner, self.owner.closing
        request = Request(self.command, self.path, self.headers, self.rfile.read(int(self.headers.get("Content-Length", 0))))
        owner.requests.append(request)
        fault = owner.rule(request) or Fault()
        self.close_connection = isinstance(fault, Drop | _Cut | Trickle | Silence | SlowHead)
        if isinstance(fault, Silence):
            self.closing.wait(600)
        elif isinstance(fault, SlowHead):
            self._send(b"HTTP/1.1 200 OK\r\nX-Slow: ")
            while not self.closing.wait(0.05) and self._send(b"x"):
                pass
        elif isinstance(fault, Answer):
            self._send_head(fault.status, "", [*fault.headers.items(), ("Content-Length", str(len(fault.body)))])
            self._send(fault.body if self.command != "HEAD" else b"")
        elif not isinstance(fault, Drop) or fault.after_asking:
            fault.before(request)
            status, reason, headers, body = self._ask(request)
            if isinstance(fault, Reheaded):
                status = fault.status or status
                headers = [pair for pair in headers if pair[0].lower() not in {name.lower() for name in fault.headers}]
                headers += [(name, value) for name, value in fault.headers.items() if value is not None]
            if not isinstance(fault, Drop):
                self._send_head(status, reason, headers)
                self._send_body(fault, body)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = do_PATCH = _handle

    def _ask(self, request: Request) -> tuple[int, str, list[tuple[str, str]], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.owner.target, timeout=_UPSTREAM_TIMEOUT_S)
        try:
            connection.putrequest(request.method, request.path, skip_host=True, skip_accept_encoding=True)
            for name, value in request.headers.items():
                if name.lower() not in ("connection", "expect"):
                    connection.putheader(name, value)
            connection.endheaders(request.body or None)
            answer = connection.getresponse()
            body = answer.read()
        finally:
            connection.close()
        held = {"connection", "transfer-encoding", "keep-alive"}
        headers = [(name, value) for name, value in answer.getheaders() if name.lower() not in held]
        if not any(name.lower() == "content-length" for name, _ in headers):
            headers.append(("Content-Length", str(len(body))))
        return answer.status, answer.reason, headers, body

    def _send_head(self, status: int, reason: str, headers: list[tuple[str, str]]) -> None:
        self.send_response_only(status, reason or None)
        for name, value in headers:
            self.send_header(name, value)
        self.end_headers()

    def _send_body(self, fault: Fault, body: bytes) -> None:
        if not isinstance(fault, _Cut | Trickle):
            self._send(body)
            return
        self._send(body[: fault.after_bytes])
        if isinstance(fault, Reset):
            # With this, close() resets; what the server does at the end of a request would first say that the stream ends.
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.rfile.close()
            self.connection.close()
        elif isinstance(fault, Trickle):
            for position in range(fault.after_bytes, len(body)):
                if self.closing.wait(fault.pause_s) or not self._send(body[position : position + 1]):
                    break

    def _send(self, data: bytes) -> bool:
        """Send, and tell whether the client is still there."""
        with suppress(ConnectionError):
            self.wfile.write(data)
            return True
        return False
