"""Counts what lookups of a table read from the disk."""

import threading
from typing import Final, NamedTuple

from hps.statistics.snapshot import Latency
from hps.statistics.times import Times

_DEPTHS: Final = tuple(float(1 << i) for i in range(13))  # up to MOST_PAGES
_SECONDS: Final = (1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.2, 0.5, 1.0, 5.0)
_UNIT: Final = 10**9  # `Times` counts in billionths


class ColdCounts(NamedTuple):
    """Cold reads since a table was opened."""

    pages: int  # that were missing; those after the first 64 of a request are estimated
    depth: Latency  # missing pages that were asked for together
    seconds: Latency  # from asking to the last row


class ColdReads:
    """Counts cold reads of a table. *Thread-safe.*"""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pages = 0
        self._depth, self._seconds = Times(_DEPTHS), Times(_SECONDS)

    def add(self, pages: int, ns: int) -> None:
        with self._lock:
            self._pages += pages
            self._depth.add(pages * _UNIT)
            self._seconds.add(ns)

    def counts(self) -> ColdCounts:
        with self._lock:
            return ColdCounts(self._pages, self._depth.latency(), self._seconds.latency())
