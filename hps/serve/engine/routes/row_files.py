"""The route by which other servers read row files, for `model_source.peers` (`models/peers.py`).

It answers from bytes that are here, and asks nobody. The file stays open until its answer is sent, also if its table is dropped
meanwhile. A request holds one piece in memory, and waits for its client before it reads the next one.
"""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Annotated, Any, Final, NamedTuple

from fastapi import APIRouter, Header, Response
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from hps.configuration.tiers import PeersConfig
from hps.errors import NotReadyError
from hps.models.peers import SERVER_ID_HEADER, server_id
from hps.serve.engine.call_threads import CallThreads
from hps.serve.engine.lifecycle import Lifecycle
from hps.serve.http.http_answer import RequestError
from hps.statistics.prometheus import Family, family
from hps.stores.base import SharedRowFile

MOST_REQUESTS: Final = 8
"""Answers at a time."""
MOST_WAIT_S: Final = 1.0
"""Before an answer starts; a request that would wait longer is refused, so that its client asks another server."""
_MOST_BYTES: Final = 16 << 20  # of an answer; a longer range is answered in part, as HTTP allows
_PIECE_BYTES: Final = 256 << 10
_SLOWEST_S: Final = 30.0  # for reading an answer, beside the time that the rate gives it
_RANGE: Final = re.compile(r"bytes=([0-9]{1,18})-([0-9]{0,18})")


class ByteRange(NamedTuple):
    """A range of a file."""

    start: int
    stop: int  # the byte after the last one


def parse_range(text: str | None, size: int) -> ByteRange:
    """Parse the header Range of a file of `size` bytes.

    Raises:
        RequestError: 400, there is none; 416, it is not one range from a byte of the file on.
    """
    if text is None:
        raise RequestError(400, "reading a row file: got no header Range, expected for example 'Range: bytes=0-4095'")
    match = _RANGE.fullmatch(text.strip())
    start = int(match[1]) if match else -1
    stop = min(int(match[2]) + 1 if match and match[2] else size, size)
    if not 0 <= start < stop:
        message = (
            f"reading a row file: got Range {text[:80]!r}, expected one range 'bytes=<first>-<last>' within its {size} bytes"
        )
        raise RequestError(416, message, (b"content-range", b"bytes */%d" % size))
    return ByteRange(start, min(stop, start + _MOST_BYTES))


class ByteRate:
    """Spreads answers over time, one after another. *One per event loop.*

    Args:
        rate: bytes a second.
        clock: returns monotonic seconds.
    """

    def __init__(self, rate: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.rate, self._clock = rate, clock
        self._free_at = clock()

    def reserve(self, count: int) -> float | None:
        """Reserve the time for so many bytes; return when it starts, or None if that is too late to wait for."""
        now = self._clock()
        start = max(now, self._free_at)
        if start - now > MOST_WAIT_S:
            return None
        self._free_at = start + count / self.rate
        return start


class RowFileRoutes:
    """Sends ranges of row files. *One per event loop.*

    Args:
        settings: None if this server has no peers: it then has nothing to send.
        threads: read files.
    """

    def __init__(
        self,
        lifecycle: Lifecycle,
        settings: PeersConfig | None,
        threads: CallThreads,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lifecycle = lifecycle
        self._clock = clock
        self._rate = None if settings is None else ByteRate(settings.serve_bytes_per_s, clock)
        self._threads = threads
        self._running = 0
        self._sent_bytes = 0

    def router(self, responses: dict[int | str, dict[str, Any]]) -> APIRouter:
        router = APIRouter(prefix="/v1", tags=["models"])
        statuses = (400, 401, 403, 404, 409, 416, 421, 503)
        errors: dict[int | str, dict[str, Any]] = {status: responses[status] for status in statuses}

        @router.get("/row-files/{content}", responses=errors, response_class=Response, status_code=206)
        async def row_file(
            content: str,
            range: Annotated[str | None, Header()] = None,  # noqa: A002 - the header's name
            server: Annotated[str | None, Header(alias=SERVER_ID_HEADER)] = None,
        ) -> Response:
            """Read a range of a table's row file by the fingerprint of its content, as other servers do.

            At most 16 MB are answered at once. Needs the right `files` where there are tokens.
            """
            if server == server_id():
                raise RequestError(421, "reading a row file: this is the server that asks")
            return self.answer(content, range)

        return router

    def answer(self, content: str, wanted: str | None) -> Response:
        """Answer with a range, the value of a header, of the file of this content.

        Raises:
            RequestError: 400, 404, 409, 416: there is no range, no such bytes here, no peers, or no such range in the file.
            NotReadyError: too many answers, or bytes, are under way.
        """
        doing, server = f"reading the row file {content[:80]}", self._lifecycle.opened
        if self._rate is None:
            raise RequestError(409, f"{doing}: model_source.peers is not configured")
        if server is None or (file := server.row_file(content)) is None:
            raise RequestError(404, f"{doing}: no table has it")
        part = parse_range(wanted, file.size_bytes)
        if not file.has(*part):
            raise RequestError(404, f"{doing}: this range is still to be downloaded")
        if self._running >= MOST_REQUESTS or (starts_at := self._rate.reserve(part.stop - part.start)) is None:
            raise NotReadyError(f"{doing}: {self._running} answers are under way; send the request again later")
        self._running += 1
        return _FileAnswer(self, file, part, self._pieces(file, part, starts_at, 1 / self._rate.rate))

    async def _pieces(self, file: SharedRowFile, part: ByteRange, starts_at: float, byte_s: float) -> AsyncIterator[memoryview]:
        """Yield the bytes of a range, from a moment on, each in its time."""
        for start in range(part.start, part.stop, _PIECE_BYTES):
            stop = min(start + _PIECE_BYTES, part.stop)
            await asyncio.sleep(max(0.0, starts_at + (start - part.start) * byte_s - self._clock()))
            if self._clock() > starts_at + (part.stop - part.start) * byte_s + _SLOWEST_S:
                raise RequestError(504, f"sending a row file: the client did not read its answer within {_SLOWEST_S:g} s")
            yield await self._threads.run(file.read, start, stop)
            self._sent_bytes += stop - start

    def finish(self) -> None:
        """Count the end of an answer."""
        self._running -= 1

    def families(self) -> Iterator[Family]:
        sent = [("", self._sent_bytes)]
        yield family("counter", "hps_row_file_sent_bytes", "Bytes of row files that were sent to other servers.", sent)


class _FileAnswer(StreamingResponse):
    """An answer with a range of a file, which counts as running until it was sent or its client is gone."""

    def __init__(self, routes: RowFileRoutes, file: SharedRowFile, part: ByteRange, pieces: AsyncIterator[memoryview]) -> None:
        headers = {
            "content-type": "application/octet-stream",
            "content-length": str(part.stop - part.start),
            "content-range": f"bytes {part.start}-{part.stop - 1}/{file.size_bytes}",
            "accept-ranges": "bytes",
        }
        super().__init__(pieces, 206, headers)
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._routes.finish()
