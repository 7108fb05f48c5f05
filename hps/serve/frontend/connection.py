"""A client's connection to a frontend: reads requests within limits, and sends answers from the slab."""

import asyncio
import math
import select
import time
from collections import deque
from collections.abc import Sequence
from typing import Final, cast

from hps.errors import HPSError
from hps.ground.http1 import (
    MAX_HEAD_BYTES,
    MAX_HEADERS,
    Chunks,
    Head,
    MalformedRequestError,
    answer_head,
)
from hps.serve.frontend.answers import EncodedAnswer, Plan
from hps.serve.frontend.connections import TOO_MANY
from hps.serve.frontend.frontend import Frontend
from hps.serve.frontend.pending import Lookup
from hps.serve.frontend.proxy import Upstream, forwarded
from hps.serve.frontend.published import LookupTarget, lookup_target
from hps.serve.frontend.tls import names_in
from hps.serve.http.http_answer import BINARY, DEFERRED_KEYS, JSON, HTTPAnswer, RequestError, status_of
from hps.serve.http.http_metrics import DISCONNECTED
from hps.serve.http.request_body import inflate, inflated_bytes, too_large
from hps.serve.logs.requests import Served

_FIRST_BUFFER_BYTES: Final = 8192
_MOST_BUFFER_BYTES: Final = MAX_HEAD_BYTES + _FIRST_BUFFER_BYTES
_TURN_BYTES: Final = 1 << 20  # sent in one turn of the event loop, so that small answers need not wait for large ones
_LINGER_S: Final = 1.0  # for clients that send their complete body before they read an error
_MOST_SKIPPED_BYTES: Final = 1 << 20  # of a body that is answered before it has arrived
_LEAST_PROGRESS_BYTES: Final = 65_536  # or an eighth of the unread bytes, within service.answer_timeout_s
_FIRST_REQUEST_S: Final = 0.5
_GOODBYE_S: Final = 0.5
_MOST_TLS_READ: Final = 1 << 18
_MOST_TLS_WRITE: Final = 1 << 20
_REST_S: Final = 1.0  # without a request, after which a connection forgets its last one
_MOST_REPEATED_HEAD: Final = 2048
_EMPTY: Final = memoryview(b"")
_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"


class Connection(asyncio.BufferedProtocol):
    """One connection. *Used only by its event loop.*"""

    # Backpressure: requests are served one at a time, in order. Pipelined ones stay in the buffer, and the socket is not read
    # once that is full, so the kernel's window stops the client. The buffer's first 8 KB are part of a connection's cost; more
    # of it, and every body, is taken from the memory budget first.
    #
    # It is a protocol of asyncio rather than a pair of streams: `get_buffer` lets the event loop receive the keys of a binary
    # request where the engine reads them, and `answered` writes a slot's memory to the transport without a copy.

    def __init__(self, frontend: Frontend) -> None:
        self.frontend = frontend
        self.transport: asyncio.Transport = cast(asyncio.Transport, None)
        self.opened = time.monotonic()
        self.completed = self.used = False
        self.client = ""  # its address; empty for a unix socket
        self.certificate: tuple[str, ...] = ()  # names in the client's certificate
        self._kept_by_tls = 0
        self._socket: asyncio.Transport | None = None  # below TLS
        self._buffer = bytearray(_FIRST_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._at = self._have = 0  # the unread part of the buffer
        self._prefix = b""  # head and JSON part of the last request, if it can be repeated
        self._last: Lookup = cast(Lookup, None)  # the lookup and head of that request
        self._last_head: Head = cast(Head, None)
        self._last_snapshot = -1
        self._head: Head | None = None
        self._target: LookupTarget | None = None
        self._raw = b""
        self._served: Served = cast(Served, None)
        self._drawn: Served | None = None  # of a request that could not be repeated
        self._started = 0.0
        self._watched = False
        self._fill = _EMPTY  # receives the rest of the body
        self._body: bytearray | None = None  # a complete body
        self._chunks: Chunks | None = None
        self._left = 0  # bytes of a body not taken from the buffer yet; -1 if unknown
        self._skip = 0  # bytes to skip of the body of a request that was refused
        self._held = 0
        self._lookup: Lookup | None = None
        self._upstream: Upstream | None = None
        self._proxied = False
        self._busy = self._ended = self._closing = self._lingering = self._reading_paused = self._eof = False
        self._out: deque[bytes | memoryview] = deque()
        self._stalled = False
        self._slot = -1  # the slot that is being sent
        self._status = 0
        self._bytes_out = 0
        self._since: float | None = self.opened  # start of an incomplete head or body
        self._unread, self._unread_since = 0, 0.0
        self._idle_since = self.opened

    # -- the protocol -----------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        peer = transport.get_extra_info("peername")
        self.client = peer[0] if isinstance(peer, tuple) else ""
        self.frontend.opened(self)
        if self.frontend.tls is None:
            self.transport.set_write_buffer_limits(0)  # so that `pause_writing` reports each write that was not sent at once
        elif not self.transport.is_closing():
            self.frontend.tls.start_handshake(self, self.frontend.settings)

    def finish_handshake(self, transport: asyncio.Transport) -> None:
        self.transport, self._socket = transport, self.transport
        self.transport.set_write_buffer_limits(1)  # the least for uvloop's TLS: with 0 an empty buffer would stall, too
        self.certificate = names_in(transport.get_extra_info("peercert"))

    def fail_handshake(self, reason: str) -> None:
        if reason:
            self.frontend.refusals.abort("handshake", self.client or "an unknown address", reason)
        self.transport.abort()
        self.connection_lost(None)

    def _close(self) -> None:
        # Closing TLS waits for the client's close_notify, up to service.answer_timeout_s. One that has received everything is
        # not waited for that long.
        self.transport.close()
        if self._socket is not None and not self._socket.get_write_buffer_size():
            self.frontend.loop.call_later(_GOODBYE_S, self.transport.abort)

    def connection_lost(self, error: Exception | None) -> None:
        self._ended = True
        self.frontend.closed(self)
        if self._upstream is not None:
            self._upstream.abandon()
            self._upstream = None
        lookup, self._lookup = self._lookup, None
        if lookup is not None:
            self.frontend.exchange.disown(lookup)
            self._finish(DISCONNECTED)
        elif self._head is not None and not self._lingering:
            self._finish(DISCONNECTED)
        if self._slot >= 0:
            self.frontend.exchange.release(self._slot)
            self._slot = -1
        self.reserve_bytes(0)
        self._at = self._have = 0
        self._shrink()
        self._forget()
        self._out.clear()

    def get_buffer(self, hint: int) -> memoryview:
        if self._fill:
            return self._fill
        if self._have == len(self._buffer):
            self._compact()
        return self._view[self._have :]

    def buffer_updated(self, count: int) -> None:
        if self._fill:
            self._fill = self._fill[count:]
            if not self._fill:
                self._body_arrived() if self._body is not None else self._keys_arrived()
            return
        self._have += count
        if self._lingering:
            self._at = self._have = 0
        elif not self._busy:
            self._advance()
        elif self._have == len(self._buffer) and not self._at:
            self._pause_reading()

    def eof_received(self) -> bool:
        """Keep the connection until the client, which sends nothing more, has its answer."""
        self._eof = True
        if not self._busy:
            self._next()
        return self._busy and not self._lingering and self.frontend.tls is None  # TLS has no half-open connections

    def pause_writing(self) -> None:
        self._stalled = True
        self._unread, self._unread_since = 0, time.monotonic()

    def resume_writing(self) -> None:
        self._stalled = False
        if self._upstream is not None:
            self._upstream.resume()
        self._pump()

    # -- reading ----------------------------------------------------------------------------------------------------------

    def _compact(self) -> None:
        rest = self._have - self._at
        self._buffer[:rest] = self._buffer[self._at : self._have]
        self._at, self._have = 0, rest

    def _make_room(self) -> None:
        """Make room in the buffer for more of a head or JSON part.

        Raises:
            OverloadedError: there is no memory for it.
        """
        if self._have < len(self._buffer):
            return
        if self._at:
            self._compact()
            return
        size = min(4 * len(self._buffer), _MOST_BUFFER_BYTES)
        self.frontend.memory.reserve(size - len(self._buffer), "reading the head of the request", spare=True)
        if self.frontend.tls is not None:
            self.record_sizes(size, 0)
        self._resize(size)

    def _resize(self, size: int) -> None:
        buffer = bytearray(size)
        buffer[: self._have] = self._view[: self._have]
        self._buffer, self._view = buffer, memoryview(buffer)

    def _forget(self) -> None:
        """Forget the last request, which the next one could have repeated."""
        self._prefix, self._last, self._last_head = b"", cast(Lookup, None), cast(Head, None)
        self._raw, self._target, self._served = b"", None, cast(Served, None)

    def _shrink(self) -> None:
        if (more := len(self._buffer) - _FIRST_BUFFER_BYTES) > 0:
            self._compact()
            if self._have < _FIRST_BUFFER_BYTES:
                self.frontend.memory.used -= more
                self._resize(_FIRST_BUFFER_BYTES)

    def _pause_reading(self) -> None:
        if not self._reading_paused:
            self._reading_paused = True
            self.transport.pause_reading()

    def _resume_reading(self) -> None:
        if self._reading_paused:
            self._reading_paused = False
            self.transport.resume_reading()

    def _advance(self) -> None:
        """Parse the buffer until a request is complete or more bytes are needed."""
        if self._skip:
            here = min(self._skip, self._have - self._at)
            self._at, self._skip = self._at + here, self._skip - here
            if not self._skip:
                self._since = None
        try:
            if self._head is None:
                self._read_head()
            elif self._chunks is not None:
                self._feed_chunks()
            elif self._lookup is None and self._body is None:
                self._read_text()
        except Exception as error:  # noqa: BLE001 - answered, and logged where it is unexpected
            self.refuse(error)

    def _read_head(self) -> None:
        buffer = self._buffer
        # Nearly all clients repeat head and JSON part, with other keys. Comparing 500 bytes takes 0.2 us; parsing the head
        # takes 8, parsing the JSON part and laying out the answer 50. `can_reuse` checks what the comparison cannot see:
        # models, tokens, settings, the access log. The length is checked first, since the buffer still has bytes of earlier
        # requests behind those that have arrived.
        if prefix := self._prefix:
            there, plan = self._have - self._at, self._last.plan  # None if it was retried on another version
            if plan is not None and there >= len(prefix) and buffer.startswith(prefix, self._at):
                started = time.perf_counter()
                crowded = self.frontend.exchange.slots.crowded  # see `_can_take_slot`
                free = not crowded or there >= len(prefix) + plan.keys_bytes
                if free and self.frontend.can_reuse(self._last_snapshot, started) and self._repeat(plan, started):
                    return
        while self._at < self._have and buffer[self._at] in b"\r\n":  # RFC 9112, section 2.2
            self._at += 1
        if self._at == self._have:
            self._at = self._have = 0
            return
        if self._since is None:
            self._since = time.monotonic()
        end = buffer.find(b"\r\n\r\n", self._at, self._have) + 4
        if end < 4:
            if self._have - self._at > MAX_HEAD_BYTES:
                raise MalformedRequestError(f"reading a request: its head is longer than {MAX_HEAD_BYTES} bytes")
            if buffer.count(b"\n", self._at, self._have) > MAX_HEADERS + 1:
                raise MalformedRequestError(f"reading a request: got more than {MAX_HEADERS} headers")
            self._make_room()
            return
        if end - self._at > MAX_HEAD_BYTES:
            raise MalformedRequestError(f"reading a request: its head is longer than {MAX_HEAD_BYTES} bytes")
        self._raw = raw = bytes(self._view[self._at : end])
        self._at = end
        self._started = time.perf_counter()
        self._served, self._drawn = self._drawn or self.frontend.served(), None
        self._left = 0
        # A client that sends head and body apart, as most libraries do, is seen here before `_prefix` is complete.
        self._head = head = self._last_head if self._prefix.startswith(raw) else Head(raw)
        self._left = head.length
        self._since = time.monotonic()
        self._target = target = lookup_target(head.path)
        self._watched = self.frontend.start_request(self.client, head, target, self._served, self._started)
        server = self.transport.get_extra_info("sockname")
        self.frontend.check(head, target, self._served, self.client, server, self.certificate)
        if head.expects_continue and head.length:
            self.transport.write(_CONTINUE)
        if head.length < 0:
            self._chunks = Chunks()
            self._feed_chunks()
        else:
            self._read_text()

    def _feed_chunks(self) -> None:
        chunks = cast(Chunks, self._chunks)
        self._at += chunks.feed(self._view[self._at : self._have])
        if self._at == self._have:
            self._at = self._have = 0
        most = self.frontend.most_bytes(cast(Head, self._head).path, self._target)
        if len(chunks.body) > most:
            raise too_large(f"got {len(chunks.body)} bytes", most)
        self.reserve_bytes(len(chunks.body))
        if chunks.done:
            self._chunks, self._body = None, chunks.body
            self._body_arrived()

    def _read_text(self) -> None:
        """Read the JSON part of a binary lookup, or start to receive any other body."""
        head = cast(Head, self._head)
        there = self._have - self._at
        # The keys of a binary lookup are received in a slot, where the engine reads them, without a copy. A slow client would
        # occupy that slot, so while more than half of the slab is taken, only a request that has arrived completely gets one;
        # any other body is received in memory that is counted for its client.
        text_bytes = self.frontend.text_bytes(head, self._target)
        if text_bytes >= 0 and self._can_take_slot(head.length):
            if there < text_bytes:
                self._make_room()
                return
            text = bytes(self._view[self._at : self._at + text_bytes])
            target = cast(LookupTarget, self._target)
            lookup = self.frontend.start_planned(self, target, self._served, text, head.length)
            if lookup is not None:
                self._lookup, self._prefix = lookup, b""
                names_itself = b"x-request-id" in head.headers or b"traceparent" in head.headers
                if len(self._raw) <= _MOST_REPEATED_HEAD and not (head.expects_continue or names_itself):
                    self._prefix, self._last, self._last_head = self._raw + text, lookup, head
                    self._last_snapshot = self.frontend.published.version
                self._at += text_bytes
                self._left -= text_bytes
                self._receive_keys()
                return
        size = head.length
        self.reserve_bytes(size)
        self._body = body = bytearray(size)
        there = min(there, size)
        view = memoryview(body)
        view[:there] = self._view[self._at : self._at + there]
        self._at += there
        self._fill = view[there:]
        if not self._fill:
            self._body_arrived()

    def _can_take_slot(self, size: int) -> bool:
        """Return True if a request with `size` bytes of body may take a slot now."""
        return not self.frontend.exchange.slots.crowded or self._have - self._at >= size

    def _repeat(self, plan: Plan, started: float) -> bool:
        """Start the last lookup again, with other keys; return False if a canary gives this one to another version."""
        frontend, last = self.frontend, self._last
        self._started = started
        served = Served()
        served.id = frontend.new_id()
        if last.version.rollout is not None:
            served.headers = self._last_head.headers
            if frontend.published.version_of(last.target, served) is not last.version:
                self._drawn = served  # with its id: drawn twice, the share of the versions would be another
                return False
        self._served = served
        served.identity = last.served.identity
        served.model, served.version = last.target.model_name, last.version.tables.version
        self._head, self._target, self._watched = self._last_head, last.target, False
        self._at += len(self._prefix)
        self._left = plan.keys_bytes
        if served.identity is not None:  # its rights have not changed, but its limits count every request
            frontend.authorization.count(served.identity)
            frontend.authorization.take_keys(served.identity, plan.keys)
        began = time.perf_counter_ns()
        self._lookup = self._last = Lookup(
            self, last.target, served, last.version, last.text, plan, device=plan.device, began_ns=began
        )
        self._receive_keys()
        return True

    def _receive_keys(self) -> None:
        """Take a slot for a planned lookup, and copy the keys that have arrived; wait if there is no slot."""
        lookup = cast(Lookup, self._lookup)
        if not self.frontend.exchange.take_slot(lookup):
            self._busy = True
            self._pause_reading()
            return
        plan, at = cast(Plan, lookup.plan), self._at
        there, start = self._have - at, lookup.slot + plan.keys_at
        keys = self.frontend.exchange.region.view[start : start + plan.keys_bytes]
        if there >= len(keys):
            self._at = end = at + len(keys)
            keys[:] = self._view[at:end]
            self._keys_arrived()
            return
        keys[:there] = self._view[at : self._have]
        self._at = self._have = 0
        self._fill = keys[there:]
        self._since = self._since or time.monotonic()

    def wait_with(self, body: bytes | bytearray) -> None:
        self._body = bytearray(body)

    def retry_slot(self) -> None:
        self._busy = False
        try:
            if self._body is not None:
                self._post()
            else:
                self._resume_reading()
                self._receive_keys()
        except Exception as error:  # noqa: BLE001 - answered
            self.refuse(error)

    def _keys_arrived(self) -> None:
        """Post a planned lookup, whose keys are in its slot."""
        self._busy, self.completed, self.used = True, True, True
        self._since, self._left = None, 0
        if self._at == self._have:
            self._at = self._have = 0
        self._served.bytes_in = cast(Head, self._head).length
        try:
            self.frontend.exchange.post(cast(Lookup, self._lookup))
        except Exception as error:  # noqa: BLE001 - answered
            self.refuse(error)

    def _body_arrived(self) -> None:
        self._busy, self.completed, self.used = True, True, True
        self._since, self._left = None, 0
        if self._at == self._have:
            self._at = self._have = 0
        head, served, body = cast(Head, self._head), self._served, cast(bytearray, self._body)
        try:
            served.bytes_in = len(body)
            if b"content-encoding" in head.headers:
                body = self._inflate(head, body)
            if target := self._target:
                length = head.headers.get(b"inference-header-content-length")
                shared = self.frontend.shared_tensors(target, body, length, self.client, head.headers)
                self._lookup = self.frontend.start_decoded(self, target, served, body, length, shared)
                self._post()
            else:
                self.frontend.check_ready(head.path)
                self._proxied = True
                if head.method == "GET":
                    self.frontend.publish()  # statistics in the answer shall count earlier requests
                lines = [*head.lines, (b"x-request-id", served.id)]  # of several, the last counts
                request = forwarded(head.method, head.target, lines, body, self.client, self.certificate)
                self._body = None
                self.frontend.engine.forward(self, request, head_only=head.method == "HEAD", use=self._use_upstream)
        except Exception as error:  # noqa: BLE001 - answered
            self.refuse(error)

    def _inflate(self, head: Head, body: bytearray) -> bytearray:
        most = self.frontend.most_bytes(head.path, self._target)
        self.reserve_bytes(len(body) + inflated_bytes(body, most), "decompressing the request")
        self._body = bytearray(inflate(head.headers, body, most))
        self.reserve_bytes(len(self._body))
        return self._body

    def _post(self) -> None:
        self._busy = True
        lookup = cast(Lookup, self._lookup)
        if self.frontend.exchange.take_slot(lookup):
            self.frontend.exchange.post(lookup)

    def _use_upstream(self, upstream: Upstream) -> None:
        if self._ended:
            upstream.abandon()
        else:
            self._upstream = upstream

    def reserve_bytes(self, size: int, what: str = "reading the request") -> None:
        memory = self.frontend.memory
        memory.used -= self._held
        self._held = 0
        if size:
            self._held = memory.reserve(size, what)

    # -- answering --------------------------------------------------------------------------------------------------------

    def send(self, status: int, pieces: Sequence[bytes | memoryview], slot: int = -1) -> None:
        """Send the pieces of an answer, its head first. A slot is released once it is sent."""
        self._lookup, self._body = None, None
        self._slot, self._status = slot, status
        self._bytes_out = sum(map(len, pieces[1:])) if slot < 0 else self._served.bytes_out
        self._out.extend(pieces)
        self._unread_since = time.monotonic()
        self._unread = 0
        self._pump()

    def answer(self, answer: HTTPAnswer, *, close: bool = False) -> None:
        """Send an answer without a slot."""
        size = sum(map(len, answer.chunks))
        close = close or self.closes_after
        self._closing = close
        head = answer_head(answer.status, answer.headers, size, self._served.id, self._connection(close))
        chunks = () if self._head is not None and self._head.method == "HEAD" else answer.chunks
        self.send(answer.status, [head, *chunks])

    def answered(self, lookup: Lookup, slot: int, deferred: int) -> None:
        """Send the answer of a planned lookup from its slot, with one write."""
        # The slot has room before the vectors for head and JSON part, so that the answer is one piece of memory. It is written
        # to the transport directly, since this is the path of most requests: the queue of `send` is for answers that take
        # several turns, or wait behind a stalled one.
        plan, view = cast(Plan, lookup.plan), self.frontend.exchange.region.view
        size = len(plan.text) + plan.end - plan.vectors_at
        close = self._closing = self.closes_after
        if close or deferred or cast(Head, self._head).needs_keep_alive:
            headers = [BINARY, (b"inference-header-content-length", b"%d" % len(plan.text))]
            if deferred:
                headers.append((DEFERRED_KEYS, b"%d" % deferred))
            head = answer_head(200, headers, size, self._served.id, self._connection(close)) + plan.text
        else:
            head = b"%b%b\r\n\r\n%b" % (plan.answer, self._served.id, plan.text)
        start = slot + plan.vectors_at - len(head)
        view[start : slot + plan.vectors_at] = head
        self._served.bytes_out = size
        if self._stalled or plan.end - plan.vectors_at > _TURN_BYTES // 2:
            self.send(200, (view[start : slot + plan.end],), slot)
            return
        self._lookup, self._slot, self._status, self._bytes_out = None, slot, 200, size
        self.transport.write(view[start : slot + plan.end])
        if not (self._stalled or self._ended):
            self._finish_answer()

    def encoded(self, lookup: Lookup, slot: int, deferred: int, answer: EncodedAnswer) -> None:
        headers = [BINARY if answer.binary else JSON]
        if answer.text_bytes is not None:
            headers.append((b"inference-header-content-length", b"%d" % answer.text_bytes))
        if deferred:
            headers.append((DEFERRED_KEYS, b"%d" % deferred))
        pieces: list[bytes | memoryview] = [*answer.text, *answer.binary]
        size = sum(map(len, pieces))
        close = self._closing = self.closes_after
        self._served.bytes_out = size
        self.send(200, [answer_head(200, headers, size, self._served.id, self._connection(close)), *pieces], slot)

    @property
    def closes_after(self) -> bool:
        """Whether the connection closes after this answer."""
        last = (self._eof or self.frontend.draining) and self._at == self._have  # requests that have arrived are answered
        return last or (self._head is not None and not self._head.keeps_alive)

    def _connection(self, close: bool) -> bytes:
        """Return the Connection header of an answer; empty if the client's default applies."""
        return b"close" if close else b"keep-alive" if self._head is not None and self._head.needs_keep_alive else b""

    def refuse(self, error: Exception) -> None:
        """Answer with an error. The connection closes if the body has not arrived, unless the client shall retry."""
        if self._ended:
            return
        if self._fill:
            self._left = len(self._fill)
        elif self._head is None:
            self._at = self._have = 0  # the start of the next request is unknown
        elif self._left > 0:
            here = min(self._left, self._have - self._at)
            self._at, self._left = self._at + here, self._left - here
        # The connection survives only if the rest of this body can be skipped: its length is known, it is short, and the
        # client sends it, which it may not after `Expect: 100-continue`. That is done for clients that shall retry later (503).
        # Any other connection is read for a second after the answer and closed: closing a socket with unread bytes would send
        # a reset, and the client could lose the answer.
        waits = self._head is not None and self._head.expects_continue
        if 0 < self._left <= _MOST_SKIPPED_BYTES and status_of(error) == 503 and not (waits or self.closes_after):
            self._skip, self._left = self._left, 0
        unread = self._left != 0
        if self._served is None or (self._head is None and self._status == 0):
            self._served, self._started = self.frontend.served(), time.perf_counter()
        lookup, self._lookup = self._lookup, None
        if lookup is not None:
            self.frontend.exchange.disown(lookup)
        self._fill, self._chunks, self._body = _EMPTY, None, None
        self._since = None
        self.reserve_bytes(0)
        self._busy = True
        close = unread or self._head is None or isinstance(error, MalformedRequestError)
        self._lingering = close and not isinstance(error, MalformedRequestError)
        self.answer(self.frontend.error_answer(error, self.client, self._head, self._served), close=close)

    def relay(self, data: bytes) -> None:
        if not self._ended:
            if not self._out and not self._bytes_out:
                self._unread_since = time.monotonic()
                if connection := self._connection(self.closes_after):
                    data = data.replace(b"\r\n", b"\r\nconnection: %b\r\n" % connection, 1)
            self._bytes_out += len(data)
            self._out.append(data)
            self._pump()
            if self._stalled and self._upstream is not None:
                self._upstream.pause()

    def finish_relay(self) -> None:
        self._upstream, self._proxied = None, False
        self._closing = self.closes_after
        self._status = 0  # counted by the engine's application
        self._pump()

    def fail_relay(self, *, started: bool) -> None:
        self._upstream = None
        if self._ended:
            return
        if started:
            self.transport.abort()
            return
        self._proxied = False
        try:
            answer = self.frontend.answer_without_engine(self._head)
        except HPSError as error:
            answer = self.frontend.error_answer(error, self.client, self._head, self._served)
        self.answer(answer)

    def _pump(self) -> None:
        """Send the queued pieces, a megabyte in each turn of the event loop."""
        # An answer stays in its slot until the kernel has all of it. uvloop refers to memory that it could not send at once,
        # and asyncio has no callback for "sent". So the limit of the transport's buffer is 0: a write that could not be sent
        # calls `pause_writing`, and an empty buffer `resume_writing`. Only `_finish_answer` releases the slot.
        sent = 0
        while self._out:
            if self._stalled or self._ended:
                return
            if sent >= _TURN_BYTES:
                self.frontend.loop.call_soon(self._pump)
                return
            piece = self._out.popleft()
            if len(piece) > _TURN_BYTES:
                rest = memoryview(piece)
                self._out.appendleft(rest[_TURN_BYTES:])
                piece = rest[:_TURN_BYTES]
            self.transport.write(piece)
            sent += len(piece)
        if (
            self._busy
            and not self._stalled
            and not self._proxied
            and not self._ended
            and self._lookup is None
            and self._body is None
        ):
            self._finish_answer()

    def _finish_answer(self) -> None:
        """Release an answer that was sent, and continue with the next request."""
        if self._slot >= 0:
            slot, self._slot = self._slot, -1
            self.frontend.exchange.release(slot)
        if self._held:
            self.reserve_bytes(0)
        status, self._status = self._status, 0
        self._served.bytes_out = self._bytes_out
        self._finish(status)
        if self.frontend.tls is not None:
            self.record_sizes(len(self._raw) + self._served.bytes_in, self._bytes_out)
        self._busy, self._bytes_out = False, 0
        self._idle_since = time.monotonic()
        self._raw = b""
        if len(self._buffer) > _FIRST_BUFFER_BYTES:
            self._shrink()
        if self._lingering:
            self._since = None
            self._resume_reading()
            self.frontend.loop.call_later(_LINGER_S, self._close)
            if self._eof:
                self._close()
        elif self._closing:
            self._close()
        else:
            self._since = self._idle_since if self._skip else None
            if self._at < self._have or self._eof:
                self.frontend.loop.call_soon(self._next)  # it makes room in the buffer before reading resumes
            elif self._reading_paused:
                self._resume_reading()

    def _next(self) -> None:
        """Parse the next request; after the client's last byte, close if it is not complete."""
        if not (self._ended or self._busy or self._fill):
            self._advance()
        if self._reading_paused and not (self._ended or self._busy):
            self._resume_reading()
        if self._eof and not self._busy:
            self.transport.close()

    def _finish(self, status: int) -> None:
        head, self._head = self._head, None
        target = None if head is None else self._target
        if status and (head is None or target is not None or status != DISCONNECTED):
            route = "unknown" if target is None else target.route
            self.frontend.finish_request(self.client, head, route, self._served, status, self._started, watched=self._watched)

    # -- limits -----------------------------------------------------------------------------------------------------------

    @property
    def kept_bytes(self) -> int:
        return self._kept_by_tls

    def record_sizes(self, received: int, sent: int) -> None:
        """Estimate the memory that TLS keeps after a request of this size and its answer."""
        # Neither uvloop nor OpenSSL shrinks its buffers. One of uvloop has the bytes of the largest read; one of OpenSSL has
        # those that are not decrypted yet, and is a third larger.
        kept = 7 * min(received, _MOST_TLS_READ) // 3 + 4 * min(sent, _MOST_TLS_WRITE) // 3
        self._kept_by_tls = max(self._kept_by_tls, kept)

    @property
    def waiting(self) -> bool:
        return not (self._busy or self._ended)

    @property
    def idle(self) -> bool:
        return self.waiting and self._head is None

    def refuse_connection(self) -> None:
        self._ended = True
        if self.frontend.tls is None:
            self.transport.write(TOO_MANY)
        self.transport.close()

    @property
    def unread_since(self) -> float:
        return self._unread_since if self._stalled and not self._ended else math.inf

    def close(self) -> None:
        if self._stalled:
            self._abort("answer", "it is not read, and another client needs the connection (service.max_connections)")
        self._ended = True
        self._close()

    def close_if_quiet(self) -> None:
        new = time.monotonic() - self.opened < _FIRST_REQUEST_S and not self.completed
        if not self.idle or self._at < self._have or self._skip or new or self.transport.is_closing():
            return
        received = select.poll()  # closing with bytes that the event loop has not read would reset the connection
        received.register(self.transport.get_extra_info("socket").fileno(), select.POLLIN)
        if not received.poll(0):
            self.close()

    def end_unread(self, since: float) -> None:
        if self._slot >= 0 and self.unread_since < since:
            self._abort("answer", "it is not read, and other lookups need its memory (service.max_held_bytes)")

    def poll(self, now: float, request_s: float, answer_s: float, keep_alive_s: float) -> None:
        if self._ended:
            return
        if self._out or self._stalled:
            unread = self.transport.get_write_buffer_size() + sum(map(len, self._out))
            if not self._unread or unread <= self._unread - max(_LEAST_PROGRESS_BYTES, self._unread // 8):
                self._unread, self._unread_since = unread, now
            elif now - self._unread_since > answer_s:
                self._abort("answer", f"{unread} bytes wait, no progress in {answer_s:g} s (service.answer_timeout_s)")
        elif self._since is not None and now - self._since > request_s and not self._busy:
            if self._head is not None:
                expected = f"{request_s:g} s (service.request_timeout_s)"
                self.refuse(RequestError(408, f"the request body did not arrive within {expected}"))
            elif self._at < self._have:
                self._abort("headers", f"they did not arrive within {request_s:g} s (service.request_timeout_s)")
            else:
                self.transport.abort()  # there is no request
        elif self.idle and self.completed and now - self._idle_since > _REST_S:
            self._forget()
            if now - self._idle_since > keep_alive_s:
                self.close()

    def _abort(self, reason: str, what: str) -> None:
        self.frontend.refusals.abort(reason, self.client or "an unknown address", what)
        self.transport.abort()
