"""What a fleet serves is a document beside the versions: `serving.json`, which every replica follows and none forgets."""

import json
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, ClassVar

import httpx
import numpy as np
import pytest
from typer.testing import CliRunner, Result

import hps
from hps.cli.app import app
from hps.filesystems.base import FileStatus
from hps.filesystems.local import LocalFileSystem
from hps.ground.progress import NoProgress
from hps.registry import IMPLEMENTATIONS
from hps.testing.waiting import wait_until
from hps.versions.catalog import ModelVersion
from tests.servers.running_service import document_of, model_of, running_service
from tests.servers.served_process import ServedProcess

KEYS = np.arange(50)
Make = Callable[..., dict[str, Any]]


def write(model: Path, version: int) -> None:
    hps.write_sparse_model(model / str(version) / "item", (KEYS, np.full((KEYS.size, 4), version, np.float32)))


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


def served(server: hps.HPS) -> int:
    (vector,) = server.lookup([7], "ranker", "item")
    assert server.model("ranker").version == str(int(vector[0]))
    return int(vector[0])


def follow(server: hps.HPS) -> dict[str, Exception | None]:
    server.read_documents()
    return server.follow()


def run(*arguments: str, code: int = 0) -> Result:
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    assert result.exit_code == code, result.output
    return result


def test_replicas_follow_a_deployment_and_roll_backs_and_a_new_one_does_not_bring_the_withdrawn_version_back(
    replica: Make, repository: Path
) -> None:
    with hps.HPS(replica("a")) as one, hps.HPS(replica("b")) as two:
        assert (served(one), served(two)) == (3, 3)
        assert one.fleet("ranker") is None
        one.change_fleet("ranker", "rollback")
        assert said(repository)["version"] == "2"
        assert said(repository)["withdrawn"] == ["3"]
        for server in (one, two):
            assert follow(server) == {"ranker": None}
            assert follow(server) == {}
            status = server.fleet("ranker")
            assert status is not None
            assert (served(server), status.follows, status.pending, status.reason) == (2, True, False, "")
        two.change_fleet("ranker", "rollback")
        assert [follow(server) for server in (one, two)] == [{"ranker": None}] * 2
        assert (served(one), served(two)) == (1, 1)
    with hps.HPS(replica("a")) as one, hps.HPS(replica("c")) as new:
        assert (served(one), served(new)) == (1, 1), "a restarted one, and one that never was there before"
        with pytest.raises(hps.ConflictError, match=r"no version to go back to from 1; .* withdrawn 3, 2"):
            new.change_fleet("ranker", "rollback")
        write(repository / "ranker", 4)
        new.change_fleet("ranker", "unpin")
        assert [follow(server) for server in (one, new)] == [{"ranker": None}] * 2
        assert (served(one), served(new)) == (4, 4)
        new.change_fleet("ranker", "rollback")
        follow(new)
        assert served(new) == 1, "the versions between were withdrawn"
        new.change_fleet("ranker", "deploy", "3")
        follow(new)
        assert (served(new), said(repository)["withdrawn"]) == (3, ["2", "4"])
        new.change_fleet("ranker", "unpin")
        follow(new)
        assert served(new) == 3, "of the versions that are not withdrawn, the newest"


def test_one_replica_cannot_be_changed_alone(replica: Make) -> None:
    with hps.HPS(replica()) as server:
        server.change_fleet("ranker", "deploy", "2")
        follow(server)
        for change in (
            lambda: server.deploy("ranker"),
            lambda: server.deploy("ranker", "3"),
            lambda: server.rollback("ranker"),
            lambda: server.unpin("ranker"),
            lambda: server.undeploy("ranker", "2"),
        ):
            with pytest.raises(hps.ConflictError, match=r"--fleet"):
                change()
        assert served(server) == 2
    with hps.HPS(replica(), deploy_models=False) as server, pytest.raises(hps.ConflictError, match=r"--fleet"):
        server.deploy("ranker", "3")


def test_a_pin_of_one_replica_ends_when_it_follows_the_fleet(replica: Make, repository: Path) -> None:
    with hps.HPS(replica()) as server:
        server.deploy("ranker", "1")
        server.change_fleet("ranker", "deploy", "2")
        follow(server)
        assert (served(server), server.pin("ranker")) == (2, None)


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


# -- what goes wrong --------------------------------------------------------------------------------------------------------


def write_document(repository: Path, version: str, **others: Any) -> None:
    """Write a document by hand."""
    now = time.time()
    content = {
        "format": 1,
        "number": int(now * 1e6),
        "version": version,
        "by": "deploy",
        "since": now,
        "writer": "hand",
        **others,
    }
    (repository / "ranker" / "serving.json").write_text(json.dumps(content))


def reason(server: hps.HPS) -> str:
    status = server.fleet("ranker")
    assert status is not None
    assert status.follows == (not status.reason)
    return status.reason


def test_a_version_that_does_not_exist_yet_is_awaited(replica: Make, repository: Path) -> None:
    with hps.HPS(replica()) as server:
        server.change_fleet("ranker", "deploy", "2")
        follow(server)
        for version in ("5", "6"):
            write_document(repository, version, previous="2")
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


def test_a_version_that_cannot_be_loaded_changes_nothing_and_a_roll_back_is_followed_at_once(
    replica: Make, repository: Path
) -> None:
    with hps.HPS(replica()) as server:
        for version in (4, 5):
            write(repository / "ranker", version)
            (repository / "ranker" / str(version) / "item" / "emb_vector").write_bytes(b"short")
            server.change_fleet("ranker", "deploy", str(version))
            for _ in range(2):
                assert all(isinstance(error, hps.ModelFileError) for error in follow(server).values())
                assert served(server) == 3
                assert "emb_vector" in reason(server)
            server.change_fleet("ranker", "rollback")
            assert reason(server) == "", "what served all along"
            server.change_fleet("ranker", "deploy", "2")
            assert follow(server) == {"ranker": None}, "no pause after the failure of another version"
            assert (served(server), reason(server)) == (2, "")
            server.change_fleet("ranker", "deploy", "3")
            follow(server)


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
            assert {one.version for one in server.versions("ranker")} == {"3"}
        assert follow(server) == {}
        assert said(repository)["withdrawn"] == ["4", "5"]


def test_a_change_is_pending_until_the_replica_has_tried_it(
    replica: Make, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hps.HPS(replica()) as server:
        for version in ("2", "1"):
            server.change_fleet("ranker", "deploy", version)
            pending: list[bool] = []
            examine = server.catalog.fingerprints

            def look(one: ModelVersion, examine: Any = examine, pending: list[bool] = pending) -> tuple[str, ...]:
                status = server.fleet("ranker")
                pending.append(status is not None and status.pending and not status.follows)
                found: tuple[str, ...] = examine(one)
                return found

            with monkeypatch.context() as patch:
                patch.setattr(server.catalog, "fingerprints", look)
                assert follow(server) == {"ranker": None}
            assert pending
            assert all(pending)
            status = server.fleet("ranker")
            assert status is not None
            assert (status.follows, status.pending) == (True, False)


def test_what_cannot_be_a_document_changes_nothing_and_the_last_one_outlasts_a_restart(replica: Make, repository: Path) -> None:
    document = repository / "ranker" / "serving.json"
    with hps.HPS(replica("a")) as server:
        server.change_fleet("ranker", "rollback")
        follow(server)
        old = document.read_bytes()
        server.change_fleet("ranker", "rollback")
        follow(server)
        assert served(server) == 1

    def put(text: bytes) -> Callable[[], object]:
        return lambda: document.write_bytes(text)

    spoilt = {
        "is not a serving document": put(b"{"),
        "is not a serving document \\(number": put(
            b'{"format": 1, "number": "one", "by": "deploy", "since": 1, "writer": "x"}'
        ),
        "nested|not a serving document": put(b"[" * 10_000),
        "got 20000 bytes, expected at most": put(b" " * 20_000),
        "a newer release of hps wrote it": put(b'{"format": 2, "serve": "3"}'),
        "it went back from number": put(old),
        "it is gone; the last one said version 1": document.unlink,
        "it is a directory": document.mkdir,
    }
    for why, spoil in spoilt.items():
        spoil()
        with hps.HPS(replica("a")) as server:
            for _ in range(2):
                assert re.search(why, reason(server)), reason(server)
                assert (served(server), follow(server), server.poll()) == (1, {}, {}), why
    document.rmdir()
    document.write_bytes(b"{")
    with hps.HPS(replica("new"), deploy_models=False) as new:
        for _ in range(2):
            with pytest.raises(hps.ModelFileError, match="is not a serving document"):
                new.deploy("ranker", pin=False)
            assert new.models == (), "nobody knows what was withdrawn"
    with hps.HPS(replica("a")) as server:
        server.change_fleet("ranker", "deploy", "2")
        assert (follow(server), served(server), reason(server)) == ({"ranker": None}, 2, "")


def test_a_disk_that_is_not_mounted_undeploys_nothing(replica: Make, repository: Path) -> None:
    with hps.HPS(replica()) as server:
        server.change_fleet("ranker", "rollback")
        follow(server)
        (repository / "ranker").rename(repository.with_name("elsewhere"))
        for _ in range(2):
            assert (server.poll(), follow(server)) == ({}, {})
            assert served(server) == 2
            assert "it is gone" in reason(server)
        repository.with_name("elsewhere").rename(repository / "ranker")
        assert (server.poll(), served(server), reason(server)) == ({}, 2, "")


def test_a_replica_leaves_a_fleet_whose_document_was_deleted(replica: Make, repository: Path) -> None:
    with hps.HPS(replica()) as server:
        server.change_fleet("ranker", "rollback")
        follow(server)
        (repository / "ranker" / "serving.json").unlink()
        follow(server)
        assert server.unpin("ranker").version == "3"
        assert server.fleet("ranker") is None
        server.rollback("ranker")
    with hps.HPS(replica()) as server:
        assert (served(server), server.fleet("ranker")) == (2, None), "pinned, as before there was a fleet"


class RemoteFileSystem(LocalFileSystem):
    """Files of a host, `remote:///path`, that may be away."""

    is_local = False
    away: ClassVar[bool] = False

    def _place(self, path: str) -> str:
        if self.away:
            raise hps.ModelSourceError(f"opening {path}: no answer")
        return path.removeprefix("remote://")

    def exists(self, path: str) -> bool:
        return super().exists(self._place(path))

    def status(self, path: str) -> FileStatus:
        return super().status(self._place(path))

    def read_into(self, path: str, offset: int, buffer: memoryview, version: str = "") -> None:
        super().read_into(self._place(path), offset, buffer, version)

    def directories(self, path: str) -> list[str]:
        return super().directories(self._place(path))

    def list(self, path: str) -> list[str]:
        return super().list(self._place(path))

    def replace(self, path: str, content: bytes, version: str) -> str:
        return super().replace(self._place(path), content, version)


def test_a_replica_that_starts_while_the_host_of_the_repository_is_away_waits_and_serves_no_withdrawn_version(
    replica: Make, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(IMPLEMENTATIONS["filesystem"], "remote", (f"{__name__}:RemoteFileSystem", "nothing"))
    monkeypatch.setattr("hps.service.lifecycle.FIRST_RETRY_S", 0.05)
    document = replica() | {"model_repository": f"remote://{repository}"}
    with running_service(document) as service:
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


def test_without_a_directory_of_versions_there_is_no_fleet(repository: Path) -> None:
    model = model_of("m", [str(repository / "ranker" / "1" / "item")], {"item": 4})
    with hps.HPS(document_of(model)) as server, pytest.raises(hps.ConflictError, match="set model_repository or version_path"):
        server.change_fleet("m", "rollback")


@pytest.mark.parametrize(
    "body", [{}, {"change": "undeploy"}, {"change": "rollback", "version": "2"}, {"change": "deploy", "versoin": "2"}]
)
def test_a_change_that_says_too_little_or_too_much_is_refused(replica: Make, repository: Path, body: dict[str, str]) -> None:
    with running_service(replica()) as service:
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


def rounds_of_a_fleet(replicas: list[Replica], repository: Path, rounds: int) -> list[float]:
    """Deploy a version, roll it back, kill, restart and cut off replicas.

    Returns the seconds from each change to the agreement of all that run and see the repository.

    A replica that is started after a roll-back must never answer from the withdrawn version.
    """
    seconds = []
    for turn in range(rounds):
        bad = 4 + turn
        write(repository / "ranker", bad)
        changer, victim, other = (replicas[(turn + place) % 3] for place in range(3))
        began = time.monotonic()
        run("deploy", "ranker", "--version", str(bad), "--fleet", "--url", changer.process.url)
        all_serve(replicas, bad)
        seconds.append(time.monotonic() - began)
        if turn % 2:  # killed, and cut off from the repository, while the fleet is rolled back
            victim.process.stop(signal.SIGKILL)
        with other.cut_off():
            began = time.monotonic()
            run("rollback", "ranker", "--fleet", "--url", changer.process.url)
            all_serve([changer] if turn % 2 else [changer, victim], 3)
            seconds.append(time.monotonic() - began)
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
    assert said(repository)["withdrawn"] == [str(4 + turn) for turn in range(rounds)]
    return seconds


def test_a_fleet_of_three_processes_agrees_over_changes_kills_and_an_absent_repository(
    three: list[Replica], repository: Path
) -> None:
    assert [one.version() for one in three] == [3, 3, 3]
    rounds_of_a_fleet(three, repository, 2)


@pytest.mark.slow
def test_a_fleet_of_three_processes_agrees_for_fifty_rounds(three: list[Replica], repository: Path) -> None:
    seconds = rounds_of_a_fleet(three, repository, 50)
    print(f"from a change to agreement: median {np.median(seconds):.2f} s, longest {max(seconds):.2f} s")  # noqa: T201
