"""Processes that a test starts: they have signal handlers of their own, and end with the test."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from tests import ROOT
from tests.servers import fork_server
from tests.servers.fork_server import ForkedProcess

Process = subprocess.Popen[str] | ForkedProcess
_FORKED: Final = frozenset(("cwd", "env", "stdin", "stdout", "stderr", "text"))
"""Options that a forked process has, too."""


def own_signals() -> None:
    """Make a child independent of how the tests were started; for `preexec_fn`. A test run that is killed takes it with it."""
    fork_server.own_signals()
    fork_server.end_with_parent()


def run_alone(function: Callable[..., object], *arguments: object, real: bool = False, timeout_s: float = 300) -> None:
    """Call a module's function in a process of its own, where threads and garbage of other tests do not count.

    Args:
        function: is imported there by its name.
        arguments: are passed by their `repr`.
        real: the process is started, not forked, for what measures its own memory: a fork pays for each page that it touches.
        timeout_s: for all of it.
    """
    name = function.__name__
    children = ChildProcesses()
    process = children.start(
        sys.executable, "-c", f"from {function.__module__} import {name}; {name}(*{arguments!r})", cwd=ROOT, real=real
    )
    try:
        _, errors = process.communicate(timeout=timeout_s)
    finally:
        children.end()
    assert process.returncode == 0, errors


class ChildProcesses:
    """The processes of one test, each in a session of its own. Use the fixture `children`."""

    def __init__(self) -> None:
        self._started: list[Process] = []

    def start(self, *command: object, real: bool = False, **options: Any) -> Any:
        """Start a command; its output is piped, as text, unless `options` say otherwise.

        `sys.executable` with `-c CODE ...` or `-m MODULE ...` runs in a fork of a process that has imported the package.

        Args:
            real: start Python itself, for tests of what is imported, of the command line or of how a process begins and ends.

        Returns:
            A `Process`.
        """
        program, *arguments = map(str, command)
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
        process: Process | None = None
        if not real and program == sys.executable and arguments[:1] in (["-c"], ["-m"]) and _FORKED.issuperset(options):
            process = fork_server.start(arguments, **options)
        if process is None:
            options = {"text": True, **options}
            process = subprocess.Popen([program, *arguments], start_new_session=True, preexec_fn=own_signals, **options)
        self._started.append(process)
        return process

    def hps(self, *arguments: object, real: bool = False, **options: Any) -> Any:
        """Start a command of `hps`; like `start`."""
        return self.start(sys.executable, "-m", "hps", *arguments, real=real, **options)

    def end(self) -> None:
        """Kill those that still run, with whatever they started."""
        for process in self._started:
            if process.returncode is None:  # not waited for: the number of its group is still its own
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            with process:  # waits, and closes the pipes
                pass
