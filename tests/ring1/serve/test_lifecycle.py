"""When a service is ready, and when it ends: models and databases that are not there, and those that come back."""

import json
import logging
from contextlib import contextmanager

import numpy as np
import pytest

import hps
from hps.ground.kernels.compilations import COMPILATIONS
from hps.serve.engine import lifecycle as lifecycle_module
from hps.serve.engine.lifecycle import Lifecycle
from hps.testing.waiting import PATIENCE_S, wait_until
from tests.servers.running_service import document_of, model_of

ENTRY = {key: value for key, value in model_of("m", ["t"], {"t": 2}).items() if key != "model"}


@contextmanager
def starting(repository=None, *models, **service):
    """The life of a service that tries again at once."""
    more = {"model_repository": str(repository)} if repository is not None else {}
    life = Lifecycle(hps.load_configuration(document_of(*models, service=service, **more)), first_retry_s=0.01)
    life.start()
    try:
        yield life
    finally:
        assert life.close(PATIENCE_S)


def put(repository, name="m", versions=("1",), **entry):
    for version in versions:
        hps.write_version(repository / name / version, {"t": (np.arange(3), np.ones((3, 2), np.float32))})
    (repository / name).mkdir(parents=True, exist_ok=True)
    (repository / name / "model.json").write_text(json.dumps(ENTRY | entry))


def says(life, *words, settled=False):
    wait_until(lambda: all(word in life.not_ready_reason for word in words) or life.failure, f"it says {words}")
    assert (life.failure, life.settled) == (None, settled)


def becomes_ready(life, *models):
    wait_until(lambda: (life.serving and not life.not_ready_reason) or life.failure, "it is ready")
    assert life.failure is None
    assert life.settled
    assert set(life.opened.models) == set(models)


def test_a_repository_without_models_is_not_ready_until_there_is_one(tmp_path):
    (tmp_path / "1").mkdir()
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "config.pbtxt").touch()
    with starting(tmp_path) as life:
        says(life, f"no model to serve: looked in {tmp_path} for <model>/model.json, got 2 directories: ", "old (config.pbtxt)")
        says(life, "1 (nothing)", "service.allow_empty", "--allow-empty")
        put(tmp_path)
        becomes_ready(life, "m")
        life.opened.undeploy("m")
        says(life, "no model is in service")  # and none comes back that somebody has undeployed
        life.opened.deploy("m")
        becomes_ready(life, "m")


def test_a_repository_that_is_missing_may_be_a_volume_that_is_not_mounted_yet(tmp_path):
    with starting(tmp_path / "volume") as life:
        says(life, "volume: there is no such file or directory; next try in")
        (tmp_path / "volume").mkdir()
        says(life, "got nothing")
        put(tmp_path / "volume")
        becomes_ready(life, "m")


@pytest.mark.parametrize(
    "service", [{"allow_empty": True}, {"model_control_mode": "explicit"}, {"model_control_mode": "poll", "allow_empty": True}]
)
def test_a_service_without_models_is_ready_where_that_is_meant(tmp_path, service):
    with starting(tmp_path, **service) as life:
        becomes_ready(life)


@pytest.mark.parametrize("mode", ["explicit", "none"])
def test_each_model_that_a_start_should_load_is_waited_for(tmp_path, mode):
    """One is named and not there; or its entry is damaged, which must not hide that it should serve."""
    put(tmp_path, "a")
    if mode == "none":
        (tmp_path / "b").mkdir()
        (tmp_path / "b" / "model.json").write_text("{")
    service = {"model_control_mode": "explicit", "load_models": ["a", "b"]} if mode == "explicit" else {}
    with starting(tmp_path, **service) as life:
        wait_until(lambda: life.opened and life.opened.models, "the other model is there")
        if mode == "explicit":
            says(life, "no model b (service.load_models): looked in", settled=True)  # with `?strict=false` the others count
        else:
            says(life, "model 'b' is left out", "it is not JSON", settled=True)
        put(tmp_path, "b")
        becomes_ready(life, "a", "b")
        (tmp_path / "c").mkdir()
        (tmp_path / "c" / "model.json").write_text("{")  # somebody else's mistake does not take a service that is ready down
        life.opened.catalog.scan()
        assert life.not_ready_reason == ""


def test_a_model_whose_only_version_is_away_is_waited_for(tmp_path):
    put(tmp_path, versions=())
    with starting(tmp_path) as life:
        says(life, "got versions none, expected at least one; next try in")
        hps.write_version(tmp_path / "m" / "1", {"t": (np.arange(3), np.ones((3, 2), np.float32))})
        becomes_ready(life, "m")
    (tmp_path / "m" / "1").rename(tmp_path / "away")
    document = {"number": 1, "version": "1", "by": "deploy", "since": 1.0, "writer": "w"}
    (tmp_path / "m" / "serving.json").write_text(json.dumps(document))
    with starting(tmp_path) as life:
        says(life, "the fleet serves version 1", "next try in")
        (tmp_path / "away").rename(tmp_path / "m" / "1")
        becomes_ready(life, "m")


def test_a_database_that_fails_as_models_are_loaded_does_not_end_the_service(tmp_path, monkeypatch):
    put(tmp_path)
    deploy, failing = hps.HPS.deploy, [True] * 3

    def slow(server, *arguments, **options):
        if failing and failing.pop():
            server.live.record_failure("m", error := hps.DatabaseTimeoutError("Redis is slow"))
            raise error
        deploy(server, *arguments, **options)

    monkeypatch.setattr(hps.HPS, "deploy", slow)
    with starting(tmp_path) as life:
        becomes_ready(life, "m")
    assert not failing


@pytest.mark.parametrize(
    ("error", "ends"),
    [(hps.DatabaseError("Redis is away"), False), (hps.DatabaseCorruptError("damaged"), True), (ZeroDivisionError(), True)],
)
def test_databases_that_cannot_be_opened_are_opened_again_unless_that_cannot_help(tmp_path, monkeypatch, error, ends):
    put(tmp_path)
    opened, tries = hps.HPS.__init__, []

    def failing(server, *arguments, **options):
        tries.append(1)
        if len(tries) <= 3:
            raise error
        opened(server, *arguments, **options)

    monkeypatch.setattr(hps.HPS, "__init__", failing)
    with starting(tmp_path) as life:
        if ends:
            wait_until(lambda: life.failure, "it ends")
            assert (life.failure, len(tries)) == (error, 1)
        else:
            becomes_ready(life, "m")
            assert len(tries) == 4


def test_what_can_be_asked_for_is_compiled_before_databases_are_opened_and_every_answer_says_how_far(tmp_path, monkeypatch):
    put(tmp_path)
    seen = []

    def compile_kernels(*kernels):
        with COMPILATIONS.running(10.0) as advance:
            for _ in range(2):
                seen.append((life.blocked, life.not_ready_reason, life.opened))
                advance(4.2)
        assert "pool" in {kernel.__name__ for kernel in kernels}

    monkeypatch.setattr(lifecycle_module, "compile_kernels", compile_kernels)
    more = {"model_repository": str(tmp_path)}
    life = Lifecycle(hps.load_configuration(document_of(**more)))
    life.start()
    becomes_ready(life, "m")
    assert life.close(PATIENCE_S)
    assert seen == [(said, said, None) for said in ("compiling kernels, 0 %", "compiling kernels, 42 %")]
    assert COMPILATIONS.progress == ""


def test_a_service_that_is_stopped_while_it_waits_says_so(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    with starting(tmp_path / "gone") as life:
        says(life, "gone", "next try in")
    assert life.failure is None
    assert life.not_ready_reason == "shutting down"
