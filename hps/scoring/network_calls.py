"""Calls of networks that may never return."""

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, TypeVar

from hps.errors import NetworkError, NotReadyError
from hps.ground.threads.workers import call_within
from hps.networks.base import Network

T = TypeVar("T")
_MOST_BOUNDED: Final = 8
_bounded = threading.Semaphore(_MOST_BOUNDED)


class NetworkCalls:
    """Counts the calls of one network and its keys programs on one device, and frees them after the last. *Thread-safe.*

    A thread in a network cannot be interrupted, so closing does not wait for it: the last call to return frees a network that
    was closed meanwhile.
    """

    def __init__(self, network: Network, programs: Sequence[Network] = ()) -> None:
        self.network = network
        self.programs = tuple(programs)
        self._lock = threading.Lock()
        self._under_way: dict[int, tuple[object, float]] = {}  # by thread: its caller, and when it entered the network
        self._closed = False

    @contextmanager
    def of(self, caller: object) -> Iterator[None]:
        """Use the network, in one thread.

        Raises:
            NotReadyError: the network is closed.
        """
        thread = threading.get_ident()
        with self._lock:
            if self._closed:
                raise NotReadyError("using a network: its version was undeployed")
            self._under_way[thread] = caller, math.inf
        try:
            with self.network.scope():
                yield
        finally:
            self._end(thread)

    def _end(self, thread: int) -> None:
        with self._lock:
            del self._under_way[thread]
            is_last = self._closed and not self._under_way
        if is_last:
            self._free()

    @contextmanager
    def running(self, caller: object) -> Iterator[None]:
        """Run the network, within `of`."""
        thread = threading.get_ident()
        with self._lock:
            self._under_way[thread] = caller, time.monotonic()
        try:
            yield
        finally:
            with self._lock:
                self._under_way[thread] = caller, math.inf

    def seconds(self, caller: object) -> dict[int, float]:
        """Return how long each call of a caller has been in the network, by thread; 0.0 while it is elsewhere."""
        with self._lock:
            now = time.monotonic()
            return {thread: max(0.0, now - since) for thread, (user, since) in self._under_way.items() if user is caller}

    def close(self) -> None:
        """Refuse further calls, and free the network: now, or when the last call returns. Called once."""
        with self._lock:
            self._closed = True
            in_use = bool(self._under_way)
        if not in_use:
            self._free()

    def _free(self) -> None:
        for network in (self.network, *self.programs):
            network.close()


def bounded(timeout_s: float, doing: str, call: Callable[[], T]) -> T:
    """Run a call of a network in a thread of its own, and abandon it after a timeout.

    Args:
        doing: for the error, such as `warming the network of model 'm'`.

    Raises:
        NetworkError: it takes longer; its thread continues. At most eight such threads run at a time, abandoned ones included.
    """

    def late() -> NetworkError:
        return NetworkError(
            f"{doing}: it has not ended within {timeout_s:g} s (dense.open_timeout_s). If it never ends, its thread and memory "
            f"stay until the process ends; at most {_MOST_BOUNDED} networks are opened or warmed at a time"
        )

    return call_within(timeout_s, call, _bounded, late)
