"""The compiled kernels of lookups on a CUDA device, and the launches of queries.

Queries of the same tables and numbers of keys differ only in the addresses of their tensors, so the other arguments are packed
once: packing takes most of the host's time in a lookup of many tables.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial, reduce
from operator import or_
from typing import TypeAlias

import numpy as np

from hps.cache.cuda import kernels, structs
from hps.cache.cuda.device import Arguments, DeviceTable, kernels_of, launch
from hps.cache.cuda.kernels import Kernel, Kind, Rows, Shape, outputs_code
from hps.cache.cuda.repeats import Repeat
from hps.cache.cuda.tensors import Placement
from hps.tensors.bags import Arithmetic

Geometry: TypeAlias = list[tuple[int, int, int, int]]
"""By table: units of a row, addresses of buckets and rows, pairs."""

_WARPS = kernels.QUERY_THREADS // 32
_MAX_LAUNCHES = 64
_MAX_SHAPES = 1 << 10  # sets of tables whose kernel is remembered


class LookupKernels:
    """The compiled kernels and table geometry for a cache's lookups. *Thread-safe.*

    Attributes:
        rows: by table, how its rows are stored.
        geometry: by table: addresses of buckets and rows, pairs.
        structs: by table, what `structs.TABLE` packs.
    """

    def __init__(self, device_id: int, tables: Sequence[DeviceTable], kind: Kind = kernels.DYNAMIC) -> None:
        self._compiled = kernels_of(device_id)
        self._kind = kind
        self.rows = [Rows.of(table.spec) for table in tables]
        self.geometry = [(table.buckets_on(device_id), table.rows, table.pairs) for table in tables]
        self.structs = [structs.TABLE.unpack(table.packed) for table in tables]
        if kind.static:  # lookups make nothing resident
            self.structs = [(*struct[:5], 0, *struct[6:]) for struct in self.structs]
        self.query_of = lru_cache(_MAX_SHAPES)(self._query_of)
        self.answer_of = lru_cache(_MAX_SHAPES)(self._answer_of)
        self.scatter = lru_cache(_MAX_SHAPES)(self._scatter)
        self.pool = lru_cache(_MAX_SHAPES)(self._pool)

    def needed(self) -> list[Kernel]:
        """Return the kernels for lookups of aligned outputs; others are compiled on first use."""
        return kernels.lookup_kernels(self.rows, self._kind)

    def for_links(self, files: bool = False) -> list[Kernel]:
        return kernels.link_kernels(self.rows, self._kind, files=files)

    def _query_of(
        self, tables: tuple[int, ...], alignment: int, *, few: bool, settles: bool = False
    ) -> tuple[int, int, Geometry]:
        """Return what queries of the same tables have in common, compiled on first use and cached by `query_of`.

        Args:
            tables: at most SEGMENTS_AT_ONCE.
            alignment: see `kernels.outputs_code`.
            few, settles: see `kernels.query_kernel`.

        Returns:
            Handle of the kernel, its widest row, and the geometry of each table.
        """
        shape = self.shape_of(tables, alignment)
        handle = self._compiled.handle(kernels.query_kernel(shape, self._kind, settles=settles, few=few))
        return handle, shape.widest, [(shape.units(self.rows[table]), *self.geometry[table]) for table in tables]

    def shape_of(self, tables: Sequence[int], alignment: int) -> Shape:
        return kernels.shape_of(self.rows, tables, alignment)

    def _answer_of(self, name: str, tables: tuple[int, ...], alignment: int, files: bool = False) -> tuple[int, Shape, int]:
        """Return handle, shape and threads of a kernel of `cuda/answer.cu`, cached by `answer_of`."""
        shape = self.shape_of(tables, alignment)._replace(files=files)
        return self._compiled.handle(kernels.answer_kernel(name, shape, self._kind)), shape, kernels.answer_threads(shape)

    def _scatter(self, shape: Shape) -> int:
        return self._compiled.handle(kernels.scatter_kernel(shape))

    def _pool(self, name: str, shape: Shape, arithmetic: Arithmetic) -> int:
        return self._compiled.handle(kernels.pool_kernel(name, shape, arithmetic, self._kind))

    def batch_kernels(self, shape: Shape) -> tuple[int, int]:
        """Return the handles of `query` and `answer` for the requests of frontends."""
        query, answer = kernels.query_kernel(shape, self._kind), kernels.answer_kernel("answer", shape, self._kind)
        return self._compiled.handle(query), self._compiled.handle(answer)

    def handle(self, kernel: Kernel) -> int:
        return self._compiled.handle(kernel)


class _Launch:
    """A packed query: segments of the same tables and numbers of keys, without masks. *One per thread.*

    Attributes:
        keys, outs: (segments with keys,) uint64: the addresses of their tensors in `arguments`.
        places: positions of those segments.
        key_offsets, out_offsets: (segments with keys,) uint64, in bytes, where the tensors of all tables are one.
        repeat: the same for other tensors, aligned and of float32; None where a table has no keys.
    """

    __slots__ = ("arguments", "blocks", "handle", "key_offsets", "keys", "out_offsets", "outs", "places", "repeat")

    def __init__(
        self, handle: int, blocks: int, arguments: Arguments, sizes: Sequence[int], dims: Sequence[int], element: int
    ) -> None:
        self.handle = handle
        self.blocks = blocks
        self.arguments = arguments
        self.places = [place for place, n in enumerate(sizes) if n]
        count, strides = len(self.places), (structs.SEGMENT.size,)
        self.keys: np.ndarray = np.ndarray((count,), np.uint64, arguments.bytes, structs.SEGMENT.offsets["keys"], strides)
        self.outs: np.ndarray = np.ndarray((count,), np.uint64, arguments.bytes, structs.SEGMENT.offsets["out"], strides)
        rows = np.array(sizes, np.uint64)
        size_bytes = rows * np.array(dims, np.uint64) * element
        self.key_offsets = (8 * (rows.cumsum() - rows))[self.places]
        self.out_offsets = (size_bytes.cumsum() - size_bytes)[self.places]
        self.repeat = Repeat(handle, blocks, arguments).of_tables(sizes, dims) if all(sizes) else None


class Queries:
    """Launches the queries of one lookup at a time. *One per thread.*

    Args:
        dims: of the tables, by id.
        defaults: by table, the bits of the default value, if the queries settle misses; see `kernels.query_kernel`.
    """

    def __init__(self, dims: Sequence[int], compiled: LookupKernels, defaults: Sequence[int] = ()) -> None:
        self._dims = dims
        self._defaults = defaults
        self._query_of = partial(compiled.query_of, settles=bool(defaults))
        self._arguments = {segments: _arguments_of(segments) for segments in (1, kernels.SEGMENTS_AT_ONCE)}
        self._launches: dict[tuple[object, ...], _Launch] = {}
        # Of kept batches: handle, blocks and arguments of each kernel.
        self._packed_batches: dict[Placement, list[tuple[int, int, Arguments]]] = {}
        # Of kept batches that are one launch, and of few and of more keys of a table.
        self._repeats: dict[Placement | tuple[int, bool], Repeat] = {}
        self._lists = (0, 0, 0, 0)
        self._capacity = 0

    def use(self, missing_keys: int, missing_positions: int, missing_counts: int, any_missing: int, capacity: int) -> None:
        """Set the addresses that queries write their misses to, and the number of misses that fit there."""
        self._lists = (missing_keys, missing_positions, missing_counts, any_missing)
        self._capacity = capacity
        self._launches.clear()
        self._packed_batches.clear()
        self._repeats.clear()

    def repeat_of(self, placed: Placement | None) -> Repeat | None:
        """Return the launch of a kept batch; None if it was not placed or launched yet, or is several launches."""
        return None if placed is None else self._repeats.get(placed)

    def repeat_of_one(self, table: int, n: int) -> Repeat:
        """Return the launch of about n keys of one table, to aligned outputs of float32 without a mask."""
        few = n <= kernels.FEW_KEYS
        found = self._repeats.get((table, few))
        if found is None:
            [launched] = self._packed(Placement((table,), (1 if few else kernels.FEW_KEYS + 1,), (0,), (0,)), _arguments_of)
            found = self._repeats[table, few] = Repeat(*launched).of_one_table(self._dims[table], self._capacity)
        return found

    def repeat_of_tables(self, tables: Sequence[int], sizes: Sequence[int], *, joined: bool) -> Repeat | None:
        """Return the launch of keys of several tables, likewise; None if there was none of these numbers of keys."""
        kind = (kernels.ALIGNED, *sizes) if joined else (kernels.ALIGNED, tuple(tables), *sizes)
        found = self._launches.get(kind)
        return None if found is None else found.repeat

    def launch(self, placed: Placement, stream: int) -> None:
        """Launch the query of all tables: one kernel for every SEGMENTS_AT_ONCE of them."""
        if placed.kept:
            for handle, blocks, arguments in self._packed_batches.get(placed) or self._pack_once(placed):
                launch(handle, blocks, kernels.QUERY_THREADS, arguments, stream)
            return
        count = len(placed.sizes)
        if 1 < count <= kernels.SEGMENTS_AT_ONCE and not placed.founds:
            self._launch_reused(placed, stream)
            return
        if count == 1:
            self._launch_single(placed, stream)
            return
        for handle, blocks, arguments in self._packed(placed.by_table(self._dims), lambda segments: self._arguments[segments]):
            launch(handle, blocks, kernels.QUERY_THREADS, arguments, stream)

    def _pack_once(self, placed: Placement) -> list[tuple[int, int, Arguments]]:
        """Pack the queries of a placement that later lookups reuse."""
        if len(self._packed_batches) == _MAX_LAUNCHES:
            oldest = next(iter(self._packed_batches))
            del self._packed_batches[oldest]
            self._repeats.pop(oldest, None)
        packed = self._packed_batches[placed] = list(self._packed(placed, _arguments_of))
        if len(packed) == 1:
            self._repeats[placed] = Repeat(*packed[0])
        return packed

    def _packed(self, rows: Placement, arguments_of: Callable[[int], Arguments]) -> Iterator[tuple[int, int, Arguments]]:
        """Pack the queries of any number of segments; yield handle, blocks and arguments of each kernel."""
        missing = 0
        for first in range(0, len(rows.sizes), kernels.SEGMENTS_AT_ONCE):
            part = slice(first, first + kernels.SEGMENTS_AT_ONCE)
            tables = tuple(rows.tables[part])
            code, total = outputs_code(reduce(or_, rows.outs[part]), rows.out_format), sum(rows.sizes)
            handle, widest, geometry = self._query_of(tables, code, few=total <= kernels.FEW_KEYS)
            arguments = arguments_of(1 if len(tables) == 1 else kernels.SEGMENTS_AT_ONCE)
            per_warp = _keys_per_warp(total, widest)
            blocks, missing = self._pack(arguments, geometry, rows, first, missing, per_warp)
            if blocks:
                yield handle, blocks, arguments

    def _launch_single(self, rows: Placement, stream: int) -> None:
        [n], [keys], [out], found = rows.sizes, rows.keys, rows.outs, rows.founds[0] if rows.founds else 0
        handle, widest, [(units, buckets, vectors, pairs)] = self._query_of(
            tuple(rows.tables), outputs_code(out, rows.out_format) if rows.out_format else out & 15, few=n <= kernels.FEW_KEYS
        )
        if not n:
            return
        arguments, per_warp = self._arguments[1], _keys_per_warp(n, widest)
        missing = self._defaults[rows.tables[0]] if self._defaults else 0
        segment = (keys, out, found, buckets, vectors, n, pairs, units, 0, missing, 0)
        structs.QUERY_OF_ONE.pack_into(arguments.bytes, 0, *segment, *self._lists, 1, per_warp, 0)
        launch(handle, -(-n // (_WARPS * per_warp)), kernels.QUERY_THREADS, arguments, stream)

    def _launch_reused(self, rows: Placement, stream: int) -> None:
        code = reduce(or_, rows.outs) & 15 if not rows.out_format else outputs_code(reduce(or_, rows.outs), rows.out_format)
        kind = (code, *rows.sizes) if rows.joined else (code, tuple(rows.tables), *rows.sizes)
        found = self._launches.get(kind)
        if found is None:
            found = self._new_launch(kind, rows.by_table(self._dims))
        if rows.joined:
            np.add(found.key_offsets, rows.keys[0], found.keys)
            np.add(found.out_offsets, rows.outs[0], found.outs)
        else:
            keys, outs, places = rows.keys, rows.outs, found.places
            if len(places) < len(rows.sizes):
                keys, outs = [keys[place] for place in places], [outs[place] for place in places]
            found.keys[:] = keys
            found.outs[:] = outs
        if found.blocks:
            launch(found.handle, found.blocks, kernels.QUERY_THREADS, found.arguments, stream)

    def _new_launch(self, kind: tuple[object, ...], rows: Placement) -> _Launch:
        arguments, tables = _arguments_of(kernels.SEGMENTS_AT_ONCE), tuple(rows.tables)
        code, total = outputs_code(reduce(or_, rows.outs), rows.out_format), sum(rows.sizes)
        handle, widest, geometry = self._query_of(tables, code, few=total <= kernels.FEW_KEYS)
        blocks, _missing = self._pack(arguments, geometry, rows, 0, 0, _keys_per_warp(total, widest))
        dims = [self._dims[table] for table in tables]
        found = _Launch(handle, blocks, arguments, rows.sizes, dims, 2 if rows.out_format else 4)
        if len(self._launches) == _MAX_LAUNCHES:
            del self._launches[next(iter(self._launches))]
        self._launches[kind] = found
        return found

    def _pack(
        self, arguments: Arguments, geometry: Geometry, rows: Placement, first: int, missing: int, per_warp: int
    ) -> tuple[int, int]:
        """Pack the segments from `first` on; those without keys are left out.

        Args:
            missing: position of their first miss in the lists.

        Returns:
            Number of blocks, and the position after their last miss.
        """
        per_block = _WARPS * per_warp
        buffer, pack, size = arguments.bytes, structs.SEGMENT.pack_into, structs.SEGMENT.size
        offset = blocks = 0
        for index, (units, buckets, vectors, pairs) in enumerate(geometry, first):
            if n := rows.sizes[index]:
                keys, out, found = rows.keys[index], rows.outs[index], rows.founds[index] if rows.founds else 0
                at = self._defaults[rows.tables[index]] if self._defaults else missing
                pack(buffer, offset, keys, out, found, buckets, vectors, n, pairs, units, blocks, at, index)
                offset += size
                blocks += -(-n // per_block)
                missing += n
        tail = structs.QUERY_TAIL
        tail.pack_into(buffer, len(buffer) - tail.size, *self._lists, offset // size, per_warp, 0)
        return blocks, missing


def _arguments_of(segments: int) -> Arguments:
    return Arguments(segments * structs.SEGMENT.size + structs.QUERY_TAIL.size)


def _keys_per_warp(keys: int, widest: int) -> int:
    """Return the keys per warp of a query: more for plenty of narrow rows, since a warp finds the duplicates."""
    return 16 if keys >= 1 << 19 and widest <= 32 else 8
