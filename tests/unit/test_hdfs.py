"""Files in HDFS, on a real NameNode and DataNode."""

import pytest

from hps.filesystems.hdfs import HdfsFileSystem
from tests.contracts.filesystem_contract import FileSystemContract
from tests.hdfs_cluster import HdfsCluster

pytestmark = pytest.mark.hdfs


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory):
    with HdfsCluster(tmp_path_factory.mktemp("hdfs") / "cluster") as running:
        yield running


class TestHdfsFileSystem(FileSystemContract):
    @pytest.fixture
    def filesystem(self) -> HdfsFileSystem:
        return HdfsFileSystem()

    @pytest.fixture
    def root(self, cluster: HdfsCluster, request: pytest.FixtureRequest):
        self.cluster = cluster
        yield f"{cluster.uri}/root"
        cluster.delete("/root")

    def put(self, path: str, content: bytes) -> None:
        self.cluster.put(path.removeprefix(self.cluster.uri), content)
