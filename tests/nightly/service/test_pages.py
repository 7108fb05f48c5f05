"""The examples of the pages for users run from top to bottom, in an empty directory, and print what the pages say."""

import json
import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests import ROOT
from tests.servers.served_process import ServedProcess

DOCS = ROOT / "docs"
BLOCKS = re.compile(r"```python\n(.*?)```\n(?:\n((?:    [^\n]*\n)+))?", re.DOTALL)


@pytest.mark.parametrize("page", ["pooling.md", "torch.md", "whole-models.md"])
def test_examples_print_what_the_page_says(page: str, tmp_path: Path) -> None:
    if page == "torch.md":
        pytest.importorskip("torchrec")
    # CUDA graphs have tests of their own, in tests/gpu.
    blocks = [(code, printed) for code, printed in BLOCKS.findall((DOCS / page).read_text()) if "torch.cuda" not in code]
    script = tmp_path / "example.py"
    script.write_text("\n".join(code for code, _ in blocks))
    ran = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == re.sub("^    ", "", "".join(printed for _, printed in blocks), flags=re.MULTILINE)


def test_the_page_of_whole_models_shows_a_score(tmp_path: Path) -> None:
    """From the module to the answer of curl."""
    page = (DOCS / "whole-models.md").read_text()
    (tmp_path / "example.py").write_text(BLOCKS.findall(page)[0][0])
    subprocess.run([sys.executable, "example.py"], cwd=tmp_path, timeout=300, check=True)
    body = re.findall(r"-d '(.*)'$", page, re.MULTILINE)[0]
    [shown] = re.findall(r"`(\{\"model\":.*\})`", page)
    with ServedProcess(tmp_path / "repository", tmp_path) as served:
        answer = httpx.post(f"{served.url}/v1/models/ranker/score", content=body).json()
    answer["outputs"]["score"] = [round(one, 4) for one in answer["outputs"]["score"]]
    assert answer == json.loads(shown)
