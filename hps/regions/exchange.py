"""Numba functions for both ends of a region: frontends post slots, the engine takes and completes them.

`regions`, `deployments` and `tables` are arrays in the engine's own memory. `regions` has a row for each frontend; the other
two list the deployments that descriptors may name.
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
    BEGAN_NS,
    COMPLETED,
    COMPLETIONS,
    DEPLOYMENT_ID,
    ENDED_NS,
    ENGINE_EPOCH,
    ENGINE_SLEEPS,
    FLAGS,
    FRONTEND_EPOCH,
    FRONTEND_SLEEPS,
    HEADER_BYTES,
    MALFORMED,
    MOST_SEGMENTS,
    POOLED,
    RETIRED,
    RING,
    SCORED,
    SCRATCH,
    SCRATCH_BYTES,
    SEGMENT_WORDS,
    SEGMENTS,
    SLAB,
    STARTED_EPOCH,
    STATUS,
    SUBMISSIONS,
    SUBMITTED,
    TAKEN,
)
from hps.types import IndexArray

# Columns of `regions`.
BASE, LENGTH, SHIFT, TAIL, HEAD, IN_FLIGHT, EPOCH, EVENT, LOCK, MALFORMED_COUNT, OLD_EPOCH = range(11)
REGION_COLUMNS: Final = 16
"""Of a region: address (0: none), bytes, offset of a device's addresses, counts of taken and completed slots, slots under way,
the current epoch, event that wakes the frontend, lock of the completions, malformed descriptors, last epoch of the previous
engine."""

# Columns of `deployments`. The lower 8 bits of a deployment's id are its row.
D_ID, D_TABLES, D_FIRST, D_RESIDENT, D_IN_FLIGHT, D_NS, D_DRIVER = range(7)
ALWAYS: Final = (1 << 63) - 1
"""Of D_RESIDENT, the time until which the loop may answer from its driver's cache: 0 never, or as `time.perf_counter_ns`."""
D_TIMES: Final = 24
"""First of the buckets of the times of answers."""
DEPLOYMENT_COLUMNS: Final = 64
MOST_DEPLOYMENTS: Final = 256

# Columns of `tables`, the first of which every driver has.
T_DIM, T_MAX_KEYS, T_KEYS, T_HITS, T_LINKED, T_ABSENT, T_DRIVER = range(7)
TABLE_COLUMNS: Final = 32

# Words of a loop's own state.
STOP, SPIN_NS, HANDED_OVER_COUNT, HANDED_OVER_EVENT, LOOP_EVENT, BATCHES, WAKES, BOUND_COUNT = range(8)
SCORED_COUNT, SCORED_EVENT, SCORED_SLEEPS = range(8, 11)
BOUNDS: Final = 64
"""First of the bounds of the buckets of times, in ns."""
STATE_WORDS: Final = 128
STATE_SCRATCH: Final = 48

HEADER_WORDS: Final = 8
H_DEPLOYMENT_ID, H_FLAGS, H_SEGMENTS, H_SCRATCH, H_SCRATCH_BYTES, H_KEYS = range(6)

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


# Functions of the frontend.
#
# Both ends sleep by the same protocol. The sleeper sets its flag and then reads the ring; the other end writes the ring and
# then reads the flag. A processor may delay a store behind a later load of another word: each end would miss the other's store
# and the sleeper would not be woken. So the flag is set, and the count of a ring is raised, by `exchange`, a full fence.


@kernel(int64, int64, int64)
def post(region: int, slot: int) -> int:
    """Submit a slot. Return 1 if the engine sleeps and the caller must wake it."""
    head = load_relaxed(region + SUBMITTED)
    store_relaxed(region + SUBMISSIONS + 8 * (head & (RING - 1)), slot)
    exchange(region + SUBMITTED, head + 1)
    if load_relaxed(region + ENGINE_SLEEPS) == 1 and exchange(region + ENGINE_SLEEPS, 0) == 1:
        return 1
    return 0


@kernel(int64, int64, int64, _WORDS)
def completions(region: int, tail: int, slots: IndexArray) -> int:
    """Write the slots completed since position `tail` to `slots`, (RING,). Return their number."""
    head = load_acquire(region + COMPLETED)
    count = head - tail
    if count < 0 or count > RING:
        return 0
    for i in range(count):
        slots[i] = load_relaxed(region + COMPLETIONS + 8 * ((tail + i) & (RING - 1)))
    return count


@kernel(int64, int64)
def arm(region: int) -> int:
    """Request a wake-up at the next completion. Return the count of completions so far."""
    exchange(region + FRONTEND_SLEEPS, 1)
    return load_acquire(region + COMPLETED)


@kernel(void, int64, int64)
def store_word(address: int, value: int) -> None:
    """Store 64 bits, visible after all earlier stores."""
    exchange(address, value)


# Functions of the engine.


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
    """Read a descriptor and check all of it.

    Args:
        header: (HEADER_WORDS,), out.
        segments: (MOST_SEGMENTS, SEGMENT_WORDS), out; offsets from the region.

    Returns:
        0, MALFORMED or RETIRED.
    """
    # An attacker may control a frontend, and write to a descriptor while it is read. Each word is therefore loaded once, and
    # the engine works with the checked copy: no offset leads it out of the region of that frontend. Sizes are compared with
    # differences, since sums could overflow.
    base, length = regions[place, BASE], regions[place, LENGTH]
    if slot < SLAB or slot % 64 != 0 or slot > length - HEADER_BYTES:
        return MALFORMED
    at, room = base + slot, length - slot
    deployment_id, flags, count = load_relaxed(at + DEPLOYMENT_ID), load_relaxed(at + FLAGS), load_relaxed(at + SEGMENTS)
    scratch, scratch_bytes = load_relaxed(at + SCRATCH), load_relaxed(at + SCRATCH_BYTES)
    if count < 0 or count > MOST_SEGMENTS or HEADER_BYTES + 8 * SEGMENT_WORDS * count > room:
        return MALFORMED
    if scratch < HEADER_BYTES or scratch_bytes < 0 or scratch > room or scratch_bytes > room - scratch:
        return MALFORMED
    header[H_DEPLOYMENT_ID], header[H_FLAGS], header[H_SEGMENTS] = deployment_id, flags, count
    header[H_SCRATCH], header[H_SCRATCH_BYTES] = slot + scratch, scratch_bytes
    row = deployment_id & (MOST_DEPLOYMENTS - 1)
    if deployment_id <= 0 or deployments[row, D_ID] != deployment_id:
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


@kernel(int64, _ROWS, int64, int64, _ROWS, _ROWS, _WORDS, _ROWS, nogil=False)
def read_handed_over(
    regions: IndexArray,
    place: int,
    slot: int,
    deployments: IndexArray,
    tables: IndexArray,
    header: IndexArray,
    segments: IndexArray,
) -> int:
    """Call `read_descriptor` from Python."""
    return read_descriptor(regions, place, slot, deployments, tables, header, segments)


@njit()
def wake(event: int, scratch: int) -> None:
    """Write to an event. scratch: address of a word."""
    if event >= 0:
        store_relaxed(scratch, 1)
        _write(event, scratch, 8)


@njit()
def complete(regions: IndexArray, place: int, slot: int) -> int:
    """Return a slot to its frontend. Return the event to write to, or -1. Called by any thread of the engine."""
    # Python's threads complete slots too, so the ring of completions has several writers: hence the lock. `IN_FLIGHT` falls
    # last: at 0 no thread of the engine writes to the region any more, and a new epoch may empty its rings.
    base, lock = regions[place, BASE], regions[place].ctypes.data + 8 * LOCK
    while exchange(lock, 1) == 1:
        pause_processor()
    head = regions[place, HEAD]
    store_relaxed(base + COMPLETIONS + 8 * (head & (RING - 1)), slot)
    regions[place, HEAD] = head + 1
    exchange(base + COMPLETED, head + 1)
    wakes = load_relaxed(base + FRONTEND_SLEEPS) == 1 and exchange(base + FRONTEND_SLEEPS, 0) == 1
    store_release(lock, 0)
    fetch_add(regions[place].ctypes.data + 8 * IN_FLIGHT, -1)
    event: int = regions[place, EVENT] if wakes else -1
    return event


@kernel(int64, _ROWS, int64, int64, nogil=False)
def complete_handed_over(regions: IndexArray, place: int, slot: int) -> int:
    """Call `complete` from Python."""
    event: int = complete(regions, place, slot)
    return event


@njit()
def finish(regions: IndexArray, place: int, slot: int, status: int, began: int, ended: int, scratch: int) -> None:
    """Complete a slot with its status and times, and wake its frontend if it sleeps."""
    at = regions[place, BASE] + slot
    store_relaxed(at + BEGAN_NS, began)
    store_relaxed(at + ENDED_NS, ended)
    store_relaxed(at + STATUS, status)
    wake(complete(regions, place, slot), scratch)


@njit()
def _waiting(regions: IndexArray, place: int, epoch: int) -> int:
    """Return how many slots can be taken from a frontend that has written this epoch; -1: it has started a new epoch."""
    base = regions[place, BASE]
    # A frontend that starts gets a slab in which its predecessor had slots, and the engine may still write to those. The new
    # epoch waits until all of them are completed: then the whole slab is the frontend's. After the death of an engine it is the
    # frontend that still has the slots: it posts them in a new epoch. Until it does, its epoch is the old engine's.
    in_flight = load_acquire(regions[place].ctypes.data + 8 * IN_FLIGHT)
    if epoch != regions[place, EPOCH]:
        return -1 if in_flight == 0 and epoch != regions[place, OLD_EPOCH] else 0
    if epoch == 0:
        return 0
    count: int = load_acquire(base + SUBMITTED) - regions[place, TAIL]
    if count < 0 or count > RING:  # written by no frontend of ours
        return 0
    return min(count, RING - in_flight)  # more would overrun the ring of handed-over requests, which all frontends share


@njit()
def any_submitted(regions: IndexArray) -> bool:
    """Return True if there is a slot to take or a new epoch to start."""
    for place in range(regions.shape[0]):
        base = regions[place, BASE]
        if base != 0 and _waiting(regions, place, load_acquire(base + FRONTEND_EPOCH)) != 0:
            return True
    return False


@njit()
def available(regions: IndexArray, place: int, scratch: int) -> int:
    """Return how many slots of a frontend can be taken now; -1 if it started a new epoch, which is then served."""
    base = regions[place, BASE]
    if base == 0:
        return 0
    epoch = load_acquire(base + FRONTEND_EPOCH)
    count: int = _waiting(regions, place, epoch)
    if count < 0:
        # `ENGINE_EPOCH` hands the rings to the frontend: it is stored last, behind the zeros.
        regions[place, TAIL] = regions[place, HEAD] = 0
        store_relaxed(base + COMPLETED, 0)
        store_relaxed(base + TAKEN, 0)
        regions[place, EPOCH] = epoch
        store_relaxed(base + STARTED_EPOCH, epoch)
        exchange(base + ENGINE_EPOCH, epoch)
        wake(regions[place, EVENT], scratch)
    return count


@njit()
def peek(regions: IndexArray, place: int) -> int:
    """Return the next slot of a frontend without taking it. There must be one."""
    return load_relaxed(regions[place, BASE] + SUBMISSIONS + 8 * (regions[place, TAIL] & (RING - 1)))


@njit()
def take(regions: IndexArray, place: int) -> int:
    """Take the next slot of a frontend. There must be one."""
    base, tail = regions[place, BASE], regions[place, TAIL]
    slot = load_relaxed(base + SUBMISSIONS + 8 * (tail & (RING - 1)))
    regions[place, TAIL] = tail + 1
    store_release(base + TAKEN, tail + 1)
    fetch_add(regions[place].ctypes.data + 8 * IN_FLIGHT, 1)
    return slot


@njit()
def refuse(regions: IndexArray, place: int, slot: int, status: int, scratch: int) -> None:
    """Complete a slot whose descriptor was refused. Write to it only if the offset is one of a slot."""
    if status == MALFORMED:
        regions[place, MALFORMED_COUNT] += 1
    if slot >= SLAB and slot % 64 == 0 and slot <= regions[place, LENGTH] - HEADER_BYTES:
        store_relaxed(regions[place, BASE] + slot + STATUS, status)
    wake(complete(regions, place, slot), scratch)


@njit()
def hand_over(state: IndexArray, queue: IndexArray, place: int, slot: int, flags: int) -> None:
    """Hand a slot over to the engine's Python threads. The second half of the queue is for requests for scores."""
    # A thread waits for a lookup, so each lookup wakes one. Requests for scores are only queued: one thread takes all that
    # have come, and is woken when it sleeps, since each thread that wakes waits for the GIL.
    size = queue.shape[0] // 2
    scratch = state.ctypes.data + 8 * STATE_SCRATCH
    if flags & SCORED and state[SCORED_EVENT] >= 0:
        head = state[SCORED_COUNT]
        queue[size + head % size, 0] = place
        queue[size + head % size, 1] = slot
        exchange(state.ctypes.data + 8 * SCORED_COUNT, head + 1)
        sleeps = state.ctypes.data + 8 * SCORED_SLEEPS
        if load_relaxed(sleeps) == 1 and exchange(sleeps, 0) == 1:
            wake(state[SCORED_EVENT], scratch)
        return
    head = state[HANDED_OVER_COUNT]
    queue[head % size, 0] = place
    queue[head % size, 1] = slot
    store_release(state.ctypes.data + 8 * HANDED_OVER_COUNT, head + 1)
    wake(state[HANDED_OVER_EVENT], scratch)


@kernel(int64, _WORDS, nogil=False)
def arm_scored(state: IndexArray) -> int:
    """Ask to be woken by the next request for scores. Return how many were handed over."""
    exchange(state.ctypes.data + 8 * SCORED_SLEEPS, 1)
    count: int = load_acquire(state.ctypes.data + 8 * SCORED_COUNT)
    return count


@njit()
def record_answer(deployments: IndexArray, state: IndexArray, row: int, ns: int) -> None:
    """Count an answer of a deployment and its duration."""
    place = 0
    while place < state[BOUND_COUNT] and state[BOUNDS + place] < ns:
        place += 1
    deployments[row, D_NS] += ns
    deployments[row, D_TIMES + place] += 1


@njit()
def idle(regions: IndexArray, state: IndexArray, idle_since: int) -> int:
    """Spin, or sleep until a frontend posts. Return the time since which the loop is idle."""
    scratch = state.ctypes.data + 8 * STATE_SCRATCH
    if now_ns(scratch) - idle_since < state[SPIN_NS]:
        pause_processor()
        return idle_since
    for place in range(regions.shape[0]):
        if regions[place, BASE] != 0:
            exchange(regions[place, BASE] + ENGINE_SLEEPS, 1)
    if not any_submitted(regions) and load_acquire(state.ctypes.data + 8 * STOP) == 0:
        event = state[LOOP_EVENT]
        store_relaxed(scratch, event | _POLLIN << 32)  # a struct pollfd
        if _poll(scratch, 1, 100) > 0:
            _read(event, scratch + 8, 8)
        state[WAKES] += 1
    for place in range(regions.shape[0]):
        if regions[place, BASE] != 0:
            store_relaxed(regions[place, BASE] + ENGINE_SLEEPS, 0)
    return now_ns(scratch)
