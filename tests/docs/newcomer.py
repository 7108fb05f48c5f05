"""A newcomer who knows one page: saves its files, types its commands, and reads what they print."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from hps.testing.waiting import PATIENCE_S, wait_until
from tests import ROOT
from tests.servers.child_processes import ChildProcesses
from tests.servers.redis_server import free_ports

REACHES = ("hps.tools.cli.server.serve", "hps.tools.cli.server.live_models", "hps.tools.cli.tables.create_model", "hps.torch")
"""What the commands of pages import, for `tests.reach`."""
_STEP = re.compile(
    r'^```python title="(?P<title>.*?)"\n(?P<code>.*?)^```'  # a file to save
    r"|^```sh\n(?P<script>.*?)^```"  # a script to run
    r"|^(?P<lines>(?:    [^\n]*\n)+)",  # commands to type, one a line; on a page with scripts, what these print
    re.DOTALL | re.MULTILINE,
)
_SERVES = re.compile(r"(make serve|\S*hps serve\b)")
_ELSEWHERE = re.compile(r"# needs Docker|\S*pip install ")


class Ran(NamedTuple):
    """A command that has ended."""

    command: str
    status: int
    printed: str
    errors: str


def promised(text: str, word: str) -> list[str]:
    """Return what a page says in code behind a word, such as "prints", as patterns."""
    return [_pattern(said) for said in re.findall(rf"\b{word}\s+`([^`]+)`", text)]


def shown(text: str) -> list[str]:
    """Return what a page with scripts shows of their output, in indented lines, as patterns."""
    outside = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    blocks = re.findall(r"(?:^    [^\n]*\n)+", outside, re.MULTILINE)
    return [_pattern(re.sub("^    ", "", block, flags=re.MULTILINE)) for block in blocks]


def _pattern(said: str) -> str:
    """`...` stands for anything."""
    return re.escape(said).replace(r"\.\.\.", "(?s:.*)")


class Newcomer:
    """Works in a directory of his own, where `hps` is installed in `.venv`, as `make` and `pip install` leave it.

    Installing is the one thing that he does not do: the packages are those of the tests.

    Args:
        page: text of the page; the ports in it are replaced by free ones.
        directory: an empty directory; a clone where the page begins in one.
    """

    def __init__(self, page: str, directory: Path, children: ChildProcesses) -> None:
        self._port, other = free_ports(2)
        self.page = re.sub(r"(?<=[: ])8000\b", str(self._port), re.sub(r"(?<=[: ])8001\b", str(other), page))
        self._directory, self._children = directory, children
        binaries = directory / ".venv" / "bin"
        binaries.mkdir(parents=True)
        for name, module in (("hps", "-m hps "), ("python", "")):
            (binaries / name).write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} {module}"$@"\n')
            (binaries / name).chmod(0o755)
        (directory / ".venv" / ".installed").touch()
        self._environment = os.environ | {
            "PATH": f"{binaries}:{os.environ['PATH']}",
            "XDG_STATE_HOME": str(directory / "state"),
        }

    def follow(self, text: str) -> Iterator[Ran]:
        """Follow a part of the page from top to bottom, and yield each command that has ended; servers run on."""
        for step in _STEP.finditer(text):
            if step["title"]:
                (self._directory / step["title"]).write_text(step["code"])
            if step["lines"] and "```sh" in self.page:
                continue
            for command in [step["script"]] if step["script"] else (step["lines"] or "").splitlines():
                if _ELSEWHERE.match(command.strip()):
                    continue
                if _SERVES.match(command.strip()):
                    self._serve(command.strip())
                    continue
                arguments = ["bash", "-c", f"set -eo pipefail\n{command}"]
                done = subprocess.run(
                    arguments,
                    cwd=self._directory,
                    env=self._environment,
                    capture_output=True,
                    text=True,
                    timeout=PATIENCE_S,
                    check=False,
                )
                yield Ran(command.strip(), done.returncode, done.stdout, done.stderr)

    def _serve(self, command: str) -> None:
        """Start a server in another terminal, and wait until it says that it is ready."""
        if command == "make serve":
            command = f"make serve PORT={self._port}"
        log = self._directory / f"{len(list(self._directory.glob('*.log')))}.log"
        with log.open("w") as file:
            arguments = ("sh", "-ec", f"exec {command}")
            server = self._children.start(*arguments, cwd=self._directory, env=self._environment, stdout=file, stderr=file)

        def ready() -> bool:
            assert server.poll() is None, log.read_text()
            return "ready; try:" in log.read_text()

        wait_until(ready, f"the server of `{command}` is ready")
