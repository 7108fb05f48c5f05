"""Waits of tests: for a condition that the product publishes, with a timeout for busy machines."""

import asyncio
import time
from collections.abc import Callable
from typing import Final, TypeVar

PATIENCE_S: Final = 120.0
"""Timeout of every wait in a test. Only failing tests reach it."""
_PAUSE_S: Final = 0.005

T = TypeVar("T")


def wait_until(condition: Callable[[], T], what: str = "the condition holds") -> T:
    """Poll a condition until it holds, and return what it returned.

    Args:
        condition: it is called again until it returns something true; its exceptions are the caller's.
        what: for the message, e.g. "the service is ready".

    Raises:
        AssertionError: it did not hold within PATIENCE_S.
    """
    deadline = time.monotonic() + PATIENCE_S
    while not (result := condition()):
        assert time.monotonic() < deadline, f"{PATIENCE_S:g} s passed before {what}"
        time.sleep(_PAUSE_S)
    return result


async def wait_until_async(condition: Callable[[], T], what: str = "the condition holds") -> T:
    """Do what `wait_until` does in a coroutine, whose event loop goes on meanwhile.

    Raises:
        AssertionError: it did not hold within PATIENCE_S.
    """
    deadline = time.monotonic() + PATIENCE_S
    while not (result := condition()):
        assert time.monotonic() < deadline, f"{PATIENCE_S:g} s passed before {what}"
        await asyncio.sleep(_PAUSE_S / 5)
    return result
