"""Reads a stretch of an HDFS file into a caller's buffer, and never after the caller has gone."""

import threading
import time
from typing import Any

from hps.filesystems.hdfs_address import HdfsAddress
from hps.filesystems.hdfs_errors import UnansweredError, hdfs_failure


class HdfsStream:
    """One read, in a thread that is left behind when nothing comes any more. *Used once.*

    hdfs-native's `read_range_stream` yields the packets of a DataNode (64 KB). Each is copied to its place as it comes, which
    costs less than the whole part that `read_range` makes and that then is copied.

    Args:
        client: hdfs-native's synchronous client.
        address: of the file.
        offset: where to begin.
        buffer: writable bytes; written under a lock, and not at all once `run` has ended.
    """

    def __init__(self, client: Any, address: HdfsAddress, offset: int, buffer: memoryview) -> None:
        self._client, self._address, self._offset, self._buffer = client, address, offset, buffer
        self._writing = threading.Lock()
        self._abandoned = False
        self._done = 0
        self._error: BaseException | None = None
        self._ended = threading.Event()

    def run(self, timeout_s: float, deadline: float) -> int:
        """Read until the buffer is full or the file ends.

        Args:
            timeout_s: the longest wait for more bytes.
            deadline: when all must be there, by `time.monotonic`.

        Returns:
            How many bytes came.

        Raises:
            UnansweredError: nothing came in time.
            ModelFileError: as `hdfs_failure` says.
        """
        done, begun = -1, time.monotonic()
        threading.Thread(target=self._read, name="hps-hdfs-read", daemon=True).start()
        while not self._ended.wait(max(min(timeout_s, deadline - time.monotonic()), 0.0)):
            with self._writing:
                if self._done == done or time.monotonic() >= deadline:
                    self._abandoned = True
                    raise UnansweredError("reading", self._address.uri, min(timeout_s, time.monotonic() - begun))
                done = self._done
        if self._error is not None:
            raise hdfs_failure("reading", self._address.uri, self._error) from self._error
        return self._done

    def _read(self) -> None:
        try:
            reader = self._client.read(self._address.path)
            wanted = min(len(self._buffer), len(reader) - self._offset)  # beyond the end hdfs-native panics
            if wanted <= 0:
                return
            for packet in reader.read_range_stream(self._offset, wanted):
                with self._writing:
                    if self._abandoned:
                        return
                    self._buffer[self._done : self._done + len(packet)] = packet
                    self._done += len(packet)
        except BaseException as error:  # noqa: BLE001 - raised by the caller's thread; a Rust panic is no Exception
            self._error = error
        finally:
            self._ended.set()
