"""Runs the service: binds before loading, and stops gracefully on signals."""

import asyncio
import logging
import os
import shlex
import signal
import socket
import tempfile
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import uvicorn
import uvloop

from hps.configuration.load import Configuration, ServiceConfig, Source, default_network_threads, load_configuration
from hps.configuration.tokens import load_tokens
from hps.errors import ConfigError, MissingDependencyError
from hps.ground.log_limits import OnceAMinute
from hps.ground.memory.heap import bound_heap
from hps.ground.progress import Progress
from hps.ground.registry import install_hint
from hps.ground.threads.workers import new_thread
from hps.parameter_server import HPS
from hps.regions.layout import FrontendDescriptors
from hps.regions.sharing import default_fronts, share
from hps.serve.engine.app import CLOSE_TIMEOUT_S, Application
from hps.serve.engine.lifecycle import Lifecycle
from hps.serve.frontend.connection import Connection
from hps.serve.frontend.frontend import BACKLOG, Frontend
from hps.serve.frontend.supervisor import Supervisor, bind, url_of
from hps.serve.frontend.tls import context_of
from hps.serve.http.authorization import exposures, is_loopback
from hps.serve.logs.lines import LogFormat, configure_logging
from hps.serve.protocol.score_rows import example_of
from hps.serve.reload import compare

_log = logging.getLogger(__name__)
_TICK_S: Final = 0.5
_FRONTEND_KEEP_ALIVE_S: Final = 3600
_HEAPS: Final = 8  # of the engine, whose threads fetch and load at the same time

logging.getLogger("uvicorn.error").addFilter(OnceAMinute())


def serve(
    configuration: Configuration,
    host: str | None = None,
    port: int | None = None,
    progress: Progress | None = None,
    *,
    force: bool = False,
    source: Source | None = None,
    log_level: str | None = None,
    log_format: LogFormat | None = None,
    on_open: Callable[[HPS], object] = lambda server: None,
    fronts: int | None = None,
    grpc_port: int | None = None,
    allow_empty: bool | None = None,
) -> bool:
    """Serve a configuration over HTTP until SIGTERM or SIGINT. Blocks; must run in the main thread of a process without others.

    With frontends, this process becomes the parent of their processes and of the engine's, and returns in both.

    Args:
        host, port, log_level, log_format, fronts, grpc_port, allow_empty: override the configured ones. Port 0 picks a free
            one, which is logged; without frontend processes (`fronts` is 0) this process does everything.
        progress: receives loading progress; by default it is logged.
        force: load the model files even if a database already holds them; online updates are lost.
        source: of the configuration, reread on SIGHUP.
        on_open: receives the parameter server before any model is loaded; an exception ends the service.

    Returns:
        Whether everything was closed. If not, a thread waits for an unresponsive source or database, and keeps the interpreter
        from exiting.

    Raises:
        ConfigError: an address cannot be bound, or the certificate or the file of tokens cannot be used.
        MissingDependencyError: the packages for gRPC are not installed.
        HPSError: the databases could not be opened, or no model could be loaded, and retries would not help.
        SystemExit: the same in the parent, after the engine has reported it.
    """
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    configure_logging(log_format or configuration.service.log_format, log_level or configuration.service.log_level)
    host = host or configuration.service.host
    port = configuration.service.port if port is None else port
    if (count := configuration.service.fronts if fronts is None else fronts) is None:
        count = default_fronts()
    if configuration.service.tokens_path:
        load_tokens(configuration.service.tokens_path)
    if configuration.service.tls_certificate_path:
        context_of(configuration.service)
    overriding = {"log_level": log_level, "log_format": log_format, "allow_empty": allow_empty}
    given = [key for key, value in overriding.items() if value is not None]
    if allow_empty is not None:
        service = configuration.service.model_copy(update={"allow_empty": allow_empty})
        configuration = configuration.model_copy(update={"service": service})

    def run_engine(
        listener: socket.socket | None,
        grpc_address: tuple[str, int] | None = None,
        shared: FrontendDescriptors | None = None,
        url: str | None = None,
    ) -> bool:
        if shared is not None:
            bound_heap(_HEAPS)
            default_network_threads(1)  # threads of a network's operators would wait for busy processors
        lifecycle = Lifecycle(configuration, progress=progress, force=force)
        lifecycle.on_open.insert(0, on_open)
        app = Application(lifecycle)
        server = Server(app, listener, shared, url, grpc_address)
        actions: dict[int, Callable[[], None]] = {
            signal.SIGTERM: partial(server.stop, "SIGTERM", drain=True),
            signal.SIGINT: partial(server.stop, "SIGINT", force=True),
            signal.SIGUSR1: lifecycle.leave,
        }
        if shared is not None:
            actions[signal.SIGINT] = lambda: None  # the parent handles it
        if source is not None:
            actions[signal.SIGHUP] = partial(server.reload, source, given)
        before = {number: signal.signal(number, lambda number, _: actions[number]()) for number in actions}
        try:
            server.run()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        if lifecycle.failure is not None:
            raise lifecycle.failure
        return app.closed

    if (grpc_port := configuration.service.grpc_port if grpc_port is None else grpc_port) is not None:
        _check_grpc()
    if not count:
        with bind(host, port) as listener:
            if grpc_port is None:
                return run_engine(listener)
            with bind(host, grpc_port, "grpc_port", shared=True) as grpc_reserved:
                return run_engine(listener, grpc_reserved.getsockname()[:2])
    supervisor = Supervisor(configuration, host, port, count, grpc_port)
    if (code := supervisor.run()) is not None:
        if code > 1:  # an error, which the engine has reported
            raise SystemExit(code)
        return code == 0
    return run_engine(None, None, supervisor.shared, supervisor.url)


def _check_grpc() -> None:
    """Check that the packages for gRPC are installed."""
    # Without importing them: this process may fork the frontends, and grpcio's threads do not survive a fork.
    for name in ("grpc", "google.protobuf"):
        try:
            found = find_spec(name) is not None
        except (ImportError, ValueError):  # no package `google`, or a blocked one
            found = False
        if not found:
            raise MissingDependencyError(f"serving gRPC: there is no package {name!r}; {install_hint('grpc')}")


class _Uvicorn(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to `serve`."""
        yield


class Server:
    """Runs an application under uvicorn, on the frontends' unix socket, until it is stopped or its loading fails.

    *One per event loop*; `stop` and `reload` may be called from any thread and from signal handlers.

    Args:
        listener: a listening socket, served by a frontend on this event loop, and closed in the end; None if the frontends are
            processes.
        shared: descriptors shared with the frontend processes.
        url: address of the frontend processes.
        grpc_address: address for gRPC of the frontend on this event loop, reserved by `supervisor.bind`.

    Attributes:
        url: address for clients.
        frontend: the frontend on this event loop, if any.
    """

    def __init__(
        self,
        app: Application,
        listener: socket.socket | None,
        shared: FrontendDescriptors | None = None,
        url: str | None = None,
        grpc_address: tuple[str, int] | None = None,
    ) -> None:
        self._app = app
        self._listener, self._grpc_address = listener, grpc_address
        self._shared = shared
        self.url = url or ("" if listener is None else url_of(listener, app.lifecycle.configuration.service))
        self.frontend: Frontend | None = None
        where = urlsplit(self.url)
        app.address = where.hostname or "", where.port or 0
        app.authorization.loopback = is_loopback(app.address[0])
        self._uvicorn = _Uvicorn(
            uvicorn.Config(
                app,
                loop="none",
                http="httptools",
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=_FRONTEND_KEEP_ALIVE_S,
                timeout_graceful_shutdown=1,  # after `_stop` has waited
            )
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._calls: deque[Callable[[], None]] = deque()  # from other threads and signals, to run on the event loop
        self._serving: asyncio.Task[None]  # while the event loop runs
        self._stopping: asyncio.Task[None] | None = None
        self._drained, self._forced = asyncio.Event(), asyncio.Event()
        self._reads = 0

    def run(self) -> None:
        """Serve. Blocks until the service has stopped."""
        with ExitStack() as stack:
            configuration, loopback = self._app.lifecycle.configuration, self._app.authorization.loopback
            if (shared := self._shared) is None:
                directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="hps-"))
                shared = share(configuration.service, 1, str(Path(directory) / "engine.sock"), 0)
            self._app.link.connect(shared)
            if self._listener is not None:
                self.frontend = Frontend(0, shared, configuration, connect=Connection, spins=False, loopback=loopback)
            with suppress(FileNotFoundError):  # the socket of a dead engine
                os.unlink(shared.path)
            unix = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            unix.bind(shared.path)
            unix.listen(BACKLOG)
            uvloop.run(self._serve(unix))
            if self._shared is None and self._app.closed:  # else a thread may still use it
                shared.close()

    def stop(self, why: str = "stopping", *, drain: bool = False, force: bool = False) -> None:
        """Turn not ready, refuse new connections, finish running requests, and stop.

        A second call ends the draining at once; a later one with `force` ends the wait for running requests.

        Args:
            why: reason for the log.
            drain: keep serving for `service.drain_s` after turning not ready, so that load balancers can switch.
        """
        self._run_on_loop(partial(self._on_stop, why, drain=drain, force=force))

    def reload(self, source: Source, kept: Collection[str] = ()) -> None:
        """Reread the configuration, apply the changes that a running service can apply, and log the others.

        Args:
            source: of the configuration. If it is invalid nothing changes.
            kept: keys of `service` that are not changed.
        """
        self._run_on_loop(partial(self._on_reload, source, kept))

    @property
    def _settings(self) -> ServiceConfig:
        return self._app.lifecycle.configuration.service

    def _run_on_loop(self, call: Callable[[], None]) -> None:
        self._calls.append(call)
        if self._loop is not None:
            with suppress(RuntimeError):  # it is closed
                self._loop.call_soon_threadsafe(self._run_calls)

    def _run_calls(self) -> None:
        while self._calls:
            self._calls.popleft()()

    async def _serve(self, unix: socket.socket) -> None:
        configuration = self._app.lifecycle.configuration
        count = len(configuration.models)
        models = [f"{count} model{'' if count == 1 else 's'}"] if count or not configuration.model_repository else []
        models += [f"the models of {configuration.model_repository}"] if configuration.model_repository else []
        _log.info("listening on %s; loading %s", self.url, " and ".join(models))
        for warning in exposures(self._settings, self._app.address[0]):
            _log.warning("%s", warning)
        serving = self._serving = asyncio.create_task(self._uvicorn.serve([unix]))
        if self.frontend is not None and self._listener is not None:
            if self._grpc_address is not None:
                from hps.serve.frontend.grpc_server import GrpcServer  # an extra

                self.frontend.grpc = GrpcServer(self.frontend, self._grpc_address)
            await self.frontend.start(self._listener)
            if self._grpc_address is not None:
                _log.info("listening for gRPC on %s:%d", *self._grpc_address)
        self._loop = asyncio.get_running_loop()
        self._run_calls()
        # The end of loading, on another thread, and changes of the tokens' file are polled.
        announced = False
        while not serving.done():
            await asyncio.wait([serving], timeout=_TICK_S)
            self._app.poll_tokens()
            if self._app.lifecycle.failure is not None and self._stopping is None:
                self.stop("the loading failed")
            elif not announced and self._app.lifecycle.settled and self._app.link.answers_clients:
                announced = True
                self._app.link.publish()  # before the log line, which tells readers to send requests
                self._announce()
            if self._stopping is not None and self._stopping.done():
                self._stopping.result()
        serving.result()
        if self._stopping is not None:
            await self._stopping
        if self.frontend is not None:
            self.frontend.close()

    def _on_stop(self, why: str, *, drain: bool, force: bool) -> None:
        if self._stopping is None:
            drain_s = self._settings.drain_s if drain and self._app.lifecycle.settled else 0.0
            self._stopping = asyncio.create_task(self._stop(why, drain_s))
        elif not self._drained.is_set():
            _log.info("%s: draining ends now", why)
            self._drained.set()
        elif force:
            self._forced.set()

    async def _stop(self, why: str, drain_s: float) -> None:
        began = time.monotonic()
        self._app.lifecycle.leave()
        if (frontend := self.frontend) is not None:
            frontend.drain()
            if drain_s:
                _log.info("%s: not ready from now on; requests are answered for %g s more (service.drain_s)", why, drain_s)
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._drained.wait(), drain_s)
            self._drained.set()
            _log.info("%s: no longer listening, after %.1f s", why, time.monotonic() - began)
            stopping = [asyncio.create_task(wait) for wait in (frontend.stop(CLOSE_TIMEOUT_S), self._forced.wait())]
            await asyncio.wait(stopping, return_when=asyncio.FIRST_COMPLETED)
            for task in stopping:
                task.cancel()
            _log.info("requests have ended; connections left: %d", len(frontend.connections.order))
        self._uvicorn.should_exit = True
        await asyncio.wait([self._serving])
        _log.info("stopped, %.1f s after %s", time.monotonic() - began, why)

    def _on_reload(self, source: Source, kept: Collection[str]) -> None:
        self._reads += 1
        new_thread("reload", partial(self._reread, source, kept, self._reads), lasting=False).start()

    def _reread(self, source: Source, kept: Collection[str], number: int) -> None:
        try:
            wanted = load_configuration(source)
            if wanted.service.tokens_path:
                load_tokens(wanted.service.tokens_path)
        except ConfigError as error:
            _log.error("nothing changes: %s", error)
        else:
            self._run_on_loop(partial(self._apply, wanted, kept, number))

    def _apply(self, wanted: Configuration, kept: Collection[str], number: int) -> None:
        if number < self._reads:  # another reload has started
            return
        lifecycle = self._app.lifecycle
        failed = {model.name for model in lifecycle.states.models() if model.state == "failed"}
        changes = compare(lifecycle.configuration, wanted, failed, kept)
        lifecycle.configuration = changes.configuration
        settings = self._settings
        configure_logging(*(None if key in kept else getattr(settings, key) for key in ("log_format", "log_level")))
        self._app.configure(settings)
        self._app.link.publish()
        for line in changes.made:
            _log.info("changed: %s", line)
        for line in changes.refused:
            _log.warning("not changed before a restart: %s", line)
        if not changes.made and not changes.refused:
            _log.info("the configuration was reread; nothing in it has changed")
        lifecycle.change(changes.deploy, changes.undeploy)

    def _announce(self) -> None:
        """Log an example lookup of a model in service."""
        server = self._app.lifecycle.opened
        if server is not None and server.models:
            deployment = server.model(server.models[0])
            model = deployment.config
            settings = self._settings
            options = " --cacert <ca.pem>" if settings.tls_certificate_path else ""
            options += " --cert <client.pem>" if settings.tls_client_ca_path else ""
            options += " -H 'Authorization: Bearer <token>'" if settings.bearer_token or settings.tokens_path else ""
            url, scores = f"{self.url}/v1/models/{model.model}", deployment.scores
            if scores is not None and (example := example_of(scores.opened.signature)):
                _log.info("ready; try: curl -s%s %s/score -d %s", options, url, shlex.quote(example))
                return
            table = model.embedding_table_names[0]
            _log.info("""ready; try: curl -s%s %s/lookup -d '{"tables": {"%s": [1, 2, 3]}}'""", options, url, table)
