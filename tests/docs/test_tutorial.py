"""docs/tutorial.md, followed in an empty directory, but for what needs Docker."""

import re
from pathlib import Path

import pytest

from tests import ROOT
from tests.docs.newcomer import Newcomer, shown
from tests.servers.child_processes import ChildProcesses

PAGE = (ROOT / "docs" / "tutorial.md").read_text()


@pytest.mark.curl
def test_each_step_works_and_prints_what_the_page_shows(tmp_path: Path, children: ChildProcesses) -> None:
    for package in ("torch", "tritonclient.http"):
        pytest.importorskip(package)
    newcomer = Newcomer(PAGE, tmp_path, children)
    steps = newcomer.page.split("\n## ")[1:]
    assert len(steps) > 7
    compared = 0
    for step in steps:
        printed = ""
        for ran in newcomer.follow(step):
            assert ran.status == 0, ran
            printed += ran.printed.rstrip() + "\n"  # curl ends no line
        for pattern in shown(step):
            assert re.search(pattern, printed), f"{step.splitlines()[0]}: {printed}"
            compared += 1
    assert compared > 5
