"""Many requests over several connections at once, in one thread: sockets that do not block, and a deadline."""

import select
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final

from hps.databases.redis.commands import Buffer, Command
from hps.databases.redis.connections import Connection
from hps.errors import DatabaseError, DatabaseTimeoutError

_WINDOW: Final = 2 << 20
"""Bytes asked for and not yet answered, on one connection: some requests of the usual size, so that the server is never idle.
More would only fill the buffers of the system and of the server."""
_MESSAGE_BYTES: Final = 64 << 10  # small requests go out together


class Lane:
    """The requests that take their turn on one connection, in order. *One per call.*

    Attributes:
        connection: belongs to the lane until the call ends.
        commands: all of them.
        fault: why the connection can no longer be used, or None; commands that are not done were not answered.
        found_ended: whether the fault is that the connection, which had been idle, was no longer there.
    """

    __slots__ = (
        "_asked",
        "_heard",
        "_in_flight",
        "_message",
        "_queue",
        "_sent",
        "_waiting_since",
        "commands",
        "connection",
        "fault",
        "found_ended",
    )

    def __init__(self, connection: Connection, commands: Iterable[Command]) -> None:
        self.connection = connection
        self.commands = list(commands)
        self.fault: DatabaseError | None = None
        self.found_ended = False
        self._queue = deque(self.commands)
        self._asked: deque[Command] = deque()  # sent, or being sent, and not yet answered
        self._in_flight = 0  # their weight
        self._heard = False
        self._message = 0  # bytes of the message that is being sent
        self._sent = 0  # of which are with the system
        self._waiting_since = time.monotonic()

    @property
    def busy(self) -> bool:
        """Whether anything is still to be sent or answered."""
        return self.fault is None and bool(self._queue or self._asked)

    @property
    def wants_to_send(self) -> bool:
        """Whether the system did not take all of the message."""
        return self._sent < self._message

    def send(self) -> None:
        """Send as much as the window and the system allow."""
        try:
            while self.wants_to_send or self._write_message():
                count = self.connection.send(self.connection.outgoing.view[self._sent : self._message])
                if count == 0:
                    return
                self._sent += count
                self._waiting_since = time.monotonic()
        except OSError as error:
            self._break(error)

    def receive(self) -> None:
        """Read what has arrived."""
        connection = self.connection
        try:
            more = True
            while more and self.fault is None:
                before = connection.end - connection.start
                more = connection.receive()
                if connection.end - connection.start > before:
                    self._heard = True
                    self._waiting_since = time.monotonic()
                self._read()
        except OSError as error:
            self._break(error)
        except DatabaseError as error:
            self.fail(type(error)(f"redis {connection.node}: {error}"))

    def time_left(self, now: float, read_timeout_s: float) -> float:
        """Seconds until the node has been silent for too long."""
        return self._waiting_since + read_timeout_s - now

    def fail(self, error: DatabaseError) -> None:
        """Give the connection up."""
        if self.fault is None:
            self.fault = error

    def _break(self, error: OSError) -> None:
        connection = self.connection
        self.found_ended = connection.reused and not self._heard  # ended before: by a restart, or for having been idle
        self.fail(DatabaseError(f"redis {connection.node}: the connection broke ({error})"))

    def _write_message(self) -> bool:
        buffer: Buffer = self.connection.outgoing
        at = 0
        while self._queue:
            command = self._queue[0]
            if self._in_flight and self._in_flight + command.weight > _WINDOW:
                break
            size = command.size
            if at and at + size > _MESSAGE_BYTES:
                break
            buffer.grow(at + size, at)
            at = command.write(buffer, at)
            self._in_flight += command.weight
            self._asked.append(self._queue.popleft())
        self._message, self._sent = at, 0
        return at > 0

    def _read(self) -> None:
        connection = self.connection
        array, at, end = connection.received.array, connection.start, connection.end
        while self._asked and at < end:
            command = self._asked[0]
            at = command.read(array, at, end)
            if not command.done:
                break
            self._asked.popleft()
            self._in_flight -= command.weight
        if at < end and not self._asked:
            raise DatabaseError("it sent bytes that nobody asked for")
        connection.start = at


def exchange(lanes: Sequence[Lane], deadline: float, read_timeout_s: float) -> None:
    """Send the requests of all lanes and read their replies; returns when each is answered or its lane has failed.

    Args:
        lanes: what is to be sent where.
        deadline: when all must be done, on the monotonic clock.
        read_timeout_s: how long a node may be silent while it owes a reply.
    """
    started = time.monotonic()
    poll = select.poll()
    by_descriptor = {}
    for lane in lanes:
        lane.send()
        if lane.busy:
            by_descriptor[lane.connection.fileno()] = lane
            poll.register(lane.connection.fileno(), _events(lane))
    while by_descriptor:
        now = time.monotonic()
        left = min(deadline - now, min(lane.time_left(now, read_timeout_s) for lane in by_descriptor.values()))
        ready = poll.poll(max(0, int(1000 * left) + 1))
        now = time.monotonic()  # lanes that are not ready were silent until now, however long the others take
        for descriptor, _ in ready:
            lane = by_descriptor[descriptor]
            before = lane.wants_to_send
            lane.receive()
            if lane.fault is None:
                lane.send()
            if not lane.busy:
                poll.unregister(descriptor)
                del by_descriptor[descriptor]
            elif lane.wants_to_send != before:
                poll.modify(descriptor, _events(lane))
        _fail_late(by_descriptor, poll, now, started, deadline, read_timeout_s)


def _fail_late(
    by_descriptor: dict[int, Lane], poll: select.poll, now: float, started: float, deadline: float, read_timeout_s: float
) -> None:
    for descriptor, lane in list(by_descriptor.items()):
        node = lane.connection.node
        if now >= deadline:
            lane.fail(DatabaseTimeoutError(f"redis {node}: it had not answered everything after {now - started:.3g} s"))
        elif lane.time_left(now, read_timeout_s) <= 0:
            lane.fail(DatabaseTimeoutError(f"redis {node}: it was silent for {read_timeout_s:.3g} s while it owed a reply"))
        else:
            continue
        poll.unregister(descriptor)
        del by_descriptor[descriptor]


def _events(lane: Lane) -> int:
    return select.POLLIN | select.POLLOUT if lane.wants_to_send else select.POLLIN
