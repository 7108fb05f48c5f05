"""Sparse model files: a directory with `key` (int64) and `emb_vector` (float32), checked and streamed.

HugeCTR's format: `key` holds 8 bytes a row and `emb_vector` 4 x dim bytes a row, little-endian and without a header; row i of
one belongs to row i of the other. The dimension is in neither; it comes from the configuration. A key should occur once; if it
occurs twice, the databases keep the later row. A file `meta` (8 bytes a row) may lie beside them; only its size is checked. The
directory is a local path or a URI whose scheme selects a file system.
"""

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from hps.errors import ModelFileError, ModelFileNotFoundError, ModelSourceError
from hps.filesystems.base import FileSystem, changed
from hps.models.sources import ModelSources
from hps.types import FloatArray, KeyArray

CHUNK_BYTES = 16 << 20
"""Keys and vectors of a chunk. Larger chunks load no faster and only take memory."""

_KEY_BYTES = 8
_UINT32_KEYS = 1 << 32


@dataclass(frozen=True, slots=True)
class FilePart:
    """A stretch of one version of a file, and the memory to read it into. Parts may be read in any order, by any thread."""

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

    def parts(
        self,
        start_row: int,
        keys: KeyArray,  # (n,)
        vectors: FloatArray,  # (n, dim)
    ) -> list[FilePart]:
        """Cut the n rows from `start_row` on into parts that are worth reading side by side.

        Args:
            keys: (n,) int64, C-contiguous, in host memory; filled once all parts are read, unspecified after an error.
            vectors: (n, dim) float32, likewise.
        """
        step, parts = self._filesystem.part_bytes, []
        arrays: tuple[np.ndarray, np.ndarray] = (keys, vectors)
        for (path, version), row_bytes, array in zip(self._versions, (_KEY_BYTES, 4 * self.dim), arrays, strict=True):
            if array.size:  # a memoryview of nothing cannot be cast
                whole, offset = array.data.cast("B"), start_row * row_bytes
                parts += [FilePart(path, version, offset + low, whole[low : low + step]) for low in range(0, len(whole), step)]
        return parts

    def read_part(self, part: FilePart) -> None:
        """Fill one part.

        Raises:
            ModelFileError: the file changed since it was opened, ends early or cannot be read.
        """
        self._filesystem.read_into(part.path, part.offset, part.buffer, part.version)

    def read_keys(self, start_row: int, keys: KeyArray) -> None:
        """Read the keys of the rows from `start_row` on into an array, (n,) int64, C-contiguous.

        Raises:
            ModelFileError: as `read_part`.
        """
        path, version = self._versions[0]
        self._filesystem.read_into(path, start_row * _KEY_BYTES, keys.data.cast("B"), version)

    @property
    def parallel_reads(self) -> int:
        """How many parts are worth reading at a time."""
        return self._filesystem.parallel_reads

    @property
    def chunks_ahead(self) -> int:
        """How many chunks to read ahead so that `parallel_reads` parts are being read."""
        return max(self.parallel_reads * min(self._filesystem.part_bytes, CHUNK_BYTES) // CHUNK_BYTES, 2)

    def may_change_unseen(self) -> bool:
        """Whether a file may change from now on without getting another version, since somebody has it open for writing.

        Raises:
            ModelFileError: a file changed, or cannot be opened.
        """
        return self.is_local and any(self._filesystem.may_change_unseen(path, version) for path, version in self._versions)

    def verify(self) -> None:
        """Check, before any row is used, that the files are still those that were opened, and with `int32_keys` every key.

        32-bit serving costs one pass over `key`, which is a small part of the model.

        Raises:
            ModelFileError: a file changed, or there is a key that 32-bit serving cannot have.
        """
        for path, opened in self._versions:
            now = self._filesystem.status(path).version
            if now != opened:
                raise changed(path, opened, now)
        if not self.int32_keys:
            return
        key_path = self._versions[0][0]
        buffer = np.empty(min(self.rows, CHUNK_BYTES // _KEY_BYTES), np.int64)
        for start in range(0, self.rows, buffer.size):
            keys = buffer[: min(buffer.size, self.rows - start)]
            self.read_keys(start, keys)
            if keys.min() < 0 or keys.max() >= _UINT32_KEYS:
                row = int(np.argmax((keys < 0) | (keys >= _UINT32_KEYS)))
                raise ModelFileError(
                    f"reading {key_path}: row {start + row} has key {keys[row]}, but supportlonglong=false serves keys "
                    "in [0, 2^32) only; set supportlonglong to true"
                )


def open_sparse_model(
    path_or_uri: str | os.PathLike[str], dim: int, *, int32_keys: bool = False, sources: ModelSources | None = None
) -> SparseModel:
    """Find the files of a table and check their sizes. No row is read.

    Args:
        path_or_uri: the directory; see `ModelSources.locate` for what is a URI.
        dim: float32 elements of a vector, from the configuration.
        int32_keys: refuse keys outside [0, 2^32) when rows are read, as `supportlonglong: false` needs.
        sources: the file systems to use; by default new ones with default settings.

    Raises:
        ModelFileNotFoundError: the directory or one of the two files does not exist.
        ModelSourceError: the host of the files does not answer.
        ModelFileError: the files cannot be those of a table of this dimension; the message says why.
    """
    filesystem, place = (sources or ModelSources()).locate(os.fspath(path_or_uri))
    key_path, vector_path, meta_path = (f"{place.rstrip('/')}/{name}" for name in ("key", "emb_vector", "meta"))
    try:
        statuses = {path: filesystem.status(path) for path in (key_path, vector_path)}
    except ModelFileNotFoundError as error:
        raise _missing(filesystem, place, error) from error
    key_bytes, vector_bytes = (status.size_bytes for status in statuses.values())
    versions = tuple((path, status.version) for path, status in statuses.items())
    if key_bytes == 0 or key_bytes % _KEY_BYTES:
        raise ModelFileError(f"opening {key_path}: got {key_bytes} bytes, expected {_KEY_BYTES} (an int64) for every row")
    rows = key_bytes // _KEY_BYTES
    if vector_bytes != rows * dim * 4:
        raise ModelFileError(
            f"opening {vector_path}: got {vector_bytes} bytes, expected {rows * dim * 4}: the {rows} keys of {key_path} "
            f"({key_bytes} bytes) with {dim} float32 each; {_fitting(rows, vector_bytes)}"
        )
    meta_bytes = filesystem.status(meta_path).size_bytes if _is_there(filesystem, meta_path) else key_bytes
    if meta_bytes != key_bytes:
        raise ModelFileError(
            f"opening {meta_path}: got {meta_bytes} bytes, expected the {key_bytes} of {key_path}; remove it or write it whole"
        )
    content = json.dumps([place, rows, dim, versions])
    fingerprint = hashlib.blake2b(content.encode(errors="surrogatepass"), digest_size=16).hexdigest()
    return SparseModel(place, rows, dim, fingerprint, int32_keys, filesystem, versions)


def joint_fingerprint(fingerprints: Iterable[str]) -> str:
    """Identify the files of several tables by the fingerprint of each, in the order of the tables."""
    return hashlib.blake2b("".join(fingerprints).encode(), digest_size=16).hexdigest()


def _is_there(filesystem: FileSystem, path: str) -> bool:
    """Whether an optional file is there. One that we may not look at counts as absent: so S3 answers for any absent file those
    who may not list its bucket."""
    try:
        return filesystem.exists(path)
    except ModelSourceError:
        raise
    except ModelFileError:
        return False


def _missing(filesystem: FileSystem, place: str, error: ModelFileNotFoundError) -> ModelFileError:
    """The error that says what is there instead of a directory with both files."""
    expected = "expected a directory with the files key and emb_vector"
    if not filesystem.exists(place):
        return ModelFileNotFoundError(f"opening sparse model {place}: there is no such directory; {expected}")
    try:
        names = filesystem.list(place)
    except ModelFileError as listing:
        return ModelFileError(f"opening sparse model: {listing}; {expected}")
    absent = [name for name in ("key", "emb_vector") if name not in names]
    if not absent:  # a broken link, or a file that was just removed
        return ModelFileNotFoundError(f"opening sparse model {place}: {error}")
    held = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "") or "nothing"
    return ModelFileNotFoundError(
        f"opening sparse model {place}: {' and '.join(absent)} not found; it holds {held}; {expected}"
    )


def _fitting(rows: int, vector_bytes: int) -> str:
    dim, rest = divmod(vector_bytes, rows * 4)
    if vector_bytes and not rest:
        return f"the files fit embedding_vecsize_per_table {dim}"
    return "the files fit no dimension: one is cut short, or they belong to different models"
