"""Number of frontends, their shares of the memory, and what they share with the engine."""

import os
from typing import Final

from hps.configuration.load import ServiceConfig
from hps.ground.memory.capacity import available_processors
from hps.regions.layout import MOST_SNAPSHOT_BYTES, SLAB, FrontendDescriptors, create_region, shared_memory

_MOST_BY_DEFAULT: Final = 16  # all share one engine, and each has a slab of at least 64 MB
_LEAST_SLAB_BYTES: Final = 64 << 20
_MOST_SLAB_BYTES: Final = 512 << 20


def default_fronts(processors: int | None = None) -> int:
    """Return the default number of frontends: processors less two for the engine; from 1 to `_MOST_BY_DEFAULT`.

    Args:
        processors: of a machine; by default those that this process may use.
    """
    return min(max(1, (available_processors() if processors is None else processors) - 2), _MOST_BY_DEFAULT)


def slab_bytes(settings: ServiceConfig, fronts: int) -> int:
    """Return the size of a frontend's slab: half of its share of `max_held_bytes`, but enough for a few large answers."""
    least = min(_LEAST_SLAB_BYTES, settings.max_held_bytes // 2)
    return min(_MOST_SLAB_BYTES, max(least, settings.max_held_bytes // fronts // 2)) & -4096


def body_bytes(settings: ServiceConfig, fronts: int) -> int:
    """Return the limit on other memory of a frontend for clients: the rest of its share, but enough for a large body."""
    least = min(2 * settings.max_body_bytes, 3 * settings.max_held_bytes // 4)  # a quarter of it is for small requests
    return max(least, settings.max_held_bytes // fronts - slab_bytes(settings, fronts))


def share(settings: ServiceConfig, fronts: int, path: str, spin_ns: int) -> FrontendDescriptors:
    """Create what frontends share with the engine.

    Args:
        path: unix socket of the engine's application.
        spin_ns: duration that the engine's loop spins before it sleeps.
    """
    size = SLAB + slab_bytes(settings, fronts)
    flags = os.EFD_CLOEXEC | os.EFD_NONBLOCK
    return FrontendDescriptors(
        tuple(create_region(f"hps-frontend-{nth}", size) for nth in range(fronts)),
        tuple(os.eventfd(0, flags) for _ in range(fronts)),
        shared_memory("hps-snapshot", MOST_SNAPSHOT_BYTES),
        (os.eventfd(0, flags),),
        path,
        spin_ns,
    )
