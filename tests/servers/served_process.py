"""`hps serve` in processes of its own, with fronts."""

import json
import re
import signal
from pathlib import Path
from typing import Any, Self

from hps.testing.waiting import wait_until
from tests.servers.child_processes import ChildProcesses
from tests.servers.service_processes import ENGINE, children_of, left_over, service_processes


class ServedProcess:
    """A running `hps serve` on a free port of 127.0.0.1, which it keeps when it is started again.

    Args:
        document: the configuration; or the directory of a repository, which is served as it is.
        directory: where the log goes, and the configuration.
        more: further arguments of the command.

    Attributes:
        url: address of the service.
    """

    def __init__(self, document: dict[str, Any] | Path, directory: Path, fronts: int = 1, *more: object) -> None:
        self._config, self._log = directory / "ps.json", directory / "log"
        if isinstance(document, Path):
            self._config = document
        else:
            self._config.write_text(json.dumps(document))
        self._fronts, self._more = fronts, more
        self._children = ChildProcesses()
        self._scheme, self._port = "http", "0"

    @property
    def url(self) -> str:
        return f"{self._scheme}://127.0.0.1:{self._port}"

    @property
    def grpc(self) -> str:
        """Address of gRPC, with `--grpc-port`."""
        found = re.search(r"listening for gRPC on ([\w.:]+)", self.log())
        assert found, self.log()
        return found[1]

    @property
    def engine(self) -> int:
        """Process of the engine."""
        return service_processes(self._process.pid, self._fronts, int(self._port))[ENGINE]

    @property
    def pid(self) -> int:
        """Process that signals are sent to."""
        return self._process.pid

    def start(self, *, ready: bool = True) -> None:
        """Start it, and wait until it is ready, or listens."""
        with self._log.open("w") as log:
            arguments = ("serve", self._config, "--port", self._port, "--fronts", self._fronts, *self._more)
            self._process = self._children.hps(*arguments, stdout=log, stderr=log)

        def listening() -> re.Match[str] | None:
            assert self._process.poll() is None, self.log()
            found = re.search(r"listening on (https?)://127.0.0.1:([0-9]+)", self.log())
            return found if not ready or "ready; try" in self.log() else None

        self._scheme, self._port = wait_until(listening, "the service is ready" if ready else "it listens").groups()

    def start_again(self, *, ready: bool = True) -> None:
        """Wait until it has ended, and start it again, as a supervisor does."""
        self._process.wait(60)
        self.start(ready=ready)

    def stop(self, number: int = signal.SIGINT) -> None:
        """Stop it, and wait until none of its processes answers: those of a killed parent end after it."""
        children = children_of(self._process.pid)
        self._process.send_signal(number)
        self._process.wait(60)
        assert not left_over(children)

    def tell(self, number: int, *says: str) -> None:
        """Send it a signal, and wait until the log says so behind what it said before."""
        before = len(self.log())
        self._process.send_signal(number)
        for say in says:
            wait_until(lambda one=say: re.search(one, self.log()[before:]), f"the log says {say}")  # type: ignore[misc]

    def log(self) -> str:
        return self._log.read_text()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._children.end()
