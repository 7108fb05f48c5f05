"""Starts Python processes of tests by forking one that has imported the package: most of a fresh process's time goes for that.

Each pytest worker has one fork server, started with the first process that needs it. The server has no thread of Python's and
nothing open; it imports, and forks a child for each request. A child takes over the arguments, the environment, the directory
and the standard streams of its request, and runs as `python` itself would. Where there is no fork server, tests start real
processes.
"""

import atexit
import ctypes
import gc
import io
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from typing import IO, Any, Final, Self

from tests import ROOT

_libc = ctypes.CDLL(None, use_errno=True)
_IMPORTED: Final = (
    "hps.tools.cli.app",
    "hps.serve.server",
    "hps.client.client",
    "hps.serve.protocol.grpc_inference",  # not grpcio, which no fork survives
    # What a served process imports when it needs it.
    "hps.cache.cpu.cache",
    "hps.stores.hash_map.database",
    "hps.stores.rocks_db.database",
    "uvicorn.lifespan.on",
    "uvicorn.protocols.http.httptools_impl",
    "encodings.idna",
)
_READ_AT_START: Final = ("PYTHON", "COVERAGE", "NUMBA", "LD_", "MALLOC", "OMP", "OPENBLAS", "MKL")
"""What names of variables begin with that a process reads when it starts or imports."""
_ENVIRONMENT: Final = dict(os.environ)  # before any test has changed it
_PROGRAM: Final = f"import sys; from {__name__} import main; main(*map(int, sys.argv[1:]))"
_STREAMS: Final = 3


def own_signals() -> None:
    """Make a process independent of how the tests were started.

    A shell starts background jobs with SIGINT ignored, and their children inherit that: none of them would end on an interrupt.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def end_with_parent() -> None:
    """Ask Linux to kill this process when the thread that started it ends."""
    _libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


# -- in the worker of pytest


class ForkedProcess:
    """A process that the fork server has started; has what tests use of `subprocess.Popen`, and does the same.

    Args:
        server: which has started it.
        pid: of the process.
        pidfd: descriptor of the process.
        streams: the ends of its pipes that are ours, None where there is no pipe.
    """

    def __init__(self, server: "ForkServer", args: list[str], pid: int, pidfd: int, streams: Sequence[IO[Any] | None]) -> None:
        self.args, self.pid, self.returncode = args, pid, None
        self.stdin, self.stdout, self.stderr = streams
        self._server, self._pidfd = server, pidfd
        self._readers: dict[IO[Any], _Reader] = {}
        self._waiting = threading.Lock()
        self.returncode: int | None

    def poll(self) -> int | None:
        """Return the exit code, or minus the number of the signal that ended it; None while it runs."""
        return self._ended(0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end.

        Raises:
            subprocess.TimeoutExpired: it still runs.
        """
        code = self._ended(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return code

    def _ended(self, timeout: float | None) -> int | None:
        with self._waiting:
            if self.returncode is None and _readable(self._pidfd, timeout):
                self.returncode = self._server.reap(self.pid)
                os.close(self._pidfd)
            return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, input: Any = None, timeout: float | None = None) -> tuple[Any, Any]:  # noqa: A002 - of Popen
        """Send input, read both outputs to their ends, and wait for the process. May be called again after a time-out."""
        deadline = None if timeout is None else time.monotonic() + timeout
        if self.stdin is not None and not self.stdin.closed:
            with suppress(BrokenPipeError):
                if input:
                    self.stdin.write(input)
                self.stdin.close()
        for stream in (self.stdout, self.stderr):
            if stream is not None and stream not in self._readers:
                self._readers[stream] = _Reader(stream)
        for reader in self._readers.values():
            reader.join(_left(deadline))
            if reader.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
        self.wait(_left(deadline))
        found = tuple(None if one is None else self._readers[one].text for one in (self.stdout, self.stderr))
        self._close()
        return found

    def _close(self) -> None:
        for stream in (self.stdin, self.stdout, self.stderr):
            if stream is not None:
                with suppress(BrokenPipeError):
                    stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._close()
        self.wait()


class _Reader(threading.Thread):
    """Reads a stream to its end."""

    def __init__(self, stream: IO[Any]) -> None:
        super().__init__(daemon=True)
        self._stream, self.text = stream, None
        self.start()

    def run(self) -> None:
        self.text = self._stream.read()


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())


def _readable(descriptor: int, timeout: float | None) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(None if timeout is None else timeout * 1000))


class ForkServer:
    """The fork server of this process. *Thread-safe.* Use `start`.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self) -> None:
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._asking = threading.Lock()
        self.owner = os.getpid()
        command = [sys.executable, "-c", _PROGRAM, str(theirs.fileno()), str(self.owner)]
        options = {"stdin": subprocess.DEVNULL, "pass_fds": [theirs.fileno()], "start_new_session": True}
        with theirs:
            self._process = subprocess.Popen(command, cwd=ROOT, env=_ENVIRONMENT, **options)
        try:
            self._ask()  # until it is ready
        except OSError:
            self.end()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def end(self) -> None:
        """End it; its processes end with it."""
        self._connection.close()
        self._process.wait()

    def fork(self, request: dict[str, Any], streams: Sequence[int]) -> tuple[int, int]:
        """Start a process; return its pid and a descriptor of it."""
        with open(os.memfd_create("request"), "w+b", closefd=True) as file:
            file.write(json.dumps(request).encode())
            file.flush()
            answer, descriptors = self._ask(b"fork\n", [file.fileno(), *streams])
        return answer, descriptors[0]

    def reap(self, pid: int) -> int:
        """Return how a process has ended: its exit code, or minus the number of a signal."""
        try:
            return self._ask(b"%d\n" % pid)[0]
        except OSError:
            return -signal.SIGKILL  # the server has died, and its children with it

    def _ask(self, request: bytes = b"", descriptors: Sequence[int] = ()) -> tuple[int, list[int]]:
        with self._asking:
            if request:
                socket.send_fds(self._connection, [request], descriptors)
            text, received, _, _ = socket.recv_fds(self._connection, 64, 1)
            if not text:
                raise ConnectionError("the fork server has ended")
            return int(text), received


_server: ForkServer | None = None
_starting = threading.Lock()
_refused = False


def _running() -> ForkServer | None:
    global _refused, _server
    with _starting:
        if _server is not None and _server.owner != os.getpid():
            _server = None  # of the process that this one was forked from
        if _server is None and not _refused:
            try:
                _server = ForkServer()
                atexit.register(_end, _server)
            except OSError:
                _refused = True
        return _server


def _end(server: ForkServer) -> None:
    if server.owner == os.getpid():
        server.end()


def start(
    arguments: Sequence[str],
    *,
    cwd: Any = None,
    env: Mapping[str, str] | None = None,
    stdin: Any = None,
    stdout: Any = None,
    stderr: Any = None,
    text: bool = True,
) -> ForkedProcess | None:
    """Start `python ARGUMENTS` in a session of its own; None where only a real process will do.

    Args:
        arguments: `-m MODULE ...` or `-c CODE ...`.
        env: the environment. If it changes what Python and libraries read when they start, only a real process will do.
    """
    global _refused
    environment = dict(os.environ if env is None else env)
    if _at_start(environment) != _at_start(_ENVIRONMENT) or (server := _running()) is None:
        return None
    ours: list[IO[Any] | None] = []
    theirs: list[int] = []
    opened: list[int] = []
    try:
        for number, given in enumerate((stdin, stdout, stderr)):
            ours.append(None)
            if given == subprocess.PIPE:
                ends = os.pipe() if number else os.pipe()[::-1]
                ours[-1] = _wrapped(ends[0], "r" if number else "w", text)
                given = ends[1]
                opened.append(given)
            elif given == subprocess.DEVNULL:
                given = os.open(os.devnull, os.O_RDWR)
                opened.append(given)
            elif given == subprocess.STDOUT:
                given = theirs[1]
            elif given is None:
                given = number
            theirs.append(given if isinstance(given, int) else given.fileno())
        place = os.path.abspath(cwd or ".")
        request = {"arguments": list(arguments), "environment": environment, "directory": place}
        try:
            pid, descriptor = server.fork(request, theirs)
        except OSError:
            _refused = True
            for stream in filter(None, ours):
                stream.close()
            return None
    finally:
        for one in opened:
            os.close(one)
    return ForkedProcess(server, [sys.executable, *arguments], pid, descriptor, ours)


def _at_start(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(_READ_AT_START)}


def _wrapped(descriptor: int, mode: str, text: bool) -> IO[Any]:
    raw = os.fdopen(descriptor, mode + "b")
    return io.TextIOWrapper(raw, write_through=True) if text else raw


# -- in the fork server


def main(descriptor: int, parent: int) -> None:
    """Be a fork server, and then, in a child, what was asked for."""
    watched = os.pidfd_open(parent)
    own_signals()
    for name in _IMPORTED:
        with suppress(ImportError):  # of an extra that is not installed
            import_module(name)
    _load_kernels()
    gc.collect()
    gc.freeze()  # else a child's collection copied all of it
    connection = socket.socket(fileno=descriptor)
    connection.send(b"0")
    request = _serve(connection, watched)
    if request is not None:
        connection.close()
        os.close(watched)
        _become(*request)


def _load_kernels() -> None:
    """Load the machine code of a service on the CPU with a hash map and RocksDB."""
    from hps.cache.cpu.batches import run
    from hps.cache.cpu.cache import NumpyCache
    from hps.configuration.load import load_configuration
    from hps.ground.kernels.numba_kernels import compile_kernels
    from hps.ground.key_sets import distinct_kernels, places_kernels
    from hps.regions.loop_state import ENGINE_KERNELS, FRONTEND_KERNELS
    from hps.versions.tiers import kernels_of

    lookups = [run, *NumpyCache.kernels(), *places_kernels(), *distinct_kernels()]
    databases = {"volatile_db": {"type": "hash_map"}, "persistent_db": {"type": "rocks_db", "path": "nowhere"}}
    configuration = load_configuration({"supportlonglong": True, "model_repository": "nowhere", **databases})
    compile_kernels(*FRONTEND_KERNELS, *ENGINE_KERNELS, *kernels_of(configuration, NumpyCache), *lookups)


def _serve(connection: socket.socket, parent: int) -> tuple[dict[str, Any], list[int]] | None:
    """Answer requests; return one in the child that is to do it, None when the parent has ended."""
    poll = select.poll()
    poll.register(parent, select.POLLIN)
    poll.register(connection, select.POLLIN)
    while True:
        if any(ready == parent for ready, _ in poll.poll()):
            return None
        text, descriptors, _, _ = socket.recv_fds(connection, 64, 1 + _STREAMS)
        if not text:
            return None
        if text != b"fork\n":
            _, status = os.waitpid(int(text), 0)
            connection.send(b"%d" % os.waitstatus_to_exitcode(status))
            continue
        with open(descriptors[0], "rb") as file:
            file.seek(0)
            request = json.loads(file.read())
        server = os.getpid()
        own_session, done = os.pipe()
        child = os.fork()
        if not child:
            os.setsid()
            end_with_parent()
            os.close(own_session)
            os.close(done)
            if os.getppid() != server:
                os._exit(1)
            return request, descriptors[1:]
        for descriptor in (done, *descriptors[1:]):
            os.close(descriptor)
        os.read(own_session, 1)  # its group can be killed now
        os.close(own_session)
        pidfd = os.pidfd_open(child)
        socket.send_fds(connection, [b"%d" % child], [pidfd])
        os.close(pidfd)


def _become(request: dict[str, Any], streams: list[int]) -> None:
    """Do what `python` would with these arguments."""
    for number, one in enumerate(streams):
        os.dup2(one, number)
        os.close(one)
    sys.stdin = sys.__stdin__ = os.fdopen(0, closefd=False)  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = _output(1, sys.stdout, os.isatty(1))  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _output(2, sys.stderr, True)  # type: ignore[misc]
    os.environ.clear()
    os.environ.update(request["environment"])
    time.tzset()
    os.chdir(request["directory"])
    kind, what, *more = request["arguments"]
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()  # else all children drew the same
    sys.orig_argv = [sys.executable, kind, what, *more]
    if kind == "-m":
        sys.path[0] = request["directory"]
        sys.argv = [what, *more]
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        sys.argv = [kind, *more]
        module = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(what, "<string>", "exec"), module.__dict__)


def _output(descriptor: int, like: Any, by_lines: bool) -> IO[str]:
    raw = os.fdopen(descriptor, "wb", 0 if like.write_through else -1, closefd=False)
    return io.TextIOWrapper(raw, like.encoding, like.errors, line_buffering=by_lines, write_through=like.write_through)
