"""Forwards requests other than lookups to the engine's application, over its unix socket."""

import asyncio
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, cast

from hps.errors import RemoteError
from hps.ground.http1 import AnswerReader
from hps.serve.http.http_answer import CLIENT, CLIENT_CERTIFICATE, RequestError

_MOST_IDLE = 8
_CONNECT_S = 1.0
# The last two are added by `forwarded`: a client that sends them itself could pose as another one.
_HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"content-encoding",  # the frontend has decompressed the body
        b"content-length",
        b"expect",
        b"keep-alive",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        CLIENT,
        CLIENT_CERTIFICATE,
    }
)


class Recipient(Protocol):
    """Receives the answer of a forwarded request."""

    def relay(self, data: bytes) -> None:
        """Send bytes of the answer."""

    def finish_relay(self) -> None:
        """Finish a complete answer."""

    def fail_relay(self, *, started: bool) -> None:
        """Handle a lost connection to the engine; part of the answer was relayed if `started`."""


def forwarded(
    method: str,
    target: bytes,
    headers: Iterable[tuple[bytes, bytes]],
    body: bytes | bytearray,
    client: str,
    certificate: Sequence[str] = (),
) -> bytes:
    """Encode a request for the engine's application."""
    lines = [b"%s %s HTTP/1.1" % (method.encode(), target)]
    lines += [b"%s: %s" % line for line in headers if line[0] not in _HOP_BY_HOP]
    if certificate:
        lines.append(CLIENT_CERTIFICATE + b": " + json.dumps(certificate).encode())
    lines += [CLIENT + b": " + client.encode(), b"content-length: %d" % len(body), b"", b""]
    return b"\r\n".join(lines) + bytes(body)


class Upstream(asyncio.Protocol):
    """A connection to the engine's application. *Used only by its event loop.*"""

    def __init__(self, pool: "EngineConnections") -> None:
        self._pool = pool
        self._transport: asyncio.Transport | None = None
        self._client: Recipient | None = None
        self._started = False
        self._answer = AnswerReader()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._pool.forget(self)
        client, self._client = self._client, None
        if client is not None:
            client.fail_relay(started=self._started)

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def send(self, client: Recipient, request: bytes, *, head_only: bool) -> None:
        self._client, self._started, self._answer = client, False, AnswerReader(head_only=head_only)
        if self._transport is not None:
            self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        client = self._client
        if client is None:
            self.close()
            return
        try:
            done = self._answer.feed(data)
        except RemoteError:
            self.close()
            return
        if self._answer.fed:
            self._started = True
            client.relay(self._answer.fed)
        if done:
            self._client = None
            self.resume()  # a client that has not read the last bytes has paused it, and refers to it no longer
            if self._answer.keeps_alive:
                self._pool.release(self)
            else:
                self.close()
            client.finish_relay()

    def abandon(self) -> None:
        """Drop the request of a disconnected client."""
        # The answer is still to come, and would be taken for that of the next request: the connection cannot be reused.
        self._client = None
        self.close()

    def pause(self) -> None:
        if self._transport is not None:
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._transport is not None:
            self._transport.resume_reading()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


class _CollectedAnswer:
    """Collects an answer of the engine's application. *One request.*"""

    def __init__(self, unavailable: Callable[[], str]) -> None:
        self._unavailable = unavailable
        self.found: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()
        self._answer = AnswerReader(keep_body=True)
        self.upstream: Upstream | None = None

    def use(self, upstream: Upstream) -> None:
        self.upstream = upstream
        if self.found.cancelled():
            upstream.abandon()

    def relay(self, data: bytes) -> None:
        self._answer.feed(data)

    def finish_relay(self) -> None:
        self.upstream = None
        if not self.found.done() and self._answer.head is not None:
            self.found.set_result((self._answer.head.status, bytes(self._answer.body)))

    def fail_relay(self, *, started: bool) -> None:
        self.upstream = None
        if not self.found.done():
            self.found.set_exception(RequestError(503, self._unavailable()))


class EngineConnections:
    """Pool of connections to the engine's application. *One per event loop.*"""

    # One request at a time per connection, without pipelining: an abandoned request then costs only its own connection, and
    # a slow route never delays a health check behind it. A client that reads slowly pauses its upstream, so that the kernel's
    # buffers bound what a frontend holds of an answer (`Connection.relay`).

    def __init__(self, path: str, unavailable: Callable[[], str]) -> None:
        self._path = path
        self._unavailable = unavailable
        self._idle: list[Upstream] = []
        self._tasks: set[asyncio.Task[Any]] = set()

    def forward(self, client: Recipient, request: bytes, *, head_only: bool, use: Callable[[Upstream], None]) -> None:
        """Send a request on an idle or a new connection, which `use` receives."""
        while self._idle:
            upstream = self._idle.pop()
            if upstream.is_open:
                use(upstream)
                upstream.send(client, request, head_only=head_only)
                return
        task = asyncio.get_running_loop().create_task(self._connect(client, request, head_only, use))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def fetch_answer(self, request: bytes) -> tuple[int, bytes]:
        """Send a request, and return the status and the body of its answer; raise RequestError 503 without an engine."""
        answer = _CollectedAnswer(self._unavailable)
        self.forward(answer, request, head_only=False, use=answer.use)
        try:
            return await answer.found
        finally:
            if answer.upstream is not None:
                answer.upstream.abandon()

    async def _connect(self, client: Recipient, request: bytes, head_only: bool, use: Callable[[Upstream], None]) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_CONNECT_S):
                _, upstream = await loop.create_unix_connection(lambda: Upstream(self), self._path)
        except (OSError, TimeoutError):
            client.fail_relay(started=False)
            return
        use(upstream)
        upstream.send(client, request, head_only=head_only)

    def release(self, upstream: Upstream) -> None:
        if len(self._idle) < _MOST_IDLE:
            self._idle.append(upstream)
        else:
            upstream.close()

    def forget(self, upstream: Upstream) -> None:
        if upstream in self._idle:
            self._idle.remove(upstream)

    def close(self) -> None:
        for upstream in list(self._idle):
            upstream.close()
