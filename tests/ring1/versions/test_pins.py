"""A version that somebody chose, by a roll-back or by its number, stays over polls and restarts until they end it."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

import hps
from hps.ground.progress import NoProgress
from hps.testing.waiting import wait_until
from hps.versions.desired import DesiredVersion
from hps.versions.kept_files import KeptFiles
from hps.versions.pins import Pins
from tests.fakes.clock import Clock
from tests.servers.running_service import document_of, model_of

DAY = "1970-01-02"


def pinned(version: str, by: Literal["deploy", "rollback"], since: float = 86_400.5, problem: str = "") -> DesiredVersion:
    return DesiredVersion(version, by, since, "pin", problem=problem)


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KeptFiles:
    monkeypatch.setattr("hps.versions.pins.time.time", Clock(86_400.5))
    return KeptFiles(tmp_path, "hps-pins")


def test_the_last_pin_of_each_model_outlasts_a_restart_until_it_ends(kept: KeptFiles) -> None:
    pins = Pins(kept)
    assert pins.of("m") is None
    pins.pin("m", "1", "deploy")
    assert pins.pin("m", "2", "rollback") == pinned("2", "rollback")
    pins.pin("other", "7", "deploy")
    for one in (pins, Pins(kept)):
        assert one.of("m") == one.known("m") == pinned("2", "rollback")
        assert one.of("other") == pinned("7", "deploy")
    pins.end("m")
    for one in (pins, Pins(kept)):
        assert (one.of("m"), one.known("m")) == (None, None)
        assert one.of("other") is not None
    kept.write("m", GOOD)
    pin = Pins(kept).of("m")
    assert (pin, type(pin and pin.since)) == (pinned("2", "rollback", 86_400.0), float), "whole seconds are seconds, too"


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


WRONG: list[tuple[str, Any]] = [
    ("version", "../3"),
    ("version", ""),
    ("version", "\u0663"),
    ("version", 2),
    ("model", "other"),
    ("by", "unpin"),
    ("since", 1e300),
    ("since", "1"),
]
DAMAGED = ["", "{", "[]", "[" * 100_000, *(json.dumps({**GOOD, name: value}) for name, value in WRONG)]
DAMAGED += [json.dumps({name: value for name, value in GOOD.items() if name != left_out}) for left_out in GOOD]


@pytest.mark.parametrize("text", DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_pin_is_an_error_until_it_ends_and_is_shown_as_none(kept: KeptFiles, text: str) -> None:
    kept.write("m", GOOD)
    kept.path("m").write_text(text)
    pins = Pins(kept)
    for _ in range(2):
        with pytest.raises(hps.DatabaseCorruptError, match="hps unpin"):
            pins.of("m")
        assert pins.known("m") is None
    pins.end("m")
    assert pins.of("m") is Pins(kept).of("m") is None


def test_a_pin_is_described_beside_the_version_that_serves() -> None:
    for problem, said in (("", ""), ("a restart ends it", "; a restart ends it")):
        assert pinned("2", "rollback", 86_400.0, problem).describe("2") == f"pinned by rollback, {DAY}{said}"
        gone = f"version 3, whose files are gone, is pinned by deploy, {DAY}{said}"
        assert pinned("3", "deploy", 86_400.0, problem).describe("2") == gone


# -- what serves ----------------------------------------------------------------------------------------------------------

KEYS = np.arange(100)
Make = Callable[..., dict[str, Any]]


def write(directory: Path, version: int, content: float | None = None) -> None:
    """Write a version whose vectors say which one it is, or the content."""
    vectors = np.full((KEYS.size, 4), content or version, np.float32)
    hps.write_sparse_model(directory / str(version) / "item", (KEYS, vectors), overwrite=True)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    home = tmp_path / "versions"
    for version in (1, 2, 3):
        write(home, version)
    return home


@pytest.fixture
def document(tmp_path: Path, home: Path) -> Make:
    def make(persistent: bool = True, mode: str = "none", **more: Any) -> dict[str, Any]:
        model = model_of("ranker", ["item"], {"item": 4}, version_path=str(home), gpucacheper=1.0) | more
        service = {"model_control_mode": mode} | ({"repository_poll_s": 0.1} if mode == "poll" else {})
        return document_of(model, persistent=tmp_path / "rocksdb" if persistent else None, service=service)

    return make


def served(server: hps.HPS) -> int:
    """The version that answers, which is the one that the server names."""
    (vector,) = server.lookup([7], "ranker", "item")
    assert server.model("ranker").version == str(int(vector[0]))
    return int(vector[0])


def state(server: hps.HPS) -> tuple[int, str]:
    """The version that answers, and the pin."""
    pin = server.pin("ranker")
    return served(server), "" if pin is None else f"{pin.version} by {pin.by}"


def test_a_roll_back_outlasts_restarts_and_newer_versions_until_it_is_unpinned(document: Make, home: Path) -> None:
    with hps.HPS(document()) as server:
        assert state(server) == (3, "")
        assert server.rollback("ranker").version == "2"
    for version in (4, 5):
        with hps.HPS(document()) as server:
            assert state(server) == (2, "2 by rollback")
            assert server.poll() == {}
            write(home, version)
            assert server.poll() == {}, "a newer version is not taken"
            assert state(server) == (2, "2 by rollback")
    with hps.HPS(document()) as server:
        assert server.rollback("ranker").version == "1", "again, to the next one below"
    with hps.HPS(document()) as server:
        assert state(server) == (1, "1 by rollback"), "the second roll-back"
        assert server.unpin("ranker").version == "5"
        assert state(server) == (5, "")
        write(home, 6)
        assert server.poll() == {"ranker": None}
    with hps.HPS(document()) as server:
        assert state(server) == (6, "")
        assert server.unpin("ranker").version == "6", "nothing to end"


@pytest.mark.parametrize(("keep_versions", "left"), [(0, {"1"}), (1, {"1", "3"})])
def test_a_version_that_no_policy_names_leaves_with_its_pin(document: Make, keep_versions: int, left: set[str]) -> None:
    def found() -> dict[str, str]:
        return {one.version: one.state for one in server.versions("ranker")}

    policy = {"version_policy": {"specific": {"versions": [1]}}, "keep_versions": keep_versions}
    with hps.HPS(document(**policy)) as server:
        server.deploy("ranker", "2")
        assert found() == {"1": "available", "2": "serving"}, "the policy names version 1, which answers by its number"
        server.deploy("ranker", "3")
        wait_until(lambda: found().get("2") in (None, "kept"), "version 2 has gone")
        assert server.unpin("ranker").version == "1"
        wait_until(lambda: "retiring" not in found().values(), "version 3 has gone")
        assert found() == {version: "serving" if version == "1" else "kept" for version in left}
        database = server.model("ranker").chain.databases[-1]
        slots = {tag.partition("@")[2].partition(".")[0] or "1" for tag in database.tags()}
        assert slots == left


def test_a_pinned_version_whose_files_are_gone_comes_back(document: Make, home: Path, caplog: pytest.LogCaptureFixture) -> None:
    with hps.HPS(document()) as server:
        server.rollback("ranker")
        (home / "2").rename(home / "aside")
        assert (server.poll(), served(server)) == ({}, 2), "what serves goes on"
    assert "version 2, which serves, is pinned by rollback" in caplog.text
    with hps.HPS(document()) as server:
        assert state(server) == (1, "2 by rollback")
        assert "its files are gone: version 1 serves" in caplog.text
        assert "whose files are gone, is pinned by rollback" in server.stats().models[0].pinned
        assert server.poll() == {}
        (home / "aside").rename(home / "2")
        assert (server.poll(), served(server)) == ({"ranker": None}, 2)


def test_versions_beside_the_pinned_one_are_those_of_the_policy_up_to_it(document: Make, home: Path) -> None:
    """And the pinned version answers all along, also while others are loaded beside it."""
    for version in (4, 5, 6):
        write(home, version)
    several = document(version_policy={"latest": {"num_versions": 3}})
    answers: list[int] = []

    class Looking(NoProgress):
        def advance(self, tag: str, rows: int) -> None:
            answers.append(served(server))

    def available(server: hps.HPS) -> set[str]:
        return {version.version for version in server.versions("ranker") if version.state in ("serving", "available")}

    with hps.HPS(several) as server:
        assert (served(server), available(server)) == (6, {"4", "5", "6"})
        server.deploy("ranker", "3")
        assert server.poll(progress=Looking()) == {"ranker": None}
        assert set(answers) == {3}
        assert (served(server), available(server)) == (3, {"1", "2", "3"})
        assert server.poll() == {}
    with hps.HPS(several) as server:
        assert (served(server), available(server)) == (3, {"1", "2", "3"})
        server.undeploy("ranker", "3")
        assert state(server) == (2, ""), "whoever takes the version out does not want it back"


def test_a_damaged_pin_serves_nothing_by_guess_and_can_be_ended(document: Make, tmp_path: Path) -> None:
    with hps.HPS(document()) as server:
        server.rollback("ranker")
    (file,) = (tmp_path / "rocksdb" / "hps-pins").iterdir()
    file.write_text("{")
    with hps.HPS(document(), deploy_models=False) as server:
        with pytest.raises(hps.DatabaseCorruptError, match="hps unpin"):
            server.deploy("ranker", pin=False)
        assert server.poll() == {}
        assert server.unpin("ranker").version == "3"
