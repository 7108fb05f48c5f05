"""Connections to Redis nodes: opened with TLS and a password within a deadline, kept in a bounded pool a node."""

import os
import socket
import ssl
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from hps.databases.redis.commands import Buffer
from hps.errors import ConfigError, DatabaseError, DatabaseTimeoutError

_RECEIVE_BYTES: Final = 256 << 10
_SEND_BYTES: Final = 256 << 10
_KEPT_BYTES: Final = 4 << 20  # a larger buffer, of a rare large reply or vector, is let go after the call


class Node(NamedTuple):
    """Where a Redis process listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class Credentials:
    """How to connect. Immutable.

    Attributes:
        user_name: of the ACL; `default` or empty stands for Redis' default user.
        password: empty where none is asked for.
        tls: None for plain connections.
        server_name: the name that the certificate must be for; it is also sent (SNI).
    """

    user_name: str = "default"
    password: str = field(default="", repr=False)
    tls: ssl.SSLContext | None = None
    server_name: str = ""


class Connection:
    """An open connection that does not block, with what has arrived on it. *One per thread.*

    Attributes:
        node: the other end.
        reused: whether it has been idle since it was opened, and may have been ended by the server meanwhile.
        received: bytes that have arrived; [start, end) of them are not yet read.
        outgoing: where requests are written before they are sent.
    """

    __slots__ = ("_socket", "end", "node", "outgoing", "received", "reused", "start")

    def __init__(self, node: Node, connected: socket.socket) -> None:
        connected.setblocking(False)
        self.node = node
        self.reused = False
        self._socket = connected
        self.received = Buffer(_RECEIVE_BYTES)
        self.start = self.end = 0
        self.outgoing = Buffer(_SEND_BYTES)

    def fileno(self) -> int:
        """The descriptor to poll."""
        return self._socket.fileno()

    def send(self, data: memoryview) -> int:
        """Send what the system takes now; returns how many bytes that was.

        Raises:
            OSError: the connection is broken.
        """
        try:
            return self._socket.send(data)
        except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
            return 0

    def receive(self) -> bool:
        """Take what has arrived; returns whether more may be there.

        Raises:
            OSError: the connection is broken, or the other end closed it.
        """
        if self.start == self.end:
            self.start = self.end = 0
        elif self.start and self.received.array.size - self.end < self.received.array.size // 2:
            self.received.array[: self.end - self.start] = self.received.array[self.start : self.end]  # they may overlap
            self.end -= self.start
            self.start = 0
        if self.end == self.received.array.size:
            self.received.grow(self.end + 1, self.end)
        room = self.received.array.size - self.end
        try:
            count = self._socket.recv_into(self.received.view[self.end :], room)
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return False
        if count == 0:
            raise ConnectionResetError("it closed the connection")
        self.end += count
        return count == room or isinstance(self._socket, ssl.SSLSocket)

    def shrink(self) -> None:
        """Let large buffers go; nothing may be in them."""
        if self.received.array.size > _KEPT_BYTES:
            self.received = Buffer(_RECEIVE_BYTES)
        if self.outgoing.array.size > _KEPT_BYTES:
            self.outgoing = Buffer(_SEND_BYTES)

    def close(self) -> None:
        """Close it, whatever is under way."""
        with suppress(OSError):
            self._socket.close()


def connect(node: Node, credentials: Credentials, timeout_s: float) -> Connection:
    """Open a connection, with TLS where `credentials` want it; who is connecting has not been said yet.

    Raises:
        DatabaseTimeoutError: it took longer than `timeout_s`.
        DatabaseError: nothing listens there, or TLS failed.
    """
    deadline = time.monotonic() + timeout_s
    plain: socket.socket | None = None
    try:
        plain = _dial(node, deadline)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if credentials.tls is None:
            return Connection(node, plain)
        plain.settimeout(max(0.001, deadline - time.monotonic()))
        return Connection(node, credentials.tls.wrap_socket(plain, server_hostname=credentials.server_name or None))
    except TimeoutError as error:
        _close(plain)
        raise DatabaseTimeoutError(f"redis {node}: connecting took longer than {timeout_s:.3g} s; is it there?") from error
    except ssl.SSLCertVerificationError as error:
        _close(plain)
        raise DatabaseError(
            f"redis {node}: its certificate was refused ({error.verify_message}); wanted one for the name "
            f"{credentials.server_name!r} (tls_server_name_identification) that tls_ca_certificate vouches for"
        ) from error
    except OSError as error:
        _close(plain)
        what = "TLS failed" if isinstance(error, ssl.SSLError) else "connecting failed"
        raise DatabaseError(f"redis {node}: {what} ({error}); see that it runs there and that enable_tls fits") from error
    except BaseException:
        _close(plain)
        raise


def _dial(node: Node, deadline: float) -> socket.socket:
    failure: OSError = OSError(f"the name {node.host} has no address")
    for family, kind, protocol, _, address in _resolve(node, deadline):
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        dialled = socket.socket(family, kind, protocol)
        try:
            dialled.settimeout(left)
            dialled.connect(address)
        except OSError as error:
            dialled.close()
            failure = error
        else:
            return dialled
    raise failure


def _resolve(node: Node, deadline: float) -> list[tuple[int, int, int, str, tuple[object, ...]]]:
    """Look a name up in a thread of its own, since the system's resolver has no timeout."""
    try:
        return socket.getaddrinfo(node.host, node.port, 0, socket.SOCK_STREAM, 0, socket.AI_NUMERICHOST)  # type: ignore[return-value]
    except socket.gaierror:
        pass  # a name
    found: list[list[tuple[int, int, int, str, tuple[object, ...]]]] = []
    failed: list[OSError] = []

    def look_up() -> None:
        try:
            found.append(socket.getaddrinfo(node.host, node.port, 0, socket.SOCK_STREAM))  # type: ignore[arg-type]
        except OSError as error:
            failed.append(error)

    thread = threading.Thread(target=look_up, name="hps-redis-resolve", daemon=True)
    thread.start()
    thread.join(max(0.0, deadline - time.monotonic()))
    if failed:
        raise failed[0]
    if not found:
        raise TimeoutError
    return found[0]


def _close(plain: socket.socket | None) -> None:
    if plain is not None:
        plain.close()


def tls_context(ca_certificate: str, client_certificate: str, client_key: str) -> ssl.SSLContext:
    """Make the context of TLS connections.

    Args:
        ca_certificate: file, or directory, of the authorities that vouch for the servers.
        client_certificate: file; none is shown where neither it nor the key exists.
        client_key: file.

    Raises:
        ConfigError: a file is missing or cannot be read as what it should be.
    """
    problems = []
    context = ssl.create_default_context()
    authorities = Path(ca_certificate)
    try:
        context = ssl.create_default_context(
            cafile=None if authorities.is_dir() else os.fspath(authorities),
            capath=os.fspath(authorities) if authorities.is_dir() else None,
        )
    except (OSError, ssl.SSLError) as error:
        problems.append(f"tls_ca_certificate: {ca_certificate}: {error}; wanted a PEM file or a directory of them")
    if Path(client_certificate).exists() or Path(client_key).exists():
        try:
            context.load_cert_chain(client_certificate, client_key)
        except (OSError, ssl.SSLError) as error:
            problems.append(f"tls_client_certificate, tls_client_key: {client_certificate}, {client_key}: {error}")
    if problems:
        raise ConfigError("volatile_db", problems)
    return context
