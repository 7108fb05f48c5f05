"""The life cycle of every version of every model: one state machine, shown in Python, the service and the metrics.

    wanted -> loading -> serving <-> available -> retiring -> kept -> retiring -> gone
                 |  ^                                |          |
                 v  |                                v          v
                failed                              gone     serving (rolled back to, with new caches)

Until a version serves, the state is that of its model, since the version is known only after its files are found. A model has
one change at a time. A failed model keeps its error and the time of the next try; polling shares this back-off. An available
version that its checks hold is shown as `held`: it never takes over by itself, and is not kept when it retires.
"""

import logging
import random
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Literal, TypeAlias
from weakref import WeakSet

from hps.configuration.load import ModelConfig
from hps.errors import (
    ConflictError,
    DatabaseCorruptError,
    DatabaseError,
    HPSError,
    ModelFileChangedError,
    ModelFileError,
    ModelSourceError,
    NotReadyError,
    TableWidthError,
    UnknownModelError,
    UnknownTableError,
    UnknownVersionError,
    UpdateLogError,
)
from hps.ground.progress import NoProgress, Progress
from hps.ground.threads.workers import new_thread
from hps.statistics.metrics import TIERS
from hps.statistics.series import Models as CountedModels
from hps.versions.changes import Change, LoadingTable, cause_of
from hps.versions.checks.report import CheckReport
from hps.versions.deployment import DRAIN_S, Deployment, Fate

_log = logging.getLogger(__name__)
_RELEASE_PAUSE_S = 0.1  # pause before another try to release tables
_MOST_REMEMBERED = 256

FIRST_RETRY_S, LONGEST_RETRY_S = 5.0, 300.0
"""First and longest pause before retrying a model that could not be deployed. Each failure doubles the pause."""

_TRANSIENT = (ModelSourceError, ModelFileChangedError, DatabaseError, UnknownTableError, UpdateLogError, NotReadyError)
_PERMANENT = (DatabaseCorruptError, TableWidthError)
_OF_VERSIONS = (UnknownVersionError, ModelFileError)  # a publisher may write missing files, or replace wrong ones

REFRESHING = "refreshing"
"""A change requested over the network that leaves the versions alone; one per model at a time."""

VersionState = Literal["serving", "available", "kept", "retiring"]
ShownState = Literal["serving", "available", "held", "kept", "retiring"]
LifecycleState = Literal["wanted", "loading", "failed", "serving"]
Wanted: TypeAlias = tuple[ModelConfig, tuple[tuple[str, str], ...]]
"""The selection of a model's policy: its entry, and the numbers and fingerprints of the versions."""


@dataclass(frozen=True)
class VersionInfo:
    """A version of a model and its size. *Immutable.*

    Attributes:
        state: `serving` answers lookups without a version, `available` lookups that name it, `held` likewise, since its checks
            failed, `kept` waits for a roll-back, and `retiring` finishes its last lookups.
        since: time it was put into service, in seconds since the epoch.
        rows: rows of all its tables in the model files.
        size_bytes: bytes of its vectors, by tier as in `metrics.TIERS`; only tiers in use.
        stale_copies: tables that take no online writes, since its network has a copy of them.
        checks: the report of its checks; None if it was not checked.
    """

    model: str
    version: str
    state: ShownState
    since: float
    rows: int
    size_bytes: dict[str, int]
    stale_copies: tuple[str, ...] = ()
    checks: CheckReport | None = None


def is_transient(error: BaseException, *, versioned: bool = False) -> bool:
    """Return True if a failed deployment may succeed later with the same configuration.

    Args:
        versioned: its files are published as versions, in a repository or a model's `version_path`.
    """
    if isinstance(error, _PERMANENT):
        return False
    return isinstance(error, _TRANSIENT) or (versioned and isinstance(error, _OF_VERSIONS))


def version_info(deployment: Deployment, state: VersionState) -> VersionInfo:
    """Return the current size and state of a version."""
    sizes: dict[str, int] = {}
    for cache in deployment.device_caches if state in ("serving", "available") else ():
        with suppress(HPSError):  # its device is lost
            size_bytes = sum(cache.stats(index).size_bytes for index in range(len(deployment.tables)))
            sizes[TIERS[0]] = sizes.get(TIERS[0], 0) + size_bytes
    for database in deployment.chain.databases:
        with suppress(DatabaseError, NotReadyError, UnknownTableError):  # it is down, or the table is being dropped
            tier = TIERS[1 + database.persistent]
            sizes[tier] = sum(database.stats(database.stored(table).tag).vector_bytes for table in deployment.tables)
    config, copies = deployment.config, deployment.stale_copies
    rows, shown = sum(deployment.rows), shown_state(deployment, state)
    return VersionInfo(config.model, config.version, shown, deployment.since, rows, sizes, copies, deployment.checks)


def shown_state(deployment: Deployment, state: VersionState) -> ShownState:
    """Return the state of a version as people see it."""
    return "held" if deployment.held and state == "available" else state


@dataclass(frozen=True)
class Failure:
    """A failed deployment of a model. *Immutable.*

    Attributes:
        cause: message for users.
        count: consecutive failures.
        due: time of the next try, by the clock of `LiveModels`.
        is_transient: a retry may succeed; otherwise only polling and explicit requests try again.
        wanted: the version set that failed; None if unknown, until polling sees it.
        refused_beside: the version that served, or empty, if checks refused the new one: while neither changes, they would find
            the same, and it is not loaded again. None if it failed otherwise.
    """

    cause: str
    count: int
    due: float
    is_transient: bool
    wanted: Wanted | None = None
    refused_beside: str | None = None


@dataclass(frozen=True)
class ModelLifecycle:
    """A model that serves or that the service waits for. *Immutable*, except the tables of a running load.

    Attributes:
        state: `serving` if any version is.
        tables: tables of the last or next load.
        waiting: what the load waits for, once all tables are read; empty if nothing.
        failure: reason of the state `failed`.
        retry_in_s: seconds until the next try; None if there is none.
        failures: failed deployments so far.
        load_seconds: duration of the last load, so far or in total.
    """

    name: str
    state: LifecycleState
    tables: list[LoadingTable]
    waiting: str
    failure: Failure | None
    retry_in_s: float | None
    failures: int
    load_seconds: float


@dataclass(slots=True)
class _Version:
    deployment: Deployment
    state: VersionState


@dataclass(slots=True)
class _Model:
    """The life cycle of one model. Guarded by `LiveModels`."""

    versions: list[_Version] = field(default_factory=list)  # kept versions in the order of their replacement
    wanted: ModelConfig | None = None  # entry that the service waits to serve
    change: Change | None = None  # current or last
    load: Change | None = None  # last deployment
    failure: Failure | None = None
    deployed: Wanted | None = None  # last deployment by policy
    failures: int = 0
    users: dict[str, "WeakSet[object]"] = field(default_factory=dict)  # by version: objects that keep it in service

    @property
    def retained(self) -> set[str]:
        return {version for version, users in list(self.users.items()) if len(users)}

    def of(self, *states: VersionState) -> list[_Version]:
        return [version for version in self.versions if version.state in states]

    @property
    def doing(self) -> str:
        return self.change.doing if self.change is not None and self.change.under_way else ""

    @property
    def coming(self) -> LifecycleState:
        if self.doing == "deploying":
            return "loading"
        return "wanted" if self.failure is None else "failed"

    @property
    def is_unused(self) -> bool:
        return not (self.versions or self.doing or self.wanted or self.failure or self.deployed)

    @property
    def is_counted(self) -> bool:
        """Return True if its metrics are shown: until it is undeployed."""
        undeployed = self.change is not None and self.change.doing == "undeploying"
        return bool(self.versions or self.doing or self.wanted or (self.failure and not undeployed))


class LiveModels:
    """The models of this process: versions that use resources, expected models, and changes. *Thread-safe.*

    Args:
        serving: serving deployments at the start.
        counted: notified when models start and end, as their metrics do.
        clock: monotonic time in seconds.

    Attributes:
        serving: deployment that answers lookups without a version, by model. Replaced, never modified.
        requested: last change requested over the network, by model.
        first_retry_s: first pause of the back-off.
        watchers: called by the changing thread after the versions in service have changed or a recording has started.
    """

    def __init__(
        self,
        serving: dict[str, Deployment] | None = None,
        counted: CountedModels | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.serving = serving or {}
        self.requested: dict[str, Change] = {}
        self.first_retry_s = FIRST_RETRY_S
        self._counted = counted or CountedModels()
        self._models = {name: _Model([_Version(deployment, "serving")]) for name, deployment in self.serving.items()}
        for name in self._models:
            self._counted.begin(name)
        self.watchers: list[Callable[[], None]] = []
        self._changed = threading.Condition()
        self._closed = False
        self._clock = clock
        self._numbers = count(1)

    @property
    def closed(self) -> bool:
        """True after `close`; a change may still be running."""
        return self._closed

    # -- versions -----------------------------------------------------------------------------------------------------------

    def find(self, name: str, version: str | None) -> Deployment:
        """Return the deployment of a version; of the serving one for None.

        Raises:
            UnknownModelError: no model of this name is deployed.
            UnknownVersionError: the model is not deployed in this version.
        """
        serving = self.serving.get(name)
        if serving is None:
            known = ", ".join(self.serving) or "none"
            raise UnknownModelError(f"looking up model {name!r}: it is not deployed; deployed: {known}")
        if version is None:
            return serving
        if (deployment := self.deployed(name, version)) is not None:
            return deployment
        known = ", ".join(found.version for found, state in self.versions(name) if state in ("serving", "available"))
        raise UnknownVersionError(f"looking up model {name!r}: got version {version[:40]!r}, deployed: {known}")

    def versions(self, name: str) -> list[tuple[Deployment, VersionState]]:
        """Return a model's versions and their states; those in service first, ascending."""
        with self._changed:
            model = self._models.get(name, _Model())
            found = sorted(model.of("serving", "available"), key=lambda version: int(version.deployment.version))
            return [(version.deployment, version.state) for version in found + model.of("kept") + model.of("retiring")]

    def deployed(self, name: str, version: str) -> Deployment | None:
        """Return the deployment of a version if it is in service."""
        with self._changed:
            found = self._models[name].of("serving", "available") if name in self._models else []
            return next((entry.deployment for entry in found if entry.deployment.version == version), None)

    def all(self) -> list[Deployment]:
        found = (version for name in list(self._models) for version in self.versions(name))
        return [deployment for deployment, state in found if state in ("serving", "available")]

    def lost_devices(self) -> dict[str, str]:
        """Return the devices that versions in service have lost, with the error of each."""
        caches = [cache for deployment in self.all() for cache in deployment.device_caches]
        return {cache.device_name: failure for cache in caches if (failure := cache.failure) is not None}

    def refused(self) -> str:
        """Describe the models in service that refuse all lookups on a device; empty if none."""
        refusing = {found.config.model: reason for found in self.all() if (reason := found.refuses)}
        return "; ".join(f"model {model!r}: {reason}" for model, reason in refusing.items())

    def held(self, name: str) -> Deployment | None:
        """Return the version of a model that its checks hold, if any; the highest of several."""
        found = (deployment for deployment, state in self.versions(name) if shown_state(deployment, state) == "held")
        return max(found, key=lambda deployment: int(deployment.version), default=None)

    def kept(self, name: str) -> list[Deployment]:
        """Return the versions kept for a roll-back, in the order of their replacement."""
        return [deployment for deployment, state in self.versions(name) if state == "kept"]

    def retain(self, name: str, version: str, user: object) -> None:
        """Keep a version available while `user` lives; the next change after that retires it.

        Raises:
            UnknownModelError, UnknownVersionError: it is not deployed.
        """
        with self._changed:
            self.find(name, version)
            self._models[name].users.setdefault(version, WeakSet()).add(user)

    # -- models to come -----------------------------------------------------------------------------------------------------

    def expect(self, model: ModelConfig) -> None:
        """Wait until a model serves with this entry, and reset its failures."""
        with self._changed:
            self._counted.begin(model.model)
            known = self._models.setdefault(model.model, _Model())
            known.wanted, known.failure = model, None

    def stop_expecting(self, name: str) -> None:
        """Stop waiting for a model."""
        with self._changed:
            if name in self._models:
                self._models[name].wanted = None
                self._forget_if_unused(name)

    def due(self) -> dict[str, float]:
        """Return the awaited models that are due for a retry, and the times, by the clock."""
        with self._changed:
            return {
                name: 0.0 if model.failure is None else model.failure.due
                for name, model in self._models.items()
                if model.wanted
                and not model.doing
                and name not in self.serving
                and (model.failure is None or model.failure.is_transient)
            }

    def models(self) -> list[ModelLifecycle]:
        """Return the models that serve or are awaited."""
        with self._changed:
            known = {**self._models, **{name: _Model() for name in self.serving if name not in self._models}}
            return [self._lifecycle(name, model) for name, model in known.items() if model.wanted or name in self.serving]

    def failure(self, name: str) -> Failure | None:
        """Return the failure of a model's last deployment, if any."""
        with self._changed:
            return self._models[name].failure if name in self._models else None

    def record_failure(self, name: str, error: BaseException, *, known: bool = True, refused: Wanted | None = None) -> None:
        """Record a failed deployment and schedule a retry. A model that is neither known nor awaited is forgotten.

        Args:
            refused: the version set of which the checks refused the last; None if it failed otherwise.
        """
        with self._changed:
            model = self._models.setdefault(name, _Model())
            if not (known or model.wanted):
                return
            failures = 1 + (model.failure.count if model.failure else 0)
            pause = min(self.first_retry_s * 2.0 ** min(failures - 1, 32), LONGEST_RETRY_S)
            pause *= random.uniform(0.75, 1.0)  # spread the retries of replicas that failed together
            passes = is_transient(error, versioned=model.wanted is not None and bool(model.wanted.version_path))
            beside = None if refused is None else self._serving_version(name)
            model.failure = Failure(cause_of(error)[0], failures, self._clock() + pause, passes, refused, beside)
            model.failures += 1

    def forget_failure(self, name: str) -> None:
        """Forget why the last deployment of a model failed, since another version is wanted now."""
        with self._changed:
            if name in self._models:
                self._models[name].failure = None

    def deployed_by_policy(self, name: str, wanted: Wanted) -> None:
        """Record a deployment by the model's policy."""
        with self._changed:
            model = self._models[name]
            model.deployed, model.failure = wanted, None

    def needs_deployment(self, name: str, wanted: Wanted) -> bool:
        """Return True if the versions that a model's policy selects are new, or failed and are due for a retry.

        A failure with other files does not delay it. There is no retry of a version that the checks would refuse again.
        """
        with self._changed:
            model = self._models.get(name)
            if model is None or (failure := model.failure) is None:
                return model is None or model.deployed != wanted
            if failure.wanted is None:  # the deployment may have failed before it knew its versions
                failure = model.failure = replace(failure, wanted=wanted)
            if failure.wanted == wanted:
                return failure.refused_beside != self._serving_version(name) and self._clock() >= failure.due
            model.failure = None
            return True

    def forget_others(self, names: Collection[str]) -> None:
        """Forget the deployment results of all other models."""
        with self._changed:
            for name in [name for name in self._models if name not in names]:
                self._models[name].failure = self._models[name].deployed = None
                self._forget_if_unused(name)

    # -- changes ------------------------------------------------------------------------------------------------------

    def change_of(self, name: str) -> str:
        """Return the current change of a model, such as `deploying`; empty if none."""
        with self._changed:
            return self._models[name].doing if name in self._models else ""

    def start_change(self, name: str, doing: str, what: str = "", by: str = "") -> Change:
        """Start a change of a model, and exclude others until `finish_change`.

        Args:
            doing: a participle such as `deploying`, for the message to others that want to change it.
            what, by: the request and its client, if it came over the network.

        Raises:
            ConflictError: another change is under way.
            NotReadyError: the parameter server is closed.
        """
        with self._changed:
            self._check_open(doing, name)
            model = self._models.setdefault(name, _Model())
            requested = self.requested.get(name)
            if under_way := model.doing or (requested.doing if by and requested is not None and requested.under_way else ""):
                raise ConflictError(f"{doing} model {name!r}: {under_way} it is under way; try again when that has ended")
            self._counted.begin(name)
            change = Change(name, doing, next(self._numbers), what, by, clock=self._clock)
            if doing != REFRESHING:
                model.change = change
            if doing == "deploying":
                model.load = change
                change.expect(table.table_name for table in (model.wanted.tables if model.wanted else ()))
            if by:
                while len(self.requested) >= _MOST_REMEMBERED:
                    del self.requested[next(model for model, past in self.requested.items() if not past.under_way)]
                self.requested.pop(name, None)
                self.requested[name] = change
            return change

    def finish_change(self, change: Change, error: BaseException | None = None) -> None:
        change.end(error)
        with self._changed:
            self._forget_if_unused(change.model)
            self._changed.notify_all()

    @contextmanager
    def changing(self, name: str, doing: str, progress: Progress | None = None) -> Iterator[Change]:
        """Change a model exclusively. Continues a change that another thread started for this one.

        Args:
            doing: as for `start_change`.

        Raises:
            ConflictError: another change is under way.
            NotReadyError: lookups of a replaced or undeployed version still run; or the parameter server is closed.
        """
        with self._changed:
            self._check_open(doing, name)
            model = self._models.get(name)
            started = model.change if model and model.doing else None
            if started is not None and started.thread is threading.current_thread():
                change, ends_it, started.thread = started, False, None
            else:
                change, ends_it = self.start_change(name, doing), True
        change.listener = progress or NoProgress()
        try:
            with self._changed:
                model = self._models[name]
                drain_s = DRAIN_S if model.of("serving", "available") else 0.0
                if not self._changed.wait_for(lambda: not model.of("retiring"), drain_s):
                    raise NotReadyError(
                        f"{doing} model {name!r}: lookups of the previous deployment still run and read its tables; try again "
                        "when they have ended, and graphs that captured some are gone"
                    )
            yield change
        except BaseException as error:
            if ends_it:
                self.finish_change(change, error)
            raise
        if ends_it:
            self.finish_change(change)

    def serve(
        self,
        deployment: Deployment,
        select: Callable[[list[str]], list[str]],
        tables: Fate,
        kept: Deployment | None = None,
        *,
        only_available: bool = False,
    ) -> None:
        """Let a deployment serve its model. Called within a change of the model.

        Args:
            select: selects the versions to keep available; the others are retired.
            tables: fate of the retired versions' tables, and of those of an earlier deployment of the same version.
            kept: the deployment kept for a roll-back that this one replaces, if any.
            only_available: make the deployment available, and let a serving version of another number serve on.

        Raises:
            NotReadyError: the parameter server was closed meanwhile.
        """
        name = deployment.config.model
        with self._changed:
            self._check_open("deploying", name)
            model = self._models[name]
            before = model.of("serving", "available")
            retained = model.retained - {deployment.version}
            selected = {*select([*(version.deployment.version for version in before), deployment.version]), *retained} - {
                deployment.version
            }
            current = self.serving.get(name)
            unchanged = current if only_available and current and current.version != deployment.version else None
            for version in before:
                if version.deployment is not unchanged:
                    version.state = "available" if version.deployment.version in selected else "retiring"
            model.versions = [version for version in model.versions if version.deployment not in (deployment, kept)]
            model.versions.append(_Version(deployment, "available" if unchanged else "serving"))
            # Lookups read `serving` without a lock, once each: a new dict in one store is what makes the takeover a single
            # step, and what `retry_after_takeover` compares by identity. The old deployment is closed only afterwards, so
            # that a lookup which still found it here either runs to its end on it, or is refused and finds the new one.
            if unchanged is None:
                self.serving = {**self.serving, name: deployment}
            model.users = {version: model.users[version] for version in model.retained}
            for version in before:
                if version.state == "retiring" and version.deployment is not deployment:
                    self._retire_later(name, version.deployment, "drop" if version.deployment.held else tables)
        self.notify_watchers()
        for version in before:
            if version.state == "available" and version.deployment.version in retained:
                _log.warning(
                    "model %r: version %s takes over, but layers of this process still use version %s, which stays in memory "
                    "while they live; create them again for the new version",
                    name,
                    deployment.version,
                    version.deployment.version,
                )

    def withdraw(self, name: str, version: str | None) -> list[Deployment]:
        """Take a model, or one of its versions, out of service. Called within a change of the model.

        Returns:
            The withdrawn deployments, to pass to `retire`.

        Raises:
            UnknownModelError: it is not deployed.
            ConflictError: it is the only version that is not held.
        """
        deployment = self.find(name, version)
        with self._changed:
            out = self._models[name].of("serving", "available")
            if version is None:
                self.serving = {model: serving for model, serving in self.serving.items() if model != name}
                self._models[name].wanted = None
            elif all(entry.deployment is deployment or entry.deployment.held for entry in out):
                raise ConflictError(
                    f"undeploying version {version} of model {name!r}: it is the only one; undeploy the model, or deploy "
                    "another version first"
                )
            else:
                remaining = [entry for entry in out if entry.deployment is not deployment]
                out = [entry for entry in out if entry.deployment is deployment]
                if self.serving[name] is deployment:
                    highest = max(
                        (entry for entry in remaining if not entry.deployment.held),
                        key=lambda entry: int(entry.deployment.version),
                    )
                    highest.state = "serving"
                    self.serving = {**self.serving, name: highest.deployment}
            for entry in out:
                entry.state = "retiring"
        self.notify_watchers()
        return [entry.deployment for entry in out]

    def notify_watchers(self) -> None:
        for watcher in self.watchers:
            watcher()

    def retire(self, name: str, deployment: Deployment, tables: Fate) -> None:
        """Close a deployment; if its lookups do not end soon, in the background."""
        if not self._ended(name, deployment, tables):
            _log.warning("model %r: lookups still run; they keep its tables and caches until they have ended", name)
            self._retire_later(name, deployment, tables)
            return
        self._retired(name, deployment, tables)

    def drop_kept(self, name: str, kept: Sequence[Deployment], tables: Fate = "drop") -> None:
        """Drop these kept versions. Called within a change of the model."""
        with self._changed:
            for version in self._models[name].of("kept"):
                if version.deployment in kept:
                    version.state = "retiring"
        for deployment in kept:
            self.retire(name, deployment, tables)

    def close(self, timeout_s: float | None = None) -> list[Deployment]:
        """Refuse changes, wait for running ones and for retiring versions, and take everything out of service.

        Returns:
            The deployments that were in service, for the caller to close.
        """
        deadline = None if timeout_s is None else self._clock() + timeout_s

        def wait_until_none(busy: Callable[[_Model], object]) -> None:
            left_s = None if deadline is None else max(0.0, deadline - self._clock())
            self._changed.wait_for(lambda: not any(map(busy, self._models.values())), left_s)

        with self._changed:
            self._closed = True
            wait_until_none(lambda model: model.doing)
            self.serving = {}
            wait_until_none(lambda model: model.of("retiring"))
            out = self.all()
            self._models = {}
            return out

    def check_integrity(self) -> list[str]:
        """Return a sentence for each broken invariant of the states; safe during changes."""
        with self._changed:
            unknown = self.serving.keys() - self._models.keys()
            found = [f"model {name!r} serves, but has no versions" for name in unknown]
            for name, model in self._models.items():
                serving = [version.deployment for version in model.of("serving")]
                if serving != ([self.serving[name]] if name in self.serving else []):
                    versions = [deployment.version for deployment in serving]
                    found.append(f"model {name!r}: its lookups are not answered by the version that serves, of {versions}")
                if model.of("available") and not serving:
                    found.append(f"model {name!r}: versions are available, but none serves")
                deployments = [version.deployment for version in model.versions]
                if len(set(map(id, deployments))) != len(deployments):
                    found.append(f"model {name!r}: a deployment has two states")
                numbers = [version.deployment.version for version in model.of("serving", "available")]
                if len(set(numbers)) != len(numbers):
                    found.append(f"model {name!r}: a version is in service twice: {numbers}")
        return found

    def disown(self) -> object:
        """In a forked child: forget everything without taking a lock. Returns the parent's models."""
        models = self._models
        self._changed = threading.Condition()
        self._closed, self.serving, self._models = True, {}, {}
        return models

    def _lifecycle(self, name: str, model: _Model) -> ModelLifecycle:
        failure, load = model.failure, model.load
        state: LifecycleState = "serving" if name in self.serving else model.coming
        names = [table.table_name for table in model.wanted.tables] if model.wanted else []
        tables = list(load.tables.values()) if load is not None and state != "wanted" else list(map(LoadingTable, names))
        retries = state == "failed" and failure is not None and failure.is_transient
        return ModelLifecycle(
            name,
            state,
            tables,
            load.waiting if load is not None and load.under_way else "",
            failure if state == "failed" else None,
            max(0.0, failure.due - self._clock()) if failure is not None and retries else None,
            model.failures,
            0.0 if load is None else load.seconds,
        )

    def _serving_version(self, name: str) -> str:
        return self.serving[name].version if name in self.serving else ""

    def _check_open(self, what: str, name: str) -> None:
        if self._closed:
            raise NotReadyError(f"{what} model {name!r}: the parameter server is closed")

    def _forget_if_unused(self, name: str) -> None:
        model = self._models.get(name)
        if model is None or not model.is_counted:
            self._counted.end(name)
        elif model.versions and not model.doing:  # else further tables may be coming
            versions = (version.deployment.config for version in model.versions)
            self._counted.narrow(name, {table for config in versions for table in config.embedding_table_names})
        if model is not None and model.is_unused:
            del self._models[name]

    def _retire_later(self, name: str, deployment: Deployment, tables: Fate) -> None:
        # On its own thread: a lookup may run for long, and a captured graph keeps its lookup running for as long as it lives.
        # Until then no other change of the model begins, since the next version could be given the slot of these tables.
        def work() -> None:
            while not self._ended(name, deployment, tables) and not self._closed:
                time.sleep(_RELEASE_PAUSE_S)
            self._retired(name, deployment, tables)

        new_thread(f"retire-{name}-{deployment.version}", work, lasting=False).start()

    def _ended(self, name: str, deployment: Deployment, tables: Fate) -> bool:
        try:
            return deployment.close(tables)
        except HPSError as error:  # the device failed and cannot free memory
            _log.error("model %r: version %s is out of service, but not freed: %s", name, deployment.version, error)
            return True

    def _retired(self, name: str, deployment: Deployment, tables: Fate) -> None:
        with self._changed:
            if name in self._models:
                model = self._models[name]
                model.versions = [version for version in model.versions if version.deployment is not deployment]
                if tables == "keep" and deployment.chain.databases:  # otherwise its tables are gone
                    model.versions.append(_Version(deployment, "kept"))
                self._forget_if_unused(name)
            self._changed.notify_all()
