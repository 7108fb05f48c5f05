"""The client for threads: plain sockets, kept open between calls."""

import os
import select
import ssl
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Final, Self

from hps.client.addresses import Address, read_addresses
from hps.client.answers import Answer
from hps.client.calls import Calls, Joined
from hps.client.requests import RemoteCall
from hps.client.retries import Attempts
from hps.client.routing import PartRequests, Routed, RoutedWrite
from hps.errors import HPSError, RemoteConnectionError

_MOST_PARTS: Final = 1000  # of one sendmsg
_TOLERANCE_S: Final = 0.005


def connect(
    address: str | Sequence[str],
    *,
    token: str = "",
    tls: ssl.SSLContext | None = None,
    ca_file: str | os.PathLike[str] | None = None,
    certificate: str | os.PathLike[str] | None = None,
    timeout_s: float = 10.0,
    connections: int = 16,
    route: str = "",
) -> "Client":
    """Make a client of a running server. It connects with the first call.

        with hps.connect("http://127.0.0.1:8000") as client:
            vectors = client.lookup([17, 42], "sample", "item")  # (2, dim) float32

    Args:
        address: `http://host:port`, `https://host:port` or `unix:///path`; or several, of servers with the same models: the
            client uses one until it cannot connect to it.
        token: bearer token, or admin token for writes.
        tls: context of `https://` addresses, instead of `ca_file` and `certificate`.
        ca_file: PEM file of certificate authorities; default: the system's.
        certificate: PEM file with the certificate and key of this client.
        timeout_s: of each call, with all its attempts.
        connections: maximum number of open connections, and so of concurrent calls; more calls wait. With a route, for each
            server.
        route: "keys": `lookup` and `lookup_tables` split their keys over the servers, so that each caches its own share. If
            servers hold shares of the tables (`models[].shard`), each gets the keys of its share. Default: one server answers
            all keys.

    Raises:
        InvalidInputError: the address, the token, a number or a file is wrong.
    """
    return Client(read_addresses(address, tls, ca_file, certificate), token, timeout_s, connections, route)


class Client(Calls):
    """A client of a remote server, made by `connect`. *Thread-safe.* A context manager; `close`, or deleting it, closes the
    connections.

    Tables are named as in `embedding_table_names`. `version` is the serving version by default, and `timeout_s` that of
    `connect`. All calls raise the errors of `HPS`, and `RemoteError`, `RemoteConnectionError`, `RemoteTimeoutError`,
    `UnauthorizedError` and `NotReadyError` ([clients](client.md)). A forked child can use it, with its own connections.
    """

    def __init__(self, addresses: Sequence[Address], token: str, timeout_s: float, connections: int, route: str = "") -> None:
        super().__init__(addresses, token, timeout_s, connections, route)
        self._most = connections
        self._of_servers = [Client([address], token, timeout_s, connections) for address in addresses] if route else []
        self._start()

    def _start(self) -> None:
        self._process = os.getpid()
        self._idle: list[_ClientSocket] = []
        weakref.finalize(self, _close_all, self._idle)
        self._free = threading.Semaphore(self._most)

    def _request(self, call: RemoteCall, timeout_s: float | None) -> Any:
        attempts = Attempts(call, self.timeout_s if timeout_s is None else timeout_s)
        self._follow_fork()
        free = self._free
        if not free.acquire(timeout=attempts.remaining_s()):
            raise attempts.timeout()
        try:
            while True:
                connection = self._connection(attempts)
                try:
                    answer = self._exchange(connection, call, attempts)
                except RemoteConnectionError as error:
                    pause = attempts.pause_after_loss(error)
                else:
                    refusal = answer.error()
                    if refusal is None or call.takes_errors:
                        return call.result(answer)
                    pause = attempts.pause_after(answer, refusal)
                time.sleep(pause)
        finally:
            free.release()

    def _follow_fork(self) -> None:
        if self._process != os.getpid():
            _close_all(self._idle)
            self._start()

    def _request_in_parts(
        self,
        routed: Routed[RemoteCall] | RoutedWrite[RemoteCall],
        timeout_s: float | None,
        merge: Joined,
        complete: RemoteCall,
    ) -> Any:
        attempts = Attempts(complete, self.timeout_s if timeout_s is None else timeout_s)
        outcomes: Any = None  # starts it
        while True:
            try:
                parts_to_request = routed.send(outcomes)
            except StopIteration as end:
                return self._request(complete, attempts.remaining_s()) if end.value is None else merge(end.value)
            outcomes = self._request_each(parts_to_request, attempts)

    def _request_each(self, calls: PartRequests[RemoteCall], attempts: Attempts) -> list[Any]:
        """Send a request to each server, then receive the answers; return results and errors.

        Each answer gets half of the remaining time, so that a silent server leaves time for the others.
        """
        outcomes: list[Any] = [None] * len(calls)
        sent: list[tuple[int, _Sent]] = []
        try:
            # Connections are acquired in the order of servers: in different orders, concurrent lookups could each wait for a
            # connection that the other has.
            for nth, (index, call) in sorted(enumerate(calls), key=lambda part: part[1][0]):
                try:
                    sent.append((nth, self._of_servers[index]._send(call, Attempts(call, attempts.remaining_s() / 2))))
                except HPSError as error:
                    outcomes[nth] = error
            while sent:
                nth, request = sent.pop()
                try:
                    outcomes[nth] = request.result(attempts)
                except HPSError as error:
                    outcomes[nth] = error
        finally:
            for _, request in sent:
                request.abandon()
        return outcomes

    def _send(self, call: RemoteCall, attempts: Attempts) -> "_Sent":
        """Send a request once.

        Raises:
            HPSError: it cannot be sent in time.
        """
        self._follow_fork()
        if not self._free.acquire(timeout=attempts.remaining_s()):
            raise attempts.timeout()
        connection = None
        try:
            connection = self._connection(attempts)
            connection.send(self._encoder.parts(call, connection.address), attempts)
        except BaseException as error:
            self._free.release()
            if connection is not None:
                connection.fail(error, attempts)
            raise
        return _Sent(self, connection, call)

    def _exchange(self, connection: "_ClientSocket", call: RemoteCall, attempts: Attempts) -> Answer:
        """Send a request, and receive its answer.

        Raises:
            RemoteConnectionError: the connection was lost before the answer was complete.
            RemoteTimeoutError: timeout.
        """
        answer = call.answer()
        try:
            connection.send(self._encoder.parts(call, connection.address), attempts)
            self._receive(connection, answer, attempts)
        except BaseException as error:
            connection.fail(error, attempts)
            raise
        return answer

    def _receive(self, connection: "_ClientSocket", answer: Answer, attempts: Attempts) -> None:
        """Receive an answer, and keep the connection for the next request."""
        connection.receive(answer, attempts)
        if answer.keeps_alive and not self._closed:
            self._idle.append(connection)
        else:
            connection.close()

    def _connection(self, attempts: Attempts) -> "_ClientSocket":
        """Return an idle connection, or a new one.

        Raises:
            RemoteConnectionError: no server can be reached.
        """
        self._check_open()
        while self._idle:
            try:
                connection = self._idle.pop()
            except IndexError:  # another thread took the last one
                break
            if connection.is_quiet():
                return connection
            connection.close()
        errors = []
        for index, address, timeout_s in self._to_try(attempts):
            try:
                connection = _ClientSocket(address, timeout_s)
            except OSError as error:
                errors.append(f"{address.text}: {error}")
            else:
                self._current = index
                return connection
        raise self._unreachable(attempts, errors)

    def close(self) -> None:
        """Close the connections; running calls finish."""
        self._closed = True
        self._remove_memories()
        _close_all(self._idle)
        for server in self._of_servers:
            server.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()


def _close_all(connections: "list[_ClientSocket]") -> None:
    while connections:
        connections.pop().close()


class _Sent:
    """A sent request, with its connection. *One call.*"""

    def __init__(self, client: Client, connection: "_ClientSocket", call: RemoteCall) -> None:
        self._client, self._connection, self._call = client, connection, call

    def result(self, attempts: Attempts) -> Any:
        """Receive the answer within half of the remaining time of a lookup; return the result of the call."""
        answer, connection = self._call.answer(), self._connection
        try:
            self._client._receive(connection, answer, Attempts(self._call, attempts.remaining_s() / 2))
        except BaseException as error:
            connection.fail(error, attempts)
            raise
        finally:
            self._client._free.release()
        if refusal := answer.error():
            raise refusal
        return self._call.result(answer)

    def abandon(self) -> None:
        """Close the connection without reading the answer."""
        self._connection.close()
        self._client._free.release()


class _ClientSocket:
    """An open connection with at most one pending request. *One thread at a time.*"""

    def __init__(self, address: Address, timeout_s: float) -> None:
        self.address = address
        self._socket = address.open(timeout_s)
        self._limit_s = timeout_s
        self._tls = address.tls is not None
        self._readable = select.poll()
        self._readable.register(self._socket, select.POLLIN)

    def is_quiet(self) -> bool:
        """Return whether the server has neither closed the connection nor sent unexpected bytes."""
        return not self._readable.poll(0)

    def send(self, parts: list[Any], attempts: Attempts) -> None:
        self._limit(attempts)
        # A server that refuses a request may close the connection before it has read all of it. Its answer is then already
        # there, and `receive` reads it, or raises.
        with suppress(BrokenPipeError, ConnectionResetError):
            self._send(parts)

    def receive(self, answer: Answer, attempts: Attempts) -> None:
        buffer, receive, received = answer.buffer, self._socket.recv_into, answer.received
        while True:
            self._limit(attempts)
            count = receive(buffer())
            if not count:
                raise self.lost("it closed the connection")
            if received(count):
                return

    def fail(self, error: BaseException, attempts: Attempts) -> None:
        """Close the connection after an error.

        Raises:
            RemoteConnectionError, RemoteTimeoutError: it was an error of the socket.
        """
        self.close()
        if isinstance(error, OSError) and not isinstance(error, HPSError):
            raise (attempts.timeout() if isinstance(error, TimeoutError) else self.lost(error)) from None

    def lost(self, why: object) -> RemoteConnectionError:
        return RemoteConnectionError(f"calling {self.address.text}: the connection was lost: {why}")

    def close(self) -> None:
        self._socket.close()

    def _send(self, parts: list[Any]) -> None:
        if self._tls:
            self._socket.sendall(b"".join(parts))
            return
        unsent = sum(map(len, parts)) - self._socket.sendmsg(parts[:_MOST_PARTS])
        if unsent:
            self._socket.sendall(memoryview(b"".join(parts))[-unsent:])

    def _limit(self, attempts: Attempts) -> None:
        remaining_s = attempts.remaining_s()
        if not remaining_s <= self._limit_s <= remaining_s + _TOLERANCE_S:
            self._limit_s = remaining_s
            self._socket.settimeout(remaining_s)
