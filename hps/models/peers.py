"""Reads ranges of row files from other servers of the same models, before their model source.

A file is asked for by the fingerprint of its content (`GET /v1/row-files/<content>`, `serve/engine/routes/row_files.py`). Each
name of `model_source.peers.urls` stands for all of its addresses, as that of a headless service of Kubernetes does, also for
this server itself, which answers its own id with 421. A server answers only from bytes that it has: no request causes another.
A peer that fails is left alone for a while. Nothing here is trusted: the reader compares each page with its checksum.
"""

import logging
import os
import random
import secrets
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final
from urllib.parse import SplitResult, urlsplit

from hps.configuration.tiers import PeersConfig
from hps.errors import HPSError, RemoteError
from hps.ground.http1 import AnswerHead, final_head
from hps.ground.log_limits import OnceAMinute
from hps.ground.threads.workers import new_thread
from hps.stores.base import FilePeers, PeerRead

_log = logging.getLogger(__name__)
_log.addFilter(OnceAMinute())

_SALT: Final = secrets.token_hex(8)
SERVER_ID_HEADER: Final = "hps-server"
"""Header of a request with the id of the process that sends it."""

_MOST_PEERS: Final = 2  # asked for a range
_MOST_IDLE: Final = 8  # connections to a peer
_MOST_LACKS: Final = 256  # files that a peer is known not to have
_MOST_DRAINED: Final = 65_536  # bytes of an error, read to keep its connection
_RESOLVE_S: Final = 30.0  # between two resolutions of names
_FIRST_RESOLVE_S: Final = 1.0  # wait for the first one
_SLOWEST: Final = 1 << 20  # bytes a second
# How long a peer is not asked:
_LACKS_S: Final = 5.0  # for a file that it does not have
_BUSY_S, _LONGEST_BUSY_S = 1.0, 30.0  # if it says so, without and with Retry-After
_FAILED_S: Final = 15.0  # it was slow, gone, or answered something else
_REFUSED_S: Final = 60.0  # it refuses the token
_DAMAGED_S: Final = 300.0  # it sent wrong bytes

Address = tuple[int, int, int, tuple[Any, ...]]
"""Family, type, protocol and address of a socket."""


def server_id() -> str:
    """Return the id of this process, which no other one has, also no fork."""
    return f"{_SALT}-{os.getpid()}"


class _LeftError(HPSError):
    """A peer did not answer with the range, and is left alone for some seconds."""

    def __init__(self, why: str, seconds: float) -> None:
        super().__init__(why)
        self.seconds = seconds


class _LacksError(HPSError):
    """A peer does not have the range."""


class _BusyError(_LeftError):
    """A peer is busy, which is no failure."""


@dataclass(eq=False)
class _Peer:
    """One address of a server. *Thread-safe*: each member is read and replaced at once."""

    url: SplitResult
    address: Address
    idle: deque[socket.socket] = field(default_factory=deque)
    left_until: float = 0.0
    lacks: dict[str, float] = field(default_factory=dict)  # by content, until when
    running: int = 0  # requests; about
    is_self: bool = False

    @cached_property
    def name(self) -> str:
        host, port = self.address[3][:2]
        return f"{self.url.scheme}://{f'[{host}]' if ':' in str(host) else host}:{port}"

    def may_have(self, content: str, now: float) -> bool:
        return not self.is_self and self.left_until <= now and self.lacks.get(content, 0.0) <= now

    def note_lack(self, content: str, until: float) -> None:
        if len(self.lacks) >= _MOST_LACKS:
            self.lacks = {}
        self.lacks[content] = until

    def close(self) -> None:
        while self.idle:
            self.idle.pop().close()


class Peers(FilePeers):
    """The servers of `model_source.peers`. *Thread-safe.*

    Args:
        clock: returns monotonic seconds.
        resolve: returns the addresses of a host and port.
    """

    def __init__(
        self,
        settings: PeersConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
        resolve: Callable[[str, int], list[Address]] | None = None,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._resolve = resolve or addresses_of
        self._urls = [urlsplit(url) for url in settings.urls]
        self._peers: dict[tuple[str, Address], _Peer] = {}  # replaced, never changed
        self._resolving = threading.Lock()
        self._resolved = threading.Event()
        self._resolve_at = 0.0

    def read(self, content: str, size_bytes: int, offset: int, buffer: memoryview) -> PeerRead:
        failures = 0
        if not content or not self._urls or size_bytes < self._settings.least_bytes:
            return PeerRead("", 0)
        for peer in self._candidates(content):
            peer.running += 1
            try:
                self._ask(peer, content, size_bytes, offset, buffer)
            except _LacksError:
                peer.note_lack(content, self._clock() + _LACKS_S)
            except _BusyError as busy:
                peer.left_until = self._clock() + busy.seconds
            except _LeftError as error:
                failures += 1
                self._leave(peer, str(error), error.seconds)
            else:
                return PeerRead(peer.name, failures)
            finally:
                peer.running -= 1
        return PeerRead("", failures)

    def report_damage(self, peer: str, content: str) -> None:
        for known in self._peers.values():
            if known.name == peer:
                self._leave(known, f"it sent bytes of the file {content} that contradict their checksum", _DAMAGED_S)

    def _leave(self, peer: _Peer, why: str, seconds: float) -> None:
        peer.left_until = self._clock() + seconds
        peer.close()
        _log.warning("The peer %s is not asked for row files for %g s: %s.", peer.name, seconds, why)

    # -- addresses ----------------------------------------------------------------------------------------------------

    def _candidates(self, content: str) -> list[_Peer]:
        """Return the peers to ask for a range: the least busy ones."""
        self._keep_resolved()
        now = self._clock()
        found = [peer for peer in self._peers.values() if peer.may_have(content, now)]
        random.shuffle(found)
        return sorted(found, key=lambda peer: peer.running)[:_MOST_PEERS]

    def _keep_resolved(self) -> None:
        if self._clock() >= self._resolve_at and self._resolving.acquire(blocking=False):
            self._resolve_at = self._clock() + _RESOLVE_S
            new_thread("row-file-peers", self._resolve_all, lasting=False).start()
        if not self._resolved.is_set():
            self._resolved.wait(_FIRST_RESOLVE_S)

    def _resolve_all(self) -> None:
        try:
            found: dict[tuple[str, Address], _Peer] = {}
            for url in self._urls:
                try:
                    addresses = self._resolve(url.hostname or "", url.port or (443 if url.scheme == "https" else 80))
                except OSError as error:  # those that are known stay
                    _log.warning("looking up the peers %s: %s", url.geturl(), error)
                    found |= {key: peer for key, peer in self._peers.items() if peer.url == url}
                    continue
                for address in addresses:
                    key = url.netloc, address
                    found[key] = self._peers.get(key) or _Peer(url, address)
            gone = [peer for key, peer in self._peers.items() if key not in found]
            self._peers = found
            for peer in gone:
                peer.close()
        finally:
            self._resolved.set()
            self._resolving.release()

    # -- requests -----------------------------------------------------------------------------------------------------

    def _ask(self, peer: _Peer, content: str, size_bytes: int, offset: int, buffer: memoryview) -> None:
        """Fill the buffer from a peer.

        Raises:
            _LacksError, _LeftError: that was not possible.
        """
        deadline = self._clock() + self._settings.timeout_s + len(buffer) / _SLOWEST
        while True:
            try:
                connection, reused = peer.idle.pop(), True
            except IndexError:
                connection, reused = self._connected(peer, deadline), False
            exchange = _Exchange(connection, self._clock, deadline)
            try:
                exchange.send(self._request(peer, content, offset, offset + len(buffer)))
                head = exchange.receive_head()
                if head.status != 206:
                    exchange.drain()
                    raise _refusal(peer, head)
                expected = f"bytes {offset}-{offset + len(buffer) - 1}/{size_bytes}"
                got = head.headers.get(b"content-range", b"").decode("latin-1")
                if got != expected or head.length != len(buffer):
                    raise _LeftError(f"got {got!r} of {head.length} bytes, expected {expected!r}", _FAILED_S)
                exchange.receive_into(buffer)
            except (OSError, RemoteError) as error:  # a timeout is an OSError
                connection.close()
                if reused and not exchange.answered and not isinstance(error, TimeoutError):
                    continue  # it has closed the idle connection
                raise _LeftError(str(error) or type(error).__name__, _FAILED_S) from error
            except HPSError:
                self._keep(peer, exchange)
                raise
            self._keep(peer, exchange)
            return

    def _keep(self, peer: _Peer, exchange: "_Exchange") -> None:
        if exchange.reusable and len(peer.idle) < _MOST_IDLE:
            peer.idle.append(exchange.connection)
        else:
            exchange.connection.close()

    def _request(self, peer: _Peer, content: str, start: int, stop: int) -> bytes:
        lines = [
            f"GET /v1/row-files/{content} HTTP/1.1",
            f"host: {peer.url.netloc}",
            f"range: bytes={start}-{stop - 1}",
            f"{SERVER_ID_HEADER}: {server_id()}",
        ]
        if self._settings.token:
            lines.append(f"authorization: Bearer {self._settings.token}")
        return "\r\n".join([*lines, "", ""]).encode("latin-1")

    def _connected(self, peer: _Peer, deadline: float) -> socket.socket:
        family, kind, protocol, address = peer.address
        connection = socket.socket(family, kind, protocol)
        try:
            connection.settimeout(max(0.001, deadline - self._clock()))
            connection.connect(address)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if peer.url.scheme == "https":
                connection = self._tls.wrap_socket(connection, server_hostname=peer.url.hostname)
        except OSError as error:
            connection.close()
            raise _LeftError(f"connecting: {error or type(error).__name__}", _FAILED_S) from error
        return connection

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=self._settings.tls_ca_path or None)


class _Exchange:
    """One request over a connection, and its answer. *One thread.*"""

    def __init__(self, connection: socket.socket, clock: Callable[[], float], deadline: float) -> None:
        self.connection = connection
        self.answered = self.reusable = False
        self._clock, self._deadline = clock, deadline
        self._head: AnswerHead | None = None
        self._rest = b""  # of the body, received with the head

    def _set_timeout(self) -> None:
        left = self._deadline - self._clock()
        if left <= 0:
            raise TimeoutError("no answer in time")
        self.connection.settimeout(left)

    def send(self, request: bytes) -> None:
        self._set_timeout()
        self.connection.sendall(request)

    def receive_head(self) -> AnswerHead:
        received = bytearray()
        while (found := final_head(received, len(received))) is None:
            self._set_timeout()
            piece = self.connection.recv(4096)
            if not piece:
                raise RemoteError("it closed the connection")
            self.answered = True
            received += piece
        self._head, self._rest = found.head, bytes(received[found.end :])
        return found.head

    def receive_into(self, buffer: memoryview) -> None:
        """Receive a body of the length of the buffer."""
        if len(self._rest) > len(buffer):
            raise RemoteError("it sent more than its head says")
        buffer[: len(self._rest)] = self._rest
        at = len(self._rest)
        while at < len(buffer):
            self._set_timeout()
            count = self.connection.recv_into(buffer[at:])
            if not count:
                raise RemoteError(f"it closed the connection after {at:,} of {len(buffer):,} bytes")
            at += count
        self.reusable = self._head is not None and self._head.keeps_alive

    def drain(self) -> None:
        """Receive a short body that is not wanted, so that the connection can be used again."""
        if self._head is not None and 0 <= self._head.length <= _MOST_DRAINED:
            self.receive_into(memoryview(bytearray(self._head.length)))


def _refusal(peer: _Peer, head: AnswerHead) -> HPSError:
    """Return the error for an answer other than the range."""
    if head.status == 404:
        return _LacksError()
    if head.status == 421:
        peer.is_self = True
        return _LacksError()
    if head.status in (429, 503):
        given = head.headers.get(b"retry-after", b"")
        return _BusyError("busy", min(float(given), _LONGEST_BUSY_S) if given.isdigit() else _BUSY_S)
    if head.status in (401, 403):
        return _LeftError(
            f"it answered {head.status}: model_source.peers.token (HPS_PEERS_TOKEN) lacks the right `files` there", _REFUSED_S
        )
    return _LeftError(f"it answered {head.status}", _FAILED_S)


def addresses_of(host: str, port: int) -> list[Address]:
    """Resolve a name to all of its addresses."""
    return [
        (family, kind, protocol, address)
        for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    ]
