"""A front without sockets: writes requests into a region by hand, and reads what the engine has answered."""

import ctypes
import mmap
import os
import select

import numpy as np

from hps.regions import layout
from hps.regions.exchange import arm, completions, post, store_word
from hps.regions.layout import HEADER_BYTES, LINE, RING, SEGMENT_WORDS, SLAB, Memory, shared_memory
from hps.types import TableSpec

SCRATCH_BYTES = 512
WAIT_S = 20
_PAGE = mmap.PAGESIZE
_libc = ctypes.CDLL(None, use_errno=True)


class GuardedMemory(Memory):
    """Memory whose neighbours fault. It has no file descriptor."""

    def __init__(self, size):
        assert size % _PAGE == 0
        self.size = size
        self._map = mmap.mmap(-1, size + 2 * _PAGE)
        start = np.frombuffer(self._map, np.uint8).ctypes.data
        for place in (start, start + _PAGE + size):
            assert _libc.mprotect(ctypes.c_void_p(place), ctypes.c_size_t(_PAGE), 0) == 0
        self.view = memoryview(self._map)[_PAGE : _PAGE + size]
        self.bytes = np.frombuffer(self.view, np.uint8)
        self.words = self.bytes.view(np.int64)
        self.longs = self.view.cast("q")
        self.address = self.bytes.ctypes.data


class Request:
    """What a front has written into a slot: `asked` holds table, keys, vectors and mask (or None) of each segment."""

    def __init__(self, memory, slot, asked):
        self.slot = slot
        self.asked = asked
        self._words = memory.words[slot // 8 :]

    @property
    def status(self):
        return int(self._words[layout.STATUS // 8])

    @property
    def times(self):
        return int(self._words[layout.BEGAN_NS // 8]), int(self._words[layout.ENDED_NS // 8])


class RegionFront:
    """Posts slots that a test chooses. *One thread.*"""

    def __init__(self, slab_bytes=1 << 20, *, guarded=False):
        size = SLAB + slab_bytes
        if guarded:
            self.memory = GuardedMemory(size)
        else:
            descriptor = shared_memory("hps-test-front", size)
            self.memory = Memory(descriptor)
            os.close(descriptor)
        self.event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.tail = 0
        self._slots = np.zeros(RING, np.int64)

    def begin(self, epoch=1):
        """Ask the engine for empty rings."""
        self.tail = 0
        store_word(self.memory.address + layout.SUBMITTED, 0)
        store_word(self.memory.address + layout.FRONTEND_EPOCH, epoch)

    def write(self, slot, deployment_id, dims, segments, *, flags=0, scratch=SCRATCH_BYTES):
        """Write a request for `segments` (table, keys, masked) into a slot; vectors and masks begin as rubbish."""
        memory, asked, words = self.memory, [], []
        at = HEADER_BYTES + 8 * SEGMENT_WORDS * len(segments)
        scratch_at, at = at, -(-(at + scratch) // LINE) * LINE
        for table, keys, masked in segments:
            keys = np.asarray(keys, np.int64)
            n, dim, keys_at = keys.size, dims[table], slot + at
            memory.words[keys_at // 8 : keys_at // 8 + n] = keys
            out_at = keys_at + 8 * n
            found_at = out_at + 4 * n * dim
            out = memory.bytes[out_at:found_at].view(np.float32).reshape(n, dim)
            found = memory.bytes[found_at : found_at + n].view(np.bool_) if masked else None
            out[:] = -7.0
            memory.bytes[found_at : found_at + n] = 0xEE
            words += [table, n, keys_at - slot, out_at - slot, found_at - slot if masked else 0]
            asked.append((table, keys, out, found))
            at = -(-(found_at + n - slot) // LINE) * LINE
        head = [deployment_id, flags, len(segments), scratch_at, scratch, -1]
        self.put(slot, [*head, *[0] * (HEADER_BYTES // 8 - len(head)), *words])
        return Request(memory, slot, asked)

    def put(self, slot, words):
        self.memory.words[slot // 8 : slot // 8 + len(words)] = words

    def post(self, *slots):
        """Submit slots; return how often the engine had to be woken."""
        return sum(post(self.memory.address, slot) for slot in slots)

    def completed(self):
        """Return the slots that were completed since the last call."""
        count = completions(self.memory.address, self.tail, self._slots)
        self.tail += count
        return self._slots[:count].tolist()

    def wait(self, count=1):
        """Sleep until so many slots are completed, as fronts do; return them."""
        found = self.completed()
        while len(found) < count:
            if arm(self.memory.address) == self.tail:
                assert select.select([self.event], [], [], WAIT_S)[0], f"{len(found)} slots of {count} were completed"
                os.eventfd_read(self.event)
            found += self.completed()
        return found

    def close(self):
        os.close(self.event)


def tables_of(*dims, max_keys=1000, name="m"):
    """Descriptions of tables with these widths."""
    return tuple(TableSpec(name, f"t{nth}", dim, 0.0, max_keys) for nth, dim in enumerate(dims))
