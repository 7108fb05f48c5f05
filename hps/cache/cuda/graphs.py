"""CUDA graphs of lookups: detects captures on callers' streams and the end of their graphs; makes graphs of its own.

CuPy does not wrap two features of the driver: the graph that a stream is captured in, and *user objects*, which a graph and its
executables hold until they are destroyed and have ended. The destructor here is `sem_post`: a thread of the driver calls it,
which must neither call CUDA nor wait for Python.
"""

import ctypes
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from copy import copy
from functools import cache, partial
from typing import Any, Final, NamedTuple

import cupy
import numpy as np
from cupy_backends.cuda.api import runtime

from hps.cache.base import GraphPart, LookupGraph, StreamCapture
from hps.cache.cuda.device import CUDA_ERRORS, PinnedBuffer, TableMemory, device_call, stream_of
from hps.cache.cuda.lookup import CupyLookup
from hps.cache.cuda.tensors import LEGACY_STREAM, TensorReader
from hps.errors import DeviceError, InvalidDtypeError, InvalidInputError
from hps.tensors.batch import Batch
from hps.tensors.dlpack import TensorView

_NO_DESTRUCTOR_SYNC: Final = 1  # CU_USER_OBJECT_NO_DESTRUCTOR_SYNC
_MOVE: Final = 1  # CU_GRAPH_USER_OBJECT_MOVE
_SEMAPHORE_BYTES: Final = 32  # sem_t of Linux

# By address. A graph may outlive all its observers, and posts to this memory when it is destroyed.
_semaphores: Final[dict[int, Any]] = {}


@cache
def _libraries() -> tuple[Any, Any]:
    return ctypes.CDLL("libcuda.so.1"), ctypes.CDLL(None)


def _posted(semaphore: Any) -> bool:
    value = ctypes.c_int()
    _libraries()[1].sem_getvalue(semaphore, ctypes.byref(value))
    return value.value > 0


def _call(function: Any, *arguments: Any) -> None:
    if (code := function(*arguments)) != 0:
        raise DeviceError(f"capturing a lookup in a CUDA graph: {function.__name__} failed with error {code}")


class CupyCapture(StreamCapture):
    """A stream that is being captured. *One per thread.*"""

    def __init__(self, stream: int) -> None:
        driver, _ = _libraries()
        status, identity, self._graph = ctypes.c_int(), ctypes.c_uint64(), ctypes.c_void_p()
        _call(
            driver.cuStreamGetCaptureInfo_v2,
            ctypes.c_void_p(stream),
            ctypes.byref(status),
            ctypes.byref(identity),
            ctypes.byref(self._graph),
            None,
            None,
        )
        self.key = (stream, identity.value)

    def watch(self) -> Callable[[], bool]:
        """Attach a semaphore to the graph, which posts it when it is destroyed. See `StreamCapture.watch`."""
        driver, system = _libraries()
        for address, known in list(_semaphores.items()):  # single operations of a dict are atomic: this needs no lock
            if _posted(known):
                _semaphores.pop(address, None)
        semaphore, user_object = (ctypes.c_long * (_SEMAPHORE_BYTES // 8))(), ctypes.c_void_p()
        system.sem_init(semaphore, 0, 0)
        post = ctypes.cast(system.sem_post, ctypes.c_void_p)
        _call(driver.cuUserObjectCreate, ctypes.byref(user_object), semaphore, post, 1, _NO_DESTRUCTOR_SYNC)
        _semaphores[ctypes.addressof(semaphore)] = semaphore
        _call(driver.cuGraphRetainUserObject, self._graph, user_object, 1, _MOVE)
        return partial(_posted, semaphore)


class CupyGraph(LookupGraph):
    """A lookup of fixed tensors as a CUDA graph. *One per thread.*"""

    def __init__(self, memory: TableMemory, graph: Any, batch: Batch) -> None:
        self.memory = memory
        self._graph = graph
        self._batch: Batch | None = batch  # keeps the tensors alive
        self._keys: Any = batch.keys[0]
        self._reader = TensorReader(memory.device_id)
        self._done = cupy.cuda.Event(disable_timing=True)
        self._pointer = -1  # the stream of the last launch
        self._stream: Any = None

    @device_call("replaying a captured lookup")
    def launch(self) -> None:
        pointer = self._reader.work_stream(self._keys) or 0
        if pointer != self._pointer:
            self._pointer, self._stream = pointer, stream_of(pointer)
        self._graph.launch(self._stream)
        self._done.record(self._stream)

    @device_call("closing a captured lookup")
    def close(self) -> None:
        self._done.synchronize()
        self._graph = self._batch = self._keys = None


class CupyGraphPart(GraphPart):
    """Lookups in a graph of their caller. *One per thread.*"""

    def __init__(self, lookup: CupyLookup) -> None:
        self.counts = False
        self._lookup = lookup
        self._tables = lookup.memory.tables()  # a graph may still run when the cache has closed
        self._pinned = PinnedBuffer()
        self._absent: dict[tuple[bool, tuple[int, ...]], _Absent] = {}  # by the kind of a batch, and its tables
        self._answers_all = True
        self._room = (0, 0)  # keys and bags
        self._keys: Any = None  # a tensor of the framework on whose current stream the graph is launched

    def prepare(self, batch: Batch) -> None:
        keys, bags = _size_of(batch)
        self._room = max(self._room[0], keys), max(self._room[1], bags)
        if (kind := _kind_of(batch)) not in self._absent:
            at, memory = self._pinned.take(4 * len(batch.tables))
            memory[:] = 0
            self._absent[kind] = _Absent(at, memory.view(np.uint32))
        self.enqueue(batch)

    def enqueue(self, batch: Batch) -> None:
        keys, bags = _size_of(batch)
        most_keys, most_bags = self._room
        absent = self._absent.get(_kind_of(batch))
        if absent is None or keys > most_keys or bags > most_bags:
            raise InvalidInputError(
                f"looking up in a graph: got {keys} keys and {bags} bags, expected a batch that is no larger than those that "
                f"memory was prepared for: {most_keys} keys and {most_bags} bags"
            )
        self._keys = batch.keys[0]
        if not self._lookup.enqueue_part(batch, absent.at):
            self._answers_all = False
        self.counts = self.counts or not self._lookup.memory.complete

    def order(self) -> bool:
        self._lookup.order(self._lookup.reader.work_stream(self._keys) or 0)
        return self._lookup.has_same_links

    def absent(self) -> Mapping[int, int] | None:
        missed, left = self._lookup.flags[:2].tolist()  # in mapped memory: the kernels set them
        if not missed and not left:
            return {}
        self._lookup.flags[:2] = 0
        if left or not self._answers_all:
            return None
        found: Counter[int] = Counter()
        for (_, tables), absent in self._absent.items():
            found.update(dict(zip(tables, absent.counts.tolist(), strict=True)))
        return found


class _Absent(NamedTuple):
    """Absent keys of the tables of a batch, in mapped memory."""

    at: int
    counts: np.ndarray  # (tables,) uint32


def _kind_of(batch: Batch) -> tuple[bool, tuple[int, ...]]:
    return bool(batch.poolings), tuple(batch.tables)


def _size_of(batch: Batch) -> tuple[int, int]:
    return sum(batch.sizes), sum([pooling.count for pooling in batch.poolings])


def capture_of(reader: TensorReader, batch: Batch) -> CupyCapture | None:
    """Return the capture on the stream of a lookup's tensors; None without one.

    Raises:
        InvalidDtypeError: keys are not int64; the graph would read a widened copy that is freed after the capture.
    """
    stream = reader.work_stream(batch.keys[0]) if batch.keys else None
    if not stream or stream == LEGACY_STREAM or not runtime.streamIsCapturing(stream):
        return None
    for keys in batch.keys:
        if (view := reader.view(keys, "keys")).bits != 64:
            raise InvalidDtypeError(f"capturing a lookup: got keys of {view.dtype_name}, expected int64")
    return CupyCapture(stream)


def record(reader: TensorReader, memory: TableMemory, batch: Batch, enqueue: Callable[[Batch], None]) -> CupyGraph:
    """Capture what `enqueue` launches in a graph; see `StreamOrdered.record`."""
    stream = cupy.cuda.Stream(non_blocking=True)
    keys, outs = ([_seen_from(stream, reader, tensor) for tensor in tensors] for tensors in (batch.keys, batch.outs))
    seen = Batch(batch.tables, batch.sizes, keys, outs)
    seen.joined = batch.joined
    for producer in {reader.work_stream(tensor) for tensor in batch.keys} - {None}:
        stream.wait_event(stream_of(producer or 0).record())
    enqueue(seen)  # a capture must not allocate: this run makes all memory that it needs
    stream.synchronize()
    stream.begin_capture()
    try:
        enqueue(seen)
    except BaseException:
        with suppress(*CUDA_ERRORS):  # the capture is invalid
            stream.end_capture()
        raise
    return CupyGraph(memory, stream.end_capture(), batch)


def _seen_from(stream: Any, reader: TensorReader, tensor: Any) -> TensorView:
    view = copy(reader.view(tensor, "tensors"))
    if view.on_host:
        raise InvalidInputError("capturing a lookup: got a tensor in host memory, expected all on the device")
    view.producer_stream = int(stream.ptr)
    return view
