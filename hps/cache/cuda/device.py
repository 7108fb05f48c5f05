"""One CUDA device for the embedding cache: memory of fixed and growing size, compiled kernels, launches, errors.

Pointers are integers, and the runtime's and driver's functions are called directly: a launch costs 3 us this way, and twice
that through `cupy.RawKernel` and `cupy.ndarray`.
"""

import ctypes
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, update_wrapper
from typing import Any, Concatenate, NoReturn, ParamSpec, Protocol, TypeVar

import cupy
import numpy as np
from cupy_backends.cuda.api import driver, runtime

from hps.cache.cuda import geometry
from hps.cache.cuda.compiler import machine_code_of, report_compiling
from hps.cache.cuda.kernels import SLOTS, Kernel, KernelCache
from hps.errors import DeviceError, DeviceMemoryError
from hps.ground.kernels.compilations import COMPILATIONS
from hps.ground.threads.lifetimes import disown_in_children, refusal
from hps.types import TableSpec

P = ParamSpec("P")
R = TypeVar("R")

CUDA_ERRORS = (runtime.CUDARuntimeError, driver.CUDADriverError, cupy.cuda.compiler.CompileException)
"""Exceptions of failed CUDA calls, except `cupy.cuda.memory.OutOfMemoryError`."""

_ALIGNMENT = 256
_HOST_TO_DEVICE = runtime.memcpyHostToDevice
_OUT_OF_MEMORY = "cudaErrorMemoryAllocation"
_LAUNCH_CONFIG = struct.Struct("=7I4xQQI4x")  # CUlaunchConfig: grid, block, shared memory, stream, attributes, their number
_LAUNCH_STREAM_AT = 32
_LAUNCH_ATTRIBUTE = struct.Struct("=i4xi60x")  # CUlaunchAttribute: id, value
_PROGRAMMATIC_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


@contextmanager
def on_device(device_id: int) -> Iterator[None]:
    """Make a device current for the thread until the block ends."""
    previous = runtime.getDevice()
    runtime.setDevice(device_id)  # even if it is already current: a new thread's first call creates the context
    try:
        yield
    finally:
        if previous != device_id:
            runtime.setDevice(previous)


class DeviceBuffer:
    """Device memory that only grows, losing its content. *One per thread.*"""

    __slots__ = ("_memory", "pointer", "size_bytes")

    def __init__(self) -> None:
        self._memory: Any = None
        self.pointer = 0
        self.size_bytes = 0

    def reserve(self, size_bytes: int) -> int:
        """Grow to at least this size; return the address."""
        if size_bytes > self.size_bytes:
            self._memory = None
            self.size_bytes = 0
            room = geometry.grown(size_bytes)
            self._memory = cupy.cuda.Memory(room)
            self.pointer = int(self._memory.ptr)
            self.size_bytes = room
        return self.pointer

    def array(self, offset_bytes: int, size: int, dtype: Any) -> Any:
        memory = cupy.cuda.UnownedMemory(self.pointer, self.size_bytes, self._memory)
        return cupy.ndarray((size,), dtype, cupy.cuda.MemoryPointer(memory, offset_bytes))


class _Pinned:
    """Host memory with the same address on the device."""

    __slots__ = ("_memory", "bytes", "pointer")

    def __init__(self, size_bytes: int) -> None:
        self._memory = cupy.cuda.PinnedMemory(size_bytes, runtime.hostAllocMapped | runtime.hostAllocPortable)
        self.pointer = int(self._memory.ptr)
        self.bytes: np.ndarray = np.ctypeslib.as_array((ctypes.c_uint8 * size_bytes).from_address(self.pointer))


class PinnedBuffer:
    """Pinned, mapped host memory, handed out in pieces until `reset`. *One per thread.*

    A piece stays valid until `reset`, even if the buffer grows for the next one.

    Attributes:
        used: bytes handed out.
    """

    __slots__ = ("_kept", "_memory", "used")

    def __init__(self) -> None:
        self._memory: _Pinned | None = None
        self._kept: list[_Pinned] = []
        self.used = 0

    def reset(self) -> None:
        """Reuse the memory of all pieces. The device must have finished with them."""
        self.used = 0
        if self._kept:
            self._kept = []

    def take(self, size_bytes: int) -> tuple[int, np.ndarray]:
        """Hand out a piece: its address on both sides, and (size_bytes,) uint8 over it."""
        start = self.used
        if self._memory is None or start + size_bytes > self._memory.bytes.size:
            size = 0 if self._memory is None else self._memory.bytes.size
            if self._memory is not None:
                self._kept.append(self._memory)
            self._memory = _Pinned(geometry.grown(max(2 * size, size_bytes)))
            start = 0
        self.used = -(-(start + size_bytes) // _ALIGNMENT) * _ALIGNMENT
        return self._memory.pointer + start, self._memory.bytes[start : start + size_bytes]


class ForeignStream:
    """Wraps a stream made outside CuPy; for `with stream_of(pointer):`."""

    __slots__ = ("_pointer",)

    def __init__(self, pointer: int) -> None:
        self._pointer = pointer

    def __cuda_stream__(self) -> tuple[int, int]:
        """Return the version of the protocol, and the stream."""
        return 0, self._pointer


def stream_of(pointer: int) -> Any:
    """Return the CuPy stream for a stream made outside CuPy."""
    return cupy.cuda.Stream.from_external(ForeignStream(pointer))


class Arguments:
    """The argument of one kernel, a struct packed in place. *One per thread.*

    Attributes:
        bytes: the struct, which is at `struct_address`.
        address: of the list of arguments, which is the struct's address alone.
    """

    __slots__ = ("_pointers", "address", "bytes", "struct_address")

    def __init__(self, size: int) -> None:
        memory = ctypes.create_string_buffer(size)
        self.bytes = memoryview(memory).cast("B")  # which takes slices twenty times as fast, and keeps the memory
        self.struct_address = ctypes.addressof(memory)
        self._pointers = (ctypes.c_void_p * 1)(self.struct_address)
        self.address = ctypes.addressof(self._pointers)

    def pack(self, layout: struct.Struct, offset: int, *values: Any) -> None:
        layout.pack_into(self.bytes, offset, *values)


def launch(handle: int, blocks: int, threads: int, arguments: Arguments, stream: int) -> None:
    """Launch a kernel whose only argument is a struct, copied before this returns."""
    driver.launchKernel(handle, blocks, 1, 1, threads, 1, 1, 0, stream, arguments.address, 0)


class DependentLaunch:
    """Launches kernels that can start before the previous one on the stream has ended, and wait for its end themselves.

    *One per thread.* That takes 0.7 us less than a launch in stream order, which devices before compute capability 9.0 keep.

    Attributes:
        config_at, stream_at: addresses of how it launches, for compiled code, and of the stream in that.
    """

    __slots__ = ("_attribute", "_config", "_launch", "config_at", "stream_at")

    def __init__(self, device_id: int) -> None:
        early = int(cupy.cuda.Device(device_id).compute_capability) >= 90
        self._attribute: Any = ctypes.create_string_buffer(_LAUNCH_ATTRIBUTE.pack(_PROGRAMMATIC_SERIALIZATION, int(early)))
        self._config: Any = ctypes.create_string_buffer(_LAUNCH_CONFIG.size)
        self.config_at = ctypes.addressof(self._config)
        self.stream_at = self.config_at + _LAUNCH_STREAM_AT
        self._launch = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
        self._launch.argtypes = [ctypes.c_void_p] * 4

    def launch(self, handle: int, blocks: int, threads: int, arguments: Arguments, stream: int) -> None:
        """Launch a kernel, as `launch` does."""
        self.configure(blocks, threads, stream)
        if code := self._launch(self.config_at, handle, arguments.address, None):
            raise driver.CUDADriverError(code)

    def configure(self, blocks: int, threads: int, stream: int = 0) -> None:
        _LAUNCH_CONFIG.pack_into(self._config, 0, blocks, 1, 1, threads, 1, 1, 0, stream, ctypes.addressof(self._attribute), 1)


def driver_function(*names: str) -> int:
    """Return the address of the first of these functions that the driver has, for compiled code."""
    library = ctypes.CDLL("libcuda.so.1")
    found = next(getattr(library, name) for name in names if hasattr(library, name))
    return ctypes.cast(found, ctypes.c_void_p).value or 0


@cache
def kernels_of(device_id: int) -> KernelCache:
    """Return the compiled kernels of a device, shared by all its caches."""
    kept: list[Any] = []  # a handle is valid while its module lives

    def compile_kernel(code: str, name: str) -> int:
        with on_device(device_id):
            module, architecture = cupy.cuda.function.Module(), cupy.cuda.Device(device_id).compute_capability
            machine_code, compiled_now = machine_code_of(code, name, architecture)
            if compiled_now:
                report_compiling(architecture)
            module.load(machine_code)
            function = module.get_function(name)
            kept.append(function)
            return int(function.ptr)

    return KernelCache(compile_kernel)


def compile_all(device_id: int, kernels: list[Kernel]) -> None:
    """Compile missing kernels concurrently: each takes a second the first time on a machine."""
    wanted = dict.fromkeys(kernels)
    with COMPILATIONS.running(len(wanted)) as advance, ThreadPoolExecutor(8) as compilers:
        for _ in compilers.map(kernels_of(device_id).handle, wanted):
            advance(1)


def copy_to_device(target: int, source: int, size_bytes: int, stream: int) -> None:
    """Start to copy host memory, pinned or not, to the device."""
    runtime.memcpyAsync(target, source, size_bytes, _HOST_TO_DEVICE, stream)


def copy_to_host(target: np.ndarray, source: int, stream: int) -> None:
    """Copy device memory to a host array and wait for it."""
    runtime.memcpyAsync(target.ctypes.data, source, target.nbytes, runtime.memcpyDeviceToHost, stream)
    runtime.streamSynchronize(stream)


@dataclass(frozen=True, slots=True, eq=False)
class DeviceTable:
    """The memory of one table; `cuda/embedding_cache.cuh` describes its layout. Freed with its last user.

    Attributes:
        pairs: number of bucket pairs; 0 without a cache.
        buckets, rows, counters: addresses on the device.
        packed: struct that the kernels take.
        copies: of a shared table, the address of the buckets on each device.
        near: the near table of the cache's device, if any.
    """

    spec: TableSpec
    pairs: int
    buckets: int
    rows: int
    counters: int
    packed: bytes
    memory: Any
    copies: Mapping[int, int] = field(default_factory=dict)
    near: "DeviceTable | None" = None

    @property
    def capacity_rows(self) -> int:
        return 2 * SLOTS * self.pairs

    def bytes_on(self, device_id: int) -> int:
        """Return the bytes on a device, with its near table."""
        near = 0 if self.near is None else self.near.bytes_on(device_id)
        if not self.copies:
            return geometry.size_bytes(self.pairs, self.spec.width) + near
        parts = geometry.part_bytes(self.pairs, self.spec.width, len(self.copies))
        return geometry.copy_bytes(self.pairs) + parts[list(self.copies).index(device_id)] + near

    def buckets_on(self, device_id: int) -> int:
        return self.copies.get(device_id, self.buckets)


class TableMemory:
    """The tables of one model on one device, until they are closed or CUDA fails. *Thread-safe.*

    Attributes:
        specs: tables, in the order of their ids.
        open: their memory; None once closed.
        error: CUDA error that made the device unusable, or one that shares its rows; None without one.
        static, complete: see `EmbeddingCache`.
        sharers: memories of the devices that share the tables. All are lost with one: changes no longer reach the rows.
    """

    __slots__ = ("__weakref__", "_disowned", "complete", "device_id", "error", "open", "sharers", "specs", "static")

    def __init__(self, specs: Sequence[TableSpec], device_id: int, static: bool = False) -> None:
        self.specs = tuple(specs)
        self.static = static
        self.complete = False
        self.device_id = device_id
        self.open: tuple[DeviceTable, ...] | None = None
        self.error: str | None = None
        self.sharers: Sequence[TableMemory] = ()
        self._disowned: object = None
        disown_in_children(self)

    def disown(self) -> None:
        """Refuse every call in a forked child."""
        # A child must not call CUDA, and freeing memory is a call: the reference keeps it from being freed there.
        self._disowned, self.open = self.open, None

    def tables(self) -> tuple[DeviceTable, ...]:
        """Return the tables; the caller holds them while it uses them.

        Raises:
            DeviceError: CUDA failed before.
            NotReadyError: the cache is closed.
        """
        if self.error is not None:
            raise DeviceError(f"using the embedding cache of CUDA device {self.device_id}: it failed before ({self.error})")
        tables = self.open
        if tables is None:
            raise refusal(self, "an embedding cache")
        return tables

    def fail(self, doing: str, error: Exception) -> NoReturn:
        """Raise the `hps` error for a CUDA error, and remember an unrecoverable one."""
        where = f"{doing} (embedding cache of CUDA device {self.device_id})"
        if isinstance(error, cupy.cuda.memory.OutOfMemoryError) or _OUT_OF_MEMORY in str(error):
            raise DeviceMemoryError(
                f"{where}: the device has no memory left ({error}); lower gpucacheper, max_batch_size or "
                "num_of_worker_buffer_in_pool"
            ) from error
        if self.lost(error):
            raise DeviceError(f"{where}: {error}; the process has to be restarted") from error
        raise DeviceError(f"{where}: {error}") from error

    def lost(self, error: Exception) -> bool:
        """Return True if the device is lost after an error, and record it."""
        try:
            with on_device(self.device_id):
                runtime.memGetInfo()  # a lost context refuses every call
        except CUDA_ERRORS:
            for sharer in self.sharers or (self,):
                sharer.error = sharer.error or str(error)
        return self.error is not None


class HasMemory(Protocol):
    """Has methods that `device_call` decorates."""

    @property
    def memory(self) -> TableMemory:
        """Tables that the methods use."""


M = TypeVar("M", bound=HasMemory)


def device_call(doing: str) -> Callable[[Callable[Concatenate[M, P], R]], Callable[Concatenate[M, P], R]]:
    """Run a method with its device current, and convert CUDA errors; `doing` starts their messages."""

    def decorate(method: Callable[Concatenate[M, P], R]) -> Callable[Concatenate[M, P], R]:
        def call(self: M, /, *args: P.args, **kwargs: P.kwargs) -> R:
            device, previous = self.memory.device_id, runtime.getDevice()
            try:
                runtime.setDevice(device)  # even if it is already current: a thread's first call binds the context
                return method(self, *args, **kwargs)
            except (*CUDA_ERRORS, cupy.cuda.memory.OutOfMemoryError) as error:
                self.memory.fail(doing, error)
            finally:
                if previous != device:
                    runtime.setDevice(previous)

        update_wrapper(call, method)
        return call

    return decorate
