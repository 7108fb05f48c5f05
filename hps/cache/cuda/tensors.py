"""Where the device finds a tensor: torch's, CuPy's, or any that speaks DLPack."""

import sys
from typing import Any

import cupy
import numpy as np

from hps.cache.base import Stretch
from hps.cache.cuda.device import stream_of
from hps.errors import InvalidDtypeError, InvalidInputError
from hps.tensors.dlpack import adopt
from hps.tensors.tensor_view import CUDA, CUDA_MANAGED, TensorView

INT64, FLOAT32, BOOL = np.dtype(np.int64), np.dtype(np.float32), np.dtype(np.bool_)
UNKNOWN_STREAM = -1
"""Stands for a consumer whose stream nobody knows; its producer was ordered before the legacy default stream."""
_LEGACY_STREAM = 1  # as DLPack numbers it
_CODES = {INT64: (0, 64), FLOAT32: (2, 32), BOOL: (6, 8)}
_INT32_CODE = (0, 32)


class TensorReader:
    """Reads the tensors of one lookup after the other. *One per thread.*

    torch's tensors are asked directly, which takes 0.6 us each; through DLPack it is ten times that.

    Attributes:
        streams: those on which the tensors read since `start` were produced and will be consumed, or UNKNOWN_STREAM.
    """

    __slots__ = (
        "_device_id",
        "_float32",
        "_int64",
        "_keep",
        "_seen_torch",
        "_shared_keys",
        "_shared_out",
        "_tensor",
        "_torch",
        "streams",
    )

    def __init__(self, device_id: int) -> None:
        self._device_id = device_id
        self._torch: Any = None
        self._tensor: Any = None
        self._int64: Any = None
        self._float32: Any = None
        self._seen_torch = False
        self._keep: list[Any] = []  # what must live until the lookup has ended
        self._shared_keys: tuple[Any, int] = (None, 0)  # the tensor that the last stretches were of, and its address
        self._shared_out: tuple[Any, int] = (None, 0)
        self.streams: set[int] = set()

    def start(self) -> None:
        """Forget the tensors of the last lookup."""
        self._seen_torch = False
        self.streams = set()
        self._keep = []
        self._shared_keys = self._shared_out = (None, 0)
        if self._torch is None and "torch" in sys.modules:
            self._torch = torch = sys.modules["torch"]
            self._tensor, self._int64, self._float32 = torch.Tensor, torch.int64, torch.float32

    def keys(self, tensor: Any) -> tuple[int, int]:
        """Address and number of keys: int64 (int32 is widened), C-contiguous, of any shape."""
        if type(tensor) is Stretch:
            return self._stretch_of_keys(tensor), tensor.size
        if (
            type(tensor) is self._tensor
            and tensor.dtype is self._int64
            and tensor.get_device() == self._device_id
            and tensor.is_contiguous()
        ):
            if not self._seen_torch:
                self._see_torch()
            return tensor.data_ptr(), tensor.numel()
        return self._read(tensor, INT64, 0, "keys")

    def output(self, tensor: Any, size: int) -> int:
        """Address of `size` float32 elements, to be written (or, for an insertion, read)."""
        if type(tensor) is Stretch:
            return self._stretch_of_output(tensor)
        if (
            type(tensor) is self._tensor
            and tensor.dtype is self._float32
            and tensor.get_device() == self._device_id
            and tensor.is_contiguous()
            and tensor.numel() >= size
            and not tensor.requires_grad
        ):
            if not self._seen_torch:
                self._see_torch()
            pointer: int = tensor.data_ptr()
            return pointer
        return self._read(tensor, FLOAT32, size, "out")[0]

    def mask(self, tensor: Any, size: int) -> int:
        """Address of `size` booleans, to be written."""
        return self._read(tensor, BOOL, size, "found")[0]

    def _stretch_of_keys(self, stretch: Stretch) -> int:
        tensor, address = self._shared_keys
        if tensor is not stretch.tensor:
            address, size = self.keys(stretch.tensor)
            if size != stretch.total:
                raise InvalidInputError(
                    f"querying an embedding cache: got {size} keys, wanted the {stretch.total} that the counts add up to"
                )
            self._shared_keys = (stretch.tensor, address)
        return address + 8 * stretch.start

    def _stretch_of_output(self, stretch: Stretch) -> int:
        tensor, address = self._shared_out
        if tensor is not stretch.tensor:
            address = self.output(stretch.tensor, stretch.total)
            self._shared_out = (stretch.tensor, address)
        return address + 4 * stretch.start

    def _see_torch(self) -> None:
        self._seen_torch = True
        self.streams.add(self._torch._C._cuda_getCurrentRawStream(self._device_id))

    def _read(self, tensor: Any, dtype: np.dtype, least: int, what: str) -> tuple[int, int]:
        if isinstance(tensor, cupy.ndarray):
            return self._of_cupy(tensor, dtype, least, what)
        view = tensor if isinstance(tensor, TensorView) else adopt(tensor, _LEGACY_STREAM, what)
        self._keep.append(view)
        got = f"{view.dtype_name} of shape {view.shape} on {view.device_name}"
        here = view.device_type == CUDA_MANAGED or (view.device_type == CUDA and view.device_id == self._device_id)
        if not here or not view.contiguous or view.size < least or (view.read_only and dtype is not INT64):
            raise InvalidInputError(self._wanted(what, got, dtype, least))
        self.streams.add(UNKNOWN_STREAM if view.producer_stream is None else view.producer_stream)
        if (view.code, view.bits) == _CODES[dtype] and view.lanes == 1:
            return view.pointer, view.size
        if dtype != INT64 or (view.code, view.bits) != _INT32_CODE:
            raise InvalidDtypeError(self._wanted(what, got, dtype, least))
        with stream_of(view.producer_stream or 0):
            memory = cupy.cuda.UnownedMemory(view.pointer, 4 * view.size, view, self._device_id)
            wide = cupy.ndarray((view.size,), np.int32, cupy.cuda.MemoryPointer(memory, 0)).astype(np.int64)
        self._keep.append(wide)
        return int(wide.data.ptr), view.size

    def _of_cupy(self, array: Any, dtype: np.dtype, least: int, what: str) -> tuple[int, int]:
        if array.dtype != dtype:
            raise InvalidDtypeError(self._wanted(what, f"CuPy {array.dtype} of shape {array.shape}", dtype, least))
        if not array.flags.c_contiguous or array.size < least or array.device.id != self._device_id:
            got = f"CuPy {array.dtype} of shape {array.shape}, strides {array.strides} on device {array.device.id}"
            raise InvalidInputError(self._wanted(what, got, dtype, least))
        self.streams.add(int(cupy.cuda.get_current_stream(self._device_id).ptr))
        return int(array.data.ptr), int(array.size)

    def _wanted(self, what: str, got: str, dtype: np.dtype, least: int) -> str:
        size = f"at least {least} elements, " if least else ""
        return (
            f"querying an embedding cache: got {what}: {got}; wanted {dtype}, {size}C-contiguous, on CUDA device "
            f"{self._device_id} (or in host memory){'' if what == 'keys' else ', writable'}"
        )
