"""Which Redis node serves what: one server, or the masters of a cluster with their hash slots, found out by asking."""

import logging
import re
import threading
import time
from binascii import crc_hqx
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hps.databases.redis.commands import Ask, request
from hps.databases.redis.connections import Credentials, Node
from hps.databases.redis.exchange import Lane, exchange
from hps.databases.redis.pool import Pool
from hps.databases.redis.refusals import refusal_error
from hps.errors import DatabaseError, DatabaseTimeoutError, NotReadyError

_log = logging.getLogger(__name__)
SLOTS: Final = 16384
_DEFAULT_PORT: Final = 6379
_LEAST_REFRESH_S: Final = 0.1  # between two looks at a cluster that is in disorder


def slot_of(key: bytes) -> int:
    """Hash slot of a key: of what is between its first `{` and the next `}` if that is something (Redis Cluster)."""
    start = key.find(b"{")
    end = key.find(b"}", start + 1)
    if start >= 0 and end > start + 1:
        key = key[start + 1 : end]
    return crc_hqx(key, 0) % SLOTS


def parse_addresses(address: str) -> list[Node]:
    """Read `host[:port]`, several of them separated by `,` or `;`. An IPv6 address stands in brackets."""
    nodes = []
    for part in re.split("[,;]", address):
        found = re.fullmatch(r"(\[[^\]]+\]|[^:]+)(?::(\d+))?", part.strip())
        if found is None:
            raise DatabaseError(f"redis: address: got {part.strip()!r}, wanted host[:port]")
        nodes.append(Node(found[1].strip("[]"), int(found[2] or _DEFAULT_PORT)))
    return list(dict.fromkeys(nodes))


@dataclass(frozen=True, eq=False)
class Topology:
    """The nodes that take requests. *Immutable.*

    Attributes:
        clustered: whether hash slots matter.
        nodes: the server, or the masters of the cluster.
        owner: (SLOTS,) int16: index in `nodes` of each slot's master, -1 where it has none; None for a server.
        facts: what the node that was asked says of itself (INFO).
    """

    clustered: bool
    nodes: tuple[Node, ...]
    owner: npt.NDArray[np.int16] | None
    facts: dict[str, str]

    def node_of(self, slot: int) -> Node:
        """The node that serves a slot.

        Raises:
            DatabaseError: none does.
        """
        index = 0 if self.owner is None else int(self.owner[slot])
        if index < 0:
            raise DatabaseError(f"redis: no node of the cluster serves hash slot {slot}; see CLUSTER SLOTS")
        return self.nodes[index]

    def moved(self, slot: int, node: Node) -> "Topology":
        """The same, but for one slot that is now another node's."""
        if self.owner is None:
            return self
        nodes = self.nodes if node in self.nodes else (*self.nodes, node)
        owner = self.owner.copy()
        owner[slot] = nodes.index(node)
        return Topology(True, nodes, owner, self.facts)


class TopologyKeeper:
    """Knows the current topology and the pools of its nodes; asks again when something was found wrong. *Thread-safe.*

    Args:
        seeds: nodes to ask first.
        credentials: how to connect to any of them.
        connections: most connections to a node.
        connect_timeout_s: for one connection.
        read_timeout_s: for the answer of one node.
    """

    def __init__(
        self, seeds: list[Node], credentials: Credentials, connections: int, connect_timeout_s: float, read_timeout_s: float
    ) -> None:
        self._seeds = seeds
        self._credentials = credentials
        self._connections = connections
        self._connect_timeout_s = connect_timeout_s
        self._read_timeout_s = read_timeout_s
        self._changed = threading.Condition()
        self._pools: dict[Node, Pool] = {}
        self._topology: Topology | None = None
        self._stale = True
        self._refreshing = False
        self._refreshed_at = -np.inf
        self._closed = False

    @property
    def open_connections(self) -> int:
        """Connections of all pools, idle or lent."""
        return sum(pool.open_connections for pool in list(self._pools.values()))

    def current(self, deadline: float) -> Topology:
        """The topology; asks for it first where it is unknown or was found wrong.

        Raises:
            DatabaseError: no node can be asked, and none could before.
        """
        topology = self._topology
        if topology is not None and not self._stale:
            return topology
        with self._changed:
            self._check_open()
            if topology is not None and (self._refreshing or time.monotonic() < self._refreshed_at + _LEAST_REFRESH_S):
                return topology  # the old one still serves most keys
            while self._refreshing:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise DatabaseTimeoutError("redis: another call was still finding out which nodes there are")
                self._changed.wait(left)
            if self._topology is not None and not self._stale:
                return self._topology
            self._refreshing = True
            self._stale = False  # what is found wrong from now on is looked at again
        found: Topology | None = None
        try:
            # Half of the time is left for the call itself where it can go on with what is known.
            now = time.monotonic()
            found = self._discover(deadline if topology is None else now + (deadline - now) / 2)
        except DatabaseError as error:
            if topology is None:
                raise
            _log.warning("%s; the nodes known before are asked", error)
            return topology
        finally:
            self._adopt(found)
        if found is None:
            raise DatabaseError("redis: no node was found")
        return found

    def pool(self, node: Node) -> Pool:
        """The pool of a node."""
        with self._changed:
            self._check_open()
            if node not in self._pools:
                self._pools[node] = Pool(node, self._credentials, self._connections, self._connect_timeout_s)
            return self._pools[node]

    def mark_stale(self) -> None:
        """Ask again before the next call, if there is anything to choose from."""
        topology = self._topology
        if topology is None or topology.clustered or len(self._seeds) > 1:
            self._stale = True

    def mark_moved(self, slot: int, node: Node) -> None:
        """Take a slot's new node from a MOVED reply, and ask for the rest before the next call."""
        with self._changed:
            if self._topology is not None:
                self._topology = self._topology.moved(slot, node)
                self._stale |= self._topology.clustered

    def close(self) -> None:
        """Close all pools."""
        with self._changed:
            self._closed = True
            pools = list(self._pools.values())
            self._changed.notify_all()
        for pool in pools:
            pool.close()

    def _check_open(self) -> None:
        if self._closed:
            raise NotReadyError("redis: this database is closed; open another")

    def _adopt(self, found: Topology | None) -> None:
        leaving: list[Pool] = []
        with self._changed:
            self._refreshing = False
            self._refreshed_at = time.monotonic()
            if found:
                self._topology = found
                gone = set(self._pools) - set(found.nodes)
                leaving = [self._pools.pop(node) for node in gone]
            else:
                self._stale = True
            self._changed.notify_all()
        for pool in leaving:
            pool.close()

    def _discover(self, deadline: float) -> Topology:
        known = self._topology.nodes if self._topology else ()
        candidates = list(dict.fromkeys((*known, *self._seeds)))
        failures: list[str] = []
        replica: Topology | None = None
        for tried, node in enumerate(candidates):
            now = time.monotonic()
            share = (deadline - now) / (len(candidates) - tried)  # so that one silent node leaves time for the others
            try:
                topology = self._ask(node, min(deadline, now + max(share, 0.01)))
            except DatabaseError as error:
                failures.append(str(error))
                continue
            if topology.clustered or topology.facts.get("role") != "slave":
                return topology
            replica = replica or topology
        if replica:
            return replica
        raise DatabaseError(f"redis: none of {len(candidates)} nodes could be asked: " + " | ".join(failures))

    def _ask(self, node: Node, deadline: float) -> Topology:
        facts = dict(_facts(self._request(node, deadline, b"INFO").decode(errors="replace")))
        if facts.get("cluster_enabled") != "1":
            return Topology(False, (node,), None, facts)
        owner = np.full(SLOTS, -1, np.int16)
        nodes: dict[Node, int] = {}
        for start, end, (host, port, *_), *_ in self._request(node, deadline, b"CLUSTER", b"SLOTS"):
            master = Node((host or b"").decode() or node.host, port)
            if master.host == "?":  # a node that does not know its own name
                master = Node(node.host, port)
            owner[start : end + 1] = nodes.setdefault(master, len(nodes))
        if not nodes:
            raise DatabaseError(f"redis {node}: it belongs to a cluster that serves no hash slots; see CLUSTER INFO")
        return Topology(True, tuple(nodes), owner, facts)

    def _request(self, node: Node, deadline: float, *arguments: bytes) -> Any:
        pool = self.pool(node)
        connection = pool.acquire(deadline)
        command = Ask(0, request(*arguments))
        lane = Lane(connection, [command])
        try:
            exchange([lane], deadline, self._read_timeout_s)
        finally:
            pool.release(connection, usable=lane.fault is None and command.done)
        if lane.fault:
            raise lane.fault
        if command.refusal:
            raise refusal_error(node, command.refusal)
        return command.reply


def _facts(info: str) -> Iterable[tuple[str, str]]:
    for line in info.splitlines():
        name, colon, value = line.partition(":")
        if colon:
            yield name, value
