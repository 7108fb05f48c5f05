"""What goes wrong with an HDFS: each fault is an error in time that names URI, cause and cure, or is got over."""

import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from hps.configuration.tiers import ModelSourceConfig
from hps.databases.hash_map.database import HashMapDatabase
from hps.errors import ModelFileError, ModelFileNotFoundError, ModelSourceError
from hps.filesystems.base import FileWriter
from hps.filesystems.hdfs import HdfsFileSystem
from hps.models.files import open_sparse_model
from hps.models.read_ahead import read_ahead
from hps.models.sample import sample_vectors
from hps.models.sources import ModelSources
from hps.models.writer import write_sparse_model
from hps.testing.filesystems import noise
from hps.types import FloatArray, KeyArray, TableSpec
from tests.servers.hdfs_cluster import HdfsCluster, free_ports, hdfs_cluster, write_hadoop_configuration
from tests.tables.models_in_stores import ModelsInStores
from tests.tables.table_loads import load_table

pytestmark = pytest.mark.hdfs

ROWS, DIM = 30_000, 16
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


# -- models -------------------------------------------------------------------------------------------------------


class TestModelsInHdfs(ModelsInStores):
    store = HdfsFileSystem

    @pytest.fixture
    def server(self, cluster: HdfsCluster) -> HdfsCluster:
        return cluster

    @pytest.fixture
    def sources(self) -> ModelSources:
        return ModelSources(PATIENT)


def check(chunks: Iterable[tuple[int, KeyArray, FloatArray]]) -> list[int]:
    """Compare each chunk with the model's rows; returns the first rows of all."""
    starts = []
    for start, keys, vectors in chunks:
        np.testing.assert_array_equal(keys, KEYS[start : start + 1000])
        np.testing.assert_array_equal(vectors, VECTORS[start : start + 1000])
        starts.append(start)
    return starts


def test_what_the_user_may_not_read_is_refused_and_the_user_named(
    cluster: HdfsCluster, own_model: str, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.set_permission("/models/item", "700")
    monkeypatch.setenv("HADOOP_USER_NAME", "somebody")
    filesystem = HdfsFileSystem(PATIENT)
    refusal = "Permission denied: user=somebody, .*let this user, whom HADOOP_USER_NAME"
    for call in (filesystem.exists, filesystem.status, lambda path: filesystem.read_into(path, 0, memoryview(bytearray(8)))):
        with pytest.raises(ModelFileError, match=f"{own_model}/key: {refusal}") as raised:
            call(f"{own_model}/key")
        assert not isinstance(raised.value, ModelSourceError | ModelFileNotFoundError)
    with pytest.raises(ModelFileError, match=refusal):
        filesystem.list(own_model)
    with pytest.raises(ModelFileError, match=refusal):
        open_sparse_model(own_model, DIM, sources=ModelSources(PATIENT))
    with pytest.raises(ModelFileError, match=refusal):
        write_sparse_model(f"{root}/mine", (KEYS, VECTORS), sources=ModelSources(PATIENT))


# -- a NameNode that is not there ---------------------------------------------------------------------------------


def test_a_namenode_that_does_not_run_is_an_error_after_some_attempts() -> None:
    uri = f"hdfs://127.0.0.1:{free_ports(1)[0]}/models/item"
    with pytest.raises(ModelSourceError, match=rf"{uri}/key: nothing listens there; check that host .* \(tried 3 times in"):
        open_sparse_model(uri, DIM, sources=ModelSources(THRICE))


def test_an_unknown_host_is_an_error() -> None:
    with pytest.raises(ModelFileError, match=r"hdfs://no-such-host\.invalid:8020/m/key: "):
        open_sparse_model("hdfs://no-such-host.invalid:8020/m", DIM, sources=ModelSources(THRICE))


def test_a_host_that_does_not_answer_is_an_error_within_the_deadline() -> None:
    with mute_server() as server:
        uri = f"hdfs://127.0.0.1:{server.getsockname()[1]}/models/item"
        started = time.monotonic()
        with pytest.raises(ModelSourceError, match=rf"{uri}/key: no answer in 0\.5 s; check that the host is right"):
            open_sparse_model(uri, DIM, sources=ModelSources(HASTY))
        assert time.monotonic() - started < 60  # hdfs-native alone waits for ever


def test_a_server_of_another_protocol_is_an_error(cluster: HdfsCluster) -> None:
    with pytest.raises(ModelSourceError, match="those of the NameNode's RPC"):
        open_sparse_model(f"hdfs://127.0.0.1:{cluster.http_port}/models", DIM, sources=ModelSources(HASTY))


def test_a_uri_without_a_host_needs_hadoops_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HADOOP_CONF_DIR", raising=False)
    monkeypatch.delenv("HADOOP_HOME", raising=False)
    with pytest.raises(ModelFileError, match=r"hdfs:///m/key: the URI names no host, .*set HADOOP_CONF_DIR"):
        open_sparse_model("hdfs:///m", DIM, sources=ModelSources(THRICE))


def test_a_namenode_that_dies_during_a_load_is_an_error_and_the_load_is_repeated_when_it_is_back(
    cluster: HdfsCluster, model: str
) -> None:
    sources = ModelSources(THRICE)
    with closing(HashMapDatabase()) as database:
        opened = open_sparse_model(model, DIM, sources=sources)
        with closing(read_ahead(opened, [(start, start + 1000) for start in range(0, ROWS, 1000)])) as chunks:
            next(chunks)
            with (
                cluster.without(cluster.namenode),
                pytest.raises(ModelSourceError, match=rf"reading {model}/\w+: .*\(tried 3 times in"),
            ):
                check(chunks)
        load_table(TABLE, model, [database], sources=sources)
        assert database.size(TABLE.tag) == ROWS


@pytest.mark.slow
def test_a_namenode_that_restarts_during_a_load_is_got_over(cluster: HdfsCluster, model: str) -> None:
    opened = open_sparse_model(model, DIM, sources=ModelSources(PATIENT))
    ranges = [(start, start + 1000) for start in range(0, ROWS, 1000)]
    with closing(read_ahead(opened, ranges)) as chunks, ThreadPoolExecutor(1) as pool:
        next(chunks)
        with cluster.without(cluster.namenode):
            rest = pool.submit(check, chunks)
            time.sleep(0.5)
            assert not rest.done()
        assert rest.result(60) == list(range(1000, ROWS, 1000))


@pytest.mark.slow
def test_a_paused_namenode_is_an_error_within_the_deadline_and_serves_when_it_goes_on(
    cluster: HdfsCluster, model: str, root: str
) -> None:
    filesystem = HdfsFileSystem(HASTY)
    content = bytearray(100)
    version = HdfsFileSystem(PATIENT).status(f"{model}/key").version
    with cluster.namenode.paused():
        started = time.monotonic()
        for call in (
            lambda: filesystem.status(f"{model}/key"),
            lambda: filesystem.list(model),
            lambda: filesystem.read_into(f"{model}/key", 0, memoryview(content), version),
            lambda: filesystem.create(f"{root}/new"),
        ):
            with pytest.raises(ModelSourceError, match=rf"{cluster.uri}/.*: no answer in 0\.5 s; .*\(tried \d times in"):
                call()
        assert time.monotonic() - started < 120
    assert content == bytes(100)
    patient = HdfsFileSystem(PATIENT)
    patient.read_into(f"{model}/key", 0, memoryview(content), version)
    assert content == KEYS.tobytes()[:100]


@pytest.mark.slow
def test_a_short_pause_of_the_namenode_is_got_over(cluster: HdfsCluster, model: str) -> None:
    filesystem = HdfsFileSystem(ModelSourceConfig(timeout_s=0.2, deadline_s=60, max_attempts=100))
    content = bytearray(100)
    with cluster.namenode.paused():
        reading = threading.Thread(target=filesystem.read_into, args=(f"{model}/key", 0, memoryview(content)))
        reading.start()
        time.sleep(1.0)
    reading.join(60)
    assert not reading.is_alive()
    assert content == KEYS.tobytes()[:100]


# -- a NameNode that refuses --------------------------------------------------------------------------------------


def test_in_safe_mode_models_are_read_and_none_is_written(cluster: HdfsCluster, model: str, root: str) -> None:
    cluster.set_safe_mode(True)
    try:
        assert open_sparse_model(model, DIM).rows == ROWS
        with pytest.raises(ModelSourceError, match=r"is in safe mode.*hdfs dfsadmin -safemode leave.*tried 3 times"):
            write_sparse_model(f"{root}/new", (KEYS, VECTORS), sources=ModelSources(THRICE))
    finally:
        cluster.set_safe_mode(False)


def test_a_standby_namenode_is_an_error_that_asks_for_the_nameservice(tmp_path: Path) -> None:
    with HdfsCluster(tmp_path / "standby", standby=True) as standby:
        settings = ModelSourceConfig(timeout_s=20, deadline_s=60, max_attempts=2)
        with pytest.raises(ModelSourceError, match=rf"{standby.uri}/m/key: the NameNode is a standby.*name the nameservice"):
            open_sparse_model(f"{standby.uri}/m", DIM, sources=ModelSources(settings))


# -- DataNodes ----------------------------------------------------------------------------------------------------


def test_a_dead_datanode_is_an_error_and_serves_when_it_is_back(cluster: HdfsCluster, model: str) -> None:
    filesystem = HdfsFileSystem(THRICE)
    with cluster.without(cluster.datanode):
        assert filesystem.status(f"{model}/key").size_bytes == 8 * ROWS
        with pytest.raises(ModelSourceError, match=rf"reading {model}/key: .*tried 3 times"):
            filesystem.read_into(f"{model}/key", 0, memoryview(bytearray(100)))
        writer = filesystem.create(f"{model}/new")
        with pytest.raises(ModelSourceError, match=rf"writing {model}/new: .*nothing was changed: write it again"):
            write_and_commit(writer)
        writer.abort()
    assert filesystem.list(model) == ["emb_vector", "key"]
    content = bytearray(100)
    HdfsFileSystem(PATIENT).read_into(f"{model}/key", 0, memoryview(content))
    assert content == KEYS.tobytes()[:100]


def write_and_commit(writer: FileWriter) -> None:
    writer.write(memoryview(noise(3_000_000)))
    writer.commit()


@pytest.mark.slow
def test_a_paused_datanode_is_an_error_within_the_deadline(cluster: HdfsCluster, model: str) -> None:
    filesystem, content = HdfsFileSystem(HASTY), bytearray(100)
    started = time.monotonic()
    with cluster.datanode.paused():
        with pytest.raises(ModelSourceError, match=rf"reading {model}/key: .*tried \d times"):
            filesystem.read_into(f"{model}/key", 0, memoryview(content))
        assert time.monotonic() - started < 60
    kept = bytes(content)
    HdfsFileSystem(PATIENT).read_into(f"{model}/emb_vector", 0, memoryview(bytearray(100)))
    assert content == kept == bytes(100)


# -- Hadoop's configuration ---------------------------------------------------------------------------------------

_READS = """
import sys, numpy
from hps.configuration.tiers import ModelSourceConfig
from hps.models.files import open_sparse_model
from hps.models.read_ahead import read_ahead
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


@pytest.mark.parametrize("uri", ["hdfs://shop/lasting/item", "hdfs:///lasting/item", "hdfs:/lasting/item"])
def test_a_nameservice_is_found_in_hadoops_configuration_and_its_dead_namenode_passed_over(
    model: str, nameservice: Callable[[str], Path], uri: str
) -> None:
    home = nameservice(f"127.0.0.1:{free_ports(1)[0]}")
    for place in ({"HADOOP_CONF_DIR": str(home / "etc" / "hadoop")}, {"HADOOP_HOME": str(home)}):
        done = read_elsewhere(uri, 20, **place)
        assert done.stdout.strip() == str(int(KEYS.sum())), done.stderr


@pytest.mark.slow
def test_a_namenode_of_a_nameservice_that_never_answers_is_passed_over(model: str, nameservice: Callable[[str], Path]) -> None:
    with mute_server() as server:
        home = nameservice(f"127.0.0.1:{server.getsockname()[1]}")
        done = read_elsewhere("hdfs://shop/lasting/item", 1.0, HADOOP_CONF_DIR=str(home / "etc" / "hadoop"))
    assert done.stdout.strip() == str(int(KEYS.sum())), done.stderr


def test_a_broken_configuration_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "core-site.xml").write_text("<configuration><property>")
    done = read_elsewhere("hdfs://shop/lasting/item", 20, HADOOP_CONF_DIR=str(tmp_path))
    assert re.search(
        r"ModelFileError: opening hdfs://shop/lasting/item/key: Hadoop's configuration cannot be read", done.stderr
    )
