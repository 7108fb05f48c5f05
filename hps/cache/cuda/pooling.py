"""Pooled lookups on a CUDA device: the vectors of each bag are added up as they are read, and written nowhere.

Keys that are not resident are listed, and answered as a lookup of rows would: from attached tables by the kernels of
`cuda/link.cu`, else by the host. Their vectors go to scratch memory, from which they are added to their bags at the end.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from cupy_backends.cuda.api import runtime

from hps.cache.cuda import kernels
from hps.cache.cuda.device import Arguments, DeviceBuffer, copy_to_host, launch
from hps.cache.cuda.lookup import CupyLookup
from hps.cache.cuda.tables import device_call
from hps.cache.cuda.tensors import PlacedSegment
from hps.errors import InvalidInputError
from hps.tensors.bags import Columns, Pooling
from hps.tensors.segments import Segment

_NO_ENTRY = 0xFF  # each byte of the number of no miss
_NUMBER_BLOCKS = 64  # of each table
_ALIGNMENT = 256


class PlacedBags(PlacedSegment):
    """Where the device finds a segment with bags. Belongs to its lookup until the next query.

    Attributes:
        pooling: its bags.
        offsets, weights: addresses; 0 where there are none.
        options: of `cuda/pool.cu`.
        stride: floats from one row of `out` to the next.
        first_bag: place of its first bag among those of the lookup.
        rows: address of the vectors of its misses.
    """

    __slots__ = ("first_bag", "offsets", "options", "pooling", "rows", "stride", "weights")

    def __init__(self, segment: Segment, pooling: Pooling, missing: int, first_bag: int) -> None:
        super().__init__(segment, missing)
        self.pooling = pooling
        self.first_bag = first_bag
        self.n = segment.n
        self.offsets = self.weights = self.rows = 0
        self.options = int(pooling.combiner)
        self.stride = 0


class PoolingLookup(CupyLookup):
    """A lookup on the CuPy cache, of rows or of bags. *One per thread.* See `CupyLookup`."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._bags: list[PlacedBags] = []  # of the current lookup; empty where it is one of rows
        self._rest = False  # whether vectors of bags are still to be added
        self._pool_arguments = {
            segments: Arguments(segments * kernels.POOL_SEGMENT.size + kernels.POOL_TAIL.size)
            for segments in (1, kernels.SEGMENTS_AT_ONCE)
        }
        self._paddings = DeviceBuffer()  # how many keys of each segment were left out
        self._padding_counts = self._paddings.reserve(4 * len(self.memory.specs))
        self._bag_lists = DeviceBuffer()
        self._scratch = DeviceBuffer()
        self._places = self._entries = self._divisors = 0

    def begin(self, segments: Sequence[Segment], captured: bool = False) -> None:
        """Find the tensors of all segments, and order the lookup after their producers, and after the last one."""
        self._bags, self._rest, self.padding = [], False, ()
        if not segments or segments[0].pooling is None:
            super().begin(segments, captured)
            return
        self.begin_reading()
        bags: list[PlacedBags] = []
        keys = count = 0
        for segment in segments:
            if (pooling := segment.pooling) is None:
                raise InvalidInputError(
                    "looking up bags: got a segment without bags beside some with bags, expected bags alone"
                )
            bags.append(place := PlacedBags(segment, pooling, keys, count))
            self._place(place)
            keys += place.n
            count += pooling.count
        self.placed = list(bags)
        self._bags = bags
        self.flags[3] = 0
        self.end_reading(keys, captured)
        start = self._bag_lists.reserve(8 * keys + 4 * count)
        self._places, self._entries, self._divisors = start, start + 4 * keys, start + 8 * keys

    def answer(self) -> list[int]:
        """Add up what is resident, and find the vectors of the rest. See `CupyLookup.answer`."""
        if not self._bags:
            return super().answer()
        padded = any(place.options & kernels.PADDED for place in self._bags)
        if padded:
            runtime.memsetAsync(self._padding_counts, 0, 4 * len(self._bags), self.stream)
        self.launch_pool("pool")
        self.synchronise()
        if padded:
            self.padding = self._counts_at(self._padding_counts)
        missed, *_, wrong = self.flags.tolist()
        if wrong:
            self.clear()
            raise InvalidInputError(
                "looking up bags: got offsets on the device that do not begin with 0, fall, or do not end with the number of "
                "keys; the outputs are unspecified"
            )
        if not missed:
            return [0] * len(self._bags)
        self.place_misses(self._counts_at(self.missing_counts))
        self._launch_number()
        return self.answer_misses(self.find_layouts(), inline=False, running=False)

    def _counts_at(self, address: int) -> list[int]:
        counts = np.empty(len(self._bags), np.uint32)
        copy_to_host(counts, address, self.stream)
        found: list[int] = counts.tolist()
        return found

    def launch_unwaited(self, captured: bool) -> None:
        """Launch a lookup that nobody waits for. See `CupyLookup.launch_unwaited`."""
        if not self._bags:
            super().launch_unwaited(captured)
            return
        self.launch_pool("pool", settles=True)
        self.place_misses([place.n for place in self._bags])
        self._launch_number()
        self.launch_linked(settles=True)
        self.launch_pool("pool_rest", settles=True)
        self.admit(False, captured)

    @device_call("delivering outputs")
    def finish(self) -> None:
        """Add the vectors that were missing, and bring the outputs to where the caller expects them."""
        if self._bags:
            if self._rest:
                self._rest = False
                self.launch_pool("pool_rest")
                self.launched()
            self.placed = list(self._bags)
        super().finish()

    def place_misses(self, counts: Sequence[int]) -> None:
        """From now on the lookup is one of rows: of so many misses of each segment, into scratch memory."""
        sizes = [
            -(-4 * count * self.memory.specs[place.table].dim // _ALIGNMENT) * _ALIGNMENT
            for count, place in zip(counts, self._bags, strict=True)
        ]
        floats = sum([count * self.memory.specs[place.table].dim for count, place in zip(counts, self._bags, strict=True)])
        start = self._scratch.reserve(4 * floats + _ALIGNMENT * len(sizes))  # for every split: a capture must not allocate
        self.placed = []
        for place, count, size in zip(self._bags, counts, sizes, strict=True):
            rows = PlacedSegment(place.segment, place.missing)
            rows.n, rows.out, rows.keys = count, start, 0
            place.rows = start
            self.placed.append(rows)
            start += size
        self._rest = True

    def _place(self, place: PlacedBags) -> None:
        """Find the tensors of a segment; what is in host memory goes through mapped memory."""
        segment, pooling, reader = place.segment, place.pooling, self.reader
        count, dim = pooling.count, self.memory.specs[place.table].dim
        if isinstance(segment.keys, np.ndarray):
            place.keys = self._mapped(segment.keys)
        else:
            place.keys, place.n = reader.keys(segment.keys)
        if isinstance(pooling.offsets, np.ndarray):
            place.offsets, bits, size = self._mapped(pooling.offsets), 8 * pooling.offsets.itemsize, pooling.offsets.size
        elif pooling.offsets is not None:
            place.offsets, bits, size = reader.offsets(pooling.offsets)
        if pooling.offsets is not None:
            place.options |= (kernels.WIDE_OFFSETS if bits == 64 else 0) | (kernels.LAST_OFFSET if size > count else 0)
        if isinstance(pooling.weights, np.ndarray):
            place.weights = self._mapped(pooling.weights)
        elif pooling.weights is not None:
            place.weights = reader.weights(pooling.weights, place.n)
        if pooling.padding_key is not None:
            place.options |= kernels.PADDED
        place.stride = dim
        if isinstance(segment.out, np.ndarray):
            place.out, pinned = self.host.take(4 * count * dim)
            place.host_out = pinned.view(np.float32).reshape(count, dim)
        elif isinstance(segment.out, Columns):
            place.out, place.stride = reader.columns(segment.out), segment.out.width
        else:
            place.out = reader.output(segment.out, count, dim)

    def _mapped(self, array: np.ndarray) -> int:
        address, pinned = self.host.take(array.nbytes)
        np.copyto(pinned.view(array.dtype), array.reshape(-1))
        return address

    def _launch_number(self) -> None:
        """Launch what notes for each key which miss it was."""
        keys = self._bags[-1].missing + self._bags[-1].n
        runtime.memsetAsync(self._entries, _NO_ENTRY, 4 * keys, self.stream)
        self.launch_pool("number")

    def launch_pool(self, name: str, settles: bool = False) -> None:
        """Launch one of the kernels of `cuda/pool.cu` for all segments.

        Args:
            settles: nobody waits: count wrong offsets in the links.
        """
        geometry, pack, divisors = self.kernels.geometry, kernels.POOL_SEGMENT.pack_into, self._divisors
        total = sum([place.n for place in self._bags])
        asked = [(index, place, place.pooling) for index, place in enumerate(self._bags) if place.pooling.count]
        asked.sort(key=lambda one: -one[1].n // one[2].count)  # what takes longest begins first
        for start in range(0, len(asked), kernels.SEGMENTS_AT_ONCE):
            group = asked[start : start + kernels.SEGMENTS_AT_ONCE]
            unit, widest, segments, plain = self._shape_of_bags([place for _index, place, _pooling in group])
            per_block = kernels.pool_groups(unit, widest)
            arguments = self._pool_arguments[segments]
            buffer = arguments.bytes
            offset = blocks = 0
            for index, place, pooling in group:
                dim, buckets, rows, pairs = geometry[place.table]
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
                    self.unread_of(place.table) if settles else 0,
                    n,
                    count,
                    pairs,
                    dim // unit,
                    place.stride // unit,
                    blocks,
                    place.missing,
                    index,
                    pooling.hotness,
                    bags,
                    pooling.max_norm,
                    place.options,
                )
                offset += kernels.POOL_SEGMENT.size
                blocks += -(-count // (bags * per_block))
            arguments.pack(
                kernels.POOL_TAIL,
                segments * kernels.POOL_SEGMENT.size,
                self.missing_keys,
                self.listed_positions,
                self._places,
                self._entries,
                self.missing_counts,
                self._padding_counts,
                self.flags_at,
                self.flags_at + 12,
                len(group),
                0,
            )
            if name == "number":
                blocks = _NUMBER_BLOCKS * len(group)
            launch(
                self.kernels.pool(name, unit, widest, segments, plain), blocks, kernels.QUERY_THREADS, arguments, self.stream
            )

    def _shape_of_bags(self, group: Sequence[PlacedBags]) -> tuple[int, int, int, bool]:
        """What some segments ask of a kernel: floats that a lane moves at once, the widest row, how many segments, plain."""
        alignment = widths = widest = 0
        plain = True
        for place in group:
            dim = self.memory.specs[place.table].dim
            alignment |= place.out | 4 * place.stride
            widths |= dim
            widest = max(widest, dim)
            plain = plain and not place.weights and not place.pooling.max_norm
        return kernels.unit_of(widths, alignment), widest, 1 if len(group) == 1 else kernels.SEGMENTS_AT_ONCE, plain
