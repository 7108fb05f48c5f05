"""`hps init` on a terminal, and a server of what it wrote."""

import json
import os
import pty
import re
import urllib.request
from pathlib import Path

import numpy as np

from hps.models.sample import sample_vectors
from tests.ring1.cli.test_init import initialised, table, target
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


def test_a_server_of_what_was_written_answers_with_the_vectors_of_the_files(
    tmp_path: Path, target: Path, children: ChildProcesses
) -> None:
    table(tmp_path / "shop" / "user", 4)
    table(tmp_path / "shop" / "item", 8)
    initialised(target, tmp_path / "shop", "--device", "cpu", "--persistent", "rocks_db")
    process = children.hps("serve", target, "--port", 0)
    assert process.stderr
    url = next(found[1] for line in process.stderr if (found := re.search(r"curl -s (http://\S+) -d", line)))
    body = json.dumps({"tables": {"item": [3, 19], "user": [0]}}).encode()
    with urllib.request.urlopen(url, body, timeout=30) as response:
        answer = json.load(response)["tables"]
    for name, keys, dim in (("item", [3, 19], 8), ("user", [0], 4)):
        np.testing.assert_array_equal(np.float32(answer[name]), sample_vectors(np.array(keys), dim, dim))
