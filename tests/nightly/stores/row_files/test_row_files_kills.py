"""Row files are killed sixty times, at random, over loads, seals, writes and swaps of versions.

A child writes groups of rows, deletes them, seals, and swaps to another version, and says before each step what it tries and
after it what is acknowledged. Its parent kills it, opens the directory as a start does, and judges every row.
"""

import json
import random
import sys  # noqa: F401 - for the children
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from hps.stores.base import LoadRecord
from hps.stores.row_files.database import RowFilesDatabase
from hps.testing.databases import DIM, fetched, vectors_of
from tests.ring2.stores.rocks_db.test_rocks_db_faults import child

ROUNDS, KILLS = 4, 15  # sixty in all; each round ends within the time of a test, also on a busy machine
STEPS = 20  # at most, before a kill
GROUPS = 12
KEYS = np.arange(6000, dtype=np.int64) * 1_000_003 - 77
GONE = 0  # version of a deleted group


def group(number: int) -> np.ndarray:
    return KEYS[number::GROUPS].copy()


def rows_of(keys: np.ndarray, version: int) -> np.ndarray:
    rows = vectors_of(keys, DIM)
    rows[:, 0] = version
    return rows


def tag_of(version: int) -> str:
    return f"hps_et.shop.item@{version}"


def load(database: RowFilesDatabase, version: int) -> None:
    """Load a version, or what is left of it, as a start does."""
    tag, fingerprint = tag_of(version), f"files {version}"
    database.open_table(tag, DIM)
    record = database.load_record(tag)
    if record is not None and record.complete:
        return
    if record is not None and record.modified and not database.keeps_changes(tag):
        database.drop_table(tag)
        database.open_table(tag, DIM)
    for start in range(0, KEYS.size, 2000):
        stop = min(start + 2000, KEYS.size)
        rows = rows_of(KEYS[start:stop], version)
        database.load_chunk(tag, KEYS[start:stop], rows, LoadRecord(fingerprint, stop, KEYS.size))
    database.finish_load(tag)


def live(path: str, version: int, seed: int) -> None:
    """What a child does until it is killed; `seed` is also the first version of its writes."""
    rng, database = random.Random(seed), RowFilesDatabase(path, seal_share=0)
    load(database, version)
    print("open", flush=True)
    for written in range(seed + 1, seed + 100_000):
        what, number = rng.random(), rng.randrange(GROUPS)
        if what < 0.65:
            print(json.dumps(["try", "write", number, written]), flush=True)
            database.insert(tag_of(version), group(number), rows_of(group(number), written))
        elif what < 0.75:
            print(json.dumps(["try", "write", number, GONE]), flush=True)
            database.delete(tag_of(version), group(number))
        elif what < 0.9:
            print(json.dumps(["try", "seal"]), flush=True)
            database.seal(tag_of(version))
        else:
            print(json.dumps(["try", "swap", written]), flush=True)
            load(database, written)
            version, before = written, version
            print(json.dumps(["swapped", written]), flush=True)
            database.drop_table(tag_of(before))
        print(json.dumps(["done"]), flush=True)


@pytest.mark.parametrize("seed", range(ROUNDS))
def test_kills_lose_nothing_that_was_acknowledged(tmp_path: Path, seed: int) -> None:
    code = """
        from tests.nightly.stores.row_files.test_row_files_kills import *
        live(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    """
    rng, path, version = random.Random(seed), tmp_path / "rows", 1
    known = {number: {version} for number in range(GROUPS)}  # versions that each group may have
    kinds: dict[str, int] = {}
    for kill in range(KILLS):
        with child(code, path, version, 1000 * (kill + 1)) as writer:
            first = writer.stdout.readline()
            assert first == "open\n", first + writer.stderr.read()
            lines = [writer.stdout.readline() for _ in range(rng.randrange(1, 2 * STEPS))]
            writer.kill()
            lines += writer.stdout.read().split("\n")
        trying: list = []
        for line in filter(str.strip, lines):
            try:
                said = json.loads(line)
            except ValueError:  # cut by the kill
                continue
            if said[0] == "try":
                trying = said[1:]
                if trying[0] == "write":
                    known[trying[1]] = known[trying[1]] | {trying[2]}
            elif said[0] == "swapped":
                version, known = said[1], {number: {said[1]} for number in range(GROUPS)}
                trying = ["drop"]
            else:
                if trying[0] == "write":
                    known[trying[1]] = {trying[2]}
                trying = []
        kinds[trying[0] if trying else "none"] = kinds.get(trying[0] if trying else "none", 0) + 1
        with closing(RowFilesDatabase(path, seal_share=0)) as database:
            assert tag_of(version) in database.tags()
            load(database, version)
            for number in range(GROUPS):
                rows, found = fetched(database, tag_of(version), group(number), DIM)
                fits = {v for v in known[number] if _is(rows, found, number, v)}
                if not fits:  # a batch that was not acknowledged may be there in part
                    assert len(known[number]) > 1, (kill, number, known[number])
                    assert trying[:2] == ["write", number], (kill, trying, number, known[number])
                    for i in range(found.size):
                        assert any(_is(rows[i : i + 1], found[i : i + 1], number, v, i) for v in known[number])
                    database.insert(tag_of(version), group(number), rows_of(group(number), 500))
                    fits = {500}
                known[number] = fits
            for other in database.tags():
                if other != tag_of(version):
                    database.drop_table(other)
            database.wait_until_durable(tag_of(version))
            assert len(list((path / "tables").iterdir())) == 2
    assert len(kinds) > 2, kinds


def _is(rows: np.ndarray, found: np.ndarray, number: int, version: int, at: int | None = None) -> bool:
    if version == GONE:
        return not found.any()
    keys = group(number) if at is None else group(number)[at : at + 1]
    return bool(found.all() and (rows == rows_of(keys, version)).all())
