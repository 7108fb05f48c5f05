"""Sealed versions through the parameter server: deployed, rolled back, retired, and what the commands say of them."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import hps
from hps.models.sealing import seal_version
from hps.models.writer import write_version
from tests.ring1.tools.cli.test_cli import run

DIM = 4
KEYS = np.arange(1000, dtype=np.int64)


def vectors(version: int) -> np.ndarray:
    return np.repeat(KEYS.astype(np.float32)[:, None] + 10_000 * version, DIM, axis=1)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    for version in (1, 2):
        write_version(tmp_path / "shop" / str(version), {"item": (KEYS, vectors(version))})
        seal_version(tmp_path / "shop" / str(version), replace=True)
    path = tmp_path / "ps.json"
    model = {
        "model": "shop",
        "version_path": str(tmp_path / "shop"),
        "sparse_files": ["item"],
        "embedding_table_names": ["item"],
        "embedding_vecsize_per_table": [DIM],
        "default_value_for_each_table": [0.0],
        "maxnum_catfeature_query_per_table_per_sample": [100],
        "max_batch_size": 10,
        "deployed_device_list": [0],
        "gpucache": False,
        "version_policy": {"specific": {"versions": [1]}},
    }
    persistent = {"type": "row_files", "path": str(tmp_path / "rows")}
    path.write_text(json.dumps({"models": [model], "persistent_db": persistent, "device": "cpu"}))
    return path


@pytest.fixture
def server(config: Path) -> Iterator[hps.HPS]:
    with hps.HPS(str(config)) as server:
        yield server


def answers(server: hps.HPS) -> np.ndarray:
    return np.asarray(server.lookup(KEYS[:100], "shop", "item")).reshape(-1, DIM)


def test_versions_are_swapped_without_a_copy_and_keep_their_writes(server: hps.HPS, config: Path) -> None:
    assert (answers(server) == vectors(1)[:100]).all()
    server.insert(KEYS[:1], np.full((1, DIM), 7, np.float32), "shop", "item")
    server.deploy("shop", "2")
    assert (answers(server) == vectors(2)[:100]).all()
    files = list((config.parent / "rows" / "tables").glob("*.rows"))
    sources = [config.parent / "shop" / version / "item" / "rows" for version in ("1", "2")]
    assert all(any(os.path.samefile(file, source) for source in sources) for file in files)
    server.rollback("shop")
    assert (answers(server)[1:] == vectors(1)[1:100]).all()
    assert (answers(server)[0] == 7).all()


def test_the_commands_read_sealed_versions(config: Path) -> None:
    assert "1,000" in run("check-config", config, code=0).output
    assert "persistent_db" in run("plan", config).output
    assert json.loads(run("row-formats", config, "--json", code=0).stdout)[0]["rows"] == 1000
