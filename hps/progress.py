"""Tells people how far the loading of tables is."""

import logging
import time
from typing import Protocol

_log = logging.getLogger(__name__)


class Progress(Protocol):
    """Is told how far the loading of tables is. Tables are loaded one after the other, by one thread."""

    def start(self, tag: str, rows: int, size_bytes: int) -> None:
        """A table is about to be read: so many rows, so many bytes of keys and vectors."""

    def advance(self, tag: str, rows: int) -> None:
        """That many more rows are in the databases."""

    def finish(self, tag: str) -> None:
        """All rows of the table are in the databases."""


class LogProgress:
    """Logs the start and the end of each table, and every few seconds how far it is."""

    def __init__(self, logger: logging.Logger = _log, interval_s: float = 5.0) -> None:
        self._log = logger
        self._interval_s = interval_s
        self._rows = self._done = 0
        self._started = self._told = 0.0

    def start(self, tag: str, rows: int, size_bytes: int) -> None:
        """Log what is about to be loaded."""
        self._rows, self._done = rows, 0
        self._started = self._told = time.monotonic()
        self._log.info("%s: %d rows, %.1f MB.", tag, rows, size_bytes / 1e6)

    def advance(self, tag: str, rows: int) -> None:
        """Log rate and time left, when the last line is old enough."""
        self._done += rows
        now = time.monotonic()
        if now - self._told < self._interval_s or self._done >= self._rows:
            return
        self._told = now
        rate = self._done / (now - self._started)
        left_s = (self._rows - self._done) / rate
        self._log.info("%s: %d of %d rows, %.0f rows/s, %.0f s left.", tag, self._done, self._rows, rate, left_s)

    def finish(self, tag: str) -> None:
        """Log how long it took."""
        seconds = time.monotonic() - self._started
        self._log.info("%s: %d rows in %.1f s.", tag, self._done, seconds)
