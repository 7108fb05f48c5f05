"""Files in HDFS, through hdfs-native: no Java, no libhdfs."""

import secrets
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import hdfs_native

from hps.configuration.tiers import ModelSourceConfig
from hps.errors import ModelFileError, ModelFileNotFoundError, ModelSourceError
from hps.filesystems.base import FileStatus, FileSystem, FileWriter, changed, too_short
from hps.filesystems.hdfs_connections import HdfsAddress, HdfsConnections, hdfs_address
from hps.filesystems.hdfs_errors import hdfs_failure
from hps.filesystems.retries import UnansweredError, retried

T = TypeVar("T")

_PIECE_BYTES = 1 << 20  # of one write, so that each has its timeout


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
        """Tell whether a file or directory is there; a path that must not be looked at is an error."""
        try:
            self._info("looking for", hdfs_address(path, "looking for"))
        except ModelFileNotFoundError:
            return False
        return True

    def status(self, path: str) -> FileStatus:
        """Size and version of a file."""
        address = hdfs_address(path, "opening")
        return status_of("opening", address, self._info("opening", address))

    def read_into(self, path: str, offset: int, buffer: memoryview, version: str = "") -> None:
        """Fill `buffer` from byte `offset`."""
        if len(buffer):
            address = hdfs_address(path, "reading")
            retried(self.settings, lambda deadline: self._read(address, offset, buffer, version, deadline))

    def directories(self, path: str) -> list[str]:
        """Names of the directories in a directory, sorted."""
        return sorted(entry.path.rsplit("/", 1)[-1] for entry in self._entries(path) if entry.isdir)

    def list(self, path: str) -> list[str]:
        """Names of what a directory holds, sorted."""
        return sorted(entry.path.rsplit("/", 1)[-1] for entry in self._entries(path))

    def _entries(self, path: str) -> Sequence[Any]:
        address = hdfs_address(path, "listing")
        if not self._info("listing", address).isdir:
            raise ModelFileError(f"listing {path}: it is a file, expected a directory")
        entries: Sequence[Any] = self._connections.ask(
            "listing", address, lambda client: list(client.list_status(address.path))
        )
        return entries

    def create(self, path: str) -> FileWriter:
        """Begin to write a file under a name of its own, in the directory where it belongs."""
        return _HdfsWriter(self._connections, hdfs_address(path, "writing"))

    def delete(self, path: str) -> None:
        """Remove a file."""
        address = hdfs_address(path, "removing")
        self._connections.ask("removing", address, lambda client: client.delete(address.path, False))

    def rename(self, path: str, new_path: str) -> None:
        """Give a directory another name."""
        old, new = hdfs_address(path, "renaming"), hdfs_address(new_path, "renaming")
        # HDFS moves a directory into one that has the name already.
        if self.exists(new_path):
            raise ModelFileError(f"renaming {path} to {new_path}: it exists; choose another name")
        self._connections.ask_once(
            "renaming", old, time.monotonic() + self.settings.timeout_s, lambda client: client.rename(old.path, new.path, False)
        )

    def _info(self, doing: str, address: HdfsAddress) -> Any:
        return self._connections.ask(doing, address, lambda client: client.get_file_info(address.path))

    def _read(self, address: HdfsAddress, offset: int, buffer: memoryview, version: str, deadline: float) -> None:
        stream = HdfsStream(lambda: self._connections.client(address), address, offset, buffer, version)
        run = self._connections.counted("reading", address, deadline, stream.run)
        threading.Thread(target=run, name="hps-hdfs-read", daemon=True).start()
        try:
            stream.wait(self.settings.timeout_s, deadline)
        except UnansweredError:
            self._connections.drop(address, stream.client)
            raise


class HdfsStream:
    """One read of a range, in a thread that is left behind when no more bytes come. *Used once.*

    hdfs-native's `read_range_stream` yields the packets of a DataNode (64 KB). Each is copied to its place as it comes, which
    costs less than `read_range`, whose result would have to be copied as a whole.

    A file that replaces another has blocks of its own, so all bytes are of one file. The version is checked before and
    afterwards, which tells that it was the expected one. Such a question takes 0.2 ms, a part about 20 ms.

    Args:
        connect: gives a client of hdfs-native; called in the thread.
        address: of the file.
        offset: where to begin.
        buffer: writable bytes. Nothing is written once `wait` has returned or raised.
        version: that the file must have; empty for any.

    Attributes:
        client: that is asked; None until there is one.
    """

    def __init__(self, connect: Callable[[], Any], address: HdfsAddress, offset: int, buffer: memoryview, version: str) -> None:
        self._connect, self._address, self._offset, self._buffer, self._version = connect, address, offset, buffer, version
        self.client: Any = None
        self._lock = threading.Lock()
        self._abandoned = False
        self._steps = self._done = 0
        self._error: BaseException | None = None
        self._ended = threading.Event()

    def run(self) -> None:
        """Read. The thread calls this."""
        try:
            self._read()
        except BaseException as error:  # noqa: BLE001 - raised by `wait`; a panic of Rust's is no Exception
            self._error = error
        finally:
            self._ended.set()

    def wait(self, timeout_s: float, deadline: float) -> None:
        """Wait until the buffer is full. The caller calls this.

        Args:
            timeout_s: the longest wait for an answer or for more bytes.
            deadline: of everything, by `time.monotonic`.

        Raises:
            UnansweredError: nothing came in time.
            ModelFileError: the file ends early, has another version, or cannot be read.
        """
        started, steps = time.monotonic(), -1
        while not self._ended.wait(max(min(timeout_s, deadline - time.monotonic()), 0.0)):
            with self._lock:
                if self._steps == steps or time.monotonic() >= deadline:
                    self._abandoned = True
                    raise UnansweredError(f"reading {self._address.uri}", min(timeout_s, time.monotonic() - started))
                steps = self._steps
        if isinstance(self._error, ModelFileError):
            raise self._error
        if self._error is not None:
            raise hdfs_failure("reading", self._address.uri, self._error) from self._error

    def _read(self) -> None:
        uri, path, end = self._address.uri, self._address.path, self._offset + len(self._buffer)
        self.client = self._connect()
        status = self._status()
        if end > status.size_bytes:
            raise too_short(uri, status.size_bytes, self._offset, end)
        reader = self.client.read(path)
        self._steps += 1
        if end > len(reader):  # hdfs-native panics beyond the end
            raise ModelSourceError(f"reading {uri}: it is being replaced; load the model again when its writer is done")
        for packet in reader.read_range_stream(self._offset, len(self._buffer)):
            with self._lock:
                if self._abandoned:
                    return
                self._buffer[self._done : self._done + len(packet)] = packet
                self._done += len(packet)
                self._steps += 1
        if self._version:
            self._status()
        if self._done < len(self._buffer):
            raise ModelSourceError(f"reading {uri}: it broke off at byte {self._offset + self._done}; load the model again")

    def _status(self) -> FileStatus:
        status = status_of("reading", self._address, self.client.get_file_info(self._address.path))
        self._steps += 1
        if self._version and status.version != self._version:
            raise changed(self._address.uri, self._version, status.version)
        return status


def status_of(doing: str, address: HdfsAddress, info: Any) -> FileStatus:
    """Size and version of a file, from what hdfs-native says of it."""
    if info.isdir:
        raise ModelFileError(f"{doing} {address.uri}: it is a directory, expected a file")
    return FileStatus(info.length, f"{info.modification_time}-{info.length}")


class _HdfsWriter(FileWriter):
    """A file under a temporary name. A killed process leaves `.<name>.<random>.tmp` behind.

    Durable means what it means in HDFS: as many DataNodes as there are replicas hold every byte.
    """

    def __init__(self, connections: HdfsConnections, address: HdfsAddress) -> None:
        self._connections, self._address = connections, address
        directory, _, name = address.path.rpartition("/")
        self._temporary = f"{directory}/.{name[:100]}.{secrets.token_hex(6)}.tmp"
        self._size_bytes = 0
        self._renamed = False
        # An attempt whose answer was lost may have made it.
        options = hdfs_native.WriteOptions(overwrite=True)
        self._file = self._ask(lambda client: client.create(self._temporary, options))

    def write(self, data: memoryview) -> None:
        data = data.cast("B")
        for start in range(0, len(data), _PIECE_BYTES):
            # A copy: a call that got no answer may still hold what it was given.
            piece = bytes(data[start : start + _PIECE_BYTES])
            self._once(partial(self._file.write, piece))
            self._size_bytes += len(piece)

    def commit(self) -> None:
        self._once(self._file.close)
        try:
            self._ask(lambda client: client.rename(self._temporary, self._address.path, True))
        except ModelFileNotFoundError:
            # An attempt whose answer was lost may have done it; nobody else knows the temporary name.
            info = self._ask(lambda client: client.get_file_info(self._address.path))
            if info.length != self._size_bytes:
                raise
        self._renamed = True

    def abort(self) -> None:
        if self._renamed:
            return
        with suppress(ModelFileError):
            self._ask(lambda client: client.delete(self._temporary, False))

    def _ask(self, question: Callable[[Any], T]) -> T:
        return self._connections.ask("writing", self._address, question)

    def _once(self, call: Callable[[], T]) -> T:
        """Ask what cannot be repeated, since nobody knows which bytes arrived."""
        deadline = time.monotonic() + self._connections.settings.timeout_s
        try:
            return self._connections.ask_once("writing", self._address, deadline, lambda _: call())
        except ModelSourceError as error:
            raise ModelSourceError(f"{error}; nothing was changed: write it again") from error
