"""Opens the databases that a configuration names and puts them in order."""

from dataclasses import dataclass, field
from typing import Any

from hps.config import Configuration
from hps.database_chain import DatabaseChain
from hps.databases.base import Database
from hps.metrics import Metrics
from hps.model_sources import ModelSources
from hps.registry import implementation


@dataclass(frozen=True)
class LoadTargets:
    """Which databases are initialised from model files, and how. Immutable.

    Attributes:
        load: databases to fill.
        keep: databases that use what they have (`initialize_after_startup: false`, `read_only`).
        initial_cache_rate: the share of a volatile database to fill.
        int32_keys: refuse keys that 32-bit serving cannot have (`supportlonglong: false`).
        sources: where model files come from.
        force: load what is there all the same.
    """

    load: tuple[Database, ...] = ()
    keep: tuple[Database, ...] = ()
    initial_cache_rate: float = 1.0
    int32_keys: bool = False
    sources: ModelSources = field(default_factory=ModelSources)
    force: bool = False


def open_host_tiers(configuration: Configuration, metrics: Metrics) -> tuple[DatabaseChain, LoadTargets]:
    """Open the volatile and the persistent database.

    Returns:
        The two as a chain, which owns them, and what is to be loaded into them.

    Raises:
        DatabaseError: one of them cannot be opened; none is left open.
    """
    volatile = _open(configuration.volatile_db)
    try:
        persistent = _open(configuration.persistent_db)
    except BaseException:
        if volatile:
            volatile.close()
        raise
    load: list[Database] = []
    keep: list[Database] = []
    if volatile:
        (load if configuration.volatile_db.initialize_after_startup else keep).append(volatile)
    if persistent:
        settings = configuration.persistent_db
        (load if settings.initialize_after_startup and not settings.read_only else keep).append(persistent)
    chain = DatabaseChain(volatile, persistent, metrics=metrics, promote=configuration.volatile_db.cache_missed_embeddings)
    rate = configuration.volatile_db.initial_cache_rate
    sources = ModelSources(configuration.model_source)
    return chain, LoadTargets(tuple(load), tuple(keep), rate, not configuration.supportlonglong, sources)


def _open(config: Any) -> Database | None:
    if config.type == "disabled":
        return None
    database: Database = implementation("database", config.type).from_config(config)
    return database
