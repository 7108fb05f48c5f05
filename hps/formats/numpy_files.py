""".npy files and .npz archives of them. Pickled objects are never read."""

import io
import math
import os
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any

import numpy as np

from hps.errors import ModelFileError
from hps.formats.base import CONVENTIONAL_KEYS, FILES, AnyArray, ArrayInfo, SeparateArrays, damaged, dtype_name
from hps.formats.raw_array import RawArray, read_bytes

_HEADER_BYTES = 12 + 10_000  # numpy reads no longer header of a file that it does not trust
_LOCAL_HEADER_BYTES = 30  # of a zip member, before its name and extra field (APPNOTE.TXT 4.3.7)
_ZIP_ERRORS = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, OSError, ValueError)


@dataclass(frozen=True, slots=True)
class NpyHeader:
    """What the head of a .npy file says: shape, order, dtype, and how many bytes the head takes."""

    shape: tuple[int, ...]
    fortran_order: bool
    dtype: "np.dtype[Any]"
    size_bytes: int

    @property
    def data_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize  # Python's integers: a damaged shape must not overflow


def read_header(path: str, stream: IO[bytes]) -> NpyHeader:
    """Read the head of .npy content.

    Raises:
        ModelFileError: it is none.
    """
    try:
        version = np.lib.format.read_magic(stream)
        read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}.get(version)
        shape, fortran_order, dtype = read(stream) if read else ((), False, np.dtype(object))
    except _ZIP_ERRORS as error:  # of the archive that it may lie in, and of numpy
        raise damaged(path, f"it does not begin as a .npy file does ({error})") from error
    except Exception as error:  # the head is a Python literal: damaged ones lead its parser to errors of any kind
        raise damaged(path, f"its head cannot be read ({error})") from error
    if read is None:  # 3.0 is for structured dtypes with other names than Latin ones
        raise ModelFileError(f"importing {path}: got .npy version {version}, wanted 1.0 or 2.0: save a plain array")
    if any(length < 0 for length in shape):
        raise damaged(path, f"its head says shape {shape}")
    return NpyHeader(tuple(shape), fortran_order, dtype, stream.tell())


def _check_size(path: str, header: NpyHeader, size_bytes: int) -> None:
    wanted = header.size_bytes + header.data_bytes
    if size_bytes != wanted and not header.dtype.hasobject:
        raise damaged(
            path, f"got {size_bytes} bytes, wanted the {wanted} of an array of shape {header.shape} and {header.dtype.name}"
        )


class NpyFiles(SeparateArrays):
    """.npy files, each one array with the name of its file without `.npy`.

    Args:
        path: a directory, all .npy files of which belong to it; or one file, to which those beside it belong that have a
            conventional name for keys. `array` takes the path of any other .npy file, too.
    """

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._arrays: dict[str, RawArray] = {}
        inside = os.path.isdir(path)
        directory = path if inside else os.path.dirname(path) or "."
        if not inside:
            self._add(_stem(path), path)
        for name in FILES.list(directory):
            stem = _stem(name)
            if name.endswith(".npy") and (inside or stem.lower() in CONVENTIONAL_KEYS) and stem not in self._arrays:
                self._add(stem, os.path.join(directory, name))

    def _add(self, name: str, path: str) -> None:
        size_bytes = self._look_at(path)
        header = read_header(path, io.BytesIO(read_bytes(path, 0, min(size_bytes, _HEADER_BYTES))))
        _check_size(path, header, size_bytes)
        self._arrays[name] = RawArray(path, header.size_bytes, header.dtype, header.shape, fortran_order=header.fortran_order)

    def arrays(self) -> list[ArrayInfo]:
        return [ArrayInfo(name, array.shape, dtype_name(array.dtype)) for name, array in self._arrays.items()]

    def array(self, name: str) -> ArrayInfo:
        """The array of a name, which may be the path of another .npy file."""
        if name not in self._arrays and name.endswith(".npy"):
            self._add(name, name)
        return super().array(name)

    def blocks(self, name: str, step: int) -> Iterator[AnyArray]:
        return self._arrays[name].blocks(step)


def _stem(path: str) -> str:
    return os.path.basename(path).removesuffix(".npy")


class NpzArchive(SeparateArrays):
    """A .npz archive: stored members are read where they lie, compressed ones as they are unpacked; checksums are checked."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        size_bytes = self._look_at(path)  # refuses what is no file
        try:
            self._archive = zipfile.ZipFile(path)
        except _ZIP_ERRORS as error:
            raise damaged(path, f"got {size_bytes} bytes that are no .npz archive ({error})") from error
        self._members: dict[str, tuple[zipfile.ZipInfo, NpyHeader]] = {}
        try:
            for member in self._archive.infolist():
                if member.filename.endswith(".npy"):
                    self._members[member.filename.removesuffix(".npy")] = (member, self._header(member))
        except BaseException:
            self.close()
            raise

    def _header(self, member: zipfile.ZipInfo) -> NpyHeader:
        where = f"{self.path}[{member.filename}]"
        try:
            with self._archive.open(member) as stream:
                header = read_header(where, stream)
        except ModelFileError:
            raise
        except _ZIP_ERRORS as error:
            raise damaged(where, str(error)) from error
        _check_size(where, header, member.file_size)
        return header

    def arrays(self) -> list[ArrayInfo]:
        return [ArrayInfo(name, header.shape, dtype_name(header.dtype)) for name, (_, header) in self._members.items()]

    def blocks(self, name: str, step: int) -> Iterator[AnyArray]:
        member, header = self._members[name]
        if member.compress_type == zipfile.ZIP_STORED:
            return self._stored(member, header).blocks(step)
        if header.fortran_order and len(header.shape) > 1:
            raise ModelFileError(
                f"importing {self.path}[{member.filename}]: it is compressed and in Fortran order, which cannot be read row by "
                "row; save it with np.savez, or as np.ascontiguousarray(array)"
            )
        return self._unpacked(member, header, step)

    def _stored(self, member: zipfile.ZipInfo, header: NpyHeader) -> RawArray:
        local = read_bytes(self.path, member.header_offset, _LOCAL_HEADER_BYTES)
        names = int.from_bytes(local[26:28], "little") + int.from_bytes(local[28:30], "little")
        start = member.header_offset + _LOCAL_HEADER_BYTES + names
        head = read_bytes(self.path, start, header.size_bytes)
        return RawArray(
            self.path,
            start + header.size_bytes,
            header.dtype,
            header.shape,
            fortran_order=header.fortran_order,
            checksum=(zlib.crc32(head), member.CRC),
        )

    def _unpacked(self, member: zipfile.ZipInfo, header: NpyHeader, step: int) -> Iterator[AnyArray]:
        where, rows = f"{self.path}[{member.filename}]", header.shape[0]
        buffer = np.empty((min(step, rows), *header.shape[1:]), header.dtype)
        try:
            with self._archive.open(member) as stream:
                stream.read(header.size_bytes)
                for start in range(0, rows, step):
                    block = buffer[: min(step, rows - start)]
                    _fill(stream, block.view(np.uint8).data.cast("B"))
                    if start + step >= rows:
                        stream.read(1)  # the end, where zipfile compares the checksum
                    yield block
        except _ZIP_ERRORS as error:
            raise damaged(where, str(error)) from error

    def close(self) -> None:
        self._archive.close()


def _fill(stream: IO[bytes], buffer: memoryview) -> None:
    done = 0
    while done < len(buffer):
        piece = stream.read(min(len(buffer) - done, 1 << 20))
        if not piece:
            raise EOFError(f"it ends {len(buffer) - done} bytes early")
        buffer[done : done + len(piece)] = piece
        done += len(piece)
