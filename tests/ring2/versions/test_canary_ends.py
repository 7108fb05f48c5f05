"""Changes of a canary at the same moment, and what time, restarts and a lack of memory do to its steps."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import hps
from hps.testing.waiting import wait_until
from hps.versions.canary import rollouts
from tests.fakes.clock import Clock
from tests.ring2.versions.test_canary_life import UNCHECKED, answering, ended, versions
from tests.ring2.versions.test_checks_in_process import Make, Write, retrained
from tests.ring2.versions.test_checks_in_process import document as document  # fixtures
from tests.ring2.versions.test_checks_in_process import engine as engine
from tests.ring2.versions.test_checks_in_process import home as home
from tests.ring2.versions.test_checks_in_process import write as write

STEPS = [{"share": 0.25, "seconds": 60.0}, {"share": 0.5}]


@pytest.fixture
def tried(document: Make, write: Write) -> Any:
    """A parameter server that tries version 2 out."""
    with hps.HPS(document(**UNCHECKED)) as server:
        write(2, retrained())
        server.deploy("ranker", canary=0.25, options={"steps": STEPS})
        yield server


def before(server: hps.HPS, patch: pytest.MonkeyPatch, change: str, other: Callable[[], object]) -> None:
    """Let another change be first, after a change has found the canary under way."""
    real = getattr(server.rollouts._changes, change)

    def late(*arguments: Any, **options: Any) -> None:
        patch.undo()
        other()
        real(*arguments, **options)

    patch.setattr(server.rollouts._changes, change, late)


def test_a_promotion_that_a_roll_back_overtakes_is_refused(tried: hps.HPS, monkeypatch: pytest.MonkeyPatch) -> None:
    before(tried, monkeypatch, "promote", lambda: tried.rollback("ranker"))
    with pytest.raises(hps.ConflictError, match="no canary or shadow is under way"):
        tried.promote("ranker")
    assert (versions(tried), ended(tried)[0]) == ({"1": "serving"}, "rolled back")


def test_a_roll_back_that_a_promotion_overtakes_is_refused(tried: hps.HPS, monkeypatch: pytest.MonkeyPatch) -> None:
    before(tried, monkeypatch, "take_out", lambda: tried.promote("ranker"))
    with pytest.raises(hps.ConflictError, match="no canary or shadow is under way"):
        tried.rollback("ranker")
    assert (versions(tried), ended(tried)[0]) == ({"2": "serving", "1": "kept"}, "promoted")


def test_a_bound_that_breaks_during_a_promotion_is_the_persons_who_promotes(
    tried: hps.HPS, monkeypatch: pytest.MonkeyPatch
) -> None:
    promote = tried.rollouts._changes.promote

    def slow(*arguments: Any, started: Callable[[], None], **options: Any) -> None:
        def judged() -> None:
            started()
            tried.rollouts.active["ranker"].counts.new.errors += 100
            tried.rollouts.tick()

        promote(*arguments, started=judged, **options)

    monkeypatch.setattr(tried.rollouts._changes, "promote", slow)
    assert tried.promote("ranker").version == "2"
    assert ended(tried) == ("promoted", "")
    with pytest.raises(hps.ConflictError, match="no canary or shadow is under way"):
        tried.promote("ranker")


def test_a_second_roll_back_does_not_take_the_serving_version(tried: hps.HPS) -> None:
    tried.rollback("ranker")
    with pytest.raises(hps.ConflictError, match=r"version 2 ended 0 s ago, and 1 serves; .*by its number"):
        tried.rollback("ranker")
    [known] = tried.rollouts._known.values()
    known.record = known.record.model_copy(update={"until": known.record.until - 61.0})
    with pytest.raises(hps.ConflictError, match="there is no version to go back to"):
        tried.rollback("ranker")


def test_a_clock_that_is_set_takes_no_step(tried: hps.HPS, monkeypatch: pytest.MonkeyPatch) -> None:
    now, clock = rollouts.time.time(), Clock(rollouts.time.monotonic())
    monkeypatch.setattr(rollouts, "time", SimpleNamespace(time=lambda: now + 86400.0))
    monkeypatch.setattr(tried.rollouts, "_clock", clock)
    answering(tried, 20)
    tried.rollouts.tick()
    assert tried.rollout("ranker").record.step == 0  # type: ignore[union-attr]
    clock.now += 61.0
    tried.rollouts.tick()
    assert tried.rollout("ranker").record.step == 1  # type: ignore[union-attr]


def test_the_time_that_a_process_was_away_ends_no_step(document: Make, write: Write, tmp_path: Path) -> None:
    described = document(**UNCHECKED)
    with hps.HPS(described) as server:
        write(2, retrained())
        server.deploy("ranker", canary=0.25, options={"steps": STEPS})
    [kept] = (tmp_path / "rocksdb").glob("hps-rollouts/*.json")
    record = json.loads(kept.read_text())
    kept.write_text(json.dumps({**record, "since": 0.0, "step_since": 0.0}))
    with hps.HPS(described) as server:
        answering(server, 20)
        server.rollouts.tick()
        status = server.rollout("ranker")
        assert status is not None
        assert (status.record.state, status.record.step, status.record.share) == ("running", 0, 0.25)
        assert status.step_seconds < 60.0


def test_a_version_that_does_not_fit_beside_the_serving_one_is_refused(
    document: Make, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hps.HPS(document(**UNCHECKED)) as server:
        write(2, retrained())
        with monkeypatch.context() as patch:
            patch.setattr("hps.stores.hash_map.database.available_memory", lambda: (1000, "in this test"))
            with pytest.raises(hps.CapacityError, match="that are free in this test"):
                server.deploy("ranker", canary=0.25)
        assert (server.rollout("ranker"), server.pin("ranker"), versions(server)) == (None, None, {"1": "serving"})
        server.deploy("ranker", canary=0.25)
        assert versions(server) == {"1": "serving", "2": "available"}
        assert server.check() == []


def test_a_version_that_arrives_during_a_canary_waits_and_the_held_one_is_not_promoted(tried: hps.HPS, write: Write) -> None:
    write(3, retrained())
    assert tried.poll() == {}
    assert ended(tried) == ("running", "")
    tried.deploy("ranker", "1", accept=True)  # it serves already
    assert ended(tried) == ("running", "")
    tried.unpin("ranker")
    assert ended(tried) == ("ended", "version 3 was deployed")
    tried.rollouts.tick()
    assert {version for version, state in versions(tried).items() if state != "kept"} == {"3"}


def test_a_shadow_compares_scores_in_process(document: Make, write: Write) -> None:
    with hps.HPS(document(**UNCHECKED)) as server:
        write(2, retrained(0.0), factor=1.5)
        server.deploy("ranker", shadow=1.0)
        inputs = {"item": np.array([7, 14]), "age": np.zeros(2, np.float32)}
        wanted = server.score("ranker", inputs)["score"]
        with server.routed("somebody"):
            np.testing.assert_array_equal(server.score("ranker", inputs)["score"], wanted)
        inputs["item"][:] = 0  # the caller's again
        status = server.rollout
        wait_until(lambda: status("ranker").counts.compared.requests, "it is compared")  # type: ignore[union-attr]
        assert status("ranker").counts.compared.difference == pytest.approx(0.5)  # type: ignore[union-attr]


def test_a_deployment_while_the_version_is_being_loaded_after_a_restart_ends_the_canary(
    document: Make, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    described = document(**UNCHECKED)
    with hps.HPS(described) as server:
        write(2, retrained())
        server.deploy("ranker", canary=0.25)
    with monkeypatch.context() as patch:
        patch.setattr("hps.versions.canary.rollouts.Rollouts.resume", lambda *_: None)
        server = hps.HPS(described)
    with server:
        assert server.rollouts.loading("ranker") == "version 2, a canary before the restart, is being loaded"
        server.deploy("ranker", "2")
        assert ended(server) == ("promoted", "")
        assert server.rollouts.loading("ranker") == ""


def test_a_version_that_was_rolled_back_and_then_deployed_stays(
    document: Make, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hps.HPS(document(**UNCHECKED, version_policy={"latest": {"num_versions": 2}})) as server:
        write(2, retrained())
        server.deploy("ranker", canary=0.25)
        server.rollouts.active["ranker"].counts.new.errors += 100
        before(server, monkeypatch, "take_out", lambda: server.deploy("ranker", "2"))
        server.rollouts.tick()
        assert ended(server)[0] == "rolled back"
        assert versions(server)["2"] == "serving"
        server.rollouts.tick()
        assert versions(server)["2"] == "serving"
