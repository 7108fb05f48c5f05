"""Arrivals are estimated from looks at the end of a partition, and from claims only within them."""

import pytest

from hps.updates.arrivals import Arrivals, moment_of
from tests.fakes.clock import Clock

HOUR = 3600.0


class Partition:
    """A partition with messages 0, 1, ..., which is looked at, and read, at times that are told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.arrivals = Arrivals()
        monkeypatch.setattr("hps.updates.arrivals.time.monotonic", lambda: self.now)

    def look(self, now: float, last: int, took: float = 0.0) -> None:
        self.now = now
        self.arrivals.observe((last,), now, now - took)

    def read(self, now: float, place: int, claimed: float = float("inf")) -> float | None:
        self.now = now
        return self.arrivals.read((place,), claimed)


@pytest.fixture
def partition(monkeypatch: pytest.MonkeyPatch) -> Partition:
    return Partition(monkeypatch)


def test_nothing_is_known_of_a_backlog_but_what_it_claims_of_the_past(partition: Partition) -> None:
    partition.look(100.0, 9)
    assert partition.arrivals.unread_since() is None
    assert partition.read(101.0, 0) is None
    assert partition.read(101.0, 1, HOUR) is None
    assert partition.read(101.0, 2, 40.0) == 40.0
    assert partition.arrivals.unread_since() == 40.0
    assert partition.read(101.0, 3, HOUR) == 40.0  # of the future: it was appended after the one before
    assert partition.read(101.0, 4, 100.5) == 40.0  # after it was seen
    assert partition.read(101.0, 5, -HOUR) == -HOUR
    assert partition.read(101.0, 6, 100.0) == 100.0


@pytest.mark.parametrize(("claimed", "arrived"), [(HOUR, 101.0), (-HOUR, 101.0), (101.5, 101.5), (102.5, 101.0)])
def test_a_claim_counts_between_the_looks_around_it(partition: Partition, claimed: float, arrived: float) -> None:
    for now, last in ((100.0, 4), (101.0, 4), (102.0, 5), (103.0, 7)):
        partition.look(now, last)
    partition.arrivals.skip((4,))
    assert partition.arrivals.unread_since() == 101.0
    assert partition.read(160.0, 5, claimed) == arrived
    assert partition.arrivals.unread_since() == 102.0
    assert [partition.read(160.0, 6, one) for one in (HOUR, 102.5)] == [102.0, 102.5]


def test_a_message_that_no_look_showed_came_after_the_last_one(partition: Partition) -> None:
    partition.look(100.0, 4, took=0.5)
    assert partition.arrivals.unread_since() is None
    partition.arrivals.skip((4,))
    assert partition.arrivals.unread_since() == 99.5
    assert partition.read(107.0, 5, HOUR) == 99.5
    assert partition.read(107.0, 6, 105.0) == 105.0
    assert partition.arrivals.unread_since() == 105.0  # messages are appended in their order


@pytest.mark.parametrize(("claimed", "since"), [(101.6, 101.6), (-HOUR, 101.0), (HOUR, 101.0)])
@pytest.mark.parametrize("seen", [False, True])
def test_unread_messages_are_as_old_as_the_first_of_those_that_were_fetched(
    partition: Partition, claimed: float, since: float, *, seen: bool
) -> None:
    partition.look(101.0, 4)
    partition.arrivals.skip((4,))
    if seen:
        partition.look(102.0, 5)
    partition.now = 102.1
    partition.arrivals.record_fetch((5,), claimed, (7,))
    assert partition.arrivals.unread_since() == since
    assert partition.read(103.0, 5, claimed) == since
    assert partition.arrivals.unread_since() == (max(since, 102.0) if seen else since)
    assert [partition.read(103.0, place, 102.05) for place in (6, 7)] == [102.05, 102.05]


def test_a_look_of_unknown_time_says_nothing_about_what_comes_later(partition: Partition) -> None:
    partition.look(100.0, 4)
    partition.arrivals.observe((5,), 101.0)
    partition.arrivals.observe((6,), 102.0)
    partition.arrivals.skip((4,))
    assert [partition.read(103.0, place, HOUR) for place in (5, 6, 7)] == [100.0, 100.0, 100.0]


def test_looks_at_what_was_read_are_forgotten_and_the_rest_is_not(partition: Partition) -> None:
    for now, last in ((100.0, 1), (101.0, 2), (102.0, 3), (103.0, 4)):
        partition.look(now, last)
    for place, since in ((2, 101.0), (3, 102.0)):
        partition.arrivals.skip((place,))
        assert partition.arrivals.unread_since() == since
    partition.look(104.0, 3)  # a lagging leader
    assert partition.arrivals.unread_since() == 102.0


def test_a_long_backlog_takes_bounded_memory_and_is_not_taken_for_younger(partition: Partition) -> None:
    for second in range(10_000):
        partition.look(float(second), second)
    assert len(partition.arrivals._observations) <= 64
    assert partition.arrivals.unread_since() is None
    partition.arrivals.skip((0,))
    arrived: list[float] = [partition.read(20_000.0, place, 2e4) or 0.0 for place in range(2, 10_000)]
    assert all(at <= place for place, at in zip(range(2, 10_000), arrived, strict=True))
    assert arrived == sorted(arrived)
    assert arrived[-1] == 9998.0
    assert partition.arrivals.unread_since() == 9999.0


def test_a_time_of_a_wall_clock_becomes_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, now in (("monotonic", 50.0), ("time", 1000.0)):
        monkeypatch.setattr(f"hps.updates.arrivals.time.{name}", Clock(now))
    assert (moment_of(990_000_000), moment_of(0)) == (40.0, float("inf"))
