"""The public interface: models by name and version, and lookups of their tables."""

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from time import perf_counter_ns
from types import TracebackType
from typing import Any, Literal, Self, overload

import numpy as np

from hps.configuration.hugectr_structs import ParameterServerConfig
from hps.configuration.load import Configuration, ModelConfig, load_configuration
from hps.engine.refresh import RefreshReport
from hps.engine.session import DirectSession, RecordedLookup, Session
from hps.errors import HPSError, InvalidInputError, UnknownModelError
from hps.ground.kernels.numba_kernels import compile_kernels
from hps.ground.progress import Progress
from hps.ground.threads.lifetimes import close_at_exit, disown_in_children, refusal
from hps.ground.threads.thread_pool import POOL
from hps.models.loading.table_load import LoadTargets
from hps.scoring.deployed import network_of_model
from hps.scoring.features import arrays_of
from hps.statistics.key_traces import KeyRecorder
from hps.statistics.metrics import Metrics
from hps.statistics.snapshot import ServerStatistics, UpdateStatus
from hps.stores.base import AdoptsRowFiles, SharedRowFile
from hps.tensors.array_checks import as_host_keys, as_host_vectors
from hps.tensors.bags import Bags
from hps.tensors.batch import Batch, concatenated_batch, named_batch, pooled_batch, refuse_repeated_tables, table_batch
from hps.types import BoolArray, FloatArray, Scores
from hps.versions.canary.in_process import RoutedCalls, sent_by
from hps.versions.canary.plan import RolloutMode
from hps.versions.canary.records import ROLLOUTS, RolloutRecords
from hps.versions.canary.rollouts import Rollouts, RolloutStatus
from hps.versions.catalog import ModelCatalog
from hps.versions.checks.documents import CHECKS_DIRECTORY, CheckDocuments
from hps.versions.checks.report import CheckReport
from hps.versions.collection import StatisticsCollector
from hps.versions.deployment import Deployment, StoredRow, retry_after_takeover
from hps.versions.desired import DesiredVersion
from hps.versions.fixed_lookups import CapturedLookup, PreparedLookup
from hps.versions.fleet import FLEET, Fleet, FleetChange, FleetStatus, ServingDocument
from hps.versions.index import IndexEntry, version_index
from hps.versions.integrity import Checkable, check_tiers
from hps.versions.kept_files import kept_files
from hps.versions.live_models import LiveModels, VersionInfo, version_info
from hps.versions.live_updates import LiveUpdates
from hps.versions.pins import PINS, Pins
from hps.versions.reconciler import Reconciler
from hps.versions.tiers import choose_cache, kernels_of, open_database, open_databases
from hps.versions.volatile_tier import VolatileTier, reload_table

_log = logging.getLogger(__name__)
_EXIT_WAIT_S = 5.0  # limit for a load still running at interpreter exit


class HPS:
    """A hierarchical parameter server: loads the configured models and looks up keys of their tables. *Thread-safe.*

    A context manager; `close` frees caches and closes databases. Open servers are closed at interpreter exit.
    All its errors are `hps.HPSError`s.

    In a forked child every call raises `ForkedProcessError`, and `close` does nothing. Exception: if it uses only Redis (no
    other database, no embedding cache), the child opens its own connections.

    Attributes:
        path: absolute path of the `ps.json` or repository that it was opened from; empty for other configurations.
        closed: whether it is closed, or belongs to the parent process.
        cache_class: the class of embedding cache chosen by `device`.

    Args:
        config: path of a `ps.json`, its content as a dict, a `ParameterServerConfig`, or a `Configuration`.
        ps_config, hps_json_config_file: HugeCTR's names of the same.
        force: load the models' files even if a database already holds them; its online updates are lost.
        deploy_models: deploy the configured models; if False, call `deploy` for each.

    Raises:
        ConfigError: the configuration is invalid; the message is the full report.
        ModelFileError: sparse model files are missing or invalid.
        DatabaseError, DeviceError, MissingDependencyError: a tier cannot be opened.
    """

    def __init__(
        self,
        config: str | os.PathLike[str] | Mapping[str, Any] | ParameterServerConfig | Configuration | None = None,
        *,
        ps_config: ParameterServerConfig | None = None,
        hps_json_config_file: str | os.PathLike[str] | None = None,
        progress: Progress | None = None,
        force: bool = False,
        deploy_models: bool = True,
    ) -> None:
        configurations = [
            configuration for configuration in (config, ps_config, hps_json_config_file) if configuration is not None
        ]
        if len(configurations) != 1:
            got = f"{len(configurations)} configurations" if configurations else "no configuration"
            expected = "expected one of config, ps_config and hps_json_config_file"
            raise InvalidInputError(f"opening a parameter server: got {got}, {expected}")
        [config] = configurations
        self.config = load_configuration(config)
        self.path = os.path.abspath(config) if isinstance(config, str | os.PathLike) and os.path.exists(config) else ""
        self.metrics = Metrics()
        self.cache_class = choose_cache(self.config.device)
        self.live = LiveModels(counted=self.metrics.models)
        self.checked: dict[str, Checkable] = {}  # further parts that `check` covers, by name
        self._closing = threading.Lock()
        self.closed = False
        self._recorder: KeyRecorder | None = None
        self._reopenable: dict[str, Deployment] = {}  # in a forked child, until the first call
        POOL.limit_to(self.config.fetch_threads)
        self._updates = LiveUpdates(self.config, self.metrics)
        compile_kernels(*kernels_of(self.config, self.cache_class))
        try:
            self._chain, targets = open_databases(self.config, self.metrics)
        except BaseException:
            self._updates.close()
            raise
        sources = targets().sources
        pins, fleet = Pins(kept_files(self._chain, PINS)), Fleet(sources, kept_files(self._chain, FLEET))
        checks = CheckDocuments(sources, kept_files(self._chain, CHECKS_DIRECTORY))
        self.catalog = ModelCatalog(self.config, sources, pins, fleet, checks)
        self._manage(targets)
        disown_in_children(self)
        close_at_exit(self, lambda server: server._close(_EXIT_WAIT_S))
        if self._chain.volatile is None and not self._chain.databases:
            _log.warning("no database is configured: keys that the embedding cache does not hold get the default vector")
        try:
            for name in self.catalog.names if deploy_models else ():
                self.deploy(name, progress=progress, force=force, pin=False)
        except BaseException:
            self.close()
            raise

    def _manage(self, targets: Callable[[], LoadTargets]) -> None:
        """Create the objects that change versions and collect statistics, over the open tiers."""
        self._reconciler = Reconciler(self.catalog, self.live, self._updates, self._chain, targets, self.cache_class)
        records = RolloutRecords(kept_files(self._chain, ROLLOUTS))
        self.rollouts = Rollouts(self.live, self._reconciler, records, self.metrics)
        self._reconciler.tried_out = self.rollouts.tried_out
        self._routed = RoutedCalls(self.rollouts, self.live, self.metrics)
        chosen_by, fleet = self._reconciler.chosen_by, self._reconciler.fleet
        self.statistics = StatisticsCollector(self.live, self.metrics, chosen_by, fleet, self.rollouts.described)
        self._volatile_tier = self._start_volatile_tier(targets)

    def _start_volatile_tier(self, targets: Callable[[], LoadTargets]) -> VolatileTier | None:
        if self._chain.volatile is None or self._chain.volatile.in_process:  # only a shared one needs supervision
            return None
        open_volatile = partial(open_database, self.config.volatile_db)
        tier = VolatileTier(self._chain, self.live, targets, open_volatile, partial(reload_table, self.catalog, targets))
        tier.start()
        return tier

    @property
    def degraded(self) -> list[str]:
        """Degradations of lookups and their repair: an unavailable volatile database, or tables that lost rows."""
        return [] if self._volatile_tier is None else self._volatile_tier.degraded

    @property
    def models(self) -> tuple[str, ...]:
        """Names of the deployed models."""
        return tuple(self.live.serving or self._reopenable)

    def model(self, name: str, version: str | None = None) -> Deployment:
        """Return a deployed version of a model, with its tables and devices.

        Args:
            version: the serving version by default.

        Raises:
            UnknownModelError: no model of this name is deployed.
            UnknownVersionError: the model is not deployed in this version.
            NotReadyError: the server is closed.
            ForkedProcessError: it was created before this process was forked.
        """
        if version is None and (serving := self.live.serving.get(name)) is not None:
            return serving
        try:
            return self.live.find(name, version)
        except UnknownModelError:
            if self._reopenable:
                self._reopen()
                return self.model(name, version)
            if self.closed:
                raise refusal(self, "the parameter server") from None
            raise

    def routed(self, user: str | bytes) -> AbstractContextManager[None]:
        """Return a context in which calls of this thread or task are for this user, whom a canary may select.

            with server.routed("user-17"):
                vectors = server.lookup_tables({"item": keys}, "ranking")

        Other calls are answered by the serving version. So are captured and prepared lookups, and those of layers.
        """
        return sent_by(user)

    def rerouted(self, error: HPSError) -> AbstractContextManager[None] | None:
        """Return a context in which the serving version answers a call that a canary's version has failed; else None."""
        return self._routed.rerouted(error)

    def _answering(self, name: str) -> Deployment:
        """Return the version that answers a call which names none."""
        if self.rollouts.active and (tried := self._routed.version(name)) is not None:
            return tried
        return self.model(name)

    def in_service(self, model_name: str | None = None) -> list[Deployment]:
        """Return the deployed versions of a model, or of all models."""
        return [deployment for deployment in self.live.all() if model_name in (None, deployment.config.model)]

    def hold(self, model_name: str, version: str, holder: object) -> None:
        """Keep a deployed version available while an object exists, also when other versions are deployed.

        A version without holders retires with the next deployment. An undeployment ignores holders.

        Args:
            holder: any hashable object that supports weak references, such as a torch module.

        Raises:
            UnknownModelError, UnknownVersionError: it is not deployed.
        """
        self.model(model_name, version)
        self.live.retain(model_name, version, holder)

    def versions(self, model_name: str) -> list[VersionInfo]:
        """Return the versions of a model that are in service, kept for a roll-back, or still used by lookups.

        Raises:
            UnknownModelError: no model of this name is deployed.
        """
        versions = [version_info(deployment, state) for deployment, state in self.live.versions(model_name)]
        if not versions:
            self.model(model_name)
        return versions

    @overload
    def lookup(
        self, h_keys: Any, model_name: str, table_id: int | str, device_id: int = 0, *, return_found: Literal[False] = False
    ) -> FloatArray: ...
    @overload
    def lookup(
        self, h_keys: Any, model_name: str, table_id: int | str, device_id: int = 0, *, return_found: Literal[True]
    ) -> tuple[FloatArray, BoolArray]: ...
    @retry_after_takeover
    def lookup(
        self, h_keys: Any, model_name: str, table_id: int | str, device_id: int = 0, *, return_found: bool = False
    ) -> FloatArray | tuple[FloatArray, BoolArray]:
        """Look up the vectors of host keys in one table.

        Args:
            h_keys: (n,) integers: a sequence or an array of int64, int32 or uint64 (reinterpreted bit for bit); duplicates
                allowed.
            table_id: id (position in `sparse_files`) or name of the table.
            device_id: device of the embedding cache to use.

        Returns:
            (n, dim) float32 in host memory, owned by the caller; the table's default vector for keys that no tier has.
            With `return_found` also (n,) bool: True for keys that a tier has.

        Raises:
            UnknownModelError, UnknownTableError, UnknownDeviceError: not deployed.
            InvalidInputError: keys are not integers, not one-dimensional, or too many (`TooManyKeysError`).
            WorkspaceTimeoutError: too many concurrent lookups.
            DatabaseError: keys are missing and the authoritative database did not answer.
        """
        start_ns = perf_counter_ns()
        deployment = self._answering(model_name)
        index = deployment.table_index(table_id)
        flat = as_host_keys(h_keys)
        vectors: FloatArray = np.empty((flat.size, deployment.tables[index].dim), np.float32)
        found = np.empty(flat.size, np.bool_) if return_found else None
        batch = Batch((index,), (flat.size,), (flat,), (vectors,), () if found is None else (found,))
        self._answer(deployment, deployment.session(device_id), batch, start_ns)
        return vectors if found is None else (vectors, found)

    @retry_after_takeover
    def lookup_tables(
        self,
        tables: Mapping[str, Any] | Mapping[int, Any],
        model_name: str,
        device_id: int | None = None,
        *,
        out: Mapping[Any, Any] | None = None,
        return_found: bool = False,
        wait: bool = True,
    ) -> Any:
        """Look up several tables of a model at once; in the GPU's embedding cache with a single kernel.

        Args:
            tables: keys by table name or id: host keys as for `lookup`, or tensors as for `lookup_fromdlpack`.
            device_id: device of the embedding cache to use; default: the tensors' device, else the least busy one.
            out: output tensors by table, as for `lookup_fromdlpack`; default: new host arrays.
            wait: as for `lookup_fromdlpack`; False needs `out`.

        Returns:
            {table: (n, dim) float32 in host memory, or the tensor from `out`}, with the tables as named in the call.
            With `return_found` also {table: (n,) bool in host memory}.

        Raises:
            As `lookup`; also InvalidInputError when a table is named twice (by id and by name).
        """
        start_ns = perf_counter_ns()
        deployment = self._answering(model_name)
        session = deployment.session(device_id, tables, out)
        batch = _named(deployment, session, tables, out, return_found)
        self._answer(deployment, session, batch, start_ns, wait=wait)
        vectors = dict(zip(tables, batch.outs, strict=True)) if out is None else dict(out)
        if return_found:
            return vectors, dict(zip(tables, batch.founds, strict=True))
        return vectors

    @retry_after_takeover
    def lookup_fromdlpack(
        self,
        keys: Any,
        out_tensor: Any,
        model_name: str,
        table_id: int | str,
        device_id: int = 0,
        *,
        return_found: bool = False,
        wait: bool = True,
    ) -> BoolArray | None:
        """Look up keys in tensors of any DLPack framework, without copying the tensors.

        Args:
            keys: int64 (int32 is widened), C-contiguous, any shape: an object with `__dlpack__`, or a capsule, which remains
                usable.
            out_tensor: float32, float16 or bfloat16, C-contiguous, writable, at least n x dim elements; an object as for
                `keys`. The vectors are written to its first n x dim elements, rounded to its dtype.
            device_id: device of the embedding cache to use. Each tensor may be in host memory or on that GPU, independently of
                the other; one on another GPU is refused.
            wait: if False, return at once: the lookup runs on the current stream of the tensors' framework, where a CUDA graph
                may capture it. All tensors must be on the GPU, the GPU must answer every table without the host
                ([misses](gpu-cache.md#what-happens-to-a-miss)), and there is no found-mask.

        Returns:
            None, or with `return_found` (n,) bool in host memory.

        Raises:
            As `lookup`; InvalidDtypeError and InvalidInputError name the expected and the given value.
            DatabaseError: as `lookup`; with `wait=False`, the database failed in an earlier lookup, so unread keys got the
                default vector.
        """
        start_ns = perf_counter_ns()
        deployment = self._answering(model_name)
        index = deployment.table_index(table_id)
        session = deployment.session(device_id)
        dim = deployment.tables[index].dim
        batch = table_batch(index, dim, keys, out_tensor, on_cuda=session.on_cuda, with_found=return_found)
        self._answer(deployment, session, batch, start_ns, wait=wait)
        return batch.founds[0] if return_found else None

    @retry_after_takeover
    def lookup_concatenated(
        self,
        keys: Any,
        counts: Sequence[int],
        out_tensor: Any,
        model_name: str,
        device_id: int | None = None,
        *,
        return_found: bool = False,
        wait: bool = True,
    ) -> BoolArray | None:
        """Look up all tables of a model, with the keys concatenated in one tensor as for Triton's HPS backend.

        The fastest call for many tables: only two tensors are imported, for any number of tables.

        Args:
            keys: as for `lookup_fromdlpack`: the keys of table 0, then those of table 1, and so on.
            counts: number of keys per table, one count for every table of the model; may be 0.
            out_tensor: as for `lookup_fromdlpack`: the vectors of table 0, then those of table 1, and so on.
            device_id: as for `lookup_tables`.
            wait: as for `lookup_fromdlpack`.

        Returns:
            None, or with `return_found` (n,) bool in host memory, in the order of the keys.

        Raises:
            As `lookup_fromdlpack`; InvalidInputError also when the counts do not match the model or the keys.
        """
        start_ns = perf_counter_ns()
        deployment = self._answering(model_name)
        session = deployment.session(device_id, keys, out_tensor)
        batch, found = concatenated_batch(
            keys, counts, out_tensor, deployment.dims, on_cuda=session.on_cuda, with_found=return_found
        )
        self._answer(deployment, session, batch, start_ns, wait=wait)
        return found

    @retry_after_takeover
    def lookup_pooled(
        self,
        tables: Mapping[str, Bags] | Mapping[int, Bags],
        model_name: str,
        device_id: int | None = None,
        *,
        out: Any = None,
        wait: bool = True,
    ) -> Any:
        """Look up bags of keys in several tables at once, and combine the vectors of each bag into one.

        In the GPU's embedding cache, one kernel serves all tables and sums resident vectors without storing them first.

        Args:
            tables: bags by table name or id.
            device_id: as for `lookup_tables`.
            out: by table, (B, dim) float32, C-contiguous, writable; or one such tensor (B, sum of dims) for all tables, with
                their columns in the order of `tables`; default: new host arrays.
            wait: as for `lookup_fromdlpack`; False needs `out`, and device memory for the vectors of all keys.

        Returns:
            {table: (B, dim) float32 in host memory}, with the tables as named in the call; or `out`.

        Raises:
            As `lookup_tables`; InvalidInputError also for offsets, weights, combiner or max_norm that `Bags` does not allow.
        """
        start_ns = perf_counter_ns()
        deployment = self._answering(model_name)
        keys = {name: bags.keys for name, bags in tables.items() if isinstance(bags, Bags)}
        session = deployment.session(device_id, keys, out)
        batch = pooled_batch(tables, out, deployment.table_index, deployment.tables, on_cuda=session.on_cuda)
        self._answer(deployment, session, batch, start_ns, wait=wait)
        return dict(zip(tables, batch.outs, strict=True)) if out is None else out

    @retry_after_takeover
    def capture(
        self, keys: Any, out_tensor: Any, model_name: str, table_id: int | str | None = None, device_id: int = 0
    ) -> CapturedLookup:
        """Capture a lookup of fixed tensors in a CUDA graph for repeated replay; runs the lookup once.

        See [misses](gpu-cache.md#cuda-graphs) for an example.

        Args:
            keys: as for `lookup_fromdlpack` with `wait=False`; for several tables, {table: keys}.
            out_tensor: likewise; for several tables, {table: output}.
            table_id: id or name of the table; None for several tables.
            device_id: device of the embedding cache to use.

        Returns:
            The captured lookup. A replay reads the tensor's current keys. It keeps references to the tensors.

        Raises:
            As `lookup_fromdlpack` with `wait=False`.
        """
        tables, out = (keys, out_tensor) if table_id is None else ({table_id: keys}, {table_id: out_tensor})
        if not isinstance(tables, Mapping) or not isinstance(out, Mapping):
            raise InvalidInputError("capturing a lookup: got no table_id, expected one, or keys and outputs by table")

        def record(deployment: Deployment) -> RecordedLookup:
            session = deployment.session(device_id)
            return session.record(_named(deployment, session, tables, out, with_found=False))

        return CapturedLookup(partial(self.model, model_name), record)

    @retry_after_takeover
    def prepare(
        self,
        tables: Mapping[str, Any] | Mapping[int, Any],
        model_name: str,
        device_id: int = 0,
        *,
        out: Mapping[Any, Any] | None = None,
        return_found: bool = False,
    ) -> PreparedLookup:
        """Prepare a lookup for a loop whose tables and sizes stay the same: tensors are checked and packed once.

            with server.prepare({"item": 4096, "user": 64}, "ranker") as lookup:
                for batch in batches:
                    lookup.keys["item"][:] = batch.items
                    lookup.keys["user"][:] = batch.users
                    vectors = lookup.run()  # complete, as by `lookup_tables`

        Buffers are zeroed NumPy arrays, or CuPy arrays if the model has a cache on a GPU. PyTorch code binds its own tensors,
        or imports the buffers with `torch.from_dlpack` if it uses torch's default stream.

        Args:
            tables: by table name or id, a number of keys, for which a buffer is made; or a tensor of keys, as for
                `lookup_fromdlpack` but int64, which is bound: it must not be resized or freed. On a GPU, torch's or CuPy's.
            device_id: device of the embedding cache to use.
            out: by table, tensors for the vectors as for `lookup_fromdlpack`, bound likewise; default: buffers.
            return_found: also make a mask of the keys that a tier has.

        Returns:
            The prepared lookup. One thread at a time may run it.

        Raises:
            As `lookup_tables`; InvalidInputError also for keys that would have to be copied.
        """
        return PreparedLookup(partial(self.model, model_name), self._answer, device_id, tables, out, return_found)

    @retry_after_takeover
    def prefetch(self, keys: Any, model_name: str, table_id: int | str, device_id: int | None = None) -> int:
        """Load vectors into the embedding cache ahead of requests, such as the items of the next hours.

        Bypasses the admission filter; a full cache evicts other vectors. For a model without an embedding cache, vectors are
        loaded into its volatile database if `cache_missed_embeddings` is set.

        Args:
            keys: (n,) integers in host memory, as for `lookup`; any number.
            device_id: device of the embedding cache; default: every device of the model.

        Returns:
            Number of distinct keys that a tier has.

        Raises:
            As `lookup`; some keys may have been loaded.
        """
        deployment = self.model(model_name)
        return deployment.prefetch(deployment.table_index(table_id), as_host_keys(keys), device_id)

    @retry_after_takeover
    def score(
        self, model_name: str, inputs: Mapping[str, Any], device_id: int | None = None, *, version: str | None = None
    ) -> Scores:
        """Look the vectors of samples up, and run the model's network on them: `dense` of its configuration.

        Args:
            inputs: by name of the inputs in `dense`, arrays or nested sequences in host memory. For an input with a table:
                int64 keys (samples, hotness), or (samples,) for one key each, or `Bags` of keys and offsets. For a feature:
                values of its dtype and shape. `per_request` inputs may have one row for all samples. For inputs of the model's
                `transform`: `Strings`, nested sequences of texts, or arrays of their dtype.
            device_id: as for `lookup_tables`.
            version: default: the serving one.

        Returns:
            Outputs of the network by name, (samples, ...) in host memory, and the version that answered.

        Raises:
            UnknownModelError: the model is not deployed, or has no network. UnknownVersionError: the version is not.
            InvalidInputError: inputs are missing, unknown, of another shape or dtype, or of sizes that the network refuses.
            TransformError: the transform failed.
            TooManyKeysError: more samples or keys than the model allows.
            NetworkError: the network failed, or an output is NaN.
            HPSError: as `lookup_tables`.
        """

        def read(deployment: Deployment) -> dict[str, np.ndarray]:
            features = network_of_model(deployment.scores, model_name).opened.features
            return arrays_of(features, inputs if deployment.transform is None else deployment.transform.of_call(inputs))

        def score(deployment: Deployment, arrays: Mapping[str, np.ndarray], *, counted: bool = True) -> Scores:
            scores = network_of_model(deployment.scores, model_name)
            request = scores.read(arrays)
            device = deployment.device(device_id)
            deployment.session(device)  # raises for an unknown device
            return Scores(deployment.version, scores.score(request, device, counted=counted))

        if version is None and self.rollouts.active:
            return self._routed.score(self._answering(model_name), read, score)
        deployment = self.model(model_name, version)
        return score(deployment, read(deployment))

    def lookup_batch(self, deployment: Deployment, batch: Batch, device_id: int | None = None) -> int:
        """Look up several tables into arrays of the caller's layout, for the service.

        Args:
            deployment: result of `model`.
            batch: host arrays, C-contiguous; with bags, outputs have rows of any stride.
            device_id: as for `lookup_tables`.

        Returns:
            The device that answered.

        Raises:
            As `lookup_tables`; NotReadyError when the deployment was retired.
        """
        start_ns = perf_counter_ns()
        refuse_repeated_tables(batch.tables, deployment.tables)
        device_id = deployment.device(device_id)
        self._answer(deployment, deployment.session(device_id), batch, start_ns)
        return device_id

    def _answer(self, deployment: Deployment, session: Session, batch: Batch, start_ns: int, *, wait: bool = True) -> None:
        if self.rollouts.active:
            self._routed.run(deployment, session, batch, start_ns, wait=wait)
        else:
            session.run(batch, start_ns, wait=wait)
        if self._recorder is not None:
            self._recorder.record(deployment.tables, batch)

    @property
    def records(self) -> bool:
        """Whether requested keys are recorded."""
        return self._recorder is not None

    def record_trace(
        self,
        path: str | os.PathLike[str],
        *,
        rate: float = 0.01,
        max_bytes: int = 256 << 20,
        hash_keys: bool = False,
    ) -> KeyRecorder:
        """Record a sample of the keys of lookups from now on, for `hps plan` and `hps profile`.

        Ends the current recording, if any. Keys in device memory are not recorded.

        Args:
            path: output file; earlier recordings in it are kept.
            rate: share of the distinct keys to record, in (0, 1]; a sampled key is recorded at every request.
            max_bytes: file size at which the recording ends.
            hash_keys: record hashes of the keys, under a secret that is not stored.

        Returns:
            The recording, a context manager; `close` ends it.

        Raises:
            InvalidInputError: the rate is out of range.
            ModelFileError: the file cannot be written, or is not a recording.
        """
        recorder = KeyRecorder(path, rate=rate, max_bytes=max_bytes, hash_keys=hash_keys, outcomes=self.metrics.trace_keys)
        before, self._recorder = self._recorder, recorder
        self.live.notify_watchers()
        if before is not None:
            before.close()
        return recorder

    def insert(
        self, keys: Any, vectors: FloatArray, model_name: str, table_id: int | str, *, version: str | None = None
    ) -> str:
        """Add or replace vectors in every tier, online. Lookups that start after it returns get the new vectors.

        Args:
            keys: (n,) integers. The last of equal keys counts.
            vectors: (n, dim) float32, or anything NumPy converts to real numbers.
            version: version to modify, since each has its own rows; default: the serving version.

        Returns:
            The modified version; by default one that served when all its tiers had the vectors.

        Raises:
            UnknownModelError, UnknownVersionError, UnknownTableError: not deployed.
            InvalidInputError: keys or vectors have the wrong type or shape, or no database would keep them: there is none, or
                none that is persistent for a `static` model.
            ReadOnlyError: the persistent database is read-only.
            StaleCopyError: the version's network has a copy of the table.
            DatabaseError: the authoritative database failed; each key then has its old or its new vector.
        """
        flat, rows = as_host_keys(keys), as_host_vectors(vectors)
        return self._modify(
            model_name, version, lambda deployment: deployment.insert(deployment.table_index(table_id), flat, rows)
        )

    def delete(self, keys: Any, model_name: str, table_id: int | str, *, version: str | None = None) -> str:
        """Remove keys from every tier, online; lookups then return the default vector for them.

        Args:
            version: as for `insert`.

        Returns:
            The modified version, as for `insert`.

        Raises:
            As `insert`. DatabaseError: the authoritative database failed; each key is then present or absent.
        """
        flat = as_host_keys(keys)
        return self._modify(model_name, version, lambda deployment: deployment.delete(deployment.table_index(table_id), flat))

    @retry_after_takeover
    def _modify(self, model_name: str, version: str | None, modify: Callable[[Deployment], None]) -> str:
        # A write that races with a deployment may reach only the version that is being replaced, so it is repeated until the
        # version that serves afterwards has it, too.
        while True:
            deployment = self.model(model_name, version)
            modify(deployment)
            if version is None:
                was_replaced = self.live.serving.get(model_name) is not deployment
            else:  # by one of the same version with tables of its own
                was_replaced = self.live.deployed(model_name, version) not in (deployment, None)
            if not was_replaced:
                return deployment.version

    @retry_after_takeover
    def row(self, key: int, model_name: str, table_id: int | str, *, version: str | None = None) -> StoredRow:
        """Return the stored row of a key: vector, tier and time of writing. For debugging; not counted as a lookup.

        Args:
            key: any int64.
            version: the serving version by default.

        Returns:
            The row. During concurrent writes of the key, vector and time may come from different moments of the call.

        Raises:
            UnknownModelError, UnknownVersionError, UnknownTableError: not deployed.
            DatabaseError: no cache has the key, and the authoritative database did not answer.
        """
        deployment = self.model(model_name, version)
        return deployment.row(deployment.table_index(table_id), key)

    def deploy(
        self,
        model: ModelConfig | str,
        version: str | None = None,
        *,
        progress: Progress | None = None,
        force: bool = False,
        remember: bool = True,
        pin: bool = True,
        accept: bool = False,
        canary: float | None = None,
        shadow: float | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Deployment:
        """Load a version of a model beside those in service, and switch to it atomically.

        Lookups continue, each on the version it started with. The replaced version is kept for `rollback`, with its tables but
        without its caches, or dropped from every tier, depending on `keep_versions`. If the version is already in service with
        unchanged files, nothing is loaded; new settings get new caches. A failed deployment also leaves the known configuration
        of the model unchanged.

        Args:
            model: configuration of a model, or the name of a known one.
            version: version to load; default: those the `version_policy` selects, the highest of which serves.
            force: load the files even if a database already holds them; online updates are lost.
            remember: keep this configuration as the known one; if False, a known model uses it for this deployment only.
            pin: pin the model to `version`, as `rollback` does, or end its pin if no version is given; if False, an existing
                pin is kept and respected.
            accept: let the version serve, or answer as a canary, whatever its checks find. Without `version`, and while one is
                held, that one alone: a newer one has to pass.
            canary: share of the requests, in (0, 1], that the version, by default the newest, answers beside the serving one;
                see [canary](canary.md). Again with another share: changes the canary that is under way.
            shadow: share of the requests that both versions answer; the answers of the new one are only compared.
            options: keys of `models[].canary` that differ for this canary or shadow.

        Returns:
            The serving version.

        Raises:
            UnknownModelError, UnknownVersionError: there is no such model, or no such version of it.
            ConflictError: another change of the model is under way; or the tables, widths or cache type of a version in service
                would change under the same number.
            NotReadyError: lookups of a replaced or undeployed version still run.
            CapacityError, ModelFileError, DatabaseError, DeviceError: it cannot be loaded. The serving version continues.
        """
        self._require_open()
        name, entry = (model, None) if isinstance(model, str) else (model.model, model)
        if canary is not None or shadow is not None or options:
            if entry is not None or force:
                raise InvalidInputError(f"deploying model {name!r}: a canary or shadow takes neither a configuration nor force")
            mode, share = _mode_of(name, canary, shadow)
            self.rollouts.start(name, mode, share, version, options, accept=accept, progress=progress)
            return self.model(name)
        self._reconciler.bring_up(
            name, version, entry=entry, progress=progress, force=force, remember=remember, pin=pin, accept=accept
        )
        self.rollouts.resume(name)
        return self.model(name)

    def promote(self, model_name: str, *, accept: bool = False) -> Deployment:
        """End the canary or shadow of a model: its version serves all requests, and the one before is kept for `rollback`.

        The model is pinned to the version, unless it was not pinned before and its `version_policy` chooses the same one.

        Args:
            accept: also a version that its checks hold; a canary that was started so needs it no second time.

        Returns:
            The serving version.

        Raises:
            UnknownModelError: no model of this name is deployed.
            ConflictError: no canary or shadow is under way, or another change of the model is.
            VersionHeldError: its checks hold it.
        """
        self._require_open()
        self.rollouts.promote(model_name, accept=accept)
        return self.model(model_name)

    def rollout(self, model_name: str) -> RolloutStatus | None:
        """Return the canary or shadow of a model that is under way, else the last one; None if there was none."""
        return self.rollouts.status(model_name)

    def check_version(self, model_name: str, version: str, against: str | None = None) -> CheckReport:
        """Run the [checks](checks.md) of a version that is in service or held again, and change nothing.

        Args:
            against: version in service to compare it with; default: the serving one. With itself nothing is compared.

        Raises:
            UnknownModelError, UnknownVersionError: one of them is not deployed.
            ConflictError: one was taken out of service meanwhile.
            NotReadyError: the server is closed.
        """
        self._require_open()
        return self._reconciler.check(model_name, version, against, self._require_open)

    def recorded_requests(self, model_name: str) -> list[str]:
        """Return the recorded requests of the serving version, the oldest first: lines of a `requests.jsonl`.

        Raises:
            UnknownModelError: no model of this name is deployed.
            InvalidInputError: it has no network, or its configuration does not allow recording.
        """
        scores = self.model(model_name).scores
        if scores is None or (recorder := scores.recorder) is None:
            raise InvalidInputError(
                f"recording requests of model {model_name!r}: got checks.record off, or no network, expected keys or features; "
                "set models[].checks.record if the clients' requests may be kept"
            )
        return recorder.lines()

    def rollback(self, model_name: str) -> Deployment:
        """Roll back to the previous version, and pin the model to it; or end the canary or shadow that is under way.

        Its tables are still loaded; its caches are warmed from them. After a restart, the previous version is the one below the
        serving one; its tables are reused if they still exist. The pin is kept beside the persistent database: polling and
        restarts take no newer version until `unpin`, or a `deploy` without a version.

        Returns:
            The serving version. The version it replaces is kept.

        Raises:
            UnknownModelError: no model of this name is deployed.
            ConflictError: there is no version to roll back to, or another change of the model is under way.
            DatabaseError, DeviceError, ModelFileError: it cannot be put into service. The serving version continues.
        """
        self._require_open()
        if self.rollouts.under_way(model_name) is not None:
            self.rollouts.roll_back(model_name)
        else:
            self.rollouts.refuse_second_roll_back(model_name)
            self._reconciler.roll_back(model_name)
        return self.model(model_name)

    def unpin(self, model_name: str, *, progress: Progress | None = None) -> Deployment:
        """End the pin of a model, and deploy what its `version_policy` selects. Changes nothing if the model has no pin.

        If the deployment fails, the pin stays.

        Returns:
            The serving version.

        Raises:
            As `deploy`.
        """
        self._require_open()
        self._reconciler.end_pin(model_name, progress)
        return self.model(model_name)

    def pin(self, model_name: str) -> DesiredVersion | None:
        """Return the pinned version of a model, if any."""
        return self.catalog.pins.known(model_name)

    def change_fleet(
        self,
        model_name: str,
        change: FleetChange,
        version: str | None = None,
        *,
        canary: float | None = None,
        shadow: float | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> ServingDocument:
        """Change the version that every replica serves: write the `serving.json` beside the model's versions.

        Returns when it is written; replicas follow within `repository_poll_s`, this one at the next `follow` or `poll`.

        Args:
            change: `deploy`; `rollback` to the previous version, which withdraws the serving one, or the version that is tried
                out; `canary`, which tries a version out; `promote`, which lets it serve; or `unpin`, which deploys the choice
                of the `version_policy` among versions that are not withdrawn.
            version: version to deploy; default: the present choice of the `version_policy`; for `canary`, the newest.
            canary, shadow, options: as for `deploy`, for the change `canary`.

        Raises:
            UnknownModelError, UnknownVersionError: there is no such model, or no such version of it.
            ConflictError: a concurrent change; no version to roll back to; or the model has no directory of versions.
            ModelFileError: it cannot be written. ModelSourceError: no answer; it may have been written.
        """
        self._require_open()
        serving, plan = self.live.serving.get(model_name), None
        if change == "canary":
            mode, share = _mode_of(model_name, canary, shadow)
            plan = self.rollouts.planned(model_name, mode, share, version, options, accepted=False)
        elif change == "rollback":
            self.catalog.read_document(model_name)
            if (wanted := self._reconciler.wanted_rollout(model_name)) is None or wanted[1] is None:
                self.rollouts.refuse_second_roll_back(model_name)
        return self.catalog.change_fleet(model_name, change, version, "" if serving is None else serving.version, plan)

    def fleet(self, model_name: str) -> FleetStatus | None:
        """Return whether this process follows the `serving.json` of a model; None if the model has none."""
        return self._reconciler.fleet(model_name)

    def read_documents(self) -> None:
        """Read the `serving.json` of every model in service or awaited, and stop loads of superseded versions."""
        self._reconciler.read_documents()

    def follow(self, *, progress: Progress | None = None) -> dict[str, Exception | None]:
        """Deploy the versions of the documents that `read_documents` has read. Returns as `poll`."""
        outcome = self._reconciler.reconcile(progress, documents_only=True)
        self.rollouts.follow_documents()
        return outcome

    def undeploy(self, model_name: str, version: str | None = None) -> None:
        """Take a model out of service and free its caches and its tables in the hash map; Redis and RocksDB keep theirs.

        Refuses new lookups immediately, and waits for running ones. Lookups that still run after 10 s finish normally; their
        data is freed, and the name becomes available, after the last of them. The same holds for captured lookups until their
        graphs are freed.

        Args:
            version: take only this version out of service. If it serves, the highest of the others takes over; if the model is
                pinned to it, the pin ends. One that is kept for a roll-back is dropped with its rows in all databases.

        Raises:
            UnknownModelError: no model of this name is deployed.
            UnknownVersionError: the model is not deployed in this version.
            ConflictError: the version is the only one, or another change of the model is under way.
        """
        self.model(model_name)
        self._reconciler.take_down(model_name, version)

    def index(self) -> list[IndexEntry]:
        """Return every known version of every model, and whether it answers lookups. Does not read model files.

        Raises:
            ModelFileError: the models cannot be listed.
        """
        return version_index(self.catalog, self.live)

    def change_of(self, model_name: str) -> str:
        """Return the current change of a model, such as `deploying`; empty if none."""
        return self.live.change_of(model_name)

    def poll(self, *, progress: Progress | None = None) -> dict[str, Exception | None]:
        """Check the files of all models once, and deploy every change.

        Deploys new or reconfigured models, new versions that the `version_policy` selects, and replaced files. Undeploys models
        that are no longer in the catalog. A pinned model gets no newer version; an undeployed one is ignored until its files
        change. Files that cannot be loaded are retried after a growing pause, or when they change.

        Returns:
            By model: None for a changed one, the error for one that could not be changed.

        Raises:
            ModelFileError: the models cannot be listed.
        """
        outcome = self._reconciler.reconcile(progress)
        self.rollouts.follow_documents()
        return outcome

    @retry_after_takeover
    def refresh(self, model_name: str, share: float | None = None) -> dict[str, RefreshReport]:
        """Reload the vectors of all resident keys, in place, on every device of a model; returns when done.

        First refills its tables in the volatile database, at full speed, if rows were lost there and no other process does so.
        Lookups continue. A model has one refresh at a time; calls made during it share the next one.

        Args:
            share: share of the time to spend on databases and devices, in (0, 1]; default: `refresh_device_share`.

        Returns:
            By table: number of resident keys reloaded, and number erased because no database has them.

        Raises:
            UnknownModelError: the model is not deployed.
            NotReadyError: it was undeployed meanwhile. If another version took over, that one is refreshed instead.
            DatabaseError: the databases failed; the remaining keys keep their vectors.
        """
        deployment = self.model(model_name)
        if self._volatile_tier is not None:
            self._volatile_tier.fill(deployment)
        return deployment.refresh(share)

    def updates(self) -> list[UpdateStatus]:
        """Return the progress of each table in its log of updates, for versions in service or about to take over.

        Lookups that start after this call see all updates up to the reported position.
        """
        return self._updates.status()

    def stats(self) -> ServerStatistics:
        """Return sizes, hit rates and times by model, table and tier, and the state of devices and queues.

        Does not wait for databases or devices. Figures that need them are gathered in the background on calls, at most every 15
        s: they are None in the first answer, and later answers give their age.

        Raises:
            NotReadyError: the server is closed.
            ForkedProcessError: it was created before this process was forked.
        """
        self._require_open()
        return self.statistics.statistics()

    def row_file(self, content: str) -> SharedRowFile | None:
        """Return the row file of an open table by the fingerprint of its content, for other replicas; None if there is none.

        Raises:
            NotReadyError: the server is closed.
        """
        self._require_open()
        adopters = [database for database in self._chain.databases if isinstance(database, AdoptsRowFiles)]
        return next((file for database in adopters if (file := database.shared_file(content)) is not None), None)

    def check(self, timeout_s: float = 10.0) -> list[str]:
        """Check the invariants of versions, caches, databases and shared memory while lookups go on. Reads all indices.

        Args:
            timeout_s: limit for caches and databases together.

        Returns:
            A sentence for each violation, and for what was not checked in time. Concurrent changes may be reported.
        """
        self._require_open()
        return (
            self._reconciler.check_integrity()
            + self.rollouts.check_integrity()
            + check_tiers(self.live, timeout_s, self.checked)
        )

    def drain(self, timeout_s: float = 10.0) -> bool:
        """Wait for background insertions and promotions; return False on timeout."""
        return all([*(deployment.drain(timeout_s) for deployment in self.live.all()), self._chain.drain(timeout_s)])

    def close(self) -> None:
        """Wait for running lookups, free the caches and close the databases. Idempotent."""
        self._close(None)

    def _close(self, timeout_s: float | None) -> None:
        """Close, with a limit on the wait for a load on another thread, which then fails."""
        self._reopenable = {}
        with self._closing:
            if self.closed:
                return
            deployments = self.live.close(timeout_s)
            self.closed = True
            self.rollouts.close()
            self._routed.close()
            self.statistics.close()
            if self._recorder is not None:
                self._recorder.close()
            if self._volatile_tier is not None:
                self._volatile_tier.close()
            for deployment in deployments:
                deployment.close()
            self._updates.close()
            self._chain.close()
            POOL.end()  # restarts when another HPS instance uses it

    def disown(self) -> None:
        """In a forked child: refuse every call, and close nothing that belongs to the parent."""
        self._closing = threading.Lock()
        self.closed = True
        serving = self.live.serving
        # The parent's objects are kept alive: freeing a cache would call CUDA, which does not work in a forked child.
        self._disowned = self.live.disown(), self._updates.disown()
        shared = [database.shared for database in self._chain.databases]
        if (
            shared
            and all(shared)
            and not any(deployment.caches or deployment.chain is not self._chain for deployment in serving.values())
        ):
            self._reopenable = serving

    def _require_open(self) -> None:
        """Reopen in a forked child, if possible; raise if the server is closed."""
        self._reopen()
        if self.closed:
            raise refusal(self, "the parameter server")

    def _reopen(self) -> None:
        """In a forked child: reopen the shared databases, with the versions that served."""
        with self._closing:
            if not self._reopenable:
                return
            self.metrics = Metrics()
            self._updates = LiveUpdates(self.config, self.metrics)
            chain, targets = open_databases(self.config, self.metrics)
            deployments = {}
            for name, deployment in self._reopenable.items():
                for table in deployment.tables:
                    chain.open_table(table)
                session: Session = DirectSession(deployment.tables, chain, self.metrics)
                sessions = dict.fromkeys(deployment.devices, session)
                deployments[name] = replace(deployment, sessions=sessions, chain=chain, stop_following=[])
            self._chain = chain
            self.live = LiveModels(deployments, self.metrics.models)
            self._manage(targets)
            self.closed, self._reopenable = False, {}
            disown_in_children(self)
            close_at_exit(self, lambda server: server._close(_EXIT_WAIT_S))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()


def _mode_of(name: str, canary: float | None, shadow: float | None) -> tuple[RolloutMode, float | None]:
    if (canary is None) == (shadow is None):
        got = "both" if canary is not None else "none"
        raise InvalidInputError(
            f"deploying model {name!r}: got {got} of canary and shadow, expected one, with a share such as 0.05"
        )
    return ("canary", canary) if shadow is None else ("shadow", shadow)


def _named(
    deployment: Deployment, session: Session, tables: Mapping[Any, Any], out: Mapping[Any, Any] | None, with_found: bool
) -> Batch:
    return named_batch(
        tables,
        out,
        deployment.table_index,
        deployment.indices,
        deployment.tables,
        on_cuda=session.on_cuda,
        with_found=with_found,
    )
