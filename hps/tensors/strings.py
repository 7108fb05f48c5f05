"""Texts of requests: the bytes of all of them in one array, as the wire has them.

The functions of `models[].transform` get them, and hash them without a loop over texts.
"""

import struct
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from numba import boolean, int64, uint8, uint64

from hps.errors import InvalidDtypeError, InvalidInputError
from hps.ground.kernels.numba_kernels import kernel, read_only
from hps.types import KeyArray

_OFFSET_BASIS: Final = np.uint64(0xCBF29CE484222325)
_PRIME: Final = np.uint64(0x100000001B3)
_LENGTH: Final = struct.Struct("<I")  # before each text in a binary tensor


@kernel(boolean, read_only(uint8[::1]), int64[::1], uint8[::1])
def split(tensor: npt.NDArray[np.uint8], offsets: KeyArray, data: npt.NDArray[np.uint8]) -> bool:
    """Copy the texts of a binary tensor, each after its length, to `data`; False if they do not end with the tensor."""
    at, end = 0, 0
    for i in range(offsets.size - 1):
        if at + 4 > tensor.size:
            return False
        size = int64(tensor[at]) | int64(tensor[at + 1]) << 8 | int64(tensor[at + 2]) << 16 | int64(tensor[at + 3]) << 24
        at += 4
        if size > tensor.size - at or size > data.size - end:
            return False
        for j in range(size):
            data[end + j] = tensor[at + j]
        at += size
        end += size
        offsets[i + 1] = end
    return at == tensor.size


@kernel(int64[::1], read_only(uint8[::1]), read_only(int64[::1]))
def _fnv1a(data: npt.NDArray[np.uint8], offsets: KeyArray) -> KeyArray:
    hashes = np.empty(offsets.size - 1, np.int64)
    for i in range(offsets.size - 1):
        found = uint64(_OFFSET_BASIS)
        for j in range(offsets[i], offsets[i + 1]):
            found = (found ^ uint64(data[j])) * _PRIME
        hashes[i] = int64(found)
    return hashes


KERNELS: Final = (split, _fnv1a)


class Strings:
    """Texts in one array. *Immutable.*

    Args:
        data: (m,) uint8: the bytes of all texts, one after another; text in UTF-8.
        offsets: (n + 1,) int64, from 0 to m, never falling: where each begins and ends.
        shape: of the tensor; its product is n.
    """

    def __init__(self, data: npt.NDArray[np.uint8], offsets: KeyArray, shape: Sequence[int]) -> None:
        self.data = data
        self.offsets = offsets
        self.shape = tuple(shape)

    def __len__(self) -> int:
        return self.offsets.size - 1

    @classmethod
    def of(cls, values: Any, what: str = "reading texts", shape: Sequence[int] | None = None) -> "Strings":
        """Make them of lists or arrays of str or bytes.

        Args:
            shape: default: that of the lists.

        Raises:
            InvalidDtypeError: a value is something else.
        """
        try:
            array = np.asarray(values, object)
        except ValueError as error:  # arrays of different shapes
            raise InvalidDtypeError(f"{what}: {error}, expected nested sequences of str alone or bytes alone") from error
        flat = array.reshape(-1).tolist()
        kinds = set(map(type, flat))
        if kinds <= {str, np.str_}:
            try:
                flat = [*map(str.encode, flat)]
            except UnicodeEncodeError as error:
                raise InvalidDtypeError(f"{what}: a text is not Unicode: {error.reason}") from error
        elif not kinds <= {bytes, np.bytes_}:
            wrong = " and ".join(sorted(kind.__name__ for kind in kinds))
            raise InvalidDtypeError(f"{what}: got {wrong}, expected str alone or bytes alone")
        offsets = np.zeros(len(flat) + 1, np.int64)
        np.cumsum(np.fromiter(map(len, flat), np.int64, len(flat)), out=offsets[1:])
        return cls(np.frombuffer(b"".join(flat), np.uint8), offsets, array.shape if shape is None else shape)

    @classmethod
    def of_tensor(cls, tensor: bytes | memoryview, shape: Sequence[int], what: str) -> "Strings":
        """Read a binary tensor of the Open Inference Protocol: each text after its length, uint32, little endian.

        Raises:
            InvalidInputError: it is cut short, or something follows.
        """
        count = int(np.prod(shape, dtype=np.int64))
        given = np.frombuffer(tensor, np.uint8)
        if 4 * count > given.size:
            raise InvalidInputError(f"{what}: got {given.size} bytes for {count} texts, expected 4 bytes of length before each")
        offsets, data = np.zeros(count + 1, np.int64), np.empty(given.size - 4 * count, np.uint8)
        if not split(given, offsets, data):
            raise InvalidInputError(f"{what}: its lengths do not add up to its {given.size} bytes")
        return cls(data, offsets, shape)

    def to_tensor(self) -> bytes:
        """Return the binary tensor with these texts."""
        return b"".join(_LENGTH.pack(len(text)) + text for text in self.to_list())

    def to_list(self) -> list[bytes]:
        """Return the texts in row-major order: for functions of few of them, since it takes a loop."""
        content, ends = self.data.tobytes(), self.offsets.tolist()
        return [content[start:stop] for start, stop in pairwise(ends)]

    def fnv1a(self) -> KeyArray:
        """Hash each text to a key: FNV-1a of 64 bits (Fowler, Noll, Vo), as a signed number; in the shape of the texts.

        Two of n texts collide with a probability of about n^2 / 2^65: one in 37 for a billion.
        """
        hashes: KeyArray = _fnv1a(self.data, self.offsets)
        return hashes.reshape(self.shape)


def hash_texts(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Hash inputs of texts by FNV-1a, and leave the others: the transform `fnv1a`."""
    return {name: values.fnv1a() if isinstance(values, Strings) else values for name, values in inputs.items()}
