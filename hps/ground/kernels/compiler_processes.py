"""Processes that compile kernels in parallel: numba compiles under the interpreter lock, one kernel at a time per process.

Each process reads the names of kernels from its standard input, writes machine code to the shared directory, and answers with
the name. It ends with its input, so it outlives this process by one kernel at most.
"""

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from hps.ground.threads.workers import new_thread

_READY: Final = "ready\n"
_PROGRAM: Final = """
import json, sys
sys.path[:], settings = json.loads(sys.argv[1])
from importlib import import_module
numba = import_module("numba")
for name, value in settings.items():
    setattr(numba.config, name, value)
from hps.ground.kernels.numba_kernels import compile_named
print("ready", flush=True)
for line in sys.stdin:
    compile_named(line.strip())
    print(line, end="", flush=True)
"""
_PATIENCE_S: Final = 60.0
"""Time limit for the last kernels of other processes."""


class CompilerProcesses:
    """Compiler processes, which end with the `with` block. The caller compiles whatever they do not finish. *One per thread.*

    Args:
        count: number of processes; there are none if this program is no Python interpreter, as when it is embedded.
        settings: attributes of `numba.config`.
    """

    # New interpreters rather than forks, which would copy locks that other threads hold.

    def __init__(self, count: int, settings: Mapping[str, str | None]) -> None:
        self._settings = json.dumps([[str(Path(path).absolute()) for path in sys.path], dict(settings)])
        self._count = count if Path(sys.executable or "").name.startswith("python") else 0
        self._processes: list[subprocess.Popen[str]] = []
        self._feeders: list[threading.Thread] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait(_PATIENCE_S)
        for feeder in self._feeders:
            feeder.join(_PATIENCE_S)
        for process in self._processes:
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):  # the process has died with unread input
                    pipe.close()  # type: ignore[union-attr]

    def start(self, take: Callable[[], str | None], done: Callable[[str], None]) -> None:
        """Start the processes; threads call `take` for the next kernel to compile, and `done` with each that is compiled."""
        for _ in range(self._count):
            with contextlib.suppress(OSError):  # no memory or no process left: the caller compiles alone
                process = subprocess.Popen(
                    [sys.executable, "-P", "-c", _PROGRAM, self._settings],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                    start_new_session=True,  # so that Ctrl-C reaches this process alone
                )
                self._processes.append(process)
                feeder = new_thread("compiler", partial(_feed, process, take, done), lasting=False)
                self._feeders.append(feeder)
                feeder.start()

    def wait(self) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        for feeder in self._feeders:
            feeder.join(max(0.0, deadline - time.monotonic()))


def _feed(process: "subprocess.Popen[str]", take: Callable[[], str | None], done: Callable[[str], None]) -> None:
    """Let a process compile kernels until none is left or it fails."""
    names, answers = process.stdin, process.stdout
    if names is None or answers is None or answers.readline() != _READY:
        return
    with contextlib.suppress(OSError):  # it was killed
        while name := take():
            names.write(name + "\n")
            names.flush()
            if answers.readline() != name + "\n":
                return
            done(name)
