"""Counts the calls under way, so that a database is closed when nothing reads it any more."""

import threading
from types import TracebackType
from typing import Self

from hps.errors import DatabaseTimeoutError, NotReadyError


class OpenCalls:
    """`with calls:` around each call of the engine; `close` waits for those under way and refuses new ones. *Thread-safe.*"""

    def __init__(self, what: str) -> None:
        self._what = what
        self._changed = threading.Condition()
        self._under_way = 0
        self._closed = False

    def __enter__(self) -> Self:
        with self._changed:
            if self._closed:
                raise NotReadyError(f"{self._what} is closed; open it again to use it")
            self._under_way += 1
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._changed:
            self._under_way -= 1
            if not self._under_way:
                self._changed.notify_all()

    def close(self, timeout_s: float) -> None:
        """Refuse new calls, then wait for those under way.

        Raises:
            DatabaseTimeoutError: some are still going on. New ones stay refused, and `close` may be called again.
        """
        with self._changed:
            self._closed = True
            if not self._changed.wait_for(lambda: not self._under_way, timeout_s):
                raise DatabaseTimeoutError(
                    f"closing {self._what}: {self._under_way} calls are still going on after {timeout_s:g} s; "
                    "close it again when they have ended"
                )
