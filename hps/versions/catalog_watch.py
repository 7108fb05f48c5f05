"""Compares the served versions with the catalog: the index of all versions, and the changes for polling to make."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from hps.errors import HPSError, UnknownVersionError
from hps.versions.catalog import ModelCatalog
from hps.versions.fleet import ServingDocument
from hps.versions.live_models import LiveModels, VersionState, Wanted

_log = logging.getLogger(__name__)

IndexState = Literal["ready", "loading", "unloading", "unavailable"]
_STATES: dict[VersionState, tuple[IndexState, str]] = {
    "serving": ("ready", ""),
    "available": ("ready", ""),
    "kept": ("unavailable", "unloaded; kept for a roll-back"),
    "retiring": ("unloading", ""),
}


@dataclass(frozen=True)
class IndexEntry:
    """A known version of a model. *Immutable.*

    Attributes:
        version: its number; empty if the versions of the model cannot be listed.
        state: `ready` answers lookups.
        reason: why it is not ready; empty if unknown.
    """

    model: str
    version: str
    state: IndexState
    reason: str = ""


@dataclass(frozen=True)
class FleetStatus:
    """Whether a replica follows the serving document of a model. *Immutable.*

    Attributes:
        document: the last known one.
        serving: the serving version; empty if none.
        follows: whether that is what the document says, and the document is known to be current.
        pending: whether it is about to follow, or to try.
        reason: why it does not follow; empty if it does.
        age_s: seconds since the document was last read; None if it was not since the start.
    """

    document: ServingDocument
    serving: str
    follows: bool
    pending: bool
    reason: str
    age_s: float | None


class CatalogWatch:
    """Compares the served versions with the catalog. *Thread-safe*, with one `differing` pass at a time.

    A model differs if its entry, the versions its policy selects, or their files have changed since it was last deployed.
    A pinned model differs only if the pinned version does; an undeployment alone makes no difference.
    """

    def __init__(self, catalog: ModelCatalog, live: LiveModels) -> None:
        self._catalog = catalog
        self._live = live
        self._unreadable: dict[str, str] = {}  # models whose files cannot be read, and the error
        self._tried: dict[str, int] = {}  # by model, number of the last serving document that was followed, or tried

    def differing(self) -> Iterator[tuple[str, bool]]:
        """Yield each model to deploy or undeploy: its name, and whether it is gone from the catalog.

        Reads no rows. A model whose files cannot be examined is skipped and logged once.

        Raises:
            HPSError: the models cannot be listed.
        """
        self._catalog.scan()
        names = self._catalog.names
        known = {*names, *self._catalog.problems}
        yield from [(name, True) for name in self._live.serving if name not in known]
        self._live.forget_others(names)
        for name in names:
            if (wanted := self._wanted(name)) is not None and self._live.differs(name, wanted):
                yield name, False

    def not_following(self) -> Iterator[str]:
        """Yield each model to deploy because it does not serve what its serving document says: one in service, or awaited.

        A version that does not exist yet, or cannot be examined, leaves the model as it is.
        """
        for name in [life.name for life in self._live.models()]:
            document = self._catalog.fleet.shown(name)
            if document is None or self._live.change_of(name):
                continue
            new = self._tried.get(name) != document.number
            if new:
                self._live.forget_failure(name)  # of what the fleet served before
            if not self._follows(name, document) or (new and not document.version):
                wanted = self._wanted(name)
                if wanted is not None and (self._live.failure(name) is None or self._live.differs(name, wanted)):
                    yield name
            self._tried[name] = document.number  # after the caller has tried: until then it is pending

    def fleet(self, name: str) -> FleetStatus | None:
        """Return whether this replica follows the serving document of a model; None if it has none."""
        document = self._catalog.fleet.shown(name)
        if document is None:
            return None
        deployment, failure = self._live.serving.get(name), self._live.failure(name)
        serving = "" if deployment is None else deployment.version
        change = self._live.change_of(name)
        pending = bool(change) or self._tried.get(name) != document.number
        reason = self._catalog.fleet.problem(name)
        if not reason and not self._follows(name, document):
            cause = self._unreadable.get(name, "") or ("" if failure is None else failure.cause)
            reason = (change and f"{change} it is under way") or ("" if pending else cause) or "it is not deployed yet"
        return FleetStatus(document, serving, not reason, pending, reason, self._catalog.fleet.age_s(name))

    def _follows(self, name: str, document: ServingDocument) -> bool:
        serving = self._live.serving.get(name)
        return serving is not None and document.allows(serving.version)

    def _wanted(self, name: str) -> Wanted | None:
        """Return what the catalog selects of a model; None, with one warning, if that cannot be examined."""
        try:
            numbers = self._catalog.to_serve(name)
            document = self._catalog.fleet.shown(name)
            if document is not None:
                if document.version and document.version not in numbers and name in self._live.serving:
                    raise UnknownVersionError(f"the fleet serves {document}, and there is no such version (yet)")
            elif (pin := self._catalog.pins.of(name)) and pin.version not in numbers and self._serves(name, pin.version):
                raise UnknownVersionError(f"version {pin.version}, which serves, is {pin}, and its files are gone")
            chosen = [self._catalog.version(name, version) for version in numbers]
            versions = tuple((one.config.version, self._catalog.fingerprint(one)) for one in chosen)
            wanted = self._catalog.model(name), versions
        except HPSError as error:
            if self._unreadable.get(name) != str(error):
                self._unreadable[name] = str(error)
                _log.warning("polling model %s: it is left as it is: %s", name, error)
            return None
        self._unreadable.pop(name, None)
        return wanted

    def index(self) -> list[IndexEntry]:
        """Return all known versions, by model and number.

        Raises:
            HPSError: the models cannot be listed.
        """
        self._catalog.scan()
        names = sorted({*self._catalog.names, *self._live.serving})
        problems = {name: problem for name, problem in self._catalog.problems.items() if name not in names}
        wrong = [IndexEntry(name, "", "unavailable", str(problem)) for name, problem in sorted(problems.items())]
        return [entry for name in names for entry in self._entries(name)] + wrong

    def _serves(self, name: str, version: str) -> bool:
        serving = self._live.serving.get(name)
        return serving is not None and serving.version == version

    def _entries(self, name: str) -> list[IndexEntry]:
        found: dict[str, tuple[IndexState, str]] = {}
        for one, state in self._live.versions(name):
            found.setdefault(one.version, _STATES[state])
        loading = self._live.change_of(name) == "deploying"
        failure = self._live.failure(name)
        error = "" if failure is None else failure.cause
        try:
            known = self._catalog.versions(name)
            chosen = self._catalog.to_serve(name)
        except HPSError as problem:
            if not found:
                return [IndexEntry(name, "", "unavailable", str(problem))]
            known, chosen = [], []
        for version in known:
            if version not in found:
                found[version] = ("unavailable", (error if version in chosen else "") or "not loaded")
            if version in chosen and loading and found[version][0] != "ready":
                found[version] = ("loading", "")
        return [IndexEntry(name, version, *found[version]) for version in sorted(found, key=int)]
