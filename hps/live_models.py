"""Which versions of which models are in service, which are kept, and what is being changed."""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Literal

from hps.databases.base import PersistentDatabase
from hps.deployment import DRAIN_S, Deployment, Fate
from hps.errors import (
    ConflictError,
    DatabaseError,
    HPSError,
    NotReadyError,
    UnknownModelError,
    UnknownTableError,
    UnknownVersionError,
)
from hps.metrics import TIERS

_log = logging.getLogger(__name__)
_RELEASE_PAUSE_S = 0.1  # where a table's release fails at once, and not after a wait

VersionState = Literal["serving", "available", "kept", "retiring"]


@dataclass(frozen=True)
class VersionStatus:
    """A version of a model, and what it holds. *Immutable.*

    Attributes:
        model, version: its names.
        state: `serving` answers those who name no version, `available` those who name it, `kept` waits for a roll-back, and
            `retiring` waits for its last lookups.
        since: when it was put into service, in seconds since the epoch.
        rows: of all its tables, in the model files.
        size_bytes: of its vectors, by tier, as in `metrics.TIERS`; without those tiers that it does not use.
    """

    model: str
    version: str
    state: VersionState
    since: float
    rows: int
    size_bytes: dict[str, int]


def version_status(deployment: Deployment, state: VersionState) -> VersionStatus:
    """What a version holds now."""
    sizes: dict[str, int] = {}
    if state in ("serving", "available") and deployment.caches:
        tables = range(len(deployment.tables))
        sizes[TIERS[0]] = sum(cache.stats(index).size_bytes for cache in deployment.caches for index in tables)
    for database in deployment.chain.databases:
        with suppress(DatabaseError, NotReadyError, UnknownTableError):  # it does not answer now, or the table is being dropped
            tier = TIERS[1 + isinstance(database, PersistentDatabase)]
            sizes[tier] = sum(database.stats(table.tag).vector_bytes for table in deployment.tables)
    config = deployment.config
    return VersionStatus(config.model, config.version, state, deployment.since, sum(deployment.rows), sizes)


@dataclass(slots=True)
class _Versions:
    """The versions of one model. Guarded by `LiveModels`."""

    available: dict[str, Deployment] = field(default_factory=dict)  # by version, ascending
    kept: list[Deployment] = field(default_factory=list)  # replaced, the last one last: their tables stay, their caches went
    retiring: list[Deployment] = field(default_factory=list)  # until their last lookups have ended
    change: str = ""  # what is being done


class LiveModels:
    """The deployments of this process by model and version. *Thread-safe.*

    Args:
        serving: those that serve at the start.

    Attributes:
        serving: by model, the deployment that answers those who name no version. It is replaced as a whole and never changed.
    """

    def __init__(self, serving: dict[str, Deployment] | None = None) -> None:
        self.serving = serving or {}
        self._models = {name: _Versions({one.version: one}) for name, one in self.serving.items()}
        self._changed = threading.Condition()
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether `close` was called, perhaps while a model is being changed."""
        return self._closed

    def find(self, name: str, version: str | None) -> Deployment:
        """The deployment of a version; of the serving one for None.

        Raises:
            UnknownModelError: no model of this name is deployed.
            UnknownVersionError: the model is not deployed in this version.
        """
        try:
            return self.serving[name] if version is None else self._models[name].available[version]
        except KeyError:
            if name not in self.serving or version is None:
                known = ", ".join(self.serving) or "none"
                raise UnknownModelError(f"looking up model {name!r}: it is not deployed; deployed: {known}") from None
            known = ", ".join(self._models[name].available)
            raise UnknownVersionError(f"looking up model {name!r}: got version {version[:40]!r}, deployed: {known}") from None

    def versions(self, name: str) -> list[tuple[Deployment, VersionState]]:
        """All versions of a model that hold something, and the state of each."""
        with self._changed:
            versions, serving = self._models.get(name, _Versions()), self.serving.get(name)
            found: list[tuple[Deployment, VersionState]] = [
                (one, "serving" if one is serving else "available") for one in versions.available.values()
            ]
            found += [(one, "kept") for one in versions.kept]
            return found + [(one, "retiring") for one in versions.retiring]

    def deployed(self, name: str, version: str) -> Deployment | None:
        """The deployment of a version that is in service, if it is."""
        with self._changed:
            return self._models[name].available.get(version) if name in self._models else None

    def all(self) -> list[Deployment]:
        """Every deployment that is in service."""
        with self._changed:
            return [one for versions in self._models.values() for one in versions.available.values()]

    def change_of(self, name: str) -> str:
        """What is being done to a model; empty if nothing is."""
        with self._changed:
            return self._models[name].change if name in self._models else ""

    @contextmanager
    def changing(self, name: str, what: str) -> Iterator[None]:
        """Change a model; nobody else does meanwhile.

        Args:
            what: is being done, for others who want to change it.

        Raises:
            ConflictError: somebody else does.
            NotReadyError: lookups of a version that was replaced or undeployed still run; or the parameter server is closed.
        """
        with self._changed:
            self._check_open(what, name)
            versions = self._models.setdefault(name, _Versions())
            if versions.change:
                raise ConflictError(f"{what} model {name!r}: {versions.change} it is under way; try again when that has ended")
            versions.change = what
        try:
            with self._changed:
                if not self._changed.wait_for(lambda: not versions.retiring, DRAIN_S if versions.available else 0.0):
                    raise NotReadyError(
                        f"{what} model {name!r}: lookups of the deployment before it still run and read its tables; try again "
                        "when they have ended, and graphs that captured some are gone"
                    )
            yield
        finally:
            with self._changed:
                versions.change = ""
                if not (versions.available or versions.kept or versions.retiring):
                    self._models.pop(name, None)
                self._changed.notify_all()

    def serve(
        self,
        deployment: Deployment,
        stay: Callable[[list[str]], list[str]],
        tables: Fate,
        kept: Deployment | None = None,
    ) -> None:
        """Let a deployment serve its model from now on. Called while the model is being changed.

        Args:
            stay: chooses, of the versions that are then available, those that stay so; the others are retired.
            tables: what becomes of the tables of those, and of the deployment of the same version before.
            kept: the same version as it was kept for a roll-back, if it was; its tables are in service again.

        Raises:
            NotReadyError: the parameter server was closed meanwhile.
        """
        with self._changed:
            self._check_open("deploying", deployment.config.model)
            versions = self._models[deployment.config.model]
            chosen = {deployment.version, *stay([*versions.available, deployment.version])}
            left = {number: one for number, one in versions.available.items() if number in chosen}
            if kept is not None:
                versions.kept.remove(kept)
            self._replace(versions, deployment, left, tables)

    def _replace(
        self,
        versions: _Versions,
        deployment: Deployment,
        left: dict[str, Deployment],
        tables: Fate,
    ) -> None:
        name, now = deployment.config.model, {**left, deployment.version: deployment}
        retired = [one for one in versions.available.values() if one not in now.values()]
        versions.available = {number: now[number] for number in sorted(now, key=int)}
        versions.retiring += retired
        self.serving = {**self.serving, name: deployment}
        for one in retired:
            self._retire_later(name, one, tables)

    def withdraw(self, name: str, version: str | None) -> list[Deployment]:
        """Take a model, or one version of it, out of service. Called while the model is being changed.

        Returns:
            What was taken out, to be given to `retire`.

        Raises:
            UnknownModelError: it is not deployed.
            ConflictError: the version is the only one.
        """
        deployment = self.find(name, version)
        with self._changed:
            versions = self._models[name]
            if version is None:
                out, versions.available = list(versions.available.values()), {}
                self.serving = {other: one for other, one in self.serving.items() if other != name}
            elif len(versions.available) == 1:
                raise ConflictError(
                    f"undeploying version {version} of model {name!r}: it is the only one; undeploy the model, or deploy "
                    "another version first"
                )
            else:
                out = [versions.available.pop(version)]
                if self.serving[name] is deployment:
                    self.serving = {**self.serving, name: list(versions.available.values())[-1]}
            versions.retiring += out
            return out

    def retire(self, name: str, deployment: Deployment, tables: Fate) -> None:
        """Close a deployment whose lookups end soon; in the background if they do not."""
        if not self._ended(name, deployment, tables):
            _log.warning("model %r: lookups still run; they keep its tables and caches until they have ended", name)
            self._retire_later(name, deployment, tables)
            return
        self._retired(name, deployment, tables)

    def drop_kept(self, name: str, kept: Sequence[Deployment], tables: Fate = "drop") -> None:
        """Keep these versions no longer. Called while the model is being changed."""
        with self._changed:
            versions = self._models[name]
            versions.kept = [one for one in versions.kept if one not in kept]
            versions.retiring += kept
        for one in kept:
            self.retire(name, one, tables)

    def kept(self, name: str) -> list[Deployment]:
        """The versions that are kept for a roll-back, the one that was replaced last being the last."""
        with self._changed:
            return list(self._models[name].kept) if name in self._models else []

    def close(self, timeout_s: float | None = None) -> list[Deployment]:
        """Refuse changes, wait for those under way and for what retires, and take everything out of service.

        Returns:
            What was in service; the caller closes it.
        """
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: not any(one.change for one in self._models.values()), timeout_s)
            self.serving = {}
            self._changed.wait_for(lambda: not any(one.retiring for one in self._models.values()), timeout_s)
            out = [one for versions in self._models.values() for one in versions.available.values()]
            self._models = {}
            return out

    def disown(self) -> object:
        """In a forked child: forget everything, and take no lock. Returns what was held."""
        held = self._models
        self._changed = threading.Condition()
        self._closed, self.serving, self._models = True, {}, {}
        return held

    def _check_open(self, what: str, name: str) -> None:
        if self._closed:
            raise NotReadyError(f"{what} model {name!r}: the parameter server is closed")

    def _retire_later(self, name: str, deployment: Deployment, tables: Fate) -> None:
        def work() -> None:
            while not self._ended(name, deployment, tables) and not self._closed:
                time.sleep(_RELEASE_PAUSE_S)
            self._retired(name, deployment, tables)

        threading.Thread(target=work, name=f"hps-retire-{name}", daemon=True).start()

    def _ended(self, name: str, deployment: Deployment, tables: Fate) -> bool:
        try:
            return deployment.close(tables)
        except HPSError as error:  # a device failed, which frees nothing any more
            _log.error("model %r: version %s is out of service, but not freed: %s", name, deployment.version, error)
            return True

    def _retired(self, name: str, deployment: Deployment, tables: Fate) -> None:
        with self._changed:
            if name in self._models:
                versions = self._models[name]
                versions.retiring.remove(deployment)
                if tables == "keep" and deployment.chain.databases:  # else nothing is left of it
                    versions.kept.append(deployment)
            self._changed.notify_all()
