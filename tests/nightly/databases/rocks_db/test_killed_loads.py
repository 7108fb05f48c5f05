"""Loads are killed again and again, of `hps load` and of starting servers; in the end every tier holds the model, only it."""

import random
import sys
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from hps.configuration.load import load_configuration
from hps.databases.rocks_db.database import RocksDatabase
from hps.errors import DatabaseError
from hps.registry import implementation
from hps.types import KeyArray
from tests.ring2.databases.rocks_db.test_interrupted_load import (
    DIM,
    SEED,
    TAG,
    check_refused_as_whole,
    check_whole,
    configuration,
    kill_at,
    rows_of,
    write_model,
)
from tests.tables.deltas import Change, Versions, held_of, spec
from tests.tables.loading_child import BATCH_ROWS
from tests.tables.table_loads import TABLE, nothing_to_do


def check_prefix(directory: Path, numbers: KeyArray, seed: int) -> int:
    """Every row that the record counts is there and right; returns how many these are."""
    settings = load_configuration(configuration(directory)).persistent_db.model_copy(update={"read_only": True})
    with closing(implementation("database", "rocks_db").from_config(settings)) as database:
        if TAG not in database.tags():
            return 0
        database.open_table(TAG, DIM)
        record = database.load_record(TAG)
        if record is None:
            assert database.size(TAG) == 0
            return 0
        keys, vectors = rows_of(numbers[: record.rows_done], seed)
        out, found = np.empty_like(vectors), np.zeros(keys.size, np.bool_)
        database.fetch(TAG, keys, out, found)
        assert found.all()
        np.testing.assert_array_equal(out, vectors)
        if not record.complete:
            check_refused_as_whole(directory)
        return record.rows_done


def test_a_load_that_is_killed_at_ten_random_moments_comes_back_right(tmp_path: Path) -> None:
    sys.stdout.write(f"seed {SEED}\n")
    rng = random.Random(SEED)
    config = configuration(tmp_path)
    numbers = np.arange(120_000)
    write_model(tmp_path / "item", numbers, seed=1)
    phases = ["stage", "ingest", "record", "merge", *rng.choices(["stage", "ingest", "record", "volatile"], k=4)]
    rng.shuffle(phases)
    rows = sorted(rng.randrange(numbers.size - 10 * BATCH_ROWS) for _ in phases)  # a merge comes every fifth batch
    moments = [*zip(phases, rows, strict=True), ("ingest", numbers.size - BATCH_ROWS), ("settle", 0)]
    done = 0
    killed_in = []
    for i, (phase, row) in enumerate(moments):
        program = ("load", "serve")[i % 2] if phase != "volatile" else "serve"
        killed_in.append(kill_at(program, config, phase, row, before_kill=lambda _: time.sleep(rng.uniform(0, 0.01))))
        before, done = done, check_prefix(tmp_path, numbers, seed=1)
        assert before <= done
        assert (done == numbers.size) == (phase == "settle")
    assert [phase for phase, _ in killed_in] == [phase for phase, _ in moments]
    assert len({row for _, row in killed_in}) >= 6, "the kills were not spread over the load"
    check_whole(config, numbers, np.arange(-1000, 0), seed=1)


def check_killed_delta(directory: Path, versions: Versions, base_there: bool) -> None:
    """Nothing of the delta passes for whole, and its base is as it was."""
    with closing(RocksDatabase(directory / "rocksdb")) as database:
        tag, record = spec("2").tag, None
        if tag in database.tags():
            database.open_table(tag, TABLE.dim)
            record = database.load_record(tag)
            assert record is not None or database.size(tag) == 0
        if record is not None:
            assert not record.complete
            with pytest.raises(DatabaseError, match="of a load that was interrupted"):
                versions.load("2", [], keep=[database])
        if base_there:
            assert held_of(database, "1") == versions.expected("1")
            base = database.load_record(spec("1").tag)
            assert base is not None
            assert (base.complete, base.modified) == (True, False)


@pytest.mark.parametrize("base_there", [True, False])
def test_a_delta_that_is_killed_at_random_moments_is_whole_in_the_end_and_its_base_unharmed(
    tmp_path: Path, base_there: bool
) -> None:
    sys.stdout.write(f"seed {SEED}\n")
    rng = random.Random(SEED + base_there)
    numbers = np.arange(40_000)
    versions = Versions(tmp_path / "shop", rows_of(numbers, 1, TABLE.dim))
    versions.add(Change(rows_of(numbers[5_000:6_000], 2, TABLE.dim), rows_of(numbers[5_500:7_000], 1)[0]))
    if base_there:
        with closing(RocksDatabase(tmp_path / "rocksdb")) as database:
            versions.load("1", [database])
    phases = [
        "stage",
        "ingest",
        "record",
        "merge",
        "settle",
        "drop",
        "forget",
        *rng.choices(["stage", "ingest", "record"], k=3),
    ]
    killed = []
    for phase in phases:
        row = rng.randrange(30_000) if phase in ("stage", "ingest", "record", "merge") else 0
        killed.append(kill_at("delta", tmp_path, phase, row, TABLE.dim, lambda _: time.sleep(rng.uniform(0, 0.01)))[0])
        check_killed_delta(tmp_path, versions, base_there)
    assert killed == phases
    with closing(RocksDatabase(tmp_path / "rocksdb")) as database:
        versions.load("2", [database])
        assert held_of(database, "2") == versions.expected("2")
        assert nothing_to_do(versions.load("2", [database]))
