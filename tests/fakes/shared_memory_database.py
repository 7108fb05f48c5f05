"""A shared database on dicts, whose rows can be lost and are then copied from the database below."""

from typing import Any

from hps.stores.base import CopyOutcome, Database, LoadRecord, SharedDatabase
from hps.types import FloatArray, KeyArray
from tests.fakes.memory_database import MemoryDatabase


class SharedMemoryDatabase(MemoryDatabase, SharedDatabase):
    """A memory database that one process fills at a time.

    Attributes:
        lacking: tags of the tables that lack rows.
        above: by tag, the database that it was told to stand above, and how often.
        claimed: whether another process fills it.
        refuses: whether others have modified its tables.
        ended: how copies ended.
        copied: rows of the pieces that were copied.
    """

    kind = "shared_memory"

    def __init__(self) -> None:
        super().__init__()
        self.lacking: set[str] = set()
        self.above: list[tuple[str, Database]] = []
        self.claimed = self.refuses = False
        self.ended: list[CopyOutcome] = []
        self.copied: list[int] = []

    def lose(self, tag: str) -> None:
        """Be empty, as after a restart without data."""
        with self._lock:
            self._rows[tag] = {}
        self.lacking.add(tag)

    def stand_above(self, tag: str, database: Database, below: str = "") -> None:
        self.above.append((tag, database))

    def lacks_rows(self, tag: str) -> bool:
        self.stats(tag)
        return tag in self.lacking

    def claim_copy(self, tag: str, fingerprint: str, rows: int) -> bool:
        return tag in self.lacking and not self.claimed

    def copy_rows(self, tag: str, keys: KeyArray, vectors: FloatArray) -> bool:
        if self.refuses:
            return False
        self.copied.append(keys.size)
        self.insert(tag, keys, vectors)
        return True

    def end_copy(self, tag: str, outcome: CopyOutcome) -> None:
        self.ended.append(outcome)
        if outcome != "interrupted":
            self.lacking.discard(tag)

    def claim_load(self, *arguments: Any, **more: Any) -> int | None:
        return 0

    def load_record(self, tag: str) -> LoadRecord | None:
        return None
