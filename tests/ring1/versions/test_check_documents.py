"""Where reports of checks are kept, and which of two counts."""

from pathlib import Path

import pytest

from hps.models.sources import ModelSources
from hps.versions.checks.documents import CHECKS_DIRECTORY, CheckDocuments
from hps.versions.checks.report import CheckOutcome, CheckReport
from hps.versions.kept_files import KeptFiles

FAILED = CheckOutcome(check="norms", outcome="failed", policy="hold", table="item", text="factor 9")
HELD = CheckReport(model="m", version="2", fingerprint="f", at=1.0, checks=(FAILED,))


@pytest.fixture
def kept(tmp_path: Path) -> KeptFiles:
    (tmp_path / "database").mkdir()
    return KeptFiles(tmp_path / "database", CHECKS_DIRECTORY)


@pytest.fixture
def place(tmp_path: Path) -> str:
    (tmp_path / "m" / "2").mkdir(parents=True)
    return str(tmp_path / "m")


def test_a_report_that_was_accepted_counts_wherever_it_lies(kept: KeptFiles, place: str) -> None:
    both, beside = CheckDocuments(ModelSources(), kept), CheckDocuments(ModelSources())
    both.write(HELD, place)
    assert both.read("m", place, "2", "f") == HELD
    beside.write(HELD.accepted(2.0), place)
    assert both.read("m", place, "2", "f") == HELD.accepted(2.0)
    beside.write(HELD, place)
    both.write(HELD.accepted(3.0), "")
    assert both.read("m", place, "2", "f") == HELD.accepted(3.0)
    assert both.read("m", place, "2", "other files") is None


def test_the_longest_report_is_read_again_from_beside_the_database(kept: KeptFiles) -> None:
    documents = CheckDocuments(ModelSources(), kept)
    figures = {f"figure {number}": 123456.654321 for number in range(10)}
    failed = [
        FAILED.model_copy(update={"table": f"t{number}", "text": 1000 * "é", "figures": figures}) for number in range(500)
    ]
    documents.write(HELD.model_copy(update={"checks": tuple(failed)}), "")
    found = documents.read("m", "", "2", "f")
    assert found is not None
    assert found.verdict == "held"
    assert found.failed[0].text == 300 * "é"


def test_what_is_kept_nowhere_is_said(kept: KeptFiles, place: str, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    CheckDocuments(ModelSources(), KeptFiles(kept.directory, "x", read_only=True)).write(HELD, "")
    assert "a restart forgets that version 2 is held: no persistent_db keeps it" in caplog.text
    caplog.clear()
    CheckDocuments(ModelSources()).write(HELD, place)
    CheckDocuments(ModelSources()).write(HELD.model_copy(update={"checks": ()}), "")
    assert "a restart forgets" not in caplog.text
