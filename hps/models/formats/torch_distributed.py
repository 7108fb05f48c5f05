"""PyTorch's distributed checkpoints (`torch.distributed.checkpoint.save`): `.metadata` and a `__R_N.distcp` for each writer.

`.metadata` is a pickle. It is read as plain records of the known classes by name; any other name in it is refused, and no code
of a file or of torch's classes is run. Each shard of a tensor is a file of `torch.save` within a `.distcp`, and is mapped into
memory.
"""

import io
import os
import pickle
import sys
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from hps.errors import ModelFileError
from hps.models.formats.base import AnyArray, ArrayInfo, ArraySource, reading

_RECORDS = {
    "torch.distributed.checkpoint.metadata": {
        *("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties"),
        *("MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING"),
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
}
_PATHS = {("pathlib", "PosixPath"), ("pathlib._local", "PosixPath")}
_MOST_METADATA_BYTES = 1 << 30


class _Record:
    """An object of the pickle: its fields, or its state if that is something else. *Immutable once read.*"""

    def __init__(self, *_: object) -> None:
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state
        if isinstance(state, dict):
            self.__dict__.update(state)


class _Unpickler(pickle.Unpickler):
    """Makes records, tuples and texts, and nothing else."""

    def __init__(self, path: str, content: bytes) -> None:
        super().__init__(io.BytesIO(content))
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        if name in _RECORDS.get(module, ()):
            return type(name, (_Record,), {})
        if (module, name) == ("torch", "Size"):
            return tuple
        if module == "torch" and name.isidentifier():
            return _Named(name)
        if (module, name) == ("torch.serialization", "_get_layout"):
            return str
        if (module, name) in _PATHS:
            return lambda *parts: "/".join(parts)
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        raise ModelFileError(
            f"importing {self._path}: it names {module}.{name}, expected the classes that describe a checkpoint alone; hps "
            "runs no code of a file: save again, or convert it with torch.distributed.checkpoint.format_utils"
        )


class _Named(str):
    """The name of something in torch, such as a dtype. Calling it is an error."""


@dataclass(frozen=True, slots=True)
class _Shard:
    """A part of a tensor, and where its bytes are. *Immutable.*"""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int

    @property
    def rows(self) -> range:
        return range(self.offsets[0], self.offsets[0] + self.sizes[0])

    @property
    def columns(self) -> range:
        return range(self.offsets[1], self.offsets[1] + self.sizes[1]) if len(self.sizes) > 1 else range(1)


class DistributedCheckpoint(ArraySource):
    """The tensors of a checkpoint by their full names. Only the shards of requested tensors are opened."""

    keys_are_optional = True

    def __init__(self, path: str, files: Sequence[str]) -> None:
        super().__init__(path, files)
        self._sizes = {os.path.basename(file): os.path.getsize(file) for file in files}
        self._directory = os.path.dirname(files[0])
        if ".metadata" not in self._sizes:
            raise ModelFileError(
                f"importing {path}: got no .metadata, which is written last, expected a complete checkpoint; save again"
            )
        description = os.path.join(self._directory, ".metadata")
        with reading(description), open(description, "rb") as stream:
            metadata = _Unpickler(description, stream.read(_MOST_METADATA_BYTES)).load()
            self._infos, self._shards = _tensors(metadata, self._directory)

    def arrays(self) -> list[ArrayInfo]:
        return list(self._infos.values())

    def chunks(self, names: Sequence[str], step: int) -> Iterator[Sequence[AnyArray]]:
        rows = self._infos[names[0]].shape[0]
        with reading(self.path):
            tables = [self._bands(name) for name in names]
            for shard in (shard for name in names for shard in self._shards[name]):
                self._refuse_absent(shard)
            mapped: dict[_Shard, torch.Tensor] = {}
            for start in range(0, rows, step):
                stop = min(start + step, rows)
                mapped = {shard: tensor for shard, tensor in mapped.items() if shard.rows.stop > start}
                yield [self._block(name, bands, mapped, start, stop) for name, bands in zip(names, tables, strict=True)]

    def _bands(self, name: str) -> list[tuple[range, list[_Shard]]]:
        """Arrange the shards of a tensor by the rows that they share. Each band must have every column once."""
        info, shards = self._infos[name], self._shards[name]
        width = info.shape[1] if len(info.shape) > 1 else 1
        edges = sorted({0, info.shape[0], *(edge for shard in shards for edge in (shard.rows.start, shard.rows.stop))})
        bands = []
        for start, stop in pairwise(edges):
            inside = sorted((shard for shard in shards if start in shard.rows), key=lambda shard: shard.columns.start)
            ends = [0, *(shard.columns.stop for shard in inside)]
            if [shard.columns.start for shard in inside] != ends[:-1] or ends[-1] != width or stop > info.shape[0]:
                raise ModelFileError(
                    f"importing {self.path}: got shards of {name!r} that do not have each element of the rows {start} to "
                    f"{stop - 1} once, expected all shards of one save; save again"
                )
            bands.append((range(start, stop), inside))
        return bands

    def _block(
        self, name: str, bands: list[tuple[range, list[_Shard]]], mapped: dict[_Shard, torch.Tensor], start: int, stop: int
    ) -> AnyArray:
        """Copy rows [start, stop) of a tensor; shards are mapped when they are needed."""
        shape = self._infos[name].shape[1:]
        block = torch.empty((stop - start, *shape), dtype=getattr(torch, self._infos[name].dtype))
        for rows, shards in bands:
            low, high = max(rows.start, start), min(rows.stop, stop)
            for shard in shards if low < high else ():
                if shard not in mapped:
                    mapped[shard] = self._mapped(name, shard)
                into = block[low - start : high - start]
                part = mapped[shard][low - shard.rows.start : high - shard.rows.start]
                (into[:, shard.columns.start : shard.columns.stop] if shape else into).copy_(part)
        array: AnyArray = block.view(torch.uint16).numpy() if block.dtype == torch.bfloat16 else block.numpy()
        return array

    def _refuse_absent(self, shard: _Shard) -> None:
        """Refuse a shard whose file is missing or cut short."""
        name, end = os.path.basename(shard.file), shard.start + shard.length
        if name not in self._sizes:
            raise ModelFileError(f"importing {self.path}: got no {name}, which .metadata names; copy the files of all ranks")
        if end > self._sizes[name]:
            raise ModelFileError(
                f"importing {shard.file}: got {self._sizes[name]} bytes, expected at least {end}, as .metadata says; it is "
                "cut short"
            )

    def _mapped(self, name: str, shard: _Shard) -> torch.Tensor:
        """Map the elements of a shard into memory."""
        with reading(shard.file):
            saved = np.memmap(
                shard.file, np.uint8, "c", shard.start, (shard.length,)
            )  # copy on write: torch warns of read-only memory
            form = torch.load(io.BufferedReader(_SavedStream(saved)), map_location="meta", weights_only=True)
            if (
                not isinstance(form, torch.Tensor)
                or tuple(form.shape) != shard.sizes
                or _name(form.dtype) != self._infos[name].dtype
            ):
                raise ValueError(
                    f"got {form!r} as a shard of {name!r}, expected a tensor {shard.sizes} of {self._infos[name].dtype}"
                )
            with zipfile.ZipFile(_SavedStream(saved)) as archive:
                members = {member.filename.partition("/")[2]: member for member in archive.infolist()}
                if "byteorder" in members and archive.read(members["byteorder"]).decode() != sys.byteorder:
                    raise ValueError(f"got elements in the other byte order, expected {sys.byteorder}-endian ones")
            elements = torch.from_numpy(_content(saved, members["data/0"])).view(form.dtype)
            return elements.as_strided(form.shape, form.stride(), form.storage_offset())


class _SavedStream(io.RawIOBase):
    """A file of bytes in memory, without a copy of them. *One thread.*"""

    def __init__(self, content: AnyArray) -> None:
        self._content, self._at = content.data, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = max(0, offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: len(self._content)}[whence])
        return self._at

    def readinto(self, buffer: Any) -> int:
        part = self._content[self._at : self._at + len(buffer)]
        buffer[: len(part)] = part
        self._at += len(part)
        return len(part)


def _content(archive: AnyArray, member: zipfile.ZipInfo) -> AnyArray:
    """Find the bytes of a member: they follow its local header, of 30 bytes, its name and extra fields."""
    head = bytes(archive[member.header_offset : member.header_offset + 30])
    start = member.header_offset + 30 + sum(int.from_bytes(head[at : at + 2], "little") for at in (26, 28))
    if member.compress_type != zipfile.ZIP_STORED or start + member.file_size > archive.size:
        raise ValueError(f"got a compressed or incomplete member {member.filename}")
    return archive[start : start + member.file_size]


def _tensors(metadata: Any, directory: str) -> tuple[dict[str, ArrayInfo], dict[str, list[_Shard]]]:
    """Find the tensors that a checkpoint's description lists, and their shards."""
    infos: dict[str, ArrayInfo] = {}
    shards: dict[str, list[_Shard]] = {}
    places = {(index.fqn, getattr(index, "offset", None)): info for index, info in metadata.storage_data.items()}
    for name, tensor in metadata.state_dict_metadata.items():
        if type(tensor).__name__ != "TensorStorageMetadata":
            continue
        infos[name] = ArrayInfo(name, tuple(tensor.size), str(tensor.properties.state[0]))
        shards[name] = []
        for chunk in tensor.chunks:
            if 0 in chunk.sizes:
                continue
            if min(*chunk.offsets, 0) < 0:
                raise ValueError(f"got a shard of {name!r} at {chunk.offsets}, expected offsets from 0 on")
            place = places.get((name, chunk.offsets)) or places[name, None]
            if os.path.basename(place.relative_path) != place.relative_path or getattr(place, "transform_descriptors", None):
                raise ValueError(
                    f"got {name!r} in {place.relative_path!r}, expected a file beside .metadata, without compression"
                )
            file = os.path.join(directory, place.relative_path)
            shards[name].append(_Shard(tuple(chunk.offsets), tuple(chunk.sizes), file, int(place.offset), int(place.length)))
    return infos, shards


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
