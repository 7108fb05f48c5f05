"""Resolves the string that a layer holds to what answers it: a parameter server of this process, or a server over HTTP.

A layer, an exported program or a scripted module holds only a string: the path of a configuration, an address, or a name. A
path is opened once per process, at the first lookup, and stays open until `close` or the exit of the process; layers with the
same addresses share a client. A name stands for a server or client that the process made itself and registered with `attach`.
"""

import os
import secrets
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final, TypeAlias

from hps.client.addresses import read_addresses
from hps.client.client import Client, connect
from hps.client.remote_tables import Options, RemoteTables, is_address, split_options
from hps.errors import InvalidInputError, NotReadyError
from hps.ground.threads.lifetimes import disown_in_children
from hps.parameter_server import HPS

Server: TypeAlias = str | Sequence[str] | HPS | Client
"""What a layer is made with: a path, a name, addresses, a server or a client."""

_OPENING_TIMEOUT_S = 3600.0  # large models load slowly
_known: Final[dict[str, HPS | RemoteTables]] = {}  # by path, address or name, with the options of layers


class _Opened:
    """Holds what was opened: servers by real path, clients by addresses. *Thread-safe.* A forked child opens servers
    of its own.
    """

    def __init__(self) -> None:
        self.servers: dict[str, HPS] = {}
        self.clients: dict[str, Client] = {}  # follow a fork by themselves
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


def attach(server: HPS | Client, name: str | None = None) -> str:
    """Register a server, or a client of one, under a name for the layers of this process.

    Args:
        server: the caller still owns it and closes it.
        name: any string; an earlier registration of it is replaced. Default: the name that it has; else the path that the
            server was opened from, unless another one has it, or a new name; or the addresses of the client.

    Returns:
        The name, to be given to layers in place of a path. Another process that restores such a layer opens a path or an
        address by itself, and must attach a server to any other name.
    """
    held: HPS | RemoteTables = server if isinstance(server, HPS) else RemoteTables(server)
    if name is None:
        name = _name_of(server)
    _known[name] = held
    for derived in [known for known in list(_known) if known != name and split_options(known)[0] == name]:
        _known.pop(derived, None)
    return name


def _name_of(server: HPS | Client) -> str:
    if isinstance(server, Client):
        return ",".join(server.addresses)
    for name, one in list(_known.items()):
        if one is server:
            return name
    other = _known.get(server.path)
    if server.path and (other is None or other.closed):
        return server.path
    return f"attached-{secrets.token_hex(8)}"  # no other process may use it for a server of its own


def place_of(server: Server, timeout_s: float | None = None, fallback: float | None = None) -> str:
    """Return the string under which a layer finds its server.

    Raises:
        InvalidInputError: an address or option is wrong, or the options are for a server of this process.
    """
    options = Options(timeout_s, fallback).check()
    if isinstance(server, HPS | Client):
        if options != Options() and isinstance(server, HPS):
            raise _options_of_no_use()
        return attach(server) + options.text()
    several = isinstance(server, Sequence) and not isinstance(server, str)
    place, own = split_options(",".join(server) if several else str(server))
    if several or is_address(place):
        read_addresses(place.split(","))
    return place + own.changed(options).text()


def _options_of_no_use() -> InvalidInputError:
    return InvalidInputError(
        "making a layer: got timeout_s or fallback for a server in this process, expected them with the address of another one"
    )


def known(place: str) -> HPS | None:
    """Return the server of a path or name if it is in this process and open."""
    server = _known.get(place)
    return server if isinstance(server, HPS) and not server.closed else None


def server_of(place: str) -> HPS | RemoteTables:
    """Return the server of a path, address or name. Opens a new path, which takes as long as loading its models.

    Raises:
        NotReadyError: neither a file, an address nor a registered name; or another thread is still opening it.
        InvalidInputError: an address is wrong.
        HPSError: the server cannot be opened; the next call tries again.
    """
    server = _known.get(place)
    return server if server is not None and not server.closed else _open(place)


def _open(place: str) -> HPS | RemoteTables:
    with _opened.locked(f"opening {place!r} for a layer"):
        base, options = split_options(place)
        server = _of_base(base)
        if options != Options():
            if isinstance(server, HPS):
                raise _options_of_no_use()
            server = RemoteTables(server.client, options)
        _known[place] = server
        return server


def _of_base(place: str) -> HPS | RemoteTables:
    """Return the server of a place without options."""
    server = _known.get(place)
    if server is not None and not server.closed:
        return server
    disown_in_children(_opened)
    if is_address(place):
        client = _opened.clients.get(place)
        if client is None or client.closed:
            client = _opened.clients[place] = connect(place.split(","))
        _known[place] = RemoteTables(client)
        return _known[place]
    if not os.path.exists(place):
        if server is not None:  # closed, which its calls say
            return server
        raise NotReadyError(
            f"looking up through a layer: got {place!r}, which is neither a file nor the name of a server that this "
            f"process has attached ({', '.join(map(repr, _known)) or 'there is none'}); for a name, call "
            f"hps.torch.attach(server, {place!r}) first"
        )
    path = os.path.realpath(place)
    if path not in _opened.servers:
        _opened.servers[path] = HPS(path)
    _known[place] = _opened.servers[path]
    return _known[place]


def close() -> None:
    """Close the servers opened from paths, and the clients opened from addresses, and forget all names.

    Attached servers stay open; a path or address is opened again on demand.
    """
    with _opened.locked("closing the servers of layers"):
        opened: list[HPS | Client] = [*_opened.servers.values(), *_opened.clients.values()]
        _opened.servers.clear()
        _opened.clients.clear()
        _known.clear()
    for one in opened:
        one.close()
