"""The contract of a file format that `hps import` reads embedding tables from."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import repeat
from types import TracebackType
from typing import Any, ClassVar, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from hps.errors import ModelFileError
from hps.filesystems.base import changed
from hps.filesystems.local import LocalFileSystem

AnyArray: TypeAlias = npt.NDArray[Any]

CONVENTIONAL_KEYS = ("keys", "key", "ids", "id")
CONVENTIONAL_VECTORS = ("vectors", "vector", "embeddings", "embedding", "emb_vectors", "emb_vector")
BFLOAT16 = "bfloat16"
"""A dtype that NumPy lacks: blocks of it are (..) uint16, the upper half of a float32."""

_LISTED = 30
FILES = LocalFileSystem()
"""Where sources are; its errors name the path."""


@dataclass(frozen=True, slots=True)
class ArrayInfo:
    """One array of a source: a tensor, a column, a member. *Immutable.*

    Attributes:
        name: as the file has it; dotted where it is nested.
        shape: rows first; -1 where only reading tells.
        dtype: NumPy's name of it or `bfloat16`; the file's own word where neither fits.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        shape = ", ".join("?" if length < 0 else str(length) for length in self.shape)
        return f"{self.name} ({shape}{',' if len(self.shape) == 1 else ''}) {self.dtype}"


class ArraySource(ABC):
    """An open file, directory or pair of files that holds named arrays. *One thread.* A context manager.

    Args:
        path: a local path.

    Raises of every operation:
        ModelFileNotFoundError: there is no such file.
        ModelFileError: it is damaged, cut short or holds what cannot be read; the message names the file.
    """

    keys_are_optional: ClassVar[bool] = False
    """Whether tables commonly lie in this format without keys, which then are row numbers."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._versions: dict[str, str] = {}

    def _look_at(self, path: str) -> int:
        """Return the size of a file, before anything is read of it; `verify` compares it with what it is now."""
        status = FILES.status(path)
        self._versions.setdefault(path, status.version)
        return status.size_bytes

    def verify(self) -> None:
        """Check that all files are those that were opened.

        Raises:
            ModelFileChangedError: one was written or replaced.
        """
        for path, version in self._versions.items():
            if (now := FILES.status(path).version) != version:
                raise changed(path, version, now)

    @abstractmethod
    def arrays(self) -> list[ArrayInfo]:
        """All arrays that the source holds, in its order."""

    @abstractmethod
    def chunks(self, keys: str | None, vectors: str, step: int) -> Iterator[tuple[AnyArray | None, AnyArray]]:
        """Yield the rows in their order, at most `step` at a time, holding no more of them than that.

        Args:
            keys: name of the (n,) or (n, 1) array of integers, or None.
            vectors: name of the (n, dim) array.
            step: most rows of a chunk; there may be fewer.

        Returns:
            Blocks of both with the same number of rows and the dtypes of the file. The caller is done with them when it
            asks for the next.
        """

    def array(self, name: str) -> ArrayInfo:
        """The array of a name.

        Raises:
            ModelFileError: there is none; the message lists those that are.
        """
        for info in self.arrays():
            if info.name == name:
                return info
        raise ModelFileError(f"importing {self.path}: it holds no {name!r}; it holds {self.listed()}")

    def listed(self) -> str:
        """All arrays on one line, for messages."""
        found = [str(info) for info in self.arrays()]
        more = f" and {len(found) - _LISTED} more" if len(found) > _LISTED else ""
        return "; ".join(found[:_LISTED]) + more or "no array"

    def close(self) -> None:  # noqa: B027 - most hold nothing open
        """Let go of the files."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class SeparateArrays(ArraySource):
    """A source that reads each of its arrays by itself."""

    @abstractmethod
    def blocks(self, name: str, step: int) -> Iterator[AnyArray]:
        """Yield one array in its order, `step` rows at a time, the last block with what is left."""

    def chunks(self, keys: str | None, vectors: str, step: int) -> Iterator[tuple[AnyArray | None, AnyArray]]:
        """Read both arrays side by side."""
        key_blocks: Iterable[AnyArray | None] = repeat(None) if keys is None else self.blocks(keys, step)
        return zip(key_blocks, self.blocks(vectors, step), strict=False)  # repeat has no end


def damaged(path: str, what: str) -> ModelFileError:
    """The error for a file that cannot be what its name says."""
    return ModelFileError(f"importing {path}: {what}; it is damaged, cut short or of another format: write it again")


def dtype_name(dtype: "np.dtype[Any]") -> str:
    """NumPy's name, the same for both byte orders."""
    return "structured" if dtype.names else dtype.name
