"""`hps check-version` says in CI what a server would find, changes nothing, and draws it."""

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import hps
from hps.tools.cli.app import app
from tests.servers.running_service import document_of, model_of

KEYS = np.arange(1000)
FIRST = np.random.default_rng(1).standard_normal((KEYS.size, 8)).astype(np.float32)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    home = tmp_path / "repository" / "ranker"
    for version, vectors in ((1, FIRST), (2, FIRST[::-1].copy()), (3, FIRST + np.float32(0.1))):
        hps.write_version(home / str(version), {"item": (KEYS, vectors)})
    (home / "model.json").write_text(json.dumps(model_of("ranker", ["item"], {"item": 8})))
    path = tmp_path / "ps.json"
    path.write_text(json.dumps(document_of(persistent=tmp_path / "rocksdb", model_repository=str(home.parent))))
    return path


def test_a_version_is_compared_with_the_one_below_or_a_named_one(config: Path, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    for more, code, said in (
        (["--version", "2"], 1, "version 2 beside version 1: held"),
        ([], 1, "version 3 beside version 2: held"),
        (["--against", "1"], 0, "version 3 beside version 1: passed"),
        (["--version", "1"], 0, "version 1: passed"),
    ):
        result = CliRunner().invoke(app, ["check-version", str(config), "ranker", *more])
        assert (result.exit_code, said in result.output) == (code, True), result.output
    assert sorted(tmp_path.rglob("*")) == before


def test_the_report_is_json_and_a_picture(config: Path, tmp_path: Path) -> None:
    picture = tmp_path / "checks.svg"
    result = CliRunner().invoke(app, ["check-version", str(config), "ranker", "--json", "--plot", str(picture)])
    report = json.loads(result.stdout)
    assert (report["version"], report["against"]) == ("3", "2")
    assert "<svg" in picture.read_text()


def test_a_picture_of_another_kind_and_an_unknown_version_are_refused(config: Path) -> None:
    for more, said in (
        (["--plot", "a.gif"], "expected .svg or .png"),
        (["--version", "9"], "expected one of 1, 2, 3"),
        (["--version", "new"], "expected one of 1, 2, 3"),
        (["--against", "0"], "expected one of 1, 2, 3"),
    ):
        result = CliRunner().invoke(app, ["check-version", str(config), "ranker", *more])
        assert (result.exit_code, said in " ".join(result.output.split())) == (2, True), result.output
