"""Kernels that several processes compile: all of them are there afterwards, whatever happens to the processes."""

import json
import subprocess
import sys

import pytest

from hps.ground.kernels import compiler_processes
from hps.ground.kernels.compiler_processes import CompilerProcesses
from hps.testing.waiting import wait_until
from tests.fakes.installation import Installation

NAMES = ["_hash_all", "_sample"]  # of hps.statistics.key_traces: small, and its module imports little
KERNELS = [f"hps.statistics.key_traces:{name}" for name in NAMES]
PROGRAM = """
import logging, sys
logging.basicConfig(level=logging.INFO)
from hps.ground.kernels import compiler_processes, numba_kernels
from hps.ground.threads import thread_pool
from hps.ground.kernels.compilations import COMPILATIONS
from hps.statistics import key_traces
numba_kernels._PROCESS_WORTH_S = 0.01  # two kernels are worth two processes
numba_kernels.available_threads = lambda: {threads}
compiler_processes._PATIENCE_S = 1.0
{more}
import numpy as np
numba_kernels.compile_kernels(key_traces._hash_all, key_traces._sample)
assert key_traces.sample_hashes(np.arange(3)).tolist() == [0, 0x9E3779B97F4A7C15, 0x3C6EF372FE94F82A]
print(COMPILATIONS.all().get("numba", (0, 0))[0])
"""


@pytest.fixture
def installation(tmp_path):
    return Installation(tmp_path)


def program(threads: int = 2, more: str = "") -> str:
    return PROGRAM.format(threads=threads, more=more)


def run(installation: Installation, threads: int = 2, more: str = "") -> tuple[int, list[str]]:
    """The number of kernels compiled, and the log."""
    output, log = installation.run(program(threads, more))
    return int(output), log


def files(installation: Installation) -> list[str]:
    return sorted(path.name.split("-")[0] for path in installation.package.glob("__pycache__/hps-kernels-*/*.code"))


ALL = [f"statistics.key_traces.{name}" for name in NAMES]


ALONE = """
import os
from hps.ground.kernels.compiler_processes import CompilerProcesses
left, done = {kernels}, []
with CompilerProcesses(1, {{}}) as processes:
    processes.start(lambda: left.pop() if left else None, done.append)
    processes.wait()
print(sorted(done))
"""


def test_a_process_compiles_what_it_is_given_and_later_ones_compile_nothing(installation):
    output, _ = installation.run(ALONE.format(kernels=KERNELS))
    assert output == f"{KERNELS}\n"
    assert files(installation) == ALL
    assert run(installation)[0] == 0


@pytest.mark.parametrize("broken", ["exits", "hangs", "hangs with a kernel", "not Python"])
def test_what_other_processes_do_not_compile_is_compiled_here(installation, broken, tmp_path):
    tool = tmp_path / ("python" if broken != "not Python" else "tool")
    body = {"exits": "exit 3", "hangs": "exec sleep 1000", "hangs with a kernel": "echo ready; exec sleep 1000"}
    tool.write_text(f"#!/bin/sh\n{body.get(broken, f'touch {tmp_path}/started; exec sleep 1000')}\n")
    tool.chmod(0o755)
    count, log = run(installation, more=f"import sys; sys.executable = {str(tool)!r}")
    assert (count, files(installation)) == (2, ALL)
    assert "in 2 processes" in log[0]
    assert not (tmp_path / "started").exists(), "a program that embeds Python is not started again"


def test_a_killed_process_leaves_whole_files_only(installation):
    waiting = "import time; numba_kernels._Work.tell = lambda *_: time.sleep(1000)"
    process = installation.start(program(more=waiting))
    wait_until(lambda: files(installation), "the first kernel is there")
    process.kill()
    process.communicate(timeout=60)
    there = len(files(installation))
    assert run(installation)[0] <= 2 - there, "the other process may have finished its kernel"
    assert files(installation) == ALL


def test_an_interrupt_ends_the_processes(installation):
    processes = CompilerProcesses(2, {})

    def interrupted():
        with processes:
            processes.start(lambda: None, print)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert len(processes._processes) == 2
    assert all(process.poll() is not None for process in processes._processes)


def test_a_process_ends_with_the_one_that_started_it(installation):
    command = [sys.executable, "-P", "-c", compiler_processes._PROGRAM, json.dumps([sys.path, {}])]
    done = subprocess.run(command, env=installation.environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, b"ready\n")
