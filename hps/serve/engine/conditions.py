"""The conditions of a server that need a person, worst first: the badge and the banner of the page at `/`, and `hps top`."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from hps.ground.threads.workers import THREADS, PeriodicTask
from hps.serve.engine.lifecycle import Lifecycle
from hps.serve.protocol.schemas import ModelStatus
from hps.statistics.metrics import TIERS
from hps.statistics.snapshot import ModelStatistics, ServerStatistics

RUNBOOKS: Final = {
    "not ready": "a-replica-is-not-ready",
    "restart needed": "hpsthreadended",
    "lookups fail": "hpstierskipped",
    "model failed": "hpsmodelnotready",
    "degraded": "hpsdegraded",
    "rolled back": "hpscanaryrolledback",
    "version held": "hpsversionheld",
    "deploy failed": "hpsdeployfailed",
    "updates late": "hpsupdateslate",
}
"""The heading of the page at `/runbooks`, by the name of a condition."""
_EVERY_S: Final = 5.0
_LATE_S: Final = 60.0  # as in the alert HPSUpdatesLate


@dataclass(frozen=True, slots=True)
class Condition:
    """Something that needs a person. *Immutable.*"""

    level: Literal["error", "warning"]  # error: requests fail; warning: answers are right
    name: str  # a few words, for a badge
    text: str  # what is wrong, where, and why
    model: str = ""  # empty if it is of the server
    since_s: float = 0.0  # first seen without a gap, in seconds since 1970
    runbook: str = ""  # one of `RUNBOOKS`


def conditions(
    *,
    not_ready: str,
    broken: str,
    degraded: str,
    models: Sequence[ModelStatus],
    server: ServerStatistics | None,
    failures: Mapping[str, str],
) -> list[Condition]:
    """Return the conditions of a server, worst first.

    Args:
        not_ready, degraded: reasons, as in `GET /v2/health/ready`.
        broken: why the process must be restarted; empty otherwise.
        models: models that serve or are to serve.
        server: None while the databases are being opened.
        failures: why the last deployment of a model failed, by its name.
    """
    served = () if server is None else server.models
    late = {} if server is None else {name: lag for name, lag in server.updates.items() if lag is not None and lag > _LATE_S}
    found = [Condition("error", "not ready", not_ready)] if not_ready else []
    found += [Condition("error", "restart needed", broken)] if broken else []
    found += [condition for model in served for condition in _unread(model)]
    if not not_ready:  # which names them
        failed = (model for model in models if model.state == "failed")
        found += [Condition("error", "model failed", model.reason or "loading failed", model.name) for model in failed]
    found += [Condition("warning", "degraded", degraded)] if degraded else []
    found += [condition for model in served for condition in _trials(model, failures.get(model.name, ""))]
    if late:
        text = ", ".join(f"{name} {lag:.0f} s" for name, lag in sorted(late.items(), key=lambda late: -late[1]))
        found.append(Condition("warning", "updates late", f"behind the log of updates: {text}"))
    return found


class ConditionWatch:
    """Finds the conditions of a server, and since when each lasts. *Thread-safe.*"""

    def __init__(self, lifecycle: Lifecycle, clock: Callable[[], float] = time.time) -> None:
        self._lifecycle, self._clock = lifecycle, clock
        self._since: dict[tuple[str, str], float] = {}  # by name and model
        self._lock = threading.Lock()
        self._task: PeriodicTask | None = None

    def start(self) -> None:
        """Look every five seconds, also while nobody asks."""
        self._task = PeriodicTask("conditions", self._look, _EVERY_S)

    def close(self) -> None:
        if self._task is not None:
            self._task.abandon()

    def _look(self) -> None:
        self.find(opened.stats() if (opened := self._lifecycle.opened) is not None else None)

    def find(self, server: ServerStatistics | None) -> list[Condition]:
        """Return the conditions now, worst first. server: current statistics; None while the databases are being opened."""
        lifecycle, live, now_s = self._lifecycle, self._lifecycle.live, self._clock()
        found = conditions(
            not_ready=lifecycle.not_ready_reason,
            broken=THREADS.problem,
            degraded=lifecycle.degraded,
            models=lifecycle.states.models(),
            server=server,
            failures={name: failure.cause for name in list(live.serving) if (failure := live.failure(name)) is not None},
        )
        with self._lock:
            self._since = {key: self._since.get(key, now_s) for key in ((entry.name, entry.model) for entry in found)}
            since = self._since
            return [replace(it, since_s=since[it.name, it.model], runbook=RUNBOOKS[it.name]) for it in found]


def _unread(model: ModelStatistics) -> Iterator[Condition]:
    """Yield a condition if no database answers for some tables."""
    databases = {table.name: [tier.available for tier in table.tiers if tier.tier != TIERS[0]] for table in model.tables}
    if names := [name for name, available in databases.items() if available and not any(available)]:
        text = f"no database answers for {', '.join(names)}: lookups of keys that the cache lacks fail"
        yield Condition("error", "lookups fail", text, model.name)


def _trials(model: ModelStatistics, failure: str) -> Iterator[Condition]:
    """Yield a condition for a version that was rolled back by itself, each held version, or else for a failed deployment."""
    rollout = model.rollout or {}
    if rollout.get("state") == "rolled back" and rollout["reason"]:
        yield Condition(
            "warning", "rolled back", f"the {rollout['mode']} of version {rollout['version']}: {rollout['reason']}", model.name
        )
    held = {version for version, state in model.versions if state == "held"}
    for checks in model.checks:
        if checks.version in held:
            causes = "; ".join(map(str, checks.failed))
            yield Condition("warning", "version held", f"version {checks.version} is held by its checks: {causes}", model.name)
    if failure and not held:
        text = f"version {model.version} serves on; the last deployment failed: {failure}"
        yield Condition("warning", "deploy failed", text, model.name)
