"""Memory of several CUDA devices under one range of addresses, which all of them read and write.

CuPy does not wrap the driver's management of virtual memory (CUDA driver API, section 6.14).
"""

import ctypes
import weakref
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from typing import Any

from cupy_backends.cuda.api import runtime

from hps.cache.base import MOST_SHARERS
from hps.cache.cuda.device import CUDA_ERRORS, on_device
from hps.cache.cuda.geometry import GRANULE_BYTES
from hps.errors import DeviceError, DeviceMemoryError

_ON_DEVICE = 1  # CU_MEM_ALLOCATION_TYPE_PINNED, CU_MEM_LOCATION_TYPE_DEVICE
_READ_WRITE = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE
_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
_MANAGES_ADDRESSES = 102  # CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
_NATIVE_ATOMICS = 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED


class _MemoryProperties(ctypes.Structure):  # CUmemAllocationProp
    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location_type", ctypes.c_int),
        ("device", ctypes.c_int),
        ("metadata", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
    )


class _MemoryAccess(ctypes.Structure):  # CUmemAccessDesc
    _fields_ = (("location_type", ctypes.c_int), ("device", ctypes.c_int), ("flags", ctypes.c_int))


@cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *arguments: Any) -> None:
    code = getattr(_driver(), name)(*arguments)
    if code == _OUT_OF_MEMORY:
        raise DeviceMemoryError(f"spreading memory over several CUDA devices: {name}: the device has no memory left")
    if code:
        raise DeviceError(f"spreading memory over several CUDA devices: {name} failed with error {code}")


def reason_against(device_ids: Sequence[int]) -> str | None:
    """Return why these devices cannot share memory, for the log; None if they can."""
    # Writers own a pair of buckets by an atomic operation on its device. Over a link without native atomics, such as
    # PCIe, that is a read and a write, and two writers could own the pair (CUDA driver API, cuDeviceGetP2PAttribute).
    if len(device_ids) > MOST_SHARERS:
        return f"got {len(device_ids)} devices, expected at most {MOST_SHARERS}"
    if len(set(device_ids)) < len(device_ids):
        return "got a device twice"
    if missing := [device for device in device_ids if not 0 <= device < runtime.getDeviceCount()]:
        return f"there is no CUDA device {missing[0]}"
    for device in device_ids:
        if not runtime.deviceGetAttribute(_MANAGES_ADDRESSES, device):
            return f"CUDA device {device} does not map memory of other devices"
        for peer in device_ids:
            if device != peer and not runtime.deviceCanAccessPeer(device, peer):
                return f"CUDA device {device} cannot access the memory of device {peer} (no NVLink, or partitioned by MIG)"
            if device != peer and not _native_atomics(device, peer):
                return f"CUDA device {device} has no native atomics in the memory of device {peer} (no NVLink)"
    return None


def _native_atomics(device: int, peer: int) -> bool:
    supported = ctypes.c_int()
    _call("cuDeviceGetP2PAttribute", ctypes.byref(supported), _NATIVE_ATOMICS, device, peer)
    return bool(supported.value)


class SpreadMemory:
    """A range of addresses whose parts lie in the memory of different devices. Freed with its last user.

    Attributes:
        address: of the first byte.
    """

    __slots__ = ("__weakref__", "_free", "address")

    def __init__(self, parts: Sequence[tuple[int, int]], device_ids: Sequence[int]) -> None:
        """Allocate a range; its content is unspecified.

        Args:
            parts: device and bytes, a multiple of GRANULE_BYTES, of each part in sequence.
            device_ids: the devices that access it.

        Raises:
            DeviceMemoryError: a device has too little memory.
            DeviceError: the devices cannot access each other's memory.
        """
        total, at = sum(size for _, size in parts), ctypes.c_uint64()
        _call("cuMemAddressReserve", ctypes.byref(at), ctypes.c_size_t(total), ctypes.c_size_t(0), ctypes.c_uint64(0), 0)
        self.address = start = int(at.value)
        mapped: list[tuple[int, int, int]] = []  # handle, address, bytes
        self._free = weakref.finalize(self, _free, start, total, mapped, tuple(device_ids))
        self._free.atexit = False  # the process's end frees it, and a forked child must not
        for device, size in parts:
            granule, handle = ctypes.c_size_t(), ctypes.c_uint64()
            wanted = _MemoryProperties(_ON_DEVICE, 0, _ON_DEVICE, device, None, 0)
            _call("cuMemGetAllocationGranularity", ctypes.byref(granule), ctypes.byref(wanted), 0)
            if GRANULE_BYTES % granule.value:  # it has been so on all devices so far
                raise DeviceError(f"CUDA device {device} maps memory in steps of {granule.value:,} bytes")
            if size:
                _call("cuMemCreate", ctypes.byref(handle), ctypes.c_size_t(size), ctypes.byref(wanted), ctypes.c_uint64(0))
                mapped.append((handle.value, start, size))
                _call("cuMemMap", *map(ctypes.c_uint64, (start, size, 0, handle.value, 0)))
            start += size
        access = (_MemoryAccess * len(device_ids))(*(_MemoryAccess(_ON_DEVICE, device, _READ_WRITE) for device in device_ids))
        _call("cuMemSetAccess", ctypes.c_uint64(self.address), ctypes.c_size_t(total), access, ctypes.c_size_t(len(device_ids)))


def _free(address: int, size_bytes: int, mapped: list[tuple[int, int, int]], device_ids: tuple[int, ...]) -> None:
    for device in device_ids:  # unlike cudaFree, unmapping waits for nothing that still uses the memory
        with suppress(*CUDA_ERRORS), on_device(device):
            runtime.deviceSynchronize()
    with suppress(DeviceError):  # of a device whose context is lost
        for handle, start, size in mapped:
            with suppress(DeviceError):
                _call("cuMemUnmap", ctypes.c_uint64(start), ctypes.c_size_t(size))
            _call("cuMemRelease", ctypes.c_uint64(handle))
        _call("cuMemAddressFree", ctypes.c_uint64(address), ctypes.c_size_t(size_bytes))
