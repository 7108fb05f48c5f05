"""Processes that compile kernels beside this one: numba compiles under the interpreter's lock, one kernel at a time a process.

Each is a new interpreter, since a fork would copy locks that other threads hold. It reads the name of one kernel at a time from
its standard input, leaves the machine code in the shared directory, and answers with the name. It ends with its input, so it
outlives this process by one kernel at most.
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
"""Time limit for the kernels that others have begun when this process has nothing left to do."""


class CompilerProcesses:
    """A few compiler processes, ended with the `with` block. *One per thread.*

    What they do not finish, for whatever reason, the caller does.

    Args:
        count: number of processes; none if this program is not a Python interpreter that could be started again.
        settings: attributes of `numba.config`.
    """

    def __init__(self, count: int, settings: Mapping[str, str | None]) -> None:
        self._settings = json.dumps([[str(Path(one).absolute()) for one in sys.path], dict(settings)])
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
                with contextlib.suppress(OSError):  # its end was unread
                    pipe.close()  # type: ignore[union-attr]

    def start(self, take: Callable[[], str | None], done: Callable[[str], None]) -> None:
        """Start the processes.

        Args:
            take: returns the next kernel to compile; called by several threads.
            done: called with each kernel that is compiled; called by several threads.
        """
        for _ in range(self._count):
            with contextlib.suppress(OSError):  # no memory or no process left: the caller compiles alone
                process = subprocess.Popen(
                    [sys.executable, "-P", "-c", _PROGRAM, self._settings],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                    start_new_session=True,  # an interrupt from the terminal is this process's to handle
                )
                self._processes.append(process)
                feeder = new_thread("compiler", partial(_feed, process, take, done), lasting=False)
                self._feeders.append(feeder)
                feeder.start()

    def wait(self) -> None:
        """Wait until all have finished what they took."""
        deadline = time.monotonic() + _PATIENCE_S
        for feeder in self._feeders:
            feeder.join(max(0.0, deadline - time.monotonic()))


def _feed(process: "subprocess.Popen[str]", take: Callable[[], str | None], done: Callable[[str], None]) -> None:
    """Have a process compile one kernel after the other, until none is left or it fails."""
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
