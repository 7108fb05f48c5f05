"""Versions that change a deployed one: only the change is read, by the whole of hps; test_import.py has models in S3."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import hps
from hps.filesystems.local import LocalFileSystem
from hps.tools.cli.tables.sample import sample_vectors
from tests.servers.running_service import document_of, model_of

ROWS, DIMS = 4_000, {"user": 16, "item": 32}
KEYS = np.random.default_rng(7).permutation(ROWS).astype(np.int64) * 1_000_003 - 5


@pytest.mark.parametrize("persistent", [True, False])
def test_a_delta_is_deployed_and_little_else_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, persistent: bool) -> None:
    root, read, read_into = f"{tmp_path}/shop", Counter[str](), LocalFileSystem.read_into

    def counting(self: LocalFileSystem, path: str, offset: int, buffer: memoryview, version: str = "") -> None:
        read_into(self, path, offset, buffer, version)
        read[path.removeprefix(f"{root}/")] += len(buffer) * (not path.endswith("version.json"))

    def check(server: hps.HPS) -> None:
        for table in DIMS:
            np.testing.assert_array_equal(server.lookup(KEYS, "shop", table), expected[table])

    monkeypatch.setattr(LocalFileSystem, "read_into", counting)
    expected = {table: sample_vectors(KEYS, dim, 1) for table, dim in DIMS.items()}
    hps.write_version(f"{root}/1", {table: (KEYS, vectors) for table, vectors in expected.items()})
    limits = {"maxnum_catfeature_query_per_table_per_sample": [ROWS, ROWS], "gpucacheper": 0.3, "hit_rate_threshold": 1.1}
    model = model_of("shop", list(DIMS), DIMS, **limits, version_path=root, checks=False)
    configuration = document_of(model, persistent=tmp_path / "rocksdb" if persistent else None)
    changed = {table: (KEYS[100:400], sample_vectors(KEYS[100:400], dim, 2)) for table, dim in DIMS.items()}
    sizes = {"key": 2 * 8 * 300, "deleted": 8 * 150}
    with hps.HPS(configuration) as server:
        hps.write_version(f"{root}/2", changed, delta_of="1", deleted=dict.fromkeys(DIMS, KEYS[350:500]))
        read.clear()
        assert server.deploy("shop").version == "2"
        for table, dim in DIMS.items():
            expected[table][100:400], expected[table][400:500] = changed[table][1], 0
            for name, size in (sizes | {"emb_vector": 4 * dim * 300}).items():
                assert read.pop(f"2/{table}/{name}") == size
        assert not +read
        check(server)
    read.clear()
    with hps.HPS(configuration) as server:
        assert server.model("shop").version == "2"
        assert persistent == (not +read)
        check(server)
