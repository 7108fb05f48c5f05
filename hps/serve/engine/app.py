"""The ASGI application of the engine, for requests that frontends forward. Rows are served without FastAPI.

FastAPI is imported by the first request that needs it: a service starts faster, and frontends take no memory for it.
"""

import asyncio
import logging
import threading
import time
import traceback
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message, Receive, Scope, Send

from hps.configuration.load import ServiceConfig
from hps.configuration.tokens import WatchedTokens, published
from hps.serve.engine.batches import FrontendLink
from hps.serve.engine.call_threads import CallThreads
from hps.serve.engine.conditions import ConditionWatch
from hps.serve.engine.history import History
from hps.serve.engine.lifecycle import Lifecycle
from hps.serve.engine.routes.pages import OPEN_PATHS
from hps.serve.engine.routes.rows import RowRoutes
from hps.serve.http.authorization import CERTIFICATE, Authorization
from hps.serve.http.http_answer import (
    CLIENT,
    CLIENT_CERTIFICATE,
    HTTPAnswer,
    error_answer,
    release_frames,
)
from hps.serve.http.http_metrics import DISCONNECTED, HTTPMetrics, InferenceStatistics
from hps.serve.http.memory_budget import MemoryBudget
from hps.serve.http.refusals import Refusals
from hps.serve.http.targets import row_target
from hps.serve.logs.changes import log_change, request_line
from hps.serve.logs.problems import RecentProblems
from hps.serve.logs.requests import POLLED, SERVED, RequestLog, Served, new_ids, request_id
from hps.serve.logs.spans import spans_of

if TYPE_CHECKING:
    from fastapi import FastAPI

_log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 10.0
"""Timeout for running lookups, and then for the parameter server, when the service stops."""

_MOST_WAITING = 16  # queued reports or texts
_FILE_THREADS = 2  # read row files for peers
_OPEN_PATHS = frozenset({"/v2/health/live", "/v2/health/ready"}) | OPEN_PATHS


class Application:
    """The ASGI application of one service. *One per event loop.*

    Args:
        lifecycle: of its parameter server; its configuration has the limits until `configure` changes them.

    Attributes:
        address: host and port that clients connect to.
        problems: warnings and errors of the process since the start.
        closed: whether it was stopped, with all its threads.
    """

    def __init__(self, lifecycle: Lifecycle) -> None:
        settings = lifecycle.configuration.service
        self.lifecycle = lifecycle
        self.closed = False
        self.problems = RecentProblems()
        self.address = ("", 0)
        self._history = History(lambda: opened.metrics if (opened := lifecycle.opened) is not None else None)
        self._watch = ConditionWatch(lifecycle)
        self.authorization = Authorization(settings)
        self._tokens: WatchedTokens | None = None
        self._statistics = InferenceStatistics()
        self._memory = memory = MemoryBudget(settings.max_held_bytes)
        self._refusals = Refusals()
        self._rows = RowRoutes(lifecycle, settings, memory)
        self._reports, self._texts = (
            CallThreads(1, settings.request_timeout_s, memory, _MOST_WAITING, what) for what in ("report", "text")
        )
        self._files = CallThreads(_FILE_THREADS, settings.request_timeout_s, memory, _MOST_WAITING, "read of a row file")
        self.link = FrontendLink(lifecycle)
        self._statistics.frontends, self._statistics.deployment_ids = self.link.figures, self.link.deployment_ids
        self._metrics = HTTPMetrics(
            self._refusals,
            lambda: lifecycle.settled,
            lambda: bool(lifecycle.live.lost_devices()),
            lambda: bool(lifecycle.degraded),
        )
        self._metrics.frontends, self._metrics.loops = self.link.figures, self.link.loop_figures
        self._control: FastAPI | None = None
        self._making = threading.Lock()
        self._spans = spans_of(lifecycle.configuration)
        self._requests = RequestLog(settings, self._spans)
        self._new_id = new_ids()
        self.configure(settings)

    def configure(self, settings: ServiceConfig) -> None:
        """Apply the tokens and limits of these settings to new requests."""
        if settings.tokens_path != (self._tokens.path if self._tokens is not None else ""):
            self._tokens = WatchedTokens(settings.tokens_path) if settings.tokens_path else None
        self._use_tokens(settings)
        self._requests.configure(settings)
        self._memory.limit_to(settings.max_held_bytes)
        self._reports.limit_to(settings.request_timeout_s)
        self._texts.limit_to(settings.request_timeout_s)
        self._files.limit_to(settings.request_timeout_s)
        self._rows.configure(settings)

    def poll_tokens(self) -> None:
        """Reload the file of tokens if it changed. Called twice a second."""
        if self._tokens is not None and self._tokens.poll():
            self._use_tokens(self.lifecycle.configuration.service)
            self.link.publish()

    def _use_tokens(self, settings: ServiceConfig) -> None:
        entries = () if self._tokens is None else self._tokens.entries
        self.authorization.configure(settings, entries)
        self.link.tokens = published(entries)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        started = time.perf_counter()
        headers: dict[bytes, bytes] = dict(scope["headers"])
        scope[CERTIFICATE] = orjson.loads(headers.pop(CLIENT_CERTIFICATE, b"[]"))
        scope["client"], scope["server"] = (headers.pop(CLIENT, b"").decode("latin-1"), 0), self.address
        served = scope[SERVED] = Served()
        served.id = request_id(headers) or self._new_id()
        requests, status = self._requests, DISCONNECTED
        if watched := started >= requests.quiet_until:
            requests.start(served, scope, headers)
        try:
            status = await self._serve(scope, headers, served, receive, send)
        finally:
            target = row_target(scope["path"])
            route = getattr(scope.get("route"), "path", "unknown") if target is None else target.route
            seconds = time.perf_counter() - started
            self._metrics.count(route, status, seconds, self.authorization.counted(served.identity))
            if watched or served.error is not None:
                requests.finish(served, scope, route, status, seconds)
            elif scope["path"] not in POLLED:
                requests.left_out += 1

    def openapi(self) -> dict[str, Any]:
        return self._get_control().openapi()

    def _get_control(self) -> "FastAPI":
        """Make the FastAPI application at the first call."""
        with self._making:
            if self._control is None:
                from hps.serve.engine.routes.administration import admin_routes
                from hps.serve.engine.routes.control import ERRORS, control_app
                from hps.serve.engine.routes.row_files import RowFileRoutes
                from hps.serve.engine.routes.shared_memory import shared_memory_routes
                from hps.serve.engine.routes.status import status_routes

                lifecycle, metrics, texts = self.lifecycle, self._metrics, self._texts
                files = RowFileRoutes(lifecycle, lifecycle.configuration.model_source.peers, self._files)
                routers = [
                    admin_routes(lifecycle, self._reports, ERRORS),
                    status_routes(
                        lifecycle, metrics, self.problems, self._watch, self._history, self.authorization, texts, ERRORS
                    ),
                    shared_memory_routes(self.link.shared_memory, ERRORS),
                    files.router(ERRORS),
                ]
                self._control = control_app(
                    lifecycle, metrics, self._statistics, self._error_answer, texts, routers, files.families
                )
            return self._control

    async def _serve(self, scope: Scope, headers: Mapping[bytes, bytes], served: Served, receive: Receive, send: Send) -> int:
        """Serve rows, or a request for FastAPI. Returns the status of the answer."""
        try:
            identity = self._admit(scope, headers, served)
            if (target := row_target(scope["path"])) is None:
                return await self._serve_control(scope, identity, served, receive, send)
            rows = self._rows.read(target, scope, identity)
            body = await Request(scope, receive).body()  # a frontend has checked its limits
            served.bytes_in = len(body)
            answer = await self._rows.answer(rows, headers, body)
        except ClientDisconnect:
            return DISCONNECTED
        except Exception as error:  # noqa: BLE001 - logged where it is unexpected; the client gets an answer
            answer = self._error_answer(error, scope)
        served.bytes_out = await _send(answer, served.id, send)
        return answer.status

    async def _serve_control(self, scope: Scope, identity: str, served: Served, receive: Receive, send: Send) -> int:
        """Serve a request by FastAPI, and log it if it makes a change: then `identity` is not empty."""
        status, method = DISCONNECTED, scope["method"]

        async def send_and_record(message: Message) -> None:
            nonlocal status
            scope["method"] = method
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", served.id)]
            else:
                served.bytes_out += len(message.get("body", b""))
            await send(message)

        started, served.who = time.monotonic(), identity
        if (control := self._control) is None:
            control = await asyncio.to_thread(self._get_control)
        if method == "HEAD":
            scope["method"] = "GET"  # FastAPI's routes have no HEAD; the server omits the body
        try:
            with suppress(Exception):  # FastAPI raises an error again after answering it
                await control(scope, receive, send_and_record)
        finally:
            if identity and not served.outlived:
                log_change(
                    request_line(scope), identity, served.id, f"status {status}", served.error or "", time.monotonic() - started
                )
        return status

    def _admit(self, scope: Scope, headers: Mapping[bytes, bytes], served: Served) -> str:
        """Authorize a request other than a lookup. Return the identity that makes a change by it; empty if it makes none."""
        served.identity = self.authorization.find(headers, scope[CERTIFICATE])
        return "" if scope["path"] in _OPEN_PATHS else self.authorization.check(scope, headers, served.identity)

    def _error_answer(self, error: Exception, scope: Scope) -> HTTPAnswer:
        served: Served = scope[SERVED]
        served.failed(error)
        request_id = served.id.decode()
        client = scope["client"][0] if scope.get("client") else "an unknown address"
        self._refusals.record_error(error, request_line(scope), client, request_id)
        answer = error_answer(error, request_id)
        release_frames(error)  # a frame of its traceback may refer to the error, and the error may outlive its request
        return answer

    async def _live(self, receive: Receive, send: Send) -> None:
        """Start and stop by ASGI's lifespan protocol."""
        phase = "startup"
        await receive()
        try:
            async with self._lifespan():
                await send({"type": "lifespan.startup.complete"})
                phase = "shutdown"
                await receive()
        except BaseException:
            await send({"type": f"lifespan.{phase}.failed", "message": traceback.format_exc()})
            raise
        await send({"type": "lifespan.shutdown.complete"})

    @asynccontextmanager
    async def _lifespan(self) -> AsyncIterator[None]:
        logging.getLogger().addHandler(self.problems)
        self.lifecycle.start()
        self._history.start()
        self._watch.start()
        try:
            yield
        finally:
            self.lifecycle.refuse()
            await asyncio.to_thread(self._history.close)
            await asyncio.to_thread(self._watch.close)
            idle = True
            for threads in (self.link, self._rows, self._reports, self._texts, self._files):
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


async def _send(answer: HTTPAnswer, request_id: bytes, send: Send) -> int:
    """Send an answer, and return the length of its body."""
    body = b"".join(answer.chunks)
    headers = [*answer.headers, (b"content-length", b"%d" % len(body)), (b"x-request-id", request_id)]
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
    return len(body)
