"""A replica serves what its fleet's document, its pin or its policy says, and names every version and why it does not serve."""

import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import hps
from hps.ground.progress import NoProgress
from hps.testing.waiting import wait_until
from hps.versions.catalog import ModelVersion
from hps.versions.fleet import FleetChange
from tests.ring1.versions.test_pins import Make, served, write
from tests.servers.running_service import document_of, model_of


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with one model of three versions."""
    repository = tmp_path / "repository"
    entry = model_of("ranker", ["item"], {"item": 4}, gpucacheper=1.0)
    for version in (1, 2, 3):
        write(repository / "ranker", version)
    (repository / "ranker" / "model.json").write_text(json.dumps(entry))
    return repository


@pytest.fixture
def replica(tmp_path: Path, repository: Path) -> Make:
    def make(name: str = "a", persistent: bool = True, **service: Any) -> dict[str, Any]:
        service = {"repository_poll_s": 0.1, **service}
        document = document_of(persistent=tmp_path / f"rocksdb-{name}" if persistent else None, service=service)
        (link := tmp_path / f"repository-{name}").exists() or link.symlink_to(repository)  # its own way to the repository
        return {**document, "model_repository": str(link)}

    return make


def said(repository: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((repository / "ranker" / "serving.json").read_text())
    return content


def follow(server: hps.HPS) -> dict[str, Exception | None]:
    server.read_documents()
    return server.follow()


def change(server: hps.HPS, by: FleetChange, version: str | None = None) -> int:
    """Change the fleet and follow; returns the version that answers."""
    server.change_fleet("ranker", by, version)
    follow(server)
    return served(server)


def write_document(repository: Path, version: str, previous: str) -> None:
    """Write a document by hand."""
    now = time.time()
    content = {"format": 1, "number": int(now * 1e6), "version": version, "previous": previous}
    content |= {"by": "deploy", "since": now, "writer": "hand"}
    (repository / "ranker" / "serving.json").write_text(json.dumps(content))


def reason(server: hps.HPS) -> str:
    status = server.fleet("ranker")
    assert status is not None
    assert status.follows == (not status.reason)
    return status.reason


def test_replicas_follow_changes_and_a_new_one_brings_no_withdrawn_version_back(replica: Make, repository: Path) -> None:
    with hps.HPS(replica("a")) as one, hps.HPS(replica("b")) as two:
        assert (served(one), served(two), one.fleet("ranker")) == (3, 3, None)
        one.change_fleet("ranker", "rollback")
        assert (said(repository)["version"], said(repository)["withdrawn"]) == ("2", ["3"])
        for server in (one, two):
            assert (follow(server), follow(server)) == ({"ranker": None}, {})
            status = server.fleet("ranker")
            assert status is not None
            assert (served(server), status.follows, status.pending, status.reason) == (2, True, False, "")
        assert change(two, "rollback") == 1
        assert (follow(one), served(one)) == ({"ranker": None}, 1)
    with hps.HPS(replica("a")) as one, hps.HPS(replica("c")) as new:
        assert (served(one), served(new)) == (1, 1), "a restarted one, and one that never was there before"
        with pytest.raises(hps.ConflictError, match=r"no version to go back to from 1; .* withdrawn 3, 2"):
            new.change_fleet("ranker", "rollback")
        write(repository / "ranker", 4)
        assert change(new, "unpin") == 4
        assert (follow(one), served(one)) == ({"ranker": None}, 4)
        assert change(new, "rollback") == 1, "the versions between were withdrawn"
        assert (change(new, "deploy", "3"), said(repository)["withdrawn"]) == (3, ["2", "4"])
        assert change(new, "unpin") == 3, "of the versions that are not withdrawn, the newest"


def test_one_replica_cannot_be_changed_alone_and_its_pin_ends_when_it_follows(replica: Make) -> None:
    with hps.HPS(replica()) as server:
        server.deploy("ranker", "1")
        assert (change(server, "deploy", "2"), server.pin("ranker")) == (2, None)
        for alone in (
            server.deploy,
            server.rollback,
            server.unpin,
            partial(server.deploy, version="3"),
            partial(server.undeploy, version="2"),
        ):
            with pytest.raises(hps.ConflictError, match=r"--fleet"):
                alone("ranker")
        assert served(server) == 2
    with hps.HPS(replica(), deploy_models=False) as server, pytest.raises(hps.ConflictError, match=r"--fleet"):
        server.deploy("ranker", "3")


def test_a_version_that_does_not_exist_yet_is_awaited(replica: Make, repository: Path) -> None:
    with hps.HPS(replica()) as server:
        server.change_fleet("ranker", "deploy", "2")
        follow(server)
        for version in ("5", "6"):
            write_document(repository, version, "2")
            for _ in range(2):
                assert follow(server) == {}
                assert server.poll() == {}
                assert served(server) == 2
                assert "there is no such version (yet)" in reason(server)
        with hps.HPS(replica("new")) as new:
            assert served(new) == 2, "what was served before, not the next one below"
            write(repository / "ranker", 6)
            for one in (server, new):
                assert follow(one) == {"ranker": None}
                assert (served(one), reason(one)) == (6, "")


def test_a_version_that_cannot_be_examined_changes_nothing(replica: Make, repository: Path) -> None:
    with hps.HPS(replica()) as server:
        for version in (4, 5):
            write(repository / "ranker", version)
            (repository / "ranker" / str(version) / "item" / "emb_vector").write_bytes(b"short")
            server.change_fleet("ranker", "deploy", str(version))
            for _ in range(2):
                assert (follow(server), served(server)) == ({}, 3), "no load is tried"
                assert "emb_vector" in reason(server)
            server.change_fleet("ranker", "rollback")
            assert reason(server) == "", "what served all along"
            assert (change(server, "deploy", "2"), reason(server)) == (2, "")
            assert change(server, "deploy", "3") == 3


def test_a_load_that_fails_changes_nothing_and_another_version_does_not_wait_for_the_next_try(replica: Make) -> None:
    class Failing(NoProgress):
        loads = 0

        def start(self, tag: str, rows: int, size_bytes: int) -> None:
            self.loads += 1
            raise hps.ModelFileError("it cannot be read to the end")

    failing = Failing()
    with hps.HPS(replica()) as server:
        for version in ("1", "2"):
            server.change_fleet("ranker", "deploy", version)
            server.read_documents()
            outcome = server.follow(progress=failing)
            assert [str(error) for error in outcome.values()] == ["it cannot be read to the end"]
            for _ in range(2):
                assert server.follow(progress=failing) == {}, "it is not due yet"
                assert (served(server), reason(server)) == (3, "it cannot be read to the end")
        assert failing.loads == 2
        server.change_fleet("ranker", "deploy", "1")
        assert (follow(server), served(server), reason(server)) == ({"ranker": None}, 1, "")


def test_a_load_that_a_newer_document_supersedes_never_takes_over(replica: Make, repository: Path) -> None:

    class RolledBack(NoProgress):
        def advance(self, tag: str, rows: int) -> None:
            assert server.change_of("ranker") == "deploying"
            server.change_fleet("ranker", "rollback")

    with hps.HPS(replica()) as server:
        for number in (4, 5):
            write(repository / "ranker", number)
            server.change_fleet("ranker", "deploy", str(number))
            server.read_documents()
            assert server.follow(progress=RolledBack()) == {}
            assert (served(server), reason(server)) == (3, "")
            assert {version.version for version in server.versions("ranker")} == {"3"}
        assert follow(server) == {}
        assert said(repository)["withdrawn"] == ["4", "5"]


def test_a_newer_document_ends_a_start_that_goes_on_with_another_version(replica: Make) -> None:
    class Refused(NoProgress):
        loads = 0

        def start(self, tag: str, rows: int, size_bytes: int) -> None:
            self.loads += 1
            if self.loads == 1:
                raise hps.ModelFileError("it cannot be read to the end")

        def advance(self, tag: str, rows: int) -> None:
            server.change_fleet("ranker", "deploy", "1")

    refused = Refused()
    with hps.HPS(replica(), deploy_models=False) as server:
        server.change_fleet("ranker", "deploy", "3")
        with pytest.raises(hps.ModelFileError, match="to the end"):
            server.deploy("ranker", progress=refused, pin=False)
        assert (refused.loads, server.models) == (2, ())
        server.deploy("ranker", pin=False)
        assert served(server) == 1


def test_a_change_is_pending_until_the_replica_has_tried_it(replica: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    with hps.HPS(replica()) as server:
        examine, seen = server.catalog.fingerprints, []

        def status() -> tuple[bool, bool]:
            found = server.fleet("ranker")
            assert found is not None
            return found.pending, found.follows

        def look(one: ModelVersion) -> tuple[str, ...]:
            seen.append(status())
            found: tuple[str, ...] = examine(one)
            return found

        monkeypatch.setattr(server.catalog, "fingerprints", look)
        for version in ("2", "1"):
            seen.clear()
            assert change(server, "deploy", version) == int(version)
            assert set(seen) == {(True, False)}
            assert status() == (False, True)


def test_a_replica_leaves_a_fleet_whose_document_was_deleted(replica: Make, repository: Path) -> None:
    with hps.HPS(replica()) as server:
        assert change(server, "rollback") == 2
        (repository / "ranker" / "serving.json").unlink()
        follow(server)
        assert server.unpin("ranker").version == "3"
        assert server.fleet("ranker") is None
        server.rollback("ranker")
    with hps.HPS(replica()) as server:
        assert (served(server), server.fleet("ranker")) == (2, None), "pinned, as before there was a fleet"


# -- the index of all versions ---------------------------------------------------------------------------------------------


def index(server: hps.HPS) -> list[tuple[str, str, str]]:
    """The versions of `ranker`, once none retires: number, state and reason."""
    wait_until(lambda: "retiring" not in [state for _, state in server.live.versions("ranker")], "no version retires")
    return [(one.version, one.state, one.reason) for one in server.index() if one.model == "ranker"]


def test_the_index_names_every_version_and_why_it_is_not_ready(replica: Make, repository: Path) -> None:
    unloaded = ("unavailable", "not loaded")
    with hps.HPS(replica(), deploy_models=False) as server:
        assert index(server) == [(version, *unloaded) for version in "123"]
        server.deploy("ranker")
        assert index(server) == [("1", *unloaded), ("2", *unloaded), ("3", "ready", "")]
        server.deploy("ranker", "1")
        assert index(server)[2] == ("3", "unavailable", "unloaded; kept for a roll-back")
        (repository / "ranker" / "2" / "item" / "emb_vector").write_bytes(b"short")
        with pytest.raises(hps.ModelFileError) as failed:
            server.deploy("ranker", "2")
        assert index(server)[:2] == [("1", "ready", ""), ("2", *unloaded)], "the policy does not choose version 2"
        server.unpin("ranker")
        with pytest.raises(hps.ModelFileError):
            server.deploy("ranker", "2")
        server.undeploy("ranker")
        (repository / "ranker" / "3").rename(repository / "aside")
        with pytest.raises(hps.ModelFileError) as failed:
            server.deploy("ranker")
        assert index(server) == [("1", *unloaded), ("2", "unavailable", str(failed.value))]


def test_the_index_shows_what_is_being_loaded(replica: Make) -> None:
    seen: list[list[tuple[str, str, str]]] = []

    class Looking(NoProgress):
        def start(self, tag: str, rows: int, size_bytes: int) -> None:
            seen.append([(one.version, one.state, one.reason) for one in server.index()])

    with hps.HPS(replica(), deploy_models=False) as server:
        server.deploy("ranker", progress=Looking())
        assert [entry for entry in seen[0] if entry[1] == "loading"] == [("3", "loading", "")]
        server.deploy("ranker", force=True, progress=Looking())
        assert seen[1][2] == ("3", "ready", ""), "what serves goes on"


def test_the_index_names_models_that_cannot_be_listed(replica: Make, repository: Path) -> None:
    entry = (repository / "ranker" / "model.json").read_text()
    for name, text in (("broken", "{"), ("empty", entry.replace('"ranker"', '"empty"'))):
        (repository / name).mkdir()
        (repository / name / "model.json").write_text(text)
    with hps.HPS(replica(), deploy_models=False) as server:
        server.deploy("ranker")
        broken, empty = sorted((one for one in server.index() if one.model != "ranker"), key=lambda one: one.model)
        assert (broken.version, broken.state, broken.reason) == ("", "unavailable", str(server.catalog.problems["broken"]))
        assert (empty.version, empty.state) == ("", "unavailable")
        assert "got versions none, expected at least one" in empty.reason
        (repository / "ranker").rename(repository.with_name("away"))
        assert index(server) == [("3", "ready", "")], "what serves is named though its files are gone"
