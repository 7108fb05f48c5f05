"""Deployments of a whole model leave no memory behind."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

MB = 1 << 20


@pytest.mark.parametrize("form", ["pt2", "onnx"])
def test_four_hundred_deployments_take_no_more_memory_than_the_first_twenty(tmp_path: Path, form: str) -> None:
    pytest.importorskip("onnxruntime" if form == "onnx" else "torch")
    command = [sys.executable, "-m", "tests.servers.repeated_deployments", str(tmp_path), form, "400"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    first, *others = map(int, done.stdout.split())
    print(f"{form}: {first / MB:.0f} MB after 20 deployments, {others[-1] / MB:.0f} MB after 400")
    assert len(others) == 19
    assert max(others) < first + 50 * MB
