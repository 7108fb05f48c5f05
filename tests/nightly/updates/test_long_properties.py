"""What ring 1 shows of updates with few examples and small messages, with many and large ones."""

from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from hps.testing.waiting import PATIENCE_S
from hps.updates.dead_letters import read_directory
from tests.ring1.updates.test_dead_letters import make, message
from tests.ring1.updates.test_framing import damage
from tests.ring1.updates.test_update_feed_properties import STEPS, follow_to_the_end
from tests.ring1.updates.test_update_feed_properties import clock as clock  # a fixture


@settings(max_examples=2000, deadline=None)
@given(STEPS, st.integers(1, 5), st.integers(0, 2**32))
def test_tables_end_as_if_every_message_had_been_applied_once_in_order(steps: list[Any], batch: int, seed: int) -> None:
    follow_to_the_end(steps, batch, seed)


@settings(max_examples=2000, deadline=None)
@given(data=st.data())
def test_damage_is_never_read_as_something_else(data: st.DataObject) -> None:
    damage(data)


def test_a_message_of_100_mb_is_kept(tmp_path: Path) -> None:
    value = bytes(100 << 20)
    letters = make(tmp_path)
    letters.add(message(value), "too_large", "large", 1)
    letters.close(PATIENCE_S)
    (kept,) = read_directory(str(tmp_path))
    assert kept.message.value == value
