"""Durable records of how far each table is loaded, and whether it was modified since."""

import json
from dataclasses import asdict, replace

from hps.errors import DatabaseCorruptError
from hps.stores.base import LOAD_ADVICE, LoadRecord
from hps.stores.rocks_db.change_order import log_records
from hps.stores.rocks_db.engine import DEFAULT, Engine, after

_PREFIX = b"hps-server/load/"  # in RocksDB's own column family, which HugeCTR does not use
_TIME = b"hps-server/loaded-at/"  # separate, so that older releases can read the record
_WRITER = b"hps-server/writer/"
_DROPPED = LoadRecord("", 0, 1)


class LoadRecords:
    """The records of all tables. *Thread-safe*, except that one thread at a time may change the record of a table."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def get(self, tag: str) -> LoadRecord | None:
        """Read the record of a table; None if there is none."""
        doing = f"reading the load record of table {tag}"
        data, loaded_at = self._engine.get(self._engine.family(DEFAULT), [_key(tag), _TIME + tag.encode()], doing)
        if data is None:
            return None
        try:
            return LoadRecord(**json.loads(data), loaded_at_us=int(loaded_at or 0))
        except (ValueError, TypeError) as error:
            raise DatabaseCorruptError(f"{doing}: got {data[:100]!r}, expected a load record. {LOAD_ADVICE}") from error

    def advance(self, tag: str, record: LoadRecord) -> LoadRecord:
        """Store that more of the files is loaded, durably on return.

        Returns:
            The stored record, which is marked as modified if the table was modified since this load began.
        """
        before = self.get(tag)
        if before is not None and before.modified and before.fingerprint == record.fingerprint:
            record = replace(record, modified=True)
        self._put(tag, record, f"recording the load of table {tag}")
        return record

    def mark_modified(self, tag: str) -> None:
        record = self.get(tag)
        if record is not None and not record.modified:
            self._put(tag, replace(record, modified=True), f"marking table {tag} as modified")

    def writer(self, tag: str) -> str | None:
        (data,) = self._engine.get(self._engine.family(DEFAULT), [_WRITER + tag.encode()], f"reading the writer of table {tag}")
        return None if data is None else data.decode()

    def name_writer(self, tag: str, token: str) -> None:
        doing = f"naming the writer of table {tag}"
        self._engine.write({DEFAULT: ([_WRITER + tag.encode()], [token.encode()])}, {}, doing)
        self._engine.sync(doing)

    def mark_dropped(self, tag: str) -> None:
        """Mark a table as being dropped until `remove`, durably on return."""
        self._put(tag, _DROPPED, f"dropping table {tag}")

    def dropped(self) -> list[str]:
        """List the tags of tables whose drop was interrupted."""
        tags, start = [], _PREFIX
        while fields := self._engine.read(self._engine.family(DEFAULT), start, 1000, "looking for dropped tables"):
            stored = [key.removeprefix(_PREFIX).decode() for key in fields[::2] if key.startswith(_PREFIX)]
            tags += [tag for tag in stored if self._is_dropped(tag)]
            start = after(fields[-2])
        return tags

    def _is_dropped(self, tag: str) -> bool:
        try:
            return self.get(tag) == _DROPPED
        except DatabaseCorruptError:  # opening the table reports it
            return False

    def remove(self, tag: str) -> None:
        """Remove a table's records, durably on return."""
        doing = f"forgetting the load of table {tag}"
        keys = [_WRITER + tag.encode(), _TIME + tag.encode(), _key(tag)]
        self._engine.write({}, {DEFAULT: [*keys, *log_records(tag)]}, doing)
        self._engine.sync(doing)

    def _put(self, tag: str, record: LoadRecord, doing: str) -> None:
        fields = asdict(record)
        loaded_at = b"%d" % fields.pop("loaded_at_us")
        keys, values = [_key(tag), _TIME + tag.encode()], [json.dumps(fields).encode(), loaded_at]
        self._engine.write({DEFAULT: (keys, values)}, {}, doing)
        self._engine.sync(doing)


def _key(tag: str) -> bytes:
    return _PREFIX + tag.encode()
