"""What a loop works on: deployments that come and go, exact counts, and handed_over for Python in order."""

import os
import threading
from bisect import bisect_left

import numpy as np
import pytest
from numba import int64, void

from hps.errors import HPSError
from hps.ground.kernels.numba_atomics import fetch_add
from hps.ground.kernels.numba_kernels import kernel
from hps.regions import exchange
from hps.regions.exchange import hand_over
from hps.regions.layout import COMPLETED, FRONTEND_SLEEPS, MALFORMED, RETIRED, RING, SCORED, SLAB, SUBMITTED
from hps.regions.loop_state import DriverWords, LoopState
from hps.statistics.times import LOOKUP_BOUNDS_NS
from tests.fakes.region_front import RegionFront, tables_of

MOST_TABLES = 1 << 14


@kernel(void, int64[::1], int64[:, ::1], int64, int64, int64)
def _hand_over(state, handed_over, place, slot, flags):
    hand_over(state, handed_over, place, slot, flags)


@kernel(void, int64, int64)
def _add_to(address, value):
    fetch_add(address, value)


@pytest.fixture
def fronts():
    fronts = [RegionFront(), RegionFront()]
    yield fronts
    for front in fronts:
        front.close()


@pytest.fixture
def handed_over_event():
    event = os.eventfd(0, os.EFD_SEMAPHORE | os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    yield event
    os.close(event)


@pytest.fixture
def loop_state(fronts, handed_over_event):
    return LoopState(
        [front.memory for front in fronts], [front.event for front in fronts], handed_over_event, handed_over_event, 0
    )


def row_of(deployment_id):
    return deployment_id & (exchange.MOST_DEPLOYMENTS - 1)


def serve(loop_state, *dims):
    return loop_state.add(tables_of(*(dims or (1,))), resident=None)


def leave(loop_state, deployment_id):
    loop_state.retire(deployment_id)
    assert loop_state.is_idle(deployment_id)
    loop_state.release(deployment_id)


def test_a_deployment_has_the_words_of_its_tables(loop_state):
    other = serve(loop_state)
    assert loop_state.deployments[row_of(other), exchange.D_RESIDENT] == 0  # Python answers it
    deployment_id = loop_state.add(
        tables_of(3, 8, max_keys=77), resident=DriverWords([[11, 12], [13, 14, 15]], deployment=[16, 17])
    )
    row = loop_state.deployments[row_of(deployment_id)]
    assert row[[exchange.D_ID, exchange.D_TABLES, exchange.D_RESIDENT, exchange.D_FIRST]].tolist() == [
        *(deployment_id, 2, exchange.ALWAYS, 1)
    ]
    assert row[exchange.D_DRIVER : exchange.D_DRIVER + 3].tolist() == [16, 17, 0]
    tables = loop_state.tables[1:3]
    assert tables[:, [exchange.T_DIM, exchange.T_MAX_KEYS]].tolist() == [[3, 77], [8, 77]]
    assert tables[:, exchange.T_DRIVER : exchange.T_DRIVER + 4].tolist() == [[11, 12, 0, 0], [13, 14, 15, 0]]


def test_exactly_so_many_deployments_are_known_and_one_more_when_one_has_left(loop_state):
    deployment_ids = [serve(loop_state) for _ in range(exchange.MOST_DEPLOYMENTS)]
    assert len({row_of(deployment_id) for deployment_id in deployment_ids}) == exchange.MOST_DEPLOYMENTS
    assert [loop_state.deployments[row_of(deployment_id), exchange.D_ID] for deployment_id in deployment_ids] == deployment_ids
    with pytest.raises(HPSError, match="'m': frontends know at most 256 deployments"):
        serve(loop_state)
    loop_state.retire(deployment_ids[77])
    with pytest.raises(HPSError):  # its last request may still run
        serve(loop_state)
    loop_state.release(deployment_ids[77])
    again = serve(loop_state)
    assert row_of(again) == row_of(deployment_ids[77])
    for deployment_id in (again, *deployment_ids[78:], *deployment_ids[:77]):
        leave(loop_state, deployment_id)
    seen = set(deployment_ids) | {again}
    for _ in range(1000):  # none repeats on its row
        deployment_id = serve(loop_state)
        assert deployment_id > 0
        assert deployment_id not in seen
        seen.add(deployment_id)
        leave(loop_state, deployment_id)


def test_boards_of_different_engines_give_different_serials(fronts):
    loop_states = [LoopState([fronts[0].memory], [-1], -1, -1, 0, last_id=first) for first in (1 << 39, (1 << 40) - 1)]
    given = [{serve(loop_state) for _ in range(200)} for loop_state in loop_states]
    assert not given[0] & given[1]
    assert all(0 < one < 1 << 53 for one in given[0] | given[1])  # numbers that JSON holds


def test_tables_take_the_first_room_that_is_large_enough(loop_state):
    def first(deployment_id):
        return int(loop_state.deployments[row_of(deployment_id), exchange.D_FIRST])

    three, two, four = (serve(loop_state, *[1] * n) for n in (3, 2, 4))
    assert [first(three), first(two), first(four)] == [0, 3, 5]
    leave(loop_state, three)
    assert [first(serve(loop_state, 1, 1, 1, 1)), first(serve(loop_state))] == [9, 0]
    leave(loop_state, two)
    assert first(serve(loop_state, 1, 1, 1, 1)) == 1  # beside the one that is left
    assert first(serve(loop_state)) == 13


def test_tables_fill_all_rows_and_one_more_is_refused(loop_state):
    serve(loop_state, *[1] * (MOST_TABLES - 2))
    with pytest.raises(HPSError):
        serve(loop_state, 1, 1, 1)
    deployment_id = serve(loop_state, 1, 7)
    assert loop_state.tables[MOST_TABLES - 1, exchange.T_DIM] == 7
    with pytest.raises(HPSError):
        serve(loop_state)
    leave(loop_state, deployment_id)
    serve(loop_state)


def test_a_row_that_is_given_to_another_keeps_what_the_loop_does_there(loop_state):
    """A loop that compared the id before it was retired counts itself, compares again, and counts itself out."""
    old = serve(loop_state)
    in_flight = loop_state.deployments[row_of(old)].ctypes.data + 8 * exchange.D_IN_FLIGHT
    _add_to(in_flight, 2)
    loop_state.retire(old)
    assert not loop_state.is_idle(old)
    _add_to(in_flight, -2)
    leave(loop_state, old)
    _add_to(in_flight, 1)
    new = serve(loop_state)
    assert row_of(new) == row_of(old)
    assert not loop_state.is_idle(new)
    _add_to(in_flight, -1)
    assert loop_state.is_idle(new)
    loop_state.retire(old)  # only the deployment of a deployment_id is ended
    assert loop_state.deployments[row_of(new), exchange.D_ID] == new


def test_rings_and_tables_that_do_not_fit_together_are_found(loop_state, fronts):
    serve(loop_state, 1, 1)
    fronts[0].begin(5)
    loop_state.regions[0, exchange.EPOCH] = 5
    assert loop_state.check_integrity() == []
    for word, found in (
        (loop_state.deployments[0, exchange.D_FIRST :], "tables are range(0, 2)"),
        (loop_state.regions[0, exchange.IN_FLIGHT :], "but 1 are under way"),
        (fronts[0].memory.words[COMPLETED // 8 :], "the region has 1 of 0"),
    ):
        word[0] += 1
        [finding] = loop_state.check_integrity()
        assert found in finding
        word[0] -= 1
    fronts[0].memory[SUBMITTED] = -1
    [finding] = loop_state.check_integrity()
    assert finding == "region 0: -1 slots are posted and not taken, expected 0 to 2048"
    assert loop_state.check_integrity() == [finding]


# -- counts -----------------------------------------------------------------------------------------------------------------


def count(loop_state, deployment_id, table, keys, hits, linked, absent, ns):
    row = loop_state.deployments[row_of(deployment_id)]
    columns = [exchange.T_KEYS, exchange.T_HITS, exchange.T_LINKED, exchange.T_ABSENT]
    loop_state.tables[row[exchange.D_FIRST] + table, columns] += [keys, hits, linked, absent]
    row[[exchange.D_TIMES + bisect_left(LOOKUP_BOUNDS_NS, ns), exchange.D_NS]] += [1, ns]


def times_of(*durations):
    """How many durations each bucket has."""
    times = [0] * (len(LOOKUP_BOUNDS_NS) + 1)
    for ns in durations:
        times[bisect_left(LOOKUP_BOUNDS_NS, ns)] += 1
    return times


NONE = [0] * 4


def test_a_tally_holds_what_was_added_to_a_deployment_since_the_last_one(loop_state):
    other, deployment_id = serve(loop_state), serve(loop_state, 1, 1)
    assert loop_state.tally(deployment_id) == ([NONE, NONE], times_of(), 0)
    count(loop_state, other, 0, 1, 1, 1, 1, ns=1)
    count(loop_state, deployment_id, 0, 10, 9, 1, 0, ns=100)
    count(loop_state, deployment_id, 1, 5, 5, 0, 2, ns=2_000_000)
    assert loop_state.tally(deployment_id) == ([[10, 9, 1, 0], [5, 5, 0, 2]], times_of(100, 2_000_000), 2_000_100)
    assert loop_state.tally(deployment_id) == ([NONE, NONE], times_of(), 0)
    count(loop_state, deployment_id, 1, 3, 1, 0, 0, ns=7)
    assert loop_state.tally(deployment_id) == ([NONE, [3, 1, 0, 0]], times_of(7), 7)
    assert loop_state.tally(other) == ([[1, 1, 1, 1]], times_of(1), 1)


def test_a_deployment_does_not_inherit_the_counts_of_the_one_before_it(loop_state):
    for _ in range(2):
        deployment_id = serve(loop_state)
        count(loop_state, deployment_id, 0, 10, 9, 1, 0, ns=100)
        assert loop_state.tally(deployment_id) == ([[10, 9, 1, 0]], times_of(100), 100)
        count(loop_state, deployment_id, 0, 1, 1, 1, 1, ns=1)  # and nobody asks any more
        leave(loop_state, deployment_id)


def test_the_sum_of_all_tallies_is_exact_while_the_loop_counts(loop_state):
    deployment_id, rounds, found, requests = serve(loop_state), 3000, np.zeros(4, np.int64), 0
    worker = threading.Thread(target=lambda: [count(loop_state, deployment_id, 0, 4, 3, 2, 1, ns=10) for _ in range(rounds)])
    worker.start()
    ended = False
    while not ended:
        ended = not worker.is_alive()
        tally = loop_state.tally(deployment_id)
        found += tally.tables[0]
        requests += sum(tally.times)
    assert found.tolist() == [4 * rounds, 3 * rounds, 2 * rounds, rounds]
    assert requests == rounds


# -- handed-over requests -------------------------------------------------------------------------------------------------


def hand(loop_state, place, slot, flags=0):
    _hand_over(loop_state.state, loop_state.handed_over, place, slot, flags)


def test_jobs_are_taken_in_their_order_with_their_descriptors(loop_state, fronts, handed_over_event):
    deployment_id, places = serve(loop_state, 2, 3), [(1, SLAB), (0, SLAB + 4096), (1, SLAB + 8192)]
    for nth, (place, slot) in enumerate(places):
        fronts[place].write(slot, deployment_id, (2, 3), [(0, range(nth), False), (1, range(10 + nth), True)])
        hand(loop_state, place, slot)
    for nth, (place, slot) in enumerate(places):
        assert os.eventfd_read(handed_over_event) == 1
        job = loop_state.next_request()
        assert (job.place, job.slot, job.status) == (place, slot, 0)
        assert job.segments[:, :2].tolist() == [[0, nth], [1, 10 + nth]]
        keys_at = job.segments[1, 2]
        assert fronts[place].memory.words[keys_at // 8 : keys_at // 8 + 10 + nth].tolist() == list(range(10 + nth))
    assert loop_state.next_request() is None
    with pytest.raises(BlockingIOError):
        os.eventfd_read(handed_over_event)


def test_a_descriptor_is_checked_when_its_job_is_taken_and_copied(loop_state, fronts):
    deployment_id = serve(loop_state, 2)
    fronts[0].write(SLAB, deployment_id, (2,), [(0, range(3), False)])
    for _ in range(3):
        hand(loop_state, 0, SLAB)
    job = loop_state.next_request()
    before = job.segments.copy(), job.header.copy()
    fronts[0].memory.words[SLAB // 8 : SLAB // 8 + 64] = -1
    assert np.array_equal(job.segments, before[0])
    assert np.array_equal(job.header, before[1])
    job = loop_state.next_request()
    assert (job.status, len(job.segments)) == (MALFORMED, 0)
    fronts[0].write(SLAB, deployment_id, (2,), [(0, range(3), False)])
    loop_state.retire(deployment_id)
    job = loop_state.next_request()
    assert (job.status, len(job.segments)) == (RETIRED, 0)


def test_jobs_of_the_full_rings_of_all_fronts_are_kept(loop_state, fronts):
    """As many as all fronts may have under way; and again, from the middle of the ring of handed_over on."""
    deployment_id = serve(loop_state)
    for front in fronts:
        for nth in range(RING // 8):
            front.write(SLAB + 1024 * nth, deployment_id, (1,), [(0, [nth], False)], scratch=0)
    for most in (RING, RING // 2, RING):
        expected = [(nth % 2, SLAB + 1024 * (nth % (RING // 8))) for nth in range(2 * most)]
        for place, slot in expected:
            hand(loop_state, place, slot)
        found = [loop_state.next_request() for _ in expected]
        assert [(one.place, one.slot) for one in found] == expected
        assert loop_state.next_request() is None
    assert loop_state.state[exchange.HANDED_OVER_COUNT] == 5 * RING


def test_requests_for_scores_are_kept_for_one_thread_which_is_woken_once_it_sleeps(loop_state, fronts, handed_over_event):
    deployment_id, event = serve(loop_state), os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    slots = [SLAB + 1024 * nth for nth in range(RING // 8)]
    for nth, slot in enumerate(slots):
        fronts[0].write(slot, deployment_id, (1,), [(0, [nth], False)], scratch=0)
    hand(loop_state, 0, slots[0], SCORED)
    assert loop_state.next_request().slot == slots[0]  # nobody takes them apart
    assert os.eventfd_read(handed_over_event) == 1
    loop_state.take_scored(event)
    for _ in range(2 * 2 * 8 + 3):  # around the ring of both fronts
        for slot in slots:
            hand(loop_state, 0, slot, SCORED)
        hand(loop_state, 0, slots[0])
        assert [loop_state.next_scored().slot for _ in slots] == slots
        assert loop_state.next_request().slot == slots[0]
        with pytest.raises(BlockingIOError):  # it has not slept
            os.eventfd_read(event)
        assert loop_state.next_scored() is None
        hand(loop_state, 0, slots[1], SCORED)
        hand(loop_state, 0, slots[2], SCORED)
        assert os.eventfd_read(event) == 1
        assert [loop_state.next_scored().slot for _ in range(2)] == slots[1:3]
    os.close(event)


def test_several_threads_take_each_job_once(loop_state, fronts):
    deployment_id, slots = serve(loop_state), [SLAB + 4096 * nth for nth in range(200)]
    for nth, slot in enumerate(slots):
        fronts[0].write(slot, deployment_id, (1,), [(0, [nth], False)])
        hand(loop_state, 0, slot)
    taken = []

    def work():
        while (job := loop_state.next_request()) is not None:
            taken.append(job.slot)

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert sorted(taken) == slots


def test_a_completed_job_wakes_a_front_that_sleeps_and_a_stop_wakes_the_loop(loop_state, fronts, handed_over_event):
    fronts[1].write(SLAB, serve(loop_state), (1,), [(0, [1], False)])
    hand(loop_state, 1, SLAB)
    assert os.eventfd_read(handed_over_event) == 1
    fronts[1].memory[FRONTEND_SLEEPS] = 1
    loop_state.complete(loop_state.next_request())
    assert os.eventfd_read(fronts[1].event) == 1
    assert fronts[1].completed() == [SLAB]
    assert fronts[0].completed() == []
    loop_state.stop()
    assert loop_state.state[exchange.STOP] == 1
    assert os.eventfd_read(handed_over_event) == 1
