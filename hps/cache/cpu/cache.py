"""The embedding cache in host memory: what serves where there is no GPU, and the CuPy cache's twin."""

import dataclasses
import os
from collections.abc import Sequence
from typing import ClassVar, Self, cast

import numpy as np

from hps.cache.base import CacheStats, EmbeddingCache, Misses, Segment, TableMisses, Workspace
from hps.cache.cpu import kernels as numpy_kernels
from hps.cache.cpu import misses as numpy_misses
from hps.cache.cpu.sets import EVICTIONS, INSERTS, LINE_WORDS, RESIDENT, STATE_WORDS, WAYS
from hps.errors import DeviceMemoryError, InvalidDtypeError, InvalidInputError, NotReadyError
from hps.numba_kernels import compile_kernels
from hps.types import BoolArray, FloatArray, IndexArray, KeyArray, TableSpec

_LINE_BYTES = 8 * LINE_WORDS
_ALL: BoolArray = np.empty(0, np.bool_)  # to a kernel: every key; no found-mask wanted


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Table:
    """The memory of one table; `numpy_sets` says what stands where. Freed with its last user."""

    spec: TableSpec
    lines: IndexArray  # (sets, 16)
    vectors: FloatArray  # (14 * sets, dim)
    state: IndexArray  # (STATE_WORDS,)


class _TableScratch:
    """Scratch of one table within a workspace. Grows to the largest lookup that it has served."""

    __slots__ = ("fetched", "inverse", "missing")

    def __init__(self, dim: int) -> None:
        self.missing: IndexArray = np.empty(0, np.int64)
        self.inverse: IndexArray = np.empty(0, np.int64)
        self.fetched: FloatArray = np.empty((0, dim), np.float32)


class NumpyWorkspace(Workspace):
    """Scratch memory of one lookup at a time. *One per thread.*"""

    __slots__ = ("hashed", "members", "ranks", "tables")

    def __init__(self, dims: Sequence[int]) -> None:
        self.tables = [_TableScratch(dim) for dim in dims]
        self.hashed: IndexArray = np.empty(0, np.int64)
        self.members: IndexArray = np.empty(0, np.int64)
        self.ranks: IndexArray = np.empty(0, np.int64)


class NumpyCache(EmbeddingCache):
    """The vectors of one model's tables that are resident in host memory. *Thread-safe*, given a workspace a caller.

    Sets of 14 keys, so a table's capacity is a multiple of 14. Queries take no lock; modifications own one set at a time.
    A table that is filled to its capacity keeps about 0.9 of its keys resident, since sets overflow unevenly.

    **Recency.** The score of a key is the epoch of its last use, and an insert into a full set evicts the smallest score;
    which of equals is unspecified. An epoch of a table lasts for as many queried keys as the table has slots; one call
    counts for at most five epochs. A hit sets the key's score to the epoch in which its call began, and writes it only when
    it differs. A key that becomes resident starts 15 epochs in the past: until it is hit, every key that was hit within
    the last 15 epochs outranks it. Replacing or updating a vector changes no score. (At alpha 1.05 and a capacity of 0.1
    of 2^20 rows this reaches 0.973 of the hit rate of perfect frequency knowledge, where plain LRU reaches 0.942;
    `benchmarks/bench_numpy_cache.py`.)

    A query that finds a set owned by a writer for very long reports its key as missing, which is always right.
    """

    device: ClassVar[str] = "cpu"

    def __init__(self, tables: Sequence[TableSpec], capacity_rows: Sequence[int]) -> None:
        compile_kernels()
        self.tables = tuple(tables)
        self.device_id = 0
        self._open: tuple[_Table, ...] | None = _allocate(tables, capacity_rows)

    @classmethod
    def create(cls, tables: Sequence[TableSpec], capacity_rows: Sequence[int], device_id: int) -> Self:
        """Allocate a cache for all tables of a model; see `EmbeddingCache.create`."""
        return cls(tables, capacity_rows)

    def create_workspace(self) -> NumpyWorkspace:
        """Make the scratch of one lookup at a time; its memory is allocated as lookups need it."""
        return NumpyWorkspace([table.dim for table in self.tables])

    def adopt(self, workspace: Workspace, segments: Sequence[Segment]) -> Sequence[Segment]:
        """Return the segments; host arrays are where they have to be, and only keys that are not aligned are copied."""
        return [
            segment if segment.keys.flags.aligned else dataclasses.replace(segment, keys=segment.keys.copy())
            for segment in segments
        ]

    def query(self, workspace: Workspace, segments: Sequence[Segment]) -> Misses:
        """Copy resident vectors to their rows of `out`; list the rest. See `EmbeddingCache.query`."""
        tables, scratches = self._tables(), cast(NumpyWorkspace, workspace).tables
        counts = []
        for segment in segments:
            table, scratch, keys, found = tables[segment.table], scratches[segment.table], segment.keys, segment.found
            if scratch.missing.size < keys.size:
                scratch.missing = np.empty(_grown(keys.size), np.int64)
            if found is None:
                found = _ALL
            try:
                count = numpy_kernels.query(table.lines, table.vectors, table.state, keys, segment.out, found, scratch.missing)
            except TypeError as error:  # numba found no kernel for these dtypes and layouts
                raise _segment_error(segment, table.spec) from error
            if count < 0:
                raise _segment_error(segment, table.spec)
            counts.append(count)
        return Misses(counts, segments)

    def unique(self, workspace: Workspace, misses: Misses) -> list[TableMisses]:
        """List the distinct missing keys of each segment, ascending. See `EmbeddingCache.unique`."""
        own = cast(NumpyWorkspace, workspace)
        return [
            TableMisses(segment, self._unique(own, segment, count), count)
            for segment, count in zip(misses.state, misses.counts, strict=True)
            if count
        ]

    def _unique(self, workspace: NumpyWorkspace, segment: Segment, count: int) -> KeyArray:
        scratch = workspace.tables[segment.table]
        size = 1 << (2 * count - 1).bit_length()
        if workspace.hashed.size < size:
            workspace.hashed = np.empty(size, np.int64)
            workspace.members = np.empty(size, np.int64)
            workspace.ranks = np.empty(size, np.int64)
        if scratch.inverse.size < count:
            scratch.inverse = np.empty(_grown(count), np.int64)
        table, members, inverse = workspace.hashed[:size], workspace.members, scratch.inverse
        distinct = numpy_misses.distinct(segment.keys, scratch.missing, count, table, members, inverse)
        ascending: KeyArray = members[:distinct].copy()
        ascending.sort()
        numpy_misses.rank(ascending, table, members, inverse, count, workspace.ranks)
        return ascending

    def fetch_buffer(self, workspace: Workspace, missed: TableMisses) -> FloatArray:
        """Scratch for the vectors of `missed.keys`: (u, dim) float32; content unspecified."""
        scratch = cast(NumpyWorkspace, workspace).tables[missed.segment.table]
        rows, dim = missed.keys.size, scratch.fetched.shape[1]
        if scratch.fetched.shape[0] < rows:
            scratch.fetched = np.empty((_grown(rows), dim), np.float32)
        return scratch.fetched[:rows]

    def stage(self, workspace: Workspace, missed: TableMisses, start: int, stop: int) -> None:
        """Do nothing: the fetch buffer is where the vectors have to be."""

    def scatter(self, workspace: Workspace, missed: TableMisses, found: BoolArray) -> None:
        """Write the fetched or the default vector to every missing position. See `EmbeddingCache.scatter`."""
        segment = missed.segment
        scratch = cast(NumpyWorkspace, workspace).tables[segment.table]
        mask = _ALL if segment.found is None else segment.found
        default = self.tables[segment.table].default_value
        numpy_misses.scatter(scratch.missing, scratch.inverse, missed.state, scratch.fetched, found, default, segment.out, mask)

    def insert_fetched(self, workspace: Workspace, missed: TableMisses, found: BoolArray) -> None:
        """Insert the fetched vectors whose `found` is True; keys that have become resident meanwhile are left alone."""
        table = self._tables()[missed.segment.table]
        fetched = cast(NumpyWorkspace, workspace).tables[missed.segment.table].fetched
        numpy_kernels.write(table.lines, table.vectors, table.state, missed.keys, fetched, found, False, True)

    def fill_default(self, workspace: Workspace, misses: Misses) -> None:
        """Write the default vector to every missing position of every segment."""
        scratches = cast(NumpyWorkspace, workspace).tables
        for segment, count in zip(misses.state, misses.counts, strict=True):
            if count:
                default = self.tables[segment.table].default_value
                numpy_misses.fill_default(scratches[segment.table].missing, count, default, segment.out)

    def finish(self, workspace: Workspace, segments: Sequence[Segment]) -> None:
        """Do nothing: the outputs are with the caller."""

    def insert(
        self,
        table: int,
        keys: KeyArray,  # (n,)
        vectors: FloatArray,  # (n, dim)
    ) -> None:
        """Make vectors resident, replacing those of resident keys. See `EmbeddingCache.insert`."""
        own = self._checked(table, keys, vectors, "inserting into")
        numpy_kernels.write(own.lines, own.vectors, own.state, keys, vectors, _ALL, True, True)

    def update(self, table: int, keys: KeyArray, vectors: FloatArray) -> None:
        """Replace the vectors of those keys that are resident. See `EmbeddingCache.update`."""
        own = self._checked(table, keys, vectors, "updating")
        numpy_kernels.write(own.lines, own.vectors, own.state, keys, vectors, _ALL, True, False)

    def erase(self, table: int, keys: KeyArray) -> None:
        """Make keys non-resident."""
        own = self._checked(table, keys, None, "erasing from")
        numpy_kernels.erase(own.lines, own.state, keys)

    def dump(self, table: int) -> KeyArray:
        """The resident keys of a table, in unspecified order, in an array that the caller owns."""
        own = self._tables()[table]
        keys: KeyArray = np.empty(own.vectors.shape[0], np.int64)
        return keys[: numpy_kernels.dump(own.lines, keys)].copy()

    def stats(self, table: int) -> CacheStats:
        """Counters of a table. `inserts` counts keys that became resident."""
        own = self._tables()[table]
        return CacheStats(
            capacity_rows=own.vectors.shape[0],
            resident_rows=int(own.state[RESIDENT]),
            inserts=int(own.state[INSERTS]),
            evictions=int(own.state[EVICTIONS]),
            size_bytes=own.lines.nbytes + own.vectors.nbytes + own.state.nbytes,
        )

    def close(self) -> None:
        """Let the memory go; calls that are running keep it until they return. Closing twice changes nothing."""
        self._open = None

    def _tables(self) -> tuple[_Table, ...]:
        tables = self._open
        if tables is None:
            raise NotReadyError("using an embedding cache that is closed")
        return tables

    def _checked(self, index: int, keys: KeyArray, vectors: FloatArray | None, doing: str) -> _Table:
        """The table, once the arrays are known to be what the kernels take on trust."""
        table = self._tables()[index]
        name, dim = table.spec.tag, table.spec.dim
        _check_array(keys, np.dtype(np.int64), f"{doing} the cached table {name}: keys")
        if vectors is not None:
            _check_array(vectors, np.dtype(np.float32), f"{doing} the cached table {name}: vectors")
        if keys.ndim != 1 or (vectors is not None and vectors.shape != (keys.size, dim)):
            got = f"keys {keys.shape}" + ("" if vectors is None else f", vectors {vectors.shape}")
            raise InvalidInputError(f"{doing} the cached table {name}: got {got}, wanted keys (n,), vectors (n, {dim})")
        return table


def _check_array(array: np.ndarray, dtype: np.dtype, what: str) -> None:
    if array.dtype != dtype:
        raise InvalidDtypeError(f"{what}: got dtype {array.dtype}, wanted {dtype}")
    if not (array.flags.c_contiguous and array.flags.aligned):
        raise InvalidInputError(f"{what}: got an array that is not C-contiguous and aligned; copy it first")


def _segment_error(segment: Segment, table: TableSpec) -> InvalidInputError:
    arrays = {"keys": segment.keys, "out": segment.out} | ({} if segment.found is None else {"found": segment.found})
    got = ", ".join(f"{name} {array.dtype}{array.shape}" for name, array in arrays.items())
    return InvalidInputError(
        f"querying the cached table {table.tag}: got {got}; wanted C-contiguous, aligned keys int64(n,), "
        f"out float32(n, {table.dim}) writable, found bool(n,) or None"
    )


def _grown(size: int) -> int:
    return max(1024, 1 << (size - 1).bit_length())


def _allocate(tables: Sequence[TableSpec], capacity_rows: Sequence[int]) -> tuple[_Table, ...]:
    """Allocate all tables, or say which of them asks for how much and what would fit."""
    sets = [-(-rows // WAYS) for rows in capacity_rows]
    sizes = [count * (_LINE_BYTES + WAYS * 4 * table.dim) for count, table in zip(sets, tables, strict=True)]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        if sum(sizes) > memory:  # it could be reserved, but not be filled
            raise MemoryError
        return tuple(
            _Table(
                spec=table,
                lines=_aligned_lines(count),
                vectors=_aligned_vectors(WAYS * count, table.dim),
                state=np.zeros(STATE_WORDS, np.int64),
            )
            for count, table in zip(sets, tables, strict=True)
        )
    except MemoryError:
        largest = max(range(len(sizes)), key=sizes.__getitem__)
        share = memory / sum(sizes)
        raise DeviceMemoryError(
            f"allocating the embedding cache of model {tables[0].model_name!r}: got {sum(sizes):,} bytes to allocate, most of "
            f"them ({sizes[largest]:,}) for {WAYS * sets[largest]:,} rows of table {tables[largest].table_name!r}, wanted "
            f"less than the {memory:,} bytes of this machine; a gpucacheper of at most {share:.2g} times this one would fit"
        ) from None


def _aligned_lines(sets: int) -> IndexArray:
    """Zeroed memory for the sets, each within its own two cache lines."""
    words = np.zeros((sets + 1) * LINE_WORDS, np.int64)
    skip = -(words.ctypes.data // 8) % LINE_WORDS
    return words[skip : skip + sets * LINE_WORDS].reshape(sets, LINE_WORDS)


def _aligned_vectors(rows: int, dim: int) -> FloatArray:
    """Memory for vectors that begin with a cache line, so that rows of 64 bytes take one and not two."""
    floats = np.empty(rows * dim + _LINE_BYTES // 4, np.float32)
    skip = -(floats.ctypes.data // 4) % (_LINE_BYTES // 4)
    return floats[skip : skip + rows * dim].reshape(rows, dim)
