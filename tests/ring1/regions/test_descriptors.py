"""Whatever a front writes as a descriptor, the engine refuses it, or is led to places in that front's slot and nowhere else."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hps.regions.exchange import (
    H_DEPLOYMENT_ID,
    H_FLAGS,
    H_KEYS,
    H_SCRATCH,
    H_SCRATCH_BYTES,
    H_SEGMENTS,
    HEADER_WORDS,
    read_handed_over,
)
from hps.regions.layout import HEADER_BYTES, MALFORMED, MOST_SEGMENTS, POOLED, RETIRED, SEGMENT_WORDS, SLAB
from hps.regions.loop_state import LoopState
from tests.fakes.region_front import RegionFront, tables_of

SLAB_BYTES = 1 << 17
DIMS, MOST_KEYS = (4, 1, 1 << 40), (1000, 1 << 62, 1 << 62)
FRONT = RegionFront(SLAB_BYTES, guarded=True)  # a read beside the region ends the process
END = FRONT.memory.size
LOOP_STATE = LoopState([FRONT.memory], [FRONT.event], -1, -1, 0)
DEPLOYMENT_ID = LOOP_STATE.add(
    [table for dim, most in zip(DIMS, MOST_KEYS, strict=True) for table in tables_of(dim, max_keys=most)],
    resident=None,
)
OTHER = LOOP_STATE.add(tables_of(1), resident=None)
ENDED = LOOP_STATE.add(tables_of(1, 1, 1, 1), resident=None)
LOOP_STATE.retire(ENDED)
HEADER, SEGMENTS = np.zeros(HEADER_WORDS, np.int64), np.zeros((MOST_SEGMENTS, SEGMENT_WORDS), np.int64)

int64s = st.integers(-(1 << 63), (1 << 63) - 1)
edges = st.sampled_from([-(1 << 63), -8, -1, 0, 1, 7, 64, HEADER_BYTES, SLAB_BYTES, SLAB, END, 1 << 32, 1 << 61, (1 << 63) - 1])
numbers = st.one_of(int64s, edges, st.integers(0, SLAB_BYTES), st.integers(-9, 9))
SLOTS = [SLAB, SLAB + SLAB_BYTES - 4096, END - 1024]


@st.composite
def descriptors(draw):
    """Where a descriptor lies, and its words: right ones that end with the region, but for some fields."""
    slot = draw(st.sampled_from(SLOTS))
    room, rows = END - slot, []
    for _ in range(draw(st.integers(0, 3))):
        table, n = draw(st.integers(0, 1)), draw(st.integers(0, 12))
        places = [room - 8 * n, room - 4 * n * DIMS[table], draw(st.sampled_from([0, room - n]))]
        rows.append([table, n, *places])
    scratch = draw(st.integers(HEADER_BYTES, 400))
    header = [draw(deployment_ids), draw(st.sampled_from([0, 0, POOLED, 3])), len(rows), scratch, room - scratch]
    for _ in range(draw(st.integers(0, 2))):
        fields = draw(st.sampled_from([header, *rows]))
        field = draw(st.integers(0, len(fields) - 1))
        near = min(max(fields[field], 8 - (1 << 63)), (1 << 63) - 9) + draw(st.sampled_from([-8, -4, -1, 1, 4, 8]))
        fields[field] = draw(st.just(near) | numbers)
    return draw(st.just(slot) | numbers) if draw(st.integers(0, 9)) == 0 else slot, header, rows


deployment_ids = st.sampled_from([*[DEPLOYMENT_ID] * 8, OTHER, ENDED, 0, -1, DEPLOYMENT_ID ^ 256, -(1 << 63), -DEPLOYMENT_ID])


def expected_of(slot, header, rows):
    """Return what the descriptor means, by numbers without a limit: a status, or its segments with offsets in the region."""
    deployment_id, flags, count, scratch, scratch_bytes = header
    if not (slot >= SLAB and slot % 64 == 0 and slot + HEADER_BYTES <= END):
        return MALFORMED
    room = END - slot
    if not (0 <= count <= MOST_SEGMENTS and HEADER_BYTES + 40 * count <= room):
        return MALFORMED
    if not (scratch >= HEADER_BYTES and scratch_bytes >= 0 and scratch + scratch_bytes <= room):
        return MALFORMED
    known = {DEPLOYMENT_ID: (DIMS, MOST_KEYS), OTHER: ((1,), (1000,))}.get(deployment_id)
    if known is None:
        return RETIRED
    found_segments = []
    for table, n, keys, out, found in rows:
        if not (0 <= table < len(known[0]) and 0 <= n <= known[1][table]):
            return MALFORMED
        if not (keys >= 0 and keys % 8 == 0 and keys + 8 * n <= room):
            return MALFORMED
        if not (0 <= found <= room and (not found or found + n <= room)):
            return MALFORMED
        size = 0 if flags & POOLED else 4 * n * known[0][table]
        if not (0 <= out <= room and out % 4 == 0 and out + size <= room):
            return MALFORMED
        found_segments.append([table, n, slot + keys, slot + out, slot + found if found else 0])
    return found_segments


def read(slot):
    HEADER[:], SEGMENTS[:] = 0, 0
    return read_handed_over(LOOP_STATE.regions, 0, slot, LOOP_STATE.deployments, LOOP_STATE.tables, HEADER, SEGMENTS)


def write(slot, header, rows):
    """Write as much of a descriptor as lies in the region; return what it then says."""
    words = FRONT.memory.words
    words[SLAB // 8 :] = 0
    if not (0 <= slot <= END - 8 and slot % 8 == 0):
        return rows
    flat = [*header, 0, *[0] * 10, *[word for row in rows for word in row]]
    room = min(len(flat), (END - slot) // 8)
    words[slot // 8 : slot // 8 + room] = flat[:room]
    count = header[2]
    return rows[:count] + [[0] * 5] * (count - len(rows)) if 0 <= count <= MOST_SEGMENTS else rows


def with_segment(row, flags=0, scratch=HEADER_BYTES, scratch_bytes=0):
    return example((SLAB, [DEPLOYMENT_ID, flags, 1, scratch, scratch_bytes], [row]))


@settings(max_examples=400)
@given(descriptors())
@example((END - 64, [DEPLOYMENT_ID, 0, 0, HEADER_BYTES, 0], []))
@example((END - 128, [DEPLOYMENT_ID, 0, 0, HEADER_BYTES, 0], []))
@example((SLAB, [ENDED, 0, 1, HEADER_BYTES, 0], [[99, -1, -1, -1, -1]]))
@example((SLAB, [DEPLOYMENT_ID, 0, 1, HEADER_BYTES, SLAB_BYTES - HEADER_BYTES], [[2, 1 << 24, 256, 256, 0]]))
@example((SLAB, [DEPLOYMENT_ID, 0, 1, HEADER_BYTES, (1 << 63) - 1], [[0, 1, 256, 256, 0]]))
@example((SLAB, [DEPLOYMENT_ID, 0, 1, (1 << 63) - 1, (1 << 63) - 1], [[0, 1, 256, 256, 0]]))
@with_segment([1, 1 << 61, 256, 256, 0])
@with_segment([1, 5, SLAB_BYTES - 40, SLAB_BYTES, SLAB_BYTES - 5], POOLED)
@with_segment([1, 5, SLAB_BYTES - 40, SLAB_BYTES - 20, SLAB_BYTES - 5])
@with_segment([1, 5, SLAB_BYTES - 32, SLAB_BYTES - 20, SLAB_BYTES - 5])
@with_segment([1, 5, SLAB_BYTES - 40, SLAB_BYTES - 16, SLAB_BYTES - 5])
@with_segment([1, 5, SLAB_BYTES - 40, SLAB_BYTES - 20, SLAB_BYTES - 4])
@with_segment([0, 1, 4, 256, 0])
@with_segment([3, 1, 256, 264, 0])
@with_segment([0, 5, 256, SLAB_BYTES - 76, 0])
@with_segment([0, 1001, 256, 8456, 0])
@with_segment([0, 1000, 256, 8456, 0])
def test_a_descriptor_is_refused_or_lies_in_its_region(descriptor):
    slot, header, rows = descriptor
    rows = write(slot, header, rows)
    before = FRONT.memory.words.copy()
    expected = expected_of(slot, header, rows)
    status = read(slot)
    assert np.array_equal(FRONT.memory.words, before)  # reading writes nothing
    if isinstance(expected, int):
        assert status == expected
        return
    assert status == 0
    assert SEGMENTS[: len(expected)].tolist() == expected
    assert HEADER[[H_DEPLOYMENT_ID, H_FLAGS, H_SEGMENTS]].tolist() == header[:3]
    assert HEADER[[H_SCRATCH, H_SCRATCH_BYTES]].tolist() == [slot + header[3], header[4]]
    assert HEADER[H_KEYS] == sum(one[1] for one in expected)


@pytest.mark.parametrize(
    ("slot", "segments", "status"),
    [
        *[(SLAB, MOST_SEGMENTS, 0), (SLAB, MOST_SEGMENTS + 1, MALFORMED)],
        *[
            (END - 192, 1, 0),
            (END - 192, 2, MALFORMED),
            (END - 256, 3, 0),
            (END - 256, 4, MALFORMED),
        ],  # to the end of the region
    ],
)
def test_a_descriptor_has_at_most_so_many_segments_and_ends_with_its_region(slot, segments, status):
    write(slot, [DEPLOYMENT_ID, 0, segments, HEADER_BYTES, 0], [[0, 0, 0, 0, 0]] * segments)
    assert read(slot) == status
