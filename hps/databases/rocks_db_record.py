"""How far a table's model files are loaded, as bytes beside the tables."""

import json
from dataclasses import asdict

from hps.databases.base import LoadRecord
from hps.errors import DatabaseCorruptError

_PREFIX = b"hps-server/load/"  # of the column family `default`, where HugeCTR keeps nothing


def record_key(tag: str) -> bytes:
    """The key of a table's record."""
    return _PREFIX + tag.encode()


def encode_record(record: LoadRecord) -> bytes:
    """The record as it is stored."""
    return json.dumps(asdict(record)).encode()


def decode_record(tag: str, data: bytes) -> LoadRecord:
    """Read a stored record.

    Raises:
        DatabaseCorruptError: it is none.
    """
    try:
        fields = json.loads(data)
        return LoadRecord(str(fields["fingerprint"]), int(fields["rows_done"]), int(fields["rows_total"]))
    except (ValueError, TypeError, KeyError) as error:
        raise DatabaseCorruptError(
            f"reading the load record of table {tag}: got {data[:100]!r}, which is none; drop the table and load it again"
        ) from error
