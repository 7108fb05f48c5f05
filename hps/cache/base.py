"""The contract of an embedding cache, obeyed by the CuPy cache and by its NumPy twin.

A lookup is a handful of verbs on one workspace, in this order (`lookup_session.py` is the only caller):

    segments = cache.adopt(workspace, segments)        keys and outputs are on the device
    misses   = cache.query(workspace, segments)        hits are in their places; misses are compacted
    for missed in cache.unique(workspace, misses):     one entry a table that misses: distinct keys, on the host
        buffer = cache.fetch_buffer(workspace, missed)     host memory (pinned with CUDA) for the fetched vectors
        ... fetch rows [start, stop) into buffer ...
        cache.stage(workspace, missed, start, stop)        their copy to the device begins
        cache.scatter(workspace, missed, found)            fetched or default vectors to every missing position
        cache.insert_fetched(workspace, missed, found)
    cache.finish(workspace, segments)                  outputs are with the caller

A table that is answered asynchronously gets `scatter` with nothing found, and its distinct keys go to the background.
`fill_default` does the same for all tables of a lookup without bringing their keys to the host.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from hps.types import BoolArray, DeviceArray, FloatArray, KeyArray, TableSpec


class Stretch:
    """Consecutive elements of a tensor that several segments share; a CUDA cache reads the tensor once for all of them.

    Attributes:
        tensor: keys or output of a whole lookup, not adopted yet.
        start, size: the stretch, in elements.
        total: elements that the tensor must have: exactly so many keys, at least so many of an output.
    """

    __slots__ = ("size", "start", "tensor", "total")

    def __init__(self, tensor: DeviceArray, start: int, size: int, total: int) -> None:
        self.tensor = tensor
        self.start = start
        self.size = size
        self.total = total


@dataclass(slots=True)
class Segment:
    """The keys of one table within a lookup, and where their vectors go.

    Attributes:
        table: index of the table within the model. A lookup has at most one segment a table.
        keys: (n,) int64, C-contiguous; read only. n may be 0.
        out: (n, dim) float32, C-contiguous; every row is written by the time `finish` returns.
        found: (n,) bool or None; set to True for keys that a tier answered, False for those that got the default.
        n: number of keys; given where `keys` is a tensor of any shape that is yet to be adopted.
    """

    table: int
    keys: DeviceArray  # (n,)
    out: DeviceArray  # (n, dim)
    found: DeviceArray | None = None  # (n,)
    n: int = -1

    def __post_init__(self) -> None:
        if self.n < 0:
            self.n = len(self.keys)


@dataclass(slots=True)
class Misses:
    """What a query did not find.

    Attributes:
        counts: for each segment of the query, how many of its keys (duplicates counted) were not resident.
        state: the implementation's own compacted list; belongs to the workspace until its next query.
    """

    counts: list[int]
    state: Any = None

    @property
    def count(self) -> int:
        return sum(self.counts)


@dataclass(slots=True)
class TableMisses:
    """The distinct missing keys of one segment.

    Attributes:
        segment: the segment they belong to.
        keys: (u,) int64 in host memory, distinct, ascending; read only. Owned by the caller: it outlives the workspace.
        state: the implementation's own positions and inverse; belongs to the workspace until its next query.
    """

    segment: Segment
    keys: KeyArray  # (u,)
    state: Any = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Counters of one cached table since construction. `evictions` counts resident keys that an insert pushed out."""

    capacity_rows: int
    resident_rows: int
    inserts: int
    evictions: int
    size_bytes: int


class Workspace:
    """Scratch memory (and the stream) of one lookup at a time. *One per thread.* Made by `create_workspace`."""


class EmbeddingCache(ABC):
    """The vectors of one model's tables that are resident on one device. *Thread-safe*, given a workspace a caller.

    Set-associative per table; a key's set comes from a 64-bit mixing hash, so strided keys spread. Every int64 is a legal
    key. A table never holds more than its capacity; a full set evicts its smallest score, which a use raises and of which a
    key that was not used since it became resident has less: recency with probation, since plain LRU loses 3 % of the hits
    of power-law traffic. How scores age is the implementation's own, and its docstring says it.

    Queries take no lock: concurrent with inserts, updates and erases, a query returns for each key a whole vector that was
    current at some moment of the call. Modifications of one table take effect in the order in which their calls began to
    return: an `update` that is called after an `insert` returned is never undone.
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
    @abstractmethod
    def create(cls, tables: Sequence[TableSpec], capacity_rows: Sequence[int], device_id: int) -> Self:
        """Allocate a cache for all tables of a model.

        Args:
            tables: T tables, in the order of their ids.
            capacity_rows: T numbers of rows, each at least 0, rounded up to whole sets. 0 caches nothing: all keys miss.
            device_id: which CUDA device; ignored on the CPU.

        Raises:
            DeviceMemoryError: it does not fit; the message says how much which table asked for and what would fit.
        """

    @abstractmethod
    def create_workspace(self) -> Workspace:
        """Allocate scratch for lookups of up to `max_keys` keys of every table at once."""

    @abstractmethod
    def adopt(self, workspace: Workspace, segments: Sequence[Segment]) -> Sequence[Segment]:
        """Bring keys and outputs onto the device, without a copy where they already are, after their producer's work."""

    @abstractmethod
    def query(self, workspace: Workspace, segments: Sequence[Segment]) -> Misses:
        """Copy resident vectors to their rows of `out`; list the rest. Duplicate keys are allowed.

        Rows of `out` that missed are left unspecified. `found`, where given, is True for hits and False for misses.
        Which order the misses have is unspecified.
        """

    @abstractmethod
    def unique(self, workspace: Workspace, misses: Misses) -> list[TableMisses]:
        """Bring the misses to the host, each key of a table once. Segments without a miss are left out."""

    @abstractmethod
    def fetch_buffer(self, workspace: Workspace, missed: TableMisses) -> FloatArray:
        """Host memory for the vectors of `missed.keys`: (u, dim) float32, pinned with CUDA; content unspecified."""

    @abstractmethod
    def stage(self, workspace: Workspace, missed: TableMisses, start: int, stop: int) -> None:
        """Rows [start, stop) of the fetch buffer are written: begin to move them to the device. Rows must not change."""

    @abstractmethod
    def scatter(self, workspace: Workspace, missed: TableMisses, found: BoolArray) -> None:
        """Write every missing position of the segment: the fetched vector where `found`, else the default vector.

        Args:
            found: (u,) bool in host memory, for `missed.keys`; the segment's own mask becomes True at their positions.
        """

    @abstractmethod
    def insert_fetched(self, workspace: Workspace, missed: TableMisses, found: BoolArray) -> None:
        """Insert the fetched vectors whose `found` is True. Absent keys are never made resident."""

    @abstractmethod
    def fill_default(self, workspace: Workspace, misses: Misses) -> None:
        """Write the default vector to every missing position of every segment."""

    @abstractmethod
    def finish(self, workspace: Workspace, segments: Sequence[Segment]) -> None:
        """Bring the outputs to where the caller wanted them; when it returns, a consumer sees them complete."""

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
        """Make vectors resident, replacing those of resident keys. Where a key stands twice, which one wins is
        unspecified. Arrays are in host memory (the CuPy cache also takes device arrays); read only, done with on return."""

    @abstractmethod
    def update(self, table: int, keys: KeyArray, vectors: FloatArray) -> None:
        """As `insert`, for keys that are resident; the others are left out, and no recency changes."""

    @abstractmethod
    def erase(self, table: int, keys: KeyArray) -> None:
        """Make keys non-resident."""

    @abstractmethod
    def dump(self, table: int) -> KeyArray:
        """The resident keys of a table, in unspecified order, as a host array that the caller owns."""

    @abstractmethod
    def stats(self, table: int) -> CacheStats:
        """Counters of a table."""

    @abstractmethod
    def close(self) -> None:
        """Free the device memory. Closing twice changes nothing."""
