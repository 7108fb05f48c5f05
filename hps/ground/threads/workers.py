"""The threads of the package: a bounded queue of jobs, a periodic task, a call with a timeout, or `new_thread`.

All are daemon threads. They end when their worker is closed, when its object is collected, and at the interpreter's exit; a
forked child has none of them and accepts no work. A thread that an error ends is recorded in `THREADS`, for health and metrics.
"""

import logging
import os
import queue
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from inspect import ismethod
from typing import Final, Protocol, TypeVar
from weakref import WeakMethod, finalize

from hps.errors import HPSError, NotReadyError
from hps.ground.threads.lifetimes import close_at_exit, disown_in_children

_log = logging.getLogger(__name__)
_POLL_S = 0.2  # after which an idle thread of a queue notices that it was closed
T = TypeVar("T")


class ThreadRecord:
    """Records the threads of this process that an error has ended. *Thread-safe.*

    Attributes:
        problem: why the process must be restarted: the first lasting thread that has ended; empty without any.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget all, as a forked child does, which has none of the threads."""
        self._lock = threading.Lock()
        self._ended: dict[str, int] = {}
        self.problem = ""

    def ended(self) -> dict[str, int]:
        """Return the number of threads that an error has ended, by name."""
        with self._lock:
            return dict(self._ended)

    def record(self, name: str, error: BaseException, *, lasting: bool) -> None:
        """Count and log the end of a thread."""
        with self._lock:
            self._ended[name] = self._ended.get(name, 0) + 1
            if lasting and not self.problem:
                self.problem = f"thread {name} ended unexpectedly; the log has the error, and only a restart helps"
        _log.error("thread %s ended unexpectedly%s", name, "; restart the process" if lasting else "", exc_info=error)


THREADS: Final = ThreadRecord()
"""Record of this process."""

os.register_at_fork(after_in_child=THREADS.clear)


def new_thread(name: str, run: Callable[[], object], *, lasting: bool = True) -> threading.Thread:
    """Make the daemon thread `hps-<name>`, to be started. Every thread of the package is made here.

    Args:
        lasting: whether the process depends on it: it is then not live after an error that ends the thread, which is counted
            and logged in any case.
    """
    return threading.Thread(target=_recorded, args=(run, lasting), name=f"hps-{name}", daemon=True)


def _recorded(run: Callable[[], object], lasting: bool) -> None:
    try:
        run()
    except BaseException as error:  # noqa: BLE001 - recorded for health checks
        THREADS.record(threading.current_thread().name, error, lasting=lasting)
    finally:
        del run  # an error that it has passed to its caller refers to this frame by its traceback


class Stop:
    """Signals threads to end or to wake. *Thread-safe*; finalizers may call it."""

    def __init__(self) -> None:
        # Not a threading.Event, whose `set` takes a lock: a finalizer may run on a thread that holds it.
        self._signals: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._set = False

    def set(self) -> None:
        """Signal all threads to end, including those that wait later."""
        self._set = True
        self._signals.put(None)

    def is_set(self) -> bool:
        return self._set

    def wake(self) -> None:
        """End one wait early: the current one, or the next."""
        self._signals.put(None)

    def wait(self, seconds: float) -> bool:
        """Wait until set or woken, at most `seconds`; return whether it is set."""
        with suppress(queue.Empty):
            self._signals.get(timeout=min(threading.TIMEOUT_MAX, max(0.0, seconds)))
            while not self._set:  # several wakes count as one
                self._signals.get_nowait()
        if self._set:
            self._signals.put(None)  # for the next waiting thread
        return self._set


class Worker:
    """Runs a loop, which returns soon after `stop` is set, on daemon threads. *Thread-safe.*"""

    def __init__(self, name: str, run: Callable[[], object], stop: Stop | None = None, threads: int = 1) -> None:
        self.name = name
        self.stop = stop or Stop()
        names = [name] if threads == 1 else [f"{name}-{i}" for i in range(threads)]
        self._threads = [new_thread(name, run) for name in names]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()
        close_at_exit(self, type(self).abandon)
        disown_in_children(self)

    @property
    def alive(self) -> bool:
        return any(thread.is_alive() for thread in self._threads)

    def stop_with(self, user: object) -> None:
        """Stop when this object is collected."""
        finalize(user, self.stop.set).atexit = False

    def join(self, timeout_s: float) -> bool:
        """Wait for the threads to end; return whether they have."""
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            if thread.is_alive():  # it may never have been started
                thread.join(max(0.0, deadline - time.monotonic()))
        return not self.alive

    def abandon(self, timeout_s: float = 10.0) -> bool:
        """Stop, and wait for the threads; return whether they have ended."""
        self.stop.set()
        ended = self.join(timeout_s)
        if not ended:
            _log.warning("%s: still runs %g s after it was stopped", self.name, timeout_s)
        return ended

    def disown(self) -> None:
        """Mark as stopped in a forked child, which has none of the threads."""
        self._threads, self.stop = [], Stop()
        self.stop.set()


class PeriodicTask(Worker):
    """Runs a function periodically. *Thread-safe.*

    Logs the first of successive failures; ignores `NotReadyError`, since its object is being closed.

    Args:
        run: a bound method does not keep its object alive; the task ends when the object is collected.
        delay_s: delay before the first interval.
        jitter: largest random change of an interval, as a share of it.
        what: purpose of the function, in the log, e.g. `refreshing model 'shop'`.
    """

    def __init__(
        self,
        name: str,
        run: Callable[[], object],
        interval_s: float,
        *,
        delay_s: float = 0.0,
        jitter: float = 0.0,
        what: str = "",
        stop: Stop | None = None,
    ) -> None:
        self._what = what or name
        self._failing = False

        def loop() -> None:
            run_periodically(self._attempt, self.stop.wait, interval_s, delay_s, jitter)

        super().__init__(name, loop, stop)
        self._function: Callable[[], Callable[[], object] | None] = lambda: run
        if ismethod(run):
            self._function = WeakMethod(run)
            self.stop_with(run.__self__)
        self.start()

    def wake(self) -> None:
        """Run now; if it already runs, run once more."""
        self.stop.wake()

    def _attempt(self) -> None:
        run = self._function()
        try:
            if run is not None:
                run()
        except NotReadyError:
            pass
        except HPSError as error:
            if not self._failing:
                _log.warning("%s: %s; it is tried again at every interval", self._what, error)
            self._failing = True
        except Exception:  # noqa: BLE001 - logged with its traceback; the next run may do better
            _log.exception("%s failed", self._what)
        else:
            if self._failing:
                _log.info("%s succeeds again", self._what)
            self._failing = False


def run_periodically(
    run: Callable[[], object],
    wait: Callable[[float], bool],
    interval_s: float,
    delay_s: float = 0.0,
    jitter: float = 0.0,
    *,
    clock: Callable[[], float] = time.monotonic,
    draw: Callable[[], float] = random.random,
) -> None:
    """Call `run` periodically until `wait`, which sleeps for a number of seconds, returns True; see `PeriodicTask`.

    The first run starts after the delay and an interval. Each later run starts an interval after the last one started or, if
    that took longer, an interval after it ended, so that runs never pile up.
    """

    def interval() -> float:
        return interval_s * (1 + jitter * (2 * draw() - 1))

    pause = delay_s + interval()
    while not wait(pause):
        began = clock()
        run()
        took, pause = clock() - began, interval()
        if took < pause:
            pause -= took


class WorkCounts(Protocol):
    """Counts batches by kind of work. *Thread-safe.*"""

    def show_queue(self, work: str, waiting: Callable[[], int]) -> None:
        """Report the queue length, which this method returns, while its object lives."""

    def count_dropped(self, work: str) -> None:
        """Count a batch refused by a full queue."""

    def count_failed(self, work: str) -> None:
        """Count a batch that raised an error."""


class WorkQueue(Worker):
    """Runs jobs in the order of arrival, and refuses a job when the queue is full. *Thread-safe.*"""

    def __init__(self, name: str, length: int, threads: int, counts: WorkCounts) -> None:
        super().__init__(name, self._run, threads=threads)
        self._counts = counts
        self._jobs: queue.Queue[Callable[[], None] | None] = queue.Queue(length)
        self.start()
        counts.show_queue(name, self.waiting)

    def submit(self, job: Callable[[], None]) -> bool:
        """Queue a job. If the queue is full or closed, count the job as dropped and return False."""
        if not self.stop.is_set():
            try:
                self._jobs.put_nowait(job)
            except queue.Full:
                pass
            else:
                return True
        self._counts.count_dropped(self.name)
        return False

    def waiting(self) -> int:
        return self._jobs.qsize()

    def drain(self, timeout_s: float) -> bool:
        """Wait until every queued job has run; return False on timeout."""
        deadline = time.monotonic() + timeout_s
        with self._jobs.all_tasks_done:
            while self._jobs.unfinished_tasks:
                if not self._jobs.all_tasks_done.wait(deadline - time.monotonic()) and time.monotonic() >= deadline:
                    return False
        return True

    def close(self, timeout_s: float = 5.0) -> None:
        """Run the queued jobs for at most `timeout_s`, and stop. Idempotent."""
        if self.stop.is_set():
            return
        self.stop.set()
        if not self.drain(timeout_s):
            _log.warning("%s: %d batches were dropped when the queue was closed", self.name, self._jobs.qsize())
            self._discard()
        with suppress(queue.Full):  # a job was queued meanwhile; the threads notice within _POLL_S
            self._jobs.put_nowait(None)
        self.join(timeout_s)
        self._discard()

    def abandon(self, timeout_s: float = 10.0) -> bool:
        """Drop the queued jobs, and wait for running ones; return whether they have ended."""
        self.stop.set()
        self._discard()
        return super().abandon(timeout_s)

    def disown(self) -> None:
        """Drop the queued jobs in a forked child, and accept no more."""
        self._jobs = queue.Queue()
        super().disown()

    def _discard(self) -> None:
        while True:
            try:
                self._jobs.get_nowait()
            except queue.Empty:
                return
            self._jobs.task_done()

    def _run(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=_POLL_S)
            except queue.Empty:
                if self.stop.is_set():
                    return
                continue
            if job is None:  # closed; for the next thread
                with suppress(queue.Full):
                    self._jobs.put_nowait(None)
                return
            try:
                job()
            except HPSError as error:
                self._counts.count_failed(self.name)
                _log.warning("%s: %s", self.name, error)
            except Exception:  # noqa: BLE001 - logged with its traceback; the thread must live on
                self._counts.count_failed(self.name)
                _log.exception("%s: a job failed", self.name)
            finally:
                del job  # so that its references are collected while this thread waits
                self._jobs.task_done()


def call_in_thread(name: str, call: Callable[[], T]) -> Future[T]:
    """Start a call on its own thread, `hps-<name>`. The future returns its outcome, and cannot be cancelled.

    For callers that read the future; otherwise use `new_thread`, which records errors.
    """
    answer: Future[T] = Future()
    answer.set_running_or_notify_cancel()
    new_thread(name, partial(_answer, answer, call)).start()
    return answer


def _answer(answer: Future[T], call: Callable[[], T]) -> None:
    try:
        answer.set_result(call())
    except BaseException as error:  # noqa: BLE001 - raised where the result is read
        answer.set_exception(error)
        del answer, call  # the error's traceback refers to this frame


def call_within(timeout_s: float, call: Callable[[], T], threads: threading.Semaphore, late: Callable[[], Exception]) -> T:
    """Run a call that has no timeout; give up after one, though the call may continue.

    Args:
        threads: limits the calls at a time, including abandoned ones. Waiting for it counts as part of the timeout.
        late: makes the error for a timeout.
    """
    deadline = time.monotonic() + timeout_s
    if not threads.acquire(timeout=max(0.0, timeout_s)):
        raise late()

    def run() -> T:
        try:
            return call()
        finally:
            threads.release()

    answer = call_in_thread("bounded-call", run)
    try:
        if not wait([answer], max(0.0, deadline - time.monotonic())).done:
            raise late()
        return answer.result()
    finally:
        del answer  # an error's traceback refers to this frame
