"""Brings embedding tables of other formats into sparse model files, at any path or URI, in chunks."""

import dataclasses
import logging
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from hps.errors import InvalidInputError, ModelFileError, ModelFileNotFoundError
from hps.filesystems.local import local_path
from hps.formats.base import FILES, ArrayInfo, ArraySource
from hps.formats.conversion import check_key_dtype, to_keys, to_vectors, vector_dtype
from hps.formats.selection import Selection, select
from hps.models.files import CHUNK_BYTES
from hps.models.sources import ModelSources
from hps.models.writer import write_sparse_model
from hps.progress import Progress
from hps.registry import implementation, is_registered, names
from hps.types import FloatArray, KeyArray

FORMATS = {
    **{".npy": "npy", ".npz": "npz", ".safetensors": "safetensors"},
    **{".pt": "torch", ".pth": "torch", ".bin": "torch"},
    **{".parquet": "parquet", ".pq": "parquet"},
}
"""Formats by the end of a file's name."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ImportReport:
    """What an import wrote. *Immutable.*

    Attributes:
        destination: as it was given.
        rows: how many vectors.
        dim: float32 elements of each: the table's `embedding_vecsize_per_table`.
        keys: name of the array that the keys came from, or None where they are row numbers.
        vectors: name of the array that the vectors came from.
        dtype: of the vectors in the source.
        seconds: how long it took.
    """

    destination: str
    rows: int
    dim: int
    keys: str | None
    vectors: str
    dtype: str
    seconds: float

    @property
    def size_bytes(self) -> int:
        """Bytes of both files."""
        return self.rows * (8 + 4 * self.dim)


def import_model(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    keys: str | None = None,
    vectors: str | None = None,
    file_format: str | None = None,
    dtype: str | None = None,
    first_key: int | None = None,
    overwrite: bool = False,
    sources: ModelSources | None = None,
    progress: Progress | None = None,
) -> ImportReport:
    """Write the table of a file of another format as sparse model files.

    About 16 MB of it are in memory at a time, whatever its size. The destination appears whole or not at all, as
    `write_sparse_model` says. Keys may stand twice: the databases then keep the later row. NaN and infinite elements are kept.

    Args:
        source: a local path, of a file or of a directory of .npy or Parquet files.
        destination: a path or URI, as in the `sparse_files` of a configuration.
        keys: name of the array of keys; by default one that is called `keys`, `key`, `ids` or `id`. With a .npy file also
            the path of another.
        vectors: name of the array of vectors; by default one that is called `vectors`, `embeddings`, `emb_vector` or the
            like, or the only (n, dim) array of floats.
        file_format: npy, npz, safetensors, torch or parquet; by default what the end of the name says.
        dtype: what the elements of the vectors are, where the file has only bits of them (NumPy has no bfloat16).
        first_key: the keys are row numbers from this one on. The default, 0, is for formats that commonly have no keys
            (torch, safetensors) and holds where no array of keys is found.
        overwrite: replace a sparse model that is there.
        sources: the file systems to write to; new ones, with their default settings, where they are not given.
        progress: is told how far the import is.

    Raises:
        ModelFileError: the source cannot be read as a table, changed meanwhile, or the destination refused.
        InvalidInputError: the arguments do not fit each other; `InvalidDtypeError`: an array has a dtype that cannot be taken.
        MissingDependencyError: the format's package is not installed.
    """
    started, target = time.monotonic(), os.fspath(destination)
    with _open(source, file_format) as opened:
        selection = select(opened, keys, vectors, first_key)
        if selection.keys is not None:
            check_key_dtype(opened.path, selection.keys)
        kind = vector_dtype(opened.path, selection.vectors, dtype)
        if kind != "float32":
            _log.info("%s: converting %s vectors to float32.", opened.path, kind)
        report = ImportReport(
            target,
            selection.rows,
            selection.dim,
            selection.keys.name if selection.keys else None,
            selection.vectors.name,
            kind,
            0.0,
        )
        if progress:
            progress.start(target, report.rows, report.size_bytes)
        write_sparse_model(target, _rows(opened, selection, kind, target, progress), overwrite=overwrite, sources=sources)
        if progress:
            progress.finish(target)
    return dataclasses.replace(report, seconds=time.monotonic() - started)


def list_arrays(source: str | os.PathLike[str], *, file_format: str | None = None) -> list[ArrayInfo]:
    """Name, shape and dtype of every array that a file holds; no array is read.

    Raises:
        ModelFileError: it cannot be read.
        MissingDependencyError: the format's package is not installed.
    """
    with _open(source, file_format) as opened:
        return opened.arrays()


def _open(source: str | os.PathLike[str], file_format: str | None) -> ArraySource:
    place = os.fspath(source)
    filesystem, _ = ModelSources().locate(place)
    if not filesystem.is_local:
        raise InvalidInputError(f"importing {place}: got a remote source, wanted a local path; copy it here first")
    path = local_path(place)
    if not os.path.exists(path):
        raise ModelFileNotFoundError(f"importing {path}: there is no such file or directory")
    opened: ArraySource = implementation("format", _format_of(path, file_format))(path)
    return opened


def _format_of(path: str, file_format: str | None) -> str:
    known = ", ".join(names("format"))
    if file_format is not None:
        if not is_registered("format", file_format):
            raise InvalidInputError(f"importing {path}: got format {file_format!r}, wanted one of: {known}")
        return file_format
    if os.path.isdir(path):
        found = {FORMATS[end] for name in FILES.list(path) if (end := os.path.splitext(name)[1]) in (".npy", ".parquet", ".pq")}
        if len(found) == 1:
            return found.pop()
        got = "both .npy and Parquet files; say which with --format" if found else "a directory without them"
        raise ModelFileError(f"importing {path}: wanted a directory of .npy or of .parquet files, got {got}")
    end = os.path.splitext(path)[1].lower()
    if end not in FORMATS:
        raise ModelFileError(
            f"importing {path}: got a name that ends in {end!r}, wanted one of: {', '.join(FORMATS)}; or say the format with "
            f"--format: {known}"
        )
    return FORMATS[end]


def _rows(
    source: ArraySource, selection: Selection, kind: str, tag: str, progress: Progress | None
) -> Iterator[tuple[KeyArray, FloatArray]]:
    """The whole table, converted. Ends with an error if the files are no longer those that were opened."""
    name = selection.keys.name if selection.keys else None
    row, step = 0, max(1, CHUNK_BYTES // (8 + 4 * selection.dim))
    for key_block, block in source.chunks(name, selection.vectors.name, step):
        vectors = to_vectors(source.path, selection.vectors.name, kind, block, row)
        if key_block is None:
            first = selection.first_key + row
            keys = np.arange(first, first + len(vectors), dtype=np.int64)
        else:
            keys = to_keys(source.path, str(name), key_block, row)
        yield keys, vectors
        row += keys.size
        if progress:
            progress.advance(tag, keys.size)
    if row != selection.rows:
        raise ModelFileError(f"importing {source.path}: got {row} rows, wanted {selection.rows}; it changed meanwhile")
    source.verify()
