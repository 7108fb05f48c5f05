"""What goes wrong with an HDFS: each fault is an error in time that names URI, cause and cure, or is got over."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from hps.errors import ModelFileError, ModelFileNotFoundError, ModelSourceError
from hps.filesystems.hdfs import HdfsFileSystem
from hps.models.files import open_sparse_model
from hps.models.sources import ModelSources
from hps.models.writer import write_sparse_model
from tests.servers.hdfs_cluster import HdfsCluster
from tests.servers.redis_server import free_ports
from tests.tables.hdfs_models import DIM, HASTY, KEYS, PATIENT, ROWS, THRICE, VECTORS, mute_server, read_elsewhere
from tests.tables.hdfs_models import cluster as cluster
from tests.tables.hdfs_models import lasting_model as lasting_model
from tests.tables.hdfs_models import model as model
from tests.tables.hdfs_models import nameservice as nameservice
from tests.tables.hdfs_models import own_model as own_model
from tests.tables.hdfs_models import root as root
from tests.tables.models_in_stores import ModelsInStores

pytestmark = pytest.mark.hdfs


class TestModelsInHdfs(ModelsInStores):
    store = HdfsFileSystem

    @pytest.fixture
    def server(self, cluster: HdfsCluster) -> HdfsCluster:
        return cluster

    @pytest.fixture
    def sources(self) -> ModelSources:
        return ModelSources(PATIENT)


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


def test_a_namenode_that_is_not_there_is_an_error_in_time(cluster: HdfsCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HADOOP_CONF_DIR", raising=False)
    monkeypatch.delenv("HADOOP_HOME", raising=False)
    with mute_server() as server:  # which hdfs-native alone asks for ever
        dead, mute = free_ports(1)[0], server.getsockname()[1]
        for host, settings, error, message in (
            (f"127.0.0.1:{dead}", THRICE, ModelSourceError, r"nothing listens there; check that host .* \(tried 3 times in"),
            ("no-such-host.invalid:8020", THRICE, ModelFileError, ""),
            (f"127.0.0.1:{mute}", HASTY, ModelSourceError, r"no answer in 0\.5 s; check that the host is right"),
            (f"127.0.0.1:{cluster.http_port}", HASTY, ModelSourceError, "those of the NameNode's RPC"),
            ("", THRICE, ModelFileError, "the URI names no host, .*set HADOOP_CONF_DIR"),
        ):
            with pytest.raises(error, match=f"hdfs://{host}/m/key: .*{message}"):
                open_sparse_model(f"hdfs://{host}/m", DIM, sources=ModelSources(settings))


def test_in_safe_mode_models_are_read_and_none_is_written(cluster: HdfsCluster, model: str, root: str) -> None:
    cluster.set_safe_mode(True)
    try:
        assert open_sparse_model(model, DIM).rows == ROWS
        with pytest.raises(ModelSourceError, match=r"is in safe mode.*hdfs dfsadmin -safemode leave.*tried 3 times"):
            write_sparse_model(f"{root}/new", (KEYS, VECTORS), sources=ModelSources(THRICE))
    finally:
        cluster.set_safe_mode(False)


@pytest.mark.parametrize(
    ("uri", "variable", "place"),
    [("hdfs://shop/lasting/item", "HADOOP_CONF_DIR", "etc/hadoop"), ("hdfs:///lasting/item", "HADOOP_HOME", "")],
)
def test_a_nameservice_is_found_in_hadoops_configuration_and_its_dead_namenode_passed_over(
    model: str, nameservice: Callable[[str], Path], uri: str, variable: str, place: str
) -> None:
    home = nameservice(f"127.0.0.1:{free_ports(1)[0]}")
    done = read_elsewhere(uri, 20, **{variable: str(home / place)})
    assert done.stdout.strip() == str(int(KEYS.sum())), done.stderr


def test_a_broken_configuration_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "core-site.xml").write_text("<configuration><property>")
    done = read_elsewhere("hdfs://shop/lasting/item", 20, HADOOP_CONF_DIR=str(tmp_path))
    assert re.search(
        r"ModelFileError: opening hdfs://shop/lasting/item/key: Hadoop's configuration cannot be read", done.stderr
    )
