"""Reads request bodies within limits of size, time and memory."""

import asyncio
import zlib
from collections.abc import Mapping
from typing import Any

from starlette.types import Receive

from hps.errors import InvalidInputError
from hps.service.http_answer import RequestError
from hps.service.lookup_threads import LookupThreads

_HELD_BODIES = 8  # full-size bodies that may be in memory at once
_ENCODINGS = (b"identity", b"gzip", b"deflate")
_EXPIRED = -1.0
_UNCOUNTED_BYTES = 65_536  # smaller bodies are bounded by the number of connections


class ClientDisconnected(Exception):
    """The client went away before its request was complete: there is nobody to answer."""


class BodyReader:
    """Reads request bodies. *One per event loop.*

    Args:
        max_bytes: of one body, as sent and decompressed.
        timeout_s: for the whole body to arrive.
        threads: where bodies are decompressed.

    Attributes:
        held_bytes: bytes of large bodies in memory.
    """

    def __init__(self, max_bytes: int, timeout_s: float, threads: LookupThreads) -> None:
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._threads = threads
        self.held_bytes = 0
        self._deadlines: dict[asyncio.Task[Any], float] = {}  # of the bodies that are being read
        self._sweep_s = min(timeout_s / 4, 0.25)
        self._sweeping = False
        self._max_held = _HELD_BODIES * max_bytes

    async def read(self, headers: Mapping[bytes, bytes], receive: Receive) -> bytes:
        """Read the whole body, as it was sent. The caller gives it back with `release` when the request is done.

        Raises:
            RequestError: 408, it did not arrive in time; 413, it is declared or found to be too large, and the rest of it is
                not read; 415, it is compressed in a way that is not supported; 503, the bodies of other requests fill the
                memory that is set aside for bodies.
            ClientDisconnected: the client went away.
        """
        declared = headers.get(b"content-length")
        if declared is not None and int(declared) > self._max_bytes:  # the server checked that it is a number
            raise self._too_large(f"Content-Length is {int(declared)}")
        if b"content-encoding" in headers and (encoding := _encoding(headers)) not in _ENCODINGS:
            got = f"got Content-Encoding {encoding.decode('latin-1')[:40]!r}"
            raise RequestError(415, f"reading the request: {got}, expected gzip, deflate or none")
        task: asyncio.Task[Any] = asyncio.current_task()  # type: ignore[assignment]  # never None within a coroutine
        self._start_clock(task)
        chunks: list[bytes] = []
        size = held = 0
        more = True
        try:
            while more:
                message = await receive()
                if message["type"] != "http.request":
                    raise ClientDisconnected
                chunks.append(message.get("body", b""))
                size += len(chunks[-1])
                if size > self._max_bytes:
                    raise self._too_large(f"got {size} bytes")
                if size > _UNCOUNTED_BYTES:
                    self._hold(size - held)
                    held = size
                more = message.get("more_body", False)
        except BaseException as error:
            self.held_bytes -= held
            if isinstance(error, asyncio.CancelledError) and self._deadlines[task] == _EXPIRED:
                task.uncancel()
                limit = f"{self._timeout_s:g} s (service.request_timeout_s)"
                raise RequestError(408, f"the request body did not arrive within {limit}") from None
            raise
        finally:
            del self._deadlines[task]
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    async def decompress(self, headers: Mapping[bytes, bytes], body: bytes) -> bytes:
        """Decompress a body that was read, of a request with a Content-Encoding. The result replaces it, for `release`, too.

        Raises:
            RequestError: 413, it decompresses to more than the limit, which is never passed; 503 and 504, as
                `LookupThreads.run`.
            InvalidInputError: it is not what the headers say.
        """
        if _encoding(headers) == b"identity":
            return body
        decompressed = await self._threads.run(self._inflate, body)
        if len(decompressed) > _UNCOUNTED_BYTES:
            self._hold(len(decompressed))
        self.release(body)
        return decompressed

    def release(self, body: bytes) -> None:
        """The body is no longer used."""
        if len(body) > _UNCOUNTED_BYTES:
            self.held_bytes -= len(body)

    def _start_clock(self, task: "asyncio.Task[Any]") -> None:
        """Cancel the task when its body takes too long.

        One timer serves all tasks: most bodies are there already, and a timer of its own would cost each of them 3 us.
        """
        loop = asyncio.get_running_loop()
        self._deadlines[task] = loop.time() + self._timeout_s
        if not self._sweeping:
            self._sweeping = True
            loop.call_later(self._sweep_s, self._sweep, loop)

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        now = loop.time()
        for task, deadline in self._deadlines.items():
            if _EXPIRED < deadline < now:
                self._deadlines[task] = _EXPIRED
                task.cancel()
        self._sweeping = bool(self._deadlines)
        if self._sweeping:
            loop.call_later(self._sweep_s, self._sweep, loop)

    def _hold(self, size: int) -> None:
        if self.held_bytes + size > self._max_held:
            held = f"the bodies of other requests hold {self.held_bytes} bytes, expected at most {self._max_held}"
            raise RequestError(503, f"reading the request: {held}; send the request again later")
        self.held_bytes += size

    def _inflate(self, body: bytes) -> bytes:
        decompressor = zlib.decompressobj(wbits=zlib.MAX_WBITS | 32)  # gzip or zlib, by its header
        try:
            decompressed = decompressor.decompress(body, self._max_bytes + 1)
        except zlib.error as error:
            raise InvalidInputError(f"decompressing the request: {error}") from error
        if len(decompressed) > self._max_bytes:
            raise self._too_large("it decompresses to more")
        if not decompressor.eof or decompressor.unused_data:
            found = "is cut short" if not decompressor.eof else f"ends {len(decompressor.unused_data)} bytes before the body"
            raise InvalidInputError(f"decompressing the request: the compressed stream {found}")
        return decompressed

    def _too_large(self, got: str) -> RequestError:
        limit = f"expected at most {self._max_bytes} (service.max_body_bytes)"
        return RequestError(413, f"reading the request: {got}, {limit}; send fewer keys")


def _encoding(headers: Mapping[bytes, bytes]) -> bytes:
    return headers[b"content-encoding"].strip().lower()
