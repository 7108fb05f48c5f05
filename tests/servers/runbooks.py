"""Follows docs/runbooks.md: its commands are taken from the page and run in a shell, so that they cannot drift."""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Final

from tests import ROOT

PAGE: Final = ROOT / "docs" / "runbooks.md"
_TIMEOUT_S = 120


def _parts() -> list[str]:
    return re.split(r"^## (.+)\n", PAGE.read_text(), flags=re.MULTILINE)


def sections() -> dict[str, str]:
    """Return the text of each runbook, by its heading."""
    _, *parts = _parts()
    return dict(zip(parts[::2], parts[1::2], strict=True))


class Runbook:
    """One runbook, whose commands a test follows. *For one test.*

    Args:
        title: its heading.
        directory: an empty one, for programs of its own.
        variables: what the page asks for, such as `HPS_URL`.

    Attributes:
        left: the steps that have not been followed yet, by their names: the words in bold.
    """

    def __init__(self, title: str, directory: Path, **variables: object) -> None:
        parts = re.split(r"^\*\*(.+?)\*\*", sections()[title], flags=re.MULTILINE)[1:]
        commands = {name: _commands(text) for name, text in zip(parts[::2], parts[1::2], strict=True)}
        self.left = {name: command for name, command in commands.items() if command}
        self._over = self.left.pop("Over")
        self._functions = "".join(f"{line}\n" for line in _commands(_parts()[0]).splitlines() if "() {" in line)
        directory.mkdir()
        program = directory / "hps"  # the one of this tree
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -m hps "$@"\n')
        program.chmod(0o755)
        path = f"{directory}:{os.environ['PATH']}"
        self._environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
        self.set(HPS_ADMIN_TOKEN="", **variables)

    def set(self, **variables: object) -> None:
        self._environment |= {name: str(value) for name, value in variables.items()}

    def follow(self, step: str) -> str:
        """Run the commands of a step, and return what they print."""
        done = self._run(self.left.pop(step))
        assert done.returncode == 0, f"{step}: {done.stdout}"
        return done.stdout

    def is_over(self) -> bool:
        """Run the command that succeeds once the fault is over."""
        return self._run(self._over).returncode == 0

    def _run(self, commands: str) -> subprocess.CompletedProcess[str]:
        command = ["bash", "-euo", "pipefail", "-c", self._functions + commands]
        return subprocess.run(
            command,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )


def _commands(text: str) -> str:
    return textwrap.dedent("".join(f"{line}\n" for line in text.splitlines() if line.startswith("    ")))
