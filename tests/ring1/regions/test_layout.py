"""Shared memory of a fixed size, and text in it that is read whole or not at all."""

import itertools
import json
import mmap
import os

import numpy as np
import pytest

from hps.regions import layout
from hps.regions.layout import Memory, read_only, read_text, shared_memory, write_text

SIZE = 1 << 16
MOST = 4096


@pytest.fixture
def descriptor():
    descriptor = shared_memory("hps-test", SIZE)
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def memory(descriptor):
    return Memory(descriptor)


def test_control_words_and_rings_do_not_overlap():
    words = [
        layout.SUBMITTED,
        layout.TAKEN,
        layout.COMPLETED,
        layout.FRONT_SLEEPS,
        layout.OWNER_SLEEPS,
        layout.FRONT_EPOCH,
        layout.OWNER_EPOCH,
        layout.BEGUN_EPOCH,
    ]
    places = [(word, word + 8) for word in words]
    places += [(at, at + 8 * layout.RING) for at in (layout.SUBMISSIONS, layout.COMPLETIONS)]
    places.append((layout.FIGURES, layout.FIGURES + layout.FIGURES_BYTES))
    places.append((layout.SLAB, layout.SLAB + 1))
    ordered = sorted(places)
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(ordered))
    assert len({word // layout.LINE for word in words}) == len(words)


def test_memory_has_the_size_of_its_file_and_begins_as_zeros(memory):
    assert memory.size == SIZE
    assert memory.bytes.size == SIZE
    assert memory.words.size == SIZE // 8
    assert not memory.words.any()


def test_words_are_addressed_by_their_bytes(memory):
    memory[64] = -5
    assert memory[64] == -5
    assert memory.words[8] == -5
    assert memory.bytes[64:72].tobytes() == (-5).to_bytes(8, "little", signed=True)


@pytest.mark.parametrize("size", [0, SIZE - mmap.PAGESIZE, SIZE + mmap.PAGESIZE])
def test_memory_can_not_be_made_smaller_or_larger(descriptor, size):
    with pytest.raises(PermissionError):
        os.ftruncate(descriptor, size)
    assert os.fstat(descriptor).st_size == SIZE


def test_two_maps_of_a_descriptor_show_the_same_memory(descriptor, memory):
    memory[8] = 7
    assert Memory(descriptor)[8] == 7


def test_a_read_only_descriptor_can_not_be_mapped_for_writing(descriptor, memory):
    other = read_only(descriptor)
    try:
        seen = Memory(other, writable=False)
        memory[128] = 3
        assert seen[128] == 3
        with pytest.raises(TypeError):
            seen[128] = 4
        with pytest.raises(ValueError):
            seen.words[16] = 4
        with pytest.raises(TypeError):
            seen.view[128] = 4
        with pytest.raises(PermissionError):
            Memory(other)
        with pytest.raises(OSError):
            os.pwrite(other, b"x", 0)
    finally:
        os.close(other)


def test_text_is_read_as_it_was_written_with_a_version_of_its_own(memory):
    assert read_text(memory, 0, MOST) is None
    versions = []
    for content in ({"a": 1}, {}, {"long": "x" * 1000}, {"short": "\u00e9"}):
        write_text(memory, 0, content, MOST)
        version, found = read_text(memory, 0, MOST)
        assert found == content
        versions.append(version)
    assert versions == sorted(set(versions))


def test_text_of_exactly_the_room_is_written_and_one_byte_more_is_refused(memory):
    room = len(json.dumps({"a": "x" * 10}))
    write_text(memory, 0, {"a": "x" * 10}, room)
    with pytest.raises(ValueError, match=f"publishing {room + 1} bytes, expected at most {room}"):
        write_text(memory, 0, {"a": "x" * 11}, room)
    assert read_text(memory, 0, room)[1] == {"a": "x" * 10}


def test_text_of_a_writer_that_stopped_half_way_is_not_read(memory):
    write_text(memory, 0, {"a": 1}, MOST)
    memory[0] += 1  # a writer begins
    assert read_text(memory, 0, MOST) is None
    write_text(memory, 0, {"b": 2}, MOST)  # the writer after it
    version, found = read_text(memory, 0, MOST)
    assert found == {"b": 2}
    assert version % 2 == 0


class _Changing:
    """Memory in which a writer comes in between two looks at the version."""

    def __init__(self, memory):
        self.memory, self.view, self.looks = memory, memory.view, 0

    def __getitem__(self, offset):
        self.looks += offset == 0
        return self.memory[offset] + (2 if offset == 0 and self.looks > 1 else 0)


def test_text_that_changes_while_it_is_read_is_not_returned(memory):
    write_text(memory, 0, {"a": 1}, MOST)
    assert read_text(_Changing(memory), 0, MOST) is None


def test_text_that_is_longer_than_its_reader_allows_is_not_read(memory):
    write_text(memory, 0, {"a": "x" * 100}, MOST)
    assert read_text(memory, 0, 108) is None
    assert read_text(memory, 0, 109) is not None


@pytest.mark.parametrize("size", [-1, MOST + 1, 1 << 40, -(1 << 63), (1 << 63) - 1])
def test_text_of_an_impossible_length_is_not_read(memory, size):
    write_text(memory, 0, {"a": 1}, MOST)
    memory[layout.PAGE_BYTES] = size
    assert read_text(memory, 0, MOST) is None


@pytest.mark.parametrize("text", [b"{", b"[1]", b"3", b"\xff\xfe", b"", b"[" * 4000, b'{"a":' * 800])
def test_text_that_is_no_object_is_not_read(memory, text):
    write_text(memory, 0, {"a": 1}, MOST)
    memory.view[layout.PAGE_TEXT : layout.PAGE_TEXT + len(text)] = text
    memory[layout.PAGE_BYTES] = len(text)
    assert read_text(memory, 0, MOST) is None


def test_text_stays_within_its_place(memory):
    memory.bytes[:] = 0x55
    at = 1024
    memory[at] = 0
    write_text(memory, at, {"a": "x" * 100}, MOST)
    changed = np.flatnonzero(memory.bytes != 0x55)
    assert changed.min() >= at
    assert changed.max() < at + layout.PAGE_TEXT + len(json.dumps({"a": "x" * 100}))
