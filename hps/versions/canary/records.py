"""The rollout of a model as it is kept beside the persistent database, so that a restart continues it."""

import logging
import secrets
import time
from typing import Final, Literal, TypeAlias

import pydantic

from hps.errors import DatabaseError
from hps.versions.canary.plan import RolloutPlan
from hps.versions.kept_files import KeptFiles

_log = logging.getLogger(__name__)
ROLLOUTS: Final = "hps-rollouts"
ITSELF: Final = "itself"
"""Who ends a rollout whose bound is broken, or takes its steps."""

RolloutState: TypeAlias = Literal["loading", "running", "promoted", "rolled back", "ended"]


class RolloutRecord(pydantic.BaseModel):
    """A rollout, under way or ended. *Immutable.*

    Attributes:
        id: distinguishes the counts of two rollouts.
        serving: the version that serves beside the new one.
        pins: the rollout has pinned the model to `serving`; without it, polling would deploy the new version.
        since, step_since: begin of the rollout and of its step, in seconds since the epoch.
        until: its end; None while it is under way.
        step: index of the current step.
        by, reason: who ended it, and why.
        document: number of the serving document that the fleet's rollout was begun or changed by; 0 without a fleet.
        stopped: the process was stopped meanwhile, rather than that it crashed.
        crashes: how often it crashed since the rollout began.
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    id: str = pydantic.Field(default_factory=lambda: secrets.token_hex(6), max_length=32)
    model: str
    plan: RolloutPlan
    serving: str
    pins: bool = False
    since: float = pydantic.Field(default_factory=time.time)
    step: int = pydantic.Field(default=0, ge=0)
    step_since: float = pydantic.Field(default_factory=time.time)
    until: float | None = None
    state: RolloutState = "running"
    by: str = ""
    reason: str = ""
    document: int = pydantic.Field(default=0, ge=0)
    stopped: bool = False
    crashes: int = pydantic.Field(default=0, ge=0)

    @property
    def version(self) -> str:
        return self.plan.version

    @property
    def share(self) -> float:
        """Share of the requests now."""
        return self.plan.steps[min(self.step, len(self.plan.steps) - 1)].share if self.state == "running" else 0.0

    @property
    def gave_up(self) -> bool:
        """Whether this process has rolled it back by itself."""
        return self.state == "rolled back" and self.by == ITSELF

    @property
    def under_way(self) -> bool:
        return self.state in ("loading", "running")

    def ended(self, state: RolloutState, reason: str, by: str) -> "RolloutRecord":
        """Return the record of the rollout once it has ended, now."""
        return self.model_copy(update={"state": state, "reason": reason, "by": by, "until": time.time()})


class RolloutRecords:
    """The last rollout of each model. *Thread-safe*; a model has one change at a time.

    Args:
        kept: their files; without a directory, rollouts end with the process.
    """

    def __init__(self, kept: KeptFiles) -> None:
        self._kept = kept

    def read(self, model: str) -> RolloutRecord | None:
        """Return the kept rollout of a model; None if there is none, or if it cannot be read, which is logged."""
        try:
            found = self._kept.read(model)
            return None if found is None else RolloutRecord.model_validate_json(found)
        except (DatabaseError, pydantic.ValidationError) as error:
            _log.error("model %r: its rollout in %s is forgotten: %s", model, self._kept.path(model), error)
            return None

    def write(self, record: RolloutRecord) -> None:
        """Keep a rollout; only until a restart if its file cannot be written."""
        try:
            self._kept.write(record.model, record.model_dump())
        except OSError as error:
            _log.error("model %r: a restart ends its %s: writing it failed: %s", record.model, record.plan.mode, error)
