"""What the wheel holds."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests import ROOT


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    with zipfile.ZipFile(next(out.glob("*.whl"))) as archive:
        yield archive


def test_wheel_holds_every_kernel_source(wheel):
    sources = {path.name for path in (ROOT / "cuda").iterdir() if path.suffix in {".cu", ".cuh"}}
    packed = {Path(name).name for name in wheel.namelist() if name.startswith("hps/_cuda/")}
    assert sources
    assert sources <= packed


def test_wheel_holds_every_module_and_the_mark_of_types_and_no_tests(wheel):
    modules = {path.relative_to(ROOT).as_posix() for part in ("hps", "hps_torch") for path in (ROOT / part).rglob("*.py")}
    assert modules | {"hps/py.typed"} <= set(wheel.namelist())
    assert not [name for name in wheel.namelist() if name.startswith(("tests/", "benchmarks/", "cuda/"))]
