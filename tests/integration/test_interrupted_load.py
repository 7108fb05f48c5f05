"""`hps load` is killed again and again; in the end RocksDB holds every row of the model, and nothing else."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from hps.config import load_configuration
from hps.model_writer import write_sparse_model
from hps.registry import implementation
from hps.sample_model import sample_vectors

ROWS, DIM = 800_000, 8
TAG = "hps_et.shop.item"


def write_model(path: Path, seed: int) -> None:
    keys = np.arange(ROWS, dtype=np.int64) * -7046029254386353131  # odd: distinct, in no order
    chunks = ((part, sample_vectors(part, DIM, seed)) for part in np.array_split(keys, 10))
    write_sparse_model(path, chunks, overwrite=True)


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


def test_a_load_that_is_killed_at_any_moment_ends_whole(tmp_path: Path) -> None:
    settings = {"type": "rocks_db", "path": str(tmp_path / "rocksdb"), "num_threads": 2}
    model = {
        "model": "shop",
        "sparse_files": [str(tmp_path / "item")],
        "embedding_table_names": ["item"],
        "embedding_vecsize_per_table": [DIM],
        "maxnum_catfeature_query_per_table_per_sample": [1],
        "default_value_for_each_table": [0.0],
        "deployed_device_list": [0],
    }
    config = tmp_path / "ps.json"
    config.write_text(json.dumps({"supportlonglong": True, "persistent_db": settings, "models": [model]}))
    command = [sys.executable, "-m", "hps", "load", str(config)]

    write_model(tmp_path / "item", seed=1)
    killed = [kill_while_loading(command, delay_s) for delay_s in (0.0, 0.1, 0.2)]
    write_model(tmp_path / "item", seed=2)  # the half-loaded table is of another version from now on
    killed += [kill_while_loading(command, delay_s) for delay_s in (0.05, 0.15, 0.3)]
    assert any(killed)
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "rocks_db: " in done.stdout

    database = implementation("database", "rocks_db").from_config(load_configuration(config).persistent_db)
    try:
        database.open_table(TAG, DIM)
        record = database.load_record(TAG)
        assert (record.complete, record.rows_total, record.modified) == (True, ROWS, False)
        seen = []
        for keys, vectors in database.scan(TAG, 200_000):
            np.testing.assert_array_equal(vectors, sample_vectors(keys, DIM, 2))
            seen.append(keys)
    finally:
        database.close()
    keys = np.concatenate(seen)
    assert keys.size == np.unique(keys, return_inverse=True)[0].size == ROWS
    assert np.isin(keys, np.arange(ROWS, dtype=np.int64) * -7046029254386353131).all()
    again = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "complete, nothing to do (800,000 rows)" in again.stdout
