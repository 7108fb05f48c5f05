"""Where another framework's tensor is, and what it is made of, in DLPack's terms."""

import math
from typing import Any

import numpy as np

from hps.errors import InvalidDtypeError, InvalidInputError

CPU, CUDA, CUDA_HOST, ROCM, CUDA_MANAGED = 1, 2, 3, 10, 13
_DEVICES = {CPU: "CPU", CUDA: "CUDA", CUDA_HOST: "CUDAHost", ROCM: "ROCm", CUDA_MANAGED: "CUDAManaged"}

INT, UINT, FLOAT, BFLOAT, COMPLEX, BOOL = 0, 1, 2, 4, 5, 6
_KINDS = {INT: "int", UINT: "uint", FLOAT: "float", BFLOAT: "bfloat", COMPLEX: "complex", BOOL: "bool"}
_WIDTHS = {INT: (8, 16, 32, 64), UINT: (8, 16, 32, 64), FLOAT: (16, 32, 64), COMPLEX: (64, 128), BOOL: (8,)}
_LETTERS = {INT: "i", UINT: "u", FLOAT: "f", COMPLEX: "c", BOOL: "b"}
_TYPESTRS = {(code, bits, 1): f"={_LETTERS[code]}{bits // 8}" for code, widths in _WIDTHS.items() for bits in widths}
_HOST = frozenset({CPU, CUDA_HOST})


class TensorView:
    """A tensor of another framework, in place. *Immutable*; `owner` keeps the memory alive.

    Attributes:
        pointer: address of the first element, byte offset included; 0 only where there is no element.
        shape: as the producer has it.
        strides: in elements; None for C-contiguous.
        code, bits, lanes: of the element type (`DLDataType`).
        device_type, device_id: `DLDevice`.
        read_only: the producer forbids writing. Capsules without a version cannot say so.
        producer_stream: the CUDA stream that the producer works on, where nothing has been ordered after it yet and the
            caller has to; None where the memory is not CUDA's, or the producer was asked to order its work itself.
        owner: what was adopted. A bare capsule that someone else consumes meanwhile no longer keeps the memory alive.
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
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def dtype_name(self) -> str:
        """The element type as people write it, e.g. `float32`."""
        kind = _KINDS.get(self.code)
        name = f"dtype code {self.code} of {self.bits} bits" if kind is None else f"{kind}{self.bits}"
        return "bool" if name == "bool8" else name if self.lanes == 1 else f"{name}x{self.lanes}"

    @property
    def device_name(self) -> str:
        """The device as people write it, e.g. `CUDA device 0`."""
        return f"{_DEVICES.get(self.device_type, f'type {self.device_type}')} device {self.device_id}"

    @property
    def on_host(self) -> bool:
        """Whether the CPU may read and write the memory: pageable, or pinned by CUDA."""
        return self.device_type in _HOST

    @property
    def contiguous(self) -> bool:
        """Whether the elements follow each other in C order."""
        strides, shape = self.strides, self.shape
        if strides is None:
            return True
        step = 1
        for axis in range(len(shape) - 1, -1, -1):
            if shape[axis] != 1 and strides[axis] != step:
                return 0 in shape
            step *= shape[axis]
        return True

    def numpy(self) -> np.ndarray:
        """The tensor as an array over the same memory, writable unless it is read-only.

        Raises:
            InvalidInputError: it is not in host memory.
            InvalidDtypeError: NumPy has no such element type.
        """
        return self.reshaped(self.shape, self.strides)

    def reshaped(self, shape: tuple[int, ...], strides: tuple[int, ...] | None = None) -> np.ndarray:
        """As `numpy`, with another shape (and strides in elements) over its first elements; the caller has checked it."""
        if self.device_type not in _HOST:
            raise InvalidInputError(f"reading a tensor as an array: got it on {self.device_name}, wanted host memory")
        typestr = _TYPESTRS.get((self.code, self.bits, self.lanes))
        if typestr is None:
            raise InvalidDtypeError(f"reading a tensor as an array: NumPy has no {self.dtype_name}")
        if not self.pointer:
            return np.empty(shape, typestr)
        memory = _Memory()
        memory.owner = self.owner
        interface = {"version": 3, "data": (self.pointer, self.read_only), "shape": shape, "typestr": typestr}
        if strides is not None:
            interface["strides"] = tuple([stride * (self.bits // 8) for stride in strides])
        memory.__array_interface__ = interface
        return np.asarray(memory)


class _Memory:
    """What NumPy makes an array of, and then keeps alive."""

    __slots__ = ("__array_interface__", "owner")

    owner: Any
    __array_interface__: dict[str, Any]
