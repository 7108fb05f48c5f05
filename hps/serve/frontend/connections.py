"""The connections of a front: what all kinds have in common, how many there are, and which is closed for another."""

import asyncio
import logging
import resource
import time
from typing import Final, Protocol

from hps.ground.log_limits import OnceAMinute

_log = logging.getLogger(__name__)
_log.addFilter(OnceAMinute())
_FIRST_REQUEST_S: Final = 0.5  # after a connection opens, while there is no room
UNREAD_S: Final = 0.4
"""Of an answer without progress from one look to the next, while there is no room for others: these wait for a second."""
TOO_MANY: Final = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\nconnection: close\r\n"
    b'content-length: 62\r\n\r\n{"error":"too many connections; send the request again later"}'
)
"""Answer to a connection for which there is no room."""


class ClientConnection(Protocol):
    """What a frontend knows of a client's connection.

    Attributes:
        completed, used: a request has arrived completely: ever, and since the last look.
        opened: when it was.
    """

    transport: asyncio.Transport
    completed: bool
    used: bool
    opened: float

    @property
    def kept_bytes(self) -> int:
        """Bytes that it keeps beside a few KB of objects and what is counted as held."""

    @property
    def waiting(self) -> bool:
        """Whether it waits for the rest of a request, or for one."""

    @property
    def idle(self) -> bool:
        """Whether no request is under way."""

    @property
    def unread_since(self) -> float:
        """Since when its client has made no progress with an answer; infinity unless it lags."""

    def refuse_connection(self) -> None:
        """Close a connection for which there is no room."""

    def close(self) -> None:
        """Close an idle connection to make room for another, or one whose client does not read."""

    def close_if_quiet(self) -> None:
        """Close the connection unless a request is or may be under way."""

    def end_unread(self, since: float) -> None:
        """Give up answers without progress since then, whose slots others need."""

    def look(self, now: float, request_s: float, answer_s: float, keep_alive_s: float) -> None:
        """Refuse or abort what takes too long. Called twice a second."""


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
