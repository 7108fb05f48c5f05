"""Refreshes the embedding caches of a served model, on demand and periodically, one run at a time."""

import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from itertools import product

from hps.cache.base import EmbeddingCache
from hps.engine.chain import DatabaseChain
from hps.engine.refresh import Pace, RefreshReport, refresh
from hps.errors import ConflictError, InvalidInputError, NotReadyError
from hps.ground.threads.open_calls import OpenCalls
from hps.ground.threads.workers import PeriodicTask, Stop
from hps.statistics.metrics import Metrics
from hps.types import TableSpec

_log = logging.getLogger(__name__)
_LONGEST_WAIT_S = 3600.0  # limit for a call to wait for the runs before its own


@dataclass(frozen=True, slots=True)
class RefreshSettings:
    """Settings of the refreshes of a model, from its configuration. *Immutable.*

    Attributes:
        interval_s: period between the starts of two refreshes; 0: only on demand.
        delay_s: delay before the first interval.
        jitter: random share of an interval by which each is longer or shorter.
        share: share of the time that a refresh may use; see `Pace`.
        fraction_per_iteration: see `refresh`.
    """

    interval_s: float = 0.0
    delay_s: float = 0.0
    jitter: float = 0.1
    share: float = 0.1
    fraction_per_iteration: float = 0.0


class Refresher:
    """Refreshes all caches of one deployment, one run at a time. *Thread-safe.*

    Calls that arrive during a run share the next one: they need a run that starts after them. If an interval is configured, a
    thread refreshes periodically.

    Args:
        calls: calls of the deployment; closing it waits for the current run.
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
        self._stop = Stop()
        self._running = threading.Lock()
        self._choosing = threading.Lock()
        self._next: Future[dict[str, RefreshReport]] | None = None  # shared by pending calls until it starts
        self._task: PeriodicTask | None = None
        if caches and settings.interval_s > 0:
            self._task = PeriodicTask(
                f"refresh-{self._model}",
                self.refresh,
                settings.interval_s,
                delay_s=settings.delay_s,
                jitter=settings.jitter,
                what=f"refreshing model {self._model!r} on time",
                stop=self._stop,
            )

    def refresh(self, share: float | None = None) -> dict[str, RefreshReport]:
        """Refresh the vectors of all resident keys on every device; return a report by table, summed over the devices.

        Args:
            share: share of the time to use, above 0, at most 1; None: as configured. Calls that share a run share its value.

        Raises:
            InvalidInputError: the share is out of range.
            NotReadyError: the deployment is closed, or closed meanwhile.
            DatabaseError: the databases failed; remaining keys keep their vectors.
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
        """End the current run after its chunk, and start no other."""
        self._stop.set()

    def close(self, timeout_s: float = 10.0) -> None:
        self.stop()
        if self._task is not None:
            self._task.join(timeout_s)

    def _lead(self, run: "Future[dict[str, RefreshReport]]", share: float) -> None:
        """Run once the previous run has ended, and publish the result to all callers that share it."""
        try:
            if not self._running.acquire(timeout=_LONGEST_WAIT_S):
                raise self._busy()
            try:
                self._forget(run)
                run.set_result(self._run(share))
            finally:
                self._running.release()
        except BaseException as error:  # noqa: BLE001 - raised by `Future.result`
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
            for cache, (index, table) in product(self._caches, enumerate(self._tables)):
                pace.rest()
                with cache.unless_lost():
                    report = refresh(cache, index, table, self._chain, self._settings.fraction_per_iteration, pace)
                    before = reports[table.table_name]
                    reports[table.table_name] = RefreshReport(before.updated + report.updated, before.erased + report.erased)
                    metrics.refreshed_rows.labels(model, "updated").inc(report.updated)
                    metrics.refreshed_rows.labels(model, "erased").inc(report.erased)
        except BaseException as error:
            if not isinstance(error, NotReadyError):
                metrics.refresh_failures.labels(model).inc()
            raise
        seconds = time.perf_counter() - began
        rows = ", ".join(f"{table} {report.updated} updated, {report.erased} erased" for table, report in reports.items())
        _log.debug("refreshed model %r in %.2f s: %s", model, seconds, rows)
        metrics.refreshes.labels(model).inc()
        metrics.refresh_seconds.labels(model).set(seconds)
        metrics.refresh_succeeded_at.labels(model).set(time.time())
        return reports

    def _busy(self) -> ConflictError:
        return ConflictError(
            f"refreshing model {self._model!r}: earlier refreshes have not ended for {_LONGEST_WAIT_S:g} s; raise "
            "refresh_device_share, or refresh less often"
        )
