"""The contract of a file format that `hps import` reads embedding tables from."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import numpy.typing as npt

from hps.errors import HPSError, ModelFileError

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
    """Files that hold named arrays. *One thread.*

    Args:
        path: what the user named, for messages: a local file or directory.
        files: the regular files to read, in order; `path` alone unless it is a directory.

    Raises of every operation:
        ModelFileError: a file is damaged, cut short or holds what cannot be read; the message names the file.
    """

    keys_are_optional: ClassVar[bool] = False
    """Whether tables of this format commonly have no keys; they are row numbers then."""

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
            ModelFileError: there is none, or there are several; the message lists the arrays there are.
        """
        found = [info for info in self.arrays() if info.name == name]
        if len(found) == 1:
            return found[0]
        got = f"{len(found)} arrays called" if found else "no"
        raise ModelFileError(f"importing {self.path}: it holds {got} {name!r}, expected one; it holds {self.listed()}")

    def listed(self) -> str:
        """All arrays on one line, for messages."""
        found = [str(info) for info in self.arrays()]
        more = f" and {len(found) - _LISTED} more" if len(found) > _LISTED else ""
        return "; ".join(found[:_LISTED]) + more or "no array"


@contextmanager
def reading(file: str) -> Iterator[None]:
    """Raise a library's errors, which damaged bytes make of any kind, as `ModelFileError`s that name the file."""
    try:
        yield
    except HPSError:
        raise
    except Exception as error:
        raise ModelFileError(
            f"importing {file}: it cannot be read ({type(error).__name__}: {error}); if it is damaged, cut short or of another "
            "format, write it again"
        ) from error
