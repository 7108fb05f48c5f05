"""Lookups of fixed tensors that follow their model from version to version: prepared ones, and CUDA graphs."""

import operator
import threading
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter_ns
from types import TracebackType
from typing import Any, Self, TypeAlias

import numpy as np

from hps.engine.session import RecordedLookup
from hps.errors import ConflictError, InvalidInputError, NotReadyError
from hps.ground.threads.lifetimes import disown_in_children, refusal
from hps.tensors.array_checks import adopt_keys
from hps.tensors.batch import Batch, kept_batch
from hps.types import DeviceArray
from hps.versions.deployment import Deployment

Answer: TypeAlias = Callable[..., None]
"""`HPS._answer`."""


class CapturedLookup:
    """A captured lookup of fixed tensors. *One per thread.* A context manager; created by `HPS.capture`.

    Every replay that starts after an `insert` has returned reads the new vectors. After another version has taken over, the
    next replay captures the lookup again from that version.

    Until closed, it keeps the version it was captured from in memory, even after `undeploy`.
    """

    def __init__(self, serving: Callable[[], Deployment], record: Callable[[Deployment], RecordedLookup]) -> None:
        self._serving = serving
        self._record = record
        self._deployment = serving()
        self._recorded: RecordedLookup | None = record(self._deployment)

    def replay(self) -> None:
        """Look up the keys in the tensor at the time when the stream reaches the graph. Does not wait.

        Runs on the current stream of the keys' framework.

        Raises:
            NotReadyError: closed.
            DatabaseError: the database failed in an earlier replay, so unread keys got the default vector.
            UnknownModelError: the model was undeployed.
            InvalidInputError: the serving version cannot answer without waiting.
        """
        if self._recorded is None:
            raise NotReadyError("replaying a captured lookup: it is closed; capture another")
        if (serving := self._serving()) is not self._deployment:
            recorded = self._record(serving)
            self._recorded.close()
            self._deployment, self._recorded = serving, recorded
        self._recorded.launch()

    def close(self) -> None:
        """Free the graph after its last replay. Idempotent."""
        if self._recorded is not None:
            self._recorded.close()
            self._recorded = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()


class PreparedLookup:
    """A lookup of fixed tensors, checked and packed once. A context manager; created by `HPS.prepare`.

    *One thread at a time*: any thread may run it, but a run during another raises `ConflictError`, since both would write the
    same outputs. Each thread of a serving loop prepares its own. Runs of different prepared lookups share the model's
    workspaces with all other lookups.

    A run answers as `HPS.lookup_tables` does with the current keys of the tensors: from the version that serves when it starts.
    It sees every `insert` that has returned, and is counted, traced and recorded. After a takeover, the next run binds the
    tensors to the new version.

    Attributes:
        keys: by table, (n,) int64: the caller's tensors, or buffers that the caller fills.
        vectors: by table, (n, dim) float32: the caller's tensors, or buffers that a run writes.
        found: by table, (n,) bool, True for keys that a tier has; empty without `return_found`.
        all_keys, all_vectors: flat buffers behind `keys` and `vectors`, in the order of the tables, so that one copy fills all
            tables; None if any table has the caller's tensor.
    """

    def __init__(
        self,
        serving: Callable[[], Deployment],
        answer: Answer,
        device_id: int,
        tables: Mapping[Any, Any],
        out: Mapping[Any, Any] | None,
        with_found: bool,
    ) -> None:
        self._serving = serving
        self._answer = answer
        self._device_id = device_id
        self._running = threading.Lock()
        self._closed = False
        if not tables:
            raise InvalidInputError("preparing a lookup: got no tables, expected at least one")
        self._deployment = serving()
        self._session = self._deployment.session(device_id)
        self._dims = [self._deployment.dims[self._deployment.table_index(name)] for name in tables]
        cache, on_cuda = self._session.cache, self._session.on_cuda
        new = np.zeros if cache is None else cache.new_array
        sizes = [_size_of(given) for given in tables.values()]
        self.keys, self.all_keys = _with_buffers(tables, sizes, new((sum(filter(None, sizes)),), np.int64))
        counts = [adopt_keys(keys, on_cuda)[1] for keys in self.keys.values()]
        self.vectors: Mapping[Any, DeviceArray]
        self.all_vectors: DeviceArray | None = None
        if out is None:
            floats = list(map(operator.mul, counts, self._dims))
            flat, self.all_vectors = _with_buffers(tables, floats, new((sum(floats),), np.float32))
            self.vectors = {name: part.reshape(-1, dim) for (name, part), dim in zip(flat.items(), self._dims, strict=True)}
        else:
            self.vectors = dict(out)
        self.found: Mapping[Any, DeviceArray] = {}
        if with_found:
            self.found, _ = _with_buffers(tables, counts, new((sum(counts),), np.bool_))
        self._batch = self._bind()
        disown_in_children(self)

    def run(self) -> Mapping[Any, DeviceArray]:
        """Look up the current keys of the tensors, and wait for the answer.

        Tensors on the GPU are read and written in the order of the current stream of their framework.

        Returns:
            `vectors`.

        Raises:
            ConflictError: another thread is running it; nothing was written.
            NotReadyError: closed; `ForkedProcessError` in a forked child.
            UnknownModelError, UnknownTableError, UnknownDeviceError: the model was undeployed, or the serving version lacks a
                table, or the device.
            InvalidInputError: the serving version has a table with another width.
            TooManyKeysError, WorkspaceTimeoutError, DatabaseError: as `HPS.lookup`; outputs are then unspecified.
        """
        started = perf_counter_ns()
        if not self._running.acquire(False):
            raise ConflictError("running a prepared lookup: another thread is running it; prepare one for each thread")
        try:
            while True:
                if self._closed:
                    raise refusal(self, "a prepared lookup")
                deployment = self._serving()
                if deployment is not self._deployment:
                    self._rebind(deployment)
                try:
                    self._answer(deployment, self._session, self._batch, started)
                    return self.vectors
                except NotReadyError:
                    if self._serving() is deployment:
                        raise
        finally:
            self._running.release()

    def close(self) -> None:
        """Refuse further runs; a run in another thread ends. The tensors stay the caller's. Idempotent."""
        self._closed = True

    def disown(self) -> None:
        """Refuse every call in a forked child."""
        self._running, self._closed = threading.Lock(), True

    def _rebind(self, deployment: Deployment) -> None:
        """Bind the tensors to the version or the caches that have taken over."""
        before = self._deployment, self._session
        self._deployment, self._session = deployment, deployment.session(self._device_id)
        try:
            self._batch = self._bind()
        except BaseException:
            self._deployment, self._session = before
            raise

    def _bind(self) -> Batch:
        deployment, session = self._deployment, self._session
        for name, dim in zip(self.keys, self._dims, strict=True):
            if (now := deployment.dims[deployment.table_index(name)]) != dim:
                raise InvalidInputError(
                    f"running a prepared lookup of model {deployment.config.model!r}: table {name!r} now has vectors of "
                    f"{now} elements, expected {dim}; prepare another"
                )
        batch = kept_batch(
            self.keys, self.vectors, self.found, deployment.table_index, deployment.tables, on_cuda=session.on_cuda
        )
        session.check(batch)
        return batch

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()


def _size_of(given: Any) -> int | None:
    """Return the size that a caller requests; None for a tensor."""
    if isinstance(given, bool) or not isinstance(given, (int, np.integer)):
        return None
    if given < 0:
        raise InvalidInputError(f"preparing a lookup: got a size of {given}, expected at least 0")
    return int(given)


def _with_buffers(
    tables: Mapping[Any, Any], sizes: Sequence[int | None], buffer: DeviceArray
) -> tuple[dict[Any, DeviceArray], DeviceArray | None]:
    """Return the tables with a slice of a buffer for each size, and the buffer if every table has a slice."""
    start, placed = 0, dict(tables)
    for name, size in zip(tables, sizes, strict=True):
        if size is not None:
            placed[name] = buffer[start : start + size]
            start += size
    return placed, None if None in sizes else buffer
