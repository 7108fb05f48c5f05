"""Decides which failed attempts of a call are repeated, and when."""

import random
import time
from typing import Final

from hps.client.answers import Answer
from hps.client.requests import RemoteCall
from hps.errors import HPSError, RemoteConnectionError, RemoteTimeoutError

_MOST_LOST: Final = 3
_FIRST_PAUSE_S: Final = 0.01
_LEAST_PAUSE_S: Final = 0.05
_JITTER: Final = 0.5


class Attempts:
    """The attempts of one call. *One call.*

    A call that only reads is repeated when a connection is lost, and when the server is overloaded and says after what time to
    try again. A write is never repeated: it may have been executed.

    Args:
        timeout_s: of all attempts together.
    """

    def __init__(self, call: RemoteCall, timeout_s: float) -> None:
        self._repeatable = call.repeatable
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._lost = 0

    def remaining_s(self) -> float:
        """Return the seconds that are left.

        Raises:
            RemoteTimeoutError: none are.
        """
        remaining_s = self._deadline - time.monotonic()
        if remaining_s <= 0:
            raise self.timeout()
        return remaining_s

    def timeout(self) -> RemoteTimeoutError:
        return RemoteTimeoutError(f"calling a server: no complete answer within {self._timeout_s:g} s (timeout_s)")

    def pause_after_loss(self, error: RemoteConnectionError) -> float:
        """Return the pause before the next attempt, after a connection was lost.

        Raises:
            RemoteConnectionError: there is no other attempt.
        """
        self._lost += 1
        if not self._repeatable or self._lost >= _MOST_LOST:
            raise error
        return min(self.remaining_s(), random.uniform(0.0, _FIRST_PAUSE_S * 2**self._lost))

    def pause_after(self, answer: Answer, error: HPSError) -> float:
        """Return the pause before the next attempt, after the server refused this one.

        Raises:
            HPSError: there is no other attempt.
        """
        requested_s = answer.retry_after_s
        if requested_s is None or not self._repeatable:
            raise error
        pause = max(requested_s, _LEAST_PAUSE_S) * random.uniform(1.0, 1.0 + _JITTER)
        if pause >= self._deadline - time.monotonic():
            raise error
        return pause
