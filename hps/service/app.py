"""The ASGI application: lookups by the shortest way, everything else through FastAPI."""

import asyncio
import hmac
import logging
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.types import Message, Receive, Scope, Send

from hps import __version__
from hps.configuration.load import Configuration
from hps.errors import (
    DatabaseError,
    DeviceError,
    DeviceMemoryError,
    HPSError,
    InvalidInputError,
    NotReadyError,
    TooManyKeysError,
    UnknownDeviceError,
    UnknownModelError,
    UnknownTableError,
    WorkspaceTimeoutError,
)
from hps.parameter_server import HPS
from hps.progress import Progress
from hps.service.answers import Answer, Header, json_answer
from hps.service.control_routes import add_routes
from hps.service.http_metrics import DISCONNECTED, HTTPMetrics
from hps.service.lifecycle import Lifecycle
from hps.service.lookup_routes import LookupRoutes, Target, target_of
from hps.service.lookup_threads import LookupThreads
from hps.service.request_body import BodyReader, ClientDisconnected
from hps.service.request_errors import (
    BodyTimeoutError,
    BodyTooLargeError,
    LookupTimeoutError,
    MethodNotAllowedError,
    OverloadedError,
    UnauthorizedError,
    UnknownRouteError,
    UnsupportedEncodingError,
)

_log = logging.getLogger(__name__)

STATUS_OF_ERROR: dict[type[BaseException], int] = {
    InvalidInputError: 400,
    UnauthorizedError: 401,
    UnknownModelError: 404,
    UnknownTableError: 404,
    UnknownDeviceError: 404,
    UnknownRouteError: 404,
    MethodNotAllowedError: 405,
    BodyTimeoutError: 408,
    TooManyKeysError: 413,
    BodyTooLargeError: 413,
    UnsupportedEncodingError: 415,
    NotReadyError: 503,
    OverloadedError: 503,
    WorkspaceTimeoutError: 503,
    DatabaseError: 503,
    DeviceError: 503,
    MemoryError: 503,
    LookupTimeoutError: 504,
}
"""The status of every error, by its nearest class; 500 for all others."""

CLOSE_TIMEOUT_S = 10.0
"""How long running lookups, and then the parameter server, may take to end when the service stops."""

_RETRY_AFTER: Header = (b"retry-after", b"1")
_LINGER_S = 1.0  # for a client that writes its whole body before it reads our error
_OPEN_PATHS = frozenset({"/v2/health/live", "/v2/health/ready"})


def create_app(
    configuration: Configuration,
    parameter_server: HPS | None = None,
    progress: Progress | None = None,
    *,
    force: bool = False,
) -> "Application":
    """Make the ASGI application of the service.

    Args:
        configuration: what to load, and the limits in its `service`.
        parameter_server: one that is loaded already and stays the caller's to close. Without one, it is loaded in the
            background from start-up on: liveness and metrics answer at once, lookups of a model when that is loaded,
            readiness when all are.
        progress: told how far the loading is; by default it is logged.
        force: load the models' files even where a database holds them already; its online updates are lost.
    """
    return Application(configuration, Lifecycle(configuration, parameter_server, progress, force=force))


class Application:
    """The ASGI application of one service. *One per event loop.*

    Attributes:
        lifecycle: of the parameter server behind it.
        closed: whether it was stopped, and nothing of it runs any more.
    """

    def __init__(self, configuration: Configuration, lifecycle: Lifecycle) -> None:
        settings = configuration.service
        self.lifecycle = lifecycle
        self.closed = False
        self._token = settings.bearer_token.encode()
        self._threads = LookupThreads(settings.lookup_threads, settings.request_timeout_s)
        self._bodies = BodyReader(settings.max_body_bytes, settings.request_timeout_s, self._threads)
        self._lookups = LookupRoutes(self._threads, settings.max_keys_per_request)
        self._metrics = HTTPMetrics(
            pending=lambda: self._threads.pending,
            held_bytes=lambda: self._bodies.held_bytes,
            ready=lambda: self.lifecycle.settled,
        )
        self._control = FastAPI(
            title="hps",
            version=__version__,
            description="Vectors of embedding tables by int64 keys: Open Inference Protocol v2, and JSON for curl.",
            lifespan=self._lifespan,
            redoc_url=None,
            exception_handlers={
                HPSError: self._answer_control,
                HTTPException: self._answer_control,
                RequestValidationError: self._answer_control,
                Exception: self._answer_control,
            },
        )
        add_routes(self._control, lifecycle, self._metrics)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or the lifespan."""
        if scope["type"] != "http":
            await self._control(scope, receive, send)
            return
        started = time.perf_counter()
        target = target_of(scope["path"])
        route, status = "unknown" if target is None else target.route, DISCONNECTED
        try:
            if target is None:
                route, status = await self._serve_control(scope, receive, send)
            else:
                status = await self._serve_lookup(target, scope, receive, send)
        finally:
            self._metrics.count(route, status, time.perf_counter() - started)

    def openapi(self) -> dict[str, Any]:
        """The OpenAPI document of all routes."""
        return self._control.openapi()

    async def _serve_lookup(self, target: Target, scope: Scope, receive: Receive, send: Send) -> int:
        headers: dict[bytes, bytes] = dict(scope["headers"])
        body: bytes | None = None
        try:
            if self._token:
                self._authorize(headers)
            if scope["method"] != "POST":
                raise MethodNotAllowedError(f"got {scope['method']} {scope['path'][:300]}, wanted POST", "POST")
            server = self.lifecycle.server_of(target.model_name)
            body = await self._bodies.read(headers, receive)
            if b"content-encoding" in headers:
                body = await self._bodies.decompress(headers, body)
            answer = await self._lookups.answer(server, target, headers, body)
        except ClientDisconnected:
            return DISCONNECTED
        except (HPSError, MemoryError) as error:
            answer = self._error_answer(error)
        except Exception:  # noqa: BLE001 - logged; the client is told that there was one
            _log.exception("serving %s %s", scope["method"], target.route)
            answer = _internal_error()
        finally:
            if body is not None:
                self._bodies.release(body)
        if body is None:
            await answer.send(send, close=True)
            await _discard_body(receive)
            await send({"type": "http.response.body"})
        else:
            await answer.send(send)
        return answer.status

    async def _serve_control(self, scope: Scope, receive: Receive, send: Send) -> tuple[str, int]:
        status = DISCONNECTED

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            if self._token and scope["path"] not in _OPEN_PATHS:
                self._authorize(dict(scope["headers"]))
            await self._control(scope, receive, send_and_note)
        except HPSError as error:
            await self._error_answer(error).send(send_and_note)
        except Exception:  # noqa: BLE001 - logged; the client is told that there was one
            _log.exception("serving %s %s", scope["method"], scope["path"][:300])
            if status == DISCONNECTED:
                await _internal_error().send(send_and_note)
        return getattr(scope.get("route"), "path", "unknown"), status

    def _authorize(self, headers: Mapping[bytes, bytes]) -> None:
        scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer" or not hmac.compare_digest(token.strip(), self._token):
            raise UnauthorizedError("the header 'Authorization: Bearer <token>' is missing or has the wrong token")

    def _error_answer(self, error: BaseException) -> Answer:
        if isinstance(error, DeviceError) and not isinstance(error, DeviceMemoryError):
            _log.error("the device failed: %s", error)
            self.lifecycle.fail(f"the device failed; restart the service: {error}")
        return error_answer(error)

    async def _answer_control(self, request: Request, error: Exception) -> Response:
        """What a control route that raised answers; an unexpected error is raised again by FastAPI, and logged above."""
        got = f"got {request.method} {request.url.path[:300]}"
        if isinstance(error, HTTPException):
            if error.status_code == 405:
                error = MethodNotAllowedError(f"{got}, wanted GET", "GET")
            else:
                error = UnknownRouteError(f"{got}, which is not served; /openapi.json lists what is")
        elif isinstance(error, RequestValidationError):
            told = "; ".join(f"{one['loc'][-1]}: {one['msg']}, got {str(one['input'])[:40]!r}" for one in error.errors())
            error = InvalidInputError(f"{got}: {told}")
        answer = self._error_answer(error) if isinstance(error, HPSError) else _internal_error()
        headers = {name.decode(): value.decode() for name, value in answer.headers}
        return Response(b"".join(answer.chunks), answer.status, headers)

    @asynccontextmanager
    async def _lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        self.lifecycle.start()
        try:
            yield
        finally:
            self.lifecycle.refuse()
            if not (idle := await asyncio.to_thread(self._threads.close, CLOSE_TIMEOUT_S)):
                _log.error("lookups were still running after %g s", CLOSE_TIMEOUT_S)
            if not (closed := await asyncio.to_thread(self.lifecycle.close, CLOSE_TIMEOUT_S)):
                _log.error("the parameter server was not closed within %g s", CLOSE_TIMEOUT_S)
            self.closed = idle and closed


def error_answer(error: BaseException) -> Answer:
    """The answer to a request that raised `error`: its status, and `{"error": message}` as the protocol has it."""
    status = next((STATUS_OF_ERROR[kind] for kind in type(error).__mro__ if kind in STATUS_OF_ERROR), 500)
    headers: list[Header] = []
    if status == 503:
        headers.append(_RETRY_AFTER)
    if isinstance(error, UnauthorizedError):
        headers.append((b"www-authenticate", b"Bearer"))
    if isinstance(error, MethodNotAllowedError):
        headers.append((b"allow", error.allowed.encode()))
    if isinstance(error, MemoryError) and not isinstance(error, HPSError):
        return json_answer(status, {"error": "not enough memory for the answer; send fewer keys at once"}, headers)
    return json_answer(status, {"error": str(error)}, headers)


def _internal_error() -> Answer:
    return json_answer(500, {"error": "internal error; the log of the service has more"})


async def _discard_body(receive: Receive) -> None:
    """Read on for a moment: to close at once would reset the connection before the client has read the answer."""
    with suppress(TimeoutError):
        async with asyncio.timeout(_LINGER_S):
            while (await receive()).get("more_body", False):
                pass
