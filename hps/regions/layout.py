"""The layout of the memory that front processes and the owner share.

A front process speaks HTTP, the owner has the tiers. Each front has one *region*, memory that the owner maps (and a GPU reads
and writes in place) and no other front does:

    control words | ring of submissions | ring of completions | figures | slab

The front alone allocates *slots* in its slab. A slot holds one request: a descriptor, the keys, and room for the answer:

    header | segments | aside | keys ... | answer: HTTP head, JSON part, vectors, masks

The front writes it, and puts its offset into the ring of submissions (`exchange.post`). From then on the slot is the owner's,
whatever becomes of the client. The owner reads every field of the descriptor once, checks it, answers, and puts the offset
into the ring of completions, in any order. Nothing that a front writes can make the owner touch memory outside of its region.

Both rings have one reader and count up without end. A ring has more places than a front has slots under way.

**Sleep.** Either side spins for a moment and then sleeps on an event. The sleeper sets its flag, and looks at the ring once
more; the other publishes, and looks at the flag. Both have a full fence in between (`exchange`), so that one of them sees the
other.

**Deaths.** A front that starts writes a new `FRONT_EPOCH`. The owner takes nothing more of the old one, waits until what it
took has been answered, empties both rings, and writes the same number to `OWNER_EPOCH`: the slab is the front's. An owner that
starts, and whoever sees one die, writes 0 to `OWNER_EPOCH`: the front then begins a new epoch, and posts again what was not
answered. No owner begins an epoch that one before it has begun (`BEGUN_EPOCH`): its front has not noticed the death yet.

The *page* is memory that the owner writes and all fronts read: what the models are, and the settings of the service.
"""

import fcntl
import json
import mmap
import os
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hps.errors import HPSError
from hps.ground.version import __version__

LINE: Final = 64
RING: Final = 2048
"""Places of a ring, a power of two; a front has at most so many slots under way."""

# Byte offsets in a region. Each control word has a cache line of its own.
SUBMITTED, TAKEN, COMPLETED, FRONT_SLEEPS, OWNER_SLEEPS, FRONT_EPOCH, OWNER_EPOCH, BEGUN_EPOCH = (LINE * i for i in range(8))
FORMAT_AT: Final = 8 * LINE
SUBMISSIONS: Final = 4096
COMPLETIONS: Final = SUBMISSIONS + 8 * RING
FIGURES: Final = COMPLETIONS + 8 * RING
FIGURES_BYTES: Final = 1 << 17
SLAB: Final = 1 << 18

# Byte offsets in a slot. The front writes the first five words; the owner writes the others before it completes the slot.
SERIAL, FLAGS, SEGMENTS, ASIDE, ASIDE_BYTES = (8 * i for i in range(5))
STATUS, BEGAN_NS, ENDED_NS, DEFERRED, ASIDE_USED = (LINE + 8 * i for i in range(5))
HEADER_BYTES: Final = 2 * LINE
SEGMENT_WORDS: Final = 5
"""Of a segment: table, number of keys, and the offsets from the slot of its keys, vectors and found-mask (0: none)."""
MOST_SEGMENTS: Final = 1024

# Flags of a request.
TRACED: Final = 1
"""The owner writes the trace of the lookup aside."""
POOLED: Final = 2
"""The keys are in bags, which the front describes aside."""
SCORED: Final = 4
"""No segments: a description of the inputs and outputs of the model's network follows the header, up to the room aside."""


def tensors_at(aside_end: int) -> int:
    """Return where the tensors of a scored request begin, from the end of the room aside."""
    return -(-aside_end // LINE) * LINE


# Status of a completed slot.
ANSWERED, MALFORMED, RETIRED, FAILED = 1, 2, 3, 4
"""FAILED: the error stands aside. RETIRED: the deployment is gone; another version may serve."""

PAGE_VERSION: Final = 0  # odd while the owner writes the page
PAGE_BYTES: Final = LINE  # of its text
PAGE_TEXT: Final = 2 * LINE
MOST_PAGE_BYTES: Final = 1 << 24


# All processes of a service are forked from one, so they agree on this layout. That would end with the first process that is
# started otherwise, or that imports this module after an upgrade on disk: offsets of one build read by another are wrong
# vectors. So a region carries the format of its creator, which is derived from the numbers above and needs no upkeep.
FORMAT: Final = zlib.crc32(
    repr((__version__, sorted((name, value) for name, value in globals().items() if isinstance(value, int)))).encode()
)


@dataclass(frozen=True, slots=True)
class FrontendDescriptors:
    """What the owner and the fronts share, as file descriptors. *Immutable.*

    Attributes:
        regions, events: of each front, its region and the event that wakes it.
        page: of the models and settings.
        loop_events: of each loop, the event that wakes it; front i belongs to loop i % their number.
        path: unix socket of the owner's application.
        spin_ns: how long a loop spins before it sleeps.
    """

    regions: tuple[int, ...]
    events: tuple[int, ...]
    page: int
    loop_events: tuple[int, ...]
    path: str
    spin_ns: int

    def close(self) -> None:
        """Close the descriptors. What is mapped stays mapped."""
        for region in (*self.regions, *self.events, self.page, *self.loop_events):
            os.close(region)


class Memory:
    """Shared memory behind a file descriptor. *One process.*

    Args:
        descriptor: of a file of the right size; it stays the caller's.
        writable: whether this process may write.

    Attributes:
        bytes, words: all of it, as (size,) uint8 and (size / 8,) int64.
        view, longs: the same as memoryviews, whose elements are read and written in a third of the time.
        address: where this process has it.
    """

    def __init__(self, descriptor: int, *, writable: bool = True) -> None:
        self.size = os.fstat(descriptor).st_size
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        self._map = mmap.mmap(descriptor, self.size, access=access)
        self.view = memoryview(self._map)
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)
        self.words: npt.NDArray[np.int64] = self.bytes.view(np.int64)
        self.longs = self.view.cast("q")
        self.address = self.bytes.ctypes.data

    def __getitem__(self, offset: int) -> int:
        return self.longs[offset >> 3]

    def __setitem__(self, offset: int, value: int) -> None:
        self.longs[offset >> 3] = value


def shared_memory(name: str, size: int) -> int:
    """Make shared memory of zeros that no process can make smaller, and return its file descriptor.

    Containers limit /dev/shm, often to 64 MB; anonymous memory counts as memory of the processes alone.
    """
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    with suppress(OSError):  # a kernel without seals: a process that broke in could then end the owner by SIGBUS
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return descriptor


def create_region(name: str, size: int) -> int:
    """Make the region of a frontend, and return its file descriptor."""
    descriptor = shared_memory(name, size)
    Memory(descriptor)[FORMAT_AT] = FORMAT
    return descriptor


def map_region(descriptor: int) -> Memory:
    """Map a region that `create_region` made.

    Raises:
        HPSError: another build of hps made it.
    """
    memory = Memory(descriptor)
    if (found := memory[FORMAT_AT]) != FORMAT:
        raise HPSError(
            f"mapping memory that frontends and engine share: got format {found:#x} of another build of hps, expected "
            f"{FORMAT:#x} of {__version__}; restart the service"
        )
    return memory


def read_only(descriptor: int) -> int:
    """Open shared memory again, for reading alone."""
    return os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)


def write_text(memory: Memory, version_at: int, content: Mapping[str, Any], most: int) -> None:
    """Write a JSON object behind a version, which is odd meanwhile. One writer.

    Raises:
        ValueError: it is longer than `most`.
    """
    text = json.dumps(content).encode()
    if len(text) > most:
        raise ValueError(f"publishing {len(text)} bytes, expected at most {most}")
    version = memory[version_at]
    memory[version_at] = version | 1
    memory[version_at + PAGE_BYTES] = len(text)
    start = version_at + PAGE_TEXT
    memory.view[start : start + len(text)] = text
    memory[version_at] = (version | 1) + 1


def read_text(memory: Memory, version_at: int, most: int) -> tuple[int, dict[str, Any]] | None:
    """Read what `write_text` wrote, with its version; None while it is being written, and before anything was."""
    version = memory[version_at]
    if version & 1 or not version:
        return None
    size = memory[version_at + PAGE_BYTES]
    if not 0 <= size <= most:
        return None
    start = version_at + PAGE_TEXT
    text = bytes(memory.view[start : start + size])
    if memory[version_at] != version:
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return (version, found) if isinstance(found, dict) else None
