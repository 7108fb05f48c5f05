"""Runs the service under uvicorn: bound before anything is loaded, strict about slow clients, graceful about signals."""

import contextlib
import logging
import math
import signal
import socket
import time
from collections.abc import Iterator
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from hps.configuration.load import Configuration, ModelConfig
from hps.errors import ConfigError
from hps.progress import Progress
from hps.service.app import CLOSE_TIMEOUT_S, Application, create_app

_log = logging.getLogger(__name__)
_BACKLOG = 2048
_MAX_HEAD_BYTES = 65_536


def serve(
    configuration: Configuration,
    host: str | None = None,
    port: int | None = None,
    log_level: str = "info",
    progress: Progress | None = None,
    *,
    force: bool = False,
) -> bool:
    """Serve a configuration over HTTP until SIGTERM or SIGINT. Blocks.

    Args:
        configuration: what to serve.
        host: in place of the configured one.
        port: in place of the configured one; 0 picks a free one, which is logged.
        log_level: of the log on standard error, unless logging is set up already.
        progress: told how far the loading is; by default it is logged.
        force: load the models' files even where a database holds them already; its online updates are lost.

    Returns:
        Whether everything was closed. If not, a thread waits for a source or a database that does not answer, and the
        interpreter would wait for that thread when it exits.

    Raises:
        ConfigError: the address cannot be listened on.
        HPSError: the databases could not be opened, or no model could be loaded.
    """
    logging.basicConfig(level=log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    listener = listen(host or configuration.service.host, configuration.service.port if port is None else port)
    app = create_app(configuration, progress=progress, force=force)
    server = Server(app, configuration, url_of(listener))
    with listener:
        server.run(sockets=[listener])
    if app.lifecycle.failure is not None:
        raise app.lifecycle.failure
    return app.closed


class Server(uvicorn.Server):
    """uvicorn's server, which also says when it is ready, ends when the loading fails, and drops stalled connections."""

    def __init__(self, app: Application, configuration: Configuration, url: str) -> None:
        timeout_s = configuration.service.request_timeout_s
        super().__init__(
            uvicorn.Config(
                app,
                loop="uvloop",
                http=_Protocol,
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                backlog=_BACKLOG,
                timeout_graceful_shutdown=math.ceil(CLOSE_TIMEOUT_S),
            )
        )
        self._app = app
        self._configuration = configuration
        self._url = url
        self._stalled = _StalledConnections(timeout_s)
        self._announced = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        _log.info("listening on %s; loading %d models", self._url, len(self._configuration.models))

    async def on_tick(self, counter: int) -> bool:
        if counter % 10 == 0:
            self._stalled.drop(self.server_state.connections)
        if self._app.lifecycle.failure is not None:
            return True
        if not self._announced and self._app.lifecycle.settled:
            self._announced = True
            self._announce()
        return await super().on_tick(counter)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """End gracefully on a signal, at once on a second one, and return to the caller instead of dying of the signal."""
        try:
            before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        except ValueError:  # not the main thread: whoever runs us handles signals
            yield
            return
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _announce(self) -> None:
        server = self._app.lifecycle.opened()
        model = next((one for one in self._configuration.models if server and one.model in server.models), None)
        if model is not None:
            _log.info("ready; try: %s", self._example(model))

    def _example(self, model: ModelConfig) -> str:
        token = " -H 'Authorization: Bearer <token>'" if self._configuration.service.bearer_token else ""
        return (
            f"curl -s{token} {self._url}/v1/models/{model.model}/lookup "
            f"""-d '{{"tables": {{"{model.embedding_table_names[0]}": [1, 2, 3]}}}}'"""
        )


class _Protocol(HttpToolsProtocol):
    """uvicorn's protocol with a bound on the size of a request's head, which the parser itself does not have."""

    _head_bytes = 0

    def data_received(self, data: bytes) -> None:
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            super().data_received(data)
            return
        self._head_bytes += len(data)
        super().data_received(data)
        if self.cycle is not cycle:
            self._head_bytes = 0
        elif self._head_bytes > _MAX_HEAD_BYTES:
            _log.warning("closing a connection whose request has a head of more than %d bytes", _MAX_HEAD_BYTES)
            self.transport.abort()


class _StalledConnections:
    """Drops connections on which nothing goes on, which uvicorn keeps for ever. *One per event loop.*

    Those are: no request was ever sent, the head of a request stopped half-way, or the client does not read its answer.
    Requests in progress have timeouts of their own, and idle kept-alive connections have uvicorn's.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._since: dict[Any, tuple[int, float]] = {}

    def drop(self, connections: set[Any]) -> None:
        """Drop those that stalled for longer than the timeout; to be called every second or so."""
        now = time.monotonic()
        stalled = {}
        for connection in connections:
            idle = connection.cycle is None or connection.cycle.response_complete
            unsent = connection.transport.get_write_buffer_size()
            if not unsent and not (idle and connection.timeout_keep_alive_task is None):
                continue
            known, since = self._since.get(connection, (unsent, now))
            stalled[connection] = (unsent, since if known == unsent else now)
            if now - stalled[connection][1] > self._timeout_s:
                connection.transport.abort()
        self._since = stalled


def listen(host: str, port: int) -> socket.socket:
    """Bind and listen; port 0 picks a free one.

    Raises:
        ConfigError: the address cannot be listened on; the message says why.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(_BACKLOG)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise ConfigError(
            "service",
            [f"host, port: cannot listen on {host}:{port}: {error.strerror}; stop what listens there, or choose another"],
        ) from error
    return listener


def url_of(listener: socket.socket) -> str:
    """The address of a listening socket as clients write it."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
