"""The kernels of a lookup on a CUDA device: which specialisations, and what they are given."""

from collections.abc import Sequence
from dataclasses import dataclass

from cupy_backends.cuda.api import runtime

from hps.cache.cuda import kernels
from hps.cache.cuda.device import kernels_of, launch
from hps.cache.cuda.kernels import Kernel
from hps.cache.cuda.tables import Table
from hps.cache.cuda.workspace import CupyWorkspace, Placed
from hps.types import KeyArray


@dataclass(slots=True)
class Missed:
    """What a workspace knows of the distinct missing keys of one segment; addresses are of the device or mapped memory."""

    place: Placed
    misses: int
    vectors: int = 0
    staged: int = 0  # where the vectors are copied from; 0 where they are read in place
    found: int = 0  # the mask of what was fetched; 0 until it is known


class LookupKernels:
    """Launches what a lookup needs, on the stream of its workspace. *Thread-safe*, given a workspace a caller."""

    def __init__(self, device_id: int, tables: Sequence[Table]) -> None:
        self._compiled = kernels_of(device_id)
        self._specs = [table.spec for table in tables]
        self._geometry = [(table.spec.dim, table.buckets, table.rows, table.pairs) for table in tables]
        self._queries: dict[tuple[int, int, int], int] = {}  # handles, by unit, widest row and segments
        self._scatters: dict[int, int] = {}  # handles, by unit

    def needed(self) -> list[Kernel]:
        """What lookups of aligned outputs will launch; others are compiled when they are first needed."""
        dims = {spec.dim for spec in self._specs}
        found = [kernels.UNIQUE]
        for dim in dims:
            unit = kernels.unit_of(dim, 16)
            found += [kernels.query_kernel(unit, dim, 1), kernels.scatter_kernel(unit)]
        if len(self._specs) > 1:
            unit = min(kernels.unit_of(dim, 16) for dim in dims)
            found.append(kernels.query_kernel(unit, max(dims), kernels.SEGMENTS_AT_ONCE))
        return found

    def query(self, own: CupyWorkspace, placed: Sequence[Placed]) -> None:
        """Launch the queries of all segments: one kernel for every SEGMENTS_AT_ONCE of them."""
        total = sum([place.n for place in placed])
        asked = [(index, place) for index, place in enumerate(placed) if place.n]
        geometry, pack = self._geometry, kernels.SEGMENT.pack_into
        for start in range(0, len(asked), kernels.SEGMENTS_AT_ONCE):
            group = asked[start : start + kernels.SEGMENTS_AT_ONCE]
            alignment = widths = widest = 0
            for _index, place in group:
                dim = geometry[place.table][0]
                alignment |= place.out
                widths |= dim
                if dim > widest:
                    widest = dim
            segments = 1 if len(group) == 1 else kernels.SEGMENTS_AT_ONCE
            unit = kernels.unit_of(widths, alignment)
            per_warp = kernels.query_keys_per_warp(total, widest)
            per_block = kernels.query_keys_per_block(per_warp)
            arguments = own.query_arguments[segments]
            buffer = arguments.bytes
            offset = blocks = 0
            for index, place in group:
                dim, buckets, rows, pairs = geometry[place.table]
                n, units = place.n, dim // unit
                keys, out, found, missing = place.keys, place.out, place.found, place.missing
                pack(buffer, offset, keys, out, found, buckets, rows, n, pairs, units, blocks, missing, index)
                offset += kernels.SEGMENT.size
                blocks += -(-n // per_block)
            arguments.pack(
                kernels.QUERY_TAIL,
                segments * kernels.SEGMENT.size,
                own.missing_keys,
                own.missing_positions,
                own.missing_counts,
                own.any_missing_at,
                len(group),
                per_warp,
                0,
            )
            launch(self._query_handle(unit, widest, segments), blocks, kernels.QUERY_THREADS, arguments, own.stream)

    def _query_handle(self, unit: int, widest: int, segments: int) -> int:
        handle = self._queries.get((unit, widest, segments))
        if handle is None:
            handle = self._compiled.handle(kernels.query_kernel(unit, widest, segments))
            self._queries[unit, widest, segments] = handle
        return handle

    def unique(self, own: CupyWorkspace, placed: Sequence[Placed]) -> None:
        """Launch what makes the misses of all segments distinct and counts them."""
        arguments = own.unique_arguments
        arguments.pack(
            kernels.UNIQUE_HEAD,
            0,
            own.missing_keys,
            own.missing_counts,
            own.rows,
            own.distinct,
            own.distinct_on_host_at,
            own.counts_at,
        )
        for start in range(0, len(placed), kernels.SEGMENTS_AT_ONCE):
            group = placed[start : start + kernels.SEGMENTS_AT_ONCE]
            for nth, place in enumerate(group):
                offset = kernels.UNIQUE_HEAD.size + nth * kernels.UNIQUE_SEGMENT.size
                arguments.pack(kernels.UNIQUE_SEGMENT, offset, place.missing, start + nth)
            launch(self._compiled.handle(kernels.UNIQUE), len(group), kernels.UNIQUE_THREADS, arguments, own.stream)

    def distinct(self, own: CupyWorkspace, index: int, place: Placed, misses: int) -> KeyArray:
        """The distinct missing keys of one segment, once `unique` has run."""
        count = int(own.counts[index, 1])
        if count == kernels.TOO_MANY:
            count = self._sort(own, index, place, misses)
        keys: KeyArray = own.distinct_on_host[place.missing : place.missing + count].copy()
        return keys

    def _sort(self, own: CupyWorkspace, index: int, place: Placed, misses: int) -> int:
        """Do for many misses what the `unique` kernel does for a few."""
        order = own.sort(place, misses)
        blocks = kernels.sorted_blocks(misses)
        heads = own.device_space(4 * blocks)
        own.rank_arguments.pack(
            kernels.RANK_SORTED,
            0,
            own.missing_keys + 8 * place.missing,
            int(order.data.ptr),
            heads,
            own.rows + 4 * place.missing,
            own.distinct + 8 * place.missing,
            own.counts_at + 8 * index + 4,
            misses,
        )
        for kernel in (kernels.MARK_HEADS, kernels.RANK_SORTED_KERNEL):
            launch(self._compiled.handle(kernel), blocks, kernels.UNIQUE_THREADS, own.rank_arguments, own.stream)
        own.synchronise()
        count = int(own.counts[index, 1])
        target = own.distinct_on_host[place.missing : place.missing + count]
        runtime.memcpyAsync(
            target.ctypes.data, own.distinct + 8 * place.missing, 8 * count, runtime.memcpyDeviceToHost, own.stream
        )
        own.synchronise()
        return count

    def scatter(self, own: CupyWorkspace, state: Missed) -> None:
        """Launch the writing of fetched or default vectors to the missing positions of one segment."""
        place = state.place
        spec = self._specs[place.table]
        unit = kernels.unit_of(spec.dim, place.out)
        own.scatter_arguments.pack(
            kernels.SCATTER,
            0,
            own.missing_positions + 4 * place.missing,
            own.rows + 4 * place.missing,
            state.found,
            state.vectors,
            place.out,
            place.found,
            state.misses,
            spec.dim // unit,
            spec.default_value,
        )
        handle = self._scatters.get(unit)
        if handle is None:
            handle = self._scatters[unit] = self._compiled.handle(kernels.scatter_kernel(unit))
        launch(handle, kernels.tile_blocks(state.misses), kernels.THREADS, own.scatter_arguments, own.stream)
        own.launched()
