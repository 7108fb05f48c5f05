"""What a loop works on: deployments that come and go, exact counts, and jobs for Python in order."""

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
from hps.regions.board import Board, Resident
from hps.regions.exchange import hand_over
from hps.regions.layout import COMPLETED, FRONT_SLEEPS, MALFORMED, RETIRED, RING, SLAB, SUBMITTED
from hps.statistics.times import LOOKUP_BOUNDS_NS
from tests.fakes.region_front import RegionFront, tables_of

MOST_TABLES = 1 << 14


@kernel(void, int64[::1], int64[:, ::1], int64, int64)
def _hand_over(state, jobs, place, slot):
    hand_over(state, jobs, place, slot)


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
def jobs_event():
    event = os.eventfd(0, os.EFD_SEMAPHORE | os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    yield event
    os.close(event)


@pytest.fixture
def board(fronts, jobs_event):
    return Board([front.memory for front in fronts], [front.event for front in fronts], jobs_event, jobs_event, 0)


def row_of(serial):
    return serial & (exchange.MOST_DEPLOYMENTS - 1)


def serve(board, *dims):
    return board.add(tables_of(*(dims or (1,))), resident=None)


def leave(board, serial):
    board.end(serial)
    assert board.is_idle(serial)
    board.forget(serial)


def test_a_deployment_has_the_words_of_its_tables(board):
    other = serve(board)
    assert board.deployments[row_of(other), exchange.D_RESIDENT] == 0  # Python answers it
    serial = board.add(tables_of(3, 8, max_keys=77), resident=Resident([[11, 12], [13, 14, 15]], deployment=[16, 17]))
    row = board.deployments[row_of(serial)]
    assert row[[exchange.D_SERIAL, exchange.D_TABLES, exchange.D_RESIDENT, exchange.D_FIRST]].tolist() == [serial, 2, 1, 1]
    assert row[exchange.D_OWN : exchange.D_OWN + 3].tolist() == [16, 17, 0]
    tables = board.tables[1:3]
    assert tables[:, [exchange.T_DIM, exchange.T_MAX_KEYS]].tolist() == [[3, 77], [8, 77]]
    assert tables[:, exchange.T_OWN : exchange.T_OWN + 4].tolist() == [[11, 12, 0, 0], [13, 14, 15, 0]]


def test_exactly_so_many_deployments_are_known_and_one_more_when_one_has_left(board):
    serials = [serve(board) for _ in range(exchange.MOST_DEPLOYMENTS)]
    assert len({row_of(serial) for serial in serials}) == exchange.MOST_DEPLOYMENTS
    assert [board.deployments[row_of(serial), exchange.D_SERIAL] for serial in serials] == serials
    with pytest.raises(HPSError, match="'m': fronts know at most 256 deployments"):
        serve(board)
    board.end(serials[77])
    with pytest.raises(HPSError):  # its last request may still run
        serve(board)
    board.forget(serials[77])
    again = serve(board)
    assert row_of(again) == row_of(serials[77])
    for serial in (again, *serials[78:], *serials[:77]):
        leave(board, serial)
    seen = set(serials) | {again}
    for _ in range(1000):  # none repeats on its row
        serial = serve(board)
        assert serial > 0
        assert serial not in seen
        seen.add(serial)
        leave(board, serial)


def test_boards_of_different_owners_give_different_serials(fronts):
    boards = [Board([fronts[0].memory], [-1], -1, -1, 0, serials=first) for first in (1 << 39, (1 << 40) - 1)]
    given = [{serve(board) for _ in range(200)} for board in boards]
    assert not given[0] & given[1]
    assert all(0 < one < 1 << 53 for one in given[0] | given[1])  # numbers that JSON holds


def test_tables_take_the_first_room_that_is_large_enough(board):
    def first(serial):
        return int(board.deployments[row_of(serial), exchange.D_FIRST])

    three, two, four = (serve(board, *[1] * n) for n in (3, 2, 4))
    assert [first(three), first(two), first(four)] == [0, 3, 5]
    leave(board, three)
    assert [first(serve(board, 1, 1, 1, 1)), first(serve(board))] == [9, 0]
    leave(board, two)
    assert first(serve(board, 1, 1, 1, 1)) == 1  # beside the one that is left
    assert first(serve(board)) == 13


def test_tables_fill_all_rows_and_one_more_is_refused(board):
    serve(board, *[1] * (MOST_TABLES - 2))
    with pytest.raises(HPSError):
        serve(board, 1, 1, 1)
    serial = serve(board, 1, 7)
    assert board.tables[MOST_TABLES - 1, exchange.T_DIM] == 7
    with pytest.raises(HPSError):
        serve(board)
    leave(board, serial)
    serve(board)


def test_a_row_that_is_given_to_another_keeps_what_the_loop_does_there(board):
    """A loop that has compared the serial before the end notes itself, looks again, and leaves: whatever came in between."""
    old = serve(board)
    in_flight = board.deployments[row_of(old)].ctypes.data + 8 * exchange.D_IN_FLIGHT
    _add_to(in_flight, 2)
    board.end(old)
    assert not board.is_idle(old)
    _add_to(in_flight, -2)
    leave(board, old)
    _add_to(in_flight, 1)
    new = serve(board)
    assert row_of(new) == row_of(old)
    assert not board.is_idle(new)
    _add_to(in_flight, -1)
    assert board.is_idle(new)
    board.end(old)  # only the deployment of a serial is ended
    assert board.deployments[row_of(new), exchange.D_SERIAL] == new


def test_rings_and_tables_that_do_not_fit_together_are_found(board, fronts):
    serve(board, 1, 1)
    fronts[0].begin(5)
    board.regions[0, exchange.EPOCH] = 5
    assert board.check_integrity() == []
    for word, found in (
        (board.deployments[0, exchange.D_FIRST :], "tables are range(0, 2)"),
        (board.regions[0, exchange.IN_FLIGHT :], "but 1 are under way"),
        (fronts[0].memory.words[COMPLETED // 8 :], "the region has 1 of 0"),
    ):
        word[0] += 1
        [finding] = board.check_integrity()
        assert found in finding
        word[0] -= 1
    fronts[0].memory[SUBMITTED] = -1
    [finding] = board.check_integrity()
    assert finding == "region 0: -1 slots are posted and not taken, expected 0 to 2048"
    assert board.check_integrity() == [finding]


# -- counts -----------------------------------------------------------------------------------------------------------------


def count(board, serial, table, keys, hits, linked, absent, ns):
    row = board.deployments[row_of(serial)]
    columns = [exchange.T_KEYS, exchange.T_HITS, exchange.T_LINKED, exchange.T_ABSENT]
    board.tables[row[exchange.D_FIRST] + table, columns] += [keys, hits, linked, absent]
    row[[exchange.D_TIMES + bisect_left(LOOKUP_BOUNDS_NS, ns), exchange.D_NS]] += [1, ns]


def times_of(*durations):
    """How many durations each bucket has."""
    times = [0] * (len(LOOKUP_BOUNDS_NS) + 1)
    for ns in durations:
        times[bisect_left(LOOKUP_BOUNDS_NS, ns)] += 1
    return times


NONE = [0] * 4


def test_a_tally_holds_what_was_added_to_a_deployment_since_the_last_one(board):
    other, serial = serve(board), serve(board, 1, 1)
    assert board.tally(serial) == ([NONE, NONE], times_of(), 0)
    count(board, other, 0, 1, 1, 1, 1, ns=1)
    count(board, serial, 0, 10, 9, 1, 0, ns=100)
    count(board, serial, 1, 5, 5, 0, 2, ns=2_000_000)
    assert board.tally(serial) == ([[10, 9, 1, 0], [5, 5, 0, 2]], times_of(100, 2_000_000), 2_000_100)
    assert board.tally(serial) == ([NONE, NONE], times_of(), 0)
    count(board, serial, 1, 3, 1, 0, 0, ns=7)
    assert board.tally(serial) == ([NONE, [3, 1, 0, 0]], times_of(7), 7)
    assert board.tally(other) == ([[1, 1, 1, 1]], times_of(1), 1)


def test_a_deployment_does_not_inherit_the_counts_of_the_one_before_it(board):
    for _ in range(2):
        serial = serve(board)
        count(board, serial, 0, 10, 9, 1, 0, ns=100)
        assert board.tally(serial) == ([[10, 9, 1, 0]], times_of(100), 100)
        count(board, serial, 0, 1, 1, 1, 1, ns=1)  # and nobody asks any more
        leave(board, serial)


def test_the_sum_of_all_tallies_is_exact_while_the_loop_counts(board):
    serial, rounds, found, requests = serve(board), 3000, np.zeros(4, np.int64), 0
    worker = threading.Thread(target=lambda: [count(board, serial, 0, 4, 3, 2, 1, ns=10) for _ in range(rounds)])
    worker.start()
    ended = False
    while not ended:
        ended = not worker.is_alive()
        tally = board.tally(serial)
        found += tally.tables[0]
        requests += sum(tally.times)
    assert found.tolist() == [4 * rounds, 3 * rounds, 2 * rounds, rounds]
    assert requests == rounds


# -- jobs -------------------------------------------------------------------------------------------------------------------


def hand(board, place, slot):
    _hand_over(board.state, board.jobs, place, slot)


def test_jobs_are_taken_in_their_order_with_their_descriptors(board, fronts, jobs_event):
    serial, places = serve(board, 2, 3), [(1, SLAB), (0, SLAB + 4096), (1, SLAB + 8192)]
    for nth, (place, slot) in enumerate(places):
        fronts[place].write(slot, serial, (2, 3), [(0, range(nth), False), (1, range(10 + nth), True)])
        hand(board, place, slot)
    for nth, (place, slot) in enumerate(places):
        assert os.eventfd_read(jobs_event) == 1
        job = board.next_job()
        assert (job.place, job.slot, job.status) == (place, slot, 0)
        assert job.segments[:, :2].tolist() == [[0, nth], [1, 10 + nth]]
        keys_at = job.segments[1, 2]
        assert fronts[place].memory.words[keys_at // 8 : keys_at // 8 + 10 + nth].tolist() == list(range(10 + nth))
    assert board.next_job() is None
    with pytest.raises(BlockingIOError):
        os.eventfd_read(jobs_event)


def test_a_descriptor_is_checked_when_its_job_is_taken_and_copied(board, fronts):
    serial = serve(board, 2)
    fronts[0].write(SLAB, serial, (2,), [(0, range(3), False)])
    for _ in range(3):
        hand(board, 0, SLAB)
    job = board.next_job()
    before = job.segments.copy(), job.header.copy()
    fronts[0].memory.words[SLAB // 8 : SLAB // 8 + 64] = -1
    assert np.array_equal(job.segments, before[0])
    assert np.array_equal(job.header, before[1])
    job = board.next_job()
    assert (job.status, len(job.segments)) == (MALFORMED, 0)
    fronts[0].write(SLAB, serial, (2,), [(0, range(3), False)])
    board.end(serial)
    job = board.next_job()
    assert (job.status, len(job.segments)) == (RETIRED, 0)


def test_jobs_of_the_full_rings_of_all_fronts_are_kept(board, fronts):
    """As many as all fronts may have under way; and again, from the middle of the ring of jobs on."""
    serial = serve(board)
    for front in fronts:
        for nth in range(RING // 8):
            front.write(SLAB + 1024 * nth, serial, (1,), [(0, [nth], False)], aside=0)
    for most in (RING, RING // 2, RING):
        expected = [(nth % 2, SLAB + 1024 * (nth % (RING // 8))) for nth in range(2 * most)]
        for place, slot in expected:
            hand(board, place, slot)
        found = [board.next_job() for _ in expected]
        assert [(one.place, one.slot) for one in found] == expected
        assert board.next_job() is None
    assert board.state[exchange.JOBS_HEAD] == 5 * RING


def test_several_threads_take_each_job_once(board, fronts):
    serial, slots = serve(board), [SLAB + 4096 * nth for nth in range(200)]
    for nth, slot in enumerate(slots):
        fronts[0].write(slot, serial, (1,), [(0, [nth], False)])
        hand(board, 0, slot)
    taken = []

    def work():
        while (job := board.next_job()) is not None:
            taken.append(job.slot)

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert sorted(taken) == slots


def test_a_completed_job_wakes_a_front_that_sleeps_and_a_stop_wakes_the_loop(board, fronts, jobs_event):
    fronts[1].write(SLAB, serve(board), (1,), [(0, [1], False)])
    hand(board, 1, SLAB)
    assert os.eventfd_read(jobs_event) == 1
    fronts[1].memory[FRONT_SLEEPS] = 1
    board.complete(board.next_job())
    assert os.eventfd_read(fronts[1].event) == 1
    assert fronts[1].completed() == [SLAB]
    assert fronts[0].completed() == []
    board.stop()
    assert board.state[exchange.STOP] == 1
    assert os.eventfd_read(jobs_event) == 1
