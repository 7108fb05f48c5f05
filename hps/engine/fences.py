"""Keeps a vector read before a modification from overwriting the newer one."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hps.errors import DatabaseTimeoutError


class TableFence:
    """Orders fills of an upper tier against modifications of a table. *Thread-safe.*

    A *fill* copies vectors from a lower tier to an upper one: a promotion, an insertion into the embedding cache, a refresh. It
    takes a token before it reads the lower tier, and may write the upper one only if the table has not been modified since. A
    *modification* (an online insert, update or delete) waits for running fills to end, then keeps new ones out until it is
    done. Fills never wait: a late fill is dropped, which only costs a later miss.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._version = 0  # number of finished modifications
        self._filling = 0
        self._modifying = False
        self._waiting: list[object] = []  # modifications, in the order of their turns

    def token(self) -> int:
        """Return a token for a fill that is about to read. A token taken during a modification is never current."""
        return self._version

    def is_current(self, token: int) -> bool:
        """Return whether the table is unmodified since `token`."""
        return token == self._version and not self._modifying

    @contextmanager
    def filling(self, token: int) -> Iterator[bool]:
        """Yield whether a fill with `token` may write until the block ends. Does not wait."""
        with self._changed:
            allowed = self.is_current(token)
            self._filling += allowed
        try:
            yield allowed
        finally:
            if allowed:
                self._filled()

    @contextmanager
    def filling_next(self, timeout_s: float) -> Iterator[None]:
        """Wait for a running modification to end, and keep others out until the block ends: it reads and writes current rows.

        Raises:
            DatabaseTimeoutError: modifications left no time between them.
        """
        with self._changed:
            self._wait(lambda: not self._modifying, time.monotonic() + timeout_s)
            self._filling += 1
        try:
            yield
        finally:
            self._filled()

    @contextmanager
    def modifying(self, timeout_s: float) -> Iterator[None]:
        """Keep fills out while the table is modified. Modifications take turns in the order of their calls.

        Raises:
            DatabaseTimeoutError: another modification or a fill did not end within `timeout_s`; nothing was modified.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            turn = object()
            self._waiting.append(turn)
            try:
                self._wait(lambda: not self._modifying and self._waiting[0] is turn, deadline)
            finally:
                self._waiting.remove(turn)
                self._changed.notify_all()
            self._modifying = True
            try:
                self._wait(lambda: not self._filling, deadline)
            except DatabaseTimeoutError:
                self._modifying = False
                self._changed.notify_all()
                raise
        try:
            yield
        finally:
            with self._changed:
                self._version += 1
                self._modifying = False
                self._changed.notify_all()

    def _filled(self) -> None:
        with self._changed:
            self._filling -= 1
            if not self._filling:
                self._changed.notify_all()

    def _wait(self, condition: Callable[[], bool], deadline: float) -> None:
        if not self._changed.wait_for(condition, max(0.0, deadline - time.monotonic())):
            raise DatabaseTimeoutError(
                "modifying a table: earlier work on it did not end in time; nothing was modified, try again"
            )
