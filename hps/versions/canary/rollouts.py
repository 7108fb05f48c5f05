"""Carries rollouts out: counts, takes steps, rolls back by itself, and promotes."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from itertools import pairwise
from typing import Any, Final, Literal, Protocol

import pydantic

from hps.configuration.canary import CanaryConfig, CanaryStep
from hps.errors import ConflictError, HPSError, InvalidInputError, NotReadyError, UnknownModelError
from hps.ground.progress import Progress
from hps.ground.threads.workers import PeriodicTask
from hps.statistics.metrics import LiveMethods, Metrics
from hps.statistics.prometheus import Family, family, histogram, label_text
from hps.versions.canary.counts import RolloutCounts
from hps.versions.canary.judgement import Window, broken_bound, is_step_done
from hps.versions.canary.plan import RolloutMode, RolloutPlan, SenderSelection
from hps.versions.canary.records import ITSELF, RolloutRecord, RolloutRecords, RolloutState
from hps.versions.changes import Change
from hps.versions.live_models import LiveModels, is_transient

_log = logging.getLogger(__name__)
_TICK_S: Final = 1.0
_MOST_CRASHES: Final = 3
_WINDOWS_S: Final = (5.0, 60.0)  # beside the current step
_JUST_S: Final = 60.0
_TRIES: Final = 3
_OUTCOMES: Final = ("promoted", "rolled_back", "stopped", "ended")

Figures = Iterable[tuple[str, Sequence[float]]]
"""The ids of rollouts, and the values of their `RolloutCounts` in one process."""


class ChangesVersions(Protocol):
    """What a rollout needs of the reconciler."""

    def load_beside(
        self,
        name: str,
        version: str | None,
        *,
        progress: Progress | None,
        holds: bool,
        started: Callable[[str, str, Change], None],
    ) -> None:
        """Load a version, and leave it available beside the serving one; then call `started`."""

    def take_out(self, name: str, version: str, ended: Callable[[Change], None]) -> None:
        """Call `ended`, and take a version out of service unless it serves. Both while no other change can begin."""

    def promote(self, name: str, version: str, *, unpin: bool, accept: bool, started: Callable[[], None]) -> None:
        """Call `started`, which raises if the version shall not serve any more, and let it serve.

        Raises:
            ConflictError: the fleet does not try it out any more. As `started`.
        """

    def pin_to(self, name: str, version: str) -> bool:
        """Pin a model to its serving version, unless it is pinned or in a fleet; return whether it was done."""

    def in_fleet(self, name: str) -> bool:
        """Return True if a serving document says what every replica serves of a model."""

    def change_fleet(self, name: str, change: Literal["promote", "rollback"], version: str) -> None:
        """End the rollout of a version on every replica."""

    def replan_fleet(self, name: str, plan: RolloutPlan, following: RolloutPlan) -> None:
        """Replace the plan of a rollout on every replica."""

    def wanted_rollout(self, name: str) -> tuple[int, RolloutPlan | None] | None:
        """Return the number of a model's serving document and its rollout; None if it has no document."""

    def newest(self, name: str) -> str:
        """Return the highest version of a model."""

    def canary_config(self, name: str) -> CanaryConfig:
        """Return the defaults of a model."""


@dataclass(eq=False)
class LiveRollout:
    """A rollout of this process. Its record is replaced, never modified.

    Attributes:
        counts: of lookups and scores in this process, guarded by `lock`.
        states: (time, values) of all processes, the oldest first.
        step_began: begin of the step, by the clock of the process: that of the machine may be set meanwhile.
        step_values: values when the step began.
        problem: why it could not go on, as logged last.
    """

    record: RolloutRecord
    selection: SenderSelection
    counts: RolloutCounts = field(default_factory=RolloutCounts)
    lock: threading.Lock = field(default_factory=threading.Lock)
    states: deque[tuple[float, list[float]]] = field(default_factory=deque)
    step_began: float = 0.0
    step_values: list[float] | None = None
    problem: str = ""


@dataclass(frozen=True)
class RolloutStatus:
    """A rollout, under way or the last one. *Immutable.*

    Attributes:
        seconds, step_seconds: durations of the rollout and of its step, so far or in total.
    """

    record: RolloutRecord
    counts: RolloutCounts
    seconds: float
    step_seconds: float

    def described(self) -> dict[str, Any]:
        """Return it as JSON values, as `/v1/models` and `/v1/stats` have it."""
        record, counts = self.record, self.counts
        plan, compared = record.plan, counts.compared
        versions = [
            {
                "version": version,
                "requests": counted.requests,
                "errors": counted.errors,
                "error_rate": counted.error_rate,
                "p50_ms": _ms(counted.quantile_s(0.5)),
                "p99_ms": _ms(counted.quantile_s(0.99)),
            }
            for version, counted in ((record.serving, counts.old), (record.version, counts.new))
        ]
        difference = compared.difference
        return {
            "mode": plan.mode,
            "state": record.state,
            "version": record.version,
            "serving": record.serving,
            "share": record.share,
            "header": plan.config.header,
            "since": datetime.fromtimestamp(record.since, UTC).isoformat(timespec="milliseconds"),
            "seconds": self.seconds,
            "step": record.step + 1,
            "step_seconds": self.step_seconds,
            "steps": [step.model_dump() for step in plan.steps],
            "bounds": {
                "error_rate": plan.config.max_error_rate,
                "p99_factor": plan.config.max_p99_factor,
                "difference": plan.config.max_difference,
                "least_requests": plan.config.least_requests,
            },
            "versions": versions,
            "compared": {
                "requests": compared.requests,
                "identical": compared.identical,
                "failed": compared.failed,
                "dropped": compared.dropped,
                "difference": None if difference is None or difference > 1e300 else difference,
                "max_difference": compared.largest,
                "correlation": compared.correlation,
            },
            "by": record.by,
            "reason": record.reason,
        }


class Rollouts:
    """The rollouts of a parameter server. *Thread-safe.*

    Args:
        clock: monotonic time in seconds.

    Attributes:
        active: running rollouts by model. Replaced, never modified: lookups read it without a lock.
        figures: methods that return the counts of other processes.
    """

    def __init__(
        self,
        live: LiveModels,
        changes: ChangesVersions,
        records: RolloutRecords,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.active: Mapping[str, LiveRollout] = {}
        self.figures = LiveMethods[Callable[[], Figures]]()
        self._live = live
        self._changes = changes
        self._records = records
        self._metrics = metrics
        self._clock = clock
        self._lock = threading.Lock()
        self._known: dict[str, LiveRollout] = {}  # the last one of each model, under way or ended
        self._leaving: dict[str, str] = {}  # by model: version to take out of service
        self._promoting: set[str] = set()  # models whose version is about to serve: it is not judged any more
        self._followed: dict[str, int] = {}  # by model: number of the serving document whose rollout was begun or ended
        self._task: PeriodicTask | None = None
        self._closed = False
        live.watchers.insert(0, self.follow)  # before what publishes the versions
        metrics.others.add(self.families)

    # -- operations ---------------------------------------------------------------------------------------------------------

    def start(
        self,
        name: str,
        mode: RolloutMode,
        share: float | None,
        version: str | None = None,
        options: Mapping[str, Any] | None = None,
        *,
        accept: bool = False,
        progress: Progress | None = None,
    ) -> None:
        """Start a rollout, or change the share, steps and bounds of the one that is under way; see `HPS.deploy`."""
        if self._changes.in_fleet(name):
            raise ConflictError(
                f"deploying model {name!r} as a {mode}: its serving.json says what every replica serves; change it for all of "
                "them (--fleet, or POST /v1/models/{model}/fleet)"
            )
        self._begin(name, self.planned(name, mode, share, version, options, accept), progress)

    def _begin(self, name: str, plan: RolloutPlan, progress: Progress | None, document: int = 0) -> None:
        mode, accept = plan.mode, plan.accepted
        running = self._known.get(name)
        if running is not None and running.record.under_way and running.record.version != plan.version:
            raise ConflictError(
                f"deploying model {name!r}: a {running.record.plan.mode} of version {running.record.version} is under way; "
                f"`hps promote {name}` or `hps rollback {name}` ends it"
            )

        def started(serving: str, version: str, change: Change) -> None:
            before = self._known.get(name)
            pins = self._changes.pin_to(name, serving)
            record = RolloutRecord(model=name, plan=plan, serving=serving, pins=pins, document=document)
            if before is not None and before.record.under_way and before.record.plan.mode == mode:  # its counts go on
                record = before.record.model_copy(
                    update={"plan": plan, "document": document, "step": 0, "step_since": time.time(), "state": "running"}
                )
            elif before is not None and before.record.under_way:
                record = record.model_copy(update={"pins": before.record.pins or pins})
            with self._lock:
                self._leaving.pop(name, None)
            self._adopt(record)
            _log.info(
                "model %r: a %s of version %s begins, beside %s: %s", name, mode, plan.version, serving, _steps_text(plan)
            )

        # A shadow's answers are sent to nobody: seeing what a held version does is what it is for.
        holds = accept or mode == "shadow"
        self._changes.load_beside(name, plan.version, progress=progress, holds=holds, started=started)
        self._live.notify_watchers()

    def resume(self, name: str) -> None:
        """Load the new version of a kept rollout again, after a restart."""
        found = self._known.get(name)
        if found is None or found.record.state != "loading":
            return
        record = found.record

        def started(serving: str, version: str, change: Change) -> None:
            if serving == record.serving:  # its step begins again: while the process was away, the version proved nothing
                self._adopt(record.model_copy(update={"state": "running", "step_since": time.time()}))
            else:
                self._end(name, "ended", f"version {serving} was deployed", ITSELF, leaves=True)

        try:
            holds = record.plan.accepted or record.plan.mode == "shadow"
            self._changes.load_beside(name, record.version, progress=None, holds=holds, started=started)
        except (ConflictError, NotReadyError) as error:  # another change is under way: the next poll tries again
            _log.info("model %r: its %s goes on later: %s", name, record.plan.mode, error)
            return
        except HPSError as error:
            self._end(name, "ended", f"version {record.version} could not be loaded after a restart: {error}", ITSELF)
        self._live.notify_watchers()

    def promote(self, name: str, *, accept: bool = False, by: str = "") -> None:
        """Let the new version of a rollout serve all requests; see `HPS.promote`."""
        record = self._under_way(name, "promoting").record
        if by != ITSELF and self._changes.in_fleet(name):
            raise ConflictError(f"promoting model {name!r}: a fleet tries it out; promote it for all replicas (--fleet)")
        if record.state != "running":
            raise NotReadyError(f"promoting model {name!r}: version {record.version} is being loaded; try again later")
        accept, began = accept or record.plan.accepted, False

        def started() -> None:
            nonlocal began
            with self._lock:
                self._require_same(name, record, "promoting")
                self._promoting.add(name)
            began = True

        try:
            self._changes.promote(name, record.version, unpin=record.pins, accept=accept, started=started)
            self._end(name, "promoted", "", by or self._requested_by(name))
        finally:
            if began:
                self._promoting.discard(name)

    def roll_back(self, name: str, reason: str = "", by: str = "") -> None:
        """End a rollout; the serving version serves on. See `HPS.rollback`."""
        record = self._under_way(name, "rolling back").record
        if not by and self._changes.in_fleet(name):
            raise ConflictError(f"rolling back model {name!r}: a fleet tries a version out; end it for all replicas (--fleet)")

        def ended(change: Change) -> None:
            self._require_same(name, record, "rolling back")
            self._end(name, "rolled back", reason, by or change.by or self._requested_by(name))
            self._live.notify_watchers()

        self._changes.take_out(name, record.version, ended)

    def refuse_second_roll_back(self, name: str) -> None:
        """Refuse a roll-back of the serving version that may be meant for a version whose rollout has just ended.

        Raises:
            ConflictError: a rollout was rolled back within the last minute, by itself or by somebody; or another replica has
                ended it, which this one has not followed yet.
        """
        found, serving = self._known.get(name), self._live.serving.get(name)
        if found is None or serving is None or serving.version != (record := found.record).serving:
            return
        past_s = 0.0 if record.under_way else time.time() - (record.until or 0.0)
        if (record.under_way or record.state == "rolled back") and 0.0 <= past_s < _JUST_S:
            raise ConflictError(
                f"rolling back model {name!r}: the {record.plan.mode} of version {record.version} ended {past_s:.0f} s ago, "
                f"and {serving.version} serves; to replace that one, too, deploy another version by its number, or roll back "
                "in a minute"
            )

    def under_way(self, name: str) -> RolloutRecord | None:
        """Return the rollout of a model that is under way, if any."""
        found = self._known.get(name)
        return None if found is None or not found.record.under_way else found.record

    def loading(self, name: str) -> str:
        """Return why a model is not ready: the new version is being loaded after a restart; empty if it is not.

        Its clients would else be answered by the old version for a moment.
        """
        record = self.under_way(name)
        if record is None or record.state != "loading":
            return ""
        return f"version {record.version}, a {record.plan.mode} before the restart, is being loaded"

    def status(self, name: str) -> RolloutStatus | None:
        """Return the rollout of a model that is under way, or the last one; None if there was none."""
        if (found := self._known.get(name)) is None:
            return None
        record, now = found.record, found.record.until or time.time()
        return RolloutStatus(record, self._counted(found), max(0.0, now - record.since), max(0.0, now - record.step_since))

    def described(self, name: str) -> dict[str, Any] | None:
        """Return the status of a rollout as JSON values."""
        status = self.status(name)
        return None if status is None else status.described()

    def tried_out(self, name: str) -> Sequence[str]:
        """Return the version that a rollout keeps in service, if any."""
        record = self.under_way(name)
        return () if record is None else (record.version,)

    def published(self) -> dict[str, dict[str, Any]]:
        """Return the running rollouts by model, as frontends need them."""
        return {
            name: {
                "id": rollout.record.id,
                "mode": rollout.record.plan.mode,
                "version": rollout.record.version,
                "serving": rollout.record.serving,
                "share": rollout.record.share,
                "header": rollout.record.plan.config.header,
                "compare": rollout.record.plan.config.compare,
                "queue_requests": rollout.record.plan.config.queue_requests,
                "queue_bytes": rollout.record.plan.config.queue_bytes,
            }
            for name, rollout in self.active.items()
        }

    # -- what follows -------------------------------------------------------------------------------------------------------

    def follow_documents(self) -> None:
        """Continue kept rollouts, and begin and end others as the last read serving documents say."""
        for name in list(self._live.serving):
            self.resume(name)
            if (wanted := self._changes.wanted_rollout(name)) is not None:
                self._follow_document(name, *wanted)

    def _follow_document(self, name: str, number: int, plan: RolloutPlan | None) -> None:
        last, record = self._known.get(name), self.under_way(name)
        if record is not None and record.state == "loading":
            return
        if plan is not None and last is not None and last.record.document == number and last.record.gave_up:
            self._tell_fleet(name, plan.version)
            return
        if self._followed.get(name) == number:
            return
        try:
            if record is not None and (plan is None or plan.version != record.version):
                self.roll_back(name, "", "the fleet")
            if plan is not None and (record is None or plan != record.plan):
                self._begin(name, plan, None, number)
            elif plan is not None and last is not None:
                last.record = last.record.model_copy(update={"document": number})
                self._records.write(last.record)
        except (ConflictError, NotReadyError) as error:  # another change is under way
            _log.debug("model %r: following the fleet's rollout is retried: %s", name, error)
            return
        except HPSError as error:
            _log.error("model %r: this replica does not follow the fleet's rollout: %s", name, error)
            if is_transient(error):
                return
        self._followed[name] = number

    def _tell_fleet(self, name: str, version: str) -> None:
        """End a rollout for all replicas; the next read of the serving document tries again if that fails."""
        for tries_left in reversed(range(_TRIES)):
            try:
                self._changes.change_fleet(name, "rollback", version)
            except HPSError as error:
                if tries_left and isinstance(error, ConflictError):  # another replica has just written it: a step, say
                    continue
                _log.error("model %r: the other replicas do not know of the roll-back yet: %s", name, error)
            return

    def follow(self) -> None:
        """Follow a change of the versions in service: end a rollout that it ended, and find a kept one after a restart."""
        serving = self._live.serving
        if self._live.closed:  # a restart goes on
            return
        for name, deployment in serving.items():
            if name not in self._known and (kept := self._records.read(name)) is not None:
                self._continue(kept, deployment.version)
        for name, rollout in list(self._known.items()):
            record = rollout.record
            if not record.under_way:
                continue
            now, by = serving.get(name), self._requested_by(name)
            if now is None:
                self._end(name, "ended", "the model was undeployed", by)
            elif now.version == record.version:
                self._end(name, "promoted", "", by)
            elif now.version != record.serving:
                self._end(name, "ended", f"version {now.version} was deployed", by, leaves=True)
            elif record.state == "running" and self._live.deployed(name, record.version) is None:
                self._end(name, "ended", f"version {record.version} was undeployed", by)

    def tick(self) -> None:
        """Judge the running rollouts, take the steps that are due, and take the versions out that were rolled back."""
        for name, rollout in list(self.active.items()):
            try:
                self._judge(name, rollout)
            except (ConflictError, NotReadyError) as error:  # another change is under way
                _log.debug("model %r: retried: %s", name, error)
            except HPSError as error:
                if str(error) != rollout.problem:
                    _log.error("model %r: its rollout could not go on, which is retried: %s", name, error)
                rollout.problem = str(error)
        for name, version in list(self._leaving.items()):  # last: it waits for lookups of the version
            self._take_out_later(name, version)

    def families(self) -> Iterator[Family]:
        """Return the figures of the rollouts of models in service as Prometheus metric families."""
        found = [(name, self.status(name)) for name in list(self._live.serving)]
        statuses = [(name, status) for name, status in found if status is not None]
        shares, requests, times, compared = [], [], [], []
        for name, status in statuses:
            record, counts = status.record, status.counts
            if record.state == "running":
                labels = label_text(("model", "version", "mode"), (name, record.version, record.plan.mode))
                shares.append((labels, record.share))
            for version, counted in ((record.serving, counts.old), (record.version, counts.new)):
                where = ("model", "version"), (name, version)
                for outcome, count in (("ok", counted.answered), ("error", counted.errors)):
                    requests.append((label_text((*where[0], "outcome"), (*where[1], outcome)), count))
                times.append((label_text(*where), counted.latency()))
            both = counts.compared
            for outcome in ("identical", "different", "failed", "dropped"):
                labels = label_text(("model", "version", "outcome"), (name, record.version, outcome))
                compared.append((labels, getattr(both, outcome)))
        yield family("gauge", "hps_rollout_share", "Share of the requests of a canary or shadow under way.", shares)
        yield family("counter", "hps_rollout_requests", "Requests of both versions of the last rollout.", requests)
        yield histogram("hps_rollout_seconds", "Times of the requests of both versions of the last rollout.", times)
        yield family("counter", "hps_rollout_compared", "Requests that both versions answered, by outcome.", compared)

    def close(self) -> None:
        """Stop judging. Rollouts go on after a restart."""
        with self._lock:
            self._closed, task, self._task = True, self._task, None
            self.active, under_way = {}, [found.record for found in self._known.values() if found.record.under_way]
        for record in under_way:
            self._records.write(record.model_copy(update={"stopped": True}))
        if task is not None:
            task.abandon()

    def check_integrity(self) -> list[str]:
        """Return a sentence for each running rollout whose versions are not both in service."""
        found = []
        for name, rollout in list(self.active.items()):
            serving = self._live.serving.get(name)
            both = serving is not None and self._live.deployed(name, rollout.record.version) is not None
            if (not both or serving.version != rollout.record.serving) and self.active.get(name) is rollout:  # type: ignore[union-attr]
                found.append(f"model {name!r}: its rollout of version {rollout.record.version} runs, but not both versions are")
        return found

    # -- the steps ----------------------------------------------------------------------------------------------------------

    def planned(
        self,
        name: str,
        mode: RolloutMode,
        share: float | None,
        version: str | None,
        options: Mapping[str, Any] | None,
        accepted: bool,
    ) -> RolloutPlan:
        """Make the plan of a rollout from a request and the defaults of the model.

        Raises:
            InvalidInputError: the request is invalid.
        """
        running = self.under_way(name)
        config = self._changes.canary_config(name) if running is None else running.plan.config
        given = {key: value for key, value in (options or {}).items() if value is not None}
        try:
            config = CanaryConfig.model_validate({**config.model_dump(exclude={"steps"}), "steps": config.steps, **given})
            steps = () if mode == "shadow" and "steps" not in given else config.steps
            if share is not None:
                first = CanaryStep.model_validate({"share": share})
                steps = (
                    first if not steps or steps[0].share != first.share else steps[0],
                    *(step for step in steps if step.share > first.share),
                )
        except ValueError as error:
            found = error.errors() if isinstance(error, pydantic.ValidationError) else []
            text = "; ".join(f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in found) or str(error)
            raise InvalidInputError(f"deploying model {name!r} as a {mode}: {text}") from error
        if not steps:
            raise InvalidInputError(f"deploying model {name!r} as a {mode}: got no share, expected one, such as 0.05")
        if mode == "shadow" and len(steps) > 1 and steps[-1].share == 1.0 and steps[-1].seconds + steps[-1].requests == 0:
            raise InvalidInputError(f"deploying model {name!r} as a shadow: got a step that promotes; `hps promote` does")
        if version is None:
            version = self._changes.newest(name) if running is None else running.version
        if running is not None and running.version == version:
            accepted = accepted or running.plan.accepted
        return RolloutPlan(mode=mode, version=version, steps=steps, config=config, accepted=accepted)

    def _adopt(self, record: RolloutRecord) -> None:
        """Make this the rollout of its model, and keep it."""
        for outcome in _OUTCOMES:  # zeros, too: the first end is then visible as an increase
            self._metrics.rollout_ends.labels(record.model, outcome)
        with self._lock:
            before = self._known.get(record.model)
            rollout = LiveRollout(record, SenderSelection(record.model, record.version, record.share))
            rollout.step_began = self._clock()
            if before is not None and before.record.id == record.id:
                rollout.counts, rollout.lock, rollout.states = before.counts, before.lock, before.states
            self._known[record.model] = rollout
            running = {name: found for name, found in self._known.items() if found.record.state == "running"}
            if not self._closed:
                self.active = running
                if running and self._task is None:
                    self._task = PeriodicTask("rollouts", self.tick, _TICK_S, what="judging rollouts")
        rollout.step_values = self._counted(rollout).values()
        self._records.write(record)

    def _continue(self, kept: RolloutRecord, serving: str) -> None:
        """Continue a rollout after a restart, unless the new version may be what ends the process."""
        if not kept.under_way:
            self._adopt(kept)
            return
        crashes = kept.crashes + (not kept.stopped)
        self._adopt(kept.model_copy(update={"state": "loading", "stopped": False, "crashes": crashes}))
        if kept.serving != serving:
            self._end(kept.model, "ended", f"version {serving} was deployed", "")
        elif crashes >= _MOST_CRASHES:
            reason = f"the process crashed {crashes} times while version {kept.version} was tried out"
            self._end(kept.model, "rolled back", reason, ITSELF)

    def _end(self, name: str, state: RolloutState, reason: str, by: str, *, leaves: bool = False) -> bool:
        """End a rollout: from now on, the serving version answers all requests. Return False if it has ended before."""
        with self._lock:
            found = self._known.get(name)
            if found is None or not found.record.under_way:
                late = found is not None and found.record.state == state == "promoted" and not found.record.by
                if found is not None and late:
                    found.record = found.record.model_copy(update={"by": by})
                    self._records.write(found.record)
                return False
            if state == "rolled back" and by == ITSELF and name in self._promoting:
                return False
            if leaves:
                self._leaving[name] = found.record.version
            ended = found.record.ended(state, reason, by)
            found.record = ended  # nobody ends it a second time
        outcome = "stopped" if state == "rolled back" and by != ITSELF else state.replace(" ", "_")
        self._metrics.rollout_ends.labels(name, outcome).inc()
        text = f"{state}{f': {reason}' if reason else ''}"
        level = logging.ERROR if reason and by == ITSELF else logging.INFO
        _log.log(level, "model %r: the %s of version %s is %s", name, ended.plan.mode, ended.version, text)
        self._adopt(ended)
        return True

    def _judge(self, name: str, rollout: LiveRollout) -> None:
        record, now, values = rollout.record, self._clock(), self._counted(rollout).values()
        config = record.plan.config
        windows, states = [], [*rollout.states, (now, values)]
        for seconds in _WINDOWS_S:
            then, before = next(((at, state) for at, state in rollout.states if now - at <= seconds), (now, values))
            windows.append(Window(now - then, RolloutCounts.since(values, before), partial(_slices, states, then)))
        step_seconds = now - rollout.step_began
        of_step = RolloutCounts.since(values, rollout.step_values or values)
        windows.append(Window(step_seconds, of_step, partial(_slices, states, now - step_seconds)))
        rollout.states.append((now, values))
        while rollout.states and now - rollout.states[0][0] > _WINDOWS_S[-1]:
            rollout.states.popleft()
        if reason := broken_bound(windows, record.version, record.serving, config):
            # First no request goes to the version any more; `tick` takes it out, which waits for its last lookups.
            if self._end(name, "rolled back", reason, ITSELF, leaves=True):
                self._live.notify_watchers()
                self._tell_fleet(name, record.version)
            return
        if not is_step_done(record.plan.steps[record.step], step_seconds, of_step) or record.plan.is_last(record.step):
            return
        following = record.plan.steps[record.step + 1]
        if following.share == 1.0 and record.plan.mode == "canary":
            self.promote(name, by=ITSELF)
            return
        if (wanted := self._changes.wanted_rollout(name)) is not None:
            # The first replica whose step is done takes it for all: a client of several replicas would else change sides.
            if wanted[1] == record.plan:
                rest = record.plan.model_copy(update={"steps": record.plan.steps[record.step + 1 :]})
                self._changes.replan_fleet(name, record.plan, rest)
            return
        _log.info("model %r: version %s now gets %.3g %% of the requests", name, record.version, 100 * following.share)
        self._adopt(record.model_copy(update={"step": record.step + 1, "step_since": time.time()}))
        self._live.notify_watchers()

    def _take_out_later(self, name: str, version: str) -> None:
        """Take a version out of service, unless another change is under way: then at the next tick."""
        serving = self._live.serving.get(name)
        if serving is None or serving.version == version or self._live.deployed(name, version) is None:
            self._leaving.pop(name, None)
            return
        with suppress(ConflictError, NotReadyError):
            self._changes.take_out(name, version, lambda change: None)
            self._leaving.pop(name, None)

    def _counted(self, rollout: LiveRollout) -> RolloutCounts:
        """Return the counts of all processes."""
        with rollout.lock:
            parts: list[Sequence[float]] = [rollout.counts.values()]
        for figures in self.figures:
            parts += [values for identity, values in figures() if identity == rollout.record.id]
        return RolloutCounts.total(parts)

    def _under_way(self, name: str, doing: str) -> LiveRollout:
        found = self._known.get(name)
        if found is not None and found.record.under_way:
            return found
        if name not in self._live.serving:
            raise UnknownModelError(f"{doing} model {name!r}: it is not deployed")
        raise ConflictError(
            f"{doing} model {name!r}: no canary or shadow is under way; start one with `hps deploy {name} --canary 5%`"
        )

    def _require_same(self, name: str, record: RolloutRecord, doing: str) -> None:
        """Raise ConflictError unless this rollout is under way: a change may have ended it while another was about to begin."""
        if self._under_way(name, doing).record.id != record.id:
            raise ConflictError(f"{doing} model {name!r}: its canary or shadow has just been replaced by another one")

    def _requested_by(self, name: str) -> str:
        change = self._live.requested.get(name)
        return change.by if change is not None and change.under_way else ""


def _slices(states: Sequence[tuple[float, Sequence[float]]], since: float) -> list[RolloutCounts]:
    """Return the counts between successive states from a time on."""
    found = [values for at, values in states if at >= since]
    return [RolloutCounts.since(after, before) for before, after in pairwise(found)]


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds


def _steps_text(plan: RolloutPlan) -> str:
    return ", then ".join(f"{100 * step.share:.3g} %" for step in plan.steps)
