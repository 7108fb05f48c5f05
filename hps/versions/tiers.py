"""Opens the tiers of a configuration: its databases, the class of its caches, and the kernels that they need."""

import logging
from collections.abc import Callable
from typing import Any, cast

from hps.cache.base import BatchAnswers, EmbeddingCache
from hps.configuration.load import Configuration
from hps.configuration.tiers import PersistentDbConfig, VolatileDbConfig
from hps.engine.chain import DatabaseChain
from hps.errors import DatabaseError
from hps.ground.key_sets import places_kernels, set_kernels
from hps.ground.registry import implementation
from hps.ground.rows import row_kernels
from hps.models.loading.table_load import LoadTargets
from hps.models.sources import ModelSources
from hps.regions.loop_state import ENGINE_KERNELS, FRONTEND_KERNELS
from hps.scoring.packing import gather
from hps.statistics.metrics import Metrics
from hps.stores.base import Database, PersistentDatabase
from hps.stores.unavailable import UnavailableDatabase
from hps.tensors import strings
from hps.tensors.pooling import counted_positions, pool_rows
from hps.versions.cache_sizes import RESIDENT, is_direct

_log = logging.getLogger(__name__)


def choose_cache(device: str, *, quiet: bool = False) -> type[EmbeddingCache]:
    """Return the cache class of a configured `device`; `auto` is CUDA if a GPU and CuPy are available.

    Args:
        quiet: do not log why `auto` is the CPU.

    Raises:
        DeviceError, MissingDependencyError: `cuda` is configured and not available.
    """
    if device == "auto":
        reason = why_unavailable("cuda")
        device = "cpu" if reason else "cuda"
        if reason and not quiet:
            _log.warning("device auto: serving from the CPU with the NumPy cache (%s)", reason)
    chosen: type[EmbeddingCache] = implementation("cache", device)
    return chosen


def why_unavailable(device: str) -> str | None:
    """Return why the cache of a device cannot be used here; None if it can."""
    try:
        reason: str | None = implementation("cache", device).unavailable_reason()
    except ImportError as error:
        reason = str(error)
    return reason


def open_databases(configuration: Configuration, metrics: Metrics) -> tuple[DatabaseChain, Callable[[], LoadTargets]]:
    """Open the persistent and the volatile database.

    Returns:
        The two as a chain, which owns them, and a function that returns the reachable databases to load.

    Raises:
        DatabaseError: one of them cannot be opened; none is left open.
    """
    above, below = configuration.volatile_db, configuration.persistent_db
    # A volatile database may be unreachable if another tier has every row: lookups do without it until it is back.
    volatile, away = None, ""
    persistent: PersistentDatabase | None = None
    if below.type != "disabled":
        persistent = cast(PersistentDatabase, open_database(below))  # the configuration accepts no other kind
    try:
        if above.type != "disabled":
            volatile, away = _open_volatile(configuration)
    except BaseException:
        if persistent:
            persistent.close()
        raise
    chain = DatabaseChain(volatile, persistent, metrics=metrics, promote=above.cache_missed_embeddings, away=away)
    sources = ModelSources(configuration.model_source)
    loads = {False: above.initialize_after_startup, True: below.initialize_after_startup and not below.read_only}

    def targets() -> LoadTargets:
        load = tuple(database for database in chain.databases if loads[database is persistent])
        keep = tuple(database for database in chain.databases if not loads[database is persistent])
        return LoadTargets(load, keep, above.initial_cache_rate, not configuration.supportlonglong, sources)

    return chain, targets


def _open_volatile(configuration: Configuration) -> tuple[Database, str]:
    """Open the volatile database; if it is unreachable and another tier has every row, return a stand-in and the error."""
    config, models = configuration.volatile_db, configuration.models
    try:
        return open_database(config), ""
    except DatabaseError as error:
        resident = bool(models) and all(model.embedding_cache_type in RESIDENT for model in models)
        if configuration.persistent_db.type == "disabled" and not resident:
            raise
        _log.error("starting without the volatile database, which other tiers do without: %s", error)
        return UnavailableDatabase(config.type, config.row_dtype, str(error)), str(error)


def open_database(config: VolatileDbConfig | PersistentDbConfig) -> Database:
    """Open the database that a section of the configuration describes.

    Raises:
        DatabaseError: it cannot be opened.
    """
    database: Database = implementation("database", config.type).from_config(config)
    database.row_dtype = config.row_dtype
    return database


def kernels_of(configuration: Configuration, cache_class: type[EmbeddingCache]) -> list[Callable[..., Any]]:
    """Return the numba kernels of loads, lookups of rows and bags, and changes of rows.

    Kernels of rarer calls are compiled by the first call, and those of row formats that only a repository names with the first
    deployment of such a model.
    """
    found = [*set_kernels(), counted_positions, pool_rows]  # of loads, and of bags without a cache
    for section in (configuration.volatile_db, configuration.persistent_db):
        if section.type != "disabled":
            found += implementation("database", section.type).kernels(section)
    if configuration.model_repository or not all(is_direct(model, cache_class) for model in configuration.models):
        found += [*cache_class.kernels(), *places_kernels()]
    found += row_kernels(table.row_dtype for model in configuration.models for table in model.tables)
    return list(dict.fromkeys(found))


def batch_answers(cache_class: type[EmbeddingCache]) -> type[BatchAnswers]:
    """Return the class whose driver answers the requests of frontends from caches of a class.

    The driver of the NumPy cache hands every request of another cache over to the engine's threads.
    """
    if issubclass(cache_class, BatchAnswers):
        return cache_class
    found: type[BatchAnswers] = implementation("cache", "cpu")
    return found


def served_kernels(configuration: Configuration, cache_class: type[EmbeddingCache]) -> list[Callable[..., Any]]:
    """Return the numba kernels of a service: `kernels_of`, and those of frontends and engine."""
    found = [
        *kernels_of(configuration, cache_class),
        *batch_answers(cache_class).batch_kernels(),
        *FRONTEND_KERNELS,
        *ENGINE_KERNELS,
        gather,
        *(strings.KERNELS if any(model.transform for model in configuration.models) else ()),
    ]
    return list(dict.fromkeys(found))
