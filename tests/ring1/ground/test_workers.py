"""Workers: a queue refuses what it has no room for, a task keeps its times, a call that never answers is left behind."""

import gc
import logging
import os
import threading
import weakref
from functools import partial

import pytest

from hps.errors import DatabaseError, ModelFileNotFoundError, NotReadyError
from hps.ground.threads.workers import (
    THREADS,
    PeriodicTask,
    Stop,
    Worker,
    WorkQueue,
    call_in_thread,
    call_within,
    new_thread,
    run_periodically,
)
from hps.statistics.metrics import Metrics
from hps.testing.waiting import wait_until
from tests.fakes.clock import Clock, Pauses


def test_full_queue_refuses_a_job_and_counts_it():
    metrics = Metrics()
    gate, started = threading.Event(), threading.Event()
    jobs = WorkQueue("work", 1, 1, metrics)
    jobs.submit(lambda: (started.set(), gate.wait(30)))
    assert started.wait(30)
    assert jobs.submit(lambda: None)
    assert not jobs.submit(lambda: None)
    assert metrics.registry.get_sample_value("hps_background_dropped_batches_total", {"work": "work"}) == 1
    assert metrics.registry.get_sample_value("hps_background_batches", {"work": "work"}) == 1
    gate.set()
    jobs.close()
    assert metrics.queues() == {"work": 0}


def test_failing_job_is_counted_and_the_next_ones_run_in_their_order():
    metrics = Metrics()
    done = []

    def fail(error):
        raise error

    jobs = WorkQueue("work", 20, 1, metrics)
    jobs.submit(lambda: fail(DatabaseError("down")))
    jobs.submit(lambda: fail(ZeroDivisionError()))
    for i in range(10):
        assert jobs.submit(lambda i=i: done.append(i))
    assert jobs.drain(10)
    assert done == list(range(10))
    assert metrics.registry.get_sample_value("hps_background_failed_batches_total", {"work": "work"}) == 2
    jobs.close()


def test_drain_and_close_leave_jobs_that_do_not_end_in_time():
    started, gate, done = threading.Event(), threading.Event(), []
    jobs = WorkQueue("work", 10, 1, Metrics())
    jobs.submit(lambda: started.set() or gate.wait(30))
    assert started.wait(30)  # nothing is queued any more
    assert not jobs.drain(0.01)
    jobs.submit(lambda: done.append(1))
    jobs.close(timeout_s=0.01)
    gate.set()
    assert done == []


def test_close_runs_what_is_queued_and_ends_every_thread():
    done, gate = [], threading.Event()
    before = set(threading.enumerate())
    jobs = WorkQueue("work", 10, 3, Metrics())
    for i in range(5):
        jobs.submit(lambda i=i: (gate.wait(30), done.append(i)))
    gate.set()
    jobs.close()
    jobs.close()
    assert sorted(done) == list(range(5))
    assert set(threading.enumerate()) <= before
    assert not jobs.submit(lambda: done.append(9))


@pytest.mark.parametrize(
    ("settings", "draws", "took", "pauses"),
    [
        ({"interval_s": 10.0}, [0.5], [0, 0], [10, 10, 10]),
        ({"interval_s": 0.25, "delay_s": 1.5}, [0.5], [0.1, 0], [1.75, 0.15, 0.25]),
        ({"interval_s": 10.0, "jitter": 0.1}, [0.0, 0.5, 0.75], [0, 0], [9, 10, 10.5]),
        ({"interval_s": 10.0, "jitter": 0.1}, [0.0, 1.0, 0.5], [4, 4], [9, 7, 6]),  # from beginning to beginning
        ({"interval_s": 10.0}, [0.5], [10, 25], [10, 10, 10]),  # longer than the interval: one later, none extra
    ],
)
def test_a_task_keeps_its_times(settings, draws, took, pauses):
    clock, drawn, left = Clock(), iter(draws * 3), list(took)
    times = Pauses(len(took), clock)

    def run():
        clock.now += left.pop(0)

    run_periodically(run, times.wait, clock=clock, draw=lambda: next(drawn), **settings)
    assert times.pauses == pytest.approx(pauses)
    assert left == []


def test_a_failure_of_a_task_is_logged_once_until_a_run_succeeds(caplog):
    caplog.set_level(logging.INFO, "hps.ground.threads.workers")
    outcomes = [DatabaseError("down"), DatabaseError("down"), None, None, NotReadyError("closed"), DatabaseError("down")]
    left = list(outcomes)

    def run():
        if (error := left.pop(0)) is not None:
            raise error

    task = PeriodicTask("work", run, 3600, what="working")
    for count in range(len(outcomes), 0, -1):
        task.wake()
        wait_until(lambda count=count: len(left) < count, "it ran")
    assert task.abandon(10)
    lines = [
        (record.levelname, record.getMessage()) for record in caplog.records if record.name == "hps.ground.threads.workers"
    ]
    failed = ("WARNING", "working: down; it is tried again at every interval")
    assert lines == [failed, ("INFO", "working succeeds again"), failed]


@pytest.mark.parametrize("end", ["abandon", "stop", "collected"])
def test_a_task_ends(end):
    class Owner:
        def __init__(self):
            self.ran = threading.Semaphore(0)
            self.task = PeriodicTask("owner", self.run, 0.002)

        def run(self):
            self.ran.release()

    owner = Owner()
    task = owner.task
    assert all(owner.ran.acquire(timeout=60) for _ in range(3))
    if end == "abandon":
        assert task.abandon(20)
    elif end == "stop":
        task.stop.set()
    else:
        del owner
        gc.collect()
    assert task.join(60)
    assert not task.alive


def late() -> Exception:
    return TimeoutError("no answer")


def fail() -> None:
    raise ModelFileNotFoundError("none")


def test_a_bounded_call_gives_its_result_or_its_error():
    """And gives its thread back after each outcome: there is one."""
    threads = threading.BoundedSemaphore(1)
    for _ in range(2):
        assert call_within(20, lambda: 1 + 1, threads, late) == 2
        assert call_within(20, lambda: None, threads, late) is None
        with pytest.raises(ModelFileNotFoundError, match="none"):
            call_within(20, fail, threads, late)


def test_calls_that_never_answer_are_left_behind_up_to_a_limit():
    gate, begun, threads = threading.Event(), [], threading.BoundedSemaphore(2)

    def silent() -> bool:
        begun.append(threading.current_thread())
        return gate.wait(60)

    try:
        for _ in range(4):
            with pytest.raises(TimeoutError, match="no answer"):
                call_within(0.1, silent, threads, late)
        assert len(begun) == 2
    finally:
        gate.set()
    assert call_within(20, silent, threads, late)


@pytest.mark.parametrize(
    "call", [partial(call_within, 20, fail, threading.Semaphore(), late), lambda: call_in_thread("x", fail).result()]
)
def test_the_error_of_a_call_is_freed_with_its_handler(call):
    gc.disable()
    try:
        try:
            call()
        except ModelFileNotFoundError as error:
            freed = weakref.ref(error)
        assert freed() is None
    finally:
        gc.enable()


def ends(error):
    raise error


def by_worker(error):
    worker = Worker("short", partial(ends, error))
    worker.start()
    return worker.join


def by_queue(error):
    work = WorkQueue("short", 1, 1, Metrics())
    work.submit(partial(ends, error))
    return work.join


def by_task(error):
    task = PeriodicTask("short", partial(ends, error), 0.001)
    return task.join


def by_thread(error, name="short", **more):
    thread = new_thread(name, partial(ends, error), **more)
    thread.start()
    return thread.join


@pytest.mark.parametrize(
    ("start", "error"),
    [(by_worker, SystemExit(1)), (by_queue, KeyboardInterrupt()), (by_task, GeneratorExit()), (by_thread, SystemExit(1))],
)
def test_a_thread_that_an_error_ends_is_logged_counted_and_asks_for_a_restart(start, error, caplog):
    start(error)(20)
    assert THREADS.ended() == {"hps-short": 1}
    assert "hps-short" in THREADS.problem
    assert Metrics().registry.get_sample_value("hps_threads_ended_total", {"thread": "hps-short"}) == 1
    (record,) = (record for record in caplog.records if record.levelname == "ERROR")
    assert "hps-short" in record.getMessage()
    assert record.exc_info[1] is error
    THREADS.clear()


def test_the_first_of_several_threads_names_the_restart_and_each_is_counted():
    for name in ("a", "b", "a", "c"):
        by_thread(ValueError(name), name)(20)
    assert THREADS.ended() == {"hps-a": 2, "hps-b": 1, "hps-c": 1}
    assert "hps-a" in THREADS.problem
    THREADS.clear()
    assert (THREADS.ended(), THREADS.problem) == ({}, "")


def test_a_single_task_that_fails_is_counted_and_asks_for_no_restart(caplog):
    by_thread(ValueError("a bug"), "task", lasting=False)(20)
    assert (THREADS.ended(), THREADS.problem) == ({"hps-task": 1}, "")
    assert "hps-task" in caplog.text
    assert "restart" not in caplog.text
    THREADS.clear()


def test_a_thread_that_ends_as_it_should_is_no_news(caplog):
    future = call_in_thread("call", partial(ends, ValueError("for the caller")))
    with pytest.raises(ValueError, match="for the caller"):
        future.result(20)
    thread = new_thread("done", lambda: None)
    thread.start()
    thread.join(20)
    assert (THREADS.ended(), THREADS.problem, caplog.text) == ({}, "", "")


def test_a_forked_child_has_lost_no_thread():
    by_thread(ValueError(), "parent")(20)
    child = os.fork()
    if child == 0:
        os._exit(0 if (THREADS.ended(), THREADS.problem) == ({}, "") else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    THREADS.clear()


def test_a_worker_of_three_threads_lives_until_the_last_has_ended():
    gates = [threading.Event() for _ in range(3)]
    turns = iter(gates)
    worker = Worker("three", lambda: next(turns).wait(30), threads=3)
    worker.start()
    for gate in (gates[2], gates[0]):
        gate.set()
        assert not worker.join(0.05)
        assert worker.alive
    gates[1].set()
    assert worker.join(30)
    assert not worker.alive


def test_jobs_given_up_leave_every_thread_free_to_end():
    gate, done = threading.Event(), []
    jobs = WorkQueue("work", 10, 3, Metrics())
    for _ in range(3):
        jobs.submit(lambda: gate.wait(30))
    for number in range(5):
        jobs.submit(partial(done.append, number))
    jobs.stop.set()
    assert not jobs.abandon(timeout_s=0.01)
    gate.set()
    assert jobs.join(30)
    assert (done, jobs.waiting(), jobs.drain(0.0)) == ([], 0, True)


def test_wakes_are_not_lost_and_several_count_as_one():
    stop = Stop()
    for _ in range(3):
        for _ in range(3):
            stop.wake()
        assert not stop.wait(30)
        assert not stop.wait(0.01)
    stop.set()
    for _ in range(3):
        assert stop.wait(30)
