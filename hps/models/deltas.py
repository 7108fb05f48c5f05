"""Reads deltas: versions that consist of changed rows and deleted keys.

The directory of a table in a version that is `delta_of` another one has `key` and `emb_vector` with its changed and new rows,
perhaps none, and may have `deleted`, int64 keys without a header. The table is that of the other version without the deleted
keys, then with the changed rows; so a key that is both deleted and changed is present. Of repeated keys the later row counts.
The other version may be a delta, too.

No row is deleted to read such a table: one pass yields the rows of the oldest version that no later version touches, then those
of each delta that no later one touches. It needs memory for the touched keys (13 bytes each).
"""

import hashlib
import json
import zlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

import numpy as np

from hps.errors import CapacityError, ModelFileError
from hps.ground.key_sets import KeySet
from hps.ground.memory.capacity import available_memory
from hps.ground.shares import TableShare, with_share
from hps.models.files import OpenedFile, SparseModel, open_file, open_sparse_model
from hps.models.loading.read_ahead import read_rows
from hps.models.manifest import FileCheck, within
from hps.models.sealed import SealedModel, find_sealed_model
from hps.models.sources import ModelSources
from hps.stores.base import Database
from hps.types import FloatArray, KeyArray, TableSpec

_KEY_BYTES = 13  # of a `KeySet`, most of them

Chunks: TypeAlias = Generator[tuple[KeyArray, FloatArray], None, None]

MOST_DELTAS = 64  # each costs a probe for every row of the first version
"""Longest chain of deltas."""


@dataclass(frozen=True, slots=True)
class ResidentTable:
    """A table in this process that may have the rows of a version. *Immutable.*

    Attributes:
        table: the table; enough for a persistent database, whose load record tells if the rows are valid.
        database: a volatile database with every row that evicts none, if any.
        fingerprint: identifies the files loaded into `database`.
        unmodified: returns True if `database` has no online writes; called before and after the rows are copied.
    """

    table: TableSpec
    database: Database | None = None
    fingerprint: str = ""
    unmodified: Callable[[], bool] = lambda: False


@dataclass(frozen=True, slots=True)
class TableSource:
    """The source of one table of one version. *Immutable.*

    Attributes:
        place: directory or URI of its sparse model files.
        checks: checks from `version.json`, by file name.
        base: the same table of the version that the files change; None for a complete table.
        resident: the table of this version in this process, if any; used if it is a base.
        log_start: position in the log of updates of the last message that the rows contain, by partition, as in
            `VersionManifest.updates`.
    """

    place: str
    checks: Mapping[str, FileCheck] = field(default_factory=dict)
    base: "TableSource | None" = None
    resident: ResidentTable | None = None
    log_start: Mapping[str, str] = field(default_factory=dict)

    def chain(self) -> "list[TableSource]":
        """Return the versions that make up this one, the complete one first."""
        return [*(self.base.chain() if self.base else ()), self]


@dataclass(frozen=True, slots=True)
class Delta:
    """The changes of one version to a table. *Immutable, thread-safe.*"""

    changed: SparseModel
    deleted: OpenedFile | None


@dataclass(frozen=True, slots=True)
class DeltaModel:
    """One table of a delta, with all versions that it consists of. *Immutable, thread-safe.*

    Attributes:
        base: files of the version with all rows.
        deltas: changes of the later versions, in order.
        fingerprints: of the base, and of the table after each delta; each covers the versions before it.
        resident: in this process, the base, and the table after each delta but the last.
    """

    base: SparseModel | SealedModel
    deltas: tuple[Delta, ...]
    fingerprints: tuple[str, ...]
    resident: tuple[ResidentTable | None, ...]

    @property
    def place(self) -> str:
        """Directory of the last delta."""
        return self.deltas[-1].changed.place

    @property
    def fingerprint(self) -> str:
        return self.fingerprints[-1]

    @property
    def rows(self) -> int:
        """Rows of all files; an upper bound for the table."""
        return self.base.rows + sum(delta.changed.rows for delta in self.deltas)

    @property
    def share(self) -> TableShare | None:
        """The share of all rows, but of a sealed base, which has no others."""
        return self.deltas[-1].changed.share

    @property
    def own_rows(self) -> int:
        """As `SparseModel.own_rows`; an upper bound."""
        return self.base.own_rows + sum(delta.changed.own_rows for delta in self.deltas)

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

    def is_open_for_writing(self) -> bool:
        """As `OpenedFile.is_open_for_writing`, of any file."""
        files = (self.base, *(file for delta in self.deltas for file in (delta.changed, delta.deleted) if file))
        return any(file.is_open_for_writing() for file in files)

    def verify(self) -> None:
        """As `SparseModel.verify`, for all files but those of deleted keys, which are read completely first."""
        for model in (self.base, *(delta.changed for delta in self.deltas)):
            model.verify()


def open_table_files(
    source: str | TableSource,
    dim: int,
    *,
    int32_keys: bool = False,
    sources: ModelSources,
    share: TableShare | None = None,
) -> SparseModel | SealedModel | DeltaModel:
    """Find the files of a table and of all its versions, and check their sizes. No row is read.

    The rows of the last version that is sealed are in its row file; earlier versions are not needed then.

    Args:
        share: the share of the rows to load; None for all.

    Raises:
        ModelFileNotFoundError: files of the version, or of one that it changes, do not exist.
        ModelFileError: as of `open_sparse_model`.
    """
    if isinstance(source, str):
        source = TableSource(source)
    open_files = partial(open_sparse_model, dim=dim, int32_keys=int32_keys, sources=sources, share=share)
    chain = source.chain()
    base: SparseModel | SealedModel | None = None
    while base is None and chain:
        version = chain.pop()
        base = find_sealed_model(version.place, dim, int32_keys=int32_keys, sources=sources, checks=version.checks, share=share)
    chain = source.chain()[len(chain) :] if base else source.chain()
    first, *rest = chain
    base = base or open_files(first.place, checks=first.checks)
    if not rest:
        return base
    deltas, fingerprints = [], [base.fingerprint]
    for version in rest:
        rows = open_files(version.place, checks=version.checks, delta=True)
        deltas.append(Delta(rows, _open_deleted(version, sources)))
        deleted = deltas[-1].deleted
        digest = _digest(fingerprints[-1], rows.fingerprint, deleted.version if deleted else "")
        fingerprints.append(with_share(digest, share))
    return DeltaModel(base, tuple(deltas), tuple(fingerprints), tuple(version.resident for version in (first, *rest[:-1])))


def fingerprints_of(
    tables: Sequence[tuple[str | TableSource, int]], sources: ModelSources, share: TableShare | None = None
) -> tuple[str, ...]:
    """Identify the state of a version's files by their sizes and versions. No row is read.

    Returns:
        32 hexadecimal digits for each table, unchanged until a file of the version, or of a base, is replaced; and the share.

    Raises:
        ModelFileError: as of `open_table_files`.
    """
    return tuple(open_table_files(source, dim, sources=sources, share=share).fingerprint for source, dim in tables)


@dataclass(frozen=True, slots=True)
class BaseRows:
    """The rows of a base in this process. *Immutable.*

    Attributes:
        level: number of deltas that they include.
        chunks: reads them.
        tag: the table that has them, in the database to be filled; empty if another one does.
        checksum: checksum of the rows; empty if unknown.
        is_current: returns True, after the last chunk, if the rows are still those of the base's files.
    """

    level: int
    chunks: Callable[[], Iterator[tuple[KeyArray, FloatArray]]]
    checksum: str
    is_current: Callable[[], bool]
    tag: str = ""


class Merge:
    """One pass over the rows of a delta. *One thread, one use.*

    Args:
        base: rows of a version that it is based on; by default, that version's files are read.

    Attributes:
        checksum: after the last chunk, identifies the content of all files independently of their place; empty if unknown.
    """

    def __init__(self, model: DeltaModel, base: BaseRows | None = None) -> None:
        self._model, self._base = model, base
        self._last_read = ""
        self.checksum = base.checksum if base else ""

    @property
    def rows_changed(self) -> int:
        """Rows of `changes`, deleted ones included."""
        deltas = self._model.deltas[self._base.level if self._base else 0 :]
        return sum(delta.changed.rows + (delta.deleted.size_bytes // 8 if delta.deleted else 0) for delta in deltas)

    def chunks(self) -> Chunks:
        """Yield the rows; of repeated keys the later row counts. The next chunk may overwrite the arrays.

        Raises:
            ModelFileError: files changed, cannot be read, or are not those that were written.
        """
        deltas = self._model.deltas[self._base.level if self._base else 0 :]
        touched, of_deleted = zip(*map(_touched, deltas), strict=True)
        if self._base:
            yield from _without(touched, self._base.chunks())
        else:
            yield from _without(touched, self._read(self._model.base))
            self.checksum = self._last_read
        for i, delta in enumerate(deltas):
            yield from _without(touched[i + 1 :], self._read(delta.changed))
            if self.checksum:
                self.checksum = _digest(self.checksum, of_deleted[i], self._last_read)[:16]

    def changes(self) -> Iterator[tuple[KeyArray, FloatArray | None]]:
        """Yield what the deltas change in the rows of `base`, instead of `chunks`: deleted keys without vectors, and changed
        rows, of which the later count. The next chunk may overwrite the arrays.

        Raises:
            ModelFileError: as of `chunks`.
        """
        for delta in self._model.deltas[self._base.level if self._base else 0 :]:
            crc = 0
            for _, keys in delta.deleted.key_chunks() if delta.deleted else ():
                crc = zlib.crc32(keys.data.cast("B"), crc)
                yield keys, None
            if delta.deleted:
                delta.deleted.check_content(f"{crc:08x}")
            yield from self._read(delta.changed)
            if self.checksum:
                self.checksum = _digest(self.checksum, f"{crc:08x}", self._last_read)[:16]

    def _read(self, model: SparseModel | SealedModel) -> Iterator[tuple[KeyArray, FloatArray]]:
        self._last_read = yield from read_rows(model)


def first_rows(chunks: Chunks, rows: int) -> Chunks:
    """Yield the first `rows` rows, and later rows with the same keys, since the last row of a key counts."""
    yielded, left = KeySet(rows), rows
    for keys, vectors in chunks:
        if left:
            yielded.add(keys[:left])
            yield keys[:left], vectors[:left]
        later = yielded.contains(keys[left:])
        if later.any():
            yield keys[left:][later], vectors[left:][later]
        left = max(left - keys.size, 0)


def key_set(count: int, doing: str, instead: str) -> KeySet:
    """Make a set for so many keys.

    Raises:
        CapacityError: there is no memory for it; the message says `doing` and `instead`.
    """
    if _KEY_BYTES * count > (free := available_memory()[0]):
        raise CapacityError(
            f"{doing}: {count} keys take {_KEY_BYTES * count:,} bytes of memory, and {free:,} are free; {instead}"
        )
    return KeySet(count)


def _touched(delta: Delta) -> tuple[KeySet, str]:
    """Read the keys that a delta changes or deletes, and the checksum of the deleted ones."""
    deleted, crc = delta.deleted, 0
    count = delta.changed.rows + (deleted.size_bytes // 8 if deleted else 0)
    keys = key_set(count, f"reading the keys that {delta.changed.place} changes or deletes", "write a version with all rows")
    for _, chunk in delta.changed.keys.key_chunks():
        keys.add(chunk)
    for _, chunk in deleted.key_chunks() if deleted else ():
        keys.add(chunk)
        crc = zlib.crc32(chunk.data.cast("B"), crc)
    if deleted:
        deleted.check_content(f"{crc:08x}")
    return keys, f"{crc:08x}"


def _without(touched: Sequence[KeySet], chunks: Iterator[tuple[KeyArray, FloatArray]]) -> Iterator[tuple[KeyArray, FloatArray]]:
    """Yield the rows whose keys are in none of the sets."""
    for keys, vectors in chunks:
        excluded = np.zeros(keys.size, np.bool_)
        for key_set in touched:
            excluded |= key_set.contains(keys)
        if not excluded.any():
            yield keys, vectors
        elif not excluded.all():
            yield keys[~excluded], vectors[~excluded]


def _open_deleted(source: TableSource, sources: ModelSources) -> OpenedFile | None:
    filesystem, place = sources.locate(source.place)
    path = within(place, "deleted")
    if "deleted" not in source.checks and not filesystem.exists(path):
        return None
    file = open_file(filesystem, path, source.checks)
    if file.size_bytes % 8:
        raise ModelFileError(f"opening {path}: got {file.size_bytes} bytes, expected 8 (an int64) for every key")
    return file


def _digest(*parts: str) -> str:
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()
