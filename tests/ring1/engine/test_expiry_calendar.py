"""Which rows expire next: a calendar in bounded memory, compared with a plain list of all changes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hps.engine.expiry_calendar import PERIOD_US, ExpiryCalendar


def keys_of(*keys):
    return np.array(keys, np.int64)


def test_keys_are_taken_up_to_a_time_once_and_sorted():
    calendar = ExpiryCalendar(100)
    calendar.add(keys_of(9, 7, 8), keys_of(30, 10, 20))
    calendar.add(keys_of(7), keys_of(PERIOD_US * 3))
    assert calendar.earliest_up_to(9) is None
    assert calendar.earliest_up_to(10) == 10
    assert calendar.take(9).tolist() == []
    assert calendar.take(20).tolist() == [7, 8]
    assert calendar.take(PERIOD_US * 3 - 1).tolist() == [9]
    assert calendar.take(PERIOD_US * 3).tolist() == [7]
    assert (len(calendar), calendar.complete) == (0, True)


def test_views_of_a_message_are_copied():
    calendar, keys, times = ExpiryCalendar(100), keys_of(1, 2), keys_of(5, 6)
    calendar.add(keys, times)
    keys[:], times[:] = 0, 0
    assert calendar.take(6).tolist() == [1, 2]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 40)), max_size=12), max_size=12), st.integers(4, 30))
def test_what_was_dropped_for_want_of_room_is_read_again_before_its_time(batches, most):
    """Changes come in any order; the list of all stands for the database."""
    calendar, stored, taken = ExpiryCalendar(most), [], []
    for now, batch in enumerate(batches, 1):
        batch = [(key, max(period, now) * PERIOD_US) for key, period in batch]
        stored += batch
        calendar.add(keys_of(*(key for key, _ in batch)), keys_of(*(at for _, at in batch)))
        until = now * PERIOD_US
        while calendar.horizon <= until:
            calendar.start_reading()
            calendar.add(keys_of(*(key for key, _ in stored)), keys_of(*(at for _, at in stored)))
            calendar.end_reading()
            due = calendar.take(min(until, calendar.horizon - 1))
            taken += due.tolist()
            stored = [(key, at) for key, at in stored if at > min(until, calendar.horizon - 1)]
        due = [key for key, at in stored if at <= until]
        assert set(due) <= set(calendar.take(until).tolist())
        stored = [(key, at) for key, at in stored if at > until]
        periods = len({at for _, at in stored if at < calendar.horizon})
        assert len(calendar) <= most or periods <= 1 or calendar.complete


@pytest.mark.parametrize("most", [10, 1000])
def test_memory_is_bounded_but_for_the_earliest_period(most):
    calendar = ExpiryCalendar(most)
    for period in range(20, 0, -1):
        calendar.add(np.arange(50), np.full(50, period * PERIOD_US))
        assert len(calendar) <= max(most, 50)
    assert calendar.horizon == (2 * PERIOD_US if most == 10 else calendar.horizon)
    assert calendar.take(PERIOD_US).size == 50
