"""Compares the served versions with the catalog: the index of all versions, and the changes for polling to make."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from hps.errors import HPSError, UnknownVersionError
from hps.models.files import joint_fingerprint
from hps.versions.catalog import ModelCatalog
from hps.versions.live_models import LiveModels, VersionState

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


class CatalogWatch:
    """Compares the served versions with the catalog. *Thread-safe*, with one `differing` pass at a time.

    A model differs if its entry, the versions its policy selects, or their files have changed since it was last deployed.
    A pinned model differs only if the pinned version does; an undeployment alone makes no difference.
    """

    def __init__(self, catalog: ModelCatalog, live: LiveModels) -> None:
        self._catalog = catalog
        self._live = live
        self._unreadable: dict[str, str] = {}  # models whose files cannot be read, and the error

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
            try:
                numbers = self._catalog.to_serve(name)
                if (pin := self._catalog.pins.of(name)) and pin.version not in numbers and self._serves(name, pin.version):
                    raise UnknownVersionError(f"version {pin.version}, which serves, is {pin}, and its files are gone")
                chosen = [self._catalog.version(name, version) for version in numbers]
                versions = tuple((one.config.version, joint_fingerprint(self._catalog.fingerprints(one))) for one in chosen)
                wanted = self._catalog.model(name), versions
            except HPSError as error:
                if self._unreadable.get(name) != str(error):
                    self._unreadable[name] = str(error)
                    _log.warning("polling model %s: it is left as it is: %s", name, error)
                continue
            self._unreadable.pop(name, None)
            if self._live.differs(name, wanted):
                yield name, False

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
