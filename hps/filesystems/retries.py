"""Repeats what failed for a reason that may pass, and bounds calls that might never answer."""

import logging
import random
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from hps.configuration.tiers import ModelSourceConfig
from hps.errors import ModelSourceError

_log = logging.getLogger(__name__)

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
T = TypeVar("T")


class UnansweredError(ModelSourceError):
    """A host did not answer at all.

    Args:
        what: was being done, e.g. `reading hdfs://nn/m/key`.
        seconds: how long the answer was waited for.
    """

    def __init__(self, what: str, seconds: float) -> None:
        super().__init__(
            f"{what}: no answer in {seconds:.1f} s; check that the host is right, runs and can be reached from here"
        )


def retried(settings: ModelSourceConfig, attempt: Callable[[float], T]) -> T:
    """Call `attempt` with the deadline, of `time.monotonic`; after a `ModelSourceError` pause and call it again.

    Raises:
        ModelSourceError: the last one, once attempts or time are used up; it says how many attempts and how long.
    """
    started = time.monotonic()
    deadline = started + settings.deadline_s
    tried = 0
    while True:
        tried += 1
        try:
            return attempt(deadline)
        except ModelSourceError as error:
            # Jitter, so that parts that failed together do not come back together.
            pause = random.uniform(0.5, 1.0) * min(_FIRST_PAUSE_S * 2 ** (tried - 1), _LONGEST_PAUSE_S)
            now = time.monotonic()
            if tried >= settings.max_attempts or now + pause >= deadline:
                times = "once" if tried == 1 else f"{tried} times"
                raise ModelSourceError(f"{error} (tried {times} in {now - started:.1f} s)") from error
            _log.debug("trying again in %.2f s: %s", pause, error)
            time.sleep(pause)


def within(what: str, deadline: float, call: Callable[[], T]) -> T:
    """Run a call that has no timeout of its own in a thread, and leave the thread behind at the deadline.

    The call may still be running afterwards, so nobody else may use what it was given.

    Args:
        what: is being done, for the message.
        deadline: of `time.monotonic`.
        call: what to run; what it raises is raised here.

    Raises:
        UnansweredError: no answer in time.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:  # noqa: BLE001 - raised by the caller's thread
            errors.append(error)

    thread = threading.Thread(target=run, name="hps-bounded-call", daemon=True)
    seconds = max(deadline - time.monotonic(), 0.0)
    thread.start()
    thread.join(seconds)
    if results:
        return results[0]
    if errors:
        raise errors[0]
    raise UnansweredError(what, seconds)
