"""Whether the directory of a database could be opened and filled, seen from outside. Nothing there is changed."""

import fcntl
import os
import shutil
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import rocksdict

from hps.databases.rocks_db import directory
from hps.errors import DatabaseError
from hps.findings import Finding
from hps.progress import size_text
from hps.types import TableSpec

_WHERE: Final = "persistent_db.path"
_FLOCK: Final = "hhqqi"  # struct flock of Linux: type, whence, start, length, process


def probe(config: Any, tables: Mapping[TableSpec, int]) -> list[Finding]:
    """Look at the directory of a `PersistentDbConfig`; see `Database.probe`."""
    path = Path(config.path).absolute()
    place = next(one for one in (path, *path.parents) if one.exists())
    if not place.is_dir():
        return [Finding("wrong", _WHERE, f"{place} is no directory; give another path")]
    if not config.read_only and not os.access(place, os.W_OK | os.X_OK):
        return [Finding("wrong", _WHERE, f"{place}: this user may not write there; give it the right, or another path")]
    held: set[str] = set()
    try:
        if (path == place or config.read_only) and directory.check_directory(path, config.read_only):
            held = set(rocksdict.Rdict.list_cf(str(path)))
    except DatabaseError as error:
        return [Finding("wrong", _WHERE, str(error))]
    except Exception as error:  # noqa: BLE001 - the binding has one class for everything
        return [Finding("wrong", _WHERE, f"{path}: RocksDB cannot read what it holds ({error}); run hps check-database {path}")]
    there = sum(spec.tag in held for spec in tables)
    state = f"{path} holds {there} of {len(tables)} tables" if held else f"{path} would be made" if path != place else f"{path}"
    holder = 0 if config.read_only else _holder(path / "LOCK")
    if holder:
        what = f"{state}; process {holder} has it open, and only one may write to it: stop that process first"
        return [Finding("unreachable", _WHERE, what)]
    needed = sum(size for spec, size in tables.items() if spec.tag not in held) if config.initialize_after_startup else 0
    free = shutil.disk_usage(place).free
    room = f"{size_text(needed)} to load, {size_text(free)} free" if needed else f"{size_text(free)} free"
    if needed > free:
        return [Finding("wrong", _WHERE, f"{state}; {room}: free some, or give a path on a larger disk")]
    return [Finding("good", _WHERE, f"{state}; {room}")]


def _holder(lock: Path) -> int:
    """The process that has the database open; 0 if none has."""
    try:
        with open(lock, "rb") as file:
            asked = struct.pack(_FLOCK, fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0)
            kind, _, _, _, process = struct.unpack(_FLOCK, fcntl.fcntl(file, fcntl.F_GETLK, asked))
    except OSError:
        return 0
    return 0 if kind == fcntl.F_UNLCK else process or -1
