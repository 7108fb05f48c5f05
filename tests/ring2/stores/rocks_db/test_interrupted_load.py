"""Loads are killed at chosen moments, of `hps load` and of starting servers; in the end every tier holds the model, only it."""

import json
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hps
from hps.errors import DatabaseError
from hps.models.writer import write_sparse_model
from hps.tools.cli.tables.sample import sample_vectors
from hps.types import FloatArray, KeyArray
from tests.servers.running_service import document_of, model_of

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


def kill_at(
    program: str,
    config: Path,
    phase: str,
    row: int,
    dim: int = DIM,
    before_kill: Callable[[subprocess.Popen[str]], object] = lambda process: None,
) -> tuple[str, int]:
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
        before_kill(process)
        process.kill()
        _, errors = process.communicate()
    assert line, f"{program} ended by itself: {errors}"
    assert process.returncode == -signal.SIGKILL
    killed = line.split()
    sys.stdout.write(f"{program} killed in {line.strip()}; wanted {phase} {row}\n")
    return killed[0], int(killed[1])


def check_refused_as_whole(directory: Path) -> None:
    """Servers that are to use what is there say that it is half a model."""
    for settings in ({"read_only": True}, {"initialize_after_startup": False}):
        with pytest.raises(DatabaseError, match="of a load that was interrupted"):
            hps.HPS(str(configuration(directory, **settings)))


def test_a_new_version_after_a_kill_leaves_no_row_of_the_old(tmp_path: Path) -> None:
    sys.stdout.write(f"seed {SEED}\n")
    rng = random.Random(SEED)
    config = configuration(tmp_path)
    write_model(tmp_path / "item", np.arange(60_000), seed=1)
    kill_at("serve", config, "record", rng.randrange(20_000, 50_000))
    fewer = np.arange(30_000, 70_000)
    write_model(tmp_path / "item", fewer, seed=2)
    moments = [("serve", "drop", 0), ("load", "ingest", 0), ("serve", "merge", 10_000)]
    for program, phase, row in moments:
        assert kill_at(program, config, phase, row)[0] == phase
        if phase != "drop":  # after that there may be no table at all
            check_refused_as_whole(tmp_path)
    check_whole(config, fewer, np.arange(30_000), seed=2)
