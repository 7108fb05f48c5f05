"""PyTorch's saved state_dicts. `weights_only`: no code of the file is ever run."""

import os
import pickle
import re
import sys
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch

from hps.errors import ModelFileError
from hps.formats.base import BFLOAT16, AnyArray, ArrayInfo, SeparateArrays, damaged
from hps.formats.raw_array import RawArray

_REFUSED = re.compile(r"Unsupported (?:global: GLOBAL|class) (\S+)|function (\S+) not supported|Trying to (\S+ \S+)")
_UNREADABLE = "no strided tensor"


class TorchState(SeparateArrays):
    """The tensors of a .pt, .pth or .bin file, by dotted name.

    Of zip files (torch >= 1.6) torch tells where the tensors lie, and they are read from there; only tensors with other strides
    than a whole array's are read through torch's map. Files of the older kind are wholly in memory while they are read.
    """

    keys_are_optional = True

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._look_at(path)  # refuses what is no file
        self._tensors: dict[str, torch.Tensor] = {}
        mapped = zipfile.is_zipfile(path)
        self._collect(_load(path, mapped))
        self._maps = _maps(path) if mapped and _has_native_order(path) else []
        if not self._tensors:
            raise ModelFileError(f"importing {path}: it holds no tensor, wanted the state_dict of a model")

    def _collect(self, state: Any) -> None:
        """Find the tensors of nested mappings and sequences, each container once."""
        waiting, seen = [("", state)], set()
        while waiting:
            name, value = waiting.pop()
            if isinstance(value, torch.Tensor):
                if name in self._tensors:
                    raise ModelFileError(f"importing {self.path}: two tensors have the dotted name {name!r}; rename one")
                self._tensors[name or "tensor"] = value.detach()
            elif isinstance(value, Mapping | list | tuple) and id(value) not in seen:
                seen.add(id(value))
                inside = value.items() if isinstance(value, Mapping) else enumerate(value)
                waiting += [(f"{name}.{key}" if name else str(key), one) for key, one in inside][::-1]

    def arrays(self) -> list[ArrayInfo]:
        return [ArrayInfo(name, tuple(tensor.shape), _dtype(tensor)) for name, tensor in self._tensors.items()]

    def blocks(self, name: str, step: int) -> Iterator[AnyArray]:
        tensor = self._tensors[name]
        if _dtype(tensor) == _UNREADABLE:
            raise ModelFileError(f"importing {self.path}: {name} is {tensor.layout} on {tensor.device}, wanted a dense tensor")
        if tensor.dtype == torch.bfloat16:
            tensor = tensor.view(torch.uint16)
        offset, transposed = self._offset(tensor), tensor.ndim == 2 and tensor.t().is_contiguous()
        if offset is not None and (transposed or tensor.is_contiguous()):
            dtype, shape = tensor[:0].numpy().dtype, tuple(tensor.shape)
            return RawArray(self.path, offset, dtype, shape, fortran_order=not tensor.is_contiguous()).blocks(step)
        return (tensor[start : start + step].contiguous().numpy() for start in range(0, tensor.shape[0], step))

    def _offset(self, tensor: torch.Tensor) -> int | None:
        """Where the tensor's first byte lies in the file, if its bytes lie there as NumPy wants them.

        Reading them from there takes a buffer; reading them through the map takes memory for the whole file, page after page.
        """
        if tensor.is_neg() or tensor.is_conj():
            return None
        address, size_bytes = tensor.data_ptr(), tensor.numel() * tensor.element_size()
        for first, end, offset in self._maps:
            if first <= address and address + size_bytes <= end:
                return offset + address - first
        return None

    def close(self) -> None:
        self._tensors.clear()


def _has_native_order(path: str) -> bool:
    """Whether torch need not turn the bytes around, which it does in memory."""
    try:
        with zipfile.ZipFile(path) as archive:
            orders = [archive.read(name) for name in archive.namelist() if name.endswith("/byteorder")]
    except Exception as error:  # zipfile looks at more than torch does, and meets damage with errors of many kinds
        raise damaged(path, f"it is no whole zip archive ({error})") from error
    return set(orders) <= {sys.byteorder.encode()}


def _load(path: str, mapped: bool) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of TorchScript archives, which are refused
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        match = _REFUSED.search(str(error))
        what = f" ({next(filter(None, match.groups()))})" if match else ""
        raise ModelFileError(
            f"importing {path}: it holds Python objects other than tensors{what} or is damaged; hps runs no code of a file: "
            "save the weights alone, torch.save(model.state_dict(), path)"
        ) from error
    except RuntimeError as error:
        if "TorchScript" in str(error):
            raise ModelFileError(
                f"importing {path}: it is a TorchScript archive, which holds code; hps runs no code of a file: "
                "save the weights alone, torch.save(model.state_dict(), path)"
            ) from error
        raise damaged(path, f"torch cannot read it ({str(error).splitlines()[0]})") from error
    except Exception as error:  # damaged bytes lead the unpickler to errors of any kind
        raise damaged(path, f"torch cannot read it ({type(error).__name__}: {error})") from error


def _dtype(tensor: torch.Tensor) -> str:
    if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
        return _UNREADABLE
    return BFLOAT16 if tensor.dtype == torch.bfloat16 else str(tensor.dtype).removeprefix("torch.")


def _maps(path: str) -> list[tuple[int, int, int]]:
    """Where the file is mapped into this process: (first address, end, offset in the file) of each map; proc(5)."""
    wanted = os.path.realpath(path)
    found = []
    with suppress(FileNotFoundError), open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as lines:
        for line in lines:
            addresses, _, offset, _, _, *name = line.rstrip("\n").split(maxsplit=5)
            if name == [wanted]:
                first, end = (int(address, 16) for address in addresses.split("-"))
                found.append((first, end, int(offset, 16)))
    return found
