"""Takes row files of model versions as they are: by a hard link if nobody else may write to them, else by a copy."""

import os
import stat
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from hps.errors import DatabaseCorruptError, DatabaseError, ModelFileError
from hps.ground.shares import TableShare
from hps.stores.base import RowFileSource
from hps.stores.row_files.layout import PAGE_BYTES, FileHead
from hps.stores.row_files.ranges import compared, find_range, hash_bounds
from hps.stores.row_files.row_file import RowFile
from hps.stores.row_files.writer import sync_directory
from hps.types import row_dtype_of

_COPY_BYTES: Final = 64 << 20
_OTHERS_MAY_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH


def checked_head(file: RowFileSource, tag: str, width: int) -> FileHead:
    """Read the head of a file, and check that a table can have its rows.

    Raises:
        ModelFileError: it cannot.
    """
    content = bytearray(min(PAGE_BYTES, file.size_bytes))
    if content:
        file.read(0, memoryview(content))
    doing = f"adopting {file.place} as table {tag}"
    try:
        head = FileHead.unpacked(bytes(content))
    except (ValueError, TypeError) as error:
        raise ModelFileError(f"{doing}: {error}; write it again with `hps seal`") from error
    if head.share:
        raise ModelFileError(f"{doing}: it has the pages of share {head.share} alone, expected all; copy it from its version")
    if head.size_bytes != file.size_bytes:
        raise ModelFileError(f"{doing}: it has {file.size_bytes:,} bytes, expected {head.size_bytes:,}; copy it again")
    if (head.tag or tag, head.width, head.row_dtype) != (tag, width, row_dtype_of(tag)):
        raise ModelFileError(
            f"{doing}: it has rows of {head.width} words ({head.row_dtype}) of table {head.tag or tag}, expected {width} "
            f"({row_dtype_of(tag)}) of {tag}"
        )
    return head


def may_link(file: RowFileSource, directory: Path) -> bool:
    """Return whether a file can become one of a directory without a copy, safe from changes by others."""
    if file.path is None:
        return False
    try:
        there = os.stat(file.path)
        same = there.st_dev == os.stat(directory).st_dev
    except OSError:
        return False
    mine = there.st_uid in (0, os.geteuid()) and not there.st_mode & _OTHERS_MAY_WRITE
    return same and mine and stat.S_ISREG(there.st_mode)


def link(file: RowFileSource, target: Path) -> bool:
    """Link a local file, durably on return; return False if the file system or its owner does not allow it.

    Raises:
        ModelFileError: it is another file by now.
    """
    if file.path is None or not may_link(file, target.parent):
        return False
    try:
        descriptor = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
        directory = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        # The opened file, whatever its name leads to by now; and through symbolic links. (`os.link` follows them only with a
        # directory.)
        os.link(f"/proc/self/fd/{descriptor}", target.name, src_dir_fd=directory, dst_dir_fd=directory, follow_symlinks=True)
        os.fsync(descriptor)
        sync_directory(target.parent)
    except OSError:
        with suppress(OSError):
            target.unlink()
        return False
    finally:
        os.close(descriptor)
        os.close(directory)
    return True


def copy(
    file: RowFileSource, path: Path, target: Path, progress: Callable[[int], None], *, share: TableShare | None = None
) -> None:
    """Copy a local file, and compare each page with its checksum. It is complete and durable on return, or not there.

    Args:
        path: of the file.
        share: of the table, whose pages alone are copied; the others are holes then.
        progress: called with the number of further bytes.

    Raises:
        ModelFileError: the file is damaged, or changed meanwhile.
        DatabaseError: the copy cannot be written.
    """
    doing = f"copying {file.place} to {target}"
    try:
        source = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise ModelFileError(f"{doing}: {error}") from error
    try:
        copied = os.open(target, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o444)
        try:
            if share is None:
                _copy(source, copied, 0, file.size_bytes, progress)
            else:
                _copy_share(file, source, copied, share, progress)
            os.fsync(copied)
        finally:
            os.close(copied)
        file.read(0, memoryview(bytearray(PAGE_BYTES)))  # raises if it has another version by now
        RowFile(target, share=share).verify()
        sync_directory(target.parent)
    except DatabaseCorruptError as error:
        target.unlink(missing_ok=True)
        raise ModelFileError(f"{doing}: it is damaged ({error}); copy it again, or write it again with `hps seal`") from error
    except BaseException as error:
        target.unlink(missing_ok=True)
        if isinstance(error, OSError) and not isinstance(error, ModelFileError):
            raise DatabaseError(f"{doing}: {error.strerror or error}; make room, or use another volume") from error
        raise
    finally:
        os.close(source)


def _copy_share(file: RowFileSource, source: int, target: int, share: TableShare, progress: Callable[[int], None]) -> None:
    head_bytes = bytearray(PAGE_BYTES)
    file.read(0, memoryview(head_bytes))
    head = FileHead.unpacked(bytes(head_bytes))
    try:
        runs = find_range(head, hash_bounds(share), compared(head, file.read)).runs(head)
    except ValueError as error:
        raise DatabaseCorruptError(str(error)) from error
    os.ftruncate(target, head.size_bytes)
    os.pwrite(target, replace(head, share=str(share)).packed(), 0)
    for start, stop in (*runs, (head.sums_at, head.size_bytes)):
        _copy(source, target, start, stop, progress)


def _copy(source: int, target: int, start: int, stop: int, progress: Callable[[int], None]) -> None:
    done, by_kernel = start, True
    while done < stop:
        count = min(_COPY_BYTES, stop - done)
        if by_kernel:
            try:
                written = os.copy_file_range(source, target, count, done, done)
            except OSError:  # not between these file systems; without room, the next write fails, too
                by_kernel = False
                continue
        else:
            written = os.pwrite(target, os.pread(source, count, done), done)
        if not written:
            return  # it was cut short, which the check of its size finds
        done += written
        progress(written)
