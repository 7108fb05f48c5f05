"""Reads a stretch of an HDFS file into a caller's buffer, and never after the caller has gone."""

import threading
import time
from typing import Any

from hps.errors import ModelFileError, ModelSourceError
from hps.filesystems.base import FileStatus, changed
from hps.filesystems.hdfs.address import HdfsAddress
from hps.filesystems.hdfs.errors import UnansweredError, hdfs_failure


class HdfsStream:
    """One read, in a thread that is left behind when nothing comes any more. *Used once.*

    hdfs-native's `read_range_stream` yields the packets of a DataNode (64 KB). Each is copied to its place as it comes, which
    costs less than the whole part that `read_range` makes and that then is copied.

    A file that is replaced is another file with other blocks, so that what comes is of one file. That the name had the wanted
    version before and afterwards says which. A question takes 0.2 ms, a part some 20.

    Args:
        client: of hdfs-native.
        address: of the file.
        offset: where to begin.
        buffer: writable bytes; written under a lock, and not at all once `wait` has ended.
        version: that the file must have; any when empty.
    """

    def __init__(self, client: Any, address: HdfsAddress, offset: int, buffer: memoryview, version: str) -> None:
        self._client, self._address, self._offset, self._buffer, self._version = client, address, offset, buffer, version
        self._lock = threading.Lock()
        self._abandoned = False
        self._steps = self._done = 0
        self._error: BaseException | None = None
        self._ended = threading.Event()

    def run(self) -> None:
        """Read; for the thread."""
        try:
            self._read()
        except BaseException as error:  # noqa: BLE001 - raised by `wait`; a panic of Rust's is no Exception
            self._error = error
        finally:
            self._ended.set()

    def wait(self, timeout_s: float, left_s: float) -> None:
        """Wait until the buffer is full; for the caller.

        Args:
            timeout_s: the longest wait for an answer or for more bytes.
            left_s: the longest that all of it may take.

        Raises:
            UnansweredError: nothing came in time.
            ModelFileError: the file ends early, has another version, or cannot be read.
        """
        started, steps = time.monotonic(), -1
        deadline = started + left_s
        while not self._ended.wait(max(min(timeout_s, deadline - time.monotonic()), 0.0)):
            with self._lock:
                if self._steps == steps or time.monotonic() >= deadline:
                    self._abandoned = True
                    raise UnansweredError("reading", self._address.uri, min(timeout_s, time.monotonic() - started))
                steps = self._steps
        if isinstance(self._error, ModelFileError):
            raise self._error
        if self._error is not None:
            raise hdfs_failure("reading", self._address.uri, self._error) from self._error

    def _read(self) -> None:
        uri, path, end = self._address.uri, self._address.path, self._offset + len(self._buffer)
        status = self._status()
        if end > status.size_bytes:
            raise ModelFileError(
                f"reading {uri}: it ends at byte {status.size_bytes}, wanted bytes {self._offset} to {end}; "
                "it was cut short, or is being replaced"
            )
        reader = self._client.read(path)
        self._steps += 1
        if end > len(reader):  # beyond the end hdfs-native panics
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
        status = status_of("reading", self._address, self._client.get_file_info(self._address.path))
        self._steps += 1
        if self._version and status.version != self._version:
            raise changed(self._address.uri, self._version, status.version)
        return status


def status_of(doing: str, address: HdfsAddress, info: Any) -> FileStatus:
    """What hdfs-native says of a file, as ours."""
    if info.isdir:
        raise ModelFileError(f"{doing} {address.uri}: it is a directory, wanted a file")
    return FileStatus(info.length, f"{info.modification_time}-{info.length}")
