"""What a change of a model shows while it runs and when it has ended."""

from typing import Any

import pytest

import hps
from hps.ground.progress import NoProgress
from hps.versions.changes import Change
from tests.fakes.clock import Clock


class Heard(NoProgress):
    """Notes what a listener is told."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []
        for name in ("start", "advance", "finish", "fail"):
            setattr(self, name, lambda *what, name=name: self.told.append((name, *what)))


def tag(table: str) -> str:
    return f"hps_et.m@2.{table}"


@pytest.fixture
def clock() -> Clock:
    return Clock(100.0)


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
def change(clock: Clock, heard: Heard) -> Change:
    change = Change("m", "deploying", 1, clock=clock)
    change.listener = heard
    change.expect(["a", "b", "c"])
    return change


def states(change: Change) -> list[tuple[str, str, int]]:
    return [(name, table.state, table.percent) for name, table in change.tables.items()]


def test_tables_load_one_after_the_other_and_one_that_is_not_read_is_done(change: Change, heard: Heard) -> None:
    assert states(change) == [("a", "waiting", 0), ("b", "waiting", 0), ("c", "waiting", 0)]
    change.start(tag("a"), 10, 80)
    change.advance(tag("a"), 4)
    assert states(change)[0] == ("a", "loading", 40)
    change.finish(tag("a"))
    change.start(tag("c"), 10, 80)  # the rows of b are there already
    change.advance(tag("c"), 5)
    assert states(change) == [("a", "done", 100), ("b", "done", 100), ("c", "loading", 50)]
    assert (change.rows_loaded, change.tables["c"].tag) == (9, tag("c"))
    started, read = ("start", tag("a"), 10, 80), ("advance", tag("a"), 4)
    assert heard.told == [started, read, ("finish", tag("a")), ("start", tag("c"), 10, 80), ("advance", tag("c"), 5)]
    for version in range(1, 4):
        change.expect(["a"])
        assert change.rows_loaded == 9 + 10 * (version - 1), "those of the versions before count"
        change.start(tag("a"), 10, 80)
        change.advance(tag("a"), 10)


def test_a_table_that_was_not_expected_is_shown_and_one_that_never_began_counts_nothing(change: Change) -> None:
    change.advance(tag("b"), 5)
    change.advance(tag("x"), 5)
    change.finish(tag("x"))
    assert change.rows_loaded == 0
    change.start("strange", 10, 80)
    change.advance("strange", 5)
    assert states(change)[-1] == ("strange", "loading", 50)
    assert states(change)[0] == ("a", "done", 100), "those before it are"


def test_a_change_lasts_until_it_ends(change: Change, clock: Clock) -> None:
    clock.now = 103.0
    assert (change.seconds, change.under_way) == (3.0, True)
    change.end()
    clock.now = 109.0
    assert (change.seconds, change.under_way, change.error) == (3.0, False, "")
    assert {state for _, state, _ in states(change)} == {"done"}


def test_a_change_that_fails_tells_the_listener_of_the_table_that_was_loading(change: Change, heard: Heard) -> None:
    change.start(tag("a"), 10, 80)
    change.finish(tag("a"))
    change.start(tag("b"), 10, 80)
    change.end(hps.ModelFileError("damaged"))
    assert [state for _, state, _ in states(change)] == ["done", "failed", "waiting"]
    assert (change.error, heard.told.pop()) == ("damaged", ("fail", tag("b")))
    heard.told.clear()
    other = Change("m", "deploying", 2)
    other.listener = heard
    other.end(hps.ModelFileError("damaged"))
    assert heard.told == [], "no table was"


def test_a_load_goes_on_only_while_it_may(change: Change, heard: Heard) -> None:
    def stop() -> None:
        raise hps.ConflictError("superseded")

    change.start(tag("a"), 10, 80)
    change.proceed = stop
    with pytest.raises(hps.ConflictError):
        change.advance(tag("a"), 5)
    assert (change.rows_loaded, heard.told[-1][0]) == (0, "start")
    change.wait_for("a broker")
    assert change.waiting == "a broker"
