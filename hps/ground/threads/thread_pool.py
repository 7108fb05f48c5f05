"""Threads that share large calls: work is cut by rows, and free threads take the next piece.

The caller works too, so it waits only for pieces that other threads have started. Without threads (in a forked child, on one
processor, or while all are busy) it does everything. Work must release the interpreter lock, as numba kernels and RocksDB's
multi-gets do.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Final

from hps.ground.memory.capacity import available_processors
from hps.ground.threads.lifetimes import close_at_exit, disown_in_children
from hps.ground.threads.workers import new_thread

_log = logging.getLogger(__name__)
_MOST_THREADS: Final = 16
_MOST_ROWS: Final = 16_384  # target per piece: finished pieces are copied to a device while others run
_PIECES_A_THREAD: Final = 4
_DISK_THREADS: Final = 32
_IDLE_S: Final = 10.0  # idle time after which a thread ends
_WAIT_S: Final = 10.0


def available_threads() -> int:
    """Return the number of processors of this process, at most 16."""
    return min(available_processors(), _MOST_THREADS)


class _Job:
    """The work of a call, cut into pieces. *Thread-safe*: single operations of lists and iterators are atomic."""

    __slots__ = ("_at_once", "_done", "_left", "_rows", "_work", "error", "events", "helpers")

    def __init__(self, rows: int, at_once: int, work: Callable[[int, int], object]) -> None:
        self._rows, self._at_once, self._work = rows, at_once, work
        pieces = -(-rows // at_once)
        self._left = iter(range(pieces))
        self._done = bytearray(pieces)
        self.error: BaseException | None = None
        self.helpers: list[None] = []  # an element for each thread that may be working
        self.events: queue.SimpleQueue[None] = queue.SimpleQueue()  # a piece is done, or a thread has finished

    def step(self) -> bool:
        """Do one more piece; return False if all are taken, or one has failed."""
        piece = next(self._left, None)
        if piece is None or self.error is not None:
            return False
        start = piece * self._at_once
        self._work(start, min(start + self._at_once, self._rows))
        self._done[piece] = 1
        return True

    def help(self) -> None:
        # A thread first counts itself and then takes a piece; the caller finds no piece and then counts the threads. So it
        # never misses a thread that works.
        self.helpers.append(None)
        try:
            while self.step():
                self.events.put(None)
        except BaseException as error:  # noqa: BLE001 - raised where the call was made
            self.error = error
        finally:
            self.helpers.pop()
            self.events.put(None)

    def end(self) -> BaseException | None:
        """Leave no pieces to threads that come late. Return the error, if any."""
        self._left = iter(())
        error, self.error = self.error, None
        return error

    def rows_done(self) -> int:
        piece = self._done.find(0)
        return self._rows if piece < 0 else piece * self._at_once

    def wait(self) -> None:
        """Wait until a piece is done or a thread has finished."""
        with suppress(queue.Empty):
            self.events.get(timeout=_WAIT_S)
            for _ in range(self.events.qsize()):  # only the caller waits
                self.events.get_nowait()


class ThreadPool:
    """Daemon threads shared by all callers of a process, started on first use. *Thread-safe.*

    Args:
        threads: maximum number for one call, including the caller's; 0 means `available_threads()`.
    """

    def __init__(self, threads: int = 0) -> None:
        self._limit = threads or available_threads()
        self._starting = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._jobs: list[_Job] = []
        self._wake: queue.SimpleQueue[bool] = queue.SimpleQueue()  # True: there is a job; False: end

    @property
    def limit(self) -> int:
        """Maximum number of threads for one call, including the caller's."""
        return self._limit

    def limit_to(self, threads: int) -> None:
        """Limit the threads for one call, including the caller's; 0 means `available_threads()`."""
        self._limit = threads or available_threads()

    def run(
        self,
        rows: int,
        least_rows: int,
        work: Callable[[int, int], object],
        done: Callable[[int, int], object] | None = None,
    ) -> None:
        """Call `work(start, stop)` for pieces that cover `range(rows)`, in several threads if that pays.

        Args:
            least_rows: minimum size of a piece; 0 does not cut the work.
            work: called by several threads at once.
            done: called in this thread, in order, with rows [start, stop) for which `work` has returned.

        Raises:
            BaseException: the first exception of `work` or `done`. No `work` runs any more; pieces may have been skipped.
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
            self._wake_helpers(helpers)
        reported = 0
        try:
            while (working := job.step()) or job.helpers:
                if not working:
                    job.wait()
                ready = job.rows_done()
                if done and ready > reported and job.error is None:
                    reported, start = ready, reported
                    done(start, ready)
        except BaseException as failure:  # noqa: BLE001 - raised below, when no thread works any more
            job.error = job.error or failure
        while job.helpers:
            job.wait()
        self._forget(job)
        if (error := job.end()) is not None:
            try:
                raise error
            finally:
                del error  # its traceback refers to this frame, and thereby to the caller's arrays
        if done and reported < rows:
            done(reported, rows)

    def end(self, timeout_s: float = 10.0) -> None:
        """End the threads. Callers complete their running calls; a later call starts threads again."""
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
        """Reset in a forked child, which has none of the threads."""
        self._starting, self._threads, self._jobs, self._wake = threading.Lock(), [], [], queue.SimpleQueue()

    def _wake_helpers(self, helpers: int) -> None:
        if len(self._threads) < helpers:
            self._start(helpers)
        for _ in range(helpers - self._wake.qsize()):
            self._wake.put(True)

    def _start(self, count: int) -> None:
        with self._starting, suppress(RuntimeError):  # the system refuses more threads: continue with those that started
            if not self._threads:
                close_at_exit(self, ThreadPool.end)
                disown_in_children(self)
            while len(self._threads) < count:
                thread = new_thread(f"piece-{len(self._threads)}", partial(self._work, self._wake))
                thread.start()
                self._threads.append(thread)

    def _work(self, wake: queue.SimpleQueue[bool]) -> None:
        try:
            while wake.get(timeout=_IDLE_S):
                self._help()
        except queue.Empty:  # idle for too long
            with suppress(ValueError):
                self._threads.remove(threading.current_thread())

    def _help(self) -> None:
        for job in self._jobs.copy():
            job.help()
            self._forget(job)

    def _forget(self, job: _Job) -> None:
        with suppress(ValueError):
            self._jobs.remove(job)


POOL: Final = ThreadPool()
"""Thread pool of this process."""

DISK_POOL: Final = ThreadPool(_DISK_THREADS)
"""Thread pool for work that waits for the disk, one page after another: its threads are the queue depth."""
