"""How many files a reader opens who follows a change of a model from each of its doors to the state machine."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import hps
from hps.models.loading import table_load
from hps.serve.server import Server
from hps.testing.waiting import wait_until
from hps.tools.cli.app import app
from hps.versions import building, deployment
from hps.versions.live_models import LiveModels
from tests.ring1.repo.test_lookup_path import PACKAGE
from tests.servers.running_service import RunningService, document_of, model_of, running_service

MOST_FILES_TO_THE_STATE_MACHINE, MOST_FILES_OF_A_DEPLOY = 6, 8
PARTS = ("serve/", "versions/", "parameter_server.py")


@pytest.fixture
def document(tmp_path: Path) -> dict[str, Any]:
    keys = np.arange(10)
    for version in ("1", "2"):
        hps.write_sparse_model(tmp_path / "m" / version / "t", (keys, np.full((10, 4), float(version), np.float32)))
    model = model_of("m", ["t"], {"t": 4}, version_path=str(tmp_path / "m"))
    model["version_policy"] = {"specific": {"versions": [1]}}
    return document_of(model, persistent=tmp_path / "rocksdb", service={"model_control_mode": "explicit", "load_models": ["*"]})


def noting(function: Callable[..., Any], found: set[str], names: set[tuple[str, str]] | None = None) -> Callable[..., Any]:
    """Note the files that are on the call stack, from the request on, whenever a function is called; also what they call."""

    def call(*arguments: Any, **named: Any) -> Any:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code is not Server.run.__code__ and frame.f_code is not Server._serve.__code__:
            if (path := Path(frame.f_code.co_filename)).is_relative_to(PACKAGE):
                found.add(path.relative_to(PACKAGE).as_posix())
                if names is not None:
                    names.add((frame.f_code.co_name, frame.f_code.co_qualname))
            frame = frame.f_back
        found.add(Path(sys.modules[function.__module__].__file__ or "").relative_to(PACKAGE).as_posix())
        return function(*arguments, **named)

    return call


@pytest.fixture
def entered(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    found: set[str] = set()
    for name in ("start_change", "changing", "serve", "withdraw", "record_failure", "expect", "stop_expecting"):
        monkeypatch.setattr(LiveModels, name, noting(getattr(LiveModels, name), found))
    return found


@pytest.fixture
def service(document: dict[str, Any]) -> Iterator[RunningService]:
    with running_service(document) as service:
        yield service


def check(entered: set[str], door: str) -> None:
    assert {door, "versions/live_models.py"} <= entered, sorted(entered)
    followed = {path for path in entered if path.startswith(PARTS)}  # not the command line's own
    assert len(followed) <= MOST_FILES_TO_THE_STATE_MACHINE, sorted(followed)


def test_from_python(document: dict[str, Any], entered: set[str]) -> None:
    with hps.HPS(document) as server:
        server.deploy("m", "2")
        server.rollback("m")
        server.undeploy("m")
    check(entered, "parameter_server.py")


def test_from_the_command_line(service: RunningService, entered: set[str]) -> None:
    entered.clear()
    for arguments in (["deploy", "m", "--version", "2"], ["rollback", "m"], ["undeploy", "m"]):
        assert CliRunner().invoke(app, [*arguments, "--url", service.url]).exit_code == 0
    check(entered, "serve/engine/routes/administration.py")


@pytest.mark.parametrize(
    ("door", "paths"),
    [
        ("administration", ["v1/models/m/deploy", "v1/models/m/rollback", "v1/models/m/undeploy"]),
        ("repository", ["v2/repository/models/m/unload", "v2/repository/models/m/load"]),  # Triton's clients
    ],
)
def test_from_http(service: RunningService, entered: set[str], door: str, paths: list[str]) -> None:
    entered.clear()
    for path in paths:
        service.client.post(f"/{path}", json={"version": "2"} if path.endswith("/deploy") else {}).raise_for_status()
    check(entered, f"serve/engine/routes/{door}.py")


def test_from_the_service_itself(document: dict[str, Any], entered: set[str], tmp_path: Path) -> None:
    document["service"] = {"model_control_mode": "poll", "repository_poll_s": 0.1}
    document["models"][0]["version_policy"] = {"latest": {"num_versions": 1}}
    with running_service(document) as service:
        (tmp_path / "m" / "2").rename(tmp_path / "m" / "3")
        wait_until(lambda: service.app.lifecycle.server.model("m").version == "3", "polling has found version 3")
        service.app.lifecycle.change([], ["m"])
    check(entered, "serve/engine/lifecycle.py")


def test_a_deploy_over_http_crosses_few_files_and_no_name_twice(
    service: RunningService, entered: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the request to the load of a table, the warm-up of its cache, and the takeover."""
    names: set[tuple[str, str]] = set()
    for module, name in (
        (table_load.TableLoad, "run"),
        (building, "warm_up"),
        (deployment.Deployment, "close"),
    ):
        monkeypatch.setattr(module, name, noting(getattr(module, name), entered, names))
    entered.clear()
    service.client.post("/v1/models/m/deploy", json={"version": "2"}).raise_for_status()
    assert {"models/loading/table_load.py", "models/loading/warm_up.py", "versions/live_models.py"} <= entered, sorted(entered)
    followed = {path for path in entered if path.startswith(PARTS)}
    assert len(followed) <= MOST_FILES_OF_A_DEPLOY, sorted(followed)
    assert ("deploy", "HPS.deploy") in names
    twice = {name: [whole for other, whole in names if other == name] for name, _ in names}
    assert not {name: found for name, found in twice.items() if len(found) > 1}
