"""Tables of a device for the most used rows of its neighbours, beside tables that it shares with them (`cuda/sharing.cuh`)."""

import logging
from collections.abc import Sequence
from dataclasses import replace

import cupy
import numpy as np
from cupy_backends.cuda.api import runtime

from hps.cache.cuda import geometry, kernels, structs
from hps.cache.cuda.device import CUDA_ERRORS, Arguments, DeviceTable, copy_to_host, kernels_of, launch
from hps.cache.cuda.kernels import Kernel, Rows
from hps.cache.cuda.modifications import Modifications
from hps.cache.cuda.tables import allocate, write_sharing
from hps.types import KeyArray

_log = logging.getLogger(__name__)

SAMPLES = 1 << 14
"""Maximum number of keys of a table that are admitted at once; more samples are lost."""
_STAGED_BYTES = 1 << 24  # of their rows


class NearTables:
    """The near tables of one device. Its caller makes the device current, and calls one method at a time.

    A row that is resident in a shared table may have a copy here. A change of resident rows calls `settle` before and `erase`
    afterwards, and no `promote` may run in between. A row that is still used is copied again.
    """

    def __init__(
        self, device_id: int, device_ids: Sequence[int], shared: Sequence[DeviceTable], near_rows: Sequence[int]
    ) -> None:
        """Allocate near tables, and publish them to the queries of the device.

        Args:
            device_ids: the devices that share the tables.
        """
        self._device_id = device_id
        self._devices, nth = len(device_ids), list(device_ids).index(device_id)
        self._kernels = kernels_of(device_id)
        self._changes = Modifications(device_id)
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self._shared = [table.packed for table in shared]
        self._buckets_here = [table.buckets_on(device_id) for table in shared]
        self._near = allocate([table.spec for table in shared], near_rows, (device_id,), static=False, stretch=self._devices)
        self._samples = cupy.cuda.Memory(8 * (SAMPLES + 1) * len(shared))
        self._counts_at = int(self._samples.ptr) + 8 * SAMPLES * len(shared)
        self._room = [min(SAMPLES, _STAGED_BYTES // (4 * table.spec.width)) for table in shared]
        widths = [table.spec.width for table in shared]
        self._staged = cupy.cuda.Memory(4 * max(room * width for room, width in zip(self._room, widths, strict=True)))
        self._counts = np.zeros(len(shared), np.uint64)
        self._promote = Arguments(2 * structs.TABLE.size + structs.PROMOTE_TAIL.size)
        self._filled = False
        runtime.memset(self._counts_at, 0, self._counts.nbytes)
        self._owned_pairs = [geometry.owned_pairs(table.pairs, table.spec.width, self._devices, nth) for table in shared]
        self._usable = [bool(table.pairs and near.pairs) for table, near in zip(shared, self._near, strict=True)]
        for index, usable in enumerate(self._usable):
            if usable:
                self._publish(index, self._near[index].pairs)
        runtime.deviceSynchronize()

    def with_near_tables(self, shared: Sequence[DeviceTable]) -> tuple[DeviceTable, ...]:
        """Return the shared tables with their near tables, whose memory they keep alive."""
        near = [replace(near_table, memory=(near_table.memory, self._samples)) for near_table in self._near]
        return tuple(replace(table, near=near_table) for table, near_table in zip(shared, near, strict=True))

    def needed(self) -> list[Kernel]:
        return kernels.near_kernels([Rows.of(table.spec) for table in self._near])

    def resident(self, index: int) -> int:
        """Return the number of copies of a table's rows."""
        if not self._usable[index]:
            return 0
        admitted, evicted, erased, *_ = self._changes.counters(self._near[index])
        return admitted - evicted - erased

    def settle(self) -> None:
        self._stream.synchronize()

    def erase(self, index: int, keys: KeyArray) -> None:
        """Drop the copies of keys (host array). After a failure the table has no copies from then on."""
        if not (self._filled and self._usable[index]):
            return
        try:
            self._changes.erase(self._near[index], keys)
        except (*CUDA_ERRORS, cupy.cuda.memory.OutOfMemoryError) as error:
            self._publish(index, 0)
            self._usable[index] = False
            tag = self._near[index].spec.tag
            _log.warning("table %s: CUDA device %d copies no more rows of other devices: %s", tag, self._device_id, error)

    def dump(self, index: int) -> KeyArray:
        """Return the keys of a table that have a copy; some may be resident nowhere else."""
        return self._changes.dump(self._near[index]) if self._filled and self._usable[index] else np.empty(0, np.int64)

    def promote(self) -> None:
        """Admit the keys that queries have sampled. Does not wait for the admission."""
        stream = int(self._stream.ptr)
        copy_to_host(self._counts, self._counts_at, stream)
        counts: list[int] = self._counts.tolist()
        for index, count in enumerate(counts):
            if not (count and self._usable[index]):
                continue
            self._filled = True
            near, size = self._near[index], structs.TABLE.size
            self._promote.bytes[:size] = self._shared[index]
            self._promote.bytes[size : 2 * size] = near.packed
            places = self._buckets_here[index], *self._samples_of(index), int(self._staged.ptr), self._room[index]
            self._promote.pack(structs.PROMOTE_TAIL, 2 * size, *places)
            width = near.spec.width
            handle = self._kernels.handle(kernels.promote_kernel(kernels.unit_of(width, 16), width))
            blocks = kernels.tile_blocks(min(count, self._room[index]))
            with self._changes.ordered(stream):
                launch(handle, blocks, kernels.THREADS, self._promote, stream)
            runtime.memsetAsync(self._counts_at + 8 * index, 0, 8, stream)

    def close(self) -> None:
        """Wait for running admissions, so that the memory can be freed."""
        self._stream.synchronize()
        self._changes.close()

    def _publish(self, index: int, pairs: int) -> None:
        """Publish a near table to queries; 0 pairs: there is none."""
        near = self._near[index]
        head = near.buckets, near.rows, *self._samples_of(index), pairs, self._devices
        write_sharing(self._buckets_here[index], (*head, *self._owned_pairs[index], self._room[index]))

    def _samples_of(self, index: int) -> tuple[int, int]:
        """Return the addresses of a table's samples and of their count."""
        return int(self._samples.ptr) + 8 * SAMPLES * index, self._counts_at + 8 * index
