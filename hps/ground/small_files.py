"""Reads small files whole, with a bound on their size so that a device without an end takes no memory; and notices changes."""

import errno
import os


def read_small(path: str | os.PathLike[str], most_bytes: int = 64 << 20) -> bytes:
    """Return the content of a file, or of a pipe.

    Raises:
        OSError: it cannot be read, or has more bytes.
        ValueError: the path has a NUL character or is no Unicode.
    """
    with open(path, "rb") as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"it has more than {most_bytes:,} bytes")
    return content


class FileMarks:
    """Notices that files have changed: were written, replaced, or lie behind a symbolic link that was. *One thread.*

    Args:
        paths: of the files; empty ones are ignored.
    """

    def __init__(self, *paths: str) -> None:
        self._paths = [path for path in paths if path]
        self._read = self._seen = self._marks()

    def changed(self) -> bool:
        """Return whether files have changed since the last time it said so, but not since the last call.

        So a writer has the time between two calls to finish a file, or the second of two files that belong together.
        """
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
