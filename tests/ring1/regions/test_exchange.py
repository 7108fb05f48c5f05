"""Rings that count up without end, epochs of fronts and owners that die, and a sleeper that nobody forgets."""

import os
import select
import threading
from contextlib import contextmanager

import numpy as np
import pytest
from numba import int64, void

from hps.ground.kernels.numba_kernels import kernel
from hps.regions import exchange, layout
from hps.regions.board import Board
from hps.regions.exchange import any_submitted, arm, available, complete, complete_job, rest, take
from hps.regions.layout import RING, SLAB
from tests.fakes.region_front import RegionFront

_WORDS, _ROWS = int64[::1], int64[:, ::1]
BEGAN = -1
FIRST, SECOND, THIRD = SLAB, SLAB + 64, SLAB + 128  # any numbers would do: nothing reads what is in a slot here
NO_COUNTS = [-1, RING + 1, -(1 << 63), (1 << 63) - 1]


@kernel(int64, _ROWS, int64, _WORDS, _WORDS)
def _take_all(regions, place, slots, state):
    """Do what a loop does with one front in one turn; return what `available` says."""
    count = available(regions, place, state.ctypes.data + 8 * exchange.SCRATCH)
    for nth in range(count):
        slots[nth] = take(regions, place)
    return count


@kernel(int64, _ROWS, _WORDS, int64)
def _rest(regions, state, idle_since):
    return rest(regions, state, idle_since)


@kernel(int64, _ROWS)
def _any_submitted(regions):
    return 1 if any_submitted(regions) else 0


@kernel(void, _ROWS, int64, int64, int64)
def _complete_many(regions, place, first, count):
    for nth in range(count):
        complete(regions, place, first + nth)


class Owner:
    """The owner's side of some fronts, by hand."""

    def __init__(self, *fronts):
        self.event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.board = Board([one.memory for one in fronts], [one.event for one in fronts], self.event, -1, 0)
        self.regions = self.board.regions
        self._slots = np.zeros(RING, np.int64)

    def take(self, place=0):
        count = _take_all(self.regions, place, self._slots, self.board.state)
        return count if count < 0 else self._slots[:count].tolist()

    def complete(self, slots, place=0):
        """Complete slots; return how often the front had to be woken."""
        return sum(complete_job(self.regions, place, slot) >= 0 for slot in slots)

    def rest(self, idle_since=0):
        """Sleep, if there is nothing to do; return how often it was woken."""
        _rest(self.regions, self.board.state, idle_since)
        return self.board.state[exchange.WAKES]

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
def owner(front):
    owner = Owner(front)
    yield owner
    owner.close()


@pytest.fixture
def joined(front, owner):
    front.begin()
    assert owner.take() == BEGAN
    return front, owner


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
    front, owner = joined
    assert front.post(SECOND, FIRST, THIRD) == 0
    assert owner.take() == [SECOND, FIRST, THIRD]
    assert owner.take() == []
    for some in ([THIRD, SECOND], [FIRST], []):
        owner.complete(some)
        assert front.completed() == some
    assert owner.in_flight == 0


@pytest.mark.parametrize("batch", [RING, RING - 1, 1000, 683])
def test_rings_go_round_without_losing_or_repeating_a_slot(joined, batch):
    front, owner = joined
    posted = 0
    while posted < 3 * RING + 5:
        slots = [FIRST + 64 * (posted + nth) for nth in range(batch)]
        posted += batch
        front.post(*slots)
        assert owner.take() == slots
        owner.complete(slots[::-1])
        assert front.completed() == slots[::-1]
    assert owner.in_flight == 0
    assert front.memory[layout.SUBMITTED] == front.memory[layout.TAKEN] == front.memory[layout.COMPLETED] == posted


def test_a_full_ring_is_taken_whole_and_a_front_that_posts_more_waits_for_its_own_answers(joined):
    front, owner = joined
    front.post(*range(RING))
    assert owner.take() == list(range(RING))
    assert owner.in_flight == RING
    front.post(7, 8, 9)
    assert not owner.any_submitted
    assert owner.take() == []
    owner.complete([0, 1])
    assert owner.any_submitted
    assert owner.take() == [7, 8]
    assert owner.in_flight == RING


@pytest.mark.parametrize("count", NO_COUNTS)
def test_a_count_that_nobody_has_is_not_believed_and_lets_the_owner_sleep(joined, count):
    front, owner = joined
    front.memory[layout.SUBMITTED] = front.memory[layout.COMPLETED] = count
    assert owner.take() == front.completed() == []
    assert not owner.any_submitted


def test_an_owner_wakes_the_front_whose_epoch_it_begins_and_takes_nothing_before(front, owner):
    front.post(FIRST)
    assert owner.take() == []
    assert not owner.any_submitted
    front.begin(epoch=5)
    assert owner.any_submitted
    assert owner.take() == BEGAN
    assert front.memory[layout.OWNER_EPOCH] == front.memory[layout.BEGUN_EPOCH] == 5
    assert os.eventfd_read(front.event) == 1
    assert owner.take() == []


def test_a_front_that_restarts_waits_for_what_the_one_before_it_has_under_way(joined):
    front, owner = joined
    front.post(FIRST, SECOND, THIRD)
    assert owner.take() == [FIRST, SECOND, THIRD]
    owner.complete([FIRST])
    front.post(THIRD + 64)
    front.begin(epoch=2)
    for slot in (SECOND, THIRD):
        assert owner.take() == []  # also not the last of the old epoch
        assert not owner.any_submitted
        assert front.memory[layout.OWNER_EPOCH] == 1
        owner.complete([slot])
    assert owner.any_submitted
    assert owner.take() == BEGAN
    assert front.memory[layout.OWNER_EPOCH] == 2
    assert front.memory[layout.COMPLETED] == front.memory[layout.TAKEN] == 0
    assert front.completed() == []
    front.post(FIRST)
    assert owner.take() == [FIRST]
    owner.complete([FIRST])
    assert front.completed() == [FIRST]


@pytest.mark.parametrize("noticed", [False, True])
def test_an_owner_that_restarts_serves_an_epoch_that_none_has_begun_and_no_other(front, noticed):
    first = Owner(front)
    front.begin(epoch=3)
    first.take()
    front.post(FIRST, SECOND)
    first.take()
    first.complete([FIRST])
    first.close()
    front.memory[layout.OWNER_EPOCH] = 0  # as its parent does
    if noticed:
        front.begin(epoch=4)  # before the next owner is there; what the first has taken is nobody's
    second = Owner(front)
    if not noticed:
        for slots in ([], [THIRD]):
            front.post(*slots)
            assert not second.any_submitted
            assert second.take() == []
        assert front.memory[layout.OWNER_EPOCH] == 0
        front.begin(epoch=4)
    assert second.take() == BEGAN
    assert front.memory[layout.OWNER_EPOCH] == 4
    front.post(SECOND)
    assert second.take() == [SECOND]
    second.close()


# -- sleep ----------------------------------------------------------------------------------------------------------------


def test_one_post_wakes_a_sleeping_owner_and_one_completion_a_sleeping_front(joined):
    front, owner = joined
    front.memory[layout.OWNER_SLEEPS] = 1
    assert front.post(FIRST) == 1
    assert front.memory[layout.OWNER_SLEEPS] == 0
    assert front.post(SECOND, THIRD) == 0
    owner.take()
    assert arm(front.memory.address) == 0
    assert owner.complete([FIRST, SECOND]) == 1
    assert front.memory[layout.FRONT_SLEEPS] == 0
    assert owner.complete([THIRD]) == 0  # nobody slept: nothing will come
    assert arm(front.memory.address) == 3


def test_an_owner_sleeps_when_nothing_was_posted_nor_shall_it_stop_nor_was_it_busy(joined):
    front, owner = joined
    front.post(FIRST)
    assert owner.rest() == front.memory[layout.OWNER_SLEEPS] == 0
    owner.take()
    owner.board.state[exchange.STOP] = 1
    assert owner.rest() == 0
    owner.board.state[[exchange.STOP, exchange.SPIN_NS]] = 0, 1 << 62
    assert _rest(owner.regions, owner.board.state, 5) == 5
    assert owner.rest(5) == 0
    owner.board.state[exchange.SPIN_NS] = 0
    os.eventfd_write(owner.event, 3)
    assert owner.rest() == 1
    assert not select.select([owner.event], [], [], 0)[0]  # it took its event and its flag back
    assert front.memory[layout.OWNER_SLEEPS] == 0


def test_no_completion_is_lost_between_a_front_that_falls_asleep_and_owners_that_complete(joined):
    """A front that misses a wake-up waits for ever: nothing else wakes it. Several threads complete, as the owner's do."""
    front, owner = joined
    rounds, threads, each = 60, 3, 20
    barrier = threading.Barrier(threads + 1)

    def finish(first):
        for _ in range(rounds):
            barrier.wait()
            for nth in range(each):
                if complete_job(owner.regions, 0, first + nth) >= 0:
                    os.eventfd_write(front.event, 1)

    with started(finish, *[(1000 * nth,) for nth in range(threads)]):
        for _ in range(rounds):
            expected = [1000 * nth + one for nth in range(threads) for one in range(each)]
            front.post(*expected)
            assert owner.take() == expected
            barrier.wait()
            assert sorted(front.wait(threads * each)) == expected
    assert owner.in_flight == 0


def test_threads_that_complete_at_once_do_not_overwrite_each_other(joined):
    front, owner = joined
    each, threads = 1_000_000, 4
    _complete_many(owner.regions, 0, 0, 0)  # compiles
    with started(_complete_many, *[(owner.regions, 0, 0, each)] * threads):
        pass
    assert front.memory[layout.COMPLETED] == threads * each
    assert owner.in_flight == -threads * each  # nothing was taken before


def test_an_owner_sleeps_until_its_event_even_if_another_front_is_gone(joined):
    _, owner = joined
    assert owner.board.state[exchange.LOOP_EVENT] == owner.event
    owner.board.regions[0, 0] = 0  # no region at this place
    assert owner.take() == []
    assert not owner.any_submitted
    os.eventfd_write(owner.event, 1)
    assert owner.rest() == 1
