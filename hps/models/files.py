"""Sparse model files: a directory with `key` (int64) and `emb_vector` (float32), checked and streamed.

HugeCTR's format: `key` holds 8 bytes a row, `emb_vector` 4 x dim bytes a row, both little-endian, without a header, row i of
one belonging to row i of the other. The dimension is in neither; it comes from the configuration. A key should stand once;
where it stands twice, the databases keep the later row. A file `meta` (8 bytes a row) may lie beside them; only its size is
checked. The directory is a local path or a URI whose scheme selects a file system.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from hps.errors import InvalidInputError, ModelFileError, ModelFileNotFoundError, ModelSourceError
from hps.filesystems.base import FileSystem, changed
from hps.models.sources import ModelSources
from hps.types import FloatArray, KeyArray

CHUNK_BYTES = 16 << 20
"""Keys and vectors of a chunk, unless a caller asks otherwise. Larger chunks load no faster and only take memory."""

_KEY_BYTES = 8
_UINT32_KEYS = 1 << 32


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of one version of a file, and the memory that it goes to. Parts may be read in any order, by any thread."""

    path: str
    version: str
    offset: int
    buffer: memoryview


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
    def is_local(self) -> bool:
        """Whether the files are this machine's."""
        return self._filesystem.is_local

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
        for part in self.parts(start_row, keys, vectors):
            self.read_part(part)

    def parts(
        self,
        start_row: int,
        keys: KeyArray,  # (n,)
        vectors: FloatArray,  # (n, dim)
    ) -> list[Part]:
        """Cut `read` into parts that are worth reading side by side; all of them done is what `read` does."""
        step, parts = self._filesystem.part_bytes, []
        arrays: tuple[np.ndarray, np.ndarray] = (keys, vectors)
        for (path, version), row_bytes, array in zip(self._versions, (_KEY_BYTES, 4 * self.dim), arrays, strict=True):
            if array.size:  # a memoryview of nothing cannot be cast
                whole, offset = array.data.cast("B"), start_row * row_bytes
                parts += [Part(path, version, offset + low, whole[low : low + step]) for low in range(0, len(whole), step)]
        return parts

    def read_part(self, part: Part) -> None:
        """Fill one part.

        Raises:
            ModelFileError: as in `chunks`.
        """
        self._filesystem.read_into(part.path, part.offset, part.buffer, part.version)

    @property
    def parallel_reads(self) -> int:
        """How many parts are worth reading at a time."""
        return self._filesystem.parallel_reads

    @property
    def chunks_ahead(self) -> int:
        """How many chunks to read ahead so that as many parts are being read."""
        return max(self.parallel_reads * min(self._filesystem.part_bytes, CHUNK_BYTES) // CHUNK_BYTES, 2)

    def verify(self) -> None:
        """Check, before any row is used, that the files are still those that were opened, and with `int32_keys` every key.

        32-bit serving costs one pass over `key`, which is a small part of the model.
        """
        self._check_unchanged()
        if not self.int32_keys:
            return
        key_path, version = self._versions[0]
        buffer = np.empty(min(self.rows, CHUNK_BYTES // _KEY_BYTES), np.int64)
        for start in range(0, self.rows, buffer.size):
            keys = buffer[: min(buffer.size, self.rows - start)]
            self._filesystem.read_into(key_path, start * _KEY_BYTES, keys.data.cast("B"), version)
            if keys.min() < 0 or keys.max() >= _UINT32_KEYS:
                row = int(np.argmax((keys < 0) | (keys >= _UINT32_KEYS)))
                raise ModelFileError(
                    f"reading {key_path}: row {start + row} has key {keys[row]}, but supportlonglong=false serves keys "
                    "in [0, 2^32) only; set supportlonglong to true"
                )

    def _check_unchanged(self) -> None:
        for path, opened in self._versions:
            now = self._filesystem.status(path).version
            if now != opened:
                raise changed(path, opened, now)


def open_sparse_model(
    path_or_uri: str | os.PathLike[str], dim: int, *, int32_keys: bool = False, sources: ModelSources | None = None
) -> SparseModel:
    """Find the files of a table and check their sizes. No row is read.

    Args:
        path_or_uri: the directory; see `ModelSources.locate` for what is a URI.
        dim: float32 elements of a vector, from the configuration.
        int32_keys: refuse keys outside [0, 2^32) when rows are read, as `supportlonglong: false` needs.
        sources: the file systems to use; new ones, with their default settings, where they are not given.

    Raises:
        ModelFileNotFoundError: the directory or one of the two files does not exist.
        ModelSourceError: the host that holds them does not answer.
        ModelFileError: they cannot be the files of a table of this dimension; the message says why.
    """
    if dim < 1:
        raise InvalidInputError(f"opening sparse model {path_or_uri}: got dimension {dim}, wanted at least 1")
    filesystem, place = (sources or ModelSources()).locate(os.fspath(path_or_uri))
    key_path, vector_path, meta_path = (f"{place.rstrip('/')}/{name}" for name in ("key", "emb_vector", "meta"))
    try:
        statuses = {path: filesystem.status(path) for path in (key_path, vector_path)}
    except ModelFileNotFoundError as error:
        raise _missing(filesystem, place, error) from error
    key_bytes, vector_bytes = (status.size_bytes for status in statuses.values())
    versions = tuple((path, status.version) for path, status in statuses.items())
    if key_bytes == 0 or key_bytes % _KEY_BYTES:
        raise ModelFileError(f"opening {key_path}: got {key_bytes} bytes, wanted {_KEY_BYTES} (an int64) for every row")
    rows = key_bytes // _KEY_BYTES
    if vector_bytes != rows * dim * 4:
        raise ModelFileError(
            f"opening {vector_path}: got {vector_bytes} bytes, wanted {rows * dim * 4}: the {rows} keys of {key_path} "
            f"({key_bytes} bytes) with {dim} float32 each; {_fitting(rows, vector_bytes)}"
        )
    meta_bytes = filesystem.status(meta_path).size_bytes if _is_there(filesystem, meta_path) else key_bytes
    if meta_bytes != key_bytes:
        raise ModelFileError(
            f"opening {meta_path}: got {meta_bytes} bytes, wanted the {key_bytes} of {key_path}; remove it or write it whole"
        )
    content = json.dumps([place, rows, dim, versions])
    fingerprint = hashlib.blake2b(content.encode(errors="surrogatepass"), digest_size=16).hexdigest()
    return SparseModel(place, rows, dim, fingerprint, int32_keys, filesystem, versions)


def _is_there(filesystem: FileSystem, path: str) -> bool:
    """Whether an optional file is there; one that may not be looked at is not: S3 says so of any absent one to those who may
    not list its bucket."""
    try:
        return filesystem.exists(path)
    except ModelSourceError:
        raise
    except ModelFileError:
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
