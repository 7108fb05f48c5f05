"""Texts that take long to write, such as `/metrics`: written on one thread, and shared by concurrent requests."""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress

from hps.ground.threads.pacing import paced
from hps.serve.engine.call_threads import CallThreads


class SharedText:
    """A text that is written on request, once at a time. *One per event loop.*

    Args:
        write: writes the text on a thread, in small pieces, since other threads need the interpreter lock.
        threads: one thread, shared by all such texts; it limits the time of each.
        fresh_s: how long a text is reused.
    """

    def __init__(self, write: Callable[[], bytes], threads: CallThreads, fresh_s: float = 0.0) -> None:
        self._write = write
        self._threads = threads
        self._fresh_s = fresh_s
        self._text = b""
        self._fresh_until = 0.0
        self._writing: asyncio.Task[None] | None = None

    async def get(self) -> bytes:
        """Return the text.

        Raises:
            RequestError: 504, it was not written in time.
        """
        if time.monotonic() >= self._fresh_until:
            if self._writing is None:
                self._writing = asyncio.create_task(self._renew())
                self._writing.add_done_callback(self._written)
            await asyncio.shield(self._writing)  # other requests wait for it
        return self._text

    async def _renew(self) -> None:
        self._text = await self._threads.run(self._paced)
        self._fresh_until = time.monotonic() + self._fresh_s

    def _written(self, writing: asyncio.Task[None]) -> None:
        self._writing = None
        with suppress(asyncio.CancelledError):
            writing.exception()  # raised in `get`; all requests may be gone

    def _paced(self) -> bytes:
        with paced():
            return self._write()
