"""The archives that PyTorch writes, checked before PyTorch opens them.

`torch.export.load` and `torch.jit.load` have a ZIP reader of their own, which may find other members than Python's. So members
are read and checked here, and PyTorch gets a new archive of them.
"""

import io
import re
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final, NoReturn

from hps.errors import ModelFileError

_MOST_UNPACKED: Final = 64 << 20  # beyond the size of the archive: PyTorch compresses code alone
_PIECE_BYTES: Final = 1 << 20

_PLAIN: Final = re.compile(r"[^\x00-\x1f\\\"']{1,1000}")


def member_names(name: str, content: bytes) -> list[str]:
    """List an archive of PyTorch.

    Raises:
        ModelFileError: it is no archive.
    """
    with _opened(name, content) as archive:
        return archive.namelist()


def members(name: str, content: bytes) -> dict[str, bytes]:
    """Read an archive of PyTorch: its members by name, without the directory that they share.

    Raises:
        ModelFileError: it is no archive, or none that PyTorch writes: with repeated or strange names, or members that expand
            to far more than the archive has.
    """
    with _opened(name, content) as archive:
        listed = [member for member in archive.infolist() if not member.is_dir()]
        if sum(member.file_size for member in listed) > len(content) + _MOST_UNPACKED:
            raise ModelFileError(f"opening the network {name}: got members of far more bytes than the file has")
        found = {member.filename: _read(archive, member) for member in listed}
    root = next(iter(found), "").partition("/")[0] + "/"
    if all(member.startswith(root) for member in found):
        found = {member.removeprefix(root): data for member, data in found.items()}
    if len({member.lower() for member in found}) < len(listed):  # PyTorch's reader ignores case
        raise ModelFileError(f"opening the network {name}: got a name twice in its archive, expected each once")
    for member in found:
        if not _PLAIN.fullmatch(member) or {"", ".", ".."} & {*member.split("/")}:
            refuse_member(name, member)
    return found


@contextmanager
def _opened(name: str, content: bytes) -> Iterator[zipfile.ZipFile]:
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            yield archive
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, EOFError, ValueError) as error:
        raise ModelFileError(
            f"opening the network {name}: got a file that is no archive of PyTorch ({error}), expected what torch.export.save "
            "or torch.jit.save writes"
        ) from error


def _read(archive: zipfile.ZipFile, listed: zipfile.ZipInfo) -> bytes:
    """Read a member in pieces: `ZipFile.read` expands all packed data, beyond the declared size of the member."""
    if listed.compress_type == zipfile.ZIP_STORED:
        return archive.read(listed)
    if listed.compress_type != zipfile.ZIP_DEFLATED:  # others expand a piece without a bound
        raise ValueError(f"{listed.filename!r} is compressed by method {listed.compress_type}")
    with archive.open(listed) as file:
        return b"".join(iter(partial(file.read, _PIECE_BYTES), b""))


def archive_of(found: dict[str, bytes], root: str = "archive/") -> io.BytesIO:
    """Move members into an archive that PyTorch reads. Weights are large, so each is freed once it is written."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name in list(found):
            archive.writestr(zipfile.ZipInfo(root + name), found.pop(name))
    file.seek(0)
    return file


def refuse_member(name: str, member: str, detail: str = "") -> NoReturn:
    raise ModelFileError(
        f"opening the network {name}: got {member!r} in its archive{detail}, expected tensors and JSON alone: anything else "
        "may run code when it is read"
    )
