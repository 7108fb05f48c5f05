"""Which tables there are in Redis: made, found, checked before they are used, and dropped."""

import hashlib
import json
import logging
import secrets
from dataclasses import asdict, dataclass
from typing import Final

from hps.databases.redis.layout import ANY_KEY, RedisLayout, partition_number, tag_of
from hps.databases.redis.nodes import RedisNodes
from hps.databases.redis.requests import Call
from hps.errors import DatabaseCorruptError, DatabaseError, TableWidthError

_log = logging.getLogger(__name__)
_LOADED: Final = b"loaded"


@dataclass(frozen=True, slots=True)
class LoadNote:
    """How far a model is loaded into a table: the field `loaded` of the table's hash. *Immutable.*

    Attributes:
        fingerprint: of the model's files.
        rows_done: leading rows of the files that the table was given.
        rows: leading rows that it is to be given.
        marks: digest of the marks of the partitions that got them; where the marks differ, rows were lost.
    """

    fingerprint: str
    rows_done: int
    rows: int
    marks: str


class Catalog:
    """The tables of one Redis. *Thread-safe.*

    Args:
        nodes: run the commands.
        num_partitions: of tables that are made here.
    """

    def __init__(self, nodes: RedisNodes, num_partitions: int) -> None:
        self._nodes = nodes
        self._num_partitions = num_partitions

    def open(self, tag: str, dim: int) -> tuple[RedisLayout, list[bytes]]:
        """Make a table where there is none; returns its layout and the marks of its partitions.

        Raises:
            TableWidthError: it holds vectors of another width.
            DatabaseError: it has another number of partitions, or Redis failed.
        """
        layout = RedisLayout.of(tag, dim, self._num_partitions)
        if not self._about(layout):
            self._check_foreign(layout)
        expected = {"dim": dim, "num_partitions": self._num_partitions}
        self._nodes.run([Call(layout.slot, "HSETNX", layout.about, name, value) for name, value in expected.items()])
        about = self._about(layout)
        held = int(about.get(b"dim", 0))
        if held != dim:
            raise TableWidthError(
                f"redis: opening table {tag}: got vectors of {dim} elements, expected {held}, which it holds; "
                "drop the table first, or give it another name"
            )
        self._check_partitions(layout, int(about.get(b"num_partitions", 0)))
        return layout, self._mark(layout)

    def marks(self, layout: RedisLayout, deadline: float, *, whole: bool) -> list[bytes] | None:
        """The marks that the partitions have now; None where one has none, or the table has another shape.

        Args:
            layout: the table as it was opened.
            deadline: when the answer must be there, on the monotonic clock.
            whole: None, too, while a model is being loaded into it.

        Raises:
            DatabaseError: Redis failed.
        """
        about = Call(layout.slot, "HMGET", layout.about, "dim", "num_partitions", _LOADED)
        marks = [Call(partition.slot, "GET", partition.mark) for partition in layout.partitions]
        self._nodes.run([about, *marks], deadline)
        dim, partitions, loaded = about.reply
        if (dim, partitions) != (b"%d" % layout.dim, b"%d" % len(layout.partitions)):
            return None
        note = _parse_note(loaded, layout)
        if whole and note is not None and note.rows_done < note.rows:
            return None
        found = [mark.reply for mark in marks]
        return found if all(found) else None

    def tags(self) -> list[str]:
        """Tags of all tables, sorted."""
        return sorted({tag for key in self._nodes.keys(ANY_KEY) if (tag := tag_of(key)) is not None})

    def drop(self, tag: str) -> None:
        """Remove every key of a table, except the lease of a process that is about to load it.

        The marks go first, so that nobody takes vectors that go after them for absent; the table's own hash goes last.
        """
        layout = RedisLayout.of(tag, 1, self._num_partitions)
        about = self._about(layout)
        if about:
            partitions = max(self._num_partitions, int(about.get(b"num_partitions", 0)))
        else:
            numbers = (partition_number(key) for key in self._nodes.keys(b"hps_et{%b/p*}?" % tag.encode()))
            partitions = max(numbers, default=-1) + 1
        layout = RedisLayout.of(tag, 1, partitions)
        for kind in ("mark", "uses", "values"):
            # One key a command, one kind at a time: the keys of a slot that is being moved may be on two nodes.
            self._nodes.run([Call(part.slot, "UNLINK", getattr(part, kind)) for part in layout.partitions])
        self._nodes.ask(layout.slot, "UNLINK", layout.about)

    def note(self, layout: RedisLayout) -> LoadNote | None:
        """Which model was loaded, and how far; None if none was.

        Raises:
            DatabaseCorruptError: the note cannot be read.
        """
        return _parse_note(self._nodes.ask(layout.slot, "HGET", layout.about, _LOADED), layout)

    def write_note(self, layout: RedisLayout, note: LoadNote) -> None:
        """Remember which model was loaded, and how far."""
        self._nodes.ask(layout.slot, "HSET", layout.about, _LOADED, json.dumps(asdict(note)))

    def _about(self, layout: RedisLayout) -> dict[bytes, bytes]:
        flat = self._nodes.ask(layout.slot, "HGETALL", layout.about)
        return dict(zip(flat[::2], flat[1::2], strict=True))

    def _mark(self, layout: RedisLayout) -> list[bytes]:
        calls: list[Call] = []
        for partition in layout.partitions:
            calls.append(Call(partition.slot, "SET", partition.mark, secrets.token_hex(8), "NX"))
            calls.append(Call(partition.slot, "GET", partition.mark))
        self._nodes.run(calls)
        return [call.reply or b"" for call in calls[1::2]]

    def _check_partitions(self, layout: RedisLayout, partitions: int) -> None:
        if partitions != len(layout.partitions):
            raise DatabaseError(
                f"redis: opening table {layout.tag}: got num_partitions {len(layout.partitions)}, expected {partitions}, with "
                f"which it was written; set num_partitions to {partitions}, or drop the table"
            )

    def _check_foreign(self, layout: RedisLayout) -> None:
        """Refuse another number of partitions, or another width, of a table that another program, as HugeCTR, wrote."""
        keys = [key for key in self._nodes.keys(b"hps_et{%b/p*}v" % layout.tag.encode()) if tag_of(key) == layout.tag]
        if not keys:
            return
        _log.info("Table: %s; %d partitions of it are in Redis and are used as they are.", layout.tag, len(keys))
        highest = max(map(partition_number, keys)) + 1
        if highest > len(layout.partitions):
            self._check_partitions(layout, highest)
        calls = [Call(partition.slot, "HSCAN", partition.values, 0, "COUNT", 1) for partition in layout.partitions]
        self._nodes.run(calls)
        for call in calls:
            row = call.reply[1][:2]
            if row and len(row[1]) != 4 * layout.dim:
                raise TableWidthError(
                    f"redis: opening table {layout.tag}: got vectors of {layout.dim} elements ({4 * layout.dim} bytes), "
                    f"expected ones of {len(row[1])} bytes, which it holds; drop the table first, or correct the width"
                )


def digest(marks: list[bytes]) -> str:
    """The marks of all partitions, shortened."""
    return hashlib.blake2b(b"".join(marks), digest_size=8).hexdigest()


def _parse_note(text: bytes | None, layout: RedisLayout) -> LoadNote | None:
    if text is None:
        return None
    try:
        return LoadNote(**json.loads(text))
    except (ValueError, TypeError) as error:
        raise DatabaseCorruptError(
            f"redis: table {layout.tag}: its note of a load is {text[:80]!r} ({error}); drop the table and load it again"
        ) from error
