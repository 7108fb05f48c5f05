"""A polling service takes over good versions of a real repository by itself, and holds bad ones, which everybody sees."""

from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from hps.configuration.tiers import ModelSourceConfig
from hps.models.sources import ModelSources
from hps.models.writer import write_version
from hps.testing.waiting import wait_until
from hps.tools.cli.app import app
from hps.versions.checks.documents import CheckDocuments
from hps.versions.checks.report import CheckReport
from tests.ring1.versions.test_version_checks import DIM, FIRST, ROWS, SHUFFLED, Make, Write, nonfinite, retrained
from tests.ring1.versions.test_version_checks import document as document  # fixtures
from tests.ring1.versions.test_version_checks import engine as engine
from tests.ring1.versions.test_version_checks import home as home
from tests.ring1.versions.test_version_checks import write as write
from tests.servers.running_service import RunningService, running_service, samples
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
    document: Make, write: Write, vectors: np.ndarray, factor: float, reason: str
) -> None:
    with running_service({**document(), "service": POLLING}) as service:
        write(2, vectors, factor=factor)
        wait_until(lambda: versions(service).get("2") == "held", "version 2 is held")
        assert serving(service) == "1"
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


@pytest.mark.parametrize("vectors", [nonfinite(), WIDER], ids=["0.1 % NaN", "another width"])
def test_a_version_that_cannot_be_right_is_not_served_and_the_next_one_is(
    document: Make, write: Write, home: Path, vectors: np.ndarray
) -> None:
    with running_service({**document(), "service": POLLING}) as service:
        server = service.app.lifecycle.server
        write(2, vectors)
        tried = server.live.failure if np.isnan(vectors).any() else server._reconciler._unreadable.get
        wait_until(lambda: tried("ranker"), "version 2 is tried")
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
