"""Which rows of an aging table expire next."""

import heapq
from typing import Final

import numpy as np

from hps.types import IndexArray, KeyArray

PERIOD_US: Final = 8_000_000
"""Changes are kept by periods of this length."""

_NEVER: Final = 1 << 62
_PARTS: Final = 64  # arrays of a period before they are joined


class ExpiryCalendar:
    """Keys by the time of their changes, the earliest first, in bounded memory: 16 bytes a change. *One per thread.*

    A key that changes twice is here twice; only the database knows whether a change is the last one of its row. Later periods
    are dropped when there is no room: `horizon` says up to where the calendar is complete, and the database must be read again
    before the time has come to there.

    Args:
        most_changes: maximum number of changes; the earliest period may have more.

    Attributes:
        horizon: all changes before this time are here, or were taken.
    """

    def __init__(self, most_changes: int) -> None:
        self.most_changes = most_changes
        self.horizon = _NEVER
        self._limit = _NEVER  # changes from here on are dropped
        self._periods: dict[int, list[tuple[KeyArray, IndexArray]]] = {}
        self._order: list[int] = []  # a heap of the periods
        self._changes = 0

    def __len__(self) -> int:
        return self._changes

    @property
    def complete(self) -> bool:
        """Whether no change was dropped."""
        return self.horizon >= _NEVER

    def add(self, keys: KeyArray, times: IndexArray) -> None:
        """Add changes, (n,), in any order; may be called twice with the same."""
        if self._limit < _NEVER:
            near = times < self._limit
            keys, times = keys[near], times[near]
        if not keys.size:
            return
        periods = times // PERIOD_US
        first, last = int(periods.min()), int(periods.max())
        if first == last:
            self._put(first, keys.copy(), times.copy())  # they may be views of a message
        else:
            for period in np.unique(periods).tolist():
                chosen = periods == period
                self._put(period, keys[chosen], times[chosen])
        if self._changes > self.most_changes:
            self._drop_latest()

    def take(self, until: int) -> KeyArray:
        """Remove all changes up to a time; return their keys, distinct, ascending."""
        taken: list[KeyArray] = []
        while self._order and self._order[0] <= until // PERIOD_US:
            period = self._order[0]
            parts = self._periods[period]
            keys, times = np.concatenate([keys for keys, _ in parts]), np.concatenate([times for _, times in parts])
            due = times <= until
            if due.any():
                taken.append(keys[due])
                self._changes -= taken[-1].size
                keys, times = keys[~due], times[~due]
            self._periods[period] = [(keys, times)]
            if keys.size:
                break
            del self._periods[heapq.heappop(self._order)]
        return np.unique(np.concatenate(taken)) if taken else np.empty(0, np.int64)

    def earliest_up_to(self, until: int) -> int | None:
        """Return the earliest time of a change if it is not after this one; None otherwise."""
        if not self._order or self._order[0] > until // PERIOD_US:
            return None
        earliest = min(int(times.min()) for _, times in self._periods[self._order[0]])
        return earliest if earliest <= until else None

    def start_reading(self) -> None:
        """Accept all changes: those of the database are about to be added."""
        self._limit = _NEVER

    def end_reading(self) -> None:
        """All changes of the database were added since `start_reading`."""
        self.horizon = self._limit

    def _put(self, period: int, keys: KeyArray, times: IndexArray) -> None:
        parts = self._periods.get(period)
        if parts is None:
            parts = self._periods[period] = []
            heapq.heappush(self._order, period)
        parts.append((keys, times))
        if len(parts) > _PARTS:
            self._periods[period] = [(np.concatenate([keys for keys, _ in parts]), np.concatenate([at for _, at in parts]))]
        self._changes += keys.size

    def _drop_latest(self) -> None:
        periods = sorted(self._periods)
        while len(periods) > 1 and self._changes > self.most_changes * 3 // 4:
            period = periods.pop()
            self._changes -= sum(keys.size for keys, _ in self._periods.pop(period))
            self._limit = period * PERIOD_US
        self.horizon = min(self.horizon, self._limit)
        self._order = periods  # ascending, so it is a heap
