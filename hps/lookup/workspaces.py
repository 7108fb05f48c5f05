"""A bounded pool of lookup workspaces; waiting for one ends with an error, never in a spin."""

import queue
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from prometheus_client import Counter

from hps.cache.base import Workspace
from hps.errors import NotReadyError, WorkspaceTimeoutError


class WorkspacePool:
    """Lends workspaces to one lookup at a time. *Thread-safe.*

    Args:
        create: allocates one; called `size` times now, so that a lookup never allocates.
        size: how many lookups may run at once.
        timeout_s: how long a lookup waits for one.
        owner: what the error message calls this pool.
        timeouts: counts the lookups that waited in vain.
    """

    def __init__(self, create: Callable[[], Workspace], size: int, timeout_s: float, owner: str, timeouts: Counter) -> None:
        self._size = size
        self._timeout_s = timeout_s
        self._owner = owner
        self._timeouts = timeouts
        self._closed = False
        self._free: queue.SimpleQueue[Workspace] = queue.SimpleQueue()
        for _ in range(size):
            self._free.put(create())

    @contextmanager
    def take(self) -> Iterator[Workspace]:
        """Lend a workspace for the duration of the block.

        Raises:
            WorkspaceTimeoutError: all of them stayed busy for `timeout_s`.
            NotReadyError: the pool was closed.
        """
        try:
            workspace = self._free.get(timeout=self._timeout_s)
        except queue.Empty:
            if self._closed:
                raise NotReadyError(f"{self._owner}: was undeployed") from None
            self._timeouts.inc()
            raise WorkspaceTimeoutError(
                f"{self._owner}: all {self._size} lookup workspaces stayed busy for {self._timeout_s:g} s; "
                "raise num_of_worker_buffer_in_pool or send fewer lookups at once"
            ) from None
        try:
            yield workspace
        finally:
            self._free.put(workspace)

    def close(self, timeout_s: float) -> bool:
        """Take all workspaces away for good; False when lookups still held some after `timeout_s`."""
        self._closed = True
        deadline = time.monotonic() + timeout_s
        for _ in range(self._size):
            try:
                self._free.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                return False
        self._size = 0
        return True
