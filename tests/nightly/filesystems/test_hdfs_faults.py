"""HDFS clusters that pause or restart: each is an error in time, or is got over."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from hps.configuration.tiers import ModelSourceConfig
from hps.errors import ModelSourceError
from hps.filesystems.base import FileWriter
from hps.filesystems.hdfs import HdfsFileSystem
from hps.models.files import open_sparse_model
from hps.models.loading.read_ahead import read_ahead
from hps.models.sources import ModelSources
from hps.stores.hash_map.database import HashMapDatabase
from hps.testing.filesystems import noise
from tests.servers.hdfs_cluster import HdfsCluster
from tests.tables.hdfs_models import DIM, HASTY, KEYS, PATIENT, ROWS, TABLE, THRICE, check, mute_server, read_elsewhere
from tests.tables.table_loads import load_table

pytestmark = pytest.mark.hdfs


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


def test_a_namenode_of_a_nameservice_that_never_answers_is_passed_over(model: str, nameservice: Callable[[str], Path]) -> None:
    with mute_server() as server:
        home = nameservice(f"127.0.0.1:{server.getsockname()[1]}")
        done = read_elsewhere("hdfs://shop/lasting/item", 1.0, HADOOP_CONF_DIR=str(home / "etc" / "hadoop"))
    assert done.stdout.strip() == str(int(KEYS.sum())), done.stderr


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


def test_a_standby_namenode_is_an_error_that_asks_for_the_nameservice(tmp_path: Path) -> None:
    with HdfsCluster(tmp_path / "standby", standby=True) as standby:
        settings = ModelSourceConfig(timeout_s=20, deadline_s=60, max_attempts=2)
        with pytest.raises(ModelSourceError, match=rf"{standby.uri}/m/key: the NameNode is a standby.*name the nameservice"):
            open_sparse_model(f"{standby.uri}/m", DIM, sources=ModelSources(settings))


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
