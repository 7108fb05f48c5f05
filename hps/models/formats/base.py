"""The contract of a file format with embedding tables."""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar, TypeAlias

import numpy.typing as npt

from hps.errors import HPSError, ModelFileError

AnyArray: TypeAlias = npt.NDArray[Any]

BFLOAT16 = "bfloat16"
"""A dtype that NumPy lacks. Its blocks have any 16-bit dtype, the upper half of a float32."""

_LISTED = 30


@dataclass(frozen=True, slots=True)
class ArrayInfo:
    """One array of a source: a tensor, a column, a member. *Immutable.*

    Attributes:
        name: name in the file; dotted if nested.
        shape: rows first; -1 if unknown before reading.
        dtype: NumPy's name or `bfloat16`, or else the file's own word.
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
        path: local file or directory, for messages.
        files: regular files to read, in order; `path` alone unless it is a directory.

    Raises of every operation:
        ModelFileError: a file is damaged, cut short or unreadable; the message names the file.
    """

    keys_are_optional: ClassVar[bool] = False
    """Whether tables of this format commonly use row numbers as keys."""

    repeats_are_errors: bool = False
    """Whether a key that occurs twice is an error, as in shards, whose files have no order."""

    def __init__(self, path: str, files: Sequence[str]) -> None:
        self.path = path
        self.files = files

    @abstractmethod
    def arrays(self) -> list[ArrayInfo]:
        """List all arrays, in the order of the source."""

    @abstractmethod
    def chunks(self, names: Sequence[str], step: int) -> Iterator[Sequence[AnyArray]]:
        """Yield the rows of several arrays side by side, in order.

        Args:
            names: arrays with the same number of rows.
            step: maximum rows of a chunk.

        Returns:
            One block per name, all with the same number of rows, in the dtype of the file. A block is valid until the next.
        """

    def keys_of(self, vectors: str) -> str | None:
        """Return the array of keys that belongs to an array of vectors, if the format pairs them."""
        return None

    def deleted(self, vectors: str, step: int) -> Iterator[AnyArray]:
        """Yield the keys that a delta deletes from the table of these vectors: (at most `step`,) integers."""
        yield from ()

    def array(self, name: str) -> ArrayInfo:
        """Find the array of a name.

        Raises:
            ModelFileError: there is none, or several; the message lists all arrays.
        """
        found = [info for info in self.arrays() if info.name == name]
        if len(found) == 1:
            return found[0]
        got = f"{len(found)} arrays called" if found else "no"
        raise ModelFileError(f"importing {self.path}: it holds {got} {name!r}, expected one; it holds {self.listed()}")

    def listed(self) -> str:
        """List all arrays on one line, for messages."""
        found = [str(info) for info in self.arrays()]
        more = f" and {len(found) - _LISTED} more" if len(found) > _LISTED else ""
        return "; ".join(found[:_LISTED]) + more or "no array"


def by_rank(path: str, what: str, parts: Iterable[tuple[re.Match[str], str]]) -> dict[int, str]:
    """Sort the files of a training by rank, from 0 to the last.

    Args:
        what: the table, for messages.
        parts: match of a file's name, with the groups `rank` and `world`, and the file.

    Raises:
        ModelFileError: a rank is missing or there twice, or files are of trainings with different numbers of ranks.
    """
    files: dict[int, str] = {}
    worlds: set[int] = set()
    for match, file in parts:
        rank = int(match["rank"])
        worlds.add(int(match["world"]))
        if len(worlds) > 1:
            raise ModelFileError(
                f"importing {path}: got files of {what} by {' and by '.join(map(str, sorted(worlds)))} ranks, expected one "
                "dump; remove the files of the older one"
            )
        if rank in files:
            raise ModelFileError(f"importing {path}: got {file} and {files[rank]} for rank {rank} of {what}, expected one file")
        files[rank] = file
    if not files:
        raise ModelFileError(f"importing {path}: got no files of {what}, expected one for each rank; copy all of them")
    [world] = worlds
    missing = list(islice((str(rank) for rank in range(world) if rank not in files), _LISTED))
    if missing or len(files) != world:
        beyond = [str(rank) for rank in sorted(files) if rank >= world]
        problem = f"rank {', '.join(missing)} of {world} missing" if missing else f"rank {', '.join(beyond)} of only {world}"
        raise ModelFileError(
            f"importing {path}: got files of {what} with {problem}, expected ranks 0 to {world - 1}; copy all of them"
        )
    return {rank: files[rank] for rank in sorted(files)}


@contextmanager
def reading(file: str) -> Iterator[None]:
    """Turn a library's errors, of any type for damaged files, into `ModelFileError`s that name the file."""
    try:
        yield
    except HPSError:
        raise
    except Exception as error:
        raise ModelFileError(
            f"importing {file}: it cannot be read ({type(error).__name__}: {error}); if it is damaged, cut short or of another "
            "format, write it again"
        ) from error
