"""Writes a file to HDFS under a temporary name, which it loses when it is whole."""

import secrets
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import hdfs_native

from hps.errors import ModelFileError, ModelFileNotFoundError, ModelSourceError
from hps.filesystems.base import FileWriter
from hps.filesystems.hdfs.address import HdfsAddress
from hps.filesystems.hdfs.connection import HdfsConnections

T = TypeVar("T")

_PIECE_BYTES = 1 << 20  # of one call, so that each has its timeout


class HdfsWriter(FileWriter):
    """A file under a temporary name. A killed process leaves `.<name>.<random>.tmp` behind.

    Durable means what it means in HDFS: as many DataNodes as it wants replicas hold every byte.
    """

    def __init__(self, connections: HdfsConnections, address: HdfsAddress) -> None:
        self._connections, self._address = connections, address
        directory, _, name = address.path.rpartition("/")
        self._temporary = f"{directory}/.{name[:100]}.{secrets.token_hex(6)}.tmp"
        self._size_bytes = 0
        self._renamed = False
        # Overwriting what an attempt made whose answer was lost.
        options = hdfs_native.WriteOptions(overwrite=True)
        self._file = self._ask(lambda client: client.create(self._temporary, options))

    def write(self, data: memoryview) -> None:
        data = data.cast("B")
        for start in range(0, len(data), _PIECE_BYTES):
            # Copied, since a call that got no answer may still hold what it was given.
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
        """What cannot be tried again, since nobody knows which bytes arrived."""
        left_s = self._connections.settings.deadline_s
        try:
            return self._connections.ask_once("writing", self._address, left_s, lambda _: call())
        except ModelSourceError as error:
            raise ModelSourceError(f"{error}; nothing was changed: write it again") from error
