"""Runs the examples of pages for users, from top to bottom, in an empty directory."""

import re
import subprocess
import sys
from pathlib import Path

from tests import ROOT

DOCS = ROOT / "docs"
BLOCKS = re.compile(r"```python\n(.*?)```\n(?:\n((?:    [^\n]*\n)+))?", re.DOTALL)


def run_examples(page: str, directory: Path) -> tuple[str, str]:
    """Run the examples of a page, and return what they print and what the page says that they print."""
    # CUDA graphs have tests of their own, in tests/gpu.
    blocks = [(code, printed) for code, printed in BLOCKS.findall((DOCS / page).read_text()) if "torch.cuda" not in code]
    script = directory / "example.py"
    script.write_text("\n".join(code for code, _ in blocks))
    ran = subprocess.run([sys.executable, script], cwd=directory, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout, re.sub("^    ", "", "".join(printed for _, printed in blocks), flags=re.MULTILINE)
