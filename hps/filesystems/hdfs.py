"""Files in HDFS, through hdfs-native: no Java, no libhdfs."""

import time
from typing import Any

from hps.config_tiers import ModelSourceConfig
from hps.errors import ModelFileError, ModelFileNotFoundError, ModelSourceError
from hps.filesystems.base import FileStatus, FileSystem, FileWriter, changed
from hps.filesystems.hdfs_address import HdfsAddress, parse
from hps.filesystems.hdfs_connection import HdfsConnections
from hps.filesystems.hdfs_errors import UnansweredError
from hps.filesystems.hdfs_stream import HdfsStream
from hps.filesystems.hdfs_writer import HdfsWriter
from hps.filesystems.retries import retried


class HdfsFileSystem(FileSystem):
    """Reads and writes files by `hdfs://host:port/path`, `hdfs://nameservice/path` or `hdfs:///path`. *Thread-safe.*

    Hadoop's configuration is found as Hadoop finds it: core-site.xml and hdfs-site.xml in HADOOP_CONF_DIR, else in
    HADOOP_HOME/etc/hadoop. The version of a file is its modification time (milliseconds) and its length.
    """

    part_bytes = 4 << 20

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
        return _status_of("opening", address, self._info("opening", address))

    def read_into(self, path: str, offset: int, buffer: memoryview, version: str = "") -> None:
        """Fill `buffer` from byte `offset`, between two questions for the version.

        A file that is replaced is another file with other blocks, so that a read is of one file; that this one still has the
        name afterwards says which. A question takes 0.2 ms, a part some 20.
        """
        if len(buffer):
            address = parse(path, "reading")
            retried(self.settings, lambda left_s: self._read(address, offset, buffer, version, time.monotonic() + left_s))

    def list(self, path: str) -> list[str]:
        """Names of what a directory holds, sorted."""
        address = parse(path, "listing")

        async def names(client: Any) -> list[str]:
            return [entry.path.rsplit("/", 1)[-1] async for entry in client.list_status(address.path)]

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

    def _read(self, address: HdfsAddress, offset: int, buffer: memoryview, version: str, deadline: float) -> None:
        before = self._status_once(address, deadline)
        if version and before.version != version:
            raise changed(address.uri, version, before.version)
        if offset + len(buffer) > before.size_bytes:
            raise ModelFileError(
                f"reading {address.uri}: it ends at byte {before.size_bytes}, wanted bytes {offset} to "
                f"{offset + len(buffer)}; it was cut short, or is being replaced"
            )
        connection = self._connections.get("reading", address, deadline)
        stream = HdfsStream(connection.synchronous, address, offset, buffer)
        try:
            count = stream.run(self.settings.timeout_s, deadline)
        except UnansweredError:
            self._connections.drop(address, connection)
            raise
        if version and (now := self._status_once(address, deadline).version) != version:
            raise changed(address.uri, version, now)
        if count < len(buffer):
            raise ModelSourceError(
                f"reading {address.uri}: it broke off at byte {offset + count} of {before.size_bytes}; load the model again"
            )

    def _status_once(self, address: HdfsAddress, deadline: float) -> FileStatus:
        info = self._connections.ask_once("reading", address, deadline, lambda client: client.get_file_info(address.path))
        return _status_of("reading", address, info)


def _status_of(doing: str, address: HdfsAddress, info: Any) -> FileStatus:
    if info.isdir:
        raise ModelFileError(f"{doing} {address.uri}: it is a directory, wanted a file")
    return FileStatus(info.length, f"{info.modification_time}-{info.length}")
