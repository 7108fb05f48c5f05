"""The index of all versions of all models, in service or not."""

from dataclasses import dataclass
from typing import Literal

from hps.errors import HPSError
from hps.versions.catalog import ModelCatalog
from hps.versions.live_models import LiveModels, ShownState, shown_state

IndexState = Literal["ready", "loading", "unloading", "unavailable"]
_STATES: dict[ShownState, tuple[IndexState, str]] = {
    "serving": ("ready", ""),
    "available": ("ready", ""),
    "held": ("ready", ""),
    "kept": ("unavailable", "unloaded; kept for a roll-back"),
    "retiring": ("unloading", ""),
}


@dataclass(frozen=True)
class IndexEntry:
    """A known version of a model. *Immutable.*

    Attributes:
        version: its number; empty if the versions of the model cannot be listed.
        state: lookups are answered if `ready`.
        reason: why it is not ready; empty if unknown.
    """

    model: str
    version: str
    state: IndexState
    reason: str = ""


def version_index(catalog: ModelCatalog, live: LiveModels) -> list[IndexEntry]:
    """Return all known versions, by model and number.

    Raises:
        HPSError: the models cannot be listed.
    """
    catalog.scan()
    names = sorted({*catalog.names, *live.serving})
    problems = {name: problem for name, problem in catalog.problems.items() if name not in names}
    invalid = [IndexEntry(name, "", "unavailable", str(problem)) for name, problem in sorted(problems.items())]
    return [entry for name in names for entry in _entries(name, catalog, live)] + invalid


def _entries(name: str, catalog: ModelCatalog, live: LiveModels) -> list[IndexEntry]:
    found: dict[str, tuple[IndexState, str]] = {}
    for deployment, state in live.versions(name):
        found.setdefault(deployment.version, _STATES[shown_state(deployment, state)])
    loading = live.change_of(name) == "deploying"
    failure = live.failure(name)
    error = "" if failure is None else failure.cause
    try:
        known = catalog.versions(name)
        chosen = catalog.to_serve(name)
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
