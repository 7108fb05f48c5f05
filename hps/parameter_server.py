"""The public face: models by name, and the lookups of their tables."""

import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal, Self, overload

import numpy as np

from hps.configuration.hugectr_structs import ParameterServerConfig
from hps.configuration.load import Configuration, ModelConfig, load_configuration
from hps.databases.base import SharedDatabase
from hps.deployment import Deployment, choose_cache, deploy, open_databases
from hps.errors import InvalidInputError, NotReadyError, UnknownModelError
from hps.lifetimes import close_at_exit, disown_in_children, refusal
from hps.lookup.coalescing import FetchCoalescer
from hps.lookup.session import DirectSession, Session
from hps.metrics import Metrics
from hps.progress import Progress
from hps.tensors.segments import (
    Segment,
    as_host_keys,
    as_host_vectors,
    concatenated_segments,
    named_segments,
    refuse_repeated_tables,
    tensor_segment,
)
from hps.types import BoolArray, FloatArray

_log = logging.getLogger(__name__)
_RELEASE_PAUSE_S = 0.1  # where a table's release fails at once, and not after a wait
_EXIT_WAIT_S = 5.0  # for a model that is being loaded when the interpreter ends


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
        self._deployments: dict[str, Deployment] = {}
        self._leaving: dict[str, Deployment] = {}  # undeployed, while their last lookups still run
        self._changing = threading.RLock()  # deploying or undeploying
        self._closed = False
        self._reopenable: dict[str, Deployment] = {}  # in a forked child, until the first call
        self._chain, self._targets = open_databases(self.config, self.metrics)
        self._coalescer = FetchCoalescer(self._chain.fetch, self.metrics)
        disown_in_children(self)
        close_at_exit(self, HPS._close_at_exit)
        if not self._chain.databases:
            _log.warning("no database is configured: keys that the embedding cache does not hold get the default vector")
        try:
            for model in self.config.models if deploy_models else ():
                self.deploy(model, progress=progress, force=force)
        except BaseException:
            self.close()
            raise

    @property
    def models(self) -> tuple[str, ...]:
        """Names of the deployed models."""
        return tuple(self._deployments or self._reopenable)

    def model(self, name: str) -> Deployment:
        """A deployed model: its tables and devices.

        Raises:
            UnknownModelError: no model of this name is deployed.
            NotReadyError: the server is closed.
            ForkedProcessError: it was made before this process was forked.
        """
        try:
            return self._deployments[name]
        except KeyError:
            if self._reopenable:
                self._reopen()
                return self.model(name)
            if self._closed:
                raise refusal(self, "the parameter server") from None
            known = ", ".join(self._deployments) or "none"
            raise UnknownModelError(f"looking up model {name!r}: it is not deployed; deployed: {known}") from None

    @overload
    def lookup(
        self, keys: Any, model_name: str, table_id: int | str, device_id: int = 0, *, return_found: Literal[False] = False
    ) -> FloatArray: ...
    @overload
    def lookup(
        self, keys: Any, model_name: str, table_id: int | str, device_id: int = 0, *, return_found: Literal[True]
    ) -> tuple[FloatArray, BoolArray]: ...
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
        deployment = self.model(model_name)
        index = deployment.table_index(table_id)
        flat = as_host_keys(keys)
        vectors: FloatArray = np.empty((flat.size, deployment.tables[index].dim), np.float32)
        found = np.empty(flat.size, np.bool_) if return_found else None
        deployment.session(device_id).lookup([Segment(index, flat, vectors, found)])
        return vectors if found is None else (vectors, found)

    def lookup_tables(
        self,
        tables: Mapping[str, Any] | Mapping[int, Any],
        model_name: str,
        device_id: int | None = None,
        *,
        out: Mapping[Any, Any] | None = None,
        return_found: bool = False,
    ) -> Any:
        """Look up several tables of a model at once; in the GPU's embedding cache with one kernel for all of them.

        Args:
            tables: keys by table name or id, as for `lookup` or, tensors, as for `lookup_fromdlpack`.
            model_name: a deployed model.
            device_id: whose embedding cache to use; None is the first of the model's devices.
            out: where the vectors go, by table, as for `lookup_fromdlpack`; new host arrays where it is not given.
            return_found: return the found-masks, too.

        Returns:
            {table: (n, dim) float32 in host memory, or what `out` has}, with the tables as they were named in the call.
            With `return_found` also {table: (n,) bool in host memory}.

        Raises:
            As `lookup`; also InvalidInputError when a table is named twice (by id and by name).
        """
        deployment = self.model(model_name)
        session = deployment.session(device_id)
        segments = named_segments(
            tables,
            out,
            deployment.table_index,
            deployment.indices,
            deployment.tables,
            on_cuda=session.on_cuda,
            with_found=return_found,
        )
        session.lookup(segments)
        vectors = dict(zip(tables, (segment.out for segment in segments), strict=True)) if out is None else dict(out)
        if return_found:
            return vectors, dict(zip(tables, (segment.found for segment in segments), strict=True))
        return vectors

    def lookup_fromdlpack(
        self,
        keys: Any,
        out_tensor: Any,
        model_name: str,
        table_id: int | str,
        device_id: int = 0,
        *,
        return_found: bool = False,
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

        Returns:
            None, or with `return_found` (n,) bool in host memory.

        Raises:
            As `lookup`; InvalidDtypeError and InvalidInputError say what was got and what is expected.
        """
        deployment = self.model(model_name)
        index = deployment.table_index(table_id)
        session = deployment.session(device_id)
        dim = deployment.tables[index].dim
        segment = tensor_segment(index, dim, keys, out_tensor, on_cuda=session.on_cuda, with_found=return_found)
        session.lookup([segment])
        return segment.found

    def lookup_concatenated(
        self,
        keys: Any,
        counts: Sequence[int],
        out_tensor: Any,
        model_name: str,
        device_id: int | None = None,
        *,
        return_found: bool = False,
    ) -> BoolArray | None:
        """Look up all tables of a model whose keys follow each other in one tensor, as Triton's HPS backend takes them.

        The quickest way for many tables: two tensors are adopted, however many tables there are.

        Args:
            keys: as for `lookup_fromdlpack`: first those of table 0, then those of table 1, and so on.
            counts: how many keys each table has, one count for every table of the model; 0 is allowed.
            out_tensor: as for `lookup_fromdlpack`: the vectors of table 0, then those of table 1, and so on.
            model_name: a deployed model.
            device_id: whose embedding cache to use; None is the first of the model's devices.
            return_found: return the found-mask.

        Returns:
            None, or with `return_found` (n,) bool in host memory, in the order of the keys.

        Raises:
            As `lookup_fromdlpack`; InvalidInputError also when the counts do not fit the model or the keys.
        """
        deployment = self.model(model_name)
        session = deployment.session(device_id)
        segments, found = concatenated_segments(
            keys, counts, out_tensor, deployment.tables, on_cuda=session.on_cuda, with_found=return_found
        )
        session.lookup(segments)
        return found

    def lookup_segments(self, model_name: str, segments: Sequence[Segment], device_id: int | None = None) -> None:
        """Look up several tables straight into arrays of the caller's own layout; for the HTTP service.

        Args:
            segments: at most one for each table, with keys (n,) int64, out (n, dim) float32 and, optionally, found (n,)
                bool: host arrays, C-contiguous.

        Raises:
            As `lookup_tables`.
        """
        deployment = self.model(model_name)
        refuse_repeated_tables(segments, deployment.tables)
        deployment.session(device_id).lookup(segments)

    def insert(self, keys: Any, vectors: FloatArray, model_name: str, table_id: int | str) -> None:
        """Add or replace vectors in every tier, online. When it returns, every lookup that starts gets the new vectors.

        Args:
            keys: (n,) integers, distinct.
            vectors: (n, dim) float32, or what NumPy reads as real numbers.

        Raises:
            InvalidInputError: keys or vectors are of the wrong kind or shape, or no database would keep them: there is none, or
                none that is persistent for a `static` or `uvm` model.
            DatabaseError: the database that holds everything failed; each key then has its old or its new vector.
        """
        deployment = self.model(model_name)
        deployment.insert(deployment.table_index(table_id), as_host_keys(keys), as_host_vectors(vectors))

    def delete(self, keys: Any, model_name: str, table_id: int | str) -> None:
        """Remove keys from every tier, online; they get the default vector from then on.

        Raises:
            DatabaseError: the database that holds everything failed; each key is then there or not.
        """
        deployment = self.model(model_name)
        deployment.delete(deployment.table_index(table_id), as_host_keys(keys))

    def deploy(self, model: ModelConfig, *, progress: Progress | None = None, force: bool = False) -> None:
        """Load a model and put it into service.

        Args:
            model: its configuration.
            progress: hears how far the loading is.
            force: load its files even where a database holds them already; its online updates are lost.

        Raises:
            InvalidInputError: a model of this name is deployed already.
            NotReadyError: one was undeployed, and lookups of it still run.
            ModelFileError, DatabaseError, DeviceError: it cannot be loaded; nothing is deployed then.
        """
        with self._changing:
            self._reopen()
            if self._closed:
                raise refusal(self, "the parameter server")
            if model.model in self._deployments:
                raise InvalidInputError(f"deploying model {model.model!r}: it is deployed already; undeploy it first")
            if model.model in self._leaving:
                raise NotReadyError(
                    f"deploying model {model.model!r}: lookups of the deployment before it still run and read its tables; try "
                    "again when they have ended"
                )
            deployed = deploy(
                model,
                self._cache_class,
                self._chain,
                self._coalescer,
                self.metrics,
                targets=replace(self._targets, force=force),
                progress=progress,
            )
            self._deployments = {**self._deployments, model.model: deployed}

    def undeploy(self, model_name: str) -> None:
        """Take a model out of service and free its caches and its tables in the hash map; Redis and RocksDB keep theirs.

        New lookups are refused at once, and running ones are waited for. Those that still run after 10 s keep what they read,
        and answer from it; it is freed when the last of them has ended, and the name can be deployed again then.

        Raises:
            UnknownModelError: no model of this name is deployed.
        """
        with self._changing:
            deployment = self.model(model_name)
            self._deployments = {name: other for name, other in self._deployments.items() if name != model_name}
            if not deployment.close():
                _log.warning("model %r: lookups still run; they keep its tables and caches until they have ended", model_name)
                self._leaving[model_name] = deployment
                name = f"hps-undeploy-{model_name}"
                threading.Thread(target=self._release, args=(model_name,), name=name, daemon=True).start()

    def _release(self, model_name: str) -> None:
        """Wait for the last lookups of an undeployed model, then let its name be used again."""
        while not self._closed and not self._leaving[model_name].close():
            time.sleep(_RELEASE_PAUSE_S)
        del self._leaving[model_name]

    def refresh(self, model_name: str) -> None:
        """Read the vectors of all resident keys again, in place, on every device of a model."""
        self.model(model_name).refresh()

    def drain(self, timeout_s: float = 10.0) -> bool:
        """Wait until background insertions and promotions are done; False when the timeout comes first."""
        return all([*(deployment.drain(timeout_s) for deployment in self._deployments.values()), self._chain.drain(timeout_s)])

    def close(self) -> None:
        """Let running lookups end, free the caches and close the databases. Closing twice changes nothing."""
        with self._changing:
            self._close()

    def _close(self) -> None:
        self._reopenable = {}
        if self._closed:
            return
        self._closed = True
        deployments, self._deployments = self._deployments, {}
        for deployment in deployments.values():
            deployment.close()
        self._chain.close()

    def _close_at_exit(self) -> None:
        """As `close`; a model that is being loaded on another thread is waited for only so long, and then fails."""
        changing = self._changing.acquire(timeout=_EXIT_WAIT_S)
        try:
            self._close()
        finally:
            if changing:
                self._changing.release()

    def disown(self) -> None:
        """In a forked child: refuse every call, and close nothing that is the parent's."""
        self._changing = threading.RLock()
        self._closed = True
        self._disowned, self._deployments = self._deployments, {}  # kept: to free a cache would call its device
        shared = [isinstance(database, SharedDatabase) for database in self._chain.databases]
        if shared and all(shared) and not any(one.caches or one.chain is not self._chain for one in self._disowned.values()):
            self._reopenable = self._disowned

    def _reopen(self) -> None:
        """In a forked child: open the shared databases anew, with the models that were in service."""
        with self._changing:
            if not self._reopenable:
                return
            self.metrics = Metrics()
            chain, self._targets = open_databases(self.config, self.metrics)
            deployments = {}
            for name, deployment in self._reopenable.items():
                for table in deployment.tables:
                    chain.open_table(table)
                session: Session = DirectSession(deployment.tables, chain, self.metrics)
                deployments[name] = replace(deployment, sessions=dict.fromkeys(deployment.devices, session), chain=chain)
            self._chain, self._coalescer = chain, FetchCoalescer(chain.fetch, self.metrics)
            self._deployments, self._leaving, self._closed, self._reopenable = deployments, {}, False, {}
            disown_in_children(self)
            close_at_exit(self, HPS._close_at_exit)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()
