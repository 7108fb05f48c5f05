"""The sets of the NumPy embedding cache: their layout and the protocol of concurrent reads and writes.

A **set** is 128 bytes, one row of `lines`, aligned to 128, and 14 rows of `vectors`:

    bytes 0..1      version, uint16: odd while a writer owns the set, two more after each change
    bytes 2..15     14 ages, uint8: 0 marks an empty slot, 1..255 is the epoch of the last use (see below)
    bytes 16..127   14 keys, int64; the key of an empty slot has no meaning

A key belongs to set `scale(mix(key), sets)`, its home. `state` is an array of int64 counters per table (indices below).

**Static tables** evict nothing. A key stands in its home or in its second set, which the hash chooses, too. Where both are
full, a key of one of them moves to its own other set. `state` then has one more word a set, `strays`: the keys whose home it is
and that stand in their second set. A query whose key is not at home looks at the second set only if that is not 0. A writer
owns the home of its key and, if the key stands or goes there, the second set. If another writer owns that set, the home is
released first: no writer waits while it owns a set. A key moves while both of its sets are owned, so the version of its home
tells a query that found it nowhere whether it moved meanwhile.

**Why no query returns a torn vector.** A writer takes a set by compare-and-swap of its version from even to odd (acquire),
issues a release fence, writes, and stores the next even version (release). A reader loads the version (acquire), reads, issues
an acquire fence, and loads the version again. Unless both are the same even number, it discards what it read. If it had read
any byte of a writer, its second load could not be older than that writer's odd version: the two fences order the version before
the bytes on one side, and the bytes before the version on the other (H.-J. Boehm, "Can seqlocks get along with programming
language memory models?", MSPC 2012). This needs only the fences of the processor, so it holds on arm64 as well as on x86-64. To
the compiler, a plain load of data being written gives any value. So keys, ages and vectors are read by volatile loads: a race
gives at worst a wrong slot of the same set or a torn vector, and neither is used once the version has changed. A version has 16
bits, so 32,768 changes of one set during one read would go unnoticed. Therefore a writer whose version wraps first adds to
`WRAPS`, which a reader loads before its first and after its second (acquire) load of the version.

**Waiting.** A reader that finds a set owned by a writer for `PATIENCE` attempts (the writer's thread lost its processor)
reports a miss, which is always correct. A writer waits for another writer of the same set and yields the processor meanwhile. A
set is owned while one vector is copied, and never across a return to Python.

**Recency.** The score of a slot is its age, in epochs. A hit raises it to the current epoch, if it differs, by a
compare-and-swap from the age that was read, so that a slot that was emptied or refilled meanwhile is left alone. An insert into
a full set evicts the smallest score. A new key starts `PROBATION` epochs in the past, so keys that were hit since then outrank
it, and a key that has only missed does not evict them. Ages count modulo 255; an age up to `_AHEAD` epochs in the future was
written by a thread that saw a newer epoch.
"""

import numpy as np
from numba import njit

from hps.ground.hashing import mix, scale
from hps.ground.kernels.numba_atomics import (
    compare_and_swap_acquire_u16,
    compare_and_swap_relaxed_u8,
    copy_bytes,
    equal_words_16,
    fence_acquire,
    fence_release,
    fetch_add,
    load_acquire,
    load_acquire_u16,
    load_relaxed,
    load_relaxed_u8,
    load_relaxed_u16,
    lowest_bit,
    nonzero_bytes_16,
    store_relaxed,
    store_relaxed_u8,
    store_release_u16,
    yield_processor,
)

WAYS = 14
LINE_WORDS = 16
LINE_BYTES = 8 * LINE_WORDS
PROBATION = 15
PATIENCE = 4096
EPOCHS_A_CALL = 5

CLOCK, WRAPS, RESIDENT, INSERTS, EVICTIONS, UNPLACED = 0, 8, 16, 17, 18, 19
STATE_WORDS = 24
"""Words of `state`: keys queried so far, wraps of set versions, counters; on separate cache lines, since some change often. The
words of `strays` follow in a static table."""

_EPOCHS = 255
_AHEAD = 31


@njit(inline="always")
def line_of(key: int, lines: int, sets: int) -> int:
    return lines + int(scale(mix(np.int64(key)), np.int64(sets))) * LINE_BYTES


@njit(inline="always")
def rows_of(line: int, lines: int, vectors: int, row_bytes: int) -> int:
    """Return the first of the 14 rows of a set."""
    return vectors + ((line - lines) >> 7) * WAYS * row_bytes  # 2^7 bytes a line


@njit(inline="always")
def find(line: int, key: int) -> int:
    """Return the slot of a resident key, or -1. Valid only if the set's version is checked afterwards, or the set is owned."""
    matches = (equal_words_16(line, key) & nonzero_bytes_16(line)) >> 2  # words and bytes 2 to 15
    return lowest_bit(matches) if matches != 0 else -1


@njit(inline="always")
def unchanged(line: int, version: int, wraps_at: int, wraps: int) -> bool:
    """Return whether no writer changed the set since its version and the wraps were loaded (acquire, wraps first)."""
    fence_acquire()
    return (version & 1) == 0 and load_acquire_u16(line) == version and load_relaxed(wraps_at) == wraps


@njit()
def read(line: int, key: int, rows: int, row_bytes: int, wraps_at: int, target: int) -> int:
    """Copy the vector of a key to `target` unless that is 0; return its slot, -1 if absent, -2 when out of patience."""
    for _ in range(PATIENCE):
        wraps = load_acquire(wraps_at)
        version = load_acquire_u16(line)
        if version & 1:
            continue
        slot = find(line, key)
        if slot >= 0 and target != 0:
            copy_bytes(target, rows + slot * row_bytes, row_bytes)
        if unchanged(line, version, wraps_at, wraps):
            return slot
    return -2


@njit(inline="always")
def second_line(home: int, key: int, lines: int, sets: int) -> int:
    """Return the second set of a key of a static table, which is not its home."""
    line = home + int(1 + (((np.int64(mix(np.int64(key))) & 0xFFFFFFFF) * (sets - 1)) >> 32)) * LINE_BYTES
    return line - sets * LINE_BYTES if line >= lines + sets * LINE_BYTES else line


@njit(inline="always")
def strays_at(line: int, lines: int, state: int) -> int:
    """Return the address of the count of keys that stand in their second set, by their home."""
    return state + 8 * STATE_WORDS + ((line - lines) >> 4)  # 2^7 bytes a line, 2^3 a word


@njit()
def read_static(
    home: int, key: int, lines: int, sets: int, state: int, vectors: int, row_bytes: int, target: int
) -> tuple[int, int]:
    """As `read`, of a key of a static table; return the set that has it, or any, and what `read` returns."""
    wraps_at = state + 8 * WRAPS
    for _ in range(PATIENCE):
        wraps = load_acquire(wraps_at)
        version = load_acquire_u16(home)
        if version & 1:
            continue
        slot = read(home, key, rows_of(home, lines, vectors, row_bytes), row_bytes, wraps_at, target)
        if slot != -1:
            return home, slot
        if load_relaxed(strays_at(home, lines, state)) != 0:
            line = second_line(home, key, lines, sets)
            slot = read(line, key, rows_of(line, lines, vectors, row_bytes), row_bytes, wraps_at, target)
            if slot != -1:
                return line, slot
        if unchanged(home, version, wraps_at, wraps):  # so the key did not move meanwhile
            return home, -1
    return home, -2


@njit()
def place_of(home: int, key: int, admits: bool, lines: int, sets: int, state: int) -> tuple[int, int]:
    """Find where a key stands, or may stand if it `admits` one. The home is owned, so the key does not move.

    Returns:
        The set, and whether the key stands there: 1, or 0 if not, -1 if it is not resident, -2 if another writer kept the set.
    """
    if find(home, key) >= 0:
        return home, 1
    line = second_line(home, key, lines, sets)
    if load_relaxed(strays_at(home, lines, state)) != 0:
        slot = read(line, key, 0, 0, state + 8 * WRAPS, 0)
        if slot != -1:
            return line, 1 if slot >= 0 else -2
    if not admits:
        return home, -1
    return (home if empty_slot(home) >= 0 else line), 0


@njit(inline="always")
def _set_beyond(line: int, key: int, lines: int, sets: int) -> int:
    """Return the other set of a key that stands in one."""
    home = line_of(key, lines, sets)
    return second_line(home, key, lines, sets) if home == line else home


@njit()
def _make_room(line: int, lines: int, sets: int, state: int, vectors: int, row_bytes: int) -> bool:
    """Move a key out of a set if one may stand elsewhere, home before away; return whether one may. The caller owns nothing."""
    chosen, target, goes_home = -1, line, False
    for slot in range(WAYS):
        key = load_relaxed(line + 16 + 8 * slot)
        beyond = _set_beyond(line, key, lines, sets)
        is_home = line_of(key, lines, sets) == beyond
        if (chosen < 0 or (is_home and not goes_home)) and load_relaxed_u8(line + 2 + slot) != 0 and empty_slot(beyond) >= 0:
            chosen, target, goes_home = slot, beyond, is_home
    if chosen < 0:
        return False
    key = load_relaxed(line + 16 + 8 * chosen)
    version = try_acquire(line)
    if version < 0:
        return True
    there = try_acquire(target)
    if there < 0:
        store_release_u16(line, version)
        return True
    slot, empty = find(line, key), empty_slot(target)
    if slot < 0 or empty < 0 or _set_beyond(line, key, lines, sets) != target:  # others changed the sets meanwhile
        store_release_u16(target, there)
        store_release_u16(line, version)
        return True
    store_relaxed(target + 16 + 8 * empty, key)
    store_relaxed_u8(target + 2 + empty, load_relaxed_u8(line + 2 + slot))
    source, row = rows_of(line, lines, vectors, row_bytes), rows_of(target, lines, vectors, row_bytes)
    copy_bytes(row + empty * row_bytes, source + slot * row_bytes, row_bytes)
    store_relaxed_u8(line + 2 + slot, 0)
    if line_of(key, lines, sets) == line:
        fetch_add(strays_at(line, lines, state), 1)
    else:
        fetch_add(strays_at(target, lines, state), -1)
    release_changed(target, there, state + 8 * WRAPS)
    release_changed(line, version, state + 8 * WRAPS)
    return True


@njit()
def make_room_for(home: int, key: int, lines: int, sets: int, state: int, vectors: int, row_bytes: int) -> bool:
    """Make room in one of a key's sets, both of which are full, or in those where their keys may go; False if there is none."""
    second = second_line(home, key, lines, sets)
    if _make_room(home, lines, sets, state, vectors, row_bytes) or _make_room(second, lines, sets, state, vectors, row_bytes):
        return True
    for nth in range(2 * WAYS):
        line = home if nth < WAYS else second
        beyond = _set_beyond(line, load_relaxed(line + 16 + 8 * (nth % WAYS)), lines, sets)
        if _make_room(beyond, lines, sets, state, vectors, row_bytes):
            return True
    return False


@njit(inline="always")
def empty_slot(line: int) -> int:
    """Return an empty slot, or -1."""
    empty = ~(nonzero_bytes_16(line) >> 2) & ((1 << WAYS) - 1)
    return lowest_bit(empty) if empty != 0 else -1


@njit(inline="always")
def epoch_at(clock: int, sets: int) -> int:
    """Return the epoch as an age, 1..255; an epoch lasts for as many queried keys as the table has slots."""
    return (clock // (WAYS * sets)) % _EPOCHS + 1


@njit(inline="always")
def probation_at(epoch: int) -> int:
    """Return the age of a key that becomes resident in an epoch."""
    return (epoch - 1 - PROBATION + _EPOCHS) % _EPOCHS + 1


@njit(inline="always")
def touch(line: int, slot: int, epoch: int) -> None:
    """Count a hit."""
    age = load_relaxed_u8(line + 2 + slot)
    if age != epoch and age != 0:
        compare_and_swap_relaxed_u8(line + 2 + slot, age, epoch)


@njit()
def victim(line: int, epoch: int) -> int:
    """Return an empty slot or, if there is none, the first one of the smallest score."""
    oldest, worst = -1, 0
    for slot in range(WAYS):
        age = load_relaxed_u8(line + 2 + slot)
        if age == 0:
            return slot
        behind = _behind(age, epoch)
        if behind > oldest:
            oldest, worst = behind, slot
    return worst


@njit(inline="always")
def is_idle(line: int, slot: int, epoch: int) -> bool:
    """Return whether a slot is empty, or its key was not hit in the last `PROBATION` epochs."""
    age = load_relaxed_u8(line + 2 + slot)
    return age == 0 or _behind(age, epoch) >= PROBATION


@njit(inline="always")
def _behind(age: int, epoch: int) -> int:
    """Return the number of epochs since an age."""
    behind = epoch - age if epoch >= age else epoch - age + _EPOCHS
    return 0 if behind >= _EPOCHS - _AHEAD else behind


@njit()
def acquire(line: int) -> int:
    """Own a set; return its previous, even version. Waits for another writer, which copies one vector meanwhile."""
    attempts = 0
    while True:
        version = load_relaxed_u16(line)
        if (version & 1) == 0 and compare_and_swap_acquire_u16(line, version, version + 1):
            fence_release()  # a reader that sees any of the writes below also sees the odd version
            return version
        attempts += 1
        if attempts % 64 == 0:
            yield_processor()  # the owner may have lost its processor


@njit()
def try_acquire(line: int) -> int:
    """Own a set if no other writer does; return its previous version, or -1."""
    version = load_relaxed_u16(line)
    if (version & 1) == 0 and compare_and_swap_acquire_u16(line, version, version + 1):
        fence_release()
        return version
    return -1


@njit(inline="always")
def release_changed(line: int, version: int, wraps_at: int) -> None:
    """Release a set whose keys or vectors changed. (An unchanged set gets its old version back.)"""
    following = (version + 2) & 0xFFFF
    if following == 0:
        fetch_add(wraps_at, 1)
    store_release_u16(line, following)
