"""The contract of a file format that `hps import` reads embedding tables from."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, ClassVar, Self, TypeAlias

import numpy.typing as npt

from hps.errors import ModelFileError

AnyArray: TypeAlias = npt.NDArray[Any]

BFLOAT16 = "bfloat16"
"""A dtype that NumPy lacks. Blocks of it have any dtype of 16 bits, which are the upper half of a float32."""

_LISTED = 30


@dataclass(frozen=True, slots=True)
class ArrayInfo:
    """One array of a source: a tensor, a column, a member. *Immutable.*

    Attributes:
        name: as in the file; dotted where it is nested.
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
    """Open files that hold named arrays. *One thread.* A context manager.

    Args:
        path: what the user named, for messages: a local file or directory.
        files: the regular files to read, in order; `path` alone unless it is a directory.

    Raises of every operation:
        ModelFileError: a file is damaged, cut short or holds what cannot be read; the message names the file.
    """

    keys_are_optional: ClassVar[bool] = False
    """Whether tables of this format commonly have no keys; they are row numbers then."""

    is_mapped: ClassVar[bool] = False
    """Whether files may be mapped into memory. Reading beyond the end of one that was cut short meanwhile kills the process."""

    def __init__(self, path: str, files: Sequence[str]) -> None:
        self.path = path
        self.files = files

    @abstractmethod
    def arrays(self) -> list[ArrayInfo]:
        """All arrays that the source holds, in its order."""

    @abstractmethod
    def chunks(self, names: Sequence[str], step: int) -> Iterator[Sequence[AnyArray]]:
        """Yield the rows of several arrays side by side, in order.

        Args:
            names: arrays with the same number of rows.
            step: the most rows of a chunk.

        Returns:
            One block per name, all with the same number of rows and each with the dtype of the file. A block is valid until
            the next is asked for.
        """

    def array(self, name: str) -> ArrayInfo:
        """The array of a name.

        Raises:
            ModelFileError: there is none; the message lists the arrays there are.
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

    def close(self) -> None:  # noqa: B027 - most sources hold nothing open
        """Close the files."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def damaged(path: str, what: object) -> ModelFileError:
    """The error for a file that cannot be what its name says."""
    return ModelFileError(f"importing {path}: {what}; it is damaged, cut short or of another format: write it again")
