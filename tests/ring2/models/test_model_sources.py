"""A configuration that names models elsewhere, through the whole of hps: files, databases, cache, lookups.

The loads themselves are proved by tests/tables/models_in_stores.py; S3 is configured in test_import.py.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hps
from hps.configuration.tiers import ModelSourceConfig
from hps.filesystems.local import LocalFileSystem
from hps.models.sample import sample_vectors
from hps.models.sources import ModelSources
from tests.servers.hdfs_cluster import hdfs_cluster
from tests.servers.running_service import document_of, model_of

ROWS, DIMS = 4_000, {"user": 16, "item": 32}
KEYS = np.random.default_rng(7).permutation(ROWS).astype(np.int64) * 1_000_003 - 5


@pytest.mark.parametrize("store", [pytest.param("hdfs", marks=pytest.mark.hdfs), pytest.param("gcs", marks=pytest.mark.gcs)])
def test_a_configuration_finds_its_models_in_a_store(store: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if store == "hdfs":
        root, settings = f"{hdfs_cluster().uri}/{tmp_path.name}", {}
    else:
        server = request.getfixturevalue("gcs_server")
        root, settings = f"gs://{server.new_bucket()}/models", {"gcs_endpoint_url": server.url}
    sources = ModelSources(ModelSourceConfig(**settings))
    for seed, (table, dim) in enumerate(DIMS.items()):
        hps.write_sparse_model(f"{root}/{table}", (KEYS, sample_vectors(KEYS, dim, seed)), sources=sources)
    model = model_of("shop", [f"{root}/{table}" for table in DIMS], DIMS, gpucacheper=0.3, hit_rate_threshold=1.1)
    model["default_value_for_each_table"] = [0.25, -1.0]
    configuration: dict[str, Any] = document_of(model, persistent=tmp_path / "rocksdb", model_source=settings)
    for volatile in ("hash_map", "disabled"):  # the second start answers from what the first one stored
        configuration["volatile_db"] = {"type": volatile}
        with hps.HPS(configuration) as hps_server:
            for seed, (table, dim) in enumerate(DIMS.items()):
                for keys in np.array_split(KEYS, 8):
                    np.testing.assert_array_equal(hps_server.lookup(keys, "shop", table), sample_vectors(keys, dim, seed))
                absent = hps_server.lookup(KEYS[:50] + 1, "shop", table)
                np.testing.assert_array_equal(absent, np.float32([0.25, -1.0][seed]))


@pytest.mark.parametrize("persistent", [True, False])
def test_a_delta_is_deployed_and_little_else_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, persistent: bool) -> None:
    root, read, read_into = f"{tmp_path}/shop", Counter[str](), LocalFileSystem.read_into

    def counting(self: LocalFileSystem, path: str, offset: int, buffer: memoryview, version: str = "") -> None:
        read_into(self, path, offset, buffer, version)
        read[path.removeprefix(f"{root}/")] += len(buffer) * (not path.endswith("version.json"))

    monkeypatch.setattr(LocalFileSystem, "read_into", counting)
    rows = {table: (KEYS, sample_vectors(KEYS, dim, 1)) for table, dim in DIMS.items()}
    hps.write_version(f"{root}/1", rows)
    limits = {"maxnum_catfeature_query_per_table_per_sample": [ROWS, ROWS], "gpucacheper": 0.3, "hit_rate_threshold": 1.1}
    model = model_of("shop", list(DIMS), DIMS, **limits, version_path=root)
    configuration = document_of(model, persistent=tmp_path / "rocksdb" if persistent else None)
    changed, gone = KEYS[100:400], KEYS[350:500]
    expected = {table: vectors.copy() for table, (_, vectors) in rows.items()}
    for table, dim in DIMS.items():
        expected[table][100:400] = sample_vectors(changed, dim, 2)
        expected[table][400:500] = 0
    with hps.HPS(configuration) as server:
        rows = {table: (changed, sample_vectors(changed, dim, 2)) for table, dim in DIMS.items()}
        hps.write_version(f"{root}/2", rows, delta_of="1", deleted=dict.fromkeys(DIMS, gone))
        read.clear()
        assert server.deploy("shop").version == "2"
        assert +read == {
            f"2/{table}/{name}": size
            for table, dim in DIMS.items()
            for name, size in {"key": 2 * 8 * 300, "emb_vector": 4 * dim * 300, "deleted": 8 * 150}.items()
        }
        for table in DIMS:
            np.testing.assert_array_equal(server.lookup(KEYS, "shop", table), expected[table])
    read.clear()
    with hps.HPS(configuration) as server:
        assert server.model("shop").version == "2"
        assert persistent == (not +read)
        for table in DIMS:
            np.testing.assert_array_equal(server.lookup(KEYS, "shop", table), expected[table])
