""".npy files and .npz archives of them. Pickled objects are never read."""

import math
import os
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from hps.errors import ModelFileError
from hps.formats.base import AnyArray, ArrayInfo, ArraySource, damaged

_ERRORS = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, OSError, ValueError)
_READ_BYTES = 1 << 16  # at a time: zipfile joins what it unpacks


class _Npy:
    """An array in .npy form, in a file or in a member of an archive.

    Args:
        where: names it in messages.
        size_bytes: of the file or of the unpacked member.
        opening: opens it for reading.
        whole: returns the whole array; for Fortran order. It loads no pickle.
    """

    def __init__(self, where: str, size_bytes: int, opening: Callable[[], Any], whole: Callable[[], AnyArray]) -> None:
        self._where, self._opening, self._whole = where, opening, whole
        self.shape, self._fortran_order, self.dtype, self._head_bytes = self._head()
        # Python's integers: a damaged shape must not overflow.
        expected = self._head_bytes + math.prod(self.shape) * self.dtype.itemsize
        if size_bytes != expected and not self.dtype.hasobject:
            raise damaged(
                where,
                f"got {size_bytes} bytes, expected the {expected} of an array of shape {self.shape} and {self.dtype.name}",
            )

    def _head(self) -> tuple[tuple[int, ...], bool, "np.dtype[Any]", int]:
        try:
            with self._opening() as stream:
                version = np.lib.format.read_magic(stream)
                read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}.get(version)
                shape, fortran_order, dtype = read(stream) if read else ((), False, np.dtype(object))
                head_bytes = stream.tell()
        except Exception as error:  # the head is a Python literal: damaged ones lead its parser to errors of any kind
            raise damaged(self._where, f"its .npy head cannot be read ({error})") from error
        if read is None:  # 3.0 is for structured dtypes with names outside Latin-1
            raise ModelFileError(
                f"importing {self._where}: got .npy version {version}, expected 1.0 or 2.0: save a plain array"
            )
        if any(length < 0 for length in shape):
            raise damaged(self._where, f"its head says shape {shape}")
        return shape, fortran_order, dtype, head_bytes

    def blocks(self, step: int) -> Iterator[AnyArray]:
        """Yield at most `step` rows at a time, each block in place of the one before."""
        try:
            if self._fortran_order and len(self.shape) > 1:
                array = self._whole()
                yield from (array[start : start + step] for start in range(0, self.shape[0], step))
                return
            buffer = np.empty((min(step, self.shape[0]), *self.shape[1:]), self.dtype)
            with self._opening() as stream:
                stream.read(self._head_bytes)
                for start in range(0, self.shape[0], step):
                    block = buffer[: self.shape[0] - start]
                    _fill(stream, block.view(np.uint8).data.cast("B"))
                    yield block
        except _ERRORS as error:
            raise damaged(self._where, error) from error


def _fill(stream: Any, buffer: memoryview) -> None:
    done = 0
    while done < len(buffer):
        count = stream.readinto1(buffer[done : done + _READ_BYTES])
        if not count:
            raise EOFError(f"it ends {len(buffer) - done} bytes early")
        done += count


class _NpyArrays(ArraySource):
    """What .npy files and .npz archives share."""

    _arrays: dict[str, _Npy]

    def arrays(self) -> list[ArrayInfo]:
        return [
            ArrayInfo(name, array.shape, "structured" if array.dtype.names else array.dtype.name)
            for name, array in self._arrays.items()
        ]

    def chunks(self, names: Sequence[str], step: int) -> Iterator[Sequence[AnyArray]]:
        return zip(*(self._arrays[name].blocks(step) for name in names), strict=True)


class NpyFiles(_NpyArrays):
    """.npy files, each one array with the name of its file without `.npy`, or with its path where that name is taken.

    Arrays in Fortran order are mapped.
    """

    is_mapped = True

    def __init__(self, path: str, files: Sequence[str]) -> None:
        super().__init__(path, files)
        self._arrays, self._names = {}, {}
        for file in files:
            stem = os.path.basename(file).removesuffix(".npy")
            self._names[file] = file if stem in self._arrays else stem
            self._arrays[self._names[file]] = _Npy(
                file, os.path.getsize(file), partial(open, file, "rb"), partial(np.load, file, mmap_mode="r")
            )

    def array(self, name: str) -> ArrayInfo:
        """The array of a name or of a file's path."""
        return super().array(self._names.get(name, name))


class NpzArchive(_NpyArrays):
    """A .npz archive: members are read as they are unpacked, and their checksums are checked."""

    def __init__(self, path: str, files: Sequence[str]) -> None:
        super().__init__(path, files)
        try:
            self._archive = zipfile.ZipFile(path)
        except _ERRORS as error:
            raise damaged(path, f"it is no .npz archive ({error})") from error
        try:
            self._arrays = {
                member.filename.removesuffix(".npy"): _Npy(
                    f"{path}[{member.filename}]",
                    member.file_size,
                    partial(self._archive.open, member),
                    partial(self._member, member),
                )
                for member in self._archive.infolist()
                if member.filename.endswith(".npy")
            }
        except BaseException:
            self.close()
            raise

    def _member(self, member: zipfile.ZipInfo) -> AnyArray:
        with self._archive.open(member) as stream:
            array: AnyArray = np.lib.format.read_array(stream)
            return array

    def close(self) -> None:
        self._archive.close()
