"""Commands to the nodes that serve their slots: connections lent, redirections followed, failures collected."""

import time
from collections.abc import Mapping, Sequence
from typing import Final

from hps.databases.redis.commands import Command
from hps.databases.redis.connections import Credentials, Node
from hps.databases.redis.exchange import Lane, exchange
from hps.databases.redis.pool import Pool
from hps.databases.redis.refusals import is_elsewhere, refusal_error, target_of
from hps.databases.redis.topology import Topology, TopologyKeeper
from hps.errors import DatabaseError, DatabaseTimeoutError

_LANE_WEIGHT: Final = 4 << 20  # bytes that make another connection to the same node worth while
_ROUNDS: Final = 16  # of redirections, as many as a slot that is on its way may cause
_PAUSE_S: Final = 0.01


class Dispatcher:
    """Runs commands on a server or a cluster, nodes in parallel. *Thread-safe.*

    Args:
        seeds: nodes that are asked which nodes there are.
        credentials: how to connect.
        connections: most connections to a node.
        connect_timeout_s: for opening a connection.
        read_timeout_s: how long a node may be silent while it owes a reply.
        timeout_s: for one `run`.
    """

    def __init__(
        self,
        seeds: list[Node],
        credentials: Credentials,
        connections: int,
        connect_timeout_s: float,
        read_timeout_s: float,
        timeout_s: float,
    ) -> None:
        self.timeout_s = timeout_s
        self._read_timeout_s = read_timeout_s
        self._connections = connections
        self._keeper = TopologyKeeper(seeds, credentials, connections, connect_timeout_s, read_timeout_s)

    @property
    def open_connections(self) -> int:
        """Connections to all nodes, idle or lent."""
        return self._keeper.open_connections

    def topology(self) -> Topology:
        """The nodes, as far as they are known; asks for them at the first call.

        Raises:
            DatabaseError: no node can be asked.
        """
        return self._keeper.current(time.monotonic() + self.timeout_s)

    def run(self, commands: Sequence[Command], deadline: float | None = None) -> None:
        """Run commands, those of one slot in their order; returns when every one has its reply.

        Args:
            commands: what to run; each goes to the node that serves its slot.
            deadline: when all must be done, on the monotonic clock; None stands for the dispatcher's own timeout.

        Raises:
            DatabaseError: at least one was not done. Those that other nodes could do are done.
        """
        deadline = time.monotonic() + self.timeout_s if deadline is None else deadline
        at: dict[Node, list[Command]] = {}
        topology = self._keeper.current(deadline)
        for command in commands:
            at.setdefault(topology.node_of(command.slot), []).append(command)
        self._run(at, deadline)

    def run_on_each_node(self, commands: Mapping[Node, Command]) -> None:
        """Run one command on each of several nodes.

        Raises:
            DatabaseError: at least one was not done.
        """
        self._run({node: [command] for node, command in commands.items()}, time.monotonic() + self.timeout_s)

    def close(self) -> None:
        """Close every connection."""
        self._keeper.close()

    def _run(self, at: dict[Node, list[Command]], deadline: float) -> None:
        for rounds in range(_ROUNDS):
            if rounds > 2:  # a slot on its way, or nodes that do not agree yet
                time.sleep(min(_PAUSE_S * rounds, max(0.0, deadline - time.monotonic())))
            again: dict[Node, list[Command]] = {}
            failures = self._round(at, again, deadline)
            for node, commands in at.items():
                for command in commands:
                    if command.done and command.refusal:
                        self._redirect(node, command, again, failures)
            if failures:
                raise failures[0]
            if not again:
                return
            at = again
        raise DatabaseError(f"redis: the cluster sent us from node to node {_ROUNDS} times; see CLUSTER NODES")

    def _redirect(self, node: Node, command: Command, again: dict[Node, list[Command]], failures: list[DatabaseError]) -> None:
        refusal = command.refusal
        if not is_elsewhere(refusal):
            if refusal.startswith(("CLUSTERDOWN", "READONLY", "MASTERDOWN")):
                self._keeper.mark_stale()
            failures.append(refusal_error(node, refusal))
            return
        target = target_of(refusal, node)
        command.again()
        if target is None:  # TRYAGAIN
            again.setdefault(node, []).append(command)
        elif refusal.startswith("ASK"):
            again.setdefault(target[1], []).extend(command.asking())
        else:
            self._keeper.mark_moved(*target)
            again.setdefault(target[1], []).append(command)

    def _round(self, at: dict[Node, list[Command]], again: dict[Node, list[Command]], deadline: float) -> list[DatabaseError]:
        failures: list[DatabaseError] = []
        lent: list[tuple[Pool, Lane]] = []
        try:
            # In one order, so that two calls never wait for connections of each other.
            for node in sorted(at):
                try:
                    lent += self._lend(node, at[node], deadline)
                except DatabaseTimeoutError as error:
                    failures.append(error)
                except DatabaseError as error:
                    failures.append(error)
                    self._keeper.mark_stale()
            exchange([lane for _, lane in lent], deadline, self._read_timeout_s)
        finally:
            for pool, lane in lent:
                pool.release(lane.connection, usable=lane.fault is None and not lane.busy)
        for pool, lane in lent:
            if lane.found_ended:
                pool.close_idle()
                again.setdefault(pool.node, []).extend(lane.commands)
            elif lane.fault:
                failures.append(lane.fault)
                self._keeper.mark_stale()
        return failures

    def _lend(self, node: Node, commands: list[Command], deadline: float) -> list[tuple[Pool, Lane]]:
        pool = self._keeper.pool(node)
        weight = sum(command.weight for command in commands)
        connections = [pool.acquire(deadline)]
        connections += pool.acquire_more(min(self._connections, weight // _LANE_WEIGHT) - 1)
        if len(connections) == 1:
            return [(pool, Lane(connections[0], commands))]
        shares: list[list[Command]] = [[] for _ in connections]
        of_slot: dict[int, int] = {}
        weights = [0] * len(connections)
        for command in commands:  # what is of one slot stays in order, on one connection
            lane = of_slot.setdefault(command.slot, min(range(len(weights)), key=weights.__getitem__))
            weights[lane] += command.weight
            shares[lane].append(command)
        return [(pool, Lane(connection, share)) for connection, share in zip(connections, shares, strict=True)]
