"""Counts running calls, so that their resources are released only after the last one."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from hps.errors import DatabaseTimeoutError
from hps.ground.threads.lifetimes import disown_in_children, refusal

_PAUSE_TIMEOUT_S = 30


class OpenCalls:
    """Counts running calls of a resource. *Thread-safe.*

    Each call runs inside `with calls:`. `close` refuses new calls, `exclusive` makes them wait, and both wait for running ones.
    """

    # A call takes no lock: it first counts itself, and then checks whether it may run, while `close` and `exclusive` first
    # forbid calls, and then count them. So at least one of two that race sees the other.

    def __init__(self, what: str) -> None:
        self._what = what
        self._calls: list[None] = []  # an element for each running call; appending and popping are atomic
        self._closed = False
        self._forbidden = False  # closed, or within `exclusive`
        self._ended = threading.Condition()
        disown_in_children(self)

    @property
    def running(self) -> int:
        return len(self._calls)

    def __enter__(self) -> None:
        self._calls.append(None)
        while self._forbidden:
            self.__exit__(None, None, None)
            with self._ended:
                allowed = self._ended.wait_for(lambda: self._closed or not self._forbidden, _PAUSE_TIMEOUT_S)
                if self._closed:
                    raise refusal(self, self._what)
                if not allowed:
                    raise DatabaseTimeoutError(
                        f"{self._what} is still being opened again after {_PAUSE_TIMEOUT_S} s; try again"
                    )
            self._calls.append(None)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._calls.pop()
        if self._forbidden:
            with self._ended:
                self._ended.notify_all()

    def disown(self) -> None:
        """Refuse every call, in a forked child. Running calls belong to the parent."""
        self._calls, self._ended = [], threading.Condition()
        self._closed = self._forbidden = True

    def close(self, timeout_s: float) -> bool:
        """Refuse new calls and wait for running ones; return False on timeout. May be called again."""
        with self._ended:
            self._closed = self._forbidden = True
            self._ended.notify_all()
            return self._ended.wait_for(lambda: not self._calls, timeout_s)

    @contextmanager
    def exclusive(self, timeout_s: float) -> Iterator[None]:
        """Wait for running calls, and make new ones wait until the block ends. Raise DatabaseTimeoutError on timeout."""
        try:
            with self._ended:
                self._forbidden = True
                if not self._ended.wait_for(lambda: not self._calls, timeout_s):
                    raise DatabaseTimeoutError(
                        f"opening {self._what} again: calls still running after {timeout_s:g} s; try again"
                    )
            yield
        finally:
            with self._ended:
                self._forbidden = self._closed
                self._ended.notify_all()
