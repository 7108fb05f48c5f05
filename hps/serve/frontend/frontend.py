"""A frontend process: reads requests, posts lookups to the engine, and sends its answers."""

import asyncio
import gc
import logging
import select
import signal
import socket
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, Final, Protocol

import uvloop

from hps.configuration.load import Configuration, ServiceConfig
from hps.configuration.tokens import TokenConfig
from hps.errors import HPSError, NotReadyError
from hps.ground.http1 import Head
from hps.ground.memory.bounded_cache import cached_bytes
from hps.ground.memory.heap import bound_heap
from hps.regions import layout
from hps.regions.layout import FrontendDescriptors, Memory
from hps.regions.sharing import body_bytes
from hps.serve.frontend.connections import UNREAD_S, ClientConnection, Connections
from hps.serve.frontend.engine_health import EngineHealth
from hps.serve.frontend.exchange import EngineExchange
from hps.serve.frontend.lookups import read_cached
from hps.serve.frontend.pending import Lookup, Requester, decode
from hps.serve.frontend.proxy import EngineConnections
from hps.serve.frontend.published import FrontendVersion, LookupTarget, Published
from hps.serve.frontend.shared_memory import MARK, SharedTensors, shared_tensors
from hps.serve.frontend.tls import TLS
from hps.serve.http.authorization import CERTIFICATE, Authorization
from hps.serve.http.http_answer import (
    JSON,
    HTTPAnswer,
    RequestError,
    error_answer,
    release_frames,
    status_of,
)
from hps.serve.http.http_metrics import HTTPMetrics, InferenceCounts, are_figures
from hps.serve.http.memory_budget import SMALL_BYTES, MemoryBudget
from hps.serve.http.refusals import Refusals
from hps.serve.http.request_body import MOST_OBJECT_BYTES, check_encoding, too_large
from hps.serve.http.targets import row_target
from hps.serve.logs.lines import configure_logging
from hps.serve.logs.requests import POLLED, RequestLog, Served, new_ids, request_id
from hps.serve.logs.spans import spans_of
from hps.serve.protocol.json_size import SMALL_JSON_BYTES
from hps.serve.protocol.open_inference import parse_header_length
from hps.serve.protocol.open_inference_header import CACHED_BYTES

_log = logging.getLogger(__name__)

_TICK_S: Final = 0.5
_FIGURES_S: Final = 0.2
_STOP_S: Final = 10.0
_STOP_TICK_S: Final = 0.02
_IMPORTS_S: Final = 60.0  # for modules of transforms, before a process that replaces another one serves other models
_HEAPS: Final = 2  # one thread serves
_MOST_ROLLOUTS: Final = 32  # whose counts fit in the figures
BACKLOG: Final = 2048


class RequestHead(Protocol):
    """The head of a request over any protocol."""

    @property
    def method(self) -> str: ...
    @property
    def path(self) -> str: ...
    @property
    def headers(self) -> Mapping[bytes, bytes]: ...


class GrpcPort(Protocol):
    """Serves gRPC on the event loop of a frontend."""

    async def start(self) -> None: ...
    async def stop(self, timeout_s: float) -> None: ...
    def poll(self, now: float) -> None:
        """Called twice a second."""

    def renew_certificate(self) -> None:
        """Load the certificate's files, which have changed."""


class Frontend:
    """One frontend process. *One event loop.*

    Args:
        number: index of the frontend.
        shared: descriptors that all frontends share with the engine. Each frontend has an equal share of the limits.
        configuration: its settings apply until the snapshot has others.
        connect: makes the protocol of a new HTTP connection.
        spins: whether to spin while lookups are pending, rather than sleep.
        loopback: whether only clients on this machine can connect.
    """

    # All limits are here and in `Connection`, not in the engine: a client can fill the memory of its frontend, while other
    # frontends and the engine go on. For the same reason a frontend imports nothing of the tiers, and writes only its region.

    def __init__(
        self,
        number: int,
        shared: FrontendDescriptors,
        configuration: Configuration,
        *,
        connect: Callable[["Frontend"], asyncio.BaseProtocol],
        spins: bool,
        loopback: bool,
    ) -> None:
        self.number = number
        self._connect = connect
        self._frontends = len(shared.regions)
        settings = self.settings = configuration.service
        self.published = Published(Memory(shared.snapshot, writable=False), self._apply)
        self.exchange = EngineExchange(number, shared, self.published, settings, spins=spins)
        self.draining = False  # each answer tells its client to reconnect
        self.refusals = Refusals()
        self.memory = MemoryBudget(settings.max_held_bytes)
        self.connections = Connections(settings.max_connections)
        self.authorization = Authorization(settings, share=1 / self._frontends)
        self.authorization.loopback = loopback
        self.tls = TLS(settings, logging.DEBUG if number else None) if settings.tls_certificate_path else None
        self.grpc: GrpcPort | None = None  # set before `start`
        self._tokens: list[dict[str, Any]] = []
        self.metrics = HTTPMetrics(self.refusals)
        self._spans = spans_of(configuration)
        self._requests = RequestLog(settings, self._spans)
        self.new_id = new_ids()
        self.engine = EngineConnections(shared.path, self.exchange.unavailable)
        self.engine_health = EngineHealth(self.engine, self.check_ready)
        self._ticks: dict[str, asyncio.TimerHandle] = {}
        self._configure(settings)
        region = self.exchange.region
        found = layout.read_text(region, layout.FIGURES, layout.FIGURES_BYTES - layout.TEXT_AT)
        if found is not None and are_figures(found[1]):  # of the process that this one replaces
            self.metrics.add(found[1]["http"])
            for name, values in found[1]["inference"].items():
                self.published.counts[name] = InferenceCounts(*values)
            for identity, values in found[1]["rollouts"].items():
                self.published.inherit_rollout(identity, values)
        region[layout.FIGURES] = region[layout.FIGURES] & ~1

    def _apply(self, snapshot: dict[str, Any]) -> None:
        settings = ServiceConfig.model_validate(snapshot["settings"])
        if settings != self.settings or snapshot["tokens"] != self._tokens:
            self._tokens = snapshot["tokens"]
            self._configure(settings)
        self.exchange.segments.update(snapshot["shared_memory"])

    def _configure(self, settings: ServiceConfig) -> None:
        before, self.settings = self.settings, settings
        keys = "log_format", "log_level"  # only changed ones: the command line overrides the configuration
        configure_logging(*(None if getattr(before, key) == getattr(settings, key) else getattr(settings, key) for key in keys))
        self.authorization.configure(settings, [TokenConfig.model_validate(token) for token in self._tokens])
        self._requests.configure(settings)
        self.memory.limit_to(body_bytes(settings, self._frontends))
        self.exchange.settings = settings
        self.connections.limit_to(-(-settings.max_connections // self._frontends))

    # -- requests ---------------------------------------------------------------------------------------------------------

    def served(self) -> Served:
        served = Served()
        served.id = self.new_id()
        return served

    def start_request(
        self, client: str, head: RequestHead, target: LookupTarget | None, served: Served, started: float
    ) -> bool:
        """Record a request's id, and decide what to log of it; return `watched` for `finish_request`."""
        headers = head.headers
        if (b"x-request-id" in headers or b"traceparent" in headers) and (named := request_id(headers)):
            served.id = named
        if target is None:
            return False
        served.model, served.version, served.headers = target.model_name, target.version, headers
        if watched := started >= self._requests.quiet_until:
            self._requests.start(served, self._scope(head, client), headers)
        return watched

    def check(
        self, head: Head, target: LookupTarget | None, served: Served, client: str, server: Any, certificate: Sequence[str]
    ) -> None:
        """Check a request's head, and the names in its client's certificate, before its body is read."""
        # Rejecting here, rather than when the body is complete, is what keeps strangers from holding memory.
        if self.published.written[0] != self.published.version:
            self.published.poll()
        if head.length > (most := self.most_bytes(head.path, target)):
            raise too_large(f"Content-Length is {head.length}", most)
        if b"content-encoding" in head.headers:
            check_encoding(head.headers)
        if self.authorization.requires_tokens or certificate:
            self.authorize(head.headers, certificate, served, target)
        if target is None:
            if not 0 <= head.length <= SMALL_BYTES:  # the engine checks rights, but too late for a large body
                scope = {**self._scope(head, client), "server": server, CERTIFICATE: certificate}
                self.authorization.check(scope, head.headers, served.identity)
            return
        if head.method != "POST":
            got = f"got {head.method} {head.path[:300]}"
            raise RequestError(405, f"{got}, expected POST", (b"allow", b"POST"))
        self.published.version_of(target)

    def authorize(
        self, headers: Mapping[bytes, bytes], certificate: Sequence[str], served: Served, target: LookupTarget | None
    ) -> None:
        """Identify the client, and check its limits, and its rights if it sends a lookup."""
        identity = served.identity = self.authorization.find(headers, certificate)
        if target is None:
            self.authorization.count(identity)  # the engine checks its rights
            return
        if self.published.version < 0:
            raise NotReadyError(f"the parameter server is not ready: {self.published.blocked}")
        self.authorization.admit(identity, "lookup", headers, certificate)

    def can_reuse(self, snapshot: int, started: float) -> bool:
        """Return True if a lookup planned from this head and JSON part may be repeated: nothing that decides it has changed.

        Args:
            snapshot: version of the engine's snapshot, with models, tokens and settings, when it was planned.
            started: arrival of the repetition, for which no line of the access log may be due.
        """
        return snapshot == self.published.written[0] == self.published.version and started < self._requests.quiet_until

    def most_bytes(self, path: str, target: LookupTarget | None) -> int:
        """Return the limit of a request's body, as sent and decompressed."""
        most = self.settings.max_body_bytes
        return most if target is not None or row_target(path) is not None else min(most, MOST_OBJECT_BYTES)

    def text_bytes(self, head: Head, target: LookupTarget | None) -> int:
        """Return the length of the JSON part of a binary lookup; -1 for every other request."""
        if target is None or target.is_json or b"content-encoding" in head.headers:
            return -1
        size = parse_header_length(head.headers.get(b"inference-header-content-length"), head.length)
        return size if size is not None and size < SMALL_JSON_BYTES else -1

    def start_planned(
        self, requester: Requester, target: LookupTarget, served: Served, text: bytes, size: int
    ) -> Lookup | None:
        """Start a binary lookup whose JSON part has arrived; return None if it needs its complete body first."""
        if served.traced or len(text) > CACHED_BYTES or (self.settings.shared_memory_bytes and MARK in text):
            return None
        version = self.published.version_of(target, served)
        if version.tables.transform is not None:
            return None
        began = time.perf_counter_ns()
        try:
            plan = read_cached(text, None, version.tables, self.settings.max_keys_per_request).plan
        except HPSError as error:
            if not _falls_back(version, target, served, error):
                raise
            plan = None
        if plan is None:
            return None
        if size != len(text) + plan.keys_bytes:
            return None  # the generic path reports the error
        lookup = Lookup(requester, target, served, version, text, plan, device=plan.device, began_ns=began)
        served.version = version.tables.version
        if served.identity is not None:
            self.authorization.take_keys(served.identity, plan.keys)
        return lookup

    def start_decoded(
        self,
        requester: Requester,
        target: LookupTarget,
        served: Served,
        body: bytes | bytearray,
        length: bytes | None,
        shared: SharedTensors | None = None,
    ) -> Lookup:
        """Start a lookup whose body has arrived; `length` is the header with the length of its JSON part, if any."""
        while True:
            version = self.published.version_of(target, served)
            try:
                return self._start_decoded(requester, target, served, version, body, length, shared)
            except HPSError as error:
                if not _falls_back(version, target, served, error):
                    raise

    def _start_decoded(
        self,
        requester: Requester,
        target: LookupTarget,
        served: Served,
        version: FrontendVersion,
        body: bytes | bytearray,
        length: bytes | None,
        shared: SharedTensors | None,
    ) -> Lookup:
        lookup = Lookup(requester, target, served, version, b"", body=body, began_ns=time.perf_counter_ns())
        if shared is not None:
            lookup.shared, lookup.text, lookup.json_bytes = shared, shared.text, len(shared.text)
            if not served.traced and len(shared.text) <= CACHED_BYTES and version.tables.transform is None:
                lookup.plan = read_cached(shared.text, None, version.tables, self.settings.max_keys_per_request).plan
            if lookup.plan is not None:
                served.version, lookup.device = version.tables.version, lookup.plan.device
                self.authorization.take_keys(served.identity, lookup.plan.keys)
                return lookup
            if shared.size_bytes > (most := self.settings.max_body_bytes):
                raise too_large(f"its tensors in shared memory have {shared.size_bytes} bytes", most)
            requester.reserve_bytes(len(body) + shared.size_bytes, "reading the request")
            lookup.body = self.exchange.segments.body_of(shared)
        elif not target.is_json:
            try:
                lookup.json_bytes = parse_header_length(length, len(body))
            except HPSError:
                version.counts.failed(lookup.began_ns)
                raise
        if not self.exchange.transforms.starts(lookup, self._take_keys):
            decode(lookup, self.settings.max_keys_per_request)
            self._take_keys(lookup)
        return lookup

    def _take_keys(self, lookup: Lookup) -> None:
        self.authorization.take_keys(lookup.served.identity, lookup.placed.keys if lookup.placed is not None else 0)

    def shared_tensors(
        self, target: LookupTarget, body: bytes | bytearray, length: bytes | None, client: str, headers: Mapping[bytes, bytes]
    ) -> SharedTensors | None:
        """Find the tensors in shared memory of a request; None without any, or if the feature is off."""
        if not self.settings.shared_memory_bytes or target.is_json:
            return None
        return shared_tensors(body, parse_header_length(length, len(body)), client, headers)

    # -- answers ----------------------------------------------------------------------------------------------------------

    def answer_without_engine(self, head: Head | None) -> HTTPAnswer:
        """Answer a request that could not be forwarded to the engine's application, or raise NotReadyError."""
        if head is not None and head.path == "/v2/health/live" and head.method in ("GET", "HEAD"):
            return HTTPAnswer(200, [JSON], (b'{"live":true}',))
        self.published.poll()
        raise NotReadyError(self.exchange.unavailable())

    def check_ready(self, path: str) -> None:
        """Raise NotReadyError for a request for readiness, before it is forwarded, unless the engine answers this frontend."""
        # The engine's application knows its models, but not whether this frontend's region works. While it is blocked it
        # reports the reason and its progress, which is more than could be said here.
        if path.startswith("/v2/") and path.endswith("/ready"):
            self.published.poll()
            unready = self.exchange.unready_reason, self.published.unready_reason
            if not self.published.blocked and (reason := next(filter(None, (reason() for reason in unready)), "")):
                raise NotReadyError(reason)

    def error_answer(self, error: Exception, client: str, head: Head | None, served: Served) -> HTTPAnswer:
        self.record_error(error, client, head, served)
        answer = error_answer(error, served.id.decode())
        release_frames(error)
        return answer

    def record_error(self, error: Exception, client: str, head: RequestHead | None, served: Served) -> None:
        """Count and log an error with which a request ends."""
        served.failed(error)
        line = f"{head.method} {head.path[:300]}" if head is not None else "a request"
        self.refusals.record_error(error, line, client or "an unknown address", served.id.decode())

    def finish_request(
        self, client: str, head: RequestHead | None, route: str, served: Served, status: int, started: float, *, watched: bool
    ) -> None:
        """Count and log a request that has ended."""
        seconds = time.perf_counter() - started
        token = "" if served.identity is None else self.authorization.counted(served.identity)
        self.metrics.count(route, status, seconds, token)
        if head is not None and (watched or served.error is not None):
            self._requests.finish(served, self._scope(head, client), route, status, seconds)
        elif head is None or head.path not in POLLED:
            self._requests.left_out += 1

    def _scope(self, head: RequestHead, client: str) -> MutableMapping[str, Any]:
        return {
            "type": "http",
            "method": head.method,
            "path": head.path,
            "client": (client, 0) if client else None,
            "scheme": "http" if self.tls is None else "https",
        }

    # -- connections ------------------------------------------------------------------------------------------------------

    def opened(self, connection: ClientConnection) -> None:
        connections = self.connections
        if len(connections.order) >= connections.most:
            limit = connections.full()
            replaceable = connections.find_replaceable()
            if replaceable is None:
                self.refusals.refuse("connections", limit)
                connection.refuse_connection()
                return
            replaceable.close()
        connections.order[connection] = None

    def closed(self, connection: ClientConnection) -> None:
        self.connections.order.pop(connection, None)

    def _poll(self) -> None:
        """Do the periodic work, twice a second."""
        now = time.monotonic()
        settings = self.settings
        self.published.poll()
        self.exchange.poll(now)
        if self.tls is not None and self.tls.poll() and self.grpc is not None:
            self.grpc.renew_certificate()
        if self.grpc is not None:
            self.grpc.poll(now)
        for connection in list(self.connections.order):
            connection.poll(now, settings.request_timeout_s, settings.answer_timeout_s, settings.keep_alive_s)
        if self.exchange.slots.crowded:
            for connection in list(self.connections.order):
                connection.end_unread(now - UNREAD_S)
        self.connections.poll()
        self._count_kept_by_tls()
        self._ticks["poll"] = self.loop.call_later(_TICK_S, self._poll)

    def _count_kept_by_tls(self) -> None:
        """Count the memory that TLS keeps. While it exceeds half of the budget, close the longest idle connections."""
        kept = [(connection, size) for connection in self.connections.order if (size := connection.kept_bytes)]
        total = sum(size for _, size in kept)
        for connection, size in kept:
            if total <= self.memory.limit // 2:
                break
            if connection.idle:
                connection.close()
                total -= size
        self.memory.kept = total

    # -- figures ----------------------------------------------------------------------------------------------------------

    def figures(self) -> dict[str, Any]:
        """Return the counts of this frontend, which include those of the processes that it replaces."""
        inference = {
            name: [counts.successes, counts.failures, counts.input_ns, counts.queue_ns, counts.infer_ns,
                                   counts.output_ns, counts.failure_ns, counts.last_ns]
            for name, counts in self.published.counts.items() if counts.last_ns
        }  # fmt: skip
        return {
            "http": self.metrics.figures(),
            "inference": inference,
            "rollouts": {
                identity: counts.values() for identity, counts in [*self.published.rollout_counts.values()][-_MOST_ROLLOUTS:]
            },
            "cpu_ns": time.process_time_ns(),
            "certificate_ends_s": int((self.tls and self.tls.expires_at) or 0),
            "connections": len(self.connections.order),
            "pending": len(self.exchange.pending),
            "held_bytes": self.memory.used + self.memory.kept + self.exchange.slots.used,
            "cached_bytes": cached_bytes(),
        }

    def publish(self) -> None:
        layout.write_text(self.exchange.region, layout.FIGURES, self.figures(), layout.FIGURES_BYTES - layout.TEXT_AT)

    def _publish_often(self) -> None:
        self.publish()
        self._ticks["publish"] = self.loop.call_later(_FIGURES_S, self._publish_often)

    # -- start and stop ---------------------------------------------------------------------------------------------------

    def run(self, listener: socket.socket) -> None:
        """Serve until SIGTERM. Blocks."""
        uvloop.run(self._run(listener))

    async def _run(self, listener: socket.socket) -> None:
        loop, stopping = asyncio.get_running_loop(), asyncio.Event()
        loop.add_signal_handler(signal.SIGTERM, stopping.set)
        loop.add_signal_handler(signal.SIGUSR1, self.drain)
        for number in (signal.SIGINT, signal.SIGHUP):  # the parent handles them
            loop.add_signal_handler(number, lambda: None)
        bound_heap(_HEAPS)
        # Frozen, the objects of all imports are not traversed by later collections, for which all requests would wait.
        gc.collect()
        gc.freeze()
        await self.start(listener)
        await stopping.wait()
        await self.stop(_STOP_S)
        self.close()

    async def start(self, listener: socket.socket) -> None:
        """Serve HTTP, and gRPC if it is set, on this event loop."""
        loop = self.loop = asyncio.get_running_loop()
        self.exchange.start(loop)
        self.published.poll()
        # It listens only now, when its event loop runs and the models are known: no accepted connection waits for that.
        due = time.monotonic() + _IMPORTS_S
        while self.published.importing() and time.monotonic() < due:
            await asyncio.sleep(_STOP_TICK_S)
        self._servers = [(listener, await loop.create_server(lambda: self._connect(self), sock=listener, backlog=BACKLOG))]
        if self.grpc is not None:
            await self.grpc.start()
        self._poll()
        self._publish_often()

    def drain(self) -> None:
        """Close every connection after its next answer."""
        self.draining = True

    async def stop(self, timeout_s: float) -> None:
        """Stop listening, and wait until all requests have their answers."""
        self.drain()
        grpc = None if self.grpc is None else asyncio.create_task(self.grpc.stop(timeout_s))
        # Closing a listener resets the connections in its queue, so the queues are emptied first.
        queued = select.poll()
        for listener, _ in self._servers:
            queued.register(listener, select.POLLIN)
        turns = 0
        while queued.poll(0) and turns < BACKLOG:
            turns += 1
            await asyncio.sleep(0)  # each turn of the event loop accepts at least one connection
        for _, server in self._servers:
            server.close()
        since = time.monotonic()
        while self.connections.order and time.monotonic() - since < timeout_s:
            for connection in list(self.connections.order):
                connection.close_if_quiet()
            await asyncio.sleep(_STOP_TICK_S)
        if grpc is not None:
            await grpc

    def close(self) -> None:
        """Abort the remaining connections, and publish the last figures."""
        for connection in list(self.connections.order):
            connection.transport.abort()
        for tick in self._ticks.values():
            tick.cancel()
        self.exchange.close()
        self.engine.close()
        self.publish()
        if self._spans is not None:
            self._spans.close()


def _falls_back(version: FrontendVersion, target: LookupTarget, served: Served, error: HPSError) -> bool:
    """Return True if the new version of a canary refuses a request, which the serving version may then answer."""
    rollout = version.rollout
    if rollout is None or version is not rollout.new or served.falls_back or target.version is not None:
        return False
    served.falls_back = status_of(error)
    return True
