"""Adopts tensors of other frameworks through DLPack (https://dmlc.github.io/dlpack), without copying them.

Reads DLPack's C structs from capsules, and through the C exchange table of a tensor type. Adopting a capsule does not consume
it: it keeps its name and its deleter. So the owner of a bare capsule can use it again, as HugeCTR's users do, and a capsule
exported for this adoption releases the tensor when it is collected.
"""

import ctypes
import math
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from hps.errors import InvalidDtypeError, InvalidInputError

CPU, CUDA, CUDA_HOST, ROCM, CUDA_MANAGED = 1, 2, 3, 10, 13
_DEVICES = {CPU: "CPU", CUDA: "CUDA", CUDA_HOST: "CUDAHost", ROCM: "ROCm", CUDA_MANAGED: "CUDAManaged"}

INT, UINT, FLOAT, BFLOAT, COMPLEX, BOOL = 0, 1, 2, 4, 5, 6
_KINDS = {INT: "int", UINT: "uint", FLOAT: "float", BFLOAT: "bfloat", COMPLEX: "complex", BOOL: "bool"}
# Keys and outputs; the bits of bfloat16, which NumPy lacks.
_TYPESTRS = {(INT, 32): "=i4", (INT, 64): "=i8", (FLOAT, 32): "=f4", (FLOAT, 16): "=f2", (BFLOAT, 16): "=u2"}
_HOST = frozenset({CPU, CUDA_HOST})
NUMPY_CODES = {"i": INT, "u": UINT, "f": FLOAT, "c": COMPLEX, "b": BOOL}

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
_name_capsule = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_SetName", ctypes.pythonapi))
_CONSUMED = b"used_dltensor"  # a capsule keeps the address of its name
_deleters: dict[int, Callable[[int], None]] = {}
_exchanges: dict[type, tuple[Callable[..., int], Callable[..., int]] | None] = {}


class TensorView:
    """A tensor of another framework, in place. *Immutable*; `owner` keeps the memory alive.

    Attributes:
        pointer: address of the first element, byte offset included; 0 only if there is no element.
        strides: in elements; None for C-contiguous.
        code, bits, lanes: element type (`DLDataType`).
        device_type, device_id: `DLDevice`.
        read_only: the producer forbids writing. Unversioned capsules cannot express it.
        producer_stream: CUDA stream of the producer, after which the caller must order its own work. None if the memory is not
            CUDA memory, or the producer has ordered its work itself.
        owner: the adopted object. A bare capsule stops keeping the memory alive once another consumer takes it.
    """

    __slots__ = (
        "bits",
        "code",
        "device_id",
        "device_type",
        "lanes",
        "owner",
        "pointer",
        "producer_stream",
        "read_only",
        "shape",
        "strides",
    )

    def __init__(
        self,
        pointer: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...] | None,
        dtype: tuple[int, int, int],
        device: tuple[int, int],
        read_only: bool,
        owner: Any,
    ) -> None:
        self.pointer = pointer
        self.shape = shape
        self.strides = strides
        self.code, self.bits, self.lanes = dtype
        self.device_type, self.device_id = device
        self.read_only = read_only
        self.producer_stream: int | None = None
        self.owner = owner

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def dtype_name(self) -> str:
        """Name of the element type, e.g. `float32`."""
        kind = _KINDS.get(self.code)
        name = f"dtype code {self.code} of {self.bits} bits" if kind is None else f"{kind}{self.bits}"
        return "bool" if name == "bool8" else name if self.lanes == 1 else f"{name}x{self.lanes}"

    @property
    def device_name(self) -> str:
        return f"{_DEVICES.get(self.device_type, f'type {self.device_type}')} device {self.device_id}"

    @property
    def on_host(self) -> bool:
        """Whether the CPU can read and write the memory: pageable, or pinned by CUDA."""
        return self.device_type in _HOST

    @property
    def contiguous(self) -> bool:
        """Whether the elements are contiguous in C order."""
        strides, shape = self.strides, self.shape
        if strides is None:
            return True
        step = 1
        for axis in range(len(shape) - 1, -1, -1):
            if shape[axis] != 1 and strides[axis] != step:
                return 0 in shape
            step *= shape[axis]
        return True

    def host_array(self, shape: tuple[int, ...]) -> np.ndarray:
        """Return an array of the given shape over the first elements of a contiguous tensor in host memory."""
        typestr = _TYPESTRS[self.code, self.bits]
        if not self.pointer or 0 in shape:  # the address of an empty tensor may be invalid
            return np.empty(shape, typestr)
        memory = _Memory()
        memory.owner = self.owner
        memory.__array_interface__ = {
            "version": 3,
            "data": (self.pointer, self.read_only),
            "shape": shape,
            "typestr": typestr,
        }
        return np.asarray(memory)


class _Memory:
    """The array interface that NumPy reads and keeps alive."""

    __slots__ = ("__array_interface__", "owner")

    owner: Any
    __array_interface__: dict[str, Any]


def adopt(tensor: Any, stream: int | None = None, label: str = "tensor") -> TensorView:
    """Read the address and layout of a tensor. Copies nothing; a bare capsule stays usable by its owner.

    Args:
        tensor: an object with `__dlpack__` (NumPy, torch, CuPy, JAX), or a DLPack capsule, versioned or not.
        stream: CUDA stream that will use the tensor, in DLPack's numbering. A producer of CUDA memory orders its own work
            before that stream, unless it reports a `producer_stream`: then the caller must. A bare capsule has no information
            about streams.
        what: names the tensor in errors.

    Raises:
        InvalidInputError: it is not a tensor, it cannot be exported, or its capsule was already consumed.
    """
    if isinstance(tensor, np.ndarray):
        return _of_numpy(tensor, label)
    if type(tensor) is CAPSULE:
        return read_capsule(tensor, label)
    return read_object(tensor, label) or read_capsule(_exported(tensor, stream, label), label)


def cuda_device_of(tensor: Any) -> int | None:
    """Return the CUDA device of a tensor; None if it is elsewhere, or does not report a device."""
    if type(tensor) is np.ndarray:
        return None
    if type(tensor) is CAPSULE:
        view = read_capsule(tensor, "tensor")
        device: tuple[int, int] = (view.device_type, view.device_id)
    elif hasattr(tensor, "__dlpack_device__"):
        device = tensor.__dlpack_device__()
    else:
        return None
    return int(device[1]) if device[0] in (CUDA, CUDA_MANAGED) else None


def _of_numpy(array: np.ndarray, label: str) -> TensorView:
    code = NUMPY_CODES.get(array.dtype.kind)
    if code is None or not array.dtype.isnative:
        raise InvalidDtypeError(f"adopting {label}: got dtype {array.dtype.str}, expected numbers in native byte order")
    strides: tuple[int, ...] | None = None
    if not array.flags.c_contiguous:
        if any(stride % array.itemsize for stride in array.strides):
            raise InvalidInputError(f"adopting {label}: got byte strides {array.strides} that are no multiple of an element")
        strides = tuple([stride // array.itemsize for stride in array.strides])
    dtype = (code, 8 * array.itemsize, 1)
    return TensorView(array.ctypes.data, array.shape, strides, dtype, (CPU, 0), not array.flags.writeable, array)


def _exported(tensor: Any, stream: int | None, label: str) -> Any:
    """Export a tensor as a capsule, through its `__dlpack__`."""
    try:
        export = tensor.__dlpack__
    except AttributeError:
        raise InvalidInputError(
            f"adopting {label}: got {type(tensor).__name__}, expected a tensor that supports DLPack (NumPy, torch, CuPy, JAX) "
            "or a capsule of one"
        ) from None
    arguments: dict[str, Any] = {}
    try:
        if stream is not None and int(tensor.__dlpack_device__()[0]) in (CUDA, CUDA_MANAGED):
            arguments["stream"] = stream
        try:
            capsule = export(**arguments, max_version=MAX_VERSION)
        except TypeError:  # the producer is older than DLPack 1.0
            capsule = export(**arguments)
    except (AssertionError, AttributeError, BufferError, RuntimeError, TypeError, ValueError) as error:
        raise InvalidInputError(f"adopting {label}: its {type(tensor).__name__} cannot be exported: {error}") from error
    if type(capsule) is not CAPSULE:
        raise InvalidInputError(
            f"adopting {label}: {type(tensor).__name__}.__dlpack__ gave {type(capsule).__name__}, no capsule"
        )
    return capsule


def read_capsule(capsule: Any, label: str) -> TensorView:
    """Read the tensor of a capsule, versioned or not; the view keeps the capsule alive.

    Raises:
        InvalidInputError: the capsule belongs to another library, was consumed, has another major version, or is damaged.
    """
    name = _capsule_name(capsule)
    if name == b"dltensor":
        raw = _TENSOR.unpack_from(_TENSOR_BYTES.from_address(_capsule_pointer(capsule, name)))
        return _view(raw, capsule, label, read_only=False)
    if name == b"dltensor_versioned":
        return _read_versioned(_capsule_pointer(capsule, name), capsule, label)
    if name in (b"used_dltensor", b"used_dltensor_versioned"):
        raise InvalidInputError(f"adopting {label}: got a capsule that was consumed already; export the tensor again")
    raise InvalidInputError(f"adopting {label}: got a capsule named {name!r}, expected one of DLPack ('dltensor')")


def mark_consumed(capsule: Any) -> None:
    """Name an unversioned capsule as consumed, after a consumer that deletes its tensor but does not name it so."""
    _name_capsule(capsule, _CONSUMED)


def read_object(tensor: Any, label: str) -> TensorView | None:
    """Read a tensor through its type's `__dlpack_c_exchange_api__`; return None without a supported table.

    The view keeps the tensor alive. CUDA memory comes with the producer's stream and is not ordered.
    """
    kind = type(tensor)
    try:
        exchange = _exchanges[kind]
    except KeyError:
        table = exchange_table(kind)
        exchange = None if table is None else (_FromObject(table.from_object), _WorkStream(table.work_stream))
        _exchanges[kind] = exchange
    if exchange is None or getattr(tensor, "requires_grad", False):  # `__dlpack__` refuses it, the table does not
        return None
    from_object, work_stream = exchange
    made = ctypes.c_void_p()
    try:
        from_object(tensor, made)
    except (BufferError, RuntimeError, TypeError, ValueError):
        return None  # `__dlpack__` raises with the reason
    managed = made.value or 0
    try:
        view = _read_versioned(managed, tensor, label)
    finally:
        _delete(managed)
    if view.device_type in (CUDA, CUDA_MANAGED):
        stream = ctypes.c_void_p()
        work_stream(view.device_type, view.device_id, stream)
        view.producer_stream = stream.value or 0
    return view


class ExchangeTable(NamedTuple):
    """Functions of a type of tensors for compiled code, by address; 0 for one that it lacks.

    They need the GIL, and return 0, or another number with an exception set.

    Attributes:
        from_object: `int (PyObject*, DLManagedTensorVersioned**)`.
        borrow: `int (PyObject*, DLTensor*)`, which takes no reference.
        work_stream: `int (int32 device_type, int32 device_id, void**)`: the calling thread's current stream.
    """

    from_object: int
    borrow: int
    work_stream: int


def exchange_table(kind: type) -> ExchangeTable | None:
    """Return a tensor type's functions for compiled code; None without a supported table."""
    capsule = vars(kind).get("__dlpack_c_exchange_api__")  # not a base class's: a subclass may not be a plain tensor
    if type(capsule) is not CAPSULE or _capsule_name(capsule) != b"dlpack_exchange_api":
        return None
    address = _capsule_pointer(capsule, b"dlpack_exchange_api")
    while address:
        major, _, previous, _, from_object, _, borrow, work_stream = _EXCHANGE.unpack_from(
            _EXCHANGE_BYTES.from_address(address)
        )
        if major == _MAJOR:
            return ExchangeTable(from_object, borrow, work_stream)
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


def _read_versioned(address: int, owner: Any, label: str) -> TensorView:
    raw = _VERSIONED.unpack_from(_VERSIONED_BYTES.from_address(address))
    if raw[0] != _MAJOR:
        raise InvalidInputError(f"adopting {label}: got a tensor of DLPack {raw[0]}.{raw[1]}, expected {_MAJOR}.x")
    return _view(raw[5:], owner, label, read_only=bool(raw[4] & _READ_ONLY))


def _view(raw: Sequence[int], owner: Any, label: str, *, read_only: bool) -> TensorView:
    pointer, device_type, device_id, dimensions, code, bits, lanes, shape_at, strides_at, offset = raw
    if not 0 <= dimensions <= _MOST_DIMENSIONS or (dimensions and not shape_at):
        raise InvalidInputError(f"adopting {label}: got a tensor of {dimensions} dimensions; its description is damaged")
    integers, array = _INTEGERS[dimensions]
    shape = integers.unpack_from(array.from_address(shape_at)) if dimensions else ()
    strides = integers.unpack_from(array.from_address(strides_at)) if strides_at and dimensions else None
    if (shape and min(shape) < 0) or (not pointer and 0 not in shape):
        raise InvalidInputError(f"adopting {label}: got shape {shape} at address {pointer:#x}; its description is damaged")
    start = pointer + offset if pointer else 0
    return TensorView(start, shape, strides, (code, bits, lanes), (device_type, device_id), read_only, owner)
