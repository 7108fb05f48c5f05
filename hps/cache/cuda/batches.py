"""Answers requests of frontends from CuPy caches: the memory of `batch_loop`, and its description of caches."""

import ctypes
import logging
from typing import Any

import cupy
import numpy as np
from cupy_backends.cuda.api import runtime

from hps.cache.base import BatchDriver, EmbeddingCache
from hps.cache.cuda import batch_loop, kernels, structs
from hps.cache.cuda.cache import CupyCache
from hps.cache.cuda.device import CUDA_ERRORS, DeviceBuffer, PinnedBuffer, driver_function, on_device
from hps.cache.cuda.links import CudaPinner
from hps.errors import DeviceError
from hps.ground.kernels.numba_kernels import compile_kernels
from hps.regions.loop_state import DriverWords, LoopState
from hps.types import IndexArray

_log = logging.getLogger(__name__)


class _StreamLane:
    """The stream and memory of one batch at a time. *One loop.*"""

    def __init__(self, device_id: int, context: int) -> None:
        with on_device(device_id):
            self._stream = cupy.cuda.Stream(non_blocking=True, priority=-5)
            self._pinned = PinnedBuffer()
            self._lists, self._counts, self._staged = DeviceBuffer(), DeviceBuffer(), DeviceBuffer()
            done_at, done = self._pinned.take(64)
            flags_at, flags = self._pinned.take(64)
            _, counts = self._pinned.take(4 * batch_loop.BATCH_SEGMENTS)
            reports_at, reports = self._pinned.take(8 * batch_loop.BATCH_SEGMENTS)
            for array in (done, flags, counts, reports):
                array[:] = 0
            words = 4 * batch_loop.BATCH_SEGMENTS
            start = self._counts.reserve(6 * words + 64)
            runtime.memset(start, 0, 6 * words + 64)
            missing, left, leaders, tallies, progress = (start + nth * words for nth in (0, 1, 2, 3, 5))  # tallies take two
            keys, versions = batch_loop.MOST_KEYS, 8 * kernels.STRIPES * batch_loop.AT_ONCE
            clean = 4 * kernels.MOST_BINS + 8 * keys
            sizes = {
                "missing_keys": 8 * keys,
                "positions": 4 * keys,
                "versions": 2 * versions,
                "epochs": 8 * batch_loop.AT_ONCE,
                "left_keys": 8 * keys,
                "leaders": 4 * keys,
                "ranks": 4 * keys,
                "order": 4 * keys,
                "left_positions": 4 * keys,
                "clean": clean,
                "states": keys,
            }
            at = self._lists.reserve(sum(-(-size // 256) * 256 for size in sizes.values()))
            places = {}
            for name, size in sizes.items():
                places[name] = at
                at += -(-size // 256) * 256
            runtime.memset(places["clean"], 0, clean)
            staged = self._staged.reserve(batch_loop.STAGED_BYTES)
            runtime.deviceSynchronize()
        self._query: Any = np.zeros((batch_loop.QUERY_TAIL_AT + structs.QUERY_TAIL.size) // 8 + 1, np.int64)
        self._answer: Any = np.zeros((batch_loop.ANSWER_TAIL_AT + structs.ANSWER_TAIL.size) // 8 + 1, np.int64)
        query_tail = structs.QUERY_TAIL.named(
            missing_keys=places["missing_keys"],
            missing_positions=places["positions"],
            missing_counts=missing,
            any_missing=flags_at,
            segment_count=0,
            keys_per_warp=batch_loop.PER_WARP,
            unused=0,
        )
        answer_tail = structs.ANSWER_TAIL.named(
            missing_keys=places["missing_keys"],
            missing_positions=places["positions"],
            missing_counts=missing,
            leaders=places["leaders"],
            ranks=places["ranks"],
            order=places["order"],
            states=places["states"],
            left_keys=places["left_keys"],
            left_positions=places["left_positions"],
            left_counts=left,
            slots=places["clean"] + 4 * kernels.MOST_BINS,
            bins=places["clean"],
            leader_counts=leaders,
            tallies=tallies,
            progress=progress,
            epochs=places["epochs"],
            versions=places["versions"],
            versions_after=places["versions"] + versions,
            any_left=flags_at + 4,
            reports=reports_at,
            done=0,
            number=0,
            bin_bits=0,
            segment_count=0,
            patience=batch_loop.PATIENCE,
            few=batch_loop.FEW_MISSES,
            fetch_warps=1,
            settles=0,
            defers=0,
            slot_bits=keys.bit_length(),
        )
        self._query.view(np.uint8)[batch_loop.QUERY_TAIL_AT :][: len(query_tail)] = np.frombuffer(query_tail, np.uint8)
        self._answer.view(np.uint8)[batch_loop.ANSWER_TAIL_AT :][: len(answer_tail)] = np.frombuffer(answer_tail, np.uint8)
        self._parameters = np.array([self._query.ctypes.data, self._answer.ctypes.data], np.int64)
        self.words = np.zeros(batch_loop.LANE_COLUMNS, np.int64)
        for column, value in (
            (batch_loop.L_DEVICE, device_id),
            (batch_loop.L_CONTEXT, context),
            (batch_loop.L_STREAM, int(self._stream.ptr)),
            (batch_loop.L_DONE, done.ctypes.data),
            (batch_loop.L_DONE_ON_DEVICE, done_at),
            (batch_loop.L_FLAGS, flags.ctypes.data),
            (batch_loop.L_COUNTS, counts.ctypes.data),
            (batch_loop.L_REPORTS, reports.ctypes.data),
            (batch_loop.L_MISSING_COUNTS, missing),
            (batch_loop.L_LEFT_COUNTS, left),
            (batch_loop.L_QUERY, self._query.ctypes.data),
            (batch_loop.L_QUERY_PARAMETERS, self._parameters.ctypes.data),
            (batch_loop.L_ANSWER, self._answer.ctypes.data),
            (batch_loop.L_ANSWER_PARAMETERS, self._parameters.ctypes.data + 8),
            (batch_loop.L_STAGED, staged),
        ):
            self.words[column] = value


class CupyBatches(BatchDriver):
    """Answers from CuPy caches; see `BatchDriver`."""

    def __init__(self, loop: LoopState) -> None:
        self._loop = loop
        self._pinned: list[int] = []  # addresses of regions
        self._in_place = False
        self._lanes: list[_StreamLane] = []
        self._words: IndexArray = np.zeros((batch_loop.LANES * 16, batch_loop.LANE_COLUMNS), np.int64)
        self._words[:, batch_loop.L_DEVICE] = -1
        self._devices: list[int] = []
        self._in_use: dict[int, object] = {}  # by identity of a cache: references to its tables and links
        self._functions = np.zeros(16, np.int64)
        for place, names in (
            (batch_loop.F_LAUNCH, ("cuLaunchKernel",)),
            (batch_loop.F_WRITE, ("cuStreamWriteValue64_v2", "cuStreamWriteValue64")),
            (batch_loop.F_COPY, ("cuMemcpyDtoHAsync_v2",)),
            (batch_loop.F_SET, ("cuMemsetD32Async",)),
            (batch_loop.F_QUERY, ("cuStreamQuery",)),
            (batch_loop.F_CURRENT, ("cuCtxSetCurrent",)),
        ):
            self._functions[place] = driver_function(*names)

    def prepare(self) -> None:
        """Pin the regions for all devices. If that fails, the engine's threads answer, through pinned buffers."""
        compile_kernels(batch_loop.run)
        pinner = CudaPinner(0)
        try:
            for place, memory in enumerate(self._loop.memories):
                pinner.pin(memory.address, memory.size)
                self._pinned.append(memory.address)
                self._loop.shift(place, _device_address(memory.address) - memory.address)
            self._in_place = True
        except DeviceError as error:
            _log.warning("the GPU does not read the memory of the frontends in place, which makes lookups slower: %s", error)

    def resident(self, cache: EmbeddingCache) -> DriverWords | None:
        if not isinstance(cache, CupyCache) or not self._in_place:
            return None
        memory, device_id = cache.memory, cache.device_id
        try:
            if device_id not in self._devices:
                self._add_lanes(device_id)
        except (*CUDA_ERRORS, cupy.cuda.memory.OutOfMemoryError) as error:
            _log.warning("CUDA device %d has no memory for batches, which makes lookups slower: %s", device_id, error)
            return None
        compiled = cache.lookup_kernels
        shape = kernels.Shape.of(compiled.rows, kernels.ALIGNED)._replace(segments=batch_loop.AT_ONCE)
        links = cache.links()
        shape = shape._replace(files=any(link is not None and link.has_files for link in links))
        self._in_use[id(cache)] = memory.tables(), links
        query, answer = compiled.batch_kernels(shape)
        words = [device_id, query, shape.unit, 0, 0, 0, 0, 0]
        if any(link is not None for link in links):
            threads = kernels.answer_threads(shape)
            blocks = int(cupy.cuda.Device(device_id).attributes["MultiProcessorCount"])
            dense = all(link is None or (link.present is not None and link.present.bins_per_row > 0) for link in links)
            warps = kernels.fetch_warps(shape.most_words, blocks, threads, dense=dense)
            words[3:] = [answer, threads, blocks, warps, 1]
        tables = []
        for (buckets, rows, pairs), struct, link, spec, kind in zip(
            compiled.geometry, compiled.structs, links, cache.tables, compiled.rows, strict=True
        ):
            packed = np.frombuffer(structs.TABLE.pack(*struct), np.int64).tolist()
            default = int(np.float32(spec.default_value).view(np.uint32))
            attached = [0, 0, default, 0, 0]
            if link is not None:
                link.keep_layouts()
                bins = link.present.bins_per_row if link.present is not None else 0.0
                attached = [link.where, link.where, default, int(link.authoritative), int(np.float32(bins).view(np.uint32))]
            tables.append([buckets, rows, pairs, shape.units(kind), *packed, *attached, kernels.staged_words(shape, kind)])
        return DriverWords(tables, words)

    def _add_lanes(self, device_id: int) -> None:
        with on_device(device_id):
            context = int(cupy.cuda.driver.ctxGetCurrent())
        lanes = [_StreamLane(device_id, context) for _ in range(batch_loop.LANES)]
        start = batch_loop.LANES * len(self._devices)
        self._lanes += lanes
        self._devices.append(device_id)
        for place, lane in enumerate(lanes, start):
            device, lane.words[batch_loop.L_DEVICE] = lane.words[batch_loop.L_DEVICE], -1
            self._words[place] = lane.words
            self._words[place, batch_loop.L_DEVICE] = device  # now the loop may use it

    def release(self, cache: EmbeddingCache) -> None:
        self._in_use.pop(id(cache), None)

    def run(self) -> None:
        loop, lanes = self._loop, len(self._words)
        requests = np.zeros((lanes, batch_loop.BATCH_REQUESTS, batch_loop.REQUEST_COLUMNS), np.int64)
        segments = np.zeros((lanes, batch_loop.BATCH_SEGMENTS, batch_loop.SEGMENT_COLUMNS), np.int64)
        runtime.setDevice(0)
        arrays = (loop.regions, loop.deployments, loop.tables, loop.state, loop.handed_over)
        batch_loop.run(*arrays, self._words, requests, segments, self._functions, runtime.getDeviceCount())

    def close(self) -> None:
        """Unpin the regions: CUDA refuses to pin memory mapped at the address of regions that were unmapped while pinned."""
        while self._pinned:
            CudaPinner(0).unpin(self._pinned.pop())


def _device_address(address: int) -> int:
    pointer = ctypes.c_uint64()
    code = ctypes.CDLL("libcuda.so.1").cuMemHostGetDevicePointer_v2(ctypes.byref(pointer), ctypes.c_void_p(address), 0)
    if code:
        raise DeviceError(f"finding the address of pinned memory on the device: CUDA error {code}")
    return int(pointer.value)
