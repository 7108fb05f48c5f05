"""The public face: models by name and version, and the lookups of their tables."""

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial, wraps
from time import perf_counter_ns
from types import TracebackType
from typing import Any, Literal, Self, TypeVar, cast, overload

import numpy as np

from hps.captured_lookup import CapturedLookup
from hps.catalog_watch import CatalogWatch, IndexEntry
from hps.configuration.hugectr_structs import ParameterServerConfig
from hps.configuration.load import Configuration, ModelConfig, load_configuration
from hps.configuration.models import FIRST_VERSION
from hps.databases.base import PersistentDatabase, SharedDatabase
from hps.deployment import Deployment, Row, choose_cache, deploy, open_databases, reconfigure
from hps.errors import CapacityError, ConflictError, DatabaseError, InvalidInputError, NotReadyError, UnknownModelError
from hps.key_traces import KeyRecorder
from hps.lifetimes import close_at_exit, disown_in_children, refusal
from hps.live_models import LiveModels, VersionStatus, version_status
from hps.live_updates import LiveUpdates
from hps.lookup.refresh import RefreshReport
from hps.lookup.session import DirectSession, RecordedLookup, Session
from hps.metrics import Metrics
from hps.models.catalog import ModelCatalog
from hps.models.deltas import HeldTable
from hps.progress import Progress
from hps.statistics import ServerStatistics
from hps.survey import Survey
from hps.tensors.bags import Bags, pooled_segments
from hps.tensors.segments import (
    Segment,
    as_host_keys,
    as_host_vectors,
    concatenated_segments,
    named_segments,
    refuse_repeated_tables,
    tensor_segment,
)
from hps.thread_pool import POOL
from hps.types import BoolArray, FloatArray, TableSpec, split_tag
from hps.updates.metrics import TableStatus

_log = logging.getLogger(__name__)
_Method = TypeVar("_Method", bound=Callable[..., Any])
_EXIT_WAIT_S = 5.0  # for a model that is being loaded when the interpreter ends
_NOT_OF_A_VERSION = dict.fromkeys(("sparse_files", "versions", "version_path", "version_policy", "keep_versions"))


def _on_the_next_version(method: _Method) -> _Method:
    """Call a method again where the version that it began with was retired before it did anything."""

    @wraps(method)
    def call(self: "HPS", *args: Any, **kwargs: Any) -> Any:
        while True:
            state = self._live.serving
            try:
                return method(self, *args, **kwargs)
            except NotReadyError:
                if self._live.serving is state:
                    raise

    return cast(_Method, call)


class HPS:
    """A hierarchical parameter server: loads the configured models and answers lookups of their tables. *Thread-safe.*

    A context manager; `close` releases caches and databases, and the exit of the interpreter closes what is still open.
    Every error it raises is an `hps.HPSError`.

    It belongs to the process that made it: in a forked child every call raises `ForkedProcessError`, and `close` does nothing.
    Only where Redis is all that it uses (no other database, no embedding cache) does the child open connections of its own.

    Args:
        config: path of a `ps.json`, its content as a dict, a `ParameterServerConfig`, or a `Configuration`.
        progress: hears how far the loading is.
        force: load the models' files even where a database holds them already; its online updates are lost.
        deploy_models: put the configured models into service; without it, `deploy` does it one by one.

    Raises:
        ConfigError: the configuration is wrong; the message is the whole report.
        ModelFileError: sparse model files are missing or do not fit.
        DatabaseError, DeviceError, MissingDependencyError: a tier cannot be opened.
    """

    def __init__(
        self,
        config: str | os.PathLike[str] | Mapping[str, Any] | ParameterServerConfig | Configuration,
        *,
        progress: Progress | None = None,
        force: bool = False,
        deploy_models: bool = True,
    ) -> None:
        self.config = load_configuration(config)
        self.metrics = Metrics()
        self._cache_class = choose_cache(self.config.device)
        self._live = LiveModels()
        self._closing = threading.Lock()
        self._closed = False
        self._recorder: KeyRecorder | None = None
        self._reopenable: dict[str, Deployment] = {}  # in a forked child, until the first call
        POOL.limit_to(self.config.fetch_threads)
        self._updates = LiveUpdates(self.config, self.metrics)
        self._chain, self._targets = open_databases(self.config, self.metrics)
        self._survey = Survey(self._live, self.metrics, self._updates.status)
        self.catalog = ModelCatalog(self.config, self._targets.sources)
        self._watch = CatalogWatch(self.catalog, self._live)
        disown_in_children(self)
        close_at_exit(self, lambda server: server._close(_EXIT_WAIT_S))
        if not self._chain.databases:
            _log.warning("no database is configured: keys that the embedding cache does not hold get the default vector")
        try:
            for name in self.catalog.names if deploy_models else ():
                self.deploy(name, progress=progress, force=force)
        except BaseException:
            self.close()
            raise

    @property
    def models(self) -> tuple[str, ...]:
        """Names of the deployed models."""
        return tuple(self._live.serving or self._reopenable)

    def model(self, name: str, version: str | None = None) -> Deployment:
        """A deployed version of a model: its tables and devices.

        Args:
            version: the one that serves, if None.

        Raises:
            UnknownModelError: no model of this name is deployed.
            UnknownVersionError: it is, but not in this version.
            NotReadyError: the server is closed.
            ForkedProcessError: it was made before this process was forked.
        """
        if version is None and (serving := self._live.serving.get(name)) is not None:
            return serving
        try:
            return self._live.find(name, version)
        except UnknownModelError:
            if self._reopenable:
                self._reopen()
                return self.model(name, version)
            if self._closed:
                raise refusal(self, "the parameter server") from None
            raise

    def in_service(self, model_name: str | None = None) -> list[Deployment]:
        """The deployed versions of a model, or of all."""
        return [one for one in self._live.all() if model_name in (None, one.config.model)]

    def versions(self, model_name: str) -> list[VersionStatus]:
        """The versions of a model that are in service, kept, or still read by lookups.

        Raises:
            UnknownModelError: no model of this name is deployed.
        """
        found = [version_status(one, state) for one, state in self._live.versions(model_name)]
        if not found:
            self.model(model_name)
        return found

    @overload
    def lookup(
        self, keys: Any, model_name: str, table_id: int | str, device_id: int = 0, *, return_found: Literal[False] = False
    ) -> FloatArray: ...
    @overload
    def lookup(
        self, keys: Any, model_name: str, table_id: int | str, device_id: int = 0, *, return_found: Literal[True]
    ) -> tuple[FloatArray, BoolArray]: ...
    @_on_the_next_version
    def lookup(
        self, keys: Any, model_name: str, table_id: int | str, device_id: int = 0, *, return_found: bool = False
    ) -> FloatArray | tuple[FloatArray, BoolArray]:
        """Look up the vectors of host keys in one table.

        Args:
            keys: (n,) integers: a sequence or an array of int64, int32 or uint64 (taken bit for bit); duplicates allowed.
            model_name: a deployed model.
            table_id: the table, by id (its place in `sparse_files`) or by name.
            device_id: whose embedding cache to use.
            return_found: return the found-mask, too.

        Returns:
            (n, dim) float32 in host memory, owned by the caller; the table's default vector where no tier has the key.
            With `return_found` also (n,) bool: True where a tier had it.

        Raises:
            UnknownModelError, UnknownTableError, UnknownDeviceError: not deployed.
            InvalidInputError: keys are not integers, not one-dimensional (`TooManyKeysError`: too many).
            WorkspaceTimeoutError: too many lookups at once.
            DatabaseError: keys are missing and the database that holds everything did not answer.
        """
        began = perf_counter_ns()
        deployment = self.model(model_name)
        index = deployment.table_index(table_id)
        flat = as_host_keys(keys)
        vectors: FloatArray = np.empty((flat.size, deployment.tables[index].dim), np.float32)
        found = np.empty(flat.size, np.bool_) if return_found else None
        self._answer(deployment, deployment.session(device_id), [Segment(index, flat, vectors, found)], True, began)
        return vectors if found is None else (vectors, found)

    @_on_the_next_version
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
        """Look up several tables of a model at once; in the GPU's embedding cache with one kernel for all of them.

        Args:
            tables: keys by table name or id, as for `lookup` or, tensors, as for `lookup_fromdlpack`.
            model_name: a deployed model.
            device_id: whose embedding cache to use; None: of the device where a tensor is, else of the least busy one.
            out: where the vectors go, by table, as for `lookup_fromdlpack`; new host arrays where it is not given.
            return_found: return the found-masks, too.
            wait: as for `lookup_fromdlpack`; False needs `out`.

        Returns:
            {table: (n, dim) float32 in host memory, or what `out` has}, with the tables as they were named in the call.
            With `return_found` also {table: (n,) bool in host memory}.

        Raises:
            As `lookup`; also InvalidInputError when a table is named twice (by id and by name).
        """
        began = perf_counter_ns()
        deployment = self.model(model_name)
        session = deployment.session(device_id, tables, out)
        segments = _named(deployment, session, tables, out, return_found)
        self._answer(deployment, session, segments, wait, began)
        vectors = dict(zip(tables, (segment.out for segment in segments), strict=True)) if out is None else dict(out)
        if return_found:
            return vectors, dict(zip(tables, (segment.found for segment in segments), strict=True))
        return vectors

    @_on_the_next_version
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
        """Look up tensors of any framework that speaks DLPack, without copying them.

        Args:
            keys: int64 (int32 is widened), C-contiguous, any shape: an object with `__dlpack__`, or a capsule, which stays
                usable.
            out_tensor: float32, C-contiguous, writable, at least n x dim elements: as `keys`. The vectors are written to
                its first n x dim elements.
            model_name: a deployed model.
            table_id: the table, by id or by name.
            device_id: whose embedding cache to use. Each tensor may be in host memory or on that GPU, independently of the
                other; one on another GPU is refused.
            return_found: return the found-mask.
            wait: with False, return at once: the lookup is left on the stream that the tensors' framework works on, and may be
                captured in a CUDA graph there. All tensors must be on the GPU, every table must be one that the GPU answers
                by itself ([misses](misses.md)), and there is no found-mask.

        Returns:
            None, or with `return_found` (n,) bool in host memory.

        Raises:
            As `lookup`; InvalidDtypeError and InvalidInputError say what was got and what is expected.
            DatabaseError: as `lookup`; with `wait=False`, a lookup before gave keys the default vector since nobody could read
                theirs.
        """
        began = perf_counter_ns()
        deployment = self.model(model_name)
        index = deployment.table_index(table_id)
        session = deployment.session(device_id)
        dim = deployment.tables[index].dim
        segment = tensor_segment(index, dim, keys, out_tensor, on_cuda=session.on_cuda, with_found=return_found)
        self._answer(deployment, session, [segment], wait, began)
        return segment.found

    @_on_the_next_version
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
        """Look up all tables of a model whose keys follow each other in one tensor, as Triton's HPS backend takes them.

        The quickest way for many tables: two tensors are adopted, however many tables there are.

        Args:
            keys: as for `lookup_fromdlpack`: first those of table 0, then those of table 1, and so on.
            counts: how many keys each table has, one count for every table of the model; 0 is allowed.
            out_tensor: as for `lookup_fromdlpack`: the vectors of table 0, then those of table 1, and so on.
            model_name: a deployed model.
            device_id: as for `lookup_tables`.
            return_found: return the found-mask.
            wait: as for `lookup_fromdlpack`.

        Returns:
            None, or with `return_found` (n,) bool in host memory, in the order of the keys.

        Raises:
            As `lookup_fromdlpack`; InvalidInputError also when the counts do not fit the model or the keys.
        """
        began = perf_counter_ns()
        deployment = self.model(model_name)
        session = deployment.session(device_id, keys, out_tensor)
        segments, found = concatenated_segments(
            keys, counts, out_tensor, deployment.tables, on_cuda=session.on_cuda, with_found=return_found
        )
        self._answer(deployment, session, segments, wait, began)
        return found

    @_on_the_next_version
    def lookup_pooled(
        self,
        tables: Mapping[str, Bags] | Mapping[int, Bags],
        model_name: str,
        device_id: int | None = None,
        *,
        out: Any = None,
        wait: bool = True,
    ) -> Any:
        """Look up bags of keys in several tables at once: one vector for each bag, combined from those of its keys.

        In the GPU's embedding cache, one kernel serves all tables and adds up resident vectors without writing them anywhere.

        Args:
            tables: the bags of each table, by its name or id.
            model_name: a deployed model.
            device_id: as for `lookup_tables`.
            out: by table, (B, dim) float32, C-contiguous, writable; or one such tensor (B, sum of dims) for all tables, whose
                columns are theirs in the order of `tables`; new host arrays where it is not given.
            wait: as for `lookup_fromdlpack`; False needs `out`, and device memory for the vectors of all keys.

        Returns:
            {table: (B, dim) float32 in host memory}, with the tables as they were named in the call; or `out`.

        Raises:
            As `lookup_tables`; InvalidInputError also where offsets, weights, combiner or max_norm are not as `Bags` says.
        """
        began = perf_counter_ns()
        deployment = self.model(model_name)
        keys = {name: bags.keys for name, bags in tables.items() if isinstance(bags, Bags)}
        session = deployment.session(device_id, keys, out)
        segments = pooled_segments(tables, out, deployment.table_index, deployment.tables, on_cuda=session.on_cuda)
        self._answer(deployment, session, segments, wait, began)
        return dict(zip(tables, (segment.out for segment in segments), strict=True)) if out is None else out

    @_on_the_next_version
    def capture(
        self, keys: Any, out_tensor: Any, model_name: str, table_id: int | str | None = None, device_id: int = 0
    ) -> CapturedLookup:
        """Capture a lookup of fixed tensors in a CUDA graph, to be replayed as often as one likes; it runs once meanwhile.

        See [misses](misses.md#cuda-graphs) for an example.

        Args:
            keys: as for `lookup_fromdlpack` with `wait=False`; of several tables, {table: keys}.
            out_tensor: likewise; of several tables, {table: output}.
            table_id: the table; None where there are several.
            device_id: whose embedding cache to use.

        Returns:
            What replays it, with the keys that the tensor then has. It keeps the tensors.

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

    @_on_the_next_version
    def prefetch(self, keys: Any, model_name: str, table_id: int | str, device_id: int | None = None) -> int:
        """Make vectors resident in the embedding cache before they are asked for, such as those of the next hours' items.

        No filter of the admission holds them back; where the cache is full, they take the places of others. A model without
        embedding cache gets them into its volatile database where `cache_missed_embeddings` is set.

        Args:
            keys: (n,) integers in host memory, as for `lookup`; as many as one likes.
            model_name: a deployed model.
            table_id: the table, by id or by name.
            device_id: whose embedding cache; None: of every device of the model.

        Returns:
            How many of the distinct keys some tier has. The others stay absent.

        Raises:
            As `lookup`; some of the keys may have become resident.
        """
        deployment = self.model(model_name)
        return deployment.prefetch(deployment.table_index(table_id), as_host_keys(keys), device_id)

    def lookup_segments(self, deployment: Deployment, segments: Sequence[Segment], device_id: int | None = None) -> int:
        """Look up several tables straight into arrays of the caller's own layout; for the HTTP service.

        Args:
            deployment: what `model` gave.
            segments: at most one for each table, with keys (n,) int64, out (n, dim) float32 and, optionally, found (n,)
                bool: host arrays, C-contiguous. With bags, out is (B, dim), with rows of any stride, and there is no found.
            device_id: as for `lookup_tables`.

        Returns:
            The device that answered.

        Raises:
            As `lookup_tables`; NotReadyError when it was retired, and another version may serve by now.
        """
        began = perf_counter_ns()
        refuse_repeated_tables(segments, deployment.tables)
        if device_id is None:
            device_id = deployment.one_device
            if device_id is None:
                device_id = deployment.choose_device()
        self._answer(deployment, deployment.session(device_id), segments, True, began)
        return device_id

    def _answer(self, deployment: Deployment, session: Session, segments: Sequence[Segment], wait: bool, began_ns: int) -> None:
        if wait:
            session.lookup(segments, began_ns)
        elif any(segment.found is not None for segment in segments):
            raise InvalidInputError("looking up without waiting: got return_found, whose mask is in host memory; expected none")
        else:
            session.enqueue(segments)
        if self._recorder is not None:
            self._recorder.record(deployment.tables, segments)

    def record_trace(
        self,
        path: str | os.PathLike[str],
        *,
        rate: float = 0.01,
        max_bytes: int = 256 << 20,
        hash_keys: bool = False,
    ) -> KeyRecorder:
        """Record a sample of the keys that are looked up from now on, for `hps plan` and `hps profile`.

        A recording that was going on ends. Keys in the memory of a device are not recorded.

        Args:
            path: of a file; what it has recorded before is kept.
            rate: the share of the distinct keys to record, each whenever it is asked for, in (0, 1].
            max_bytes: the recording ends when the file is as large.
            hash_keys: record hashes of the keys under a secret that is stored nowhere.

        Returns:
            The recording, a context manager; `close` ends it.

        Raises:
            InvalidInputError: the rate is out of range.
            ModelFileError: the file cannot be written, or is something else.
        """
        recorder = KeyRecorder(path, rate=rate, max_bytes=max_bytes, hash_keys=hash_keys, outcomes=self.metrics.trace_keys)
        before, self._recorder = self._recorder, recorder
        if before is not None:
            before.close()
        return recorder

    def insert(
        self, keys: Any, vectors: FloatArray, model_name: str, table_id: int | str, *, version: str | None = None
    ) -> str:
        """Add or replace vectors in every tier, online. When it returns, every lookup that starts gets the new vectors.

        Args:
            keys: (n,) integers. If one is there twice, its last vector counts.
            vectors: (n, dim) float32, or what NumPy reads as real numbers.
            version: whose rows; those of the one that serves, if None. Each version has rows of its own.

        Returns:
            The version that has them. Of None, that is one that served when they were in all its tiers.

        Raises:
            UnknownModelError, UnknownVersionError, UnknownTableError: not deployed.
            InvalidInputError: keys or vectors are of the wrong kind or shape, or no database would keep them: there is none, or
                none that is persistent for a `static` model.
            ReadOnlyError: the persistent database may not be written to.
            DatabaseError: the database that holds everything failed; each key then has its old or its new vector.
        """
        flat, rows = as_host_keys(keys), as_host_vectors(vectors)
        return self._modify(model_name, version, lambda one: one.insert(one.table_index(table_id), flat, rows))

    def delete(self, keys: Any, model_name: str, table_id: int | str, *, version: str | None = None) -> str:
        """Remove keys from every tier, online; they get the default vector from then on.

        Args:
            version: as for `insert`, and so is what is returned.

        Raises:
            As `insert`. DatabaseError: the database that holds everything failed; each key is then there or not.
        """
        flat = as_host_keys(keys)
        return self._modify(model_name, version, lambda one: one.delete(one.table_index(table_id), flat))

    @_on_the_next_version
    def _modify(self, model_name: str, version: str | None, modify: Callable[[Deployment], None]) -> str:
        """Modify a version; again, where another took over before the modification was done."""
        while True:
            deployment = self.model(model_name, version)
            modify(deployment)
            if version is not None or self._live.serving.get(model_name) is deployment:
                return deployment.version

    @_on_the_next_version
    def row(self, key: int, model_name: str, table_id: int | str, *, version: str | None = None) -> Row:
        """What a model has for a key, which tier has it, and when it was written. For people: it is not counted as a lookup.

        Args:
            key: any int64.
            version: whose row; that of the one that serves, if None.

        Returns:
            The row. Beside writes of the same key, its vector and its time are each of a moment of the call.

        Raises:
            UnknownModelError, UnknownVersionError, UnknownTableError: not deployed.
            DatabaseError: no cache has the key, and the database that holds everything did not answer.
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
    ) -> Deployment:
        """Load a version of a model beside those that are in service, and let it take over in one step.

        Lookups go on meanwhile; each is answered by the version that it began with. The version that served before is kept for
        `rollback`, with its tables but without its caches, or dropped from every tier, as `keep_versions` says. If the version
        is in service already and its files have not changed, nothing is loaded: it serves, with new caches if its settings are
        others. A deployment that fails leaves what is known of the model as it was, too.

        Args:
            model: the configuration of a model; or the name of a known one.
            version: what to load; by default what the `version_policy` chooses, the highest of which serves.
            progress: hears how far the loading is.
            force: load the files even where a database holds them already; online updates are lost.
            remember: know the model by this configuration from then on; if False, a model that was known already is deployed so
                this once.

        Returns:
            What serves now.

        Raises:
            UnknownModelError, UnknownVersionError: there is no such model, or no such version of it.
            ConflictError: another change of the model is under way; or a version that is in service would get other tables,
                other widths or another kind of cache under its number.
            NotReadyError: lookups of a version that was replaced or undeployed still run.
            CapacityError, ModelFileError, DatabaseError, DeviceError: it cannot be loaded. What served goes on to serve.
        """
        name = model if isinstance(model, str) else model.model
        self._reopen()
        if self._closed:
            raise refusal(self, "the parameter server")
        with self._live.changing(name, "deploying"), self.metrics.changing(name, "deploy"):
            known = isinstance(model, str) or name in self.catalog.names
            before = None if isinstance(model, str) else self.catalog.add(model)
            served = False
            try:
                chosen = self.catalog.to_serve(name) if version is None else [version]
                fingerprints = [self._deploy(name, number, progress, force) for number in chosen]
                served = True
            except Exception as error:
                self._watch.failed(name, error)
                raise
            finally:
                if not isinstance(model, str) and not (served and (remember or not known)):
                    self.catalog.restore(name, before)
            if version is None:
                self._watch.served(name, zip(chosen, fingerprints, strict=True))
        return self.model(name)

    def _deploy(self, name: str, version: str, progress: Progress | None, force: bool) -> str:
        """Put a version into service, and return the fingerprint of its files."""
        wanted = self.catalog.version(name, version, partial(self._held_tables, name))
        config = wanted.config
        if (there := self._live.deployed(name, config.version)) and (other := _other_tables(there.config, config)):
            raise ConflictError(
                f"deploying model {name!r}: {other}, which cannot change under the same version; give the files a version "
                "of their own, or undeploy the model first"
            )
        fingerprint = self.catalog.fingerprint(wanted)
        if there and there.fingerprint == fingerprint and not force:
            same = _same_settings(there.config, config)
            if same or there.chain.databases:
                deployed = there if same else self._renewed(there, config)
                try:
                    self._live.serve(deployed, lambda versions: versions, "hand over")
                except BaseException:
                    if deployed is not there:
                        deployed.close("hand over")
                    raise
                self._updates.hand_over(there, deployed)
                return fingerprint
        kept = self._live.kept(name)
        old = next((one for one in kept if (one.version, one.fingerprint) == (config.version, fingerprint)), None)
        if old and not _other_tables(old.config, config) and not force:  # with what was written to it online
            deployed, kept = self._renewed(old, config), [one for one in kept if one is not old]
        else:
            tables, old = self._in_free_slot(config, fingerprint), None
            load = partial(
                deploy,
                wanted,
                tables,
                self._cache_class,
                self._chain,
                self.metrics,
                targets=replace(self._targets, force=force),
                follows=self._updates.follows,
                progress=progress,
            )
            try:
                deployed = load()
            except CapacityError:  # nothing was loaded, so what would go afterwards may go now
                self._drop_rest(name, kept, config, tables)
                deployed, kept = load(), self._live.kept(name)
        stay = partial(self.catalog.model(name).version_policy.chosen, also=config.version)

        def give_up() -> bool:
            if progress is not None:
                progress.advance(deployed.tables[0].tag, 0)  # which may end the deployment, as while it loads
            return self._live.closed

        try:
            self._updates.start_and_wait(deployed, give_up)
            self._live.serve(deployed, stay, "keep" if config.keep_versions else "drop", old)
        except BaseException:
            if self._live.serving.get(name) is not deployed:
                deployed.close("keep" if old else "release")
            raise
        self._drop_rest(name, kept, config)
        return fingerprint

    def _renewed(self, there: Deployment, config: ModelConfig) -> Deployment:
        """The tables of a version with new caches, as `config` has them."""
        if _same_settings(there.config, config):
            return there.renewed()
        return reconfigure(there, config, self._cache_class, self.metrics)

    def _held_tables(self, name: str, version: str) -> list[HeldTable]:
        """Where the tables of a version are, if it is in service or kept."""
        found = (one.held_tables() for one, _ in self._live.versions(name) if one.version == version)
        return next(found, [])

    def _in_free_slot(self, config: ModelConfig, fingerprint: str) -> tuple[TableSpec, ...]:
        """The tables of a version, with a slot that no other version of the model uses.

        A version that is loaded again from other files has tables beside those that serve. At the next start, it is the
        tables of these very files that hold what was written online since.
        """
        used = {table.slot for one, _ in self._live.versions(config.model) for table in one.tables}
        others = [f"{config.version}.{fingerprint[i : i + 8]}" for i in (0, 8, 16)]
        own = config.tables[0].slot
        held: set[str] = set()
        for database in self._chain.databases:
            if isinstance(database, PersistentDatabase):
                held.update(names[1] for tag in database.tags() if (names := split_tag(tag)) and names[0] == config.model)
        slot = next(slot for slot in [*(other for other in others if other in held), own, *others] if slot not in used)
        return tuple(replace(table, slot=slot) for table in config.tables)

    def _drop_rest(self, name: str, kept: Sequence[Deployment], config: ModelConfig, loading: Sequence[TableSpec] = ()) -> None:
        """Drop what need not be kept once a version serves: earlier ones, and what a process left that was killed.

        Of versions below it that an earlier process left, `keep_versions` less those that are kept stay, whole: so a roll-back
        is quick after a restart, too. What cannot be dropped now is dropped another time.

        Args:
            kept: for a roll-back, before this version.
            config: of the version.
            loading: tables of it that are not in service yet.
        """
        keep = config.keep_versions
        self._live.drop_kept(name, kept[: len(kept) - min(len(kept), max(0, keep - 1))])
        live = [table for one, _ in self._live.versions(name) for table in one.tables] + list(loading)
        used = {table.tag for table in live}
        # Without a slot the names are HugeCTR's: what lies under them may be somebody else's, but for tables of this model.
        own = {table.table_name for table in config.tables if all(other.slot for other in live)}
        left: dict[str, str] = {}  # slots of tags
        for database in self._chain.databases:
            if isinstance(database, PersistentDatabase) and not database.read_only:
                with suppress(DatabaseError):
                    of_model = ((tag, names) for tag in database.tags() if (names := split_tag(tag)) and names[0] == name)
                    left |= {
                        tag: slot or FIRST_VERSION
                        for tag, (_, slot, table) in of_model
                        if tag not in used and (slot or table in own)
                    }
        below = sorted({int(slot) for slot in left.values() if slot.isdecimal() and int(slot) < int(config.version)})
        count = keep - sum(state in ("kept", "retiring") for _, state in self._live.versions(name))
        stay = list(map(str, below[-count:])) if count > 0 else []
        for tag, slot in left.items():
            if slot not in stay:
                self._chain.discard(tag)

    def rollback(self, model_name: str) -> Deployment:
        """Let the version serve again that was replaced last. Its tables are there; its caches are warmed from them.

        After a restart, it is the version below the one that serves, whose tables are used if they are still there.

        Returns:
            What serves now. What served before is kept in its place.

        Raises:
            UnknownModelError: no model of this name is deployed.
            ConflictError: there is no version to go back to, or another change of the model is under way.
            DatabaseError, DeviceError, ModelFileError: it cannot be put into service. What served goes on to serve.
        """
        self._reopen()
        if self._closed:
            raise refusal(self, "the parameter server")
        with self._live.changing(model_name, "rolling back"), self.metrics.changing(model_name, "rollback"):
            serving = self.model(model_name)
            kept = self._live.kept(model_name)
            if kept:

                def stay(versions: list[str]) -> list[str]:
                    return [one for one in versions if one != serving.version]

                deployed = kept[-1].renewed()
                try:
                    self._updates.start(deployed)  # and no wait: what serves now is worse than rows that come in a moment
                    self._live.serve(deployed, stay, "keep" if serving.config.keep_versions else "drop", kept[-1])
                except BaseException:
                    deployed.close("keep")
                    raise
            else:
                below = [one for one in self.catalog.versions(model_name) if int(one) < int(serving.version)]
                if not below:
                    raise ConflictError(
                        f"rolling back model {model_name!r}: there is no version to go back to; version {serving.version} "
                        "serves, none was replaced, and there is none below it"
                    )
                self._deploy(model_name, below[-1], None, False)
        return self.model(model_name)

    def undeploy(self, model_name: str, version: str | None = None) -> None:
        """Take a model out of service and free its caches and its tables in the hash map; Redis and RocksDB keep theirs.

        New lookups are refused at once, and running ones are waited for. Those that still run after 10 s keep what they read,
        and answer from it; it is freed when the last of them has ended, and the name can be deployed again then. So do captured
        lookups, until their graphs are gone.

        Args:
            version: take only this one out of service. If it serves, the highest of the others does from then on.

        Raises:
            UnknownModelError: no model of this name is deployed.
            UnknownVersionError: it is not deployed in this version.
            ConflictError: the version is the only one, or another change of the model is under way.
        """
        self.model(model_name)
        with self._live.changing(model_name, "undeploying"), self.metrics.changing(model_name, "undeploy"):
            for deployment in self._live.withdraw(model_name, version):
                self._live.retire(model_name, deployment, "release")
            if version is None:
                self._live.drop_kept(model_name, self._live.kept(model_name), "release")

    def index(self) -> list[IndexEntry]:
        """Every version of every model that is known, and whether it answers lookups. Model files are not read.

        Raises:
            ModelFileError: the models cannot be listed.
        """
        return self._watch.index()

    def change_of(self, model_name: str) -> str:
        """What is being done to a model now, such as `deploying`; empty if nothing is."""
        return self._live.change_of(model_name)

    def poll(self, *, progress: Progress | None = None) -> dict[str, Exception | None]:
        """Look at the files of all models once, and deploy what they have that was not deployed yet.

        That is: models that are new or configured otherwise, new versions that the `version_policy` chooses, and files that
        were replaced. A model that is gone from the catalog is undeployed. What somebody rolled back or undeployed stays so
        until its files change. Files that cannot be loaded are tried again after a pause that grows, or when they have changed.

        Args:
            progress: hears how far the loading is.

        Returns:
            The models that changed (None), and those that could not be changed and why.

        Raises:
            ModelFileError: the models cannot be listed.
        """
        outcome: dict[str, Exception | None] = {}
        for name, gone in self._watch.differing():
            try:
                if gone:
                    self.undeploy(name)
                else:
                    self.deploy(name, progress=progress)
                outcome[name] = None
            except ConflictError as error:
                _log.debug("polling model %r: it is left for the next time: %s", name, error)
            except Exception as error:  # noqa: BLE001 - the other models are not concerned
                outcome[name] = error
        return outcome

    @_on_the_next_version
    def refresh(self, model_name: str, share: float | None = None) -> dict[str, RefreshReport]:
        """Read the vectors of all resident keys again, in place, on every device of a model, and return when that is done.

        Lookups go on. One refresh of a model runs at a time; calls that come meanwhile share the next.

        Args:
            share: of the time that it may spend on databases and devices, above 0, at most 1; None: `refresh_device_share`.

        Returns:
            By table: how many resident keys got their current vector, and how many were erased because no database has them.

        Raises:
            UnknownModelError: the model is not deployed.
            NotReadyError: it was taken out of service meanwhile. Where another version took over, that is refreshed instead.
            DatabaseError: the databases failed; keys that were not reached keep their vectors.
        """
        return self.model(model_name).refresh(share)

    def updates(self) -> list[TableStatus]:
        """How far each table has followed the log of its updates, in every version in service or about to take over.

        What is applied to a table up to a position is what every lookup gets that starts after this has said so.
        """
        return self._updates.status()

    def stats(self) -> ServerStatistics:
        """What the server holds and has done: sizes, hit rates and times by model, table and tier; devices and queues.

        Waits for no database and no device. What they must be asked for is asked in the background, at most every 15 s and only
        while somebody calls this: it is None in the first answer, and later ones say how old it is.

        Raises:
            NotReadyError: the server is closed.
            ForkedProcessError: it was made before this process was forked.
        """
        self._reopen()
        if self._closed:
            raise refusal(self, "the parameter server")
        return self._survey.statistics()

    def drain(self, timeout_s: float = 10.0) -> bool:
        """Wait until background insertions and promotions are done; False when the timeout comes first."""
        return all([*(deployment.drain(timeout_s) for deployment in self._live.all()), self._chain.drain(timeout_s)])

    def close(self) -> None:
        """Let running lookups end, free the caches and close the databases. Closing twice changes nothing."""
        self._close(None)

    def _close(self, timeout_s: float | None) -> None:
        """As `close`; a model that is being loaded on another thread is waited for only so long, and then fails."""
        self._reopenable = {}
        with self._closing:
            if self._closed:
                return
            deployments = self._live.close(timeout_s)
            self._closed = True
            self._survey.close()
            if self._recorder is not None:
                self._recorder.close()
            for deployment in deployments:
                deployment.close()
            self._updates.close()
            self._chain.close()
            POOL.end()  # those of another HPS of this process start again

    def disown(self) -> None:
        """In a forked child: refuse every call, and close nothing that is the parent's."""
        self._closing = threading.Lock()
        self._closed = True
        serving = self._live.serving
        self._disowned = self._live.disown(), self._updates.disown()  # kept: to free a cache would call its device
        shared = [isinstance(database, SharedDatabase) for database in self._chain.databases]
        if shared and all(shared) and not any(one.caches or one.chain is not self._chain for one in serving.values()):
            self._reopenable = serving

    def _reopen(self) -> None:
        """In a forked child: open the shared databases anew, with the versions that served."""
        with self._closing:
            if not self._reopenable:
                return
            self.metrics = Metrics()
            self._updates = LiveUpdates(self.config, self.metrics)  # of what is deployed here; the parent's stay the parent's
            chain, self._targets = open_databases(self.config, self.metrics)
            deployments = {}
            for name, deployment in self._reopenable.items():
                for table in deployment.tables:
                    chain.open_table(table)
                session: Session = DirectSession(deployment.tables, chain, self.metrics)
                sessions = dict.fromkeys(deployment.devices, session)
                deployments[name] = replace(deployment, sessions=sessions, chain=chain, ends=[])
            self._chain = chain
            self._live = LiveModels(deployments)
            self._survey = Survey(self._live, self.metrics, self._updates.status)
            self._watch = CatalogWatch(self.catalog, self._live)
            self._closed, self._reopenable = False, {}
            disown_in_children(self)
            close_at_exit(self, lambda server: server._close(_EXIT_WAIT_S))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()


def _named(
    deployment: Deployment, session: Session, tables: Mapping[Any, Any], out: Mapping[Any, Any] | None, with_found: bool
) -> list[Segment]:
    return named_segments(
        tables,
        out,
        deployment.table_index,
        deployment.indices,
        deployment.tables,
        on_cuda=session.on_cuda,
        with_found=with_found,
    )


def _same_settings(one: ModelConfig, other: ModelConfig) -> bool:
    """Whether a version is deployed in the same way by both: by all but what chooses versions."""
    return one.model_copy(update=_NOT_OF_A_VERSION) == other.model_copy(update=_NOT_OF_A_VERSION)


def _other_tables(there: ModelConfig, config: ModelConfig) -> str:
    """What of the tables of a version, or of where their rows are, is not the same; empty if all is."""
    for what, old, new in (
        ("tables", there.embedding_table_names, config.embedding_table_names),
        ("widths", there.embedding_vecsize_per_table, config.embedding_vecsize_per_table),
        ("embedding_cache_type", there.embedding_cache_type, config.embedding_cache_type),
    ):
        if old != new:
            return f"got {what} {new}, but version {config.version} serves with {old}"
    return ""
