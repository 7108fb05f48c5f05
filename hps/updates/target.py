"""The tables that a feed of online updates writes to. The deployment implements it."""

from collections.abc import Mapping
from typing import Protocol

from hps.databases.base import LogPosition, Partition, RowChanges


class UpdateTarget(Protocol):
    """Tables by index, in the order of their ids. *Thread-safe.*"""

    def follow_log(self, index: int) -> dict[Partition, LogPosition]:
        """Return how far a table has followed each partition of its log; see `Database.follow_log`.

        Raises:
            DatabaseError: the database failed, or keeps no order of updates.
            NotReadyError: the version is no longer in service.
        """

    def apply(self, index: int, changes: RowChanges, positions: Mapping[Partition, LogPosition]) -> int:
        """Apply changes to every tier; see `Database.apply`. Lookups that start after it returns see them.

        Returns:
            Number of changes that were not older than the stored rows.

        Raises:
            DatabaseError: the database failed; call again with the same changes.
            NotReadyError: the version is no longer in service.
        """
