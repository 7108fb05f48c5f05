"""The first page of the site: what it installs and runs is the README's, and its examples print what it says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT
from tests.ring1.repo.test_readme import README
from tests.servers.child_processes import ChildProcesses

INDEX = (ROOT / "docs" / "index.md").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()


def test_its_first_commands_are_those_of_the_readme() -> None:
    [start] = re.findall(r"^## Start\n\n[^\n]*\n\n((?:    [^\n]*\n)+)", INDEX, re.MULTILINE)
    assert start in README


@pytest.fixture
def sample(tmp_path: Path) -> Path:
    """A directory with the configurations of the repository and the models of `make sample`."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    recipes = re.findall(r"^(models/\S+):.*\n\t\$\(BIN\)/hps (create-model) \$@ (.*)$", MAKEFILE, re.MULTILINE)
    assert len(recipes) == 2
    for path, command, options in recipes:
        arguments = [sys.executable, "-m", "hps", command, path, *options.split()]
        subprocess.run(arguments, cwd=tmp_path, check=True, capture_output=True, timeout=120)
    return tmp_path


def test_its_examples_work_beside_the_server_of_make_serve(sample: Path, children: ChildProcesses) -> None:
    server = children.hps("serve", "configs/minimal.json", "--port", 0, cwd=sample, real=True)
    assert server.stderr
    assert any("ready; try:" in line for line in server.stderr)
    examples = re.findall(r"```python\n(.*?)```", INDEX, re.DOTALL)
    assert len(examples) == 2
    for code in examples:
        if "torch" in code:
            pytest.importorskip("torch")
        printed = re.findall(r"^# ?(.*\n)", code, re.MULTILINE)
        example = children.start(sys.executable, "-c", code, cwd=sample)
        stdout, stderr = example.communicate(timeout=120)
        assert stdout == "".join(printed), stderr
