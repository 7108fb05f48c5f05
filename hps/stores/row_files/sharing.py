"""A row file of a table, as other replicas read it by ranges."""

import numpy as np

from hps.stores.base import SharedRowFile
from hps.stores.row_files.download import Download
from hps.stores.row_files.row_file import RowFile


class TableFile(SharedRowFile):
    """The file of a table, complete or being downloaded. *Immutable.* The mapping stays while this object does."""

    def __init__(self, file: RowFile) -> None:
        self.size_bytes = file.head.size_bytes
        self._file = file

    def has(self, start: int, stop: int) -> bool:
        download = self._file.presence
        return download.has_bytes(start, stop) if isinstance(download, Download) else self._file.has_bytes(start, stop)

    def read(self, start: int, stop: int) -> memoryview:
        copied = np.empty(stop - start, np.uint8)
        np.copyto(copied, self._file.mapped[start:stop])  # NumPy copies without the GIL
        return copied.data
