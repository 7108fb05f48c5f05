"""The contract of an embedding cache, obeyed by the CuPy cache and by its NumPy twin.

`EmbeddingCache` is what every cache does. A cache may have further capabilities; callers test for them with `isinstance` or
`issubclass`, once, where the cache is chosen or built.

    EmbeddingCache          looks rows and bags up, takes changes of rows, reports statistics
    ├── StaticTables        keeps every row of a table resident, and answers absent keys itself (both)
    ├── BatchAnswers        answers the requests of frontends without the interpreter (both)
    ├── DeviceMemoryTables  lies in memory of a device, which runs kernels that can be compiled ahead (CuPy)
    ├── SharedRows          several devices share its rows (CuPy)
    ├── HostTableReads      reads tables in host memory in place (CuPy)
    ├── StreamOrdered       enqueues lookups on a stream, and captures them in graphs (CuPy)
    └── GraphParts          enqueues lookups that callers capture with work of their own (CuPy)

A lookup is an object with a few methods, called in this order (`engine/session.py` is the only caller):

    lookup = cache.create_lookup()              once, for many lookups in sequence

    missing = lookup.query(batch)               copies hits to their places; returns the number of misses; if 0, that is all
    for missed in lookup.unique():              the distinct keys of each table with misses, on the host
        buffer = missed.buffer()                    host memory (pinned with CUDA) for the fetched vectors
        ... fetch rows [start, stop) into buffer ...
        missed.stage(start, stop)                   starts their copy to the device
        missed.scatter(found)                       writes fetched or default vectors to every missing position
        missed.insert(found)                        makes fetched vectors resident, subject to admission
    lookup.finish()                             delivers outputs to the caller

A table that is answered asynchronously gets only `scatter`, with nothing found; its distinct keys are fetched in the
background.

A cache may be *attached* to tables in host memory (`HostTableReads.attach`). A query then looks up non-resident keys in the
table, and admits those that it finds; only keys in neither are left for the steps above. If the host tables are authoritative,
no key is left, and `lookup.enqueue(batch)` is a complete lookup that does not block.

A batch with `poolings` gets one vector per bag, in the same steps: `query` adds up the resident vectors of each bag without
storing them; `finish` adds the vectors of the remaining keys, from scratch memory that `scatter` writes. So bags are complete
only when the lookup is finished.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from hps.errors import DeviceError
from hps.ground.memory.capacity import Need
from hps.ground.memory.host_tables import HostTable
from hps.regions.loop_state import DriverWords, LoopState
from hps.tensors.batch import Batch
from hps.types import BoolArray, DeviceArray, KeyArray, RowArray, TableSpec

STATIC_LOAD = 0.86
"""Load factor of static tables. Where a key has two places, every row of fuller tables still found one, to 0.95 on a GPU."""

NEAR_SHARE = 1 / 32
"""Share of its rows that a device keeps for copies of its neighbours' most used rows, with `device_sharing: hot`."""

MOST_SHARERS = 15
"""Maximum number of devices that share rows."""

MOST_SHARED_ROWS = (1 << 31) - 1
"""Maximum number of rows of a shared table: kernels number them by 31 bits."""


_SET_ROWS = 14  # of a set on the CPU, and of a pair of buckets on a GPU
_SPARE_SETS = 4  # of a static table: small ones are filled less evenly


def static_sets(rows: int) -> int:
    """Return the sets of a static table that finds a place for `rows` rows."""
    return math.ceil(rows / (STATIC_LOAD * _SET_ROWS)) + _SPARE_SETS


def resident_rows(rows: int, capacity_rows: int) -> int:
    """Return the number of resident rows after lookups of all rows of a table, in a cache that is not static."""
    # Keys fall into sets at random, so the number of keys of a set has a Poisson distribution, and those beyond its slots are
    # missing. With a slot for every row 0.894 of the rows are resident; with 3.7 slots a row all but 3.9 of a million.
    sets = -(-capacity_rows // _SET_ROWS)
    if not rows or not sets:
        return 0
    mean = rows / sets
    probability, fewer, expected = math.exp(-mean), math.exp(-mean), 0.0  # of no key, of at most that many
    for count in range(1, _SET_ROWS + 1):
        probability *= mean / count
        fewer += probability
        expected += count * probability
    return min(rows, round(sets * (expected + _SET_ROWS * (1 - fewer))))


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Counters of one cached table since construction.

    Attributes:
        evictions: resident keys displaced by an insert.
        size_bytes: memory of the table on this cache's device.
        unplaced: keys that an insert into a static table found no place for.
        copied_rows: rows of other devices that this cache's device has copies of now.
    """

    capacity_rows: int
    resident_rows: int
    inserts: int
    evictions: int
    size_bytes: int
    unplaced: int = 0
    copied_rows: int = 0


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of a device, as its driver reports it. On the CPU: of the machine, free for this process."""

    name: str
    total_bytes: int
    free_bytes: int


class KernelNeed(NamedTuple):
    """What the kernels of a model depend on. *Immutable.*"""

    tables: Sequence[tuple[int, str]]  # dim and row_dtype
    static: bool
    shared: bool  # by devices


@dataclass(frozen=True, slots=True)
class KeptKernels:
    """Kernels for models on a device, and those whose machine code is kept here. *Immutable.*"""

    device: str  # its name
    architecture: str  # compute capability without the dot, as `90`
    needed: int
    kept: int


@dataclass(frozen=True, slots=True)
class DeviceSharing:
    """How devices of one process share the rows of a cache. *Immutable.*

    Attributes:
        device_ids: the devices; each row lies on one of them, and all read it there. Empty for a cache of one device.
        near_rows: by table, the number of its neighbours' most used rows that each device copies; empty for none.
    """

    device_ids: tuple[int, ...] = ()
    near_rows: tuple[int, ...] = ()


ALONE = DeviceSharing()


@dataclass(frozen=True, slots=True)
class StreamOrderedCounts:
    """Outcome of the keys, duplicates counted, of enqueued lookups since construction.

    Attributes:
        misses: keys that were not resident.
        linked: misses that the attached table had.
        absent: misses that it lacked; they got the default vector.
        unread: misses that could not be read, because a writer held their bucket or the table was dropped; they got the default
            vector, though a vector may exist.
        settled: misses of a complete cache; they got the default vector.
    """

    misses: int
    linked: int
    absent: int
    unread: int
    settled: int = 0


class MissedKeys(ABC):
    """The distinct missing keys of one table. Valid until the next query of its lookup.

    Attributes:
        table: index of the table that the keys belong to.
        keys: (u,) int64 in host memory, distinct, in unspecified order; read only. Owned by the caller: they outlive the
            lookup. Databases are fastest when many keys are ordered by the upper bits of their hash, as the rows of a hash map
            are.
    """

    __slots__ = ("keys", "table")

    table: int
    keys: KeyArray  # (u,)

    @abstractmethod
    def buffer(self) -> RowArray:
        """Return host memory for the rows of `keys`: (u, width), pinned with CUDA; unspecified content. Call once."""

    @abstractmethod
    def stage(self, start: int, stop: int) -> None:
        """Start to copy rows [start, stop) of the buffer to the device. They must not change afterwards."""

    @abstractmethod
    def scatter(self, found: BoolArray) -> None:
        """Write every missing position of the table: the fetched vector if `found`, else the default vector.

        Args:
            found: (u,) bool in host memory, for `keys`; the batch's own mask becomes True at their positions.
        """

    @abstractmethod
    def absent(self, found: BoolArray) -> int:
        """Return the number of missing positions, duplicates counted, whose key is not `found`. Call it before `scatter`."""

    @abstractmethod
    def insert(self, found: BoolArray) -> None:
        """Insert the fetched vectors whose `found` is True, except of keys that have become resident meanwhile.

        Absent keys never become resident. A key is refused if its set is full of keys in use.
        """


class CacheLookup(ABC):
    """Runs one lookup at a time, with its scratch memory and stream. *One per thread.*

    Made by `EmbeddingCache.create_lookup`, and reused: it grows to the largest lookup that it served.

    Attributes:
        counts: for each table of the last query that left any key, the number of keys left, duplicates counted.
        linked: for each table of the last query, the number of keys that the attached table answered; empty if there were
            none.
        absent: likewise, the number that an authoritative attached table or a complete cache lacked; they got the default
            vector.
        padding: likewise, the number of padding keys, which are not looked up.
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
    def query(self, batch: Batch) -> int:
        """Copy resident vectors to their rows of `outs`, and list the other keys. Duplicate keys are allowed.

        Runs after the producers of keys and outputs. Missed rows of `outs` are unspecified until they are scattered. `founds`,
        if given, are True for hits and False for misses. The order of the misses is unspecified.

        Keys that are not resident are answered from the attached table, if any, and admitted; an authoritative table gives
        those that it lacks the default vector. Keys whose vector a writer keeps busy are left.

        Tensors on the device are not copied.

        Returns:
            The number of keys left, duplicates counted, for `unique` and the steps after it. If 0, the lookup is finished.

        Raises:
            InvalidDtypeError, InvalidInputError: an array has a wrong dtype, layout or place, and nothing was written. Or
                offsets on the device do not begin with 0, decrease, or do not end with n, and outputs are unspecified.
        """

    @abstractmethod
    def unique(self) -> Sequence[MissedKeys]:
        """Copy the distinct misses of the last query to the host, for each table with misses."""

    @abstractmethod
    def finish(self) -> None:
        """Deliver the outputs to the caller; a consumer that starts afterwards sees them complete. Idempotent."""


class StreamOrderedLookup(CacheLookup):
    """A lookup that can also run ordered by the stream of its tensors alone. *One per thread.*"""

    __slots__ = ()

    @abstractmethod
    def enqueue(self, batch: Batch, captured: bool = False) -> None:
        """Launch a complete lookup on the one stream of its tensors. Does not block; no `finish` follows.

        Every table must be attached as authoritative; keys, outputs and masks must be on the device, and on one stream.

        Args:
            captured: the stream is being captured in a CUDA graph, after `prepare` with as many keys. The lookup then belongs
                to that graph, and must not be used otherwise while the graph exists.

        Raises:
            InvalidInputError: a table is not attached, or a tensor is elsewhere; nothing was launched.
        """

    @abstractmethod
    def prepare(self, batch: Batch) -> None:
        """Run a lookup once, and allocate what a capture of `enqueue` with the same batch needs.

        Raises:
            InvalidInputError: as for `enqueue`.
        """


class StreamCapture(ABC):
    """A stream whose work is being captured in a CUDA graph. *One per thread.*

    Attributes:
        key: identifies the graph and the stream; equal for all work captured in sequence.
    """

    key: Hashable

    @abstractmethod
    def watch(self) -> Callable[[], bool]:
        """Return a function that returns True once the graph and its executables are destroyed."""


class LookupGraph(ABC):
    """An enqueued lookup as a CUDA graph. *One per thread.*"""

    @abstractmethod
    def launch(self) -> None:
        """Launch the graph on the current stream of the keys' framework. Does not block."""

    @abstractmethod
    def close(self) -> None:
        """Free the graph once it has ended. Idempotent."""


class GraphPart(ABC):
    """Lookups that are part of a CUDA graph of their caller, who learns afterwards whether they succeeded. *One per thread.*

    They answer what the device can: resident keys, those of attached tables, and absent keys where it knows that they are. The
    memory of the cache is kept until this object is freed.

    Attributes:
        counts: whether `StreamOrdered.stream_ordered_counts` has the misses of its launches.
    """

    counts: bool

    @abstractmethod
    def prepare(self, batch: Batch) -> None:
        """Run a batch, and allocate what those need that are no larger. Graphs of before are invalid then.

        Raises:
            InvalidInputError, NotReadyError: as for `enqueue`.
        """

    @abstractmethod
    def enqueue(self, batch: Batch) -> None:
        """Launch a batch on the one stream of its tensors. Does not block.

        Raises:
            InvalidInputError: a tensor is not on the device, or it has more keys or bags than any batch of `prepare`; nothing
                was launched. NotReadyError: the cache is closed.
        """

    @abstractmethod
    def order(self) -> bool:
        """Order the next launch after all modifications whose calls have returned. Return False if graphs became invalid.

        Raises:
            NotReadyError: the cache is closed.
        """

    @abstractmethod
    def absent(self) -> Mapping[int, int] | None:
        """Return, by table, keys that got the default vector in the launch that has ended, if a complete cache lacks them.

        Returns:
            None if a key could not be answered. The outputs are then unspecified.
        """


class BatchDriver(ABC):
    """Answers the requests of frontends whose keys are all resident, in a loop without the interpreter.

    A request with a missing key is handed over complete, like every one that the driver does not answer: a thread of the engine
    then looks it up as any other.
    """

    def prepare(self) -> None:  # noqa: B027 - optional
        """Make the regions of the frontends readable and writable for the device. Called once, before `run`."""

    @abstractmethod
    def resident(self, cache: "EmbeddingCache") -> DriverWords | None:
        """Describe a cache to the loop; None if the loop cannot answer from it."""

    def release(self, cache: "EmbeddingCache") -> None:  # noqa: B027 - optional
        """Free what `resident` allocated for a cache, after its last request."""

    @abstractmethod
    def run(self) -> None:
        """Answer requests until the loop is stopped. Blocks; called once, on a thread of its own."""

    def close(self) -> None:  # noqa: B027 - optional
        """Undo `prepare`. Called once, when `run` has returned and the regions are no longer read."""


class CachePlan(ABC):
    """The memory needs of caches of one kind, computed without their device. *Immutable.*"""

    @classmethod
    @abstractmethod
    def room_for(
        cls,
        tables: Sequence[TableSpec],
        capacity_rows: Sequence[int],
        static: bool = False,
        sharing: DeviceSharing = ALONE,
    ) -> list[Need]:
        """Return the memory that `EmbeddingCache.create` would allocate for each table on a device, by the same arguments."""

    @classmethod
    def workspaces_for(cls, tables: Sequence[TableSpec], workspaces: int) -> list[Need]:
        """Return the maximum memory of a number of lookups; empty by default."""
        return []


class EmbeddingCache(ABC):
    """The vectors of one model's tables that are resident on one device. *Thread-safe*; its lookups are not.

    Each table is set-associative. A key's set comes from a 64-bit mixing hash, so strided keys spread. Every int64 is a legal
    key. A table never exceeds its capacity: a full set evicts the key with the smallest score. Using a key raises its score; a
    key not used since it became resident has a lower score than the others. That is recency with probation: plain LRU loses 3 %
    of the hits of power-law traffic. An inserted key always becomes resident; a key that only missed must pass admission. Each
    implementation's docstring specifies the aging of scores and the admission.

    Rows are of the format of their table (`ground/rows.py`): they are inserted as they are stored, and queries answer vectors.

    Queries take no lock. Concurrent with inserts, updates and erases, a query returns for each key an untorn vector that was
    current at a moment of the call. Modifications of one table take effect in the order in which their calls began to return:
    an `update` called after an `insert` has returned is never undone.
    """

    device: ClassVar[str]
    """The configuration value that selects this cache: `cpu` or `cuda`."""

    tables: tuple[TableSpec, ...]
    device_id: int
    """The device that its lookups run on."""

    @property
    def failure(self) -> str | None:
        """The error that made its device unusable for this process; None without one. Every call then fails."""
        return None

    @contextmanager
    def unless_lost(self) -> Iterator[None]:
        """End the block without an error when it fails because the device is lost: nothing reads its rows then."""
        try:
            yield
        except DeviceError:
            if self.failure is None:
                raise

    @property
    def device_name(self) -> str:
        """The device in statistics and messages: `cpu`, or the number of the CUDA device."""
        return "cpu" if self.device == "cpu" else str(self.device_id)

    @classmethod
    def kernels(cls) -> Sequence[Callable[..., Any]]:
        """Return the numba kernels of lookups and changes, to be compiled together with those of the databases."""
        return ()

    @classmethod
    def unavailable_reason(cls) -> str | None:
        """Return why this machine cannot run this cache, for the log; None if it can."""
        return None

    @classmethod  # noqa: B027 - optional
    def check_room(
        cls,
        tables: Sequence[TableSpec],
        capacity_rows: Sequence[int],
        device_id: int,
        static: bool = False,
        index_bytes: Sequence[int] = (),
        sharing: DeviceSharing = ALONE,
    ) -> None:
        """Reject tables that `create` could not allocate now, before anything is loaded; other arguments as for `create`.

        Reserves nothing.

        Args:
            index_bytes: sizes of the tables' indexes, if `attach` is to keep them on the device.

        Raises:
            CapacityError: they do not fit; the message lists the need of each table, the free memory and a size that would fit.
        """

    @classmethod
    @abstractmethod
    def create(
        cls,
        tables: Sequence[TableSpec],
        capacity_rows: Sequence[int],
        device_id: int,
        static: bool = False,
        sharing: DeviceSharing = ALONE,
    ) -> Self:
        """Allocate a cache for all tables of a model.

        Args:
            tables: T tables, in the order of their ids.
            capacity_rows: T row counts, each at least 0, rounded up to full sets. 0 caches nothing.
            device_id: CUDA device; ignored on the CPU.
            static: see `StaticTables`. `capacity_rows` are then rows that find a place; room for more is added.
            sharing: see `SharedRows`; `device_id` is one of the devices. `capacity_rows` are those of all devices together,
                without near rows.

        Raises:
            DeviceMemoryError: the tables do not fit; the message lists the need of each table and a size that would fit.
        """

    @abstractmethod
    def create_lookup(self) -> CacheLookup:
        """Allocate the resources of one lookup at a time."""

    def host_buffer(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> np.ndarray:
        """Return host memory that `insert` reads fastest (pinned with CUDA), for bulk work; content unspecified."""
        return np.empty(shape, dtype)

    def new_array(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> DeviceArray:
        """Return a new array of zeros on the device, which `query` reads and writes in place."""
        return np.zeros(shape, dtype)

    @abstractmethod
    def insert(
        self,
        table: int,
        keys: KeyArray,  # (n,)
        rows: RowArray,  # (n, width)
    ) -> None:
        """Make rows resident, replacing those of resident keys. Which row of a duplicate key wins is unspecified.

        The arrays are in host memory (the CuPy cache also accepts device arrays), only read, and not used after return.
        """

    @abstractmethod
    def update(self, table: int, keys: KeyArray, rows: RowArray) -> None:
        """Replace the rows of resident keys, as `insert` does; recency does not change."""

    @abstractmethod
    def erase(self, table: int, keys: KeyArray) -> None:
        """Make keys non-resident."""

    def write(self, table: int, keys: KeyArray, rows: RowArray) -> None:
        """Apply rows that were written to the databases below."""
        self.update(table, keys, rows)

    def drop(self, table: int, keys: KeyArray) -> None:
        """Make keys non-resident whose rows in the databases below are unknown."""
        self.erase(table, keys)

    @abstractmethod
    def dump(self, table: int) -> KeyArray:
        """Return the resident keys of a table, in unspecified order, as a host array that the caller owns."""

    @abstractmethod
    def stats(self, table: int) -> CacheStats:
        """Counters of a table."""

    def check_integrity(self) -> list[str]:
        """Check the invariants of all tables; copies their index from the device.

        Returns:
            A sentence for each that is broken. Changes that run meanwhile may be reported, too.
        """
        return []

    def device_memory(self) -> DeviceMemory:
        """Return the memory of the cache's device. May wait for the device.

        Raises:
            DeviceError: the device does not report it.
        """
        return DeviceMemory("", 0, 0)

    @abstractmethod
    def close(self) -> None:
        """Free the device memory. Idempotent."""


class StaticTables(EmbeddingCache):
    """A cache that can keep every row of its tables resident."""

    static: bool = False
    """The cache was created to keep every row: it evicts nothing, a key stands in one of two sets, and a lookup makes nothing
    resident. Where both sets of an inserted key are full, one of their keys moves to its own other set. A key that finds no
    slot is counted in `CacheStats.unplaced`."""

    complete: bool = False
    """Every row of every table is resident, so keys that are not are absent: lookups give them the default vector."""

    def mark_complete(self, complete: bool) -> None:
        """Set `complete`. Lookups that run see it once this has returned. Ignored unless `static`."""
        self.complete = complete and self.static

    def write(self, table: int, keys: KeyArray, rows: RowArray) -> None:
        """Apply rows that were written below: `update`, or `insert` if the cache is static.

        If a row finds no slot, the cache is not complete from then on.
        """
        if not self.static:
            self.update(table, keys, rows)
            return
        before = self.stats(table).unplaced if self.complete else 0
        self.insert(table, keys, rows)
        if self.complete and self.stats(table).unplaced != before:
            self.mark_complete(complete=False)

    def drop(self, table: int, keys: KeyArray) -> None:
        """Make keys non-resident whose rows may exist below. The cache is not complete from then on."""
        if self.complete:
            self.mark_complete(complete=False)
        self.erase(table, keys)


class BatchAnswers(ABC):
    """Answers the requests of frontends without the interpreter."""

    @classmethod
    @abstractmethod
    def batch_kernels(cls) -> Sequence[Callable[..., Any]]:
        """Return the numba kernels of the loops of `batches`."""

    @classmethod
    @abstractmethod
    def batches(cls, loop: LoopState) -> BatchDriver:
        """Return a driver that answers the requests of a loop."""


class DeviceMemoryTables(ABC):
    """Lies in memory of a device, which runs kernels that can be compiled ahead."""

    @classmethod
    @abstractmethod
    def free_bytes(cls, device_id: int) -> int | None:
        """Return the memory that caches on a device may still allocate; None if unknown."""

    @classmethod
    @abstractmethod
    def compile_ahead(cls, models: Sequence[KernelNeed], architecture: str) -> tuple[int, int]:
        """Compile the device's kernels for models; needs no device.

        Args:
            architecture: compute capability without the dot, as `90`.

        Returns:
            The number of compiled kernels, and of those that had been compiled before.

        Raises:
            InvalidInputError: the compiler does not know the architecture.
        """

    @classmethod
    @abstractmethod
    def kept_kernels(cls, models: Sequence[KernelNeed], device_id: int) -> KeptKernels:
        """Count the kernels of models whose machine code a start on this device would find."""


class SharedRows(EmbeddingCache):
    """A cache whose rows several devices of one process can share. Each device has a cache object of its own."""

    @classmethod
    @abstractmethod
    def reason_against_sharing(cls, device_ids: Sequence[int]) -> str | None:
        """Return why these devices cannot share the rows of a cache, for the log; None if they can."""

    @abstractmethod
    def on(self, device_id: int) -> "SharedRows":
        """Return the cache whose lookups run on another of the devices. Each is closed by itself."""

    @property
    @abstractmethod
    def leader(self) -> "SharedRows":
        """The cache that represents all those with the same rows: a change of any changes all."""


class HostTableReads(ABC):
    """Reads tables in host memory in place."""

    @abstractmethod
    def attach(
        self,
        table: int,
        host: HostTable,
        progress: Callable[[int, int], None] | None = None,
        *,
        authoritative: bool,
        index: bool = False,
    ) -> str | None:
        """Let lookups read a table in host memory in place.

        Args:
            table: index of the cached table whose rows it holds.
            host: pinned by this call.
            authoritative: keys that it lacks are absent.
            progress: as for `HostTable.pin`.
            index: keep a copy of the table's buckets on the device, so that a miss reads only its row in host memory.

        Returns:
            The reason for the log if it cannot be read in place; the host then answers misses. None on success.
        """

    @abstractmethod
    def detach(self, table: int) -> None:
        """Leave the misses of a table to the host from now on."""

    @abstractmethod
    def changing(self, table: int) -> AbstractContextManager[None]:
        """Mark a modification of an attached table's rows, until `update` or `erase` has returned.

        Rows that a lookup read before the end of the block are no longer admitted, so no older vector becomes resident after
        the modification. Lost devices are left out.
        """


class StreamOrdered(EmbeddingCache):
    """A cache whose lookups can run on the stream of their tensors alone, and be captured in CUDA graphs."""

    @abstractmethod
    def create_lookup(self) -> StreamOrderedLookup: ...

    @abstractmethod
    def stream_ordered_counts(self, table: int) -> StreamOrderedCounts:
        """Return counters of a table's enqueued lookups that have ended. Does not block."""

    @abstractmethod
    def capture_of(self, batch: Batch) -> StreamCapture | None:
        """Return the capture on the stream of a lookup's tensors; None if there is none."""

    @abstractmethod
    def record(self, batch: Batch, enqueue: Callable[[Batch], None]) -> LookupGraph:
        """Make a graph of what `enqueue` launches for a batch whose tensors are on the device.

        Calls `enqueue` twice, with the tensors as seen from a stream of the cache: first to run, then to be captured.

        Raises:
            InvalidInputError: a tensor is elsewhere.
        """


class GraphParts(EmbeddingCache):
    """A cache whose lookups can be part of a CUDA graph of their caller."""

    @abstractmethod
    def graph_part(self) -> GraphPart:
        """Return a new part, which holds scratch memory until it is freed."""


def leader_of(cache: EmbeddingCache) -> EmbeddingCache:
    """Return the cache that represents those with the same rows."""
    return cache.leader if isinstance(cache, SharedRows) else cache
