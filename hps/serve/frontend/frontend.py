"""A front process: reads what clients ask, posts lookups to the engine, and sends its answers."""

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
from hps.regions.layout import FrontDescriptors, Memory
from hps.regions.sharing import body_bytes
from hps.serve.frontend.connections import UNREAD_S, ClientConnection, Connections
from hps.serve.frontend.engine_health import EngineHealth
from hps.serve.frontend.exchange import EngineExchange
from hps.serve.frontend.lookups import read_cached
from hps.serve.frontend.pending import Lookup, Requester, decode
from hps.serve.frontend.proxy import EngineConnections
from hps.serve.frontend.published import LookupTarget, Published
from hps.serve.frontend.shared_memory import MARK, SharedTensors, shared_tensors
from hps.serve.frontend.tls import TLS
from hps.serve.http.authorization import CERTIFICATE, Authorization
from hps.serve.http.held_memory import SMALL_BYTES, HeldMemory
from hps.serve.http.http_answer import (
    JSON,
    HTTPAnswer,
    OverloadedError,
    RequestError,
    error_answer,
    release_frames,
)
from hps.serve.http.http_metrics import HTTPMetrics, InferenceCounts, are_figures
from hps.serve.http.refusals import Refusals
from hps.serve.http.request_body import MOST_OBJECT_BYTES, check_encoding, too_large
from hps.serve.http.targets import row_target
from hps.serve.logs.lines import fields, use
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
_HEAPS: Final = 2  # one thread serves
BACKLOG: Final = 2048


class RequestHead(Protocol):
    """What is known of a request before its body."""

    @property
    def method(self) -> str: ...
    @property
    def path(self) -> str: ...
    @property
    def headers(self) -> Mapping[bytes, bytes]: ...


class GrpcPort(Protocol):
    """Serves gRPC beside HTTP, on the event loop of a front."""

    async def start(self) -> None: ...
    async def stop(self, timeout_s: float) -> None: ...
    def poll(self, now: float) -> None:
        """Called twice a second."""

    def renew_certificate(self) -> None:
        """The files of the certificate have changed."""


class Front:
    """One front process. *One event loop.*

    Args:
        number: which of the fronts it is.
        shared: what all fronts share with the engine; each has its share of the limits.
        configuration: has the settings of the service until the page has others.
        connect: makes the protocol of a new connection over HTTP.
        spins: whether to spin while lookups are under way, rather than sleep.
        loopback: whether only clients of this machine can connect.

    Attributes:
        leaving: whether the service is stopping, so that each answer tells its client to reconnect.
        grpc: serves gRPC; set it before `start`.
    """

    def __init__(
        self,
        number: int,
        shared: FrontDescriptors,
        configuration: Configuration,
        *,
        connect: Callable[["Front"], asyncio.BaseProtocol],
        spins: bool,
        loopback: bool,
    ) -> None:
        self.number = number
        self._connect = connect
        self._fronts = len(shared.regions)
        settings = self.settings = configuration.service
        self.published = Published(Memory(shared.snapshot, writable=False), self._follow)
        self.exchange = EngineExchange(number, shared, self.published, settings, spins=spins)
        self.leaving = False
        self.refusals = Refusals()
        self.memory = HeldMemory(settings.max_held_bytes)
        self.connections = Connections(settings.max_connections)
        self.authorization = Authorization(settings, share=1 / self._fronts)
        self.authorization.loopback = loopback
        self.tls = TLS(settings, logging.DEBUG if number else None) if settings.tls_certificate_path else None
        self.grpc: GrpcPort | None = None
        self._tokens: list[dict[str, Any]] = []
        self.metrics = HTTPMetrics(self.refusals)
        self._spans = spans_of(configuration)
        self._requests = RequestLog(settings, self._spans)
        self.new_id = new_ids()
        self.engine = EngineConnections(shared.path, self.exchange.away)
        self.engine_health = EngineHealth(self.engine, self.check_ready)
        self._ticks: dict[str, asyncio.TimerHandle] = {}
        self._configure(settings)
        region = self.exchange.region
        found = layout.read_text(region, layout.FIGURES, layout.FIGURES_BYTES - layout.TEXT_AT)
        if found is not None and are_figures(found[1]):  # those of the front before it
            self.metrics.add(found[1]["http"])
            for name, values in found[1]["inference"].items():
                self.published.counts[name] = InferenceCounts(*values)
        region[layout.FIGURES] = region[layout.FIGURES] & ~1

    def _follow(self, page: dict[str, Any]) -> None:
        settings = ServiceConfig.model_validate(page["settings"])
        if settings != self.settings or page["tokens"] != self._tokens:
            self._tokens = page["tokens"]
            self._configure(settings)
        self.exchange.segments.follow(page["shared_memory"])

    def _configure(self, settings: ServiceConfig) -> None:
        before, self.settings = self.settings, settings
        how = "log_format", "log_level"  # only where it has changed: the command line stands above the configuration
        use(*(None if getattr(before, key) == getattr(settings, key) else getattr(settings, key) for key in how))
        self.authorization.configure(settings, [TokenConfig.model_validate(token) for token in self._tokens])
        self._requests.configure(settings)
        self.memory.limit_to(body_bytes(settings, self._fronts))
        self.exchange.settings = settings
        self.connections.limit_to(-(-settings.max_connections // self._fronts))

    # -- requests ---------------------------------------------------------------------------------------------------------

    def served(self) -> Served:
        served = Served()
        served.id = self.new_id()
        return served

    def begin(self, client: str, head: RequestHead, target: LookupTarget | None, served: Served, started: float) -> bool:
        """Note a request's id, and decide what to log of it; return whether `end` has to be told."""
        headers = head.headers
        if (b"x-request-id" in headers or b"traceparent" in headers) and (named := request_id(headers)):
            served.id = named
        if target is None:
            return False
        served.model, served.version = target.model_name, target.version
        if watched := started >= self._requests.quiet_until:
            self._requests.begin(served, self._scope(head, client), headers)
        return watched

    def check(
        self, head: Head, target: LookupTarget | None, served: Served, client: str, server: Any, certificate: Sequence[str]
    ) -> None:
        """Refuse a request by its head, or the names in its client's certificate, alone.

        Args:
            server: the address that the client has connected to.

        Raises:
            RequestError, HPSError: it is refused.
        """
        if self.published.written[0] != self.published.version:
            self.published.poll()
        if head.length > (most := self.most_bytes(head.path, target)):
            raise too_large(f"Content-Length is {head.length}", most)
        if b"content-encoding" in head.headers:
            check_encoding(head.headers)
        if self.authorization.asks or certificate:
            self.authorize(head.headers, certificate, served, target)
        if target is None:
            if not 0 <= head.length <= SMALL_BYTES:  # the engine checks rights, but no memory is held for strangers before
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
        """Note who sent a request, check the rights of a lookup, and the limits of every request.

        Raises:
            RequestError: it is refused.
            NotReadyError: the engine has not said yet which tokens there are.
        """
        identity = served.identity = self.authorization.find(headers, certificate)
        if target is None:
            self.authorization.count(identity)  # its rights are checked by the engine
            return
        if self.published.version < 0:
            raise NotReadyError(f"the parameter server is not ready: {self.published.blocked}")
        self.authorization.admit(identity, "lookup", headers, certificate)

    def can_reuse(self, snapshot: int, started: float) -> bool:
        """Return whether what followed from a request's head and JSON part still does.

        Args:
            snapshot: version of the engine's snapshot of which it was true: of models, tokens and settings.
            started: when the next request arrived; no line of the access log is due for it.
        """
        return snapshot == self.published.written[0] == self.published.version and started < self._requests.quiet_until

    def most_bytes(self, path: str, target: LookupTarget | None) -> int:
        """Return the limit of a request's body, as sent and decompressed."""
        most = self.settings.max_body_bytes
        return most if target is not None or row_target(path) is not None else min(most, MOST_OBJECT_BYTES)

    def text_bytes(self, head: Head, target: LookupTarget | None) -> int:
        """Return the length of the JSON part of a binary lookup; -1 for every other request.

        Raises:
            InvalidInputError: it is no length.
        """
        if target is None or target.is_json or b"content-encoding" in head.headers:
            return -1
        size = parse_header_length(head.headers.get(b"inference-header-content-length"), head.length)
        return size if size is not None and size < SMALL_JSON_BYTES else -1

    def planned(self, requester: Requester, target: LookupTarget, served: Served, text: bytes, size: int) -> Lookup | None:
        """Begin a binary lookup whose JSON part has arrived; None if the rest of its body has to be read first.

        Args:
            size: of the body.
        """
        if served.traced or len(text) > CACHED_BYTES or (self.settings.shared_memory_bytes and MARK in text):
            return None
        version = self.published.version_of(target)
        began = time.perf_counter_ns()
        plan = read_cached(text, None, version.tables, self.settings.max_keys_per_request).plan
        if plan is None:
            return None
        if size != len(text) + plan.keys_bytes:
            return None  # the generic path says what is wrong with it
        lookup = Lookup(requester, target, served, version, text, plan, device=plan.device, began_ns=began)
        served.version = version.tables.version
        if served.identity is not None:
            self.authorization.take_keys(served.identity, plan.keys)
        return lookup

    def decoded(
        self,
        requester: Requester,
        target: LookupTarget,
        served: Served,
        body: bytes | bytearray,
        length: bytes | None,
        shared: SharedTensors | None = None,
    ) -> Lookup:
        """Decode a lookup whose body has arrived.

        Args:
            length: of its JSON part, as written; None if all of it is JSON.
            shared: its tensors in shared memory.

        Raises:
            HPSError: it is refused.
        """
        version = self.published.version_of(target)
        lookup = Lookup(requester, target, served, version, b"", body=body, began_ns=time.perf_counter_ns())
        if shared is not None:
            lookup.shared, lookup.text, lookup.json_bytes = shared, shared.text, len(shared.text)
            if not served.traced and len(shared.text) <= CACHED_BYTES:
                lookup.plan = read_cached(shared.text, None, version.tables, self.settings.max_keys_per_request).plan
            if lookup.plan is not None:
                served.version, lookup.device = version.tables.version, lookup.plan.device
                self.authorization.take_keys(served.identity, lookup.plan.keys)
                return lookup
            if shared.size_bytes > (most := self.settings.max_body_bytes):
                raise too_large(f"its tensors in shared memory have {shared.size_bytes} bytes", most)
            requester.hold(len(body) + shared.size_bytes, "reading the request")
            lookup.body = self.exchange.segments.body_of(shared)
        elif not target.is_json:
            try:
                lookup.json_bytes = parse_header_length(length, len(body))
            except HPSError:
                version.counts.failed(lookup.began_ns)
                raise
        decode(lookup, self.settings.max_keys_per_request)
        self.authorization.take_keys(served.identity, lookup.placed.keys if lookup.placed is not None else 0)
        return lookup

    def shared_tensors(
        self, target: LookupTarget, body: bytes | bytearray, length: bytes | None, client: str, headers: Mapping[bytes, bytes]
    ) -> SharedTensors | None:
        """Find the tensors in shared memory of a request; None if there are none, or if it is off."""
        if not self.settings.shared_memory_bytes or target.is_json:
            return None
        return shared_tensors(body, parse_header_length(length, len(body)), client, headers)

    # -- answers ----------------------------------------------------------------------------------------------------------

    def answer_without_engine(self, head: Head | None) -> HTTPAnswer:
        """Answer a request that the engine's application did not take.

        Raises:
            NotReadyError: the request needs it.
        """
        if head is not None and head.path == "/v2/health/live" and head.method in ("GET", "HEAD"):
            return HTTPAnswer(200, [JSON], (b'{"live":true}',))
        self.published.poll()
        raise NotReadyError(self.exchange.away())

    def check_ready(self, path: str) -> None:
        """Check, before the engine is asked whether it or a model is ready, that it answers lookups of this front.

        The engine's application speaks for its models, and not for the way from here to them. While it is blocked, it says why
        and how far it is.

        Raises:
            NotReadyError: it does not answer them.
        """
        if path.startswith("/v2/") and path.endswith("/ready"):
            self.published.poll()
            if not self.published.blocked and (reason := self.exchange.unanswered()):
                raise NotReadyError(reason)

    def error_answer(self, error: Exception, client: str, head: Head | None, served: Served) -> HTTPAnswer:
        self.note_error(error, client, head, served)
        answer = error_answer(error, served.id.decode())
        release_frames(error)
        return answer

    def note_error(self, error: Exception, client: str, head: RequestHead | None, served: Served) -> None:
        """Count and log an error with which a request ends."""
        served.failed(error)
        identity = served.id.decode()
        line = f"{head.method} {head.path[:300]}" if head is not None else "a request"
        if isinstance(error, OverloadedError):
            self.refusals.refuse(error.reason, error, identity)
        elif isinstance(error, RequestError) and error.status in (401, 403):
            self.refusals.deny(error.status, client or "an unknown address", f"{line}: {error}", identity)
        if not isinstance(error, HPSError | MemoryError):
            _log.error("serving %s failed unexpectedly", line, exc_info=error, extra=fields(request_id=identity))

    def end(
        self, client: str, head: RequestHead | None, route: str, served: Served, status: int, started: float, *, watched: bool
    ) -> None:
        """Count and log a request that has ended."""
        seconds = time.perf_counter() - started
        who = "" if served.identity is None else self.authorization.counted(served.identity)
        self.metrics.count(route, status, seconds, who)
        if head is not None and (watched or served.error is not None):
            self._requests.end(served, self._scope(head, client), route, status, seconds)
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
            least_missed = connections.least_missed()
            if least_missed is None:
                self.refusals.refuse("connections", limit)
                connection.refuse_connection()
                return
            least_missed.close()
        connections.order[connection] = None

    def closed(self, connection: ClientConnection) -> None:
        self.connections.order.pop(connection, None)

    def _look(self) -> None:
        """Do what is due twice a second."""
        now = time.monotonic()
        settings = self.settings
        self.published.poll()
        self.exchange.look(now)
        if self.tls is not None and self.tls.look() and self.grpc is not None:
            self.grpc.renew_certificate()
        if self.grpc is not None:
            self.grpc.poll(now)
        for one in list(self.connections.order):
            one.look(now, settings.request_timeout_s, settings.answer_timeout_s, settings.keep_alive_s)
        if self.exchange.slots.crowded:
            for one in list(self.connections.order):
                one.end_unread(now - UNREAD_S)
        self.connections.look()
        self._count_kept()
        self._ticks["look"] = self.loop.call_later(_TICK_S, self._look)

    def _count_kept(self) -> None:
        """Count what connections keep. Close idle ones while that is more than half of the budget, the longest idle first."""
        kept = [(one, size) for one in self.connections.order if (size := one.kept_bytes)]
        total = sum(size for _, size in kept)
        for one, size in kept:
            if total <= self.memory.limit // 2:
                break
            if one.idle:
                one.close()
                total -= size
        self.memory.kept = total

    # -- figures ----------------------------------------------------------------------------------------------------------

    def figures(self) -> dict[str, Any]:
        """Return what this front, and those before it in its place, have counted."""
        inference = {
            name: [counts.successes, counts.failures, counts.input_ns, counts.queue_ns, counts.infer_ns,
                                   counts.output_ns, counts.failure_ns, counts.last_ns]
            for name, counts in self.published.counts.items() if counts.last_ns
        }  # fmt: skip
        return {
            "http": self.metrics.figures(),
            "inference": inference,
            "cpu_ns": time.process_time_ns(),
            "connections": len(self.connections.order),
            "pending": len(self.exchange.pending),
            "held_bytes": self.memory.held + self.memory.kept + self.exchange.slots.used,
            "cached_bytes": cached_bytes(),
        }

    def publish(self) -> None:
        """Publish the figures."""
        layout.write_text(self.exchange.region, layout.FIGURES, self.figures(), layout.FIGURES_BYTES - layout.TEXT_AT)

    def _publish_often(self) -> None:
        self.publish()
        self._ticks["publish"] = self.loop.call_later(_FIGURES_S, self._publish_often)

    # -- life -------------------------------------------------------------------------------------------------------------

    def run(self, listener: socket.socket) -> None:
        """Serve until SIGTERM. Blocks."""
        uvloop.run(self._run(listener))

    async def _run(self, listener: socket.socket) -> None:
        loop, stopping = asyncio.get_running_loop(), asyncio.Event()
        loop.add_signal_handler(signal.SIGTERM, stopping.set)
        loop.add_signal_handler(signal.SIGUSR1, self.leave)
        for number in (signal.SIGINT, signal.SIGHUP):  # the parent says what they mean
            loop.add_signal_handler(number, lambda: None)
        bound_heap(_HEAPS)
        gc.collect()  # before connections wait for it
        gc.freeze()
        await self.start(listener)
        await stopping.wait()
        await self.stop(_STOP_S)
        self.close()

    async def start(self, listener: socket.socket) -> None:
        """Begin to serve HTTP, and gRPC if it is set, on this event loop."""
        loop = self.loop = asyncio.get_running_loop()
        self.exchange.start(loop)
        self.published.poll()
        self._servers = [(listener, await loop.create_server(lambda: self._connect(self), sock=listener, backlog=BACKLOG))]
        if self.grpc is not None:
            await self.grpc.start()
        self._look()
        self._publish_often()

    def leave(self) -> None:
        """Let every connection close after its next answer."""
        self.leaving = True

    async def stop(self, timeout_s: float) -> None:
        """Stop listening once the queues of the listeners are empty, since closing resets unaccepted connections; then wait
        until the requests that are under way have their answers.
        """
        self.leave()
        grpc = None if self.grpc is None else asyncio.create_task(self.grpc.stop(timeout_s))
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
        """End what is left, and publish the last figures."""
        for left in list(self.connections.order):
            left.transport.abort()
        for tick in self._ticks.values():
            tick.cancel()
        self.exchange.close()
        self.engine.close()
        self.publish()
        if self._spans is not None:
            self._spans.close()
