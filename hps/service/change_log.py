"""What the log says of changes: a line for each change of a model, and a line a minute for the writes of each client."""

import asyncio
import logging
import time
from dataclasses import dataclass, field

from hps.service.logs import fields

_log = logging.getLogger(__name__)
_PAUSE_S = 60.0
_MOST_WRITERS = 256


def printable(text: str) -> str:
    """Text of a client's, in one line of at most 300 characters."""
    return text[:300].encode("unicode_escape").decode()


@dataclass(slots=True)
class Change:
    """A request that changes a model. *One per request*; its line is logged once, by whoever ends it first.

    Attributes:
        who: the client, and by what right.
        what: is changed.
        request_id: of the request.
        error: why it failed; empty if it has not.
        kept: somebody else ends it, after the request.
        started, ended: by the monotonic clock.
    """

    who: str
    what: str
    request_id: str
    error: str = ""
    kept: bool = False
    started: float = field(default_factory=time.monotonic)
    ended: float | None = None

    @property
    def seconds(self) -> float:
        """That it has taken so far, or took."""
        return (self.ended or time.monotonic()) - self.started

    def end(self, outcome: str) -> None:
        """Log who did what, how long it took and how it ended."""
        self.ended = time.monotonic()
        level = logging.WARNING if self.error else logging.INFO
        ended = f"{outcome}: {self.error}" if self.error else outcome
        more = fields(request_id=self.request_id)
        _log.log(level, "%s, by %s: %s after %.1f s", self.what, self.who, printable(ended), self.seconds, extra=more)


@dataclass(slots=True)
class _Writes:
    requests: int = 0
    written: int = 0
    deleted: int = 0
    refused: int = 0

    def __str__(self) -> str:
        rows = f"{self.written} rows written, {self.deleted} deleted"
        return f"{self.requests} requests, {rows}" + (f", {self.refused} requests failed" if self.refused else "")


class WriteLog:
    """Logs the online writes of each client to each table: the first one at once, and then their number once a minute.

    *One per event loop*, which alone calls it.
    """

    def __init__(self) -> None:
        self._writes: dict[tuple[str, str], _Writes] = {}  # by client and table, since their last line
        self._ticking = False

    def count(self, who: str, table: str, *, written: int = 0, deleted: int = 0, failed: bool = False) -> None:
        """Count a request."""
        counts = self._writes.get((who, table))
        first = counts is None
        if counts is None:
            if len(self._writes) == _MOST_WRITERS:
                self.flush()
            if not self._ticking:
                self._ticking = True
                asyncio.get_running_loop().call_later(_PAUSE_S, self._tick)
            counts = self._writes[who, table] = _Writes()
        counts.requests += 1
        counts.written += written
        counts.deleted += deleted
        counts.refused += failed
        if first:
            self._line(who, table, counts)

    def flush(self) -> None:
        """Log what was counted since the last lines."""
        before, self._writes = self._writes, {}
        for (who, table), counts in before.items():
            self._line(who, table, counts)

    def _tick(self) -> None:
        active = [key for key, counts in self._writes.items() if counts.requests]
        self.flush()
        self._ticking = bool(active)
        if active:
            self._writes = {key: _Writes() for key in active}
            asyncio.get_running_loop().call_later(_PAUSE_S, self._tick)

    def _line(self, who: str, table: str, counts: _Writes) -> None:
        if counts.requests:
            _log.info("writing rows of %s, by %s: %s", table, who, counts)
            counts.requests = counts.written = counts.deleted = counts.refused = 0
