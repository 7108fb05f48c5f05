"""The loop that answers batches of requests on CUDA devices, without the interpreter. Imports no CuPy.

The GPU reads keys from the frontends' regions and writes vectors to them. A *lane* is a stream with the memory of one batch;
while one lane runs, another is filled. Keys that are not resident are listed; if tables in host memory are attached, a second
kernel answers and admits them (`cuda/answer.cu`). A request with unanswered keys is handed over to the engine's threads.

    free -> open -> querying -> answering -> counted -> free
                      |  nothing missing    | nothing left
                      +---------------------+--> free
"""

from typing import Final

import numpy as np
from numba import int64, njit, void

from hps.cache.cuda import kernels, structs
from hps.ground.kernels.numba_atomics import (
    call_1,
    call_4,
    call_launch,
    fetch_add,
    load_acquire,
    load_relaxed_u32,
    pause_processor,
    store_relaxed,
    store_relaxed_u32,
)
from hps.ground.kernels.numba_kernels import kernel
from hps.regions.exchange import (
    BASE,
    BATCHES,
    D_DRIVER,
    D_FIRST,
    D_ID,
    D_IN_FLIGHT,
    D_RESIDENT,
    H_DEPLOYMENT_ID,
    H_FLAGS,
    H_KEYS,
    H_SEGMENTS,
    HEADER_WORDS,
    MOST_DEPLOYMENTS,
    SHIFT,
    STATE_SCRATCH,
    STOP,
    T_ABSENT,
    T_DRIVER,
    T_HITS,
    T_KEYS,
    T_LINKED,
    available,
    finish,
    hand_over,
    idle,
    now_ns,
    peek,
    read_descriptor,
    record_answer,
    refuse,
    take,
)
from hps.regions.layout import ANSWERED, MOST_SEGMENTS, SEGMENT_WORDS
from hps.types import IndexArray

LANES: Final = 3
"""Of each device."""
MOST_KEYS: Final = 1 << 16
"""Of a batch; larger requests are handed over, since one lookup is as fast."""
BATCH_SEGMENTS: Final = 512
BATCH_REQUESTS: Final = 512
STAGED_BYTES: Final = 32 << 20
PATIENCE, FEW_MISSES = 64, 1 << 12
# After a batch with misses, the next ones launch both kernels at once: waiting for the first to report a miss before launching
# the second costs a round trip of the device. Batches of resident keys alone stop paying for the second kernel after this many.
_EXPECTED: Final = 64
_STUCK_NS: Final = 1_000_000_000
_NOT_READY: Final = 600  # CUDA_ERROR_NOT_READY

FREE, OPEN, QUERYING, ANSWERING, COUNTED, DEAD = range(6)

# Columns of `lanes`.
(
    L_PHASE,
    L_DEVICE,
    L_CONTEXT,
    L_STREAM,
    L_SEQUENCE,
    L_DONE,
    L_DONE_ON_DEVICE,
    L_FLAGS,
    L_COUNTS,
    L_REPORTS,
    L_MISSING_COUNTS,
    L_LEFT_COUNTS,
    L_QUERY,
    L_QUERY_PARAMETERS,
    L_ANSWER,
    L_ANSWER_PARAMETERS,
    L_STAGED,
    L_REQUESTS,
    L_SEGMENTS,
    L_KEYS,
    L_STARTED,
    L_LINKED,
    L_POLLED,
) = range(23)
LANE_COLUMNS: Final = 32

# After the common columns of a deployment, and of a table.
D_GPU, D_QUERY, D_UNIT, D_ANSWER, D_THREADS, D_BLOCKS, D_WARPS, D_LINKED = range(D_DRIVER, D_DRIVER + 8)
T_BUCKETS, T_ROWS, T_PAIRS, T_UNITS, T_STRUCT = range(T_DRIVER, T_DRIVER + 5)
T_LAYOUT, T_LINK, T_DEFAULT, T_AUTHORITATIVE, T_BINS, T_STAGED_WORDS = range(T_DRIVER + 10, T_DRIVER + 16)

# Words of `functions`: addresses of the driver's functions, and the batches for which misses are expected. Compiled code calls
# the driver by address, since CuPy needs the interpreter.
F_LAUNCH, F_WRITE, F_COPY, F_SET, F_QUERY, F_CURRENT, F_EXPECTED, F_FAILED = range(8)

# Offsets of the kernels' arguments. Most stores are of 8 bytes, which fill a pair of adjacent fields of 4.
_QUERY_SEGMENT = structs.SEGMENT.size
_Q_KEYS, _Q_OUT, _Q_FOUND, _Q_BUCKETS, _Q_ROWS = map(structs.SEGMENT.at, ("keys", "out", "found", "buckets", "rows"))
_Q_N_PAIRS = structs.SEGMENT.at("n", "pairs")
_Q_UNITS_BLOCK = structs.SEGMENT.at("units", "first_block")
_Q_MISSING_INDEX = structs.SEGMENT.at("missing", "index")
QUERY_TAIL_AT = kernels.SEGMENTS_AT_ONCE * structs.SEGMENT.size
_Q_COUNT_PER_WARP = QUERY_TAIL_AT + structs.QUERY_TAIL.at("segment_count", "keys_per_warp", "unused")

_ANSWER_SEGMENT = structs.ANSWER_SEGMENT.size
_TABLE_WORDS = structs.TABLE.size // 8
_A_LAYOUT, _A_LINK, _A_OUT, _A_FOUND, _A_STAGED, _A_BINS = map(
    structs.ANSWER_SEGMENT.at, ("layout", "link", "out", "found", "staged", "bins_per_row")
)
_A_MISSING_INDEX = structs.ANSWER_SEGMENT.at("missing", "index")
_A_UNITS_STAGED = structs.ANSWER_SEGMENT.at("units", "staged_rows")
_A_DEFAULT_AUTHORITATIVE = structs.ANSWER_SEGMENT.at("default_value", "authoritative")
ANSWER_TAIL_AT = kernels.SEGMENTS_AT_ONCE * structs.ANSWER_SEGMENT.size
_A_BITS_COUNT = ANSWER_TAIL_AT + structs.ANSWER_TAIL.at("bin_bits", "segment_count")
_A_PATIENCE_FEW = ANSWER_TAIL_AT + structs.ANSWER_TAIL.at("patience", "few")
_A_WARPS = ANSWER_TAIL_AT + structs.ANSWER_TAIL.at("fetch_warps", size_bytes=4)
AT_ONCE = kernels.SEGMENTS_AT_ONCE
PER_WARP = 8
_PER_BLOCK = kernels.QUERY_THREADS // 32 * PER_WARP
_QUERY_THREADS = kernels.QUERY_THREADS
_MOST_BINS = kernels.MOST_BINS

# Columns of `requests` and of `segments`.
R_PLACE, R_SLOT, R_ROW, R_FIRST, R_COUNT = range(5)
REQUEST_COLUMNS: Final = 8
S_TABLE, S_N, S_KEYS, S_OUT, S_FOUND, S_ROW, S_MISSING = range(7)
SEGMENT_COLUMNS: Final = 8

_WORDS, _ROWS, _CUBE = int64[::1], int64[:, ::1], int64[:, :, ::1]


@njit()
def _launch_queries(
    lane: IndexArray, segments: IndexArray, deployments: IndexArray, tables: IndexArray, functions: IndexArray
) -> int:
    """Launch the queries of a batch: one kernel for every 32 segments of a deployment."""
    # All launches of a batch pack the same buffer: cuLaunchKernel copies the arguments before it returns.
    count, at, error = lane[L_SEGMENTS], 0, 0
    buffer = lane[L_QUERY]
    while at < count:
        row, packed, blocks = segments[at, S_ROW], 0, 0
        while at < count and packed < AT_ONCE and segments[at, S_ROW] == row:
            n = segments[at, S_N]
            if n > 0:
                words = tables[segments[at, S_TABLE]]
                to = buffer + _QUERY_SEGMENT * packed
                store_relaxed(to + _Q_KEYS, segments[at, S_KEYS])
                store_relaxed(to + _Q_OUT, segments[at, S_OUT])
                store_relaxed(to + _Q_FOUND, segments[at, S_FOUND])
                store_relaxed(to + _Q_BUCKETS, words[T_BUCKETS])
                store_relaxed(to + _Q_ROWS, words[T_ROWS])
                store_relaxed(to + _Q_N_PAIRS, n | words[T_PAIRS] << 32)
                store_relaxed(to + _Q_UNITS_BLOCK, words[T_UNITS] | blocks << 32)
                store_relaxed(to + _Q_MISSING_INDEX, segments[at, S_MISSING] | at << 32)
                blocks += (n + _PER_BLOCK - 1) // _PER_BLOCK
                packed += 1
            at += 1
        if packed > 0:
            store_relaxed(buffer + _Q_COUNT_PER_WARP, packed | PER_WARP << 32)
            error |= call_launch(
                functions[F_LAUNCH], deployments[row, D_QUERY], blocks, _QUERY_THREADS, lane[L_STREAM], lane[L_QUERY_PARAMETERS]
            )
    return error


@njit()
def _launch_answers(
    lane: IndexArray, segments: IndexArray, deployments: IndexArray, tables: IndexArray, functions: IndexArray
) -> int:
    """Launch the kernels that answer the misses of a batch from tables in host memory."""
    count, at, error = lane[L_SEGMENTS], 0, 0
    buffer, staged, room = lane[L_ANSWER], lane[L_STAGED], STAGED_BYTES
    while at < count:
        row, packed = segments[at, S_ROW], 0
        while at < count and packed < AT_ONCE and segments[at, S_ROW] == row:
            n = segments[at, S_N]
            if n > 0:
                words = tables[segments[at, S_TABLE]]
                to = buffer + _ANSWER_SEGMENT * packed
                for word in range(_TABLE_WORDS):
                    store_relaxed(to + 8 * word, words[T_STRUCT + word])
                rows = min(n, room // (4 * words[T_STAGED_WORDS])) if words[T_LINK] != 0 else 0
                store_relaxed(to + _A_LAYOUT, words[T_LAYOUT])
                store_relaxed(to + _A_LINK, words[T_LINK])
                store_relaxed(to + _A_OUT, segments[at, S_OUT])
                store_relaxed(to + _A_FOUND, segments[at, S_FOUND])
                store_relaxed(to + _A_STAGED, staged if rows > 0 else 0)
                store_relaxed(to + _A_MISSING_INDEX, segments[at, S_MISSING] | at << 32)
                store_relaxed(to + _A_UNITS_STAGED, words[T_UNITS] | rows << 32)
                store_relaxed(to + _A_DEFAULT_AUTHORITATIVE, words[T_DEFAULT] | words[T_AUTHORITATIVE] << 32)
                store_relaxed(to + _A_BINS, words[T_BINS])
                size = (4 * rows * words[T_STAGED_WORDS] + 255) // 256 * 256
                staged += size
                room = max(0, room - size)
                packed += 1
            at += 1
        if packed > 0:
            bits, bins = 0, _MOST_BINS // packed
            while bins > 1:
                bins >>= 1
                bits += 1
            store_relaxed(buffer + _A_BITS_COUNT, bits | packed << 32)
            store_relaxed(buffer + _A_PATIENCE_FEW, PATIENCE | FEW_MISSES << 32)
            store_relaxed_u32(buffer + _A_WARPS, deployments[row, D_WARPS])
            error |= call_launch(
                functions[F_LAUNCH],
                deployments[row, D_ANSWER],
                deployments[row, D_BLOCKS],
                deployments[row, D_THREADS],
                lane[L_STREAM],
                lane[L_ANSWER_PARAMETERS],
            )
    return error


@njit()
def _signal_when_done(lane: IndexArray, functions: IndexArray) -> int:
    """Let the stream write the lane's next number once all that was launched has ended."""
    # The stream writes to pinned memory, which the loop polls without a call of the driver. With flags 0 the write follows a
    # fence after the kernels' writes (cuStreamWriteValue64), so flags, counts and vectors are final
    # when the loop has loaded the number (acquire).
    lane[L_SEQUENCE] += 1
    return call_4(functions[F_WRITE], lane[L_STREAM], lane[L_DONE_ON_DEVICE], lane[L_SEQUENCE], 0)


@njit()
def _copy_counts(lane: IndexArray, counts: int, functions: IndexArray) -> int:
    """Copy the counts of missing keys to the host, and clear them."""
    size = lane[L_SEGMENTS]
    error = call_4(functions[F_COPY], lane[L_COUNTS], counts, 4 * size, lane[L_STREAM])
    error |= call_4(functions[F_SET], counts, 0, size, lane[L_STREAM])
    return error | _signal_when_done(lane, functions)


@njit()
def _launch(
    lane: IndexArray,
    segments: IndexArray,
    deployments: IndexArray,
    tables: IndexArray,
    functions: IndexArray,
    devices: int,
    scratch: int,
) -> int:
    """Launch an open batch."""
    error = 0
    if devices > 1:
        error = call_1(functions[F_CURRENT], lane[L_CONTEXT])
    for at in range(lane[L_SEGMENTS]):
        store_relaxed(lane[L_REPORTS] + 8 * at, 0)
    store_relaxed(lane[L_FLAGS], 0)
    lane[L_STARTED] = lane[L_POLLED] = now_ns(scratch)
    error |= _launch_queries(lane, segments, deployments, tables, functions)
    lane[L_PHASE] = QUERYING
    if lane[L_LINKED] != 0 and functions[F_EXPECTED] > 0:
        functions[F_EXPECTED] -= 1
        error |= _launch_answers(lane, segments, deployments, tables, functions)
        lane[L_PHASE] = ANSWERING
    return error | _signal_when_done(lane, functions)


@njit()
def _finish(
    lane: IndexArray,
    requests: IndexArray,
    segments: IndexArray,
    regions: IndexArray,
    deployments: IndexArray,
    tables: IndexArray,
    state: IndexArray,
    queue: IndexArray,
    left: int,
    scratch: int,
) -> None:
    """Complete the requests of a batch, and hand over those with unanswered keys.

    Args:
        left: the requests to hand over: -1: all; 0: none; 1: those with counts.
    """
    ended = now_ns(scratch)
    state[BATCHES] += 1
    missing = load_relaxed_u32(lane[L_FLAGS]) != 0
    for r in range(lane[L_REQUESTS]):
        place, slot, row = requests[r, R_PLACE], requests[r, R_SLOT], requests[r, R_ROW]
        first, stop = requests[r, R_FIRST], requests[r, R_FIRST] + requests[r, R_COUNT]
        answered = left >= 0
        if left == 1:
            for s in range(first, stop):
                if segments[s, S_N] > 0 and load_relaxed_u32(lane[L_COUNTS] + 4 * s) != 0:
                    answered = False
        if not answered:
            fetch_add(deployments[row].ctypes.data + 8 * D_IN_FLIGHT, -1)
            hand_over(state, queue, place, slot, 0)
            continue
        for s in range(first, stop):
            table, n = segments[s, S_TABLE], segments[s, S_N]
            linked = absent = 0
            if missing:
                linked = load_relaxed_u32(lane[L_REPORTS] + 8 * s)
                absent = load_relaxed_u32(lane[L_REPORTS] + 8 * s + 4)
            tables[table, T_KEYS] += n
            tables[table, T_HITS] += n - linked - absent
            tables[table, T_LINKED] += linked
            tables[table, T_ABSENT] += absent
        # Count before D_IN_FLIGHT falls: at 0 the counters of an ended deployment are read for the last time.
        record_answer(deployments, state, row, ended - lane[L_STARTED])
        fetch_add(deployments[row].ctypes.data + 8 * D_IN_FLIGHT, -1)
        finish(regions, place, slot, ANSWERED, lane[L_STARTED], ended, scratch)
    lane[L_REQUESTS] = lane[L_SEGMENTS] = lane[L_KEYS] = lane[L_LINKED] = 0
    lane[L_PHASE] = FREE


@njit()
def _advance_lane(
    lane: IndexArray,
    requests: IndexArray,
    segments: IndexArray,
    regions: IndexArray,
    deployments: IndexArray,
    tables: IndexArray,
    state: IndexArray,
    queue: IndexArray,
    functions: IndexArray,
    devices: int,
    scratch: int,
) -> int:
    """Start the next step of a lane whose launched work has ended."""
    missing, left = load_relaxed_u32(lane[L_FLAGS]) != 0, load_relaxed_u32(lane[L_FLAGS] + 4) != 0
    phase, error = lane[L_PHASE], 0
    if devices > 1:
        error = call_1(functions[F_CURRENT], lane[L_CONTEXT])
    if missing and lane[L_LINKED] != 0:
        functions[F_EXPECTED] = _EXPECTED
    if phase == QUERYING and missing and lane[L_LINKED] != 0:
        lane[L_PHASE] = ANSWERING
        error |= _launch_answers(lane, segments, deployments, tables, functions)
        return error | _signal_when_done(lane, functions)
    if phase == QUERYING and missing:
        lane[L_PHASE] = COUNTED
        return error | _copy_counts(lane, lane[L_MISSING_COUNTS], functions)
    if phase == ANSWERING and missing and left:
        lane[L_PHASE] = COUNTED
        return error | _copy_counts(lane, lane[L_LEFT_COUNTS], functions)
    if error == 0:
        _finish(lane, requests, segments, regions, deployments, tables, state, queue, 1 if phase == COUNTED else 0, scratch)
    return error


@njit()
def _lane_for(lanes: IndexArray, device: int, count: int, keys: int) -> int:
    """Return the lane that takes a request: the open one of its device if there is room, else a free one; -1 for none."""
    free = -1
    for nth in range(lanes.shape[0]):
        lane = lanes[nth]
        if lane[L_DEVICE] != device:
            continue
        if lane[L_PHASE] == OPEN:
            room = lane[L_SEGMENTS] + count <= BATCH_SEGMENTS and lane[L_KEYS] + keys <= MOST_KEYS
            if room and lane[L_REQUESTS] < BATCH_REQUESTS:
                return nth
        elif lane[L_PHASE] == FREE and free < 0:
            free = nth
    return free


@njit()
def _add(
    lane: IndexArray,
    requests: IndexArray,
    segments: IndexArray,
    place: int,
    slot: int,
    row: int,
    shift: int,
    header: IndexArray,
    read: IndexArray,
    deployments: IndexArray,
) -> None:
    """Add a request to an open batch; `shift` is a device address minus the offset in a region."""
    r, s, first = lane[L_REQUESTS], lane[L_SEGMENTS], deployments[row, D_FIRST]
    requests[r, R_PLACE], requests[r, R_SLOT], requests[r, R_ROW] = place, slot, row
    requests[r, R_FIRST], requests[r, R_COUNT] = s, header[H_SEGMENTS]
    for nth in range(header[H_SEGMENTS]):
        segments[s, S_TABLE], segments[s, S_N] = first + read[nth, 0], read[nth, 1]
        segments[s, S_KEYS], segments[s, S_OUT] = shift + read[nth, 2], shift + read[nth, 3]
        segments[s, S_FOUND] = shift + read[nth, 4] if read[nth, 4] != 0 else 0
        segments[s, S_ROW], segments[s, S_MISSING] = row, lane[L_KEYS]
        lane[L_KEYS] += read[nth, 1]
        s += 1
    lane[L_REQUESTS], lane[L_SEGMENTS] = r + 1, s
    lane[L_LINKED] |= deployments[row, D_LINKED]
    lane[L_PHASE] = OPEN


@njit()
def _is_resident(deployments: IndexArray, row: int, header: IndexArray, read: IndexArray, scratch: int) -> bool:
    """Return whether a batch can take a request."""
    if deployments[row, D_RESIDENT] <= now_ns(scratch) or header[H_FLAGS] != 0:
        return False
    if header[H_KEYS] > MOST_KEYS or header[H_SEGMENTS] > BATCH_SEGMENTS:
        return False
    mask = 4 * deployments[row, D_UNIT] - 1
    for nth in range(header[H_SEGMENTS]):  # noqa: SIM110 - numba compiles no generator here
        if read[nth, 3] & mask != 0:
            return False
    return True


@kernel(void, _ROWS, _ROWS, _ROWS, _WORDS, _ROWS, _ROWS, _CUBE, _CUBE, _WORDS, int64)
def run(
    regions: IndexArray,
    deployments: IndexArray,
    tables: IndexArray,
    state: IndexArray,
    queue: IndexArray,
    lanes: IndexArray,
    requests: IndexArray,
    segments: IndexArray,
    functions: IndexArray,
    devices: int,
) -> None:
    """Answer requests, batch after batch, until the loop is stopped."""
    header, read = np.zeros(HEADER_WORDS, np.int64), np.zeros((MOST_SEGMENTS, SEGMENT_WORDS), np.int64)
    scratch, stop = state.ctypes.data + 8 * STATE_SCRATCH, state.ctypes.data + 8 * STOP
    idle_since, first, turns = now_ns(scratch), 0, 0
    while True:
        turns += 1
        busy = running = False
        for nth in range(lanes.shape[0]):
            lane, error = lanes[nth], 0
            if lane[L_PHASE] < QUERYING or lane[L_PHASE] == DEAD:
                continue
            running = True
            if load_acquire(lane[L_DONE]) == lane[L_SEQUENCE]:
                busy = True
                error = _advance_lane(
                    lane, requests[nth], segments[nth], regions, deployments, tables, state, queue, functions, devices, scratch
                )
            elif turns & 4095 == 0 and now_ns(scratch) - lane[L_POLLED] > _STUCK_NS:
                # A failed kernel leaves the lane's number unwritten, so a late stream is queried for its error.
                lane[L_POLLED] = now_ns(scratch)
                error = call_1(functions[F_QUERY], lane[L_STREAM])
                if error == _NOT_READY:
                    error = 0
            if error != 0:
                functions[F_FAILED] = error
                _finish(lane, requests[nth], segments[nth], regions, deployments, tables, state, queue, -1, scratch)
                lane[L_PHASE] = DEAD
        if load_acquire(stop) != 0 and not running:
            return
        count_of_regions = regions.shape[0]
        for turn in range(count_of_regions):
            place = (first + turn) % count_of_regions
            count = available(regions, place, scratch)
            if count != 0:
                busy = True
            for _ in range(count):
                slot = peek(regions, place)
                status = read_descriptor(regions, place, slot, deployments, tables, header, read)
                if status != 0:
                    refuse(regions, place, take(regions, place), status, scratch)
                    continue
                row = header[H_DEPLOYMENT_ID] & (MOST_DEPLOYMENTS - 1)
                if functions[F_FAILED] != 0 or not _is_resident(deployments, row, header, read, scratch):
                    take(regions, place)
                    hand_over(state, queue, place, slot, header[H_FLAGS])
                    continue
                nth = _lane_for(lanes, deployments[row, D_GPU], header[H_SEGMENTS], header[H_KEYS])
                if nth < 0:
                    break
                fetch_add(deployments[row].ctypes.data + 8 * D_IN_FLIGHT, 1)
                # The deployment may have ended since `read_descriptor` compared its number. Ending it writes 0 there and then
                # waits for D_IN_FLIGHT 0; here the count is raised (a full fence) and then the number is read. So one side
                # sees the other, and the cache is not freed while a batch reads it.
                take(regions, place)
                if load_acquire(deployments[row].ctypes.data + 8 * D_ID) != header[H_DEPLOYMENT_ID]:
                    fetch_add(deployments[row].ctypes.data + 8 * D_IN_FLIGHT, -1)
                    hand_over(state, queue, place, slot, 0)
                    continue
                shift = regions[place, BASE] + regions[place, SHIFT]
                _add(lanes[nth], requests[nth], segments[nth], place, slot, row, shift, header, read, deployments)
        first = (first + 1) % max(1, count_of_regions)  # no frontend is served before the others every time
        for nth in range(lanes.shape[0]):
            if lanes[nth, L_PHASE] == OPEN:
                error = _launch(lanes[nth], segments[nth], deployments, tables, functions, devices, scratch)
                running = True
                if error != 0:
                    functions[F_FAILED] = error
                    _finish(lanes[nth], requests[nth], segments[nth], regions, deployments, tables, state, queue, -1, scratch)
                    lanes[nth, L_PHASE] = DEAD
        if busy:
            idle_since = now_ns(scratch)
        elif running:
            pause_processor()
        else:
            idle_since = idle(regions, state, idle_since)
