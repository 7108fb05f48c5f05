"""Builds a deployment: loads its tables, opens its network, and builds and warms its caches and sessions."""

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from hps.cache.base import EmbeddingCache, SharedRows, StaticTables, leader_of
from hps.configuration.load import ModelConfig
from hps.engine.chain import DatabaseChain
from hps.engine.coalescing import FetchCoalescer
from hps.engine.miss_path import MissPaths, choose_paths
from hps.engine.refresh import refresh
from hps.engine.session import CachedSession, DirectSession, Session, SessionSettings
from hps.errors import CapacityError, ConfigError, DatabaseError, DeviceMemoryError
from hps.ground.kernels.numba_kernels import compile_kernels
from hps.ground.progress import Progress
from hps.ground.registry import implementation
from hps.ground.rows import row_kernels
from hps.models.files import SparseModel
from hps.models.loading.repeats import find_repeats
from hps.models.loading.table_load import LoadReport, LoadTargets, TableLoad
from hps.models.loading.warm_up import DatabaseRows, WarmUpSource, warm_up
from hps.models.sources import ModelSources
from hps.scoring.deployed import OpenedNetwork
from hps.statistics.metrics import Metrics
from hps.stores.base import UNBOUNDED_ROWS, Database, PersistentDatabase
from hps.tensors.transforms import Transform
from hps.types import TableSpec
from hps.versions.cache_sizes import RESIDENT, cache_capacities, index_sizes, is_direct, is_static, not_shared, usable_sharing
from hps.versions.catalog import ModelVersion
from hps.versions.deployment import Deployment, check_written_at, log_positions

_log = logging.getLogger(__name__)


def load_deployment(
    version: ModelVersion,
    tables: Sequence[TableSpec],
    cache_class: type[EmbeddingCache],
    chain: DatabaseChain,
    *,
    targets: LoadTargets,
    follows: Callable[[TableSpec], bool] = lambda table: False,
    progress: Progress | None = None,
) -> Deployment:
    """Load a version's tables into the databases, build its caches and sessions, and warm the caches.

    Args:
        tables: its tables, with the slots to use.
        targets: databases of the chain to load from the model files.
        follows: returns True if a table follows a log of updates.

    Raises:
        CapacityError: it does not fit; nothing was loaded.
        ModelFileError: a table's files are missing or do not fit its configuration.
        DatabaseError, DeviceError: a tier failed.
    """
    config, tables = version.config, tuple(tables)
    if kernels := row_kernels(table.row_dtype for table in tables):
        compile_kernels(*kernels)
    if config.embedding_cache_type in RESIDENT:
        chain, targets = _resident(targets, chain.metrics)
    elif config.embedding_cache_type == "stochastic":  # as in HugeCTR, such a model does not fill the databases
        targets = replace(targets, load=(), keep=())
    counts = config.checks.enabled and config.checks.finite.policy != "refuse"  # and does not refuse: the check judges
    targets = replace(targets, max_nonfinite_rows=UNBOUNDED_ROWS if counts else config.max_nonfinite_rows)
    _refuse_shared_share(config, chain)
    check_written_at(config, version.written_at_us)
    loads = [TableLoad(table, source, targets, progress) for table, source in zip(tables, version.sources, strict=True)]
    rows = tuple(load.rows for load in loads)
    check_transform(config, targets.sources)
    network = _open_network(version, targets.sources, cache_class)
    try:
        _check_room(config, tables, loads, targets, chain, None if is_direct(config, cache_class) else cache_class)
    except BaseException:
        if network is not None:
            network.close()
        raise
    loaded = (*targets.load, *targets.keep)
    opens = not loaded or chain.volatile in loaded  # otherwise it was unreachable when this deployment started
    doing = f"deploying model {config.model!r}, version {config.version}"
    _log.debug("%s: its %d tables of %d rows fit; loading them", doing, len(tables), sum(rows))
    try:
        reports = []
        for table, load in zip(tables, loads, strict=True):
            load.drop_conflicting_tables()
            chain.open_table(table, volatile=opens)
            reports.append(load.run())
        fingerprints = tuple(report.fingerprint for report in reports)
        starts = tuple(
            source.log_start if follows(table) else None for table, source in zip(tables, version.sources, strict=True)
        )
        positions = log_positions(chain, tables, starts)
        build = partial(_sessions, cache_class, chain, rows, all(report.complete for report in reports))
        _log.debug("%s: its tables are loaded; building and warming its caches", doing)
        # A static cache takes every row from the hash map, so that `_mark_complete` can compare their numbers. Other caches
        # take the first rows of the files, as HugeCTR's do.
        static = config.embedding_cache_type == "static"
        fill = partial(_warm_from_database, chain) if static else _FileWarmUp(tables, reports, chain).fill
        sessions = build(config, tables, fill)
        _log.debug("%s: its caches are warm; it takes over", doing)
        deployment = Deployment(
            config,
            tables,
            sessions,
            chain,
            rows,
            fingerprints,
            tuple(report.nonfinite_rows for report in reports),
            build,
            log_starts=starts,
            log_positions=positions,
            written_at_us=version.written_at_us,
            network=network,
        )
        deployment.start_aging()
        _mark_complete(deployment)
        share = config.share
        chain.metrics.model_shard.labels(config.model).set(share.index if share else 0)
        chain.metrics.model_shards.labels(config.model).set(share.of if share else 1)
        return deployment
    except BaseException:
        if network is not None:
            network.close()
        for table in tables:
            with suppress(DatabaseError):
                chain.release_table(table)
        raise


def _refuse_shared_share(config: ModelConfig, chain: DatabaseChain) -> None:
    """Refuse to load a share of the tables into a database of all servers, where it would replace the other shares."""
    for database in (*chain.databases, chain.volatile):
        if config.share is not None and database is not None and database.shared:
            raise ConfigError(
                f"deploying model {config.model!r}",
                [f"shard: got {config.share}, expected none with {database.kind}, whose tables all servers share"],
            )


def check_transform(config: ModelConfig, sources: ModelSources) -> None:
    """Check that the transform of an entry can be used.

    Raises:
        ConfigError: it cannot be imported, or is code that `model_source.trust` does not allow.
    """
    if config.transform is not None:
        Transform(config.transform, config.model, trusted=sources.trusted)


def _open_network(version: ModelVersion, sources: ModelSources, cache_class: type[EmbeddingCache]) -> OpenedNetwork | None:
    """Open the network of a version."""
    if version.network is None:
        return None
    config = version.config
    devices = () if cache_class.device == "cpu" else config.deployed_device_list
    # The fingerprint comes first: if the files change between the two reads, it is the older one, and polling finds the newer.
    fingerprint = version.network.fingerprint(sources)
    contents = version.network.read(sources)
    try:
        return OpenedNetwork(config, version.network.config, contents, fingerprint, devices)
    except DeviceMemoryError as error:
        raise CapacityError(f"deploying model {config.model!r}: {error}") from error


def reconfigure(current: Deployment, config: ModelConfig, written_at_us: int = 0) -> Deployment:
    """Build caches and sessions with other settings over the tables of a deployment in service; nothing is loaded.

    Both deployments answer lookups, and writes through the deployment in service reach the caches of both. After the takeover,
    close the old one with `hand over`.

    Args:
        config: entry with the same tables and cache type.
        written_at_us: as for `Deployment.renewed`.

    Raises:
        DatabaseError, DeviceError: a tier failed.
        ModelFileError: as `check_written_at`.
    """
    check_written_at(config, written_at_us or current.written_at_us)
    successor = current.renewed(config, written_at_us)
    current.successors.append(successor)
    try:
        for cache in successor.caches:
            # Writes that started before the caches were registered as successors do not reach them: wait for these writes, then
            # reload every row that the warm-up may have read before a write.
            for index, table in enumerate(successor.tables):
                successor.chain.settle(table)
                refresh(cache, index, table, successor.chain, config.cache_refresh_percentage_per_iteration)
        successor.start_aging()
        _mark_complete(successor)
    except BaseException:
        current.successors.remove(successor)
        successor.close("hand over")
        raise
    return successor


def _mark_complete(deployment: Deployment) -> None:
    """Mark static caches that hold every row as complete."""
    # A cache has no key that the authoritative database lacks, and the hash map above has the same rows as that database unless
    # a write to it failed. So equal row counts mean equal sets, and no key needs to be compared.
    chain, tables = deployment.chain, deployment.tables
    static = [cache for cache in deployment.caches if isinstance(cache, StaticTables) and cache.static]
    # With a share, the host must see absent keys: those of another share are an error.
    if not static or any(table.share is not None for table in tables):
        return
    with chain.settled(tables):
        if chain.failed_above:
            return
        rows = [chain.databases[0].size(chain.databases[0].stored(table).tag) for table in tables]
        for cache in static:
            resident = [cache.stats(index).resident_rows for index in range(len(tables))]
            if resident == rows:
                cache.mark_complete(complete=True)
            else:
                _log.info(
                    "model %r: %d of its %d rows are not resident on device %d; lookups read them from host memory",
                    deployment.config.model,
                    sum(rows) - sum(resident),
                    sum(rows),
                    cache.device_id,
                )


def _sessions(
    cache_class: type[EmbeddingCache],
    chain: DatabaseChain,
    rows: Sequence[int],
    databases_complete: bool,
    config: ModelConfig,
    tables: Sequence[TableSpec],
    fill: Callable[[EmbeddingCache, int, float], None] | None = None,
) -> dict[int, Session]:
    """Build the session of every device, with its cache; on the CPU all device ids share one.

    Args:
        databases_complete: the databases hold every row.
        fill: warms a table of a cache with a share of its rows; by default from the database that holds every row.
    """
    if is_direct(config, cache_class):
        return dict.fromkeys(config.deployed_device_list, DirectSession(tables, chain, chain.metrics))
    fill = fill or partial(_warm_from_database, chain)
    coalescer = FetchCoalescer(chain.fetch, chain.metrics)
    settings = SessionSettings(
        hit_rate_threshold=config.hit_rate_threshold,
        workspaces=config.num_of_worker_buffer_in_pool,
        workspace_timeout_s=config.workspace_timeout_s,
        insert_queue_length=config.insert_queue_length,
        one_of_several=len(config.deployed_device_list) > 1 and cache_class.device != "cpu",
        databases_complete=databases_complete,
    )
    fraction = config.cache_refresh_percentage_per_iteration if config.init_ec else 0.0
    if is_static(config):
        fraction = 1.0
    if not config.gpucache:
        fraction = 0.0
    sharing, reason = usable_sharing(config, cache_class, rows)
    if reason is not None:
        _log.warning("model %r: %s", config.model, not_shared(config, reason))
    capacities = cache_capacities(config, rows, sharing)
    sessions: dict[int, Session] = {}
    shared: SharedRows | None = None
    try:
        for device_id in config.deployed_device_list:
            if cache_class.device == "cpu" and sessions:
                sessions[device_id] = next(iter(sessions.values()))
                continue
            if shared is None:
                cache = cache_class.create(tables, capacities, device_id, is_static(config), sharing)
                shared = cache if sharing.device_ids and isinstance(cache, SharedRows) else None
            else:
                cache = shared.on(device_id)
            paths = _miss_paths(config, cache, chain)
            device_settings = replace(
                settings, stream_order_refusals=paths.stream_order_refusals, miss_paths=tuple(paths.paths)
            )
            sessions[device_id] = CachedSession(tables, cache, chain, coalescer, device_settings, chain.metrics)
            if not sharing.device_ids:
                _fill_tables(cache, fill, fraction)
        if shared is not None:  # after the loop, since miss paths are chosen for an empty cache
            _fill_tables(leader_of(shared), fill, fraction)
    except BaseException:
        for session in dict.fromkeys(sessions.values()):
            session.close(0.0)
        if shared is not None:
            for device_id in sharing.device_ids:
                shared.on(device_id).close()
        raise
    return sessions


def _fill_tables(cache: EmbeddingCache, fill: Callable[[EmbeddingCache, int, float], None], fraction: float) -> None:
    for index in range(len(cache.tables)):
        fill(cache, index, fraction)


def _miss_paths(config: ModelConfig, cache: EmbeddingCache, chain: DatabaseChain) -> MissPaths:
    """Choose the miss path of each table for an empty cache: reading the hash map in place, or not."""
    if not config.gpucache:  # otherwise a table would be pinned for a device that caches none of it
        return MissPaths(stream_order_refusals=dict.fromkeys(range(len(cache.tables)), "gpucache is false"))
    try:
        untimed = config.embedding_cache_type in RESIDENT
        index = config.index_on_device and not is_static(config)
        paths = choose_paths(cache, chain, config.miss_path, untimed=untimed, index=index)
    except BaseException:
        cache.close()
        raise
    for table, chosen in zip(cache.tables, paths.paths, strict=True):
        for path in ("link", "copy"):
            chain.metrics.miss_path.labels(table.model_name, table.table_name, path).set(path == chosen)
    return paths


class _FileWarmUp:
    """Warms caches from the model files just loaded. *One thread.*"""

    def __init__(self, tables: Sequence[TableSpec], reports: Sequence[LoadReport], chain: DatabaseChain) -> None:
        self._tables, self._reports, self._chain = tables, reports, chain
        self._stale = [report.differs or report.model.is_open_for_writing() for report in reports]
        self._checked = [False] * len(reports)  # for repeated keys: once, since all caches have the same capacity

    def fill(self, cache: EmbeddingCache, index: int, fraction: float) -> None:
        table, model = self._tables[index], self._reports[index].model
        warmed = warm_up(cache, index, table, model, fraction)
        if not self._checked[index]:
            self._checked[index] = True
            self._stale[index] = self._stale[index] or _has_repeated_keys(table, model, warmed, self._chain)
        if self._stale[index] and self._chain.databases:
            refresh(cache, index, table, self._chain, fraction)


def _warm_from_database(chain: DatabaseChain, cache: EmbeddingCache, index: int, fraction: float) -> None:
    """Warm a table of a cache from a database with every row: the authoritative one, or its copy in a hash map."""
    if chain.databases:
        table = cache.tables[index]
        is_static_cache = isinstance(cache, StaticTables) and cache.static
        database = chain.databases[0 if is_static_cache and not chain.failed_above else -1]
        warm_up(cache, index, table, DatabaseRows(database, table), fraction)


def _has_repeated_keys(table: TableSpec, model: WarmUpSource, rows: int, chain: DatabaseChain) -> bool:
    """Return True if later rows repeat keys that a cache was warmed with; the last occurrence is the valid one."""
    repeats = find_repeats(model, rows) if isinstance(model, SparseModel) else None
    if repeats and not chain.databases:
        raise repeats.refusal(f"warming up {table.tag} from {model.place}", "the cache", rows)
    return repeats is not None


def _check_room(
    config: ModelConfig,
    tables: Sequence[TableSpec],
    loads: Sequence[TableLoad],
    targets: LoadTargets,
    chain: DatabaseChain,
    cache_class: type[EmbeddingCache] | None,
) -> None:
    """Check, before loading, that a version fits."""
    rows = [load.rows for load in loads]
    for database in targets.load:
        share = 1.0 if database.persistent else targets.initial_cache_rate
        needs = []
        for table, load in zip(tables, loads, strict=True):
            if not load.adopted_without_copy(database):
                stored = database.stored(table)
                needs.append((stored.tag, stored.width, math.ceil(share * load.rows)))
        database.check_room(needs)
    if cache_class:
        sharing, _reason = usable_sharing(config, cache_class, rows)
        capacities = cache_capacities(config, rows, sharing)
        indexes = index_sizes(config, rows, [type(database) for database in chain.databases])
        for device_id in config.deployed_device_list[: 1 if cache_class.device == "cpu" else None]:
            cache_class.check_room(tables, capacities, device_id, is_static(config), indexes, sharing)


def _resident(targets: LoadTargets, metrics: Metrics) -> tuple[DatabaseChain, LoadTargets]:
    """Build the chain of a static (or uvm) cache: a private hash map of every row, above the persistent database if any."""
    resident: Database = implementation("database", "hash_map")()
    load = tuple(database for database in targets.load if isinstance(database, PersistentDatabase))
    keep = tuple(database for database in targets.keep if isinstance(database, PersistentDatabase))
    chain = DatabaseChain(resident, next(iter(load + keep), None), metrics=metrics)
    return chain, replace(targets, load=(resident, *load), keep=keep, initial_cache_rate=1.0)
