"""`hps serve` in processes of its own, with fronts."""

import json
import re
import signal
import time
from pathlib import Path
from typing import Any, Self

from tests.servers.child_processes import ChildProcesses

_START_S = 120.0


class ServedProcess:
    """A running `hps serve` on a free port of 127.0.0.1, which it keeps when it is started again.

    Args:
        document: the configuration.

    Attributes:
        url: address of the service.
    """

    def __init__(self, document: dict[str, Any], directory: Path, fronts: int = 1) -> None:
        self._config, self._log = directory / "ps.json", directory / "log"
        self._config.write_text(json.dumps(document))
        self._fronts = fronts
        self._children = ChildProcesses()
        self._scheme, self._port = "http", "0"

    @property
    def url(self) -> str:
        return f"{self._scheme}://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Start it, and wait until it is ready."""
        with self._log.open("w") as log:
            arguments = ("serve", self._config, "--port", self._port, "--fronts", self._fronts)
            self._process = self._children.hps(*arguments, stdout=log, stderr=log)
        deadline = time.monotonic() + _START_S
        while True:
            text = self._log.read_text()
            assert self._process.poll() is None, text
            assert time.monotonic() < deadline, text
            if "ready; try" in text and (found := re.search(r"listening on (https?)://127.0.0.1:([0-9]+)", text)):
                self._scheme, self._port = found.groups()
                return
            time.sleep(0.05)

    def stop(self, number: int = signal.SIGINT) -> None:
        self._process.send_signal(number)
        self._process.wait(60)

    def log(self) -> str:
        return self._log.read_text()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._children.end()
