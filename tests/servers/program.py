"""Servers of others that tests start: programs that end with the test run, and may be killed, paused and started again."""

import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from hps.testing.waiting import wait_until
from tests.servers.child_processes import own_signals


class Program:
    """One process, whose output is added to a log. Subclasses have `start`.

    Args:
        log: its file.

    Attributes:
        process: None where it does not run.
    """

    def __init__(self, log: Path) -> None:
        self.log_file = log
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> Self:
        """Start it, and wait until it answers."""
        raise NotImplementedError

    def launch(self, *command: object, **options: Any) -> None:
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        with self.log_file.open("ab") as log:
            options = {"stdout": log, "stderr": log, "preexec_fn": own_signals, **options}
            self.process = subprocess.Popen(list(map(str, command)), **options)

    @property
    def runs(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def wait_until(self, answers: Callable[[], object], *errors: type[Exception]) -> None:
        """Wait until it answers, without one of these errors.

        Raises:
            RuntimeError: it has ended, or does not; the message is the end of its log.
        """

        def answered() -> bool:
            try:
                return bool(answers()) or not self.runs
            except errors:
                return not self.runs

        try:
            wait_until(answered)
            ended = self.process is not None and not self.runs
        except AssertionError:
            ended = True
        if ended:
            raise RuntimeError(self.log_file.read_text(errors="replace")[-5000:])

    def kill(self) -> None:
        """kill -9, as often as one likes, also while it is paused."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(20)
            self.process = None

    def pause(self) -> None:
        """SIGSTOP: the kernel goes on accepting connections, nobody answers."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.kill()
