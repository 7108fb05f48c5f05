"""Rings that count up without end, epochs of fronts and engines that die, and a sleeper that nobody forgets."""

import os
import select
import threading
from contextlib import contextmanager

import numpy as np
import pytest
from numba import int64, void

from hps.ground.kernels.numba_kernels import kernel
from hps.regions import exchange, layout
from hps.regions.exchange import any_submitted, arm, available, complete, complete_handed_over, idle, take
from hps.regions.layout import RING, SLAB
from hps.regions.loop_state import LoopState
from tests.fakes.region_front import RegionFront

_WORDS, _ROWS = int64[::1], int64[:, ::1]
BEGAN = -1
FIRST, SECOND, THIRD = SLAB, SLAB + 64, SLAB + 128  # any numbers would do: nothing reads what is in a slot here
NO_COUNTS = [-1, RING + 1, -(1 << 63), (1 << 63) - 1]


@kernel(int64, _ROWS, int64, _WORDS, _WORDS)
def _take_all(regions, place, slots, state):
    """Do what a loop does with one front in one turn; return what `available` says."""
    count = available(regions, place, state.ctypes.data + 8 * exchange.STATE_SCRATCH)
    for nth in range(count):
        slots[nth] = take(regions, place)
    return count


@kernel(int64, _ROWS, _WORDS, int64)
def _rest(regions, state, idle_since):
    return idle(regions, state, idle_since)


@kernel(int64, _ROWS)
def _any_submitted(regions):
    return 1 if any_submitted(regions) else 0


@kernel(void, _ROWS, int64, int64, int64)
def _complete_many(regions, place, first, count):
    for nth in range(count):
        complete(regions, place, first + nth)


class Engine:
    """The engine's side of some fronts, by hand."""

    def __init__(self, *fronts):
        self.event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.loop_state = LoopState([one.memory for one in fronts], [one.event for one in fronts], self.event, -1, 0)
        self.regions = self.loop_state.regions
        self._slots = np.zeros(RING, np.int64)

    def take(self, place=0):
        count = _take_all(self.regions, place, self._slots, self.loop_state.state)
        return count if count < 0 else self._slots[:count].tolist()

    def complete(self, slots, place=0):
        """Complete slots; return how often the front had to be woken."""
        return sum(complete_handed_over(self.regions, place, slot) >= 0 for slot in slots)

    def idle(self, idle_since=0):
        """Sleep, if there is nothing to do; return how often it was woken."""
        _rest(self.regions, self.loop_state.state, idle_since)
        return self.loop_state.state[exchange.WAKES]

    @property
    def any_submitted(self):
        return _any_submitted(self.regions)

    @property
    def in_flight(self):
        return int(self.regions[0, exchange.IN_FLIGHT])

    def close(self):
        os.close(self.event)


@pytest.fixture
def front():
    front = RegionFront()
    yield front
    front.close()


@pytest.fixture
def engine(front):
    engine = Engine(front)
    yield engine
    engine.close()


@pytest.fixture
def joined(front, engine):
    front.begin()
    assert engine.take() == BEGAN
    return front, engine


@contextmanager
def started(work, *calls):
    """Threads that work until the block ends and they have finished."""
    workers = [threading.Thread(target=work, args=arguments, daemon=True) for arguments in calls]
    for worker in workers:
        worker.start()
    yield
    for worker in workers:
        worker.join()


def test_slots_are_taken_in_the_order_of_their_posts_and_completed_in_any(joined):
    front, engine = joined
    assert front.post(SECOND, FIRST, THIRD) == 0
    assert engine.take() == [SECOND, FIRST, THIRD]
    assert engine.take() == []
    for some in ([THIRD, SECOND], [FIRST], []):
        engine.complete(some)
        assert front.completed() == some
    assert engine.in_flight == 0


@pytest.mark.parametrize("batch", [RING, RING - 1, 1000, 683])
def test_rings_go_round_without_losing_or_repeating_a_slot(joined, batch):
    front, engine = joined
    posted = 0
    while posted < 3 * RING + 5:
        slots = [FIRST + 64 * (posted + nth) for nth in range(batch)]
        posted += batch
        front.post(*slots)
        assert engine.take() == slots
        engine.complete(slots[::-1])
        assert front.completed() == slots[::-1]
    assert engine.in_flight == 0
    assert front.memory[layout.SUBMITTED] == front.memory[layout.TAKEN] == front.memory[layout.COMPLETED] == posted


def test_a_full_ring_is_taken_whole_and_a_front_that_posts_more_waits_for_its_own_answers(joined):
    front, engine = joined
    front.post(*range(RING))
    assert engine.take() == list(range(RING))
    assert engine.in_flight == RING
    front.post(7, 8, 9)
    assert not engine.any_submitted
    assert engine.take() == []
    engine.complete([0, 1])
    assert engine.any_submitted
    assert engine.take() == [7, 8]
    assert engine.in_flight == RING


@pytest.mark.parametrize("count", NO_COUNTS)
def test_a_count_that_nobody_has_is_not_believed_and_lets_the_engine_sleep(joined, count):
    front, engine = joined
    front.memory[layout.SUBMITTED] = front.memory[layout.COMPLETED] = count
    assert engine.take() == front.completed() == []
    assert not engine.any_submitted


def test_an_engine_wakes_the_front_whose_epoch_it_begins_and_takes_nothing_before(front, engine):
    front.post(FIRST)
    assert engine.take() == []
    assert not engine.any_submitted
    front.begin(epoch=5)
    assert engine.any_submitted
    assert engine.take() == BEGAN
    assert front.memory[layout.ENGINE_EPOCH] == front.memory[layout.STARTED_EPOCH] == 5
    assert os.eventfd_read(front.event) == 1
    assert engine.take() == []


def test_a_front_that_restarts_waits_for_what_the_one_before_it_has_under_way(joined):
    front, engine = joined
    front.post(FIRST, SECOND, THIRD)
    assert engine.take() == [FIRST, SECOND, THIRD]
    engine.complete([FIRST])
    front.post(THIRD + 64)
    front.begin(epoch=2)
    for slot in (SECOND, THIRD):
        assert engine.take() == []  # also not the last of the old epoch
        assert not engine.any_submitted
        assert front.memory[layout.ENGINE_EPOCH] == 1
        engine.complete([slot])
    assert engine.any_submitted
    assert engine.take() == BEGAN
    assert front.memory[layout.ENGINE_EPOCH] == 2
    assert front.memory[layout.COMPLETED] == front.memory[layout.TAKEN] == 0
    assert front.completed() == []
    front.post(FIRST)
    assert engine.take() == [FIRST]
    engine.complete([FIRST])
    assert front.completed() == [FIRST]


@pytest.mark.parametrize("noticed", [False, True])
def test_an_engine_that_restarts_serves_an_epoch_that_none_has_begun_and_no_other(front, noticed):
    first = Engine(front)
    front.begin(epoch=3)
    first.take()
    front.post(FIRST, SECOND)
    first.take()
    first.complete([FIRST])
    first.close()
    front.memory[layout.ENGINE_EPOCH] = 0  # as its parent does
    if noticed:
        front.begin(epoch=4)  # before the next engine is there; what the first has taken is nobody's
    second = Engine(front)
    if not noticed:
        for slots in ([], [THIRD]):
            front.post(*slots)
            assert not second.any_submitted
            assert second.take() == []
        assert front.memory[layout.ENGINE_EPOCH] == 0
        front.begin(epoch=4)
    assert second.take() == BEGAN
    assert front.memory[layout.ENGINE_EPOCH] == 4
    front.post(SECOND)
    assert second.take() == [SECOND]
    second.close()


# -- sleep ----------------------------------------------------------------------------------------------------------------


def test_one_post_wakes_a_sleeping_engine_and_one_completion_a_sleeping_front(joined):
    front, engine = joined
    front.memory[layout.ENGINE_SLEEPS] = 1
    assert front.post(FIRST) == 1
    assert front.memory[layout.ENGINE_SLEEPS] == 0
    assert front.post(SECOND, THIRD) == 0
    engine.take()
    assert arm(front.memory.address) == 0
    assert engine.complete([FIRST, SECOND]) == 1
    assert front.memory[layout.FRONTEND_SLEEPS] == 0
    assert engine.complete([THIRD]) == 0  # nobody slept: nothing will come
    assert arm(front.memory.address) == 3


def test_an_engine_sleeps_when_nothing_was_posted_nor_shall_it_stop_nor_was_it_busy(joined):
    front, engine = joined
    front.post(FIRST)
    assert engine.idle() == front.memory[layout.ENGINE_SLEEPS] == 0
    engine.take()
    engine.loop_state.state[exchange.STOP] = 1
    assert engine.idle() == 0
    engine.loop_state.state[[exchange.STOP, exchange.SPIN_NS]] = 0, 1 << 62
    assert _rest(engine.regions, engine.loop_state.state, 5) == 5
    assert engine.idle(5) == 0
    engine.loop_state.state[exchange.SPIN_NS] = 0
    os.eventfd_write(engine.event, 3)
    assert engine.idle() == 1
    assert not select.select([engine.event], [], [], 0)[0]  # it took its event and its flag back
    assert front.memory[layout.ENGINE_SLEEPS] == 0


def test_no_completion_is_lost_between_a_front_that_falls_asleep_and_engines_that_complete(joined):
    """A front that misses a wake-up waits for ever: nothing else wakes it. Several threads complete, as the engine's do."""
    front, engine = joined
    rounds, threads, each = 60, 3, 20
    barrier = threading.Barrier(threads + 1)

    def finish(first):
        for _ in range(rounds):
            barrier.wait()
            for nth in range(each):
                if complete_handed_over(engine.regions, 0, first + nth) >= 0:
                    os.eventfd_write(front.event, 1)

    with started(finish, *[(1000 * nth,) for nth in range(threads)]):
        for _ in range(rounds):
            expected = [1000 * nth + one for nth in range(threads) for one in range(each)]
            front.post(*expected)
            assert engine.take() == expected
            barrier.wait()
            assert sorted(front.wait(threads * each)) == expected
    assert engine.in_flight == 0


def test_threads_that_complete_at_once_do_not_overwrite_each_other(joined):
    front, engine = joined
    each, threads = 1_000_000, 4
    _complete_many(engine.regions, 0, 0, 0)  # compiles
    with started(_complete_many, *[(engine.regions, 0, 0, each)] * threads):
        pass
    assert front.memory[layout.COMPLETED] == threads * each
    assert engine.in_flight == -threads * each  # nothing was taken before


def test_an_engine_sleeps_until_its_event_even_if_another_front_is_gone(joined):
    _, engine = joined
    assert engine.loop_state.state[exchange.LOOP_EVENT] == engine.event
    engine.loop_state.regions[0, 0] = 0  # no region at this place
    assert engine.take() == []
    assert not engine.any_submitted
    os.eventfd_write(engine.event, 1)
    assert engine.idle() == 1
