"""Loads are killed again and again, of `hps load` and of starting servers; in the end every tier holds the model, only it."""

import json
import random
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hps
from hps.configuration.load import load_configuration
from hps.databases.rocks_db.database import RocksDatabase
from hps.errors import DatabaseError
from hps.models.sample import sample_vectors
from hps.models.writer import write_sparse_model
from hps.registry import implementation
from hps.types import FloatArray, KeyArray
from tests.servers.running_service import document_of, model_of
from tests.tables.deltas import Change, Versions, held_of, spec
from tests.tables.loading_child import BATCH_ROWS
from tests.tables.table_loads import TABLE, nothing_to_do

DIM = 8
TAG = "hps_et.shop.item"
SEED = 20_240_607
ODD = np.int64(-7046029254386353131)  # times a range: distinct keys, in no order


def rows_of(numbers: KeyArray, seed: int, dim: int = DIM) -> tuple[KeyArray, FloatArray]:
    keys = numbers.astype(np.int64) * ODD
    return keys, sample_vectors(keys, dim, seed)


def write_model(path: Path, numbers: KeyArray, seed: int) -> None:
    chunks = (rows_of(part, seed) for part in np.array_split(numbers, 10))
    write_sparse_model(path, chunks, overwrite=True)


def configuration(directory: Path, **persistent: Any) -> Path:
    """A ps.json with a hash map and RocksDB."""
    limits = {"maxnum_catfeature_query_per_table_per_sample": [1000], "gpucacheper": 0.1, "hit_rate_threshold": 1.1}
    model = model_of("shop", [directory / "item"], {"item": DIM}, default_value_for_each_table=[0.25], **limits)
    content = document_of(model, persistent=directory / "rocksdb")
    content["persistent_db"] |= {"num_threads": 2, **persistent}
    path = directory / f"ps{'-'.join(persistent)}.json"
    path.write_text(json.dumps(content))
    return path


def check_whole(config: Path, numbers: KeyArray, absent: KeyArray, seed: int) -> None:
    """RocksDB and the hash map hold exactly the rows of `numbers`, and lookups answer them bit for bit."""
    keys, vectors = rows_of(numbers, seed)
    order = np.argsort(keys)
    with hps.HPS(str(config)) as server:
        record = server.model("shop").chain.databases[1].load_record(TAG)
        assert record is not None
        assert (record.complete, record.rows_total, record.modified) == (True, numbers.size, False)
        for database in server.model("shop").chain.databases:
            chunks = list(database.scan(TAG, 200_000))
            held = np.concatenate([part for part, _ in chunks])
            place = np.argsort(held)
            np.testing.assert_array_equal(held[place], keys[order], err_msg=database.kind)
            np.testing.assert_array_equal(
                np.concatenate([part for _, part in chunks])[place], vectors[order], err_msg=database.kind
            )
        asked = np.concatenate([keys, absent * ODD])
        answers, found = server.lookup(asked, "shop", "item", return_found=True)
        np.testing.assert_array_equal(found, np.arange(asked.size) < keys.size)
        np.testing.assert_array_equal(answers[found], vectors)
        assert (answers[~found] == 0.25).all()


# -- the real command ----------------------------------------------------------------------------------------------------


def kill_while_loading(command: list[str], delay_s: float) -> bool:
    """Start, wait until the first rows are read and a little longer, kill; False when it was done by then."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr
    for line in process.stderr:
        if f"{TAG}: " in line:
            break
    time.sleep(delay_s)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    return process.returncode == -signal.SIGKILL


@pytest.mark.slow
def test_the_load_command_ends_whole_whenever_it_was_killed(tmp_path: Path) -> None:
    config = configuration(tmp_path)
    command = [sys.executable, "-m", "hps", "load", str(config)]
    numbers = np.arange(600_000)
    write_model(tmp_path / "item", numbers, seed=1)
    killed = [kill_while_loading(command, delay_s) for delay_s in (0.0, 0.2)]
    write_model(tmp_path / "item", numbers, seed=2)  # the half-loaded table is of another version from now on
    killed.append(kill_while_loading(command, 0.1))
    assert any(killed)
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "rocks_db: " in done.stdout
    check_whole(config, numbers, np.arange(-100, 0), seed=2)
    again = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "complete, nothing to do (600,000 rows)" in again.stdout


# -- at chosen moments ---------------------------------------------------------------------------------------------------


def kill_at(program: str, config: Path, phase: str, row: int, delay_s: float, dim: int = DIM) -> tuple[str, int]:
    """Start a load and kill it in the first such phase from that row on; say where. See tests.tables.loading_child."""
    arguments = [program, str(config), str(dim), phase, str(row)]
    with subprocess.Popen(
        [sys.executable, "-m", "tests.tables.loading_child", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout
        line = process.stdout.readline()
        time.sleep(delay_s)
        process.kill()
        _, errors = process.communicate(timeout=60)
    assert line, f"{program} ended by itself: {errors}"
    assert process.returncode == -signal.SIGKILL
    killed = line.split()
    sys.stdout.write(f"{program} killed in {line.strip()}, {delay_s:.4f} s after it began; wanted {phase} {row}\n")
    return killed[0], int(killed[1])


def check_refused_as_whole(directory: Path) -> None:
    """Servers that are to use what is there say that it is half a model."""
    for settings in ({"read_only": True}, {"initialize_after_startup": False}):
        with pytest.raises(DatabaseError, match="of a load that was interrupted"):
            hps.HPS(str(configuration(directory, **settings)))


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


@pytest.mark.slow
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
        killed_in.append(kill_at(program, config, phase, row, rng.uniform(0, 0.01)))
        before, done = done, check_prefix(tmp_path, numbers, seed=1)
        assert before <= done
        assert (done == numbers.size) == (phase == "settle")
    assert [phase for phase, _ in killed_in] == [phase for phase, _ in moments]
    assert len({row for _, row in killed_in}) >= 6, "the kills were not spread over the load"
    check_whole(config, numbers, np.arange(-1000, 0), seed=1)


def test_a_new_version_after_a_kill_leaves_no_row_of_the_old(tmp_path: Path) -> None:
    sys.stdout.write(f"seed {SEED}\n")
    rng = random.Random(SEED)
    config = configuration(tmp_path)
    write_model(tmp_path / "item", np.arange(60_000), seed=1)
    kill_at("serve", config, "record", rng.randrange(20_000, 50_000), 0)
    fewer = np.arange(30_000, 70_000)
    write_model(tmp_path / "item", fewer, seed=2)
    moments = [("serve", "drop", 0), ("load", "ingest", 0), ("serve", "merge", 10_000)]
    for program, phase, row in moments:
        assert kill_at(program, config, phase, row, rng.uniform(0, 0.003))[0] == phase
        if phase != "drop":  # after that there may be no table at all
            check_refused_as_whole(tmp_path)
    check_whole(config, fewer, np.arange(30_000), seed=2)


@pytest.mark.parametrize("phase", ["drop", "forget"])
def test_a_whole_table_whose_drop_was_killed_leaves_no_row(tmp_path: Path, phase: str) -> None:
    config = configuration(tmp_path)
    write_model(tmp_path / "item", np.arange(20_000), seed=1)
    with hps.HPS(str(config)):
        pass
    write_model(tmp_path / "item", np.arange(10_000, 20_000), seed=2)
    assert kill_at("load", config, phase, 0, 0.001)[0] == phase
    with pytest.raises(DatabaseError):
        hps.HPS(str(configuration(tmp_path, read_only=True)))
    check_whole(config, np.arange(10_000, 20_000), np.arange(10_000), seed=2)


def test_a_first_batch_without_its_record_is_not_taken_for_a_foreign_table(tmp_path: Path) -> None:
    config = configuration(tmp_path)
    write_model(tmp_path / "item", np.arange(20_000), seed=1)
    kill_at("load", config, "ingest", 0, 0.01)
    check_refused_as_whole(tmp_path)
    write_model(tmp_path / "item", np.arange(10_000, 20_000), seed=2)
    check_whole(config, np.arange(10_000, 20_000), np.arange(10_000), seed=2)


# -- deltas --------------------------------------------------------------------------------------------------------------


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


@pytest.mark.slow
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
        killed.append(kill_at("delta", tmp_path, phase, row, rng.uniform(0, 0.01), dim=TABLE.dim)[0])
        check_killed_delta(tmp_path, versions, base_there)
    assert killed == phases
    with closing(RocksDatabase(tmp_path / "rocksdb")) as database:
        versions.load("2", [database])
        assert held_of(database, "2") == versions.expected("2")
        assert nothing_to_do(versions.load("2", [database]))
