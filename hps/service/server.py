"""Runs the service under uvicorn: binds before loading, drops slow clients, stops gracefully on signals."""

import asyncio
import logging
import os
import select
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, cast
from urllib.parse import urlsplit

import uvicorn
import uvloop

from hps.configuration.load import Configuration, ServiceConfig, load_configuration
from hps.errors import ConfigError
from hps.ground.log_limits import OnceAMinute
from hps.ground.progress import Progress
from hps.ground.workers import new_thread
from hps.parameter_server import HPS
from hps.regions.layout import FrontDescriptors
from hps.service.app import CLOSE_TIMEOUT_S, Application
from hps.service.authorization import is_loopback
from hps.service.connection import Connection, Connections
from hps.service.fronts.supervisor import Supervisor, default_fronts
from hps.service.lifecycle import Lifecycle
from hps.service.logs.lines import LogFormat, use
from hps.service.owner import FrontLink
from hps.service.reload import compare

_log = logging.getLogger(__name__)
_BACKLOG = 2048
_TICK_S = 0.5
_CLOSING_TICK_S = 0.02

logging.getLogger("uvicorn.error").addFilter(OnceAMinute())


def serve(
    configuration: Configuration,
    host: str | None = None,
    port: int | None = None,
    progress: Progress | None = None,
    *,
    force: bool = False,
    path: str | os.PathLike[str] | None = None,
    log_level: str | None = None,
    log_format: LogFormat | None = None,
    on_open: Callable[[HPS], object] = lambda server: None,
    fronts: int | None = None,
) -> bool:
    """Serve a configuration over HTTP until SIGTERM or SIGINT. Blocks; must run in the main thread of a process without others.

    With fronts, this process becomes the parent of the front processes and of one that has the tiers, and returns in both.

    Args:
        host: overrides the configured host.
        port: overrides the configured port; 0 picks a free one, which is logged.
        progress: receives loading progress; by default it is logged.
        force: load the model files even if a database already holds them; online updates are lost.
        path: file of the configuration, reread on SIGHUP.
        log_level: overrides the configured level.
        log_format: overrides the configured format, if the lines are written by the handlers of `hps serve`.
        on_open: receives the parameter server before any model is loaded; what it raises ends the service.
        fronts: overrides the configured number of front processes; 0: this process does all.

    Returns:
        Whether everything was closed. If not, a thread waits for an unresponsive source or database, and would keep the
        interpreter from exiting.

    Raises:
        ConfigError: the address cannot be bound.
        HPSError: the databases could not be opened, or no model could be loaded.
    """
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    use(log_format or configuration.service.log_format, log_level or configuration.service.log_level)
    host = host or configuration.service.host
    port = configuration.service.port if port is None else port
    fronts = configuration.service.fronts if fronts is None else fronts
    if fronts is None:
        fronts = default_fronts()

    def own(shared: FrontDescriptors | None, listener: socket.socket, url: str) -> bool:
        lifecycle = Lifecycle(configuration, progress=progress, force=force, on_open=opened)
        app = Application(lifecycle)
        server = Server(app, listener, url)
        if shared is not None:
            links.append(FrontLink(shared, lifecycle, configuration.service.lookup_threads, app.device_failed))
            app.serve_fronts(links[0])
        actions: dict[int, Callable[[], None]] = {
            signal.SIGTERM: partial(server.stop, "SIGTERM", drain=shared is None),
            signal.SIGINT: partial(server.stop, "SIGINT", force=True),
            signal.SIGUSR1: lifecycle.leave,
        }
        if shared is not None:
            actions[signal.SIGINT] = lambda: None  # the parent says when
        given = {"log_level": log_level, "log_format": log_format}
        if path is not None:
            kept = [key for key, value in given.items() if value is not None]
            actions[signal.SIGHUP] = partial(server.reload, path, kept)
        before = {number: signal.signal(number, lambda number, _: actions[number]()) for number in actions}
        try:
            server.run()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        if lifecycle.failure is not None:
            raise lifecycle.failure
        return app.closed

    links: list[FrontLink] = []

    def opened(server: HPS) -> None:
        on_open(server)
        for link in links:
            link.open(server)

    if not fronts:
        with listen(host, port) as listener:
            return own(None, listener, url_of(listener))
    result = [False]

    def own_for_fronts(shared: FrontDescriptors, url: str) -> bool:
        with suppress(FileNotFoundError):
            os.unlink(shared.path)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(shared.path)
            listener.listen(_BACKLOG)
            result[0] = own(shared, listener, url)
        return result[0]

    code = Supervisor(configuration.service, host, port, fronts, own_for_fronts).run()
    return result[0] if code is None else code == 0


class _Uvicorn(uvicorn.Server):
    """Leaves signals to the caller."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Server:
    """Runs an application under uvicorn until it is stopped or its loading fails, and drops stalled connections.

    *One per event loop*; `stop` and `reload` may be called from any thread and from signal handlers.

    Args:
        listener: a listening socket; the server closes it.
        url: where clients reach it, if that is another address.

    Attributes:
        url: address of the listener.
    """

    def __init__(self, app: Application, listener: socket.socket, url: str | None = None) -> None:
        self.url = url or url_of(listener)
        app.authorization.loopback = is_loopback(urlsplit(self.url).hostname or "")
        self._app = app
        self._listener = listener
        settings = self._settings
        self._connections = Connections(app.memory, app.refusals, settings.max_connections, settings.keep_alive_s)
        self._uvicorn = _Uvicorn(
            uvicorn.Config(
                app,
                loop="none",
                http=cast(Any, partial(Connection, self._connections)),  # uvicorn only calls it
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                backlog=_BACKLOG,
                timeout_graceful_shutdown=1,  # after `_stop` has waited
            )
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._told: deque[Callable[[], None]] = deque()  # requests from other threads and signals to the event loop
        self._serving: asyncio.Task[None]  # while the event loop runs
        self._stopping: asyncio.Task[None] | None = None
        self._drained = asyncio.Event()
        self._reads = 0

    def run(self) -> None:
        """Serve. Blocks until the service has stopped."""
        uvloop.run(self._serve())

    def stop(self, why: str = "stopping", *, drain: bool = False, force: bool = False) -> None:
        """Turn not ready, refuse new connections, finish running requests, and stop.

        A second call ends the draining at once; with `force`, a later one ends the wait for running requests.

        Args:
            why: reason for the log.
            drain: keep serving for `service.drain_s` after turning not ready, so that load balancers can switch.
        """
        self._tell(partial(self._on_stop, why, drain=drain, force=force))

    def reload(self, path: str | os.PathLike[str], kept: Collection[str] = ()) -> None:
        """Reread the configuration, apply the changes that a running service can apply, and log the others.

        Args:
            path: file of the configuration. If it is wrong nothing changes.
            kept: keys of `service` that stay as they are.
        """
        self._tell(partial(self._on_reload, path, kept))

    @property
    def _settings(self) -> ServiceConfig:
        return self._app.lifecycle.configuration.service

    def _tell(self, action: Callable[[], None]) -> None:
        self._told.append(action)
        if self._loop is not None:
            with suppress(RuntimeError):  # it is closed
                self._loop.call_soon_threadsafe(self._hear)

    def _hear(self) -> None:
        while self._told:
            self._told.popleft()()

    async def _serve(self) -> None:
        count = len(self._app.lifecycle.configuration.models)
        _log.info("listening on %s; loading %d model%s", self.url, count, "" if count == 1 else "s")
        serving = self._serving = asyncio.create_task(self._uvicorn.serve([self._listener]))
        self._loop = asyncio.get_running_loop()
        self._hear()
        announced = False
        while not serving.done():
            await asyncio.wait([serving], timeout=_TICK_S)
            if self._app.lifecycle.failure is not None and self._stopping is None:
                self.stop("the loading failed")
            elif not announced and self._app.lifecycle.settled:
                announced = True
                self._announce()
            settings = self._settings
            for connection in self._open():
                connection.abort_if_stalled(settings.request_timeout_s, settings.answer_timeout_s)
            if self._stopping is not None and self._stopping.done():
                self._stopping.result()
        serving.result()
        if self._stopping is not None:
            await self._stopping

    def _open(self) -> list[Connection]:
        return [one for one in self._uvicorn.server_state.connections if isinstance(one, Connection)]

    def _on_stop(self, why: str, *, drain: bool, force: bool) -> None:
        if self._stopping is None:
            drain_s = self._settings.drain_s if drain and self._app.lifecycle.settled else 0.0
            self._stopping = asyncio.create_task(self._stop(why, drain_s))
        elif not self._drained.is_set():
            _log.info("%s: the draining ends now", why)
            self._drained.set()
        elif force:
            self._uvicorn.force_exit = True

    async def _stop(self, why: str, drain_s: float) -> None:
        began = time.monotonic()
        self._app.lifecycle.leave()
        self._connections.leave()
        if drain_s:
            _log.info("%s: not ready from now on; requests are answered for %g s more (service.drain_s)", why, drain_s)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._drained.wait(), drain_s)
        self._drained.set()
        await self._stop_listening()
        since = time.monotonic()
        _log.info("%s: no longer listening, after %.1f s; connections: %d", why, since - began, len(self._open()))
        while self._open() and time.monotonic() - since < CLOSE_TIMEOUT_S and not self._uvicorn.force_exit:
            for connection in self._open():
                connection.close_if_quiet()
            await asyncio.sleep(_CLOSING_TICK_S)
        _log.info("requests have ended, after %.1f s; connections left: %d", time.monotonic() - since, len(self._open()))
        self._uvicorn.should_exit = True
        await asyncio.wait([self._serving])
        _log.info("stopped, %.1f s after %s", time.monotonic() - began, why)

    async def _stop_listening(self) -> None:
        """Close the listener once its queue is empty; closing resets unaccepted connections."""
        if not self._uvicorn.started:
            return
        queued = select.poll()
        queued.register(self._listener, select.POLLIN)
        turns = 0
        while queued.poll(0) and turns < _BACKLOG:
            turns += 1
            await asyncio.sleep(0)  # each turn of the event loop accepts at least one connection
        for server in self._uvicorn.servers:
            server.close()

    def _on_reload(self, path: str | os.PathLike[str], kept: Collection[str]) -> None:
        self._reads += 1
        new_thread("reload", partial(self._read_again, path, kept, self._reads), lasting=False).start()

    def _read_again(self, path: str | os.PathLike[str], kept: Collection[str], number: int) -> None:
        try:
            wanted = load_configuration(path)
        except ConfigError as error:
            _log.error("nothing changes: %s", error)
        else:
            self._tell(partial(self._take_over, wanted, kept, number))

    def _take_over(self, wanted: Configuration, kept: Collection[str], number: int) -> None:
        if number < self._reads:  # another reload has begun
            return
        lifecycle = self._app.lifecycle
        failed = {one.name for one in lifecycle.states.models() if one.state == "failed"}
        changes = compare(lifecycle.configuration, wanted, failed, kept)
        lifecycle.configuration = changes.configuration
        settings = self._settings
        use(*(None if key in kept else getattr(settings, key) for key in ("log_format", "log_level")))
        self._app.configure(settings)
        self._connections.limit_to(settings.max_connections, settings.keep_alive_s)
        for line in changes.made:
            _log.info("changed: %s", line)
        for line in changes.refused:
            _log.warning("not changed before a restart: %s", line)
        if not changes.made and not changes.refused:
            _log.info("the configuration was read again; nothing in it has changed")
        lifecycle.change(changes.deploy, changes.undeploy)

    def _announce(self) -> None:
        """Log an example lookup of a model in service."""
        server = self._app.lifecycle.opened
        models = self._app.lifecycle.configuration.models
        model = next((one for one in models if server and one.model in server.models), None)
        if model is not None:
            token = " -H 'Authorization: Bearer <token>'" if self._settings.bearer_token else ""
            url, table = f"{self.url}/v1/models/{model.model}/lookup", model.embedding_table_names[0]
            _log.info("""ready; try: curl -s%s %s -d '{"tables": {"%s": [1, 2, 3]}}'""", token, url, table)


def url_of(listener: socket.socket) -> str:
    """Return the URL of a listening socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def listen(host: str, port: int) -> socket.socket:
    """Bind and listen; port 0 picks a free one.

    Raises:
        ConfigError: the address cannot be bound; the message says why.
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
