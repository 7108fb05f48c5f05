"""The life of a rollout, with versions that the test plays: what is counted on, kept, judged and taken out of service."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import hps
from hps.configuration.canary import CanaryConfig
from hps.statistics.metrics import Metrics
from hps.statistics.prometheus import expose
from hps.versions.canary import rollouts as rollouts_module
from hps.versions.canary.counts import RolloutCounts
from hps.versions.canary.records import ITSELF, ROLLOUTS, RolloutRecords
from hps.versions.canary.rollouts import LiveRollout, Rollouts
from hps.versions.kept_files import KeptFiles
from tests.fakes.clock import Clock

STEPS = [{"share": 0.1, "seconds": 10}, {"share": 0.5, "seconds": 10}, {"share": 1.0}]


class Server:
    """A parameter server of one model: the versions in service, and the changes that a rollout asks for."""

    def __init__(self, directory: Path, serving: str = "1") -> None:
        self.clock = Clock(1000.0)
        self.serving = {"m": SimpleNamespace(version=serving)}
        self.available: set[str] = set()
        self.requested: dict[str, Any] = {}
        self.watchers: list[Callable[[], None]] = []
        self.closed = False
        self.config = CanaryConfig()
        self.pins = True
        self.fleet: list[tuple[str, str]] = []
        self.wanted: Any = None
        self.unpinned: list[bool] = []
        self.taken_out: list[str] = []
        self.refuses: Exception | None = None  # the next change
        self.metrics = Metrics()
        live: Any = self
        records = RolloutRecords(KeptFiles(directory, ROLLOUTS))
        self.rollouts = Rollouts(live, live, records, self.metrics, self.clock)
        self.notify_watchers()

    # -- of `LiveModels`

    def deployed(self, name: str, version: str) -> Any:
        return version if version in (*self.available, self.serving[name].version) else None

    def notify_watchers(self) -> None:
        for watcher in self.watchers:
            watcher()

    # -- of `ChangesVersions`

    def _change(self) -> None:
        refuses, self.refuses = self.refuses, None
        if refuses is not None:
            raise refuses

    def load_beside(self, name: str, version: str, *, progress: Any, holds: bool, started: Any) -> None:
        self._change()
        self.available.add(version)
        started(self.serving[name].version, version, None)

    def take_out(self, name: str, version: str, ended: Any) -> None:
        self._change()
        ended(SimpleNamespace(by=""))
        self.available.discard(version)
        self.taken_out.append(version)

    def promote(self, name: str, version: str, *, unpin: bool, accept: bool, started: Any) -> None:
        started()
        self._change()
        self.unpinned.append(unpin)
        self.available.discard(version)
        self.serving = {name: SimpleNamespace(version=version)}
        self.notify_watchers()

    def pin_to(self, name: str, version: str) -> bool:
        pinned, self.pins = self.pins, False  # it is pinned from then on
        return pinned

    def in_fleet(self, name: str) -> bool:
        return self.wanted is not None

    def change_fleet(self, name: str, change: str, version: str) -> None:
        self.fleet.append((change, version))

    def wanted_rollout(self, name: str) -> Any:
        return self.wanted

    def newest(self, name: str) -> str:
        return "2"

    def canary_config(self, name: str) -> CanaryConfig:
        return self.config

    # -- of the test

    def begin(self, share: float | None = 0.1, **options: Any) -> LiveRollout:
        self.rollouts.start("m", "canary", share, "2", options)
        return self.rollouts.active["m"]

    @property
    def state(self) -> tuple[str, int, str]:
        record = self.record
        return record.state, record.step, record.by

    @property
    def record(self) -> Any:
        status = self.rollouts.status("m")
        assert status is not None
        return status.record

    def answer(self, new: int = 1, old: int = 1, errors: int = 0) -> None:
        """Count requests of both versions in this process."""
        counts = self.rollouts.active["m"].counts
        for counted, number in ((counts.new, new), (counts.old, old)):
            for _ in range(number):
                counted.succeeded(1000, 1000)
        counts.new.errors += errors

    def tick(self, seconds: float = 1.0) -> None:
        self.clock.now += seconds
        self.rollouts.tick()


@pytest.fixture(autouse=True)
def no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollouts_module, "PeriodicTask", lambda *arguments, **options: SimpleNamespace(abandon=lambda: None))


@pytest.fixture
def server(tmp_path: Path) -> Server:
    return Server(tmp_path)


def test_a_changed_rollout_counts_on_begins_its_steps_again_and_keeps_its_pin(server: Server) -> None:
    server.begin(None, steps=STEPS)
    server.answer()
    server.tick()
    server.tick(9.0)
    assert server.state == ("running", 1, "")
    identity = server.record.id
    server.answer()
    states = len(server.rollouts.active["m"].states)
    server.begin(0.2, steps=[{"share": 0.2, "seconds": 10}, {"share": 0.6}])
    assert (server.record.id, server.record.step, server.record.share, server.record.pins) == (identity, 0, 0.2, True)
    assert server.rollouts.active["m"].counts.new.answered == 2
    assert len(server.rollouts.active["m"].states) == states == 2, "the last minute is judged on"
    server.answer()
    server.tick(9.9)
    assert server.record.step == 0, "the step has begun again"
    server.tick(0.1)
    assert server.record.step == 1


def test_a_canary_that_becomes_a_shadow_keeps_the_pin_that_it_has_made(server: Server) -> None:
    server.begin()
    server.rollouts.start("m", "shadow", 0.1, "2")
    server.rollouts.promote("m")
    assert server.unpinned == [True]


def test_a_step_is_judged_by_its_own_requests_and_seconds(server: Server) -> None:
    server.begin(None, steps=[{"share": 0.1, "requests": 3}, {"share": 0.2, "requests": 3}, {"share": 0.5}])
    server.answer(new=3)
    server.tick()
    assert server.record.step == 1
    server.answer(new=2)
    server.tick()
    assert server.record.step == 1, "those of the last step are not of this one"
    server.answer()
    server.tick()
    server.tick()
    assert server.state == ("running", 2, "")


def test_the_states_of_the_last_minute_alone_are_kept(server: Server) -> None:
    rollout = server.begin()
    for _ in range(200):
        server.tick()
    assert len(rollout.states) == 61
    server.answer(new=1000, old=1000)
    for _ in range(5):
        server.tick()
    server.answer(new=0, errors=3)
    server.tick()
    assert server.record.reason.startswith("error rate of version 2 is 100.0% (3 of 3 requests in 5 s)")


def test_what_broke_a_bound_is_taken_out_also_if_another_change_is_under_way(server: Server) -> None:
    server.begin()
    server.answer(errors=5)
    server.refuses = hps.ConflictError("another change")
    server.tick()
    assert (server.state[0], server.state[2], server.available, server.fleet) == (
        "rolled back",
        ITSELF,
        {"2"},
        [("rollback", "2")],
    )
    assert "m" not in server.rollouts.active, "no request goes there any more"
    server.tick()
    assert (server.available, server.taken_out) == (set(), ["2"])
    server.tick()
    assert server.taken_out == ["2"]


def test_a_version_that_is_tried_again_before_it_was_taken_out_stays(server: Server) -> None:
    server.begin()
    server.answer(errors=5)
    server.refuses = hps.ConflictError("another change")
    server.tick()
    server.begin()
    server.tick()
    assert (server.available, server.state) == ({"2"}, ("running", 0, ""))


def test_a_failed_promotion_leaves_a_version_that_is_judged_on(server: Server) -> None:
    server.begin()
    server.refuses = hps.DatabaseError("not now")
    with pytest.raises(hps.DatabaseError):
        server.rollouts.promote("m", by="somebody")
    assert server.state == ("running", 0, "")
    server.answer(errors=5)
    server.tick()
    assert (server.state[0], server.state[2]) == ("rolled back", ITSELF)


def test_a_shadow_with_steps_never_promotes_and_a_canary_does(server: Server) -> None:
    server.rollouts.start("m", "shadow", None, "2", {"steps": [{"share": 0.5, "requests": 1}, {"share": 1.0, "requests": 1}]})
    server.answer()
    for _ in range(3):
        server.answer()
        server.tick()
    assert (server.state, server.unpinned) == (("running", 1, ""), [])
    server.rollouts.roll_back("m")
    server.begin(None, steps=[{"share": 0.5, "requests": 1}, {"share": 1.0}])
    server.answer()
    server.tick()
    assert (server.state[0], server.state[2], server.serving["m"].version) == ("promoted", ITSELF, "2")


def test_a_promotion_says_who_it_was_also_to_the_next_process(server: Server, tmp_path: Path) -> None:
    server.begin()
    server.rollouts.promote("m", by="somebody")
    assert server.state == ("promoted", 0, "somebody")
    assert Server(tmp_path, "2").state == ("promoted", 0, "somebody")


@pytest.mark.parametrize("stops", [True, False])
def test_a_restart_counts_crashes_alone_and_begins_the_step_again(server: Server, tmp_path: Path, stops: bool) -> None:
    server.begin(None, steps=STEPS)
    server.answer()
    server.tick(10.0)
    assert server.record.step == 1
    if stops:
        server.rollouts.close()
    again = Server(tmp_path)
    assert (again.record.state, again.record.step, again.record.crashes) == ("loading", 1, int(not stops))
    assert again.record.share == 0.0
    assert again.rollouts.tried_out("m") == ("2",), "it is kept in service while it is loaded"
    again.rollouts.resume("m")
    assert again.state == ("running", 1, "")
    [kept] = (tmp_path / ROLLOUTS).glob("*.json")
    assert json.loads(kept.read_text())["stopped"] is False, "the next crash is one"


def test_another_version_that_serves_when_the_kept_one_is_loaded_ends_the_rollout(server: Server, tmp_path: Path) -> None:
    server.begin()
    again = Server(tmp_path)
    serving, again.serving = again.serving, {"m": SimpleNamespace(version="3")}
    again.rollouts.resume("m")
    assert (again.record.state, again.record.reason) == ("ended", "version 3 was deployed")
    again.tick()
    assert again.taken_out == ["2"], "what was loaded for it does not stay"
    assert serving["m"].version == "1"


def test_another_version_that_is_deployed_ends_the_rollout_and_takes_its_version_out(server: Server) -> None:
    server.begin()
    server.serving = {"m": SimpleNamespace(version="3")}
    server.notify_watchers()
    assert (server.record.state, server.record.reason) == ("ended", "version 3 was deployed")
    server.tick()
    assert server.taken_out == ["2"]


def test_the_counts_of_other_processes_are_those_of_the_same_rollout(server: Server) -> None:
    rollout = server.begin()
    others = RolloutCounts()
    others.new.succeeded(1000, 1000)
    figures = [(rollout.record.id, others.values()), ("another", others.values())]

    class Frontends:
        def read(self) -> Any:
            return figures

    frontends = Frontends()
    server.rollouts.figures.add(frontends.read)
    server.answer()
    status = server.rollouts.status("m")
    assert status is not None
    assert (status.counts.new.answered, status.counts.old.answered) == (2, 1)
    shown = expose(server.rollouts.families()).decode()
    assert 'hps_rollout_requests_total{model="m",outcome="ok",version="1"} 1' in shown
    assert 'hps_rollout_requests_total{model="m",outcome="ok",version="2"} 2' in shown


def test_who_ended_a_rollout_is_the_outcome_that_is_counted(server: Server) -> None:
    for ends, outcome in (
        (lambda: server.rollouts.roll_back("m"), "stopped"),
        (lambda: (server.answer(errors=5), server.tick()), "rolled_back"),
        (lambda: server.rollouts.promote("m"), "promoted"),
    ):
        server.begin()
        ends()
        assert server.metrics.rollout_ends.labels("m", outcome).value == 1


def test_a_person_who_accepted_a_held_version_need_not_do_it_again_for_more_of_it(server: Server) -> None:
    server.rollouts.start("m", "canary", 0.1, "2", accept=True)
    server.begin(0.5)
    assert server.record.plan.accepted
    server.rollouts.roll_back("m")
    server.begin(0.5)
    assert not server.record.plan.accepted, "another rollout"


def test_a_share_takes_the_place_of_the_steps_below_it(server: Server) -> None:
    server.config = CanaryConfig.model_validate({"steps": STEPS})
    for share, shares, seconds in ((0.05, [0.05, 0.1, 0.5, 1.0], 0), (0.1, [0.1, 0.5, 1.0], 10), (0.5, [0.5, 1.0], 0)):
        plan = server.rollouts.planned("m", "canary", share, None, None, False)
        assert ([step.share for step in plan.steps], plan.steps[0].seconds) == (shares, seconds)


def test_a_fleets_document_begins_a_rollout_once(server: Server) -> None:
    plan = server.rollouts.planned("m", "canary", 0.1, "2", None, False)
    server.wanted = (7, plan)
    server.rollouts.follow_documents()
    assert (server.state, server.record.document) == (("running", 0, ""), 7)
    server.rollouts.roll_back("m", by="somebody")
    server.rollouts.follow_documents()
    assert server.state == ("rolled back", 0, "somebody"), "the same document does not begin it again"
    server.wanted = (8, plan)
    server.rollouts.follow_documents()
    assert (server.state, server.record.document) == (("running", 0, ""), 8)


def test_a_rollout_that_a_person_ended_is_not_told_to_the_fleet_as_given_up(server: Server) -> None:
    plan = server.rollouts.planned("m", "canary", 0.1, "2", None, False)
    server.wanted = (7, plan)
    server.rollouts.follow_documents()
    server.rollouts.roll_back("m", by="the fleet")
    server.rollouts.follow_documents()
    assert server.fleet == []
