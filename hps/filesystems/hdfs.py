"""Files in HDFS, through hdfs-native: no Java, no libhdfs."""

import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import hdfs_native

from hps.configuration.tiers import ModelSourceConfig
from hps.errors import ModelFileChangedError, ModelFileError, ModelFileNotFoundError, ModelSourceError
from hps.filesystems.base import FileStatus, FileSystem, FileWriter, changed, replaced, too_short
from hps.filesystems.hdfs_connections import HdfsAddress, HdfsConnections, hdfs_address
from hps.filesystems.retries import ReadTarget, fill

T = TypeVar("T")

_LONGEST_CLAIM_S, _STALE_CLAIM_MS = 30.0, 60_000
_PIECE_BYTES = 1 << 20  # per write, so that each has its own timeout


class HdfsFileSystem(FileSystem):
    """Reads and writes files by `hdfs://host:port/path`, `hdfs://nameservice/path` or `hdfs:///path`. *Thread-safe.*

    Hadoop's configuration is found as Hadoop finds it: core-site.xml and hdfs-site.xml in HADOOP_CONF_DIR, else in
    HADOOP_HOME/etc/hadoop. The version of a file is its modification time (milliseconds) and its length.
    """

    renames_directories = True

    def __init__(self, settings: ModelSourceConfig | None = None) -> None:
        super().__init__(settings)
        self._connections = HdfsConnections(self.settings)

    def exists(self, path: str) -> bool:
        """Return whether a file or directory exists; an unreadable path is an error."""
        try:
            self._info("looking for", hdfs_address(path, "looking for"))
        except ModelFileNotFoundError:
            return False
        return True

    def status(self, path: str) -> FileStatus:
        address = hdfs_address(path, "opening")
        return status_of("opening", address, self._info("opening", address))

    def read_into(self, path: str, offset: int, buffer: memoryview, version: str = "") -> None:
        # The version is checked before and afterwards: a replacing file has its own blocks, so all bytes are of one file. A
        # check takes 0.2 ms, a part about 20 ms.
        address, end = hdfs_address(path, "reading"), offset + len(buffer)
        if not len(buffer):
            return
        size = self._checked(address, version, self._info("reading", address)).size_bytes
        if end > size:
            raise too_short(path, size, offset, end)

        def attempt(target: ReadTarget, seconds: float) -> None:
            self._connections.request_once("reading", address, seconds, lambda client: read(client, target))

        def read(client: Any, target: ReadTarget) -> None:
            reader = client.read(address.path)
            if end > len(reader):  # hdfs-native panics beyond the end
                raise ModelSourceError(f"reading {path}: it is being replaced; load the model again when its writer is done")
            for packet in reader.read_range_stream(offset, len(buffer)):  # 64 KB, copied on arrival
                target.write(packet)
            if version:
                self._checked(address, version, client.get_file_info(address.path))
            if target.missing:
                raise ModelSourceError(f"reading {path}: it broke off at byte {end - target.missing}; load the model again")

        fill(self.settings, path, buffer, attempt)

    def directories(self, path: str) -> list[str]:
        return sorted(entry.path.rsplit("/", 1)[-1] for entry in self._entries(path) if entry.isdir)

    def list(self, path: str) -> list[str]:
        return sorted(entry.path.rsplit("/", 1)[-1] for entry in self._entries(path))

    def _entries(self, path: str) -> Sequence[Any]:
        address = hdfs_address(path, "listing")
        if not self._info("listing", address).isdir:
            raise ModelFileError(f"listing {path}: it is a file, expected a directory")
        entries: Sequence[Any] = self._connections.request(
            "listing", address, lambda client: list(client.list_status(address.path))
        )
        return entries

    def create(self, path: str) -> FileWriter:
        """Start to write a file under a temporary name in its directory."""
        return _HdfsWriter(self._connections, hdfs_address(path, "writing"))

    def replace(self, path: str, content: bytes, version: str) -> str:
        # HDFS compares no versions. So the new file first takes the name `.<name>.next`, which one writer at a time can have,
        # since HDFS renames to an existing name only on demand. A killed writer may leave it: the next one removes it after a
        # minute, by the NameNode's clock. A writer that is delayed by half a minute gives up, before another may remove its
        # claim.
        address = hdfs_address(path, "writing")
        directory, _, name = address.path.rpartition("/")
        claim = f"{directory}/.{name[:100]}.next"
        started = time.monotonic()
        writer = _HdfsWriter(self._connections, address)
        try:
            writer.write(memoryview(content))
            writer.claim(claim)
        except BaseException:
            writer.abort()
            raise
        try:
            now = self.status(path).version if self.exists(path) else ""
            if now != version:
                raise replaced(path, version, now)
            if time.monotonic() - started > _LONGEST_CLAIM_S:
                raise ModelSourceError(f"writing {path}: HDFS was too slow to exclude other writers; try again")
            seconds = self.settings.timeout_s
            self._connections.request_once("writing", address, seconds, lambda client: client.rename(claim, address.path, True))
        except ModelFileError:
            with suppress(ModelFileError):
                self._connections.request("writing", address, lambda client: client.delete(claim, False))
            if not (written := self.version_holding(path, content)):
                raise
            return written
        return self.status(path).version

    def delete(self, path: str) -> None:
        address = hdfs_address(path, "removing")
        self._connections.request("removing", address, lambda client: client.delete(address.path, False))

    def rename(self, path: str, new_path: str) -> None:
        old, new = hdfs_address(path, "renaming"), hdfs_address(new_path, "renaming")
        # HDFS moves a directory into an existing one of that name.
        if self.exists(new_path):
            raise ModelFileError(f"renaming {path} to {new_path}: it exists; choose another name")
        seconds = self.settings.timeout_s
        self._connections.request_once("renaming", old, seconds, lambda client: client.rename(old.path, new.path, False))

    def _info(self, doing: str, address: HdfsAddress) -> Any:
        return self._connections.request(doing, address, lambda client: client.get_file_info(address.path))

    @staticmethod
    def _checked(address: HdfsAddress, version: str, info: Any) -> FileStatus:
        status = status_of("reading", address, info)
        if version and status.version != version:
            raise changed(address.uri, version, status.version)
        return status


def status_of(doing: str, address: HdfsAddress, info: Any) -> FileStatus:
    """Return size and version of a file from hdfs-native's status."""
    if info.isdir:
        raise ModelFileError(f"{doing} {address.uri}: it is a directory, expected a file")
    return FileStatus(info.length, f"{info.modification_time}-{info.length}")


class _HdfsWriter(FileWriter):
    """A file under a temporary name. A killed process leaves `.<name>.<random>.tmp` behind.

    Durable in the sense of HDFS: as many DataNodes as there are replicas have every byte.
    """

    def __init__(self, connections: HdfsConnections, address: HdfsAddress) -> None:
        self._connections, self._address = connections, address
        directory, _, name = address.path.rpartition("/")
        self._temporary = f"{directory}/.{name[:100]}.{secrets.token_hex(6)}.tmp"
        self._size_bytes = 0
        self._renamed = False
        # An attempt whose answer was lost may have made it.
        options = hdfs_native.WriteOptions(overwrite=True)
        self._file = self._request(lambda client: client.create(self._temporary, options))

    def write(self, data: memoryview) -> None:
        data = data.cast("B")
        for start in range(0, len(data), _PIECE_BYTES):
            # A copy: an unanswered call may still hold its argument.
            piece = bytes(data[start : start + _PIECE_BYTES])
            self._request_once(partial(self._write_piece, piece))
            self._size_bytes += len(piece)

    def _write_piece(self, piece: bytes, _client: Any) -> None:
        self._file.write(piece)

    def commit(self) -> None:
        self._request_once(lambda _client: self._file.close())
        try:
            self._request(lambda client: client.rename(self._temporary, self._address.path, True))
        except ModelFileNotFoundError:
            # An attempt whose answer was lost may have done it; no other process knows the temporary name.
            info = self._request(lambda client: client.get_file_info(self._address.path))
            if info.length != self._size_bytes:
                raise
        self._renamed = True

    def claim(self, path: str) -> None:
        """Give the file a name that no other file has; one that a killed writer left there is removed first.

        Raises:
            ModelFileChangedError: another writer's file has it.
        """
        self._request_once(lambda _client: self._file.close())
        if self._leftover(path):
            self._request(lambda client: client.delete(path, False))
        try:
            self._request_once(lambda client: client.rename(self._temporary, path, False))
        except ModelSourceError:
            raise
        except ModelFileError as error:
            if "already exists" not in str(error):  # hdfs-native has no error of its own for this
                raise
            raise ModelFileChangedError(
                f"writing {self._address.uri}: another writer is changing it, and nothing was written; try again"
            ) from error
        self._renamed = True

    def _leftover(self, path: str) -> bool:
        """Return whether a killed writer left this file: it is much older than the new one, by the NameNode's clock."""
        claim, own = self._status(path), self._status(self._temporary)
        return claim is not None and own is not None and own.modification_time - claim.modification_time > _STALE_CLAIM_MS

    def _status(self, path: str) -> Any:
        try:
            return self._request(lambda client: client.get_file_info(path))
        except ModelFileNotFoundError:
            return None

    def abort(self) -> None:
        if self._renamed:
            return
        with suppress(ModelFileError):
            self._request(lambda client: client.delete(self._temporary, False))

    def _request(self, call: Callable[[Any], T]) -> T:
        return self._connections.request("writing", self._address, call)

    def _request_once(self, call: Callable[[Any], T]) -> T:
        """Send a request that cannot be retried: if its answer was lost, it may have been executed."""
        seconds = self._connections.settings.timeout_s
        try:
            return self._connections.request_once("writing", self._address, seconds, call)
        except ModelSourceError as error:
            raise ModelSourceError(f"{error}; nothing was changed: write it again") from error
