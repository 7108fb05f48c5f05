"""HTTP/1.1 heads of requests and answers, and bodies of unknown length."""

import re
from collections.abc import Iterable
from typing import Final
from urllib.parse import unquote

import httptools

from hps.errors import InvalidInputError
from hps.ground.memory.bounded_cache import BoundedCache
from hps.serve.http.targets import lookup_target

MAX_HEAD_BYTES: Final = 65_536
MAX_HEADERS: Final = 128
CACHED_HEAD_BYTES: Final = 2048
"""Maximum length of a head that is remembered."""
_LINE_BYTES = 400  # of a header beyond its text: a tuple, two objects, a place in the dict
_MOST_LENGTH_DIGITS = 19
_MOST_SIZE_DIGITS = 15  # hexadecimal, of a chunk
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
    429: b"Too Many Requests",
    431: b"Request Header Fields Too Large",
    500: b"Internal Server Error",
    503: b"Service Unavailable",
    504: b"Gateway Timeout",
    507: b"Insufficient Storage",
}


class MalformedRequestError(InvalidInputError):
    """What a client sent is not HTTP/1.1; its connection closes after the answer."""


_SINGLE: Final = frozenset(
    {
        *(b"authorization", b"content-encoding", b"content-length", b"content-type", b"host"),
        *(b"inference-header-content-length", b"transfer-encoding"),
    }
)


class Headers(dict[bytes, bytes]):
    """Headers by name, of several with one name the last. *Immutable.*

    Attributes:
        repeated: name of which there are several, though only one may be: readers could differ over which of them counts.
            Empty if there is none.
    """

    __slots__ = ("repeated",)

    def __init__(self, lines: Iterable[tuple[bytes, bytes]]) -> None:
        lines = list(lines)
        super().__init__(lines)
        names = [name for name, _ in lines if name in _SINGLE] if len(self) != len(lines) else []
        self.repeated = next((name for name in names if names.count(name) > 1), b"")


def given_twice(headers: Headers) -> str:
    """Return what is wrong with headers of which one is `repeated`."""
    return f"reading a request: got the header {headers.repeated.decode('latin-1')!r} twice, expected it once"


class Head:
    """The head of a request. *Immutable*, and shared by requests with the same bytes.

    Attributes:
        method, path, target: `path` is decoded and without a query; `target` is as sent, but without an authority.
        lookup: the lookup route of the path; None for others.
        headers: with lower-case names.
        lines: all of them, in order.
        length: of the body in bytes; -1 if it comes in chunks.
        keeps_alive: whether the client expects the connection to stay.
        asks_to_stay: whether the answer has to say that it stays: HTTP/1.0 closes by default.
        expects_continue: whether it waits for our word before it sends the body.
    """

    __slots__ = (
        "_parser",
        "asks_to_stay",
        "expects_continue",
        "headers",
        "keeps_alive",
        "length",
        "lines",
        "lookup",
        "method",
        "path",
        "target",
    )

    def __init__(self, raw: bytes) -> None:
        self.target, self.keeps_alive = b"", False
        self.lines: list[tuple[bytes, bytes]] = []
        self._parser = parser = httptools.HttpRequestParser(self)
        try:
            parser.feed_data(raw)
        except httptools.HttpParserUpgrade:  # we speak nothing else, and may ignore the wish
            pass
        except httptools.HttpParserError as error:
            raise MalformedRequestError(f"reading a request: {error}") from error
        finally:
            del self._parser
        if (version := parser.get_http_version()) not in ("1.0", "1.1"):
            raise MalformedRequestError(f"reading a request: got HTTP/{version}, expected HTTP/1.1")
        if len(self.lines) > MAX_HEADERS:
            raise MalformedRequestError(f"reading a request: got {len(self.lines)} headers, expected at most {MAX_HEADERS}")
        self.method = parser.get_method().decode("latin-1")
        if self.method == "CONNECT":
            raise MalformedRequestError("reading a request: got CONNECT, but this is no proxy")
        self.headers = headers = Headers(self.lines)
        if headers.repeated:
            raise MalformedRequestError(given_twice(headers))
        self.asks_to_stay = version == "1.0" and self.keeps_alive
        if not self.target.startswith(b"/"):
            self.target = _ABSOLUTE_FORM.sub(rb"/\1", self.target)
        path, _, _ = self.target.partition(b"?")
        self.path = unquote(path.decode("latin-1")) if b"%" in path else path.decode("latin-1")
        self.lookup = lookup_target(self.path)
        if (encoding := headers.get(b"transfer-encoding")) is not None:
            if encoding.strip().lower() != b"chunked" or b"content-length" in headers or version == "1.0":
                raise MalformedRequestError("reading a request: got a Transfer-Encoding other than chunked alone")
            self.length = -1
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
        self.keeps_alive = self._parser.should_keep_alive()  # the parser forgets it with the end of the message


def _size(head: Head, raw: bytes) -> int:
    return 2000 + 12 * len(raw) + _LINE_BYTES * len(head.lines)  # a path may have characters of four bytes, also in its target


_cached = BoundedCache(Head, _size)


def read_head(raw: bytes) -> Head:
    """Read a head, up to and including its empty line.

    Raises:
        MalformedRequestError: it is not one of HTTP/1.1.
    """
    return _cached(raw) if len(raw) <= CACHED_HEAD_BYTES else Head(raw)


def answer_head(
    status: int, headers: Iterable[tuple[bytes, bytes]], size: int, request_id: bytes, connection: bytes = b""
) -> bytes:
    """Return the head of an answer of `size` bytes.

    Args:
        connection: what the header of this name says; empty: there is none.
    """
    lines = [b"HTTP/1.1 %d %s" % (status, _REASONS.get(status, b"Error"))]
    lines += [b"%s: %s" % header for header in headers]
    lines += [b"content-length: %d" % size, b"x-request-id: " + request_id]
    if connection:
        lines.append(b"connection: " + connection)
    lines += [b"", b""]
    return b"\r\n".join(lines)


class Chunks:
    """Takes a body in chunks apart (RFC 9112, section 7.1). *One request.*

    Attributes:
        body: what has arrived so far.
        done: whether it is complete.
    """

    __slots__ = ("_left", "_line", "_trailers", "body", "done")

    def __init__(self) -> None:
        self.body = bytearray()
        self.done = False
        self._left = 0  # of the chunk, with its line end; 0: a size is next, -1: trailers
        self._line = bytearray()
        self._trailers = 0

    def feed(self, data: memoryview) -> int:
        """Take bytes, and return how many belong to this body.

        Raises:
            MalformedRequestError: they are not chunks.
        """
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
                    self._take_line()
        return at

    def _take_line(self) -> None:
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
