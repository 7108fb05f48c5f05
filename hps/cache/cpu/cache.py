"""The embedding cache in host memory: serves without a GPU, and is the CuPy cache's twin."""

import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from hps.cache.base import (
    ALONE,
    BatchAnswers,
    BatchDriver,
    CacheLookup,
    CacheStats,
    DeviceMemory,
    DeviceSharing,
    MissedKeys,
    StaticTables,
    static_sets,
)
from hps.cache.cpu import kernels as numpy_kernels
from hps.cache.cpu.pooling import WRONG_OFFSETS, pool
from hps.cache.cpu.sets import EPOCHS_A_CALL, EVICTIONS, INSERTS, LINE_BYTES, LINE_WORDS, RESIDENT, STATE_WORDS, UNPLACED, WAYS
from hps.cache.integrity import check_keys_of_sets, hashes_of, second_sets
from hps.errors import DeviceMemoryError, InvalidInputError
from hps.ground.kernels.numba_kernels import compile_kernels
from hps.ground.key_sets import PIECE_KEYS, SHARED_KEYS, DistinctKeys, distinct_kernels
from hps.ground.memory.capacity import Need, available_memory, by_purpose, check_fits, machine_memory
from hps.ground.rows import decode
from hps.ground.threads.lifetimes import disown_in_children, refusal
from hps.ground.threads.thread_pool import POOL
from hps.regions.loop_state import LoopState
from hps.tensors.array_checks import check_keys, check_rows
from hps.tensors.bags import Pooling
from hps.tensors.batch import Batch, check_host_arrays
from hps.tensors.pooling import bag_arrays, first_key, pool_rows
from hps.types import ROW_DTYPES, BoolArray, FloatArray, IndexArray, KeyArray, RowArray, TableSpec, rows_text

_LINE_BYTES = 8 * LINE_WORDS
_ALL: BoolArray = np.empty(0, np.bool_)  # for kernels: all keys are chosen; no found-mask


@dataclass(frozen=True, slots=True, eq=False)
class NumpyTable:
    """The memory of one table; `cpu/sets.py` describes its layout. Freed with its last user."""

    spec: TableSpec
    lines: IndexArray  # (sets, 16)
    vectors: RowArray  # (14 * sets, width)
    state: IndexArray  # (STATE_WORDS,), or (STATE_WORDS + sets,) if static
    dtype: int  # of the rows, as kernels know it


class NumpyCache(StaticTables, BatchAnswers):
    """The vectors of one model's tables that are resident in host memory. *Thread-safe*; its lookups are not.

    A set holds 14 keys, so a table's capacity is a multiple of 14. Queries take no lock; modifications own one set at a time. A
    table filled to capacity keeps about 0.9 of its keys resident, because sets overflow unevenly.

    **Recency.** The score of a key is the epoch of its last use, and an insert into a full set evicts the smallest score; ties
    are broken arbitrarily. An epoch of a table lasts for as many queried keys as the table has slots; one call counts for at
    most five epochs. A hit sets the key's score to the epoch in which its call began, and writes it only if it differs. A key
    that becomes resident starts 15 epochs in the past: until it is hit, every key hit within the last 15 epochs outranks it. A
    missed key is refused rather than evict one of these. Replacing or updating a vector changes no score. (At alpha 1.05 and a
    capacity of 0.1 of 2^20 rows this reaches 0.973 of the hit rate of perfect frequency knowledge, where plain LRU reaches
    0.942; `benchmarks/bench_numpy_cache.py`.)

    A query that finds a set owned by a writer for too long reports its key as missing, which is always correct.
    """

    device: ClassVar[str] = "cpu"

    def __init__(self, tables: Sequence[TableSpec], capacity_rows: Sequence[int], static: bool = False) -> None:
        compile_kernels(*self.kernels())
        self.static = static
        self.tables = tuple(tables)
        self.device_id = 0
        self._open: tuple[NumpyTable, ...] | None = _allocate(tables, capacity_rows, static)
        disown_in_children(self)

    @classmethod
    def kernels(cls) -> Sequence[Callable[..., Any]]:
        rows = numpy_kernels.query, numpy_kernels.write, numpy_kernels.scatter, numpy_kernels.settle, *distinct_kernels()
        return *rows, pool, pool_rows, numpy_kernels.erase, numpy_kernels.dump

    @classmethod
    def batch_kernels(cls) -> Sequence[Callable[..., Any]]:
        from hps.cache.cpu.batches import run  # which imports this module

        return (run,)

    @classmethod
    def batches(cls, loop: LoopState) -> BatchDriver:
        from hps.cache.cpu.batches import NumpyBatches  # which imports this module

        return NumpyBatches(loop)

    @classmethod
    def room_for(
        cls,
        tables: Sequence[TableSpec],
        capacity_rows: Sequence[int],
        static: bool = False,
        sharing: DeviceSharing = ALONE,
    ) -> list[Need]:
        return [
            Need(
                "ram",
                f"{rows:,} rows of table {table.table_name!r} ({rows_text(table)})",
                _size_bytes(rows, table.width, static),
                table.table_name,
            )
            for table, rows in zip(tables, capacity_rows, strict=True)
        ]

    @classmethod
    def check_room(
        cls,
        tables: Sequence[TableSpec],
        capacity_rows: Sequence[int],
        device_id: int,
        static: bool = False,
        index_bytes: Sequence[int] = (),
        sharing: DeviceSharing = ALONE,
    ) -> None:
        check_fits(
            f"making room for the embedding cache of model {tables[0].model_name!r}",
            by_purpose(cls.room_for(tables, capacity_rows, static)),
            *available_memory(),
            "lower gpucacheper, undeploy models or versions, or give the process more memory",
        )

    @classmethod
    def create(
        cls,
        tables: Sequence[TableSpec],
        capacity_rows: Sequence[int],
        device_id: int,
        static: bool = False,
        sharing: DeviceSharing = ALONE,
    ) -> Self:
        return cls(tables, capacity_rows, static)

    def create_lookup(self) -> "NumpyLookup":
        return NumpyLookup(self)

    def insert(
        self,
        table: int,
        keys: KeyArray,  # (n,)
        rows: RowArray,  # (n, width)
    ) -> None:
        memory = self.open_tables()[table]
        check_rows(f"inserting into the cached table {memory.spec.tag}", keys, rows, memory.spec.width, aligned=True)
        _insert(memory, keys, rows, _ALL, replace=True)

    def update(self, table: int, keys: KeyArray, rows: RowArray) -> None:
        memory = self.open_tables()[table]
        check_rows(f"updating the cached table {memory.spec.tag}", keys, rows, memory.spec.width, aligned=True)
        numpy_kernels.write(memory.lines, memory.vectors, memory.state, keys, rows, _ALL, True, False)

    def erase(self, table: int, keys: KeyArray) -> None:
        memory = self.open_tables()[table]
        check_keys(f"erasing from the cached table {memory.spec.tag}", keys, aligned=True)
        numpy_kernels.erase(memory.lines, memory.state, keys)

    def dump(self, table: int) -> KeyArray:
        memory = self.open_tables()[table]
        keys: KeyArray = np.empty(memory.vectors.shape[0], np.int64)
        return keys[: numpy_kernels.dump(memory.lines, keys)].copy()

    def stats(self, table: int) -> CacheStats:
        """Return the counters of a table. `inserts` counts keys that became resident."""
        memory = self.open_tables()[table]
        return CacheStats(
            capacity_rows=memory.vectors.shape[0],
            resident_rows=int(memory.state[RESIDENT]),
            inserts=int(memory.state[INSERTS]),
            evictions=int(memory.state[EVICTIONS]),
            size_bytes=memory.lines.nbytes + memory.vectors.nbytes + memory.state.nbytes,
            unplaced=int(memory.state[UNPLACED]),
        )

    def check_integrity(self) -> list[str]:
        findings = []
        for table in self.open_tables():
            lines = table.lines.copy()
            ages = lines.view(np.uint8).reshape(-1, LINE_BYTES)[:, 2 : 2 + WAYS]
            sets, slots = np.nonzero(ages)
            keys = lines[sets, 2 + slots]
            hashes = hashes_of(keys)
            homes = (hashes >> np.uint64(32)) * np.uint64(len(lines)) >> np.uint64(32)
            away = homes != sets
            misplaced = int(np.count_nonzero(away))
            if self.static:
                misplaced = int(np.count_nonzero(away & (second_sets(hashes, homes, len(lines)) != sets)))
            owned = int(np.count_nonzero(lines.view(np.uint16).reshape(-1, LINE_BYTES // 2)[:, 0] & 1))
            findings += check_keys_of_sets(table.spec.tag, keys, owned, misplaced, int(table.state[RESIDENT]))
            if self.static:
                strays = np.bincount(homes[away].astype(np.int64), minlength=len(lines))
                if wrong := np.count_nonzero(strays != table.state[STATE_WORDS:]):
                    findings.append(f"cached table {table.spec.tag}: {wrong} sets count a wrong number of strays")
        return findings

    def device_memory(self) -> DeviceMemory:
        """Return the memory of the machine, and what this process may still allocate."""
        return DeviceMemory(platform.processor() or platform.machine(), machine_memory(), available_memory()[0])

    def close(self) -> None:
        """Release the memory; running calls keep it until they return. Idempotent."""
        self._open = None

    def disown(self) -> None:
        """Refuse every call in a forked child: inserts of the parent would never arrive here."""
        self.close()

    def open_tables(self) -> tuple[NumpyTable, ...]:
        """Return the tables; the caller holds them while it uses them.

        Raises:
            NotReadyError: the cache is closed.
        """
        tables = self._open
        if tables is None:
            raise refusal(self, "an embedding cache")
        return tables


class _TableScratch:
    """Scratch of one table within a lookup. Grows to the largest lookup that it served."""

    __slots__ = ("fetched", "inverse", "missing", "unpooled", "vectors")

    def __init__(self, width: int) -> None:
        self.missing: IndexArray = np.empty(0, np.int64)  # positions of the keys that missed
        self.inverse: IndexArray = np.empty(0, np.int64)  # for each of them: the index of its key among the distinct ones
        self.fetched: RowArray = np.empty((0, width), np.float32)
        self.vectors: FloatArray = self.fetched  # of the fetched rows, where they are to be pooled
        self.unpooled = 0  # positions of available vectors, to be added to their bags


class NumpyLookup(CacheLookup):
    """A lookup on the NumPy cache. *One per thread.*"""

    __slots__ = ("_batch", "_cache", "_distinct", "_scratches")

    def __init__(self, cache: NumpyCache) -> None:
        super().__init__()
        self._cache = cache
        self._batch: Batch | None = None  # until `finish`, if keys were missing
        self._scratches = [_TableScratch(table.width) for table in cache.tables]
        self._distinct = DistinctKeys()

    def query(self, batch: Batch) -> int:
        tables, scratches = self._cache.open_tables(), self._scratches
        sizes, columns, outs, founds, poolings = batch.sizes, batch.keys, batch.outs, batch.founds, batch.poolings
        counts: list[int] = []
        absent: list[int] = []
        for place, index in enumerate(batch.tables):
            table, scratch, n, keys, out = tables[index], scratches[index], sizes[place], columns[place], outs[place]
            found = _ALL if not founds or (mask := founds[place]) is None else mask
            if scratch.missing.size < n:
                scratch.missing = np.empty(_grown(n), np.int64)
            missing = scratch.missing
            try:
                if poolings:
                    scratch.unpooled = 0
                    count = _query_bags(table, keys, out, n, poolings[place], missing)
                elif n < SHARED_KEYS:
                    lines, vectors, state = table.lines, table.vectors, table.state
                    count = numpy_kernels.query(lines, vectors, state, keys, out, found, missing, table.spec.dim, table.dtype)
                else:
                    count = _query_by_threads(table, keys, out, found, missing)
            except TypeError:  # numba found no kernel for these dtypes and layouts
                count = -1
            if count == WRONG_OFFSETS:
                raise InvalidInputError(
                    f"querying the cached table {table.spec.tag}: got offsets that do not begin with 0, fall, or do not end "
                    f"with {n}, the number of keys"
                )
            if count < 0:
                check_host_arrays(f"querying the cached table {table.spec.tag}", batch, place, n, table.spec.dim)
                if keys.flags.aligned:
                    raise InvalidInputError(f"querying the cached table {table.spec.tag}: expected NumPy arrays")
                return self.query(_with_aligned_keys(batch))
            if count and self._cache.complete and not poolings:
                left, settled = divmod(_settle(table, keys, out, found, missing, count), 1 << 32)
                # Complete before and after the search, so keys that were not resident are absent.
                if self._cache.complete:
                    absent = absent or [0] * len(batch.tables)
                    absent[place], count = settled, left
            counts.append(count)
        left = sum(counts)
        self.absent = absent if any(absent) else ()
        self._batch, self.counts, self.padding = batch if left else None, counts, ()
        if poolings:
            self.padding = _paddings(batch)
        return left

    def unique(self) -> Sequence["NumpyMissedKeys"]:
        if (batch := self._batch) is None:
            return ()
        return [
            NumpyMissedKeys(self._cache, batch, place, self._distinct_keys(batch, place, count), self._scratches, count)
            for place, count in enumerate(self.counts)
            if count
        ]

    def finish(self) -> None:
        """Add fetched vectors to their bags, and release the arrays."""
        if (batch := self._batch) is not None and batch.poolings:
            for place, table in enumerate(batch.tables):
                if (scratch := self._scratches[table]).unpooled:
                    _add_fetched(batch.keys[place], batch.outs[place], batch.poolings[place], scratch)
        self._batch = None

    def _distinct_keys(self, batch: Batch, place: int, count: int) -> KeyArray:
        scratch = self._scratches[batch.tables[place]]
        if scratch.inverse.size < count:
            scratch.inverse = np.empty(_grown(count), np.int64)
        return self._distinct.find(batch.keys[place], scratch.missing[:count], scratch.inverse)


class NumpyMissedKeys(MissedKeys):
    """The distinct missing keys of one table of a `NumpyLookup`, with the scratch of that table."""

    __slots__ = ("_batch", "_cache", "_count", "_place", "_scratch")

    def __init__(
        self, cache: NumpyCache, batch: Batch, place: int, keys: KeyArray, scratches: Sequence[_TableScratch], count: int
    ) -> None:
        self.table = batch.tables[place]
        self.keys = keys
        self._batch = batch
        self._place = place  # of the table in the batch
        self._cache = cache
        self._scratch = scratches[self.table]
        self._count = count  # with duplicates

    def buffer(self) -> RowArray:
        """Return scratch for the rows of `keys`: (u, width); content unspecified."""
        scratch, rows = self._scratch, self.keys.size
        if scratch.fetched.shape[0] < rows:
            scratch.fetched = np.empty((_grown(rows), scratch.fetched.shape[1]), np.float32)
        return scratch.fetched[:rows]

    def stage(self, start: int, stop: int) -> None:
        """Do nothing: the vectors are already in place."""

    def scatter(self, found: BoolArray) -> None:
        batch, scratch, table = self._batch, self._scratch, self._cache.tables[self.table]
        default = table.default_value
        if batch.poolings:
            scratch.vectors = decode(self.buffer(), table.dim, table.row_dtype)
            scratch.vectors[~found] = default
            scratch.unpooled = self._count
            return
        missing, inverse, fetched, out = scratch.missing, scratch.inverse, scratch.fetched, batch.outs[self._place]
        mask = _ALL if not batch.founds or (found_mask := batch.founds[self._place]) is None else found_mask
        dtype = ROW_DTYPES.index(table.row_dtype)
        if self._count < SHARED_KEYS:
            numpy_kernels.scatter(missing, inverse, self._count, fetched, found, default, out, mask, dtype)
            return

        def part(start: int, stop: int) -> None:
            at, rows = missing[start:stop], inverse[start:stop]
            numpy_kernels.scatter(at, rows, stop - start, fetched, found, default, out, mask, dtype)

        POOL.run(self._count, PIECE_KEYS, part)

    def absent(self, found: BoolArray) -> int:
        return self._count - int(np.count_nonzero(found[self._scratch.inverse[: self._count]]))

    def insert(self, found: BoolArray) -> None:
        table = self._cache.open_tables()[self.table]
        if self._cache.static:
            return
        _insert(table, self.keys, self._scratch.fetched, found, replace=False)


def _insert(table: NumpyTable, keys: KeyArray, values: RowArray, chosen: BoolArray, replace: bool) -> None:
    lines, rows, state = table.lines, table.vectors, table.state
    if keys.size < SHARED_KEYS:
        numpy_kernels.write(lines, rows, state, keys, values, chosen, replace, True)
        return

    def part(start: int, stop: int) -> None:
        piece = slice(start, stop)
        numpy_kernels.write(lines, rows, state, keys[piece], values[piece], chosen[piece], replace, True)

    POOL.run(keys.size, PIECE_KEYS, part)


def _settle(table: NumpyTable, keys: KeyArray, out: FloatArray, found: BoolArray, missing: IndexArray, count: int) -> int:
    arrays = (table.lines, table.vectors, table.state, keys, missing, count)
    left: int = numpy_kernels.settle(*arrays, table.spec.default_value, out, found, table.dtype)
    return left


def _query_by_threads(table: NumpyTable, keys: KeyArray, out: FloatArray, found: BoolArray, missing: IndexArray) -> int:
    """Run the kernel `query` for many keys, in pieces with an epoch each."""
    n = keys.size
    lines, vectors, state, dim, dtype = table.lines, table.vectors, table.state, table.spec.dim, table.dtype
    if out.shape[0] != n or found.size not in (0, n) or n > EPOCHS_A_CALL * vectors.shape[0]:
        misses: int = numpy_kernels.query(lines, vectors, state, keys, out, found, missing, dim, dtype)
        return misses
    counts: dict[int, int] = {}

    def part(start: int, stop: int) -> None:
        rows = slice(start, stop)
        arrays = lines, vectors, state, keys[rows], out[rows], found[rows], missing[rows]
        counts[start] = numpy_kernels.query(*arrays, dim, dtype)

    POOL.run(n, PIECE_KEYS, part)
    if min(counts.values()) < 0:
        return -1
    total = 0
    for start, count in sorted(counts.items()):
        np.add(missing[start : start + count], start, out=missing[total : total + count])
        total += count
    return total


def _paddings(batch: Batch) -> Sequence[int]:
    """Return the number of padding keys of each table; empty if none has a padding key."""
    paddings = [pooling.padding_key for pooling in batch.poolings]
    if paddings.count(None) == len(paddings):
        return ()
    return [
        0 if padding is None else int(np.count_nonzero(keys == padding))
        for keys, padding in zip(batch.keys, paddings, strict=True)
    ]


def _query_bags(table: NumpyTable, keys: KeyArray, out: FloatArray, n: int, pooling: Pooling, missing: IndexArray) -> int:
    """Run the kernel `pool`; threads share the bags of many keys."""
    bags, count = bag_arrays(pooling), pooling.count
    if out.shape[0] != count or out.ndim != 2 or out.shape[1] != table.spec.dim:
        return -1
    lines, vectors, state, dtype = table.lines, table.vectors, table.state, table.dtype
    scratch_shape = 3, max(table.spec.dim, table.spec.width)
    if n < SHARED_KEYS or n > EPOCHS_A_CALL * vectors.shape[0]:
        scratch = np.empty(scratch_shape, np.float32)
        misses: int = pool(lines, vectors, state, keys, *bags, 0, count, scratch, out, missing, dtype)
        return misses
    counts: dict[int, int] = {}  # by the first bag of a piece

    def part(first: int, last: int) -> None:
        scratch = np.empty(scratch_shape, np.float32)
        counts[first] = pool(lines, vectors, state, keys, *bags, first, last, scratch, out, missing, dtype)

    POOL.run(count, max(1, PIECE_KEYS * count // n), part)
    if (worst := min(counts.values())) < 0:
        return worst
    total = 0
    for first, misses in sorted(counts.items()):
        start = first_key(bags, first, n)
        missing[total : total + misses] = missing[start : start + misses]
        total += misses
    return total


def _add_fetched(keys: KeyArray, out: FloatArray, pooling: Pooling, scratch: _TableScratch) -> None:
    """Add the vectors of missing keys to the totals of their bags; threads share the bags of many keys."""
    bags, missing = bag_arrays(pooling), scratch.missing[: scratch.unpooled]

    def part(first: int, last: int) -> None:
        start, stop = np.searchsorted(missing, [first_key(bags, bag, keys.size) for bag in (first, last)])
        total = np.empty(out.shape[1], np.float32)
        pool_rows(scratch.vectors, scratch.inverse, missing, start, stop, keys, *bags, total, out)

    POOL.run(out.shape[0], max(1, PIECE_KEYS * out.shape[0] // missing.size) if missing.size >= SHARED_KEYS else 0, part)


def _with_aligned_keys(batch: Batch) -> Batch:
    keys = [array if array.flags.aligned else array.copy() for array in batch.keys]
    return Batch(batch.tables, batch.sizes, keys, batch.outs, batch.founds, batch.poolings)


def _grown(size: int) -> int:
    return max(1024, 1 << (size - 1).bit_length())


def _sets(rows: int, static: bool = False) -> int:
    return static_sets(rows) if static else -(-rows // WAYS)


def _size_bytes(rows: int, width: int, static: bool = False) -> int:
    return _sets(rows, static) * (_LINE_BYTES + WAYS * 4 * width + 8 * static)


def _allocate(tables: Sequence[TableSpec], capacity_rows: Sequence[int], static: bool) -> tuple[NumpyTable, ...]:
    """Allocate all tables; if they do not fit, the error names the largest and a size that would fit."""
    sets = [_sets(rows, static) for rows in capacity_rows]
    sizes = [_size_bytes(rows, table.width, static) for rows, table in zip(capacity_rows, tables, strict=True)]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        # Linux overcommits: an allocation beyond the machine's memory succeeds, and the process is killed when it fills it.
        if sum(sizes) > memory:
            raise MemoryError
        return tuple(
            NumpyTable(
                spec=table,
                lines=aligned_lines(count),
                vectors=_aligned_vectors(WAYS * count, table.width),
                state=np.zeros(STATE_WORDS + count * static, np.int64),
                dtype=ROW_DTYPES.index(table.row_dtype),
            )
            for count, table in zip(sets, tables, strict=True)
        )
    except MemoryError:
        largest = max(range(len(sizes)), key=sizes.__getitem__)
        share = memory / sum(sizes)
        raise DeviceMemoryError(
            f"allocating the embedding cache of model {tables[0].model_name!r}: got {sum(sizes):,} bytes to allocate, most of "
            f"them ({sizes[largest]:,}) for {WAYS * sets[largest]:,} rows of table {tables[largest].table_name!r}, expected "
            f"less than the {memory:,} bytes of this machine; a gpucacheper of at most {share:.2g} times this one would fit"
        ) from None


def aligned_lines(sets: int) -> IndexArray:
    """Return zeroed memory for the sets, each within its own two cache lines."""
    words = np.zeros((sets + 1) * LINE_WORDS, np.int64)
    skip = -(words.ctypes.data // 8) % LINE_WORDS
    return words[skip : skip + sets * LINE_WORDS].reshape(sets, LINE_WORDS)


def _aligned_vectors(rows: int, width: int) -> RowArray:
    """Return memory for rows that starts at a cache line, so that a row of 64 bytes takes one line rather than two."""
    floats = np.empty(rows * width + _LINE_BYTES // 4, np.float32)
    skip = -(floats.ctypes.data // 4) % (_LINE_BYTES // 4)
    return floats[skip : skip + rows * width].reshape(rows, width)
