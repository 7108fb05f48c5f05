"""Pins outlast a restart, and one that is damaged is no guess."""

import json
import re
from pathlib import Path

import pytest

import hps
from hps.versions.kept_files import KeptFiles
from hps.versions.pins import Pin, Pins, pinned_text
from tests.fakes.clock import Clock

DAY = "1970-01-02"


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KeptFiles:
    monkeypatch.setattr("hps.versions.pins.time.time", Clock(86_400.5))
    return KeptFiles(tmp_path, "hps-pins")


def test_the_last_pin_of_each_model_outlasts_a_restart_until_it_ends(kept: KeptFiles) -> None:
    pins = Pins(kept)
    assert pins.of("m") is None
    pins.pin("m", "1", "deploy")
    assert pins.pin("m", "2", "rollback") == Pin("2", "rollback", 86_400.5)
    pins.pin("other", "7", "deploy")
    for one in (pins, Pins(kept)):
        assert one.of("m") == one.shown("m") == Pin("2", "rollback", 86_400.5)
        assert one.of("other") == Pin("7", "deploy", 86_400.5)
    pins.end("m")
    for one in (pins, Pins(kept)):
        assert (one.of("m"), one.shown("m")) == (None, None)
        assert one.of("other") is not None


@pytest.mark.parametrize(
    ("why", "kept"),
    [
        ("no persistent_db keeps it", lambda directory: None),
        ("no persistent_db keeps it", lambda directory: KeptFiles(None, "hps-pins")),
        ("persistent_db is read-only", lambda directory: KeptFiles(directory, "hps-pins", read_only=True)),
        ("writing it to .* failed: .*", lambda directory: KeptFiles(directory / "missing", "hps-pins")),
    ],
)
def test_a_pin_that_no_restart_finds_holds_and_says_so(tmp_path: Path, why: str, kept) -> None:
    pins = Pins(kept(tmp_path))
    pin = pins.pin("m", "1", "deploy")
    assert pins.of("m") == pin
    assert re.fullmatch(f"a restart ends it: {why}", pin.problem), pin.problem
    assert Pins(kept(tmp_path)).of("m") is None


GOOD = {"model": "m", "version": "2", "by": "rollback", "since": 86_400}


def test_whole_seconds_are_read_as_seconds(kept: KeptFiles) -> None:
    kept.write("m", GOOD)
    pin = Pins(kept).of("m")
    assert (pin, type(pin and pin.since)) == (Pin("2", "rollback", 86_400.0), float)


DAMAGED = [
    "",
    "{",
    "[]",
    "[" * 100_000,
    *(
        json.dumps({**GOOD, name: value})
        for name, value in (
            ("version", "../3"),
            ("version", ""),
            ("version", "\u0663"),
            ("version", 2),
            ("model", "other"),
            ("by", "unpin"),
            ("since", 1e300),
            ("since", "1"),
        )
    ),
    *(json.dumps({name: value for name, value in GOOD.items() if name != left_out}) for left_out in GOOD),
]


@pytest.mark.parametrize("text", DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_pin_is_an_error_until_it_ends_and_is_shown_as_none(kept: KeptFiles, text: str) -> None:
    kept.write("m", GOOD)
    kept.path("m").write_text(text)
    pins = Pins(kept)
    for _ in range(2):
        with pytest.raises(hps.DatabaseCorruptError, match="hps unpin"):
            pins.of("m")
        assert pins.shown("m") is None
    pins.end("m")
    assert pins.of("m") is Pins(kept).of("m") is None


@pytest.mark.parametrize(
    ("pin", "text"),
    [
        (None, ""),
        (Pin("2", "rollback", 86_400.0), f"pinned by rollback, {DAY}"),
        (Pin("2", "deploy", 86_400.0, "a restart ends it"), f"pinned by deploy, {DAY}; a restart ends it"),
        (Pin("3", "deploy", 86_400.0), f"version 3, whose files are gone, is pinned by deploy, {DAY}"),
        (
            Pin("3", "deploy", 86_400.0, "a restart ends it"),
            f"version 3, whose files are gone, is pinned by deploy, {DAY}; a restart ends it",
        ),
    ],
)
def test_a_pin_is_described_beside_the_version_that_serves(pin: Pin | None, text: str) -> None:
    assert pinned_text(pin, "2") == text
