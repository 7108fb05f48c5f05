"""Canaries and shadows of calls in this process, which say whom they are for: `with server.routed("user-17"): ...`.

A call that does not say so is answered by the serving version: a request of the caller may be several calls, and no answer may
mix two versions.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from time import perf_counter_ns
from typing import Any, Final, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from hps.engine.session import Session
from hps.errors import HPSError, InvalidInputError, NotReadyError, UnknownDeviceError, UnknownModelError, UnknownTableError
from hps.ground.threads.workers import WorkQueue
from hps.statistics.metrics import Metrics
from hps.tensors.bags import Pooling
from hps.tensors.batch import Batch
from hps.types import Scores
from hps.versions.canary.rollouts import LiveRollout, Rollouts
from hps.versions.deployment import Deployment
from hps.versions.live_models import LiveModels

_SENDER: Final[ContextVar[bytes | None]] = ContextVar("hps_sender", default=None)
_TRIED: Final[ContextVar[LiveRollout | None]] = ContextVar("hps_tried", default=None)
"""The canary whose new version answers the call that is under way."""

_OF_CALLERS: Final = (InvalidInputError, UnknownDeviceError, UnknownModelError, UnknownTableError)
"""Errors of calls that are wrong themselves, if the serving version has them, too."""

Array: TypeAlias = npt.NDArray[Any]
Inputs: TypeAlias = Mapping[str, Array]
Answers: TypeAlias = Mapping[Any, Array]


class Score(Protocol):
    def __call__(self, deployment: Deployment, inputs: Inputs, /, *, counted: bool = True) -> Scores: ...


@contextmanager
def sent_by(sender: str | bytes) -> Iterator[None]:
    """Within this context, calls of this thread or task are for this user."""
    token = _SENDER.set(sender.encode() if isinstance(sender, str) else bytes(sender))
    try:
        yield
    finally:
        _SENDER.reset(token)


class RoutedCalls:
    """Answers calls that say whom they are for. *Thread-safe.* Used only while a rollout runs."""

    def __init__(self, rollouts: Rollouts, live: LiveModels, metrics: Metrics) -> None:
        self._rollouts = rollouts
        self._live = live
        self._metrics = metrics
        self._lock = threading.Lock()
        self._bytes = 0
        self._queue: WorkQueue | None = None

    def version(self, name: str) -> Deployment | None:
        """Return the new version of a model's canary if it answers this call; else None."""
        _TRIED.set(None)
        sender, rollout = _SENDER.get(), self._rollouts.active.get(name)
        if not sender or rollout is None or rollout.record.plan.mode == "shadow" or not rollout.selection.takes(sender):
            return None
        found = self._live.deployed(name, rollout.record.version)
        _TRIED.set(None if found is None else rollout)
        return found

    def rerouted(self, error: HPSError) -> AbstractContextManager[None] | None:
        """Return a context in which the serving version answers a call again; None unless a new version has failed it."""
        # The whole call is repeated: the versions may have other tables, so not even its arrays are the same.
        rollout = _TRIED.get()
        _TRIED.set(None)
        return None if rollout is None else self._rerouted(rollout, error)

    @contextmanager
    def _rerouted(self, rollout: LiveRollout, error: HPSError) -> Iterator[None]:
        counts = not isinstance(error, NotReadyError)  # it was retired
        token = _SENDER.set(None)
        try:
            yield
        except HPSError:
            counts = counts and not isinstance(error, _OF_CALLERS)
            raise
        finally:
            _SENDER.reset(token)
            with rollout.lock:
                rollout.counts.new.errors += counts

    def run(self, deployment: Deployment, session: Session, batch: Batch, start_ns: int, *, wait: bool) -> None:
        """Look a batch up, count it, and let the other version answer it too if the rollout compares it."""
        if (rollout := self._rollout_of(deployment)) is None:
            session.run(batch, start_ns, wait=wait)
            return
        with self._counting(rollout, deployment):
            session.run(batch, start_ns, wait=wait)
        other = self._compared_with(rollout, deployment)
        if other is not None and wait and _layout(other) == _layout(deployment):
            self._compare_batch(rollout, other, batch)

    def score(self, deployment: Deployment, read: Callable[[Deployment], Inputs], score: Score) -> Scores:
        """Score a request as `run` looks a batch up.

        Args:
            read: returns the inputs of the request for a version: arrays of the caller, who may change them afterwards.
            score: scores such inputs by a version; `counted` is False for a comparison.
        """
        if (rollout := self._rollout_of(deployment)) is None:
            return score(deployment, read(deployment))
        with self._counting(rollout, deployment):
            inputs = read(deployment)
            found = score(deployment, inputs)
        if (other := self._compared_with(rollout, deployment)) is not None:
            alike = other.config.transform == deployment.config.transform
            self._compare_scores(rollout, other, inputs, found, score, None if alike else read)
        return found

    def close(self) -> None:
        """End the thread that compares."""
        with self._lock:
            queue, self._queue = self._queue, None
        if queue is not None:
            queue.abandon()

    def _rollout_of(self, deployment: Deployment) -> LiveRollout | None:
        rollout = self._rollouts.active.get(deployment.config.model) if _SENDER.get() else None
        if rollout is None or deployment.version not in (rollout.record.serving, rollout.record.version):
            return None
        return rollout

    @contextmanager
    def _counting(self, rollout: LiveRollout, deployment: Deployment) -> Iterator[None]:
        """Count a call that a version answers. `rerouted` counts what the new version fails."""
        is_new, began = deployment.version == rollout.record.version, perf_counter_ns()
        counts = rollout.counts.new if is_new else rollout.counts.old
        try:
            yield
        except HPSError as error:
            with rollout.lock:
                counts.errors += not (is_new or isinstance(error, (NotReadyError, *_OF_CALLERS)))
            raise
        taken = perf_counter_ns() - began
        _TRIED.set(None)
        with rollout.lock:
            counts.succeeded(taken, taken)

    def _compared_with(self, rollout: LiveRollout, deployment: Deployment) -> Deployment | None:
        record, name, sender = rollout.record, deployment.config.model, _SENDER.get()
        if record.plan.mode == "shadow":
            if deployment.version == record.serving and sender and rollout.selection.takes(sender):
                return self._live.deployed(name, record.version)
        elif deployment.version == record.version and record.plan.config.compare:
            return self._live.serving.get(name)
        return None

    def _compare_batch(self, rollout: LiveRollout, other: Deployment, batch: Batch) -> None:
        arrays = [*batch.keys, *batch.outs]
        if not all(isinstance(array, np.ndarray) for array in arrays):
            return  # on a device: copying it would delay the caller

        def copy() -> Callable[[], Answers]:
            poolings = tuple(map(_copied, batch.poolings))
            keys, outs = [np.array(key) for key in batch.keys], [np.empty_like(out) for out in batch.outs]
            copied = Batch(tuple(batch.tables), tuple(batch.sizes), keys, outs, (), poolings)

            def look_up() -> Answers:
                other.session(other.device(None)).run(copied)
                return dict(enumerate(copied.outs))

            return look_up

        self._compare_later(rollout, other, arrays, dict(enumerate(batch.outs)), copy)

    def _compare_scores(
        self,
        rollout: LiveRollout,
        other: Deployment,
        inputs: Inputs,
        found: Scores,
        score: Score,
        read: Callable[[Deployment], Inputs] | None,
    ) -> None:
        """Let the other version score a request; `read` is set if its transform makes other inputs of it."""

        def copy() -> Callable[[], Answers]:
            try:
                given = inputs if read is None else read(other)
            except HPSError as error:
                return partial(_fail, error)
            copied = {name: np.array(array) for name, array in given.items()}
            return lambda: score(other, copied, counted=False).outputs

        self._compare_later(rollout, other, [*inputs.values(), *found.outputs.values()], found.outputs, copy)

    def _compare_later(
        self,
        rollout: LiveRollout,
        other: Deployment,
        arrays: Sequence[Array],
        answers: Answers,
        copy: Callable[[], Callable[[], Answers]],
    ) -> None:
        """Let the other version answer a copy of a call on a thread of its own, and compare the answers.

        Args:
            arrays: all arrays of the call, which bound the memory of the copies.
            answers: its answers, which belong to the caller.
            copy: copies its inputs, and returns what answers them.
        """
        config = rollout.record.plan.config
        size = sum(array.nbytes for array in arrays)
        with self._lock:
            if self._queue is None:
                self._queue = WorkQueue("comparisons", config.queue_requests, 1, self._metrics)
            queue = self._queue
            fits = self._bytes + size <= config.queue_bytes and queue.waiting() < config.queue_requests
            self._bytes += size if fits else 0
        if fits:
            mine, answer = {name: np.array(array) for name, array in answers.items()}, copy()

        def compare() -> None:
            try:
                self._compare(rollout, other, mine, answer)
            finally:
                with self._lock:
                    self._bytes -= size

        if not fits or not queue.submit(compare):
            with self._lock:
                self._bytes -= size if fits else 0
            with rollout.lock:
                rollout.counts.compared.dropped += 1

    def _compare(self, rollout: LiveRollout, other: Deployment, answers: Answers, answer: Callable[[], Answers]) -> None:
        began = perf_counter_ns()
        shadow = other.version == rollout.record.version
        try:
            found = answer()
        except HPSError as error:
            with rollout.lock:
                rollout.counts.compared.failed += 1
                rollout.counts.new.errors += shadow and not isinstance(error, NotReadyError)
            return
        taken = perf_counter_ns() - began
        old, new = (answers, found) if shadow else (found, answers)
        with rollout.lock:
            if shadow:
                rollout.counts.new.succeeded(taken, taken)
            rollout.counts.compared.compare(*([of[name] for name in sorted(of)] for of in (old, new)))


def _fail(error: HPSError) -> Answers:
    raise error


def _layout(deployment: Deployment) -> list[tuple[str, int]]:
    """Return names and widths of the tables, by which a batch means the same for two versions."""
    return [(table.table_name, table.dim) for table in deployment.tables]


def _copied(pooling: Pooling) -> Pooling:
    offsets, weights = (None if array is None else np.array(array) for array in (pooling.offsets, pooling.weights))
    return replace(pooling, offsets=offsets, weights=weights)
