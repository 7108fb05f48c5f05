"""A substitute for a database that could not be opened, until it can be."""

from collections.abc import Iterator
from typing import Any, Literal, NoReturn, Self

from hps.errors import DatabaseError
from hps.stores.base import Database, TableStats
from hps.types import BoolArray, FloatArray, KeyArray


class UnavailableDatabase(Database):
    """Stands for a database of this kind that could not be opened: every call about rows raises. *Immutable.*"""

    def __init__(self, kind: str, row_dtype: Literal["float32"] | None, reason: str) -> None:
        self.kind = kind  # type: ignore[misc]  # of the object, not of the class
        self.row_dtype = row_dtype
        self._reason = reason

    @classmethod
    def from_config(cls, config: Any) -> Self:
        return cls(config.type, config.row_dtype, "it was not opened yet")

    def open_table(self, tag: str, dim: int) -> None:
        self._refuse(f"opening table {tag}")

    def fetch(self, tag: str, keys: KeyArray, out: FloatArray, found: BoolArray) -> int:
        self._refuse(f"fetching from table {tag}")

    def insert(self, tag: str, keys: KeyArray, vectors: FloatArray) -> None:
        self._refuse(f"inserting into table {tag}")

    def delete(self, tag: str, keys: KeyArray) -> int:
        self._refuse(f"deleting from table {tag}")

    def scan(self, tag: str, chunk_rows: int) -> Iterator[tuple[KeyArray, FloatArray]]:
        self._refuse(f"scanning table {tag}")

    def stats(self, tag: str) -> TableStats:
        self._refuse(f"measuring table {tag}")

    def drop_table(self, tag: str) -> None:
        self._refuse(f"dropping table {tag}")

    def close(self) -> None:
        """Nothing is open."""

    def _refuse(self, doing: str) -> NoReturn:
        raise DatabaseError(f"{self.kind}: {doing}: the database is unavailable ({self._reason}); retrying every few seconds")
