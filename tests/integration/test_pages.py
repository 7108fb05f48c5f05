"""The examples of the pages for users run from top to bottom, in an empty directory, and print what the pages say."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
BLOCKS = re.compile(r"```python\n(.*?)```\n(?:\n((?:    [^\n]*\n)+))?", re.DOTALL)


@pytest.mark.slow
@pytest.mark.parametrize("page", ["pooling.md", "torch.md"])
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
