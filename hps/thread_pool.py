"""Threads that help a caller with a large piece of work: it is cut by rows, and whoever is free takes the next piece.

A caller works itself, so a call never waits for a thread to be free, only for pieces that others have begun; where there are
no threads (a forked child, one processor, all of them busy) it does everything. The work must release the interpreter lock,
as numba kernels and RocksDB's multi-gets do; else threads gain nothing.
"""

import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from hps.lifetimes import close_at_exit, disown_in_children

_log = logging.getLogger(__name__)
_MOST_THREADS: Final = 16
_MOST_ROWS: Final = 16_384  # of a piece: what is done with finished ones (a copy to a device) overlaps the rest
_PIECES_A_THREAD: Final = 4
_IDLE_S: Final = 10.0  # after which a thread ends that nobody called
_LOOK_S: Final = 10.0


def available_threads() -> int:
    """As many threads as this process has processors, at most 16."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(count, _MOST_THREADS)


class _Job:
    """One call's work, of which threads take pieces. *Thread-safe*: single operations of lists and iterators are atomic."""

    __slots__ = ("_at_once", "_done", "_left", "_rows", "_work", "error", "helpers", "news")

    def __init__(self, rows: int, at_once: int, work: Callable[[int, int], object]) -> None:
        self._rows, self._at_once, self._work = rows, at_once, work
        pieces = -(-rows // at_once)
        self._left = iter(range(pieces))
        self._done = bytearray(pieces)
        self.error: BaseException | None = None
        self.helpers: list[None] = []  # as long as there are threads that may be working
        self.news: queue.SimpleQueue[None] = queue.SimpleQueue()  # a piece was done, or a thread has left

    def step(self) -> bool:
        """Do one more piece; False where all are taken, or one has failed."""
        piece = next(self._left, None)
        if piece is None or self.error is not None:
            return False
        start = piece * self._at_once
        self._work(start, min(start + self._at_once, self._rows))
        self._done[piece] = 1
        return True

    def help(self) -> None:
        """Do pieces until none is left. A thread first counts itself, then takes; the caller first takes, then counts."""
        self.helpers.append(None)
        try:
            while self.step():
                self.news.put(None)
        except BaseException as error:  # noqa: BLE001 - raised where the call was made
            self.error = error
        finally:
            self.helpers.pop()
            self.news.put(None)

    def rows_done(self) -> int:
        """How many rows are done without a gap."""
        piece = self._done.find(0)
        return self._rows if piece < 0 else piece * self._at_once

    def wait(self) -> None:
        """Wait until a piece is done or a thread has left."""
        with suppress(queue.Empty):
            self.news.get(timeout=_LOOK_S)
            for _ in range(self.news.qsize()):  # only one waits
                self.news.get_nowait()


class ThreadPool:
    """Daemon threads that all callers of a process share; they start when they are first needed. *Thread-safe.*"""

    def __init__(self) -> None:
        self._limit = available_threads()
        self._starting = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._jobs: list[_Job] = []  # one a caller at most
        self._wake: queue.SimpleQueue[bool] = queue.SimpleQueue()  # True: there is a job; False: end

    @property
    def limit(self) -> int:
        """Threads that work on one call at most, the caller's among them."""
        return self._limit

    def limit_to(self, threads: int) -> None:
        """Let so many threads work on one call at most, the caller's among them; 0 is `available_threads()`."""
        self._limit = threads or available_threads()

    def run(
        self,
        rows: int,
        least_rows: int,
        work: Callable[[int, int], object],
        done: Callable[[int, int], object] | None = None,
    ) -> None:
        """Call `work(start, stop)` for pieces that make up `range(rows)`, in several threads where that is worth it.

        Args:
            rows: of the whole.
            least_rows: that are worth a piece of their own; 0 if the whole is not to be cut.
            work: is called by several threads at once.
            done: is called in this thread, in order, with rows [start, stop) for which `work` has returned.

        Raises:
            BaseException: what `work` or `done` raised first. No `work` runs any more; some of it was not begun.
        """
        at_once = max(least_rows, min(_MOST_ROWS, -(-rows // (_PIECES_A_THREAD * self._limit)))) if least_rows else rows
        if rows < 2 * at_once or not rows:
            work(0, rows)
            if done:
                done(0, rows)
            return
        job = _Job(rows, at_once, work)
        if helpers := min(self._limit, rows // at_once) - 1:
            self._jobs.append(job)
            self._call(helpers)
        reported = 0
        try:
            while (working := job.step()) or job.helpers:
                if not working:
                    job.wait()
                ready = job.rows_done()
                if done and ready > reported and job.error is None:
                    reported, start = ready, reported
                    done(start, ready)
        except BaseException as error:  # noqa: BLE001 - raised below, when nobody works any more
            job.error = job.error or error
        while job.helpers:
            job.wait()
        self._forget(job)
        if job.error is not None:
            raise job.error
        if done and reported < rows:
            done(reported, rows)

    def end(self, timeout_s: float = 10.0) -> None:
        """End the threads. Calls that run are completed by their callers; a later call starts threads again."""
        with self._starting:
            threads, self._threads = self._threads, []
            wake, self._wake = self._wake, queue.SimpleQueue()
        for _ in threads:
            wake.put(False)
        deadline = time.monotonic() + timeout_s
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                _log.warning("thread %s still works after %g s", thread.name, timeout_s)

    def disown(self) -> None:
        """In a forked child, where the threads are not: begin anew."""
        self._starting, self._threads, self._jobs, self._wake = threading.Lock(), [], [], queue.SimpleQueue()

    def _call(self, helpers: int) -> None:
        if len(self._threads) < helpers:
            self._start(helpers)
        for _ in range(helpers - self._wake.qsize()):
            self._wake.put(True)

    def _start(self, count: int) -> None:
        with self._starting, suppress(RuntimeError):  # the system refuses more threads: those that are there will do
            if not self._threads:
                close_at_exit(self, ThreadPool.end)
                disown_in_children(self)
            while len(self._threads) < count:
                name = f"hps-piece-{len(self._threads)}"
                thread = threading.Thread(target=self._work, args=(self._wake,), name=name, daemon=True)
                thread.start()
                self._threads.append(thread)

    def _work(self, wake: queue.SimpleQueue[bool]) -> None:
        try:
            while wake.get(timeout=_IDLE_S):
                for job in self._jobs.copy():
                    job.help()
                    self._forget(job)
        except queue.Empty:  # nobody needs this thread
            with suppress(ValueError):
                self._threads.remove(threading.current_thread())

    def _forget(self, job: _Job) -> None:
        with suppress(ValueError):
            self._jobs.remove(job)


POOL: Final = ThreadPool()
"""The threads of this process."""
