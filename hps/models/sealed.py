"""Reads sealed tables of model versions: one row file, `rows`, instead of or beside `key` and `emb_vector`.

The format is that of `stores/row_files/layout.py`, so a database of row files takes the file as it is. All others are loaded
from it as from sparse files: each page is compared with its checksum as it is read. Its fingerprint is that of its content, so
a copy at another place is the same model. `docs/model-sources.md` says when a file beside sparse files is used.
"""

import hashlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from hps.errors import ModelFileError, ModelFileNotFoundError
from hps.filesystems.base import FileSystem
from hps.filesystems.local import local_path
from hps.ground.kernels.numba_kernels import compile_kernels
from hps.ground.rows import decode, row_kernels
from hps.ground.shares import TableShare, with_share
from hps.models import files
from hps.models.files import OpenedFile, open_file, open_sparse_model, rows_of_a_chunk, stored_shape
from hps.models.manifest import FileCheck, within
from hps.models.sources import ModelSources
from hps.stores.base import FilePeers, RowFileSource
from hps.stores.row_files import layout
from hps.stores.row_files.layout import PAGE_BYTES, FileHead
from hps.stores.row_files.ranges import RecordRange, compared, find_range, hash_bounds
from hps.types import ROW_DTYPES, FloatArray, KeyArray, row_width

_log = logging.getLogger(__name__)

ROWS_FILE: Final = "rows"
_KEY_BYTES: Final = 8
_UINT32_KEYS: Final = 1 << 32


class _PageSums:
    """The checksums of a file's pages, read at first use. *Thread-safe.*"""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: npt.NDArray[np.uint64] | None = None

    def read(self, file: OpenedFile, head: FileHead) -> npt.NDArray[np.uint64]:
        with self._lock:  # every reader needs them
            if self._sums is None:
                sums = np.empty(head.pages, np.uint64)
                view, step = sums.data.cast("B") if sums.size else memoryview(b""), file.filesystem.part_bytes
                for start in range(0, len(view), step):
                    file.read(head.sums_at + start, view[start : start + step])
                if layout.checksum(sums.view(np.uint8)) != head.sums:
                    raise _damaged(file.path, "its checksums contradict its head")
                self._sums = sums
            return self._sums


class _OwnRecords:
    """Which records of a file a share has, read at first use. *Thread-safe.*"""

    def __init__(self, share: TableShare | None) -> None:
        self._share = share
        self._lock = threading.Lock()
        self._range: RecordRange | None = None

    def find(self, file: OpenedFile, head: FileHead) -> RecordRange:
        with self._lock:
            if self._range is None:
                try:
                    self._range = find_range(head, hash_bounds(self._share), compared(head, file.read))
                except ValueError as error:
                    raise _damaged(file.path, str(error)) from error
            return self._range


@dataclass(frozen=True, slots=True)
class _SealedKeys:
    """The keys of a sealed table, as `OpenedFile.key_chunks` yields them."""

    model: "SealedModel"

    def key_chunks(self, first: int = 0, last: int | None = None) -> Iterator[tuple[int, KeyArray]]:
        """Yield the int64 keys [first, last), by default all, with the number of the first; the next chunk overwrites them."""
        last = self.model.rows if last is None else last
        for start in range(first, last, self.model.chunk_rows):
            records = self.model.records(start, min(self.model.chunk_rows, last - start))
            keys = np.empty(len(records), np.int64)
            layout.split_records(records, 0, len(records), 0, keys, np.empty((len(records), 0), np.uint32))
            yield start, keys


@dataclass(frozen=True, slots=True)
class SealedModel:
    """One sealed table. *Immutable, thread-safe.* Made by `open_sealed_model`; read as a `SparseModel` is.

    Attributes:
        place: absolute path or URI of the directory.
        fingerprint: of the content, and the share.
        int32_keys: whether keys outside [0, 2^32) are refused.
        share: as of `SparseModel`; always None, since other shares' rows are not among those of the model.
        peers: other replicas, which may have the file.
    """

    place: str
    head: FileHead
    fingerprint: str
    int32_keys: bool
    file: OpenedFile
    _own: _OwnRecords = field(repr=False, compare=False)
    peers: FilePeers | None = None
    _sums: _PageSums = field(default_factory=_PageSums, repr=False, compare=False)

    share = None

    @property
    def range(self) -> RecordRange:
        """The records of the share; finding them reads some pages."""
        return self._own.find(self.file, self.head)

    @property
    def rows(self) -> int:
        """Number of rows, those of the share."""
        return self.range.rows

    @property
    def own_rows(self) -> int:
        """As `SparseModel.own_rows`."""
        return self.rows

    def owned(
        self,
        keys: KeyArray,  # (n,)
        vectors: FloatArray,  # (n, dim)
    ) -> tuple[KeyArray, FloatArray]:
        """As `SparseModel.owned`: all of them."""
        return keys, vectors

    @property
    def dim(self) -> int:
        return self.head.dim

    @property
    def is_local(self) -> bool:
        return self.file.filesystem.is_local

    @property
    def row_bytes(self) -> int:
        return self.head.record_bytes

    @property
    def size_bytes(self) -> int:
        whole = self.rows == self.head.rows
        return self.head.size_bytes if whole else sum(stop - start for start, stop in self.range.runs(self.head))

    @property
    def chunk_rows(self) -> int:
        return rows_of_a_chunk(self.dim)

    @property
    def parallel_reads(self) -> int:
        return self.file.filesystem.parallel_reads

    @property
    def chunks_ahead(self) -> int:
        return max(self.parallel_reads * min(self.file.filesystem.part_bytes, files.CHUNK_BYTES) // files.CHUNK_BYTES, 2)

    @property
    def keys(self) -> _SealedKeys:
        return _SealedKeys(self)

    has_checksum = False  # pages have their own

    @property
    def source(self) -> RowFileSource:
        """The file, for a database that takes it as it is."""
        path = Path(local_path(self.file.path)) if self.is_local else None
        filesystem = self.file.filesystem
        return RowFileSource(
            self.file.path,
            self.file.version,
            self.file.size_bytes,
            path,
            self.file.read,
            self.parallel_reads,
            filesystem.part_bytes,
            self.peers,
        )

    def check_content(self, checksum: str) -> None:
        """Do nothing: each page was compared with its checksum."""

    def check_format(self) -> None:
        """Do nothing: the head was checked when the file was opened."""

    def is_open_for_writing(self) -> bool:
        return self.file.is_open_for_writing()

    def verify(self) -> None:
        """Check, before any row is used, that the file has not changed since it was opened, and `int32_keys`.

        Raises:
            ModelFileError: it changed, or a key is outside [0, 2^32).
        """
        self.file.verify()
        if not self.int32_keys or (self.head.least_key >= 0 and self.head.greatest_key < _UINT32_KEYS):
            return
        for _, keys in self.keys.key_chunks():
            if keys.size and (keys.min() < 0 or keys.max() >= _UINT32_KEYS):
                raise ModelFileError(
                    f"reading {self.file.path}: it has the key {keys[np.argmax((keys < 0) | (keys >= _UINT32_KEYS))]}, but "
                    "supportlonglong=false serves keys in [0, 2^32) only; set supportlonglong to true"
                )

    def parts(
        self,
        start_row: int,
        keys: KeyArray,  # (n,)
        vectors: FloatArray,  # (n, dim)
    ) -> list[Callable[[], None]]:
        """Split the reading of n rows from `start_row` on into calls, as of `SparseModel.parts`."""
        step = max(1, self.file.filesystem.part_bytes // self.head.record_bytes)
        return [
            partial(self._read, start_row + at, keys[at : at + step], vectors[at : at + step])
            for at in range(0, keys.size, step)
        ]

    def _read(self, start: int, keys: KeyArray, vectors: FloatArray) -> None:
        records = self.records(start, keys.size)
        if self.head.row_dtype == "float32":
            layout.split_records(records, 0, keys.size, 0, keys, vectors.view(np.uint32))
            return
        rows = np.empty((keys.size, self.head.width), np.float32)
        layout.split_records(records, 0, keys.size, 0, keys, rows.view(np.uint32))
        decode(rows, self.dim, self.head.row_dtype, vectors)

    def records(self, start: int, count: int) -> npt.NDArray[np.uint32]:
        """Read records [start, start + count) of the share, (count, 2 + width), and compare their pages with the checksums."""
        size, start = self.head.record_bytes, start + self.range.first
        first, last = start * size // PAGE_BYTES, -(-(start + count) * size // PAGE_BYTES)
        words = np.empty((last - first) * (PAGE_BYTES // 8), np.uint64)
        self.file.read(self.head.records_at + first * PAGE_BYTES, words.data.cast("B"))
        if (page := layout.damaged_page(words, self._sums.read(self.file, self.head)[first:last], 0, last - first)) >= 0:
            raise _damaged(
                self.file.path, f"the page at byte {self.head.records_at + (first + page) * PAGE_BYTES:,} is damaged"
            )
        at = start * size - first * PAGE_BYTES
        return words.view(np.uint8)[at : at + count * size].view(np.uint32).reshape(count, -1)


def open_sealed_model(
    filesystem: FileSystem,
    place: str,
    dim: int,
    *,
    int32_keys: bool = False,
    checks: Mapping[str, FileCheck] | None = None,
    share: TableShare | None = None,
    peers: FilePeers | None = None,
) -> SealedModel:
    """Open the row file in a directory of a file system. Reads its head.

    Args:
        dim: elements of a vector, from the configuration; 0 for that of the file.
        int32_keys: refuse keys outside [0, 2^32).
        checks: checks from `version.json`, by file name.
        share: the share of the rows to load; None for all.
        peers: as of `SealedModel`.

    Raises:
        ModelFileNotFoundError: there is none.
        ModelFileError: it is no row file, cut short, of another version of the format, or of another dimension.
    """
    path = within(place, ROWS_FILE)
    file = open_file(filesystem, path, checks or {})
    content = bytearray(min(PAGE_BYTES, file.size_bytes))
    if content:
        file.read(0, memoryview(content))
    try:
        head = FileHead.unpacked(bytes(content))
        if head.size_bytes != file.size_bytes:
            raise ValueError(f"it has {file.size_bytes:,} bytes, expected {head.size_bytes:,}")
        if head.row_dtype not in ROW_DTYPES or head.dim < 1 or head.width != row_width(head.dim, head.row_dtype):
            raise ValueError(f"got rows of {head.width} words for {head.dim} elements in {head.row_dtype!r}")
        if not head.rows:
            raise ValueError("got no rows, expected at least 1")
        if head.share:
            raise ValueError(f"it has the pages of share {head.share} alone, expected all")
    except (ValueError, TypeError) as error:
        raise ModelFileError(f"opening {path}: {error}; write it again with `hps seal`") from error
    if dim not in (0, head.dim):
        raise ModelFileError(f"opening {path}: got vectors of {head.dim} elements, expected {dim}; is it another table?")
    kernels = layout.split_records, layout.damaged_page, layout.sum_pages, layout.rank_of
    compile_kernels(*kernels, *row_kernels([head.row_dtype]))
    identity = f"rows {head.content or file.version} {head.rows} {head.dim} {head.row_dtype}"
    fingerprint = hashlib.blake2b(identity.encode(), digest_size=16).hexdigest()
    return SealedModel(place, head, with_share(fingerprint, share), int32_keys, file, _OwnRecords(share), peers)


def find_sealed_model(
    place: str,
    dim: int,
    *,
    int32_keys: bool = False,
    sources: ModelSources,
    checks: Mapping[str, FileCheck],
    share: TableShare | None = None,
) -> SealedModel | None:
    """Open the row file of a table, if it is to be read instead of sparse files; None if not.

    A `version.json` that names files of the table decides. Without one, a row file counts alone, or if it was made from the
    sparse files that lie beside it now.
    """
    filesystem, place = sources.locate(place)
    if checks:
        if ROWS_FILE not in checks:
            return None
    elif not filesystem.exists(within(place, ROWS_FILE)):
        return None
    model = open_sealed_model(filesystem, place, dim, int32_keys=int32_keys, checks=checks, share=share, peers=sources.peers)
    if checks or not filesystem.exists(within(place, "key")):
        return model
    try:
        sparse = open_sparse_model(place, model.dim, sources=sources)
    except ModelFileNotFoundError:
        return model
    except ModelFileError:  # the load says so
        return None
    if model.head.source == sparse.fingerprint:
        return model
    _log.warning("%s: its row file was not made from the sparse files beside it, which are read instead; seal it again", place)
    return None


def stored_shape_of(place: str, sources: ModelSources, checks: Mapping[str, FileCheck] | None = None) -> tuple[int, int]:
    """Return the dimension and the number of rows of a table, sealed or not; see `stored_shape`."""
    model = find_sealed_model(place, 0, sources=sources, checks=checks or {})
    return (model.dim, model.rows) if model else stored_shape(place, sources)


def _damaged(path: str, why: str) -> ModelFileError:
    return ModelFileError(f"reading {path}: {why}; copy it again, or write it again with `hps seal`")
