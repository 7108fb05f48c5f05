"""HTTP/1.1 without I/O, for the frontends and their proxy, the client and the load generator.

Heads of requests are parsed by llhttp (`httptools`), and checked further here. Answers are expected from our own servers, with
a length or in chunks; others are refused.
"""

import re
from collections.abc import Iterable
from typing import Final, NamedTuple
from urllib.parse import unquote

import httptools

from hps.errors import InvalidInputError, RemoteError

MAX_HEAD_BYTES: Final = 65_536
MAX_HEADERS: Final = 128
_MOST_LENGTH_DIGITS = 19
_MOST_SIZE_DIGITS = 15  # hexadecimal digits of a chunk's size
_ABSOLUTE_FORM = re.compile(rb"^[A-Za-z][A-Za-z0-9+.-]*://[^/?#]*/?(.*)$", re.DOTALL)  # RFC 9112, section 3.2.2
_HEX_DIGITS = b"0123456789abcdefABCDEF"
_MOST_LINE = 4096  # of a chunk's size, or of trailers

_REASONS: Final = {
    200: b"OK",
    400: b"Bad Request",
    401: b"Unauthorized",
    403: b"Forbidden",
    404: b"Not Found",
    405: b"Method Not Allowed",
    408: b"Request Timeout",
    413: b"Content Too Large",
    415: b"Unsupported Media Type",
    421: b"Misdirected Request",
    429: b"Too Many Requests",
    431: b"Request Header Fields Too Large",
    500: b"Internal Server Error",
    503: b"Service Unavailable",
    504: b"Gateway Timeout",
    507: b"Insufficient Storage",
}


class MalformedRequestError(InvalidInputError):
    """A client sent something other than HTTP/1.1; its connection closes after the answer."""


_SINGLE: Final = frozenset(
    {
        *(b"authorization", b"content-encoding", b"content-length", b"content-type", b"host"),
        *(b"inference-header-content-length", b"transfer-encoding"),
    }
)


class Headers(dict[bytes, bytes]):
    """Headers by name; of repeated ones, the last. *Immutable.*

    Attributes:
        repeated: name of a repeated header that must be unique; empty without any.
    """

    # Two readers of one request, such as a proxy and this server, could each take another one of repeated headers: one would
    # check the rights of a token that the other does not use, or they would disagree where the next request begins.

    __slots__ = ("repeated",)

    def __init__(self, lines: Iterable[tuple[bytes, bytes]]) -> None:
        lines = list(lines)
        super().__init__(lines)
        self.repeated = b""
        if len(self) != len(lines):
            names = [name for name, _ in lines if name in _SINGLE]
            self.repeated = next((name for name in names if names.count(name) > 1), b"")


def repeated_header_message(headers: Headers) -> str:
    """Return the error message for a `repeated` header."""
    return f"reading a request: got the header {headers.repeated.decode('latin-1')!r} twice, expected it once"


class Head:
    """The head of a request, parsed from its bytes. *Immutable*, and shared by requests of a connection with the same bytes.

    Raises:
        MalformedRequestError: it is not one of HTTP/1.1.
    """

    __slots__ = (
        "_parser",
        "expects_continue",
        "headers",
        "keeps_alive",
        "length",
        "lines",
        "method",
        "needs_keep_alive",
        "path",
        "target",
    )

    def __init__(self, raw: bytes) -> None:
        self.target = b""  # as sent, but without an authority; `path` is decoded, and without a query
        self.keeps_alive = False  # the client keeps the connection after the answer
        self.lines: list[tuple[bytes, bytes]] = []  # all headers, in order
        self._parser = parser = httptools.HttpRequestParser(self)
        try:
            parser.feed_data(raw)
        except httptools.HttpParserUpgrade:  # a server may ignore the header (RFC 9110, section 7.8)
            pass
        except httptools.HttpParserError as error:
            raise MalformedRequestError(f"reading a request: {error}") from error
        finally:
            del self._parser
        # llhttp accepts what follows. It is refused because it decides where the next request begins (request smuggling, RFC
        # 9112, section 11.2), or because nothing here serves it.
        if (version := parser.get_http_version()) not in ("1.0", "1.1"):
            raise MalformedRequestError(f"reading a request: got HTTP/{version}, expected HTTP/1.1")
        if len(self.lines) > MAX_HEADERS:
            raise MalformedRequestError(f"reading a request: got {len(self.lines)} headers, expected at most {MAX_HEADERS}")
        self.method = parser.get_method().decode("latin-1")
        if self.method == "CONNECT":
            raise MalformedRequestError("reading a request: got CONNECT, but this is no proxy")
        self.headers = headers = Headers(self.lines)
        if headers.repeated:
            raise MalformedRequestError(repeated_header_message(headers))
        # HTTP/1.0 closes by default, so its answer needs `Connection: keep-alive`.
        self.needs_keep_alive = version == "1.0" and self.keeps_alive
        if not self.target.startswith(b"/"):
            self.target = _ABSOLUTE_FORM.sub(rb"/\1", self.target)
        path, _, _ = self.target.partition(b"?")
        self.path = unquote(path.decode("latin-1")) if b"%" in path else path.decode("latin-1")
        if (encoding := headers.get(b"transfer-encoding")) is not None:
            if encoding.strip().lower() != b"chunked" or b"content-length" in headers or version == "1.0":
                raise MalformedRequestError("reading a request: got a Transfer-Encoding other than chunked alone")
            self.length = -1  # the body comes in chunks
        else:
            given = headers.get(b"content-length", b"0").strip()
            if not given.isdigit() or len(given) > _MOST_LENGTH_DIGITS:
                raise MalformedRequestError(f"reading a request: got Content-Length {given[:40].decode('latin-1')!r}")
            self.length = int(given)
        expects = headers.get(b"expect")
        self.expects_continue = expects is not None and expects.lower() == b"100-continue"

    # Called by httptools.

    def on_url(self, url: bytes) -> None:
        self.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.lines.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.keeps_alive = self._parser.should_keep_alive()  # llhttp resets it at the end of the message


def answer_head(
    status: int, headers: Iterable[tuple[bytes, bytes]], size: int, request_id: bytes, connection: bytes = b""
) -> bytes:
    """Return the head of an answer of `size` bytes.

    Args:
        connection: value of the Connection header; default: no such header.
    """
    lines = [b"HTTP/1.1 %d %s" % (status, _REASONS.get(status, b"Error"))]
    lines += map(b"%s: %s".__mod__, headers)
    lines += [b"content-length: %d" % size, b"x-request-id: " + request_id]
    if connection:
        lines.append(b"connection: " + connection)
    lines += [b"", b""]
    return b"\r\n".join(lines)


class Chunks:
    """Parses a body in chunks (RFC 9112, section 7.1). *One request.*"""

    __slots__ = ("_left", "_line", "_trailers", "body", "done")

    def __init__(self) -> None:
        self.body = bytearray()
        self.done = False
        self._left = 0  # bytes left of the chunk, with its line end; 0: a size follows, -1: trailers follow
        self._line = bytearray()
        self._trailers = 0

    def feed(self, data: memoryview) -> int:
        """Parse bytes, and return how many belong to this body; raise MalformedRequestError if they are not chunks."""
        at = 0
        while at < len(data) and not self.done:
            if self._left > 2:
                piece = data[at : at + self._left - 2]
                self.body += piece
                self._left -= len(piece)
                at += len(piece)
            elif self._left > 0:
                if data[at] != (13 if self._left == 2 else 10):
                    raise MalformedRequestError("reading a chunked body: a chunk does not end where its size says")
                self._left -= 1
                at += 1
            else:
                end = bytes(data[at : at + _MOST_LINE]).find(b"\n")
                stop = len(data) if end < 0 else at + end + 1
                self._line += data[at:stop]
                at = stop
                if len(self._line) > _MOST_LINE:
                    raise MalformedRequestError("reading a chunked body: a line is too long")
                if end >= 0:
                    self._parse_line()
        return at

    def _parse_line(self) -> None:
        line, self._line = bytes(self._line), bytearray()
        if not line.endswith(b"\r\n"):
            raise MalformedRequestError("reading a chunked body: a line does not end with CRLF")
        if self._left < 0:
            self._trailers += 1
            if self._trailers > MAX_HEADERS:
                raise MalformedRequestError("reading a chunked body: too many trailers")
            self.done = line == b"\r\n"
            return
        digits = line[:-2].partition(b";")[0].rstrip(b" \t")
        try:
            if not 0 < len(digits) <= _MOST_SIZE_DIGITS or digits.strip(_HEX_DIGITS):
                raise ValueError
            size = int(digits, 16)
        except ValueError:
            raise MalformedRequestError(f"reading a chunked body: got size {digits[:20].decode('latin-1')!r}") from None
        self._left = size + 2 if size else -1


class AnswerHead:
    """The head of an answer, parsed from its bytes without the empty line. *Immutable.*

    Raises:
        RemoteError: it is not one of HTTP/1.1, or does not state the length of the body.
    """

    __slots__ = ("headers", "keeps_alive", "length", "status")

    def __init__(self, raw: bytes) -> None:
        line, *lines = raw.split(b"\r\n")
        self.headers: dict[bytes, bytes] = {}
        for header in lines:
            name, _, value = header.partition(b":")
            self.headers[name.lower()] = value.strip()
        protocol, _, rest = line.partition(b" ")
        length = self.headers.get(b"content-length", b"")
        chunked = not length and self.headers.get(b"transfer-encoding", b"").lower() == b"chunked"
        if not protocol.startswith(b"HTTP/1.") or not rest[:3].isdigit():
            raise RemoteError(f"reading an answer: got {line[:80]!r}, expected HTTP/1.1; is it hps?")
        self.status = int(rest[:3])
        if self.status < 200 or self.status in (204, 304):  # RFC 9112, section 6.3
            length = b"0"
        elif not chunked and not (length.isdigit() and len(length) <= _MOST_SIZE_DIGITS):
            raise RemoteError(f"reading an answer: got {line[:80]!r}, expected a Content-Length; is it hps?")
        self.length = -1 if chunked else int(length)  # -1: the body comes in chunks
        self.keeps_alive = protocol == b"HTTP/1.1" and self.headers.get(b"connection", b"").lower() != b"close"


class FinalHead(NamedTuple):
    """The head of an answer, and where it lies in the received bytes: from `start` to `end`, where the body begins."""

    head: AnswerHead
    start: int
    end: int


def final_head(data: bytes | bytearray, have: int) -> FinalHead | None:
    """Find the head of an answer in the first `have` bytes, behind interim ones; return None if it has not arrived.

    Raises:
        RemoteError: it is malformed or too long.
    """
    # A server or a proxy may send interim answers (1xx) before any answer (RFC 9110, section 15.2): 103 Early Hints, or a 100
    # Continue that was not requested. They have no body, and are skipped; together they are as long as a head at most.
    start = 0
    while (end := data.find(b"\r\n\r\n", start, have) + 4) >= 4:
        head = AnswerHead(bytes(data[start : end - 4]))
        if head.status >= 200:
            return FinalHead(head, start, end)
        start = end
    if have > MAX_HEAD_BYTES:
        raise RemoteError("reading an answer: its head is too long")
    return None


class AnswerReader:
    """Parses one answer; `keep_body` collects its body. *One exchange.*"""

    def __init__(self, *, head_only: bool = False, keep_body: bool = False) -> None:
        self.head: AnswerHead | None = None  # None before it has arrived
        self.done = False
        self.body = bytearray()
        self._head_only, self._keep_body = head_only, keep_body
        self.raw = b""  # the bytes of the head
        self.fed = b""  # what the last call of `feed` has added to the answer; nothing before the head is complete
        self._raw = bytearray()
        self._chunks: Chunks | None = None
        self._left = 0

    @property
    def keeps_alive(self) -> bool:
        """Whether the connection can be used again: after an answer to HEAD, some servers send the body all the same."""
        return self.head is not None and self.head.keeps_alive and not self._head_only

    def feed(self, data: bytes) -> bool:
        """Parse bytes; return True if the answer is complete. Raise RemoteError if they are no answer, or more than one."""
        self.fed = data
        if self.head is None:
            self.fed = b""
            self._raw += data
            if (found := final_head(self._raw, len(self._raw))) is None:
                return False
            self.head, start, end = found
            self.fed, self.raw, data = bytes(self._raw[start:]), bytes(self._raw[start:end]), bytes(self._raw[end:])
            self._left = 0 if self._head_only else self.head.length
            self._chunks = Chunks() if self._left < 0 else None
        piece: bytes | bytearray
        if (chunks := self._chunks) is not None:
            try:
                used = chunks.feed(memoryview(data))
            except MalformedRequestError as error:
                raise RemoteError(f"reading an answer: {error}") from error
            self.done, piece, chunks.body = chunks.done, chunks.body, bytearray()
        else:
            used = min(self._left, len(data))
            self._left -= used
            self.done = not self._left
            piece = data
        if used < len(data):
            raise RemoteError("reading an answer: more follows than its head says")
        if self._keep_body:
            self.body += piece
        return self.done
