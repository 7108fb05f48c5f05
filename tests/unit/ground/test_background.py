import threading
import time

from hps.background import BackgroundQueue
from hps.errors import DatabaseError
from hps.metrics import Metrics


def test_jobs_run_in_the_order_of_arrival():
    done = []
    jobs = BackgroundQueue("work", 10, 1, Metrics())
    for i in range(10):
        assert jobs.submit(lambda i=i: done.append(i))
    assert jobs.drain(10)
    assert done == list(range(10))
    jobs.close()


def test_full_queue_refuses_a_job_and_counts_it():
    metrics = Metrics()
    gate, started = threading.Event(), threading.Event()
    jobs = BackgroundQueue("work", 1, 1, metrics)
    jobs.submit(lambda: (started.set(), gate.wait(10)))
    assert started.wait(10)
    assert jobs.submit(lambda: None)
    assert not jobs.submit(lambda: None)
    assert metrics.registry.get_sample_value("hps_background_dropped_batches_total", {"work": "work"}) == 1
    gate.set()
    jobs.close()


def test_batches_that_wait_in_several_queues_of_a_kind_add_up():
    metrics = Metrics()
    gate = threading.Event()
    queues = [BackgroundQueue("work", 10, 1, metrics) for _ in range(2)]
    for jobs in queues:
        started = threading.Event()
        jobs.submit(lambda started=started: started.set() or gate.wait(10))
        assert started.wait(10)
        jobs.submit(lambda: None)
    assert metrics.registry.get_sample_value("hps_background_batches", {"work": "work"}) == 2
    assert metrics.queues() == {"work": 2}
    gate.set()
    for jobs in queues:
        jobs.close()
    assert metrics.queues() == {"work": 0}


def test_failing_job_is_counted_and_the_next_one_runs():
    metrics = Metrics()
    done = []

    def fail(error):
        raise error

    jobs = BackgroundQueue("work", 10, 1, metrics)
    jobs.submit(lambda: fail(DatabaseError("down")))
    jobs.submit(lambda: fail(ZeroDivisionError()))
    jobs.submit(lambda: done.append(1))
    assert jobs.drain(10)
    assert done == [1]
    assert metrics.registry.get_sample_value("hps_background_failed_batches_total", {"work": "work"}) == 2
    jobs.close()


def test_drain_gives_up_at_its_timeout():
    started, gate = threading.Event(), threading.Event()
    jobs = BackgroundQueue("work", 10, 1, Metrics())
    jobs.submit(lambda: started.set() or gate.wait(10))
    assert started.wait(10)  # nothing is queued any more
    assert not jobs.drain(0.01)
    gate.set()
    assert jobs.drain(10)
    jobs.close()


def test_close_runs_what_is_queued_and_ends_every_thread():
    done = []
    before = threading.active_count()
    jobs = BackgroundQueue("work", 10, 3, Metrics())
    for i in range(5):
        jobs.submit(lambda i=i: (time.sleep(0.01), done.append(i)))
    jobs.close()
    jobs.close()
    assert sorted(done) == list(range(5))
    assert threading.active_count() == before
    assert not jobs.submit(lambda: done.append(9))


def test_close_leaves_jobs_that_do_not_end_in_time():
    gate = threading.Event()
    done = []
    jobs = BackgroundQueue("work", 10, 1, Metrics())
    jobs.submit(lambda: gate.wait(10))
    jobs.submit(lambda: done.append(1))
    jobs.close(timeout_s=0.01)
    gate.set()
    assert done == []
