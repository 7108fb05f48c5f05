"""Answers requests of frontends from the NumPy cache, without the interpreter."""

from typing import Any, Final, cast

import numba
import numpy as np
from numba import boolean, float32, int64, njit, void

from hps.cache.base import BatchDriver, EmbeddingCache
from hps.cache.cpu.cache import NumpyCache
from hps.cache.cpu.kernels import query_keys
from hps.ground.kernels.numba_atomics import fetch_add, load_acquire, pointer_to
from hps.ground.kernels.numba_kernels import compile_kernels, kernel
from hps.regions.exchange import (
    BASE,
    BATCHES,
    D_FIRST,
    D_IN_FLIGHT,
    D_RESIDENT,
    H_DEPLOYMENT_ID,
    H_FLAGS,
    H_KEYS,
    H_SEGMENTS,
    HEADER_WORDS,
    MOST_DEPLOYMENTS,
    STATE_SCRATCH,
    STOP,
    T_DIM,
    T_DRIVER,
    T_HITS,
    T_KEYS,
    available,
    finish,
    hand_over,
    idle,
    now_ns,
    read_descriptor,
    record_answer,
    refuse,
    take,
)
from hps.regions.layout import ANSWERED, MOST_SEGMENTS, SEGMENT_WORDS
from hps.regions.loop_state import DriverWords, LoopState
from hps.types import IndexArray

T_LINES, T_SETS, T_VECTORS, T_ROWS, T_STATE, T_STATE_WORDS, T_WIDTH, T_DTYPE = range(T_DRIVER, T_DRIVER + 8)
MOST_KEYS: Final = 1 << 16
"""Maximum number of keys of a request that the loop answers itself: larger ones would delay all others."""

_WORDS, _ROWS = int64[::1], int64[:, ::1]

_carray = cast(Any, numba).carray  # its types want pointers of ctypes


@njit()
def _answer(base: int, tables: IndexArray, first: int, count: int, segments: IndexArray, missing: IndexArray) -> bool:
    """Copy the vectors of a request to its slot; return False if any key is not resident."""
    for s in range(count):
        table, n, keys_at, out_at, found_at = segments[s]
        if n == 0:
            continue
        words = tables[first + table]
        dim = words[T_DIM]
        lines = _carray(pointer_to(words[T_LINES]), (words[T_SETS], 16), int64)
        vectors = _carray(pointer_to(words[T_VECTORS]), (words[T_ROWS], words[T_WIDTH]), float32)
        state = _carray(pointer_to(words[T_STATE]), (words[T_STATE_WORDS],), int64)
        keys = _carray(pointer_to(base + keys_at), (n,), int64)
        out = _carray(pointer_to(base + out_at), (n, dim), float32)
        found = _carray(pointer_to(base + found_at), (n if found_at != 0 else 0,), boolean)
        if query_keys(lines, vectors, state, keys, out, found, missing, dim, words[T_DTYPE]) != 0:
            return False
    return True


@kernel(void, _ROWS, _ROWS, _ROWS, _WORDS, _ROWS)
def run(regions: IndexArray, deployments: IndexArray, tables: IndexArray, state: IndexArray, queue: IndexArray) -> None:
    """Answer requests, one after the other, until the loop is stopped."""
    header, segments = np.zeros(HEADER_WORDS, np.int64), np.zeros((MOST_SEGMENTS, SEGMENT_WORDS), np.int64)
    missing = np.empty(MOST_KEYS, np.int64)
    scratch, stop = state.ctypes.data + 8 * STATE_SCRATCH, state.ctypes.data + 8 * STOP
    idle_since = now_ns(scratch)
    while load_acquire(stop) == 0:
        busy = False
        for place in range(regions.shape[0]):
            count = available(regions, place, scratch)
            if count != 0 and not busy:
                busy = True
                state[BATCHES] += 1  # before any of them is answered
            for _ in range(min(count, 16)):  # then the next frontend
                slot = take(regions, place)
                began = now_ns(scratch)
                status = read_descriptor(regions, place, slot, deployments, tables, header, segments)
                if status != 0:
                    refuse(regions, place, slot, status, scratch)
                    continue
                row = header[H_DEPLOYMENT_ID] & (MOST_DEPLOYMENTS - 1)
                if deployments[row, D_RESIDENT] <= began or header[H_FLAGS] != 0 or header[H_KEYS] > MOST_KEYS:
                    hand_over(state, queue, place, slot, header[H_FLAGS])
                    continue
                first, in_flight = deployments[row, D_FIRST], deployments[row].ctypes.data + 8 * D_IN_FLIGHT
                fetch_add(in_flight, 1)
                # The deployment may have ended since `read_descriptor` compared its number. Ending it writes 0 there and then
                # waits for D_IN_FLIGHT 0; here the count is raised (a full fence) and then the number is read. So one side
                # sees the other, and the cache is not freed while a request reads it.
                answered = load_acquire(deployments[row].ctypes.data) == header[H_DEPLOYMENT_ID]
                if answered:
                    answered = _answer(regions[place, BASE], tables, first, header[H_SEGMENTS], segments, missing)
                ended = now_ns(scratch)
                if answered:
                    for s in range(header[H_SEGMENTS]):
                        tables[first + segments[s, 0], T_KEYS] += segments[s, 1]
                        tables[first + segments[s, 0], T_HITS] += segments[s, 1]
                    record_answer(deployments, state, row, ended - began)
                fetch_add(in_flight, -1)  # from now on the row may be another deployment's
                if answered:
                    finish(regions, place, slot, ANSWERED, began, ended, scratch)
                else:
                    hand_over(state, queue, place, slot, 0)
        idle_since = now_ns(scratch) if busy else idle(regions, state, idle_since)


class NumpyBatches(BatchDriver):
    """Answers from NumPy caches; see `BatchDriver`."""

    def __init__(self, loop: LoopState) -> None:
        self._loop = loop

    def resident(self, cache: EmbeddingCache) -> DriverWords | None:
        if type(cache) is not NumpyCache:  # subclasses may answer differently
            return None
        rows = []
        for table in cache.open_tables():
            lines, vectors, state = table.lines, table.vectors, table.state
            sizes = vectors.ctypes.data, vectors.shape[0], state.ctypes.data, state.size, vectors.shape[1], table.dtype
            rows.append([lines.ctypes.data, lines.shape[0], *sizes])
        return DriverWords(rows)

    def prepare(self) -> None:
        compile_kernels(run)

    def run(self) -> None:
        loop = self._loop
        run(loop.regions, loop.deployments, loop.tables, loop.state, loop.handed_over)
