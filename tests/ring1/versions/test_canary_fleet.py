"""A canary of a fleet: `serving.json` begins and ends it on every replica, and a bound that breaks on one ends it for all."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import hps
from tests.ring1.versions.test_canary_life import UNCHECKED, answering, ended
from tests.ring1.versions.test_version_checks import FIRST, KEYS, Make, Write, retrained
from tests.ring1.versions.test_version_checks import document as document  # fixtures
from tests.ring1.versions.test_version_checks import engine as engine
from tests.ring1.versions.test_version_checks import home as home
from tests.ring1.versions.test_version_checks import write as write

SAID = {"format": "arrays", "file": "dense.json", "inputs": {"item": {"table": "item"}, "age": {}}, "outputs": ["score"]}


@pytest.fixture
def replicas(document: Make, tmp_path: Path) -> Iterator[list[hps.HPS]]:
    described = document(**UNCHECKED)
    with ExitStack() as stack:
        yield [
            stack.enter_context(hps.HPS({**described, "persistent_db": {"type": "rocks_db", "path": str(tmp_path / place)}}))
            for place in ("one", "two")
        ]


def follow(*servers: hps.HPS) -> None:
    for server in servers:
        server.read_documents()
        assert set(server.follow().values()) <= {None}


def serving_json(home: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((home / "serving.json").read_text())
    return found


def test_replicas_begin_and_change_a_canary_together_and_select_the_same_users(
    replicas: list[hps.HPS], write: Write, home: Path
) -> None:
    one, other = replicas
    write(2, retrained())
    one.change_fleet("ranker", "canary", canary=0.25)
    assert (serving_json(home)["format"], serving_json(home)["version"]) == (2, "1")
    follow(one, other)
    few = answering(one, 60)
    assert few == answering(other, 60)
    assert 5 < few["2"] < 30
    for change in (
        lambda: other.promote("ranker"),
        lambda: other.rollback("ranker"),
        lambda: other.deploy("ranker", canary=0.5),
    ):
        with pytest.raises(hps.ConflictError, match="--fleet"):
            change()
    other.change_fleet("ranker", "canary", canary=0.5)
    follow(one, other)
    assert [ended(server) for server in replicas] == [("running", "")] * 2
    assert answering(one, 60)["2"] > few["2"]


def test_replicas_promote_a_canary_together_and_roll_back(replicas: list[hps.HPS], write: Write, home: Path) -> None:
    one, other = replicas
    write(2, retrained())
    one.change_fleet("ranker", "canary", canary=0.25)
    follow(one, other)
    one.change_fleet("ranker", "promote")
    assert "rollout" not in serving_json(home)
    assert serving_json(home)["format"] == 1, "releases before canaries can read it again"
    follow(one, other)
    assert [answering(server, 20) for server in replicas] == [{"2": 20}] * 2
    assert [ended(server) for server in replicas] == [("promoted", "")] * 2
    one.change_fleet("ranker", "rollback")
    follow(one, other)
    assert [answering(server, 20) for server in replicas] == [{"1": 20}] * 2


def test_a_bound_that_breaks_on_one_replica_ends_the_canary_on_all(replicas: list[hps.HPS], home: Path) -> None:
    one, other = replicas
    hps.write_version(home / "2", {"item": (KEYS, FIRST)}, network=(SAID, json.dumps({"does": "raise"}).encode()))
    one.change_fleet("ranker", "canary", canary=0.25)
    follow(one, other)
    assert answering(one, 60) == {"1": 60}
    one.rollouts.tick()
    assert ended(one)[0] == "rolled back"
    assert (serving_json(home)["withdrawn"], serving_json(home)["version"]) == (["2"], "1")
    follow(one, other)
    assert ended(other) == ("rolled back", "")
    assert [answering(server, 20) for server in replicas] == [{"1": 20}] * 2
    assert [server.check() for server in replicas] == [[], []]


def test_a_replica_that_cannot_load_the_version_serves_on(replicas: list[hps.HPS], write: Write, home: Path) -> None:
    one, other = replicas
    write(2, retrained())
    one.change_fleet("ranker", "canary", canary=0.25)
    follow(one)
    (home / "2").rename(home.parent.parent / "gone")
    follow(other)
    assert other.rollout("ranker") is None
    assert answering(other, 20) == {"1": 20}
