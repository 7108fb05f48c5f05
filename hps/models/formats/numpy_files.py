""".npy files and .npz archives of them. Pickled objects are never read."""

import math
import os
import stat
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import IO, Any

import numpy as np

from hps.errors import ModelFileError
from hps.models.formats.base import AnyArray, ArrayInfo, ArraySource, reading
from hps.types import KeyArray

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


def _stem(file: str) -> str:
    return os.path.basename(file).removesuffix(".npy")


def _read_head(stream: IO[bytes]) -> "tuple[tuple[int, ...], bool, np.dtype[Any]]":
    return _READ_HEAD[np.lib.format.read_magic(stream)](stream)


def _read_rows(stream: IO[bytes], shape: tuple[int, ...], dtype: "np.dtype[Any]") -> AnyArray:
    return np.frombuffer(stream.read(math.prod(shape) * dtype.itemsize), dtype).reshape(shape)
