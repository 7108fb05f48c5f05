"""One version of a model in service: its tables, caches and sessions."""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import wraps
from itertools import cycle
from typing import Any, Literal, TypeAlias, TypeVar, cast

import numpy as np

from hps.cache.base import EmbeddingCache, HostTableReads, leader_of
from hps.configuration.load import ModelConfig
from hps.engine.aging import RowAging
from hps.engine.chain import DatabaseChain
from hps.engine.misplaced import refuse_misplaced
from hps.engine.refresh import RefreshReport
from hps.engine.refresher import Refresher, RefreshSettings
from hps.engine.session import Session
from hps.errors import (
    DatabaseError,
    HPSError,
    InvalidInputError,
    ModelFileError,
    NotReadyError,
    ReadOnlyError,
    StaleCopyError,
    UnknownDeviceError,
    UnknownTableError,
)
from hps.ground.memory.heap import trim_heap
from hps.ground.rows import decode, encode
from hps.ground.threads.open_calls import OpenCalls
from hps.models.deltas import ResidentTable
from hps.models.files import joint_fingerprint
from hps.models.loading.warm_up import last_rows
from hps.scoring.deployed import DeploymentScores, OpenedNetwork
from hps.statistics.metrics import TIERS
from hps.stores.base import ExpiredRows, LogPosition, Partition, RowChanges
from hps.tensors.dlpack import cuda_device_of
from hps.tensors.transforms import Transform
from hps.types import BoolArray, FloatArray, KeyArray, TableSpec
from hps.versions.checks.report import CheckReport

_log = logging.getLogger(__name__)

_Call = TypeVar("_Call", bound=Callable[..., Any])
_NAME_OR_ID = (str, int, np.integer)

DRAIN_S = 10.0
"""Seconds that closing a deployment waits for its lookups. Later lookups continue and keep the tables."""


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
    """One version of a model in service. *Thread-safe.* Only `successors`, `stop_following` and `checks` change, in place.

    Attributes:
        tables: its tables, in the order of their ids.
        sessions: by device id; one for all on the CPU.
        chain: the host tiers that hold its tables.
        rows: row count of each table's files.
        fingerprints: fingerprint of each table's files.
        nonfinite_rows: rows of each table's files with an infinity or NaN; 0 if a database had them already.
        renew: builds sessions with the settings of an entry, and caches warmed from the databases.
        since: time it was put into service, in seconds since the epoch.
        modified: set by the first online write.
        log_starts: per table, the position of the last log message contained in its files, by partition; None if the table
            follows no log.
        log_positions: per table, its position in the log just before its caches were filled.
        written_at_us: time of the version's rows in microseconds since 1970; 0 if unknown.
        network: its network, which deployments that take over the same tables share.
        scores: scores of its samples; None without a network.
        transform: what it does to inputs of requests; None if they have keys.
        checks: the report of its checks; None if it was not checked.
        stop_following: called with a timeout when the deployment is closed: stop the feeds of its tables, and return whether
            they have stopped. Shared by all deployments that hold the tables in turn.
        indices: table indices, by name and by id, and of tuples of names that lookups used.
        dims: dimensions of the tables.
        changes: modifications and refreshes in progress.
        one_device: the first device if all devices share one session; else None.
        refresher: refreshes its caches, on demand and periodically.
        aging: removes rows that were not written for long; None if no table ages.
        successors: deployments that take over the same tables; writes reach their caches too.
        lookups_ended: set once it has closed and the last of its lookups has ended.
    """

    config: ModelConfig
    tables: tuple[TableSpec, ...]
    sessions: dict[int, Session]
    chain: DatabaseChain
    rows: tuple[int, ...] = ()
    fingerprints: tuple[str, ...] = ()
    nonfinite_rows: tuple[int, ...] = ()
    renew: Callable[[ModelConfig, Sequence[TableSpec]], dict[int, Session]] = field(
        default=lambda config, tables: {}, repr=False
    )
    since: float = field(default_factory=time.time)
    modified: threading.Event = field(default_factory=threading.Event, repr=False)
    log_starts: tuple[Mapping[str, str] | None, ...] = ()
    log_positions: tuple[dict[Partition, LogPosition], ...] = ()
    written_at_us: int = 0
    network: OpenedNetwork | None = field(default=None, repr=False)
    scores: DeploymentScores | None = field(init=False, repr=False)
    transform: Transform | None = field(init=False, repr=False)
    checks: CheckReport | None = field(default=None, repr=False)
    stop_following: list[Callable[[float], bool]] = field(default_factory=list, repr=False)
    indices: dict[Any, Any] = field(init=False, repr=False)
    dims: tuple[int, ...] = field(init=False, repr=False)
    changes: OpenCalls = field(init=False, repr=False)
    one_device: int | None = field(init=False, repr=False)
    _turns: Iterator[Sequence[int]] = field(init=False, repr=False)
    refresher: Refresher = field(init=False, repr=False)
    aging: RowAging | None = field(init=False, repr=False)
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
        # `min` takes the first of equally busy devices: rotating their order spreads lookups over idle devices.
        self._turns = cycle([devices[start:] + devices[:start] for start in range(len(devices))])
        settings = RefreshSettings(
            self.config.refresh_interval,
            self.config.refresh_delay,
            self.config.refresh_jitter,
            self.config.refresh_device_share,
            self.config.cache_refresh_percentage_per_iteration,
        )
        self.aging = None
        if any(self.config.row_ttl_s):
            written_at_us = self.written_at_us if self.config.row_ttl_files else 0
            self.aging = RowAging(self.tables, self.config.row_ttl_s, self.chain, self, written_at_us=written_at_us)
        self.refresher = Refresher(self.tables, self.caches, self.chain, settings, self.changes, self.chain.metrics)
        self.scores = None
        transform = self.config.transform
        self.transform = None if transform is None else Transform(transform, self.config.model, trusted=True)
        if self.network is not None and self.config.dense is not None:
            counters = self.chain.metrics.scores(self.config.model)
            try:
                self.scores = DeploymentScores(
                    self.network, self.config, self.config.dense, self.tables, self.sessions, counters
                )
            except BaseException:  # no caller has the sessions yet, so they are closed here
                self.refresher.stop()
                for session in dict.fromkeys(self.sessions.values()):
                    session.close(0.0)
                raise

    @property
    def version(self) -> str:
        return self.config.version

    @property
    def fingerprint(self) -> str:
        network = "" if self.network is None else self.network.fingerprint
        return joint_fingerprint((*self.fingerprints, network))

    @property
    def held(self) -> bool:
        """Whether its checks keep it from serving: it answers only those who name it."""
        return self.checks is not None and self.checks.verdict == "held"

    @property
    def stale_copies(self) -> tuple[str, ...]:
        """Tables that accept no online writes, since the network has a copy of them."""
        dense = self.config.dense
        return () if dense is None or dense.allow_stale_copy else tuple(dense.stale_copies)

    def resident_tables(self) -> list[ResidentTable]:
        """Location of each table, for a version that modifies it."""
        in_process = [database for database in self.chain.databases if database.in_process][-1:]
        return [
            ResidentTable(
                table,
                in_process[0] if in_process and in_process[0].size(in_process[0].stored(table).tag) == rows else None,
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
        """The embedding caches, each once; the leader of devices that share rows."""
        return list(dict.fromkeys(map(leader_of, self.device_caches)))

    @property
    def device_caches(self) -> list[EmbeddingCache]:
        """The embedding caches of all devices, each once."""
        return list(dict.fromkeys(session.cache for session in self.sessions.values() if session.cache is not None))

    @property
    def refuses(self) -> str:
        """Why all lookups on a device fail; empty if they do not."""
        return next(filter(None, (session.refuses for session in self.sessions.values())), "")

    @property
    def keys_per_sample(self) -> int:
        """Maximum number of keys per sample, over all tables together."""
        return sum(self.config.maxnum_catfeature_query_per_table_per_sample)

    def choose_device(self, *tensors: Any) -> int:
        """Choose a device for a lookup that names none: the tensors' device, else the least busy one that is not lost.

        Only call it if `one_device` is None.

        Args:
            tensors: keys and outputs, or mappings of them.
        """
        for tensor in tensors:
            for candidate in tensor.values() if isinstance(tensor, Mapping) else (tensor,):
                if (device := cuda_device_of(candidate)) in self.sessions:
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
        # The body of `device`, repeated: this runs for every lookup, which pays for each call.
        if device_id is None:
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
        index: int | None = self.indices.get(table) if isinstance(table, _NAME_OR_ID) else None
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

        refuse_misplaced(f"inserting into {table.tag}", table, keys)
        rows = encode(f"inserting into {table.tag}", vectors, table.row_dtype, keys)
        distinct, latest = last_rows(keys, rows)  # before any write: an error here changes nothing

        # Called after the databases were written, before fills of upper tiers continue. If the write failed, each key has its
        # old or new row there: the caches drop the keys, so that lookups read what the databases have.
        def apply(written: bool) -> None:
            for cache in self._all_caches():
                with cache.unless_lost():
                    if written:
                        cache.write(index, distinct, latest)
                    else:
                        cache.drop(index, distinct)

        with self.changes:
            self.modified.set()
            self.chain.insert(table, keys, rows, apply, self._changing(index, keys), vectors)

    def delete(self, index: int, keys: KeyArray) -> None:
        """Remove keys of a table from every tier; see `HPS.delete`."""
        self._check_writable(f"deleting from {self.tables[index].tag}", self.tables[index])
        refuse_misplaced(f"deleting from {self.tables[index].tag}", self.tables[index], keys)

        def apply(written: bool) -> None:
            for cache in self._all_caches():
                with cache.unless_lost():
                    if written:
                        cache.erase(index, keys)
                    else:
                        cache.drop(index, keys)

        with self.changes:
            self.modified.set()
            self.chain.delete(self.tables[index], keys, apply, self._changing(index, keys))

    def follow_log(self, index: int) -> dict[Partition, LogPosition]:
        """Return the log position a table starts from, by partition; see `OrderedWrites.follow_log`."""
        return self.log_positions[index]

    def apply(self, index: int, changes: RowChanges, positions: Mapping[Partition, LogPosition]) -> int:
        """Apply changes of a log to every tier; see `OrderedWrites.apply`. Lookups that start after it returns see the changes.

        Args:
            changes: with float32 vectors that fit the table's format; those of deletions are finite. Rows of other shares of
                the table are skipped.

        Returns:
            Number of changes not older than the stored rows, and of skipped ones.

        Raises:
            DatabaseError: the authoritative database failed; retry with the same changes.
            NotReadyError: the deployment is closed.
        """
        table = self.tables[index]
        shared, skipped = self.chain.databases[-1].shared, 0
        if table.share is not None:
            owned = table.share.owns(changes.keys)
            skipped = owned.size - int(np.count_nonzero(owned))
            self.chain.metrics.update_skipped_rows.labels(table.model_name, table.table_name).inc(skipped)
            changes = changes.at(owned)
        if table.row_dtype != "float32":
            rows = encode(f"updating {table.tag}", changes.vectors, table.row_dtype, changes.keys)
            changes = replace(changes, vectors=rows, exact=changes.vectors)
        if self.aging is not None:
            changes = self.aging.admit(index, changes)

        def update_caches(latest: BoolArray | None) -> None:
            if latest is None:
                keys, vectors, deleted, stale = changes.keys[:0], changes.vectors[:0], changes.keys[:0], changes.keys
            else:
                keys, vectors, deleted = changes.at(latest).split()
                # With a shared database, another process already wrote these rows: our caches lack them.
                stale = changes.keys[~latest] if shared else changes.keys[:0]
            for cache in self._all_caches():
                with cache.unless_lost():
                    if keys.size:
                        cache.write(index, keys, vectors)
                    if deleted.size:
                        cache.erase(index, deleted)
                    if stale.size:
                        cache.drop(index, stale)

        with self.changes:
            self.modified.set()
            changing = self._changing(index, changes)
            latest = self.chain.apply(table, changes, positions, update_caches, changing)
            return int(np.count_nonzero(latest)) + skipped

    def row(self, index: int, key: int) -> StoredRow:
        """Return one row of a table and its tier; see `HPS.row`."""
        table = self.tables[index]
        keys, out, row = np.array([key], np.int64), np.empty((1, table.dim), np.float32), np.empty((1, table.width), np.float32)
        with self.changes:
            if any(session.resident(index, keys, out)[0] for session in dict.fromkeys(self.sessions.values())):
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

    def start_aging(self) -> None:
        """Remove rows that have expired from now on, and those that already have before returning. Called before it serves.

        Raises:
            DatabaseError: the authoritative database failed, cannot keep the times of rows, or is read-only.
            ModelFileError: as `check_written_at`.
        """
        if self.aging is not None:
            check_written_at(self.config, self.written_at_us)
            self.aging.start()
            for session in dict.fromkeys(self.sessions.values()):
                session.aging = self.aging

    def expire(self, index: int, keys: KeyArray, sequence: int, *, loaded: bool = False) -> ExpiredRows:
        """Remove rows of a table from every tier whose last change has at most this sequence; see `AgingRows.expire`."""

        def update_caches(gone: KeyArray, known: bool) -> None:
            for cache in self._all_caches():
                with cache.unless_lost():
                    if known:
                        cache.erase(index, gone)
                    else:
                        cache.drop(index, gone)

        with self.changes:
            self.modified.set()
            return self.chain.expire(self.tables[index], keys, sequence, update_caches, self._changing(index), loaded=loaded)

    def hide(self, index: int, owner: object, keys: KeyArray | None, fresh: KeyArray, sequence: int) -> bool:
        """Answer such rows as absent until they are removed; see `DatabaseChain.hide`."""
        caches = self._all_caches()

        def drop() -> None:
            for cache in caches:
                with cache.unless_lost():
                    cache.drop(index, cache.dump(index) if keys is None else fresh)

        in_place = any(isinstance(cache, HostTableReads) for cache in caches)
        with self.changes:
            changing = self._changing(index) if in_place else None
            return self.chain.hide(self.tables[index], owner, keys, fresh, sequence, drop, changing)

    @contextmanager
    def _changing(self, index: int, changed: RowChanges | KeyArray | None = None) -> Iterator[None]:
        """Span a modification: devices admit no rows that they read during it; aging deployments hear of these changes.

        Args:
            changed: changes of a log, or keys of a direct write; None if rows expire.
        """
        aging = [each.aging for each in (self, *self.successors) if each.aging is not None]
        with ExitStack() as stack:
            for cache in self._all_caches():
                if isinstance(cache, HostTableReads):
                    stack.enter_context(cache.changing(index))
            if isinstance(changed, RowChanges):
                for each in aging:
                    each.note(index, changed)
            began = time.time()  # not the monotonic clock: if this one is set meanwhile, that counts as long
            try:
                yield
            finally:
                if isinstance(changed, np.ndarray):
                    for each in aging:
                        each.note_written(index, changed, abs(time.time() - began))

    def _all_caches(self) -> list[EmbeddingCache]:
        return self.caches + [cache for successor in self.successors for cache in successor.caches]

    def _check_writable(self, doing: str, table: TableSpec) -> None:
        """Reject a write that the network would contradict, or that would be lost with this deployment."""
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
            tables: `keep` leaves the tables in place, `release` frees them in this process, `drop` removes them from every
                database, `hand over` leaves them to the successor.

        Returns:
            False if lookups still run after `DRAIN_S`: the data they read stays, and `close` may be called again.
        """
        if tables != "hand over":
            if not all(stop(DRAIN_S) for stop in self.stop_following):
                return False
            self.stop_following.clear()
        self.refresher.stop()
        if self.aging is not None:
            self.aging.stop()
        if self.scores is not None and not self.scores.close(DRAIN_S):
            return False
        ended = [session.close(DRAIN_S) for session in dict.fromkeys(self.sessions.values())]
        if all(ended):
            self.lookups_ended.set()
        if not (self.changes.close(DRAIN_S) and all(ended)):
            return False
        if self.aging is not None:
            self.aging.release()
        if tables in ("keep", "hand over"):
            return True
        if self.network is not None:
            self.network.close()
            trim_heap()  # the allocator would keep the memory of the network's files
        try:
            for table in self.tables:
                self.chain.release_table(table, everywhere=tables == "drop")
        except (DatabaseError, NotReadyError) as error:  # an unfinished promotion, or closed databases
            _log.warning("undeploying model %r: %s", self.config.model, error)
            return False
        return True

    def renewed(self, config: ModelConfig, written_at_us: int = 0) -> "Deployment":
        """Return a deployment of the same tables with new sessions; the databases warm its caches.

        Args:
            config: entry with the same tables and cache type.
            written_at_us: as for the attribute; 0 if that is still known.

        Raises:
            DatabaseError, DeviceError: a tier failed.
        """
        tables = tuple(replace(new, slot=old.slot) for new, old in zip(config.tables, self.tables, strict=True))
        positions = log_positions(self.chain, tables, self.log_starts)
        sessions = self.renew(config, tables)
        return replace(
            self,
            config=config,
            tables=tables,
            sessions=sessions,
            since=time.time(),
            log_positions=positions,
            written_at_us=written_at_us or self.written_at_us,
        )


def check_written_at(config: ModelConfig, written_at_us: int) -> None:
    """Check that the time of a version's rows is known if they age.

    Raises:
        ModelFileError: it is not.
    """
    if config.row_ttl_files and any(config.row_ttl_s) and not written_at_us:
        raise ModelFileError(
            f"deploying model {config.model!r}, version {config.version}: row_ttl_files is set, and no version.json says when "
            'its rows were written. Write the version with `hps.write_version`, add `"written_at_us": <microseconds since '
            "1970>` to its version.json, or set row_ttl_files to false"
        )


def log_positions(
    chain: DatabaseChain, tables: Sequence[TableSpec], starts: Sequence[Mapping[str, str] | None]
) -> tuple[dict[Partition, LogPosition], ...]:
    """Return each table's position in the log of updates, to be read before caches are filled from the tables.

    Later changes that other processes apply to a shared database reach the caches through this process's feed.
    """
    return tuple({} if start is None else chain.follow_log(table) for table, start in zip(tables, starts, strict=True))


def retry_after_takeover(call: _Call) -> _Call:
    """Retry a call that a retired version refused, as long as the serving versions have changed since it started.

    A call that the new version of a canary failed is answered by the serving one.

    Args:
        call: a function whose first argument is the parameter server. It looks up the serving version on
            each call, and has changed nothing if it raises NotReadyError.
    """

    @wraps(call)
    def retried(server: Any, *args: Any, **kwargs: Any) -> Any:
        while True:
            serving = server.live.serving
            try:
                return call(server, *args, **kwargs)
            except HPSError as error:
                rerouted = server.rerouted(error)
                if rerouted is None and not (isinstance(error, NotReadyError) and server.live.serving is not serving):
                    raise
            if rerouted is not None:
                with rerouted:
                    return retried(server, *args, **kwargs)

    return cast(_Call, retried)
