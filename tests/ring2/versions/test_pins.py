"""A service starts with the pinned version and shows it; what a pin does to versions is in tests/ring1/versions."""

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from hps.testing.waiting import wait_until
from hps.tools.cli.app import app
from tests.ring1.versions.test_pins import Make, served, write
from tests.ring1.versions.test_pins import document as document  # fixtures
from tests.ring1.versions.test_pins import home as home
from tests.servers.running_service import running_service


def run(*arguments: str) -> Result:
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    return result


def test_without_a_persistent_database_it_is_said_that_a_restart_ends_the_pin(document: Make) -> None:
    with running_service(document(persistent=False, mode="poll")) as service:
        answer = service.client.post("/v1/models/ranker/rollback").json()
        assert (answer["version"], answer["pinned"]["version"]) == ("2", "2")
        assert "a restart ends it: no persistent_db keeps it" in answer["pinned"]["problem"]
        assert "a restart ends it" in run("models", service.url).output


@pytest.mark.parametrize("mode", ["poll", "explicit"])
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
        output = run("deploy", "ranker", "--url", service.url).output
        assert output.startswith("ranker: version 4 serves (deploy")
        assert "no longer pinned to version 2 (pinned by rollback, 20" in output
        assert "pinned" not in run("deploy", "ranker", "--url", service.url).output, "nothing was pinned any more"
        assert "pinned" not in service.client.get("/v1/models").json()["models"][0]
        answer = service.client.post("/v1/models/ranker/deploy", json={"version": "2"}).json()
        assert answer["pinned"]["text"].startswith("pinned by deploy, 20")
        assert service.client.post("/v1/models/ranker/unpin").json()["version"] == "4"
    with running_service(configuration) as service:
        wait_until(lambda: service.client.get("/v2/health/ready").status_code == 200, "it is ready")
        assert served(service.app.lifecycle.server) == 4
