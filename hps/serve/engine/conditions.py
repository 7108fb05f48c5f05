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

    level: Literal["error", "warning"]  # error: requests fail; warning: lookups are answered
    name: str  # a few words, for a badge
    text: str  # what is wrong, where, and why
    models: tuple[str, ...] = ()  # empty if it is of the server
    others: tuple[str, ...] = ()  # further texts, such as those of other models
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
    """Return the conditions of a server, worst first, one of each name.

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
        found += [Condition("error", "model failed", model.reason or "loading failed", (model.name,)) for model in failed]
    found += [Condition("warning", "degraded", degraded)] if degraded else []
    found += [condition for model in served for condition in _trials(model, failures.get(model.name, ""))]
    if late:
        text = ", ".join(f"{name} {lag:.0f} s" for name, lag in sorted(late.items(), key=lambda late: -late[1]))
        found.append(Condition("warning", "updates late", f"behind the log of updates: {text}"))
    names = dict.fromkeys(condition.name for condition in found)
    return [_folded([condition for condition in found if condition.name == name]) for name in names]


def _folded(same: Sequence[Condition]) -> Condition:
    """Make one condition of those of a name: ten models whose database is gone are one incident."""
    models = tuple(dict.fromkeys(model for condition in same for model in condition.models))
    texts = tuple(dict.fromkeys(condition.text for condition in same))
    if len(models) > 1 and len(texts) > 1:
        texts = tuple(f"{condition.models[0]}: {condition.text}" for condition in same)
    return replace(same[0], text=texts[0], models=models, others=texts[1:])


class ConditionWatch:
    """Finds the conditions of a server, and since when each lasts. *Thread-safe.*"""

    def __init__(self, lifecycle: Lifecycle, clock: Callable[[], float] = time.time) -> None:
        self._lifecycle, self._clock = lifecycle, clock
        self._since: dict[str, float] = {}  # by name
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
            self._since = {entry.name: self._since.get(entry.name, now_s) for entry in found}
            return [replace(entry, since_s=self._since[entry.name], runbook=RUNBOOKS[entry.name]) for entry in found]


def _unread(model: ModelStatistics) -> Iterator[Condition]:
    """Yield a condition if no database answers for some tables."""
    databases = {table.name: [tier.available for tier in table.tiers if tier.tier != TIERS[0]] for table in model.tables}
    if names := [name for name, available in databases.items() if available and not any(available)]:
        text = f"no database answers for {', '.join(names)}: lookups of keys that the cache lacks fail"
        yield Condition("error", "lookups fail", text, (model.name,))


def _trials(model: ModelStatistics, failure: str) -> Iterator[Condition]:
    """Yield a condition for a version that was rolled back by itself, each held version, and a failed deployment."""
    rollout = model.rollout or {}
    # It needs nobody any more once another version serves than the one beside which it was tried out.
    if rollout.get("state") == "rolled back" and rollout["reason"] and rollout["serving"] == model.version:
        text = f"the {rollout['mode']} of version {rollout['version']}: {rollout['reason']}"
        yield Condition("warning", "rolled back", text, (model.name,))
    held = {version for version, state in model.versions if state == "held"}
    for checks in model.checks:
        if checks.version in held:
            causes = "; ".join(map(str, checks.failed))
            yield Condition(
                "warning", "version held", f"version {checks.version} is held by its checks: {causes}", (model.name,)
            )
    if failure:
        text = f"version {model.version} serves on; the last deployment failed: {failure}"
        yield Condition("warning", "deploy failed", text, (model.name,))
