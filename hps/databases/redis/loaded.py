"""The note of a load that a table's hash in Redis holds."""

import hashlib
import json
from dataclasses import dataclass

from hps.databases.redis.layout import Layout
from hps.errors import DatabaseCorruptError


@dataclass(frozen=True, slots=True)
class Loaded:
    """How far a model is loaded into a table: what the table's hash says of it. *Immutable.*

    Attributes:
        fingerprint: of the model's files.
        rows_done: their leading rows that the table was given.
        rows: leading rows that it is to be given.
        marks: digest of the marks of the partitions that got them; with other marks, rows were lost.
    """

    fingerprint: str
    rows_done: int
    rows: int
    marks: str

    @property
    def complete(self) -> bool:
        return self.rows_done >= self.rows


def parse_loaded(text: bytes, layout: Layout) -> Loaded:
    """Read a note of a load.

    Raises:
        DatabaseCorruptError: it is none.
    """
    try:
        return Loaded(**json.loads(text))
    except (ValueError, TypeError) as error:
        raise DatabaseCorruptError(
            f"redis: table {layout.tag}: its note of a load is {text[:80]!r} ({error}); drop the table and load it again"
        ) from error


def digest(marks: list[bytes]) -> str:
    """The marks of all partitions, shortened."""
    return hashlib.blake2b(b"".join(marks), digest_size=8).hexdigest()
