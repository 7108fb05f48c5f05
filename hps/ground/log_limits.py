"""Limits how often a line is logged, so that neither clients nor a broken tier fill a disk."""

import logging
import time
from collections.abc import Callable


class LineLimit:
    """Limits the lines in each period. *Thread-safe* except for the counts, which may be slightly off."""

    def __init__(self, lines: int = 1, period_s: float = 60.0, clock: Callable[[], float] = time.perf_counter) -> None:
        self.lines, self._period_s, self._clock = lines, period_s, clock
        self.until = float("-inf")  # end of the period, on the clock
        self.left_out = 0  # lines suppressed between the last two that passed
        self._taken = self._held_back = 0

    def take(self) -> bool:
        """Count a line and return whether to log it."""
        now = self._clock()
        if now >= self.until:
            self.until, self._taken = now + self._period_s, 0
        self._taken += 1
        if self._taken > self.lines:
            self._held_back += 1
            return False
        self.left_out, self._held_back = self._held_back, 0
        return True


class OnceAMinute(logging.Filter):
    """Passes each message below ERROR once a minute, with the number suppressed in between. *Thread-safe* as logging is."""

    def __init__(self) -> None:
        super().__init__()
        self._limits: dict[object, LineLimit] = {}  # by message format

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno >= logging.ERROR:
            return True
        limit = self._limits.setdefault(record.msg, LineLimit())
        if not limit.take():
            return False
        if limit.left_out:
            record.msg = f"{record.msg} ({limit.left_out} more since the last such line)"
        return True
