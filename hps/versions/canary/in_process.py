"""Canaries and shadows of calls in this process, which say whom they are for: `with server.routed("user-17"): ...`.

A call that does not say so is answered by the serving version: a request of the caller may be several calls, and no answer may
mix two versions.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from time import perf_counter_ns
from typing import Final, TypeVar

import numpy as np

from hps.engine.session import Session
from hps.errors import HPSError, InvalidInputError, NotReadyError
from hps.ground.threads.workers import WorkQueue
from hps.statistics.metrics import Metrics
from hps.tensors.bags import Pooling
from hps.tensors.batch import Batch
from hps.types import Scores
from hps.versions.canary.rollouts import LiveRollout, Rollouts
from hps.versions.deployment import Deployment
from hps.versions.live_models import LiveModels

_SENDER: Final[ContextVar[bytes | None]] = ContextVar("hps_sender", default=None)
_T = TypeVar("_T")


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
        sender, rollout = _SENDER.get(), self._rollouts.active.get(name)
        if sender is None or rollout is None or rollout.record.plan.mode == "shadow" or not rollout.selection.takes(sender):
            return None
        return self._live.deployed(name, rollout.record.version)

    def run(self, deployment: Deployment, session: Session, batch: Batch, start_ns: int, *, wait: bool) -> None:
        """Look a batch up, count it, and let the other version answer it too if the rollout compares it.

        If the new version fails, the serving one answers.
        """

        def look_up(by: Deployment) -> None:
            (session if by is deployment else _session_like(deployment, session, by)).run(batch, start_ns, wait=wait)

        rollout = self._rollout_of(deployment)
        if rollout is None:
            look_up(deployment)
            return
        if self._counted(rollout, deployment, look_up, lambda by: by.dims == deployment.dims) is not deployment:
            return
        if (other := self._compared_with(rollout, deployment)) is not None and wait and other.dims == deployment.dims:
            self._compare_later(rollout, deployment, other, batch)

    def score(self, deployment: Deployment, score: Callable[[Deployment], Scores]) -> Scores:
        """Score a request as `run` looks a batch up.

        Args:
            score: scores it by a version; the request belongs to the caller until it returns.
        """
        rollout = self._rollout_of(deployment)
        if rollout is None:
            return score(deployment)
        answers: dict[str, Scores] = {}

        def answer(by: Deployment) -> None:
            answers[by.version] = score(by)

        answered = self._counted(rollout, deployment, answer, lambda by: by.scores is not None)
        return answers[answered.version]

    def close(self) -> None:
        """End the thread that compares."""
        with self._lock:
            queue, self._queue = self._queue, None
        if queue is not None:
            queue.abandon()

    def _rollout_of(self, deployment: Deployment) -> LiveRollout | None:
        rollout = None if _SENDER.get() is None else self._rollouts.active.get(deployment.config.model)
        if rollout is None or deployment.version not in (rollout.record.serving, rollout.record.version):
            return None
        return rollout

    def _counted(
        self,
        rollout: LiveRollout,
        deployment: Deployment,
        call: Callable[[Deployment], None],
        can_answer: Callable[[Deployment], bool],
    ) -> Deployment:
        """Make a call by a version, or by the serving one if the new one fails; count it, and return which answered."""
        is_new, began = deployment.version == rollout.record.version, perf_counter_ns()
        counts = rollout.counts.new if is_new else rollout.counts.old
        try:
            call(deployment)
        except HPSError as error:
            serving, retired = self._live.serving.get(deployment.config.model), isinstance(error, NotReadyError)
            if not is_new:
                if not (retired or isinstance(error, InvalidInputError)):
                    with rollout.lock:
                        counts.errors += 1
                raise
            if serving is None or not can_answer(serving):
                raise
            call(serving)
            if not retired:
                with rollout.lock:
                    counts.errors += 1
            return serving
        taken = perf_counter_ns() - began
        with rollout.lock:
            counts.succeeded(taken, taken)
        return deployment

    def _compared_with(self, rollout: LiveRollout, deployment: Deployment) -> Deployment | None:
        record, name, sender = rollout.record, deployment.config.model, _SENDER.get()
        if record.plan.mode == "shadow":
            if deployment.version == record.serving and sender is not None and rollout.selection.takes(sender):
                return self._live.deployed(name, record.version)
        elif deployment.version == record.version and record.plan.config.compare:
            return self._live.serving.get(name)
        return None

    def _compare_later(self, rollout: LiveRollout, deployment: Deployment, other: Deployment, batch: Batch) -> None:
        """Copy a batch and its answer, and let the other version answer the copy on a thread of its own."""
        arrays = [*batch.keys, *batch.outs]
        if not all(isinstance(array, np.ndarray) for array in arrays):
            return  # on a device: copying it would delay the caller
        config = rollout.record.plan.config
        size = sum(array.nbytes for array in arrays)
        with self._lock:
            if self._queue is None:
                self._queue = WorkQueue("comparisons", config.queue_requests, 1, self._metrics)
            queue, fits = self._queue, self._bytes + size <= config.queue_bytes
            self._bytes += size if fits else 0
        copied = None
        if fits:
            answers = [np.array(out) for out in batch.outs]
            poolings = tuple(map(_copied, batch.poolings))
            keys = [np.array(key) for key in batch.keys]
            copied = Batch(tuple(batch.tables), tuple(batch.sizes), keys, [np.empty_like(out) for out in answers], (), poolings)

        def compare() -> None:
            try:
                if copied is not None:
                    self._compare(rollout, deployment, other, copied, answers)
            finally:
                with self._lock:
                    self._bytes -= size

        if not fits or not queue.submit(compare):
            with self._lock:
                self._bytes -= size if fits else 0
            with rollout.lock:
                rollout.counts.compared.dropped += 1

    def _compare(
        self, rollout: LiveRollout, deployment: Deployment, other: Deployment, batch: Batch, answers: list[np.ndarray]
    ) -> None:
        began = perf_counter_ns()
        shadow = other.version == rollout.record.version
        try:
            other.session(other.device(None)).run(batch)
        except HPSError:
            with rollout.lock:
                rollout.counts.compared.failed += 1
                rollout.counts.new.errors += shadow
            return
        taken = perf_counter_ns() - began
        old, new = (answers, list(batch.outs)) if shadow else (list(batch.outs), answers)
        with rollout.lock:
            if shadow:
                rollout.counts.new.succeeded(taken, taken)
            rollout.counts.compared.compare(old, new)


def _session_like(deployment: Deployment, session: Session, by: Deployment) -> Session:
    """Return the session of another version on the same device."""
    return by.session(next(device for device, found in deployment.sessions.items() if found is session))


def _copied(pooling: Pooling) -> Pooling:
    offsets, weights = (None if array is None else np.array(array) for array in (pooling.offsets, pooling.weights))
    return replace(pooling, offsets=offsets, weights=weights)
