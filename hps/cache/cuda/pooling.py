"""Pooled lookups on a CUDA device: adds up the vectors of each bag as they are read, without storing them.

Keys that are not resident are listed, and answered as in a lookup of rows: from attached tables by the kernel of
`cuda/answer.cu`, else by the host. Their vectors go to scratch memory, from which they are added to their bags at the end.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from cupy_backends.cuda.api import runtime

from hps.cache.cuda import kernels, structs
from hps.cache.cuda.device import Arguments, DeviceBuffer, PinnedBuffer, launch
from hps.cache.cuda.kernels import Shape
from hps.cache.cuda.queries import LookupKernels
from hps.cache.cuda.tensors import HostParts, Placement, TensorReader
from hps.tensors.bags import Pooling
from hps.tensors.batch import Batch, Part
from hps.types import DeviceArray, TableSpec

_NO_ENTRY = 0xFF  # each byte of the number that means no miss
_NUMBER_BLOCKS = 64  # for each table
_ALIGNMENT = 256


@dataclass(slots=True, eq=False)
class PlacedBags:
    """Where the bags of one table lie on the device. Belongs to its lookup until the next query.

    Attributes:
        table, n: index of the table, number of keys.
        missing: position of its first miss in the lookup's lists.
        first_bag: position of its first bag among those of the lookup.
        keys, out, offsets, weights: addresses; offsets and weights are 0 without them.
        options: see `cuda/pool.cu`.
        stride: floats from one row of `out` to the next.
        rows: address of the vectors of its misses.
    """

    table: int
    n: int
    pooling: Pooling
    missing: int
    first_bag: int
    options: int
    keys: int = 0
    out: int = 0
    offsets: int = 0
    weights: int = 0
    stride: int = 0
    rows: int = 0


class BagPooling:
    """Places the bags of each lookup and launches the kernels that add them up. *One per thread.*

    Belongs to a `CupyLookup` and shares its lists of misses.

    Args:
        specs: tables, in the order of their ids.
        compiled: the kernels, and what they need to know of the tables.

    Attributes:
        placed: the bags of each table of the current lookup.
        on_host: tables with an output in host memory, by their position.
        padded: a table has a padding key.
        paddings_at: address of the padding key counts of the tables.
        unfinished: vectors remain to be added to their bags.
    """

    def __init__(
        self,
        specs: Sequence[TableSpec],
        compiled: LookupKernels,
    ) -> None:
        self.placed: list[PlacedBags] = []
        self.on_host: dict[int, HostParts] = {}
        self.padded = self.unfinished = False
        self._specs = specs
        self._kernels = compiled
        self._arguments = {
            segments: Arguments(segments * structs.POOL_SEGMENT.size + structs.POOL_TAIL.size)
            for segments in (1, kernels.SEGMENTS_AT_ONCE)
        }
        self._paddings = DeviceBuffer()
        self.paddings_at = self._paddings.reserve(4 * len(specs))
        self._lists = DeviceBuffer()
        self._rows = DeviceBuffer()
        self._places = self._entries = self._divisors = 0

    def place(self, batch: Batch, reader: TensorReader, host: PinnedBuffer) -> int:
        """Find the tensors of a batch; those in host memory go through mapped memory. Return the number of keys."""
        self.placed, self.on_host = [], {}
        keys = bags = 0
        for position, (table, n, pooling) in enumerate(zip(batch.tables, batch.sizes, batch.poolings, strict=True)):
            self.placed.append(place := PlacedBags(table, n, pooling, keys, bags, int(pooling.combiner)))
            self._place(place, batch.keys[position], reader, host)
            self._place_output(place, position, batch.outs[position], reader, host)
            keys += n
            bags += pooling.count
        self.padded = any(place.options & kernels.PADDED for place in self.placed)
        self.unfinished = False
        return keys

    def reserve_lists(self) -> None:
        """Allocate the entries that `number` writes for the current lookup."""
        last = self.placed[-1]
        keys, bags = last.missing + last.n, last.first_bag + last.pooling.count
        start = self._lists.reserve(8 * keys + 4 * bags)
        self._places, self._entries, self._divisors = start, start + 4 * keys, start + 8 * keys

    def place_misses(self, counts: Sequence[int]) -> Placement:
        """Allocate scratch memory for the vectors of each table's misses, and return it as the outputs of a lookup of rows."""
        sizes = [
            -(-4 * count * self._specs[place.table].dim // _ALIGNMENT) * _ALIGNMENT
            for count, place in zip(counts, self.placed, strict=True)
        ]
        floats = sum([count * self._specs[place.table].dim for count, place in zip(counts, self.placed, strict=True)])
        start = self._rows.reserve(4 * floats + _ALIGNMENT * len(sizes))  # for every split: a capture must not allocate
        for place, size in zip(self.placed, sizes, strict=True):
            place.rows = start
            start += size
        tables, outs = [place.table for place in self.placed], [place.rows for place in self.placed]
        found = Placement(tables, counts, [0] * len(tables), outs)
        found.starts = [place.missing for place in self.placed]
        self.unfinished = True
        return found

    def clear_entries(self, stream: int) -> None:
        """Clear the miss numbers of the keys, before the kernel `number` writes them. Does not block."""
        last = self.placed[-1]
        runtime.memsetAsync(self._entries, _NO_ENTRY, 4 * (last.missing + last.n), stream)

    def launch(self, name: str, stream: int, misses: tuple[int, int, int], flags_at: int, unread: Sequence[int]) -> None:
        """Launch one of the kernels of `cuda/pool.cu` for all segments.

        Args:
            misses: addresses of the missing keys, their positions and their counts.
            flags_at: address of the lookup's flags.
            unread: counter address of wrong offsets for each segment; 0 if the host checks them.
        """
        missing_keys, listed_positions, missing_counts = misses
        known, pack, divisors = self._kernels, structs.POOL_SEGMENT.pack_into, self._divisors
        total = sum([place.n for place in self.placed])
        nonempty = [(index, place, place.pooling) for index, place in enumerate(self.placed) if place.pooling.count]
        nonempty.sort(key=lambda entry: -entry[1].n // entry[2].count)  # long bags first, so that none is left to the end
        for start in range(0, len(nonempty), kernels.SEGMENTS_AT_ONCE):
            group = nonempty[start : start + kernels.SEGMENTS_AT_ONCE]
            shape = self._shape_of_bags([place for _index, place, _pooling in group])
            arithmetic = max([pooling.arithmetic for _index, _place, pooling in group])
            per_block = kernels.pool_groups(shape)
            arguments = self._arguments[shape.segments]
            buffer = arguments.bytes
            offset = blocks = 0
            for index, place, pooling in group:
                buckets, rows, pairs = known.geometry[place.table]
                n, count, padding_key = place.n, pooling.count, pooling.padding_key
                bags = kernels.bags_per_group(n, count, total)
                pack(
                    buffer,
                    offset,
                    place.keys,
                    place.offsets,
                    place.weights,
                    place.out,
                    divisors + 4 * place.first_bag,
                    buckets,
                    rows if name == "pool" else place.rows,
                    0 if padding_key is None else padding_key,
                    unread[index],
                    n,
                    count,
                    pairs,
                    shape.units(known.rows[place.table]),
                    place.stride // shape.unit,
                    blocks,
                    place.missing,
                    index,
                    pooling.hotness,
                    bags,
                    pooling.max_norm,
                    place.options,
                )
                offset += structs.POOL_SEGMENT.size
                blocks += -(-count // (bags * per_block))
            arguments.pack(
                structs.POOL_TAIL,
                shape.segments * structs.POOL_SEGMENT.size,
                missing_keys,
                listed_positions,
                self._places,
                self._entries,
                missing_counts,
                self.paddings_at,
                flags_at,
                flags_at + 8,
                len(group),
            )
            if name == "number":
                blocks = _NUMBER_BLOCKS * len(group)
            launch(known.pool(name, shape, arithmetic), blocks, kernels.QUERY_THREADS, arguments, stream)

    def _place(self, place: PlacedBags, keys: DeviceArray, reader: TensorReader, host: PinnedBuffer) -> None:
        """Find keys, offsets and weights."""
        pooling = place.pooling
        place.keys = _mapped(keys, host) if isinstance(keys, np.ndarray) else reader.keys(keys)[0]
        if isinstance(pooling.offsets, np.ndarray):
            place.offsets, bits, size = _mapped(pooling.offsets, host), 8 * pooling.offsets.itemsize, pooling.offsets.size
        elif pooling.offsets is not None:
            place.offsets, bits, size = reader.offsets(pooling.offsets)
        if pooling.offsets is not None:
            place.options |= (kernels.WIDE_OFFSETS if bits == 64 else 0) | (kernels.LAST_OFFSET if size > pooling.count else 0)
        if isinstance(pooling.weights, np.ndarray):
            place.weights = _mapped(pooling.weights, host)
        elif pooling.weights is not None:
            place.weights = reader.weights(pooling.weights, place.n)
        if pooling.padding_key is not None:
            place.options |= kernels.PADDED

    def _place_output(
        self, place: PlacedBags, position: int, out: DeviceArray, reader: TensorReader, host: PinnedBuffer
    ) -> None:
        count, dim = place.pooling.count, self._specs[place.table].dim
        place.stride = out.width if isinstance(out, Part) else dim
        if isinstance(out, np.ndarray):
            place.out, pinned = host.take(4 * count * dim)
            self.on_host[position] = HostParts(pinned.view(np.float32).reshape(count, dim), None)
        else:
            place.out = reader.rows(out, count, dim)

    def _shape_of_bags(self, group: Sequence[PlacedBags]) -> Shape:
        """Return the shape of a group of segments."""
        alignment = 0
        for place in group:
            alignment |= place.out | 4 * place.stride
        return self._kernels.shape_of([place.table for place in group], alignment & 15)


def _mapped(array: np.ndarray, host: PinnedBuffer) -> int:
    """Copy an array to mapped memory; return its address there."""
    address, pinned = host.take(array.nbytes)
    np.copyto(pinned.view(array.dtype), array.reshape(-1))
    return address
