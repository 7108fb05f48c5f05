"""Loads of deltas are killed again and again; in the end the delta is whole, and its base as it was."""

import random
import sys
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from hps.databases.rocks_db.database import RocksDatabase
from hps.errors import DatabaseError
from tests.ring2.databases.rocks_db.test_interrupted_load import (
    SEED,
    kill_at,
    rows_of,
)
from tests.tables.deltas import Change, Versions, held_of, spec
from tests.tables.table_loads import TABLE, nothing_to_do


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
