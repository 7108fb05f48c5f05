"""What a feed of online updates writes to: the tables of one version of a model. The deployment implements it."""

from collections.abc import Mapping
from typing import Protocol

from hps.databases.base import LogPosition, RowChanges


class UpdateTarget(Protocol):
    """Tables by index, in the order of their ids. *Thread-safe.*"""

    def follow_log(self, index: int) -> dict[str, LogPosition]:
        """How far a table has followed each partition of its log, by `str(Partition)`; see `Database.follow_log`.

        Raises:
            DatabaseError: its database failed, or keeps no order of updates.
            NotReadyError: the version is no longer in service.
        """

    def apply(self, index: int, changes: RowChanges, positions: Mapping[str, LogPosition]) -> int:
        """Make changes in every tier; see `Database.apply`. When it returns, every lookup that starts sees them.

        Returns:
            How many were not older than what was there.

        Raises:
            DatabaseError: to be called again with the same changes.
            NotReadyError: the version is no longer in service.
        """
