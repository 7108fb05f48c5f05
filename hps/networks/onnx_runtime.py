"""Networks in ONNX files, run by ONNX Runtime."""

from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
import onnxruntime

from hps.configuration.load import network_threads
from hps.errors import ModelFileError
from hps.networks.base import Network, NetworkTensor, Tensor, refuse_inputs
from hps.networks.onnx_messages import refuse_external_data

_TYPES = {
    "tensor(float)": "float32",
    "tensor(float16)": "float16",
    "tensor(double)": "float64",
    "tensor(int64)": "int64",
    "tensor(int32)": "int32",
    "tensor(int16)": "int16",
    "tensor(int8)": "int8",
    "tensor(uint8)": "uint8",
    "tensor(bool)": "bool",
}


class OnnxNetwork(Network):
    """A network in an ONNX file without external data, on the CPU."""

    def __init__(self, name: str, session: Any, outputs: Sequence[str]) -> None:
        self._name = name
        self._session = session
        self._outputs = list(outputs)

    @classmethod
    def open(
        cls, name: str, content: bytes, inputs: Sequence[NetworkTensor], outputs: Sequence[str], device: int | None
    ) -> Self:
        refuse_external_data(name, content)
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = network_threads()
        try:
            session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
        except Exception as error:
            lines = str(error).strip().splitlines()
            reason = lines[0][:300] if lines else repr(error)
            raise ModelFileError(f"opening the network {name}: it cannot be read as ONNX: {reason}") from error
        has = {input_.name: input_ for input_ in session.get_inputs()}
        refuse_inputs(name, list(has), inputs)
        for input_ in inputs:
            found = NetworkTensor(
                input_.name,
                _TYPES.get(has[input_.name].type, has[input_.name].type),
                tuple(size if isinstance(size, int) else -1 for size in has[input_.name].shape),
            )
            if not found.fits(input_):
                raise ModelFileError(
                    f"opening the network {name}: got {input_} for input {input_.name!r} (dense.inputs), expected {found}"
                )
        has_outputs = [output.name for output in session.get_outputs()]
        if missing := [output for output in outputs if output not in has_outputs]:
            raise ModelFileError(
                f"opening the network {name}: got output {missing[0]!r} (dense.outputs), expected some of "
                f"{', '.join(has_outputs)}"
            )
        return cls(name, session, outputs)

    def put(self, array: np.ndarray) -> Tensor:
        return array

    def take(self, tensor: Tensor, index: Tensor) -> Tensor:
        return np.take(tensor, index, axis=0)

    def run(self, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return dict(zip(self._outputs, self._session.run(self._outputs, dict(inputs)), strict=True))

    def fetch(self, outputs: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
        return dict(outputs)

    def close(self) -> None:
        self._session = None
