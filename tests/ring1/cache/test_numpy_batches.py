"""The loop that answers from NumPy caches: vectors of the right keys or none, whatever fronts and writers do meanwhile."""

import os
import threading
import time
from bisect import bisect_left
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest

from hps.cache.cpu.batches import MOST_KEYS, NumpyBatches
from hps.cache.cpu.cache import NumpyCache
from hps.regions import layout
from hps.regions.exchange import MALFORMED_COUNT
from hps.regions.layout import ANSWERED, FAILED, HEADER_BYTES, MALFORMED, POOLED, RETIRED, SLAB, TRACED
from hps.regions.loop_state import LoopState
from hps.statistics.times import LOOKUP_BOUNDS_NS
from hps.testing.waiting import PATIENCE_S, wait_until
from tests.fakes.region_front import RegionFront, tables_of

DIMS = (4, 1, 33)
ROWS = 500


def vectors_of(table, keys, dim, of=1):
    """The vectors of a deployment's keys: no two agree, and all elements of one do."""
    numbers = of * (100_000 * (table + 1) + np.asarray(keys, np.float32))
    return np.repeat(numbers[:, None], dim, axis=1).astype(np.float32)


def cache_of(dims=DIMS, of=1, rows=ROWS, capacity=4 * ROWS):
    """A cache in which the keys below `rows` are resident."""
    cache = NumpyCache.create(tables_of(*dims), [capacity] * len(dims), 0)
    keys = np.arange(rows)
    for table, dim in enumerate(dims):
        cache.insert(table, keys, vectors_of(table, keys, dim, of))
    return cache


class Loop:
    """A loop over some fronts in a thread. What it hands over is completed as failed."""

    def __init__(self, fronts):
        self.event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._jobs = os.eventfd(0, os.EFD_SEMAPHORE | os.EFD_CLOEXEC)
        self.loop_state = LoopState(
            [front.memory for front in fronts], [front.event for front in fronts], self.event, self._jobs, 0
        )
        self.driver = NumpyBatches(self.loop_state)
        self.driver.prepare()
        self.handed_over = []
        self.caches = []  # as sessions hold them
        self._threads = [threading.Thread(target=one, daemon=True) for one in (self.driver.run, self._work)]

    def serve(self, cache, dims=DIMS, **options):
        self.caches.append(cache)
        return self.loop_state.add(tables_of(*dims, **options), self.driver.resident(cache) if cache is not None else None)

    def start(self):
        for thread in self._threads:
            thread.start()

    def _work(self):
        while True:
            os.eventfd_read(self._jobs)
            if (job := self.loop_state.next_request()) is None:
                return
            self.handed_over.append(job)
            self.loop_state.memories[job.place][job.slot + layout.STATUS] = FAILED
            self.loop_state.complete(job)

    def wake(self):
        os.eventfd_write(self.event, 1)

    def stop(self):
        self.loop_state.stop()
        self._threads[0].join(PATIENCE_S)
        assert not self._threads[0].is_alive()
        os.eventfd_write(self._jobs, 1)
        self._threads[1].join(PATIENCE_S)
        os.close(self.event)
        os.close(self._jobs)


@contextmanager
def running(count=1, slab_bytes=1 << 20):
    """A loop over some fronts that have begun."""
    with ExitStack() as stack:
        fronts = [RegionFront(slab_bytes) for _ in range(count)]
        for front in fronts:
            stack.callback(front.close)
        loop = Loop(fronts)
        for front in fronts:
            front.begin()
        loop.start()
        stack.callback(loop.stop)
        yield loop, *fronts


@pytest.fixture
def served():
    """A loop, its front, and the deployment_id of a deployment whose keys below ROWS are resident."""
    with running(slab_bytes=8 << 20) as (loop, front):
        yield loop, front, loop.serve(cache_of(), max_keys=1 << 20)


def ask(loop, front, *requests):
    """Post requests and wait until all are completed."""
    wait_for_epoch(front)
    if front.post(*[request.slot for request in requests]):
        loop.wake()
    assert sorted(front.wait(len(requests))) == sorted(request.slot for request in requests)


def wait_for_epoch(front):
    wait_until(lambda: front.memory[layout.ENGINE_EPOCH] == front.memory[layout.FRONTEND_EPOCH], "the loop has taken the epoch")


def check(request, of=1):
    """An answer has the vectors of its keys, and says that it found them all."""
    assert request.status == ANSWERED
    for table, keys, out, found in request.asked:
        assert np.array_equal(out, vectors_of(table, keys, out.shape[1], of))
        assert found is None or found.all()


def test_resident_keys_are_answered_and_no_keys_and_a_new_epoch(served):
    loop, front, deployment_id = served
    asked = [
        [(2, [7, 0, 7, ROWS - 1], True), (0, range(100), False), (1, [3], True)],
        [(0, [], True), (1, [5], True), (2, [], False)],
        [],
        [(0, [], False)],
    ]
    for epoch in (1, 2, 9):
        if epoch > 1:
            front.begin(epoch)
            loop.wake()
        requests = [front.write(SLAB + 16384 * nth, deployment_id, DIMS, one) for nth, one in enumerate(asked)]
        ask(loop, front, *requests)
        for request in requests:
            check(request)
        assert 0 < requests[0].times[0] <= requests[0].times[1]
    assert loop.handed_over == []


def test_requests_are_handed_over_while_the_cache_is_not_trusted(served):
    loop, front, deployment_id = served
    answered = []
    for until_ns in (time.perf_counter_ns() - 1, time.perf_counter_ns() + 10**15, 0):
        loop.loop_state.trust_until(deployment_id, until_ns)
        request = front.write(SLAB, deployment_id, DIMS, [(0, [1, 2], False)])
        ask(loop, front, request)
        answered.append(request.status == ANSWERED)
    assert answered == [False, True, False]
    loop.loop_state.hand_over_all(True)
    loop.loop_state.trust_until(deployment_id, time.perf_counter_ns() + 10**15)
    ask(loop, front, request := front.write(SLAB, deployment_id, DIMS, [(0, [1], False)]))
    assert request.status == FAILED
    loop.loop_state.hand_over_all(False)
    ask(loop, front, request := front.write(SLAB, deployment_id, DIMS, [(0, [1], False)]))
    check(request)


def test_nothing_beside_vectors_masks_and_status_is_written(served):
    loop, front, deployment_id = served
    front.memory.bytes[SLAB:] = 0x5A
    request = front.write(SLAB + 4096, deployment_id, DIMS, [(0, [1, 2, 3], True), (2, [9], False), (1, [4], True)])
    before = front.memory.bytes.copy()
    ask(loop, front, request)
    check(request)
    for word in (layout.STATUS, layout.BEGAN_NS, layout.ENDED_NS):
        before[request.slot + word : request.slot + word + 8] = front.memory.bytes[request.slot + word :][:8]
    for array in [array for _, _, *arrays in request.asked for array in arrays if array is not None]:
        at = array.ctypes.data - front.memory.address
        before[at : at + array.nbytes] = array.view(np.uint8).reshape(-1)
    assert np.array_equal(front.memory.bytes[SLAB:], before[SLAB:])


@pytest.mark.parametrize("where", [0, 1, 2])
def test_a_request_with_an_absent_key_is_handed_over_whole(served, where):
    loop, front, deployment_id = served
    segments = [(table, [1, 2, 3], True) for table in range(3)]
    segments[where] = (where, [1, ROWS, 3], True)
    resident = front.write(SLAB + 8192, deployment_id, DIMS, [(0, [1], False)])
    request = front.write(SLAB, deployment_id, DIMS, segments)
    ask(loop, front, request, resident)
    check(resident)
    assert request.status == FAILED
    assert [(job.slot, job.status) for job in loop.handed_over] == [(SLAB, 0)]
    assert loop.handed_over[0].segments[:, :2].tolist() == [[0, 3], [1, 3], [2, 3]]
    tables, times, ns = loop.loop_state.tally(deployment_id)
    assert (tables, sum(times), ns) == ([[1, 1, 0, 0], [0] * 4, [0] * 4], 1, resident.times[1] - resident.times[0])
    assert times[bisect_left(LOOKUP_BOUNDS_NS, ns)] == 1


def test_what_needs_python_is_handed_over(served):
    loop, front, deployment_id = served
    assert NumpyBatches.resident(object.__new__(NumpyBatches), object()) is None  # another kind of cache
    one_key = [(0, [1], False)]
    requests = [front.write(SLAB, loop.serve(None), DIMS, one_key)]
    for nth, flags in enumerate((TRACED, POOLED, TRACED | POOLED, 1 << 40, -1), 1):
        requests.append(front.write(SLAB + 4096 * nth, deployment_id, DIMS, one_key, flags=flags))
    ask(loop, front, *requests)
    assert [request.status for request in requests] == [FAILED] * 6
    assert len(loop.handed_over) == 6


@pytest.mark.parametrize("n", [MOST_KEYS, MOST_KEYS + 1])
def test_a_request_of_very_many_keys_is_handed_over(served, n):
    loop, front, deployment_id = served
    keys = np.arange(n) % ROWS
    request = front.write(SLAB, deployment_id, DIMS, [(1, keys[: n // 2], False), (1, keys[n // 2 :], True)])
    ask(loop, front, request)
    if n == MOST_KEYS:
        check(request)
    assert len(loop.handed_over) == n - MOST_KEYS


def test_malformed_descriptors_are_refused_and_counted_and_ended_deployments_retired(served):
    loop, front, deployment_id = served
    other = loop.serve(cache_of())
    loop.loop_state.retire(other)
    deployment_ids = [deployment_id] * 5 + [other, deployment_id + 256, 0, -5]
    good, *bad = [front.write(SLAB + 4096 * nth, one, DIMS, [(0, [1, 2], True)]) for nth, one in enumerate(deployment_ids)]
    first_segment = HEADER_BYTES // 8
    for nth, (word, value) in enumerate([(2, 1 << 40), (first_segment, 3), (first_segment + 1, 1 << 61), (3, 1 << 40)]):
        front.memory.words[bad[nth].slot // 8 + word] = value
    ask(loop, front, *bad, good)
    check(good)
    assert [one.status for one in bad] == [MALFORMED] * 4 + [RETIRED] * 4
    assert all((one.asked[0][2] == -7.0).all() for one in bad)
    assert loop.loop_state.regions[0, MALFORMED_COUNT] == 4


def test_slots_that_are_none_come_back_and_nothing_is_written_to_them(served):
    loop, front, _ = served
    wait_for_epoch(front)
    before, size = front.memory.bytes.copy(), front.memory.size
    slots = [0, -1, -64, SLAB - 64, SLAB + 8, size - 64, size, size + 64, 1 << 62, -(1 << 63), layout.COMPLETED, layout.FIGURES]
    if front.post(*slots):
        loop.wake()
    assert front.wait(len(slots)) == slots
    assert np.array_equal(front.memory.bytes[layout.FIGURES :], before[layout.FIGURES :])
    assert loop.loop_state.regions[0, MALFORMED_COUNT] == len(slots)


def test_the_counts_are_those_of_the_answers(served):
    loop, front, deployment_id = served
    asked = [[(0, range(nth), False), (2, range(3 * nth), False)] for nth in range(20)]
    requests = [front.write(SLAB + 16384 * nth, deployment_id, DIMS, one) for nth, one in enumerate(asked)]
    ask(loop, front, *requests)
    tables, times, ns = loop.loop_state.tally(deployment_id)
    assert (tables, sum(times)) == ([[190, 190, 0, 0], [0, 0, 0, 0], [570, 570, 0, 0]], 20)
    assert ns == sum(request.times[1] - request.times[0] for request in requests)
    assert loop.loop_state.is_idle(deployment_id)


def client(front, serial_of, rounds, seed, failures, wake, of=lambda deployment_id: {1}, statuses=(ANSWERED, RETIRED)):
    """Post batches of requests for resident keys, and check each answer; `of` says whose vectors there may be."""
    try:
        random = np.random.default_rng(seed)
        wait_for_epoch(front)
        for _ in range(rounds):
            deployment_id, requests = serial_of(), []
            for nth in range(int(random.integers(1, 20))):
                segments = [(table, random.integers(0, ROWS, int(random.integers(0, 30))), True) for table in range(3)]
                requests.append(front.write(SLAB + 16384 * nth, deployment_id, DIMS, segments))
            if front.post(*[request.slot for request in requests]):
                wake()
            assert sorted(front.wait(len(requests))) == [request.slot for request in requests]
            for request in requests:
                assert request.status in statuses
                if request.status == ANSWERED:
                    for table, keys, out, found in request.asked:
                        assert any(np.array_equal(out, vectors_of(table, keys, out.shape[1], own)) for own in of(deployment_id))
                        assert found.all()
    except BaseException as error:  # noqa: BLE001 - raised by the test
        failures.append(error)


def test_a_front_that_posts_garbage_harms_no_other():
    with running(3) as (loop, first, bad, second):
        deployment_id, failures, ended = loop.serve(cache_of()), [], threading.Event()

        def throw():
            random = np.random.default_rng(3)
            edges = np.array([0, -1, 1, 64, 128, 1 << 20, 1 << 40, 1 << 62, -(1 << 63), deployment_id, SLAB, bad.memory.size])
            while not ended.is_set():
                bad.memory.words[SLAB // 8 : SLAB // 8 + 512] = random.choice(edges, 512)
                bad.memory.words[SLAB // 8 + random.integers(0, 64) * 8] = deployment_id
                bad.memory.words[layout.SUBMISSIONS // 8 : layout.COMPLETIONS // 8] = SLAB + 64 * random.integers(-2, 66, 2048)
                bad.memory[layout.SUBMITTED] += int(random.integers(-5, 60))
                bad.memory[layout.COMPLETED] = int(random.choice(edges))
                if random.random() < 0.05:
                    bad.memory[layout.FRONTEND_EPOCH] = int(random.choice(edges))
                if random.random() < 0.05:
                    bad.begin(int(random.integers(1, 1 << 40)))
                loop.wake()

        thrower = threading.Thread(target=throw, daemon=True)
        clients = []
        for seed, front in enumerate((first, second)):
            arguments = (front, lambda: deployment_id, 80, seed, failures, loop.wake)
            clients.append(threading.Thread(target=client, args=arguments, daemon=True))
        for one in (thrower, *clients):
            one.start()
        for one in clients:
            one.join(PATIENCE_S)
            assert not one.is_alive()
        ended.set()
        thrower.join()
        assert failures == []
        malformed = loop.loop_state.regions[:, MALFORMED_COUNT].tolist()
        assert malformed[1] > 0
        assert [malformed[0], malformed[2]] == [0, 0]


def test_a_deployment_that_ends_under_load_is_never_answered_from_another():
    """Another deployment takes the row, and other vectors the memory, as soon as the first is idle."""
    with running() as (loop, front):
        served, current, failures = {}, [], []

        def deploy(of):
            cache = cache_of(of=of)
            served[loop.serve(cache)] = of
            current[:] = [max(served)]

        deploy(1)
        clients = threading.Thread(
            target=client,
            args=(front, lambda: current[0], 400, 1, failures, loop.wake, lambda deployment_id: {served[deployment_id]}),
            # A request is handed over whose deployment ends between its being taken and being answered.
            kwargs={"statuses": (ANSWERED, RETIRED, FAILED)},
            daemon=True,
        )
        clients.start()
        of = 1
        while clients.is_alive():
            of += 1
            old = current[0]
            loop.loop_state.retire(old)
            while not loop.loop_state.is_idle(old):
                pass
            for table in loop.caches.pop().open_tables():
                table.vectors[:] = -1.0  # as if the memory were another's
            loop.loop_state.release(old)
            deploy(of)
        clients.join()
        assert failures == []
        assert of > 2
        assert len({one & 255 for one in served}) == 1
