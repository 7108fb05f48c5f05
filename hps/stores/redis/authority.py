"""The persistent database of a process below its shared one."""

from hps.stores.base import PersistentDatabase
from hps.stores.redis.marks import Process, base_of


class TableAuthority:
    """The persistent database below one table, if any. *Thread-safe*; `process` reads it at each call.

    Args:
        tag: tag of the table there.
        database: the persistent database, once it holds the complete table.
    """

    def __init__(self, tag: str, database: PersistentDatabase | None = None) -> None:
        self._tag = tag
        self._database = database
        self._previous: str | None = None
        self._renewed: str | None = None
        if database and not database.read_only and (token := database.writer_token(tag)) is not None:
            # Of an earlier process. A copy of the directory has the same token; only one of the two may replace it in Redis.
            self._previous, self._renewed = token, database.renew_writer_token(tag)

    def process(self) -> Process:
        """Describe the present relation of this process to the table."""
        if self._database is None:
            return Process()
        record, token = self._database.load_record(self._tag), self._database.writer_token(self._tag)
        base, alias = "-", ""
        if record is not None and record.complete:
            alias = base_of(record.fingerprint)
            base = base_of(f"{record.rows_total} {record.checksum}") if record.checksum else alias
        if self._database.read_only:
            return Process(base, alias, None, passive=token is not None)
        return Process(base, alias, token, self._previous if token == self._renewed else None)
