"""What RocksDB's messages mean. The binding raises bare `Exception`s with the engine's text; they are told apart here alone."""

from pathlib import Path
from types import TracebackType
from typing import Self

from hps.errors import DatabaseCorruptError, DatabaseError, DatabaseLockedError, DatabaseTimeoutError

_LOCKED = ("lock hold by current process", "While lock file")
_CORRUPT = ("Corruption", "No such file or directory")  # an open database names a file only if it had written it
_FULL = ("No space left on device", "File too large", "Disk quota exceeded")
_PLACE = (
    "Permission denied",
    "Operation not permitted",
    "Read-only file system",
    "Not a directory",
    "File exists",
    "File name too long",
)
_HANDLES = ("Too many open files",)
_STALLED = ("Write stall",)


class WriteStalledError(DatabaseTimeoutError):
    """The engine takes no write until it has written out what it holds in memory."""


def database_error(message: str, doing: str, path: Path) -> DatabaseError:
    """The typed error of an engine's message: what was being done, what was got, what to do."""
    text = f"{doing} in {path}: {' '.join(message.split())}"

    def has(phrases: tuple[str, ...]) -> bool:
        return any(phrase in message for phrase in phrases)

    if has(_LOCKED):
        return DatabaseLockedError(
            f"{text}. Another process (or another part of this one) has the directory open: stop it (`fuser {path}/LOCK` names "
            "it), give this one a path of its own, or open it with read_only"
        )
    if has(_FULL):
        return DatabaseError(f"{text}. The disk is full; what was there can still be read. Make room, then open it again")
    if has(_STALLED):
        return WriteStalledError(f"{text}. The disk does not keep up with the writes; write less, or to a faster disk")
    if has(_HANDLES):
        return DatabaseError(f"{text}. Raise the limit of open files (`ulimit -n`)")
    if has(_PLACE):
        return DatabaseError(f"{text}. It must be a directory that this process may write to, or be opened with read_only")
    if has(_CORRUPT):
        return DatabaseCorruptError(
            f"{text}. Files are damaged or missing, so nothing is answered from there. "
            "Restore the directory from a backup, or remove it and load the models again"
        )
    return DatabaseError(text)


class EngineErrors:
    """`with EngineErrors("reading table t", path):` turns the engine's bare exceptions into typed ones. *One per use.*"""

    __slots__ = ("_doing", "_path")

    def __init__(self, doing: str, path: Path) -> None:
        self._doing = doing
        self._path = path

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if type(error) is Exception or isinstance(error, OSError):  # the binding's; anything else is a fault of our own
            raise database_error(str(error), self._doing, self._path) from error
