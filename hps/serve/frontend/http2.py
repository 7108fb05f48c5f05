"""The server's half of HTTP/2 (RFC 9113), as far as gRPC needs it: no push, no priorities, answers without a header table.

Header compression is `hpack`'s. grpc.aio would take longer for a lookup than all else that a front does for it: for a constant
answer of 128 KB, 0.2 ms of CPU time where a connection of this kind takes 0.045 ms. It would also have limits, timeouts and
threads of its own.
"""

import asyncio
import math
import re
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final, Protocol, cast

from hpack import Decoder
from hpack.exceptions import HPACKError

from hps.ground.http1 import Headers
from hps.serve.frontend.connections import ClientConnection

if TYPE_CHECKING:
    from hps.serve.frontend.frontend import Front

_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _PRIORITY, _RESET, _SETTINGS, _PUSH, _PING, _GOAWAY, _WINDOW, _CONTINUATION = range(10)
_END_STREAM, _ACK, _END_HEADERS, _PADDED, _PRIORITIZED = 1, 1, 4, 8, 32
NO_ERROR, PROTOCOL_ERROR, INTERNAL_ERROR, FLOW_CONTROL_ERROR, _TIMEOUT, STREAM_CLOSED, FRAME_SIZE_ERROR, REFUSED, CANCEL = (
    range(9)
)
COMPRESSION_ERROR, CALM = 9, 11

_FRAME: Final = struct.Struct(">IBI")  # length and type, flags, stream
_BUFFER_BYTES: Final = 1 << 16
_GOODBYE_S: Final = 0.5  # for a client to close the connection after the last answer
_MOST_FRAME: Final = 1 << 14  # that we accept: the least that RFC 9113 allows
_MOST_HEADERS: Final = 1 << 14
_MOST_STREAMS: Final = 256
_MOST_SENT_FRAME: Final = 1 << 18
_MOST_WINDOW: Final = 2**31 - 1
_GIVEN_WINDOW: Final = 1 << 20  # of a stream; that of the connection does not limit
_TURN_BYTES: Final = 1 << 18  # sent in one turn of the event loop
_SHARE_BYTES: Final = 1 << 17  # of one stream before it is another's turn
_MOST_CONTROL: Final = 1024  # frames that wait while the client does not read
_FREE_RESETS: Final = 256  # of a connection that has no answers
_LEAST_PROGRESS_BYTES: Final = 65_536
_MOST_KNOWN_BYTES: Final = 1 << 14  # of blocks of headers that are remembered
_LONGEST_KNOWN: Final = 1024  # block of headers that is
_KNOWN_BYTES: Final = 250  # of the objects of a header in it, beside its text
_REST_S: Final = 1.0  # without a stream, after which a connection keeps nothing
_OTHERS: Final = "it is not read, and other lookups need its memory (service.max_held_bytes)"
_NAME: Final = re.compile(rb":?[!#$%&'*+\-.^_`|~0-9a-z]+").fullmatch
_ILLEGAL: Final = re.compile(rb"[\r\n\0]").search


class StreamRequest(Protocol):
    """What a stream is for."""

    def data(self, data: memoryview) -> None:
        """More of the request has arrived; the memory is reused afterwards."""

    def end(self) -> None:
        """The request is complete."""

    def sent(self) -> None:
        """The client has what was sent so far, and the answer goes on."""

    def lost(self) -> None:
        """The client does not want the answer any more."""

    def closed(self) -> None:
        """Nothing that was sent is needed any more. Called once, whatever happens, and last."""

    def look(self, now: float, request_s: float) -> None:
        """Refuse a request that takes too long to arrive. Called twice a second."""


class Stream:
    """One request and its answer. *One event loop.*

    Attributes:
        ended: whether the request is complete.
        granted: bytes that have arrived since the client was last granted as many.
        unsent: bytes of the answer that wait.
    """

    __slots__ = (
        "_head",
        "_out",
        "_queued",
        "_tail",
        "_unread",
        "_unread_since",
        "ended",
        "granted",
        "id",
        "request",
        "unsent",
        "window",
    )

    def __init__(self, number: int, window: int) -> None:
        self.id = number
        self.window = window
        self.request: StreamRequest = cast(StreamRequest, None)
        self.ended = False
        self.granted = self.unsent = 0
        self._head = self._tail = b""
        self._out: deque[bytes | memoryview] = deque()
        self._queued = False
        self._unread, self._unread_since = 0, 0.0


class _ProtocolError(Exception):
    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


def literal(name: bytes, value: bytes) -> bytes:
    """Return a header as HPACK has it without a table (RFC 7541, section 6.2.2)."""
    return b"\x00" + _length(len(name)) + name + _length(len(value)) + value


def _length(size: int) -> bytes:
    if size < 127:
        return bytes([size])
    found, size = bytearray([127]), size - 127
    while size > 127:
        found.append(size & 127 | 128)
        size >>= 7
    found.append(size)
    return bytes(found)


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return _FRAME.pack(len(payload) << 8 | kind, flags, stream) + payload


class HTTP2Connection(ClientConnection):
    """One connection. *Used only by its event loop.*

    Args:
        begin: begins the request of a stream with these headers.

    Attributes:
        last: what the last lookup began with.
        unknown: number of open streams that need a token and have none.
    """

    def __init__(self, front: "Front", begin: Callable[["HTTP2Connection", Stream, Headers], StreamRequest]) -> None:
        super().__init__(front, front.grpc_tls)
        self._idle_since = self.opened
        self._begin = begin
        self.unknown = 0
        self._buffer = bytearray()  # until something arrives
        self._view = memoryview(self._buffer)
        self._have = 0
        self._greeted = self._gone = self._reading = self._scheduled = False
        self._stalled = front.grpc_tls is not None  # until the handshake is done
        self._leaving = self._said_goodbye = False  # told the client to leave: soon, and at once
        self._ends = self._closing = False  # refuses streams, and closes after the last one; waits for the client to close
        self._decoder = Decoder(_MOST_HEADERS)
        self._known: dict[bytes, Headers] = {}  # blocks of headers that left the decoder's table and its size alone
        self._known_bytes = 0
        self._block: bytearray | None = None  # headers that are not complete
        self._block_of = (0, 0)
        self._streams: dict[int, Stream] = {}
        self._last = 0
        self._resets = self._answers = 0
        self._window = self._first_window = 65_535
        self._most_frame = _MOST_FRAME
        self._granted = 0
        self._control: list[bytes | memoryview] = []
        self._ready: deque[Stream] = deque()  # have something to send
        self._unflushed: list[Stream] = []
        self._unread, self._unread_since = 0, 0.0

    # -- the protocol -----------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        settings = ((3, _MOST_STREAMS), (4, _GIVEN_WINDOW), (6, _MOST_HEADERS))
        self._control.append(_frame(_SETTINGS, 0, 0, b"".join(struct.pack(">HI", *one) for one in settings)))
        self._control.append(_frame(_WINDOW, 0, 0, struct.pack(">I", _MOST_WINDOW - self._window)))
        super().connection_made(transport)
        if self._tls is None:
            self._pump()

    def secured(self, transport: asyncio.Transport) -> None:
        super().secured(transport)
        self._stalled = False
        self._pump()

    def connection_lost(self, error: Exception | None) -> None:
        self._gone = True
        self.front.closed(self)
        self._ready.clear()
        self._control.clear()
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.request.lost()
        for stream in (*streams.values(), *self._unflushed):
            stream._out.clear()
            stream.request.closed()
        self._unflushed.clear()

    def get_buffer(self, hint: int) -> memoryview:
        if not self._buffer:
            self._buffer = bytearray(_BUFFER_BYTES)
            self._view = memoryview(self._buffer)
        return self._view[self._have :]

    def buffer_updated(self, count: int) -> None:
        self._have += count
        if self._tls is not None:
            self.note_sizes(4 * count if self._have == _BUFFER_BYTES else count, 0)  # it gives at most what there is room for
        self._reading = True
        try:
            self._read()
        except _ProtocolError as error:
            self._say_goodbye(error.code, str(error).encode())
            self._close()
        finally:
            self._reading = False
        self._pump()

    def pause_writing(self) -> None:
        self._stalled = True

    def resume_writing(self) -> None:
        self._stalled = False
        self._unread = 0
        done, self._unflushed = self._unflushed, []
        for stream in done:
            stream.request.closed()
        for stream in self._streams.values():
            if not stream.unsent:
                self.front.loop.call_soon(stream.request.sent)
        self._pump()
        self._close_if_done()

    # -- reading ----------------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        buffer, view, at, have = self._buffer, self._view, 0, self._have
        if not self._greeted:
            if have < len(_PREFACE):
                if not _PREFACE.startswith(view[:have]):
                    raise _ProtocolError(PROTOCOL_ERROR, "expected HTTP/2")
                return
            if bytes(view[: len(_PREFACE)]) != _PREFACE:
                raise _ProtocolError(PROTOCOL_ERROR, "expected HTTP/2")
            self._greeted, at = True, len(_PREFACE)
        while have - at >= 9 and not self._gone:
            word, flags, number = _FRAME.unpack_from(buffer, at)
            size = word >> 8
            if size > _MOST_FRAME:
                raise _ProtocolError(FRAME_SIZE_ERROR, f"got a frame of {size} bytes, expected at most {_MOST_FRAME}")
            start, end = at + 9, at + 9 + size
            if end > have:
                break
            self._take(word & 255, flags, number & _MOST_WINDOW, view[start:end])
            at = end
        rest = have - at
        if at and rest:
            buffer[:rest] = buffer[at:have]
        self._have = rest

    def _take(self, kind: int, flags: int, number: int, payload: memoryview) -> None:
        if self._block is not None and (kind != _CONTINUATION or number != self._block_of[0]):
            raise _ProtocolError(PROTOCOL_ERROR, "got another frame within headers")
        if kind == _DATA:
            self._take_data(flags, number, payload)
        elif kind == _HEADERS:
            payload = _unpadded(flags, payload)
            block = payload[5:] if flags & _PRIORITIZED else payload
            if flags & _END_HEADERS:
                self._take_headers(number, flags, bytes(block))
            else:
                self._block, self._block_of = bytearray(block), (number, flags)
        elif kind == _WINDOW:
            self._take_window(number, payload)
        elif kind == _PING:
            _check_size(payload, 8)
            if not flags & _ACK:
                self._tell(_frame(_PING, _ACK, 0, bytes(payload)))
        elif kind == _SETTINGS:
            if not flags & _ACK:
                self._take_settings(payload)
        elif kind == _RESET:
            _check_size(payload, 4)
            stream = self._streams.get(number)
            if stream is not None:
                self._resets += 1
                if self._resets > _FREE_RESETS + self._answers:
                    raise _ProtocolError(CALM, "too many streams were reset")
                self._drop(stream)
            elif number > self._last:
                raise _ProtocolError(PROTOCOL_ERROR, "got a reset of a stream that is not open")
        elif kind == _CONTINUATION:
            if self._block is None:
                raise _ProtocolError(PROTOCOL_ERROR, "got a continuation of nothing")
            self._block += payload
            if len(self._block) > _MOST_HEADERS:
                raise _ProtocolError(CALM, f"got headers of more than {_MOST_HEADERS} bytes")
            if flags & _END_HEADERS:
                whole, self._block = bytes(self._block), None
                self._take_headers(*self._block_of, whole)
        elif kind == _GOAWAY:
            self._ends = True
            self._close_if_done()
        elif kind == _PUSH:
            raise _ProtocolError(PROTOCOL_ERROR, "got a push of a client")

    def _take_data(self, flags: int, number: int, payload: memoryview) -> None:
        self._granted += len(payload)
        if self._granted > 1 << 24:
            self._tell(_frame(_WINDOW, 0, 0, struct.pack(">I", self._granted)))
            self._granted = 0
        stream = self._streams.get(number)
        if stream is None:
            if number > self._last or not number:
                raise _ProtocolError(PROTOCOL_ERROR, "got data of a stream that is not open")
            return  # it was answered, or reset
        if stream.ended:
            raise _ProtocolError(STREAM_CLOSED, "got data after the end of a stream")
        stream.granted += len(payload)
        stream.request.data(_unpadded(flags, payload))
        if flags & _END_STREAM and self._streams.get(number) is stream:
            self._end(stream)

    def _take_headers(self, number: int, flags: int, block: bytes) -> None:
        headers = self._decode(block)
        stream = self._streams.get(number)
        if stream is not None:
            if stream.ended or not flags & _END_STREAM:
                raise _ProtocolError(PROTOCOL_ERROR, "got headers within a stream")
            self._end(stream)
            return
        if number <= self._last or not number & 1:
            raise _ProtocolError(PROTOCOL_ERROR, f"got stream {number} after {self._last}")
        self._last = number
        if len(self._streams) >= _MOST_STREAMS or self._said_goodbye:
            self._tell(_frame(_RESET, 0, number, struct.pack(">I", REFUSED)))
            return
        stream = self._streams[number] = Stream(number, self._first_window)
        stream.request = self._begin(self, stream, headers)
        if flags & _END_STREAM and self._streams.get(number) is stream:
            self._end(stream)

    def _end(self, stream: Stream) -> None:
        stream.ended = self.completed = self.used = True
        stream.request.end()

    def _decode(self, block: bytes) -> Headers:
        if (found := self._known.get(block)) is not None:
            return found
        table = self._decoder.header_table.dynamic_entries
        before = (len(table), table[0] if table else None, self._decoder.header_table_size)
        try:
            found = Headers(self._decoder.decode(block, raw=True))
        except HPACKError as error:
            raise _ProtocolError(COMPRESSION_ERROR, str(error)) from error
        if not all(map(_NAME, found)) or any(map(_ILLEGAL, found.values())):
            raise _ProtocolError(PROTOCOL_ERROR, "got a header that is none (RFC 9113, section 8.2.1)")
        if len(table) != before[0] or (table and table[0] is not before[1]) or self._decoder.header_table_size != before[2]:
            self._forget_blocks()
        elif len(block) <= _LONGEST_KNOWN:
            size = 400 + 2 * len(block) + sum(_KNOWN_BYTES + len(name) + len(value) for name, value in found.items())
            if self._known_bytes + size <= _MOST_KNOWN_BYTES:
                self._known[block] = found
                self._known_bytes += size
        return found

    def _forget_blocks(self) -> None:
        self._known.clear()
        self._known_bytes = 0

    def _take_window(self, number: int, payload: memoryview) -> None:
        _check_size(payload, 4)
        size = int.from_bytes(payload, "big") & _MOST_WINDOW
        if not number:
            self._window += size
            if not size or self._window > _MOST_WINDOW:
                raise _ProtocolError(FLOW_CONTROL_ERROR, f"got a window of {self._window} bytes")
        elif (stream := self._streams.get(number)) is not None:
            stream.window += size
            if not size or stream.window > _MOST_WINDOW:
                self.reset(stream, FLOW_CONTROL_ERROR)
            elif stream._out:
                self._queue(stream)
        elif number > self._last:
            raise _ProtocolError(PROTOCOL_ERROR, "got a window of a stream that is not open")

    def _take_settings(self, payload: memoryview) -> None:
        if len(payload) % 6:
            raise _ProtocolError(FRAME_SIZE_ERROR, "got settings that are cut short")
        for name, value in struct.iter_unpack(">HI", payload):
            if name == 4:
                if value > _MOST_WINDOW:
                    raise _ProtocolError(FLOW_CONTROL_ERROR, f"got a window of {value} bytes")
                for stream in self._streams.values():
                    stream.window += value - self._first_window
                    if stream._out:
                        self._queue(stream)
                self._first_window = value
            elif name == 5:
                if not _MOST_FRAME <= value < 1 << 24:
                    raise _ProtocolError(PROTOCOL_ERROR, f"got frames of {value} bytes")
                self._most_frame = min(value, _MOST_SENT_FRAME)
        self._tell(_frame(_SETTINGS, _ACK, 0, b""))

    def grant(self, stream: Stream) -> None:
        """Let the client send on, if it has used much of its window."""
        if stream.granted > _GIVEN_WINDOW // 2 and not stream.ended:
            self._tell(_frame(_WINDOW, 0, stream.id, struct.pack(">I", stream.granted)))
            stream.granted = 0

    # -- answering --------------------------------------------------------------------------------------------------------

    def send(self, stream: Stream, head: bytes = b"", data: Iterable[bytes | memoryview] = (), tail: bytes = b"") -> None:
        """Send blocks of headers and trailers, and what is between; trailers end the stream. The data must not change until
        `StreamRequest.closed`.
        """
        if self._streams.get(stream.id) is not stream:
            return
        if head:
            stream._head = _frame(_HEADERS, _END_HEADERS, stream.id, head)
        for piece in data:
            if len(piece):
                stream._out.append(piece)
                stream.unsent += len(piece)
        if tail:
            stream._tail = _frame(_HEADERS, _END_HEADERS | _END_STREAM, stream.id, tail)
            if not stream.ended:
                stream._tail += _frame(_RESET, 0, stream.id, struct.pack(">I", NO_ERROR))
        stream._unread, stream._unread_since = 0, time.monotonic()
        self._queue(stream)
        if not self._reading:
            self._pump()

    def is_clear(self, stream: Stream) -> bool:
        """Return whether the client has all that was sent so far."""
        return not stream.unsent and not self._stalled

    def reset(self, stream: Stream, code: int) -> None:
        """Give a stream up, and tell the client."""
        self._tell(_frame(_RESET, 0, stream.id, struct.pack(">I", code)))
        self._drop(stream)

    def _drop(self, stream: Stream) -> None:
        del self._streams[stream.id]
        stream._out.clear()
        stream._head, stream._tail, stream.unsent = b"", b"", 0
        stream.request.lost()
        self._finish(stream)
        self._close_if_done()

    def _finish(self, stream: Stream) -> None:
        if not self._streams:
            self._idle_since = time.monotonic()
        if self._stalled:
            self._unflushed.append(stream)
        else:
            stream.request.closed()

    def _queue(self, stream: Stream) -> None:
        if not stream._queued:
            stream._queued = True
            self._ready.append(stream)

    def _tell(self, frame: bytes) -> None:
        self._control.append(frame)
        if len(self._control) > _MOST_CONTROL:
            self.transport.abort()
        elif not self._reading:
            self._pump()

    def _pump(self) -> None:
        """Send on, a part in each turn of the event loop."""
        self._scheduled = False
        if self._stalled or self._gone:
            return
        lines, self._control = self._control, []
        done: list[Stream] = []
        clear: list[Stream] = []
        left = _TURN_BYTES
        while self._ready and left > 0:
            stream = self._ready.popleft()
            if stream._head:
                lines.append(stream._head)
                stream._head = b""
            left -= self._send_share(stream, lines)
            if stream.unsent:
                if self._window <= 0:
                    self._ready.appendleft(stream)
                    break
                if stream.window > 0:
                    self._ready.append(stream)
                else:
                    stream._queued = False
                continue
            stream._queued = False
            if not stream._tail:
                clear.append(stream)
            elif self._streams.pop(stream.id, None) is not None:
                lines.append(stream._tail)
                self._answers += 1
                done.append(stream)
        if lines:
            if self._tls is not None:
                self.note_sizes(0, _TURN_BYTES - left)
            self.transport.writelines(lines)
        for stream in done:
            self._finish(stream)
        if not self._stalled:
            for stream in clear:
                self.front.loop.call_soon(stream.request.sent)
        if self._ready and self._window > 0 and not self._stalled and not self._scheduled:
            self._scheduled = True
            self.front.loop.call_soon(self._pump)
        elif done:
            self._close_if_done()

    def _send_share(self, stream: Stream, lines: list[bytes | memoryview]) -> int:
        """Append frames of data within all limits; return how many bytes they have."""
        out, most = stream._out, self._most_frame
        sent = left = max(0, min(stream.unsent, stream.window, self._window, _SHARE_BYTES))
        while left:
            size = min(left, most)
            lines.append(_FRAME.pack(size << 8 | _DATA, 0, stream.id))
            left -= size
            while size:
                piece = out.popleft()
                if len(piece) > size:
                    whole = memoryview(piece)
                    piece = whole[:size]
                    out.appendleft(whole[size:])
                lines.append(piece)
                size -= len(piece)
        stream.window -= sent
        self._window -= sent
        stream.unsent -= sent
        return sent

    # -- limits -----------------------------------------------------------------------------------------------------------

    @property
    def waiting(self) -> bool:
        """Whether no request is under way."""
        return not self._streams and not self._gone

    @property
    def idle(self) -> bool:
        return self.waiting

    @property
    def kept_bytes(self) -> int:
        return len(self._buffer) + self._known_bytes + super().kept_bytes

    @property
    def unread_since(self) -> float:
        """Since when its client has made no progress with an answer; infinity if it takes any."""
        if self._gone:
            return math.inf
        if self._stalled:
            return self._unread_since if self._unread else math.inf
        unread = [stream._unread_since for stream in self._streams.values() if stream.unsent and stream._unread]
        return max(unread) if unread and len(unread) == len(self._streams) else math.inf

    def refuse_connection(self) -> None:
        """Close a connection that is one too many."""
        self._say_goodbye(CALM, b"too many connections")
        self._close()

    def leave(self) -> None:
        """Tell the client to connect to another server for its next requests; those that come nevertheless are answered."""
        if not self._leaving and self._greeted:
            self._leaving = True
            self._tell(_frame(_GOAWAY, 0, 0, struct.pack(">II", _MOST_WINDOW, NO_ERROR)))

    def close(self) -> None:
        """Close a connection without requests, or one whose client does not read."""
        if self._stalled:
            self.transport.abort()
        self._say_goodbye(NO_ERROR, b"")
        self._close()

    def close_if_quiet(self) -> None:
        """Refuse further requests, and close the connection unless one is under way."""
        if not self._gone:
            self._say_goodbye(NO_ERROR, b"")
            self._close_if_done()

    def _close_if_done(self) -> None:
        if self._ends and not self._streams and not self._unflushed and not self._closing:
            # What a client sends before it has read our last word is refused. Closing now would reset the connection, and that
            # word be lost: the client could not tell that its request may be sent to another server.
            self._closing = True
            self.front.loop.call_later(_GOODBYE_S, self._close)

    def _say_goodbye(self, code: int, why: bytes) -> None:
        if not self._said_goodbye and not self._gone:
            self._said_goodbye = self._leaving = self._ends = True
            self._tell(_frame(_GOAWAY, 0, 0, struct.pack(">II", self._last, code) + why[:200]))

    def _close(self) -> None:
        if not self._stalled and self._control and not self._gone:
            lines, self._control = self._control, []
            self.transport.writelines(lines)
        super()._close()

    def end_unread(self, since: float) -> None:
        if self._stalled and self.unread_since < since:
            self._abort(_OTHERS)
            return
        for stream in [*self._streams.values()]:
            if stream.unsent and stream._unread and stream._unread_since < since and stream.id in self._streams:
                self.front.refusals.abort("answer", self.client or "an unknown address", _OTHERS)
                self.reset(stream, CANCEL)

    def look(self, now: float, request_s: float, answer_s: float, keep_alive_s: float) -> None:
        """Refuse or abort what takes too long. Called twice a second."""
        if self._gone:
            return
        if self.front.leaving:
            self.leave()
        if self._stalled:
            unread = self.transport.get_write_buffer_size()
            if not self._unread or unread <= self._unread - max(_LEAST_PROGRESS_BYTES, self._unread // 8):
                self._unread, self._unread_since = unread, now
            elif now - self._unread_since > answer_s:
                self._abort(_no_progress(unread, answer_s))
        elif not self._streams:
            idle_s = now - self._idle_since
            if idle_s > _REST_S:
                self._rest()
            if idle_s > (keep_alive_s if self.completed and not self._have else request_s):
                self.close()
        for stream in [*self._streams.values()]:
            stream.request.look(now, request_s)
            if stream.unsent and not self._stalled:
                unread = stream.unsent
                if not stream._unread or unread <= stream._unread - max(_LEAST_PROGRESS_BYTES, stream._unread // 8):
                    stream._unread, stream._unread_since = unread, now
                elif now - stream._unread_since > answer_s and stream.id in self._streams:
                    self.front.refusals.abort("answer", self.client or "an unknown address", _no_progress(unread, answer_s))
                    self.reset(stream, CANCEL)

    def _rest(self) -> None:
        """Give back what was kept for the next stream."""
        self._forget_blocks()
        if not self._have and self._buffer:
            self._buffer = bytearray()
            self._view = memoryview(self._buffer)

    def _abort(self, what: str) -> None:
        self.front.refusals.abort("answer", self.client or "an unknown address", what)
        self.transport.abort()


def _no_progress(unread: int, answer_s: float) -> str:
    return f"{unread} bytes wait, no progress in {answer_s:g} s (service.answer_timeout_s)"


def _unpadded(flags: int, payload: memoryview) -> memoryview:
    if not flags & _PADDED:
        return payload
    if not payload or payload[0] >= len(payload):
        raise _ProtocolError(PROTOCOL_ERROR, "got more padding than there is")
    return payload[1 : len(payload) - payload[0]]


def _check_size(payload: memoryview, size: int) -> None:
    if len(payload) != size:
        raise _ProtocolError(FRAME_SIZE_ERROR, f"got {len(payload)} bytes, expected {size}")
