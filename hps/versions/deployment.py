"""One version of a model in service: its tables, caches and sessions."""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from inspect import iscoroutinefunction
from itertools import cycle
from typing import Any, Literal, TypeAlias, TypeVar, cast

import numpy as np

from hps.cache.base import ALONE, NEAR_SHARE, STATIC_LOAD, DeviceSharing, EmbeddingCache
from hps.configuration.load import Configuration, ModelConfig
from hps.configuration.tiers import PersistentDbConfig, VolatileDbConfig
from hps.engine.chain import DatabaseChain
from hps.engine.coalescing import FetchCoalescer
from hps.engine.miss_path import MissPaths, choose_paths
from hps.engine.refresh import RefreshReport, refresh
from hps.engine.refresher import Refresher, RefreshSettings
from hps.engine.session import CachedSession, DirectSession, Session, SessionSettings
from hps.errors import (
    CapacityError,
    DatabaseError,
    DeviceMemoryError,
    InvalidInputError,
    NotReadyError,
    ReadOnlyError,
    StaleCopyError,
    UnknownDeviceError,
    UnknownTableError,
)
from hps.ground.kernels.numba_kernels import compile_kernels
from hps.ground.key_sets import places_kernels, set_kernels
from hps.ground.memory.heap import trim_heap
from hps.ground.progress import Progress
from hps.ground.registry import implementation
from hps.ground.rows import decode, encode, row_kernels
from hps.ground.threads.open_calls import OpenCalls
from hps.models.deltas import HeldTable
from hps.models.files import SparseModel, joint_fingerprint
from hps.models.loading.repeats import find_repeats
from hps.models.loading.table_load import LoadReport, LoadTargets, TableLoad
from hps.models.loading.warm_up import DatabaseRows, WarmUpSource, last_rows, warm_up
from hps.models.sources import ModelSources
from hps.regions.board import FRONT_KERNELS, OWNER_KERNELS
from hps.scoring.deployed import DeploymentScores, OpenedNetwork
from hps.scoring.packing import gather
from hps.statistics.metrics import TIERS, Metrics
from hps.stores.away import AwayDatabase
from hps.stores.base import Database, LogPosition, Partition, PersistentDatabase, RowChanges
from hps.tensors.dlpack import cuda_device_of
from hps.tensors.pooling import counted_positions, pool_rows
from hps.types import BoolArray, FloatArray, KeyArray, TableSpec
from hps.versions.catalog import ModelVersion

_log = logging.getLogger(__name__)

_Call = TypeVar("_Call", bound=Callable[..., Any])

DRAIN_S = 10.0
"""Seconds that closing a deployment waits for its lookups. Later lookups continue and keep the tables."""


RESIDENT = ("static", "uvm")
"""Cache types above a private hash map that holds every row."""


Fate: TypeAlias = Literal["keep", "release", "drop", "hand over"]
"""Fate of a closed deployment's tables; see `Deployment.close`."""


@dataclass(frozen=True, eq=False)
class StoredRow:
    """The stored row of a key. *Immutable.*

    Attributes:
        vector: (dim,) float32; the default vector if no tier has the key.
        tier: first tier that has the key, as in `metrics.TIERS`; None if none has.
        written_at_us: time of the write or load, in microseconds since 1970; None if unknown.
        version: version of the model.
    """

    key: int
    vector: FloatArray
    tier: str | None
    written_at_us: int | None
    version: str


@dataclass(eq=False)
class Deployment:
    """One version of a model in service. *Thread-safe.* Only `successors` and `stop_following` change, in place.

    Attributes:
        tables: its tables, in the order of their ids.
        sessions: by device id. On the CPU all device ids share one session.
        chain: the host tiers that hold its tables.
        rows: row count of each table's files.
        fingerprints: fingerprint of each table's files.
        renew: builds sessions with the settings of an entry, and caches warmed from the databases.
        since: time it was put into service, in seconds since the epoch.
        modified: set by the first online write.
        log_starts: per table, the position of the last log message contained in its files, by partition; None if the table
            follows no log.
        log_positions: per table, its position in the log just before its caches were filled.
        network: its network, which deployments that take over the same tables share.
        scores: scores of its samples; None without a network.
        stop_following: called with a timeout when the deployment is closed: stop the feeds of its tables, and return whether
            they have stopped. Shared by all deployments that hold the tables in turn.
        indices: table indices, by name and by id, and of tuples of names that lookups used.
        dims: dimensions of the tables.
        changes: modifications and refreshes in progress.
        one_device: the first device if all devices share one session; else None.
        refresher: refreshes its caches, on demand and periodically.
        successors: deployments that take over the same tables; writes reach their caches too.
        lookups_ended: set once it has closed and the last of its lookups has ended.
    """

    config: ModelConfig
    tables: tuple[TableSpec, ...]
    sessions: dict[int, Session]
    chain: DatabaseChain
    rows: tuple[int, ...] = ()
    fingerprints: tuple[str, ...] = ()
    renew: Callable[[ModelConfig, Sequence[TableSpec]], dict[int, Session]] = field(
        default=lambda config, tables: {}, repr=False
    )
    since: float = field(default_factory=time.time)
    modified: threading.Event = field(default_factory=threading.Event, repr=False)
    log_starts: tuple[Mapping[str, str] | None, ...] = ()
    log_positions: tuple[dict[Partition, LogPosition], ...] = ()
    network: OpenedNetwork | None = field(default=None, repr=False)
    scores: DeploymentScores | None = field(init=False, repr=False)
    stop_following: list[Callable[[float], bool]] = field(default_factory=list, repr=False)
    indices: dict[Any, Any] = field(init=False, repr=False)
    dims: tuple[int, ...] = field(init=False, repr=False)
    changes: OpenCalls = field(init=False, repr=False)
    one_device: int | None = field(init=False, repr=False)
    _turns: Iterator[Sequence[int]] = field(init=False, repr=False)
    refresher: Refresher = field(init=False, repr=False)
    successors: list["Deployment"] = field(init=False, default_factory=list, repr=False)
    lookups_ended: threading.Event = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.changes = OpenCalls(f"the deployment of model {self.config.model!r}")
        self.lookups_ended = threading.Event()
        names = {spec.table_name: index for index, spec in enumerate(self.tables)}
        self.indices = {**names, **{index: index for index in names.values()}}
        self.dims = tuple(spec.dim for spec in self.tables)
        devices = self.devices
        shared = len(set(map(id, self.sessions.values()))) == 1
        self.one_device = devices[0] if shared else None
        turns = [devices[start:] + devices[:start] for start in range(len(devices))]  # among equals, the first
        self._turns = cycle(turns)
        settings = RefreshSettings(
            self.config.refresh_interval,
            self.config.refresh_delay,
            self.config.refresh_jitter,
            self.config.refresh_device_share,
            self.config.cache_refresh_percentage_per_iteration,
        )
        self.refresher = Refresher(self.tables, self.caches, self.chain, settings, self.changes, self.chain.metrics)
        self.scores = None
        if self.network is not None and self.config.dense is not None:
            counters = self.chain.metrics.scores(self.config.model)
            try:
                self.scores = DeploymentScores(
                    self.network, self.config, self.config.dense, self.tables, self.sessions, counters
                )
            except BaseException:  # its network fails: nobody else knows the sessions
                self.refresher.stop()
                for session in dict.fromkeys(self.sessions.values()):
                    session.close(0.0)
                raise

    @property
    def version(self) -> str:
        return self.config.version

    @property
    def fingerprint(self) -> str:
        own = "" if self.network is None else self.network.fingerprint
        return joint_fingerprint((*self.fingerprints, own))

    @property
    def stale_copies(self) -> tuple[str, ...]:
        """Tables that take no online writes, which would not reach the copy that the network has of them."""
        dense = self.config.dense
        return () if dense is None or dense.allow_stale_copy else tuple(dense.stale_copies)

    def held_tables(self) -> list[HeldTable]:
        """Location of each table, for a version that modifies it."""
        whole = [one for one in self.chain.databases if one.in_process][-1:]
        return [
            HeldTable(
                table,
                whole[0] if whole and whole[0].size(whole[0].stored(table).tag) == rows else None,
                fingerprint,
                lambda: not self.modified.is_set(),
            )
            for table, rows, fingerprint in zip(self.tables, self.rows, self.fingerprints, strict=True)
        ]

    @property
    def devices(self) -> tuple[int, ...]:
        return tuple(self.sessions)

    @property
    def caches(self) -> list[EmbeddingCache]:
        """The embedding caches, each once; of devices that share rows, the one that stands for them all."""
        return list(dict.fromkeys(cache.leader for cache in self.device_caches))

    @property
    def device_caches(self) -> list[EmbeddingCache]:
        """The embedding caches of all devices, each once."""
        return list(dict.fromkeys(session.cache for session in self.sessions.values() if session.cache is not None))

    @property
    def refuses(self) -> str:
        """Why lookups on a device fail, whatever they ask for; empty if all are answered."""
        return next(filter(None, (session.refuses for session in self.sessions.values())), "")

    @property
    def keys_per_sample(self) -> int:
        """Maximum number of keys per sample, over all tables together."""
        return sum(self.config.maxnum_catfeature_query_per_table_per_sample)

    def choose_device(self, *tensors: Any) -> int:
        """Choose a device for a lookup that names none: the tensors' device, else the one with the fewest keys in progress.

        Lost devices come last.

        Only call it if `one_device` is None.

        Args:
            tensors: keys and outputs, or mappings of them.
        """
        for tensor in tensors:
            for one in tensor.values() if isinstance(tensor, Mapping) else (tensor,):
                if (device := cuda_device_of(one)) in self.sessions:
                    return device
        sessions = self.sessions
        return min(next(self._turns), key=lambda device: (sessions[device].lost, sessions[device].busy))

    def device(self, device_id: int | None) -> int:
        """Return a device; for None, the one that `choose_device` chooses."""
        if device_id is None:
            device_id = self.one_device
            if device_id is None:
                device_id = self.choose_device()
        return device_id

    def session(self, device_id: int | None, *tensors: Any) -> Session:
        """Return the session of a device; for None, of the device that `choose_device` chooses.

        Raises:
            UnknownDeviceError: the model is not deployed there.
        """
        if device_id is None:  # as `device` says: a lookup pays for each call
            device_id = self.one_device
            if device_id is None:
                device_id = self.choose_device(*tensors)
        try:
            return self.sessions[device_id]
        except KeyError:
            raise UnknownDeviceError(
                f"looking up model {self.config.model!r}: got device {device_id!r}, expected one of its deployed_device_list "
                f"{list(self.sessions)}"
            ) from None

    def table_index(self, table: int | str) -> int:
        """Return the index of a table, given by id or name.

        Raises:
            UnknownTableError: the model has no such table.
        """
        index: int | None = self.indices.get(table) if isinstance(table, (str, int, np.integer)) else None
        if index is None or isinstance(table, bool):
            known = ", ".join(f"{index} ({spec.table_name})" for index, spec in enumerate(self.tables))
            raise UnknownTableError(f"looking up model {self.config.model!r}: got table {table!r}, expected one of {known}")
        return index

    def insert(self, index: int, keys: KeyArray, vectors: FloatArray) -> None:
        """Add or replace vectors of a table in every tier; see `HPS.insert`."""
        table = self.tables[index]
        self._check_writable(f"inserting into {table.tag}", table)
        if vectors.shape != (keys.size, table.dim):
            raise InvalidInputError(
                f"inserting into {table.tag}: got vectors of shape {vectors.shape}, expected {(keys.size, table.dim)}"
            )

        rows = encode(f"inserting into {table.tag}", vectors, table.row_dtype, keys)
        distinct, latest = last_rows(keys, rows)  # before any write: an error here changes nothing

        def apply(written: bool) -> None:
            for cache in self._all_caches():
                with cache.unless_lost():
                    if written:
                        cache.write(index, distinct, latest)
                    else:
                        cache.drop(index, distinct)

        with self.changes:
            self.modified.set()
            self.chain.insert(table, keys, rows, apply, self._changing(index), vectors)

    def delete(self, index: int, keys: KeyArray) -> None:
        """Remove keys of a table from every tier; see `HPS.delete`."""
        self._check_writable(f"deleting from {self.tables[index].tag}", self.tables[index])

        def apply(written: bool) -> None:
            for cache in self._all_caches():
                with cache.unless_lost():
                    if written:
                        cache.erase(index, keys)
                    else:
                        cache.drop(index, keys)

        with self.changes:
            self.modified.set()
            self.chain.delete(self.tables[index], keys, apply, self._changing(index))

    def follow_log(self, index: int) -> dict[Partition, LogPosition]:
        """Return the log position a table starts from, by partition; see `OrderedWrites.follow_log`."""
        return self.log_positions[index]

    def apply(self, index: int, changes: RowChanges, positions: Mapping[Partition, LogPosition]) -> int:
        """Apply changes of a log to every tier; see `OrderedWrites.apply`. Lookups that start after it returns see the changes.

        Args:
            changes: with float32 vectors, which the table's format can hold; those of deletions are finite.

        Returns:
            Number of changes not older than the stored rows.

        Raises:
            DatabaseError: the authoritative database failed; retry with the same changes.
            NotReadyError: the deployment is closed.
        """
        table = self.tables[index]
        shared = self.chain.databases[-1].shared
        if table.row_dtype != "float32":
            rows = encode(f"updating {table.tag}", changes.vectors, table.row_dtype, changes.keys)
            changes = replace(changes, vectors=rows, exact=changes.vectors)

        def tell(latest: BoolArray | None) -> None:
            if latest is None:
                keys, vectors, gone, stale = changes.keys[:0], changes.vectors[:0], changes.keys[:0], changes.keys
            else:
                keys, vectors, gone = changes.at(latest).split()
                # With a shared database, another process already wrote these rows: our caches lack them.
                stale = changes.keys[~latest] if shared else changes.keys[:0]
            for cache in self._all_caches():
                with cache.unless_lost():
                    if keys.size:
                        cache.write(index, keys, vectors)
                    if gone.size:
                        cache.erase(index, gone)
                    if stale.size:
                        cache.drop(index, stale)

        with self.changes:
            self.modified.set()
            latest = self.chain.apply(table, changes, positions, tell, self._changing(index))
            return int(np.count_nonzero(latest))

    def row(self, index: int, key: int) -> StoredRow:
        """Return one row of a table and its tier; see `HPS.row`."""
        table = self.tables[index]
        keys, out, row = np.array([key], np.int64), np.empty((1, table.dim), np.float32), np.empty((1, table.width), np.float32)
        with self.changes:
            if any(session.resident(index, keys, out) for session in dict.fromkeys(self.sessions.values())):
                tier: str | None = TIERS[0]
            else:
                tier = self.chain.locate(table, keys, row)
                if tier is not None:
                    decode(row, table.dim, table.row_dtype, out)
            written_at_us = self.chain.written_at(table, keys)
        if tier is None:
            out[:] = table.default_value
        return StoredRow(key, out[0], tier, written_at_us or None, self.version)

    def prefetch(self, index: int, keys: KeyArray, device_id: int | None) -> int:
        """Load keys of a table into the caches; see `HPS.prefetch`."""
        sessions = dict.fromkeys(self.sessions.values() if device_id is None else [self.session(device_id)])
        distinct = np.unique(keys)
        with self.changes:
            return max(session.prefetch(index, distinct) for session in sessions)

    def refresh(self, share: float | None = None) -> dict[str, RefreshReport]:
        """Reload the vectors of all resident keys; see `HPS.refresh`."""
        return self.refresher.refresh(share)

    @contextmanager
    def _changing(self, index: int) -> Iterator[None]:
        with ExitStack() as stack:
            for cache in self._all_caches():
                stack.enter_context(cache.changing(index))
            yield

    def _all_caches(self) -> list[EmbeddingCache]:
        return self.caches + [cache for successor in self.successors for cache in successor.caches]

    def _check_writable(self, doing: str, table: TableSpec) -> None:
        """Reject a write that the network would contradict, or that would be acknowledged and lost with this deployment."""
        if table.table_name in self.stale_copies:
            raise StaleCopyError(
                f"{doing}: the network of version {self.version} has a copy of {table.table_name!r}, which online writes do "
                "not reach, so that scores would mix old and new rows; deploy a new version, or set dense.allow_stale_copy"
            )
        if any(database.read_only for database in self.chain.databases):
            raise ReadOnlyError(f"{doing}: the persistent database is configured as read-only (persistent_db.read_only)")
        static = self.config.embedding_cache_type == "static"
        if not any(database.persistent or not static for database in self.chain.databases):
            raise InvalidInputError(
                f"{doing}: got no database that would keep it, expected {'a persistent_db' if static else 'one'}; configure "
                "it, or write new model files and deploy the model again"
            )

    def drain(self, timeout_s: float) -> bool:
        """Wait for queued insertions; return False on timeout."""
        return all(session.drain(timeout_s) for session in dict.fromkeys(self.sessions.values()))

    def close(self, tables: Fate = "release") -> bool:
        """Refuse new lookups, wait for running ones and free the caches.

        Args:
            tables: `keep` leaves its tables in place, `release` frees those in this process's memory, `drop` drops them from
                every database, `hand over` leaves them to the successor.

        Returns:
            False if lookups still run after `DRAIN_S`: the data they read stays, and `close` may be called again.
        """
        if tables != "hand over":
            if not all(stop(DRAIN_S) for stop in self.stop_following):
                return False
            self.stop_following.clear()
        self.refresher.stop()
        if self.scores is not None and not self.scores.close(DRAIN_S):
            return False
        ended = [session.close(DRAIN_S) for session in dict.fromkeys(self.sessions.values())]
        if all(ended):
            self.lookups_ended.set()
        if not (self.changes.close(DRAIN_S) and all(ended)):
            return False
        if tables in ("keep", "hand over"):
            return True
        if self.network is not None:
            self.network.close()
            trim_heap()  # of programs and of what was read to load them
        try:
            for table in self.tables:
                self.chain.release_table(table, everywhere=tables == "drop")
        except (DatabaseError, NotReadyError) as error:  # an unfinished promotion, or closed databases
            _log.warning("undeploying model %r: %s", self.config.model, error)
            return False
        return True

    def renewed(self, config: ModelConfig) -> "Deployment":
        """Return a deployment of the same tables with new sessions; the databases warm its caches.

        Args:
            config: entry with the same tables and cache type.

        Raises:
            DatabaseError, DeviceError: a tier failed.
        """
        tables = tuple(replace(new, slot=old.slot) for new, old in zip(config.tables, self.tables, strict=True))
        positions = _log_positions(self.chain, tables, self.log_starts)
        sessions = self.renew(config, tables)
        return replace(self, config=config, tables=tables, sessions=sessions, since=time.time(), log_positions=positions)


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


def deploy(
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
        version: version to load.
        tables: its tables, with the slots to use.
        targets: databases of the chain to load from the model files, and how.
        follows: says whether a table follows a log of updates.

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
    targets = replace(targets, max_nonfinite_rows=config.max_nonfinite_rows)
    loads = [TableLoad(table, source, targets, progress) for table, source in zip(tables, version.sources, strict=True)]
    rows = tuple(load.rows for load in loads)
    network = _open_network(version, targets.sources, cache_class)
    try:
        _check_room(config, tables, rows, targets, None if is_direct(config, cache_class) else cache_class)
    except BaseException:
        if network is not None:
            network.close()
        raise
    loaded = (*targets.load, *targets.keep)
    opens = not loaded or chain.volatile in loaded  # else it was away when this deployment began
    what = f"deploying model {config.model!r}, version {config.version}"
    _log.debug("%s: its %d tables of %d rows fit; loading them", what, len(tables), sum(rows))
    try:
        reports = []
        for table, load in zip(tables, loads, strict=True):
            load.make_way()
            chain.open_table(table, volatile=opens)
            reports.append(load.run())
        fingerprints = tuple(report.fingerprint for report in reports)
        starts = tuple(one.log_start if follows(table) else None for table, one in zip(tables, version.sources, strict=True))
        positions = _log_positions(chain, tables, starts)
        build = partial(_sessions, cache_class, chain, rows, all(report.complete for report in reports))
        _log.debug("%s: its tables are loaded; building and warming its caches", what)
        fill = partial(_fill, chain) if config.embedding_cache_type == "static" else _FromFiles(tables, reports, chain).fill
        sessions = build(config, tables, fill)
        _log.debug("%s: its caches are warm; it takes over", what)
        deployment = Deployment(
            config,
            tables,
            sessions,
            chain,
            rows,
            fingerprints,
            build,
            log_starts=starts,
            log_positions=positions,
            network=network,
        )
        _tell_complete(deployment)
        return deployment
    except BaseException:
        if network is not None:
            network.close()
        for table in tables:  # loaded tables of a model that does not serve
            with suppress(DatabaseError):
                chain.release_table(table)
        raise


def _open_network(version: ModelVersion, sources: ModelSources, cache_class: type[EmbeddingCache]) -> OpenedNetwork | None:
    """Open the network of a version, before its tables take memory.

    Raises:
        CapacityError: it does not fit on a device.
        HPSError: it is not what the configuration says; see `OpenedNetwork`.
    """
    if version.network is None:
        return None
    config = version.config
    devices = () if cache_class.device == "cpu" else config.deployed_device_list
    fingerprint = version.network.fingerprint(sources)  # of the content or an older one, so that polling finds a newer one
    contents = version.network.read(sources)
    try:
        return OpenedNetwork(config, version.network.config, contents, fingerprint, devices)
    except DeviceMemoryError as error:
        raise CapacityError(f"deploying model {config.model!r}: {error}") from error


def reconfigure(there: Deployment, config: ModelConfig) -> Deployment:
    """Build caches and sessions with other settings over the tables of a version in service; nothing is loaded.

    Both deployments answer lookups, and writes through the one in service reach the caches of both. After the takeover, close
    the old one with `hand over`.

    Args:
        there: a version whose tables are in a database.
        config: entry with the same tables and cache type.

    Raises:
        DatabaseError, DeviceError: a tier failed.
    """
    successor = there.renewed(config)
    there.successors.append(successor)
    try:
        for cache in successor.caches:
            for index, table in enumerate(successor.tables):  # writes that missed the caches while they were warmed
                successor.chain.settle(table)  # writes that began before these caches were registered, and did not reach them
                refresh(cache, index, table, successor.chain, config.cache_refresh_percentage_per_iteration)
        _tell_complete(successor)
    except BaseException:
        there.successors.remove(successor)
        successor.close("hand over")
        raise
    return successor


def _tell_complete(deployment: Deployment) -> None:
    """Tell static caches that hold every row that they do.

    A cache holds no key that the authoritative database lacks, and the hash map above holds the rows of that one unless a write
    to it has failed. So equal numbers are equal sets.
    """
    chain, tables = deployment.chain, deployment.tables
    if not any(cache.static for cache in deployment.caches):
        return
    with chain.settled(tables):
        if chain.failed_above:
            return
        rows = [chain.databases[0].size(chain.databases[0].stored(table).tag) for table in tables]
        for cache in deployment.caches:
            resident = [cache.stats(index).resident_rows for index in range(len(tables))]
            if cache.static and resident == rows:
                cache.tell_complete(True)
            elif cache.static:
                _log.info(
                    "model %r: %d of its %d rows are not resident on device %d; lookups read them from host memory",
                    deployment.config.model,
                    sum(rows) - sum(resident),
                    sum(rows),
                    cache.device_id,
                )


def _log_positions(
    chain: DatabaseChain, tables: Sequence[TableSpec], starts: Sequence[Mapping[str, str] | None]
) -> tuple[dict[Partition, LogPosition], ...]:
    """Return each table's position in the log of updates, to be read before caches are filled from the tables.

    Later changes that other processes apply to a shared database reach the caches through this process's feed.
    """
    return tuple({} if start is None else chain.follow_log(table) for table, start in zip(tables, starts, strict=True))


def is_direct(config: ModelConfig, cache_class: type[EmbeddingCache]) -> bool:
    """Whether the databases answer without a cache: on the CPU, where they are as fast."""
    return cache_class.device == "cpu" and (config.embedding_cache_type in RESIDENT or not config.gpucache)


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
    fill = fill or partial(_fill, chain)
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
    shared: EmbeddingCache | None = None
    try:
        for device_id in config.deployed_device_list:
            if cache_class.device == "cpu" and sessions:
                sessions[device_id] = next(iter(sessions.values()))
                continue
            if shared is None:
                cache = cache_class.create(tables, capacities, device_id, is_static(config), sharing)
                shared = cache if sharing.device_ids else None
            else:
                cache = shared.on(device_id)
            paths = _miss_paths(config, cache, chain)
            own = replace(settings, stream_order_refusals=paths.stream_order_refusals, miss_paths=tuple(paths.paths))
            sessions[device_id] = CachedSession(tables, cache, chain, coalescer, own, chain.metrics)
            if not sharing.device_ids:
                _fill_all(cache, fill, fraction)
        if shared is not None:  # only now: miss paths are chosen for an empty cache
            _fill_all(shared.leader, fill, fraction)
    except BaseException:
        for session in dict.fromkeys(sessions.values()):
            session.close(0.0)
        if shared is not None:
            for device_id in sharing.device_ids:
                shared.on(device_id).close()
        raise
    return sessions


def _fill_all(cache: EmbeddingCache, fill: Callable[[EmbeddingCache, int, float], None], fraction: float) -> None:
    for index in range(len(cache.tables)):
        fill(cache, index, fraction)


def usable_sharing(
    config: ModelConfig, cache_class: type[EmbeddingCache], rows: Sequence[int]
) -> tuple[DeviceSharing, str | None]:
    """Return how the devices of a model share its rows here, and why they do not share them as configured; None if they do."""
    sharing = device_sharing(config, rows) if cache_class.device != "cpu" else ALONE
    if sharing.device_ids and (reason := cache_class.reason_against_sharing(sharing.device_ids)):
        return ALONE, reason
    return sharing, None


def _miss_paths(config: ModelConfig, cache: EmbeddingCache, chain: DatabaseChain) -> MissPaths:
    """Choose the miss path of each table for an empty cache: reading the hash map in place, or not."""
    if not config.gpucache:  # else a table would be pinned for a device that caches none of it
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


class _FromFiles:
    """Warms caches from the model files just loaded. *One thread.*"""

    def __init__(self, tables: Sequence[TableSpec], reports: Sequence[LoadReport], chain: DatabaseChain) -> None:
        self._tables, self._reports, self._chain = tables, reports, chain
        self._stale = [report.differs or report.model.may_change_unseen() for report in reports]
        self._looked = [False] * len(reports)  # checked for repeated keys; once, as all caches hold equally many rows

    def fill(self, cache: EmbeddingCache, index: int, fraction: float) -> None:
        table, model = self._tables[index], self._reports[index].model
        warmed = warm_up(cache, index, table, model, fraction)
        if not self._looked[index]:
            self._looked[index] = True
            self._stale[index] = self._stale[index] or _warmed_in_part(table, model, warmed, self._chain)
        if self._stale[index] and self._chain.databases:
            refresh(cache, index, table, self._chain, fraction)


def _fill(chain: DatabaseChain, cache: EmbeddingCache, index: int, fraction: float) -> None:
    """Warm a table of a cache from a database that holds every row: the authoritative one, or a hash map like it."""
    if chain.databases:
        table = cache.tables[index]
        database = chain.databases[0 if cache.static and not chain.failed_above else -1]
        warm_up(cache, index, table, DatabaseRows(database, table), fraction)


def _warmed_in_part(table: TableSpec, model: WarmUpSource, rows: int, chain: DatabaseChain) -> bool:
    """Whether later rows repeat keys that a cache was warmed with; the last occurrence is the valid one.

    Raises:
        ModelFileError: they do, and no database has the later rows.
    """
    repeats = find_repeats(model, rows) if isinstance(model, SparseModel) else None
    if repeats and not chain.databases:
        raise repeats.refusal(f"warming up {table.tag} from {model.place}", "the cache", rows)
    return repeats is not None


def is_static(config: ModelConfig) -> bool:
    """Whether the caches of a model are to hold every row."""
    return config.embedding_cache_type == "static" and config.gpucache


def not_shared(config: ModelConfig, reason: str) -> str:
    """Say that the devices of a model do not share its rows."""
    return f"device_sharing {config.device_sharing} is impossible here: {reason}; every device caches by itself (replicate)"


def device_sharing(config: ModelConfig, rows: Sequence[int]) -> DeviceSharing:
    """Return how the devices of a model are to share its rows."""
    if config.reason_against_sharing:
        return ALONE
    near = tuple(int(NEAR_SHARE * config.gpucacheper * count) for count in rows) if config.device_sharing == "hot" else ()
    return DeviceSharing(tuple(config.deployed_device_list), near)


def cache_capacities(config: ModelConfig, rows: Sequence[int], sharing: DeviceSharing = ALONE) -> list[int]:
    """Return the rows that a cache has room for, by table: of one device, or of all that share them, without near rows.

    Each device gives as many as it would cache by itself, and a shared cache needs room for every row once.
    """
    if not config.gpucache:
        return [0] * len(rows)
    if config.embedding_cache_type == "static":
        return [math.ceil(count / STATIC_LOAD) for count in rows]
    own = [math.ceil(config.gpucacheper * count) for count in rows]
    if not sharing.device_ids:
        return own
    near = sharing.near_rows or (0,) * len(rows)
    devices = len(sharing.device_ids)
    return [min(count, devices * (one - beside)) for count, one, beside in zip(rows, own, near, strict=True)]


def index_sizes(config: ModelConfig, rows: Sequence[int]) -> list[int]:
    """Return the bytes of the indexes that a device keeps of the tables that it reads in host memory; empty without."""
    if not (config.index_on_device and config.gpucache and config.miss_path != "copy") or is_static(config):
        return []
    return [implementation("database", "hash_map").index_bytes(count) for count in rows]


def _check_room(
    config: ModelConfig,
    tables: Sequence[TableSpec],
    rows: Sequence[int],
    targets: LoadTargets,
    cache_class: type[EmbeddingCache] | None,
) -> None:
    """Check, before loading, that a version fits.

    Raises:
        CapacityError: it does not.
    """
    for database in targets.load:
        share = 1.0 if database.persistent else targets.initial_cache_rate
        stored = map(database.stored, tables)
        database.check_room([(one.tag, one.width, math.ceil(share * count)) for one, count in zip(stored, rows, strict=True)])
    if cache_class:
        sharing, _reason = usable_sharing(config, cache_class, rows)
        capacities = cache_capacities(config, rows, sharing)
        for device_id in config.deployed_device_list[: 1 if cache_class.device == "cpu" else None]:
            cache_class.check_room(tables, capacities, device_id, is_static(config), index_sizes(config, rows), sharing)


def _resident(targets: LoadTargets, metrics: Metrics) -> tuple[DatabaseChain, LoadTargets]:
    """Build the chain of a static (or uvm) cache: a private hash map of every row, above the persistent database if any."""
    resident: Database = implementation("database", "hash_map")()
    load = tuple(database for database in targets.load if isinstance(database, PersistentDatabase))
    keep = tuple(database for database in targets.keep if isinstance(database, PersistentDatabase))
    chain = DatabaseChain(resident, next(iter(load + keep), None), metrics=metrics)
    return chain, replace(targets, load=(resident, *load), keep=keep, initial_cache_rate=1.0)


def open_databases(configuration: Configuration, metrics: Metrics) -> tuple[DatabaseChain, Callable[[], LoadTargets]]:
    """Open the persistent and the volatile database. A volatile one that is not the only holder of a row may be away.

    Returns:
        The two as a chain, which owns them, and what returns the databases to load, without one that is away.

    Raises:
        DatabaseError: one of them cannot be opened; none is left open.
    """
    above, below = configuration.volatile_db, configuration.persistent_db
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
        load = tuple(one for one in chain.databases if loads[one is persistent])
        keep = tuple(one for one in chain.databases if not loads[one is persistent])
        return LoadTargets(load, keep, above.initial_cache_rate, not configuration.supportlonglong, sources)

    return chain, targets


def _open_volatile(configuration: Configuration) -> tuple[Database, str]:
    """Open the volatile database; if it cannot be opened and others hold every row, return a stand-in and why it is away."""
    config, models = configuration.volatile_db, configuration.models
    try:
        return open_database(config), ""
    except DatabaseError as error:
        resident = bool(models) and all(model.embedding_cache_type in RESIDENT for model in models)
        if configuration.persistent_db.type == "disabled" and not resident:
            raise
        _log.error("starting without the volatile database, which other tiers do without: %s", error)
        return AwayDatabase(config.type, config.row_dtype, str(error)), str(error)


def kernels_of(configuration: Configuration, cache_class: type[EmbeddingCache]) -> list[Callable[..., Any]]:
    """Return the numba kernels of loads, lookups of rows and bags, and changes of rows.

    Those of rarer calls are compiled by the first one, and those of rows in formats that only a repository names when a model
    of it is deployed.
    """
    found = [*set_kernels(), counted_positions, pool_rows]  # of loads, and of bags without a cache
    for section in (configuration.volatile_db, configuration.persistent_db):
        if section.type != "disabled":
            found += implementation("database", section.type).kernels(section)
    if configuration.model_repository or not all(is_direct(model, cache_class) for model in configuration.models):
        found += [*cache_class.kernels(), *places_kernels()]
    found += row_kernels(table.row_dtype for model in configuration.models for table in model.tables)
    return list(dict.fromkeys(found))


def served_kernels(configuration: Configuration, cache_class: type[EmbeddingCache]) -> list[Callable[..., Any]]:
    """Return the numba kernels of all that clients of a service may ask for: `kernels_of`, and those of fronts and owner."""
    found = [*kernels_of(configuration, cache_class), *cache_class.batch_kernels(), *FRONT_KERNELS, *OWNER_KERNELS, gather]
    return list(dict.fromkeys(found))


def open_database(config: VolatileDbConfig | PersistentDbConfig) -> Database:
    """Open the database that a section of the configuration describes.

    Raises:
        DatabaseError: it cannot be opened.
    """
    database: Database = implementation("database", config.type).from_config(config)
    database.row_dtype = config.row_dtype
    return database


def repeated_after_takeover(call: _Call) -> _Call:
    """Retry a call that a retired version refused, as long as the serving versions have changed since it began.

    Args:
        call: a function or coroutine function whose first argument is the parameter server. It looks up the serving version on
            each call, and has changed nothing if it raises NotReadyError.
    """

    @wraps(call)
    def repeated(server: Any, *args: Any, **kwargs: Any) -> Any:
        while True:
            serving = server.live.serving
            try:
                return call(server, *args, **kwargs)
            except NotReadyError:
                if server.live.serving is serving:
                    raise

    @wraps(call)
    async def repeated_coroutine(server: Any, *args: Any, **kwargs: Any) -> Any:
        while True:
            serving = server.live.serving
            try:
                return await call(server, *args, **kwargs)
            except NotReadyError:
                if server.live.serving is serving:
                    raise

    return cast(_Call, repeated_coroutine if iscoroutinefunction(call) else repeated)
