"""Sparse model files: a directory with `key` (int64) and `emb_vector` (float32), checked, streamed, written atomically.

HugeCTR's format: `key` holds 8 bytes a row, `emb_vector` 4 x dim bytes a row, both little-endian, without a header, row i of
one belonging to row i of the other. The dimension is in neither; it comes from the configuration. A key should stand once;
where it stands twice, the databases keep the later row. A file `meta` (8 bytes a row) may lie beside them; only its size is
checked. The directory is a local path or a URI whose scheme selects a file system.
"""

import ctypes
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from hps.errors import ConfigError, InvalidDtypeError, InvalidInputError, ModelFileError, ModelFileNotFoundError
from hps.filesystems.base import FileSystem
from hps.registry import IMPLEMENTATIONS, implementation
from hps.types import FloatArray, KeyArray

CHUNK_BYTES = 16 << 20
"""Keys and vectors of a chunk, unless a caller asks otherwise. Larger chunks load no faster and only take memory."""

_KEY_BYTES = 8
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):")  # two letters at least: C:\models is a path
_UINT32_KEYS = 1 << 32
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # <fcntl.h>, <linux/fs.h>


@dataclass(frozen=True, slots=True)
class SparseModel:
    """One table's files, found to fit each other and the dimension. *Immutable, thread-safe.* Made by `open_sparse_model`.

    Attributes:
        place: the directory, absolute where it is local, or its URI.
        rows: vectors in the files.
        dim: float32 elements of a vector.
        fingerprint: identifies the content: a hash of the place, the sizes and versions of both files, and the dimension.
        int32_keys: whether keys outside [0, 2^32) are refused.
    """

    place: str
    rows: int
    dim: int
    fingerprint: str
    int32_keys: bool
    _filesystem: FileSystem = field(repr=False)
    _versions: tuple[tuple[str, str], ...] = field(repr=False)  # (path, version) of key, then of emb_vector

    @property
    def row_bytes(self) -> int:
        return _KEY_BYTES + 4 * self.dim

    @property
    def size_bytes(self) -> int:
        return self.rows * self.row_bytes

    @property
    def chunk_rows(self) -> int:
        """How many rows a chunk of `CHUNK_BYTES` holds, at least 1."""
        return max(1, CHUNK_BYTES // self.row_bytes)

    def chunks(self, chunk_rows: int | None = None, start_row: int = 0) -> Iterator[tuple[KeyArray, FloatArray]]:
        """Yield the rows from `start_row` on in file order, as (keys (n,), vectors (n, dim)) that the caller owns.

        Only the chunk being read is held here; by default a chunk takes at most 16 MB.

        Raises:
            ModelFileError: the files changed since they were opened, end early, cannot be read or hold a key that
                32-bit serving cannot have. Every row yielded before that was read from unchanged files.
        """
        step = self.chunk_rows if chunk_rows is None else chunk_rows
        if step < 1 or not 0 <= start_row <= self.rows:
            raise InvalidInputError(
                f"reading {self.place}: got chunk_rows {chunk_rows} and start_row {start_row}, "
                f"wanted at least 1 and 0 to {self.rows}"
            )
        self.verify()
        for start in range(start_row, self.rows, step):
            count = min(step, self.rows - start)
            keys, vectors = np.empty(count, np.int64), np.empty((count, self.dim), np.float32)
            self.read(start, keys, vectors)
            yield keys, vectors
            del keys, vectors  # before the next chunk is allocated

    def read(
        self,
        start_row: int,
        keys: KeyArray,  # (n,)
        vectors: FloatArray,  # (n, dim)
    ) -> None:
        """Fill `keys` and `vectors` with the n rows from `start_row` on. Several threads may read at once.

        Args:
            keys: (n,) int64, C-contiguous, in host memory; unspecified after an error.
            vectors: (n, dim) float32, C-contiguous, in host memory; unspecified after an error.

        Raises:
            ModelFileError: as in `chunks`; rows that were returned come from unchanged files.
        """
        if keys.size == 0:
            return
        (key_path, _), (vector_path, _) = self._versions
        self._filesystem.read_into(key_path, start_row * _KEY_BYTES, keys.data.cast("B"))
        self._filesystem.read_into(vector_path, start_row * 4 * self.dim, vectors.data.cast("B"))
        self._check_unchanged()

    def verify(self) -> None:
        """Check, before any row is used, that the files are still those that were opened, and with `int32_keys` every key.

        32-bit serving costs one pass over `key`, which is a small part of the model.
        """
        self._check_unchanged()
        if not self.int32_keys:
            return
        key_path = self._versions[0][0]
        buffer = np.empty(min(self.rows, CHUNK_BYTES // _KEY_BYTES), np.int64)
        for start in range(0, self.rows, buffer.size):
            keys = buffer[: min(buffer.size, self.rows - start)]
            self._filesystem.read_into(key_path, start * _KEY_BYTES, keys.data.cast("B"))
            if keys.min() < 0 or keys.max() >= _UINT32_KEYS:
                row = int(np.argmax((keys < 0) | (keys >= _UINT32_KEYS)))
                raise ModelFileError(
                    f"reading {key_path}: row {start + row} has key {keys[row]}, but supportlonglong=false serves keys "
                    "in [0, 2^32) only; set supportlonglong to true"
                )
        self._check_unchanged()

    def _check_unchanged(self) -> None:
        for path, opened in self._versions:
            now = self._filesystem.version(path)
            if now != opened:
                raise ModelFileError(
                    f"reading {path}: it changed while it was being read (version {opened}, now {now}); "
                    "load the model again when its writer is done, and write models to a new directory"
                )


def open_sparse_model(path_or_uri: str | os.PathLike[str], dim: int, *, int32_keys: bool = False) -> SparseModel:
    """Find the files of a table and check their sizes. No row is read.

    Args:
        path_or_uri: the directory; see `_locate` for what is a URI.
        dim: float32 elements of a vector, from the configuration.
        int32_keys: refuse keys outside [0, 2^32) when rows are read, as `supportlonglong: false` needs.

    Raises:
        ModelFileNotFoundError: the directory or one of the two files does not exist.
        ModelFileError: they cannot be the files of a table of this dimension; the message says why.
    """
    if dim < 1:
        raise InvalidInputError(f"opening sparse model {path_or_uri}: got dimension {dim}, wanted at least 1")
    filesystem, place = _locate(os.fspath(path_or_uri))
    key_path, vector_path, meta_path = (f"{place.rstrip('/')}/{name}" for name in ("key", "emb_vector", "meta"))
    try:
        # Versions before sizes: a file that is replaced in between then fails the check of its version.
        versions = tuple((path, filesystem.version(path)) for path in (key_path, vector_path))
        key_bytes, vector_bytes = filesystem.size(key_path), filesystem.size(vector_path)
    except ModelFileNotFoundError as error:
        raise _missing(filesystem, place, error) from error
    if key_bytes == 0 or key_bytes % _KEY_BYTES:
        raise ModelFileError(f"opening {key_path}: got {key_bytes} bytes, wanted {_KEY_BYTES} (an int64) for every row")
    rows = key_bytes // _KEY_BYTES
    if vector_bytes != rows * dim * 4:
        raise ModelFileError(
            f"opening {vector_path}: got {vector_bytes} bytes, wanted {rows * dim * 4}: the {rows} keys of {key_path} "
            f"({key_bytes} bytes) with {dim} float32 each; {_fitting(rows, vector_bytes)}"
        )
    if filesystem.exists(meta_path) and (meta_bytes := filesystem.size(meta_path)) != key_bytes:
        raise ModelFileError(
            f"opening {meta_path}: got {meta_bytes} bytes, wanted the {key_bytes} of {key_path}; remove it or write it whole"
        )
    content = json.dumps([place, rows, dim, versions])
    fingerprint = hashlib.blake2b(content.encode(errors="surrogatepass"), digest_size=16).hexdigest()
    return SparseModel(place, rows, dim, fingerprint, int32_keys, filesystem, versions)


def _locate(source: str) -> tuple[FileSystem, str]:
    """The file system of a path or URI, and the place as that file system takes it.

    What stands before the first colon is a scheme when it looks like one of two letters or more; a local path that exists
    may have colons all the same.
    """
    match = _SCHEME.match(source)
    scheme = match[1].lower() if match else ""
    known = IMPLEMENTATIONS["filesystem"]
    if scheme and not (scheme in known and source[len(scheme) :].startswith("://")) and _is_local(source):
        scheme = ""
    try:
        filesystem: FileSystem = implementation("filesystem", scheme)()
    except ConfigError as error:
        schemes = ", ".join(f"{name}://" for name in sorted(known) if name)
        raise ModelFileError(
            f"opening sparse model {source}: got scheme {scheme!r}, wanted a local path or one of: {schemes}"
        ) from error
    return filesystem, source if scheme else os.path.abspath(source)


def _is_local(source: str) -> bool:
    try:
        return os.path.exists(source)
    except ValueError:  # an embedded NUL
        return False


def _missing(filesystem: FileSystem, place: str, error: ModelFileNotFoundError) -> ModelFileError:
    """Say what is there in place of a directory with both files."""
    wanted = "wanted a directory with the files key and emb_vector"
    if not filesystem.exists(place):
        return ModelFileNotFoundError(f"opening sparse model {place}: there is no such directory; {wanted}")
    try:
        names = filesystem.list(place)
    except ModelFileError as listing:
        return ModelFileError(f"opening sparse model: {listing}; {wanted}")
    absent = [name for name in ("key", "emb_vector") if name not in names]
    if not absent:  # a link that leads nowhere, or a file that was just removed
        return ModelFileNotFoundError(f"opening sparse model {place}: {error}")
    held = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "") or "nothing"
    return ModelFileNotFoundError(f"opening sparse model {place}: {' and '.join(absent)} not found; it holds {held}; {wanted}")


def _fitting(rows: int, vector_bytes: int) -> str:
    dim, rest = divmod(vector_bytes, rows * 4)
    if vector_bytes and not rest:
        return f"the files fit embedding_vecsize_per_table {dim}"
    return "the files fit no dimension: one is cut short, or they are not of one model"


def write_sparse_model(
    directory: str | os.PathLike[str],
    rows: tuple[KeyArray, FloatArray] | Iterable[tuple[KeyArray, FloatArray]],
    *,
    overwrite: bool = False,
) -> int:
    """Write a sparse model to a local directory, whole or not at all.

    The files are written to a temporary directory beside the target, synced to disk and renamed, so that a reader finds the
    old model, the new one or none, whenever this process is stopped. A killed process leaves `.<name>.<random>.tmp` behind.

    Args:
        directory: where the files go; parents are made.
        rows: (keys, vectors), or an iterable of such chunks: keys (n,) int64, vectors (n, dim) float32, in host memory. A
            chunk is done with when the next one is asked for.
        overwrite: replace a sparse model that is there. A directory that holds anything else is never replaced.

    Returns:
        How many rows were written.

    Raises:
        ModelFileError: something is in the way, the disk refused, or there is no row.
        InvalidInputError: a chunk has the wrong shape; `InvalidDtypeError`: or dtype.
    """
    target = os.path.realpath(directory)
    parent, name = os.path.split(target)
    temporary = os.path.join(parent, f".{name[:100]}.{secrets.token_hex(6)}.tmp")
    try:
        _check_target(target, overwrite)
        os.makedirs(parent, exist_ok=True)
        os.mkdir(temporary)
        try:
            count = _write_files(temporary, [rows] if isinstance(rows, tuple) else rows)
            if count == 0:
                raise ModelFileError(f"writing sparse model {target}: got no rows, wanted at least 1")
            _check_target(target, overwrite)
            _put_in_place(temporary, target)
            _sync(parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)  # after an exchange this is the old model
    except OSError as error:
        raise ModelFileError(f"writing sparse model {target}: {error.strerror or error}; nothing was changed") from error
    return count


def _check_target(target: str, overwrite: bool) -> None:
    try:
        names = os.listdir(target)
    except FileNotFoundError:
        return
    except NotADirectoryError as error:
        raise ModelFileError(f"writing sparse model {target}: a file is in the way, wanted a directory or nothing") from error
    foreign = sorted(set(names) - {"key", "emb_vector", "meta"})
    if names and not overwrite:
        raise ModelFileError(f"writing sparse model {target}: it exists; choose another directory or ask to overwrite it")
    if foreign:
        raise ModelFileError(
            f"writing sparse model {target}: it holds {', '.join(foreign[:8])}, which is no part of a sparse model; "
            "choose another directory"
        )


def _write_files(directory: str, chunks: Iterable[tuple[KeyArray, FloatArray]]) -> int:
    count = dim = 0
    with open(f"{directory}/key", "xb") as key_file, open(f"{directory}/emb_vector", "xb") as vector_file:
        for keys, vectors in chunks:
            if keys.dtype != np.int64 or vectors.dtype != np.float32:
                raise InvalidDtypeError(
                    f"writing sparse model: got keys {keys.dtype} and vectors {vectors.dtype}, wanted int64 and float32"
                )
            if dim == 0 and vectors.ndim == 2:
                dim = vectors.shape[1]
            if keys.ndim != 1 or dim < 1 or vectors.shape != (keys.size, dim):
                raise InvalidInputError(
                    f"writing sparse model: got keys of shape {keys.shape} and vectors of shape {vectors.shape}, "
                    f"wanted (n,) and (n, {max(dim, 1)})"
                )
            key_file.write(np.ascontiguousarray(keys).data)
            vector_file.write(np.ascontiguousarray(vectors).data)
            count += keys.size
        for file in (key_file, vector_file):
            file.flush()
            os.fsync(file.fileno())
    _sync(directory)
    return count


def _put_in_place(temporary: str, target: str) -> None:
    """Give the new directory the target's name; what had it, if anything, ends under the temporary name."""
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
