"""PyTorch's saved state_dicts. `weights_only`: no code of the file is ever run."""

import pickle
import re
import warnings
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from hps.errors import ModelFileError
from hps.formats.base import BFLOAT16, AnyArray, ArrayInfo, ArraySource, damaged

_REFUSED = re.compile(r"Unsupported (?:global: GLOBAL|class) (\S+)|function (\S+) not supported|Trying to (\S+ \S+)")
_UNREADABLE = "no strided tensor"
_CURE = "hps runs no code of a file: save the weights alone, torch.save(model.state_dict(), path)"


class TorchState(ArraySource):
    """The tensors of a .pt, .pth or .bin file, by dotted name.

    Zip files (torch >= 1.6) are mapped into memory; files of the older kind are held in memory as a whole.
    """

    keys_are_optional = True
    is_mapped = True

    def __init__(self, path: str, files: Sequence[str]) -> None:
        super().__init__(path, files)
        self._tensors: dict[str, torch.Tensor] = {}
        self._collect(_load(path))
        if not self._tensors:
            raise ModelFileError(f"importing {path}: it holds no tensor, expected the state_dict of a model")

    def _collect(self, state: Any) -> None:
        """Find the tensors of nested mappings and sequences; visit each container once."""
        waiting, seen = [("", state)], set()
        while waiting:
            name, value = waiting.pop()
            if isinstance(value, torch.Tensor):
                if name in self._tensors:
                    raise ModelFileError(f"importing {self.path}: two tensors have the dotted name {name!r}; rename one")
                self._tensors[name or "tensor"] = value
            elif isinstance(value, Mapping | list | tuple) and id(value) not in seen:
                seen.add(id(value))
                inside = value.items() if isinstance(value, Mapping) else enumerate(value)
                waiting += [(f"{name}.{key}" if name else str(key), one) for key, one in inside][::-1]

    def arrays(self) -> list[ArrayInfo]:
        return [ArrayInfo(name, tuple(tensor.shape), _dtype(tensor)) for name, tensor in self._tensors.items()]

    def chunks(self, names: Sequence[str], step: int) -> Iterator[Sequence[AnyArray]]:
        tensors = [self._tensors[name] for name in names]
        for name, tensor in zip(names, tensors, strict=True):
            if _dtype(tensor) == _UNREADABLE:
                raise ModelFileError(
                    f"importing {self.path}: {name} is {tensor.layout} on {tensor.device}, expected a dense tensor"
                )
        for start in range(0, tensors[0].shape[0], step):
            yield [_numpy(tensor[start : start + step]) for tensor in tensors]


def _load(path: str) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of TorchScript archives, which are refused
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        match = _REFUSED.search(str(error))
        what = f" ({next(filter(None, match.groups()))})" if match else ""
        raise ModelFileError(
            f"importing {path}: it holds Python objects other than tensors{what} or is damaged; {_CURE}"
        ) from error
    except Exception as error:  # damaged bytes lead the unpickler to errors of any kind
        if "TorchScript" in str(error):
            raise ModelFileError(f"importing {path}: it is a TorchScript archive, which holds code; {_CURE}") from error
        raise damaged(path, f"torch cannot read it ({type(error).__name__}: {str(error).partition(chr(10))[0]})") from error


def _dtype(tensor: torch.Tensor) -> str:
    if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
        return _UNREADABLE
    return BFLOAT16 if tensor.dtype == torch.bfloat16 else str(tensor.dtype).removeprefix("torch.")


def _numpy(tensor: torch.Tensor) -> AnyArray:
    array: AnyArray = (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy(force=True)
    return array
