"""Addresses and failures of HDFS, without any; ring2/filesystems/test_hdfs.py asks a real NameNode and DataNode."""

import threading

import pytest

from hps.configuration.tiers import ModelSourceConfig
from hps.errors import ModelFileError, ModelFileNotFoundError, ModelSourceError
from hps.filesystems import hdfs_connections
from hps.filesystems.failures import hdfs_failure
from hps.filesystems.hdfs import HdfsFileSystem
from hps.filesystems.hdfs_connections import HdfsAddress, hdfs_address


@pytest.mark.parametrize(
    ("uri", "authority", "path"),
    [
        *(("hdfs://host:9000/a/b", "host:9000", "/a/b"), ("HDFS://Name_Service-1/a", "Name_Service-1", "/a")),
        *(("hdfs:///a/b", "", "/a/b"), ("hdfs:/a/b", "", "/a/b"), ("hdfs://host", "host", "/"), ("hdfs://host/", "host", "/")),
        *(("hdfs://host//a///b//", "host", "/a/b"), ("hdfs://[::1]:8020/a", "[::1]:8020", "/a")),
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


_HADOOP = "org.apache.hadoop"
_TRACE = "\\n\\tat org.apache.hadoop.hdfs.server.namenode.FSNamesystem.getBlockLocations(FSNamesystem.java:1799)"


def rpc_error(name: str, said: str = "x") -> RuntimeError:
    return RuntimeError(f'RPCError("{_HADOOP}.{name}", "{said}")')


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (FileNotFoundError("/a/key"), ModelFileNotFoundError, "no such file"),
        (FileNotFoundError("Path is not a file: /a\n\tat org.apache.hadoop"), ModelFileError, "a directory, expected a file"),
        (
            rpc_error("security.AccessControlException", f"Permission denied: user=u{_TRACE}"),
            *(ModelFileError, "Permission denied: user=u; let this user"),
        ),
        (
            RuntimeError(f"RPC error: {_HADOOP}.security.AccessControlException Permission denied: user=u"),
            *(ModelFileError, "Permission denied: user=u; let this user"),
        ),
        (
            RuntimeError(
                f'FatalRPCError("{_HADOOP}.security.AccessControlException", "SIMPLE authentication is not enabled.")'
            ),
            *(ModelFileError, "kinit"),
        ),
        (RuntimeError("NoSASLMechanism"), ModelFileError, "kinit"),
        (rpc_error("hdfs.server.namenode.SafeModeException"), ModelSourceError, "safe mode"),
        (rpc_error("ipc.StandbyException"), ModelSourceError, "name the nameservice"),
        (rpc_error("hdfs.server.namenode.NotReplicatedYetException"), ModelSourceError, "too slowly"),
        (rpc_error("ipc.RetriableException"), ModelSourceError, "not ready"),
        (rpc_error("hdfs.protocol.DSQuotaExceededException"), ModelFileError, "quota"),
        (RuntimeError('DataTransferError("Failed to read from all DataNodes")'), ModelSourceError, "blocks cannot be read"),
        (
            RuntimeError('RPCError("java.io.IOException", "File /a could only be replicated to 0 nodes instead of 1")'),
            *(ModelSourceError, "no DataNode takes it"),
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
    with pytest.raises(kind, match=f"^reading hdfs://h/a: .*{words}"):
        raise failure
    assert not any(trace in str(failure) for trace in ("\tat", "\\tat"))


def test_a_panic_of_the_library_is_an_error_of_ours() -> None:
    def ask(_client: object) -> None:
        raise BaseException("a panic of Rust's")

    connections = hdfs_connections.HdfsConnections(ModelSourceConfig())
    with pytest.raises(ModelFileError, match="a panic of Rust's"):
        connections.request("opening", hdfs_address("hdfs://127.0.0.1:1/key", "opening"), ask)


def test_threads_that_get_no_answer_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hdfs_connections, "MOST_THREADS", 3)
    release, asked = threading.Event(), []

    def ask(_client: object) -> str:
        asked.append(1)
        release.wait()
        return "answer"

    connections = hdfs_connections.HdfsConnections(ModelSourceConfig(timeout_s=0.1, deadline_s=20, max_attempts=5))
    address = hdfs_address("hdfs://127.0.0.1:1/key", "opening")
    try:
        with pytest.raises(ModelSourceError, match=r"opening hdfs://127\.0\.0\.1:1/key: no answer .*tried 5 times"):
            connections.request("opening", address, ask)
        assert len(asked) == 3
    finally:
        release.set()
    patient = connections.settings.model_copy(update={"timeout_s": 20.0})
    connections.settings = patient
    assert connections.request("opening", address, ask) == "answer"


def rpc_error(name: str, said: str = "x") -> RuntimeError:
    return RuntimeError(f'RPCError("{_HADOOP}.{name}", "{said}")')
