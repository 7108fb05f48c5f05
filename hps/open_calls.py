"""Counts the calls under way, so that what they use is released only when they have ended."""

import threading
from types import TracebackType
from typing import Self

from hps.errors import NotReadyError


class OpenCalls:
    """Counts the calls under way, so that what they use is released only when nothing uses it any more. *Thread-safe.*

    Each call is made inside `with calls:`; `close` waits for those under way and refuses new ones.

    Args:
        what: it is that the calls use, in messages.

    Attributes:
        under_way: how many calls have not ended.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._lock = threading.Lock()
        self._ended = threading.Condition(self._lock)
        self.under_way = 0
        self._closed = False

    def __enter__(self) -> Self:
        with self._lock:  # the lock itself: the condition's `with` takes three times as long
            if self._closed:
                raise NotReadyError(f"{self._what} is closed; open it again to use it")
            self.under_way += 1
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._lock:
            self.under_way -= 1
            if self._closed and not self.under_way:
                self._ended.notify_all()

    def close(self, timeout_s: float) -> bool:
        """Refuse new calls, then wait for those under way; False when some have not ended. It may be called again."""
        with self._lock:
            self._closed = True
            return self._ended.wait_for(lambda: not self.under_way, timeout_s)
