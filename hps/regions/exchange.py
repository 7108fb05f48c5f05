"""The numba functions of both sides of a region: what fronts post, and what the owner takes and completes.

`regions` are rows of the owner's own memory, one for each front, with the columns below; `deployments` and `tables` say what
descriptors may name.
"""

from typing import Any, Final

from numba import int64, njit, types, void

from hps.ground.kernels.numba_atomics import (
    exchange,
    fetch_add,
    load_acquire,
    load_relaxed,
    pause_processor,
    store_relaxed,
    store_release,
)
from hps.ground.kernels.numba_kernels import kernel
from hps.regions.layout import (
    ASIDE,
    ASIDE_BYTES,
    BEGAN_NS,
    BEGUN_EPOCH,
    COMPLETED,
    COMPLETIONS,
    ENDED_NS,
    FLAGS,
    FRONT_EPOCH,
    FRONT_SLEEPS,
    HEADER_BYTES,
    MALFORMED,
    MOST_SEGMENTS,
    OWNER_EPOCH,
    OWNER_SLEEPS,
    POOLED,
    RETIRED,
    RING,
    SEGMENT_WORDS,
    SEGMENTS,
    SERIAL,
    SLAB,
    STATUS,
    SUBMISSIONS,
    SUBMITTED,
    TAKEN,
)
from hps.types import IndexArray

# Columns of `regions`.
BASE, LENGTH, SHIFT, TAIL, HEAD, IN_FLIGHT, EPOCH, EVENT, LOCK, MALFORMED_COUNT, OLD_EPOCH = range(11)
REGION_COLUMNS: Final = 16
"""Of a region: its address (0: none), its bytes, what to add for a device's addresses, places taken and completed, slots under
way, the epoch that is served, the event that wakes its front, the lock of its completions, malformed descriptors so far, the
last epoch of an owner before this one."""

# Columns of `deployments`; a serial's lower 8 bits are the row.
D_SERIAL, D_TABLES, D_FIRST, D_RESIDENT, D_IN_FLIGHT, D_NS, D_OWN = range(7)
D_TIMES: Final = 24
"""First of the buckets of the times of answers."""
DEPLOYMENT_COLUMNS: Final = 64
MOST_DEPLOYMENTS: Final = 256

# Columns of `tables`, the first of which every driver has.
T_DIM, T_MAX_KEYS, T_KEYS, T_HITS, T_LINKED, T_ABSENT, T_OWN = range(7)
TABLE_COLUMNS: Final = 32

# Words of a loop's own state.
STOP, SPIN_NS, JOBS_HEAD, JOBS_EVENT, LOOP_EVENT, BATCHES, WAKES, BOUND_COUNT = range(8)
BOUNDS: Final = 64
"""First of the bounds of the buckets of times, in ns."""
STATE_WORDS: Final = 128
SCRATCH: Final = 48

HEADER_WORDS: Final = 8
H_SERIAL, H_FLAGS, H_SEGMENTS, H_ASIDE, H_ASIDE_BYTES, H_KEYS = range(6)

_I64: Any = types.int64
_I32: Any = types.int32
_read: Any = types.ExternalFunction("read", _I64(_I32, _I64, _I64))
_write: Any = types.ExternalFunction("write", _I64(_I32, _I64, _I64))
_poll: Any = types.ExternalFunction("poll", _I32(_I64, _I64, _I32))
_clock: Any = types.ExternalFunction("clock_gettime", _I32(_I32, _I64))
_MONOTONIC = 1
_POLLIN = 1

_WORDS, _ROWS = int64[::1], int64[:, ::1]


@njit()
def now_ns(scratch: int) -> int:
    """Return the time of `time.perf_counter_ns`; scratch: address of two words."""
    _clock(_MONOTONIC, scratch)
    return load_relaxed(scratch) * 1_000_000_000 + load_relaxed(scratch + 8)


# The front's side.


@kernel(int64, int64, int64)
def post(region: int, slot: int) -> int:
    """Submit a slot; return 1 if the owner sleeps and this caller must wake it."""
    head = load_relaxed(region + SUBMITTED)
    store_relaxed(region + SUBMISSIONS + 8 * (head & (RING - 1)), slot)
    exchange(region + SUBMITTED, head + 1)  # the owner's flag is read after this is visible
    if load_relaxed(region + OWNER_SLEEPS) == 1 and exchange(region + OWNER_SLEEPS, 0) == 1:
        return 1
    return 0


@kernel(int64, int64, int64, _WORDS)
def completions(region: int, tail: int, slots: IndexArray) -> int:
    """Write the slots that were completed from place `tail` on to `slots`, (RING,); return their number."""
    head = load_acquire(region + COMPLETED)
    count = head - tail
    if count < 0 or count > RING:
        return 0
    for i in range(count):
        slots[i] = load_relaxed(region + COMPLETIONS + 8 * ((tail + i) & (RING - 1)))
    return count


@kernel(int64, int64)
def arm(region: int) -> int:
    """Ask to be woken at the next completion, and return how many there were."""
    exchange(region + FRONT_SLEEPS, 1)
    return load_acquire(region + COMPLETED)


@kernel(void, int64, int64)
def store_word(address: int, value: int) -> None:
    """Store 64 bits after all that was stored before."""
    exchange(address, value)


# The owner's side.


@njit()
def read_descriptor(
    regions: IndexArray,
    place: int,
    slot: int,
    deployments: IndexArray,
    tables: IndexArray,
    header: IndexArray,
    segments: IndexArray,
) -> int:
    """Read a descriptor once, and check all of it.

    Args:
        header: (HEADER_WORDS,), out.
        segments: (MOST_SEGMENTS, SEGMENT_WORDS), out; offsets from the region.

    Returns:
        0, MALFORMED or RETIRED.
    """
    base, length = regions[place, BASE], regions[place, LENGTH]
    if slot < SLAB or slot % 64 != 0 or slot > length - HEADER_BYTES:
        return MALFORMED
    at, room = base + slot, length - slot
    serial, flags, count = load_relaxed(at + SERIAL), load_relaxed(at + FLAGS), load_relaxed(at + SEGMENTS)
    aside, aside_bytes = load_relaxed(at + ASIDE), load_relaxed(at + ASIDE_BYTES)
    if count < 0 or count > MOST_SEGMENTS or HEADER_BYTES + 8 * SEGMENT_WORDS * count > room:
        return MALFORMED
    if aside < HEADER_BYTES or aside_bytes < 0 or aside > room or aside_bytes > room - aside:
        return MALFORMED
    header[H_SERIAL], header[H_FLAGS], header[H_SEGMENTS] = serial, flags, count
    header[H_ASIDE], header[H_ASIDE_BYTES] = slot + aside, aside_bytes
    row = serial & (MOST_DEPLOYMENTS - 1)
    if serial <= 0 or deployments[row, D_SERIAL] != serial:
        return RETIRED
    first, known, total = deployments[row, D_FIRST], deployments[row, D_TABLES], 0
    for s in range(count):
        word = at + HEADER_BYTES + 8 * SEGMENT_WORDS * s
        table, n, keys = load_relaxed(word), load_relaxed(word + 8), load_relaxed(word + 16)
        out, found = load_relaxed(word + 24), load_relaxed(word + 32)
        if table < 0 or table >= known or n < 0 or n > tables[first + table, T_MAX_KEYS]:
            return MALFORMED
        if keys < 0 or keys % 8 != 0 or keys > room or n > (room - keys) // 8:
            return MALFORMED
        if out < 0 or out % 4 != 0 or out > room or found < 0 or found > room or (found != 0 and n > room - found):
            return MALFORMED
        if flags & POOLED == 0 and n * tables[first + table, T_DIM] > (room - out) // 4:
            return MALFORMED
        segments[s, 0], segments[s, 1], segments[s, 2] = table, n, slot + keys
        segments[s, 3], segments[s, 4] = slot + out, slot + found if found != 0 else 0
        total += n
    header[H_KEYS] = total
    return 0


@kernel(int64, _ROWS, int64, int64, _ROWS, _ROWS, _WORDS, _ROWS)
def read_job(
    regions: IndexArray,
    place: int,
    slot: int,
    deployments: IndexArray,
    tables: IndexArray,
    header: IndexArray,
    segments: IndexArray,
) -> int:
    """As `read_descriptor`, for Python."""
    return read_descriptor(regions, place, slot, deployments, tables, header, segments)


@njit()
def wake(event: int, scratch: int) -> None:
    """Write to an event; scratch: address of a word."""
    if event >= 0:
        store_relaxed(scratch, 1)
        _write(event, scratch, 8)


@njit()
def complete(regions: IndexArray, place: int, slot: int) -> int:
    """Hand a slot back to its front; return the event to write to, or -1. Any thread of the owner."""
    base, lock = regions[place, BASE], regions[place].ctypes.data + 8 * LOCK
    while exchange(lock, 1) == 1:
        pause_processor()
    head = regions[place, HEAD]
    store_relaxed(base + COMPLETIONS + 8 * (head & (RING - 1)), slot)
    regions[place, HEAD] = head + 1
    exchange(base + COMPLETED, head + 1)
    wakes = load_relaxed(base + FRONT_SLEEPS) == 1 and exchange(base + FRONT_SLEEPS, 0) == 1
    store_release(lock, 0)
    fetch_add(regions[place].ctypes.data + 8 * IN_FLIGHT, -1)
    event: int = regions[place, EVENT] if wakes else -1
    return event


@kernel(int64, _ROWS, int64, int64)
def complete_job(regions: IndexArray, place: int, slot: int) -> int:
    """As `complete`, for Python."""
    event: int = complete(regions, place, slot)
    return event


@njit()
def finish(regions: IndexArray, place: int, slot: int, status: int, began: int, ended: int, scratch: int) -> None:
    """Complete a slot with a status and its times, and wake its front if it sleeps."""
    at = regions[place, BASE] + slot
    store_relaxed(at + BEGAN_NS, began)
    store_relaxed(at + ENDED_NS, ended)
    store_relaxed(at + STATUS, status)
    wake(complete(regions, place, slot), scratch)


@njit()
def _waiting(regions: IndexArray, place: int, epoch: int) -> int:
    """Return how many slots of a front, which writes this epoch, can be taken now; -1: it begins an epoch."""
    base = regions[place, BASE]
    in_flight = load_acquire(regions[place].ctypes.data + 8 * IN_FLIGHT)
    if epoch != regions[place, EPOCH]:
        return -1 if in_flight == 0 and epoch != regions[place, OLD_EPOCH] else 0
    if epoch == 0:
        return 0
    count: int = load_acquire(base + SUBMITTED) - regions[place, TAIL]
    if count < 0 or count > RING:  # no front counts so
        return 0
    return min(count, RING - in_flight)  # nor has one more under way, which would overrun the jobs of the others


@njit()
def any_submitted(regions: IndexArray) -> bool:
    """Return whether there is anything to take, or a front that begins an epoch."""
    for place in range(regions.shape[0]):
        base = regions[place, BASE]
        if base != 0 and _waiting(regions, place, load_acquire(base + FRONT_EPOCH)) != 0:
            return True
    return False


@njit()
def available(regions: IndexArray, place: int, scratch: int) -> int:
    """Return how many slots of a front can be taken now; begin its new epoch if there is one, which returns -1."""
    base = regions[place, BASE]
    if base == 0:
        return 0
    epoch = load_acquire(base + FRONT_EPOCH)
    count: int = _waiting(regions, place, epoch)
    if count < 0:
        regions[place, TAIL] = regions[place, HEAD] = 0
        store_relaxed(base + COMPLETED, 0)
        store_relaxed(base + TAKEN, 0)
        regions[place, EPOCH] = epoch
        store_relaxed(base + BEGUN_EPOCH, epoch)
        exchange(base + OWNER_EPOCH, epoch)
        wake(regions[place, EVENT], scratch)
    return count


@njit()
def peek(regions: IndexArray, place: int) -> int:
    """Return the next slot of a front that has one, without taking it."""
    return load_relaxed(regions[place, BASE] + SUBMISSIONS + 8 * (regions[place, TAIL] & (RING - 1)))


@njit()
def take(regions: IndexArray, place: int) -> int:
    """Take the next slot of a front that has one."""
    base, tail = regions[place, BASE], regions[place, TAIL]
    slot = load_relaxed(base + SUBMISSIONS + 8 * (tail & (RING - 1)))
    regions[place, TAIL] = tail + 1
    store_release(base + TAKEN, tail + 1)
    fetch_add(regions[place].ctypes.data + 8 * IN_FLIGHT, 1)
    return slot


@njit()
def refuse(regions: IndexArray, place: int, slot: int, status: int, scratch: int) -> None:
    """Complete a slot whose descriptor was refused. Its place may be anywhere: nothing is written to it."""
    if status == MALFORMED:
        regions[place, MALFORMED_COUNT] += 1
    if slot >= SLAB and slot % 64 == 0 and slot <= regions[place, LENGTH] - HEADER_BYTES:
        store_relaxed(regions[place, BASE] + slot + STATUS, status)
    wake(complete(regions, place, slot), scratch)


@njit()
def hand_over(state: IndexArray, jobs: IndexArray, place: int, slot: int) -> None:
    """Leave a slot to the owner's threads, which answer it in Python."""
    head = state[JOBS_HEAD]
    jobs[head % jobs.shape[0], 0] = place
    jobs[head % jobs.shape[0], 1] = slot
    store_release(state.ctypes.data + 8 * JOBS_HEAD, head + 1)
    wake(state[JOBS_EVENT], state.ctypes.data + 8 * SCRATCH)


@njit()
def note_answer(deployments: IndexArray, state: IndexArray, row: int, ns: int) -> None:
    """Count an answer of a deployment, and how long it took."""
    place = 0
    while place < state[BOUND_COUNT] and state[BOUNDS + place] < ns:
        place += 1
    deployments[row, D_NS] += ns
    deployments[row, D_TIMES + place] += 1


@njit()
def rest(regions: IndexArray, state: IndexArray, idle_since: int) -> int:
    """With nothing to do: spin, or sleep until a front posts; return since when there is nothing to do."""
    scratch = state.ctypes.data + 8 * SCRATCH
    if now_ns(scratch) - idle_since < state[SPIN_NS]:
        pause_processor()
        return idle_since
    for place in range(regions.shape[0]):
        if regions[place, BASE] != 0:
            exchange(regions[place, BASE] + OWNER_SLEEPS, 1)
    if not any_submitted(regions) and load_acquire(state.ctypes.data + 8 * STOP) == 0:
        event = state[LOOP_EVENT]
        store_relaxed(scratch, event | _POLLIN << 32)  # a struct pollfd
        if _poll(scratch, 1, 100) > 0:
            _read(event, scratch + 8, 8)
        state[WAKES] += 1
    for place in range(regions.shape[0]):
        if regions[place, BASE] != 0:
            store_relaxed(regions[place, BASE] + OWNER_SLEEPS, 0)
    return now_ns(scratch)
