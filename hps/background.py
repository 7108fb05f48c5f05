"""Work that a lookup leaves for later: a bounded queue, and the threads that empty it."""

import logging
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from weakref import finalize

from hps.errors import HPSError
from hps.lifetimes import close_at_exit, disown_in_children
from hps.metrics import Metrics

_log = logging.getLogger(__name__)
_POLL_S = 0.2  # how soon an idle thread notices that the queue was closed


class BackgroundQueue:
    """Runs jobs in the order of arrival on daemon threads, and refuses a job when the queue is full. *Thread-safe.*

    Args:
        name: of the work, in thread names, logs and metrics.
        length: jobs that may wait.
        threads: how many run at once.
    """

    def __init__(self, name: str, length: int, threads: int, metrics: Metrics) -> None:
        self._name = name
        self._metrics = metrics
        self._jobs: queue.Queue[Callable[[], None] | None] = queue.Queue(length)
        self._closed = False
        self._threads = [threading.Thread(target=self._run, name=f"hps-{name}-{i}", daemon=True) for i in range(threads)]
        for thread in self._threads:
            thread.start()
        metrics.show_queue(name, self.waiting)
        close_at_exit(self, BackgroundQueue.abandon)
        disown_in_children(self)

    def submit(self, job: Callable[[], None]) -> bool:
        """Queue a job. When the queue is full or closed, count the job as dropped and return False."""
        if not self._closed:
            try:
                self._jobs.put_nowait(job)
            except queue.Full:
                pass
            else:
                return True
        self._metrics.background_dropped.labels(self._name).inc()
        return False

    def waiting(self) -> int:
        """How many jobs wait."""
        return self._jobs.qsize()

    def drain(self, timeout_s: float) -> bool:
        """Wait until every queued job has run; False when that takes longer than `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        with self._jobs.all_tasks_done:
            while self._jobs.unfinished_tasks:
                if not self._jobs.all_tasks_done.wait(deadline - time.monotonic()) and time.monotonic() >= deadline:
                    return False
        return True

    def close(self, timeout_s: float = 5.0) -> None:
        """Run what is queued, for at most `timeout_s`, and stop. Closing twice changes nothing."""
        if self._closed:
            return
        self._closed = True
        if not self.drain(timeout_s):
            _log.warning("%s: %d batches were dropped when the queue was closed", self._name, self._jobs.qsize())
            self._discard()
        with suppress(queue.Full):  # a job slipped in: the threads then notice within _POLL_S
            self._jobs.put_nowait(None)
        for thread in self._threads:
            thread.join(timeout_s)
        self._discard()

    def end_with(self, owner: object) -> None:
        """Let the threads end when the owner is collected; the jobs that are queued keep theirs alive."""
        finalize(owner, self._refuse).atexit = False

    def abandon(self, timeout_s: float = 10.0) -> None:
        """Drop what is queued, and wait for the jobs that run."""
        self._closed = True
        self._discard()
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                _log.warning("%s: a job still runs after %g s", self._name, timeout_s)

    def disown(self) -> None:
        """In a forked child, where the threads are not: drop what is queued, and take no more."""
        self._jobs = queue.Queue()
        self._closed = True

    def _refuse(self) -> None:  # takes no lock: the thread that collects garbage may hold any
        self._closed = True

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
                if self._closed:
                    return
                continue
            if job is None:  # closed: pass it on to the next thread
                with suppress(queue.Full):
                    self._jobs.put_nowait(None)
                return
            try:
                job()
            except HPSError as error:
                self._metrics.background_errors.labels(self._name).inc()
                _log.warning("%s: %s", self._name, error)
            except Exception:  # noqa: BLE001 - logged with its traceback; the thread must live on
                self._metrics.background_errors.labels(self._name).inc()
                _log.exception("%s: a job failed", self._name)
            finally:
                del job  # what it refers to may be collected while this thread waits for the next
                self._jobs.task_done()
