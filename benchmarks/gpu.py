"""What benchmarks on a GPU share: times by CUDA graphs, plain kernels as limits, keys by popularity, the rows of a cache."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import cupy
import numpy as np
import torch
from cupy_backends.cuda.api import driver, runtime

from benchmarks.harness import ranks_of, time_calls
from hps.cache.cuda import kernels
from hps.cache.cuda.cache import CupyCache
from hps.types import KeyArray

_GATHER = r"""
extern "C" __global__ void __launch_bounds__(256)
gather(const unsigned* slots, const float4* rows, float4* out, unsigned n, unsigned units) {
    const unsigned first = blockIdx.x * 32 + threadIdx.x / 8, stride = gridDim.x * 32, member = threadIdx.x % 8;
    size_t row[AHEAD];
    float4 value[AHEAD];
    for (int j = 0; j < AHEAD; ++j) row[j] = first + j * stride < n ? slots[first + j * stride] : 0;
#pragma unroll 4
    for (unsigned unit = member; unit < units; unit += 8) {
        for (int j = 0; j < AHEAD; ++j) value[j] = rows[row[j] * units + unit];
        for (int j = 0; j < AHEAD; ++j) {
            const unsigned i = first + j * stride;
            if (i < n) STORE(out + size_t(i) * units + unit, value[j]);
        }
    }
}
"""
_value = cupy.ElementwiseKernel(
    "int64 key, int32 column", "float32 value", "value = ((key * 2654435761LL + column * 40503) >> 7) & 0xFFFFFF", "value_of"
)
PLAIN, TUNED, WIDE = (1, "*(p) = (v)"), (2, "__stcs(p, v)"), (4, "__stcs(p, v)")
"""Variants of the plain gather: rows that a thread has in flight, and how it stores."""
_compiled: dict[tuple[int, int, str], Any] = {}


def wake(seconds: float = 0.05) -> None:
    """Keep the GPU busy for a moment: an idle one has low clocks."""
    square = torch.ones(4096, 4096, device="cuda")
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        torch.mm(square, square)
        torch.cuda.synchronize()


def back_to_back(launches: Sequence[Callable[[], None]], rounds: int = 15) -> float:
    """Seconds of one of the launches, in a graph of them all; the median of the rounds. They go to CuPy's current stream."""
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        graph = _graph(stream, launches)
        wake(0.02)
        graph.launch(stream)
        seconds = []
        for _ in range(rounds):
            start, stop = cupy.cuda.Event(), cupy.cuda.Event()
            start.record(stream)
            graph.launch(stream)
            stop.record(stream)
            stop.synchronize()
            seconds.append(cupy.cuda.get_elapsed_time(start, stop) / 1e3 / len(launches))
    return float(np.median(seconds))


def one_call(launch: Callable[[], None]) -> float:
    """Seconds from the launch of a graph of one until the host knows that it is done; the median."""
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        graph = _graph(stream, [launch])

        def call(_i: int) -> None:
            graph.launch(stream)
            runtime.streamSynchronize(stream.ptr)

        return time_calls(call, 300).p50_s


def _graph(stream: Any, launches: Sequence[Callable[[], None]]) -> Any:
    stream.begin_capture()
    try:
        for launch in launches:
            launch()
    except BaseException:
        with suppress(Exception):
            stream.end_capture()
        raise
    return stream.end_capture()


def torch_back_to_back(calls: Sequence[Callable[[], None]], rounds: int = 15) -> float:
    """Seconds of one of the calls, in a graph of them all; the median of the rounds. They go to torch's current stream."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):  # before they are captured
        for call in calls:
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    wake(0.02)
    graph.replay()
    seconds = []
    for _ in range(rounds):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        seconds.append(start.elapsed_time(stop) / 1e3 / len(calls))
    return float(np.median(seconds))


def slots_of_resident_keys(cache: CupyCache, index: int) -> tuple[KeyArray, np.ndarray]:
    """Resident keys of a table, and the rows that they stand in."""
    table = cache.memory.tables()[index]
    buckets = np.empty((2 * table.pairs, 8), np.int64)
    runtime.memcpy(buckets.ctypes.data, table.buckets, buckets.nbytes, runtime.memcpyDeviceToHost)
    if cache.static:
        where = np.flatnonzero(buckets[:, :1] >> 16 >> np.arange(kernels.SLOTS) & 1)
    else:
        filler = np.zeros((2 * table.pairs, 1), np.int64)
        filler[2 * kernels.zero_pair(table.pairs) :][:2] = kernels.zero_filler(table.pairs)
        where = np.flatnonzero(buckets[:, 1:] != filler)
    return buckets[:, 1:].reshape(-1)[where], where.astype(np.uint32)


def vectors_of(keys: Any, dim: int) -> Any:
    """Return the (n, dim) float32 vectors of keys, CuPy arrays both."""
    return _value(keys[:, None], cupy.arange(dim, dtype=cupy.int32)[None, :])


def plain_gather(variant: tuple[int, str], places: Any, rows: int, out: Any) -> Callable[[], None]:
    """Return a launch on the current stream that copies rows from known places: the limit of a query.

    Args:
        places: (n,) uint32, on this device.
        rows: address of the first row, on any device that this one reads.
        out: (n, dim) float32, on this device.
    """
    ahead, store = variant
    key = (runtime.getDevice(), ahead, store)
    if key not in _compiled:
        code = f"#define AHEAD {ahead}\n#define STORE(p, v) {store}\n{_GATHER}"
        _compiled[key] = cupy.RawModule(code=code).get_function("gather")
    handle, n = _compiled[key].kernel.ptr, places.size
    pointers = np.array([places.data.ptr, rows, out.data.ptr], np.uint64)
    sizes = np.array([n, out.shape[1] // 4], np.uint32)
    addresses = [pointers.ctypes.data + 8 * i for i in range(3)] + [sizes.ctypes.data + 4 * i for i in range(2)]
    arguments = np.array(addresses, np.uint64)
    blocks = -(-n // (32 * ahead))

    def launch() -> None:
        keep = (pointers, sizes, places, out)
        stream = cupy.cuda.get_current_stream().ptr
        driver.launchKernel(handle, blocks, 1, 1, 256, 1, 1, 0, stream, arguments.ctypes.data, 0)
        del keep

    return launch


def popular_keys(by_rank: Any, n: int, random: Any) -> Any:
    """Draw n keys whose popularity falls with rank.

    Args:
        by_rank: (rows,) int64 of torch's: the key of each rank.
        random: a generator of torch's on the same device.
    """
    uniform = torch.rand(n, dtype=torch.float64, device=by_rank.device, generator=random)
    return by_rank[(ranks_of(uniform, by_rank.numel()).long() - 1).clamp_(0, by_rank.numel() - 1)]
