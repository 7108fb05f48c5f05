"""The parent of the frontend processes and the engine: starts them, replaces dead ones, and forwards signals."""

import ctypes
import logging
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Final, NoReturn

from hps.configuration.load import Configuration, ServiceConfig
from hps.errors import ConfigError
from hps.ground.kernels.numba_kernels import compile_kernels
from hps.ground.memory.capacity import available_processors
from hps.regions import layout
from hps.regions.layout import Memory, read_only
from hps.regions.loop_state import FRONTEND_KERNELS
from hps.regions.sharing import share
from hps.serve.frontend.connection import Connection
from hps.serve.frontend.frontend import BACKLOG, Frontend
from hps.serve.http.authorization import is_loopback

_log = logging.getLogger(__name__)
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
_STOP_S: Final = 60.0
_TICK_S: Final = 0.1
_PR_SET_PDEATHSIG: Final = 1
_SPIN_NS: Final = 20_000
_CORES_TO_SPIN: Final = 6


class Supervisor:
    """Runs the processes of one service. *One thread*, the main one: it forks, so the process has no other threads."""

    def __init__(
        self, configuration: Configuration, host: str, port: int, frontends: int, grpc_port: int | None = None
    ) -> None:
        self._configuration = configuration
        self._frontends = frontends
        self._reserved = bind(host, port, shared=True)
        self._grpc_reserved = None if grpc_port is None else bind(host, grpc_port, "grpc_port", shared=True)
        self._address = self._reserved.getsockname()
        name, self._port = self._address[:2]
        self.url = url_of(self._reserved, configuration.service)  # of the service
        self._loopback = is_loopback(name)
        self._grpc_address: tuple[str, int] | None = None
        if self._grpc_reserved is not None:
            self._grpc_address = self._grpc_reserved.getsockname()[:2]
            _log.info("listening for gRPC on %s:%d", *self._grpc_address)
        self._directory = tempfile.TemporaryDirectory(prefix="hps-")
        path = str(Path(self._directory.name) / "engine.sock")
        self.shared = share(configuration.service, frontends, path, _SPIN_NS if self._spins else 0)
        self._snapshot = Memory(self.shared.snapshot, writable=False)
        self._children: dict[int, int] = {}  # number of the frontend by process id; -1 for the engine
        self._pauses: dict[int, float] = {}
        self._started: dict[int, float] = {}
        self._stopping = ""
        self._stopped_frontends = self._stopped_engine = False  # whether they were sent SIGTERM
        self._drains = False
        self._stop_began = 0.0
        self._code = 0

    @property
    def _spins(self) -> bool:
        # A frontend and the engine's loop that spin find each other's posts sooner than by a wake. With few processors they
        # would take them from one another, and from the threads that fetch.
        return available_processors() >= _CORES_TO_SPIN

    def run(self) -> int | None:
        """Serve until a signal stops the service or the engine ends. Return its exit code; None in the engine's process."""
        compile_kernels(*FRONTEND_KERNELS)
        for handled in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(handled, self._on_signal)
        due: dict[int, float] = dict.fromkeys((-1, *range(self._frontends)), 0.0)
        stop_at = 0.0
        while True:
            if self._stopping and not stop_at:
                stop_at = self._start_stop()
            if stop_at:
                due.clear()
                if self._continue_stop(stop_at):
                    _log.info("stopped, %.1f s after %s", time.monotonic() - self._stop_began, self._stopping)
                    return self._code
            for number, at in list(due.items()):
                if time.monotonic() >= at:
                    del due[number]
                    if self._start(number):
                        return None
            time.sleep(_TICK_S)
            for number, status in self._reap():
                if (restart_at := self._restart_time(number, status)) is not None:
                    due[number] = restart_at

    # -- children ---------------------------------------------------------------------------------------------------------

    def _start(self, number: int) -> bool:
        """Start a frontend or the engine; return True in the engine's process."""
        self._started[number] = time.monotonic()
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        child = os.fork()
        if child:
            self._children[child] = number
            return False
        for handled in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(handled, signal.SIG_DFL)
        # A parent that is killed cannot stop its children; the kernel then signals them. It does so only for deaths after
        # this call, hence the check.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(0)
        if number >= 0:
            self._run_frontend(number)
        self._close_reserved()
        return True

    def _run_frontend(self, number: int) -> NoReturn:
        code = 1
        try:
            shared = self.shared
            listener = bind_shared(self._reserved)
            self._close_reserved()
            for nth, (region, event) in enumerate(zip(shared.regions, shared.events, strict=True)):
                if nth != number:
                    os.close(region)
                    os.close(event)
            # A frontend parses what clients send. One that is broken into shall reach neither the regions of others nor write
            # the engine's snapshot, so it keeps only its own descriptors, and the snapshot's read-only.
            snapshot = read_only(shared.snapshot)
            os.close(shared.snapshot)
            shared = replace(shared, snapshot=snapshot)
            frontend = Frontend(
                number, shared, self._configuration, connect=Connection, spins=self._spins, loopback=self._loopback
            )
            if self._grpc_address is not None:
                from hps.serve.frontend.grpc_server import GrpcServer  # an extra; its threads do not survive a fork

                frontend.grpc = GrpcServer(frontend, self._grpc_address)
            frontend.run(listener)
            code = 0
        except BaseException:  # noqa: BLE001 - a forked process must not run the parent's code
            _log.exception("frontend %d failed", number)
        finally:
            with suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def _close_reserved(self) -> None:
        self._reserved.close()
        if self._grpc_reserved is not None:
            self._grpc_reserved.close()

    def _reap(self) -> list[tuple[int, int]]:
        found = []
        while self._children:
            try:
                child, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if not child:
                break
            if (number := self._children.pop(child, None)) is not None:
                found.append((number, status))
        return found

    def _restart_time(self, number: int, status: int) -> float | None:
        """Return when to restart a process that has ended; None if it is not restarted."""
        code = os.waitstatus_to_exitcode(status)
        if number < 0:
            # The frontends keep their connections, and post their lookups again once the next engine has started their epoch.
            # The regions are mapped for this moment only: frontends that are forked later would inherit the mapping.
            for region in self.shared.regions:
                Memory(region)[layout.ENGINE_EPOCH] = 0
            for event in self.shared.events:
                os.eventfd_write(event, 1)
        if self._stopping:
            if number < 0:
                self._code = code if code >= 0 else 1
            return None
        if number < 0 and code >= 0:  # it has logged the reason
            self._stopping, self._code = "the engine has ended", code
            return None
        name = f"frontend {number}" if number >= 0 else "the engine"
        cause = f"signal {-code}" if code < 0 else f"exit code {code}"
        long = time.monotonic() - self._started[number] > _LONGEST_PAUSE_S
        pause = _FIRST_PAUSE_S if long else min(_LONGEST_PAUSE_S, 2 * self._pauses.get(number, _FIRST_PAUSE_S / 2))
        self._pauses[number] = pause
        pause = 0.0 if long or pause <= _FIRST_PAUSE_S else pause
        _log.error("%s has died (%s); restarting it%s", name, cause, f" in {pause:g} s" if pause else "")
        return time.monotonic() + pause

    # -- signals and stops --------------------------------------------------------------------------------------------------

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            self._signal_engine(signal.SIGHUP)
        elif not self._stopping:
            self._stopping, self._drains = signal.Signals(number).name, number == signal.SIGTERM
        else:
            self._drains = False

    def _signal_engine(self, sent: int) -> None:
        self._signal([child for child, number in self._children.items() if number < 0], sent)

    def _signal_frontends(self, sent: int) -> None:
        self._signal([child for child, number in self._children.items() if number >= 0], sent)

    @staticmethod
    def _signal(children: Iterable[int], sent: int) -> None:
        for child in children:
            with suppress(ProcessLookupError):
                os.kill(child, sent)

    def _start_stop(self) -> float:
        """Turn not ready; return when the frontends stop listening."""
        self._signal_frontends(signal.SIGUSR1)
        self._signal_engine(signal.SIGUSR1)
        self._stop_began, drain_s = time.monotonic(), 0.0
        if self._drains and any(child < 0 for child in self._children.values()):
            found = layout.read_text(self._snapshot, 0, layout.MOST_SNAPSHOT_BYTES)
            snapshot = found[1] if found else {}
            if not snapshot.get("blocked", "starting"):
                drain_s = snapshot["settings"]["drain_s"]
        if drain_s:
            message = "%s: not ready from now on; requests are answered for %g s more (service.drain_s)"
            _log.info(message, self._stopping, drain_s)
        return time.monotonic() + drain_s

    def _continue_stop(self, stop_at: float) -> bool:
        """Take the next step of a stop; return True if all processes have ended."""
        # The engine outlives the frontends, whose last requests it answers.
        now = time.monotonic()
        if self._drains and now < stop_at:
            return not self._children
        if any(child >= 0 for child in self._children.values()):
            if not self._stopped_frontends:
                self._stopped_frontends = True
                _log.info("%s: no longer listening, after %.1f s", self._stopping, now - self._stop_began)
                self._signal_frontends(signal.SIGTERM)
        elif self._children and not self._stopped_engine:
            self._stopped_engine = True
            _log.info("requests have ended, after %.1f s", now - self._stop_began)
            self._signal_engine(signal.SIGTERM)
        if now > stop_at + _STOP_S:
            self._signal(self._children, signal.SIGKILL)
        return not self._children


def bind(host: str, port: int, key: str = "port", *, shared: bool = False) -> socket.socket:
    """Bind an address; port 0 picks a free one. Listen on it, unless it is reserved for the sockets of frontends (`shared`).

    Args:
        key: the port's key in the configuration, for errors.

    Raises:
        ConfigError: it cannot be bound, or another process listens there.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        if shared and port:  # with SO_REUSEPORT two services of one user could share the port
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
        bound = socket.socket(family, kind, protocol)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if shared:
                bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            bound.bind(address)
            if not shared:
                bound.listen(BACKLOG)
        except OSError:
            bound.close()
            raise
    except OSError as error:
        raise ConfigError(
            "service",
            [f"host, {key}: cannot listen on {host}:{port}: {error.strerror}; stop what listens there, or choose another"],
        ) from error
    return bound


def bind_shared(reserved: socket.socket) -> socket.socket:
    """Bind the address that a socket reserves, as other frontends do."""
    # By SO_REUSEPORT the kernel spreads connections over the listening sockets. It ignores bound sockets that do not listen,
    # such as the reserving one, and a frontend listens only once its event loop runs, so no connection waits for a start.
    listener = socket.socket(reserved.family, reserved.type, reserved.proto)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listener.bind(reserved.getsockname())
    return listener


def url_of(bound: socket.socket, settings: ServiceConfig) -> str:
    host, port = bound.getsockname()[:2]
    return f"{settings.scheme}://[{host}]:{port}" if ":" in host else f"{settings.scheme}://{host}:{port}"
