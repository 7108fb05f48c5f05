import gc
import subprocess
import sys
import threading
import weakref
from contextlib import suppress

import numpy as np
import pytest

from hps.errors import DatabaseError
from hps.ground.threads.thread_pool import ThreadPool
from hps.testing.waiting import PATIENCE_S, wait_until


@pytest.fixture
def pool():
    pool = ThreadPool()
    pool.limit_to(4)
    yield pool
    pool.end()


def threads_of(pool):
    return [thread for thread in threading.enumerate() if thread in pool._threads]


@pytest.mark.parametrize(
    ("rows", "threads"), [(0, 2), (1, 5), (99, 2), (100, 2), (199, 5), (200, 1), (200, 2), (1000, 5), (70_001, 1), (70_001, 5)]
)
def test_every_row_is_worked_on_once_and_reported_in_order(pool, rows, threads):
    pool.limit_to(threads)
    worked, reported = np.zeros(rows, np.int64), [0]

    def work(start, stop):
        worked[start:stop] += 1

    def done(start, stop):
        assert start == reported[-1]
        assert (worked[:stop] == 1).all()
        reported.append(stop)

    pool.run(rows, 100, work, done)
    assert reported[-1] == rows
    assert (worked == 1).all()


@pytest.mark.parametrize(("rows", "least_rows"), [(199, 100), (1000, 0)])
def test_work_that_is_not_worth_a_thread_is_done_at_once_by_the_caller(pool, rows, least_rows):
    calls = []
    pool.run(rows, least_rows, lambda start, stop: calls.append((start, stop, threading.get_ident())))
    assert calls == [(0, rows, threading.get_ident())]
    assert not pool._threads


def test_threads_work_at_the_same_time_up_to_the_limit(pool):
    together = threading.Barrier(4)
    pool.run(4, 1, lambda start, stop: together.wait(PATIENCE_S))
    assert len(threads_of(pool)) == 3


def test_call_is_complete_without_threads_that_are_free(pool):
    begun, gate = threading.Semaphore(0), threading.Event()

    def hold(start, stop):
        begun.release()
        assert gate.wait(PATIENCE_S)

    holder = threading.Thread(target=pool.run, args=(4, 1, hold), daemon=True)
    holder.start()
    for _ in range(4):
        assert begun.acquire(timeout=PATIENCE_S)
    rows = []
    pool.run(100, 1, lambda start, stop: rows.append((start, threading.get_ident())))
    assert {thread for _, thread in rows} == {threading.get_ident()}
    assert len(rows) == len({start for start, _ in rows}) > 1
    gate.set()
    holder.join(PATIENCE_S)
    assert not holder.is_alive()


@pytest.mark.parametrize("where", ["caller", "helper"])
def test_failure_reaches_the_caller_when_the_other_pieces_have_ended(pool, where):
    caller, begun, ended = threading.get_ident(), threading.Barrier(2), []
    pool.limit_to(2)

    def work(start, stop):
        job = pool._jobs[0]
        begun.wait(PATIENCE_S)
        if (threading.get_ident() == caller) == (where == "caller"):
            raise DatabaseError("told to fail")
        wait_until(lambda: job.error, "the failure is known")
        ended.append(start)

    with pytest.raises(DatabaseError, match="told to fail"):
        pool.run(2, 1, work, lambda start, stop: None)
    assert len(ended) == 1


def test_pieces_after_a_failure_are_not_begun(pool):
    pool.limit_to(1)
    begun = []

    def work(start, stop):
        begun.append(start)
        raise DatabaseError("told to fail")

    with pytest.raises(DatabaseError):
        pool.run(400, 100, work)
    assert begun == [0]


def fails(start, stop):
    raise DatabaseError("the disk is gone")


@pytest.mark.parametrize(("work", "done"), [(fails, None), (lambda start, stop: None, fails), (lambda start, stop: None, None)])
def test_nothing_of_a_call_is_kept_when_it_has_ended(pool, work, done):
    class Rows:
        pass

    def call():
        rows = Rows()
        alive.append(weakref.ref(rows))
        with suppress(DatabaseError):
            pool.run(1000, 10, lambda start, stop: (rows, work(start, stop)), done)

    alive = []
    gc.disable()
    try:
        for _ in range(3):
            call()
        wait_until(lambda: not any(one() for one in alive), "the other threads let go, too")
    finally:
        gc.enable()


def test_ended_pool_leaves_no_thread_and_starts_again(pool):
    for _ in range(2):
        pool.run(4, 1, lambda start, stop: None)
        threads = threads_of(pool)
        assert threads
        pool.end()
        assert not any(thread.is_alive() for thread in threads)


def test_pool_that_ends_during_a_call_leaves_the_rest_to_the_caller(pool):
    pool.limit_to(2)
    helper, gate, rows = threading.Event(), threading.Event(), []

    def work(start, stop):
        if threading.get_ident() != caller.ident:
            helper.set()
            assert gate.wait(PATIENCE_S)
        assert helper.wait(PATIENCE_S)
        rows.append(start)

    caller = threading.Thread(target=pool.run, args=(100, 1, work), daemon=True)
    caller.start()
    assert helper.wait(PATIENCE_S)
    ending = threading.Thread(target=pool.end, daemon=True)
    ending.start()
    gate.set()
    for thread in (caller, ending):
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    assert len(set(rows)) == len(rows) == 8
    assert not threads_of(pool)


def test_forked_child_works_with_threads_of_its_own():
    script = """
import os, threading, warnings
from hps.ground.threads.thread_pool import POOL
warnings.simplefilter("ignore")  # that a process with threads forks
POOL.limit_to(2)
for child in (True, False):
    together = threading.Barrier(2)
    POOL.run(2, 1, lambda start, stop: together.wait(30))
    if child and (pid := os.fork()):
        raise SystemExit(os.waitpid(pid, 0)[1] != 0)
"""
    done = subprocess.run([sys.executable, "-c", script], timeout=60, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
