"""RocksDB's write-ahead log, damaged in every way: all that was acknowledged is answered, or the opening is refused."""

import json
import random
import re
import shutil
import struct
import subprocess
import zlib
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from hps.errors import DatabaseCorruptError
from hps.stores.base import LoadRecord
from hps.stores.rocks_db.database import RocksDatabase
from hps.stores.rocks_db.write_ahead_log import check_logs
from hps.testing.databases import DIM, TAG, distinct_keys, fetched, vectors_of
from hps.tools.cli.app import app
from tests.ring2.stores.rocks_db import test_rocks_db_faults as faults
from tests.ring2.stores.rocks_db.test_rocks_db_faults import BLOCK, outcome_of
from tests.tables.rocks_database import opened

ROWS = 12_000
KEYS = distinct_keys(ROWS)
VECTORS = vectors_of(KEYS, DIM)
OTHER = f"{TAG}.other"
SEAL = "hps-log.json"


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a kill leaves: ROWS acknowledged rows of TAG in two logs and in no other file."""
    path, left = tmp_path_factory.mktemp("written") / "rocksdb", tmp_path_factory.mktemp("killed") / "rocksdb"
    with opened(path) as database:
        database.open_table(OTHER, DIM)
        for start in range(0, ROWS, 3000):
            database.insert(TAG, KEYS[start : start + 3000], VECTORS[start : start + 3000])
            database.insert(OTHER, KEYS[:10], VECTORS[:10])
            if start == 3000:
                database.load_chunk(OTHER, KEYS[:100], VECTORS[:100], LoadRecord("x", 100, 100))  # begins another log
        shutil.copytree(path, left)
    assert len(logs(left)) == 2
    return left


def logs(path: Path) -> list[Path]:
    return sorted(path.glob("*.log"))


def opens_whole(path: Path, read_only: bool) -> bool:
    """True if every acknowledged row is answered, False if the opening is refused with what to do."""
    try:
        database = RocksDatabase(path, read_only=read_only)
    except DatabaseCorruptError as error:
        return f"hps check-database {path}" not in str(error)
    try:
        database.open_table(TAG, DIM)
        out, found = fetched(database, TAG, KEYS, DIM)
        assert found.all(), f"{np.count_nonzero(~found)} acknowledged rows are gone"
        np.testing.assert_array_equal(out, VECTORS)
    finally:
        database.close()
    return True


# -- damage ------------------------------------------------------------------------------------------------------------


DAMAGES = ("cut", "empty", "garble", "swap", "recycle")
ATTACK = """
    from itertools import product
    from tests.ring2.stores.rocks_db.test_rocks_db_logs import *
    killed, path, read_only, seeds = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] == "True", int(sys.argv[4])
    for damage, victim, seed in product(DAMAGES, range(2), range(seeds)):
        shutil.copytree(killed, path)
        log = logs(path)[victim]
        faults.damage_file(log, damage, random.Random(seed))
        before = {file: file.read_bytes() for file in logs(path)}
        try:
            assert not opens_whole(path, read_only)
        except AssertionError as error:
            print(damage, victim, seed, repr(error))
        else:
            assert {file: file.read_bytes() for file in logs(path)} == before
        shutil.rmtree(path)
"""


@pytest.mark.parametrize("read_only", [False, True])
def test_a_damaged_log_is_refused_and_left_as_it_is(killed: Path, tmp_path: Path, read_only: bool):
    assert outcome_of(ATTACK, killed, tmp_path / "rocksdb", str(read_only), "1") == ""  # in a child, since RocksDB hangs


@pytest.mark.parametrize(("victim", "read_only"), [(0, False), (1, True)])
def test_a_lost_log_is_refused(killed: Path, tmp_path: Path, victim: int, read_only: bool):
    path = Path(shutil.copytree(killed, tmp_path / "rocksdb"))
    lost = logs(path)[victim]
    lost.unlink()
    with pytest.raises(DatabaseCorruptError, match=rf"{lost}.*missing.*check-database"):
        RocksDatabase(path, read_only=read_only)


def test_a_manifest_that_hangs_rocks_db_is_refused(killed: Path, tmp_path: Path):
    path = Path(shutil.copytree(killed, tmp_path / "rocksdb"))
    (path / "hps-manifest.json").unlink()
    with open(next(path.glob("MANIFEST-*")), "ab") as manifest:
        manifest.write(struct.pack("<IHB", 1, 10, 7) + bytes(100))
    assert outcome_of("""
        from tests.ring2.stores.rocks_db.test_rocks_db_logs import *
        print(opens_whole(Path(sys.argv[1]), False))
    """, path) == "False\n"  # fmt: skip


# -- what a kill or a power cut leaves ---------------------------------------------------------------------------------

RECORD = struct.pack("<IHB", 0x12345678, 3000, 1)
TAILS = {
    "nothing": b"",
    "zeros": bytes(50_000),
    "random bytes": random.Random(4).randbytes(70_000),
    "half a header": RECORD[:4],
    "half a record": RECORD + bytes(1000),
    "a damaged record": RECORD + bytes(4000),
    **{f"a record of type {kind}": struct.pack("<IHB", 1, 10, kind) + bytes(100) for kind in (5, 6, 7, 8, 11)},
}


@pytest.mark.parametrize("read_only", [False, True])
def test_a_torn_end_behind_what_was_acknowledged_is_dropped(killed: Path, tmp_path: Path, read_only: bool):
    code = """
        from tests.ring2.stores.rocks_db.test_rocks_db_logs import *
        for name, tail in TAILS.items():
            path = Path(shutil.copytree(sys.argv[1], Path(sys.argv[2], name)))
            with open(logs(path)[-1], "ab") as log:
                log.write(tail)
            print(name, opens_whole(path, sys.argv[3] == "True"))
    """
    assert outcome_of(code, killed, tmp_path, str(read_only)).splitlines() == [f"{name} True" for name in TAILS]


def test_a_log_without_its_seal_is_read_if_only_its_last_record_is_incomplete(killed: Path, tmp_path: Path):
    for i, (size, damage, whole) in enumerate([(0, 0, True), (2000, 0, True), (0, 1, False), (0, 3, False)]):
        path = Path(shutil.copytree(killed, tmp_path / f"rocksdb-{i}"))
        (path / SEAL).write_text("{" if i else "")
        data = bytearray(logs(path)[1].read_bytes())
        data[BLOCK + 6] ^= damage  # 0, or from a middle part to 3 ^ 1 = 2, or to 3 ^ 3 = 0
        logs(path)[1].write_bytes(data + RECORD + bytes(size) if size else data)
        assert opens_whole(path, False) is whole


@pytest.mark.parametrize(("oldest", "lost"), [(6, [7, 8]), (7, [7, 8]), (8, [8]), (9, [])])
def test_a_missing_log_is_lost_from_the_oldest_on_that_is_still_needed(tmp_path: Path, oldest: int, lost: list[int]):
    sealed = [[number, 100, 0] for number in (7, 8)]
    (tmp_path / SEAL).write_text(json.dumps({"logs": sealed, "crc32": zlib.crc32(json.dumps(sealed).encode())}))
    assert list(check_logs(tmp_path, lambda: oldest).damages) == [f"{number:06}.log" for number in lost]


def test_a_log_that_was_written_to_files_is_not_missed(killed: Path, tmp_path: Path):
    path = Path(shutil.copytree(killed, tmp_path / "rocksdb"))
    seal = (path / SEAL).read_bytes()
    assert opens_whole(path, False)
    (path / SEAL).write_bytes(seal)  # as if killed before the seal was renewed
    assert opens_whole(path, False)
    assert opens_whole(path, True)


# -- hps check-database ------------------------------------------------------------------------------------------------


def check(path: Path) -> tuple[int, str]:
    """Run `hps check-database`, which may change nothing; returns its exit code and what it said."""
    before = {file: file.read_bytes() for file in path.iterdir() if file.is_file()} if path.is_dir() else {}
    result = CliRunner().invoke(app, ["check-database", str(path)])
    assert {file: file.read_bytes() for file in before} == before
    return result.exit_code, result.output


def rows_in(output: str, tag: str) -> int:
    return int(re.search(rf"^{tag}: ([\d,]+) rows? of {DIM} floats can be read", output, re.MULTILINE)[1].replace(",", ""))


@pytest.mark.parametrize(
    ("damage", "victim"),
    [("garble", 0), ("swap", 1), ("cut", 0), ("empty", 1), ("recycle", 0), ("remove", 0), ("remove", 1)],
)
def test_the_cure_of_a_damaged_log_saves_the_rows_that_can_be_read(killed: Path, tmp_path: Path, damage: str, victim: int):
    path = Path(shutil.copytree(killed, tmp_path / "rocksdb"))
    code, output = check(path)
    assert (code, rows_in(output, TAG)) == (0, ROWS)
    assert f"{path}: good" in output
    log = logs(path)[victim]
    faults.damage_file(log, damage, random.Random(2))
    code, output = check(path)
    assert code == 1
    assert f"damaged: {log}" in output
    readable = rows_in(output, TAG)
    assert readable < ROWS
    for line in output.splitlines():
        if line.startswith("  "):
            subprocess.run(line, shell=True, check=True)
    assert check(path)[0] == 0
    with opened(path) as database:
        out, found = fetched(database, TAG, KEYS, DIM)
    assert np.count_nonzero(found) == readable
    np.testing.assert_array_equal(out[found], VECTORS[found])


def test_a_damaged_file_of_one_table_leaves_the_other_tables_readable(tmp_path: Path):
    path = tmp_path / "rocksdb"
    with opened(path) as database:
        database.load_chunk(TAG, KEYS, VECTORS, LoadRecord("x", ROWS, ROWS))
        (file,) = path.glob("*.sst")
        database.open_table(OTHER, DIM)
        database.load_chunk(OTHER, KEYS[:100], VECTORS[:100], LoadRecord("x", 100, 100))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    code, output = check(path)
    assert code == 1
    assert rows_in(output, OTHER) == 100
    assert 0 < rows_in(output, TAG) < ROWS
    assert f"damaged: table {TAG}: " in output


def test_what_is_no_database_cannot_be_looked_at(tmp_path: Path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "nowhere", tmp_path / "file"):
        assert check(path)[0] == 2
