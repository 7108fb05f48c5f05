"""The examples that people copy run, and what they serve is what was trained."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hps.testing.waiting import PATIENCE_S
from tests import ROOT

NOTEBOOK = ROOT / "examples" / "embedding_layers.ipynb"


def test_dlrm_is_served_as_it_was_trained(tmp_path: Path) -> None:
    pytest.importorskip("tritonclient.http")
    command = [sys.executable, "-m", "examples.dlrm", "--quick", "--directory", str(tmp_path)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=5 * PATIENCE_S, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    scores = dict(re.findall(r"^(trained|in process|over HTTP): AUC ([0-9.]+)", ran.stdout, re.MULTILINE))
    assert len(scores) == 3
    assert len(set(scores.values())) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dlrm", "ps.json"]


def test_notebook_runs_anew_and_holds_its_pictures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("matplotlib")
    stored = nbformat.read(NOTEBOOK, as_version=4)
    outputs = [output for cell in stored.cells for output in cell.get("outputs", [])]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
    assert NOTEBOOK.stat().st_size < 400_000
    monkeypatch.setenv("HPS_NOTEBOOK_QUICK", "1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    place = {"metadata": {"path": str(tmp_path)}}
    ran = nbclient.NotebookClient(stored, timeout=240, kernel_name="python3", resources=place).execute()
    assert not [output for cell in ran.cells for output in cell.get("outputs", []) if output.output_type == "error"]
