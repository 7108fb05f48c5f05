"""A version that somebody chose, by a roll-back or by its number, stays over polls and restarts until they end it."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

import hps
from hps.cli.app import app
from hps.ground.progress import NoProgress
from hps.testing.waiting import wait_until
from tests.servers.running_service import document_of, model_of, running_service

KEYS = np.arange(100)
Make = Callable[..., dict[str, Any]]


def write(directory: Path, version: int) -> None:
    hps.write_sparse_model(directory / str(version) / "item", (KEYS, np.full((KEYS.size, 4), version, np.float32)))


@pytest.fixture
def home(tmp_path: Path) -> Path:
    home = tmp_path / "versions"
    for version in (1, 2, 3):
        write(home, version)
    return home


@pytest.fixture
def document(tmp_path: Path, home: Path) -> Make:
    def make(persistent: bool = True, mode: str = "none", **more: Any) -> dict[str, Any]:
        model = model_of("ranker", ["item"], {"item": 4}, version_path=str(home), gpucacheper=1.0, **more)
        service = {"model_control_mode": mode, "repository_poll_s": 0.1} if mode == "poll" else {"model_control_mode": mode}
        return document_of(model, persistent=tmp_path / "rocksdb" if persistent else None, service=service)

    return make


def served(server: hps.HPS) -> int:
    """The version that answers, which is the one that the server names."""
    (vector,) = server.lookup([7], "ranker", "item")
    assert server.model("ranker").version == str(int(vector[0]))
    return int(vector[0])


def pinned(server: hps.HPS) -> tuple[str, str] | None:
    pin = server.pin("ranker")
    return None if pin is None else (pin.version, pin.by)


def run(*arguments: str) -> Result:
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    return result


def test_a_roll_back_outlasts_restarts_and_newer_versions_until_it_is_unpinned(document: Make, home: Path) -> None:
    with hps.HPS(document()) as server:
        assert (served(server), pinned(server)) == (3, None)
        assert server.rollback("ranker").version == "2"
        assert pinned(server) == ("2", "rollback")
    for restart in range(2):
        with hps.HPS(document()) as server:
            assert (served(server), pinned(server)) == (2, ("2", "rollback")), f"restart {restart + 1}"
            assert server.poll() == {}
    write(home, 4)
    with hps.HPS(document()) as server:
        assert served(server) == 2
        assert server.poll() == {}, "a newer version is not taken"
        assert server.rollback("ranker").version == "1", "again, to the next one below"
    with hps.HPS(document()) as server:
        assert (served(server), pinned(server)) == (1, ("1", "rollback")), "the second roll-back"
        assert server.unpin("ranker").version == "4"
        assert (served(server), pinned(server)) == (4, None)
        assert server.poll() == {}
    with hps.HPS(document()) as server:
        assert (served(server), pinned(server)) == (4, None)
        assert server.unpin("ranker").version == "4", "nothing to end"


def test_polling_keeps_to_the_pin_and_takes_the_newest_version_after_it(document: Make, home: Path) -> None:
    with hps.HPS(document()) as server:
        server.rollback("ranker")
        assert server.poll() == {}
        write(home, 4)
        assert server.poll() == {}
        hps.write_sparse_model(home / "2" / "item", (KEYS, np.full((KEYS.size, 4), 20, np.float32)), overwrite=True)
        assert server.poll() == {"ranker": None}, "the files of the pinned version were replaced"
        assert (server.model("ranker").version, server.lookup([7], "ranker", "item")[0, 0]) == ("2", 20)
        server.unpin("ranker")
        assert served(server) == 4
        write(home, 5)
        assert server.poll() == {"ranker": None}
        assert served(server) == 5


def test_a_version_that_was_named_is_pinned_and_deploy_without_one_ends_that(document: Make) -> None:
    with hps.HPS(document()) as server:
        server.deploy("ranker", "1")
    with hps.HPS(document()) as server:
        assert (served(server), pinned(server)) == (1, ("1", "deploy"))
        server.deploy("ranker", "2")
    with hps.HPS(document()) as server:
        assert (served(server), pinned(server)) == (2, ("2", "deploy"))
        assert server.deploy("ranker").version == "3"
        assert pinned(server) is None
    with hps.HPS(document()) as server:
        assert served(server) == 3


def test_a_change_that_fails_leaves_the_pin_as_it_is(document: Make, home: Path) -> None:
    with hps.HPS(document()) as server:
        server.rollback("ranker")
        shutil.rmtree(home / "3")
        (home / "3" / "item").mkdir(parents=True)
        for change in (server.unpin, server.deploy, lambda name: server.deploy(name, "3")):
            with pytest.raises(hps.ModelFileError):
                change("ranker")
            assert (served(server), pinned(server)) == (2, ("2", "rollback"))
    with hps.HPS(document()) as server:
        assert (served(server), pinned(server)) == (2, ("2", "rollback"))


def test_a_pinned_version_whose_files_are_gone_gives_way_to_the_one_below_and_comes_back(
    document: Make, home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with hps.HPS(document()) as server:
        server.rollback("ranker")
        (home / "2").rename(home / "aside")
        assert server.poll() == {}
        assert served(server) == 2, "what serves goes on"
    assert "version 2, which serves, is pinned by rollback" in caplog.text
    with hps.HPS(document()) as server:
        assert (served(server), pinned(server)) == (1, ("2", "rollback"))
        assert "its files are gone: version 1 serves" in caplog.text
        assert "whose files are gone, is pinned by rollback" in server.stats().models[0].pinned
        assert server.poll() == {}
        (home / "aside").rename(home / "2")
        assert server.poll() == {"ranker": None}
        assert served(server) == 2


def test_no_newer_version_serves_in_place_of_a_pinned_one_that_is_gone(document: Make, home: Path) -> None:
    with hps.HPS(document()) as server:
        server.deploy("ranker", "1")
    shutil.rmtree(home / "1")
    with hps.HPS(document(), deploy_models=False) as server:
        with pytest.raises(
            hps.UnknownVersionError, match=r"version 1 is pinned by deploy, .* its files are gone; got versions 2, 3"
        ):
            server.deploy("ranker", pin=False)
        assert server.poll() == {}
        assert server.models == ()
        assert server.unpin("ranker").version == "3"
        assert served(server) == 3


def test_versions_beside_the_pinned_one_are_those_of_the_policy_up_to_it(document: Make, home: Path) -> None:
    """And the pinned version answers all along, also while others are loaded beside it."""
    for version in (4, 5, 6):
        write(home, version)
    several = document(version_policy={"latest": {"num_versions": 3}})

    def available(server: hps.HPS) -> set[str]:
        return {one.version for one in server.versions("ranker") if one.state in ("serving", "available")}

    with hps.HPS(several) as server:
        assert (served(server), available(server)) == (6, {"4", "5", "6"})
        assert server.deploy("ranker", "3").version == "3"
        answers = []

        class Looking(NoProgress):
            def advance(self, tag: str, rows: int) -> None:
                answers.append(served(server))

        assert server.poll(progress=Looking()) == {"ranker": None}
        assert set(answers) == {3}
        assert (served(server), available(server)) == (3, {"1", "2", "3"})
        assert server.poll() == {}
    with hps.HPS(several) as server:
        assert (served(server), available(server)) == (3, {"1", "2", "3"})
        server.undeploy("ranker", "3")
        assert (served(server), pinned(server)) == (2, None), "whoever takes the version out does not want it back"


def test_without_a_persistent_database_it_is_said_that_a_restart_ends_the_pin(document: Make, home: Path) -> None:
    with running_service(document(persistent=False, mode="poll")) as service:
        answer = service.client.post("/v1/models/ranker/rollback").json()
        assert (answer["version"], answer["pinned"]["version"]) == ("2", "2")
        assert "a restart ends it: no persistent_db keeps it" in answer["pinned"]["problem"]
        assert "a restart ends it" in run("models", service.url).output
        write(home, 4)
        polls = service.app.lifecycle.server.poll
        assert polls() == {}
        assert served(service.app.lifecycle.server) == 2


def test_a_pin_that_cannot_be_written_is_made_and_its_loss_is_said(document: Make, tmp_path: Path) -> None:
    with hps.HPS(document()) as server:
        (tmp_path / "rocksdb" / "hps-pins").write_text("no directory")
        server.rollback("ranker")
        pin = server.pin("ranker")
        assert pin is not None
        assert "a restart ends it" in pin.problem
        assert served(server) == 2


DAMAGED = [
    "",
    "{",
    "[]",
    "[" * 100_000,
    '{"model": "ranker", "version": "../3", "by": "rollback", "since": 1}',
    '{"model": "other", "version": "2", "by": "rollback", "since": 1}',
    '{"model": "ranker", "version": "2", "by": "rollback", "since": 1e300}',
]


@pytest.mark.parametrize("text", DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_pin_serves_nothing_by_guess_and_can_be_ended(document: Make, tmp_path: Path, text: str) -> None:
    with hps.HPS(document()) as server:
        server.rollback("ranker")
    (file,) = (tmp_path / "rocksdb" / "hps-pins").iterdir()
    file.write_text(text)
    with hps.HPS(document(), deploy_models=False) as server:
        with pytest.raises(hps.DatabaseCorruptError, match="hps unpin"):
            server.deploy("ranker", pin=False)
        assert server.unpin("ranker").version == "3"
    with hps.HPS(document()) as server:
        assert served(server) == 3


@pytest.mark.parametrize("mode", ["none", "poll", "explicit"])
def test_a_service_starts_with_the_pinned_version_and_shows_it(document: Make, home: Path, mode: str) -> None:
    configuration = document(mode=mode)
    if mode == "explicit":
        configuration["service"]["load_models"] = ["ranker"]
    with running_service(configuration) as service:
        output = run("rollback", "ranker", "--url", service.url).output
        assert output.startswith("ranker: version 2 serves (rollback")
        assert "pinned by rollback, 20" in output
    write(home, 4)
    with running_service(configuration) as service:
        server = service.app.lifecycle.server
        wait_until(lambda: not server.change_of("ranker"), "the tables of version 3 are dropped")
        if mode == "explicit":
            for verb in ("unload", "load"):
                answer = service.client.post(f"/v2/repository/models/ranker/{verb}")
                assert answer.status_code == 200, answer.text
        assert served(server) == 2
        [model] = service.client.get("/v1/models").json()["models"]
        assert (model["pinned"]["version"], model["pinned"]["by"]) == ("2", "rollback")
        assert model["pinned"]["text"].startswith("pinned by rollback, 20")
        assert "serving, pinned by rollback, 20" in run("models", service.url).output
        assert service.client.get("/v1/stats").json()["server"]["models"][0]["pinned"] == model["pinned"]["text"]
        assert run("unpin", "ranker", "--url", service.url).output.startswith("ranker: version 4 serves (unpin")
        assert "pinned" not in service.client.get("/v1/models").json()["models"][0]
        answer = service.client.post("/v1/models/ranker/deploy", json={"version": "2"}).json()
        assert answer["pinned"]["text"].startswith("pinned by deploy, 20")
        assert service.client.post("/v1/models/ranker/unpin").json()["version"] == "4"
    with running_service(configuration) as service:
        wait_until(lambda: service.client.get("/v2/health/ready").status_code == 200, "it is ready")
        assert served(service.app.lifecycle.server) == 4
