"""Puts one model into service: its tables loaded, its caches built and warmed, its sessions ready."""

import logging
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from hps.cache.base import EmbeddingCache
from hps.configuration.load import Configuration, ModelConfig
from hps.databases.base import Database, PersistentDatabase
from hps.errors import DatabaseError, InvalidInputError, NotReadyError, UnknownDeviceError, UnknownTableError
from hps.lookup.chain import DatabaseChain
from hps.lookup.coalescing import FetchCoalescer
from hps.lookup.refresh import refresh
from hps.lookup.session import CachedSession, DirectSession, Session, SessionSettings
from hps.metrics import Metrics
from hps.models.files import SparseModel
from hps.models.repeats import find_repeats
from hps.models.sources import ModelSources
from hps.models.table_load import LoadReport, LoadTargets, TableLoad
from hps.models.warm_up import warm_up
from hps.open_calls import OpenCalls
from hps.progress import Progress
from hps.registry import implementation
from hps.types import FloatArray, KeyArray, TableSpec

_log = logging.getLogger(__name__)

DRAIN_S = 10.0
"""How long a deployment that is closed waits for its lookups; they go on afterwards, and keep their tables."""

_STATIC_LOAD = 0.7
"""How full a static cache on a GPU is. Sets are then rarely too small for their keys; the few vectors that find no place stay
in the databases, which hold every row."""


@dataclass(frozen=True)
class Deployment:
    """One model in service. *Thread-safe.*

    Attributes:
        config: the model's configuration.
        tables: its tables, in the order of their ids.
        sessions: by device id. On the CPU all device ids share one session.
        chain: the host tiers that hold its tables.
        indices: of the tables, by name and by id.
        changes: the modifications and refreshes under way.
    """

    config: ModelConfig
    tables: tuple[TableSpec, ...]
    sessions: dict[int, Session]
    chain: DatabaseChain
    indices: dict[str | int, int] = field(init=False, repr=False)
    changes: OpenCalls = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "changes", OpenCalls(f"the deployment of model {self.config.model!r}"))
        names = {spec.table_name: index for index, spec in enumerate(self.tables)}
        object.__setattr__(self, "indices", names | {index: index for index in names.values()})

    @property
    def devices(self) -> tuple[int, ...]:
        """The device ids that the model is deployed on."""
        return tuple(self.sessions)

    @property
    def caches(self) -> list[EmbeddingCache]:
        """The embedding caches, each once."""
        return [session.cache for session in dict.fromkeys(self.sessions.values()) if session.cache is not None]

    def session(self, device_id: int | None) -> Session:
        """The session of a device; of the first device for None.

        Raises:
            UnknownDeviceError: the model is not deployed there.
        """
        if device_id is None:
            return next(iter(self.sessions.values()))
        try:
            return self.sessions[device_id]
        except KeyError:
            raise UnknownDeviceError(
                f"looking up model {self.config.model!r}: got device {device_id!r}, expected one of its deployed_device_list "
                f"{list(self.sessions)}"
            ) from None

    def table_index(self, table: int | str) -> int:
        """The index of a table that is given by id or by name.

        Raises:
            UnknownTableError: the model has no such table.
        """
        index = self.indices.get(table) if isinstance(table, (str, int, np.integer)) else None
        if index is None or isinstance(table, bool):
            known = ", ".join(f"{index} ({spec.table_name})" for index, spec in enumerate(self.tables))
            raise UnknownTableError(f"looking up model {self.config.model!r}: got table {table!r}, expected one of {known}")
        return index

    def insert(self, index: int, keys: KeyArray, vectors: FloatArray) -> None:
        """Add or replace vectors of a table in every tier; see `HPS.insert`."""
        table = self.tables[index]
        self._refuse_what_nobody_keeps(f"inserting into {table.tag}")
        if vectors.shape != (keys.size, table.dim):
            raise InvalidInputError(
                f"inserting into {table.tag}: got vectors of shape {vectors.shape}, expected {(keys.size, table.dim)}"
            )

        def apply(written: bool) -> None:
            for cache in self.caches:
                if written:
                    cache.update(index, keys, vectors)
                else:
                    cache.erase(index, keys)

        with self.changes:
            self.chain.insert(table, keys, vectors, apply)

    def delete(self, index: int, keys: KeyArray) -> None:
        """Remove keys of a table from every tier; see `HPS.delete`."""
        self._refuse_what_nobody_keeps(f"deleting from {self.tables[index].tag}")

        def apply(_written: bool) -> None:
            for cache in self.caches:
                cache.erase(index, keys)

        with self.changes:
            self.chain.delete(self.tables[index], keys, apply)

    def refresh(self) -> None:
        """Read the vectors of all resident keys again; see `HPS.refresh`."""
        with self.changes:
            for cache in self.caches:
                for index, table in enumerate(self.tables):
                    refresh(cache, index, table, self.chain, self.config.cache_refresh_percentage_per_iteration)

    def _refuse_what_nobody_keeps(self, doing: str) -> None:
        """Refuse a modification that no database would hold: it would be acknowledged, and lost with this deployment."""
        resident = self.config.embedding_cache_type in ("static", "uvm")
        kept_by = PersistentDatabase if resident else Database
        if not any(isinstance(database, kept_by) for database in self.chain.databases):
            raise InvalidInputError(
                f"{doing}: got no database that would keep it, expected {'a persistent_db' if resident else 'one'}; configure "
                "it, or write new model files and deploy the model again"
            )

    def drain(self, timeout_s: float) -> bool:
        """Wait for queued insertions; False when the timeout comes first."""
        return all(session.drain(timeout_s) for session in dict.fromkeys(self.sessions.values()))

    def close(self) -> bool:
        """Refuse new lookups, let running ones end and free the caches, and the tables that are in this process's memory.

        Returns:
            False when some still run after `DRAIN_S`: what they read stays, and `close` may be called again.
        """
        ended = [session.close(DRAIN_S) for session in dict.fromkeys(self.sessions.values())]
        if not (self.changes.close(DRAIN_S) and all(ended)):
            return False
        try:
            for table in self.tables:
                self.chain.release_table(table)
        except (DatabaseError, NotReadyError) as error:  # a promotion that does not end, or the databases are closed
            _log.warning("undeploying model %r: %s", self.config.model, error)
            return False
        return True


def choose_cache(device: str) -> type[EmbeddingCache]:
    """The cache class for a configured `device`; `auto` is CUDA where a GPU and CuPy are there.

    Raises:
        DeviceError, MissingDependencyError: `cuda` is configured and not available.
    """
    if device != "auto":
        return _cache_class(device)
    try:
        cuda = _cache_class("cuda")
        reason = cuda.unavailable_reason()
    except ImportError as error:
        reason = str(error)
    if reason is None:
        return cuda
    _log.warning("device auto: serving from the CPU with the NumPy cache (%s)", reason)
    return _cache_class("cpu")


def deploy(
    config: ModelConfig,
    cache_class: type[EmbeddingCache],
    chain: DatabaseChain,
    coalescer: FetchCoalescer,
    metrics: Metrics,
    *,
    targets: LoadTargets,
    progress: Progress | None = None,
) -> Deployment:
    """Load a model's tables into the databases, build its caches and sessions, and warm the caches.

    Args:
        targets: the databases of the chain that are to be initialised from the model files, and how.

    Raises:
        ModelFileError: a table's files are missing or do not fit its configuration.
        DatabaseError, DeviceError: a tier failed.
    """
    tables = config.tables
    if config.embedding_cache_type in ("static", "uvm") and cache_class.device == "cpu":
        return _deploy_resident(config, targets, metrics, progress)
    if config.embedding_cache_type == "stochastic":  # HugeCTR: such a model does not fill the databases
        targets = replace(targets, load=(), keep=())
    try:
        reports = _load_tables(config, chain, targets, progress)
        if not config.gpucache and cache_class.device == "cpu":
            session = DirectSession(tables, chain, metrics)
            return Deployment(config, tables, dict.fromkeys(config.deployed_device_list, session), chain)
        sessions = _cached_sessions(config, cache_class, chain, coalescer, metrics, reports)
    except BaseException:
        for table in tables:  # what was loaded of a model that is not served
            with suppress(DatabaseError):
                chain.release_table(table)
        raise
    return Deployment(config, tables, sessions, chain)


def _cached_sessions(
    config: ModelConfig,
    cache_class: type[EmbeddingCache],
    chain: DatabaseChain,
    coalescer: FetchCoalescer,
    metrics: Metrics,
    reports: Sequence[LoadReport],
) -> dict[int, Session]:
    """Build and warm the cache of every device; on the CPU all device ids share one."""
    settings = SessionSettings(
        hit_rate_threshold=config.hit_rate_threshold,
        workspaces=config.num_of_worker_buffer_in_pool,
        workspace_timeout_s=config.workspace_timeout_s,
        insert_queue_length=config.insert_queue_length,
    )
    share, fraction = config.gpucacheper, config.cache_refresh_percentage_per_iteration if config.init_ec else 0.0
    if config.embedding_cache_type == "static":
        share, fraction = 1 / _STATIC_LOAD, 1.0
    if not config.gpucache:
        share = fraction = 0.0
    capacities = [math.ceil(share * report.model.rows) for report in reports]
    sessions: dict[int, Session] = {}
    stale = [report.differs or report.model.may_change_unseen() for report in reports]
    try:
        for device_id in config.deployed_device_list:
            if cache_class.device == "cpu" and sessions:
                sessions[device_id] = next(iter(sessions.values()))
                continue
            cache = cache_class.create(config.tables, capacities, device_id)
            sessions[device_id] = CachedSession(config.tables, cache, chain, coalescer, settings, metrics)
            for index, (table, report) in enumerate(zip(config.tables, reports, strict=True)):
                warmed = warm_up(cache, index, table, report.model, fraction)
                if len(sessions) == 1:  # the caches of the other devices hold as many rows
                    stale[index] = stale[index] or _warmed_in_part(table, report.model, warmed, chain)
                if stale[index] and chain.databases:
                    refresh(cache, index, table, chain, fraction)
    except BaseException:
        for session in dict.fromkeys(sessions.values()):
            session.close(0.0)
        raise
    return sessions


def _warmed_in_part(table: TableSpec, model: SparseModel, rows: int, chain: DatabaseChain) -> bool:
    """Whether keys of the rows that a cache was warmed with occur again in later rows, which count.

    Raises:
        ModelFileError: they do, and no database has the later ones.
    """
    repeats = find_repeats(model, rows)
    if repeats and not chain.databases:
        raise repeats.refusal(f"warming up {table.tag} from {model.place}", "the cache", rows)
    return repeats is not None


def _load_tables(
    config: ModelConfig, chain: DatabaseChain, targets: LoadTargets, progress: Progress | None
) -> list[LoadReport]:
    """Fill the databases with every table of a model."""
    reports = []
    for table, source in zip(config.tables, config.sparse_files, strict=True):
        chain.open_table(table)
        reports.append(TableLoad(table, source, targets, progress).run())
    return reports


def _deploy_resident(config: ModelConfig, targets: LoadTargets, metrics: Metrics, progress: Progress | None) -> Deployment:
    """On the CPU a static (or uvm) cache is a hash map of its own that holds every row, over the persistent database if any."""
    resident: Database = implementation("database", "hash_map")()
    load = tuple(database for database in targets.load if isinstance(database, PersistentDatabase))
    keep = tuple(database for database in targets.keep if isinstance(database, PersistentDatabase))
    chain = DatabaseChain(resident, next(iter(load + keep), None), metrics=metrics)
    _load_tables(config, chain, replace(targets, load=(resident, *load), keep=keep, initial_cache_rate=1.0), progress)
    session = DirectSession(config.tables, chain, metrics)
    sessions: dict[int, Session] = dict.fromkeys(config.deployed_device_list, session)
    return Deployment(config, config.tables, sessions, chain)


def _cache_class(device: str) -> type[EmbeddingCache]:
    found: type[EmbeddingCache] = implementation("cache", device)
    return found


def open_databases(configuration: Configuration, metrics: Metrics) -> tuple[DatabaseChain, LoadTargets]:
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
