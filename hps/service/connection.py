"""uvicorn's connections, with the bounds on memory and time that uvicorn lacks.

Per connection: 64 KB and 128 lines of headers, the same for trailers, and 64 requests behind an unanswered one; until they are
answered nothing more is parsed or read. All held bytes count in one `HeldMemory`.
"""

import asyncio
import logging
import resource
import select
import time
from typing import Any

import httptools
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from hps.ground.log_limits import OnceAMinute
from hps.service.held_memory import HeldMemory
from hps.service.refusals import Refusals

MAX_HEADER_BYTES = 65_536
MAX_HEADERS = 128
_MOST_HEADERS = (MAX_HEADER_BYTES, MAX_HEADERS)
MAX_PIPELINED = 64

_PARSED_BYTES = 16_384  # at once: bounds the objects that are created before limits are checked
_PIPELINED_REQUEST_BYTES = 4096  # estimated size of the objects of a request with few headers
_LEAST_PROGRESS_BYTES = 65_536  # of an answer, or an eighth of its unread bytes, within the timeout
_FIRST_REQUEST_S = 0.5  # after a connection opens, while the service stops or has no room
_TOO_MANY = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\nconnection: close\r\n"
    b'content-length: 62\r\n\r\n{"error":"too many connections; send the request again later"}'
)
_log = logging.getLogger(__name__)


_log.addFilter(OnceAMinute())


class Connections:
    """State shared by the connections of a server. *One per event loop.*

    Args:
        memory: counts the held bytes.
        refusals: counts refused clients.
        max_connections: beyond this, a new connection replaces the least missed one.
        keep_alive_s: how long a connection may stay idle.

    Attributes:
        leaving: whether the service is stopping, so that each answer tells its client to reconnect.
        max_connections: at most half the file descriptors of the process; the others are for databases and model files.
        order: all connections, the longest without a complete request first, to half a second.
    """

    def __init__(self, memory: HeldMemory, refusals: Refusals, max_connections: int, keep_alive_s: float) -> None:
        self.memory = memory
        self.refusals = refusals
        self.leaving = False
        self.too_many = _TOO_MANY
        self.order: dict[Connection, None] = {}
        self.limit_to(max_connections, keep_alive_s)

    def limit_to(self, max_connections: int, keep_alive_s: float) -> None:
        """Change the limits; open connections use them from their next request."""
        self.max_connections = _within_descriptors(max_connections)
        self.keep_alive_s = keep_alive_s
        for connection in self.order:
            connection.timeout_keep_alive = keep_alive_s

    def leave(self) -> None:
        """Let every connection close after its next answer, or the last of its outstanding ones."""
        self.leaving = True
        for connection in self.order:
            connection.leave()

    def least_missed(self) -> "Connection | None":
        """Return the connection to close for a new one; None to refuse the new one.

        Requests that are sent in part never take more than half of the connections from clients that have sent complete ones.
        Of those without a complete request, ones without the headers of one go first, then the oldest. A new one has a moment.
        """
        waiting = [one for one in self.order if one.waiting]
        known = [one for one in waiting if one.completed]
        since = time.monotonic() - _FIRST_REQUEST_S
        unknown = [one for one in waiting if not one.completed and (one.idle or one.opened < since)]
        if unknown:
            return min(unknown, key=lambda one: not one.idle)
        if len(known) < len(waiting) and 2 * len(known) <= self.max_connections:
            return None
        return next((one for one in known if not one.used), known[0] if known else None)


def _within_descriptors(connections: int) -> int:
    """Raise the limit of open files to twice as many connections, if possible. Return how many fit in half of the limit."""
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * connections if most == resource.RLIM_INFINITY else min(2 * connections, most)
    if limit != resource.RLIM_INFINITY and limit < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))
        limit = wanted
    return connections if limit == resource.RLIM_INFINITY else max(1, min(connections, limit // 2))


class _Parser(httptools.HttpRequestParser):
    """Ignores requests to switch protocols (`Upgrade: h2c`), as servers may.

    httptools would end such a request at its headers and treat its body as the other protocol.
    """

    def __init__(self, connection: "Connection") -> None:
        super().__init__(connection)
        self._connection = connection

    def feed_data(self, data: Any) -> None:
        try:
            super().feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            head = self._connection.take_upgrade()
            if not head:
                raise
            super().feed_data(head)
            self.feed_data(memoryview(data)[upgrade.args[0] :])


class _Flow(FlowControl):
    """Reads nothing while unparsed bytes remain: uvicorn would resume reading with each request that begins or ends."""

    unparsed = False

    def resume_reading(self) -> None:
        if self.read_paused and not self.unparsed:
            super().resume_reading()


class Connection(HttpToolsProtocol):
    """A connection of uvicorn's with limits. *Used only by its event loop.*

    It closes if its client stalls: the headers of the first or a later request are incomplete for too long, or an answer is not
    read. Bodies and lookups have their own timeouts, and uvicorn closes idle connections.

    It overrides only the methods of `asyncio.Protocol`, the callbacks of httptools' parser, and the public methods that these
    call.

    Args:
        more: arguments from uvicorn.
    """

    timeout_keep_alive: float  # type: ignore[assignment]  # uvicorn hands it to `call_later`

    def __init__(self, shared: Connections, **more: Any) -> None:
        super().__init__(**more)
        self.parser = _Parser(self)
        self.headers = []
        self._shared = shared
        self._memory = shared.memory
        self.timeout_keep_alive = shared.keep_alive_s
        self.opened = time.monotonic()
        self.completed = False  # a request of it has arrived completely
        self.used = False  # since the last `abort_if_stalled`
        self._held = self._held_unsent = 0  # bytes counted in the memory
        self._in_body = self._busy = self._ended = False  # busy: complete requests are unanswered
        self._unparsed = bytearray()  # while it is busy
        self._header_bytes = 0  # of incomplete headers or trailers
        self._header_since: float | None = time.monotonic()  # None while no headers are expected
        self._upgrade = b""
        self._answering: RequestResponseCycle | None = None  # the pipelined request being answered
        self._unread, self._unread_since, self._progressed = 0, 0.0, False
        self._last: RequestResponseCycle | None = None  # its answer says that the connection closes

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow: _Flow = _Flow(transport)
        shared = self._shared
        if len(self.connections) > shared.max_connections:
            limit = f"{shared.max_connections} connections (service.max_connections, at most half of the open files)"
            _log.warning("there are %s; closing the longest idle ones for others", limit)
            least_missed = shared.least_missed()
            if least_missed is None:
                shared.refusals.refuse("connections", limit)
                self._ended = True
                transport.write(_TOO_MANY)
                transport.close()
                return
            least_missed.close()
        shared.order[self] = None

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._answering is not None:  # uvicorn notifies the latest request
            self._answering.disconnected = True
        self._shared.order.pop(self, None)
        self._unparsed.clear()
        self._hold(0)
        self._hold_unsent(0)

    def data_received(self, data: bytes) -> None:
        size = len(data)
        if size <= _PARSED_BYTES and not (self._busy or self._unparsed or self._in_body or self._ended):
            self._held += size
            self._memory.held += size
            super().data_received(data)
            if not self._busy:
                self._look_at(size, None, 0)
            return
        view = memoryview(data)
        for start in range(0, len(data), _PARSED_BYTES):
            if self._busy or self._unparsed:
                self._set_aside(view[start:])
                return
            self._parse(view[start : start + _PARSED_BYTES])

    def eof_received(self) -> bool:  # type: ignore[override]  # asyncio has it so
        """Keep the connection until the client, which sends nothing more, has the answers to its complete requests."""
        if self._busy:
            self.cycle.keep_alive = False
        return self._busy

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade() and (method := self.parser.get_method()) != b"CONNECT":
            lines = [b"%s %s HTTP/%s" % (method, self.url, self.parser.get_http_version().encode())]
            lines += [b"%s: %s" % header for header in self.headers if header[0] != b"upgrade"]
            self._upgrade = b"\r\n".join([*lines, b"", b""])
            return
        if self._busy:
            if len(self.pipeline) == MAX_PIPELINED:
                raise ValueError("too many requests wait for the answer of an earlier one")
            self._hold(self._held + _PIPELINED_REQUEST_BYTES)
        super().on_headers_complete()
        if not self.pipeline:
            self._answering = self.cycle
        if self._shared.leaving:
            self.leave()
        self.headers = []  # for the trailers, which are not counted
        self._in_body = True

    def on_message_complete(self) -> None:
        if self._upgrade:
            return
        super().on_message_complete()
        self._in_body, self.completed, self.used = False, True, True
        self._header_bytes, self._header_since = 0, None
        self._busy = not self.cycle.response_complete

    def on_response_complete(self) -> None:
        if self.pipeline:
            self._answering = self.pipeline[-1][0]
        super().on_response_complete()
        self._progressed = True
        if self.cycle.response_complete or (self._in_body and not self.pipeline):  # else a complete request is next
            self._busy = False
            self._memory.held -= self._held
            self._held = 0
            if self._unparsed:
                self._hold(len(self._unparsed))
                self.loop.call_soon(self._parse_more)

    def send_400_response(self, msg: str) -> None:
        if self._busy:  # earlier requests are answered first; then it closes
            self.cycle.keep_alive = False
            self._ended = True
        else:
            super().send_400_response(msg)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._hold_unsent(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        super().resume_writing()
        self._progressed = True
        self._hold_unsent(0)

    @property
    def waiting(self) -> bool:
        """Whether it waits for the rest of a request, or for one."""
        return not (self._busy or self._ended)

    @property
    def idle(self) -> bool:
        return self.waiting and not self._in_body

    def take_upgrade(self) -> bytes:
        """Take the headers of an upgrade request without the upgrade; empty if there was none."""
        head, self._upgrade = self._upgrade, b""
        return head

    def close(self) -> None:
        """Close an idle connection to make room for another."""
        self._ended = True
        self.transport.close()

    def leave(self) -> None:
        """Announce the close of the connection in the answer to the latest request only."""
        self._stay()
        cycle = self.cycle
        if cycle is not None and cycle.keep_alive and not cycle.response_started:
            cycle.keep_alive, self._last = False, cycle

    def close_if_quiet(self) -> None:
        """Close the connection unless a request is or may be under way: it has just opened, or bytes arrive."""
        new = self._header_since is not None and time.monotonic() - self._header_since < _FIRST_REQUEST_S
        if not self.idle or self._header_bytes or self._unparsed or new or self.transport.is_closing():
            return
        received = select.poll()  # bytes that the event loop has not read: closing now would reset the connection
        received.register(self.transport.get_extra_info("socket").fileno(), select.POLLIN)
        if not received.poll(0):
            self.close()

    def abort_if_stalled(self, header_timeout_s: float, answer_timeout_s: float) -> None:
        """Abort the connection if its client has stalled for longer than this. Called twice a second."""
        now = time.monotonic()
        if self.used:
            self.used = False
            order = self._shared.order
            order[self] = order.pop(self, None)  # behind the others
        unread = self.transport.get_write_buffer_size()
        self._hold_unsent(unread)
        if self._in_body and not self.pipeline:
            self._hold(len(self.cycle.body))  # the rest was taken, and is counted, by the application
        if not unread or not self._unread or self._progressed or unread <= self._unread - self._least_progress:
            self._unread, self._unread_since, self._progressed = unread, now, False
        if self._header_since is not None and now - self._header_since > header_timeout_s:
            if self._header_bytes:
                self._abort("headers", f"they did not arrive within {header_timeout_s:g} s (service.request_timeout_s)")
            else:
                self.transport.abort()  # no request has begun
        elif now - self._unread_since > answer_timeout_s:
            self._abort("answer", f"{unread} bytes wait, no progress in {answer_timeout_s:g} s (service.answer_timeout_s)")

    def _abort(self, reason: str, what: str) -> None:
        client = self.client[0] if self.client else "an unknown address"
        self._shared.refusals.abort(reason, client, what)
        self.transport.abort()

    def _within_memory(self) -> bool:
        held, limit = self._memory.held, self._memory.limit
        if held > limit:
            self._abort("memory", f"{held} bytes are held, expected at most {limit} (service.max_held_bytes)")
        return held <= limit

    @property
    def _least_progress(self) -> int:
        return max(_LEAST_PROGRESS_BYTES, self._unread // 8)

    def _parse(self, data: bytes | memoryview) -> None:
        if self._ended or self.transport.is_closing():
            return
        cycle, size = (self.cycle, len(self.cycle.body)) if self._in_body else (None, 0)
        self._hold(self._held + len(data))
        super().data_received(data)  # type: ignore[arg-type]  # httptools takes any buffer
        if not self._busy:
            self._look_at(len(data), cycle, size)

    def _look_at(self, received: int, cycle: RequestResponseCycle | None, size: int) -> None:
        """Check the limits of an incomplete request; before these bytes, its body had this length."""
        if self._in_body and (self.cycle is not cycle or len(self.cycle.body) > size):
            self._header_bytes, self._header_since = 0, None
            self._hold(len(self.cycle.body))
            return
        self._header_bytes += received
        if not self._in_body and self._header_since is None:
            self._header_since = time.monotonic()
        if self._within_memory() and (self._header_bytes > MAX_HEADER_BYTES or len(self.headers) > MAX_HEADERS):
            _log.warning("closing a connection with headers or trailers of more than %d bytes or %d lines", *_MOST_HEADERS)
            self.send_400_response("The headers are too long.")

    def _parse_more(self) -> None:
        data, self._unparsed = self._unparsed, bytearray()
        self._hold(0)
        self.flow.unparsed = False
        self.data_received(bytes(data))
        self.flow.resume_reading()

    def _stay(self) -> None:
        if self._last is not None and not self._last.response_started:
            self._last.keep_alive = True
        self._last = None

    def _set_aside(self, data: memoryview) -> None:
        self._stay()  # until its requests are answered, too
        self._unparsed += data
        self._hold(self._held + len(data))
        self.flow.pause_reading()
        self.flow.unparsed = True
        self._within_memory()

    def _hold(self, size: int) -> None:
        self._memory.held += size - self._held
        self._held = size

    def _hold_unsent(self, size: int) -> None:
        self._memory.held += size - self._held_unsent
        self._held_unsent = size
