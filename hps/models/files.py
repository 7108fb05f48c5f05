"""Checks and reads sparse model files: a directory with `key` (int64) and `emb_vector` (float32).

HugeCTR's format: `key` has 8 bytes per row and `emb_vector` 4 x dim bytes per row, little-endian, no header; row i of one
belongs to row i of the other. The dimension comes from the configuration. Of repeated keys databases keep the later row. The
size of an optional file `meta` (8 bytes per row) is checked. A file `deleted` (int64 keys) makes the files a delta, which
`deltas.py` reads. The directory is a local path or a URI whose scheme selects a file system.
"""

import hashlib
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial

import numpy as np

from hps.errors import ModelFileError, ModelFileNotFoundError, ModelSourceError
from hps.filesystems.base import FileSystem, changed
from hps.ground.shares import TableShare, owned_rows, rows_of_share, with_share
from hps.models.manifest import FileCheck, within
from hps.models.sources import ModelSources
from hps.types import FloatArray, KeyArray

CHUNK_BYTES = 16 << 20
"""Size of a chunk of keys and vectors. Larger chunks take memory and load no faster."""

_KEY_BYTES = 8
_UINT32_KEYS = 1 << 32
HEAD_BYTES = 4 << 10  # of a file, to recognise other formats
_FEWEST_HALVES = 8  # fewer keys fit any format
_NPY = b"\x93NUMPY"


@dataclass(frozen=True, slots=True)
class OpenedFile:
    """One version of a file of a table. *Immutable, thread-safe.*

    Raises of every operation:
        ModelFileError: the file changed since it was opened, ends early or cannot be read.

    Attributes:
        crc32: expected CRC-32, eight hexadecimal digits; empty if unknown.
    """

    filesystem: FileSystem = field(repr=False)
    path: str
    version: str
    size_bytes: int
    crc32: str = ""

    def read(self, offset: int, buffer: memoryview) -> None:
        """Fill a buffer from byte `offset` on."""
        self.filesystem.read_into(self.path, offset, buffer, self.version)

    def key_chunks(self, first: int = 0, last: int | None = None) -> Iterator[tuple[int, KeyArray]]:
        """Yield the int64 keys [first, last), by default all, with the number of the first; the next chunk overwrites them."""
        last = self.size_bytes // _KEY_BYTES if last is None else last
        buffer = np.empty(max(1, min(last - first, CHUNK_BYTES // _KEY_BYTES)), np.int64)
        for start in range(first, last, buffer.size):
            keys = buffer[: min(buffer.size, last - start)]
            self.read(start * _KEY_BYTES, keys.data.cast("B"))
            yield start, keys

    def verify(self) -> None:
        """Check that the file has not changed."""
        now = self.filesystem.status(self.path).version
        if now != self.version:
            raise changed(self.path, self.version, now)

    def is_open_for_writing(self) -> bool:
        """Return whether the file may change without getting another version, because a process has it open for writing."""
        return self.filesystem.is_local and self.filesystem.may_change_unseen(self.path, self.version)

    def check_content(self, crc32: str) -> None:
        """Compare the CRC-32 of the content with the expected one, if known."""
        if self.crc32 and self.crc32 != crc32:
            raise ModelFileError(
                f"reading {self.path}: its content has CRC-32 {crc32}, expected the {self.crc32} that version.json says; it is "
                "being copied, or was damaged: write the version again"
            )


@dataclass(frozen=True, slots=True)
class SparseModel:
    """One table's files, which fit each other and the dimension. *Immutable, thread-safe.* Made by `open_sparse_model`.

    Attributes:
        place: absolute path or URI of the directory.
        fingerprint: hash of the place, the sizes and versions of both files, and the dimension.
        int32_keys: whether keys outside [0, 2^32) are refused.
        share: the share of the rows to load, of all `rows` of the files; part of the fingerprint. None: all rows.
    """

    place: str
    rows: int
    dim: int
    fingerprint: str
    int32_keys: bool
    keys: OpenedFile
    vectors: OpenedFile
    share: TableShare | None = None

    @property
    def own_rows(self) -> int:
        """Number of the rows of the share; an upper bound unless it is all rows."""
        return rows_of_share(self.share, self.rows)

    def owned(
        self,
        keys: KeyArray,  # (n,)
        vectors: FloatArray,  # (n, dim)
    ) -> tuple[KeyArray, FloatArray]:
        """Return the rows of the share, in order; the given arrays if that is all rows."""
        return owned_rows(self.share, keys, vectors)

    @property
    def is_local(self) -> bool:
        """True if the files are on this machine."""
        return self.keys.filesystem.is_local

    @property
    def row_bytes(self) -> int:
        return _KEY_BYTES + 4 * self.dim

    @property
    def size_bytes(self) -> int:
        return self.rows * self.row_bytes

    @property
    def chunk_rows(self) -> int:
        return rows_of_a_chunk(self.dim)

    def parts(
        self,
        start_row: int,
        keys: KeyArray,  # (n,)
        vectors: FloatArray,  # (n, dim)
    ) -> list[Callable[[], None]]:
        """Split the reading of n rows from `start_row` on into calls, for any threads and in any order.

        Args:
            keys, vectors: C-contiguous, in host memory; filled by all calls, unspecified after an error.
        """
        step = self.keys.filesystem.part_bytes
        parts: list[Callable[[], None]] = []
        arrays: tuple[np.ndarray, np.ndarray] = (keys, vectors)
        for file, row_bytes, array in zip((self.keys, self.vectors), (_KEY_BYTES, 4 * self.dim), arrays, strict=True):
            if array.size:  # a memoryview of nothing cannot be cast
                view, offset = array.data.cast("B"), start_row * row_bytes
                parts += [partial(file.read, offset + low, view[low : low + step]) for low in range(0, len(view), step)]
        return parts

    @property
    def parallel_reads(self) -> int:
        """Number of parts to read at a time."""
        return self.keys.filesystem.parallel_reads

    @property
    def chunks_ahead(self) -> int:
        """Number of chunks to read ahead, so that `parallel_reads` parts are read at a time."""
        return max(self.parallel_reads * min(self.keys.filesystem.part_bytes, CHUNK_BYTES) // CHUNK_BYTES, 2)

    @property
    def has_checksum(self) -> bool:
        """True if `version.json` has a checksum for `check_content`."""
        return bool(self.keys.crc32 or self.vectors.crc32)

    def check_content(self, checksum: str) -> None:
        """Compare the checksum of all rows, as `extend_checksum` computes it, with `version.json`.

        Raises:
            ModelFileError: they differ.
        """
        self.keys.check_content(checksum[:8])
        self.vectors.check_content(checksum[8:])

    def is_open_for_writing(self) -> bool:
        """As `OpenedFile.is_open_for_writing`, of any file."""
        return self.keys.is_open_for_writing() or self.vectors.is_open_for_writing()

    def check_format(self) -> None:
        """Check that the first keys are not int32: keys of 4 bytes fit vectors of twice the width, so sizes do not tell.

        Raises:
            ModelFileError: the files are of another format.
        """
        if other := _other_format(self.place, [_head(self.keys), b""], certain=True):
            raise ModelFileError(f"reading {self.place}: {other}")

    def verify(self) -> None:
        """Check, before any row is used, that the files have not changed since they were opened, and `int32_keys`.

        The latter costs one pass over `key`, which is a small part of the model.

        Raises:
            ModelFileError: a file changed, or a key is outside [0, 2^32).
        """
        self.keys.verify()
        self.vectors.verify()
        for start, keys in self.keys.key_chunks() if self.int32_keys else ():
            if keys.min() < 0 or keys.max() >= _UINT32_KEYS:
                row = int(np.argmax((keys < 0) | (keys >= _UINT32_KEYS)))
                raise ModelFileError(
                    f"reading {self.keys.path}: row {start + row} has key {keys[row]}, but supportlonglong=false serves keys "
                    "in [0, 2^32) only; set supportlonglong to true"
                )


def open_sparse_model(
    path_or_uri: str | os.PathLike[str],
    dim: int,
    *,
    int32_keys: bool = False,
    sources: ModelSources | None = None,
    checks: Mapping[str, FileCheck] | None = None,
    delta: bool = False,
    share: TableShare | None = None,
) -> SparseModel:
    """Find the files of a table and check their sizes. No row is read.

    Args:
        path_or_uri: the directory; see `ModelSources.locate` for URIs.
        dim: float32 elements per vector, from the configuration.
        int32_keys: refuse keys outside [0, 2^32) when rows are read, for `supportlonglong: false`.
        sources: file systems to use; by default new ones with default settings.
        checks: checks from `version.json`, by file name.
        delta: accept the changes of a version, perhaps without rows, instead of a complete table.
        share: the share of the rows to load; None for all.

    Raises:
        ModelFileNotFoundError: the directory or one of the two files does not exist.
        ModelSourceError: the host of the files does not answer.
        ModelFileError: the files do not fit a table of this dimension; the message says why.
    """
    filesystem, place = (sources or ModelSources()).locate(os.fspath(path_or_uri))
    key_path, vector_path, meta_path, deleted_path = (within(place, name) for name in ("key", "emb_vector", "meta", "deleted"))
    checks = checks or {}
    try:
        files = [open_file(filesystem, path, checks) for path in (key_path, vector_path)]
    except ModelFileNotFoundError as error:
        raise _missing(filesystem, place, error) from error
    key_bytes, vector_bytes = (file.size_bytes for file in files)
    or_int32 = ""
    if key_bytes and vector_bytes != key_bytes // _KEY_BYTES * dim * 4:
        fits = key_bytes % 4 == 0 and vector_bytes == key_bytes * dim
        heads = [_head(file) for file in files]
        if other := _other_format(place, heads, fits=fits):
            raise ModelFileError(f"opening sparse model {place}: {other}")
        if fits and _could_be_int32(heads[0]):
            convert = f"`hps import {place} DESTINATION --format int32_keys` converts them"
            or_int32 = f"; or, with {dim} float32 each, keys of 4 bytes: {convert}"
    if (key_bytes == 0 and not delta) or key_bytes % _KEY_BYTES:
        raise ModelFileError(
            f"opening {key_path}: got {key_bytes} bytes, expected {_KEY_BYTES} (an int64) for every row{or_int32}"
        )
    rows = key_bytes // _KEY_BYTES
    if vector_bytes != rows * dim * 4:
        raise ModelFileError(
            f"opening {vector_path}: got {vector_bytes} bytes, expected {rows * dim * 4}: the {rows} keys of {key_path} "
            f"({key_bytes} bytes) with {dim} float32 each; {_fitting(rows, vector_bytes)}{or_int32}"
        )
    names, meta_bytes = _names(filesystem, place), key_bytes
    if "meta" in names:
        with suppress(ModelFileNotFoundError):  # a broken link
            meta_bytes = filesystem.status(meta_path).size_bytes
    if meta_bytes != key_bytes:
        raise ModelFileError(
            f"opening {meta_path}: got {meta_bytes} bytes, expected the {key_bytes} of {key_path}; remove it or write it whole"
        )
    if "deleted" in names and not delta:
        raise ModelFileError(
            f"opening {deleted_path}: got the changes of a version, expected a complete table; set delta_of in the version's "
            "version.json (or in `versions`) to the version that they change"
        )
    content = json.dumps([place, rows, dim, [(file.path, file.version) for file in files]])
    fingerprint = hashlib.blake2b(content.encode(errors="surrogatepass"), digest_size=16).hexdigest()
    return SparseModel(place, rows, dim, with_share(fingerprint, share), int32_keys, files[0], files[1], share)


def stored_shape(path_or_uri: str | os.PathLike[str], sources: ModelSources | None = None) -> tuple[int, int]:
    """Compute the dimension and the number of rows of a table from the sizes of its files.

    Raises:
        ModelFileNotFoundError: the directory or one of the two files does not exist.
        ModelFileError: the files fit no dimension, or are of another format.
    """
    filesystem, place = (sources or ModelSources()).locate(os.fspath(path_or_uri))
    try:
        files = [open_file(filesystem, within(place, name), {}) for name in ("key", "emb_vector")]
    except ModelFileNotFoundError as error:
        raise _missing(filesystem, place, error) from error
    key_bytes, vector_bytes = (file.size_bytes for file in files)
    if other := _other_format(place, [_head(file) for file in files]):
        raise ModelFileError(f"opening sparse model {place}: {other}")
    rows, rest = divmod(key_bytes, _KEY_BYTES)
    dim, more = divmod(vector_bytes, max(rows, 1) * 4)
    if rest or more or not rows or not dim:
        raise ModelFileError(
            f"opening sparse model {place}: got {key_bytes} bytes of keys and {vector_bytes} of vectors, expected 8 a key and "
            "4 x the dimension a vector; one file is cut short, or they belong to different models"
        )
    return dim, rows


def rows_of_a_chunk(dim: int) -> int:
    """Return the number of rows of `CHUNK_BYTES`, at least 1."""
    return max(1, CHUNK_BYTES // (_KEY_BYTES + 4 * dim))


def joint_fingerprint(fingerprints: Iterable[str]) -> str:
    """Combine the fingerprints of several tables, in the order of the tables."""
    return hashlib.blake2b("".join(fingerprints).encode(), digest_size=16).hexdigest()


def open_file(filesystem: FileSystem, path: str, checks: Mapping[str, FileCheck]) -> OpenedFile:
    """Get size and version of a file, and compare the size with `version.json`.

    Raises:
        ModelFileError: the size differs, or the file is unreachable.
    """
    status, check = filesystem.status(path), checks.get(path.rpartition("/")[2])
    if check is not None and status.size_bytes != check.size_bytes:
        raise ModelFileError(
            f"opening {path}: got {status.size_bytes} bytes, expected the {check.size_bytes} that version.json says; wait "
            "until it is copied, or write the version again"
        )
    return OpenedFile(filesystem, path, status.version, status.size_bytes, check.crc32 if check else "")


def extend_checksum(checksum: str, keys: KeyArray, vectors: FloatArray) -> str:
    """Extend the checksum of earlier rows by these rows. The result does not depend on the chunks."""
    before = int(checksum[:8] or "0", 16), int(checksum[8:] or "0", 16)
    return f"{zlib.crc32(keys.data.cast('B'), before[0]):08x}{zlib.crc32(vectors.data.cast('B'), before[1]):08x}"


def join_checksums(
    checksum: str,
    next_rows: str,
    keys: KeyArray,  # (n,)
    vectors: FloatArray,  # (n, dim)
) -> str:
    """As `extend_checksum`, by the checksum of the next rows alone, so that threads can compute those."""
    before = int(checksum[:8] or "0", 16), int(checksum[8:] or "0", 16)
    after = int(next_rows[:8], 16), int(next_rows[8:], 16)
    sizes = keys.nbytes, vectors.nbytes
    return "".join(f"{_joined_crc(*crcs):08x}" for crcs in zip(before, after, sizes, strict=True))


# CRC-32 is linear over polynomials of single bits: n more bytes multiply it by x^(8n) modulo the CRC's polynomial (zlib's
# `crc32_combine`, which Python does not offer). The highest power of x is the lowest bit.
_POLYNOMIAL = 0xEDB88320


def _joined_crc(first: int, second: int, second_bytes: int) -> int:
    return _product(_shift_by(second_bytes), first) ^ second


@lru_cache(64)
def _shift_by(size: int) -> int:
    """Return x^(8 size) modulo the polynomial."""
    power, square = 1 << 31, _BYTE
    while size:
        if size & 1:
            power = _product(square, power)
        square, size = _product(square, square), size >> 1
    return power


def _product(first: int, second: int) -> int:
    product = 0
    for bit in range(31, -1, -1):
        if first >> bit & 1:
            product ^= second
        second = second >> 1 ^ (_POLYNOMIAL if second & 1 else 0)
    return product


_BYTE = 1 << (31 - 8)  # x^8


def _head(file: OpenedFile) -> bytes:
    """Read the beginning of a file."""
    head = bytearray(min(file.size_bytes, HEAD_BYTES))
    if head:
        file.read(0, memoryview(head))
    return bytes(head)


def _other_format(place: str, heads: Sequence[bytes], *, fits: bool = False, certain: bool = False) -> str:
    """Describe the format of .npy files, or of keys of 4 bytes, and the cure; empty if the files seem right.

    Args:
        heads: the first bytes of `key` and `emb_vector`.
        fits: there are as many keys of 4 bytes as vectors.
        certain: report only keys that also ascend, so that no pair of numbers in one int64 is refused.
    """
    # Read as int32, small int64 keys repeat 0 and random ones are negative. Keys that are neither are int32.
    names = [name for name, head in zip(("key", "emb_vector"), heads, strict=True) if head.startswith(_NPY)]
    if names:
        what = f"{' and '.join(names)} are .npy files, expected raw rows"
        return f"{what}. `hps import {place} DESTINATION --format npy` converts them"
    halves = np.frombuffer(heads[0][: len(heads[0]) // 4 * 4], "<i4").astype(np.int64)
    if halves.size < _FEWEST_HALVES or halves.min() < 0:
        return ""
    ascending = bool((np.diff(halves) > 0).all())
    if not (ascending or (not certain and np.unique(halves).size == halves.size)):
        return ""
    what = "as many keys of 4 bytes (int32) as vectors" if fits else "keys that are int32"
    return f"got {what}, expected 8 bytes (int64). `hps import {place} DESTINATION --format int32_keys` converts them"


def _could_be_int32(head: bytes) -> bool:
    """Return True if the first 4-byte numbers of `key` are distinct, like unsigned keys or halves of hashed keys."""
    halves = np.frombuffer(head[: len(head) // 4 * 4], "<u4")
    return bool(np.unique(halves).size == halves.size)


def _names(filesystem: FileSystem, place: str) -> list[str]:
    """List a directory; empty if listing is not allowed."""
    try:
        return filesystem.list(place)
    except ModelSourceError:
        raise
    except ModelFileError:
        return []


def _missing(filesystem: FileSystem, place: str, error: ModelFileNotFoundError) -> ModelFileError:
    """Return the error that lists the contents of the directory instead of both files."""
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
    contents = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "") or "nothing"
    return ModelFileNotFoundError(
        f"opening sparse model {place}: {' and '.join(absent)} not found; it holds {contents}; {expected}"
    )


def _fitting(rows: int, vector_bytes: int) -> str:
    dim, rest = divmod(vector_bytes, max(rows, 1) * 4)
    if vector_bytes and not rest:
        return f"the files fit embedding_vecsize_per_table {dim}"
    return "the files fit no dimension: one is cut short, or they belong to different models"
