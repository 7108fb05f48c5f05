"""Files in HDFS, on a real NameNode and DataNode."""

import re
from collections.abc import Iterator

import hdfs_native
import pytest

from hps.errors import ModelFileChangedError, ModelFileError, ModelSourceError
from hps.filesystems import hdfs_connections
from hps.filesystems.hdfs import HdfsFileSystem
from hps.filesystems.retries import UnansweredError
from hps.testing.filesystems import FileSystemContract, noise
from tests.servers.hdfs_cluster import HdfsCluster, hdfs_cluster

pytestmark = pytest.mark.hdfs


@pytest.fixture
def cluster() -> HdfsCluster:
    return hdfs_cluster()


@pytest.fixture
def root(cluster: HdfsCluster) -> Iterator[str]:
    yield f"{cluster.uri}/root"
    cluster.delete("/root")


class TestHdfsFileSystem(FileSystemContract):
    @pytest.fixture
    def filesystem(self) -> HdfsFileSystem:
        return HdfsFileSystem()

    def put(self, path: str, content: bytes) -> None:
        hdfs_cluster().put(path, content)


def test_a_claim_that_a_killed_writer_left_ends_after_a_while(
    cluster: HdfsCluster, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    filesystem, path = HdfsFileSystem(), f"{root}/model/serving.json"
    version = filesystem.replace(path, b"first", "")
    cluster.put(f"{root}/model/.serving.json.next", b"never finished")
    with pytest.raises(ModelFileChangedError, match="another writer is changing it, and nothing was written"):
        filesystem.replace(path, b"second", version)
    assert filesystem.status(path).version == version
    monkeypatch.setattr("hps.filesystems.hdfs._STALE_CLAIM_MS", -1)
    filesystem.replace(path, b"second", version)
    assert filesystem.list(f"{root}/model") == ["serving.json"]


def test_a_path_is_taken_as_it_stands(cluster: HdfsCluster, root: str) -> None:
    for name, size in (("a b", 1), ("a%20b", 2), ("a+b?c#d", 3), ("ä€", 4)):
        cluster.put("/root/plain", noise(size))
        cluster.rename("/root/plain", f"/root/{name}")  # WebHDFS decodes the path of what it writes twice
        buffer = bytearray(size)
        HdfsFileSystem().read_into(f"{root}/{name}", 0, memoryview(buffer))
        assert buffer == noise(size)
    assert HdfsFileSystem().list(root) == sorted(["a b", "a%20b", "a+b?c#d", "ä€"])


def test_a_host_without_a_port_is_a_namenode_at_the_default_port(
    cluster: HdfsCluster, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hdfs_connections, "_DEFAULT_PORT", cluster.port)
    cluster.put("/root/key", noise(24))
    assert hdfs_connections._DEFAULT_PORT != 8020
    assert HdfsFileSystem().status("hdfs://127.0.0.1/root/key").size_bytes == 24


def test_a_file_that_is_replaced_while_it_is_read_is_noticed(
    cluster: HdfsCluster, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.put("/root/key", noise(5_000_000))

    class ReplacingClient(hdfs_native.Client):
        """The file is replaced once it has been opened."""

        def read(self, path: str) -> object:
            reader = super().read(path)
            cluster.put("/root/key", noise(5_000_000, seed=2))
            return reader

    version = HdfsFileSystem().status(f"{root}/key").version
    filesystem = HdfsFileSystem()
    monkeypatch.setattr(hdfs_native, "Client", ReplacingClient)
    with pytest.raises(ModelFileChangedError, match="changed while it was being read"):
        filesystem.read_into(f"{root}/key", 0, memoryview(bytearray(5_000_000)), version)


def test_a_file_that_is_being_written_is_hidden_and_replaces_no_directory(cluster: HdfsCluster, root: str) -> None:
    cluster.put("/root/model/key", b"x")
    filesystem = HdfsFileSystem()
    with pytest.raises(ModelFileError, match="not empty"):
        filesystem.delete(f"{root}/model")
    for name in ("a:b", "..", "a/../b"):
        with pytest.raises(ModelFileError, match="HDFS has no such names"):
            filesystem.create(f"{root}/{name}")
    for path, refused in ((f"{root}/model", True), (f"{root}/key", False)):
        writer = filesystem.create(path)
        writer.write(memoryview(noise(100)))
        hidden, name = filesystem.list(root)
        assert re.fullmatch(rf"\.{path.rpartition('/')[2]}\..*\.tmp", hidden)
        if refused:
            with pytest.raises(ModelFileError, match="a directory has this name"):
                writer.commit()
            writer.abort()
            assert filesystem.list(root) == ["model"]
        else:
            writer.commit()
            assert filesystem.list(root) == ["key", "model"]
    assert cluster.get("/root/model/key") == b"x"


def test_a_rename_whose_answer_was_lost_is_found_to_be_done(
    cluster: HdfsCluster, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = HdfsFileSystem().create(f"{root}/key")
    writer.write(memoryview(noise(100)))
    request_once, lost = hdfs_connections.HdfsConnections.request_once, []

    def is_renamed() -> bool:
        try:
            return cluster.get("/root/key") == noise(100)
        except OSError:
            return False

    def request_and_lose(connections, doing, address, seconds, call):
        answer = request_once(connections, doing, address, seconds, call)
        if not lost and is_renamed():
            lost.append(answer)
            raise UnansweredError(f"{doing} {address.uri}", 1.0)
        return answer

    monkeypatch.setattr(hdfs_connections.HdfsConnections, "request_once", request_and_lose)
    writer.commit()
    assert lost
    assert cluster.get("/root/key") == noise(100)


def test_a_write_that_gets_no_answer_says_that_nothing_was_changed(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = HdfsFileSystem().create(f"{root}/key")

    def unanswered(*_: object) -> None:
        raise UnansweredError("writing", 1.0)

    with monkeypatch.context() as patch:
        patch.setattr(hdfs_connections.HdfsConnections, "request_once", unanswered)
        with pytest.raises(ModelSourceError, match=r"no answer .*; nothing was changed: write it again"):
            writer.commit()
    writer.abort()
    assert HdfsFileSystem().list(root) == []
