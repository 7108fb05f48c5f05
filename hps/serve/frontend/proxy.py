"""Passes requests other than lookups on to the engine's application, over a socket of its own."""

import asyncio
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, cast

from hps.errors import RemoteError
from hps.ground.http1 import AnswerReader
from hps.serve.http.http_answer import CLIENT, CLIENT_CERTIFICATE, RequestError

_MOST_IDLE = 8
_CONNECT_S = 1.0
_HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"content-encoding",  # a front has decompressed the body
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
    """Who gets the answer of a request that was passed on."""

    def relay(self, data: bytes) -> None:
        """Send bytes of the answer."""

    def relayed(self, keeps_alive: bool) -> None:
        """The answer is complete."""

    def unrelayed(self, began: bool) -> None:
        """There is no answer, or no end of it if it `began`."""


def forwarded(
    method: str,
    target: bytes,
    headers: Iterable[tuple[bytes, bytes]],
    body: bytes | bytearray,
    client: str,
    certificate: Sequence[str] = (),
) -> bytes:
    """Return a request as the engine's application gets it."""
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
        self._began = False
        self._answer = AnswerReader()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._pool.forget(self)
        client, self._client = self._client, None
        if client is not None:
            client.unrelayed(self._began)

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def ask(self, client: Recipient, request: bytes, *, head_only: bool) -> None:
        self._client, self._began, self._answer = client, False, AnswerReader(head_only=head_only)
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
            self._began = True
            client.relay(self._answer.fed)
        if done:
            self._client = None
            if self._answer.keeps_alive:
                self._pool.give_back(self)
            else:
                self.close()
            client.relayed(keeps_alive=True)

    def abandon(self) -> None:
        """Give up the request: its client is gone."""
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


class _WholeAnswer:
    """Collects an answer of the engine's application. *One request.*

    Args:
        away: returns why there is no engine.
    """

    def __init__(self, away: Callable[[], str]) -> None:
        self._away = away
        self.found: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()
        self._answer = AnswerReader(keeps=True)
        self.upstream: Upstream | None = None

    def chosen(self, upstream: Upstream) -> None:
        self.upstream = upstream
        if self.found.cancelled():
            upstream.abandon()

    def relay(self, data: bytes) -> None:
        self._answer.feed(data)

    def relayed(self, keeps_alive: bool) -> None:
        self.upstream = None
        if not self.found.done() and self._answer.head is not None:
            self.found.set_result((self._answer.head.status, bytes(self._answer.body)))

    def unrelayed(self, began: bool) -> None:
        self.upstream = None
        if not self.found.done():
            self.found.set_exception(RequestError(503, self._away()))


class EngineConnections:
    """Connections to the engine's application. *One per event loop.*

    Args:
        path: of its unix socket.
        away: returns why there is no engine.
    """

    def __init__(self, path: str, away: Callable[[], str]) -> None:
        self._path = path
        self._away = away
        self._idle: list[Upstream] = []
        self._tasks: set[asyncio.Task[Any]] = set()

    def ask(self, client: Recipient, request: bytes, *, head_only: bool, chosen: Callable[[Upstream], None]) -> None:
        """Send a request on some connection; `chosen` learns which."""
        while self._idle:
            upstream = self._idle.pop()
            if upstream.is_open:
                chosen(upstream)
                upstream.ask(client, request, head_only=head_only)
                return
        task = asyncio.get_running_loop().create_task(self._connect(client, request, head_only, chosen))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def answer_of(self, request: bytes) -> tuple[int, bytes]:
        """Send a request, and return the status and the body of its answer.

        Raises:
            RequestError: 503, the engine's application is not there.
        """
        answer = _WholeAnswer(self._away)
        self.ask(answer, request, head_only=False, chosen=answer.chosen)
        try:
            return await answer.found
        finally:
            if answer.upstream is not None:
                answer.upstream.abandon()

    async def _connect(self, client: Recipient, request: bytes, head_only: bool, chosen: Callable[[Upstream], None]) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_CONNECT_S):
                _, upstream = await loop.create_unix_connection(lambda: Upstream(self), self._path)
        except (OSError, TimeoutError):
            client.unrelayed(began=False)
            return
        chosen(upstream)
        upstream.ask(client, request, head_only=head_only)

    def give_back(self, upstream: Upstream) -> None:
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
