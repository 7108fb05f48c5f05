"""Open resources of this process: closed at exit, newest first, and *disowned* in a forked child. References are weak."""

import atexit
import logging
import os
from collections.abc import Callable
from typing import Any, Final, Protocol
from weakref import WeakKeyDictionary, WeakSet

import numpy as np

from hps.errors import ForkedProcessError, NotReadyError

_log = logging.getLogger(__name__)


class Inheritable(Protocol):
    """A resource that a forked child inherits."""

    def disown(self) -> None:
        """Refuse all calls, in a forked child. Takes no lock, since another thread may have held it."""


# A daemon thread that runs native code when the interpreter ends crashes the process (SIGABRT). So objects with such threads,
# or with calls of other threads, are closed before.
#
# A forked child has a copy of everything, but only the thread that forked. It shares sockets and files with the parent, and a
# lock held by another thread stays locked for ever. So the child disowns each open resource: it refuses every call, closing it
# does nothing, and it is never freed, since engines flush, join threads or call the device when they are freed.
_inheritable: WeakSet[Any] = WeakSet()
_inherited: Final[list[Any]] = []
_kept = np.empty(2, object)
_kept[:] = [_inherited, _kept]  # a cycle that is never freed: arrays take no part in garbage collection
_closed_at_exit: WeakKeyDictionary[Any, Callable[[Any], object]] = WeakKeyDictionary()  # in the order of opening


def disown_in_children(resource: Inheritable) -> None:
    """Register a resource whose `disown()` is called in every forked child."""
    _inheritable.add(resource)
    _inherited[:] = [known for known in _inherited if known is not resource]  # reopened


def close_at_exit(resource: Any, close: Callable[[Any], object]) -> None:
    """Register `close(resource)` for the interpreter's exit, unless the resource is gone by then."""
    _closed_at_exit[resource] = close
    atexit.unregister(_close_all)  # registered last, so that engines imported meanwhile end after it
    atexit.register(_close_all)


def refusal(resource: Any, what: str) -> NotReadyError:
    """Return the error for a call of a resource that is closed, or that belongs to the parent process."""
    if any(known is resource for known in _inherited):
        return ForkedProcessError(
            f"using {what}: it belongs to the process that this one (pid {os.getpid()}) was forked from, and cannot be used "
            "here. Create HPS after the fork, in each process of its own"
        )
    return NotReadyError(f"using {what}: it is closed; open another")


def _close_all() -> None:
    while _closed_at_exit:
        resource, close = _closed_at_exit.popitem()
        try:
            close(resource)
        except BaseException:  # noqa: BLE001 - even on Ctrl-C, close the others
            _log.warning("closing at exit failed", exc_info=True)


def _disown_all() -> None:
    _closed_at_exit.clear()
    for resource in list(_inheritable):
        _inherited.append(resource)
        resource.disown()
    _inheritable.clear()


os.register_at_fork(after_in_child=_disown_all)
