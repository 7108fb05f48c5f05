"""What one loop of the owner works on: the fronts' regions, the deployments that they may name, and the jobs for Python."""

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
    BASE,
    BATCHES,
    BOUND_COUNT,
    BOUNDS,
    D_FIRST,
    D_IN_FLIGHT,
    D_NS,
    D_OWN,
    D_RESIDENT,
    D_SERIAL,
    D_TABLES,
    D_TIMES,
    DEPLOYMENT_COLUMNS,
    EPOCH,
    EVENT,
    HEAD,
    HEADER_WORDS,
    IN_FLIGHT,
    JOBS_EVENT,
    JOBS_HEAD,
    LENGTH,
    LOOP_EVENT,
    MALFORMED_COUNT,
    MOST_DEPLOYMENTS,
    OLD_EPOCH,
    REGION_COLUMNS,
    SHIFT,
    SPIN_NS,
    STATE_WORDS,
    STOP,
    T_ABSENT,
    T_DIM,
    T_KEYS,
    T_MAX_KEYS,
    T_OWN,
    TABLE_COLUMNS,
    TAIL,
    WAKES,
    arm,
    complete_job,
    completions,
    post,
    read_job,
    store_word,
)
from hps.regions.layout import BEGUN_EPOCH, COMPLETED, FRONT_EPOCH, MOST_SEGMENTS, RING, SEGMENT_WORDS, SUBMITTED, TAKEN, Memory
from hps.statistics.times import LOOKUP_BOUNDS_NS
from hps.types import IndexArray, TableSpec

FRONT_KERNELS: Final = (post, completions, arm, store_word, to_float16, to_bfloat16)
OWNER_KERNELS: Final = (read_job, complete_job, store_word)
_MOST_TABLES = 1 << 14
_READINGS = 20  # of a region that is checked while its loop runs


class Tally(NamedTuple):
    """What a loop answered of one deployment since the last tally.

    Attributes:
        tables: by table: keys, resident, linked and absent ones.
        times: number of requests, by the buckets of `LookupTimes`.
        ns: how long all took together.
    """

    tables: list[list[int]]
    times: list[int]
    ns: int


class Resident(NamedTuple):
    """What a driver's loop needs to know of a deployment.

    Attributes:
        tables: by table: words after the common ones of `exchange`.
        deployment: the same of the deployment.
    """

    tables: Sequence[Sequence[int]]
    deployment: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Job:
    """A request that a loop has left to Python. *Immutable*; the arrays are the job's own.

    Attributes:
        place, slot: where it lies.
        status: 0, or why its descriptor is refused.
        header: (HEADER_WORDS,) int64.
        segments: (n, SEGMENT_WORDS) int64.
    """

    place: int
    slot: int
    status: int
    header: IndexArray
    segments: IndexArray


class Board:
    """The arrays of one loop of the owner. *Thread-safe.*

    Args:
        memories: regions of the fronts that it serves.
        events: of each, the event that wakes the front.
        loop_event: the event that wakes the loop.
        jobs_event: a semaphore that the loop raises for each job.
        spin_ns: how long it spins before it sleeps.
        serials: what the serials count from. Those of another owner must differ: fronts post again what it did not answer.

    Attributes:
        regions, deployments, tables, state, jobs: see `exchange`.
    """

    def __init__(
        self,
        memories: Sequence[Memory],
        events: Sequence[int],
        loop_event: int,
        jobs_event: int,
        spin_ns: int,
        serials: int = 0,
    ) -> None:
        self.memories = tuple(memories)
        self.regions = np.zeros((len(memories), REGION_COLUMNS), np.int64)
        self.deployments = np.zeros((MOST_DEPLOYMENTS, DEPLOYMENT_COLUMNS), np.int64)
        self.tables = np.zeros((_MOST_TABLES, TABLE_COLUMNS), np.int64)
        self.state = np.zeros(STATE_WORDS, np.int64)
        self.jobs = np.zeros((RING * max(1, len(memories)), 2), np.int64)
        self._loop_event = loop_event
        self.state[SPIN_NS], self.state[JOBS_EVENT], self.state[LOOP_EVENT] = spin_ns, jobs_event, loop_event
        self.state[BOUND_COUNT] = len(LOOKUP_BOUNDS_NS)
        self.state[BOUNDS : BOUNDS + len(LOOKUP_BOUNDS_NS)] = LOOKUP_BOUNDS_NS
        for place, (memory, event) in enumerate(zip(memories, events, strict=True)):
            self.regions[place, LENGTH], self.regions[place, EVENT] = memory.size, event
            self.regions[place, BASE], self.regions[place, OLD_EPOCH] = memory.address, memory[BEGUN_EPOCH]
        self._lock = threading.Lock()
        self._rows: list[range | None] = [None] * MOST_DEPLOYMENTS  # of each deployment: its tables
        self._resident = [False] * MOST_DEPLOYMENTS
        self._left_to_python = False
        self._serials = serials
        self._taken = 0  # jobs
        self._seen = np.zeros_like(self.deployments), np.zeros_like(self.tables)  # counters, as they were tallied last

    def shift(self, place: int, by: int) -> None:
        """Tell the loop where a device has a region: at its address plus `by`."""
        self.regions[place, SHIFT] = by

    def add(self, tables: Sequence[TableSpec], resident: Resident | None) -> int:
        """Let fronts name a deployment, and return its serial.

        Args:
            resident: what the driver of the cache knows of it, for requests that it answers without Python; None: Python
                answers all.

        Raises:
            HPSError: there are too many deployments or tables.
        """
        with self._lock:
            row = next((row for row, tables_of in enumerate(self._rows) if tables_of is None), -1)
            first = self._room_for(len(tables))
            if row < 0 or first < 0:
                raise HPSError(f"serving model {tables[0].model_name!r}: fronts know at most {MOST_DEPLOYMENTS} deployments")
            self._rows[row] = range(first, first + len(tables))
            for nth, spec in enumerate(tables):
                words = self.tables[first + nth]
                words[:] = self._seen[1][first + nth] = 0
                words[T_DIM], words[T_MAX_KEYS] = spec.dim, spec.max_keys
                if resident is not None:
                    own = resident.tables[nth]
                    words[T_OWN : T_OWN + len(own)] = own
            self._serials += 1
            serial = self._serials << 8 | row
            deployment = self.deployments[row]
            deployment[D_OWN:] = self._seen[0][row] = 0  # D_IN_FLIGHT stays: the loop may be leaving the one before
            deployment[D_NS] = 0
            deployment[D_TABLES], deployment[D_FIRST] = len(tables), first
            self._resident[row] = resident is not None
            deployment[D_RESIDENT] = int(self._resident[row] and not self._left_to_python)
            if resident is not None:
                deployment[D_OWN : D_OWN + len(resident.deployment)] = resident.deployment
            store_word(deployment.ctypes.data + 8 * D_SERIAL, serial)
            return serial

    def _room_for(self, tables: int) -> int:
        start = 0
        for taken in sorted((row for row in self._rows if row is not None), key=lambda one: one.start):
            if taken.start - start >= tables:
                return start
            start = taken.stop
        return start if start + tables <= _MOST_TABLES else -1

    def leave_all(self, to_python: bool) -> None:
        """Leave all requests to Python from now on, or only those that the driver's loop cannot answer."""
        with self._lock:
            self._left_to_python = to_python
            self.deployments[:, D_RESIDENT] = np.array(self._resident) & (not to_python)

    def end(self, serial: int) -> None:
        """Refuse requests of a deployment from now on; those that were taken are answered."""
        row = serial & (MOST_DEPLOYMENTS - 1)
        if self.deployments[row, D_SERIAL] == serial:
            store_word(self.deployments[row].ctypes.data + 8 * D_SERIAL, 0)

    def is_idle(self, serial: int) -> bool:
        """Whether the loop answers nothing of a deployment that has ended. Asked again while it is False."""
        return int(self.deployments[serial & (MOST_DEPLOYMENTS - 1), D_IN_FLIGHT]) == 0

    def forget(self, serial: int) -> None:
        """Give the place of a deployment to others, once it is idle."""
        with self._lock:
            self._rows[serial & (MOST_DEPLOYMENTS - 1)] = None

    def tally(self, serial: int) -> Tally:
        """Return what was answered of a deployment since the last call. One caller at a time."""
        row = serial & (MOST_DEPLOYMENTS - 1)
        tables_of = self._rows[row] or range(0)
        tables = _since(self.tables, self._seen[1], slice(tables_of.start, tables_of.stop), slice(T_KEYS, T_ABSENT + 1))
        last = D_TIMES + len(LOOKUP_BOUNDS_NS)
        [times] = _since(self.deployments, self._seen[0], slice(row, row + 1), slice(D_TIMES, last + 1))
        [[ns]] = _since(self.deployments, self._seen[0], slice(row, row + 1), slice(D_NS, D_NS + 1))
        return Tally(tables, times, ns)

    def next_job(self) -> Job | None:
        """Take the next request that the loop has left to Python."""
        with self._lock:
            if self._taken == self.state[JOBS_HEAD]:
                return None
            place, slot = self.jobs[self._taken % len(self.jobs)].tolist()
            self._taken += 1
        header, segments = np.zeros(HEADER_WORDS, np.int64), np.zeros((MOST_SEGMENTS, SEGMENT_WORDS), np.int64)
        status = read_job(self.regions, place, slot, self.deployments, self.tables, header, segments)
        return Job(place, slot, status, header, segments[: int(header[2])] if status == 0 else segments[:0])

    def complete(self, job: Job) -> None:
        """Hand the slot of a job back to its front, whose answer stands in it."""
        event = complete_job(self.regions, job.place, job.slot)
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
                if words[D_SERIAL] and (words[D_FIRST], words[D_TABLES]) != (tables.start, len(tables)):
                    findings.append(f"deployment {row}: its tables are {tables}, but descriptors are checked by others")
        return findings + [finding for place in range(len(self.memories)) if (finding := self._region_finding(place))]

    def _region_finding(self, place: int) -> str:
        # The loop counts while these words are read, so that they may not fit together: a finding is one that stays.
        finding = ""
        for _ in range(_READINGS):
            words, memory = self.regions[place], self.memories[place]
            completed, taken, under_way = int(words[HEAD]), int(words[TAIL]), int(words[IN_FLIGHT])
            posted = memory[SUBMITTED] - taken
            if words[EPOCH] == 0 or words[EPOCH] != memory[FRONT_EPOCH]:
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
        """Counts of the loop since it began: batches, requests left to Python, malformed descriptors, and wakes from sleep."""
        return {
            "batches": int(self.state[BATCHES]),
            "handed_over": int(self.state[JOBS_HEAD]),
            "malformed": int(self.regions[:, MALFORMED_COUNT].sum()),
            "wakes": int(self.state[WAKES]),
        }


def _since(words: IndexArray, seen: IndexArray, rows: slice, columns: slice) -> list[list[int]]:
    """Read counters that a loop adds to, and return by how much they have grown since they were seen last."""
    now = words[rows, columns].copy()
    grown: list[list[int]] = (now - seen[rows, columns]).tolist()
    seen[rows, columns] = now
    return grown
