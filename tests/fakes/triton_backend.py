"""What Triton's Python backend gives to a model, as far as `hps.triton` uses it: its module `triton_python_backend_utils`.

Source: https://github.com/triton-inference-server/python_backend (src/pb_tensor.cc, src/resources).
"""

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np

from hps.tensors.dlpack import CAPSULE, CUDA, adopt

_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_GetPointer", ctypes.pythonapi))
_set_name = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_SetName", ctypes.pythonapi))
_Deleter = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
_DEVICE_AT, _DELETER_AT = 8, 56  # within a DLManagedTensor
_NAME = b"used_dlpack"  # Triton's own


class Tensor:
    """A tensor in host memory, or on the CUDA device 0 if `values` is CuPy's."""

    def __init__(self, name: str, values: Any) -> None:
        self._name = name
        self.values = values

    @classmethod
    def from_dlpack(cls, name: str, tensor: Any) -> "Tensor":
        if type(tensor) is not CAPSULE:  # on a device; Triton takes it with its own stream
            return cls(name, tensor)
        view = adopt(tensor)
        if not view.contiguous or (view.strides is not None and 0 in view.strides):
            raise RuntimeError("DLPack tensor is not contiguous. Only contiguous DLPack tensors are supported.")
        tensor_of = cls(name, view.host_array(view.shape).copy())
        managed = _pointer(tensor, b"dltensor")
        _set_name(tensor, _NAME)
        _Deleter(ctypes.c_void_p.from_address(managed + _DELETER_AT).value)(managed)
        return tensor_of

    def name(self) -> str:
        return self._name

    def to_dlpack(self) -> Any:
        if isinstance(self.values, np.ndarray):
            return self.values.__dlpack__()
        capsule = np.empty(self.values.shape, self.values.dtype).__dlpack__()
        managed = _pointer(capsule, b"dltensor")
        ctypes.c_void_p.from_address(managed).value = self.values.data.ptr
        ctypes.c_int32.from_address(managed + _DEVICE_AT).value = CUDA
        return capsule


class TritonError:
    INTERNAL, NOT_FOUND, INVALID_ARG, UNAVAILABLE = range(4)

    def __init__(self, message: str, code: int = INTERNAL) -> None:
        self.message, self.code = message, code


class InferenceResponse:
    def __init__(self, output_tensors: Any = (), error: TritonError | None = None) -> None:
        self.outputs = {tensor.name(): tensor.values for tensor in output_tensors}
        self.error = error


class InferenceRequest:
    def __init__(self, **inputs: np.ndarray) -> None:
        self._inputs = [Tensor(name, values) for name, values in inputs.items()]

    def inputs(self) -> list[Tensor]:
        return self._inputs


class ModelConfig:
    """A `config.pbtxt` that a model may complete."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config

    def as_dict(self) -> dict[str, Any]:
        return self._config

    def set_max_batch_size(self, size: int) -> None:
        self._config["max_batch_size"] = size

    def add_input(self, tensor: dict[str, Any]) -> None:
        assert tensor.keys() <= {"name", "data_type", "dims", "optional"}
        self._config["input"].append(tensor)

    def add_output(self, tensor: dict[str, Any]) -> None:
        assert tensor.keys() == {"name", "data_type", "dims"}
        self._config["output"].append(tensor)

    def set_dynamic_batching(self) -> None:
        self._config["dynamic_batching"] = {}


MODULE = SimpleNamespace(Tensor=Tensor, TritonError=TritonError, InferenceResponse=InferenceResponse)
