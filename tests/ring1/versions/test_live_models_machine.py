"""The states of one model's versions, by every order of changes, failures, retries and lookups that end late, against a model.

Longer in tests/nightly/versions.
"""

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import hps
from hps.testing.waiting import wait_until
from hps.versions import live_models
from hps.versions.deployment import Deployment
from hps.versions.live_models import FIRST_RETRY_S, LONGEST_RETRY_S, LiveModels
from tests.fakes.clock import Clock
from tests.fakes.fake_deployment import ENTRY, fake

VERSION = st.sampled_from(["1", "2", "3"])


class LiveModelsMachine(RuleBasedStateMachine):
    """`serving`, `kept` and `held` are versions; `held` still has lookups and was replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(live_models, "DRAIN_S", 0.0)
        self.patch.setattr(live_models, "_RELEASE_PAUSE_S", 0.001)
        self.clock = Clock(0.0)
        self.live = LiveModels(clock=self.clock)
        self.serving: Any = None
        self.busy = False  # whether a lookup of what serves runs
        self.held: Any = None
        self.kept: list[Any] = []
        self.wanted = False
        self.failures = 0
        self.is_transient = False

    # -- what is wanted, and what fails ---------------------------------------------------------------------------------

    @rule()
    def want(self) -> None:
        self.live.expect(ENTRY)
        self.wanted, self.failures = True, 0

    @rule()
    def give_up(self) -> None:
        self.live.stop_expecting("m")
        self.wanted = False

    @precondition(lambda self: not self.held)
    @rule(is_transient=st.booleans())
    def fail(self, is_transient: bool) -> None:
        error = hps.ModelSourceError("no answer") if is_transient else hps.ModelFileError("not a model")
        change = self.live.start_change("m", "deploying")
        self.live.record_failure("m", error)
        self.live.finish_change(change, error)
        assert change.error == str(error)
        self.failures, self.is_transient = self.failures + 1, is_transient
        failure = self.live.failure("m")
        assert failure is not None
        pause = min(FIRST_RETRY_S * 2 ** (self.failures - 1), LONGEST_RETRY_S)
        assert 0.75 * pause <= failure.due - self.clock.now <= pause
        assert (failure.count, failure.is_transient) == (self.failures, is_transient)

    @rule(seconds=st.sampled_from([1.0, 10.0, 1000.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    # -- changes --------------------------------------------------------------------------------------------------------

    @precondition(lambda self: not self.held)
    @rule(version=VERSION)
    def deploy(self, version: str) -> None:
        with self.live.changing("m", "deploying"):
            self.take_over(fake(version))
            self.live.deployed_by_policy("m", (ENTRY, ((version, "files"),)))
        self.failures = 0
        assert not self.live.needs_deployment("m", (ENTRY, ((version, "files"),)))
        assert self.live.needs_deployment("m", (ENTRY, ((version, "other files"),)))

    @precondition(lambda self: not self.held and self.serving and self.kept)
    @rule()
    def roll_back(self) -> None:
        with self.live.changing("m", "rolling back"):
            kept = self.live.kept("m")[-1]
            assert kept is self.kept.pop()
            self.take_over(fake(kept.version), kept)

    def take_over(self, deployment: Deployment, kept: Deployment | None = None) -> None:
        before, self.serving = self.serving, deployment
        self.live.serve(deployment, lambda versions: [], "keep", kept)
        if before is not None and self.busy:
            self.held = before
        elif before is not None:
            self.kept.append(before)
        self.busy = False

    @precondition(lambda self: not self.held and self.serving)
    @rule()
    def undeploy(self) -> None:
        self.serving.released.set()
        with self.live.changing("m", "undeploying"):
            for one in self.live.withdraw("m", None):
                self.live.retire("m", one, "release")
            self.live.drop_kept("m", self.live.kept("m"), "release")
        self.serving, self.kept, self.busy, self.wanted = None, [], False, False

    @precondition(lambda self: self.serving)
    @rule()
    def look_up(self) -> None:
        self.serving.released.clear()
        self.busy = True

    @precondition(lambda self: self.held)
    @rule()
    def end_the_last_lookup(self) -> None:
        self.held.released.set()
        self.kept.append(self.held)
        self.held = None

    @precondition(lambda self: self.held)
    @rule(doing=st.sampled_from(["deploying", "rolling back", "undeploying"]))
    def change_while_one_retires(self, doing: str) -> None:
        with pytest.raises(hps.NotReadyError, match="previous deployment still run"), self.live.changing("m", doing):
            raise AssertionError("it must not begin")

    @rule(by=st.sampled_from(["", "somebody"]))
    def change_while_another_does(self, by: str) -> None:
        change = self.live.start_change("m", "deploying", "deploy", by)
        assert self.live.change_of("m") == "deploying"
        with pytest.raises(hps.ConflictError, match="under way"), self.live.changing("m", "undeploying"):
            raise AssertionError("it must not begin")
        assert "m" not in self.live.due()
        self.live.finish_change(change)

    # -- what everybody sees --------------------------------------------------------------------------------------------

    @invariant()
    def versions_have_their_states(self) -> None:
        expected = [(self.serving, "serving")] if self.serving else []
        expected += [(one, "kept") for one in self.kept]
        expected += [(self.held, "retiring")] if self.held else []
        wait_until(lambda: self.live.versions("m") == expected, "the versions have their states")
        assert self.live.serving == ({"m": self.serving} if self.serving else {})
        assert self.live.all() == ([self.serving] if self.serving else [])
        assert self.live.change_of("m") == ""
        assert self.live.check_integrity() == []

    @invariant()
    def the_model_is_tried_again_when_it_is_due(self) -> None:
        waits = self.wanted and not self.serving
        [life] = self.live.models() or [None]
        if life is None:
            assert (self.wanted, self.serving) == (False, None)
            return
        assert life.state == ("serving" if self.serving else "failed" if self.failures else "wanted")
        due = self.live.due()
        assert ("m" in due) == (waits and (not self.failures or self.is_transient))
        if waits and self.failures and self.is_transient:
            assert life.retry_in_s == max(0.0, due["m"] - self.clock.now)
        else:
            assert life.retry_in_s is None

    def teardown(self) -> None:
        for one in (self.serving, self.held):
            if one is not None:
                one.released.set()
        self.live.close(10.0)
        self.patch.undo()


TestLiveModels = LiveModelsMachine.TestCase
TestLiveModels.settings = settings(max_examples=25, stateful_step_count=25, deadline=None, print_blob=True)
