"""What the service says of itself: the problems of late, kept for whoever asks over HTTP."""

import logging
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

_MOST_TEXT: Final = 1000  # characters of a problem


@dataclass(frozen=True, slots=True)
class Problem:
    """A warning or an error. *Immutable.*

    Attributes:
        time_s: when it was logged last, in seconds since 1970.
        level: `warning`, `error` or `critical`.
        logger: that it came from.
        text: its message, at most a thousand characters; of an exception, its last line stands behind it.
        count: how often the same was logged.
    """

    time_s: float
    level: str
    logger: str
    text: str
    count: int


class RecentProblems(logging.Handler):
    """Keeps the last warnings and errors; those of equal text are one, counted. *Thread-safe.*

    Args:
        most: how many different ones are kept.
    """

    def __init__(self, most: int = 50) -> None:
        super().__init__(logging.WARNING)
        self._most = most
        self._kept: OrderedDict[tuple[str, str, str], tuple[float, int]] = OrderedDict()  # the latest comes last
        self._keeping = threading.Lock()

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record, and forget the oldest one if there are too many."""
        try:
            text = record.getMessage()
            if record.exc_info and record.exc_info[1] is not None:
                text = f"{text}: {type(record.exc_info[1]).__name__}: {record.exc_info[1]}"
            key = (record.levelname.lower(), record.name, text[:_MOST_TEXT])
        except Exception:  # noqa: BLE001 - the arguments do not fit the message: logging itself reports that
            self.handleError(record)
            return
        with self._keeping:
            _, count = self._kept.pop(key, (0.0, 0))
            self._kept[key] = (record.created, count + 1)
            if len(self._kept) > self._most:
                self._kept.popitem(last=False)

    def entries(self) -> list[Problem]:
        """The problems, the latest first."""
        with self._keeping:
            kept = list(self._kept.items())
        return [Problem(time_s, *key, count) for key, (time_s, count) in reversed(kept)]
