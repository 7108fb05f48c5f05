"""Safetensors files, read by their own layout: 8 bytes length, a JSON head, then the tensors' bytes.

The layout is a page long (https://huggingface.co/docs/safetensors), and reading it here takes bfloat16, which the package's
NumPy side refuses, and reads by `pread`, where the package maps the file into memory.
"""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from hps.errors import ModelFileError
from hps.formats.base import BFLOAT16, AnyArray, ArrayInfo, SeparateArrays, damaged
from hps.formats.raw_array import RawArray, read_bytes

_MAX_HEAD_BYTES = 100_000_000  # the format's own limit
_DTYPES = {
    **{"F64": "<f8", "F32": "<f4", "F16": "<f2", "BOOL": "?"},
    **{"I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1"},
    **{"U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1"},
    "BF16": "<u2",
}


class SafetensorsFile(SeparateArrays):
    """A .safetensors file; tensors of dtypes that NumPy lacks (fp8 and smaller) are listed and not read."""

    keys_are_optional = True

    def __init__(self, path: str) -> None:
        super().__init__(path)
        size_bytes = self._look_at(path)
        if size_bytes < 8:
            raise damaged(path, f"got {size_bytes} bytes, wanted at least the 8 that tell the length of its head")
        head_bytes = int.from_bytes(read_bytes(path, 0, 8), "little")
        if head_bytes > min(_MAX_HEAD_BYTES, size_bytes - 8):
            raise damaged(path, f"its head claims {head_bytes} bytes of the {size_bytes} that the file has")
        try:
            head = json.loads(read_bytes(path, 8, head_bytes))
        except (ValueError, RecursionError) as error:
            raise damaged(path, f"its head is no JSON ({error})") from error
        if not isinstance(head, dict):
            raise damaged(path, "its head is no JSON object")
        head.pop("__metadata__", None)
        self._infos: dict[str, ArrayInfo] = {}
        self._raw: dict[str, RawArray] = {}
        data, end = 8 + head_bytes, 0
        for name, entry in head.items():
            end = max(end, self._add(name, entry, data, size_bytes))
        if data + end != size_bytes:
            raise damaged(path, f"got {size_bytes} bytes, wanted the {data + end} that its head tells of")

    def _add(self, name: str, entry: Any, data: int, size_bytes: int) -> int:
        """Take one tensor from the head; return where its bytes end."""
        try:
            dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        except (TypeError, KeyError, ValueError) as error:
            raise damaged(self.path, f"its head tells of tensor {name!r} without dtype, shape and data_offsets") from error
        numbers = (*shape, begin, end)
        if not isinstance(dtype, str) or not all(type(number) is int and number >= 0 for number in numbers):
            raise damaged(
                self.path, f"its head gives tensor {name!r} dtype {dtype!r}, shape {shape} and bytes {begin} to {end}"
            )
        label = dtype if dtype not in _DTYPES else BFLOAT16 if dtype == "BF16" else np.dtype(_DTYPES[dtype]).name
        self._infos[name] = ArrayInfo(name, shape, label)
        if dtype in _DTYPES:
            self._raw[name] = RawArray(self.path, data + begin, np.dtype(_DTYPES[dtype]), shape)
            wanted = self._raw[name].size_bytes
            if end - begin != wanted or data + end > size_bytes:
                raise damaged(
                    self.path,
                    f"its head puts tensor {self._infos[name]} at bytes {begin} to {end}, wanted {wanted} bytes that end "
                    f"before byte {size_bytes - data}",
                )
        return int(end)

    def arrays(self) -> list[ArrayInfo]:
        return list(self._infos.values())

    def blocks(self, name: str, step: int) -> Iterator[AnyArray]:
        if name not in self._raw:
            raise ModelFileError(f"importing {self.path}: tensor {self._infos[name]} cannot be read: NumPy has no such dtype")
        return self._raw[name].blocks(step)
