"""Writes sparse model files: atomically on a local disk, elsewhere so that an incomplete model is never loaded."""

import ctypes
import os
import secrets
import shutil
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import pydantic

from hps.configuration.load import DenseConfig, load_dense
from hps.errors import InvalidDtypeError, InvalidInputError, ModelFileError
from hps.filesystems.base import FileSystem, FileWriter
from hps.filesystems.local import local_path, sync_directory
from hps.models.manifest import MANIFEST, VERSION, FileCheck, VersionManifest, write_file
from hps.models.sources import ModelSources
from hps.types import FloatArray, KeyArray

_FILES = ("key", "emb_vector", "deleted")
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # <fcntl.h>, <linux/fs.h>


def write_sparse_model(
    directory: str | os.PathLike[str],
    rows: tuple[KeyArray, FloatArray] | Iterable[tuple[KeyArray, FloatArray]],
    *,
    overwrite: bool = False,
    sources: ModelSources | None = None,
) -> int:
    """Write a sparse model, by its path or URI.

    Whenever the process stops, a reader finds the old model, the new one, or none. A killed process leaves
    `.<name>.<random>.tmp` on a local disk.

    Args:
        directory: path or URI of the target; parents are created.
        rows: (keys, vectors), or an iterable of such chunks: keys (n,) int64, vectors (n, dim) float32, in host memory. A
            chunk may change once the next one is requested.
        overwrite: replace an existing sparse model. A directory with anything else is never replaced.
        sources: file systems to use; by default new ones with default settings.

    Returns:
        Number of written rows.

    Raises:
        ModelFileError: the target exists, the files cannot be written, or there are no rows.
        InvalidInputError: a chunk has the wrong shape; `InvalidDtypeError`: or dtype.
    """
    chunks = [rows] if isinstance(rows, tuple) else rows
    filesystem, place = (sources or ModelSources()).locate(os.fspath(directory))
    if filesystem.is_local:
        return _write_local(filesystem, os.path.realpath(local_path(place)), chunks, overwrite)
    names = filesystem.list(place) if filesystem.exists(place) else []
    _check_names(place, names, overwrite)
    # Without a rename, an old `key` is removed first and the new one appears last: a reader that comes meanwhile finds no
    # `key`, and refuses the directory.
    written = _write_files(filesystem, place, chunks, outdated=[name for name in ("key", "meta", "rows") if name in names])
    return written["key"].size_bytes // 8


def write_version(
    directory: str | os.PathLike[str],
    tables: Mapping[str, tuple[KeyArray, FloatArray] | Iterable[tuple[KeyArray, FloatArray]]],
    *,
    delta_of: str = "",
    deleted: Mapping[str, KeyArray] | None = None,
    note: str = "",
    step: int | None = None,
    updates: Mapping[str, Mapping[str, str]] | None = None,
    network: tuple[Mapping[str, Any] | DenseConfig, bytes | Mapping[str, bytes]] | None = None,
    sources: ModelSources | None = None,
) -> None:
    """Write a version of a model, with its `version.json`. Readers find all of it, none, or a part that they refuse.

    On file systems that rename directories (local, HDFS) it is written as `.<version>.<random>.tmp`, which a killed process
    leaves behind, and renamed. Elsewhere `version.json` is written last.

    Args:
        directory: path or URI of `<model>/<version>`, which must not exist; parents are created.
        tables: rows of each table, as for `write_sparse_model`, by its directory relative to the version's (its entry in
            `sparse_files`).
        delta_of: the version that this one changes; `tables` then has the changed rows of every table, perhaps none.
        deleted: deleted keys of a delta, (n,) int64, by the same names.
        note: any text.
        step: training step of the rows, if known.
        updates: position in the log of online updates of the last message that the rows contain, as text, by the same names
            and by partition (its number, or `<topic>/<number>`). Servers that start from these files read the log from there.
            Kafka's position of a message is its offset, one less than the offset that a consumer commits after it.
        network: what the version's `dense` says, and the content of its file, which is written as `dense["file"]`; or of all
            its files, by their names there, if it has `keys`.
        sources: file systems to use; by default new ones with default settings.

    Raises:
        ModelFileError: the target exists, the files cannot be written, or there are no rows and no `delta_of`.
        InvalidInputError: a chunk has the wrong shape (`InvalidDtypeError`: or dtype), or `updates` has another form.
        ConfigError: `dense` is wrong.
    """
    filesystem, place = (sources or ModelSources()).locate(os.fspath(directory))
    parent, _, version = place.rstrip("/").rpartition("/")
    deleted = deleted or {}
    if not VERSION.fullmatch(version) or (delta_of and not VERSION.fullmatch(delta_of)):
        raise InvalidInputError(f"writing version {place}: got version {version!r}, delta_of {delta_of!r}, expected numbers")
    if not set(deleted) <= set(tables if delta_of else ()):
        raise InvalidInputError(f"writing version {place}: got deleted keys of {sorted(deleted)}, expected those of a delta")
    if not set(updates or ()) <= set(tables):
        raise InvalidInputError(
            f"writing version {place}: got updates of {sorted(updates or ())}, expected of {sorted(tables)}"
        )
    dense = None if network is None else load_dense(network[0])
    contents = {} if network is None or dense is None else _contents(place, dense, network[1])
    try:
        blank = VersionManifest(
            delta_of=delta_of,
            note=note,
            step=step,
            written_at_us=time.time_ns() // 1000,
            updates=updates or {},
            dense=dense,
        )
    except pydantic.ValidationError as error:
        raise InvalidInputError(f"writing version {place}: got updates {updates}, expected positions by partition") from error
    if filesystem.exists(place):
        raise ModelFileError(f"writing version {place}: it exists; write another version")
    target = f"{parent}/.{version}.{secrets.token_hex(6)}.tmp" if filesystem.renames_directories else place
    files: dict[str, FileCheck] = {}
    with ExitStack() as undo:
        if filesystem.is_local:
            undo.callback(shutil.rmtree, local_path(target), ignore_errors=True)
        else:
            undo.callback(_delete, filesystem, [f"{target}/{name}/{file}" for name in tables for file in _FILES])
        for name, rows in tables.items():
            deleted_keys = deleted.get(name, np.empty(0, np.int64)) if delta_of else None
            written = _write_files(
                filesystem, f"{target}/{name}", [rows] if isinstance(rows, tuple) else rows, deleted=deleted_keys
            )
            files |= {f"{name}/{file}": check for file, check in written.items()}
        for name, content in contents.items():
            write_file(filesystem, f"{target}/{name}", content)
            files[name] = FileCheck(size_bytes=len(content), crc32=f"{zlib.crc32(content):08x}")
            if not filesystem.is_local:
                undo.callback(_delete, filesystem, [f"{target}/{name}"])
        manifest = blank.model_copy(update={"files": files})
        write_file(filesystem, f"{target}/{MANIFEST}", manifest.encoded())
        if filesystem.is_local:
            for directory in {str(parent) for name in files for parent in PurePosixPath(name).parents}:
                sync_directory(local_path(f"{target}/{directory}"))
        if filesystem.renames_directories:
            filesystem.rename(target, place)
        undo.pop_all()


def _contents(place: str, dense: DenseConfig, given: bytes | Mapping[str, bytes]) -> Mapping[str, bytes]:
    """Return the content of each file of a network, by name."""
    contents = given if isinstance(given, Mapping) else {dense.file: given}
    if set(contents) != set(dense.files):
        raise InvalidInputError(
            f"writing version {place}: got the network's files {', '.join(sorted(contents)) or 'none'}, expected "
            f"{', '.join(dense.files)}, as dense says"
        )
    return contents


def _write_files(
    filesystem: FileSystem,
    place: str,
    chunks: Iterable[tuple[KeyArray, FloatArray]],
    *,
    outdated: Iterable[str] = (),
    deleted: KeyArray | None = None,
) -> dict[str, FileCheck]:
    """Remove the outdated files of a table, then write its files, `key` last; those of a delta if there are deleted keys."""
    # `deleted` is written first, even if empty: without it, a delta without its `version.json` yet would be read as a table.
    with ExitStack() as undo:
        writers = []
        for name in _FILES[: 2 if deleted is None else 3]:
            writers.append(_ChecksumWriter(filesystem.create(f"{place}/{name}"), name))
            undo.callback(writers[-1].writer.abort)
        for keys, vectors in _checked(chunks, empty=deleted is not None):
            writers[0].write(keys)
            writers[1].write(vectors)
        if deleted is not None:
            writers[2].write(np.asarray(deleted, np.int64))
        for name in outdated:
            filesystem.delete(f"{place}/{name}")
        for writer in reversed(writers):
            writer.writer.commit()
    return {writer.name: FileCheck(size_bytes=writer.size_bytes, crc32=f"{writer.crc32:08x}") for writer in writers}


def _delete(filesystem: FileSystem, paths: Iterable[str]) -> None:
    for path in paths:
        with suppress(ModelFileError):
            filesystem.delete(path)


@dataclass(slots=True)
class _ChecksumWriter:
    """An unfinished file, with its size and checksum so far. *One thread.*"""

    writer: FileWriter
    name: str
    size_bytes: int = 0
    crc32: int = 0

    def write(self, array: KeyArray | FloatArray) -> None:
        if array.size:  # a memoryview of nothing cannot be cast
            data = np.ascontiguousarray(array).data.cast("B")
            self.crc32 = zlib.crc32(data, self.crc32)
            self.size_bytes += len(data)
            self.writer.write(data)


def _write_local(filesystem: FileSystem, target: str, chunks: Iterable[tuple[KeyArray, FloatArray]], overwrite: bool) -> int:
    parent, name = os.path.split(target)
    temporary = os.path.join(parent, f".{name[:100]}.{secrets.token_hex(6)}.tmp")
    try:
        _check_target(target, overwrite)
        os.makedirs(parent, exist_ok=True)
        try:
            os.mkdir(temporary)  # within the try: an interrupt may come before the next statement
            count = _write_files(filesystem, temporary, chunks)["key"].size_bytes // 8
            sync_directory(temporary)
            _check_target(target, overwrite)
            _put_in_place(temporary, target)
            sync_directory(parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)  # after an exchange, this is the old model
    except ModelFileError:  # some are also OSErrors
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
    foreign = sorted(set(names) - {"key", "emb_vector", "meta", "rows"})
    if foreign:
        raise ModelFileError(
            f"writing sparse model {target}: it holds {', '.join(foreign[:8])}, which is not part of a sparse model; "
            "choose another directory"
        )


def _checked(chunks: Iterable[tuple[KeyArray, FloatArray]], *, empty: bool = False) -> Iterator[tuple[KeyArray, FloatArray]]:
    """Yield the chunks with rows. Refuse wrong types, different widths and, unless allowed, no rows at all."""
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
    if rows == 0 and not empty:
        raise ModelFileError("writing sparse model: got no rows, expected at least 1")


def _put_in_place(temporary: str, target: str) -> None:
    """Rename the new directory to the target; an existing target gets the temporary name."""
    if not os.path.lexists(target):
        os.rename(temporary, target)
        return
    exchange = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)  # Linux, glibc 2.28 or musl 1.2
    if exchange and exchange(_AT_FDCWD, os.fsencode(temporary), _AT_FDCWD, os.fsencode(target), _RENAME_EXCHANGE) == 0:
        return
    # The file system cannot exchange names (such as NFS): between these two renames there is no model.
    old = f"{temporary}.old"
    os.rename(target, old)
    os.rename(temporary, target)
    shutil.rmtree(old, ignore_errors=True)
