"""RocksDB is killed and damaged again and again, at random: what was acknowledged is there, and a load completes."""
# ruff: noqa: F811 - fixtures are imported

import random
import sys  # noqa: F401 - for the children
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from hps.databases.base import LoadRecord
from hps.databases.rocks_db.database import RocksDatabase  # noqa: F401 - for the children
from hps.errors import InvalidInputError, UnknownTableError
from hps.testing.databases import DIM, TAG, fetched, vectors_of
from tests.ring2.databases.rocks_db import test_rocks_db_faults as faults
from tests.ring2.databases.rocks_db import test_rocks_db_logs as damaged_logs
from tests.ring2.databases.rocks_db.test_rocks_db_faults import child, pristine  # noqa: F401 - fixtures
from tests.ring2.databases.rocks_db.test_rocks_db_logs import KEYS, killed  # noqa: F401 - a fixture
from tests.tables.rocks_database import opened


def test_kills_are_never_refused_whatever_the_logs_are_at(tmp_path: Path):
    code = """
        from tests.nightly.databases.rocks_db.test_rocks_db_kills import *
        database = RocksDatabase(sys.argv[1])
        tags = [f"{TAG}.{i}" for i in range(4)]
        for tag in tags:
            database.open_table(tag, DIM)
        print("open", flush=True)
        for turn in range(100_000):
            rng = random.Random(turn)
            tag = rng.choice(tags)
            database.insert(tag, KEYS[:500], vectors_of(KEYS[:500], DIM, turn % 250))
            print(tag, turn % 250, flush=True)
            if rng.random() < 0.3:
                database.finish_load(rng.choice(tags))
            if rng.random() < 0.1:
                print(tag, "dropped", flush=True)
                database.drop_table(tag)
                database.open_table(tag, DIM)
    """
    rng, path, acknowledged = random.Random(5), tmp_path / "rocksdb", {}
    for _ in range(10):
        with child(code, path) as writer:
            assert writer.stdout.readline() == "open\n", writer.stderr.read()
            lines = [writer.stdout.readline() for _ in range(rng.randrange(1, 40))]
            writer.kill()
            lines += writer.stdout.read().split("\n")  # what communicate() reads lacks the lines that are buffered already
        for tag, version in (line.split() for line in lines if line.strip()):
            acknowledged[tag] = version
            if version != "dropped":
                following = str((int(version) + 1) % 250)  # perhaps written, not acknowledged
        with opened(path) as database:
            for tag, version in acknowledged.items():
                database.open_table(tag, DIM)
                out, _ = fetched(database, tag, KEYS[:500], DIM)
                candidates = list({version, following} - {"dropped"})
                fits = [v for v in candidates if (out == vectors_of(KEYS[:500], DIM, int(v))).all()]
                assert fits or version == "dropped"
                acknowledged[tag] = fits[0] if fits else "dropped"


def test_a_table_that_is_replaced_under_its_writers_and_readers_never_mixes_its_widths(path: Path):
    with opened(path) as database:
        done = threading.Event()

        def use(work: Callable[[int], object], dim: int) -> int:
            calls = 0
            while not done.is_set():
                try:
                    work(dim)
                    calls += 1
                except (UnknownTableError, InvalidInputError):  # dropped, or of the other width just now
                    continue
            return calls

        def insert(dim: int) -> None:
            database.insert(TAG, KEYS, vectors_of(KEYS, dim))

        def load(dim: int) -> None:
            database.load_chunk(TAG, KEYS[::-1].copy(), vectors_of(KEYS[::-1].copy(), dim), LoadRecord("x", 1, 1))

        def fetch(dim: int) -> None:
            out, found = fetched(database, TAG, KEYS, dim)
            np.testing.assert_array_equal(out[found], vectors_of(KEYS, dim)[found])

        with ThreadPoolExecutor(6) as pool:
            users = [pool.submit(use, work, dim) for work in (insert, load, fetch) for dim in (DIM, DIM + 1)]
            try:
                for turn in range(10):
                    time.sleep(0.02)
                    database.drop_table(TAG)
                    database.open_table(TAG, DIM + turn % 2)
            finally:
                done.set()
            assert sum(user.result(60) for user in users) > 0


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize("damage", faults.DAMAGES)
@pytest.mark.parametrize("pattern", faults.PATTERNS)
def test_a_damaged_file_is_reported_and_never_answers_wrongly(
    pristine: Path, path: Path, pattern: str, damage: faults.Damage, read_only: bool
):
    faults.check_damaged(pristine, path, pattern, damage, read_only, seeds=12)


@pytest.mark.parametrize("read_only", [False, True])
def test_a_damaged_log_is_refused_and_left_as_it_is(killed: Path, tmp_path: Path, read_only: bool):
    assert damaged_logs.outcome_of(damaged_logs.ATTACK, killed, tmp_path / "rocksdb", str(read_only), "8") == ""
