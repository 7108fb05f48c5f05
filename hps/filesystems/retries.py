"""Retries requests to remote stores, and bounds requests that might never be answered."""

import logging
import random
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from hps.configuration.tiers import ModelSourceConfig
from hps.errors import ModelSourceError
from hps.ground.threads.workers import call_within

_log = logging.getLogger(__name__)

MOST_THREADS = 128
"""Maximum number of threads of a store, including those that were given up."""

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
T = TypeVar("T")


class UnansweredError(ModelSourceError):
    """A host did not answer in time."""

    def __init__(self, what: str, seconds: float) -> None:
        super().__init__(
            f"{what}: no answer in {seconds:.1f} s; check that the host is right, runs and can be reached from here (on a slow "
            "network, lower model_source.parallel_reads or raise its deadline_s)"
        )


def retried(settings: ModelSourceConfig, attempt: Callable[[float], T]) -> T:
    """Call `attempt` with the deadline (of `time.monotonic`); after a `ModelSourceError` pause and call it again.

    Raises:
        ModelSourceError: the last one, once attempts or time are used up; it reports the number of attempts and the duration.
    """
    # One loop for all stores, so that `max_attempts` and `deadline_s` mean the same everywhere: hdfs-native retries nothing,
    # boto3 neither a truncated body nor within a deadline, and google-cloud-storage does not count attempts.
    started = time.monotonic()
    deadline = started + settings.deadline_s
    tried = 0
    while True:
        tried += 1
        try:
            return attempt(deadline)
        except ModelSourceError as error:
            # Jitter, so that parts that failed together are not retried together.
            pause = random.uniform(0.5, 1.0) * min(_FIRST_PAUSE_S * 2 ** (tried - 1), _LONGEST_PAUSE_S)
            now = time.monotonic()
            if tried >= settings.max_attempts or now + pause >= deadline:
                times = "once" if tried == 1 else f"{tried} times"
                raise ModelSourceError(f"{error} (tried {times} in {now - started:.1f} s)") from error
            _log.debug("trying again in %.2f s: %s", pause, error)
            time.sleep(pause)


def share(settings: ModelSourceConfig, deadline: float) -> float:
    """Return the seconds of one attempt: half of the remaining time, so that a slow response leaves time for another."""
    left = max(deadline - time.monotonic(), 0.0)
    return min(left, max(left / 2, settings.timeout_s))


class ReadTarget:
    """The buffer of one read attempt, which is not written after the attempt has ended. *Thread-safe.*"""

    def __init__(self, path: str, buffer: memoryview) -> None:
        self.missing = len(buffer)
        self._path, self._rest, self._lock = path, buffer, threading.Lock()

    def write(self, piece: bytes) -> None:
        """Write the next bytes.

        Raises:
            ModelSourceError: there are more bytes than requested, or the attempt has ended.
        """
        with self._lock:
            if len(piece) > len(self._rest):
                raise ModelSourceError(
                    f"reading {self._path}: got more bytes than requested; the server does not serve ranges as it should"
                )
            self._rest[: len(piece)] = piece
            self._rest = self._rest[len(piece) :]
            self.missing = len(self._rest)

    def end(self) -> None:
        """Accept no more bytes."""
        with self._lock:
            self._rest = memoryview(b"")


def fill(settings: ModelSourceConfig, path: str, buffer: memoryview, attempt: Callable[[ReadTarget, float], None]) -> None:
    """Read into a buffer, with a new target for each attempt; `attempt` also gets its time limit in seconds."""

    def once(deadline: float) -> None:
        target = ReadTarget(path, buffer)
        try:
            attempt(target, share(settings, deadline))
        finally:
            target.end()

    retried(settings, once)


def bounded(what: str, seconds: float, threads: threading.Semaphore, call: Callable[[], T]) -> T:
    """Run a call on its own thread, which is abandoned after `seconds`.

    For operations whose client has no timeout: name resolution, sources of credentials, a slow response. The call may keep
    running afterwards, so it must not share the objects that it was given.

    Args:
        threads: limits the threads of one store, abandoned ones included.

    Raises:
        UnansweredError: no answer in time; `what` begins the message.
    """
    return call_within(seconds, call, threads, partial(UnansweredError, what, seconds))
