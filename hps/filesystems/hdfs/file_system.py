"""Files in HDFS, through hdfs-native: no Java, no libhdfs."""

import threading
import time
from typing import Any

from hps.configuration.tiers import ModelSourceConfig
from hps.errors import ModelFileError, ModelFileNotFoundError
from hps.filesystems.base import FileStatus, FileSystem, FileWriter
from hps.filesystems.hdfs.address import HdfsAddress, parse
from hps.filesystems.hdfs.connection import HdfsConnections
from hps.filesystems.hdfs.errors import UnansweredError
from hps.filesystems.hdfs.stream import HdfsStream, status_of
from hps.filesystems.hdfs.writer import HdfsWriter
from hps.filesystems.retries import retried


class HdfsFileSystem(FileSystem):
    """Reads and writes files by `hdfs://host:port/path`, `hdfs://nameservice/path` or `hdfs:///path`. *Thread-safe.*

    Hadoop's configuration is found as Hadoop finds it: core-site.xml and hdfs-site.xml in HADOOP_CONF_DIR, else in
    HADOOP_HOME/etc/hadoop. The version of a file is its modification time (milliseconds) and its length.
    """

    def __init__(self, settings: ModelSourceConfig | None = None) -> None:
        super().__init__(settings)
        self._connections = HdfsConnections(self.settings)

    def exists(self, path: str) -> bool:
        """Tell whether a file or directory is there; a path that may not be looked at is an error, not absent."""
        try:
            self._info("looking for", parse(path, "looking for"))
        except ModelFileNotFoundError:
            return False
        return True

    def status(self, path: str) -> FileStatus:
        """Size and version of a file."""
        address = parse(path, "opening")
        return status_of("opening", address, self._info("opening", address))

    def read_into(self, path: str, offset: int, buffer: memoryview, version: str = "") -> None:
        """Fill `buffer` from byte `offset`."""
        if len(buffer):
            address = parse(path, "reading")
            retried(self.settings, lambda left_s: self._read(address, offset, buffer, version, left_s))

    def list(self, path: str) -> list[str]:
        """Names of what a directory holds, sorted."""
        address = parse(path, "listing")

        def names(client: Any) -> list[str]:
            return [entry.path.rsplit("/", 1)[-1] for entry in client.list_status(address.path)]

        if not self._info("listing", address).isdir:
            raise ModelFileError(f"listing {path}: it is a file, wanted a directory")
        return sorted(self._connections.ask("listing", address, names))

    def create(self, path: str) -> FileWriter:
        """Begin to write a file under a name of its own, in the directory where it belongs."""
        return HdfsWriter(self._connections, parse(path, "writing"))

    def delete(self, path: str) -> None:
        """Remove a file."""
        address = parse(path, "removing")
        self._connections.ask("removing", address, lambda client: client.delete(address.path, False))

    def _info(self, doing: str, address: HdfsAddress) -> Any:
        return self._connections.ask(doing, address, lambda client: client.get_file_info(address.path))

    def _read(self, address: HdfsAddress, offset: int, buffer: memoryview, version: str, left_s: float) -> None:
        started = time.monotonic()
        client = self._connections.client("reading", address, min(left_s, self.settings.timeout_s))
        stream = HdfsStream(client, address, offset, buffer, version)
        run = self._connections.counted("reading", address, left_s, stream.run)
        threading.Thread(target=run, name="hps-hdfs-read", daemon=True).start()
        try:
            stream.wait(self.settings.timeout_s, left_s - (time.monotonic() - started))
        except UnansweredError:
            self._connections.drop(address, client)
            raise
