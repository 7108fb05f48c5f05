"""Limits the connections of a frontend, and chooses the one to close for a new one."""

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
"""Seconds without progress after which an answer is aborted while others wait for its memory, which they do for a second."""
TOO_MANY: Final = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\nconnection: close\r\n"
    b'content-length: 62\r\n\r\n{"error":"too many connections; send the request again later"}'
)
"""Answer to a connection above the limit."""


class ClientConnection(Protocol):
    """A client's connection, as a frontend sees it."""

    transport: asyncio.Transport
    completed: bool  # a complete request has arrived
    used: bool  # the same, since the last poll
    opened: float  # by `time.monotonic`

    @property
    def kept_bytes(self) -> int:
        """Bytes kept between requests, in addition to a few KB of objects."""

    @property
    def waiting(self) -> bool:
        """Whether it waits for a request, or for the rest of one."""

    @property
    def idle(self) -> bool:
        """Whether no request is under way."""

    @property
    def unread_since(self) -> float:
        """Time of the client's last progress with an answer; infinity unless it lags."""

    def refuse_connection(self) -> None:
        """Close a connection above the limit."""

    def close(self) -> None:
        """Close an idle connection to make room for another, or one whose client does not read."""

    def close_if_quiet(self) -> None:
        """Close the connection unless a request is, or may be, in progress."""

    def end_unread(self, since: float) -> None:
        """Abort an answer without progress since then: other requests need its slot."""

    def poll(self, now: float, request_s: float, answer_s: float, keep_alive_s: float) -> None:
        """Refuse or abort requests and answers that take too long. Called twice a second."""


class Connections:
    """The connections of a frontend: at most `most`, or half of the process's file descriptors. *One per event loop.*"""

    def __init__(self, most: int) -> None:
        self.order: dict[ClientConnection, None] = {}  # longest without a complete request first
        self.limit_to(most)

    def limit_to(self, most: int) -> None:
        self.most = _within_descriptors(most)

    def full(self) -> str:
        """Log that the limit is reached, and return its text."""
        limit = f"{self.most} connections (service.max_connections by the frontends, at most half of the open files)"
        _log.warning("there are %s; closing the longest idle ones for others", limit)
        return limit

    def find_replaceable(self) -> ClientConnection | None:
        """Return the connection to close for a new one; None to refuse the new one."""
        # An attacker opens connections and sends nothing, or parts of requests. So connections that have never completed a
        # request are closed first: those without headers, then the oldest; new ones have half a second. Connections that
        # have completed one are closed only while they are more than half of all, so that an attacker cannot displace
        # them, and after those whose clients do not read their answers.
        waiting = [connection for connection in self.order if connection.waiting]
        known = [connection for connection in waiting if connection.completed]
        since = time.monotonic() - _FIRST_REQUEST_S
        unknown = [other for other in waiting if not other.completed and (other.idle or other.opened < since)]
        if unknown:
            return min(unknown, key=lambda connection: not connection.idle)
        protected = len(known) < len(waiting) and 2 * len(known) <= self.most
        unused = None if protected else next((connection for connection in known if not connection.used), None)
        if unused is not None:
            return unused
        laggard = min(self.order, key=lambda connection: connection.unread_since)
        if laggard.unread_since < time.monotonic() - UNREAD_S:
            return laggard
        return None if protected or not known else known[0]

    def poll(self) -> None:
        """Move connections with complete requests since the last poll behind the others."""
        for connection in [connection for connection in self.order if connection.used]:
            connection.used = False
            self.order[connection] = self.order.pop(connection)


def _within_descriptors(connections: int) -> int:
    """Raise the limit of open files to twice as many, if possible; return how many connections fit in half of it."""
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * connections if most == resource.RLIM_INFINITY else min(2 * connections, most)
    if limit != resource.RLIM_INFINITY and limit < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))
        limit = wanted
    return connections if limit == resource.RLIM_INFINITY else max(1, min(connections, limit // 2))
