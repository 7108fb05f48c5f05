"""A canary of a fleet: `serving.json` begins and ends it on every replica, and a bound that breaks on one ends it for all."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import hps
from tests.ring2.versions.test_canary_life import UNCHECKED, answering, ended
from tests.ring2.versions.test_checks_in_process import FIRST, KEYS, Make, Write, retrained
from tests.ring2.versions.test_checks_in_process import document as document  # fixtures
from tests.ring2.versions.test_checks_in_process import engine as engine
from tests.ring2.versions.test_checks_in_process import home as home
from tests.ring2.versions.test_checks_in_process import write as write

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


STEPS = [{"share": 0.25, "requests": 1}, {"share": 0.5, "requests": 1}, {"share": 0.75}]


def shares(*servers: hps.HPS) -> list[float]:
    return [rollout.record.share for server in servers for rollout in server.rollouts.active.values()]


def test_replicas_take_steps_together_when_the_first_is_done(replicas: list[hps.HPS], write: Write, home: Path) -> None:
    one, other = replicas
    write(2, retrained())
    one.change_fleet("ranker", "canary", canary=0.25, options={"steps": STEPS})
    follow(one, other)
    for expected in (0.5, 0.75):
        before = shares(one, other)
        answering(other, 60)
        one.rollouts.tick()
        other.rollouts.tick()
        other.rollouts.tick()  # its own step is done, and written: nothing is left to do until it follows
        assert serving_json(home)["rollout"]["steps"][0]["share"] == expected
        assert shares(one, other) == before
        follow(one, other)
        assert shares(one, other) == [expected] * 2
    assert answering(one, 60) == answering(other, 60)
    one.rollouts.tick()
    assert shares(one, other) == [0.75] * 2, "the last step has no end"
    other.change_fleet("ranker", "promote")
    follow(one, other)
    assert [answering(server, 20) for server in replicas] == [{"2": 20}] * 2


def test_a_step_does_not_undo_what_somebody_has_just_changed(replicas: list[hps.HPS], write: Write, home: Path) -> None:
    one, other = replicas
    write(2, retrained())
    one.change_fleet("ranker", "canary", canary=0.25, options={"steps": STEPS})
    follow(one, other)
    answering(one, 60)
    other.change_fleet("ranker", "canary", canary=0.1, options={"steps": []})
    said = serving_json(home)
    one.rollouts.tick()  # it has not read that yet
    assert serving_json(home) == said
    follow(one, other)
    assert shares(one, other) == [0.1] * 2


@pytest.mark.parametrize("errors", [0, 100], ids=["of a step", "of a roll-back"])
def test_a_change_of_the_document_while_a_replica_writes_it_is_kept(
    replicas: list[hps.HPS], write: Write, home: Path, monkeypatch: pytest.MonkeyPatch, errors: int
) -> None:
    one, other = replicas
    write(2, retrained())
    write(3, retrained())
    one.change_fleet("ranker", "canary", "2", canary=0.25, options={"steps": STEPS})
    follow(one, other)
    real = one.catalog.change_fleet

    def late(*given: Any, **options: Any) -> Any:
        monkeypatch.undo()
        other.change_fleet("ranker", "rollback")
        other.change_fleet("ranker", "canary", "3", canary=0.5)
        return real(*given, **options)

    monkeypatch.setattr(one.catalog, "change_fleet", late)
    answering(one, 60)
    one.rollouts.active["ranker"].counts.new.errors += errors
    one.rollouts.tick()
    assert serving_json(home)["rollout"]["version"] == "3"
    follow(one, other)
    assert [rollout.record.version for server in replicas for rollout in server.rollouts.active.values()] == ["3"] * 2


def test_a_roll_back_is_told_although_another_replica_takes_a_step(
    replicas: list[hps.HPS], write: Write, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = replicas
    write(2, retrained())
    one.change_fleet("ranker", "canary", canary=0.25, options={"steps": STEPS})
    follow(one, other)
    real = one.catalog.change_fleet

    def late(*given: Any, **options: Any) -> Any:
        monkeypatch.undo()
        answering(other, 60)
        other.rollouts.tick()
        return real(*given, **options)

    monkeypatch.setattr(one.catalog, "change_fleet", late)
    one.rollouts.active["ranker"].counts.new.errors += 100
    one.rollouts.tick()
    assert "rollout" not in serving_json(home)
    follow(one, other)
    assert [ended(server)[0] for server in replicas] == ["rolled back"] * 2


def test_a_replica_does_not_promote_what_another_one_has_rolled_back(replicas: list[hps.HPS], write: Write) -> None:
    one, other = replicas
    write(2, retrained())
    one.change_fleet("ranker", "canary", canary=0.5, options={"steps": [{"share": 0.5, "requests": 1}, {"share": 1.0}]})
    follow(one, other)
    one.change_fleet("ranker", "rollback")
    answering(other, 20)
    other.rollouts.tick()  # it has not read that yet
    assert ended(other) == ("running", "")
    with pytest.raises(hps.ConflictError, match="version 2 ended 0 s ago, and 1 serves"):
        other.change_fleet("ranker", "rollback")
    follow(one, other)
    with pytest.raises(hps.ConflictError, match="version 2 ended 0 s ago, and 1 serves"):
        one.change_fleet("ranker", "rollback")
    assert [ended(server) for server in replicas] == [("rolled back", "")] * 2
    assert [answering(server, 20) for server in replicas] == [{"1": 20}] * 2


def test_a_roll_back_that_could_not_be_written_is_told_later_also_after_a_restart(
    document: Make, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    described = {**document(**UNCHECKED), "persistent_db": {"type": "rocks_db", "path": str(tmp_path / "one")}}
    with hps.HPS(described) as server:
        hps.write_version(home / "2", {"item": (KEYS, FIRST)}, network=(SAID, json.dumps({"does": "raise"}).encode()))
        server.change_fleet("ranker", "canary", canary=0.25)
        follow(server)
        answering(server, 60)
        with monkeypatch.context() as patch:
            patch.setattr(server.catalog, "change_fleet", _away)
            server.rollouts.tick()
            follow(server)
        assert ended(server)[0] == "rolled back"
        assert serving_json(home)["rollout"]["version"] == "2"
    with hps.HPS(described) as server:
        follow(server)
        assert answering(server, 20) == {"1": 20}
        assert ended(server)[0] == "rolled back"
        assert serving_json(home)["withdrawn"] == ["2"]


def _away(*_: object, **__: object) -> None:
    raise hps.ModelSourceError("in this test")


def test_a_replica_that_crashes_again_and_again_ends_the_canary_of_the_fleet(
    document: Make, write: Write, home: Path, tmp_path: Path
) -> None:
    described = {**document(**UNCHECKED), "persistent_db": {"type": "rocks_db", "path": str(tmp_path / "one")}}
    with hps.HPS(described) as server:
        write(2, retrained())
        server.change_fleet("ranker", "canary", canary=0.25)
        follow(server)
        [kept] = (tmp_path / "one").glob("hps-rollouts/*.json")
        crashed = json.loads(kept.read_text()) | {"crashes": 2}
    kept.write_text(json.dumps(crashed))
    with hps.HPS(described) as server:
        follow(server)
        assert ended(server) == ("rolled back", "the process crashed 3 times while version 2 was tried out")
        assert answering(server, 20) == {"1": 20}
        assert serving_json(home)["withdrawn"] == ["2"]


def test_a_fleet_tries_a_version_again_that_it_rolled_back(replicas: list[hps.HPS], write: Write) -> None:
    one, other = replicas
    write(2, retrained())
    for _ in range(2):
        one.change_fleet("ranker", "canary", canary=0.25)
        follow(one, other)
        assert [ended(server) for server in replicas] == [("running", "")] * 2
        one.rollouts.active["ranker"].counts.new.errors += 100
        one.rollouts.tick()
        follow(one, other)
        assert [ended(server)[0] for server in replicas] == ["rolled back"] * 2
