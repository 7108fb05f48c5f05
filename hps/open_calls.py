"""Counts the calls under way, so that what they use is released only when they have ended."""

import threading
from types import TracebackType

from hps.lifetimes import disown_in_children, refusal


class OpenCalls:
    """Counts the calls under way, so that what they use is released only when nothing uses it any more. *Thread-safe.*

    Each call is made inside `with calls:`; `close` waits for those under way and refuses new ones. A call takes no lock: it
    first counts itself, then looks whether it may; `close` first forbids, then counts.

    Args:
        what: it is that the calls use, in messages.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._calls: list[None] = []  # as long as there are calls; appending to a list and popping from it are atomic
        self._closed = False
        self._ended = threading.Condition()
        disown_in_children(self)

    @property
    def under_way(self) -> int:
        """How many calls have not ended."""
        return len(self._calls)

    def __enter__(self) -> None:
        self._calls.append(None)
        if self._closed:
            self.__exit__(None, None, None)
            raise refusal(self, self._what)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._calls.pop()
        if self._closed:
            with self._ended:
                self._ended.notify_all()

    def disown(self) -> None:
        """In a forked child: refuse every call. Those under way are the parent's."""
        self._calls, self._closed, self._ended = [], True, threading.Condition()

    def close(self, timeout_s: float) -> bool:
        """Refuse new calls, then wait for those under way; False when some have not ended. It may be called again."""
        with self._ended:
            self._closed = True
            return self._ended.wait_for(lambda: not self._calls, timeout_s)
