"""Writes sparse model files: locally whole or not at all, elsewhere so that no half passes for a whole."""

import ctypes
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from contextlib import ExitStack

import numpy as np

from hps.errors import InvalidDtypeError, InvalidInputError, ModelFileError
from hps.filesystems.base import FileSystem
from hps.filesystems.local import local_path
from hps.models.sources import ModelSources
from hps.types import FloatArray, KeyArray

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # <fcntl.h>, <linux/fs.h>


def write_sparse_model(
    directory: str | os.PathLike[str],
    rows: tuple[KeyArray, FloatArray] | Iterable[tuple[KeyArray, FloatArray]],
    *,
    overwrite: bool = False,
    sources: ModelSources | None = None,
) -> int:
    """Write a sparse model, by its path or URI.

    Locally the files are written to a temporary directory beside the target, synced to disk and renamed: whenever this process
    is stopped, a reader finds the old model, the new one or none. A killed process leaves `.<name>.<random>.tmp` behind.
    Elsewhere each file appears whole, `key` last, and an old `key` is removed first: a reader finds a whole model, or one
    without `key`, which it refuses.

    Args:
        directory: where the files go, a path or a URI; parents are made.
        rows: (keys, vectors), or an iterable of such chunks: keys (n,) int64, vectors (n, dim) float32, in host memory. A
            chunk may be changed once the next one is asked for.
        overwrite: replace a sparse model that is there. A directory that holds anything else is never replaced.
        sources: the file systems to use; by default new ones with default settings.

    Returns:
        How many rows were written.

    Raises:
        ModelFileError: something is in the way, the files cannot be written, or there is no row.
        InvalidInputError: a chunk has the wrong shape; `InvalidDtypeError`: or dtype.
    """
    chunks = [rows] if isinstance(rows, tuple) else rows
    filesystem, place = (sources or ModelSources()).locate(os.fspath(directory))
    if filesystem.is_local:
        return _write_local(filesystem, os.path.realpath(local_path(place)), chunks, overwrite)
    names = filesystem.list(place) if filesystem.exists(place) else []
    _check_names(place, names, overwrite)
    return _write_files(filesystem, place, chunks, [name for name in ("key", "meta") if name in names])


def _write_files(
    filesystem: FileSystem, place: str, chunks: Iterable[tuple[KeyArray, FloatArray]], outdated: Iterable[str] = ()
) -> int:
    """Write both files, `key` last, once the outdated ones are removed. Return how many rows they have."""
    with ExitStack() as undo:
        writers = []
        for name in ("key", "emb_vector"):
            writers.append(filesystem.create(f"{place}/{name}"))
            undo.callback(writers[-1].abort)
        count = 0
        for keys, vectors in _checked(chunks):
            for writer, array in zip(writers, (keys, vectors), strict=True):
                writer.write(np.ascontiguousarray(array).data.cast("B"))
            count += keys.size
        for name in outdated:
            filesystem.delete(f"{place}/{name}")
        for writer in reversed(writers):
            writer.commit()
    return count


def _write_local(filesystem: FileSystem, target: str, chunks: Iterable[tuple[KeyArray, FloatArray]], overwrite: bool) -> int:
    parent, name = os.path.split(target)
    temporary = os.path.join(parent, f".{name[:100]}.{secrets.token_hex(6)}.tmp")
    try:
        _check_target(target, overwrite)
        os.makedirs(parent, exist_ok=True)
        try:
            os.mkdir(temporary)  # within the try: an interrupt may come before the next statement
            count = _write_files(filesystem, temporary, chunks)
            _sync(temporary)
            _check_target(target, overwrite)
            _put_in_place(temporary, target)
            _sync(parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)  # after an exchange this is the old model
    except ModelFileError:  # some are OSErrors, too
        raise
    except OSError as error:
        raise ModelFileError(f"writing sparse model {target}: {error.strerror or error}; nothing was changed") from error
    return count


def _check_target(target: str, overwrite: bool) -> None:
    try:
        names = os.listdir(target)
    except FileNotFoundError:
        return
    except NotADirectoryError as error:
        raise ModelFileError(f"writing sparse model {target}: a file is in the way, expected a directory or nothing") from error
    _check_names(target, names, overwrite)


def _check_names(target: str, names: list[str], overwrite: bool) -> None:
    if names and not overwrite:
        raise ModelFileError(f"writing sparse model {target}: it exists; choose another directory or ask to overwrite it")
    foreign = sorted(set(names) - {"key", "emb_vector", "meta"})
    if foreign:
        raise ModelFileError(
            f"writing sparse model {target}: it holds {', '.join(foreign[:8])}, which is not part of a sparse model; "
            "choose another directory"
        )


def _checked(chunks: Iterable[tuple[KeyArray, FloatArray]]) -> Iterator[tuple[KeyArray, FloatArray]]:
    """Pass chunks on that have rows. Refuse chunks of other types or of two widths, and to write no row at all."""
    dim = rows = 0
    for keys, vectors in chunks:
        if keys.dtype != np.int64 or vectors.dtype != np.float32:
            raise InvalidDtypeError(
                f"writing sparse model: got keys {keys.dtype} and vectors {vectors.dtype}, expected int64 and float32"
            )
        if dim == 0 and vectors.ndim == 2:
            dim = vectors.shape[1]
        if keys.ndim != 1 or dim < 1 or vectors.shape != (keys.size, dim):
            raise InvalidInputError(
                f"writing sparse model: got keys of shape {keys.shape} and vectors of shape {vectors.shape}, "
                f"expected (n,) and (n, {max(dim, 1)})"
            )
        rows += keys.size
        if keys.size:
            yield keys, vectors
    if rows == 0:
        raise ModelFileError("writing sparse model: got no rows, expected at least 1")


def _put_in_place(temporary: str, target: str) -> None:
    """Give the new directory the target's name; a directory that had it gets the temporary name."""
    if not os.path.lexists(target):
        os.rename(temporary, target)
        return
    exchange = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)  # Linux, glibc 2.28 or musl 1.2
    if exchange and exchange(_AT_FDCWD, os.fsencode(temporary), _AT_FDCWD, os.fsencode(target), _RENAME_EXCHANGE) == 0:
        return
    # The file system cannot exchange (NFS, for one): between these two renames there is no model.
    aside = f"{temporary}.old"
    os.rename(target, aside)
    os.rename(temporary, target)
    shutil.rmtree(aside, ignore_errors=True)


def _sync(directory: str) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
