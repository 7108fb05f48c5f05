"""Versions that say only what they change: a delta is the rows of some keys, and the keys that are no more.

The directory of a table in a version that is `delta_of` another one has `key` and `emb_vector` with its changed and new rows,
perhaps none, and may have `deleted`, int64 keys without a header. The table is that of the other version without the deleted
keys, and then with the changed rows: a key that is both deleted and changed is there. If a key occurs twice, the later row
counts, as everywhere. The other version may be a delta, too.

Nothing is ever deleted to make such a table: one pass yields the rows of the oldest version that no later one touches, then
those of each delta that no later one touches. Keys that changes touch are held in memory meanwhile (13 bytes each).
"""

import hashlib
import json
import zlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from hps.databases.base import Database
from hps.errors import ModelFileError
from hps.filesystems.base import FileSystem
from hps.models.files import (
    CHUNK_BYTES,
    SparseModel,
    check_crc32,
    checked_status,
    extended,
    joint_fingerprint,
    open_sparse_model,
)
from hps.models.key_set import KeySet
from hps.models.manifest import FileCheck
from hps.models.read_ahead import read_ahead
from hps.models.sources import ModelSources
from hps.types import FloatArray, KeyArray

Chunks: TypeAlias = Generator[tuple[KeyArray, FloatArray], None, None]

MOST_DELTAS = 64
"""The longest chain. Every link costs a probe for each row of the first version."""


@dataclass(frozen=True, slots=True)
class HeldTable:
    """Where this process may have the rows of a version already. *Immutable.*

    Attributes:
        tag: of its table. In a persistent database nothing else need be said: its load record tells whether the rows count.
        database: a volatile database of this process that holds every row of it, and evicts none; None if there is none.
        fingerprint: of the files that were loaded into `database`.
        unmodified: whether nothing modified them there since; asked before and after they are copied.
    """

    tag: str
    database: Database | None = None
    fingerprint: str = ""
    unmodified: Callable[[], bool] = lambda: False


@dataclass(frozen=True, slots=True)
class TableSource:
    """Where the rows of one table of one version are. *Immutable.*

    Attributes:
        place: directory or URI of its sparse model files.
        checks: what `version.json` says of them, by name.
        base: the same table of the version that they change; None if they are all of it.
        held: where this process may have the table of this version; used when it is a base.
        log_start: what the rows correspond to in the log of updates: the position of the last message that they contain, by
            partition, as `VersionManifest.updates` has it.
    """

    place: str
    checks: Mapping[str, FileCheck] = field(default_factory=dict)
    base: "TableSource | None" = None
    held: HeldTable | None = None
    log_start: Mapping[str, str] = field(default_factory=dict)

    def chain(self) -> "list[TableSource]":
        """The versions that this one is made of, the whole one first."""
        return [*(self.base.chain() if self.base else ()), self]


@dataclass(frozen=True, slots=True)
class DeletedKeys:
    """The file `deleted` of a delta. *Immutable, thread-safe.*"""

    path: str
    version: str
    rows: int
    crc32: str
    filesystem: FileSystem = field(repr=False)

    def chunks(self) -> Iterator[KeyArray]:
        """Yield the keys; each array is overwritten by the next.

        Raises:
            ModelFileError: the file changed, cannot be read, or is not the one that was written.
        """
        buffer, crc = np.empty(min(self.rows, CHUNK_BYTES // 8), np.int64), 0
        for start in range(0, self.rows, max(buffer.size, 1)):
            keys = buffer[: min(buffer.size, self.rows - start)]
            self.filesystem.read_into(self.path, 8 * start, keys.data.cast("B"), self.version)
            crc = zlib.crc32(keys.data.cast("B"), crc)
            yield keys
        check_crc32(self.path, self.crc32, f"{crc:08x}")

    def may_change_unseen(self) -> bool:
        """As `SparseModel.may_change_unseen`."""
        return self.filesystem.is_local and self.filesystem.may_change_unseen(self.path, self.version)


@dataclass(frozen=True, slots=True)
class Delta:
    """What one version changes in a table. *Immutable, thread-safe.*"""

    changed: SparseModel
    deleted: DeletedKeys | None


@dataclass(frozen=True, slots=True)
class DeltaModel:
    """One table of a version that is a delta, with all that it is made of. *Immutable, thread-safe.*

    Attributes:
        base: the files of the version that has all rows.
        deltas: what the versions after it change, the last one's changes last.
        fingerprints: of the base, and of the table after each delta: each covers what comes before.
        held: where this process may have the base, and the table after each delta but the last.
    """

    base: SparseModel
    deltas: tuple[Delta, ...]
    fingerprints: tuple[str, ...]
    held: tuple[HeldTable | None, ...]

    is_local = False  # its files are never compared with what a database holds

    @property
    def place(self) -> str:
        """Of the last delta."""
        return self.deltas[-1].changed.place

    @property
    def fingerprint(self) -> str:
        """Of all files."""
        return self.fingerprints[-1]

    @property
    def rows(self) -> int:
        """Rows of all files: the table has no more."""
        return self.base.rows + sum(delta.changed.rows for delta in self.deltas)

    @property
    def dim(self) -> int:
        return self.base.dim

    @property
    def row_bytes(self) -> int:
        return self.base.row_bytes

    @property
    def size_bytes(self) -> int:
        return self.rows * self.row_bytes

    @property
    def chunk_rows(self) -> int:
        return self.base.chunk_rows

    def may_change_unseen(self) -> bool:
        """As `SparseModel.may_change_unseen`, of any file."""
        files = (self.base, *(one for delta in self.deltas for one in (delta.changed, delta.deleted) if one))
        return any(one.may_change_unseen() for one in files)

    def verify(self) -> None:
        """As `SparseModel.verify`, for all files but those of deleted keys, which are read whole before anything else."""
        for model in (self.base, *(delta.changed for delta in self.deltas)):
            model.verify()


def open_table_files(
    source: str | TableSource, dim: int, *, int32_keys: bool = False, sources: ModelSources
) -> SparseModel | DeltaModel:
    """Find the files of a table and of all versions that it is made of, and check their sizes. No row is read.

    Raises:
        ModelFileNotFoundError: files of the version, or of one that it changes, do not exist.
        ModelFileError: as of `open_sparse_model`.
    """
    if isinstance(source, str):
        source = TableSource(source)
    first, *rest = source.chain()
    base = open_sparse_model(first.place, dim, int32_keys=int32_keys, sources=sources, checks=first.checks)
    if not rest:
        return base
    deltas, fingerprints = [], [base.fingerprint]
    for one in rest:
        rows = open_sparse_model(one.place, dim, int32_keys=int32_keys, sources=sources, checks=one.checks, delta=True)
        deltas.append(Delta(rows, _open_deleted(one, sources)))
        deleted = deltas[-1].deleted
        fingerprints.append(_digest(fingerprints[-1], rows.fingerprint, deleted.version if deleted else ""))
    return DeltaModel(base, tuple(deltas), tuple(fingerprints), tuple(one.held for one in (first, *rest[:-1])))


def fingerprint_of(tables: Sequence[tuple[str | TableSource, int]], sources: ModelSources) -> str:
    """Tell one state of a version's files from any other by their sizes and versions alone: no row is read.

    Args:
        tables: where each table's rows are, and its dimension.
        sources: the file systems.

    Returns:
        32 hexadecimal digits: the same until a file is replaced, of the version or of one that it changes; equal to the
        `joint_fingerprint` of the tables' load reports.

    Raises:
        ModelFileError: as of `open_table_files`.
    """
    return joint_fingerprint(open_table_files(source, dim, sources=sources).fingerprint for source, dim in tables)


@dataclass(frozen=True, slots=True)
class BaseRows:
    """The rows of a base that this process has. *Used once.*

    Attributes:
        level: how many deltas they have seen.
        chunks: the rows.
        checksum: of them; empty if it is not known.
        still_counts: tells, once all rows were taken, whether they are what the base's files say.
    """

    level: int
    chunks: Iterator[tuple[KeyArray, FloatArray]]
    checksum: str
    still_counts: Callable[[], bool]


class Merge:
    """One pass over the rows of a version that is a delta. *One thread, one use.*

    Args:
        model: its files.
        base: the rows of a version that it is made of; without them its files are read.

    Attributes:
        checksum: once all rows were taken, identifies the content of all files, wherever they are; empty if it is unknown.
    """

    def __init__(self, model: DeltaModel, base: BaseRows | None = None) -> None:
        self._model, self._base = model, base
        self._last_read = ""
        self.checksum = base.checksum if base else ""

    def chunks(self) -> Chunks:
        """Yield the rows: if a key comes twice, the later one counts. The arrays may be overwritten by the next.

        Raises:
            ModelFileError: files changed, cannot be read, or are not those that were written.
        """
        deltas = self._model.deltas[self._base.level if self._base else 0 :]
        touched, of_deleted = zip(*map(_touched, deltas), strict=True)
        if self._base:
            yield from _without(touched, self._base.chunks)
        else:
            yield from _without(touched, self._read(self._model.base))
            self.checksum = self._last_read
        for i, delta in enumerate(deltas):
            yield from _without(touched[i + 1 :], self._read(delta.changed))
            if self.checksum:
                self.checksum = _digest(self.checksum, of_deleted[i], self._last_read)[:16]

    def _read(self, model: SparseModel) -> Iterator[tuple[KeyArray, FloatArray]]:
        step, checksum = model.chunk_rows, 16 * "0"
        with closing(read_ahead(model, ((low, min(low + step, model.rows)) for low in range(0, model.rows, step)))) as chunks:
            for _, keys, vectors in chunks:
                checksum = extended(checksum, keys, vectors)
                yield keys, vectors
        model.check_content(checksum)
        self._last_read = checksum


def first_rows(chunks: Chunks, rows: int) -> Chunks:
    """Yield the first `rows` rows, and those of the others whose keys stand in them: of a key's rows the last counts."""
    taken, left = KeySet(rows), rows
    for keys, vectors in chunks:
        if left:
            taken.enter(keys[:left])
            yield keys[:left], vectors[:left]
        later = taken.contains(keys[left:])
        if later.any():
            yield keys[left:][later], vectors[left:][later]
        left = max(left - keys.size, 0)


def _touched(delta: Delta) -> tuple[KeySet, str]:
    """The keys that a delta changes or deletes, and the checksum of those that it deletes."""
    changed, deleted = delta.changed, delta.deleted
    keys = KeySet(changed.rows + (deleted.rows if deleted else 0))
    buffer = np.empty(min(changed.rows, CHUNK_BYTES // 8), np.int64)
    for start in range(0, changed.rows, max(buffer.size, 1)):
        chunk = buffer[: min(buffer.size, changed.rows - start)]
        changed.read_keys(start, chunk)
        keys.enter(chunk)
    crc = 0
    for chunk in deleted.chunks() if deleted else ():
        keys.enter(chunk)
        crc = zlib.crc32(chunk.data.cast("B"), crc)
    return keys, f"{crc:08x}"


def _without(touched: Sequence[KeySet], chunks: Iterator[tuple[KeyArray, FloatArray]]) -> Iterator[tuple[KeyArray, FloatArray]]:
    """Yield the rows whose keys are in none of the sets."""
    for keys, vectors in chunks:
        gone = np.zeros(keys.size, np.bool_)
        for one in touched:
            gone |= one.contains(keys)
        if not gone.any():
            yield keys, vectors
        elif not gone.all():
            yield keys[~gone], vectors[~gone]


def _open_deleted(source: TableSource, sources: ModelSources) -> DeletedKeys | None:
    filesystem, place = sources.locate(source.place)
    path = f"{place.rstrip('/')}/deleted"
    if "deleted" not in source.checks and not filesystem.exists(path):
        return None
    status = checked_status(filesystem, path, source.checks)
    if status.size_bytes % 8:
        raise ModelFileError(f"opening {path}: got {status.size_bytes} bytes, expected 8 (an int64) for every key")
    crc32 = source.checks["deleted"].crc32 if "deleted" in source.checks else ""
    return DeletedKeys(path, status.version, status.size_bytes // 8, crc32, filesystem)


def _digest(*parts: str) -> str:
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()
