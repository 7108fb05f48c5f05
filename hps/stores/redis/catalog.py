"""The tables in Redis: creates, finds, checks and drops them."""

import hashlib
import json
import logging
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Final

from hps.errors import DatabaseCorruptError, DatabaseError, TableWidthError, UnknownTableError
from hps.stores.base import LOAD_ADVICE, LoadRecord, LogPosition, Partition
from hps.stores.redis.layout import ANY_KEY, KeyPartition, RedisLayout, partition_number, tag_of
from hps.stores.redis.marks import Mark, Process, opened, parse, rows_lost
from hps.stores.redis.nodes import RedisNodes
from hps.stores.redis.requests import Call

_log = logging.getLogger(__name__)
_LOADED: Final = b"loaded"
_LOADED_AT: Final = b"loaded at"
_LOG: Final = b"log "
_ATTEMPTS: Final = 8
# Replaces an unchanged mark, and drops the named keys of its partition. The old mark is dropped with them: if the SET is
# refused, by a full Dragonfly or for lack of a right, no mark must turn missing rows into absent ones.
_CHANGE: Final = """
local mark = redis.call('get', KEYS[1]) or ''
if mark ~= ARGV[1] then return mark end
if KEYS[2] then redis.call('unlink', unpack(KEYS)) end
redis.call('set', KEYS[1], ARGV[2])
return ARGV[2]
"""
# Writes into the hash of a table unless the table was dropped.
_WRITE_POSITIONS: Final = """
if not redis.call('hget', KEYS[1], 'dim') then return 0 end
redis.call('hset', KEYS[1], unpack(ARGV))
return 1
"""


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """The progress of a load, in the field `loaded_mark` of the table's hash. *Immutable.*

    Attributes:
        rows_done: leading rows of the files that are loaded.
        rows: leading rows to load.
        marks: digest of the incarnations of the loaded partitions; if they differ, rows were lost.
    """

    fingerprint: str
    rows_done: int
    rows: int
    marks: str


class Catalog:
    """The tables of one Redis. *Thread-safe.* New tables have `num_partitions`."""

    def __init__(self, nodes: RedisNodes, num_partitions: int) -> None:
        self._nodes = nodes
        self._num_partitions = num_partitions

    def open(self, layout: RedisLayout) -> None:
        """Create a table if it does not exist; its marks are created by `prepare_marks`.

        Raises:
            TableWidthError: it holds vectors of another width.
            DatabaseError: it has another number of partitions, or Redis failed.
        """
        self.check(layout)
        expected = {"dim": layout.dim, "num_partitions": len(layout.partitions)}
        self._nodes.run([Call(layout.slot, "HSETNX", layout.about, name, value) for name, value in expected.items()])
        self.check(layout)

    def check(self, layout: RedisLayout) -> None:
        """Refuse an existing table that `open` would refuse. Nothing is written."""
        about = self._about(layout)
        if not about:
            self._check_foreign(layout)
            return
        stored = int(about.get(b"dim", layout.dim))  # missing while the table is emptied
        if stored != layout.dim:
            raise TableWidthError(
                f"redis: opening table {layout.tag}: got vectors of {layout.dim} elements, expected {stored}, as stored; "
                f"give the table another name, or: {LOAD_ADVICE}"
            )
        self._check_partitions(layout, int(about.get(b"num_partitions", len(layout.partitions))))

    def marks(self, layout: RedisLayout, deadline: float | None = None) -> list[bytes] | None:
        """Read the marks of the partitions, empty if missing; None if the table does not exist."""
        about = Call(layout.slot, "HMGET", layout.about, "dim", "num_partitions")
        marks = [Call(partition.slot, "GET", partition.mark) for partition in layout.partitions]
        self._nodes.run([about, *marks], deadline)
        if about.reply != [b"%d" % layout.dim, b"%d" % len(layout.partitions)]:
            return None
        return [mark.reply or b"" for mark in marks]

    def change(
        self, changes: Sequence[tuple[KeyPartition, bytes, Mark]], deadline: float | None = None, *, empty: Sequence[bool] = ()
    ) -> list[bytes]:
        """Replace unchanged marks, and empty chosen partitions; return the current marks.

        The order of changes is removed with an incarnation.

        Args:
            changes: for each partition, its known mark and the new one.
            empty: which of the partitions to empty; none by default.
        """
        calls = []
        for (partition, before, after), drops in zip(changes, empty or [False] * len(changes), strict=True):
            mark, keys = parse(before), [partition.mark]
            keys += [partition.values, partition.uses] if drops else []
            keys += [] if mark and mark.incarnation == after.incarnation else [partition.sequences]
            calls.append(Call(partition.slot, "EVAL", _CHANGE, len(keys), *keys, before, after.text))
        self._nodes.run(calls, deadline)
        return [call.reply for call in calls]

    def prepare_marks(
        self, layout: RedisLayout, me: Process, deadline: float | None = None, *, known: Sequence[bytes] | None
    ) -> list[bytes] | None:
        """Read the marks of all partitions, and change them so that a process may use them.

        Args:
            known: the marks under which it last used them, empty if none. None opens the table: without a database below,
                missing marks are created, and missing rows count as absent.

        Returns:
            The marks; None if the table holds another model, or is being loaded.

        Raises:
            UnknownTableError: the table does not exist, or lost rows.
        """
        for _ in range(_ATTEMPTS):
            texts = self.marks(layout, deadline)
            if texts is None:
                raise lost(layout)
            parsed = [parse(text) for text in texts]
            if known is not None and me.base is None and any(map(rows_lost, parsed, map(parse, known))):
                raise lost(layout)
            steps = [opened(mark, me, fresh) for mark in parsed]
            changes, empty = [], []
            for partition, text, step in zip(layout.partitions, texts, steps, strict=True):
                if step is None:
                    return None
                if step[0].text != text:
                    changes.append((partition, text, step[0]))
                    empty.append(step[1])
            if not changes:
                return texts
            self.change(changes, deadline, empty=empty)
        raise DatabaseError(f"redis: table {layout.tag}: other processes changed its marks {_ATTEMPTS} times meanwhile")

    def tags(self) -> list[str]:
        return sorted({tag for key in self._nodes.keys(ANY_KEY) if (tag := tag_of(key)) is not None})

    def drop(self, tag: str) -> None:
        """Remove every key of a table, except the lease of a process that is about to load it."""
        layout = RedisLayout.of(tag, 1, self._num_partitions)
        about = self._about(layout)
        if b"num_partitions" in about:
            partitions = max(self._num_partitions, int(about[b"num_partitions"]))
        else:
            numbers = (partition_number(key) for key in self._nodes.keys(b"hps_et{%b/p*}?" % tag.encode()))
            partitions = max(numbers, default=-1) + 1
        layout = RedisLayout.of(tag, 1, partitions)
        # Marks first, so that vectors removed after them never count as absent; the table's own hash last. One key per command
        # and one kind at a time, since the keys of a slot that is being moved may be on two nodes.
        for kind in ("mark", "sequences", "uses", "values"):
            self._nodes.run([Call(part.slot, "UNLINK", getattr(part, kind)) for part in layout.partitions])
        self._nodes.execute(layout.slot, "UNLINK", layout.about)

    def load_progress(self, layout: RedisLayout) -> LoadProgress | None:
        """Read the progress of the last load; None if there was none."""
        return _parse_progress(self._nodes.execute(layout.slot, "HGET", layout.about, _LOADED), layout)

    def write_load_progress(self, layout: RedisLayout, progress: LoadProgress) -> None:
        self._nodes.execute(layout.slot, "HSET", layout.about, _LOADED, json.dumps(asdict(progress)))

    def write_load_time(self, layout: RedisLayout) -> None:
        seconds, microseconds = self._nodes.execute(layout.slot, "TIME")
        self._nodes.execute(layout.slot, "HSET", layout.about, _LOADED_AT, 1_000_000 * int(seconds) + int(microseconds))

    def load_record(self, tag: str) -> LoadRecord | None:
        """Return which model files a table, opened or not, was loaded from; None if unknown, or if rows were lost since."""
        about = self._about(RedisLayout.of(tag, 1, self._num_partitions))
        if not (about.get(b"dim") and about.get(b"num_partitions")):
            return None
        layout = RedisLayout.of(tag, int(about[b"dim"]), int(about[b"num_partitions"]))
        progress, marks = _parse_progress(about.get(_LOADED), layout), self.marks(layout) or []
        if progress is None or progress.marks != digest(marks):
            return None
        modified = any(mark is not None and mark.writers for mark in map(parse, marks))
        loaded_at_us = int(about.get(_LOADED_AT, 0))
        return LoadRecord(progress.fingerprint, progress.rows_done, progress.rows, modified, loaded_at_us=loaded_at_us)

    def positions(self, layout: RedisLayout, marks: list[bytes]) -> dict[Partition, LogPosition]:
        """Read how far each partition of the log was applied; none if the incarnations show that rows were lost since."""
        stored = {
            name[len(_LOG) :].decode(): json.loads(text) for name, text in self._about(layout).items() if name.startswith(_LOG)
        }
        current = digest(marks)
        return {
            Partition(name): LogPosition(position, sequence)
            for name, (position, sequence, marked) in stored.items()
            if marked == current
        }

    def write_positions(self, layout: RedisLayout, marks: list[bytes], positions: Mapping[Partition, LogPosition]) -> None:
        words = [
            word
            for name, at in positions.items()
            for word in (_LOG + name.encode(), json.dumps([at.position, at.sequence, digest(marks)]))
        ]
        if not self._nodes.execute(layout.slot, "EVAL", _WRITE_POSITIONS, 1, layout.about, *words):
            raise lost(layout)

    def _about(self, layout: RedisLayout) -> dict[bytes, bytes]:
        flat = self._nodes.execute(layout.slot, "HGETALL", layout.about)
        return dict(zip(flat[::2], flat[1::2], strict=True))

    def _check_partitions(self, layout: RedisLayout, partitions: int) -> None:
        if partitions != len(layout.partitions):
            raise DatabaseError(
                f"redis: opening table {layout.tag}: got num_partitions {len(layout.partitions)}, expected {partitions}, as "
                f"written; set num_partitions to {partitions}, or drop the table"
            )

    def _check_foreign(self, layout: RedisLayout) -> None:
        """Check the partitions and the width of a table that another program, such as HugeCTR, wrote."""
        keys = [key for key in self._nodes.keys(b"hps_et{%b/p*}v" % layout.tag.encode()) if tag_of(key) == layout.tag]
        if not keys:
            return
        _log.info("Table: %s; %d of its partitions are in Redis and are used.", layout.tag, len(keys))
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
                    f"expected {len(row[1])} bytes, as stored; correct the width, or: {LOAD_ADVICE}"
                )


def digest(texts: list[bytes]) -> str:
    incarnations = "".join(mark.incarnation if mark else "-" for mark in map(parse, texts))
    return hashlib.blake2b(incarnations.encode(), digest_size=8).hexdigest()


def fresh() -> str:
    """Create a text that was never in a mark."""
    return secrets.token_hex(8)


def lost(layout: RedisLayout) -> UnknownTableError:
    """Build the error for a table that was dropped or lost its rows."""
    return UnknownTableError(
        f"redis: table {layout.tag} was lost after it was opened: Redis was emptied or restarted without its data, or another "
        "process dropped the table; open it again, and load it"
    )


def _parse_progress(text: bytes | None, layout: RedisLayout) -> LoadProgress | None:
    if text is None:
        return None
    try:
        return LoadProgress(**json.loads(text))
    except (ValueError, TypeError) as error:
        raise DatabaseCorruptError(
            f"redis: table {layout.tag}: its record of a load is {text[:80]!r} ({error}). {LOAD_ADVICE}"
        ) from error
