"""Arrays whose elements lie one after the other in a file: .npy, stored .npz members, safetensors."""

import math
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from hps.formats.base import FILES, AnyArray, damaged


def read_bytes(path: str, offset: int, count: int) -> bytes:
    """That stretch of a file.

    Raises:
        ModelFileError: it ends early or cannot be read.
    """
    buffer = bytearray(count)
    FILES.read_into(path, offset, memoryview(buffer))
    return bytes(buffer)


class RawArray:
    """Reads an array by its place in a file, row block after row block, into one buffer. *One thread.*

    Reads are `pread`s and not a memory map: pages of a map count as this process's memory, and a file that is cut short under
    a map kills the process.

    Args:
        path: the file.
        offset: where its first element lies.
        dtype: of its elements, in either byte order.
        shape: rows first.
        fortran_order: whether its columns lie together, and not its rows.
        checksum: CRC-32 of the bytes before it, and of those and it together; checked when it is read in order, so not in
            Fortran order.
    """

    def __init__(
        self,
        path: str,
        offset: int,
        dtype: "np.dtype[Any]",
        shape: tuple[int, ...],
        *,
        fortran_order: bool = False,
        checksum: tuple[int, int] | None = None,
    ) -> None:
        self.path = path
        self.dtype = dtype
        self.shape = shape
        self._offset = offset
        self._columns_lie_together = fortran_order and len(shape) > 1
        self._checksum = None if self._columns_lie_together else checksum

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def blocks(self, step: int) -> Iterator[AnyArray]:
        """Yield (m, ...) blocks of at most `step` rows; each is overwritten by the next.

        Raises:
            ModelFileError: the file cannot be read, was cut short, or its checksum differs.
        """
        return self._blocks_of_columns(step) if self._columns_lie_together else self._blocks_of_rows(step)

    def _blocks_of_rows(self, step: int) -> Iterator[AnyArray]:
        rows = self.shape[0]
        buffer = np.empty((min(step, rows), *self.shape[1:]), self.dtype)
        place, crc = self._offset, self._checksum[0] if self._checksum else 0
        for start in range(0, rows, step):
            block = buffer[: min(step, rows - start)]
            raw = block.view(np.uint8).data.cast("B")
            FILES.read_into(self.path, place, raw)
            place += len(raw)
            if self._checksum:
                crc = zlib.crc32(raw, crc)
                if start + step >= rows and crc != self._checksum[1]:
                    raise damaged(self.path, "the checksum of its content differs from the one it carries")
            yield block

    def _blocks_of_columns(self, step: int) -> Iterator[AnyArray]:
        rows, width = self.shape[0], math.prod(self.shape[1:])
        buffer = np.empty((width, min(step, rows)), self.dtype)
        for start in range(0, rows, step):
            block = buffer[:, : min(step, rows - start)]
            for j in range(width):
                place = self._offset + (j * rows + start) * self.dtype.itemsize
                FILES.read_into(self.path, place, block[j].view(np.uint8).data.cast("B"))
            yield block.T
