"""The nodes of a Redis server or cluster: sends requests in parallel, follows redirections, enforces deadlines.

redis-py opens and pools the connections and tracks the cluster (`NodesManager`). Requests are sent here, because a call spans
many partitions on several nodes under one deadline.
"""

import logging
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from ssl import SSLContext
from typing import Any, Final, TypedDict
from weakref import WeakValueDictionary

import numpy as np
from redis import Redis, exceptions
from redis.cluster import ClusterNode, NodesManager
from redis.connection import BlockingConnectionPool

from hps.errors import DatabaseCorruptError, DatabaseError, DatabaseTimeoutError
from hps.ground.key_sets import KeySet
from hps.ground.threads.lifetimes import disown_in_children, refusal
from hps.stores.redis.connections import BulkConnection, IdleConnections, Lane, PasswordFile, remaining_s, tls_context, until
from hps.stores.redis.layout import keys_of
from hps.stores.redis.requests import Call, Request
from hps.types import KeyArray

_log = logging.getLogger(__name__)
_DEFAULT_PORT: Final = 6379
_SENTINEL_PORT: Final = 26379
_SENTINELS_EVERY_S: Final = 1.0  # a primary that is cut off from them does not report its replacement
_ROUNDS: Final = 16  # of redirections: enough for a slot in migration
_PAUSE_S: Final = 0.01
_MOST_RESOLVING: Final = 32  # name resolutions at a time, also hanging ones
_SCAN_COUNT: Final = 10_000
_LEAST_REFRESH_S: Final = 0.1  # between refreshes of an unstable cluster
# Fields of INFO with a version. Valkey and Dragonfly report Redis' field, too, for the sake of clients.
_PROGRAMS: Final = {"dragonfly_version": "Dragonfly", "valkey_version": "Valkey", "redis_version": "Redis"}
# Exceptions of redis-py if no cluster node answers, or none serves a slot.
_NO_CLUSTER: Final = (exceptions.RedisError, exceptions.RedisClusterException, IndexError)
_ADVICE: Final = {
    "NOAUTH": "it expects a password: set user_name and password, or HPS_REDIS_PASSWORD",
    "WRONGPASS": "user_name or password is wrong",
    "NOPERM": "the user may not do this: grant it the commands and the keys hps_et{*",
    "OOM": "it is full: give it more maxmemory, or lower overflow_margin",
    "LOADING": "it is reading its data from disk; retry when it has finished",
    "READONLY": "it is a replica; give the address of the primary, or of its sentinels (sentinel_service)",
    "MASTERDOWN": "it is a replica that has lost its primary",
    "CLUSTERDOWN": "the cluster is incomplete; see CLUSTER INFO",
    "MISCONF": "it cannot save its data and therefore refuses writes; see its log",
    "BUSY": "a script keeps it busy",
    "NOREPLICAS": "too few replicas are connected to it for a write",
    "WRONGTYPE": "another program uses this key for something else",
}


def parse_addresses(address: str, *, sentinels: bool = False) -> list[tuple[str, int]]:
    """Parse the addresses of `RedisNodes` to hosts and ports, or paths and 0. IPv6 addresses are in brackets."""
    addresses = []
    for part in re.split("[,;]", address):
        if part.strip().startswith("unix://"):
            addresses.append((part.strip().removeprefix("unix://"), 0))
            continue
        found = re.fullmatch(r"(\[[^\]]+\]|[^:]+)(?::(\d+))?", part.strip())
        if found is None:
            raise DatabaseError(f"redis: address: got {part.strip()!r}, expected host[:port] or unix:///path")
        addresses.append((found[1].strip("[]"), int(found[2] or (_SENTINEL_PORT if sentinels else _DEFAULT_PORT))))
    return list(dict.fromkeys(addresses))


class Access(TypedDict, total=False):
    """Settings of `RedisNodes`, with its defaults."""

    user_name: str
    password: str
    password_path: str
    sentinel_service: str
    sentinel_password: str
    tls: SSLContext | None
    tls_server_name: str
    num_node_connections: int
    connect_timeout_s: float
    read_timeout_s: float
    timeout_s: float


def access_of(config: Any) -> Access:
    return {
        "user_name": config.user_name,
        "password": config.password,
        "password_path": config.password_path,
        "sentinel_service": config.sentinel_service,
        "sentinel_password": config.sentinel_password,
        "tls": tls_context(config),
        "tls_server_name": config.tls_server_name_identification,
        "num_node_connections": config.num_node_connections,
    }


class RedisNodes:
    """A server, the masters of a cluster, or the primary that sentinels name. *Thread-safe.*

    Args:
        address: `host[:port]` or `unix:///path` of the server, of some nodes of the cluster, or of sentinels, separated by `,`
            or `;`.
        user_name, password, password_path: as in `volatile_db`; empty for none.
        sentinel_service: name of the primary that the sentinels at `address` know; empty: there are no sentinels.
        tls: None for plain connections.
        tls_server_name: required name in the servers' certificates; sent as SNI.
        num_node_connections: maximum connections to one node.
        read_timeout_s: maximum silence of a node that owes a reply.
        timeout_s: timeout of one `run`.

    Attributes:
        facts: INFO of the first node that answered.

    Raises:
        DatabaseError: no node can be reached, or it refuses the user.
    """

    def __init__(
        self,
        address: str,
        *,
        user_name: str = "default",
        password: str = "",
        password_path: str = "",
        sentinel_service: str = "",
        sentinel_password: str = "",
        tls: SSLContext | None = None,
        tls_server_name: str = "",
        num_node_connections: int = 5,
        connect_timeout_s: float = 1.0,
        read_timeout_s: float = 1.0,
        timeout_s: float = 2.0,
    ) -> None:
        self.timeout_s = timeout_s
        self.facts: dict[str, Any] = {}
        self._addresses = addresses = parse_addresses(address, sentinels=bool(sentinel_service))
        self._family: WeakValueDictionary[int, BulkConnection] = WeakValueDictionary()
        self._settings: dict[str, Any] = {
            "connection_class": BulkConnection,
            "queue_class": IdleConnections,
            "max_connections": num_node_connections,
            "timeout": None,  # IdleConnections knows how long a call may wait
            "protocol": 2,
            "socket_connect_timeout": connect_timeout_s,
            "socket_timeout": read_timeout_s,
            "tls": tls,
            "server_name": tls_server_name,
            "family": self._family,
            "resolving": threading.BoundedSemaphore(_MOST_RESOLVING),
        }
        user = None if user_name == "default" else user_name or None
        self._credentials: dict[str, Any] = {"username": user if password else None, "password": password or None}
        if password_path:
            self._credentials = {"credential_provider": PasswordFile(user, password_path)}
        self._service = sentinel_service
        of_seeds = {"password": sentinel_password or None} if sentinel_service else self._credentials
        self._seeds = [self._node(*address, of_seeds) for address in addresses]
        self._primaries: dict[tuple[str, int], ClusterNode] = {}  # named by sentinels
        self._server = self._seeds[0]  # without a cluster
        self._cluster: NodesManager | None = None
        self._refreshing = threading.Lock()
        self._creating = threading.Lock()  # guards the creation of pools
        self._refreshed_at = 0.0
        self._failed: str | None = None  # node that caused the refresh
        self._stale = False
        self._failure_logged = False  # failure of the last refresh was logged
        self._closed = False
        disown_in_children(self)
        with until(time.monotonic() + timeout_s):
            self._discover()

    @property
    def clustered(self) -> bool:
        return self._cluster is not None

    @property
    def served_slots(self) -> int:
        """Number of hash slots that a node serves; 0 without a cluster."""
        return len(self._cluster.slots_cache) if self._cluster else 0

    @property
    def open_connections(self) -> int:
        return sum(connection.is_connected for connection in self._connections())

    def execute(self, slot: int, *words: str | bytes | int) -> Any:
        """Run one command and return its reply; raises as `run` does."""
        call = Call(slot, *words)
        self.run([call])
        return call.reply

    def run(self, requests: Sequence[Request], deadline: float | None = None) -> None:
        """Run requests, those of one slot in order; return when each has its reply.

        Args:
            deadline: time limit, on the monotonic clock; default: `timeout_s` from now.

        Raises:
            DatabaseError: at least one failed. Requests of other nodes were completed.
        """
        deadline = time.monotonic() + self.timeout_s if deadline is None else deadline
        with until(deadline):
            self._refresh()
            at: dict[ClusterNode, list[Request]] = {}
            if self._cluster:
                for request in requests:
                    at.setdefault(self._node_of(self._cluster, request.slot), []).append(request)
            elif requests:
                at[self._server] = list(requests)
            self._run(at)

    def name_of(self, slot: int) -> str:
        """Return host and port of the node believed to serve a slot."""
        name: str = (self._node_of(self._cluster, slot) if self._cluster else self._server).name
        return name

    def client(self, slot: int) -> Redis:
        """Return redis-py's client of the node that serves a slot."""
        client: Redis = (self._node_of(self._cluster, slot) if self._cluster else self._server).redis_connection
        return client

    def keys(self, pattern: bytes) -> Iterator[bytes]:
        """Yield the matching keys of all nodes, possibly with duplicates; raises as `run` does."""
        for node in self._cluster.get_nodes_by_server_type("primary") if self._cluster else [self._server]:
            cursor = b"0"
            while True:
                scan = Call(0, "SCAN", cursor, "MATCH", pattern, "COUNT", _SCAN_COUNT)
                with until(time.monotonic() + self.timeout_s):
                    self._run({node: [scan]})
                cursor, keys = scan.reply
                yield from keys
                if cursor == b"0":
                    break

    def scan_hash(self, slot: int, key: bytes, count: int, skip: bytes = b"") -> Iterator[tuple[KeyArray, list[bytes]]]:
        """Yield the fields of a hash as keys of a table, with their values, about `count` at a time, each field once.

        Args:
            skip: a field that is not a key.
        """
        yielded = KeySet()  # HSCAN repeats fields while Redis resizes the hash
        cursor = b"0"
        while True:
            cursor, flat = self.execute(slot, "HSCAN", key, cursor, "COUNT", max(1, count))
            if skip and skip in flat[::2]:
                at = 2 * flat[::2].index(skip)
                del flat[at : at + 2]
            keys = keys_of(flat[::2], key)
            if keys.size:
                new = yielded.add(keys)
                values = flat[1::2]
                yield keys[new], values if new.all() else [values[i] for i in np.flatnonzero(new)]
            if cursor == b"0":
                return

    def close(self) -> None:
        """Close every connection. Calls on other threads fail."""
        self._closed = True
        for connection in self._connections():
            connection.disconnect()

    def disown(self) -> None:
        """Close a forked child's copies of the sockets. redis-py does not shut down another process's sockets."""
        self.close()

    def _connections(self) -> list[Any]:
        found = (reference() for reference in self._family.valuerefs())
        return [connection for connection in found if connection is not None]

    def _node(self, host: str, port: int, credentials: dict[str, Any]) -> ClusterNode:
        pool = BlockingConnectionPool(host=host, port=port, **credentials, **self._settings)
        return ClusterNode(host, port, "primary", Redis(connection_pool=pool))

    # Topology.

    def _discover(self) -> None:
        if self._service:
            self._server = self._query_sentinels()
            return
        failures: list[str] = []
        replica: ClusterNode | None = None
        for tried, seed in enumerate(self._seeds):
            share_s = remaining_s() / (len(self._seeds) - tried)  # leaves time for other seeds if this one is silent
            try:
                with until(time.monotonic() + share_s):
                    facts = seed.redis_connection.info()
            except (exceptions.RedisError, DatabaseError) as error:
                failures.append(str(_database_error(seed, error)))
                continue
            self.facts = facts
            if facts.get("cluster_enabled"):
                self._cluster = self._find_cluster()
                return
            if not is_replica(facts):
                self._server = seed
                return
            replica = replica or seed
        if replica is None:
            raise DatabaseError(f"redis: none of {len(self._seeds)} nodes answered: " + " | ".join(failures))
        self._server = replica

    def _query_sentinels(self) -> ClusterNode:
        """Request the primary from the sentinels in turn, first from the one whose last answer was right."""
        failures: list[str] = []
        for tried, sentinel in enumerate(self._seeds):
            node = sentinel
            try:
                with until(time.monotonic() + remaining_s() / (len(self._seeds) - tried)):
                    words = ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._service)
                    found = sentinel.redis_connection.execute_command(*words)
                    if not found:
                        raise DatabaseError(f"it knows no primary named {self._service!r} (sentinel_service)")
                    at = found[0].decode(), int(found[1])
                    node = self._primaries.get(at) or self._node(*at, self._credentials)
                    self._primaries[at] = node
                    facts = node.redis_connection.info()
                    if is_replica(facts):
                        raise DatabaseError(f"it is a replica, but sentinel {sentinel.name} named it as the primary")
            except (exceptions.RedisError, DatabaseError) as error:
                failures.append(str(_database_error(node, error)))
                continue
            self.facts = facts
            self._seeds = [sentinel, *(seed for seed in self._seeds if seed is not sentinel)]
            return node
        raise DatabaseError(f"redis: none of {len(failures)} sentinels led to a primary: " + " | ".join(failures))

    def _find_cluster(self) -> NodesManager:
        try:
            return NodesManager(
                self._seeds, from_url=True, connection_pool_class=BlockingConnectionPool, **self._credentials, **self._settings
            )
        except _NO_CLUSTER as error:
            raise DatabaseError(f"redis: no node knows the hash slots of the cluster ({error}); see CLUSTER SLOTS") from error

    def _refresh(self) -> None:
        """Refresh the topology after a failure, unless another thread does; until then the known nodes are used."""
        expired = self._stale or (self._service and time.monotonic() > self._refreshed_at + _SENTINELS_EVERY_S)
        if not expired or time.monotonic() < self._refreshed_at + _LEAST_REFRESH_S:
            return
        if not self._refreshing.acquire(blocking=False):
            return
        try:
            self._stale = False  # errors from now on cause another refresh
            with until(time.monotonic() + remaining_s() / 2):  # the rest is for the call itself
                if self._cluster:  # queries the known nodes first, then the configured ones
                    self._cluster.initialize(
                        self._addresses, disconnect_startup_nodes_pools=False, last_failed_node_name=self._failed
                    )
                else:
                    self._discover()
            self._failure_logged = False
        except (*_NO_CLUSTER, DatabaseError) as error:
            self._stale = True
            if not self._failure_logged:
                self._failure_logged = True
                _log.warning("%s; the known nodes are used", error)
        finally:
            self._refreshed_at = time.monotonic()
            self._refreshing.release()

    def _mark_stale(self, failed: ClusterNode | None = None) -> None:
        """Refresh the topology before the next call, if there are several nodes; query a failed one last."""
        if self._cluster or self._service or len(self._seeds) > 1:
            self._failed = failed.name if failed else self._failed
            self._stale = True

    def _node_of(self, cluster: NodesManager, slot: int) -> ClusterNode:
        serving = cluster.slots_cache.get(slot)  # the master and its replicas
        if not serving:
            self._mark_stale()
            raise DatabaseError(f"redis: no node of the cluster serves hash slot {slot}; see CLUSTER SLOTS")
        return serving[0]

    def _redirected(self, cluster: NodesManager, node: ClusterNode, error: exceptions.AskError) -> ClusterNode:
        """Return the target of a MOVED or ASK reply; it may be a node that serves no slot yet."""
        error.host = error.host or node.host
        if isinstance(error, exceptions.MovedError):
            with suppress(KeyError):  # no node served the slot
                cluster.move_slot(error)
            self._mark_stale()
        target = ClusterNode(error.host, error.port, "primary")
        return cluster.nodes_cache.setdefault(target.name, target)

    # Requests and replies.

    def _run(self, at: dict[ClusterNode, list[Request]]) -> None:
        if self._closed:
            raise refusal(self, "redis")
        retried: set[str] = set()
        for rounds in range(_ROUNDS):
            if rounds > 2:  # a slot in migration, or nodes that do not agree yet
                time.sleep(min(_PAUSE_S * rounds, max(0.0, remaining_s())))
            retries: dict[ClusterNode, list[Request]] = {}
            failures: list[Exception] = []
            for lane in self._exchange(at, failures):
                if lane.fault is None:
                    continue
                # An idle connection may have been closed by the server: after a restart, or an idle timeout. If nothing was
                # received on it, its requests are sent once more, over a new connection.
                if type(lane.fault) is exceptions.ConnectionError and not lane.received and lane.node.name not in retried:
                    retried.add(lane.node.name)
                    # Guarded writes are not repeated: a copy that arrives after the call has returned would undo later writes.
                    retries.setdefault(lane.node, []).extend(request for request in lane.requests if not request.once)
                else:
                    failures.append(_database_error(lane.node, lane.fault))
                    self._mark_stale(lane.node)
            for node, requests in at.items():
                for request in requests:
                    if request.error is not None:
                        self._handle_error(node, request, retries, failures)
            if failures:
                raise failures[0]
            if not any(retries.values()):
                return
            at = retries
        raise DatabaseError(f"redis: the cluster redirected requests {_ROUNDS} times; see CLUSTER NODES")

    def _handle_error(
        self, node: ClusterNode, request: Request, retries: dict[ClusterNode, list[Request]], failures: list[Exception]
    ) -> None:
        """Retry a request at the node named in its error, or record the failure."""
        error, request.error = request.error, None
        target = node
        if self._cluster and isinstance(error, exceptions.AskError):
            moved = isinstance(error, exceptions.MovedError)
            if moved or not request.preceding:  # the keys of a transaction may be on both nodes until the slot has moved
                target = self._redirected(self._cluster, node, error)
                request.asking, request.redirected = not moved, True
        elif not isinstance(error, exceptions.TryAgainError):
            failures.append(_database_error(node, error))
            request.refused = True
            if isinstance(error, (exceptions.ClusterDownError, exceptions.ReadOnlyError)):
                self._mark_stale()
            return
        retries.setdefault(target, []).append(request)

    def _exchange(self, at: dict[ClusterNode, list[Request]], failures: list[Exception]) -> list[Lane]:
        """Send the requests of all nodes and read their replies, until each lane is done or has failed."""
        lanes: list[Lane] = []
        try:
            # A fixed order, so that two calls cannot wait for each other's connections.
            for node in sorted(at, key=lambda node: node.name):
                try:
                    lanes.append(Lane(node, self._pool(node), at[node]))
                except (exceptions.RedisError, DatabaseError) as error:
                    failures.append(_database_error(node, error))
                    self._mark_stale(node)
            busy = lanes
            while busy:
                if self._closed:
                    raise DatabaseError("redis: this database was closed during the call")
                # All nodes get requests first, so that they work while the replies of one are read.
                for lane in busy:
                    lane.send()
                for lane in busy:
                    lane.receive()
                busy = [lane for lane in busy if lane.busy]
        finally:
            for lane in lanes:
                lane.release(keep=not self._closed)
        return lanes

    def _pool(self, node: ClusterNode) -> BlockingConnectionPool:
        if node.redis_connection is None and self._cluster:  # a redirection named it first
            with self._creating:
                self._cluster.create_redis_connections([node])
        pool: BlockingConnectionPool = node.redis_connection.connection_pool
        return pool


def _database_error(node: ClusterNode, error: Exception | None) -> DatabaseError:
    """Convert an error of redis-py; add the node's name to one of our own."""
    typed: DatabaseError
    if isinstance(error, DatabaseError):
        typed = type(error)(f"redis {node.name}: {error}")
    elif isinstance(error, exceptions.TimeoutError):
        typed = DatabaseTimeoutError(f"redis {node.name}: {error}")
    elif isinstance(error, exceptions.InvalidResponse):
        typed = DatabaseCorruptError(f"redis {node.name}: {error}; expected a reply to the request")
    elif isinstance(error, exceptions.ResponseError) or (isinstance(error, exceptions.RedisError) and error.status_code):
        code = error.status_code or str(error).split(" ", 1)[0]
        advice = _ADVICE.get(code)
        if "without any password configured" in str(error):
            advice = "it has no password: leave password empty"
        if "Out of memory" in str(error):  # Dragonfly, which has no code for it
            advice = _ADVICE["OOM"]
        if "can't run this command" in str(error):  # in a script
            advice = _ADVICE["NOPERM"]
        refusal = f"{code} {error}" if error.status_code else str(error)
        typed = DatabaseError(f"redis {node.name}: it refused: {refusal}" + (f"; {advice}" if advice else ""))
    else:
        typed = DatabaseError(f"redis {node.name}: the connection broke ({error})")
    typed.__cause__ = error
    return typed


def program_of(facts: Mapping[str, Any]) -> str:
    return next((f"{name} {facts[field]}" for field, name in _PROGRAMS.items() if field in facts), "Redis ?")


def is_replica(facts: Mapping[str, Any]) -> bool:
    return facts.get("role") in {"slave", "replica"}


def evicts_any_key(facts: Mapping[str, Any]) -> bool:
    """Return whether the server of this INFO evicts keys without expiry when it is full."""
    # Dragonfly has one policy that evicts, `eviction`, as its source of 1.40 shows; Valkey has those of Redis.
    return str(facts.get("maxmemory_policy", "")).startswith(("allkeys", "eviction"))
