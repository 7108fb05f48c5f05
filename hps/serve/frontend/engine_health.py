"""Polls the engine's readiness for the gRPC health calls of a frontend."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Final

from hps.errors import HPSError
from hps.serve.frontend.proxy import EngineConnections, forwarded

_POLL_S: Final = 1.0
_PATH: Final = "/v2/health/ready"
_REQUEST: Final = forwarded("GET", _PATH.encode(), [(b"host", b"hps")], b"", "")


class EngineHealth:
    """Polls the engine once a second while there are watchers; one poll serves all of them. *One event loop.*

    Args:
        check_ready: raises an error if the engine does not answer lookups of this frontend; called first, with the path.
    """

    def __init__(self, engine: EngineConnections, check_ready: Callable[[str], None]) -> None:
        self._engine = engine
        self._check_ready = check_ready
        self._ready: bool | None = None  # unknown
        self._changed = asyncio.Event()
        self._polls: asyncio.Task[None] | None = None
        self.watchers = 0

    async def is_ready(self) -> bool:
        """Request the readiness now."""
        try:
            self._check_ready(_PATH)
            return (await self._engine.fetch_answer(_REQUEST))[0] == 200
        except HPSError:
            return False

    async def watch(self) -> AsyncGenerator[bool, None]:
        """Yield the readiness: at once, and when it changes. The caller closes the iterator."""
        self.watchers += 1
        if self._polls is None:
            self._polls = asyncio.get_running_loop().create_task(self._poll())
        known: bool | None = None
        try:
            while True:
                changed = self._changed
                if self._ready is not known and self._ready is not None:
                    known = self._ready
                    yield known
                else:
                    await changed.wait()
        finally:
            self.watchers -= 1
            if not self.watchers and self._polls is not None:
                self._polls.cancel()
                self._polls = self._ready = None

    async def _poll(self) -> None:
        while True:
            if (ready := await self.is_ready()) is not self._ready:
                self._ready = ready
                self._changed.set()
                self._changed = asyncio.Event()
            await asyncio.sleep(_POLL_S)
