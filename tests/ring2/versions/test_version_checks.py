"""A polling service takes over good versions of a real repository by itself, and holds bad ones, which everybody sees."""

import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

import hps
from hps.configuration.tiers import ModelSourceConfig
from hps.models.sources import ModelSources
from hps.models.writer import write_version
from hps.testing.waiting import wait_until
from hps.tools.cli.app import app
from hps.versions.checks.documents import CheckDocuments
from hps.versions.checks.report import CheckOutcome, CheckReport
from hps.versions.checks.run import VersionCheck
from tests.ring2.versions.test_checks_in_process import (
    DIM,
    FIRST,
    KEYS,
    ROWS,
    SHUFFLED,
    Make,
    Write,
    nonfinite,
    outcome,
    polled,
    retrained,
    state,
)
from tests.ring2.versions.test_checks_in_process import document as document  # fixtures
from tests.ring2.versions.test_checks_in_process import engine as engine
from tests.ring2.versions.test_checks_in_process import home as home
from tests.ring2.versions.test_checks_in_process import write as write
from tests.servers.running_service import RunningService, model_of, running_service, samples
from tests.servers.s3_server import know_only_moto, s3_server

POLLING = {"model_control_mode": "poll", "repository_poll_s": 0.1}
WIDER = np.zeros((ROWS, 2 * DIM), np.float32)
LIKE_WIDER = np.random.default_rng(8).standard_normal((ROWS // 2, 2 * DIM)).astype(np.float32).reshape(ROWS, DIM)


def run(service: RunningService, *arguments: str) -> Result:
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "200", "HPS_URL": service.url})


def versions(service: RunningService) -> dict[str, str]:
    [model] = service.client.get("/v1/models").json()["models"]
    return {version["version"]: version["state"] for version in model["versions"]}


def serving(service: RunningService) -> str:
    return str(service.app.lifecycle.server.model("ranker").version)


@pytest.mark.parametrize(
    ("vectors", "factor", "reason"),
    [
        (SHUFFLED, 1.0, "vectors of item: alignment"),
        (LIKE_WIDER, 1.0, "vectors of item: alignment"),
        (retrained(), -1.0, "scores: correlation -0.99"),
    ],
    ids=["shuffled rows", "rows of another width", "scores of the other sign"],
)
def test_a_bad_version_is_held_and_seen_and_a_good_one_or_a_person_goes_on(
    document: Make, write: Write, vectors: np.ndarray, factor: float, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with running_service({**document(), "service": POLLING}) as service:
        write(2, vectors, factor=factor)
        wait_until(lambda: versions(service).get("2") == "held", "version 2 is held")
        assert serving(service) == "1"
        wait_until(lambda: "version 2 is held" in caplog.text, "it is logged")
        assert caplog.text.count("version 2 is held") == 1
        [model] = service.client.get("/v1/models").json()["models"]
        checks = next(version["checks"] for version in model["versions"] if version["version"] == "2")
        assert (checks["verdict"], checks["against"]) == ("held", "1")
        assert reason in checks["reason"]
        assert f"ranker: version 2 is held: {checks['reason']}" in " ".join(run(service, "models").output.split())
        stats = service.client.get("/v1/stats").json()["server"]["models"][0]
        assert stats["pinned"] == f"version 2 is held: {checks['reason']}"
        values = samples(service)
        assert values["hps_model_version", "ranker", "held", "2"] == 1
        assert values["hps_version_checks_total", reason.split()[0].rstrip(":"), "ranker", "failed"] == 1
        body = {"inputs": [{"name": "item", "datatype": "INT64", "shape": [1], "data": [7]}]}
        body["inputs"].append({"name": "age", "datatype": "FP32", "shape": [1], "data": [0.0]})
        for version, wanted in ((None, FIRST[1].sum()), ("2", factor * vectors[1].sum())):
            place = f"/v2/models/ranker{'' if version is None else f'/versions/{version}'}/infer"
            [score] = service.client.post(place, json=body).json()["outputs"][0]["data"]
            assert score == pytest.approx(wanted, rel=1e-4)
        assert "`hps deploy ranker --accept`" in " ".join(run(service, "deploy", "ranker").output.split())
        assert run(service, "deploy", "ranker", "--accept").output.startswith("ranker: version 2 serves (deploy")
        write(3, vectors + 0.1 * retrained(), factor=factor)
        wait_until(lambda: serving(service) == "3", "version 3 takes over")


def told(service: RunningService) -> str:
    stats = service.client.get("/v1/stats").json()
    return f"{stats['server']['models'][0]['pinned']} {stats['conditions']}"


@pytest.mark.parametrize(
    ("vectors", "reason"),
    [(nonfinite(), "2 of 2000 rows have an infinity or NaN"), (WIDER, "polling leaves it as it is: ")],
    ids=["0.1 % NaN", "another width"],
)
def test_a_version_that_cannot_be_right_is_not_served_and_the_next_one_is(
    document: Make, write: Write, vectors: np.ndarray, reason: str
) -> None:
    with running_service({**document(), "service": POLLING}) as service:
        write(2, vectors)
        wait_until(lambda: reason in told(service), "people see why version 2 does not serve")
        assert versions(service) == {"1": "serving"}
        write(3, retrained())
        wait_until(lambda: serving(service) == "3", "version 3 takes over")


def test_recorded_requests_are_written_by_the_command_for_the_checks(document: Make, write: Write, tmp_path: Path) -> None:
    requests = tmp_path / "requests.jsonl"
    with running_service({**document(checks={"record": "features"}), "service": POLLING}) as service:
        body = {"inputs": [{"name": "item", "datatype": "INT64", "shape": [40], "data": list(range(0, 280, 7))}]}
        body["inputs"].append({"name": "age", "datatype": "FP32", "shape": [40], "data": [0.5] * 40})
        service.client.post("/v2/models/ranker/infer", json=body).raise_for_status()
        assert run(service, "record", "ranker", "--output", str(requests)).output.endswith("1 requests of ranker\n")
        write(2, retrained())
        requests.replace(tmp_path / "repository" / "ranker" / "2" / "requests.jsonl")
        wait_until(lambda: serving(service) == "2", "version 2 takes over")


@pytest.mark.s3
def test_reports_lie_beside_versions_in_a_bucket(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    know_only_moto(monkeypatch)
    server = s3_server()
    bucket = server.new_bucket()
    monkeypatch.chdir(tmp_path)
    sources = ModelSources(ModelSourceConfig(s3_endpoint_url=server.url))
    documents, place = CheckDocuments(sources), f"s3://{bucket}/ranker"
    for version in ("1", "2", "3"):
        write_version(f"{place}/{version}", {"item": (np.arange(9), FIRST[:9])}, sources=sources)
        documents.write(CheckReport(model="ranker", version=version, fingerprint="a", at=0.0), place)
    for listed in server.client.list_objects_v2(Bucket=bucket, Prefix="ranker/2/")["Contents"]:
        server.client.delete_object(Bucket=bucket, Key=listed["Key"])
    documents.write(CheckReport(model="ranker", version="3", fingerprint="b", at=1.0), place)
    found = {version: documents.read("ranker", place, version, "a") is not None for version in ("1", "2", "3")}
    assert found == {"1": True, "2": False, "3": False}
    assert documents.read("ranker", place, "3", "b") is not None
    assert not list(tmp_path.iterdir()), "nothing lies in the working directory"


def test_a_server_of_a_share_compares_the_answers_for_its_rows(document: Make, write: Write, home: Path) -> None:
    configuration = document(shard="0/2")
    hps.write_version(home / "2", {"item": (KEYS, retrained())})
    np.savez(home / "2" / "expected.npz", **{"keys/item": KEYS, "vectors/item": retrained()})
    with hps.HPS(configuration) as server:
        assert outcome(server, "expected") == ("passed", "")


def test_a_check_that_dies_has_failed_and_says_so(
    document: Make, write: Write, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def die(*arguments: Any, **named: Any) -> None:
        raise IndexError("a bug")

    for called in ("compare_rows", "compare_scores"):
        monkeypatch.setattr(f"hps.versions.checks.run.{called}", die)
    with hps.HPS(document()) as server:
        assert outcome(server, "scores", "1") == ("skipped", "not made: IndexError; the log has the details")
        write(2, retrained())
        assert "vectors: not made: IndexError; the log has the details" in str(polled(server))
        assert state(server) == [("1", "serving"), ("2", "held")]
    assert "IndexError: a bug" in caplog.text


def test_a_check_that_never_ends_holds_a_version_and_no_thread_waits_for_it(
    document: Make, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hps.versions.checks.run.DRAIN_S", 0.01)
    released = threading.Event()

    def hang(*arguments: Any) -> None:
        released.wait(60)

    with hps.HPS(document(checks={"timeout_s": 0.2})) as server:
        monkeypatch.setattr("hps.versions.checks.run.read_recording", hang)
        write(2, retrained())
        assert "scores: not made within 0.2 s" in str(polled(server))
        assert state(server) == [("1", "serving"), ("2", "held")]
        released.set()


def test_a_check_by_hand_ends_when_its_version_is_taken_out(
    document: Make, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hps.HPS(document()) as server:
        write(2, SHUFFLED)
        polled(server)

        def undeployed(*arguments: Any, **named: Any) -> list[Any]:
            server.undeploy("ranker", "2")
            return []

        monkeypatch.setattr("hps.versions.checks.run.compare_rows", undeployed)
        with pytest.raises(hps.ConflictError, match="version 2 was taken out of service meanwhile"):
            server.check_version("ranker", "2")


def test_a_version_that_another_replica_accepts_takes_over_also_if_a_change_was_under_way(document: Make, write: Write) -> None:
    with hps.HPS(document()) as server, hps.HPS({**document(), "persistent_db": {"type": "disabled"}}) as other:
        write(2, SHUFFLED)
        for replica in (server, other):
            assert isinstance(polled(replica), hps.VersionHeldError)
        other.deploy("ranker", accept=True)
        with server.live.changing("ranker", "rolling back"):
            assert server.poll() == {}, "in the next round"
        assert state(server) == [("1", "serving"), ("2", "held")]
        assert polled(server) is None
        assert state(server) == [("2", "serving"), ("1", "kept")]


def test_what_another_replica_accepts_leaves_a_pinned_model_alone(document: Make, write: Write) -> None:
    with hps.HPS(document()) as server, hps.HPS({**document(), "persistent_db": {"type": "disabled"}}) as other:
        for version, vectors in ((2, retrained()), (3, SHUFFLED)):
            write(version, vectors)
            for replica in (server, other):
                polled(replica)
        server.rollback("ranker")
        other.deploy("ranker", accept=True)
        assert server.poll() == {}
        assert state(server) == [("1", "serving"), ("3", "held"), ("2", "kept")]


def test_a_version_that_another_replica_holds_while_it_is_loaded_first_does_not_serve(
    document: Make, write: Write, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = VersionCheck.run

    def held_elsewhere(self: VersionCheck) -> CheckReport:
        report = run(self)
        if report.version == "2":
            failed = CheckOutcome(check="norms", outcome="failed", policy="hold", text="found elsewhere")
            (home / "checks-2.json").write_text(report.model_copy(update={"checks": (failed,)}).model_dump_json())
        return report

    configuration = document()
    write(2, retrained())
    monkeypatch.setattr(VersionCheck, "run", held_elsewhere)
    with hps.HPS(configuration) as server:
        assert state(server) == [("1", "serving")]
        assert "found elsewhere" in (home / "checks-2.json").read_text()


def test_a_refused_version_is_loaded_again_only_for_other_files_another_serving_version_or_a_person(
    document: Make, write: Write, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads: list[tuple[str, str]] = []
    run = VersionCheck.run

    def counted(self: VersionCheck) -> CheckReport:
        loads.append((self.new.version, "" if self.old is None else self.old.version))
        return run(self)

    def polls(server: hps.HPS) -> list[tuple[str, str]]:
        """The checks of three polls, of which each is late enough for a retry."""
        loads.clear()
        server.live.first_retry_s = 0.0
        for _ in range(3):
            server.poll()
        return loads

    monkeypatch.setattr(VersionCheck, "run", counted)
    refusing = document(checks={"vectors": {"policy": "refuse"}})
    with hps.HPS(refusing) as server:
        write(2, retrained())
        assert polls(server) == [("2", "1")]
        write(3, SHUFFLED)
        assert polls(server) == [("3", "2")]
        shutil.rmtree(home / "3")
        write(3, SHUFFLED[::-1].copy())
        assert polls(server) == [("3", "2")], "other files"
        server.deploy("ranker", "1", pin=False)
        assert polls(server) == [("3", "1")], "another serving version"
        with pytest.raises(hps.VersionHeldError, match="version 3 is refused"):
            server.deploy("ranker")
        assert polls(server) == []
        document(checks={"vectors": {"policy": "hold"}})
        assert polls(server) == [("3", "1")], "another entry"
        assert state(server) == [("1", "serving"), ("3", "held"), ("2", "kept")]


def test_a_person_accepts_a_held_version_also_while_none_serves(document: Make, write: Write) -> None:
    with hps.HPS(document()) as server:
        write(2, SHUFFLED)
        polled(server)
        server.undeploy("ranker")
        server.deploy("ranker", accept=True)
        assert state(server) == [("2", "serving")]


def test_files_that_are_replaced_under_the_number_of_the_serving_version_are_checked(
    document: Make, write: Write, home: Path
) -> None:
    with hps.HPS(document()) as server:
        for vectors, refused in ((SHUFFLED, True), (retrained(), False)):
            shutil.rmtree(home / "1")
            write(1, vectors)
            assert ("version 1 is refused: vectors of item: alignment" in str(polled(server))) is refused
            assert state(server)[0] == ("1", "serving")
            np.testing.assert_array_equal(server.lookup([7], "ranker", "item")[0], FIRST[1] if refused else vectors[1])


def test_a_version_with_rows_that_are_not_finite_is_read_again_only_for_other_files(
    document: Make, write: Write, home: Path
) -> None:
    with hps.HPS(document()) as server:
        server.live.first_retry_s = 0.0
        write(2, nonfinite())
        assert isinstance(polled(server), hps.NonfiniteRowsError)
        assert server.poll() == {}
        shutil.rmtree(home / "2")
        write(2, retrained())
        assert polled(server) is None
        assert state(server)[0] == ("2", "serving")


def test_rows_that_are_not_finite_hold_a_version_whose_rows_a_database_has_from_before(document: Make, write: Write) -> None:
    holding = document(checks={"finite": {"policy": "hold"}})
    with hps.HPS(holding) as server:
        write(2, nonfinite())
        assert isinstance(polled(server), hps.VersionHeldError)
        assert state(server) == [("1", "serving"), ("2", "held")]
    with hps.HPS(holding) as server:
        assert state(server) == [("1", "serving")], "nothing can be compared"
        with pytest.raises(hps.VersionHeldError, match="finite of item: nonfinite rows 2"):
            server.deploy("ranker")
        assert state(server) == [("1", "serving"), ("2", "held")]


@pytest.mark.parametrize("fleet", [False, True])
def test_a_refused_version_serves_once_another_replica_accepts_it(document: Make, write: Write, *, fleet: bool) -> None:
    refusing = document(checks={"vectors": {"policy": "refuse"}})
    with hps.HPS(refusing) as server, hps.HPS({**refusing, "persistent_db": {"type": "disabled"}}) as other:
        write(2, SHUFFLED)
        if fleet:
            other.change_fleet("ranker", "deploy", "2")
            server.read_documents()
        retried = server.follow if fleet else server.poll
        assert isinstance(retried()["ranker"], hps.VersionHeldError)
        assert retried() == {}
        other.deploy("ranker", accept=True)
        assert retried() == {"ranker": None}
        assert state(server) == [("2", "serving"), ("1", "kept")]


def test_a_version_that_another_replica_accepted_serves_once_it_is_loaded(document: Make, write: Write) -> None:
    with hps.HPS(document()) as server, hps.HPS({**document(), "persistent_db": {"type": "disabled"}}) as other:
        write(2, SHUFFLED)
        server.deploy("ranker", accept=True)
        assert polled(other) is None
        report = other.model("ranker").checks
        assert report is not None
        assert (report.version, report.against, report.verdict) == ("2", "1", "accepted")


def test_keys_of_another_share_are_not_compared(document: Make, write: Write, home: Path) -> None:
    with hps.HPS(document()) as server:
        write(2, retrained())
        entry = {**model_of("ranker", ["item"], {"item": DIM}), "version_path": str(home), "shard": "0/4"}
        server.deploy(hps.load_configuration({"models": [entry]}).models[0])
        assert outcome(server, "keys") == ("skipped", "the databases have not every row of both")
        assert outcome(server, "vectors") == ("passed", "")


def test_a_version_whose_rows_cannot_be_read_serves_with_a_warning(
    document: Make, write: Write, caplog: pytest.LogCaptureFixture
) -> None:
    none = {"type": "disabled"}
    entry = {"gpucacheper": 4.0, "init_ec": False}
    with hps.HPS({**document(**entry), "volatile_db": none, "persistent_db": none}) as server:
        write(2, SHUFFLED)
        assert polled(server) is None
        assert outcome(server, "vectors") == ("skipped", "no database or cache has rows of it")
    assert "version 2 serves unchecked: keys of item: no database or cache has rows of it" in caplog.text


def test_scores_of_a_first_version_are_finite_or_the_one_below_serves(document: Make, write: Write) -> None:
    with hps.HPS(document()) as server:
        assert outcome(server, "scores", "1") == ("passed", "")
    write(2, FIRST, factor=float("nan"))
    with hps.HPS({**document(), "persistent_db": {"type": "disabled"}}) as server:
        assert state(server) == [("1", "serving")]


def test_a_version_that_came_after_the_held_one_is_not_accepted_unseen(document: Make, write: Write) -> None:
    with hps.HPS(document()) as server:
        write(2, SHUFFLED)
        polled(server)
        write(3, SHUFFLED[::-1].copy())
        with pytest.raises(hps.VersionHeldError, match="version 3 is held"):
            server.deploy("ranker", accept=True)
        assert state(server) == [("1", "serving"), ("3", "held")]
        server.deploy("ranker", accept=True)
        assert server.model("ranker").version == "3"
