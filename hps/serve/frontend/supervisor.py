"""The parent of front processes and the engine: starts them, replaces those that die, and passes signals on."""

import ctypes
import logging
import os
import signal
import socket
import sys
import tempfile
import time
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
from hps.serve.frontend.frontend import Front
from hps.serve.http.authorization import is_loopback

_log = logging.getLogger(__name__)
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
_STOP_S: Final = 60.0
_TICK_S: Final = 0.1
_PR_SET_PDEATHSIG: Final = 1
_SPIN_NS: Final = 20_000
_CORES_TO_SPIN: Final = 6


class Supervisor:
    """Runs the processes of one service. *One thread*, the main one; nothing else may run in this process.

    Args:
        configuration: of the service.
        fronts: number of front processes.
        grpc_port: port for gRPC; None: none.

    Attributes:
        shared: what fronts and engine share.
        url: address of the service.
    """

    def __init__(self, configuration: Configuration, host: str, port: int, fronts: int, grpc_port: int | None = None) -> None:
        self._configuration = configuration
        self._fronts = fronts
        self._place = reserve(host, port)
        self._grpc_place = None if grpc_port is None else reserve(host, grpc_port, "grpc_port")
        self._address = self._place.getsockname()
        name, self._port = self._address[:2]
        self.url = url_of(self._place, configuration.service)
        self._loopback = is_loopback(name)
        self._grpc_address: tuple[str, int] | None = None
        if self._grpc_place is not None:
            self._grpc_address = self._grpc_place.getsockname()[:2]
            _log.info("listening for gRPC on %s:%d", *self._grpc_address)
        self._directory = tempfile.TemporaryDirectory(prefix="hps-")
        path = str(Path(self._directory.name) / "engine.sock")
        self.shared = share(configuration.service, fronts, path, _SPIN_NS if self._spins else 0)
        self._page = Memory(self.shared.snapshot, writable=False)
        self._children: dict[int, int] = {}  # process: number of the front, -1 for the engine
        self._pauses: dict[int, float] = {}
        self._started: dict[int, float] = {}
        self._stopping = ""
        self._told: set[bool] = set()  # whether the fronts (False) and the engine (True) were told to stop
        self._drains = False
        self._began = 0.0
        self._code = 0

    @property
    def _spins(self) -> bool:
        return available_processors() >= _CORES_TO_SPIN

    def run(self) -> int | None:
        """Serve until a signal stops the service or the engine ends. Returns its exit code; None in the engine's process."""
        compile_kernels(*FRONTEND_KERNELS)
        for one in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(one, self._on_signal)
        due: dict[int, float] = dict.fromkeys((-1, *range(self._fronts)), 0.0)
        stop_at = 0.0
        while True:
            if self._stopping and not stop_at:
                stop_at = self._begin_stop()
            if stop_at:
                due.clear()
                if self._stop_on(stop_at):
                    _log.info("stopped, %.1f s after %s", time.monotonic() - self._began, self._stopping)
                    return self._code
            for number, at in list(due.items()):
                if time.monotonic() >= at:
                    del due[number]
                    if self._start(number):
                        return None
            time.sleep(_TICK_S)
            for number, status in self._ended():
                if (again_at := self._after(number, status)) is not None:
                    due[number] = again_at

    # -- children ---------------------------------------------------------------------------------------------------------

    def _start(self, number: int) -> bool:
        """Start a front or the engine; return True in the process of the engine."""
        self._started[number] = time.monotonic()
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        child = os.fork()
        if child:
            self._children[child] = number
            return False
        for one in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(one, signal.SIG_DFL)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(0)
        if number >= 0:
            self._be_front(number)
        self._close_places()
        return True

    def _be_front(self, number: int) -> NoReturn:
        code = 1
        try:
            shared = self.shared
            listener = bind_beside(self._place)
            self._close_places()
            for nth, (region, event) in enumerate(zip(shared.regions, shared.events, strict=True)):
                if nth != number:
                    os.close(region)
                    os.close(event)
            page = read_only(shared.snapshot)
            os.close(shared.snapshot)
            where = number, replace(shared, snapshot=page), self._configuration
            front = Front(*where, connect=Connection, spins=self._spins, loopback=self._loopback)
            if self._grpc_address is not None:
                from hps.serve.frontend.grpc_server import GrpcServer  # of an extra, and not before the fork

                front.grpc = GrpcServer(front, self._grpc_address)
            front.run(listener)
            code = 0
        except BaseException:  # noqa: BLE001 - a forked process must not go on in the parent's code
            _log.exception("front %d failed", number)
        finally:
            with suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def _close_places(self) -> None:
        self._place.close()
        if self._grpc_place is not None:
            self._grpc_place.close()

    def _ended(self) -> list[tuple[int, int]]:
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

    def _after(self, number: int, status: int) -> float | None:
        """Decide what follows the end of a process: the time of its next start; None: none."""
        code = os.waitstatus_to_exitcode(status)
        if number < 0:
            for region in self.shared.regions:  # not mapped for long: fronts that are forked would have it, too
                Memory(region)[layout.ENGINE_EPOCH] = 0
            for event in self.shared.events:
                os.eventfd_write(event, 1)
        if self._stopping:
            if number < 0:
                self._code = code if code >= 0 else 1
            return None
        if number < 0 and code >= 0:  # it says itself why
            self._stopping, self._code = "the engine has ended", code
            return None
        what = f"front {number}" if number >= 0 else "the engine process"
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        long = time.monotonic() - self._started[number] > _LONGEST_PAUSE_S
        pause = _FIRST_PAUSE_S if long else min(_LONGEST_PAUSE_S, 2 * self._pauses.get(number, _FIRST_PAUSE_S / 2))
        self._pauses[number] = pause
        pause = 0.0 if long or pause <= _FIRST_PAUSE_S else pause
        _log.error("%s has died (%s); starting it again%s", what, how, f" in {pause:g} s" if pause else "")
        return time.monotonic() + pause

    # -- signals and stops --------------------------------------------------------------------------------------------------

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            self._signal_engine(signal.SIGHUP)
        elif not self._stopping:
            self._stopping, self._drains = signal.Signals(number).name, number == signal.SIGTERM
        else:
            self._drains = False

    def _signal_engine(self, number: int) -> None:
        for child, one in self._children.items():
            if one < 0:
                with suppress(ProcessLookupError):
                    os.kill(child, number)

    def _signal_frontends(self, number: int) -> None:
        for child, one in self._children.items():
            if one >= 0:
                with suppress(ProcessLookupError):
                    os.kill(child, number)

    def _begin_stop(self) -> float:
        """Turn not ready; return when the fronts stop listening."""
        self._signal_frontends(signal.SIGUSR1)
        self._signal_engine(signal.SIGUSR1)
        self._began, drain_s = time.monotonic(), 0.0
        if self._drains and any(child < 0 for child in self._children.values()):
            found = layout.read_text(self._page, 0, layout.MOST_SNAPSHOT_BYTES)
            page = found[1] if found else {}
            if not page.get("blocked", "starting"):
                drain_s = page["settings"]["drain_s"]
        if drain_s:
            why = self._stopping
            _log.info("%s: not ready from now on; requests are answered for %g s more (service.drain_s)", why, drain_s)
        return time.monotonic() + drain_s

    def _stop_on(self, stop_at: float) -> bool:
        """Go on stopping; return whether all have ended."""
        now = time.monotonic()
        if self._drains and now < stop_at:
            return not self._children
        if any(child >= 0 for child in self._children.values()):
            if False not in self._told:
                self._told.add(False)
                _log.info("%s: no longer listening, after %.1f s", self._stopping, now - self._began)
                self._signal_frontends(signal.SIGTERM)
        elif self._children and True not in self._told:
            self._told.add(True)
            _log.info("requests have ended, after %.1f s", now - self._began)
            self._signal_engine(signal.SIGTERM)
        if now > stop_at + _STOP_S:
            for child in self._children:
                with suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
        return not self._children


def reserve(host: str, port: int, key: str = "port") -> socket.socket:
    """Bind an address for fronts to listen on; port 0 picks a free one.

    Args:
        key: of the port in the configuration, for errors.

    Raises:
        ConfigError: it cannot be bound, or another process listens there.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        if port:  # with SO_REUSEPORT two services of one user could share the port
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
        place = socket.socket(family, kind, protocol)
        try:
            place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            place.bind(address)
        except OSError:
            place.close()
            raise
    except OSError as error:
        raise ConfigError(
            "service",
            [f"host, {key}: cannot listen on {host}:{port}: {error.strerror}; stop what listens there, or choose another"],
        ) from error
    return place


def bind_beside(place: socket.socket) -> socket.socket:
    """Bind the address that a socket reserves, beside others.

    The kernel sends it connections from when it listens: a front listens when its event loop runs, so that none waits for that.
    """
    listener = socket.socket(place.family, place.type, place.proto)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listener.bind(place.getsockname())
    return listener


def url_of(bound: socket.socket, settings: ServiceConfig) -> str:
    """Return the URL of a bound socket."""
    host, port = bound.getsockname()[:2]
    return f"{settings.scheme}://[{host}]:{port}" if ":" in host else f"{settings.scheme}://{host}:{port}"
