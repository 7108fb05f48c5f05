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
        head, presence = self._file.head, self._file.presence
        if isinstance(presence, Download):
            return presence.has_bytes(start, stop)
        start, stop = max(start, head.records_at), min(stop, head.sums_at)  # head and checksums are always here
        # A file of a share has holes between these parts.
        return (
            not head.share or start >= stop or any(low <= start and stop <= high for low, high in self._file.range.runs(head))
        )

    def read(self, start: int, stop: int) -> memoryview:
        copied = np.empty(stop - start, np.uint8)
        np.copyto(copied, self._file.mapped[start:stop])  # NumPy copies without the GIL
        return copied.data
