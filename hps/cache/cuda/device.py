"""One CUDA device as the embedding cache uses it: memory of fixed and of growing size, compiled kernels, launches.

Pointers are integers, and the runtime's and driver's functions are called as they are: a launch costs 3 us this way, and
twice that through `cupy.RawKernel` and `cupy.ndarray`.
"""

import ctypes
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import Any

import cupy
import numpy as np
from cupy_backends.cuda.api import driver, runtime

from hps.cache.cuda.geometry import grown
from hps.cache.cuda.kernels import Kernel, KernelCache

CUDA_ERRORS = (runtime.CUDARuntimeError, driver.CUDADriverError, cupy.cuda.compiler.CompileException)
"""What a failed CUDA call raises. `cupy.cuda.memory.OutOfMemoryError` is not among them."""

_ALIGNMENT = 256
_OPTIONS = ("-std=c++17",)
_HOST_TO_DEVICE = runtime.memcpyHostToDevice


@contextmanager
def on_device(device_id: int) -> Iterator[None]:
    """Make a device the thread's current one, and the thread's own again afterwards."""
    previous = runtime.getDevice()
    runtime.setDevice(device_id)  # even where it is current already: a new thread's first call makes the context
    try:
        yield
    finally:
        if previous != device_id:
            runtime.setDevice(previous)


class DeviceBuffer:
    """Device memory that only ever grows; its content is lost when it does. *One per thread.*"""

    __slots__ = ("_memory", "pointer", "size_bytes")

    def __init__(self) -> None:
        self._memory: Any = None
        self.pointer = 0
        self.size_bytes = 0

    def reserve(self, size_bytes: int) -> int:
        """Make it at least this large; returns its address."""
        if size_bytes > self.size_bytes:
            self._memory = None
            self.size_bytes = 0
            room = grown(size_bytes)
            self._memory = cupy.cuda.Memory(room)
            self.pointer = int(self._memory.ptr)
            self.size_bytes = room
        return self.pointer

    def array(self, offset_bytes: int, size: int, dtype: Any) -> Any:
        """A part of it as a `cupy.ndarray`."""
        memory = cupy.cuda.UnownedMemory(self.pointer, self.size_bytes, self._memory)
        return cupy.ndarray((size,), dtype, cupy.cuda.MemoryPointer(memory, offset_bytes))


class _Pinned:
    """Host memory that the device reads and writes by the same address."""

    __slots__ = ("_memory", "bytes", "pointer")

    def __init__(self, size_bytes: int) -> None:
        self._memory = cupy.cuda.PinnedMemory(size_bytes, runtime.hostAllocMapped | runtime.hostAllocPortable)
        self.pointer = int(self._memory.ptr)
        self.bytes: np.ndarray = np.ctypeslib.as_array((ctypes.c_uint8 * size_bytes).from_address(self.pointer))


class PinnedBuffer:
    """Pinned, mapped host memory, handed out in pieces until `reset`. *One per thread.*

    A piece stays valid while the buffer grows for the next one, until `reset`.
    """

    __slots__ = ("_kept", "_memory", "_used")

    def __init__(self) -> None:
        self._memory: _Pinned | None = None
        self._kept: list[_Pinned] = []
        self._used = 0

    @property
    def used(self) -> int:
        """Bytes that are handed out."""
        return self._used

    def reset(self) -> None:
        """Take all pieces back; the device must be done with them."""
        self._used = 0
        if self._kept:
            self._kept = []

    def take(self, size_bytes: int) -> tuple[int, np.ndarray]:
        """A piece: its address on both sides, and (size_bytes,) uint8 over it."""
        start = self._used
        if self._memory is None or start + size_bytes > self._memory.bytes.size:
            size = 0 if self._memory is None else self._memory.bytes.size
            if self._memory is not None:
                self._kept.append(self._memory)
            self._memory = _Pinned(grown(max(2 * size, size_bytes)))
            start = 0
        self._used = -(-(start + size_bytes) // _ALIGNMENT) * _ALIGNMENT
        return self._memory.pointer + start, self._memory.bytes[start : start + size_bytes]


class ForeignStream:
    """A stream that CuPy did not make, in the form that CuPy accepts; for `with stream_of(pointer):`."""

    __slots__ = ("_pointer",)

    def __init__(self, pointer: int) -> None:
        self._pointer = pointer

    def __cuda_stream__(self) -> tuple[int, int]:
        """Version of the protocol, and the stream."""
        return 0, self._pointer


def stream_of(pointer: int) -> Any:
    """The CuPy stream over a stream that CuPy did not make."""
    return cupy.cuda.Stream.from_external(ForeignStream(pointer))


class Arguments:
    """The argument of one kernel, a struct that is packed in place. *One per thread.*"""

    __slots__ = ("_pointers", "address", "bytes")

    def __init__(self, size: int) -> None:
        self.bytes: Any = ctypes.create_string_buffer(size)
        self._pointers = (ctypes.c_void_p * 1)(ctypes.addressof(self.bytes))
        self.address = ctypes.addressof(self._pointers)

    def pack(self, layout: struct.Struct, offset: int, *values: Any) -> None:
        """Write values where the struct has them."""
        layout.pack_into(self.bytes, offset, *values)


def launch(handle: int, blocks: int, threads: int, arguments: Arguments, stream: int) -> None:
    """Launch a kernel whose only argument is a struct; it is copied before this returns."""
    driver.launchKernel(handle, blocks, 1, 1, threads, 1, 1, 0, stream, arguments.address, 0)


@cache
def kernels_of(device_id: int) -> KernelCache:
    """The compiled kernels of a device, shared by all its caches."""
    kept: list[Any] = []  # a handle is valid while its module lives

    def compile_kernel(code: str, name: str) -> int:
        with on_device(device_id):
            function = cupy.RawModule(code=code, options=_OPTIONS).get_function(name)
            kept.append(function)
            return int(function.kernel.ptr)

    return KernelCache(compile_kernel)


def compile_all(device_id: int, kernels: list[Kernel]) -> None:
    """Compile what is not compiled yet, several kernels at once: each takes a second the first time on a machine."""
    with ThreadPoolExecutor(8) as compilers:
        list(compilers.map(kernels_of(device_id).handle, dict.fromkeys(kernels)))


def copy_to_device(target: int, source: int, size_bytes: int, stream: int) -> None:
    """Begin to copy host memory, pinned or not, to the device."""
    runtime.memcpyAsync(target, source, size_bytes, _HOST_TO_DEVICE, stream)


def copy_to_host(target: np.ndarray, source: int, stream: int) -> None:
    """Copy device memory to a host array and wait for it."""
    runtime.memcpyAsync(target.ctypes.data, source, target.nbytes, runtime.memcpyDeviceToHost, stream)
    runtime.streamSynchronize(stream)
