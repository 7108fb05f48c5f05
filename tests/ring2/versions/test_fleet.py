"""Replicas of a fleet over the service, by commands and in processes: `serving.json` is followed, and forgotten by none.

What a replica makes of a document is shown in tests/ring1/versions.
"""

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest
from typer.testing import CliRunner, Result

import hps
from hps.filesystems.local import LocalFileSystem
from hps.ground.registry import IMPLEMENTATIONS
from hps.testing.waiting import wait_until
from hps.tools.cli.app import app
from tests.ring1.versions.test_following import reason, said
from tests.ring1.versions.test_following import replica as replica  # fixtures
from tests.ring1.versions.test_following import repository as repository
from tests.ring1.versions.test_pins import Make, served, write
from tests.servers.running_service import running_service
from tests.servers.served_process import ServedProcess


def run(*arguments: str, code: int = 0) -> Result:
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    assert result.exit_code == code, result.output
    return result


def test_the_service_and_the_commands_change_and_compare_a_fleet(replica: Make, repository: Path) -> None:
    with running_service(replica("a")) as one, running_service(replica("b")) as two:
        both = ("models", "--fleet", one.url, two.url)
        assert "all replicas agree" in run(*both).output
        output = run("rollback", "ranker", "--fleet", "--url", one.url).output
        assert "the fleet serves version 2 (rollback)" in output
        assert "this server serves version 2" in output
        wait_until(lambda: served(two.app.lifecycle.server) == 2, "the other replica follows")
        assert run(*both).output.count("yes") == 2
        run("deploy", "ranker", "--version", "3", "--fleet", "--url", two.url)
        wait_until(lambda: served(one.app.lifecycle.server) == 3, "a second change")
        assert "does not exist" not in run("deploy", "ranker", "--version", "9", "--fleet", "--url", one.url, code=2).output
        metrics = one.client.get("/metrics").text
        assert 'hps_fleet_version_followed{model="ranker"} 1' in metrics
        (repository / "ranker" / "serving.json").write_text("{")
        wait_until(
            lambda: 'hps_fleet_version_followed{model="ranker"} 0' in one.client.get("/metrics").text,
            "a document that is damaged",
        )
        for listed in (run(*both, code=1), run("models", one.url)):
            assert "is not a serving document" in listed.output
        assert "the fleet serves version 3" in one.app.lifecycle.server.stats().models[0].pinned
        assert (served(one.app.lifecycle.server), served(two.app.lifecycle.server)) == (3, 3)
        run("unpin", "ranker", "--fleet", "--url", one.url)
        wait_until(lambda: "all replicas agree" in CliRunner().invoke(app, both).output, "a new document heals it")


class RemoteFileSystem(LocalFileSystem):
    """Files of a host, `remote:///path`, that may be away."""

    is_local = False
    away: ClassVar[bool] = False


def _of_the_host(name: str) -> Callable[..., Any]:
    def call(self: RemoteFileSystem, path: str, *arguments: Any) -> Any:
        if self.away:
            raise hps.ModelSourceError(f"opening {path}: no answer")
        return getattr(LocalFileSystem, name)(self, path.removeprefix("remote://"), *arguments)

    return call


for _name in ("exists", "status", "read_into", "directories", "list", "create", "replace", "delete"):
    setattr(RemoteFileSystem, _name, _of_the_host(_name))


def test_a_start_waits_for_the_host_of_the_repository(replica: Make, repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(IMPLEMENTATIONS["filesystem"], "remote", (f"{__name__}:RemoteFileSystem", "nothing"))
    monkeypatch.setattr("hps.serve.engine.lifecycle.FIRST_RETRY_S", 0.05)
    document = replica() | {"model_repository": f"remote://{repository}"}
    with running_service(document) as service:
        assert (repository / "ranker" / "checks-3.json").exists(), "also the reports of checks are the host's"
        run("rollback", "ranker", "--fleet", "--url", service.url)
        monkeypatch.setattr(RemoteFileSystem, "away", True)
        lifecycle = service.app.lifecycle
        wait_until(lambda: "no answer" in reason(lifecycle.server), "it says that the host is away")
        assert lifecycle.not_ready_reason == ""
        assert served(lifecycle.server) == 2
        answer = service.client.post("/v1/models/ranker/fleet", json={"change": "rollback"})
        assert (answer.status_code, served(lifecycle.server)) == (503, 2)

    def start_while_it_is_away() -> None:
        monkeypatch.setattr(RemoteFileSystem, "away", True)
        with running_service(document, ready=False, first_retry_s=0.05) as service:
            lifecycle = service.app.lifecycle
            wait_until(lambda: "no answer; next try in" in lifecycle.not_ready_reason, "it waits")
            assert service.client.get("/v2/health/ready").status_code == 503
            assert lifecycle.failure is None
            monkeypatch.setattr(RemoteFileSystem, "away", False)
            wait_until(lambda: not lifecycle.not_ready_reason, "it is ready when the host is back")
            assert (served(lifecycle.server), reason(lifecycle.server)) == (2, "")

    for _ in range(2):
        start_while_it_is_away()


def test_a_change_that_says_too_little_or_too_much_is_refused(replica: Make, repository: Path) -> None:
    wrong = ({}, {"change": "undeploy"}, {"change": "rollback", "version": "2"}, {"change": "deploy", "versoin": "2"})
    with running_service(replica()) as service:
        for body in wrong:
            assert service.client.post("/v1/models/ranker/fleet", json=body).status_code == 400
        assert not (repository / "ranker" / "serving.json").exists()
        assert service.client.post("/v1/models/other/fleet", json={"change": "rollback"}).status_code == 404


# -- three processes --------------------------------------------------------------------------------------------------------


class Replica:
    """A replica in a process of its own, and a client that looks up one key in it."""

    def __init__(self, document: dict[str, Any], directory: Path) -> None:
        directory.mkdir()
        self.repository = Path(document["model_repository"])
        self.process = ServedProcess(document, directory, fronts=0)
        self.client = httpx.Client(timeout=30)

    def version(self) -> int:
        """The version that answers, by its row; -1 if none does."""
        try:
            answer = self.client.post(f"{self.process.url}/v1/models/ranker/lookup", json={"tables": {"item": [7]}})
        except httpx.HTTPError:
            return -1
        return int(answer.json()["tables"]["item"][0][0]) if answer.status_code == 200 else -1

    def status(self) -> dict[str, Any]:
        (model,) = self.client.get(f"{self.process.url}/v1/models").json()["models"]
        fleet: dict[str, Any] = model["fleet"]
        return fleet

    @contextmanager
    def cut_off(self) -> Iterator[None]:
        """Without its way to the repository."""
        aside = self.repository.with_suffix(".aside")
        self.repository.rename(aside)
        wait_until(lambda: "reason" in self.status(), "it says that the repository is away")
        yield
        aside.rename(self.repository)

    def restart(self) -> None:
        self.process.stop(signal.SIGKILL)
        self.process.start()


@pytest.fixture
def three(replica: Make, tmp_path: Path) -> Iterator[list[Replica]]:
    with ExitStack() as stack:
        replicas = [Replica(replica(name, repository_poll_s=0.5), tmp_path / name) for name in "abc"]
        for one in replicas:
            stack.callback(one.client.close)
            stack.enter_context(one.process)
        yield replicas


def all_serve(replicas: list[Replica], version: int) -> None:
    wait_until(lambda: [one.version() for one in replicas] == [version] * len(replicas), f"all serve version {version}")


def rounds_of_a_fleet(replicas: list[Replica], repository: Path, turns: range) -> None:
    """Deploy a version, roll it back, kill, restart and cut off replicas; in odd turns, one is killed while it is rolled back.

    A replica that is started after a roll-back must never answer from the withdrawn version.
    """
    for turn in turns:
        bad = 4 + turn
        write(repository / "ranker", bad)
        changer, victim, other = (replicas[(turn + place) % 3] for place in range(3))
        run("deploy", "ranker", "--version", str(bad), "--fleet", "--url", changer.process.url)
        all_serve(replicas, bad)
        if turn % 2:  # killed, and cut off from the repository, while the fleet is rolled back
            victim.process.stop(signal.SIGKILL)
        with other.cut_off():
            run("rollback", "ranker", "--fleet", "--url", changer.process.url)
            all_serve([changer] if turn % 2 else [changer, victim], 3)
            assert other.version() == bad, "what it serves goes on"
            refused = other.client.post(f"{other.process.url}/v1/models/ranker/fleet", json={"change": "deploy"})
            assert refused.status_code in (400, 404, 503), refused.text
        if turn % 2:
            victim.process.start()
            assert victim.version() == 3, victim.process.log()
        all_serve(replicas, 3)
        victim.restart()
        assert victim.version() == 3, victim.process.log()
        with ExitStack() as stack:
            for one in replicas:
                stack.enter_context(one.cut_off())
            assert [one.version() for one in replicas] == [3, 3, 3]
        wait_until(lambda: all(one.status()["follows"] for one in replicas), "they see it again")
        assert [one.version() for one in replicas] == [3, 3, 3]
    assert said(repository)["withdrawn"] == [str(4 + turn) for turn in turns]


def test_three_processes_agree_over_changes_and_kills(three: list[Replica], repository: Path) -> None:
    assert [one.version() for one in three] == [3, 3, 3]
    rounds_of_a_fleet(three, repository, range(1, 2))
