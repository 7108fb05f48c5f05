"""Logs changes: a line for each change of a model, and a line a minute for each client's writes."""

import asyncio
import logging
from dataclasses import dataclass

from starlette.types import Scope

from hps.serve.logs.lines import escaped, fields

_log = logging.getLogger(__name__)
_PAUSE_S = 60.0
_MOST_WRITERS = 256
_MOST_TEXT = 300  # characters of a client's text


def request_line(scope: Scope) -> str:
    return escaped(f"{scope['method']} {scope['path']}"[:_MOST_TEXT])


def log_change(change: str, client: str, request_id: bytes, outcome: str, error: str, seconds: float) -> None:
    """Log a change: its client, how long it took, and how it ended."""
    ended = f"{outcome}: {error}" if error else outcome
    more = fields(request_id=request_id.decode())
    _log.log(
        logging.WARNING if error else logging.INFO,
        "%s, by %s: %s after %.1f s",
        change,
        client,
        escaped(ended[:_MOST_TEXT]),
        seconds,
        extra=more,
    )


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
    """Logs each client's online writes to each table: the first at once, then their number once a minute.

    *One per event loop*; only the loop calls it.
    """

    def __init__(self) -> None:
        self._writes: dict[tuple[str, str], _Writes] = {}  # by client and table, since their last line
        self._ticking = False

    def count(self, client: str, table: str, *, written: int = 0, deleted: int = 0, failed: bool = False) -> None:
        counts = self._writes.get((client, table))
        first = counts is None
        if counts is None:
            if len(self._writes) == _MOST_WRITERS:
                self.flush()
            if not self._ticking:
                self._ticking = True
                asyncio.get_running_loop().call_later(_PAUSE_S, self._tick)
            counts = self._writes[client, table] = _Writes()
        counts.requests += 1
        counts.written += written
        counts.deleted += deleted
        counts.refused += failed
        if first:
            self._line(client, table, counts)

    def flush(self) -> None:
        before, self._writes = self._writes, {}
        for (client, table), counts in before.items():
            self._line(client, table, counts)

    def _tick(self) -> None:
        active = [key for key, counts in self._writes.items() if counts.requests]
        self.flush()
        self._ticking = bool(active)
        if active:
            self._writes = {key: _Writes() for key in active}
            asyncio.get_running_loop().call_later(_PAUSE_S, self._tick)

    def _line(self, client: str, table: str, counts: _Writes) -> None:
        if counts.requests:
            _log.info("writing rows of %s, by %s: %s", table, client, counts)
            counts.requests = counts.written = counts.deleted = counts.refused = 0
