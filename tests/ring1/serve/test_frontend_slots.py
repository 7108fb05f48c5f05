"""Slots of a slab: no two overlap, none is lost, and the memory of small ones becomes large ones again."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hps.regions.layout import SLAB
from hps.serve.frontend.exchange import Slots

LEAST = 4096


def sizes_of(slab_bytes):
    """The powers of two that a slab holds."""
    return [1 << order for order in range(12, 40) if slab_bytes >> order & 1]


def take_all(slots, size):
    found = []
    while (slot := slots.allocate(size)) >= 0:
        found.append(slot)
    return found


def assert_apart(taken, end):
    ordered = sorted(taken.items())
    assert all(one >= SLAB and one % LEAST == 0 for one in taken)
    assert all(one + size <= end for one, size in ordered)
    assert all(one + size <= after for (one, size), (after, _) in itertools.pairwise(ordered))


@given(
    st.integers(LEAST, 1 << 16),  # so small that it is often full
    st.lists(st.tuples(st.booleans(), st.integers(0, 5 * LEAST), st.integers(0, 1000)), max_size=200),
)
def test_slots_never_overlap_and_all_memory_comes_back(slab_bytes, steps):
    slots, taken = Slots(SLAB + slab_bytes), {}
    for takes, size, which in steps:
        if takes or not taken:
            slot = slots.allocate(size)
            if slot >= 0:
                assert slot not in taken
                taken[slot] = max(LEAST, 1 << (size - 1).bit_length() if size else LEAST)
        else:
            slot = sorted(taken)[which % len(taken)]
            slots.free(slot)
            del taken[slot]
        assert slots.used == sum(taken.values())
        assert slots.check_integrity() == []
        assert_apart(taken, SLAB + slab_bytes)
    for slot in taken:
        slots.free(slot)
    assert slots.used == 0
    for size in reversed(sizes_of(slab_bytes)):  # whatever the slab was cut into, it is whole again
        assert slots.allocate(size) >= 0
    assert take_all(slots, 1) == []


@pytest.mark.parametrize("order", range(12, 21))
def test_a_slot_is_the_next_power_of_two_and_at_least_a_page(order):
    size, count = 1 << order, 1 << 20 - order
    for asked, found in ((size, count), (size // 2 + 1, count), (size + 1, count // 2)):
        assert len(take_all(Slots(SLAB + (1 << 20)), asked)) == found
    for asked in (0, 1, LEAST - 1, LEAST):
        slots = Slots(SLAB + 7 * LEAST + 100)  # used up to its last page
        assert sorted(take_all(slots, asked)) == [SLAB + LEAST * nth for nth in range(7)]
        assert (slots.used, slots.largest) == (7 * LEAST, 4 * LEAST)


def test_the_whole_slab_is_one_slot_and_no_larger_one_exists():
    slots = Slots(SLAB + (1 << 20))
    assert slots.largest == 1 << 20
    assert slots.allocate((1 << 20) + 1) == -1
    assert [slots.allocate(1 << 20), slots.allocate(1)] == [SLAB, -1]
    slots.free(SLAB)
    assert slots.allocate(1 << 20) == SLAB
    slots.free(SLAB)
    with pytest.raises(KeyError):  # once
        slots.free(SLAB)
    for slab_bytes in (0, LEAST - 1):
        assert Slots(SLAB + slab_bytes).allocate(1) == -1


def test_small_slots_are_joined_for_a_large_one_only_when_all_of_its_memory_is_free():
    slots = Slots(SLAB + (1 << 16))
    first, *others = take_all(slots, LEAST)
    for other in others:
        slots.free(other)
    assert slots.allocate(1 << 16) == -1
    half = slots.allocate(1 << 15)
    assert half >= 0, "half of it is free in one piece"
    for one in (first, half):
        slots.free(one)
    assert slots.allocate(1 << 16) == SLAB


@pytest.mark.parametrize("order", range(13, 16))
def test_a_slot_of_joined_small_ones_belongs_to_no_larger_one(order):
    slots = Slots(SLAB + (1 << 16))
    for one in take_all(slots, LEAST):
        slots.free(one)
    taken = slots.allocate(1 << order)
    assert slots.allocate(1 << 16) == -1
    others = take_all(slots, LEAST)
    assert len(others) == 16 - (1 << order - 12)
    assert not any(taken <= other < taken + (1 << order) for other in others)


def test_broken_slots_are_found():
    def broken(change):
        slots = Slots(SLAB + 8 * LEAST)
        slots.allocate(LEAST), slots.allocate(LEAST)
        change(slots)
        return slots.check_integrity()

    assert broken(lambda slots: None) == []
    for words, change in {
        "expected one at": lambda slots: slots._free[12].append(0),
        "free or taken": lambda slots: slots._free[14].clear(),
        "are counted": lambda slots: setattr(slots, "used", LEAST),
    }.items():
        assert any(words in one for one in broken(change))
