"""Dynamic batching: requests that wait at the same time are answered by one lookup and one call of the network."""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from hps.errors import DeadlineError, HPSError, InvalidInputError, NetworkBusyError, NetworkError, NotReadyError
from hps.ground.threads.workers import new_thread
from hps.scoring.scorer import Outputs, Request, Scorer, ScoreTimes
from hps.statistics.scores import ScoreCounters

_log = logging.getLogger(__name__)
_MOST_WAITING = 4096
_POLL_S = 0.5
_MOST_JOINED_S = 60.0  # in the network of a batch that a call in process waits for


@dataclass(slots=True, eq=False)
class ScoreCall:
    """A queued request.

    Attributes:
        done: called once, in any thread, with the outputs or why there are none, and the times of the batch. Raises nothing.
        due_ns: deadline for the start of its batch, as `perf_counter_ns`; 0: none.
    """

    request: Request
    done: Callable[[Outputs | Exception, ScoreTimes | None], None]
    due_ns: int = 0


class Batcher:
    """Scores requests of one deployment and device in batches, by a thread for each of its scorers. *Thread-safe.*

    A batch takes the waiting requests in order, up to `max_samples` and the maximum number of keys of each table. Requests with
    other free sizes than the oldest are left to later batches. A batch starts when a scorer has ended its last one, or, with
    a delay, when the oldest request has waited that long or the batch is full.

    If the network fails on a batch, or refuses keys that were computed for it, each request is scored alone, so that no request
    fails because of another.

    Args:
        scorers: instances of the network, each with memory of its own.
        max_delay_us: how long a batch waits for more requests.
        alone: each request is a batch of its own.
    """

    def __init__(
        self,
        name: str,
        scorers: Sequence[Scorer],
        counters: ScoreCounters,
        max_samples: int,
        max_delay_us: int = 0,
        *,
        alone: bool = False,
    ) -> None:
        self._name = name
        self._scorers = tuple(scorers)
        self._counters = counters
        self._max_samples = max_samples
        self._alone = alone
        self._delay_s = max_delay_us * 1e-6
        self._limits = self._scorers[0].signature.limits
        self._waiting: deque[tuple[ScoreCall, float]] = deque()
        self._samples = 0
        self._changed = threading.Condition()
        self._closed = False
        self._idle = 0  # threads that have no batch
        self._threads = [new_thread(f"scores-{name}", partial(self._run, scorer)) for scorer in self._scorers]
        for thread in self._threads:
            thread.start()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def is_busy(self) -> bool:
        """Whether every scorer has a batch, or requests wait."""
        return not self._idle or bool(self._waiting)

    def refuse_if_busy(self, most_s: float) -> None:
        """Check that not every scorer's batch has been in the network for too long.

        Raises:
            NetworkBusyError: each has been there for more than `most_s`.
        """
        seconds = min(
            [
                scorer.network_seconds().get(thread.ident or 0, 0.0)
                for scorer, thread in zip(self._scorers, self._threads, strict=True)
            ]
        )
        if seconds > most_s:
            raise NetworkBusyError(
                f"scoring with {self._name}: a call of its network has been under way for {seconds:.1f} s, expected at most "
                f"{most_s:g} s; requests are accepted again when it returns"
            )

    def submit(self, call: ScoreCall, most_s: float = math.inf) -> None:
        """Queue a request.

        Args:
            most_s: longest time in the network of a batch that the request is queued behind.

        Raises:
            NotReadyError: it is closed, or too many wait.
            NetworkBusyError: the batch under way has been in the network for longer than `most_s`.
        """
        try:
            self.refuse_if_busy(most_s)
        except NetworkBusyError:
            self._counters.count_refused()
            raise
        with self._changed:
            if self._closed:
                raise NotReadyError(f"scoring with {self._name}: it was undeployed")
            if len(self._waiting) >= _MOST_WAITING:
                raise NotReadyError(
                    f"scoring with {self._name}: {len(self._waiting)} requests wait; send the request again later"
                )
            self._waiting.append((call, time.monotonic()))
            self._samples += call.request.samples
            # A thread is woken only if one sleeps without a batch, or if the batch is full: while a batch runs or a delay
            # passes, it finds the request anyway.
            if self._idle or self._samples >= self._max_samples:
                self._changed.notify()

    def score(self, request: Request) -> Outputs:
        """Score a request with those that wait, and wait for its batch.

        Raises:
            NotReadyError: as for `submit`. NetworkBusyError: a batch is in the network for more than a minute. Exception: what
                the batch failed with, as of `Scorer.score`.
        """
        answers: list[Outputs | Exception] = []
        ended = threading.Lock()
        ended.acquire()

        def done(answer: Outputs | Exception, times: ScoreTimes | None) -> None:
            answers.append(answer)
            ended.release()

        self.submit(ScoreCall(request, done), _MOST_JOINED_S)
        while not ended.acquire(timeout=_POLL_S):
            self.refuse_if_busy(_MOST_JOINED_S)
        [answer] = answers
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self, timeout_s: float) -> bool:
        """Refuse further requests, and answer those that wait; False if that takes longer."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        until = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self, scorer: Scorer) -> None:
        while (batch := self._next()) is not None:
            if batch:
                self._answer(scorer, batch)
            batch.clear()  # not kept while the next one is waited for

    def _next(self) -> list[ScoreCall] | None:
        """Take the next batch; None once it is closed and nothing waits."""
        with self._changed:
            self._idle += 1
            while not self._waiting:
                if self._closed:
                    return None
                self._changed.wait(_POLL_S)
            if self._delay_s:
                until = self._waiting[0][1] + self._delay_s
                while self._samples < self._max_samples and not self._closed and (left := until - time.monotonic()) > 0:
                    self._changed.wait(left)
            self._idle -= 1
            batch: list[ScoreCall] = []
            late: list[ScoreCall] = []
            of_other_forms: list[tuple[ScoreCall, float]] = []
            samples, keys, now = 0, [0] * len(self._limits), time.perf_counter_ns()
            while self._waiting:
                call = self._waiting[0][0]
                request = call.request
                if call.due_ns and call.due_ns <= now:
                    late.append(call)
                elif batch and not self._alone and request.form != batch[0].request.form:
                    of_other_forms.append(self._waiting.popleft())
                    continue
                elif batch and (
                    self._alone
                    or samples + request.samples > self._max_samples
                    or any(have + more > most for have, more, most in zip(keys, request.keys, self._limits, strict=True))
                ):
                    break
                else:
                    batch.append(call)
                    samples += request.samples
                    keys = [have + more for have, more in zip(keys, request.keys, strict=True)]
                self._waiting.popleft()
                self._samples -= request.samples
            self._waiting.extendleft(reversed(of_other_forms))
        for call in late:
            self._counters.count_late()
            self._deliver(
                call,
                DeadlineError(f"scoring with {self._name}: the request's timeout was over before a batch could take it"),
            )
        return batch

    def _answer(self, scorer: Scorer, batch: list[ScoreCall]) -> None:
        try:
            answers, times = scorer.score([call.request for call in batch])
        except (NetworkError, InvalidInputError) as error:
            if len(batch) == 1:
                if isinstance(error, NetworkError):
                    self._counters.count_failure("network")
                self._deliver(batch[0], error)
                return
            for call in batch:
                self._answer(scorer, [call])
            return
        except Exception as error:  # noqa: BLE001 - of a tier, or a bug: this thread must not end
            for call in batch:
                self._deliver(call, error)
            return
        samples = sum(call.request.samples for call in batch)
        self._counters.count(len(batch), samples, times.looked_up_ns - times.began_ns, times.ended_ns - times.looked_up_ns)
        for call, answer in zip(batch, answers, strict=True):
            if isinstance(answer, HPSError):
                self._counters.count_failure("nan")
            self._deliver(call, answer, times)

    def _deliver(self, call: ScoreCall, answer: Outputs | Exception, times: ScoreTimes | None = None) -> None:
        try:
            call.done(answer, times)
        except Exception:  # noqa: BLE001 - of this request alone
            _log.exception("scoring with %s: delivering the scores of a request failed", self._name)
