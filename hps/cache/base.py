"""The contract of an embedding cache, obeyed by the CuPy cache and by its NumPy twin.

A lookup is an object with a handful of verbs, in this order (`lookup/session.py` is the only caller):

    lookup = cache.create_lookup()              once; it is used for one lookup after another

    missing = lookup.query(segments)            hits are in their places; the number of keys that are not resident
    for missed in lookup.unique():              one for each table that misses: its distinct keys, on the host
        buffer = missed.buffer()                    host memory (pinned with CUDA) for the fetched vectors
        ... fetch rows [start, stop) into buffer ...
        missed.stage(start, stop)                   their copy to the device begins
        missed.scatter(found)                       fetched or default vectors to every missing position
        missed.insert(found)                        the fetched vectors become resident, where they deserve a place
    lookup.finish()                             outputs are with the caller

A table that is answered asynchronously gets only `scatter`, with nothing found; its distinct keys go to the background.

A cache may be *attached* to tables of the host's memory (`EmbeddingCache.attach`). A query then goes on into the table by
itself for keys that are not resident, and admits what it found; only what is in neither is left for the steps above. Where
the host's tables are authoritative, nothing is left, and `lookup.enqueue(segments)` is a whole lookup that waits for nothing.

Segments with `pooling` are answered with one vector a bag, in the same steps: `query` adds up the resident vectors of each bag
without writing them anywhere; the vectors of the keys that it left are added by `finish`, from scratch memory that `scatter`
writes to. So bags are complete when the lookup is finished, not before.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
import numpy.typing as npt

from hps.capacity import Need
from hps.errors import InvalidInputError
from hps.host_tables import HostTable
from hps.tensors.segments import Segment
from hps.types import BoolArray, FloatArray, KeyArray, TableSpec


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Counters of one cached table since construction. `evictions` counts resident keys that an insert pushed out."""

    capacity_rows: int
    resident_rows: int
    inserts: int
    evictions: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of a device, by its driver: of the CPU, that of the machine and what this process may still take."""

    name: str
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class UnwaitedCounts:
    """What became of the keys, duplicates counted, of lookups that were only enqueued, since construction.

    Attributes:
        misses: were not resident.
        linked: of those, the attached table had.
        absent: of those, it had not; they got the default vector.
        unread: of those, nobody could read, since a writer kept their bucket or the table was dropped; they got the default
            vector, though a vector may exist.
    """

    misses: int
    linked: int
    absent: int
    unread: int


class MissedKeys(ABC):
    """The distinct missing keys of one segment. Its verbs can be called until the next query of its lookup.

    Attributes:
        segment: the segment that the keys belong to.
        keys: (u,) int64 in host memory, distinct, in unspecified order; read only. Owned by the caller: they outlive the
            lookup. Databases are quickest when many keys come by the upper bits of their hash, as rows lie in a hash map.
    """

    __slots__ = ("keys", "segment")

    segment: Segment
    keys: KeyArray  # (u,)

    @abstractmethod
    def buffer(self) -> FloatArray:
        """Host memory for the vectors of `keys`: (u, dim) float32, pinned with CUDA; content unspecified. Ask for it once."""

    @abstractmethod
    def stage(self, start: int, stop: int) -> None:
        """Rows [start, stop) of the buffer are written: begin to move them to the device. They must not change again."""

    @abstractmethod
    def scatter(self, found: BoolArray) -> None:
        """Write every missing position of the segment: the fetched vector where `found`, else the default vector.

        Args:
            found: (u,) bool in host memory, for `keys`; the segment's own mask becomes True at their positions.
        """

    @abstractmethod
    def absent(self, found: BoolArray) -> int:
        """How many missing positions have a key that is not `found`: duplicates count. To be asked before `scatter`."""

    @abstractmethod
    def insert(self, found: BoolArray) -> None:
        """Insert the fetched vectors whose `found` is True; keys that have become resident meanwhile are left alone.

        Absent keys are never made resident. A key that finds its set full of keys that are in use is refused.
        """


class CacheLookup(ABC):
    """One lookup at a time, with the scratch memory and the stream that it needs. *One per thread.*

    Made by `EmbeddingCache.create_lookup`, and used for one lookup after another: it grows to the largest that it served.

    Attributes:
        counts: for each segment of the last query that left any key, how many of its keys (duplicates counted) are left.
        linked: for each segment of the last query, how many keys the attached table answered; empty where none did.
        absent: likewise, how many an authoritative attached table had not; they got the default vector.
        padding: likewise, how many were a padding key, which is not looked up.
    """

    __slots__ = ("absent", "counts", "linked", "padding")

    counts: list[int]
    linked: Sequence[int]
    absent: Sequence[int]
    padding: Sequence[int]

    def __init__(self) -> None:
        self.counts = []
        self.linked = self.absent = self.padding = ()

    @abstractmethod
    def query(self, segments: Sequence[Segment]) -> int:
        """Copy resident vectors to their rows of `out`, and list the other keys. Duplicate keys are allowed.

        Runs after the producers of keys and outputs. Rows of `out` that missed are unspecified until they are scattered.
        `found`, where given, is True for hits and False for misses. The order of the misses is unspecified.

        Args:
            segments: at most one for each table, all with bags or none. What is on the device already is not copied.

        Keys that are not resident and whose table is attached are answered from there, and admitted; if it is authoritative,
        those it has not get the default vector. Keys whose vector a writer keeps busy are left.

        Returns:
            How many keys (duplicates counted) are left: for `unique` and what follows it.

        Raises:
            InvalidDtypeError, InvalidInputError: an array has another dtype, layout or place; nothing was written. Or
                offsets on the device do not begin with 0, fall, or do not end with n; outputs are then unspecified.
        """

    def enqueue(self, segments: Sequence[Segment], captured: bool = False) -> None:
        """Launch a whole lookup on the one stream of its tensors, and wait for nothing; no `finish` follows.

        Every table must be attached as authoritative; keys, outputs and masks must be on the device, and on one stream.

        Args:
            captured: the stream is being captured in a CUDA graph, after `prepare` with as many keys. The lookup then belongs
                to that graph, and is not used otherwise while the graph is.

        Raises:
            InvalidInputError: a table is not attached, or a tensor is elsewhere; nothing was launched.
        """
        raise InvalidInputError("looking up without waiting: this cache does not read host memory in place")

    def prepare(self, segments: Sequence[Segment]) -> None:
        """Run a lookup once, and make all that `enqueue` needs to be captured with the same segments.

        Raises:
            InvalidInputError: as for `enqueue`.
        """
        raise InvalidInputError("capturing a lookup: this cache does not read host memory in place")

    @abstractmethod
    def unique(self) -> Sequence[MissedKeys]:
        """Bring the misses of the last query to the host, each key of a table once; only for tables that missed a key."""

    @abstractmethod
    def finish(self) -> None:
        """Bring the outputs to where the caller expects them; a consumer that starts afterwards sees them complete."""


class StreamCapture(ABC):
    """A stream whose work is being captured in a CUDA graph. *One per thread.*

    Attributes:
        key: the same for all work that is captured one after the other, on this stream for this graph.
    """

    key: Hashable

    @abstractmethod
    def watch(self) -> Callable[[], bool]:
        """What says whether the graph is gone, with all that was made of it: so that nothing can be launched any more."""


class LookupGraph(ABC):
    """An enqueued lookup as a CUDA graph. *One per thread.*"""

    @abstractmethod
    def launch(self) -> None:
        """Launch it on the stream that the keys' framework works on now, and wait for nothing."""

    @abstractmethod
    def close(self) -> None:
        """Free it once it has ended. Closing twice changes nothing."""


class CachePlan(ABC):
    """What caches of one kind would take, as far as that is known without their device. *Immutable.*"""

    @classmethod
    @abstractmethod
    def room_for(cls, tables: Sequence[TableSpec], capacity_rows: Sequence[int]) -> list[Need]:
        """What `EmbeddingCache.create` would allocate for each table; arguments as there."""

    @classmethod
    def workspaces_for(cls, tables: Sequence[TableSpec], workspaces: int) -> list[Need]:
        """What so many lookups take at most; nothing that would count by default."""
        return []


class EmbeddingCache(ABC):
    """The vectors of one model's tables that are resident on one device. *Thread-safe*; its lookups are not.

    Each table is set-associative. A key's set comes from a 64-bit mixing hash, so strided keys spread. Every int64 is a legal
    key. A table never holds more than its capacity: a full set evicts the key with the smallest score. Using a key raises its
    score; a key that has not been used since it became resident has less than the others. That is recency with probation:
    plain LRU loses 3 % of the hits of power-law traffic. What is inserted becomes resident in any case; a key that has only
    missed must deserve it. Each implementation's docstring says how its scores age, and whom it refuses.

    Queries take no lock. Concurrent with inserts, updates and erases, a query returns for each key a whole vector that was
    current at some moment of the call. Modifications of one table take effect in the order in which their calls began to
    return: an `update` that is called after an `insert` has returned is never undone.
    """

    device: ClassVar[str]
    """The configuration value that selects this cache: `cpu` or `cuda`."""

    tables: tuple[TableSpec, ...]
    device_id: int

    @classmethod
    def unavailable_reason(cls) -> str | None:
        """Why this machine cannot run this cache, in words for the log; None where it can."""
        return None

    @classmethod
    def free_bytes(cls, device_id: int) -> int | None:
        """Memory that caches on a device may still take; None where the device has none of its own."""
        return None

    @classmethod  # noqa: B027 - optional
    def check_room(cls, tables: Sequence[TableSpec], capacity_rows: Sequence[int], device_id: int) -> None:
        """Refuse what `create` could not allocate beside what is there, before anything is loaded; arguments as for `create`.

        The answer is of the moment and reserves nothing.

        Raises:
            CapacityError: it does not fit; the message says how much each table needs, what is free and what would fit.
        """

    @classmethod
    @abstractmethod
    def create(cls, tables: Sequence[TableSpec], capacity_rows: Sequence[int], device_id: int) -> Self:
        """Allocate a cache for all tables of a model.

        Args:
            tables: T tables, in the order of their ids.
            capacity_rows: T numbers of rows, each at least 0, rounded up to whole sets. With 0, nothing is cached.
            device_id: which CUDA device; ignored on the CPU.

        Raises:
            DeviceMemoryError: it does not fit; the message says how much each table needs and what would fit.
        """

    @abstractmethod
    def create_lookup(self) -> CacheLookup:
        """Allocate what one lookup at a time needs."""

    def attach(
        self,
        table: int,
        host: HostTable,
        authoritative: bool,
        progress: Callable[[int, int], None] | None = None,
    ) -> str | None:
        """Let lookups read a table in host memory in place.

        Args:
            table: the index of ours that it holds the rows of.
            host: pinned by this call.
            authoritative: what it has not is absent.
            progress: as for `HostTable.pin`.

        Returns:
            Why that cannot be, in words for the log; lookups then leave misses to the host. None where they read it.
        """
        return "this cache does not read host memory in place"

    def detach(self, table: int) -> None:  # noqa: B027 - optional
        """Leave the misses of a table to the host from now on."""

    def changing(self, table: int) -> AbstractContextManager[None]:
        """To be held while rows of an attached table are modified, until `update` or `erase` has returned.

        What a lookup read of the table before or meanwhile is not admitted from then on, so that no older vector becomes
        resident after the modification.
        """
        return nullcontext()

    def unwaited(self, table: int) -> UnwaitedCounts:
        """Counters of a table's lookups that were only enqueued, as far as they have ended; it waits for none."""
        return UnwaitedCounts(0, 0, 0, 0)

    def capture_of(self, segments: Sequence[Segment]) -> StreamCapture | None:
        """What captures the stream of a lookup's tensors; None where nothing does."""
        return None

    def record(self, segments: Sequence[Segment], enqueue: Callable[[Sequence[Segment]], None]) -> LookupGraph:
        """Make a graph of what `enqueue` launches for some segments, whose tensors are on the device.

        It is called twice, with the segments as they are seen from a stream of the cache's: first to be done, then captured.

        Raises:
            InvalidInputError: a tensor is elsewhere.
        """
        raise InvalidInputError("capturing a lookup: this cache does not run on a CUDA device")

    def host_buffer(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> np.ndarray:
        """Host memory that `insert` reads fastest (pinned with CUDA), for bulk work; content unspecified."""
        return np.empty(shape, dtype)

    @abstractmethod
    def insert(
        self,
        table: int,
        keys: KeyArray,  # (n,)
        vectors: FloatArray,  # (n, dim)
    ) -> None:
        """Make vectors resident, replacing those of resident keys. Where a key occurs twice, it is unspecified which row wins.

        The arrays are in host memory (the CuPy cache also takes device arrays). They are only read, and not used after return.
        """

    @abstractmethod
    def update(self, table: int, keys: KeyArray, vectors: FloatArray) -> None:
        """As `insert`, but only for keys that are resident; recency does not change."""

    @abstractmethod
    def erase(self, table: int, keys: KeyArray) -> None:
        """Make keys non-resident."""

    @abstractmethod
    def dump(self, table: int) -> KeyArray:
        """The resident keys of a table, in unspecified order, as a host array that the caller owns."""

    @abstractmethod
    def stats(self, table: int) -> CacheStats:
        """Counters of a table."""

    def device_memory(self) -> DeviceMemory:
        """Memory of the device that the cache is on. It may wait for the device.

        Raises:
            DeviceError: the device does not say.
        """
        return DeviceMemory("", 0, 0)

    @abstractmethod
    def close(self) -> None:
        """Free the device memory. Closing twice changes nothing."""
