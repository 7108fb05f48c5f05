"""Reports the progress of loading tables."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

_log = logging.getLogger(__name__)

_WINDOW_S = 10.0  # of the rate; short enough to show that a source has stopped
_SAMPLE_S = 0.5


class Progress(Protocol):
    """Receives the progress of loading tables. One thread loads the tables, one after the other."""

    def start(self, tag: str, rows: int, size_bytes: int) -> None:
        """Report that a table with this number of rows and bytes of keys and vectors is about to be read."""

    def advance(self, tag: str, rows: int) -> None:
        """Report further rows in the databases. An exception ends the load."""

    def finish(self, tag: str) -> None:
        """Report that all rows of the table are in the databases."""


class NoProgress:
    """Ignores the progress."""

    def start(self, tag: str, rows: int, size_bytes: int) -> None: ...
    def advance(self, tag: str, rows: int) -> None: ...
    def finish(self, tag: str) -> None: ...


@runtime_checkable
class FailureProgress(Progress, Protocol):
    """Also receives the failure of a started table."""

    def fail(self, tag: str) -> None:
        """Report that the load ended before all rows of the table were in the databases."""


class TableProgress:
    """Progress and rate of one table. *Thread-safe.*"""

    def __init__(self, rows: int, size_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.rows = rows
        self.size_bytes = size_bytes
        self.rows_done = 0  # rows in the databases so far
        self._clock = clock
        self._started = clock()
        self._ended: float | None = None
        self._lock = threading.Lock()
        self._moved = self._started  # time of the last count
        self._samples = deque([(self._started, 0)])  # (time, rows done), within the window and the last before it

    def advance(self, rows: int) -> None:
        now = self._clock()
        with self._lock:
            self.rows_done += rows
            self._moved = now
            if now - self._samples[-1][0] >= _SAMPLE_S:
                self._samples.append((now, self.rows_done))
            while len(self._samples) > 1 and self._samples[1][0] <= now - _WINDOW_S:
                self._samples.popleft()

    def end(self) -> None:
        self._ended = self._clock()

    @property
    def bytes_done(self) -> int:
        return self.size_bytes * min(self.rows_done, self.rows) // max(self.rows, 1)

    @property
    def percent(self) -> int:
        return 100 * min(self.rows_done, self.rows) // max(self.rows, 1)

    @property
    def seconds(self) -> float:
        """Duration of the load so far, or in total."""
        return (self._clock() if self._ended is None else self._ended) - self._started

    @property
    def rows_per_s(self) -> float:
        """Rate of the last seconds; the average once all rows are done or the clock has stopped."""
        with self._lock:
            if self._ended is not None or self.rows_done >= self.rows:
                until = self._moved if self._ended is None else self._ended
                return self.rows_done / max(until - self._started, 1e-9)
            since, before = self._samples[0]
            return (self.rows_done - before) / max(self._clock() - since, 1e-9) if self.rows_done > before else 0.0

    @property
    def bytes_per_s(self) -> float:
        return self.rows_per_s * self.size_bytes / max(self.rows, 1)

    @property
    def seconds_left(self) -> float | None:
        """Time left at the rate of the last seconds; None without progress."""
        left, rate = max(self.rows - self.rows_done, 0), self.rows_per_s
        return left / rate if rate > 0 else None

    def __str__(self) -> str:
        rate = f"{size_text(self.bytes_per_s)}/s, " if self.rows_done else ""
        return f"{self.percent} % ({size_text(self.bytes_done)} of {size_text(self.size_bytes)}, {rate}{self.time_text})"

    @property
    def time_text(self) -> str:
        """Format the time left, such as `5 s left`, or the state at the start and at the end."""
        if self._ended is not None:
            return f"in {self.seconds:.1f} s" if self.seconds < 60 else f"in {time_text(self.seconds)}"
        left = self.seconds_left
        if self.rows_done >= self.rows:
            return "finishing"  # RocksDB merges its files
        if left is None:
            return "nothing moves" if self.seconds > _WINDOW_S else "starting"
        return f"{time_text(left)} left"


class LogProgress:
    """Logs the start and the end of each table, and its progress every few seconds. *One thread.*"""

    def __init__(self, interval_s: float = 5.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._interval_s = interval_s
        self._clock = clock
        self._table = TableProgress(0, 0, clock)
        self._logged_at = 0.0

    def start(self, tag: str, rows: int, size_bytes: int) -> None:
        self._table = TableProgress(rows, size_bytes, self._clock)
        self._logged_at = self._clock()
        _log.info("%s: %d rows, %s.", tag, rows, size_text(size_bytes))

    def advance(self, tag: str, rows: int) -> None:
        """Log rate and time left if the last line is old enough."""
        table = self._table
        table.advance(rows)
        now = self._clock()
        if now - self._logged_at < self._interval_s or table.rows_done >= table.rows:
            return
        self._logged_at = now
        _log.info("%s: %d of %d rows, %.0f rows/s, %s.", tag, table.rows_done, table.rows, table.rows_per_s, str(table))

    def finish(self, tag: str) -> None:
        table = self._table
        table.end()
        rate = size_text(table.bytes_per_s)
        _log.info("%s: %d rows in %.1f s, %.0f rows/s, %s/s.", tag, table.rows_done, table.seconds, table.rows_per_s, rate)


def size_text(size_bytes: float) -> str:
    """Format bytes: `310 MB`, `2.8 GB`; powers of 1000."""
    return _scaled(size_bytes, ("B", "kB", "MB", "GB", "TB"))


def count_text(count: float) -> str:
    """Format a count: `950`, `1.2 M`."""
    return _scaled(count, ("", "k", "M", "G", "T")).rstrip()


def _scaled(number: float, units: Sequence[str]) -> str:
    place = 0
    while number >= 999.5 and place + 1 < len(units):
        number, place = number / 1000, place + 1
    return f"{number:.0f} {units[place]}" if place == 0 or number >= 99.95 else f"{number:.1f} {units[place]}"


def time_text(seconds: float) -> str:
    """Format seconds: `5 s`, `12 min`, `3.5 h`."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5970 else f"{seconds / 3600:.1f} h"
