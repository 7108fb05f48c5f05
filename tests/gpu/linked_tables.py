"""Tables of the hash map or of row files that a CUDA cache reads in place, and what a lookup of them must answer."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from tempfile import TemporaryDirectory
from typing import Any, Self

import numpy as np
from numba import njit

from hps.errors import UnknownTableError
from hps.ground.hashing import mix, scale, share_hash
from hps.ground.rows import decode, encode
from hps.stores.base import LoadRecord
from hps.stores.hash_map.database import HashMapDatabase
from hps.stores.row_files.database import RowFilesDatabase
from hps.tensors.batch import Batch
from hps.testing.caches import spec, vectors_of
from hps.types import BoolArray, FloatArray, KeyArray
from tests.gpu.cupy_if_installed import CupyCache, cupy


def rows_of(keys: KeyArray, dim: int, version: int = 0) -> FloatArray:
    """Vectors every element of which encodes key, position and version."""
    return np.ascontiguousarray(vectors_of(keys, dim + 1, version)[:, 1:])


@njit()
def homes_of(keys, buckets):  # type: ignore[no-untyped-def]
    """The homes of keys in a hash map of so many buckets, at most 4,095."""
    homes = np.empty(keys.size, np.int64)
    for i in range(keys.size):
        homes[i] = scale(mix(keys[i]), buckets)
    return homes


@njit()
def hashes_of(keys):  # type: ignore[no-untyped-def]
    """The hashes of keys in a row file."""
    hashes = np.empty(keys.size, np.uint64)
    for i in range(keys.size):
        hashes[i] = share_hash(keys[i])
    return hashes


class LinkedTables:
    """A hash map and a cache above it, some of whose tables are attached. Use it in a `with`.

    Attributes:
        cache: of all tables.
        database: that holds them.
        index: keep the index of attached tables on the device.
    """

    index = False

    def __init__(
        self,
        dims: Sequence[int],
        capacity_rows: int,
        *,
        attached: Sequence[int] | None = None,
        authoritative: bool = True,
        dense: int = 0,
        row_dtypes: Sequence[str] = (),
        **options: Any,
    ) -> None:
        """Make tables without rows.

        Args:
            dense: how many keys from 0 on every table is going to have, so that it is dense.
            row_dtypes: by table; default float32.
        """
        self.database: Any = self.create_database(**options)
        self.specs = [
            replace(spec(dim, f"t{index}"), row_dtype=row_dtype)
            for index, (dim, row_dtype) in enumerate(zip(dims, row_dtypes or ["float32"] * len(dims), strict=True))
        ]
        for each in self.specs:
            self.database.open_table(each.tag, each.width)
            if dense:
                self.database.reserve(each.tag, dense, [np.arange(dense)])
        self.cache: Any = CupyCache.create(self.specs, [capacity_rows] * len(dims), 0)
        for table in range(len(dims)) if attached is None else attached:
            self.attach(table, authoritative)

    def create_database(self, **options: Any) -> Any:
        return HashMapDatabase(**options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        cupy.cuda.Device().synchronize()
        self.cache.close()
        self.database.close()

    def attach(self, table: int = 0, authoritative: bool = True) -> None:
        host = self.database.host_table(self.specs[table].tag)
        assert host is not None
        assert self.cache.attach(table, host, authoritative=authoritative, index=self.index) is None

    def insert(self, keys: KeyArray, version: int = 0, table: int = 0) -> None:
        """Add or replace rows in every tier, as a deployment does."""
        self.write(keys, rows_of(keys, self.specs[table].dim, version), table)

    def write(self, keys: KeyArray, vectors: FloatArray, table: int = 0) -> None:
        rows = encode("writing", vectors, self.specs[table].row_dtype)
        with self.cache.changing(table):
            self.database.insert(self.specs[table].tag, keys, rows)
            self.cache.update(table, keys, rows)

    def stored(self, vectors: FloatArray, table: int = 0) -> FloatArray:
        """What a table answers where it was given these vectors."""
        own = self.specs[table]
        return decode(encode("storing", vectors, own.row_dtype), own.dim, own.row_dtype)

    def delete(self, keys: KeyArray, table: int = 0) -> None:
        """Remove rows from every tier."""
        with self.cache.changing(table):
            self.database.delete(self.specs[table].tag, keys)
            self.cache.erase(table, keys)

    def batch(self, keys: KeyArray, table: int = 0) -> Batch:
        """A batch on the device, its output full of NaN and its found-mask of nonsense."""
        out = cupy.full((keys.size, self.specs[table].dim), cupy.nan, cupy.float32)
        return Batch.of(table, cupy.asarray(keys), out, cupy.asarray(np.arange(keys.size) % 2 == 0))

    def ask(self, keys: KeyArray, table: int = 0, lookup: Any = None) -> tuple[FloatArray, BoolArray, Any]:
        """Look keys up without the host: what `out` and `found` hold then, and the lookup. None may be left."""
        lookup, batch = lookup or self.cache.create_lookup(), self.batch(keys, table)
        assert lookup.query(batch) == 0
        lookup.finish()
        return cupy.asnumpy(batch.outs[0]), cupy.asnumpy(batch.founds[0]), lookup

    def left(self, keys: KeyArray, table: int = 0) -> int:
        """How many of some keys a lookup leaves for the host."""
        lookup = self.cache.create_lookup()
        left: int = lookup.query(self.batch(keys, table))
        assert left == sum(lookup.counts)
        return left

    def finish_on_host(self, lookup: Any, left: int) -> None:
        """Answer what a query left, from the map, without making it resident; a table that is gone has nothing."""
        for missed in lookup.unique() if left else ():
            table = self.specs[missed.table]
            buffer, found = missed.buffer(), np.zeros(missed.keys.size, np.bool_)
            with suppress(UnknownTableError):
                self.database.fetch(table.tag, missed.keys, buffer, found)
            missed.stage(0, found.size)
            missed.scatter(found)
        lookup.finish()


class LinkedFiles(LinkedTables):
    """Likewise, of row files in a directory of their own."""

    def create_database(self, **options: Any) -> Any:
        self._directory = TemporaryDirectory()
        return RowFilesDatabase(self._directory.name, **options)

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._directory.cleanup()

    def load(self, keys: KeyArray, vectors: FloatArray, table: int = 0) -> None:
        """Replace rows by a load, as a deployment does before it attaches its cache."""
        tag = self.specs[table].tag
        rows = encode("loading", vectors, self.specs[table].row_dtype)
        self.database.load_chunk(tag, keys, rows, LoadRecord(f"files {keys.size}", keys.size, keys.size))
        self.database.finish_load(tag)

    def seal(self, table: int = 0) -> int:
        sealed: int = self.database.seal(self.specs[table].tag)
        return sealed
