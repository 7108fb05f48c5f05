"""docs/tutorial.md, followed word for word in an empty directory, but for what needs Docker; and on another port."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT
from tests.servers.child_processes import ChildProcesses
from tests.servers.redis_server import free_ports

PAGE = (ROOT / "docs" / "tutorial.md").read_text()


@pytest.mark.curl
def test_the_tutorial_works_as_it_stands(tmp_path: Path, children: ChildProcesses) -> None:
    pytest.importorskip("tritonclient.http")
    page = PAGE.replace("8000", str(free_ports(1)[0]))
    for title, code in re.findall(r'```python title="(.*?)"\n(.*?)```', page, re.DOTALL):
        (tmp_path / title).write_text(code)
    commands = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
    assert len(commands) == page.count("```sh")
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    answers = ""
    for command in commands:
        if command.startswith("# needs Docker"):
            continue
        if command.startswith("hps serve"):
            children.start("sh", "-ec", f"exec {command}", cwd=tmp_path, env=environment, stderr=subprocess.DEVNULL)
            continue
        arguments = ["bash", "-ec", f"set -o pipefail\n{command}"]
        ran = subprocess.run(arguments, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False)
        assert ran.returncode == 0, command + ran.stdout + ran.stderr
        answers += ran.stdout
    printed = re.search(r"These print\n\n((?:    .*\n)+)", page)
    assert printed
    assert re.sub("^    ", "", printed[1], flags=re.MULTILINE) in answers
    assert '"user":[[1.0,2.0,3.0,4.0,5.0,6.0,7.0,8.0]]' in answers.replace(" ", "")
    assert re.search(r'hps_default_keys_total\{model="clicks",table="item"\} 1$', answers, re.MULTILINE)
