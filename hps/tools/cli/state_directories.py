"""Directories for the row files of servers that are started with a repository in place of a configuration.

**Layout** below the base: `<hash of the repository>/repository.json` names the repository, `<hash>/<number>` is the database of
one server, `<hash>/<number>.lock` is locked while a server uses it. A server takes the lowest number that is free: one that is
started again finds its files, and a second one at the same time has files of its own.
"""

import errno
import fcntl
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

from hps.configuration.load import repository_of, state_home
from hps.errors import InvalidInputError

_MOUNTS: Final = Path("/proc/self/mountinfo")
_RECORD: Final = "repository.json"
_MOST_SERVERS: Final = 64  # of one repository and user at the same time
_NETWORKS: Final = ("nfs", "cifs", "smb", "9p", "ceph", "lustre", "gluster", "afs", "beegfs", "gpfs", "fuse.")
"""What the types of file systems begin with that lose mapped files, or locks, with their network."""


class _Forgotten(NamedTuple):
    """The directory of a local repository that is gone."""

    directory: Path
    repository: str


ServedSource: TypeAlias = Path | dict[str, Any]
"""A file, or what a repository is completed to."""


def completed(config: Path) -> ServedSource:
    """Return what `hps serve` of the same argument serves when no other server of it runs. Nothing is made."""
    if not (repository := repository_of(os.fspath(config))):
        return config
    home, _ = _home()
    return _configuration(repository, home and _directory(home, repository) / "0")


@contextmanager
def state_directory(
    config: Path,
    base: Path | None,  # None: `hps` in the user's state directory
) -> Iterator[tuple[ServedSource, list[str]]]:
    """Take a directory for the row files of a server, if a repository is served, until this process and its children end.

    Yields:
        What to serve, and what to log.

    Raises:
        InvalidInputError: the given base cannot be used.
    """
    if not (repository := repository_of(os.fspath(config))):
        if base is not None:
            raise InvalidInputError(f"--state {base}: {config} names its databases itself; set persistent_db.path there")
        yield config, []
        return
    (home, reason), lock, path = (base.absolute(), "") if base else _home(), -1, None
    try:
        if home is not None:
            path, lock = _taken(home, repository)
    except OSError as error:
        if base is not None:
            raise InvalidInputError(f"keeping row files of {repository} below --state {base}: {error}; name another") from error
        reason = str(error)
    if home is None or path is None:
        note = f"rows are held in memory alone, not in files: {reason}; --state DIR names a place"
        yield _configuration(repository, None), [note]
        return
    try:
        notes = [f"row files of {repository} are in {path}; --state DIR names another place"]
        notes += [f"{gone.directory} has row files of {gone.repository}, which is gone; remove it" for gone in _forgotten(home)]
        yield _configuration(repository, path), notes
    finally:
        os.close(lock)


def _home() -> tuple[Path | None, str]:
    """Return the directory for all repositories of this user, or None and the reason."""
    if (home := state_home()) is None:
        return None, "this user has no home directory"
    if kind := _network_of(home):
        return None, f"{home} is on a network file system ({kind})"
    return home / "hps", ""


def _configuration(repository: str, path: Path | None) -> dict[str, Any]:
    on_disk = {} if path is None else {"persistent_db": {"type": "row_files", "path": str(path)}}
    return {"model_repository": repository, **on_disk}


def _directory(home: Path, repository: str) -> Path:
    return home / blake2b(os.fsencode(_name(repository)), digest_size=8).hexdigest()


def _name(repository: str) -> str:
    return repository if "://" in repository else os.path.abspath(repository)


def _taken(home: Path, repository: str) -> tuple[Path, int]:
    """Return the path of a server's database, and a descriptor that locks it."""
    directory = _directory(home, repository)
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    fresh = directory / f"{_RECORD}.{os.getpid()}"
    try:
        fresh.write_text(json.dumps({"repository": _name(repository)}))
        fresh.replace(directory / _RECORD)
    finally:
        fresh.unlink(missing_ok=True)
    for number in range(_MOST_SERVERS):
        lock = os.open(directory / f"{number}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
        except OSError:
            os.close(lock)
            raise
        else:
            return directory / str(number), lock
    raise OSError(errno.EBUSY, f"{_MOST_SERVERS} servers of this repository are running", str(directory))


def _forgotten(home: Path) -> Iterator[_Forgotten]:
    for record in home.glob(f"*/{_RECORD}"):
        with suppress(OSError, ValueError, KeyError, TypeError):
            repository = json.loads(record.read_text())["repository"]
            gone = "://" not in repository and not os.path.exists(repository)
            if gone and not any(map(_is_locked, record.parent.glob("*.lock"))):
                yield _Forgotten(record.parent, repository)


def _is_locked(path: Path) -> bool:
    with path.open() as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _network_of(path: Path) -> str:
    """Return the type of the file system of a path, if it is one of a network; else an empty text (proc(5), mountinfo)."""
    place = os.path.realpath(path)
    longest, found = -1, ""
    with suppress(OSError):
        for line in _MOUNTS.read_text(errors="surrogateescape").splitlines():
            words, _, kind = line.partition(" - ")
            mounted = re.sub(r"\\([0-7]{3})", lambda escaped: chr(int(escaped[1], 8)), words.split(" ")[4])
            if len(mounted) >= longest and os.path.commonpath((mounted, place)) == mounted:
                longest, found = len(mounted), kind.split(" ")[0]
    return found if found.startswith(_NETWORKS) else ""
