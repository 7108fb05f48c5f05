"""CuPy on a device whose memory is the host's: its kernels are NumPy, so that what Python does for a lookup runs without a GPU.

    python -m tests.fakes.host_cuda ARGUMENTS OF PYTEST

runs tests of a GPU on it, in a process of its own, since the modules of the CUDA cache import CuPy once. It has the kernels of
lookups that wait and of changes; it reads no host memory in place, captures nothing, and runs everything at once. Tensors are
CuPy's only.
"""

import ctypes
import sys
from functools import cache
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

_rows: dict[int, dict[int, np.ndarray]] = {}  # by the address of a table's buckets: vectors by key
_functions: list[tuple[str, dict[str, int]]] = []  # names and constants of the kernels, by their handle less 1
launches: list[str] = []
"""Names of the launched kernels."""


def at(address: int, count: int, dtype: Any) -> np.ndarray:
    """Memory at an address, as an array."""
    size = count * np.dtype(dtype).itemsize
    memory = (ctypes.c_uint8 * size).from_address(address) if size else bytearray()
    return np.frombuffer(memory, dtype)


def _query(arguments: memoryview, _blocks: int, _constants: dict[str, int]) -> None:
    from hps.cache.cuda import kernels

    tail = kernels.QUERY_TAIL
    missing_keys, missing_positions, counts, any_missing, segments, *_ = tail.unpack(arguments[-tail.size :])
    for nth in range(segments):
        part = arguments[nth * kernels.SEGMENT.size : (nth + 1) * kernels.SEGMENT.size]
        keys_at, out, found, buckets, _vectors, n, _pairs, units, _first, missing, index = kernels.SEGMENT.unpack(part)
        dim, table = units * _constants["UNIT"], _rows.get(buckets, {})
        keys, vectors = at(keys_at, n, np.int64), at(out, n * dim, np.float32).reshape(n, dim)
        missed = [position for position, key in enumerate(keys.tolist()) if key not in table]
        for position, key in enumerate(keys.tolist()):
            if key in table:
                vectors[position] = table[key]
        if found:
            at(found, n, np.bool_)[:] = True
            at(found, n, np.bool_)[missed] = False
        if missed:
            [before] = at(counts + 4 * index, 1, np.uint32).tolist()
            place = missing + before
            at(missing_keys + 8 * place, len(missed), np.int64)[:] = keys[missed]
            at(missing_positions + 4 * place, len(missed), np.uint32)[:] = missed
            at(counts + 4 * index, 1, np.uint32)[0] += len(missed)
            at(any_missing, 1, np.uint32)[0] = 1


def _unique(arguments: memoryview, blocks: int, _constants: dict[str, int]) -> None:
    from hps.cache.cuda import kernels

    head, size = kernels.UNIQUE_HEAD, kernels.UNIQUE_SEGMENT.size
    missing_keys, counts, rows, distinct, on_host, totals = head.unpack(arguments[: head.size])
    for nth in range(blocks):
        missing, index = kernels.UNIQUE_SEGMENT.unpack(arguments[head.size + nth * size : head.size + (nth + 1) * size])
        [count] = at(counts + 4 * index, 1, np.uint32).tolist()
        keys, inverse = np.unique(at(missing_keys + 8 * missing, count, np.int64), return_inverse=True)
        at(rows + 4 * missing, count, np.uint32)[:] = inverse
        for place in (distinct, on_host):
            at(place + 8 * missing, keys.size, np.int64)[:] = keys
        at(totals + 8 * index, 2, np.uint32)[:] = count, keys.size
        at(counts + 4 * index, 1, np.uint32)[0] = 0


def _scatter(arguments: memoryview, _blocks: int, constants: dict[str, int]) -> None:
    from hps.cache.cuda import kernels

    positions, rows, fetched, vectors, out, found, n, units, default = kernels.SCATTER.unpack(arguments)
    dim = units * constants["UNIT"]
    for place, row in zip(at(positions, n, np.uint32).tolist(), at(rows, n, np.uint32).tolist(), strict=True):
        there = bool(fetched) and bool(at(fetched + row, 1, np.bool_)[0])
        at(out + 4 * dim * place, dim, np.float32)[:] = at(vectors + 4 * dim * row, dim, np.float32) if there else default
        if found:
            at(found + place, 1, np.bool_)[0] = there


def _insert(arguments: memoryview, _blocks: int, _constants: dict[str, int]) -> None:
    from hps.cache.cuda import kernels

    table, tail = kernels.TABLE, kernels.INSERT_TAIL
    buckets, *_, dim = table.unpack(arguments[: table.size])
    keys_at, vectors_at, chosen, n, mode = tail.unpack(arguments[table.size : table.size + tail.size])
    keys, vectors = at(keys_at, n, np.int64).tolist(), at(vectors_at, n * dim, np.float32).reshape(n, dim)
    wanted, own = at(chosen, n, np.bool_) if chosen else np.ones(n, np.bool_), _rows[buckets]
    for nth, key in enumerate(keys):
        if wanted[nth] and (mode & kernels.REPLACE if key in own else mode & kernels.ADMIT):
            own[key] = vectors[nth].copy()


def _erase(arguments: memoryview, _blocks: int, _constants: dict[str, int]) -> None:
    from hps.cache.cuda import kernels

    keys, n = kernels.ERASE_TAIL.unpack(arguments[kernels.TABLE.size : kernels.TABLE.size + kernels.ERASE_TAIL.size])
    own = _rows[kernels.TABLE.unpack(arguments[: kernels.TABLE.size])[0]]
    for key in at(keys, n, np.int64).tolist():
        own.pop(key, None)


def _dump(arguments: memoryview, _blocks: int, _constants: dict[str, int]) -> None:
    from hps.cache.cuda import kernels

    own = _rows[kernels.TABLE.unpack(arguments[: kernels.TABLE.size])[0]]
    tail = arguments[kernels.TABLE.size : kernels.TABLE.size + kernels.DUMP_TAIL.size]
    keys, count, first, _n = kernels.DUMP_TAIL.unpack(tail)
    if not first:
        at(keys, len(own), np.int64)[:] = list(own)
        at(count, 1, np.uint64)[0] = len(own)


_KERNELS = {"query": _query, "unique": _unique, "scatter": _scatter, "insert": _insert, "erase": _erase, "dump": _dump}


class _Memory:
    """Memory of the device, and pinned memory."""

    def __init__(self, size: int, *_: Any) -> None:
        self._memory = np.zeros(size + 256, np.uint8)
        self.ptr = self._memory.ctypes.data + -self._memory.ctypes.data % 256


class _Stream:
    ptr = 1

    def __init__(self, *_: Any, **__: Any) -> None:
        _Stream.ptr += 1
        self.ptr = _Stream.ptr

    def synchronize(self) -> None: ...


class Array:
    """`cupy.ndarray`, over an array of NumPy's."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.data = SimpleNamespace(ptr=array.ctypes.data, device_id=0)
        self.dtype, self.shape, self.size, self.flags = array.dtype, array.shape, array.size, array.flags

    def __getitem__(self, place: Any) -> "Array":
        return Array(self.array[place])

    def reshape(self, *shape: int) -> "Array":
        return Array(self.array.reshape(*shape))

    def set(self, array: np.ndarray) -> None:
        self.array[...] = array

    def get(self) -> np.ndarray:
        return self.array.copy()

    def __dlpack__(self, **_: Any) -> Any:
        raise AssertionError("an array of CuPy's is exported")


def _launch(handle: int, blocks: int, *rest: Any) -> None:
    (name, constants), address = _functions[handle - 1], rest[7]
    pointer = ctypes.c_void_p.from_address(address).value or 0
    from hps.cache.cuda import kernels

    segments = constants.get("SEGMENTS", 0)
    size = {
        "query": segments * kernels.SEGMENT.size + kernels.QUERY_TAIL.size,
        "unique": kernels.UNIQUE_HEAD.size + segments * kernels.UNIQUE_SEGMENT.size,
        "scatter": kernels.SCATTER.size,
        "insert": kernels.TABLE.size + kernels.INSERT_TAIL.size,
        "erase": kernels.TABLE.size + kernels.ERASE_TAIL.size,
        "dump": kernels.TABLE.size + kernels.DUMP_TAIL.size,
    }[name]
    launches.append(name)
    _KERNELS[name](memoryview((ctypes.c_uint8 * size).from_address(pointer)).cast("B"), blocks, constants)


def _compile(code: str, name: str) -> int:
    """Note a kernel with its constants, of which the first definition counts: others are defaults. Return its handle."""
    defines = [line.split() for line in code.splitlines() if line.startswith("#define HPS_")]
    numbers = [(one[1], int(one[2])) for one in reversed(defines) if len(one) > 2 and one[2].isdigit()]
    _functions.append((name, {name.removeprefix("HPS_"): number for name, number in numbers}))
    return len(_functions)


def _memset(address: int, value: int, size: int, *_: Any) -> None:
    at(address, size, np.uint8)[:] = value
    if size and not value:
        _rows[address] = {}


def _memcpy(target: int, source: int, size: int, *_: Any) -> None:
    ctypes.memmove(target, source, size)


def _nothing(*_: Any) -> int:
    return 0


class _Failed(Exception): ...


def install() -> None:
    """Put the stand-ins where CuPy would be imported from."""
    runtime, driver = ModuleType("runtime"), ModuleType("driver")
    nothing = (
        "setDevice getDevice streamSynchronize eventSynchronize eventRecord eventQuery streamWaitEvent deviceGetAttribute "
        "streamIsCapturing hostUnregister"
    )
    vars(runtime).update(dict.fromkeys(nothing.split(), _nothing))
    vars(runtime).update(
        {
            "CUDARuntimeError": type("CUDARuntimeError", (_Failed,), {}),
            "getDeviceCount": lambda: 1,
            "getDeviceProperties": lambda _device: {"name": b"host"},
            "memGetInfo": lambda: (1 << 34, 1 << 34),
            "memset": _memset,
            "memsetAsync": _memset,
            "memcpy": _memcpy,
            "memcpyAsync": _memcpy,
            "pointerGetAttributes": lambda _address: SimpleNamespace(type=0, devicePointer=0),
            "memcpyHostToDevice": 1,
            "memcpyDeviceToHost": 2,
            "memoryTypeHost": 1,
            "hostAllocMapped": 1,
            "hostAllocPortable": 2,
        }
    )
    vars(driver).update({"CUDADriverError": type("CUDADriverError", (_Failed,), {}), "launchKernel": _launch})
    cupy, cuda, api = ModuleType("cupy"), ModuleType("cupy.cuda"), ModuleType("cupy_backends.cuda.api")
    device = SimpleNamespace(compute_capability="90", attributes={"MultiProcessorCount": 1})
    vars(cuda).update(
        {
            "Memory": _Memory,
            "PinnedMemory": _Memory,
            "PinnedMemoryPointer": type("PinnedMemoryPointer", (), {}),
            "Stream": _Stream,
            "Event": lambda **_: SimpleNamespace(ptr=1),
            "Device": lambda _device: device,
            "is_available": lambda: True,
            "alloc_pinned_memory": bytearray,
            "get_current_stream": lambda *_device: _NULL,
            "compiler": SimpleNamespace(CompileException=type("CompileException", (_Failed,), {})),
            "memory": SimpleNamespace(OutOfMemoryError=type("OutOfMemoryError", (_Failed,), {})),
        }
    )
    cupy.__spec__ = ModuleSpec("cupy", None)
    vars(cupy).update({"cuda": cuda, "ndarray": Array})
    vars(cupy).update(
        {
            "zeros": lambda shape, dtype: Array(np.zeros(shape, dtype)),
            "empty": lambda shape, dtype: Array(np.empty(shape, dtype)),
            "full": lambda shape, value, dtype: Array(np.full(shape, value, dtype)),
            "nan": np.nan,
            "float32": np.float32,
            "asarray": lambda array: Array(np.array(array)),
        }
    )
    vars(api).update({"runtime": runtime, "driver": driver})
    sys.modules |= {"cupy": cupy, "cupy.cuda": cuda, "cupy_backends": ModuleType("cupy_backends")}
    sys.modules |= {"cupy_backends.cuda": ModuleType("cupy_backends.cuda"), "cupy_backends.cuda.api": api}
    libraries = ModuleType("cupy_backends.cuda.libs")
    vars(libraries).update({"nvrtc": ModuleType("nvrtc")})
    sys.modules |= {"cupy_backends.cuda.libs": libraries}
    from hps.cache.cuda import device as ours
    from hps.cache.cuda.kernels import KernelCache

    ours.kernels_of = cache(lambda _device: KernelCache(_compile))
    ours.DependentLaunch = lambda _device: None  # type: ignore[assignment,misc]


_NULL = SimpleNamespace(ptr=0, synchronize=_nothing)


def main() -> None:
    """Run pytest on the stand-ins."""
    import pytest

    install()
    raise SystemExit(pytest.main(sys.argv[1:]))


if __name__ == "__main__":
    main()
