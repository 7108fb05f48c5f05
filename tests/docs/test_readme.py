"""The README's first steps, by somebody who knows nothing else: a vector, a score of a module, a bad version that is held."""

import re
import shutil
from pathlib import Path

import pytest

from tests import ROOT
from tests.docs.newcomer import Newcomer, promised
from tests.ring1.repo.test_readme import README
from tests.servers.child_processes import ChildProcesses

CLONED = ("Makefile", "pyproject.toml", ".ci", "configs")
pytestmark = pytest.mark.curl


@pytest.fixture
def newcomer(tmp_path: Path, children: ChildProcesses) -> Newcomer:
    """Somebody with a clone, of what `make serve` reads."""
    for name in CLONED:
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, tmp_path / name)
    return Newcomer(README, tmp_path, children)


def part(newcomer: Newcomer, title: str) -> str:
    """Return the part of the README that begins with a title in bold."""
    found = re.search(rf"^\*\*{title}.*?(?=^\*\*|\Z)", newcomer.page, re.MULTILINE | re.DOTALL)
    assert found, title
    return found[0]


def test_a_first_vector(newcomer: Newcomer) -> None:
    text = part(newcomer, "A first vector")
    [asked] = newcomer.follow(text)
    [vectors] = promised(text, "prints")
    assert asked.status == 0
    assert re.fullmatch(vectors, asked.printed.strip()), asked


def test_a_score_of_ones_own_module_and_a_bad_version_that_is_held(newcomer: Newcomer) -> None:
    pytest.importorskip("torch")
    text = part(newcomer, "A score of your own torch module")
    packaged, scored = newcomer.follow(text)
    [scores] = promised(text, "prints")
    assert packaged.status == 0, packaged
    assert re.fullmatch(scores, scored.printed.strip()), scored

    text = part(newcomer, "A bad version is held")
    packaged, deployed, listed = newcomer.follow(text)
    [reason], [state] = promised(text, "fails with"), promised(text, "as")
    assert packaged.status == 0, packaged
    assert deployed.status == 1
    assert re.search(reason, deployed.errors), deployed
    assert re.search(rf"^ranker +2 +{state} ", listed.printed, re.MULTILINE), listed
    assert [ran.printed for ran in newcomer.follow(f"    {scored.command}\n")] == [scored.printed], "version 1 answers on"
