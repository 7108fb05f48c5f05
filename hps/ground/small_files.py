"""Reads small files whole, with a bound on their size, so that a device without an end takes no memory."""

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
