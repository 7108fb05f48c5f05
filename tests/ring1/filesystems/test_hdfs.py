"""Files in HDFS, on a real NameNode and DataNode."""

import threading
from collections.abc import Iterator

import hdfs_native
import pytest

from hps.configuration.tiers import ModelSourceConfig
from hps.errors import ModelFileChangedError, ModelFileError, ModelFileNotFoundError, ModelSourceError
from hps.filesystems import hdfs_connections
from hps.filesystems.hdfs import HdfsFileSystem
from hps.filesystems.hdfs_connections import HdfsAddress, hdfs_address
from hps.filesystems.hdfs_errors import hdfs_failure
from hps.filesystems.retries import UnansweredError
from hps.testing.filesystems import FileSystemContract, noise
from tests.servers.hdfs_cluster import HdfsCluster, hdfs_cluster


@pytest.fixture
def cluster() -> HdfsCluster:
    return hdfs_cluster()


@pytest.fixture
def root(cluster: HdfsCluster) -> Iterator[str]:
    yield f"{cluster.uri}/root"
    cluster.delete("/root")


@pytest.mark.hdfs
class TestHdfsFileSystem(FileSystemContract):
    @pytest.fixture
    def filesystem(self) -> HdfsFileSystem:
        return HdfsFileSystem()

    def put(self, path: str, content: bytes) -> None:
        hdfs_cluster().put(path, content)


@pytest.mark.hdfs
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


# -- addresses ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("uri", "authority", "path"),
    [
        ("hdfs://host:9000/a/b", "host:9000", "/a/b"),
        ("hdfs://host/a", "host", "/a"),
        ("HDFS://Name_Service-1/a", "Name_Service-1", "/a"),
        ("hdfs:///a/b", "", "/a/b"),
        ("hdfs:/a/b", "", "/a/b"),
        ("hdfs://host", "host", "/"),
        ("hdfs://host/", "host", "/"),
        ("hdfs://host//a///b//", "host", "/a/b"),
        ("hdfs://[::1]:8020/a", "[::1]:8020", "/a"),
        ("hdfs://host/a%20b c?d#e", "host", "/a%20b c?d#e"),
    ],
)
def test_a_uri_names_authority_and_path(uri: str, authority: str, path: str) -> None:
    assert hdfs_address(uri, "opening") == HdfsAddress(uri, authority, path)


@pytest.mark.parametrize(
    "uri", ["hdfs://user@host/a", "hdfs://host:port/a", "hdfs://ho st/a", "hdfs://a:1:2/b", "s3://a/b", "/a"]
)
def test_a_uri_of_another_form_is_refused_with_the_forms_that_are_known(uri: str) -> None:
    with pytest.raises(ModelFileError, match="expected hdfs://host:port/path, hdfs://nameservice/path or hdfs:///path"):
        HdfsFileSystem().status(uri)


@pytest.mark.parametrize("uri", ["hdfs://host/nul\0name", "hdfs://host/surrogate\ud800name"])
def test_a_name_that_no_file_can_have_is_a_model_file_error(uri: str) -> None:
    filesystem = HdfsFileSystem()
    for call in (filesystem.exists, filesystem.status, filesystem.list, filesystem.create, filesystem.delete):
        with pytest.raises(ModelFileError, match="no file can have this name"):
            call(uri)


@pytest.mark.hdfs
def test_a_path_is_taken_as_it_stands(cluster: HdfsCluster, root: str) -> None:
    for name, size in (("a b", 1), ("a%20b", 2), ("a+b?c#d", 3), ("ä€", 4)):
        cluster.put("/root/plain", noise(size))
        cluster.rename("/root/plain", f"/root/{name}")  # WebHDFS decodes the path of what it writes twice
        buffer = bytearray(size)
        HdfsFileSystem().read_into(f"{root}/{name}", 0, memoryview(buffer))
        assert buffer == noise(size)
    assert HdfsFileSystem().list(root) == sorted(["a b", "a%20b", "a+b?c#d", "ä€"])


@pytest.mark.hdfs
@pytest.mark.parametrize("name", ["a:b", "..", "a/../b"])
def test_a_name_that_hdfs_refuses_is_a_model_file_error(root: str, name: str) -> None:
    with pytest.raises(ModelFileError, match="HDFS has no such names"):
        HdfsFileSystem().create(f"{root}/{name}")


@pytest.mark.hdfs
def test_a_host_without_a_port_is_a_namenode_at_the_default_port(
    cluster: HdfsCluster, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hdfs_connections, "_DEFAULT_PORT", cluster.port)
    cluster.put("/root/key", noise(24))
    assert hdfs_connections._DEFAULT_PORT != 8020
    assert HdfsFileSystem().status("hdfs://127.0.0.1/root/key").size_bytes == 24


# -- reading ------------------------------------------------------------------------------------------------------


@pytest.mark.hdfs
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


# -- writing ------------------------------------------------------------------------------------------------------


@pytest.mark.hdfs
def test_a_file_that_is_being_written_is_hidden_beside_its_place(cluster: HdfsCluster, root: str) -> None:
    writer = HdfsFileSystem().create(f"{root}/key")
    writer.write(memoryview(noise(100)))
    (name,) = HdfsFileSystem().list(root)
    assert name.startswith(".key.")
    assert name.endswith(".tmp")
    writer.commit()
    assert HdfsFileSystem().list(root) == ["key"]


@pytest.mark.hdfs
def test_a_directory_is_not_replaced_by_a_file(cluster: HdfsCluster, root: str) -> None:
    cluster.put("/root/model/key", b"x")
    writer = HdfsFileSystem().create(f"{root}/model")
    writer.write(memoryview(b"y"))
    with pytest.raises(ModelFileError, match="a directory has this name"):
        writer.commit()
    writer.abort()
    assert HdfsFileSystem().list(root) == ["model"]
    assert cluster.get("/root/model/key") == b"x"


@pytest.mark.hdfs
def test_a_directory_that_holds_files_is_not_deleted(cluster: HdfsCluster, root: str) -> None:
    cluster.put("/root/model/key", b"x")
    with pytest.raises(ModelFileError, match="not empty"):
        HdfsFileSystem().delete(f"{root}/model")
    assert cluster.get("/root/model/key") == b"x"


@pytest.mark.hdfs
def test_a_rename_whose_answer_was_lost_is_found_to_be_done(
    cluster: HdfsCluster, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = HdfsFileSystem().create(f"{root}/key")
    writer.write(memoryview(noise(100)))
    ask_once, lost = hdfs_connections.HdfsConnections.ask_once, []

    def is_renamed() -> bool:
        try:
            return cluster.get("/root/key") == noise(100)
        except OSError:
            return False

    def ask_and_lose(connections, doing, address, seconds, question):
        answer = ask_once(connections, doing, address, seconds, question)
        if not lost and is_renamed():
            lost.append(answer)
            raise UnansweredError(f"{doing} {address.uri}", 1.0)
        return answer

    monkeypatch.setattr(hdfs_connections.HdfsConnections, "ask_once", ask_and_lose)
    writer.commit()
    assert lost
    assert cluster.get("/root/key") == noise(100)


# -- failures -----------------------------------------------------------------------------------------------------

_HADOOP = "org.apache.hadoop"
_TRACE = "\\n\\tat org.apache.hadoop.hdfs.server.namenode.FSNamesystem.getBlockLocations(FSNamesystem.java:1799)"


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (FileNotFoundError("/a/key"), ModelFileNotFoundError, "no such file"),
        (FileNotFoundError("Path is not a file: /a\n\tat org.apache.hadoop"), ModelFileError, "a directory, expected a file"),
        (
            RuntimeError(f'RPCError("{_HADOOP}.security.AccessControlException", "Permission denied: user=u{_TRACE}")'),
            ModelFileError,
            r"hdfs://h/a: Permission denied: user=u; let this user",
        ),
        (
            RuntimeError("RPC error: org.apache.hadoop.security.AccessControlException Permission denied: user=u"),
            ModelFileError,
            "Permission denied: user=u; let this user",
        ),
        (
            RuntimeError(
                f'FatalRPCError("{_HADOOP}.security.AccessControlException", "SIMPLE authentication is not enabled.")'
            ),
            ModelFileError,
            "kinit",
        ),
        (RuntimeError("NoSASLMechanism"), ModelFileError, "kinit"),
        (
            RuntimeError(f'RPCError("{_HADOOP}.hdfs.server.namenode.SafeModeException", "x")'),
            ModelSourceError,
            "safe mode",
        ),
        (RuntimeError(f'RPCError("{_HADOOP}.ipc.StandbyException", "x")'), ModelSourceError, "name the nameservice"),
        (
            RuntimeError(f'RPCError("{_HADOOP}.hdfs.server.namenode.NotReplicatedYetException", "x")'),
            ModelSourceError,
            "too slowly",
        ),
        (RuntimeError(f'RPCError("{_HADOOP}.ipc.RetriableException", "x")'), ModelSourceError, "not ready"),
        (RuntimeError(f'RPCError("{_HADOOP}.hdfs.protocol.DSQuotaExceededException", "x")'), ModelFileError, "quota"),
        (RuntimeError('DataTransferError("Failed to read from all DataNodes")'), ModelSourceError, "blocks cannot be read"),
        (
            RuntimeError('RPCError("java.io.IOException", "File /a could only be replicated to 0 nodes instead of 1")'),
            ModelSourceError,
            "no DataNode takes it",
        ),
        (RuntimeError('InvalidArgument("No fs.defaultFS setting found")'), ModelFileError, "set HADOOP_CONF_DIR"),
        (RuntimeError("UrlParseError(InvalidPort)"), ModelFileError, "hdfs://host:port/path"),
        (RuntimeError('RPCError("com.example.Unheard", "of")'), ModelFileError, r"hdfs-native refused \(of\)"),
        (FileExistsError("/a is being created"), ModelFileError, "/a is being created"),
        (OSError("failed to lookup address information: Name or service not known"), ModelFileError, "no name server knows"),
        (OSError("failed to lookup address information: Temporary failure in name resolution"), ModelSourceError, "Temporary"),
        (OSError("Connection refused (os error 111)"), ModelSourceError, "nothing listens there"),
        (OSError("RPC listener disconnected"), ModelSourceError, "not its web page"),
        (OSError("No route to host (os error 113)"), ModelSourceError, "No route to host"),
    ],
)
def test_what_hdfs_refuses_is_named_with_its_cure(error: Exception, kind: type[ModelFileError], words: str) -> None:
    failure = hdfs_failure("reading", "hdfs://h/a", error)
    assert type(failure) is kind
    with pytest.raises(kind, match=f"^reading hdfs://h/a: .*{words.removeprefix('hdfs://h/a: ')}"):
        raise failure
    assert "\tat" not in str(failure)
    assert "\\tat" not in str(failure)


def test_a_panic_of_the_library_is_an_error_of_ours() -> None:
    def ask(_client: object) -> None:
        raise BaseException("a panic of Rust's")

    connections = hdfs_connections.HdfsConnections(ModelSourceConfig())
    with pytest.raises(ModelFileError, match="a panic of Rust's"):
        connections.ask("opening", hdfs_address("hdfs://127.0.0.1:1/key", "opening"), ask)


def test_threads_that_get_no_answer_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hdfs_connections, "MOST_THREADS", 3)
    release, asked = threading.Event(), []

    def ask(_client: object) -> str:
        asked.append(1)
        release.wait(60)
        return "answer"

    connections = hdfs_connections.HdfsConnections(ModelSourceConfig(timeout_s=0.1, deadline_s=20, max_attempts=5))
    address = hdfs_address("hdfs://127.0.0.1:1/key", "opening")
    with pytest.raises(ModelSourceError, match=r"opening hdfs://127\.0\.0\.1:1/key: no answer .*tried 5 times"):
        connections.ask("opening", address, ask)
    assert len(asked) == 3
    release.set()
    patient = connections.settings.model_copy(update={"timeout_s": 20.0})
    connections.settings = patient
    assert connections.ask("opening", address, ask) == "answer"
