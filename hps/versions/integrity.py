"""Checks the invariants of all caches and databases of a parameter server, during lookups: for administrators and tests."""

import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol, runtime_checkable

from hps.errors import HPSError
from hps.ground.threads.workers import call_in_thread
from hps.versions.live_models import LiveModels


@runtime_checkable
class Checkable(Protocol):
    """A cache, a database or another part that can check its own invariants."""

    def check_integrity(self) -> list[str]:
        """Return a sentence for each invariant that is broken."""
        ...


def check_tiers(live: LiveModels, timeout_s: float, others: Mapping[str, Checkable] = MappingProxyType({})) -> list[str]:
    """Check the caches and databases of all versions in service; return a sentence for each broken invariant.

    A check that exceeds the limit is reported and abandoned together with its thread.

    Args:
        others: further parts to check, by name.
    """
    parts: dict[object, str] = {part: name for name, part in others.items()}
    for deployment in live.all():
        where = f"model {deployment.config.model!r}, version {deployment.version}"
        for cache in deployment.device_caches:
            parts[cache] = f"{where}, cache on {cache.device_name}"
        for database in deployment.chain.databases:
            parts.setdefault(database, database.kind)
    checks = [(name, part.check_integrity) for part, name in parts.items() if isinstance(part, Checkable)]
    running = [(name, call_in_thread("integrity", check)) for name, check in checks]
    deadline = time.monotonic() + timeout_s
    broken = []
    for name, answer in running:
        try:
            found = answer.result(max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            found = [f"it was not checked within {timeout_s:g} s"]
        except HPSError as error:  # it is closing, or its device is lost
            found = [f"it cannot be checked: {error}"]
        broken += [f"{name}: {finding}" for finding in found]
    return broken
