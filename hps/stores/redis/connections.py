"""redis-py's connections with a parser for bulk replies and one deadline per call."""

import os
import select
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from queue import Empty, LifoQueue
from typing import Any, Final
from weakref import WeakValueDictionary

import hiredis
from redis import exceptions
from redis.cluster import ClusterNode
from redis.connection import BlockingConnectionPool, Connection, DefaultParser
from redis.credentials import CredentialProvider

from hps.errors import ConfigError, DatabaseError
from hps.ground.threads.workers import call_within
from hps.stores.redis.requests import Buffer, FetchRows, GetMark, Request

_RECEIVE_BYTES: Final = 256 << 10
_SEND_BYTES: Final = 256 << 10
_REUSED_BYTES: Final = 4 << 20  # larger buffers, for rare large replies or vectors, are released after the call
_LEAST_S: Final = 0.001  # a timeout of 0 would mean a socket that does not block
_MINUS: Final = ord("-")
_MORE: Final = object()  # the reply is incomplete
_ASKING: Final = b"*1\r\n$6\r\nASKING\r\n"
# Bytes in flight per connection: several typical requests, so that the server is never idle. It is also small enough for the
# system's buffers: otherwise both sides could block, each on a write that the other does not read.
_WINDOW: Final = 2 << 20
_MESSAGE_BYTES: Final = 64 << 10  # small requests are sent together

_call = threading.local()


@contextmanager
def until(deadline: float) -> Iterator[None]:
    """Bound the connection calls of this thread by a deadline on the monotonic clock."""
    outer = getattr(_call, "deadline", float("inf"))
    _call.deadline = min(deadline, outer)
    try:
        yield
    finally:
        _call.deadline = outer


def remaining_s() -> float:
    deadline: float = getattr(_call, "deadline", float("inf"))
    return deadline - time.monotonic()


class PasswordFile(CredentialProvider):
    """Reads the password of every new connection from a file, so that it can be changed without a restart. *Immutable.*"""

    def __init__(self, user_name: str | None, path: str) -> None:
        self._user_name = user_name
        self._path = path

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        try:
            password = Path(self._path).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise DatabaseError(f"its password cannot be read: {self._path}: {error} (password_path)") from error
        return (password,) if self._user_name is None else (self._user_name, password)


class IdleConnections(LifoQueue):  # type: ignore[type-arg]
    """A queue of idle connections for redis-py's pools, with waits bounded by the call's deadline. *Thread-safe.*"""

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Take the most recently used connection, so that surplus ones stay idle."""
        try:
            return super().get(block, max(0.0, remaining_s()))
        except Empty:
            raise exceptions.TimeoutError(f"all {self.maxsize} connections stayed busy; raise num_node_connections") from None


class ReplyParser:
    """The parser of one connection: hiredis for most replies, the bulk codec for vectors. *One per connection.*

    Both read from one buffer, so that replies of either kind may follow each other.

    Args:
        read_timeout_s: maximum silence of a node that owes a reply.

    Attributes:
        heard: whether any byte has arrived since this was set to False.
        waiting_since: monotonic time of the last byte sent or received.
    """

    def __init__(self, read_timeout_s: float) -> None:
        self.received = False
        self.waiting_since = 0.0
        self._read_timeout_s = read_timeout_s
        self._socket: socket.socket | None = None
        self._reader: Any = None
        self._buffer = Buffer(_RECEIVE_BYTES)
        self._start = self._end = 0  # bytes that have arrived and are not yet read

    def on_connect(self, connection: "BulkConnection") -> None:
        self._socket = connection.socket
        self._reader = hiredis.Reader(exceptions.InvalidResponse, DefaultParser.parse_error, notEnoughData=_MORE)
        self._start = self._end = 0

    def on_disconnect(self) -> None:
        """As redis-py's parsers. If another thread is reading, its next wait fails."""
        self._socket = None

    def can_read(self, timeout: float = 0) -> bool:
        """Return whether an idle connection has data or was closed; redis-py's pool then reopens it."""
        if self._socket is None:
            return False
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return self._start < self._end or bool(poll.poll(1000 * timeout))

    def read_response(self, **_: object) -> Any:
        """As redis-py's parsers, for its own commands: read the only outstanding reply."""
        return self.read(None, last=True)

    def read(self, request: Request | None, *, last: bool) -> Any:
        """Read the next reply. An error of Redis is returned, as redis-py expects, or raised if it ends the connection.

        Args:
            request: the request, if it determines how to read the reply.
            last: whether no other reply may follow.

        Raises:
            redis.TimeoutError: the node was silent for too long, or the deadline has passed.
            redis.ConnectionError: the connection ended, or Redis reports that it cannot be used.
            redis.InvalidResponse: the bytes are no reply, or more than one arrived.
            DatabaseError: the reply does not contain the requested vectors.
        """
        if self._start == self._end:
            self._receive()
        if type(request) is FetchRows and self._buffer.bytes[self._start] != _MINUS:
            reply = self._read_rows(request)
        elif type(request) is GetMark and self._buffer.bytes.startswith(request.likely, self._start, self._end):
            self._start += len(request.likely)
            reply = request.expected
        else:
            reply = self._read_any(last)
        if last and (self._start < self._end or self._reader.has_data()):
            raise exceptions.InvalidResponse("it sent unrequested bytes")
        if isinstance(reply, exceptions.ConnectionError):
            raise reply
        return reply

    def shrink(self) -> None:
        if len(self._buffer.bytes) > _REUSED_BYTES:
            self._buffer = Buffer(_RECEIVE_BYTES)

    def _read_rows(self, rows: FetchRows) -> Any:
        while True:
            self._start = rows.read(self._buffer.array, self._start, self._end)
            if rows.reply is not None:
                return rows.reply
            self._receive()

    def _read_any(self, last: bool) -> Any:
        reply: Any = _MORE
        while reply is _MORE:
            if self._start == self._end:
                self._receive()
            stop = self._end
            if not last:  # hiredis must not consume bytes of the next reply, and every reply ends with a line feed
                stop = self._buffer.bytes.find(b"\n", self._start, self._end) + 1 or self._end
            self._reader.feed(self._buffer.bytes, self._start, stop - self._start)
            self._start = stop
            reply = self._reader.gets()
        return reply

    def _receive(self) -> None:
        buffer, unread = self._buffer, self._end - self._start
        if self._start and (unread == 0 or len(buffer.bytes) - self._end < len(buffer.bytes) // 2):
            buffer.bytes[:unread] = buffer.bytes[self._start : self._end]
            self._start, self._end = 0, unread
        if self._end == len(buffer.bytes):
            buffer.grow(self._end + 1, self._end)
        connected = self._socket
        if connected is None:
            raise exceptions.ConnectionError("it was closed by this process")
        rest_s, silent_s = remaining_s(), time.monotonic() - self.waiting_since
        try:
            if rest_s <= 0:
                raise TimeoutError
            connected.settimeout(max(_LEAST_S, min(self._read_timeout_s - silent_s, rest_s)))
            count = connected.recv_into(buffer.view[self._end :])
        except TimeoutError as error:
            if remaining_s() <= 0:
                raise exceptions.TimeoutError("it had not answered everything when the call timed out") from error
            raise exceptions.TimeoutError(f"it was silent for {self._read_timeout_s:.3g} s while it owed a reply") from error
        except OSError as error:
            raise exceptions.ConnectionError(str(error)) from error
        if count == 0:
            raise exceptions.ConnectionError("it closed the connection")
        self._end += count
        self.received = True
        self.waiting_since = time.monotonic()


class BulkConnection(Connection):
    """A connection of redis-py with a `ReplyParser` and with waits bounded by the call. *One per thread.*

    Args:
        tls, server_name: as for `RedisNodes`.
        family: gets the connection for its lifetime.
        resolving: limits the threads that resolve names.
        settings: redis-py's.

    """

    def __init__(
        self,
        *,
        tls: ssl.SSLContext | None,
        server_name: str,
        family: "WeakValueDictionary[int, BulkConnection]",
        resolving: threading.Semaphore,
        **settings: Any,
    ) -> None:
        self.replies = ReplyParser(settings["socket_timeout"])
        self.outgoing = Buffer(_SEND_BYTES)
        self.socket: socket.socket | None = None
        self._tls = tls
        self._server_name = server_name
        self._resolving = resolving
        self._timeouts_s = (settings["socket_connect_timeout"], settings["socket_timeout"])
        super().__init__(parser_class=lambda socket_read_size: self.replies, **settings)  # type: ignore[no-untyped-call]
        family[id(self)] = self

    def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        if self.socket is not None:
            self.socket.settimeout(max(_LEAST_S, min(self._timeouts_s[1], remaining_s())))
        super().send_packed_command(command, check_health)  # type: ignore[no-untyped-call]
        self.replies.waiting_since = time.monotonic()

    def shrink(self) -> None:
        self.replies.shrink()
        if len(self.outgoing.bytes) > _REUSED_BYTES:
            self.outgoing = Buffer(_SEND_BYTES)

    def _connect(self) -> socket.socket:
        # redis-py cannot check a certificate for another name than the address, and the system's resolver has no timeout. So
        # the socket is created here, in the method that redis-py's own connections override.
        timeout_s = max(_LEAST_S, min(self._timeouts_s[0], remaining_s()))
        deadline = time.monotonic() + timeout_s
        try:
            plain = self._dial(deadline)
            self.socket = plain if self._tls is None else self._encrypt(self._tls, plain, deadline)
        except TimeoutError as error:
            raise exceptions.TimeoutError(f"connecting took longer than {timeout_s:.3g} s; see that it runs there") from error
        except ssl.SSLCertVerificationError as error:
            raise DatabaseError(
                f"its certificate was refused ({error.verify_message}); expected one for the name "
                f"{self._server_name!r} (tls_server_name_identification), signed by tls_ca_certificate"
            ) from error
        except OSError as error:
            step = "TLS" if isinstance(error, ssl.SSLError) else "connecting"
            raise DatabaseError(f"{step} failed ({error}); see that it runs there and that enable_tls is right") from error
        return self.socket

    def _dial(self, deadline: float) -> socket.socket:
        name = self.host
        if name.startswith("/"):
            connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                connected.settimeout(max(_LEAST_S, deadline - time.monotonic()))
                connected.connect(name)
            except BaseException:
                connected.close()
                raise
            return connected
        failure: OSError = OSError(f"the name {name} has no address")
        for *_, address in self._resolve(name, deadline):
            self.host = address[0]
            self.socket_connect_timeout = max(_LEAST_S, deadline - time.monotonic())
            try:
                plain: socket.socket = super()._connect()  # type: ignore[no-untyped-call]
            except OSError as error:
                failure = error
            else:
                return plain
            finally:
                self.host = name
        raise failure

    def _encrypt(self, tls: ssl.SSLContext, plain: socket.socket, deadline: float) -> ssl.SSLSocket:
        try:
            plain.settimeout(max(_LEAST_S, deadline - time.monotonic()))
            return tls.wrap_socket(plain, server_hostname=self._server_name or None)
        except BaseException:
            plain.close()
            raise

    def _resolve(self, name: str, deadline: float) -> list[Any]:
        timeout_s = deadline - time.monotonic()
        late = partial(TimeoutError, f"looking up {name}: no answer in {timeout_s:.1f} s")
        resolve = partial(socket.getaddrinfo, name, self.port, 0, socket.SOCK_STREAM)
        return call_within(timeout_s, resolve, self._resolving, late)


class Lane:
    """The requests of one connection, in order. *One per call.*

    Attributes:
        fault: error that broke the connection, or None; requests without a reply were not answered.
        heard: whether anything was received.
    """

    def __init__(self, node: ClusterNode, pool: BlockingConnectionPool, requests: Iterable[Request]) -> None:
        self.node = node
        self.requests = list(requests)
        self.fault: Exception | None = None
        self._pool = pool
        self._connection: Any = pool.get_connection()
        self._replies: ReplyParser = self._connection.replies
        self._replies.received = False
        self._queue = deque(self.requests)
        self._sent: deque[Request] = deque()  # and not yet answered
        self._in_flight = 0  # total weight of `_sent`

    @property
    def busy(self) -> bool:
        return self.fault is None and bool(self._queue or self._sent)

    @property
    def received(self) -> bool:
        return self._replies.received

    def send(self) -> None:
        """Send as many requests as fit into the window."""
        buffer = self._connection.outgoing
        try:
            while self.fault is None and (size := self._write_message(buffer)):
                self._connection.send_packed_command([buffer.view[:size]])
        except (exceptions.RedisError, DatabaseError) as error:
            self.fault = error

    def receive(self) -> None:
        """Read replies: one if more requests wait, else all. An error reply is stored in its request."""
        sent, read = self._sent, self._replies.read
        try:
            while sent and self.fault is None:
                request = sent[0]
                if request.asking:
                    read(None, last=False)
                last = len(sent) == 1
                reply = self._read_transaction(request, last) if request.preceding else read(request, last=last)
                if isinstance(reply, exceptions.ResponseError):
                    request.error = reply
                else:
                    request.reply = reply
                self._in_flight -= request.weight
                sent.popleft()
                if self._queue:
                    return
        except (exceptions.RedisError, DatabaseError) as error:
            self.fault = error

    def _read_transaction(self, request: Request, last: bool) -> Any:
        """Return the first error, else the reply to the last command; None if the transaction was aborted."""
        replies = [self._replies.read(None, last=False) for _ in range(request.preceding)]
        done = self._replies.read(request, last=last)
        replies += done if isinstance(done, list) else [done]
        return next((reply for reply in replies if isinstance(reply, exceptions.ResponseError)), replies[-1])

    def release(self, *, keep: bool) -> None:
        """Return the connection to the pool. It is closed without `keep`, or if a reply is unread."""
        if not keep or self.fault is not None or self._queue or self._sent:
            self._connection.disconnect()
        self._connection.shrink()
        self._pool.release(self._connection)

    def _write_message(self, buffer: Buffer) -> int:
        """Write the requests of the next message; return its size, 0 if the window is full or the queue empty."""
        at = 0
        while self._queue:
            request = self._queue[0]
            full = self._in_flight and self._in_flight + request.weight > _WINDOW
            if full or (at and at + request.size > _MESSAGE_BYTES):
                break
            buffer.grow(at + len(_ASKING) + request.size, at)
            if request.asking:
                buffer.view[at : at + len(_ASKING)] = _ASKING
                at += len(_ASKING)
            at = request.write(buffer, at)
            self._in_flight += request.weight
            self._sent.append(self._queue.popleft())
        return at


def tls_context(config: Any) -> ssl.SSLContext | None:
    """Build the context of TLS connections of a `VolatileDbConfig`; None without TLS.

    The client's certificate is sent if it or its key exists.
    """
    if not config.enable_tls:
        return None
    ca_certificate, client_certificate = config.tls_ca_certificate, config.tls_client_certificate
    client_key, problems = config.tls_client_key, []
    context = ssl.create_default_context()
    authorities = Path(ca_certificate)
    try:
        context = ssl.create_default_context(
            cafile=None if authorities.is_dir() else os.fspath(authorities),
            capath=os.fspath(authorities) if authorities.is_dir() else None,
        )
    except (OSError, ssl.SSLError) as error:
        problems.append(f"tls_ca_certificate: {ca_certificate}: {error}; expected a PEM file or a directory of them")
    if Path(client_certificate).exists() or Path(client_key).exists():
        try:
            context.load_cert_chain(client_certificate, client_key)
        except (OSError, ssl.SSLError) as error:
            problems.append(f"tls_client_certificate, tls_client_key: {client_certificate}, {client_key}: {error}")
    if problems:
        raise ConfigError("volatile_db", problems)
    return context
