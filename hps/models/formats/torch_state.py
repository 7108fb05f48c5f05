"""PyTorch's saved state_dicts, read with `weights_only`: no code of a file is run."""

import re
import warnings
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch

from hps.errors import ModelFileError
from hps.models.formats.base import AnyArray, ArrayInfo, ArraySource, reading

_MOST_OBJECTS = 1 << 17
_CAUSE = re.compile(r"GLOBAL \S+|TorchScript archive|PytorchStreamReader failed.*")  # not torch's advice to run the code


class TorchState(ArraySource):
    """The tensors of a .pt, .pth or .bin file, by dotted name.

    Zip files (torch >= 1.6) are mapped into memory; older files are read into memory.
    """

    keys_are_optional = True

    def __init__(self, path: str, files: Sequence[str]) -> None:
        super().__init__(path, files)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # of what torch's own reading of quantised tensors uses
                state = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
        except Exception as error:  # damaged files cause errors of any type
            cause = _CAUSE.search(str(error))
            raise ModelFileError(
                f"importing {path}: torch cannot read it as tensors alone ({cause[0] if cause else type(error).__name__}); it "
                "holds code or other objects, or is damaged; hps runs no code of a file: save the weights alone, "
                "torch.save(model.state_dict(), path)"
            ) from error
        with reading(path):
            found = list(islice(_tensors("", state), _MOST_OBJECTS + 1))
        if len(found) > _MOST_OBJECTS:
            raise ModelFileError(
                f"importing {path}: got more than {_MOST_OBJECTS} tensors and mappings, as a small file can by naming one "
                "again and again; save the weights alone, torch.save(model.state_dict(), path)"
            )
        self._tensors = [(name, tensor) for name, tensor in found if tensor is not None]
        for name, tensor in self._tensors:
            self._refuse_repeated_storage(name, tensor)

    def _refuse_repeated_storage(self, name: str, tensor: torch.Tensor) -> None:
        """Refuse a tensor with more elements than it stores: a file of a few bytes would fill the disk."""
        two_in_a_byte = tensor.dtype == torch.quint4x2  # refused by its dtype
        if tensor.layout == torch.strided and tensor.device.type == "cpu" and not two_in_a_byte:
            stored, size_bytes = tensor.untyped_storage().nbytes(), tensor.numel() * tensor.element_size()
            if stored < size_bytes:
                raise ModelFileError(
                    f"importing {self.path}: {name!r} has {size_bytes} bytes, of which the file holds {stored}: rows share "
                    "elements; save tensor.contiguous()"
                )

    def arrays(self) -> list[ArrayInfo]:
        return [ArrayInfo(name, tuple(tensor.shape), _dtype(tensor)) for name, tensor in self._tensors]

    def chunks(self, names: Sequence[str], step: int) -> Iterator[Sequence[AnyArray]]:
        tensors = [dict(self._tensors)[name] for name in names]
        with reading(self.path):
            for start in range(0, len(tensors[0]), step):
                yield [_block(tensor, start, start + step) for tensor in tensors]


def _tensors(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Yield the tensors of nested mappings and sequences by dotted name, and None for each mapping and sequence."""
    if isinstance(value, torch.Tensor):
        yield name or "tensor", value
    elif isinstance(value, Mapping | list | tuple):
        yield name, None
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _tensors(f"{name}.{key}" if name else str(key), item)


def _dtype(tensor: torch.Tensor) -> str:
    """Return NumPy's name of a dtype, `bfloat16` or `quint8`; for others that cannot be read, their layout or scheme."""
    kind: object = tensor.dtype if tensor.layout == torch.strided else tensor.layout
    if tensor.is_quantized and not _has_rows(tensor):
        kind = f"{tensor.dtype}, {tensor.qscheme()}"
    return str(kind).replace("torch.", "")


def _has_rows(tensor: torch.Tensor) -> bool:
    """Return True for a quantised tensor of `torch.ao.nn.quantized.EmbeddingBag`: a scale and zero point a row."""
    scheme = torch.per_channel_affine_float_qparams
    return tensor.dtype == torch.quint8 and tensor.qscheme() == scheme and tensor.q_per_channel_axis() == 0


def _block(tensor: torch.Tensor, start: int, stop: int) -> AnyArray:
    """Return rows [start, stop); of a quantised tensor codes, scales and offsets, as its module packs them."""
    if tensor.is_quantized:
        place = (tensor.storage_offset(), tensor.shape, tensor.stride())
        codes = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage(), *place)[start:stop].numpy(force=True)
        scales = tensor.q_per_channel_scales()[start:stop].float().numpy(force=True)
        zeros = tensor.q_per_channel_zero_points()[start:stop].float().numpy(force=True)
        parameters = np.stack([scales, -(zeros * scales)], 1)
        return np.concatenate([codes, parameters.view(np.uint8)], 1)
    part = tensor[start:stop]
    array: AnyArray = (part.float() if part.dtype == torch.bfloat16 else part).numpy(force=True)
    return array
