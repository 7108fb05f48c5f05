"""Stops calls to a failing database and probes for its recovery."""

import threading
import time
from collections.abc import Callable


class CircuitBreaker:
    """Closed while calls succeed; open after `failures` in a row; then one probe at a time until one succeeds. *Thread-safe.*

    The caller asks `allow()`, makes the call, and reports `succeeded()` or `failed()`.

    Args:
        failures: consecutive failures that open the breaker.
        open_s: seconds from opening to the first probe, and between probes.
        clock: monotonic seconds; tests replace it.
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
        """Whether calls other than probes are refused."""
        return self._failures >= self._limit

    def allow(self) -> bool:
        """Return whether a call may be made now. While open, the breaker allows one probe every `open_s` seconds."""
        if self._failures < self._limit:
            return True
        with self._lock:
            now = self._clock()
            if now < self._next_probe:
                return False
            self._next_probe = now + self._open_s
            return True

    def succeeded(self) -> None:
        """Report a successful call: close the breaker."""
        if self._failures:
            with self._lock:
                self._failures = 0

    def failed(self) -> None:
        """Report a failed call: open the breaker at the limit."""
        with self._lock:
            self._failures += 1
            if self._failures >= self._limit:
                self._next_probe = self._clock() + self._open_s
