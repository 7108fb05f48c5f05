"""A load generator for HTTP/1.1: one thread, a few connections, requests back to back or at a fixed rate.

At a fixed rate, the time of a request counts from the moment that it is due, however long earlier answers take. So a server
that stalls for a second shows as many slow answers as were due in that second (no coordinated omission).
"""

import selectors
import socket
import ssl
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeAlias

from hps import errors
from hps.client.addresses import Address
from hps.ground.http1 import AnswerReader
from hps.tools.profiling.times import TimeHistogram

Parts: TypeAlias = Sequence[bytes | memoryview]
MOST_CONNECTIONS = 500
"""Per generator: beyond 1,024 files, no wait in Python is exact to microseconds."""

DRAIN_S = 5.0
"""Grace period after the end for sending and answering the requests that were due."""

_CONNECT_S = 1.0
_AGAIN_S = 0.1
_ANSWER_BYTES = 1 << 18
_NOT_YET = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


@dataclass
class LoadResult:
    """Result of a load. *One thread.*"""

    times: TimeHistogram = field(default_factory=TimeHistogram)  # latencies of correct answers
    failed: TimeHistogram = field(default_factory=TimeHistogram)  # times until each failure was known
    # Number of failures by cause. At a fixed rate, a due request without an answer at the end counts as `no answer`; its wait
    # so far also counts among `times`, so that a stall does not look fast.
    failures: Counter[str] = field(default_factory=Counter)
    lateness: TimeHistogram = field(default_factory=TimeHistogram)  # delay of each request caused by the generator itself
    in_time: int = 0  # correct answers that arrived before the end
    seconds: float = 0.0  # duration for which requests were due
    busy_s: float = 0.0  # processor time of the generator

    def merge(self, others: "Sequence[LoadResult]") -> "LoadResult":
        """Add the results of generators that ran at the same time. Returns itself."""
        for name in ("times", "failed", "lateness"):
            getattr(self, name).merge([getattr(other, name) for other in others])
        for other in others:
            self.failures += other.failures
            self.in_time += other.in_time
            self.seconds = max(self.seconds, other.seconds)
            self.busy_s += other.busy_s
        return self


class LoadConnection:
    """A connection with at most one request in flight. Reconnects after an error."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._unsent = memoryview(b"")
        self.socket: socket.socket | None = None
        self.closed_at_ns = 0
        self.start_request(0, 0)  # TLS sends tickets before the first request

    def connect(self) -> socket.socket:
        self.socket = self._address.open(_CONNECT_S)
        self.socket.setblocking(False)
        return self.socket

    def start_request(self, number: int, start_ns: int) -> None:
        self.number, self.start_ns = number, start_ns
        self.answer = AnswerReader(keep_body=True)

    def send(self, parts: Parts) -> bool:
        """Send what the socket accepts. Returns whether the request is sent completely."""
        if self._address.tls is not None:
            self._unsent = memoryview(b"".join(parts))
            return self.send_on()
        size, sent = sum(map(len, parts)), 0
        with suppress(BlockingIOError):
            sent = self._open().sendmsg(parts)
        if sent < size:
            self._unsent = memoryview(b"".join(parts))[sent:]
        return sent == size

    def send_on(self) -> bool:
        with suppress(*_NOT_YET):
            self._unsent = self._unsent[self._open().send(self._unsent) :]
        return not self._unsent

    def receive(self) -> bool:
        """Read the available bytes. Returns whether the answer is complete."""
        while True:
            try:
                data = self._open().recv(_ANSWER_BYTES)
            except _NOT_YET:
                return False
            if not data:
                raise ConnectionError("the server closed a connection")
            try:
                if self.answer.feed(data):
                    return True
            except errors.RemoteError as error:
                raise ConnectionError(str(error)) from error
            if self._address.tls is None:  # TLS may hold what no selector sees
                return False

    def close(self) -> None:
        if self.socket is not None:
            self.socket.close()
        self.socket, self._unsent = None, memoryview(b"")

    def _open(self) -> socket.socket:
        if self.socket is None:
            raise ConnectionError("not connected")
        return self.socket


def number_of(head: bytes, name: bytes) -> int:
    """Parse a numeric header from a head in lower case."""
    _, separator, rest = head.partition(b"\r\n" + name + b":")
    if not separator:
        raise ConnectionError(f"an answer without {name.decode()}")
    return int(rest.partition(b"\r\n")[0])


class HttpLoad:
    """Loads one server. *One thread.*

    Args:
        address: of the server.
        connections: maximum number of requests in flight; further due requests wait.
        request: called with a request's number, from 0, when it is sent; returns its parts as bytes.
        check: called with the number, the head in lower case and the body of each answer with status 200; returns an error
            text, empty if correct. The body is read only and valid only during the call.

    Raises:
        InvalidInputError: more connections than one generator can have.
    """

    def __init__(
        self,
        address: Address,
        connections: int,
        request: Callable[[int], Parts],
        check: Callable[[int, bytes, memoryview], str],
    ) -> None:
        if not 0 < connections <= MOST_CONNECTIONS:
            raise errors.InvalidInputError(
                f"loading a server: got {connections} connections, expected 1 to {MOST_CONNECTIONS} of each process"
            )
        self._request = request
        self._check = check
        self._number = 0
        self._connections = [LoadConnection(address) for _ in range(connections)]

    def run(self, seconds: float, rate: float | None = None, first: int | None = None) -> LoadResult:
        """Load the server for a while. Request numbers continue from one run to the next.

        Args:
            rate: requests per second; None: each connection sends its next request when the last one is answered.
            first: number of the first request.
        """
        if first is not None:
            self._number = first
        result = LoadResult(seconds=seconds)
        start_cpu = time.process_time()
        # Only select() waits for microseconds; epoll waits for milliseconds, fine for a closed loop.
        with selectors.SelectSelector() if rate else selectors.DefaultSelector() as selector:
            try:
                self._loop(selector, result, seconds, rate)
            finally:
                for connection in self._connections:
                    connection.close()
        result.busy_s = time.process_time() - start_cpu
        return result

    def _loop(self, selector: selectors.BaseSelector, result: LoadResult, seconds: float, rate: float | None) -> None:
        clock = time.perf_counter_ns
        for connection in self._connections:
            self._connect(selector, connection, result)
        free = deque(connection for connection in self._connections if connection.socket is not None)
        broken = deque(connection for connection in self._connections if connection.socket is None)
        start = clock()
        end = start + int(seconds * 1e9)
        drained = end + int(DRAIN_S * 1e9)
        sent, idle_since = 0, dict.fromkeys(map(id, self._connections), start)
        pending: set[LoadConnection] = set()
        period_ns = 1e9 / rate if rate else 0.0
        due = start

        def fail(connection: LoadConnection, cause: str) -> None:
            if connection in pending:
                pending.remove(connection)
                result.failures[cause] += 1
                result.failed.add(clock() - connection.start_ns)
            self._disconnect(selector, connection)
            if connection not in broken:
                broken.append(connection)
            with suppress(ValueError):
                free.remove(connection)

        while True:
            now = clock()
            while broken and broken[0].closed_at_ns + _AGAIN_S * 1e9 <= now < end:
                connection = broken.popleft()
                if self._connect(selector, connection, result):
                    free.append(connection)
                    idle_since[id(connection)] = now
                else:
                    broken.append(connection)
                    break
            while free and due <= now < drained and due < end:
                connection = free.popleft()
                ready_ns = max(due, idle_since[id(connection)]) if rate else now
                parts = self._request(self._number)
                sent_ns = clock()
                connection.start_request(self._number, due if rate else sent_ns)
                result.lateness.add(sent_ns - ready_ns)
                pending.add(connection)
                try:
                    if not connection.send(parts):
                        selector.modify(connection.socket, selectors.EVENT_READ | selectors.EVENT_WRITE, connection)  # type: ignore[arg-type]
                except OSError:
                    fail(connection, "connection lost")
                self._number += 1
                sent += 1
                due = start + int(sent * period_ns) if rate else clock()
                now = clock()
            if (due >= end and not pending) or now >= drained or (broken and not pending and not free and now >= end):
                break
            wait_ns = 1e9 * _AGAIN_S if broken else 1e9
            if due < end and free:
                wait_ns = due - now
            for key, events in selector.select(max(0.0, min(wait_ns, drained - now) / 1e9)):
                connection = key.data
                try:
                    if events & selectors.EVENT_WRITE and connection.send_on():
                        selector.modify(connection.socket, selectors.EVENT_READ, connection)
                    if not (events & selectors.EVENT_READ and connection.receive()):
                        continue
                    self._answered(connection, result, clock(), end)
                except OSError:
                    fail(connection, "connection lost")
                    continue
                pending.discard(connection)
                if not connection.answer.keeps_alive:
                    fail(connection, "")
                    connection.closed_at_ns = 0
                else:
                    free.append(connection)
                    idle_since[id(connection)] = clock()
            if not rate:
                due = clock()
        self._count_unanswered(result, pending, start, end, period_ns, sent if rate else None)

    def _answered(self, connection: LoadConnection, result: LoadResult, now: int, end: int) -> None:
        head, body = connection.answer.head, memoryview(connection.answer.body)
        if head is not None and head.status == 200:
            error = self._check(connection.number, connection.answer.raw.lower(), body)
        else:
            error = f"status {head and head.status}"
        duration_ns = now - connection.start_ns
        if error:
            result.failures[error] += 1
            result.failed.add(duration_ns)
            return
        result.times.add(duration_ns)
        result.in_time += now <= end

    def _count_unanswered(
        self, result: LoadResult, pending: set[LoadConnection], start: int, end: int, period_ns: float, sent: int | None
    ) -> None:
        """Count due requests without an answer, with their wait so far."""
        now = time.perf_counter_ns()
        starts_ns = [connection.start_ns for connection in pending]
        if sent is not None:
            starts_ns += [start + int(number * period_ns) for number in range(sent, int((end - start) / period_ns))]
        result.failures["no answer"] += len(starts_ns)
        for start_ns in starts_ns:
            result.times.add(now - start_ns)
            result.failed.add(now - start_ns)
        result.failures += Counter()  # drops zeros

    @staticmethod
    def _connect(selector: selectors.BaseSelector, connection: LoadConnection, result: LoadResult) -> bool:
        try:
            selector.register(connection.connect(), selectors.EVENT_READ, connection)
        except OSError:
            connection.close()
            connection.closed_at_ns = time.perf_counter_ns()
            result.failures["no connection"] += 1
            return False
        return True

    @staticmethod
    def _disconnect(selector: selectors.BaseSelector, connection: LoadConnection) -> None:
        if connection.socket is not None:
            selector.unregister(connection.socket)
            connection.close()
        connection.closed_at_ns = time.perf_counter_ns()
