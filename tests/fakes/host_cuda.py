"""CuPy on two devices whose memory is the host's: its kernels are NumPy, so that what Python does for them runs without a GPU.

    python -m tests.fakes.host_cuda ARGUMENTS OF PYTEST

runs tests of a GPU on it, in a process of its own, since the modules of the CUDA cache import CuPy once. It has the kernels of
lookups that wait, of changes, and of copies of rows that devices share. Of host memory it reads `host_rows`. It captures
nothing, and runs everything at once. All copies of the buckets of a shared table are one table. Tensors are CuPy's only.
"""

import ctypes
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

_rows: dict[int, dict[int, np.ndarray]] = {}  # by the address of a table's buckets: vectors by key
_copies: dict[int, int] = {}  # by the address of a copy of the buckets of a shared table: that of its first copy
_current = threading.local()  # its `device`, once set
_functions: list[tuple[str, dict[str, int]]] = []  # names and constants of the kernels, by their handle less 1
DEVICES = 2
_MAPS_MEMORY = 102  # CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
host_rows: dict[int, dict[int, np.ndarray]] = {}
"""What lookups read in host memory: by the address of a layout, vectors by key."""
launches: list[str] = []
"""Names of the launched kernels."""


def at(address: int, count: int, dtype: Any) -> np.ndarray:
    """Memory at an address, as an array."""
    size = count * np.dtype(dtype).itemsize
    memory = (ctypes.c_uint8 * size).from_address(address) if size else bytearray()
    return np.frombuffer(memory, dtype)


def _table_at(buckets: int) -> dict[int, np.ndarray]:
    return _rows.get(_copies.get(buckets, buckets), {})


def _notes(buckets: int, pairs: int, keys: Sequence[int]) -> None:
    """Note keys as samples whose rows lie on other devices than a copy of the buckets."""
    from hps.cache.cuda import kernels, structs

    _near, _rows_at, samples, count, near_pairs, _stretch, first, own, room = structs.SHARING.unpack(
        at(buckets - kernels.SHARING_BYTES, structs.SHARING.size, np.uint8).tobytes()
    )
    for key in keys if near_pairs else ():
        if not first <= kernels.home_of(key, pairs) // 2 < first + own:
            [before] = at(count, 1, np.uint64).tolist()
            if before < room:
                at(samples + 8 * before, 1, np.int64)[0] = key
            at(count, 1, np.uint64)[0] += 1


def _near_of(buckets: int) -> dict[int, np.ndarray]:
    """The near table beside a copy of the buckets of a shared table."""
    from hps.cache.cuda import kernels, structs

    if buckets not in _copies:
        return {}
    sharing = at(buckets - kernels.SHARING_BYTES, structs.SHARING.size, np.uint8).tobytes()
    near_buckets, *_, near_pairs, _stretch, _first, _own, _room = structs.SHARING.unpack(sharing)
    return _table_at(near_buckets) if near_pairs else {}


def _query(arguments: memoryview, _blocks: int, _constants: dict[str, int]) -> None:
    from hps.cache.cuda import structs

    tail = structs.QUERY_TAIL
    missing_keys, missing_positions, counts, any_missing, segments, *_ = tail.unpack(arguments[-tail.size :])
    for nth in range(segments):
        part = arguments[nth * structs.SEGMENT.size : (nth + 1) * structs.SEGMENT.size]
        keys_at, out, found, buckets, _vectors, n, pairs, units, _first, missing, index = structs.SEGMENT.unpack(part)
        dim, table, near = units * _constants["UNIT"], _table_at(buckets), _near_of(buckets)
        keys, vectors = at(keys_at, n, np.int64), at(out, n * dim, np.float32).reshape(n, dim)
        missed, shared = [], []
        for position, key in enumerate(keys.tolist()):
            if (row := near.get(key)) is not None:
                vectors[position] = row
            elif (row := table.get(key)) is not None:
                vectors[position] = row
                shared.append(key)
            else:
                missed.append(position)
        if buckets in _copies:
            _notes(buckets, pairs, shared)
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


def _answer(arguments: memoryview, _blocks: int, constants: dict[str, int]) -> None:
    """Answer misses from `host_rows`, and admit none."""
    from hps.cache.cuda import structs

    tail, size = structs.ANSWER_TAIL, structs.ANSWER_SEGMENT.size
    shared = dict(zip(tail.names, tail.unpack(arguments[-tail.size :]), strict=True))
    for nth in range(shared["segment_count"]):
        values = structs.ANSWER_SEGMENT.unpack(arguments[nth * size : (nth + 1) * size])
        segment = dict(zip(structs.ANSWER_SEGMENT.names, values, strict=True))
        dim, index, missing = segment["units"] * constants["UNIT"], segment["index"], segment["missing"]
        count, left_count = (at(shared[name] + 4 * index, 1, np.uint32) for name in ("missing_counts", "left_counts"))
        linked = absent = 0
        misses = (at(shared["missing_keys"] + 8 * missing, count[0], np.int64), shared["missing_positions"] + 4 * missing)
        for key, position in zip(misses[0].tolist(), at(misses[1], count[0], np.uint32).tolist(), strict=True):
            row = host_rows.get(segment["layout"], {}).get(key)
            if row is None and not segment["authoritative"]:
                place = missing + int(left_count[0])
                at(shared["left_keys"] + 8 * place, 1, np.int64)[0] = key
                at(shared["left_positions"] + 4 * place, 1, np.uint32)[0] = position
                left_count += 1
                at(shared["any_left"], 1, np.uint32)[0] = 1
                continue
            linked, absent = linked + (row is not None), absent + (row is None)
            at(segment["out"] + 4 * dim * position, dim, np.float32)[:] = segment["default_value"] if row is None else row
        at(shared["reports"] + 8 * index, 2, np.uint32)[:] = linked, absent
        count[:] = 0
    if shared["done"]:
        at(shared["done"], 1, np.uint64)[0] = shared["number"]


def _unique(arguments: memoryview, blocks: int, _constants: dict[str, int]) -> None:
    from hps.cache.cuda import structs

    head, size = structs.UNIQUE_HEAD, structs.UNIQUE_SEGMENT.size
    missing_keys, counts, rows, distinct, on_host, totals = head.unpack(arguments[: head.size])
    for nth in range(blocks):
        missing, index = structs.UNIQUE_SEGMENT.unpack(arguments[head.size + nth * size : head.size + (nth + 1) * size])
        [count] = at(counts + 4 * index, 1, np.uint32).tolist()
        keys, inverse = np.unique(at(missing_keys + 8 * missing, count, np.int64), return_inverse=True)
        at(rows + 4 * missing, count, np.uint32)[:] = inverse
        for place in (distinct, on_host):
            at(place + 8 * missing, keys.size, np.int64)[:] = keys
        at(totals + 8 * index, 2, np.uint32)[:] = count, keys.size
        at(counts + 4 * index, 1, np.uint32)[0] = 0


def _scatter(arguments: memoryview, _blocks: int, constants: dict[str, int]) -> None:
    from hps.cache.cuda import structs

    positions, rows, fetched, vectors, out, found, n, units, default = structs.SCATTER.unpack(arguments)
    dim = units * constants["UNIT"]
    for place, row in zip(at(positions, n, np.uint32).tolist(), at(rows, n, np.uint32).tolist(), strict=True):
        there = bool(fetched) and bool(at(fetched + row, 1, np.bool_)[0])
        at(out + 4 * dim * place, dim, np.float32)[:] = at(vectors + 4 * dim * row, dim, np.float32) if there else default
        if found:
            at(found + place, 1, np.bool_)[0] = there


def _insert(arguments: memoryview, _blocks: int, _constants: dict[str, int]) -> None:
    from hps.cache.cuda import kernels, structs

    table, tail = structs.TABLE, structs.INSERT_TAIL
    buckets, _vectors, counters, *_, dim, _sharing = table.unpack(arguments[: table.size])
    keys_at, vectors_at, chosen, n, mode = tail.unpack(arguments[table.size : table.size + tail.size])
    keys, vectors = at(keys_at, n, np.int64).tolist(), at(vectors_at, n * dim, np.float32).reshape(n, dim)
    wanted, own = at(chosen, n, np.bool_) if chosen else np.ones(n, np.bool_), _table_at(buckets)
    before = len(own)
    for nth, key in enumerate(keys):
        if wanted[nth] and (mode & kernels.REPLACE if key in own else mode & kernels.ADMIT):
            own[key] = vectors[nth].copy()
    at(counters, 1, np.uint64)[0] += len(own) - before


def _erase(arguments: memoryview, _blocks: int, _constants: dict[str, int]) -> None:
    from hps.cache.cuda import structs

    keys, n = structs.ERASE_TAIL.unpack(arguments[structs.TABLE.size : structs.TABLE.size + structs.ERASE_TAIL.size])
    buckets, _vectors, counters, *_ = structs.TABLE.unpack(arguments[: structs.TABLE.size])
    own = _table_at(buckets)
    before = len(own)
    for key in at(keys, n, np.int64).tolist():
        own.pop(key, None)
    at(counters, 3, np.uint64)[2] += before - len(own)


def _dump(arguments: memoryview, _blocks: int, _constants: dict[str, int]) -> None:
    from hps.cache.cuda import structs

    own = _table_at(structs.TABLE.unpack(arguments[: structs.TABLE.size])[0])
    tail = arguments[structs.TABLE.size : structs.TABLE.size + structs.DUMP_TAIL.size]
    keys, count, first, _n = structs.DUMP_TAIL.unpack(tail)
    if not first:
        at(keys, len(own), np.int64)[:] = list(own)
        at(count, 1, np.uint64)[0] = len(own)


def _promote(arguments: memoryview, _blocks: int, _constants: dict[str, int]) -> None:
    from hps.cache.cuda import structs

    size, tail = structs.TABLE.size, structs.PROMOTE_TAIL
    shared = _table_at(structs.TABLE.unpack(arguments[:size])[0])
    near_buckets, _vectors, counters, *_ = structs.TABLE.unpack(arguments[size : 2 * size])
    near = _table_at(near_buckets)
    _own, samples, count, _staged, room = tail.unpack(arguments[2 * size :])
    for key in at(samples, min(room, int(at(count, 1, np.uint64)[0])), np.int64).tolist():
        if key in shared and key not in near:
            near[key] = shared[key].copy()
            at(counters, 1, np.uint64)[0] += 1


_KERNELS = {one.__name__[1:]: one for one in (_query, _answer, _unique, _scatter, _insert, _erase, _dump, _promote)}


class _Memory:
    """Memory of the device, and pinned memory."""

    def __init__(self, size: int, *_: Any) -> None:
        self._memory = np.zeros(size + 256, np.uint8)
        self.ptr = self._memory.ctypes.data + -self._memory.ctypes.data % 256


class _SpreadMemory:
    """`SpreadMemory` of a shared table: a copy of the buckets for each device, then the rows."""

    def __init__(self, parts: Sequence[tuple[int, int]], device_ids: Sequence[int]) -> None:
        from hps.cache.cuda.kernels import SHARING_BYTES

        self._memory = _Memory(sum(size for _device, size in parts))
        self.address = self._memory.ptr
        first = self.address + SHARING_BYTES
        copies = [first + nth * parts[0][1] for nth in range(len(device_ids))]
        _copies.update(dict.fromkeys(copies, first))
        weakref.finalize(self, lambda: [_copies.pop(copy) for copy in copies])


class _Device:
    compute_capability, attributes = "90", {"MultiProcessorCount": 1}

    def __init__(self, device: int | None = None) -> None:
        self.id = _get_device() if device is None else device

    def __enter__(self) -> "_Device":
        self._before = _get_device()
        _set_device(self.id)
        return self

    def __exit__(self, *_: object) -> None:
        _set_device(self._before)

    def synchronize(self) -> None: ...


class _Event:
    ptr = 1 << 20

    def __init__(self, **_: Any) -> None:
        _Event.ptr += 1
        self.ptr = _Event.ptr


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
        self.device = _Device()
        self.data = SimpleNamespace(ptr=array.ctypes.data, device_id=self.device.id)
        self.dtype, self.shape, self.size, self.flags = array.dtype, array.shape, array.size, array.flags

    def __len__(self) -> int:
        return len(self.array)

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
    assert rest[2] % 32 == 0, "lanes of a warp are missing"
    pointer = ctypes.c_void_p.from_address(address).value or 0
    from hps.cache.cuda import structs

    segments = constants.get("SEGMENTS", 0)
    size = {
        "query": segments * structs.SEGMENT.size + structs.QUERY_TAIL.size,
        "answer": segments * structs.ANSWER_SEGMENT.size + structs.ANSWER_TAIL.size,
        "unique": structs.UNIQUE_HEAD.size + segments * structs.UNIQUE_SEGMENT.size,
        "scatter": structs.SCATTER.size,
        "insert": structs.TABLE.size + structs.INSERT_TAIL.size,
        "erase": structs.TABLE.size + structs.ERASE_TAIL.size,
        "dump": structs.TABLE.size + structs.DUMP_TAIL.size,
        "promote": 2 * structs.TABLE.size + structs.PROMOTE_TAIL.size,
    }[name]
    launches.append(name)
    _KERNELS[name](memoryview((ctypes.c_uint8 * size).from_address(pointer)).cast("B"), blocks, constants)


def _launch_early(config: int, handle: int, arguments: int, _extra: None) -> int:
    """`cuLaunchKernelEx`, of grid, block, shared memory and stream."""
    _launch(handle, *at(config, 7, np.uint32).tolist(), int(at(config + 32, 1, np.uint64)[0]), arguments, 0)
    return 0


def _succeeds(call: Any) -> int:
    try:
        call()
    except (AssertionError, LookupError, ValueError):
        return 700
    return 0


_ADDRESS, _WORD = ctypes.c_void_p, ctypes.c_uint
_DRIVER = {
    "cuLaunchKernel": ctypes.CFUNCTYPE(ctypes.c_int, _ADDRESS, *[_WORD] * 7, *[_ADDRESS] * 3)(
        lambda *arguments: _succeeds(lambda: _launch(*arguments))
    ),
    "cuStreamWriteValue64": ctypes.CFUNCTYPE(ctypes.c_int, _ADDRESS, _ADDRESS, ctypes.c_uint64, _WORD)(
        lambda _stream, address, value, _flags: at(address, 1, np.uint64).fill(value) or 0
    ),
    "cuStreamQuery": ctypes.CFUNCTYPE(ctypes.c_int, _ADDRESS)(lambda _stream: 0),
    "cuCtxGetCurrent": ctypes.CFUNCTYPE(ctypes.c_int, _ADDRESS)(
        lambda address: at(address, 1, np.uint64).fill(_current_context()) or 0
    ),
    "cuLaunchKernelEx": ctypes.CFUNCTYPE(ctypes.c_int, *[_ADDRESS] * 4)(
        lambda *arguments: _succeeds(lambda: _launch_early(*arguments))
    ),
    "cuEventRecord": ctypes.CFUNCTYPE(ctypes.c_int, _ADDRESS, _ADDRESS)(lambda _event, _stream: 0),
    "cuCtxSetCurrent": ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64)(lambda context: _set_device(context - 1) or 0),
}
"""Functions of the driver for compiled code. The context of a device is its number plus 1."""


def _current_context() -> int:
    return _get_device() + 1


def _compile(code: str, name: str) -> int:
    """Note a kernel with its constants, of which the first definition counts: others are defaults. Return its handle."""
    defines = [line.split() for line in code.splitlines() if line.startswith("#define HPS_")]
    numbers = [(define[1], int(define[2])) for define in reversed(defines) if len(define) > 2 and define[2].isdigit()]
    _functions.append((name, {name.removeprefix("HPS_"): number for name, number in numbers}))
    return len(_functions)


def _memset(address: int, value: int, size: int, *_: Any) -> None:
    at(address, size, np.uint8)[:] = value
    if size and not value:
        _rows[_copies.get(address, address)] = {}


def _memcpy(target: int, source: int, size: int, *_: Any) -> None:
    ctypes.memmove(target, source, size)


def _nothing(*_: Any) -> int:
    return 0


def _set_device(device: int) -> None:
    _current.device = device


def _attribute(attribute: int, device: int) -> int:
    if device >= DEVICES:
        raise sys.modules["cupy_backends.cuda.api"].runtime.CUDARuntimeError(101)
    return int(attribute == _MAPS_MEMORY)


def _attribute_of_link(value: Any, _attribute: int, _device: int, _other: int) -> int:
    value._obj.value = 1
    return 0


def _get_device() -> int:
    return getattr(_current, "device", 0)


class _Failed(Exception): ...


def install() -> None:
    """Put the stand-ins where CuPy would be imported from."""
    runtime, driver = ModuleType("runtime"), ModuleType("driver")
    nothing = (
        "deviceSynchronize streamSynchronize eventSynchronize eventRecord eventQuery streamWaitEvent streamIsCapturing "
        "hostUnregister"
    )
    vars(runtime).update(dict.fromkeys(nothing.split(), _nothing))

    def failure(name: str) -> type[Exception]:
        return type(name, (_Failed,), {})

    vars(runtime).update(CUDARuntimeError=failure("CUDARuntimeError"), getDeviceCount=lambda: DEVICES, getDevice=_get_device)
    vars(runtime).update(setDevice=_set_device, deviceCanAccessPeer=lambda _device, _other: 1, deviceGetAttribute=_attribute)
    vars(runtime).update(getDeviceProperties=lambda _device: {"name": b"host"}, memGetInfo=lambda: (1 << 34, 1 << 34))
    vars(runtime).update(memset=_memset, memsetAsync=_memset, memcpy=_memcpy, memcpyAsync=_memcpy)
    vars(runtime).update(pointerGetAttributes=lambda _address: SimpleNamespace(type=0, devicePointer=0), memoryTypeHost=1)
    vars(runtime).update(memcpyHostToDevice=1, memcpyDeviceToHost=2, hostAllocMapped=1, hostAllocPortable=2)
    vars(driver).update(CUDADriverError=failure("CUDADriverError"), launchKernel=_launch)
    cupy, cuda, api = ModuleType("cupy"), ModuleType("cupy.cuda"), ModuleType("cupy_backends.cuda.api")
    vars(cuda).update(Memory=_Memory, PinnedMemory=_Memory, PinnedMemoryPointer=type("PinnedMemoryPointer", (), {}))
    vars(cuda).update(Stream=_Stream, Event=_Event, Device=_Device, is_available=lambda: True, alloc_pinned_memory=bytearray)
    vars(cuda).update(
        get_current_stream=lambda *_device: _NULL, memory=SimpleNamespace(OutOfMemoryError=failure("OutOfMemory"))
    )
    vars(cuda).update(driver=SimpleNamespace(ctxGetCurrent=_current_context))
    vars(cuda).update(compiler=SimpleNamespace(CompileException=failure("CompileException")))
    cupy.__spec__ = ModuleSpec("cupy", None)
    cuda.runtime = runtime  # type: ignore[attr-defined]
    vars(cupy).update({"cuda": cuda, "ndarray": Array})
    vars(cupy).update(zeros=lambda shape, dtype: Array(np.zeros(shape, dtype)), asarray=lambda array: Array(np.array(array)))
    vars(cupy).update(empty=lambda shape, dtype: Array(np.empty(shape, dtype)), nan=np.nan, float32=np.float32, bool_=np.bool_)
    vars(cupy).update(full=lambda shape, value, dtype: Array(np.full(shape, value, dtype)))
    vars(api).update({"runtime": runtime, "driver": driver})
    sys.modules |= {"cupy": cupy, "cupy.cuda": cuda, "cupy_backends": ModuleType("cupy_backends")}
    sys.modules |= {"cupy_backends.cuda": ModuleType("cupy_backends.cuda"), "cupy_backends.cuda.api": api}
    libraries = ModuleType("cupy_backends.cuda.libs")
    vars(libraries).update({"nvrtc": ModuleType("nvrtc")})
    sys.modules |= {"cupy_backends.cuda.libs": libraries}
    from hps.cache.cuda import device as ours
    from hps.cache.cuda import spread_memory, tables
    from hps.cache.cuda.kernels import KernelCache

    ours.kernels_of = cache(lambda _device: KernelCache(_compile))
    tables.SpreadMemory = _SpreadMemory  # type: ignore[assignment,misc]
    spread_memory._driver = lambda: SimpleNamespace(cuDeviceGetP2PAttribute=_attribute_of_link)
    library = SimpleNamespace(**_DRIVER)
    ours.ctypes = SimpleNamespace(**vars(ctypes) | {"CDLL": lambda _name: library})  # type: ignore[assignment,attr-defined]


_NULL = SimpleNamespace(ptr=0, synchronize=_nothing)


@contextmanager
def installed() -> Iterator[None]:
    """Stand-ins for as long as the block: modules of ours that use CuPy are imported anew, and those before come back."""
    import hps.cache.cuda as package

    def take() -> dict[str, ModuleType]:
        names = [name for name in sys.modules if name.partition(".")[0] in ("cupy", "cupy_backends")]
        names += [name for name in sys.modules if name.startswith(f"{package.__name__}.")]
        return {name: sys.modules.pop(name) for name in names}

    before = take()
    try:
        install()
        yield
    finally:
        for name in take():
            vars(package).pop(name.removeprefix(f"{package.__name__}."), None)
        sys.modules.update(before)
        for name, module in before.items():
            if name.startswith(package.__name__):
                setattr(package, name.removeprefix(f"{package.__name__}."), module)


def main() -> None:
    """Run pytest on the stand-ins."""
    import pytest

    install()
    raise SystemExit(pytest.main(sys.argv[1:]))


if __name__ == "__main__":
    main()
