"""The connections of a front: what all kinds have in common, how many there are, and which is closed for another."""

import asyncio
import logging
import resource
import time
from typing import Final, Protocol, cast

from hps.configuration.load import ServiceConfig
from hps.ground.log_limits import OnceAMinute
from hps.serve.frontend.tls import TLS, names_in
from hps.serve.http.refusals import Refusals

_log = logging.getLogger(__name__)
_log.addFilter(OnceAMinute())
_GOODBYE_S: Final = 0.5
_MOST_TLS_READ: Final = 1 << 18
_MOST_TLS_WRITE: Final = 1 << 20
_FIRST_REQUEST_S: Final = 0.5  # after a connection opens, while there is no room
UNREAD_S: Final = 0.4
"""Of an answer without progress from one look to the next, while there is no room for others: these wait for a second."""
TOO_MANY: Final = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\nconnection: close\r\n"
    b'content-length: 62\r\n\r\n{"error":"too many connections; send the request again later"}'
)
"""Answer to a connection for which there is no room."""


class Acceptor(Protocol):
    """What every connection needs of its frontend."""

    settings: ServiceConfig
    refusals: Refusals
    leaving: bool
    loop: asyncio.AbstractEventLoop

    def opened(self, connection: "ClientConnection") -> None: ...
    def closed(self, connection: "ClientConnection") -> None: ...


class ClientConnection(asyncio.BufferedProtocol):
    """A client's connection to a front, in the open or within TLS. *Used only by its event loop.*

    Args:
        tls: None: in the open.

    Attributes:
        completed, used: a request has arrived completely: ever, and since the last look.
        opened: when it was.
        client: its address; empty for a unix socket.
        certificate: names in the client's certificate.
    """

    def __init__(self, front: Acceptor, tls: TLS | None) -> None:
        self.front = front
        self.transport: asyncio.Transport = cast(asyncio.Transport, None)
        self.opened = time.monotonic()
        self.completed = self.used = False
        self.client = ""
        self.certificate: tuple[str, ...] = ()
        self._tls = tls
        self._kept_by_tls = 0
        self._socket: asyncio.Transport | None = None  # beneath TLS

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        peer = transport.get_extra_info("peername")
        self.client = peer[0] if isinstance(peer, tuple) else ""
        self.front.opened(self)
        if self._tls is None:
            self.transport.set_write_buffer_limits(0)  # a write is sent at once, and `pause_writing` says that it could not be
        elif not self.transport.is_closing():
            self._tls.begin(self, self.front.settings)

    def secured(self, transport: asyncio.Transport) -> None:
        self.transport, self._socket = transport, self.transport
        self.transport.set_write_buffer_limits(1)  # as 0 of a plain one: that would stall an empty buffer, too
        self.certificate = names_in(transport.get_extra_info("peercert"))

    def not_secured(self, why: str) -> None:
        if why:
            self.front.refusals.abort("handshake", self.client or "an unknown address", why)
        self.transport.abort()
        self.connection_lost(None)

    def _close(self) -> None:
        """Close the connection. A client that has been sent everything is not waited for: TLS would, to say goodbye."""
        self.transport.close()
        if self._socket is not None and not self._socket.get_write_buffer_size():
            self.front.loop.call_later(_GOODBYE_S, self.transport.abort)

    @property
    def kept_bytes(self) -> int:
        """Bytes that it keeps beside a few KB of objects and what is counted as held."""
        return self._kept_by_tls

    def note_sizes(self, received: int, sent: int) -> None:
        """Note the bytes of a request, or of a part of it, and of its answer within TLS, which keeps room for them.

        A buffer of uvloop has what was received at a time, and one of OpenSSL what that is not decrypted of, a third larger.
        """
        kept = 7 * min(received, _MOST_TLS_READ) // 3 + 4 * min(sent, _MOST_TLS_WRITE) // 3
        self._kept_by_tls = max(self._kept_by_tls, kept)

    @property
    def waiting(self) -> bool:
        """Whether it waits for the rest of a request, or for one."""
        raise NotImplementedError

    @property
    def idle(self) -> bool:
        """Whether no request is under way."""
        raise NotImplementedError

    @property
    def unread_since(self) -> float:
        """Since when its client has made no progress with an answer; infinity unless it lags."""
        raise NotImplementedError

    def refuse_connection(self) -> None:
        """Close a connection for which there is no room."""
        raise NotImplementedError

    def close(self) -> None:
        """Close an idle connection to make room for another, or one whose client does not read."""
        raise NotImplementedError

    def close_if_quiet(self) -> None:
        """Close the connection unless a request is or may be under way."""
        raise NotImplementedError

    def end_unread(self, since: float) -> None:
        """Give up answers without progress since then, whose slots others need."""
        raise NotImplementedError

    def look(self, now: float, request_s: float, answer_s: float, keep_alive_s: float) -> None:
        """Refuse or abort what takes too long. Called twice a second."""
        raise NotImplementedError


class Connections:
    """The connections of a front. *One per event loop.*

    Args:
        most: beyond this, a new connection replaces the least missed one.

    Attributes:
        most: at most half the file descriptors of the process; the others are for databases and model files.
        order: all connections, the longest without a complete request first, to half a second.
    """

    def __init__(self, most: int) -> None:
        self.order: dict[ClientConnection, None] = {}
        self.limit_to(most)

    def limit_to(self, most: int) -> None:
        """Change the limit."""
        self.most = _within_descriptors(most)

    def full(self) -> str:
        """Log that there is no room for another one, and return the limit."""
        limit = f"{self.most} connections (service.max_connections by the fronts, at most half of the open files)"
        _log.warning("there are %s; closing the longest idle ones for others", limit)
        return limit

    def least_missed(self) -> ClientConnection | None:
        """Return the connection to close for a new one; None to refuse the new one.

        Requests that are sent in part never take more than half of the connections from clients that have sent complete ones.
        Of those without a complete request, ones without the headers of one go first, then the oldest. A new one has a moment.
        Clients that do not read their answers go before those that have just sent a request.
        """
        waiting = [one for one in self.order if one.waiting]
        known = [one for one in waiting if one.completed]
        since = time.monotonic() - _FIRST_REQUEST_S
        unknown = [one for one in waiting if not one.completed and (one.idle or one.opened < since)]
        if unknown:
            return min(unknown, key=lambda one: not one.idle)
        protected = len(known) < len(waiting) and 2 * len(known) <= self.most
        unused = None if protected else next((one for one in known if not one.used), None)
        if unused is not None:
            return unused
        laggard = min(self.order, key=lambda one: one.unread_since)
        if laggard.unread_since < time.monotonic() - UNREAD_S:
            return laggard
        return None if protected or not known else known[0]

    def look(self) -> None:
        """Put connections with complete requests since the last look behind the others."""
        for connection in [one for one in self.order if one.used]:
            connection.used = False
            self.order[connection] = self.order.pop(connection)


def _within_descriptors(connections: int) -> int:
    """Raise the limit of open files to twice as many connections, if possible. Return how many fit in half of the limit."""
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * connections if most == resource.RLIM_INFINITY else min(2 * connections, most)
    if limit != resource.RLIM_INFINITY and limit < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))
        limit = wanted
    return connections if limit == resource.RLIM_INFINITY else max(1, min(connections, limit // 2))
