"""Resolves the string that a layer holds to a parameter server: the path of a configuration, or a name. Process-wide.

A layer, an exported program or a scripted module holds only a string. A path is opened once per process, at the first lookup,
and stays open until `close` or the exit of the process. A name stands for a server that the process created itself and
registered with `attach`.
"""

import itertools
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from hps.errors import NotReadyError
from hps.ground.lifetimes import disown_in_children
from hps.parameter_server import HPS

_OPENING_TIMEOUT_S = 3600.0  # large models load slowly
_known: Final[dict[str, HPS]] = {}  # by path or name
_names = itertools.count(1)


class _Opened:
    """Holds the servers opened from paths, by real path. *Thread-safe.* A forked child opens its own."""

    def __init__(self) -> None:
        self.servers: dict[str, HPS] = {}
        self._lock = threading.Lock()

    @contextmanager
    def locked(self, doing: str) -> Iterator[None]:
        if not self._lock.acquire(timeout=_OPENING_TIMEOUT_S):
            raise NotReadyError(f"{doing}: another thread has been opening a server for {_OPENING_TIMEOUT_S:.0f} s; try again")
        try:
            yield
        finally:
            self._lock.release()

    def disown(self) -> None:
        for name in [name for name, server in _known.items() if server in self.servers.values()]:
            del _known[name]
        self.servers, self._lock = {}, threading.Lock()


_opened: Final = _Opened()


def attach(server: HPS, name: str | None = None) -> str:
    """Register a server under a name for the layers of this process.

    Args:
        server: the caller still owns it and closes it.
        name: any string; an earlier registration of it is replaced. Default: the name that the server has, or a new one.

    Returns:
        The name, to be given to layers in place of a path.
    """
    if name is None:
        found = [known for known, one in list(_known.items()) if one is server]
        fresh = (name for number in _names if (name := f"attached-{number}") not in _known)
        name = found[0] if found else next(fresh)
    _known[name] = server
    return name


def known(place: str) -> HPS | None:
    """Return the server of a path or name if it is open."""
    return _known.get(place)


def server_of(place: str) -> HPS:
    """Return the server of a path or name. Opens a new path, which takes as long as loading its models.

    Raises:
        NotReadyError: neither a file nor a registered name; or another thread is still opening it.
        HPSError: the server cannot be opened; the next call tries again.
    """
    server = _known.get(place)
    return server if server is not None else _open(place)


def _open(place: str) -> HPS:
    with _opened.locked(f"opening {place!r} for a layer"):
        if (server := _known.get(place)) is not None:
            return server
        if not os.path.exists(place):
            raise NotReadyError(
                f"looking up through a layer: got {place!r}, which is neither a file nor the name of a server that this "
                f"process has attached ({', '.join(map(repr, _known)) or 'there is none'}); for a name, call "
                f"hps.torch.attach(server, {place!r}) first"
            )
        path = os.path.realpath(place)
        if path not in _opened.servers:
            disown_in_children(_opened)
            _opened.servers[path] = HPS(path)
        _known[place] = server = _opened.servers[path]
        return server


def close() -> None:
    """Close the servers opened from paths and forget all names. Attached servers stay open; a path is reopened on demand."""
    with _opened.locked("closing the servers of layers"):
        servers = list(_opened.servers.values())
        _opened.servers.clear()
        _known.clear()
    for server in servers:
        server.close()
