"""The same model from every source gives the same answers, through the whole of hps: files, databases, cache, lookups."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hps
from hps.configuration.tiers import ModelSourceConfig
from hps.filesystems.base import FileSystem
from hps.models.sample import sample_vectors
from hps.models.sources import ModelSources
from tests.servers.hdfs_cluster import hdfs_cluster
from tests.servers.running_service import document_of, model_of
from tests.servers.s3_server import know_only_moto, s3_server

ROWS, TABLES = 30_000, {"user": 16, "item": 32}
KEYS = np.random.default_rng(7).permutation(ROWS).astype(np.int64) * 1_000_003 - 5


@pytest.fixture
def gcs(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    server = request.getfixturevalue("gcs_server")
    return f"gs://{server.new_bucket()}/models", {"gcs_endpoint_url": server.url}


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> tuple[str, dict[str, Any]]:
    know_only_moto(monkeypatch)
    return f"s3://{s3_server().new_bucket()}/models", {"s3_endpoint_url": s3_server().url}


@pytest.fixture
def hdfs() -> Iterator[tuple[str, dict[str, Any]]]:
    yield f"{hdfs_cluster().uri}/same", {}
    hdfs_cluster().delete("/same")


@pytest.fixture
def local(tmp_path: Path) -> tuple[str, dict[str, Any]]:
    return str(tmp_path / "models"), {}


@pytest.fixture(
    params=[
        "local",
        pytest.param("hdfs", marks=pytest.mark.hdfs),
        pytest.param("s3", marks=pytest.mark.s3),
        pytest.param("gcs", marks=pytest.mark.gcs),
    ]
)
def place(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    """Where the model is, and the `model_source` that finds it."""
    root, settings = request.getfixturevalue(request.param)
    sources = ModelSources(ModelSourceConfig(**settings))
    for seed, (table, dim) in enumerate(TABLES.items()):
        hps.write_sparse_model(f"{root}/{table}", (KEYS, sample_vectors(KEYS, dim, seed)), sources=sources)
    return root, settings


def test_answers_are_the_same_from_every_source(
    place: tuple[str, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hps.models.files.CHUNK_BYTES", 1 << 18)  # several chunks a table, each of several parts
    root, settings = place
    monkeypatch.setattr(type(ModelSources().locate(root)[0]), "part_bytes", 1 << 16)
    model = model_of(
        "shop",
        [f"{root}/{table}" for table in TABLES],
        TABLES,
        maxnum_catfeature_query_per_table_per_sample=[ROWS, ROWS],
        default_value_for_each_table=[0.25, -1.0],
        max_batch_size=2,
        gpucacheper=0.3,
        cache_refresh_percentage_per_iteration=0.2,
        hit_rate_threshold=1.1,
    )
    configuration = document_of(model, persistent=tmp_path / "rocksdb", model_source=settings)
    asked = np.concatenate([KEYS, KEYS + 1])  # the second half is in no table
    for start in ("loaded", "found in RocksDB"):
        with hps.HPS(configuration) as server:
            for seed, (table, dim) in enumerate(TABLES.items()):
                vectors, found = server.lookup(asked, "shop", table, return_found=True)
                np.testing.assert_array_equal(vectors[:ROWS], sample_vectors(KEYS, dim, seed), err_msg=start)
                np.testing.assert_array_equal(vectors[ROWS:], np.float32([0.25, -1.0][seed]), err_msg=start)
                assert found[:ROWS].all()
                assert not found[ROWS:].any()
        configuration["volatile_db"] = {"type": "disabled"}  # the second start answers from what the first one stored


@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize("place", ["local"], indirect=True)  # of other stores, ModelsInStores counts what is read
def test_a_delta_is_deployed_and_little_else_is_read(
    place: tuple[str, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, persistent: bool
) -> None:
    root, settings = place[0] + "/shop", place[1]
    sources = ModelSources(ModelSourceConfig(**settings))
    store, read = type(sources.locate(root)[0]), Counter[str]()
    read_into = store.read_into

    def counting(self: FileSystem, path: str, offset: int, buffer: memoryview, version: str = "") -> None:
        read_into(self, path, offset, buffer, version)
        read[path.removeprefix(f"{root}/")] += len(buffer)

    monkeypatch.setattr(store, "read_into", counting)
    rows = {table: (KEYS, sample_vectors(KEYS, dim, 1)) for table, dim in TABLES.items()}
    hps.write_version(f"{root}/1", rows, sources=sources)
    options = {"maxnum_catfeature_query_per_table_per_sample": [ROWS, ROWS], "gpucacheper": 0.3, "hit_rate_threshold": 1.1}
    model = model_of("shop", list(TABLES), TABLES, **options, version_path=root)
    configuration = document_of(model, persistent=tmp_path / "rocksdb" if persistent else None, model_source=settings)
    changed, gone = KEYS[100:400], KEYS[350:500]
    expected = {table: vectors.copy() for table, (_, vectors) in rows.items()}
    for table, dim in TABLES.items():
        expected[table][100:400] = sample_vectors(changed, dim, 2)
        expected[table][400:500] = 0
    with hps.HPS(configuration) as server:
        rows = {table: (changed, sample_vectors(changed, dim, 2)) for table, dim in TABLES.items()}
        hps.write_version(f"{root}/2", rows, delta_of="1", deleted=dict.fromkeys(TABLES, gone), sources=sources)
        read.clear()
        assert server.deploy("shop").version == "2"
        assert {name: size for name, size in read.items() if not name.endswith("version.json")} == {
            f"2/{table}/{name}": size
            for table, dim in TABLES.items()
            for name, size in {"key": 2 * 8 * 300, "emb_vector": 4 * dim * 300, "deleted": 8 * 150}.items()
        }
        for table in TABLES:
            np.testing.assert_array_equal(server.lookup(KEYS, "shop", table), expected[table])
    read.clear()
    with hps.HPS(configuration) as server:
        assert server.model("shop").version == "2"
        assert persistent == ({name for name in read if not name.endswith("version.json")} == set())
        for table in TABLES:
            np.testing.assert_array_equal(server.lookup(KEYS, "shop", table), expected[table])
