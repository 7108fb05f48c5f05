"""A real HDFS for tests: a NameNode and a DataNode of Hadoop 2.7.3, two JVMs on loopback, ended with the test run.

@pytest.fixture
def cluster():
    return hdfs_cluster()

The jars come from `.ci/hdfs-jars`. Hadoop 2.7 and 3 speak the same client protocol.
"""

import atexit
import functools
import http.client
import importlib.util
import json
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self
from urllib.parse import quote, urlencode, urlsplit
from xml.sax.saxutils import escape

from hps.ground.registry import install_hint
from tests.servers.program import Program
from tests.servers.redis_server import free_ports, listens

_START_S = 90.0  # two JVMs on a busy machine; 4 s on an idle one

_JAVA_OPTIONS = (
    *("-Xmx128m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Djava.net.preferIPv4Stack=true"),
    # Hadoop 2.7 is older than Java's modules.
    *("--add-opens", "java.base/java.lang=ALL-UNNAMED", "--add-opens", "java.security.jgss/sun.security.krb5=ALL-UNNAMED"),
)
_LOG4J = "log4j.rootLogger=INFO,out\nlog4j.appender.out=org.apache.log4j.ConsoleAppender\n" + (
    "log4j.appender.out.layout=org.apache.log4j.PatternLayout\nlog4j.appender.out.layout.ConversionPattern=%d %p %c{1}: %m%n\n"
)


def jars_directory() -> Path:
    """Where `.ci/hdfs-jars` puts Hadoop's jars: HPS_HDFS_JARS, or a folder of the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(os.environ.get("HPS_HDFS_JARS") or f"{cache}/hps-server/hdfs-2.7.3")


def what_is_missing() -> str | None:
    """Why no HDFS can be started here, and the cure; None where it can."""
    if importlib.util.find_spec("hdfs_native") is None:
        return f"hdfs_native is not installed: {install_hint('hdfs')}"
    if shutil.which("java") is None:
        return "there is no java: run .ci/hdfs-jars"
    if not any(jars_directory().glob("hadoop-hdfs-*.jar")):
        return f"Hadoop's jars are not in {jars_directory()}: run .ci/hdfs-jars"
    return None


class _Node(Program):
    """One JVM with a Hadoop daemon."""

    def __init__(self, directory: Path, main: str) -> None:
        super().__init__(directory / f"{main}.log")
        self.directory, self.main = directory, main

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def start(self) -> Self:
        """From the main thread: the JVM dies with the thread that starts it."""
        self.launch(*_command(self.directory, self.main), cwd=self.directory)
        return self

    @contextmanager
    def paused(self) -> Iterator[None]:
        self.pause()
        try:
            yield
        finally:
            self.resume()


def _command(directory: Path, main: str, *arguments: str) -> list[str]:
    jars = sorted(str(jar) for jar in jars_directory().glob("*.jar"))
    java = shutil.which("java") or "java"
    home = f"-Dhadoop.home.dir={directory}"
    return [java, *_JAVA_OPTIONS, home, "-cp", ":".join([str(directory / "conf"), str(directory), *jars]), main, *arguments]


class HdfsCluster:
    """A NameNode and a DataNode. Files are put by WebHDFS, as the superuser, so that no code under test is in the way.

    Args:
        directory: theirs.
        block_bytes: of a block of what is put; small, so that small files have several. What the code under test writes has
            blocks of 128 MB: hdfs-native fails where a block is full before the one before it was reported (no client of
            Hadoop's does), which blocks that take 10 ms provoke on a busy machine.
        standby: the NameNode is the standby of an HA pair without an active one; there is no DataNode then.
    """

    def __init__(self, directory: Path, *, block_bytes: int = 1 << 20, standby: bool = False) -> None:
        self.directory, self._block_bytes, self._standby = directory, block_bytes, standby
        self.port = self.http_port = 0
        self.namenode = _Node(directory, "org.apache.hadoop.hdfs.server.namenode.NameNode")
        self.datanode = _Node(directory, "org.apache.hadoop.hdfs.server.datanode.DataNode")

    @property
    def uri(self) -> str:
        return f"hdfs://127.0.0.1:{self.port}"

    # -- starting and stopping ----------------------------------------------------------------------------------------

    def start(self) -> "HdfsCluster":
        self.directory.mkdir(parents=True)
        for name in ("hdfs", "datanode", "static", "secondary"):
            (self.directory / "webapps" / name / "WEB-INF").mkdir(parents=True)
            (self.directory / "webapps" / name / "WEB-INF" / "web.xml").write_text("<web-app/>")
        self._configure()
        formatting = _command(self.directory, self.namenode.main, "-format", "-force", "-nonInteractive")
        done = subprocess.run(formatting, capture_output=True, timeout=_START_S, cwd=self.directory, text=True, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr[-5000:])
        for attempt in range(5):
            self.namenode.start()
            if self._wait_http():
                break
            if "BindException" not in self.namenode.log or attempt == 4:
                raise RuntimeError(self.namenode.log[-5000:])
            self.namenode.kill()
            self._configure()  # somebody was faster
        if not self._standby:
            self.datanode.start()
            self.wait_whole()
        return self

    def restart(self) -> None:
        """Start again what was killed, and wait until it serves."""
        for node in (self.namenode, self.datanode):
            if node.process is None:
                node.start()
        self.wait_whole()

    @contextmanager
    def without(self, *nodes: _Node) -> Iterator[None]:
        """Kill nodes; start them again in the end."""
        for node in nodes:
            node.kill()
        try:
            yield
        finally:
            self.restart()

    def stop(self) -> None:
        for node in (self.datanode, self.namenode):
            node.kill()

    def __enter__(self) -> "HdfsCluster":
        try:
            return self.start()
        except BaseException:
            self.stop()
            raise

    def __exit__(self, *_: object) -> None:
        self.stop()

    def wait_whole(self) -> None:
        """Wait until the NameNode is out of safe mode, the DataNode has reported to it, and a file can be written and read."""

        def whole() -> bool:
            self.put("/.probe", b"x")
            return self.get("/.probe") == b"x" or not (self.namenode.runs and self.datanode.runs)

        self.namenode.wait_until(whole, OSError, http.client.HTTPException)
        if not self.datanode.runs:
            raise RuntimeError(self.datanode.log[-5000:])

    def _wait_http(self) -> bool:
        """Whether the NameNode came to answer."""
        try:
            self.namenode.wait_until(self._answers, OSError, http.client.HTTPException)
        except RuntimeError:
            return False
        return True

    def _answers(self) -> bool:
        listens(self.port)
        self._namenode_request("GET", "/jmx?qry=Hadoop:service=NameNode,name=NameNodeStatus")
        return True

    def _configure(self) -> None:
        self.port, self.http_port = free_ports(2)
        (self.directory / "conf").mkdir(exist_ok=True)
        (self.directory / "conf" / "log4j.properties").write_text(_LOG4J)
        address, http_address = f"127.0.0.1:{self.port}", f"127.0.0.1:{self.http_port}"
        site: dict[str, object] = {
            "dfs.replication": 1,
            "dfs.namenode.fs-limits.min-block-size": 1,
            "dfs.namenode.name.dir": f"file://{self.directory}/name",
            "dfs.namenode.edits.noeditlogchannelflush": "true",
            "dfs.namenode.safemode.extension": 0,
            "dfs.datanode.data.dir": f"file://{self.directory}/data",
            "dfs.datanode.address": "127.0.0.1:0",
            "dfs.datanode.http.address": "127.0.0.1:0",
            "dfs.datanode.ipc.address": "127.0.0.1:0",
            "dfs.datanode.hostname": "127.0.0.1",
            "dfs.heartbeat.interval": 1,
        }
        if self._standby:
            other = free_ports(1)[0]
            site |= {
                "dfs.nameservices": "pair",
                "dfs.ha.namenodes.pair": "nn1,nn2",
                "dfs.ha.namenode.id": "nn1",
                "dfs.namenode.rpc-address.pair.nn1": address,
                "dfs.namenode.http-address.pair.nn1": http_address,
                "dfs.namenode.rpc-address.pair.nn2": f"127.0.0.1:{other}",
                "dfs.namenode.http-address.pair.nn2": f"127.0.0.1:{other}",
                "dfs.namenode.shared.edits.dir": f"file://{self.directory}/shared",
            }
        else:
            site |= {"dfs.namenode.rpc-address": address, "dfs.namenode.http-address": http_address}
        default = "hdfs://pair" if self._standby else f"hdfs://{address}"
        write_hadoop_configuration(self.directory / "conf", {"fs.defaultFS": default}, site)

    # -- files, by path or URI, through WebHDFS -----------------------------------------------------------------------

    def put(self, path: str, content: bytes) -> None:
        """Write a file, and the directories above it, in place of what is there.

        Often takes 0.4 s, the pause of Hadoop's client when it asks for the end of the file before the DataNode has told of it.
        """
        self._request("PUT", path, op="CREATE", overwrite="true", blocksize=str(self._block_bytes), body=content)

    def get(self, path: str) -> bytes:
        return self._request("GET", path, op="OPEN")

    def delete(self, path: str) -> None:
        """Remove a file or a whole directory."""
        self._request("DELETE", path, op="DELETE", recursive="true")

    def mkdir(self, path: str) -> None:
        self._request("PUT", path, op="MKDIRS")

    def rename(self, path: str, target: str) -> None:
        self._request("PUT", path, op="RENAME", destination=target)

    def set_permission(self, path: str, octal: str) -> None:
        self._request("PUT", path, op="SETPERMISSION", permission=octal)

    def set_safe_mode(self, on: bool) -> None:
        """As an administrator does it. WebHDFS cannot."""
        command = ["-safemode", "enter" if on else "leave"]
        arguments = _command(self.directory, "org.apache.hadoop.hdfs.tools.DFSAdmin", *command)
        subprocess.run(arguments, check=True, capture_output=True, timeout=_START_S, cwd=self.directory)

    def _request(self, method: str, path: str, *, body: bytes | None = None, **query: str) -> bytes:
        user = pwd.getpwuid(os.getuid()).pw_name  # of the NameNode, hence the superuser
        where = f"/webhdfs/v1{quote(path.removeprefix(self.uri))}?{urlencode({'user.name': user, **query})}"
        status, location, answer = self._namenode_request(method, where)
        if status == 307:
            other = urlsplit(location)
            assert other.hostname
            assert other.port
            status, _, answer = _http(other.hostname, other.port, method, f"{other.path}?{other.query}", body)
        if status >= 300:
            message = json.loads(answer or b"{}").get("RemoteException", {}).get("message", "")
            raise OSError(f"{method} {where}: {status} {message}")
        return answer

    def _namenode_request(self, method: str, where: str) -> tuple[int, str, bytes]:
        return _http("127.0.0.1", self.http_port, method, where, None)


def _http(host: str, port: int, method: str, where: str, body: bytes | None) -> tuple[int, str, bytes]:
    connection = http.client.HTTPConnection(host, port, timeout=30)
    try:
        connection.request(method, where, body=body)
        response = connection.getresponse()
        return response.status, response.getheader("Location", ""), response.read()
    finally:
        connection.close()


@functools.cache
def hdfs_cluster() -> HdfsCluster:
    """The one that tests share. Whoever breaks it mends it."""
    directory = Path(tempfile.mkdtemp(prefix="hps-test-hdfs-"))
    cluster = HdfsCluster(directory / "cluster")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    atexit.register(cluster.stop)
    return cluster.start()


def write_hadoop_configuration(directory: Path, core: dict[str, object], site: dict[str, object]) -> None:
    """Write core-site.xml and hdfs-site.xml, as they lie in HADOOP_CONF_DIR."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, properties in (("core-site.xml", core), ("hdfs-site.xml", site)):
        lines = "".join(
            f"  <property><name>{escape(key)}</name><value>{escape(str(value))}</value></property>\n"
            for key, value in properties.items()
        )
        (directory / name).write_text(f'<?xml version="1.0"?>\n<configuration>\n{lines}</configuration>\n')
