"""Caches are refreshed from the databases on demand and on time, in steps, within a share of the time, while in service."""

import gc
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from hps.cache.cpu.cache import NumpyCache
from hps.engine import refresh as steps
from hps.engine import refresher
from hps.engine.chain import DatabaseChain
from hps.engine.circuit_breaker import CircuitBreaker
from hps.engine.refresh import Pace, RefreshReport, refresh
from hps.engine.refresher import Refresher, RefreshSettings
from hps.errors import ConflictError, DatabaseError, InvalidInputError, NotReadyError
from hps.ground.threads.open_calls import OpenCalls
from hps.statistics.metrics import Metrics
from hps.tensors.batch import Batch
from hps.testing.waiting import PATIENCE_S, wait_until
from hps.tools.cli.tables.sample import sample_vectors
from hps.types import FloatArray, KeyArray, TableSpec
from tests.fakes.clock import Clock, Pauses
from tests.fakes.faulty_database import FaultyDatabase, fetched_keys
from tests.fakes.memory_database import MemoryDatabase

TABLES = (TableSpec("shop", "user", 3, 0.0, 1000), TableSpec("shop", "item", 4, 0.0, 1000))
KEYS = np.arange(300, dtype=np.int64)
RESIDENT = 200
CHUNK = 50
ROW_BYTES = 8 + 4 * 3
ALL = {table.table_name: RefreshReport(RESIDENT, 0) for table in TABLES}


def test_the_work_has_its_share_of_the_time() -> None:
    clock = Clock()
    pauses = Pauses(3, clock)
    pace = Pace(0.2, pauses.wait, clock)
    for work in (1.0, 0.0, 2.5):
        clock.now += work
        pace.rest()
    assert pauses.pauses == pytest.approx([4.0, 0.0, 10.0])
    with pytest.raises(NotReadyError):
        pace.rest()


@pytest.mark.parametrize(
    ("rows", "fraction", "paced", "fetched"),
    [
        *[(300, 0.0, False, [100, 100, 100]), (301, 0.0, False, [100, 100, 100, 1]), (99, 0.0, False, [99])],
        (0, 0.0, False, []),
        (300, 7.0, False, [100, 100, 100]),  # a chunk of memory at most
        (200, 0.08, False, [80, 80, 40]),  # of 1,008 rows
        (200, 0.01, False, [64, 64, 64, 8]),  # fewer are not worth a step
        *[(200, 0.0, True, [50, 50, 50, 50]), (130, 0.5, True, [50, 50, 30])],
    ],
)
def test_rows_are_fetched_in_steps(
    monkeypatch: pytest.MonkeyPatch, rows: int, fraction: float, paced: bool, fetched: list[int]
) -> None:
    monkeypatch.setattr(steps, "_CHUNK_BYTES", 100 * ROW_BYTES + ROW_BYTES // 2)
    monkeypatch.setattr(steps, "_PACED_ROWS", 50)
    keys, database, table = np.arange(rows), FaultyDatabase(MemoryDatabase()), TABLES[0]
    chain = DatabaseChain(None, database, metrics=Metrics())
    chain.open_table(table)
    database.insert(table.tag, keys, np.ones((rows, 3), np.float32))
    cache = NumpyCache.create([table], [1008], 0)
    cache.insert(0, keys, np.zeros((rows, 3), np.float32))
    assert cache.dump(0).size == rows
    clock = Clock()
    pauses = Pauses(100, clock)
    pace = Pace(0.5, pauses.wait, clock) if paced else None
    assert refresh(cache, 0, table, chain, fraction, pace) == RefreshReport(rows, 0)
    assert [one.size for one in database.fetched] == fetched
    assert len(pauses.pauses) == (len(fetched) if paced else 0)
    chain.close()


@pytest.mark.parametrize(("paced_bytes", "step"), [(10 * ROW_BYTES, 10), (11 * ROW_BYTES - 1, 10), (1, 1)])
def test_a_step_beside_lookups_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch, paced_bytes: int, step: int) -> None:
    seen: list[int] = []

    def chunk(*arguments: Any) -> int:
        seen.append(arguments[4].size)
        return seen[-1]

    monkeypatch.setattr(steps, "_PACED_BYTES", paced_bytes)
    monkeypatch.setattr(steps, "_refresh_chunk", chunk)
    cache = NumpyCache.create(TABLES[:1], [100], 0)
    cache.insert(0, np.arange(20), np.zeros((20, 3), np.float32))
    refresh(cache, 0, TABLES[0], DatabaseChain(None, None, metrics=Metrics()), 0.0, Pace(1.0, lambda _: False))
    assert seen == [step] * (20 // step)


class Refreshed:
    """Two tables of 300 rows, of which the caches of some devices hold 200."""

    def __init__(self, devices: int = 1, **settings: Any) -> None:
        self.database = FaultyDatabase(MemoryDatabase())
        self.metrics = Metrics()
        breaker: Callable[[], CircuitBreaker] = lambda: CircuitBreaker(failures=10**9)  # noqa: E731
        self.chain = DatabaseChain(None, self.database, metrics=self.metrics, breaker=breaker)
        self.caches = [NumpyCache(TABLES, [2000, 2000]) for _ in range(devices)]
        for index, table in enumerate(TABLES):
            self.chain.open_table(table)
            self.write(0, index)
            for cache in self.caches:
                cache.insert(index, KEYS[:RESIDENT], self.vectors(0, index)[:RESIDENT])
        self.calls = OpenCalls("the deployment")
        settings = {"share": 1.0, "fraction_per_iteration": CHUNK / 2002, **settings}
        self.refresher = Refresher(TABLES, self.caches, self.chain, RefreshSettings(**settings), self.calls, self.metrics)

    def vectors(self, generation: int, index: int) -> FloatArray:
        return sample_vectors(KEYS, TABLES[index].dim, generation)

    def write(self, generation: int, *indices: int) -> None:
        """Change the database behind the caches' backs."""
        for index in indices or range(len(TABLES)):
            self.database.insert(TABLES[index].tag, KEYS, self.vectors(generation, index))

    def cached(self, index: int, cache: int = 0) -> tuple[KeyArray, FloatArray]:
        out, found = np.empty((KEYS.size, TABLES[index].dim), np.float32), np.zeros(KEYS.size, np.bool_)
        self.caches[cache].create_lookup().query(Batch.of(index, KEYS, out, found))
        return KEYS[found], out[found]

    def check(self, generation: int, rows: int = RESIDENT) -> None:
        for cache in range(len(self.caches)):
            for index in range(len(TABLES)):
                keys, vectors = self.cached(index, cache)
                np.testing.assert_array_equal(keys, KEYS[:rows])
                np.testing.assert_array_equal(vectors, self.vectors(generation, index)[:rows])

    def metric(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(f"hps_{name}", {"model": "shop", **labels})


Make = Callable[..., Refreshed]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Refreshed] = []

    def make(*args: Any, **settings: Any) -> Refreshed:
        made.append(Refreshed(*args, **settings))
        return made[-1]

    yield make
    for each in made:
        for gate in (each.database.gate, each.database.gate_late):
            if gate:
                gate.set()
        each.refresher.close()
        each.chain.close()


@contextmanager
def running(served: Refreshed, gate: str = "gate_late") -> Iterator[tuple[ThreadPoolExecutor, "Future[Any]"]]:
    """A refresh that has read its first chunk, or is about to, until the block ends; and threads for further calls."""
    setattr(served.database, gate, threading.Event())
    with ThreadPoolExecutor(5) as pool:
        refreshing = pool.submit(served.refresher.refresh)
        assert served.database.entered.acquire(timeout=PATIENCE_S)
        yield pool, refreshing
        getattr(served.database, gate).set()
        wait([refreshing], PATIENCE_S)


def calls(served: Refreshed, pool: ThreadPoolExecutor, count: int) -> "list[Future[Any]]":
    """Further calls, which have come."""
    came = [pool.submit(served.refresher.refresh) for _ in range(count)]
    wait_until(lambda: served.calls.running == 1 + count, "all calls came")
    return came


def test_a_refresh_reports_what_it_did_by_table_over_all_devices(make: Make) -> None:
    served = make(devices=2)
    served.write(1)
    served.database.delete(TABLES[1].tag, KEYS[180:])
    assert served.refresher.refresh() == {"user": RefreshReport(400, 0), "item": RefreshReport(360, 40)}
    keys, vectors = served.cached(1, 1)
    np.testing.assert_array_equal(keys, KEYS[:180])
    np.testing.assert_array_equal(vectors, served.vectors(1, 1)[:180])
    assert served.metric("refreshes_total") == 1
    assert served.metric("refreshed_rows_total", outcome="updated") == 760
    assert served.metric("refreshed_rows_total", outcome="erased") == 40
    assert served.metric("failed_refreshes_total") is None
    assert (served.metric("refresh_seconds") or 0) > 0
    assert (served.metric("refresh_succeeded_timestamp_seconds") or 0) > 1e9


@pytest.mark.parametrize("settings", [{"interval_s": 0.0}, {"interval_s": 0.001, "devices": 0}])
def test_without_interval_or_cache_there_is_no_thread_and_a_share_out_of_range_is_refused(make: Make, settings: Any) -> None:
    served = make(**settings)
    assert refreshing_threads() == []
    for share in (0, -1, 1.5, float("nan")):
        with pytest.raises(InvalidInputError, match="above 0, at most 1"):
            served.refresher.refresh(share)
    assert served.database.fetched == []
    updated = RESIDENT * len(served.caches)
    assert served.refresher.refresh() == {"user": RefreshReport(updated, 0), "item": RefreshReport(updated, 0)}


def test_calls_that_come_while_one_runs_share_the_next(make: Make) -> None:
    """They need one that begins after them; one is enough."""
    served = make()
    with running(served) as (pool, first):
        served.write(1)  # the first chunk has its old vectors
        others = calls(served, pool, 4)
    assert [call.result(PATIENCE_S) for call in [first, *others]] == [ALL] * 5
    served.check(1)
    assert served.metric("refreshes_total") == 2
    assert fetched_keys(served.database).size == 2 * 2 * RESIDENT


def test_who_shares_a_run_that_fails_hears_of_it_and_the_next_call_tries_again(make: Make) -> None:
    served = make()
    with running(served, "gate") as (pool, first):
        others = calls(served, pool, 2)
        served.database.failing = {"fetch"}
    assert {type(call.exception(PATIENCE_S)) for call in [first, *others]} == {DatabaseError}
    assert served.metric("failed_refreshes_total") == 2
    served.check(0)  # nothing is erased
    served.database.failing = set()
    served.write(1)
    served.refresher.refresh()
    served.check(1)


def test_a_refresh_ends_between_two_chunks_when_its_deployment_is_closed(make: Make) -> None:
    served = make(share=0.001)  # pauses of a thousand times the work are not waited for, either
    served.write(1)
    with running(served) as (pool, first):
        [waiting] = calls(served, pool, 1)
        served.refresher.stop()
    for call in (first, waiting):
        assert isinstance(call.exception(PATIENCE_S), NotReadyError)
    assert served.calls.close(PATIENCE_S)
    assert fetched_keys(served.database).size <= 64  # one chunk of many
    with pytest.raises(NotReadyError):
        served.refresher.refresh()
    assert served.metric("failed_refreshes_total") is None


@pytest.mark.parametrize("shared", [False, True])
def test_a_call_waits_for_earlier_refreshes_no_longer_than_the_limit(
    make: Make, monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    served = make()
    with monkeypatch.context() as patch:
        patch.setattr(refresher, "_LONGEST_WAIT_S", 0.005)
        if shared:
            patch.setattr(served.refresher, "_next", Future())  # a run that does not begin
        else:
            assert served.refresher._running.acquire()  # one that does not end
        for _ in range(2):
            with pytest.raises(ConflictError, match="earlier refreshes have not ended"):
                served.refresher.refresh()
    if not shared:
        served.refresher._running.release()
    served.write(1)
    served.refresher.refresh()
    served.check(1)


def test_a_cache_that_is_freed_meanwhile_is_not_written(make: Make) -> None:
    served = make()
    with running(served) as (_, refreshing):
        served.caches[0].close()
    assert isinstance(refreshing.exception(PATIENCE_S), NotReadyError)


def test_a_modification_during_a_refresh_is_not_undone(make: Make) -> None:
    served = make()
    new = served.vectors(1, 0)
    with running(served) as (_, refreshing):  # the first chunk is fetched, not yet written
        served.chain.insert(TABLES[0], KEYS, new, lambda done: served.caches[0].update(0, KEYS, new))
    assert refreshing.result(PATIENCE_S) == ALL
    np.testing.assert_array_equal(served.cached(0)[1], new[:RESIDENT])


def test_rows_of_a_table_that_is_modified_all_the_time_leave_the_cache(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A refresh gives up after some attempts. What it read by then may be older than what a modification told the cache."""
    served = make(fraction_per_iteration=1.0)
    busy, fetch, attempts = TABLES[0], served.chain.fetch, []

    def fetch_and_modify(table: TableSpec, *arguments: Any) -> int:
        found = fetch(table, *arguments)
        if table is busy:
            attempts.append(table)
            with served.chain.fence(table).modifying(10):
                served.write(len(attempts), 0)
        return found

    monkeypatch.setattr(served.chain, "fetch", fetch_and_modify)
    served.write(1, 1)
    assert served.refresher.refresh() == {"user": RefreshReport(0, RESIDENT), "item": RefreshReport(RESIDENT, 0)}
    assert served.cached(0)[0].size == 0
    assert len(attempts) == 5
    np.testing.assert_array_equal(served.cached(1)[1], served.vectors(1, 1)[:RESIDENT])


def refreshing_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "hps-refresh-shop"]


@pytest.mark.parametrize("end", ["close", "stop", "collected"])
def test_a_thread_refreshes_on_time_and_ends(end: str) -> None:
    served = Refreshed(interval_s=0.002)
    chain = served.chain
    assert refreshing_threads() == ["hps-refresh-shop"]
    for generation in (1, 2):
        served.write(generation)
        before = served.metric("refreshes_total") or 0
        wait_until(lambda before=before: (served.metric("refreshes_total") or 0) >= before + 2, "it was refreshed twice")  # type: ignore[misc]
        # Of rows that are being written, a query leaves the keys to the databases.
        wait_until(lambda: all(served.cached(index)[0].size == RESIDENT for index in (0, 1)), "no row is being written")
        for index in (0, 1):
            keys, vectors = served.cached(index)
            np.testing.assert_array_equal(vectors, served.vectors(generation, index)[keys])
    if end == "collected":
        del served
        wait_until(lambda: gc.collect() >= 0 and refreshing_threads() == [], "the thread ended")
    else:
        getattr(served.refresher, end)()
        wait_until(lambda: refreshing_threads() == [], "the thread ended")
    chain.close()
