"""`hps compile`: what it compiles and prints. That a read-only installation finds it is tested with the kernels."""

import json
import re
import subprocess
import sys

import pytest

from hps.configuration.load import load_configuration
from hps.ground.registry import implementation
from hps.versions.tiers import served_kernels
from tests.fakes.installation import Installation
from tests.ring1.tools.cli.test_compile_kernels import CONFIG

SERVED = len(served_kernels(load_configuration(CONFIG), implementation("cache", "cpu")))


@pytest.fixture
def installation(tmp_path):
    (tmp_path / "ps.json").write_text(json.dumps(CONFIG))
    return Installation(tmp_path)


def run(installation, *arguments, **environment):
    command = [sys.executable, "-m", "hps", "compile", *arguments]
    where = {"env": installation.environment | environment, "cwd": installation.temporary.parent}
    return subprocess.run(command, **where, capture_output=True, text=True, timeout=120, check=False)


def test_it_compiles_what_a_configuration_uses_and_says_so(installation):
    first = run(installation, "ps.json")
    assert first.returncode == 0, first.stderr
    counts, place = first.stdout.splitlines()
    assert re.fullmatch(f"{SERVED} kernels for this processor: compiled {SERVED} in .* s, 0 were there", counts)
    (directory,) = installation.package.glob("__pycache__/hps-kernels-*")
    assert place == f"kept in {directory}"
    assert len(list(directory.glob("*.code"))) == SERVED
    assert f"compiling {SERVED} kernels for this machine in " in first.stderr
    second = run(installation, "ps.json", "--baseline").stdout
    assert f"{SERVED} kernels for the baseline: compiled {SERVED}" in second  # kept side by side
    assert len(list(directory.glob("*.code"))) == 2 * SERVED
    third = run(installation, "ps.json").stdout.splitlines()[0]
    assert re.fullmatch(f"{SERVED} kernels for this processor: compiled 0 in .* {SERVED} were there", third)
