"""The ASGI application: lookups take the shortest path, everything else goes through FastAPI.

FastAPI's routing alone would halve the rate of lookups with small bodies.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeAlias

from fastapi import FastAPI
from starlette.types import Message, Receive, Scope, Send

from hps.configuration.load import ServiceConfig
from hps.errors import DeviceError, DeviceMemoryError, HPSError, NotReadyError, WorkspaceTimeoutError
from hps.parameter_server import HPS
from hps.service.answer_memory import AnswerMemory
from hps.service.authorization import Authorization, is_change
from hps.service.held_memory import SMALL_BYTES, HeldMemory
from hps.service.history import History
from hps.service.http_answer import (
    BINARY,
    CLIENT,
    DEFERRED_KEYS,
    JSON,
    HTTPAnswer,
    OverloadedError,
    RequestError,
    error_answer,
    release_frames,
)
from hps.service.http_metrics import DISCONNECTED, HTTPMetrics, InferenceCounts, InferenceStatistics
from hps.service.lifecycle import Lifecycle
from hps.service.logs.changes import log_change, request_line
from hps.service.logs.lines import RecentProblems, fields
from hps.service.logs.requests import POLLED, SERVED, RequestLog, Served, made_id, request_id
from hps.service.logs.spans import spans_of
from hps.service.lookup_threads import LookupThreads
from hps.service.owner import FrontLink
from hps.service.protocol.json_lookup import JSONLookup, decode_lookup
from hps.service.protocol.json_size import SMALL_JSON_BYTES, parsed_bytes
from hps.service.protocol.open_inference import Inference, decode_request, parse_header_length
from hps.service.protocol.request_checks import ModelTables
from hps.service.protocol.schemas import LOOKUP
from hps.service.refusals import Refusals
from hps.service.request_body import MOST_OBJECT_BYTES, BodyReader, ClientDisconnected
from hps.service.routes.administration import admin_routes
from hps.service.routes.control import ERRORS, control_app
from hps.service.routes.rows import RowRoutes, RowTarget, row_target
from hps.service.routes.status import OPEN_PATHS, status_routes
from hps.service.targets import LookupTarget, lookup_target
from hps.statistics.tracing import LookupTrace, current, traced
from hps.tensors.segments import Segment
from hps.versions.deployment import Deployment, repeated_after_takeover

_log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 10.0
"""Timeout for running lookups, and then for the parameter server, when the service stops."""

_MOST_TARGETS = 256
_MOST_REPORTS = 16  # reports waiting for an earlier one
_MOST_TEXTS = 8  # metrics in two formats and statistics, each written once at a time
_LINGER_S = 1.0  # for a client that sends its complete body before reading our error
_OPEN_PATHS = frozenset({"/v2/health/live", "/v2/health/ready"}) | OPEN_PATHS


class Application:
    """The ASGI application of one service. *One per event loop.*

    Args:
        lifecycle: life cycle of its parameter server, whose configuration holds the limits until `configure` changes them.

    Attributes:
        memory: memory held for clients.
        problems: warnings and errors of the process since the service started.
        closed: whether it was stopped and nothing of it runs any more.
    """

    def __init__(self, lifecycle: Lifecycle) -> None:
        settings = lifecycle.configuration.service
        self.lifecycle = lifecycle
        self.closed = False
        self.problems = RecentProblems()
        self._link: FrontLink | None = None
        self._history = History(lambda: opened.metrics if (opened := lifecycle.opened) is not None else None)
        self.authorization = Authorization(settings)
        self._models: dict[LookupTarget, tuple[ModelTables, InferenceCounts]] = {}
        self._statistics = InferenceStatistics()
        self.memory = HeldMemory(settings.max_held_bytes)
        self.refusals = Refusals()
        self._device_failed = False
        self._answers = AnswerMemory(settings.max_held_bytes)
        self._threads = LookupThreads(settings.lookup_threads, settings.request_timeout_s, self.memory)
        self._bodies = BodyReader(settings.max_body_bytes, settings.request_timeout_s, self._threads, self.memory)
        self._rows = RowRoutes(lifecycle, settings, self.memory, self._threads)
        self._reports = LookupThreads(1, settings.request_timeout_s, self.memory, _MOST_REPORTS, "report")
        self._texts = LookupThreads(1, settings.request_timeout_s, self.memory, _MOST_TEXTS, "text")
        self._metrics = HTTPMetrics(
            pending=lambda: self._threads.pending,
            held_bytes=lambda: self.memory.held,
            ready=lambda: self.lifecycle.settled,
            device_failed=lambda: self._device_failed,
            refusals=self.refusals,
        )
        routers = [
            admin_routes(lifecycle, self._reports, ERRORS),
            status_routes(lifecycle, self._metrics, self.problems, self._history, self._held, self._texts, ERRORS),
        ]
        self._control = control_app(
            lifecycle, self._metrics, self._statistics, self._lifespan, self._error_answer, self._texts, routers
        )
        self._spans = spans_of(lifecycle.configuration)
        self._requests = RequestLog(settings, self._spans)
        self.configure(settings)

    def configure(self, settings: ServiceConfig) -> None:
        """Apply the tokens and limits of these settings to new requests."""
        self.authorization.configure(settings)
        self._requests.configure(settings)
        self._max_keys = settings.max_keys_per_request
        self.memory.limit_to(settings.max_held_bytes)
        self._threads.limit_to(settings.request_timeout_s)
        self._reports.limit_to(settings.request_timeout_s)
        self._texts.limit_to(settings.request_timeout_s)
        self._rows.configure(settings)
        self._bodies.limit_to(settings.max_body_bytes, settings.request_timeout_s)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._control(scope, receive, send)
            return
        started = time.perf_counter()
        if self._link is not None:
            _from_front(scope)
        target = lookup_target(scope["path"]) or row_target(scope["path"])
        status = DISCONNECTED
        headers: dict[bytes, bytes] = dict(scope["headers"])
        served = scope[SERVED] = Served()
        named = request_id(headers) if b"x-request-id" in headers or b"traceparent" in headers else None
        served.id = named or made_id()
        requests = self._requests
        if watched := started >= requests.quiet_until:
            requests.begin(served, scope, headers)
        try:
            status = await self._serve(target, scope, headers, served, receive, send)
        finally:
            route = getattr(scope.get("route"), "path", "unknown") if target is None else target.route
            seconds = time.perf_counter() - started
            self._metrics.count(route, status, seconds)
            if watched or served.error is not None:
                requests.end(served, scope, route, status, seconds)
            elif scope["path"] not in POLLED:
                requests.left_out += 1

    def serve_fronts(self, link: FrontLink) -> None:
        """Serve requests that front processes pass on; their counts are added to those of this application."""
        self._link = link
        self._metrics.others = self._statistics.others = link.figures

    def device_failed(self, error: DeviceError) -> None:
        """Answer no more lookups: a device has failed."""
        _log.error("the device failed: %s", error)
        self._device_failed = True
        self.lifecycle.fail(f"the device failed; restart the service: {error}")

    def _held(self) -> dict[str, Any]:
        return {"pending": self._threads.pending, "held_bytes": self.memory.held}

    def openapi(self) -> dict[str, Any]:
        return self._control.openapi()

    async def _serve(
        self,
        target: LookupTarget | RowTarget | None,
        scope: Scope,
        headers: Mapping[bytes, bytes],
        served: Served,
        receive: Receive,
        send: Send,
    ) -> int:
        """Serve a lookup, rows or, without a target, a request for FastAPI. Returns the status of the answer."""
        body: bytes | bytearray | None = None
        most = MOST_OBJECT_BYTES if target is None else None
        try:
            if isinstance(target, LookupTarget):
                served.model, served.version = target.model_name, target.version
                if self.authorization.guarded:
                    self.authorization.check_lookup(headers)
                if scope["method"] != "POST":
                    got = f"got {scope['method']} {scope['path'][:300]}"
                    raise RequestError(405, f"{got}, expected POST", (b"allow", b"POST"))
                server = self.lifecycle.serving or self.lifecycle.server_of(target.model_name)
            else:
                who = self._admit(scope, headers)
                rows = self._rows.read(target, scope, who) if target else None
            body = await self._bodies.read(headers, receive, most)
            served.bytes_in = len(body)
            if b"content-encoding" in headers:
                body = await self._bodies.decompress(headers, body, most)
            if isinstance(target, LookupTarget):
                answer = await _look_up(server, self, target, headers, body, served)
            elif rows is not None:
                answer = await self._rows.answer(rows, headers, body)
            else:
                return await self._serve_control(scope, who, served, _replayed(body, receive), send)
        except ClientDisconnected:
            return DISCONNECTED
        except Exception as error:  # noqa: BLE001 - logged where it is unexpected; the client gets an answer
            answer = self._error_answer(error, scope)
        finally:
            if body is not None:
                self.memory.held -= len(body)
        unread = receive if body is None else None
        body = None  # a client may take long to read
        try:
            served.bytes_out = await _send(answer, served.id, send, unread)
        finally:
            self.memory.held -= answer.held
        return answer.status

    async def _look_up_in(
        self,
        deployment: Deployment,
        server: HPS,
        target: LookupTarget,
        headers: Mapping[bytes, bytes],
        body: bytes | bytearray,
        served: Served,
        started: int,
    ) -> HTTPAnswer:
        """Look up the keys in the body. The memory of the answer is held as soon as its size is known.

        The lookup runs on another thread, as does parsing large JSON. JSON is written here, in pieces between which others get
        their turn: orjson never releases the interpreter lock, so another thread would hold up the event loop just as long, and
        compete for the lock.
        """
        known = self._models.get(target)
        if known is None or known[0].tables is not deployment.tables:  # unknown so far, or replaced meanwhile
            if len(self._models) == _MOST_TARGETS:  # of retired versions
                self._models.clear()
            tables = ModelTables(target.model_name, deployment.tables, deployment.version, deployment.keys_per_sample)
            known = self._models[target] = (tables, self._statistics.of(deployment))
        model, counts = known
        header_length = None
        request: JSONLookup | Inference
        if target.route != LOOKUP:
            header_length = parse_header_length(headers.get(b"inference-header-content-length"), len(body))
        if (len(body) if header_length is None else header_length) > SMALL_JSON_BYTES:
            request = await self._decode_much(target, header_length, body, model)
        elif target.route == LOOKUP:
            request = decode_lookup(body, model, self._max_keys)
        else:
            request = decode_request(body, header_length, model, self._max_keys, self._answers.take)
        held = request.held_bytes
        if held <= SMALL_BYTES:
            self.memory.held += held
        else:
            self.memory.take(held, "answering the request")
        try:
            served.version = deployment.version
            submitted = time.perf_counter_ns()
            look_up = _traced_lookup if served.traced or request.wants_report else _timed_lookup
            lookup = (look_up, server, deployment, request.segments, request.device_id)
            request.device_id, began, ended, deferred, trace = await self._threads.run(*lookup, held=held)
            if request.scratch_bytes:
                self.memory.held -= request.scratch_bytes
                held -= request.scratch_bytes
            resumed = time.perf_counter_ns()
            if trace is not None:
                served.trace, served.lookup_ns = trace, resumed - started
                served.keys = sum([segment.n for segment in request.segments])
                served.queue_ns, served.infer_ns = began - submitted, ended - began
            headed = [(DEFERRED_KEYS, b"%d" % deferred)] if deferred else []
            if (whole := request.binary_answer) is not None:
                counts.succeeded(started, submitted, began, ended, resumed)
                length = (b"inference-header-content-length", str(whole[1]).encode())
                return HTTPAnswer(200, [BINARY, length, *headed], whole[:1], held)
            text, binary = request.encode(served.report if request.wants_report else None)
            chunks: list[bytes | memoryview] = []
            for piece in text:
                if chunks:
                    await asyncio.sleep(0)
                chunks.append(piece)
            counts.succeeded(started, submitted, began, ended, resumed)
            counts.output_ns += time.perf_counter_ns() - resumed
            if not binary:
                return HTTPAnswer(200, [JSON, *headed], chunks, held)
            length = (b"inference-header-content-length", str(sum(map(len, chunks))).encode())
            return HTTPAnswer(200, [BINARY, length, *headed], [*chunks, *binary], held)
        except BaseException:
            self.memory.held -= held
            raise

    async def _decode_much(
        self, target: LookupTarget, header_length: int | None, body: bytes | bytearray, model: ModelTables
    ) -> JSONLookup | Inference:
        """Parse a request with large JSON on another thread, if there is memory for the result."""
        text = memoryview(body)[:header_length]
        scan = self._threads.run(parsed_bytes, text, self._max_keys, held=len(body))
        size = self.memory.take(await scan, "parsing the request")
        held = size + len(body)
        try:
            if target.route == LOOKUP:
                return await self._threads.run(decode_lookup, body, model, self._max_keys, held=held)
            decode = (decode_request, body, header_length, model, self._max_keys, self._answers.take)
            return await self._threads.run(*decode, held=held)
        finally:
            self.memory.held -= size

    async def _serve_control(self, scope: Scope, who: str, served: Served, receive: Receive, send: Send) -> int:
        """Serve a request by FastAPI, and log it if it changes something: then `who` sent it."""
        status = DISCONNECTED

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", served.id)]
            else:
                served.bytes_out += len(message.get("body", b""))
            await send(message)

        started, served.who = time.monotonic(), who
        try:
            with suppress(Exception):  # FastAPI raises an error again after answering it
                await self._control(scope, receive, send_and_note)
        finally:
            if who and not served.outlived:
                log_change(
                    request_line(scope), who, served.id, f"status {status}", served.error or "", time.monotonic() - started
                )
        return status

    def _admit(self, scope: Scope, headers: Mapping[bytes, bytes]) -> str:
        """Authorize a request other than a lookup. Returns who makes a change by it; empty if it changes nothing."""
        if is_change(scope["method"], scope["path"]):
            return self.authorization.check_change(scope, headers)
        if scope["path"] not in _OPEN_PATHS:
            self.authorization.check_lookup(headers)
        return ""

    def _error_answer(self, error: Exception, scope: Scope) -> HTTPAnswer:
        served: Served = scope[SERVED]
        served.failed(error)
        request_id = served.id.decode()
        if isinstance(error, OverloadedError | WorkspaceTimeoutError):
            self.refusals.refuse(getattr(error, "reason", "workspaces"), error, request_id)
        elif isinstance(error, RequestError) and error.status in (401, 403):
            client = scope["client"][0] if scope.get("client") else "an unknown address"
            self.refusals.deny(error.status, client, f"{request_line(scope)}: {error}", request_id)
        if isinstance(error, DeviceError) and not isinstance(error, DeviceMemoryError) and not served.who:
            self.device_failed(error)
        elif not isinstance(error, HPSError | MemoryError):
            _log.error(
                "serving %s failed unexpectedly", request_line(scope), exc_info=error, extra=fields(request_id=request_id)
            )
        answer = error_answer(error, request_id)
        release_frames(error)  # for errors that a frame of their own traceback holds, or that outlive their request
        return answer

    @asynccontextmanager
    async def _lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        logging.getLogger().addHandler(self.problems)
        self.lifecycle.start()
        self._history.start()
        try:
            yield
        finally:
            self.lifecycle.refuse()
            await asyncio.to_thread(self._history.close)
            idle = True
            if self._link is not None and not await asyncio.to_thread(self._link.close, CLOSE_TIMEOUT_S):
                idle = False
            for threads in (self._threads, self._rows, self._reports, self._texts):
                if not await asyncio.to_thread(threads.close, CLOSE_TIMEOUT_S):
                    idle = False
                    _log.error("lookups or writes were still running after %g s", CLOSE_TIMEOUT_S)
            self._rows.flush_log()
            if self._spans is not None:
                await asyncio.to_thread(self._spans.close)
            started = time.monotonic()
            if closed := await asyncio.to_thread(self.lifecycle.close, CLOSE_TIMEOUT_S):
                _log.info("the databases are closed after %.1f s", time.monotonic() - started)
            else:
                _log.error("the parameter server was not closed within %g s", CLOSE_TIMEOUT_S)
            self.closed = idle and closed
            logging.getLogger().removeHandler(self.problems)


@repeated_after_takeover
async def _look_up(
    server: HPS, app: Application, target: LookupTarget, headers: Mapping[bytes, bytes], body: bytes | bytearray, served: Served
) -> HTTPAnswer:
    deployment = server.model(target.model_name, target.version)
    started = time.perf_counter_ns()
    try:
        return await app._look_up_in(deployment, server, target, headers, body, served, started)
    except NotReadyError:  # after a takeover the new version may answer, and counts the request
        raise
    except Exception:
        app._statistics.of(deployment).failed(started)
        raise


_Looked: TypeAlias = tuple[int, int, int, int, LookupTrace | None]


def _timed_lookup(server: HPS, deployment: Deployment, segments: list[Segment], device_id: int | None) -> _Looked:
    """Call `HPS.lookup_segments`; return the device, begin and end in ns of `time.perf_counter_ns`, and the deferred keys."""
    began, deferred = time.perf_counter_ns(), current.deferred
    device = server.lookup_segments(deployment, segments, device_id)
    return device, began, time.perf_counter_ns(), current.deferred - deferred, None


def _traced_lookup(server: HPS, deployment: Deployment, segments: list[Segment], device_id: int | None) -> _Looked:
    with traced() as trace:
        return *_timed_lookup(server, deployment, segments, device_id)[:4], trace


def _from_front(scope: Scope) -> None:
    """Give a request that a front passed on its client."""
    for place, (name, value) in enumerate(scope["headers"]):
        if name == CLIENT:
            scope["headers"] = [*scope["headers"][:place], *scope["headers"][place + 1 :]]
            scope["client"] = (value.decode("latin-1"), 0)
            return


def _replayed(body: bytes | bytearray, receive: Receive) -> Receive:
    """Make a `receive` that returns an already read body first, and then what follows it."""
    messages: list[Message] = [{"type": "http.request", "body": bytes(body), "more_body": False}]

    async def replay() -> Message:
        return messages.pop() if messages else await receive()

    return replay


async def _send(answer: HTTPAnswer, request_id: bytes, send: Send, unread: Receive | None = None) -> int:
    """Send an answer, and return the length of its body. Its pieces must not change until the client has read them.

    Args:
        unread: receives the rest of the request's body, if it was not read: the connection then closes, a moment later.
    """
    size = sum(map(len, answer.chunks))
    headers = [*answer.headers, (b"content-length", b"%d" % size), (b"x-request-id", request_id)]
    if unread is not None:
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    last = len(answer.chunks) - 1
    for place, chunk in enumerate(answer.chunks):
        await send({"type": "http.response.body", "body": chunk, "more_body": unread is not None or place < last})
    if unread is not None:  # an immediate close would reset the connection before the client has read the answer
        with suppress(TimeoutError):
            async with asyncio.timeout(_LINGER_S):
                while (await unread()).get("more_body", False):
                    pass
        await send({"type": "http.response.body"})
    return size
