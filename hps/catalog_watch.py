"""Where what is in service differs from what the catalog has: the index of all versions, and what polling is to change."""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from hps.configuration.load import ModelConfig
from hps.errors import HPSError
from hps.live_models import LiveModels, VersionState
from hps.models.catalog import ModelCatalog

_log = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 30.0, 600.0
"""The first and the longest pause before files that could not be loaded are tried again as they are. Failures double it."""

IndexState = Literal["ready", "loading", "unloading", "unavailable"]
Wanted: TypeAlias = tuple[ModelConfig, tuple[tuple[str, str], ...]]
"""What is to be served: a model's entry, the versions that its policy chooses, and the fingerprints of their files."""

_STATES: dict[VersionState, tuple[IndexState, str]] = {
    "serving": ("ready", ""),
    "available": ("ready", ""),
    "kept": ("unavailable", "unloaded; kept for a roll-back"),
    "retiring": ("unloading", ""),
}


@dataclass(frozen=True)
class IndexEntry:
    """A version of a model that is known. *Immutable.*

    Attributes:
        model: its name.
        version: its number; empty where the versions of the model cannot be listed.
        state: `ready` answers lookups.
        reason: why it does not, if that is known.
    """

    model: str
    version: str
    state: IndexState
    reason: str = ""


@dataclass(frozen=True, slots=True)
class _Outcome:
    """How the last deployment of a model by its policy ended."""

    wanted: Wanted | None  # None: what the next pass sees, since a deployment that failed need not know
    error: str = ""
    failures: int = 0
    due: float = float("inf")  # the time of the next try, though nothing changes


class CatalogWatch:
    """Compares the catalog with what is in service. *Thread-safe*; one pass of `differing` at a time.

    A model differs when its entry or its files do, not when somebody rolled it back or took it out of service: what was
    deployed once is not deployed again until its entry, the versions that its policy chooses, or their files are others.

    Args:
        catalog: has the models.
        live: what is in service.
        clock: seconds from any start.
    """

    def __init__(self, catalog: ModelCatalog, live: LiveModels, clock: Callable[[], float] = time.monotonic) -> None:
        self._catalog = catalog
        self._live = live
        self._clock = clock
        self._lock = threading.Lock()
        self._outcomes: dict[str, _Outcome] = {}
        self._unreadable: dict[str, str] = {}  # models, and why their files cannot be looked at

    def served(self, name: str, versions: Iterable[tuple[str, str]]) -> None:
        """A model was deployed by its policy: these versions, with these fingerprints."""
        wanted = self._catalog.model(name), tuple(versions)
        with self._lock:
            self._outcomes[name] = _Outcome(wanted)

    def failed(self, name: str, error: Exception) -> None:
        """A model that is known could not be deployed."""
        if name not in self._catalog.names:
            return
        with self._lock:
            failures = self._outcomes.get(name, _Outcome(None)).failures + 1
            pause = min(FIRST_PAUSE_S * 2.0 ** min(failures - 1, 32), LONGEST_PAUSE_S)
            self._outcomes[name] = _Outcome(None, str(error), failures, self._clock() + pause)

    def differing(self) -> Iterator[tuple[str, bool]]:
        """Yield the models to be deployed, and those to be undeployed because they are gone: a name, and whether it is gone.

        Files are looked at, no row is read. A model whose files cannot be looked at is left as it is, and logged once.

        Raises:
            HPSError: the models cannot be listed.
        """
        self._catalog.scan()
        names = self._catalog.names
        known = {*names, *self._catalog.problems}
        yield from [(name, True) for name in self._live.serving if name not in known]
        with self._lock:
            self._outcomes = {name: one for name, one in self._outcomes.items() if name in names}
        for name in names:
            try:
                chosen = [self._catalog.version(name, version) for version in self._catalog.to_serve(name)]
                versions = tuple((one.config.version, self._catalog.fingerprint(one)) for one in chosen)
                wanted = self._catalog.model(name), versions
            except HPSError as error:
                if self._unreadable.get(name) != str(error):
                    self._unreadable[name] = str(error)
                    _log.warning("polling model %s: it is left as it is: %s", name, error)
                continue
            self._unreadable.pop(name, None)
            if self._is_due(name, wanted):
                yield name, False

    def _is_due(self, name: str, wanted: Wanted) -> bool:
        with self._lock:
            outcome = self._outcomes.get(name)
            if outcome is None:
                return True
            if outcome.wanted is None:
                outcome = self._outcomes[name] = replace(outcome, wanted=wanted)
            if outcome.wanted != wanted:
                del self._outcomes[name]  # failures of other files do not count
                return True
            return self._clock() >= outcome.due

    def index(self) -> list[IndexEntry]:
        """Every version that is known, by model and number.

        Raises:
            HPSError: the models cannot be listed.
        """
        self._catalog.scan()
        names = sorted({*self._catalog.names, *self._live.serving})
        problems = {name: problem for name, problem in self._catalog.problems.items() if name not in names}
        wrong = [IndexEntry(name, "", "unavailable", str(problem)) for name, problem in sorted(problems.items())]
        return [entry for name in names for entry in self._entries(name)] + wrong

    def _entries(self, name: str) -> list[IndexEntry]:
        found: dict[str, tuple[IndexState, str]] = {}
        for one, state in self._live.versions(name):
            found.setdefault(one.version, _STATES[state])
        loading = self._live.change_of(name) == "deploying"
        with self._lock:
            error = self._outcomes[name].error if name in self._outcomes else ""
        try:
            known = self._catalog.versions(name)
            chosen = self._catalog.model(name).version_policy.chosen(known)
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
