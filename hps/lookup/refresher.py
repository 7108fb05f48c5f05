"""Refreshes the embedding caches of a model in service: on demand, one run at a time, and on time."""

import logging
import queue
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from weakref import finalize, ref

from hps.cache.base import EmbeddingCache
from hps.errors import ConflictError, HPSError, InvalidInputError, NotReadyError
from hps.lifetimes import close_at_exit
from hps.lookup.chain import DatabaseChain
from hps.lookup.refresh import Pace, RefreshReport, refresh
from hps.metrics import Metrics
from hps.open_calls import OpenCalls
from hps.types import TableSpec

_log = logging.getLogger(__name__)
_LONGEST_WAIT_S = 3600.0  # of a call for the runs before its own


@dataclass(frozen=True, slots=True)
class RefreshSettings:
    """When the caches of a model are refreshed, and how fast; from its configuration. *Immutable.*

    Attributes:
        interval_s: from the beginning of a refresh to that of the next; 0: only on demand.
        delay_s: what comes before the first interval.
        jitter: share of an interval by which each is longer or shorter, at random.
        share: of the time that a refresh may work; see `Pace`.
        fraction_per_iteration: see `refresh`.
    """

    interval_s: float = 0.0
    delay_s: float = 0.0
    jitter: float = 0.1
    share: float = 0.1
    fraction_per_iteration: float = 0.0


class Refresher:
    """Refreshes all caches of one deployment. *Thread-safe.*

    One run at a time. Calls that come while one runs share the next: its beginning, not that of the run before, is what they
    may rely on. Where there is an interval, a thread runs it on time, and ends with this object.

    Args:
        tables: the model's tables, in the order of their ids.
        caches: of its devices; none: there is nothing to do.
        chain: the databases that hold its tables.
        calls: of the deployment; its closing waits for the run under way.
        metrics: where runs are counted.
    """

    def __init__(
        self,
        tables: Sequence[TableSpec],
        caches: Sequence[EmbeddingCache],
        chain: DatabaseChain,
        settings: RefreshSettings,
        calls: OpenCalls,
        metrics: Metrics,
    ) -> None:
        self._model = tables[0].model_name
        self._tables = tables
        self._caches = caches
        self._chain = chain
        self._settings = settings
        self._calls = calls
        self._metrics = metrics
        self._stop = _Stop()
        self._running = threading.Lock()
        self._choosing = threading.Lock()
        self._next: Future[dict[str, RefreshReport]] | None = None  # what calls share until it begins
        self._failing = False  # the last run on time
        self._thread: threading.Thread | None = None
        if caches and settings.interval_s > 0:
            finalize(self, self._stop.set).atexit = False
            arguments = (ref(self), settings, self._stop.wait)
            self._thread = threading.Thread(target=_run_on_time, args=arguments, name=f"hps-refresh-{self._model}", daemon=True)
            self._thread.start()
            close_at_exit(self, Refresher.close)

    def refresh(self, share: float | None = None) -> dict[str, RefreshReport]:
        """Read the vectors of all resident keys again, on every device; the report, by table, adds up the devices.

        Args:
            share: of the time that it may work, above 0, at most 1; None: as configured. A call that shares the run of another
                takes that one's.

        Raises:
            InvalidInputError: the share is out of range.
            NotReadyError: the deployment is closed, or was while this ran.
            DatabaseError: the databases failed; what was not reached keeps its vectors.
            ConflictError: earlier refreshes have not ended for an hour.
        """
        share = self._settings.share if share is None else share
        if not 0 < share <= 1:
            raise InvalidInputError(f"refreshing model {self._model!r}: got a share of {share}, expected above 0, at most 1")
        with self._calls:
            with self._choosing:
                run, leads = self._next, self._next is None
                if run is None:
                    run = self._next = Future()
            if leads:
                self._lead(run, share)
            if not wait([run], 2 * _LONGEST_WAIT_S).done:
                raise self._busy()
            return run.result()

    def stop(self) -> None:
        """Let the run under way end with its chunk, and no other begin."""
        self._stop.set()

    def close(self, timeout_s: float = 10.0) -> None:
        """Stop, and wait for the thread."""
        self.stop()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def run_on_time(self) -> None:
        """Refresh; a failure is logged once until a run succeeds again."""
        try:
            self.refresh()
        except NotReadyError:
            return  # closed
        except HPSError as error:
            if not self._failing:
                _log.warning("refreshing model %r on time: %s; it is tried again at every interval", self._model, error)
            self._failing = True
        except Exception:  # noqa: BLE001 - logged with its traceback; the next interval may do better
            _log.exception("refreshing model %r on time failed", self._model)
        else:
            if self._failing:
                _log.info("refreshing model %r on time succeeds again", self._model)
            self._failing = False

    def _lead(self, run: "Future[dict[str, RefreshReport]]", share: float) -> None:
        """Do a run when the one before has ended, and tell everybody who shares it."""
        try:
            if not self._running.acquire(timeout=_LONGEST_WAIT_S):
                raise self._busy()
            try:
                self._forget(run)
                run.set_result(self._run(share))
            finally:
                self._running.release()
        except BaseException as error:  # noqa: BLE001 - raised by whoever asks for the result
            self._forget(run)
            run.set_exception(error)

    def _forget(self, run: "Future[dict[str, RefreshReport]]") -> None:
        with self._choosing:
            if self._next is run:
                self._next = None

    def _run(self, share: float) -> dict[str, RefreshReport]:
        began = time.perf_counter()
        pace = Pace(share, self._stop.wait)
        reports = {table.table_name: RefreshReport(0, 0) for table in self._tables}
        metrics, model = self._metrics, self._model
        try:
            for cache in self._caches:
                for index, table in enumerate(self._tables):
                    pace.rest()
                    one = refresh(cache, index, table, self._chain, self._settings.fraction_per_iteration, pace)
                    before = reports[table.table_name]
                    reports[table.table_name] = RefreshReport(before.updated + one.updated, before.erased + one.erased)
                    metrics.refreshed_rows.labels(model, "updated").inc(one.updated)
                    metrics.refreshed_rows.labels(model, "erased").inc(one.erased)
        except BaseException as error:
            if not isinstance(error, NotReadyError):
                metrics.refresh_failures.labels(model).inc()
            raise
        seconds = time.perf_counter() - began
        rows = ", ".join(f"{table} {one.updated} updated, {one.erased} erased" for table, one in reports.items())
        _log.debug("refreshed model %r in %.2f s: %s", model, seconds, rows)
        metrics.refreshes.labels(model).inc()
        metrics.refresh_seconds.labels(model).set(seconds)
        metrics.refresh_succeeded_at.labels(model).set_to_current_time()
        return reports

    def _busy(self) -> ConflictError:
        return ConflictError(
            f"refreshing model {self._model!r}: earlier refreshes have not ended for {_LONGEST_WAIT_S:g} s; raise "
            "refresh_device_share, or refresh less often"
        )


def keep_time(
    refresh: Callable[[], object],
    settings: RefreshSettings,
    *,
    wait: Callable[[float], bool],
    clock: Callable[[], float] = time.monotonic,
    draw: Callable[[], float] = random.random,
) -> None:
    """Call `refresh` at its times, until `wait` says that this is to end.

    The first begins after the delay and one interval, each other one interval after the last began; where that took longer, an
    interval after it ended. So runs never pile up.

    Args:
        wait: waits so many seconds; True says that this is to end.
        draw: a number in [0, 1), for the jitter.
    """

    def interval() -> float:
        return settings.interval_s * (1 + settings.jitter * (2 * draw() - 1))

    pause = settings.delay_s + interval()
    while not wait(pause):
        began = clock()
        refresh()
        took, pause = clock() - began, interval()
        if took < pause:
            pause -= took


def _run_on_time(refresher: "ref[Refresher]", settings: RefreshSettings, wait: Callable[[float], bool]) -> None:
    """What the thread does; it keeps the refresher alive only while it runs one."""

    def refresh() -> None:
        if (found := refresher()) is not None:
            found.run_on_time()

    keep_time(refresh, settings, wait=wait)


class _Stop:
    """Tells all who wait to end. *Thread-safe.* Also the garbage collector may set it: that takes no lock of Python's."""

    def __init__(self) -> None:
        self._signals: queue.SimpleQueue[None] = queue.SimpleQueue()

    def set(self) -> None:
        self._signals.put(None)

    def wait(self, seconds: float) -> bool:
        """Wait until it is set, at most so many seconds; whether it is."""
        try:
            self._signals.get(timeout=min(threading.TIMEOUT_MAX, seconds))
        except queue.Empty:
            return False
        self._signals.put(None)  # for the next who asks
        return True
