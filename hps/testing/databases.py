"""The behaviour that every database tier shares, and that of each capability; a database's test subclasses those that it has.

class TestRocksDatabase(DatabaseContract, LastingContract, PersistentContract, OrderedWritesContract):
    @pytest.fixture
    def database(self, tmp_path):
        database = RocksDatabase(tmp_path)
        yield database
        database.close()

    def raw_rows(self, database, tag):
        ...
"""

import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hps.errors import (
    CapacityError,
    InvalidDtypeError,
    InvalidInputError,
    NotReadyError,
    TableWidthError,
    UnknownTableError,
)
from hps.ground.rows import encode
from hps.stores.base import (
    AgingRows,
    Database,
    LastingDatabase,
    LoadRecord,
    LogPosition,
    OrderedWrites,
    Partition,
    PersistentDatabase,
    RowChanges,
)
from hps.testing.readers import reading
from hps.testing.waiting import PATIENCE_S
from hps.types import BoolArray, FloatArray, KeyArray, TableSpec, row_width

TAG = "hps_et.shop.item"
OTHER = "hps_et.shop.user"
DIM = 8
INT64 = np.iinfo(np.int64)
AWKWARD_KEYS = np.array(
    [0, -1, 1, INT64.min, INT64.max, INT64.min + 1, INT64.max - 1, *(1 << np.arange(62)), *(np.arange(-20, 20) << 32)],
    dtype=np.int64,
)
"""Keys that an implementation may use as a sentinel, or that a poor hash clusters."""


def vectors_of(keys: KeyArray, dim: int, version: int = 0) -> FloatArray:
    """Vectors that encode their key, their position and a version, so that a wrong, stale or torn one shows."""
    words = keys.view(np.uint64)[:, None] * np.uint64(0x9E3779B97F4A7C15) + np.uint64(version << 56)
    words = words * np.uint64(0xD1B54A32D192ED03) + np.arange(dim, dtype=np.uint64)[None, :] * np.uint64(0x2545F4914F6CDD1D)
    return (words >> np.uint64(40)).astype(np.float32)


def distinct_keys(n: int, seed: int = 1) -> KeyArray:
    """n different keys from the whole int64 range, in random order."""
    keys = np.unique(np.random.default_rng(seed).integers(INT64.min, INT64.max, n + n // 8 + 16, dtype=np.int64, endpoint=True))
    return np.random.default_rng(seed + 1).permutation(keys)[:n]


def fetched(database: Database, tag: str, keys: KeyArray, dim: int) -> tuple[FloatArray, BoolArray]:
    """Fetch into fresh arrays; rows that were not found are NaN."""
    out = np.full((keys.size, dim), np.nan, np.float32)
    found = np.zeros(keys.size, np.bool_)
    assert database.fetch(tag, keys, out, found) == np.count_nonzero(found)
    return out, found


def bits(vectors: FloatArray) -> np.ndarray:
    """The bit patterns, so that NaN equals NaN and -0.0 differs from 0.0."""
    return vectors.view(np.uint32)


def changes_of(
    keys: KeyArray, sequence: int | Sequence[int], deleted: bool | Sequence[bool] = False, version: int = 0
) -> RowChanges:
    """Make changes with one sequence and kind for all keys, or one for each."""
    n = keys.size
    sequences = np.broadcast_to(np.array(sequence, np.int64), n).copy()
    is_deleted = np.broadcast_to(np.array(deleted, np.bool_), n).copy()
    return RowChanges(keys, vectors_of(keys, DIM, version), sequences, is_deleted if is_deleted.any() else None)


class AgingDatabase(Database, AgingRows):
    """The type of a database under `AgingRowsContract`."""


class OrderedDatabase(Database, OrderedWrites):
    """The type of a database that keeps the order of changes."""


def settle(database: Database) -> None:
    """End a load."""
    if isinstance(database, LastingDatabase):
        database.finish_load(TAG)


def applied(
    database: OrderedWrites, tag: str, changes: RowChanges, positions: Mapping[Partition, LogPosition] | None = None
) -> list[bool]:
    latest = database.apply(tag, changes, positions or {})
    assert latest.dtype == np.bool_
    changed: list[bool] = latest.tolist()
    return changed


class DatabaseFixtures:
    """Base of the contracts: needs the fixture `database` (fresh, empty, closed after the test) and `raw_rows`."""

    def raw_rows(self, database: Database, tag: str) -> dict[int, bytes]:
        """All rows of a table as key -> bytes of its vector, read without the methods under test."""
        raise NotImplementedError("a subclass reads the engine itself")

    @pytest.fixture
    def table(self, database: Database) -> Database:
        """A database in which the table TAG of width DIM is open and empty."""
        database.open_table(TAG, DIM)
        return database


class DatabaseContract(DatabaseFixtures):
    """Of every database."""

    counts_deletes: ClassVar[bool] = True
    """Whether `delete` returns the number of removed rows, rather than -1."""

    # -- insert and fetch ---------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("dim", [1, 3, 32, 384])
    def test_inserted_vectors_come_back_bit_for_bit(self, database: Database, dim: int) -> None:
        keys = distinct_keys(500)
        vectors = np.random.default_rng(7).integers(0, 2**32, (500, dim), dtype=np.uint32).view(np.float32)
        database.open_table(TAG, dim)
        database.insert(TAG, keys, vectors)
        out, found = fetched(database, TAG, keys[::-1].copy(), dim)
        assert found.all()
        np.testing.assert_array_equal(bits(out), bits(vectors)[::-1])

    @pytest.mark.parametrize(
        ("row_dtype", "dim"), [("float16", 1), ("float16", 8), ("bfloat16", 3), ("int8", 1), ("int8", 129)]
    )
    def test_rows_of_fewer_bits_come_back_bit_for_bit(self, database: Database, row_dtype: str, dim: int) -> None:
        """As words that may look like any float: loaded, inserted, promoted, scanned and fetched."""
        keys, tag = distinct_keys(900), TableSpec("shop", "item", dim, 0.0, 100, row_dtype=row_dtype).tag
        values = np.random.default_rng(11).standard_normal((900, dim)) * 10.0 ** np.linspace(-1, 3, 9).repeat(100)[:, None]
        rows = encode("storing", values.astype(np.float32), row_dtype)
        width = row_width(dim, row_dtype)
        database.open_table(tag, width)
        database.load_chunk(tag, keys[:300], rows[:300], LoadRecord("files", 300, 300))
        if isinstance(database, LastingDatabase):
            database.finish_load(tag)
        database.insert(tag, keys[300:600], rows[300:600])
        if not database.persistent:
            assert database.promote(tag, keys[600:], rows[600:]) in (0, 300)
        database.insert(tag, keys[600:], rows[600:])
        out, found = fetched(database, tag, keys, width)
        assert found.all()
        np.testing.assert_array_equal(bits(out), bits(rows))
        raw = self.raw_rows(database, tag)
        assert raw == {key: row.tobytes() for key, row in zip(keys.tolist(), rows, strict=True)}
        scanned = {
            key: row.tobytes()
            for chunk_keys, vectors in database.scan(tag, 97)
            for key, row in zip(chunk_keys.tolist(), vectors, strict=True)
        }
        assert scanned == raw
        with pytest.raises(TableWidthError):
            database.open_table(tag, width + 1)

    def test_every_int64_is_a_legal_key(self, table: Database) -> None:
        keys = np.unique(AWKWARD_KEYS)
        _, found = fetched(table, TAG, keys, DIM)
        assert not found.any()
        table.insert(TAG, keys, vectors_of(keys, DIM))
        out, found = fetched(table, TAG, keys, DIM)
        assert found.all()
        np.testing.assert_array_equal(out, vectors_of(keys, DIM))
        rows = zip(keys.tolist(), vectors_of(keys, DIM), strict=True)
        assert self.raw_rows(table, TAG) == {key: row.tobytes() for key, row in rows}

    def test_fetch_leaves_found_vectors_and_rows_of_absent_keys_alone(self, table: Database) -> None:
        keys = distinct_keys(200)
        table.insert(TAG, keys[:150], vectors_of(keys[:150], DIM))
        out = np.full((200, DIM), 5.0, np.float32)
        before = np.arange(200) % 3 == 0
        found = before.copy()
        filled = table.fetch(TAG, keys, out, found)
        here = np.arange(200) < 150
        assert filled == np.count_nonzero(here & ~before)
        np.testing.assert_array_equal(found, here | before)
        assert (out[before | ~here] == 5.0).all()
        np.testing.assert_array_equal(out[here & ~before], vectors_of(keys, DIM)[here & ~before])

    def test_fetch_fills_every_position_of_a_duplicate_key(self, table: Database) -> None:
        keys = distinct_keys(50)
        table.insert(TAG, keys, vectors_of(keys, DIM))
        wanted = np.random.default_rng(3).choice(keys, 1000)
        out, found = fetched(table, TAG, wanted, DIM)
        assert found.all()
        np.testing.assert_array_equal(out, vectors_of(wanted, DIM))

    def test_insert_replaces(self, table: Database) -> None:
        keys = distinct_keys(300)
        table.insert(TAG, keys, vectors_of(keys, DIM))
        table.insert(TAG, keys[::2].copy(), vectors_of(keys[::2].copy(), DIM, version=1))
        wanted = vectors_of(keys, DIM)
        wanted[::2] = vectors_of(keys[::2].copy(), DIM, version=1)
        np.testing.assert_array_equal(fetched(table, TAG, keys, DIM)[0], wanted)
        assert len(self.raw_rows(table, TAG)) == 300

    def test_the_last_of_a_duplicate_key_in_a_batch_wins(self, table: Database) -> None:
        keys = np.random.default_rng(5).choice(distinct_keys(40), 1000)
        vectors = np.random.default_rng(6).random((1000, DIM), np.float32)
        table.insert(TAG, keys, vectors)
        wanted = {int(key): row.tobytes() for key, row in zip(keys, vectors, strict=True)}
        assert self.raw_rows(table, TAG) == wanted

    def test_insert_keeps_no_reference_to_the_arrays(self, table: Database) -> None:
        keys = distinct_keys(100)
        vectors = vectors_of(keys, DIM)
        given_keys, given_vectors = keys.copy(), vectors.copy()
        table.insert(TAG, given_keys, given_vectors)
        np.testing.assert_array_equal(given_keys, keys)
        np.testing.assert_array_equal(given_vectors, vectors)
        given_keys[:] = 0
        given_vectors[:] = -1
        np.testing.assert_array_equal(fetched(table, TAG, keys, DIM)[0], vectors)

    def test_inputs_may_be_read_only_and_all_arrays_files_that_are_mapped_into_memory(
        self, table: Database, tmp_path: Path
    ) -> None:
        keys = distinct_keys(100)
        vectors = vectors_of(keys, DIM)
        frozen = np.frombuffer(keys.tobytes(), np.int64)
        table.insert(TAG, frozen, np.frombuffer(vectors.tobytes(), np.float32).reshape(100, DIM))
        out = np.memmap(tmp_path / "out", np.float32, "w+", shape=(100, DIM))
        found = np.memmap(tmp_path / "found", np.bool_, "w+", shape=(100,))
        assert table.fetch(TAG, frozen, out, found) == 100
        np.testing.assert_array_equal(np.asarray(out), vectors)
        assert table.delete(TAG, frozen) in (100, -1)
        keys.tofile(tmp_path / "keys")
        table.insert(TAG, np.memmap(tmp_path / "keys", np.int64, "r"), out)
        np.testing.assert_array_equal(fetched(table, TAG, keys, DIM)[0], vectors)

    def test_a_batch_larger_than_any_internal_chunk(self, database: Database) -> None:
        keys = distinct_keys(150_000)
        database.open_table(TAG, 2)
        database.insert(TAG, keys, vectors_of(keys, 2))
        out, found = fetched(database, TAG, keys[::-1].copy(), 2)
        assert found.all()
        np.testing.assert_array_equal(out, vectors_of(keys, 2)[::-1])
        assert database.size(TAG) == 150_000

    def test_zero_keys_change_nothing_and_an_empty_table_has_no_rows(self, table: Database) -> None:
        none, no_vectors = np.empty(0, np.int64), np.empty((0, DIM), np.float32)
        table.insert(TAG, none, no_vectors)
        assert table.fetch(TAG, none, no_vectors, np.empty(0, np.bool_)) == 0
        assert table.delete(TAG, none) in (0, -1)
        table.load_chunk(TAG, none, no_vectors, LoadRecord("abc", 0, 0))
        settle(table)
        assert self.raw_rows(table, TAG) == {}
        assert list(table.scan(TAG, 10)) == []

    # -- delete -------------------------------------------------------------------------------------------------------

    def test_deleted_keys_are_absent_and_the_others_stay(self, table: Database) -> None:
        keys = distinct_keys(1000)
        table.insert(TAG, keys, vectors_of(keys, DIM))
        table.delete(TAG, keys[:400])
        out, found = fetched(table, TAG, keys, DIM)
        np.testing.assert_array_equal(found, np.arange(1000) >= 400)
        np.testing.assert_array_equal(out[400:], vectors_of(keys[400:], DIM))
        assert set(self.raw_rows(table, TAG)) == set(keys[400:].tolist())

    def test_delete_counts_distinct_keys_that_were_there(self, table: Database) -> None:
        keys = distinct_keys(30)
        table.insert(TAG, keys[:20], vectors_of(keys[:20], DIM))
        deleted = table.delete(TAG, np.concatenate([keys[10:], keys[10:15]]))
        assert deleted == (10 if self.counts_deletes else -1)
        assert table.delete(TAG, keys[10:]) == (0 if self.counts_deletes else -1)

    def test_a_deleted_key_can_be_inserted_again(self, table: Database) -> None:
        keys = distinct_keys(200)
        for version in range(5):
            table.insert(TAG, keys, vectors_of(keys, DIM, version))
            table.delete(TAG, keys[::2].copy())
        table.insert(TAG, keys[::2].copy(), vectors_of(keys[::2].copy(), DIM, 9))
        wanted = vectors_of(keys, DIM, 4)
        wanted[::2] = vectors_of(keys[::2].copy(), DIM, 9)
        np.testing.assert_array_equal(fetched(table, TAG, keys, DIM)[0], wanted)

    # -- scan, size, stats --------------------------------------------------------------------------------------------

    def test_scan_yields_every_row_once_in_bounded_chunks_that_the_caller_owns(self, table: Database) -> None:
        keys = distinct_keys(300)
        table.insert(TAG, keys, vectors_of(keys, DIM))
        for chunk_rows in (1, 7, 299, 300, 301):
            seen = []
            for chunk_keys, chunk_vectors in table.scan(TAG, chunk_rows):
                assert chunk_keys.dtype == np.int64
                assert chunk_vectors.dtype == np.float32
                assert 0 < chunk_keys.size <= chunk_rows
                np.testing.assert_array_equal(chunk_vectors, vectors_of(chunk_keys, DIM))
                seen.append(chunk_keys.copy())
                chunk_keys[:] = 0
                chunk_vectors[:] = -1
            np.testing.assert_array_equal(np.sort(np.concatenate(seen)), np.sort(keys))
        np.testing.assert_array_equal(fetched(table, TAG, keys, DIM)[0], vectors_of(keys, DIM))

    def test_a_scan_may_be_left_early_and_beside_writes(self, table: Database) -> None:
        keys = distinct_keys(5000)
        table.insert(TAG, keys[:2000], vectors_of(keys[:2000], DIM))
        seen = []
        for step, chunk in enumerate(table.scan(TAG, 100)):  # while the table grows, and shrinks
            seen.append(chunk)
            more = keys[2000 + 300 * step :][:300].copy()
            table.insert(TAG, more, vectors_of(more, DIM))
            table.delete(TAG, keys[50 * step : 50 * step + 50] if step < 20 else keys[:0])
        scanned = np.concatenate([chunk[0] for chunk in seen])
        assert np.unique(scanned).size == scanned.size
        assert np.isin(keys[1000:2000], scanned).all()
        np.testing.assert_array_equal(np.concatenate([chunk[1] for chunk in seen]), vectors_of(scanned, DIM))
        next(table.scan(TAG, 100))

    def test_size_and_stats_count_rows(self, table: Database) -> None:
        keys = distinct_keys(100)
        assert table.size(TAG) == 0
        table.insert(TAG, keys, vectors_of(keys, DIM))
        table.insert(TAG, keys[:50], vectors_of(keys[:50], DIM))
        table.delete(TAG, keys[90:])
        assert table.size(TAG) == 90
        stats = table.stats(TAG)
        assert stats.rows == 90
        assert stats.vector_bytes == 90 * DIM * 4
        assert stats.overhead_bytes >= -1

    def test_tables_beyond_measure_are_refused_together_and_nothing_is_made(self, database: Database) -> None:
        database.check_room([])
        database.check_room([(TAG, DIM, 1000), (OTHER, 3, 10)])
        if type(database).check_room is not Database.check_room:  # which knows of no bound
            figures = rf"got [\d,]{{15,}} bytes.*{OTHER}.*{TAG}.*at most the [\d,]+ that are free .*; "
            with pytest.raises(CapacityError, match=figures):
                database.check_room([(OTHER, 3, 10_000), (TAG, 1 << 20, 1 << 31)])
        with pytest.raises(UnknownTableError):
            database.stats(TAG)

    # -- tables -------------------------------------------------------------------------------------------------------

    def test_tables_do_not_mix(self, database: Database) -> None:
        keys = distinct_keys(100)
        database.open_table(TAG, DIM)
        database.open_table(OTHER, 3)
        database.insert(TAG, keys, vectors_of(keys, DIM))
        assert not fetched(database, OTHER, keys, 3)[1].any()
        database.insert(OTHER, keys[:60], vectors_of(keys[:60], 3, version=1))
        database.delete(TAG, keys[:30])
        assert fetched(database, TAG, keys, DIM)[1].sum() == 70
        np.testing.assert_array_equal(fetched(database, OTHER, keys[:60], 3)[0], vectors_of(keys[:60], 3, version=1))

    def test_opening_an_open_table_changes_nothing_and_another_width_is_refused(self, table: Database) -> None:
        keys = distinct_keys(10)
        table.insert(TAG, keys, vectors_of(keys, DIM))
        table.open_table(TAG, DIM)
        np.testing.assert_array_equal(fetched(table, TAG, keys, DIM)[0], vectors_of(keys, DIM))
        with pytest.raises(TableWidthError, match=rf"(?s)(?=.*{TAG})(?=.*\b{DIM}\b)(?=.*\b{DIM + 1}\b)"):
            table.open_table(TAG, DIM + 1)
        np.testing.assert_array_equal(fetched(table, TAG, keys, DIM)[0], vectors_of(keys, DIM))

    def test_a_dropped_table_is_gone_and_dropping_it_again_changes_nothing(self, table: Database) -> None:
        keys = distinct_keys(10)
        table.open_table(OTHER, DIM)
        for tag in (TAG, OTHER):
            table.insert(tag, keys, vectors_of(keys, DIM))
        for _ in range(2):
            table.drop_table(TAG)
            with pytest.raises(UnknownTableError, match=TAG):
                fetched(table, TAG, keys, DIM)
            assert fetched(table, OTHER, keys, DIM)[1].all()

    def test_a_dropped_table_is_opened_empty_with_any_width(self, table: Database) -> None:
        keys = distinct_keys(10)
        table.load_chunk(TAG, keys, vectors_of(keys, DIM), LoadRecord("abc", 10, 10))
        table.drop_table(TAG)
        table.open_table(TAG, DIM + 1)
        assert not fetched(table, TAG, keys, DIM + 1)[1].any()
        assert self.raw_rows(table, TAG) == {}
        table.insert(TAG, keys, vectors_of(keys, DIM + 1))
        assert table.size(TAG) == 10

    def test_a_table_is_dropped_and_made_again_beside_readers_and_writers(self, database: Database) -> None:
        keys = distinct_keys(1000)
        for tag in (TAG, OTHER):
            database.open_table(tag, DIM)
            database.insert(tag, keys, vectors_of(keys, DIM))

        def read(random: np.random.Generator) -> int:
            picks = random.choice(keys, 300)
            out, found = fetched(database, OTHER, picks, DIM)
            assert found.all()
            np.testing.assert_array_equal(out, vectors_of(picks, DIM))
            try:
                out, found = fetched(database, TAG, picks, DIM)
            except UnknownTableError:
                return picks.size
            np.testing.assert_array_equal(out[found], vectors_of(picks[found], DIM))
            return picks.size

        with reading(read):
            for _ in range(4):
                database.drop_table(TAG)
                database.insert(OTHER, keys, vectors_of(keys, DIM))
                database.open_table(TAG, DIM)
                database.insert(TAG, keys, vectors_of(keys, DIM))
        assert database.size(TAG) == database.size(OTHER) == keys.size

    def test_a_table_that_was_never_opened_is_unknown(self, table: Database) -> None:
        keys, vectors = distinct_keys(4), vectors_of(distinct_keys(4), DIM)
        calls: list[Callable[[], object]] = [
            lambda: table.fetch(OTHER, keys, vectors.copy(), np.zeros(4, np.bool_)),
            lambda: table.insert(OTHER, keys, vectors),
            lambda: table.delete(OTHER, keys),
            lambda: list(table.scan(OTHER, 10)),
            lambda: table.size(OTHER),
            lambda: table.stats(OTHER),
        ]
        for call in calls:
            with pytest.raises(UnknownTableError, match=OTHER):
                call()

    # -- bad input ----------------------------------------------------------------------------------------------------

    def test_arguments_of_another_dtype_are_refused(self, table: Database) -> None:
        keys, vectors, found = distinct_keys(4), vectors_of(distinct_keys(4), DIM), np.zeros(4, np.bool_)
        calls: list[Callable[[], object]] = [
            lambda: table.fetch(TAG, keys.astype(np.int32), vectors.copy(), found),
            lambda: table.fetch(TAG, keys.view(np.uint64), vectors.copy(), found),
            lambda: table.fetch(TAG, keys.byteswap().view(">i8"), vectors.copy(), found),
            lambda: table.fetch(TAG, keys, vectors.astype(np.float64), found),
            lambda: table.fetch(TAG, keys, vectors.copy(), found.astype(np.uint8)),
            lambda: table.insert(TAG, keys.astype(np.float64), vectors),
            lambda: table.insert(TAG, keys, np.zeros((4, DIM), np.float16)),
            lambda: table.delete(TAG, keys.astype(np.int32)),
        ]
        for call in calls:
            with pytest.raises(InvalidDtypeError):
                call()
        assert self.raw_rows(table, TAG) == {}

    def test_arguments_of_another_shape_or_layout_are_refused(self, table: Database) -> None:
        keys, vectors, found = distinct_keys(4), vectors_of(distinct_keys(4), DIM), np.zeros(4, np.bool_)
        frozen = vectors.copy()
        frozen.flags.writeable = False
        frozen_found = found.copy()
        frozen_found.flags.writeable = False
        calls: list[Callable[[], object]] = [
            lambda: table.fetch(TAG, keys.reshape(2, 2), vectors.copy(), found),
            lambda: table.fetch(TAG, np.repeat(keys, 2)[::2], vectors.copy(), found),
            lambda: table.fetch(TAG, keys, vectors[:3].copy(), found),
            lambda: table.fetch(TAG, keys, vectors[:, :-1].copy(), found),
            lambda: table.fetch(TAG, keys, vectors.ravel(), found),
            lambda: table.fetch(TAG, keys, np.asfortranarray(vectors), found),
            lambda: table.fetch(TAG, keys, frozen, found),
            lambda: table.fetch(TAG, keys, vectors.copy(), found[:3].copy()),
            lambda: table.fetch(TAG, keys, vectors.copy(), np.zeros(8, np.bool_)[::2]),
            lambda: table.fetch(TAG, keys, vectors.copy(), frozen_found),
            lambda: table.insert(TAG, keys[:3], vectors),
            lambda: table.insert(TAG, keys, np.zeros((4, DIM + 1), np.float32)),
            lambda: table.insert(TAG, keys, np.zeros((8, DIM), np.float32)[::2]),
            lambda: table.delete(TAG, keys.reshape(2, 2)),
            lambda: list(table.scan(TAG, 0)),
            lambda: table.open_table(OTHER, 0),
        ]
        for call in calls:
            with pytest.raises(InvalidInputError):
                call()
        assert self.raw_rows(table, TAG) == {}
        assert not found.any()

    # -- bulk load ----------------------------------------------------------------------------------------------------

    def test_loaded_chunks_can_be_fetched(self, table: Database) -> None:
        keys = distinct_keys(300)
        for start in (0, 100, 100, 200):  # a chunk that comes again changes nothing
            record = LoadRecord("abc", start + 100, 300)
            table.load_chunk(TAG, keys[start : start + 100], vectors_of(keys[start : start + 100], DIM), record)
        settle(table)
        np.testing.assert_array_equal(fetched(table, TAG, keys, DIM)[0], vectors_of(keys, DIM))
        assert len(self.raw_rows(table, TAG)) == 300

    def test_loaded_chunks_replace_and_the_last_of_a_duplicate_wins(self, table: Database) -> None:
        keys = distinct_keys(50)
        table.insert(TAG, keys, vectors_of(keys, DIM))
        vectors = np.concatenate([vectors_of(keys, DIM, 1), vectors_of(keys, DIM, 2)])
        table.load_chunk(TAG, np.concatenate([keys, keys]), vectors, LoadRecord("abc", 100, 100))
        settle(table)
        np.testing.assert_array_equal(fetched(table, TAG, keys, DIM)[0], vectors_of(keys, DIM, 2))

    def test_changes_are_copied_as_they_are(self, table: Database) -> None:
        keys = distinct_keys(20)
        table.insert(TAG, keys, vectors_of(keys, DIM))
        table.copy_changes(TAG, changes_of(keys, 1, [i % 2 == 0 for i in range(20)], 1))
        rows = self.raw_rows(table, TAG)
        new = {key: vectors_of(keys[i : i + 1], DIM, 1).tobytes() for i, key in enumerate(keys.tolist()) if i % 2}
        assert set(rows) <= set(new)  # a database that others write to, too, may drop the rows
        assert all(rows[key] == new[key] for key in rows)

    # -- close --------------------------------------------------------------------------------------------------------

    def test_a_closed_database_answers_nothing(self, table: Database) -> None:
        keys, vectors = distinct_keys(4), vectors_of(distinct_keys(4), DIM)
        table.close()
        table.close()
        calls: list[Callable[[], object]] = [
            lambda: table.open_table(TAG, DIM),
            lambda: table.fetch(TAG, keys, vectors.copy(), np.zeros(4, np.bool_)),
            lambda: table.insert(TAG, keys, vectors),
            lambda: table.delete(TAG, keys),
            lambda: list(table.scan(TAG, 10)),
            lambda: table.size(TAG),
            lambda: table.stats(TAG),
            lambda: table.drop_table(TAG),
        ]
        for call in calls:
            with pytest.raises(NotReadyError):
                call()

    # -- concurrency --------------------------------------------------------------------------------------------------

    def test_a_fetch_beside_writes_sees_whole_vectors(self, database: Database) -> None:
        dim, rows, rounds = 32, 1000, 8
        keys = distinct_keys(rows * rounds)
        resident = keys[:rows]
        versions = np.stack([vectors_of(resident, dim, version) for version in range(rounds)])
        database.open_table(TAG, dim)
        database.insert(TAG, resident, versions[0])
        newest = threading.local()

        def read(rng: np.random.Generator) -> int:
            picks = rng.integers(0, rows, 500)
            out, found = fetched(database, TAG, resident[picks], dim)
            assert found.all(), "a key that was never deleted was absent"
            same = (versions[:, picks] == out[None]).all(axis=2)
            assert same.any(axis=0).all(), "a torn or wrong vector"
            seen = same.argmax(axis=0)
            before = getattr(newest, "version", 0)
            assert seen.min() >= before - 1, "a vector older than the one that an earlier call replaced"
            newest.version = max(before, int(seen.max()))
            return picks.size

        with reading(read):
            for version in range(1, rounds):
                more = keys[version * rows : (version + 1) * rows]
                database.insert(TAG, resident, versions[version])
                database.insert(TAG, more, vectors_of(more, dim))
                database.delete(TAG, more[::2].copy())
        assert database.size(TAG) == rows + (rounds - 1) * (rows // 2)


class LastingContract(DatabaseFixtures):
    """Of databases whose tables outlive a process."""

    def test_tags_are_sorted_and_begin_empty(self, database: LastingDatabase) -> None:
        assert database.tags() == []
        for tag in ("hps_et.b.x", "hps_et.a.y", "hps_et.a-b.y"):
            database.open_table(tag, 2)
        assert database.tags() == sorted(["hps_et.b.x", "hps_et.a.y", "hps_et.a-b.y"])

    def test_a_dropped_table_has_no_tag_and_no_load(self, table: LastingDatabase) -> None:
        keys = distinct_keys(10)
        table.open_table(OTHER, DIM)
        assert table.tags() == [TAG, OTHER]
        table.load_chunk(TAG, keys, vectors_of(keys, DIM), LoadRecord("abc", 10, 10))
        table.drop_table(TAG)
        assert table.tags() == [OTHER]
        table.open_table(TAG, DIM)
        assert table.load_record(TAG) is None

    def test_a_closed_database_has_no_tags(self, table: LastingDatabase) -> None:
        table.close()
        with pytest.raises(NotReadyError):
            table.tags()


class PersistentContract(DatabaseFixtures):
    """Of databases that hold every row and remember which files they came from."""

    def test_loaded_chunks_are_remembered(self, table: PersistentDatabase) -> None:
        keys = distinct_keys(300)
        assert table.load_record(TAG) is None
        for start in (0, 100, 100, 200):
            record, rows = LoadRecord("abc", start + 100, 300), keys[start : start + 100]
            table.load_chunk(TAG, rows, vectors_of(rows, DIM), record)
            assert table.load_record(TAG) == record
        table.load_chunk(TAG, keys[:0], vectors_of(keys[:0], DIM), LoadRecord("none", 0, 0))
        assert table.load_record(TAG) == LoadRecord("none", 0, 0)

    def test_when_a_row_was_written_is_known_or_zero(self, table: PersistentDatabase) -> None:
        keys = distinct_keys(20)
        before = time.time_ns() // 1000
        table.insert(TAG, keys[:10], vectors_of(keys[:10], DIM))
        written, after = table.written_at(TAG, keys), time.time_ns() // 1000
        assert written.dtype == np.int64
        assert written.shape == (20,)
        assert not written[10:].any()
        assert not written[:10].any() or ((written[:10] >= before) & (written[:10] <= after)).all()

    def test_a_closed_database_loads_nothing(self, table: PersistentDatabase) -> None:
        keys, vectors = distinct_keys(4), vectors_of(distinct_keys(4), DIM)
        table.close()
        calls: list[Callable[[], object]] = [
            lambda: table.load_record(TAG),
            lambda: table.load_chunk(TAG, keys, vectors, LoadRecord("x", 4, 4)),
            lambda: table.finish_load(TAG),
        ]
        for call in calls:
            with pytest.raises(NotReadyError):
                call()


class OrderedWritesContract(DatabaseFixtures):
    """Of databases that keep the order of changes."""

    @pytest.fixture
    def followed(self, table: OrderedDatabase) -> OrderedDatabase:
        """A database whose open and empty table TAG follows a log."""
        assert table.follow_log(TAG) == {}
        return table

    def rows_are(self, database: Database, versions: Mapping[int, int]) -> None:
        """Compare all rows with those of these keys, each of the vector of a version."""
        keys = np.array(list(versions), np.int64)
        vectors = [vectors_of(keys[i : i + 1], DIM, version).tobytes() for i, version in enumerate(versions.values())]
        assert self.raw_rows(database, TAG) == dict(zip(versions, vectors, strict=True))

    def test_older_changes_are_refused_and_equal_and_newer_ones_made(self, followed: OrderedDatabase) -> None:
        keys = distinct_keys(3)
        a, b, c = keys.tolist()
        assert applied(followed, TAG, changes_of(keys, [10, 20, 30], version=1)) == [True] * 3
        assert applied(followed, TAG, changes_of(keys, 20, version=2)) == [True, True, False]
        self.rows_are(followed, {a: 2, b: 2, c: 1})
        assert applied(followed, TAG, changes_of(keys, [19, 20, 31], version=3)) == [False, True, True]
        self.rows_are(followed, {a: 2, b: 3, c: 3})

    def test_deleted_rows_are_remembered_and_nothing_shows_it(self, followed: OrderedDatabase) -> None:
        keys = distinct_keys(4)
        a, b, c, _ = keys.tolist()
        assert applied(followed, TAG, changes_of(keys[:2], 10, version=1)) == [True] * 2
        assert applied(followed, TAG, changes_of(keys, [20, 5, 20, 20], deleted=True)) == [True, False, True, True]
        self.rows_are(followed, {b: 1})
        assert applied(followed, TAG, changes_of(keys[2:], 19, version=2)) == [False] * 2
        assert followed.fetch(TAG, keys, np.empty((4, DIM), np.float32), np.zeros(4, np.bool_)) == 1
        assert followed.size(TAG) == followed.stats(TAG).rows == 1
        assert [chunk.tolist() for chunk, _ in followed.scan(TAG, 10)] == [[b]]
        if isinstance(followed, PersistentDatabase):
            assert not followed.written_at(TAG, keys[[0, 2, 3]]).any()
        assert applied(followed, TAG, changes_of(keys, [21, 21, 20, 19], [False, True, False, True], 3)) == [True] * 3 + [False]
        self.rows_are(followed, {a: 3, c: 3})

    def test_an_insert_and_a_delete_stand_between_what_was_applied_and_what_comes(self, followed: OrderedDatabase) -> None:
        keys = distinct_keys(4)
        a, b, c, d = keys.tolist()
        assert applied(followed, TAG, changes_of(keys[[0, 1]], [7, 10], version=1)) == [True] * 2
        assert applied(followed, TAG, changes_of(keys[:1], 8, version=1)) == [True]  # of a partition that is behind
        followed.insert(TAG, keys[[0, 2]], vectors_of(keys[[0, 2]], DIM, 2))
        followed.delete(TAG, keys[[1, 3]])
        assert applied(followed, TAG, changes_of(keys, 10, version=3)) == [False] * 4
        self.rows_are(followed, {a: 2, c: 2})
        assert applied(followed, TAG, changes_of(keys, [12, 12, 13, 14], version=4)) == [True] * 4
        self.rows_are(followed, {a: 4, b: 4, c: 4, d: 4})
        followed.insert(TAG, keys, vectors_of(keys, DIM, 5))
        assert applied(followed, TAG, changes_of(keys, [11, 12, 13, 14], version=6)) == [False] * 4
        self.rows_are(followed, {a: 5, b: 5, c: 5, d: 5})

    def test_rows_from_before_the_log_are_older_than_any_change(self, table: OrderedDatabase) -> None:
        keys = distinct_keys(30)
        table.load_chunk(TAG, keys[:20], vectors_of(keys[:20], DIM), LoadRecord("abc", 20, 20))
        settle(table)
        table.insert(TAG, keys[20:], vectors_of(keys[20:], DIM))
        table.delete(TAG, keys[:5])
        assert table.follow_log(TAG) == {}
        assert applied(table, TAG, changes_of(keys, 1, version=1)) == [True] * 30
        self.rows_are(table, dict.fromkeys(keys.tolist(), 1))

    def test_positions_are_remembered_by_partition_with_and_without_changes(self, followed: OrderedDatabase) -> None:
        keys = distinct_keys(2)
        first = {Partition(TAG, 0): LogPosition("17", 5), Partition(TAG, 1): LogPosition("1700000000000-3", 2**62)}
        applied(followed, TAG, changes_of(keys, 10), first)
        assert followed.follow_log(TAG) == first
        assert applied(followed, TAG, changes_of(keys[:0], 10), {Partition(TAG, 0): LogPosition("18", 10)}) == []
        assert applied(followed, TAG, changes_of(keys, 9), {Partition(TAG, 2): LogPosition("")}) == [False] * 2
        assert followed.follow_log(TAG) == {
            **first,
            Partition(TAG, 0): LogPosition("18", 10),
            Partition(TAG, 2): LogPosition(""),
        }
        self.rows_are(followed, dict.fromkeys(keys.tolist(), 0))

    def test_each_table_has_an_order_of_its_own_until_it_is_dropped(self, followed: OrderedDatabase) -> None:
        keys = distinct_keys(5)
        followed.open_table(OTHER, DIM)
        followed.follow_log(OTHER)
        applied(followed, TAG, changes_of(keys, 10), {Partition("p"): LogPosition("1", 10)})
        assert followed.follow_log(OTHER) == {}
        assert applied(followed, OTHER, changes_of(keys, 5)) == [True] * 5
        followed.drop_table(TAG)
        followed.open_table(TAG, DIM)
        assert followed.follow_log(TAG) == {}
        assert applied(followed, TAG, changes_of(keys, 5, version=1)) == [True] * 5
        self.rows_are(followed, dict.fromkeys(keys.tolist(), 1))
        assert applied(followed, OTHER, changes_of(keys, 4)) == [False] * 5

    def test_a_large_batch_of_upserts_and_deletions_is_applied_and_applied_again(self, followed: OrderedDatabase) -> None:
        keys = distinct_keys(10_000)
        random = np.random.default_rng(4)
        changes = changes_of(keys, random.integers(50, 100, keys.size).tolist(), (random.random(keys.size) < 0.2).tolist())
        for _ in range(2):
            assert all(applied(followed, TAG, changes))
            assert not any(applied(followed, TAG, changes_of(keys, 49, version=1)))
        remaining, vectors, deleted = changes.split()
        out, found = fetched(followed, TAG, keys, DIM)
        np.testing.assert_array_equal(found, ~np.isin(keys, deleted))
        np.testing.assert_array_equal(out[found], vectors)
        assert followed.size(TAG) == remaining.size

    def test_of_threads_that_change_the_same_rows_the_latest_change_stays(self, followed: OrderedDatabase) -> None:
        keys = distinct_keys(1500)
        turns = itertools.count(1)

        def change() -> None:
            while (sequence := next(turns)) <= 15:
                followed.apply(TAG, changes_of(keys, sequence, version=sequence), {})

        with ThreadPoolExecutor(3) as pool:
            for thread in [pool.submit(change) for _ in range(3)]:
                thread.result(PATIENCE_S)
        np.testing.assert_array_equal(fetched(followed, TAG, keys, DIM)[0], vectors_of(keys, DIM, 15))

    def test_updates_of_an_unknown_or_closed_table_are_refused(self, followed: OrderedDatabase) -> None:
        changes = changes_of(distinct_keys(2), 1)
        for call in (lambda: followed.follow_log(OTHER), lambda: followed.apply(OTHER, changes, {})):
            with pytest.raises(UnknownTableError, match=OTHER):
                call()
        followed.close()
        for call in (lambda: followed.follow_log(TAG), lambda: followed.apply(TAG, changes, {})):
            with pytest.raises(NotReadyError):
                call()

    @settings(
        max_examples=10,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.differing_executors],  # as a contract is for
    )
    @given(
        history=st.lists(
            st.tuples(st.lists(st.integers(0, 5), min_size=1, max_size=6, unique=True), st.booleans()), min_size=1, max_size=8
        ),
        data=st.data(),
    )
    def test_a_history_in_any_order_with_repeats_ends_in_the_rows_of_the_one_in_order(
        self, followed: OrderedDatabase, history: list[tuple[list[int], bool]], data: st.DataObject
    ) -> None:
        followed.drop_table(TAG)
        followed.open_table(TAG, DIM)
        followed.follow_log(TAG)
        keys = distinct_keys(6)
        last: dict[int, int] = {}  # sequence of the last change of each key
        order = data.draw(st.permutations([*range(len(history)), *data.draw(st.lists(st.sampled_from(range(len(history)))))]))
        for message in order:
            chosen, deleted = history[message]
            changed = applied(followed, TAG, changes_of(keys[chosen], message + 1, deleted, message + 1))
            assert changed == [last.get(key, 0) <= message + 1 for key in chosen]
            last |= {key: max(last.get(key, 0), message + 1) for key in chosen}
        rows = {int(keys[key]): sequence for key, sequence in last.items() if not history[sequence - 1][1]}
        self.rows_are(followed, rows)

    @pytest.mark.parametrize("row_dtype", ["float16", "int8"])
    def test_changes_of_a_log_keep_rows_of_fewer_bits(self, database: OrderedDatabase, row_dtype: str) -> None:
        keys, tag = distinct_keys(200), TableSpec("shop", "item", 7, 0.0, 100, row_dtype=row_dtype).tag
        values = np.random.default_rng(12).standard_normal((200, 7)).astype(np.float32)
        rows = encode("storing", values, row_dtype)
        database.open_table(tag, rows.shape[1])
        database.follow_log(tag)
        order = np.arange(1, 201)
        assert database.apply(tag, RowChanges(keys, rows, order), {}).all()
        assert not database.apply(tag, RowChanges(keys, rows[::-1].copy(), order - 1), {}).any()
        assert database.apply(tag, RowChanges(keys[:50], rows[:50], order[:50] + 500, np.full(50, True)), {}).all()
        out, found = fetched(database, tag, keys, rows.shape[1])
        np.testing.assert_array_equal(found, np.arange(200) >= 50)
        np.testing.assert_array_equal(bits(out[50:]), bits(rows[50:]))


class AgingRowsContract(DatabaseFixtures):
    """Of databases that remove rows by the time of their last change. Sequences of the tests are microseconds since 1970."""

    @pytest.fixture
    def aging(self, table: AgingDatabase) -> AgingDatabase:
        """A database whose open and empty table TAG follows a log and orders changes by time."""
        table.follow_log(TAG)
        table.order_by_time(TAG)
        return table

    @pytest.fixture
    def loaded(self, table: AgingDatabase) -> AgingDatabase:
        """The same, with a load of the rows of `distinct_keys(6)` before."""
        keys = distinct_keys(6)
        table.load_chunk(TAG, keys, vectors_of(keys, DIM), LoadRecord("abc", 6, 6))
        settle(table)
        table.follow_log(TAG)
        table.order_by_time(TAG)
        return table

    def changes_in(self, database: AgingDatabase, after: int = 0) -> dict[int, int]:
        """Return the last change of each key, as `changed_rows_of` yields it, if it is above a sequence."""
        found: dict[int, int] = {}
        for keys, sequences in database.changed_rows_of(TAG):
            for key, sequence in zip(keys.tolist(), sequences.tolist(), strict=True):
                found[key] = max(sequence, found.get(key, 0))
        return {key: sequence for key, sequence in found.items() if sequence > after}

    def test_rows_expire_by_their_last_change_and_a_later_one_lives_on(self, aging: AgingDatabase) -> None:
        keys = distinct_keys(4)
        applied(aging, TAG, changes_of(keys, [10, 20, 30, 40]))
        applied(aging, TAG, changes_of(keys[:1], 35))
        expired = aging.expire(TAG, keys, 30)
        assert expired.kept.tolist() == [True, False, False, True]
        assert expired.removed == 2
        assert sorted(self.raw_rows(aging, TAG)) == sorted(keys[[0, 3]].tolist())
        last = aging.last_changes(TAG, keys)
        assert last[[0, 3]].tolist() == [35, 40]
        assert (last[[1, 2]] <= 30).all()
        assert self.changes_in(aging, 30) == {int(keys[0]): 35, int(keys[3]): 40}
        assert aging.size(TAG) == 2

    def test_rows_of_a_load_never_expire_but_their_changes_do(self, loaded: AgingDatabase) -> None:
        keys = distinct_keys(6)
        applied(loaded, TAG, changes_of(keys[:2], 10, version=1))
        expired = loaded.expire(TAG, keys, 15)
        assert not expired.kept.any()
        assert expired.removed == 2
        assert (loaded.last_changes(TAG, keys) <= 10).all()  # a lookup that still has a row must not find it younger
        assert sorted(self.raw_rows(loaded, TAG)) == sorted(keys[2:].tolist())
        assert applied(loaded, TAG, changes_of(keys[:1], 11, version=2)) == [True]
        assert fetched(loaded, TAG, keys, DIM)[1].tolist() == [True, False, True, True, True, True]

    def test_rows_of_a_load_expire_if_asked(self, loaded: AgingDatabase) -> None:
        keys = distinct_keys(6)
        applied(loaded, TAG, changes_of(keys[:3], [9, 11, 12], version=1))
        applied(loaded, TAG, changes_of(keys[2:3], 13, deleted=True))
        for removed in (4, 0):
            expired = loaded.expire(TAG, keys, 10, loaded=True)
            assert expired.kept.tolist() == [False, True, True, False, False, False]
            assert expired.removed == removed
            assert (loaded.last_changes(TAG, keys)[[0, 3, 4, 5]] < 10).all()
        assert sorted(self.raw_rows(loaded, TAG)) == sorted(keys[1:2].tolist())
        assert self.changes_in(loaded, 10) == {int(keys[1]): 11, int(keys[2]): 13}

    def test_an_expired_deletion_is_forgotten(self, aging: AgingDatabase) -> None:
        keys = distinct_keys(3)
        applied(aging, TAG, changes_of(keys, [10, 20, 30], deleted=True))
        assert sorted(self.changes_in(aging).values()) == [10, 20, 30]
        assert aging.expire(TAG, keys, 20).kept.tolist() == [False, False, True]
        assert self.changes_in(aging, 20) == {int(keys[2]): 30}
        assert aging.expire(TAG, keys[:0], 20).removed == 0

    def test_an_insert_and_a_delete_take_their_time(self, aging: AgingDatabase) -> None:
        keys = distinct_keys(3)
        applied(aging, TAG, changes_of(keys[:1], 10))
        before = time.time_ns() // 1000
        aging.insert(TAG, keys[:2], vectors_of(keys[:2], DIM, 1))
        aging.delete(TAG, keys[2:])
        after = time.time_ns() // 1000
        assert ((before <= aging.last_changes(TAG, keys)) & (aging.last_changes(TAG, keys) <= after + 1)).all()
        assert aging.expire(TAG, keys, before - 1).kept.all()
        later = after + 3_600_000_000
        applied(aging, TAG, changes_of(keys[:1], later))
        aging.insert(TAG, keys[1:2], vectors_of(keys[1:2], DIM, 2))
        assert applied(aging, TAG, changes_of(keys[1:2], before, version=3)) == [False]

    def test_many_rows_expire_at_once_and_again(self, aging: AgingDatabase) -> None:
        keys = distinct_keys(10_000)
        sequences = np.random.default_rng(4).integers(1, 1000, keys.size)
        applied(aging, TAG, changes_of(keys, sequences.tolist()))
        for limit in (300, 300, 700):
            kept, _ = aging.expire(TAG, keys, limit)
            np.testing.assert_array_equal(kept, sequences > limit)
            np.testing.assert_array_equal(fetched(aging, TAG, keys, DIM)[1], kept)
        assert self.changes_in(aging, 700) == dict(
            zip(keys[sequences > 700].tolist(), sequences[sequences > 700].tolist(), strict=True)
        )

    def test_rows_of_an_unknown_table_do_not_expire(self, aging: AgingDatabase) -> None:
        keys = distinct_keys(2)
        calls = (
            lambda: aging.order_by_time(OTHER),
            lambda: aging.expire(OTHER, keys, 1),
            lambda: aging.last_changes(OTHER, keys),
            lambda: next(aging.changed_rows_of(OTHER)),
        )
        for call in calls:
            with pytest.raises(UnknownTableError, match=OTHER):
                call()
