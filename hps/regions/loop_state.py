"""State of one loop of the engine: regions of frontends, deployments that they may name, and requests handed to Python."""

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from hps.errors import HPSError
from hps.ground.rows import to_bfloat16, to_float16
from hps.regions.exchange import (
    ALWAYS,
    BASE,
    BATCHES,
    BOUND_COUNT,
    BOUNDS,
    D_DRIVER,
    D_FIRST,
    D_ID,
    D_IN_FLIGHT,
    D_NS,
    D_RESIDENT,
    D_TABLES,
    D_TIMES,
    DEPLOYMENT_COLUMNS,
    EPOCH,
    EVENT,
    H_SEGMENTS,
    HANDED_OVER_COUNT,
    HANDED_OVER_EVENT,
    HEAD,
    HEADER_WORDS,
    IN_FLIGHT,
    LENGTH,
    LOOP_EVENT,
    MALFORMED_COUNT,
    MOST_DEPLOYMENTS,
    OLD_EPOCH,
    REGION_COLUMNS,
    SCORED_COUNT,
    SCORED_EVENT,
    SHIFT,
    SPIN_NS,
    STATE_WORDS,
    STOP,
    T_ABSENT,
    T_DIM,
    T_DRIVER,
    T_KEYS,
    T_MAX_KEYS,
    TABLE_COLUMNS,
    TAIL,
    WAKES,
    arm,
    arm_scored,
    complete_handed_over,
    completions,
    post,
    read_handed_over,
    store_word,
)
from hps.regions.layout import (
    COMPLETED,
    FRONTEND_EPOCH,
    MOST_SEGMENTS,
    RING,
    SEGMENT_WORDS,
    STARTED_EPOCH,
    SUBMITTED,
    TAKEN,
    Memory,
)
from hps.statistics.times import LOOKUP_BOUNDS_NS
from hps.types import IndexArray, TableSpec

FRONTEND_KERNELS: Final = (post, completions, arm, store_word, to_float16, to_bfloat16)
ENGINE_KERNELS: Final = (read_handed_over, complete_handed_over, arm_scored, store_word)
_MOST_TABLES = 1 << 14
_READINGS = 20  # of a region that is checked while its loop runs


class Tally(NamedTuple):
    """Counts of one deployment since the last tally."""

    tables: list[list[int]]  # by table: numbers of keys, resident, linked and absent
    times: list[int]  # number of requests, by the buckets of `LookupTimes`
    ns: int  # total duration


class DriverWords(NamedTuple):
    """Words of a deployment that only the loop of one driver understands, after the common columns of `exchange`."""

    tables: Sequence[Sequence[int]]  # by table
    deployment: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class HandedOverRequest:
    """A request that a loop handed over to Python. *Immutable.*

    Attributes:
        place, slot: its region and slot.
        status: 0, or why its descriptor is refused.
        header: (HEADER_WORDS,) int64, a copy.
        segments: (n, SEGMENT_WORDS) int64, a copy.
    """

    place: int
    slot: int
    status: int
    header: IndexArray
    segments: IndexArray


class _Segments(threading.local):
    """Memory of each thread for the segments of a request. New memory of 40 KB takes longer than reading a request."""

    def __init__(self) -> None:
        self.words: IndexArray = np.zeros((MOST_SEGMENTS, SEGMENT_WORDS), np.int64)


class LoopState:
    """Arrays of one loop of the engine. *Thread-safe.*

    Args:
        memories: regions of the frontends that it serves.
        events: by frontend, the event that wakes it.
        loop_event: event that wakes the loop.
        handed_over_event: semaphore that the loop raises for each request it hands over.
        spin_ns: duration that it spins before it sleeps.
        last_id: ids of deployments count from here.

    Attributes:
        regions, deployments, tables, state, handed_over: see `exchange`.
    """

    def __init__(
        self,
        memories: Sequence[Memory],
        events: Sequence[int],
        loop_event: int,
        handed_over_event: int,
        spin_ns: int,
        last_id: int = 0,
    ) -> None:
        self.memories = tuple(memories)
        self.regions = np.zeros((len(memories), REGION_COLUMNS), np.int64)
        self.deployments = np.zeros((MOST_DEPLOYMENTS, DEPLOYMENT_COLUMNS), np.int64)
        self.tables = np.zeros((_MOST_TABLES, TABLE_COLUMNS), np.int64)
        self.state = np.zeros(STATE_WORDS, np.int64)
        self.handed_over = np.zeros((2 * RING * max(1, len(memories)), 2), np.int64)
        self._loop_event = loop_event
        self.state[SPIN_NS], self.state[HANDED_OVER_EVENT], self.state[LOOP_EVENT] = spin_ns, handed_over_event, loop_event
        self.state[BOUND_COUNT], self.state[SCORED_EVENT] = len(LOOKUP_BOUNDS_NS), -1
        self.state[BOUNDS : BOUNDS + len(LOOKUP_BOUNDS_NS)] = LOOKUP_BOUNDS_NS
        for place, (memory, event) in enumerate(zip(memories, events, strict=True)):
            self.regions[place, LENGTH], self.regions[place, EVENT] = memory.size, event
            self.regions[place, BASE], self.regions[place, OLD_EPOCH] = memory.address, memory[STARTED_EPOCH]
        self._lock = threading.Lock()
        self._segments = _Segments()
        self._rows: list[range | None] = [None] * MOST_DEPLOYMENTS  # by deployment, its rows of `tables`
        self._trusted_until = [0] * MOST_DEPLOYMENTS  # see D_RESIDENT
        self._hands_over_all = False
        # Frontends post again what a dead engine left unanswered. The same id must not name another deployment by then, so each
        # engine counts from a number of its own.
        self._last_id = last_id
        self._taken = 0  # handed-over requests
        self._scored = 0  # likewise, for scores
        self._seen = np.zeros_like(self.deployments), np.zeros_like(self.tables)  # counters at the last tally

    def shift(self, place: int, by: int) -> None:
        """Set the address of a region on a device: that of the region plus `by`."""
        self.regions[place, SHIFT] = by

    def add(self, tables: Sequence[TableSpec], resident: DriverWords | None) -> int:
        """Make a deployment known to frontends, and return its id.

        Args:
            resident: words of the cache's driver, which answers requests of resident keys; None: Python answers all.

        Raises:
            HPSError: there are too many deployments or tables.
        """
        with self._lock:
            row = next((row for row, tables_of in enumerate(self._rows) if tables_of is None), -1)
            first = self._room_for(len(tables))
            if row < 0 or first < 0:
                raise HPSError(f"serving model {tables[0].model_name!r}: frontends know at most {MOST_DEPLOYMENTS} deployments")
            self._rows[row] = range(first, first + len(tables))
            for nth, spec in enumerate(tables):
                words = self.tables[first + nth]
                words[:] = self._seen[1][first + nth] = 0
                words[T_DIM], words[T_MAX_KEYS] = spec.dim, spec.max_keys
                if resident is not None:
                    driver_words = resident.tables[nth]
                    words[T_DRIVER : T_DRIVER + len(driver_words)] = driver_words
            self._last_id += 1
            deployment_id = self._last_id << 8 | row
            deployment = self.deployments[row]
            # D_IN_FLIGHT is not reset: a loop that compared the previous id may still raise and lower it.
            deployment[D_DRIVER:] = self._seen[0][row] = 0
            deployment[D_NS] = 0
            deployment[D_TABLES], deployment[D_FIRST] = len(tables), first
            self._trusted_until[row] = ALWAYS if resident is not None else 0
            deployment[D_RESIDENT] = 0 if self._hands_over_all else self._trusted_until[row]
            if resident is not None:
                deployment[D_DRIVER : D_DRIVER + len(resident.deployment)] = resident.deployment
            store_word(deployment.ctypes.data + 8 * D_ID, deployment_id)
            return deployment_id

    def _room_for(self, count: int) -> int:
        start = 0
        for taken in sorted((tables for tables in self._rows if tables is not None), key=lambda tables: tables.start):
            if taken.start - start >= count:
                return start
            start = taken.stop
        return start if start + count <= _MOST_TABLES else -1

    def hand_over_all(self, enabled: bool) -> None:
        """Hand over every request to Python from now on, or only those that the driver's loop cannot answer."""
        with self._lock:
            self._hands_over_all = enabled
            self.deployments[:, D_RESIDENT] = 0 if enabled else self._trusted_until

    def trust_until(self, deployment_id: int, until_ns: int) -> None:
        """Answer from the driver's cache until then, by `time.perf_counter_ns`; afterwards hand over every request."""
        row = deployment_id & (MOST_DEPLOYMENTS - 1)
        with self._lock:
            if self.deployments[row, D_ID] == deployment_id and self._trusted_until[row]:
                self._trusted_until[row] = max(1, until_ns)
                if not self._hands_over_all:
                    self.deployments[row, D_RESIDENT] = self._trusted_until[row]

    def retire(self, deployment_id: int) -> None:
        """Refuse requests of a deployment from now on; those that were taken are answered."""
        row = deployment_id & (MOST_DEPLOYMENTS - 1)
        if self.deployments[row, D_ID] == deployment_id:
            store_word(self.deployments[row].ctypes.data + 8 * D_ID, 0)

    def is_idle(self, deployment_id: int) -> bool:
        """Return True if the loop answers no request of a retired deployment."""
        return int(self.deployments[deployment_id & (MOST_DEPLOYMENTS - 1), D_IN_FLIGHT]) == 0

    def release(self, deployment_id: int) -> None:
        """Free the row and tables of a retired deployment that is idle."""
        with self._lock:
            self._rows[deployment_id & (MOST_DEPLOYMENTS - 1)] = None

    def tally(self, deployment_id: int) -> Tally:
        """Return the counts of a deployment since the last call. One caller at a time."""
        row = deployment_id & (MOST_DEPLOYMENTS - 1)
        tables_of = self._rows[row] or range(0)
        tables = _since(self.tables, self._seen[1], slice(tables_of.start, tables_of.stop), slice(T_KEYS, T_ABSENT + 1))
        last = D_TIMES + len(LOOKUP_BOUNDS_NS)
        [times] = _since(self.deployments, self._seen[0], slice(row, row + 1), slice(D_TIMES, last + 1))
        [[ns]] = _since(self.deployments, self._seen[0], slice(row, row + 1), slice(D_NS, D_NS + 1))
        return Tally(tables, times, ns)

    def next_request(self) -> HandedOverRequest | None:
        """Take the next request that the loop handed over; None if there is none."""
        with self._lock:
            if self._taken == self.state[HANDED_OVER_COUNT]:
                return None
            place, slot = self.handed_over[self._taken % (len(self.handed_over) // 2)].tolist()
            self._taken += 1
        return self._read(place, slot)

    def take_scored(self, event: int) -> None:
        """Hand requests for scores over to one thread, by `next_scored`, which `event` wakes when it sleeps."""
        self.state[SCORED_EVENT] = event

    def next_scored(self) -> HandedOverRequest | None:
        """Take the next request for scores that the loop handed over; None if there is none. *One thread.*

        After None, the next one wakes the thread.
        """
        if self._scored == self.state[SCORED_COUNT] and self._scored == arm_scored(self.state):
            return None
        size = len(self.handed_over) // 2
        place, slot = self.handed_over[size + self._scored % size].tolist()
        self._scored += 1
        return self._read(place, slot)

    def _read(self, place: int, slot: int) -> HandedOverRequest:
        header, segments = np.zeros(HEADER_WORDS, np.int64), self._segments.words
        status = read_handed_over(self.regions, place, slot, self.deployments, self.tables, header, segments)
        count = int(header[H_SEGMENTS]) if status == 0 else 0
        return HandedOverRequest(place, slot, status, header, segments[:count].copy())

    def complete(self, request: HandedOverRequest) -> None:
        """Return the slot of a request to its frontend. The answer is in the slot."""
        event = complete_handed_over(self.regions, request.place, request.slot)
        if event >= 0:
            os.eventfd_write(event, 1)

    def check_integrity(self) -> list[str]:
        """Return a sentence for each invariant that is broken: of the rings of each region, and the tables of deployments."""
        findings, end = [], 0
        with self._lock:
            known = [(tables, row) for row, tables in enumerate(self._rows) if tables is not None]
            for tables, row in sorted(known, key=lambda entry: entry[0].start):
                words = self.deployments[row]
                if tables.start < end:
                    findings.append(f"deployment {row}: its tables overlap those of another")
                end = tables.stop
                if words[D_ID] and (words[D_FIRST], words[D_TABLES]) != (tables.start, len(tables)):
                    findings.append(f"deployment {row}: its tables are {tables}, but descriptors are checked by others")
        return findings + [finding for place in range(len(self.memories)) if (finding := self._region_finding(place))]

    def _region_finding(self, place: int) -> str:
        # The loop changes these words while they are read, one after the other: only a finding that persists counts.
        finding = ""
        for _ in range(_READINGS):
            words, memory = self.regions[place], self.memories[place]
            completed, taken, under_way = int(words[HEAD]), int(words[TAIL]), int(words[IN_FLIGHT])
            posted = memory[SUBMITTED] - taken
            if words[EPOCH] == 0 or words[EPOCH] != memory[FRONTEND_EPOCH]:
                return ""
            if not 0 <= under_way <= RING or taken - completed != under_way:
                finding = f"{taken} slots were taken and {completed} completed, but {under_way} are under way"
            elif memory[COMPLETED] != completed or memory[TAKEN] != taken:
                finding = (
                    f"{completed} of {taken} slots are completed, but the region has {memory[COMPLETED]} of {memory[TAKEN]}"
                )
            elif not 0 <= posted <= RING:
                finding = f"{posted} slots are posted and not taken, expected 0 to {RING}"
            else:
                return ""
            time.sleep(0.001)
        return f"region {place}: {finding}"

    def stop(self) -> None:
        """End the loop."""
        store_word(self.state.ctypes.data + 8 * STOP, 1)
        os.eventfd_write(self._loop_event, 1)

    @property
    def figures(self) -> dict[str, int]:
        """Counts of the loop since its start: batches, requests handed over, malformed descriptors, and wakes from sleep."""
        return {
            "batches": int(self.state[BATCHES]),
            "handed_over": int(self.state[HANDED_OVER_COUNT] + self.state[SCORED_COUNT]),
            "malformed": int(self.regions[:, MALFORMED_COUNT].sum()),
            "wakes": int(self.state[WAKES]),
        }


def _since(words: IndexArray, seen: IndexArray, rows: slice, columns: slice) -> list[list[int]]:
    """Return by how much counters have grown since the last call."""
    now = words[rows, columns].copy()
    grown: list[list[int]] = (now - seen[rows, columns]).tolist()
    seen[rows, columns] = now
    return grown
