"""Seals model versions: writes the row file of each table beside its sparse files, or in place of them.

The rows are sorted by hash in runs, which are written to scratch files when memory is short, and merged in one walk. A local
file appears complete under its name; elsewhere it is written to scratch space first, then uploaded. `version.json`, which makes
servers read it, is replaced last.
"""

import os
import posixpath
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from hps.errors import InvalidInputError, ModelFileError, ModelFileNotFoundError
from hps.filesystems.base import FileSystem
from hps.filesystems.local import local_path
from hps.ground.kernels.numba_kernels import compile_kernels
from hps.ground.memory.capacity import available_memory
from hps.ground.progress import NoProgress, Progress
from hps.ground.rows import encode, row_kernels
from hps.models.deltas import DeltaModel, TableSource, open_table_files
from hps.models.differences import rows_of
from hps.models.files import SparseModel, stored_shape
from hps.models.manifest import MANIFEST, VERSION, FileCheck, VersionManifest, read_json, read_manifest, within, write_file
from hps.models.repository import MODEL_ENTRY, VersionFiles, network_of, table_sources, version_files
from hps.models.sealed import ROWS_FILE, SealedModel, find_sealed_model, open_sealed_model
from hps.models.sources import ModelSources
from hps.stores.row_files.layout import RowFacts
from hps.stores.row_files.row_file import RowFile, read_kernels
from hps.stores.row_files.writer import Run, sorted_run, write_kernels, write_row_file
from hps.types import ROW_DTYPES, FloatArray, KeyArray, row_width

_SPARSE: Final = ("key", "emb_vector", "meta", "deleted")
_RUN_BYTES: Final = 128 << 20
_LEAST_MEMORY: Final = 256 << 20
_MEMORY_SHARE: Final = 3  # of free memory, for runs
_UPLOAD_BYTES: Final = 8 << 20


class SealedTable(NamedTuple):
    """A table that was sealed."""

    place: str  # path or URI of its row file
    rows: int
    dim: int
    row_dtype: str
    size_bytes: int
    content: str  # fingerprint of the file's content


def seal_version(
    directory: str | os.PathLike[str],
    *,
    row_dtype: str | None = None,
    replace: bool = False,
    scratch: str | os.PathLike[str] | None = None,
    sources: ModelSources | None = None,
    progress: Progress | None = None,
) -> list[SealedTable]:
    """Write a row file for each table of a version, or of one table. Servers then take the file instead of loading rows.

    A delta is merged with the versions that it changes, so its files have all rows.

    Args:
        directory: path or URI of `<model>/<version>`, of a directory with tables, or of one table.
        row_dtype: how rows are stored; a server takes files of its table's `row_dtype` without a copy. By default as the
            `model.json` beside the version says, else float32.
        replace: remove the sparse files afterwards. `hps` of before row files cannot read such a version.
        scratch: directory for runs and for files to upload, by default beside a local target, else the system's.
        sources: file systems to use; by default new ones with default settings.
        progress: receives the number of rows read.

    Raises:
        ModelFileError: there is no table, files are missing or damaged, or cannot be written.
        InvalidInputError: `row_dtype` is unknown, or cannot hold a row.
        DatabaseError: a local file cannot be written.
    """
    sources, progress = sources or ModelSources(), progress or NoProgress()
    filesystem, place = sources.locate(os.fspath(directory))
    if row_dtype not in (None, *ROW_DTYPES):
        raise InvalidInputError(f"sealing {place}: got row_dtype {row_dtype!r}, expected one of: {', '.join(ROW_DTYPES)}")
    compile_kernels(*read_kernels(), *write_kernels(), *row_kernels(ROW_DTYPES))
    manifest = read_manifest(place, sources)
    names = _tables(filesystem, place, manifest)
    parent, _, version = place.rstrip("/").rpartition("/")

    def find(number: str) -> VersionFiles | None:
        at = within(parent, number)
        if number != version and not filesystem.exists(at):
            return None
        return version_files(number, at, names, sources)

    if manifest is not None and VERSION.fullmatch(version):
        found = table_sources(version, find)
    else:
        found = tuple(TableSource(_below(place, name), manifest.of_table(name) if manifest else {}) for name in names)
    formats = _formats(filesystem, parent, names)
    sealed, checks = [], {}
    for name, source in zip(names, found, strict=True):
        table = _seal_table(
            filesystem, source, row_dtype or formats.get(name, "float32"), Path(scratch) if scratch else None, sources, progress
        )
        sealed.append(table[0])
        checks[posixpath.normpath(f"{name}/{ROWS_FILE}")] = table[1]
    if manifest is not None:
        write_file(
            filesystem, within(place, MANIFEST), _described(manifest, names, checks, found, find, version, replace=replace)
        )
    if replace:
        for name in names:
            for file in _SPARSE:  # `key` first: without it, nobody takes the others for a table
                filesystem.delete(within(_below(place, name), file))
    return sealed


def _tables(filesystem: FileSystem, place: str, manifest: VersionManifest | None) -> list[str]:
    """List the directories of tables, relative to a version."""
    wanted = ("key", ROWS_FILE)
    if manifest is not None:
        paths = [posixpath.split(posixpath.normpath(path)) for path in manifest.files]
        names = list(dict.fromkeys(directory or "." for directory, name in paths if name in wanted))
        if names:
            return names
    if any(filesystem.exists(within(place, name)) for name in wanted):
        return ["."]
    below = [name for name in sorted(filesystem.directories(place)) if not name.startswith((".", "_"))]
    names = [name for name in below if any(filesystem.exists(within(within(place, name), file)) for file in wanted)]
    if not names:
        raise ModelFileNotFoundError(
            f"sealing {place}: it has no table, expected the files key and emb_vector, or directories with them"
        )
    return names


def _formats(filesystem: FileSystem, model: str, names: list[str]) -> Mapping[str, str]:
    """Return the `row_dtype` of each table, by its directory, from the `model.json` beside a version."""
    try:
        entry = read_json(filesystem, within(model, MODEL_ENTRY)) if model else None
    except ModelFileError:
        return {}
    row_dtype, files = (entry or {}).get("row_dtype", "float32"), (entry or {}).get("sparse_files", [])
    each = row_dtype if isinstance(row_dtype, list) else [row_dtype] * len(files)
    known = dict(zip((posixpath.normpath(str(file)) for file in files), each, strict=False))
    return {name: known[name] for name in names if known.get(name) in ROW_DTYPES}


def _seal_table(
    filesystem: FileSystem, source: TableSource, row_dtype: str, scratch: Path | None, sources: ModelSources, progress: Progress
) -> tuple[SealedTable, FileCheck]:
    place = sources.locate(source.place)[1]
    is_sparse = filesystem.exists(within(place, "key"))
    try:
        there = find_sealed_model(place, 0, sources=sources, checks=source.checks)
    except ModelFileError:
        if not is_sparse:
            raise
        there = None
    if there is not None and there.head.row_dtype == row_dtype:
        return _sealed(there), source.checks.get(ROWS_FILE) or FileCheck(size_bytes=there.size_bytes)
    if is_sparse:  # not from a file that may be damaged, or whose rows are rounded
        checks = {name: check for name, check in source.checks.items() if name != ROWS_FILE}
        source = TableSource(source.place, checks or {"key": _size(filesystem, within(place, "key"))}, source.base)
    model = open_table_files(source, _dim(source, sources), sources=sources)
    with ExitStack() as stack:
        local = Path(local_path(place)) if filesystem.is_local else None
        room = scratch or local
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=".sealing.", dir=room)))
        target = local / ROWS_FILE if local else directory / ROWS_FILE
        _write(target, model, row_dtype, directory, progress)
        crc = _upload(filesystem, within(place, ROWS_FILE), target, copy=local is None)
    check = FileCheck(size_bytes=filesystem.status(within(place, ROWS_FILE)).size_bytes, crc32=f"{crc:08x}")
    return _sealed(open_sealed_model(filesystem, place, model.dim, checks={ROWS_FILE: check})), check


def _sealed(model: SealedModel) -> SealedTable:
    head = model.head
    return SealedTable(model.file.path, head.rows, head.dim, head.row_dtype, head.size_bytes, head.content)


def _size(filesystem: FileSystem, path: str) -> FileCheck:
    return FileCheck(size_bytes=filesystem.status(path).size_bytes)


def _dim(source: TableSource, sources: ModelSources) -> int:
    """Return the dimension of a table, from the last version that has one."""
    chain = source.chain()
    for version in reversed(chain):
        if (model := find_sealed_model(version.place, 0, sources=sources, checks=version.checks)) is not None:
            return model.dim
    return stored_shape(chain[0].place, sources)[0]


def _write(
    target: Path, model: SparseModel | SealedModel | DeltaModel, row_dtype: str, scratch: Path, progress: Progress
) -> None:
    """Write the row file of a table."""
    rows = _Runs(model.dim, row_dtype, scratch, model.place)
    progress.start(model.place, model.rows, model.size_bytes)
    for keys, vectors in rows_of(model):
        rows.add(keys, vectors)
        progress.advance(model.place, keys.size)
    if model.is_open_for_writing():
        raise ModelFileError(f"sealing {model.place}: a process has its files open for writing; seal it when it is done")
    model.verify()
    rows.write(target, model.fingerprint)
    progress.finish(model.place)


class _Runs:
    """Gathers rows into sorted runs, in memory or in scratch files. *One thread.*"""

    def __init__(self, dim: int, row_dtype: str, scratch: Path, place: str) -> None:
        self._dim, self._row_dtype, self._scratch, self._place = dim, row_dtype, scratch, place
        self._width = row_width(dim, row_dtype)
        self._runs: list[Run] = []  # the latest first
        self._spilled: list[Run] = []  # also
        self._most_bytes = max(_LEAST_MEMORY, available_memory()[0] // _MEMORY_SHARE)
        capacity = max(1, _RUN_BYTES // (8 + 4 * self._width))
        self._keys, self._rows = np.empty(capacity, np.int64), np.empty((capacity, self._width), np.float32)
        self._gathered = 0
        self._nonfinite, self._least, self._greatest = 0, (1 << 63) - 1, -(1 << 63)

    def add(
        self,
        keys: KeyArray,  # (n,)
        vectors: FloatArray,  # (n, dim)
    ) -> None:
        """Copy rows; of a repeated key the later one counts."""
        if not keys.size:
            return
        elements = vectors.reshape(-1)
        with np.errstate(over="ignore", invalid="ignore"):
            if not np.isfinite(np.dot(elements, elements)):
                self._nonfinite += int(np.count_nonzero(~np.isfinite(vectors).all(axis=1)))
        self._least, self._greatest = min(self._least, int(keys.min())), max(self._greatest, int(keys.max()))
        rows = encode(f"sealing {self._place}", np.ascontiguousarray(vectors), self._row_dtype, keys)
        for start, count in self._pieces(keys.size):
            place = slice(self._gathered, self._gathered + count)
            self._keys[place], self._rows[place] = keys[start : start + count], rows[start : start + count]
            self._gathered += count
            if self._gathered == self._keys.size:
                self._sort()

    def _pieces(self, size: int) -> Iterator[tuple[int, int]]:
        start = 0
        while start < size:
            count = min(size - start, self._keys.size - self._gathered)
            yield start, count
            start += count

    def _sort(self) -> None:
        if not self._gathered:
            return
        self._runs.insert(0, sorted_run(self._keys[: self._gathered], self._rows[: self._gathered]))
        self._gathered = 0
        if sum(run.records.nbytes for run in self._runs) + _RUN_BYTES > self._most_bytes:
            path = self._scratch / f"run-{len(self._spilled)}"
            write_row_file(path, "", self._width, self._runs)
            self._spilled.insert(0, Run(RowFile(path).records))
            self._runs.clear()

    def write(self, target: Path, source: str) -> None:
        """Merge all rows into a file."""
        self._sort()
        facts = RowFacts(self._row_dtype, self._dim, self._nonfinite, self._least, self._greatest)
        write_row_file(target, "", self._width, [*self._runs, *self._spilled], source=source, facts=facts)


def _upload(filesystem: FileSystem, path: str, source: Path, *, copy: bool) -> int:
    """Write a local file under a path; return its CRC-32. Without `copy` only that."""
    writer, crc = filesystem.create(path) if copy else None, 0
    try:
        with open(source, "rb", buffering=0) as file:
            buffer = memoryview(bytearray(_UPLOAD_BYTES))
            while count := file.readinto(buffer):
                crc = zlib.crc32(buffer[:count], crc)
                if writer:
                    writer.write(buffer[:count])
        if writer:
            writer.commit()
    except OSError as error:
        if isinstance(error, ModelFileError):
            raise
        raise ModelFileError(f"reading {source}: {error}") from error
    finally:
        if writer:
            writer.abort()
    return crc


def _described(
    manifest: VersionManifest,
    names: list[str],
    checks: Mapping[str, FileCheck],
    found: tuple[TableSource, ...],
    find: Callable[[str], VersionFiles | None],
    version: str,
    *,
    replace: bool,
) -> bytes:
    """Return the `version.json` of a sealed version."""
    files = {**{posixpath.normpath(path): check for path, check in manifest.files.items()}, **checks}
    delta_of, updates = manifest.delta_of, dict(manifest.updates)
    if replace:
        gone = {posixpath.normpath(f"{name}/{file}") for name in names for file in _SPARSE}
        files = {path: check for path, check in files.items() if path not in gone}
        if delta_of and manifest.dense is None and network_of(version, find) is not None:
            pass  # its network is that of the version that it changes
        elif delta_of:
            delta_of = ""
            updates = {name: source.log_start for name, source in zip(names, found, strict=True) if source.log_start}
    return manifest.model_copy(update={"files": files, "delta_of": delta_of, "updates": updates}).encoded()


def _below(place: str, name: str) -> str:
    return place if name == "." else within(place, name)
