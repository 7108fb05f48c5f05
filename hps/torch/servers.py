"""Finds the server of a layer: a parameter server of this process, or one over HTTP.

A layer, an exported program or a scripted module contains the location of its server as a string: the path of a configuration,
an address, or a name. A path is opened once per process, at the first lookup, and stays open until `close` or the exit of the
process; layers with the same addresses share a client. A name is of a server or client that was registered with `attach`.
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
"""The server of a new layer: a path, a name, addresses, a server or a client."""

_OPENING_TIMEOUT_S = 3600.0  # large models load slowly
_registered: Final[dict[str, HPS | RemoteTables]] = {}  # by location, with the options of layers


class _Opened:
    """Servers by real path, and clients by addresses. *Thread-safe.* A forked child opens its own servers."""

    def __init__(self) -> None:
        self.servers: dict[str, HPS] = {}
        self.clients: dict[str, Client] = {}  # reconnect by themselves after a fork
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
        for name in [name for name, server in _registered.items() if server in self.servers.values()]:
            del _registered[name]
        self.servers, self._lock = {}, threading.Lock()


_opened: Final = _Opened()


def attach(server: HPS | Client, name: str | None = None) -> str:
    """Register a server, or a client of one, under a name for the layers of this process.

    Args:
        server: the caller still owns it and closes it.
        name: any string; replaces an earlier registration. Default: its present name; or the path that the server was opened
            from, if no other server has it; or a new name. For a client, its addresses.

    Returns:
        The name, which layers take in place of a path. Another process that restores such a layer opens a path or address by
        itself, and must attach a server to any other name.
    """
    entry: HPS | RemoteTables = server if isinstance(server, HPS) else RemoteTables(server)
    if name is None:
        name = _name_of(server)
    _registered[name] = entry
    for derived in [key for key in list(_registered) if key != name and split_options(key)[0] == name]:
        _registered.pop(derived, None)
    return name


def _name_of(server: HPS | Client) -> str:
    if isinstance(server, Client):
        return ",".join(server.addresses)
    for name, registered in list(_registered.items()):
        if registered is server:
            return name
    existing = _registered.get(server.path)
    if server.path and (existing is None or existing.closed):
        return server.path
    return f"attached-{secrets.token_hex(8)}"  # random, so that another process cannot mistake it for its own server


def location_of(server: Server, timeout_s: float | None = None, fallback: float | None = None) -> str:
    """Return the location of a server, as layers contain it.

    Raises:
        InvalidInputError: an address or option is wrong, or the options are for a server of this process.
    """
    options = Options(timeout_s, fallback).check()
    if isinstance(server, HPS | Client):
        if options != Options() and isinstance(server, HPS):
            raise _unused_options_error()
        return attach(server) + options.text()
    is_sequence = isinstance(server, Sequence) and not isinstance(server, str)
    location, own_options = split_options(",".join(server) if is_sequence else str(server))
    if is_sequence or is_address(location):
        read_addresses(location.split(","))
    return location + own_options.changed(options).text()


def _unused_options_error() -> InvalidInputError:
    return InvalidInputError(
        "making a layer: got timeout_s or fallback for a server in this process, expected them only with an address"
    )


def open_server(location: str) -> HPS | None:
    """Return the server of a path or name, if it is in this process and open."""
    server = _registered.get(location)
    return server if isinstance(server, HPS) and not server.closed else None


def server_of(location: str) -> HPS | RemoteTables:
    """Return the server of a location. Opens a new path, which takes as long as loading its models.

    Raises:
        NotReadyError: neither a file, an address nor a registered name; or another thread is still opening it.
        InvalidInputError: an address is wrong.
        HPSError: the server cannot be opened; the next call tries again.
    """
    server = _registered.get(location)
    return server if server is not None and not server.closed else _open(location)


def _open(location: str) -> HPS | RemoteTables:
    with _opened.locked(f"opening {location!r} for a layer"):
        base, options = split_options(location)
        server = _open_base(base)
        if options != Options():
            if isinstance(server, HPS):
                raise _unused_options_error()
            server = RemoteTables(server.client, options)
        _registered[location] = server
        return server


def _open_base(location: str) -> HPS | RemoteTables:
    """Return the server of a location without options."""
    server = _registered.get(location)
    if server is not None and not server.closed:
        return server
    disown_in_children(_opened)
    if is_address(location):
        client = _opened.clients.get(location)
        if client is None or client.closed:
            client = _opened.clients[location] = connect(location.split(","))
        _registered[location] = RemoteTables(client)
        return _registered[location]
    if not os.path.exists(location):
        if server is not None:  # closed: its calls raise
            return server
        raise NotReadyError(
            f"looking up through a layer: got {location!r}, which is neither a file nor the name of a server that this "
            f"process has attached ({', '.join(map(repr, _registered)) or 'there is none'}); for a name, call "
            f"hps.torch.attach(server, {location!r}) first"
        )
    path = os.path.realpath(location)
    if path not in _opened.servers:
        _opened.servers[path] = HPS(path)
    _registered[location] = _opened.servers[path]
    return _registered[location]


def close() -> None:
    """Close the servers of paths and the clients of addresses, and forget all names.

    Attached servers stay open; a path or address is reopened on demand.
    """
    with _opened.locked("closing the servers of layers"):
        opened: list[HPS | Client] = [*_opened.servers.values(), *_opened.clients.values()]
        _opened.servers.clear()
        _opened.clients.clear()
        _registered.clear()
    for server in opened:
        server.close()
