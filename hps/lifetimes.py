"""What this process has open: its exit closes it, and a process that is forked from it leaves it alone.

**Exit.** A daemon thread that is inside native code when the interpreter ends takes the process down with it (SIGABRT). So
what runs such threads, or calls of other threads, is closed before, the newest first.

**Fork.** The child has a copy of everything, but no thread except the one that forked. It shares sockets and files with the
parent, and a lock that another thread held stays locked for ever. So in the child each thing that is open is *disowned*: it
refuses every call, closing it does nothing, and it is never freed, since engines flush, join threads or call the device when
they are freed.

Everything is known here by weak reference: what nobody else holds is collected.
"""

import atexit
import ctypes
import logging
import os
from collections.abc import Callable
from typing import Any, Final, Protocol
from weakref import WeakKeyDictionary, WeakSet

from hps.errors import ForkedProcessError, NotReadyError

_log = logging.getLogger(__name__)


class Inheritable(Protocol):
    """What a forked child inherits."""

    def disown(self) -> None:
        """Let go in a forked child: refuse calls from now on, and take no lock, since another thread may have held it."""


_inheritable: WeakSet[Any] = WeakSet()
_inherited: Final[list[Any]] = []
_closed_at_exit: WeakKeyDictionary[Any, Callable[[Any], object]] = WeakKeyDictionary()  # in the order of their opening


def disown_in_children(resource: Inheritable) -> None:
    """Have `resource.disown()` called in every process that is forked from this one."""
    _inheritable.add(resource)
    _inherited[:] = [one for one in _inherited if one is not resource]  # it was opened anew


def close_at_exit(resource: Any, close: Callable[[Any], object]) -> None:
    """Have `close(resource)` called when the interpreter ends, unless the resource is gone by then."""
    _closed_at_exit[resource] = close
    atexit.unregister(_close_all)  # engines that were imported meanwhile end after what uses them
    atexit.register(_close_all)


def refusal(resource: Any, what: str) -> NotReadyError:
    """The error for a call of something that is closed, or that belongs to the parent of this process."""
    if any(one is resource for one in _inherited):
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
        except BaseException:  # noqa: BLE001 - also at Ctrl-C the others are to be closed
            _log.warning("closing at exit failed", exc_info=True)


def _disown_all() -> None:
    _closed_at_exit.clear()
    for resource in list(_inheritable):
        _inherited.append(resource)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(resource))  # even the end of the interpreter does not free it
        resource.disown()
    _inheritable.clear()


os.register_at_fork(after_in_child=_disown_all)
