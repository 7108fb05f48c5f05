"""Times of work on a GPU by CUDA graphs, and where a CuPy cache keeps its rows."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import cupy
import numpy as np
import torch
from cupy_backends.cuda.api import runtime

from benchmarks.harness import time_calls
from hps.cache.cuda import kernels
from hps.cache.cuda.cache import CupyCache
from hps.types import KeyArray


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


def torch_graph(calls: Sequence[Callable[[], None]]) -> Any:
    """A graph of calls of torch's, which have run once on a side stream."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    return graph


def torch_back_to_back(calls: Sequence[Callable[[], None]], rounds: int = 15) -> float:
    """Seconds of one of the calls, in a graph of them all; the median of the rounds. They go to torch's current stream."""
    graph = torch_graph(calls)
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
    filler = np.zeros((2 * table.pairs, 1), np.int64)
    filler[2 * kernels.zero_pair(table.pairs) :][:2] = kernels.zero_filler(table.pairs)
    where = np.flatnonzero(buckets[:, 1:] != filler)
    return buckets[:, 1:].reshape(-1)[where], where.astype(np.uint32)
