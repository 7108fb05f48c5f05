"""A canary from its begin to its end: who answers, what polling, pins, restarts and other changes do to it."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hps
from hps.statistics.prometheus import expose
from hps.testing.waiting import wait_until
from tests.ring2.versions.test_checks_in_process import SHUFFLED, Make, Write, retrained
from tests.ring2.versions.test_checks_in_process import document as document  # fixtures
from tests.ring2.versions.test_checks_in_process import engine as engine
from tests.ring2.versions.test_checks_in_process import home as home
from tests.ring2.versions.test_checks_in_process import write as write

UNCHECKED = {"checks": False}
INPUTS = {"item": [7, 14], "age": [0.0, 0.0]}
Scored = Callable[[str], str]


def versions(server: hps.HPS) -> dict[str, str]:
    wait_until(lambda: "retiring" not in [version.state for version in server.versions("ranker")], "no version retires")
    return {version.version: version.state for version in server.versions("ranker")}


def ended(server: hps.HPS) -> tuple[str, str]:
    status = server.rollout("ranker")
    assert status is not None
    return status.record.state, status.record.reason


def answering(server: hps.HPS, users: int = 400) -> dict[str, int]:
    """How many of some users each version scores for."""
    found: dict[str, int] = {}
    for user in range(users):
        with server.routed(f"user-{user}"):
            version = server.score("ranker", INPUTS).version
        found[version] = found.get(version, 0) + 1
    return found


def test_a_canary_answers_its_share_until_it_is_promoted_and_polling_waits(document: Make, write: Write) -> None:
    with hps.HPS(document(**UNCHECKED)) as server:
        write(2, retrained())
        assert server.deploy("ranker", canary=0.25).version == "1"
        assert versions(server) == {"1": "serving", "2": "available"}
        first = answering(server)
        assert 70 < first["2"] < 130
        assert server.score("ranker", INPUTS).version == "1", "a call for nobody is the serving version's"
        assert server.score("ranker", INPUTS, version="2").version == "2"
        server.deploy("ranker", canary=0.5)
        assert answering(server)["2"] > first["2"]
        status = server.rollout("ranker")
        assert status is not None
        assert status.counts.old.answered + status.counts.new.answered == 800, "a larger share counts on"
        write(3, retrained())
        assert server.poll() == {}, "a still newer version waits"
        assert server.promote("ranker").version == "2"
        assert ended(server) == ("promoted", "")
        assert answering(server) == {"2": 400}
        assert versions(server) == {"2": "serving", "1": "kept"}
        assert server.pin("ranker").version == "2", "version 3 was not tried out"  # type: ignore[union-attr]
        assert server.rollback("ranker").version == "1"
        assert server.check() == []


def test_a_promoted_version_that_the_policy_chooses_is_not_pinned(document: Make, write: Write) -> None:
    with hps.HPS(document(**UNCHECKED)) as server:
        write(2, retrained())
        server.deploy("ranker", shadow=0.5)
        assert server.pin("ranker") is not None
        server.promote("ranker")
        assert server.pin("ranker") is None
        assert server.poll() == {}


def test_a_roll_back_ends_the_canary_and_polling_does_not_bring_it_back(document: Make, write: Write) -> None:
    with hps.HPS(document(**UNCHECKED)) as server:
        write(2, retrained())
        server.deploy("ranker", canary=1.0, options={"steps": [{"share": 0.9}]})
        assert server.rollback("ranker").version == "1"
        assert ended(server) == ("rolled back", "")
        assert versions(server) == {"1": "serving"}
        assert server.poll() == {}
        with pytest.raises(hps.ConflictError, match="no canary or shadow is under way"):
            server.promote("ranker")


def test_the_duration_of_a_canary_ends_with_it(document: Make, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    with hps.HPS(document(**UNCHECKED)) as server:
        write(2, retrained())
        server.deploy("ranker", canary=0.5)
        server.rollback("ranker")

        def seconds() -> tuple[float, float]:
            status = server.rollout("ranker")
            assert status is not None
            return status.seconds, status.step_seconds

        whole, later = seconds(), time.time() + 7200
        monkeypatch.setattr(time, "time", lambda: later)
        assert seconds() == whole


@pytest.mark.parametrize(
    ("change", "state", "reason"),
    [
        (lambda server: server.deploy("ranker", "3"), "ended", "version 3 was deployed"),
        (lambda server: server.deploy("ranker", "2"), "promoted", ""),
        (lambda server: server.undeploy("ranker", "2"), "ended", "version 2 was undeployed"),
        (lambda server: server.undeploy("ranker"), "ended", "the model was undeployed"),
        (lambda server: server.undeploy("ranker", "1"), "promoted", ""),
    ],
    ids=["another version", "its version", "undeployed", "model undeployed", "serving version undeployed"],
)
def test_other_changes_end_a_canary(
    document: Make, write: Write, change: Callable[[hps.HPS], object], state: str, reason: str
) -> None:
    with hps.HPS(document(**UNCHECKED)) as server:
        for version in (2, 3):
            write(version, retrained())
        server.deploy("ranker", "1")
        server.deploy("ranker", "2", canary=0.5)
        change(server)
        assert ended(server) == (state, reason)
        server.rollouts.tick()
        shown = b"hps_rollout_requests_total{" in expose(server.rollouts.families())
        assert shown == ("ranker" in server.models)
        if "ranker" in server.models:
            serving = server.model("ranker").version
            assert {version for version, now in versions(server).items() if now != "kept"} == {serving}
            assert answering(server, 20) == {serving: 20}
        assert server.rollouts.check_integrity() == []


def test_a_change_of_settings_leaves_a_canary(document: Make, write: Write, home: Path) -> None:
    with hps.HPS(document(**UNCHECKED)) as server:
        write(2, retrained())
        server.deploy("ranker", canary=0.5)
        document(**UNCHECKED, gpucacheper=0.5)
        assert server.poll() == {"ranker": None}
        assert ended(server) == ("running", "")
        assert versions(server) == {"1": "serving", "2": "available"}


def test_a_restart_continues_a_canary_with_the_same_users(document: Make, write: Write) -> None:
    described = document(**UNCHECKED)
    with hps.HPS(described) as server:
        write(2, retrained())
        server.deploy("ranker", canary=0.25)
        before = answering(server)
        server.insert([7], np.ones((1, 16), np.float32), "ranker", "item", version="2")
    with hps.HPS(described) as server:
        assert ended(server) == ("running", "")
        assert answering(server) == before
        assert server.row(7, "ranker", "item", version="2").vector[0] == 1.0, "its online writes are kept"
        server.rollback("ranker")
    with hps.HPS(described) as server:
        assert ended(server) == ("rolled back", "")
        assert versions(server) == {"1": "serving"}


def test_a_process_that_crashes_again_and_again_gives_the_canary_up(
    document: Make, write: Write, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    described = document(**UNCHECKED)
    with hps.HPS(described) as server:
        write(2, retrained())
        server.deploy("ranker", canary=0.25)
        [kept] = (tmp_path / "rocksdb").glob("hps-rollouts/*.json")
        crashed = kept.read_text()
    for crashes in (1, 2):
        kept.write_text(crashed)
        with hps.HPS(described) as server:
            assert ended(server) == ("running", "")
            assert json.loads(kept.read_text())["crashes"] == crashes
            crashed = kept.read_text()
    kept.write_text(crashed)
    with hps.HPS(described) as server:
        assert ended(server) == ("rolled back", "the process crashed 3 times while version 2 was tried out")
        assert "the canary of version 2 is rolled back: the process crashed 3 times" in caplog.text
        assert server.metrics.rollout_ends.labels("ranker", "rolled_back").value == 1
        assert versions(server) == {"1": "serving"}


def test_a_canary_that_cannot_be_loaded_after_a_restart_ends_and_the_model_serves(
    document: Make, write: Write, home: Path
) -> None:
    described = document(**UNCHECKED)
    with hps.HPS(described) as server:
        write(2, retrained())
        server.deploy("ranker", canary=0.25)
    (home / "2").rename(home.parent.parent / "gone")
    with hps.HPS(described) as server:
        state, reason = ended(server)
        assert state == "ended"
        assert reason.startswith("version 2 could not be loaded after a restart")
        assert answering(server, 20) == {"1": 20}


def test_steps_are_taken_by_requests_and_the_last_one_promotes(document: Make, write: Write) -> None:
    with hps.HPS(
        document(**UNCHECKED, canary={"steps": [{"share": 0.5, "requests": 5}, {"share": 0.8, "requests": 5}, {"share": 1.0}]})
    ) as server:
        write(2, retrained())
        server.deploy("ranker", canary=0.5)
        for step in (2, 3):
            answering(server, 40)
            server.rollouts.tick()
            status = server.rollout("ranker")
            assert status is not None
            assert status.record.step + 1 == min(step, 2)
        assert ended(server) == ("promoted", "")
        assert status.record.by == "itself"
        assert answering(server, 20) == {"2": 20}


def test_a_version_that_fails_is_answered_for_and_rolled_back(document: Make, write: Write, home: Path) -> None:
    with hps.HPS(document(**UNCHECKED)) as server:
        write(2, retrained())
        (home / "2" / "dense.json").write_text(json.dumps({"does": "raise"}))
        manifest = json.loads((home / "2" / "version.json").read_text())
        manifest.pop("files", None)
        (home / "2" / "version.json").write_text(json.dumps(manifest))
        server.deploy("ranker", canary=0.25)
        assert answering(server) == {"1": 400}
        server.rollouts.tick()
        state, reason = ended(server)
        assert state == "rolled back"
        assert reason.startswith("error rate of version 2 is 100.0%")
        assert versions(server) == {"1": "serving"}


def test_a_held_version_is_tried_out_only_if_a_person_wants_it(document: Make, write: Write) -> None:
    with hps.HPS(document()) as server:
        write(2, SHUFFLED)
        with pytest.raises(hps.VersionHeldError, match="version 2 is held, and 1 serves: vectors"):
            server.deploy("ranker", canary=0.05)
        counts = server.metrics.model_changes
        assert [counts.labels("ranker", "deploy", outcome).value for outcome in ("held", "failed")] == [1, 0], (
            "as without a canary"
        )
        assert versions(server) == {"1": "serving", "2": "held"}
        assert server.rollout("ranker") is None
        server.deploy("ranker", shadow=0.05)  # its answers are sent to nobody
        with pytest.raises(hps.VersionHeldError):
            server.promote("ranker")
        server.deploy("ranker", canary=0.25, accept=True)
        assert answering(server)["2"] > 50
        server.deploy("ranker", canary=0.5)  # accepted before
        assert server.promote("ranker").version == "2"


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"canary": 0.0}, "share: Input should be greater than 0"),
        ({"canary": 1.5}, "share: Input should be less than or equal to 1"),
        ({"canary": 0.1, "shadow": 0.1}, "got both of canary and shadow"),
        ({"options": {"header": "x"}}, "got none of canary and shadow"),
        ({"canary": 0.1, "options": {"header": "a b"}}, "the name of a header"),
        ({"canary": 0.1, "options": {"steps": [{"share": 0.5}, {"share": 0.4}]}}, "shares that rise"),
        ({"canary": 0.1, "options": {"header": 101 * "x"}}, "the name of a header"),
        ({"canary": 0.1, "options": {"steps": [{"share": n / 51} for n in range(1, 52)]}}, "at most 50 items"),
        ({"canary": float("nan")}, "share"),
        ({"canary": -0.05}, "share: Input should be greater than 0"),
        ({"canary": 0.1, "force": True}, "takes neither a configuration nor force"),
        ({"canary": 0.1, "version": "1"}, "that one serves"),
        ({"canary": 0.1, "version": "9"}, "got version '9'"),
    ],
)
def test_a_canary_that_makes_no_sense_is_refused(document: Make, write: Write, asked: dict[str, Any], message: str) -> None:
    with hps.HPS(document(**UNCHECKED)) as server:
        write(2, retrained())
        with pytest.raises(hps.HPSError, match=message):
            server.deploy("ranker", **asked)
        assert server.rollout("ranker") is None


def test_a_shadow_compares_lookups_in_process_and_another_version_waits_for_its_end(document: Make, write: Write) -> None:
    with hps.HPS(document(**UNCHECKED)) as server:
        for version in (2, 3):
            write(version, retrained())
        server.deploy("ranker", "1")
        server.deploy("ranker", "2", shadow=1.0, options={"steps": [{"share": 0.999}]})
        with pytest.raises(hps.ConflictError, match="a shadow of version 2 is under way"):
            server.deploy("ranker", "3", canary=0.05)
        wanted = server.lookup([7, 14], "ranker", "item")
        with server.routed("somebody"):
            np.testing.assert_array_equal(server.lookup([7, 14], "ranker", "item"), wanted)
        status = server.rollout
        wait_until(lambda: status("ranker").counts.compared.requests, "the lookup is compared")  # type: ignore[union-attr]
        assert status("ranker").counts.compared.different == 1  # type: ignore[union-attr]
