"""Online updates in the persistent database: what it keeps of their order over restarts, failures, loads and older releases."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from hps.errors import DatabaseCorruptError, DatabaseError, ReadOnlyError
from hps.stores.base import LoadRecord, LogPosition
from hps.stores.rocks_db.database import RocksDatabase
from hps.stores.rocks_db.engine import DiskFullError
from hps.testing.databases import DIM, OTHER, TAG, applied, changes_of, distinct_keys, fetched, vectors_of
from hps.testing.waiting import PATIENCE_S, wait_until
from tests.tables.rocks_database import assert_holds, insert, opened

KEYS = distinct_keys(350)
POSITIONS = {"p": LogPosition("17", 10)}


@pytest.fixture
def table(path: Path) -> Iterator[RocksDatabase]:
    with opened(path, max_batch_size=100) as database:
        yield database


def written(database: RocksDatabase, tag: str = TAG) -> dict[bytes, bytes]:
    """What stands beside the rows of a table."""
    return dict(database._engine.family(f"hps-written/{tag}").items())


def versions(database: RocksDatabase, *known: int) -> list[int | None]:
    """Which of the known versions each of KEYS has, None for an absent key."""
    out, found = fetched(database, TAG, KEYS, DIM)
    of = {vectors_of(KEYS, DIM, version)[i].tobytes(): version for version in known for i in range(KEYS.size)}
    return [of[row.tobytes()] if there else None for row, there in zip(out, found, strict=True)]


def test_order_and_positions_last_over_a_restart_and_what_is_written_before_the_log_is_followed_again(path: Path):
    with opened(path) as database:
        applied(database, TAG, changes_of(KEYS[:5], [10, 10, 10, 10, 7], [False] * 3 + [True, False], 1), POSITIONS)
    with opened(path) as database:
        database.insert(TAG, KEYS[:1], vectors_of(KEYS[:1], DIM, 2))
        database.delete(TAG, KEYS[1:2])
        assert database.follow_log(TAG) == POSITIONS
        assert applied(database, TAG, changes_of(KEYS[:5], [10, 10, 9, 9, 8], version=3)) == [False] * 4 + [True]
        assert versions(database, 1, 2, 3)[:5] == [2, None, 1, None, 3]
    with opened(path) as database:
        assert applied(database, TAG, changes_of(KEYS[:4], [10, 10, 10, 12], version=4)) == [False, False, True, True]
        assert versions(database, 2, 3, 4)[:5] == [2, None, 4, 4, 3]


def test_a_table_that_follows_no_log_has_what_it_had(table: RocksDatabase):
    table.insert(TAG, KEYS, vectors_of(KEYS, DIM))
    assert set(map(len, written(table).values())) == {8}
    table.delete(TAG, KEYS)
    assert written(table) == {}


def test_a_row_that_a_release_without_sequences_wrote_is_older_than_any_change(path: Path):
    with opened(path) as database:
        applied(database, TAG, changes_of(KEYS[:2], 10))
        value = (1234567).to_bytes(8, "little")
        database._engine.write({f"hps-written/{TAG}": ([KEYS[:1].tobytes()], [value])}, {}, "writing as an older release")
    with opened(path) as database:
        assert applied(database, TAG, changes_of(KEYS[:2], 5, version=1)) == [True, False]
        assert database.written_at(TAG, KEYS[:1])[0] > 1234567


def test_times_are_those_of_the_change_and_a_deleted_row_has_none(table: RocksDatabase):
    applied(table, TAG, changes_of(KEYS[:2], 10, [False, True]))
    applied(table, TAG, changes_of(KEYS[:2], 9))
    times = table.written_at(TAG, KEYS[:3])
    assert times[0] == int.from_bytes(written(table)[KEYS[:1].tobytes()][:8], "little") > 10**15
    assert times[1:].tolist() == [0, 0]
    table.insert(TAG, KEYS[:1], vectors_of(KEYS[:1], DIM))
    assert table.written_at(TAG, KEYS[:1])[0] > times[0]
    table.delete(TAG, KEYS[:1])
    assert table.written_at(TAG, KEYS[:1])[0] == 0


def test_after_a_write_that_failed_halfway_each_row_has_the_sequence_of_its_state(
    table: RocksDatabase, monkeypatch: pytest.MonkeyPatch
):
    applied(table, TAG, changes_of(KEYS, 10, version=1), POSITIONS)
    write, calls = table._engine.write, []

    def fail(*arguments: object) -> None:
        calls.append(arguments)
        if len(calls) == 3:
            raise DatabaseError("was told to fail")
        write(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(table._engine, "write", fail)
        with pytest.raises(DatabaseError, match="told"):
            table.apply(TAG, changes_of(KEYS, 30, version=3), {"p": LogPosition("18", 30)})
    assert table.follow_log(TAG) == POSITIONS
    before = versions(table, 1, 3)
    assert sorted(before) == [1] * 150 + [3] * 200
    assert applied(table, TAG, changes_of(KEYS, 20, version=2)) == [version == 1 for version in before]
    assert versions(table, 2, 3) == [2 if version == 1 else 3 for version in before]
    assert all(applied(table, TAG, changes_of(KEYS, 30, version=3)))


def test_a_database_that_was_opened_again_goes_on_with_what_is_on_disk(table: RocksDatabase):
    applied(table, TAG, changes_of(KEYS[:3], 10, version=1), POSITIONS)
    table._engine.stuck = True  # as a write that failed leaves it
    assert table.follow_log(TAG) == POSITIONS
    assert applied(table, TAG, changes_of(KEYS[:3], [9, 10, 11], version=2)) == [False, True, True]
    assert not table._engine.stuck


@pytest.mark.parametrize(
    "failing",
    [
        {"check_directory": DatabaseCorruptError("damaged")},
        {"clear_staging": DatabaseError("no descriptor")},
        {"clear_staging": DiskFullError("full"), "opened_in_view": DatabaseError("no descriptor")},
    ],
    ids=" and ".join,
)
def test_an_opening_that_fails_holds_nothing_and_one_again_is_tried_now_and_then(
    path: Path, monkeypatch: pytest.MonkeyPatch, failing: dict[str, DatabaseError]
):
    def fails(work: Callable[[], object]) -> None:
        with monkeypatch.context() as patched:
            for function, error in failing.items():
                patched.setattr(f"hps.stores.rocks_db.directory.{function}", Mock(side_effect=error))
            with pytest.raises(DatabaseError, match=r"damaged|no descriptor"):
                work()

    monkeypatch.setattr("hps.stores.rocks_db.database._RECOVER_EVERY_S", PATIENCE_S)
    with opened(path) as table:
        insert(table, KEYS)
        table._engine.stuck = True  # as a write that failed leaves it
        fails(lambda: insert(table, KEYS, 1))
        for _ in range(2):
            with pytest.raises(DatabaseError, match=r"damaged|no descriptor"):
                fetched(table, TAG, KEYS, DIM)
        table._recover_at = 0.0  # the time for the next try
        assert_holds(table, KEYS)
        insert(table, KEYS, 1)
    descriptors = len(os.listdir("/proc/self/fd"))
    fails(lambda: RocksDatabase(path))
    assert len(os.listdir("/proc/self/fd")) <= descriptors
    with opened(path) as table:
        assert_holds(table, KEYS, 1)


def test_a_table_that_is_loaded_from_other_files_forgets_the_log_and_one_whose_files_moved_does_not(path: Path):
    def load(database: RocksDatabase, fingerprint: str, rows: int, done: int) -> None:
        record = LoadRecord(fingerprint, done, 350)
        database.load_chunk(TAG, KEYS[:rows], vectors_of(KEYS[:rows], DIM), record)

    with opened(path) as database:
        load(database, "a", 350, 350)
        applied(database, TAG, changes_of(KEYS, 10, (KEYS % 2 == 0).tolist(), 1), POSITIONS)
        load(database, "moved", 0, 350)
        assert database.follow_log(TAG) == POSITIONS
        assert not any(applied(database, TAG, changes_of(KEYS, 9)))
        load(database, "b", 0, 0)  # as a load over the rows begins
        assert database.follow_log(TAG) == {}
        load(database, "b", 350, 350)
        assert versions(database, 0) == [0] * 350
        assert database.follow_log(TAG) == {}
    with opened(path) as database:
        assert all(applied(database, TAG, changes_of(KEYS[:100], 8, version=2)))
    with opened(path) as database:
        assert all(applied(database, TAG, changes_of(KEYS, 8, version=3)))
        load(database, "c", 350, 350)
        assert all(applied(database, TAG, changes_of(KEYS, 7, version=4)))


def test_a_drop_that_was_interrupted_takes_the_log_along(path: Path):
    with opened(path) as database:
        applied(database, TAG, changes_of(KEYS, 10), POSITIONS)
        database._records.mark_dropped(TAG)  # and the process dies
    with opened(path) as database:
        assert database.follow_log(TAG) == {}
        assert all(applied(database, TAG, changes_of(KEYS, 9)))


def test_only_changes_that_are_made_modify_the_table(table: RocksDatabase):
    record = LoadRecord("a", 350, 350)
    table.load_chunk(TAG, KEYS, vectors_of(KEYS, DIM), record)
    table.follow_log(TAG)
    table.apply(TAG, changes_of(KEYS[:0], 10), POSITIONS)
    assert table.load_record(TAG) == record
    assert table.writer_token(TAG) is None
    table.apply(TAG, changes_of(KEYS[:1], 10), POSITIONS)
    assert table.load_record(TAG).modified
    assert table.writer_token(TAG) is not None


def test_a_read_only_database_follows_no_log(path: Path):
    with opened(path) as database:
        applied(database, TAG, changes_of(KEYS[:2], 10, [False, True]), POSITIONS)
    with opened(path, read_only=True) as database:
        for call in (lambda: database.follow_log(TAG), lambda: database.apply(TAG, changes_of(KEYS, 11), {})):
            with pytest.raises(ReadOnlyError, match=TAG):
                call()
        assert (database.written_at(TAG, KEYS[:2]) > 0).tolist() == [True, False]


@pytest.mark.parametrize("rows", [40_000, 200_000])
def test_more_rows_than_memory_knows_keep_their_order(path: Path, rows: int):
    keys = distinct_keys(rows)
    sequences = np.random.default_rng(5).integers(100, 200, rows)
    with opened(path, 1) as database:
        database.open_table(OTHER, DIM)
        assert all(applied(database, OTHER, changes_of(keys, sequences.tolist())))
        chosen = np.random.default_rng(6).permutation(rows)[:5000]
        asked = np.random.default_rng(7).integers(100, 200, 5000)
        assert applied(database, OTHER, changes_of(keys[chosen], asked.tolist())) == (asked >= sequences[chosen]).tolist()


def test_write_ahead_logs_do_not_pile_up_where_many_changes_must_be_compared(
    table: RocksDatabase, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("hps.stores.rocks_db.engine._MANY_LOGS", 10)
    for _ in range(60):
        assert all(applied(table, TAG, changes_of(KEYS[:50], 100)))
        table._tables[TAG]._order.invalidate()  # as after a start
    wait_until(lambda: len(list(table.path.glob("*.log"))) <= 15, "RocksDB has removed the others")
