"""Reads DLPack's C structs (https://dmlc.github.io/dlpack): from capsules, and through the C function table of a type.

Nothing is consumed: a capsule keeps its name and its deleter, so whoever passed a bare one can use it again, as
HugeCTR's users do, and one that an object made for us releases the tensor when it is collected.
"""

import ctypes
import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hps.errors import InvalidInputError
from hps.tensors.tensor_view import CUDA, CUDA_MANAGED, TensorView

MAX_VERSION = (1, 0)

# struct DLTensor {void* data; DLDevice {int32 type, id}; int32 ndim; DLDataType {uint8 code, bits; uint16 lanes};
#                  int64* shape; int64* strides; uint64 byte_offset}
# struct DLManagedTensor {DLTensor; ...}
# struct DLManagedTensorVersioned {DLPackVersion {uint32 major, minor}; void* ctx; void* deleter; uint64 flags; DLTensor}
# struct DLPackExchangeAPI {DLPackVersion; void* previous; void* allocator, *from_object, *to_object, *borrow, *work_stream}
_TENSOR = struct.Struct("=QiiiBBHQQQ")
_VERSIONED = struct.Struct("=IIQQQ" + _TENSOR.format[1:])
_EXCHANGE = struct.Struct("=IIQQQQQQ")
_TENSOR_BYTES, _VERSIONED_BYTES = (ctypes.c_char * _TENSOR.size), (ctypes.c_char * _VERSIONED.size)
_EXCHANGE_BYTES = ctypes.c_char * _EXCHANGE.size
_MAJOR = 1
_READ_ONLY = 1
_MOST_DIMENSIONS = 64
_INTEGERS = [(struct.Struct(f"={count}q"), ctypes.c_char * (8 * count)) for count in range(_MOST_DIMENSIONS + 1)]

CAPSULE: Any = type(np.empty(0).__dlpack__())
_capsule_name = ctypes.PYFUNCTYPE(ctypes.c_char_p, ctypes.py_object)(("PyCapsule_GetName", ctypes.pythonapi))
_capsule_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_FromObject = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(ctypes.c_void_p))
_WorkStream = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_void_p))
_Deleter = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
_deleters: dict[int, Callable[[int], None]] = {}
_exchanges: dict[type, tuple[Callable[..., int], Callable[..., int]] | None] = {}


def read_capsule(capsule: Any, what: str) -> TensorView:
    """Read the tensor of a capsule, with or without version; the view keeps the capsule alive.

    Raises:
        InvalidInputError: it is another library's capsule, was consumed already, is of another major version or damaged.
    """
    name = _capsule_name(capsule)
    if name == b"dltensor":
        raw = _TENSOR.unpack_from(_TENSOR_BYTES.from_address(_capsule_pointer(capsule, name)))
        return _view(raw, False, capsule, what)
    if name == b"dltensor_versioned":
        return _read_versioned(_capsule_pointer(capsule, name), capsule, what)
    if name in (b"used_dltensor", b"used_dltensor_versioned"):
        raise InvalidInputError(f"adopting {what}: got a capsule that was consumed already; export the tensor again")
    raise InvalidInputError(f"adopting {what}: got a capsule named {name!r}, wanted one of DLPack ('dltensor')")


def read_object(tensor: Any, what: str) -> TensorView | None:
    """Read a tensor through its type's `__dlpack_c_exchange_api__`; None where it has none, or none that fits.

    The view keeps the tensor alive. CUDA memory comes with the producer's stream, unordered.
    """
    kind = type(tensor)
    try:
        exchange = _exchanges[kind]
    except KeyError:
        exchange = _exchanges[kind] = _exchange_of(kind)
    if exchange is None or getattr(tensor, "requires_grad", False):  # which `__dlpack__` refuses and the table does not
        return None
    from_object, work_stream = exchange
    made = ctypes.c_void_p()
    try:
        from_object(tensor, made)
    except (BufferError, RuntimeError, TypeError, ValueError):
        return None  # `__dlpack__` refuses in words for people
    managed = made.value or 0
    try:
        view = _read_versioned(managed, tensor, what)
    finally:
        _delete(managed)
    if view.device_type in (CUDA, CUDA_MANAGED):
        stream = ctypes.c_void_p()
        work_stream(view.device_type, view.device_id, stream)
        view.producer_stream = stream.value or 0
    return view


def _exchange_of(kind: type) -> tuple[Callable[..., int], Callable[..., int]] | None:
    capsule = vars(kind).get("__dlpack_c_exchange_api__")  # a subclass may be no plain tensor: it speaks for itself
    if type(capsule) is not CAPSULE or _capsule_name(capsule) != b"dlpack_exchange_api":
        return None
    address = _capsule_pointer(capsule, b"dlpack_exchange_api")
    while address:
        major, _, previous, _, from_object, _, _, work_stream = _EXCHANGE.unpack_from(_EXCHANGE_BYTES.from_address(address))
        if major == _MAJOR:
            return _FromObject(from_object), _WorkStream(work_stream)
        address = previous
    return None


def _delete(managed: int) -> None:
    address = _VERSIONED.unpack_from(_VERSIONED_BYTES.from_address(managed))[3]
    if not address:
        return
    try:
        delete = _deleters[address]
    except KeyError:
        delete = _deleters[address] = _Deleter(address)
    delete(managed)


def _read_versioned(address: int, owner: Any, what: str) -> TensorView:
    raw = _VERSIONED.unpack_from(_VERSIONED_BYTES.from_address(address))
    if raw[0] != _MAJOR:
        raise InvalidInputError(f"adopting {what}: got a tensor of DLPack {raw[0]}.{raw[1]}, wanted {_MAJOR}.x")
    return _view(raw[5:], bool(raw[4] & _READ_ONLY), owner, what)


def _view(raw: Sequence[int], read_only: bool, owner: Any, what: str) -> TensorView:
    pointer, device_type, device_id, dimensions, code, bits, lanes, shape_at, strides_at, offset = raw
    if not 0 <= dimensions <= _MOST_DIMENSIONS or (dimensions and not shape_at):
        raise InvalidInputError(f"adopting {what}: got a tensor of {dimensions} dimensions; its description is damaged")
    integers, array = _INTEGERS[dimensions]
    shape = integers.unpack_from(array.from_address(shape_at)) if dimensions else ()
    strides = integers.unpack_from(array.from_address(strides_at)) if strides_at and dimensions else None
    if (shape and min(shape) < 0) or (not pointer and 0 not in shape):
        raise InvalidInputError(f"adopting {what}: got shape {shape} at address {pointer:#x}; its description is damaged")
    start = pointer + offset if pointer else 0
    return TensorView(start, shape, strides, (code, bits, lanes), (device_type, device_id), read_only, owner)
