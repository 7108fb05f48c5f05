"""The bounded pool of connections to one Redis node."""

import threading
import time

from hps.databases.redis.commands import Ask, request
from hps.databases.redis.connections import Connection, Credentials, Node, connect
from hps.databases.redis.exchange import Lane, exchange
from hps.databases.redis.refusals import refusal_error
from hps.errors import DatabaseError, DatabaseTimeoutError


class Pool:
    """Opens connections to one node, at most `limit`, and keeps idle ones. *Thread-safe.*

    Args:
        node: where they go.
        credentials: how to connect.
        limit: most connections at a time (`num_node_connections`).
        connect_timeout_s: for opening one.
    """

    def __init__(self, node: Node, credentials: Credentials, limit: int, connect_timeout_s: float) -> None:
        self.node = node
        self._credentials = credentials
        self._limit = limit
        self._connect_timeout_s = connect_timeout_s
        self._changed = threading.Condition()
        self._idle: list[Connection] = []
        self._open = 0  # idle, lent or being opened
        self._closed = False

    @property
    def open_connections(self) -> int:
        """How many connections there are, idle or lent."""
        return self._open

    def acquire(self, deadline: float) -> Connection:
        """Lend a connection: an idle one, a new one, or one that is given back before the deadline.

        Raises:
            DatabaseTimeoutError: all stayed busy, or connecting took too long.
            DatabaseError: the node cannot be reached or refuses us.
        """
        with self._changed:
            idle = self._take_idle()
            while idle is None and self._open >= self._limit:
                left = deadline - time.monotonic()
                if left <= 0 or self._closed:
                    raise DatabaseTimeoutError(
                        f"redis {self.node}: all {self._limit} connections stayed busy; raise num_node_connections"
                    )
                self._changed.wait(left)
                idle = self._take_idle()
            if idle is None:
                self._open += 1
        return idle or self._connect(deadline)

    def acquire_more(self, wanted: int) -> list[Connection]:
        """Lend up to `wanted` idle connections, without waiting."""
        lent: list[Connection] = []
        with self._changed:
            while len(lent) < wanted and self._idle:
                lent.append(self._idle.pop())
        return lent

    def release(self, connection: Connection, *, usable: bool) -> None:
        """Take a connection back; it is closed unless every reply on it has been read."""
        keep = usable and not self._closed and connection.start == connection.end
        if keep:
            connection.shrink()
            connection.reused = True
        with self._changed:
            keep = keep and not self._closed
            if keep:
                self._idle.append(connection)
            else:
                self._open -= 1
            self._changed.notify()
        if not keep:
            connection.close()

    def close_idle(self) -> None:
        """Close the idle connections: the server has ended one of them, and with it perhaps all."""
        with self._changed:
            idle, self._idle = self._idle, []
            self._open -= len(idle)
            self._changed.notify_all()
        for connection in idle:
            connection.close()

    def close(self) -> None:
        """Close the idle connections, and lent ones when they are given back."""
        with self._changed:
            self._closed = True
        self.close_idle()

    def _take_idle(self) -> Connection | None:
        if self._closed:
            raise DatabaseError(f"redis {self.node}: it has left the cluster, or this database is being closed")
        return self._idle.pop() if self._idle else None  # the one used last, so that surplus ones stay unused

    def _connect(self, deadline: float) -> Connection:
        connection: Connection | None = None
        try:
            timeout_s = min(self._connect_timeout_s, deadline - time.monotonic())
            if timeout_s <= 0:
                raise DatabaseTimeoutError(f"redis {self.node}: no time was left to connect")
            connection = connect(self.node, self._credentials, timeout_s)
            self._introduce(connection, min(deadline, time.monotonic() + self._connect_timeout_s))
        except BaseException:
            if connection:
                connection.close()
            with self._changed:
                self._open -= 1
                self._changed.notify()
            raise
        return connection

    def _introduce(self, connection: Connection, deadline: float) -> None:
        """Give the password, and see that the node answers."""
        user, password = self._credentials.user_name.encode(), self._credentials.password.encode()
        commands = [Ask(0, request(b"PING"))]
        if password:
            named = [user] if user not in (b"", b"default") else []
            commands.insert(0, Ask(0, request(b"AUTH", *named, password)))
        lane = Lane(connection, commands)
        timeout_s = deadline - time.monotonic()
        exchange([lane], deadline, timeout_s)
        if lane.fault:
            raise lane.fault
        for command in commands:
            if command.refusal and not command.refusal.startswith("NOPERM"):  # who may not PING may still read
                raise refusal_error(self.node, command.refusal)
