"""The mark of a partition, and the rules by which processes share it. The rules are pure functions; tests check all cases.

A mark is one string, `<incarnation> <generation> <base> <writers>`, that is compared and replaced as a whole:

- *incarnation*: another one wherever rows were dropped or lost. Rows that were read before a mark of the same incarnation lay
  there all the time.
- *generation*: made by the one process that writes under it. Whoever else is to write makes another one first, and so does a
  process of which a write failed. What is still on its way under the older one is then refused.
- *base*: which model the rows come from; `-` where nobody knows, `~` while they are being loaded.
- *writers*: `-`, or tokens of the processes that modified the table online, separated by commas; `*` stands for those without a
  database below, `*s` for those of them that follow a log of updates. Where there is one, only that process promotes, and only
  it trusts rows whose writers lack its token: it never modified the table. Where `*s` is one, whoever writes a row writes its
  place in the order of all changes, too.
"""

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from hps.stores.base import PersistentDatabase

UNKNOWN: Final = "-"
LOADING: Final = "~"
NOBODY_BELOW: Final = "*"
FOLLOWING: Final = "*s"
MOST_WRITERS: Final = 16
"""Tokens in a mark. Whose token is forgotten empties the partition when it looks, and enters itself again."""

_MARK: Final = re.compile(rb"(\w+) (\w+) (-|~|\w+) (-|[\w*]+(?:,[\w*]+)*)")
Fresh = Callable[[], str]
"""Makes a text that was never in a mark."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A mark, taken apart. *Immutable.*"""

    incarnation: str
    generation: str
    base: str = UNKNOWN
    writers: tuple[str, ...] = ()

    @property
    def text(self) -> bytes:
        return f"{self.incarnation} {self.generation} {self.base} {','.join(self.writers) or '-'}".encode()


def parse(text: bytes | None) -> Mark | None:
    """The mark with this text; None where there is none, or one of an older version."""
    found = _MARK.fullmatch(text or b"")
    if found is None:
        return None
    incarnation, generation, base, writers = (part.decode() for part in found.groups())
    return Mark(incarnation, generation, base, () if writers == "-" else tuple(writers.split(",")))


def base_of(content: str) -> str:
    """The base that stands for a model: for the checksum of its rows, or for its files."""
    return hashlib.blake2b(content.encode(), digest_size=8).hexdigest()


@dataclass(frozen=True, slots=True)
class Process:
    """What a process is to a table. *Immutable.*

    Attributes:
        base: of the rows in the database below; None where there is none.
        alias: the base that a load of the same files leaves.
        token: by which its modifications are known; None if it never modified the table.
        previous: the token that it had before it was started; what it wrote then is still there where that one is.
        passive: the database below is read only, and was modified.
    """

    base: str | None = None
    alias: str = ""
    token: str | None = NOBODY_BELOW
    previous: str | None = None
    passive: bool = False


def opened(mark: Mark | None, me: Process, fresh: Fresh) -> tuple[Mark, bool] | None:
    """What a process that is about to use a partition makes of its mark, and whether the rows must go first.

    Returns:
        The mark, the same one if nothing is to be changed; None if the process may not use the partition.
    """
    if me.base is None:
        if mark is None:
            return Mark(fresh(), fresh()), False
        return None if mark.base == LOADING else (mark, False)
    if mark is None:  # rows without a mark are HugeCTR's
        return Mark(fresh(), fresh(), me.base, (me.token,) if me.token else ()), bool(me.token) or me.passive
    foreign = mark.base == UNKNOWN and not mark.writers
    if not foreign and mark.base not in (me.base, me.alias):
        return None
    if me.token is None or me.token in mark.writers:
        return (mark if mark.base == me.base else replace(mark, generation=fresh(), base=me.base)), False
    if me.previous is not None and me.previous in mark.writers:
        writers = tuple(me.token if writer == me.previous else writer for writer in mark.writers)
        return Mark(mark.incarnation, fresh(), me.base, writers), False
    return Mark(fresh(), fresh(), me.base, _with(mark.writers, me.token)), True


def rows_lost(mark: Mark | None, known: Mark | None) -> bool:
    """Whether a process with nothing below lost the rows of a partition, which it last used under the mark `known`, if any.

    A table that another process opened since, and that nobody has loaded or modified yet, is not an empty one.
    """
    if mark is None:
        return True
    made_anew = known is None or mark.incarnation != known.incarnation
    return made_anew and mark.base == UNKNOWN and not mark.writers


def taken(mark: Mark, me: Process, fresh: Fresh) -> Mark:
    """The mark under which a process may write to a partition that it uses; the rows stay."""
    writers = mark.writers if me.token is None or mark.base == LOADING else _with(mark.writers, me.token)
    return replace(mark, generation=fresh(), writers=writers)


def alone(mark: Mark, me: Process) -> bool:
    """Whether nobody else has modified the table. If so, what the database below has is the latest."""
    return mark.writers in ((), (me.token,))


def may_promote(mark: Mark, me: Process) -> bool:
    """Whether vectors of the database below may be added."""
    return not me.passive and mark.base != LOADING and alone(mark, me)


def ordered(mark: Mark) -> bool:
    """Whether each row's place in the order of changes is kept beside it. It stays with the incarnation."""
    return FOLLOWING in mark.writers


def counts(mark: Mark | None, me: Process, known: Mark) -> bool:
    """Whether rows count that were read under the mark `known`, and before `mark` was seen."""
    if mark is None or mark.incarnation != known.incarnation:
        return False
    if me.base is None:
        return True
    return opened(mark, me, lambda: "") == (mark, False)


def begun(mark: Mark | None, fresh: Fresh) -> Mark:
    """The mark while a process loads model files; rows that nobody recorded stay. Their order goes: the log is read again."""
    return Mark(mark.incarnation if mark and not ordered(mark) else fresh(), fresh(), LOADING)


def loaded(mark: Mark, base: str, fresh: Fresh) -> Mark:
    """The mark once they are loaded."""
    return replace(mark, generation=fresh(), base=base)


def loadable(mark: Mark | None) -> bool:
    """Whether files may be loaded over the rows: none of them is newer, as far as a database below knows."""
    return mark is None or set(mark.writers) <= {NOBODY_BELOW, FOLLOWING}


def _with(writers: tuple[str, ...], token: str) -> tuple[str, ...]:
    return writers if token in writers else (*writers[1 - MOST_WRITERS :], token)


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
