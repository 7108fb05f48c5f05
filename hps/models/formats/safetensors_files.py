"""Safetensors files."""

import re
from collections.abc import Iterator, Sequence
from typing import Any, cast

import ml_dtypes  # noqa: F401 - gives NumPy the dtype bfloat16, which safetensors asks it for
from safetensors import safe_open

from hps.models.formats.base import AnyArray, ArrayInfo, ArraySource, reading

_KINDS = {"F": "float", "BF": "bfloat", "I": "int", "U": "uint"}


class SafetensorsFile(ArraySource):
    """A .safetensors file; tensors of 8-bit and smaller floats are listed but cannot be read."""

    keys_are_optional = True

    def __init__(self, path: str, files: Sequence[str]) -> None:
        super().__init__(path, files)
        with reading(path):
            # not backend="pread", which reads the whole tensor for every slice
            self._file = cast(Any, safe_open(path, framework="np"))
            tensors = [(name, self._file.get_slice(name)) for name in self._file.keys()]  # noqa: SIM118 - not a mapping
            self._infos = [ArrayInfo(name, tuple(tensor.get_shape()), _dtype(tensor.get_dtype())) for name, tensor in tensors]

    def arrays(self) -> list[ArrayInfo]:
        return self._infos

    def chunks(self, names: Sequence[str], step: int) -> Iterator[Sequence[AnyArray]]:
        rows = self.array(names[0]).shape[0]
        with reading(self.path):
            tensors = [self._file.get_slice(name) for name in names]
            for start in range(0, rows, step):
                yield [tensor[start : min(start + step, rows)] for tensor in tensors]


def _dtype(code: str) -> str:
    """Translate safetensors' name of a dtype to NumPy's, if it has one."""
    match = re.fullmatch(r"(F|BF|I|U)(\d+)", code)
    return f"{_KINDS[match[1]]}{match[2]}" if match else code
