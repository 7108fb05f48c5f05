"""Layout of the memory that frontends and the engine share.

A frontend process speaks HTTP; the engine process has the tiers. Each frontend has one *region*, which the engine maps, too (a
GPU reads and writes it in place):

    control words | ring of submissions | ring of completions | figures | slab

The frontend allocates *slots* in its slab. A slot holds one request, the wire form of a `Batch`: a descriptor, the keys, and
room for the answer:

    header | segments | scratch | keys ... | answer: HTTP head, JSON part, vectors, masks

The frontend writes it, and submits its offset (`exchange.post`). From then on the engine has the slot, even if the client
disconnects. It reads every field of the descriptor once, checks it, answers, and completes the slot, in any order. Nothing that
a frontend writes can lead the engine out of its region.

Both rings have one reader, and their counts never wrap. A ring has more places than a frontend has slots under way.

**Sleep.** Either end spins briefly and then sleeps on an event; see `exchange` for the fences.

**Deaths.** A new frontend writes a new `FRONTEND_EPOCH`. The engine takes no more slots of the old one, waits until those that
it took are answered, empties both rings, and writes the same number to `ENGINE_EPOCH`: the slab is the frontend's. An engine
that starts, and a supervisor whose engine died, writes 0 to `ENGINE_EPOCH`: the frontend then starts a new epoch, and posts
unanswered slots again. An engine starts no epoch that its predecessor has started (`STARTED_EPOCH`): its frontend has not
noticed the death yet.

The *snapshot* is memory that the engine writes and all frontends read: the models, and the settings of the service.
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
"""Places of a ring, a power of two: limit on the slots under way of a frontend."""

# Byte offsets in a region. Each control word has a cache line of its own.
SUBMITTED, TAKEN, COMPLETED, FRONTEND_SLEEPS, ENGINE_SLEEPS, FRONTEND_EPOCH, ENGINE_EPOCH, STARTED_EPOCH = (
    LINE * i for i in range(8)
)
FORMAT_AT: Final = 8 * LINE
SUBMISSIONS: Final = 4096
COMPLETIONS: Final = SUBMISSIONS + 8 * RING
FIGURES: Final = COMPLETIONS + 8 * RING
FIGURES_BYTES: Final = 1 << 17
SLAB: Final = 1 << 18

# Byte offsets in a slot. The frontend writes the first five words, the engine the others before it completes the slot.
DEPLOYMENT_ID, FLAGS, SEGMENTS, SCRATCH, SCRATCH_BYTES = (8 * i for i in range(5))
STATUS, BEGAN_NS, ENDED_NS, DEFERRED, SCRATCH_USED = (LINE + 8 * i for i in range(5))
HEADER_BYTES: Final = 2 * LINE
SEGMENT_WORDS: Final = 5
"""Of a segment: table, number of keys, and the offsets from the slot of its keys, vectors and found-mask (0: none)."""
MOST_SEGMENTS: Final = 1024

# Flags of a request.
TRACED: Final = 1
"""The engine writes the trace of the lookup to the scratch."""
POOLED: Final = 2
"""The keys are in bags, which the frontend describes in the scratch."""
SCORED: Final = 4
"""No segments: a description of the inputs and outputs of the model's network follows the header, up to the scratch."""


def tensors_at(scratch_end: int) -> int:
    """Return where the tensors of a scored request start, after the scratch."""
    return -(-scratch_end // LINE) * LINE


# Status of a completed slot.
ANSWERED, MALFORMED, RETIRED, FAILED = 1, 2, 3, 4
"""FAILED: the error is in the scratch. RETIRED: the deployment was retired; another version may serve."""

SNAPSHOT_AT: Final = 0  # odd while the engine writes the snapshot
TEXT_BYTES: Final = LINE  # of its text
TEXT_AT: Final = 2 * LINE
MOST_SNAPSHOT_BYTES: Final = 1 << 24


# All processes of a service are forked from one, so they agree on this layout. That would end with the first process that is
# started otherwise, or that imports this module after an upgrade on disk: offsets of one build read by another are wrong
# vectors. So a region carries the format of its creator, which is derived from the numbers above and needs no upkeep.
FORMAT: Final = zlib.crc32(
    repr((__version__, sorted((name, value) for name, value in globals().items() if isinstance(value, int)))).encode()
)


@dataclass(frozen=True, slots=True)
class FrontendDescriptors:
    """File descriptors of what engine and frontends share. *Immutable.*

    Attributes:
        regions, events: by frontend, its region and the event that wakes it.
        snapshot: of the models and settings.
        loop_events: by loop, the event that wakes it; frontend i belongs to loop i % their number.
        path: unix socket of the engine's application.
        spin_ns: duration that a loop spins before it sleeps.
    """

    regions: tuple[int, ...]
    events: tuple[int, ...]
    snapshot: int
    loop_events: tuple[int, ...]
    path: str
    spin_ns: int

    def close(self) -> None:
        """Close the descriptors; mappings remain."""
        for region in (*self.regions, *self.events, self.snapshot, *self.loop_events):
            os.close(region)


class Memory:
    """Shared memory behind a file descriptor. *One process.*

    Args:
        descriptor: of a file of the right size; the caller closes it.
        writable: whether this process may write.

    Attributes:
        bytes, words: all of it, as (size,) uint8 and (size / 8,) int64.
        view, longs: the same as memoryviews, whose elements are accessed in a third of the time.
        address: in this process.
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
    """Create shared memory of zeros that no process can shrink. Return its file descriptor.

    Containers limit /dev/shm, often to 64 MB; anonymous memory counts as memory of the processes alone.
    """
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    with suppress(OSError):  # a kernel without seals: a frontend that was broken into could end the engine by SIGBUS
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
    """Reopen shared memory read-only."""
    return os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)


def write_text(memory: Memory, version_at: int, content: Mapping[str, Any], most: int) -> None:
    """Write a JSON object behind its version, which is odd while the text changes. One writer.

    Raises:
        ValueError: it is longer than `most`.
    """
    text = json.dumps(content).encode()
    if len(text) > most:
        raise ValueError(f"publishing {len(text)} bytes, expected at most {most}")
    version = memory[version_at]
    memory[version_at] = version | 1
    memory[version_at + TEXT_BYTES] = len(text)
    start = version_at + TEXT_AT
    memory.view[start : start + len(text)] = text
    memory[version_at] = (version | 1) + 1


def read_text(memory: Memory, version_at: int, most: int) -> tuple[int, dict[str, Any]] | None:
    """Return the version and the object of `write_text`; None before the first text, and while one is written."""
    version = memory[version_at]
    if version & 1 or not version:
        return None
    size = memory[version_at + TEXT_BYTES]
    if not 0 <= size <= most:
        return None
    start = version_at + TEXT_AT
    text = bytes(memory.view[start : start + size])
    if memory[version_at] != version:
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return (version, found) if isinstance(found, dict) else None
