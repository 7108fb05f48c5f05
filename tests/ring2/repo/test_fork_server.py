"""Processes that the tests fork do what real ones do."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hps.testing.waiting import wait_until
from tests import ROOT
from tests.servers import fork_server
from tests.servers.child_processes import ChildProcesses
from tests.servers.fork_server import ForkedProcess
from tests.servers.service_processes import is_gone

WAITS = "import signal; print('begun', flush=True); signal.pause()"
REPORT = """
import json, os, signal, sys, threading
import hps.serve.server
print(json.dumps({
    "arguments": sys.argv, "directory": os.getcwd(), "token": os.environ.get("HPS_TOKEN"), "home": os.environ.get("HOME"),
    "leads": os.getsid(0) == os.getpgid(0) == os.getpid(), "main": __name__, "threads": threading.active_count(),
    "masked": len(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    "handlers": [str(signal.getsignal(one)) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE)],
    "descriptors": sorted(os.listdir("/proc/self/fd"))[:-1], "encodings": [sys.stdout.encoding, sys.stderr.errors],
}))
"""


def python(children: ChildProcesses, code: str, *arguments: object, real: bool = False, **options: object):
    process = children.start(sys.executable, "-c", code, *arguments, real=real, **options)
    assert isinstance(process, subprocess.Popen if real else ForkedProcess)
    return process


def test_a_fork_begins_as_a_real_process_does(children: ChildProcesses, tmp_path: Path) -> None:
    options = {
        "cwd": tmp_path,
        "env": {name: value for name, value in os.environ.items() if name != "HOME"} | {"HPS_TOKEN": "a b"},
        "stdin": subprocess.DEVNULL,
    }
    said = [python(children, REPORT, 1, "two", real=real, **options).communicate(timeout=60) for real in (False, True)]
    assert said[0] == said[1]
    assert "a b" in said[0][0]


CODES = {"": 0, "raise SystemExit(3)": 3, "import os; os._exit(4)": 4, "raise KeyError(5)": 1}
CODES |= {"import os; os.kill(os.getpid(), 9)": -9, "import signal; signal.raise_signal(2)": -2}


@pytest.mark.parametrize("code", CODES)
def test_a_fork_ends_with_the_code_of_a_real_process(children: ChildProcesses, code: str) -> None:
    process = python(children, code)
    assert process.wait(60) == process.poll() == process.returncode == CODES[code]
    assert is_gone(process.pid)


def test_input_and_both_outputs_reach_their_ends(children: ChildProcesses) -> None:
    process = python(children, "import sys; print(input()); sys.exit(input())", stdin=subprocess.PIPE)
    process.stdin.write("first\n")
    process.stdin.flush()
    assert process.stdout.readline() == "first\n"
    assert process.communicate("second\n", timeout=60) == ("", "second\n")
    assert process.returncode == 1


def test_the_end_of_a_test_kills_what_its_forks_have_started() -> None:
    children = ChildProcesses()
    code = "import os\nif child := os.fork():\n print(os.getpid(), child, flush=True)\ninput()"
    process = python(children, code, stdin=subprocess.PIPE)
    pids = list(map(int, process.stdout.readline().split()))
    assert len(pids) == 2
    children.end()
    assert process.returncode == -signal.SIGKILL
    wait_until(lambda: all(map(is_gone, pids)), "parent and child are gone")


def test_when_the_fork_server_has_died_processes_are_real(children: ChildProcesses, monkeypatch: pytest.MonkeyPatch) -> None:
    server = fork_server.ForkServer()
    monkeypatch.setattr(fork_server, "_server", server)
    monkeypatch.setattr(fork_server, "_refused", False)
    died_with_it = python(children, WAITS, stdin=subprocess.PIPE)
    server.end()
    assert died_with_it.wait(60) == -signal.SIGKILL
    for _ in range(2):
        process = children.start(sys.executable, "-c", "print(1)")
        assert isinstance(process, subprocess.Popen)
        assert process.communicate(timeout=60) == ("1\n", "")


def test_a_killed_worker_takes_its_fork_server_and_all_forks_along(children: ChildProcesses) -> None:
    code = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from tests.servers import fork_server
forks = [fork_server.start(["-c", {WAITS!r}], stdin=-1, stdout=-1) for _ in range(2)]
assert [one.stdout.readline() for one in forks] == ["begun\\n"] * 2
print(*(one.pid for one in forks), fork_server._server.pid, flush=True)
input()
"""
    worker = python(children, code, real=True, stdin=subprocess.PIPE)
    pids = list(map(int, worker.stdout.readline().split()))
    assert len(pids) == 3
    worker.kill()
    wait_until(lambda: all(map(is_gone, pids)), "the fork server and its children are gone")
