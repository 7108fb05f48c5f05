"""The programs that speak Redis' protocol, as their INFO tells them apart.

Valkey reports what Redis does. Dragonfly, as its source of 1.40 reads, has one policy that evicts, `eviction`, and may call
a replica `replica`.
"""

from collections.abc import Mapping
from typing import Any, Final

_PROGRAMS: Final = {"dragonfly_version": "Dragonfly", "valkey_version": "Valkey", "redis_version": "Redis"}
"""Fields of INFO with a version. All programs have Redis' too, for clients that ask for it."""


def program_of(facts: Mapping[str, Any]) -> str:
    """Name the program and its version, from its INFO."""
    return next((f"{name} {facts[field]}" for field, name in _PROGRAMS.items() if field in facts), "Redis ?")


def is_replica(facts: Mapping[str, Any]) -> bool:
    """Whether the server of this INFO is a replica."""
    return facts.get("role") in {"slave", "replica"}


def evicts_any_key(facts: Mapping[str, Any]) -> bool:
    """Whether the server of this INFO evicts keys that do not expire when it is full."""
    return str(facts.get("maxmemory_policy", "")).startswith(("allkeys", "eviction"))
