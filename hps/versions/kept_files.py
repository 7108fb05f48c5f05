"""Small files beside the persistent database, which survive a restart."""

import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote

from hps.engine.chain import DatabaseChain
from hps.errors import DatabaseError
from hps.filesystems.local import sync_directory
from hps.stores.base import PersistentDatabase

_MOST_BYTES = 1 << 16


class KeptFiles:
    """Small JSON files beside the persistent database, one for each model. *Thread-safe.*

    Args:
        directory: directory of the persistent database; None if there is none: nothing is stored.
        name: of the subdirectory.
        read_only: another process writes there.
    """

    def __init__(self, directory: Path | None, name: str, *, read_only: bool = False) -> None:
        self.directory = None if directory is None else directory / name
        self.read_only = read_only

    def path(self, model: str) -> Path:
        return (self.directory or Path()) / f"{quote(model, safe='')}.json"

    def read(self, model: str) -> bytes | None:
        """Return the file of a model; None if there is none.

        Raises:
            DatabaseError: it cannot be read.
        """
        if self.directory is None:
            return None
        try:
            with open(self.path(model), "rb") as file:
                return file.read(_MOST_BYTES)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise DatabaseError(f"reading {self.path(model)} of model {model!r}: {error}") from error

    def write(self, model: str, content: Mapping[str, object]) -> None:
        """Write the file of a model durably, unless read-only. Raises `OSError`."""
        if self.directory is None or self.read_only:
            return
        path = self.path(model)
        path.parent.mkdir(exist_ok=True)
        fresh = path.with_suffix(f".{threading.get_ident()}.tmp")
        with open(fresh, "w") as file:
            json.dump(content, file)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
        sync_directory(path.parent)

    def remove(self, model: str) -> None:
        """Remove the file of a model durably, if there is one.

        Raises:
            DatabaseError: it cannot be removed.
        """
        if self.directory is None or self.read_only:
            return
        try:
            self.path(model).unlink(missing_ok=True)
            if self.directory.exists():
                sync_directory(self.directory)
        except OSError as error:
            raise DatabaseError(f"removing {self.path(model)} of model {model!r}: {error}; a restart would use it") from error


def kept_files(chain: DatabaseChain, name: str) -> KeptFiles:
    """Return the files that are kept beside the persistent database of a chain, if it has one."""
    for database in chain.databases:
        if isinstance(database, PersistentDatabase):
            return KeptFiles(database.directory, name, read_only=database.read_only)
    return KeptFiles(None, name)
