"""Stops asking an engine that keeps failing, and finds out when it is back."""

import threading
import time
from collections.abc import Callable


class CircuitBreaker:
    """Closed while calls succeed; open after `failures` in a row; then one probe at a time until one succeeds. *Thread-safe.*

    The caller asks `allow()`, makes the call, and reports `succeeded()` or `failed()`.

    Args:
        failures: how many failures in a row open it.
        open_s: how long it stays open before it lets a probe through.
        clock: seconds that never go back; tests replace it.
    """

    def __init__(self, failures: int = 3, open_s: float = 1.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = failures
        self._open_s = open_s
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0
        self._next_probe = 0.0

    @property
    def is_open(self) -> bool:
        """Whether calls are being refused, apart from probes."""
        return self._failures >= self._limit

    def allow(self) -> bool:
        """Whether a call may be made now. While open, one caller every `open_s` seconds may: the probe."""
        if self._failures < self._limit:
            return True
        with self._lock:
            now = self._clock()
            if now < self._next_probe:
                return False
            self._next_probe = now + self._open_s
            return True

    def succeeded(self) -> None:
        """Report a call that worked: close."""
        if self._failures:
            with self._lock:
                self._failures = 0

    def failed(self) -> None:
        """Report a call that failed: open at the limit."""
        with self._lock:
            self._failures += 1
            if self._failures >= self._limit:
                self._next_probe = self._clock() + self._open_s
