"""Reads request bodies within limits of size, time and memory."""

import asyncio
import zlib
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.types import Receive

from hps.errors import InvalidInputError
from hps.service.held_memory import SMALL_BYTES, HeldMemory
from hps.service.http_answer import RequestError
from hps.service.lookup_threads import LookupThreads
from hps.service.protocol.request_checks import parse_object

_Object = TypeVar("_Object", bound=BaseModel)
MOST_OBJECT_BYTES = 1 << 20
"""Maximum size of a body that is neither of a lookup nor of rows."""

_ENCODINGS = (b"identity", b"gzip", b"deflate")
_EXPIRED = -1.0
_COMPRESSED_BYTES, _INFLATED_BYTES = 1 << 16, 1 << 20  # per step
_MOST_INFLATION = 1032  # maximum of deflate: https://zlib.net/zlib_tech.html


class ClientDisconnected(Exception):
    """The client disconnected before its request was complete; no answer is possible."""


class BodyReader:
    """Reads request bodies. *One per event loop.*

    Args:
        max_bytes: maximum size of a body, as sent and decompressed.
        timeout_s: time for the complete body to arrive.
        threads: threads that decompress bodies.
        memory: counts the bodies.
    """

    def __init__(self, max_bytes: int, timeout_s: float, threads: LookupThreads, memory: HeldMemory) -> None:
        self.limit_to(max_bytes, timeout_s)
        self._threads = threads
        self._memory = memory
        self._deadlines: dict[asyncio.Task[Any], float] = {}  # of the bodies being read
        self._sweeping = False

    def limit_to(self, max_bytes: int, timeout_s: float) -> None:
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._sweep_s = min(timeout_s / 4, 0.25)

    async def read(self, headers: Mapping[bytes, bytes], receive: Receive, most: int | None = None) -> bytes | bytearray:
        """Read the complete body, as sent. Its length is held; the caller subtracts it when the request is done.

        Args:
            most: maximum size of this body, if that is less than of others.

        Raises:
            RequestError: 408, it did not arrive in time; 413, its declared or actual size is too large (the rest is not read);
                415, its compression is not supported; 503, the bodies of other requests fill the memory set aside for bodies.
            ClientDisconnected: the client disconnected.
        """
        most_bytes = self._most(most)
        declared = headers.get(b"content-length")
        if declared is not None and int(declared) > most_bytes:  # the server checked that it is a number
            raise _too_large(f"Content-Length is {int(declared)}", most_bytes, self._max_bytes)
        if b"content-encoding" in headers:
            Inflater.check_encoding(headers)
        task: asyncio.Task[Any] = asyncio.current_task()  # type: ignore[assignment]  # never None within a coroutine
        self._start_clock(task)
        memory = self._memory
        body: bytes | bytearray = b""
        more = True
        try:
            while more:
                message = await receive()
                if message["type"] != "http.request":
                    raise ClientDisconnected
                chunk = message.get("body", b"")
                if body:
                    if type(body) is bytes:
                        body = bytearray(body)  # grows by pieces of any size
                    body += chunk
                else:
                    body = chunk
                memory.held += len(chunk)
                if len(body) > most_bytes:
                    raise _too_large(f"got {len(body)} bytes", most_bytes, self._max_bytes)
                limit = memory.limit if len(body) <= SMALL_BYTES else memory.large_limit
                if memory.held > limit and chunk:
                    raise memory.full("reading the request", limit)
                more = message.get("more_body", False)
        except BaseException as error:
            memory.held -= len(body)
            if isinstance(error, asyncio.CancelledError) and self._deadlines[task] == _EXPIRED:
                task.uncancel()
                expected = f"{self._timeout_s:g} s (service.request_timeout_s)"
                raise RequestError(408, f"the request body did not arrive within {expected}") from None
            raise
        finally:
            del self._deadlines[task]
        return body

    async def decompress(
        self, headers: Mapping[bytes, bytes], body: bytes | bytearray, most: int | None = None
    ) -> bytes | bytearray:
        """Decompress the body of a request with a Content-Encoding. The result replaces the body, also in the held memory.

        Its memory is held before it is allocated.

        Raises:
            RequestError: 413, it decompresses to more than the limit, which is never passed; 503, there is no memory for it
                now; 503 and 504, as `LookupThreads.run`.
            InvalidInputError: it does not match its headers.
        """
        if _encoding(headers) == b"identity":
            return body
        max_bytes = self._most(most)  # may change while the body is decompressed
        held = self._memory.take(min(_MOST_INFLATION * len(body), max_bytes), "decompressing the request")
        try:
            inflate = Inflater(max_bytes, self._max_bytes).inflate
            decompressed = await self._threads.run(inflate, headers, body, held=held + len(body))
            self._memory.held += len(decompressed) - len(body)
        finally:
            self._memory.held -= held
        return decompressed

    def _start_clock(self, task: "asyncio.Task[Any]") -> None:
        """Cancel the task when its body takes too long.

        One timer serves all tasks: most bodies have already arrived, and a timer per task would cost each 3 us.
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

    def _most(self, most: int | None) -> int:
        return self._max_bytes if most is None else min(most, self._max_bytes)


def _too_large(got: str, limit: int, configured: int) -> RequestError:
    cure = " (service.max_body_bytes); send fewer keys" if limit == configured else ""
    return RequestError(413, f"reading the request: {got}, expected at most {limit}{cure}")


class Inflater:
    """Decompresses the body of a request. *One request.*

    Args:
        max_bytes: limit on the result.
        configured: `service.max_body_bytes`, if that may be another.
    """

    def __init__(self, max_bytes: int, configured: int | None = None) -> None:
        self._max_bytes = max_bytes
        self._configured = max_bytes if configured is None else configured

    @staticmethod
    def check_encoding(headers: Mapping[bytes, bytes]) -> None:
        """Raise RequestError, 415, if the compression of a body is not supported."""
        if (encoding := _encoding(headers)) not in _ENCODINGS:
            got = f"got Content-Encoding {encoding.decode('latin-1')[:40]!r}"
            raise RequestError(415, f"reading the request: {got}, expected gzip, deflate or none")

    def inflate(self, headers: Mapping[bytes, bytes], body: bytes | bytearray) -> bytes | bytearray:
        """Decompress a body whose headers have a Content-Encoding.

        Raises:
            RequestError: 413, it decompresses to more than the limit, which is never passed.
            InvalidInputError: it does not match its headers.
        """
        if _encoding(headers) == b"identity":
            return body
        max_bytes = self._max_bytes
        decompressor = zlib.decompressobj(wbits=zlib.MAX_WBITS | 32)  # gzip or zlib, by its header
        decompressed = bytearray()  # in pieces: zlib itself would hold two copies
        taken = 0
        try:
            while taken < len(body) and not decompressor.eof:
                piece: bytes | memoryview = memoryview(body)[taken : taken + _COMPRESSED_BYTES]
                taken += len(piece)
                full = True
                while full and not decompressor.eof:
                    most = min(_INFLATED_BYTES, max_bytes + 1 - len(decompressed))
                    inflated = decompressor.decompress(piece, most)
                    decompressed += inflated
                    if len(decompressed) > max_bytes:
                        raise _too_large("it decompresses to more", max_bytes, self._configured)
                    piece, full = decompressor.unconsumed_tail, len(inflated) == most
        except zlib.error as error:
            raise InvalidInputError(f"decompressing the request: {error}") from error
        left = len(decompressor.unused_data) + len(body) - taken
        if not decompressor.eof or left:
            found = "is cut short" if not decompressor.eof else f"ends {left} bytes before the body"
            raise InvalidInputError(f"decompressing the request: the compressed stream {found}")
        return decompressed


def _encoding(headers: Mapping[bytes, bytes]) -> bytes:
    return headers[b"content-encoding"].strip().lower()


async def read_object(request: Request, kind: type[_Object]) -> _Object:
    """Read the small JSON body of a request other than a lookup, ignoring its content type. An empty body is an empty object.

    Raises:
        InvalidInputError: the body is not of this kind.
    """
    body = await request.body()
    try:
        return kind.model_validate(parse_object(body) if body.strip() else {}, strict=True)
    except ValidationError as error:
        problems = (f"{'.'.join(map(str, one['loc']))}: {one['msg']}, got {str(one['input'])[:40]!r}" for one in error.errors())
        raise InvalidInputError(f"reading the request: {'; '.join(problems)}"[:2000]) from error


def described_object(kind: type[BaseModel]) -> dict[str, Any]:
    """Describe a body that `read_object` reads for OpenAPI: the value of `openapi_extra`."""
    return {"requestBody": {"content": {"application/json": {"schema": kind.model_json_schema()}}}}
