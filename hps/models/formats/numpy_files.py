""".npy files, .npz archives of them, and TorchEasyRec's archives by rank. Pickled objects are never read."""

import json
import math
import os
import re
import stat
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import IO, Any

import numpy as np

from hps.errors import ModelFileError
from hps.models.formats.base import AnyArray, ArrayInfo, ArraySource, by_rank, reading
from hps.models.formats.quantised_rows import row_dim
from hps.types import KeyArray

_SHARD = re.compile(
    r"(?P<kind>sparse_embeddings|sparse_dynamic_embedding)-(?P<rank>\d+)-of-(?P<world>\d+)\.(?P<suffix>npz|json)"
)
_READ_HEAD = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


class NpyFiles(ArraySource):
    """Memory-mapped .npy files, each one array named by its file without `.npy`."""

    def __init__(self, path: str, files: Sequence[str]) -> None:
        super().__init__(path, files)
        self._arrays: list[tuple[str, np.memmap[Any, np.dtype[Any]]]] = []
        for file in files:
            with reading(file):
                array = np.lib.format.open_memmap(file, mode="r")
                if (size := os.path.getsize(file)) != array.offset + array.nbytes:
                    raise ValueError(f"got {size} bytes, expected {array.offset + array.nbytes} for an array {array.shape}")
            self._arrays.append((_stem(file), array))

    def arrays(self) -> list[ArrayInfo]:
        return [ArrayInfo(name, array.shape, array.dtype.name) for name, array in self._arrays]

    def array(self, name: str) -> ArrayInfo:
        """Find the array of a name or of a file's path."""
        return super().array(_stem(name))

    def chunks(self, names: Sequence[str], step: int) -> Iterator[Sequence[AnyArray]]:
        arrays = [dict(self._arrays)[name] for name in names]
        for start in range(0, len(arrays[0]), step):
            yield [array[start : start + step] for array in arrays]


def read_keys(file: str) -> KeyArray:
    """Return the keys of a .npy file, memory-mapped: (n,) int64, read only.

    Raises:
        ModelFileError: it is no such file, or cannot be read.
    """
    try:
        if not stat.S_ISREG(os.stat(file).st_mode):
            raise ValueError("it is no regular file")
        keys = np.lib.format.open_memmap(file, mode="r")  # never more than the file has
    except Exception as error:
        raise ModelFileError(f"reading keys of {file}: {type(error).__name__}: {error}; expected a .npy file") from error
    if keys.dtype != np.int64 or keys.ndim != 1:
        raise ModelFileError(f"reading keys of {file}: got {keys.shape} {keys.dtype}, expected (n,) int64")
    return keys


class NpzArchive(ArraySource):
    """A .npz archive, read as it is unpacked, with its checksums checked."""

    def __init__(self, path: str, files: Sequence[str]) -> None:
        super().__init__(path, files)
        self._infos = []
        with reading(path), zipfile.ZipFile(path) as archive:
            for member in archive.namelist():
                if member.endswith(".npy"):
                    with archive.open(member) as stream:
                        shape, _, dtype = _read_head(stream)
                    self._infos.append(ArrayInfo(member.removesuffix(".npy"), shape, dtype.name))

    def arrays(self) -> list[ArrayInfo]:
        return self._infos

    def checksum(self, name: str) -> tuple[int, int]:
        """Return the size and the CRC-32 of a member."""
        with reading(self.path), zipfile.ZipFile(self.path) as archive:
            member = archive.getinfo(f"{name}.npy")
            return member.file_size, member.CRC

    def chunks(self, names: Sequence[str], step: int) -> Iterator[Sequence[AnyArray]]:
        with reading(self.path), zipfile.ZipFile(self.path) as archive, ExitStack() as stack:
            streams = [stack.enter_context(archive.open(f"{name}.npy")) for name in names]
            heads = [_read_head(stream) for stream in streams]
            for name, (shape, by_columns, _) in zip(names, heads, strict=True):
                if by_columns:
                    raise ValueError(f"{name} {shape} is in Fortran order, expected C order: save np.ascontiguousarray(array)")
            rows = heads[0][0][0]
            for start in range(0, rows, step):
                count = min(step, rows - start)
                yield [
                    _read_rows(stream, (count, *shape[1:]), dtype)
                    for stream, (shape, _, dtype) in zip(streams, heads, strict=True)
                ]
            for name, stream in zip(names, streams, strict=True):
                if stream.read(1):  # also checks the checksum, which follows the last byte
                    raise ValueError(f"{name} has bytes beyond its last row")


class NpzShards(ArraySource):
    """Archives by rank, which TorchEasyRec exports with `USE_DISTRIBUTED_EMBEDDING` (`tzrec/utils/export_util.py`).

    `sparse_embeddings-RR-of-WW.npz` has this rank's rows of each table, which follow those of the rank before, and
    `sparse_dynamic_embedding-RR-of-WW.npz` the members `<table>.keys`, `.values` and `.scores`, if the rank has any. The
    `.json` beside the former says which tables the rank has. Listed are the vectors `<table>` and, of dynamic tables,
    `<table>.keys`.
    """

    keys_are_optional = True

    def __init__(self, path: str, files: Sequence[str]) -> None:
        super().__init__(path, files)
        self._parts: dict[str, list[tuple[NpzArchive, dict[str, str]]]] = {}
        self._infos: dict[str, ArrayInfo] = {}
        found = [(match, file) for file in files if (match := _SHARD.fullmatch(os.path.basename(file)))]
        kinds: dict[tuple[str, str], list[tuple[re.Match[str], str]]] = {}
        for match, file in found:
            kinds.setdefault((match["kind"], match["suffix"]), []).append((match, file))
        described = by_rank(path, "descriptions of tables", kinds.get(("sparse_embeddings", "json"), ()))
        static = by_rank(path, "tables", kinds.get(("sparse_embeddings", "npz"), ()))
        dynamic = {
            int(match["rank"]): (int(match["world"]), file)
            for match, file in kinds.get(("sparse_dynamic_embedding", "npz"), ())
        }
        if len(described) != len(static) or any(world != len(static) for world, _ in dynamic.values()):
            raise ModelFileError(
                f"importing {path}: got archives of several exports, with different numbers of ranks, expected one export; "
                "remove the files of the older one"
            )
        self.repeats_are_errors = len(static) > 1
        for rank, file in static.items():
            with reading(described[rank]), open(described[rank], encoding="utf-8") as stream:
                tables = {name: _Described.read(table) for name, table in json.load(stream).items()}
            if rank not in dynamic and (names := [name for name, table in tables.items() if table.dynamic]):
                raise ModelFileError(
                    f"importing {path}: got no sparse_dynamic_embedding of rank {rank}, which has rows of "
                    f"{', '.join(names[:8])}; copy all files"
                )
            archives = {False: NpzArchive(file, [file])}
            if rank in dynamic:
                archives[True] = NpzArchive(dynamic[rank][1], [dynamic[rank][1]])
            for name, table in tables.items():
                self._add(name, table, archives[table.dynamic])
        for name, parts in self._parts.items():
            self._refuse_copies(name, [archive.checksum(members[name]) for archive, members in parts])

    def _add(self, name: str, table: "_Described", archive: NpzArchive) -> None:
        """Add a rank's rows of a table to the arrays."""
        members = {name: f"{name}.values", f"{name}.keys": f"{name}.keys"} if table.dynamic else {name: name}
        for array, member in members.items():
            part = archive.array(member)
            if array == name and table.quantised and part.dtype == "uint8" and len(part.shape) == 2:
                row_dim(archive.path, member, part.shape[1], "rowwise8", table.dim)
                part = ArrayInfo(member, part.shape, "rowwise8")
            if array == name and table.shape is not None and part.shape != table.shape:
                raise ModelFileError(
                    f"importing {archive.path}: got {part}, expected shape {table.shape}, as its .json says; they are of "
                    "different exports"
                )
            known = self._infos.get(array, ArrayInfo(array, (0, *part.shape[1:]), part.dtype))
            if (part.shape[1:], part.dtype) != (known.shape[1:], known.dtype):
                raise ModelFileError(f"importing {archive.path}: got {part}, expected {known} as of the ranks before")
            self._infos[array] = ArrayInfo(array, (known.shape[0] + part.shape[0], *part.shape[1:]), part.dtype)
        if table.dynamic and archive.array(f"{name}.keys").shape[0] != archive.array(f"{name}.values").shape[0]:
            raise ModelFileError(
                f"importing {archive.path}: got {archive.array(f'{name}.keys')} and {archive.array(f'{name}.values')}, "
                "expected as many keys as vectors; export again"
            )
        self._parts.setdefault(name, []).append((archive, members))

    def _refuse_copies(self, name: str, checksums: list[tuple[int, int]]) -> None:
        """Refuse a table with the same rows in each rank: their row numbers would continue instead of repeating."""
        if f"{name}.keys" not in self._infos and len(checksums) > 1 and len(set(checksums)) == 1 and checksums[0][0]:
            raise ModelFileError(
                f"importing {self.path}: got the same rows of {name} from every rank, expected a part from each: the table "
                "was not sharded; import the .npz of rank 0 alone with --format npz"
            )

    def arrays(self) -> list[ArrayInfo]:
        return list(self._infos.values())

    def keys_of(self, vectors: str) -> str | None:
        return f"{vectors}.keys" if f"{vectors}.keys" in self._infos else None

    def chunks(self, names: Sequence[str], step: int) -> Iterator[Sequence[AnyArray]]:
        table = next(name for name in names if name in self._parts or name.removesuffix(".keys") in self._parts)
        for archive, members in self._parts.get(table) or self._parts[table.removesuffix(".keys")]:
            yield from archive.chunks([members[name] for name in names], step)


@dataclass(frozen=True, slots=True)
class _Described:
    """A rank's rows of a table, as TorchEasyRec describes them. *Immutable.*

    Attributes:
        dynamic: the rows have keys.
        shape: of the stored rows; None if unknown.
        dim: of the vectors; None if unknown.
        quantised: the rows are those of `DIST_QUANT`, rowwise8.
    """

    dynamic: bool
    shape: tuple[int, ...] | None
    dim: int | None
    quantised: bool

    @classmethod
    def read(cls, content: Any) -> "_Described":
        shape = content.get("storage_shape") or content.get("shape")
        quantised = content.get("dtype") == "QUint8RowwiseF16"
        return cls(bool(content.get("is_dynamic")), tuple(shape) if shape else None, content.get("dimension"), quantised)


def _stem(file: str) -> str:
    return os.path.basename(file).removesuffix(".npy")


def _read_head(stream: IO[bytes]) -> "tuple[tuple[int, ...], bool, np.dtype[Any]]":
    return _READ_HEAD[np.lib.format.read_magic(stream)](stream)


def _read_rows(stream: IO[bytes], shape: tuple[int, ...], dtype: "np.dtype[Any]") -> AnyArray:
    return np.frombuffer(stream.read(math.prod(shape) * dtype.itemsize), dtype).reshape(shape)
