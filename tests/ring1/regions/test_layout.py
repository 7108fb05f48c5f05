"""Shared memory of a fixed size, and text in it that is read whole or not at all."""

import itertools
import json
import mmap
import os

import numpy as np
import pytest

from hps.errors import HPSError
from hps.regions import layout
from hps.regions.layout import Memory, create_region, map_region, read_only, read_text, shared_memory, write_text

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
    names = "SUBMITTED TAKEN COMPLETED FRONTEND_SLEEPS ENGINE_SLEEPS FRONTEND_EPOCH ENGINE_EPOCH STARTED_EPOCH FORMAT_AT"
    words = [getattr(layout, name) for name in names.split()]
    places = [(word, word + 8) for word in words]
    places += [(at, at + 8 * layout.RING) for at in (layout.SUBMISSIONS, layout.COMPLETIONS)]
    places += [(layout.FIGURES, layout.FIGURES + layout.FIGURES_BYTES), (layout.SLAB, layout.SLAB + 1)]
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(sorted(places)))
    assert len({word // layout.LINE for word in words}) == len(words)


def test_a_region_of_another_build_is_refused():
    descriptor = create_region("hps-test", SIZE)
    try:
        assert map_region(descriptor)[layout.FORMAT_AT] == layout.FORMAT
        Memory(descriptor)[layout.FORMAT_AT] ^= 1
        with pytest.raises(HPSError, match=r"of another build of hps, expected .* restart the service"):
            map_region(descriptor)
    finally:
        os.close(descriptor)


def test_memory_has_the_size_of_its_file_begins_as_zeros_and_is_the_same_in_two_maps(descriptor, memory):
    assert (memory.size, memory.bytes.size, memory.words.size) == (SIZE, SIZE, SIZE // 8)
    assert not memory.words.any()
    memory[64] = -5
    assert memory[64] == memory.words[8] == Memory(descriptor)[64] == -5
    assert memory.bytes[64:72].tobytes() == (-5).to_bytes(8, "little", signed=True)


@pytest.mark.parametrize("size", [0, SIZE - mmap.PAGESIZE, SIZE + mmap.PAGESIZE])
def test_memory_can_not_be_made_smaller_or_larger(descriptor, size):
    with pytest.raises(PermissionError):
        os.ftruncate(descriptor, size)
    assert os.fstat(descriptor).st_size == SIZE


def test_a_read_only_descriptor_can_not_be_mapped_for_writing(descriptor, memory):
    other = read_only(descriptor)
    try:
        seen = Memory(other, writable=False)
        memory[128] = 3
        assert seen[128] == 3
        for error, write in {
            TypeError: lambda: seen.__setitem__(128, 4),
            ValueError: lambda: seen.words.__setitem__(16, 4),
            PermissionError: lambda: Memory(other),
            OSError: lambda: os.pwrite(other, b"x", 0),
        }.items():
            with pytest.raises(error):
                write()
        with pytest.raises(TypeError):
            seen.view[128] = 4
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


def test_text_of_exactly_the_room_is_written_and_read_and_one_byte_more_is_not(memory):
    text = {"a": "x" * 10}
    room, at = len(json.dumps(text)), 1024
    memory.bytes[:] = 0x55
    memory[at] = 0
    write_text(memory, at, text, room)
    changed = np.flatnonzero(memory.bytes != 0x55)
    assert at <= changed.min() <= changed.max() < at + layout.TEXT_AT + room
    with pytest.raises(ValueError, match=f"publishing {room + 1} bytes, expected at most {room}"):
        write_text(memory, at, {"a": "x" * 11}, room)
    assert read_text(memory, at, room)[1] == text
    assert read_text(memory, at, room - 1) is None


def test_text_of_a_writer_that_stopped_half_way_is_not_read(memory):
    write_text(memory, 0, {"a": 1}, MOST)
    memory[0] += 1  # a writer begins
    assert read_text(memory, 0, MOST) is None
    write_text(memory, 0, {"b": 2}, MOST)  # the writer after it
    version, found = read_text(memory, 0, MOST)
    assert (version % 2, found) == (0, {"b": 2})


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


SIZES = [-1, MOST + 1, 1 << 40, -(1 << 63), (1 << 63) - 1]
TEXTS = [b"{", b"[1]", b"3", b"\xff\xfe", b"", b"[" * 4000, b'{"a":' * 800]


@pytest.mark.parametrize(("size", "text"), [*((size, b"") for size in SIZES), *((len(text), text) for text in TEXTS)])
def test_text_of_an_impossible_length_or_that_is_no_object_is_not_read(memory, size, text):
    write_text(memory, 0, {"a": 1}, MOST)
    memory.view[layout.TEXT_AT : layout.TEXT_AT + len(text)] = text
    memory[layout.TEXT_BYTES] = size
    assert read_text(memory, 0, MOST) is None
