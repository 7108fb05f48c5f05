"""What the tests of failing HDFS clusters share: a model in the cluster, settings, and configurations of Hadoop."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from hps.configuration.tiers import ModelSourceConfig
from hps.filesystems.hdfs import HdfsFileSystem
from hps.tools.cli.tables.sample import sample_vectors
from hps.types import FloatArray, KeyArray, TableSpec
from tests.servers.hdfs_cluster import HdfsCluster, hdfs_cluster, write_hadoop_configuration

ROWS, DIM = 10_000, 16
TABLE = TableSpec("shop", "item", DIM, 0.0, ROWS)
KEYS = np.random.default_rng(3).permutation(ROWS).astype(np.int64) * 1_000_003 - 5
VECTORS = sample_vectors(KEYS, DIM, 1)

PATIENT = ModelSourceConfig(timeout_s=20, deadline_s=60, max_attempts=50)
THRICE = ModelSourceConfig(timeout_s=20, deadline_s=60, max_attempts=3)  # where a bad answer comes each time
HASTY = ModelSourceConfig(timeout_s=0.5, deadline_s=20, max_attempts=2)  # where no answer will come


@pytest.fixture
def cluster() -> HdfsCluster:
    return hdfs_cluster()


@pytest.fixture
def root(cluster: HdfsCluster) -> Iterator[str]:
    yield f"{cluster.uri}/models"
    cluster.delete("/models")


def put_model(cluster: HdfsCluster, path: str) -> None:
    files = ((f"{path}/key", KEYS.tobytes()), (f"{path}/emb_vector", VECTORS.tobytes()))
    with ThreadPoolExecutor(2) as pool:  # each takes long, and little of it is work
        list(pool.map(cluster.put, *zip(*files, strict=True)))


@pytest.fixture(scope="module")
def lasting_model() -> str:
    put_model(hdfs_cluster(), "/lasting/item")
    return f"{hdfs_cluster().uri}/lasting/item"


@pytest.fixture
def model(lasting_model: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A model of several chunks, each of several parts, that a test leaves as it is."""
    monkeypatch.setattr("hps.models.files.CHUNK_BYTES", 1 << 18)
    monkeypatch.setattr(HdfsFileSystem, "part_bytes", 1 << 16)
    return lasting_model


@pytest.fixture
def own_model(cluster: HdfsCluster, root: str, model: str) -> str:
    """Another one, which it may spoil."""
    put_model(cluster, "/models/item")
    return f"{root}/item"


def mute_server() -> socket.socket:
    """Accepts connections and says nothing."""
    server = socket.create_server(("127.0.0.1", 0))
    server.listen(100)
    return server


def check(chunks: Iterable[tuple[int, KeyArray, FloatArray]]) -> list[int]:
    """Compare each chunk with the model's rows; returns the first rows of all."""
    starts = []
    for start, keys, vectors in chunks:
        np.testing.assert_array_equal(keys, KEYS[start : start + 1000])
        np.testing.assert_array_equal(vectors, VECTORS[start : start + 1000])
        starts.append(start)
    return starts


_READS = """
import sys, numpy
from hps.configuration.tiers import ModelSourceConfig
from hps.models.files import open_sparse_model
from hps.models.loading.read_ahead import read_ahead
from hps.models.sources import ModelSources
settings = ModelSourceConfig(timeout_s=float(sys.argv[2]), deadline_s=60, max_attempts=60)
model = open_sparse_model(sys.argv[1], 16, sources=ModelSources(settings))
print(sum(int(keys.sum()) for _, keys, _ in read_ahead(model, [(0, model.rows)])))
"""


def read_elsewhere(uri: str, timeout_s: float, **environment: str) -> subprocess.CompletedProcess[str]:
    """In another process, since hdfs-native reads the environment of a process."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("HADOOP")} | environment
    command = [sys.executable, "-c", _READS, uri, str(timeout_s)]
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture
def nameservice(cluster: HdfsCluster, tmp_path: Path) -> Callable[[str], Path]:
    """Writes the configuration of a nameservice whose first NameNode is at an address, and the second is the cluster's."""

    def write(first: str) -> Path:
        site = {
            "dfs.nameservices": "shop",
            "dfs.ha.namenodes.shop": "nn1,nn2",
            "dfs.namenode.rpc-address.shop.nn1": first,
            "dfs.namenode.rpc-address.shop.nn2": f"127.0.0.1:{cluster.port}",
            "dfs.client.failover.proxy.provider.shop": (
                "org.apache.hadoop.hdfs.server.namenode.ha.ConfiguredFailoverProxyProvider"
            ),
        }
        write_hadoop_configuration(tmp_path / "etc" / "hadoop", {"fs.defaultFS": "hdfs://shop"}, site)
        return tmp_path

    return write
