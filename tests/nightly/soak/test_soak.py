"""The soak finds nothing wrong in a minute, and finds every fault that is made on purpose."""

import json
import subprocess
import sys

import pytest

from tests import ROOT
from tests.nightly.soak.ledger import Ledger

LIMIT_S = 600


def soak(tmp_path, *arguments):
    """Run a soak; return its exit code, its violations and its results."""
    places = ("--keep", tmp_path / "soak", "--out", tmp_path)
    command = [sys.executable, "-m", "tests.nightly.soak", *places, *arguments]
    done = subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    assert (tmp_path / "soak.json").exists(), done.stderr
    return done.returncode, Ledger(tmp_path / "soak", 0, "test").violations(), json.loads((tmp_path / "soak.json").read_text())


@pytest.mark.redis
def test_a_short_soak_finds_nothing_wrong(tmp_path):
    status, violations, results = soak(
        tmp_path, "--minutes", 0.5, "--every", 1, "--good", 16, "--bad", 16, "--health-limit-ms", 1e9
    )
    assert violations == []
    assert status == 0
    figures = results["rows"][0]["figures"]
    assert figures["wrong_vectors"] == 0
    done = ("answers", "acknowledged", "deletes", "attacks", "probes", "forks", "scrapes")
    assert min(figures[name] for name in done) > 0
    assert sum(row["axes"]["work"] == "chaos" for row in results["rows"]) == 12


@pytest.mark.redis
def test_a_soak_finds_faults_that_are_made_on_purpose(tmp_path):
    wrong = {"default", "torn", "foreign", "invented", "stale", "mask"}
    faults = ("a:default,torn,foreign,invented,stale", "b:lost,leak,stall,front-leak,drop")
    status, violations, _ = soak(tmp_path, "--minutes", 0.7, "--chaos", "--bad", 0, "--good", 8, "--fault", *faults)
    assert status == 1
    found = {(violation["kind"], violation["process"]) for violation in violations if "process" in violation}
    assert {(kind, "a") for kind in wrong} | {(kind, "b") for kind in ("stale", "memory", "health", "dropped")} <= found
    assert {("memory", name) for name in ("b engine", "b front 0", "b front 1", "b front 2")} <= found
    assert {violation.get("how") for violation in violations if violation["kind"] in wrong} >= {"json", "binary"}
