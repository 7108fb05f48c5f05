import threading
from contextlib import ExitStack

import pytest

from hps.engine.fences import TableFence
from hps.errors import DatabaseTimeoutError
from hps.testing.waiting import PATIENCE_S, wait_until


def fills(fence, token):
    with fence.filling(token) as allowed:
        return allowed


def test_a_fill_is_allowed_while_its_token_is_current_and_not_after_a_modification_began():
    fence = TableFence()
    before = fence.token()
    assert fills(fence, before)
    with fence.modifying(1):
        during = fence.token()
        assert not fence.is_current(during)
        assert not fills(fence, before)  # without waiting
    assert not fence.is_current(during)
    assert not fills(fence, before)
    after = fence.token()
    with pytest.raises(RuntimeError), fence.modifying(1):
        raise RuntimeError
    assert not fence.is_current(after)
    assert fence.is_current(fence.token())


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


def test_modification_gives_up_when_earlier_work_does_not_end_and_leaves_its_turn_to_the_next_one():
    fence = TableFence()
    for earlier in (fence.filling(fence.token()), fence.modifying(1)):
        with earlier, pytest.raises(DatabaseTimeoutError), fence.modifying(0.01):
            pytest.fail("must not be entered")
        assert fills(fence, fence.token())
        with fence.modifying(1):
            assert not fence._waiting


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


def test_a_fill_of_current_rows_waits_for_a_modification_and_keeps_the_next_one_waiting():
    fence, entered = TableFence(), threading.Event()
    done = []

    def fill():
        with fence.filling_next(PATIENCE_S):
            entered.set()
            done.append("fill")

    with fence.modifying(1):
        thread = threading.Thread(target=fill)
        thread.start()
        assert not entered.is_set()
        with pytest.raises(DatabaseTimeoutError), fence.filling_next(0.01):
            pass
        done.append("modification")
    thread.join(PATIENCE_S)
    assert done == ["modification", "fill"]
    with fence.filling_next(1), pytest.raises(DatabaseTimeoutError), fence.modifying(0.01):
        pass
    with pytest.raises(RuntimeError), fence.filling_next(1):
        raise RuntimeError
    with fence.modifying(1):
        pass
