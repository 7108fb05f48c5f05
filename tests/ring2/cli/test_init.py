"""`hps init` on a terminal, and a server of what it wrote."""

import json
import os
import pty
from pathlib import Path

from tests.ring1.cli.test_init import table, target
from tests.servers.child_processes import ChildProcesses

__all__ = ["target"]


def test_what_no_option_says_is_asked_on_a_terminal(tmp_path: Path, target: Path, children: ChildProcesses) -> None:
    table(tmp_path / "item", 2)
    controller, terminal = pty.openpty()
    with open(controller, "wb", buffering=0) as keyboard:
        process = children.hps("init", tmp_path / "item", "-o", target, "--ask", "--device", "cpu", stdin=terminal)
        os.close(terminal)
        keyboard.write(b"redis_cluster\nr1:7000\nrocks_db\n0.25\n")
        output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    content = json.loads(target.read_text())
    assert content["volatile_db"]["address"] == "r1:7000"
    assert (content["persistent_db"]["type"], content["models"][0]["gpucacheper"]) == ("rocks_db", 0.25)
    assert "The tier in memory" in output
