"""The examples of docs/client.md run from top to bottom, beside the sample server, and print what the page says."""

import json
import re
import subprocess
import sys
from pathlib import Path

from tests import ROOT
from tests.servers.served_process import ServedProcess

BLOCKS = re.compile(r"```python\n(.*?)```\n(?:\n((?:    [^\n]*\n)+))?", re.DOTALL)


def test_examples_print_what_the_page_says(tmp_path: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for path, command, options in re.findall(
        r"^(models/\S+):.*\n\t\$\(BIN\)/hps (create-model) \$@ (.*)$", makefile, re.MULTILINE
    ):
        arguments = [sys.executable, "-m", "hps", command, path, *options.split()]
        subprocess.run(arguments, cwd=tmp_path, check=True, capture_output=True, timeout=120)
    document = json.loads((ROOT / "configs/minimal.json").read_text())
    document["models"][0]["sparse_files"] = [str(tmp_path / one) for one in document["models"][0]["sparse_files"]]
    document["persistent_db"]["path"] = str(tmp_path / "rocksdb")
    document["service"] = {"shared_memory_bytes": 1 << 30}
    blocks = BLOCKS.findall((ROOT / "docs/client.md").read_text())
    with ServedProcess(document, tmp_path) as served:
        code = "\n".join(code for code, _ in blocks).replace("http://127.0.0.1:8000", served.url)
        ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == re.sub("^    ", "", "".join(printed for _, printed in blocks), flags=re.MULTILINE)
