import threading
from contextlib import ExitStack

import pytest

from hps.errors import DatabaseTimeoutError
from hps.lookup.fences import TableFence
from hps.testing.waiting import PATIENCE_S, wait_until


def test_fill_after_a_read_of_an_unmodified_table_is_allowed():
    fence = TableFence()
    with fence.filling(fence.token()) as allowed:
        assert allowed


def test_fill_is_refused_when_the_table_was_modified_since_its_token():
    fence = TableFence()
    token = fence.token()
    with fence.modifying(1):
        pass
    with fence.filling(token) as allowed:
        assert not allowed


def test_token_taken_during_a_modification_never_becomes_current():
    fence = TableFence()
    with fence.modifying(1):
        token = fence.token()
        assert not fence.is_current(token)
    assert not fence.is_current(token)


def test_fill_during_a_modification_is_refused_without_waiting():
    fence = TableFence()
    token = fence.token()
    with fence.modifying(1), fence.filling(token) as allowed:
        assert not allowed


@pytest.mark.parametrize("earlier", ["fill", "two fills", "modification"])
def test_modification_waits_for_earlier_work_and_goes_on_as_soon_as_it_ends(earlier):
    """If it were not told, it would go on when its ten minutes are over."""
    fence, done, filling = TableFence(), threading.Event(), []

    def modify():
        with fence.modifying(600):
            filling.append(fence._filling)
            done.set()

    with ExitStack() as work:
        if earlier == "modification":
            work.enter_context(fence.modifying(1))
        for _ in range(["modification", "fill", "two fills"].index(earlier)):
            work.enter_context(fence.filling(fence.token()))
        threading.Thread(target=modify, daemon=True).start()
        wait_until(lambda: fence._waiting or (fence._modifying and earlier != "modification"), "it waits")
        assert not done.is_set()
    assert done.wait(PATIENCE_S)
    assert filling == [0]


def test_modification_gives_up_when_a_fill_does_not_end_and_later_fills_work():
    fence = TableFence()
    with fence.filling(fence.token()), pytest.raises(DatabaseTimeoutError), fence.modifying(0.01):
        pytest.fail("must not be entered")
    with fence.filling(fence.token()) as allowed:
        assert allowed
    with fence.modifying(1):
        pass


def test_failed_modification_invalidates_earlier_tokens():
    fence = TableFence()
    token = fence.token()
    with pytest.raises(RuntimeError), fence.modifying(1):
        raise RuntimeError
    assert not fence.is_current(token)
    assert fence.is_current(fence.token())


def test_modifications_take_turns():
    """One that follows another at once does not come before one that has waited."""
    fence, order = TableFence(), []

    def modify() -> None:
        with fence.modifying(10):
            order.append("waited")

    thread = threading.Thread(target=modify)
    with fence.modifying(1):
        thread.start()
        wait_until(lambda: fence._waiting, "the other waits")
    with fence.modifying(10):
        order.append("again")
    thread.join()
    assert order == ["waited", "again"]


def test_a_modification_that_gives_up_leaves_its_turn_to_the_next_one():
    fence = TableFence()
    with fence.modifying(1), pytest.raises(DatabaseTimeoutError), fence.modifying(0.01):
        pass
    with fence.modifying(1):
        assert not fence._waiting
