"""The versions that people chose by a roll-back, or by naming one: kept beside the persistent database."""

import json
import logging
import os
import time
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, TypeAlias, cast, get_args
from urllib.parse import quote

from hps.databases.base import PersistentDatabase
from hps.errors import DatabaseCorruptError, DatabaseError
from hps.filesystems.local import sync_directory
from hps.lookup.chain import DatabaseChain

_log = logging.getLogger(__name__)
_DIRECTORY = "hps-pins"
_MOST_BYTES = 4096

PinnedBy: TypeAlias = Literal["rollback", "deploy"]


@dataclass(frozen=True)
class Pin:
    """The version that somebody chose for a model in place of its `version_policy`. *Immutable.*

    Attributes:
        by: the change that chose it.
        since: time of that change, in seconds since the epoch.
        problem: why a restart would not know of the pin; empty if it would.
    """

    version: str
    by: PinnedBy
    since: float
    problem: str = ""

    def __str__(self) -> str:
        return f"pinned by {self.by}, {datetime.fromtimestamp(self.since, UTC):%Y-%m-%d}"


class Pins:
    """The pins of this process' models, one file each. *Thread-safe*; a model has one change at a time.

    Args:
        directory: directory of the persistent database; None if there is none, and pins end with the process.
        read_only: whether another process writes there, whose pins hold here too.
    """

    def __init__(self, directory: Path | None = None, *, read_only: bool = False) -> None:
        self._directory = None if directory is None else directory / _DIRECTORY
        self._read_only = read_only
        self._known: dict[str, Pin | None] = {}

    def of(self, model: str) -> Pin | None:
        """Return the pin of a model, if it has one.

        Raises:
            DatabaseError: its file cannot be read.
            DatabaseCorruptError: its file is damaged.
        """
        if model not in self._known:
            self._known[model] = None if self._directory is None else _read(_path(self._directory, model), model)
        return self._known[model]

    def shown(self, model: str) -> Pin | None:
        """Return the pin of a model for display. One that cannot be read is shown as none: no version of it is deployed."""
        try:
            return self.of(model)
        except DatabaseError:
            return None

    def pin(self, model: str, version: str, by: PinnedBy) -> Pin:
        """Pin a model to the version that has just been put into service. Holds until a restart if it cannot be written."""
        pin = Pin(version, by, time.time())
        if self._directory is None:
            pin = replace(pin, problem="a restart ends it: no persistent_db keeps it")
        elif self._read_only:
            pin = replace(pin, problem="a restart ends it: persistent_db is read-only")
        else:
            try:
                _write(_path(self._directory, model), model, pin)
            except OSError as error:
                pin = replace(pin, problem=f"a restart ends it: writing it to {self._directory} failed: {error}")
                _log.error("model %r: version %s is %s, but %s", model, version, pin, pin.problem)
        self._known[model] = pin
        return pin

    def end(self, model: str) -> None:
        """Remove the pin of a model, if it has one.

        Raises:
            DatabaseError: its file cannot be removed.
        """
        self._known[model] = None
        if self._directory is None or self._read_only:
            return
        path = _path(self._directory, model)
        try:
            path.unlink(missing_ok=True)
            if path.parent.exists():
                sync_directory(path.parent)
        except OSError as error:
            raise DatabaseError(
                f"ending the pin of model {model!r}: {error}; a restart would serve the pinned version"
            ) from error


def pinned_text(pin: Pin | None, serving: str) -> str:
    """Describe the pin of a model in service, for people; empty if there is none."""
    if pin is None:
        return ""
    which = "" if pin.version == serving else f"version {pin.version}, whose files are gone, is "
    return f"{which}{pin}" + (f"; {pin.problem}" if pin.problem else "")


def pins_of(chain: DatabaseChain) -> Pins:
    """Return the pins that are kept beside the persistent database of a chain."""
    for database in chain.databases:
        if isinstance(database, PersistentDatabase):
            return Pins(database.directory, read_only=database.read_only)
    return Pins()


def _path(directory: Path, model: str) -> Path:
    return directory / f"{quote(model, safe='')}.json"


def _read(path: Path, model: str) -> Pin | None:
    doing = f"reading the pin of model {model!r} in {path}"
    try:
        with open(path, "rb") as file:
            text = file.read(_MOST_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise DatabaseError(f"{doing}: {error}") from error
    try:
        match json.loads(text):
            case {"model": str(name), "version": str(version), "by": str(by), "since": int() | float() as since}:
                if name == model and version.isascii() and version.isdecimal() and by in get_args(PinnedBy):
                    datetime.fromtimestamp(since, UTC)
                    return Pin(version, cast("PinnedBy", by), float(since))
    except (ValueError, OverflowError, OSError, RecursionError):
        pass
    raise DatabaseCorruptError(
        f"{doing}: it is damaged, so the version to serve is unknown; roll back or deploy again, or `hps unpin` the model to "
        "serve what its version_policy chooses"
    )


def _write(path: Path, model: str, pin: Pin) -> None:
    path.parent.mkdir(exist_ok=True)
    fresh = path.with_suffix(".tmp")
    with open(fresh, "w") as file:
        json.dump({"model": model, "version": pin.version, "by": pin.by, "since": pin.since}, file)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
    sync_directory(path.parent)
