"""Processes that a test starts: they have signal handlers of their own, and end with the test."""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from tests import ROOT

_libc = ctypes.CDLL(None, use_errno=True)


def own_signals() -> None:
    """Make a child independent of how the tests were started; for `preexec_fn`.

    A shell starts background jobs with SIGINT ignored, and their children inherit that: none of them would end on an interrupt.
    A test run that is killed takes the child with it.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    _libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def run_alone(function: Callable[..., object], *arguments: object) -> None:
    """Call a module's function in a process of its own, where threads and garbage of other tests do not count.

    Args:
        function: is imported there by its name.
        arguments: are passed by their `repr`.
    """
    name = function.__name__
    code = f"from {function.__module__} import {name}; {name}(*{arguments!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr


class ChildProcesses:
    """The processes of one test, each in a session of its own. Use the fixture `children`."""

    def __init__(self) -> None:
        self._started: list[subprocess.Popen[str]] = []

    def start(self, *command: object, **options: Any) -> "subprocess.Popen[str]":
        """Start a command; its output is piped, as text, unless `options` say otherwise."""
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
        process = subprocess.Popen(list(map(str, command)), start_new_session=True, preexec_fn=own_signals, **options)
        self._started.append(process)
        return process

    def hps(self, *arguments: object, **options: Any) -> "subprocess.Popen[str]":
        """Start a command of `hps`."""
        return self.start(sys.executable, "-m", "hps", *arguments, **options)

    def end(self) -> None:
        """Kill those that still run, with whatever they started."""
        for process in self._started:
            if process.returncode is None:  # not waited for: the number of its group is still its own
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            with process:  # waits, and closes the pipes
                pass
