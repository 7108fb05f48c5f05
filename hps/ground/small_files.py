"""Reads small files with a bound on their size, since a device may be endless; and detects changes."""

import errno
import os


def read_small(path: str | os.PathLike[str], most_bytes: int = 64 << 20) -> bytes:
    """Return the content of a file or pipe; raise OSError if it is too large, and ValueError for a path that is no Unicode."""
    with open(path, "rb") as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"it has more than {most_bytes:,} bytes")
    return content


class FileMarks:
    """Detects changed files: written, replaced, or behind a symbolic link that was. Empty paths are ignored. *One thread.*"""

    def __init__(self, *paths: str) -> None:
        self._paths = [path for path in paths if path]
        self._read = self._seen = self._marks()

    def changed(self) -> bool:
        """Return True if files have changed since it last returned True, but not since the last call."""
        # A writer has the time between two calls to finish a file, or the second of two files that belong together.
        before, self._seen = self._seen, self._marks()
        if self._seen == self._read or self._seen != before:
            return False
        self._read = self._seen
        return True

    def _marks(self) -> tuple[tuple[int, int, int, int] | None, ...]:
        return tuple(map(_mark, self._paths))


def _mark(path: str) -> tuple[int, int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_ctime_ns, found.st_size
