"""Models that load, wait, fail and are tried again behind a service: what answers meanwhile, and what is said of the rest.

The states themselves are proved by ring1/ground/test_progress.py.
"""

import os
import re
from contextlib import contextmanager

import numpy as np
import pytest

import hps
from hps.errors import DatabaseLockedError, ModelSourceError
from hps.serve.engine.lifecycle import Lifecycle
from hps.testing.waiting import wait_until
from tests.fakes.gated_file_system import WAIT_S, gates
from tests.servers.running_service import RunningService, document_of, model_of, samples

DIM = 62  # 256 bytes a row: a chunk of 16 MiB has 65,536 rows
ROWS = 96_000
SECOND_CHUNK = 65_536 * DIM * 4


def write(directory, rows=100, dim=3, add=0.0):
    keys = np.arange(rows, dtype=np.int64)
    vectors = np.repeat(keys.astype(np.float32)[:, None] + np.float32(add), dim, axis=1)
    hps.write_sparse_model(directory, (keys, vectors), overwrite=True)
    return str(directory)


def model(name, source, dim=3):
    return model_of(name, [source], {"item": dim}, gpucache=False)


@pytest.fixture
def good(tmp_path):
    return model("good", write(tmp_path / "good.model"))


@contextmanager
def service_of(document, **settings):
    """A service that is not waited for; it ends at once."""
    service = RunningService(Lifecycle(hps.load_configuration(document), **settings))
    service.start()
    try:
        yield service
    finally:
        assert service.stop()


def look_up(service, name, key=7):
    return service.client.post(f"/v1/models/{name}/lookup", json={"tables": {"item": [key]}})


def answers(service, name, value, key=7, dim=3):
    return look_up(service, name, key).json() == {"tables": {"item": [[value] * dim]}}


def readiness(service, **query):
    response = service.client.get("/v2/health/ready", params=query)
    answer = response.json()
    assert answer["ready"] is (response.status_code == 200)
    return response.status_code, answer.get("reason", ""), {one["name"]: one for one in answer.get("models", ())}


def settle(service):
    wait_until(lambda: service.app.lifecycle.settled, "every model is ready or has failed")


def test_one_bad_model_does_not_stop_the_others(tmp_path, good, caplog):
    truncated = write(tmp_path / "truncated.model")
    os.truncate(f"{truncated}/emb_vector", 100)
    causes = {"cut": "got 100 bytes", "gone": "opening sparse model /nowhere/item.model: there is no such directory"}
    with service_of(document_of(model("cut", truncated), model("gone", "/nowhere/item.model"), good)) as service:
        settle(service)
        assert answers(service, "good", 7)
        assert service.client.get("/v2/models/good/ready").status_code == 200
        assert service.client.get("/v2").json()["models"] == ["good"]
        for strict, code in ((None, 503), ("true", 503), ("false", 200)):
            status, reason, states = readiness(service, **({"strict": strict} if strict else {}))
            assert status == code
            assert "2 of 3 models failed: " in reason
            assert {name: one["state"] for name, one in states.items()} == {"cut": "failed", "gone": "failed", "good": "ready"}
            assert all(cause in reason and cause in states[name]["reason"] for name, cause in causes.items())
            assert "retry_in_s" not in states["cut"]
            assert (states["good"]["percent"], "reason" in states["good"]) == (100, False)
        response = service.client.get("/v2/health/ready?strict=perhaps")
        assert response.status_code == 400
        assert re.search("strict.*'perhaps'", response.json()["error"])
        for name, cause in causes.items():
            for response in (
                *(look_up(service, name), service.client.post(f"/v2/models/{name}/infer", content=b"{}")),
                *(service.client.get(f"/v2/models/{name}{rest}") for rest in ("", "/ready", "/versions/1/ready")),
            ):
                assert response.status_code == 503
                assert f"model '{name}' is not ready: loading failed: " in response.json()["error"]
                assert cause in response.json()["error"]
        assert look_up(service, "nobody").status_code == 404
        assert service.client.get("/v2/models/nobody/ready").status_code == 404
        found = samples(service)
        assert [found["hps_model_ready", name] for name in ("cut", "gone", "good")] == [0, 0, 1]
        assert [found["hps_load_failures_total", name] for name in ("cut", "gone", "good")] == [1, 1, 0]
        assert found[("hps_ready",)] == 1
    assert "loading model gone failed: opening sparse model /nowhere/item.model" in caplog.text


def test_a_model_answers_while_another_loads(tmp_path, good):
    with gates("slow") as (gate,):
        gate.hold_from = SECOND_CHUNK
        slow = model("slow", f"gate://slow{write(tmp_path / 'slow.model', ROWS, DIM)}", DIM)
        last = model("last", write(tmp_path / "last.model", add=1))
        with service_of(document_of(good, slow, last)) as service:
            assert gate.entered.wait(WAIT_S)
            wait_until(lambda: samples(service).get(("hps_loaded_rows", "slow", "item")) == 65_536, "the first chunk is there")
            assert answers(service, "good", 7)
            assert service.client.get("/v2/models/good/ready").status_code == 200
            assert readiness(service, strict="false")[0] == 503  # a replica that starts is not asked yet
            status, reason, states = readiness(service)
            progress = r"loading slow\.item: 68 % \(16\.8 MB of 24\.6 MB, [\d.]+ [kMG]?B/s, .*\)"
            assert (status, re.fullmatch(progress + "; 1 of 3 tables", reason) is not None) == (503, True)
            assert [states[name]["state"] for name in ("good", "slow", "last")] == ["ready", "loading", "waiting"]
            (table,) = states["slow"]["tables"]
            assert (table["rows_done"], table["rows"], table["size_bytes"]) == (65_536, ROWS, ROWS * 256)
            said = service.client.get("/v2/models/slow/ready").json()["error"]
            assert re.fullmatch("model 'slow' is not ready: " + progress, said)
            assert "'last' is not ready: waiting" in look_up(service, "last").json()["error"]
            found = samples(service)
            assert [found["hps_model_ready", name] for name in ("good", "slow", "last")] == [1, 0, 0]
            assert (found["hps_load_rows", "slow", "item"], found[("hps_ready",)]) == (ROWS, 0)
            gate.release.set()
            wait_until(lambda: readiness(service)[0] == 200, "all models are ready")
            assert service.client.get("/v2/health/ready").json() == {"ready": True}
            assert answers(service, "slow", ROWS - 1, ROWS - 1, DIM)
            assert answers(service, "last", 8)


def test_a_failure_that_may_pass_is_tried_again_while_the_others_answer_and_force_holds(tmp_path, good, caplog):
    with gates("flaky") as (gate,):
        flaky = model("flaky", f"gate://flaky{write(tmp_path / 'flaky.model')}")
        found = document_of(flaky, good, persistent=tmp_path / "rocksdb")
        with hps.HPS(found) as server:
            server.insert([7], np.full((1, 3), 70, np.float32), "flaky", "item")
        gate.errors = [ModelSourceError("no answer")] * 2
        with service_of(found, force=True, first_retry_s=0.05) as service:
            wait_until(lambda: look_up(service, "good").status_code == 200, "the good model answers")

            def recovered():
                assert answers(service, "good", 7)
                return readiness(service)[0] == 200

            wait_until(recovered, "the flaky model is ready")
            assert answers(service, "flaky", 7)
            assert samples(service)["hps_load_failures_total", "flaky"] == 2
            assert gate.errors == []
    assert "loading model flaky failed: no answer; trying again in 0 s" in caplog.text


def test_a_failure_that_stays_is_not_tried_again(tmp_path, good, caplog):
    with gates("bad") as (gate,):
        gate.errors = [ZeroDivisionError("secret detail")]
        bad = model("bad", f"gate://bad{write(tmp_path / 'bad.model')}")
        with service_of(document_of(bad, good), first_retry_s=0.0) as service:
            settle(service)
            assert readiness(service)[2]["bad"]["reason"] == "internal error; the log has the details"
            assert "secret" not in service.client.get("/v2/health/ready").text
            assert look_up(service, "good").status_code == 200
        assert gate.looks == 1  # another try would have been due at once
    assert "Traceback" in caplog.text


def test_the_wait_for_another_try_is_said_and_ends_when_the_service_stops(tmp_path, good):
    with gates("away") as (gate,):
        gate.errors = [ModelSourceError("no answer")] * 100
        away = model("away", f"gate://away{write(tmp_path / 'away.model')}")
        with service_of(document_of(away, good, persistent=tmp_path / "rocksdb"), first_retry_s=3600) as service:
            settle(service)
            state = readiness(service)[2]["away"]
            assert 200 < state["retry_in_s"] <= 300  # the longest pause
            assert state["reason"].startswith("no answer; next try in ")
            assert gate.looks == 1
            loader = service.app.lifecycle._loader
            assert loader.is_alive()
        assert not loader.is_alive()
    with hps.HPS(document_of(good, persistent=tmp_path / "rocksdb")) as again:  # the lock is free
        assert again.lookup([5], "good", "item").tolist() == [[5, 5, 5]]


def test_stopping_ends_a_load_between_two_chunks(tmp_path):
    with gates("slow") as (gate,):
        gate.hold_from = SECOND_CHUNK
        slow = model("slow", f"gate://slow{write(tmp_path / 'slow.model', ROWS, DIM)}", DIM)
        with service_of(document_of(slow, persistent=tmp_path / "rocksdb")) as service:
            assert gate.entered.wait(WAIT_S)
            service.server.stop()
            wait_until(lambda: service.app.lifecycle.not_ready_reason == "shutting down", "it stops")
            gate.release.set()
        assert not service.app.lifecycle._loader.is_alive()
        with hps.HPS(document_of(slow, persistent=tmp_path / "rocksdb")) as again:  # closed, and what was done is continued
            assert again.lookup([ROWS - 1], "slow", "item")[0, 0] == ROWS - 1


def test_when_no_model_can_be_loaded_the_loading_fails_and_names_all(tmp_path, good):
    models, persistent = [model(name, f"/nowhere/{name}") for name in ("a", "b")], tmp_path / "rocksdb"
    lifecycle = Lifecycle(hps.load_configuration(document_of(*models, persistent=persistent)))
    lifecycle.start()
    wait_until(lambda: lifecycle.failure is not None, "the loading failed")
    assert isinstance(lifecycle.failure, hps.ModelFileNotFoundError)
    assert re.match("none of 2 models could be loaded:\n  a: .*/nowhere/a.*\n  b: .*/nowhere/b", str(lifecycle.failure))
    assert lifecycle.not_ready_reason.startswith("loading failed: none of 2 models")
    assert not lifecycle.settled
    with pytest.raises(hps.NotReadyError, match="loading failed"):
        lifecycle.server_of("a")
    assert lifecycle.close(WAIT_S)
    found = document_of(good, persistent=persistent)  # RocksDB's lock is free
    with hps.HPS(found), pytest.raises(DatabaseLockedError):
        hps.HPS(found)


def test_a_database_that_another_process_holds_is_waited_for(tmp_path, good):
    """As that of the replica before this one, which still stops."""
    document = document_of(good, persistent=tmp_path / "rocksdb")
    with hps.HPS(document), service_of(document, first_retry_s=0.01) as service:
        for _ in range(2):
            wait_until(lambda: "has the directory open" in readiness(service)[1], "it says so")
            before = service.app.lifecycle.not_ready_reason
            wait_until(lambda before=before: service.app.lifecycle.not_ready_reason != before, "it tries again")
        assert "next try in" in look_up(service, "good").json()["error"]
        assert service.client.get("/v2/health/live").status_code == 200
    with service_of(document, first_retry_s=0.01) as service:
        settle(service)
        assert answers(service, "good", 7)


def test_a_service_stops_while_it_waits_for_a_database(tmp_path, good):
    document = document_of(good, persistent=tmp_path / "rocksdb")
    with hps.HPS(document):
        with service_of(document) as service:
            wait_until(lambda: "has the directory open" in readiness(service)[1], "it waits")
        assert service.app.closed
        assert service.app.lifecycle.failure is None


def test_models_that_others_deploy_and_undeploy_are_reported_as_they_are(tmp_path, good):
    later = tmp_path / "later.model"
    with service_of(document_of(model("later", str(later)), good)) as service:
        settle(service)
        assert readiness(service)[0] == 503
        server = service.app.lifecycle.opened
        for add, rows in ((2, 100), (3, 50)):
            write(later, rows, add=add)
            server.deploy(server.config.models[0])
            assert readiness(service)[0] == 200
            assert answers(service, "later", 7 + add)
            assert answers(service, "later", 77 + add if rows > 77 else 0, 77)  # with fewer rows, none of the old is left
            server.undeploy("later")
            assert look_up(service, "later").status_code == 404
            assert readiness(service)[0] == 200
            assert ("hps_model_ready", "later") not in samples(service)
