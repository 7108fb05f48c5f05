"""Commands as processes: on a terminal, with signals, and what they log."""

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hps.parameter_server import HPS
from hps.testing.waiting import PATIENCE_S, wait_until
from hps.tools.cli.tables.sample import sample_vectors
from tests.ring1.tools.cli.test_cli import config, content, remarkable, write_config
from tests.ring1.tools.cli.test_init import initialised, table, target
from tests.servers.child_processes import ChildProcesses
from tests.servers.served_process import ServedProcess

__all__ = ["config", "content", "remarkable", "target"]


def test_create_model_that_is_interrupted_leaves_nothing(tmp_path: Path, children: ChildProcesses) -> None:
    process = children.hps("create-model", tmp_path / "m", "--rows", 2_000_000_000, "--dim", 16, real=True)
    wait_until(lambda: os.listdir(tmp_path), "it writes")
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in stderr
    assert os.listdir(tmp_path) == []


BAR = r"shop\.%s +━+ 100 %% +%s of %s +[\d.]+ [kM]?B/s +[\d.]+ ?[kM]? rows/s +in [\d.]+ s"


def plain(output: str) -> str:
    """Without what moves the cursor and colours the text."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output)


def on_a_terminal(children: ChildProcesses, *arguments: object, until: str = "no such text", columns: int = 120) -> str:
    """What a command writes to a real terminal until it ends. It is interrupted once it has written `until`."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    plain = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR", "FORCE_COLOR")}
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
    process = children.hps(*arguments, **streams, env={**plain, "TERM": "xterm-256color"})
    os.close(theirs)
    output, interrupted = b"", False
    with open(ours, "rb", buffering=0) as screen:
        while select.select([screen], [], [], PATIENCE_S)[0]:
            try:
                output += screen.read(65536)
            except OSError:  # EIO: the other side is closed
                break
            if not interrupted and until.encode() in output:
                process.send_signal(signal.SIGINT)
                interrupted = True
        assert process.wait(60) == 0
    return output.decode()


def test_a_narrow_terminal_cuts_names_and_not_figures(tmp_path: Path, children: ChildProcesses) -> None:
    path = tmp_path / "a-directory-with-a-long-name" / "item.model"
    output = plain(on_a_terminal(children, "create-model", path, "--rows", 1000, "--dim", 16, columns=80))
    assert re.search(r"…+\w*/?item\.model ━+ 100 % 72\.0 kB of 72\.0 kB .* rows/s +in [\d.]+ s", output)


def test_serve_on_a_terminal_shows_bars_among_its_log_lines(
    tmp_path: Path, content: dict[str, Any], children: ChildProcesses
) -> None:
    content["models"].append({**content["models"][0], "model": "other"})
    content["models"].insert(0, {**content["models"][0], "model": "bad", "sparse_files": ["/nowhere/x", "/nowhere/y"]})
    config = write_config(tmp_path, content)
    output = on_a_terminal(children, "serve", config, "--port", 0, until="ready; try", columns=400)
    assert output.count("\x1b[?25l") == output.count("\x1b[?25h") == 4  # the cursor is back after every table
    lines = [line for line in re.split(r"[\r\n]+", plain(output)) if line]
    finished = [i for i, line in enumerate(lines) if re.search(BAR % ("item", "20.0 kB", "20.0 kB"), line)]
    ready = [i for i, line in enumerate(lines) if re.search(r"INFO hps.serve.engine.lifecycle: model \w+ is ready", line)]
    assert len(ready) == 2
    assert finished[0] < ready[0] < ready[1]
    assert any("loading model bad failed: opening sparse model /nowhere/x" in line for line in lines)


def test_serve_ends_although_a_source_does_not_answer(
    tmp_path: Path, content: dict[str, Any], children: ChildProcesses
) -> None:
    """The thread that reads is one that the interpreter would wait for."""
    files = [f"gate://away{tmp_path}/{name}" for name in ("user", "item")]
    content["models"].append({**content["models"][0], "model": "away", "sparse_files": files})
    program = (
        "from hps.tools.cli.app import main; from hps.serve.engine import app\n"
        "from tests.fakes.gated_file_system import gates\n"
        "app.CLOSE_TIMEOUT_S = 1.0\n"
        "held = gates('away'); held.__enter__()[0].hold_from = 0\n"  # nobody opens it
        "main()"
    )
    process = children.start(sys.executable, "-c", program, "serve", write_config(tmp_path, content), "--port", "0")
    read_until(process, "hps_et.away.user: 300 rows")
    process.send_signal(signal.SIGTERM)
    rest = process.communicate(timeout=50)[1]  # the gate opens after 60 s
    assert process.returncode == 1
    assert "the parameter server was not closed within 1 s" in rest


def read_until(process: "subprocess.Popen[str]", pattern: str) -> re.Match[str]:
    """Read standard error up to the first line that holds `pattern`."""
    assert process.stderr
    seen = []
    for line in process.stderr:
        seen.append(line)
        if match := re.search(pattern, line):
            return match
    raise AssertionError("".join(seen))


def ask(url: str, tables: dict[str, list[int]]) -> dict[str, Any]:
    with urllib.request.urlopen(url, json.dumps({"tables": tables}).encode(), timeout=30) as response:
        return json.load(response)["tables"]


@pytest.mark.parametrize("force", [(), ("--force",)])
def test_serve_loads_again_only_what_it_is_forced_to(tmp_path: Path, config: Path, force: tuple[str, ...]) -> None:
    with HPS(config) as server:
        server.insert([7], np.full((1, 8), 70, np.float32), "shop", "item")
    with ServedProcess(config, tmp_path, 1, *force) as served:
        answer = ask(f"{served.url}/v1/models/shop/lookup", {"user": [1, 2, 3], "item": [7]})
    np.testing.assert_array_equal(np.array(answer["user"], np.float32), sample_vectors(np.array([1, 2, 3]), 4, 1))
    expected = sample_vectors(np.array([7]), 8, 2) if force else np.full((1, 8), 70, np.float32)
    np.testing.assert_array_equal(np.array(answer["item"], np.float32), expected)


def test_serve_logs_notices_in_its_own_format(remarkable: Path, children: ChildProcesses) -> None:
    process = children.hps("serve", remarkable, "--port", 0)
    read_until(process, r"^\d{4}-.* INFO hps.configuration.load: .* models\[\].dense_file$")
    read_until(process, r"^\d{4}-.* WARNING hps.configuration.load: .* fp8_quant is not implemented")


# -- hps init ----------------------------------------------------------------------------------------------------------


def test_what_no_option_says_is_asked_on_a_terminal(tmp_path: Path, target: Path, children: ChildProcesses) -> None:
    table(tmp_path / "item", 2)
    controller, terminal = pty.openpty()
    with open(controller, "wb", buffering=0) as keyboard:
        process = children.hps("init", tmp_path / "item", "-o", target, "--ask", "--device", "cpu", stdin=terminal)
        os.close(terminal)
        keyboard.write(b"rocks_db\nredis_cluster\nr1:7000\n0.25\n")
        output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    content = json.loads(target.read_text())
    assert content["volatile_db"]["address"] == "r1:7000"
    assert (content["persistent_db"]["type"], content["models"][0]["gpucacheper"]) == ("rocks_db", 0.25)
    assert "The tier in memory" in output


def test_a_server_of_what_was_written_answers_with_the_vectors_of_the_files(tmp_path: Path, target: Path) -> None:
    table(tmp_path / "shop" / "user", 4)
    table(tmp_path / "shop" / "item", 8)
    initialised(target, tmp_path / "shop", "--device", "cpu", "--persistent", "rocks_db")
    with ServedProcess(target, tmp_path) as served:
        answer = ask(f"{served.url}/v1/models/shop/lookup", {"item": [3, 19], "user": [0]})
    for name, keys, dim in (("item", [3, 19], 8), ("user", [0], 4)):
        np.testing.assert_array_equal(np.float32(answer[name]), sample_vectors(np.array(keys), dim, dim))
