"""Safetensors files."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

import ml_dtypes  # noqa: F401 - gives NumPy the dtype bfloat16, which safetensors asks it for
from safetensors import SafetensorError, safe_open

from hps.errors import ModelFileError
from hps.formats.base import AnyArray, ArrayInfo, ArraySource, damaged

_KINDS = {"F": "float", "BF": "bfloat", "I": "int", "U": "uint"}


class SafetensorsFile(ArraySource):
    """A .safetensors file; tensors of 8-bit and smaller floats are listed and not read."""

    keys_are_optional = True
    is_mapped = True

    def __init__(self, path: str, files: Sequence[str]) -> None:
        super().__init__(path, files)
        try:
            self._file = _open(path)
            tensors = [(name, self._file.get_slice(name)) for name in self._file.keys()]  # noqa: SIM118 - it is no mapping
        except (SafetensorError, OSError) as error:
            raise damaged(path, f"safetensors cannot read it ({error})") from error
        self._infos = [ArrayInfo(name, tuple(tensor.get_shape()), _dtype(tensor.get_dtype())) for name, tensor in tensors]

    def arrays(self) -> list[ArrayInfo]:
        return self._infos

    def chunks(self, names: Sequence[str], step: int) -> Iterator[Sequence[AnyArray]]:
        tensors, rows = [self._file.get_slice(name) for name in names], self.array(names[0]).shape[0]
        for start in range(0, rows, step):
            try:
                yield [tensor[start : min(start + step, rows)] for tensor in tensors]
            except (SafetensorError, TypeError, AttributeError) as error:  # the last two: NumPy has no such dtype
                raise ModelFileError(
                    f"importing {self.path}: reading {', '.join(names)}: {error}; convert the tensor or write the file again"
                ) from error


def _open(path: str) -> Any:
    return safe_open(path, framework="np")  # not backend="pread", which reads the whole tensor for every slice


def _dtype(code: str) -> str:
    """NumPy's name of a dtype, or safetensors' own: F32, BF16, I64, U8, BOOL, F8_E4M3."""
    match = re.fullmatch(r"(F|BF|I|U)(\d+)", code)
    return f"{_KINDS[match[1]]}{match[2]}" if match else code.lower() if code == "BOOL" else code
