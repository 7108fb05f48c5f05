"""Runs the service under uvicorn: bound before anything is loaded, strict about slow clients, graceful about signals."""

import asyncio
import logging
import math
import signal
import socket
from functools import partial
from typing import Any, cast

import uvicorn
import uvloop

from hps.configuration.load import Configuration
from hps.errors import ConfigError
from hps.progress import Progress
from hps.service.app import CLOSE_TIMEOUT_S, Application
from hps.service.connection import Connection, Connections, OnceAMinute
from hps.service.lifecycle import Lifecycle

_log = logging.getLogger(__name__)
_BACKLOG = 2048
_TICK_S = 0.5

logging.getLogger("uvicorn.error").addFilter(OnceAMinute())


def serve(
    configuration: Configuration,
    host: str | None = None,
    port: int | None = None,
    progress: Progress | None = None,
    *,
    force: bool = False,
) -> bool:
    """Serve a configuration over HTTP until SIGTERM or SIGINT. Blocks; to be called in the main thread.

    Args:
        configuration: what to serve.
        host: in place of the configured one.
        port: in place of the configured one; 0 picks a free one, which is logged.
        progress: gets reports of the loading; by default they are logged.
        force: load the models' files even where a database holds them already; its online updates are lost.

    Returns:
        Whether everything was closed. If not, a thread waits for a source or a database that does not answer, and the
        interpreter would wait for that thread when it exits.

    Raises:
        ConfigError: the address cannot be listened on.
        HPSError: the databases could not be opened, or no model could be loaded.
    """
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    with listen(host or configuration.service.host, configuration.service.port if port is None else port) as listener:
        app = Application(Lifecycle(configuration, progress=progress, force=force))
        server = Server(app, listener)
        # uvicorn takes the signals while it runs, and raises them again afterwards: here they end nothing but the server.
        before = {number: signal.signal(number, lambda *_: server.stop()) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            server.run()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
    if app.lifecycle.failure is not None:
        raise app.lifecycle.failure
    return app.closed


class Server:
    """Runs an application under uvicorn until it is stopped or its loading fails, and drops stalled connections.

    *One per event loop*; `stop` may be called from any thread.

    Args:
        app: what to run.
        listener: a socket that listens; the server closes it.

    Attributes:
        url: where it listens.
    """

    def __init__(self, app: Application, listener: socket.socket) -> None:
        host, port = listener.getsockname()[:2]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        self._app = app
        self._configuration = app.lifecycle.configuration
        self._listener = listener
        connection = partial(Connection, Connections(app.memory, self._configuration.service.max_connections))
        self._uvicorn = uvicorn.Server(
            uvicorn.Config(
                app,
                loop="none",
                http=cast(Any, connection),  # which uvicorn calls, and asks for nothing else
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

    def run(self) -> None:
        """Serve. Blocks until the service has stopped."""
        uvloop.run(self._serve())

    def stop(self) -> None:
        """Take no new connections, let running requests end, and stop."""
        self._uvicorn.should_exit = True

    async def _serve(self) -> None:
        count, settings = len(self._configuration.models), self._configuration.service
        _log.info("listening on %s; loading %d model%s", self.url, count, "" if count == 1 else "s")
        serving = asyncio.create_task(self._uvicorn.serve([self._listener]))
        announced = False
        while not serving.done():
            await asyncio.wait([serving], timeout=_TICK_S)
            if self._app.lifecycle.failure is not None:
                self.stop()
            elif not announced and self._app.lifecycle.settled:
                announced = True
                self._announce()
            for connection in tuple(self._uvicorn.server_state.connections):
                if isinstance(connection, Connection):
                    connection.abort_if_stalled(settings.request_timeout_s, settings.answer_timeout_s)
        serving.result()

    def _announce(self) -> None:
        """Log a lookup of a model that is in service."""
        server = self._app.lifecycle.opened
        model = next((one for one in self._configuration.models if server and one.model in server.models), None)
        if model is not None:
            token = " -H 'Authorization: Bearer <token>'" if self._configuration.service.bearer_token else ""
            url, table = f"{self.url}/v1/models/{model.model}/lookup", model.embedding_table_names[0]
            _log.info("""ready; try: curl -s%s %s -d '{"tables": {"%s": [1, 2, 3]}}'""", token, url, table)


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
