"""What a feed of online updates writes to, in memory: tables that keep the order of changes, and can fail or die."""

import threading
from collections import defaultdict
from collections.abc import Callable, Mapping

import numpy as np

from hps.stores.base import LogPosition, Partition, RowChanges
from hps.testing.waiting import PATIENCE_S


class MemoryTarget:
    """Tables of rows with their sequences. *Thread-safe.*

    Attributes:
        rows: by table and key, the sequence of the last change and its vector, None where it was deleted.
        positions: by table, what is stored with them.
        calls: what was applied: table, keys, positions.
        given: the positions of the last call.
        before: is called with the table and the changes before they are made, and may raise.
        applied: says that something was applied.
    """

    def __init__(self) -> None:
        self.rows: dict[int, dict[int, tuple[int, list[float] | None]]] = defaultdict(dict)
        self.positions: dict[int, dict[Partition, LogPosition]] = defaultdict(dict)
        self.calls: list[tuple[int, list[int], dict[str, str]]] = []
        self.given: Mapping[Partition, LogPosition] = {}
        self.before: Callable[[int, RowChanges], object] = lambda index, changes: None
        self.applied = threading.Condition()

    def follow_log(self, index: int) -> dict[Partition, LogPosition]:
        self.before(index, RowChanges(*[np.empty(0)] * 3))
        return dict(self.positions[index])

    def apply(self, index: int, changes: RowChanges, positions: Mapping[Partition, LogPosition]) -> int:
        self.given = positions
        self.before(index, changes)
        return self.make(index, changes, positions)

    def make(self, index: int, changes: RowChanges, positions: Mapping[Partition, LogPosition]) -> int:
        assert np.unique(changes.keys).size == changes.keys.size
        rows, latest = self.rows[index], 0
        for i, (key, sequence) in enumerate(zip(changes.keys.tolist(), changes.sequences.tolist(), strict=True)):
            if key not in rows or rows[key][0] <= sequence:
                deleted = changes.deleted is not None and changes.deleted[i]
                rows[key] = (sequence, None if deleted else changes.vectors[i].tolist())
                latest += 1
        with self.applied:
            self.positions[index] = dict(positions)
            self.calls.append((index, changes.keys.tolist(), {name: at.position for name, at in positions.items()}))
            self.applied.notify_all()
        return latest

    def until(self, condition: Callable[[], bool]) -> bool:
        """Wait for a condition that an `apply` may have made true."""
        with self.applied:
            return self.applied.wait_for(condition, PATIENCE_S)
